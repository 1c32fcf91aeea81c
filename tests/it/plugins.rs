//! Passes, formats, metrics, data sources and stores that a program registers.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;

use compress::pipeline::verify;
use compress::plugin::{self, Format, WeightValues};
use compress::prelude::*;
use compress_core::work::{Cancel, Silent, Work};

#[allow(dead_code)]
#[path = "../../examples/plugins.rs"]
mod example;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/build_script/model");

#[test]
fn the_example_uses_each_kind() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    let report = example::run(Path::new(MODEL), &output).unwrap();
    assert_eq!(report.passes.iter().map(|pass| (pass.name.as_str(), pass.tensors_changed)).collect::<Vec<_>>(), [("normalize-rows", 2), ("cast", 4)]);
    let accuracy = report.accuracy.as_ref().unwrap();
    assert_eq!((accuracy.metric.as_deref(), accuracy.samples, accuracy.data.as_str()), (Some("top-two"), 280, "stripes"));
    let [before, after] = [&accuracy.before, &accuracy.after].map(|values| *values.values().next().unwrap());
    assert!((0.0..=1.0).contains(&before) && (0.0..=1.0).contains(&after), "{before} {after}");

    // The largest value of each row of a matrix is 1, and all values are exact in bf16.
    let raw = std::fs::read(output.join("weights.raw")).unwrap();
    let values = |weight: &str, count: usize| {
        let mut values = vec![0.0; count];
        Format::read(&example::raw(), &output.join("weights.raw"), weight, 0, &mut values).unwrap();
        values
    };
    let rows = values("fc1.weight", 48 * 784);
    for row in rows.chunks(784) {
        assert_eq!(row.iter().fold(0f32, |largest, value| largest.max(value.abs())), 1.0);
    }
    assert!(rows.iter().all(|value| value.to_bits() & 0xffff == 0));
    assert_eq!(raw.len() as u64, report.outputs[0].bytes);
    let (silent, cancel) = (Silent, Cancel::default());
    let checks = verify(&output, &Work { threads: 1, progress: &silent, cancel: &cancel }).unwrap();
    assert!(checks.iter().all(|check| check.ok) && checks.iter().any(|check| check.path == "weights.raw"), "{checks:?}");
}

/// Stores a value that differs from the computed one in its last bit.
#[derive(Debug)]
struct Inexact;

impl Format for Inexact {
    fn file(&self) -> String {
        "inexact".into()
    }

    fn size(&self, _weights: &[WeightValues]) -> compress::Result<u64> {
        Ok(1)
    }

    fn write(&self, _weights: &[WeightValues], file: &mut dyn Write) -> compress::Result<()> {
        file.write_all(b"x").map_err(compress::Error::io("write", Path::new("inexact")))
    }

    fn read(&self, _file: &Path, name: &str, start: usize, values: &mut [f32]) -> compress::Result<()> {
        let model = Model::open(MODEL)?;
        let all = model.weights.get(name)?.floats(name)?;
        values.copy_from_slice(&all[start..start + values.len()]);
        if name == "fc2.weight" {
            values[3] = f32::from_bits(values[3].to_bits() ^ 1);
        }
        Ok(())
    }
}

#[test]
fn files_of_registered_formats_are_verified() {
    plugin::register_format("inexact", |_| Ok(Inexact)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    let export = compress::export::Export::from_name("inexact").unwrap();
    let error = Pipeline::builder().export(export).build().unwrap().run(Model::open(MODEL).unwrap(), &output).unwrap_err().to_string();
    assert!(error.contains("value 3 of `fc2.weight`"), "{error}");
    assert!(!output.exists());
}

#[test]
fn names_are_unique_and_unknown_names_are_refused() {
    assert!(plugin::register_format("gguf", |_| Ok(Inexact)).unwrap_err().to_string().contains("already exists"));
    for (text, reason) in
        [("{ model: m, passes: [none-such] }", "unknown name `none-such`"), ("{ model: m, export: [none-such: {}] }", "unknown name `none-such`")]
    {
        let error = Recipe::parse(text, Path::new("recipe.yaml")).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

//! Every family's outputs against PyTorch's, on the models that `scripts/goldens-models` made.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress::exec::{Executor, Inputs, Parameters, Residence};
use compress::ir::{Graph, check};
use compress::work::{Cancel, Silent, Work};

const TOLERANCE: f32 = 1e-4;

fn differences(folder: &Path, golden: &str) -> compress::Result<Vec<(String, f32)>> {
    let model = Model::open(folder)?;
    let graph = model.graph()?;
    check(&graph)?;
    let text = graph.to_string();
    assert!(text.parse::<Graph>()?.to_string() == text, "the text form of {}", folder.display());
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work)?;
    let golden = candle_core::safetensors::load(folder.join(golden), &Device::Cpu).unwrap();
    let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
    let outputs = Executor::new(&graph, parameters, Device::Cpu).run(&inputs)?;
    let mut found = Vec::new();
    for (name, expected) in golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("out/")?, t))) {
        // transformers leaves two axes of one element behind the pooled channels of a ResNet.
        let expected = &if expected.rank() == 4 && name == "pooler_output" { expected.flatten_from(1).unwrap() } else { expected.clone() };
        let Some(ours) = outputs.get(name).filter(|t| t.dims() == expected.dims()) else {
            found.push((format!("{name}, which is not among {:?}", outputs.iter().map(|(n, t)| (n, t.dims())).collect::<Vec<_>>()), f32::NAN));
            continue;
        };
        let worst: f32 = distance(ours, expected, golden.get("in/attention_mask"));
        found.push((name.to_owned(), worst));
    }
    Ok(found)
}

/// Largest difference over the tokens that are no padding.
fn distance(ours: &Tensor, expected: &Tensor, mask: Option<&Tensor>) -> f32 {
    let mut difference = (ours - expected).unwrap().abs().unwrap();
    if let Some(mask) = mask.filter(|m| difference.rank() == 3 && m.dims() == &difference.dims()[..2]) {
        difference = difference.broadcast_mul(&mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap();
    }
    difference.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// The same model with the configuration that transformers 4 wrote, where there is one.
fn with_older_config(folder: &Path) -> Option<tempfile::TempDir> {
    let config = folder.join("config-4.json");
    config.is_file().then(|| {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(config, copy.path().join("config.json")).unwrap();
        for name in ["model.safetensors", "golden.safetensors"] {
            std::os::unix::fs::symlink(folder.join(name), copy.path().join(name)).unwrap();
        }
        copy
    })
}

#[test]
fn every_family_computes_what_pytorch_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 30, "the goldens are missing");
    let mut failures = Vec::new();
    for name in &names {
        let place = folder.join(name);
        let older = with_older_config(&place);
        let mut runs = vec![(place.as_path(), "golden.safetensors")];
        runs.extend(place.join("golden-short.safetensors").is_file().then_some((place.as_path(), "golden-short.safetensors")));
        runs.extend(older.as_ref().map(|folder| (folder.path(), "golden.safetensors")));
        for (place, golden) in runs {
            match differences(place, golden) {
                Ok(found) => {
                    assert!(!found.is_empty(), "{name} has no outputs");
                    failures.extend(
                        found
                            .into_iter()
                            .filter(|(_, worst)| *worst > TOLERANCE || worst.is_nan())
                            .map(|(output, worst)| format!("{name} {golden} {output}: {worst:e}")),
                    );
                }
                Err(e) => failures.push(format!("{name}: {e}")),
            }
        }
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), names.len(), failures.join("\n"));
}

//! Quantized weights whose codes a file contains.

use compress::export::{FileType, Gguf};
use compress::pass::Quantize;
use compress::{Model, Pipeline};
use serde_json::json;

use super::importance::{Networks, tiny};

/// The values in the file are those of the quantized model, up to the rounding of scales and minima to 16
/// bits, also of projections whose rows are permuted, and of experts.
#[test]
fn codes_of_quantized_weights_are_kept() {
    for (networks, scheme, group_size, file_type) in [
        (Networks::Plain, "W4A16", 32, FileType::Q4_0),
        (Networks::Plain, "W4A16-ASYM", 64, FileType::Q4_1),
        (Networks::Plain, "W3A16-ASYM", 32, FileType::Q4_0),
        (Networks::Apart, "W4A16", -1, FileType::Q5_0),
        (Networks::Plain, "W8A16", 64, FileType::Q8_0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), networks, 64);
        let pass: Quantize = serde_json::from_value(json!({ "scheme": scheme, "group_size": group_size })).unwrap();
        let builder = || Pipeline::builder().pass(pass.clone()).measure(false);
        builder().build().unwrap().run(model.clone(), folder.path().join("codes")).unwrap();
        let report = builder().export(Gguf { file_type, ..Gguf::default() }).build().unwrap().run(model, folder.path().join("gguf")).unwrap();
        let notes = &report.notes;
        assert!(notes.iter().any(|note| note.contains("written with the same codes")), "{scheme}: {notes:?}");
        assert!(!notes.iter().any(|note| note.contains("dequantized")), "{scheme}: {notes:?}");
        let [expected, found] = ["codes", "gguf/model.gguf"].map(|path| Model::open(folder.path().join(path)).unwrap());
        let mut count = 0;
        for (name, weight) in &expected.weights.by_name {
            let Some(scales) = weight.scales().unwrap() else { continue };
            let (a, b) = (weight.floats(name).unwrap(), found.weights.get(name).unwrap().floats(name).unwrap());
            let is_close = |(at, (a, b)): (usize, (&f32, &f32))| (a - b).abs() <= (a.abs() + 16.0 * scales.scales[at / scales.run]) / 2048.0;
            assert!(a.iter().zip(&b).enumerate().all(is_close), "{scheme}: {name}");
            count += 1;
        }
        assert!(count >= 14, "{scheme}: {count}");
    }
}

/// Types with other scales, and groups that are not whole blocks, are searched as for floats.
#[test]
fn other_types_quantize_again() {
    for (group_size, file_type) in [(64, FileType::IQ4_NL), (16, FileType::Q4_0)] {
        let folder = tempfile::tempdir().unwrap();
        let pass: Quantize = serde_json::from_value(json!({ "scheme": "W4A16", "group_size": group_size })).unwrap();
        let pipeline = Pipeline::builder().pass(pass).export(Gguf { file_type, ..Gguf::default() }).measure(false).build().unwrap();
        let notes = pipeline.run(tiny(folder.path(), Networks::Plain, 64), folder.path().join("out")).unwrap().notes;
        assert!(notes.iter().any(|note| note.contains("quantized twice")), "{notes:?}");
        assert!(!notes.iter().any(|note| note.contains("the same codes")), "{notes:?}");
    }
}

//! Properties: reports match the files, and `verify` detects changed files.

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::given::{FLOATS, Values, config, model, shape};
use crate::common::{DType, Desk, Output, Tensor, Tensors, contents, pipeline, read, work};
use compress::export::{ByteSize, Layout, Safetensors};
use compress::pass::{Amount, PruneUnstructured, QuantizeDynamic, Scope, Step};
use compress::pipeline::verify;

const LAYOUTS: [Layout; 3] = [Layout::Auto, Layout::Dense, Layout::Sparse];

/// The values of a weight, dequantized if necessary.
fn values(tensors: &Tensors, name: &str) -> Vec<f64> {
    let plain = tensors[name].values();
    let Some(scale) = tensors.get(&format!("{name}_scale")) else { return plain };
    let scales = scale.values();
    let zeros = tensors.get(&format!("{name}_zero_point")).map_or(vec![0.0; scales.len()], Tensor::values);
    let run = plain.len() / scales.len();
    plain.iter().enumerate().map(|(i, q)| (q - zeros[i / run]) * scales[i / run]).collect()
}

fn zeros(tensors: &Tensors, name: &str) -> u64 {
    values(tensors, name).iter().filter(|v| **v == 0.0).count() as u64
}

/// Signal-to-noise ratio; `None` if squares exceed the range of f32.
fn decibels(before: &[f64], after: &[f64]) -> Option<Option<f64>> {
    let errors = || before.iter().zip(after).map(|(x, y)| x - y);
    let usual = before.iter().copied().chain(errors()).all(|v| v == 0.0 || (1e-15..1e15).contains(&v.abs()));
    let (signal, noise) = (before.iter().map(|v| v * v).sum::<f64>(), errors().map(|v| v * v).sum::<f64>());
    usual.then(|| (signal > 0.0 && noise > 0.0).then(|| 10.0 * (signal / noise).log10()))
}

/// Compares a report with the files of the folder. `plain` is the same output without sparse tensors.
fn check(before: &Tensors, output: &Output, plain: &Tensors) {
    let (written, report) = (read(&output.path), &output.report);
    let parameters = |tensors: &Tensors| before.keys().map(|name| tensors[name].shape.iter().product::<usize>() as u64).sum::<u64>();
    let files: Vec<(String, Vec<u8>)> = contents(&output.path).into_iter().filter(|(name, _)| name.ends_with(".safetensors")).collect();
    let (size, all_zeros) = (&report.size, |tensors: &Tensors| before.keys().map(|name| zeros(tensors, name)).sum::<u64>());
    assert_eq!(size.before.parameters, parameters(before));
    assert_eq!(size.before.nonzero, parameters(before) - all_zeros(before));
    assert_eq!(size.before.tensors, before.len());
    assert_eq!(size.after.parameters, parameters(plain));
    assert_eq!(size.after.nonzero, parameters(plain) - all_zeros(plain));
    assert_eq!(size.after.tensors, written.len());
    assert_eq!(size.after.bytes, files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
    assert_eq!(report.layers.len(), before.len());
    for layer in &report.layers {
        let name = &layer.name;
        let own = |part: &&String| part.strip_prefix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '_']));
        assert_eq!(layer.shape, before[name].shape, "{name}");
        assert_eq!(layer.zeros, zeros(plain, name), "{name}: zeros");
        assert_eq!(layer.bytes_before, before[name].bytes.len() as u64, "{name}: bytes before");
        assert_eq!(layer.bytes_after, written.keys().filter(own).map(|part| written[part].bytes.len() as u64).sum::<u64>(), "{name}: bytes after");
        match decibels(&values(before, name), &values(plain, name)) {
            // Less noise is below the precision of f32.
            Some(Some(expected)) if expected > 100.0 => assert!(layer.sqnr_db.is_none_or(|db| db > 99.0)),
            Some(Some(expected)) => assert!(layer.sqnr_db.is_some_and(|db| (db - expected).abs() < 1e-2), "{name}: {:?} is not {expected} dB", layer.sqnr_db),
            Some(None) => assert_eq!(layer.sqnr_db, None, "{name}"),
            None => assert!(layer.sqnr_db.is_none_or(f64::is_finite), "{name}: {:?}", layer.sqnr_db),
        }
    }
    for file in &report.outputs {
        let bytes = std::fs::read(output.path.join(&file.path)).unwrap();
        assert_eq!((file.bytes, &file.blake3), (bytes.len() as u64, &blake3::hash(&bytes).to_string()));
    }
    assert_eq!(std::fs::read_to_string(output.path.join("report.json")).unwrap(), report.to_json());
    assert!(work(|work| verify(&output.path, work)).unwrap().iter().all(|check| check.ok));
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let prune =
        |scope, targets: &str| PruneUnstructured { amount: Some(Amount::fraction(0.5)), scope, targets: vec![targets.parse().unwrap()], ..Default::default() };
    let quantize = |symmetric| QuantizeDynamic { symmetric, targets: vec!["t1".parse().unwrap()], ..Default::default() };
    select(vec![vec![], vec![prune(Scope::Tensor, "*").into()], vec![quantize(true).into()], vec![prune(Scope::Global, "t1").into(), quantize(false).into()]])
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn reports_agree_with_the_files(before in model(&FLOATS, shape(2..=2, 7), Values::Finite, 3..=3), steps in steps(), layout in select(&LAYOUTS[..]), shards in any::<bool>()) {
        let desk = Desk::new();
        let input = desk.weights(&before);
        let shard_size = ByteSize(if shards { 200 } else { u64::MAX });
        let run = |layout| desk.run(&input, pipeline().passes(steps.clone()).export(Safetensors { layout, shard_size })).unwrap();
        let output = run(layout);
        let plain = if layout == Layout::Sparse { read(&run(Layout::Auto).path) } else { read(&output.path) };
        check(&before, &output, &plain);
    }

    #[test]
    fn verify_finds_any_flipped_bit(layout in select(&LAYOUTS[..]), file in any::<Index>(), byte in any::<Index>(), bit in 0..8u32) {
        let desk = Desk::new();
        let format = Safetensors { layout, shard_size: ByteSize(30_000) };
        let output = desk.run(&desk.pico(DType::BF16, 1), pipeline().pass(PruneUnstructured::default()).pass(QuantizeDynamic::default()).export(format)).unwrap();
        let failed = || work(|work| verify(&output.path, work)).unwrap().into_iter().filter(|check| !check.ok).map(|check| check.path).collect::<Vec<_>>();
        prop_assert_eq!(failed(), Vec::<String>::new());
        let name = &file.get(&output.report.outputs).path;
        let path = output.path.join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        let place = byte.index(bytes.len());
        bytes[place] ^= 1 << bit;
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(failed().contains(name));
        bytes[place] ^= 1 << bit;
        bytes.pop();
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(failed().contains(name));
        std::fs::write(output.path.join("other.bin"), "of another program").unwrap();
        let skipped = work(|work| verify(&output.path, work)).unwrap().into_iter().filter(|check| check.skipped).map(|check| check.path);
        prop_assert_eq!(skipped.collect::<Vec<_>>(), ["other.bin"]);
        std::fs::remove_file(&path).unwrap();
        prop_assert!(failed().contains(name));
    }
}

#[test]
fn zeros_of_every_type_are_counted() {
    let desk = Desk::new();
    // Zeros are not counted for sub-byte, complex and exponent-only dtypes.
    let left_out = [DType::F4, DType::F6_E2M3, DType::F6_E3M2, DType::C64, DType::F8_E8M0];
    for dtype in super::store::TYPES.into_iter().filter(|dtype| !left_out.contains(dtype)) {
        let bytes = vec![0; dtype.bitsize()];
        let before = Tensors::from([("t".to_owned(), Tensor::new(dtype, &[8], bytes))]);
        let report = desk.run(&desk.weights(&before), pipeline()).unwrap().report;
        assert_eq!((report.layers[0].zeros, report.size.after.nonzero), (8, 0), "{dtype}");
    }
}

#[test]
fn a_tied_weight_that_is_stored_once_counts_once() {
    let desk = Desk::new();
    let input = desk.pico(DType::F32, 1);
    let mut tensors = read(&input);
    let table = Tensor::floats(DType::F32, &[64, 32], &[0.0; 64 * 32]);
    tensors.insert("model.embed_tokens.weight".into(), table.clone());
    tensors.insert("lm_head.weight".into(), table);
    crate::common::write(&input.join("model.safetensors"), &tensors);
    let config = std::fs::read_to_string(input.join("config.json")).unwrap();
    std::fs::write(input.join("config.json"), config.replace("\"tie_word_embeddings\":false", "\"tie_word_embeddings\":true")).unwrap();
    let output = desk.run(&input, pipeline().pass(QuantizeDynamic { embeddings: true, ..Default::default() })).unwrap();
    assert!(!read(&output.path).contains_key("lm_head.weight"));
    let (before, elements) = (&output.report.size.before, |tensors: &Tensors| tensors.values().map(|t| t.bits().len() as u64).sum::<u64>());
    assert_eq!(before.parameters, elements(&tensors));
    assert_eq!(before.nonzero, elements(&tensors) - 2 * 64 * 32);
}

/// Loaders share the integers of the embedding with the head, but not the scales and zero points.
#[test]
fn a_tied_head_has_copies_of_the_scales_and_zero_points_of_the_embedding() {
    for symmetric in [true, false] {
        let desk = Desk::new();
        let input = desk.pico(DType::F32, 1);
        let mut tensors = read(&input);
        tensors.remove("lm_head.weight");
        crate::common::write(&input.join("model.safetensors"), &tensors);
        let config = std::fs::read_to_string(input.join("config.json")).unwrap();
        std::fs::write(input.join("config.json"), config.replace("\"tie_word_embeddings\":false", "\"tie_word_embeddings\":true")).unwrap();
        let pass: QuantizeDynamic = serde_json::from_value(serde_json::json!({ "embeddings": true, "symmetric": symmetric, "activations": "none" })).unwrap();
        let output = desk.run(&input, pipeline().pass(pass)).unwrap();
        let after = read(&output.path);
        assert_eq!(after["lm_head.weight_scale"], after["model.embed_tokens.weight_scale"]);
        assert_eq!(after.get("lm_head.weight_zero_point"), after.get("model.embed_tokens.weight_zero_point"));
        assert_eq!(after.contains_key("lm_head.weight_zero_point"), !symmetric);
        let again = compress::Model::open(&output.path).unwrap();
        assert!(!again.weights.by_name.keys().any(|name| name.starts_with("lm_head")), "{:?}", again.weights.by_name.keys());
    }
}

/// LFM2 has a second key for the tie, which takes precedence.
#[test]
fn both_keys_of_a_tie_are_changed() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/lfm2");
    let desk = Desk::new();
    let mut before = read(&golden);
    before.insert("lm_head.weight".into(), Tensor::floats(DType::F32, &[48, 16], &[0.5; 48 * 16]));
    let input = desk.weights(&before);
    let mut config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(golden.join("config.json")).unwrap()).unwrap();
    config["tie_embedding"] = true.into();
    std::fs::write(input.join("config.json"), config.to_string()).unwrap();
    let pass = PruneUnstructured { targets: vec!["lm_head.weight".parse().unwrap()], ..Default::default() };
    let output = desk.run(&input, pipeline().pass(pass)).unwrap();
    let written: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(output.path.join("config.json")).unwrap()).unwrap();
    assert_eq!((&written["tie_embedding"], &written["tie_word_embeddings"]), (&false.into(), &false.into()));
    assert!(read(&output.path).contains_key("lm_head.weight"));
}

/// transformers 4 would tie it. Its bias has two names, one for each version of transformers.
#[test]
fn a_head_that_differs_from_the_embedding_is_a_separate_weight() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/bert-masked-lm-untied");
    let [table, head, own, shared] =
        ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.bias"];
    let config = std::fs::read_to_string(golden.join("config.json")).unwrap();
    assert!(config.contains("\"tie_word_embeddings\": true"));
    for targets in [&[table][..], &[head], &[table, head]] {
        for stored in [true, false] {
            let desk = Desk::new();
            let mut before = read(&golden);
            if !stored {
                before.remove(own);
            }
            let input = desk.weights(&before);
            std::fs::write(input.join("config.json"), &config).unwrap();
            let pass = PruneUnstructured { targets: targets.iter().map(|name| name.parse().unwrap()).collect(), ..Default::default() };
            let output = desk.run(&input, pipeline().pass(pass)).unwrap();
            let after = read(&output.path);
            assert!(std::fs::read_to_string(output.path.join("config.json")).unwrap().contains("\"tie_word_embeddings\": false"));
            assert!(output.report.notes.iter().any(|note| note.contains("it is stored separately")), "{:?}", output.report.notes);
            for name in [table, head] {
                assert_eq!(after[name] != before[name], targets.contains(&name), "{name} for {targets:?}");
            }
            assert_eq!(after[own], before[if stored { own } else { shared }]);
            assert_eq!(after[shared], after[own]);
        }
    }
    // Weights that no pass changes are written unchanged.
    let desk = Desk::new();
    let input = desk.weights(&read(&golden));
    std::fs::write(input.join("config.json"), &config).unwrap();
    let output = desk.run(&input, pipeline().pass(PruneUnstructured::default())).unwrap();
    assert_eq!(std::fs::read_to_string(output.path.join("config.json")).unwrap(), config);
}

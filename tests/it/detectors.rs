//! Object detectors: sizes of images, and losses of scores that are not a distribution over classes.
#![cfg(feature = "run")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::exec::{Executor, Parameters, Residence};
use serde_json::{Value, json};

use crate::cli::support::{compress, data, ok, read_json};
use crate::common::golden_model;

/// Copies a golden model to `name`, with other values in `config.json`.
fn changed(folder: &Path, golden: &str, name: &str, values: &Value) {
    fs::create_dir(folder.join(name)).unwrap();
    let mut config = read_json(&golden_model(golden).join("config.json"));
    config.as_object_mut().unwrap().extend(values.as_object().unwrap().clone());
    fs::write(folder.join(name).join("config.json"), config.to_string()).unwrap();
    fs::copy(golden_model(golden).join("model.safetensors"), folder.join(name).join("model.safetensors")).unwrap();
}

/// Writes samples of different values to a file.
fn images(folder: &Path, name: &str, shape: [usize; 4], seed: usize) {
    let values = (0..shape.iter().product()).map(|i| ((i * i * 7 + i * seed) % 101) as f32 / 50.0 - 1.0).collect::<Vec<_>>();
    let pixels = Tensor::from_vec(values, &shape, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("pixel_values".to_owned(), pixels)].into(), folder.join(name)).unwrap();
}

/// The encoder adds feature maps of neighboring levels, so that each must be twice as large as the next.
#[test]
fn images_have_sizes_whose_feature_maps_can_be_fused() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (size, is_possible)) in [(json!(64), true), (json!([96, 32]), true), (json!(100), false), (json!([64, 48]), false)].into_iter().enumerate() {
        let name = number.to_string();
        changed(folder.path(), "rt-detr-bottleneck", &name, &json!({ "anchor_image_size": null, "image_size": size }));
        match Model::open(folder.path().join(&name)).unwrap().graph() {
            Ok(_) => assert!(is_possible, "{size}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!is_possible && error.contains("`image_size` specifies images of") && error.contains("multiples of 32"), "{size}: {error}");
            }
        }
    }
}

/// Losses that compare distributions over classes are rejected before models run; those of other values are
/// computed.
#[test]
fn scores_are_not_compared_as_a_distribution() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    changed(folder, "rt-detr-v2", "detector", &json!({}));
    changed(folder, "bert-sequence-classification", "labels", &json!({ "problem_type": "multi_label_classification" }));
    images(folder, "train.safetensors", [8, 3, 32, 64], 3);
    images(folder, "eval.safetensors", [2, 3, 32, 64], 5);
    let ids = Tensor::from_vec((0..48i64).map(|i| i * i % 13 + 1).collect::<Vec<_>>(), (8, 6), &Device::Cpu).unwrap();
    let texts = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&texts.into(), folder.join("texts.safetensors")).unwrap();
    let sigmoids = "the scores of a detector are sigmoids";
    let labels = "config.json has `problem_type` \"multi_label_classification\"";
    for (command, parts) in [
        ("distill detector -o out --teacher detector --train train.safetensors", [sigmoids, "such as `hidden: 1`"]),
        ("distill labels -o out --teacher labels --train texts.safetensors", [labels, "specify a loss of other values, such as `hidden: 1`"]),
        // No loss without a teacher reads other values.
        ("finetune labels -o out --train texts.safetensors --losses hard=1", [labels, "train it with `distill` and a loss of other values"]),
        ("auto detector --for transformers --front f.json --calibration train.safetensors --eval eval.safetensors", [sigmoids, "--for onnxruntime"]),
        ("auto detector --for transformers --plan --calibration train.safetensors --eval eval.safetensors", [sigmoids, "without `--calibration`"]),
        ("auto labels --for transformers --front f.json --calibration texts.safetensors", [labels, "--for onnxruntime"]),
        ("quantize detector -o out --group-size 4 --method gptq --guide loss --calibration train.safetensors", [sigmoids, "remove `guide`"]),
    ] {
        let run = compress(folder, command);
        let is_empty = !folder.join("out").exists() && !folder.join("f.json").exists();
        assert!(run.code == 2 && parts.iter().all(|part| run.stderr.contains(part)) && is_empty, "{command}: {}", run.stderr);
    }
    ok(folder, "distill detector -o hidden --teacher detector --train train.safetensors --losses hidden=1 --max-steps 1");
    let found = data(folder, "auto detector --for transformers --front f.json --json")["search"].clone();
    assert_eq!(found["loss"], "weight-error");
    ok(folder, "quantize detector -o quantized --group-size 4");
    let measured = data(folder, "eval quantized --against detector --data eval.safetensors --json");
    let fidelity = &measured["fidelity"];
    assert!(fidelity["cosine"].as_f64() < Some(1.0) && fidelity["kl"].is_null() && fidelity["top1_agreement"].is_null(), "{measured}");
    assert!(fidelity.get("label_kl").is_none(), "{measured}");
}

/// The labels of a multi-label classifier have separate probabilities, whose divergence is that of Bernoulli
/// distributions.
#[test]
fn labels_are_compared_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    changed(folder, "bert-sequence-classification", "labels", &json!({ "problem_type": "multi_label_classification" }));
    let ids = Tensor::from_vec((0..48i64).map(|i| i * i % 13 + 1).collect::<Vec<_>>(), (8, 6), &Device::Cpu).unwrap();
    let inputs: BTreeMap<String, Tensor> = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into();
    candle_core::safetensors::save(&inputs.clone().into_iter().collect(), folder.join("texts.safetensors")).unwrap();
    ok(folder, "quantize labels -o rounded --group-size 4");
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let logits = |name: &str| -> Vec<f32> {
        let model = Model::open(folder.join(name)).unwrap();
        let graph = model.graph().unwrap();
        let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
        Executor::new(&graph, parameters, Device::Cpu).run(&inputs).unwrap()["logits"].flatten_all().unwrap().to_vec1().unwrap()
    };
    let (before, after) = (logits("labels"), logits("rounded"));
    let label = |(a, b): (&f32, &f32)| {
        let [p, q] = [a, b].map(|logit| 1.0 / (1.0 + (-f64::from(*logit)).exp()));
        p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln()
    };
    let expected = before.iter().zip(&after).map(label).sum::<f64>() / before.len() as f64;
    let measured = data(folder, "eval rounded --against labels --data texts.safetensors --json");
    let fidelity = &measured["fidelity"];
    let found = fidelity["label_kl"].as_f64().unwrap();
    assert!(expected > 0.0 && (found - expected).abs() < 1e-3 * expected, "{expected}: {measured}");
    changed(folder, "modernbert-sequence-classification", "modern", &json!({ "problem_type": "multi_label_classification" }));
    ok(folder, "search-structure modern -o searched --limit layers=0.7 --round-to 2 --uniform false --calibration texts.safetensors");
    assert_eq!(read_json(&folder.join("searched/report.json"))["passes"][0]["details"]["loss"], "KL divergence per label");
    let report = &read_json(&folder.join("rounded/report.json"))["fidelity"];
    for fidelity in [fidelity, report] {
        assert!(fidelity["kl"].is_null() && fidelity["top1_agreement"].is_null() && fidelity["label_kl"].as_f64() > Some(0.0), "{fidelity}");
    }
}

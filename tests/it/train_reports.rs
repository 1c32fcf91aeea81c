//! Reports of training: the memory of sharded parameters, and the first value that is not finite.
#![cfg(all(feature = "run", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use compress_engine::data::{Data, Task};
use serde_json::Value;

use crate::common::golden_model;
use crate::train::{Run, finetune, samples, weights};
use crate::train_processes::{Workspace, golden, ranks};

/// Bytes of a kind by category, and their total.
fn memory(report: &Value, kind: &str, total: &str) -> HashMap<String, f64> {
    let memory = &report["passes"][0]["details"]["memory"];
    let phases = memory["phases"].as_array().unwrap().iter();
    let bytes = phases.map(|phase| (phase["name"].as_str().unwrap().to_owned(), phase[kind].as_f64().unwrap()));
    bytes.chain([("total".to_owned(), memory[total].as_f64().unwrap())]).collect()
}

/// With sharded parameters, each of two processes holds half of the weights, gradients and optimizer states.
#[test]
fn the_memory_of_sharded_parameters_is_predicted() {
    let place = Workspace::new(64);
    let sizes: Vec<usize> = weights(&place.model).values().map(Vec::len).collect();
    let (elements, largest) = (sizes.iter().sum::<usize>() as f64, *sizes.iter().max().unwrap() as f64);
    // Bytes of the optimizer states per element.
    for (case, options, processes, states) in [
        ("one process", ", shard: parameters", 1, 8.0),
        ("replicated", "", 2, 8.0),
        ("sharded", ", shard: parameters", 2, 8.0),
        ("with an average", ", shard: parameters, average: 0.9", 2, 12.0),
        ("with one state", ", shard: parameters, optimizer: sgd", 2, 4.0),
        ("sharded states", ", shard: optimizer", 2, 8.0),
    ] {
        let recipe = place.recipe(&format!("max_steps: 3, batch_size: 8, learning_rate: 1e-3{options}"));
        let children: Vec<_> = match processes {
            1 => vec![place.start(&recipe, case, &[], &[])],
            _ => ranks::<2>().iter().map(|rank| place.start(&recipe, case, &[], rank)).collect(),
        };
        children.into_iter().for_each(|child| place.finish(child));
        let report = place.report(case);
        let (predicted, measured) = (memory(&report, "predicted_bytes", "predicted_bytes"), memory(&report, "measured_bytes", "peak_bytes"));
        for (category, bytes) in &measured {
            let predicted = predicted[category];
            // The last gradient may not be the largest one.
            assert!((predicted - bytes).abs() <= 0.1 * bytes, "{case}, {category}: {predicted} and {bytes}");
        }
        let is_sharded = options.contains("shard: parameters") && processes == 2;
        // The gradient that is being summed is complete on each rank.
        let (shards, gradient) = if is_sharded { (2.0, 4.0 * largest / 2.0) } else { (1.0, 0.0) };
        assert_eq!(predicted["gradients"], (4.0 * elements / shards).floor() + gradient, "{case}");
        // States are balanced up to an element.
        let shards = if options.contains("shard") && processes == 2 { 2.0 } else { 1.0 };
        assert!((predicted["optimizer"] - states * elements / shards).abs() <= 8.0, "{case}");
        assert!(measured["optimizer"] <= (states * elements / shards).ceil() + 16.0, "{case}: {}", measured["optimizer"]);
    }
}

/// States that are sharded within tensors do not change a bit: sums over processes have one order, and
/// parts are updated like the whole. Clipping is off, since the norm of parts is summed in another order.
#[test]
fn sharded_states_do_not_change_steps() {
    let cases = [
        ("adamw", "", ""),
        ("adamw8bit", ", average: 0.9", ""),
        ("muon", ", gradient_accumulation: 2", ""),
        ("adafactor", "", ""),
        ("sgd", "", "  - prune-unstructured: {}\n"),
        ("adamw", ", scales: learnable", "  - quantize-dynamic: {}\n"),
    ];
    for (optimizer, options, before) in cases {
        // The embedding of the language model is also its head, so that its gradient has two summands.
        let language_model = Some((Workspace::tokens(48), ", task: language-modelling")).filter(|_| matches!(optimizer, "muon" | "sgd"));
        for (place, task) in [(Workspace::new(48), "")].into_iter().chain(language_model) {
            let run = |out: &str, more: &str| {
                let options = format!("max_steps: 3, batch_size: 4, learning_rate: 1e-3, clip_norm: 0, optimizer: {optimizer}{options}{more}");
                let path = place.recipe_with(&format!("train: {{ arrays: train.safetensors{task} }}"), "finetune", &options);
                let text = std::fs::read_to_string(&path).unwrap().replace("passes:\n", &format!("passes:\n{before}"));
                std::fs::write(&path, text).unwrap();
                ranks::<3>().map(|rank| place.start(&path, out, &[], &rank)).into_iter().for_each(|child| place.finish(child));
                place.weights(out)
            };
            let (whole, sharded) = (run("whole", ""), run("sharded", ", shard: optimizer"));
            assert!(whole.keys().eq(sharded.keys()));
            for (name, values) in whole {
                assert!(values.iter().zip(&sharded[&name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{optimizer}{options}: {name} differs");
            }
        }
    }
}

/// The error of a training on a changed model.
fn divergence(place: &Workspace, options: &str, change: impl Fn(&mut HashMap<String, Tensor>)) -> String {
    let path = place.at("changed");
    std::fs::create_dir_all(&path).unwrap();
    std::fs::copy(golden().join("config.json"), path.join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(golden().join("model.safetensors"), &Device::Cpu).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, path.join("model.safetensors")).unwrap();
    let recipe = place.recipe(&format!("max_steps: 1, batch_size: 8, learning_rate: 1e-3{options}"));
    place.refused(place.start(&recipe, "out", &["--force"], &[]))
}

/// Sets all elements of a tensor.
fn fill(tensors: &mut HashMap<String, Tensor>, name: &str, value: f32) {
    let tensor = tensors.get_mut(name).unwrap();
    *tensor = Tensor::full(value, tensor.dims(), &Device::Cpu).unwrap();
}

/// A change of the tensors of a model.
type Change<'a> = &'a dyn Fn(&mut HashMap<String, Tensor>);

#[test]
fn errors_name_the_first_value_that_is_not_finite() {
    let mut place = Workspace::new(8);
    place.model = place.at("changed");
    let layer = "encoder.layer.1.intermediate.dense";
    // The pooled output is 1, so that each logit is the sum of a row.
    let infinite_logits = |tensors: &mut HashMap<String, Tensor>| {
        fill(tensors, "bert.pooler.dense.weight", 0.0);
        fill(tensors, "bert.pooler.dense.bias", 20.0);
        fill(tensors, "classifier.weight", 3e38);
    };
    let cases: [(Change, String); 4] = [
        // Later layers are not finite either, and the layers before are.
        (&|tensors| fill(tensors, &format!("bert.{layer}.weight"), f32::INFINITY), format!("`bert.{layer}.weight`, an input of layer `{layer}`, contains")),
        // Large weights are finite, but not the outputs of their layer.
        (&|tensors| fill(tensors, &format!("bert.{layer}.weight"), 3e38), format!("`{layer}`, an input of layer `encoder.layer.1.")),
        (&infinite_logits, "which losses read, contains NaN or infinite values".to_owned()),
        // The difference of the logits overflows in the loss.
        (
            &|tensors| {
                fill(tensors, "classifier.weight", 0.0);
                tensors.insert("classifier.bias".into(), Tensor::new(&[3e38f32, -3e38, -3e38], &Device::Cpu).unwrap());
            },
            "although all values of the model are".to_owned(),
        ),
    ];
    for (change, expected) in cases {
        let error = divergence(&place, "", change);
        assert!(error.contains("at step 1: loss `hard` is not finite") && error.contains(&expected), "{error}");
    }
}

/// The value is found in whichever micro-batch of the step it is.
#[test]
fn values_that_are_not_finite_are_found_in_every_micro_batch() {
    let mut place = Workspace::new(8);
    let path = place.at("train.safetensors");
    let arrays = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    place.finish(place.start(&place.recipe("max_steps: 1, batch_size: 8"), "whole", &[], &[]));
    let measured = memory(&place.report("whole"), "measured_bytes", "peak_bytes");
    // As much memory as half of the activations of the batch need.
    let options = format!(", memory_limit: {}", (measured["total"] - measured["activations"] / 2.0) as u64);
    place.model = place.at("changed");
    for sample in 0..8 {
        let mut ids = arrays["input_ids"].to_vec2::<i64>().unwrap();
        ids[sample][0] = 47;
        let mut changed = arrays.clone();
        changed.insert("input_ids".into(), Tensor::new(ids, &Device::Cpu).unwrap());
        candle_core::safetensors::save(&changed, &path).unwrap();
        let error = divergence(&place, &options, |tensors| {
            let name = "bert.embeddings.word_embeddings.weight";
            let last = tensors[name].narrow(0, 0, 47).unwrap();
            let row = Tensor::full(3e38f32, (1, last.dim(1).unwrap()), &Device::Cpu).unwrap();
            assert_eq!(tensors[name].dtype(), DType::F32);
            tensors.insert(name.into(), Tensor::cat(&[last, row], 0).unwrap());
        });
        assert!(error.contains("is not finite: `embeddings."), "{sample}: {error}");
    }
}

/// transformers adds the auxiliary loss of the router of such a model to the loss of its labels.
#[test]
fn the_loss_of_a_router_is_noted() {
    let run = Run::new();
    let folder = run.folder.path().join("mixtral");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(golden_model("mixtral/model.safetensors"), folder.join("model.safetensors")).unwrap();
    let data = samples("mixtral", run.folder.path(), 8, 0);
    let has_note = |is_set: bool| {
        let mut config: Value = serde_json::from_slice(&std::fs::read(golden_model("mixtral/config.json")).unwrap()).unwrap();
        config["output_router_logits"] = is_set.into();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let report = run.steps(&folder, Data { task: Some(Task::LanguageModelling), ..data.clone() }, vec![finetune(1).into()]).unwrap();
        report.notes.iter().any(|note| note.contains("the auxiliary loss of the router"))
    };
    assert!(has_note(true) && !has_note(false));
}

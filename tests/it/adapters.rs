//! Low-rank adapters in training: steps equal those of PEFT (`scripts/goldens adapters`), merged weights
//! equal the base with its adapter, and the base does not change.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::export::Gguf;
use compress::pass::{Decompose, Dequantize, Distill, Finetune, Palettize, PruneUnstructured, Quantize, Step, Student, Training};
use compress::pipeline::{Builder, verify};
use compress::report::Report;
use compress::{Error, Model, Pipeline};
use compress_engine::data::Data;
use compress_engine::train::losses::Losses;
use compress_engine::train::optimizer::Kind;
use compress_engine::train::{Adapter, AdapterKind, BatchSize, Every, Offload, Precision};
use serde_json::Value;

use crate::common::numbers::checksums;
use crate::contract::violated;
use crate::train::{Run, cancelled_after, furthest, weights, with_training};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn golden(name: &str) -> PathBuf {
    goldens().join("models").join(name)
}

fn samples() -> Data {
    Data { arrays: Some(goldens().join("training/adapters.safetensors")), ..Data::default() }
}

/// Options of the steps of `scripts/goldens adapters`.
fn finetune(adapter: &str) -> Finetune {
    Finetune {
        training: Training {
            adapter: Some(adapter.parse().unwrap()),
            max_steps: Some(4),
            batch_size: BatchSize::Samples(4),
            learning_rate: 1e-2,
            weight_decay: 0.1,
            clip_norm: 0.0,
            schedule: serde_json::from_str(r#"{ "kind": "constant" }"#).unwrap(),
            ..Training::default()
        },
        ..Finetune::default()
    }
}

fn distill(adapter: &str) -> Distill {
    let losses: Losses = "soft=1".parse().unwrap();
    let Training { adapter, max_steps, batch_size, learning_rate, schedule, .. } = finetune(adapter).training;
    Distill { training: Training { adapter, max_steps, batch_size, learning_rate, schedule, losses, ..Training::default() }, ..Distill::default() }
}

const SEPARATE: &str = "{rank: 4, alpha: 6, merge: false}";
const MERGED: &str = "{rank: 4, alpha: 6}";
const DORA: &str = "{kind: dora, rank: 4, alpha: 6}";

/// Trains a golden model on the samples.
fn train(run: &Run, name: &str, pass: impl Into<Step>) -> Report {
    run.train(name, samples(), pass).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The adapter that a run has written.
fn adapter(run: &Run) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(run.out().join("adapter/adapter_model.safetensors"), &Device::Cpu).unwrap()
}

fn curve(report: &Report) -> Vec<f64> {
    let curve = report.passes.last().unwrap().details["training"]["curve"].as_array().unwrap();
    curve.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

/// Logits of a folder for the training samples.
fn outputs(folder: &Path) -> Tensor {
    let mut inputs: BTreeMap<String, Tensor> = candle_core::safetensors::load(samples().arrays.unwrap(), &Device::Cpu).unwrap().into_iter().collect();
    inputs.remove("labels");
    crate::common::outputs(&Model::open(folder).unwrap(), &inputs).remove("logits").unwrap()
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(goldens().join("training/adapters.json")).unwrap()).unwrap()
}

fn assert_tensors(case: &str, found: &dyn Fn(&str) -> Vec<f32>, expected: &Value) {
    let expected = expected.as_object().unwrap();
    assert!(!expected.is_empty());
    for (name, theirs) in expected {
        let values = found(name);
        let room = 1e-4 * (values.len() as f64).sqrt();
        for (at, (ours, theirs)) in checksums(&values).iter().zip(theirs.as_array().unwrap()).enumerate() {
            let (theirs, room) = (theirs.as_f64().unwrap(), if at < 2 { room } else { 1e-4 });
            assert!((ours - theirs).abs() < room, "{case}, {name}, number {at}: {ours} instead of {theirs}");
        }
    }
}

/// Linear layers, fused projections, and weights stored as `[in, out]`.
#[test]
fn steps_are_those_of_peft() {
    let expected = expected();
    for (case, expected) in expected.as_object().unwrap() {
        let name = case.split('-').next().unwrap();
        let kind = if case.ends_with("-dora") { AdapterKind::Dora } else { AdapterKind::Lora };
        let train = |merge: bool| {
            let mut pass = finetune(MERGED);
            pass.training.adapter = pass.training.adapter.map(|options| Adapter { kind, rslora: case.ends_with("-rslora"), merge, ..options });
            let run = Run::new();
            let losses = curve(&train(&run, name, pass));
            let theirs: Vec<f64> = expected["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
            assert_eq!(losses.len(), theirs.len());
            for (step, (ours, theirs)) in losses.iter().zip(theirs).enumerate() {
                assert!((ours - theirs).abs() < 1e-4 * theirs.max(1.0), "{case}, step {step}: {ours} instead of {theirs}");
            }
            run
        };
        let merged = weights(&train(true).out());
        assert_tensors(case, &|name| merged[name].clone(), &expected["merged"]);
        let run = train(false);
        let factors = adapter(&run);
        assert_eq!(factors.len(), expected["factors"].as_object().unwrap().len());
        assert_tensors(case, &|name| factors[name].flatten_all().unwrap().to_vec1().unwrap(), &expected["factors"]);
        let config: Value = serde_json::from_slice(&std::fs::read(run.out().join("adapter/adapter_config.json")).unwrap()).unwrap();
        assert_eq!((config["r"].as_u64(), config["fan_in_fan_out"].as_bool()), (Some(4), Some(name == "gpt2")), "{case}");
        assert_eq!(config["use_dora"].as_bool(), (kind == AdapterKind::Dora).then_some(true), "{case}");
        for folder in [run.out(), run.out().join("adapter")] {
            assert_eq!(violated(&folder, "vllm").contains("adapter"), kind == AdapterKind::Dora, "{case}: {}", folder.display());
        }
    }
}

/// vLLM loads no DoRA, which the plan of a training states.
#[test]
fn adapters_that_vllm_does_not_load_are_refused_before_the_training() {
    for (adapter, is_loaded) in [(SEPARATE, true), ("{kind: dora, rank: 4, alpha: 6, merge: false}", false), (DORA, true)] {
        let builder = Pipeline::builder().pass(finetune(adapter)).train(samples()).loads(vec!["vllm".parse().unwrap()]);
        let found = builder.build().unwrap().plan(&Model::open(golden("llama")).unwrap());
        let error = found.map(drop).unwrap_err().to_string();
        assert_eq!(error.contains("adapter: `adapter_config.json` has `use_dora`"), !is_loaded, "{adapter}: {error}");
    }
}

#[test]
fn students_with_corrections_are_refused() {
    for kind in [SEPARATE, "{kind: dora, rank: 4, alpha: 6, merge: false}"] {
        let student = Run::new();
        train(&student, "llama", with_training!(finetune(kind), max_steps: Some(1)));
        let pass = Distill { student: Some(Student::Model(student.out())), ..distill(SEPARATE) };
        let found = Pipeline::builder().pass(pass).train(samples()).build().unwrap().plan(&Model::open(golden("llama")).unwrap());
        let error = found.map(drop).unwrap_err().to_string();
        assert!(error.contains("has low-rank corrections (`adapter`)"), "{kind}: {error}");
    }
}

/// `A` is drawn from the seed, and `B` is zero.
#[test]
fn training_starts_at_the_base() {
    let initial = candle_core::safetensors::load(goldens().join("training/adapters-initial.safetensors"), &Device::Cpu).unwrap();
    for name in ["llama", "phi3", "gpt2"] {
        let run = Run::new();
        let still = with_training!(finetune(SEPARATE), learning_rate: 1e-30, weight_decay: 0.0, max_steps: Some(1));
        let report = train(&run, name, still.clone());
        let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (factor, tensor) in adapter(&run) {
            match initial.get(&format!("{name}/{factor}")) {
                Some(initial) => assert_eq!(flat(&tensor), flat(initial), "{name}, {factor}"),
                None => assert!(flat(&tensor).iter().all(|x| x.abs() < 1e-28), "{name}, {factor}"),
            }
        }
        assert!(distance(&outputs(&run.out()), &outputs(&golden(name))) < 1e-6);
        let plain = train(&Run::new(), name, with_training!(still, adapter: None));
        assert!((curve(&report)[0] - curve(&plain)[0]).abs() < 1e-6, "{name}");
    }
}

#[test]
fn merged_weights_are_the_base_with_its_adapter() {
    let lora = ["llama", "llama-grouped-tied", "phi3", "gpt2", "qwen3"].map(|name| (name, AdapterKind::Lora));
    // Without and with biases and weights stored as `[in, out]`.
    let dora = ["llama", "gpt2"].map(|name| (name, AdapterKind::Dora));
    for (name, kind) in lora.into_iter().chain(dora) {
        let (kept, merged, folded) = (Run::new(), Run::new(), Run::new());
        let finetune = |adapter: &str| {
            let mut pass = finetune(adapter);
            pass.training.adapter = pass.training.adapter.map(|options| Adapter { kind, ..options });
            pass
        };
        let report = train(&kept, name, finetune(SEPARATE));
        let loading = if kind == AdapterKind::Dora { "vLLM does not load DoRA" } else { "`--enable-lora --max-lora-rank 8 --lora-modules tuned=" };
        assert!(report.notes.iter().any(|note| note.contains(loading)), "{:?}", report.notes);
        let same = train(&merged, name, finetune(MERGED));
        assert_eq!(curve(&report), curve(&same), "{name}");
        let written = if kind == AdapterKind::Dora { 3 } else { 2 };
        assert!(report.passes[0].tensors_changed == written * same.passes[0].tensors_changed && same.passes[0].tensors_changed >= 8, "{name}");
        let card = std::fs::read_to_string(kept.out().join("README.md")).unwrap();
        assert!(card.contains("model = PeftModel.from_pretrained(model, \"path/to/model/adapter\")") && !card.contains("CompressedTensorsConfig"), "{card}");
        // The base is unchanged, bit by bit.
        let (before, mut after) = (weights(&golden(name)), weights(&kept.out()));
        after.retain(|name, _| !name.starts_with("adapter/"));
        assert!(before.len() == after.len() && furthest(&before, &after) == 0.0, "{name}");
        assert!(!merged.out().join("adapter").exists() && furthest(&before, &weights(&merged.out())) > 1e-3, "{name}");
        let (adapted, sum) = (outputs(&kept.out()), outputs(&merged.out()));
        let change = distance(&adapted, &outputs(&golden(name)));
        assert!(distance(&adapted, &sum) < 1e-4 && change > 1e-2, "{name}: {} of {change}", distance(&adapted, &sum));
        folded.steps(&kept.out(), samples(), vec![Dequantize::default().into()]).unwrap();
        assert!(furthest(&weights(&folded.out()), &weights(&merged.out())) < 1e-6, "{name}");
        for run in [&kept, &merged] {
            assert!(crate::common::work(|work| verify(&run.out(), work)).unwrap().iter().all(|check| check.ok), "{name}");
        }
    }
}

/// Master weights, gradients and optimizer state exist only for the factors.
#[test]
fn memory_is_that_of_the_factors() {
    let phases = |pass: Finetune| {
        let report = train(&Run::new(), "llama", pass);
        let phases = report.passes[0].details["memory"]["phases"].as_array().unwrap().clone();
        let bytes = |name: &str| {
            phases.iter().find(|phase| phase["name"] == name).map(|phase| ["predicted_bytes", "measured_bytes"].map(|key| phase[key].as_u64().unwrap()))
        };
        (bytes("gradients").unwrap(), bytes("optimizer").unwrap(), report.passes[0].details["adapter"]["parameters"].as_u64())
    };
    let (gradients, optimizer, parameters) = phases(finetune("{rank: 2}"));
    // Four projections of 16 × 16 and three of 16 × 24 in each of two layers.
    assert_eq!(parameters, Some(2 * 2 * (4 * 32 + 3 * 40)));
    let bytes = parameters.unwrap();
    assert!(gradients[0] == 4 * bytes && gradients[1] <= gradients[0], "{gradients:?}");
    assert!(optimizer[0] >= optimizer[1] && (8 * bytes..12 * bytes).contains(&optimizer[1]), "{optimizer:?}");
    let (all, _, _) = phases(with_training!(finetune("2"), adapter: None));
    assert!(all[1] > 4 * gradients[1]);
}

/// The norms of DoRA, and the memory for computing them, are recorded and predicted.
#[test]
fn memory_includes_the_norms() {
    let [lora, dora] = [MERGED, DORA].map(|adapter| {
        let report = train(&Run::new(), "llama", finetune(adapter));
        let phases = report.passes[0].details["memory"]["phases"].as_array().unwrap();
        let phase = phases.iter().find(|phase| phase["name"] == "weights").unwrap();
        ["predicted_bytes", "measured_bytes"].map(|key| phase[key].as_u64().unwrap())
    });
    // In each of two layers, five projections have 16 outputs and two have 24: trained norms, those of the
    // base, and those of a step. The largest matrix, 24 × 16, needs its copy, its squares, and two of 24 × 4.
    let bytes = 3 * 4 * 2 * (5 * 16 + 2 * 24) + 4 * 2 * (24 * 16 + 24 * 4);
    assert_eq!([0, 1].map(|at| dora[at] - lora[at]), [bytes; 2], "{lora:?} {dora:?}");
}

#[test]
fn an_interrupted_training_of_adapters_resumes() {
    for (adapter, offload) in [(SEPARATE, vec![]), (MERGED, vec![Offload::Parameters]), (DORA, vec![])] {
        let pass = with_training!(finetune(adapter), max_steps: Some(7), checkpoint_every: Some(Every::Steps(2)), average: Some(0.9), offload, batch_size: BatchSize::Samples(2));
        let builder = || -> Builder { Pipeline::builder().pass(pass.clone()).train(samples()).seed(3) };
        let (whole, parts) = (Run::new(), Run::new());
        builder().build().unwrap().run(Model::open(golden("llama")).unwrap(), whole.out()).unwrap();
        let (cancel, watch) = cancelled_after(Some(3));
        let model = || Model::open(golden("llama")).unwrap();
        let error = builder().resume(true).progress(watch).cancel(cancel).build().unwrap().run(model(), parts.out()).unwrap_err();
        assert!(matches!(error, Error::Paused { .. }), "{error}");
        let rest = builder().resume(true).build().unwrap().run(model(), parts.out()).unwrap();
        assert!(rest.notes.iter().any(|note| note.starts_with("3 steps in ")), "{:?}", rest.notes);
        let (a, b) = (weights(&whole.out()), weights(&parts.out()));
        assert!(a.keys().eq(b.keys()));
        for (name, values) in &a {
            assert!(values.iter().zip(&b[name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} differs");
        }
    }
}

#[test]
fn adapters_learn_from_a_teacher() {
    let run = Run::new();
    let report = train(&run, "llama", Distill { student: Some("every=2".parse().unwrap()), ..with_training!(distill("{rank: 8}"), max_steps: Some(40)) });
    let losses = curve(&report);
    assert!(losses[39] < 0.9 * losses[0], "{losses:?}");
    // A student equal to its teacher has nothing to learn.
    let losses = curve(&train(&Run::new(), "llama", distill("8")));
    assert!(losses[0] < 1e-6, "{losses:?}");
}

/// The base stays quantized, byte by byte, and is dequantized while it is used.
#[test]
fn quantized_bases_get_adapters() {
    const SEPARATE_DORA: &str = "{kind: dora, rank: 4, alpha: 6, merge: false}";
    for (scheme, adapter_options) in
        [("W4A16", SEPARATE), ("W8A16", SEPARATE), ("FP8-DYNAMIC", SEPARATE), ("NVFP4A16", SEPARATE), ("W4A16", SEPARATE_DORA), ("NVFP4A16", SEPARATE_DORA)]
    {
        let (base, run) = (Run::new(), Run::new());
        let quantize: Quantize = serde_json::from_value(serde_json::json!({ "scheme": scheme, "ignore": ["*down_proj*"] })).unwrap();
        base.steps(&golden("llama"), samples(), vec![quantize.clone().into()]).unwrap();
        let long = with_training!(finetune(adapter_options), max_steps: Some(30));
        let report = run.steps(&base.out(), samples(), vec![long.clone().into()]).unwrap();
        let losses = curve(&report);
        assert!(losses[29] < 0.8 * losses[0], "{scheme}: {losses:?}");
        let [before, after] = [&base, &run].map(|run| std::fs::read(run.out().join("model.safetensors")).unwrap());
        assert!(before == after, "{scheme}");
        assert_eq!(
            report.notes.iter().any(|note| note.contains("quantized in training as at run time")),
            scheme == "FP8-DYNAMIC",
            "{scheme}: {:?}",
            report.notes
        );
        assert!(distance(&outputs(&run.out()), &outputs(&base.out())) > 1e-2, "{scheme}");
        // In one recipe.
        let both = Run::new();
        both.steps(&golden("llama"), samples(), vec![quantize.into(), long.into()]).unwrap();
        let ([one, two], room) = ([&run, &both].map(adapter), 1e-3);
        assert!(one.iter().all(|(name, factor)| distance(factor, &two[name]) < room), "{scheme}");
        let refused = run.steps(&base.out(), samples(), vec![finetune(MERGED).into()]).unwrap_err();
        assert!(refused.to_string().contains("codes") && refused.hint().unwrap().contains("`merge: false`"), "{scheme}: {refused}");
    }
}

#[test]
fn factors_without_their_counterpart_are_refused() {
    for factor in ["lora_A", "lora_B"] {
        let run = Run::new();
        train(&run, "llama", finetune(SEPARATE));
        let mut tensors = adapter(&run);
        let name = tensors.keys().find(|name| name.contains(factor)).unwrap().clone();
        tensors.remove(&name);
        candle_core::safetensors::save(&tensors, run.out().join("adapter/adapter_model.safetensors")).unwrap();
        let error = Model::open(run.out()).unwrap_err().to_string();
        assert!(error.contains("has only one of the factors") && error.contains("incomplete"), "{error}");
    }
}

#[test]
fn notes_have_advice_for_vllm_only_if_it_loads_the_base() {
    let passes: [(Option<Step>, bool); 3] = [
        (None, true),
        (Some(Palettize::default().into()), false),
        (Some(serde_json::from_value::<Decompose>(serde_json::json!({ "rank": 2 })).unwrap().into()), false),
    ];
    for (before, expected) in passes {
        let steps = before.into_iter().chain([finetune("{rank: 2, merge: false}").into()]).collect();
        let report = Run::new().steps(&golden("llama"), samples(), steps).unwrap();
        assert_eq!(report.notes.iter().any(|note| note.contains("--enable-lora")), expected, "{:?}", report.notes);
    }
}

#[test]
fn adapters_learn_in_16_bits() {
    for (precision, adapter) in [(Precision::Bf16, MERGED), (Precision::F16, MERGED), (Precision::Bf16, DORA)] {
        let losses = curve(&train(&Run::new(), "llama", with_training!(finetune(adapter), max_steps: Some(30), precision)));
        assert!(losses[29] < 0.8 * losses[0], "{losses:?}");
    }
}

/// Muon treats the factors as matrices, and not as the other parameters, which it leaves to AdamW.
#[test]
fn muon_trains_factors_as_matrices() {
    let [adamw, muon] = [Kind::AdamW, Kind::Muon].map(|optimizer| curve(&train(&Run::new(), "llama", with_training!(finetune(MERGED), optimizer))));
    assert!(adamw[0] == muon[0] && adamw[3] != muon[3], "{adamw:?} {muon:?}");
}

/// Another tool may have pruned a model without a record of it.
#[test]
fn zeros_of_unknown_origin_are_reported() {
    let pruned = Run::new();
    let prune = PruneUnstructured { amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
    pruned.steps(&golden("llama"), samples(), vec![prune.into()]).unwrap();
    let foreign = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(pruned.out().join(file), foreign.path().join(file)).unwrap();
    }
    let report = Run::new().steps(foreign.path(), samples(), vec![finetune(MERGED).into()]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("were replaced by the merged adapters")), "{:?}", report.notes);
}

/// A merged product would fill the zeros of pruned weights.
#[test]
fn pruned_weights_keep_their_zeros_or_are_refused() {
    let prune = || PruneUnstructured { amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
    let (pruned, run) = (Run::new(), Run::new());
    pruned.steps(&golden("llama"), samples(), vec![prune().into()]).unwrap();
    let of_folder = run.steps(&pruned.out(), samples(), vec![finetune(MERGED).into()]).unwrap_err();
    let of_recipe = run.steps(&golden("llama"), samples(), vec![prune().into(), finetune(MERGED).into()]).unwrap_err();
    for error in [of_folder, of_recipe] {
        assert!(error.to_string().contains("has pruned weights") && error.hint().unwrap().contains("`merge: false`"), "{error}");
    }
    run.steps(&pruned.out(), samples(), vec![finetune(SEPARATE).into()]).unwrap();
    let mut after = weights(&run.out());
    after.retain(|name, _| !name.starts_with("adapter/"));
    assert!(furthest(&weights(&pruned.out()), &after) == 0.0);
}

#[test]
fn unsuitable_options_are_refused_by_name() {
    let refused = |name: &str, steps: Vec<Step>| Run::new().steps(&golden(name), samples(), steps).unwrap_err().to_string();
    let with = |change: fn(&mut Finetune)| {
        let mut pass = finetune("2");
        change(&mut pass);
        vec![pass.into()]
    };
    assert!(refused("llama", with(|pass| pass.training.targets = vec!["*q_proj*".parse().unwrap()])).contains("`targets` and `ignore` cannot be combined"));
    assert!(refused("bert", with(|pass| pass.labels = Some(2))).contains("does not train a new head"));
    assert!(refused("llama", vec![finetune("{rank: 17}").into()]).contains("`model.layers.0.self_attn."));
    assert!(refused("llama", vec![finetune("{rank: 2, targets: [\"*nosuch*\"]}").into()]).contains("nosuch"));
    assert!(
        refused("llama", vec![finetune("{rank: 2, targets: [\"*norm*\"]}").into()])
            .contains("`*norm*` matches only tensors that are not weights of linear layers")
    );
    assert!(refused("llama", vec![finetune(SEPARATE).into(), PruneUnstructured::default().into()]).contains("low-rank corrections"));
    let run = Run::new();
    let gguf = Pipeline::builder().pass(finetune(SEPARATE)).train(samples()).export(Gguf::default()).build().unwrap();
    assert!(gguf.run(Model::open(golden("llama")).unwrap(), run.out()).unwrap_err().to_string().contains("low-rank corrections"));
}

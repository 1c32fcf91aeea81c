//! Optimizer steps compared with PyTorch and transformers on the same gradients
//! (`scripts/goldens optimizers`).

#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{Tensors, read};
use candle_core::{DType, Device, Tensor};
use compress_engine::exec::{ManagedTensor, Placement};
use compress_engine::train::average::Average;
use compress_engine::train::clip::clip;
use compress_engine::train::optimizer::{Kind, Settings, build};
use compress_engine::train::schedule::{Curve, Schedule};

const PARAMETERS: [&str; 2] = ["matrix", "vector"];

fn golden() -> Tensors {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/optimizers.safetensors"))
}

fn floats(tensor: &crate::common::Tensor) -> Tensor {
    Tensor::from_vec(tensor.values(), tensor.shape.clone(), &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()
}

fn step(golden: &Tensors, name: &str, step: usize) -> Tensor {
    floats(&golden[name]).get(step).unwrap()
}

/// Every element has a relative error of at most 1e-6, near zero relative to the largest element.
fn assert_close(ours: &Tensor, expected: &Tensor, what: &str) {
    assert_within(ours, expected, 1e-6, what);
}

fn assert_within(ours: &Tensor, expected: &Tensor, tolerance: f32, what: &str) {
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (ours, expected) = (values(ours), values(expected));
    assert_eq!(ours.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (ours, expected) in ours.iter().zip(&expected) {
        assert!((ours - expected).abs() <= tolerance * expected.abs().max(largest), "{what}: {ours} instead of {expected}");
    }
}

#[test]
fn steps() {
    let golden = golden();
    let none = Settings { weight_decay: 0.0, ..Settings::default() };
    let cases = [
        ("adamw", Kind::AdamW, none.clone()),
        ("adamw-decay", Kind::AdamW, Settings { beta1: 0.8, beta2: 0.95, epsilon: 1e-6, weight_decay: 0.1, ..none.clone() }),
        ("sgd", Kind::Sgd, none.clone()),
        ("sgd-momentum", Kind::Sgd, Settings { momentum: 0.9, weight_decay: 0.05, ..none.clone() }),
        ("sgd-nesterov", Kind::Sgd, Settings { momentum: 0.9, nesterov: true, ..none.clone() }),
        ("muon", Kind::Muon, Settings { momentum: 0.9, weight_decay: 0.1, linear_weights: ["matrix", "wide"].map(str::to_owned).into(), ..none.clone() }),
        ("adafactor", Kind::Adafactor, Settings { weight_decay: 0.1, ..none }),
    ];
    for (case, kind, settings) in cases {
        let mut optimizer = build(kind, &settings, &Placement::Memory(Device::Cpu)).unwrap();
        for name in PARAMETERS.into_iter().chain((kind == Kind::Muon).then_some("wide")) {
            let parameter = floats(&golden[name]);
            for t in 0..20 {
                let rate = 0.1 * (1.0 - (t + 1) as f64 / 40.0);
                optimizer.update(name, &parameter, &step(&golden, &format!("gradient/{name}"), t), rate, t as u64 + 1).unwrap();
                // The iterations of Muon amplify rounding.
                let tolerance = if kind == Kind::Muon { 1e-5 } else { 1e-6 };
                assert_within(&parameter, &step(&golden, &format!("{case}/{name}"), t), tolerance, &format!("{case}, {name}, step {}", t + 1));
            }
        }
    }
}

#[test]
fn schedules() {
    let golden = golden();
    for (name, kind) in [("constant", Curve::Constant), ("linear", Curve::Linear), ("cosine", Curve::Cosine)] {
        let schedule = Schedule { kind, warmup_steps: 10, ..Schedule::default() };
        for (i, expected) in golden[&format!("schedule/{name}")].values().into_iter().enumerate() {
            // In transformers, the cosine schedule rises again after its end.
            let expected = if i > 50 && kind == Curve::Cosine { 0.0 } else { expected };
            assert!((schedule.rate(i as u64, 50, 3.0) - 3.0 * expected).abs() < 1e-12, "{name}, step {i}");
        }
    }
}

#[test]
fn clipping() {
    let golden = golden();
    let mut gradients: BTreeMap<String, Tensor> = PARAMETERS.map(|name| (name.to_owned(), step(&golden, &format!("gradient/{name}"), 0))).into();
    let norm = clip(&mut gradients, 0.5).unwrap();
    assert!((norm / golden["clip/norm"].values()[0] - 1.0).abs() < 1e-12);
    for name in PARAMETERS {
        assert_close(&gradients[name], &floats(&golden[&format!("clip/{name}")]), name);
    }
}

#[test]
fn averages() {
    let golden = golden();
    let start: BTreeMap<String, ManagedTensor> = PARAMETERS.map(|name| (name.to_owned(), floats(&golden[name]).into())).into();
    let mut average = Average::new(&start, 0.25, &Placement::Memory(Device::Cpu)).unwrap();
    for t in 0..20 {
        let parameters = PARAMETERS.map(|name| (name.to_owned(), step(&golden, &format!("adamw/{name}"), t))).into();
        average.begin_step();
        average.update(&parameters).unwrap();
        for name in PARAMETERS {
            assert_close(&average.parameters()[name].open().unwrap(), &step(&golden, &format!("average/{name}"), t), &format!("{name}, step {}", t + 1));
        }
    }
}

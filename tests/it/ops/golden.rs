//! Gradients of single ops compared with PyTorch (`scripts/goldens gradients`).

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress_graph::ir::Op;
use compress_graph::ir::ops::{Backward, PreparedOp, Saved};
use serde::Deserialize;

use super::{distance, largest};

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Golden>,
}

#[derive(Deserialize)]
struct Golden {
    name: String,
    op: String,
    inputs: usize,
    gradients: Vec<usize>,
}

/// The weights of the loss, by the formula of the script.
fn weights(output: &Tensor) -> Tensor {
    let weight = |i: u64| ((7919 * i % 2003) as f64 / 2003.0 - 0.5) as f32;
    Tensor::from_vec((0..output.elem_count() as u64).map(weight).collect::<Vec<_>>(), output.dims(), &Device::Cpu).unwrap()
}

#[test]
fn gradients_are_those_of_pytorch() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gradients");
    let goldens: Goldens = serde_json::from_slice(&std::fs::read(folder.join("ops.json")).unwrap()).unwrap();
    let tensors = candle_core::safetensors::load(folder.join("ops.safetensors"), &Device::Cpu).unwrap();
    let mut failures = Vec::new();
    for golden in &goldens.cases {
        let op: Op = golden.op.parse().unwrap();
        let inputs: Vec<Tensor> = (0..golden.inputs).map(|index| tensors[&format!("{}/in/{index}", golden.name)].clone()).collect();
        let output = op.spec().eval(&inputs).unwrap();
        let gradient = weights(&output);
        let wanted: Vec<bool> = (0..golden.inputs).map(|index| golden.gradients.contains(&index)).collect();
        // With kernels, and with the implementation for other devices and dtypes.
        for dtype in [DType::F32, DType::F64] {
            let convert = |t: &Tensor| if t.dtype().is_float() { t.to_dtype(dtype).unwrap() } else { t.clone() };
            let saved: Vec<Saved> = inputs.iter().map(|t| Saved::full(convert(t))).collect();
            let backward = Backward { inputs: &saved, output: &Saved::full(convert(&output)), gradient: &convert(&gradient), needs_gradient: &wanted };
            let found = PreparedOp::new(&op, &Device::Cpu, dtype).backward(&backward).unwrap_or_else(|e| panic!("{op}: {e}"));
            for &index in &golden.gradients {
                let expected = &tensors[&format!("{}/gradient/{index}", golden.name)];
                let off = found[index].as_ref().map_or(f32::NAN, |found| distance(found, expected));
                if off.is_nan() || off > 1e-4 * largest(expected) {
                    failures.push(format!("{op} ({}), input {index}, in {dtype:?}: {off:e}", golden.name));
                }
            }
        }
    }
    assert!(goldens.cases.len() > 30 && failures.is_empty(), "{}", failures.join("\n"));
}

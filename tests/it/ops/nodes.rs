//! Ops compared with ONNX's backend tests of single operators, which `scripts/goldens nodes` converted
//! to typed ops.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress_graph::ir::Op;
use compress_graph::ir::ops::PreparedOp;
use serde::Deserialize;

use super::{infer, onnx};

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Golden>,
}

#[derive(Deserialize)]
struct Golden {
    name: String,
    operator: String,
    ops: Vec<String>,
    inputs: usize,
}

/// A test case: a sequence of ops, the inputs of the first one, and the expected outputs.
struct Case {
    name: String,
    operator: String,
    ops: Vec<Op>,
    inputs: Vec<Tensor>,
    expected: Tensor,
}

fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nodes");
    let goldens: Goldens = serde_json::from_slice(&std::fs::read(folder.join("nodes.json")).unwrap()).unwrap();
    let tensors = candle_core::safetensors::load(folder.join("nodes.safetensors"), &Device::Cpu).unwrap();
    let case = |golden: Golden| Case {
        ops: golden.ops.iter().map(|op| op.parse().unwrap_or_else(|e| panic!("{}: {e}", golden.name))).collect(),
        inputs: (0..golden.inputs).map(|index| tensors[&format!("{}/in/{index}", golden.name)].clone()).collect(),
        expected: tensors[&format!("{}/out", golden.name)].clone(),
        name: golden.name,
        operator: golden.operator,
    };
    goldens.cases.into_iter().map(case).collect()
}

/// The first element that differs from the expected value by more than a relative error of 1e-4 and an
/// absolute error of 1e-5.
fn differs(found: &Tensor, expected: &Tensor) -> Option<String> {
    if found.dims() != expected.dims() {
        return Some(format!("{:?} for {:?}", found.dims(), expected.dims()));
    }
    let values = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let far = |(a, b): &(f64, f64)| !(a == b || (a - b).abs() <= 1e-5 + 1e-4 * b.abs() || a.is_nan() && b.is_nan());
    values(found).into_iter().zip(values(expected)).find(far).map(|(a, b)| format!("{a} for {b}"))
}

#[test]
fn operators_match_the_tests_of_onnx() {
    let (mut failures, mut counts) = (Vec::new(), BTreeMap::<String, usize>::new());
    for case in cases() {
        // With the definitions of ops, and with kernels.
        for prepared in [false, true] {
            let mut values = case.inputs.clone();
            for op in &case.ops {
                let ty = infer(op, &values);
                let result = if prepared { PreparedOp::new(op, &Device::Cpu, DType::F32).forward(&values) } else { op.spec().eval(&values) };
                match (ty, result) {
                    (Ok(ty), Ok(result)) if ty.shape.iter().map(|size| size.fixed().unwrap()).eq(result.dims().iter().copied()) => values = vec![result],
                    (ty, result) => failures.push(format!("{} as {op}: {ty:?}, {:?}", case.name, result.map(|r| r.dims().to_vec()))),
                }
            }
            failures.extend(differs(&values[0], &case.expected).map(|how| format!("{} as {:?}: {how}", case.name, case.ops)));
        }
        *counts.entry(case.operator).or_default() += 1;
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
    assert!(counts.len() > 50 && counts.values().sum::<usize>() > 300, "{counts:?}");
}

#[test]
fn operators_are_written_in_the_form_of_onnx() {
    let mut runs = onnx::Runs::new();
    for case in cases() {
        runs.check(&case.name, &case.ops, &case.inputs, &|found| differs(found, &case.expected));
    }
    runs.finish();
}

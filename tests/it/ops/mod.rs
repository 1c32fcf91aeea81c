//! Properties of ops: inferred types match computed tensors.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{DType, Tensor};
use compress_graph::ir::ops::*;
use compress_graph::ir::{Axes, Bindings, Dim, Element, Op, TensorType};

mod axes;
mod cases;
mod golden;
mod gpu;
mod gradients;
mod kernels;
mod nodes;
mod onnx;

use cases::{cases, tensors};

fn types(tensors: &[Tensor]) -> Vec<TensorType> {
    let element = |t: &Tensor| if t.dtype() == DType::I64 { Element::Int } else { Element::Float };
    tensors.iter().map(|t| TensorType { element: element(t), shape: t.dims().iter().map(|d| Dim::Fixed(*d)).collect() }).collect()
}

fn infer(op: &Op, tensors: &[Tensor]) -> Result<TensorType, String> {
    let types = types(tensors);
    op.spec().output(&types.iter().collect::<Vec<_>>())
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a.to_dtype(DType::F32).unwrap() - b.to_dtype(DType::F32).unwrap()).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

fn largest(tensor: &Tensor) -> f32 {
    distance(tensor, &tensor.zeros_like().unwrap()).max(1.0)
}

#[test]
fn every_op_has_a_case() {
    let held: Vec<&str> = cases().iter().map(|c| c.op.name()).collect();
    // Opaque ops are tested in `tests/it/onnx_opaque.rs`.
    for name in OPS.iter().filter(|name| **name != "Opaque") {
        assert!(held.contains(name), "{name} has no case");
    }
}

#[test]
fn inferred_types_match_computed_tensors() {
    for case in cases() {
        let inputs = tensors(&case);
        let ty = infer(&case.op, &inputs).unwrap_or_else(|e| panic!("{}: {e}", case.op));
        let output = case.op.spec().eval(&inputs).unwrap_or_else(|e| panic!("{}: {e}", case.op));
        let sizes: Vec<usize> = ty.shape.iter().map(|d| d.evaluate(&Bindings::new()).unwrap()).collect();
        assert_eq!(output.dims(), sizes, "{}", case.op);
        assert_eq!(output.dtype() == DType::I64, ty.element == Element::Int, "{}", case.op);
    }
}

#[test]
fn ops_are_restored_from_their_text() {
    for case in cases() {
        assert_eq!(case.op.to_string().parse::<Op>().unwrap(), case.op);
        assert_eq!(serde_json::from_str::<Op>(&serde_json::to_string(&case.op).unwrap()).unwrap(), case.op);
    }
}

/// The attributes with each number replaced in turn.
fn changed(json: &serde_json::Value, number: &serde_json::Value) -> Vec<serde_json::Value> {
    use serde_json::Value;
    match json {
        Value::Number(_) => vec![number.clone()],
        Value::Array(values) => {
            let with =
                |at: usize, value| Value::Array(values.iter().enumerate().map(|(i, v)| if i == at { Value::clone(&value) } else { v.clone() }).collect());
            values.iter().enumerate().flat_map(|(at, value)| changed(value, number).into_iter().map(move |value| with(at, value))).collect()
        }
        Value::Object(map) => {
            let with = |key: &String, value| {
                let mut map = map.clone();
                map.insert(key.clone(), value);
                Value::Object(map)
            };
            map.iter().flat_map(|(key, value)| changed(value, number).into_iter().map(move |value| with(key, value))).collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn extreme_attributes_are_typed_or_rejected() {
    let numbers = [0, 1, -1, 7, i64::from(u32::MAX), i64::MAX, i64::MIN, i64::MIN + 1];
    let mut typed = 0;
    for case in cases() {
        let json = serde_json::to_value(&case.op).unwrap();
        let known = types(&tensors(&case));
        let mut open = known.clone();
        open.iter_mut().flat_map(|ty| ty.shape.iter_mut()).for_each(|size| *size = Dim::named("open"));
        for changed in numbers.iter().flat_map(|number| changed(&json, &(*number).into())) {
            let Ok(op) = serde_json::from_value::<Op>(changed) else { continue };
            for types in [&known, &open] {
                let types: Vec<&TensorType> = types.iter().collect();
                if let Ok(output) = op.spec().output(&types) {
                    op.spec().macs(&types, &output, &Bindings::from([("open".to_owned(), 3)]));
                    Axes::parse(&op.spec().axes(&types)).unwrap_or_else(|e| panic!("{op}: {e}"));
                    typed += 1;
                }
            }
        }
    }
    assert!(typed > 1000, "only {typed} were typed");
}

#[test]
fn dynamic_sizes_match_computed_ones() {
    let mut held = 0;
    for case in cases() {
        let inputs = tensors(&case);
        let output = case.op.spec().eval(&inputs).unwrap_or_else(|e| panic!("{}: {e}", case.op));
        // Each axis in turn is dynamic, which an op may reject.
        for (input, tensor) in inputs.iter().enumerate() {
            for (axis, size) in tensor.dims().iter().enumerate() {
                let mut types = types(&inputs);
                types[input].shape[axis] = Dim::named("open");
                let Ok(ty) = case.op.spec().output(&types.iter().collect::<Vec<_>>()) else { continue };
                let sizes = Bindings::from([("open".to_owned(), *size)]);
                let found: Vec<Option<usize>> = ty.shape.iter().map(|d| d.evaluate(&sizes)).collect();
                assert!(found.iter().copied().eq(output.dims().iter().map(|d| Some(*d))), "{} of {}: {ty} for {:?}", case.op, types[input], output.dims());
                assert!(ty.shape.iter().all(|d| d.to_string().parse::<Dim>().as_ref() == Ok(d)), "{}: {ty}", case.op);
                held += 1;
            }
        }
    }
    assert!(held > 200, "only {held} open axes were held");
}

#[test]
fn products_have_a_cost() {
    for case in cases() {
        let inputs = tensors(&case);
        let types = types(&inputs);
        let output = infer(&case.op, &inputs).unwrap();
        let macs = case.op.spec().macs(&types.iter().collect::<Vec<_>>(), &output, &Bindings::new());
        assert_eq!(
            macs > 0,
            matches!(
                case.op,
                Op::Linear(_)
                    | Op::Conv(_)
                    | Op::CausalConv(_)
                    | Op::GatedDelta(_)
                    | Op::ConvTranspose(_)
                    | Op::Attention(_)
                    | Op::DeformableAttention(_)
                    | Op::RelativeProducts(_)
                    | Op::MatMul(_)
                    | Op::Recurrent(_)
            ),
            "{}",
            case.op
        );
    }
}

#[test]
fn wrong_inputs_are_refused() {
    for case in cases() {
        let types = types(&tensors(&case));
        let refs: Vec<&TensorType> = types.iter().collect();
        assert!(case.op.spec().output(&[]).is_err(), "{} without inputs", case.op);
        let many: Vec<&TensorType> = refs.iter().copied().cycle().take(7).collect();
        assert!(case.op.spec().output(&many).is_err() || matches!(case.op, Op::Concat(_)), "{} with seven inputs", case.op);
        // Data movement and cumulative sums also support integers.
        if matches!(case.op, Op::CumSum(_) | Op::Reshape(_) | Op::Slice(_) | Op::Transpose(_)) {
            continue;
        }
        let flipped = TensorType { element: if types[0].element == Element::Int { Element::Float } else { Element::Int }, ..types[0].clone() };
        let mut wrong = refs.clone();
        wrong[0] = &flipped;
        assert!(case.op.spec().output(&wrong).is_err(), "{} with the wrong elements", case.op);
    }
}

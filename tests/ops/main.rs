//! Laws of ops: what is inferred is what is computed.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{DType, Tensor};
use compress::ir::ops::*;
use compress::ir::{Bindings, Dim, Element, Op, TensorType};

mod axes;
mod cases;
mod golden;
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
    for name in OPS {
        assert!(held.contains(name), "{name} has no case");
    }
}

#[test]
fn what_is_inferred_is_what_is_computed() {
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
fn products_cost_something() {
    for case in cases() {
        let inputs = tensors(&case);
        let types = types(&inputs);
        let output = infer(&case.op, &inputs).unwrap();
        let macs = case.op.spec().macs(&types.iter().collect::<Vec<_>>(), &output, &Bindings::new());
        assert_eq!(macs > 0, matches!(case.op, Op::Linear(_) | Op::Conv(_) | Op::ConvTranspose(_) | Op::Attention(_) | Op::MatMul(_)), "{}", case.op);
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
        // Axes are moved of whole numbers too.
        if matches!(case.op, Op::Reshape(_) | Op::Transpose(_)) {
            continue;
        }
        let flipped = TensorType { element: if types[0].element == Element::Int { Element::Float } else { Element::Int }, ..types[0].clone() };
        let mut wrong = refs.clone();
        wrong[0] = &flipped;
        assert!(case.op.spec().output(&wrong).is_err(), "{} with the wrong elements", case.op);
    }
}

//! Laws of ops: what is inferred is what is computed; axes that are declared free commute with slicing.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{DType, Device, Tensor};
use compress::ir::axes::{Axes, Axis};
use compress::ir::ops::*;
use compress::ir::{Bindings, Dim, Element, Op, TensorType};

mod cases;
mod gradients;
mod onnx;

use cases::{cases, tensors};

fn types(tensors: &[Tensor]) -> Vec<TensorType> {
    let element = |t: &Tensor| if t.dtype() == DType::I64 { Element::Int } else { Element::Float };
    tensors.iter().map(|t| TensorType { element: element(t), shape: t.dims().iter().map(|d| Dim::Fixed(*d)).collect() }).collect()
}

fn infer(op: &Op, tensors: &[Tensor]) -> Result<TensorType, String> {
    let types = types(tensors);
    op.spec().infer(&types.iter().collect::<Vec<_>>())
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a.to_dtype(DType::F32).unwrap() - b.to_dtype(DType::F32).unwrap()).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
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
        for mode in [Mode::Infer, Mode::Train] {
            let output = case.op.spec().eval(&inputs, mode).unwrap_or_else(|e| panic!("{}: {e}", case.op));
            let sizes: Vec<usize> = ty.shape.iter().map(|d| d.evaluate(&Bindings::new()).unwrap()).collect();
            assert_eq!(output.dims(), sizes, "{}", case.op);
            assert_eq!(output.dtype() == DType::I64, ty.element == Element::Int, "{}", case.op);
        }
    }
}

#[test]
fn both_modes_compute_the_same() {
    for case in cases() {
        let inputs = tensors(&case);
        let [fast, plain] = [Mode::Infer, Mode::Train].map(|mode| case.op.spec().eval(&inputs, mode).unwrap());
        assert!(distance(&fast, &plain) < 1e-5, "{}", case.op);
    }
}

/// Where a free letter stands in a tensor: the axis, and for products the extent of what is inside the letter.
fn place(axes: &[Axis], shape: &[usize], letter: &str) -> Option<usize> {
    let lead = shape.len() + usize::from(axes.contains(&Axis::Leading)) - axes.len();
    let mut at = 0;
    for axis in axes {
        match axis {
            Axis::Leading => at += lead,
            Axis::Letter { name, frozen: false } if name == letter => return Some(at),
            _ => at += 1,
        }
    }
    None
}

fn mentions(axis: &Axis, letter: &str) -> bool {
    match axis {
        Axis::Letter { name, .. } => name == letter,
        Axis::Product(inner) => inner.iter().any(|a| mentions(a, letter)),
        _ => false,
    }
}

fn letters(axes: &Axes) -> Vec<String> {
    let mut found = Vec::new();
    for axis in axes.inputs.iter().chain([&axes.output]).flatten() {
        if let Axis::Letter { name, frozen: false } = axis {
            found.push(name.clone());
        }
    }
    found.sort();
    found.dedup();
    // Letters inside products are held to the law by the analysis that splits them.
    found.retain(|l| !axes.inputs.iter().chain([&axes.output]).flatten().any(|a| matches!(a, Axis::Product(_)) && mentions(a, l)));
    found
}

#[test]
fn free_letters_commute_with_slicing() {
    let mut checked = 0;
    for case in cases() {
        let inputs = tensors(&case);
        let axes = Axes::parse(&case.op.spec().axes(inputs.len())).unwrap();
        let whole = case.op.spec().eval(&inputs, Mode::Infer).unwrap();
        for letter in letters(&axes) {
            let places: Vec<Option<usize>> = inputs.iter().zip(&axes.inputs).map(|(t, a)| place(a, t.dims(), &letter)).collect();
            let Some(size) = inputs.iter().zip(&places).find_map(|(t, p)| p.map(|p| t.dims()[p])) else { continue };
            if size < 2 {
                continue;
            }
            let keep = Tensor::from_vec((0..size as u32 - 1).collect::<Vec<_>>(), size - 1, &Device::Cpu).unwrap();
            let sliced: Vec<Tensor> = inputs.iter().zip(&places).map(|(t, p)| p.map_or(t.clone(), |p| t.index_select(&keep, p).unwrap())).collect();
            let result = case.op.spec().eval(&sliced, Mode::Infer).unwrap_or_else(|e| panic!("{} without one `{letter}`: {e}", case.op));
            let expected = match place(&axes.output, whole.dims(), &letter) {
                Some(at) => whole.contiguous().unwrap().index_select(&keep, at).unwrap(),
                // A letter that is summed over: taking it out equals making it zero.
                None => {
                    let gone = |t: &Tensor, p: usize| {
                        let mut shape = t.dims().to_vec();
                        shape[p] = 1;
                        let zero = Tensor::zeros(shape.as_slice(), t.dtype(), &Device::Cpu).unwrap();
                        Tensor::cat(&[&t.index_select(&keep, p).unwrap(), &zero], p).unwrap()
                    };
                    let zeroed: Vec<Tensor> = inputs.iter().zip(&places).map(|(t, p)| p.map_or(t.clone(), |p| gone(t, p))).collect();
                    case.op.spec().eval(&zeroed, Mode::Infer).unwrap()
                }
            };
            assert!(distance(&result, &expected) < 1e-5, "{}, letter `{letter}`", case.op);
            checked += 1;
        }
    }
    assert!(checked > 30, "only {checked} letters were checked");
}

#[test]
fn products_cost_something() {
    for case in cases() {
        let inputs = tensors(&case);
        let types = types(&inputs);
        let output = infer(&case.op, &inputs).unwrap();
        let macs = case.op.spec().macs(&types.iter().collect::<Vec<_>>(), &output, &Bindings::new());
        assert_eq!(macs > 0, matches!(case.op, Op::Linear(_) | Op::Conv(_) | Op::Attention(_)), "{}", case.op);
    }
}

#[test]
fn wrong_inputs_are_refused() {
    for case in cases() {
        let types = types(&tensors(&case));
        let refs: Vec<&TensorType> = types.iter().collect();
        assert!(case.op.spec().infer(&[]).is_err(), "{} without inputs", case.op);
        let many: Vec<&TensorType> = refs.iter().copied().cycle().take(7).collect();
        assert!(case.op.spec().infer(&many).is_err(), "{} with seven inputs", case.op);
        let flipped = TensorType { element: if types[0].element == Element::Int { Element::Float } else { Element::Int }, ..types[0].clone() };
        let mut wrong = refs.clone();
        wrong[0] = &flipped;
        assert!(case.op.spec().infer(&wrong).is_err(), "{} with the wrong elements", case.op);
    }
}

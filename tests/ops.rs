//! Laws of ops: what is inferred is what is computed; axes that are declared free commute with slicing.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{DType, Device, Tensor};
use compress::ir::axes::{Axes, Axis};
use compress::ir::ops::*;
use compress::ir::{Bindings, Dim, Element, Op, TensorType};

/// An op and the sizes of its inputs; inputs of whole numbers are marked.
struct Case {
    op: Op,
    inputs: Vec<(Vec<usize>, bool)>,
}

fn case(op: impl Into<Op>, shapes: &[&[usize]]) -> Case {
    Case { op: op.into(), inputs: shapes.iter().map(|s| (s.to_vec(), false)).collect() }
}

fn with_ints(mut case: Case, at: &[usize]) -> Case {
    for &i in at {
        case.inputs[i].1 = true;
    }
    case
}

fn cases() -> Vec<Case> {
    let conv = |groups, stride, padding| Conv { groups, stride, padding, dilation: 1 };
    vec![
        case(Linear { input_major: false }, &[&[2, 3, 6], &[4, 6], &[4]]),
        case(Linear { input_major: true }, &[&[2, 6], &[6, 4]]),
        case(conv(1, 1, 1), &[&[2, 4, 5, 6], &[6, 4, 3, 3], &[6]]),
        case(conv(2, 2, 0), &[&[2, 4, 7, 6], &[6, 2, 3, 3], &[6]]),
        case(conv(4, 1, 1), &[&[2, 4, 5, 5], &[4, 1, 3, 3]]),
        case(BatchNorm::default(), &[&[2, 4, 3, 3], &[4], &[4], &[4], &[4]]),
        case(LayerNorm::default(), &[&[2, 3, 6], &[6], &[6]]),
        case(RmsNorm::default(), &[&[2, 3, 6], &[6]]),
        case(Relu {}, &[&[2, 5]]),
        case(Gelu { tanh: false }, &[&[2, 5]]),
        case(Gelu { tanh: true }, &[&[2, 5]]),
        case(Silu {}, &[&[2, 5]]),
        case(Sigmoid {}, &[&[2, 5]]),
        case(Tanh {}, &[&[2, 5]]),
        case(Clip { min: -0.5, max: 0.5 }, &[&[2, 5]]),
        case(Softmax {}, &[&[2, 3, 5]]),
        case(Add {}, &[&[2, 3, 5], &[2, 3, 5]]),
        case(Mul {}, &[&[2, 3, 5], &[2, 3, 5]]),
        with_ints(case(Embedding {}, &[&[2, 3], &[9, 5]]), &[0]),
        with_ints(case(Positions { padding: None }, &[&[2, 3]]), &[0]),
        with_ints(case(Positions { padding: Some(1) }, &[&[2, 3]]), &[0]),
        case(Rotary::default(), &[&[2, 3, 4, 6]]),
        case(SplitHeads { head_dim: 3 }, &[&[2, 4, 6]]),
        case(MergeHeads {}, &[&[2, 2, 4, 3]]),
        case(Attention { scale: 0.5, causal: false, window: None }, &[&[2, 4, 5, 3], &[2, 2, 5, 3], &[2, 2, 5, 6]]),
        with_ints(case(Attention { scale: 0.5, causal: true, window: Some(2) }, &[&[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 4, 5, 3], &[2, 5]]), &[3]),
        case(MaxPool { kernel: 3, stride: 2, padding: 1 }, &[&[2, 4, 7, 8]]),
        case(MaxPool::default(), &[&[2, 4, 6, 6]]),
        case(GlobalAveragePool {}, &[&[2, 4, 5, 3]]),
        case(Flatten { channels_last: false }, &[&[2, 4, 3, 2]]),
        case(Flatten { channels_last: true }, &[&[2, 4, 3, 2]]),
        case(Tokens {}, &[&[2, 4, 3, 2]]),
        case(Prepend {}, &[&[1, 1, 4], &[2, 3, 4]]),
        case(Select { index: 1 }, &[&[2, 3, 4]]),
        case(Slice { start: 2, length: 3 }, &[&[2, 3, 6]]),
        with_ints(case(MaskedMean {}, &[&[2, 3, 4], &[2, 3]]), &[1]),
        case(Normalize {}, &[&[2, 3, 4]]),
    ]
}

fn tensors(case: &Case) -> Vec<Tensor> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut make = |(shape, whole): &(Vec<usize>, bool)| {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| if *whole { f32::from(next() > 0.3) } else { next() + 0.1 }).collect();
        let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap();
        if *whole { tensor.to_dtype(DType::I64).unwrap() } else { tensor }
    };
    case.inputs.iter().map(&mut make).collect()
}

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
                Some(at) => whole.index_select(&keep, at).unwrap(),
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

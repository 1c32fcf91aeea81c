//! Gradients of `Mode::Train` against finite differences, in f64.
//!
//! An op whose evaluation drops a gradient without a word, as candle's fused kernels do, fails here.

use candle_core::{DType, Device, Tensor, Var};
use compress::ir::Op;
use compress::ir::ops::{Backward, BatchNorm, Clip, Mode, Saved};

use super::cases::{cases, tensors};

const STEP: f64 = 1e-5;

/// Inputs on both sides of zero where that is allowed: numbers between -1 and 1, none of them near a kink.
fn spread(op: &Op, inputs: Vec<Tensor>) -> Vec<Tensor> {
    inputs
        .into_iter()
        .enumerate()
        .map(|(index, tensor)| match tensor.dtype() {
            // A query that sees nothing but padding has a gradient that means nothing.
            DType::I64 if matches!(op, Op::Attention(_)) => Tensor::new(&[[1i64, 0, 1, 1, 0], [1, 0, 1, 0, 1]], &Device::Cpu).unwrap(),
            DType::I64 => tensor,
            _ if matches!(op, Op::BatchNorm(_)) && index == 4 => tensor.to_dtype(DType::F64).unwrap(),
            _ => ((tensor.to_dtype(DType::F64).unwrap() - 0.6).unwrap() * 2.0).unwrap(),
        })
        .collect()
}

/// What the gradients are those of: rounding counts as not done.
fn smooth(op: &Op) -> Op {
    match op {
        Op::FakeQuantize(op) => Clip { min: op.range().0.into(), max: op.range().1.into() }.into(),
        other => other.clone(),
    }
}

/// A sum over the output with a different weight for each element.
fn loss(op: &Op, inputs: &[Tensor]) -> Tensor {
    let output = op.spec().eval(inputs, Mode::Train).unwrap_or_else(|e| panic!("{op}: {e}")).flatten_all().unwrap();
    let weights: Vec<f64> = (0..output.elem_count()).map(|i| (1.7 * i as f64 + 0.3).sin()).collect();
    let weights = Tensor::from_vec(weights, output.elem_count(), &Device::Cpu).unwrap();
    (output * weights).unwrap().sum_all().unwrap()
}

fn number(tensor: &Tensor) -> f64 {
    tensor.to_scalar().unwrap()
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let mut checked = 0;
    for case in cases() {
        let inputs = spread(&case.op, tensors(&case));
        for (index, input) in inputs.iter().enumerate().filter(|(_, input)| input.dtype() == DType::F64) {
            let variable = Var::from_tensor(input).unwrap();
            let with = |op: &Op, tensor: &Tensor| {
                let mut inputs = inputs.clone();
                inputs[index] = tensor.clone();
                loss(op, &inputs)
            };
            let like = smooth(&case.op);
            let gradients = with(&case.op, variable.as_tensor()).backward().unwrap_or_else(|e| panic!("{}: {e}", case.op));
            if matches!(case.op, Op::BatchNorm(BatchNorm { batch: true, .. })) && index > 2 {
                continue;
            }
            let gradient = gradients.get(variable.as_tensor()).unwrap_or_else(|| panic!("{} drops the gradient of input {index}", case.op));
            let gradient: Vec<f64> = gradient.flatten_all().unwrap().to_vec1().unwrap();
            let values: Vec<f64> = input.flatten_all().unwrap().to_vec1().unwrap();
            let largest = gradient.iter().fold(0f64, |most, g| most.max(g.abs()));
            // Large tensors are sampled.
            for at in (0..values.len()).step_by(values.len().div_ceil(60)) {
                let moved = |by: f64| {
                    let mut values = values.clone();
                    values[at] += by;
                    number(&with(&like, &Tensor::from_vec(values, input.dims(), &Device::Cpu).unwrap()))
                };
                let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!(
                    (difference - gradient[at]).abs() < 1e-4 * (1.0 + largest),
                    "{}, input {index}, element {at}: the gradient is {}, the difference {difference}",
                    case.op,
                    gradient[at]
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 1000, "only {checked} elements were checked");
}

/// What an op's own way back is given: only what it says that it reads.
fn saved(op: &Op, inputs: &[Tensor], output: &Tensor) -> (Vec<Saved>, Saved) {
    let keep = |keep: bool, tensor: &Tensor| if keep { Saved::whole(tensor.clone()) } else { Saved::shape(tensor.dims()) };
    let inputs = inputs.iter().enumerate().map(|(index, input)| keep(op.spec().reads_input(index), input)).collect();
    (inputs, keep(op.spec().reads_output(), output))
}

#[test]
fn ways_back_equal_those_of_primitives() {
    for dtype in [DType::F64, DType::F32] {
        for case in cases() {
            let inputs: Vec<Tensor> =
                spread(&case.op, tensors(&case)).into_iter().map(|t| if t.dtype().is_float() { t.to_dtype(dtype).unwrap() } else { t }).collect();
            let output = case.op.spec().eval(&inputs, if dtype == DType::F32 { Mode::Infer } else { Mode::Train }).unwrap();
            if !output.dtype().is_float() {
                continue;
            }
            let weights: Vec<f64> = (0..output.elem_count()).map(|i| (1.7 * i as f64 + 0.3).sin()).collect();
            let gradient = Tensor::from_vec(weights, output.dims(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let wanted: Vec<bool> = inputs.iter().map(|input| input.dtype().is_float()).collect();
            let (kept, kept_output) = saved(&case.op, &inputs, &output);
            let ours = case.op.spec().backward(&Backward { inputs: &kept, output: &kept_output, gradient: &gradient, wanted: &wanted });
            let ours = ours.unwrap_or_else(|e| panic!("{}: {e}", case.op));
            let variables: Vec<Var> = inputs.iter().map(|input| Var::from_tensor(input).unwrap()).collect();
            let tracked: Vec<Tensor> = variables.iter().map(|v| v.as_tensor().clone()).collect();
            let loss = (case.op.spec().eval(&tracked, Mode::Train).unwrap() * &gradient).unwrap().sum_all().unwrap();
            let theirs = loss.backward().unwrap();
            for (index, variable) in variables.iter().enumerate() {
                let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                let (Some(ours), Some(theirs)) = (&ours[index], theirs.get(variable)) else {
                    assert!(!wanted[index] || theirs.get(variable).is_none(), "{}, input {index}: no gradient", case.op);
                    continue;
                };
                assert_eq!(ours.dims(), inputs[index].dims(), "{}, input {index}", case.op);
                let (ours, theirs) = (wide(ours), wide(theirs));
                let largest = theirs.iter().fold(1e-3f64, |most, g| most.max(g.abs()));
                for (at, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                    assert!((a - b).abs() < 1e-5 * largest, "{} in {dtype:?}, input {index}, element {at}: {a} for {b}", case.op);
                }
            }
        }
    }
}

//! Gradients of `Mode::Train` against finite differences, in f64.
//!
//! An op whose evaluation drops a gradient without a word, as candle's fused kernels do, fails here.

use candle_core::{DType, Device, Tensor, Var};
use compress::ir::Op;
use compress::ir::ops::{Clip, Mode};

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

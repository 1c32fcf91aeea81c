//! Gradients compared with finite differences in f64.

use candle_core::{DType, Device, Tensor};
use compress_graph::ir::Op;
use compress_graph::ir::ops::{Backward, BatchNorm, Binary, BinaryKind, Clip, Detach, PreparedOp, Saved};

use super::cases::{Case, cases, larger_cases, tensors};

const STEP: f64 = 1e-5;

/// Inputs of both signs if the op allows them: numbers between -1 and 1, none of them near a kink.
pub fn spread(op: &Op, inputs: Vec<Tensor>) -> Vec<Tensor> {
    inputs
        .into_iter()
        .enumerate()
        .map(|(index, tensor)| match tensor.dtype() {
            // The gradient of a query with only masked keys is undefined.
            DType::I64 if matches!(op, Op::Attention(_)) => {
                let values: Vec<i64> = (0..tensor.elem_count()).map(|i| i64::from(i % 3 != 1)).collect();
                Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap()
            }
            DType::I64 => tensor,
            _ if matches!(op, Op::BatchNorm(_)) && index == 4 => tensor.to_dtype(DType::F64).unwrap(),
            _ if positive(op, index) => tensor.to_dtype(DType::F64).unwrap(),
            _ => ((tensor.to_dtype(DType::F64).unwrap() - 0.6).unwrap() * 2.0).unwrap(),
        })
        .collect()
}

/// Whether an input must be positive for the op to be differentiable.
fn positive(op: &Op, input: usize) -> bool {
    match op {
        Op::Sqrt(_) | Op::Log(_) | Op::Reciprocal(_) => true,
        Op::Binary(Binary { kind: BinaryKind::Pow }) => input == 0,
        Op::Binary(Binary { kind: BinaryKind::Div }) => input == 1,
        _ => false,
    }
}

/// The differentiated function: rounding is treated as the identity (straight-through estimator).
fn smooth(op: &Op) -> Op {
    match op {
        Op::FakeQuantize(op) => Clip { min: op.range().0.into(), max: op.range().1.into() }.into(),
        other => other.clone(),
    }
}

/// A different weight for each element of an output.
pub fn weights(output: &Tensor) -> Tensor {
    let weights: Vec<f64> = (0..output.elem_count()).map(|i| (1.7 * i as f64 + 0.3).sin()).collect();
    Tensor::from_vec(weights, output.dims(), &Device::Cpu).unwrap()
}

/// A sum over the output with a different weight for each element.
fn loss(op: &Op, inputs: &[Tensor]) -> f64 {
    let output = op.spec().eval(inputs).unwrap_or_else(|e| panic!("{op}: {e}"));
    (&output * weights(&output)).unwrap().sum_all().unwrap().to_scalar().unwrap()
}

#[test]
fn gradients_match_finite_differences() {
    let mut checked = 0;
    for (case, inputs) in all_cases() {
        let inputs = converted(&inputs, DType::F64);
        // The gradient of the scale includes rounding; it is checked against PyTorch's goldens. Detached
        // values have none.
        let differs = |op: &Op| matches!(op, Op::LearnedFakeQuantize(_) | Op::CacheQuantize(_) | Op::Detach(_));
        let Some((gradient, wanted)) = output_gradient(&case, &inputs).filter(|_| !differs(&case.op)) else {
            continue;
        };
        let gradients = backward(&case.op, &inputs, &gradient, &wanted);
        let like = smooth(&case.op);
        for (index, input) in inputs.iter().enumerate().filter(|(_, input)| input.dtype() == DType::F64) {
            if matches!(case.op, Op::BatchNorm(BatchNorm { batch: true, .. })) && index > 2 {
                continue;
            }
            let found = gradients[index].as_ref().unwrap_or_else(|| panic!("{} drops the gradient of input {index}", case.op));
            let (found, values) = (wide(found), wide(input));
            let largest = found.iter().fold(0f64, |most, g| most.max(g.abs()));
            // Large tensors are sampled.
            for at in (0..values.len()).step_by(values.len().div_ceil(if values.len() > 1000 { 2 } else { 60 })) {
                let moved = |by: f64| {
                    let (mut values, mut inputs) = (values.clone(), inputs.clone());
                    values[at] += by;
                    inputs[index] = Tensor::from_vec(values, input.dims(), &Device::Cpu).unwrap();
                    loss(&like, &inputs)
                };
                let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!(
                    (difference - found[at]).abs() < 1e-4 * (1.0 + largest),
                    "{} of {:?}, input {index}, element {at}: the gradient is {}, the difference {difference}",
                    case.op,
                    case.inputs,
                    found[at]
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 1000, "only {checked} elements were checked");
}

/// The inputs of the backward pass of an op: only the values that it declares to read.
pub fn saved(op: &Op, inputs: &[Tensor], output: &Tensor) -> (Vec<Saved>, Saved) {
    let keep = |keep: bool, tensor: &Tensor| if keep { Saved::full(tensor.clone()) } else { Saved::shape(tensor.dims()) };
    let inputs = inputs.iter().enumerate().map(|(index, input)| keep(op.spec().reads_input(index), input)).collect();
    (inputs, keep(op.spec().reads_output(), output))
}

/// Gradients by the definition.
pub fn backward(op: &Op, inputs: &[Tensor], gradient: &Tensor, wanted: &[bool]) -> Vec<Option<Tensor>> {
    let output = op.spec().eval(inputs).unwrap_or_else(|e| panic!("{op}: {e}"));
    let (kept, kept_output) = saved(op, inputs, &output);
    let backward = Backward { inputs: &kept, output: &kept_output, gradient, needs_gradient: wanted };
    op.spec().backward(&backward).unwrap_or_else(|e| panic!("{op}: {e}"))
}

/// Gradients by the host kernel, if there is one.
fn computed_gradients(case: &Case, inputs: &[Tensor], gradient: &Tensor, wanted: &[bool]) -> Vec<Option<Tensor>> {
    let prepared = PreparedOp::new(&case.op, &Device::Cpu, gradient.dtype());
    let (kept, kept_output) = saved(&case.op, inputs, &prepared.forward(inputs).unwrap());
    let backward = Backward { inputs: &kept, output: &kept_output, gradient, needs_gradient: wanted };
    prepared.backward(&backward).unwrap_or_else(|e| panic!("{}: {e}", case.op))
}

pub fn converted(tensors: &[Tensor], dtype: DType) -> Vec<Tensor> {
    tensors.iter().map(|t| if t.dtype().is_float() { t.to_dtype(dtype).unwrap() } else { t.clone() }).collect()
}

/// A gradient of the output, and which inputs are differentiable.
pub fn output_gradient(case: &Case, inputs: &[Tensor]) -> Option<(Tensor, Vec<bool>)> {
    let output = case.op.spec().eval(inputs).unwrap_or_else(|e| panic!("{}: {e}", case.op));
    output.dtype().is_float().then(|| (weights(&output), inputs.iter().map(|input| input.dtype().is_float()).collect()))
}

pub fn all_cases() -> impl Iterator<Item = (Case, Vec<Tensor>)> {
    cases().into_iter().chain(larger_cases()).map(|case| {
        let inputs = spread(&case.op, tensors(&case));
        (case, inputs)
    })
}

pub fn wide(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn only_requested_gradients_are_returned() {
    for (case, inputs) in all_cases() {
        let Some((gradient, wanted)) = output_gradient(&case, &inputs) else { continue };
        for dtype in [DType::F64, DType::F32] {
            let (inputs, gradient) = (converted(&inputs, dtype), gradient.to_dtype(dtype).unwrap());
            let all = computed_gradients(&case, &inputs, &gradient, &wanted);
            for index in (0..inputs.len()).filter(|index| wanted[*index]) {
                let only: Vec<bool> = (0..inputs.len()).map(|other| other == index).collect();
                let one = computed_gradients(&case, &inputs, &gradient, &only);
                for (at, one) in one.iter().enumerate() {
                    assert_eq!(one.is_some(), at == index && all[index].is_some(), "{}, input {at} where {index} is wanted", case.op);
                }
                if let (Some(one), Some(all)) = (&one[index], &all[index]) {
                    assert_eq!(wide(one), wide(all), "{}, input {index}", case.op);
                }
            }
        }
    }
}

#[test]
fn detached_values_have_no_gradient() {
    let x = Tensor::new(&[0.5f64, -1.0], &Device::Cpu).unwrap();
    let op = Op::from(Detach {});
    assert_eq!(wide(&op.spec().eval(std::slice::from_ref(&x)).unwrap()), [0.5, -1.0]);
    assert!(backward(&op, std::slice::from_ref(&x), &x, &[true])[0].is_none());
}

#[test]
fn threads_do_not_change_gradients() {
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let of = |(case, inputs): (Case, Vec<Tensor>)| {
                let inputs = converted(&inputs, DType::F32);
                let (gradient, wanted) = output_gradient(&case, &inputs)?;
                let gradients = computed_gradients(&case, &inputs, &gradient.to_dtype(DType::F32).unwrap(), &wanted);
                Some((case.op.to_string(), gradients.iter().map(|g| g.as_ref().map(wide)).collect::<Vec<_>>()))
            };
            all_cases().filter_map(of).collect::<Vec<_>>()
        })
    };
    for (one, two) in with(1).into_iter().zip(with(2)) {
        assert!(one == two, "{}", one.0);
    }
}

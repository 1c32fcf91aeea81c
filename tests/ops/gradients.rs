//! Gradients of `Mode::Train` against finite differences, in f64.
//!
//! An op whose evaluation drops a gradient without a word, as candle's fused kernels do, fails here.

use candle_core::{DType, Device, Tensor, Var};
use compress::ir::Op;
use compress::ir::ops::{Backward, BatchNorm, Clip, Mode, Saved};

use super::cases::{Case, cases, larger_cases, tensors};

const STEP: f64 = 1e-5;

/// Inputs on both sides of zero where that is allowed: numbers between -1 and 1, none of them near a kink.
fn spread(op: &Op, inputs: Vec<Tensor>) -> Vec<Tensor> {
    inputs
        .into_iter()
        .enumerate()
        .map(|(index, tensor)| match tensor.dtype() {
            // A query that sees nothing but padding has a gradient that means nothing.
            DType::I64 if matches!(op, Op::Attention(_)) => {
                let values: Vec<i64> = (0..tensor.elem_count()).map(|i| i64::from(i % 3 != 1)).collect();
                Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap()
            }
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
            // Counts rounding as done for the scale; PyTorch's goldens hold it.
            if matches!(case.op, Op::LearnedFakeQuantize(_)) {
                continue;
            }
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

/// What an op's own backward is given: only what it says that it reads.
fn saved(op: &Op, inputs: &[Tensor], output: &Tensor) -> (Vec<Saved>, Saved) {
    let keep = |keep: bool, tensor: &Tensor| if keep { Saved::whole(tensor.clone()) } else { Saved::shape(tensor.dims()) };
    let inputs = inputs.iter().enumerate().map(|(index, input)| keep(op.spec().reads_input(index), input)).collect();
    (inputs, keep(op.spec().reads_output(), output))
}

/// Gradients of all inputs by the op's own backward, from inputs of this type; those of whole numbers stay.
fn ours(case: &Case, inputs: &[Tensor], gradient: &Tensor, wanted: &[bool]) -> Vec<Option<Tensor>> {
    let mode = if gradient.dtype() == DType::F64 { Mode::Train } else { Mode::Infer };
    let output = case.op.spec().eval(inputs, mode).unwrap();
    let (kept, kept_output) = saved(&case.op, inputs, &output);
    let backward = Backward { inputs: &kept, output: &kept_output, gradient, wanted };
    case.op.spec().backward(&backward).unwrap_or_else(|e| panic!("{}: {e}", case.op))
}

/// Gradients of all inputs by primitives.
fn theirs(case: &Case, inputs: &[Tensor], gradient: &Tensor) -> Vec<Option<Tensor>> {
    let variables: Vec<Var> = inputs.iter().map(|input| Var::from_tensor(input).unwrap()).collect();
    let tracked: Vec<Tensor> = variables.iter().map(|v| v.as_tensor().clone()).collect();
    let loss = (case.op.spec().eval(&tracked, Mode::Train).unwrap() * gradient).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    variables.iter().map(|variable| gradients.get(variable).cloned()).collect()
}

fn converted(tensors: &[Tensor], dtype: DType) -> Vec<Tensor> {
    tensors.iter().map(|t| if t.dtype().is_float() { t.to_dtype(dtype).unwrap() } else { t.clone() }).collect()
}

/// A gradient of the output, and for which inputs there is one.
fn given(case: &Case, inputs: &[Tensor]) -> Option<(Tensor, Vec<bool>)> {
    let output = case.op.spec().eval(inputs, Mode::Train).unwrap();
    let weights: Vec<f64> = (0..output.elem_count()).map(|i| (1.7 * i as f64 + 0.3).sin()).collect();
    let gradient = Tensor::from_vec(weights, output.dims(), &Device::Cpu).unwrap();
    output.dtype().is_float().then(|| (gradient, inputs.iter().map(|input| input.dtype().is_float()).collect()))
}

fn all_cases() -> impl Iterator<Item = (Case, Vec<Tensor>)> {
    cases().into_iter().chain(larger_cases()).map(|case| {
        let inputs = spread(&case.op, tensors(&case));
        (case, inputs)
    })
}

fn wide(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn ways_back_equal_those_of_primitives() {
    // Slopes of primitives have constants of seven digits. Two ways of 16 bits differ by what they round; both are held to f64.
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::F32, 5e-5), (DType::F16, 0.01), (DType::BF16, 0.05)] {
        for (case, inputs) in all_cases() {
            // There are no products of bf16 matrices on the CPU.
            if dtype == DType::BF16 && matches!(case.op, Op::Linear(_) | Op::Conv(_) | Op::Attention(_)) {
                continue;
            }
            let inputs = converted(&inputs, dtype);
            let exact = converted(&inputs, DType::F64);
            let Some((gradient, wanted)) = given(&case, &exact) else { continue };
            let gradient = gradient.to_dtype(dtype).unwrap();
            let ours = ours(&case, &inputs, &gradient, &wanted);
            let theirs = theirs(&case, &exact, &gradient.to_dtype(DType::F64).unwrap());
            assert_eq!(ours.len(), inputs.len(), "{}", case.op);
            for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let (Some(ours), Some(theirs)) = (ours, theirs) else {
                    assert!(!wanted[index] || theirs.is_none(), "{}, input {index}: no gradient", case.op);
                    continue;
                };
                assert_eq!((ours.dims(), ours.dtype()), (inputs[index].dims(), dtype), "{}, input {index}", case.op);
                let (ours, theirs) = (wide(ours), wide(theirs));
                let largest = theirs.iter().fold(0.2f64, |most, g| most.max(g.abs()));
                for (at, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                    assert!((a - b).abs() < tolerance * largest, "{} of {:?} in {dtype:?}, input {index}, element {at}: {a} for {b}", case.op, case.inputs);
                }
            }
        }
    }
}

#[test]
fn only_what_is_wanted_comes_back() {
    for (case, inputs) in all_cases() {
        let Some((gradient, wanted)) = given(&case, &inputs) else { continue };
        for dtype in [DType::F64, DType::F32] {
            let (inputs, gradient) = (converted(&inputs, dtype), gradient.to_dtype(dtype).unwrap());
            let all = ours(&case, &inputs, &gradient, &wanted);
            for index in (0..inputs.len()).filter(|index| wanted[*index]) {
                let only: Vec<bool> = (0..inputs.len()).map(|other| other == index).collect();
                let one = ours(&case, &inputs, &gradient, &only);
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
fn threads_change_nothing() {
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let of = |(case, inputs): (Case, Vec<Tensor>)| {
                let inputs = converted(&inputs, DType::F32);
                let (gradient, wanted) = given(&case, &inputs)?;
                let gradients = ours(&case, &inputs, &gradient.to_dtype(DType::F32).unwrap(), &wanted);
                Some((case.op.to_string(), gradients.iter().map(|g| g.as_ref().map(wide)).collect::<Vec<_>>()))
            };
            all_cases().filter_map(of).collect::<Vec<_>>()
        })
    };
    for (one, two) in with(1).into_iter().zip(with(2)) {
        assert!(one == two, "{}", one.0);
    }
}

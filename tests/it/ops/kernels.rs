//! Property of kernels: on every device and in every float dtype, the definition of an op and its
//! kernels compute the same, up to rounding, as the definition in f64 on the host.

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use compress_graph::ir::Op;
use compress_graph::ir::ops::*;

use super::cases::Case;
use super::gradients::{all_cases, backward, converted, output_gradient, saved, wide};

/// Float dtypes and tolerances of values and gradients, relative to the largest element.
const TYPES: [(DType, f64); 3] = [(DType::F32, 5e-5), (DType::F16, 0.01), (DType::BF16, 0.05)];

/// The CPU and the device of [`device`].
fn devices() -> Vec<Device> {
    [Some(Device::Cpu), Some(device()).filter(|device| !device.is_cpu())].into_iter().flatten().collect()
}

fn on(tensors: &[Tensor], device: &Device) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.to_device(device).unwrap()).collect()
}

/// Reports if two tensors differ by more than a tolerance relative to the largest element.
fn compare(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64, failures: &mut Vec<String>) {
    if found.dims() != expected.dims() {
        return failures.push(format!("{what}: {:?} for {:?}", found.dims(), expected.dims()));
    }
    let (found, expected) = (wide(&found.to_device(&Device::Cpu).unwrap()), wide(expected));
    let largest = expected.iter().fold(0.2f64, |most, x| most.max(x.abs()));
    let worst =
        found.iter().zip(&expected).map(|(a, b)| (a - b).abs() / largest).fold(0.0, |worst: f64, off| if off >= worst || off.is_nan() { off } else { worst });
    if worst.is_nan() || worst > tolerance {
        failures.push(format!("{what}: {worst:e} of the largest"));
    }
}

fn compare_all(what: &str, found: &[Option<Tensor>], expected: &[Option<Tensor>], tolerance: f64, failures: &mut Vec<String>) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, pair) in found.iter().zip(expected).enumerate() {
        match pair {
            (Some(found), Some(expected)) => compare(&format!("{what}, gradient {index}"), found, expected, tolerance, failures),
            (None, None) => {}
            _ => failures.push(format!("{what}, gradient {index}: one of the two is missing")),
        }
    }
}

/// An op, its inputs in a float dtype on a device, and the expected outputs.
struct Law<'c> {
    case: &'c Case,
    name: String,
    inputs: Vec<Tensor>,
    exact: Vec<Tensor>,
    output: Tensor,
    tolerance: f64,
}

impl Law<'_> {
    fn meaning(&self, device: &Device, dtype: DType, failures: &mut Vec<String>) {
        let output = self.case.op.spec().eval(&self.inputs).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let has_floats = self.inputs.iter().any(|input| input.dtype().is_float());
        assert!(!output.dtype().is_float() || output.dtype() == dtype || !has_floats || self.case.op.spec().is_wide(), "{}", self.name);
        compare(&self.name, &output, &self.output, self.tolerance, failures);
        let Some((gradient, wanted)) = output_gradient(self.case, &self.exact) else { return };
        let gradient = gradient.to_dtype(dtype).unwrap();
        let expected = backward(&self.case.op, &self.exact, &gradient.to_dtype(DType::F64).unwrap(), &wanted);
        let found = backward(&self.case.op, &self.inputs, &gradient.to_device(device).unwrap(), &wanted);
        assert!(found.iter().flatten().all(|found| found.dtype() == dtype), "{}", self.name);
        compare_all(&self.name, &found, &expected, self.tolerance, failures);
    }

    fn kernel(&self, kernel: &dyn Kernel, device: &Device, dtype: DType, failures: &mut Vec<String>) {
        let name = format!("kernel of {}", self.name);
        let output = kernel.forward(&self.inputs).unwrap();
        if let Some(output) = &output {
            compare(&name, output, &self.output, self.tolerance, failures);
        }
        self.fused(kernel, device, dtype, failures);
        let Some((gradient, wanted)) = output_gradient(self.case, &self.exact) else { return };
        let gradient = gradient.to_dtype(dtype).unwrap();
        let expected = backward(&self.case.op, &self.exact, &gradient.to_dtype(DType::F64).unwrap(), &wanted);
        let output = output.unwrap_or_else(|| self.case.op.spec().eval(&self.inputs).unwrap());
        let (kept, kept_output) = saved(&self.case.op, &self.inputs, &output);
        let gradient = gradient.to_device(device).unwrap();
        let backward = Backward { inputs: &kept, output: &kept_output, gradient: &gradient, needs_gradient: &wanted };
        if let Some(found) = kernel.backward(&backward).unwrap() {
            compare_all(&name, &found, &expected, self.tolerance, failures);
        }
    }

    /// Each epilogue step separately and all of them combined, compared with the fused ops.
    fn fused(&self, kernel: &dyn Kernel, device: &Device, dtype: DType, failures: &mut Vec<String>) {
        let like = |seed: f64| ((super::gradients::weights(&self.output) * seed).unwrap() + 0.2).unwrap();
        let channel = |seed: f64| {
            let count = self.output.dim(1.min(self.output.rank() - 1)).unwrap();
            let values: Vec<f64> = (0..count).map(|i| (seed * i as f64).cos()).collect();
            Tensor::from_vec(values, count, &Device::Cpu).unwrap()
        };
        // Images are in channels-first layout.
        let as_kernel = |tensor: &Tensor| {
            let tensor = tensor.to_dtype(dtype).unwrap().to_device(device).unwrap();
            if tensor.rank() == 4 { tensor.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap() } else { tensor }
        };
        let exact = |tensor: &Tensor| as_kernel(tensor).to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        let functions = [Op::from(Relu {}), Gelu::default().into(), Silu {}.into(), Tanh {}.into(), Clip { min: -0.4, max: 0.6 }.into()];
        let mut steps: Vec<Fused<Tensor>> = functions.iter().map(|op| Fused::Activate(op.activation().unwrap())).collect();
        steps.extend([Fused::Add(like(0.7)), Fused::Multiply(like(1.1)), Fused::MultiplyRows(channel(0.3)), Fused::AddToRows(channel(0.9))]);
        let whole: Vec<usize> = vec![5, 0, 6, 7, 8, 1];
        let without_rows: Vec<usize> = vec![5, 0, 6, 1];
        let mut taken = 0;
        let of_images = matches!(self.case.op, Op::Conv(_));
        for chosen in (0..steps.len()).map(|at| vec![at]).chain([whole, without_rows]) {
            let mut expected = self.output.clone();
            let mut epilogue = Vec::new();
            for &at in &chosen {
                let row = |t: &Tensor| exact(t).reshape([&[1, t.elem_count()], vec![1; expected.rank() - 2].as_slice()].concat()).unwrap();
                expected = match &steps[at] {
                    Fused::Activate(_) => functions[at].spec().eval(&[expected]).unwrap(),
                    Fused::Add(t) => (expected + exact(t)).unwrap(),
                    Fused::Multiply(t) => (expected * exact(t)).unwrap(),
                    Fused::MultiplyRows(t) if of_images => expected.broadcast_mul(&row(t)).unwrap(),
                    Fused::AddToRows(t) if of_images => expected.broadcast_add(&row(t)).unwrap(),
                    _ => expected,
                };
                epilogue.push(steps[at].map(|t| Some(as_kernel(t))).unwrap());
            }
            if let Some(found) = kernel.fused(&self.inputs, &epilogue).unwrap() {
                compare(&format!("{} with the steps {chosen:?}", self.name), &found, &expected, self.tolerance, failures);
                taken += 1;
            }
        }
        let promised = match self.case.op {
            Op::Linear(_) => 8,
            // Steps of an epilogue are for images.
            Op::Conv(_) if self.output.rank() == 3 => return,
            Op::Conv(_) => 11,
            _ => 0,
        };
        assert!(!device.is_cpu() || taken == promised, "{}: {taken} epilogues are fused, {promised} should be", self.name);
    }
}

/// Tables with negative indices, which count from their end.
fn negative_indices() -> impl Iterator<Item = (Case, Vec<Tensor>)> {
    let tables = all_cases().filter(|(case, _)| matches!(case.op, Op::Embedding(_)));
    tables.map(|(case, mut inputs)| {
        let rows = Tensor::new(inputs[1].dims()[0] as i64, &Device::Cpu).unwrap();
        inputs[0] = inputs[0].broadcast_sub(&rows).unwrap();
        (case, inputs)
    })
}

#[test]
fn kernels_match_the_definition_of_ops() {
    let (mut failures, mut kernels) = (Vec::new(), std::collections::BTreeSet::new());
    for device in devices() {
        for (dtype, tolerance) in TYPES {
            for (case, inputs) in all_cases().chain(negative_indices()) {
                // The inputs are rounded before the comparison.
                let inputs = converted(&inputs, dtype);
                let exact = converted(&inputs, DType::F64);
                let output = case.op.spec().eval(&exact).unwrap_or_else(|e| panic!("{}: {e}", case.op));
                let name = format!("{} of {:?} in {dtype:?} on {device:?}", case.op, case.inputs.iter().map(|(dims, _)| dims).collect::<Vec<_>>());
                let law = Law { case: &case, name, inputs: on(&inputs, &device), exact, output, tolerance };
                law.meaning(&device, dtype, &mut failures);
                if let Some(kernel) = kernel(&case.op, &device, dtype) {
                    law.kernel(&*kernel, &device, dtype, &mut failures);
                    kernels.insert(case.op.name());
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
    assert!(kernels.len() > 20 || !on_host(&Device::Cpu), "only {kernels:?} have kernels");
}

#[test]
fn halves_are_rounded_to_even_numbers_everywhere() {
    let values: Vec<f32> = vec![0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 300.0, -127.5, -128.5, -300.0];
    let even: Vec<f64> = vec![0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 126.0, 127.0, 127.0, -128.0, -128.0, -128.0];
    let op = Op::from(FakeQuantize::default());
    for device in devices() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let x = Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(&device).unwrap();
            let meant = op.spec().eval(std::slice::from_ref(&x)).unwrap();
            let found = PreparedOp::new(&op, &device, dtype).forward(&[x]).unwrap();
            for tensor in [meant, found] {
                assert_eq!(wide(&tensor.to_device(&Device::Cpu).unwrap()), even, "{dtype:?} on {device:?}");
            }
        }
    }
}

#[test]
fn rows_of_only_padding_are_not_nan() {
    let op = Op::from(Attention { scale: 0.5, causal: true, ..Attention::default() });
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let heads = |scale: f64| (Tensor::ones((1, 2, 3, 4), DType::F32, &device).unwrap() * scale).unwrap().to_dtype(dtype).unwrap();
            // Products that would overflow when the mask is the most negative 16-bit number.
            let inputs = [heads(-30.0), heads(30.0), heads(1.0), Tensor::zeros((1, 3), DType::I64, &device).unwrap()];
            for output in [op.spec().eval(&inputs).unwrap(), PreparedOp::new(&op, &device, dtype).forward(&inputs).unwrap()] {
                assert!(wide(&output.to_device(&Device::Cpu).unwrap()).iter().all(|x| (x - 1.0).abs() < 0.01), "{dtype:?} on {device:?}");
            }
        }
    }
}

/// Experts process few tokens: rows that kernels skip are zero, and the others match the definition.
#[test]
fn rows_without_an_expert_are_zero() {
    let random = |shape: &[usize]| Tensor::randn(0f32, 1f32, shape, &Device::Cpu).unwrap();
    let exact = |tensors: &[&Tensor]| tensors.iter().map(|tensor| tensor.to_dtype(DType::F64).unwrap()).collect::<Vec<_>>();
    let prepared = |op: &Op| kernel(op, &Device::Cpu, DType::F32);
    let (x, like) = (random(&[4, 5, 12]), random(&[4, 5, 7]));
    let mut failures = Vec::new();
    for count in [0, 1, 9, 14, 20] {
        let weights: Vec<f32> = (0..40).map(|at| if at % 2 == 1 && at / 2 * 7 % 20 < count { 0.3 } else { 0.0 }).collect();
        let weights = Tensor::from_vec(weights, (4, 5, 2), &Device::Cpu).unwrap();
        let dispatch = Op::from(Dispatch { expert: 1, ..Dispatch::default() });
        let seen = dispatch.spec().eval(&[x.clone(), weights.clone()]).unwrap();
        let rows = wide(&seen).chunks(12).filter(|row| row.iter().any(|value| *value != 0.0)).count();
        assert_eq!(rows, count);
        for (input_major, weight) in [(false, random(&[7, 12])), (true, random(&[12, 7]))] {
            let linear = Op::from(Linear { input_major });
            let silu = Op::from(Silu {});
            let act = Fused::Activate(silu.activation().unwrap());
            for steps in
                [vec![], vec![act.clone()], vec![Fused::Multiply(like.clone())], vec![act, Fused::Multiply(like.clone())], vec![Fused::Add(like.clone())]]
            {
                let mut expected = linear.spec().eval(&exact(&[&seen, &weight])).unwrap();
                for step in &steps {
                    expected = match step {
                        Fused::Activate(_) => silu.spec().eval(&[expected]).unwrap(),
                        Fused::Multiply(other) => (expected * exact(&[other])[0].clone()).unwrap(),
                        Fused::Add(other) => (expected + exact(&[other])[0].clone()).unwrap(),
                        _ => expected,
                    };
                }
                if let Some(kernel) = prepared(&linear) {
                    let found = kernel.fused(&[seen.clone(), weight.clone()], &steps).unwrap().unwrap();
                    compare(&format!("{count} rows, {steps:?}"), &found, &expected, 5e-5, &mut failures);
                }
            }
        }
        let tokens = || vec![x.clone(), weights.clone()];
        let outputs = || vec![weights.clone(), x.clone(), x.clone()];
        let weighted = Op::from(Dispatch { expert: 1, weighted: true });
        let plain = Op::from(Combine { plain: true });
        for (op, inputs) in [(dispatch, tokens()), (weighted, tokens()), (Combine::default().into(), outputs()), (plain, outputs())] {
            let meant = op.spec().eval(&exact(&inputs.iter().collect::<Vec<_>>())).unwrap();
            if let Some(kernel) = prepared(&op) {
                compare(&format!("{count} rows, {op}"), &kernel.forward(&inputs).unwrap().unwrap(), &meant, 5e-5, &mut failures);
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

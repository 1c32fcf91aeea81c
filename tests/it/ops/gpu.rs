//! Kernels for GPUs compared with their definition on the host. On the CPU, they must decline all tensors.

use candle_core::{DType, Device, Tensor};
use compress_graph::gpu::{self, LogitLosses};
use compress_graph::ir::Op;
use compress_graph::ir::ops::{Attention, Embedding, PreparedOp};

use super::cases::{Case, tensors};
use super::gradients::{backward, converted, output_gradient, saved, spread, wide};
use crate::common::device;

const TYPES: [(DType, f64); 3] = [(DType::F32, 1e-4), (DType::F16, 0.01), (DType::BF16, 0.05)];

/// Numbers between -2 and 2 in a dtype, rounded before any computation.
fn numbers(seed: u64, dims: &[usize], dtype: DType) -> Tensor {
    let count: usize = dims.iter().product();
    let values = (0..count as u64).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 40_503) >> 7) % 4001) as f32 / 1000.0 - 2.0);
    Tensor::from_vec(values.collect::<Vec<_>>(), dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn on_device(tensor: &Tensor) -> Tensor {
    tensor.to_device(&device()).unwrap().force_contiguous().unwrap()
}

fn host(tensor: &Tensor) -> Vec<f64> {
    wide(&tensor.to_device(&Device::Cpu).unwrap())
}

/// The largest difference, relative to the largest expected number.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.2f64, |most, x| most.max(x.abs()));
    found.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest).fold(0.0, |worst, off| if off.is_nan() { f64::INFINITY } else { f64::max(worst, off) })
}

/// The result of a kernel; `None` on the CPU, where it must not have one.
fn on_gpu<T>(found: Option<T>) -> Option<T> {
    assert_eq!(found.is_some(), device().is_cuda());
    found
}

#[test]
fn sums_equal_those_of_the_host() {
    for (dtype, tolerance) in TYPES {
        for (rows, width) in [(1, 1), (3, 7), (256, 32), (257, 33), (5000, 70), (40_000, 5)] {
            let x = numbers(3, &[rows, width], dtype);
            let values = wide(&x);
            let columns: Vec<f64> = (0..width).map(|column| values.iter().skip(column).step_by(width).sum()).collect();
            if let Some(found) = on_gpu(gpu::column_sums(&on_device(&x)).unwrap()) {
                assert_eq!((found.dtype(), found.dims()), (dtype, &[width][..]));
                assert!(difference(&host(&found), &columns) < tolerance, "{rows} x {width} {dtype:?}");
            }
            let squares: f64 = values.iter().map(|x| x * x).sum();
            if let Some(found) = on_gpu(gpu::sums_of_squares(&[&on_device(&x), &on_device(&x.ones_like().unwrap())]).unwrap()) {
                let found = host(&found);
                assert!((found[0] - squares).abs() < 1e-9 * squares.max(1.0), "{rows} x {width} {dtype:?}");
                assert_eq!(found[1], (rows * width) as f64);
            }
        }
    }
}

#[test]
fn rows_are_summed_by_index() {
    for (dtype, tolerance) in TYPES {
        for (count, width, table) in [(1, 1, 1), (300, 5, 7), (129, 1100, 40), (1000, 384, 9000)] {
            let rows = numbers(5, &[count, width], dtype);
            // Indices from the end are negative.
            let indices: Vec<i64> = (0..count as i64).map(|i| (i * i * 7 % table) - if i % 3 == 0 { table } else { 0 }).collect();
            let mut expected = vec![0.0; table as usize * width];
            for (row, index) in wide(&rows).chunks(width).zip(&indices) {
                let at = index.rem_euclid(table) as usize * width;
                row.iter().zip(&mut expected[at..]).for_each(|(x, sum)| *sum += x);
            }
            let indices = Tensor::from_vec(indices, count, &Device::Cpu).unwrap();
            if let Some(found) = on_gpu(gpu::sum_rows_by_index(&on_device(&rows), &on_device(&indices), table as usize).unwrap()) {
                assert!(difference(&host(&found), &expected) < tolerance, "{count} x {width} of {table}, {dtype:?}");
            }
        }
    }
}

/// The losses and their gradient, computed in f64.
fn losses_of_row(ours: &[f64], theirs: Option<(&[f64], f64, f64)>, target: Option<(usize, f64, f64)>) -> ([f64; 2], Vec<f64>) {
    let log_softmax = |x: &[f64], temperature: f64| {
        let most = x.iter().fold(f64::NEG_INFINITY, |most, x| most.max(*x));
        let sum: f64 = x.iter().map(|x| ((x - most) / temperature).exp()).sum();
        x.iter().map(|x| (x - most) / temperature - sum.ln()).collect::<Vec<_>>()
    };
    let (mut losses, mut gradient) = ([0.0; 2], vec![0.0; ours.len()]);
    if let Some((theirs, temperature, factor)) = theirs {
        for ((p, q), gradient) in log_softmax(ours, temperature).into_iter().zip(log_softmax(theirs, temperature)).zip(&mut gradient) {
            losses[0] += if q.is_finite() { q.exp() * (q - p) } else { 0.0 };
            *gradient += (p.exp() - q.exp()) * factor;
        }
    }
    if let Some((target, smoothing, factor)) = target {
        let uniform = smoothing / ours.len() as f64;
        for (at, (p, gradient)) in log_softmax(ours, 1.0).into_iter().zip(&mut gradient).enumerate() {
            let share = uniform + if at == target { 1.0 - smoothing } else { 0.0 };
            losses[1] -= share * p;
            *gradient += (p.exp() - share) * factor;
        }
    }
    (losses, gradient)
}

#[test]
fn losses_over_logits_equal_those_of_the_host() {
    for (dtype, tolerance) in TYPES {
        for (classes, columns) in [(1, 1), (5, 9), (256, 256), (1000, 1003), (40_001, 40_001)] {
            let (logits, teacher) = (numbers(1, &[3, columns], dtype), numbers(2, &[3, classes], dtype));
            // Logits that a cache does not contain have a probability of 0.
            let teacher = if classes > 100 {
                let hidden: Vec<f32> = (0..3 * classes).map(|at| if at % 7 == 3 { f32::NEG_INFINITY } else { 0.0 }).collect();
                (teacher + Tensor::from_vec(hidden, (3, classes), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()).unwrap()
            } else {
                teacher
            };
            let targets: Vec<u32> = vec![0, classes as u32 - 1, classes as u32 / 2];
            let index = Tensor::new(targets.as_slice(), &Device::Cpu).unwrap();
            for (soft, hard) in [(true, false), (false, true), (true, true)] {
                let (on_teacher, on_targets) = (on_device(&teacher), on_device(&index));
                let work = on_device(&logits).copy().unwrap();
                let losses = LogitLosses { teacher: soft.then_some((&on_teacher, 2.0, 3.0)), targets: hard.then_some((&on_targets, 0.1, 5.0)), classes };
                let Some(found) = on_gpu(gpu::logit_losses(&work, losses).unwrap()) else { continue };
                let (found, gradients) = (host(&found), host(&work));
                for (row, (ours, theirs)) in wide(&logits).chunks(columns).zip(wide(&teacher).chunks(classes)).enumerate() {
                    let target = hard.then_some((targets[row] as usize, 0.1, 5.0));
                    let (losses, mut gradient) = losses_of_row(&ours[..classes], soft.then_some((theirs, 2.0, 3.0)), target);
                    gradient.resize(columns, 0.0);
                    let what = format!("{classes} of {columns} in {dtype:?}, {soft} {hard}");
                    assert!(difference(&found[2 * row..2 * row + 2], &losses) < 1e-3, "{what}: {:?} {losses:?}", &found[2 * row..2 * row + 2]);
                    assert!(difference(&gradients[row * columns..(row + 1) * columns], &gradient) < tolerance, "{what}");
                }
            }
        }
    }
}

/// Without label smoothing, logits of minus infinity do not contribute to the loss.
#[test]
fn classes_of_probability_zero_have_no_loss() {
    let logits = on_device(&Tensor::new(&[[1f32, f32::NEG_INFINITY, 2.0]], &Device::Cpu).unwrap());
    let targets = on_device(&Tensor::new(&[2u32], &Device::Cpu).unwrap());
    let losses = LogitLosses { teacher: None, targets: Some((&targets, 0.0, 1.0)), classes: 3 };
    if let Some(found) = on_gpu(gpu::logit_losses(&logits, losses).unwrap()) {
        assert!((host(&found)[1] - (-1f64).exp().ln_1p()).abs() < 1e-6);
        assert!(host(&logits)[1] == 0.0);
    }
}

/// Attention in several blocks of queries, whose later blocks see all keys, and a table wider than a block.
#[test]
fn large_operands_match_the_definition() {
    let attention = |causal, window| Op::from(Attention { scale: 0.4, causal, window, ..Attention::default() });
    let heads = |heads: usize, mask: bool| {
        let float = |heads: usize| (vec![1, heads, 2100, 4], false);
        [float(4), float(heads), float(heads)].into_iter().chain(mask.then_some((vec![1, 2100], true))).collect::<Vec<_>>()
    };
    let cases = [
        (attention(true, None), heads(2, false)),
        (attention(true, Some(300)), heads(4, false)),
        (attention(false, None), heads(1, true)),
        (Op::from(Embedding {}), vec![(vec![3, 400], true), (vec![50, 1100], false)]),
    ];
    if !device().is_cuda() {
        return;
    }
    for (op, inputs) in cases {
        let case = Case { op, inputs };
        let inputs = spread(&case.op, tensors(&case));
        for (dtype, tolerance) in TYPES {
            let inputs = converted(&inputs, dtype);
            let exact = converted(&inputs, DType::F64);
            let (gradient, wanted) = output_gradient(&case, &exact).unwrap();
            let gradient = gradient.to_dtype(dtype).unwrap();
            let expected = backward(&case.op, &exact, &gradient.to_dtype(DType::F64).unwrap(), &wanted);
            let inputs: Vec<Tensor> = inputs.iter().map(on_device).collect();
            let prepared = PreparedOp::new(&case.op, &device(), dtype);
            let output = prepared.forward(&inputs).unwrap();
            assert!(difference(&host(&output), &wide(&case.op.spec().eval(&exact).unwrap())) < tolerance, "{} in {dtype:?}", case.op);
            let (kept, kept_output) = saved(&case.op, &inputs, &output);
            let gradient = on_device(&gradient);
            let request = compress_graph::ir::ops::Backward { inputs: &kept, output: &kept_output, gradient: &gradient, needs_gradient: &wanted };
            for (at, (found, expected)) in prepared.backward(&request).unwrap().iter().zip(&expected).enumerate() {
                assert_eq!(found.is_some(), expected.is_some(), "{}, gradient {at}", case.op);
                if let (Some(found), Some(expected)) = (found, expected) {
                    assert!(difference(&host(found), &wide(expected)) < tolerance, "{} in {dtype:?}, gradient {at}", case.op);
                }
            }
        }
    }
}

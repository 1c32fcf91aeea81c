//! Kernels for GPUs compared with their definition on the host. On the CPU, they must decline all tensors.

use candle_core::{DType, Device, Tensor};
use compress_graph::gpu::{self, ColumnGrid, LogitLosses};
use compress_graph::ir::Op;
use compress_graph::ir::ops::{Attention, Embedding, PreparedOp};
use compress_kernels::column_solver::{ColumnSolver, Grid, Zeros};
use compress_kernels::compensation::{Block, Ratios, unit_factors};
use compress_kernels::grid::{IntegerGrid, Levels, QuantizationParams};
use compress_kernels::refinement::round_row;

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
            if let Some(found) = on_gpu(gpu::column_sums(&on_device(&x), width).unwrap()) {
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
    // On the CPU, `kernels_match_the_definition_of_ops` compares smaller operands.
    for (op, inputs) in cases.into_iter().filter(|_| device().is_cuda()) {
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

/// Parameters of groups of 32 columns of a weight, whose columns from `first` on are processed in reverse
/// order.
fn column_grid(rows: usize, first: usize, width: usize, integers: IntegerGrid, order: &[usize]) -> Grid<'_, fn(f64) -> f32> {
    let groups = (first + width).div_ceil(32);
    let zero = |at: usize| if integers.symmetric { 0.0 } else { (at % 3) as f32 - 1.0 };
    let steps = (0..rows * groups).map(|at| QuantizationParams { scale: 0.05 + (at % 7) as f32 * 0.03, zero: zero(at) }).collect();
    Grid { levels: Levels::Integers(integers), group: 32, steps, order, store: Some(|scale| scale as f32) }
}

/// A block `[rows, width]` as `[width, rows]` on the device.
fn transposed(values: &[f32], width: usize) -> Tensor {
    on_device(&Tensor::from_slice(values, (values.len() / width, width), &Device::Cpu).unwrap().t().unwrap())
}

/// A block `[width, rows]` on the device, row by row of the weight.
fn by_row(block: &Tensor) -> Vec<f32> {
    block.to_device(&Device::Cpu).unwrap().t().unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Each combination of sizes and grids, with a pruning mask or without.
fn column_cases() -> impl Iterator<Item = (usize, usize, IntegerGrid, bool)> {
    let sizes = [(1, 1), (3, 5), (300, 70), (9, 128)];
    let grids = [2, 4, 8].into_iter().flat_map(|bits| [true, false].map(|symmetric| IntegerGrid { bits, symmetric }));
    let grids: Vec<IntegerGrid> = grids.collect();
    sizes.into_iter().flat_map(move |(rows, width)| grids.clone().into_iter().flat_map(move |grid| [false, true].map(|masked| (rows, width, grid, masked))))
}

#[test]
fn rounded_columns_equal_those_of_the_host() {
    const FIRST: usize = 20;
    for (rows, width, integers, masked) in column_cases() {
        let values = |seed: u64, dims: &[usize]| -> Vec<f32> { numbers(seed, dims, DType::F32).flatten_all().unwrap().to_vec1().unwrap() };
        let (targets, weights, ratios) = (values(1, &[rows, width]), values(2, &[rows, width]), values(3, &[width, width]));
        let order: Vec<usize> = (0..FIRST + width).rev().collect();
        let grid = column_grid(rows, FIRST, width, integers, &order);
        let parameters: [Vec<f32>; 2] = [grid.steps.iter().map(|step| step.scale).collect(), grid.steps.iter().map(|step| step.zero).collect()];
        let [scales, zeros] = parameters.map(|values| on_device(&Tensor::from_vec(values, (rows, grid.steps.len() / rows), &Device::Cpu).unwrap()));
        let groups: Vec<u32> = order[FIRST..].iter().map(|column| (column / 32) as u32).collect();
        let groups = on_device(&Tensor::from_vec(groups, width, &Device::Cpu).unwrap());
        let mut rule = ColumnSolver::new(Zeros::None, Some(grid));
        let mask: Vec<bool> = (0..rows * width).map(|at| masked && at % 3 == 1).collect();
        if masked {
            rule.zeroed = (0..rows).flat_map(|row| [vec![false; FIRST], mask[row * width..][..width].to_vec()].concat()).collect();
        }
        let (mut expected, mut errors) = (weights.clone(), vec![0f32; rows * width]);
        let block = Block { ratios: Ratios { values: &ratios, stride: width }, first: FIRST, costs: &vec![1.0; width] };
        block.apply(&mut expected, &mut errors, (width, 0), &mut targets.clone(), &mut rule);
        let mask: Vec<u8> = mask.iter().map(|zeroed| u8::from(*zeroed)).collect();
        let mask = on_device(&Tensor::from_vec(mask, (rows, width), &Device::Cpu).unwrap().t().unwrap());
        let grid = ColumnGrid { scales: &scales, zeros: &zeros, groups: &groups, zeroed: masked.then_some(&mask), bounds: integers.bounds() };
        let (found, lost) = (transposed(&vec![7.0; rows * width], width), transposed(&vec![7.0; rows * width], width));
        let ratios = on_device(&Tensor::from_vec(ratios, (width, width), &Device::Cpu).unwrap());
        let operands = [&transposed(&targets, width), &transposed(&weights, width), &ratios];
        if on_gpu(gpu::round_columns(operands, grid, &found, &lost).unwrap()).is_some() {
            assert_eq!(by_row(&found), expected, "{rows} x {width} {integers:?}, {masked}");
            assert_eq!(by_row(&lost), errors, "{rows} x {width} {integers:?}, {masked}");
        }
    }
}

#[test]
fn descended_columns_equal_those_of_the_host() {
    for (rows, width, integers, masked) in column_cases() {
        let order: Vec<usize> = (0..width).collect();
        let grid = column_grid(rows, 0, width, integers, &order);
        let per_row = width.div_ceil(32);
        let (lowest, highest) = integers.bounds();
        let level = |at: usize| {
            let zero = grid.steps[at / width * per_row + at % width / 32].zero;
            ((at * 7 % 13) as f32 - 6.0).clamp(lowest, highest) - zero
        };
        let levels: Vec<f32> = (0..rows * width).map(level).collect();
        let values = |seed: u64, dims: &[usize]| -> Vec<f32> { numbers(seed, dims, DType::F32).flatten_all().unwrap().to_vec1().unwrap() };
        let (gradients, noise) = (values(4, &[rows, width]), values(5, &[width, width]));
        let moment = |at: usize| if at / width == at % width { 3.0 } else { 0.2 * (noise[at] + noise[at % width * width + at / width]) };
        let hessian: Vec<f32> = (0..width * width).map(moment).collect();
        let is_frozen = |at: usize| masked && at % 3 == 1;
        let (mut expected, mut moved) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let step = |at: usize| grid.steps[row * per_row + at / 32];
            let before: Vec<f32> = (0..width).map(|at| levels[row * width + at] * step(at).scale).collect();
            let (mut slopes, mut after) = (gradients[row * width..][..width].to_vec(), before.clone());
            round_row(grid.levels, (&hessian, width), &mut slopes, &mut after, step, |at| is_frozen(row * width + at));
            moved.extend(after.iter().zip(before).map(|(after, before)| after - before));
            expected.extend(after);
        }
        assert!(rows * width < 100 || moved.iter().any(|change| *change != 0.0));
        let parameters: [Vec<f32>; 2] = [grid.steps.iter().map(|step| step.scale).collect(), grid.steps.iter().map(|step| step.zero).collect()];
        let [scales, zeros] = parameters.map(|values| on_device(&Tensor::from_vec(values, (rows, per_row), &Device::Cpu).unwrap()));
        let groups = on_device(&Tensor::from_vec((0..width as u32).map(|column| column / 32).collect::<Vec<_>>(), width, &Device::Cpu).unwrap());
        let mask: Vec<u8> = (0..rows * width).map(|at| u8::from(is_frozen(at))).collect();
        let mask = on_device(&Tensor::from_vec(mask, (rows, width), &Device::Cpu).unwrap().t().unwrap());
        let columns = ColumnGrid { scales: &scales, zeros: &zeros, groups: &groups, zeroed: masked.then_some(&mask), bounds: (lowest, highest) };
        let (found, errors) = (transposed(&levels, width), transposed(&vec![0.0; rows * width], width));
        let changed = on_device(&Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap());
        let hessian = on_device(&Tensor::from_vec(hessian, (width, width), &Device::Cpu).unwrap());
        let operands = [&transposed(&gradients, width), &hessian];
        if on_gpu(gpu::descend_columns(operands, columns, &found, &errors, &changed).unwrap()).is_some() {
            let scale = |at: usize| grid.steps[at / width * per_row + at % width / 32].scale;
            let found: Vec<f32> = by_row(&found).into_iter().enumerate().map(|(at, level)| level * scale(at)).collect();
            assert_eq!(found, expected, "{rows} x {width} {integers:?}, {masked}");
            assert_eq!(by_row(&errors), moved.iter().map(|change| 0.0 - change).collect::<Vec<_>>(), "{rows} x {width} {integers:?}, {masked}");
            assert_eq!(host(&changed)[0] == 1.0, moved.iter().any(|change| *change != 0.0));
        }
    }
}

#[test]
fn unit_factors_equal_those_of_the_host() {
    for size in [1, 5, 64, 65, 200] {
        let root = wide(&numbers(6, &[size, size], DType::F32));
        let entry = |i: usize, j: usize| (0..size).map(|k| root[i * size + k] * root[j * size + k]).sum::<f64>() / size as f64;
        let mut matrix: Vec<f64> = (0..size * size).map(|at| entry(at / size, at % size)).collect();
        let mut damped = matrix.clone();
        damped.iter_mut().step_by(size + 1).for_each(|value| *value += 0.5);
        let [ratios, costs, _] = unit_factors(&damped, size);
        // The ratios are in f32.
        for (dtype, [of_costs, of_ratios]) in [(DType::F64, [1e-9, 1e-6]), (DType::F32, [1e-3, 1e-3])] {
            let factors = |matrix: &[f64]| {
                let matrix = Tensor::from_slice(matrix, (size, size), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                on_gpu(gpu::unit_factors(&on_device(&matrix), 0.5).unwrap())
            };
            let Some(found) = factors(&matrix) else { continue };
            assert!(difference(&host(&found.ratios), &ratios) < of_ratios, "{size} in {dtype:?}");
            assert!(difference(&host(&found.costs), &costs) < of_costs, "{size} in {dtype:?}");
            for (at, inverse) in found.inverses.iter().enumerate() {
                let (first, width) = (at * gpu::FACTORIZED, inverse.dim(0).unwrap());
                let square = found.ratios.narrow(0, first, width).unwrap().narrow(1, first, width).unwrap().contiguous().unwrap();
                let identity = wide(&Tensor::eye(width, DType::F32, &Device::Cpu).unwrap());
                assert!(difference(&host(&square.matmul(inverse).unwrap()), &identity) < of_ratios, "{size} in {dtype:?}");
            }
        }
        matrix[0] = -1.0;
        let matrix = Tensor::from_slice(&matrix, (size, size), &Device::Cpu).unwrap();
        if let Some(found) = on_gpu(gpu::unit_factors(&on_device(&matrix), 0.5).unwrap()) {
            assert!(host(&found.costs)[0].is_nan());
        }
    }
}

/// Products of parts of matrices, transposed or not, and of single rows and columns.
#[test]
fn products_of_views_equal_those_of_the_host() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-12)] {
        for (rows, inner, columns) in [(1, 1, 1), (1, 7, 5), (6, 1, 4), (5, 7, 1), (70, 33, 20)] {
            for (a_turned, b_turned) in [(false, false), (true, false), (false, true), (true, true)] {
                let view = |seed: u64, (rows, columns): (usize, usize), turned: bool| {
                    let dims = if turned { [columns + 3, rows + 2] } else { [rows + 3, columns + 2] };
                    let (whole, part) = (numbers(seed, &dims, DType::F32).to_dtype(dtype).unwrap(), if turned { [columns, rows] } else { [rows, columns] });
                    let narrow = |whole: &Tensor| {
                        let part = whole.narrow(0, 2, part[0]).unwrap().narrow(1, 1, part[1]).unwrap();
                        if turned { part.t().unwrap() } else { part }
                    };
                    (narrow(&whole), narrow(&on_device(&whole)))
                };
                let ((a, on_a), (b, on_b), (sum, on_sum)) =
                    (view(1, (rows, inner), a_turned), view(2, (inner, columns), b_turned), view(3, (rows, columns), false));
                let product = a.contiguous().unwrap().matmul(&b.contiguous().unwrap()).unwrap();
                let what = format!("{rows} x {inner} x {columns}, {a_turned} {b_turned} {dtype:?}");
                if let Some(found) = on_gpu(gpu::product(&on_a, &on_b).unwrap()) {
                    assert!(difference(&host(&found), &wide(&product)) < tolerance, "{what}");
                }
                if on_gpu(gpu::add_product(&on_sum, &on_a, &on_b, -2.0).unwrap()).is_some() {
                    let expected = (sum - (product * 2.0).unwrap()).unwrap();
                    assert!(difference(&host(&on_sum.contiguous().unwrap()), &wide(&expected)) < tolerance, "{what}");
                }
            }
        }
    }
}

/// Only the elements of a tensor are copied, not the others of its memory.
#[test]
fn parts_of_tensors_are_copied_to_the_host() {
    use compress_engine::exec::transfer::{self, Cause};
    let x = numbers(5, &[6, 4], DType::F32);
    for (first, rows) in [(0, 6), (0, 2), (2, 3), (5, 1)] {
        let found = transfer::values::<f32>(&on_device(&x).narrow(0, first, rows).unwrap(), Cause::Statistics).unwrap();
        assert_eq!(found, x.narrow(0, first, rows).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), "{first} {rows}");
    }
}

//! Error compensation for the layers that read a value, on the device of the sums of their inputs.

mod device;
mod refinement;

use std::rc::Rc;

use candle_core::Tensor;
use device::{DeviceSolver, download, upload};
use rayon::prelude::*;

use super::moments::{DeviceSums, Moments};
use super::output_feedback::OutputFeedback;
use crate::error::Result;
use crate::kernel::column_solver::ColumnSolver;
use crate::kernel::compensation::Compensation;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::operands::{LeftRows, Rows};
use crate::kernel::product::product;
use crate::kernel::refinement::Hessian;
use crate::pass::calibrate::tensor_error;

/// Factorized second moments, and the moments for coordinate descent, if that follows.
pub(super) enum Solver {
    Host { compensation: Compensation, hessian: Option<Hessian> },
    Device(Box<DeviceSolver>),
}

impl Solver {
    /// Factorizes damped moments, with columns in the given order. `None` if they are not positive definite.
    pub fn new(moments: &Moments, sums: Option<&DeviceSums>, order: &[usize], damping: f64, descends: bool) -> Result<Option<Solver>> {
        if let Some(sums) = sums {
            let found = DeviceSolver::new(sums, &moments.squares, order, damping, descends).map_err(tensor_error)?;
            return Ok(found.map(|solver| Solver::Device(Box::new(solver))));
        }
        let (products, size) = (&moments.products, moments.size);
        let hessian = || descends.then(|| Hessian::new(products, size, damping));
        Ok(Compensation::new(products, size, order, damping).map(|compensation| Solver::Host { compensation, hessian: hessian() }))
    }

    /// Cost of the squared error of each column, in processing order.
    pub fn costs(&self) -> &[f32] {
        match self {
            Solver::Host { compensation, .. } => compensation.costs(),
            Solver::Device(solver) => solver.costs(),
        }
    }

    /// The change of a weight `[rows, size]` to the least-squares solution for inputs that have changed.
    /// `differences` are those on the host. `None` if the inputs have not changed.
    pub fn change(&self, values: &[f32], order: &[usize], differences: &[f32]) -> Result<Option<Change>> {
        let compensation = match self {
            Solver::Device(solver) => {
                let found = solver.change(values).map_err(tensor_error)?;
                return Ok(found.map(|[weight, change]| Change::Device { weight, change }));
            }
            Solver::Host { .. } if differences.is_empty() => return Ok(None),
            Solver::Host { compensation, .. } => compensation,
        };
        let size = order.len();
        let left = LeftRows::new(values, values.len() / size.max(1), size, size);
        let mut change = vec![0f32; values.len()];
        product(&left, &Rows { values: differences, count: size, stride: size }, size, Epilogue::NONE, &mut change);
        reorder(&mut change, order);
        compensation.divide(&mut change);
        restore(&mut change, order);
        Ok(Some(Change::Host(change)))
    }

    /// Corrects a weight `[rows, size]`, replaces its columns by the values that a rule for the corrected
    /// weight chooses in processing order, and improves grid values and the scales of their grid by
    /// coordinate descent, if that is enabled. Returns the rule.
    pub fn solve<'r, S: Fn(f64) -> f32 + Send + Sync>(
        &self,
        values: &mut [f32],
        order: &[usize],
        correction: Correction,
        steps: Steps,
        rule: impl FnOnce(&[f32]) -> ColumnSolver<'r, S>,
    ) -> Result<ColumnSolver<'r, S>> {
        let (compensation, hessian) = match self {
            Solver::Host { compensation, hessian } => (compensation, hessian),
            Solver::Device(solver) => return solve_on_device(solver, values, correction, steps, rule).map_err(tensor_error),
        };
        if let Some((change, fractions)) = correction.used() {
            change.add_to(values, &fractions)?;
        }
        let mut rule = rule(values);
        let targets = hessian.as_ref().map(|_| values.to_vec());
        reorder(values, order);
        compensation.apply(values, steps.block, &mut rule);
        restore(values, order);
        if let (Some(hessian), Some(targets), Some(grid)) = (hessian, targets, &mut rule.grid) {
            hessian.refine(&targets, values, grid, steps.frozen, steps.sweeps);
        }
        Ok(rule)
    }
}

/// Solves a weight that is copied to the device once.
fn solve_on_device<'r, S: Fn(f64) -> f32 + Send + Sync>(
    solver: &DeviceSolver,
    values: &mut [f32],
    correction: Correction,
    Steps { block, frozen, sweeps }: Steps,
    rule: impl FnOnce(&[f32]) -> ColumnSolver<'r, S>,
) -> candle_core::Result<ColumnSolver<'r, S>> {
    if values.is_empty() {
        return Ok(rule(values));
    }
    let weight = match correction.used() {
        Some((Change::Device { weight, change }, fractions)) => {
            let weight = added(weight, change, &fractions)?;
            download(&weight, values)?;
            weight
        }
        Some((Change::Host(_), _)) => candle_core::bail!("the change of a weight is not on the device of its solver"),
        None => solver.upload(values)?,
    };
    let targets = weight.t()?.contiguous()?;
    drop(weight);
    let mut rule = rule(values);
    let mut solved = solver.apply(&targets, block, &mut rule)?;
    if let (Some(hessian), Some(grid)) = (&solver.hessian, &mut rule.grid) {
        solved = refinement::refine(hessian, [targets, solved], grid, frozen, sweeps)?;
    }
    download(&solved.t()?.contiguous()?, values)?;
    Ok(rule)
}

/// How the columns of a weight are replaced.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps<'a> {
    /// Number of columns that are replaced before their errors are propagated to later columns.
    pub block: usize,
    /// Marks values that coordinate descent does not change. Empty if there are none.
    pub frozen: &'a [bool],
    /// Number of sweeps of coordinate descent over all columns.
    pub sweeps: usize,
}

/// The change of a weight `[rows, size]` to the least-squares solution for inputs that have changed.
pub(super) enum Change {
    Host(Vec<f32>),
    /// On the device of the solver, with the weight, which is not uploaded again.
    Device {
        weight: Tensor,
        change: Tensor,
    },
}

impl Change {
    /// Adds fractions of the change to the weight, one of each row.
    pub fn add_to(self, values: &mut [f32], fractions: &[f32]) -> Result<()> {
        match self {
            Change::Host(change) => {
                let size = (values.len() / fractions.len().max(1)).max(1);
                let rows = values.chunks_exact_mut(size).zip(change.chunks_exact(size)).zip(fractions);
                for ((values, change), fraction) in rows.filter(|(_, fraction)| **fraction != 0.0) {
                    values.iter_mut().zip(change).for_each(|(value, change)| *value += fraction * change);
                }
                Ok(())
            }
            Change::Device { weight, change } => added(weight, change, fractions).and_then(|weight| download(&weight, values)).map_err(tensor_error),
        }
    }
}

/// The sum of a weight `[rows, size]` and fractions of its change, one of each row.
fn added(weight: Tensor, change: Tensor, fractions: &[f32]) -> candle_core::Result<Tensor> {
    let fractions = upload(fractions, (fractions.len(), 1), weight.device())?;
    weight + change.broadcast_mul(&fractions)?
}

/// Consecutive rows of a weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Number of rows.
    pub rows: usize,
    /// The fraction of their change that they get.
    pub fraction: f32,
}

/// The correction of a weight for inputs that have changed.
pub(super) struct Correction {
    /// All rows of the weight.
    pub parts: Vec<Part>,
    /// The complete change; `None` if there is none.
    pub change: Option<Change>,
    /// Compensation between rows.
    pub feedback: Option<Rc<OutputFeedback>>,
}

impl Correction {
    /// The change and the fraction of each row, if a row changes.
    pub fn used(self) -> Option<(Change, Vec<f32>)> {
        let change = self.change.filter(|_| self.parts.iter().any(|part| part.fraction != 0.0))?;
        Some((change, self.parts.iter().flat_map(|part| std::iter::repeat_n(part.fraction, part.rows)).collect()))
    }
}

/// Permutes the columns of rows into the given order.
fn reorder(values: &mut [f32], order: &[usize]) {
    permute(values, order.len(), |before, row| row.iter_mut().zip(order).for_each(|(value, column)| *value = before[*column]));
}

/// The inverse of [`reorder`].
fn restore(values: &mut [f32], order: &[usize]) {
    permute(values, order.len(), |before, row| order.iter().zip(before).for_each(|(column, value)| row[*column] = *value));
}

/// Sets rows of `size` values from copies of them.
fn permute(values: &mut [f32], size: usize, set: impl Fn(&[f32], &mut [f32]) + Sync) {
    values.par_chunks_exact_mut(size.max(1)).for_each_init(Vec::new, |before, row| {
        before.clear();
        before.extend_from_slice(row);
        set(before, row);
    });
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::moments::MomentsRequest;
    use super::*;
    use crate::kernel::column_solver::{Grid, Range, Zeros};
    use crate::kernel::grid::{IntegerGrid, Levels};
    use crate::kernel::minifloat::Minifloat;

    const ROWS: usize = 6;

    fn number(i: usize) -> f32 {
        ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0
    }

    fn single(scale: f64) -> f32 {
        scale as f32
    }

    /// Moments of correlated features on the host, and with tensors.
    fn moments(size: usize) -> (Moments, DeviceSums) {
        let count = 2 * size + 8;
        // The host rounds inputs to bf16 on some processors.
        let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
        let rows: Vec<f32> = (0..count * size).map(|i| rounded(number(i * i + 7) + 0.1 * number(i / size))).collect();
        let rows = Tensor::from_vec(rows, (count, size), &Device::Cpu).unwrap();
        let mut moments = Moments::new(size, MomentsRequest { products: true, ..MomentsRequest::default() });
        moments.add("x", &rows).unwrap();
        let differences = ((rows.roll(1, 1).unwrap() * 0.3).unwrap().t().unwrap().contiguous().unwrap().matmul(&rows)).unwrap();
        moments.differences = differences.flatten_all().unwrap().to_vec1().unwrap();
        (moments, DeviceSums { products: rows.t().unwrap().contiguous().unwrap().matmul(&rows).unwrap(), differences: Some(differences) })
    }

    fn solvers(moments: &Moments, sums: &DeviceSums, order: &[usize], damping: f64, descends: bool) -> [Solver; 2] {
        [None, Some(sums)].map(|sums| Solver::new(moments, sums, order, damping, descends).unwrap().unwrap())
    }

    fn uncorrected() -> Correction {
        Correction { parts: Vec::new(), change: None, feedback: None }
    }

    fn orders(size: usize) -> [Vec<usize>; 2] {
        let mut shuffled: Vec<usize> = (0..size).collect();
        shuffled.sort_by(|a, b| number(*a + 5).total_cmp(&number(*b + 5)).then(a.cmp(b)));
        [(0..size).collect(), shuffled]
    }

    /// The largest difference, relative to the largest number.
    fn difference(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        found.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest).fold(0.0, |worst, off| if off.is_nan() { f32::INFINITY } else { worst.max(off) })
    }

    /// The squared error of the outputs of a layer.
    fn lost(moments: &Moments, targets: &[f32], values: &[f32]) -> f64 {
        let size = moments.size;
        let errors: Vec<f64> = targets.iter().zip(values).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        let at = |i: usize, j: usize| f64::from(moments.products[i.min(j) * size + i.max(j)]);
        errors.chunks(size).map(|row| (0..size).map(|i| row[i] * (0..size).map(|j| at(i, j) * row[j]).sum::<f64>()).sum::<f64>()).sum()
    }

    const SIZES: [usize; 7] = [1, 5, 64, 65, 130, 300, 520];

    #[test]
    fn costs_and_corrections_equal_those_of_the_host() {
        for size in SIZES {
            let (moments, sums) = moments(size);
            let weight: Vec<f32> = (0..ROWS * size).map(|i| number(i * 31)).collect();
            for order in orders(size) {
                for damping in [0.1, 0.004] {
                    let solvers = solvers(&moments, &sums, &order, damping, false);
                    let [host, device] = solvers.each_ref().map(Solver::costs);
                    assert!(host.iter().zip(device).all(|(a, b)| (a - b).abs() < 1e-3 * a), "{size}, {damping}");
                    let [host, device] = solvers.map(|solver| {
                        let mut values = weight.clone();
                        let change = solver.change(&values, &order, &moments.differences).unwrap().unwrap();
                        change.add_to(&mut values, &[0.5; ROWS]).unwrap();
                        values
                    });
                    assert!(difference(&host, &weight) > 1e-3, "{size}");
                    assert!(difference(&device, &host) < 5e-3, "{size}, {damping}: {}", difference(&device, &host));
                }
            }
        }
    }

    /// Values halfway between two grid values may be rounded either way, which affects later columns, but not
    /// the error of the layer.
    #[test]
    fn rounded_weights_are_as_good_as_those_of_the_host() {
        let integers = |symmetric| Levels::Integers(IntegerGrid { bits: 4, symmetric });
        for (size, levels, sparse) in SIZES.into_iter().flat_map(|size| {
            [(integers(true), false), (integers(false), true), (Levels::Floats(Minifloat::E2m1), false)].map(|(levels, sparse)| (size, levels, sparse))
        }) {
            let (moments, sums) = moments(size);
            let mask: Vec<bool> = (0..ROWS * size).map(|at| sparse && at % 5 == 2).collect();
            let weight: Vec<f32> = (0..ROWS * size).map(|i| if mask[i] { 0.0 } else { number(i * 31) }).collect();
            let frozen = if sparse { mask.as_slice() } else { &[] };
            for order in orders(size) {
                let solve = |solver: &Solver| {
                    let rule = |values: &[f32]| {
                        let mut grid = Grid { levels, group: 32, steps: Vec::new(), order: &order, store: Some(single as fn(f64) -> f32) };
                        grid.fit(values, &vec![1.0; size], Range::MinMax);
                        let mut rule = ColumnSolver::new(Zeros::None, Some(grid));
                        rule.zeroed = frozen.chunks(size).flat_map(|row| order.iter().map(|column| row[*column])).collect();
                        rule
                    };
                    let mut values = weight.clone();
                    let rule = solver.solve(&mut values, &order, uncorrected(), Steps { block: 128, frozen, sweeps: 3 }, rule).unwrap();
                    let mut again = values.clone();
                    rule.grid.unwrap().round(&mut again);
                    assert_eq!(again, values, "{size}: not grid values");
                    assert!(mask.iter().zip(&values).all(|(zeroed, value)| !zeroed || *value == 0.0));
                    lost(&moments, &weight, &values)
                };
                let [rounded, refined] = [false, true].map(|descends| solvers(&moments, &sums, &order, 0.05, descends).each_ref().map(&solve));
                let [host, device] = [0, 1].map(|at| [rounded[at], refined[at]]);
                for (host, device) in host.into_iter().zip(device) {
                    assert!((host - device).abs() <= 0.05 * host + 1e-6, "{size} {levels:?}: {device} instead of {host}");
                }
                assert!(device[1] <= device[0] * 1.05 + 1e-6, "{size} {levels:?}: {} became {}", device[0], device[1]);
            }
        }
    }

    /// Each row gets its fraction of the change before it is rounded.
    #[test]
    fn rows_are_solved_with_their_own_corrections() {
        let (size, order) = (130, orders(130)[1].clone());
        let (moments, sums) = moments(size);
        let weight: Vec<f32> = (0..ROWS * size).map(|i| number(i * 31)).collect();
        let parts = [(1, 0.0), (3, 0.7), (2, 1.0)].map(|(rows, fraction)| Part { rows, fraction });
        for solver in solvers(&moments, &sums, &order, 0.1, false) {
            let change = |values: &[f32]| solver.change(values, &order, &moments.differences).unwrap();
            let mut corrected = Vec::new();
            let correction = Correction { parts: parts.to_vec(), change: change(&weight), feedback: None };
            let mut values = weight.clone();
            let steps = Steps { block: 128, frozen: &[], sweeps: 0 };
            let rule = |values: &[f32]| {
                corrected = values.to_vec();
                ColumnSolver::<fn(f64) -> f32>::new(Zeros::None, None)
            };
            solver.solve(&mut values, &order, correction, steps, rule).unwrap();
            let mut first = 0;
            for Part { rows, fraction } in parts {
                let range = first * size..(first + rows) * size;
                let mut expected = weight[range.clone()].to_vec();
                change(&weight[range.clone()]).unwrap().add_to(&mut expected, &vec![fraction; rows]).unwrap();
                assert!(difference(&corrected[range.clone()], &expected) < 1e-5, "{fraction}");
                assert_eq!(fraction == 0.0, corrected[range.clone()] == weight[range.clone()]);
                // Without a grid, optimal values are the weights.
                assert!(difference(&values[range], &expected) < 1e-5, "{fraction}");
                first += rows;
            }
        }
    }

    #[test]
    fn pruned_weights_equal_those_of_the_host() {
        let (size, order) = (300, (0..300).collect::<Vec<_>>());
        let (moments, sums) = moments(size);
        let weight: Vec<f32> = (0..ROWS * size).map(|i| number(i * 31)).collect();
        for zeros in [Zeros::Part(0.4), Zeros::AllBut { n: 2, m: 4 }] {
            let [host, device] = solvers(&moments, &sums, &order, 0.1, false).map(|solver| {
                let (mut values, steps) = (weight.clone(), Steps { block: 128, frozen: &[], sweeps: 0 });
                solver.solve(&mut values, &order, uncorrected(), steps, |_| ColumnSolver::<fn(f64) -> f32>::new(zeros, None)).unwrap();
                values
            });
            let differing = host.iter().zip(&device).filter(|(a, b)| (*a - *b).abs() > 1e-3).count();
            assert!(differing * 50 <= host.len(), "{zeros:?}: {differing} of {}", host.len());
            assert_eq!(device.iter().filter(|x| **x == 0.0).count(), host.iter().filter(|x| **x == 0.0).count());
        }
    }

    #[test]
    fn matrices_that_are_not_positive_definite_have_no_solver() {
        for size in [2, 70, 300] {
            for column in [1, size - 1] {
                let mut products = vec![0f32; size * size];
                (0..size).for_each(|at| products[at * size + at] = 1.0);
                (products[column], products[column * size]) = (2.0, 2.0);
                let mut moments = Moments::new(size, MomentsRequest { products: true, ..MomentsRequest::default() });
                moments.squares = vec![1.0; size];
                moments.products = products.clone();
                let sums = DeviceSums { products: Tensor::from_vec(products, (size, size), &Device::Cpu).unwrap(), differences: None };
                let order: Vec<usize> = (0..size).collect();
                for damping in [0.001, 0.1] {
                    assert!([None, Some(&sums)].iter().all(|sums| Solver::new(&moments, *sums, &order, damping, false).unwrap().is_none()), "{size}");
                }
                assert!(Solver::new(&moments, Some(&sums), &order, 1.5, false).unwrap().is_some());
            }
        }
    }
}

//! Error compensation for the layers that read a value, on the device of the sums of their inputs.

mod device;
mod refinement;

use device::DeviceSolver;

use super::moments::{DeviceSums, Moments};
use crate::error::Result;
use crate::kernel::column_solver::{ColumnSolver, Grid};
use crate::kernel::compensation::Compensation;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::matmul::{Left, Rows, product};
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

    /// Whether coordinate descent follows.
    pub fn descends(&self) -> bool {
        match self {
            Solver::Host { hessian, .. } => hessian.is_some(),
            Solver::Device(solver) => solver.hessian.is_some(),
        }
    }

    /// Moves a weight `[rows, size]` by a fraction towards the least-squares solution for inputs that have
    /// changed. `differences` are those on the host.
    pub fn correct(&self, values: &mut [f32], order: &[usize], differences: &[f32], fraction: f32) -> Result<()> {
        let compensation = match self {
            Solver::Host { compensation, .. } => compensation,
            Solver::Device(solver) => return solver.correct(values, fraction).map_err(tensor_error),
        };
        let size = order.len();
        let left = Left::pack(values, values.len() / size.max(1), size, size);
        let mut added = vec![0f32; values.len()];
        product(&left, &Rows { values: differences, count: size, stride: size }, size, Epilogue::NONE, &mut added);
        reorder(&mut added, order);
        compensation.divide(&mut added);
        restore(&mut added, order);
        values.iter_mut().zip(added).for_each(|(value, added)| *value += fraction * added);
        Ok(())
    }

    /// Replaces the columns of a weight `[rows, size]` by the values that `rule` chooses in processing order.
    pub fn apply<S: Fn(f64) -> f32 + Sync>(&self, values: &mut [f32], order: &[usize], block: usize, rule: &mut ColumnSolver<S>) -> Result<()> {
        match self {
            Solver::Host { compensation, .. } => {
                reorder(values, order);
                compensation.apply(values, block, rule);
                restore(values, order);
                Ok(())
            }
            Solver::Device(solver) => solver.apply(values, block, rule).map_err(tensor_error),
        }
    }

    /// Improves grid values `[rows, size]` and the scales of their grid by coordinate descent, if it is
    /// enabled. Values marked in `frozen` do not change.
    pub fn refine<S: Fn(f64) -> f32 + Sync>(&self, targets: &[f32], values: &mut [f32], grid: &mut Grid<S>, frozen: &[bool], sweeps: usize) -> Result<()> {
        match self {
            Solver::Host { hessian, .. } => {
                hessian.iter().for_each(|hessian| hessian.refine(targets, values, grid, frozen, sweeps));
                Ok(())
            }
            Solver::Device(solver) => match &solver.hessian {
                Some(hessian) => refinement::refine(hessian, targets, values, grid, frozen, sweeps).map_err(tensor_error),
                None => Ok(()),
            },
        }
    }
}

/// Permutes the columns of rows into the given order.
fn reorder(values: &mut [f32], order: &[usize]) {
    let mut before = Vec::with_capacity(order.len());
    for row in values.chunks_exact_mut(order.len().max(1)) {
        before.clear();
        before.extend_from_slice(row);
        row.iter_mut().zip(order).for_each(|(value, column)| *value = before[*column]);
    }
}

/// The inverse of [`reorder`].
fn restore(values: &mut [f32], order: &[usize]) {
    let mut before = Vec::with_capacity(order.len());
    for row in values.chunks_exact_mut(order.len().max(1)) {
        before.clear();
        before.extend_from_slice(row);
        order.iter().zip(&before).for_each(|(column, value)| row[*column] = *value);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::moments::MomentsRequest;
    use super::*;
    use crate::kernel::column_solver::{Range, Zeros};
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
        let rows: Vec<f32> = (0..count * size).map(|i| number(i * i + 7) + 0.1 * number(i / size)).collect();
        let rows = Tensor::from_vec(rows, (count, size), &Device::Cpu).unwrap();
        let mut moments = Moments::new(size, MomentsRequest { products: true, ..MomentsRequest::default() });
        moments.add("x", &rows).unwrap();
        let differences = ((rows.roll(1, 1).unwrap() * 0.3).unwrap().t().unwrap().contiguous().unwrap().matmul(&rows)).unwrap();
        moments.differences = differences.flatten_all().unwrap().to_vec1().unwrap();
        (moments, DeviceSums { products: rows.t().unwrap().contiguous().unwrap().matmul(&rows).unwrap(), differences: Some(differences) })
    }

    fn solvers(moments: &Moments, sums: &DeviceSums, order: &[usize], damping: f64) -> [Solver; 2] {
        [None, Some(sums)].map(|sums| Solver::new(moments, sums, order, damping, true).unwrap().unwrap())
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
                    let solvers = solvers(&moments, &sums, &order, damping);
                    let [host, device] = solvers.each_ref().map(Solver::costs);
                    assert!(host.iter().zip(device).all(|(a, b)| (a - b).abs() < 1e-3 * a), "{size}, {damping}");
                    let [host, device] = solvers.map(|solver| {
                        let mut values = weight.clone();
                        solver.correct(&mut values, &order, &moments.differences, 0.5).unwrap();
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
                let solved = solvers(&moments, &sums, &order, 0.05).map(|solver| {
                    let mut grid = Grid { levels, group: 32, steps: Vec::new(), order: &order, store: single as fn(f64) -> f32 };
                    grid.fit(&weight, &vec![1.0; size], Range::MinMax);
                    let mut rule = ColumnSolver::new(Zeros::None, Some(grid));
                    rule.zeroed = frozen.chunks(size).flat_map(|row| order.iter().map(|column| row[*column])).collect();
                    let mut values = weight.clone();
                    solver.apply(&mut values, &order, 128, &mut rule).unwrap();
                    let (mut grid, rounded) = (rule.grid.unwrap(), lost(&moments, &weight, &values));
                    solver.refine(&weight, &mut values, &mut grid, frozen, 3).unwrap();
                    let mut again = values.clone();
                    grid.round(&mut again);
                    assert_eq!(again, values, "{size}: not grid values");
                    assert!(mask.iter().zip(&values).all(|(zeroed, value)| !zeroed || *value == 0.0));
                    [rounded, lost(&moments, &weight, &values)]
                });
                let [host, device] = solved;
                for (host, device) in host.into_iter().zip(device) {
                    assert!((host - device).abs() <= 0.05 * host + 1e-6, "{size} {levels:?}: {device} instead of {host}");
                }
                assert!(device[1] <= device[0] * 1.05 + 1e-6, "{size} {levels:?}: {} became {}", device[0], device[1]);
            }
        }
    }

    #[test]
    fn pruned_weights_equal_those_of_the_host() {
        let (size, order) = (300, (0..300).collect::<Vec<_>>());
        let (moments, sums) = moments(size);
        let weight: Vec<f32> = (0..ROWS * size).map(|i| number(i * 31)).collect();
        for zeros in [Zeros::Part(0.4), Zeros::AllBut { n: 2, m: 4 }] {
            let [host, device] = solvers(&moments, &sums, &order, 0.1).map(|solver| {
                let mut values = weight.clone();
                solver.apply(&mut values, &order, 128, &mut ColumnSolver::<fn(f64) -> f32>::new(zeros, None)).unwrap();
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

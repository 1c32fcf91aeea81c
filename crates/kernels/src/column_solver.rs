//! Column-wise pruning and rounding with error compensation (GPTQ, SparseGPT).

use rayon::prelude::*;

use super::compensation::ColumnRule;
use super::pool::on_pool_thread;
use crate::grid::{self, Levels, QuantizationParams};

/// Which weights are pruned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Zeros {
    /// None.
    None,
    /// This fraction of each block of columns, ranked over all rows. Over the complete weight, the count
    /// is exact.
    Part(f64),
    /// N:M sparsity: all but `n` of every `m` consecutive columns of a row.
    AllBut {
        /// Weights that are not pruned.
        n: usize,
        /// Columns per group, at most 64 and a divisor of the block width.
        m: usize,
    },
}

/// How scales and zero points are determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// From the smallest and largest value.
    MinMax,
    /// Minimizes the error over shrunken ranges, down to this percentage of the full range.
    MinError(u32),
}

/// Prunes the weights with the lowest cost, and rounds the others to a grid if there is one.
pub struct ColumnSolver<'a, S> {
    /// Which weights are pruned.
    pub zeros: Zeros,
    /// The quantization grid. Without one, values are not rounded.
    pub grid: Option<Grid<'a, S>>,
    /// Pruning mask `[rows, size]` of weights that must be zero, in processing order. Empty if there is
    /// none.
    pub zeroed: Vec<bool>,
    /// Pruning mask of the current block.
    removed: Vec<bool>,
    width: usize,
    first: usize,
    /// Number of weights processed, and how many of them were pruned.
    counts: (usize, usize),
}

/// Quantization grid of a weight.
pub struct Grid<'a, S> {
    /// The numbers that scales are multiplied with.
    pub levels: Levels,
    /// Group size in columns, in the order of the weight and not of processing.
    pub group: usize,
    /// Quantization parameters of every group, row by row.
    pub steps: Vec<QuantizationParams>,
    /// Column of the weight for each processed column.
    pub order: &'a [usize],
    /// Rounds a scale to its storage dtype; `None` if the scales are fixed.
    pub store: Option<S>,
}

impl<S: Fn(f64) -> f32 + Send + Sync> Grid<'_, S> {
    fn groups(&self) -> usize {
        self.order.len().div_ceil(self.group.max(1))
    }

    fn step(&self, row: usize, column: usize) -> QuantizationParams {
        self.steps[row * self.groups() + self.order[column] / self.group]
    }

    /// Determines the parameters of all groups from the weight `[rows, size]`, unless the scales are fixed.
    /// `costs` are the costs of its columns.
    pub fn fit(&mut self, weights: &[f32], costs: &[f32], range: Range) {
        let Some(store) = &self.store else { return };
        let (size, group, levels) = (self.order.len(), self.group, self.levels);
        let find = |(values, costs): (&[f32], &[f32])| match range {
            Range::MinMax => levels.params(grid::range(values), store),
            Range::MinError(least) => levels.search(values, costs, least, store),
        };
        let of_row = |row: &[f32]| row.chunks(group).zip(costs.chunks(group)).map(find).collect::<Vec<_>>();
        self.steps = on_pool_thread(|| weights.par_chunks(size.max(1)).flat_map_iter(of_row).collect());
    }

    /// Rounds every weight of `[rows, size]`, in the order of the weight, to the nearest grid value.
    pub fn round(&self, weights: &mut [f32]) {
        let (size, groups) = (self.order.len().max(1), self.groups());
        weights.par_chunks_mut(size).zip(self.steps.par_chunks(groups)).for_each(|(row, steps)| {
            for (values, step) in row.chunks_mut(self.group).zip(steps) {
                values.iter_mut().for_each(|value| *value = self.levels.nearest(*value, *step));
            }
        });
    }

    /// The codes of weights `[rows, size]`, in the order of the weight, which must be grid values.
    pub fn codes_of(&self, weights: &[f32]) -> Vec<i8> {
        let (size, groups) = (self.order.len().max(1), self.groups());
        let of_row = |(row, steps): (&[f32], &[QuantizationParams])| {
            row.chunks(self.group).zip(steps).flat_map(|(values, step)| values.iter().map(|value| self.levels.code(*value, *step))).collect::<Vec<_>>()
        };
        weights.par_chunks(size).zip(self.steps.par_chunks(groups)).flat_map_iter(of_row).collect()
    }
}

impl<'a, S> ColumnSolver<'a, S> {
    /// Pruning, rounding, or both.
    pub fn new(zeros: Zeros, grid: Option<Grid<'a, S>>) -> Self {
        ColumnSolver { zeros, grid, zeroed: Vec::new(), removed: Vec::new(), width: 0, first: 0, counts: (0, 0) }
    }
}

impl<S: Fn(f64) -> f32 + Send + Sync> ColumnRule for ColumnSolver<'_, S> {
    fn ranks_blocks(&self) -> bool {
        matches!(self.zeros, Zeros::Part(_))
    }

    fn lookahead(&self) -> usize {
        if let Zeros::AllBut { m, .. } = self.zeros { m } else { 1 }
    }

    fn begin_block(&mut self, first: usize, width: usize, values: &[f32], costs: &[f32]) {
        (self.first, self.width) = (first, width);
        if let Zeros::Part(part) = self.zeros {
            let cost = |at: usize| values[at] * values[at] * costs[at % width];
            let mut ranked: Vec<u32> = (0..values.len() as u32).collect();
            self.counts.0 += values.len();
            let count = ((part * self.counts.0 as f64).round() as usize).saturating_sub(self.counts.1).min(values.len());
            self.counts.1 += count;
            self.removed = vec![false; values.len()];
            if count > 0 {
                let by_cost = |a: &u32, b: &u32| cost(*a as usize).total_cmp(&cost(*b as usize)).then(a.cmp(b));
                ranked.select_nth_unstable_by(count - 1, by_cost);
                ranked[..count].iter().for_each(|at| self.removed[*at as usize] = true);
            }
        }
    }

    fn choose(&self, row: usize, column: usize, ahead: &[f32], costs: &[f32], marks: &mut u64) -> f32 {
        let at = column - self.first;
        let removed = match self.zeros {
            Zeros::None => self.grid.as_ref().is_some_and(|grid| self.zeroed.get(row * grid.order.len() + column) == Some(&true)),
            Zeros::Part(_) => self.removed[row * self.width + at],
            Zeros::AllBut { n, m } => {
                if at.is_multiple_of(m) {
                    *marks = cheapest(ahead, costs, n, m.min(ahead.len()));
                }
                *marks >> (at % m) & 1 == 1
            }
        };
        match &self.grid {
            _ if removed => 0.0,
            Some(grid) => grid.levels.nearest(ahead[0], grid.step(row, column)),
            None => ahead[0],
        }
    }
}

/// Bit mask of the first `m` weights, with bits set for all but the `n` most costly ones.
fn cheapest(values: &[f32], costs: &[f32], n: usize, m: usize) -> u64 {
    let mut ranked = [0u8; 64];
    let ranked = &mut ranked[..m];
    ranked.iter_mut().enumerate().for_each(|(at, index)| *index = at as u8);
    let cost = |at: u8| values[at as usize] * values[at as usize] * costs[at as usize];
    ranked.sort_by(|a, b| cost(*a).total_cmp(&cost(*b)).then(a.cmp(b)));
    ranked[..m.saturating_sub(n)].iter().fold(0, |marks, at| marks | 1 << at)
}

#[cfg(test)]
mod tests {
    use super::super::compensation::Compensation;
    use super::super::gram;
    use super::*;
    use crate::grid::IntegerGrid;

    const X: [f32; 20] = [1., 2., 0., 1., 0., 1., 1., -1., 2., 1., -1., 0., 1., 0., 1., 1., 1., 1., 0., 2.];
    const W: [f32; 8] = [0.9, -0.35, 0.5, -0.12, 0.26, 0.74, -0.6, 0.33];

    fn solved(zeros: Zeros, step: Option<f32>) -> Vec<f32> {
        let mut sums = vec![0.0; 16];
        gram::add(&X, 4, &mut sums);
        // The reference implementations use a damping of 1 % of doubled sums.
        let order = [0, 1, 2, 3];
        let compensation = Compensation::new(&sums, 4, &order, 0.01).unwrap();
        let grid = step.map(|scale| Grid {
            levels: Levels::Integers(IntegerGrid { bits: 4, symmetric: true }),
            group: 4,
            steps: vec![QuantizationParams { scale, zero: 0.0 }; 2],
            order: &order,
            store: Some(|scale| scale as f32),
        });
        let mut weights = W.to_vec();
        compensation.apply(&mut weights, 4, &mut ColumnSolver::new(zeros, grid));
        weights
    }

    fn error(weights: &[f32]) -> f64 {
        let output = |w: &[f32], row: usize, x: &[f32]| (0..4).map(|i| f64::from(w[row * 4 + i]) * f64::from(x[i])).sum::<f64>();
        X.chunks(4).flat_map(|x| [0, 1].map(|row| (output(weights, row, x) - output(&W, row, x)).powi(2))).sum()
    }

    /// Results of the reference implementations (IST-DASLab).
    #[test]
    fn small_weights_match_the_papers_implementations() {
        let rounded = solved(Zeros::None, Some(0.35));
        let integers: Vec<f32> = rounded.iter().map(|w| (w / 0.35).round()).collect();
        assert_eq!(integers, [3., -1., 2., -1., 1., 2., -2., 1.]);
        assert!((error(&rounded) - 0.4041).abs() < 1e-4);
        let sparse = solved(Zeros::AllBut { n: 2, m: 4 }, None);
        assert_eq!(sparse.iter().map(|w| *w != 0.0).collect::<Vec<_>>(), [true, false, true, false, false, true, true, false]);
        assert!((sparse[5] - 0.888_322).abs() < 1e-5 && (sparse[6] + 0.684_967).abs() < 1e-5, "{sparse:?}");
        assert!((error(&sparse) - 2.5844).abs() < 1e-4);
    }

    /// Results of llm-compressor for a layer (`scripts/goldens layers`).
    #[test]
    fn a_layer_matches_the_reference() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/layers.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |name: &str| -> Vec<f32> { file.tensor(name).unwrap().data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect() };
        let (weight, products) = (tensor("weight"), tensor("products"));
        let size = 144;
        let plain: Vec<usize> = (0..size).collect();
        let mut ordered = plain.clone();
        ordered.sort_by(|a, b| products[b * size + b].total_cmp(&products[a * size + a]));
        let solve = |order: &[usize], zeros: Zeros, integers: Option<IntegerGrid>| {
            let compensation = Compensation::new(&products, size, order, 0.01).unwrap();
            let grid = integers.map(|integers| {
                let mut grid = Grid { levels: Levels::Integers(integers), group: 48, steps: Vec::new(), order, store: Some(|scale| scale as f32) };
                grid.fit(&weight, &[1.0; 144], Range::MinMax);
                grid
            });
            let mut work: Vec<f32> = weight.chunks(size).flat_map(|row| order.iter().map(|column| row[*column])).collect();
            compensation.apply(&mut work, 128, &mut ColumnSolver::new(zeros, grid));
            let mut back = vec![0.0; work.len()];
            (0..work.len()).for_each(|at| back[at / size * size + order[at % size]] = work[at]);
            back
        };
        let same = |ours: &[f32], name: &str, tolerance: f32| {
            let theirs = tensor(name);
            let differing = ours.iter().zip(&theirs).filter(|(a, b)| (*a - *b).abs() > tolerance * (1.0 + b.abs())).count();
            // Values halfway between two grid values may be rounded either way, which affects later
            // columns.
            assert!(differing * 50 <= theirs.len(), "{name}: {differing} of {}", theirs.len());
        };
        for symmetric in [true, false] {
            let integers = Some(IntegerGrid { bits: 4, symmetric });
            let name = if symmetric { "symmetric" } else { "asymmetric" };
            same(&solve(&plain, Zeros::None, integers), &format!("{name}.plain"), 1e-4);
            same(&solve(&ordered, Zeros::None, integers), &format!("{name}.ordered"), 1e-4);
        }
        same(&solve(&plain, Zeros::AllBut { n: 2, m: 4 }, None), "sparsegpt.2:4", 1e-3);
    }
}

//! What columns become while others make up for it: zeros, values of a grid, or both.

use rayon::prelude::*;

use super::compensation::Choice;
use super::grid::{self, Integers, Step};

/// Which weights become zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Zeros {
    /// None.
    None,
    /// Of every block of columns, this part of all rows' weights together; of the whole weight, the exact count.
    Part(f64),
    /// Of every `m` consecutive columns of a row, all but `n`.
    AllBut {
        /// Weights that stay.
        n: usize,
        /// Columns, at most 64, that divide a block.
        m: usize,
    },
}

/// How the steps of grids are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// From the smallest to the largest value.
    MinMax,
    /// The range of the least error, down to this many hundredths of minmax.
    LeastError(u32),
}

/// Chooses zeros by what they cost, and rounds everything else to a grid where there is one.
pub struct Choices<'a, S> {
    /// Which weights become zero.
    pub zeros: Zeros,
    /// The grid; without one, values stay as they are.
    pub grid: Option<Grid<'a, S>>,
    /// Weights `[rows, size]`, in the order of the work, that become zero in any case; or nothing.
    pub zeroed: Vec<bool>,
    /// Of the present block: the rows' weights that become zero.
    removed: Vec<bool>,
    width: usize,
    first: usize,
    /// Weights that were looked at, and those of them that were removed.
    counts: (usize, usize),
}

/// The grids of a weight.
pub struct Grid<'a, S> {
    /// Their integers.
    pub integers: Integers,
    /// Columns that share a step, in the order of the weight and not of the work.
    pub group: usize,
    /// Step of every group, row by row.
    pub steps: Vec<Step>,
    /// Column of the weight for every column of the work.
    pub order: &'a [usize],
    /// Rounds a scale to the format that it is kept in.
    pub store: S,
}

impl<S: Fn(f64) -> f32 + Sync> Grid<'_, S> {
    fn groups(&self) -> usize {
        self.order.len().div_ceil(self.group.max(1))
    }

    fn step(&self, row: usize, column: usize) -> Step {
        self.steps[row * self.groups() + self.order[column] / self.group]
    }

    fn find(&self, values: &[f32], costs: &[f32], range: Range) -> Step {
        match range {
            Range::MinMax => self.integers.step(grid::range(values), &self.store),
            Range::LeastError(least) => grid::best(self.integers, values, costs, least, &self.store),
        }
    }

    /// Finds the steps of all groups from the weight `[rows, size]` as it is; `costs` are those of its columns.
    pub fn fix(&mut self, weights: &[f32], costs: &[f32], range: Range) {
        let (size, group) = (self.order.len(), self.group);
        let of_row = |row: &[f32]| row.chunks(group).zip(costs.chunks(group)).map(|(values, costs)| self.find(values, costs, range)).collect::<Vec<_>>();
        self.steps = weights.par_chunks(size.max(1)).flat_map_iter(of_row).collect();
    }

    /// Rounds every weight of `[rows, size]`, in the order of the weight, to the nearest value of its grid.
    pub fn round(&self, weights: &mut [f32]) {
        let (size, groups) = (self.order.len().max(1), self.groups());
        weights.par_chunks_mut(size).zip(self.steps.par_chunks(groups)).for_each(|(row, steps)| {
            for (values, step) in row.chunks_mut(self.group).zip(steps) {
                values.iter_mut().for_each(|value| *value = self.integers.nearest(*value, *step));
            }
        });
    }

    /// The integers of weights `[rows, size]`, in the order of the weight, that are values of the grid.
    pub fn integers_of(&self, weights: &[f32]) -> Vec<i8> {
        let (size, groups) = (self.order.len().max(1), self.groups());
        let of_row = |(row, steps): (&[f32], &[Step])| {
            row.chunks(self.group)
                .zip(steps)
                .flat_map(|(values, step)| values.iter().map(|value| self.integers.integer(*value, *step) as i8))
                .collect::<Vec<_>>()
        };
        weights.par_chunks(size).zip(self.steps.par_chunks(groups)).flat_map_iter(of_row).collect()
    }
}

impl<'a, S> Choices<'a, S> {
    /// Zeros and a grid, or one of both.
    pub fn new(zeros: Zeros, grid: Option<Grid<'a, S>>) -> Self {
        Choices { zeros, grid, zeroed: Vec::new(), removed: Vec::new(), width: 0, first: 0, counts: (0, 0) }
    }
}

impl<S: Fn(f64) -> f32 + Sync> Choice for Choices<'_, S> {
    fn ranks_blocks(&self) -> bool {
        matches!(self.zeros, Zeros::Part(_))
    }

    fn looks_ahead(&self) -> usize {
        if let Zeros::AllBut { m, .. } = self.zeros { m } else { 1 }
    }

    fn begin(&mut self, first: usize, width: usize, values: &[f32], costs: &[f32]) {
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
            Some(grid) => grid.integers.nearest(ahead[0], grid.step(row, column)),
            None => ahead[0],
        }
    }
}

/// A bit for each of the first `m` weights that are not among the `n` whose removal would cost most.
fn cheapest(values: &[f32], costs: &[f32], n: usize, m: usize) -> u64 {
    let mut ranked = [0u8; 64];
    let ranked = &mut ranked[..m];
    ranked.iter_mut().enumerate().for_each(|(at, place)| *place = at as u8);
    let cost = |at: u8| values[at as usize] * values[at as usize] * costs[at as usize];
    ranked.sort_by(|a, b| cost(*a).total_cmp(&cost(*b)).then(a.cmp(b)));
    ranked[..m.saturating_sub(n)].iter().fold(0, |marks, at| marks | 1 << at)
}

#[cfg(test)]
mod tests {
    use super::super::compensation::Compensation;
    use super::super::gram;
    use super::*;

    const X: [f32; 20] = [1., 2., 0., 1., 0., 1., 1., -1., 2., 1., -1., 0., 1., 0., 1., 1., 1., 1., 0., 2.];
    const W: [f32; 8] = [0.9, -0.35, 0.5, -0.12, 0.26, 0.74, -0.6, 0.33];

    fn solved(zeros: Zeros, step: Option<f32>) -> Vec<f32> {
        let mut sums = vec![0.0; 16];
        gram::add(&X, 4, &mut sums);
        // What the papers' reference implementations call a damping of one percent, for sums that they double.
        let order = [0, 1, 2, 3];
        let compensation = Compensation::new(sums, 4, &order, 0.01).ok().unwrap();
        let grid = step.map(|scale| Grid {
            integers: Integers { bits: 4, symmetric: true },
            group: 4,
            steps: vec![Step { scale, zero: 0.0 }; 2],
            order: &order,
            store: |scale| scale as f32,
        });
        let mut weights = W.to_vec();
        compensation.apply(&mut weights, 4, &mut Choices::new(zeros, grid));
        weights
    }

    fn error(weights: &[f32]) -> f64 {
        let output = |w: &[f32], row: usize, x: &[f32]| (0..4).map(|i| f64::from(w[row * 4 + i]) * f64::from(x[i])).sum::<f64>();
        X.chunks(4).flat_map(|x| [0, 1].map(|row| (output(weights, row, x) - output(&W, row, x)).powi(2))).sum()
    }

    /// Found by the reference implementations (IST-DASLab).
    #[test]
    fn small_weights_become_what_the_papers_make_of_them() {
        let rounded = solved(Zeros::None, Some(0.35));
        let integers: Vec<f32> = rounded.iter().map(|w| (w / 0.35).round()).collect();
        assert_eq!(integers, [3., -1., 2., -1., 1., 2., -2., 1.]);
        assert!((error(&rounded) - 0.4041).abs() < 1e-4);
        let sparse = solved(Zeros::AllBut { n: 2, m: 4 }, None);
        assert_eq!(sparse.iter().map(|w| *w != 0.0).collect::<Vec<_>>(), [true, false, true, false, false, true, true, false]);
        assert!((sparse[5] - 0.888_322).abs() < 1e-5 && (sparse[6] + 0.684_967).abs() < 1e-5, "{sparse:?}");
        assert!((error(&sparse) - 2.5844).abs() < 1e-4);
    }

    /// What the functions of llm-compressor make of a layer (`scripts/goldens-layers`).
    #[test]
    fn a_layer_becomes_what_the_reference_makes_of_it() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/layers.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |name: &str| -> Vec<f32> { file.tensor(name).unwrap().data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect() };
        let (weight, products) = (tensor("weight"), tensor("products"));
        let size = 144;
        let plain: Vec<usize> = (0..size).collect();
        let mut ordered = plain.clone();
        ordered.sort_by(|a, b| products[b * size + b].total_cmp(&products[a * size + a]));
        let solve = |order: &[usize], zeros: Zeros, integers: Option<Integers>| {
            let compensation = Compensation::new(products.clone(), size, order, 0.01).ok().unwrap();
            let grid = integers.map(|integers| {
                let mut grid = Grid { integers, group: 48, steps: Vec::new(), order, store: |scale| scale as f32 };
                grid.fix(&weight, &[1.0; 144], Range::MinMax);
                grid
            });
            let mut work: Vec<f32> = weight.chunks(size).flat_map(|row| order.iter().map(|column| row[*column])).collect();
            compensation.apply(&mut work, 128, &mut Choices::new(zeros, grid));
            let mut back = vec![0.0; work.len()];
            (0..work.len()).for_each(|at| back[at / size * size + order[at % size]] = work[at]);
            back
        };
        let same = |ours: &[f32], name: &str, tolerance: f32| {
            let theirs = tensor(name);
            let differing = ours.iter().zip(&theirs).filter(|(a, b)| (*a - *b).abs() > tolerance * (1.0 + b.abs())).count();
            // A value halfway between two of the grid goes either way by the last bit of a sum, and others behind it.
            assert!(differing * 50 <= theirs.len(), "{name}: {differing} of {}", theirs.len());
        };
        for symmetric in [true, false] {
            let integers = Some(Integers { bits: 4, symmetric });
            let name = if symmetric { "symmetric" } else { "asymmetric" };
            same(&solve(&plain, Zeros::None, integers), &format!("{name}.plain"), 1e-4);
            same(&solve(&ordered, Zeros::None, integers), &format!("{name}.ordered"), 1e-4);
        }
        same(&solve(&plain, Zeros::AllBut { n: 2, m: 4 }, None), "sparsegpt.2:4", 1e-3);
    }
}

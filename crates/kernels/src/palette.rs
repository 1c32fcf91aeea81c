//! Palettes (codebooks): the few values that represent many with the least squared error, by
//! one-dimensional k-means.
//!
//! In one dimension, optimal clusters are intervals and can be found exactly (Wang and Song,
//! *Ckmeans.1d.dp*, 2011, with the divide and conquer of Grønlund et al., *Fast Exact k-Means, k-Medians
//! and Bregman Divergence Clustering in 1D*, 2017, <https://arxiv.org/abs/1701.07204>). If there are
//! more distinct values than [`MAX_POINTS`], adjacent values are merged for the exact search, followed
//! by Lloyd iterations over the original values.

/// Maximum number of distinct values for the exact search.
pub const MAX_POINTS: usize = 1 << 12;

/// Maximum number of Lloyd iterations. They end earlier when nothing changes.
const STEPS: usize = 100;

/// Distinct values with their weights, in ascending order.
pub struct Points {
    values: Vec<f64>,
    weights: Vec<f64>,
    /// Prefix sums of weights, weighted values and weighted squares.
    sums: Vec<[f64; 3]>,
}

impl Points {
    /// From finite values with positive weights.
    pub fn new(mut values: Vec<(f32, f32)>) -> Points {
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut distinct: Vec<(f64, f64)> = Vec::new();
        for (value, weight) in values {
            // Positive and negative zero are one value.
            let (value, weight) = (f64::from(value) + 0.0, f64::from(weight));
            match distinct.last_mut() {
                Some(last) if last.0 == value => last.1 += weight,
                _ => distinct.push((value, weight)),
            }
        }
        Points::from_distinct(&distinct)
    }

    fn from_distinct(distinct: &[(f64, f64)]) -> Points {
        let mut sums = vec![[0f64; 3]; distinct.len() + 1];
        for (at, (value, weight)) in distinct.iter().enumerate() {
            let [count, sum, squares] = sums[at];
            sums[at + 1] = [count + weight, sum + weight * value, squares + weight * value * value];
        }
        Points { values: distinct.iter().map(|point| point.0).collect(), weights: distinct.iter().map(|point| point.1).collect(), sums }
    }

    /// Number of distinct values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    fn between(&self, from: usize, to: usize) -> [f64; 3] {
        let (before, after) = (self.sums[from], self.sums[to]);
        [after[0] - before[0], after[1] - before[1], after[2] - before[2]]
    }

    /// Squared error of the points `from..to` relative to their mean.
    fn cost(&self, from: usize, to: usize) -> f64 {
        let [count, sum, squares] = self.between(from, to);
        if to <= from + 1 { 0.0 } else { (squares - sum * sum / count).max(0.0) }
    }

    /// Mean of the points `from..to`. Not computed from prefix sums, in which a huge value would cancel
    /// the others.
    fn mean(&self, from: usize, to: usize) -> f64 {
        let (mut count, mut sum) = (0.0, 0.0);
        for (value, weight) in self.values[from..to].iter().zip(&self.weights[from..to]) {
            count += weight;
            sum += weight * value;
        }
        (sum / count).clamp(self.values[from], self.values[to - 1])
    }

    /// Merges adjacent points into at most about `limit` runs with their means. Also returns the start
    /// of each run.
    fn merged(&self, limit: usize) -> (Points, Vec<usize>) {
        let (low, high) = (self.values[0], self.values[self.len() - 1]);
        let width = (high - low) / (limit / 2) as f64;
        let every = self.len().div_ceil(limit / 2);
        let (mut starts, mut runs) = (Vec::new(), Vec::new());
        let mut from = 0;
        while from < self.len() {
            let near = from + self.values[from..].partition_point(|value| *value <= self.values[from] + width);
            let to = near.min(from + every).max(from + 1);
            starts.push(from);
            runs.push((self.mean(from, to), self.between(from, to)[0]));
            from = to;
        }
        starts.push(self.len());
        (Points::from_distinct(&runs), starts)
    }

    /// The boundaries of `count` intervals with the least squared error: the start of each, and the end
    /// of the last one.
    pub fn clusters(&self, count: usize) -> Vec<usize> {
        let count = count.min(self.len());
        if self.len() <= MAX_POINTS {
            return self.exact(count);
        }
        let (merged, starts) = self.merged(MAX_POINTS);
        let mut borders: Vec<usize> = merged.exact(count).into_iter().map(|at| starts[at]).collect();
        for _ in 0..STEPS {
            let means: Vec<f64> = borders.windows(2).map(|pair| self.mean(pair[0], pair[1])).collect();
            let mut moved = borders.clone();
            for (border, pair) in moved[1..].iter_mut().zip(means.windows(2)) {
                *border = self.values.partition_point(|value| *value <= (pair[0] + pair[1]) / 2.0);
            }
            if moved == borders || moved.windows(2).any(|pair| pair[0] >= pair[1]) {
                break;
            }
            borders = moved;
        }
        borders
    }

    /// Dynamic programming over the number of clusters. The optimal start of the last cluster increases
    /// monotonically with the end point, so each midpoint halves the candidate ranges on both of its
    /// sides.
    fn exact(&self, count: usize) -> Vec<usize> {
        let points = self.len();
        let mut costs: Vec<f64> = (0..=points).map(|to| self.cost(0, to)).collect();
        let mut begins: Vec<Vec<u32>> = Vec::with_capacity(count);
        for clusters in 1..count {
            let (mut next, mut begin) = (vec![0f64; points + 1], vec![0u32; points + 1]);
            // Ranges of end points, each with the range of candidate starts of the last cluster.
            let first = if clusters + 1 == count { points } else { clusters + 1 };
            let mut pending = vec![(first, points, clusters, points - 1)];
            while let Some((from, to, least, most)) = pending.pop() {
                if from > to {
                    continue;
                }
                let middle = usize::midpoint(from, to);
                let mut best = (f64::INFINITY, least);
                let last = middle - 1;
                let [count, sum, squares] = self.sums[middle];
                for (start, (before, [less, first, gone])) in costs.iter().zip(&self.sums).enumerate().take(most.min(last) + 1).skip(least) {
                    let within = squares - gone - (sum - first) * (sum - first) / (count - less);
                    let cost = before + if start == last { 0.0 } else { within.max(0.0) };
                    if cost < best.0 {
                        best = (cost, start);
                    }
                }
                (next[middle], begin[middle]) = (best.0, best.1 as u32);
                pending.push((from, middle - 1, least, best.1));
                pending.push((middle + 1, to, best.1, most));
            }
            costs = next;
            begins.push(begin);
        }
        let mut borders = vec![points];
        for begin in begins.iter().rev() {
            borders.push(begin[borders[borders.len() - 1]] as usize);
        }
        borders.push(0);
        borders.reverse();
        borders
    }

    /// The means of the optimal clusters, at most `count`, in ascending order.
    pub fn palette(&self, count: usize) -> Vec<f64> {
        if self.is_empty() { Vec::new() } else { self.clusters(count).windows(2).map(|pair| self.mean(pair[0], pair[1])).collect() }
    }
}

/// The index of the nearest palette value for each value. The palette must be in ascending order; ties
/// select the lower index.
pub fn nearest(values: &[f32], palette: &[f32], indices: &mut [u8]) {
    // The midpoint of two f32 values is exact in f64.
    let middles: Vec<f64> = palette.windows(2).map(|pair| f64::midpoint(pair[0].into(), pair[1].into())).collect();
    for (value, index) in values.iter().zip(indices) {
        let value = f64::from(*value);
        *index = middles.partition_point(|middle| *middle < value) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: u32) -> Vec<(f32, f32)> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        (0..count).map(|_| (next() + next() + next() - 1.5, 0.25 + next())).collect()
    }

    fn error(values: &[(f32, f32)], palette: &[f64]) -> f64 {
        let least = |value: f32| palette.iter().map(|entry| (f64::from(value) - entry).powi(2)).fold(f64::INFINITY, f64::min);
        values.iter().map(|(value, weight)| f64::from(*weight) * least(*value)).sum()
    }

    /// The least error of all partitions of sorted values into `count` runs.
    fn brute(sorted: &[(f32, f32)], count: usize) -> f64 {
        let cost = |run: &[(f32, f32)]| {
            let total: f64 = run.iter().map(|(_, w)| f64::from(*w)).sum();
            let mean = run.iter().map(|(v, w)| f64::from(*v) * f64::from(*w)).sum::<f64>() / total;
            run.iter().map(|(v, w)| f64::from(*w) * (f64::from(*v) - mean).powi(2)).sum::<f64>()
        };
        match count {
            1 => cost(sorted),
            _ => (count - 1..sorted.len()).map(|at| brute(&sorted[..at], count - 1) + cost(&sorted[at..])).fold(f64::INFINITY, f64::min),
        }
    }

    #[test]
    fn clusters_are_optimal() {
        for (size, count, seed) in [(5, 4, 1), (12, 3, 2), (14, 4, 3), (14, 4, 4), (11, 6, 5)] {
            let mut values = values(size, seed);
            let found = error(&values, &Points::new(values.clone()).palette(count));
            values.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!((found - brute(&values, count)).abs() < 1e-9, "{size} {count}: {found}");
        }
    }

    #[test]
    fn merging_adjacent_values_is_nearly_optimal() {
        for count in [4, 32] {
            let values = values(9000, 9);
            let points = Points::new(values.clone());
            assert!(points.len() > MAX_POINTS);
            let best: Vec<f64> = points.exact(count).windows(2).map(|pair| points.mean(pair[0], pair[1])).collect();
            let (best, found) = (error(&values, &best), error(&values, &points.palette(count)));
            assert!(found >= best * (1.0 - 1e-9) && found < best * 1.001, "{count}: {found} for {best}");
        }
    }

    #[test]
    fn few_values_are_reproduced_exactly() {
        let some = |values: &[f32]| Points::new(values.iter().map(|value| (*value, 1.0)).collect());
        assert_eq!(some(&[2.0, -1.0, 2.0, 0.0, -0.0]).palette(4), [-1.0, 0.0, 2.0]);
        assert_eq!(some(&[3.5; 9]).palette(16), [3.5]);
        assert!(some(&[]).palette(4).is_empty());
        let mut places = [9; 5];
        nearest(&[-7.0, 0.5, 0.6, f32::MAX, 1.5], &[0.0, 1.0, 2.0], &mut places);
        assert_eq!(places, [0, 0, 1, 2, 1]);
    }
}

//! Palettes: the few values that stand for many with the least squared error, k-means in one dimension.
//!
//! In one dimension the best clusters are intervals, so that the best ones can be found (Wang and Song, *Ckmeans.1d.dp*, 2011, with the
//! division of Grønlund et al., *Fast Exact k-Means, k-Medians and Bregman Divergence Clustering in 1D*, 2017,
//! <https://arxiv.org/abs/1701.07204>). Where there are more distinct values than [`MOST_POINTS`], neighbours are taken together for that
//! search, and Lloyd's steps over the values themselves follow.

/// Distinct values that the exact search takes.
pub const MOST_POINTS: usize = 1 << 12;

/// Steps of Lloyd at most; they end by themselves where nothing moves.
const STEPS: usize = 100;

/// Distinct values with their weights, in rising order.
pub struct Points {
    values: Vec<f64>,
    weights: Vec<f64>,
    /// Sums over all points before: of weights, of values and of squares, by weight.
    sums: Vec<[f64; 3]>,
}

impl Points {
    /// Of finite values, each with a weight that is positive.
    pub fn new(mut values: Vec<(f32, f32)>) -> Points {
        values.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut distinct: Vec<(f64, f64)> = Vec::new();
        for (value, weight) in values {
            // Zeros of both signs are one value.
            let (value, weight) = (f64::from(value) + 0.0, f64::from(weight));
            match distinct.last_mut() {
                Some(last) if last.0 == value => last.1 += weight,
                _ => distinct.push((value, weight)),
            }
        }
        Points::of(&distinct)
    }

    fn of(distinct: &[(f64, f64)]) -> Points {
        let mut sums = vec![[0f64; 3]; distinct.len() + 1];
        for (at, (value, weight)) in distinct.iter().enumerate() {
            let [count, sum, squares] = sums[at];
            sums[at + 1] = [count + weight, sum + weight * value, squares + weight * value * value];
        }
        Points { values: distinct.iter().map(|point| point.0).collect(), weights: distinct.iter().map(|point| point.1).collect(), sums }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    fn between(&self, from: usize, to: usize) -> [f64; 3] {
        let (before, after) = (self.sums[from], self.sums[to]);
        [after[0] - before[0], after[1] - before[1], after[2] - before[2]]
    }

    /// Squared error of points `from..to` to their mean.
    fn cost(&self, from: usize, to: usize) -> f64 {
        let [count, sum, squares] = self.between(from, to);
        if to <= from + 1 { 0.0 } else { (squares - sum * sum / count).max(0.0) }
    }

    /// Not by differences of sums, in which a huge value would drown the others.
    fn mean(&self, from: usize, to: usize) -> f64 {
        let (mut count, mut sum) = (0.0, 0.0);
        for (value, weight) in self.values[from..to].iter().zip(&self.weights[from..to]) {
            count += weight;
            sum += weight * value;
        }
        (sum / count).clamp(self.values[from], self.values[to - 1])
    }

    /// Neighbours taken together into at most about `most` runs, each with the mean of its values; and where runs begin.
    fn gathered(&self, most: usize) -> (Points, Vec<usize>) {
        let (low, high) = (self.values[0], self.values[self.len() - 1]);
        let width = (high - low) / (most / 2) as f64;
        let every = self.len().div_ceil(most / 2);
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
        (Points::of(&runs), starts)
    }

    /// The borders of so many intervals with the least squared error: where each begins, and the end of the last.
    pub fn clusters(&self, count: usize) -> Vec<usize> {
        let count = count.min(self.len());
        if self.len() <= MOST_POINTS {
            return self.exact(count);
        }
        let (gathered, starts) = self.gathered(MOST_POINTS);
        let mut borders: Vec<usize> = gathered.exact(count).into_iter().map(|at| starts[at]).collect();
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

    /// By dynamic programming: the best clusters of all points up to one are the best of fewer points, and one more. The place where the
    /// last begins rises with the point, which halves what is left to look at on both sides of a point in the middle.
    fn exact(&self, count: usize) -> Vec<usize> {
        let points = self.len();
        let mut costs: Vec<f64> = (0..=points).map(|to| self.cost(0, to)).collect();
        let mut begins: Vec<Vec<u32>> = Vec::with_capacity(count);
        for clusters in 1..count {
            let (mut next, mut begin) = (vec![0f64; points + 1], vec![0u32; points + 1]);
            // Point, points that are left on both sides, and places where the last cluster may begin.
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

    /// The means of the best clusters, at most `count` of them, in rising order.
    pub fn palette(&self, count: usize) -> Vec<f64> {
        if self.is_empty() { Vec::new() } else { self.clusters(count).windows(2).map(|pair| self.mean(pair[0], pair[1])).collect() }
    }
}

/// Of each value the place of the nearest in a palette in rising order, the first of two that are as near.
pub fn nearest(values: &[f32], palette: &[f32], places: &mut [u8]) {
    // The middle of two floats of 32 bits is exact in 64.
    let middles: Vec<f64> = palette.windows(2).map(|pair| f64::midpoint(pair[0].into(), pair[1].into())).collect();
    for (value, place) in values.iter().zip(places) {
        let value = f64::from(*value);
        *place = middles.partition_point(|middle| *middle < value) as u8;
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

    /// The least error of all ways to cut sorted values into so many runs.
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
    fn no_other_clusters_are_better() {
        for (size, count, seed) in [(5, 4, 1), (12, 3, 2), (14, 4, 3), (14, 4, 4), (11, 6, 5)] {
            let mut values = values(size, seed);
            let found = error(&values, &Points::new(values.clone()).palette(count));
            values.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!((found - brute(&values, count)).abs() < 1e-9, "{size} {count}: {found}");
        }
    }

    #[test]
    fn taking_neighbours_together_costs_next_to_nothing() {
        for count in [4, 32] {
            let values = values(9000, 9);
            let points = Points::new(values.clone());
            assert!(points.len() > MOST_POINTS);
            let best: Vec<f64> = points.exact(count).windows(2).map(|pair| points.mean(pair[0], pair[1])).collect();
            let (best, found) = (error(&values, &best), error(&values, &points.palette(count)));
            assert!(found >= best * (1.0 - 1e-9) && found < best * 1.001, "{count}: {found} for {best}");
        }
    }

    #[test]
    fn few_values_stay_what_they_are() {
        let some = |values: &[f32]| Points::new(values.iter().map(|value| (*value, 1.0)).collect());
        assert_eq!(some(&[2.0, -1.0, 2.0, 0.0, -0.0]).palette(4), [-1.0, 0.0, 2.0]);
        assert_eq!(some(&[3.5; 9]).palette(16), [3.5]);
        assert!(some(&[]).palette(4).is_empty());
        let mut places = [9; 5];
        nearest(&[-7.0, 0.5, 0.6, f32::MAX, 1.5], &[0.0, 1.0, 2.0], &mut places);
        assert_eq!(places, [0, 0, 1, 2, 1]);
    }
}

//! Backward pass of attention: a block of queries at a time, whose probabilities are computed once more.

use rayon::prelude::*;

use super::attention::{Attention, Heads, QUERIES, pack};
use super::epilogue::Epilogue;
use super::matmul::{Columns, Left, Rows, multiply};
use super::rows_gradient::softmax;
use super::scratch::Scratch;
use super::tile::{BLOCK, PANEL};

/// What attention was computed from, and the gradient of its output.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// Queries.
    pub queries: Heads<'a>,
    /// Keys.
    pub keys: Heads<'a>,
    /// Values.
    pub values: Heads<'a>,
    /// Gradient of the output.
    pub gradient: Heads<'a>,
}

/// Rows of the three gradients that one job writes; of those that are not wanted there are none.
#[derive(Default)]
struct Job<'o> {
    queries: Vec<&'o mut [f32]>,
    keys: Vec<&'o mut [f32]>,
    values: Vec<&'o mut [f32]>,
}

impl Attention<'_> {
    /// Writes the gradients of queries, keys and values as `[batch, rows, heads, width]`; those of length zero are left out.
    pub fn gradients(&self, given: Given, [queries, keys, values]: [&mut [f32]; 3], batch: usize) {
        let mut jobs: Vec<Job> = (0..batch * self.groups).map(|_| Job::default()).collect();
        let shared = self.heads / self.groups;
        // Rows of one batch element lie head by head.
        let place = |index: usize, heads: usize, rows: usize| (index / (heads * rows), index % heads);
        for (index, row) in queries.chunks_mut(self.width.max(1)).enumerate() {
            let (batch, head) = place(index, self.heads, self.sequence);
            jobs[batch * self.groups + head / shared].queries.push(row);
        }
        for (index, row) in keys.chunks_mut(self.width.max(1)).enumerate() {
            let (batch, group) = place(index, self.groups, self.keys);
            jobs[batch * self.groups + group].keys.push(row);
        }
        for (index, row) in values.chunks_mut(self.out.max(1)).enumerate() {
            let (batch, group) = place(index, self.groups, self.keys);
            jobs[batch * self.groups + group].values.push(row);
        }
        jobs.into_par_iter().enumerate().for_each(|(index, job)| self.group(given, index / self.groups, index % self.groups, job));
    }

    /// One key head with all queries that look at it.
    fn group(&self, given: Given, batch: usize, group: usize, mut job: Job) {
        let shared = self.heads / self.groups;
        let padding = self.padding.map(|p| &p[batch * self.keys..][..self.keys]);
        let (keys, values) = (given.keys.head(batch, group), given.values.head(batch, group));
        let (key_step, value_step) = (given.keys.strides[2], given.values.strides[2]);
        let key_columns = pack(&Columns { values: keys, count: self.keys, stride: key_step }, self.keys, self.width);
        let key_rows = pack(&Rows { values: keys, count: self.width, stride: key_step }, self.width, self.keys);
        let value_columns = pack(&Columns { values, count: self.keys, stride: value_step }, self.keys, self.out);
        let mut key_sums = vec![0f32; self.keys * self.width];
        let mut value_sums = vec![0f32; self.keys * self.out];
        for head in 0..shared {
            for first in (0..self.sequence).step_by(QUERIES) {
                let count = QUERIES.min(self.sequence - first);
                let blocks = 0..count.div_ceil(BLOCK);
                let seen = self.seen(first, count, padding);
                let span = seen.len();
                let place = (batch, group * shared + head, first);
                let (queries, gradient) = (rows_from(given.queries, place), rows_from(given.gradient, place));
                let (query_step, gradient_step) = (given.queries.strides[2], given.gradient.strides[2]);
                let left = Left::pack(queries, count, self.width, query_step);
                let probabilities = self.probabilities(first, &left, count, &key_columns, &seen, padding);
                if !job.values.is_empty() {
                    let transposed = Left::pack_transposed(&probabilities, span, count, span);
                    let rows = pack(&Rows { values: gradient, count: self.out, stride: gradient_step }, self.out, count);
                    add(&transposed, span, &rows, self.out, &mut value_sums[seen.start * self.out..]);
                }
                if job.queries.is_empty() && job.keys.is_empty() {
                    continue;
                }
                let left = Left::pack(gradient, count, self.out, gradient_step);
                let mut derivative = Scratch::new(count * span);
                let panels = &value_columns[seen.start * self.out..seen.end.next_multiple_of(PANEL) * self.out];
                multiply(&left, blocks.clone(), panels, 0, Epilogue::NONE, &mut derivative, span, span);
                softmax(&probabilities, &mut derivative, span, self.scale);
                if !job.queries.is_empty() {
                    let left = Left::pack(&derivative, count, span, span);
                    let mut rows = Scratch::new(count * self.width);
                    for (index, panel) in key_rows.chunks_exact((PANEL * self.keys).max(1)).enumerate() {
                        let panel = &panel[seen.start * PANEL..seen.end * PANEL];
                        multiply(&left, blocks.clone(), panel, index * PANEL, Epilogue::NONE, &mut rows, self.width, self.width);
                    }
                    // Of a group's heads, rows of the same query are neighbours.
                    let places = job.queries.iter_mut().skip(first * shared + head).step_by(shared);
                    places.zip(rows.chunks_exact(self.width.max(1))).for_each(|(place, row)| place.copy_from_slice(row));
                }
                if !job.keys.is_empty() {
                    let transposed = Left::pack_transposed(&derivative, span, count, span);
                    let rows = pack(&Rows { values: queries, count: self.width, stride: query_step }, self.width, count);
                    add(&transposed, span, &rows, self.width, &mut key_sums[seen.start * self.width..]);
                }
            }
        }
        for (rows, sums, width) in [(job.keys, key_sums, self.width), (job.values, value_sums, self.out)] {
            rows.into_iter().zip(sums.chunks_exact(width.max(1))).for_each(|(row, sum)| row.copy_from_slice(sum));
        }
    }
}

/// Rows of a head from one on.
fn rows_from<'a>(heads: Heads<'a>, (batch, head, first): (usize, usize, usize)) -> &'a [f32] {
    heads.head(batch, head).get(first * heads.strides[2]..).unwrap_or_default()
}

/// Adds a product to `sums`.
fn add(left: &Left, rows: usize, panels: &[f32], width: usize, sums: &mut [f32]) {
    multiply(left, 0..rows.div_ceil(BLOCK), panels, 0, Epilogue::ACCUMULATE, sums, width, width);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 20) as f32 - 2048.0) / 2048.0).collect()
    }

    fn place(values: &[f32], heads: usize, [sequence, width]: [usize; 2]) -> Heads<'_> {
        Heads { values, strides: [heads * sequence * width, sequence * width, width] }
    }

    #[test]
    fn gradients_are_the_same_with_any_number_of_threads_and_those_that_are_differences() {
        let (batch, heads, groups, sequence, width, out) = (2, 4, 2, 130, 5, 6);
        let padding: Vec<bool> = (0..batch * sequence).map(|i| i % 7 == 3).collect();
        for (causal, window, padding) in [(false, None, None), (true, None, None), (true, Some(40), None), (true, Some(9), Some(&padding[..]))] {
            let shape = Attention { heads, groups, sequence, keys: sequence, width, out, scale: 0.6, causal, window, padding };
            let inputs =
                [numbers(batch * heads * sequence * width, 1), numbers(batch * groups * sequence * width, 2), numbers(batch * groups * sequence * out, 3)];
            let gradient = numbers(batch * heads * sequence * out, 4);
            let loss = |inputs: &[Vec<f32>; 3]| {
                let mut y = vec![0.0; gradient.len()];
                shape.run(
                    place(&inputs[0], heads, [sequence, width]),
                    place(&inputs[1], groups, [sequence, width]),
                    place(&inputs[2], groups, [sequence, out]),
                    &mut y,
                );
                y.iter().zip(&gradient).map(|(y, g)| f64::from(*y) * f64::from(*g)).sum::<f64>()
            };
            let given = Given {
                queries: place(&inputs[0], heads, [sequence, width]),
                keys: place(&inputs[1], groups, [sequence, width]),
                values: place(&inputs[2], groups, [sequence, out]),
                gradient: place(&gradient, heads, [sequence, out]),
            };
            let compute = |threads| {
                let mut found = [vec![0.0; inputs[0].len()], vec![0.0; inputs[1].len()], vec![0.0; inputs[2].len()]];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| shape.gradients(given, found.each_mut().map(Vec::as_mut_slice), batch));
                found
            };
            let ours = compute(1);
            assert_eq!(ours, compute(2));
            for (index, (count, width)) in [(heads, width), (groups, width), (groups, out)].into_iter().enumerate() {
                for at in (0..inputs[index].len()).step_by(397) {
                    let (batch, head, row, column) = (at / (count * sequence * width), at / (sequence * width) % count, at / width % sequence, at % width);
                    let moved = |by: f32| {
                        let mut inputs = inputs.clone();
                        inputs[index][at] += by;
                        loss(&inputs)
                    };
                    let difference = (moved(0.05) - moved(-0.05)) / 0.1;
                    let ours = f64::from(ours[index][((batch * sequence + row) * count + head) * width + column]);
                    assert!((ours - difference).abs() < 2e-3 * (1.0 + difference.abs()), "input {index}, {at}: {ours} for {difference}");
                }
            }
        }
    }
}

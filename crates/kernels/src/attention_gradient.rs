//! Backward pass of attention. The probabilities of a few panels of queries are recomputed at a time.

use std::ops::Range;

use rayon::prelude::*;

use super::attention::{Attention, Heads, Lanes, exponents_of, largest, multiply};
use super::operands::{Left, Right, Rows};
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// Number of query panels whose contributions to the gradients of keys and values are summed together.
const GROUP: usize = 3;
/// Number of keys processed at a time, so that their products stay in cache.
const KEY_CHUNK: usize = 16 * BLOCK;

/// Inputs of the forward pass, and the gradient of the output.
#[derive(Clone, Copy)]
pub struct BackwardInputs<'a> {
    /// Queries.
    pub queries: Heads<'a>,
    /// Keys.
    pub keys: Heads<'a>,
    /// Values.
    pub values: Heads<'a>,
    /// Gradient of the output.
    pub gradient: Heads<'a>,
}

/// Rows of the three gradients that one job writes. Empty for gradients that are not requested.
#[derive(Default)]
struct Job<'o> {
    queries: Vec<&'o mut [f32]>,
    keys: Vec<&'o mut [f32]>,
    values: Vec<&'o mut [f32]>,
}

impl Attention<'_> {
    /// Writes the gradients of queries, keys and values as `[batch, rows, heads, width]`. Empty slices
    /// are skipped.
    pub fn gradients(&self, inputs: BackwardInputs, [queries, keys, values]: [&mut [f32]; 3], batch: usize) {
        let mut jobs: Vec<Job> = (0..batch * self.groups).map(|_| Job::default()).collect();
        let shared = self.heads / self.groups;
        // Within a batch element, the rows of all heads alternate.
        let position = |index: usize, heads: usize, rows: usize| (index / (heads * rows), index % heads);
        for (index, row) in queries.chunks_mut(self.width.max(1)).enumerate() {
            let (batch, head) = position(index, self.heads, self.sequence);
            jobs[batch * self.groups + head / shared].queries.push(row);
        }
        for (index, row) in keys.chunks_mut(self.width.max(1)).enumerate() {
            let (batch, group) = position(index, self.groups, self.keys);
            jobs[batch * self.groups + group].keys.push(row);
        }
        for (index, row) in values.chunks_mut(self.out.max(1)).enumerate() {
            let (batch, group) = position(index, self.groups, self.keys);
            jobs[batch * self.groups + group].values.push(row);
        }
        jobs.into_par_iter().enumerate().for_each(|(index, job)| self.group(inputs, index / self.groups, index % self.groups, job));
    }

    /// Processes one key head with all query heads that share it.
    fn group(&self, inputs: BackwardInputs, batch: usize, group: usize, mut job: Job) {
        let shared = self.heads / self.groups;
        let (keys, values) = (inputs.keys.head(batch, group), inputs.values.head(batch, group));
        let (key_step, value_step) = (inputs.keys.strides[2], inputs.values.strides[2]);
        let packed = Packed {
            shape: self,
            padding: self.padding.map(|p| &p[batch * self.keys..][..self.keys]),
            keys: Left::pack(keys, self.keys, self.width, key_step),
            values: Left::pack(values, self.keys, self.out, value_step),
            key_columns: Left::pack_transposed(keys, self.width, self.keys, key_step),
        };
        let mut key_sums = vec![0f32; self.keys * self.width];
        let mut value_sums = vec![0f32; self.keys * self.out];
        for head in 0..shared {
            for first in (0..self.sequence).step_by(GROUP * PANEL) {
                let count = (GROUP * PANEL).min(self.sequence - first);
                let range = self.key_range(first, count, packed.padding);
                let position = (batch, group * shared + head, first);
                let (queries, gradient) = (rows_from(inputs.queries, position), rows_from(inputs.gradient, position));
                let (query_step, gradient_step) = (inputs.queries.strides[2], inputs.gradient.strides[2]);
                let panels: Vec<Recomputed> = (0..count)
                    .step_by(PANEL)
                    .map(|at| {
                        let rows = [&queries[at * query_step..], &gradient[at * gradient_step..]];
                        packed.recompute(rows, [PANEL.min(count - at), query_step, gradient_step], first + at, range.clone())
                    })
                    .collect();
                if !job.queries.is_empty() {
                    for (at, panel) in (first..).step_by(PANEL).zip(&panels) {
                        // Rows of the same query in different heads of the group are adjacent.
                        let rows = job.queries.iter_mut().skip(at * shared + head).step_by(shared).take(PANEL);
                        packed.write_query_gradients(panel, &range, rows);
                    }
                }
                if !job.values.is_empty() {
                    let factors: Vec<f32> = panels.iter().flat_map(|panel| panel.factors).collect();
                    let rows = row_panels(gradient, [count, self.out, gradient_step], Some(&factors));
                    let weights: Vec<&[Lanes]> = panels.iter().map(|panel| panel.weights.as_chunks().0).collect();
                    add(&weights, &rows, [range.len(), count, self.out], &mut value_sums[range.start * self.out..]);
                }
                if !job.keys.is_empty() {
                    let rows = row_panels(queries, [count, self.width, query_step], None);
                    let derivatives: Vec<&[Lanes]> = panels.iter().map(|panel| panel.derivatives.as_chunks().0).collect();
                    add(&derivatives, &rows, [range.len(), count, self.width], &mut key_sums[range.start * self.width..]);
                }
            }
        }
        for (rows, sums, width) in [(job.keys, key_sums, self.width), (job.values, value_sums, self.out)] {
            rows.into_iter().zip(sums.chunks_exact(width.max(1))).for_each(|(row, sum)| row.copy_from_slice(sum));
        }
    }
}

/// A packed key head.
struct Packed<'a> {
    shape: &'a Attention<'a>,
    padding: Option<&'a [bool]>,
    keys: Left,
    values: Left,
    key_columns: Left,
}

/// Recomputed attention of a panel of queries.
struct Recomputed {
    /// Unnormalized probabilities, `[keys][queries]`.
    weights: Scratch,
    /// Normalization factor of each query.
    factors: Lanes,
    /// Scaled gradients of the products, `[keys][queries]`.
    derivatives: Scratch,
}

impl Packed<'_> {
    fn recompute(&self, [queries, gradient]: [&[f32]; 2], [count, query_step, gradient_step]: [usize; 3], first: usize, range: Range<usize>) -> Recomputed {
        let shape = self.shape;
        let panel = shape.panel(queries, [count, shape.width, query_step], shape.scale);
        let gradient = shape.panel(gradient, [count, shape.out, gradient_step], 1.0);
        // The matrix product reads complete blocks of rows.
        let padded = range.len().next_multiple_of(BLOCK) * PANEL;
        let (mut weights, mut derivatives) = (Scratch::new(padded), Scratch::new(padded));
        let rows = &mut weights.as_chunks_mut().0[..range.len()];
        let slopes = &mut derivatives.as_chunks_mut().0[..range.len()];
        let mut maxima = [f32::MIN; PANEL];
        for (index, rows) in rows.chunks_mut(KEY_CHUNK).enumerate() {
            let start = range.start + index * KEY_CHUNK;
            shape.products(&self.keys, start..start + rows.len(), (&panel, first), self.padding, rows);
            largest(rows, &mut maxima);
        }
        let (mut total, mut along) = ([0f32; PANEL], [0f32; PANEL]);
        for (index, (rows, slopes)) in rows.chunks_mut(KEY_CHUNK).zip(slopes.chunks_mut(KEY_CHUNK)).enumerate() {
            let sums = exponents_of(rows, &maxima);
            multiply(&self.values, range.start / BLOCK + index * KEY_CHUNK / BLOCK, &gradient, slopes);
            add_products(rows, slopes, &mut along);
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
        let factors = total.map(|total| 1.0 / total);
        softmax_gradient(rows, slopes, &factors, &along, shape.scale);
        Recomputed { weights, factors, derivatives }
    }

    /// Writes the gradients of the queries of a panel.
    fn write_query_gradients<'o, 'r: 'o>(&self, panel: &Recomputed, range: &Range<usize>, outputs: impl Iterator<Item = &'o mut &'r mut [f32]>) {
        let mut columns = vec![[0f32; PANEL]; self.shape.width.next_multiple_of(BLOCK)];
        for (index, tile) in columns.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let rows = BLOCK.min(self.shape.width - index * BLOCK);
            let keys = &self.key_columns.block(index)[range.start * BLOCK..range.end * BLOCK];
            tile::multiply(keys, Panel::Packed(&panel.derivatives), [rows, PANEL], tile);
        }
        for (lane, output) in outputs.enumerate() {
            output.iter_mut().zip(&columns).for_each(|(out, column)| *out = column[lane]);
        }
    }
}

/// The rows of a head, starting at `first`.
fn rows_from<'a>(heads: Heads<'a>, (batch, head, first): (usize, usize, usize)) -> &'a [f32] {
    heads.head(batch, head).get(first * heads.strides[2]..).unwrap_or_default()
}

/// Packs rows into panels of columns, each row multiplied by its factor.
fn row_panels(values: &[f32], [count, width, stride]: [usize; 3], factors: Option<&[f32]>) -> Scratch {
    let mut panels = Scratch::new(width.next_multiple_of(PANEL) * count);
    for (index, panel) in panels.chunks_exact_mut((PANEL * count).max(1)).enumerate() {
        Rows { values, count: width, stride }.pack(index * PANEL, 0, panel);
        for (row, factor) in panel.as_chunks_mut::<PANEL>().0.iter_mut().zip(factors.unwrap_or_default()) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
    panels
}

/// Adds `weights · rows`, with weights `[keys][queries]` in panels, to the sums of the keys.
fn add(weights: &[&[Lanes]], rows: &[f32], [keys, count, width]: [usize; 3], sums: &mut [f32]) {
    let mut block = [[0f32; BLOCK]; GROUP * PANEL];
    let mut tile = [[0f32; PANEL]; BLOCK];
    for (first, sums) in (0..keys).step_by(BLOCK).zip(sums.chunks_mut((BLOCK * width).max(1))) {
        let lanes = BLOCK.min(keys - first);
        for (weights, block) in weights.iter().zip(block.as_chunks_mut().0) {
            if let Some(rows) = weights[first..].first_chunk() {
                transpose(rows, block);
            }
        }
        for (index, panel) in rows.chunks_exact((PANEL * count).max(1)).enumerate() {
            tile::multiply(block[..count].as_flattened(), Panel::Packed(panel), [lanes, PANEL], &mut tile);
            add_rows(&tile[..lanes], &mut sums[index * PANEL..], width, PANEL.min(width - index * PANEL));
        }
    }
}

simd! {
    /// Transposes `[keys][queries]` to `[queries][keys]`.
    fn transpose(rows: &[Lanes; BLOCK], block: &mut [[f32; BLOCK]; PANEL]) {
        for (query, keys) in block.iter_mut().enumerate() {
            for key in 0..BLOCK {
                keys[key] = rows[key][query];
            }
        }
    }
}

simd! {
    /// Adds rows to the first `columns` elements of rows with `width` elements.
    fn add_rows(rows: &[Lanes], sums: &mut [f32], width: usize, columns: usize) {
        for (row, sums) in rows.iter().zip(sums.chunks_mut(width)) {
            match sums.first_chunk_mut::<PANEL>() {
                Some(sums) if columns == PANEL => {
                    for lane in 0..PANEL {
                        sums[lane] += row[lane];
                    }
                }
                _ => sums[..columns].iter_mut().zip(row).for_each(|(sum, x)| *sum += x),
            }
        }
    }
}

simd! {
    fn add_products(a: &[Lanes], b: &[Lanes], sums: &mut Lanes) {
        let mut found = *sums;
        for (a, b) in a.iter().zip(b) {
            for lane in 0..PANEL {
                found[lane] += a[lane] * b[lane];
            }
        }
        *sums = found;
    }
}

simd! {
    /// Replaces `g` by `p (g - Σ p g) · scale`, where `p` is a weight times its query's factor, and
    /// `along` is the sum of `weight · g`.
    fn softmax_gradient(weights: &[Lanes], gradient: &mut [Lanes], factors: &Lanes, along: &Lanes, scale: f32) {
        let (mut means, mut factors) = (*along, *factors);
        for lane in 0..PANEL {
            means[lane] *= factors[lane];
            factors[lane] *= scale;
        }
        for (weights, gradient) in weights.iter().zip(gradient) {
            for lane in 0..PANEL {
                gradient[lane] = weights[lane] * (gradient[lane] - means[lane]) * factors[lane];
            }
        }
    }
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
    fn gradients_equal_finite_differences_and_are_independent_of_threads() {
        let (batch, heads, groups, sequence, width, out) = (2, 4, 2, 130, 5, 6);
        let padding: Vec<bool> = (0..batch * sequence).map(|i| i % 7 == 3).collect();
        for (causal, window, padding) in [(false, None, None), (true, None, None), (true, Some(40), None), (true, Some(9), Some(&padding[..]))] {
            let shape = Attention {
                heads,
                groups,
                sequence,
                keys: sequence,
                width,
                out,
                scale: 0.6,
                causal,
                window,
                soft_cap: None,
                padding,
                bias: None,
                zero_where_hidden: false,
            };
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
            let given = BackwardInputs {
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

//! Attention, one head at a time. Products of queries and keys are computed for a few keys at a time and
//! used immediately.
//!
//! Queries are the columns of a panel and keys its rows, so that maxima and sums over keys are lane-wise
//! operations. Previously exponentiated products are rescaled when a larger maximum occurs (Milakov and
//! Gimelshein, *Online Normalizer Calculation for Softmax*, 2018; Dao et al., *FlashAttention*, 2022).

use std::ops::Range;

use rayon::prelude::*;

use super::activation::{exp_below, tanh};
use super::operands::{Columns, Left, Right};
use super::rows::rotate;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// One value per query of a panel.
pub(super) type Lanes = [f32; PANEL];

const HALF: usize = PANEL / 2;
/// Number of query panels that process the same keys.
const GROUP: usize = 4;
/// Number of keys whose products with a panel are stored at a time.
const KEYS: usize = 22 * BLOCK;
/// Minimum number of multiply-accumulates of a job.
const MACS: usize = 1 << 18;
/// Minimum number of elements that a job copies or rotates.
const ELEMENTS: usize = 1 << 14;

/// A tensor `[batch, heads, rows, width]` whose last dimension is contiguous.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Strides of batch, heads and rows.
    pub strides: [usize; 3],
}

impl<'a> Heads<'a> {
    pub(super) fn head(&self, batch: usize, head: usize) -> &'a [f32] {
        &self.values[batch * self.strides[0] + head * self.strides[1]..]
    }
}

/// A bias added to the products `[batch, heads, queries, keys]`.
#[derive(Clone, Copy)]
pub struct Bias<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Strides of the dimensions: 0 if broadcast, otherwise 1 for keys.
    pub strides: [usize; 4],
}

/// Sizes and masking of an attention operation.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub groups: usize,
    /// Number of queries. With `causal` or `window`, they are the last positions of the keys.
    pub sequence: usize,
    /// Number of keys.
    pub keys: usize,
    /// Width of queries and keys.
    pub width: usize,
    /// Width of values.
    pub out: usize,
    /// Factor of the products.
    pub scale: f32,
    /// Whether a query attends only to keys at its own and earlier positions.
    pub causal: bool,
    /// Sliding window: a query attends only to keys at a distance of less than this.
    pub window: Option<usize>,
    /// Soft cap of the products: `cap · tanh(product / cap)`.
    pub soft_cap: Option<f32>,
    /// Padding mask `[batch, keys]`; `true` is padding.
    pub padding: Option<&'a [bool]>,
    /// Bias of the products. Not supported by the gradients.
    pub bias: Option<Bias<'a>>,
    /// Whether queries whose keys are all masked by a bias of minus infinity yield zeros instead of NaN.
    pub zero_where_hidden: bool,
}

impl Attention<'_> {
    /// Writes the output, a contiguous `[batch, heads, sequence, out]`.
    pub fn run(&self, queries: Heads, keys: Heads, values: Heads, output: &mut [f32]) {
        if self.is_single() {
            return self.run_single(queries, keys, values, output);
        }
        let heads = MACS / (self.sequence * self.keys * (self.width + self.out)).max(1);
        output.par_chunks_mut((self.sequence * self.out).max(1)).with_min_len(heads.max(1)).enumerate().for_each(|(job, output)| {
            let (batch, head) = (job / self.heads, job % self.heads);
            let group = head / (self.heads / self.groups);
            let padding = self.padding.map(|p| &p[batch * self.keys..][..self.keys]);
            let keys = Left::pack(keys.head(batch, group), self.keys, self.width, keys.strides[2]);
            let values = Left::pack_transposed(values.head(batch, group), self.out, self.keys, values.strides[2]);
            let mut products = Scratch::new(KEYS * PANEL);
            for (index, output) in output.chunks_mut((GROUP * PANEL * self.out).max(1)).enumerate() {
                let first = index * GROUP * PANEL;
                let rows = output.chunks(PANEL * self.out).enumerate().map(|(i, rows)| (first + i * PANEL, rows.len() / self.out));
                let mut panels: Vec<Queries> = rows.map(|(first, count)| Queries::new(self, first, count, queries, (batch, head), padding)).collect();
                let start = panels.iter().map(|panel| panel.range.start).min().unwrap_or(0);
                let end = panels.iter().map(|panel| panel.range.end).max().unwrap_or(0);
                for start in (start..end).step_by(KEYS) {
                    for panel in &mut panels {
                        panel.process(self, start, (&keys, &values), padding, &mut products);
                    }
                }
                panels.iter().zip(output.chunks_mut(PANEL * self.out)).for_each(|(panel, output)| panel.finish(self, output));
            }
        });
    }

    /// Number of keys before the position of the first query.
    fn past(&self) -> usize {
        if self.causal { self.keys.saturating_sub(self.sequence) } else { 0 }
    }

    /// Range of keys that a query attends to, ignoring padding.
    pub(super) fn visible(&self, query: usize) -> Range<usize> {
        let position = self.past() + query;
        let ahead = if self.causal { 1 } else { self.window.unwrap_or(self.keys) };
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        start.min(self.keys)..position.saturating_add(ahead).min(self.keys)
    }

    /// Range of keys computed for a range of queries, aligned to the start of a block. A query that
    /// attends only to padding uses all keys with equal weight.
    pub(super) fn key_range(&self, first: usize, count: usize, padding: Option<&[bool]>) -> Range<usize> {
        let (of_first, of_last) = (self.visible(first), self.visible(first + count.max(1) - 1));
        let order = of_first.start / BLOCK * BLOCK..of_last.end;
        let Some(padding) = padding else { return order };
        // Keys that all of these queries attend to.
        let common = padding.get(of_last.start..of_first.end).is_some_and(|keys| keys.contains(&false));
        match padding.iter().rposition(|padding| !padding) {
            // A bias may hide the keys in the window.
            Some(to) if common && !(self.bias.is_some() && self.window.is_some()) => order.start..order.end.min(to + 1),
            _ => 0..self.keys,
        }
    }

    /// A scaled panel of rows of a head. Columns beyond the last row are zero, or equal to it.
    pub(super) fn panel(&self, rows: &[f32], [count, width, stride]: [usize; 3], scale: f32) -> Scratch {
        let mut panel = Scratch::new(width * PANEL);
        if count < PANEL {
            panel.fill(0.0);
        }
        Columns { values: rows, count, stride }.pack(0, 0, &mut panel);
        panel.iter_mut().for_each(|x| *x *= scale);
        panel
    }

    /// Products of keys, starting at a block boundary, with a panel of queries. Masked products are set
    /// to the lowest finite value.
    pub(super) fn products(&self, keys: &Left, range: Range<usize>, (panel, first): (&[f32], usize), padding: Option<&[bool]>, products: &mut [Lanes]) {
        multiply(keys, range.start / BLOCK, panel, products);
        if let Some(cap) = self.soft_cap {
            soft_cap(products, cap);
        }
        self.mask(range, first, padding, products);
    }

    /// Sets masked products to the lowest finite value.
    fn mask(&self, range: Range<usize>, first: usize, padding: Option<&[bool]>, products: &mut [Lanes]) {
        let first = self.past() + first;
        let ahead = if self.causal { 1 } else { self.window.unwrap_or(usize::MAX) };
        for (key, products) in range.zip(products) {
            if padding.is_some_and(|padding| padding[key]) {
                *products = [f32::MIN; PANEL];
            } else if self.causal || self.window.is_some() {
                products[..(key + 1).saturating_sub(ahead).saturating_sub(first).min(PANEL)].fill(f32::MIN);
                let end = self.window.map_or(PANEL, |window| (key + window).saturating_sub(first).min(PANEL));
                products[end..].fill(f32::MIN);
            }
        }
    }

    /// Adds the bias of a head to the products with a panel of queries.
    fn add_bias(&self, (batch, head): (usize, usize), range: Range<usize>, first: usize, products: &mut [Lanes]) {
        let Some(Bias { values, strides: [of_batch, of_head, of_query, of_key] }) = self.bias else { return };
        let of_head = &values[batch * of_batch + head * of_head..];
        for (lane, query) in (first..self.sequence).take(PANEL).enumerate() {
            let row = &of_head[query * of_query..];
            products.iter_mut().zip(range.clone()).for_each(|(product, key)| product[lane] += row[key * of_key]);
        }
    }
}

/// Multiplies consecutive blocks of a left matrix by a panel.
pub(super) fn multiply(left: &Left, block: usize, panel: &[f32], rows: &mut [Lanes]) {
    for (index, rows) in rows.chunks_mut(BLOCK).enumerate() {
        let left = left.block(block + index);
        match rows.first_chunk_mut() {
            Some(tile) => tile::multiply(left, Panel::Packed(panel), [BLOCK, PANEL], tile),
            None => {
                let mut tile = [[0f32; PANEL]; BLOCK];
                tile::multiply(left, Panel::Packed(panel), [rows.len(), PANEL], &mut tile);
                rows.copy_from_slice(&tile[..rows.len()]);
            }
        }
    }
}

/// State of a panel of queries.
struct Queries {
    head: (usize, usize),
    first: usize,
    range: Range<usize>,
    panel: Scratch,
    /// Maximum of the products so far.
    maxima: Lanes,
    /// Sum of the exponentials so far.
    total: Lanes,
    /// Weighted sums of values, one row per output column.
    sums: Vec<Lanes>,
}

impl Queries {
    fn new(shape: &Attention, first: usize, count: usize, queries: Heads, (batch, head): (usize, usize), padding: Option<&[bool]>) -> Queries {
        let rows = queries.head(batch, head).get(first * queries.strides[2]..).unwrap_or_default();
        Queries {
            head: (batch, head),
            first,
            range: shape.key_range(first, count, padding),
            panel: shape.panel(rows, [count, shape.width, queries.strides[2]], shape.scale),
            maxima: [f32::MIN; PANEL],
            total: [0.0; PANEL],
            sums: vec![[0.0; PANEL]; shape.out],
        }
    }

    /// Processes the keys `start..start + KEYS`.
    fn process(&mut self, shape: &Attention, start: usize, (keys, values): (&Left, &Left), padding: Option<&[bool]>, products: &mut [f32]) {
        let range = start.max(self.range.start)..(start + KEYS).min(self.range.end);
        if range.is_empty() {
            return;
        }
        let products = &mut products.as_chunks_mut().0[..range.len()];
        shape.products(keys, range.clone(), (&self.panel, self.first), padding, products);
        if shape.bias.is_some() {
            shape.add_bias(self.head, range.clone(), self.first, products);
            shape.mask(range.clone(), self.first, padding, products);
        }
        let factors = exponents(products, &mut self.maxima, &mut self.total);
        let mut tile = [[0f32; PANEL]; BLOCK];
        for (index, sums) in self.sums.chunks_mut(BLOCK).enumerate() {
            let values = &values.block(index)[range.start * BLOCK..range.end * BLOCK];
            tile::multiply(values, Panel::Packed(products.as_flattened()), [sums.len(), PANEL], &mut tile);
            add_scaled(sums, &tile, &factors);
        }
    }

    /// Writes the output rows of the panel.
    fn finish(&self, shape: &Attention, output: &mut [f32]) {
        let factors = self.total.map(|total| if shape.zero_where_hidden && total == 0.0 { 0.0 } else { 1.0 / total });
        for ((lane, row), factor) in output.chunks_exact_mut(self.sums.len().max(1)).enumerate().zip(factors) {
            row.iter_mut().zip(&self.sums).for_each(|(out, sums)| *out = sums[lane] * factor);
        }
    }
}

simd! {
    fn soft_cap(products: &mut [Lanes], cap: f32) {
        for row in products {
            for lane in row.iter_mut() {
                *lane = cap * tanh(*lane / cap);
            }
        }
    }
}

simd! {
    /// Replaces the products by `exp(x - max)`. Returns the factors by which previous sums must be
    /// multiplied, because the maxima may have increased.
    fn exponents(products: &mut [Lanes], maxima: &mut Lanes, total: &mut Lanes) -> Lanes {
        let before = *maxima;
        largest(products, maxima);
        let mut sums = [0f32; PANEL];
        exponents_below(products, maxima, &mut sums);
        let mut factors = [0f32; PANEL];
        for lane in 0..PANEL {
            factors[lane] = exp_below(before[lane] - maxima[lane]);
            total[lane] = total[lane] * factors[lane] + sums[lane];
        }
        factors
    }
}

#[inline(always)]
fn exponents_below(products: &mut [Lanes], maxima: &Lanes, sums: &mut Lanes) {
    // Half of the lanes at a time, so that sums and constants fit into registers.
    for half in [0, HALF] {
        let (Some(maxima), Some(sums)) = (maxima[half..].first_chunk::<HALF>(), sums[half..].first_chunk_mut::<HALF>()) else { return };
        for row in products.iter_mut().filter_map(|row| row[half..].first_chunk_mut::<HALF>()) {
            for lane in 0..HALF {
                row[lane] = exp_below(row[lane] - maxima[lane]);
                sums[lane] += row[lane];
            }
        }
    }
}

simd! {
    /// Updates the maximum of each lane.
    pub(super) fn largest(rows: &[Lanes], maxima: &mut Lanes) {
        let mut found = *maxima;
        for row in rows {
            for lane in 0..PANEL {
                found[lane] = if row[lane] > found[lane] { row[lane] } else { found[lane] };
            }
        }
        *maxima = found;
    }
}

simd! {
    /// Replaces the products by `exp(x - max)` and returns the sums.
    pub(super) fn exponents_of(products: &mut [Lanes], maxima: &Lanes) -> Lanes {
        let mut sums = [0f32; PANEL];
        exponents_below(products, maxima, &mut sums);
        sums
    }
}

simd! {
    fn add_scaled(sums: &mut [Lanes], tile: &[Lanes], factors: &Lanes) {
        for (sums, tile) in sums.iter_mut().zip(tile) {
            for lane in 0..PANEL {
                sums[lane] = sums[lane] * factors[lane] + tile[lane];
            }
        }
    }
}

/// Transposes `[batch, heads, sequence, width]` to `[batch, sequence, heads · width]`.
pub fn merge_heads(heads: Heads, [count, sequence, width]: [usize; 3], output: &mut [f32]) {
    let size = (count * width).max(1);
    output.par_chunks_mut(size).with_min_len(ELEMENTS.div_ceil(size)).enumerate().for_each(|(index, out)| {
        let (batch, row) = (index / sequence, index % sequence);
        for (head, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
            out.copy_from_slice(&heads.head(batch, head)[row * heads.strides[2]..][..width]);
        }
    });
}

/// Applies rotary position embedding to the first elements of every head, with angles `[sequence,
/// elements / 2]`. The result is contiguous.
pub fn rotate_heads(heads: Heads, [count, sequence, width]: [usize; 3], cosines: &[f32], sines: &[f32], output: &mut [f32]) {
    let half = cosines.len() / sequence.max(1);
    let size = (sequence * width).max(1);
    output.par_chunks_mut(size).with_min_len(ELEMENTS.div_ceil(size)).enumerate().for_each(|(index, output)| {
        let head = heads.head(index / count, index % count);
        for (row, out) in output.chunks_exact_mut(width.max(1)).enumerate() {
            let ((rotated, rest), (out, out_rest)) = (head[row * heads.strides[2]..][..width].split_at(2 * half), out.split_at_mut(2 * half));
            let angles = row * half..(row + 1) * half;
            rotate(rotated, out, &cosines[angles.clone()], &sines[angles]);
            out_rest.copy_from_slice(rest);
        }
    });
}

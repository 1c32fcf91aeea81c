//! Attention of one head after the other: products of queries and keys are made for a few at a time, and used at once.
//!
//! Queries are the columns of a panel, keys its rows, so that maxima and sums over keys are those of whole rows of lanes.
//! Products that were exponentiated with one maximum are corrected when a larger one comes (Milakov and Gimelshein, *Online
//! Normalizer Calculation for Softmax*, 2018; Dao et al., *FlashAttention*, 2022).

use std::ops::Range;

use rayon::prelude::*;

use super::activation::{exp_below, tanh};
use super::matmul::{Columns, Left, Right};
use super::rows::rotate;
use super::scratch::Scratch;
use super::tile::{self, BLOCK, PANEL, Panel};

/// Something of each query of a panel.
pub(super) type Lanes = [f32; PANEL];

const HALF: usize = PANEL / 2;
/// Panels of queries that pass by the same keys.
const GROUP: usize = 4;
/// Keys whose products with a panel are held at a time.
const KEYS: usize = 22 * BLOCK;

/// Elements of `[batch, heads, rows, width]`, the last axis contiguous.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Steps along batch, heads and rows.
    pub strides: [usize; 3],
}

impl<'a> Heads<'a> {
    pub(super) fn head(&self, batch: usize, head: usize) -> &'a [f32] {
        &self.values[batch * self.strides[0] + head * self.strides[1]..]
    }
}

/// What is added to products `[batch, heads, queries, keys]`.
#[derive(Clone, Copy)]
pub struct Bias<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Steps along the axes: none where one number holds for all, one along keys otherwise.
    pub strides: [usize; 4],
}

/// Sizes, and which keys a query sees.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub groups: usize,
    /// Queries; where order counts, those of the last keys.
    pub sequence: usize,
    /// Keys.
    pub keys: usize,
    /// Width of queries and keys.
    pub width: usize,
    /// Width of values.
    pub out: usize,
    /// Factor on the products.
    pub scale: f32,
    /// Whether a query sees only keys at its own position and before.
    pub causal: bool,
    /// A query sees keys alone that are fewer places than this away.
    pub window: Option<usize>,
    /// What products come near to and never pass: `cap · tanh(product / cap)` takes their place.
    pub soft_cap: Option<f32>,
    /// For `[batch, keys]`, whether a key is padding.
    pub padding: Option<&'a [bool]>,
    /// What is added to the products; gradients know nothing of it.
    pub bias: Option<Bias<'a>>,
    /// Whether queries to which a bias of minus infinity leaves no key get zeros, and not what is no number.
    pub zero_where_hidden: bool,
}

impl Attention<'_> {
    /// Writes `[batch, heads, sequence, out]`, contiguous.
    pub fn run(&self, queries: Heads, keys: Heads, values: Heads, output: &mut [f32]) {
        if self.is_single() {
            return self.run_single(queries, keys, values, output);
        }
        output.par_chunks_mut((self.sequence * self.out).max(1)).enumerate().for_each(|(job, output)| {
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
                let start = panels.iter().map(|panel| panel.seen.start).min().unwrap_or(0);
                let end = panels.iter().map(|panel| panel.seen.end).max().unwrap_or(0);
                for start in (start..end).step_by(KEYS) {
                    for panel in &mut panels {
                        panel.look(self, start, (&keys, &values), padding, &mut products);
                    }
                }
                panels.iter().zip(output.chunks_mut(PANEL * self.out)).for_each(|(panel, output)| panel.finish(self, output));
            }
        });
    }

    /// How many keys stand before the one of the first query.
    fn past(&self) -> usize {
        if self.causal { self.keys.saturating_sub(self.sequence) } else { 0 }
    }

    /// Keys that a query sees as far as order goes.
    pub(super) fn visible(&self, query: usize) -> Range<usize> {
        let place = self.past() + query;
        let ahead = if self.causal { 1 } else { self.window.unwrap_or(self.keys) };
        let start = self.window.map_or(0, |window| (place + 1).saturating_sub(window));
        start.min(self.keys)..place.saturating_add(ahead).min(self.keys)
    }

    /// Keys that are computed for some queries, from the beginning of a block on. A query that sees nothing but padding looks at all
    /// keys alike.
    pub(super) fn seen(&self, first: usize, count: usize, padding: Option<&[bool]>) -> Range<usize> {
        let (of_first, of_last) = (self.visible(first), self.visible(first + count.max(1) - 1));
        let order = of_first.start / BLOCK * BLOCK..of_last.end;
        let Some(padding) = padding else { return order };
        // What all of them see.
        let together = padding.get(of_last.start..of_first.end).is_some_and(|keys| keys.contains(&false));
        match padding.iter().rposition(|padding| !padding) {
            Some(to) if together => order.start..order.end.min(to + 1),
            _ => 0..self.keys,
        }
    }

    /// A panel of rows of a head, scaled; columns beyond the last row are zeros.
    pub(super) fn panel(&self, rows: &[f32], [count, width, stride]: [usize; 3], scale: f32) -> Scratch {
        let mut panel = Scratch::new(width * PANEL);
        if count < PANEL {
            panel.fill(0.0);
        }
        Columns { values: rows, count, stride }.pack(0, &mut panel);
        panel.iter_mut().for_each(|x| *x *= scale);
        panel
    }

    /// Products of some keys, the first of which begins a block, with a panel of queries: hidden ones are the smallest number.
    pub(super) fn products(&self, keys: &Left, seen: Range<usize>, (panel, first): (&[f32], usize), padding: Option<&[bool]>, products: &mut [Lanes]) {
        multiply(keys, seen.start / BLOCK, panel, products);
        if let Some(cap) = self.soft_cap {
            soft_capped(products, cap);
        }
        self.hide(seen, first, padding, products);
    }

    /// Puts the smallest number in the place of products that a query may not look at.
    fn hide(&self, seen: Range<usize>, first: usize, padding: Option<&[bool]>, products: &mut [Lanes]) {
        let first = self.past() + first;
        let ahead = if self.causal { 1 } else { self.window.unwrap_or(usize::MAX) };
        for (key, products) in seen.zip(products) {
            if padding.is_some_and(|padding| padding[key]) {
                *products = [f32::MIN; PANEL];
            } else if self.causal || self.window.is_some() {
                products[..(key + 1).saturating_sub(ahead).saturating_sub(first).min(PANEL)].fill(f32::MIN);
                let behind = self.window.map_or(PANEL, |window| (key + window).saturating_sub(first).min(PANEL));
                products[behind..].fill(f32::MIN);
            }
        }
    }

    /// Adds the bias of a head to products with a panel of queries.
    fn add_bias(&self, (batch, head): (usize, usize), seen: Range<usize>, first: usize, products: &mut [Lanes]) {
        let Some(Bias { values, strides: [of_batch, of_head, of_query, of_key] }) = self.bias else { return };
        let of_head = &values[batch * of_batch + head * of_head..];
        for (lane, query) in (first..self.sequence).take(PANEL).enumerate() {
            let row = &of_head[query * of_query..];
            products.iter_mut().zip(seen.clone()).for_each(|(product, key)| product[lane] += row[key * of_key]);
        }
    }
}

/// Consecutive blocks of a left matrix times a panel, row by row.
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

/// A panel of queries, and what they have seen so far.
struct Queries {
    place: (usize, usize),
    first: usize,
    seen: Range<usize>,
    panel: Scratch,
    /// The largest product.
    most: Lanes,
    /// The sum of exponents.
    total: Lanes,
    /// Sums of values, one row for each column of the output.
    sums: Vec<Lanes>,
}

impl Queries {
    fn new(shape: &Attention, first: usize, count: usize, queries: Heads, (batch, head): (usize, usize), padding: Option<&[bool]>) -> Queries {
        let rows = queries.head(batch, head).get(first * queries.strides[2]..).unwrap_or_default();
        Queries {
            place: (batch, head),
            first,
            seen: shape.seen(first, count, padding),
            panel: shape.panel(rows, [count, shape.width, queries.strides[2]], shape.scale),
            most: [f32::MIN; PANEL],
            total: [0.0; PANEL],
            sums: vec![[0.0; PANEL]; shape.out],
        }
    }

    /// Looks at the keys from one on.
    fn look(&mut self, shape: &Attention, start: usize, (keys, values): (&Left, &Left), padding: Option<&[bool]>, products: &mut [f32]) {
        let seen = start.max(self.seen.start)..(start + KEYS).min(self.seen.end);
        if seen.is_empty() {
            return;
        }
        let products = &mut products.as_chunks_mut().0[..seen.len()];
        shape.products(keys, seen.clone(), (&self.panel, self.first), padding, products);
        if shape.bias.is_some() {
            shape.add_bias(self.place, seen.clone(), self.first, products);
            shape.hide(seen.clone(), self.first, padding, products);
        }
        let factors = exponents(products, &mut self.most, &mut self.total);
        let mut tile = [[0f32; PANEL]; BLOCK];
        for (index, sums) in self.sums.chunks_mut(BLOCK).enumerate() {
            let values = &values.block(index)[seen.start * BLOCK..seen.end * BLOCK];
            tile::multiply(values, Panel::Packed(products.as_flattened()), [sums.len(), PANEL], &mut tile);
            add_scaled(sums, &tile, &factors);
        }
    }

    /// Writes rows of the output.
    fn finish(&self, shape: &Attention, output: &mut [f32]) {
        let factors = self.total.map(|total| if shape.zero_where_hidden && total == 0.0 { 0.0 } else { 1.0 / total });
        for ((lane, row), factor) in output.chunks_exact_mut(self.sums.len().max(1)).enumerate().zip(factors) {
            row.iter_mut().zip(&self.sums).for_each(|(out, sums)| *out = sums[lane] * factor);
        }
    }
}

simd! {
    fn soft_capped(products: &mut [Lanes], cap: f32) {
        for row in products {
            for lane in row.iter_mut() {
                *lane = cap * tanh(*lane / cap);
            }
        }
    }
}

simd! {
    /// Puts `exp(x - most)` in the place of products; sums so far are to be multiplied by the result, for `most` may have grown.
    fn exponents(products: &mut [Lanes], most: &mut Lanes, total: &mut Lanes) -> Lanes {
        let before = *most;
        largest(products, most);
        let mut sums = [0f32; PANEL];
        exponents_below(products, most, &mut sums);
        let mut factors = [0f32; PANEL];
        for lane in 0..PANEL {
            factors[lane] = exp_below(before[lane] - most[lane]);
            total[lane] = total[lane] * factors[lane] + sums[lane];
        }
        factors
    }
}

#[inline(always)]
fn exponents_below(products: &mut [Lanes], most: &Lanes, sums: &mut Lanes) {
    // Half of the lanes at a time: more sums and constants than that do not fit into registers.
    for half in [0, HALF] {
        let (Some(most), Some(sums)) = (most[half..].first_chunk::<HALF>(), sums[half..].first_chunk_mut::<HALF>()) else { return };
        for row in products.iter_mut().filter_map(|row| row[half..].first_chunk_mut::<HALF>()) {
            for lane in 0..HALF {
                row[lane] = exp_below(row[lane] - most[lane]);
                sums[lane] += row[lane];
            }
        }
    }
}

simd! {
    /// The largest number of each lane, and what it was before.
    pub(super) fn largest(rows: &[Lanes], most: &mut Lanes) {
        let mut found = *most;
        for row in rows {
            for lane in 0..PANEL {
                found[lane] = if row[lane] > found[lane] { row[lane] } else { found[lane] };
            }
        }
        *most = found;
    }
}

simd! {
    /// Puts `exp(x - most)` in the place of products; gives the sums.
    pub(super) fn exponents_of(products: &mut [Lanes], most: &Lanes) -> Lanes {
        let mut sums = [0f32; PANEL];
        exponents_below(products, most, &mut sums);
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

/// `[batch, heads, sequence, width]` to `[batch, sequence, heads · width]`.
pub fn merge_heads(heads: Heads, [count, sequence, width]: [usize; 3], output: &mut [f32]) {
    output.par_chunks_mut((count * width).max(1)).with_min_len(16).enumerate().for_each(|(index, out)| {
        let (batch, row) = (index / sequence, index % sequence);
        for (head, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
            out.copy_from_slice(&heads.head(batch, head)[row * heads.strides[2]..][..width]);
        }
    });
}

/// Turns the first elements of every head by the angles of its row, given as `[sequence, elements / 2]`; the result is contiguous.
pub fn rotate_heads(heads: Heads, [count, sequence, width]: [usize; 3], cosines: &[f32], sines: &[f32], output: &mut [f32]) {
    let half = cosines.len() / sequence.max(1);
    output.par_chunks_mut((sequence * width).max(1)).enumerate().for_each(|(index, output)| {
        let head = heads.head(index / count, index % count);
        for (row, out) in output.chunks_exact_mut(width.max(1)).enumerate() {
            let ((given, rest), (out, out_rest)) = (head[row * heads.strides[2]..][..width].split_at(2 * half), out.split_at_mut(2 * half));
            let angles = row * half..(row + 1) * half;
            rotate(given, out, &cosines[angles.clone()], &sines[angles]);
            out_rest.copy_from_slice(rest);
        }
    });
}

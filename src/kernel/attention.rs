//! Attention of one head after the other, without storing all products.

use std::ops::Range;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::matmul::{Columns, Left, Right, Rows, multiply};
use super::rows::{rotate, softmax_row};
use super::scratch::Scratch;
use super::tile::{BLOCK, PANEL};

/// Queries of one head that are worked on at a time.
pub(super) const QUERIES: usize = 8 * BLOCK;

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

/// Sizes, and which keys a query sees.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub groups: usize,
    /// Queries.
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
    /// How many keys a query sees at most, when causal.
    pub window: Option<usize>,
    /// For `[batch, keys]`, whether a key is padding.
    pub padding: Option<&'a [bool]>,
}

impl Attention<'_> {
    /// Writes `[batch, heads, sequence, out]`, contiguous.
    pub fn run(&self, queries: Heads, keys: Heads, values: Heads, output: &mut [f32]) {
        output.par_chunks_mut((self.sequence * self.out).max(1)).enumerate().for_each(|(job, output)| {
            let (batch, head) = (job / self.heads, job % self.heads);
            let group = head / (self.heads / self.groups);
            let padding = self.padding.map(|p| &p[batch * self.keys..][..self.keys]);
            let columns = Columns { values: keys.head(batch, group), count: self.keys, stride: keys.strides[2] };
            let rows = Rows { values: values.head(batch, group), count: self.out, stride: values.strides[2] };
            let (packed_keys, packed_values) = (pack(&columns, self.keys, self.width), pack(&rows, self.out, self.keys));
            for (index, output) in output.chunks_mut(QUERIES * self.out).enumerate() {
                let block = queries.head(batch, head).get(index * QUERIES * queries.strides[2]..).unwrap_or_default();
                let left = Left::pack(block, output.len() / self.out, self.width, queries.strides[2]);
                self.block(index * QUERIES, &left, &packed_keys, &packed_values, padding, output);
            }
        });
    }

    /// Keys that a query sees as far as order goes.
    pub(super) fn visible(&self, query: usize) -> Range<usize> {
        if !self.causal {
            return 0..self.keys;
        }
        let end = (query + 1).min(self.keys);
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// Keys that are computed for a block of queries, from the beginning of a panel on: of those that none of them sees nothing
    /// is; a query that sees only padding looks everywhere.
    pub(super) fn seen(&self, first: usize, count: usize, padding: Option<&[bool]>) -> Range<usize> {
        match padding {
            Some(_) => 0..self.keys,
            None => self.visible(first).start / PANEL * PANEL..self.visible(first + count - 1).end,
        }
    }

    /// How strongly each of a block of queries looks at the keys that are seen.
    pub(super) fn probabilities(&self, first: usize, left: &Left, count: usize, keys: &[f32], seen: &Range<usize>, padding: Option<&[bool]>) -> Scratch {
        let panels = &keys[seen.start * self.width..seen.end.next_multiple_of(PANEL) * self.width];
        let span = seen.len();
        let mut scores = Scratch::new(count * span);
        multiply(left, 0..count.div_ceil(BLOCK), panels, 0, Epilogue::NONE, &mut scores, span, span);
        for (row, scores) in scores.chunks_exact_mut(span).enumerate() {
            let visible = self.visible(first + row);
            let visible = visible.start - seen.start..visible.end - seen.start;
            softmax_row(scores, self.scale, visible, padding);
        }
        scores
    }

    fn block(&self, first: usize, left: &Left, keys: &[f32], values: &[f32], padding: Option<&[bool]>, output: &mut [f32]) {
        let count = output.len() / self.out;
        let blocks = 0..count.div_ceil(BLOCK);
        let seen = self.seen(first, count, padding);
        let span = seen.len();
        let scores = self.probabilities(first, left, count, keys, &seen, padding);
        let weights = Left::pack(&scores, count, span, span);
        for (index, panel) in values.chunks_exact(PANEL * self.keys).enumerate() {
            let panel = &panel[seen.start * PANEL..seen.end * PANEL];
            multiply(&weights, blocks.clone(), panel, index * PANEL, Epilogue::NONE, output, self.out, self.out);
        }
    }
}

/// All panels of a small matrix.
pub(super) fn pack(right: &impl Right, columns: usize, inner: usize) -> Scratch {
    let mut packed = Scratch::new(columns.next_multiple_of(PANEL) * inner);
    for (index, panel) in packed.chunks_exact_mut((PANEL * inner).max(1)).enumerate() {
        right.pack(index * PANEL, panel);
    }
    packed
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

/// Turns every head by the angles of its row, given as `[sequence, width / 2]`; the result is contiguous.
pub fn rotate_heads(heads: Heads, [count, sequence, width]: [usize; 3], cosines: &[f32], sines: &[f32], output: &mut [f32]) {
    output.par_chunks_mut((sequence * width).max(1)).enumerate().for_each(|(index, output)| {
        let head = heads.head(index / count, index % count);
        for (row, out) in output.chunks_exact_mut(width.max(2)).enumerate() {
            let angles = row * width / 2..(row + 1) * width / 2;
            rotate(&head[row * heads.strides[2]..][..width], out, &cosines[angles.clone()], &sines[angles]);
        }
    });
}

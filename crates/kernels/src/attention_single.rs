//! Attention of a single query, as in incremental decoding. Keys and values are read once, without
//! packing. Sums have a fixed number of lanes without fused multiply-add, so results are equal on every
//! processor.

use rayon::prelude::*;

use super::activation::tanh;
use super::attention::{Attention, Heads};
use super::rows;
use super::scratch::Scratch;

const LANES: usize = 16;
/// Number of multiplications below which multithreading is not worthwhile.
const SMALL: usize = 1 << 15;

/// The keys or values of one head: elements, row stride and row width.
type HeadRows<'a> = (&'a [f32], usize, usize);

impl Attention<'_> {
    /// Whether there is a single query, without padding and bias.
    pub(super) fn is_single(&self) -> bool {
        self.sequence == 1 && self.padding.is_none() && self.bias.is_none()
    }

    /// [`run`](Attention::run) for a single query.
    pub(super) fn run_single(&self, queries: Heads, keys: Heads, values: Heads, output: &mut [f32]) {
        let job = |(job, output): (usize, &mut [f32])| {
            let (batch, head) = (job / self.heads, job % self.heads);
            let group = head / (self.heads / self.groups);
            let range = self.visible(0);
            let mut products = Scratch::new(range.len());
            let query = &queries.head(batch, head)[..self.width];
            let from = |rows: Heads<'_>| range.start * rows.strides[2];
            multiply(query, (&keys.head(batch, group)[from(keys)..], keys.strides[2], self.width), self.scale, &mut products);
            if let Some(cap) = self.soft_cap {
                soft_cap(&mut products, cap);
            }
            rows::softmax(&mut products, range.len());
            output.fill(0.0);
            add_rows(&products, (&values.head(batch, group)[from(values)..], values.strides[2], self.out), output);
        };
        let heads = output.len() / self.out.max(1);
        if heads * self.visible(0).len() * (self.width + self.out) < SMALL {
            output.chunks_mut(self.out.max(1)).enumerate().for_each(job);
        } else {
            output.par_chunks_mut(self.out.max(1)).enumerate().for_each(job);
        }
    }
}

simd! {
    /// Products of a query with rows.
    fn multiply(query: &[f32], keys: HeadRows, scale: f32, products: &mut [f32]) {
        let (values, stride, width) = keys;
        for (row, product) in products.iter_mut().enumerate() {
            *product = scale * dot(query, &values[row * stride..][..width]);
        }
    }
}

#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a * b;
    }
    lanes.iter().sum()
}

simd! {
    fn soft_cap(products: &mut [f32], cap: f32) {
        for product in products {
            *product = cap * tanh(*product / cap);
        }
    }
}

simd! {
    /// Adds the weighted rows.
    fn add_rows(weights: &[f32], rows: HeadRows, output: &mut [f32]) {
        let (values, stride, width) = rows;
        for (row, weight) in weights.iter().enumerate() {
            for (out, value) in output.iter_mut().zip(&values[row * stride..][..width]) {
                *out += weight * value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32], heads: usize, rows: usize, width: usize) -> Heads<'_> {
        Heads { values, strides: [heads * rows * width, rows * width, width] }
    }

    /// A single query equals the last one of many queries.
    #[test]
    fn one_query_is_the_last_of_many() {
        let numbers = |count: usize, seed: usize| (0..count).map(|i| (((i + seed) * 7919 % 4093) as f32 - 2046.0) / 1021.0).collect::<Vec<f32>>();
        let (batch, heads, groups, keys) = (2, 4, 2, 300);
        for (width, out, window, soft_cap) in [(64, 64, None, None), (20, 37, Some(19), None), (16, 8, None, Some(1.5))] {
            let (q, k, v) = (numbers(batch * heads * keys * width, 1), numbers(batch * groups * keys * width, 2), numbers(batch * groups * keys * out, 3));
            let shape = |sequence| Attention {
                heads,
                groups,
                sequence,
                keys,
                width,
                out,
                scale: 0.2,
                causal: true,
                window,
                soft_cap,
                padding: None,
                bias: None,
                zero_where_hidden: false,
            };
            let mut all = vec![0.0; batch * heads * keys * out];
            shape(keys).run(of(&q, heads, keys, width), of(&k, groups, keys, width), of(&v, groups, keys, out), &mut all);
            // Several last queries use the general code path.
            for count in [1, 3] {
                let last: Vec<f32> = q.chunks(keys * width).flat_map(|head| &head[(keys - count) * width..]).copied().collect();
                let mut some = vec![0.0; batch * heads * count * out];
                shape(count).run(of(&last, heads, count, width), of(&k, groups, keys, width), of(&v, groups, keys, out), &mut some);
                let wanted = all.chunks(keys * out).flat_map(|head| &head[(keys - count) * out..]);
                assert!(some.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-5), "{width} {out} {window:?} {count}");
            }
        }
    }
}

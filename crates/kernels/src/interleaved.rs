//! A few rows in the order in which products with stored weights read them.

use super::scratch::Scratch;
use crate::simd::{self, Level};

/// Number of independent sums along the inner dimension.
pub(super) const LANES: usize = 32;
/// Maximum number of rows. With more, other loops are faster.
pub const MAX_ROWS: usize = 8;
/// Distance in bytes between the elements that are read and those fetched at the same time.
pub(super) const PREFETCHED: usize = 4096;

/// Evaluates an expression with a number of rows as a constant, which the compiler must know: from 1 to
/// [`MAX_ROWS`].
macro_rules! by_number {
    ($number:expr, $constant:ident => $call:expr) => {
        by_number!($number, $constant => $call, 1 2 3 4 5 6 7 8)
    };
    ($number:expr, $constant:ident => $call:expr, $($value:literal)+) => {
        match $number {
            $($value => {
                const $constant: usize = $value;
                $call
            })+
            _ => {}
        }
    };
}

pub(super) use by_number;

/// A few rows in runs of `LANES` elements: those of all rows of a group, then the next run. Missing
/// elements are zeros.
pub struct Interleaved {
    pub(super) rows: usize,
    pub(super) inner: usize,
    pub(super) values: Scratch,
}

impl Interleaved {
    /// Rows `x` `[rows, inner]`.
    pub(super) fn new(x: &[f32], rows: usize) -> Interleaved {
        let inner = x.len() / rows;
        let mut values = Scratch::new(rows * inner.next_multiple_of(LANES));
        let groups = x.chunks((most_rows() * inner).max(1)).zip(values.chunks_mut((most_rows() * inner.next_multiple_of(LANES)).max(1)));
        for (x, values) in groups {
            let count = x.len() / inner;
            for (row, x) in x.chunks_exact(inner).enumerate() {
                values.as_chunks_mut::<LANES>().0[row..].iter_mut().step_by(count).zip(x.chunks(LANES)).for_each(|(run, x)| *run = padded(x));
            }
        }
        Interleaved { rows, inner, values }
    }

    /// Calls a function with each group, the number of its rows, and its part of a result `[rows, columns]`.
    pub(super) fn by_groups(&self, out: &mut [f32], mut multiply: impl FnMut(&[f32], usize, &mut [f32])) {
        let (width, columns) = (self.inner.next_multiple_of(LANES), out.len() / self.rows);
        for (x, out) in self.values.chunks((most_rows() * width).max(1)).zip(out.chunks_mut((most_rows() * columns).max(1))) {
            multiply(x, x.len() / width, out);
        }
    }

    /// The first row, if it is the only one.
    pub(super) fn only(&self) -> Option<&[f32]> {
        (self.rows == 1).then(|| &self.values[..self.inner])
    }
}

/// Number of rows whose sums fit into registers.
fn most_rows() -> usize {
    if simd::level() >= Level::Avx512 { MAX_ROWS } else { 2 }
}

/// The elements after the last whole run, with zeros.
#[inline(always)]
pub(super) fn padded<T: Copy + Default, const N: usize>(rest: &[T]) -> [T; N] {
    let mut lanes = [T::default(); N];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

#[inline(always)]
pub(super) fn total(lanes: &[f32; LANES]) -> f32 {
    let lanes: [f32; 16] = halve(lanes);
    let lanes: [f32; 8] = halve(&lanes);
    let lanes: [f32; 4] = halve(&lanes);
    let [a, b, c, d] = lanes;
    (a + c) + (b + d)
}

/// Adds the second half of the lanes to the first.
#[inline(always)]
fn halve<const N: usize>(lanes: &[f32]) -> [f32; N] {
    std::array::from_fn(|lane| lanes[lane] + lanes[lane + N])
}

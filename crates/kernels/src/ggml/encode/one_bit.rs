//! IQ1_S and IQ1_M: points of a grid of −1, 0 and 1, shifted up or down by an eighth, in parts of 32 or 16
//! values with a scale (`quantize_row_iq1_*_impl`).

use std::cmp::Ordering;
use std::sync::LazyLock;

use half::f16;

use super::super::grids;
use super::super::search::nearest;
use super::grid::{Search, squares as plain, weights_of};
use super::{power, put};

/// Levels that are shifted up, and down.
const SHIFTED: [[f32; 3]; 2] = [[-0.875, 0.125, 1.125], [-1.125, -0.125, 0.875]];

static SEARCH: LazyLock<Search<8>> = LazyLock::new(|| Search::new(&grids::IQ1, 3));

/// A part of a block.
#[derive(Clone, Copy, Default)]
struct Part {
    scale: f32,
    indices: [u16; 4],
    /// Whether each group of eight values is shifted down.
    is_down: [bool; 4],
}

/// The best division of sorted values in three runs of the codes 0, 1 and 2.
struct Division {
    scale: f32,
    score: f32,
    /// Ends of the first two runs.
    ends: Option<[usize; 2]>,
    /// Number of the combination of shifts.
    shifts: usize,
}

impl Division {
    fn new(scale: f32) -> Division {
        Division { scale, score: f32::MIN, ends: None, shifts: 0 }
    }

    /// Replaces the division by one with these weighted sums, if its error is lower.
    #[inline(always)]
    fn offer(&mut self, products: f32, squares: f32, ends: [usize; 2], shifts: usize) {
        if squares > 0.0 && products * products > self.score * squares {
            let scale = products / squares;
            *self = Division { scale, score: scale * products, ends: Some(ends), shifts };
        }
    }
}

/// Indices of the values in ascending order.
fn order<const SIZE: usize>(values: &[f32; SIZE]) -> [usize; SIZE] {
    let mut order: [usize; SIZE] = std::array::from_fn(|i| i);
    order.sort_by(|a, b| values[*a].partial_cmp(&values[*b]).unwrap_or(Ordering::Equal));
    order
}

/// The part with the codes of a division. `is_down`: whether each group is shifted down for the number of a
/// combination of shifts; the last number has the opposite shifts of number 0.
#[inline(always)]
fn assign<const SIZE: usize>(
    division: &Division,
    order: &[usize; SIZE],
    (values, weights): (&[f32; SIZE], &[f32; SIZE]),
    last: usize,
    is_down: impl Fn(usize, usize) -> bool,
) -> Part {
    let Some([first, second]) = division.ends else { return Part::default() };
    let mut codes = [0u8; SIZE];
    for (position, index) in order.iter().enumerate() {
        codes[*index] = u8::from(position >= first) + u8::from(position >= second);
    }
    let (mut scale, mut shifts) = (division.scale, division.shifts);
    if scale < 0.0 {
        codes = codes.map(|code| 2 - code);
        (scale, shifts) = (-scale, last - shifts);
    }
    let mut part = Part { scale, ..Part::default() };
    let groups = || values.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0).enumerate();
    let mut is_on_grid = true;
    for (group, (values, weights)) in groups() {
        part.is_down[group] = is_down(shifts, group);
        let offset = SHIFTED[usize::from(part.is_down[group])][0];
        let (index, is_point) = SEARCH.closest(&codes.as_chunks::<8>().0[group], (values, weights), scale, (1.0, offset));
        part.indices[group] = index;
        is_on_grid &= is_point;
    }
    if !is_on_grid {
        let (mut products, mut squares) = (0f32, 0f32);
        for (group, (values, weights)) in groups() {
            add(&part, group, 1.0, (values, weights), (&mut products, &mut squares));
        }
        if products > 0.0 && squares > 0.0 {
            part.scale = products / squares;
        }
    }
    part
}

/// Adds the weighted sums of a group of eight values, whose levels are multiplied with `factor`.
#[inline(always)]
fn add(part: &Part, group: usize, factor: f32, (values, weights): (&[f32; 8], &[f32; 8]), (products, squares): (&mut f32, &mut f32)) {
    let levels = &SHIFTED[usize::from(part.is_down[group])];
    let point = &grids::IQ1.points()[usize::from(part.indices[group])];
    for ((code, value), weight) in point.iter().zip(values).zip(weights) {
        let level = levels[usize::from(*code)] * factor;
        *products += weight * level * value;
        *squares += weight * level * level;
    }
}

fn largest<const SIZE: usize>(values: &[f32; SIZE]) -> f32 {
    values.iter().fold(0f32, |most, value| if value.abs() > most { value.abs() } else { most })
}

/// Prefix sums of the weighted values and of the weights, in the order of the values, of the indices that
/// `is_counted` selects.
#[inline(always)]
fn prefix_sums<const SIZE: usize>(order: &[usize; SIZE], values: &[f32; SIZE], weights: &[f32; SIZE], is_counted: impl Fn(usize) -> bool) -> [[f32; 33]; 2] {
    let mut sums = [[0f32; 33]; 2];
    for (position, index) in order.iter().enumerate() {
        let terms = if is_counted(*index) { [weights[*index] * values[*index], weights[*index]] } else { [0.0; 2] };
        for (sums, term) in sums.iter_mut().zip(terms) {
            sums[position + 1] = sums[position] + term;
        }
    }
    sums
}

/// The best division of 32 values that have the same shift.
#[inline(always)]
fn fit_32(values: &[f32; 32], weights: &[f32; 32]) -> Part {
    let largest = largest(values);
    if largest < 1e-12 {
        return Part::default();
    }
    let order = order(values);
    let [products, squares] = prefix_sums(&order, values, weights, |_| true);
    let mut best = Division::new(largest);
    for first in 0..=32 {
        for second in first..=32 {
            let runs = |sums: &[f32; 33]| [sums[first] - sums[0], sums[second] - sums[first], sums[32] - sums[second]];
            let (products, squares) = (runs(&products), runs(&squares));
            for (shifts, [low, middle, high]) in SHIFTED.into_iter().enumerate() {
                let product = products[0] * low + products[1] * middle + products[2] * high;
                let square = squares[0] * low * low + squares[1] * middle * middle + squares[2] * high * high;
                best.offer(product, square, [first, second], shifts);
            }
        }
    }
    assign(&best, &order, (values, weights), 1, |shifts, _| shifts == 1)
}

/// The best division of 16 values, whose halves have separate shifts.
#[inline(always)]
fn fit_16(values: &[f32; 16], weights: &[f32; 16]) -> Part {
    let largest = largest(values);
    if largest < 1e-7 {
        return Part::default();
    }
    let order = order(values);
    let halves = [0, 1].map(|half| prefix_sums(&order, values, weights, |index| index / 8 == half));
    let mut best = Division::new(largest);
    for first in 0..=16 {
        for second in first..=16 {
            // Sums of each half with each shift. Levels differ by one, so that differences of sums suffice.
            let sums = halves.each_ref().map(|[products, squares]| {
                let differences = products[first] + products[second];
                SHIFTED.map(|[low, middle, high]| {
                    let product = products[16] * high - differences;
                    let lower = squares[first] * (low * low - middle * middle);
                    (product, squares[16] * high * high + lower + squares[second] * (middle * middle - high * high))
                })
            });
            for shifts in 0..4 {
                let ((one, one_square), (other, other_square)) = (sums[0][shifts / 2], sums[1][shifts % 2]);
                best.offer(one + other, one_square + other_square, [first, second], shifts);
            }
        }
    }
    assign(&best, &order, (values, weights), 3, |shifts, group| shifts >> (1 - group) & 1 == 1)
}

/// The 3-bit scale of a part.
fn scale_code(inverse: f32, scale: f32) -> u8 {
    nearest(0.5 * (inverse * scale - 1.0)).clamp(0, 7) as u8
}

fn largest_scale(parts: &[Part]) -> f32 {
    parts.iter().fold(0f32, |most, part| if part.scale > most { part.scale } else { most })
}

simd! {
    pub(in crate::ggml) fn iq1_s(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<50>().0).enumerate() {
            block.fill(0);
            let (power, importance) = (2.0 * power(values), importance.as_chunks::<256>().0.get(index));
            let mut parts = [Part::default(); 8];
            for (at, (values, part)) in values.as_chunks::<32>().0.iter().zip(&mut parts).enumerate() {
                *part = fit_32(values, &weights_of(values, importance, at, power, plain));
            }
            let step = largest_scale(&parts) / 15.0;
            put(step * 1.125, block, 0);
            let inverse = 1.0 / step;
            for (at, part) in parts.iter().enumerate() {
                let mut high = 0;
                for (k, index) in part.indices.into_iter().enumerate() {
                    block[2 + 4 * at + k] = index as u8;
                    high |= (index >> 8) << (3 * k);
                }
                if step > 0.0 {
                    high |= u16::from(scale_code(inverse, part.scale) | u8::from(part.is_down[0]) << 3) << 12;
                }
                block[34 + 2 * at..][..2].copy_from_slice(&high.to_le_bytes());
            }
        }
    }
}

simd! {
    pub(in crate::ggml) fn iq1_m(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<56>().0).enumerate() {
            block.fill(0);
            let (power, importance) = (2.0 * power(values), importance.as_chunks::<256>().0.get(index));
            let (mut parts, mut weights) = ([Part::default(); 16], [[0f32; 16]; 16]);
            for (at, (values, part)) in values.as_chunks::<16>().0.iter().zip(&mut parts).enumerate() {
                weights[at] = weights_of(values, importance, at, power, plain);
                *part = fit_16(values, &weights[at]);
                for k in 0..2 {
                    block[2 * at + k] = part.indices[k] as u8;
                    block[32 + at] |= ((part.indices[k] >> 8) as u8) << (4 * k);
                }
            }
            let mut step = largest_scale(&parts) / 15.0;
            if step == 0.0 {
                continue;
            }
            let inverse = 1.0 / step;
            let (mut products, mut squares, mut scales) = (0f32, 0f32, [0u16; 4]);
            for (at, (part, values)) in parts.iter().zip(values.as_chunks::<16>().0).enumerate() {
                let code = scale_code(inverse, part.scale);
                scales[at / 4] |= u16::from(code) << (3 * (at % 4));
                block[32 + at] |= u8::from(part.is_down[0]) << 3 | u8::from(part.is_down[1]) << 7;
                let groups = values.as_chunks::<8>().0.iter().zip(weights[at].as_chunks::<8>().0);
                for (group, of_group) in groups.enumerate() {
                    add(part, group, f32::from(2 * code + 1), of_group, (&mut products, &mut squares));
                }
            }
            if squares > 0.0 {
                step = products / squares;
            }
            let bits = f16::from_f32(step * 1.1125).to_bits();
            for (k, scales) in scales.iter_mut().enumerate() {
                *scales |= (bits >> (4 * k) & 15) << 12;
                block[48 + 2 * k..][..2].copy_from_slice(&scales.to_le_bytes());
            }
        }
    }
}

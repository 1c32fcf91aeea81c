//! The IQ2 and IQ3 types: signs, and magnitudes as indices of grid points, in parts of 16 or 32 values with a
//! scale (`quantize_row_iq2_*_impl` and `quantize_row_iq3_*_impl`).

use std::ops::Range;
use std::sync::LazyLock;

use super::super::grids::{self, Grid};
use super::super::search::{EPSILON, LANES, nearest};
use super::{power, put};

/// Points that are compared in parallel.
struct Candidates<const N: usize> {
    coordinates: [[u8; LANES]; N],
    indices: [u16; LANES],
}

/// A grid with the points that are close to each possible point.
pub(super) struct Search<const N: usize> {
    grid: &'static Grid<N>,
    /// Whether each possible point is a point of the grid, and the range of its candidates, the closest
    /// ones first. The last candidate may be repeated.
    close: Vec<(bool, Range<usize>)>,
    candidates: Vec<Candidates<N>>,
    /// Powers of the base.
    powers: [u32; N],
}

impl<const N: usize> Search<N> {
    /// A search among the points with the `distances` smallest distances.
    pub fn new(grid: &'static Grid<N>, distances: usize) -> Search<N> {
        let points = grid.points();
        let (mut close, mut candidates) = (Vec::with_capacity(grid.size()), Vec::new());
        for number in 0..grid.size() {
            let at = grid.coordinates(number);
            let distance = |point: &[u8; N]| point.iter().zip(&at).map(|(a, b)| u32::from(a.abs_diff(*b)).pow(2)).sum::<u32>();
            let mut all: Vec<(u32, u16)> = points.iter().zip(0..).map(|(point, index)| (distance(point), index)).collect();
            let mut different: Vec<u32> = all.iter().map(|(distance, _)| *distance).collect();
            different.sort_unstable();
            different.dedup();
            let is_point = different[0] == 0;
            let most = if is_point { 0 } else { different[distances.min(different.len()) - 1] };
            all.retain(|(distance, _)| *distance <= most);
            all.sort_unstable();
            let first = candidates.len();
            candidates.extend(all.chunks(LANES).map(|some| {
                let indices: [u16; LANES] = std::array::from_fn(|l| some[l.min(some.len() - 1)].1);
                let coordinates = std::array::from_fn(|i| indices.map(|index| points[usize::from(index)][i]));
                Candidates { coordinates, indices }
            }));
            close.push((is_point, first..candidates.len()));
        }
        let powers = std::array::from_fn(|i| grid.base().pow(i as u32) as u32);
        Search { grid, close, candidates, powers }
    }

    /// The point for values that are multiplied with `inverse`, and whether their codes are the point itself.
    #[inline(always)]
    fn find(&self, values: &[f32; N], roots: &[f32; N], inverse: f32, scale: f32) -> (u16, bool) {
        let mut codes = [0u8; N];
        for (code, value) in codes.iter_mut().zip(values) {
            *code = nearest(0.5 * (inverse * value - 1.0)).clamp(0, self.grid.base() as i32 - 1) as u8;
        }
        self.closest(&codes, (values, roots), scale, ODD)
    }

    /// The point with these codes, or the one with the least weighted error of the points close to them;
    /// and whether the codes are a point of the grid. Levels are coordinates times a factor plus an
    /// offset.
    #[inline(always)]
    pub fn closest(&self, codes: &[u8; N], (values, weights): (&[f32; N], &[f32; N]), scale: f32, (factor, offset): (f32, f32)) -> (u16, bool) {
        // A sum that, unlike Horner's method, has no chain of multiplications.
        let number = codes.iter().zip(&self.powers).map(|(code, power)| u32::from(*code) * power).sum::<u32>();
        let (is_point, range) = &self.close[number as usize];
        let candidates = &self.candidates[range.clone()];
        let (mut best, mut least) = (candidates[0].indices[0], f32::MAX);
        if *is_point {
            return (best, true);
        }
        for Candidates { coordinates, indices } in candidates {
            let mut errors = [0f32; LANES];
            for ((coordinates, value), weight) in coordinates.iter().zip(values).zip(weights) {
                for l in 0..LANES {
                    let difference = scale * (factor * f32::from(coordinates[l]) + offset) - value;
                    errors[l] += weight * difference * difference;
                }
            }
            for (error, index) in errors.iter().zip(indices) {
                if *error < least {
                    (best, least) = (*index, *error);
                }
            }
        }
        (best, false)
    }
}

/// Levels of the IQ2 and IQ3 types: odd numbers.
const ODD: (f32, f32) = (2.0, 1.0);

/// Groups whose points are searched again with the best scale.
#[derive(Clone, Copy, PartialEq)]
enum Repeated {
    /// All groups.
    All,
    /// All groups, if the codes of one are not a point of the grid.
    AllIfAny,
    /// Groups whose codes are not a point of the grid.
    OffGrid,
}

/// The search of a type.
struct Options {
    /// Factor of the mean square that is added to the squares of the values.
    power: f32,
    /// Weights without importance, from this mean square and a value.
    plain: fn(f32, f32) -> f32,
    /// Whether seven signs of eight values are stored, so that the number of negative values is even.
    has_even_signs: bool,
    /// Largest magnitude of parts that are written as zeros.
    smallest: f32,
    /// Whether the first scale is found by least squares instead of from the largest value.
    fits_first: bool,
    /// Number of scales above and below the first one that are tried, and the distance of their levels.
    trials: (i8, f32),
    repeated: Repeated,
    /// Factor of the scale of the block.
    factor: f32,
}

/// A part of a block.
#[derive(Clone, Copy, Default)]
struct Part {
    scale: f32,
    indices: [u16; 8],
    /// Bits of negative values.
    signs: [u8; 4],
}

/// Magnitudes and signs. If their number must be even, the sign of the value with the least weighted square
/// changes.
#[inline(always)]
fn split_signs<const SIZE: usize>(values: &[f32; SIZE], weights: &[f32; SIZE], has_even_signs: bool) -> ([f32; SIZE], [u8; 4]) {
    let (mut magnitudes, mut signs) = (*values, [0u8; 4]);
    for ((eight, weights), signs) in magnitudes.as_chunks_mut::<8>().0.iter_mut().zip(weights.as_chunks::<8>().0).zip(&mut signs) {
        let squares: [f32; 8] = std::array::from_fn(|i| weights[i] * eight[i] * eight[i]);
        for (bit, value) in eight.iter_mut().enumerate() {
            if *value < 0.0 {
                *value = -*value;
                *signs |= 1 << bit;
            }
        }
        if has_even_signs {
            if signs.count_ones() % 2 == 1 {
                let least = (1..8).fold(0, |least, i| if squares[i] < squares[least] { i } else { least });
                eight[least] = -eight[least];
                *signs ^= 1 << least;
            }
            *signs &= 127;
        }
    }
    (magnitudes, signs)
}

/// A scale by weighted least squares for codes up to `highest` (`make_qp_quants`). Codes of negative
/// values wrap around, as in the reference implementation.
#[inline(always)]
fn first_scale<const SIZE: usize>(values: &[f32; SIZE], weights: &[f32; SIZE], largest: f32, highest: i32) -> f32 {
    let stored = |code: i32| f32::from(code as u8);
    let error = |inverse: f32, code: &dyn Fn(f32) -> f32| {
        let scale = 1.0 / inverse;
        let add = |sum: f32, (value, weight): (&f32, &f32)| {
            let difference = value - scale * code(inverse * value);
            sum + weight * difference * difference
        };
        values.iter().zip(weights).fold(0f32, add)
    };
    let mut inverse = highest as f32 / largest;
    let mut least = error(inverse, &|value| stored(nearest(value)));
    for step in (-4i8..=4).filter(|step| *step != 0) {
        let trial = (0.1 * f32::from(step) + highest as f32) / largest;
        let trial_error = error(trial, &|value| nearest(value).min(highest) as f32);
        if trial_error < least {
            (inverse, least) = (trial, trial_error);
        }
    }
    let mut codes = [0f32; SIZE];
    let (mut products, mut squares) = (0f32, 0f32);
    for ((value, weight), code) in values.iter().zip(weights).zip(&mut codes) {
        let signed = nearest(inverse * value).min(highest);
        *code = stored(signed);
        products += weight * value * signed as f32;
        squares += weight * signed as f32 * signed as f32;
    }
    for _ in 0..5 {
        let mut is_changed = false;
        for ((value, weight), code) in values.iter().zip(weights).zip(&mut codes) {
            let mut other_products = products - weight * value * *code;
            let mut other_squares = squares - weight * *code * *code;
            if other_products > 0.0 && other_squares > 0.0 {
                let signed = nearest(value * other_squares / other_products).min(highest);
                if signed as f32 != *code {
                    other_products += weight * value * signed as f32;
                    other_squares += weight * signed as f32 * signed as f32;
                    if other_products * other_products * squares > products * products * other_squares {
                        (*code, products, squares, is_changed) = (stored(signed), other_products, other_squares, true);
                    }
                }
            }
        }
        if !is_changed {
            break;
        }
    }
    if squares > 0.0 { products / squares } else { 0.0 }
}

/// Quantizes a part; the result is all zeros if its values are.
#[inline(always)]
fn fit<const N: usize, const SIZE: usize>(search: &Search<N>, options: &Options, values: &[f32; SIZE], weights: &[f32; SIZE]) -> Part {
    let (magnitudes, mut signs) = split_signs(values, weights, options.has_even_signs);
    let largest = magnitudes.iter().fold(magnitudes[0], |most, value| if *value > most { *value } else { most });
    if largest < options.smallest || largest == 0.0 {
        return Part::default();
    }
    let base = search.grid.base() as i32;
    let top = (2 * base - 1) as f32;
    let (mut scale, range) = if options.fits_first {
        let scale = first_scale(&magnitudes, weights, largest, base + 1);
        (scale, scale * base as f32)
    } else {
        (largest / top, largest)
    };
    if range <= 0.0 {
        return Part::default();
    }
    let (roots, points) = (weights.map(f32::sqrt), search.grid.points());
    let groups = || magnitudes.as_chunks::<N>().0.iter().zip(roots.as_chunks::<N>().0).enumerate();
    let sums = |indices: &[u16; 8]| {
        let (mut products, mut squares) = (0f32, 0f32);
        for ((magnitudes, weights), index) in magnitudes.as_chunks::<N>().0.iter().zip(weights.as_chunks::<N>().0).zip(indices) {
            for ((value, weight), coordinate) in magnitudes.iter().zip(weights).zip(&points[usize::from(*index)]) {
                let level = f32::from(2 * coordinate + 1);
                products += weight * value * level;
                squares += weight * level * level;
            }
        }
        (products, squares)
    };
    let (mut indices, mut on_grid, mut best) = ([0u16; 8], [options.repeated == Repeated::OffGrid; 8], 0f32);
    let (steps, spacing) = options.trials;
    for step in -steps..=steps {
        let inverse = (top + f32::from(step) * spacing) / range;
        let (mut trial, mut trial_on_grid) = ([0u16; 8], [true; 8]);
        for (group, (values, roots)) in groups() {
            (trial[group], trial_on_grid[group]) = search.find(values, roots, inverse, 1.0 / inverse);
        }
        let (products, squares) = sums(&trial);
        if squares > 0.0 && products * products > best * squares {
            scale = products / squares;
            (indices, on_grid, best) = (trial, trial_on_grid, scale * products);
        }
    }
    let is_repeated = options.repeated == Repeated::All || on_grid[..SIZE / N].contains(&false);
    if scale > 0.0 && is_repeated {
        for (group, (values, roots)) in groups() {
            if options.repeated != Repeated::OffGrid || !on_grid[group] {
                indices[group] = search.find(values, roots, 1.0 / scale, scale).0;
            }
        }
        let (products, squares) = sums(&indices);
        if squares > 0.0 {
            scale = products / squares;
        }
    }
    if scale < 0.0 {
        scale = -scale;
        signs = signs.map(|signs| if options.has_even_signs { !signs & 127 } else { !signs });
    }
    Part { scale, indices, signs }
}

/// Weights of the errors of the part with number `at` of a block: the importance of a column, increased
/// for values that are large relative to `power`, or `plain` without importance.
#[inline(always)]
pub(super) fn weights_of<const SIZE: usize>(
    values: &[f32; SIZE],
    importance: Option<&[f32; 256]>,
    at: usize,
    power: f32,
    plain: fn(f32, f32) -> f32,
) -> [f32; SIZE] {
    match importance {
        Some(importance) => std::array::from_fn(|i| importance[SIZE * at + i] * (power + values[i] * values[i]).sqrt()),
        None => values.map(|value| plain(power, value)),
    }
}

/// Quantizes a block of 256 values in `COUNT` parts of `SIZE` values.
#[inline(always)]
fn fit_block<const N: usize, const SIZE: usize, const COUNT: usize>(
    search: &Search<N>,
    options: &Options,
    values: &[f32; 256],
    importance: Option<&[f32; 256]>,
) -> [Part; COUNT] {
    let power = options.power * power(values);
    let mut parts = [Part::default(); COUNT];
    for (at, (values, part)) in values.as_chunks::<SIZE>().0.iter().zip(&mut parts).enumerate() {
        let weights = weights_of(values, importance, at, power, options.plain);
        *part = fit(search, options, values, &weights);
    }
    parts
}

/// Writes the scale of a block, and returns the 4-bit scales of its parts; `None` if all are zero.
#[inline(always)]
fn write_scales<const COUNT: usize>(parts: &[Part; COUNT], options: &Options, block: &mut [u8]) -> Option<[u8; COUNT]> {
    let largest = parts.iter().fold(0f32, |most, part| if part.scale > most { part.scale } else { most });
    if largest == 0.0 {
        return None;
    }
    let step = largest / 31.0;
    put(step * options.factor, block, 0);
    let inverse = 1.0 / step;
    Some(parts.map(|part| nearest(0.5 * (inverse * part.scale - 1.0)).clamp(0, 15) as u8))
}

/// Four times seven signs and a scale.
fn word(signs: &[u8; 4], scale: u8) -> [u8; 4] {
    let signs = signs.iter().rev().fold(0u32, |bits, signs| bits << 7 | u32::from(*signs));
    (signs | u32::from(scale) << 28).to_le_bytes()
}

/// Weights of values without importance: their squares.
pub(super) fn squares(_power: f32, value: f32) -> f32 {
    value * value
}

const IQ2_XXS: Options =
    Options { power: 1.0, plain: squares, has_even_signs: true, smallest: EPSILON, fits_first: true, trials: (6, 0.1), repeated: Repeated::All, factor: 1.0 };
const IQ2_XS: Options = Options { fits_first: false, trials: (9, 0.1), repeated: Repeated::OffGrid, ..IQ2_XXS };
const IQ2_S: Options =
    Options { power: 2.0, plain: |power, value| 0.25 * power + value * value, has_even_signs: false, smallest: 1e-8, factor: 0.9875, ..IQ2_XS };
const IQ3_XXS: Options = Options { power: 2.0, smallest: 1e-8, trials: (15, 0.2), factor: 1.0125, ..IQ2_XS };
const IQ3_S: Options = Options { has_even_signs: false, smallest: 0.0, trials: (9, 0.2), repeated: Repeated::AllIfAny, factor: 1.033, ..IQ3_XXS };

static SEARCH_2_XXS: LazyLock<Search<8>> = LazyLock::new(|| Search::new(&grids::IQ2_XXS, 2));
static SEARCH_2_XS: LazyLock<Search<8>> = LazyLock::new(|| Search::new(&grids::IQ2_XS, 2));
static SEARCH_2_S: LazyLock<Search<8>> = LazyLock::new(|| Search::new(&grids::IQ2_S, 1));
static SEARCH_3_XXS: LazyLock<Search<4>> = LazyLock::new(|| Search::new(&grids::IQ3_XXS, 2));
static SEARCH_3_S: LazyLock<Search<4>> = LazyLock::new(|| Search::new(&grids::IQ3_S, 3));

simd! {
    pub(in crate::ggml) fn iq2_xxs(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let search = &*SEARCH_2_XXS;
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<66>().0).enumerate() {
            block.fill(0);
            let parts: [Part; 8] = fit_block::<8, 32, 8>(search, &IQ2_XXS, values, importance.as_chunks::<256>().0.get(index));
            let Some(scales) = write_scales(&parts, &IQ2_XXS, block) else { continue };
            for ((part, scale), bytes) in parts.iter().zip(scales).zip(block[2..].as_chunks_mut::<8>().0) {
                bytes.iter_mut().zip(&part.indices[..4]).for_each(|(byte, index)| *byte = *index as u8);
                bytes[4..].copy_from_slice(&word(&part.signs, scale));
            }
        }
    }
}

simd! {
    pub(in crate::ggml) fn iq2_xs(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let search = &*SEARCH_2_XS;
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<74>().0).enumerate() {
            block.fill(0);
            let parts: [Part; 16] = fit_block::<8, 16, 16>(search, &IQ2_XS, values, importance.as_chunks::<256>().0.get(index));
            let Some(scales) = write_scales(&parts, &IQ2_XS, block) else { continue };
            for (at, (part, scale)) in parts.iter().zip(scales).enumerate() {
                for k in 0..2 {
                    let code = part.indices[k] | u16::from(part.signs[k]) << 9;
                    block[2 + 4 * at + 2 * k..][..2].copy_from_slice(&code.to_le_bytes());
                }
                block[66 + at / 2] |= scale << (at % 2 * 4);
            }
        }
    }
}

simd! {
    pub(in crate::ggml) fn iq2_s(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let search = &*SEARCH_2_S;
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<82>().0).enumerate() {
            block.fill(0);
            let parts: [Part; 16] = fit_block::<8, 16, 16>(search, &IQ2_S, values, importance.as_chunks::<256>().0.get(index));
            let scales = write_scales(&parts, &IQ2_S, block).unwrap_or([0; 16]);
            for (at, (part, scale)) in parts.iter().zip(scales).enumerate() {
                for k in 0..2 {
                    let l = 2 * at + k;
                    block[2 + l] = part.indices[k] as u8;
                    block[34 + l] = part.signs[k];
                    block[66 + l / 4] |= ((part.indices[k] >> 8) as u8) << (2 * (l % 4));
                }
                block[74 + at / 2] |= scale << (at % 2 * 4);
            }
        }
    }
}

simd! {
    pub(in crate::ggml) fn iq3_xxs(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let search = &*SEARCH_3_XXS;
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<98>().0).enumerate() {
            block.fill(0);
            let parts: [Part; 8] = fit_block::<4, 32, 8>(search, &IQ3_XXS, values, importance.as_chunks::<256>().0.get(index));
            let Some(scales) = write_scales(&parts, &IQ3_XXS, block) else { continue };
            for (at, (part, scale)) in parts.iter().zip(scales).enumerate() {
                block[2 + 8 * at..][..8].iter_mut().zip(part.indices).for_each(|(byte, index)| *byte = index as u8);
                block[66 + 4 * at..][..4].copy_from_slice(&word(&part.signs, scale));
            }
        }
    }
}

simd! {
    pub(in crate::ggml) fn iq3_s(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let search = &*SEARCH_3_S;
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<110>().0).enumerate() {
            block.fill(0);
            let parts: [Part; 8] = fit_block::<4, 32, 8>(search, &IQ3_S, values, importance.as_chunks::<256>().0.get(index));
            // Unlike in the reference implementation, a part of zeros does not move the parts after it.
            let scales = write_scales(&parts, &IQ3_S, block).unwrap_or([0; 8]);
            for (at, (part, scale)) in parts.iter().zip(scales).enumerate() {
                for (k, index) in part.indices.into_iter().enumerate() {
                    block[2 + 8 * at + k] = index as u8;
                    block[66 + at] |= ((index >> 8) as u8) << k;
                }
                block[74 + 4 * at..][..4].copy_from_slice(&part.signs);
                block[106 + at / 2] |= scale << (at % 2 * 4);
            }
        }
    }
}

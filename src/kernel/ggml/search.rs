//! Searching for the scales of blocks, many side by side.

/// Blocks that are looked at side by side, a lane for each: sums over a block are in the order of the reference, and still in vectors.
pub(super) const LANES: usize = 16;

/// A number for each lane.
macro_rules! lanes {
    ($lane:ident => $value:expr) => {{
        let mut all = [0f32; LANES];
        for $lane in 0..LANES {
            all[$lane] = $value;
        }
        all
    }};
}

pub(super) use lanes;

/// Blocks of `N` values side by side; those that are missing are zeros.
pub(super) type Beside<const N: usize> = [[f32; LANES]; N];

#[inline(always)]
pub(super) fn beside<const N: usize>(values: &[f32]) -> Beside<N> {
    let mut all = [[0.0; LANES]; N];
    for (lane, block) in values.as_chunks::<N>().0.iter().enumerate().take(LANES) {
        for (row, value) in all.iter_mut().zip(block) {
            row[lane] = *value;
        }
    }
    all
}

/// Codes, scale and what is taken away of blocks.
pub(super) struct Fits<const N: usize> {
    pub codes: [[u8; N]; LANES],
    pub scale: [f32; LANES],
    pub minimum: [f32; LANES],
}

impl<const N: usize> Fits<N> {
    pub const NOTHING: Fits<N> = Fits { codes: [[0; N]; LANES], scale: [0.0; LANES], minimum: [0.0; LANES] };
}

/// What errors count for: the importance of a column, and more where the value is large beside a power.
#[inline(always)]
pub(super) fn costs<const N: usize>(values: &Beside<N>, importance: &[f32], power: &[f32; LANES]) -> Beside<N> {
    let mut costs = beside::<N>(importance);
    for (costs, values) in costs.iter_mut().zip(values) {
        *costs = lanes!(l => costs[l] * (power[l] + values[l] * values[l]).sqrt());
    }
    costs
}

/// Scales that are tried beside that of the whole range: `steps` more than one, `apart` codes between them.
pub(super) struct Trials {
    first: f32,
    apart: f32,
    steps: usize,
}

impl Trials {
    /// Of Q4_K and Q5_K without importance.
    pub const OF_FOUR_BITS: Trials = Trials { first: -1.0, apart: 0.1, steps: 20 };
    pub const OF_FIVE_BITS: Trials = Trials { first: -0.5, apart: 0.1, steps: 15 };
    /// Of all types with it.
    pub const WEIGHTED: Trials = Trials { first: -0.9, apart: 0.05, steps: 36 };
}

/// What is nothing among scales.
pub(super) const NOTHING: f32 = 1e-15;

/// Scales of codes from −`middle` to `middle` − 1 by weighted least squares: of the lowest code for the value that is farthest from zero,
/// and of those for up to nine tenths of a code more or less (`make_qx_quants`).
#[inline(always)]
pub(super) fn around<const N: usize>(values: &Beside<N>, weights: &Beside<N>, middle: f32) -> Fits<N> {
    let code = |value: f32, inverse: f32| (inverse * value).round_ties_even().clamp(-middle, middle - 1.0);
    let mut farthest = [0f32; LANES];
    for row in values {
        farthest = lanes!(l => if row[l].abs() > farthest[l].abs() { row[l] } else { farthest[l] });
    }
    let (mut inverse, mut scale, mut most) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    for (first, step) in [(true, 0i8)].into_iter().chain((-9..=9).filter(|step| *step != 0).map(|step| (false, step))) {
        let this = lanes!(l => -(middle + 0.1 * f32::from(step)) / farthest[l]);
        let (mut products, mut squares) = ([0f32; LANES], [0f32; LANES]);
        for (x, w) in values.iter().zip(weights) {
            for l in 0..LANES {
                let code = code(x[l], this[l]);
                products[l] += w[l] * x[l] * code;
                squares[l] += w[l] * code * code;
            }
        }
        for l in 0..LANES {
            let better = first | ((squares[l] > 0.0) & (products[l] * products[l] > most[l] * squares[l]));
            let this_scale = if squares[l] != 0.0 { products[l] / squares[l] } else { 0.0 };
            let either = |this: f32, so_far: f32| if better { this } else { so_far };
            (inverse[l], scale[l], most[l]) = (either(this[l], inverse[l]), either(this_scale, scale[l]), either(this_scale * products[l], most[l]));
        }
    }
    let mut fits = Fits::NOTHING;
    for l in (0..LANES).filter(|l| farthest[*l].abs() >= NOTHING) {
        fits.scale[l] = scale[l];
        for (x, found) in values.iter().zip(&mut fits.codes[l]) {
            *found = (code(x[l], inverse[l]) + middle) as u8;
        }
    }
    fits
}

/// The code of a value behind `low`.
#[inline(always)]
fn code_behind(value: f32, inverse: f32, low: f32, most: f32) -> f32 {
    (inverse * (value - low)).round_ties_even().clamp(0.0, most)
}

/// Scales and minima by weighted least squares, for codes that several scales give (`make_qkx2_quants`, `make_qkx3_quants`).
#[inline(always)]
pub(super) fn with_minimum<const N: usize>(values: &Beside<N>, weights: &Beside<N>, most: f32, trials: &Trials) -> Fits<N> {
    let (mut low, mut high) = (values[0], values[0]);
    let (mut sum_w, mut sum_x) = ([0f32; LANES], [0f32; LANES]);
    for (x, w) in values.iter().zip(weights) {
        for l in 0..LANES {
            (low[l], high[l]) = (low[l].min(x[l]), high[l].max(x[l]));
            sum_w[l] += w[l];
            sum_x[l] += w[l] * x[l];
        }
    }
    let low = lanes!(l => low[l].min(0.0));
    // Codes of the best scale so far: what they begin with, and codes for one.
    let (mut from, mut inverse) = (low, lanes!(l => most / (high[l] - low[l])));
    let (mut scale, mut minimum) = (lanes!(l => 1.0 / inverse[l]), low);
    let mut least = errors(values, weights, (&inverse, &from), (&scale, &minimum), most);
    for step in 0..=trials.steps {
        // From the best minimum so far, as the reference has it.
        let this_from = minimum;
        let this_inverse = lanes!(l => (trials.first + trials.apart * step as f32 + most) / (high[l] - minimum[l]));
        let (mut sum_l, mut sum_l2, mut sum_xl) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for (x, w) in values.iter().zip(weights) {
            for l in 0..LANES {
                let code = code_behind(x[l], this_inverse[l], this_from[l], most);
                sum_l[l] += w[l] * code;
                sum_l2[l] += w[l] * code * code;
                sum_xl[l] += w[l] * code * x[l];
            }
        }
        let determinant = lanes!(l => sum_w[l] * sum_l2[l] - sum_l[l] * sum_l[l]);
        let free = lanes!(l => (sum_l2[l] * sum_x[l] - sum_l[l] * sum_xl[l]) / determinant[l]);
        let this_scale = lanes!(l => if free[l] > 0.0 { sum_xl[l] / sum_l2[l] } else { (sum_w[l] * sum_xl[l] - sum_x[l] * sum_l[l]) / determinant[l] });
        let this_minimum = lanes!(l => if free[l] > 0.0 { 0.0 } else { free[l] });
        let this = errors(values, weights, (&this_inverse, &this_from), (&this_scale, &this_minimum), most);
        for l in 0..LANES {
            let better = (determinant[l] > 0.0) & (this[l] < least[l]);
            let either = |this: f32, so_far: f32| if better { this } else { so_far };
            (inverse[l], from[l], least[l]) = (either(this_inverse[l], inverse[l]), either(this_from[l], from[l]), either(this[l], least[l]));
            (scale[l], minimum[l]) = (either(this_scale[l], scale[l]), either(this_minimum[l], minimum[l]));
        }
    }
    let mut fits = Fits::NOTHING;
    fits.minimum = lanes!(l => if high[l] > low[l] { -minimum[l] } else { -low[l] });
    for l in 0..LANES {
        if high[l] > low[l] {
            fits.scale[l] = scale[l];
            for (x, code) in values.iter().zip(&mut fits.codes[l]) {
                *code = code_behind(x[l], inverse[l], from[l], most) as u8;
            }
        }
    }
    fits
}

/// Weighted squared errors of blocks whose codes come by these numbers, with a scale and a minimum.
#[inline(always)]
fn errors<const N: usize>(
    values: &Beside<N>,
    weights: &Beside<N>,
    (inverse, from): (&[f32; LANES], &[f32; LANES]),
    (scale, minimum): (&[f32; LANES], &[f32; LANES]),
    most: f32,
) -> [f32; LANES] {
    let mut errors = [0f32; LANES];
    for (x, w) in values.iter().zip(weights) {
        for l in 0..LANES {
            let difference = scale[l] * code_behind(x[l], inverse[l], from[l], most) + minimum[l] - x[l];
            errors[l] += w[l] * (difference * difference);
        }
    }
    errors
}

//! Search for the scales of blocks, for many blocks in parallel.

/// The lower of two values, `best` if they are equal. Unlike that of `f32::min`, the sign of zero is defined.
#[inline(always)]
pub(super) fn lower(best: f32, value: f32) -> f32 {
    if value < best { value } else { best }
}

/// The higher of two values, `best` if they are equal.
#[inline(always)]
pub(super) fn higher(best: f32, value: f32) -> f32 {
    if value > best { value } else { best }
}

/// Rounds to the nearest integer, and values that are out of range as the reference implementation does
/// (`nearest_int`). Infinities, from reciprocals of denormal steps, become less than the lowest code.
#[inline(always)]
pub(super) fn nearest(value: f32) -> i32 {
    ((value + 12_582_912.0).to_bits() & 0x7F_FFFF) as i32 - 0x40_0000
}

/// Number of blocks processed in parallel, one per lane. Sums over a block keep the order of the
/// reference implementation and are still vectorized.
pub(super) const LANES: usize = 16;

/// One value per lane.
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

/// Interleaved blocks of `N` values; missing blocks are zero.
pub(super) type Interleaved<const N: usize> = [[f32; LANES]; N];

#[inline(always)]
pub(super) fn interleaved<const N: usize>(values: &[f32]) -> Interleaved<N> {
    let mut all = [[0.0; LANES]; N];
    for (lane, block) in values.as_chunks::<N>().0.iter().enumerate().take(LANES) {
        for (row, value) in all.iter_mut().zip(block) {
            row[lane] = *value;
        }
    }
    all
}

/// Codes, scales and minima of blocks.
pub(super) struct Fits<const N: usize> {
    pub codes: [[u8; N]; LANES],
    pub scale: [f32; LANES],
    pub minimum: [f32; LANES],
}

impl<const N: usize> Fits<N> {
    pub const ZERO: Fits<N> = Fits { codes: [[0; N]; LANES], scale: [0.0; LANES], minimum: [0.0; LANES] };
}

/// Weights of the errors: the importance of a column, increased for values that are large relative to
/// `power`.
#[inline(always)]
pub(super) fn costs<const N: usize>(values: &Interleaved<N>, importance: &[f32], power: &[f32; LANES]) -> Interleaved<N> {
    let mut costs = interleaved::<N>(importance);
    for (costs, values) in costs.iter_mut().zip(values) {
        *costs = lanes!(l => costs[l] * (power[l] + values[l] * values[l]).sqrt());
    }
    costs
}

/// Scales that are tried in addition to that of the full range: `steps + 1` scales, `spacing` codes
/// apart from each other.
pub(super) struct Trials {
    first: f32,
    spacing: f32,
    steps: usize,
    /// Whether absolute errors are compared instead of squared errors.
    absolute: bool,
}

impl Trials {
    /// For Q2_K, Q4_K and Q5_K without importance.
    pub const TWO_BITS: Trials = Trials { first: -0.5, spacing: 0.1, steps: 15, absolute: true };
    pub const FOUR_BITS: Trials = Trials { first: -1.0, spacing: 0.1, steps: 20, absolute: false };
    pub const FIVE_BITS: Trials = Trials { first: -0.5, spacing: 0.1, steps: 15, absolute: false };
    /// For all types with importance.
    pub const WEIGHTED: Trials = Trials { first: -0.9, spacing: 0.05, steps: 36, absolute: false };
}

/// Scales below this are treated as zero.
pub(super) const EPSILON: f32 = 1e-15;

/// The value of each block with the largest magnitude, the first one if several are equal.
#[inline(always)]
pub(super) fn farthest_values<const N: usize>(values: &Interleaved<N>) -> [f32; LANES] {
    values.iter().fold([0f32; LANES], |most, row| lanes!(l => if row[l].abs() > most[l].abs() { row[l] } else { most[l] }))
}

/// Scales of codes from −`middle` to `middle` − 1 by weighted least squares. Tries the scale that
/// assigns the lowest code to the value with the largest magnitude, and scales that differ by up to 0.9
/// codes (`make_qx_quants`).
#[inline(always)]
pub(super) fn around<const N: usize>(values: &Interleaved<N>, weights: &Interleaved<N>, middle: f32) -> Fits<N> {
    let code = |value: f32, inverse: f32| (inverse * value).round_ties_even().clamp(-middle, middle - 1.0);
    let farthest = farthest_values(values);
    let (mut inverse, mut scale, mut most) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    for (first, step) in [(true, 0i8)].into_iter().chain((-9..=9).filter(|step| *step != 0).map(|step| (false, step))) {
        let trial = lanes!(l => -(middle + 0.1 * f32::from(step)) / farthest[l]);
        let (mut products, mut squares) = ([0f32; LANES], [0f32; LANES]);
        for (x, w) in values.iter().zip(weights) {
            for l in 0..LANES {
                let code = code(x[l], trial[l]);
                products[l] += w[l] * x[l] * code;
                squares[l] += w[l] * code * code;
            }
        }
        for l in 0..LANES {
            let better = first | ((squares[l] > 0.0) & (products[l] * products[l] > most[l] * squares[l]));
            let trial_scale = if squares[l] != 0.0 { products[l] / squares[l] } else { 0.0 };
            let either = |trial: f32, best: f32| if better { trial } else { best };
            (inverse[l], scale[l], most[l]) = (either(trial[l], inverse[l]), either(trial_scale, scale[l]), either(trial_scale * products[l], most[l]));
        }
    }
    let mut fits = Fits::ZERO;
    for l in (0..LANES).filter(|l| farthest[*l].abs() >= EPSILON) {
        fits.scale[l] = scale[l];
        for (x, found) in values.iter().zip(&mut fits.codes[l]) {
            *found = (code(x[l], inverse[l]) + middle) as u8;
        }
    }
    fits
}

/// Scales of codes from −`middle` to `middle` − 1 by least squares weighted by the squares of the values.
/// Starts from the scale that assigns the lowest code to the value with the largest magnitude, and changes
/// one code at a time while the error decreases (`make_q3_quants`).
#[inline(always)]
pub(super) fn around_by_descent<const N: usize>(values: &Interleaved<N>, middle: f32) -> Fits<N> {
    let clamped = |code: f32| code.round_ties_even().clamp(-middle, middle - 1.0);
    let farthest = farthest_values(values);
    let inverse = lanes!(l => -middle / farthest[l]);
    let (mut codes, mut products, mut squares) = ([[0f32; LANES]; N], [0f32; LANES], [0f32; LANES]);
    for (x, codes) in values.iter().zip(&mut codes) {
        *codes = lanes!(l => clamped(inverse[l] * x[l]));
        products = lanes!(l => products[l] + x[l] * x[l] * x[l] * codes[l]);
        squares = lanes!(l => squares[l] + x[l] * x[l] * codes[l] * codes[l]);
    }
    for _ in 0..5 {
        let before = codes;
        for (x, codes) in values.iter().zip(&mut codes) {
            for l in 0..LANES {
                let weight = x[l] * x[l];
                let other_products = products[l] - weight * x[l] * codes[l];
                let other_squares = squares[l] - weight * codes[l] * codes[l];
                let code = clamped(x[l] * other_squares / other_products);
                let trial_products = other_products + weight * x[l] * code;
                let trial_squares = other_squares + weight * code * code;
                let lower = trial_products * trial_products * squares[l] > products[l] * products[l] * trial_squares;
                let better = (other_products > 0.0) & (code != codes[l]) & (trial_squares > 0.0) & lower;
                let either = |trial: f32, best: f32| if better { trial } else { best };
                (codes[l], products[l], squares[l]) = (either(code, codes[l]), either(trial_products, products[l]), either(trial_squares, squares[l]));
            }
        }
        if codes == before {
            break;
        }
    }
    let mut fits = Fits::ZERO;
    for l in (0..LANES).filter(|l| farthest[*l].abs() >= EPSILON) {
        fits.scale[l] = if squares[l] > 0.0 { products[l] / squares[l] } else { 0.0 };
        for (codes, found) in codes.iter().zip(&mut fits.codes[l]) {
            *found = (codes[l] + middle) as u8;
        }
    }
    fits
}

/// The code of a value relative to `low`.
#[inline(always)]
fn code_above(value: f32, inverse: f32, low: f32, highest: f32) -> f32 {
    (nearest(inverse * (value - low)) as f32).clamp(0.0, highest)
}

/// Scales and minima by weighted least squares, trying the codes of several scales (`make_qkx2_quants`,
/// `make_qkx3_quants`).
#[inline(always)]
pub(super) fn with_minimum<const N: usize>(values: &Interleaved<N>, weights: &Interleaved<N>, highest: f32, trials: &Trials) -> Fits<N> {
    let (mut low, mut high) = (values[0], values[0]);
    let (mut sum_w, mut sum_x) = ([0f32; LANES], [0f32; LANES]);
    for (x, w) in values.iter().zip(weights) {
        for l in 0..LANES {
            (low[l], high[l]) = (lower(low[l], x[l]), higher(high[l], x[l]));
            sum_w[l] += w[l];
            sum_x[l] += w[l] * x[l];
        }
    }
    let low = lanes!(l => lower(low[l], 0.0));
    // Codes of the best scale so far: the value of code 0, and the reciprocal of the step.
    let (mut from, mut inverse) = (low, lanes!(l => highest / (high[l] - low[l])));
    let (mut scale, mut minimum) = (lanes!(l => 1.0 / inverse[l]), low);
    let mut least = errors(values, weights, (&inverse, &from), (&scale, &minimum), highest, trials.absolute);
    for step in 0..=trials.steps {
        // Relative to the best minimum so far, as in the reference implementation.
        let trial_from = minimum;
        let trial_inverse = lanes!(l => (trials.first + trials.spacing * step as f32 + highest) / (high[l] - minimum[l]));
        let (mut sum_l, mut sum_l2, mut sum_xl) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for (x, w) in values.iter().zip(weights) {
            for l in 0..LANES {
                let code = code_above(x[l], trial_inverse[l], trial_from[l], highest);
                sum_l[l] += w[l] * code;
                sum_l2[l] += w[l] * code * code;
                sum_xl[l] += w[l] * code * x[l];
            }
        }
        let determinant = lanes!(l => sum_w[l] * sum_l2[l] - sum_l[l] * sum_l[l]);
        let free = lanes!(l => (sum_l2[l] * sum_x[l] - sum_l[l] * sum_xl[l]) / determinant[l]);
        let trial_scale = lanes!(l => if free[l] > 0.0 { sum_xl[l] / sum_l2[l] } else { (sum_w[l] * sum_xl[l] - sum_x[l] * sum_l[l]) / determinant[l] });
        let trial_minimum = lanes!(l => if free[l] > 0.0 { 0.0 } else { free[l] });
        let trial = errors(values, weights, (&trial_inverse, &trial_from), (&trial_scale, &trial_minimum), highest, trials.absolute);
        for l in 0..LANES {
            let better = (determinant[l] > 0.0) & (trial[l] < least[l]);
            let either = |trial: f32, best: f32| if better { trial } else { best };
            (inverse[l], from[l], least[l]) = (either(trial_inverse[l], inverse[l]), either(trial_from[l], from[l]), either(trial[l], least[l]));
            (scale[l], minimum[l]) = (either(trial_scale[l], scale[l]), either(trial_minimum[l], minimum[l]));
        }
    }
    let mut fits = Fits::ZERO;
    fits.minimum = lanes!(l => if high[l] > low[l] { -minimum[l] } else { -low[l] });
    for l in 0..LANES {
        if high[l] > low[l] {
            fits.scale[l] = scale[l];
            for (x, code) in values.iter().zip(&mut fits.codes[l]) {
                *code = code_above(x[l], inverse[l], from[l], highest) as u8;
            }
        }
    }
    fits
}

/// Weighted squared or absolute errors of blocks: codes are computed from `inverse` and `from`, and
/// dequantized with `scale` and `minimum`.
#[inline(always)]
fn errors<const N: usize>(
    values: &Interleaved<N>,
    weights: &Interleaved<N>,
    (inverse, from): (&[f32; LANES], &[f32; LANES]),
    (scale, minimum): (&[f32; LANES], &[f32; LANES]),
    highest: f32,
    absolute: bool,
) -> [f32; LANES] {
    let mut errors = [0f32; LANES];
    for (x, w) in values.iter().zip(weights) {
        for l in 0..LANES {
            let difference = scale[l] * code_above(x[l], inverse[l], from[l], highest) + minimum[l] - x[l];
            errors[l] += w[l] * if absolute { difference.abs() } else { difference * difference };
        }
    }
    errors
}

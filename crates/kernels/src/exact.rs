//! Sums that do not depend on the order of summation.

/// Exponent of the lowest bit: 2^-149 is the smallest f32, of which all products of f32 in f32 are
/// multiples.
const LOWEST: i32 = -149;
/// Magnitudes from this value on are treated as infinite. Sums of squares of f32 in a few thousand lanes
/// do not reach it.
const LIMIT: f64 = f64::from_bits((1023 + 190) << 52);

/// An exact sum of floats in two's complement. Numbers beyond its range make it infinite; NaN makes it
/// NaN.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExactSum {
    limbs: [u64; 6],
    nonfinite: f64,
}

impl ExactSum {
    /// Adds a number, ignoring its bits below 2^-149.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() || value.abs() >= LIMIT {
            self.nonfinite += if value.is_nan() { value } else { f64::INFINITY.copysign(value) };
            return;
        }
        let (bits, hidden) = (value.to_bits(), 1u64 << 52);
        let exponent = (bits >> 52 & 0x7FF) as i32;
        let mantissa = bits & (hidden - 1) | if exponent > 0 { hidden } else { 0 };
        // The number is `mantissa · 2^(exponent - 1075)`.
        let shift = exponent.max(1) - 1075 - LOWEST;
        let (mantissa, shift) = if shift < 0 { (mantissa.checked_shr(shift.unsigned_abs()).unwrap_or(0), 0) } else { (mantissa, shift.unsigned_abs()) };
        let wide = u128::from(mantissa) << (shift % 64);
        let mut part = [0; 6];
        let at = (shift / 64) as usize;
        part.iter_mut().skip(at).zip([wide as u64, (wide >> 64) as u64]).for_each(|(limb, bits)| *limb = bits);
        self.put(&if value < 0.0 { negative(part) } else { part });
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &ExactSum) {
        self.nonfinite += other.nonfinite;
        self.put(&other.limbs);
    }

    fn put(&mut self, part: &[u64; 6]) {
        let mut carry = false;
        for (limb, bits) in self.limbs.iter_mut().zip(part) {
            let (sum, first) = limb.overflowing_add(*bits);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            (*limb, carry) = (sum, first || second);
        }
    }

    /// The sum, rounded to f64.
    pub fn value(&self) -> f64 {
        if self.nonfinite != 0.0 {
            return self.nonfinite;
        }
        let below = self.limbs.last().is_some_and(|limb| limb >> 63 == 1);
        let limbs = if below { negative(self.limbs) } else { self.limbs };
        let Some(top) = limbs.iter().rposition(|limb| *limb > 0) else { return 0.0 };
        // The 64 leading bits, with the last one as a sticky bit for all lower bits, so that the
        // conversion rounds only once.
        let free = limbs[top].leading_zeros();
        let next = if top > 0 { limbs[top - 1] } else { 0 };
        let lost = u128::from(next) << free & u128::from(u64::MAX) > 0 || limbs[..top.saturating_sub(1)].iter().any(|limb| *limb > 0);
        let leading = limbs[top] << free | (u128::from(next) << free >> 64) as u64 | u64::from(lost);
        let power = 64 * top as i32 - free as i32 + LOWEST;
        let size = leading as f64 * f64::from_bits(((1023 + power) as u64) << 52);
        if below { -size } else { size }
    }

    /// The bits as integers, for text formats.
    pub fn to_bits(&self) -> [u64; 7] {
        let [a, b, c, d, e, f] = self.limbs;
        [a, b, c, d, e, f, self.nonfinite.to_bits()]
    }

    /// The inverse of [`to_bits`](ExactSum::to_bits).
    pub fn from_bits([a, b, c, d, e, f, nonfinite]: [u64; 7]) -> ExactSum {
        ExactSum { limbs: [a, b, c, d, e, f], nonfinite: f64::from_bits(nonfinite) }
    }
}

fn negative(limbs: [u64; 6]) -> [u64; 6] {
    let mut carry = true;
    limbs.map(|limb| {
        let (sum, over) = (!limb).overflowing_add(u64::from(carry));
        carry = over;
        sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(values: impl IntoIterator<Item = f64>) -> ExactSum {
        let mut sum = ExactSum::default();
        values.into_iter().for_each(|value| sum.add(value));
        sum
    }

    #[test]
    fn sums_are_exact_in_any_order() {
        let least = f64::from(f32::from_bits(1));
        let values = [1e30, -3.5, 0.1f32.into(), least, -1e30, 7.25e-20f32.into(), 2f64.powi(132), -(2f64.powi(132)), 3.5, -0.0, 0.0];
        let forth = sum(values);
        assert_eq!(forth, sum(values.into_iter().rev()));
        assert_eq!(forth.value(), f64::from(0.1f32) + f64::from(7.25e-20f32));
        assert_eq!(sum([1e30, least, -1e30]).value(), least);
        assert_eq!(sum([-1.5, 0.25]).value(), -1.25);
        // Halfway between two floats, and next to it: each is rounded once.
        let half = 2f64.powi(-53);
        assert_eq!(sum([1.0, half]).value(), 1.0);
        assert_eq!(sum([1.0, half, 2f64.powi(-140)]).value(), 1.0 + 2.0 * half);
        assert_eq!(sum([1.0, 3.0 * half, -(2f64.powi(-140))]).value(), 1.0 + 2.0 * half);
        assert_eq!(sum([2f64.powi(66), 4096.0, 2f64.powi(-100)]).value(), 2f64.powi(66));
        assert_eq!(sum([2f64.powi(66), 8192.0, 2f64.powi(-100)]).value(), 2f64.powi(66) + 16384.0);
        for value in [0.0, 1.0, -1.0, least, f64::from(f32::MAX) * 4096.0, 1.0 / 3.0, -1e-30] {
            let rounded = (value / least).trunc() * least;
            assert_eq!(sum([value]).value(), rounded, "{value:e}");
        }
    }

    #[test]
    fn partial_sums_are_merged() {
        let values: Vec<f64> = (0..1000).map(|i| f64::from((f64::from(i) * 0.37).sin() as f32) * 10f64.powi(i % 40 - 20)).collect();
        let mut joined = sum(values[..321].iter().copied());
        joined.merge(&ExactSum::from_bits(sum(values[321..].iter().copied()).to_bits()));
        assert_eq!(joined, sum(values.iter().copied()));
        let plain: f64 = values.iter().sum();
        assert!((joined.value() - plain).abs() <= 1e-9 * plain.abs(), "{} {plain}", joined.value());
    }

    #[test]
    fn nonfinite_values_propagate() {
        assert_eq!(sum([1.0, f64::INFINITY, 2.0]).value(), f64::INFINITY);
        assert_eq!(sum([2f64.powi(200)]).value(), f64::INFINITY);
        assert!(sum([f64::INFINITY, f64::NEG_INFINITY]).value().is_nan());
        assert!(ExactSum::from_bits(sum([f64::NAN]).to_bits()).value().is_nan());
    }
}

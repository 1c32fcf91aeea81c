//! Error measures between two sets of values.

use super::{Float, quantize};

/// Running sums over pairs of values.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Difference {
    /// Σ a²
    pub signal: f64,
    /// Σ b²
    pub other: f64,
    /// Σ (a − b)²
    pub noise: f64,
    /// Σ a·b
    pub dot: f64,
    /// max |a − b|
    pub max: f32,
    /// Elements where a is zero.
    pub zeros_before: u64,
    /// Elements where b is zero.
    pub zeros_after: u64,
}

const LANES: usize = 32;

impl Difference {
    /// Adds the sums of another run. Runs have a few thousand values, which are summed in f32.
    pub fn add(&mut self, part: &Difference) {
        self.signal += part.signal;
        self.other += part.other;
        self.noise += part.noise;
        self.dot += part.dot;
        self.max = self.max.max(part.max);
        // Other parts of the same run may count zeros separately.
        self.zeros_before = self.zeros_before.saturating_add(part.zeros_before);
        self.zeros_after = self.zeros_after.saturating_add(part.zeros_after);
    }

    /// Signal-to-noise ratio in decibels. `None` if the noise or the signal is zero, or a sum overflows.
    pub fn sqnr_db(&self) -> Option<f64> {
        (self.noise > 0.0 && self.signal > 0.0).then(|| 10.0 * (self.signal / self.noise).log10()).filter(|db| db.is_finite())
    }

    /// Cosine similarity. `None` if one side is all zero, or a sum overflows.
    pub fn cosine(&self) -> Option<f64> {
        (self.signal > 0.0 && self.other > 0.0).then(|| self.dot / (self.signal.sqrt() * self.other.sqrt())).filter(|cosine| cosine.is_finite())
    }
}

/// Sums over one run of elements that are converted to floats.
#[inline(always)]
fn sums<A: Copy, B: Copy>(before: &[A], after: &[B], value_before: impl Fn(A) -> f32, value_after: impl Fn(B) -> f32) -> Difference {
    let mut signal = [0f32; LANES];
    let mut other = [0f32; LANES];
    let mut noise = [0f32; LANES];
    let mut dot = [0f32; LANES];
    let mut max = [0f32; LANES];
    let mut zeros = [[0u32; LANES]; 2];
    let mut step = |lane: usize, a: f32, b: f32| {
        let d = a - b;
        signal[lane] += a * a;
        other[lane] += b * b;
        noise[lane] += d * d;
        dot[lane] += a * b;
        max[lane] = max[lane].max(d.abs());
        zeros[0][lane] += u32::from(a == 0.0);
        zeros[1][lane] += u32::from(b == 0.0);
    };
    let (a, a_tail) = before.as_chunks::<LANES>();
    let (b, b_tail) = after.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            step(lane, value_before(a[lane]), value_after(b[lane]));
        }
    }
    for (lane, (&a, &b)) in a_tail.iter().zip(b_tail).enumerate() {
        step(lane, value_before(a), value_after(b));
    }
    let sum = |lanes: &[f32; LANES]| lanes.iter().map(|v| f64::from(*v)).sum();
    let count = |lanes: &[u32; LANES]| lanes.iter().map(|n| u64::from(*n)).sum();
    Difference {
        signal: sum(&signal),
        other: sum(&other),
        noise: sum(&noise),
        dot: sum(&dot),
        max: max.into_iter().fold(0.0, f32::max),
        zeros_before: count(&zeros[0]),
        zeros_after: count(&zeros[1]),
    }
}

simd! {
    /// Compares floats.
    pub fn floats(before: &[f32], after: &[f32]) -> Difference {
        sums(before, after, |a| a, |b| b)
    }
}

simd! {
    /// Compares elements of the same format.
    pub fn elements[F: Float](before: &[u8], after: &[u8]) -> Difference {
        sums(F::split(before), F::split(after), F::to_f32, F::to_f32)
    }
}

simd! {
    /// Compares elements with integers that share a scale.
    pub fn integers[F: Float](before: &[u8], after: &[u8], scale: f32, zero_point: f32) -> Difference {
        sums(F::split(before), after, F::to_f32, |q| quantize::value(q, scale, zero_point))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Bf16;
    use super::*;

    #[test]
    fn sums_match_the_definition() {
        let a: Vec<f32> = (0..77).map(|i| i as f32 - 30.0).collect();
        let b: Vec<f32> = a.iter().map(|v| if *v < -10.0 { 0.0 } else { *v }).collect();
        let d = floats(&a, &b);
        let expected: f64 = a.iter().filter(|v| **v < -10.0).map(|v| f64::from(v * v)).sum();
        assert_eq!(d.noise, expected);
        assert_eq!((d.zeros_before, d.zeros_after), (1, 21));
        assert_eq!(d.max, 30.0);
        assert!(d.sqnr_db().is_some() && d.cosine().unwrap() < 1.0);
        assert_eq!(Difference::default().sqnr_db(), None);
    }

    #[test]
    fn elements_and_integers_are_compared_by_value() {
        let (before, after): (Vec<u8>, Vec<u8>) =
            (0..200u16).map(|i| ((0x3F00 + i * 7).to_le_bytes(), (0xBE00 + i * 3).to_le_bytes())).fold(Default::default(), |(mut a, mut b), (x, y)| {
                a.extend(x);
                b.extend(y);
                (a, b)
            });
        let values = |bytes: &[u8]| Bf16::split(bytes).iter().map(|e| Bf16::to_f32(*e)).collect::<Vec<f32>>();
        assert_eq!(elements::<Bf16>(&before, &after), floats(&values(&before), &values(&after)));
        let mut dequantized = vec![0.0; 200];
        quantize::dequantize(&after[..200], &mut dequantized, 0.01, 3.0);
        assert_eq!(integers::<Bf16>(&before, &after[..200], 0.01, 3.0), floats(&values(&before), &dequantized));
    }
}

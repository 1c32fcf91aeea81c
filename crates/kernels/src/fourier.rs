//! Discrete Fourier transform of a few hundred real numbers, in two steps by a factorization of the
//! length (Cooley and Tukey, *An Algorithm for the Machine Calculation of Complex Fourier Series*,
//! 1965).

use std::f64::consts::TAU;

/// A complex number.
type Complex = [f64; 2];

fn times([a, b]: Complex, [c, d]: Complex) -> Complex {
    [a * c - b * d, a * d + b * c]
}

/// A transform for one length.
#[derive(Debug)]
pub struct Fourier {
    /// The largest divisor of the length up to its square root.
    inner: usize,
    outer: usize,
    /// `exp(-2πi k / length)`.
    roots: Vec<Complex>,
}

impl Fourier {
    /// A transform of `length` numbers; 0 counts as 1.
    pub fn new(length: usize) -> Fourier {
        let length = length.max(1);
        let inner = (1..=length.isqrt()).rev().find(|factor| length.is_multiple_of(*factor)).unwrap_or(1);
        let root = |k: usize| {
            let angle = TAU * k as f64 / length as f64;
            [angle.cos(), -angle.sin()]
        };
        Fourier { inner, outer: length / inner, roots: (0..length).map(root).collect() }
    }

    /// Power spectrum: squared magnitudes of the frequencies from zero to half of the length. `x` must
    /// have the length of the transform.
    pub fn power(&self, x: &[f64]) -> Vec<f64> {
        let (inner, outer, length) = (self.inner, self.outer, self.roots.len());
        let mut parts = vec![[0.0; 2]; length];
        for k in 0..inner {
            for n in 0..outer {
                let mut sum = [0.0; 2];
                for m in 0..inner {
                    let [re, im] = self.roots[(m * k % inner) * outer];
                    let value = x[m * outer + n];
                    sum = [sum[0] + value * re, sum[1] + value * im];
                }
                parts[k * outer + n] = times(sum, self.roots[n * k % length]);
            }
        }
        let frequency = |k: usize| {
            let mut sum = [0.0; 2];
            for (n, part) in parts[(k % inner) * outer..][..outer].iter().enumerate() {
                let [re, im] = times(*part, self.roots[(n * (k / inner) % outer) * inner]);
                sum = [sum[0] + re, sum[1] + im];
            }
            sum[0] * sum[0] + sum[1] * sum[1]
        };
        (0..=length / 2).map(frequency).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_match_the_definition() {
        for length in [1, 2, 7, 12, 25, 60, 400] {
            let x: Vec<f64> = (0..length).map(|i| ((i * i + 3 * i) as f64 * 0.37).sin()).collect();
            let expected = |k: usize| {
                let part = |f: fn(f64) -> f64| x.iter().enumerate().map(|(n, x)| x * f(TAU * (n * k) as f64 / length as f64)).sum::<f64>();
                part(f64::cos).powi(2) + part(f64::sin).powi(2)
            };
            let found = Fourier::new(length).power(&x);
            assert_eq!(found.len(), length / 2 + 1);
            for (k, found) in found.into_iter().enumerate() {
                assert!((found - expected(k)).abs() < 1e-9 * length as f64, "{k} of {length}");
            }
        }
    }
}

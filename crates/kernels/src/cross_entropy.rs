//! Losses over rows of logits, and their gradients.

use super::activation::exp;
use super::rows::{largest, sum};

/// `ln Σ exp(factor x)`.
#[inline(always)]
pub(super) fn total(row: &[f32], factor: f32) -> f32 {
    let most = largest(row) * factor;
    sum(row, |x| exp(x * factor - most)).ln() + most
}

simd! {
    /// `ln Σ exp(factor x)`.
    pub fn log_sum(row: &[f32], factor: f32) -> f32 {
        total(row, factor)
    }
}

simd! {
    /// Soft cross-entropy: adds `(softmax(x / temperature) - softmax(y / temperature)) * factor` to
    /// `out`. Returns the KL divergence `Σ q (ln q - ln p)`.
    pub fn soft(x: &[f32], y: &[f32], temperature: f32, factor: f32, out: &mut [f32]) -> f32 {
        const LANES: usize = 32;
        let part = 1.0 / temperature;
        let (of_x, of_y) = (total(x, part), total(y, part));
        let mut lanes = [0f32; LANES];
        for ((out, x), y) in out.chunks_mut(LANES).zip(x.chunks(LANES)).zip(y.chunks(LANES)) {
            for (((out, x), y), lane) in out.iter_mut().zip(x).zip(y).zip(&mut lanes) {
                let (p, q) = (x * part - of_x, y * part - of_y);
                let target = exp(q);
                *out += (exp(p) - target) * factor;
                *lane += target * (q - p);
            }
        }
        lanes.iter().sum()
    }
}

simd! {
    /// Cross-entropy with label smoothing: adds `(softmax(x) - target) * factor` to `out`, with a target
    /// of `even` for all classes plus `rest` for one of them. Returns `-Σ target ln softmax(x)`.
    pub fn hard(x: &[f32], class: usize, even: f32, rest: f32, factor: f32, out: &mut [f32]) -> f32 {
        let all = total(x, 1.0);
        for (out, x) in out.iter_mut().zip(x) {
            *out += (exp(x - all) - even) * factor;
        }
        if let Some(out) = out.get_mut(class) {
            *out -= rest * factor;
        }
        let of_class = x.get(class).map_or(f32::NAN, |x| (all - x) * rest);
        // Without label smoothing, logits of minus infinity must not contribute.
        if even == 0.0 { of_class } else { of_class + even * sum(x, |x| all - x) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference implementation in f64.
    fn logarithms(row: &[f32], temperature: f64) -> Vec<f64> {
        let total = row.iter().map(|x| (f64::from(*x) / temperature).exp()).sum::<f64>().ln();
        row.iter().map(|x| f64::from(*x) / temperature - total).collect()
    }

    #[test]
    fn losses_and_gradients_match_the_definition() {
        let row = |seed: u32| -> Vec<f32> { (0..77u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) as f32 / 512.0 - 4.0).collect() };
        let (x, y) = (row(1), row(977_123_456));
        let close = |a: f32, b: f64| assert!((f64::from(a) - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} for {b}");
        let mut out = vec![1.0; 77];
        let loss = soft(&x, &y, 2.0, 3.0, &mut out);
        let (p, q) = (logarithms(&x, 2.0), logarithms(&y, 2.0));
        close(loss, p.iter().zip(&q).map(|(p, q)| q.exp() * (q - p)).sum());
        out.iter().zip(p.iter().zip(&q)).for_each(|(out, (p, q))| close(*out, 1.0 + 3.0 * (p.exp() - q.exp())));
        for (even, rest) in [(0.0, 1.0), (0.1 / 77.0, 0.9)] {
            let mut out = vec![0.0; 77];
            let (loss, p) = (hard(&x, 5, even, rest, 2.0, &mut out), logarithms(&x, 1.0));
            let wanted = |i: usize| f64::from(even) + if i == 5 { f64::from(rest) } else { 0.0 };
            close(loss, p.iter().enumerate().map(|(i, p)| -wanted(i) * p).sum());
            out.iter().zip(&p).enumerate().for_each(|(i, (out, p))| close(*out, 2.0 * (p.exp() - wanted(i))));
        }
        let sum = x.iter().map(|x| (f64::from(*x) * 0.5).exp()).sum::<f64>();
        close(log_sum(&x, 0.5), sum.ln());
        assert!(soft(&[f32::NAN, 1.0], &[0.0, 1.0], 1.0, 1.0, &mut [0.0; 2]).is_nan());
    }
}

//! Confidence intervals and correlation coefficients.

/// The 97.5th percentile of the standard normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// 95 % Wilson score interval of a proportion (Wilson, 1927).
pub(super) fn proportion_interval(hits: u64, count: u64) -> Option<[f64; 2]> {
    if count == 0 {
        return None;
    }
    let (n, p) = (count as f64, hits as f64 / count as f64);
    let centre = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    Some([(centre - half).max(0.0), (centre + half).min(1.0)])
}

/// 95 % interval of a rank correlation by Fisher's transformation, with the variance of Bonett and Wright
/// (2000).
pub(super) fn correlation_interval(rho: f64, count: usize) -> Option<[f64; 2]> {
    if count < 4 || rho.abs() >= 1.0 {
        return None;
    }
    let half = Z * ((1.0 + rho * rho / 2.0) / (count as f64 - 3.0)).sqrt();
    Some([(rho.atanh() - half).tanh(), (rho.atanh() + half).tanh()])
}

/// 95 % interval of a mean, from the sum of the values and the sum of their squares.
pub(super) fn mean_interval(sum: f64, squares: f64, count: u64) -> Option<[f64; 2]> {
    if count < 2 {
        return None;
    }
    let n = count as f64;
    let mean = sum / n;
    let variance = ((squares - n * mean * mean) / (n - 1.0)).max(0.0);
    let half = Z * (variance / n).sqrt();
    Some([mean - half, mean + half])
}

/// Pearson correlation; `None` if it is undefined.
pub(super) fn pearson(a: &[f64], b: &[f64]) -> Option<f64> {
    let n = a.len().min(b.len()) as f64;
    let (mean_a, mean_b) = (a.iter().sum::<f64>() / n, b.iter().sum::<f64>() / n);
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (x - mean_a, y - mean_b);
        (ab, aa, bb) = (ab + x * y, aa + x * x, bb + y * y);
    }
    Some(ab / (aa * bb).sqrt()).filter(|r| r.is_finite())
}

/// Spearman rank correlation. Tied values have the mean of their ranks.
pub(super) fn spearman(a: &[f64], b: &[f64]) -> Option<f64> {
    pearson(&ranks(a), &ranks(b))
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    while from < order.len() {
        let same = order[from..].iter().take_while(|i| values[**i] == values[order[from]]).count().max(1);
        for index in &order[from..from + same] {
            ranks[*index] = from as f64 + (same as f64 + 1.0) / 2.0;
        }
        from += same;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-6, "{a} is not {b}");
    }

    // Reference values of scipy.stats: binomtest(80, 100).proportion_ci(method="wilson"), spearmanr,
    // pearsonr, rankdata.
    #[test]
    fn values_match_scipy() {
        let [low, high] = proportion_interval(80, 100).unwrap();
        near(low, 0.711_170_8);
        near(high, 0.866_633_1);
        assert_eq!(ranks(&[10.0, 20.0, 10.0, 5.0]), [2.5, 4.0, 2.5, 1.0]);
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 6.0, 7.0, 8.0, 7.0]);
        near(spearman(&a, &b).unwrap(), 0.820_782_68);
        near(pearson(&a, &b).unwrap(), 0.832_050_29);
        assert_eq!(pearson(&a, &[1.0; 5]), None);
    }

    // scipy.stats.norm.interval(0.95, loc=np.mean(x), scale=scipy.stats.sem(x)) of x = [1, 2, 3, 4].
    #[test]
    fn the_interval_of_a_mean_follows_from_its_standard_error() {
        let [low, high] = mean_interval(10.0, 30.0, 4).unwrap();
        near(low, 1.234_848_69);
        near(high, 3.765_151_31);
    }

    #[test]
    fn intervals_contain_the_value() {
        let [low, high] = correlation_interval(0.82, 1379).unwrap();
        assert!(0.79 < low && low < 0.82 && 0.82 < high && high < 0.85);
        let [low, high] = mean_interval(10.0, 30.0, 5).unwrap();
        assert!(low < 2.0 && 2.0 < high);
        assert_eq!((proportion_interval(0, 0), correlation_interval(1.0, 10), mean_interval(1.0, 1.0, 1)), (None, None, None));
    }
}

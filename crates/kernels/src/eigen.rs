//! Eigenvectors of a symmetric matrix in f64: Householder tridiagonalization and the implicit QL method
//! (Bowdler, Martin, Reinsch and Wilkinson, *The QR and QL Algorithms for Symmetric Matrices*, 1968),
//! with rotations applied to many vectors at once.
//!
//! Sums have a fixed number of lanes and no fused multiply-add, so results depend on neither threads nor
//! instruction set.

use rayon::prelude::*;

/// Number of lanes of a sum, and of vectors to which rotations and reflections are applied at once.
const LANES: usize = 16;
/// Number of rotations that are buffered before they are applied.
const PENDING: usize = 1 << 16;
/// Maximum number of steps per eigenvalue; usually two suffice.
const STEPS: usize = 64;
/// Matrices up to this size are reduced by a single thread.
const SMALL: usize = 768;

/// The largest eigenvalues of a symmetric matrix and their eigenvectors.
pub struct Eigen {
    /// All eigenvalues in descending order.
    pub values: Vec<f64>,
    /// Normalized eigenvectors of the largest eigenvalues, `[count, size]`.
    pub vectors: Vec<f64>,
}

simd! {
    fn dot(a: &[f64], b: &[f64]) -> f64 {
        let mut lanes = [0f64; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for lane in 0..LANES {
                lanes[lane] += a[lane] * b[lane];
            }
        }
        let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
        lanes.iter().sum::<f64>() + rest
    }
}

simd! {
    /// `row -= a · x + b · y`.
    fn subtract(row: &mut [f64], a: f64, x: &[f64], b: f64, y: &[f64]) {
        for ((out, x), y) in row.iter_mut().zip(x).zip(y) {
            *out -= a * x + b * y;
        }
    }
}

simd! {
    /// Applies rotations to pairs of adjacent rows.
    fn rotate(rows: &mut [[f64; LANES]], rotations: &[(u32, f64, f64)]) {
        for (at, c, s) in rotations {
            if let Some([low, high]) = rows.get_mut(*at as usize..*at as usize + 2) {
                for lane in 0..LANES {
                    let (x, y) = (low[lane], high[lane]);
                    high[lane] = s * x + c * y;
                    low[lane] = c * x - s * y;
                }
            }
        }
    }
}

simd! {
    /// `x -= factor · v (vᵀ x)` for the columns `x` of the rows.
    fn reflect(rows: &mut [[f64; LANES]], v: &[f64], factor: f64) {
        let mut sums = [0f64; LANES];
        for (row, v) in rows.iter().zip(v) {
            for lane in 0..LANES {
                sums[lane] += row[lane] * v;
            }
        }
        for (row, v) in rows.iter_mut().zip(v) {
            for lane in 0..LANES {
                row[lane] -= factor * v * sums[lane];
            }
        }
    }
}

/// A tridiagonal matrix `Qᵀ A Q`.
struct Tridiagonal {
    diagonal: Vec<f64>,
    /// Off-diagonal elements, followed by a zero.
    off_diagonal: Vec<f64>,
    /// `Q` as a product of reflections `1 - f v vᵀ`: `f`, and the elements of `v` after the index of the
    /// step.
    reflections: Vec<(f64, Vec<f64>)>,
}

fn reduce(mut matrix: Vec<f64>, size: usize) -> Tridiagonal {
    let mut found = Tridiagonal { diagonal: vec![0.0; size], off_diagonal: vec![0.0; size], reflections: Vec::new() };
    for step in 0..size {
        found.diagonal[step] = matrix[step * size + step];
        let mut v = matrix[step * size + step + 1..(step + 1) * size].to_vec();
        let Some(first) = v.first().copied() else { break };
        let norm = dot(&v, &v).sqrt();
        // The sign that avoids cancellation.
        let to = if first > 0.0 { -norm } else { norm };
        found.off_diagonal[step] = to;
        let factor = if norm > 0.0 { 1.0 / (norm * (norm + first.abs())) } else { 0.0 };
        v[0] -= to;
        if factor > 0.0 {
            let rest = &mut matrix[(step + 1) * size..];
            let serial = if v.len() <= SMALL { v.len() } else { 16 };
            let mut p = vec![0.0; v.len()];
            p.par_chunks_mut(serial).zip(rest.par_chunks(serial * size)).for_each(|(p, rows)| {
                p.iter_mut().zip(rows.chunks_exact(size)).for_each(|(p, row)| *p = factor * dot(&row[step + 1..], &v));
            });
            let half = factor / 2.0 * dot(&p, &v);
            let w: Vec<f64> = p.iter().zip(&v).map(|(p, v)| p - half * v).collect();
            rest.par_chunks_mut(serial * size).zip(v.par_chunks(serial).zip(w.par_chunks(serial))).for_each(|(rows, (own_v, own_w))| {
                for ((row, a), b) in rows.chunks_exact_mut(size).zip(own_v).zip(own_w) {
                    subtract(&mut row[step + 1..], *a, &w, *b, &v);
                }
            });
        }
        found.reflections.push((factor, v));
    }
    found
}

/// Vectors in lanes, `[groups][size][LANES]`.
struct Lanes {
    size: usize,
    values: Vec<[f64; LANES]>,
}

impl Lanes {
    fn zeros(size: usize, count: usize) -> Lanes {
        Lanes { size, values: vec![[0.0; LANES]; size * count.div_ceil(LANES)] }
    }

    fn each(&mut self, work: impl Fn(&mut [[f64; LANES]]) + Sync + Send) {
        self.values.par_chunks_mut(self.size.max(1)).for_each(work);
    }

    fn at(&mut self, row: usize, vector: usize) -> &mut f64 {
        &mut self.values[vector / LANES * self.size + row][vector % LANES]
    }
}

/// Replaces the diagonal of a tridiagonal matrix by its eigenvalues, and applies the rotations to
/// `vectors`. `None` if the iteration does not converge, for example because of NaN or infinite values.
fn solve(Tridiagonal { diagonal: d, off_diagonal: e, .. }: &mut Tridiagonal, vectors: &mut Lanes) -> Option<()> {
    let size = d.len();
    let largest = d.iter().zip(e.iter()).map(|(d, e)| d.abs() + e.abs()).fold(0.0, f64::max);
    let least = f64::EPSILON * largest;
    let mut pending: Vec<(u32, f64, f64)> = Vec::new();
    for l in 0..size {
        for step in 0.. {
            let m = (l..size - 1).find(|m| e[*m].abs() <= least).unwrap_or(size - 1);
            if m == l {
                break;
            }
            if step == STEPS {
                return None;
            }
            let g = (d[l + 1] - d[l]) / (2.0 * e[l]);
            let root = (g * g + 1.0).sqrt();
            let mut g = d[m] - d[l] + e[l] / (g + root.copysign(g));
            let (mut s, mut c, mut p) = (1.0, 1.0, 0.0);
            let mut ended = false;
            for i in (l..m).rev() {
                let (f, b) = (s * e[i], c * e[i]);
                let r = (f * f + g * g).sqrt();
                e[i + 1] = r;
                if r == 0.0 {
                    (d[i + 1], e[m]) = (d[i + 1] - p, 0.0);
                    ended = true;
                    break;
                }
                (s, c) = (f / r, g / r);
                g = d[i + 1] - p;
                let t = (d[i] - g) * s + 2.0 * c * b;
                p = s * t;
                d[i + 1] = g + p;
                g = c * t - b;
                pending.push((i as u32, c, s));
            }
            if !ended {
                d[l] -= p;
                e[l] = g;
                e[m] = 0.0;
            }
            if pending.len() >= PENDING {
                vectors.each(|rows| rotate(rows, &pending));
                pending.clear();
            }
        }
    }
    vectors.each(|rows| rotate(rows, &pending));
    d.iter().all(|value| value.is_finite()).then_some(())
}

impl Eigen {
    /// The eigenvectors of the `count` largest eigenvalues of a symmetric matrix `[size, size]`. `None`
    /// if a number is not finite.
    pub fn new(matrix: Vec<f64>, size: usize, count: usize) -> Option<Eigen> {
        let largest = matrix.iter().fold(0f64, |most, x| most.max(x.abs()));
        if !matrix.iter().all(|x| x.is_finite()) {
            return None;
        }
        // Scaling by a power of two is exact, and keeps squares away from the limits of the range.
        let scale = if largest > 0.0 { 2f64.powi(largest.log2().floor() as i32) } else { 1.0 };
        let mut reduced = reduce(matrix.into_iter().map(|x| x / scale).collect(), size);
        let mut all = Lanes::zeros(size, size);
        (0..size).for_each(|at| *all.at(at, at) = 1.0);
        solve(&mut reduced, &mut all)?;
        let mut order: Vec<usize> = (0..size).collect();
        order.sort_by(|a, b| reduced.diagonal[*b].total_cmp(&reduced.diagonal[*a]).then(a.cmp(b)));
        let count = count.min(size);
        let mut chosen = Lanes::zeros(size, count);
        for (vector, from) in order[..count].iter().enumerate() {
            (0..size).for_each(|at| *chosen.at(at, vector) = *all.at(*from, at));
        }
        chosen.each(|rows| {
            for (step, (factor, v)) in reduced.reflections.iter().enumerate().rev() {
                reflect(&mut rows[step + 1..], v, *factor);
            }
        });
        let vectors = (0..count).flat_map(|vector| (0..size).map(move |at| (vector, at))).map(|(vector, at)| *chosen.at(at, vector)).collect();
        Some(Eigen { values: order.iter().map(|at| reduced.diagonal[*at] * scale).collect(), vectors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dense::{gram, product};

    fn check(matrix: &[f64], size: usize, count: usize) {
        let found = Eigen::new(matrix.to_vec(), size, count).unwrap();
        let largest = found.values.iter().fold(1e-300f64, |most, x| most.max(x.abs()));
        assert!(found.values.windows(2).all(|pair| pair[0] >= pair[1]));
        let trace: f64 = (0..size).map(|at| matrix[at * size + at]).sum();
        assert!((trace - found.values.iter().sum::<f64>()).abs() <= 1e-12 * size as f64 * largest);
        let identity = gram(&found.vectors, size);
        assert!(identity.iter().enumerate().all(|(at, x)| (x - f64::from(at / count == at % count)).abs() < 1e-12), "{size} {count}");
        let image = product(&found.vectors, matrix, size, size);
        for (at, (image, vector)) in image.iter().zip(&found.vectors).enumerate() {
            assert!((image - found.values[at / size] * vector).abs() < 1e-13 * size as f64 * largest, "{size} {at}");
        }
    }

    #[test]
    fn vectors_are_eigenvectors() {
        for (size, rank, count) in [(1, 1, 1), (2, 2, 2), (3, 1, 3), (40, 40, 7), (70, 11, 70), (210, 210, 33)] {
            let root: Vec<f64> = (0..size * rank).map(|i| ((i * 7919 % 1013) as f64 / 500.0 - 1.0) * 10f64.powi((i % 5) as i32 - 3)).collect();
            check(&gram(&root, rank), size, count);
        }
        // Equal eigenvalues, and only zeros.
        let mut identity = vec![0.0; 900];
        (0..30).for_each(|at| identity[at * 31] = if at < 20 { 3e200 } else { -1e-200 });
        check(&identity, 30, 30);
        check(&vec![0.0; 100], 10, 4);
    }

    #[test]
    fn results_are_independent_of_threads() {
        let root: Vec<f64> = (0..300 * 300).map(|i| (i * 7919 % 1013) as f64 / 500.0 - 1.0).collect();
        let matrix = gram(&root, 300);
        let found = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| Eigen::new(matrix.clone(), 300, 20).unwrap());
        let (one, three) = (found(1), found(3));
        assert!(one.values == three.values && one.vectors == three.vectors);
        assert!(Eigen::new(vec![f64::NAN], 1, 1).is_none());
    }
}

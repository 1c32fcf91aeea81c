//! Linear equations with a symmetric positive matrix, in f64.

/// Replaces the lower triangle of a matrix `[n, n]` by its Cholesky factor; `false` when the matrix is not positive.
#[must_use]
pub fn factor(matrix: &mut [f64], n: usize) -> bool {
    for row in 0..n {
        let (above, rest) = matrix.split_at_mut(row * n);
        let current = &mut rest[..n];
        for column in 0..row {
            let other = &above[column * n..column * n + column + 1];
            let sum = current[column] - dot(&current[..column], &other[..column]);
            current[column] = sum / other[column];
        }
        let pivot = current[row] - dot(&current[..row], &current[..row]);
        if pivot.is_nan() || pivot <= 0.0 {
            return false;
        }
        current[row] = pivot.sqrt();
    }
    true
}

/// Solves `A x = b` in place, given the factor of `A`.
pub fn solve(factor: &[f64], n: usize, b: &mut [f64]) {
    for row in 0..n {
        let sum = b[row] - dot(&factor[row * n..row * n + row], &b[..row]);
        b[row] = sum / factor[row * n + row];
    }
    for row in (0..n).rev() {
        b[row] /= factor[row * n + row];
        let x = b[row];
        b[..row].iter_mut().zip(&factor[row * n..row * n + row]).for_each(|(b, l)| *b -= l * x);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0f64; 8];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f64>() + a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_solved_satisfies_the_equations() {
        let n = 20;
        let root: Vec<f64> = (0..n * n).map(|i| ((i * 7919 % 101) as f64 / 50.0) - 1.0).collect();
        let mut matrix = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                matrix[i * n + j] = (0..n).map(|k| root[i * n + k] * root[j * n + k]).sum::<f64>() + if i == j { 0.1 } else { 0.0 };
            }
        }
        let x: Vec<f64> = (0..n).map(|i| i as f64 - 7.0).collect();
        let mut b: Vec<f64> = (0..n).map(|i| (0..n).map(|j| matrix[i * n + j] * x[j]).sum()).collect();
        assert!(factor(&mut matrix, n));
        solve(&matrix, n, &mut b);
        assert!(b.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6), "{b:?}");
        assert!(!factor(&mut [1.0, 2.0, 2.0, 1.0], 2));
    }
}

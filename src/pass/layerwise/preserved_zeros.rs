//! Zeros of sparse weights, which rounding preserves.

use super::parallel::count_zeros;
use super::solver::Part;

/// Percentage of zeros from which a weight is considered sparse. Zeros of a sparse weight are preserved.
const SPARSE_PERCENT: u64 = 5;

/// Whether enough values of a layer are zero for its zeros to be preserved.
pub(super) fn is_sparse(values: &[f32]) -> bool {
    100 * count_zeros(values) as u64 >= SPARSE_PERCENT * values.len() as u64
}

/// Marks the zeros of sparse layers in a weight `[rows, size]`, which consists of rows of one or several
/// layers. Empty if no layer is sparse.
pub(super) fn preserved_zeros(values: &[f32], size: usize, layers: &[Part]) -> Vec<bool> {
    let (mut rest, mut parts) = (values, Vec::with_capacity(layers.len()));
    for Part { rows, .. } in layers {
        let (part, later) = rest.split_at((rows * size).min(rest.len()));
        rest = later;
        parts.push((part, is_sparse(part)));
    }
    if parts.iter().all(|(_, is_sparse)| !is_sparse) {
        return Vec::new();
    }
    parts.into_iter().flat_map(|(part, is_sparse)| part.iter().map(move |value| is_sparse && *value == 0.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_preserved_only_in_sparse_layers() {
        let values = [1.0, 0.0, 2.0, 3.0, 0.0, 4.0];
        let parts = |rows: &[usize]| rows.iter().map(|rows| Part { rows: *rows, fraction: 0.0 }).collect::<Vec<Part>>();
        assert_eq!(preserved_zeros(&values, 2, &parts(&[1, 1, 1])), [false, true, false, false, true, false]);
        let dense: Vec<f32> = (0..40).map(|at| if at == 3 { 0.0 } else { 1.0 }).collect();
        assert!(preserved_zeros(&dense, 2, &parts(&[20])).is_empty());
        let both = [&dense[..], &values].concat();
        let found = preserved_zeros(&both, 2, &parts(&[20, 3]));
        assert_eq!((found.len(), found.iter().position(|zero| *zero), found.iter().filter(|zero| **zero).count()), (46, Some(41), 2));
    }
}

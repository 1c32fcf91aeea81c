//! Column sums of matrices in f64.
//!
//! Each column is summed from its first to its last row by one thread, so results depend on neither
//! threads nor instruction set.

use rayon::prelude::*;

/// Number of columns per job.
pub const STRIPE: usize = 64;

simd! {
    fn stripe(values: &[f32], width: usize, first: usize, sums: &mut [f64], squares: &mut [f64]) {
        for row in values.chunks_exact(width) {
            for ((x, sum), square) in row[first..].iter().zip(&mut *sums).zip(&mut *squares) {
                let x = f64::from(*x);
                *sum += x;
                *square += x * x;
            }
        }
    }
}

/// For each column, the sum of its elements and the sum of their squares.
pub fn moments(values: &[f32], width: usize) -> [Vec<f64>; 2] {
    let (mut sums, mut squares) = (vec![0.0; width], vec![0.0; width]);
    if width > 0 {
        let stripes = sums.par_chunks_mut(STRIPE).zip(squares.par_chunks_mut(STRIPE)).enumerate();
        stripes.for_each(|(index, (sums, squares))| stripe(values, width, index * STRIPE, sums, squares));
    }
    [sums, squares]
}

simd! {
    fn stripe_of_magnitudes(values: &[f32], width: usize, first: usize, magnitudes: &mut [f64], squares: &mut [f64], largest: &mut [f32]) {
        for row in values.chunks_exact(width) {
            for (((x, magnitude), square), largest) in row[first..].iter().zip(&mut *magnitudes).zip(&mut *squares).zip(&mut *largest) {
                let x = x.abs();
                *largest = if x > *largest { x } else { *largest };
                let x = f64::from(x);
                *magnitude += x;
                *square += x * x;
            }
        }
    }
}

/// For each column, adds the magnitudes and squares of its elements to sums, and updates the largest
/// magnitude.
pub fn magnitudes(values: &[f32], width: usize, magnitudes: &mut [f64], squares: &mut [f64], largest: &mut [f32]) {
    if width > 0 {
        let sums = magnitudes.par_chunks_mut(STRIPE).zip(squares.par_chunks_mut(STRIPE));
        let stripes = sums.zip(largest.par_chunks_mut(STRIPE)).enumerate();
        stripes.for_each(|(index, ((magnitudes, squares), largest))| stripe_of_magnitudes(values, width, index * STRIPE, magnitudes, squares, largest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_by_hand() {
        let [sums, squares] = moments(&[1.0, 2.0, 3.0, -4.0, 5.0, 0.5], 3);
        assert_eq!((sums, squares), (vec![-3.0, 7.0, 3.5], vec![17.0, 29.0, 9.25]));
        let wide: Vec<f32> = (0..300).map(|i| i as f32).collect();
        assert_eq!(moments(&wide, 150)[0], (0..150).map(|i| f64::from(2 * i + 150)).collect::<Vec<_>>());
        assert_eq!(moments(&[], 0), [Vec::<f64>::new(), Vec::new()]);
        let (mut sums, mut squares, mut largest) = ([1.0; 2], [0.0; 2], [0.0; 2]);
        magnitudes(&[1.0, -2.0, -3.0, 0.5], 2, &mut sums, &mut squares, &mut largest);
        assert_eq!((sums, squares, largest), ([5.0, 3.5], [10.0, 4.25], [3.0, 2.0]));
    }
}

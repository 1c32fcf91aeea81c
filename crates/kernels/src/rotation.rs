//! Orthogonal matrices that rotate features: randomized Hadamard matrices, and random ones for other sizes.
//!
//! Sums have a fixed order and no fused multiply-add, so results depend on neither threads nor instruction
//! set.

/// Number of vectors that are rotated at once.
const LANES: usize = 32;
/// Largest order of the dense factor of a rotation.
const LARGEST_ORDER: usize = 8192;

simd! {
    /// Replaces `[a, b]` by `[a + b, a - b]` for all pairs of adjacent runs of `run` values.
    fn butterflies(values: &mut [f32], run: usize) {
        for pair in values.chunks_exact_mut(2 * run) {
            let (left, right) = pair.split_at_mut(run);
            for (a, b) in left.iter_mut().zip(right) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
    }
}

simd! {
    /// `Mᵀ V` for a matrix `M` `[order, order]` and `V` `[order, run]`.
    fn transposed_product(matrix: &[f32], values: &[f32], run: usize, product: &mut [f32]) {
        product.fill(0.0);
        let order = values.len() / run.max(1);
        for (factors, values) in matrix.chunks_exact(order.max(1)).zip(values.chunks_exact(run.max(1))) {
            for (factor, sums) in factors.iter().zip(product.chunks_exact_mut(run.max(1))) {
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += factor * value;
                }
            }
        }
    }
}

/// An orthogonal matrix `R` of size `order · 2^power`: `x R = (x ∘ signs) (F ⊗ H)` with a matrix `F` of size
/// `order` and Sylvester's Hadamard matrix `H` of size `2^power`. In a randomized Hadamard matrix (Ashkboos
/// et al., *QuaRot*, 2024), `F` is one of Paley's Hadamard matrices and the signs are random. Other sizes
/// have a random `F`, and neither `H` nor signs.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    order: usize,
    power: u32,
    /// `F`, scaled so that `R` is orthogonal.
    factor: Vec<f32>,
    signs: Vec<f32>,
    is_hadamard: bool,
}

impl Rotation {
    /// A random rotation; `uniform` returns random numbers in `[0, 1)`. `None` if the size is 0, or has no
    /// known Hadamard matrix and is too large for a dense one.
    pub fn random(size: usize, mut uniform: impl FnMut() -> f64) -> Option<Rotation> {
        let twos = if size == 0 { return None } else { size.trailing_zeros() };
        let odd = size >> twos;
        // The smallest order has the fastest transform.
        let mut orders = (0..=twos).map(|part| odd << part).take_while(|order| *order <= LARGEST_ORDER);
        if let Some((order, signs)) = orders.find_map(|order| Some((order, paley(order)?))) {
            let scale = 1.0 / (size as f64).sqrt();
            let factor = signs.into_iter().map(|sign| (f64::from(sign) * scale) as f32).collect();
            let signs = (0..size).map(|_| if uniform() < 0.5 { -1.0 } else { 1.0 }).collect();
            return Some(Rotation { order, power: (size / order).trailing_zeros(), factor, signs, is_hadamard: true });
        }
        (size <= LARGEST_ORDER).then(|| {
            let factor = orthogonal(size, uniform).into_iter().map(|value| value as f32).collect();
            Rotation { order: size, power: 0, factor, signs: vec![1.0; size], is_hadamard: false }
        })
    }

    /// Number of rows and columns.
    pub fn size(&self) -> usize {
        self.order << self.power
    }

    /// Size in memory in bytes.
    pub fn bytes(&self) -> usize {
        4 * (self.factor.len() + self.signs.len())
    }

    /// Short description, such as `Hadamard 36 x 16`.
    pub fn describe(&self) -> String {
        match (self.is_hadamard, self.order, self.power) {
            (false, order, _) => format!("random {order}"),
            (true, 1, power) => format!("Hadamard {}", 1usize << power),
            (true, order, 0) => format!("Hadamard {order}"),
            (true, order, power) => format!("Hadamard {order} x {}", 1usize << power),
        }
    }

    /// Rotates vectors, which are the columns of `vectors` `[size, lanes]`.
    fn rotate(&self, vectors: &mut Vec<f32>, product: &mut Vec<f32>) {
        let lanes = vectors.len() / self.size();
        for (values, sign) in vectors.chunks_exact_mut(lanes.max(1)).zip(&self.signs) {
            values.iter_mut().for_each(|value| *value *= sign);
        }
        (0..self.power).for_each(|step| butterflies(vectors, lanes << step));
        product.resize(vectors.len(), 0.0);
        transposed_product(&self.factor, vectors, lanes << self.power, product);
        std::mem::swap(vectors, product);
    }

    /// Multiplies `count` adjacent blocks of rows of a matrix, from row `first` on, by `Rᵀ` from the left.
    pub fn rotate_rows(&self, matrix: &mut [f32], columns: usize, first: usize, count: usize) {
        let (size, mut panel, mut product) = (self.size(), Vec::new(), Vec::new());
        let rows = matrix.chunks_exact_mut(columns.max(1)).skip(first).take(size.saturating_mul(count));
        let mut rows: Vec<&mut [f32]> = rows.collect();
        for block in rows.chunks_exact_mut(size) {
            for start in (0..columns).step_by(LANES) {
                let own = start..columns.min(start + LANES);
                panel.clear();
                block.iter().for_each(|row| panel.extend_from_slice(&row[own.clone()]));
                self.rotate(&mut panel, &mut product);
                let rotated = panel.chunks_exact(own.len());
                block.iter_mut().zip(rotated).for_each(|(row, values)| row[own.clone()].copy_from_slice(values));
            }
        }
    }

    /// Multiplies `count` adjacent blocks of columns of a matrix, from column `first` on, by `R` from the
    /// right.
    pub fn rotate_columns(&self, matrix: &mut [f32], columns: usize, first: usize, count: usize) {
        let (size, mut panel, mut product) = (self.size(), Vec::new(), Vec::new());
        for rows in matrix.chunks_mut(columns.max(1).saturating_mul(LANES)) {
            let lanes = rows.len() / columns.max(1);
            for left in (0..count).map(|block| first + block * size).take_while(|left| left + size <= columns) {
                panel.clear();
                panel.resize(size * lanes, 0.0);
                for (lane, row) in rows.chunks_exact(columns).enumerate() {
                    row[left..left + size].iter().enumerate().for_each(|(at, value)| panel[at * lanes + lane] = *value);
                }
                self.rotate(&mut panel, &mut product);
                for (lane, row) in rows.chunks_exact_mut(columns).enumerate() {
                    row[left..left + size].iter_mut().enumerate().for_each(|(at, value)| *value = panel[at * lanes + lane]);
                }
            }
        }
    }
}

/// A Hadamard matrix of this order from the quadratic residues modulo a prime (Paley, *On Orthogonal
/// Matrices*, 1933), or of order 1; `None` if these constructions have none.
fn paley(order: usize) -> Option<Vec<i8>> {
    if order == 1 {
        return Some(vec![1]);
    }
    let first = order.checked_sub(1).filter(|prime| prime % 4 == 3 && is_prime(*prime));
    if let Some(prime) = first {
        let residues = residues(prime);
        let element = |row: usize, column: usize| match (row, column) {
            _ if row == column => 1,
            (0, _) => 1,
            (_, 0) => -1,
            _ => residues[(prime + row - column) % prime],
        };
        return Some((0..order).flat_map(|row| (0..order).map(move |column| (row, column))).map(|(row, column)| element(row, column)).collect());
    }
    let prime = (order / 2).checked_sub(1).filter(|prime| order.is_multiple_of(4) && prime % 4 == 1 && is_prime(*prime))?;
    let residues = residues(prime);
    let element = |row: usize, column: usize| match (row / 2, column / 2) {
        (a, b) if a == b => [[1, -1], [-1, -1]][row % 2][column % 2],
        (a, b) => {
            let sign = if a == 0 || b == 0 { 1 } else { residues[(prime + a - b) % prime] };
            sign * [[1, 1], [1, -1]][row % 2][column % 2]
        }
    };
    Some((0..order).flat_map(|row| (0..order).map(move |column| (row, column))).map(|(row, column)| element(row, column)).collect())
}

fn is_prime(number: usize) -> bool {
    number > 1 && (2..).take_while(|divisor| divisor * divisor <= number).all(|divisor| !number.is_multiple_of(divisor))
}

/// For each number less than a prime, 0 for zero, 1 for squares modulo the prime, and -1 for others.
fn residues(prime: usize) -> Vec<i8> {
    let mut found = vec![-1; prime];
    (0..prime).for_each(|root| found[root * root % prime] = i8::from(root != 0));
    found
}

/// A random orthogonal matrix: the QR decomposition of a matrix of normally distributed numbers by the
/// Gram-Schmidt process, applied twice to preserve orthogonality.
fn orthogonal(size: usize, mut uniform: impl FnMut() -> f64) -> Vec<f64> {
    // Box and Muller, 1958: one of the two numbers.
    let mut normal = || (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    let mut matrix: Vec<f64> = (0..size * size).map(|_| normal()).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for row in 0..size {
        let (done, rest) = matrix.split_at_mut(row * size);
        let own = &mut rest[..size];
        for _ in 0..2 {
            for other in done.chunks_exact(size) {
                let projection = dot(own, other);
                own.iter_mut().zip(other).for_each(|(value, other)| *value -= projection * other);
            }
            let norm = dot(own, own).sqrt().max(f64::MIN_POSITIVE);
            own.iter_mut().for_each(|value| *value /= norm);
        }
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of a linear congruential generator.
    fn uniform(seed: u64) -> impl FnMut() -> f64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    fn rotation(size: usize, seed: u64) -> Rotation {
        Rotation::random(size, uniform(seed)).unwrap()
    }

    /// The elements of a rotation.
    fn elements(rotation: &Rotation) -> Vec<f32> {
        let size = rotation.size();
        let mut matrix: Vec<f32> = (0..size * size).map(|at| f32::from(u8::from(at / size == at % size))).collect();
        rotation.rotate_columns(&mut matrix, size, 0, 1);
        matrix
    }

    #[test]
    fn rotations_are_orthogonal() {
        for size in (1..=64).chain([72, 76, 84, 96, 100, 104, 108, 140, 180, 204, 288, 576, 896]) {
            let rotation = rotation(size, 7);
            let matrix = elements(&rotation);
            for (row, a) in matrix.chunks_exact(size).enumerate() {
                for (column, b) in matrix.chunks_exact(size).enumerate() {
                    let product: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    let expected = f64::from(u8::from(row == column));
                    assert!((product - expected).abs() < 1e-5, "{size}: {row}, {column}: {product}");
                }
            }
            if rotation.is_hadamard {
                let magnitude = 1.0 / (size as f32).sqrt();
                assert!(matrix.iter().all(|value| (value.abs() - magnitude).abs() < 1e-6), "{size}");
            }
        }
    }

    #[test]
    fn widths_of_published_models_have_hadamard_matrices() {
        for (size, described) in [
            (64, "Hadamard 64"),
            (80, "Hadamard 20 x 4"),
            (96, "Hadamard 12 x 8"),
            (128, "Hadamard 128"),
            (576, "Hadamard 36 x 16"),
            (896, "Hadamard 28 x 32"),
            (960, "Hadamard 60 x 16"),
            (1536, "Hadamard 12 x 128"),
            (2048, "Hadamard 2048"),
            (2560, "Hadamard 20 x 128"),
            (2880, "Hadamard 180 x 16"),
            (3072, "Hadamard 12 x 256"),
            (3584, "Hadamard 28 x 128"),
            (4096, "Hadamard 4096"),
            (5120, "Hadamard 20 x 256"),
            (6144, "Hadamard 12 x 512"),
            (7168, "Hadamard 28 x 256"),
            (18, "random 18"),
            (52, "random 52"),
        ] {
            assert_eq!(rotation(size, 1).describe(), described, "{size}");
        }
        assert!(Rotation::random(0, uniform(1)).is_none() && Rotation::random(8194, uniform(1)).is_none());
    }

    /// Blocks of rows and columns are rotated like separate vectors, with any number of lanes.
    #[test]
    fn rows_and_columns_of_a_matrix_are_rotated_in_blocks() {
        for (size, rows) in [(4, 3), (12, 40), (5, 70)] {
            let (rotation, columns) = (rotation(size, 3), 2 * size + 3);
            let matrix: Vec<f32> = (0..rows * columns).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect();
            let reference = elements(&rotation);
            let mut expected = matrix.clone();
            for row in 0..rows {
                for block in 0..2 {
                    for column in 0..size {
                        let value = |at: usize| f64::from(matrix[row * columns + 1 + block * size + at]) * f64::from(reference[at * size + column]);
                        expected[row * columns + 1 + block * size + column] = (0..size).map(value).sum::<f64>() as f32;
                    }
                }
            }
            let mut rotated = matrix.clone();
            rotation.rotate_columns(&mut rotated, columns, 1, 2);
            assert!(rotated.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{size}");
            let transposed =
                |matrix: &[f32], [high, wide]: [usize; 2]| (0..wide).flat_map(|x| (0..high).map(move |y| matrix[y * wide + x])).collect::<Vec<f32>>();
            let mut of_rows = transposed(&matrix, [rows, columns]);
            rotation.rotate_rows(&mut of_rows, rows, 1, 2);
            assert_eq!(transposed(&of_rows, [columns, rows]), rotated, "{size}");
        }
    }

    #[test]
    fn seeds_determine_rotations() {
        for size in [16, 18] {
            assert_eq!(rotation(size, 1), rotation(size, 1));
            assert_ne!(rotation(size, 1), rotation(size, 2));
        }
    }
}

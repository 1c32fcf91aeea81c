//! Comparison of fake-quantized values with the integer codes of another implementation.

/// Differences between the codes of two implementations, and sums of products of the values in steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CodeDifferences {
    /// Largest difference.
    pub largest: f64,
    /// Sums of squares of the given values, and of the own ones.
    pub squares: [f64; 2],
    /// Sum of products of both.
    pub products: f64,
}

impl CodeDifferences {
    /// Adds the differences of other values.
    pub fn merge(&mut self, other: &CodeDifferences) {
        self.largest = self.largest.max(other.largest);
        self.squares.iter_mut().zip(other.squares).for_each(|(sum, other)| *sum += other);
        self.products += other.products;
    }
}

const LANES: usize = 8;

/// Larger values in steps are counted as this one, so that their squares are finite.
const MOST: f64 = 1e18;

/// Differences by lane.
#[derive(Default)]
struct Lanes {
    largest: [f64; LANES],
    squares: [[f64; LANES]; 2],
    products: [f64; LANES],
}

impl Lanes {
    /// Compares values with codes, and replaces them by those of the codes.
    #[inline(always)]
    fn replace(&mut self, values: &mut [f32; LANES], codes: &[i16; LANES], scale: f32, zero: i16) {
        for lane in 0..LANES {
            // The division is exact enough to return the integer that was multiplied by the scale.
            let own = (f64::from(values[lane]) / f64::from(scale)).round_ties_even();
            let own = if own.is_nan() { 0.0 } else { own };
            let own = if own > -MOST { own } else { -MOST };
            let own = if own < MOST { own } else { MOST };
            let given = f64::from(i32::from(codes[lane]) - i32::from(zero));
            let difference = (given - own).abs();
            self.largest[lane] = if difference > self.largest[lane] { difference } else { self.largest[lane] };
            self.squares[0][lane] += given * given;
            self.squares[1][lane] += own * own;
            self.products[lane] += given * own;
            values[lane] = given as f32 * scale;
        }
    }
}

simd! {
    /// Compares values, which are multiples of `scale`, with as many codes, of which `zero` represents 0, and
    /// replaces the values by those of the codes.
    pub fn replace(values: &mut [f32], codes: &[i16], scale: f32, zero: i16) -> CodeDifferences {
        let mut lanes = Lanes::default();
        let ((blocks, rest), (given, last)) = (values.as_chunks_mut::<LANES>(), codes.as_chunks::<LANES>());
        for (values, codes) in blocks.iter_mut().zip(given) {
            lanes.replace(values, codes, scale, zero);
        }
        // Zeros beyond the end do not change the sums.
        let (mut own, mut given) = ([0f32; LANES], [zero; LANES]);
        own[..rest.len()].copy_from_slice(rest);
        given[..last.len()].copy_from_slice(last);
        lanes.replace(&mut own, &given, scale, zero);
        rest.copy_from_slice(&own[..rest.len()]);
        let sum = |lanes: [f64; LANES]| lanes.iter().sum();
        CodeDifferences { largest: lanes.largest.into_iter().fold(0.0, f64::max), squares: lanes.squares.map(sum), products: sum(lanes.products) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_compared_and_replace_values() {
        let (scale, zero) = (0.03f32, 128i16);
        for count in [0, 1, 7, 8, 9, 1000] {
            let own: Vec<i16> = (0..count).map(|at: i32| (at * 37 % 255) as i16).collect();
            let given: Vec<i16> = own.iter().enumerate().map(|(at, code)| if at % 5 == 3 { code - 2 } else { *code }).collect();
            let mut values: Vec<f32> = own.iter().map(|code| f32::from(code - zero) * scale).collect();
            let found = replace(&mut values, &given, scale, zero);
            assert_eq!(values, given.iter().map(|code| f32::from(code - zero) * scale).collect::<Vec<_>>());
            let sum = |term: fn(f64, f64) -> f64| given.iter().zip(&own).map(|(a, b)| term(f64::from(a - zero), f64::from(b - zero))).sum::<f64>();
            let largest = if count > 3 { 2.0 } else { 0.0 };
            let squares = [sum(|a, _| a * a), sum(|_, b| b * b)];
            assert_eq!(found, CodeDifferences { largest, squares, products: sum(|a, b| a * b) }, "{count}");
        }
    }

    #[test]
    fn unusual_values_have_finite_sums() {
        let found = replace(&mut [f32::NAN, f32::INFINITY, -1e30, 0.5], &[3, 1, 1, 2], 0.25, 1);
        assert_eq!(found.largest, MOST);
        assert!(found.squares.iter().chain([&found.products]).all(|sum| sum.is_finite()));
    }
}

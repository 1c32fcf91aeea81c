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

/// Compares a value in steps with a code. Returns the values in steps, the given one first.
#[inline(always)]
fn steps(value: f32, code: i16, scale: f64, zero: i16) -> [f64; 2] {
    // The division is exact enough to return the integer that was multiplied by the scale.
    let own = (f64::from(value) / scale).round_ties_even();
    let own = if own.is_nan() { 0.0 } else { own };
    let own = if own > -MOST { own } else { -MOST };
    [f64::from(i32::from(code) - i32::from(zero)), if own < MOST { own } else { MOST }]
}

simd! {
    /// Compares values, which are multiples of `scale`, with as many codes, of which `zero` represents 0, and
    /// replaces the values by those of the codes.
    pub fn replace(values: &mut [f32], codes: &[i16], scale: f32, zero: i16) -> CodeDifferences {
        let (mut largest, mut squares, mut products) = ([0f64; LANES], [[0f64; LANES]; 2], [0f64; LANES]);
        for (values, codes) in values.chunks_mut(LANES).zip(codes.chunks(LANES)) {
            // Codes of zero beyond the end do not change the sums.
            let (mut own, mut given) = ([0f32; LANES], [zero; LANES]);
            own[..values.len()].copy_from_slice(values);
            given[..codes.len()].copy_from_slice(codes);
            for lane in 0..LANES {
                let [given, computed] = steps(own[lane], given[lane], f64::from(scale), zero);
                let difference = (given - computed).abs();
                largest[lane] = if difference > largest[lane] { difference } else { largest[lane] };
                squares[0][lane] += given * given;
                squares[1][lane] += computed * computed;
                products[lane] += given * computed;
                own[lane] = given as f32 * scale;
            }
            let count = values.len();
            values.copy_from_slice(&own[..count]);
        }
        let sum = |lanes: [f64; LANES]| lanes.iter().sum();
        CodeDifferences { largest: largest.into_iter().fold(0.0, f64::max), squares: squares.map(sum), products: sum(products) }
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

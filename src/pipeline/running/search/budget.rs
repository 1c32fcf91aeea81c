//! Limits of a search.

use std::fmt;
use std::str::FromStr;

use super::Point;
use crate::error::ParseError;
use crate::pass::amount::parse_fraction;
use crate::store::ByteSize;

/// A limit of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Budget {
    /// Mean bits of the quantized weights, with scales: `4.5bits`.
    Bits(f64),
    /// Size of all weights: `300MB`.
    Bytes(u64),
    /// Size of all weights relative to the input: `0.25` or `25%`.
    Ratio(f64),
    /// KL divergence from the original model, in nats per token.
    Loss(f64),
}

impl Budget {
    /// Whether a point is small enough. `input` is the size of the input.
    pub(super) fn allows(self, point: &Point, input: u64) -> bool {
        match self {
            Budget::Bits(bits) => point.bits <= bits,
            Budget::Bytes(bytes) => point.bytes <= bytes,
            Budget::Ratio(ratio) => point.bytes as f64 <= ratio * input as f64,
            Budget::Loss(limit) => point.predicted <= limit,
        }
    }

    /// The limit of the same kind that a point meets.
    pub(super) fn nearest(self, point: &Point, input: u64) -> Budget {
        // Rounded so that the displayed limit can be met.
        match self {
            Budget::Bits(_) => Budget::Bits((point.bits * 1000.0).ceil() / 1000.0),
            Budget::Bytes(_) => Budget::Bytes(point.bytes),
            Budget::Ratio(_) => Budget::Ratio((point.bytes as f64 / input.max(1) as f64 * 1000.0).ceil() / 1000.0),
            Budget::Loss(_) => Budget::Loss(point.predicted),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Bits(bits) => write!(f, "{bits}bits"),
            Budget::Bytes(bytes) => write!(f, "{bytes}B"),
            Budget::Ratio(ratio) => write!(f, "{ratio}"),
            Budget::Loss(loss) => write!(f, "{loss} nats"),
        }
    }
}

impl FromStr for Budget {
    type Err = ParseError;

    /// Parses a size.
    fn from_str(text: &str) -> Result<Budget, ParseError> {
        let expected = || ParseError::from(format!("`{text}` is not a number of bits like `4.5bits`, a size like `300MB`, or a fraction like `0.25`"));
        let positive = |number: f64| if number.is_finite() && number > 0.0 { Ok(number) } else { Err(expected()) };
        if let Some(bits) = ["bits", "bit"].into_iter().find_map(|unit| text.strip_suffix(unit)) {
            return bits.trim().parse().map_err(|_| expected()).and_then(positive).map(Budget::Bits);
        }
        if let Some(ratio) = parse_fraction(text) {
            return positive(ratio).and_then(|ratio| if ratio <= 1.0 { Ok(Budget::Ratio(ratio)) } else { Err(expected()) });
        }
        text.parse::<ByteSize>().map(|size| Budget::Bytes(size.0)).map_err(|_| expected())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_bits_sizes_and_fractions() {
        for (text, budget) in [
            ("4.5bits", Budget::Bits(4.5)),
            ("4 bits", Budget::Bits(4.0)),
            ("300MB", Budget::Bytes(300_000_000)),
            ("0.25", Budget::Ratio(0.25)),
            ("25%", Budget::Ratio(0.25)),
        ] {
            assert_eq!(text.parse(), Ok(budget), "{text}");
        }
        for text in ["", "bits", "0bits", "-1bits", "nanbits", "2", "0", "1.5", "MB", "inf"] {
            assert!(text.parse::<Budget>().unwrap_err().to_string().contains("is not a number of bits"), "{text}");
        }
    }

    /// The limit that an error suggests can be met.
    #[test]
    fn the_nearest_limit_is_met() {
        let point = Point { reference: None, bits: 4.123_456, bytes: 1_234_567, predicted: 0.123_456_789, measured: None, options: Vec::new() };
        for budget in [Budget::Bits(1.0), Budget::Bytes(1), Budget::Ratio(0.01), Budget::Loss(1e-9)] {
            assert!(!budget.allows(&point, 7_654_321) && budget.nearest(&point, 7_654_321).allows(&point, 7_654_321), "{budget}");
        }
    }
}

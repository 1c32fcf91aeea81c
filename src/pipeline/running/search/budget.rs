//! Limits of a search.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::Point;
use crate::error::ParseError;
use crate::model::Model;
use crate::ratio::{parse_fraction, suggest_percentage};
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
    /// Percentage by which the score of the model is worse than that of the original: `0.5%`. Without
    /// labels, the cosine distance of the outputs from the original ones, in percent.
    Drop(f64),
    /// Latency in milliseconds: `5ms`.
    Latency(f64),
}

/// Seconds in the units of a time.
const UNITS: [(&str, f64); 7] = [("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("min", 60.0), ("m", 60.0), ("h", 3600.0), ("s", 1.0)];

/// Parses a time such as `5ms` or `10m`.
///
/// # Errors
/// The text is not a positive number with a unit, or is too large.
pub fn parse_time(text: &str) -> Result<Duration, ParseError> {
    let number = UNITS.into_iter().find_map(|(unit, seconds)| Some(text.trim().strip_suffix(unit)?.trim_end().parse::<f64>().ok()? * seconds));
    let time = number.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).filter(|time| !time.is_zero());
    time.ok_or_else(|| format!("`{text}` is not a time like `5ms`, `90s` or `10m`").into())
}

impl Budget {
    /// Parses a limit of the latency.
    ///
    /// # Errors
    /// The text is not a time.
    pub fn parse_latency(text: &str) -> Result<Budget, ParseError> {
        // Microseconds that are written are kept exactly.
        parse_time(text).map(|time| Budget::Latency(time.as_nanos() as f64 / 1e6))
    }

    /// Parses a limit of the loss of a score: a percentage, or a fraction below 1.
    ///
    /// # Errors
    /// The text is neither.
    pub fn parse_drop(text: &str) -> Result<Budget, ParseError> {
        let fraction = parse_fraction(text).filter(|fraction| (0.0..1.0).contains(fraction));
        // Written percentages are kept exactly.
        let percent = text.trim().strip_suffix('%').and_then(|percent| percent.trim_end().parse().ok());
        fraction.map(|fraction| Budget::Drop(percent.unwrap_or(100.0 * fraction))).ok_or_else(|| {
            let hint = suggest_percentage(parse_fraction(text).unwrap_or(0.0)).map_or_else(String::new, |hint| format!("; write {hint}"));
            format!("`{text}` is not a percentage like `0.5%` or a fraction like `0.005`, from 0 to below 1{hint}").into()
        })
    }

    /// Whether the limit is one of the size.
    pub(super) fn is_size(self) -> bool {
        matches!(self, Budget::Bits(_) | Budget::Bytes(_) | Budget::Ratio(_))
    }

    /// Its option.
    pub(super) fn option(self) -> &'static str {
        match self {
            Budget::Bits(_) | Budget::Bytes(_) | Budget::Ratio(_) => "--max-size",
            Budget::Loss(_) => "--max-kl",
            Budget::Drop(_) => "--max-loss",
            Budget::Latency(_) => "--latency",
        }
    }

    /// The largest size of the weights that the limit allows, in bytes; `None` if it does not limit the size.
    pub fn largest(self, model: &Model) -> Option<u64> {
        let input = model.stored_bytes();
        let largest = match self {
            Budget::Bits(bits) => (bits / 8.0 * model.weights.by_name.values().map(|weight| weight.elements() as f64).sum::<f64>()) as u64,
            Budget::Bytes(bytes) => bytes,
            Budget::Ratio(ratio) => (ratio * input as f64) as u64,
            Budget::Loss(_) | Budget::Drop(_) | Budget::Latency(_) => return None,
        };
        Some(largest.min(input))
    }

    /// Whether a point is small enough. `input` is the size of the input.
    pub(super) fn allows(self, point: &Point, input: u64) -> bool {
        match self {
            Budget::Bits(bits) => point.bits <= bits,
            Budget::Bytes(bytes) => point.bytes <= bytes,
            Budget::Ratio(ratio) => point.bytes as f64 <= ratio * input as f64,
            Budget::Loss(limit) => point.predicted <= limit,
            // Only measurements determine the score.
            Budget::Drop(percent) => point.drop.is_some_and(|drop| 100.0 * drop <= percent),
            Budget::Latency(limit) => point.measured_ms.is_some_and(|time| time <= limit),
        }
    }

    /// The limit of the same kind that a point meets.
    pub(super) fn nearest(self, point: &Point, input: u64) -> Budget {
        // Rounded so that the displayed limit can be met.
        match self {
            Budget::Bits(_) => Budget::Bits((point.bits * 1000.0).ceil() / 1000.0),
            Budget::Bytes(_) => Budget::Bytes((rounded_up(point.bytes.max(1) as f64) as u64).max(point.bytes)),
            Budget::Ratio(_) => Budget::Ratio((point.bytes as f64 / input.max(1) as f64 * 1000.0).ceil() / 1000.0),
            Budget::Loss(_) => Budget::Loss(point.predicted),
            Budget::Drop(percent) => Budget::Drop(point.drop.map_or(percent, |drop| rounded_up(100.0 * drop))),
            Budget::Latency(limit) => Budget::Latency(point.measured_ms.map_or(limit, rounded_up)),
        }
    }
}

/// A number with three digits that is not smaller.
pub(super) fn rounded_up(number: f64) -> f64 {
    let unit = 10f64.powi(number.log10().floor() as i32 - 2);
    let rounded = (number / unit).ceil() * unit;
    if rounded >= number { rounded } else { number }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Bits(bits) => write!(f, "{bits}bits"),
            Budget::Bytes(bytes) => write!(f, "{}", ByteSize(*bytes)),
            Budget::Ratio(ratio) => write!(f, "{ratio}"),
            Budget::Loss(loss) => write!(f, "{loss} nats"),
            Budget::Drop(percent) => write!(f, "{percent}%"),
            Budget::Latency(milliseconds) => write!(f, "{milliseconds}ms"),
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
            let meant = suggest_percentage(ratio).filter(|_| !text.contains('%'));
            let meant = meant.map(|meant| ParseError::from(format!("`{text}` needs a unit: write {meant} of the input, `{text}bits`, or `{text}MB`")));
            return positive(ratio).and_then(|ratio| if ratio <= 1.0 { Ok(Budget::Ratio(ratio)) } else { Err(meant.unwrap_or_else(expected)) });
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
        // Sizes are written with the largest unit of which they are multiples.
        assert_eq!([1_000_000, 40_500_000, 40_487_041].map(|bytes| Budget::Bytes(bytes).to_string()), ["1MB", "40500KB", "40487041B"]);
        let error = "40".parse::<Budget>().unwrap_err().to_string();
        assert_eq!(error, "`40` needs a unit: write `0.4` or `40%` of the input, `40bits`, or `40MB`");
        for text in ["", "bits", "0bits", "-1bits", "nanbits", "200", "0", "150%", "MB", "inf"] {
            assert!(text.parse::<Budget>().unwrap_err().to_string().contains("is not a number of bits"), "{text}");
        }
    }

    #[test]
    fn losses_of_a_score_are_percentages_or_fractions() {
        for (text, percent) in [("0.5%", 0.5), ("0.005", 0.5), ("0%", 0.0), ("12 %", 12.0)] {
            assert_eq!(Budget::parse_drop(text), Ok(Budget::Drop(percent)), "{text}");
            assert_eq!(Budget::parse_drop(&Budget::Drop(percent).to_string()), Ok(Budget::Drop(percent)));
        }
        for text in ["", "%", "-1%", "100%", "1", "nan", "0.5 points"] {
            assert!(Budget::parse_drop(text).unwrap_err().to_string().contains("is not a percentage"), "{text}");
        }
        assert!(Budget::parse_drop("2").unwrap_err().to_string().contains("`2%`"));
    }

    #[test]
    fn times_have_a_unit() {
        for (text, seconds) in [("5ms", 0.005), ("2.5 s", 2.5), ("10m", 600.0), ("1min", 60.0), ("0.5h", 1800.0), ("20us", 2e-5), ("20µs", 2e-5)] {
            assert!((parse_time(text).unwrap().as_secs_f64() / seconds - 1.0).abs() < 1e-9, "{text}");
        }
        for text in ["", "5", "ms", "0ms", "-1ms", "nans", "infs", "1e30h", "5 MB"] {
            assert!(parse_time(text).unwrap_err().to_string().contains("is not a time like `5ms`"), "{text}");
        }
        for time in ["5ms", "0.35ms", "1500ms"] {
            assert_eq!(Budget::parse_latency(time).unwrap().to_string(), time);
        }
        assert_eq!(Budget::parse_latency("1.5s"), Ok(Budget::Latency(1500.0)));
    }

    #[test]
    fn suggested_limits_are_rounded_up() {
        for number in [0.013_912, 0.013_9, 1.0, 2.345_6e-7] {
            let rounded = rounded_up(number);
            assert!(rounded >= number && rounded <= 1.01 * number, "{number}: {rounded}");
        }
    }

    /// The limit that an error suggests can be met.
    #[test]
    fn the_nearest_limit_is_met() {
        let point =
            Point { bits: 4.123_456, bytes: 1_234_567, predicted: 0.123_456_789, drop: Some(0.012_345_6), measured_ms: Some(3.456_789), ..Point::default() };
        assert_eq!(Budget::Bytes(1).nearest(&point, 7_654_321).to_string(), "1240KB");
        for budget in [Budget::Bits(1.0), Budget::Bytes(1), Budget::Ratio(0.01), Budget::Loss(1e-9), Budget::Drop(1.0), Budget::Latency(3.0)] {
            assert!(!budget.allows(&point, 7_654_321) && budget.nearest(&point, 7_654_321).allows(&point, 7_654_321), "{budget}");
        }
    }
}

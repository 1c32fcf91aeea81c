//! Amounts to remove: fractions, counts and N:M patterns.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::ParseError;
use crate::ratio::{parse_fraction, suggest_percentage};

/// A number from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fraction(f64);

impl Fraction {
    /// Returns `None` if the number is outside of 0 to 1.
    pub(crate) fn new(value: f64) -> Option<Fraction> {
        (0.0..=1.0).contains(&value).then_some(Fraction(value))
    }
}

/// An amount to remove: a fraction (0.5, 50%) or a count (1000).
///
/// As in PyTorch, a whole number is a count and a number with a point is a fraction.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Amount {
    /// A fraction of the total, rounded to the nearest count, half to even.
    #[doc(hidden)]
    Fraction(Fraction),
    /// A count with its unit, written `50 units`.
    Count(u64),
    /// A whole number without a unit.
    #[doc(hidden)]
    Number(u64),
}

impl Amount {
    /// Creates a fraction of the total. Values outside of 0 to 1 are clamped, and NaN becomes 0.
    pub fn fraction(value: f64) -> Amount {
        Amount::Fraction(Fraction(if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) }))
    }

    /// Returns the fraction, or 0 for a count.
    #[doc(hidden)]
    pub fn share(self) -> f64 {
        match self {
            Amount::Fraction(Fraction(f)) => f,
            Amount::Count(_) | Amount::Number(_) => 0.0,
        }
    }

    /// Returns the count for this many weights, or `None` if there are fewer weights than the count.
    #[doc(hidden)]
    pub fn of(self, weights: u64) -> Option<u64> {
        match self {
            Amount::Fraction(Fraction(f)) => Some((f * weights as f64).round_ties_even() as u64),
            Amount::Count(count) | Amount::Number(count) => (count <= weights).then_some(count),
        }
    }

    /// Rejects a number from 1 to 100 without a unit, which may be meant as a percentage.
    /// The error suggests unambiguous notations; `counted` formats that of the count.
    pub(crate) fn require_unit(self, counted: impl FnOnce(u64) -> String) -> Result<(), String> {
        match self {
            Amount::Number(number @ 1..=100) => {
                let fraction = suggest_percentage(number as f64).unwrap_or_else(|| "`0.01` or `1%`".to_owned());
                Err(format!("{number} needs a unit: write {fraction} for a fraction, or {}", counted(number)))
            }
            _ => Ok(()),
        }
    }
}

const EXPECTED: &str = "a fraction from 0.0 to 1.0, a percentage like 50%, or a whole number";
const UNIT: &str = " units";

impl FromStr for Amount {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if let Some(count) = text.strip_suffix(UNIT).and_then(|count| count.parse().ok()) {
            return Ok(Amount::Count(count));
        }
        if let Ok(number) = text.parse() {
            return Ok(Amount::Number(number));
        }
        parse_fraction(text).and_then(Fraction::new).map(Amount::Fraction).ok_or_else(|| format!("`{text}` is not {EXPECTED}").into())
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Fraction(Fraction(value)) => write!(f, "{value:?}"),
            Amount::Count(count) | Amount::Number(count) => write!(f, "{count}"),
        }
    }
}

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Amount::Fraction(Fraction(value)) => serializer.serialize_f64(*value),
            Amount::Count(count @ 1..=100) => serializer.collect_str(&format_args!("{count}{UNIT}")),
            Amount::Count(count) | Amount::Number(count) => serializer.serialize_u64(*count),
        }
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Amount;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Amount, E> {
                Ok(Amount::Number(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Amount, E> {
                u64::try_from(value).map(Amount::Number).map_err(|_| E::custom(format!("amount {value} is not {EXPECTED}")))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Amount, E> {
                value.parse().map_err(E::custom)
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Amount, E> {
                Fraction::new(value).map(Amount::Fraction).ok_or_else(|| E::custom(format!("amount {value} is not {EXPECTED}")))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

/// Keep `n` of every `m` consecutive inputs, written `n:m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NOfM {
    /// Number of inputs to keep.
    pub n: usize,
    /// Size of a group of inputs.
    pub m: usize,
}

impl FromStr for NOfM {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parsed = text.split_once(':').and_then(|(n, m)| Some(NOfM { n: n.trim().parse().ok()?, m: m.trim().parse().ok()? }));
        match parsed {
            Some(pattern) if pattern.n <= pattern.m && (1..=1024).contains(&pattern.m) => Ok(pattern),
            _ => Err(format!("pattern `{text}` is not N:M with N no larger than M and M from 1 to 1024, like 2:4 (keep two of every four)").into()),
        }
    }
}

impl fmt::Display for NOfM {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.n, self.m)
    }
}

impl Serialize for NOfM {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NOfM {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<str>::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(feature = "cli")]
mod schema {
    use super::{Amount, Cow, NOfM};
    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

    impl JsonSchema for Amount {
        fn schema_name() -> Cow<'static, str> {
            "Amount".into()
        }
        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({ "anyOf": [
                { "type": "number", "minimum": 0.0, "maximum": 1.0, "description": "fraction" },
                { "type": "integer", "minimum": 0, "description": "number" },
                { "type": "string", "pattern": "^[0-9.]+ *(%|units)$", "description": "percentage, or number with its unit" }
            ] })
        }
    }

    impl JsonSchema for NOfM {
        fn schema_name() -> Cow<'static, str> {
            "NOfM".into()
        }
        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({ "type": "string", "pattern": "^[0-9]+:[0-9]+$", "description": "keep N of every M consecutive inputs" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_round_half_to_even_as_python_does() {
        assert_eq!(Amount::fraction(0.5).of(5), Some(2));
        assert_eq!(Amount::fraction(0.5).of(7), Some(4));
        assert_eq!(Amount::fraction(1.0).of(7), Some(7));
        assert_eq!(Amount::Count(8).of(7), None);
        assert_eq!([f64::NAN, -1.0, 2.0].map(|value| Amount::fraction(value).share()), [0.0, 0.0, 1.0]);
    }

    #[test]
    fn numbers_that_may_be_percentages_need_a_unit() {
        let needs = |amount: Amount| amount.require_unit(|count| format!("`{count} units`")).err();
        assert_eq!(needs(Amount::Number(50)).unwrap(), "50 needs a unit: write `0.5` or `50%` for a fraction, or `50 units`");
        assert_eq!(needs(Amount::Number(1)).unwrap(), "1 needs a unit: write `0.01` or `1%` for a fraction, or `1 units`");
        assert!(needs(Amount::Number(2)).is_some() && needs(Amount::Number(100)).is_some());
        for amount in [Amount::Number(0), Amount::Number(101), Amount::Count(50), Amount::fraction(1.0)] {
            assert_eq!(needs(amount), None);
        }
    }

    #[test]
    fn text_and_back() {
        for text in ["0.5", "1.0", "0.0", "17"] {
            assert_eq!(text.parse::<Amount>().unwrap().to_string(), text);
        }
        for text in ["1.5", "-1", "-0.1", "nan", "x", "", "150%", "-1%", "%", "50 %%", "units"] {
            assert!(text.parse::<Amount>().is_err(), "{text}");
        }
        assert_eq!("50%".parse(), Ok(Amount::fraction(0.5)));
        assert_eq!("12.5 %".parse(), Ok(Amount::fraction(0.125)));
        assert_eq!("50 units".parse(), Ok(Amount::Count(50)));
        for amount in [Amount::Count(1), Amount::Count(50), Amount::Count(1000), Amount::Number(1), Amount::Number(50), Amount::fraction(0.3)] {
            let again: Amount = serde_json::from_value(serde_json::to_value(amount).unwrap()).unwrap();
            assert_eq!(again.require_unit(|_| String::new()), amount.require_unit(|_| String::new()), "{amount:?}");
            assert_eq!(again.of(2000), amount.of(2000));
        }
        assert_eq!("2:4".parse::<NOfM>().unwrap(), NOfM { n: 2, m: 4 });
        for text in ["5:4", "2", "0:0", "1:9999", ":"] {
            assert!(text.parse::<NOfM>().is_err(), "{text}");
        }
    }
}

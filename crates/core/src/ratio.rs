//! Options that are ratios: a number such as 0.4, or a percentage such as 40%.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};

use crate::error::ParseError;

/// Parses a number or a percentage: `0.5` and `50%` are the same fraction.
pub fn parse_fraction(text: &str) -> Option<f64> {
    match text.trim().strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().ok().map(|percent| percent / 100.0),
        None => text.trim().parse().ok(),
    }
}

/// For a number above 1 and up to 100, which may be meant as a percentage, returns how to write it as a
/// fraction: "`0.5` or `50%`".
pub fn suggest_percentage(number: f64) -> Option<String> {
    // Without the rounding error of the division.
    let fraction = (number * 1e10).round() / 1e12;
    (number > 1.0 && number <= 100.0).then(|| format!("`{fraction:?}` or `{number}%`"))
}

/// Rejects a number from 2 to 100 without a percent sign. Larger ones and those below 2, which can be
/// factors, are left to the checks of the option.
fn require_no_percentage(number: f64) -> Result<f64, String> {
    match suggest_percentage(number).filter(|_| number >= 2.0) {
        Some(meant) => Err(format!("`{number}` is not a fraction: write {meant}")),
        None => Ok(number),
    }
}

/// Parses a ratio on the command line.
///
/// # Errors
/// The text is not a finite number or a percentage, or it is a percentage without its sign.
pub fn parse(text: &str) -> Result<f64, ParseError> {
    let number = parse_number(text)?;
    if text.contains('%') { Ok(number) } else { require_no_percentage(number).map_err(ParseError::from) }
}

fn parse_number(text: &str) -> Result<f64, ParseError> {
    let number = parse_fraction(text).filter(|number| number.is_finite());
    number.ok_or_else(|| ParseError::from(format!("`{text}` is not a fraction like 0.4 or a percentage like 40%")))
}

/// A number or a percentage in a recipe. Ratios reject percentages without their sign.
struct Number<const IS_RATIO: bool>(f64);

type Ratio = Number<true>;

impl<'de, const IS_RATIO: bool> Deserialize<'de> for Number<IS_RATIO> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form<const IS_RATIO: bool>;
        impl<const IS_RATIO: bool> Visitor<'_> for Form<IS_RATIO> {
            type Value = Number<IS_RATIO>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a fraction like 0.4 or a percentage like 40%")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                let parsed = if IS_RATIO { parse(text) } else { parse_number(text) };
                parsed.map(Number).map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                self.visit_f64(number as f64)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                self.visit_f64(number as f64)
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                let checked = if IS_RATIO { require_no_percentage(number) } else { Ok(number) };
                checked.map(Number).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Form::<IS_RATIO>)
    }
}

/// Deserializes a ratio.
pub fn ratio<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ratio::deserialize(deserializer).map(|ratio| ratio.0)
}

/// Deserializes a ratio that may be missing.
pub fn optional_ratio<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<Ratio>::deserialize(deserializer)?.map(|ratio| ratio.0))
}

/// Deserializes a difference of scores that may be missing: a perplexity can rise by 5.
pub fn optional_difference<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<Number<false>>::deserialize(deserializer)?.map(|difference| difference.0))
}

/// Deserializes a list of ratios.
pub fn ratios<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    Ok(Vec::<Ratio>::deserialize(deserializer)?.into_iter().map(|ratio| ratio.0).collect())
}

/// JSON schemas of options.
#[cfg(feature = "cli")]
pub mod schema {
    use schemars::{Schema, SchemaGenerator, json_schema};

    /// JSON schema of a ratio.
    pub fn ratio(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "number" }, { "type": "string", "pattern": "^[0-9.]+ *%$", "description": "percentage" }] })
    }

    /// JSON schema of a ratio that may be missing.
    pub fn optional_ratio(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "number" }, { "type": "string", "pattern": "^[0-9.]+ *%$", "description": "percentage" }, { "type": "null" }] })
    }

    /// JSON schema of a list of ratios.
    pub fn ratios(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "array", "items": ratio(generator) })
    }

    /// JSON schema of a batch size: a number of samples, or `auto`.
    pub fn batch_size(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "const": "auto" }] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_fractions_or_percentages() {
        for (text, number) in [("0.4", 0.4), ("40%", 0.4), ("40 %", 0.4), ("1", 1.0), ("1.5", 1.5), ("150%", 1.5), ("-0.1", -0.1), ("1000", 1000.0)] {
            assert_eq!(parse(text).unwrap(), number, "{text}");
        }
        assert_eq!(parse("40").unwrap_err().to_string(), "`40` is not a fraction: write `0.4` or `40%`");
        assert_eq!(parse("99.9").unwrap_err().to_string(), "`99.9` is not a fraction: write `0.999` or `99.9%`");
        for text in ["", "%", "half", "nan", "inf", "40%%"] {
            assert!(parse(text).unwrap_err().to_string().contains("0.4 or a percentage like 40%"), "{text}");
        }
    }

    #[test]
    fn values_of_recipes_are_read_alike() {
        let read = |text: &str| ratio(&mut serde_json::Deserializer::from_str(text)).map_err(|e| e.to_string());
        assert_eq!([read("0.4"), read("\"40%\""), read("1")], [Ok(0.4), Ok(0.4), Ok(1.0)]);
        for text in ["40", "40.0", "\"40\""] {
            assert!(read(text).unwrap_err().contains("write `0.4` or `40%`"), "{text}");
        }
        assert!(read("true").unwrap_err().contains("a percentage like 40%"));
        let optional = |text: &str| optional_ratio(&mut serde_json::Deserializer::from_str(text)).unwrap();
        assert_eq!((optional("null"), optional("\"5%\"")), (None, Some(0.05)));
        let difference = |text: &str| optional_difference(&mut serde_json::Deserializer::from_str(text)).unwrap();
        assert_eq!(["5", "2.5", "\"5%\"", "null"].map(difference), [Some(5.0), Some(2.5), Some(0.05), None]);
        assert_eq!(ratios(&mut serde_json::Deserializer::from_str("[0.25, \"50%\"]")).unwrap(), [0.25, 0.5]);
    }
}

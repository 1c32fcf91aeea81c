//! Options of structured pruning in recipes and on the command line.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::analysis::GroupUnit;
use crate::error::ParseError;
use crate::pass::Amount;
use crate::ratio::parse_fraction;

/// Part of a model that can be pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PrunedPart {
    /// Attention heads; heads that share keys and values are removed jointly
    Heads,
    /// Neurons between two linear layers
    Mlp,
    /// Channels of convolutions
    Channels,
    /// The width of the residual stream
    Hidden,
    /// Whole layers of a transformer
    Layers,
    /// Whole experts of a mixture of experts, ranked by their use on calibration data
    Experts,
}

impl PrunedPart {
    /// Parts that are removed completely and have no units.
    pub(super) const WHOLE: [PrunedPart; 2] = [PrunedPart::Layers, PrunedPart::Experts];

    /// The group unit of this part; `None` for layers and experts.
    #[doc(hidden)]
    pub fn unit(self) -> Option<GroupUnit> {
        match self {
            PrunedPart::Heads => Some(GroupUnit::Heads),
            PrunedPart::Mlp => Some(GroupUnit::Mlp),
            PrunedPart::Channels => Some(GroupUnit::Channels),
            PrunedPart::Hidden => Some(GroupUnit::Hidden),
            PrunedPart::Layers | PrunedPart::Experts => None,
        }
    }
}

impl fmt::Display for PrunedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit() {
            Some(unit) => unit.fmt(f),
            None if *self == PrunedPart::Experts => f.write_str("experts"),
            None => f.write_str("layers"),
        }
    }
}

impl FromStr for PrunedPart {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parts = [PrunedPart::Heads, PrunedPart::Mlp, PrunedPart::Channels, PrunedPart::Hidden, PrunedPart::Layers, PrunedPart::Experts];
        parts
            .into_iter()
            .find(|part| part.to_string() == text)
            .ok_or_else(|| format!("unknown part `{text}`; the parts are heads, mlp, channels, hidden, layers, experts").into())
    }
}

/// Amounts to remove of each group: one amount for all parts, or one per part.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Amounts {
    /// One amount for all parts.
    All(Amount),
    /// Amounts by part.
    Each(BTreeMap<PrunedPart, Amount>),
}

impl Amounts {
    /// The amount of a part, if one is specified.
    pub(crate) fn get(&self, part: PrunedPart) -> Option<Amount> {
        match self {
            Amounts::All(amount) => Some(*amount),
            Amounts::Each(amounts) => amounts.get(&part).copied(),
        }
    }
}

impl FromStr for Amounts {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if !text.contains('=') {
            return text.parse().map(Amounts::All);
        }
        let pair = |pair: &str| {
            let (part, amount) = pair.split_once('=').ok_or_else(|| format!("`{pair}` is not PART=AMOUNT"))?;
            Ok::<_, ParseError>((part.trim().parse()?, amount.trim().parse()?))
        };
        text.split(',').map(pair).collect::<Result<_, _>>().map(Amounts::Each)
    }
}

impl<'de> Deserialize<'de> for Amounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = Amounts;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a fraction from 0.0 to 1.0, a percentage like 50%, a whole number of units, or an amount per part, like { heads: 0.25, mlp: 0.5 }")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Amounts, E> {
                Amount::deserialize(de::value::U64Deserializer::new(value)).map(Amounts::All)
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Amounts, E> {
                Amount::deserialize(de::value::I64Deserializer::new(value)).map(Amounts::All)
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Amounts, E> {
                Amount::deserialize(de::value::F64Deserializer::new(value)).map(Amounts::All)
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Amounts, E> {
                value.parse().map(Amounts::All).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Amounts, A::Error> {
                BTreeMap::deserialize(de::value::MapAccessDeserializer::new(map)).map(Amounts::Each)
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// Remaining fraction of the cost of the model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(rename = "CostTarget"))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Target {
    /// Multiply-accumulate operations for one sample: a text of 128 tokens, or an image of 224 x 224 if
    /// the size is dynamic
    Macs(
        #[serde(deserialize_with = "crate::ratio::ratio")]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
        f64,
    ),
    /// Number of parameters
    Params(
        #[serde(deserialize_with = "crate::ratio::ratio")]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
        f64,
    ),
    /// Latency of the built-in executor on synthetic samples
    Latency(
        #[serde(deserialize_with = "crate::ratio::ratio")]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
        f64,
    ),
}

impl Target {
    /// The fraction.
    pub(crate) fn fraction(self) -> f64 {
        let (Target::Macs(fraction) | Target::Params(fraction) | Target::Latency(fraction)) = self;
        fraction
    }

    /// Name of the cost.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Target::Macs(_) => "macs",
            Target::Params(_) => "params",
            Target::Latency(_) => "latency",
        }
    }
}

impl FromStr for Target {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || ParseError::from(format!("target `{text}` is not macs=F, params=F or latency=F with F between 0 and 1"));
        let (name, fraction) = text.split_once('=').ok_or_else(wrong)?;
        let fraction = parse_fraction(fraction).ok_or_else(wrong)?;
        match name.trim() {
            "macs" => Ok(Target::Macs(fraction)),
            "params" => Ok(Target::Params(fraction)),
            "latency" => Ok(Target::Latency(fraction)),
            _ => Err(wrong()),
        }
    }
}

/// Importance criterion of units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(rename = "UnitImportance"))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Importance {
    /// `activation` for transformers if the recipe has calibration or training data; else `l1`
    #[default]
    Auto,
    /// Sum of the magnitudes of the weights of a unit, over all layers that write or read it
    L1,
    /// Sum of squares
    L2,
    /// First-order change of the loss on calibration data
    Taylor,
    /// Magnitude of the activations of a unit on calibration data, times the weights of the layers that
    /// read it
    Activation,
}

/// Adjustment of the layers that read removed units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Repair {
    /// No adjustment
    #[default]
    None,
    /// Add the mean contribution of removed units to the bias; recompute statistics of batch normalization
    Bias,
    /// Refit the remaining weights by least squares; recompute statistics of batch normalization
    LeastSquares,
}

#[cfg(feature = "cli")]
mod schema {
    use super::{Amount, Amounts};
    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

    impl JsonSchema for Amounts {
        fn schema_name() -> std::borrow::Cow<'static, str> {
            "Amounts".into()
        }
        fn json_schema(generator: &mut SchemaGenerator) -> Schema {
            let amount = generator.subschema_for::<Amount>();
            let part = || amount.clone();
            json_schema!({ "anyOf": [part(), {
                "type": "object",
                "properties": { "heads": part(), "mlp": part(), "channels": part(), "hidden": part(), "layers": part(), "experts": part() },
                "additionalProperties": false
            }] })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_yaml() {
        let each = Amounts::Each([(PrunedPart::Heads, Amount::fraction(0.25)), (PrunedPart::Mlp, Amount::Number(8))].into());
        assert_eq!("heads=0.25,mlp=8".parse::<Amounts>().unwrap(), each);
        assert_eq!(serde_saphyr::from_str::<Amounts>("{ heads: 0.25, mlp: 8 }").unwrap(), each);
        assert_eq!(serde_saphyr::from_str::<Amounts>("0.5").unwrap(), Amounts::All(Amount::fraction(0.5)));
        assert_eq!(serde_saphyr::from_str::<Target>("{ macs: 0.5 }").unwrap(), Target::Macs(0.5));
        assert_eq!("params=0.6".parse::<Target>().unwrap(), Target::Params(0.6));
        for text in ["heads", "legs=0.5", "heads=2.5", "heads=0.5,"] {
            assert!(text.parse::<Amounts>().is_err(), "{text}");
        }
        assert!("macs".parse::<Target>().is_err() && "time=1".parse::<Target>().is_err());
    }
}

//! Loss options of a recipe. A number in place of the options is the weight.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ParseError, Result};

/// Distance between two vectors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Mean squared error
    #[default]
    Mse,
    /// One minus the cosine similarity
    Cosine,
}

/// Quantity of an attention layer that is compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum AttentionTarget {
    /// Attention maps, head by head
    #[default]
    Maps,
    /// Self-attention relations of queries, keys and values of the last layer (MiniLMv2)
    Relations,
}

/// Divergence of the student's distribution from the teacher's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SoftDivergence {
    /// KL(teacher ‖ student): the student covers every token that the teacher considers possible
    #[default]
    Forward,
    /// KL(student ‖ teacher): the student concentrates on the teacher's likely tokens
    Reverse,
    /// Generalized Jensen–Shannon divergence (GKD)
    JensenShannon,
    /// Total variation distance: the rejection rate of speculative decoding
    TotalVariation,
    /// KL divergence and total variation, weighted by the acceptance rate: for drafts of speculative decoding
    Acceptance,
}

macro_rules! losses {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr,)* })+) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
            #[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
            #[serde(deny_unknown_fields, default)]
            pub struct $name {
                /// Factor on the loss
                pub weight: f64,
                $($(#[$field_doc])* pub $field: $type,)*
            }

            impl Default for $name {
                fn default() -> Self {
                    Self { weight: 1.0, $($field: $default,)* }
                }
            }

            impl From<f64> for $name {
                fn from(weight: f64) -> Self {
                    Self { weight, ..Self::default() }
                }
            }
        )+
    };
}

losses! {
    /// Soft targets: the teacher's distribution over classes or tokens.
    SoftLoss {
        /// Temperature that the logits are divided by
        temperature: f64 = 2.0,
        /// Divergence of the student's distribution from the teacher's
        divergence: SoftDivergence = SoftDivergence::Forward,
        /// Share of the teacher in the mean distribution of `jensen-shannon`, between 0 and 1 [default: 0.5]
        #[serde(skip_serializing_if = "Option::is_none")]
        mix: Option<f64> = None,
    }
    /// Hard targets: labels, or the next token.
    HardLoss {
        /// Probability mass that is distributed uniformly over all classes
        label_smoothing: f64 = 0.0,
    }
    /// Hidden states, layer by layer.
    HiddenLoss {
        /// Distance measure
        distance: Distance = Distance::Mse,
        /// Pairs of student and teacher layers, numbered from 0 [default: evenly spread, last to last]
        #[serde(skip_serializing_if = "Vec::is_empty")]
        layers: Vec<(usize, usize)> = Vec::new(),
        /// Pairs of value names of the two graphs, for models without repeated layers
        #[serde(skip_serializing_if = "Vec::is_empty")]
        values: Vec<(String, String)> = Vec::new(),
    }
    /// Attention, layer by layer, or relations of the last layer.
    AttentionLoss {
        /// Quantity that is compared
        target: AttentionTarget = AttentionTarget::Maps,
        /// Pairs of student and teacher layers, numbered from 0 [default: evenly spread; relations: the
        /// last layers]
        #[serde(skip_serializing_if = "Vec::is_empty")]
        layers: Vec<(usize, usize)> = Vec::new(),
        /// Number of relation heads, a divisor of the columns of all queries, keys and values [default: the
        /// largest one up to the teacher's number of heads]
        #[serde(skip_serializing_if = "Option::is_none")]
        relation_heads: Option<usize> = None,
    }
    /// Embeddings of whole samples.
    EmbeddingLoss {
        /// Distance measure
        distance: Distance = Distance::Cosine,
        /// Name of the embedding output [default: the only output with one vector per sample]
        #[serde(skip_serializing_if = "Option::is_none")]
        output: Option<String> = None,
    }
    /// Matching texts of a batch, each of which is compared with all others.
    ContrastiveLoss {
        /// Temperature that the cosine similarities are divided by
        temperature: f64 = 0.05,
        /// Whether the texts of `pair_column` are compared with those of `text_column` too
        symmetric: bool = false,
        /// Name of the embedding output [default: the only output with one vector per sample]
        #[serde(skip_serializing_if = "Option::is_none")]
        output: Option<String> = None,
    }
}

impl SoftLoss {
    /// Share of the teacher in the mean distribution, by default.
    pub const MIX: f64 = 0.5;
}

/// Losses and their weights: a number in place of the options is the weight.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Losses {
    /// Soft targets: the teacher's distribution over classes or tokens
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "weighted")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Form<SoftLoss>>"))]
    pub soft: Option<SoftLoss>,
    /// Hard targets: labels, or the next token
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "weighted")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Form<HardLoss>>"))]
    pub hard: Option<HardLoss>,
    /// Hidden states
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "weighted")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Form<HiddenLoss>>"))]
    pub hidden: Option<HiddenLoss>,
    /// Attention
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "weighted")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Form<AttentionLoss>>"))]
    pub attention: Option<AttentionLoss>,
    /// Embeddings of whole samples
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "weighted")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Form<EmbeddingLoss>>"))]
    pub embedding: Option<EmbeddingLoss>,
    /// Matching texts of a batch
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "weighted")]
    #[cfg_attr(feature = "cli", schemars(with = "Option<Form<ContrastiveLoss>>"))]
    pub contrastive: Option<ContrastiveLoss>,
}

impl Losses {
    /// Whether no loss is specified.
    pub fn is_empty(&self) -> bool {
        *self == Losses::default()
    }

    /// Whether a loss compares the model with a teacher; the default losses do if there is one.
    pub fn reads_teacher(&self) -> bool {
        self.is_empty() || self.soft.is_some() || self.hidden.is_some() || self.attention.is_some() || self.embedding.is_some()
    }

    /// Validates the options.
    pub fn check(&self) -> Result<()> {
        let wrong = |name: &str, reason: &str| Err(Error::option(format!("losses: {name}"), reason));
        let weights = [
            ("soft", self.soft.as_ref().map(|l| l.weight)),
            ("hard", self.hard.as_ref().map(|l| l.weight)),
            ("hidden", self.hidden.as_ref().map(|l| l.weight)),
            ("attention", self.attention.as_ref().map(|l| l.weight)),
            ("embedding", self.embedding.as_ref().map(|l| l.weight)),
            ("contrastive", self.contrastive.as_ref().map(|l| l.weight)),
        ];
        if let Some((name, _)) = weights.iter().find(|(_, weight)| weight.is_some_and(|weight| !(weight.is_finite() && weight >= 0.0))) {
            return wrong(name, "the weight must be a finite number, at least 0");
        }
        let specified: Vec<f64> = weights.iter().filter_map(|(_, weight)| *weight).collect();
        if !specified.is_empty() && specified.iter().all(|weight| *weight == 0.0) {
            return Err(Error::option("losses", "all weights are 0, so that no loss is minimized: specify a positive one"));
        }
        let temperatures = [("soft", self.soft.as_ref().map(|l| l.temperature)), ("contrastive", self.contrastive.as_ref().map(|l| l.temperature))];
        if let Some((name, _)) = temperatures.iter().find(|(_, value)| value.is_some_and(|value| !(value.is_finite() && value > 0.0))) {
            return wrong(name, "the temperature must be a finite number greater than 0");
        }
        if let Some(mix) = self.soft.as_ref().and_then(|soft| soft.mix) {
            if self.soft.as_ref().is_some_and(|soft| soft.divergence != SoftDivergence::JensenShannon) {
                return wrong("soft", "`mix` is an option of `divergence: jensen-shannon`");
            }
            if !(mix > 0.0 && mix < 1.0) {
                return wrong("soft", "`mix` must be greater than 0 and less than 1; the limits are `divergence: forward` and `reverse`");
            }
        }
        if self.hard.as_ref().is_some_and(|hard| !(0.0..1.0).contains(&hard.label_smoothing)) {
            return wrong("hard", "`label_smoothing` must be at least 0 and less than 1");
        }
        if self.attention.as_ref().is_some_and(|attention| attention.relation_heads == Some(0)) {
            return wrong("attention", "`relation_heads` must be at least 1");
        }
        Ok(())
    }
}

impl FromStr for Losses {
    type Err = ParseError;

    /// Parses the recipe syntax `{ soft: 0.5, hard: 0.5 }`, or `soft=0.5,hard=0.5`.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        let yaml = if text.contains('{') { text.to_owned() } else { format!("{{ {} }}", text.replace('=', ": ")) };
        crate::yaml_text::parse_option("losses", &yaml)
    }
}

/// A number, or a map.
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema), serde(untagged))]
#[allow(dead_code)]
enum Form<T> {
    Weight(f64),
    Options(T),
}

fn weighted<'de, T: Deserialize<'de> + From<f64>, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<T>, D::Error> {
    struct Either<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de> + From<f64>> Visitor<'de> for Either<T> {
        type Value = Option<T>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a weight, or the options of the loss")
        }

        fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Self::Value, E> {
            Ok(Some(T::from(value)))
        }

        fn visit_u64<E: de::Error>(self, value: u64) -> std::result::Result<Self::Value, E> {
            Ok(Some(T::from(value as f64)))
        }

        fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<Self::Value, E> {
            Ok(Some(T::from(value as f64)))
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<Self::Value, A::Error> {
            T::deserialize(de::value::MapAccessDeserializer::new(map)).map(Some)
        }
    }
    deserializer.deserialize_any(Either(PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_weight() {
        let losses: Losses = serde_saphyr::from_str("{ soft: { weight: 0.5, temperature: 4 }, hard: 1, hidden: { layers: [[0, 1], [2, 5]] } }").unwrap();
        assert_eq!(losses.soft, Some(SoftLoss { weight: 0.5, temperature: 4.0, ..SoftLoss::default() }));
        assert_eq!(losses.hard, Some(HardLoss::from(1.0)));
        assert_eq!(losses.hidden.unwrap().layers, [(0, 1), (2, 5)]);
        assert_eq!("soft=0.5,embedding=2".parse::<Losses>().unwrap().embedding, Some(EmbeddingLoss::from(2.0)));
        for text in ["{ sort: 1 }", "{ soft: { heat: 1 } }", "{ soft: hot }"] {
            assert!(text.parse::<Losses>().is_err(), "{text}");
        }
        let mixed = "{ soft: { divergence: jensen-shannon, mix: 0.25 } }".parse::<Losses>().unwrap();
        assert!(mixed.check().is_ok() && mixed.soft.unwrap().mix == Some(0.25));
        for text in [
            "soft=-1",
            "soft=0,hard=0",
            "{ soft: { mix: 0.5 } }",
            "{ soft: { divergence: jensen-shannon, mix: 1 } }",
            "{ soft: { temperature: 0 } }",
            "{ contrastive: { temperature: 0 } }",
            "{ hard: { label_smoothing: 1 } }",
        ] {
            assert!(text.parse::<Losses>().unwrap().check().is_err(), "{text}");
        }
    }
}

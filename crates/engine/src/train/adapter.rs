//! Options of low-rank adapters.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ParseError, Result};
use crate::store::Pattern;
use crate::yaml_text::parse_option;

/// Form of the adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum AdapterKind {
    /// The product of two factors is added to each matrix
    #[default]
    Lora,
    /// In addition, the norm of the weights of each output is trained separately from their direction
    Dora,
}

/// Low-rank adapters (Hu et al., *LoRA*, 2021; Liu et al., *DoRA*, 2024), which are trained instead of the
/// weights of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Adapter {
    /// Form of the adapters
    pub kind: AdapterKind,
    /// Rank of the factors of each layer
    pub rank: usize,
    /// Scale of the product of the factors, which is multiplied by alpha / rank
    pub alpha: f64,
    /// Multiply the product by alpha / √rank instead
    pub rslora: bool,
    /// Weights of linear layers that get an adapter: names with `*`, or `re:` and a regular expression
    /// [default: all linear layers of the repeated layers]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Add the adapters to the weights; otherwise the weights do not change, and the adapters are written in
    /// the format of PEFT to the folder `adapter`
    pub merge: bool,
    /// With merge: train the product through the rounding of the quantized weights, whose codes absorb it;
    /// their scales do not change
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub absorb: bool,
}

/// Names of the parameters of DoRA for a weight: the trained norms `[out]`, and those of the weight with its
/// adapter, which are computed in each step.
pub fn norm_names(weight: &str) -> [String; 2] {
    ["magnitude", "norm"].map(|norm| format!("{weight}/{norm}"))
}

impl Default for Adapter {
    fn default() -> Self {
        Self { kind: AdapterKind::default(), rank: 16, alpha: 32.0, rslora: false, targets: Vec::new(), merge: true, absorb: false }
    }
}

impl FromStr for Adapter {
    type Err = ParseError;

    /// Parses a rank, or an object like that of a recipe.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        match text.trim().parse() {
            Ok(rank) => Ok(Adapter { rank, ..Adapter::default() }),
            Err(_) => parse_option("adapter", text),
        }
    }
}

impl Adapter {
    /// The factor of the product.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Validates the options; `pass` is the prefix of error messages.
    pub fn check(&self, pass: &str) -> Result<()> {
        let reason = if self.rank == 0 {
            "`rank` must be at least 1"
        } else if !(self.alpha.is_finite() && self.alpha > 0.0) {
            "`alpha` must be a finite number greater than 0"
        } else if self.absorb && !self.merge {
            "`absorb` adds the adapter to the codes of the weights: remove `merge: false`"
        } else if self.absorb && self.kind == AdapterKind::Dora {
            "`absorb` requires `kind: lora`: norms of outputs would change the scales"
        } else {
            return Ok(());
        };
        Err(Error::option(format!("{pass}: adapter"), reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_a_rank_or_an_object() {
        let parse = |text: &str| text.parse::<Adapter>();
        assert_eq!(parse("8").unwrap(), Adapter { rank: 8, ..Adapter::default() });
        let written = parse("{kind: lora, rank: 4, alpha: 6, merge: false}").unwrap();
        assert_eq!((written.scale(), written.merge), (1.5, false));
        assert!((Adapter { rslora: true, ..written }.scale() - 3.0).abs() < 1e-12);
        for (text, named) in [("{rank: 8, dropout: 0.1}", "dropout"), ("{kind: vera}", "vera"), ("-1", "")] {
            assert!(parse(text).unwrap_err().to_string().contains(named), "{text}");
        }
        let wrong = |text: &str| parse(text).unwrap().check("finetune").unwrap_err().to_string();
        assert!(parse("{kind: dora, merge: false}").unwrap().check("finetune").is_ok());
        assert!(wrong("0").contains("finetune: adapter") && wrong("{alpha: -1}").contains("`alpha`"));
        assert!(parse("{absorb: true}").unwrap().check("finetune").is_ok());
        assert!(wrong("{absorb: true, merge: false}").contains("`merge: false`") && wrong("{absorb: true, kind: dora}").contains("`kind: lora`"));
    }
}

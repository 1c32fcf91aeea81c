//! Options of the optimizer for a part of the trained tensors.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::optimizer::{Kind, Rates};
use super::scales;
use crate::error::{Error, ParseError, Result};
use crate::store::{Pattern, select};
use crate::yaml_text::parse_option;

/// Decays of the first and of the second moment of AdamW.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Betas(pub [f64; 2]);

impl FromStr for Betas {
    type Err = ParseError;

    /// Parses two numbers, such as `0.9,0.95`.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        let numbers = text.trim().trim_start_matches('[').trim_end_matches(']').split(',').map(|number| number.trim().parse());
        let numbers = numbers.collect::<std::result::Result<Vec<f64>, _>>().ok().and_then(|numbers| <[f64; 2]>::try_from(numbers).ok());
        numbers.map(Betas).ok_or_else(|| ParseError::from(format!("`{text}` is not two numbers, such as 0.9,0.95")))
    }
}

impl Betas {
    /// Validates the values for an optimizer; `pass` is the prefix of error messages.
    pub(super) fn check(self, pass: &str, optimizer: Kind) -> Result<()> {
        let wrong = |reason: &str| Err(Error::option(format!("{pass}: betas"), reason));
        if !matches!(optimizer, Kind::AdamW | Kind::AdamW8bit | Kind::Muon) {
            return wrong("are those of `adamw`, `adamw8bit` and `muon`: remove them, or choose one of these optimizers");
        }
        if self.0.iter().any(|beta| !(0.0..1.0).contains(beta)) {
            return wrong("must be at least 0 and less than 1");
        }
        Ok(())
    }
}

/// Learning rate and weight decay for a part of the trained tensors.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ParameterGroup {
    /// Tensors: names with `*`, or `re:` and a regular expression
    pub targets: Vec<Pattern>,
    /// Peak learning rate of these tensors; 0 freezes them [default: that of the training]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Weight decay of these tensors, also of biases and norm weights [default: that of the training]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

impl FromStr for ParameterGroup {
    type Err = ParseError;

    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        parse_option("groups", text)
    }
}

impl ParameterGroup {
    /// Validates the options; `pass` is the prefix of error messages.
    pub(super) fn check(&self, pass: &str) -> Result<()> {
        let is_wrong = |value: Option<f64>| value.is_some_and(|value| !(value.is_finite() && value >= 0.0));
        let reason = if self.targets.is_empty() {
            "a group needs `targets`"
        } else if is_wrong(self.learning_rate) || is_wrong(self.weight_decay) {
            "`learning_rate` and `weight_decay` must be finite numbers of at least 0"
        } else if self.learning_rate.is_none() && self.weight_decay.is_none() {
            "a group needs a `learning_rate` or a `weight_decay`"
        } else {
            return Ok(());
        };
        Err(Error::option(format!("{pass}: groups"), reason))
    }
}

/// The rates of the tensors in groups, by name; the first group that matches a tensor applies. The learned
/// scale of a weight is in its group, without weight decay. `base` is the learning rate of the training.
/// Fails if a pattern matches no tensor, or a group applies to none.
pub(super) fn rates<'n>(groups: &[ParameterGroup], base: f64, names: impl Iterator<Item = &'n String>) -> Result<BTreeMap<String, Rates>> {
    let patterns: Vec<Pattern> = groups.iter().flat_map(|group| group.targets.iter().cloned()).collect();
    let parameters: BTreeMap<&String, String> = names.map(|name| (name, scales::parameter_name(name).to_owned())).collect();
    select::check("groups", &patterns, parameters.values())?;
    let group = |name: &String| groups.iter().find(|group| group.targets.iter().any(|pattern| pattern.matches(name)));
    let is_used = |own: &ParameterGroup| parameters.values().any(|name| group(name).is_some_and(|found| std::ptr::eq(found, own)));
    if let Some(unused) = groups.iter().find(|group| !is_used(group)) {
        let targets: Vec<&str> = unused.targets.iter().map(Pattern::as_str).collect();
        let reason =
            format!("the group of `{}` applies to no tensor, because earlier groups match all of its tensors: put it before them", targets.join("`, `"));
        return Err(Error::option("groups", reason));
    }
    let rates = |group: &ParameterGroup, is_scale: bool| Rates {
        factor: group.learning_rate.map_or(1.0, |rate| rate / base),
        weight_decay: group.weight_decay.filter(|_| !is_scale),
    };
    Ok(parameters.iter().filter_map(|(name, parameter)| Some(((*name).clone(), rates(group(parameter)?, *name != parameter)))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(text: &str) -> ParameterGroup {
        text.parse().unwrap()
    }

    #[test]
    fn the_first_group_that_matches_applies() {
        let groups = [group("{ targets: [\"*.lora_B*\"], learning_rate: 8e-4 }"), group("{ targets: [\"*lora*\", b], weight_decay: 0 }")];
        let names = ["x.lora_A", "x.lora_B", "b", "c"].map(str::to_owned);
        let found = rates(&groups, 2e-4, names.iter()).unwrap();
        let expected = [
            ("b", Rates { factor: 1.0, weight_decay: Some(0.0) }),
            ("x.lora_A", Rates { factor: 1.0, weight_decay: Some(0.0) }),
            ("x.lora_B", Rates { factor: 8e-4 / 2e-4, weight_decay: None }),
        ];
        assert_eq!(found, expected.map(|(name, rates)| (name.to_owned(), rates)).into());
        assert!(rates(&[group("{ targets: [nosuch], weight_decay: 0 }")], 1.0, names.iter()).unwrap_err().to_string().contains("nosuch"));
        let shadowed = [group("{ targets: [\"*\"], weight_decay: 0 }"), group("{ targets: [b], weight_decay: 1 }")];
        assert!(rates(&shadowed, 1.0, names.iter()).unwrap_err().to_string().contains("the group of `b` applies to no tensor"));
    }

    #[test]
    fn learned_scales_are_in_the_group_of_their_weight() {
        let names = [scales::logarithm_name("w"), "w".to_owned()];
        let found = rates(&[group("{ targets: [w], learning_rate: 0, weight_decay: 1 }")], 1.0, names.iter()).unwrap();
        assert_eq!((found["w"].weight_decay, found["w/logarithm"].weight_decay), (Some(1.0), None));
        assert!(found.values().all(|rates| rates.factor == 0.0));
    }

    #[test]
    fn unusable_options_are_rejected() {
        for text in ["{ targets: [], weight_decay: 0 }", "{ targets: [a] }", "{ targets: [a], learning_rate: -1 }", "{ targets: [a], weight_decay: .inf }"] {
            assert!(group(text).check("finetune").unwrap_err().to_string().contains("finetune: groups"), "{text}");
        }
        assert!("{ targets: [a], rate: 1 }".parse::<ParameterGroup>().is_err());
        assert_eq!("0.9, 0.95".parse::<Betas>().unwrap(), Betas([0.9, 0.95]));
        assert!("0.9".parse::<Betas>().is_err() && "a,b".parse::<Betas>().is_err());
        assert!(Betas([0.9, 0.95]).check("finetune", Kind::Muon).is_ok());
        assert!(Betas([0.9, 1.0]).check("finetune", Kind::AdamW).is_err() && Betas([0.9, 0.95]).check("finetune", Kind::Sgd).is_err());
    }
}

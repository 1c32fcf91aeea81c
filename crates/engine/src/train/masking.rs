//! Masked language modelling: predicts randomly masked tokens (Devlin et al., *BERT*, 2019).

use std::collections::BTreeSet;
use std::str::FromStr;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::draw::Draw;
use crate::data::{ATTENTION_MASK, Batch, INPUT_IDS, References};
use crate::error::{Error, ParseError, Result};
use crate::exec::transfer;
use crate::ratio;
use crate::yaml_text::{parse_option, with_example};

/// Randomly masked tokens, which a masked language model predicts; different ones in each step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Masking {
    /// Probability of each token to be predicted
    #[serde(deserialize_with = "crate::ratio::ratio")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
    pub fraction: f64,
    /// Token that replaces predicted tokens, by its text or its id [default: `mask_token` of the tokenizer]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_token: Option<MaskToken>,
}

/// A mask token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "the text or the id of a token")]
pub enum MaskToken {
    /// Id in the vocabulary
    Id(u32),
    /// Text in the vocabulary
    Text(String),
}

impl Default for Masking {
    fn default() -> Self {
        Self { fraction: 0.15, mask_token: None }
    }
}

impl FromStr for Masking {
    type Err = ParseError;

    /// Parses a probability, or an object like that of a recipe.
    fn from_str(text: &str) -> std::result::Result<Self, ParseError> {
        if text.contains(['{', ':']) {
            return parse_option("masking", text);
        }
        let fraction = ratio::parse(text).map_err(|e| with_example("masking", e))?;
        Ok(Masking { fraction, ..Masking::default() })
    }
}

impl Masking {
    /// Validates the options; `pass` is the prefix of error messages.
    pub(super) fn check(&self, pass: &str) -> Result<()> {
        match self.fraction > 0.0 && self.fraction <= 1.0 {
            true => Ok(()),
            false => Err(Error::option(
                format!("{pass}: masking"),
                format!("`fraction` {} is not greater than 0 and at most 1: BERT was trained with `fraction: 0.15`", self.fraction),
            )),
        }
    }
}

/// Probability that the mask token replaces a predicted token, and that it or a random token does. Others
/// remain unchanged.
const REPLACED: [f64; 2] = [0.8, 0.9];

/// Masks random tokens.
#[derive(Debug, Clone)]
pub struct Masker {
    /// Probability of each token to be predicted.
    pub fraction: f64,
    /// Id of the mask token.
    pub mask: i64,
    /// Ids of special tokens, which are not predicted.
    pub special: BTreeSet<i64>,
    /// Size of the vocabulary.
    pub tokens: usize,
}

impl Masker {
    /// The batches of a step with masked tokens, which are the targets. Fails if the samples have other
    /// targets.
    pub(super) fn masked(&self, batches: Vec<Batch>, draw: Draw) -> Result<Vec<Batch>> {
        let mut random = draw.random();
        batches.into_iter().map(|batch| self.masked_batch(batch, &mut random)).collect()
    }

    fn masked_batch(&self, mut batch: Batch, random: &mut fastrand::Rng) -> Result<Batch> {
        let wrong = |reason: &str| Error::option("masking", reason);
        let failed = |e: candle_core::Error| Error::candle("masked tokens", e);
        match &batch.references {
            References::None => {}
            References::Next(_) => {
                return Err(wrong(
                    "selects the tokens to predict, but the task of the data is language-modelling: set `task: fidelity` in `data: { train: ... }`",
                ));
            }
            _ => return Err(wrong("needs texts without labels, because it selects the tokens to predict: remove the labels, or `masking`")),
        }
        let Some(before) = batch.inputs.get(INPUT_IDS).filter(|ids| ids.rank() == 2) else { return Err(wrong("needs samples with `input_ids`")) };
        let (dims, dtype) = (before.dims().to_vec(), before.dtype());
        let mut ids = transfer::read::<i64>(before).map_err(failed)?;
        let real = batch.inputs.get(ATTENTION_MASK).map(transfer::read::<i64>).transpose().map_err(failed)?;
        let real = real.unwrap_or_else(|| vec![1; ids.len()]);
        let mut labels = vec![None; ids.len()];
        for ((id, label), real) in ids.iter_mut().zip(&mut labels).zip(real) {
            // Each position takes the same number of random numbers.
            let (draw, choice, other) = (random.f64(), random.f64(), random.usize(..self.tokens.max(1)));
            if real == 0 || self.special.contains(id) || draw >= self.fraction {
                continue;
            }
            *label = Some(*id);
            let [masked, changed] = REPLACED;
            if choice < masked {
                *id = self.mask;
            } else if choice < changed {
                *id = i64::try_from(other).unwrap_or(*id);
            }
        }
        let width = dims.last().copied().unwrap_or(0).max(1);
        let tensor = Tensor::from_vec(ids, dims, &Device::Cpu).and_then(|tensor| tensor.to_dtype(dtype)).map_err(failed)?;
        batch.inputs.insert(INPUT_IDS.to_owned(), tensor);
        Ok(Batch { references: References::Tokens(labels.chunks(width).map(<[Option<i64>]>::to_vec).collect()), ..batch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPECIAL: i64 = 1;

    /// Texts that begin with a special token and end with padding.
    fn batch(rows: usize, width: usize) -> Batch {
        let id = |at: usize| if at.is_multiple_of(width) { SPECIAL } else { 10 + (at % 50) as i64 };
        let ids: Vec<i64> = (0..rows * width).map(id).collect();
        let real: Vec<i64> = (0..rows * width).map(|at| i64::from(at % width < width - 2)).collect();
        let tensor = |values| Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap();
        let inputs = [(INPUT_IDS.to_owned(), tensor(ids)), (ATTENTION_MASK.to_owned(), tensor(real))];
        Batch { inputs: inputs.into(), references: References::None, samples: rows }
    }

    #[test]
    fn masked_tokens_are_the_targets() {
        let masker = Masker { fraction: 0.25, mask: 3, special: [SPECIAL].into(), tokens: 60 };
        let before = batch(100, 42);
        let draw = Draw { seed: 1, step: 2, rank: 0 };
        let after = masker.masked(vec![before.clone()], draw).unwrap().remove(0);
        let read = |batch: &Batch| transfer::read::<i64>(&batch.inputs[INPUT_IDS]).unwrap();
        let References::Tokens(labels) = &after.references else { panic!("no targets") };
        let (mut predicted, mut masked, mut same) = (0, 0, 0);
        for (at, ((old, new), label)) in read(&before).into_iter().zip(read(&after)).zip(labels.concat()).enumerate() {
            assert!(label.is_none_or(|label| label == old) && (label.is_some() || new == old), "{at}");
            assert!(label.is_none() || old != SPECIAL && at % 42 < 40, "{at}");
            predicted += usize::from(label.is_some());
            masked += usize::from(label.is_some() && new == 3);
            same += usize::from(label.is_some() && new == old);
        }
        // Of 3900 tokens, 975 are predicted on average, of which 80 % are masked and 10 % unchanged.
        assert!((875..1075).contains(&predicted), "{predicted}");
        let share = |count: usize| count as f64 / predicted as f64;
        assert!((share(masked) - 0.8).abs() < 0.05 && (share(same) - 0.1).abs() < 0.04, "{masked} and {same} of {predicted}");
        assert_eq!(read(&after), read(&masker.masked(vec![before.clone()], draw).unwrap()[0]));
        assert_ne!(read(&after), read(&masker.masked(vec![before], Draw { step: 3, ..draw }).unwrap()[0]));
    }

    #[test]
    fn unsuitable_samples_and_options_are_rejected() {
        assert_eq!("0.3".parse::<Masking>().unwrap(), Masking { fraction: 0.3, mask_token: None });
        for text in ["30%", "fraction: 0.3"] {
            assert_eq!(text.parse::<Masking>().unwrap(), "{ fraction: 30% }".parse().unwrap(), "{text}");
        }
        let token = |text: &str| text.parse::<Masking>().unwrap().mask_token.unwrap();
        assert_eq!(token("{ mask_token: <mask> }"), MaskToken::Text("<mask>".to_owned()));
        assert_eq!(token("{ mask_token: 103 }"), MaskToken::Id(103));
        for (text, part) in [("15", "write `0.15` or `15%`"), ("some", "is not a fraction"), ("{ part: 0.1 }", "unknown key `part`")] {
            let error = text.parse::<Masking>().unwrap_err().to_string();
            assert!(error.contains(part) && error.ends_with("; example: --masking \"{ fraction: 0.15 }\""), "{error}");
        }
        assert!("0".parse::<Masking>().unwrap().check("finetune").unwrap_err().to_string().contains("finetune: masking"));
        let masker = Masker { fraction: 0.5, mask: 3, special: BTreeSet::new(), tokens: 60 };
        let labelled = Batch { references: References::Tokens(vec![vec![None; 4]]), ..batch(1, 4) };
        let draw = Draw { seed: 1, step: 2, rank: 0 };
        assert!(masker.masked(vec![labelled], draw).unwrap_err().to_string().contains("without labels"));
    }
}

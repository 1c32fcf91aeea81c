//! Token sequences of a model: the input sequence and, in encoder-decoder models, the decoder sequence.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::{Batch, References};
use crate::error::{Error, Result};
pub use crate::ir::decoder::DECODER_TOKENS as DECODER_INPUT_IDS;
use crate::ir::{Dim, Graph, ValueId};

/// The input with token ids.
pub(crate) const INPUT_IDS: &str = "input_ids";
/// The attention mask of the input tokens.
pub(crate) const ATTENTION_MASK: &str = "attention_mask";
/// The attention mask of the decoder's tokens. Models with causal decoder attention do not take it.
pub(super) const DECODER_ATTENTION_MASK: &str = "decoder_attention_mask";

/// One of the two token sequences of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceRole {
    /// The model input: `input_ids`, or inputs that are not text. Most models have no other sequence.
    Input,
    /// The decoder sequence of an encoder-decoder model: `decoder_input_ids`.
    Decoder,
}

impl SequenceRole {
    /// Names of the inputs with token ids, and with their attention mask.
    fn names(self) -> [&'static str; 2] {
        match self {
            SequenceRole::Input => [INPUT_IDS, ATTENTION_MASK],
            SequenceRole::Decoder => [DECODER_INPUT_IDS, DECODER_ATTENTION_MASK],
        }
    }

    /// The role of an input.
    pub fn from_input(name: &str) -> SequenceRole {
        if SequenceRole::Decoder.names().contains(&name) { SequenceRole::Decoder } else { SequenceRole::Input }
    }
}

/// The sequence axis of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenAxis {
    /// The sequence.
    pub role: SequenceRole,
    /// The axis, if the value has one.
    pub axis: Option<usize>,
}

/// Roles of the values of a graph: values that depend on the decoder's tokens belong to the decoder
/// sequence, even if both sequences have the same length.
#[derive(Debug, Clone)]
pub struct SequenceRoles<'g> {
    graph: &'g Graph,
    /// Names of the values that depend on the decoder's tokens.
    decoder_values: BTreeSet<&'g str>,
    shapes: BTreeMap<&'g str, &'g [Dim]>,
}

impl<'g> SequenceRoles<'g> {
    /// Determines the roles of the values of a graph.
    pub fn new(graph: &'g Graph) -> SequenceRoles<'g> {
        let name = |id: ValueId| graph.value(id).name.as_str();
        let inputs = graph.inputs().map(|(_, value)| value.name.as_str());
        let mut decoder_values: BTreeSet<&str> = inputs.filter(|name| SequenceRole::from_input(name) == SequenceRole::Decoder).collect();
        for node in graph.nodes() {
            if node.inputs.iter().any(|id| decoder_values.contains(name(*id))) {
                decoder_values.insert(name(node.output));
            }
        }
        let shapes = graph.values().iter().map(|value| (value.name.as_str(), value.ty.shape.as_slice())).collect();
        SequenceRoles { graph, decoder_values, shapes }
    }

    /// The role of a value, by name.
    pub fn role(&self, name: &str) -> SequenceRole {
        if self.decoder_values.contains(name) { SequenceRole::Decoder } else { SequenceRole::Input }
    }

    /// The role of the tokens along the second axis of a value `[batch, sequence, width]`; `None` if
    /// that axis is not a token sequence.
    pub fn tokens(&self, name: &str) -> Option<SequenceRole> {
        self.tokens_at(name, 1)
    }

    /// The same for attention heads `[batch, heads, sequence, width]`.
    pub fn head_tokens(&self, name: &str) -> Option<SequenceRole> {
        self.tokens_at(name, 2)
    }

    /// The role of the tokens along an axis, which must be the second to last.
    fn tokens_at(&self, name: &str, axis: usize) -> Option<SequenceRole> {
        let role = self.role(name);
        let shape = self.shapes.get(name)?;
        (shape.len().checked_sub(2) == Some(axis) && shape.get(axis) == Some(self.length(role)?)).then_some(role)
    }

    /// The length of a sequence.
    fn length(&self, role: SequenceRole) -> Option<&'g Dim> {
        role.names().into_iter().find_map(|name| self.graph.inputs().find(|(_, value)| value.name == name)?.1.ty.shape.get(1))
    }

    /// The sequence axis: the second of hidden states `[batch, sequence, width]`, the third of heads
    /// `[batch, heads, sequence, width]`.
    pub fn token_axis(&self, name: &str) -> TokenAxis {
        let role = self.role(name);
        let shape = self.shapes.get(name).copied().unwrap_or_default();
        let length = self.length(role);
        let found = (1..shape.len().saturating_sub(1)).rev().find(|axis| length.is_some() && shape.get(*axis) == length);
        // In exported files, the dimensions of intermediate values may have other names.
        TokenAxis { role, axis: found.or((shape.len() == 3).then_some(1)) }
    }
}

/// Positions of a sample whose next token is predicted, each with that token.
pub type NextTokens = Vec<(usize, i64)>;

impl Batch {
    /// The role of the sequence that the model's outputs belong to.
    pub fn output_role(&self) -> SequenceRole {
        if self.inputs.contains_key(DECODER_INPUT_IDS) { SequenceRole::Decoder } else { SequenceRole::Input }
    }

    /// The token ids of a sequence, `[batch, sequence]`.
    pub fn tokens(&self, role: SequenceRole) -> Option<&Tensor> {
        self.inputs.get(role.names()[0])
    }

    /// The attention mask of a sequence, `[batch, sequence]`, if the batch has one.
    pub fn mask(&self, role: SequenceRole) -> Option<&Tensor> {
        self.inputs.get(role.names()[1])
    }

    /// The next tokens to predict for each sample; `None` if the references are not tokens. Fails if the
    /// batch has no token ids, or too few.
    pub fn next_tokens(&self) -> Result<Option<Vec<NextTokens>>> {
        let targets = |row: &Vec<Option<i64>>| row.iter().enumerate().filter_map(|(at, token)| Some((at, (*token)?))).collect();
        let ranges = match &self.references {
            References::Tokens(rows) => return Ok(Some(rows.iter().map(targets).collect())),
            References::Next(ranges) => ranges,
            _ => return Ok(None),
        };
        let [name, _] = self.output_role().names();
        let wrong = |reason: String| Error::option("task", format!("`{name}`: {reason}"));
        let tokens = self.tokens(self.output_role()).ok_or_else(|| wrong("the batch has no token ids to predict".into()))?;
        let rows = tokens.to_vec2::<i64>().map_err(|e| wrong(e.to_string()))?;
        let row_targets = |(row, range): (&Vec<i64>, &std::ops::Range<usize>)| {
            let next = |at: usize| Some((at.checked_sub(1)?, *row.get(at)?));
            range.clone().map(next).collect::<Option<Vec<_>>>()
        };
        let found = rows.iter().zip(ranges).map(row_targets).collect::<Option<Vec<_>>>();
        found.map(Some).ok_or_else(|| wrong("the batch has fewer tokens than the range to predict".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sequences have five tokens: only the dependencies of values distinguish them.
    #[test]
    fn roles_follow_from_dependencies() {
        let graph: Graph = "input input_ids: int[1, 5]\ninput attention_mask: int[1, 5]\ninput decoder_input_ids: int[1, 5]\nparam t: float[9, 8]\nparam w: float[8, 8]\n\
            x = Embedding(input_ids, t) -> float[1, 5, 8]\nk = Linear(x, w) -> float[1, 5, 8]\ny = Embedding(decoder_input_ids, t) -> float[1, 5, 8]\n\
            z = Add(y, k) -> float[1, 5, 8]\nh = SplitHeads{\"head_dim\":4}(z) -> float[1, 2, 5, 4]\nlogits = Linear(z, w) -> float[1, 5, 8]\noutput logits = logits\n"
            .parse()
            .unwrap();
        let roles = SequenceRoles::new(&graph);
        for (name, role) in [
            ("x", SequenceRole::Input),
            ("k", SequenceRole::Input),
            ("y", SequenceRole::Decoder),
            ("z", SequenceRole::Decoder),
            ("h", SequenceRole::Decoder),
            ("logits", SequenceRole::Decoder),
        ] {
            let (rows, heads) = if name == "h" { (None, Some(role)) } else { (Some(role), None) };
            assert_eq!((roles.role(name), roles.tokens(name), roles.head_tokens(name)), (role, rows, heads), "{name}");
        }
        for (name, axis) in [("x", Some(1)), ("h", Some(2)), ("w", None), ("input_ids", None)] {
            assert_eq!(roles.token_axis(name).axis, axis, "{name}");
        }
        assert_eq!((roles.tokens("w"), roles.tokens("decoder_input_ids"), roles.tokens("missing")), (None, None, None));
    }

    #[test]
    fn next_tokens_follow_from_ranges_and_from_tokens() {
        let ids = candle_core::Tensor::new(&[[5i64, 6, 7, 0]], &candle_core::Device::Cpu).unwrap();
        let batch = |name: &str, references| Batch { inputs: [(name.to_owned(), ids.clone())].into(), references, samples: 1 };
        let next = |batch: Batch| batch.next_tokens();
        let range = |to| References::Next(std::iter::once(1..to).collect());
        assert_eq!(next(batch("input_ids", range(3))).unwrap(), Some(vec![vec![(0, 6), (1, 7)]]));
        assert_eq!(next(batch(DECODER_INPUT_IDS, range(3))).unwrap(), Some(vec![vec![(0, 6), (1, 7)]]));
        assert_eq!(next(batch(DECODER_INPUT_IDS, References::Tokens(vec![vec![Some(6), None, Some(1)]]))).unwrap(), Some(vec![vec![(0, 6), (2, 1)]]));
        assert_eq!(next(batch("input_ids", References::None)).unwrap(), None);
        assert!(next(batch("input_ids", range(9))).unwrap_err().to_string().contains("fewer tokens than"));
    }
}

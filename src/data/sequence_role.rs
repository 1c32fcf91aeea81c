//! Which of a model's sequences the values of its graph belong to: with a decoder behind an encoder, there are two.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::{Batch, References};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, ValueId};

/// The input with token ids.
pub(super) const TOKENS: &str = "input_ids";
/// The input of a decoder behind an encoder, which holds its tokens.
pub(crate) const DECODED: &str = "decoder_input_ids";
/// Which of these are no padding. Models that only look back do not take it.
pub(super) const DECODED_MASK: &str = "decoder_attention_mask";

/// One of the two sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// What a model reads: `input_ids`, or what is no text; the only one of most models.
    Read,
    /// What a decoder behind an encoder says: `decoder_input_ids`.
    Said,
}

impl Side {
    /// Names of the inputs with tokens, and with which of them are no padding.
    fn names(self) -> [&'static str; 2] {
        match self {
            Side::Read => [TOKENS, "attention_mask"],
            Side::Said => [DECODED, DECODED_MASK],
        }
    }

    /// That of an input.
    pub(crate) fn of_input(name: &str) -> Side {
        if Side::Said.names().contains(&name) { Side::Said } else { Side::Read }
    }
}

/// The sequence axis of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenAxis {
    /// The sequence.
    pub side: Side,
    /// The axis, if the value has one.
    pub axis: Option<usize>,
}

/// The sides of the values of a graph: whatever follows from the tokens of a decoder is its own, also where both sequences have one length.
#[derive(Debug, Clone)]
pub(crate) struct Sides<'g> {
    graph: &'g Graph,
    said: BTreeSet<&'g str>,
    shapes: BTreeMap<&'g str, &'g [Dim]>,
}

impl<'g> Sides<'g> {
    /// Those of a graph.
    pub fn of(graph: &'g Graph) -> Sides<'g> {
        let name = |id: ValueId| graph.value(id).name.as_str();
        let inputs = graph.inputs().map(|(_, value)| value.name.as_str());
        let mut said: BTreeSet<&str> = inputs.filter(|name| Side::of_input(name) == Side::Said).collect();
        for node in graph.nodes() {
            if node.inputs.iter().any(|id| said.contains(name(*id))) {
                said.insert(name(node.output));
            }
        }
        let shapes = graph.values().iter().map(|value| (value.name.as_str(), value.ty.shape.as_slice())).collect();
        Sides { graph, said, shapes }
    }

    /// The side of a value, by name.
    pub fn side(&self, name: &str) -> Side {
        if self.said.contains(name) { Side::Said } else { Side::Read }
    }

    /// Whose tokens the rows of a value `[batch, sequence, width]` are; nothing where rows are no tokens.
    pub fn tokens(&self, name: &str) -> Option<Side> {
        self.tokens_at(name, 1)
    }

    /// The same, of heads `[batch, heads, sequence, width]`.
    pub fn head_tokens(&self, name: &str) -> Option<Side> {
        self.tokens_at(name, 2)
    }

    /// Whose tokens lie along an axis, which is the last but one.
    fn tokens_at(&self, name: &str, axis: usize) -> Option<Side> {
        let side = self.side(name);
        let shape = self.shapes.get(name)?;
        (shape.len().checked_sub(2) == Some(axis) && shape.get(axis) == Some(self.length(side)?)).then_some(side)
    }

    /// The size of a sequence.
    fn length(&self, side: Side) -> Option<&'g Dim> {
        side.names().into_iter().find_map(|name| self.graph.inputs().find(|(_, value)| value.name == name)?.1.ty.shape.get(1))
    }

    /// The sequence axis: the second of hidden states `[batch, sequence, width]`, the third of heads `[batch, heads, sequence, width]`.
    pub fn token_axis(&self, name: &str) -> TokenAxis {
        let side = self.side(name);
        let shape = self.shapes.get(name).copied().unwrap_or_default();
        let length = self.length(side);
        let found = (1..shape.len().saturating_sub(1)).rev().find(|axis| length.is_some() && shape.get(*axis) == length);
        // Sizes of exported files may have names of their own.
        TokenAxis { side, axis: found.or((shape.len() == 3).then_some(1)) }
    }
}

/// The places of a sample at which a model is asked for the next token, each with that token.
pub(crate) type Asked = Vec<(usize, i64)>;

impl Batch {
    /// The side that a model's answers are of.
    pub(crate) fn answered(&self) -> Side {
        if self.inputs.contains_key(DECODED) { Side::Said } else { Side::Read }
    }

    /// The tokens of a side, `[batch, sequence]`.
    pub(crate) fn tokens(&self, side: Side) -> Option<&Tensor> {
        self.inputs.get(side.names()[0])
    }

    /// Which of them are no padding, `[batch, sequence]`; nothing where nothing is said about that.
    pub(crate) fn mask(&self, side: Side) -> Option<&Tensor> {
        self.inputs.get(side.names()[1])
    }

    /// What is asked of each sample; nothing where samples ask for no tokens.
    ///
    /// # Errors
    /// There are no tokens, or not as many.
    pub(crate) fn next_tokens(&self) -> Result<Option<Vec<Asked>>> {
        let asked = |row: &Vec<Option<i64>>| row.iter().enumerate().filter_map(|(at, token)| Some((at, (*token)?))).collect();
        let ranges = match &self.references {
            References::Tokens(rows) => return Ok(Some(rows.iter().map(asked).collect())),
            References::Next(ranges) => ranges,
            _ => return Ok(None),
        };
        let [name, _] = self.answered().names();
        let wrong = |reason: String| Error::option("task", format!("`{name}`: {reason}"));
        let tokens = self.tokens(self.answered()).ok_or_else(|| wrong("there are none, whose next ones a model could be asked for".into()))?;
        let rows = tokens.to_vec2::<i64>().map_err(|e| wrong(e.to_string()))?;
        let of_row = |(row, range): (&Vec<i64>, &std::ops::Range<usize>)| {
            let next = |at: usize| Some((at.checked_sub(1)?, *row.get(at)?));
            range.clone().map(next).collect::<Option<Vec<_>>>()
        };
        let found = rows.iter().zip(ranges).map(of_row).collect::<Option<Vec<_>>>();
        found.map(Some).ok_or_else(|| wrong("there are fewer tokens than are to be predicted".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sequences have five tokens: only what values follow from tells them apart.
    #[test]
    fn sides_are_told_by_what_values_follow_from() {
        let graph: Graph = "input input_ids: int[1, 5]\ninput attention_mask: int[1, 5]\ninput decoder_input_ids: int[1, 5]\nparam t: float[9, 8]\nparam w: float[8, 8]\n\
            x = Embedding(input_ids, t) -> float[1, 5, 8]\nk = Linear(x, w) -> float[1, 5, 8]\ny = Embedding(decoder_input_ids, t) -> float[1, 5, 8]\n\
            z = Add(y, k) -> float[1, 5, 8]\nh = SplitHeads{\"head_dim\":4}(z) -> float[1, 2, 5, 4]\nlogits = Linear(z, w) -> float[1, 5, 8]\noutput logits = logits\n"
            .parse()
            .unwrap();
        let sides = Sides::of(&graph);
        for (name, side) in [("x", Side::Read), ("k", Side::Read), ("y", Side::Said), ("z", Side::Said), ("h", Side::Said), ("logits", Side::Said)] {
            let (rows, heads) = if name == "h" { (None, Some(side)) } else { (Some(side), None) };
            assert_eq!((sides.side(name), sides.tokens(name), sides.head_tokens(name)), (side, rows, heads), "{name}");
        }
        for (name, axis) in [("x", Some(1)), ("h", Some(2)), ("w", None), ("input_ids", None)] {
            assert_eq!(sides.token_axis(name).axis, axis, "{name}");
        }
        assert_eq!((sides.tokens("w"), sides.tokens("decoder_input_ids"), sides.tokens("nothing")), (None, None, None));
    }

    #[test]
    fn what_is_asked_is_told_by_ranges_and_by_tokens() {
        let ids = candle_core::Tensor::new(&[[5i64, 6, 7, 0]], &candle_core::Device::Cpu).unwrap();
        let batch = |name: &str, references| Batch { inputs: [(name.to_owned(), ids.clone())].into(), references, samples: 1 };
        let next = |batch: Batch| batch.next_tokens();
        let range = |to| References::Next(std::iter::once(1..to).collect());
        assert_eq!(next(batch("input_ids", range(3))).unwrap(), Some(vec![vec![(0, 6), (1, 7)]]));
        assert_eq!(next(batch(DECODED, range(3))).unwrap(), Some(vec![vec![(0, 6), (1, 7)]]));
        assert_eq!(next(batch(DECODED, References::Tokens(vec![vec![Some(6), None, Some(1)]]))).unwrap(), Some(vec![vec![(0, 6), (2, 1)]]));
        assert_eq!(next(batch("input_ids", References::None)).unwrap(), None);
        assert!(next(batch("input_ids", range(9))).unwrap_err().to_string().contains("fewer tokens"));
    }
}

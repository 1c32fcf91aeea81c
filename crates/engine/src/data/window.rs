//! A window of a text, as a sample of a language model.

use std::ops::Range;

use super::tokens::{Tokenizer, Tokens};
use super::{Batch, References};
use crate::error::Result;

/// Tokens of one window, and the positions that are predicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Window {
    pub ids: Vec<i64>,
    /// Position in the text of the first token.
    pub start: usize,
    pub predicted: Range<usize>,
    /// The positions of this range that are predicted, if not all are.
    pub positions: Option<Vec<usize>>,
}

impl Window {
    /// Restricts the predicted positions to targets of the text, which has no token added at the start of
    /// windows.
    pub fn restricted_to(self, is_target: &[bool]) -> Window {
        let is_target = |at: &usize| is_target.get(self.start.saturating_add(*at)) == Some(&true);
        let positions = self.predicted.clone().filter(is_target).collect();
        Window { positions: Some(positions), ..self }
    }

    pub fn is_unpredicted(&self) -> bool {
        self.positions.as_ref().is_some_and(Vec::is_empty)
    }

    /// The target token of the logits at each position.
    pub fn labels(&self) -> Vec<Option<i64>> {
        let is_predicted = |at: usize| self.predicted.contains(&at) && self.positions.as_ref().is_none_or(|positions| positions.binary_search(&at).is_ok());
        (1..).zip(self.ids.iter().skip(1)).map(|(at, id)| is_predicted(at).then_some(*id)).collect()
    }
}

/// A batch of windows.
pub(super) fn to_batch(tokenizer: &Tokenizer, windows: &[Window]) -> Result<Batch> {
    let rows: Vec<Tokens> = windows.iter().map(|w| Tokens { ids: w.ids.clone(), types: vec![0; w.ids.len()] }).collect();
    let references = if windows.iter().any(|window| window.positions.is_some()) {
        References::Tokens(windows.iter().map(Window::labels).collect())
    } else {
        References::Next(windows.iter().map(|window| window.predicted.clone()).collect())
    };
    Ok(Batch { inputs: tokenizer.collate(&rows)?, references, samples: windows.len() })
}

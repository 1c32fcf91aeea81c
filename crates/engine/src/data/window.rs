//! A window of a text, as a sample of a language model.

use std::ops::Range;

use candle_core::{Device, Tensor};

use super::sequence_role::ATTENTION_MASK;
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, References, shaped};
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
    /// Lengths of the texts that were packed into the window; empty if there is only one.
    pub packed: Vec<usize>,
}

impl Window {
    /// Restricts the predicted positions to targets of the text, which has no token added at the start of
    /// windows.
    pub fn restricted_to(self, is_target: &[bool]) -> Window {
        let is_target = |at: &usize| is_target.get(self.start.saturating_add(*at)) == Some(&true);
        let positions = self.predicted.clone().filter(is_target).collect();
        Window { positions: Some(positions), ..self }
    }

    /// Appends a window of another text.
    fn append(&mut self, other: Window) {
        let from = self.ids.len();
        if self.packed.is_empty() {
            self.packed.push(from);
        }
        self.packed.push(other.ids.len());
        let positions = |window: &Window| window.positions.clone().unwrap_or_else(|| window.predicted.clone().collect());
        let added = positions(&other).into_iter().map(|at| at.saturating_add(from));
        self.positions = Some(positions(self).into_iter().chain(added).collect());
        self.ids.extend(other.ids);
        self.predicted = 0..self.ids.len();
    }

    /// Lengths of the texts in the window.
    pub fn lengths(&self) -> Vec<usize> {
        if self.packed.is_empty() { vec![self.ids.len()] } else { self.packed.clone() }
    }

    /// The number of the text at each of `width` positions, from 1, and 0 for padding.
    fn numbers(&self, width: usize) -> impl Iterator<Item = i64> {
        let numbers = (1i64..).zip(self.lengths()).flat_map(|(number, length)| std::iter::repeat_n(number, length));
        numbers.chain(std::iter::repeat(0)).take(width)
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
    let mut inputs = tokenizer.collate(&rows)?;
    if windows.iter().any(|window| !window.packed.is_empty()) {
        let width = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
        let numbers: Vec<i64> = windows.iter().flat_map(|window| window.numbers(width)).collect();
        let numbers = Tensor::from_vec(numbers, (windows.len(), width), &Device::Cpu).map_err(shaped)?;
        inputs.insert(ATTENTION_MASK.to_owned(), numbers);
    }
    Ok(Batch { inputs, references, samples: windows.len() })
}

/// Joins consecutive windows as long as they have at most `length` tokens together.
pub(super) fn packed(windows: impl Iterator<Item = Result<Window>>, length: usize) -> impl Iterator<Item = Result<Window>> {
    let mut windows = windows.peekable();
    std::iter::from_fn(move || {
        let mut all = match windows.next()? {
            Ok(window) => window,
            Err(e) => return Some(Err(e)),
        };
        let fits = |all: &Window, next: &Result<Window>| next.as_ref().is_ok_and(|next| all.ids.len().saturating_add(next.ids.len()) <= length);
        while let Some(Ok(next)) = windows.next_if(|next| fits(&all, next)) {
            all.append(next);
        }
        Some(Ok(all))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn packed_windows_predict_the_tokens_of_each_text() {
        let window = |(index, length): (i64, usize)| {
            let ids = [vec![1], vec![10 + index; length - 1]].concat();
            Window { ids, start: 0, predicted: 1..length, positions: None, packed: Vec::new() }
        };
        let separate: Vec<Window> = (0..).zip([4, 3, 8, 2, 2, 2, 8, 3, 5]).map(window).collect();
        let found: Vec<Window> = packed(separate.iter().cloned().map(Ok), 8).map(Result::unwrap).collect();
        let lengths: Vec<Vec<usize>> = found.iter().map(|window| window.packed.clone()).collect();
        assert_eq!(lengths, [vec![4, 3], vec![], vec![2, 2, 2], vec![], vec![3, 5]]);
        let tokens = |windows: &[Window]| windows.iter().flat_map(|window| window.ids.clone()).collect::<Vec<_>>();
        let labels = |windows: &[Window]| windows.iter().flat_map(Window::labels).flatten().collect::<Vec<_>>();
        assert_eq!((tokens(&found), labels(&found)), (tokens(&separate), labels(&separate)));
        assert_eq!(found[0].labels(), [Some(10), Some(10), Some(10), None, Some(11), Some(11)]);
        assert_eq!(found[0].numbers(9).collect::<Vec<_>>(), [1, 1, 1, 1, 2, 2, 2, 0, 0]);
        assert_eq!(found[1].numbers(9).collect::<Vec<_>>(), [1, 1, 1, 1, 1, 1, 1, 1, 0]);
        let failing = [Ok(separate[0].clone()), Err(Error::Cancelled)];
        assert!(matches!(packed(failing.into_iter(), 8).nth(1), Some(Err(Error::Cancelled))));
    }
}

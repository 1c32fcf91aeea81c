//! What ops keep of tokens where a sequence goes on, so that earlier tokens are not computed again.

use std::fmt;

use candle_core::{Result, Tensor};

/// How an op is computed from its inputs.
pub type Forward<'f> = dyn Fn(&[Tensor]) -> Result<Tensor> + 'f;

/// An op whose result for a token depends on where the token stands, or on tokens before it.
pub trait Sequential: fmt::Debug {
    /// The axis of an input that tokens lie along; none of an input that has no row for each token.
    fn axis(&self, input: usize) -> Option<usize>;

    /// Whether it computes each token by itself where tokens lie along these inputs alone, as attention does to what does not grow: then it
    /// needs to keep nothing.
    fn is_by_token(&self, _along: &dyn Fn(usize) -> bool) -> bool {
        false
    }

    /// Whether its result has a row for each new token, and a column for each of all tokens.
    fn makes_pairs(&self) -> bool {
        false
    }

    /// Whether an input may be such a result.
    fn reads_pairs(&self, _input: usize) -> bool {
        false
    }

    /// Why its result for a token depends on later ones, if it does.
    fn looks_ahead(&self) -> Option<&'static str> {
        None
    }

    /// Whether results for the first `before` tokens are the same in a sequence of `after` tokens; of inputs whose last axis is so wide.
    fn is_stable(&self, _width: usize, _before: usize, _after: usize) -> bool {
        true
    }

    /// The output for tokens behind those that `past` knows, which it then knows too; `forward` computes the op as it is prepared.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn follow(&self, inputs: &[Tensor], past: &mut Past, forward: &Forward) -> Result<Tensor>;
}

/// What one op keeps of the tokens that it has seen.
#[derive(Debug, Default)]
pub struct Past {
    tokens: usize,
    rows: Vec<Rows>,
    /// How many tokens of each row of a batch are no padding, `[batch, 1]`.
    pub(super) counts: Option<Tensor>,
}

impl Past {
    /// How many tokens it has seen.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Counts tokens that the op has followed with.
    pub fn add(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.rows.iter().filter_map(|rows| rows.buffer.as_ref()).map(|buffer| buffer.elem_count() * buffer.dtype().size_in_bytes()).sum()
    }

    /// The rows of this number.
    pub(super) fn rows(&mut self, number: usize) -> &mut Rows {
        if self.rows.len() <= number {
            self.rows.resize_with(number + 1, Rows::default);
        }
        &mut self.rows[number]
    }
}

/// Rows along an axis that come at its end and are forgotten at its beginning.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Longer than what is kept, so that most rows are put behind the others where they are.
    buffer: Option<Tensor>,
    start: usize,
    end: usize,
}

/// Rows that there is room for at least.
const LEAST: usize = 64;

impl Rows {
    /// Puts rows at the end, behind at most so many of those before, and gives them all.
    pub fn push(&mut self, new: &Tensor, axis: usize, before: usize) -> Result<Tensor> {
        let count = new.dim(axis)?;
        self.start = self.start.max(self.end.saturating_sub(before));
        let kept = self.end - self.start;
        let buffer = match &self.buffer {
            Some(buffer) if self.end + count <= buffer.dim(axis)? => buffer.clone(),
            old => {
                let mut dims = new.dims().to_vec();
                dims[axis] = (2 * (kept + count)).max(LEAST);
                let longer = Tensor::zeros(dims, new.dtype(), new.device())?;
                if let Some(old) = old.as_ref().filter(|_| kept > 0) {
                    longer.slice_set(&old.narrow(axis, self.start, kept)?.contiguous()?, axis, 0)?;
                }
                (self.start, self.end) = (0, kept);
                self.buffer = Some(longer.clone());
                longer
            }
        };
        buffer.slice_set(&new.contiguous()?, axis, self.end)?;
        self.end += count;
        buffer.narrow(axis, self.start, self.end - self.start)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_come_and_go() {
        let rows = |numbers: std::ops::Range<i64>| {
            let count = numbers.clone().count();
            Tensor::from_vec(numbers.clone().chain(numbers.map(|n| -n)).collect(), (2, count), &Device::Cpu).unwrap()
        };
        for (before, steps) in [(usize::MAX, vec![3, 1, 1, 70, 1, 200]), (5, vec![3, 1, 9, 1, 1, 1, 1]), (0, vec![2, 1, 4]), (40, [1; 300].to_vec())] {
            let (mut kept, mut seen) = (Rows::default(), 0);
            for count in steps {
                let all = kept.push(&rows(seen..seen + count), 1, before).unwrap();
                let first = seen - seen.min(i64::try_from(before).unwrap_or(i64::MAX));
                seen += count;
                assert_eq!(all.to_vec2::<i64>().unwrap(), rows(first..seen).to_vec2::<i64>().unwrap());
            }
            let room = kept.buffer.unwrap().dim(1).unwrap();
            assert!(before > 100 || room <= 2 * (before + 9).max(LEAST), "{room} rows of {before}");
        }
    }
}

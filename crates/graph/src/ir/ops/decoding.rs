//! State of ops in incremental decoding, so that earlier tokens are not computed again.

use std::fmt;

use candle_core::{Result, Tensor};

/// A function that computes an op from its inputs.
pub type Forward<'f> = dyn Fn(&[Tensor]) -> Result<Tensor> + 'f;

/// An op whose result for a token depends on its position or on other tokens.
pub trait Incremental: fmt::Debug {
    /// The axis of an input along which tokens are arranged; `None` if the input has no row for each
    /// token.
    fn token_axis(&self, input: usize) -> Option<usize>;

    /// Whether it computes each token independently if only the inputs selected by `along` have a token
    /// axis, as cross-attention does over a fixed encoder output. Such an op needs no state.
    fn is_tokenwise(&self, _along: &dyn Fn(usize) -> bool) -> bool {
        false
    }

    /// Whether its result has a row for each new token and a column for each token so far.
    fn returns_pairs(&self) -> bool {
        false
    }

    /// Whether an input may be such a result.
    fn reads_pairs(&self, _input: usize) -> bool {
        false
    }

    /// The reason why its result for a token depends on later tokens, if it does.
    fn looks_ahead(&self) -> Option<&'static str> {
        None
    }

    /// Whether the results for the first `before` tokens are the same in a sequence of `after` tokens,
    /// for inputs whose last axis has size `width`.
    fn is_stable(&self, _width: usize, _before: usize, _after: usize) -> bool {
        true
    }

    /// Computes the output for new tokens, and adds them to `past`. `forward` computes the op with its
    /// kernel.
    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, forward: &Forward) -> Result<Tensor>;
}

/// State of one op in incremental decoding.
#[derive(Debug, Default)]
pub struct DecodingState {
    tokens: usize,
    rows: Vec<Rows>,
    /// The number of tokens in each row of a batch that are not padding, `[batch, 1]`.
    pub(super) counts: Option<Tensor>,
}

impl DecodingState {
    /// Number of tokens processed so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds to the number of processed tokens.
    pub fn add(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// Memory in bytes.
    pub fn bytes(&self) -> usize {
        self.rows.iter().filter_map(|rows| rows.buffer.as_ref()).map(|buffer| buffer.elem_count() * buffer.dtype().size_in_bytes()).sum()
    }

    /// The cached rows with this index.
    pub(super) fn rows(&mut self, number: usize) -> &mut Rows {
        if self.rows.len() <= number {
            self.rows.resize_with(number + 1, Rows::default);
        }
        &mut self.rows[number]
    }
}

/// Rows that are appended at the end of an axis and evicted at its start.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Longer than the number of cached rows, so that most rows are appended in place.
    buffer: Option<Tensor>,
    start: usize,
    end: usize,
}

/// Minimum capacity in rows.
const MIN_CAPACITY: usize = 64;

impl Rows {
    /// Appends rows after at most `before` earlier ones, evicts the others, and returns all that remain.
    pub fn push(&mut self, new: &Tensor, axis: usize, before: usize) -> Result<Tensor> {
        let count = new.dim(axis)?;
        self.start = self.start.max(self.end.saturating_sub(before));
        let kept = self.end - self.start;
        let buffer = match &self.buffer {
            Some(buffer) if self.end + count <= buffer.dim(axis)? => buffer.clone(),
            old => {
                let mut dims = new.dims().to_vec();
                dims[axis] = (2 * (kept + count)).max(MIN_CAPACITY);
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
    fn rows_are_appended_and_evicted() {
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
            assert!(before > 100 || room <= 2 * (before + 9).max(MIN_CAPACITY), "{room} rows of {before}");
        }
    }
}

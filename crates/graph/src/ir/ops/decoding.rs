//! State of ops in incremental decoding, so that earlier tokens are not computed again.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use crate::ir::{Bindings, TensorType};

/// A function that computes an op from its inputs.
pub type Forward<'f> = dyn Fn(&[Tensor]) -> Result<Tensor> + 'f;

/// The methods of an op that reads only the number or the ids of tokens, so that it has no gradient.
macro_rules! of_tokens {
    () => {
        fn arity(&self) -> std::ops::Range<usize> {
            1..2
        }

        fn incremental(&self) -> Option<&dyn $crate::ir::ops::Incremental> {
            Some(self)
        }

        fn backward(&self, _backward: &$crate::ir::ops::Backward) -> candle_core::Result<Vec<Option<candle_core::Tensor>>> {
            Ok(vec![None])
        }

        fn reads_input(&self, _input: usize) -> bool {
            false
        }
    };
}

pub(super) use of_tokens;

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

    /// Number of elements of a state that does not grow with the number of tokens, for inputs of these types,
    /// if `removable` tokens can be removed in addition to those of the last run.
    fn state_elements(&self, _inputs: &[&TensorType], _removable: usize, _bindings: &Bindings) -> u64 {
        0
    }

    /// Whether it computes new tokens that are [`Branches`], for inputs of these types.
    fn supports_branches(&self, _inputs: &[&TensorType]) -> bool {
        false
    }

    /// Computes the output for new tokens, and adds them to `past`. `forward` computes the op with its
    /// kernel.
    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, forward: &Forward) -> Result<Tensor>;
}

/// New tokens that continue a text in several ways. They form a tree: a token depends only on the text and
/// on the new tokens before it on its branch.
#[derive(Debug)]
pub struct Branches {
    /// Position of each new token, relative to the first one.
    depths: Vec<u32>,
    /// Minus infinity where a new token does not depend on a token, and 0 elsewhere: `[1, new, all]`.
    hidden: Tensor,
}

impl Branches {
    /// Branches after a text with `past` tokens, by the index of the new token before each new token, which
    /// is smaller than its own. The first one has none.
    pub fn new(parents: &[Option<usize>], past: usize, device: &Device) -> Result<Branches> {
        let (count, columns) = (parents.len(), past + parents.len());
        let (mut depths, mut hidden) = (Vec::with_capacity(count), vec![f32::NEG_INFINITY; count * columns]);
        for (index, parent) in parents.iter().enumerate() {
            let (before, row) = hidden.split_at_mut(index * columns);
            match parent.filter(|parent| *parent < index) {
                Some(parent) => row[..columns].copy_from_slice(&before[parent * columns..][..columns]),
                None => row[..past].fill(0.0),
            }
            row[past + index] = 0.0;
            depths.push(parent.and_then(|parent| depths.get(parent)).map_or(0, |depth| depth + 1));
        }
        Ok(Branches { depths, hidden: Tensor::from_vec(hidden, (1, count, columns), device)? })
    }

    /// The bias of the products of new queries and all keys.
    pub(super) fn hidden(&self) -> &Tensor {
        &self.hidden
    }

    /// The position of each new token, relative to the first one.
    pub(super) fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// Number of different positions.
    pub(super) fn positions(&self) -> usize {
        self.depths.iter().max().map_or(0, |depth| *depth as usize + 1)
    }
}

/// State of one op in incremental decoding.
#[derive(Debug, Default)]
pub struct DecodingState {
    tokens: usize,
    /// The branches of the next tokens. Without them, each token follows the one before it.
    branches: Option<Arc<Branches>>,
    /// Number of evicted rows that are retained, so that the last tokens can be removed.
    removable: usize,
    rows: Vec<Rows>,
    recurrence: Recurrence,
}

/// Computes the output of a recurrent op for some tokens, and the state after them, from their inputs and the
/// state before them, if there is one.
type Recur<'f> = dyn Fn(&[Tensor], Option<&Tensor>) -> Result<(Tensor, Tensor)> + 'f;

/// A recurrent state, with earlier ones and the inputs after them, from which states between them are
/// computed again when tokens are removed.
#[derive(Debug, Default)]
struct Recurrence {
    /// The state after all tokens; `None` before the first one, and after tokens within a run were removed.
    state: Option<Tensor>,
    /// The last runs.
    runs: VecDeque<RecurrentRun>,
}

/// Tokens that were processed together.
#[derive(Debug)]
struct RecurrentRun {
    /// The state before them; `None` at the start.
    before: Option<Tensor>,
    /// The inputs, each with its token axis.
    inputs: Vec<(Tensor, usize)>,
    tokens: usize,
}

impl DecodingState {
    /// An empty state from which up to `removable` of the last tokens can be removed.
    pub fn with_removable(removable: usize) -> DecodingState {
        DecodingState { removable, ..DecodingState::default() }
    }

    /// Number of tokens processed so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds to the number of processed tokens.
    pub fn add(&mut self, tokens: usize) {
        self.tokens += tokens;
        self.branches = None;
    }

    /// Sets the branches of the next tokens.
    pub fn set_branches(&mut self, branches: &Arc<Branches>) {
        self.branches = Some(Arc::clone(branches));
    }

    /// The branches of the next tokens.
    pub fn branches(&self) -> Option<&Arc<Branches>> {
        self.branches.as_ref()
    }

    /// Of the last `count` tokens, which were branches, retains those with these indices, in ascending order.
    pub fn retain(&mut self, count: usize, indices: &[usize]) -> Result<()> {
        self.rows.iter_mut().try_for_each(|rows| rows.retain(count, indices))?;
        self.tokens -= count - indices.len();
        Ok(())
    }

    /// Removes all tokens after the first `tokens`. Returns false, and changes nothing, if rows that the
    /// next token reads are evicted.
    pub fn truncate(&mut self, tokens: usize) -> bool {
        let removed = self.tokens.saturating_sub(tokens);
        let is_complete = self.rows.iter().all(|rows| rows.can_remove(removed, self.tokens)) && self.recurrence.can_remove(removed);
        if is_complete {
            self.recurrence.remove(removed);
            self.rows.iter_mut().for_each(|rows| rows.end = rows.end.saturating_sub(removed));
            self.tokens -= removed;
        }
        is_complete
    }

    /// Memory in bytes.
    pub fn bytes(&self) -> usize {
        let runs = self.recurrence.runs.iter().flat_map(|run| run.before.iter().chain(run.inputs.iter().map(|(input, _)| input)));
        let tensors = self.rows.iter().filter_map(|rows| rows.buffer.as_ref()).chain(&self.recurrence.state).chain(runs);
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Appends rows of new tokens to the cached rows with this index, after at most `before` earlier ones,
    /// and returns all of these.
    pub(super) fn push(&mut self, number: usize, new: &Tensor, axis: usize, before: usize) -> Result<Tensor> {
        if self.rows.len() <= number {
            self.rows.resize_with(number + 1, Rows::default);
        }
        self.rows[number].push(new, axis, before, self.removable)
    }

    /// Computes a recurrent op for new tokens. `axis` returns the token axis of an input.
    pub(super) fn recur(&mut self, inputs: &[Tensor], axis: &dyn Fn(usize) -> usize, compute: &Recur) -> Result<Tensor> {
        let before = self.recurrence.current(compute)?;
        let (output, state) = compute(inputs, before.as_ref())?;
        let inputs: Vec<(Tensor, usize)> = inputs.iter().enumerate().map(|(input, tensor)| (tensor.clone(), axis(input))).collect();
        let tokens = inputs.first().map_or(Ok(0), |(tensor, axis)| tensor.dim(*axis))?;
        self.recurrence.push(RecurrentRun { before, inputs, tokens }, state, self.removable);
        Ok(output)
    }

    /// The last cached row with this index.
    pub(super) fn last(&self, number: usize, axis: usize) -> Result<Option<Tensor>> {
        let rows = self.rows.get(number).and_then(|rows| Some((rows.buffer.as_ref()?, rows.end.checked_sub(1)?)));
        rows.map(|(buffer, last)| buffer.narrow(axis, last, 1)).transpose()
    }
}

impl Recurrence {
    /// The state after all tokens.
    fn current(&mut self, compute: &Recur) -> Result<Option<Tensor>> {
        if self.state.is_none()
            && let Some(run) = self.runs.back()
        {
            let inputs = run.inputs.iter().map(|(input, axis)| input.narrow(*axis, 0, run.tokens)).collect::<Result<Vec<Tensor>>>()?;
            self.state = Some(compute(&inputs, run.before.as_ref())?.1);
        }
        Ok(self.state.clone())
    }

    /// Adds a run and the state after it. Drops runs before the last one that are not needed to remove
    /// `removable` tokens before it.
    fn push(&mut self, run: RecurrentRun, state: Tensor, removable: usize) {
        let kept = |runs: &VecDeque<RecurrentRun>| runs.iter().skip(1).map(|run| run.tokens).sum::<usize>();
        while !self.runs.is_empty() && kept(&self.runs) >= removable {
            self.runs.pop_front();
        }
        self.runs.push_back(run);
        self.state = Some(state);
    }

    /// Whether the last `removed` tokens can be removed.
    fn can_remove(&self, removed: usize) -> bool {
        (self.runs.is_empty() && self.state.is_none()) || removed <= self.runs.iter().map(|run| run.tokens).sum::<usize>()
    }

    /// Removes tokens that can be removed.
    fn remove(&mut self, mut removed: usize) {
        while let Some(run) = self.runs.back_mut().filter(|_| removed > 0) {
            if run.tokens <= removed {
                removed -= run.tokens;
                self.state = self.runs.pop_back().and_then(|run| run.before);
                continue;
            }
            run.tokens -= removed;
            removed = 0;
            self.state = None;
        }
    }
}

/// Rows that are appended at the end of an axis and evicted at its start.
#[derive(Debug, Default)]
struct Rows {
    /// Longer than the number of cached rows, so that most rows are appended in place.
    buffer: Option<Tensor>,
    axis: usize,
    start: usize,
    end: usize,
    /// Maximum number of earlier rows that a new row is combined with.
    before: usize,
}

/// Minimum capacity in rows.
const MIN_CAPACITY: usize = 64;

impl Rows {
    /// Appends rows and returns them after at most `before` earlier ones. Evicts all rows before these,
    /// except the last `removable`.
    fn push(&mut self, new: &Tensor, axis: usize, before: usize, removable: usize) -> Result<Tensor> {
        let count = new.dim(axis)?;
        (self.axis, self.before) = (axis, before);
        self.start = self.start.max(self.end.saturating_sub(before.saturating_add(removable)));
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
        let first = self.start.max(self.end.saturating_sub(before));
        self.end += count;
        buffer.narrow(axis, first, self.end - first)
    }

    /// Of the last `count` rows, retains those with these indices.
    fn retain(&mut self, count: usize, indices: &[usize]) -> Result<()> {
        let (Some(buffer), Some(first)) = (&self.buffer, self.end.checked_sub(count)) else { return Ok(()) };
        let rows: Vec<u32> = indices.iter().map(|index| (first + index) as u32).collect();
        let retained = buffer.index_select(&Tensor::new(rows, buffer.device())?, self.axis)?;
        buffer.slice_set(&retained.contiguous()?, self.axis, first)?;
        self.end = first + indices.len();
        Ok(())
    }

    /// Whether the last `removed` of `tokens` tokens can be removed: the next row still finds the earlier
    /// rows that it is combined with.
    fn can_remove(&self, removed: usize, tokens: usize) -> bool {
        let remaining = (self.end - self.start).checked_sub(removed);
        self.buffer.is_none() || remaining.is_some_and(|remaining| remaining >= self.before.min(tokens - removed))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// A row of numbers and one of their negatives.
    fn rows(numbers: std::ops::Range<i64>) -> Tensor {
        let count = numbers.clone().count();
        Tensor::from_vec(numbers.clone().chain(numbers.map(|n| -n)).collect(), (2, count), &Device::Cpu).unwrap()
    }

    fn pushed(state: &mut DecodingState, count: usize, before: usize) -> Vec<Vec<i64>> {
        let seen = state.tokens() as i64;
        let all = state.push(0, &rows(seen..seen + count as i64), 1, before).unwrap();
        state.add(count);
        all.to_vec2::<i64>().unwrap()
    }

    #[test]
    fn rows_are_appended_and_evicted() {
        for removable in [0, 4] {
            for (before, steps) in [(usize::MAX, vec![3, 1, 1, 70, 1, 200]), (5, vec![3, 1, 9, 1, 1, 1, 1]), (0, vec![2, 1, 4]), (40, [1; 300].to_vec())] {
                let mut state = DecodingState::with_removable(removable);
                for count in steps {
                    let seen = state.tokens() as i64;
                    let first = seen - seen.min(i64::try_from(before).unwrap_or(i64::MAX));
                    assert_eq!(pushed(&mut state, count, before), rows(first..seen + count as i64).to_vec2::<i64>().unwrap());
                }
                let room = state.rows[0].buffer.as_ref().unwrap().dim(1).unwrap();
                assert!(before > 100 || room <= 2 * (before + removable + 9).max(MIN_CAPACITY), "{room} rows of {before}");
            }
        }
    }

    /// After tokens are removed, new tokens read the same earlier rows as if the removed ones had never been
    /// appended, also across moves to a longer buffer.
    #[test]
    fn the_last_tokens_can_be_removed() {
        for before in [0, 1, 7, 40, usize::MAX] {
            let mut state = DecodingState::with_removable(4);
            for round in 0..200usize {
                let start = state.tokens();
                // Tokens one by one, as a draft appends them, or together, as a model verifies them.
                let steps = if round % 2 == 0 { vec![1; 4] } else { vec![4] };
                steps.into_iter().for_each(|count| drop(pushed(&mut state, count, before)));
                assert!(state.truncate(start + 1 + round % 3), "{before}");
                assert_eq!(state.tokens(), start + 1 + round % 3);
                let seen = state.tokens() as i64;
                let first = seen - seen.min(i64::try_from(before).unwrap_or(i64::MAX));
                assert_eq!(pushed(&mut state, 1, before), rows(first..seen + 1).to_vec2::<i64>().unwrap());
            }
        }
    }

    #[test]
    fn tokens_after_evicted_rows_cannot_be_removed() {
        let mut state = DecodingState::with_removable(2);
        (0..20).for_each(|_| drop(pushed(&mut state, 1, 5)));
        assert!(!state.truncate(16) && state.tokens() == 20);
        assert!(state.truncate(17) && state.tokens() == 17);
        assert!(state.truncate(30) && state.tokens() == 17);
        // Without evicted rows, all can be removed.
        let mut state = DecodingState::default();
        (0..5).for_each(|_| drop(pushed(&mut state, 1, 5)));
        assert!(state.truncate(0) && state.tokens() == 0);
    }
}

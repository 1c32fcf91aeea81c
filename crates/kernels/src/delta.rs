//! Gated delta rule and state space recurrence, sequential over tokens and parallel over heads. Sums have a
//! fixed order, so results do not depend on the number of threads.

use rayon::prelude::*;

use super::attention_single::dot;
use super::scratch::Scratch;

/// Sizes of the operands.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Number of tokens.
    pub sequence: usize,
    /// Number of heads of values.
    pub heads: usize,
    /// Number of heads of queries and keys.
    pub groups: usize,
    /// Width of queries and keys.
    pub width: usize,
    /// Width of values.
    pub out: usize,
    /// Factor on the output.
    pub scale: f32,
    /// Whether values are added without the correction by those in the state.
    pub additive: bool,
    /// Number of tokens between the states that the backward pass keeps.
    pub chunk: usize,
}

/// The operands of all heads, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// `[batch, groups, sequence, width]`.
    pub queries: &'a [f32],
    /// `[batch, groups, sequence, width]`.
    pub keys: &'a [f32],
    /// `[batch, heads, sequence, out]`.
    pub values: &'a [f32],
    /// Logarithmic decays, `[batch, sequence, heads]`.
    pub decays: &'a [f32],
    /// `[batch, sequence, heads]`.
    pub rates: &'a [f32],
}

/// Gradients of the operands, in their layout, except for those of decays and rates: `[batch, heads,
/// sequence]`.
pub struct Gradients<'a> {
    /// Of queries.
    pub queries: &'a mut [f32],
    /// Of keys.
    pub keys: &'a mut [f32],
    /// Of values.
    pub values: &'a mut [f32],
    /// Of decays.
    pub decays: &'a mut [f32],
    /// Of rates.
    pub rates: &'a mut [f32],
}

/// The operands of one token and one head.
#[derive(Clone, Copy)]
struct Token<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    decay: f32,
    rate: f32,
    additive: bool,
}

impl<'a> Operands<'a> {
    /// The operands of a head, which is numbered across the batch.
    fn token(&self, sizes: Sizes, head: usize, at: usize) -> Token<'a> {
        let Sizes { sequence, heads, groups, width, out, .. } = sizes;
        let (batch, head_of_batch) = (head / heads, head % heads);
        let group = batch * groups + head_of_batch / (heads / groups);
        let (row, number) = ((group * sequence + at) * width, (batch * sequence + at) * heads + head_of_batch);
        Token {
            query: &self.queries[row..row + width],
            key: &self.keys[row..row + width],
            value: &self.values[(head * sequence + at) * out..][..out],
            decay: self.decays[number].exp(),
            rate: self.rates[number],
            additive: sizes.additive,
        }
    }
}

impl Sizes {
    /// Computes the output `[batch, heads, sequence, out]`. With a state `[batch, heads, width, out]`, that
    /// of each head is followed by its new state.
    pub fn forward(self, x: Operands, state: Option<&[f32]>, output: &mut [f32]) {
        let (rows, size) = (self.sequence * self.out, self.width * self.out);
        let each = rows + if state.is_some() { size } else { 0 };
        output.par_chunks_mut(each.max(1)).enumerate().for_each(|(head, output)| {
            let (output, rest) = output.split_at_mut(rows);
            let mut own = Scratch::new(if state.is_some() { 0 } else { size });
            let current = match state {
                Some(state) => {
                    rest.copy_from_slice(&state[head * size..][..size]);
                    rest
                }
                None => {
                    own.fill(0.0);
                    &mut own[..]
                }
            };
            let mut change = Scratch::new(self.out);
            for (at, output) in output.chunks_exact_mut(self.out.max(1)).enumerate() {
                let token = x.token(self, head, at);
                advance(token, current, &mut change);
                read(token.query, current, self.scale, output);
            }
        });
    }

    /// Computes the gradients for a gradient of the output, `[batch, heads, sequence, out]`.
    pub fn backward(self, x: Operands, gradient: &[f32], into: Gradients) {
        let (each, rows, values) = (self.heads / self.groups, self.sequence * self.width, self.sequence * self.out);
        let of_keys = into.queries.par_chunks_mut(rows.max(1)).zip(into.keys.par_chunks_mut(rows.max(1)));
        let numbers = into.decays.par_chunks_mut((each * self.sequence).max(1)).zip(into.rates.par_chunks_mut((each * self.sequence).max(1)));
        let jobs = of_keys.zip(into.values.par_chunks_mut((each * values).max(1))).zip(numbers).enumerate();
        jobs.for_each(|(group, (((queries, keys), all_values), (decays, rates)))| {
            queries.fill(0.0);
            keys.fill(0.0);
            for index in 0..each {
                let head = group * each + index;
                let part = index * self.sequence..(index + 1) * self.sequence;
                let into = Gradients {
                    queries: &mut *queries,
                    keys: &mut *keys,
                    values: &mut all_values[index * values..][..values],
                    decays: &mut decays[part.clone()],
                    rates: &mut rates[part],
                };
                self.head_backward(x, head, &gradient[head * values..][..values], into);
            }
        });
    }

    /// The backward pass of one head. Adds the gradients of queries and keys, which heads share.
    fn head_backward(self, x: Operands, head: usize, gradient: &[f32], into: Gradients) {
        let (size, chunks) = (self.width * self.out, self.sequence.div_ceil(self.chunk));
        // The states before each chunk, and before each token of one chunk.
        let (mut starts, mut states) = (Scratch::new(chunks * size), Scratch::new(self.chunk * size));
        let (mut state, mut of_state) = (Scratch::new(size), Scratch::new(size));
        let mut change = Scratch::new(self.out);
        state.fill(0.0);
        for at in 0..self.sequence {
            if at % self.chunk == 0 {
                starts[at / self.chunk * size..][..size].copy_from_slice(&state);
            }
            advance(x.token(self, head, at), &mut state, &mut change);
        }
        of_state.fill(0.0);
        for number in (0..chunks).rev() {
            let range = number * self.chunk..self.sequence.min((number + 1) * self.chunk);
            state.copy_from_slice(&starts[number * size..][..size]);
            for at in range.clone() {
                states[(at - range.start) * size..][..size].copy_from_slice(&state);
                advance(x.token(self, head, at), &mut state, &mut change);
            }
            for at in range.clone().rev() {
                let (row, values) = (at * self.width, at * self.out);
                let parts = Parts {
                    query: &mut into.queries[row..row + self.width],
                    key: &mut into.keys[row..row + self.width],
                    value: &mut into.values[values..values + self.out],
                    decay: &mut into.decays[at],
                    rate: &mut into.rates[at],
                };
                let (before, gradient) = (&mut states[(at - range.start) * size..][..size], &gradient[values..values + self.out]);
                step_back(x.token(self, head, at), self.scale, before, gradient, &mut of_state, parts);
            }
        }
    }
}

/// Gradients of one token and one head.
struct Parts<'a> {
    query: &'a mut [f32],
    key: &'a mut [f32],
    value: &'a mut [f32],
    decay: &'a mut f32,
    rate: &'a mut f32,
}

simd! {
    /// Updates the state; `change` is a buffer.
    fn advance(token: Token, state: &mut [f32], change: &mut [f32]) {
        change.fill(0.0);
        if !token.additive {
            for (row, key) in state.chunks_exact(token.value.len().max(1)).zip(token.key) {
                for (state, sum) in row.iter().zip(change.iter_mut()) {
                    *sum += key * (state * token.decay);
                }
            }
        }
        for (change, value) in change.iter_mut().zip(token.value) {
            *change = token.rate * (value - *change);
        }
        for (row, key) in state.chunks_exact_mut(token.value.len().max(1)).zip(token.key) {
            for (state, change) in row.iter_mut().zip(change.iter()) {
                *state = *state * token.decay + key * change;
            }
        }
    }
}

simd! {
    /// The product of a query with the state.
    fn read(query: &[f32], state: &[f32], scale: f32, output: &mut [f32]) {
        output.fill(0.0);
        for (row, query) in state.chunks_exact(output.len().max(1)).zip(query) {
            for (output, state) in output.iter_mut().zip(row) {
                *output += query * state;
            }
        }
        output.iter_mut().for_each(|output| *output *= scale);
    }
}

simd! {
    /// One step of the backward pass. `state` is that before the token, and overwritten; `of_state` is the
    /// gradient of the state after it without the output of this token, and becomes that of the state before
    /// it.
    fn step_back(token: Token, scale: f32, state: &mut [f32], gradient: &[f32], of_state: &mut [f32], parts: Parts) {
        let out = token.value.len().max(1);
        let (mut error, mut change, mut of_change) = (token.value.to_vec(), vec![0f32; out], vec![0f32; out]);
        for (row, key) in state.chunks_exact_mut(out).zip(token.key) {
            row.iter_mut().for_each(|state| *state *= token.decay);
            if !token.additive {
                for (state, error) in row.iter().zip(&mut error) {
                    *error -= key * state;
                }
            }
        }
        for (change, error) in change.iter_mut().zip(&error) {
            *change = token.rate * error;
        }
        let rows = state.chunks_exact(out).zip(of_state.chunks_exact_mut(out)).zip(token.query.iter().zip(token.key));
        for (((row, of_row), (query, key)), (of_query, of_key)) in rows.zip(parts.query.iter_mut().zip(parts.key.iter_mut())) {
            *of_query += scale * (dot(row, gradient) + key * dot(&change, gradient));
            for ((of_state, gradient), of_change) in of_row.iter_mut().zip(gradient).zip(&mut of_change) {
                *of_state += scale * query * gradient;
                *of_change += key * *of_state;
            }
            *of_key += dot(of_row, &change);
        }
        *parts.rate = dot(&of_change, &error);
        for (of_value, of_change) in parts.value.iter_mut().zip(&of_change) {
            *of_value = token.rate * of_change;
        }
        let mut of_decay = 0.0;
        let rows = state.chunks_exact(out).zip(of_state.chunks_exact_mut(out)).zip(token.key);
        for (((row, of_row), key), of_key) in rows.zip(parts.key.iter_mut()) {
            if !token.additive {
                *of_key -= dot(row, parts.value);
                for (of_state, of_value) in of_row.iter_mut().zip(parts.value.iter()) {
                    *of_state -= key * of_value;
                }
            }
            of_decay += dot(row, of_row);
            of_row.iter_mut().for_each(|of_state| *of_state *= token.decay);
        }
        *parts.decay = of_decay;
    }
}

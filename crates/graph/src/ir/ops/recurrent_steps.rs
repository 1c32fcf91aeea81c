//! Forward and backward steps of recurrent layers, for one direction.

use candle_core::{Result, Tensor};
use candle_nn::ops::sigmoid;

/// The recurrent cell.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cell {
    Lstm,
    Gru { reset_after: bool },
}

/// Weights and initial states of one direction, or their gradients.
#[derive(Debug)]
pub(super) struct Weights {
    /// `[gates · hidden, width]`
    pub input: Tensor,
    /// `[gates · hidden, hidden]`
    pub recurrent: Tensor,
    /// `[gates · hidden]`
    pub input_bias: Tensor,
    /// `[gates · hidden]`
    pub recurrent_bias: Tensor,
    /// `[batch, hidden]`
    pub state: Tensor,
    /// `[batch, hidden]`
    pub cell: Tensor,
}

/// Saved values of one step, `[batch, hidden]` each: the gates, and the state and cell after the step.
#[derive(Debug)]
struct Step {
    gates: Vec<Tensor>,
    /// The recurrent product for the last gate of a GRU.
    recurrent: Tensor,
    state: Tensor,
    cell: Tensor,
}

/// The forward pass of one direction, in the order in which its steps were read.
#[derive(Debug)]
pub(super) struct Pass {
    of: Cell,
    weights: Weights,
    /// Inputs in reading order, `[steps, batch, width]`.
    x: Tensor,
    steps: Vec<Step>,
    reversed: bool,
}

/// Converts between sequence order and reading order.
fn ordered(x: &Tensor, reversed: bool) -> Result<Tensor> {
    if reversed { x.contiguous()?.flip(&[0]) } else { x.contiguous() }
}

impl Pass {
    /// Runs the forward pass.
    pub(super) fn run(of: Cell, x: &Tensor, weights: Weights, reversed: bool) -> Result<Pass> {
        let x = ordered(x, reversed)?;
        let (count, batch, width) = x.dims3()?;
        let rows = weights.input.dim(0)?;
        let projected = x.reshape((count * batch, width))?.matmul(&weights.input.t()?)?.broadcast_add(&weights.input_bias)?;
        let projected = projected.reshape((count, batch, rows))?;
        let recurrent = weights.recurrent.t()?.contiguous()?;
        let mut pass = Pass { of, weights, x, steps: Vec::with_capacity(count), reversed };
        for at in 0..count {
            let step = pass.step(&projected.get(at)?, &recurrent)?;
            pass.steps.push(step);
        }
        Ok(pass)
    }

    /// State and cell before a step.
    fn before(&self, step: usize) -> (&Tensor, &Tensor) {
        let before = step.checked_sub(1).and_then(|before| self.steps.get(before));
        before.map_or((&self.weights.state, &self.weights.cell), |step| (&step.state, &step.cell))
    }

    /// State and cell after the last step.
    pub(super) fn last(&self) -> (&Tensor, &Tensor) {
        self.before(self.steps.len())
    }

    /// The states in sequence order, `[steps, batch, hidden]`.
    pub(super) fn states(&self) -> Result<Tensor> {
        ordered(&Tensor::stack(&self.steps.iter().map(|step| &step.state).collect::<Vec<_>>(), 0)?, self.reversed)
    }

    fn step(&self, projected: &Tensor, transposed: &Tensor) -> Result<Step> {
        let (state, cell) = self.before(self.steps.len());
        let hidden = state.dim(1)?;
        let recurrent = state.matmul(transposed)?.broadcast_add(&self.weights.recurrent_bias)?;
        let part = |of: &Tensor, gate: usize| of.narrow(1, gate * hidden, hidden)?.contiguous();
        let sum = |gate: usize| part(projected, gate)? + part(&recurrent, gate)?;
        match self.of {
            Cell::Lstm => {
                let (input, output, forget, new) = (sigmoid(&sum(0)?)?, sigmoid(&sum(1)?)?, sigmoid(&sum(2)?)?, sum(3)?.tanh()?);
                let cell = ((&forget * cell)? + (&input * &new)?)?;
                let state = (&output * cell.tanh()?)?;
                Ok(Step { gates: vec![input, output, forget, new], recurrent: state.clone(), state, cell })
            }
            Cell::Gru { reset_after } => {
                let (update, reset) = (sigmoid(&sum(0)?)?, sigmoid(&sum(1)?)?);
                let recurrent = if reset_after {
                    part(&recurrent, 2)?
                } else {
                    let bias = self.weights.recurrent_bias.narrow(0, 2 * hidden, hidden)?;
                    (&reset * state)?.matmul(&transposed.narrow(1, 2 * hidden, hidden)?.contiguous()?)?.broadcast_add(&bias)?
                };
                let gated = if reset_after { (&reset * &recurrent)? } else { recurrent.clone() };
                let new = (part(projected, 2)? + gated)?.tanh()?;
                let state = (&new + (&update * (state - &new)?)?)?;
                Ok(Step { gates: vec![update, reset, new], recurrent, cell: state.clone(), state })
            }
        }
    }

    /// Gradients of the inputs and of the weights, from the gradients of all states, of the last state
    /// and of the last cell.
    pub(super) fn back(&self, states: Option<&Tensor>, last: Option<&Tensor>, last_cell: Option<&Tensor>) -> Result<(Tensor, Weights)> {
        let weights = &self.weights;
        let states = states.map(|states| ordered(states, self.reversed)).transpose()?;
        let none = || weights.state.zeros_like();
        let (mut state, mut cell) = (last.cloned().map_or_else(none, Ok)?, last_cell.cloned().map_or_else(none, Ok)?);
        let mut recurrent = weights.recurrent.zeros_like()?;
        // Gradients of the gates' preactivations with respect to the input product and to the recurrent
        // product.
        let (mut projected, mut recurrent_projected) = (Vec::new(), Vec::new());
        for (at, step) in self.steps.iter().enumerate().rev() {
            if let Some(states) = &states {
                state = (state + states.get(at)?)?;
            }
            let before = self.before(at);
            let back = match self.of {
                Cell::Lstm => back_lstm(step, before.1, &state, &cell)?,
                Cell::Gru { reset_after } => back_gru(step, before.0, &state, weights, reset_after)?,
            };
            recurrent = (recurrent + back.recurrent.t()?.contiguous()?.matmul(before.0)?)?;
            if let Some((rows, seen)) = &back.of_reset {
                let hidden = seen.dim(1)?;
                let last = rows.t()?.contiguous()?.matmul(seen)?.pad_with_zeros(0, 2 * hidden, 0)?;
                recurrent = (recurrent + last)?;
            }
            state = (back.recurrent.matmul(&weights.recurrent)? + back.state)?;
            cell = back.cell;
            recurrent_projected.push(back.recurrent_projected);
            projected.push(back.projected);
        }
        projected.reverse();
        let (projected, recurrent_projected) = (Tensor::stack(&projected, 0)?, Tensor::stack(&recurrent_projected, 0)?);
        let (count, batch, rows) = projected.dims3()?;
        let flat = projected.reshape((count * batch, rows))?;
        let x = self.x.reshape((count * batch, self.x.dim(2)?))?;
        let of_x = flat.matmul(&weights.input)?.reshape(self.x.dims())?;
        let gradients = Weights {
            input: flat.t()?.contiguous()?.matmul(&x)?,
            recurrent,
            input_bias: flat.sum(0)?,
            recurrent_bias: recurrent_projected.sum((0, 1))?,
            state,
            cell,
        };
        Ok((ordered(&of_x, self.reversed)?, gradients))
    }
}

/// Gradients of one step.
struct StepBack {
    /// Gradient of the input product.
    projected: Tensor,
    /// Gradient of the recurrent product with the previous state; zero where `of_reset` covers it.
    recurrent: Tensor,
    /// Gradient of the recurrent bias.
    recurrent_projected: Tensor,
    /// Gradient of the last gate of a GRU, and the state after the reset gate that it reads.
    of_reset: Option<(Tensor, Tensor)>,
    /// Gradient of the previous state, without the part through the recurrent product.
    state: Tensor,
    /// Gradient of the previous cell.
    cell: Tensor,
}

/// Backward of a sigmoid, from its value.
fn through_sigmoid(gradient: Tensor, y: &Tensor) -> Result<Tensor> {
    (gradient * y)? * (1.0 - y)?
}

/// Backward of a hyperbolic tangent, from its value.
fn through_tanh(gradient: Tensor, y: &Tensor) -> Result<Tensor> {
    gradient * (1.0 - y.sqr()?)?
}

fn back_lstm(step: &Step, cell_before: &Tensor, state: &Tensor, cell: &Tensor) -> Result<StepBack> {
    let [input, output, forget, new] = step.gates.as_slice() else { candle_core::bail!("an LSTM has four gates") };
    let tanh = step.cell.tanh()?;
    let of_cell = (cell + through_tanh((state * output)?, &tanh)?)?;
    let parts = [
        through_sigmoid((&of_cell * new)?, input)?,
        through_sigmoid((state * &tanh)?, output)?,
        through_sigmoid((&of_cell * cell_before)?, forget)?,
        through_tanh((&of_cell * input)?, new)?,
    ];
    let projected = Tensor::cat(&parts, 1)?;
    Ok(StepBack {
        recurrent: projected.clone(),
        recurrent_projected: projected.clone(),
        projected,
        of_reset: None,
        state: state.zeros_like()?,
        cell: (of_cell * forget)?,
    })
}

fn back_gru(step: &Step, before: &Tensor, state: &Tensor, weights: &Weights, reset_after: bool) -> Result<StepBack> {
    let [update, reset, new] = step.gates.as_slice() else { candle_core::bail!("a GRU has three gates") };
    let hidden = before.dim(1)?;
    let of_new = through_tanh((state * (1.0 - update)?)?, new)?;
    let of_update = through_sigmoid((state * (before - new)?)?, update)?;
    let kept = (state * update)?;
    if reset_after {
        let of_reset = through_sigmoid((&of_new * &step.recurrent)?, reset)?;
        let recurrent_projected = Tensor::cat(&[&of_update, &of_reset, &(&of_new * reset)?], 1)?;
        let projected = Tensor::cat(&[&of_update, &of_reset, &of_new], 1)?;
        return Ok(StepBack { projected, recurrent: recurrent_projected.clone(), recurrent_projected, of_reset: None, state: kept, cell: state.zeros_like()? });
    }
    let of_seen = of_new.matmul(&weights.recurrent.narrow(0, 2 * hidden, hidden)?.contiguous()?)?;
    let of_reset = through_sigmoid((&of_seen * before)?, reset)?;
    let projected = Tensor::cat(&[&of_update, &of_reset, &of_new], 1)?;
    let recurrent = Tensor::cat(&[&of_update, &of_reset, &of_new.zeros_like()?], 1)?;
    let state = (kept + (of_seen * reset)?)?;
    Ok(StepBack { recurrent_projected: projected.clone(), projected, recurrent, of_reset: Some((of_new, (reset * before)?)), cell: state.zeros_like()?, state })
}

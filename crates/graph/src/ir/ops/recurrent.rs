//! Recurrent layers.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::recurrent_steps::{Cell, Pass, Weights};
use super::{Backward, OpSpec, elements, require_floats};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// The recurrent cell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecurrentKind {
    /// Input, output and forget gates around a cell (Hochreiter and Schmidhuber, 1997; Gers et al.,
    /// 2000); rows of the weights are in the order input, output, forget, cell.
    #[default]
    Lstm,
    /// Update and reset gates (Cho et al., 2014); rows of the weights are in the order update, reset,
    /// hidden.
    Gru,
}

/// The order in which steps are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From first to last.
    #[default]
    Forward,
    /// From last to first.
    Reverse,
    /// Both, with separate weights.
    Both,
}

/// The result of a recurrent layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecurrentResult {
    /// The hidden states of all steps, `[steps, directions, batch, hidden]`.
    #[default]
    Steps,
    /// The hidden state after the last step read, `[directions, batch, hidden]`.
    Last,
    /// The cell state after the last step read, `[directions, batch, hidden]`; LSTM only.
    Cell,
}

/// ONNX's `LSTM` and `GRU` with their default activations. Inputs: `[steps, batch, width]`, weights
/// `[directions, gates · hidden, width]`, recurrent weights `[directions, gates · hidden, hidden]`, and
/// optionally biases `[directions, 2 · gates · hidden]` (of inputs, then of states), initial states
/// `[directions, batch, hidden]` and, for an LSTM, initial cells of the same shape. The defaults are
/// zeros.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recurrent {
    /// The recurrent cell.
    pub kind: RecurrentKind,
    /// The order in which steps are read.
    pub direction: Direction,
    /// The result.
    pub result: RecurrentResult,
    /// Whether a GRU applies the reset gate after the recurrent product instead of before it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub reset_after: bool,
}

impl Recurrent {
    fn gates(&self) -> usize {
        if self.kind == RecurrentKind::Lstm { 4 } else { 3 }
    }

    fn directions(&self) -> usize {
        if self.direction == Direction::Both { 2 } else { 1 }
    }

    /// Whether a direction reads from last to first.
    fn reversed(&self, direction: usize) -> bool {
        self.direction == Direction::Reverse || direction == 1
    }

    fn cell(&self) -> Cell {
        match self.kind {
            RecurrentKind::Lstm => Cell::Lstm,
            RecurrentKind::Gru => Cell::Gru { reset_after: self.reset_after },
        }
    }

    /// The weights and initial states of one direction, in at least 32 bits.
    fn weights(&self, inputs: &[&Tensor], direction: usize) -> candle_core::Result<Weights> {
        let part = |index: usize| inputs.get(index).map(|tensor| wide(&tensor.get(direction)?)).transpose();
        let (_, batch, _) = inputs[0].dims3()?;
        let (Some(input), Some(recurrent)) = (part(1)?, part(2)?) else { candle_core::bail!("a recurrent layer takes at least three inputs") };
        let (rows, hidden) = recurrent.dims2()?;
        let none = |shape: &[usize]| Tensor::zeros(shape, recurrent.dtype(), recurrent.device());
        let biases = part(3)?.map_or_else(|| none(&[2 * rows]), Ok)?;
        let start = |index: usize| part(index)?.map_or_else(|| none(&[batch, hidden]), Ok);
        Ok(Weights {
            input_bias: biases.narrow(0, 0, rows)?,
            recurrent_bias: biases.narrow(0, rows, rows)?,
            state: start(4)?,
            cell: start(5)?,
            input,
            recurrent,
        })
    }

    /// The forward pass of each direction.
    fn passes(&self, inputs: &[&Tensor]) -> candle_core::Result<Vec<Pass>> {
        let x = wide(inputs[0])?;
        let pass = |direction: usize| Pass::run(self.cell(), &x, self.weights(inputs, direction)?, self.reversed(direction));
        (0..self.directions()).map(pass).collect()
    }
}

impl OpSpec for Recurrent {
    fn arity(&self) -> Range<usize> {
        3..if self.kind == RecurrentKind::Lstm { 7 } else { 6 }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        for (ty, (rank, what)) in inputs.iter().zip([
            (3, "the input"),
            (3, "the weight"),
            (3, "the recurrent weight"),
            (2, "the bias"),
            (3, "the first state"),
            (3, "the first cell"),
        ]) {
            require_floats(ty, rank, what)?;
        }
        if self.result == RecurrentResult::Cell && self.kind == RecurrentKind::Gru {
            return Err("a GRU has no cell".into());
        }
        if inputs[0].shape[0] == Dim::Fixed(0) {
            return Err("the sequence is empty".into());
        }
        let hidden = inputs[2].shape[2].fixed().ok_or("the size of the recurrent weight must be fixed")?;
        let (directions, rows) = (Dim::Fixed(self.directions()), Dim::product(hidden, self.gates())?);
        let both = Dim::product(hidden, 2 * self.gates())?;
        let state = vec![directions.clone(), inputs[0].shape[1].clone(), Dim::Fixed(hidden)];
        let wanted = [
            vec![directions.clone(), rows.clone(), inputs[0].shape[2].clone()],
            vec![directions.clone(), rows, Dim::Fixed(hidden)],
            vec![directions, both],
            state.clone(),
            state.clone(),
        ];
        for (index, (ty, wanted)) in inputs[1..].iter().zip(wanted).enumerate() {
            let fits = ty.shape.iter().zip(&wanted).all(|(size, wanted)| size.same(wanted).is_some());
            if !fits {
                return Err(format!("input {} is {ty}, expected {}", index + 1, TensorType { element: Element::Float, shape: wanted }));
            }
        }
        let steps = (self.result == RecurrentResult::Steps).then(|| inputs[0].shape[0].clone());
        Ok(TensorType { element: Element::Float, shape: steps.into_iter().chain(state).collect() })
    }

    /// Every gate reads all units of the state at every step, so that units cannot be pruned.
    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rest = ["", ", _ _", ", _ b _", ", _ b _"][..inputs.len() - 2].concat();
        format!("_ b k, _ _ k, _ _ _{rest} -> {}_ b _", if self.result == RecurrentResult::Steps { "_ " } else { "" })
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let passes = self.passes(&inputs.iter().collect::<Vec<_>>())?;
        let (of, axis) = match self.result {
            RecurrentResult::Steps => (passes.iter().map(Pass::states).collect::<candle_core::Result<Vec<_>>>()?, 1),
            RecurrentResult::Last => (passes.iter().map(|pass| pass.last().0.clone()).collect(), 0),
            RecurrentResult::Cell => (passes.iter().map(|pass| pass.last().1.clone()).collect(), 0),
        };
        Tensor::stack(&of, axis)?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let inputs = backward.inputs.iter().map(super::Saved::tensor).collect::<candle_core::Result<Vec<_>>>()?;
        let gradient = wide(backward.gradient)?;
        let mut found = Vec::new();
        for (direction, pass) in self.passes(&inputs)?.iter().enumerate() {
            found.push(match self.result {
                RecurrentResult::Steps => pass.back(Some(&gradient.narrow(1, direction, 1)?.squeeze(1)?), None, None)?,
                RecurrentResult::Last => pass.back(None, Some(&gradient.get(direction)?), None)?,
                RecurrentResult::Cell => pass.back(None, None, Some(&gradient.get(direction)?))?,
            });
        }
        let of = |index: usize, part: &dyn Fn(&Weights) -> candle_core::Result<Tensor>| {
            let all = || Tensor::stack(&found.iter().map(|(_, weights)| part(weights)).collect::<candle_core::Result<Vec<_>>>()?, 0);
            backward.gradient_of(index, || all()?.to_dtype(backward.gradient.dtype()))
        };
        let of_input = backward.gradient_of(0, || {
            let mut parts = found.iter().map(|(x, _)| x);
            let first = parts.next().cloned().map_or_else(|| gradient.zeros_like(), Ok)?;
            parts.try_fold(first, |sum, part| sum + part)?.to_dtype(backward.gradient.dtype())
        })?;
        let all = [
            of_input,
            of(1, &|w| Ok(w.input.clone()))?,
            of(2, &|w| Ok(w.recurrent.clone()))?,
            of(3, &|w| Tensor::cat(&[&w.input_bias, &w.recurrent_bias], 0))?,
            of(4, &|w| Ok(w.state.clone()))?,
            of(5, &|w| Ok(w.cell.clone()))?,
        ];
        Ok(all.into_iter().take(backward.inputs.len()).collect())
    }

    fn macs(&self, inputs: &[&TensorType], _output: &TensorType, bindings: &Bindings) -> u64 {
        let size = |axis: usize| inputs[0].shape[axis].evaluate(bindings).unwrap_or(0) as u64;
        let weights = elements(inputs[1], bindings).saturating_add(elements(inputs[2], bindings));
        size(0).saturating_mul(size(1)).saturating_mul(weights)
    }
}

//! Short training of a branch with fewer units on the original output of its block.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::samples::{Split, Use};
use crate::data::{Padding, TokenAxis};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Blockwise, Forward, MemoryTracker, Parameters, Placement, Tape};
use crate::ir::ValueId;
use crate::pass::Context;
use crate::pass::calibrate::tensor_error;
use crate::train::optimizer::{self, Kind, Settings};

/// Options of the training.
#[derive(Debug, Clone, Copy)]
pub(super) struct Training {
    /// Number of steps, each with one batch of samples.
    pub steps: usize,
    /// Learning rate of the first step, from which it decreases linearly.
    pub rate: f64,
}

/// A weight of which some elements remain zero.
pub(super) struct Masked<'m> {
    pub weight: &'m str,
    /// Ones and zeros in the shape of the weight.
    pub mask: &'m Tensor,
}

/// A block of the original model in the runs of all samples.
struct Block<'r, 'a> {
    runs: &'r Blockwise<'a>,
    tape: Tape<'a>,
    output: ValueId,
    original: Parameters,
    tracker: Arc<MemoryTracker>,
    device: Device,
    /// For each use of samples, the mask `[…, 1]` of the rows of each batch; `None` for batches without any.
    masks: [Vec<Option<Tensor>>; 2],
}

impl Block<'_, '_> {
    /// The forward pass with these parameters, and the difference of the block's output from the original
    /// one in the rows of a mask.
    fn difference(&self, parameters: &Parameters, batch: usize, mask: &Tensor) -> Result<(Forward, Tensor)> {
        let run = |parameters: &Parameters| self.runs.forward(&self.tape, batch, parameters, &self.tracker);
        let output = |forward: &Forward| {
            let output = forward.taps().get(&self.output).cloned();
            output.ok_or_else(|| Error::graph("the output of a block", "is not computed"))
        };
        let target = output(&run(&self.original)?)?;
        let forward = run(parameters)?;
        let difference = (output(&forward)? - target).and_then(|difference| difference.broadcast_mul(mask)).map_err(tensor_error)?;
        Ok((forward, difference))
    }

    /// Squared error of the block's output on held-out samples.
    fn error(&self, parameters: &Parameters) -> Result<f64> {
        let mut sum = 0.0;
        for (batch, mask) in self.masks[Use::HeldOut as usize].iter().enumerate() {
            let Some(mask) = mask else { continue };
            let (_, difference) = self.difference(parameters, batch, mask)?;
            let square = difference.sqr().and_then(|square| square.sum_all()).and_then(|sum| transfer::number(&sum, Cause::Statistics));
            sum += square.map_err(tensor_error)?;
        }
        Ok(sum)
    }
}

impl Training {
    /// Trains the parameters `names` of the block that the runs have entered, beginning with `start`. Returns
    /// `start` if the error on held-out samples does not decrease.
    pub fn run(
        self,
        runs: &Blockwise,
        (names, start): (&BTreeSet<String>, Vec<(String, Tensor)>),
        masked: &Masked,
        (split, tokens): (Split, TokenAxis),
        context: &Context,
    ) -> Result<Vec<(String, Tensor)>> {
        let (tape, output) = runs.tape(&|name| names.contains(name))?;
        let tracker = context.memory_tracker.clone().unwrap_or_default();
        let (original, device) = (runs.parameters(), context.device.clone());
        let mut block = Block { runs, tape, output, original, tracker, device, masks: [Vec::new(), Vec::new()] };
        block.masks = masks(&block, split, tokens)?;
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for name in names {
            let tensor = start.iter().find(|(other, _)| other == name).map_or_else(|| block.original.get(name), |(_, tensor)| Ok(tensor.clone()));
            tensors.insert(name.clone(), tensor.and_then(|tensor| tensor.contiguous()?.copy()).map_err(tensor_error)?);
        }
        let with = |tensors: &BTreeMap<String, Tensor>| tensors.iter().fold(runs.parameters(), |all, (name, tensor)| all.with(name, tensor.clone()));
        let before = block.error(&with(&tensors))?;
        let settings = Settings { weight_decay: 0.0, ..Settings::default() };
        let mut optimizer = optimizer::build(Kind::AdamW, &settings, &Placement::Memory(context.device.clone()))?;
        let fitted = &block.masks[Use::Fitted as usize];
        let batches: Vec<(usize, &Tensor)> = fitted.iter().enumerate().filter_map(|(batch, mask)| Some((batch, mask.as_ref()?))).collect();
        for (step, (batch, mask)) in (0..self.steps).zip(batches.iter().cycle()) {
            context.work.cancel.check()?;
            block.tracker.begin_step(None);
            let parameters = with(&tensors);
            let (forward, difference) = block.difference(&parameters, *batch, mask)?;
            let mut gradients: BTreeMap<String, Tensor> = BTreeMap::new();
            block.tape.backward(forward, [(output, difference)].into(), &parameters, &block.tracker, &mut |name, gradient| {
                let sum = match gradients.remove(name) {
                    Some(sum) => (sum + gradient).map_err(tensor_error)?,
                    None => gradient,
                };
                gradients.insert(name.to_owned(), sum);
                Ok(())
            })?;
            let rate = self.rate * (1.0 - step as f64 / self.steps as f64);
            for (name, gradient) in gradients {
                let Some(tensor) = tensors.get(&name) else { continue };
                let gradient = if name == masked.weight { gradient.mul(masked.mask) } else { Ok(gradient) };
                let gradient = gradient.and_then(|gradient| gradient.contiguous()).map_err(tensor_error)?;
                optimizer.update(&name, tensor, &gradient, rate, step as u64 + 1)?;
            }
        }
        let after = block.error(&with(&tensors))?;
        Ok(if after < before { tensors.into_iter().collect() } else { start })
    }
}

/// The masks of the rows of all batches, for each use of samples.
fn masks(block: &Block, split: Split, tokens: TokenAxis) -> Result<[Vec<Option<Tensor>>; 2]> {
    let mut masks = [Vec::new(), Vec::new()];
    let mut first = 0;
    for index in 0..block.runs.batches() {
        let batch = block.runs.batch(index);
        let forward = block.runs.forward(&block.tape, index, &block.original, &block.tracker)?;
        let mut shape = forward.taps().get(&block.output).map(|output| output.dims().to_vec()).unwrap_or_default();
        let rows: usize = shape.iter().rev().skip(1).product();
        let padding = Padding::from_batch(batch).map_err(tensor_error)?;
        let is_token = padding.token_rows(tokens, &shape).map_or_else(|| vec![true; rows], |is_token| is_token.into_owned());
        shape.iter_mut().rev().take(1).for_each(|width| *width = 1);
        let sample = |row: usize| first + row * batch.samples / rows.max(1);
        for (of_use, masks) in [Use::Fitted, Use::HeldOut].into_iter().zip(&mut masks) {
            let used = is_token.iter().enumerate().map(|(row, is_token)| *is_token && split.is_held_out(sample(row)) == (of_use == Use::HeldOut));
            let values: Vec<f32> = used.map(|used| f32::from(u8::from(used))).collect();
            if values.iter().all(|value| *value == 0.0) {
                masks.push(None);
                continue;
            }
            let mask = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).and_then(|mask| transfer::to_device(&mask, &block.device, Cause::Batch));
            masks.push(Some(mask.map_err(tensor_error)?));
        }
        first += batch.samples;
    }
    Ok(masks)
}

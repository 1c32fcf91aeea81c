//! Outputs of layers by which solutions are compared on held-out tokens.

use std::ops::Range;
use std::rc::Rc;

use super::held_out::HeldOut;
use super::output_feedback::OutputFeedback;
use super::solver::Change;
use super::{Layer, Readers};
use crate::error::Result;
use crate::pass::calibrate::tensor_error;

/// Maximum number of outputs of a layer that are compared.
const MAX_OUTPUTS: usize = 256;
/// Maximum number of layers that are solved together, which limits the memory of a GPU.
const MAX_STACKED: usize = 16;

/// Some outputs of layers that are solved together, and their values for the held-out rows of each fold.
pub(super) struct Sampled {
    /// The first of the complete layers, on which amounts depend.
    pub layer: Layer,
    /// Indices of the layers, and their outputs among those below.
    pub layers: Vec<(usize, Range<usize>)>,
    /// Values of the weights for these outputs.
    pub values: Vec<f32>,
    /// Outputs of the original model, and of these weights for the current inputs.
    pub outputs: Vec<[Vec<f32>; 2]>,
    /// Compensation between these outputs.
    pub feedback: Option<Rc<OutputFeedback>>,
}

impl Sampled {
    /// Samples outputs of layers, given by their indices.
    pub fn new(readers: &Readers, stack: Vec<usize>, folds: &[HeldOut]) -> Result<Sampled> {
        let first = &readers.layers[stack[0]];
        let mut complete = readers.values(first)?.1;
        let mut parts = Vec::with_capacity(stack.len());
        for (at, index) in stack.into_iter().enumerate() {
            let layer = &readers.layers[index];
            if at > 0 {
                complete = readers.values(layer)?.1;
            }
            let rows = complete.chunks_exact(layer.size.max(1)).step_by(outputs_step(layer));
            parts.push((index, rows.flatten().copied().collect()));
        }
        Sampled::with_values(first, parts, folds)
    }

    /// From values of layers `[n, size]`, given by their indices.
    pub fn with_values(layer: &Layer, parts: Vec<(usize, Vec<f32>)>, folds: &[HeldOut]) -> Result<Sampled> {
        let (mut layers, mut values) = (Vec::with_capacity(parts.len()), Vec::new());
        for (index, part) in parts {
            let first = values.len() / layer.size.max(1);
            values.extend(part);
            layers.push((index, first..values.len() / layer.size.max(1)));
        }
        let outputs = |fold: &HeldOut| Ok([fold.original_outputs(&values, layer.size)?, fold.outputs(&values, layer.size)?]);
        let outputs = folds.iter().map(outputs).collect::<Result<_>>()?;
        Ok(Sampled { layer: layer.clone(), layers, values, outputs, feedback: None })
    }

    /// Number of outputs.
    pub fn width(&self) -> usize {
        self.values.len() / self.layer.size.max(1)
    }

    /// Outputs of held-out rows for the values with their complete change.
    pub fn corrected_outputs(&self, held_out: &HeldOut, change: &Change) -> Result<Vec<f32>> {
        match change {
            Change::Host(change) => {
                let corrected: Vec<f32> = self.values.iter().zip(change).map(|(value, change)| value + change).collect();
                held_out.outputs(&corrected, self.layer.size)
            }
            Change::Device { weight, change } => held_out.outputs_on_device(&(weight + change).map_err(tensor_error)?),
        }
    }
}

/// Distance of the compared outputs of a layer.
pub(super) fn outputs_step(layer: &Layer) -> usize {
    layer.rows.div_ceil(MAX_OUTPUTS).max(1)
}

/// Indices of the layers that are solved together.
pub(super) fn stacks(layers: &[Layer], can_stack: impl Fn([&Layer; 2]) -> bool) -> Vec<Vec<usize>> {
    let mut stacks: Vec<Vec<usize>> = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        match stacks.iter_mut().find(|stack| stack.len() < MAX_STACKED && can_stack([&layers[stack[0]], layer])) {
            Some(stack) => stack.push(index),
            None => stacks.push(vec![index]),
        }
    }
    stacks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_layers_that_match_are_stacked() {
        let layers = [3, 5, 3, 5, 7].map(|rows| Layer { weight: "w".into(), rows, size: 4, input_major: false });
        assert_eq!(stacks(&layers, |[a, b]| a.rows == b.rows), [vec![0, 2], vec![1, 3], vec![4]]);
        assert_eq!(stacks(&layers, |_| false).len(), 5);
        let many = vec![layers[0].clone(); MAX_STACKED + 1];
        assert_eq!(stacks(&many, |_| true).iter().map(Vec::len).collect::<Vec<_>>(), [MAX_STACKED, 1]);
    }
}

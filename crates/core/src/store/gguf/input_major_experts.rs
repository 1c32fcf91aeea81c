//! Projections of all experts that checkpoints store as `[experts, in, out]`, as in gpt-oss and Llama 4.
//! GGUF files store each projection as `[experts, out, in]`, and gate and up separately, whose outputs
//! alternate in checkpoints of gpt-oss, and follow each other in those of Llama 4. Biases `[experts, out]`
//! are handled like matrices with one input.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::ops::Range;
use std::sync::Arc;

use super::joined::visit_floats;
use super::row_permutation::plain;
use crate::error::{Error, Result};
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource, least_common_multiple};

/// Experts, inputs and outputs of a projection or a bias.
fn sizes(shape: &[usize]) -> Option<[usize; 3]> {
    match *shape {
        [experts, inputs, outputs] => Some([experts, inputs, outputs]),
        [experts, outputs] => Some([experts, 1, outputs]),
        _ => None,
    }
}

/// Selected elements of each matrix of a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outputs {
    /// Range of inputs.
    pub inputs: Range<usize>,
    /// First output.
    pub start: usize,
    /// Every `step`-th output from `start` on.
    pub step: usize,
    /// Number of selected outputs.
    pub count: usize,
}

/// Selected outputs of all experts.
struct ExpertOutputs {
    upstream: Weight,
    selected: Outputs,
    inputs: usize,
    outputs: usize,
    name: String,
}

/// The selected elements of a projection `[experts, in, out]` or of a bias, as `[experts, out, in]`. Weights
/// of another rank are returned unchanged.
pub fn expert_outputs(upstream: &Weight, selected: Outputs, name: &str) -> Weight {
    let Some([experts, inputs, outputs]) = sizes(&upstream.shape) else { return upstream.clone() };
    let count = selected.count;
    let shape = if upstream.shape.len() == 2 { vec![experts, count] } else { vec![experts, count, selected.inputs.len()] };
    let part = selected.inputs.len().saturating_mul(count);
    let stored = upstream.stored_bytes.saturating_mul(part as u64).checked_div(inputs.saturating_mul(outputs) as u64);
    let source = ExpertOutputs { upstream: upstream.clone(), selected, inputs, outputs, name: name.to_owned() };
    let mut weight = Weight::new(upstream.dtype, shape, Encoding::Dense, Arc::new(source));
    weight.origin = upstream.origin;
    weight.stored_bytes = stored.unwrap_or(0);
    weight
}

impl ExpertOutputs {
    /// Selects and transposes the outputs of complete experts.
    fn select(&self, view: &View, bytes: &mut Vec<u8>) -> Result<DType> {
        let mut floats = Vec::new();
        let (dtype, values) = plain(view, 0.0, &self.name, &mut floats)?;
        let size = (dtype.bitsize() / 8).max(1);
        bytes.clear();
        for expert in values.chunks_exact(self.inputs.saturating_mul(self.outputs).saturating_mul(size).max(1)) {
            for output in (self.selected.start..self.outputs).step_by(self.selected.step.max(1)).take(self.selected.count) {
                let rows = expert.chunks_exact(self.outputs.saturating_mul(size).max(1));
                for row in rows.skip(self.selected.inputs.start).take(self.selected.inputs.len()) {
                    bytes.extend(row.chunks_exact(size).nth(output).unwrap_or_default());
                }
            }
        }
        Ok(dtype)
    }
}

impl WeightSource for ExpertOutputs {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let each = self.inputs.saturating_mul(self.outputs).max(1);
        let written = self.selected.count.saturating_mul(self.selected.inputs.len()).max(1);
        let experts = least_common_multiple(unit, written).checked_div(written).unwrap_or(1);
        let (mut now, mut before) = (Vec::new(), Vec::new());
        self.upstream.visit(experts.saturating_mul(each), &mut |block| {
            let dtype = self.select(&block.now, &mut now)?;
            if block.now.is(&block.before) {
                return sink(Block::untouched(View::dense(dtype, &now)));
            }
            let before_dtype = self.select(&block.before, &mut before)?;
            sink(Block { now: View::dense(dtype, &now), before: View::dense(before_dtype, &before) })
        })
    }
}

/// The projections of each expert, whose outputs alternate in the result or follow each other.
struct JoinedExperts {
    alternates: bool,
    experts: Vec<Vec<Weight>>,
    inputs: usize,
    outputs: usize,
    dtype: DType,
    name: String,
}

/// The weight `[experts, in, out · parts]`, or the bias `[experts, out · parts]`, of the projections `[out,
/// in]` or biases `[out]` of each expert. Their outputs alternate, or follow each other.
///
/// # Errors
/// The projections have different shapes or dtypes.
pub fn joined_experts(experts: Vec<Vec<Weight>>, alternates: bool, name: &str) -> Result<Weight> {
    let all = || experts.iter().flatten();
    let (Some(first), Some(parts)) = (all().next().cloned(), experts.first().map(Vec::len)) else {
        return Err(Error::tensor(name, "has no experts", "the tensors do not match the metadata of the file"));
    };
    if all().any(|other| (other.dtype, &other.shape) != (first.dtype, &first.shape)) || !first.is_float() || !(1..=2).contains(&first.shape.len()) {
        return Err(Error::tensor(name, "has parts of different shapes or types", "the tensors do not match each other"));
    }
    let (outputs, inputs) = (first.shape.first().copied().unwrap_or(0), first.shape.get(1).copied());
    let count = outputs.saturating_mul(parts);
    let shape = inputs.map_or(vec![experts.len(), count], |inputs| vec![experts.len(), inputs, count]);
    let bytes = all().fold(0u64, |sum, weight| sum.saturating_add(weight.stored_bytes));
    let stored_as = all().flat_map(|weight| weight.stored_as.clone()).collect::<std::collections::BTreeSet<_>>().into_iter().collect();
    let (dtype, stored_type) = (first.dtype, first.stored_type);
    let source = JoinedExperts { alternates, experts, inputs: inputs.unwrap_or(1), outputs, dtype, name: name.to_owned() };
    let mut weight = Weight::new(dtype, shape, Encoding::Dense, Arc::new(source));
    (weight.stored_bytes, weight.stored_as, weight.stored_type) = (bytes, stored_as, stored_type);
    Ok(weight)
}

impl WeightSource for JoinedExperts {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let parts = self.experts.first().map_or(0, Vec::len);
        let each = self.inputs.saturating_mul(self.outputs).saturating_mul(parts);
        visit_floats(&self.experts, each, (self.dtype, &self.name), unit, sink, |expert, values| {
            let floats: Vec<Vec<f32>> = expert.iter().map(|part| part.floats(&self.name)).collect::<Result<_>>()?;
            for input in 0..self.inputs {
                let column = |part: &[f32]| part.iter().skip(input).step_by(self.inputs.max(1)).copied().collect::<Vec<f32>>();
                let columns: Vec<Vec<f32>> = floats.iter().map(|part| column(part)).collect();
                if self.alternates {
                    values.extend((0..self.outputs).flat_map(|output| columns.iter().filter_map(move |part| part.get(output))));
                } else {
                    values.extend(columns.iter().flatten());
                }
            }
            Ok(())
        })
    }
}

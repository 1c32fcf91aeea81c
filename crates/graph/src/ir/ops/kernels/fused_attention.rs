//! Attention on GPUs: matrix products, and one kernel for scale, mask and softmax, or its gradient.

use candle_core::{DType, Result, Tensor};

use super::super::attention::Block;
use super::super::attention_inputs::extras;
use super::super::gradient::wide;
use super::super::{Attention, Backward};
use super::Gradients;
use crate::gpu::{self, Products};

/// The queries of a block and their attention probabilities; `None` if the kernel does not support the
/// attention.
fn probabilities(op: &Attention, block: &Block, (q, keys): (&Tensor, &Tensor), mask: Option<&Tensor>) -> Result<Option<(Tensor, Tensor)>> {
    let (_, groups, _, _) = keys.dims4()?;
    let queries = block.of_queries(q, groups)?;
    // Products of f16 numbers may overflow before they are scaled.
    let (factor, scale) = if q.dtype() == DType::F16 { (op.scale, 1.0) } else { (1.0, op.scale) };
    let scaled = if factor == 1.0 { queries.clone() } else { (&queries * factor)? };
    let products = scaled.matmul(&keys.transpose(2, 3)?)?;
    let at = Products {
        rows_per_sample: q.dim(1)? * block.queries.len(),
        queries: block.queries.len(),
        first: block.past + block.queries.start,
        start: block.keys.start,
        scale,
        causal: op.causal,
        window: op.window,
    };
    Ok(gpu::attention_softmax(&products, mask, at)?.map(|()| (queries, products)))
}

/// Whether the kernel supports the attention.
fn is_supported(op: &Attention, q: &Tensor, rest: &[Tensor]) -> bool {
    let extras = extras(rest);
    let plain = op.soft_cap.is_none() && !op.segments && !op.zero_where_hidden && op.window != Some(0);
    q.device().is_cuda() && plain && extras.bias.is_none() && extras.sinks.is_none()
}

/// The output; `None` if the kernel does not support the attention.
pub(super) fn forward(op: &Attention, inputs: &[Tensor]) -> Result<Option<Tensor>> {
    let (q, k, v, rest) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3..]);
    if !is_supported(op, q, rest) {
        return Ok(None);
    }
    let (mask, (batch, heads, _, _)) = (extras(rest).mask, q.dims4()?);
    let mut parts = Vec::new();
    for block in op.blocks(q, k, mask.is_some())? {
        let Some((_, probabilities)) = probabilities(op, &block, (q, &block.of_keys(k)?), mask)? else { return Ok(None) };
        parts.push(probabilities.matmul(&block.of_keys(v)?)?.reshape((batch, heads, block.queries.len(), v.dim(3)?))?);
    }
    joined(parts, 2).map(Some)
}

/// Concatenates tensors, without a copy if there is only one.
fn joined(mut parts: Vec<Tensor>, axis: usize) -> Result<Tensor> {
    match parts.pop() {
        Some(only) if parts.is_empty() => Ok(only),
        last => Tensor::cat(&parts.into_iter().chain(last).collect::<Vec<_>>(), axis),
    }
}

/// Adds the part of a block to the gradient of all keys or values.
fn add(block: &Block, sum: &mut Option<Tensor>, part: Tensor, keys: usize) -> Result<()> {
    match sum {
        None if block.keys.len() == keys => *sum = Some(part),
        None => block.add(sum, &part, keys)?,
        // Several parts are summed in 32 bits.
        Some(first) => {
            *first = wide(first)?;
            block.add(sum, &part, keys)?;
        }
    }
    Ok(())
}

/// Gradients; `None` if the kernel does not support the attention.
pub(super) fn backward(op: &Attention, backward: &Backward) -> Result<Option<Gradients>> {
    let [q, k, v] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.inputs[2].tensor()?];
    let rest = backward.inputs[3..].iter().map(|saved| saved.tensor().cloned()).collect::<Result<Vec<_>>>()?;
    if !is_supported(op, q, &rest) {
        return Ok(None);
    }
    let ((batch, heads, _, width), (_, groups, keys, _), mask) = (q.dims4()?, k.dims4()?, extras(&rest).mask);
    let (mut of_queries, mut of_keys, mut of_values) = (Vec::new(), None, None);
    for block in op.blocks(q, k, mask.is_some())? {
        let (k, v) = (block.of_keys(k)?, block.of_keys(v)?);
        let Some((queries, probabilities)) = probabilities(op, &block, (q, &k), mask)? else { return Ok(None) };
        let gradient = block.of_queries(backward.gradient, groups)?;
        if backward.needs_gradient(2) {
            add(&block, &mut of_values, probabilities.transpose(2, 3)?.matmul(&gradient)?, keys)?;
        }
        if backward.needs_gradient(0) || backward.needs_gradient(1) {
            let of_scores = gradient.matmul(&v.transpose(2, 3)?)?;
            if gpu::softmax_back(&probabilities, &of_scores, op.scale)?.is_none() {
                return Ok(None);
            }
            of_queries.push(of_scores.matmul(&k)?.reshape((batch, heads, block.queries.len(), width))?);
            add(&block, &mut of_keys, of_scores.transpose(2, 3)?.matmul(&queries)?, keys)?;
        }
    }
    let narrow = |sum: Option<Tensor>| sum.map(|sum| sum.to_dtype(q.dtype())).transpose();
    let of_queries = if backward.needs_gradient(0) { Some(joined(of_queries, 2)?) } else { None };
    let of_keys = narrow(of_keys.filter(|_| backward.needs_gradient(1)))?;
    let found = [of_queries, of_keys, narrow(of_values)?].into_iter().chain(rest.iter().map(|_| None));
    Ok(Some(found.collect()))
}

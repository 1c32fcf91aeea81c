//! Validation of inputs against the types of a graph, before anything is computed.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::transfer::{self, Cause};
use crate::error::{Error, Result};
use crate::ir::{Element, Graph, Kind, Node, Op, OpSpec, Value, ValueId, input_tensor};

/// Input tensors of a graph, by name.
pub type Inputs = BTreeMap<String, Tensor>;

/// Converts an input to the precision of the computation. Returns it on the host and on the device.
pub(super) fn convert(value: &Value, inputs: &Inputs, device: &Device, compute: DType) -> Result<(Tensor, Tensor)> {
    let what = || format!("input `{}`", value.name);
    let unusable = |e: candle_core::Error| Error::run(what(), e, "");
    let missing = || Error::run(what(), "is missing", format!("the model requires {}", value.ty));
    let provided = input_tensor(inputs, &value.name).ok_or_else(missing)?.map_err(unusable)?;
    let fits =
        provided.rank() == value.ty.shape.len() && value.ty.shape.iter().zip(provided.dims()).all(|(want, have)| want.fixed().is_none_or(|w| w == *have));
    if !fits {
        return Err(Error::run(what(), format!("has shape {:?}, but the model requires {}", provided.dims(), value.ty), ""));
    }
    let dtype = if value.ty.element == Element::Int { DType::I64 } else { compute };
    let host = provided.to_dtype(dtype).map_err(unusable)?;
    let on_device = transfer::to_device(&host, device, Cause::Batch).map_err(unusable)?;
    Ok((host, on_device))
}

/// Checks that the indices of embeddings are rows of their tables, and that texts have an image token for
/// each patch. Checks inputs and positions, which follow from the inputs and the number `tokens` of preceding
/// tokens, on the host.
pub(super) fn require_rows(graph: &Graph, inputs: &[(ValueId, Tensor)], tokens: usize) -> Result<()> {
    let mut known: BTreeMap<ValueId, Tensor> = inputs.iter().filter(|(_, tensor)| tensor.dtype() == DType::I64).cloned().collect();
    for node in graph.nodes() {
        let of_tokens = usize::from(matches!(node.op, Op::InsertImages(_)));
        let Some(indices) = node.inputs.get(of_tokens).and_then(|id| known.get(id)) else { continue };
        let failed = |e: candle_core::Error| Error::run(format!("graph node `{}`", graph.value(node.output).name), e, "");
        match &node.op {
            Op::Positions(op) => {
                let positions = op.at_most(indices, tokens).map_err(failed)?;
                known.insert(node.output, positions);
            }
            Op::Slice(op) => {
                let part = op.eval(std::slice::from_ref(indices)).map_err(failed)?;
                known.insert(node.output, part);
            }
            Op::Embedding(_) => {
                let table = node.inputs.get(1).and_then(|id| graph.value(*id).ty.shape.first()?.fixed());
                if let Some(rows) = table {
                    require_indices(graph, node, indices.dims(), &transfer::read::<i64>(indices).map_err(failed)?, rows)?;
                }
            }
            Op::InsertImages(op) => {
                let patches = node.inputs.get(2).and_then(|id| graph.value(*id).ty.shape.get(1)?.fixed()).unwrap_or(0);
                let numbers = transfer::read::<i64>(indices).map_err(failed)?;
                let rows = numbers.chunks(indices.dims().last().copied().unwrap_or(1).max(1));
                let counts = rows.map(|row| row.iter().filter(|number| **number == op.token).count());
                if let Some((row, count)) = counts.enumerate().find(|(_, count)| *count != patches) {
                    let reason = format!("row {row} has {count} image tokens ({}), but an image has {patches} patches", op.token);
                    return Err(Error::run("input `input_ids`", reason, "each text must contain one image, and its token once for each merged patch"));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn require_indices(graph: &Graph, node: &Node, dims: &[usize], numbers: &[i64], rows: usize) -> Result<()> {
    let value = |position: usize| node.inputs.get(position).map(|id| graph.value(*id));
    let name = |position: usize| value(position).map_or("", |value| value.name.as_str());
    let wrong = numbers.iter().enumerate().find(|(_, number)| !usize::try_from(**number).is_ok_and(|n| n < rows));
    let Some((at, number)) = wrong else { return Ok(()) };
    let width = dims.last().copied().unwrap_or(1);
    let (row, column) = (at.checked_div(width).unwrap_or(0), at.checked_rem(width).unwrap_or(0));
    let what = if value(0).is_some_and(|value| value.kind == Kind::Input) { "input" } else { "graph value" };
    // ONNX counts negative indices from the end of the table.
    let from_end = i64::try_from(rows).is_ok_and(|rows| (rows.saturating_neg()..0).contains(number));
    let hint = match what {
        "input" if from_end => {
            "the built-in executor supports only indices from 0: add the number of rows to negative indices, and give padding any other id and an `attention_mask` of 0"
        }
        "input" => "the tokenizer does not belong to this model, or the ids in an array do not",
        _ => "the sequence is longer than the model's positions",
    };
    let reason = format!("contains {number} at row {row}, column {column}; `{}` has {rows} rows", name(1));
    Err(Error::run(format!("{what} `{}`", name(0)), reason, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_indices_are_not_blamed_on_the_tokenizer() {
        let graph: Graph = "input ids: int[1, 3]\nparam t: float[5, 2]\nx = Embedding(ids, t) -> float[1, 3, 2]\noutput x = x\n".parse().unwrap();
        let (ids, _) = graph.inputs().next().unwrap();
        for (number, expected) in [(-1i64, "add the number of rows"), (-6, "the tokenizer"), (5, "the ids in an array")] {
            let indices = Tensor::new(&[[0i64, number, 4]], &Device::Cpu).unwrap();
            let error = require_rows(&graph, &[(ids, indices)], 0).unwrap_err();
            assert!(error.to_string().contains(&format!("contains {number} at row 0, column 1")), "{error}");
            assert!(error.hint().unwrap_or_default().contains(expected), "{number}: {:?}", error.hint());
        }
    }
}

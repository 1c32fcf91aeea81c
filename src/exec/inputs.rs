//! Holding inputs to what a graph takes, before anything runs.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use candle_core::{DType, Device, Tensor};

use super::Inputs;
use crate::error::{Error, Result};
use crate::ir::{Element, Graph, Kind, Node, Value, given};

/// An input, on the device and in the precision of the computation.
pub(super) fn take(value: &Value, inputs: &Inputs, device: &Device, compute: DType) -> Result<Tensor> {
    let what = || format!("input `{}`", value.name);
    let unusable = |e: candle_core::Error| Error::run(what(), e, "");
    let missing = || Error::run(what(), "is missing", format!("the model takes {}", value.ty));
    let given = given(inputs, &value.name).ok_or_else(missing)?.map_err(unusable)?;
    let fits = given.rank() == value.ty.shape.len() && value.ty.shape.iter().zip(given.dims()).all(|(want, have)| want.fixed().is_none_or(|w| w == *have));
    if !fits {
        return Err(Error::run(what(), format!("has shape {:?}, the model takes {}", given.dims(), value.ty), ""));
    }
    let dtype = if value.ty.element == Element::Int { DType::I64 } else { compute };
    given.to_device(device).and_then(|t| t.to_dtype(dtype)).map_err(unusable)
}

/// Holds the indices of an embedding to the rows of its table.
pub(super) fn require_rows(graph: &Graph, node: &Node, indices: &Tensor, table: &Tensor) -> Result<()> {
    let read = || {
        let rows = table.dim(0)?;
        let indices = indices.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
        Ok((rows, indices))
    };
    let value = |position: usize| node.inputs.get(position).map(|id| graph.value(*id));
    let name = |position: usize| value(position).map_or("", |value| value.name.as_str());
    let (rows, numbers) = read().map_err(|e: candle_core::Error| Error::run(format!("graph node `{}`", graph.value(node.output).name), e, ""))?;
    let wrong = numbers.iter().enumerate().find(|(_, number)| !usize::try_from(**number).is_ok_and(|n| n < rows));
    let Some((at, number)) = wrong else { return Ok(()) };
    let width = indices.dims().last().copied().unwrap_or(1);
    let (row, column) = (at.checked_div(width).unwrap_or(0), at.checked_rem(width).unwrap_or(0));
    let what = if value(0).is_some_and(|value| value.kind == Kind::Input) { "input" } else { "graph value" };
    Err(Error::run(
        format!("{what} `{}`", name(0)),
        format!("holds {number} at row {row}, place {column}; `{}` has {rows} rows", name(1)),
        if what == "input" { "the tokenizer does not belong to this model" } else { "the sequence is longer than the model's positions" },
    ))
}

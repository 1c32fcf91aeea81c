//! Holding inputs to what a graph takes, before anything runs.

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
    let name = |position: usize| graph.value(node.inputs[position]).name.as_str();
    let (rows, numbers) = read().map_err(|e: candle_core::Error| Error::run(format!("graph node `{}`", graph.value(node.output).name), e, ""))?;
    let Some(at) = numbers.iter().position(|number| !usize::try_from(*number).is_ok_and(|n| n < rows)) else { return Ok(()) };
    let (row, column) = (at / indices.dims().last().copied().unwrap_or(1), at % indices.dims().last().copied().unwrap_or(1));
    let what = if graph.value(node.inputs[0]).kind == Kind::Input { "input" } else { "graph value" };
    Err(Error::run(
        format!("{what} `{}`", name(0)),
        format!("holds {} at row {row}, place {column}; `{}` has {rows} rows", numbers[at], name(1)),
        if what == "input" { "the tokenizer does not belong to this model" } else { "the sequence is longer than the model's positions" },
    ))
}

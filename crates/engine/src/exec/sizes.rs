//! Type inference of every op with the actual sizes of the inputs, before anything is computed, so that
//! kernels only see consistent, nonempty shapes.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};

use super::{Inputs, inputs};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Kind, Op, TensorType, ValueId};

/// Maximum number of elements of a value.
const MAX_ELEMENTS: usize = 1 << 34;

/// Caches the input sizes that passed the check last.
#[derive(Debug, Default)]
pub(super) struct InputCheck(Mutex<Option<Vec<Vec<usize>>>>);

impl InputCheck {
    /// Converts and checks all inputs, for a device and precision; `tokens` is the number of preceding
    /// tokens.
    pub fn prepare(&self, graph: &Graph, inputs: &Inputs, tokens: usize, device: &Device, compute: DType) -> Result<Vec<(ValueId, Tensor)>> {
        let (mut on_host, mut on_device) = (Vec::new(), Vec::new());
        for (id, value) in graph.inputs() {
            let (host, device_tensor) = inputs::convert(value, inputs, device, compute)?;
            on_host.push((id, host));
            on_device.push((id, device_tensor));
        }
        let sizes: Vec<Vec<usize>> = on_device.iter().map(|(_, tensor)| tensor.dims().to_vec()).collect();
        let mut checked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if checked.as_ref() != Some(&sizes) {
            check_types(graph, &on_device)?;
            *checked = Some(sizes);
        }
        inputs::require_rows(graph, &on_host, tokens)?;
        Ok(on_device)
    }
}

fn check_types(graph: &Graph, inputs: &[(ValueId, Tensor)]) -> Result<()> {
    let mut types: Vec<TensorType> = graph.values().iter().map(|value| value.ty.clone()).collect();
    for (id, tensor) in inputs {
        types[id.index()].shape = tensor.dims().iter().copied().map(Dim::Fixed).collect();
    }
    for (value, ty) in graph.values().iter().zip(&types).filter(|(value, _)| !matches!(value.kind, Kind::Node(_))) {
        if ty.shape.contains(&Dim::Fixed(0)) {
            return Err(Error::run(format!("graph value `{}`", value.name), format!("has no elements: {ty}"), ""));
        }
    }
    for node in graph.nodes() {
        let wrong = |reason: String| {
            let name = &graph.value(node.output).name;
            Error::run(format!("graph node `{name}`"), reason, "the graph does not support inputs of these sizes")
        };
        let operands: Vec<&TensorType> = node.inputs.iter().map(|id| &types[id.index()]).collect();
        let ty = node.op.spec().output(&operands).map_err(wrong)?;
        let is_open = matches!(&node.op, Op::Opaque(op) if op.has_open_shape());
        let elements = ty.shape.iter().try_fold(1usize, |all, dim| all.checked_mul(dim.fixed()?));
        if !is_open && elements.is_none_or(|elements| elements == 0 || elements > MAX_ELEMENTS) {
            return Err(wrong(format!("has the output {ty}, which is empty or too large")));
        }
        types[node.output.index()] = ty;
    }
    Ok(())
}

//! Holding every op to the sizes that inputs really have, before anything is computed: kernels see only shapes that fit and are not
//! empty.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};

use super::{Inputs, inputs};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Kind, TensorType, ValueId};

/// Elements of a value at most.
const MOST: usize = 1 << 34;

/// The sizes of inputs that were found to fit last.
#[derive(Debug, Default)]
pub(super) struct Sizes(Mutex<Option<Vec<Vec<usize>>>>);

impl Sizes {
    /// All inputs, on the device and in the precision of the computation, behind so many tokens of a sequence.
    pub fn take(&self, graph: &Graph, inputs: &Inputs, tokens: usize, device: &Device, compute: DType) -> Result<Vec<(ValueId, Tensor)>> {
        let (mut hosts, mut taken) = (Vec::new(), Vec::new());
        for (id, value) in graph.inputs() {
            let (host, there) = inputs::take(value, inputs, device, compute)?;
            hosts.push((id, host));
            taken.push((id, there));
        }
        let sizes: Vec<Vec<usize>> = taken.iter().map(|(_, tensor)| tensor.dims().to_vec()).collect();
        let mut fitting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if fitting.as_ref() != Some(&sizes) {
            require(graph, &taken)?;
            *fitting = Some(sizes);
        }
        inputs::require_rows(graph, &hosts, tokens)?;
        Ok(taken)
    }
}

fn require(graph: &Graph, inputs: &[(ValueId, Tensor)]) -> Result<()> {
    let mut types: Vec<TensorType> = graph.values().iter().map(|value| value.ty.clone()).collect();
    for (id, tensor) in inputs {
        types[id.index()].shape = tensor.dims().iter().copied().map(Dim::Fixed).collect();
    }
    for (value, ty) in graph.values().iter().zip(&types).filter(|(value, _)| !matches!(value.kind, Kind::Node(_))) {
        if ty.shape.contains(&Dim::Fixed(0)) {
            return Err(Error::run(format!("graph value `{}`", value.name), format!("has no elements, {ty}"), ""));
        }
    }
    for node in graph.nodes() {
        let wrong = |reason: String| {
            let name = &graph.value(node.output).name;
            Error::run(format!("graph node `{name}`"), reason, "the inputs have sizes that this graph cannot take")
        };
        let operands: Vec<&TensorType> = node.inputs.iter().map(|id| &types[id.index()]).collect();
        let ty = node.op.spec().output(&operands).map_err(wrong)?;
        let elements = ty.shape.iter().try_fold(1usize, |all, dim| all.checked_mul(dim.fixed()?));
        if elements.is_none_or(|elements| elements == 0 || elements > MOST) {
            return Err(wrong(format!("makes {ty}, which is empty or larger than any memory")));
        }
        types[node.output.index()] = ty;
    }
    Ok(())
}

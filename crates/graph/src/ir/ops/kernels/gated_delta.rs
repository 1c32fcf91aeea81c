//! Kernels for the gated delta rule.

use candle_core::{Result, Tensor};

use super::super::gated_delta::INPUTS;
use super::super::{Backward, GatedDelta};
use super::host::{Host, contiguous, readable};
use super::{Gradients, Kernel};
use crate::kernel::delta::{self, Operands, Sizes};
use crate::kernel::scratch::cleared;

impl GatedDelta {
    fn sizes(&self, q: &Tensor, v: &Tensor) -> Result<Sizes> {
        let ((_, groups, sequence, width), (_, heads, _, out)) = (q.dims4()?, v.dims4()?);
        Ok(Sizes { sequence, heads, groups, width, out, scale: self.scale as f32, chunk: Self::chunk(sequence) })
    }
}

/// The elements of contiguous tensors.
fn operands<'h>(hosts: &'h [Host<'_>], tensors: &[Tensor]) -> Option<Operands<'h>> {
    let values = |at: usize| hosts.get(at)?.floats()?.get(..tensors.get(at)?.elem_count());
    Some(Operands { queries: values(0)?, keys: values(1)?, values: values(2)?, decays: values(3)?, rates: values(4)? })
}

/// Whether all inputs are f32 in host memory.
fn all_readable<'t>(mut tensors: impl Iterator<Item = &'t Tensor>) -> bool {
    tensors.all(|tensor| readable([tensor]))
}

impl Kernel for GatedDelta {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        if !all_readable(inputs.iter()) {
            return Ok(None);
        }
        let sizes = self.sizes(&inputs[0], &inputs[2])?;
        let inputs = inputs.iter().map(contiguous).collect::<Result<Vec<_>>>()?;
        let rows = sizes.sequence + if inputs.len() > INPUTS { sizes.width } else { 0 };
        let shape = (inputs[0].dim(0)?, sizes.heads, rows, sizes.out);
        let compute = || {
            let hosts = inputs.iter().map(Host::new).collect::<Option<Vec<_>>>()?;
            let state = match (hosts.get(INPUTS), inputs.get(INPUTS)) {
                (Some(host), Some(state)) => Some(host.floats()?.get(..state.elem_count())?),
                _ => None,
            };
            let mut y = cleared(shape.0 * shape.1 * shape.2 * shape.3);
            sizes.forward(operands(&hosts, &inputs)?, state, &mut y);
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, shape, inputs[0].device())).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let inputs = backward.inputs.iter().map(super::super::Saved::tensor).collect::<Result<Vec<_>>>()?;
        if !all_readable(inputs.iter().copied().chain([backward.gradient])) {
            return Ok(None);
        }
        let sizes = self.sizes(inputs[0], inputs[2])?;
        let tensors = inputs.iter().map(|tensor| contiguous(tensor)).collect::<Result<Vec<_>>>()?;
        let gradient = contiguous(backward.gradient)?;
        let compute = || {
            let hosts = tensors.iter().map(Host::new).collect::<Option<Vec<_>>>()?;
            let host = Host::new(&gradient)?;
            let mut found = [0, 1, 2, 3, 4].map(|at: usize| cleared(tensors[at].elem_count()));
            let [queries, keys, values, decays, rates] = &mut found;
            let into = delta::Gradients { queries, keys, values, decays, rates };
            sizes.backward(operands(&hosts, &tensors)?, host.floats()?.get(..gradient.elem_count())?, into);
            Some(found)
        };
        let Some(found) = compute() else { return Ok(None) };
        let (batch, device) = (tensors[0].dim(0)?, tensors[0].device());
        let gradients = found.into_iter().enumerate().map(|(at, values)| {
            backward.gradient_of(at, || match at {
                3 | 4 => Tensor::from_vec(values, (batch, sizes.heads, sizes.sequence), device)?.transpose(1, 2)?.contiguous(),
                _ => Tensor::from_vec(values, tensors[at].dims(), device),
            })
        });
        gradients.collect::<Result<Gradients>>().map(Some)
    }
}

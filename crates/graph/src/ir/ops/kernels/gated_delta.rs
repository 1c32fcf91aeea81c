//! Kernels for the gated delta rule.

use candle_core::{Result, Tensor};

use super::super::causal_conv::masked;
use super::super::gated_delta::{Extras, INPUTS, extras};
use super::super::{Backward, GatedDelta};
use super::host::{Host, contiguous, readable};
use super::{Gradients, Kernel};
use crate::kernel::delta::{self, Operands, Sizes};
use crate::kernel::scratch::cleared;

impl GatedDelta {
    fn sizes(&self, q: &Tensor, v: &Tensor) -> Result<Sizes> {
        let ((_, groups, sequence, width), (_, heads, _, out)) = (q.dims4()?, v.dims4()?);
        Ok(Sizes { sequence, heads, groups, width, out, scale: self.scale as f32, additive: self.additive, chunk: Self::chunk(sequence) })
    }
}

/// The elements of contiguous tensors.
fn operands<'h>(hosts: &'h [Host<'_>], tensors: &[Tensor]) -> Option<Operands<'h>> {
    let values = |at: usize| hosts.get(at)?.floats()?.get(..tensors.get(at)?.elem_count());
    Some(Operands { queries: values(0)?, keys: values(1)?, values: values(2)?, decays: values(3)?, rates: values(4)? })
}

/// The inputs other than mask and state, contiguous, with zeros for decays and rates at padding; `None` if
/// one of them is not f32 in host memory.
fn operand_tensors(inputs: &[&Tensor], mask: Option<&Tensor>) -> Result<Option<Vec<Tensor>>> {
    let inputs = inputs.get(..INPUTS).unwrap_or_default();
    if !inputs.iter().all(|tensor| readable([tensor])) {
        return Ok(None);
    }
    let tensor = |(at, tensor): (usize, &&Tensor)| if at < 3 { contiguous(tensor) } else { contiguous(&masked(tensor, mask)?) };
    inputs.iter().enumerate().map(tensor).collect::<Result<Vec<_>>>().map(Some)
}

impl Kernel for GatedDelta {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let all: Vec<&Tensor> = inputs.iter().collect();
        let Extras { mask, state } = extras(&all);
        let Some(tensors) = operand_tensors(&all, mask)?.filter(|_| state.is_none_or(|state| readable([state]))) else { return Ok(None) };
        let (sizes, state) = (self.sizes(&tensors[0], &tensors[2])?, state.map(contiguous).transpose()?);
        let rows = sizes.sequence + if state.is_some() { sizes.width } else { 0 };
        let shape = (tensors[0].dim(0)?, sizes.heads, rows, sizes.out);
        let compute = || {
            let hosts = tensors.iter().map(Host::new).collect::<Option<Vec<_>>>()?;
            let before = match &state {
                Some(state) => Some((Host::new(state)?, state.elem_count())),
                None => None,
            };
            let before = match &before {
                Some((host, count)) => Some(host.floats()?.get(..*count)?),
                None => None,
            };
            let mut y = cleared(shape.0 * shape.1 * shape.2 * shape.3);
            sizes.forward(operands(&hosts, &tensors)?, before, &mut y);
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, shape, tensors[0].device())).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let inputs = backward.inputs.iter().map(super::super::Saved::tensor).collect::<Result<Vec<_>>>()?;
        let mask = extras(&inputs).mask;
        let Some(tensors) = operand_tensors(&inputs, mask)?.filter(|_| readable([backward.gradient])) else { return Ok(None) };
        let sizes = self.sizes(&tensors[0], &tensors[2])?;
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
                3 | 4 => masked(&Tensor::from_vec(values, (batch, sizes.heads, sizes.sequence), device)?.transpose(1, 2)?, mask)?.contiguous(),
                _ => Tensor::from_vec(values, tensors[at].dims(), device),
            })
        });
        gradients.chain(mask.map(|_| Ok(None))).collect::<Result<Gradients>>().map(Some)
    }
}

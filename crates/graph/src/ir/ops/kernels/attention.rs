//! Kernels for attention, rotary embedding and splitting of heads.

use candle_core::{Result, Tensor};

use super::super::attention_inputs::{Extras, extras, with_batch_axis};
use super::super::{Attention, Backward, DecodingState, GridRotary, MergeHeads, Rotary, Saved, SplitHeads};
use super::host::{Host, heads, integers, readable};
use super::{Gradients, Kernel};
use crate::kernel::attention::{self, merge_heads, rotate_heads};
use crate::kernel::attention_gradient::BackwardInputs;
use crate::kernel::scratch::cleared;

/// Whether each key is padding.
fn padding(mask: Option<&Tensor>) -> Result<Option<Vec<bool>>> {
    let mask = mask.map(integers).transpose()?.flatten();
    Ok(mask.map(|mask| mask.into_iter().map(|m| m == 0).collect()))
}

impl Attention {
    /// The parameters of the attention kernels.
    fn sizes<'p>(&self, [q, _, v]: [&Tensor; 3], padding: Option<&'p [bool]>) -> Result<attention::Attention<'p>> {
        let ((_, heads, sequence, width), (_, groups, keys, out)) = (q.dims4()?, v.dims4()?);
        Ok(attention::Attention {
            heads,
            groups,
            sequence,
            keys,
            width,
            out,
            scale: self.scale as f32,
            causal: self.causal,
            window: self.window,
            soft_cap: self.soft_cap.map(|cap| cap as f32),
            padding: padding.filter(|p| p.contains(&true)),
            bias: None,
            zero_where_hidden: self.zero_where_hidden,
        })
    }
}

impl Kernel for Attention {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        if self.segments {
            return self.forward_segments(inputs);
        }
        let [q, k, v] = [&inputs[0], &inputs[1], &inputs[2]];
        let Extras { mask, bias, sinks } = extras(&inputs[3..]);
        if sinks.is_some() {
            return Ok(None);
        }
        let (padding, bias) = (padding(mask)?, bias.map(|bias| with_batch_axis(bias)?.contiguous()).transpose()?);
        let sizes = self.sizes([q, k, v], padding.as_deref())?;
        let shape = (q.dim(0)?, sizes.heads, sizes.sequence, sizes.out);
        let compute = || {
            let hosts = [Host::new(q)?, Host::new(k)?, Host::new(v)?];
            let host = bias.as_ref().map(Host::new);
            let bias = match (&bias, &host) {
                (Some(bias), Some(host)) => {
                    let step = |axis: usize| if bias.dims()[axis] == 1 { 0 } else { bias.stride()[axis] };
                    Some(attention::Bias { values: host.as_ref()?.floats()?, strides: [0, 1, 2, 3].map(step) })
                }
                _ => None,
            };
            let sizes = attention::Attention { bias, ..sizes };
            let mut y = cleared(shape.0 * shape.1 * shape.2 * shape.3);
            sizes.run(heads(&hosts[0])?, heads(&hosts[1])?, heads(&hosts[2])?, &mut y);
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, shape, q.device())).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if self.segments {
            return self.backward_segments(backward);
        }
        let [q, k, v] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.inputs[2].tensor()?];
        let biased = backward.inputs[3..].iter().any(|extra| extra.dims().len() != 2);
        if biased || self.soft_cap.is_some() || !readable([q, k, v, backward.gradient]) {
            return Ok(None);
        }
        let padding = padding(backward.inputs.get(3).map(Saved::tensor).transpose()?)?;
        // The kernels need contiguous rows within each head.
        let in_rows = |t: &Tensor| if t.stride()[3] == 1 { Ok(t.clone()) } else { t.contiguous() };
        let (q, k, v, gradient) = (in_rows(q)?, in_rows(k)?, in_rows(v)?, in_rows(backward.gradient)?);
        let (sizes, batch) = (self.sizes([&q, &k, &v], padding.as_deref())?, q.dim(0)?);
        let compute = || {
            let hosts = [Host::new(&q)?, Host::new(&k)?, Host::new(&v)?, Host::new(&gradient)?];
            let given = BackwardInputs { queries: heads(&hosts[0])?, keys: heads(&hosts[1])?, values: heads(&hosts[2])?, gradient: heads(&hosts[3])? };
            let room = |input: usize, like: &Tensor| cleared(if backward.needs_gradient(input) { like.elem_count() } else { 0 });
            let mut found = [room(0, &q), room(1, &k), room(2, &v)];
            sizes.gradients(given, found.each_mut().map(Vec::as_mut_slice), batch);
            Some(found)
        };
        let Some(found) = compute() else { return Ok(None) };
        let mut gradients = vec![None; backward.inputs.len()];
        for ((input, values), like) in found.into_iter().enumerate().zip([&q, &k, &v]) {
            // Stores the heads of a token next to each other, in the layout before they were split.
            let (batch, heads, rows, width) = like.dims4()?;
            gradients[input] = backward.gradient_of(input, || Tensor::from_vec(values, (batch, rows, heads, width), like.device())?.transpose(1, 2))?;
        }
        Ok(Some(gradients))
    }
}

impl Kernel for Rotary {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        self.rotated_heads(&inputs[0], false, &DecodingState::default())
    }

    fn forward_at(&self, past: &DecodingState, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        self.rotated_heads(&inputs[0], false, past)
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.needs_gradient(0) {
            return Ok(Some(vec![None]));
        }
        Ok(self.rotated_heads(backward.gradient, true, &DecodingState::default())?.map(|gradient| vec![Some(gradient)]))
    }
}

impl Rotary {
    /// Rotates by the angles of the positions after `past`; `None` if the kernel does not support the
    /// tensor.
    fn rotated_heads(&self, x: &Tensor, backwards: bool, past: &DecodingState) -> Result<Option<Tensor>> {
        rotated_by(x, self.tables_after(past, x)?, backwards)
    }
}

impl Kernel for GridRotary {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        rotated_by(&inputs[0], self.tables(inputs[0].dim(3)?, inputs[0].device())?, false)
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.needs_gradient(0) {
            return Ok(Some(vec![None]));
        }
        let tables = self.tables(backward.gradient.dim(3)?, backward.gradient.device())?;
        Ok(rotated_by(backward.gradient, tables, true)?.map(|gradient| vec![Some(gradient)]))
    }
}

/// Rotates the first elements of heads by angles with these cosines and sines; `None` if the kernel does
/// not support the tensor.
fn rotated_by(x: &Tensor, (cos, sin): (Tensor, Tensor), backwards: bool) -> Result<Option<Tensor>> {
    let (_, count, sequence, width) = x.dims4()?;
    let sin = if backwards { sin.neg()? } else { sin };
    let compute = || {
        let ([host, cos, sin], angles) = ([Host::new(x)?, Host::new(&cos)?, Host::new(&sin)?], cos.elem_count());
        let mut y = cleared(x.elem_count());
        rotate_heads(heads(&host)?, [count, sequence, width], &cos.floats()?[..angles], &sin.floats()?[..angles], &mut y);
        Some(y)
    };
    compute().map(|values| Tensor::from_vec(values, x.dims(), x.device())).transpose()
}

fn merged(x: &Tensor) -> Result<Option<Tensor>> {
    let (batch, count, sequence, width) = x.dims4()?;
    // Heads that are already adjacent are merged without a copy.
    if x.transpose(1, 2)?.is_contiguous() {
        return Ok(None);
    }
    let compute = || {
        let host = Host::new(x)?;
        let mut y = cleared(x.elem_count());
        merge_heads(heads(&host)?, [count, sequence, width], &mut y);
        Some(y)
    };
    compute().map(|values| Tensor::from_vec(values, (batch, sequence, count * width), x.device())).transpose()
}

impl Kernel for MergeHeads {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        merged(&inputs[0])
    }
}

impl Kernel for SplitHeads {
    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let found = if backward.needs_gradient(0) { merged(backward.gradient)? } else { None };
        Ok(found.map(|gradient| vec![Some(gradient)]))
    }
}

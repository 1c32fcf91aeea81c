//! Mixtures of experts.

pub use super::layout::{Clamped, Experts, Shared};
use super::layout::{Decoder, LayerNames};
use super::parts::{slices, swish};
use crate::error::Result;
use crate::ir::ops::{Add, Clip, Combine, Dispatch, Linear, Mul, Reshape, Sigmoid, Slice, TargetSize};
use crate::ir::{Builder, ValueId};

impl Experts {
    /// The feed-forward network of a layer.
    pub fn build(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        let name = |part: &str| format!("{}.{part}", self.block);
        let mut scores = vec![decoder.linear(b, at, &name(self.router), x, self.count, self.router_bias)?];
        if let Some(bias) = self.selection_bias {
            scores.push(b.param(&at.module(&name(bias)), &[self.count])?);
        }
        let weights = b.node(&at.node(&name("routing")), self.route, &scores)?;
        let fused = b.stored_shape(&at.module(&name(self.stacked[0]))).is_some();
        let (mut outputs, mut tokens, width) = (vec![weights], x, b.width(x)?);
        if let Some(([before, _], narrow)) = self.latent {
            tokens = decoder.linear(b, at, &name(before), x, narrow, decoder.mlp_bias)?;
        }
        for expert in 0..self.count {
            let routed = b.node(&at.node(&name(&format!("experts.{expert}"))), Dispatch { expert, weighted: self.weighted_inputs }, &[tokens, weights])?;
            outputs.push(match (self.clamped, fused) {
                (Some(clamped), _) => self.clamped(b, at, expert, routed, clamped)?,
                (None, true) => self.slice(decoder, b, at, expert, routed)?,
                (None, false) => decoder.feed_forward(b, at, (&name(&format!("experts.{expert}")), self.parts), routed, self.inner, false)?,
            });
        }
        let mut sum = b.node(&at.node(&name("experts")), Combine { plain: self.weighted_inputs }, &outputs)?;
        if let Some(([_, after], _)) = self.latent {
            sum = decoder.linear(b, at, &name(after), sum, width, decoder.mlp_bias)?;
        }
        let Some(Shared { module, inner, gated }) = self.shared else { return Ok(sum) };
        let mut shared = decoder.feed_forward(b, at, (module, decoder.parts), x, inner, decoder.mlp_bias)?;
        if gated {
            let gate = decoder.linear(b, at, &format!("{module}_gate"), x, 1, false)?;
            let gate = b.node(&at.node(&format!("{module}_gate.sigmoid")), Sigmoid {}, &[gate])?;
            shared = b.node(&at.node(&format!("{module}.weighted")), Mul {}, &[gate, shared])?;
        }
        b.node(&at.node(&name("sum")), Add {}, &[sum, shared])
    }

    /// An expert with projections that are slices of stacked tensors.
    fn slice(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, expert: usize, x: ValueId) -> Result<ValueId> {
        let name = |part: &str| format!("{}.experts.{expert}.{part}", self.block);
        let (width, both) = (b.width(x)?, self.inner.saturating_mul(2));
        let input_major = self.input_major;
        let linear = |b: &mut Builder, part: &str, tensor: &str, x: ValueId, [out, width]: [usize; 2]| {
            let weight = self.own(b, at, expert, [part, tensor], &if input_major { [width, out] } else { [out, width] })?;
            b.node(&at.node(&name(part)), Linear { input_major }, &[x, weight])
        };
        let both = linear(b, "gate_up_proj", self.stacked[0], x, [both, width])?;
        let [gate, up] = slices(b, ["gate", "up"].map(|part| at.node(&name(part))), both, [self.inner; 2])?;
        let gate = decoder.act(b, at, &format!("{}.experts.{expert}", self.block), gate)?;
        let gated = b.node(&at.node(&name("gated")), Mul {}, &[gate, up])?;
        linear(b, "down_proj", self.stacked[1], gated, [width, self.inner])
    }

    /// An expert of gpt-oss: projections `[in, out]` with biases, of which gate and up alternate.
    fn clamped(&self, b: &mut Builder, at: &LayerNames, expert: usize, x: ValueId, Clamped { slope, limit }: Clamped) -> Result<ValueId> {
        let name = |part: &str| at.node(&format!("{}.experts.{expert}.{part}", self.block));
        let (width, both) = (b.width(x)?, self.inner.saturating_mul(2));
        let both = self.projection(b, at, expert, "gate_up_proj", x, both)?;
        let mut half = |part: &str, start: usize, min: f64| {
            let every_second = b.node(&name(part), Slice { step: 2, ..Slice::last_axis(start, self.inner) }, &[both])?;
            b.node(&name(&format!("{part}.clamped")), Clip { min, max: limit }, &[every_second])
        };
        let (gate, up) = (half("gate", 0, f64::NEG_INFINITY)?, half("up", 1, -limit)?);
        let active = swish(b, &name("act"), slope, gate)?;
        let gated = b.node(&name("gated"), Mul {}, &[active, up])?;
        let sum = b.node(&name("gated.sum"), Add {}, &[gated, active])?;
        self.projection(b, at, expert, "down_proj", sum, width)
    }

    /// A linear layer of one expert with a weight `[in, out]` and a bias in stacked tensors.
    fn projection(&self, b: &mut Builder, at: &LayerNames, expert: usize, part: &str, x: ValueId, out: usize) -> Result<ValueId> {
        let width = b.width(x)?;
        let bias = format!("{part}_bias");
        let [weights, biases] = [part, &bias].map(|part| format!("experts.{part}"));
        let inputs = [x, self.own(b, at, expert, [part, &weights], &[width, out])?, self.own(b, at, expert, [&bias, &biases], &[out])?];
        b.node(&at.node(&format!("{}.experts.{expert}.{part}", self.block)), Linear { input_major: true }, &inputs)
    }

    /// The part of a stacked tensor that belongs to one expert.
    fn own(&self, b: &mut Builder, at: &LayerNames, expert: usize, [part, tensor]: [&str; 2], shape: &[usize]) -> Result<ValueId> {
        let all = b.param(&at.module(&format!("{}.{tensor}", self.block)), &[&[self.count][..], shape].concat())?;
        let node = at.node(&format!("{}.experts.{expert}.{part}", self.block));
        let start = i64::try_from(expert).unwrap_or(i64::MAX);
        let one = b.node(&format!("{node}.slice"), Slice { start, length: Some(1), axis: 0, ..Slice::default() }, &[all])?;
        b.node(&format!("{node}.weight"), Reshape { shape: (1..=shape.len()).map(TargetSize::Copy).collect() }, &[one])
    }
}

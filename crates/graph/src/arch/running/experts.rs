//! Mixtures of experts.

use super::layout::{Decoder, LayerNames, PARTS};
pub use super::layout::{Experts, Shared};
use super::parts::{linear_of, slices};
use crate::error::Result;
use crate::ir::ops::{Add, Combine, Dispatch, Mul, Reshape, Sigmoid, Slice, TargetSize};
use crate::ir::{Builder, ValueId};

impl Experts {
    /// The feed-forward network of a layer.
    pub fn build(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        let name = |part: &str| format!("{}.{part}", self.block);
        let scores = decoder.linear(b, at, &name("gate"), x, self.count, false)?;
        let weights = b.node(&at.node(&name("routing")), self.route, &[scores])?;
        let fused = b.stored_shape(&at.module(&name("experts.gate_up_proj"))).is_some();
        let mut outputs = vec![weights];
        for expert in 0..self.count {
            let routed = b.node(&at.node(&name(&format!("experts.{expert}"))), Dispatch { expert }, &[x, weights])?;
            outputs.push(match fused {
                true => self.slice(decoder, b, at, expert, routed)?,
                false => decoder.gated(b, at, (&name(&format!("experts.{expert}")), self.parts), routed, self.inner, false)?,
            });
        }
        let sum = b.node(&at.node(&name("experts")), Combine {}, &outputs)?;
        let Some(Shared { name: part, inner, gated }) = self.shared else { return Ok(sum) };
        let mut shared = decoder.gated(b, at, (&name(part), PARTS), x, inner, decoder.mlp_bias)?;
        if gated {
            let gate = decoder.linear(b, at, &name(&format!("{part}_gate")), x, 1, false)?;
            let gate = b.node(&at.node(&name(&format!("{part}_gate.sigmoid"))), Sigmoid {}, &[gate])?;
            shared = b.node(&at.node(&name(&format!("{part}.weighted"))), Mul {}, &[gate, shared])?;
        }
        b.node(&at.node(&name("sum")), Add {}, &[sum, shared])
    }

    /// An expert with projections that are slices of stacked tensors.
    fn slice(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, expert: usize, x: ValueId) -> Result<ValueId> {
        let name = |part: &str| format!("{}.experts.{expert}.{part}", self.block);
        let (width, both) = (b.width(x)?, self.inner.saturating_mul(2));
        let gate_up = self.weight(b, at, expert, "gate_up_proj", [both, width])?;
        let both = linear_of(b, &at.node(&name("gate_up_proj")), x, gate_up)?;
        let [gate, up] = slices(b, ["gate", "up"].map(|part| at.node(&name(part))), both, [self.inner; 2])?;
        let gate = decoder.act(b, at, &format!("{}.experts.{expert}", self.block), gate)?;
        let gated = b.node(&at.node(&name("gated")), Mul {}, &[gate, up])?;
        let down = self.weight(b, at, expert, "down_proj", [width, self.inner])?;
        linear_of(b, &at.node(&name("down_proj")), gated, down)
    }

    /// The matrix of one expert in a stacked tensor.
    fn weight(&self, b: &mut Builder, at: &LayerNames, expert: usize, part: &str, [out, width]: [usize; 2]) -> Result<ValueId> {
        let all = b.param(&at.module(&format!("{}.experts.{part}", self.block)), &[self.count, out, width])?;
        let node = at.node(&format!("{}.experts.{expert}.{part}", self.block));
        let start = i64::try_from(expert).unwrap_or(i64::MAX);
        let one = b.node(&format!("{node}.slice"), Slice { start, length: Some(1), axis: 0, ..Slice::default() }, &[all])?;
        b.node(&format!("{node}.weight"), Reshape { shape: vec![TargetSize::Copy(1), TargetSize::Copy(2)] }, &[one])
    }
}

//! State space layers of Mamba 2 (Dao and Gu, *Transformers are SSMs*, 2024).

use serde_json::Value;

use super::Settings;
use super::layout::LayerNames;
use super::parts::{activate, linear_with, rms_norm, slices};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, CausalConv, Clip, Decay, GatedDelta, MergeHeads, Mul, Normalize, Reshape, RmsNorm, Scale, Silu, Softplus, SplitHeads, TargetSize};
use crate::ir::{Builder, ValueId};

/// A state space layer: a projection to gates, values, keys, queries and step sizes, a short convolution of
/// values, keys and queries, the recurrence, and a gated normalization before the output projection.
pub struct StateSpace<'c> {
    /// Name of the layer's module.
    pub module: &'static str,
    /// Number of heads of values.
    pub heads: usize,
    /// Width of a head of values.
    pub head_dim: usize,
    /// Number of heads of keys and queries, and of parts that are normalized separately.
    pub groups: usize,
    /// Width of a key or a query.
    pub state: usize,
    /// Number of tokens that a filter of the convolution reads.
    pub kernel: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Smallest and largest step size.
    pub limits: [f64; 2],
    /// Activation function after the convolution.
    pub activation: &'c str,
    /// Normalization of the gated output.
    pub norm: RmsNorm,
}

impl StateSpace<'_> {
    /// The layer's output for the stream `x`.
    pub fn add(&self, b: &mut Builder, at: &LayerNames, x: ValueId, mask: ValueId) -> Result<ValueId> {
        let node = |part: &str| at.node(&format!("{}.{part}", self.module));
        let module = |part: &str| at.module(&format!("{}.{part}", self.module));
        let (inner, shared) = (self.heads.saturating_mul(self.head_dim), self.groups.saturating_mul(self.state));
        let (width, channels) = (b.width(x)?, inner.saturating_add(shared.saturating_mul(2)));
        let all = inner.saturating_add(channels).saturating_add(self.heads);
        let all = linear_with(b, &node("in_proj"), &module("in_proj"), x, all, self.bias)?;
        let [gate, mixed, step] = slices(b, ["gate", "channels", "step_of_input"].map(node), all, [inner, channels, self.heads])?;
        let mut inputs = vec![mixed, b.param(&module("conv1d.weight"), &[channels, 1, self.kernel])?, mask];
        if self.conv_bias {
            inputs.push(b.param(&module("conv1d.bias"), &[channels])?);
        }
        let mixed = b.node(&node("conv1d"), CausalConv {}, &inputs)?;
        let mixed = activate(b, &node("conv1d.act"), self.activation, mixed)?;
        let parts = slices(b, ["value", "key", "query"].map(node), mixed, [inner, shared, shared])?;
        let mut heads = |part: &str, head_dim: usize, x: ValueId| b.node(&node(part), SplitHeads { head_dim }, &[x]);
        let values = heads("value_heads", self.head_dim, parts[0])?;
        let (keys, queries) = (heads("key_heads", self.state, parts[1])?, heads("query_heads", self.state, parts[2])?);
        let [decay, rate] = self.numbers(b, at, step)?;
        let context = b.node(&node("recurrence"), GatedDelta { additive: true, ..GatedDelta::default() }, &[queries, keys, values, decay, rate, mask])?;
        let factors = b.param(&module("D"), &[self.heads])?;
        let shape = [TargetSize::Copy(0), TargetSize::Number(1), TargetSize::Number(1)];
        let factors = b.node(&node("skip_factors"), Reshape { shape: shape.into() }, &[factors])?;
        let skipped = b.node(&node("skip"), Mul {}, &[values, factors])?;
        let context = b.node(&node("context_heads"), Add {}, &[context, skipped])?;
        let context = b.node(&node("context"), MergeHeads {}, &[context])?;
        let gate = b.node(&node("gate.act"), Silu {}, &[gate])?;
        let gated = b.node(&node("gated"), Mul {}, &[context, gate])?;
        let normed = self.normalize(b, at, gated)?;
        linear_with(b, &node("out_proj"), &module("out_proj"), normed, width, self.bias)
    }

    /// Logarithmic decays and rates of the heads, `[batch, sequence, heads]`.
    fn numbers(&self, b: &mut Builder, at: &LayerNames, step: ValueId) -> Result<[ValueId; 2]> {
        let node = |part: &str| at.node(&format!("{}.{part}", self.module));
        let module = |part: &str| at.module(&format!("{}.{part}", self.module));
        let bias = b.param(&module("dt_bias"), &[self.heads])?;
        let logarithms = b.param(&module("A_log"), &[self.heads])?;
        let shifted = b.node(&node("step_of_token"), Add {}, &[step, bias])?;
        let rate = b.node(&node("step"), Softplus {}, &[shifted])?;
        let [min, max] = self.limits;
        let limited = Decay { min: min.max(0.0), max: Some(max).filter(|max| max.is_finite()) };
        let decay = b.node(&node("decay"), limited, &[step, bias, logarithms])?;
        let rate = if limited.has_limits() { b.node(&node("step.limited"), Clip { min, max }, &[rate])? } else { rate };
        Ok([decay, rate])
    }

    /// Root mean square normalization of each group.
    fn normalize(&self, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        let node = |part: &str| at.node(&format!("{}.{part}", self.module));
        let module = at.module(&format!("{}.norm", self.module));
        let width = b.width(x)?;
        if self.groups == 1 {
            return rms_norm(b, &node("norm"), &module, x, self.norm);
        }
        let Some(head_dim) = width.checked_div(self.groups).filter(|_| width.is_multiple_of(self.groups)) else {
            return Err(Error::graph("config.json", format!("a state space layer of width {width} cannot be divided into {} groups", self.groups)));
        };
        let size = head_dim as f64;
        let groups = b.node(&node("norm.groups"), SplitHeads { head_dim }, &[x])?;
        let groups = b.node(&node("norm.unit"), Normalize { epsilon: self.norm.epsilon * size }, &[groups])?;
        let merged = b.node(&node("norm.merged"), MergeHeads {}, &[groups])?;
        let scaled = b.node(&node("norm.scaled"), Scale { factor: size.sqrt() }, &[merged])?;
        let weight = b.param(&format!("{module}.weight"), &[width])?;
        b.node(&node("norm"), Mul {}, &[scaled, weight])
    }
}

/// The limits of step sizes, which transformers writes with an object for infinity.
pub fn limits(s: &Settings, key: &'static str) -> Result<[f64; 2]> {
    let Some(value) = s.get(key) else { return Ok([0.0, f64::INFINITY]) };
    let number = |value: &Value| match value.get("__float__").and_then(Value::as_str) {
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        _ => value.as_f64(),
    };
    let found = value.as_array().map(|list| list.iter().map(number).collect::<Vec<_>>());
    match found.as_deref() {
        Some([Some(min), Some(max)]) if min <= max => Ok([*min, *max]),
        _ => Err(Error::graph("config.json", format!("`{key}` is {value}, expected the smallest and the largest step size"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_of_step_sizes_are_numbers_or_infinity() {
        let read = |value: Value| {
            let config = json!({ "time_step_limit": value });
            limits(&Settings::new(config.as_object().unwrap()), "time_step_limit").map_err(|e| e.to_string())
        };
        assert_eq!(read(json!(null)), Ok([0.0, f64::INFINITY]));
        assert_eq!(read(json!([0.1, 2])), Ok([0.1, 2.0]));
        assert_eq!(read(json!([{ "__float__": "-Infinity" }, { "__float__": "Infinity" }])), Ok([f64::NEG_INFINITY, f64::INFINITY]));
        for wrong in [json!([0.0]), json!([2.0, 1.0]), json!([0.0, { "__float__": "NaN" }]), json!("none")] {
            assert!(read(wrong.clone()).is_err_and(|e| e.contains("`time_step_limit`")), "{wrong}");
        }
    }
}

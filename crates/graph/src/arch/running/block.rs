//! A transformer layer: attention and a feed-forward network, each with a normalization and a residual
//! connection, and cross-attention between them in the decoder of an encoder-decoder model.

use super::parts::{activate, attend, layer_norm, linear, linear_with, slices};
use crate::error::Result;
use crate::ir::ops::{Add, Attention, Mul, Silu};
use crate::ir::{Builder, ValueId};

/// Position of the normalizations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPosition {
    /// Pre-norm: attention and network read the normalized stream (Xiong et al., 2020).
    Before,
    /// Post-norm: the residual sums are normalized, as in the original transformer.
    After,
}

/// Names of a layer's nodes and modules, relative to the layer.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// Attention.
    pub attention: &'static str,
    /// Queries, keys and values, relative to `attention`.
    pub qkv: [&'static str; 3],
    /// Output projection of attention.
    pub out: &'static str,
    /// Residual addition of attention; a node without a module.
    pub attended: &'static str,
    /// Normalizations of attention and of the network.
    pub norms: [&'static str; 2],
    /// First linear layer of the network, activation (a node without a module), and second linear layer.
    pub network: [&'static str; 3],
    /// Residual addition of the network; a node without a module. Empty if it is the last node of the
    /// layer and has its name.
    pub sum: &'static str,
    /// Layer scales of the results of attention and network, if there are any.
    pub scales: Option<[&'static str; 2]>,
}

/// Cross-attention: keys and values are computed from another value than the queries; without a causal
/// mask.
#[derive(Clone, Copy)]
pub struct Cross<'b> {
    /// Names of its parts. Those of the network and the second normalization are unused.
    pub names: &'b Names,
    /// The value from which keys and values are computed.
    pub read: ValueId,
}

/// A transformer layer.
#[derive(Clone, Copy)]
pub struct Block<'b> {
    /// Names of its parts.
    pub names: &'b Names,
    /// Position of the normalizations.
    pub norms: NormPosition,
    /// Epsilon of the normalizations.
    pub epsilon: f64,
    /// Width of a head; all heads together have the width of the residual stream.
    pub head_dim: usize,
    /// Attention; its scale is divided by the square root of the head width.
    pub attention: Attention,
    /// Mask and bias of attention.
    pub extras: &'b [ValueId],
    /// Whether queries, keys and values have biases; `None` to use those in the checkpoint.
    pub qkv_bias: Option<bool>,
    /// Cross-attention, if there is any.
    pub cross: Option<Cross<'b>>,
    /// Number of neurons of the network.
    pub neurons: usize,
    /// Activation function of the network; `None` for SwiGLU.
    pub activation: Option<&'b str>,
}

impl Block<'_> {
    /// Adds consecutive layers with the names `encoder.layer.0` and so on; `prefix` precedes the names of
    /// their modules.
    pub fn stack(&self, b: &mut Builder, prefix: &str, name: &str, layers: usize, mut x: ValueId) -> Result<ValueId> {
        for index in 0..layers {
            let node = format!("{name}.{index}");
            x = self.add(b, &node, &format!("{prefix}{node}"), x)?;
        }
        Ok(x)
    }

    /// Adds the layer with these names of its node and module.
    pub fn add(&self, b: &mut Builder, node: &str, module: &str, x: ValueId) -> Result<ValueId> {
        self.with_attention(b, (node, module), x, |b, x| self.attend_to(b, (node, module), [x; 3]))
    }

    /// Adds the layer with a different attention: `attended` computes the value to add to the residual
    /// stream from the value that attention reads.
    pub fn with_attention(
        &self,
        b: &mut Builder,
        at: (&str, &str),
        x: ValueId,
        attended: impl FnOnce(&mut Builder, ValueId) -> Result<ValueId>,
    ) -> Result<ValueId> {
        let [first, second] = self.names.norms;
        let mut x = self.half(b, at, first, self.names.attended, x, attended)?;
        if let Some(cross) = self.cross {
            let [norm, _] = cross.names.norms;
            let block = Block { names: cross.names, attention: Attention::default(), extras: &[], ..*self };
            x = self.half(b, at, norm, cross.names.attended, x, |b, x| block.attend_to(b, at, [x, cross.read, cross.read]))?;
        }
        self.half(b, at, second, self.names.sum, x, |b, x| self.network(b, at, x))
    }

    /// Half a layer: `compute`, its normalization and the residual addition.
    fn half(
        &self,
        b: &mut Builder,
        (node, module): (&str, &str),
        norm: &str,
        sum: &str,
        x: ValueId,
        compute: impl FnOnce(&mut Builder, ValueId) -> Result<ValueId>,
    ) -> Result<ValueId> {
        let name = |part: &str| if part.is_empty() { node.to_owned() } else { format!("{node}.{part}") };
        let before = self.norms == NormPosition::Before;
        let normed = |b: &mut Builder, x: ValueId| layer_norm(b, &name(norm), &format!("{module}.{norm}"), x, self.epsilon);
        let read = if before { normed(b, x)? } else { x };
        let computed = compute(b, read)?;
        let sum = b.node(&name(sum), Add {}, &[computed, x])?;
        if before { Ok(sum) } else { normed(b, sum) }
    }

    fn scaled(&self, b: &mut Builder, (node, module): (&str, &str), at: usize, x: ValueId) -> Result<ValueId> {
        let Some(part) = self.names.scales.as_ref().and_then(|scales| scales.get(at)) else { return Ok(x) };
        let width = b.width(x)?;
        let factors = b.param(&format!("{module}.{part}"), &[width])?;
        b.node(&format!("{node}.{part}.scaled"), Mul {}, &[x, factors])
    }

    /// Attention with queries, keys and values computed from `read`.
    fn attend_to(&self, b: &mut Builder, (node, module): (&str, &str), read: [ValueId; 3]) -> Result<ValueId> {
        let qkv = self.qkv(b, (node, module), read)?;
        let context = attend(b, &format!("{node}.{}", self.names.attention), qkv, self.head_dim, self.attention, self.extras)?;
        self.out(b, (node, module), context)
    }

    /// Queries, keys and values, computed from `qkv`.
    pub fn qkv(&self, b: &mut Builder, (node, module): (&str, &str), mut qkv: [ValueId; 3]) -> Result<[ValueId; 3]> {
        let (width, names) = (b.width(qkv[0])?, self.names);
        for (value, part) in qkv.iter_mut().zip(names.qkv) {
            let (name, path) = (format!("{node}.{}.{part}", names.attention), format!("{module}.{}.{part}", names.attention));
            *value = match self.qkv_bias {
                Some(bias) => linear_with(b, &name, &path, *value, width, bias)?,
                None => linear(b, &name, &path, *value, width)?,
            };
        }
        Ok(qkv)
    }

    /// The output projection of attention.
    pub fn out(&self, b: &mut Builder, (node, module): (&str, &str), context: ValueId) -> Result<ValueId> {
        let (width, out) = (b.width(context)?, self.names.out);
        let out = linear(b, &format!("{node}.{out}"), &format!("{module}.{out}"), context, width)?;
        self.scaled(b, (node, module), 0, out)
    }

    fn network(&self, b: &mut Builder, at: (&str, &str), x: ValueId) -> Result<ValueId> {
        let ((node, module), [first, function, second]) = (at, self.names.network);
        let (width, function) = (b.width(x)?, format!("{node}.{function}"));
        let wide = if self.activation.is_some() { self.neurons } else { self.neurons.saturating_mul(2) };
        let y = linear(b, &format!("{node}.{first}"), &format!("{module}.{first}"), x, wide)?;
        let y = match self.activation {
            Some(name) => activate(b, &function, name, y)?,
            None => {
                let [gate, up] = slices(b, ["gate", "up"].map(|part| format!("{function}.{part}")), y, [self.neurons; 2])?;
                let gate = b.node(&format!("{function}.silu"), Silu {}, &[gate])?;
                b.node(&function, Mul {}, &[gate, up])?
            }
        };
        let y = linear(b, &format!("{node}.{second}"), &format!("{module}.{second}"), y, width)?;
        self.scaled(b, at, 1, y)
    }
}

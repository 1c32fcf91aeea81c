//! A layer of a transformer: attention and a network, each with a normalisation and a sum, and between them, in a decoder behind an encoder,
//! attention to what that says.

use super::parts::{activate, attend, layer_norm, linear, linear_with, slices};
use crate::error::Result;
use crate::ir::ops::{Add, Attention, Mul, Silu};
use crate::ir::{Builder, ValueId};

/// Where normalisations are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormPlace {
    /// Each half reads the normalised stream (Xiong et al., 2020).
    Before,
    /// Each sum is normalised, as in the first transformers.
    After,
}

/// Names of a layer's nodes and modules, behind the layer's own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    /// What attention computes.
    pub attention: &'static str,
    /// Queries, keys and values, behind `attention`.
    pub qkv: [&'static str; 3],
    /// The projection behind attention.
    pub out: &'static str,
    /// The sum of attention and what it read, a node alone.
    pub attended: &'static str,
    /// Normalisations of attention and of the network.
    pub norms: [&'static str; 2],
    /// The first layer of the network, its function, a node alone, and the second layer.
    pub network: [&'static str; 3],
    /// The sum of the network and what it read, a node alone; nothing where it ends the layer and has its name.
    pub sum: &'static str,
    /// Factors of columns on what attention and the network give, if there are any.
    pub scales: Option<[&'static str; 2]>,
}

/// Attention whose keys and values are made of another value than its queries; it sees all of that.
#[derive(Clone, Copy)]
pub(super) struct Cross<'b> {
    /// Names of its parts; those of the network are not looked at, and of the norms the first is.
    pub names: &'b Names,
    /// What keys and values are made of.
    pub read: ValueId,
}

/// A layer.
#[derive(Clone, Copy)]
pub(super) struct Block<'b> {
    /// Names of its parts.
    pub names: &'b Names,
    /// Where normalisations are.
    pub norms: NormPlace,
    /// Number added to variances.
    pub epsilon: f64,
    /// Width of a head; together, heads are as wide as the stream.
    pub head_dim: usize,
    /// Attention; its factor is made of the width of heads.
    pub attention: Attention,
    /// The mask and the bias of attention.
    pub extras: &'b [ValueId],
    /// Whether queries, keys and values have biases; nothing where the checkpoint tells.
    pub qkv_bias: Option<bool>,
    /// Attention to something else, if there is any.
    pub cross: Option<Cross<'b>>,
    /// Neurons of the network.
    pub neurons: usize,
    /// Name of the network's function; nothing for a first layer of gates and neurons (SwiGLU).
    pub activation: Option<&'b str>,
}

impl Block<'_> {
    /// Adds so many layers, one behind the other: `encoder.layer.0` and so on, whose modules have a prefix.
    pub(super) fn stack(&self, b: &mut Builder, prefix: &str, name: &str, layers: usize, mut x: ValueId) -> Result<ValueId> {
        for index in 0..layers {
            let node = format!("{name}.{index}");
            x = self.add(b, &node, &format!("{prefix}{node}"), x)?;
        }
        Ok(x)
    }

    /// Adds the layer, whose nodes have this name and whose modules have that one before theirs.
    pub(super) fn add(&self, b: &mut Builder, node: &str, module: &str, x: ValueId) -> Result<ValueId> {
        self.around(b, (node, module), x, |b, x| self.reading(b, (node, module), [x; 3]))
    }

    /// The same around another attention, which makes of what it reads what is added to it.
    pub(super) fn around(
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
            x = self.half(b, at, norm, cross.names.attended, x, |b, x| block.reading(b, at, [x, cross.read, cross.read]))?;
        }
        self.half(b, at, second, self.names.sum, x, |b, x| self.network(b, at, x))
    }

    /// What is computed of the stream, its normalisation and the sum of both.
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
        let before = self.norms == NormPlace::Before;
        let normed = |b: &mut Builder, x: ValueId| layer_norm(b, &name(norm), &format!("{module}.{norm}"), x, self.epsilon);
        let read = if before { normed(b, x)? } else { x };
        let given = compute(b, read)?;
        let sum = b.node(&name(sum), Add {}, &[given, x])?;
        if before { Ok(sum) } else { normed(b, sum) }
    }

    fn scaled(&self, b: &mut Builder, (node, module): (&str, &str), at: usize, x: ValueId) -> Result<ValueId> {
        let Some(part) = self.names.scales.as_ref().and_then(|scales| scales.get(at)) else { return Ok(x) };
        let width = b.width(x)?;
        let factors = b.param(&format!("{module}.{part}"), &[width])?;
        b.node(&format!("{node}.{part}.scaled"), Mul {}, &[x, factors])
    }

    /// Attention whose queries, keys and values are made of these.
    fn reading(&self, b: &mut Builder, (node, module): (&str, &str), read: [ValueId; 3]) -> Result<ValueId> {
        let qkv = self.qkv(b, (node, module), read)?;
        let context = attend(b, &format!("{node}.{}", self.names.attention), qkv, self.head_dim, self.attention, self.extras)?;
        self.out(b, (node, module), context)
    }

    /// Queries, keys and values of attention, which are made of these.
    pub(super) fn qkv(&self, b: &mut Builder, (node, module): (&str, &str), mut qkv: [ValueId; 3]) -> Result<[ValueId; 3]> {
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

    /// The projection behind attention; heads are as wide as the stream.
    pub(super) fn out(&self, b: &mut Builder, (node, module): (&str, &str), context: ValueId) -> Result<ValueId> {
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

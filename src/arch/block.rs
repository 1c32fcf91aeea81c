//! A layer of an encoder: attention and a network, each with a normalisation and a sum.

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
    /// Neurons of the network.
    pub neurons: usize,
    /// Name of the network's function; nothing for a first layer of gates and neurons (SwiGLU).
    pub activation: Option<&'b str>,
}

impl Block<'_> {
    /// Adds the layer, whose nodes have this name and whose modules have that one before theirs.
    pub(super) fn add(&self, b: &mut Builder, node: &str, module: &str, x: ValueId) -> Result<ValueId> {
        self.around(b, (node, module), x, |b, x| {
            let qkv = self.qkv(b, (node, module), x)?;
            let context = attend(b, &format!("{node}.{}", self.names.attention), qkv, self.head_dim, self.attention, self.extras)?;
            self.out(b, (node, module), context)
        })
    }

    /// The same around another attention, which makes of what it reads what is added to it.
    pub(super) fn around(
        &self,
        b: &mut Builder,
        (node, module): (&str, &str),
        x: ValueId,
        attended: impl FnOnce(&mut Builder, ValueId) -> Result<ValueId>,
    ) -> Result<ValueId> {
        let (names, before) = (self.names, self.norms == NormPlace::Before);
        let name = |part: &str| if part.is_empty() { node.to_owned() } else { format!("{node}.{part}") };
        let norm = |b: &mut Builder, at: usize, x: ValueId| match names.norms.get(at) {
            Some(part) => layer_norm(b, &name(part), &format!("{module}.{part}"), x, self.epsilon),
            None => Ok(x),
        };
        let normed = if before { norm(b, 0, x)? } else { x };
        let given = attended(b, normed)?;
        let sum = b.node(&name(names.attended), Add {}, &[given, x])?;
        let attended = if before { sum } else { norm(b, 0, sum)? };
        let normed = if before { norm(b, 1, attended)? } else { attended };
        let given = self.network(b, (node, module), normed)?;
        let sum = b.node(&name(names.sum), Add {}, &[given, attended])?;
        if before { Ok(sum) } else { norm(b, 1, sum) }
    }

    fn scaled(&self, b: &mut Builder, (node, module): (&str, &str), at: usize, x: ValueId) -> Result<ValueId> {
        let Some(part) = self.names.scales.as_ref().and_then(|scales| scales.get(at)) else { return Ok(x) };
        let width = b.width(x)?;
        let factors = b.param(&format!("{module}.{part}"), &[width])?;
        b.node(&format!("{node}.{part}.scaled"), Mul {}, &[x, factors])
    }

    /// Queries, keys and values of attention.
    pub(super) fn qkv(&self, b: &mut Builder, (node, module): (&str, &str), x: ValueId) -> Result<[ValueId; 3]> {
        let (width, names, mut qkv) = (b.width(x)?, self.names, [x; 3]);
        for (value, part) in qkv.iter_mut().zip(names.qkv) {
            let (name, path) = (format!("{node}.{}.{part}", names.attention), format!("{module}.{}.{part}", names.attention));
            *value = match self.qkv_bias {
                Some(bias) => linear_with(b, &name, &path, x, width, bias)?,
                None => linear(b, &name, &path, x, width)?,
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

//! The operator `Attention` of opset 23 and later.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::initializer_roles::{float, int};
use super::super::proto::NodeProto;
use super::{Lift, LiftedValue};
use crate::ir::ops::{Attention, MergeHeads, Reshape, SplitHeads, TargetSize};
use crate::ir::{Element, ValueId};

/// Numbers of inputs and outputs without a KV cache.
const PLAIN: [usize; 2] = [4, 1];

impl<'f> Lift<'f> {
    /// Lifts an `Attention` without a KV cache, with an additive mask or none. Returns `None` for other
    /// options.
    pub(super) fn attention_operator(&mut self, node: &'f NodeProto, output: &str) -> Option<ValueId> {
        let options = ["softcap", "qk_matmul_output_mode", "softmax_precision"];
        let is_plain = |name: &str| int(node, name, 0) == 0 && float(node, name, 0.0) == 0.0;
        let [inputs, outputs] = PLAIN;
        let has_cache = node.input.iter().skip(inputs).chain(node.output.iter().skip(outputs)).any(|name| !name.is_empty());
        if node.op_type() != "Attention" || has_cache || !options.iter().all(|name| is_plain(name)) {
            return None;
        }
        for name in &node.input {
            if matches!(self.lifted.get(name.as_str()), Some(LiftedValue::Untyped | LiftedValue::Folded)) {
                self.opaque(name).ok()?;
            }
        }
        let [q, k, v] = <[&String; 3]>::try_from(node.input.iter().take(3).collect::<Vec<_>>()).ok()?.map(|name| self.named_value(name).ok());
        let rank = self.builder.ty(q?).shape.len();
        let [groups, heads] = [("kv_num_heads", 1), ("q_num_heads", 1)].map(|(name, missing)| usize::try_from(int(node, name, missing)).ok());
        let mut in_heads = Vec::new();
        for (part, id, count) in [("queries", q?, heads?), ("keys", k?, groups?), ("values", v?, groups?)] {
            in_heads.push(match rank {
                4 => id,
                3 => {
                    let width = self.builder.ty(id).shape.last()?.fixed()?;
                    let head_dim = width.checked_div(count).filter(|head_dim| head_dim.checked_mul(count) == Some(width))?;
                    self.builder.node(&format!("{output}/{part}"), SplitHeads { head_dim }, &[id]).ok()?
                }
                _ => return None,
            });
        }
        let [q, k, _] = in_heads.as_slice() else { return None };
        let (of_queries, of_keys) = (self.builder.ty(*q).shape.clone(), self.builder.ty(*k).shape.clone());
        let causal = int(node, "is_causal", 0) != 0;
        // The first query has the position of the first key.
        if causal && of_queries.get(2) != of_keys.get(2) {
            return None;
        }
        let scale = match float(node, "scale", 0.0) {
            0.0 => (of_queries.get(3)?.fixed()? as f64).sqrt().recip(),
            scale => f64::from(scale),
        };
        if let Some(mask) = node.input.get(3).filter(|name| !name.is_empty()) {
            in_heads.push(self.attention_bias(mask, output)?);
        }
        let attention = Attention { scale, causal, ..Attention::default() };
        if rank == 4 {
            return self.builder.node(output, attention, &in_heads).ok();
        }
        let context = self.builder.node(&format!("{output}/heads"), attention, &in_heads).ok()?;
        self.builder.node(output, MergeHeads {}, &[context]).ok()
    }

    /// An additive mask with four axes.
    fn attention_bias(&mut self, mask: &str, output: &str) -> Option<ValueId> {
        let id = self.named_value(mask).ok()?;
        let ty = self.builder.ty(id).clone();
        let missing = 4usize.checked_sub(ty.shape.len()).filter(|_| ty.element == Element::Float)?;
        if missing == 0 {
            return Some(id);
        }
        // Weights cannot be reshaped.
        if self.is_parameter(mask) {
            return None;
        }
        let shape = std::iter::repeat_n(TargetSize::Number(1), missing).chain((0..ty.shape.len()).map(TargetSize::Copy)).collect();
        self.builder.node(&format!("{output}/bias"), Reshape { shape }, &[id]).ok()
    }
}

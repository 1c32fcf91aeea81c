//! Mamba 2: state space layers only.

use super::{DECODER, Family, Keys};
use crate::store::Role;

pub(super) const MAMBA2: Family = Family {
    model_type: "mamba2",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["chunk_size", "norm_before_gate", "residual_in_fp32", "rms_norm", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank"],
        // transformers 5 divides stored weights too.
        neutral: &[("rescale_prenorm_residual", "false")],
    },
    sizes: None,
    tied: &[("lm_head.weight", "backbone.embeddings.weight")],
    fused: &[],
    embeddings: &["embeddings", "embedding"],
    exempt: &[("mixer.conv1d", Role::Other)],
    ..DECODER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::LayerNames;
    use crate::arch::running::parts::{language_head, linear_of, rms_norm, text_inputs};
    use crate::arch::running::state_space::{StateSpace, limits};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Embedding, RmsNorm};
    use crate::ir::{Builder, ValueId};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norm = RmsNorm { epsilon: s.number_or("layer_norm_epsilon", 1e-5)?, ..RmsNorm::default() };
        let layer = StateSpace {
            module: "mixer",
            heads: s.size_or("num_heads", 128)?,
            head_dim: s.size_or("head_dim", 64)?,
            groups: s.size_or("n_groups", 8)?,
            state: s.size_or("state_size", 128)?,
            kernel: s.size_or("conv_kernel", 4)?,
            conv_bias: s.flag_or("use_conv_bias", true)?,
            bias: s.flag_or("use_bias", false)?,
            limits: limits(s, "time_step_limit")?,
            activation: s.text_or("hidden_act", "silu")?,
            norm,
        };
        let (width, expand) = (s.size("hidden_size")?, s.size_or("expand", 2)?);
        if width.checked_mul(expand) != layer.heads.checked_mul(layer.head_dim) {
            let reason = format!("`expand` {expand} times `hidden_size` {width} is not `num_heads` {} times `head_dim` {}", layer.heads, layer.head_dim);
            return Err(Error::graph("config.json", reason));
        }
        let count = s.size("num_hidden_layers")?;
        blocks(s, b, norm, count, true, |b, at, x, mask| layer.add(b, at, x, mask))
    }

    /// A decoder of `count` layers that consist of a normalization and a part that `mix` adds, with the names
    /// of Mamba. The output head may be the embedding table if it `is_tied`.
    pub fn blocks(
        s: &Settings,
        b: &mut Builder,
        norm: RmsNorm,
        count: usize,
        is_tied: bool,
        mix: impl Fn(&mut Builder, &LayerNames, ValueId, ValueId) -> Result<ValueId>,
    ) -> Result<()> {
        let prefix = ["backbone.", "model."].into_iter().find(|prefix| b.has(&format!("{prefix}embeddings.weight"))).unwrap_or("");
        let (tokens, mask) = text_inputs(b)?;
        let shape = [s.size("vocab_size")?, s.size("hidden_size")?];
        let table = b.param(&format!("{prefix}embeddings.weight"), &shape)?;
        let mut x = b.node("embeddings", Embedding {}, &[tokens, table])?;
        for index in 0..count {
            let at = LayerNames::new(prefix, index);
            let normed = rms_norm(b, &at.node("norm"), &at.module("norm"), x, norm)?;
            let mixed = mix(b, &at, normed, mask)?;
            x = b.node(&at.node, Add {}, &[x, mixed])?;
        }
        let x = rms_norm(b, "norm_f", &format!("{prefix}norm_f"), x, norm)?;
        b.output("last_hidden_state", x);
        if s.class().ends_with("ForCausalLM") || b.has("lm_head.weight") {
            const HEAD: &str = "lm_head.weight";
            let weight = if is_tied { language_head(s, b, HEAD, table)? } else { b.param(HEAD, &shape)? };
            let logits = linear_of(b, "lm_head", x, weight)?;
            b.output("logits", logits);
        }
        Ok(())
    }
}

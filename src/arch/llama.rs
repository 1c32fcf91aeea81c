//! Llama and its relatives: Mistral, Qwen2, Qwen3.

use super::parts::{activation, language_head, linear_with, rms_norm, text_inputs};
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Attention, Embedding, Linear, MergeHeads, Mul, Rotary, RotaryScaling, SplitHeads};
use crate::ir::{Builder, ValueId};

pub(super) const KEYS: Keys = Keys {
    // Llama has no windows, and only some scalings of rotary positions know how many there are.
    harmless: &["attention_dropout", "max_position_embeddings", "max_window_layers", "pretraining_tp", "sliding_window", "use_sliding_window"],
    neutral: &[("layer_types", "[]"), ("partial_rotary_factor", "1.0")],
};

struct Family<'s, 'c> {
    s: &'s Settings<'c>,
    heads: usize,
    groups: usize,
    head_dim: usize,
    epsilon: f64,
    rotary: Rotary,
    qkv_bias: bool,
    out_bias: bool,
    head_norms: bool,
    causal: bool,
}

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let prefix = if b.has("model.embed_tokens.weight") { "model." } else { "" };
    let (hidden, heads) = (s.size("hidden_size")?, s.size("num_attention_heads")?);
    let model_type = s.text("model_type")?;
    let groups = s.size_or("num_key_value_heads", heads)?;
    if !heads.is_multiple_of(groups) {
        return Err(Error::graph("config.json", format!("`num_attention_heads` {heads} is no multiple of `num_key_value_heads` {groups}")));
    }
    let head_dim = match s.get("head_dim") {
        Some(_) => s.size("head_dim")?,
        None if model_type == "qwen3" => 128,
        None => s.head_dim("hidden_size", "num_attention_heads")?,
    };
    let attention_bias = s.flag_or("attention_bias", false)?;
    let family = Family {
        s,
        heads,
        groups,
        head_dim,
        epsilon: s.number_or("rms_norm_eps", 1e-6)?,
        rotary: rotary(s, head_dim)?,
        qkv_bias: attention_bias || model_type == "qwen2",
        out_bias: attention_bias && model_type != "qwen2",
        head_norms: model_type == "qwen3",
        causal: s.flag_or("is_causal", true)?,
    };
    let (tokens, mask) = text_inputs(b)?;
    let table = b.param(&format!("{prefix}embed_tokens.weight"), &[s.size("vocab_size")?, hidden])?;
    let mut x = b.node("embed_tokens", Embedding {}, &[tokens, table])?;
    for index in 0..s.size("num_hidden_layers")? {
        x = family.layer(b, prefix, index, x, mask)?;
    }
    let x = rms_norm(b, "norm", &format!("{prefix}norm"), x, family.epsilon)?;
    b.output("last_hidden_state", x);
    if s.class().ends_with("ForCausalLM") || b.has("lm_head.weight") {
        let weight = language_head(s, b, table)?;
        let logits = b.node("lm_head", Linear { input_major: false }, &[x, weight])?;
        b.output("logits", logits);
    }
    Ok(())
}

impl Family<'_, '_> {
    fn layer(&self, b: &mut Builder, prefix: &str, index: usize, x: ValueId, mask: ValueId) -> Result<ValueId> {
        let (s, node) = (self.s, format!("layers.{index}"));
        let module = format!("{prefix}{node}");
        let hidden = s.size("hidden_size")?;
        let normed = rms_norm(b, &format!("{node}.input_layernorm"), &format!("{module}.input_layernorm"), x, self.epsilon)?;
        let mut heads = Vec::with_capacity(4);
        for (part, count) in [("q", self.heads), ("k", self.groups), ("v", self.groups)] {
            let name = format!("{node}.self_attn.{part}");
            let flat = linear_with(
                b,
                &format!("{name}_proj"),
                &format!("{module}.self_attn.{part}_proj"),
                normed,
                count.saturating_mul(self.head_dim),
                self.qkv_bias,
            )?;
            let mut value = b.node(&format!("{name}_heads"), SplitHeads { head_dim: self.head_dim }, &[flat])?;
            if part != "v" {
                if self.head_norms {
                    value = rms_norm(b, &format!("{name}_norm"), &format!("{module}.self_attn.{part}_norm"), value, self.epsilon)?;
                }
                value = b.node(&format!("{name}_rotary"), self.rotary.clone(), &[value])?;
            }
            heads.push(value);
        }
        heads.push(mask);
        let attention = Attention { scale: 1.0 / (self.head_dim as f64).sqrt(), causal: self.causal, window: window(s, index)? };
        let context = b.node(&format!("{node}.self_attn.context_heads"), attention, &heads)?;
        let context = b.node(&format!("{node}.self_attn.context"), MergeHeads {}, &[context])?;
        let out = linear_with(b, &format!("{node}.self_attn.o_proj"), &format!("{module}.self_attn.o_proj"), context, hidden, self.out_bias)?;
        let x = b.node(&format!("{node}.attended"), Add {}, &[x, out])?;
        let normed = rms_norm(b, &format!("{node}.post_attention_layernorm"), &format!("{module}.post_attention_layernorm"), x, self.epsilon)?;
        let (wide, bias) = (s.size("intermediate_size")?, s.flag_or("mlp_bias", false)?);
        let gate = linear_with(b, &format!("{node}.mlp.gate_proj"), &format!("{module}.mlp.gate_proj"), normed, wide, bias)?;
        let gate = b.node(&format!("{node}.mlp.act"), activation(s.text_or("hidden_act", "silu")?)?, &[gate])?;
        let up = linear_with(b, &format!("{node}.mlp.up_proj"), &format!("{module}.mlp.up_proj"), normed, wide, bias)?;
        let gated = b.node(&format!("{node}.mlp.gated"), Mul {}, &[gate, up])?;
        let down = linear_with(b, &format!("{node}.mlp.down_proj"), &format!("{module}.mlp.down_proj"), gated, hidden, bias)?;
        b.node(&node, Add {}, &[x, down])
    }
}

/// How many keys a query of this layer sees.
fn window(s: &Settings, layer: usize) -> Result<Option<usize>> {
    let slides = match s.text("model_type")? {
        "mistral" => true,
        "qwen2" | "qwen3" => slides(s, layer)?,
        _ => false,
    };
    if !slides || s.is_null("sliding_window") {
        return Ok(None);
    }
    if !s.flag_or("is_causal", true)? {
        return Err(Error::Unsupported {
            what: "config.json: `is_causal` of false with a `sliding_window`".into(),
            hint: "only one of them is supported".into(),
        });
    }
    s.size_or("sliding_window", 4096).map(Some)
}

/// Whether a layer of a model with a sliding window is one that has it.
fn slides(s: &Settings, layer: usize) -> Result<bool> {
    let (first, used) = (s.token_or("max_window_layers", 28)?, s.flag_or("use_sliding_window", false)?);
    match s.get("layer_types").map(|types| types.get(layer).and_then(serde_json::Value::as_str)) {
        None => Ok(used && i64::try_from(layer).is_ok_and(|layer| layer >= first)),
        Some(Some("sliding_attention")) if used => Ok(true),
        Some(Some("full_attention")) => Ok(false),
        Some(other) => Err(Error::graph(
            "config.json",
            format!("`layer_types` of layer {layer} is {other:?}, expected full_attention, or sliding_attention with `use_sliding_window`"),
        )),
    }
}

/// The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
fn rotary(s: &Settings, head_dim: usize) -> Result<Rotary> {
    let scaling = s.group("rope_parameters").or(s.group("rope_scaling"));
    let base = s.group("rope_parameters").filter(|p| p.get("rope_theta").is_some()).unwrap_or(*s);
    let theta = base.number_or("rope_theta", 10_000.0)?;
    let Some(p) = scaling else { return Ok(Rotary { theta, scaling: RotaryScaling::None }) };
    let max_position = s.size_or("max_position_embeddings", 2048)?;
    let original = || s.size_or("original_max_position_embeddings", p.size_or("original_max_position_embeddings", max_position)?);
    let kind = p.text_or("rope_type", p.text_or("type", "default")?)?;
    if p.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(Error::Unsupported { what: "a partial rotary embedding".into(), hint: "partial_rotary_factor must be 1".into() });
    }
    let scaling = match kind {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear { factor: p.number("factor")? },
        "dynamic" => RotaryScaling::Dynamic { factor: p.number("factor")?, max_position },
        "llama3" => {
            RotaryScaling::Llama3 { factor: p.number("factor")?, low: p.number("low_freq_factor")?, high: p.number("high_freq_factor")?, original: original()? }
        }
        "yarn" => {
            let factor = p.number("factor")?;
            RotaryScaling::Yarn {
                factor,
                beta_fast: p.number_or("beta_fast", 32.0)?,
                beta_slow: p.number_or("beta_slow", 1.0)?,
                original: original()?,
                attention: attention_factor(&p, factor)?,
                truncate: p.flag_or("truncate", true)?,
            }
        }
        "longrope" | "su" => {
            let original = original()?;
            let factor = p.number_or("factor", max_position as f64 / original as f64)?;
            let usual = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
            let attention = p.number_or("attention_factor", usual)?;
            RotaryScaling::LongRope { short: p.numbers("short_factor")?, long: p.numbers("long_factor")?, original, attention }
        }
        other => {
            return Err(Error::Unsupported { what: format!("rope scaling `{other}`"), hint: "known: default, linear, dynamic, llama3, yarn, longrope".into() });
        }
    };
    if head_dim < 4 && matches!(scaling, RotaryScaling::Dynamic { .. }) {
        return Err(Error::graph("config.json", "dynamic rope scaling needs heads of at least 4 elements"));
    }
    Ok(Rotary { theta, scaling })
}

fn attention_factor(p: &Settings, factor: f64) -> Result<f64> {
    if p.get("attention_factor").is_some() {
        return p.number("attention_factor");
    }
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let (mscale, all) = (p.number_or("mscale", 0.0)?, p.number_or("mscale_all_dim", 0.0)?);
    Ok(if mscale != 0.0 && all != 0.0 { scale(mscale) / scale(all) } else { scale(1.0) })
}

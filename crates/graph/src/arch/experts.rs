//! Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek: mixtures of experts.

use serde_json::{Map, Value};

use super::decoder::{self, Decoder, HeadNorms, LayerNames, PARTS, every_layer, slides};
use super::llama;
use super::parts::{linear_of, slices};
use super::resize::Sizes;
use super::rope::RopeDefaults;
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Combine, Dispatch, ExpertGroups, Mul, Reshape, Route, Sigmoid, Slice, TargetSize};
use crate::ir::{Builder, ValueId};

pub(super) const KEYS: Keys = Keys {
    // Load balancing of experts only affects training.
    harmless: &[
        "attention_dropout",
        "intermediate_size",
        "max_position_embeddings",
        "max_window_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sliding_window",
        "use_sliding_window",
    ],
    neutral: llama::KEYS.neutral,
};

pub(super) const MIXTRAL_SIZES: Sizes = Sizes { other_sizes: &[("intermediate_size", "layers.0.block_sparse_moe.experts.0.w2.weight", 1)], ..decoder::SIZES };

pub(super) const QWEN_SIZES: Sizes = Sizes {
    other_sizes: &[
        ("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1),
        ("shared_expert_intermediate_size", "layers.0.mlp.shared_expert.down_proj.weight", 1),
        ("intermediate_size", "layers.0.mlp.down_proj.weight", 1),
    ],
    ..decoder::SIZES
};

/// The configuration key of the number of experts, for families with experts.
pub fn experts_key(config: &Map<String, Value>) -> Option<&'static str> {
    match config.get("model_type")?.as_str()? {
        "mixtral" => Some("num_local_experts"),
        "qwen2_moe" | "qwen3_moe" => Some(qwen_key(&Settings::new(config))),
        "deepseek_v2" => Some("n_routed_experts"),
        _ => None,
    }
}

/// Qwen's key of the number of experts, which differs between versions of transformers.
fn qwen_key(s: &Settings) -> &'static str {
    if s.get("num_local_experts").is_some() && s.get("num_experts").is_none() { "num_local_experts" } else { "num_experts" }
}

/// The experts of a layer, and the layers that have experts.
pub(super) struct Experts {
    count: usize,
    route: Route,
    /// Number of neurons of an expert.
    inner: usize,
    /// The module that contains the experts.
    block: &'static str,
    /// Names of the gate, up and down projections.
    parts: [&'static str; 3],
    /// The shared expert, which processes all tokens.
    shared: Option<Shared>,
    /// Layers with a dense network.
    plain: Vec<usize>,
    /// The first layer with experts.
    first: usize,
    /// Every `step`-th layer has experts.
    step: usize,
}

/// An expert that processes all tokens.
struct Shared {
    name: &'static str,
    /// Number of neurons.
    inner: usize,
    /// Whether its output is weighted by a gate.
    gated: bool,
}

pub(super) fn build_mixtral(s: &Settings, b: &mut Builder) -> Result<()> {
    let decoder = Decoder::with_epsilon(s, None, 1e-5)?;
    let experts = Experts {
        count: s.size_or("num_local_experts", 8)?,
        route: Route { top: s.size_or("num_experts_per_tok", 2)?, normalised: true, ..Route::default() },
        inner: s.size("intermediate_size")?,
        // The name in published files, or that of transformers 5.
        block: if b.stored_shape("model.layers.0.mlp.gate.weight").is_some() { "mlp" } else { "block_sparse_moe" },
        parts: ["w1", "w3", "w2"],
        shared: None,
        plain: Vec::new(),
        first: 0,
        step: 1,
    };
    let rope = RopeDefaults { theta: 1e6, ..RopeDefaults::default() };
    let decoder = Decoder { experts: Some(experts), ..decoder };
    decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(s.get("sliding_window").is_some()))?)
}

pub(super) fn build_qwen2(s: &Settings, b: &mut Builder) -> Result<()> {
    let shared = Shared { name: "shared_expert", inner: s.size_or("shared_expert_intermediate_size", 5632)?, gated: true };
    let experts = Experts { shared: Some(shared), ..qwen(s, [60, 4, 1408])? };
    let used = s.flag_or("use_sliding_window", false)?;
    let window = |layer: usize| match slides(s, layer, used)? {
        Some(slides) => Ok(slides),
        None if used => Err(Error::Unsupported {
            what: "config.json: `use_sliding_window` without `layer_types`".into(),
            hint: "versions of transformers disagree on which layers have a window then: specify them in `layer_types`".into(),
        }),
        None => Ok(false),
    };
    let decoder = Decoder { qkv_bias: s.flag_or("qkv_bias", true)?, out_bias: false, experts: Some(experts), ..Decoder::new(s, None)? };
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), window)?)
}

pub(super) fn build_qwen3(s: &Settings, b: &mut Builder) -> Result<()> {
    let used = s.flag_or("use_sliding_window", false)?;
    let decoder = Decoder { head_norms: HeadNorms::Head, experts: Some(qwen(s, [128, 8, 768])?), ..Decoder::new(s, None)? };
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(used))?)
}

/// The experts of DeepSeek-V2: from layer `first_k_dense_replace` on, with shared experts as one network
/// of their total width.
pub(super) fn deepseek(s: &Settings) -> Result<Experts> {
    const METHOD: &str = "topk_method";
    const SHARED: &str = "n_shared_experts";
    let experts = s.size_or("n_routed_experts", 64)?;
    // The greedy method ignores groups, but configurations may specify them.
    let [count, top] = ["n_group", "topk_group"].map(|key| if s.get(key).is_some() { s.size(key).map(Some) } else { Ok(None) });
    let (count, top) = (count?, top?);
    let groups = match s.text_or(METHOD, "greedy")? {
        "greedy" => None,
        "group_limited_greedy" => match (count, top) {
            (Some(count), Some(top)) if experts.is_multiple_of(count) && top <= count => Some(ExpertGroups { count, top }),
            (Some(count), Some(top)) => {
                let reason = format!("`n_group` of {count} does not divide `n_routed_experts`, {experts}, or `topk_group` of {top} is more than that");
                return Err(Error::graph("config.json", reason));
            }
            _ => return Err(Error::graph("config.json", format!("`{METHOD}` of group_limited_greedy needs `n_group` and `topk_group`"))),
        },
        other => {
            return Err(Error::Unsupported { what: format!("config.json: `{METHOD}` of {other}"), hint: "supported: greedy, group_limited_greedy".into() });
        }
    };
    let inner = s.size_or("moe_intermediate_size", 1407)?;
    let shared = match s.is_null(SHARED) {
        true => None,
        false => Some(Shared { name: "shared_experts", inner: inner.saturating_mul(s.size_or(SHARED, 2)?), gated: false }),
    };
    Ok(Experts {
        count: experts,
        route: Route { top: s.size("num_experts_per_tok")?, scale: s.number_or("routed_scaling_factor", 1.0)?, groups, ..Route::default() },
        inner,
        block: "mlp",
        parts: PARTS,
        shared,
        plain: Vec::new(),
        first: first_layer(s)?,
        step: 1,
    })
}

/// The experts of Qwen, with defaults of their number, of the number per token, and of their neurons.
fn qwen(s: &Settings, [count, top, inner]: [usize; 3]) -> Result<Experts> {
    Ok(Experts {
        count: s.size_or(qwen_key(s), count)?,
        route: Route { top: s.size_or("num_experts_per_tok", top)?, normalised: s.flag_or("norm_topk_prob", false)?, ..Route::default() },
        inner: s.size_or("moe_intermediate_size", inner)?,
        block: "mlp",
        parts: PARTS,
        shared: None,
        plain: plain_layers(s)?,
        first: 0,
        step: s.size_or("decoder_sparse_step", 1)?,
    })
}

fn first_layer(s: &Settings) -> Result<usize> {
    const KEY: &str = "first_k_dense_replace";
    let Some(value) = s.get(KEY) else { return Ok(0) };
    let found = value.as_u64().and_then(|number| usize::try_from(number).ok());
    found.ok_or_else(|| Error::graph("config.json", format!("`{KEY}` is {value}, expected the number of layers without experts")))
}

fn plain_layers(s: &Settings) -> Result<Vec<usize>> {
    const KEY: &str = "mlp_only_layers";
    let Some(value) = s.get(KEY) else { return Ok(Vec::new()) };
    let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
    let found: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(number).collect());
    found.ok_or_else(|| Error::graph("config.json", format!("`{KEY}` is {value}, expected a list of layer indices")))
}

impl Experts {
    /// Whether the layer with this index has experts.
    pub(super) fn are_in_layer(&self, layer: usize) -> bool {
        layer >= self.first && !self.plain.contains(&layer) && layer.checked_add(1).is_some_and(|number| number.is_multiple_of(self.step))
    }

    /// The feed-forward network of a layer.
    pub(super) fn build(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
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

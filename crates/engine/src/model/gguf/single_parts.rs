//! Models whose layers have one part each, as Nemotron-H: files have the numbers of key-value heads and of
//! neurons of each layer, of which at most one is not zero.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::reader::Reader;
use super::values::{HEADS, INNER, Values};
use crate::arch::GgufFamily;
use crate::error::{Error, Result};
use crate::store::gguf::Value;

/// Another key of the epsilon of normalizations, which takes precedence in llama.cpp and which its older
/// versions require.
const OLDER_EPSILON: &str = "attention.layer_norm_rms_epsilon";
const NEURONS: &str = "feed_forward_length";
/// Key of the width of the input of experts, if it is not that of the residual stream, in both files.
const LATENT: &str = "moe_latent_size";
/// Keys of the width and the number of the heads of state space layers.
const STATE_WIDTH: &str = "mamba_head_dim";
const STATE_HEADS: &str = "mamba_num_heads";
/// Keys of older configurations, which take precedence in transformers, and the newer ones.
const OLDER: [(&str, &str); 4] =
    [("mamba_n_groups", "n_groups"), ("mamba_d_conv", "conv_kernel"), ("mamba_conv_bias", "use_conv_bias"), ("mamba_dt_min", "time_step_min")];
/// The difference between the model and llama.cpp.
pub(super) const NOTE: &str = "llama.cpp has no lower limit of the step sizes of state space layers, the model has one of 0.001 (`time_step_min`): results differ slightly where it applies";

/// The part of a layer: the letter in `config.json`, and a tensor by which it is recognized.
const STATE_SPACE: (char, &str) = ('M', "ssm_in.weight");
const ATTENTION: (char, &str) = ('*', "attn_q.weight");
const EXPERTS: (char, &str) = ('E', "ffn_gate_inp.weight");
const DENSE: (char, &str) = ('-', "ffn_up.weight");

/// Keys of a file. `groups` is the number of key-value heads of layers with attention.
pub(super) fn describe(reader: &Reader, layers: u64, groups: u64) -> Result<Vec<(&'static str, Value)>> {
    if let Some((key, newer)) = OLDER.into_iter().find(|(key, _)| reader.get(key).is_some()) {
        return Err(reader.refused(&format!("`{key}`, a key of older configurations"), format!("rename it to `{newer}`")));
    }
    let mut letters: BTreeMap<u64, char> = BTreeMap::new();
    for name in reader.model.weights.by_name.keys().filter_map(|name| reader.family.to_gguf(name)) {
        let Some((layer, tensor)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { continue };
        let part = [STATE_SPACE, ATTENTION, EXPERTS, DENSE].into_iter().find(|(_, part)| *part == tensor);
        letters.extend(part.and_then(|(letter, _)| Some((layer.parse().ok()?, letter))));
    }
    let has = |(letter, _): (char, &str)| letters.values().any(|other| *other == letter);
    if !has(ATTENTION) {
        return Err(reader.refused("a model without attention", "GGUF files require a number of key-value heads"));
    }
    let neurons = match reader.family.experts {
        Some(_) => reader.required("moe_intermediate_size")?,
        None if has(DENSE) => reader.required("intermediate_size")?,
        None => 0,
    };
    let (mut heads, mut networks) = (Vec::new(), Vec::new());
    for layer in 0..layers {
        let Some(letter) = letters.get(&layer).copied().filter(|letter| reader.family.experts.is_none() || *letter != DENSE.0) else {
            // Variants with experts have no names for tensors of dense networks.
            return Err(match reader.family.experts {
                Some(_) => {
                    let hint = format!("all networks must be experts in files of `{}`", reader.family.architecture);
                    reader.refused(&format!("layer {layer}, a dense network in a model with experts"), hint)
                }
                None => {
                    let hint = "supported: state space layers, attention, networks, experts";
                    reader.refused(&format!("layer {layer}, of which the checkpoint has no known part"), hint)
                }
            });
        };
        let own = |parts: &[char], number: u64| if parts.contains(&letter) { i64::try_from(number).unwrap_or(i64::MAX) } else { 0 };
        heads.push(own(&[ATTENTION.0], groups));
        networks.push(own(&[DENSE.0, EXPERTS.0], neurons));
    }
    let [width, count] = [(STATE_WIDTH, 64), (STATE_HEADS, 128)].map(|(key, default)| Ok::<_, Error>(reader.size(key)?.unwrap_or(default)));
    let inner = width?.saturating_mul(count?);
    let keys = vec![
        (HEADS, Value::Integers(heads)),
        (NEURONS, Value::Integers(networks)),
        (INNER, Value::Unsigned(inner)),
        (OLDER_EPSILON, reader.setting(&reader.family.epsilon)?),
        ("rope.scaling.finetuned", Value::Bool(false)),
    ];
    let latent = reader.size(LATENT)?.map(|width| (LATENT, Value::Unsigned(width)));
    Ok(keys.into_iter().chain(latent).collect())
}

/// The layers of a file.
pub(super) struct Layers {
    /// Number of key-value heads of layers with attention.
    pub groups: u64,
    /// Number of neurons of dense networks, if there are any.
    pub neurons: Option<u64>,
    /// A letter for the part of each layer.
    pub pattern: String,
}

/// Reads the layers of a file.
pub(super) fn read(family: &GgufFamily, values: &mut Values, layers: u64) -> Result<Layers> {
    values.rename_missing(&values.own(OLDER_EPSILON), &values.own(family.epsilon.gguf));
    let (groups, has_heads) = values.of_layers(HEADS, layers)?;
    let (neurons, has_neurons) = values.of_layers(NEURONS, layers)?;
    let (network, _) = if family.experts.is_some() { EXPERTS } else { DENSE };
    let letter = |(has_heads, has_neurons): (&bool, &bool)| match (has_heads, has_neurons) {
        (true, false) => Some(ATTENTION.0),
        (false, true) => Some(network),
        (false, false) => Some(STATE_SPACE.0),
        (true, true) => None,
    };
    let pattern: Option<String> = has_heads.iter().zip(&has_neurons).map(letter).collect();
    let both = || values.wrong(format!("`{}` and `{}` have numbers for the same layer, which may only have one part", values.own(HEADS), values.own(NEURONS)));
    Ok(Layers { groups, neurons: Some(neurons).filter(|neurons| *neurons > 0 && family.experts.is_none()), pattern: pattern.ok_or_else(both)? })
}

/// Keys of `config.json`, whose settings are in `config`.
pub(super) fn config(values: &mut Values, config: &Map<String, Json>) -> Result<Vec<(&'static str, Json)>> {
    let (inner, heads) = (values.required(INNER)?, config.get(STATE_HEADS).and_then(Json::as_u64).unwrap_or(0));
    let width = inner.checked_div(heads).filter(|width| width.checked_mul(heads) == Some(inner));
    let width = width.ok_or_else(|| values.wrong(format!("`{}` is {inner}, but there are {heads} heads of state space layers", values.own(INNER))))?;
    let key = values.own(OLDER_EPSILON);
    let epsilon = config.get("layer_norm_epsilon").and_then(Json::as_f64);
    if let Some(other) = values.number(&key)?.filter(|other| epsilon.is_none_or(|epsilon| epsilon as f32 != *other as f32)) {
        return Err(Error::Unsupported {
            what: format!("{}: `{key}` of {other}", values.path.display()),
            hint: "it must be equal to `attention.layer_norm_epsilon`".into(),
        });
    }
    let latent = values.size(&values.own(LATENT))?.filter(|width| *width > 0);
    Ok([(STATE_WIDTH, json!(width))].into_iter().chain(latent.map(|width| (LATENT, json!(width)))).collect())
}

//! SmolLM3: every few layers have no position embedding.

use super::gguf::{self, Divisors, GgufFamily};
use super::{DECODER, Family, Keys};

pub(super) const SMOLLM3: Family = Family {
    model_type: "smollm3",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["attention_dropout", "max_position_embeddings", "max_window_layers", "no_rope_layer_interval", "pretraining_tp", "sliding_window"],
        neutral: &[("partial_rotary_factor", "1.0")],
    },
    gguf: Some(&GgufFamily {
        architecture: "smollm3",
        class: "SmolLM3ForCausalLM",
        other_divisors: Some(Divisors::None),
        rope_period: Some(4),
        flags: &[],
        required: &[gguf::NO_ATTENTION_BIAS, ("mlp_bias", "false")],
        theta: 2e6,
        ..gguf::LLAMA
    }),
    genai: "smollm3",
    ..DECODER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Layer, slides, window};
    use crate::arch::running::rope::{RopeDefaults, rotary};
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder::new(s, None)?;
        let rotary = rotary(s, decoder.head_dim, RopeDefaults { theta: 2e6, ..RopeDefaults::default() })?;
        decoder.build(b, |index| {
            let has_rotary = uses_rotary(s, index)?;
            let used = s.flag_or("use_sliding_window", false)?;
            let has_window = s.get("sliding_window").is_some();
            let slides = slides(s, index, used)?.unwrap_or(used && has_window && !has_rotary);
            if slides && !has_window {
                return Err(Error::graph("config.json", "`sliding_window` is missing, but layers require one"));
            }
            Ok(Layer { rotary: has_rotary.then(|| rotary.clone()), window: window(s, slides)?, ..Layer::default() })
        })
    }

    /// Whether a layer uses rotary embeddings, without a list of layers.
    pub fn uses_rotary_by_interval(s: &Settings, layer: usize) -> Result<bool> {
        let interval = s.size_or("no_rope_layer_interval", 4)?;
        Ok(layer.checked_add(1).is_none_or(|number| !number.is_multiple_of(interval)))
    }

    /// Whether a layer uses rotary embeddings.
    pub fn uses_rotary(s: &Settings, layer: usize) -> Result<bool> {
        const KEY: &str = "no_rope_layers";
        let Some(list) = s.get(KEY) else { return uses_rotary_by_interval(s, layer) };
        // Despite the name of the key, 1 enables rotary embeddings.
        match list.get(layer).and_then(serde_json::Value::as_u64) {
            Some(enabled @ 0..=1) => Ok(enabled == 1),
            _ => Err(Error::graph("config.json", format!("`{KEY}` is neither 0 nor 1 for layer {layer}"))),
        }
    }
}

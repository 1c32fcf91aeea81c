//! Ministral 3: queries are scaled by their position, beyond the length of the original training.

use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const MINISTRAL3: Family = Family {
    model_type: "ministral3",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["attention_dropout", "layer_types", "max_position_embeddings", "rope_parameters.max_position_embeddings"],
        neutral: &[("partial_rotary_factor", "1.0")],
    },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes { custom_head_dim_default: true, ..DECODER_SIZES }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Layer, Norm, window};
    use crate::arch::running::rope::{RopeDefaults, parameters, rotary};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::PositionScale;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let head_dim = Some(128).filter(|_| !s.is_null("head_dim"));
        let norm = Norm::rms(s, 1e-5)?;
        let decoder = Decoder { qkv_bias: false, out_bias: false, mlp_bias: false, ..Decoder::with_norm(s, head_dim, Some(8), norm)? };
        let missing = || Error::graph("config.json", "has neither `rope_parameters` nor `rope_scaling`, which specify the scale of queries");
        let scaling = parameters(s)?.ok_or_else(missing)?;
        let interval = scaling.size("original_max_position_embeddings")?;
        let scale = PositionScale { interval, factor: scaling.number("llama_4_scaling_beta")?, offset: 0 };
        let rotary = rotary(s, decoder.head_dim, RopeDefaults { theta: 1e6, ..RopeDefaults::default() })?;
        let window = window(s, s.get("sliding_window").is_some())?;
        decoder.build(b, |_| Ok(Layer { rotary: Some(rotary.clone()), window, query_scale: Some(scale), ..Layer::default() }))
    }
}

//! OLMo 3: OLMo 2 with sliding windows in most layers. Rotary embeddings are scaled only in the others.

use super::gguf::{GgufFamily, Windows};
use super::{DECODER, Family, Keys, olmo2};

pub(super) const OLMO3: Family = Family {
    model_type: "olmo3",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[("partial_rotary_factor", "1.0")] },
    gguf: Some(&GgufFamily { class: "Olmo3ForCausalLM", theta: 500_000.0, windows: Windows::Listed(4), has_rope_groups: true, ..olmo2::GGUF }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, Layer, is_local, required_window};
    use crate::arch::running::rope::{RopeDefaults, by_layer_type, require_theta};
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    const THETA: (&str, f64) = ("rope_theta", 500_000.0);

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norms = [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")];
        let decoder = Decoder { norms, head_norms: HeadNorms::Projection, mlp_bias: false, ..Decoder::with_epsilon(s, None, 1e-5)? };
        require_theta(s)?;
        if s.number_or(THETA.0, THETA.1)? != THETA.1 {
            return Err(Error::Unsupported {
                what: format!("config.json: `{}` other than {}", THETA.0, THETA.1),
                hint: "versions of transformers disagree on which layers it affects: specify `rope_parameters` of each layer type".into(),
            });
        }
        let rotary = |layers: &'static str, scaling| by_layer_type(s, layers, THETA, decoder.head_dim, scaling, RopeDefaults::default());
        let (global, local) = (rotary("full_attention", s.group("rope_scaling"))?, rotary("sliding_attention", None)?);
        decoder.build(b, |index| {
            let is_local = is_local(s, index, 4)?;
            let rotary = if is_local { &local } else { &global };
            Ok(Layer { rotary: Some(rotary.clone()), window: required_window(s, is_local)?, ..Layer::default() })
        })
    }
}

//! Granite: multipliers of embeddings, attention scores, residual branches and logits.

use super::gguf::{self, GgufFamily};
use super::{DECODER, Family, Keys};

pub(super) const GRANITE: Family = Family {
    model_type: "granite",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[("partial_rotary_factor", "1.0")] },
    gguf: Some(&GgufFamily { architecture: "granite", class: "GraniteForCausalLM", multipliers: gguf::GRANITE_MULTIPLIERS, ..gguf::LLAMA }),
    genai: "granite",
    ..DECODER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, every_layer};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = with_multipliers(Decoder::new(s, None)?)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
    }

    /// A decoder with the multipliers of its configuration.
    pub fn with_multipliers<'s, 'c>(decoder: Decoder<'s, 'c>) -> Result<Decoder<'s, 'c>> {
        let s = decoder.s;
        let factor = |key: &str| s.number_or(key, 1.0);
        let divisor = factor("logits_scaling")?;
        if divisor == 0.0 {
            return Err(Error::graph("config.json", "`logits_scaling` is 0, but logits are divided by it"));
        }
        Ok(Decoder {
            scale: factor("attention_multiplier")?,
            embedding_scale: Some(factor("embedding_multiplier")?),
            residual_scale: Some(factor("residual_multiplier")?),
            logit_scale: Some(1.0 / divisor),
            ..decoder
        })
    }
}

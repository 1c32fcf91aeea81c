//! The factor on queries and keys of LongRoPE (Ding et al., *LongRoPE*, 2024,
//! <https://arxiv.org/abs/2402.13753>).

/// The factor for a context that is `factor` times longer than the original one, as in transformers.
pub fn long_rope_attention(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

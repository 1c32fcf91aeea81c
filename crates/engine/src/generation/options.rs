//! Options of text generation.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Options of text generation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Generate {
    /// Maximum number of generated tokens.
    pub tokens: usize,
    /// Sampling of the next token; `None` for greedy decoding.
    pub sampling: Option<Sampling>,
}

impl Default for Generate {
    fn default() -> Self {
        Self { tokens: 64, sampling: None }
    }
}

/// Sampling of the next token: logits are divided by the temperature and filtered by top-k and top-p
/// before a token is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Temperature that the logits are divided by.
    pub temperature: f64,
    /// Number of most likely tokens to sample from.
    pub top_k: Option<usize>,
    /// Cumulative probability of the most likely tokens to sample from (nucleus sampling; Holtzman et
    /// al., *The Curious Case of Neural Text Degeneration*, 2020).
    pub top_p: Option<f64>,
    /// Random seed.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

impl Generate {
    /// Validates the options.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: &str, reason: String| Err(Error::option(what, reason));
        match self.sampling {
            _ if self.tokens == 0 => refuse("tokens", "is 0, but must be at least 1".into()),
            Some(Sampling { temperature, .. }) if !(temperature > 0.0 && temperature.is_finite()) => {
                refuse("temperature", format!("is {temperature}, but must be greater than 0; omit it for greedy decoding"))
            }
            Some(Sampling { top_k: Some(0), .. }) => refuse("top-k", "is 0, but must be at least 1".into()),
            Some(Sampling { top_p: Some(p), .. }) if !(p > 0.0 && p <= 1.0) => refuse("top-p", format!("is {p}, but must be greater than 0 and at most 1")),
            _ => Ok(()),
        }
    }
}

//! How texts are continued.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How texts are continued.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Generate {
    /// Tokens of a continuation at most.
    pub tokens: usize,
    /// How the next token is drawn; without it, the likeliest one comes.
    pub sampling: Option<Sampling>,
}

impl Default for Generate {
    fn default() -> Self {
        Self { tokens: 64, sampling: None }
    }
}

/// How the next token is drawn: logits are divided by the temperature, then the likeliest are kept, then one of those is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// What logits are divided by: below one, likely tokens become likelier.
    pub temperature: f64,
    /// How many of the likeliest tokens are kept at most.
    pub top_k: Option<usize>,
    /// As few of the likeliest tokens are kept as have this probability together (Holtzman et al., *The Curious Case of Neural Text
    /// Degeneration*, 2020).
    pub top_p: Option<f64>,
    /// What draws begin with.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

impl Generate {
    /// Holds options to what is possible.
    ///
    /// # Errors
    /// One is impossible.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: &str, reason: String| Err(Error::option(what, reason));
        match self.sampling {
            _ if self.tokens == 0 => refuse("tokens", "is 0, expected one at least".into()),
            Some(Sampling { temperature, .. }) if !(temperature > 0.0 && temperature.is_finite()) => {
                refuse("temperature", format!("is {temperature}, expected a number above 0; without one, the likeliest token comes"))
            }
            Some(Sampling { top_k: Some(0), .. }) => refuse("top-k", "is 0, expected one token at least".into()),
            Some(Sampling { top_p: Some(p), .. }) if !(p > 0.0 && p <= 1.0) => refuse("top-p", format!("is {p}, expected a part of 1 above 0")),
            _ => Ok(()),
        }
    }
}

//! Formats of quantized weights.

use std::collections::{BTreeMap, BTreeSet};

use crate::store::{ExactBlocks, QuantizationSpec};

/// Formats of the weights that a pass quantizes, by name.
#[derive(Debug, Clone, Copy)]
pub(in crate::pass) enum Formats<'a> {
    /// Schemes of compressed-tensors.
    Schemes(&'a BTreeMap<String, QuantizationSpec>),
    /// Blocks of GGUF files.
    Blocks(&'a BTreeMap<String, ExactBlocks>),
}

impl<'a> Formats<'a> {
    /// Names of the weights.
    pub fn names(self) -> BTreeSet<&'a str> {
        match self {
            Formats::Schemes(schemes) => schemes.keys().map(String::as_str).collect(),
            Formats::Blocks(blocks) => blocks.keys().map(String::as_str).collect(),
        }
    }
}

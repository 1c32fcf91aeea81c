//! The runtimes that load the result, and their formats.

use std::fmt;

use super::blocks::Blocks;
use super::formats::Formats;
use super::schemes::Schemes;
use crate::error::Result;
use crate::model::Model;
use crate::pass::Scheme;

/// The runtime that loads the result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum LoadedBy {
    /// vLLM: int4 and int8 weights in groups, which its kernels multiply by float activations
    #[default]
    Vllm,
    /// transformers with compressed-tensors: int2 to int8 in groups
    Transformers,
    /// llama.cpp: a GGUF file with a type for each matrix, including the embedding and the head
    #[cfg_attr(feature = "cli", value(name = "llama.cpp", alias = "llama-cpp"))]
    LlamaCpp,
}

impl fmt::Display for LoadedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoadedBy::Vllm => "vLLM",
            LoadedBy::Transformers => "transformers",
            LoadedBy::LlamaCpp => "llama.cpp",
        })
    }
}

impl LoadedBy {
    /// The formats that the runtime loads, for the weights of a model.
    ///
    /// # Errors
    /// If the runtime does not load the model.
    pub(super) fn formats(self, model: &Model) -> Result<Box<dyn Formats + '_>> {
        Ok(match self {
            // https://docs.vllm.ai/en/latest/features/quantization: WNA16 of compressed-tensors has 4 and 8
            // bits.
            LoadedBy::Vllm => {
                Box::new(Schemes::new(model, &[(Scheme::W4A16, 128), (Scheme::W4A16, 64), (Scheme::W4A16, 32), (Scheme::W8A16, 128), (Scheme::W8A16, 32)]))
            }
            // transformers unpacks the weights when it loads them, so that all widths are supported.
            LoadedBy::Transformers => Box::new(Schemes::new(
                model,
                &[
                    (Scheme::W2A16, 32),
                    (Scheme::W3A16, 64),
                    (Scheme::W4A16, 128),
                    (Scheme::W4A16, 32),
                    (Scheme::W5A16, 64),
                    (Scheme::W6A16, 64),
                    (Scheme::W8A16, 64),
                ],
            )),
            LoadedBy::LlamaCpp => Box::new(Blocks::new(model)?),
        })
    }

    /// Whether the result is a single file.
    pub fn is_file(self) -> bool {
        self == LoadedBy::LlamaCpp
    }
}

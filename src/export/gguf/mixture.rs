//! Selects the type of each matrix of a GGUF file like llama.cpp's quantizer.

use serde::{Deserialize, Serialize};

use crate::kernel::ggml::{BlockType, LARGE};
use crate::store::DType;
use crate::store::gguf::Kind;

/// File type of a GGUF file, by its name in llama.cpp.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[allow(non_camel_case_types)]
#[non_exhaustive]
pub enum FileType {
    /// 32-bit floats
    F32,
    /// 16-bit floats
    #[default]
    F16,
    /// bfloat16
    BF16,
    /// 8 bits, one scale per 32 weights
    Q8_0,
    /// 4 bits, one scale per 32 weights
    Q4_0,
    /// 4 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices
    Q4_K_M,
}

impl FileType {
    /// Value of the metadata key `general.file_type`.
    pub(super) fn id(self) -> u64 {
        match self {
            FileType::F32 => 0,
            FileType::F16 => 1,
            FileType::Q4_0 => 2,
            FileType::Q8_0 => 7,
            FileType::Q4_K_M => 15,
            FileType::BF16 => 32,
        }
    }

    /// Whether the importance of columns affects the quantization.
    pub(super) fn uses_importance(self) -> bool {
        matches!(self, FileType::Q4_0 | FileType::Q4_K_M)
    }
}

/// Properties of a model that determine the types of its matrices.
pub(super) struct Mixture {
    pub file_type: FileType,
    pub layers: usize,
    /// Whether several query heads share a key head.
    pub grouped_query: bool,
    pub experts: usize,
    /// Whether the importance of columns is used.
    pub uses_importance: bool,
}

/// Whether a layer uses more bits: the first and the last eighth of the layers, and every third layer in
/// between.
fn uses_more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

impl Mixture {
    /// The type of a matrix. `is_head`: it computes the logits.
    pub fn kind(&self, name: &str, is_head: bool) -> Kind {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()).unwrap_or(0);
        // Experts have the same types as dense MLPs.
        let name = name.replace("_exps.weight", ".weight").replace("_shexp.weight", ".weight");
        let is = |module: &str| name.ends_with(&format!(".{module}.weight"));
        Kind::Blocks(match self.file_type {
            FileType::F32 => return Kind::Plain(DType::F32),
            FileType::F16 => return Kind::Plain(DType::F16),
            FileType::BF16 => return Kind::Plain(DType::BF16),
            FileType::Q8_0 => BlockType::Q8_0,
            FileType::Q4_0 | FileType::Q4_K_M if is_head => BlockType::Q6K,
            // With eight experts, the weights shared by all of them get more bits.
            FileType::Q4_0 | FileType::Q4_K_M if self.experts == 8 && (is("attn_v") || is("attn_k")) => BlockType::Q8_0,
            FileType::Q4_0 if self.uses_importance && is("ffn_down") && layer < self.layers / 8 => BlockType::Q4_1,
            FileType::Q4_0 => BlockType::Q4_0,
            FileType::Q4_K_M if self.experts == 8 && is("attn_output") => BlockType::Q5K,
            FileType::Q4_K_M if (is("attn_v") || is("ffn_down")) && uses_more_bits(layer, self.layers) => BlockType::Q6K,
            // With grouped-query attention, values get more bits.
            FileType::Q4_K_M if is("attn_v") && self.grouped_query && self.layers == 80 => BlockType::Q5K,
            FileType::Q4_K_M => BlockType::Q4K,
        })
    }
}

/// The type of a matrix whose rows have `row` elements: `target`, or a type with smaller blocks if the
/// length is not a multiple of its block size.
pub(super) fn fit_row(target: Kind, row: usize) -> Kind {
    let smaller = match target {
        Kind::Blocks(kind) if !row.is_multiple_of(LARGE) => Kind::Blocks(match kind {
            BlockType::Q4K => BlockType::Q5_0,
            BlockType::Q5K => BlockType::Q5_1,
            BlockType::Q6K => BlockType::Q8_0,
            other => other,
        }),
        other => other,
    };
    match smaller {
        Kind::Blocks(kind) if !row.is_multiple_of(kind.elements()) => Kind::Plain(DType::F16),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mixture of llama.cpp's `llama_tensor_get_type`.
    #[test]
    fn types_match_llama_cpp() {
        let count = |layers: usize| (0..layers).filter(|layer| uses_more_bits(*layer, layers)).count();
        assert_eq!([32, 28, 30, 1].map(count), [16, 14, 14, 1]);
        let name = |kind: Kind| if let Kind::Blocks(kind) = kind { kind.name() } else { "plain" };
        let kind = |file_type: FileType, tensor: &str, is_head: bool, layers: usize| {
            name(Mixture { file_type, layers, grouped_query: true, experts: 0, uses_importance: false }.kind(tensor, is_head))
        };
        assert_eq!(kind(FileType::Q4_K_M, "blk.0.attn_v.weight", false, 32), "Q6_K");
        assert_eq!(kind(FileType::Q4_K_M, "blk.4.ffn_down.weight", false, 32), "Q4_K");
        assert_eq!(kind(FileType::Q4_K_M, "blk.6.ffn_down.weight", false, 32), "Q6_K");
        assert_eq!(kind(FileType::Q4_K_M, "blk.0.attn_q.weight", false, 32), "Q4_K");
        assert_eq!(kind(FileType::Q4_K_M, "blk.11.attn_v.weight", false, 80), "Q5_K");
        assert_eq!(kind(FileType::Q4_K_M, "token_embd.weight", true, 32), "Q6_K");
        assert_eq!(kind(FileType::Q4_K_M, "token_embd.weight", false, 32), "Q4_K");
        assert_eq!(kind(FileType::Q4_0, "output.weight", true, 32), "Q6_K");
        assert_eq!(kind(FileType::Q4_0, "blk.0.attn_v.weight", false, 32), "Q4_0");
        assert_eq!(kind(FileType::Q4_0, "blk.3.ffn_down.weight", false, 32), "Q4_0");
        assert_eq!(kind(FileType::Q8_0, "output.weight", true, 32), "Q8_0");
        let weighted = Mixture { file_type: FileType::Q4_0, layers: 32, grouped_query: true, experts: 0, uses_importance: true };
        let found = ["blk.3.ffn_down.weight", "blk.4.ffn_down.weight", "blk.3.ffn_up.weight"].map(|tensor| name(weighted.kind(tensor, false)));
        assert_eq!(found, ["Q4_1", "Q4_0", "Q4_0"]);
        let shared = ["attn_v", "attn_k", "attn_q", "attn_output", "ffn_up_exps"].map(|module| format!("blk.9.{module}.weight"));
        let eight = |file_type| {
            let mixture = Mixture { file_type, layers: 32, grouped_query: true, experts: 8, uses_importance: false };
            shared.each_ref().map(|tensor| name(mixture.kind(tensor, false)))
        };
        assert_eq!(eight(FileType::Q4_0), ["Q8_0", "Q8_0", "Q4_0", "Q4_0", "Q4_0"]);
        assert_eq!(eight(FileType::Q4_K_M), ["Q8_0", "Q8_0", "Q4_K", "Q5_K", "Q4_K"]);
        assert_eq!(eight(FileType::Q8_0), ["Q8_0"; 5]);
        assert_eq!(eight(FileType::BF16), ["plain"; 5]);
        let fits = |kind: BlockType, row: usize| fit_row(Kind::Blocks(kind), row);
        assert_eq!(name(fits(BlockType::Q4K, 896)), "Q5_0");
        assert_eq!(name(fits(BlockType::Q6K, 896)), "Q8_0");
        assert_eq!(name(fits(BlockType::Q5K, 896)), "Q5_1");
        assert_eq!(name(fits(BlockType::Q4_0, 896)), "Q4_0");
        assert_eq!(name(fits(BlockType::Q4K, 1024)), "Q4_K");
        assert_eq!([fits(BlockType::Q6K, 90), fits(BlockType::Q8_0, 90)], [Kind::Plain(DType::F16); 2]);
    }
}

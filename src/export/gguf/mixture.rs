//! Selects the type of each matrix of a GGUF file like llama.cpp's quantizer.

use serde::{Deserialize, Serialize};

use crate::kernel::ggml::BlockType;
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
    /// 6 bits in blocks of 256 with quantized scales
    Q6_K,
    /// 5 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices
    Q5_K_M,
    /// 5 bits in blocks of 256 with quantized scales
    Q5_K_S,
    /// 5 bits, a scale and a minimum per 32 weights
    Q5_1,
    /// 5 bits, one scale per 32 weights
    Q5_0,
    /// 4 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices
    Q4_K_M,
    /// 4 bits in blocks of 256 with quantized scales; 5 bits for the most sensitive matrices
    Q4_K_S,
    /// 4 bits, a scale and a minimum per 32 weights
    Q4_1,
    /// 4 bits, one scale per 32 weights
    Q4_0,
    /// 4-bit indices into a codebook of 16 values, one scale per 32 weights
    IQ4_NL,
    /// The codebook of IQ4_NL in blocks of 256 with quantized scales
    IQ4_XS,
    /// 3 bits in blocks of 256 with quantized scales; 5 bits for the most sensitive matrices
    Q3_K_L,
    /// 3 bits in blocks of 256 with quantized scales; 4 or 5 bits for the most sensitive matrices
    Q3_K_M,
    /// 3 bits in blocks of 256 with quantized scales
    Q3_K_S,
    /// 2 bits in blocks of 256 with quantized scales; 3 or 4 bits for the most sensitive matrices
    Q2_K,
}

impl FileType {
    /// Value of the metadata key `general.file_type`, and the type of most matrices.
    fn facts(self) -> (u64, Kind) {
        match self {
            FileType::F32 => (0, Kind::Plain(DType::F32)),
            FileType::F16 => (1, Kind::Plain(DType::F16)),
            FileType::BF16 => (32, Kind::Plain(DType::BF16)),
            FileType::Q8_0 => (7, Kind::Blocks(BlockType::Q8_0)),
            FileType::Q6_K => (18, Kind::Blocks(BlockType::Q6K)),
            FileType::Q5_K_M => (17, Kind::Blocks(BlockType::Q5K)),
            FileType::Q5_K_S => (16, Kind::Blocks(BlockType::Q5K)),
            FileType::Q5_1 => (9, Kind::Blocks(BlockType::Q5_1)),
            FileType::Q5_0 => (8, Kind::Blocks(BlockType::Q5_0)),
            FileType::Q4_K_M => (15, Kind::Blocks(BlockType::Q4K)),
            FileType::Q4_K_S => (14, Kind::Blocks(BlockType::Q4K)),
            FileType::Q4_1 => (3, Kind::Blocks(BlockType::Q4_1)),
            FileType::Q4_0 => (2, Kind::Blocks(BlockType::Q4_0)),
            FileType::IQ4_NL => (25, Kind::Blocks(BlockType::Iq4Nl)),
            FileType::IQ4_XS => (30, Kind::Blocks(BlockType::Iq4Xs)),
            FileType::Q3_K_L => (13, Kind::Blocks(BlockType::Q3K)),
            FileType::Q3_K_M => (12, Kind::Blocks(BlockType::Q3K)),
            FileType::Q3_K_S => (11, Kind::Blocks(BlockType::Q3K)),
            FileType::Q2_K => (10, Kind::Blocks(BlockType::Q2K)),
        }
    }

    /// Value of the metadata key `general.file_type`.
    pub(super) fn id(self) -> u64 {
        self.facts().0
    }

    /// Whether the importance of columns affects the quantization.
    pub(super) fn uses_importance(self) -> bool {
        uses_importance(self.facts().1)
    }
}

/// Whether the importance of columns affects the quantization to a type.
pub(super) fn uses_importance(kind: Kind) -> bool {
    matches!(kind, Kind::Blocks(kind) if kind.uses_importance())
}

/// Properties of a model that determine the types of its matrices.
pub(super) struct Mixture {
    pub file_type: FileType,
    pub layers: usize,
    /// Number of query heads that share a key head.
    pub query_group: usize,
    pub experts: usize,
    /// Whether llama.cpp classifies the model as one of 70 billion parameters.
    pub is_70b: bool,
    /// Whether the importance of columns is used.
    pub uses_importance: bool,
}

/// Whether a layer uses more bits: the first and the last eighth of the layers, and every third layer in
/// between.
fn uses_more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

impl Mixture {
    /// Whether llama.cpp classifies a model as one of 70 billion parameters.
    pub fn is_70b(architecture: &str, layers: usize, query_group: usize) -> bool {
        layers == 80 && (architecture == "qwen2" || (architecture == "llama" && query_group > 1))
    }

    /// The type of a matrix, before it is adapted to the row length. `is_head`: it computes the logits.
    pub fn kind(&self, name: &str, is_head: bool) -> Kind {
        let Kind::Blocks(most) = self.file_type.facts().1 else { return self.file_type.facts().1 };
        let mut parts = name.split('.');
        let layer = parts.nth(1).and_then(|layer| layer.parse().ok()).unwrap_or(0);
        // Experts have the same types as dense MLPs.
        let module = parts.next().unwrap_or_default().trim_end_matches("_exps").trim_end_matches("_shexp");
        Kind::Blocks(match module {
            _ if is_head && most != BlockType::Q8_0 => BlockType::Q6K,
            "attn_v" | "attn_qkv" => self.value_type(most, layer),
            "attn_k" if self.has_eight_experts() => BlockType::Q8_0,
            "attn_output" => self.attention_output_type(most),
            "ffn_down" => self.down_projection_type(most, layer),
            _ => most,
        })
    }

    /// With eight experts, the weights shared by all of them get more bits.
    fn has_eight_experts(&self) -> bool {
        self.experts == 8
    }

    /// Whether a layer is in the first part of all layers: `1 / divisor` of them.
    fn is_early(&self, layer: usize, divisor: usize) -> bool {
        layer < self.layers / divisor
    }

    /// The type of value projections, which are small with grouped-query attention.
    fn value_type(&self, most: BlockType, layer: usize) -> BlockType {
        let is_small = self.query_group >= 4;
        let kind = match self.file_type {
            FileType::Q2_K if is_small => BlockType::Q4K,
            FileType::Q2_K => BlockType::Q3K,
            FileType::Q3_K_M if layer < 2 => BlockType::Q5K,
            FileType::Q3_K_M => BlockType::Q4K,
            FileType::Q3_K_L => BlockType::Q5K,
            FileType::IQ4_NL | FileType::IQ4_XS if is_small => BlockType::Q5K,
            FileType::Q4_K_M | FileType::Q5_K_M if uses_more_bits(layer, self.layers) => BlockType::Q6K,
            FileType::Q4_K_S if layer < 4 => BlockType::Q5K,
            _ => most,
        };
        match kind {
            _ if self.has_eight_experts() => BlockType::Q8_0,
            BlockType::Q3K | BlockType::Q4K if self.is_70b => BlockType::Q5K,
            kind => kind,
        }
    }

    /// The type of the output projections of attention.
    fn attention_output_type(&self, most: BlockType) -> BlockType {
        use FileType::{IQ4_NL, IQ4_XS, Q2_K, Q3_K_L, Q3_K_M, Q3_K_S, Q4_K_M, Q4_K_S};
        match self.file_type {
            Q2_K | Q3_K_S | Q3_K_M | IQ4_NL | IQ4_XS | Q4_K_S | Q4_K_M if self.has_eight_experts() => BlockType::Q5K,
            _ if self.has_eight_experts() => most,
            Q2_K => BlockType::Q3K,
            Q3_K_M => BlockType::Q4K,
            Q3_K_L => BlockType::Q5K,
            _ => most,
        }
    }

    /// The type of the down projections of MLPs.
    fn down_projection_type(&self, most: BlockType, layer: usize) -> BlockType {
        match self.file_type {
            FileType::Q2_K => BlockType::Q3K,
            FileType::Q3_K_M if self.is_early(layer, 16) => BlockType::Q5K,
            FileType::Q3_K_M => BlockType::Q4K,
            FileType::Q3_K_L => BlockType::Q5K,
            FileType::Q4_K_M | FileType::Q5_K_M if uses_more_bits(layer, self.layers) => BlockType::Q6K,
            FileType::Q4_K_S if self.is_early(layer, 8) => BlockType::Q5K,
            FileType::IQ4_NL | FileType::IQ4_XS if !self.uses_importance && self.is_early(layer, 8) => BlockType::Q5K,
            FileType::Q4_0 if self.uses_importance && self.is_early(layer, 8) => BlockType::Q4_1,
            FileType::Q5_0 if self.uses_importance && self.is_early(layer, 8) => BlockType::Q5_1,
            _ => most,
        }
    }
}

/// Number of elements of which the rows of a type must be a multiple.
pub(super) fn block_size(kind: Kind) -> usize {
    match kind {
        Kind::Plain(_) => 1,
        Kind::Blocks(kind) => kind.elements(),
    }
}

/// The type of a matrix whose rows have `row` elements: `target`, or a type with smaller blocks if the
/// length is not a multiple of its block size.
pub(super) fn fit_row(target: Kind, row: usize) -> Kind {
    let smaller = match target {
        kind if row.is_multiple_of(block_size(kind)) => kind,
        Kind::Blocks(BlockType::Q2K | BlockType::Q3K) => Kind::Blocks(BlockType::Q4_0),
        Kind::Blocks(BlockType::Iq4Xs) => Kind::Blocks(BlockType::Iq4Nl),
        Kind::Blocks(BlockType::Q4K) => Kind::Blocks(BlockType::Q5_0),
        Kind::Blocks(BlockType::Q5K) => Kind::Blocks(BlockType::Q5_1),
        Kind::Blocks(BlockType::Q6K) => Kind::Blocks(BlockType::Q8_0),
        kind => kind,
    };
    if row.is_multiple_of(block_size(smaller)) { smaller } else { Kind::Plain(DType::F16) }
}

/// Name of a type.
pub(super) fn kind_name(kind: Kind) -> String {
    match kind {
        Kind::Plain(dtype) => dtype.to_string(),
        Kind::Blocks(kind) => kind.name().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(kind: Kind) -> &'static str {
        if let Kind::Blocks(kind) = kind { kind.name() } else { "plain" }
    }

    /// A dense Llama of 32 layers in which two query heads share a key head.
    fn mixture(file_type: FileType) -> Mixture {
        Mixture { file_type, layers: 32, query_group: 2, experts: 0, is_70b: false, uses_importance: false }
    }

    /// Names of the types of a module in these layers.
    fn types(mixture: &Mixture, module: &str, layers: &[usize]) -> String {
        layers.iter().map(|layer| name(mixture.kind(&format!("blk.{layer}.{module}.weight"), false))).collect::<Vec<_>>().join(" ")
    }

    /// The mixture of llama.cpp's `llama_tensor_get_type`.
    #[test]
    fn types_match_llama_cpp() {
        let count = |layers: usize| (0..layers).filter(|layer| uses_more_bits(*layer, layers)).count();
        assert_eq!([32, 28, 30, 1].map(count), [16, 14, 14, 1]);
        for (file_type, module, layers, expected) in [
            (FileType::Q2_K, "attn_v", vec![0, 31], "Q3_K Q3_K"),
            (FileType::Q2_K, "ffn_down", vec![0, 31], "Q3_K Q3_K"),
            (FileType::Q2_K, "attn_output", vec![0], "Q3_K"),
            (FileType::Q2_K, "attn_q", vec![0], "Q2_K"),
            (FileType::Q3_K_S, "attn_v", vec![0], "Q3_K"),
            (FileType::Q3_K_S, "ffn_down", vec![0], "Q3_K"),
            (FileType::Q3_K_M, "attn_v", vec![1, 2, 31], "Q5_K Q4_K Q4_K"),
            (FileType::Q3_K_M, "attn_qkv", vec![1, 2], "Q5_K Q4_K"),
            (FileType::Q3_K_M, "ffn_down", vec![1, 2, 31], "Q5_K Q4_K Q4_K"),
            (FileType::Q3_K_M, "attn_output", vec![0], "Q4_K"),
            (FileType::Q3_K_M, "ffn_up", vec![0], "Q3_K"),
            (FileType::Q3_K_L, "attn_v", vec![9], "Q5_K"),
            (FileType::Q3_K_L, "ffn_down", vec![9], "Q5_K"),
            (FileType::Q3_K_L, "attn_output", vec![9], "Q5_K"),
            (FileType::Q3_K_L, "attn_k", vec![9], "Q3_K"),
            (FileType::Q4_K_S, "attn_v", vec![3, 4], "Q5_K Q4_K"),
            (FileType::Q4_K_S, "ffn_down", vec![3, 4, 31], "Q5_K Q4_K Q4_K"),
            (FileType::Q4_K_M, "attn_v", vec![0, 4, 6], "Q6_K Q4_K Q6_K"),
            (FileType::Q4_K_M, "ffn_down", vec![0, 4, 6], "Q6_K Q4_K Q6_K"),
            (FileType::Q4_K_M, "attn_q", vec![0], "Q4_K"),
            (FileType::Q5_K_S, "ffn_down", vec![0], "Q5_K"),
            (FileType::Q5_K_M, "attn_v", vec![0, 4, 6], "Q6_K Q5_K Q6_K"),
            (FileType::Q5_K_M, "ffn_down", vec![0, 4, 6], "Q6_K Q5_K Q6_K"),
            (FileType::Q6_K, "attn_v", vec![0], "Q6_K"),
            (FileType::IQ4_NL, "ffn_down", vec![3, 4], "Q5_K IQ4_NL"),
            (FileType::IQ4_XS, "ffn_down", vec![3, 4], "Q5_K IQ4_XS"),
            (FileType::IQ4_XS, "attn_v", vec![0], "IQ4_XS"),
            (FileType::Q4_0, "ffn_down", vec![3], "Q4_0"),
            (FileType::Q4_1, "ffn_down", vec![3], "Q4_1"),
            (FileType::Q5_0, "ffn_down", vec![3], "Q5_0"),
            (FileType::Q5_1, "attn_v", vec![3], "Q5_1"),
            (FileType::BF16, "attn_v", vec![3], "plain"),
        ] {
            assert_eq!(types(&mixture(file_type), module, &layers), expected, "{file_type:?} {module}");
        }
        let head = |file_type| ["token_embd.weight", "output.weight"].map(|tensor| name(mixture(file_type).kind(tensor, true)));
        for file_type in [FileType::Q2_K, FileType::Q3_K_L, FileType::IQ4_XS, FileType::Q4_0, FileType::Q4_K_M, FileType::Q5_1, FileType::Q6_K] {
            assert_eq!(head(file_type), ["Q6_K"; 2], "{file_type:?}");
        }
        assert_eq!((head(FileType::Q8_0), head(FileType::F16)), (["Q8_0"; 2], ["plain"; 2]));
        let embedding = |file_type| name(mixture(file_type).kind("token_embd.weight", false));
        assert_eq!([FileType::Q2_K, FileType::Q4_K_M, FileType::IQ4_NL].map(embedding), ["Q2_K", "Q4_K", "IQ4_NL"]);
    }

    #[test]
    fn types_depend_on_importance() {
        let weighted = |file_type| types(&Mixture { uses_importance: true, ..mixture(file_type) }, "ffn_down", &[3, 4]);
        assert_eq!([FileType::Q4_0, FileType::Q5_0].map(weighted), ["Q4_1 Q4_0", "Q5_1 Q5_0"]);
        assert_eq!([FileType::IQ4_NL, FileType::IQ4_XS].map(weighted), ["IQ4_NL IQ4_NL", "IQ4_XS IQ4_XS"]);
        assert_eq!([FileType::Q4_K_S, FileType::Q3_K_M].map(weighted), ["Q5_K Q4_K", "Q4_K Q4_K"]);
    }

    #[test]
    fn types_depend_on_heads_layers_and_experts() {
        let values = |file_type, query_group, is_70b| {
            let mixture = Mixture { layers: 80, query_group, is_70b, ..mixture(file_type) };
            types(&mixture, "attn_v", &[11])
        };
        let all = [FileType::Q2_K, FileType::IQ4_NL, FileType::IQ4_XS, FileType::Q3_K_S, FileType::Q4_K_M, FileType::Q4_0];
        assert_eq!(all.map(|file_type| values(file_type, 3, false)), ["Q3_K", "IQ4_NL", "IQ4_XS", "Q3_K", "Q4_K", "Q4_0"]);
        assert_eq!(all.map(|file_type| values(file_type, 4, false)), ["Q4_K", "Q5_K", "Q5_K", "Q3_K", "Q4_K", "Q4_0"]);
        assert_eq!(all.map(|file_type| values(file_type, 8, true)), ["Q5_K", "Q5_K", "Q5_K", "Q5_K", "Q5_K", "Q4_0"]);
        let large = [("llama", 80, 8), ("llama", 80, 1), ("qwen2", 80, 1), ("qwen3", 80, 8), ("llama", 32, 8)];
        assert_eq!(large.map(|(architecture, layers, group)| Mixture::is_70b(architecture, layers, group)), [true, false, true, false, false]);
        let eight = |file_type| {
            let mixture = Mixture { experts: 8, ..mixture(file_type) };
            ["attn_v", "attn_k", "attn_q", "attn_output", "ffn_up_exps", "ffn_down_exps"].map(|module| types(&mixture, module, &[9]))
        };
        assert_eq!(eight(FileType::Q4_0), ["Q8_0", "Q8_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0"]);
        assert_eq!(eight(FileType::Q4_K_M), ["Q8_0", "Q8_0", "Q4_K", "Q5_K", "Q4_K", "Q6_K"]);
        assert_eq!(eight(FileType::Q2_K), ["Q8_0", "Q8_0", "Q2_K", "Q5_K", "Q2_K", "Q3_K"]);
        assert_eq!(eight(FileType::Q3_K_L), ["Q8_0", "Q8_0", "Q3_K", "Q3_K", "Q3_K", "Q5_K"]);
        assert_eq!(eight(FileType::Q5_K_S), ["Q8_0", "Q8_0", "Q5_K", "Q5_K", "Q5_K", "Q5_K"]);
        assert_eq!(eight(FileType::Q6_K), ["Q8_0", "Q8_0", "Q6_K", "Q6_K", "Q6_K", "Q6_K"]);
        assert_eq!(eight(FileType::IQ4_XS), ["Q8_0", "Q8_0", "IQ4_XS", "Q5_K", "IQ4_XS", "IQ4_XS"]);
        assert_eq!(eight(FileType::Q8_0), ["Q8_0"; 6]);
        assert_eq!(eight(FileType::BF16), ["plain"; 6]);
        assert_eq!(types(&mixture(FileType::Q4_K_M), "ffn_down_shexp", &[0]), "Q6_K");
    }

    #[test]
    fn rows_that_are_not_complete_blocks_get_another_type() {
        let fits = |kind: BlockType, row: usize| name(fit_row(Kind::Blocks(kind), row));
        for (kind, smaller) in [
            (BlockType::Q2K, "Q4_0"),
            (BlockType::Q3K, "Q4_0"),
            (BlockType::Iq4Xs, "IQ4_NL"),
            (BlockType::Q4K, "Q5_0"),
            (BlockType::Q5K, "Q5_1"),
            (BlockType::Q6K, "Q8_0"),
        ] {
            assert_eq!([fits(kind, 1024), fits(kind, 896), fits(kind, 90)], [kind.name(), smaller, "plain"]);
        }
        for kind in [BlockType::Q4_0, BlockType::Iq4Nl, BlockType::Q8_0] {
            assert_eq!([fits(kind, 896), fits(kind, 90)], [kind.name(), "plain"]);
        }
        assert_eq!(fit_row(Kind::Blocks(BlockType::Q8_0), 90), Kind::Plain(DType::F16));
        assert_eq!(fit_row(Kind::Plain(DType::F32), 90), Kind::Plain(DType::F32));
    }
}

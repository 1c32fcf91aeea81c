//! Selects the type of each matrix of a GGUF file like llama.cpp's quantizer.

use super::file_type::FileType;
use crate::kernel::ggml::{BlockType, ImportanceUse};
use crate::store::gguf::Kind;
use crate::store::{DType, OriginalFormat, Weight};

/// Properties of a model that determine the types of its matrices.
pub(super) struct Mixture {
    pub file_type: FileType,
    pub layers: usize,
    /// Number of query heads that share a key head.
    pub query_group: usize,
    pub experts: usize,
    /// Whether each layer has an expert for all tokens.
    pub has_shared_expert: bool,
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

    /// The type of a matrix with rows of `row` elements, before it is adapted to the row length.
    /// `is_head`: it computes the logits.
    pub fn kind(&self, name: &str, is_head: bool, row: usize) -> Kind {
        let Kind::Blocks(most) = self.file_type.most() else { return self.file_type.most() };
        let mut parts = name.split('.');
        let layer = parts.nth(1).and_then(|layer| layer.parse().ok()).unwrap_or(0);
        let module = parts.next().unwrap_or_default();
        // Experts have the same types as dense MLPs.
        let dense = module.trim_end_matches("_exps").trim_end_matches("_shexp");
        Kind::Blocks(match dense {
            _ if is_head => self.head_type(most, row),
            _ if self.file_type == FileType::MXFP4_MOE => {
                if module.ends_with("_exps") {
                    most
                } else {
                    BlockType::Q8_0
                }
            }
            _ if name == "token_embd.weight" => self.embedding_type(most),
            _ if self.has_two_bits() => self.two_bit_type(dense, most, layer, module != dense),
            "attn_v" | "attn_qkv" => self.value_type(most, layer),
            "attn_k" if self.has_eight_experts() => BlockType::Q8_0,
            "attn_k" | "attn_q" => self.query_type(most),
            "attn_output" => self.attention_output_type(most),
            "ffn_down" => self.down_projection_type(most, layer),
            "ffn_gate" | "ffn_up" if self.file_type == FileType::IQ3_XS && self.is_middle(layer) => BlockType::IQ3_XXS,
            _ => most,
        })
    }

    /// Whether most matrices have one of the IQ1 and IQ2 types.
    fn has_two_bits(&self) -> bool {
        self.has_one_bit() || matches!(self.file_type, FileType::IQ2_XXS | FileType::IQ2_XS | FileType::IQ2_S | FileType::IQ2_M)
    }

    /// Whether most matrices have one of the IQ1 types.
    fn has_one_bit(&self) -> bool {
        matches!(self.file_type, FileType::IQ1_S | FileType::IQ1_M)
    }

    /// Whether the file type is one of the larger two of the IQ2 types.
    fn is_large_two_bits(&self) -> bool {
        matches!(self.file_type, FileType::IQ2_S | FileType::IQ2_M)
    }

    /// With eight experts, the weights shared by all of them get more bits.
    fn has_eight_experts(&self) -> bool {
        self.experts == 8
    }

    /// Whether value projections are small, because several query heads share a key head.
    fn has_small_values(&self) -> bool {
        self.query_group >= 4
    }

    /// Whether a layer is in the first part of all layers: `1 / divisor` of them.
    fn is_early(&self, layer: usize, divisor: usize) -> bool {
        layer < self.layers / divisor
    }

    /// Whether a layer is not in the first or the last eighth of the layers.
    fn is_middle(&self, layer: usize) -> bool {
        layer >= self.layers / 8 && layer < 7 * self.layers / 8
    }

    fn head_type(&self, most: BlockType, row: usize) -> BlockType {
        match self.file_type {
            FileType::MXFP4_MOE | FileType::Q8_0 => BlockType::Q8_0,
            _ if self.file_type != FileType::IQ3_XXS && !self.has_two_bits() => BlockType::Q6_K,
            _ if row.is_multiple_of(most.elements()) => BlockType::Q5_K,
            _ => BlockType::Q8_0,
        }
    }

    /// The type of an embedding table that is not the head.
    fn embedding_type(&self, most: BlockType) -> BlockType {
        match self.file_type {
            FileType::IQ1_S | FileType::IQ1_M | FileType::IQ2_XXS | FileType::IQ2_XS => BlockType::Q2_K,
            FileType::IQ2_S | FileType::IQ2_M | FileType::IQ3_XXS => BlockType::IQ3_S,
            FileType::TQ1_0 | FileType::TQ2_0 => BlockType::Q4_K,
            _ => most,
        }
    }

    /// The type of a matrix of a file with one of the IQ1 and IQ2 types. `is_expert`: it belongs to an
    /// expert.
    fn two_bit_type(&self, module: &str, most: BlockType, layer: usize, is_expert: bool) -> BlockType {
        let larger = if self.is_large_two_bits() { BlockType::IQ3_S } else { BlockType::Q2_K };
        // llama.cpp counts the shared expert as another layer here.
        let position = if is_expert && self.has_shared_expert { 2 * layer } else { layer };
        match module {
            "attn_v" | "attn_qkv" if self.has_small_values() || self.experts >= 4 => BlockType::Q4_K,
            "attn_v" | "attn_qkv" => larger,
            "attn_k" if self.has_eight_experts() => BlockType::Q4_K,
            "ffn_down" if self.is_early(position, 8) => larger,
            "attn_output" if self.has_eight_experts() => BlockType::Q5_K,
            "attn_output" if self.has_one_bit() => BlockType::IQ2_XXS,
            "attn_output" if self.is_large_two_bits() => BlockType::IQ3_S,
            _ => most,
        }
    }

    /// The type of query and key projections.
    fn query_type(&self, most: BlockType) -> BlockType {
        match self.file_type {
            FileType::IQ3_XS => BlockType::IQ3_XXS,
            FileType::IQ3_XXS => BlockType::IQ2_S,
            _ => most,
        }
    }

    /// The type of value projections, which are small with grouped-query attention.
    fn value_type(&self, most: BlockType, layer: usize) -> BlockType {
        use FileType::{IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, IQ4_NL, IQ4_XS, Q2_K, Q2_K_S, Q3_K_L, Q3_K_M, Q4_K_M, Q4_K_S, Q5_K_M};
        let kind = match self.file_type {
            Q2_K | Q2_K_S | IQ3_XXS | IQ3_XS | IQ3_S if self.has_small_values() => BlockType::Q4_K,
            IQ4_NL | IQ4_XS if self.has_small_values() => BlockType::Q5_K,
            Q2_K => BlockType::Q3_K,
            IQ3_XXS if !self.uses_importance => BlockType::IQ3_S,
            Q3_K_M if layer < 2 => BlockType::Q5_K,
            Q3_K_M | IQ3_M => BlockType::Q4_K,
            Q3_K_L => BlockType::Q5_K,
            Q4_K_M | Q5_K_M if uses_more_bits(layer, self.layers) => BlockType::Q6_K,
            Q4_K_S if layer < 4 => BlockType::Q5_K,
            _ => most,
        };
        match kind {
            _ if self.has_eight_experts() => BlockType::Q8_0,
            BlockType::Q3_K | BlockType::Q4_K if self.is_70b => BlockType::Q5_K,
            kind => kind,
        }
    }

    /// The type of the output projections of attention.
    fn attention_output_type(&self, most: BlockType) -> BlockType {
        use FileType::{IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, IQ4_NL, IQ4_XS, Q2_K, Q3_K_L, Q3_K_M, Q3_K_S, Q4_K_M, Q4_K_S};
        match self.file_type {
            Q2_K | Q3_K_S | Q3_K_M | IQ3_XXS | IQ3_XS | IQ3_S | IQ3_M | IQ4_NL | IQ4_XS | Q4_K_S | Q4_K_M if self.has_eight_experts() => BlockType::Q5_K,
            _ if self.has_eight_experts() => most,
            Q2_K => BlockType::Q3_K,
            IQ3_XXS => BlockType::IQ3_S,
            Q3_K_M | IQ3_M => BlockType::Q4_K,
            Q3_K_L => BlockType::Q5_K,
            _ => most,
        }
    }

    /// The type of the down projections of MLPs.
    fn down_projection_type(&self, most: BlockType, layer: usize) -> BlockType {
        match self.file_type {
            FileType::Q2_K => BlockType::Q3_K,
            FileType::Q2_K_S if self.is_early(layer, 8) => BlockType::Q4_K,
            FileType::IQ3_XXS if !self.uses_importance => {
                if self.is_early(layer, 8) {
                    BlockType::Q4_K
                } else {
                    BlockType::Q3_K
                }
            }
            FileType::IQ3_M if self.is_early(layer, 8) || (self.has_eight_experts() && uses_more_bits(layer, self.layers)) => BlockType::Q4_K,
            FileType::Q3_K_M if self.is_early(layer, 16) => BlockType::Q5_K,
            FileType::Q3_K_M => BlockType::Q4_K,
            FileType::Q3_K_L => BlockType::Q5_K,
            FileType::Q4_K_M | FileType::Q5_K_M if uses_more_bits(layer, self.layers) => BlockType::Q6_K,
            FileType::Q4_K_S if self.is_early(layer, 8) => BlockType::Q5_K,
            FileType::IQ4_NL | FileType::IQ4_XS if !self.uses_importance && self.is_early(layer, 8) => BlockType::Q5_K,
            FileType::Q4_0 if self.uses_importance && self.is_early(layer, 8) => BlockType::Q4_1,
            FileType::Q5_0 if self.uses_importance && self.is_early(layer, 8) => BlockType::Q5_1,
            _ => most,
        }
    }

    /// Whether llama.cpp's quantizer refuses to write a tensor of this type without importance.
    pub fn requires_importance(&self, name: &str, kind: Kind) -> bool {
        let Kind::Blocks(kind) = kind else { return false };
        let is_table = ["token_embd.weight", "output.weight"].contains(&name);
        kind.importance() == ImportanceUse::Required || (self.file_type == FileType::Q2_K_S && kind == BlockType::Q2_K && !is_table)
    }
}

/// The type of experts with rows of `row` elements: MXFP4 if they are stored in it, which keeps their values,
/// unless `target` has fewer bits.
pub(super) fn keep_packed(weight: &Weight, target: Kind, row: usize) -> Kind {
    let packed = Kind::Blocks(BlockType::MXFP4);
    let bytes = |kind: Kind| fit_row(kind, row).byte_count(&[row]);
    let is_packed = weight.original_format == Some(OriginalFormat::PackedExperts);
    if is_packed && bytes(packed) < bytes(target) { packed } else { target }
}

/// The type of a matrix whose rows have `row` elements: `target`, or a type with smaller blocks if the
/// length is not a multiple of its block size.
pub(super) fn fit_row(target: Kind, row: usize) -> Kind {
    let smaller = match target {
        kind if row.is_multiple_of(kind.block_size()) => kind,
        Kind::Blocks(BlockType::Q2_K | BlockType::Q3_K | BlockType::TQ1_0 | BlockType::TQ2_0) => Kind::Blocks(BlockType::Q4_0),
        Kind::Blocks(
            BlockType::IQ4_XS
            | BlockType::IQ3_S
            | BlockType::IQ3_XXS
            | BlockType::IQ2_S
            | BlockType::IQ2_XS
            | BlockType::IQ2_XXS
            | BlockType::IQ1_M
            | BlockType::IQ1_S,
        ) => Kind::Blocks(BlockType::IQ4_NL),
        Kind::Blocks(BlockType::Q4_K) => Kind::Blocks(BlockType::Q5_0),
        Kind::Blocks(BlockType::Q5_K) => Kind::Blocks(BlockType::Q5_1),
        Kind::Blocks(BlockType::Q6_K) => Kind::Blocks(BlockType::Q8_0),
        kind => kind,
    };
    if row.is_multiple_of(smaller.block_size()) { smaller } else { Kind::Plain(DType::F16) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(kind: Kind) -> &'static str {
        if let Kind::Blocks(kind) = kind { kind.name() } else { "plain" }
    }

    /// A dense Llama of 32 layers in which two query heads share a key head.
    fn mixture(file_type: FileType) -> Mixture {
        Mixture { file_type, layers: 32, query_group: 2, experts: 0, has_shared_expert: false, is_70b: false, uses_importance: false }
    }

    /// Names of the types of a module in these layers.
    fn types(mixture: &Mixture, module: &str, layers: &[usize]) -> String {
        layers.iter().map(|layer| name(mixture.kind(&format!("blk.{layer}.{module}.weight"), false, 4096))).collect::<Vec<_>>().join(" ")
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
        let head = |file_type| ["token_embd.weight", "output.weight"].map(|tensor| name(mixture(file_type).kind(tensor, true, 4096)));
        for file_type in [FileType::Q2_K, FileType::Q3_K_L, FileType::IQ4_XS, FileType::Q4_0, FileType::Q4_K_M, FileType::Q5_1, FileType::Q6_K] {
            assert_eq!(head(file_type), ["Q6_K"; 2], "{file_type:?}");
        }
        assert_eq!((head(FileType::Q8_0), head(FileType::F16)), (["Q8_0"; 2], ["plain"; 2]));
        let embedding = |file_type| name(mixture(file_type).kind("token_embd.weight", false, 4096));
        assert_eq!([FileType::Q2_K, FileType::Q4_K_M, FileType::IQ4_NL].map(embedding), ["Q2_K", "Q4_K", "IQ4_NL"]);
    }

    /// The types that llama.cpp's quantizer chooses for all file types (`scripts/goldens gguf-quantizer`).
    #[test]
    fn types_equal_those_of_llama_quantize() {
        // Name, layers, query heads per key head, experts, whether there is a shared expert.
        let models = [
            ("grouped", 32, 2, 0, false),
            ("small values", 30, 4, 0, false),
            ("70b", 80, 8, 0, false),
            ("eight experts", 32, 2, 8, false),
            ("four experts", 12, 2, 4, false),
            ("shared expert", 16, 2, 6, true),
        ];
        let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf-quantizer/mixtures.json")).unwrap();
        let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (model, layers, query_group, experts, has_shared_expert) in models {
            for (file_type, both) in golden[model].as_object().unwrap() {
                let file_type: FileType = serde_json::from_value(file_type.as_str().into()).unwrap();
                for (modules, uses_importance) in both.as_array().unwrap().iter().zip([false, true]) {
                    let mixture = Mixture { file_type, layers, query_group, experts, has_shared_expert, is_70b: layers == 80, uses_importance };
                    let needs = |tensor: &str, kind: Kind| !uses_importance && mixture.requires_importance(tensor, kind);
                    // The quantizer refuses the type.
                    let Some(modules) = modules.as_object() else {
                        let all = ["attn_q", "attn_k", "ffn_up", "ffn_up_exps"].map(|module| format!("blk.1.{module}.weight"));
                        assert!(all.iter().any(|tensor| needs(tensor, mixture.kind(tensor, false, 256))), "{model} {file_type:?}");
                        continue;
                    };
                    for (module, expected) in modules {
                        let runs = expected.as_str().unwrap().split(' ').map(|run| run.split_once('*').unwrap_or(("", run)));
                        let expected: Vec<&str> = runs.flat_map(|(count, kind)| std::iter::repeat_n(kind, count.parse().unwrap_or(1))).collect();
                        let is_table = ["token_embd", "output"].contains(&module.as_str());
                        let tensor = |layer: usize| if is_table { format!("{module}.weight") } else { format!("blk.{layer}.{module}.weight") };
                        let kinds = (0..expected.len()).map(|layer| (layer, mixture.kind(&tensor(layer), module == "output", 256)));
                        for (layer, kind) in kinds {
                            assert_eq!(name(kind), expected[layer], "{model} {file_type:?} {uses_importance} {module} {layer}");
                            assert!(!needs(&tensor(layer), kind), "{model} {file_type:?} {module}");
                        }
                    }
                }
            }
        }
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
            (BlockType::Q2_K, "Q4_0"),
            (BlockType::Q3_K, "Q4_0"),
            (BlockType::IQ4_XS, "IQ4_NL"),
            (BlockType::Q4_K, "Q5_0"),
            (BlockType::Q5_K, "Q5_1"),
            (BlockType::Q6_K, "Q8_0"),
        ] {
            assert_eq!([fits(kind, 1024), fits(kind, 896), fits(kind, 90)], [kind.name(), smaller, "plain"]);
        }
        for kind in [BlockType::Q4_0, BlockType::IQ4_NL, BlockType::Q8_0] {
            assert_eq!([fits(kind, 896), fits(kind, 90)], [kind.name(), "plain"]);
        }
        assert_eq!(fit_row(Kind::Blocks(BlockType::Q8_0), 90), Kind::Plain(DType::F16));
        assert_eq!(fit_row(Kind::Plain(DType::F32), 90), Kind::Plain(DType::F32));
    }
}

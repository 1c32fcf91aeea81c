//! Rules that several runtimes have. Each runtime adds the file that its rule was derived from.

use super::folder::Folder;
use super::{Finding, Needs, Rule, Target, compressed_tensors, fused};
use crate::error::Result;

impl Rule<Folder> {
    /// The rule of a runtime, derived from this file or documentation.
    pub(super) const fn from(self, source: &'static str) -> Rule<Folder> {
        Rule { name: self.name, sentence: self.sentence, source, versions: self.versions, needs: self.needs, check: self.check }
    }
}

const fn rule(name: &'static str, sentence: &'static str, needs: Needs, check: fn(&Folder, Target) -> Result<Vec<Finding>>) -> Rule<Folder> {
    Rule { name, sentence, source: "", versions: &[], needs, check }
}

pub(super) const ARCHITECTURES: Rule<Folder> =
    rule("architectures", "`config.json` names the model class in `architectures`.", Needs::Configuration, compressed_tensors::architectures);
pub(super) const OWN_FORMAT: Rule<Folder> =
    rule("own-format", "The folder is not in a format that only compress reads.", Needs::Weights, compressed_tensors::own_format);
pub(super) const METHOD: Rule<Folder> = rule("method", "The quantization method is known to a runtime.", Needs::Weights, compressed_tensors::method);
pub(super) const TOKENIZER: Rule<Folder> =
    rule("tokenizer", "The folder of a language model has a tokenizer.", Needs::Configuration, compressed_tensors::tokenizer);
pub(super) const SHAPES: Rule<Folder> = rule(
    "shapes",
    "The values of `config.json` are accepted, and the weights have the names and shapes that it requires (of families that compress runs).",
    Needs::Weights,
    compressed_tensors::shapes,
);
pub(super) const ACTIVATION_FUNCTION: Rule<Folder> = rule(
    "activation-function",
    "The networks of Llama, Mistral, Qwen2 and Qwen3 have the activation function `silu`.",
    Needs::Configuration,
    compressed_tensors::activation_function,
);
pub(super) const TOKENIZER_FILES: Rule<Folder> = rule(
    "tokenizer-files",
    "The tokenizers package reads `tokenizer.json`, and the other JSON files of the tokenizer are valid.",
    Needs::Configuration,
    compressed_tensors::tokenizer_files,
);
pub(super) const FUSED_IGNORE: Rule<Folder> =
    rule("fused-ignore", "`ignore` names all parts of a layer that is fused, or none.", Needs::Weights, fused::ignore);
pub(super) const FUSED_SCHEME: Rule<Folder> = rule("fused-scheme", "All parts of a layer that is fused have the same scheme.", Needs::Weights, fused::scheme);
pub(super) const SELECTED: Rule<Folder> = rule(
    "selected",
    "Every quantized matrix is selected by a target of `config_groups`, and `ignore` does not exclude it.",
    Needs::Weights,
    compressed_tensors::selected,
);
pub(super) const IGNORED: Rule<Folder> =
    rule("ignored", "Every matrix of floats that a target selects is in `ignore`.", Needs::Weights, compressed_tensors::ignored);
pub(super) const SCALES: Rule<Folder> =
    rule("scales", "Every quantized matrix has its scales, zero points and shape.", Needs::Weights, compressed_tensors::complete);
pub(super) const GROUP_ROWS: Rule<Folder> = rule("group-rows", "The group size of integers divides the rows.", Needs::Weights, compressed_tensors::group_rows);
pub(super) const TIED_HEAD: Rule<Folder> =
    rule("tied-head", "A head that is tied to the embedding is not quantized.", Needs::Weights, compressed_tensors::tied_head);

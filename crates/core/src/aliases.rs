//! Names of other tools for options, commands, schemes and values, for suggestions in messages.

use crate::store::nearest;

/// Names of other tools, and the names here. In options and keys, `_` and `-` are equivalent, as are upper
/// and lower case. A name may have several meanings; the first one that is valid in the context is suggested.
const ALIASES: &[(&str, &str)] = &[
    // Options.
    ("sparsity", "amount"),
    ("ratio", "amount"),
    ("prune-ratio", "amount"),
    ("ratio", "rank"),
    ("corpus", "keep"),
    ("dataset", "calibration"),
    ("data", "calibration"),
    ("calib-data", "calibration"),
    ("calibration-data", "calibration"),
    ("eval-data", "eval"),
    ("evaluation", "eval"),
    ("eval", "evaluation"),
    ("train-data", "train"),
    ("training", "train"),
    ("output-dir", "output"),
    ("out", "output"),
    ("save", "output"),
    ("save-dir", "output"),
    ("save-path", "output"),
    ("output-path", "output"),
    ("outfile", "output"),
    ("lr", "learning-rate"),
    ("steps", "max-steps"),
    ("max-new-tokens", "tokens"),
    ("max-tokens", "tokens"),
    ("max-length", "tokens"),
    ("num-tokens", "tokens"),
    ("n-predict", "tokens"),
    // Keys of recipes and data sets.
    ("steps", "passes"),
    ("step", "passes"),
    ("stages", "passes"),
    ("pipeline", "passes"),
    ("modifiers", "passes"),
    ("csv", "text"),
    ("tsv", "text"),
    ("txt", "text"),
    ("json", "text"),
    ("jsonl", "text"),
    ("texts", "text"),
    ("overwrite", "force"),
    ("format", "export"),
    ("num-samples", "samples"),
    ("seq-length", "max-length"),
    ("exclude", "ignore"),
    ("include", "targets"),
    ("algorithm", "method"),
    ("loss", "losses"),
    ("teacher-model", "teacher"),
    // Commands and passes.
    ("prune", "prune-unstructured"),
    ("sparsify", "prune-unstructured"),
    ("quant", "quantize"),
    ("quantise", "quantize"),
    ("evaluate", "eval"),
    ("benchmark", "eval"),
    ("info", "inspect"),
    ("show", "inspect"),
    ("fine-tune", "finetune"),
    ("train", "finetune"),
    ("pruning", "prune-unstructured"),
    ("quantization", "quantize"),
    ("oneshot", "quantize"),
    ("perplexity", "eval"),
    ("ppl", "eval"),
    ("bench", "eval"),
    ("compare", "diff"),
    ("validate", "verify"),
    ("cluster", "palettize"),
    ("svd", "decompose"),
    // Schemes.
    ("int4", "W4A16"),
    ("int2", "W2A16"),
    ("int3", "W3A16"),
    ("int8", "W8A16"),
    ("nf4", "W4A16"),
    ("4bit", "W4A16"),
    ("4", "W4A16"),
    ("w4", "W4A16"),
    ("8bit", "W8A16"),
    ("8", "W8A16"),
    ("w8", "W8A16"),
    ("2bit", "W2A16"),
    ("3bit", "W3A16"),
    ("fp4", "NVFP4"),
    ("e4m3", "FP8-DYNAMIC"),
    // Types and layouts.
    ("fp16", "f16"),
    ("float16", "f16"),
    ("half", "f16"),
    ("fp32", "f32"),
    ("float32", "f32"),
    ("float", "f32"),
    ("bfloat16", "bf16"),
];

/// The name that was probably meant: that of another tool, or else the most similar one.
pub fn suggestion<'n>(name: &str, expected: impl IntoIterator<Item = &'n str> + Clone) -> Option<String> {
    alias(name, expected.clone()).or_else(|| nearest(name, expected))
}

/// The name here for that of another tool, or for another spelling.
pub fn alias<'n>(name: &str, expected: impl IntoIterator<Item = &'n str> + Clone) -> Option<String> {
    let plain = normalized(name);
    let valid = |target: &str| expected.clone().into_iter().find(|name| normalized(name) == normalized(target));
    let aliased = || ALIASES.iter().filter(|(alias, _)| *alias == plain).find_map(|(_, target)| valid(target));
    valid(name).or_else(aliased).map(str::to_owned)
}

/// Whether a name has the form of a type of GGUF files, like Q4_K_M.
pub fn is_gguf_type(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let bits = ["IQ", "TQ", "Q"].iter().find_map(|prefix| name.strip_prefix(prefix));
    bits.is_some_and(|bits| bits.starts_with(|c: char| c.is_ascii_digit()) && bits.contains('_'))
}

fn normalized(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_tools_are_preferred_to_similar_names() {
        assert_eq!(suggestion("sparsity", ["part", "amount"]).as_deref(), Some("amount"));
        assert_eq!(suggestion("LR", ["layers", "learning_rate"]).as_deref(), Some("learning_rate"));
        assert_eq!(suggestion("fine-tune", ["quantize", "finetune"]).as_deref(), Some("finetune"));
        assert_eq!(suggestion("int4", ["W4A16", "W8A16"]).as_deref(), Some("W4A16"));
        assert_eq!(suggestion("Group-Size", ["group_size", "guide"]).as_deref(), Some("group_size"));
        assert_eq!(suggestion("steps", ["max_steps", "epochs"]).as_deref(), Some("max_steps"));
        assert_eq!(suggestion("steps", ["passes", "sweep"]).as_deref(), Some("passes"));
        assert_eq!(suggestion("csv", ["images", "text"]).as_deref(), Some("text"));
        assert_eq!(suggestion("amuont", ["part", "amount"]).as_deref(), Some("amount"));
        assert_eq!(suggestion("xyz", ["part", "amount"]), None);
    }

    #[test]
    fn types_of_gguf_files_are_recognized() {
        assert_eq!(["Q4_K_M", "q8_0", "IQ4_XS", "W4A16_ASYM", "Q", "int4"].map(is_gguf_type), [true, true, true, false, false, false]);
    }

    #[test]
    fn aliases_are_normalized() {
        assert!(ALIASES.iter().all(|(alias, _)| normalized(alias) == *alias));
    }
}

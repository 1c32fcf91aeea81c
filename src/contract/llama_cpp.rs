//! Rules of llama.cpp.

use std::path::{Path, PathBuf};

use super::llama_cpp_names::{ARCHITECTURES, PRE_TOKENIZERS};
use super::{Defects, Finding, Needs, Planned, Rule, Target, extra_layers, missing_layers};
use crate::error::{Error, Result};
use crate::files;
use crate::store::gguf::{EXTENSION, Outline, TensorDescription, Value, all_parts, block_type, is_gguf, model_files};

/// The next step after a violation of a rule of tokenizers.
const TOKENIZER_HINT: &str = "write the file from a folder with a tokenizer.json that llama.cpp supports";
/// Keys of every architecture, after its name.
const REQUIRED: [&str; 3] = ["context_length", "embedding_length", "block_count"];
/// Vocabularies without tokens.
const NO_VOCABULARY: [&str; 2] = ["no_vocab", "none"];
/// Vocabularies of byte-level BPE with merges.
const BYTE_LEVEL: [&str; 3] = ["gpt2", "hybriddna", "whitespace"];
/// The pre-tokenizer of a vocabulary without merges.
const WITHOUT_MERGES: &str = "kimi-k2";
/// The next step after a violation of a rule about missing data.
const INCOMPLETE: &str = "the file is incomplete: download or write it again";
/// Ids of types that files no longer have.
const REMOVED: [u32; 8] = [4, 5, 31, 32, 33, 36, 37, 38];

pub(super) const RULES: &[Rule<Contents>] = &[
    Rule {
        name: "type",
        sentence: "The file contains a model: `general.type` is `model`.",
        source: "ggml/docs/gguf.md: general.type",
        versions: &[],
        needs: Needs::Configuration,
        check: model,
    },
    Rule {
        name: "architecture",
        sentence: "`general.architecture` is known.",
        source: "src/llama-arch.cpp: LLM_ARCH_NAMES",
        versions: &[],
        needs: Needs::Configuration,
        check: architecture,
    },
    Rule {
        name: "keys",
        sentence: "The file has the context length, the embedding length and the number of blocks.",
        source: "src/llama-model.cpp: load_hparams",
        versions: &[],
        needs: Needs::Weights,
        check: keys,
    },
    Rule {
        name: "tokenizer",
        sentence: "The file has a vocabulary, and byte-level BPE has merges.",
        source: "src/llama-vocab.cpp: llama_vocab::impl::load",
        versions: &[],
        needs: Needs::Configuration,
        check: tokenizer,
    },
    Rule {
        name: "pre-tokenizer",
        sentence: "The pre-tokenizer of byte-level BPE is known; without one, text is split differently than in training.",
        source: "src/llama-vocab.cpp: llama_vocab::impl::load",
        versions: &[],
        needs: Needs::Configuration,
        check: pre_tokenizer,
    },
    Rule {
        name: "vocabulary-size",
        sentence: "The embedding has one row for each token.",
        source: "src/llama-model.cpp: load_tensors",
        versions: &[],
        needs: Needs::Weights,
        check: vocabulary_size,
    },
    Rule {
        name: "data",
        sentence: "The tensors follow each other in the file, and the file contains all of their data.",
        source: "ggml/src/gguf.cpp, src/llama-model-loader.h: llama_tensor_weight",
        versions: &[],
        needs: Needs::Weights,
        check: data,
    },
    Rule {
        name: "layers",
        sentence: "All blocks of `block_count` are stored, and no others.",
        source: "src/llama-model.cpp: load_tensors, src/llama-model-loader.cpp: done_getting_tensors",
        versions: &[],
        needs: Needs::Weights,
        check: layers,
    },
    Rule {
        name: "shapes",
        sentence: "The weights have the shapes that the metadata require (of families that compress runs).",
        source: "src/llama-model-loader.cpp: check_tensor_dims",
        versions: &[],
        needs: Needs::Weights,
        check: shapes,
    },
    Rule {
        name: "rows",
        sentence: "Rows are multiples of the block size: 256 elements for K and I types.",
        source: "ggml/src/gguf.cpp",
        versions: &[],
        needs: Needs::Weights,
        check: rows,
    },
    Rule {
        name: "types",
        sentence: "No tensor has a type that was removed from the format.",
        source: "ggml/include/ggml.h: enum ggml_type",
        versions: &[],
        needs: Needs::Weights,
        check: types,
    },
];

/// The GGUF file at a path, or the only one in a folder.
pub(crate) fn find(path: &Path) -> Result<Option<PathBuf>> {
    if !files::is_dir(path) {
        return Ok(is_gguf(path).then(|| path.to_owned()));
    }
    let listed = files::files(path).map_err(Error::io("list", path))?;
    let candidates: Vec<_> = listed.iter().filter(|file| file.extension().is_some_and(|e| e == EXTENSION)).collect();
    let models = model_files(&candidates);
    match models.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some(file.to_path_buf())),
        [first, ..] => Err(Error::malformed(path, format!("has {} .gguf files: specify one, for example {}", models.len(), first.display()))),
    }
}

/// The headers of the files of a model.
pub(super) struct Contents {
    outline: Outline,
    /// The remaining files of a split model.
    continuations: Vec<Outline>,
    defects: Defects,
}

impl Contents {
    pub(super) fn open(path: &Path) -> Result<Contents> {
        let outline = Outline::open(path)?;
        let paths = all_parts(path, &outline.values)?;
        let continuations = paths.iter().filter(|other| *other != path).map(|other| Outline::open(other)).collect::<Result<_>>()?;
        Ok(Contents { outline, continuations, defects: Defects::of_file(path) })
    }

    fn files(&self) -> impl Iterator<Item = &Outline> {
        std::iter::once(&self.outline).chain(&self.continuations)
    }

    fn tensors(&self) -> impl Iterator<Item = &TensorDescription> {
        self.files().flat_map(|file| &file.tensors)
    }

    fn text(&self, key: &str) -> Option<&str> {
        match self.outline.values.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The key of an architecture.
    fn own(&self, key: &str) -> String {
        format!("{}.{key}", self.text("general.architecture").unwrap_or("llama"))
    }

    /// Whether the file has no vocabulary on purpose.
    fn has_no_vocabulary(&self) -> bool {
        self.text("tokenizer.ggml.model").is_some_and(|name| NO_VOCABULARY.contains(&name))
    }

    fn is_byte_level(&self) -> bool {
        self.text("tokenizer.ggml.model").is_some_and(|name| BYTE_LEVEL.contains(&name))
    }

    fn tokens(&self) -> Option<usize> {
        match self.outline.values.get("tokenizer.ggml.tokens") {
            Some(Value::Texts(tokens)) => Some(tokens.len()),
            _ => None,
        }
    }
}

impl Planned {
    /// A GGUF file with all tensors, which fit its metadata.
    pub(crate) fn gguf(outline: Outline) -> Planned {
        Planned { files: Box::new(Contents { outline, continuations: Vec::new(), defects: Defects::default() }), determined: Needs::Files }
    }
}

fn number(value: Option<&Value>) -> Option<u64> {
    match value {
        Some(Value::Unsigned(number)) => Some(*number),
        Some(Value::Signed(number)) => u64::try_from(*number).ok(),
        _ => None,
    }
}

fn model(contents: &Contents, _: Target) -> Result<Vec<Finding>> {
    let other = contents.text("general.type").filter(|kind| *kind != "model");
    let finding = |kind: &str| Finding::new("general.type", format!("is `{kind}`, not `model`"), "load it together with the model that it belongs to");
    Ok(other.map(finding).into_iter().collect())
}

fn architecture(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let finding = match contents.text("general.architecture") {
        None => Finding::new("general.architecture", "is missing", "write the file again with `--export gguf`"),
        Some(name) if ARCHITECTURES.contains(&name) => return Ok(Vec::new()),
        Some(name) => Finding::new("general.architecture", format!("is `{name}`, which {target} does not know"), "use a newer version of llama.cpp"),
    };
    Ok(vec![finding])
}

fn keys(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    // Image encoders have other keys.
    if contents.text("general.architecture") == Some("clip") {
        return Ok(Vec::new());
    }
    let missing = REQUIRED.map(|key| contents.own(key)).into_iter().filter(|key| !contents.outline.values.contains_key(key));
    let finding = |key: String| Finding::new(key, format!("is missing, and {target} requires it"), "write the file again with `--export gguf`");
    Ok(missing.map(finding).collect())
}

fn tokenizer(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let missing = |key: &str| vec![Finding::new(key, format!("is missing, and {target} requires it"), TOKENIZER_HINT)];
    // Image encoders have no vocabulary.
    if contents.text("general.architecture") == Some("clip") {
        return Ok(Vec::new());
    }
    let Some(name) = contents.text("tokenizer.ggml.model") else { return Ok(missing("tokenizer.ggml.model")) };
    if contents.has_no_vocabulary() {
        let reason = format!("is `{name}`: the file has no vocabulary, and {target} aborts when it tokenizes a text");
        return Ok(vec![Finding::new("tokenizer.ggml.model", reason, TOKENIZER_HINT)]);
    }
    if contents.tokens().is_none() {
        return Ok(missing("tokenizer.ggml.tokens"));
    }
    let needs_merges = contents.is_byte_level() && contents.text("tokenizer.ggml.pre") != Some(WITHOUT_MERGES);
    let has_merges = contents.outline.values.contains_key("tokenizer.ggml.merges");
    Ok(if needs_merges && !has_merges { missing("tokenizer.ggml.merges") } else { Vec::new() })
}

fn pre_tokenizer(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    if !contents.is_byte_level() {
        return Ok(Vec::new());
    }
    const KEY: &str = "tokenizer.ggml.pre";
    let finding = match contents.text(KEY).filter(|name| !name.is_empty()) {
        None => Finding::new(KEY, format!("is missing, and {target} then splits text in another way than in training"), TOKENIZER_HINT),
        Some(name) if PRE_TOKENIZERS.contains(&name) => return Ok(Vec::new()),
        Some(name) => Finding::new(KEY, format!("is `{name}`, which {target} does not know"), "use a newer version of llama.cpp"),
    };
    Ok(vec![finding])
}

fn vocabulary_size(contents: &Contents, _: Target) -> Result<Vec<Finding>> {
    const NAME: &str = "token_embd.weight";
    let (Some(tokens), false) = (contents.tokens(), contents.has_no_vocabulary()) else { return Ok(Vec::new()) };
    let rows = contents.tensors().find(|tensor| tensor.name == NAME).and_then(|tensor| tensor.shape.first().copied());
    let Some(rows) = rows.filter(|rows| *rows != tokens) else { return Ok(Vec::new()) };
    let reason = format!("has {rows} rows, but the vocabulary has {tokens} tokens");
    Ok(vec![Finding::new(NAME, reason, "use the tokenizer of this model, and write the file again")])
}

fn data(contents: &Contents, _: Target) -> Result<Vec<Finding>> {
    let misplaced = contents.files().filter_map(Outline::misplaced);
    let mut found: Vec<Finding> = misplaced.map(|(name, reason)| Finding::new(name, reason, INCOMPLETE)).collect();
    const COUNT: &str = "split.tensors.count";
    let (specified, stored) = (number(contents.outline.values.get(COUNT)), contents.tensors().count() as u64);
    if let Some(specified) = specified.filter(|specified| *specified != stored) {
        found.push(Finding::new(COUNT, format!("is {specified}, but the files contain {stored} tensors"), INCOMPLETE));
    }
    Ok(found)
}

fn layers(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    const PREFIX: &str = "blk.";
    let key = contents.own("block_count");
    let Some(count) = number(contents.outline.values.get(&key)) else { return Ok(Vec::new()) };
    let names = || contents.tensors().map(|tensor| tensor.name.as_str());
    let mut found = missing_layers(names(), PREFIX, count, &format!("`{key}` is {count}"), INCOMPLETE);
    let reason = format!("is stored, but `{key}` is {count}, and {target} rejects files with unused tensors");
    found.extend(extra_layers(names(), PREFIX, count).map(|layer| Finding::new(layer, reason.clone(), "write the file again from the original model")));
    Ok(found)
}

fn shapes(contents: &Contents, _: Target) -> Result<Vec<Finding>> {
    Ok(contents.defects.shapes())
}

fn rows(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let wrong = contents.tensors().filter_map(|tensor| {
        let (kind, elements) = block_type(tensor.type_id)?;
        let row = tensor.shape.last().copied().unwrap_or(1);
        let reason = format!("has rows of {row} elements as {kind}, whose blocks have {elements}, so that {target} rejects the file");
        let hint = "use a type with blocks of 32, as `--export gguf` does for such rows";
        (!row.is_multiple_of(elements)).then(|| Finding::new(tensor.name.clone(), reason, hint))
    });
    Ok(wrong.collect())
}

fn types(contents: &Contents, target: Target) -> Result<Vec<Finding>> {
    let removed = contents.tensors().filter(|tensor| REMOVED.contains(&tensor.type_id));
    let reason = |id: u32| format!("has the type with id {id}, which {target} no longer reads");
    Ok(removed.map(|tensor| Finding::new(tensor.name.clone(), reason(tensor.type_id), "quantize the original model again")).collect())
}

//! GGUF, as llama.cpp's converter and its quantizer write it: one file, with the vocabulary in it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{Exported, Format, SizeForecast};
use crate::error::{Error, Result};
use crate::files::Destination;
use crate::kernel::ggml::{BlockType, LARGE};
use crate::model::Model;
use crate::model::gguf::{Described, Family, describe, vocabulary};
use crate::run_state::RunState;
use crate::store::gguf::{Arranged, Kind, Value, header};
use crate::store::writer::{self, FileLayout, Item, Made, Piece};
use crate::store::{ActivationScheme, Bytes, DType, Encoding, Module, StorageFormat, Weight, Weights};
use crate::work::Work;

/// What matrices of a file are made of, by the names that llama.cpp has for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[allow(non_camel_case_types)]
pub enum FileType {
    /// 32-bit floats
    F32,
    /// 16-bit floats
    #[default]
    F16,
    /// bfloat16
    BF16,
    /// 8 bits, a scale for 32 weights
    Q8_0,
    /// 4 bits, a scale for 32 weights
    Q4_0,
    /// 4 bits in blocks of 256 with scales in two steps, and 6 bits where it matters most
    Q4_K_M,
}

impl FileType {
    /// `general.file_type`.
    fn id(self) -> u64 {
        match self {
            FileType::F32 => 0,
            FileType::F16 => 1,
            FileType::Q4_0 => 2,
            FileType::Q8_0 => 7,
            FileType::Q4_K_M => 15,
            FileType::BF16 => 32,
        }
    }
}

/// The GGUF format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Gguf {
    /// What matrices are made of; vectors are 32-bit floats
    #[serde(rename = "type")]
    pub file_type: FileType,
}

/// Name of the file in a folder.
const FILE: &str = "model.gguf";

fn file_name(run: &RunState) -> &str {
    run.file.as_deref().unwrap_or(FILE)
}

struct Prepared {
    family: &'static Family,
    items: Vec<Item>,
    kinds: Vec<Kind>,
    /// Names of the weights in the model.
    names: Vec<String>,
    /// Numbers of those whose rows lie in another order than in the model.
    moved: Vec<usize>,
    pieces: Vec<Piece>,
    /// How many tensors the file has.
    tensors: usize,
    notes: Vec<String>,
    /// Whether the file has a vocabulary.
    words: bool,
    /// Whether it says all that `config.json` says of what is computed.
    whole: bool,
    /// Weights of modules, which go to files in folders of their own.
    beside: Vec<Item>,
}

/// The head, and the embedding that it may be tied to.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Layers that keep more bits: the first and the last eighth, and every third between.
fn keeps_more(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

impl Gguf {
    /// What a matrix is made of, as llama.cpp's quantizer chooses; `head` says whether it gives the logits, `few_keys`
    /// whether several heads of queries share one of keys.
    fn wanted(self, name: &str, head: bool, layers: usize, few_keys: bool, experts: usize) -> Kind {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()).unwrap_or(0);
        // Experts, all or shared, are as other networks.
        let name = name.replace("_exps.weight", ".weight").replace("_shexp.weight", ".weight");
        let is = |module: &str| name.ends_with(&format!(".{module}.weight"));
        Kind::Blocks(match self.file_type {
            FileType::F32 => return Kind::Plain(DType::F32),
            FileType::F16 => return Kind::Plain(DType::F16),
            FileType::BF16 => return Kind::Plain(DType::BF16),
            FileType::Q8_0 => BlockType::Q8_0,
            FileType::Q4_0 | FileType::Q4_K_M if head => BlockType::Q6K,
            FileType::Q4_0 => BlockType::Q4_0,
            // Of eight experts, what they share weighs more.
            FileType::Q4_K_M if experts == 8 && (is("attn_v") || is("attn_k")) => BlockType::Q8_0,
            FileType::Q4_K_M if experts == 8 && is("attn_output") => BlockType::Q5K,
            FileType::Q4_K_M if (is("attn_v") || is("ffn_down")) && keeps_more(layer, layers) => BlockType::Q6K,
            // Few heads of keys for many queries: values weigh more.
            FileType::Q4_K_M if is("attn_v") && few_keys && layers == 80 => BlockType::Q5K,
            FileType::Q4_K_M => BlockType::Q4K,
        })
    }

    /// The same, where rows are no whole blocks of it.
    fn fitting(wanted: Kind, row: usize) -> Kind {
        let smaller = match wanted {
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

    fn prepare(self, model: &Model, run: &RunState) -> Result<Prepared> {
        let refused = |what: &str, hint: &str| Error::Unsupported { what: format!("gguf: {}: {what}", model.path.display()), hint: hint.into() };
        if model.onnx.is_some() {
            return Err(refused("an .onnx model", "leave `export` out, or write `onnx`"));
        }
        if model.needs_graph_file() {
            return Err(refused("a model that config.json does not describe", "write safetensors or onnx, which have a graph"));
        }
        let Described { family, mut values, factors, mut notes } = describe(model)?;
        let size = |key: &str| model.config.get(key).and_then(Json::as_u64).map_or(0, |size| size as usize);
        let (layers, heads) = (size("num_hidden_layers"), size("num_attention_heads"));
        let groups = Some(size("num_key_value_heads")).filter(|groups| *groups > 0).unwrap_or(heads);
        let experts = family.experts.as_ref().map_or(0, |experts| size(experts.count));
        let head_stored = stores_head(model, family)?;
        if !model.weights.by_name.contains_key(HEAD) && model.config.get("tie_word_embeddings").and_then(Json::as_bool) == Some(false) {
            return Err(refused("no lm_head.weight, and config.json does not tie it", "the checkpoint is not complete"));
        }
        let (mut all, mut rows) = (Vec::new(), 0);
        let mut beside = Vec::new();
        for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| *name != HEAD || head_stored) {
            if model.weights.folder(name).is_some() {
                beside.push(Item { name: name.clone(), weight: weight.dense(name), storage_format: StorageFormat::Plain });
                continue;
            }
            let there = family.to_file(name).ok_or_else(|| Error::tensor(name, format!("has no name in GGUF files of `{}`", family.architecture), ""))?;
            if there == "token_embd.weight" {
                rows = weight.shape.first().copied().unwrap_or(0);
            }
            let (of_all, expert) = Family::of_all(&there).map_or((there.clone(), None), |(of_all, expert)| (of_all, Some(expert)));
            let head = there == "output.weight" || (there == "token_embd.weight" && !head_stored);
            // What chooses experts is never rounded.
            let matrix = weight.shape.len() > 1 && weight.is_float() && !there.contains(".ffn_gate_inp");
            let wanted = if matrix { self.wanted(&of_all, head, layers, groups < heads, experts) } else { Kind::Plain(DType::F32) };
            let turned = match there.rsplit('.').nth(1) {
                Some("attn_q") if family.neighbours => Some(heads),
                Some("attn_k") if family.neighbours => Some(groups),
                _ => None,
            };
            let order = turned.map(|count| Arranged::beside_each_other(weight.shape.first().copied().unwrap_or(0).checked_div(count).unwrap_or(0)));
            let added = if family.norms_from_zero && Family::is_norm(name) { 1.0 } else { 0.0 };
            let dense = weight.dense(name);
            if !dense.is_float() {
                return Err(Error::tensor(name, format!("is {}, where `{there}` holds floats", dense.describe()), ""));
            }
            let moved = order.is_some() || added != 0.0;
            let arranged = if moved { Arranged { upstream: dense, order, added, name: name.clone() }.weight()? } else { dense };
            all.push((name.clone(), there, arranged, wanted, Gguf::fitting(wanted, weight.row()), moved, expert));
        }
        if rows == 0 {
            return Err(refused("no embedding of tokens", "the checkpoint is not complete"));
        }
        // As many as there are rows, with or without a vocabulary.
        let size_key = format!("{}.vocab_size", family.architecture);
        values.iter_mut().filter(|(key, _)| *key == size_key).for_each(|(_, value)| *value = Value::Unsigned(rows as u64));
        let rounds = model.config.cache().ok().flatten().is_some() || quantized_inputs(model) > 0;
        let whole = notes.is_empty() && factors.is_none() && head_stored == model.weights.by_name.contains_key(HEAD) && !rounds;
        // Of modules, the file says nothing.
        let whole = whole && Module::listed(&model.path)?.is_ok_and(|modules| modules.is_empty());
        if let Some((name, factors)) = factors {
            let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
            let weight = Weight::new(DType::F32, vec![factors.len()], Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
            all.push((name.to_owned(), name.to_owned(), weight, Kind::Plain(DType::F32), Kind::Plain(DType::F32), false, None));
        }
        let file = file_name(run);
        notes.extend(fallbacks(&all, file));
        if !beside.is_empty() {
            let (folders, alone) = (model.weights.folders.join("`, `"), run.file.is_some());
            notes.push(if alone {
                format!("{file}: the weights of the modules `{folders}` are not written: a GGUF file has no place for them, and lies alone")
            } else {
                format!("{file} has no place for the weights of the modules `{folders}`: they are written beside it, as safetensors")
            });
        }
        let (words, without) = vocabulary(model, rows)?;
        notes.extend(without);
        values.push(("general.file_type".into(), Value::Unsigned(self.file_type.id())));
        let has_words = words.iter().any(|(key, _)| key == "tokenizer.ggml.tokens");
        values.extend(words);
        values.push(("general.quantization_version".into(), Value::Unsigned(2)));
        notes.extend(self.lost(model, file));
        let tensors = tensors(&mut all, experts)?;
        let kinds: Vec<Kind> = all.iter().map(|(.., kind, _, _)| *kind).collect();
        let (start, padding) = header(&values, &tensors).ok_or_else(|| refused("tensors that are too large", ""))?;
        let mut padding = padding.into_iter();
        let mut pieces = vec![Piece::Bytes(start)];
        let (mut items, mut names, mut moved) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (name, there, weight, _, kind, elsewhere, expert)) in all.into_iter().enumerate() {
            let bytes = kind.byte_count(&weight.shape).unwrap_or(0);
            let (weight, storage_format) = weight.in_gguf(kind, &name);
            pieces.push(Piece::Item { index, part: 0, bytes });
            // Experts lie behind each other.
            if expert.is_none_or(|expert| expert.saturating_add(1) == experts) {
                pieces.push(Piece::Bytes(vec![0; padding.next().unwrap_or(0) as usize]));
            }
            items.push(Item { name: there, weight, storage_format });
            names.push(name);
            moved.extend(elsewhere.then_some(index));
        }
        Ok(Prepared { family, items, kinds, names, moved, pieces, tensors: tensors.len(), notes, words: has_words, whole, beside })
    }

    /// What is said of values and activations that the file cannot say.
    fn lost(self, model: &Model, file: &str) -> Vec<String> {
        let weights = model.weights.by_name.values();
        let quantized = weights.filter(|weight| weight.encoding != Encoding::Dense).count();
        let activations = quantized_inputs(model);
        let mut notes = Vec::new();
        let rounded = model.weights.by_name.values().filter(|weight| weight.dtype == DType::BF16 && weight.shape.len() > 1).count();
        if rounded > 0 && self.file_type == FileType::F16 {
            notes.push(format!("{file}: {rounded} matrices of BF16 become F16, which holds small values less closely: `type: BF16` keeps them"));
        }
        if quantized > 0 {
            notes.push(format!("{file}: {quantized} quantized weights are written as the floats that they stand for, in the types of the file"));
        }
        if activations > 0 {
            notes.push(format!(
                "{file}: the inputs of {activations} layers are quantized by the recipe, which a GGUF file cannot say: runtimes choose by themselves"
            ));
        }
        notes
    }
}

/// Whether the head is a tensor of its own in the file.
fn stores_head(model: &Model, family: &Family) -> Result<bool> {
    let stored = model.weights.by_name.contains_key(HEAD);
    // These two have none in llama.cpp.
    if !stored || !["gemma", "gemma2"].contains(&family.architecture) {
        return Ok(stored);
    }
    if model.tied_names().contains(&(HEAD, EMBEDDING)) || model.same_bytes(HEAD, EMBEDDING)? {
        return Ok(false);
    }
    Err(Error::tensor(HEAD, "differs from the embedding", format!("llama.cpp takes the embedding for the head of `{}`", family.architecture)))
}

/// Layers whose inputs the recipe quantizes.
fn quantized_inputs(model: &Model) -> usize {
    let quantized = |weight: &&Weight| matches!(&weight.encoding, Encoding::Affine(affine) if affine.activations != ActivationScheme::None);
    model.weights.by_name.values().filter(quantized).count()
}

/// The name in the model and in the file, the weight, the type that it should have and the one that it has, whether its values lie elsewhere
/// than in the model, and which expert it is of.
type Planned = (String, String, Weight, Kind, Kind, bool, Option<usize>);

/// The tensors of a file, in the order that `all` is brought into: experts lie behind each other in those that hold all of them.
fn tensors(all: &mut [Planned], experts: usize) -> Result<Vec<(String, Kind, Vec<usize>)>> {
    let of_all = |there: &str| Family::of_all(there).map_or_else(|| there.to_owned(), |(of_all, _)| of_all);
    if experts > 0 {
        all.sort_by_cached_key(|(_, there, .., expert)| (of_all(there), *expert));
    }
    let mut tensors: Vec<(String, Kind, Vec<usize>)> = Vec::new();
    let mut last: Option<&Planned> = None;
    for planned in &*all {
        let (name, there, weight, _, kind, _, expert) = planned;
        let Some(expert) = *expert else {
            tensors.push((there.clone(), *kind, weight.shape.clone()));
            last = None;
            continue;
        };
        let before = last.filter(|(_, other, ..)| of_all(other) == of_all(there));
        let next = before.and_then(|(.., expert)| *expert).map_or(0, |expert| expert.saturating_add(1));
        let alike = before.is_none_or(|(_, _, other, _, other_kind, ..)| other.shape == weight.shape && other_kind == kind);
        if expert != next || expert >= experts || !alike || weight.shape.len() != 2 {
            return Err(Error::tensor(name, format!("is not one of {experts} experts of one shape"), "the checkpoint is not what config.json says"));
        }
        if expert.saturating_add(1) == experts {
            tensors.push((of_all(there), *kind, [&[experts], weight.shape.as_slice()].concat()));
        }
        last = Some(planned);
    }
    // A last one that is missing leaves a tensor open.
    let open = all.iter().filter_map(|(_, there, .., expert)| expert.map(|_| of_all(there))).find(|name| !tensors.iter().any(|(held, ..)| held == name));
    match open {
        None => Ok(tensors),
        Some(name) => Err(Error::tensor(&name, format!("has fewer than {experts} experts"), "the checkpoint is not what config.json says")),
    }
}

fn kind_name(kind: Kind) -> String {
    match kind {
        Kind::Plain(dtype) => dtype.to_string(),
        Kind::Blocks(kind) => kind.name().to_owned(),
    }
}

/// Matrices whose rows are no whole blocks of the type that they should have.
fn fallbacks(all: &[Planned], file: &str) -> Option<String> {
    let mut found: BTreeMap<(String, String, usize), usize> = BTreeMap::new();
    for (_, _, weight, wanted, kind, ..) in all.iter().filter(|(_, _, _, wanted, kind, ..)| wanted != kind) {
        *found.entry((kind_name(*wanted), kind_name(*kind), weight.row())).or_default() += 1;
    }
    let (mut bits, mut elements) = (0u64, 0u64);
    for (_, _, weight, _, kind, ..) in all {
        bits += kind.byte_count(&weight.shape).unwrap_or(0) * 8;
        elements += weight.elements() as u64;
    }
    let told = |((wanted, kind, row), count): (&(String, String, usize), &usize)| format!("{count} of {wanted} with rows of {row} are {kind}");
    let all = found.iter().map(told).collect::<Vec<_>>().join(", ");
    (!found.is_empty())
        .then(|| format!("{file}: rows that are no whole blocks take larger types: {all}; {:.2} bits per weight in all", bits as f64 / elements.max(1) as f64))
}

/// Where the weights of modules go, unless the file lies alone.
fn layout_beside(model: &Model, run: &RunState, beside: &[Item]) -> Result<Option<FileLayout>> {
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    (!beside.is_empty() && run.file.is_none()).then(|| FileLayout::new(beside, &metadata, &model.weights.folders, u64::MAX)).transpose()
}

impl Format for Gguf {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn options(&self) -> Json {
        serde_json::to_value(self).unwrap_or(Json::Null)
    }

    fn streams(&self) -> bool {
        true
    }

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        let prepared = self.prepare(model, run)?;
        let mut bytes = prepared.pieces.iter().map(Piece::len).sum();
        let (mut files, mut tensors) = (vec![file_name(run).to_owned()], prepared.tensors);
        if let Some(layout) = layout_beside(model, run, &prepared.beside)? {
            files.extend(layout.names());
            bytes += layout.bytes();
            tensors += layout.tensors();
        }
        Ok(SizeForecast { files, bytes, exact: !run.estimated, tensors })
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, _made: Option<&Made>, work: &Work) -> Result<Exported> {
        let Prepared { family, items, kinds, names, moved, pieces, tensors: mut count, notes, words, whole, beside } = self.prepare(model, run)?;
        let (mut files, mut seen) = writer::write_pieces(folder, &[(file_name(run).to_owned(), pieces)], &items, work)?;
        // What was read lies in another order than in the input: its hash is another one.
        for index in moved {
            seen[index].input_hash = None;
        }
        let path = folder.place(file_name(run));
        let wrong = |reason: String| Error::Verification { path: path.clone(), reason };
        let opened = Model::open(&path)?;
        if words && !opened.beside.made.contains_key(Path::new("tokenizer.json")) {
            return Err(wrong(format!("the vocabulary does not read back: {}", opened.beside.in_weight_files.join("; "))));
        }
        let computes = model.computes_as(&opened);
        if whole && computes == Some(false) {
            return Err(wrong("reads back as a model that computes something else".into()));
        }
        let opens = match computes {
            Some(true) => "as a model that computes what the one computes that it was made from",
            _ => "with all weights in their shapes",
        };
        let mut back = opened.weights.by_name;
        let mut by_name = BTreeMap::new();
        for (name, item) in names.iter().zip(&items) {
            let Some(there) = family.to_checkpoint(&item.name) else { continue };
            let weight = back.remove(&there).filter(|weight| weight.shape == item.weight.shape);
            let reason = format!("`{name}` reads back in another shape");
            by_name.insert(name.clone(), weight.ok_or_else(|| wrong(reason))?);
        }
        // The head that is tied in the file.
        if let (true, Some(embedding)) = (model.weights.by_name.contains_key(HEAD) && !by_name.contains_key(HEAD), by_name.get(EMBEDDING)) {
            by_name.insert(HEAD.to_owned(), embedding.clone());
        }
        by_name.extend(beside.iter().map(|item| (item.name.clone(), item.weight.clone())));
        let held = Weights { by_name, folders: model.weights.folders.clone(), ..Weights::default() };
        let mut encodings: Vec<String> = kinds.into_iter().map(|kind| kind_name(kind).to_lowercase()).collect();
        let mut weights: Vec<_> = names.into_iter().zip(seen).collect();
        if let Some(layout) = layout_beside(model, run, &beside)? {
            let (more, seen) = writer::write(folder, &beside, &layout, None, work)?;
            files.extend(more);
            count += layout.tensors();
            encodings.extend(beside.iter().map(|item| item.weight.describe()));
            weights.extend(beside.into_iter().map(|item| item.name).zip(seen));
        }
        Ok(Exported {
            files,
            how: format!("read back: the bytes of every tensor are equal to what was computed, and the file opens {opens}"),
            max_abs_error: 0.0,
            tensors: count,
            encodings,
            held: Some(held),
            config: None,
            notes,
            weights,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mixture of llama.cpp's `llama_tensor_get_type`.
    #[test]
    fn types_are_those_of_the_mixture() {
        let kept = |layers: usize| (0..layers).filter(|layer| keeps_more(*layer, layers)).count();
        assert_eq!([32, 28, 30, 1].map(kept), [16, 14, 14, 1]);
        let of = |file_type: FileType, name: &str, head: bool, layers: usize| match (Gguf { file_type }).wanted(name, head, layers, true, 0) {
            Kind::Blocks(kind) => kind.name(),
            Kind::Plain(_) => "plain",
        };
        assert_eq!(of(FileType::Q4_K_M, "blk.0.attn_v.weight", false, 32), "Q6_K");
        assert_eq!(of(FileType::Q4_K_M, "blk.4.ffn_down.weight", false, 32), "Q4_K");
        assert_eq!(of(FileType::Q4_K_M, "blk.6.ffn_down.weight", false, 32), "Q6_K");
        assert_eq!(of(FileType::Q4_K_M, "blk.0.attn_q.weight", false, 32), "Q4_K");
        assert_eq!(of(FileType::Q4_K_M, "blk.11.attn_v.weight", false, 80), "Q5_K");
        assert_eq!(of(FileType::Q4_K_M, "token_embd.weight", true, 32), "Q6_K");
        assert_eq!(of(FileType::Q4_K_M, "token_embd.weight", false, 32), "Q4_K");
        assert_eq!(of(FileType::Q4_0, "output.weight", true, 32), "Q6_K");
        assert_eq!(of(FileType::Q4_0, "blk.0.attn_v.weight", false, 32), "Q4_0");
        assert_eq!(of(FileType::Q8_0, "output.weight", true, 32), "Q8_0");
        let fits = |kind: BlockType, row: usize| kind_name(Gguf::fitting(Kind::Blocks(kind), row));
        assert_eq!(fits(BlockType::Q4K, 896), "Q5_0");
        assert_eq!(fits(BlockType::Q6K, 896), "Q8_0");
        assert_eq!(fits(BlockType::Q5K, 896), "Q5_1");
        assert_eq!(fits(BlockType::Q4_0, 896), "Q4_0");
        assert_eq!(fits(BlockType::Q4K, 1024), "Q4_K");
        assert_eq!([fits(BlockType::Q6K, 90), fits(BlockType::Q8_0, 90)], ["F16", "F16"]);
    }
}

//! GGUF, as llama.cpp's converter and its quantizer write it: one file, with the vocabulary in it.

mod mixture;
mod tensors;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

pub use self::mixture::FileType;
use self::mixture::{Mixture, fitting};
use self::tensors::{Planned, fallbacks, kind_name, parts, tensors, weighed, width};
use super::{Exported, Format, SizeForecast};
use crate::error::{Error, Result};
use crate::files::Destination;
use crate::model::Model;
use crate::model::gguf::{Described, Family, describe, vocabulary};
use crate::run_state::{InputImportance, RunState, Samples};
use crate::store::gguf::{Arranged, Kind, Value, header};
use crate::store::writer::{self, FileLayout, Item, Made, Piece, WeightMeasurement};
use crate::store::{ActivationScheme, Bytes, DType, Encoding, Module, StorageFormat, Weight, Weights};
use crate::work::Work;

/// The GGUF format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Gguf {
    /// What matrices are made of; vectors are 32-bit floats
    #[serde(rename = "type")]
    pub file_type: FileType,
    /// What errors count for when scales of Q4_0 and Q4_K_M are searched for
    pub importance: InputImportance,
}

/// Name of the file in a folder.
const FILE: &str = "model.gguf";

fn file_name(run: &RunState) -> &str {
    run.file.as_deref().unwrap_or(FILE)
}

struct Prepared {
    family: &'static Family,
    items: Vec<Item>,
    /// How each is stored, in plain words.
    encodings: Vec<String>,
    /// Names of the weights in the model.
    names: Vec<String>,
    /// Numbers of those whose rows lie in another order than in the model, or are not all of them.
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

impl Gguf {
    /// What is to be written; beforehand, `reads` being false, no tensor is read, and a head that may turn out to be the embedding counts.
    fn prepare(self, model: &Model, run: &RunState, reads: bool) -> Result<Prepared> {
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
        let head_stored = stores_head(model, family, reads)?;
        if !model.weights.by_name.contains_key(HEAD) && model.config.get("tie_word_embeddings").and_then(Json::as_bool) == Some(false) {
            return Err(refused("no lm_head.weight, and config.json does not tie it", "the checkpoint is not complete"));
        }
        let (mut all, mut rows) = (Vec::new(), 0);
        let mut beside = Vec::new();
        let weighted = self.importance == InputImportance::Activation;
        if weighted && !self.file_type.weighs() {
            return Err(Error::option("gguf: importance", "has no meaning for this type: Q4_0 and Q4_K_M search for scales"));
        }
        let mixture = Mixture { file_type: self.file_type, layers, few_keys: groups < heads, experts, weighted };
        for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| *name != HEAD || head_stored) {
            if model.weights.folder(name).is_some() {
                beside.push(Item { name: name.clone(), weight: weight.dense(name), storage_format: StorageFormat::Plain });
                continue;
            }
            let parts = parts(family, name, weight.dense(name), experts)?;
            let part = parts.len() > 1;
            for (there, dense) in parts {
                if there == "token_embd.weight" {
                    rows = weight.filled_rows();
                }
                let (of_all, expert) = Family::of_all(&there).map_or((there.clone(), None), |(of_all, expert)| (of_all, Some(expert)));
                let head = there == "output.weight" || (there == "token_embd.weight" && !head_stored);
                // What chooses experts is never rounded.
                let matrix = dense.shape.len() > 1 && dense.is_float() && !there.contains(".ffn_gate_inp");
                let wanted = if matrix { mixture.wanted(&of_all, head) } else { Kind::Plain(DType::F32) };
                let turned = match there.rsplit('.').nth(1) {
                    Some("attn_q") if family.neighbours => Some(heads),
                    Some("attn_k") if family.neighbours => Some(groups),
                    _ => None,
                };
                let order = turned.map(|count| Arranged::beside_each_other(weight.filled_rows().checked_div(count).unwrap_or(0)));
                let added = if family.norms_from_zero && Family::is_norm(name) { 1.0 } else { 0.0 };
                if !dense.is_float() {
                    return Err(Error::tensor(name, format!("is {}, where `{there}` holds floats", dense.describe()), ""));
                }
                let moved = order.is_some() || added != 0.0;
                let weight = if moved { Arranged { upstream: dense, order, added, name: name.clone() }.weight()? } else { dense };
                let kind = fitting(wanted, width(&weight));
                let weighs = there.starts_with("blk.") && matches!(kind, Kind::Blocks(kind) if kind.weighs());
                let importance = run.importance.as_ref().filter(|_| weighted && weighs).and_then(|all| all.columns.get(name)).cloned();
                all.push(Planned { name: name.clone(), there, weight, wanted, kind, moved: moved || part, expert, importance });
            }
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
            let (name, kind) = (name.to_owned(), Kind::Plain(DType::F32));
            all.push(Planned { there: name.clone(), name, weight, wanted: kind, kind, moved: false, expert: None, importance: None });
        }
        let file = file_name(run);
        notes.extend(fallbacks(&all, file));
        notes.extend(run.importance.as_ref().filter(|_| weighted).map_or_else(Vec::new, |importance| weighed(&all, importance, file)));
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
        let encoding = |planned: &Planned| kind_name(planned.kind).to_lowercase() + if planned.importance.is_some() { " by importance" } else { "" };
        let encodings = all.iter().map(encoding).collect();
        let (start, padding) = header(&values, &tensors).ok_or_else(|| refused("tensors that are too large", ""))?;
        let mut padding = padding.into_iter();
        let mut pieces = vec![Piece::Bytes(start)];
        let (mut items, mut names, mut moved) = (Vec::new(), Vec::new(), Vec::new());
        for (index, planned) in all.into_iter().enumerate() {
            let bytes = planned.kind.byte_count(&planned.weight.shape).unwrap_or(0);
            let (weight, storage_format) = planned.weight.in_gguf(planned.kind, &planned.name, planned.importance);
            pieces.push(Piece::Item { index, part: 0, bytes });
            // Experts lie behind each other.
            if planned.expert.is_none_or(|expert| expert.saturating_add(1) == experts) {
                pieces.push(Piece::Bytes(vec![0; padding.next().unwrap_or(0) as usize]));
            }
            items.push(Item { name: planned.there, weight, storage_format });
            names.push(planned.name);
            moved.extend(planned.moved.then_some(index));
        }
        Ok(Prepared { family, items, encodings, names, moved, pieces, tensors: tensors.len(), notes, words: has_words, whole, beside })
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

/// Whether there is a head that `config.json` ties to the embedding.
fn ties_head(model: &Model) -> bool {
    model.weights.by_name.contains_key(HEAD) && model.tied_names().contains(&(HEAD, EMBEDDING))
}

/// Whether the head is a tensor of its own in the file; one that need not be, unless values are read.
fn stores_head(model: &Model, family: &Family, reads: bool) -> Result<bool> {
    let (stored, tied) = (model.weights.by_name.contains_key(HEAD), ties_head(model));
    // These two have none in llama.cpp.
    if !stored || !["gemma", "gemma2"].contains(&family.architecture) {
        return Ok(stored && !(tied && reads && model.same_bytes(HEAD, EMBEDDING)?));
    }
    if tied || !reads || model.same_bytes(HEAD, EMBEDDING)? {
        return Ok(false);
    }
    Err(Error::tensor(HEAD, "differs from the embedding", format!("llama.cpp takes the embedding for the head of `{}`", family.architecture)))
}

/// Layers whose inputs the recipe quantizes.
fn quantized_inputs(model: &Model) -> usize {
    let quantized = |weight: &&Weight| matches!(&weight.encoding, Encoding::Affine(affine) if affine.activations != ActivationScheme::None);
    model.weights.by_name.values().filter(quantized).count()
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

    fn settle(&mut self, sets: &[Samples]) {
        // Training data alone decide nothing.
        let decides = self.file_type.weighs() && sets.contains(&Samples::Calibration);
        self.importance = self.importance.settled(if decides { sets } else { &[] });
    }

    fn runs_on(&self) -> Option<Samples> {
        (self.importance == InputImportance::Activation).then_some(Samples::Calibration)
    }

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        let prepared = self.prepare(model, run, false)?;
        let certain = !ties_head(model) || prepared.names.iter().all(|name| name != HEAD);
        let mut bytes = prepared.pieces.iter().map(Piece::len).sum();
        let (mut files, mut tensors) = (vec![file_name(run).to_owned()], prepared.tensors);
        if let Some(layout) = layout_beside(model, run, &prepared.beside)? {
            files.extend(layout.names());
            bytes += layout.bytes();
            tensors += layout.tensors();
        }
        Ok(SizeForecast { files, bytes, exact: certain && !run.estimated, tensors })
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, _made: Option<&Made>, work: &Work) -> Result<Exported> {
        let Prepared { family, items, encodings, names, moved, pieces, tensors: mut count, notes, words, whole, beside } = self.prepare(model, run, true)?;
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
        let mut by_name = held(family, &opened, &names, &items).map_err(wrong)?;
        let renamed = reads_back_renamed(family, &names);
        let with = |by_name| Weights { by_name, folders: model.weights.folders.clone(), ..Weights::default() };
        let difference = match renamed {
            true if model.difference_from(model).is_some() => model.holding(with(by_name.clone()))?.difference_from(&opened),
            true => None,
            false => model.difference_from(&opened),
        };
        if let Some(Err(difference)) = difference.as_ref().filter(|_| whole) {
            return Err(wrong(format!("reads back as a model that computes something else: {difference}")));
        }
        let opens = match difference {
            Some(Ok(())) => "as a model that computes what the one computes that it was made from",
            _ => "with all weights in their shapes",
        };
        // The head that is tied in the file.
        if let (true, Some(embedding)) = (model.weights.by_name.contains_key(HEAD) && !by_name.contains_key(HEAD), by_name.get(EMBEDDING)) {
            by_name.insert(HEAD.to_owned(), embedding.clone());
        }
        by_name.extend(beside.iter().map(|item| (item.name.clone(), item.weight.clone())));
        let (mut weights, mut encodings) = joined(names.into_iter().zip(seen).zip(encodings));
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
            held: Some(with(by_name)),
            config: None,
            notes,
            weights,
        })
    }
}

/// Whether experts have other names in what is read back: those of one tensor are tensors of their own there, and modules have one name.
fn reads_back_renamed(family: &Family, names: &[String]) -> bool {
    let same = |name: &String| family.to_file(name).and_then(|there| family.to_checkpoint(&there)).is_none_or(|back| back == *name);
    family.experts.is_some() && names.iter().any(|name| family.fused(name).is_some() || !same(name))
}

/// The weights of a file that was read back, under the names that the model has for them; all under those that files have where experts are
/// named otherwise in the model.
fn held(family: &Family, opened: &Model, names: &[String], items: &[Item]) -> std::result::Result<BTreeMap<String, Weight>, String> {
    let (back, mut by_name) = (&opened.weights.by_name, BTreeMap::new());
    let renamed = reads_back_renamed(family, names);
    for (name, Item { name: there, weight, .. }) in names.iter().zip(items) {
        let other = |_| format!("`{name}` reads back in another shape");
        let is = |there: &str, shape: &[usize]| {
            let here = family.to_checkpoint(there).ok_or(())?;
            back.get(&here).filter(|weight| weight.shape == shape).map(|weight| (here, weight.clone())).ok_or(())
        };
        if let (Some(_), [experts, matrix @ ..]) = (family.fused(name), weight.shape.as_slice()) {
            let module = there.trim_end_matches(".weight");
            for expert in 0..*experts {
                by_name.extend([is(&format!("{module}.{expert}.weight"), matrix).map_err(other)?]);
            }
        } else if family.to_checkpoint(there).is_some() {
            let (here, weight) = is(there, &weight.shape).map_err(other)?;
            by_name.insert(if renamed { here } else { name.clone() }, weight);
        }
    }
    Ok(by_name)
}

/// What was seen of each weight, and how it is stored: of one that became two tensors, both together.
fn joined(seen: impl Iterator<Item = ((String, WeightMeasurement), String)>) -> (Vec<(String, WeightMeasurement)>, Vec<String>) {
    let (mut weights, mut encodings): (Vec<(String, WeightMeasurement)>, Vec<String>) = (Vec::new(), Vec::new());
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for ((name, part), encoding) in seen {
        let place = *places.entry(name.clone()).or_insert(weights.len());
        match weights.get_mut(place) {
            None => {
                weights.push((name, part));
                encodings.push(encoding);
            }
            Some((_, all)) => {
                all.difference.add(&part.difference);
                all.changed |= part.changed;
                all.nonfinite += part.nonfinite;
                all.bytes += part.bytes;
                // Bins of one part are not those of all.
                all.histogram = None;
            }
        }
    }
    (weights, encodings)
}

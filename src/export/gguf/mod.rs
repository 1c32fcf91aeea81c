//! GGUF files as written by llama.cpp's converter and quantizer: one file that includes the vocabulary.

mod file_type;
mod head;
mod importance;
mod loss_notes;
mod mixture;
mod read_back;
mod tensors;
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

pub use self::file_type::FileType;
use self::head::{EMBEDDING, HEAD, stores_head, ties_head};
use self::importance::{Importance, Matrix};
use self::loss_notes::{loss_notes, quantized_inputs};
use self::mixture::{Mixture, fit_row, keep_packed};
use self::read_back::{has_renamed_experts, merge_split_weights, weights_by_name};
use self::tensors::{Layout, Planned, fallback_note, is_frequency, require_described, split_fused, tensors, width};
use self::types::RequestedTypes;
pub use self::types::TensorType;
use super::{Exported, Format, SizeForecast};
use crate::arch::{GgufFamily, GgufHead};
use crate::contract::Planned as PlannedFile;
use crate::error::{Error, ParseError, Result, counted};
use crate::files::Destination;
use crate::kernel::ggml::BlockType;
use crate::model::Model;
use crate::model::gguf::{Arrangement, Metadata, describe, vocabulary};
use crate::run_state::{InputImportance, RunState, Samples};
use crate::store::gguf::{BlockScales, Kind, Outline, RowPermutation, Value, header};
use crate::store::writer::{self, FileLayout, Item, Piece, Prebuilt};
use crate::store::{Bytes, DType, Encoding, ExactBlocks, Module, Pattern, StorageFormat, Weight, Weights};
use crate::work::Work;

/// The GGUF format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Gguf {
    /// Type of the matrices; vectors are 32-bit floats
    #[serde(rename = "type")]
    pub file_type: FileType,
    /// Other types for some matrices, by their names in GGUF files or in the model; the first pattern that
    /// matches applies
    #[serde(skip_serializing_if = "Vec::is_empty", with = "types::ordered_map")]
    #[cfg_attr(feature = "cli", schemars(with = "BTreeMap<String, TensorType>"))]
    #[doc(hidden)]
    pub types: Vec<(Pattern, TensorType)>,
    /// How errors are weighted in the search for the scales of blocks
    pub importance: InputImportance,
    /// An importance matrix of llama.cpp (`imatrix`), which is used instead of samples; relative to the
    /// recipe
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imatrix: Option<PathBuf>,
    /// Write the importance computed from samples to imatrix.gguf, which llama.cpp reads
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub write_imatrix: bool,
}

impl Gguf {
    /// Stores the matrices that match a pattern, by their names in GGUF files or in the model, in the type
    /// with this name in llama.cpp, such as `Q6_K`. The first pattern that matches applies.
    ///
    /// # Errors
    /// The pattern or the name of the type is invalid.
    pub fn with_type(mut self, pattern: &str, name: &str) -> Result<Gguf, ParseError> {
        self.types.push((pattern.parse()?, name.parse()?));
        Ok(self)
    }
}

/// Name of the file in a folder.
const FILE: &str = "model.gguf";

fn file_name(run: &RunState) -> &str {
    run.file.as_deref().unwrap_or(FILE)
}

/// A planned file.
pub(crate) struct Prepared {
    family: &'static GgufFamily,
    pub(crate) items: Vec<Item>,
    /// Description of how each item is stored.
    encodings: Vec<String>,
    /// Names of the weights in the model.
    pub(crate) names: Vec<String>,
    /// Indices of items whose rows are permuted, split or changed.
    rearranged: Vec<usize>,
    pub(crate) pieces: Vec<Piece>,
    /// The header.
    outline: Outline,
    notes: Vec<String>,
    /// Whether the file contains a vocabulary.
    has_vocabulary: bool,
    /// Whether the file describes the computation completely, so that it must read back as the same model.
    is_complete: bool,
    /// Weights of modules, which are written to separate safetensors files.
    module_items: Vec<Item>,
    /// Names of weights that the file does not contain row by row.
    split: BTreeSet<String>,
}

impl Gguf {
    /// Plans the file. Without `read_values`, no tensor is read, and a head that may be equal to the
    /// embedding is counted as a separate tensor.
    pub(crate) fn prepare(&self, model: &Model, run: &RunState, read_values: bool) -> Result<Prepared> {
        let unsupported = |what: &str, hint: &str| Error::Unsupported { what: format!("gguf: {}: {what}", model.path.display()), hint: hint.into() };
        let incomplete = |reason: &str| Error::run(format!("gguf: {}", model.path.display()), reason, "the checkpoint is incomplete");
        if model.onnx.is_some() {
            return Err(unsupported("an .onnx model", "omit `export`, or export `onnx`"));
        }
        if model.needs_graph_file() {
            return Err(unsupported("a model that config.json does not describe", "export safetensors or onnx, which include the graph of graph.json"));
        }
        let Metadata { family, layers, key_value_heads: groups, experts, mut values, factors, mut notes } = describe(model)?;
        let size = |key: &str| model.config.get(key).and_then(Json::as_u64).map_or(0, |size| size as usize);
        let heads = size("num_attention_heads");
        let arrangement = Arrangement::new(family, model.config.values());
        let layout = Layout { experts, heads, latent_rows: [size("qk_nope_head_dim"), size("v_head_dim")], arrangement };
        let head_stored = stores_head(model, family, read_values)?;
        if !head_stored && family.head == GgufHead::Separate {
            let hint = format!("llama.cpp requires a separate head for `{}`", family.architecture);
            return Err(unsupported("a head that is tied to the embedding", &hint));
        }
        if !model.weights.by_name.contains_key(HEAD) && model.config.get("tie_word_embeddings").and_then(Json::as_bool) == Some(false) {
            return Err(incomplete("lm_head.weight is missing, and config.json does not tie it to the embedding"));
        }
        if model.is_corrected() {
            return Err(unsupported(
                "low-rank corrections of layers",
                "run the pass `dequantize` first, which adds them to the weights, or export safetensors",
            ));
        }
        let (mut all, mut module_items, mut split, mut rows) = (Vec::new(), Vec::new(), BTreeSet::new(), 0);
        let uses_importance = self.importance == InputImportance::Activation;
        let importance = self.open_importance(run)?;
        let query_group = heads.checked_div(groups).unwrap_or(0);
        let is_70b = Mixture::is_70b(family.architecture, layers, query_group);
        let has_shared_expert = model.config.get("shared_expert_intermediate_size").is_some();
        let mixture = Mixture { file_type: self.file_type, layers, query_group, experts, has_shared_expert, is_70b, uses_importance };
        let mut requested = RequestedTypes::new(&self.types);
        let mut predicting = 0usize;
        for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| *name != HEAD || head_stored) {
            if name.starts_with("mtp.") || GgufFamily::layer(name).is_some_and(|layer| layer as usize >= layers) {
                predicting = predicting.saturating_add(1);
                continue;
            }
            // Runtimes choose the type of the cache when they load the file, and compute frequencies.
            if Model::has_cache_scale_name(name) || is_frequency(name) {
                continue;
            }
            if model.weights.folder(name).is_some() {
                module_items.push(Item { name: name.clone(), weight: weight.dense(name), storage_format: StorageFormat::Plain });
                continue;
            }
            let parts = split_fused(family, name, weight.dense(name), &layout)?;
            let is_split = parts.len() > 1 || family.joined_tensors(name).is_some();
            for (gguf_name, dense) in parts {
                if gguf_name == "token_embd.weight" {
                    rows = weight.filled_rows();
                }
                let (stacked, expert) = GgufFamily::split_expert(&gguf_name).map_or((gguf_name.clone(), None), |(stacked, expert)| (stacked, Some(expert)));
                let is_head = gguf_name == "output.weight" || (gguf_name == "token_embd.weight" && !head_stored);
                let can_quantize = gguf_name.ends_with(".weight") && !GgufFamily::is_always_float(&gguf_name);
                let is_matrix = dense.shape.len() > 1 && dense.is_float() && can_quantize;
                let row = width(&dense);
                let target = if is_matrix { mixture.kind(&stacked, is_head, row) } else { Kind::Plain(DType::F32) };
                let target = if is_matrix { keep_packed(weight, target, row) } else { target };
                let requested_kind = requested.find(&stacked, name, is_matrix, row)?;
                let (target, kind) = requested_kind.map_or_else(|| (target, fit_row(target, row)), |kind| (kind, kind));
                let rotary_heads = match gguf_name.rsplit('.').nth(1) {
                    Some("attn_q") if family.interleaved_rope => Some(heads),
                    Some("attn_k") if family.interleaved_rope => Some(groups),
                    _ => None,
                };
                let order = rotary_heads.map(|count| RowPermutation::interleave(weight.filled_rows().checked_div(count).unwrap_or(0)));
                let added = if family.norms_plus_one && GgufFamily::is_norm(name) { 1.0 } else { 0.0 };
                if !dense.is_float() {
                    return Err(Error::tensor(name, format!("is {}, but `{gguf_name}` must be a float tensor", dense.describe()), ""));
                }
                let is_split = is_split || arrangement.is_changed(&gguf_name);
                split.extend(is_split.then(|| name.clone()));
                let exact = weight.exact_blocks().map(|exact| self.kept_blocks((name, exact), (requested_kind, kind), is_split)).transpose()?.flatten();
                let (target, kind) = match exact.map(Kind::Blocks) {
                    // A type that was selected for the matrix has no other target.
                    Some(kept) if kept != kind || weight.exact_blocks().is_some_and(|exact| exact.file_type.is_none()) => (kept, kept),
                    _ => (target, kind),
                };
                let blocks = exact.and_then(|_| weight.block_bytes());
                let rearranged = order.is_some() || added != 0.0 || is_split;
                let params = if let Kind::Blocks(kind) = kind { weight.block_params(kind, name).filter(|_| !is_split) } else { None };
                let in_order = |upstream| RowPermutation { upstream, order: order.clone(), added, name: name.clone() }.weight();
                let weight = if order.is_some() || added != 0.0 { in_order(dense)? } else { dense };
                let scales = match (blocks, params) {
                    (Some(blocks), _) => BlockScales::Blocks(Box::new(in_order(blocks)?)),
                    (None, Some(params)) => BlockScales::Existing(Box::new(in_order(params)?)),
                    (None, None) => BlockScales::Plain,
                };
                let mut planned = Planned { name: name.clone(), gguf_name, weight, target, kind, rearranged, expert, scales };
                if let (false, Some(columns)) = (planned.keeps_codes(), importance.columns(&planned, &layout)?) {
                    planned.scales = BlockScales::Weighted(columns);
                }
                importance.require(&planned, mixture.requires_importance(&stacked, kind) && !planned.keeps_codes())?;
                all.push(planned);
            }
        }
        if rows == 0 {
            return Err(incomplete("the token embedding is missing"));
        }
        requested.check(head_stored)?;
        // The number of rows of the embedding, which may exceed the size of the vocabulary.
        let size_key = format!("{}.vocab_size", family.architecture);
        values.iter_mut().filter(|(key, _)| *key == size_key).for_each(|(_, value)| *value = Value::Unsigned(rows as u64));
        let rounds = model.config.cache().ok().flatten().is_some() || quantized_inputs(model) > 0;
        let is_complete = notes.is_empty() && factors.is_empty() && head_stored == model.weights.by_name.contains_key(HEAD) && !rounds;
        // The file does not describe modules.
        let is_complete = is_complete && Module::try_list(&model.path)?.is_ok_and(|modules| modules.is_empty());
        for (name, factors) in factors {
            let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
            let weight = Weight::new(DType::F32, vec![factors.len()], Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
            let (name, kind) = (name.to_owned(), Kind::Plain(DType::F32));
            all.push(Planned { gguf_name: name.clone(), name, weight, target: kind, kind, rearranged: false, expert: None, scales: BlockScales::Plain });
        }
        let file = file_name(run);
        notes.extend(fallback_note(&all, file));
        notes.extend(importance.notes(&all, file, self.write_imatrix)?);
        if !module_items.is_empty() {
            let (folders, is_file) = (model.weights.folders.join("`, `"), run.file.is_some());
            notes.push(if is_file {
                format!("{file}: the weights of the modules `{folders}` are not written: a GGUF file cannot contain them, and the output is a single file")
            } else {
                format!("{file} cannot contain the weights of the modules `{folders}`: they are written to separate safetensors files")
            });
        }
        if model.config.cache()?.is_some() {
            notes.push(format!(
                "{file}: the scales of the quantized KV cache are not written, because a GGUF file cannot contain them: choose the type of the cache when the file is loaded (llama.cpp: `--cache-type-k` and `--cache-type-v`)"
            ));
        }
        if predicting > 0 {
            notes.push(format!(
                "{file}: {} of layers after the {layers} of `num_hidden_layers` are not written, because the file contains no layers that predict further tokens",
                counted(predicting, "tensor")
            ));
        }
        require_described(model, layers, &all)?;
        let (entries, note) = vocabulary(model, rows)?;
        notes.extend(note);
        values.push(("general.file_type".into(), Value::Unsigned(self.described_type(&all).id())));
        let has_vocabulary = entries.iter().any(|(key, _)| key == "tokenizer.ggml.tokens");
        values.extend(entries);
        values.extend(importance.metadata());
        values.push(("general.quantization_version".into(), Value::Unsigned(2)));
        notes.extend(loss_notes(self, model, (&all, &split), run, file));
        let tensors = tensors(&mut all, experts)?;
        let encoding = |planned: &Planned| planned.kind.to_string().to_lowercase() + if planned.is_weighted() { " by importance" } else { "" };
        let encodings = all.iter().map(encoding).collect();
        let (start, padding) = header(&values, &tensors).ok_or_else(|| unsupported("tensors that are too large", ""))?;
        let outline = Outline::planned(values, tensors).ok_or_else(|| unsupported("tensors that are too large", ""))?;
        let mut padding = padding.into_iter();
        let mut pieces = vec![Piece::Bytes(start)];
        let (mut items, mut names, mut rearranged) = (Vec::new(), Vec::new(), Vec::new());
        for (index, planned) in all.into_iter().enumerate() {
            let bytes = planned.kind.byte_count(&planned.weight.shape).unwrap_or(0);
            let (weight, storage_format) = planned.weight.in_gguf(planned.kind, &planned.name, planned.scales);
            pieces.push(Piece::Item { index, part: 0, bytes });
            // Only the last expert of a stacked tensor is followed by padding.
            if planned.expert.is_none_or(|expert| expert.saturating_add(1) == experts) {
                pieces.push(Piece::Bytes(vec![0; padding.next().unwrap_or(0) as usize]));
            }
            items.push(Item { name: planned.gguf_name, weight, storage_format });
            names.push(planned.name);
            rearranged.extend(planned.rearranged.then_some(index));
        }
        Ok(Prepared { family, items, encodings, names, rearranged, pieces, outline, notes, has_vocabulary, is_complete, module_items, split })
    }

    /// The file type of the metadata: that of the options, unless this is a type of floats, and most matrices
    /// are blocks of a pass.
    fn described_type(&self, all: &[Planned]) -> FileType {
        let matrices = all.iter().filter(|planned| planned.weight.shape.len() > 1);
        let most = FileType::of_most(matrices.map(|planned| (planned.kind, planned.weight.elements())));
        let is_float = self.types.is_empty() && matches!(self.file_type.most(), Kind::Plain(_));
        most.filter(|most| is_float && matches!(most.most(), Kind::Blocks(_))).unwrap_or(self.file_type)
    }

    /// The type of the blocks of a pass that are written; `None` for floats with their values. `kinds` are
    /// the type that the option `types` requests, and that of the file otherwise.
    ///
    /// # Errors
    /// The values would be rounded again.
    fn kept_blocks(&self, (name, exact): (&str, ExactBlocks), kinds: (Option<Kind>, Kind), is_split: bool) -> Result<Option<BlockType>> {
        let (requested, kind) = kinds;
        let is_of_file = exact.file_type.is_none_or(|id| id == self.file_type.id());
        let (own, other) = (Kind::Blocks(exact.kind), requested.unwrap_or(kind));
        if other == Kind::Plain(DType::F32) {
            return Ok(None);
        }
        if !is_split && (other == own || (requested.is_none() && is_of_file)) {
            return Ok(Some(exact.kind));
        }
        let (reason, hint) = match (is_split, requested) {
            (true, _) => ("the file does not contain its rows".to_owned(), "add it to `ignore` of the pass"),
            (false, Some(other)) => (format!("`types` requests {other}"), "use the same types in `rules` of the pass and in `types`"),
            (false, None) => (
                format!("it is {other} in files of the type {:?}", self.file_type),
                "omit the `type` of the file, and quantize all matrices in one pass, with `rules` for those of other types",
            ),
        };
        let scheme = exact.file_type.and_then(FileType::from_id).map_or(String::new(), |scheme| format!(" with `scheme: {scheme:?}`"));
        Err(Error::tensor(name, format!("was quantized to {own} by a pass{scheme}, but {reason}, so that it would be rounded twice"), hint))
    }

    /// The importance of columns.
    ///
    /// # Errors
    /// The options contradict each other, or the importance matrix cannot be read.
    fn open_importance<'r>(&self, run: &'r RunState) -> Result<Importance<'r>> {
        let uses_importance = self.importance == InputImportance::Activation;
        let option = if self.imatrix.is_some() { "imatrix" } else { "importance" };
        if uses_importance && !self.can_use_importance() {
            let reason = format!("has no effect for this type, which has no search for scales; choose another `type`, or omit `{option}`");
            return Err(Error::option(format!("gguf: {option}"), reason));
        }
        if self.write_imatrix && (!uses_importance || self.imatrix.is_some()) {
            return Err(Error::option("gguf: write_imatrix", "needs importance that is computed from calibration samples (`importance: activation`)"));
        }
        if !uses_importance && self.imatrix.is_none() {
            return Ok(Importance::Unused);
        }
        match (&self.imatrix, &run.importance) {
            (Some(_), _) if !uses_importance => Err(Error::option("gguf: imatrix", "has no effect with `importance: none`: omit one of them")),
            (Some(path), _) => Matrix::open(path).map(Importance::Matrix),
            (None, Some(importance)) => Ok(Importance::Samples(importance)),
            (None, None) => Ok(Importance::Planned),
        }
    }
}

/// The types of the matrices that a file of this type contains row by row, by their names in the model.
/// `calibrates`: whether the importance of columns is known.
///
/// # Errors
/// GGUF files cannot represent the model.
pub(crate) fn gguf_kinds(model: &Model, file_type: FileType, calibrates: bool) -> Result<BTreeMap<String, Kind>> {
    let importance = if calibrates && file_type.uses_importance() { InputImportance::Activation } else { InputImportance::None };
    let Prepared { names, items, split, .. } = Gguf { file_type, importance, ..Gguf::default() }.prepare(model, &RunState::default(), false)?;
    let kinds = names.into_iter().zip(items).filter(|(name, _)| !split.contains(name));
    let kind = |item: &Item| if let StorageFormat::Gguf(kind) = item.storage_format { Kind::Blocks(kind) } else { Kind::Plain(item.weight.dtype) };
    Ok(kinds.map(|(name, item)| (name, kind(&item))).collect())
}

/// The type of matrices with rows of `row` elements for which a type is selected.
pub(crate) fn gguf_kind(tensor_type: TensorType, row: usize) -> Kind {
    fit_row(tensor_type.kind(), row)
}

/// Layout of the separate files for the weights of modules; `None` if the output is a single file.
fn module_layout(model: &Model, run: &RunState, items: &[Item]) -> Result<Option<FileLayout>> {
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    (!items.is_empty() && run.file.is_none()).then(|| FileLayout::new(items, &metadata, &model.weights.folders, u64::MAX)).transpose()
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

    fn resolve_defaults(&mut self, model: &Model, sets: &[Samples]) {
        let blocks = || model.weights.by_name.values().filter_map(|weight| Some((weight.exact_blocks()?, weight)));
        if self.file_type == FileType::Auto {
            let kinds = || blocks().map(|(exact, weight)| (Kind::Blocks(exact.kind), weight));
            let of_mixture = blocks().find_map(|(exact, _)| FileType::from_id(exact.file_type?));
            // Rows that are not a multiple of its block size have another type.
            let is_selected = |of_pass: &Kind| kinds().all(|(kind, weight)| fit_row(*of_pass, weight.row()) == kind);
            let of_pass = || kinds().map(|(kind, _)| kind).find(is_selected).and_then(FileType::mostly);
            let of_most = || FileType::of_most(kinds().map(|(kind, weight)| (kind, weight.elements())));
            self.file_type = of_mixture.or_else(of_pass).or_else(of_most).or_else(|| FileType::mostly(Kind::Plain(model.float_type?))).unwrap_or(FileType::F16);
        }
        if self.imatrix.is_some() && self.importance == InputImportance::Auto {
            self.importance = InputImportance::Activation;
        }
        // Training data is not used for importance.
        let can_calibrate = self.can_use_importance() && sets.contains(&Samples::Calibration);
        let is_used = || blocks().next().is_none() || self.importance != InputImportance::Auto || self.leaves_weighted_matrices(model);
        self.importance = self.importance.resolved(if can_calibrate && is_used() { sets } else { &[] });
    }

    fn runs_on(&self) -> Option<Samples> {
        (self.importance == InputImportance::Activation && self.imatrix.is_none()).then_some(Samples::Calibration)
    }

    fn resolve(&mut self, folder: &Path) {
        self.imatrix.iter_mut().for_each(|path| *path = crate::files::resolve(folder, path));
    }

    fn reads(&self) -> Vec<PathBuf> {
        self.imatrix.clone().into_iter().collect()
    }

    fn attached(&self, model: &Model, run: &RunState) -> Result<BTreeMap<String, Vec<u8>>> {
        let Some(all) = run.importance.as_ref().filter(|_| self.write_imatrix) else { return Ok(BTreeMap::new()) };
        let bytes = importance::matrix_file(all, describe(model)?.family, model);
        let too_large = || Error::option("gguf: write_imatrix", "the importance is too large for a file");
        Ok(BTreeMap::from([(importance::FILE.to_owned(), bytes.ok_or_else(too_large)?)]))
    }

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        let prepared = self.prepare(model, run, false)?;
        let is_exact = !ties_head(model) || prepared.names.iter().all(|name| name != HEAD);
        let mut bytes = prepared.pieces.iter().map(Piece::len).sum();
        let (mut files, mut tensors) = (vec![file_name(run).to_owned()], prepared.outline.tensors.len());
        if let Some(layout) = module_layout(model, run, &prepared.module_items)? {
            files.extend(layout.names());
            bytes += layout.bytes();
            tensors += layout.tensors();
        }
        Ok(SizeForecast { files, bytes, exact: is_exact && !run.is_estimated(), tensors })
    }

    fn planned(&self, model: &Model, run: &RunState) -> Result<Option<PlannedFile>> {
        Ok(Some(PlannedFile::gguf(self.prepare(model, run, false)?.outline)))
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, _prebuilt: Option<&Prebuilt>, work: &Work) -> Result<Exported> {
        let Prepared { family, items, encodings, names, rearranged, pieces, outline, notes, has_vocabulary, is_complete, module_items, .. } =
            self.prepare(model, run, true)?;
        let mut count = outline.tensors.len();
        // It contains the vocabulary.
        drop(outline);
        let (mut files, mut measured) = writer::write_pieces(folder, &[(file_name(run).to_owned(), pieces)], &items, work)?;
        // The bytes were read in another order than they are stored, so the hash of the input is unknown.
        for index in rearranged {
            measured[index].input_hash = None;
        }
        let path = folder.location(file_name(run));
        let failure = |reason: String| Error::Verification { path: path.clone(), reason };
        let opened = Model::open(&path)?;
        if has_vocabulary && !opened.auxiliary.synthesized.contains_key(Path::new("tokenizer.json")) {
            return Err(failure(format!("the vocabulary cannot be read back: {}", opened.auxiliary.in_weight_files.join("; "))));
        }
        let mut by_name = weights_by_name(family, &opened, &names, &items).map_err(failure)?;
        let renamed = has_renamed_experts(family, &names);
        let with = |by_name| Weights { by_name, folders: model.weights.folders.clone(), ..Weights::default() };
        opened.require_matching_weights().map_err(|error| failure(format!("does not describe its own weights: {error}")))?;
        let difference = match renamed {
            true if model.difference_from(model).is_some() => model.with_weights(with(by_name.clone()))?.difference_from(&opened),
            true => None,
            false => model.difference_from(&opened),
        };
        if let Some(Err(difference)) = difference.as_ref().filter(|_| is_complete) {
            return Err(failure(format!("reads back as a model with a different graph: {difference}")));
        }
        let opens = match difference {
            Some(Ok(())) => "as a model with the same graph as the original",
            _ => "with all weights in the expected shapes",
        };
        // The head, if it is tied in the file.
        if let (true, Some(embedding)) = (model.weights.by_name.contains_key(HEAD) && !by_name.contains_key(HEAD), by_name.get(EMBEDDING)) {
            by_name.insert(HEAD.to_owned(), embedding.clone());
        }
        // The graph of the input, with which the file is measured, reads them.
        by_name.extend(model.weights.by_name.iter().filter(|(name, _)| model.is_cache_scale(name)).map(|(name, weight)| (name.clone(), weight.clone())));
        by_name.extend(module_items.iter().map(|item| (item.name.clone(), item.weight.clone())));
        let (mut weights, mut encodings) = merge_split_weights(names.into_iter().zip(measured).zip(encodings));
        if let Some(layout) = module_layout(model, run, &module_items)? {
            let (more, measured) = writer::write(folder, &module_items, &layout, None, work)?;
            files.extend(more);
            count += layout.tensors();
            encodings.extend(module_items.iter().map(|item| item.weight.describe()));
            weights.extend(module_items.into_iter().map(|item| item.name).zip(measured));
        }
        Ok(Exported {
            files,
            how: format!("read back: the bytes of every tensor are equal to the computed ones, and the file opens {opens}"),
            max_abs_error: 0.0,
            tensors: count,
            encodings,
            stored_weights: Some(with(by_name)),
            config: None,
            notes,
            weights,
        })
    }
}

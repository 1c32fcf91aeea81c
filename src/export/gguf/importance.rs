//! Importance of the columns of tensors, from calibration samples or from an importance matrix of
//! llama.cpp.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::Gguf;
use super::tensors::{Layout, Planned, width};
use crate::arch::GgufFamily;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::gguf::Arrangement;
use crate::run_state::{ColumnImportance, InputImportance, RunState};
use crate::store::StorageFormat;
use crate::store::gguf::{ImportanceFile, InputSums, Kind, Value};
use crate::store::writer::Item;

/// Name of the file with the importance that was computed from samples.
pub(super) const FILE: &str = "imatrix.gguf";

/// Why importance has no effect after a pass.
const QUANTIZED: &str = "has no effect, because `quantize` has chosen the blocks of all matrices that it affects: omit it";

/// Source of the importance of columns.
pub(super) enum Importance<'a> {
    /// All columns have the same importance.
    Unused,
    /// Calibration samples, from which it is not computed yet.
    Planned,
    /// Calibration samples.
    Samples(&'a ColumnImportance),
    /// A file.
    Matrix(Matrix),
}

/// An importance matrix.
pub(super) struct Matrix {
    /// Name of the file.
    file: String,
    /// Means by the name of the tensor in the file.
    means: BTreeMap<String, Arc<Vec<f32>>>,
    dataset: Option<String>,
    chunks: u64,
}

impl Matrix {
    pub fn open(path: &Path) -> Result<Matrix> {
        let ImportanceFile { sums, datasets, chunks, .. } = ImportanceFile::open(path)?;
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let means = sums.into_iter().map(|(name, sums)| (name, Arc::new(sums.means()))).collect();
        Ok(Matrix { file, means, dataset: datasets.into_iter().next(), chunks })
    }

    /// The importance of the columns of a tensor, as llama.cpp's quantizer finds it; for an expert, that of
    /// its matrix. `None` if the file does not contain it.
    ///
    /// # Errors
    /// The number of columns differs, except for the embedding table.
    fn columns(&self, planned: &Planned, experts: usize) -> Result<Option<Arc<Vec<f32>>>> {
        let (stacked, expert) = GgufFamily::split_expert(&planned.gguf_name).unwrap_or_else(|| (planned.gguf_name.clone(), 0));
        let Some(means) = self.means.get(&stacked) else { return Ok(None) };
        let width = width(&planned.weight);
        let matrices = match planned.weight.shape[..] {
            [count, _, _] => count,
            _ if planned.expert.is_some() => experts,
            _ => 1,
        };
        if means.len() != width.saturating_mul(matrices) {
            if stacked == "token_embd.weight" {
                return Ok(None);
            }
            let reason = format!("has {matrices} × {width} columns, but {} of {} has {}", stacked, self.file, means.len());
            return Err(Error::tensor(&planned.name, reason, "compute the importance matrix for this model"));
        }
        let Some(_) = planned.expert else { return Ok(Some(means.clone())) };
        let from = expert.saturating_mul(width);
        Ok(means.get(from..from.saturating_add(width)).map(|columns| Arc::new(columns.to_vec())))
    }
}

/// Whether samples determine the importance of the columns of a tensor with this name in the file. As in
/// llama.cpp, the head and the embedding table are excluded. The inputs of a projection of latent vectors are
/// not those of its transposed part for each head.
fn is_measured(gguf_name: &str) -> bool {
    gguf_name.starts_with("blk.") && !GgufFamily::is_latent_part(gguf_name)
}

impl Gguf {
    /// Whether the importance of columns affects matrices whose codes no pass has chosen.
    pub(super) fn leaves_weighted_matrices(&self, model: &Model) -> bool {
        let weighted = Gguf { importance: InputImportance::Activation, ..self.clone() };
        let is_left = |(name, item): (&String, &Item)| {
            let StorageFormat::Gguf(kind) = item.storage_format else { return false };
            let weight = model.weights.by_name.get(name);
            let keeps_codes = weight.is_some_and(|weight| weight.exact_blocks().is_some() || weight.block_params(kind, name).is_some());
            kind.uses_importance() && !keeps_codes && is_measured(&item.name)
        };
        weighted.prepare(model, &RunState::default(), false).is_ok_and(|prepared| prepared.names.iter().zip(&prepared.items).any(is_left))
    }

    /// Whether the importance of columns affects the quantization to one of the types.
    pub(super) fn can_use_importance(&self) -> bool {
        self.file_type.uses_importance() || self.types.iter().any(|(_, kind)| kind.uses_importance())
    }
}

impl Importance<'_> {
    /// The importance of the columns of a tensor whose type has a search for scales.
    ///
    /// # Errors
    /// The importance matrix has another number of columns.
    pub fn columns(&self, planned: &Planned, layout: &Layout) -> Result<Option<Arc<Vec<f32>>>> {
        if !planned.kind.uses_importance() {
            return Ok(None);
        }
        match self {
            Importance::Unused | Importance::Planned => Ok(None),
            Importance::Samples(all) => {
                let columns = all.columns.get(&planned.name).filter(|_| is_measured(&planned.gguf_name)).cloned();
                Ok(columns.map(|columns| layout.arrangement.columns(&planned.gguf_name, columns)))
            }
            Importance::Matrix(matrix) => matrix.columns(planned, layout.experts),
        }
    }

    /// Checks that a tensor that needs importance has it.
    pub fn require(&self, planned: &Planned, is_required: bool) -> Result<()> {
        if !is_required || planned.is_weighted() || matches!(self, Importance::Planned) {
            return Ok(());
        }
        let hint = match self {
            Importance::Matrix(matrix) => format!("{} does not contain `{}`: choose another type for it (`types`)", matrix.file, planned.gguf_name),
            Importance::Samples(_) => "it has none, like the head and weights used by several layers: choose another type for it (`types`)".to_owned(),
            _ => "add calibration data (`data: { calibration: ... }`) or an importance matrix (`imatrix`), or choose another type".to_owned(),
        };
        Err(Error::tensor(&planned.name, format!("can be quantized to {} only with importance", planned.kind), hint))
    }

    /// Metadata that describes the importance matrix, with the keys of llama.cpp's quantizer.
    pub fn metadata(&self) -> Vec<(String, Value)> {
        let Importance::Matrix(Matrix { file, means, dataset, chunks }) = self else { return Vec::new() };
        let text = |text: &String| Value::Text(text.clone());
        let values = [
            ("file", Some(text(file))),
            ("dataset", dataset.as_ref().map(text)),
            ("entries_count", Some(Value::Unsigned(means.len() as u64))),
            ("chunks_count", Some(*chunks).filter(|chunks| *chunks > 0).map(Value::Unsigned)),
        ];
        values.into_iter().filter_map(|(key, value)| Some((format!("quantize.imatrix.{key}"), value?))).collect()
    }

    /// Notes about matrices that are quantized with and without importance. `is_written`: whether the
    /// importance is also written.
    ///
    /// # Errors
    /// The importance matrix contains none of the tensors, or a pass has quantized all matrices that the
    /// importance affects.
    pub fn notes(&self, all: &[Planned], file: &str, is_written: bool) -> Result<Vec<String>> {
        let (with, without): (Vec<&Planned>, Vec<&Planned>) =
            all.iter().filter(|planned| matches!(planned.kind, Kind::Blocks(_)) && !planned.keeps_codes()).partition(|planned| planned.is_weighted());
        let has_blocks = all.iter().any(Planned::keeps_blocks);
        let is_affected = |planned: &Planned| !planned.keeps_codes() && planned.kind.uses_importance() && is_measured(&planned.gguf_name);
        let (source, reasons) = match self {
            Importance::Planned | Importance::Samples(_) if has_blocks && !is_written && !all.iter().any(is_affected) => {
                return Err(Error::option("gguf: importance", QUANTIZED));
            }
            Importance::Unused | Importance::Planned => return Ok(Vec::new()),
            Importance::Samples(importance) => (
                format!("the mean square of the input of each column on {} calibration samples", importance.samples),
                "the head, weights used by several layers, and types without a search for scales",
            ),
            Importance::Matrix(_) if with.is_empty() && has_blocks => return Err(Error::option("gguf: imatrix", QUANTIZED)),
            Importance::Matrix(matrix) if with.is_empty() => {
                let reason = format!("{} contains none of the tensors that are quantized by importance: compute it for this model", matrix.file);
                return Err(Error::option("gguf: imatrix", reason));
            }
            Importance::Matrix(matrix) => {
                (format!("the importance matrix {}", matrix.file), "tensors that it does not contain, and types without a search for scales")
            }
        };
        let mut notes = Vec::new();
        if !with.is_empty() {
            notes.push(format!("{file}: in {} matrices, errors are weighted by {source}", with.len()));
        }
        if let Some(first) = without.first() {
            notes.push(format!("{file}: {} matrices are quantized without importance: {reasons} (the first: `{}`)", without.len(), first.name));
        }
        let unseen = if let Importance::Samples(importance) = self { importance.unseen.as_slice() } else { &[] };
        if let Some(first) = unseen.first() {
            notes.push(format!(
                "{file}: no sample was routed to {} matrices of experts, whose columns have equal importance (the first: `{first}`)",
                unseen.len()
            ));
        }
        Ok(notes)
    }
}

/// The importance computed from samples, in the format of llama.cpp; `None` if it is too large.
pub(super) fn matrix_file(importance: &ColumnImportance, family: &'static GgufFamily, model: &Model) -> Option<Vec<u8>> {
    let arrangement = Arrangement::new(family, model.config.values());
    let mut found: BTreeMap<(String, usize), InputSums> = BTreeMap::new();
    for (name, sums) in &importance.sums {
        let split = family.fused_tensors(name).or_else(|| family.delta_tensors(name));
        let gguf_names = split.or_else(|| family.to_gguf(name).map(|gguf_name| vec![gguf_name])).unwrap_or_default();
        for gguf_name in gguf_names.into_iter().filter(|gguf_name| gguf_name.starts_with("blk.")) {
            let squares = arrangement.columns(&gguf_name, Arc::new(sums.squares.clone()));
            let sums = InputSums { squares: squares.to_vec(), counts: sums.counts.clone() };
            found.insert(GgufFamily::split_expert(&gguf_name).unwrap_or((gguf_name, 0)), sums);
        }
    }
    let mut file = ImportanceFile { chunks: importance.samples as u64, ..ImportanceFile::default() };
    for ((name, _), sums) in found {
        let all = file.sums.entry(name).or_default();
        all.squares.extend(&sums.squares);
        all.counts.extend(&sums.counts);
    }
    let rows = file.sums.values().flat_map(|sums| &sums.counts).fold(0f32, |most, count| most.max(*count));
    file.chunk_size = (rows / importance.samples.max(1) as f32).ceil() as u64;
    file.to_bytes()
}

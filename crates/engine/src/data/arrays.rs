//! Arrays with one row per sample: safetensors, NumPy's .npz, or a folder of .npy.

use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use serde_json::Value;

use super::array_shape::{matched_shape, transposition_hint};
use super::decoder_targets::{DecoderTargets, require_tokens};
use super::labels::{Classes, IGNORED};
use super::options::{self, Column, Data, Task};
use super::pixels::Pixels;
use super::rows::{self, LABELS, Rows, names, require_all_used};
use super::sequence_role::{DECODER_ATTENTION_MASK, DECODER_INPUT_IDS, INPUT_IDS, SequenceRole};
use super::{Batch, Order, PendingBatches, Port, References, SampleSource, Target, in_batches, shaped};
use crate::arch;
use crate::error::{Error, Result};
use crate::ir::Element;
use crate::store::DType;
use crate::store::header::{byte_count, element_count};

/// Maximum number of array names in messages.
const LISTED: usize = 12;

/// Whether a file or folder contains an array with a default name for labels.
pub(super) fn has_labels(path: &Path) -> Result<bool> {
    if path.is_dir() {
        return Ok(LABELS.iter().any(|name| path.join(format!("{name}.npy")).is_file()));
    }
    Ok(open(path)?.iter().any(|rows| LABELS.contains(&rows.name.as_str())))
}

/// Whether a folder contains arrays.
pub(super) fn folder_has_arrays(folder: &Path) -> bool {
    folder.is_dir() && rows::files(folder).is_ok_and(|files| !files.is_empty())
}

/// Opens the arrays with at least one axis.
fn open(path: &Path) -> Result<Vec<Rows>> {
    Ok(rows::open(path)?.into_iter().filter(|rows| !rows.shape.is_empty()).collect())
}

/// Selects the array for an input: as specified in `inputs`, with the name of the input, or the only
/// array for the only input. `None` if the input is optional and has no array.
pub(super) fn array_for<'r>(options: &Data, port: &Port, ports: &[Port], arrays: &[&'r Rows], path: &Path) -> Result<Option<&'r Rows>> {
    let find = |name: &str| arrays.iter().find(|rows| rows.name == name).copied();
    let available = || match arrays.len().checked_sub(LISTED).filter(|more| *more > 0) {
        Some(more) => format!("{} and {more} more: is it a file of weights?", names(arrays.iter().copied().take(LISTED))),
        None => names(arrays.iter().copied()),
    };
    if let Some((unknown, _)) = options.inputs.iter().find(|(input, _)| ports.iter().all(|port| port.name != *input)) {
        let ports = ports.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
        return Err(Error::option("data", format!("the model has no input `{unknown}`; its inputs are {ports}")));
    }
    if let Some((_, array)) = options.inputs.iter().find(|(input, _)| *input == port.name) {
        let missing = || Error::option("data", format!("{} has no array `{array}`; it contains {}", path.display(), available()));
        return find(array).map(Some).ok_or_else(missing);
    }
    match (find(&port.name), arrays, ports) {
        (Some(rows), ..) => Ok(Some(rows)),
        (None, [only], [_]) => Ok(Some(only)),
        _ if port.name == "token_type_ids" => Ok(None),
        _ => {
            let missing = format!("the array `{}` for the model's input of this name ({}) is missing", port.name, port.sizes());
            let reason = format!("{missing}: add it, or specify another array with `inputs`; the file contains {}", available());
            Err(Error::option("data", format!("{}: {reason}", path.display())))
        }
    }
}

/// Decodes little-endian elements to one Rust type.
macro_rules! decode {
    ($bytes:expr, $dtype:expr, $to:ty) => {{
        macro_rules! each {
            ($from:ty) => {
                $bytes.chunks_exact(size_of::<$from>()).map(|b| <$from>::from_le_bytes(b.try_into().unwrap_or_default()) as $to).collect()
            };
        }
        match $dtype {
            DType::U8 | DType::BOOL => each!(u8),
            DType::I8 => each!(i8),
            DType::I16 => each!(i16),
            DType::U16 => each!(u16),
            DType::I32 => each!(i32),
            DType::U32 => each!(u32),
            DType::I64 => each!(i64),
            DType::U64 => each!(u64),
            DType::F32 => each!(f32),
            DType::F64 => each!(f64),
            DType::F16 => $bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32() as $to).collect(),
            DType::BF16 => $bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32() as $to).collect(),
            other => return Err(Error::option("data", format!("arrays of dtype {other} are not supported"))),
        }
    }};
}

fn floats(bytes: &[u8], dtype: DType) -> Result<Vec<f32>> {
    Ok(decode!(bytes, dtype, f32))
}

/// Decodes integers; fractions and values outside of i64 are rejected. `what` describes the array in errors.
fn integers(path: &Path, what: impl Fn() -> String, bytes: &[u8], dtype: DType) -> Result<Vec<i64>> {
    if matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::U64) {
        let numbers: Vec<f64> = decode!(bytes, dtype, f64);
        if let Some(wrong) = numbers.iter().find(|x| x.fract() != 0.0 || x.abs() >= i64::MAX as f64) {
            return Err(Error::malformed(path, format!("{} contains {wrong}, but must contain integers of 64 bits", what())));
        }
    }
    Ok(decode!(bytes, dtype, i64))
}

/// Converts elements of an array of a file to the element type of an input; floats are passed through
/// `prepare`.
pub(super) fn tensor(
    (path, name): (&Path, &str),
    port: &Port,
    (dtype, bytes): (DType, &[u8]),
    shape: Vec<usize>,
    prepare: &mut dyn FnMut(&mut [f32]) -> Result<()>,
) -> Result<Tensor> {
    if port.element == Element::Int {
        let what = || format!("array `{name}`, which is the input `{}`,", port.name);
        return Tensor::from_vec(integers(path, what, bytes, dtype)?, shape, &Device::Cpu).map_err(shaped);
    }
    let mut numbers = floats(bytes, dtype)?;
    prepare(&mut numbers)?;
    Tensor::from_vec(numbers, shape, &Device::Cpu).map_err(shaped)
}

/// One row of every array.
struct Sample {
    index: usize,
    inputs: Vec<(DType, Vec<u8>)>,
    label: Option<(DType, Vec<u8>)>,
}

/// How the references of a batch are derived.
enum Targets {
    /// No references.
    None,
    /// Labels are classes, one per sample.
    Classes(Classes),
    /// Labels are the target token ids of an encoder-decoder model; they become references if the flag
    /// is set, for language modelling.
    Decoder(DecoderTargets, bool),
    /// Labels are aligned with the tokens, as in transformers: logits predict them one position earlier,
    /// or at the same position for masked language models.
    Tokens { in_place: bool },
    /// Each token predicts the next token of its row.
    Next,
}

pub(super) struct Arrays {
    path: PathBuf,
    /// Model inputs, with the name of the array and the shape of a sample.
    inputs: Vec<(Port, String, Vec<usize>)>,
    labels: Option<String>,
    count: usize,
    batch: usize,
    targets: Targets,
    /// Vocabulary size, if `config.json` specifies it.
    vocabulary: Option<i64>,
    pixels: Pixels,
}

impl Arrays {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Arrays> {
        let arrays = open(path)?;
        let names = || names(&arrays);
        let default = || LABELS.iter().find_map(|name| arrays.iter().find(|rows| rows.name == *name));
        let find = |name: &str| {
            arrays
                .iter()
                .find(|rows| rows.name == name)
                .ok_or_else(|| Error::option("data", format!("{} has no array `{name}`; it contains {}", path.display(), names())))
        };
        let decodes = target.is_encoder_decoder() && task != Task::Classification;
        let labels = match (&options.label_column, task) {
            (Some(Column::Name(name)), _) => Some(find(name)?),
            (Some(Column::Index(index)), _) => {
                return Err(Error::option("data", format!("`label_column: {index}`: arrays are selected by name; the file contains {}", names())));
            }
            (None, Task::Classification) => Some(default().ok_or_else(|| {
                Error::option("data", format!("{}: specify the array of labels as `label_column`; the file contains {}", path.display(), names()))
            })?),
            (None, _) if decodes || task == Task::LanguageModelling => default(),
            (None, _) => None,
        };
        let targets = match labels {
            Some(_) if decodes => Targets::Decoder(DecoderTargets::from_target(&target)?, task == Task::LanguageModelling),
            Some(_) if task == Task::LanguageModelling => Targets::Tokens { in_place: options::is_masked(&target) },
            Some(_) if task == Task::Classification => Targets::Classes(Classes::from_target(options, &target)),
            None if task == Task::LanguageModelling => options::require_next_tokens(&target).map(|()| Targets::Next)?,
            _ => Targets::None,
        };
        let is_requested = |rows: &Rows| options.inputs.iter().any(|(_, array)| *array == rows.name);
        let is_labels = |rows: &Rows| match labels {
            Some(labels) => labels.name == rows.name,
            // Arrays with default label names are ignored, unless they are model inputs.
            None => LABELS.contains(&rows.name.as_str()) && target.inputs.iter().all(|port| port.name != rows.name),
        };
        let others: Vec<&Rows> = arrays.iter().filter(|rows| !is_labels(rows) || is_requested(rows)).collect();
        let mut inputs = Vec::new();
        let is_given = |name: &str| others.iter().any(|rows| rows.name == name) || options.inputs.iter().any(|(input, _)| input == name);
        let mask = extra_decoder_mask(target.inputs, others.iter().copied());
        for port in target.inputs.iter().chain(&mask) {
            // Missing decoder inputs are derived from the labels.
            if matches!(targets, Targets::Decoder(..)) && [DECODER_INPUT_IDS, DECODER_ATTENTION_MASK].contains(&port.name.as_str()) && !is_given(&port.name) {
                continue;
            }
            if port.name == DECODER_INPUT_IDS && !is_given(DECODER_INPUT_IDS) {
                let names = names();
                let reason = format!(
                    "{}: there is no array for the model's input `{DECODER_INPUT_IDS}`: add it, or `labels` with the \
                    target tokens of the decoder; the file contains {names}",
                    path.display()
                );
                return Err(Error::option("data", reason));
            }
            let Some(rows) = array_for(options, port, target.inputs, &others, path)? else { continue };
            inputs.push((port.clone(), rows.name.clone(), sample_shape(port, rows, path)?));
        }
        require_matching_mask(path, &inputs)?;
        if let (Targets::Decoder(decoder, _), Some(labels)) = (&targets, labels) {
            let [tokens] = labels.sizes() else {
                let reason = format!(
                    "array `{}` has rows of shape {:?}, but the labels of an encoder-decoder model are one row of tokens per sample",
                    labels.name,
                    labels.sizes()
                );
                return Err(Error::malformed(path, reason));
            };
            decoder.require_room(path, &format!("a row of array `{}`", labels.name), *tokens)?;
            let differs = |(port, _, shape): &&(Port, String, Vec<usize>)| {
                [DECODER_INPUT_IDS, DECODER_ATTENTION_MASK].contains(&port.name.as_str()) && shape != &[*tokens]
            };
            if let Some((_, name, shape)) = inputs.iter().find(differs) {
                return Err(Error::malformed(
                    path,
                    format!("array `{name}` has rows of shape {shape:?}, but `{}` of [{tokens}]: there must be one label per token", labels.name),
                ));
            }
        }
        match (&targets, labels) {
            (Targets::Tokens { .. }, Some(labels)) => {
                let tokens = inputs.iter().find(|(port, ..)| port.name == INPUT_IDS);
                let (_, ids, shape) =
                    tokens.ok_or_else(|| Error::option("task", format!("language-modelling requires a model with the input `{INPUT_IDS}`")))?;
                if labels.sizes() != shape {
                    let (name, sizes) = (&labels.name, labels.sizes());
                    let reason = format!(
                        "array `{name}` has rows of shape {sizes:?}, but `{ids}` of {shape:?}: there must be one label per token, {IGNORED} to ignore it"
                    );
                    return Err(Error::malformed(path, reason));
                }
            }
            (Targets::Classes(_), Some(labels)) if element_count(labels.sizes()) != Some(1) => {
                let reason = format!("array `{}` has rows of shape {:?}, but a label must be the index of one class", labels.name, labels.sizes());
                return Err(Error::malformed(path, reason));
            }
            _ => {}
        }
        let used = inputs.iter().map(|(_, name, _)| name).chain(labels.iter().map(|rows| &rows.name));
        require_all_used(path, options, target.inputs, used.clone())?;
        let counts: Vec<(&String, usize)> =
            used.filter_map(|name| arrays.iter().find(|rows| rows.name == *name)).map(|rows| (&rows.name, rows.count())).collect();
        let (first, count) = counts.first().copied().ok_or_else(|| Error::option("data", "the model has no inputs"))?;
        if let Some((name, other)) = counts.iter().find(|(_, other)| *other != count) {
            return Err(Error::malformed(path, format!("array `{name}` has {other} rows, but `{first}` has {count}")));
        }
        let tokens = inputs.iter().find_map(|(port, _, shape)| if port.element == Element::Int { shape.first().copied() } else { None });
        Ok(Arrays {
            path: path.to_owned(),
            labels: labels.filter(|_| !matches!(targets, Targets::None)).map(|rows| rows.name.clone()),
            inputs,
            count: count.min(options.samples.unwrap_or(usize::MAX)),
            batch: options.batch(task, tokens),
            targets,
            vocabulary: arch::text_values(target.config).get("vocab_size").and_then(Value::as_i64),
            pixels: Pixels::plain(options)?,
        })
    }

    /// For each row of tokens, the range of positions without padding.
    fn attended(&self, batch: &Batch, samples: &[Sample]) -> Result<Vec<Range<usize>>> {
        let unusable = |reason: String| Error::malformed(&self.path, reason);
        let rows =
            |tensor: Option<&Tensor>| tensor.map(|tensor| tensor.to_vec2::<i64>()).transpose().map_err(|e| unusable(format!("an array of token ids: {e}")));
        let role = batch.output_role();
        let ids = rows(batch.tokens(role))?.ok_or_else(|| Error::option("task", "language-modelling requires a model with the input `input_ids`"))?;
        let masks = rows(batch.mask(role))?;
        let index = |row: usize| samples.get(row).map_or(row, |sample| sample.index);
        let positions = |(row, ids): (usize, &Vec<i64>)| {
            let is_token = |at: &usize| masks.as_ref().and_then(|masks| masks.get(row)).and_then(|mask| mask.get(*at)).is_none_or(|mask| *mask != 0);
            let (first, last) = ((0..ids.len()).find(is_token), (0..ids.len()).rfind(is_token));
            let (Some(first), Some(last)) = (first, last.map(|last| last.saturating_add(1))) else { return Ok(0..0) };
            match (first..last).all(|at| is_token(&at)) {
                true => Ok(first..last),
                false => Err(unusable(format!("the attention mask of row {} has padding between tokens; only padding at the ends is supported", index(row)))),
            }
        };
        ids.iter().enumerate().map(positions).collect()
    }

    /// For each sample, the target of the logits at each position. Labels of padding are ignored.
    fn labelled(&self, batch: &Batch, samples: &[Sample], labels: &[(usize, Vec<i64>)], in_place: bool) -> Result<Vec<Vec<Option<i64>>>> {
        let name = self.labels.as_deref().unwrap_or_default();
        let ids = batch.tokens(SequenceRole::Input).map(Tensor::to_vec2::<i64>).transpose().map_err(shaped)?.unwrap_or_default();
        let attended = self.attended(batch, samples)?;
        let rows = ids.iter().zip(labels).zip(attended).map(|((ids, (index, labels)), attended)| {
            let row = format!("row {index} of array `{name}`");
            require_tokens(self.vocabulary, &self.path, &row, labels)?;
            let first = if in_place { attended.start } else { attended.start.saturating_add(1) };
            let target = |at: usize| labels.get(at).copied().filter(|label| (first..attended.end).contains(&at) && *label != IGNORED);
            let targets: Vec<(usize, i64)> = (0..labels.len()).filter_map(|at| Some((at, target(at)?))).collect();
            let is_next = |(at, label): &(usize, i64)| ids.get(at.saturating_add(1)).is_none_or(|next| next == label);
            let is_own = |(at, label): &(usize, i64)| ids.get(*at) == Some(label);
            if !in_place && targets.len() > 1 && targets.iter().all(is_next) && !targets.iter().all(is_own) {
                let reason = format!("{row} is shifted by one token: labels must be aligned with the tokens, as for transformers; compress shifts them");
                return Err(Error::malformed(&self.path, reason));
            }
            Ok((0..labels.len()).map(|at| target(if in_place { at } else { at.saturating_add(1) })).collect())
        });
        rows.collect()
    }

    fn batch(&self, samples: &[Sample]) -> Result<Batch> {
        let (mut named, count) = (std::collections::BTreeMap::new(), samples.len());
        for (at, (port, name, sample)) in self.inputs.iter().enumerate() {
            let rows = || samples.iter().filter_map(|sample| sample.inputs.get(at));
            let dtype = rows().next().map_or(DType::F32, |(dtype, _)| *dtype);
            let bytes: Vec<u8> = rows().flat_map(|(_, row)| row).copied().collect();
            let shape: Vec<usize> = [count].iter().chain(sample).copied().collect();
            let tensor = tensor((&self.path, name), port, (dtype, &bytes), shape, &mut |numbers| {
                let channels = if let [channels, _, _] = **sample { channels } else { 1 };
                numbers.chunks_mut(sample.iter().product::<usize>().max(1)).try_for_each(|row| self.pixels.normalize(row, channels))
            })?;
            named.insert(port.name.clone(), tensor);
        }
        let mut labels = Vec::new();
        for sample in samples {
            if let Some((dtype, bytes)) = &sample.label {
                let what = || format!("row {} of array `{}`", sample.index, self.labels.as_deref().unwrap_or_default());
                labels.push((sample.index, integers(&self.path, what, bytes, *dtype)?));
            }
        }
        if let Targets::Decoder(decoder, has_references) = &self.targets {
            let name = self.labels.as_deref().unwrap_or_default();
            labels.iter().try_for_each(|(index, row)| require_tokens(self.vocabulary, &self.path, &format!("row {index} of array `{name}`"), row))?;
            let targets: Vec<_> = labels.iter().map(|(_, row)| decoder.targets(row)).collect();
            decoder.add_inputs(&mut named, &targets)?;
            let references = if *has_references { References::Tokens(targets) } else { References::None };
            return Ok(Batch { inputs: named, references, samples: count });
        }
        let batch = Batch { inputs: named, references: References::None, samples: count };
        let references = match &self.targets {
            Targets::Classes(classes) => {
                let name = self.labels.as_deref().unwrap_or_default();
                let labels = labels.into_iter().flat_map(|(index, row)| row.into_iter().map(move |label| (index, label)));
                classes.references(labels, &self.path, |index| format!("row {index} of array `{name}`"))?
            }
            Targets::Tokens { in_place } => References::Tokens(self.labelled(&batch, samples, &labels, *in_place)?),
            Targets::Next => References::Next(self.attended(&batch, samples)?.into_iter().map(|tokens| tokens.start.saturating_add(1)..tokens.end).collect()),
            Targets::Decoder(..) | Targets::None => References::None,
        };
        Ok(Batch { references, ..batch })
    }
}

/// A port for the decoder attention mask, if the data has one but the model does not take it: it still
/// marks padding.
pub(super) fn extra_decoder_mask<'r>(ports: &[Port], mut arrays: impl Iterator<Item = &'r Rows>) -> Option<Port> {
    let has_port = |name: &str| ports.iter().any(|port| port.name == name);
    let is_extra = has_port(DECODER_INPUT_IDS) && !has_port(DECODER_ATTENTION_MASK) && arrays.any(|rows| rows.name == DECODER_ATTENTION_MASK);
    is_extra.then(|| Port { name: DECODER_ATTENTION_MASK.to_owned(), element: Element::Int, shape: vec![None, None], number: None })
}

/// Checks that decoder token ids and their mask have the same shape.
pub(super) fn require_matching_mask(path: &Path, inputs: &[(Port, String, Vec<usize>)]) -> Result<()> {
    let find = |name: &str| inputs.iter().find(|(port, ..)| port.name == name);
    match (find(DECODER_INPUT_IDS), find(DECODER_ATTENTION_MASK)) {
        (Some((_, ids, expected)), Some((_, mask, shape))) if shape != expected => {
            let reason = format!("array `{ids}` has the shape {expected:?}, but its mask `{mask}` is {shape:?}: a mask has one element per token");
            Err(Error::malformed(path, reason))
        }
        _ => Ok(()),
    }
}

/// The shape of a sample for an input.
fn sample_shape(port: &Port, rows: &Rows, path: &Path) -> Result<Vec<usize>> {
    rows.row_bytes()?;
    if port.shape.is_empty() {
        let reason = format!("the model's input `{}` is a scalar without a batch axis: use a folder with one file of arrays per run", port.name);
        return Err(Error::option("data", format!("{}: {reason}", path.display())));
    }
    let expected = port.shape.get(1..).unwrap_or(&[]);
    matched_shape(rows.sizes(), expected).ok_or_else(|| {
        let reason = format!("array `{}` has rows of shape {:?}, but the model's input `{}` is {}", rows.name, rows.sizes(), port.name, port.sizes());
        let batched: Vec<usize> = [rows.count()].iter().chain(rows.sizes()).copied().collect();
        Error::malformed(path, format!("{reason}{}", transposition_hint(&batched, &port.shape)))
    })
}

impl SampleSource for Arrays {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        let mut arrays = open(&self.path)?;
        let mut take = move |name: &str| {
            let missing = || Error::malformed(&self.path, format!("array `{name}` no longer exists"));
            let rows = arrays.iter_mut().find(|rows| rows.name == name).ok_or_else(missing)?;
            Ok((rows.dtype, rows.next()?))
        };
        let bytes = self.inputs.iter().filter_map(|(_, _, sample)| byte_count(DType::F32, sample)).fold(0, u64::saturating_add) as usize;
        let read = move |index| {
            let inputs = self.inputs.iter().map(|(_, name, _)| take(name)).collect::<Result<Vec<_>>>()?;
            Ok(Sample { index, inputs, label: self.labels.as_ref().map(|name| take(name)).transpose()? })
        };
        Ok(in_batches((0..self.count).map(read), self.batch, bytes, order, |samples| self.batch(samples)))
    }

    fn count(&self) -> Result<usize> {
        Ok(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SynthesizedFiles;

    #[test]
    fn missing_arrays_are_named() {
        let port = |name: &str| Port { name: name.to_owned(), element: Element::Int, shape: vec![None, None], number: None };
        let ports = ["input_ids", "attention_mask"].map(port);
        let error = array_for(&Data::default(), &ports[1], &ports, &[], Path::new("samples.safetensors")).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("the array `attention_mask` for the model's input of this name"), "{error}");
    }

    /// Exported ONNX models may take the mask; it is derived from the labels like the tokens.
    #[test]
    fn decoder_inputs_are_derived_from_labels() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arrays.safetensors");
        let tensor = |values: &[i64]| Tensor::from_slice(values, (2, 3), &Device::Cpu).unwrap();
        let arrays: std::collections::HashMap<_, _> =
            [("input_ids".to_owned(), tensor(&[5, 6, 7, 8, 9, 1])), ("labels".to_owned(), tensor(&[4, 1, -100, 3, 2, 1]))].into();
        candle_core::safetensors::save(&arrays, &path).unwrap();
        let synthesized = SynthesizedFiles::default();
        let config = serde_json::from_str(r#"{ "decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": 10 }"#).unwrap();
        let port = |name: &str| Port { name: name.to_owned(), element: Element::Int, shape: vec![None, None], number: None };
        let inputs = ["input_ids", DECODER_INPUT_IDS, DECODER_ATTENTION_MASK].map(port);
        let target = Target { inputs: &inputs, ..Target::new(folder.path(), &synthesized, &config) };
        let source = Arrays::open(&Data::default(), &path, Task::LanguageModelling, target).unwrap();
        let row = |index: usize, values: [i64; 3]| {
            let bytes = |values: [i64; 3]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
            Sample { index, inputs: vec![(DType::I64, bytes([5, 6, 7]))], label: Some((DType::I64, bytes(values))) }
        };
        let batch = source.batch(&[row(0, [4, 1, -100]), row(1, [3, 2, 1])]).unwrap();
        let read = |name: &str| batch.inputs[name].to_vec2::<i64>().unwrap();
        assert_eq!((read(DECODER_INPUT_IDS), read(DECODER_ATTENTION_MASK)), (vec![vec![0, 4, 1], vec![0, 3, 2]], vec![vec![1, 1, 0], vec![1, 1, 1]]));
        let refused = source.batch(&[row(7, [4, 10, 1])]).unwrap_err().to_string();
        assert!(refused.contains("arrays.safetensors: row 7 of array `labels` has label 10"), "{refused}");
        let fraction = Sample { label: Some((DType::F32, 1.5f32.to_le_bytes().to_vec())), ..row(7, [4, 1, 1]) };
        let refused = source.batch(&[fraction]).unwrap_err().to_string();
        assert!(refused.contains("arrays.safetensors: row 7 of array `labels` contains 1.5"), "{refused}");
    }
}

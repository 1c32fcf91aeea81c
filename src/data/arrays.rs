//! Arrays with a row for each sample: safetensors, NumPy's .npz, or a folder of .npy.

use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use serde_json::Value;

use super::labels::{Classes, IGNORED};
use super::options::{self, Column, Data, Task};
use super::pixels::Pixels;
use super::rows::{self, Rows, require_all_read};
use super::said::{Decoder, require_tokens};
use super::side::{DECODED, DECODED_MASK, Side, TOKENS};
use super::{Batch, Order, PendingBatches, Port, References, SampleSource, Target, in_batches, shaped};
use crate::error::{Error, Result};
use crate::ir::Element;
use crate::store::DType;
use crate::store::header::{byte_count, element_count};

/// Axes of an array for which transpositions are searched.
const MOST_AXES: usize = 6;

pub(super) const LABELS: [&str; 3] = ["labels", "label", "y"];

/// Whether a file or folder has an array of labels by one of the usual names.
pub(super) fn has_labels(path: &Path) -> Result<bool> {
    if path.is_dir() {
        return Ok(LABELS.iter().any(|name| path.join(format!("{name}.npy")).is_file()));
    }
    Ok(open(path)?.iter().any(|rows| LABELS.contains(&rows.name.as_str())))
}

/// Whether a folder holds arrays.
pub(super) fn are_in(folder: &Path) -> bool {
    folder.is_dir() && rows::files(folder).is_ok_and(|files| !files.is_empty())
}

/// Arrays that have rows.
fn open(path: &Path) -> Result<Vec<Rows>> {
    Ok(rows::open(path)?.into_iter().filter(|rows| !rows.shape.is_empty()).collect())
}

pub(super) fn names<'r>(arrays: impl IntoIterator<Item = &'r Rows>) -> String {
    arrays.into_iter().map(|rows| format!("`{}`", rows.name)).collect::<Vec<_>>().join(", ")
}

/// The array for an input: the one that is named for it, has its name, or is the only one for the only input; nothing where the input need not be given.
pub(super) fn chosen<'r>(options: &Data, port: &Port, ports: &[Port], arrays: &[&'r Rows], path: &Path) -> Result<Option<&'r Rows>> {
    let find = |name: &str| arrays.iter().find(|rows| rows.name == name).copied();
    let there = || names(arrays.iter().copied());
    if let Some((unknown, _)) = options.inputs.iter().find(|(input, _)| ports.iter().all(|port| port.name != *input)) {
        let ports = ports.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
        return Err(Error::option("data", format!("the model has no input `{unknown}`; it takes {ports}")));
    }
    if let Some((_, array)) = options.inputs.iter().find(|(input, _)| *input == port.name) {
        let missing = || Error::option("data", format!("{} has no array `{array}`; there are {}", path.display(), there()));
        return find(array).map(Some).ok_or_else(missing);
    }
    match (find(&port.name), arrays, ports) {
        (Some(rows), ..) => Ok(Some(rows)),
        (None, [only], [_]) => Ok(Some(only)),
        _ if port.name == "token_type_ids" => Ok(None),
        _ => {
            let (name, sizes) = (&port.name, port.sizes());
            let reason = format!("{}: say which array goes to the model's input `{name}` ({sizes}) with `inputs`; there are {}", path.display(), there());
            Err(Error::option("data", reason))
        }
    }
}

/// Elements as numbers of one kind.
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
            other => return Err(Error::option("data", format!("elements {other} are not read"))),
        }
    }};
}

fn floats(bytes: &[u8], dtype: DType) -> Result<Vec<f32>> {
    Ok(decode!(bytes, dtype, f32))
}

/// Whole numbers; fractions and what is larger than any index are refused.
fn integers(bytes: &[u8], dtype: DType) -> Result<Vec<i64>> {
    if matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::U64) {
        let numbers: Vec<f64> = decode!(bytes, dtype, f64);
        if let Some(wrong) = numbers.iter().find(|x| x.fract() != 0.0 || x.abs() >= i64::MAX as f64) {
            return Err(Error::option("data", format!("{wrong} stands where indices are wanted")));
        }
    }
    Ok(decode!(bytes, dtype, i64))
}

/// Elements as an input takes them; floats are prepared first.
pub(super) fn tensor(port: &Port, bytes: &[u8], dtype: DType, shape: Vec<usize>, prepare: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<Tensor> {
    if port.element == Element::Int {
        return Tensor::from_vec(integers(bytes, dtype)?, shape, &Device::Cpu).map_err(shaped);
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
    /// Nothing.
    None,
    /// Labels are classes, one for each sample.
    Classes(Classes),
    /// Labels are the target ids of a decoder with an encoder; they count where the task is language modelling.
    Decoder(Decoder, bool),
    /// Labels are the tokens at their own places, as in transformers: logits predict them one place earlier, or in place where the model
    /// fills in masked tokens.
    Tokens { in_place: bool },
    /// Each token predicts the next one of its row.
    Next,
}

pub(super) struct Arrays {
    path: PathBuf,
    /// For each input, the name of its array and the shape of a sample.
    inputs: Vec<(Port, String, Vec<usize>)>,
    labels: Option<String>,
    count: usize,
    batch: usize,
    targets: Targets,
    /// Size of the vocabulary, where `config.json` specifies it.
    vocabulary: Option<i64>,
    pixels: Pixels,
}

impl Arrays {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Arrays> {
        let arrays = open(path)?;
        let names = || names(&arrays);
        let usual = || LABELS.iter().find_map(|name| arrays.iter().find(|rows| rows.name == *name));
        let find = |name: &str| {
            arrays
                .iter()
                .find(|rows| rows.name == name)
                .ok_or_else(|| Error::option("data", format!("{} has no array `{name}`; there are {}", path.display(), names())))
        };
        let decodes = target.decodes() && task != Task::Classification;
        let labels = match (&options.label_column, task) {
            (Some(Column::Name(name)), _) => Some(find(name)?),
            (Some(Column::Index(index)), _) => return Err(Error::option("data", format!("`label_column: {index}`: arrays have names; there are {}", names()))),
            (None, Task::Classification) => Some(
                usual()
                    .ok_or_else(|| Error::option("data", format!("{}: name the array of labels as `label_column`; there are {}", path.display(), names())))?,
            ),
            (None, _) if decodes || task == Task::LanguageModelling => usual(),
            (None, _) => None,
        };
        let targets = match labels {
            Some(_) if decodes => Targets::Decoder(Decoder::of(&target)?, task == Task::LanguageModelling),
            Some(_) if task == Task::LanguageModelling => Targets::Tokens { in_place: options::is_masked(&target) },
            Some(_) if task == Task::Classification => Targets::Classes(Classes::of(options, &target)),
            None if task == Task::LanguageModelling => options::require_next_tokens(&target).map(|()| Targets::Next)?,
            _ => Targets::None,
        };
        let asked = |rows: &Rows| options.inputs.iter().any(|(_, array)| *array == rows.name);
        let is_labels = |rows: &Rows| match labels {
            Some(labels) => labels.name == rows.name,
            // Of these, labels are not looked at.
            None => LABELS.contains(&rows.name.as_str()) && target.inputs.iter().all(|port| port.name != rows.name),
        };
        let others: Vec<&Rows> = arrays.iter().filter(|rows| !is_labels(rows) || asked(rows)).collect();
        let mut inputs = Vec::new();
        let given = |name: &str| others.iter().any(|rows| rows.name == name) || options.inputs.iter().any(|(input, _)| input == name);
        let mask = untaken_mask(target.inputs, others.iter().copied());
        for port in target.inputs.iter().chain(&mask) {
            // What is not given is made of labels.
            if matches!(targets, Targets::Decoder(..)) && [DECODED, DECODED_MASK].contains(&port.name.as_str()) && !given(&port.name) {
                continue;
            }
            if port.name == DECODED && !given(DECODED) {
                let names = names();
                let reason = format!(
                    "{}: no array is for the model's input `{DECODED}`, the tokens that its decoder is given: give it, or \
                    `labels`, those that it is to say; there are {names}",
                    path.display()
                );
                return Err(Error::option("data", reason));
            }
            let Some(rows) = chosen(options, port, target.inputs, &others, path)? else { continue };
            inputs.push((port.clone(), rows.name.clone(), sample(port, rows, path)?));
        }
        require_one_shape(path, &inputs)?;
        if let (Targets::Decoder(decoder, _), Some(labels)) = (&targets, labels) {
            let [tokens] = labels.sizes() else {
                let reason = format!("array `{}` has rows of {:?}, and the decoder is to say a row of tokens for each sample", labels.name, labels.sizes());
                return Err(Error::malformed(path, reason));
            };
            decoder.require_room(path, &format!("a row of array `{}`", labels.name), *tokens)?;
            let said = |(port, _, shape): &&(Port, String, Vec<usize>)| [DECODED, DECODED_MASK].contains(&port.name.as_str()) && shape != &[*tokens];
            if let Some((_, name, shape)) = inputs.iter().find(said) {
                return Err(Error::malformed(
                    path,
                    format!("array `{name}` has rows of {shape:?}, `{}` of [{tokens}]: one label is for each token", labels.name),
                ));
            }
        }
        match (&targets, labels) {
            (Targets::Tokens { .. }, Some(labels)) => {
                let tokens = inputs.iter().find(|(port, ..)| port.name == TOKENS);
                let (_, ids, shape) = tokens.ok_or_else(|| Error::option("task", format!("language-modelling needs a model that takes `{TOKENS}`")))?;
                if labels.sizes() != shape {
                    let (name, sizes) = (&labels.name, labels.sizes());
                    let reason =
                        format!("array `{name}` has rows of {sizes:?}, `{ids}` of {shape:?}: one label is for each token, {IGNORED} where it does not count");
                    return Err(Error::malformed(path, reason));
                }
            }
            (Targets::Classes(_), Some(labels)) if element_count(labels.sizes()) != Some(1) => {
                let reason = format!("array `{}` has rows of {:?}, and a label is the number of one class", labels.name, labels.sizes());
                return Err(Error::malformed(path, reason));
            }
            _ => {}
        }
        let used = inputs.iter().map(|(_, name, _)| name).chain(labels.iter().map(|rows| &rows.name));
        require_all_read(path, options, target.inputs, used.clone())?;
        let counts: Vec<(&String, usize)> =
            used.filter_map(|name| arrays.iter().find(|rows| rows.name == *name)).map(|rows| (&rows.name, rows.count())).collect();
        let (first, count) = counts.first().copied().ok_or_else(|| Error::option("data", "the model takes nothing"))?;
        if let Some((name, other)) = counts.iter().find(|(_, other)| *other != count) {
            return Err(Error::malformed(path, format!("array `{name}` has {other} rows, `{first}` has {count}")));
        }
        let tokens = inputs.iter().find_map(|(port, _, shape)| if port.element == Element::Int { shape.first().copied() } else { None });
        Ok(Arrays {
            path: path.to_owned(),
            labels: labels.filter(|_| !matches!(targets, Targets::None)).map(|rows| rows.name.clone()),
            inputs,
            count: count.min(options.samples.unwrap_or(usize::MAX)),
            batch: options.batch(task, tokens),
            targets,
            vocabulary: target.config.get("vocab_size").and_then(Value::as_i64),
            pixels: Pixels::plain(options),
        })
    }

    /// Of each row of tokens, the places without padding.
    fn attended(&self, batch: &Batch, samples: &[Sample]) -> Result<Vec<Range<usize>>> {
        let unusable = |reason: String| Error::malformed(&self.path, reason);
        let rows = |tensor: Option<&Tensor>| tensor.map(|tensor| tensor.to_vec2::<i64>()).transpose().map_err(|e| unusable(format!("an array of tokens: {e}")));
        let side = batch.answered();
        let ids = rows(batch.tokens(side))?.ok_or_else(|| Error::option("task", "language-modelling needs a model that takes `input_ids`"))?;
        let masks = rows(batch.mask(side))?;
        let index = |row: usize| samples.get(row).map_or(row, |sample| sample.index);
        let places = |(row, ids): (usize, &Vec<i64>)| {
            let seen = |at: &usize| masks.as_ref().and_then(|masks| masks.get(row)).and_then(|mask| mask.get(*at)).is_none_or(|seen| *seen != 0);
            let (first, last) = ((0..ids.len()).find(seen), (0..ids.len()).rfind(seen));
            let (Some(first), Some(last)) = (first, last.map(|last| last.saturating_add(1))) else { return Ok(0..0) };
            match (first..last).all(|at| seen(&at)) {
                true => Ok(first..last),
                false => Err(unusable(format!("the mask of the tokens of row {} has padding between tokens, across which nothing is predicted", index(row)))),
            }
        };
        ids.iter().enumerate().map(places).collect()
    }

    /// For each sample, the label that the logits at each place predict. Labels of padding do not count.
    fn labelled(&self, batch: &Batch, samples: &[Sample], labels: &[(usize, Vec<i64>)], in_place: bool) -> Result<Vec<Vec<Option<i64>>>> {
        let name = self.labels.as_deref().unwrap_or_default();
        let ids = batch.tokens(Side::Read).map(Tensor::to_vec2::<i64>).transpose().map_err(shaped)?.unwrap_or_default();
        let attended = self.attended(batch, samples)?;
        let rows = ids.iter().zip(labels).zip(attended).map(|((ids, (index, labels)), attended)| {
            let row = format!("row {index} of array `{name}`");
            require_tokens(self.vocabulary, &self.path, &row, labels)?;
            let first = if in_place { attended.start } else { attended.start.saturating_add(1) };
            let counts = |at: usize| labels.get(at).copied().filter(|label| (first..attended.end).contains(&at) && *label != IGNORED);
            let counted: Vec<(usize, i64)> = (0..labels.len()).filter_map(|at| Some((at, counts(at)?))).collect();
            let is_next = |(at, label): &(usize, i64)| ids.get(at.saturating_add(1)).is_none_or(|next| next == label);
            let is_own = |(at, label): &(usize, i64)| ids.get(*at) == Some(label);
            if !in_place && counted.len() > 1 && counted.iter().all(is_next) && !counted.iter().all(is_own) {
                let reason = format!("{row} is shifted by one token: give each token its own label, as to transformers; compress shifts them");
                return Err(Error::malformed(&self.path, reason));
            }
            Ok((0..labels.len()).map(|at| counts(if in_place { at } else { at.saturating_add(1) })).collect())
        });
        rows.collect()
    }

    fn batch(&self, samples: &[Sample]) -> Result<Batch> {
        let (mut named, count) = (std::collections::BTreeMap::new(), samples.len());
        for (at, (port, _, sample)) in self.inputs.iter().enumerate() {
            let rows = || samples.iter().filter_map(|sample| sample.inputs.get(at));
            let dtype = rows().next().map_or(DType::F32, |(dtype, _)| *dtype);
            let bytes: Vec<u8> = rows().flat_map(|(_, row)| row).copied().collect();
            let shape: Vec<usize> = [count].iter().chain(sample).copied().collect();
            let tensor = tensor(port, &bytes, dtype, shape, &mut |numbers| {
                let channels = if let [channels, _, _] = **sample { channels } else { 1 };
                numbers.chunks_mut(sample.iter().product::<usize>().max(1)).try_for_each(|row| self.pixels.normalize(row, channels))
            })?;
            named.insert(port.name.clone(), tensor);
        }
        let mut labels = Vec::new();
        for sample in samples {
            if let Some((dtype, bytes)) = &sample.label {
                labels.push((sample.index, integers(bytes, *dtype)?));
            }
        }
        if let Targets::Decoder(decoder, counts) = &self.targets {
            let name = self.labels.as_deref().unwrap_or_default();
            labels.iter().try_for_each(|(index, row)| require_tokens(self.vocabulary, &self.path, &format!("row {index} of array `{name}`"), row))?;
            let said: Vec<_> = labels.iter().map(|(_, row)| decoder.asked(row)).collect();
            decoder.give(&mut named, &said)?;
            let references = if *counts { References::Tokens(said) } else { References::None };
            return Ok(Batch { inputs: named, references, samples: count });
        }
        let batch = Batch { inputs: named, references: References::None, samples: count };
        let references = match &self.targets {
            Targets::Classes(classes) => {
                classes.references(labels.into_iter().flat_map(|(index, row)| row.into_iter().map(move |label| (index, label))), &self.path)?
            }
            Targets::Tokens { in_place } => References::Tokens(self.labelled(&batch, samples, &labels, *in_place)?),
            Targets::Next => References::Next(self.attended(&batch, samples)?.into_iter().map(|places| places.start.saturating_add(1)..places.end).collect()),
            Targets::Decoder(..) | Targets::None => References::None,
        };
        Ok(Batch { references, ..batch })
    }
}

/// The mask of a decoder's tokens, where it is given to a model that only looks back and does not take it: what counts is told by it all
/// the same.
pub(super) fn untaken_mask<'r>(ports: &[Port], mut arrays: impl Iterator<Item = &'r Rows>) -> Option<Port> {
    let takes = |name: &str| ports.iter().any(|port| port.name == name);
    let given = takes(DECODED) && !takes(DECODED_MASK) && arrays.any(|rows| rows.name == DECODED_MASK);
    given.then(|| Port { name: DECODED_MASK.to_owned(), element: Element::Int, shape: vec![None, None], number: None })
}

/// Holds the mask of a decoder's tokens to them; inputs with their arrays and shapes.
pub(super) fn require_one_shape(path: &Path, inputs: &[(Port, String, Vec<usize>)]) -> Result<()> {
    let find = |name: &str| inputs.iter().find(|(port, ..)| port.name == name);
    match (find(DECODED), find(DECODED_MASK)) {
        (Some((_, ids, wanted)), Some((_, mask, shape))) if shape != wanted => {
            let reason = format!("the tokens of array `{ids}` are {wanted:?}, their mask `{mask}` is {shape:?}: a mask has a number for each token");
            Err(Error::malformed(path, reason))
        }
        _ => Ok(()),
    }
}

/// The shape in which rows go to an input.
fn sample(port: &Port, rows: &Rows, path: &Path) -> Result<Vec<usize>> {
    rows.row()?;
    if port.shape.is_empty() {
        let reason = format!("the model's input `{}` is one number and has no rows: give a folder with one file of arrays for each run", port.name);
        return Err(Error::option("data", format!("{}: {reason}", path.display())));
    }
    let wanted = port.shape.get(1..).unwrap_or(&[]);
    matched_shape(rows.sizes(), wanted).ok_or_else(|| {
        let reason = format!("array `{}` has rows of {:?}, the model's input `{}` is {}", rows.name, rows.sizes(), port.name, port.sizes());
        let batched: Vec<usize> = [rows.count()].iter().chain(rows.sizes()).copied().collect();
        Error::malformed(path, format!("{reason}{}", transposition_hint(&batched, &port.shape)))
    })
}

/// The shape of a row that matches an input: the row's own shape, or the same axes with axes of length 1 added or removed. The order of
/// elements in memory is unchanged by either. Rows of any other shape are rejected, even with the right number of elements: their axes may be
/// permuted.
fn matched_shape(own: &[usize], wanted: &[Option<usize>]) -> Option<Vec<usize>> {
    let fits =
        |own: &[usize], wanted: &[Option<usize>]| own.len() == wanted.len() && own.iter().zip(wanted).all(|(have, want)| want.is_none_or(|w| w == *have));
    if fits(own, wanted) {
        return Some(own.to_vec());
    }
    let long: Vec<usize> = own.iter().copied().filter(|size| *size != 1).collect();
    let open: Vec<Option<usize>> = wanted.iter().copied().filter(|size| *size != Some(1)).collect();
    if own.len() == wanted.len() || !fits(&long, &open) {
        return None;
    }
    let mut sizes = long.into_iter();
    wanted.iter().map(|want| if *want == Some(1) { Some(1) } else { sizes.next() }).collect()
}

/// The NumPy transposition after which an array fits an input with the same number of axes, as the end of an error message.
pub(super) fn transposition_hint(own: &[usize], wanted: &[Option<usize>]) -> String {
    fn search(own: &[usize], wanted: &[Option<usize>], axes: &mut Vec<usize>) -> bool {
        let Some((first, rest)) = wanted.split_first() else { return true };
        for (axis, size) in own.iter().enumerate() {
            if axes.contains(&axis) || first.is_some_and(|first| first != *size) {
                continue;
            }
            axes.push(axis);
            if search(own, rest, axes) {
                return true;
            }
            axes.pop();
        }
        false
    }
    // The axis of samples stays first.
    let mut axes = vec![0];
    if own.len() != wanted.len() || own.len() > MOST_AXES || !search(own, wanted.get(1..).unwrap_or(&[]), &mut axes) {
        return String::new();
    }
    let axes = axes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("; transpose the array with numpy.transpose(array, ({axes}))")
}

impl SampleSource for Arrays {
    fn works(&self, order: Order) -> Result<PendingBatches<'_>> {
        let mut arrays = open(&self.path)?;
        let mut take = move |name: &str| {
            let gone = || Error::malformed(&self.path, format!("array `{name}` is gone"));
            let rows = arrays.iter_mut().find(|rows| rows.name == name).ok_or_else(gone)?;
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
    use crate::model::Made;

    #[test]
    fn permuted_axes_are_rejected_with_the_transposition_that_fits() {
        let fixed = |sizes: &[usize]| sizes.iter().copied().map(Some).collect::<Vec<_>>();
        assert_eq!(matched_shape(&[3, 4, 5], &[Some(3), None, None]), Some(vec![3, 4, 5]));
        assert_eq!(matched_shape(&[28, 28], &fixed(&[1, 28, 28])), Some(vec![1, 28, 28]));
        assert_eq!(matched_shape(&[1, 28, 28], &fixed(&[28, 28])), Some(vec![28, 28]));
        for (own, wanted) in [(&[3, 4, 4][..], &[4, 4, 3][..]), (&[28, 1, 28], &[1, 28, 28]), (&[784], &[1, 28, 28]), (&[2, 3], &[3, 2])] {
            assert_eq!(matched_shape(own, &fixed(wanted)), None, "{own:?} {wanted:?}");
        }
        let hint = transposition_hint(&[8, 3, 224, 224], &[None, Some(224), Some(224), Some(3)]);
        assert!(hint.contains("(0, 2, 3, 1)"), "{hint}");
        assert!(transposition_hint(&[8, 224, 224, 3], &[None, Some(3), None, None]).contains("(0, 3, 1, 2)"));
        assert_eq!(transposition_hint(&[8, 784], &[None, Some(1), Some(28), Some(28)]), "");
    }

    /// Files .onnx may take the mask; it is made of labels, as the tokens are.
    #[test]
    fn labels_alone_do_for_a_decoder_that_takes_a_mask() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arrays.safetensors");
        let tensor = |values: &[i64]| Tensor::from_slice(values, (2, 3), &Device::Cpu).unwrap();
        let arrays: std::collections::HashMap<_, _> =
            [("input_ids".to_owned(), tensor(&[5, 6, 7, 8, 9, 1])), ("labels".to_owned(), tensor(&[4, 1, -100, 3, 2, 1]))].into();
        candle_core::safetensors::save(&arrays, &path).unwrap();
        let config = serde_json::from_str(r#"{ "decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": 10 }"#).unwrap();
        let port = |name: &str| Port { name: name.to_owned(), element: Element::Int, shape: vec![None, None], number: None };
        let inputs = ["input_ids", DECODED, DECODED_MASK].map(port);
        let target = Target { folder: folder.path(), made: &Made::default(), config: &config, inputs: &inputs, outputs: &[] };
        let source = Arrays::open(&Data::default(), &path, Task::LanguageModelling, target).unwrap();
        let row = |index: usize, values: [i64; 3]| {
            let bytes = |values: [i64; 3]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
            Sample { index, inputs: vec![(DType::I64, bytes([5, 6, 7]))], label: Some((DType::I64, bytes(values))) }
        };
        let batch = source.batch(&[row(0, [4, 1, -100]), row(1, [3, 2, 1])]).unwrap();
        let read = |name: &str| batch.inputs[name].to_vec2::<i64>().unwrap();
        assert_eq!((read(DECODED), read(DECODED_MASK)), (vec![vec![0, 4, 1], vec![0, 3, 2]], vec![vec![1, 1, 0], vec![1, 1, 1]]));
        let refused = source.batch(&[row(7, [4, 10, 1])]).unwrap_err().to_string();
        assert!(refused.contains("arrays.safetensors: row 7 of array `labels` has label 10"), "{refused}");
    }
}

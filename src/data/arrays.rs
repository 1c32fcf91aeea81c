//! Arrays with a row for each sample: safetensors, or NumPy's .npz.

use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use flate2::read::DeflateDecoder;
use half::{bf16, f16};
use npyz::{Endianness, NpyHeader, TypeChar};

use super::labels::Classes;
use super::options::{Column, Data, Task};
use super::pixels::Pixels;
use super::{Batch, LARGEST, Order, PendingBatches, Port, References, SampleSource, Target, in_batches, shaped};
use crate::error::{Error, Result};
use crate::files::File;
use crate::ir::Element;
use crate::store::header::{byte_count, element_count};
use crate::store::{Checkpoint, DType, RawTensor};

const LABELS: [&str; 3] = ["labels", "label", "y"];

/// Bytes of a header at most; NumPy takes no longer ones either.
const HEADER: u32 = 10_000;

/// An array that is read row by row.
struct Rows {
    name: String,
    path: PathBuf,
    dtype: DType,
    shape: Vec<usize>,
    from: From,
}

enum From {
    Tensor { tensor: RawTensor, at: u64 },
    Stream(Box<dyn Read + Send>),
}

impl Rows {
    /// Sizes of a row.
    fn sizes(&self) -> &[usize] {
        self.shape.get(1..).unwrap_or(&[])
    }

    /// Bytes of a row.
    fn row(&self) -> Result<u64> {
        let bytes = byte_count(self.dtype, self.sizes()).filter(|bytes| (1..=LARGEST).contains(bytes));
        bytes.ok_or_else(|| self.wrong(format!("has rows of {:?}, which are empty or larger than memory", self.sizes())))
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> Error {
        Error::malformed(&self.path, format!("array `{}` {reason}", self.name))
    }

    /// The bytes of the next row.
    fn next(&mut self) -> Result<Vec<u8>> {
        let row = self.row()?;
        match &mut self.from {
            From::Tensor { tensor, at } => {
                let mut bytes = vec![0; row as usize];
                tensor.read_at(*at, &mut bytes)?;
                *at = at.saturating_add(row);
                Ok(bytes)
            }
            From::Stream(rest) => {
                // The header may claim more than there is.
                let mut bytes = Vec::new();
                let read = rest.take(row).read_to_end(&mut bytes);
                read.map_err(|e| self.wrong(format!("cannot be read: {e}")))?;
                if bytes.len() as u64 == row { Ok(bytes) } else { Err(self.wrong(format!("ends before its {} rows do", self.count()))) }
            }
        }
    }

    fn count(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }
}

/// The arrays of a file, at their first rows.
fn open(path: &Path) -> Result<Vec<Rows>> {
    let arrays = if path.extension().is_some_and(|e| e == "npz") { numpy(path)? } else { tensors(path)? };
    Ok(arrays.into_iter().filter(|rows| !rows.shape.is_empty()).collect())
}

fn tensors(path: &Path) -> Result<Vec<Rows>> {
    let rows = |(name, tensor): (String, RawTensor)| Rows {
        name,
        path: path.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        from: From::Tensor { tensor, at: 0 },
    };
    Ok(Checkpoint::open(path)?.tensors.into_iter().map(rows).collect())
}

fn numpy(path: &Path) -> Result<Vec<Rows>> {
    let wrong = |e: &dyn std::fmt::Display| Error::malformed(path, format!("not an .npz file: {e}"));
    let open = || File::open(path).map(|file| file.reader()).map_err(Error::io("open", path));
    let mut archive = zip::ZipArchive::new(BufReader::new(open()?)).map_err(|e| wrong(&e))?;
    let mut arrays = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(|e| wrong(&e))?;
        let Some(name) = entry.name().map_err(|e| wrong(&e))?.strip_suffix(".npy").map(str::to_owned) else { continue };
        let start = entry.data_start().ok_or_else(|| wrong(&"an array has no place"))?;
        // A handle of its own, since arrays are read side by side.
        let mut file = open()?;
        file.seek(SeekFrom::Start(start)).map_err(Error::io("read", path))?;
        let stored = BufReader::new(file).take(entry.compressed_size());
        let mut rest: Box<dyn Read + Send> = match entry.compression() {
            zip::CompressionMethod::Stored => Box::new(stored),
            zip::CompressionMethod::Deflated => Box::new(BufReader::new(DeflateDecoder::new(stored))),
            other => return Err(wrong(&format!("array `{name}` is packed by {other}"))),
        };
        let header = header(&mut rest).map_err(|e| wrong(&format!("array `{name}`: {e}")))?;
        if header.order() != npyz::Order::C {
            return Err(wrong(&format!("array `{name}` is stored column by column; save it with numpy.ascontiguousarray")));
        }
        let dtype = dtype(&header).ok_or_else(|| wrong(&format!("array `{name}` has elements {}, which are not read", header.dtype().descr())))?;
        let shape: Vec<usize> = header.shape().iter().map(|n| *n as usize).collect();
        byte_count(dtype, &shape).ok_or_else(|| wrong(&format!("array `{name}` is larger than any memory")))?;
        arrays.push(Rows { name, path: path.to_owned(), dtype, shape, from: From::Stream(rest) });
    }
    Ok(arrays)
}

fn header(rest: &mut dyn Read) -> std::io::Result<NpyHeader> {
    let mut start = [0; 12];
    rest.read_exact(&mut start)?;
    let [.., version, _, a, b, c, d] = start;
    let bytes = if version == 1 { u16::from_le_bytes([a, b]).into() } else { u32::from_le_bytes([a, b, c, d]) };
    if bytes > HEADER {
        return Err(std::io::Error::other(format!("a header of {bytes} bytes")));
    }
    NpyHeader::from_reader(start.as_slice().chain(rest))
}

fn dtype(header: &NpyHeader) -> Option<DType> {
    let npyz::DType::Plain(kind) = header.dtype() else { return None };
    if kind.endianness() == Endianness::Big {
        return None;
    }
    Some(match (kind.type_char(), kind.size_field()) {
        (TypeChar::Bool, _) | (TypeChar::Uint, 1) => DType::U8,
        (TypeChar::Int, 1) => DType::I8,
        (TypeChar::Int, 2) => DType::I16,
        (TypeChar::Int, 4) => DType::I32,
        (TypeChar::Int, 8) => DType::I64,
        (TypeChar::Uint, 2) => DType::U16,
        (TypeChar::Uint, 4) => DType::U32,
        (TypeChar::Float, 2) => DType::F16,
        (TypeChar::Float, 4) => DType::F32,
        (TypeChar::Float, 8) => DType::F64,
        _ => return None,
    })
}

/// Whether a file has an array of labels by one of the usual names.
pub(super) fn has_labels(path: &Path) -> Result<bool> {
    Ok(open(path)?.iter().any(|rows| LABELS.contains(&rows.name.as_str())))
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

/// One row of every array.
struct Sample {
    index: usize,
    inputs: Vec<(DType, Vec<u8>)>,
    label: Option<(DType, Vec<u8>)>,
}

pub(super) struct Arrays {
    path: PathBuf,
    /// For each input, the name of its array and the shape of a sample.
    inputs: Vec<(Port, String, Vec<usize>)>,
    labels: Option<String>,
    count: usize,
    batch: usize,
    classes: Classes,
    pixels: Pixels,
    /// Whether each token is to predict the next one of its row.
    next_tokens: bool,
}

impl Arrays {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Arrays> {
        let arrays = open(path)?;
        let names = || arrays.iter().map(|rows| format!("`{}`", rows.name)).collect::<Vec<_>>().join(", ");
        let find = |name: &str| {
            arrays
                .iter()
                .find(|rows| rows.name == name)
                .ok_or_else(|| Error::option("data", format!("{} has no array `{name}`; there are {}", path.display(), names())))
        };
        let labels = match (&options.label_column, task == Task::Classification) {
            (Some(Column::Name(name)), _) => Some(find(name)?),
            (Some(Column::Index(index)), _) => return Err(Error::option("data", format!("`label_column: {index}`: arrays have names; there are {}", names()))),
            (None, true) => {
                let usual = LABELS.iter().find_map(|name| arrays.iter().find(|rows| rows.name == *name));
                Some(
                    usual.ok_or_else(|| {
                        Error::option("data", format!("{}: name the array of labels as `label_column`; there are {}", path.display(), names()))
                    })?,
                )
            }
            (None, false) => None,
        };
        let others: Vec<&Rows> = arrays.iter().filter(|rows| labels.is_none_or(|l| l.name != rows.name)).collect();
        let mut inputs = Vec::new();
        for port in target.inputs {
            let rows = match options.inputs.iter().find(|(input, _)| *input == port.name) {
                Some((_, array)) => find(array)?,
                None => match (others.iter().find(|rows| rows.name == port.name), others.as_slice(), target.inputs) {
                    (Some(rows), ..) => rows,
                    (None, [only], [_]) => only,
                    _ if port.name == "token_type_ids" => continue,
                    _ => {
                        return Err(Error::option(
                            "data",
                            format!(
                                "{}: say which array goes to the model's input `{}` ({}) with `inputs`; there are {}",
                                path.display(),
                                port.name,
                                port.sizes(),
                                names()
                            ),
                        ));
                    }
                },
            };
            inputs.push((port.clone(), rows.name.clone(), sample(port, rows, path)?));
        }
        if let Some((unknown, _)) = options.inputs.iter().find(|(input, _)| target.inputs.iter().all(|port| port.name != *input)) {
            let ports = target.inputs.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
            return Err(Error::option("data", format!("the model has no input `{unknown}`; it takes {ports}")));
        }
        let used = inputs.iter().map(|(_, name, _)| name).chain(labels.iter().map(|rows| &rows.name));
        let counts: Vec<(&String, usize)> =
            used.filter_map(|name| arrays.iter().find(|rows| rows.name == *name)).map(|rows| (&rows.name, rows.count())).collect();
        let (first, count) = counts.first().copied().ok_or_else(|| Error::option("data", "the model takes nothing"))?;
        if let Some((name, other)) = counts.iter().find(|(_, other)| *other != count) {
            return Err(Error::malformed(path, format!("array `{name}` has {other} rows, `{first}` has {count}")));
        }
        Ok(Arrays {
            path: path.to_owned(),
            labels: labels.map(|rows| rows.name.clone()),
            inputs,
            count: count.min(options.samples.unwrap_or(usize::MAX)),
            batch: options.batch(task),
            classes: Classes::of(options, &target),
            pixels: Pixels::plain(options),
            next_tokens: task == Task::LanguageModelling,
        })
    }

    /// Of each row of tokens, the places that those before them predict: all but the first that no padding covers.
    fn predicted(&self, inputs: &std::collections::BTreeMap<String, Tensor>) -> Result<Vec<Range<usize>>> {
        let unusable = |reason: String| Error::malformed(&self.path, reason);
        let rows = |name: &str| inputs.get(name).map(|tensor| tensor.to_vec2::<i64>()).transpose().map_err(|e| unusable(format!("array of `{name}`: {e}")));
        let ids = rows("input_ids")?.ok_or_else(|| Error::option("task", "language-modelling needs a model that takes `input_ids`"))?;
        let masks = rows("attention_mask")?;
        let places = |(row, ids): (usize, &Vec<i64>)| {
            let seen = |at: &usize| masks.as_ref().and_then(|masks| masks.get(row)).and_then(|mask| mask.get(*at)).is_none_or(|seen| *seen != 0);
            let (first, last) = ((0..ids.len()).find(seen), (0..ids.len()).rfind(seen));
            let (Some(first), Some(last)) = (first, last.map(|last| last.saturating_add(1))) else { return Ok(1..1) };
            match (first..last).all(|at| seen(&at)) {
                true => Ok(first.saturating_add(1)..last),
                false => Err(unusable(format!("`attention_mask` of row {row} has padding between tokens, across which nothing is predicted"))),
            }
        };
        ids.iter().enumerate().map(places).collect()
    }

    fn batch(&self, samples: &[Sample]) -> Result<Batch> {
        let (mut named, count) = (std::collections::BTreeMap::new(), samples.len());
        for (at, (port, _, sample)) in self.inputs.iter().enumerate() {
            let rows = || samples.iter().filter_map(|sample| sample.inputs.get(at));
            let dtype = rows().next().map_or(DType::F32, |(dtype, _)| *dtype);
            let bytes: Vec<u8> = rows().flat_map(|(_, row)| row).copied().collect();
            let shape: Vec<usize> = [count].iter().chain(sample).copied().collect();
            let tensor = if port.element == Element::Int {
                Tensor::from_vec(integers(&bytes, dtype)?, shape, &Device::Cpu)
            } else {
                let mut numbers = floats(&bytes, dtype)?;
                let channels = if let [channels, _, _] = **sample { channels } else { 1 };
                for row in numbers.chunks_mut(sample.iter().product::<usize>().max(1)) {
                    self.pixels.normalize(row, channels)?;
                }
                Tensor::from_vec(numbers, shape, &Device::Cpu)
            };
            named.insert(port.name.clone(), tensor.map_err(shaped)?);
        }
        let mut labels = Vec::new();
        for sample in samples {
            if let Some((dtype, bytes)) = &sample.label {
                labels.extend(integers(bytes, *dtype)?.into_iter().map(|label| (sample.index, label)));
            }
        }
        let references = match (&self.labels, self.next_tokens) {
            (Some(_), _) => self.classes.references(labels, &self.path)?,
            (None, true) => References::Next(self.predicted(&named)?),
            (None, false) => References::None,
        };
        Ok(Batch { inputs: named, references, samples: count })
    }
}

/// The shape in which rows go to an input.
fn sample(port: &Port, rows: &Rows, path: &Path) -> Result<Vec<usize>> {
    rows.row()?;
    let own = rows.sizes();
    let wanted = port.shape.get(1..).unwrap_or(&[]);
    if own.len() == wanted.len() && own.iter().zip(wanted).all(|(have, want)| want.is_none_or(|want| want == *have)) {
        return Ok(own.to_vec());
    }
    match wanted.iter().copied().collect::<Option<Vec<usize>>>() {
        Some(fixed) if element_count(&fixed) == element_count(own) => Ok(fixed),
        _ => Err(Error::malformed(path, format!("array `{}` has rows of {own:?}, the model's input `{}` is {}", rows.name, port.name, port.sizes()))),
    }
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

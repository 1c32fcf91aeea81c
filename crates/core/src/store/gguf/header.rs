//! Header of a GGUF file: validated parsing of metadata and tensor descriptions.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read};
use std::path::Path;

use crate::error::Error;
use crate::files::{self, File};
use crate::kernel::ggml::BlockType;
use crate::store::DType;
use crate::store::header::element_count;

/// Default alignment of tensor data in bytes.
pub const ALIGNMENT: u64 = 32;
/// Key that overrides the alignment.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// Maximum header size in bytes. A vocabulary of 250,000 tokens takes 20 MB.
const MAX_HEADER: u64 = 64 << 20;
/// Maximum length of a key or tensor name.
const LONGEST_NAME: u64 = 4096;
/// Maximum total number of list elements of one or two bytes, which take eight bytes each in memory.
const MAX_NARROW: u64 = 8 << 20;
/// Maximum number of keys.
const MAX_KEYS: u64 = 1 << 16;
/// Maximum number of dimensions of a tensor.
const MAX_AXES: u32 = 4;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A floating-point number. A 32-bit float is converted through its shortest decimal representation.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list of integers.
    Integers(Vec<i64>),
    /// A list of floating-point numbers.
    Floats(Vec<f64>),
    /// A list of booleans.
    Bools(Vec<bool>),
    /// A list of strings.
    Texts(Vec<String>),
}

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Plain elements.
    Plain(DType),
    /// Quantized blocks of elements.
    Blocks(BlockType),
}

/// Plain types with their ids in files.
const PLAIN: [(u32, DType); 8] =
    [(0, DType::F32), (1, DType::F16), (30, DType::BF16), (24, DType::I8), (25, DType::I16), (26, DType::I32), (27, DType::I64), (28, DType::F64)];

/// Block types that are not supported: ids in files, names, and elements and bytes per block.
const UNSUPPORTED: [(u32, &str, usize, u64); 5] =
    [(9, "Q8_1", 32, 36), (15, "Q8_K", 256, 292), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18)];

/// Name and elements per block of a block type, which may be unsupported, by its id in files.
pub fn block_type(id: u32) -> Option<(&'static str, usize)> {
    let unsupported = || UNSUPPORTED.iter().find(|(number, ..)| *number == id).map(|(_, name, elements, _)| (*name, *elements));
    BlockType::from_id(id).map(|kind| (kind.name(), kind.elements())).or_else(unsupported)
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Plain(dtype) => write!(f, "{dtype}"),
            Kind::Blocks(kind) => f.write_str(kind.name()),
        }
    }
}

impl Kind {
    fn from_id(id: u32) -> Result<Kind, String> {
        if let Some((_, dtype)) = PLAIN.iter().find(|(number, _)| *number == id) {
            return Ok(Kind::Plain(*dtype));
        }
        BlockType::from_id(id).map(Kind::Blocks).ok_or_else(|| {
            let name = block_type(id).map_or_else(|| format!("with id {id}"), |(name, _)| name.to_owned());
            let supported = BlockType::ALL.map(BlockType::name).join(", ");
            format!("has the unsupported type {name} (supported: F32, F16, BF16, {supported}); use another quantization of the model")
        })
    }

    /// Id of the type in files.
    pub fn id(self) -> Option<u32> {
        match self {
            Kind::Plain(dtype) => PLAIN.iter().find(|(_, plain)| *plain == dtype).map(|(id, _)| *id),
            Kind::Blocks(kind) => Some(kind.id()),
        }
    }

    /// Type of the dequantized values.
    pub fn dtype(self) -> DType {
        match self {
            Kind::Plain(dtype) => dtype,
            Kind::Blocks(_) => DType::F32,
        }
    }

    /// Number of elements of which rows must be a multiple.
    pub fn block_size(self) -> usize {
        match self {
            Kind::Plain(_) => 1,
            Kind::Blocks(kind) => kind.elements(),
        }
    }

    /// Whether the importance of columns affects the quantization.
    pub fn uses_importance(self) -> bool {
        matches!(self, Kind::Blocks(kind) if kind.uses_importance())
    }

    /// Number of elements that are stored together, and their size in bytes.
    fn unit(self) -> (u64, u64) {
        match self {
            Kind::Plain(dtype) => (1, dtype.bitsize() as u64 / 8),
            Kind::Blocks(kind) => (kind.elements() as u64, kind.bytes() as u64),
        }
    }

    /// Size of a tensor in bytes. `None` if its rows are not a multiple of the block size, or the size
    /// overflows.
    pub fn byte_count(self, shape: &[usize]) -> Option<u64> {
        byte_count(self.unit(), shape)
    }
}

/// Size in bytes of a tensor whose elements are stored in units of `(elements, bytes)`.
fn byte_count((elements, bytes): (u64, u64), shape: &[usize]) -> Option<u64> {
    let row = shape.last().copied().unwrap_or(1) as u64;
    row.is_multiple_of(elements).then_some(())?;
    element_count(shape)?.checked_div(elements)?.checked_mul(bytes)
}

/// Description of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub name: String,
    pub kind: Kind,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Offset of the first byte in the file.
    pub begin: u64,
    pub bytes: u64,
}

/// Description of a tensor, whose type may be unsupported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDescription {
    /// Name.
    pub name: String,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Id of the type.
    pub type_id: u32,
    /// Offset of the first byte in the data section.
    pub(super) begin: u64,
}

impl TensorDescription {
    /// Size in bytes. `None` if the type is unknown, rows are not a multiple of the block size, or the size
    /// overflows.
    pub(super) fn byte_count(&self) -> Option<u64> {
        let unsupported = || UNSUPPORTED.iter().find(|(id, ..)| *id == self.type_id).map(|(.., elements, bytes)| (*elements as u64, *bytes));
        let unit = Kind::from_id(self.type_id).ok().map(Kind::unit).or_else(unsupported)?;
        byte_count(unit, &self.shape)
    }
}

/// Metadata of a file, and descriptions of its tensors, which are not validated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outline {
    /// Metadata by key.
    pub values: BTreeMap<String, Value>,
    /// The tensors, in order.
    pub tensors: Vec<TensorDescription>,
    /// Size of the data section; `None` for a planned file.
    pub data_bytes: Option<u64>,
}

impl Outline {
    /// Reads the header of a file. Fails if it is malformed; tensors of any type are described.
    pub fn open(path: &Path) -> crate::error::Result<Outline> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let read = || -> Result<Outline, String> {
            let (mut reader, values, count) = Reader::start(&file)?;
            let tensors = (0..count).map(|number| reader.description(number)).collect::<Result<Vec<_>, String>>()?;
            let data = data_start(reader.at, alignment(&values)?)?;
            Ok(Outline { values, tensors, data_bytes: Some(reader.length.saturating_sub(data)) })
        };
        read().map_err(|reason| Error::malformed(path, reason))
    }

    /// The outline of the file that [`header`](super::header) describes. `None` if a tensor's type has no id,
    /// or its size overflows.
    pub fn planned(values: Vec<(String, Value)>, tensors: Vec<(String, Kind, Vec<usize>)>) -> Option<Outline> {
        let layout = layout(&tensors)?;
        let described = tensors.into_iter().zip(layout).map(|((name, _, shape), (type_id, begin, _))| TensorDescription { name, shape, type_id, begin });
        Some(Outline { tensors: described.collect(), values: values.into_iter().collect(), data_bytes: None })
    }
}

/// Type id, offset and number of padding bytes of each tensor of a file. `None` if a type has no id, or a
/// size overflows.
pub(super) fn layout(tensors: &[(String, Kind, Vec<usize>)]) -> Option<Vec<(u32, u64, u64)>> {
    let mut begin = 0u64;
    let tensor = |(_, kind, shape): &(String, Kind, Vec<usize>)| {
        let bytes = kind.byte_count(shape)?;
        let padded = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let laid = (kind.id()?, begin, padded.saturating_sub(bytes));
        begin = begin.checked_add(padded)?;
        Some(laid)
    };
    tensors.iter().map(tensor).collect()
}

/// Contents of a header.
pub(super) struct Header {
    pub values: BTreeMap<String, Value>,
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// Parses the header of a file. The error describes the problem, without the name of the file.
    pub fn read(file: &File) -> Result<Header, String> {
        let (mut reader, values, tensors) = Reader::start(file)?;
        let alignment = alignment(&values)?;
        let mut tensors = reader.tensors(tensors)?;
        let data = data_start(reader.at, alignment)?;
        resolve_offsets(&mut tensors, data, alignment, reader.length)?;
        Ok(Header { values, tensors })
    }
}

/// The alignment of the tensors of a file.
pub(super) fn alignment(values: &BTreeMap<String, Value>) -> Result<u64, String> {
    match values.get(ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT),
        Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() && *alignment <= 1 << 20 => Ok(*alignment),
        Some(other) => Err(format!("`{ALIGNMENT_KEY}` is {}, expected a power of two up to 1048576", describe(other))),
    }
}

/// Offset of the data section in a file whose header ends at an offset.
fn data_start(end: u64, alignment: u64) -> Result<u64, String> {
    end.checked_next_multiple_of(alignment).ok_or_else(|| "its header is too large".into())
}

/// Short description of a value.
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Unsigned(number) => number.to_string(),
        Value::Signed(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Bool(answer) => answer.to_string(),
        Value::Text(text) => format!("`{}`", text.chars().take(80).collect::<String>()),
        Value::Integers(list) => format!("a list of {} numbers", list.len()),
        Value::Floats(list) => format!("a list of {} numbers", list.len()),
        Value::Bools(list) => format!("a list of {} booleans", list.len()),
        Value::Texts(list) => format!("a list of {} strings", list.len()),
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&describe(self))
    }
}

/// Converts offsets relative to the data section to file offsets, and validates them.
fn resolve_offsets(tensors: &mut [Tensor], data: u64, alignment: u64, length: u64) -> Result<(), String> {
    for tensor in tensors.iter_mut() {
        let wrong = |reason: String| format!("tensor `{}` {reason}", tensor.name);
        if !tensor.begin.is_multiple_of(alignment) {
            return Err(wrong(format!("starts at {}, which is not a multiple of {alignment}", tensor.begin)));
        }
        let begin = tensor.begin.checked_add(data);
        let end = begin.and_then(|begin| begin.checked_add(tensor.bytes)).filter(|end| *end <= length);
        let (Some(begin), Some(_)) = (begin, end) else {
            return Err(wrong(format!("of {} bytes at offset {} exceeds the file (is it truncated?)", tensor.bytes, tensor.begin)));
        };
        tensor.begin = begin;
    }
    let mut extents: Vec<(u64, u64, &str)> =
        tensors.iter().filter(|tensor| tensor.bytes > 0).map(|tensor| (tensor.begin, tensor.bytes, tensor.name.as_str())).collect();
    extents.sort_unstable();
    let overlap = extents.windows(2).find_map(|pair| match pair {
        [(begin, bytes, first), (next, _, second)] if begin.saturating_add(*bytes) > *next => Some((first, second)),
        _ => None,
    });
    overlap.map_or(Ok(()), |(first, second)| Err(format!("tensors `{first}` and `{second}` overlap")))
}

/// Reader that validates all lengths and counts against the remaining bytes.
struct Reader {
    input: BufReader<files::Reader>,
    at: u64,
    end: u64,
    length: u64,
    /// Number of one- and two-byte list elements read so far.
    narrow: u64,
}

impl Reader {
    /// Reads up to the descriptions of the tensors. Returns the metadata and the number of tensors.
    fn start(file: &File) -> Result<(Reader, BTreeMap<String, Value>, u64), String> {
        let length = file.length();
        let mut reader = Reader { input: BufReader::new(file.reader()), at: 0, end: length.min(MAX_HEADER), length, narrow: 0 };
        if reader.take::<4>("the magic number")? != *super::MARK {
            return Err("not a GGUF file: it does not start with `GGUF` (if it is a Git LFS pointer, download the file)".into());
        }
        let version = reader.u32("the version")?;
        if version & 0xFFFF == 0 {
            return Err("big-endian files are not supported; convert it with `gguf_convert_endian.py`".into());
        }
        if ![2, 3].contains(&version) {
            return Err(format!("has the unsupported version {version} (supported: 2 and 3); convert the model again"));
        }
        let (tensors, values) = (reader.u64("the number of tensors")?, reader.u64("the number of keys")?);
        // Minimum encoded sizes of a tensor description and of a key.
        reader.require("tensors", tensors, 24)?;
        reader.require("keys", values, 13)?;
        if values > MAX_KEYS {
            return Err(format!("has {values} keys, at most {MAX_KEYS} are supported"));
        }
        let values = reader.values(values)?;
        Ok((reader, values, tensors))
    }

    /// Fails if `count` elements of at least `least` bytes exceed the rest of the file.
    fn require(&self, what: &str, count: u64, least: u64) -> Result<(), String> {
        let left = self.end.saturating_sub(self.at);
        if count.checked_mul(least).is_some_and(|bytes| bytes <= left) {
            return Ok(());
        }
        let limit = if self.length > self.end { format!(" of the maximum header size of {MAX_HEADER}") } else { " in the file".into() };
        Err(format!("{what}: {count} elements of at least {least} bytes exceed the remaining {left} bytes{limit} (is it truncated?)"))
    }

    fn bytes(&mut self, what: &str, count: u64) -> Result<Vec<u8>, String> {
        self.require(what, count, 1)?;
        let mut bytes = vec![0; usize::try_from(count).map_err(|_| format!("{what} is too large"))?];
        self.input.read_exact(&mut bytes).map_err(|e| format!("{what}: {e}"))?;
        self.at = self.at.saturating_add(count);
        Ok(bytes)
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        self.require(what, N as u64, 1)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|e| format!("{what}: {e}"))?;
        self.at = self.at.saturating_add(N as u64);
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.take(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.take(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str, limit: u64) -> Result<String, String> {
        let length = self.u64(what)?;
        if length > limit {
            return Err(format!("{what}: a string of {length} bytes, at most {limit} are supported"));
        }
        String::from_utf8(self.bytes(what, length)?).map_err(|_| format!("{what}: a string is not UTF-8"))
    }

    fn values(&mut self, count: u64) -> Result<BTreeMap<String, Value>, String> {
        let mut values = BTreeMap::new();
        for number in 0..count {
            let key = self.text(&format!("key {number}"), LONGEST_NAME)?;
            let kind = self.u32(&format!("key `{key}`"))?;
            let value = self.value(&format!("key `{key}`"), kind)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("key `{key}` occurs twice"));
            }
        }
        Ok(values)
    }

    fn value(&mut self, what: &str, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 | 2 | 4 | 10 => Value::Unsigned(self.number(what, kind)?.try_into().map_err(|_| format!("{what}: a number is negative"))?),
            1 | 3 | 5 | 11 => Value::Signed(self.number(what, kind)?.try_into().map_err(|_| format!("{what}: a number is too large"))?),
            6 | 12 => Value::Float(self.float(what, kind)?),
            7 => Value::Bool(self.bool(what)?),
            8 => Value::Text(self.text(what, MAX_HEADER)?),
            9 => self.list(what)?,
            _ => return Err(format!("{what} has a value of the unknown type {kind}")),
        })
    }

    fn list(&mut self, what: &str) -> Result<Value, String> {
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(format!("{what} is a list of lists, which is not supported")),
            _ => return Err(format!("{what} is a list of values of the unknown type {kind}")),
        };
        self.require(what, count, least)?;
        self.narrow = self.narrow.saturating_add(if least < 4 { count } else { 0 });
        if self.narrow > MAX_NARROW {
            return Err(format!("{what} is a list of {count} values of one or two bytes, at most {MAX_NARROW} are supported"));
        }
        let range = 0..count;
        Ok(match kind {
            6 | 12 => Value::Floats(range.map(|_| self.float(what, kind)).collect::<Result<_, _>>()?),
            7 => Value::Bools(range.map(|_| self.bool(what)).collect::<Result<_, _>>()?),
            8 => Value::Texts(range.map(|_| self.text(what, MAX_HEADER)).collect::<Result<_, _>>()?),
            _ => {
                let number = |_| self.number(what, kind)?.try_into().map_err(|_| format!("{what}: a number is too large"));
                Value::Integers(range.map(number).collect::<Result<_, _>>()?)
            }
        })
    }

    fn number(&mut self, what: &str, kind: u32) -> Result<i128, String> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.take(what)?).into(),
            1 => i8::from_le_bytes(self.take(what)?).into(),
            2 => u16::from_le_bytes(self.take(what)?).into(),
            3 => i16::from_le_bytes(self.take(what)?).into(),
            4 => u32::from_le_bytes(self.take(what)?).into(),
            5 => i32::from_le_bytes(self.take(what)?).into(),
            10 => u64::from_le_bytes(self.take(what)?).into(),
            _ => i64::from_le_bytes(self.take(what)?).into(),
        })
    }

    fn float(&mut self, what: &str, kind: u32) -> Result<f64, String> {
        if kind == 12 {
            return self.take(what).map(f64::from_le_bytes);
        }
        let value = f32::from_le_bytes(self.take(what)?);
        Ok(value.to_string().parse().unwrap_or(f64::from(value)))
    }

    fn bool(&mut self, what: &str) -> Result<bool, String> {
        match self.take::<1>(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("{what}: a boolean has the value {other} instead of 0 or 1")),
        }
    }

    fn description(&mut self, number: u64) -> Result<TensorDescription, String> {
        let name = self.text(&format!("tensor {number}"), LONGEST_NAME)?;
        let what = format!("tensor `{name}`");
        let axes = self.u32(&what)?;
        if axes > MAX_AXES {
            return Err(format!("{what} has {axes} axes, at most {MAX_AXES} are supported"));
        }
        let mut shape = (0..axes).map(|_| self.u64(&what)).collect::<Result<Vec<u64>, _>>()?;
        shape.reverse();
        let shape = shape.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>().map_err(|_| format!("{what} is too large"))?;
        let (type_id, begin) = (self.u32(&what)?, self.u64(&what)?);
        Ok(TensorDescription { name, shape, type_id, begin })
    }

    fn tensors(&mut self, count: u64) -> Result<Vec<Tensor>, String> {
        let (mut tensors, mut names) = (Vec::new(), BTreeSet::new());
        for number in 0..count {
            let TensorDescription { name, shape, type_id, begin } = self.description(number)?;
            let what = format!("tensor `{name}`");
            let kind = Kind::from_id(type_id).map_err(|reason| format!("{what} {reason}"))?;
            let bytes = kind.byte_count(&shape).ok_or_else(|| {
                let (elements, _) = kind.unit();
                format!("{what} of shape {shape:?} has rows that are not a multiple of {elements} elements, or is too large")
            })?;
            if !names.insert(name.clone()) {
                return Err(format!("{what} occurs twice"));
            }
            tensors.push(Tensor { name, kind, shape, begin, bytes });
        }
        Ok(tensors)
    }
}

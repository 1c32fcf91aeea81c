//! What a GGUF file says before its tensors: read without trust.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read};

use crate::files::{self, File};
use crate::kernel::ggml::BlockType;
use crate::store::DType;
use crate::store::header::element_count;

/// What tensors begin at multiples of, where nothing is said.
pub const ALIGNMENT: u64 = 32;
/// The key that says something else.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Most bytes before the tensors: a vocabulary of a quarter of a million tokens takes 20 MB.
const LONGEST: u64 = 64 << 20;
/// Longest key or name.
const LONGEST_NAME: u64 = 4096;
/// Most values of one or two bytes in lists, all together: in memory they take eight.
const MOST_NARROW: u64 = 8 << 20;
/// Most keys.
const MOST_KEYS: u64 = 1 << 16;
/// Most axes of a tensor.
const MOST_AXES: u32 = 4;

/// A value of a file.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A number that has no sign.
    Unsigned(u64),
    /// A number that may have one.
    Signed(i64),
    /// One with a fraction; of 32 bits, the shortest decimal that means it.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// Several numbers.
    Integers(Vec<i64>),
    /// Several with fractions.
    Floats(Vec<f64>),
    /// Several answers.
    Bools(Vec<bool>),
    /// Several texts.
    Texts(Vec<String>),
}

/// What a tensor is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Elements by themselves.
    Plain(DType),
    /// Blocks of them.
    Blocks(BlockType),
}

/// Types by themselves, by their numbers in files.
const PLAIN: [(u32, DType); 8] =
    [(0, DType::F32), (1, DType::F16), (30, DType::BF16), (24, DType::I8), (25, DType::I16), (26, DType::I32), (27, DType::I64), (28, DType::F64)];

/// Types of blocks that are not read, by their numbers in files.
const OTHERS: [(u32, &str); 16] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl Kind {
    fn of_id(id: u32) -> Result<Kind, String> {
        if let Some((_, dtype)) = PLAIN.iter().find(|(number, _)| *number == id) {
            return Ok(Kind::Plain(*dtype));
        }
        BlockType::of_id(id).map(Kind::Blocks).ok_or_else(|| {
            let name = OTHERS.iter().find(|(number, _)| *number == id).map_or_else(|| format!("number {id}"), |(_, name)| (*name).to_owned());
            let read = BlockType::ALL.map(BlockType::name).join(", ");
            format!("is of type {name}, and those that are read are F32, F16, BF16, {read}: take another file of the model")
        })
    }

    /// Its number in files.
    pub fn id(self) -> Option<u32> {
        match self {
            Kind::Plain(dtype) => PLAIN.iter().find(|(_, plain)| *plain == dtype).map(|(id, _)| *id),
            Kind::Blocks(kind) => Some(kind.id()),
        }
    }

    /// The format of its values.
    pub fn dtype(self) -> DType {
        match self {
            Kind::Plain(dtype) => dtype,
            Kind::Blocks(_) => DType::F32,
        }
    }

    /// Elements that are stored together, and their bytes.
    fn unit(self) -> (u64, u64) {
        match self {
            Kind::Plain(dtype) => (1, dtype.bitsize() as u64 / 8),
            Kind::Blocks(kind) => (kind.elements() as u64, kind.bytes() as u64),
        }
    }

    /// Bytes of a tensor of this shape; nothing where its rows are no whole blocks, or the number overflows.
    pub fn byte_count(self, shape: &[usize]) -> Option<u64> {
        let (elements, bytes) = self.unit();
        let row = shape.last().copied().unwrap_or(1) as u64;
        row.is_multiple_of(elements).then_some(())?;
        element_count(shape)?.checked_div(elements)?.checked_mul(bytes)
    }
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub name: String,
    pub kind: Kind,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The first byte in the file.
    pub begin: u64,
    pub bytes: u64,
}

/// All that stands before the tensors.
pub(super) struct Header {
    pub values: BTreeMap<String, Value>,
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// Reads a file.
    ///
    /// # Errors
    /// A sentence that says what is wrong, without the name of the file.
    pub fn read(file: &File) -> Result<Header, String> {
        let length = file.length();
        let mut reader = Reader { input: BufReader::new(file.reader()), at: 0, end: length.min(LONGEST), length, narrow: 0 };
        if reader.take::<4>("the mark")? != *super::MARK {
            return Err("not a GGUF file: it does not begin with `GGUF` (if it is a pointer of Git LFS, download the file)".into());
        }
        let version = reader.u32("the version")?;
        if version & 0xFFFF == 0 {
            return Err("its numbers are big endian, those of little endian are read: convert it with `gguf_convert_endian.py`".into());
        }
        if ![2, 3].contains(&version) {
            return Err(format!("is of version {version}, and versions 2 and 3 are read: convert the model again"));
        }
        let (tensors, values) = (reader.u64("the number of tensors")?, reader.u64("the number of keys")?);
        // The least that a tensor and a key take.
        reader.require("tensors", tensors, 24)?;
        reader.require("keys", values, 13)?;
        if values > MOST_KEYS {
            return Err(format!("has {values} keys, at most {MOST_KEYS} are read"));
        }
        let values = reader.values(values)?;
        let alignment = match values.get(ALIGNMENT_KEY) {
            None => ALIGNMENT,
            Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() && *alignment <= 1 << 20 => *alignment,
            Some(other) => return Err(format!("`{ALIGNMENT_KEY}` is {}, expected a power of two up to 1048576", told(other))),
        };
        let mut tensors = reader.tensors(tensors)?;
        let data = reader.at.checked_next_multiple_of(alignment).ok_or("its header is larger than any file")?;
        place(&mut tensors, data, alignment, length)?;
        Ok(Header { values, tensors })
    }
}

/// A value in a few words.
pub(super) fn told(value: &Value) -> String {
    match value {
        Value::Unsigned(number) => number.to_string(),
        Value::Signed(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Bool(answer) => answer.to_string(),
        Value::Text(text) => format!("`{}`", text.chars().take(80).collect::<String>()),
        Value::Integers(list) => format!("a list of {} numbers", list.len()),
        Value::Floats(list) => format!("a list of {} numbers", list.len()),
        Value::Bools(list) => format!("a list of {} answers", list.len()),
        Value::Texts(list) => format!("a list of {} texts", list.len()),
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&told(self))
    }
}

/// Turns offsets behind the header into places in the file, and holds them to it.
fn place(tensors: &mut [Tensor], data: u64, alignment: u64, length: u64) -> Result<(), String> {
    for tensor in tensors.iter_mut() {
        let wrong = |reason: String| format!("tensor `{}` {reason}", tensor.name);
        if !tensor.begin.is_multiple_of(alignment) {
            return Err(wrong(format!("begins at {}, which is no multiple of {alignment}", tensor.begin)));
        }
        let begin = tensor.begin.checked_add(data);
        let end = begin.and_then(|begin| begin.checked_add(tensor.bytes)).filter(|end| *end <= length);
        let (Some(begin), Some(_)) = (begin, end) else {
            return Err(wrong(format!("of {} bytes at {} of the data ends behind the file (is it truncated?)", tensor.bytes, tensor.begin)));
        };
        tensor.begin = begin;
    }
    let mut places: Vec<(u64, u64, &str)> =
        tensors.iter().filter(|tensor| tensor.bytes > 0).map(|tensor| (tensor.begin, tensor.bytes, tensor.name.as_str())).collect();
    places.sort_unstable();
    let overlap = places.windows(2).find_map(|pair| match pair {
        [(begin, bytes, first), (next, _, second)] if begin.saturating_add(*bytes) > *next => Some((first, second)),
        _ => None,
    });
    overlap.map_or(Ok(()), |(first, second)| Err(format!("tensors `{first}` and `{second}` overlap")))
}

/// Reads from a file that says how much there is of everything.
struct Reader {
    input: BufReader<files::Reader>,
    at: u64,
    end: u64,
    length: u64,
    /// Values of one or two bytes in the lists so far.
    narrow: u64,
}

impl Reader {
    /// Refuses more of something than the rest of the file can hold.
    fn require(&self, what: &str, count: u64, least: u64) -> Result<(), String> {
        let left = self.end.saturating_sub(self.at);
        if count.checked_mul(least).is_some_and(|bytes| bytes <= left) {
            return Ok(());
        }
        let limit = if self.length > self.end { format!(" of the {LONGEST} that a header may have") } else { " in the file".into() };
        Err(format!("{what}: it claims {count} of at least {least} bytes where {left} bytes are left{limit} (is it truncated?)"))
    }

    fn bytes(&mut self, what: &str, count: u64) -> Result<Vec<u8>, String> {
        self.require(what, count, 1)?;
        let mut bytes = vec![0; usize::try_from(count).map_err(|_| format!("{what} is larger than any memory"))?];
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

    fn text(&mut self, what: &str, most: u64) -> Result<String, String> {
        let length = self.u64(what)?;
        if length > most {
            return Err(format!("{what}: it claims a text of {length} bytes, at most {most} are read"));
        }
        String::from_utf8(self.bytes(what, length)?).map_err(|_| format!("{what}: a text that is not UTF-8"))
    }

    fn values(&mut self, count: u64) -> Result<BTreeMap<String, Value>, String> {
        let mut values = BTreeMap::new();
        for number in 0..count {
            let key = self.text(&format!("key {number}"), LONGEST_NAME)?;
            let kind = self.u32(&format!("key `{key}`"))?;
            let value = self.value(&format!("key `{key}`"), kind)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("key `{key}` is in the file twice"));
            }
        }
        Ok(values)
    }

    fn value(&mut self, what: &str, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 | 2 | 4 | 10 => Value::Unsigned(self.number(what, kind)?.try_into().map_err(|_| format!("{what}: a number below zero"))?),
            1 | 3 | 5 | 11 => Value::Signed(self.number(what, kind)?.try_into().map_err(|_| format!("{what}: a number that is too large"))?),
            6 | 12 => Value::Float(self.float(what, kind)?),
            7 => Value::Bool(self.answer(what)?),
            8 => Value::Text(self.text(what, LONGEST)?),
            9 => self.list(what)?,
            _ => return Err(format!("{what} has a value of type {kind}, which there is not")),
        })
    }

    fn list(&mut self, what: &str) -> Result<Value, String> {
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(format!("{what} is a list of lists, which are not read")),
            _ => return Err(format!("{what} is a list of values of type {kind}, which there is not")),
        };
        self.require(what, count, least)?;
        self.narrow = self.narrow.saturating_add(if least < 4 { count } else { 0 });
        if self.narrow > MOST_NARROW {
            return Err(format!("{what} is a list of {count} values of one or two bytes, at most {MOST_NARROW} are read"));
        }
        let range = 0..count;
        Ok(match kind {
            6 | 12 => Value::Floats(range.map(|_| self.float(what, kind)).collect::<Result<_, _>>()?),
            7 => Value::Bools(range.map(|_| self.answer(what)).collect::<Result<_, _>>()?),
            8 => Value::Texts(range.map(|_| self.text(what, LONGEST)).collect::<Result<_, _>>()?),
            _ => {
                let number = |_| self.number(what, kind)?.try_into().map_err(|_| format!("{what}: a number that is too large"));
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

    fn answer(&mut self, what: &str) -> Result<bool, String> {
        match self.take::<1>(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("{what}: {other} where yes or no are 1 and 0")),
        }
    }

    fn tensors(&mut self, count: u64) -> Result<Vec<Tensor>, String> {
        let (mut tensors, mut names) = (Vec::new(), BTreeSet::new());
        for number in 0..count {
            let name = self.text(&format!("tensor {number}"), LONGEST_NAME)?;
            let what = format!("tensor `{name}`");
            let axes = self.u32(&what)?;
            if axes > MOST_AXES {
                return Err(format!("{what} has {axes} axes, at most {MOST_AXES} are read"));
            }
            let mut shape = (0..axes).map(|_| self.u64(&what)).collect::<Result<Vec<u64>, _>>()?;
            shape.reverse();
            let shape = shape.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>().map_err(|_| format!("{what} is larger than any memory"))?;
            let kind = Kind::of_id(self.u32(&what)?).map_err(|reason| format!("{what} {reason}"))?;
            let begin = self.u64(&what)?;
            let bytes = kind.byte_count(&shape).ok_or_else(|| {
                let (elements, _) = kind.unit();
                format!("{what} of shape {shape:?} has rows that are no whole blocks of {elements}, or more elements than any memory")
            })?;
            if !names.insert(name.clone()) {
                return Err(format!("{what} is in the file twice"));
            }
            tensors.push(Tensor { name, kind, shape, begin, bytes });
        }
        Ok(tensors)
    }
}

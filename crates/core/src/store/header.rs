//! Header of a safetensors file: validated parsing, and writing in the order of the reference
//! implementation.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::DType;

/// Maximum header length of the format.
pub const MAX_HEADER: u64 = 100_000_000;

/// Maximum number of dimensions of a tensor, as in PyTorch and NumPy.
pub const MOST_AXES: usize = 64;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost dimension first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Offset of the first byte from the end of the header.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

/// Contents of a header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    /// In the order of their offsets.
    pub tensors: Vec<Entry>,
    /// Metadata: free-form strings by key.
    pub metadata: BTreeMap<String, String>,
}

/// Number of elements of a tensor. `None` if it overflows.
pub fn element_count(shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64))
}

/// Size of a tensor in bytes. `None` if it overflows or is not a whole number of bytes.
pub fn byte_count(dtype: DType, shape: &[usize]) -> Option<u64> {
    let bits = element_count(shape)?.checked_mul(dtype.bitsize() as u64)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

impl Header {
    /// Parses a header that is followed by `data_bytes` bytes. The error does not contain the name of the
    /// file.
    pub fn parse(json: &[u8], data_bytes: u64) -> Result<Header, String> {
        let text = std::str::from_utf8(json).map_err(|e| format!("the header is not UTF-8: {e}"))?;
        let raw: Raw = serde_json::from_str(text).map_err(|e| format!("the header is not valid: {e}"))?;
        let mut tensors = raw.tensors;
        for t in &tensors {
            let (begin, end) = (t.begin, t.end);
            let Some(bytes) = end.checked_sub(begin) else {
                return Err(format!("tensor `{}`: data_offsets [{begin}, {end}] are reversed", t.name));
            };
            if end > data_bytes {
                return Err(format!("tensor `{}`: data_offsets [{begin}, {end}] exceed the {data_bytes} bytes of data (is the file truncated?)", t.name));
            }
            match byte_count(t.dtype, &t.shape) {
                None => return Err(format!("tensor `{}`: shape {:?} of {} overflows or does not fill whole bytes", t.name, t.shape, t.dtype)),
                Some(n) if n != bytes => {
                    return Err(format!(
                        "tensor `{}`: shape {:?} of {} takes {n} bytes, but data_offsets [{begin}, {end}] span {bytes}",
                        t.name, t.shape, t.dtype
                    ));
                }
                Some(_) => {}
            }
        }
        // Empty tensors may have equal offsets; they are sorted in the reference order.
        tensors.sort_by(|a, b| (a.begin, a.end, b.dtype, &a.name).cmp(&(b.begin, b.end, a.dtype, &b.name)));
        let mut position = 0;
        for t in &tensors {
            if t.begin != position {
                let what = if t.begin < position { "overlap the previous tensor" } else { "leave a gap before it" };
                return Err(format!("tensor `{}`: data_offsets [{}, {}] {what}", t.name, t.begin, t.end));
            }
            position = t.end;
        }
        if position != data_bytes {
            return Err(format!("{} bytes follow the last tensor", data_bytes.abs_diff(position)));
        }
        Ok(Header { tensors, metadata: raw.metadata })
    }

    /// Computes the offsets of tensors in the order of the reference implementation: widest element type
    /// first, then by name. The error is the name of a tensor whose size overflows.
    pub fn layout(tensors: impl IntoIterator<Item = (String, DType, Vec<usize>)>, metadata: BTreeMap<String, String>) -> Result<Header, String> {
        let mut entries: Vec<_> = tensors.into_iter().collect();
        entries.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let mut position = 0u64;
        let mut tensors = Vec::with_capacity(entries.len());
        for (name, dtype, shape) in entries {
            let end = byte_count(dtype, &shape).and_then(|n| position.checked_add(n)).ok_or_else(|| name.clone())?;
            tensors.push(Entry { name, dtype, shape, begin: position, end });
            position = end;
        }
        Ok(Header { tensors, metadata })
    }

    /// Total size of the tensors in bytes.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.last().map_or(0, |t| t.end)
    }

    /// The length field and the header, padded with spaces so that the data starts at a multiple of
    /// eight bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut json = serde_json::to_vec(self).unwrap_or_default();
        json.resize(json.len().next_multiple_of(8), b' ');
        [&(json.len() as u64).to_le_bytes()[..], &json].concat()
    }
}

impl Serialize for Header {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Out<'a> {
            dtype: DType,
            shape: &'a [usize],
            data_offsets: [u64; 2],
        }
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry("__metadata__", &self.metadata)?;
        }
        for t in &self.tensors {
            map.serialize_entry(&t.name, &Out { dtype: t.dtype, shape: &t.shape, data_offsets: [t.begin, t.end] })?;
        }
        map.end()
    }
}

/// The raw JSON object. Unlike a map type, it rejects duplicate names.
struct Raw {
    tensors: Vec<Entry>,
    metadata: BTreeMap<String, String>,
}

struct RawEntry {
    dtype: DType,
    shape: Shape,
    data_offsets: [u64; 2],
}

/// Parses an entry without buffering, so that memory is bounded by the file's size.
impl<'de> Deserialize<'de> for RawEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawEntry;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntry, A::Error> {
                let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    let duplicate = match key.as_str() {
                        "dtype" => dtype.replace(map.next_value()?).is_some(),
                        "shape" => shape.replace(map.next_value()?).is_some(),
                        "data_offsets" => data_offsets.replace(map.next_value()?).is_some(),
                        _ => {
                            map.next_value::<Checked>()?;
                            false
                        }
                    };
                    if duplicate {
                        return Err(A::Error::custom(format!("duplicate field `{key}`")));
                    }
                }
                let missing = A::Error::missing_field;
                Ok(RawEntry {
                    dtype: dtype.ok_or_else(|| missing("dtype"))?,
                    shape: shape.ok_or_else(|| missing("shape"))?,
                    data_offsets: data_offsets.ok_or_else(|| missing("data_offsets"))?,
                })
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list of sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(size) = sequence.next_element()? {
                    if shape.len() >= MOST_AXES {
                        return Err(A::Error::custom(format!("has more than {MOST_AXES} axes")));
                    }
                    shape.push(size);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}

/// An ignored value of an unknown key. It is parsed, so that invalid JSON is rejected.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Checked;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_unit<E>(self) -> Result<Checked, E> {
                Ok(Checked)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Checked, E> {
                Ok(Checked)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Checked, E> {
                Ok(Checked)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Checked, E> {
                Ok(Checked)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Checked, E> {
                Ok(Checked)
            }

            fn visit_str<E>(self, _: &str) -> Result<Checked, E> {
                Ok(Checked)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Checked, A::Error> {
                while sequence.next_element::<Checked>()?.is_some() {}
                Ok(Checked)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Checked, A::Error> {
                while map.next_entry::<Checked, Checked>()?.is_some() {}
                Ok(Checked)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Raw;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                let mut seen = BTreeSet::new();
                let mut raw = Raw { tensors: Vec::new(), metadata: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("duplicate name `{name}`")));
                    }
                    if name == "__metadata__" {
                        raw.metadata = map.next_value::<Option<BTreeMap<String, String>>>()?.unwrap_or_default();
                        continue;
                    }
                    let entry: RawEntry = map.next_value().map_err(|e| A::Error::custom(format!("tensor `{name}`: {e}")))?;
                    let [begin, end] = entry.data_offsets;
                    raw.tensors.push(Entry { name, dtype: entry.dtype, shape: entry.shape.0, begin, end });
                }
                Ok(raw)
            }
        }
        deserializer.deserialize_map(Names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str, bytes: u64, reason: &str) {
        let error = Header::parse(json.as_bytes(), bytes).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }

    #[test]
    fn invalid_headers_are_rejected() {
        let one = |fields: &str| format!(r#"{{"a":{{{fields}}}}}"#);
        refused("[]", 0, "an object of tensors");
        refused("{} x", 0, "trailing characters");
        refused(&one(r#""dtype":"F32","shape":[1],"data_offsets":[0,4]"#), 8, "4 bytes follow the last tensor");
        refused(&one(r#""dtype":"F32","shape":[1],"data_offsets":[0,4]"#), 2, "exceed the 2 bytes");
        refused(&one(r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#), 8, "leave a gap");
        refused(&one(r#""dtype":"F32","shape":[1],"data_offsets":[4,0]"#), 8, "are reversed");
        refused(&one(r#""dtype":"F32","shape":[2],"data_offsets":[0,4]"#), 4, "takes 8 bytes");
        refused(&one(r#""dtype":"f32","shape":[1],"data_offsets":[0,4]"#), 4, "unknown variant `f32`");
        refused(&one(r#""dtype":"F32","shape":[-1],"data_offsets":[0,4]"#), 4, "invalid value");
        refused(&one(r#""dtype":"F32","shape":["1"],"data_offsets":[0,4]"#), 4, "invalid type");
        refused(&one(r#""dtype":"F32","shape":[1],"data_offsets":[0]"#), 4, "invalid length");
        refused(&one(r#""dtype":"F32","shape":[1]"#), 4, "missing field `data_offsets`");
        refused(&one(r#""dtype":"F4","shape":[1],"data_offsets":[0,1]"#), 1, "does not fill whole bytes");
        refused(&one(r#""dtype":"F32","shape":[9223372036854775807,8],"data_offsets":[0,4]"#), 4, "overflows");
        refused(&one(r#""dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1e999"#), 1, "number out of range");
        refused(&one(r#""dtype":"U8","shape":[1],"data_offsets":[0,1],"x":"\ud800""#), 1, "hex escape");
        refused(&one(&format!(r#""dtype":"U8","shape":[{}1],"data_offsets":[0,1]"#, "1,".repeat(64))), 1, "more than 64 axes");
        refused(&one(r#""dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]"#), 1, "duplicate field `dtype`");
        refused(&one(r#""dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":[1e999]}"#), 1, "number out of range");
        refused(r#"{"a":["U8",[1],[0,1]]}"#, 1, "expected an object with dtype, shape and data_offsets");
        refused(r#"{"__metadata__":{"a":1}}"#, 0, "invalid type");
        refused(r#"{"__metadata__":[]}"#, 0, "invalid type");
        refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "duplicate name");
        let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        refused(twice, 1, "duplicate name `a`");
        let overlap = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        refused(overlap, 3, "tensor `b`: data_offsets [1, 3] overlap the previous tensor");
        assert!(Header::parse(b"\xff", 0).unwrap_err().contains("not UTF-8"));
    }

    #[test]
    fn accepts_what_the_format_allows() {
        assert_eq!(Header::parse(b"{}", 0).unwrap(), Header::default());
        assert_eq!(Header::parse(br#"{"__metadata__":null}  "#, 0).unwrap(), Header::default());
        let empty = Header::parse(br#"{"":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0],"extra":1}}"#, 0).unwrap();
        assert_eq!(empty.tensors[0].shape, [0, 3]);
        let scalar = Header::parse(br#"{"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}"#, 8).unwrap();
        assert_eq!(scalar.tensors[0].end, 8);
    }

    #[test]
    fn header_bytes_are_exact() {
        let header =
            Header::layout([("b".into(), DType::U8, vec![3]), ("a".into(), DType::F32, vec![1])], BTreeMap::from([("format".into(), "pt".into())])).unwrap();
        let json =
            br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}"#;
        let bytes = header.to_bytes();
        assert_eq!(bytes.len() % 8, 0);
        assert_eq!(bytes[8..8 + json.len()], json[..]);
        assert_eq!(Header::parse(&bytes[8..], 7).unwrap(), header);
    }

    #[test]
    fn empty_tensors_of_several_types_preserve_their_order() {
        let header = Header::layout([("a".into(), DType::U8, vec![0]), ("b".into(), DType::F32, vec![0])], BTreeMap::new()).unwrap();
        assert_eq!(Header::parse(&header.to_bytes()[8..], 0).unwrap(), header);
    }
}

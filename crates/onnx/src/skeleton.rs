//! The skeleton of a model file: its messages without the elements of large tensors.
//!
//! The file is read once, sequentially, skipping the elements of large tensors. The skeleton is again a
//! valid message, in which every tensor has a mark with its number instead of elements. It contains all
//! fields, known and unknown, in file order.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::{Path, PathBuf};

use prost::Message;

use super::proto::ModelProto;
use super::wire::{self, BYTES, FIXED32, FIXED64, Kind, VARINT, data};
use crate::error::{Error, Result};
use crate::files::File;

/// Smaller runs of elements remain in the skeleton.
pub(super) const MIN_RUN: u64 = 1024;
/// Maximum nesting depth of messages. The protobuf decoder permits 100.
const MAX_DEPTH: usize = 96;
/// Minimum average size of a message in bytes, with an allowance for small files: a decoded message takes a
/// few hundred bytes of memory, even if it is empty in the file.
const MIN_MESSAGE: u64 = 16;
const FEW_MESSAGES: u64 = 1024;
/// Maximum size of a skeleton in bytes.
const MAX_BYTES: usize = 1 << 30;
/// Size of a read.
const BUFFER: usize = 64 << 10;

/// The elements of a tensor, as a contiguous range of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The tensor field that contains them.
    pub field: u64,
    pub begin: u64,
    pub bytes: u64,
}

/// The skeleton of a model file.
#[derive(Debug, Default)]
pub(super) struct Skeleton {
    /// An encoded model whose tensors have marks.
    pub bytes: Vec<u8>,
    /// Skipped elements, by tensor number.
    pub runs: Vec<Option<Run>>,
}

impl Skeleton {
    /// The messages. Fails if they are not those of a model.
    pub fn decode(&self, path: &Path) -> Result<ModelProto> {
        ModelProto::decode(self.bytes.as_slice()).map_err(|e| Error::malformed(path, format!("not an ONNX model: {e}")))
    }

    /// Reads a file. Fails if it is not a well-formed message, or is nested too deeply or too large.
    pub fn read(path: &Path, file: &File) -> Result<Skeleton> {
        let length = file.length();
        let mut reader = Reader { path: path.to_owned(), file, length, buffer: Vec::new(), begin: 0, at: 0, copied: 0, messages: 0, runs: Vec::new() };
        let mut bytes = Vec::new();
        reader.message(Kind::Model, length, 0, &mut bytes)?;
        Ok(Skeleton { bytes, runs: reader.runs })
    }
}

struct Reader<'f> {
    path: PathBuf,
    file: &'f File,
    length: u64,
    buffer: Vec<u8>,
    /// File offset of the buffer.
    begin: u64,
    /// File offset of the next byte.
    at: u64,
    /// Number of copied bytes.
    copied: usize,
    /// Number of messages so far.
    messages: u64,
    runs: Vec<Option<Run>>,
}

impl Reader<'_> {
    fn malformed(&self, reason: &str) -> Error {
        Error::malformed(&self.path, format!("{reason} at byte {}: not an ONNX model, or truncated", self.at))
    }

    fn repeated(&self, field: &str) -> Error {
        let reason = format!("has the field `{field}` twice in one message: load and save the file with the `onnx` package, which merges them");
        Error::malformed(&self.path, reason)
    }

    /// The buffered bytes from the next one on; empty at the end of the file.
    fn buffered(&mut self) -> Result<&[u8]> {
        let place = |begin: u64, at: u64| usize::try_from(at.checked_sub(begin)?).ok();
        if place(self.begin, self.at).is_none_or(|place| place >= self.buffer.len()) {
            let count = self.length.saturating_sub(self.at).min(BUFFER as u64) as usize;
            self.buffer.resize(count, 0);
            self.file.read_exact_at(&mut self.buffer, self.at).map_err(Error::io("read", &self.path))?;
            self.begin = self.at;
        }
        Ok(place(self.begin, self.at).and_then(|place| self.buffer.get(place..)).unwrap_or_default())
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let Some(byte) = self.buffered()?.first().copied() else { return Err(self.malformed("unexpected end of a varint")) };
            self.at = self.at.saturating_add(1);
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.malformed("invalid varint"))
    }

    fn copy(&mut self, count: u64, out: &mut Vec<u8>) -> Result<()> {
        let mut left = usize::try_from(count).unwrap_or(usize::MAX);
        self.copied = self.copied.saturating_add(left);
        if self.copied > MAX_BYTES {
            return Err(Error::malformed(&self.path, format!("contains more than {} MB in addition to the elements of its tensors", MAX_BYTES >> 20)));
        }
        while left > 0 {
            let some = self.buffered()?;
            let some = some.get(..left.min(some.len())).unwrap_or_default();
            if some.is_empty() {
                return Err(self.malformed("unexpected end of a field"));
            }
            out.extend_from_slice(some);
            let count = some.len();
            left = left.saturating_sub(count);
            self.at = self.at.saturating_add(count as u64);
        }
        Ok(())
    }

    /// Counts a message. Fails if there are too many for the size of the file.
    fn count_message(&mut self) -> Result<()> {
        self.messages = self.messages.saturating_add(1);
        let limit = self.length.checked_div(MIN_MESSAGE).unwrap_or(0).saturating_add(FEW_MESSAGES);
        if self.messages > limit {
            return Err(Error::malformed(&self.path, format!("contains more than {limit} messages in {} bytes: most of them are empty", self.length)));
        }
        Ok(())
    }

    /// Reads a message up to its end, and appends its skeleton.
    fn message(&mut self, kind: Kind, end: u64, depth: usize, out: &mut Vec<u8>) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(self.malformed(&format!("messages are nested more than {MAX_DEPTH} deep")));
        }
        let number = self.runs.len();
        let mut marked = kind != Kind::Tensor;
        if !marked {
            self.runs.push(None);
        }
        let mut seen = Vec::new();
        while self.at < end {
            let key = self.varint()?;
            let (field, wire_type) = (key >> 3, key & 7);
            if field == 0 || (kind == Kind::Tensor && field == data::MARK) {
                return Err(self.malformed(&format!("invalid field number {field}")));
            }
            if !marked && data::is_run(field) {
                mark(number, out);
                marked = true;
            }
            match wire_type {
                VARINT => {
                    let value = self.varint()?;
                    wire::tag(field, wire_type, out);
                    wire::varint(value, out);
                }
                FIXED64 | FIXED32 => {
                    wire::tag(field, wire_type, out);
                    self.copy(if wire_type == FIXED64 { 8 } else { 4 }, out)?;
                }
                BYTES => {
                    let length = self.varint()?;
                    let Some(inner) = self.at.checked_add(length).filter(|inner| *inner <= end) else {
                        return Err(self.malformed("unexpected end of a field"));
                    };
                    // All other fields of models and graphs with a length are messages too, except for a few
                    // texts.
                    if kind.child(field).is_some() || matches!(kind, Kind::Model | Kind::Graph) {
                        self.count_message()?;
                    }
                    if let Some(child) = kind.child(field) {
                        // Protobuf parsers merge repeated occurrences, which would leave two marks in
                        // one tensor.
                        if let Some(name) = kind.single(field) {
                            if seen.contains(&field) {
                                return Err(self.repeated(name));
                            }
                            seen.push(field);
                        }
                        let mut content = Vec::new();
                        self.message(child, inner, depth.saturating_add(1), &mut content)?;
                        wire::bytes(field, content.len() as u64, out);
                        out.append(&mut content);
                    } else if kind == Kind::Tensor && data::is_run(field) && length >= MIN_RUN {
                        self.record_run(number, Run { field, begin: self.at, bytes: length })?;
                        self.at = inner;
                    } else {
                        wire::bytes(field, length, out);
                        self.copy(length, out)?;
                    }
                }
                _ => return Err(self.malformed(&format!("unknown wire type {wire_type}"))),
            }
        }
        if self.at != end {
            return Err(self.malformed("inconsistent message length"));
        }
        if !marked {
            mark(number, out);
        }
        Ok(())
    }

    fn record_run(&mut self, number: usize, run: Run) -> Result<()> {
        match self.runs.get_mut(number) {
            Some(place @ None) => *place = Some(run),
            _ => return Err(self.malformed("elements of one tensor in several fields")),
        }
        Ok(())
    }
}

fn mark(number: usize, out: &mut Vec<u8>) {
    wire::tag(data::MARK, VARINT, out);
    wire::varint(number as u64, out);
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, TensorProto};
    use super::*;

    fn read(bytes: &[u8]) -> Result<Skeleton> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, bytes).unwrap();
        Skeleton::read(&path, &File::open(&path).unwrap())
    }

    fn model() -> ModelProto {
        let large = TensorProto { dims: vec![300], data_type: Some(DataType::Float as i32), float_data: vec![1.5; 300], ..TensorProto::default() };
        let small = TensorProto { dims: vec![2], data_type: Some(DataType::Int8 as i32), raw_data: Some(vec![5, 6]), ..TensorProto::default() };
        let body = GraphProto { initializer: vec![TensorProto { name: Some("in a body".into()), ..large.clone() }], ..GraphProto::default() };
        let branch = AttributeProto { g: Some(body), ..AttributeProto::int("then_branch", 0) };
        let graph = GraphProto {
            node: vec![NodeProto { attribute: vec![branch], ..NodeProto::default() }],
            initializer: vec![TensorProto { name: Some("large".into()), ..large }, TensorProto { name: Some("small".into()), ..small }],
            ..GraphProto::default()
        };
        ModelProto { ir_version: Some(8), graph: Some(graph), ..ModelProto::default() }
    }

    #[test]
    fn skeletons_have_everything_but_large_tensors() {
        let mut file = model().encode_to_vec();
        // An unknown field.
        wire::bytes(99, 3, &mut file);
        file.extend(*b"abc");
        let skeleton = read(&file).unwrap();
        assert!(skeleton.bytes.len() < 200, "{}", skeleton.bytes.len());
        assert!(skeleton.bytes.ends_with(b"abc"));
        let decoded = ModelProto::decode(skeleton.bytes.as_slice()).unwrap();
        let graph = decoded.graph.unwrap();
        let body = graph.node[0].attribute[0].g.as_ref().unwrap();
        let tensors = [&body.initializer[0], &graph.initializer[0], &graph.initializer[1]];
        assert_eq!(tensors.map(|tensor| tensor.mark), [Some(0), Some(1), Some(2)]);
        let runs: Vec<Run> = skeleton.runs.iter().take(2).flatten().copied().collect();
        for run in runs {
            assert_eq!((run.field, run.bytes), (data::FLOATS, 1200));
            assert_eq!(file[run.begin as usize..][..4], 1.5f32.to_le_bytes());
        }
        assert_eq!((skeleton.runs[2], graph.initializer[1].raw_data.clone()), (None, Some(vec![5, 6])));
    }

    #[test]
    fn malformed_messages_are_refused_at_their_position() {
        let file = model().encode_to_vec();
        for end in 1..file.len() {
            // A file that ends between two fields is a smaller valid model.
            if let Ok(skeleton) = read(&file[..end]) {
                assert!(ModelProto::decode(&file[..end]).is_ok(), "{end}");
                assert!(skeleton.bytes.len() <= end + 6);
            }
        }
        let error_of = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert!(error_of(&[0x3a, 5, 0]).contains("unexpected end of a field at byte 2"));
        assert!(error_of(&[0x08]).contains("end of a varint"));
        assert!(error_of(&[0x0b]).contains("unknown wire type 3"));
        let mut deep = Vec::new();
        for _ in 0..40 {
            for field in [6, 5, 1] {
                let mut outer = Vec::new();
                wire::bytes(field, deep.len() as u64, &mut outer);
                outer.append(&mut deep);
                deep = outer;
            }
        }
        let mut model = Vec::new();
        wire::bytes(7, deep.len() as u64, &mut model);
        model.append(&mut deep);
        assert!(error_of(&model).contains("nested"), "{}", error_of(&model));
        // A node whose attribute has two tensors.
        assert!(error_of(&[0x3a, 8, 0x0a, 6, 0x2a, 4, 0x2a, 0, 0x2a, 0]).contains("`t` twice"));
        let tensor = [[vec![0x4a, 0x80, 8], vec![0; 1024]].concat(), [vec![0x4a, 0x80, 8], vec![0; 1024]].concat()].concat();
        let mut graph = Vec::new();
        wire::bytes(5, tensor.len() as u64, &mut graph);
        graph.extend(tensor);
        let mut twice = Vec::new();
        wire::bytes(7, graph.len() as u64, &mut twice);
        twice.extend(graph);
        assert!(error_of(&twice).contains("several fields"));
    }
}

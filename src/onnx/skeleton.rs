//! The messages of a file without the bytes of its tensors, which are left where they are.
//!
//! A file is read once, from front to back, past the elements of every tensor that is not small. What remains is a message again, in which
//! each tensor has a number in the place of its elements. All fields are in it, known or not, in the order of the file.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::{Path, PathBuf};

use super::wire::{self, BYTES, FIXED32, FIXED64, Kind, VARINT, data};
use crate::error::{Error, Result};
use crate::files::File;

/// Runs of fewer bytes stay in the message.
pub(super) const KEPT: u64 = 1024;
/// Messages in messages at most; the parser behind takes a hundred.
const DEEPEST: usize = 96;
/// Bytes at most of everything that is no tensor.
const MOST: usize = 1 << 30;
/// Bytes that are read at a time.
const BUFFER: usize = 64 << 10;

/// A run of elements in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The field of the tensor.
    pub field: u64,
    pub begin: u64,
    pub bytes: u64,
}

/// What a file says beside the elements of its tensors.
#[derive(Debug, Default)]
pub(super) struct Skeleton {
    /// A model, whose tensors have marks.
    pub bytes: Vec<u8>,
    /// Runs of elements that were passed over, by the number of their tensor.
    pub runs: Vec<Option<Run>>,
}

impl Skeleton {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is no message, or is too deep or too large.
    pub fn read(path: &Path, file: &File) -> Result<Skeleton> {
        let length = file.length();
        let mut reader = Reader { path: path.to_owned(), file, length, buffer: Vec::new(), begin: 0, at: 0, kept: 0, runs: Vec::new() };
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
    /// Where the buffer begins in the file.
    begin: u64,
    /// The next byte.
    at: u64,
    /// Bytes that were taken so far.
    kept: usize,
    runs: Vec<Option<Run>>,
}

impl Reader<'_> {
    fn broken(&self, reason: &str) -> Error {
        Error::malformed(&self.path, format!("{reason} at byte {}: not an ONNX model, or truncated", self.at))
    }

    fn repeated(&self, field: &str) -> Error {
        let reason = format!("has the field `{field}` twice in one message: load and save the file with the `onnx` package, which merges them");
        Error::malformed(&self.path, reason)
    }

    /// What is buffered from the next byte on; at the end of the file, nothing.
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
            let Some(byte) = self.buffered()?.first().copied() else { return Err(self.broken("a number ends")) };
            self.at = self.at.saturating_add(1);
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.broken("a number is too long"))
    }

    fn copy(&mut self, count: u64, out: &mut Vec<u8>) -> Result<()> {
        let mut left = usize::try_from(count).unwrap_or(usize::MAX);
        self.kept = self.kept.saturating_add(left);
        if self.kept > MOST {
            return Err(Error::malformed(&self.path, format!("holds more than {} MB beside the elements of its tensors", MOST >> 20)));
        }
        while left > 0 {
            let some = self.buffered()?;
            let some = some.get(..left.min(some.len())).unwrap_or_default();
            if some.is_empty() {
                return Err(self.broken("a field ends"));
            }
            out.extend_from_slice(some);
            let count = some.len();
            left = left.saturating_sub(count);
            self.at = self.at.saturating_add(count as u64);
        }
        Ok(())
    }

    /// Reads a message up to its end, and appends what is kept of it.
    fn message(&mut self, kind: Kind, end: u64, depth: usize, out: &mut Vec<u8>) -> Result<()> {
        if depth > DEEPEST {
            return Err(self.broken(&format!("messages are nested more than {DEEPEST} deep")));
        }
        let number = self.runs.len();
        let mut marked = kind != Kind::Tensor;
        if !marked {
            self.runs.push(None);
        }
        let mut seen = Vec::new();
        while self.at < end {
            let key = self.varint()?;
            let (field, stored) = (key >> 3, key & 7);
            if field == 0 || (kind == Kind::Tensor && field == data::MARK) {
                return Err(self.broken(&format!("a field has the number {field}")));
            }
            if !marked && data::is_run(field) {
                mark(number, out);
                marked = true;
            }
            match stored {
                VARINT => {
                    let value = self.varint()?;
                    wire::tag(field, stored, out);
                    wire::varint(value, out);
                }
                FIXED64 | FIXED32 => {
                    wire::tag(field, stored, out);
                    self.copy(if stored == FIXED64 { 8 } else { 4 }, out)?;
                }
                BYTES => {
                    let length = self.varint()?;
                    let Some(inner) = self.at.checked_add(length).filter(|inner| *inner <= end) else { return Err(self.broken("a field ends")) };
                    if let Some(child) = kind.child(field) {
                        // Protobuf parsers merge repeated occurrences, which would leave two marks in one tensor.
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
                    } else if kind == Kind::Tensor && data::is_run(field) && length >= KEPT {
                        self.pass_over(number, Run { field, begin: self.at, bytes: length })?;
                        self.at = inner;
                    } else {
                        wire::bytes(field, length, out);
                        self.copy(length, out)?;
                    }
                }
                _ => return Err(self.broken(&format!("a field is stored in the unknown way {stored}"))),
            }
        }
        if self.at != end {
            return Err(self.broken("a message ends"));
        }
        if !marked {
            mark(number, out);
        }
        Ok(())
    }

    fn pass_over(&mut self, number: usize, run: Run) -> Result<()> {
        match self.runs.get_mut(number) {
            Some(place @ None) => *place = Some(run),
            _ => return Err(self.broken("a tensor has its elements in several pieces")),
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
    fn elements_stay_in_the_file_and_everything_else_is_kept() {
        let mut file = model().encode_to_vec();
        // A field that nobody knows.
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
    fn broken_messages_are_refused_where_they_break() {
        let file = model().encode_to_vec();
        for end in 1..file.len() {
            // What ends between two fields of the model is a smaller model.
            if let Ok(skeleton) = read(&file[..end]) {
                assert!(ModelProto::decode(&file[..end]).is_ok(), "{end}");
                assert!(skeleton.bytes.len() <= end + 6);
            }
        }
        let said = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert!(said(&[0x3a, 5, 0]).contains("a field ends at byte 2"));
        assert!(said(&[0x08]).contains("a number ends"));
        assert!(said(&[0x0b]).contains("unknown way 3"));
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
        assert!(said(&model).contains("nested"), "{}", said(&model));
        // A node whose attribute has two tensors.
        assert!(said(&[0x3a, 8, 0x0a, 6, 0x2a, 4, 0x2a, 0, 0x2a, 0]).contains("`t` twice"));
        let tensor = [[vec![0x4a, 0x80, 8], vec![0; 1024]].concat(), [vec![0x4a, 0x80, 8], vec![0; 1024]].concat()].concat();
        let mut graph = Vec::new();
        wire::bytes(5, tensor.len() as u64, &mut graph);
        graph.extend(tensor);
        let mut twice = Vec::new();
        wire::bytes(7, graph.len() as u64, &mut twice);
        twice.extend(graph);
        assert!(said(&twice).contains("several pieces"));
    }
}

//! Where the bytes of a model file go, known before any weight is read.
//!
//! Parts of a message may stand one after another in protobuf: the graph without its weights, then each weight as
//! a tensor whose elements come last, so that they can be written block by block.

use prost::Message;

use super::proto::{DataLocation, DataType, ModelProto, StringStringEntryProto, TensorProto};
use super::write::Draft;
use crate::error::{Error, Result};
use crate::store::writer::Piece;

/// Name of the model file.
pub const MODEL: &str = "model.onnx";
/// Name of the file beside it that holds the weights of a large model.
pub const DATA: &str = "model.onnx.data";
/// Most bytes that parsers of protobuf take.
pub const LARGEST: u64 = (1 << 31) - 1;

/// Tensors in the second file begin at multiples of this, so that they can be mapped into memory.
const ALIGNMENT: u64 = 4096;
/// Smaller tensors stay in the model file, where shape inference finds them.
const SMALL: u64 = 1024;

/// The tags of `ModelProto.graph`, `GraphProto.initializer` and `TensorProto.raw_data`.
const GRAPH: u8 = 7 << 3 | 2;
const INITIALIZER: u8 = 5 << 3 | 2;
const RAW_DATA: u8 = 9 << 3 | 2;

/// A file, piece by piece; items have the numbers of the draft's weights.
pub type Layout = Vec<(String, Vec<Piece>)>;

/// Lays out the files for weights of these shapes: one file, or two when one would be larger than `largest`.
///
/// # Errors
/// A weight is too large to be counted.
pub fn layout(draft: &Draft, shapes: &[Vec<usize>], largest: u64) -> Result<Layout> {
    let one = single(draft, shapes, |_| false)?;
    if bytes(&one) <= largest {
        return Ok(vec![(MODEL.into(), one)]);
    }
    let outside = |size: u64| size >= SMALL;
    let mut data = Vec::new();
    let mut at = 0u64;
    for (index, shape) in shapes.iter().enumerate() {
        let size = byte_count(&draft.weights[index].name, shape)?;
        if outside(size) {
            let start = at.next_multiple_of(ALIGNMENT);
            data.push(Piece::Bytes(vec![0; (start - at) as usize]));
            data.push(Piece::Item { index, bytes: size });
            at = start + size;
        }
    }
    Ok(vec![(MODEL.into(), single(draft, shapes, outside)?), (DATA.into(), data)])
}

/// Bytes of a file.
pub fn bytes(pieces: &[Piece]) -> u64 {
    pieces.iter().map(Piece::len).sum()
}

fn byte_count(name: &str, shape: &[usize]) -> Result<u64> {
    let count = shape.iter().try_fold(4u64, |size, d| size.checked_mul(*d as u64));
    count.ok_or_else(|| Error::tensor(name, "its size overflows", ""))
}

fn single(draft: &Draft, shapes: &[Vec<usize>], outside: impl Fn(u64) -> bool) -> Result<Vec<Piece>> {
    let mut head = draft.model.clone();
    let body = head.graph.take().unwrap_or_default().encode_to_vec();
    let mut at = 0u64;
    let mut tensors = Vec::with_capacity(shapes.len());
    for (slot, shape) in draft.weights.iter().zip(shapes) {
        let size = byte_count(&slot.name, shape)?;
        let mut tensor = TensorProto { data_type: Some(DataType::Float as i32), name: Some(slot.name.clone()), ..TensorProto::default() };
        tensor.dims = shape.iter().map(|d| *d as i64).collect();
        let away = outside(size);
        if away {
            tensor.data_location = Some(DataLocation::External as i32);
            at = at.next_multiple_of(ALIGNMENT);
            tensor.external_data = [("location", DATA.to_owned()), ("offset", at.to_string()), ("length", size.to_string())]
                .map(|(k, v)| StringStringEntryProto::new(k, v))
                .to_vec();
            at += size;
        }
        let mut content = tensor.encode_to_vec();
        if !away {
            content.push(RAW_DATA);
            varint(size, &mut content);
        }
        let length = content.len() as u64 + if away { 0 } else { size };
        let mut prefix = vec![INITIALIZER];
        varint(length, &mut prefix);
        prefix.append(&mut content);
        tensors.push((prefix, (!away).then_some(size)));
    }
    let length = body.len() as u64 + tensors.iter().map(|(prefix, size)| prefix.len() as u64 + size.unwrap_or(0)).sum::<u64>();
    let mut pending = head.encode_to_vec();
    pending.push(GRAPH);
    varint(length, &mut pending);
    pending.extend(body);
    let mut pieces = Vec::new();
    for (index, (prefix, size)) in tensors.into_iter().enumerate() {
        pending.extend(prefix);
        if let Some(bytes) = size {
            pieces.push(Piece::Bytes(std::mem::take(&mut pending)));
            pieces.push(Piece::Item { index, bytes });
        }
    }
    pieces.push(Piece::Bytes(pending));
    Ok(pieces)
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The model that the pieces of a file spell, elements of weights left empty.
///
/// # Errors
/// They do not parse.
pub fn decode(pieces: &[Piece]) -> Result<ModelProto, prost::DecodeError> {
    let mut bytes = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Bytes(known) => bytes.extend_from_slice(known),
            Piece::Item { bytes: count, .. } => bytes.resize(bytes.len() + *count as usize, 0),
        }
    }
    ModelProto::decode(bytes.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Graph;
    use crate::onnx::draft;

    fn example() -> (Draft, Vec<Vec<usize>>) {
        let text = "input x: float[batch, 4]\nparam w: float[300, 4]\nparam b: float[300]\nfc = Linear(x, w, b) -> float[batch, 300]\nlong = Relu(fc) -> float[batch, 300]\noutput y = long\n";
        let graph: Graph = text.parse().unwrap();
        (draft(&graph, 17, &[("a".to_owned(), "b".to_owned())].into()).unwrap(), vec![vec![300, 4], vec![300]])
    }

    #[test]
    fn pieces_are_one_message() {
        let (draft, shapes) = example();
        let files = layout(&draft, &shapes, LARGEST).unwrap();
        assert_eq!(files.len(), 1);
        let model = decode(&files[0].1).unwrap();
        let mut plain = draft.model.clone();
        for (slot, shape) in draft.weights.iter().zip(&shapes) {
            let tensor = TensorProto {
                dims: shape.iter().map(|d| *d as i64).collect(),
                data_type: Some(1),
                name: Some(slot.name.clone()),
                raw_data: Some(vec![0; 4 * shape.iter().product::<usize>()]),
                ..TensorProto::default()
            };
            plain.graph.as_mut().unwrap().initializer.push(tensor);
        }
        assert_eq!(model, plain);
        assert_eq!(plain.encoded_len() as u64, bytes(&files[0].1));
    }

    #[test]
    fn large_weights_go_beside() {
        let (draft, shapes) = example();
        let files = layout(&draft, &shapes, 1000).unwrap();
        assert_eq!(files.len(), 2);
        let model = decode(&files[0].1).unwrap();
        let graph = model.graph.unwrap();
        let entries: Vec<_> = graph.initializer.iter().map(|t| t.external_data.iter().map(|e| e.value.clone().unwrap()).collect::<Vec<_>>()).collect();
        assert_eq!(entries, [["model.onnx.data", "0", "4800"], ["model.onnx.data", "8192", "1200"]]);
        assert_eq!(bytes(&files[1].1), 8192 + 1200);
    }
}

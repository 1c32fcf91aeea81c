//! Layout of the bytes of a model file, before any weight is read.
//!
//! The parts of a protobuf message can be concatenated: first the graph without weights, then each
//! weight as a tensor whose elements come last, so that they can be written block by block.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::{Path, PathBuf};

use prost::Message;

use super::proto::{DataLocation, ModelProto, StringStringEntryProto, TensorProto};
use super::wire::varint;
use super::{Draft, TensorSpec};
use crate::error::{Error, Result};
use crate::files;
pub use crate::runtime::{DECODERS, ENCODER, encoder_decoder};
use crate::store::writer::Piece;

/// Name of the model file.
pub const MODEL: &str = "model.onnx";
/// Name of the external data file of a large model.
pub const DATA: &str = "model.onnx.data";
/// Maximum size of a protobuf message in bytes.
pub const LARGEST: u64 = (1 << 31) - 1;

/// Alignment of tensors in the data file, for memory mapping.
pub(super) const ALIGNMENT: u64 = 4096;
/// Smaller tensors remain in the model file, in which shape inference can read them.
pub(super) const SMALL: u64 = 1024;

/// The tags of `ModelProto.graph`, `GraphProto.initializer` and `TensorProto.raw_data`.
const GRAPH: u8 = 7 << 3 | 2;
const INITIALIZER: u8 = 5 << 3 | 2;
const RAW_DATA: u8 = 9 << 3 | 2;

/// The file to open of a model that was written to a folder.
pub fn entry(folder: &Path) -> PathBuf {
    let model = folder.join(MODEL);
    let encoder = || encoder_decoder(folder).map(|[encoder, ..]| encoder);
    if files::is_file(&model) { model } else { encoder().unwrap_or(model) }
}

/// Names and pieces of the files. Items have the indices of the draft's weights.
pub type Pieces = Vec<(String, Vec<Piece>)>;

/// Lays out one file, or two if it would exceed `largest` bytes.
pub fn layout(draft: &Draft, largest: u64) -> Result<Pieces> {
    layout_as([MODEL, DATA], draft, largest)
}

/// [`layout`] with other file names than [`MODEL`] and [`DATA`].
pub fn layout_as([name, data_name]: [&str; 2], draft: &Draft, largest: u64) -> Result<Pieces> {
    let one = single(draft, data_name, |_| false)?;
    if bytes(&one) <= largest {
        return Ok(vec![(name.into(), one)]);
    }
    let is_external = |size: u64| size >= SMALL;
    let mut data = Vec::new();
    let mut at = 0u64;
    for (index, part, tensor) in tensors(draft) {
        let size = byte_count(tensor)?;
        if is_external(size) {
            let (start, end) = allocate(at, size, tensor)?;
            data.push(Piece::Bytes(vec![0; start.saturating_sub(at) as usize]));
            data.push(Piece::Item { index, part, bytes: size });
            at = end;
        }
    }
    let model = single(draft, data_name, is_external)?;
    Ok(vec![(name.into(), model), (data_name.into(), data)])
}

/// Size of a file in bytes.
pub fn bytes(pieces: &[Piece]) -> u64 {
    pieces.iter().map(Piece::len).fold(0, u64::saturating_add)
}

/// The tensors of all weights: index of the weight, index of the part, tensor.
fn tensors(draft: &Draft) -> impl Iterator<Item = (usize, usize, &TensorSpec)> {
    draft.weights.iter().enumerate().flat_map(|(index, weight)| weight.tensors.iter().enumerate().map(move |(part, tensor)| (index, part, tensor)))
}

fn byte_count(tensor: &TensorSpec) -> Result<u64> {
    let bits = tensor.dims.iter().try_fold(tensor.data_type.bits(), |bits: u64, d| bits.checked_mul(*d as u64));
    bits.map(|bits| bits.div_ceil(8)).ok_or_else(|| overflows(tensor))
}

fn overflows(tensor: &TensorSpec) -> Error {
    Error::tensor(&tensor.name, "its size overflows", "")
}

/// Start and end of a tensor in the data file, after `at` bytes.
fn allocate(at: u64, size: u64, tensor: &TensorSpec) -> Result<(u64, u64)> {
    let start = at.checked_next_multiple_of(ALIGNMENT);
    start.and_then(|start| Some((start, start.checked_add(size)?))).ok_or_else(|| overflows(tensor))
}

fn single(draft: &Draft, data_name: &str, is_external: impl Fn(u64) -> bool) -> Result<Vec<Piece>> {
    let mut head = draft.model.clone();
    let body = head.graph.take().unwrap_or_default().encode_to_vec();
    let mut at = 0u64;
    let mut written = Vec::new();
    for (index, part, spec) in tensors(draft) {
        let size = byte_count(spec)?;
        let mut tensor = TensorProto { data_type: Some(spec.data_type as i32), name: Some(spec.name.clone()), ..TensorProto::default() };
        tensor.dims = spec.dims.iter().map(|d| *d as i64).collect();
        let external = is_external(size);
        if external {
            tensor.data_location = Some(DataLocation::External as i32);
            let (start, end) = allocate(at, size, spec)?;
            tensor.external_data = [("location", data_name.to_owned()), ("offset", start.to_string()), ("length", size.to_string())]
                .map(|(k, v)| StringStringEntryProto::new(k, v))
                .to_vec();
            at = end;
        }
        let mut content = tensor.encode_to_vec();
        if !external {
            content.push(RAW_DATA);
            varint(size, &mut content);
        }
        let length = (content.len() as u64).checked_add(if external { 0 } else { size }).ok_or_else(|| overflows(spec))?;
        let mut prefix = vec![INITIALIZER];
        varint(length, &mut prefix);
        prefix.append(&mut content);
        written.push((prefix, (!external).then_some(Piece::Item { index, part, bytes: size })));
    }
    let lengths = written.iter().flat_map(|(prefix, item)| [prefix.len() as u64, item.as_ref().map_or(0, Piece::len)]);
    let length = lengths.fold(body.len() as u64, u64::saturating_add);
    let mut pending = head.encode_to_vec();
    pending.push(GRAPH);
    varint(length, &mut pending);
    pending.extend(body);
    let mut pieces = Vec::new();
    for (prefix, item) in written {
        pending.extend(prefix);
        if let Some(item) = item {
            pieces.push(Piece::Bytes(std::mem::take(&mut pending)));
            pieces.push(item);
        }
    }
    pieces.push(Piece::Bytes(pending));
    Ok(pieces)
}

/// Decodes the model in the pieces of a file. The elements of weights are zero.
pub fn decode(pieces: &[Piece]) -> Result<ModelProto, prost::DecodeError> {
    let mut bytes = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Bytes(known) => bytes.extend_from_slice(known),
            Piece::Item { bytes: count, .. } => bytes.resize(bytes.len().saturating_add(*count as usize), 0),
        }
    }
    ModelProto::decode(bytes.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Graph;
    use crate::proto::DataType;
    use crate::store::{ActivationScheme, Codes, DType, Granularity, QuantizationSpec};
    use crate::{Style, draft};

    fn example() -> Draft {
        let text = "input x: float[batch, 4]\nparam w: float[300, 4]\nparam b: float[300]\nparam q: float[300, 300]\nfc = Linear(x, w, b) -> float[batch, 300]\nlong = Linear(fc, q) -> float[batch, 300]\noutput y = long\n";
        let graph: Graph = text.parse().unwrap();
        let affine = QuantizationSpec {
            codes: Codes::INT8,
            granularity: Granularity::Channel,
            symmetric: false,
            scale_dtype: DType::F32,
            activations: ActivationScheme::DynamicToken,
        };
        let style = Style { integers: [("q".to_owned(), affine)].into(), ..Style::default() };
        draft(&graph, &style, &[("a".to_owned(), "b".to_owned())].into()).unwrap()
    }

    #[test]
    fn pieces_are_one_message() {
        let draft = example();
        let files = layout(&draft, LARGEST).unwrap();
        assert_eq!(files.len(), 1);
        let model = decode(&files[0].1).unwrap();
        let mut plain = draft.model.clone();
        for (tensor, width) in draft.weights.iter().flat_map(|weight| &weight.tensors).zip([4, 4, 1, 4, 1]) {
            let tensor = TensorProto {
                dims: tensor.dims.iter().map(|d| *d as i64).collect(),
                data_type: Some(tensor.data_type as i32),
                name: Some(tensor.name.clone()),
                raw_data: Some(vec![0; width * tensor.dims.iter().product::<usize>()]),
                ..TensorProto::default()
            };
            plain.graph.as_mut().unwrap().initializer.push(tensor);
        }
        assert_eq!(model, plain);
        assert_eq!(plain.encoded_len() as u64, bytes(&files[0].1));
    }

    #[test]
    fn element_sizes_follow_the_data_type() {
        let size = |data_type| byte_count(&TensorSpec { name: "a".into(), data_type, dims: vec![3, 5] }).unwrap();
        use DataType::{Bool, Double, Float, Float16, Int4, Int32, Int64, Uint4, Uint8};
        let sizes = [Uint4, Int4, Bool, Uint8, Float16, Float, Int32, Double, Int64].map(size);
        assert_eq!(sizes, [8, 8, 15, 15, 30, 60, 60, 120, 120]);
    }

    #[test]
    fn large_weights_are_external_data() {
        let draft = example();
        let files = layout(&draft, 1000).unwrap();
        assert_eq!(files.len(), 2);
        let graph = decode(&files[0].1).unwrap().graph.unwrap();
        let entries: Vec<_> = graph.initializer.iter().map(|t| t.external_data.iter().map(|e| e.value.clone().unwrap()).collect::<Vec<_>>()).collect();
        let external = |offset: &str, length: &str| vec![DATA.to_owned(), offset.to_owned(), length.to_owned()];
        // The zero points, one byte each, are below the limit.
        assert_eq!(
            entries.into_iter().filter(|e| !e.is_empty()).collect::<Vec<_>>(),
            [external("0", "4800"), external("8192", "1200"), external("12288", "90000"), external("102400", "1200")]
        );
        assert_eq!(bytes(&files[1].1), 102_400 + 1200);
    }

    #[test]
    fn layers_that_share_an_integer_weight_load_in_onnx_runtime() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let round = "FakeQuantize{\"scale\":0.1,\"zero_point\":0}";
        let conv = "Conv{\"stride\":1,\"padding\":1,\"dilation\":1,\"groups\":1}";
        let products = "input x: float[batch, 8]\nparam w: float[8, 8]\na = Linear(x, w) -> float[batch, 8]\nb = Tanh(a) -> float[batch, 8]\nc = Linear(b, w) -> float[batch, 8]\noutput y = c\n";
        let image = "float[batch, 4, 6, 6]";
        let convolutions = format!(
            "input x: {image}\nparam w: float[4, 4, 3, 3]\nr = {round}(x) -> {image}\na = {conv}(r, w) -> {image}\ns = {round}(a) -> {image}\nb = {conv}(s, w) -> {image}\nc = {round}(b) -> {image}\noutput y = c\n"
        );
        let affine = |activations, symmetric| QuantizationSpec {
            codes: Codes::INT8,
            granularity: Granularity::Channel,
            symmetric,
            scale_dtype: DType::F32,
            activations,
        };
        for (text, affine) in [
            (products, affine(ActivationScheme::DynamicToken, true)),
            (products, affine(ActivationScheme::DynamicToken, false)),
            (&products.replace("Linear(", "Linear{\"input_major\":true}("), affine(ActivationScheme::DynamicToken, true)),
            (&convolutions, affine(ActivationScheme::None, true)),
        ] {
            let graph: Graph = text.parse().unwrap();
            let style = Style { integers: [("w".to_owned(), affine)].into(), ..Style::default() };
            let model = decode(&layout(&draft(&graph, &style, &std::collections::BTreeMap::new()).unwrap(), LARGEST).unwrap()[0].1).unwrap();
            let loaded = crate::runtime::Session::from_model(&model, std::path::Path::new(MODEL), crate::runtime::Options::default());
            loaded.unwrap_or_else(|e| panic!("{text}: {e}"));
        }
    }
}

//! Arbitrary bytes as an ONNX file: a decoded model is unchanged after encoding and decoding it, independent
//! of the order of its fields.

#![no_main]

use compress_onnx::file::decode;
use compress_onnx::proto::ModelProto;
use compress_core::store::writer::Piece;
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let Ok(model) = decode(&[Piece::Bytes(bytes.to_vec())]) else { return };
    let written = model.encode_to_vec();
    let again = ModelProto::decode(written.as_slice()).expect("an encoded model can be decoded");
    // The encoded bytes are compared, because NaN is not equal to itself.
    assert_eq!(again.encode_to_vec(), written);
});

//! Arbitrary bytes as an ONNX file: what can be read is the same after it was written, whatever order its fields came in.

#![no_main]

use compress::onnx::file::decode;
use compress::onnx::proto::ModelProto;
use compress::store::writer::Piece;
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let Ok(model) = decode(&[Piece::Bytes(bytes.to_vec())]) else { return };
    let written = model.encode_to_vec();
    let again = ModelProto::decode(written.as_slice()).expect("what was written can be read");
    // Bytes, since NaN is not equal to itself.
    assert_eq!(again.encode_to_vec(), written);
});

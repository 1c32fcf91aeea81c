//! Rules that need the reader of ONNX files.

mod onnxruntime;

pub(super) use self::onnxruntime::check;
pub(crate) use self::onnxruntime::find;
pub(super) use crate::data::unreadable_tokenizer;

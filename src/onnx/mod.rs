//! ONNX: the messages of the format, and how a graph is spelled in its operators.

pub mod proto;

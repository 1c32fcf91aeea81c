//! ONNX: the messages of the format, how a graph is spelled in its operators, and where the bytes go.

pub mod file;
pub mod proto;
mod spell;
mod speller;
pub mod write;

pub use write::{Draft, Slot, draft};

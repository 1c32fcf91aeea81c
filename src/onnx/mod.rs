//! ONNX: the messages of the format, how a graph is spelled in its operators, and where the bytes go.

pub mod file;
mod lower;
mod lowering;
mod place;
pub mod proto;
mod style;
mod write;

pub use place::{Slot, Tensor};
pub use style::{OPSETS, Precision, Style, WeightOnly};
pub use write::{Draft, draft};

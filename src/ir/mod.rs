//! What a model computes: one small typed graph.
//!
//! Ops are layers, one file each in [`ops`]; they say how types, axes and values follow from their inputs. The
//! graph knows no file, no architecture and no pass. Where ONNX has an op of the same name, its semantics hold.

pub mod axes;
mod build;
pub mod cache;
mod check;
pub mod decoder;
mod dim;
mod dim_text;
mod file;
mod graph;
pub mod ops;
mod port;
pub mod quantizers;
mod rebuild;
mod text;

pub use axes::{Axes, Axis, Hold};
pub use build::{Builder, Catalog};
pub use check::check;
pub use dim::{Bindings, Dim};
pub use file::GraphFile;
pub use graph::{Element, Graph, Kind, Node, TensorType, Value, ValueId};
pub use ops::{Op, OpSpec};
pub use port::{Port, given};
pub use rebuild::{Rewrite, difference, part, rebuild, same};

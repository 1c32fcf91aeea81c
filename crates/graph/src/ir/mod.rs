//! The intermediate representation: a small typed graph of a model's computation.
//!
//! Ops are at the granularity of layers, one file each in [`ops`]. Each defines how output type, axes and
//! value follow from its inputs. The graph knows nothing about files, architectures or passes. Ops that
//! share a name with an ONNX operator have its semantics.

pub mod axes;
mod build;
mod check;
pub mod decoder;
mod dim;
mod dim_text;
mod file;
mod graph;
pub mod kv_cache;
pub mod low_rank;
pub mod ops;
mod port;
pub mod quantizers;
mod rebuild;
mod tensor_type;
mod text;

pub use axes::{Axes, Axis, Slicing};
pub use build::{Builder, Catalog, is_in_modules};
pub use check::check;
pub use dim::{Bindings, Dim};
pub use file::GraphFile;
pub use graph::{Graph, Kind, Node, Value, ValueId};
pub use ops::{Op, OpSpec};
pub use port::{Port, input_tensor};
pub use rebuild::{Rewrite, difference, is_equivalent, part, rebuild, subgraph};
pub use tensor_type::{Element, TensorType};

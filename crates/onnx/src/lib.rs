//! Reading and writing of ONNX files: protobuf messages, conversion between graphs and ONNX operators,
//! and the layout of weights.

mod body_layers;
mod branching;
mod check;
mod constant_sizes;
pub mod control_flow;
mod converted;
mod densified;
mod dequantized;
mod elements;
mod external;
pub mod file;
mod float_layers;
mod functions;
mod initializer_layout;
mod initializer_roles;
mod inlining;
mod input_sizes;
mod interpreter;
mod kv_cache;
mod lift;
mod lower;
mod lowering;
mod masked_scores;
mod model_file;
mod numbers;
mod opaque_subgraph;
mod open_session;
mod precision;
pub mod proto;
mod renaming;
mod replacement;
mod rewrite;
mod run_sizes;
pub mod runtime;
mod sizes;
mod skeleton;
mod splice;
mod style;
mod subgraph_parts;
mod upgrade;
mod value_info;
mod wide_values;
mod widened;
mod wire;
mod write;

pub use check::NEWEST_OPSET;
pub use initializer_layout::{InitializerLayout, TensorSpec, first_opset};
pub use kv_cache::CachedAttention;
pub use model_file::ModelFile;
pub use rewrite::Rewritten;
pub use style::{Cache, OPSETS, Precision, Style, TiedHead, WeightOnly};
pub use write::{Draft, draft};

use compress_core::{cache, error, files, program, store, work};
use compress_graph::ir;
use compress_kernels as kernel;

/// Returns `wanted`, or `wanted` with a number if that name is taken, and marks the result as taken.
fn fresh(taken: &mut std::collections::BTreeSet<String>, wanted: String) -> String {
    let mut name = wanted.clone();
    let mut count = 1;
    while !taken.insert(name.clone()) {
        count += 1;
        name = format!("{wanted}_{count}");
    }
    name
}

//! ONNX: the messages of the format, how a graph is spelled in its operators, and where the bytes go.

mod check;
mod dequantized;
mod elements;
mod external;
pub mod file;
mod lift;
mod lower;
mod lowering;
mod model_file;
mod piece;
mod place;
pub mod proto;
mod quantized;
mod rewrite;
mod sizes;
mod skeleton;
mod splice;
mod style;
mod upgrade;
mod uses;
mod wire;
mod write;

pub use check::NEWEST;
pub use model_file::ModelFile;
pub use place::{Slot, Tensor};
pub use rewrite::Rewritten;
pub use style::{OPSETS, Precision, Style, WeightOnly};
pub use write::{Draft, draft};

/// A name that nobody has taken: the wanted one, or that with a number.
fn fresh(taken: &mut std::collections::BTreeSet<String>, wanted: String) -> String {
    let mut name = wanted.clone();
    let mut count = 1;
    while !taken.insert(name.clone()) {
        count += 1;
        name = format!("{wanted}_{count}");
    }
    name
}

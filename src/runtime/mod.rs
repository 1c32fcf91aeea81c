//! ONNX Runtime, loaded when it is first needed.

mod find;
mod session;

pub use find::{LIBRARY_VARIABLE, candidates, library};
pub use session::{Options, Session};

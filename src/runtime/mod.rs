//! ONNX Runtime, loaded when it is first needed.

mod element;
mod fetch;
mod find;
mod session;

pub use fetch::fetch;
pub use find::{LIBRARY_VARIABLE, Library, candidates, description, in_use, library};
pub use session::{Options, Session, beside, floats, integers};

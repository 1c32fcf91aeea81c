//! ONNX Runtime, loaded when it is first needed.

mod decoder;
mod element;
mod fetch;
mod find;
mod session;
mod watch;

pub use decoder::KeptTokens;
pub use fetch::fetch;
pub use find::{LIBRARY_VARIABLE, Library, candidates, description, in_use, library};
pub use session::{Options, Session, beside, floats, integers};
pub use watch::Limits;

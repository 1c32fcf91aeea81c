//! ONNX Runtime, loaded on first use.

mod decoder;
mod element;
mod encoder_decoder;
mod fetch;
mod find;
mod session;
mod watch;

pub use decoder::DecoderCache;
pub use encoder_decoder::{DECODERS, ENCODER, EncoderDecoderSession, encoder_decoder};
pub use fetch::fetch;
pub use find::{LIBRARY_VARIABLE, Library, candidates, description, in_use, library};
pub(crate) use session::{Loading, SizeCheck, to_host};
pub use session::{Options, Session, floats, integers, to_device_of};
pub use watch::Limits;

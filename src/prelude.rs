//! The most common items of the crate, for a glob import.
//!
//! `Result` and `Error` are not included, because they would shadow those of the standard library.

pub use crate::evaluation::Evaluate;
pub use crate::export::{ByteSize, Export, Layout, Safetensors};
pub use crate::model::Model;
pub use crate::pass::{Amount, Cast, FloatFormat, PruneUnstructured, Quantize, QuantizeDynamic, Step};
pub use crate::pipeline::{Cached, Pipeline};
pub use crate::recipe::Recipe;
pub use crate::report::Report;
pub use crate::work::{Cancel, Event, Progress};
#[cfg(feature = "run")]
pub use crate::{
    data::Data,
    export::Onnx,
    pass::{Distill, Finetune, PruneStructured, QuantizeStatic, Training},
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_shared_between_threads_and_printed() {
        fn check<T: Send + Sync + std::fmt::Debug>() {}
        check::<(Model, Recipe, Report, Step, Export)>();
        check::<(Pipeline, crate::pipeline::Builder, crate::pipeline::Plan, crate::pipeline::Check, Cached)>();
        check::<(crate::Error, crate::ParseError, Cancel)>();
    }
}

//! The files of an export: one, or for encoder-decoder models with caches an encoder and two decoders, in the
//! files that optimum loads.

use crate::analysis::EncoderDecoder;
use crate::error::{Error, Result};
use crate::ir::decoder::LOGITS;
use crate::ir::{Element, Graph};
use crate::model::Model;
use crate::onnx::proto::DataType;
use crate::onnx::{Cache, Precision, Style, file};
use crate::run_state::RunState;

/// A file of an export.
pub(super) struct Part {
    /// Names of the model file and of its external data file.
    pub names: [String; 2],
    pub graph: Graph,
    pub style: Style,
}

/// The files of an encoder-decoder model. With 16-bit floats, these are also the type of the values that
/// pass from one file to another.
pub(super) fn encoder_decoder(graph: &Graph, style: &Style, model: &Model, run: &RunState) -> Result<Vec<Part>> {
    let refused = |reason: &str| Error::option("onnx: cache", reason);
    if model.onnx.is_some() {
        return Err(refused("an encoder-decoder model that was opened from an .onnx file has one file: use the folder that it was exported from"));
    }
    if run.file.is_some() {
        return Err(refused("an encoder-decoder model with caches is written to three files: use a folder as output"));
    }
    let EncoderDecoder { encoder, first, next } = EncoderDecoder::from_graph(graph)?;
    let part = |name: &str, part: Graph, cache: Cache| {
        let mut style = Style { cache, ..style.clone() };
        if style.precision == Precision::Float16 {
            let is_internal = |name: &str| name != LOGITS && graph.inputs().all(|(_, value)| value.name != name);
            let floats = |name: &str, element: Element| (element == Element::Float && is_internal(name)).then(|| (name.to_owned(), DataType::Float16));
            style.input_types.extend(part.inputs().filter_map(|(_, value)| floats(&value.name, value.ty.element)));
            style.output_types.extend(part.outputs().iter().filter_map(|(name, id)| floats(name, part.value(*id).ty.element)));
        }
        Part { names: [name.to_owned(), format!("{name}.data")], graph: part, style }
    };
    let [first_name, next_name] = file::DECODERS;
    Ok(vec![part(file::ENCODER, encoder, Cache::None), part(first_name, first, Cache::None), part(next_name, next, Cache::AfterEncoder)])
}

//! The model that data must match.

use std::path::Path;

use serde_json::{Map, Value};

use super::{DECODER_INPUT_IDS, INPUT_IDS};
use crate::ir::Port;
use crate::model::SynthesizedFiles;

/// The model whose inputs the data must match.
#[derive(Debug, Clone, Copy)]
pub struct Target<'m> {
    /// Folder of the tokenizer or the image processor.
    pub folder: &'m Path,
    /// Files of that folder that were synthesized from the weight file.
    pub synthesized: &'m SynthesizedFiles,
    /// Values of `config.json`.
    pub config: &'m Map<String, Value>,
    /// Inputs of the model.
    pub inputs: &'m [Port],
    /// Outputs of the model.
    pub outputs: &'m [Port],
    /// Whether values of the inputs decide which parts of the model run, for all samples of a batch together.
    pub branches: bool,
}

impl<'m> Target<'m> {
    /// A model without described inputs and outputs.
    pub fn new(folder: &'m Path, synthesized: &'m SynthesizedFiles, config: &'m Map<String, Value>) -> Target<'m> {
        Target { folder, synthesized, config, inputs: &[], outputs: &[], branches: false }
    }

    /// Whether the model is an encoder-decoder model.
    pub(super) fn is_encoder_decoder(&self) -> bool {
        self.inputs.iter().any(|port| port.name == DECODER_INPUT_IDS)
    }

    /// The input of the images in the texts of a language model with a vision tower.
    pub(super) fn images_of_texts(&self) -> Option<&'m Port> {
        let has_texts = self.inputs.iter().any(|port| port.name == INPUT_IDS);
        self.inputs.iter().find(|port| has_texts && port.shape.len() == 4)
    }

    /// Number of classes, if it is a constant.
    pub(super) fn classes(&self) -> Option<usize> {
        let logits = self.outputs.iter().find(|port| port.name == "logits").or(self.outputs.first());
        logits.filter(|port| port.shape.len() == 2).and_then(|port| port.shape.last().copied().flatten())
    }

    /// The batch size if none is requested, if it is not chosen by the size of the samples.
    pub(super) fn default_batch(&self) -> Option<usize> {
        self.fixed_batch().or(self.branches.then_some(1))
    }

    /// The batch size, if the model accepts only one.
    pub fn fixed_batch(&self) -> Option<usize> {
        fixed_batch(self.inputs)
    }
}

/// The batch size, if a model with these inputs accepts only one.
pub fn fixed_batch(inputs: &[Port]) -> Option<usize> {
    let mut sizes = inputs.iter().filter_map(|port| port.shape.first());
    let first = (*sizes.next()?)?;
    sizes.all(|size| *size == Some(first)).then_some(first)
}

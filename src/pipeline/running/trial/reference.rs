//! Inputs of a trial, and the outputs of the built-in executor.

use std::path::Path;

use candle_core::{Device, Tensor};

use crate::arch;
use crate::data::{self, Batch, References};
use crate::error::{Error, Result};
use crate::evaluation::{self, Outputs, Runs, Subject};
use crate::files;
use crate::model::{Model, parse_config};
use crate::pipeline::running::memory_limit;
use crate::store::{ActivationScheme, DType, Encoding};
use crate::work::Work;

/// Seed of the inputs.
const SEED: u64 = 0;
/// Number of texts, and their length, of inputs for models that the built-in executor does not run.
const SHAPE: (usize, usize) = (2, 8);
/// Largest token id of these inputs, which are small enough to be no special tokens.
const MOST_TOKENS: u64 = 1000;

/// Properties of a model that determine how closely runtimes agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Arithmetic {
    /// Whether activations, or keys and values, are rounded to 8 bits or less, so that values halfway between
    /// two steps may be rounded either way.
    pub rounds_activations: bool,
    /// Whether weights are quantized.
    pub is_quantized: bool,
    /// Whether the model has 16-bit floats, to which runtimes round dequantized weights or activations.
    pub is_half: bool,
}

impl Arithmetic {
    /// The properties of a model.
    pub(super) fn from_model(model: &Model) -> Result<Arithmetic> {
        let mut found = Arithmetic { rounds_activations: model.config.cache()?.is_some(), ..Arithmetic::default() };
        for weight in model.weights.by_name.values() {
            found.is_half |= matches!(weight.dtype, DType::F16 | DType::BF16);
            found.is_quantized |= weight.stored_type.is_some() || weight.encoding != Encoding::Dense;
            if let Encoding::Quantized(spec) = &weight.encoding {
                found.rounds_activations |= spec.activations != ActivationScheme::None;
            }
        }
        Ok(found)
    }
}

/// Outputs of the built-in executor.
pub(super) enum Reference {
    /// Its outputs for a batch.
    Outputs { batch: Batch, outputs: Outputs, arithmetic: Arithmetic },
    /// A batch of tokens, and why the built-in executor does not run the model.
    Unknown { batch: Batch, reason: String },
}

impl Reference {
    /// Runs a model on synthetic inputs.
    pub(super) fn compute(path: &Path, work: &Work) -> Result<Reference> {
        let computed = || -> Result<Reference> {
            let model = Model::open(path)?;
            let (batch, arithmetic) = (data::synthetic(&model.graph()?, SEED)?, Arithmetic::from_model(&model)?);
            let outputs = outputs(model, &batch, work)?;
            Ok(Reference::Outputs { batch, outputs, arithmetic })
        };
        match computed() {
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(reason) => Ok(Reference::Unknown { batch: tokens(path)?, reason: reason.to_string() }),
            computed => computed,
        }
    }

    pub(super) fn batch(&self) -> &Batch {
        match self {
            Reference::Outputs { batch, .. } | Reference::Unknown { batch, .. } => batch,
        }
    }
}

/// The outputs of the built-in executor.
pub(super) fn outputs(model: Model, batch: &Batch, work: &Work) -> Result<Outputs> {
    let mut subject = Subject::from_model(model)?;
    let mut models = evaluation::load([&mut subject], (&batch.inputs, &Device::Cpu), memory_limit(None, &Device::Cpu), Runs::Repeated, work)?;
    models.first_mut().map_or_else(|| Ok(Outputs::new()), |model| model.run(&batch.inputs))
}

/// Tokens for any language model with this configuration.
fn tokens(path: &Path) -> Result<Batch> {
    let file = path.join("config.json");
    let text = files::read_to_string(&file).map_err(Error::io("read", &file))?;
    let config = parse_config(&text).map_err(|e| Error::malformed(&file, e))?;
    let size = arch::text_values(&config).get("vocab_size").and_then(serde_json::Value::as_u64);
    let size = size.unwrap_or(MOST_TOKENS).clamp(1, MOST_TOKENS);
    let (texts, length) = SHAPE;
    let ids = (0..texts.saturating_mul(length) as u64).map(|at| i64::try_from(at.saturating_mul(7919).checked_rem(size).unwrap_or(0)).unwrap_or(0));
    let tensor = Tensor::from_vec(ids.collect::<Vec<_>>(), SHAPE, &Device::Cpu).and_then(|ids| Ok([("attention_mask", ids.ones_like()?), ("input_ids", ids)]));
    let inputs = tensor.map_err(|e| Error::run("synthetic tokens", e, ""))?;
    Ok(Batch { inputs: inputs.map(|(name, tensor)| (name.to_owned(), tensor)).into(), references: References::None, samples: texts })
}

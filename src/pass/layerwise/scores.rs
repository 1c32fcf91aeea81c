//! Expected increase of the loss by rounding each layer in each of several schemes, from one backward pass
//! and without running a quantized model: the second-order approximation of the KL divergence, `½ Σ_j
//! E[(∂L/∂y_j)²] E[w_t (x_t · e_j)²]` with the error `e_j` of row `j`, where `w_t` is the mean square of the
//! gradients of token `t`, relative to all tokens (the factors of the Fisher information of Kim et al. 2025,
//! GuidedQuant, <https://arxiv.org/abs/2505.07004>).

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::guide::{Guidance, Guide};
use super::rounding::Quantization;
use super::{Flow, Layer, Layerwise, Method, MethodReport, Moments, MomentsRequest, Readers, sites, unsupported};
use crate::error::Result;
use crate::kernel::epilogue::Epilogue;
use crate::kernel::ggml::BlockType;
use crate::kernel::operands::{Columns, LeftRows};
use crate::kernel::product::product;
use crate::model::Model;
use crate::pass::Context;
use crate::pass::input_importance::importance_of;
use crate::pass::quantize::{Formats, Quantize, Scheme};
use crate::store::gguf::Kind;
use crate::store::{QuantizationSpec, Weight};
use crate::work::Meter;

/// Rows of a layer's input that are stored of each batch. A batch of several windows counts once.
const ROWS: usize = 64;

/// A format of weights.
#[derive(Debug, Clone, PartialEq)]
pub enum WeightFormat {
    /// A scheme of compressed-tensors, as a pass without rules.
    Scheme(Quantize),
    /// Blocks of a GGUF file.
    Blocks(BlockType),
}

/// Effect of a format on a weight.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Expected KL divergence of the predictions, in nats per token.
    pub loss: f64,
    /// Size of the quantized weight with its scales.
    pub bytes: u64,
}

/// Scores of weights.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Scores {
    /// Scores by the name of the weight, in the order of the formats; `None` if a format cannot store the
    /// weight.
    pub by_weight: BTreeMap<String, Vec<Option<Score>>>,
    /// Importance of the columns of each weight, proportional to the mean square of the input.
    #[serde(with = "shared_columns")]
    pub importance: BTreeMap<String, Arc<Vec<f32>>>,
}

/// Serialization of shared vectors.
mod shared_columns {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(columns: &BTreeMap<String, Arc<Vec<f32>>>, serializer: S) -> Result<S::Ok, S::Error> {
        let plain: BTreeMap<&str, &Vec<f32>> = columns.iter().map(|(name, columns)| (name.as_str(), columns.as_ref())).collect();
        plain.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Arc<Vec<f32>>>, D::Error> {
        let plain = BTreeMap::<String, Vec<f32>>::deserialize(deserializer)?;
        Ok(plain.into_iter().map(|(name, columns)| (name, Arc::new(columns))).collect())
    }
}

/// Scores of the weights that the formats can store. Weights that layerwise passes do not support have no
/// scores. The calibration samples are those of the context; without them, the scores are [`sizes`].
///
/// # Errors
/// If the model has no logits, or if a layer cannot be quantized.
pub fn scores(formats: &[WeightFormat], model: &Model, context: &Context) -> Result<Scores> {
    if context.data.calibration.is_none() {
        return sizes(formats, model);
    }
    let encodings = encodings(formats, model)?;
    let meter = Arc::new(Meter::default());
    let options = formats.iter().zip(&encodings).map(|(format, encodings)| {
        Ok(match format {
            WeightFormat::Scheme(pass) => Rounding::Scheme(Box::new(Quantization::rounding(pass, Formats::Schemes(encodings), model, &meter)?), encodings),
            WeightFormat::Blocks(kind) => Rounding::Blocks(*kind),
        })
    });
    let options = options.collect::<Result<Vec<_>>>()?;
    let targets = targets(&encodings, model)?;
    let requested = MomentsRequest { rows: ROWS, ..MomentsRequest::default() };
    let flow = Flow { guidance: Guidance::Tokens, ..Flow::default() };
    let work = Layerwise { name: "auto", context, targets: &targets, requested, rescale: None, flow };
    let mut scorer = Scorer { options, moments: None, outputs: BTreeMap::new(), scores: Scores::default(), report: MethodReport::default() };
    work.run(&mut model.clone(), &mut scorer)?;
    Ok(scorer.scores)
}

/// Sizes of the weights that have [`scores`], with losses of 0, without running the model.
///
/// # Errors
/// If the model has no graph, or if a layer cannot be quantized.
pub fn sizes(formats: &[WeightFormat], model: &Model) -> Result<Scores> {
    let (encodings, graph) = (encodings(formats, model)?, model.graph()?);
    let sites = sites("auto", &graph, &targets(&encodings, model)?, true)?;
    let mut sizes = Scores::default();
    for layer in sites.iter().flat_map(|site| &site.layers) {
        let bytes = |(format, encodings): (&WeightFormat, &Encodings)| match format {
            WeightFormat::Scheme(_) => encodings.get(&layer.weight).map(|affine| stored_bytes(layer, affine)),
            WeightFormat::Blocks(kind) => block_bytes(layer, *kind),
        };
        let options = formats.iter().zip(&encodings).map(|format| bytes(format).map(|bytes| Score { loss: 0.0, bytes }));
        sizes.by_weight.insert(layer.weight.clone(), options.collect());
    }
    Ok(sizes)
}

/// The encodings of weights in a scheme, by name.
type Encodings = BTreeMap<String, QuantizationSpec>;

/// The encodings of each format. Blocks can store all linear weights, with any number of columns.
fn encodings(formats: &[WeightFormat], model: &Model) -> Result<Vec<Encodings>> {
    let linear = Quantize { scheme: Scheme::W8A16, group_size: Some(-1), ..Quantize::default() };
    let encodings = formats.iter().map(|format| {
        let pass = if let WeightFormat::Scheme(pass) = format { pass } else { &linear };
        Ok(pass.layers(&model.weights)?.encodings)
    });
    encodings.collect()
}

/// The weights of at least one format that layerwise passes support.
fn targets<'e>(encodings: &'e [Encodings], model: &Model) -> Result<BTreeSet<&'e str>> {
    let mut targets: BTreeSet<&str> = encodings.iter().flat_map(|encodings| encodings.keys()).map(String::as_str).collect();
    for name in unsupported(model, &targets)?.into_values().flatten() {
        targets.remove(name);
    }
    Ok(targets)
}

/// Size of a layer in blocks; `None` if its rows are not a multiple of the block size.
fn block_bytes(layer: &Layer, kind: BlockType) -> Option<u64> {
    Kind::Blocks(kind).byte_count(&[layer.rows, layer.size]).filter(|_| !layer.input_major)
}

/// How weights are rounded in a format.
enum Rounding<'a> {
    Scheme(Box<Quantization<'a>>, &'a Encodings),
    Blocks(BlockType),
}

impl Rounding<'_> {
    /// Rounds the values of a layer and returns their stored size; `None` if the format cannot store them.
    fn round(&self, layer: &Layer, values: &mut [f32], moments: &Moments, importance: &[f32]) -> Result<Option<u64>> {
        match self {
            Rounding::Scheme(scheme, encodings) => {
                let Some(affine) = encodings.get(&layer.weight) else { return Ok(None) };
                scheme.format(layer)?.nearest(values, &moments.squares)?;
                Ok(Some(stored_bytes(layer, affine)))
            }
            Rounding::Blocks(kind) => {
                let Some(bytes) = block_bytes(layer, *kind) else { return Ok(None) };
                kind.round_rows(values, layer.size, importance);
                // Scales beyond the range of binary16.
                Ok(values.iter().all(|value| value.is_finite()).then_some(bytes))
            }
        }
    }
}

struct Scorer<'a> {
    options: Vec<Rounding<'a>>,
    /// The inputs of the next layer.
    moments: Option<Moments>,
    /// Mean squares of the gradients of each output, by the name of the weight.
    outputs: BTreeMap<String, Vec<f64>>,
    scores: Scores,
    report: MethodReport,
}

impl Method for Scorer<'_> {
    fn check(&self, layer: &Layer) -> Result<()> {
        self.options.iter().try_for_each(|option| match option {
            Rounding::Scheme(scheme, encodings) if encodings.contains_key(&layer.weight) => scheme.format(layer).map(drop),
            Rounding::Scheme(..) | Rounding::Blocks(_) => Ok(()),
        })
    }

    fn guided(&mut self, guide: &Rc<Guide>) {
        self.outputs.clone_from(&guide.outputs);
    }

    fn read(&mut self, _value: &str, moments: Moments, _readers: &Readers) -> Result<()> {
        self.moments = Some(moments);
        Ok(())
    }

    fn change(&mut self, layer: &Layer, _weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let (Some(moments), Some(gradients)) = (&self.moments, self.outputs.get(&layer.weight)) else { return Ok(Vec::new()) };
        let importance = importance_of(&moments.squares).unwrap_or_else(|| vec![1.0; layer.size]);
        let inputs = &moments.rows;
        // Tokens that are not routed to an expert have no error.
        let routed = moments.nonzero as f64 / moments.count.max(1) as f64;
        let mut scores = Vec::with_capacity(self.options.len());
        for option in &self.options {
            let mut errors = values.to_vec();
            let bytes = option.round(layer, &mut errors, moments, &importance)?;
            scores.push(bytes.map(|bytes| {
                errors.iter_mut().zip(&*values).for_each(|(rounded, value)| *rounded -= value);
                Score { loss: routed * expected_loss(inputs, &errors, layer, gradients), bytes }
            }));
        }
        self.scores.by_weight.insert(layer.weight.clone(), scores);
        self.scores.importance.insert(layer.weight.clone(), Arc::new(importance));
        Ok(Vec::new())
    }

    fn bytes(&self, layer: &Layer) -> usize {
        8 * layer.rows * layer.size
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

/// Half of the weighted mean squares of the errors of all outputs.
fn expected_loss(inputs: &[f32], errors: &[f32], layer: &Layer, gradients: &[f64]) -> f64 {
    let tokens = inputs.len() / layer.size.max(1);
    let mut outputs = vec![0f32; tokens * layer.rows];
    if outputs.is_empty() {
        return 0.0;
    }
    product(
        &LeftRows::new(inputs, tokens, layer.size, layer.size),
        &Columns { values: errors, count: layer.rows, stride: layer.size },
        layer.rows,
        Epilogue::NONE,
        &mut outputs,
    );
    let token = |row: &[f32]| row.iter().zip(gradients).map(|(error, square)| square * f64::from(*error).powi(2)).sum::<f64>();
    outputs.chunks_exact(layer.rows).map(token).sum::<f64>() / tokens as f64 / 2.0
}

/// Bytes of the integers of a layer in rows of whole 32-bit words, and of its scales and zero points.
fn stored_bytes(layer: &Layer, affine: &QuantizationSpec) -> u64 {
    let words = |count: usize, bits: usize| (count * bits).div_ceil(32) as u64 * 4;
    let bits = usize::from(affine.codes.bits());
    let groups = layer.size.div_ceil(affine.granularity.run(layer.size, layer.size).max(1));
    let codes = layer.rows as u64 * words(layer.size, bits);
    let scales = (layer.rows * groups * affine.scale_dtype.bitsize()).div_ceil(8) as u64;
    codes + scales + if affine.symmetric { 0 } else { groups as u64 * words(layer.rows, bits) }
}

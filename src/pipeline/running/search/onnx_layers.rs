//! Integer layers of an ONNX file.

use std::collections::BTreeSet;

use half::f16;

use super::formats::{Formats, Unit, Writing, Written, applied, retain};
use crate::error::{Error, Result};
use crate::exec::Rounding;
use crate::export::{Format, Onnx};
use crate::ir::Op;
use crate::model::{Model, is_embedding, is_linear};
use crate::onnx::WeightOnly;
use crate::pass::{
    ActivationRounding, Cast, Context, Damage, FloatFormat, Method, Plan, Quantize, QuantizeDynamic, QuantizeStatic, Scheme, Score, Scores, Step,
    WeightObserver,
};
use crate::report::format::natural;
use crate::report::search::SearchLoss;
use crate::run_state::{Applied, RunState};
use crate::store::{DType, Encoding, Pattern, Weight};

/// Arithmetic of a layer, and type of its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arithmetic {
    /// Integers, with scales of the activations from calibration samples.
    Static,
    /// Integers, with scales of the activations computed at run time.
    Dynamic,
    /// Floats: int4 weights in groups are dequantized.
    Int4,
    /// Floats: int8 weights are dequantized.
    Int8,
    /// Floats: weights of 16 bits are converted when the file is loaded.
    Float16,
}

const ARITHMETICS: [(Arithmetic, &str); 5] = [
    (Arithmetic::Int4, "int4-weights"),
    (Arithmetic::Static, "int8-static"),
    (Arithmetic::Dynamic, "int8-dynamic"),
    (Arithmetic::Int8, "int8-weights"),
    (Arithmetic::Float16, "float16"),
];
/// Order of the passes of a recipe. Static layers come first, because their pass rescales channels of other
/// layers.
const PASSES: [Arithmetic; 5] = [Arithmetic::Static, Arithmetic::Int4, Arithmetic::Dynamic, Arithmetic::Int8, Arithmetic::Float16];
/// Inputs of a row that share a scale, with int4 weights.
const GROUP: i64 = 32;

/// Which formats are options of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetics {
    /// Those that are at least as fast as floats: integer arithmetic, and floats that are stored in 16 bits.
    /// Float arithmetic on dequantized weights has less loss, but may take longer than floats.
    Fast,
    /// Those whose time differs from that of floats.
    Timed,
    /// All.
    All,
}

/// The layers and embedding tables of a model.
pub(super) struct OnnxLayers {
    model: Model,
    /// The formats without floats.
    formats: Vec<(Arithmetic, &'static str)>,
    arithmetics: Arithmetics,
    /// Size of the file with all weights as floats.
    bytes: u64,
}

impl OnnxLayers {
    /// The layers of a model.
    ///
    /// # Errors
    /// If ONNX files cannot represent the model.
    pub fn new(model: &Model, arithmetics: Arithmetics) -> Result<OnnxLayers> {
        let mut layers = OnnxLayers { model: model.clone(), formats: ARITHMETICS.to_vec(), arithmetics, bytes: 0 };
        layers.bytes = file_bytes(&layers.export(&[]), model, &RunState::default())?;
        Ok(layers)
    }

    /// Whether int4 weights are an option: `MatMulNBits` is an option of the exporter, which the graph of an
    /// ONNX file does not have.
    fn has_int4(&self) -> bool {
        let is_int4 = |(arithmetic, _): &(Arithmetic, &str)| *arithmetic == Arithmetic::Int4;
        self.arithmetics != Arithmetics::Fast && self.model.onnx.is_none() && self.formats.iter().any(is_int4)
    }

    /// The export of a choice of formats.
    pub(super) fn export(&self, options: &[usize]) -> Onnx {
        let has = |other: Arithmetic| options.iter().any(|option| self.formats.get(*option).is_some_and(|(arithmetic, _)| *arithmetic == other));
        let weight_only = if has(Arithmetic::Int4) { WeightOnly::MatmulNbits } else { WeightOnly::default() };
        // Weights that the model stores in 16 bits keep them.
        let float16_weights = has(Arithmetic::Float16) || self.model.weights.by_name.values().any(is_half);
        Onnx { weight_only, float16_weights, ..Onnx::default() }
    }

    /// Schemes of weights whose effect is measured in addition to int8.
    fn schemes(&self) -> Vec<Quantize> {
        if self.has_int4() { vec![int4(Vec::new())] } else { Vec::new() }
    }

    /// The index of floats.
    fn floats(&self) -> usize {
        self.formats.len()
    }

    /// Names of the weights that `MatMulNBits` can multiply: matrices of linear layers, stored as
    /// `[out, in]`.
    fn row_major(&self) -> Result<BTreeSet<String>> {
        let graph = self.model.graph()?;
        let is_plain = |id| {
            let mut users = graph.nodes().iter().filter(|node| node.inputs.contains(&id));
            users.all(|node| matches!(&node.op, Op::Linear(linear) if !linear.input_major))
        };
        Ok(graph.params().filter(|(id, _)| is_plain(*id)).map(|(_, value)| value.name.clone()).collect())
    }

    /// The loss of a layer in a format; `None` if it cannot have the format. Without samples, the losses are
    /// 0.
    fn loss_of(&self, arithmetic: Arithmetic, weight: &Weight, damage: &Damage, has_samples: bool) -> Option<f64> {
        let (is_matrix, is_fast) = (is_linear(&damage.name, weight), self.arithmetics == Arithmetics::Fast);
        let exists = match arithmetic {
            Arithmetic::Static => has_samples,
            Arithmetic::Dynamic => is_matrix,
            Arithmetic::Int4 => is_matrix && self.has_int4(),
            Arithmetic::Int8 => is_matrix && !is_fast,
            Arithmetic::Float16 => self.can_be_half(weight) && damage.half_sqnr_db.is_some(),
        };
        if !exists || !has_samples {
            return exists.then_some(0.0);
        }
        let cosine = match arithmetic {
            Arithmetic::Static => damage.quantized,
            Arithmetic::Dynamic => damage.dynamic,
            Arithmetic::Int4 => damage.schemes.first().copied().flatten(),
            Arithmetic::Int8 => damage.weights,
            Arithmetic::Float16 => return half_loss(damage),
        };
        cosine.filter(|cosine| cosine.is_finite()).map(|cosine| (1.0 - cosine).max(0.0))
    }

    /// Whether 16 bits are an option of a weight: it has more, and its time is not measured, which is that of
    /// 32 bits.
    fn can_be_half(&self, weight: &Weight) -> bool {
        self.arithmetics != Arithmetics::Timed && weight.encoding == Encoding::Dense && weight.shape.len() > 1 && weight.dtype != DType::F16
    }

    /// Bytes of a float weight in the file: those of folders are stored as 32-bit floats, unless they have 16
    /// bits.
    fn float_bytes(&self, weight: &Weight) -> u64 {
        let bytes = if is_half(weight) { 2 } else { 4 };
        if self.model.onnx.is_some() { weight.value_bytes() } else { bytes * weight.elements() as u64 }
    }

    /// The format for all units that have it. If it is one of integers, embedding tables have `int8-weights`,
    /// if that is a format.
    fn uniform(&self, format: usize, units: &[Unit]) -> Vec<usize> {
        let table = self.formats.iter().position(|(arithmetic, _)| *arithmetic == Arithmetic::Int8);
        let is_float = self.formats.get(format).is_some_and(|(arithmetic, _)| *arithmetic == Arithmetic::Float16);
        let option = |unit: &Unit| {
            let is_table = unit.weights.iter().any(|name| self.model.weights.by_name.get(name).is_some_and(|weight| is_embedding(name, weight)));
            let preferred = if is_table && !is_float { table } else { Some(format) };
            preferred.filter(|option| unit.options[*option].is_some()).unwrap_or(self.floats())
        };
        units.iter().map(option).collect()
    }

    /// The model after the passes of a choice of formats, whose plans `execute` executes.
    fn applied(&self, units: &[Unit], options: &[usize], execute: impl FnMut(Plan) -> Result<(Model, Applied)>) -> Result<Option<(Model, RunState)>> {
        self.writing(units, options, None)?.map(|writing| applied(&self.model, &writing.passes, execute)).transpose()
    }

    /// Distributes what files have in addition to the values (nodes, zero points, scales of activations)
    /// over the units of each format.
    fn add_overhead(&self, scores: &mut Scores) -> Result<()> {
        for format in 0..self.floats() {
            let units = self.units(scores);
            let mut options = vec![self.floats(); units.len()];
            options.iter_mut().zip(&units).filter(|(_, unit)| unit.options[format].is_some()).for_each(|(option, _)| *option = format);
            let sum: u64 = units.iter().zip(&options).filter_map(|(unit, option)| unit.options[*option]).map(|score| score.bytes).sum();
            let count = options.iter().filter(|option| **option == format).count() as i64;
            let Some((model, run)) = self.applied(&units, &options, |plan| Ok((plan.model, plan.applied)))? else { continue };
            let overhead = (file_bytes(&self.export(&options), &model, &run)? as i64 - (self.other_bytes(&units) + sum) as i64) / count;
            for score in scores.by_weight.values_mut().filter_map(|options| options[format].as_mut()) {
                score.bytes = score.bytes.saturating_add_signed(overhead).max(1);
            }
        }
        Ok(())
    }
}

/// Whether a matrix has 16-bit floats.
fn is_half(weight: &Weight) -> bool {
    weight.dtype == DType::F16 && weight.encoding == Encoding::Dense && weight.shape.len() > 1
}

/// The loss of a layer with 16-bit weights, from its loss with int8 weights: the losses are proportional to
/// the squared errors. `None` if values exceed the range.
fn half_loss(damage: &Damage) -> Option<f64> {
    let int8 = (1.0 - damage.weights?).max(0.0);
    match (damage.weight_sqnr_db, damage.half_sqnr_db?) {
        (Some(int8_db), half_db) if half_db.is_finite() => Some(int8 * 10f64.powf((int8_db - half_db) / 10.0)),
        _ => Some(0.0),
    }
}

/// Size of the ONNX file of a model.
pub(super) fn file_bytes(export: &Onnx, model: &Model, run: &RunState) -> Result<u64> {
    Ok(export.forecast(model, run)?.bytes)
}

/// The pass that quantizes matrices to int4.
fn int4(targets: Vec<Pattern>) -> Quantize {
    Quantize { scheme: Scheme::W4A16, group_size: Some(GROUP), method: Method::Rtn, targets, ..Quantize::default() }
}

impl Formats for OnnxLayers {
    fn names(&self) -> Vec<String> {
        self.formats.iter().map(|(_, name)| *name).chain(["floats"]).map(str::to_owned).collect()
    }

    fn retain(&mut self, kept: &[bool]) {
        retain(&mut self.formats, kept);
        self.arithmetics = Arithmetics::All;
    }

    /// The outputs of any model can be compared by their cosine similarity.
    fn loss(&self) -> SearchLoss {
        SearchLoss::CosineDistance
    }

    fn rounding(&self) -> Rounding {
        Rounding::Tensor
    }

    /// The effect of quantizing each layer separately, on the calibration samples. Losses of embedding tables
    /// are measured later.
    fn scores(&self, context: &Context) -> Result<Scores> {
        let has_samples = context.data.calibration.is_some();
        let damages = QuantizeStatic::default().analyze_with(self.rounding(), &self.schemes(), self.model.clone(), context)?;
        let mut scores = Scores::default();
        let weights = &self.model.weights.by_name;
        let row_major = if self.has_int4() { self.row_major()? } else { BTreeSet::new() };
        let bytes = |arithmetic: Arithmetic, weight: &Weight| {
            let (elements, rows) = (weight.elements(), weight.shape.first().copied().unwrap_or(0));
            let bytes = match arithmetic {
                Arithmetic::Int4 => elements / 2 + 4 * elements / GROUP as usize,
                Arithmetic::Float16 => 2 * elements,
                Arithmetic::Static | Arithmetic::Dynamic | Arithmetic::Int8 => elements + 4 * rows,
            };
            bytes as u64
        };
        for damage in &damages {
            let Some(weight) = weights.get(&damage.name) else { continue };
            let score = |(arithmetic, _): &(Arithmetic, &str)| {
                let is_stored = *arithmetic != Arithmetic::Int4 || row_major.contains(&damage.name);
                let loss = self.loss_of(*arithmetic, weight, damage, has_samples).filter(|_| is_stored)?;
                Some(Score { loss, bytes: bytes(*arithmetic, weight) })
            };
            scores.by_weight.insert(damage.name.clone(), self.formats.iter().map(score).collect());
        }
        let tied = self.model.tied_names();
        for (_, value) in self.model.graph()?.params() {
            let name = &value.name;
            // An alias has the format of its original.
            let is_unit = |weight: &&Weight| is_embedding(name, weight) && !scores.by_weight.contains_key(name) && tied.iter().all(|(alias, _)| alias != name);
            let Some(weight) = weights.get(name).filter(is_unit) else { continue };
            let has_half = self.can_be_half(weight) && weight.floats(name)?.iter().all(|value| f16::from_f32(*value).is_finite());
            let exists = |arithmetic: Arithmetic| arithmetic == Arithmetic::Int8 || arithmetic == Arithmetic::Float16 && has_half;
            let score = |(arithmetic, _): &(Arithmetic, &str)| exists(*arithmetic).then(|| Score { loss: 0.0, bytes: bytes(*arithmetic, weight) });
            scores.by_weight.insert(name.clone(), self.formats.iter().map(score).collect());
        }
        self.add_overhead(&mut scores)?;
        Ok(scores)
    }

    fn score_runs(&self) -> Result<u64> {
        QuantizeStatic::default().analyzed_runs(&self.schemes(), self.model.clone())
    }

    fn units(&self, scores: &Scores) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        for (name, options) in &scores.by_weight {
            let Some(weight) = self.model.weights.by_name.get(name) else { continue };
            let floats = Some(Score { loss: 0.0, bytes: self.float_bytes(weight) });
            let mut unit = Unit { measured: is_embedding(name, weight), ..Unit::new(name.clone(), options.len() + 1) };
            unit.add(name, weight, options.iter().chain([&floats]).copied());
            units.push(unit);
        }
        units.sort_by(|a, b| natural(&a.name, &b.name));
        units
    }

    fn other_bytes(&self, units: &[Unit]) -> u64 {
        let floats: u64 = units.iter().filter_map(|unit| unit.options.last().copied().flatten()).map(|score| score.bytes).sum();
        self.bytes.saturating_sub(floats)
    }

    fn references(&self, units: &[Unit]) -> Result<Vec<(String, Vec<usize>)>> {
        let is_layer = |unit: &Unit| unit.weights.iter().any(|name| self.model.weights.by_name.get(name).is_some_and(|weight| !is_embedding(name, weight)));
        let exists = |format: &usize| units.iter().any(|unit| is_layer(unit) && unit.options[*format].is_some());
        let named = self.formats.iter().enumerate().filter(|(format, _)| exists(format));
        Ok(named.map(|(format, (_, name))| ((*name).to_owned(), self.uniform(format, units))).collect())
    }

    /// The model that the recipe of the choice produces, with scales of activations from calibration samples.
    fn rounded(&self, units: &[Unit], options: &[usize], _scores: &Scores, context: &Context) -> Result<Option<Written>> {
        let applied = self.applied(units, options, |plan| plan.execute(context))?;
        applied.map(|(model, run)| Ok(Written { bytes: Some(file_bytes(&self.export(options), &model, &run)?), model })).transpose()
    }

    fn writing(&self, units: &[Unit], options: &[usize], _method: Option<Method>) -> Result<Option<Writing>> {
        let targets = |arithmetic: Arithmetic| -> Result<Vec<Pattern>> {
            let chosen = units.iter().zip(options).filter(|(_, option)| self.formats.get(**option).is_some_and(|(other, _)| *other == arithmetic));
            chosen.flat_map(|(unit, _)| &unit.weights).map(|name| name.parse().map_err(|e| Error::option("auto", e))).collect()
        };
        let mut passes: Vec<Step> = Vec::new();
        for arithmetic in PASSES {
            let targets = targets(arithmetic)?;
            if targets.is_empty() {
                continue;
            }
            passes.push(match arithmetic {
                Arithmetic::Static => QuantizeStatic { targets, embeddings: false, ..QuantizeStatic::default() }.into(),
                Arithmetic::Dynamic => QuantizeDynamic { targets, ..QuantizeDynamic::default() }.into(),
                Arithmetic::Int4 => int4(targets).into(),
                Arithmetic::Float16 => Cast { to: FloatFormat::F16, targets, ..Cast::default() }.into(),
                Arithmetic::Int8 => {
                    QuantizeDynamic { targets, activations: ActivationRounding::None, observer: WeightObserver::Mse, ..QuantizeDynamic::default() }.into()
                }
            });
        }
        Ok((!passes.is_empty()).then(|| Writing { passes, exports: vec![self.export(options).into()] }))
    }
}

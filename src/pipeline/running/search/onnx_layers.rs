//! Integer layers of an ONNX file.

use std::collections::BTreeSet;

use super::formats::{Formats, Unit, Writing, Written, retain};
use crate::error::{Error, Result};
use crate::exec::Rounding;
use crate::export::{Format, Onnx};
use crate::ir::Op;
use crate::model::{Model, is_embedding, is_linear};
use crate::onnx::WeightOnly;
use crate::pass::{ActivationRounding, Context, Damage, Method, Plan, Quantize, QuantizeDynamic, QuantizeStatic, Scheme, Score, Scores, Step, WeightObserver};
use crate::report::format::natural;
use crate::report::search::SearchLoss;
use crate::run_state::{Applied, RunState};
use crate::store::{Pattern, Weight};

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
}

const ARITHMETICS: [(Arithmetic, &str); 4] =
    [(Arithmetic::Int4, "int4-weights"), (Arithmetic::Static, "int8-static"), (Arithmetic::Dynamic, "int8-dynamic"), (Arithmetic::Int8, "int8-weights")];
/// Order of the passes of a recipe. Static layers come first, because their pass rescales channels of other
/// layers.
const PASSES: [Arithmetic; 4] = [Arithmetic::Static, Arithmetic::Int4, Arithmetic::Dynamic, Arithmetic::Int8];
/// Inputs of a row that share a scale, with int4 weights.
const GROUP: i64 = 32;

/// Which formats are options of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetics {
    /// Integer arithmetic. Float arithmetic on dequantized weights has less loss, but may take longer than
    /// floats.
    Integers,
    /// All.
    All,
}

/// The layers and embedding tables of a model.
pub(super) struct OnnxLayers<'a> {
    model: &'a Model,
    /// The formats without floats.
    formats: Vec<(Arithmetic, &'static str)>,
    arithmetics: Arithmetics,
    /// Size of the file with all weights as floats.
    bytes: u64,
}

impl<'a> OnnxLayers<'a> {
    /// The layers of a model.
    ///
    /// # Errors
    /// If ONNX files cannot represent the model.
    pub fn new(model: &'a Model, arithmetics: Arithmetics) -> Result<OnnxLayers<'a>> {
        let bytes = file_bytes(&Onnx::default(), model, &RunState::default())?;
        Ok(OnnxLayers { model, formats: ARITHMETICS.to_vec(), arithmetics, bytes })
    }

    /// Whether int4 weights are an option: `MatMulNBits` is an option of the exporter, which the graph of an
    /// ONNX file does not have.
    fn has_int4(&self) -> bool {
        self.arithmetics == Arithmetics::All && self.model.onnx.is_none() && self.formats.iter().any(|(arithmetic, _)| *arithmetic == Arithmetic::Int4)
    }

    /// The export of a choice of formats.
    fn export(&self, options: &[usize]) -> Onnx {
        let has_int4 = options.iter().any(|option| self.formats.get(*option).is_some_and(|(arithmetic, _)| *arithmetic == Arithmetic::Int4));
        let weight_only = if has_int4 { WeightOnly::MatmulNbits } else { WeightOnly::default() };
        Onnx { weight_only, ..Onnx::default() }
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

    /// Whether a layer may have a format, and its cosine similarity in it.
    fn cosine(&self, arithmetic: Arithmetic, weight: &Weight, damage: &Damage) -> Option<f64> {
        let is_matrix = is_linear(&damage.name, weight);
        match arithmetic {
            Arithmetic::Static => damage.quantized,
            Arithmetic::Dynamic => damage.dynamic.filter(|_| is_matrix),
            Arithmetic::Int4 => damage.schemes.first().copied().flatten(),
            Arithmetic::Int8 => damage.weights.filter(|_| is_matrix && self.arithmetics == Arithmetics::All),
        }
    }

    /// Bytes of a float weight in the file: those of folders are stored as 32-bit floats.
    fn float_bytes(&self, weight: &Weight) -> u64 {
        if self.model.onnx.is_some() { weight.value_bytes() } else { 4 * weight.elements() as u64 }
    }

    /// The format for all units that have it. Embedding tables have `int8-weights`, if that is a format.
    fn uniform(&self, format: usize, units: &[Unit]) -> Vec<usize> {
        let table = self.formats.iter().position(|(arithmetic, _)| *arithmetic == Arithmetic::Int8);
        let option = |unit: &Unit| {
            let preferred = if unit.measured { table } else { Some(format) };
            preferred.filter(|option| unit.options[*option].is_some()).unwrap_or(self.floats())
        };
        units.iter().map(option).collect()
    }

    /// The model after the passes of a choice of formats, whose plans `execute` executes.
    fn applied(&self, units: &[Unit], options: &[usize], mut execute: impl FnMut(Plan) -> Result<(Model, Applied)>) -> Result<Option<(Model, RunState)>> {
        let Some(writing) = self.writing(units, options, None)? else { return Ok(None) };
        let (mut model, mut run) = (self.model.clone(), RunState::default());
        for step in &writing.passes {
            let (changed, applied) = execute(step.pass().plan(&model, &run)?)?;
            model = changed;
            run.add(applied);
        }
        run.notes.extend(model.settle_ties(self.model)?);
        Ok(Some((model, run)))
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

/// Size of the ONNX file of a model.
fn file_bytes(export: &Onnx, model: &Model, run: &RunState) -> Result<u64> {
    Ok(export.forecast(model, run)?.bytes)
}

/// The pass that quantizes matrices to int4.
fn int4(targets: Vec<Pattern>) -> Quantize {
    Quantize { scheme: Scheme::W4A16, group_size: Some(GROUP), targets, ..Quantize::default() }
}

impl Formats for OnnxLayers<'_> {
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
        let schemes = if self.has_int4() { vec![int4(Vec::new())] } else { Vec::new() };
        let damages = QuantizeStatic::default().analyze_with(self.rounding(), &schemes, self.model.clone(), context)?;
        let mut scores = Scores::default();
        let weights = &self.model.weights.by_name;
        let row_major = if self.has_int4() { self.row_major()? } else { BTreeSet::new() };
        let bytes = |arithmetic: Arithmetic, weight: &Weight| {
            let (elements, rows) = (weight.elements(), weight.shape.first().copied().unwrap_or(0));
            (if arithmetic == Arithmetic::Int4 { elements / 2 + 4 * elements / GROUP as usize } else { elements + 4 * rows }) as u64
        };
        for damage in &damages {
            let Some(weight) = weights.get(&damage.name) else { continue };
            let score = |(arithmetic, _): &(Arithmetic, &str)| {
                let is_stored = *arithmetic != Arithmetic::Int4 || row_major.contains(&damage.name);
                let cosine = self.cosine(*arithmetic, weight, damage).filter(|cosine| is_stored && cosine.is_finite())?;
                Some(Score { loss: (1.0 - cosine).max(0.0), bytes: bytes(*arithmetic, weight) })
            };
            scores.by_weight.insert(damage.name.clone(), self.formats.iter().map(score).collect());
        }
        let tied = self.model.tied_names();
        for (_, value) in self.model.graph()?.params() {
            let name = &value.name;
            // An alias has the format of its original.
            let is_unit = |weight: &&Weight| is_embedding(name, weight) && !scores.by_weight.contains_key(name) && tied.iter().all(|(alias, _)| alias != name);
            let Some(weight) = weights.get(name).filter(is_unit) else { continue };
            let score =
                |(arithmetic, _): &(Arithmetic, &str)| (*arithmetic == Arithmetic::Int8).then(|| Score { loss: 0.0, bytes: bytes(*arithmetic, weight) });
            scores.by_weight.insert(name.clone(), self.formats.iter().map(score).collect());
        }
        self.add_overhead(&mut scores)?;
        Ok(scores)
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
        let exists = |format: &usize| units.iter().any(|unit| !unit.measured && unit.options[*format].is_some());
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
                Arithmetic::Int8 => {
                    QuantizeDynamic { targets, activations: ActivationRounding::None, observer: WeightObserver::Mse, ..QuantizeDynamic::default() }.into()
                }
            });
        }
        Ok((!passes.is_empty()).then(|| Writing { passes, exports: vec![self.export(options).into()] }))
    }
}

//! Integer layers of an ONNX file.

use super::formats::{Formats, Unit, Writing, Written, retain};
use crate::error::{Error, Result};
use crate::exec::Rounding;
use crate::export::{Format, Onnx};
use crate::model::{Model, is_embedding, is_linear};
use crate::pass::{ActivationRounding, Context, Damage, Method, Plan, QuantizeDynamic, QuantizeStatic, Score, Scores, Step, WeightObserver};
use crate::report::SearchLoss;
use crate::report::format::natural;
use crate::run_state::{Applied, RunState};
use crate::store::{Pattern, Weight};

/// Arithmetic of a layer with int8 weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arithmetic {
    /// Integers, with scales of the activations from calibration samples.
    Static,
    /// Integers, with scales of the activations computed at run time.
    Dynamic,
    /// Floats: the weights are dequantized.
    Floats,
}

const ARITHMETICS: [(Arithmetic, &str); 3] = [(Arithmetic::Static, "int8-static"), (Arithmetic::Dynamic, "int8-dynamic"), (Arithmetic::Floats, "int8-weights")];

/// The layers and embedding tables of a model. All formats of a layer have nearly the same size. Float
/// arithmetic on dequantized weights has the least loss of them, but takes longer than floats: it is an
/// option for layers only if formats are named.
pub(super) struct OnnxLayers<'a> {
    model: &'a Model,
    /// The formats without floats.
    formats: Vec<(Arithmetic, &'static str)>,
    are_named: bool,
    /// Size of the file with all weights as floats.
    bytes: u64,
}

impl<'a> OnnxLayers<'a> {
    /// The layers of a model.
    ///
    /// # Errors
    /// If ONNX files cannot represent the model.
    pub fn new(model: &'a Model) -> Result<OnnxLayers<'a>> {
        let bytes = file_bytes(model, &RunState::default())?;
        Ok(OnnxLayers { model, formats: ARITHMETICS.to_vec(), are_named: false, bytes })
    }

    /// The index of floats.
    fn floats(&self) -> usize {
        self.formats.len()
    }

    /// Whether a layer may have a format, and its cosine similarity in it.
    fn cosine(&self, arithmetic: Arithmetic, weight: &Weight, damage: &Damage) -> Option<f64> {
        let is_matrix = is_linear(&damage.name, weight);
        match arithmetic {
            Arithmetic::Static => damage.quantized,
            Arithmetic::Dynamic => damage.dynamic.filter(|_| is_matrix),
            Arithmetic::Floats => damage.weights.filter(|_| is_matrix && self.are_named),
        }
    }

    /// Bytes of a float weight in the file: those of folders are stored as 32-bit floats.
    fn float_bytes(&self, weight: &Weight) -> u64 {
        if self.model.onnx.is_some() { weight.value_bytes() } else { 4 * weight.elements() as u64 }
    }

    /// The format for all units that have it. Embedding tables have `int8-weights`, if that is a format.
    fn uniform(&self, format: usize, units: &[Unit]) -> Vec<usize> {
        let table = self.formats.iter().position(|(arithmetic, _)| *arithmetic == Arithmetic::Floats);
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
            let overhead = (file_bytes(&model, &run)? as i64 - (self.other_bytes(&units) + sum) as i64) / count;
            for score in scores.by_weight.values_mut().filter_map(|options| options[format].as_mut()) {
                score.bytes = score.bytes.saturating_add_signed(overhead).max(1);
            }
        }
        Ok(())
    }
}

/// Size of the ONNX file of a model.
fn file_bytes(model: &Model, run: &RunState) -> Result<u64> {
    Ok(Onnx::default().forecast(model, run)?.bytes)
}

impl Formats for OnnxLayers<'_> {
    fn names(&self) -> Vec<String> {
        self.formats.iter().map(|(_, name)| *name).chain(["floats"]).map(str::to_owned).collect()
    }

    fn retain(&mut self, kept: &[bool]) {
        retain(&mut self.formats, kept);
        self.are_named = true;
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
        let damages = QuantizeStatic::default().analyze_with(self.rounding(), self.model.clone(), context)?;
        let mut scores = Scores::default();
        let weights = &self.model.weights.by_name;
        let bytes = |weight: &Weight| (weight.elements() + 4 * weight.shape.first().copied().unwrap_or(0)) as u64;
        for damage in &damages {
            let Some(weight) = weights.get(&damage.name) else { continue };
            let score = |(arithmetic, _): &(Arithmetic, &str)| {
                let cosine = self.cosine(*arithmetic, weight, damage).filter(|cosine| cosine.is_finite())?;
                Some(Score { loss: (1.0 - cosine).max(0.0), bytes: bytes(weight) })
            };
            scores.by_weight.insert(damage.name.clone(), self.formats.iter().map(score).collect());
        }
        let tied = self.model.tied_names();
        for (_, value) in self.model.graph()?.params() {
            let name = &value.name;
            // An alias has the format of its original.
            let is_unit = |weight: &&Weight| is_embedding(name, weight) && !scores.by_weight.contains_key(name) && tied.iter().all(|(alias, _)| alias != name);
            let Some(weight) = weights.get(name).filter(is_unit) else { continue };
            let score = |(arithmetic, _): &(Arithmetic, &str)| (*arithmetic == Arithmetic::Floats).then(|| Score { loss: 0.0, bytes: bytes(weight) });
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
        applied.map(|(model, run)| Ok(Written { bytes: Some(file_bytes(&model, &run)?), model })).transpose()
    }

    /// Static layers come first, because their pass rescales channels of other layers.
    fn writing(&self, units: &[Unit], options: &[usize], _method: Option<Method>) -> Result<Option<Writing>> {
        let targets = |arithmetic: Arithmetic| -> Result<Vec<Pattern>> {
            let chosen = units.iter().zip(options).filter(|(_, option)| self.formats.get(**option).is_some_and(|(other, _)| *other == arithmetic));
            chosen.flat_map(|(unit, _)| &unit.weights).map(|name| name.parse().map_err(|e| Error::option("auto", e))).collect()
        };
        let mut passes: Vec<Step> = Vec::new();
        for (arithmetic, _) in &self.formats {
            let targets = targets(*arithmetic)?;
            if targets.is_empty() {
                continue;
            }
            passes.push(match arithmetic {
                Arithmetic::Static => QuantizeStatic { targets, embeddings: false, ..QuantizeStatic::default() }.into(),
                Arithmetic::Dynamic => QuantizeDynamic { targets, ..QuantizeDynamic::default() }.into(),
                Arithmetic::Floats => {
                    QuantizeDynamic { targets, activations: ActivationRounding::None, observer: WeightObserver::Mse, ..QuantizeDynamic::default() }.into()
                }
            });
        }
        Ok((!passes.is_empty()).then(|| Writing { passes, exports: vec![Onnx::default().into()] }))
    }
}

//! Sensitivity analysis: the effect of quantizing each layer separately on the outputs of the model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use half::f16;
use serde::Serialize;

use super::QuantizeStatic;
use super::prepare::Prepared;
use crate::calibration::ValueStatistics;
use crate::error::{Error, Result};
use crate::evaluation::{Comparison, Fidelity, Resources, Samples, Subject};
use crate::exec::Rounding;
use crate::kernel::compare;
use crate::model::{Model, is_linear};
use crate::pass::assignment::{Assignment, Choice, front};
use crate::pass::weight_quantizer::WeightQuantizer;
use crate::pass::{Context, Pass, Quantize};
use crate::run_state::RunState;
use crate::store::{ActivationScheme, Granularity};
use crate::work::{Event, Meter, ProgressUnit};

/// Effect of quantizing one layer.
#[derive(Debug, Clone, Serialize)]
pub struct Damage {
    /// Name of the weight.
    pub name: String,
    /// Signal to quantization noise ratio of the int8 weight in decibels.
    pub weight_sqnr_db: Option<f64>,
    /// Mean cosine similarity of the outputs to those of the original, with an int8 weight and float
    /// activations.
    pub weights: Option<f64>,
    /// The same with activations quantized dynamically per token.
    pub dynamic: Option<f64>,
    /// The same with activations quantized with static scales found on the calibration samples.
    pub quantized: Option<f64>,
    /// Mean Kullback-Leibler divergence with static scales, for logits.
    pub kl: Option<f64>,
    /// Signal to noise ratio of the weight in 16-bit floats in decibels, infinite without noise; `None` if a
    /// value exceeds their range, or if all values become zero.
    #[serde(skip)]
    pub half_sqnr_db: Option<f64>,
    /// Mean cosine similarity with the weight in each of the requested schemes, and float activations.
    #[serde(skip)]
    pub schemes: Vec<Option<f64>>,
}

impl Damage {
    /// An effect that is not measured yet.
    pub(super) fn new(name: &str) -> Damage {
        let (weight_sqnr_db, weights, dynamic, quantized, kl, half_sqnr_db) = Default::default();
        Damage { name: name.to_owned(), weight_sqnr_db, weights, dynamic, quantized, kl, half_sqnr_db, schemes: Vec::new() }
    }

    /// Loss of the outputs, one minus the cosine similarity; without samples, the relative squared error
    /// of the weight.
    pub fn lost(&self) -> f64 {
        match (self.quantized, self.weight_sqnr_db) {
            (Some(cosine), _) => 1.0 - cosine,
            (None, Some(db)) => 10f64.powf(-db / 10.0),
            _ => 0.0,
        }
    }
}

/// Effects of quantizing each layer separately, the most sensitive first.
pub(super) fn ranked(pass: &QuantizeStatic, prepared: &Prepared, statistics: &BTreeMap<String, ValueStatistics>, context: &Context) -> Result<Vec<Damage>> {
    let compared = Compared::new(prepared, context, Rounding::Token)?;
    let pass = QuantizeStatic { embeddings: false, ..pass.clone() };
    measure_layers(prepared, context, |name| {
        let fidelity = compared.fidelity(&pass.with_layer(prepared, name, statistics)?)?;
        Ok(Damage { quantized: Some(fidelity.cosine), kl: fidelity.divergence(), ..Damage::new(name) })
    })
}

/// Measures all layers and sorts them by sensitivity.
fn measure_layers(prepared: &Prepared, context: &Context, measure: impl Fn(&str) -> Result<Damage>) -> Result<Vec<Damage>> {
    context.work.progress.on(Event::Begin { stage: "Trying layers", total: prepared.layers.len() as u64, done: 0, unit: ProgressUnit::Samples });
    let measured = prepared.layers.iter().map(|name| {
        context.work.cancel.check()?;
        let damage = measure(name)?;
        context.work.advance(1)?;
        Ok(damage)
    });
    let damages: Result<Vec<Damage>> = measured.collect();
    context.work.progress.on(Event::End);
    let mut damages = damages?;
    damages.sort_by(|a, b| b.lost().total_cmp(&a.lost()));
    Ok(damages)
}

/// Compares models with the prepared one on the calibration samples.
struct Compared<'c> {
    comparison: Comparison,
    resources: Resources<'c>,
}

impl<'c> Compared<'c> {
    fn new(prepared: &Prepared, context: &'c Context, rounding: Rounding) -> Result<Compared<'c>> {
        let Some(options) = &context.data.calibration else { return Err(Error::option(super::NAME, "needs calibration samples")) };
        let mut original = prepared.model.clone();
        original.changed_graph = Some(Arc::new(prepared.graph.clone()));
        let data = context.data.open(options, Subject::from_model(original.clone())?.target())?;
        Ok(Compared { comparison: Comparison::new(original, Samples::Set(data)), resources: context.resources(rounding) })
    }

    fn fidelity(&self, model: &Model) -> Result<Fidelity> {
        self.comparison.fidelity(model, self.resources)
    }
}

impl QuantizeStatic {
    /// Measures the effect of quantizing each layer separately: on its weight and, with calibration
    /// samples, on the outputs of the model for each activation scheme. The most sensitive layer comes
    /// first.
    ///
    /// # Errors
    /// The same as [`Plan::execute`](crate::pass::Plan::execute).
    #[doc(hidden)]
    pub fn analyze(&self, model: Model, context: &Context) -> Result<Vec<Damage>> {
        self.analyze_with(Rounding::Token, &[], model, context)
    }

    /// Like [`analyze`](QuantizeStatic::analyze), with another rounding of activations at run time. Linear
    /// weights are also quantized in these schemes.
    ///
    /// # Errors
    /// The same as [`Plan::execute`](crate::pass::Plan::execute).
    #[doc(hidden)]
    pub fn analyze_with(&self, rounding: Rounding, schemes: &[Quantize], model: Model, context: &Context) -> Result<Vec<Damage>> {
        let pass = QuantizeStatic { embeddings: false, ..self.clone() };
        if context.data.calibration.is_none() {
            let prepared = super::prepare::prepare(super::NAME, model, &self.targets, &self.ignore)?;
            return measure_layers(&prepared, context, |name| pass.weight_damage(&prepared, name));
        }
        let plain = super::prepare::prepare(super::NAME, model.clone(), &self.targets, &self.ignore)?;
        let (prepared, statistics, _) = pass.analyze_and_rescale(model, true, context)?;
        let (compared, compared_plain) = (Compared::new(&prepared, context, rounding)?, Compared::new(&plain, context, rounding)?);
        measure_layers(&prepared, context, |name| {
            let mut damage = pass.weight_damage(&plain, name)?;
            let fidelity = compared.fidelity(&pass.with_layer(&prepared, name, &statistics)?)?;
            (damage.quantized, damage.kl) = (Some(fidelity.cosine), fidelity.divergence());
            damage.weights = Some(compared_plain.fidelity(&pass.with_weight(&plain, name, ActivationScheme::None)?)?.cosine);
            damage.dynamic = Some(compared_plain.fidelity(&pass.with_weight(&plain, name, ActivationScheme::DynamicToken)?)?.cosine);
            for scheme in schemes {
                let changed = in_scheme(&plain, name, scheme)?;
                damage.schemes.push(changed.map(|model| compared_plain.fidelity(&model)).transpose()?.map(|fidelity| fidelity.cosine));
            }
            Ok(damage)
        })
    }

    /// Runs of models over the calibration samples in [`analyze_with`](QuantizeStatic::analyze_with), at
    /// most: of the observed model, of the original one before and after rescaling, and of each layer with
    /// static, dynamic and float activations and in the schemes.
    ///
    /// # Errors
    /// If no layer can be quantized.
    pub(crate) fn analyzed_runs(&self, schemes: &[Quantize], model: Model) -> Result<u64> {
        let prepared = super::prepare::prepare(super::NAME, model, &self.targets, &self.ignore)?;
        // Images may be observed twice.
        let observed = 1 + u64::from(prepared.has_images());
        Ok(observed + 2 + (3 + schemes.len() as u64) * prepared.layers.len() as u64)
    }

    /// Quantizes one layer of the model, with static scales of its activations.
    fn with_layer(&self, prepared: &Prepared, name: &str, statistics: &BTreeMap<String, ValueStatistics>) -> Result<Model> {
        let layers = BTreeSet::from([name.to_owned()]);
        let quantizers = self.quantizers(prepared, &layers, Some(statistics))?;
        self.fit(prepared, &quantizers, &layers, Some(statistics), &Arc::new(Meter::default()))
    }

    /// Quantizes one weight of the model to int8.
    fn with_weight(&self, prepared: &Prepared, name: &str, activations: ActivationScheme) -> Result<Model> {
        let mut model = prepared.model.clone();
        let weight = model.weights.get(name)?.clone();
        let affine = self.affine(&weight, Granularity::Channel, activations);
        let quantizer = WeightQuantizer::new(name, &weight, affine, self.weight_observer, &Arc::new(Meter::default()));
        model.weights.by_name.insert(name.to_owned(), quantizer.weight());
        model.changed_graph = Some(Arc::new(prepared.graph.clone()));
        Ok(model)
    }

    /// Measures only the quantization error of a weight.
    fn weight_damage(&self, prepared: &Prepared, name: &str) -> Result<Damage> {
        let before = prepared.model.weights.get(name)?.floats(name)?;
        let after = self.with_weight(prepared, name, ActivationScheme::None)?.weights.get(name)?.floats(name)?;
        let weight_sqnr_db = compare::floats(&before, &after).sqnr_db();
        let half: Vec<f32> = before.iter().map(|value| f16::from_f32(*value).to_f32()).collect();
        // `cast` refuses values beyond the range, and weights that become zero.
        let is_zero = |values: &[f32]| values.iter().all(|value| *value == 0.0);
        let can_be_cast = half.iter().all(|value| value.is_finite()) && (!is_zero(&half) || is_zero(&before));
        let half_sqnr_db = can_be_cast.then(|| compare::floats(&before, &half).sqnr_db().unwrap_or(f64::INFINITY));
        Ok(Damage { weight_sqnr_db, half_sqnr_db, ..Damage::new(name) })
    }
}

/// The model with one weight quantized in a scheme; `None` if the weight is not linear.
fn in_scheme(prepared: &Prepared, name: &str, scheme: &Quantize) -> Result<Option<Model>> {
    if !is_linear(name, prepared.model.weights.get(name)?) {
        return Ok(None);
    }
    let targets = vec![name.parse().map_err(|e| Error::option(super::NAME, e))?];
    let pass = Quantize { targets, ..scheme.clone() };
    let mut model = pass.plan(&prepared.model, &RunState::default())?.model;
    model.changed_graph = Some(Arc::new(prepared.graph.clone()));
    Ok(Some(model))
}

/// Least loss of a layer: layers without a measured loss are the last that stay in floats.
const LEAST_LOSS: f64 = 1e-12;

/// Expected loss of a quantized layer: positive and finite.
fn expected_loss(damage: &Damage) -> f64 {
    Some(damage.lost()).filter(|loss| loss.is_finite()).map_or(1.0, |loss| loss.max(LEAST_LOSS))
}

/// The choices of layers to leave in floats that have the least expected loss for their number: the front
/// over all layers, by ascending number.
pub(super) fn front_of(damages: &[Damage]) -> Vec<Assignment> {
    let options = |damage: &Damage| vec![Choice { cost: 0, loss: expected_loss(damage) }, Choice { cost: 1, loss: 0.0 }];
    front(&damages.iter().map(options).collect::<Vec<_>>())
}

/// Names of the layers that a choice quantizes, and of the layers that it leaves in floats.
pub(super) fn quantized_and_floats(damages: &[Damage], choice: &Assignment) -> [Vec<String>; 2] {
    let (mut quantized, mut floats) = (Vec::new(), Vec::new());
    for (damage, option) in damages.iter().zip(&choice.options) {
        if *option == 0 { quantized.push(damage.name.clone()) } else { floats.push(damage.name.clone()) }
    }
    [quantized, floats]
}

/// Recommends layers to leave in floats, given their damages in descending order: until the remaining
/// layers cause at most half of the total damage, but at most a quarter of the layers, and only layers
/// with at least 1.5 times the median damage.
pub fn recommend_floats(damages: &[Damage]) -> Vec<String> {
    let median = damages.get(damages.len() / 2).map_or(0.0, expected_loss);
    // Layers without a loss are at most as large as the median.
    let large = damages.iter().take(damages.len() / 4).take_while(|damage| expected_loss(damage) >= 1.5 * median).count();
    let front = front_of(damages);
    let all = front.first().map_or(0.0, |none| none.loss);
    let chosen = front.iter().take(large + 1).find(|choice| choice.loss <= all / 2.0).or(front.get(large));
    chosen.map(|choice| quantized_and_floats(damages, choice)).map(|[_, floats]| floats).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_without_a_loss_are_not_recommended() {
        let recommended = |losses: [f64; 8]| {
            let damages = losses.iter().enumerate().map(|(at, loss)| Damage { quantized: Some(1.0 - loss), ..Damage::new(&at.to_string()) });
            recommend_floats(&damages.collect::<Vec<_>>())
        };
        assert!(recommended([0.0; 8]).is_empty());
        assert_eq!(recommended([0.5, 0.25, 0.125, 0.0, 0.0, 0.0, 0.0, 0.0]), ["0"]);
        assert_eq!(recommended([0.5, 0.5, 0.125, 0.1, 0.1, 0.1, 0.1, 0.1]), ["0", "1"]);
    }
}

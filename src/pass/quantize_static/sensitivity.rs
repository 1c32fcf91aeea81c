//! What quantizing each layer alone does to the model's answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;

use super::QuantizeStatic;
use super::prepare::Prepared;
use crate::calibration::ValueStatistics;
use crate::data::{Batch, DataSet};
use crate::error::{Error, Result};
use crate::evaluation::{self, Fidelity, FidelitySums, Outputs, Subject};
use crate::kernel::compare;
use crate::model::Model;
use crate::pass::Context;
use crate::pass::integers::Integers;
use crate::store::{ActivationScheme, Granularity};
use crate::work::{Event, Meter, ProgressUnit};

/// The damage that one layer does.
#[derive(Debug, Clone, Serialize)]
pub struct Damage {
    /// Its weight.
    pub name: String,
    /// Signal to noise of the weight as int8, in decibels.
    pub weight_sqnr_db: Option<f64>,
    /// Mean cosine to the original's answers with this layer's weight as int8 and activations in floats.
    pub weights: Option<f64>,
    /// The same with activations quantized for each token while the model runs.
    pub dynamic: Option<f64>,
    /// The same with activations quantized by scales found on the calibration samples.
    pub quantized: Option<f64>,
    /// Mean Kullback-Leibler divergence of the last, for logits.
    pub kl: Option<f64>,
}

impl Damage {
    /// How much of the answers is lost; without samples, how much of the weight.
    pub fn lost(&self) -> f64 {
        match (self.quantized, self.weight_sqnr_db) {
            (Some(cosine), _) => 1.0 - cosine,
            (None, Some(db)) => 10f64.powf(-db / 10.0),
            _ => 0.0,
        }
    }
}

/// Layers, the most sensitive first, each quantized alone.
pub(super) fn ranked(pass: &QuantizeStatic, prepared: &Prepared, seen: &BTreeMap<String, ValueStatistics>, context: &Context) -> Result<Vec<Damage>> {
    let trial = Trial::new(prepared, context)?;
    let alone = QuantizeStatic { embeddings: false, ..pass.clone() };
    each(prepared, context, |name| {
        let layers = BTreeSet::from([name.to_owned()]);
        let meter = Arc::new(Meter::default());
        let found = alone.quantizers(prepared, &layers, Some(seen))?;
        let fidelity = trial.run(&alone.fit(prepared, &found, &layers, Some(seen), &meter)?, context)?;
        Ok(Damage { name: name.to_owned(), weight_sqnr_db: None, weights: None, dynamic: None, quantized: Some(fidelity.cosine), kl: fidelity.kl })
    })
}

fn each(prepared: &Prepared, context: &Context, measure: impl Fn(&str) -> Result<Damage>) -> Result<Vec<Damage>> {
    context.work.progress.on(Event::Begin { stage: "Trying layers", total: prepared.layers.len() as u64, unit: ProgressUnit::Samples });
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

/// Bytes of the original's outputs that are cached, so that they need not be computed for every layer.
const CACHED: usize = 256 << 20;

/// Calibration samples and the model to compare with.
struct Trial {
    original: Model,
    data: Arc<DataSet>,
    /// Outputs of the original for the first batches.
    answers: Vec<Outputs>,
    batches: usize,
}

impl Trial {
    fn new(prepared: &Prepared, context: &Context) -> Result<Trial> {
        let Some(options) = &context.data.calibration else { return Err(Error::option(super::NAME, "needs calibration samples")) };
        let mut original = prepared.model.clone();
        original.changed_graph = Some(Arc::new(prepared.graph.clone()));
        let subject = Subject::of(original.clone())?;
        let data = context.data.open(options, subject.target())?;
        let mut trial = Trial { original, data, answers: Vec::new(), batches: 0 };
        let (mut bytes, mut answers) = (0, Vec::new());
        trial.batches = trial.each_batch([&trial.original], context, |_, mut outputs| {
            let outputs = outputs.swap_remove(0);
            bytes += outputs.values().map(|output| output.elem_count() * output.dtype().size_in_bytes()).sum::<usize>();
            if bytes <= CACHED {
                answers.push(outputs);
            }
            Ok(())
        })?;
        trial.answers = answers;
        Ok(trial)
    }

    /// Runs models on all samples, and returns the number of batches.
    fn each_batch<'m>(
        &self,
        models: impl IntoIterator<Item = &'m Model>,
        context: &Context,
        mut take: impl FnMut(&Batch, Vec<Outputs>) -> Result<()>,
    ) -> Result<usize> {
        let mut subjects = models.into_iter().map(|model| Subject::of(model.clone())).collect::<Result<Vec<_>>>()?;
        let (first, work) = (self.data.first()?, context.work.quiet());
        let mut runners = evaluation::load(&mut subjects, Some(&first.inputs), &context.device, context.memory, &work)?;
        let mut count = 0;
        self.data.for_each(|batch| {
            context.work.cancel.check()?;
            count += 1;
            let outputs = runners.iter_mut().map(|runner| runner.run(&batch.inputs)).collect::<Result<_>>()?;
            take(&batch, outputs)
        })?;
        Ok(count)
    }

    fn run(&self, model: &Model, context: &Context) -> Result<Fidelity> {
        // All of the original's outputs are known, or it runs along.
        let known = self.answers.len() == self.batches;
        let original = Some(&self.original).filter(|_| !known);
        let (mut closeness, mut answers) = (FidelitySums::default(), self.answers.iter());
        self.each_batch([model].into_iter().chain(original), context, |batch, outputs| {
            let before = if known { answers.next() } else { outputs.get(1) };
            before.map_or(Ok(()), |before| closeness.add(batch, before, &outputs[0]))
        })?;
        Ok(closeness.finish())
    }
}

impl QuantizeStatic {
    /// What quantizing each layer alone does: to its weight, and where there are calibration samples, to the model's answers under
    /// each scheme. The most sensitive layer comes first.
    ///
    /// # Errors
    /// As those of the pass.
    pub fn analyze(&self, model: Model, context: &Context) -> Result<Vec<Damage>> {
        let alone = QuantizeStatic { embeddings: false, ..self.clone() };
        if context.data.calibration.is_none() {
            let prepared = super::prepare::prepare(super::NAME, model, &self.targets, &self.ignore)?;
            return each(&prepared, context, |name| alone.of_weight(&prepared, name));
        }
        let plain = super::prepare::prepare(super::NAME, model.clone(), &self.targets, &self.ignore)?;
        let (prepared, seen, _) = alone.study(model, context)?;
        let (trial, plain_trial) = (Trial::new(&prepared, context)?, Trial::new(&plain, context)?);
        each(&prepared, context, |name| {
            let mut damage = alone.of_weight(&plain, name)?;
            let layers = BTreeSet::from([name.to_owned()]);
            let meter = Arc::new(Meter::default());
            let found = alone.quantizers(&prepared, &layers, Some(&seen))?;
            let fidelity = trial.run(&alone.fit(&prepared, &found, &layers, Some(&seen), &meter)?, context)?;
            (damage.quantized, damage.kl) = (Some(fidelity.cosine), fidelity.kl);
            damage.weights = Some(plain_trial.run(&alone.with_weight(&plain, name, ActivationScheme::None)?, context)?.cosine);
            damage.dynamic = Some(plain_trial.run(&alone.with_weight(&plain, name, ActivationScheme::DynamicToken)?, context)?.cosine);
            Ok(damage)
        })
    }

    /// The model with one weight as int8.
    fn with_weight(&self, prepared: &Prepared, name: &str, activations: ActivationScheme) -> Result<Model> {
        let mut model = prepared.model.clone();
        let weight = model.weights.get(name)?.clone();
        let affine = self.affine(&weight, Granularity::Channel, activations);
        let integers = Integers::new(name, &weight, affine, self.weight_observer, &Arc::new(Meter::default()));
        model.weights.by_name.insert(name.to_owned(), integers.weight());
        model.changed_graph = Some(Arc::new(prepared.graph.clone()));
        Ok(model)
    }

    fn of_weight(&self, prepared: &Prepared, name: &str) -> Result<Damage> {
        let before = prepared.model.weights.get(name)?.floats(name)?;
        let after = self.with_weight(prepared, name, ActivationScheme::None)?.weights.get(name)?.floats(name)?;
        let weight_sqnr_db = compare::floats(&before, &after).sqnr_db();
        Ok(Damage { name: name.to_owned(), weight_sqnr_db, weights: None, dynamic: None, quantized: None, kl: None })
    }
}

/// Layers that should stay in floats: from the most sensitive on, until those that are left do at most half of the damage of all,
/// but never more than a quarter of the layers, and none that does little more than the one in the middle.
pub fn worth_keeping(damages: &[Damage]) -> Vec<String> {
    let all: f64 = damages.iter().map(Damage::lost).sum();
    let usual = damages.get(damages.len() / 2).map_or(0.0, Damage::lost);
    let mut left = all;
    let mut kept = Vec::new();
    for damage in damages.iter().take(damages.len() / 4) {
        if left <= all / 2.0 || damage.lost() < 1.5 * usual {
            break;
        }
        left -= damage.lost();
        kept.push(damage.name.clone());
    }
    kept
}

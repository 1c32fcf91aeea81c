//! Computes low-rank factorizations of layers, with calibration samples or from the weights only.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::block_checkpoints::{BlockCheckpoints, BlockReport, identity};
use super::compensated::Prepared;
use super::held_out::{Errors, HeldOut, LayerChoice};
use super::{Flow, Layer, Layerwise, Method, MethodReport, Moments, MomentsRequest, Readers, require_bytes, require_finite, unsupported};
use crate::error::{Error, Result, counted};
use crate::kernel::dense::{product, transposed};
use crate::kernel::low_rank::LowRank;
use crate::model::Model;
use crate::pass::decompose::{Decompose, Factorization};
use crate::pass::{Checkpoints, Context, InputImportance, Pass};
use crate::run_state::Applied;
use crate::store::{Origin, Weight};

/// Adds the factors of the given layers to the model, without removing the original weights. Returns
/// details for the report.
pub(in crate::pass) fn decompose(
    pass: &Decompose,
    factorizations: &[Factorization],
    model: &mut Model,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let by_weight: BTreeMap<&str, &Factorization> = factorizations.iter().map(|f| (f.weight.as_str(), f)).collect();
    let mut factorizer = Factorizer {
        by_weight: &by_weight,
        value: String::new(),
        products: Vec::new(),
        correction: None,
        choices: BTreeMap::new(),
        report: MethodReport::default(),
    };
    let mut details = Map::new();
    let uses_samples = pass.importance == InputImportance::Activation;
    let names = factorizations.iter().map(|f| f.weight.as_str()).collect();
    let plain = if uses_samples { unsupported(model, &names)? } else { BTreeMap::new() };
    let reason = |name: &str| plain.iter().find(|(_, names)| names.contains(&name)).map(|(reason, _)| *reason);
    let (with_samples, weight_only): (Vec<&Factorization>, Vec<&Factorization>) =
        factorizations.iter().partition(|f| uses_samples && reason(&f.weight).is_none());
    if !with_samples.is_empty() {
        let targets: BTreeSet<&str> = with_samples.iter().map(|f| f.weight.as_str()).collect();
        let requested = MomentsRequest { products: true, original: true, held_out: true, ..MomentsRequest::default() };
        let summary =
            Layerwise { name: pass.name(), context, targets: &targets, requested, rescale: None, flow: Flow::default() }.run(model, &mut factorizer)?;
        details.insert("samples".into(), json!(summary.samples));
        factorizer.report = summary.report;
    }
    if let (true, Some(first)) = (uses_samples, weight_only.first()) {
        let kind = if weight_only.iter().all(|f| f.convolution) { "convolution" } else { "layer" };
        let count = counted(weight_only.len(), kind);
        let reason = reason(&first.weight).unwrap_or_default();
        applied.notes.push(format!("decompose: {count} decomposed without calibration samples (the first: `{}`, {reason})", first.weight));
    }
    let resumed = factorizer.run_without_samples(&weight_only, pass, model, context)?;
    if resumed > 0 {
        applied.notes.push(format!("{} loaded from the checkpoints of an interrupted run", counted(resumed, "block")));
    }
    let report = factorizer.report;
    applied.notes.extend(report.notes);
    LayerChoice::describe(&report.choices, (pass.name(), WITH_SAMPLES), &mut details, &mut applied.notes);
    details.insert("lost".into(), json!(report.figures));
    Ok(details)
}

/// Name of the factorization with samples.
const WITH_SAMPLES: &str = "activation";

/// Fraction of the correction of weights for changed inputs. With all of it, the factors compensate for
/// errors of earlier layers at the expense of their own: the perplexity of SmolLM2 rises.
const CORRECTION: f32 = 0.25;
/// Damping of the moments for the correction, as a fraction of the mean of their diagonal.
const CORRECTION_DAMPING: f64 = 0.01;

/// Layers per checkpoint when decomposing without samples.
const LAYERS_PER_CHECKPOINT: usize = 8;

/// A factorization of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Solution {
    /// Without samples.
    Weights,
    /// With the least error on the samples.
    Samples,
    /// With the least error on the samples, of a weight that is corrected for changed inputs.
    Corrected,
}

const SOLUTIONS: [Solution; 3] = [Solution::Weights, Solution::Samples, Solution::Corrected];

/// A weight, and sums of products of inputs.
type Problem<'v> = (Cow<'v, [f32]>, Option<&'v [f32]>);

impl Solution {
    /// The weight to factorize, and the sums of products of inputs to use.
    fn apply<'v>(self, values: &'v [f32], products: &'v [f32], correction: Option<&Prepared>) -> Result<Problem<'v>> {
        Ok(match (self, correction) {
            (Solution::Weights, _) => (Cow::Borrowed(values), None),
            (Solution::Corrected, Some(correction)) => {
                let mut values = values.to_vec();
                correction.correct(&mut values, CORRECTION)?;
                (Cow::Owned(values), Some(products))
            }
            (Solution::Samples | Solution::Corrected, _) => (Cow::Borrowed(values), Some(products)),
        })
    }
}

struct Factorizer<'a> {
    by_weight: &'a BTreeMap<&'a str, &'a Factorization>,
    /// Name of the input of the next layers, the upper triangle of its sums of products, and the correction
    /// of weights if the input has changed.
    value: String,
    products: Vec<f32>,
    correction: Option<Prepared<'static>>,
    /// The solution of each layer that reads the input.
    choices: BTreeMap<String, Solution>,
    /// The figures are the relative squared error of each weight.
    report: MethodReport,
}

impl Factorizer<'_> {
    fn factorization(&self, layer: &str) -> Result<&Factorization> {
        self.by_weight.get(layer).copied().ok_or_else(|| Error::tensor(layer, "has no factorization", "add it to `ignore`"))
    }

    /// Errors of each solution of layers with these weights on held-out tokens.
    fn errors(&self, layers: &[(&Layer, Vec<f32>)], moments: &Moments) -> Result<Vec<[Errors; 3]>> {
        let mut found = vec![<[Errors; 3]>::default(); layers.len()];
        // In a fold whose inputs have not changed, the correction changes nothing.
        let is_changed = !moments.differences.is_empty() || moments.folds.iter().any(HeldOut::is_changed);
        // Without samples, the factorization is the same for all folds.
        let weights_only = match moments.folds.is_empty() {
            true => Vec::new(),
            false => layers.iter().map(|(layer, values)| self.effective(layer, values, None)).collect::<Result<Vec<_>>>()?,
        };
        for (index, fold) in moments.folds.iter().enumerate() {
            let fitted = moments.without(index)?;
            let fitted = fitted.as_ref().unwrap_or(moments);
            let correction = correction(&self.value, fitted, Cow::Borrowed(&fitted.differences))?;
            for (((layer, values), weights_only), [plain, sampled, corrected]) in layers.iter().zip(&weights_only).zip(&mut found) {
                let [rows, size, _] = self.factorization(&layer.weight)?.sizes;
                let targets = fold.original_outputs(values, size)?;
                let add = |errors: &mut Errors, effective: &[f32]| {
                    errors.add_held_out(fold, &fold.outputs(effective, size)?, &targets, rows);
                    Ok::<(), Error>(())
                };
                add(plain, weights_only)?;
                let effective = self.effective(layer, values, Some(fitted.products.as_slice()))?;
                add(sampled, &effective)?;
                match &correction {
                    _ if !is_changed => {}
                    Some(_) => {
                        let (values, products) = Solution::Corrected.apply(values, &fitted.products, correction.as_ref())?;
                        add(corrected, &self.effective(layer, &values, products)?)?;
                    }
                    None => add(corrected, &effective)?,
                }
            }
        }
        Ok(found)
    }

    /// The product of the two layers `[rows, size]` that replace a layer with these values.
    fn effective(&self, layer: &Layer, values: &[f32], products: Option<&[f32]>) -> Result<Vec<f32>> {
        let [_, size, rank] = self.factorization(&layer.weight)?.sizes;
        let low_rank = LowRank::new(values, size, rank, products).ok_or_else(|| not_finite(&layer.weight))?;
        Ok(product(&low_rank.outer, &low_rank.inner, rank, size).into_iter().map(|x| x as f32).collect())
    }

    /// Factorizes a matrix `[rows, size]` into the weights of two layers.
    fn factors(&mut self, weight: &str, values: &[f32], products: Option<&[f32]>) -> Result<Vec<(String, Weight)>> {
        let factorization = self.factorization(weight)?.clone();
        let [_, size, rank] = factorization.sizes;
        let low_rank = LowRank::new(values, size, rank, products).ok_or_else(|| not_finite(weight))?;
        if low_rank.damping > 0.0 {
            self.report.notes.push(format!("the features of `{}` are linearly dependent: damping {:.0e} for `{weight}`", self.value, low_rank.damping));
        }
        self.report.figures.insert(weight.to_owned(), low_rank.lost);
        let parts = [(low_rank.inner, size), (low_rank.outer, rank)];
        let mut weights = Vec::new();
        for ((name, shape), (values, columns)) in factorization.parts.iter().zip(&factorization.shapes).zip(parts) {
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            let values = if factorization.input_major { transposed(&values, columns) } else { values };
            let part = Weight::computed(weight, factorization.dtype, shape.clone(), &values)?;
            weights.push((name.clone(), part.with_origin(Origin::Rescaled)));
        }
        Ok(weights)
    }

    /// Decomposes layers without calibration samples. Returns the number of checkpoints loaded from an
    /// interrupted run.
    fn run_without_samples(&mut self, factorizations: &[&Factorization], pass: &Decompose, model: &mut Model, context: &Context) -> Result<usize> {
        if factorizations.is_empty() {
            return Ok(0);
        }
        if let Some(limit) = context.memory.bytes.filter(|_| context.memory.explicit) {
            let needed = factorizations.iter().map(|f| f.bytes()).max().unwrap_or(0) as u64;
            require_bytes(pass.name(), "decomposing the largest layer needs", needed, limit)?;
        }
        let in_subfolder = |checkpoints: &Checkpoints| Checkpoints { folder: checkpoints.folder.join(pass.name()), ..checkpoints.clone() };
        let checkpoints = context.checkpoints.as_ref().map(|found| BlockCheckpoints::open(&in_subfolder(found), &identity(found, &context.device, 1)));
        let checkpoints = checkpoints.transpose()?;
        let (mut resumed, mut total) = (0, std::mem::take(&mut self.report));
        for (number, factorizations) in factorizations.chunks(LAYERS_PER_CHECKPOINT).enumerate() {
            let changed = match checkpoints.as_ref().map(|checkpoints| checkpoints.load(number, model, &context.work)).transpose()?.flatten() {
                Some((changed, report)) => {
                    resumed += 1;
                    total.extend(report.method);
                    changed
                }
                None => {
                    let mut changed = BTreeMap::new();
                    for factorization in factorizations {
                        context.work.cancel.check()?;
                        let name = &factorization.weight;
                        let values = model.weights.get(name)?.floats(name)?;
                        require_finite(name, &values)?;
                        let values = if factorization.input_major { transposed(&values, factorization.sizes[0]) } else { values };
                        changed.extend(self.factors(name, &values, None)?);
                    }
                    let report = BlockReport { method: std::mem::take(&mut self.report), ..BlockReport::default() };
                    let (changed, report) = match &checkpoints {
                        Some(checkpoints) => checkpoints.store(number, model, changed, report, &context.work)?,
                        None => (changed, report),
                    };
                    total.extend(report.method);
                    changed
                }
            };
            model.weights.by_name.extend(changed);
        }
        self.report = total;
        Ok(resumed)
    }
}

/// The correction for inputs that differ from the original model's by `differences`; `None` if they are
/// equal.
fn correction<'d>(value: &str, moments: &Moments, differences: Cow<'d, [f32]>) -> Result<Option<Prepared<'d>>> {
    (!differences.is_empty()).then(|| Prepared::for_correction(value, moments, differences, CORRECTION_DAMPING)).transpose()
}

fn not_finite(weight: &str) -> Error {
    Error::tensor(weight, "cannot be decomposed: its values, or the inputs of its layer, are too large", "add it to `ignore`")
}

impl Method for Factorizer<'_> {
    fn check(&self, layer: &Layer) -> Result<()> {
        self.factorization(&layer.weight).map(|_| ())
    }

    fn bytes(&self, layer: &Layer) -> usize {
        self.factorization(&layer.weight).map_or(0, Factorization::bytes)
    }

    fn read(&mut self, value: &str, mut moments: Moments, readers: &Readers) -> Result<()> {
        value.clone_into(&mut self.value);
        self.choices.clear();
        let layers = readers.layers.iter().map(|layer| Ok((layer, readers.values(layer)?.1))).collect::<Result<Vec<_>>>()?;
        for ((layer, _), errors) in layers.iter().zip(self.errors(&layers, &moments)?) {
            let mut best = 0;
            for solution in 1..SOLUTIONS.len() {
                if !errors[solution].is_empty() && errors[solution].are_below(&errors[best]) {
                    best = solution;
                }
            }
            let relative_error = (errors[0].total() > 0.0).then(|| errors[best].total() / errors[0].total());
            let solution = SOLUTIONS[best];
            let choice = if solution == Solution::Weights { "none" } else { WITH_SAMPLES }.to_owned();
            let propagation = (solution == Solution::Corrected).then_some(CORRECTION);
            self.report.choices.push(LayerChoice { weight: layer.weight.clone(), choice, damping: None, propagation, relative_error });
            self.choices.insert(layer.weight.clone(), solution);
        }
        moments.merge()?;
        let differences = std::mem::take(&mut moments.differences);
        let is_corrected = self.choices.values().any(|solution| *solution == Solution::Corrected);
        self.correction = if is_corrected { correction(value, &moments, Cow::Owned(differences))? } else { None };
        self.products = moments.products;
        Ok(())
    }

    fn change(&mut self, layer: &Layer, _weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let (products, correction) = (std::mem::take(&mut self.products), self.correction.take());
        let solution = self.choices.get(&layer.weight).copied().unwrap_or(Solution::Weights);
        let applied = solution.apply(values, &products, correction.as_ref());
        let weights = applied.and_then(|(values, fitted)| self.factors(&layer.weight, &values, fitted));
        (self.products, self.correction) = (products, correction);
        weights
    }

    fn values(&self, layer: &Layer, changed: &BTreeMap<String, Weight>) -> Result<Option<Vec<f32>>> {
        let factorization = self.factorization(&layer.weight)?;
        let [Some(inner), Some(outer)] = [0, 1].map(|part| changed.get(&factorization.parts[part])) else { return Ok(None) };
        let wide = |weight: &Weight, name: &str| Ok::<Vec<f64>, Error>(weight.floats(name)?.into_iter().map(f64::from).collect());
        let (inner, outer) = (wide(inner, &factorization.parts[0])?, wide(outer, &factorization.parts[1])?);
        let [rows, size, rank] = factorization.sizes;
        // For input-major weights, the first layer is the left factor.
        let effective = if factorization.input_major { product(&inner, &outer, rank, rows) } else { product(&outer, &inner, rank, size) };
        Ok(Some(effective.into_iter().map(|x| x as f32).collect()))
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

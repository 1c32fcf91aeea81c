//! Low-rank corrections of quantized layers: `Ŵ + B A`, where `B A` is the matrix of the given rank with
//! which the outputs of the layer differ least from those of `W` (Liu et al. 2024, EoRA,
//! <https://arxiv.org/abs/2410.21271>). Without samples, it is the truncated singular value decomposition
//! of `W - Ŵ`.
//!
//! `B A` is a projection of `W - Ŵ` from the left, so that the error of the outputs does not increase for
//! any input.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::report::CorrectedError;
use super::{Flow, Layer, Layerwise, Method, MethodReport, Moments, MomentsRequest, Readers, require_finite, unsupported};
use crate::error::{Error, Result};
use crate::kernel::dense::product;
use crate::kernel::low_rank::{LowRank, symmetric};
use crate::model::Model;
use crate::model::adapter::factor_names;
use crate::pass::Context;
use crate::pass::quantize::Corrections;
use crate::run_state::Applied;
use crate::store::{Origin, Weight};

/// The factors of the correction of a layer `[rows, size]`, by name, and its errors. `products` is the upper
/// triangle of the second moments of the layer's inputs.
pub(super) fn correction(
    corrections: &Corrections,
    weight: &str,
    [target, quantized]: [&[f32]; 2],
    products: Option<&[f32]>,
) -> Result<(Vec<(String, Weight)>, CorrectedError)> {
    let layer = corrections.layers.get(weight).ok_or_else(|| Error::tensor(weight, "has no correction", "add it to `ignore`"))?;
    let ([_, size], rank) = (layer.sizes, corrections.rank);
    let products = products.filter(|_| corrections.uses_samples);
    let mut error: Vec<f32> = target.iter().zip(quantized).map(|(target, quantized)| target - quantized).collect();
    let not_finite = || Error::tensor(weight, "cannot be corrected: its values, or the inputs of its layer, are too large", "add it to `ignore`");
    let low_rank = LowRank::new(&error, size, rank, products).ok_or_else(not_finite)?;
    let moments = products.map(|products| symmetric(products, size));
    let squares = |matrix: &[f32]| output_squares(matrix, size, moments.as_deref());
    let (all, before) = (squares(target), squares(&error));
    let mut factors = Vec::with_capacity(2);
    for ((name, shape), values) in factor_names(weight).into_iter().zip(corrections.shapes(layer.sizes)).zip([low_rank.inner, low_rank.outer]) {
        let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
        require_finite(&name, &values)?;
        let factor = Weight::computed(&name, layer.dtype, shape, &values)?.with_origin(Origin::Rescaled);
        factors.push((name, factor));
    }
    let term = term(weight, rank, size, [&factors[0].1, &factors[1].1])?;
    error.iter_mut().zip(term).for_each(|(error, term)| *error -= term);
    let relative = |squares: f64| if all > 0.0 { squares / all } else { 0.0 };
    Ok((factors, CorrectedError { weight: weight.to_owned(), before: relative(before), after: relative(squares(&error)) }))
}

/// Sum of `e H eᵀ` over the rows `e` of a matrix `[n, size]`, or of their squares without `H` `[size, size]`.
fn output_squares(matrix: &[f32], size: usize, moments: Option<&[f64]>) -> f64 {
    let wide: Vec<f64> = matrix.iter().map(|x| f64::from(*x)).collect();
    let Some(moments) = moments else { return wide.iter().map(|x| x * x).sum() };
    product(&wide, moments, size, size).iter().zip(&wide).map(|(a, b)| a * b).sum::<f64>().max(0.0)
}

/// The product `[rows, size]` of the factors.
fn term(weight: &str, rank: usize, size: usize, [inner, outer]: [&Weight; 2]) -> Result<Vec<f32>> {
    let wide = |factor: &Weight| Ok::<Vec<f64>, Error>(factor.floats(weight)?.into_iter().map(f64::from).collect());
    Ok(product(&wide(outer)?, &wide(inner)?, rank, size).into_iter().map(|x| x as f32).collect())
}

/// Adds the correction among the changed weights to the values `[rows, size]` of a quantized weight.
pub(super) fn add_term(corrections: &Corrections, layer: &Layer, changed: &BTreeMap<String, Weight>, values: &mut [f32]) -> Result<()> {
    let [inner, outer] = factor_names(&layer.weight);
    let (Some(inner), Some(outer)) = (changed.get(&inner), changed.get(&outer)) else { return Ok(()) };
    let term = term(&layer.weight, corrections.rank, layer.size, [inner, outer])?;
    values.iter_mut().zip(term).for_each(|(value, term)| *value += term);
    Ok(())
}

/// Approximate memory of computing the correction of a layer, in bytes: copies of the matrix and of
/// covariance matrices as f64.
pub(in crate::pass) fn correction_bytes([rows, size]: [usize; 2]) -> usize {
    8 * (5 * rows * size + 4 * rows.max(size) * rows.max(size))
}

/// Computes the corrections of a model whose weights are rounded to nearest, and adds them to it.
/// `original` is the model before. Returns details for the report.
pub(in crate::pass) fn correct(
    pass: &'static str,
    corrections: &Corrections,
    original: &Model,
    rounded: &mut Model,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let mut details = Map::new();
    let names: BTreeSet<&str> = corrections.layers.keys().map(String::as_str).collect();
    let mut errors = Vec::new();
    if corrections.uses_samples {
        let quantized: BTreeSet<&str> = applied.tensors.iter().map(String::as_str).collect();
        let unsupported: BTreeSet<&str> = unsupported(original, &quantized)?.into_values().flatten().collect();
        let targets = quantized.iter().filter(|name| !unsupported.contains(*name)).copied().collect();
        if let Some(name) = names.iter().find(|name| unsupported.contains(*name)) {
            return Err(Error::tensor(name, "has no inputs that calibration can observe", "add it to `ignore`, or set `importance: none` in `correct`"));
        }
        let requested = MomentsRequest { products: true, ..MomentsRequest::default() };
        let mut corrector = Corrector { corrections, rounded: &*rounded, products: Vec::new(), report: MethodReport::default() };
        let mut model = original.clone();
        let summary = Layerwise { name: pass, context, targets: &targets, requested, rescale: None, flow: Flow::default() }.run(&mut model, &mut corrector)?;
        let factors = names.iter().flat_map(|name| factor_names(name)).filter_map(|name| model.weights.by_name.remove_entry(&name));
        rounded.weights.by_name.extend(factors.collect::<Vec<_>>());
        details.insert("samples".into(), json!(summary.samples));
        applied.notes.extend(summary.report.notes);
        errors = summary.report.corrections;
    } else {
        for name in names {
            context.work.cancel.check()?;
            let [target, quantized] = [original, &*rounded].map(|model| model.weights.get(name).and_then(|weight| weight.floats(name)));
            let target = target?;
            require_finite(name, &target)?;
            let (factors, error) = correction(corrections, name, [&target, &quantized?], None)?;
            rounded.weights.by_name.extend(factors);
            errors.push(error);
        }
    }
    describe(corrections, &errors, &mut details);
    Ok(details)
}

/// Adds corrections to the details of the report.
pub(super) fn describe(corrections: &Corrections, errors: &[CorrectedError], details: &mut Map<String, Value>) {
    let mean = |error: fn(&CorrectedError) -> f64| errors.iter().map(error).sum::<f64>() / errors.len().max(1) as f64;
    let described = json!({
        "rank": corrections.rank,
        "bytes": corrections.bytes(),
        "relative_error": { "before": mean(|error| error.before), "after": mean(|error| error.after) },
        "layers": errors,
    });
    details.insert("correction".into(), described);
}

/// Declares the factors in the weights of a model as corrections, and adds them to its graph.
pub(in crate::pass) fn declare_corrections(model: &mut Model) -> Result<()> {
    let graph = if model.has_derived_graph() { None } else { Some(model.graph()?) };
    model.declare_corrections();
    if let Some(graph) = graph {
        model.changed_graph = Some(std::sync::Arc::new(crate::ir::low_rank::insert(&graph, &model.weights, &model.corrections(), &model.corrected_norms())?));
    }
    Ok(())
}

/// Corrects layers that are rounded to nearest.
struct Corrector<'a> {
    corrections: &'a Corrections,
    /// The model with rounded weights.
    rounded: &'a Model,
    /// Second moments of the input of the next layers.
    products: Vec<f32>,
    report: MethodReport,
}

impl Corrector<'_> {
    /// The rounded weight of a layer as `[rows, size]`.
    fn rounded(&self, layer: &Layer) -> Result<Vec<f32>> {
        Ok(layer.output_major(self.rounded.weights.get(&layer.weight)?.floats(&layer.weight)?))
    }
}

impl Method for Corrector<'_> {
    fn check(&self, _layer: &Layer) -> Result<()> {
        Ok(())
    }

    fn bytes(&self, layer: &Layer) -> usize {
        correction_bytes([layer.rows, layer.size])
    }

    fn read(&mut self, _value: &str, moments: Moments, _readers: &Readers) -> Result<()> {
        self.products = moments.products;
        Ok(())
    }

    fn change(&mut self, layer: &Layer, _weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        if !self.corrections.layers.contains_key(&layer.weight) {
            return Ok(Vec::new());
        }
        let (factors, error) = correction(self.corrections, &layer.weight, [values, &self.rounded(layer)?], Some(&self.products))?;
        self.report.corrections.push(error);
        Ok(factors)
    }

    fn values(&self, layer: &Layer, changed: &BTreeMap<String, Weight>) -> Result<Option<Vec<f32>>> {
        let mut values = self.rounded(layer)?;
        add_term(self.corrections, layer, changed, &mut values)?;
        Ok(Some(layer.stored(values)))
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::quantize::correction::CorrectedLayer;
    use crate::store::DType;

    fn corrections(rows: usize, size: usize, rank: usize, dtype: DType) -> Corrections {
        let layers = [("a.weight".to_owned(), CorrectedLayer { sizes: [rows, size], dtype })].into();
        Corrections { rank, uses_samples: true, layers, notes: Vec::new() }
    }

    /// The upper triangle of the second moments of inputs `[n, size]`.
    fn products(inputs: &[f32], size: usize) -> Vec<f32> {
        let mut products = vec![0f32; size * size];
        crate::kernel::gram::add(inputs, size, &mut products);
        products
    }

    /// Sum of squares of the outputs of a matrix `[rows, size]` for inputs `[n, size]`, by input.
    fn outputs(matrix: &[f32], inputs: &[f32], size: usize) -> Vec<f64> {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        inputs.chunks_exact(size).map(|input| matrix.chunks_exact(size).map(|row| dot(row, input).powi(2)).sum()).collect()
    }

    /// For every input, also for inputs that are not samples.
    #[test]
    fn no_output_becomes_worse() {
        let mut random = fastrand::Rng::with_seed(7);
        for (rows, size, samples, dtype) in [(12, 30, 8, DType::F32), (30, 12, 40, DType::F32), (24, 24, 2, DType::BF16)] {
            let mut numbers = |count: usize| (0..count).map(|_| random.f32() * 2.0 - 1.0).collect::<Vec<f32>>();
            let (matrix, inputs, others) = (numbers(rows * size), numbers(samples * size), numbers(50 * size));
            let quantized: Vec<f32> = matrix.iter().map(|x| (x * 2.0).round() / 2.0).collect();
            let corrections = corrections(rows, size, 4, dtype);
            let (factors, error) = correction(&corrections, "a.weight", [&matrix, &quantized], Some(&products(&inputs, size))).unwrap();
            let mut with = quantized.clone();
            let layer = Layer { weight: "a.weight".into(), rows, size, input_major: false };
            add_term(&corrections, &layer, &factors.into_iter().collect(), &mut with).unwrap();
            let missing = |values: &[f32]| matrix.iter().zip(values).map(|(a, b)| a - b).collect::<Vec<f32>>();
            let [before, after] = [&quantized, &with].map(|values| outputs(&missing(values), &others, size));
            let slack = if dtype == DType::F32 { 1.0 + 1e-4 } else { 1.02 };
            assert!(before.iter().zip(&after).all(|(before, after)| *after <= before * slack), "{rows} {size}: {before:?} {after:?}");
            let sum = |matrix: &[f32]| outputs(matrix, &inputs, size).iter().sum::<f64>();
            let all = sum(&matrix);
            for (found, values) in [(error.before, &quantized), (error.after, &with)] {
                assert!((found - sum(&missing(values)) / all).abs() < 1e-4, "{found}");
            }
        }
    }
}

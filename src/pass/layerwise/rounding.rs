//! Quantization with calibration samples: round to nearest with weighted errors, or GPTQ, in which later
//! columns compensate for the error (`kernel/compensation.rs`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::correction::{CompensatedSolver, reorder, restore};
use super::rescale::RoundingMode;
use super::{Layer, Layerwise, Method, Moments, MomentsRequest, Rescale, Strength, Summary};
use crate::error::{Error, Result};
use crate::kernel::column_solver::{ColumnSolver, Grid, Range, Zeros};
use crate::kernel::convert;
use crate::kernel::grid::{IntegerGrid, QuantizationParams};
use crate::model::Model;
use crate::pass::quantize::{Method as By, Quantize};
use crate::pass::{Context, Pass, WeightObserver};
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, Codes, Granularity, Pattern, QuantizationSpec, Scales, Weight};

/// Rounding algorithm.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    /// Round to nearest.
    Nearest,
    /// Round to nearest after compensating for the errors of previous columns.
    Gptq {
        /// Damping of the Hessian diagonal, as a fraction of its mean.
        damping: f64,
        /// Whether columns with large inputs come first. Groups remain those of the stored order.
        ordered: bool,
    },
}

/// Configuration of the quantization of a model.
struct Quantization<'a> {
    name: &'static str,
    options: &'a Value,
    encodings: &'a BTreeMap<String, QuantizationSpec>,
    rule: Rule,
    /// Whether scales minimize the error, instead of covering the largest values.
    search: bool,
    /// Rescaling before rounding.
    strength: Option<Strength>,
    /// Weights to leave unchanged.
    ignored: Vec<Pattern>,
}

/// Quantizes weights of a model using calibration samples. Returns details for the report.
pub(in crate::pass) fn quantize(
    pass: &Quantize,
    encodings: &BTreeMap<String, QuantizationSpec>,
    model: &mut Model,
    run: &RunState,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let options = pass.options();
    let rule = if pass.method == By::Gptq { Rule::Gptq { damping: pass.damping(), ordered: pass.ordered() } } else { Rule::Nearest };
    let strength = match pass.method {
        By::Awq => Some(Strength::Awq),
        By::Smoothquant => Some(Strength::Smooth),
        _ => None,
    };
    let quantization = Quantization {
        name: pass.name(),
        options: &options,
        encodings,
        rule,
        search: pass.observer() == WeightObserver::Mse,
        strength,
        ignored: pass.ignore.clone(),
    };
    let summary = quantization.run(model, run, context, &mut applied.notes)?;
    applied.tensors.extend(summary.changed);
    let mut details = Map::new();
    details.insert("samples".into(), json!(summary.samples));
    if strength.is_some() {
        details.insert("rescaled".into(), json!(summary.rescaled));
        if !summary.skipped.is_empty() {
            details.insert("not_rescaled".into(), json!(summary.skipped));
        }
        if summary.rescaled == 0 {
            applied.notes.push("no channels were rescaled, because no layers support it or none gain by it".into());
        }
    }
    Ok(details)
}

/// Columns that are rounded before the error is propagated to the remaining columns.
const BLOCK: usize = 128;
/// Smallest range of the scale search, in percent of minmax.
const MIN_RANGE_PERCENT: u32 = 40;
/// Percentage of zeros from which a weight is considered sparse. Zeros of a sparse weight are preserved.
const SPARSE_PERCENT: u64 = 5;

impl Quantization<'_> {
    /// Quantizes the weights of a model. Notes for the report are added to `notes`.
    fn run(&self, model: &mut Model, run: &RunState, context: &Context, notes: &mut Vec<String>) -> Result<Summary> {
        let targets: BTreeSet<&str> = self.encodings.keys().map(String::as_str).collect();
        let rescale = self.strength.map(|strength| {
            let (encodings, range) = (self.encodings.clone(), self.range());
            let round = move |layer: &Layer, weight: &Weight, values: &mut [f32], squares: &[f64], mode: RoundingMode| {
                let order: Vec<usize> = (0..layer.size).collect();
                // A layer without an encoding is not quantized and has no error.
                if let Some(mut grid) = encodings.get(&layer.weight).and_then(|affine| grid(layer, weight, affine, &order).ok()) {
                    grid.fit(values, &costs(squares), if mode == RoundingMode::Exact { range } else { Range::MinMax });
                    grid.round(values);
                }
            };
            let activations = self.encodings.values().next().map_or(ActivationScheme::None, |affine| affine.activations);
            let groups = self.encodings.iter().filter_map(|(name, affine)| match affine.granularity {
                Granularity::Group(size) => Some((name.clone(), size)),
                _ => None,
            });
            Rescale { strength, activations, groups: groups.collect(), ignored: self.ignored.clone(), round: Box::new(round) }
        });
        let compensates = self.rule != Rule::Nearest;
        let requested = MomentsRequest { products: compensates, original: compensates, ..MomentsRequest::default() };
        let work = Layerwise { name: self.name, options: self.options, context, targets: &targets, requested, rescale, whole_block: false };
        let mut method = Rounder { quantization: self, notes, costs: Vec::new(), order: Vec::new(), solver: None };
        work.run(model, run, &mut method)
    }

    fn range(&self) -> Range {
        if self.search { Range::MinError(MIN_RANGE_PERCENT) } else { Range::MinMax }
    }
}

/// Error weights of columns, proportional to their mean squares plus a small constant.
pub(super) fn costs(squares: &[f64]) -> Vec<f32> {
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    let least = if mean > 0.0 { 1e-3 } else { 1.0 };
    squares.iter().map(|square| (square / mean.max(f64::MIN_POSITIVE) + least) as f32).collect()
}

/// The quantization grids of a layer, with columns in the given order.
fn grid<'o>(layer: &Layer, weight: &Weight, affine: &QuantizationSpec, order: &'o [usize]) -> Result<Grid<'o, impl Fn(f64) -> f32 + Sync + use<'o>>> {
    let group = match affine.granularity {
        Granularity::Channel => Some(layer.size),
        Granularity::Group(size) => Some(size),
        Granularity::Tensor | Granularity::Block(_) => None,
    };
    let (Codes::Integer(bits), Some(group), false) = (affine.codes, group, layer.input_major) else {
        return Err(Error::tensor(
            &layer.weight,
            format!("cannot be quantized with calibration samples to {} of {:?} in shape {:?}", affine.codes, affine.granularity, weight.shape),
            "use `method: rtn`, or add it to `ignore`",
        ));
    };
    let dtype = affine.scale_dtype;
    let store = move |exact| convert::scale(dtype, exact);
    Ok(Grid { integers: IntegerGrid { bits: bits.into(), symmetric: affine.symmetric }, group, steps: Vec::new(), order, store })
}

/// Rounds layer by layer.
struct Rounder<'a, 'n> {
    quantization: &'a Quantization<'a>,
    notes: &'n mut Vec<String>,
    costs: Vec<f32>,
    order: Vec<usize>,
    solver: Option<CompensatedSolver>,
}

impl Rounder<'_, '_> {
    fn affine(&self, layer: &Layer) -> Result<&QuantizationSpec> {
        self.quantization.encodings.get(&layer.weight).ok_or_else(|| Error::tensor(&layer.weight, "has no encoding", "add it to `ignore`"))
    }
}

impl Method for Rounder<'_, '_> {
    fn check(&self, layer: &Layer, weight: &Weight) -> Result<()> {
        self.affine(layer).and_then(|affine| grid(layer, weight, affine, &[])).map(|_| ())
    }

    fn read(&mut self, value: &str, moments: Moments) -> Result<()> {
        self.costs = costs(&moments.squares);
        self.order = (0..moments.size).collect();
        self.solver = None;
        if let Rule::Gptq { damping, ordered } = self.quantization.rule {
            if ordered {
                self.order.sort_by(|a, b| moments.squares[*b].total_cmp(&moments.squares[*a]).then(a.cmp(b)));
            }
            let solver = CompensatedSolver::new(value, moments, &self.order, damping, self.notes)?;
            // Errors are weighted after compensation by later columns.
            self.order.iter().zip(solver.compensation.costs()).for_each(|(column, cost)| self.costs[*column] = *cost);
            self.solver = Some(solver);
        }
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let affine = self.affine(layer)?;
        let mut grid = grid(layer, weight, affine, &self.order)?;
        let rows = values.chunks_exact(layer.size.max(1));
        let zeros: Vec<bool> = rows.flat_map(|row| self.order.iter().map(|column| row[*column] == 0.0)).collect();
        let is_sparse = 100 * zeros.iter().filter(|zero| **zero).count() as u64 >= SPARSE_PERCENT * values.len() as u64;
        if let Some(solver) = &self.solver {
            solver.correct(values);
        }
        grid.fit(values, &self.costs, self.quantization.range());
        let mut choices = ColumnSolver::new(Zeros::None, Some(grid));
        if is_sparse {
            choices.zeroed = zeros;
        }
        if let Some(solver) = &self.solver {
            reorder(values, &self.order);
            solver.compensation.apply(values, BLOCK, &mut choices);
            restore(values, &self.order);
        }
        let Some(grid) = choices.grid.take() else { return Err(Error::tensor(&layer.weight, "has no grid", "")) };
        if self.solver.is_none() {
            grid.round(values);
        }
        let integers = grid.integers_of(values);
        let (scales, zero_points) = grid.steps.iter().map(|QuantizationParams { scale, zero }| (*scale, *zero)).unzip();
        let new = weight.quantized(&layer.weight, affine.clone(), integers, &Scales { run: grid.group, scales, zero_points, global_scale: 1.0 })?;
        Ok(vec![(layer.weight.clone(), new)])
    }

    fn notes(&mut self) -> &mut Vec<String> {
        self.notes
    }
}

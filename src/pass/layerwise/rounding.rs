//! Quantization with calibration samples: round to nearest with weighted errors, or GPTQ, in which later
//! columns compensate for the error (`kernel/compensation.rs`). The scales of blocks of GGUF files are those
//! of the encoder of their type; the methods choose the codes.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::autoround::{TrainedLayer, Training};
use super::compensated::{Attempt, Choosing, Chosen, Compensating, Prepared};
use super::corrections::{add_term, correction, correction_bytes, describe};
use super::divided_rows::DividedRows;
use super::guide::{Guidance, Guide};
use super::held_out::LayerChoice;
use super::layer_format::LayerFormat;
use super::output_feedback::OutputFeedback;
use super::output_moments;
use super::parallel::floats;
use super::preserved_zeros::{is_sparse, preserved_zeros};
use super::rescale::RoundingMode;
use super::row_scales::RowScales;
use super::solver::{Correction, Part, Steps};
use super::{Flow, Layer, Layerwise, Method, MethodReport, ModifiedBlock, Moments, MomentsRequest, Readers, Rescale, Strength, Summary};
use crate::error::{Error, Result};
use crate::kernel::column_solver::{ColumnSolver, Range, Zeros};
use crate::model::Model;
use crate::pass::quantize::{self, Corrections, Formats, Method as By, Quantize};
use crate::pass::{Context, Pass, WeightObserver};
use crate::run_state::Applied;
use crate::store::{ActivationScheme, Granularity, Pattern, QuantizationSpec, Weight};
use crate::train::Team;
use crate::work::Meter;

/// Configuration of the quantization of a model.
pub(super) struct Quantization<'a> {
    name: &'static str,
    formats: Formats<'a>,
    /// Global scales of weights that have one.
    global_scales: BTreeMap<String, f32>,
    /// The options of GPTQ; `None` to round to nearest.
    gptq: Option<Choosing>,
    /// The options of trained rounding, which starts from the result of GPTQ.
    training: Option<Training>,
    guidance: Guidance,
    /// The gradients of the loss, once they are computed.
    guide: OnceCell<Rc<Guide>>,
    /// Weights whose outputs have no gradients, which the guide does not affect.
    without_gradients: RefCell<BTreeSet<String>>,
    pass: &'a Quantize,
    /// Rescaling before rounding.
    strength: Option<Strength>,
    /// Weights to leave unchanged.
    ignored: Vec<Pattern>,
    /// Low-rank corrections of the rounded layers.
    corrections: Option<&'a Corrections>,
}

/// How the method of a pass rescales channels before rounding.
fn strength(pass: &Quantize) -> Option<Strength> {
    match pass.method {
        By::Awq => Some(Strength::Awq),
        By::Smoothquant => Some(Strength::Smooth),
        By::Rtn | By::Gptq | By::Autoround | By::Best => None,
    }
}

/// Rescales channels of a model as the method of the pass does, without rounding weights. Returns details for
/// the report.
pub(in crate::pass) fn rescale(
    pass: &Quantize,
    encodings: &BTreeMap<String, QuantizationSpec>,
    model: &mut Model,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let rounding = Quantization::rounding(pass, Formats::Schemes(encodings), model, &applied.meter)?;
    let quantization = Quantization { strength: strength(pass), ignored: pass.ignore.clone(), ..rounding };
    // The checkpoints of the pass are those of rounded blocks.
    let context = Context { checkpoints: None, device: context.device.clone(), memory_tracker: context.memory_tracker.clone(), ..*context };
    let mut unrounded = Unrounded { quantization: &quantization, report: MethodReport::default() };
    let summary = quantization.run(model, &context, &mut unrounded)?;
    let mut details = Map::new();
    describe_rescaling(&summary, &mut details, applied);
    applied.tensors.extend(summary.changed);
    applied.notes.extend(summary.report.notes);
    Ok(details)
}

/// Adds the rescaled channels to the report.
fn describe_rescaling(summary: &Summary, details: &mut Map<String, Value>, applied: &mut Applied) {
    details.insert("rescaled".into(), json!(summary.rescaled));
    if !summary.skipped.is_empty() {
        details.insert("not_rescaled".into(), json!(summary.skipped));
    }
    if summary.rescaled == 0 {
        applied.notes.push("no channels were rescaled, because no layers support it or none gain by it".into());
    }
}

/// Quantizes weights of a model using calibration samples. Returns details for the report. If activations
/// have static scales, channels were [rescaled](rescale) before.
pub(in crate::pass) fn quantize(
    pass: &Quantize,
    (formats, corrections): (Formats, Option<&Corrections>),
    model: &mut Model,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let training = (pass.method == By::Autoround).then(|| Training { iterations: pass.iterations(), batch: pass.batch(), rate: RATE });
    let gptq = matches!(pass.method, By::Gptq | By::Autoround).then(|| Choosing {
        name: GPTQ,
        ordered: pass.ordered(),
        damping: pass.damping,
        propagation: pass.propagation.map(|fraction| fraction as f32),
        sweeps: pass.sweeps(),
        keeps_products: corrections.is_some_and(|corrections| corrections.uses_samples),
    });
    let strength = strength(pass).filter(|_| !pass.stores_scales());
    let rounding = Quantization::rounding(pass, formats, model, &applied.meter)?;
    let guidance = if pass.guide == quantize::Guide::Loss { Guidance::Outputs } else { Guidance::None };
    let quantization = Quantization { gptq, training, guidance, strength, ignored: pass.ignore.clone(), corrections, ..rounding };
    let inputs = Inputs::Nearest { squares: Vec::new(), products: Vec::new() };
    let mut rounder = Rounder { quantization: &quantization, inputs, trained: Vec::new(), rows: None, report: MethodReport::default() };
    let summary = quantization.run(model, context, &mut rounder)?;
    let mut details = Map::new();
    if strength.is_some() {
        describe_rescaling(&summary, &mut details, applied);
    }
    applied.tensors.extend(summary.changed);
    // Rescaling before may have added the same note.
    for note in summary.report.notes {
        if !applied.notes.contains(&note) {
            applied.notes.push(note);
        }
    }
    details.insert("samples".into(), json!(summary.samples));
    let requested = if training.is_some() { AUTOROUND } else { GPTQ };
    LayerChoice::describe(&summary.report.choices, (pass.name(), requested), &mut details, &mut applied.notes);
    if let Some(corrections) = corrections {
        describe(corrections, &summary.report.corrections, &mut details);
    }
    Ok(details)
}

/// Learning rate of trained rounding. From the result of GPTQ, larger steps first destroy its compensation.
const RATE: f32 = 0.5;
/// Name of trained rounding in the report.
const AUTOROUND: &str = "autoround";
/// Name of the solution with compensation in the report.
const GPTQ: &str = "gptq";
/// Columns that are rounded before the error is propagated to the remaining columns.
const BLOCK: usize = 128;
/// Smallest range of the scale search, in percent of minmax.
const MIN_RANGE_PERCENT: u32 = 40;

impl<'a> Quantization<'a> {
    /// Rounds to nearest, without the other options of the pass.
    pub fn rounding(pass: &'a Quantize, formats: Formats<'a>, model: &Model, meter: &Meter) -> Result<Quantization<'a>> {
        let encodings = schemes(formats);
        let groups = encodings.into_iter().flat_map(|encodings| pass.scale_groups(encodings, model));
        let float = |name: &String| encodings?.get(name)?.codes.float();
        let groups = groups.filter_map(|(name, group)| float(&name).map(|format| (name, group, format)));
        let global_scales = groups.map(|(name, group, format)| Ok((name, group.global_scale(format, meter)?))).collect::<Result<_>>()?;
        let (name, ignored) = (pass.name(), Vec::new());
        let (guidance, guide, without_gradients) = (Guidance::None, OnceCell::new(), RefCell::default());
        Ok(Quantization {
            name,
            formats,
            global_scales,
            gptq: None,
            training: None,
            guidance,
            guide,
            without_gradients,
            pass,
            strength: None,
            ignored,
            corrections: None,
        })
    }
}

impl Quantization<'_> {
    /// Rescales channels and applies a method to the layers of a model.
    fn run(&self, model: &mut Model, context: &Context, method: &mut dyn Method) -> Result<Summary> {
        let targets: BTreeSet<&str> = self.formats.names();
        let rescale = self.strength.zip(schemes(self.formats)).map(|(strength, encodings)| {
            let (specs, global_scales, pass) = (encodings.clone(), self.global_scales.clone(), self.pass.clone());
            let round = move |layer: &Layer, values: &mut [f32], squares: &[f64], mode: RoundingMode| {
                // A layer without an encoding is not quantized and has no error.
                let Some(spec) = specs.get(&layer.weight) else { return };
                let range = if mode == RoundingMode::Exact { range(&pass, spec) } else { Range::MinMax };
                let format = LayerFormat::from_scheme(layer, spec, global_scale(&global_scales, layer), range);
                format.and_then(|format| format.nearest(values, squares)).ok();
            };
            let activations = encodings.values().next().map_or(ActivationScheme::None, |affine| affine.activations);
            let groups = encodings.iter().filter_map(|(name, affine)| match affine.granularity {
                Granularity::Group(size) => Some((name.clone(), size)),
                _ => None,
            });
            Rescale { strength, activations, groups: groups.collect(), ignored: self.ignored.clone(), round: Box::new(round) }
        });
        let mut requested = self.gptq.map_or_else(MomentsRequest::default, |choosing| choosing.request());
        requested.products |= self.corrections.is_some_and(|corrections| corrections.uses_samples);
        let flow = Flow { refined: self.training.is_some(), guidance: self.guidance, ..Flow::default() };
        let work = Layerwise { name: self.name, context, targets: &targets, requested, rescale, flow };
        work.run(model, method)
    }

    fn sweeps(&self) -> usize {
        self.gptq.map_or(0, |options| options.sweeps)
    }
}

/// The schemes of weights that are not quantized to blocks.
fn schemes(formats: Formats<'_>) -> Option<&BTreeMap<String, QuantizationSpec>> {
    if let Formats::Schemes(schemes) = formats { Some(schemes) } else { None }
}

/// How scales are chosen: with the least error, or covering the largest values.
fn range(pass: &Quantize, affine: &QuantizationSpec) -> Range {
    if pass.observer(affine.codes) == WeightObserver::Mse { Range::MinError(MIN_RANGE_PERCENT) } else { Range::MinMax }
}

/// The global scale of a layer's weight; 1 if it has none.
fn global_scale(global_scales: &BTreeMap<String, f32>, layer: &Layer) -> f32 {
    global_scales.get(&layer.weight).copied().unwrap_or(1.0)
}

/// The inputs of the next layers.
enum Inputs {
    /// Sums of squares of columns, to round to nearest, and the sums of products if they are collected.
    Nearest {
        squares: Vec<f64>,
        products: Vec<f32>,
    },
    Gptq(Chosen),
}

impl Inputs {
    /// The values of a weight that rounding approximates.
    fn target(&self, layer: &Layer, values: &[f32]) -> Result<Vec<f32>> {
        match self {
            Inputs::Nearest { .. } => Ok(values.to_vec()),
            Inputs::Gptq(chosen) => chosen.target(layer, values),
        }
    }

    /// The upper triangle of the sums of products; empty if it was not collected.
    fn products(&self) -> &[f32] {
        match self {
            Inputs::Nearest { products, .. } => products,
            Inputs::Gptq(chosen) => &chosen.products,
        }
    }
}

/// Rounds layer by layer.
struct Rounder<'a> {
    quantization: &'a Quantization<'a>,
    inputs: Inputs,
    /// Layers of the current block to train.
    trained: Vec<TrainedLayer>,
    /// The ranks that round rows of each of the next layers.
    rows: Option<DividedRows>,
    report: MethodReport,
}

/// Leaves weights unrounded.
struct Unrounded<'a> {
    quantization: &'a Quantization<'a>,
    report: MethodReport,
}

impl Method for Unrounded<'_> {
    fn check(&self, layer: &Layer) -> Result<()> {
        self.quantization.format(layer).map(drop)
    }

    fn read(&mut self, _value: &str, _moments: Moments, _readers: &Readers) -> Result<()> {
        Ok(())
    }

    fn change(&mut self, _layer: &Layer, _weight: &Weight, _values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        Ok(Vec::new())
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

impl Quantization<'_> {
    /// The format of a layer's weight.
    pub fn format(&self, layer: &Layer) -> Result<LayerFormat> {
        let missing = || Error::tensor(&layer.weight, "has no format", "add it to `ignore`");
        match self.formats {
            Formats::Schemes(encodings) => {
                let spec = encodings.get(&layer.weight).ok_or_else(missing)?;
                LayerFormat::from_scheme(layer, spec, global_scale(&self.global_scales, layer), range(self.pass, spec))
            }
            Formats::Blocks(blocks) => LayerFormat::from_blocks(layer, *blocks.get(&layer.weight).ok_or_else(missing)?),
        }
    }

    /// Rounds a weight `[rows, size]`.
    fn round(&self, format: &LayerFormat, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<RowScales> {
        let size = prepared.order.len();
        let (Some(solver), Attempt::Compensated(correction)) = (&prepared.solver, attempt) else {
            return format.nearest(values, &prepared.squares);
        };
        // Targets that compensate for other rows have no zeros to preserve.
        if let Some(feedback) = correction.feedback.clone().filter(|_| !format.has_zero() || !is_sparse(values)) {
            if let Some((change, fractions)) = correction.used() {
                change.add_to(values, &fractions)?;
            }
            return feedback.round(values, size, |rows| {
                let parts = vec![Part { rows: rows.len() / size.max(1), fraction: 0.0 }];
                self.round(format, rows, prepared, Attempt::Compensated(Correction { parts, change: None, feedback: None }))
            });
        }
        let order = &prepared.order;
        let zeros = if format.has_zero() { preserved_zeros(values, size, &correction.parts) } else { Vec::new() };
        // Errors are weighted after compensation by later columns.
        let mut costs = vec![0f32; size];
        order.iter().zip(solver.costs()).for_each(|(column, cost)| costs[*column] = *cost);
        let mut scales = RowScales::default();
        let rule = |values: &[f32]| {
            scales = format.fit(values, &costs);
            let mut choices = ColumnSolver::new(Zeros::None, Some(format.grid(&scales, order)));
            choices.zeroed = zeros.chunks(size.max(1)).flat_map(|row| order.iter().map(|column| row[*column])).collect();
            choices
        };
        let solved = solver.solve(values, order, correction, Steps { block: BLOCK, frozen: &zeros, sweeps: self.sweeps() }, rule)?;
        match solved.grid {
            Some(grid) => format.finish(values, grid, scales),
            None => Ok(scales),
        }
    }
}

impl Compensating for Quantization<'_> {
    fn plain(&self) -> &'static [&'static str] {
        match self.formats {
            Formats::Schemes(_) => &["rtn"],
            Formats::Blocks(_) => &["importance"],
        }
    }

    /// Layers with the same format, unless errors are compensated between rows.
    fn can_stack(&self, layers: [&Layer; 2]) -> bool {
        let [Ok(one), Ok(other)] = layers.map(|layer| self.format(layer)) else { return false };
        self.guidance != Guidance::Outputs && one.can_stack(&other)
    }

    fn feedback(&self, layer: &Layer, step: usize) -> Result<Option<Rc<OutputFeedback>>> {
        let Some(moments) = self.guide.get().map(|guide| guide.moments(&layer.weight)).transpose()?.flatten() else { return Ok(None) };
        if moments.is_zero() {
            self.without_gradients.borrow_mut().insert(layer.weight.clone());
            return Ok(None);
        }
        let feedback = OutputFeedback::new(&moments, step).map(|feedback| Some(Rc::new(feedback)));
        feedback.ok_or_else(|| {
            let reason = format!("the second moments of the gradients of the outputs of `{}` are not positive definite", layer.weight);
            Error::run("guide: loss", reason, "use other or more calibration samples, or remove `guide`")
        })
    }

    fn solve(&self, layer: &Layer, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<()> {
        self.round(&self.format(layer)?, values, prepared, attempt).map(drop)
    }
}

impl Method for Rounder<'_> {
    fn check(&self, layer: &Layer) -> Result<()> {
        self.quantization.format(layer).map(drop)
    }

    fn guided(&mut self, guide: &Rc<Guide>) {
        self.quantization.guide.get_or_init(|| guide.clone());
    }

    fn bytes(&self, layer: &Layer) -> usize {
        // Sweeps also hold the targets, the gradients, and a full set of second moments. Blocks are decoded
        // twice to find their parameters.
        let decoded = if matches!(self.quantization.formats, Formats::Blocks(_)) { 8 * layer.rows * layer.size } else { 0 };
        let rounding = if self.quantization.sweeps() > 0 { 24 * layer.rows * layer.size + 4 * layer.size * layer.size } else { 16 * layer.rows * layer.size };
        let feedback = if self.quantization.guidance == Guidance::Outputs { 4 * layer.rows * layer.size + 3 * output_moments::bytes(layer.rows) } else { 0 };
        (rounding + decoded + feedback).max(self.quantization.corrections.map_or(0, |_| correction_bytes([layer.rows, layer.size])))
    }

    fn read(&mut self, value: &str, moments: Moments, readers: &Readers) -> Result<()> {
        // The previous solver may occupy much of a GPU's memory.
        self.inputs = Inputs::Nearest { squares: Vec::new(), products: Vec::new() };
        self.inputs = match self.quantization.gptq {
            Some(choosing) => Inputs::Gptq(choosing.run(value, moments, readers, self.quantization, &mut self.report)?),
            None => Inputs::Nearest { squares: moments.squares, products: moments.products },
        };
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let original = self.quantization.training.map(|_| values.to_vec());
        let corrections = self.quantization.corrections.filter(|corrections| corrections.layers.contains_key(&layer.weight));
        let target = corrections.map(|_| self.inputs.target(layer, values)).transpose()?;
        let format = self.quantization.format(layer)?;
        let round = |layer: &Layer, values: &mut [f32]| match &self.inputs {
            Inputs::Nearest { squares, .. } => format.nearest(values, squares),
            Inputs::Gptq(chosen) => self.quantization.round(&format, values, &chosen.prepared, chosen.attempt(layer, values, self.quantization)?),
        };
        let scales = match &self.rows {
            // Zeros are preserved by their fraction in the complete layer.
            Some(rows) if !format.has_zero() || rows.none(layer, values, is_sparse) => rows.round(layer, values, round)?,
            _ => round(layer, values)?,
        };
        self.report.without_gradients.append(&mut self.quantization.without_gradients.borrow_mut());
        if let Some(original) = original {
            self.trained.push(TrainedLayer::new(layer, weight, &format, original, values, &scales));
        }
        let new = format.weight(weight, values, scales)?;
        let mut changed = Vec::with_capacity(3);
        if let (Some(corrections), Some(target)) = (corrections, target) {
            let (factors, error) = correction(corrections, &layer.weight, [&target, &new.floats(&layer.weight)?], Some(self.inputs.products()))?;
            self.report.corrections.push(error);
            changed.extend(factors);
        }
        changed.push((layer.weight.clone(), new));
        Ok(changed)
    }

    fn values(&self, layer: &Layer, changed: &BTreeMap<String, Weight>) -> Result<Option<Vec<f32>>> {
        let Some(weight) = changed.get(&layer.weight) else { return Ok(None) };
        let mut values = floats(weight, &layer.weight)?;
        if let Some(corrections) = self.quantization.corrections {
            add_term(corrections, layer, changed, &mut values)?;
        }
        Ok(Some(values))
    }

    fn divide_rows(&mut self, team: Option<&Rc<Team>>) -> bool {
        // Rows that compensate for the errors of others are rounded in sequence.
        let team = team.filter(|_| self.quantization.guidance != Guidance::Outputs);
        self.rows = team.map(DividedRows::new);
        self.rows.is_some()
    }

    fn refine(&mut self, block: &mut ModifiedBlock) -> Result<Vec<(String, Weight)>> {
        let mut layers = std::mem::take(&mut self.trained);
        let Some(training) = self.quantization.training.filter(|_| !layers.is_empty()) else { return Ok(Vec::new()) };
        let trained = training.run(&mut layers, block)?;
        for choice in &mut self.report.choices {
            if trained.weights.iter().any(|(name, _)| *name == choice.weight) {
                *choice = LayerChoice { choice: AUTOROUND.to_owned(), relative_error: trained.relative_error, ..choice.clone() };
            }
        }
        Ok(trained.weights)
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

//! Static quantization: int8 weights, and int8 activations with scales found on calibration samples.
//!
//! First, batch normalizations are folded. Then the model runs on the samples once, in floats, to collect
//! histograms of all values to be quantized. Afterwards, scales are migrated from activations to weights
//! where that is free at run time ([`scaling`]), ranges are chosen, weights are rounded, and biases are
//! corrected for the mean rounding error. The quantized values are those for which runtimes have integer
//! kernels ([`sites`]).
//!
//! ```yaml
//! data:
//!   calibration: { text: sentences.txt, samples: 128 }
//! passes:
//!   - quantize-static: { observer: mse }
//! ```

mod bodies;
mod constants;
mod factors;
mod fit;
mod fold;
mod forecast;
mod goal;
mod observe;
mod prepare;
mod relu6_limit;
mod saturation;
mod scaling;
mod sensitivity;
mod sites;
mod unreached;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::channel_equalization;
use super::{Context, GranularityKind, Pass, Plan, Samples, WeightObserver, options_of};
use crate::calibration::{ActivationObserver, ValueStatistics};
use crate::error::{Error, ParseError, Result};
use crate::model::Model;
use crate::run_state::{Applied, RunState};
use crate::store::Pattern;
use crate::work::Meter;
use constants::Widened;
pub use goal::Goal;
use observe::Needs;
use prepare::Prepared;
use scaling::Choice;
pub use sensitivity::{Damage, recommend_floats};

/// Target processors of a quantized model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ActivationTarget {
    /// Any x86: weights from -64 to 64, so that sums of two products fit into 16 bits
    Portable,
    /// x86 with VNNI (most since 2019) and GPUs: full int8 range
    #[default]
    Vnni,
    /// ARM: full int8 range, signed activations
    Arm,
}

/// Strength of the migration of scales from activations to weights.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub enum Smooth {
    /// The strength that minimizes the error of each layer. If no layer can absorb the factors and the
    /// gain is large, inserts a multiplication.
    #[default]
    Auto,
    /// The strength that minimizes the error of each layer, without additional operators.
    Free,
    /// No migration.
    None,
    /// A fixed strength from 0 to 1 for all layers.
    Strength(f64),
}

impl FromStr for Smooth {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match (text, text.parse::<f64>()) {
            ("auto", _) => Ok(Smooth::Auto),
            ("free", _) => Ok(Smooth::Free),
            ("none", _) => Ok(Smooth::None),
            (_, Ok(strength)) if (0.0..=1.0).contains(&strength) => Ok(Smooth::Strength(strength)),
            _ => Err(format!("`{text}` is not auto, free, none, or a number from 0 to 1").into()),
        }
    }
}

impl fmt::Display for Smooth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Smooth::Auto => f.write_str("auto"),
            Smooth::Free => f.write_str("free"),
            Smooth::None => f.write_str("none"),
            Smooth::Strength(strength) => write!(f, "{strength}"),
        }
    }
}

impl Serialize for Smooth {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Smooth::Strength(strength) => serializer.serialize_f64(*strength),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for Smooth {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match Value::deserialize(deserializer)? {
            Value::String(text) => text,
            Value::Null => "none".to_owned(),
            other => other.to_string(),
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "cli")]
impl schemars::JsonSchema for Smooth {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Smooth".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "oneOf": [{ "enum": ["auto", "free", "none"] }, { "type": "number", "minimum": 0, "maximum": 1 }] })
    }
}

/// Quantize weights to int8, and activations with scales found on calibration samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct QuantizeStatic {
    /// Method that chooses ranges of activations
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().observer))]
    pub observer: ActivationObserver,
    /// Percentage of values that stay within the range, with `observer: percentile`
    #[cfg_attr(feature = "cli", arg(long, value_name = "PERCENT", default_value_t = Self::default().percentile))]
    pub percentile: f64,
    /// Widen ranges for unseen values, by a factor estimated with two-fold cross-validation over the
    /// samples
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", default_value_t = Self::default().headroom))]
    pub headroom: bool,
    /// Symmetric activations: zero points are zero, except for values that are never negative
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", default_value_t = Self::default().symmetric))]
    pub symmetric: bool,
    /// Granularity of weight scales: tensor or channel
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().granularity))]
    pub granularity: GranularityKind,
    /// Method that chooses ranges of weights
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().weight_observer))]
    pub weight_observer: WeightObserver,
    /// Store embedding tables as int8 too (weights only)
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", default_value_t = Self::default().embeddings))]
    pub embeddings: bool,
    /// Processors to optimize for
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().target))]
    pub target: ActivationTarget,
    /// Strength of the migration of scales from activations to weights: auto, free (without additional
    /// operators), none, or 0 to 1
    #[cfg_attr(feature = "cli", arg(long, value_name = "STRENGTH", default_value_t = Self::default().smooth))]
    pub smooth: Smooth,
    /// Correct biases for the mean error of rounding the weights
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL", default_value_t = Self::default().bias_correction))]
    pub bias_correction: bool,
    /// Required quality, like {max_drop: 0.01} or {min_cosine: 0.99}: sensitive layers stay in floats
    /// until it is met
    #[cfg_attr(feature = "cli", arg(long, value_name = "GOAL"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy_goal: Option<Goal>,
    /// Weights to quantize: names with `*`, or `re:` and a regular expression [default: linear layers and
    /// convolutions]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Weights to leave unchanged; their layers compute in floats
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

impl Default for QuantizeStatic {
    fn default() -> Self {
        Self {
            observer: ActivationObserver::default(),
            percentile: 99.99,
            headroom: false,
            symmetric: false,
            granularity: GranularityKind::Channel,
            weight_observer: WeightObserver::Minmax,
            embeddings: true,
            target: ActivationTarget::default(),
            smooth: Smooth::default(),
            bias_correction: true,
            accuracy_goal: None,
            targets: Vec::new(),
            ignore: Vec::new(),
        }
    }
}

const NAME: &str = "quantize-static";
/// Number of calibration samples below which ranges of activations depend on single samples.
const MIN_SAMPLES: usize = 8;

impl QuantizeStatic {
    /// Prepares the model, collects statistics, and migrates scales. `subsets`: whether models are also
    /// quantized in which some of the layers stay in floats.
    fn analyze_and_rescale(&self, model: Model, subsets: bool, context: &Context) -> Result<(Prepared, BTreeMap<String, ValueStatistics>, Vec<Choice>)> {
        let mut prepared = prepare::prepare(NAME, model, &self.targets, &self.ignore)?;
        let widened = if self.smooth == Smooth::None { Widened::new() } else { constants::widen(&mut prepared)? };
        let mut chains = match self.smooth {
            Smooth::None => Vec::new(),
            _ => channel_equalization::find_chains(&prepared.graph, &prepared.layers),
        };
        if self.smooth == Smooth::Auto {
            factors::insert(&mut prepared, &chains)?;
            chains = channel_equalization::find_chains(&prepared.graph, &prepared.layers);
        }
        let single_images = self.expects_single_images(&prepared, context)?;
        let mut statistics = self.observe(&mut prepared, Needs { single_images, subsets }, context)?;
        let fixed = if let Smooth::Strength(strength) = self.smooth { Some(strength) } else { None };
        let graph = prepared.graph.clone();
        let per_tensor = self.granularity == GranularityKind::Tensor;
        let settings = scaling::Settings { layers: &prepared.layers, per_tensor, fixed, observer: self.observer, percentile: self.percentile };
        let choices = scaling::rescale(&chains, &graph, &mut prepared.model, &mut statistics, settings)?;
        if self.smooth == Smooth::Auto {
            factors::remove_unused(&mut prepared, &choices.iter().map(|choice| choice.name.clone()).collect(), &mut statistics)?;
        }
        constants::narrow(&mut prepared, widened)?;
        self.update_ranges(&mut prepared, &mut statistics, !choices.is_empty(), subsets, context)?;
        Ok((prepared, statistics, choices))
    }

    /// The record of the pass, without details.
    fn record(&self, prepared: &Prepared, layers: &BTreeSet<String>, meter: Arc<Meter>) -> Applied {
        let notes = prepared.notes.iter().cloned().chain(sites::left_in_floats(&prepared.graph, layers)).collect();
        Applied { tensors: layers.clone(), rule: prepared.rule.clone(), meter, notes, ..Applied::new(NAME, self.options()) }
    }

    /// Quantizes the model with scales found on calibration samples.
    fn quantize(&self, model: &Model, context: &Context) -> Result<(Model, Applied)> {
        let (prepared, statistics, choices) = self.analyze_and_rescale(model.clone(), self.accuracy_goal.is_some(), context)?;
        let mut layers = prepared.layers.clone();
        let (mut notes, mut goal, mut damages) = (Vec::new(), Value::Null, Vec::new());
        if let Some(requested) = &self.accuracy_goal {
            let outcome = self.reach_goal(requested, model, &prepared, &statistics, context)?;
            notes.push(outcome.note);
            (layers, goal, damages) = (outcome.layers, outcome.table, outcome.damages);
        }
        let meter = Arc::default();
        let quantizers = self.quantizers(&prepared, &layers, Some(&statistics))?;
        let quantized = self.fit(&prepared, &quantizers, &layers, Some(&statistics), &meter)?;
        if let [first, ..] = fit::zero_values(&quantizers, &statistics).as_slice() {
            notes.push(format!("`{first}` is zero for every calibration sample: its scale is meaningless"));
        }
        notes.extend(saturation::notes(self, &prepared, &quantized, &quantizers, &statistics)?);
        let mut applied = self.record(&prepared, &layers, meter);
        applied.notes.extend(notes);
        applied.details = json!({
            "quantized": layers.len(),
            "activations": quantizers.len(),
            "smoothed": choices.iter().map(|c| json!({ "name": c.name, "strength": c.strength, "error": c.gain, "multiplication": c.costly })).collect::<Vec<_>>(),
            "accuracy_goal": goal,
            "sensitivity": damages,
        });
        Ok((quantized, applied))
    }
}

impl Pass for QuantizeStatic {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        if self.granularity == GranularityKind::Group {
            return Err(Error::option(NAME, "`granularity` must be tensor or channel, because integer kernels do not support groups"));
        }
        if !(self.percentile > 50.0 && self.percentile <= 100.0) {
            return Err(Error::option(NAME, format!("`percentile` must be above 50 and at most 100, not {}", self.percentile)));
        }
        self.accuracy_goal.as_ref().map_or(Ok(()), Goal::check)
    }

    fn runs_on(&self) -> Option<Samples> {
        Some(Samples::Calibration)
    }

    fn min_samples(&self) -> usize {
        MIN_SAMPLES
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let meter = Arc::default();
        let prepared = prepare::prepare(NAME, model.clone(), &self.targets, &self.ignore)?;
        let quantizers = self.quantizers(&prepared, &prepared.layers, None)?;
        let planned = self.fit(&prepared, &quantizers, &prepared.layers, None, &meter)?;
        // Which layers are rescaled and which stay in floats depends on the samples.
        let applied = Applied { estimated: true, model_runs: self.model_runs(&prepared)?, ..self.record(&prepared, &prepared.layers, meter) };
        Ok(Plan::new(planned, applied).with_execution(move |context| self.quantize(model, context)))
    }

    fn remedy(&self) -> &'static str {
        "more or other calibration samples, `accuracy_goal`, `granularity: channel`, or `ignore` for the layers that `compress analyze` names"
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::{Device, Tensor};

    use super::*;
    use crate::exec::Inputs;
    use crate::ir::Graph;
    use crate::ir::ops::Op;
    use crate::pass::testing::{self, calibrated, numbers};

    fn outputs(graph: &Graph, model: &Model, inputs: &Inputs) -> BTreeMap<String, Tensor> {
        testing::values(graph, model, inputs, |_| false).unwrap()
    }

    /// Prepares and rescales a model on samples, and checks that its float outputs do not change.
    fn rescaled(model: &Model, inputs: &Inputs, smooth: Smooth) -> (Prepared, Vec<Choice>) {
        let before = outputs(&model.graph().unwrap(), model, inputs);
        let pass = QuantizeStatic { smooth, ..QuantizeStatic::default() };
        let (prepared, _, choices) = calibrated(inputs, |context| pass.analyze_and_rescale(model.clone(), false, context)).unwrap().unwrap();
        let after = outputs(&prepared.graph, &prepared.model, inputs);
        for (name, tensor) in &before {
            let largest: f32 = tensor.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap();
            let distance: f32 = (tensor - &after[name]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap();
            assert!(distance <= 1e-4 * largest.max(1.0), "{} {name} at {smooth}: {distance}", model.path.display());
        }
        (prepared, choices)
    }

    /// Folding, transposing and rescaling, at every strength, do not change the outputs of the float model.
    #[test]
    fn preparation_preserves_outputs() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
        let (mut folded_count, mut rescaled_count, mut clamped_count) = (0, 0, 0);
        for entry in std::fs::read_dir(folder).unwrap() {
            let folder = entry.unwrap().path();
            let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
            let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
            let model = Model::open(&folder).unwrap();
            for smooth in [Smooth::Auto, Smooth::Strength(0.5)] {
                let (prepared, choices) = rescaled(&model, &inputs, smooth);
                folded_count += prepared.notes.len();
                rescaled_count += choices.len();
                let is_clamped =
                    |name: &str| prepared.graph.nodes().iter().any(|n| matches!(n.op, Op::Clip(_)) && prepared.graph.value(n.inputs[0]).name == name);
                clamped_count += choices.iter().filter(|choice| is_clamped(&choice.name)).count();
            }
        }
        assert!(folded_count > 10 && rescaled_count > 30, "{folded_count} models folded, {rescaled_count} chains rescaled");
        assert!(clamped_count > 0, "no chain contains a ReLU6");
    }

    /// One number that multiplies all channels cannot absorb a factor for each of them.
    #[test]
    fn scalars_are_not_rescaled_by_channel() {
        let text = "input x: float[batch, 8]\nparam a.weight: float[8, 8]\nparam scale: float[1]\nparam b.weight: float[8, 8]\n\
            h = Linear{\"input_major\":false}(x, a.weight) -> float[batch, 8]\nm = Mul(h, scale) -> float[batch, 8]\n\
            y = Linear{\"input_major\":false}(m, b.weight) -> float[batch, 8]\noutput y = y\n";
        let values = |name: &str, shape: &[usize]| {
            let uneven = |at: usize| if name == "a.weight" { 4f32.powi((at / 8) as i32 % 4) } else { 1.0 };
            numbers(shape).into_iter().enumerate().map(|(at, value)| (value + 0.1) * uneven(at)).collect::<Vec<_>>()
        };
        let (_folder, model) = testing::model(text, values).unwrap();
        let inputs = Inputs::from([("x".to_owned(), Tensor::from_vec(values("x", &[16, 8]), (16, 8), &Device::Cpu).unwrap())]);
        for smooth in [Smooth::Auto, Smooth::Free, Smooth::Strength(0.5)] {
            rescaled(&model, &inputs, smooth);
        }
    }

    /// Factors that follow from the few samples at hand are not used: the channels have the same
    /// distribution. If the distributions differ, the factors hold for other samples too.
    #[test]
    fn factors_hold_for_other_samples() {
        const WIDTH: usize = 32;
        // Sums of uniform numbers, nearly normally distributed.
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let mut normal = |count: usize| (0..count).map(|_| (0..12).map(|_| uniform()).sum()).collect::<Vec<f32>>();
        let mut choices = |uneven: bool| {
            let text = format!(
                "input x: float[batch, {WIDTH}]\nparam a.weight: float[{WIDTH}, {WIDTH}]\nparam b.weight: float[{WIDTH}, {WIDTH}]\n\
                h = Linear{{\"input_major\":false}}(x, a.weight) -> float[batch, {WIDTH}]\nr = Relu(h) -> float[batch, {WIDTH}]\n\
                y = Linear{{\"input_major\":false}}(r, b.weight) -> float[batch, {WIDTH}]\noutput y = y\n"
            );
            // The second weight compensates for the scales of the channels.
            let scale = |channel: usize| if uneven { 4f32.powi(channel as i32 % 4) } else { 1.0 };
            let factor = |name: &str, at: usize| if name == "a.weight" { scale(at / WIDTH) } else { 1.0 / scale(at % WIDTH) };
            let values = |name: &str, _: &[usize]| normal(WIDTH * WIDTH).into_iter().enumerate().map(|(at, value)| value * factor(name, at)).collect();
            let (_folder, model) = testing::model(&text, values).unwrap();
            let inputs = Inputs::from([("x".to_owned(), Tensor::from_vec(normal(20 * WIDTH), (20, WIDTH), &Device::Cpu).unwrap())]);
            rescaled(&model, &inputs, Smooth::Auto).1
        };
        for _ in 0..4 {
            let even = choices(false);
            assert!(even.is_empty(), "{even:?}");
            assert_eq!(choices(true).len(), 1);
        }
    }

    /// Nine images, one of which has ten times larger values. Large images have ranges of their own; of small
    /// ones, the first and the last one share a group.
    #[test]
    fn only_large_images_have_ranges_of_their_own() {
        const COUNT: usize = 9;
        let range = |height: usize, bright: usize| {
            let text = format!(
                "input x: float[batch, 1, {height}, 128]\nparam a.weight: float[1, 1, 1, 1]\n\
                y = Conv{{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}}(x, a.weight) -> float[batch, 1, {height}, 128]\noutput y = y\n"
            );
            let (_folder, model) = testing::model(&text, |_, _| vec![1.0]).unwrap();
            let pixel = |at: usize| (at * 797 % 2000) as f32 / 1000.0 - 1.0;
            let images = (0..COUNT).flat_map(|image| (0..height * 128).map(move |at| if image == bright { 10.0 * pixel(at) } else { pixel(at) }));
            let images = Tensor::from_vec(images.collect(), (COUNT, 1, height, 128), &Device::Cpu).unwrap();
            let inputs = Inputs::from([("x".to_owned(), images)]);
            let pass = QuantizeStatic { smooth: Smooth::None, ..QuantizeStatic::default() };
            let (_, statistics, _) = calibrated(&inputs, |context| pass.analyze_and_rescale(model.clone(), false, context)).unwrap().unwrap();
            ActivationObserver::Mse.range(&statistics["x"], Some(&[1.0]), 0.0).1
        };
        for (height, share) in [(128, 1.0 / 9.0), (127, 2.0 / 9.0)] {
            let (plain, mixed) = (range(height, COUNT), range(height, COUNT - 1));
            let found = (mixed / plain - 1.0) / 9.0;
            assert!((found - share).abs() < 0.02, "{height}: {found} instead of {share}");
        }
    }

    /// A scalar constant before or after a convolution is expanded to one element per channel only if
    /// rescaling uses it.
    #[test]
    fn constants_absorb_factors() {
        let network = |uneven: f32| {
            let text = "input x: float[batch, 8, 6, 6]\nparam a.weight: float[8, 8, 1, 1]\nparam scale: float[1]\nparam shift: float[1]\nparam b.weight: float[8, 1, 3, 3]\n\
                param gain: float[1]\nparam c.weight: float[4, 8, 1, 1]\n\
                h = Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}(x, a.weight) -> float[batch, 8, 6, 6]\ng = Sigmoid(h) -> float[batch, 8, 6, 6]\n\
                k = Mul(g, h) -> float[batch, 8, 6, 6]\nm = Mul(scale, k) -> float[batch, 8, 6, 6]\ns = Add(m, shift) -> float[batch, 8, 6, 6]\n\
                d = Conv{\"stride\":1,\"padding\":1,\"dilation\":1,\"groups\":8}(s, b.weight) -> float[batch, 8, 6, 6]\nn = Mul(d, gain) -> float[batch, 8, 6, 6]\n\
                t = Tanh(n) -> float[batch, 8, 6, 6]\ny = Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}(t, c.weight) -> float[batch, 4, 6, 6]\noutput y = y\n";
            let values = |name: &str, shape: &[usize]| {
                let row = shape[1..].iter().product::<usize>().max(1);
                let factor = |at: usize| if name == "a.weight" { uneven.powi((at / row) as i32 % 4) } else { 1.0 };
                let all = numbers(shape);
                // Without uneven factors, all channels are equal.
                let index = |at: usize| if uneven == 1.0 { at % row } else { at };
                if shape == [1] { vec![0.7] } else { (0..all.len()).map(|at| factor(at) * all[index(at)]).collect() }
            };
            let (_folder, model) = testing::model(text, values).unwrap();
            let inputs = Inputs::from([("x".to_owned(), Tensor::from_vec(values("x", &[16, 8, 6, 6]), &[16, 8, 6, 6], &Device::Cpu).unwrap())]);
            let (prepared, choices) = rescaled(&model, &inputs, Smooth::Auto);
            let shape = |name: &str| prepared.model.weights.by_name[name].shape.clone();
            (["scale", "shift", "gain"].map(shape), choices.into_iter().map(|choice| choice.name).collect::<Vec<_>>())
        };
        let (shapes, choices) = network(6.0);
        assert_eq!(shapes, [[8, 1, 1]; 3], "{choices:?}");
        assert!(choices.iter().any(|name| name == "m") && choices.iter().any(|name| name == "d"), "{choices:?}");
        let (shapes, choices) = network(1.0);
        assert_eq!(shapes, [[1]; 3].map(Vec::from), "{choices:?}");
    }
}

//! Quantizes linear weights in a named scheme of compressed-tensors.
//!
//! ```yaml
//! passes:
//!   - quantize: { scheme: W4A16, group_size: 128, rules: [{ targets: ["*down_proj*"], scheme: W8A16 }] }
//! ```

mod best;
mod blocks;
pub(in crate::pass) mod correction;
mod formats;
mod kv_cache;
mod rules;
mod scheme;
mod selection;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub use correction::Correction;
pub(in crate::pass) use correction::Corrections;
pub(in crate::pass) use formats::Formats;
pub use kv_cache::KvCache;
use rules::SchemeLayout;
pub use rules::SchemeRule;
pub use scheme::Scheme;
use selection::Layers;

use super::targets;
use super::weight_quantizer::{ScaleGroup, WeightObserver, WeightQuantizer};
use super::{Pass, Plan, Samples, Step, layerwise, options_of};
use crate::arch;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::adapter::factor_names;
use crate::run_state::{Applied, RunState};
use crate::store::{Codes, Pattern, QuantizationSpec};
use crate::work::Meter;

/// Quantization algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Method {
    /// Round to nearest; needs no data
    Rtn,
    /// Quantize column by column; later columns compensate for the error on calibration samples
    Gptq,
    /// Scale up the weights of inputs that are salient on calibration samples, then round to nearest
    Awq,
    /// Migrate scales from activations to weights, then round to nearest; for schemes that quantize both
    Smoothquant,
    /// Train rounding offsets and scales of each block by signed gradient descent, starting from `gptq`
    Autoround,
    /// The method with the smallest error: with calibration samples autoround for integers of two and three
    /// bits, gptq for fewer than eight bits, and smoothquant for W8A8; otherwise rtn
    #[default]
    Best,
}

/// How errors of layers are weighted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Guide {
    /// The errors of all outputs and tokens have the same weight
    #[default]
    None,
    /// By the second moments of the gradients of the loss with respect to the outputs of the layer, found by
    /// backward passes
    Loss,
}

impl Guide {
    fn is_none(&self) -> bool {
        *self == Guide::None
    }
}

impl Method {
    /// Whether the algorithm needs calibration samples.
    fn reads_samples(self) -> bool {
        !matches!(self, Method::Rtn | Method::Best)
    }

    /// Whether the algorithm rescales channels before it rounds weights.
    fn rescales(self) -> bool {
        matches!(self, Method::Awq | Method::Smoothquant)
    }

    /// Whether later columns compensate for the errors of earlier ones.
    fn compensates(self) -> bool {
        matches!(self, Method::Gptq | Method::Autoround)
    }
}

/// Quantize linear weights in a named scheme of compressed-tensors, or to blocks of GGUF files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Quantize {
    /// Quantization scheme of weights and activations
    #[cfg_attr(feature = "cli", arg(long, value_enum, ignore_case = true, default_value_t = Self::default().scheme))]
    pub scheme: Scheme,
    /// Another scheme for some weights, optionally with a group size; the first rule that matches applies
    #[cfg_attr(feature = "cli", arg(long = "rule", value_name = "PATTERN=SCHEME[:SIZE]"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<SchemeRule>,
    /// Quantization algorithm
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().method))]
    pub method: Method,
    /// Consecutive inputs of a row that share a scale: 32, 64, 128 …, or -1 for one scale per row
    /// [default: depends on the scheme]
    #[cfg_attr(feature = "cli", arg(long, value_name = "INPUTS", allow_negative_numbers = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<i64>,
    /// With `method: autoround`, the number of steps per block [default: 200]
    #[cfg_attr(feature = "cli", arg(long, value_name = "STEPS"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iterations: Option<usize>,
    /// With `method: autoround`, the number of samples per step [default: 2]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SAMPLES"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// With `method: gptq` or `autoround`, how the errors of layers are weighted
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().guide))]
    #[serde(skip_serializing_if = "Guide::is_none")]
    pub guide: Guide,
    /// With `method: gptq` or `autoround`, the damping added to the diagonal of the Hessian, as a fraction of
    /// its mean
    /// [default: chosen for each layer input by the error on held-out samples]
    #[cfg_attr(feature = "cli", arg(long, value_name = "FRACTION", value_parser = crate::ratio::parse))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::optional_ratio"))]
    #[serde(deserialize_with = "crate::ratio::optional_ratio", skip_serializing_if = "Option::is_none")]
    pub damping: Option<f64>,
    /// With `method: gptq` or `autoround`, the fraction of the error of earlier layers that is compensated,
    /// from 0 to 1; 0 does not run the original model in parallel [default: chosen for each layer by the
    /// error on held-out samples]
    #[cfg_attr(feature = "cli", arg(long, value_name = "FRACTION", value_parser = crate::ratio::parse))]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::optional_ratio"))]
    #[serde(deserialize_with = "crate::ratio::optional_ratio", skip_serializing_if = "Option::is_none")]
    pub propagation: Option<f64>,
    /// With `method: gptq` or `autoround`, quantize columns with large inputs first; groups remain those of
    /// the stored order [default: true]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordered: Option<bool>,
    /// With `method: gptq` or `autoround`, the maximum number of sweeps of coordinate descent, which improve
    /// the integers and the scales after all columns were quantized; 0 disables them [default: 3]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sweeps: Option<usize>,
    /// Low-rank correction of the quantization error, written as a LoRA adapter in the folder `adapter`:
    /// its rank, or {rank: 32, importance: none} to ignore calibration samples [default: none]
    #[cfg_attr(feature = "cli", arg(long, value_name = "RANK"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correct: Option<Correction>,
    /// Format of the KV cache of a decoder, with scales found on calibration samples: fp8 or int8, with one
    /// scale per layer, or {type: fp8, scales: head} (fp8:head) with one per head [default: floats]
    #[cfg_attr(feature = "cli", arg(long, value_name = "FORMAT[:SCALES]"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCache>,
    /// Method that chooses the range of a scale [default: minmax for eight bits; for
    /// fewer bits l4, or mse with calibration samples]
    #[cfg_attr(feature = "cli", arg(long, value_enum))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observer: Option<WeightObserver>,
    /// Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

const NAME: &str = "quantize";

/// Default number of steps of trained rounding, and of samples per step.
const ITERATIONS: usize = 200;
const BATCH: usize = 2;
/// Default number of sweeps of coordinate descent.
const SWEEPS: usize = 3;

impl Quantize {
    /// The observer of weights with these codes.
    pub(super) fn observer(&self, codes: Codes) -> WeightObserver {
        self.observer.unwrap_or(match self.method {
            Method::Rtn | Method::Best if !codes.is_integer() => WeightObserver::Minmax,
            _ if codes == Codes::INT8 => WeightObserver::Minmax,
            Method::Rtn | Method::Best => WeightObserver::L4,
            _ => WeightObserver::Mse,
        })
    }

    pub(super) fn ordered(&self) -> bool {
        self.ordered.unwrap_or(true)
    }

    /// Maximum number of sweeps of coordinate descent.
    pub(super) fn sweeps(&self) -> usize {
        self.sweeps.unwrap_or(SWEEPS)
    }

    /// Number of steps of trained rounding.
    pub(super) fn iterations(&self) -> usize {
        self.iterations.unwrap_or(ITERATIONS)
    }

    /// Samples per step of trained rounding.
    pub(super) fn batch(&self) -> usize {
        self.batch.unwrap_or(BATCH)
    }

    /// The scheme of weights without a rule.
    fn layout(&self) -> SchemeLayout {
        SchemeLayout { scheme: self.scheme, group_size: self.group_size }
    }

    /// All schemes: that of the pass, and those of the rules.
    fn layouts(&self) -> impl Iterator<Item = SchemeLayout> + '_ {
        std::iter::once(self.layout()).chain(self.rules.iter().map(SchemeRule::layout))
    }

    fn schemes(&self) -> impl Iterator<Item = Scheme> + '_ {
        self.layouts().map(|layout| layout.scheme)
    }

    /// Whether the activations of a scheme have static scales, which need calibration samples.
    pub(super) fn stores_scales(&self) -> bool {
        self.schemes().any(Scheme::stores_scales)
    }

    /// The scheme of a weight.
    fn layout_of(&self, name: &str) -> SchemeLayout {
        let rule = self.rules.iter().find(|rule| rule.targets.iter().any(|pattern| pattern.matches(name)));
        rule.map_or_else(|| self.layout(), SchemeRule::layout)
    }

    /// Rounds weights to nearest while they are written.
    fn round(&self, encodings: &BTreeMap<String, QuantizationSpec>, model: &mut Model, meter: &Arc<Meter>) -> Result<()> {
        let mut groups = self.scale_groups(encodings, model);
        for (name, affine) in encodings {
            let quantizer =
                WeightQuantizer::new(name, model.weights.get(name)?, affine.clone(), self.observer(affine.codes), meter).with_scale_group(groups.remove(name));
            model.weights.by_name.insert(name.clone(), quantizer.weight());
        }
        Ok(())
    }

    /// Groups NVFP4 weights that runtimes fuse and that therefore have a common global scale: layers that
    /// read the same value or, if the graph of the model is not known, layers that the family lists.
    pub(super) fn scale_groups(&self, encodings: &BTreeMap<String, QuantizationSpec>, model: &Model) -> BTreeMap<String, Arc<ScaleGroup>> {
        let mut fused: BTreeMap<String, Vec<&String>> = BTreeMap::new();
        let narrow: Vec<&String> = encodings.iter().filter(|(_, affine)| affine.has_global_scale()).map(|(name, _)| name).collect();
        let inputs = if narrow.is_empty() { BTreeMap::new() } else { model.inputs_of_layers() };
        for name in narrow {
            fused.entry(inputs.get(name).cloned().unwrap_or_else(|| arch::fused_layer(model.config.model_type(), name))).or_default().push(name);
        }
        let group = |names: &Vec<&String>| {
            let codes = names.first().and_then(|name| encodings.get(*name)).map_or(self.scheme.codes(), |affine| affine.codes);
            ScaleGroup::new(names.iter().filter_map(|name| model.weights.by_name.get(*name).cloned()).collect(), self.observer(codes))
        };
        fused.values().flat_map(|names| names.iter().map(|name| (*name).clone()).zip(std::iter::repeat(group(names)))).collect()
    }
}

impl Pass for Quantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        let sized = |layout: SchemeLayout| layout.group_size.or(layout.scheme.group().map(|size| size as i64));
        let group_size = sized(self.layout());
        let rules: Vec<SchemeRule> = self.rules.iter().map(|rule| SchemeRule { group_size: sized(rule.layout()), ..rule.clone() }).collect();
        // The default depends on the codes.
        let observer = self.observer.or_else(|| (rules.is_empty() && !self.has_blocks()).then(|| self.observer(self.scheme.codes())));
        let compensates = self.method.compensates();
        let (ordered, sweeps) = (compensates.then(|| self.ordered()), compensates.then(|| self.sweeps()));
        let trains = self.method == Method::Autoround;
        let (iterations, batch) = (trains.then(|| self.iterations()), trains.then(|| self.batch()));
        options_of(&Quantize { group_size, observer, ordered, sweeps, iterations, batch, rules, ..self.clone() })
    }

    fn check(&self) -> Result<()> {
        self.check_blocks()?;
        if self.rules.iter().any(|rule| rule.targets.is_empty()) {
            return Err(Error::option(format!("{NAME}: rules"), "a rule has no `targets`"));
        }
        self.layouts().try_for_each(SchemeLayout::check)?;
        if self.method.reads_samples() {
            layerwise::require(&format!("{NAME}: method"))?;
            if let Some(scheme) = self.schemes().find(|scheme| !scheme.has_scales_within_rows()) {
                let reason = format!("{} supports only `method: rtn`; the other methods require scales within rows", scheme.name());
                return Err(Error::option(NAME, reason));
            }
        }
        if self.method.rescales()
            && let Some(scheme) = self.schemes().find(|scheme| !scheme.rounds_activations_like(self.scheme))
        {
            let reason =
                format!("`method: awq` and `smoothquant` require the same activations everywhere; {} and {} differ", self.scheme.name(), scheme.name());
            return Err(Error::option(format!("{NAME}: rules"), reason));
        }
        let is_set = [self.damping.is_some(), self.propagation.is_some(), self.ordered.is_some(), self.sweeps.is_some(), !self.guide.is_none()];
        if !self.method.compensates() && is_set.contains(&true) {
            return Err(Error::option(NAME, "`damping`, `propagation`, `ordered`, `sweeps` and `guide` are for `method: gptq` and `autoround`"));
        }
        if self.method != Method::Autoround && (self.iterations.is_some() || self.batch.is_some()) {
            return Err(Error::option(NAME, "`iterations` and `batch` are for `method: autoround`"));
        }
        if let Some((name, _)) = [("iterations", self.iterations), ("batch", self.batch)].into_iter().find(|(_, value)| *value == Some(0)) {
            return Err(Error::option(format!("{NAME}: {name}"), "must be at least 1"));
        }
        if self.damping.is_some_and(|damping| !(damping > 0.0 && damping <= 1.0)) {
            return Err(Error::option(format!("{NAME}: damping"), "must be greater than 0 and at most 1"));
        }
        if self.propagation.is_some_and(|fraction| !(0.0..=1.0).contains(&fraction)) {
            return Err(Error::option(format!("{NAME}: propagation"), "must be from 0 to 1"));
        }
        if self.method == Method::Smoothquant && !self.scheme.rounds_activations() {
            return Err(Error::option(NAME, "`method: smoothquant` requires int8 activations, like W8A8 and W8A8-STATIC: use `awq` or `gptq`"));
        }
        if self.stores_scales() {
            layerwise::require(&format!("{NAME}: scheme"))?;
        }
        if let Some(correction) = self.correct {
            layerwise::require(&format!("{NAME}: correct"))?;
            if correction.rank == 0 {
                return Err(Error::option(format!("{NAME}: correct"), "`rank` must be at least 1"));
            }
            if self.method == Method::Autoround {
                return Err(Error::option(format!("{NAME}: correct"), "is not supported with `method: autoround`; use `gptq`"));
            }
        }
        if self.kv_cache.is_some() {
            layerwise::require(&format!("{NAME}: kv_cache"))?;
        }
        for scheme in self.schemes() {
            let (observer, codes, name) = (self.observer(scheme.codes()), scheme.codes(), scheme.name());
            let reason = match observer {
                WeightObserver::L4 if !codes.is_integer() => format!("`observer: l4` requires an integer scheme; {name} supports minmax and mse"),
                WeightObserver::Mse if !codes.is_integer() && !scheme.has_scales_within_rows() => format!("{name} supports only `observer: minmax`"),
                WeightObserver::L4 if self.method.reads_samples() => {
                    "`observer: l4` requires `method: rtn`; with calibration samples, use mse, which weights errors by the inputs".to_owned()
                }
                _ => continue,
            };
            return Err(Error::option(NAME, reason));
        }
        Ok(())
    }

    fn resolve_defaults(&mut self, model: &Model, sets: &[Samples]) {
        if self.method == Method::Best {
            self.method = self.best_method(model, sets);
        }
        self.group_size = self.group_size.or_else(|| self.common_group_size(model));
        if let Some(correction) = &mut self.correct {
            correction.importance = correction.importance.resolved(sets);
        }
    }

    fn resolve_before(&mut self, model: &Model, sets: &[Samples], later: &[Step]) -> Option<String> {
        let is_default = self.method == Method::Best;
        self.resolve_defaults(model, sets);
        self.lost_codes(model, later, is_default)
    }

    fn runs_on(&self) -> Option<Samples> {
        let calibrates = self.method.reads_samples() || self.stores_scales() || self.kv_cache.is_some() || self.correct.is_some_and(Correction::uses_samples);
        if calibrates { Some(Samples::Calibration) } else { self.correct.map(|_| Samples::None) }
    }

    fn shares_samples(&self) -> bool {
        // Trained rounding runs on single samples.
        matches!(self.method, Method::Gptq | Method::Awq | Method::Smoothquant | Method::Best)
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        if self.has_blocks() {
            return self.plan_blocks(model);
        }
        let Layers { mut encodings, rule, notes } = self.supported_layers(model)?;
        let parameters: u64 = encodings.keys().map(|name| Ok(model.weights.get(name)?.elements() as u64)).sum::<Result<u64>>()?;
        let corrections = self.corrections(&encodings, model)?;
        let tensors: BTreeSet<String> = Formats::Schemes(&encodings).names().into_iter().map(str::to_owned).collect();
        let notes = notes.into_iter().chain(targets::naming_note(NAME, model, &self.targets));
        let notes = notes.chain(corrections.iter().flat_map(|corrections| corrections.notes.iter().cloned().chain([corrections.note()]))).collect();
        let mut applied = Applied { tensors, rule, notes, ..Applied::new(NAME, self.options()) };
        let mut planned = model.clone();
        self.round(&encodings, &mut planned, &applied.meter)?;
        let mut stored = if self.method.reads_samples() { applied.tensors.clone() } else { BTreeSet::new() };
        if let Some(corrections) = &corrections {
            corrections.plan(&mut planned.weights);
            layerwise::declare_corrections(&mut planned)?;
            applied.memory = corrections.layers.values().map(|layer| layerwise::correction_bytes(layer.sizes)).max().unwrap_or(0) as u64;
            let factors = corrections.layers.keys().flat_map(|name| factor_names(name));
            stored.extend(factors.filter(|_| self.method.reads_samples() || corrections.uses_samples));
        }
        if !stored.is_empty() {
            applied.checkpoint_bytes = Some(layerwise::checkpoint_bytes(&stored, &planned.weights));
        }
        applied.details = json!({ "quantized": encodings.len(), "parameters": parameters, "of": model.weights.parameters() });
        if self.runs_on() == Some(Samples::Calibration) {
            applied.model_runs = layerwise::model_runs(self, &applied.tensors, model)?;
        }
        let mut executed = applied.clone();
        let caches = self.kv_cache.map(|cache| layerwise::add_cache_scales(cache.scheme(), &mut planned)).transpose()?;
        caches.iter().for_each(|count| applied.details["caches"] = json!(count));
        let plan = Plan::new(planned, applied);
        if self.runs_on().is_none() {
            return Ok(plan);
        }
        Ok(plan.with_execution(move |context| {
            let mut after = model.clone();
            let mut more = Map::new();
            if self.stores_scales() {
                // Static scales are those of the rescaled inputs.
                if self.method.rescales() {
                    more = layerwise::rescale_channels(self, &encodings, &mut after, context, &mut executed)?;
                }
                executed.notes.extend(layerwise::find_input_scales(NAME, &mut encodings, &after, context)?);
            }
            if self.method.reads_samples() {
                more.extend(layerwise::quantize(self, (Formats::Schemes(&encodings), corrections.as_ref()), &mut after, context, &mut executed)?);
            } else {
                self.round(&encodings, &mut after, &executed.meter)?;
                if let Some(corrections) = &corrections {
                    more.extend(layerwise::correct(NAME, corrections, model, &mut after, context, &mut executed)?);
                }
            }
            executed.details.as_object_mut().into_iter().for_each(|details| details.extend(more.clone()));
            if corrections.is_some() {
                layerwise::declare_corrections(&mut after)?;
            }
            if let Some(cache) = self.kv_cache {
                layerwise::add_calibrated_cache_scales(NAME, cache.scheme(), &mut after, context, &mut executed.notes)?;
            }
            caches.iter().for_each(|count| executed.details["caches"] = json!(count));
            Ok((after, executed))
        }))
    }

    fn remedy(&self) -> &'static str {
        "`method: gptq` or `awq` with calibration data, a smaller `group_size`, `observer: mse`, more bits, or `ignore` for the layers that `compress analyze` names"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Bytes, DType, Encoding, Granularity, Weight, Weights};

    /// Pairs of vLLM's `packed_modules_mapping` for DeepSeek and Qwen3.5.
    #[test]
    fn layers_that_runtimes_fuse_have_the_same_name() {
        let fused = |part: &str| arch::fused_layer("", &format!("model.layers.0.mixer.{part}.weight"));
        for [a, b] in [["q_a_proj", "kv_a_proj_with_mqa"], ["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"], ["q_proj", "v_proj"], ["w1", "w3"]] {
            assert_eq!(fused(a), fused(b));
        }
        assert_ne!(fused("in_proj_qkv"), fused("in_proj_a"));
        assert_ne!(fused("q_a_proj"), fused("q_b_proj"));
        assert_ne!(arch::fused_layer("", "model.layers.0.mixer.w1.weight"), arch::fused_layer("", "model.layers.1.mixer.w1.weight"));
    }

    #[test]
    fn group_sizes_divide_rows_and_are_equal_for_experts() {
        let mut weights = Weights::default();
        for (name, row) in [("a.weight", 256), ("b.weight", 192), ("c.weight", 97), ("m.experts.0.up.weight", 128), ("m.experts.0.down.weight", 96)] {
            let bytes = Bytes { dtype: DType::F16, bytes: vec![0; 2 * row] };
            weights.by_name.insert(name.into(), Weight::new(DType::F16, vec![1, row], Encoding::Dense, Arc::new(bytes)));
        }
        let found = |group_size| {
            let Layers { encodings, notes, .. } = Quantize { group_size, ..Quantize::default() }.layers(&weights).unwrap();
            (encodings.into_values().map(|affine| affine.granularity).collect::<Vec<_>>(), notes.len())
        };
        let group = Granularity::Group;
        assert_eq!(found(None), (vec![group(128), group(64), Granularity::Channel, group(32), group(32)], 3));
        assert_eq!(found(Some(48)), (vec![group(32), group(48), Granularity::Channel, group(32), group(32)], 2));
        assert_eq!(found(Some(-1)), (vec![Granularity::Channel; 5], 0));
    }
}

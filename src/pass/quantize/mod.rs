//! Linear weights in a scheme that consumers know by name.
//!
//! ```yaml
//! passes:
//!   - quantize: { scheme: W4A16, group_size: 128, observer: mse, ignore: ["*down_proj*"] }
//! ```

mod scheme;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use scheme::Scheme;

use super::integers::{Integers, Peers, WeightObserver};
use super::targets::{self, Chosen};
use super::{Context, Pass, Samples, layerwise, options_of};
use crate::error::{Error, Result};
use crate::kernel::cache::CacheFormat;
use crate::model::{self, Model};
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, Affine, Codes, Granularity, Pattern, Weight, Weights};

/// How codes are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Each weight goes to the nearest code; needs no data
    #[default]
    Rtn,
    /// Column by column, and later columns make up for the error on calibration samples
    Gptq,
    /// Inputs that matter on calibration samples are scaled up before weights go to the nearest code
    Awq,
    /// Range goes from activations to weights before weights go to the nearest code, for schemes that round both
    Smoothquant,
}

impl Method {
    /// Whether it looks at calibration samples.
    fn reads_samples(self) -> bool {
        self != Method::Rtn
    }
}

/// Store linear weights in a scheme that consumers know by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Quantize {
    /// What weights and activations become
    #[cfg_attr(feature = "cli", arg(long, value_enum, ignore_case = true, default_value_t = Self::default().scheme))]
    pub scheme: Scheme,
    /// How codes are chosen
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().method))]
    pub method: Method,
    /// Inputs of a row that share a scale: 32, 64, 128 …, or -1 for whole rows [default: by the scheme]
    #[cfg_attr(feature = "cli", arg(long, value_name = "INPUTS", allow_negative_numbers = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<i64>,
    /// With `method: gptq`, what is added to the diagonal of the sums of products, in parts of its mean [default: 0.01]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PART"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub damping: Option<f64>,
    /// With `method: gptq`, columns of large inputs first, each in the group that it is stored in [default: true]
    #[cfg_attr(feature = "cli", arg(long, action = clap::ArgAction::Set, value_name = "BOOL"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordered: Option<bool>,
    /// What keys and values of attention become in the cache of a decoder, by scales found on calibration samples [default: floats]
    #[cfg_attr(feature = "cli", arg(long, value_enum))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<CacheFormat>,
    /// How the range of a scale is chosen [default: for four bits l4, with samples mse; else minmax]
    #[cfg_attr(feature = "cli", arg(long, value_enum))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observer: Option<WeightObserver>,
    /// Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

const NAME: &str = "quantize";

/// Sizes of groups that consumers have kernels for, the largest first.
const USUAL_GROUPS: [usize; 3] = [128, 64, 32];

/// What the pass makes of a model.
struct Layers {
    /// How each chosen weight is encoded.
    encodings: BTreeMap<String, Affine>,
    /// How weights were chosen, in plain words.
    rule: String,
    /// What is not as the scheme says.
    notes: Vec<String>,
}

impl Quantize {
    pub(super) fn observer(&self) -> WeightObserver {
        let codes = self.scheme.codes();
        self.observer.unwrap_or(match self.method {
            _ if !codes.is_integer() || codes.bits() == 8 => WeightObserver::Minmax,
            Method::Rtn => WeightObserver::L4,
            _ => WeightObserver::Mse,
        })
    }

    pub(super) fn damping(&self) -> f64 {
        self.damping.unwrap_or(0.01)
    }

    pub(super) fn ordered(&self) -> bool {
        self.ordered.unwrap_or(true)
    }

    /// Inputs under one scale, where the scheme has groups.
    fn group(&self) -> Option<usize> {
        match self.group_size {
            None => self.scheme.group(),
            Some(size) => usize::try_from(size).ok(),
        }
    }

    /// Chooses weights and how each is encoded. Consumers take one size of groups for all experts of a layer, so experts share theirs.
    fn layers(&self, weights: &Weights) -> Result<Layers> {
        let Chosen { names, rule } = targets::choose(NAME, weights, &self.targets, &self.ignore, model::LINEAR_RULE, model::is_linear)?;
        let mut layers = Layers { encodings: BTreeMap::new(), rule, notes: Vec::new() };
        let mut chosen: Vec<(&str, &Weight)> = Vec::with_capacity(names.len());
        for name in names {
            let weight = weights.get(name)?;
            require_matrix(name, weight)?;
            chosen.push((name, weight));
        }
        let rows_of_experts: Vec<usize> = chosen.iter().filter(|(name, _)| is_expert(name)).map(|(_, weight)| weight.row()).collect();
        let (mut left, mut narrow) = (Vec::new(), Vec::new());
        let mut other: BTreeMap<Granularity, Vec<&str>> = BTreeMap::new();
        for (name, weight) in chosen {
            let own = [weight.row()];
            let rows = if is_expert(name) { &rows_of_experts[..] } else { &own };
            let Some(granularity) = self.granularity(rows) else {
                left.push(name);
                continue;
            };
            if granularity == Granularity::Channel && self.scheme == Scheme::Fp8Block {
                narrow.push(name);
            } else if self.group().is_some_and(|size| granularity != Granularity::Group(size)) {
                other.entry(granularity).or_default().push(name);
            }
            let mut affine = self.scheme.affine(weight, granularity);
            if model::is_embedding(name, weight) {
                if affine.codes == Codes::E2m1 {
                    let reason =
                        format!("`{name}` is an embedding table, and no reader looks up rows of FP4: leave it out with `ignore`, or quantize it to integers");
                    return Err(Error::option(format!("{NAME}: targets"), reason));
                }
                // The input of a table are indices.
                affine.activations = ActivationScheme::None;
            }
            layers.encodings.insert(name.to_owned(), affine);
        }
        layers.notes.extend(other.into_iter().map(|(granularity, names)| {
            let size = self.group().unwrap_or_default();
            let by = if let Granularity::Group(size) = granularity { format!("groups of {size}") } else { "one scale for each row".into() };
            format!("quantize: groups of {size} do not divide the rows of {} weights, which have {by} (the first: `{}`)", names.len(), names[0])
        }));
        let scheme = &self.options()["scheme"];
        for (names, what) in [(left, "the groups of the scheme, and stay as they are"), (narrow, "blocks of 128, and have one scale for each row")] {
            if let Some(first) = names.first() {
                layers.notes.push(format!("quantize {scheme}: the rows of {} weights are no multiples of {what} (the first: `{first}`)", names.len()));
            }
        }
        if layers.encodings.is_empty() {
            return Err(Error::option(NAME, format!("{scheme} can encode none of the weights that are selected ({})", layers.rule)));
        }
        Ok(layers)
    }

    /// The groups that divide all of these rows: those asked for, else the largest that consumers know, else one for each row. Nothing
    /// where the scheme cannot encode them.
    fn granularity(&self, rows: &[usize]) -> Option<Granularity> {
        let Some(size) = self.group() else { return self.scheme.granularity(rows) };
        let smaller = USUAL_GROUPS.into_iter().filter(|usual| *usual < size);
        let divides = |size: &usize| rows.iter().all(|row| row.is_multiple_of(*size));
        Some(std::iter::once(size).chain(smaller).find(divides).map_or(Granularity::Channel, Granularity::Group))
    }

    /// For each NVFP4 weight, those that consumers fuse with it, which have one global scale: layers that read one value, or where it is
    /// not known what the model computes, those of usual names.
    fn peers(encodings: &BTreeMap<String, Affine>, model: &Model) -> BTreeMap<String, Arc<Peers>> {
        let mut fused: BTreeMap<String, Vec<&String>> = BTreeMap::new();
        let narrow: Vec<&String> = encodings.iter().filter(|(_, affine)| affine.has_global_scale()).map(|(name, _)| name).collect();
        let inputs = if narrow.is_empty() { BTreeMap::new() } else { model.inputs_of_layers() };
        for name in narrow {
            fused.entry(inputs.get(name).cloned().unwrap_or_else(|| fused_name(name))).or_default().push(name);
        }
        let peers = |names: &Vec<&String>| Peers::of(names.iter().filter_map(|name| model.weights.by_name.get(*name).cloned()).collect());
        fused.values().flat_map(|names| names.iter().map(|name| (*name).clone()).zip(std::iter::repeat(peers(names)))).collect()
    }
}

/// Layers of one module that runtimes fuse, by the last parts of their names.
const FUSED: [&[&str]; 9] = [
    &["q_proj", "k_proj", "v_proj"],
    &["wq", "wk", "wv"],
    &["query", "key", "value"],
    &["q_lin", "k_lin", "v_lin"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
];

/// The name of the layer that consumers fuse a weight into; its own where there is none.
fn fused_name(name: &str) -> String {
    let Some((module, part)) = name.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')) else { return name.to_owned() };
    let fused = FUSED.into_iter().find(|parts| parts.contains(&part));
    fused.map_or_else(|| name.to_owned(), |parts| format!("{module}.{}", parts.join("+")))
}

/// Whether a weight is one of several experts of a layer.
fn is_expert(name: &str) -> bool {
    name.contains("experts.")
}

fn require_matrix(name: &str, weight: &Weight) -> Result<()> {
    targets::require_float(NAME, name, weight)?;
    if weight.shape.len() != 2 {
        return Err(Error::tensor(name, format!("has shape {:?}; only matrices can be quantized in safetensors", weight.shape), "add it to `ignore`"));
    }
    Ok(())
}

impl Pass for Quantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        let group_size = self.group_size.or(self.scheme.group().map(|size| size as i64));
        let gptq = self.method == Method::Gptq;
        let damping = gptq.then(|| self.damping());
        let ordered = gptq.then(|| self.ordered());
        options_of(&Quantize { group_size, observer: Some(self.observer()), damping, ordered, ..self.clone() })
    }

    fn check(&self) -> Result<()> {
        if self.method.reads_samples() {
            layerwise::require(&format!("{NAME}: method"))?;
            if !self.scheme.codes().is_integer() {
                return Err(Error::option(NAME, format!("{} has `method: rtn` alone: the others choose integers", self.options()["scheme"])));
            }
        }
        if self.method != Method::Gptq && (self.damping.is_some() || self.ordered.is_some()) {
            return Err(Error::option(NAME, "`damping` and `ordered` are for `method: gptq`"));
        }
        if self.damping.is_some_and(|damping| !(damping > 0.0 && damping <= 1.0)) {
            return Err(Error::option(format!("{NAME}: damping"), "must be more than 0, and at most 1"));
        }
        if self.method == Method::Smoothquant && !self.scheme.rounds_activations() {
            return Err(Error::option(NAME, "`method: smoothquant` is for schemes that round activations, like W8A8: use `awq` or `gptq`"));
        }
        if self.scheme.stores_scales() {
            layerwise::require(&format!("{NAME}: scheme"))?;
        }
        if self.kv_cache.is_some() {
            layerwise::require(&format!("{NAME}: kv_cache"))?;
        }
        match (self.group_size, self.scheme.group()) {
            (Some(size), _) if size == 0 || size < -1 => Err(Error::option(NAME, "`group_size` must be at least 1, or -1 for whole rows")),
            (Some(size), None) if size != -1 || self.scheme != Scheme::W8A8 => {
                Err(Error::option(NAME, format!("`group_size` is not for {}, which says itself how scales are shared", self.options()["scheme"])))
            }
            _ if self.observer() != WeightObserver::Minmax && !self.scheme.codes().is_integer() => {
                let observer = if self.observer() == WeightObserver::L4 { "l4" } else { "mse" };
                Err(Error::option(NAME, format!("`observer: {observer}` searches scales of integers; {} has minmax", self.options()["scheme"])))
            }
            _ if self.observer() == WeightObserver::L4 && self.method.reads_samples() => {
                Err(Error::option(NAME, "`observer: l4` is for `method: rtn`: with samples, errors are weighted by what they cost"))
            }
            _ => Ok(()),
        }
    }

    fn runs_on(&self) -> Option<Samples> {
        (self.method.reads_samples() || self.scheme.stores_scales() || self.kv_cache.is_some()).then_some(Samples::Calibration)
    }

    fn keeps_work(&self) -> bool {
        self.method.reads_samples()
    }

    fn kept_bytes(&self, changed: &BTreeSet<String>, after: &Weights) -> u64 {
        if self.keeps_work() { layerwise::kept_bytes(changed, after) } else { 0 }
    }

    fn apply(&self, mut model: Model, run: &mut RunState, context: Option<&Context>) -> Result<Model> {
        let Layers { mut encodings, rule, notes } = self.layers(&model.weights)?;
        let (count, all) = (encodings.len(), model.weights.parameters());
        let parameters: u64 = encodings.keys().map(|name| Ok(model.weights.get(name)?.elements() as u64)).sum::<Result<u64>>()?;
        let mut details = json!({ "quantized": count, "parameters": parameters, "of": all });
        let tensors: BTreeSet<String> = encodings.keys().cloned().collect();
        let mut applied = Applied { tensors, rule, notes, ..Applied::new(NAME, self.options()) };
        if let Some(context) = context.filter(|_| self.scheme.stores_scales()) {
            let meter = applied.meter.clone();
            applied.notes.extend(meter.time(|| layerwise::find_input_scales(NAME, &mut encodings, &model, context))?);
        }
        match context.filter(|_| self.method.reads_samples()) {
            Some(context) => {
                let meter = applied.meter.clone();
                let found = meter.time(|| layerwise::quantize(self, &encodings, &mut model, run, context, &mut applied))?;
                details.as_object_mut().into_iter().for_each(|details| details.extend(found.clone()));
            }
            None => {
                let mut peers = Self::peers(&encodings, &model);
                for (name, affine) in encodings {
                    let weight = model.weights.get(&name)?;
                    let integers = Integers::new(&name, weight, affine, self.observer(), &applied.meter).with_peers(peers.remove(&name));
                    model.weights.by_name.insert(name, integers.weight());
                }
            }
        }
        if let Some(format) = self.kv_cache {
            let meter = applied.meter.clone();
            let found = meter.time(|| layerwise::find_cache_scales(NAME, format, &mut model, context))?;
            details["caches"] = json!(found);
        }
        applied.details = Arc::new(move || details.clone());
        run.history.push(applied);
        Ok(model)
    }

    fn remedy(&self) -> &'static str {
        "`method: gptq` or `awq` with calibration data, a smaller `group_size`, `observer: mse`, more bits, or `ignore` for the layers that `compress analyze` names"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Bytes, DType, Encoding};

    /// Pairs of vLLM's `packed_modules_mapping` for DeepSeek and Qwen3.5.
    #[test]
    fn layers_that_runtimes_fuse_have_one_name() {
        let fused = |part: &str| fused_name(&format!("model.layers.0.mixer.{part}.weight"));
        for [a, b] in [["q_a_proj", "kv_a_proj_with_mqa"], ["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"], ["q_proj", "v_proj"], ["w1", "w3"]] {
            assert_eq!(fused(a), fused(b));
        }
        assert_ne!(fused("in_proj_qkv"), fused("in_proj_a"));
        assert_ne!(fused("q_a_proj"), fused("q_b_proj"));
        assert_ne!(fused_name("model.layers.0.mixer.w1.weight"), fused_name("model.layers.1.mixer.w1.weight"));
    }

    #[test]
    fn groups_divide_rows_and_experts_share_theirs() {
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

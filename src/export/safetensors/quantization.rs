//! The `quantization_config` in `config.json`, by which transformers and vLLM load quantized weights.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::is_packed;
use super::module_names::{ModuleNames, Owner, names_ending_with, unique};
use super::original;
use crate::arch;
use crate::error::{Error, Result};
use crate::model::{Model, class, stacked_experts};
use crate::run_state::RunState;
use crate::store::writer::Item;
use crate::store::{ActivationScheme, Codes, Encoding, FloatFormat, FloatScale, Granularity, QuantizationSpec, ScaleFormat};

/// Version of compressed-tensors whose fields are written.
const VERSION: &str = "0.13.0";

/// Modules of one class with the same quantization.
#[derive(Debug, PartialEq)]
pub(super) struct Group<'a> {
    pub(super) class: &'static str,
    pub(super) spec: QuantizationSpec,
    pub(super) packed: bool,
    pub(super) modules: Vec<&'a str>,
}

impl Group<'_> {
    pub(super) fn format(&self) -> &'static str {
        self.spec.codes.file_format(self.spec.scale_format(), self.packed)
    }

    fn describe(&self, targets: Vec<String>) -> Value {
        let spec = &self.spec;
        let (strategy, size) = match spec.granularity {
            Granularity::Tensor => ("tensor", None),
            Granularity::Channel => ("channel", None),
            Granularity::Group(size) => (spec.scale_format().group_strategy(), Some(size)),
            Granularity::Block(_) => ("block", None),
        };
        let kind = if spec.codes.is_integer() { "int" } else { "float" };
        let mut weights = json!({ "num_bits": spec.codes.bits(), "type": kind, "symmetric": spec.symmetric, "strategy": strategy, "dynamic": false });
        if let Some(size) = size {
            weights["group_size"] = json!(size);
        }
        if let Granularity::Block(size) = spec.granularity {
            weights["block_structure"] = json!(size);
        }
        let weights = with_scale_dtype(spec.scale_format(), weights);
        let activations = match spec.activations {
            ActivationScheme::Float(format, scale) => float_activations(format, scale),
            ActivationScheme::DynamicToken => json!({ "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true }),
            ActivationScheme::Static(quantizer) => {
                json!({ "num_bits": 8, "type": "int", "symmetric": quantizer.zero_point.is_none(), "strategy": "tensor", "dynamic": false })
            }
            ActivationScheme::None => Value::Null,
        };
        json!({ "targets": targets, "weights": weights, "input_activations": activations, "output_activations": null, "format": self.format() })
    }
}

/// Adds the dtype of scales that are not floats.
fn with_scale_dtype(scales: ScaleFormat, mut arguments: Value) -> Value {
    if let (ScaleFormat::PowerOfTwo | ScaleFormat::Relative, [name, ..]) = (scales, scales.dtype_names()) {
        let dtype = Value::from(format!("torch.{name}"));
        (arguments["scale_dtype"], arguments["zp_dtype"]) = (dtype.clone(), dtype);
    }
    arguments
}

fn float_activations(format: FloatFormat, scale: FloatScale) -> Value {
    let scales = scale.format();
    let (strategy, dynamic, size) = match scale {
        FloatScale::Token => ("token", true.into(), None),
        FloatScale::Group(size) => ("group", true.into(), Some(size)),
        FloatScale::Static(_) => ("tensor", false.into(), None),
        FloatScale::PowerOfTwo => (scales.group_strategy(), true.into(), scales.group()),
        FloatScale::Relative(_) => (scales.group_strategy(), Value::from("local"), scales.group()),
    };
    let mut arguments = json!({ "num_bits": format.bits(), "type": "float", "symmetric": true, "strategy": strategy, "dynamic": dynamic });
    if let Some(size) = size {
        arguments["group_size"] = json!(size);
    }
    with_scale_dtype(scales, arguments)
}

pub(super) fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

pub(super) fn groups(items: &[Item]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for item in items {
        let Encoding::Quantized(spec) = &item.weight.encoding else { continue };
        if spec.codes.is_palette() || original::is_kept(item) {
            continue;
        }
        let (class, spec) = (class(&item.name, &item.weight), spec.scheme());
        let packed = is_packed(&item.name, &item.weight);
        match groups.iter_mut().find(|g| (g.class, &g.spec, g.packed) == (class, &spec, packed)) {
            Some(group) => group.modules.push(module(&item.name)),
            None => groups.push(Group { class, spec, packed, modules: vec![module(&item.name)] }),
        }
    }
    // A tied head matches both as a Linear and by its name in the group of embeddings. The first match wins.
    groups.sort_by_key(|g| g.class);
    groups
}

/// The object for `config.json`.
///
/// The targets are classes of modules, and modules that are not quantized are ignored by name: a module
/// that is matched but not quantized would be loaded with an uninitialized scale. If a class has two
/// schemes, the targets are module names.
pub(super) fn describe(items: &[Item], model: &Model, run: &RunState) -> Value {
    let groups = groups(items);
    let by_module = group_indices(&groups);
    let group = |name: &str| by_module.get(module(name)).map(|index| Owner::Group(*index));
    let tied: Vec<(&str, Owner)> = model.tied_names().into_iter().filter_map(|(alias, original)| Some((module(alias), group(original)?))).collect();
    let owner = |item: &Item| group(&item.name).unwrap_or(Owner::Other);
    let names = ModuleNames::new(model.config.model_type(), items.iter().map(|item| (module(&item.name), owner(item))).chain(tied.iter().copied()));
    let mut described = Map::new();
    for (index, group) in groups.iter().enumerate() {
        let is_only_group = groups.iter().filter(|g| g.class == group.class).count() == 1;
        let mut targets = if is_only_group { vec![group.class.to_owned()] } else { names.targets(&group.modules) };
        if group.class == "Embedding" {
            targets.extend(unique(tied.iter().flat_map(|(head, _)| names.tied_targets(head))));
        }
        described.insert(format!("group_{index}"), group.describe(targets));
    }
    let format = match groups.iter().map(Group::format).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()[..] {
        [] => "dense",
        [one] => one,
        _ => "mixed-precision",
    };
    let mut description = json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": ignored(items, model, &groups, &names),
        "kv_cache_scheme": null,
        "global_compression_ratio": null,
        "version": VERSION,
        "producer": concat!("compress ", env!("CARGO_PKG_VERSION")),
    });
    for (key, value) in model.config.carried_quantization().iter().filter(|(key, _)| is_valid(key, run)) {
        description[key] = value.clone();
    }
    description
}

/// Description of the weights that are encoded as indices into codebooks; `None` if there are none.
pub(super) fn palettes(items: &[Item]) -> Option<Value> {
    let mut found: BTreeMap<(u8, usize), usize> = BTreeMap::new();
    for item in items {
        if let Encoding::Quantized(QuantizationSpec { codes: Codes::Palette(bits), granularity: Granularity::Block([rows, _]), .. }) = item.weight.encoding {
            *found.entry((bits, rows)).or_default() += 1;
        }
    }
    let list: Vec<Value> = found.into_iter().map(|((bits, rows), weights)| json!({ "bits": bits, "rows": rows, "weights": weights })).collect();
    (!list.is_empty()).then_some(Value::Array(list))
}

/// Keys of the input's `quantization_config` that are not written to the output's.
pub(super) fn dropped_keys<'m>(items: &[Item], model: &'m Model, run: &RunState) -> Vec<&'m str> {
    let described = is_needed(items, model, run);
    model.config.carried_quantization().keys().map(String::as_str).filter(|key| !described || !is_valid(key, run)).collect()
}

/// Fails if a tensor of the model has the name of a parameter of a weight that is quantized now: readers
/// would take it for one. The caller compares names that are written twice.
pub(super) fn require_free_names(items: &[Item], model: &Model) -> Result<()> {
    const OF_WEIGHT: [&str; 3] = ["_zero_point", "_g_idx", "_global_scale"];
    const OF_MODULE: [&str; 3] = ["input_scale", "input_zero_point", "input_global_scale"];
    for item in items.iter().filter(|item| item.weight.encoding != Encoding::Dense && !original::is_kept(item)) {
        let module = item.name.strip_suffix("weight").map(|module| OF_MODULE.map(|part| format!("{module}{part}")));
        let names = OF_WEIGHT.map(|part| format!("{}{part}", item.name)).into_iter().chain(module.into_iter().flatten());
        if let Some(name) = names.into_iter().find(|name| model.weights.by_name.contains_key(name)) {
            let reason = format!("would be read as a parameter of `{}`, which is quantized now", item.name);
            return Err(Error::tensor(&name, reason, format!("remove or rename it in the input, or add `{}` to `ignore`", item.name)));
        }
    }
    Ok(())
}

/// Whether a key of the input's description is still valid for the written weights.
fn is_valid(key: &str, run: &RunState) -> bool {
    key != "sparsity_config" || run.history.is_empty()
}

/// Whether a `quantization_config` is needed: for quantized weights, a quantized KV cache, or sparsity.
pub(super) fn is_needed(items: &[Item], model: &Model, run: &RunState) -> bool {
    let is_carried = |key: &str| model.config.carried_quantization().contains_key(key) && is_valid(key, run);
    !groups(items).is_empty() || is_carried("kv_cache_scheme") || is_carried("sparsity_config")
}

/// The index of the group of each quantized module.
pub(super) fn group_indices<'g>(groups: &[Group<'g>]) -> HashMap<&'g str, usize> {
    groups.iter().enumerate().flat_map(|(index, group)| group.modules.iter().map(move |name| (*name, index))).collect()
}

/// Modules that are not quantized, by their checkpoint name and by its suffix: loaders drop or change
/// the first component (`bert.pooler.dense` becomes `pooler.dense` if only the base model is loaded).
fn ignored(items: &[Item], model: &Model, groups: &[Group], names: &ModuleNames) -> Vec<String> {
    // Embedding tables are included: some linear layers have names like them, such as
    // `embeddings.projection`.
    let unquantized = items
        .iter()
        .filter(|item| item.weight.encoding == Encoding::Dense && item.name.ends_with(".weight"))
        // Readers take integers of any shape for codes.
        .filter(|item| item.weight.shape.len() == 2 || !item.weight.is_float())
        .filter(|item| model.weights.folder(&item.name).is_none());
    let experts: BTreeSet<String> = items.iter().filter_map(|item| stacked_experts(&item.name, &item.weight)).collect();
    let has_quantized = |experts: &&String| groups.iter().flat_map(|g| &g.modules).any(|name| name.starts_with(&format!("{experts}.")));
    // A head that is tied to a float embedding has no tensor, but is a linear layer.
    let heads = arch::UNSTORED_HEADS.into_iter().chain(model.tied_names().into_iter().map(|(alias, _)| module(alias)));
    let heads = unique(heads.filter(|head| !names.is_quantized(head)).map(str::to_owned));
    let experts = experts.iter().filter(|experts| !has_quantized(experts)).flat_map(|experts| names.ignored_experts(experts));
    unique(unquantized.flat_map(|item| names.ignored(module(&item.name))).chain(experts).chain([names_ending_with(&heads)]))
}

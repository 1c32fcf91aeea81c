//! The `quantization_config` in `config.json`, by which transformers and vLLM load quantized weights.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::is_packed;
use crate::arch;
use crate::model::{Model, class, is_embedding, is_linear, stacked_experts};
use crate::run_state::RunState;
use crate::store::writer::Item;
use crate::store::{ActivationScheme, Codes, DType, Encoding, FileFormat, FloatFormat, FloatScale, Granularity, QuantizationSpec, ScaleFormat};

/// Version of compressed-tensors whose fields are written.
const VERSION: &str = "0.13.0";

/// Modules of one class with the same quantization.
#[derive(Debug, PartialEq)]
struct Group<'a> {
    class: &'static str,
    spec: QuantizationSpec,
    packed: bool,
    modules: Vec<&'a str>,
}

impl Group<'_> {
    fn format(&self) -> &'static str {
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

fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

fn groups(items: &[Item]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for item in items {
        let Encoding::Quantized(spec) = &item.weight.encoding else { continue };
        if spec.codes.is_palette() {
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
    let tied: Vec<&str> = model
        .tied_names()
        .into_iter()
        .filter(|(_, original)| groups.iter().any(|g| g.modules.contains(&module(original))))
        .map(|(alias, _)| module(alias))
        .collect();
    let names = ModuleNames::new(items, model, &groups);
    let mut described = Map::new();
    for (index, group) in groups.iter().enumerate() {
        let is_only_group = groups.iter().filter(|g| g.class == group.class).count() == 1;
        let mut targets = if is_only_group { vec![group.class.to_owned()] } else { names.targets(group) };
        if group.class == "Embedding" {
            targets.extend(tied.iter().map(|head| format!("re:.*{}$", regex::escape(head))));
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
        "ignore": ignored(items, model, (&groups, &names), &tied),
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

/// Whether a key of the input's description is still valid for the written weights.
fn is_valid(key: &str, run: &RunState) -> bool {
    key != "sparsity_config" || run.history.is_empty()
}

/// Whether a `quantization_config` is needed: for quantized weights, a quantized KV cache, or sparsity.
pub(super) fn is_needed(items: &[Item], model: &Model, run: &RunState) -> bool {
    let is_carried = |key: &str| model.config.carried_quantization().contains_key(key) && is_valid(key, run);
    !groups(items).is_empty() || is_carried("kv_cache_scheme") || is_carried("sparsity_config")
}

/// The group that a module belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The group with this index.
    Group(usize),
    /// A module that is not quantized.
    Other,
}

/// The names of modules in loaders, which drop or change the first component of checkpoint names and
/// rename some modules.
struct ModuleNames {
    /// Replacements in transformers, in addition to the first component.
    renames: &'static [(&'static str, &'static str)],
    /// The owner of the modules whose names have this suffix; `None` if several owners have such modules.
    by_suffix: HashMap<String, Option<Owner>>,
    /// Likewise for suffixes in which numbers are replaced by a pattern.
    by_pattern: HashMap<String, Option<Owner>>,
}

impl ModuleNames {
    fn new(items: &[Item], model: &Model, groups: &[Group]) -> ModuleNames {
        let owners: HashMap<&str, Owner> =
            groups.iter().enumerate().flat_map(|(index, group)| group.modules.iter().map(move |name| (*name, Owner::Group(index)))).collect();
        let renames = arch::family(model.config.model_type()).map_or(&[][..], |family| family.renames);
        let mut names = ModuleNames { renames, by_suffix: HashMap::new(), by_pattern: HashMap::new() };
        for name in items.iter().map(|item| module(&item.name)) {
            let owner = owners.get(name).copied().unwrap_or(Owner::Other);
            for spelling in names.spellings(name) {
                let starts = std::iter::once(0).chain(spelling.match_indices('.').map(|(at, _)| at + 1));
                for suffix in starts.filter_map(|start| spelling.get(start..)) {
                    for (owners, key) in [(&mut names.by_suffix, suffix.to_owned()), (&mut names.by_pattern, number_pattern(suffix))] {
                        owners.entry(key).and_modify(|other| *other = other.filter(|other| *other == owner)).or_insert(Some(owner));
                    }
                }
            }
        }
        names
    }

    /// The name of a module in the checkpoint and, if it differs, in transformers.
    fn spellings(&self, name: &str) -> Vec<String> {
        let renamed = self.renames.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
        if renamed == name { vec![renamed] } else { vec![name.to_owned(), renamed] }
    }

    /// Targets that match only the modules of a group: patterns of their suffixes, in which numbers are
    /// replaced by `\d+` if all modules that match belong to the group.
    fn targets(&self, group: &Group) -> Vec<String> {
        let mut targets = Vec::new();
        let mut unique = HashSet::new();
        let pattern = |suffix: &str| format!("re:(.*\\.)?{suffix}$");
        for name in group.modules.iter().flat_map(|name| self.spellings(name)) {
            let is_own = |owners: &HashMap<String, Option<Owner>>, suffix: &str| matches!(owners.get(suffix), Some(Some(Owner::Group(_))));
            let entries = match strip_first(&name) {
                Some(suffix) if is_own(&self.by_pattern, &number_pattern(suffix)) => vec![pattern(&number_pattern(suffix))],
                Some(suffix) if is_own(&self.by_suffix, suffix) => vec![name.clone(), pattern(&regex::escape(suffix))],
                _ => vec![name.clone()],
            };
            targets.extend(entries.into_iter().filter(|entry| unique.insert(entry.clone())));
        }
        targets
    }
}

/// A name without its first component.
fn strip_first(name: &str) -> Option<&str> {
    name.split_once('.').map(|(_, suffix)| suffix)
}

/// A regular expression that matches a name with any numbers in place of its numeric components.
fn number_pattern(name: &str) -> String {
    let part = |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "\\d+".to_owned() } else { regex::escape(part) };
    name.split('.').map(part).collect::<Vec<_>>().join("\\.")
}

/// Modules that are not quantized, by their checkpoint name and by its suffix: loaders drop or change
/// the first component (`bert.pooler.dense` becomes `pooler.dense` if only the base model is loaded).
fn ignored(items: &[Item], model: &Model, (groups, names): (&[Group], &ModuleNames), tied: &[&str]) -> Vec<String> {
    let quantized: BTreeSet<&str> = groups.iter().flat_map(|g| g.modules.iter().copied()).chain(tied.iter().copied()).collect();
    let embeddings = groups.iter().any(|g| g.class == "Embedding");
    let unquantized = items
        .iter()
        .filter(|item| item.weight.encoding == Encoding::Dense && item.weight.shape.len() == 2 && item.name.ends_with(".weight"))
        .filter(|item| model.weights.folder(&item.name).is_none())
        .filter(|item| embeddings || !is_embedding(&item.name, &item.weight) || is_linear(&item.name, &item.weight))
        .map(|item| module(&item.name));
    // A head that is tied to a float embedding has no tensor, but is a linear layer.
    let heads = arch::UNSTORED_HEADS
        .into_iter()
        .chain(model.tied_names().into_iter().map(|(alias, _)| module(alias)))
        .filter(|head| !quantized.iter().any(|name| name == head || name.ends_with(&format!(".{head}"))));
    let mut ignore = Vec::new();
    for name in unquantized.flat_map(|name| names.spellings(name)) {
        let suffix = strip_first(&name).filter(|suffix| names.by_suffix.get(*suffix) == Some(&Some(Owner::Other)));
        let pattern = suffix.map(|suffix| format!("re:(.*\\.)?{}$", regex::escape(suffix)));
        ignore.push(name);
        ignore.extend(pattern);
    }
    // vLLM looks up how experts are quantized by the names of linear layers within their module, like
    // `experts.0.gate_proj`.
    for experts in items.iter().filter_map(|item| stacked_experts(&item.name, &item.weight)).collect::<BTreeSet<String>>() {
        let suffix = strip_first(&experts).unwrap_or(&experts);
        if !quantized.iter().any(|q| q.contains(&format!("{suffix}."))) {
            ignore.push(format!("re:(.*\\.)?{}(\\..*)?$", regex::escape(suffix)));
        }
    }
    ignore.extend(heads.map(str::to_owned));
    let mut unique = BTreeSet::new();
    ignore.retain(|entry| unique.insert(entry.clone()));
    ignore
}

/// Whether a weight belongs to a single expert, as in `mlp.experts.3.up_proj.weight`.
fn is_of_expert(name: &str) -> bool {
    name.split('.').zip(name.split('.').skip(1)).any(|(part, number)| part == "experts" && number.parse::<usize>().is_ok())
}

/// Layers by which compressed-tensors recognizes attention modules with a KV cache.
const KEY_LAYERS: [&str; 4] = ["k_proj", "v_proj", "qkv_proj", "kv_b_proj"];

/// Whether compressed-tensors recognizes a module as attention.
fn is_attention_module(items: &[Item], module: &str) -> bool {
    let layer = |item: &Item| item.name.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).and_then(|rest| rest.split('.').next()).map(str::to_owned);
    items.iter().filter_map(layer).any(|layer| KEY_LAYERS.contains(&layer.as_str()))
}

/// Notes about which consumers support the quantization schemes.
pub(super) fn notes(items: &[Item], model: &Model) -> Vec<String> {
    let mut notes = Vec::new();
    let groups = groups(items);
    let dynamic = |g: &&Group| g.spec.activations == ActivationScheme::DynamicToken;
    if groups.iter().filter(dynamic).any(|g| !g.spec.symmetric) {
        notes.push("asymmetric weights with int8 activations: transformers loads them; vLLM supports only symmetric weights".to_owned());
    }
    if groups.iter().filter(dynamic).any(|g| matches!(g.spec.granularity, Granularity::Group(_))) {
        notes.push("group-wise weights with int8 activations: transformers loads them; vLLM supports only one scale per tensor or channel".to_owned());
    }
    if groups.iter().any(|g| g.class == "Embedding") {
        notes.push("quantized embeddings: transformers 5 loads them; transformers 4 and vLLM do not support this format".to_owned());
    }
    let quantized = |item: &&Item| matches!(item.weight.encoding, Encoding::Quantized(_));
    if items.iter().filter(quantized).any(|item| is_of_expert(&item.name)) {
        notes.push(
            "quantized experts: transformers 4 and vLLM load them; transformers 5 fuses all experts of a layer into one tensor, which fails for quantized ones"
                .to_owned(),
        );
    }
    if let Some(module) = items.iter().filter_map(|item| item.name.strip_suffix(".k_scale")).find(|module| !is_attention_module(items, module)) {
        notes.push(format!(
            "scales of the KV cache: transformers ignores those of `{module}` and caches floats, because compressed-tensors recognizes attention by layers named {}; compress and its ONNX export use them",
            KEY_LAYERS.join(", ")
        ));
    }
    let integers = |g: &&Group| g.spec.codes.is_integer();
    if groups.iter().filter(integers).any(|g| g.class == "Linear" && g.spec.activations == ActivationScheme::None && !g.packed) {
        notes.push("weight-only int8 with zero points or a single scale: transformers loads it; vLLM has no kernel for it".to_owned());
    }
    if groups.iter().any(|g| g.packed && !g.spec.symmetric) {
        notes.push("packed zero points: vLLM loads them; transformers only with `CompressedTensorsConfig(dequantize=True)`".to_owned());
    }
    let file = |spec: &QuantizationSpec| spec.codes.float().and_then(|format| format.file(spec.scale_format()));
    let used: Vec<(FloatFormat, &FileFormat)> = FloatFormat::ALL
        .iter()
        .flat_map(|format| format.row().files.iter().map(move |file| (*format, file)))
        .filter(|(_, known)| groups.iter().any(|g| file(&g.spec).is_some_and(|file| file.name == known.name)))
        .collect();
    for (_, file) in &used {
        if !notes.iter().any(|note| note == file.support) {
            notes.push(file.support.to_owned());
        }
    }
    let is_float = |item: &Item| matches!(&item.weight.encoding, Encoding::Quantized(spec) if item.weight.dtype != DType::BF16 && file(spec).is_some_and(|file| file.only_bf16));
    if let Some((format, _)) = used.iter().find(|(_, file)| file.only_bf16).filter(|_| items.iter().any(is_float)) {
        notes.push(format!("{} in a model that is not bfloat16: transformers dequantizes the weights to bfloat16 and then fails on the dtype mismatch; `cast --to bf16` first, or load the model with that dtype", format.row().label));
    }
    let odd: BTreeSet<u8> = groups.iter().filter(|g| g.packed).map(|g| g.spec.codes.bits()).filter(|bits| 32 % bits != 0).collect();
    if !odd.is_empty() {
        notes.push(format!("weights of {odd:?} bits, packed across word boundaries: compressed-tensors reads them from version 0.18"));
    }
    if groups.iter().any(|g| g.spec.activations == ActivationScheme::DynamicToken) {
        notes.push("int8 activations are quantized by the consumer while the model runs; the speed-up needs integer kernels (vLLM has them; transformers computes in floating point)".to_owned());
    }
    if !groups.is_empty() && model.config.model_type().is_empty() {
        notes.push("the folder has no config.json with a model_type: the written config.json describes the quantization, but libraries cannot select a model class from it".to_owned());
    }
    notes
}

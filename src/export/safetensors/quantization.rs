//! `quantization_config`: telling transformers and vLLM what is quantized.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::is_packed;
use crate::model::{Model, class, is_embedding, is_linear, module_name, stacked_experts};
use crate::run_state::RunState;
use crate::store::writer::Item;
use crate::store::{ActivationScheme, Affine, Codes, DType, Encoding, Granularity};

/// Version of compressed-tensors whose fields are written.
const VERSION: &str = "0.13.0";

/// Heads that a loader may create even when the checkpoint holds no tensor for them.
const HEADS: [&str; 6] = ["lm_head", "cls.predictions.decoder", "predictions.decoder", "classifier", "score", "qa_outputs"];

#[derive(Debug, PartialEq)]
struct Group<'a> {
    class: &'static str,
    affine: Affine,
    packed: bool,
    modules: Vec<&'a str>,
}

impl Group<'_> {
    fn format(&self) -> &'static str {
        match (self.affine.codes, self.affine.scale_dtype) {
            (Codes::Integer(_), _) if self.packed => "pack-quantized",
            (Codes::Integer(_), _) => "int-quantized",
            (Codes::E4m3, DType::F8_E8M0) => "mxfp8-quantized",
            (Codes::E4m3, _) => "float-quantized",
            (Codes::E2m1, DType::F8_E8M0) => "mxfp4-pack-quantized",
            (Codes::E2m1, _) => "nvfp4-pack-quantized",
            (Codes::Palette(_), _) => "palettes",
        }
    }

    fn describe(&self, targets: Vec<String>) -> Value {
        let affine = &self.affine;
        let (strategy, size) = match affine.granularity {
            Granularity::Tensor => ("tensor", None),
            Granularity::Channel => ("channel", None),
            Granularity::Group(size) if affine.has_global_scale() => ("tensor_group", Some(size)),
            Granularity::Group(size) => ("group", Some(size)),
            Granularity::Block(_) => ("block", None),
        };
        let kind = if affine.codes.is_integer() { "int" } else { "float" };
        let mut weights = json!({ "num_bits": affine.codes.bits(), "type": kind, "symmetric": affine.symmetric, "strategy": strategy, "dynamic": false });
        if let Some(size) = size {
            weights["group_size"] = json!(size);
        }
        if let Granularity::Block(size) = affine.granularity {
            weights["block_structure"] = json!(size);
        }
        let torch = match affine.scale_dtype {
            DType::F8_E8M0 => "torch.uint8",
            DType::F8_E4M3 => "torch.float8_e4m3fn",
            _ => "",
        };
        let scaled = |mut arguments: Value| {
            if !torch.is_empty() {
                (arguments["scale_dtype"], arguments["zp_dtype"]) = (torch.into(), torch.into());
            }
            arguments
        };
        let weights = scaled(weights);
        let float = |bits: u8, strategy: &str, dynamic: Value| json!({ "num_bits": bits, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": dynamic });
        let grouped = |size: usize, mut arguments: Value| {
            arguments["group_size"] = json!(size);
            arguments
        };
        let activations = match affine.activations {
            ActivationScheme::Float8Token => float(8, "token", true.into()),
            ActivationScheme::Float8Group(size) => grouped(size, float(8, "group", true.into())),
            ActivationScheme::Float8Static(_) => float(8, "tensor", false.into()),
            ActivationScheme::Mxfp4 => scaled(grouped(32, float(4, "group", true.into()))),
            ActivationScheme::Nvfp4(_) => scaled(grouped(16, float(4, "tensor_group", "local".into()))),
            ActivationScheme::DynamicToken => json!({ "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true }),
            ActivationScheme::Static(quantizer) => {
                json!({ "num_bits": 8, "type": "int", "symmetric": quantizer.zero_point.is_none(), "strategy": "tensor", "dynamic": false })
            }
            ActivationScheme::None => Value::Null,
        };
        json!({ "targets": targets, "weights": weights, "input_activations": activations, "output_activations": null, "format": self.format() })
    }
}

fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

fn groups(items: &[Item]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for item in items {
        let Encoding::Affine(affine) = &item.weight.encoding else { continue };
        if affine.codes.is_palette() {
            continue;
        }
        let (class, affine) = (class(&item.name, &item.weight), affine.scheme());
        let packed = is_packed(&item.name, &item.weight);
        match groups.iter_mut().find(|g| (g.class, &g.affine, g.packed) == (class, &affine, packed)) {
            Some(group) => group.modules.push(module(&item.name)),
            None => groups.push(Group { class, affine, packed, modules: vec![module(&item.name)] }),
        }
    }
    // A tied head is both a Linear and named beside the embeddings: the first match wins.
    groups.sort_by_key(|g| g.class);
    groups
}

/// The object for `config.json`.
///
/// Whole classes are targets, and every module that was left out is ignored by name: a module that is matched
/// but not quantized would be loaded with an uninitialised scale. Two schemes for one class take turns by name.
pub(super) fn describe(items: &[Item], model: &Model, run: &RunState) -> Value {
    let groups = groups(items);
    let tied: Vec<&str> = model
        .tied_names()
        .into_iter()
        .filter(|(_, original)| groups.iter().any(|g| g.modules.contains(&module(original))))
        .map(|(alias, _)| module(alias))
        .collect();
    let names = ModuleNames::of(items, model, &groups);
    let mut described = Map::new();
    for (index, group) in groups.iter().enumerate() {
        let alone = groups.iter().filter(|g| g.class == group.class).count() == 1;
        let mut targets = if alone { vec![group.class.to_owned()] } else { names.targets(group) };
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
    for (key, value) in model.config.carried_quantization().iter().filter(|(key, _)| is_true(key, run)) {
        description[key] = value.clone();
    }
    description
}

/// What `config.json` says of weights that are places in palettes; nothing where there are none.
pub(super) fn palettes(items: &[Item]) -> Option<Value> {
    let mut found: BTreeMap<(u8, usize), usize> = BTreeMap::new();
    for item in items {
        if let Encoding::Affine(Affine { codes: Codes::Palette(bits), granularity: Granularity::Block([rows, _]), .. }) = item.weight.encoding {
            *found.entry((bits, rows)).or_default() += 1;
        }
    }
    let list: Vec<Value> = found.into_iter().map(|((bits, rows), weights)| json!({ "bits": bits, "rows": rows, "weights": weights })).collect();
    (!list.is_empty()).then_some(Value::Array(list))
}

/// What an input's description says beside its weights and the output's does not, by key.
pub(super) fn left_out<'m>(items: &[Item], model: &'m Model, run: &RunState) -> Vec<&'m str> {
    let described = is_needed(items, model, run);
    model.config.carried_quantization().keys().map(String::as_str).filter(|key| !described || !is_true(key, run)).collect()
}

/// Whether what an input's description says of its weights holds for the weights that are written.
fn is_true(key: &str, run: &RunState) -> bool {
    key != "sparsity_config" || run.history.is_empty()
}

/// Whether something has to be described: quantized weights, the cache of keys and values, or zeros.
pub(super) fn is_needed(items: &[Item], model: &Model, run: &RunState) -> bool {
    let told = |key: &str| model.config.carried_quantization().contains_key(key) && is_true(key, run);
    !groups(items).is_empty() || told("kv_cache_scheme") || told("sparsity_config")
}

/// Whose module a name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// One of the group with this number.
    Group(usize),
    /// A module that is not quantized.
    Other,
}

/// The names by which readers know modules. Loaders drop or change the first part of those of the checkpoint, and rename some of them.
struct ModuleNames {
    model_type: String,
    /// Whose modules have names that end like this; nothing where several owners have some.
    by_end: HashMap<String, Option<Owner>>,
    /// The same for ends whose numbers are left open.
    by_open_end: HashMap<String, Option<Owner>>,
}

impl ModuleNames {
    fn of(items: &[Item], model: &Model, groups: &[Group]) -> ModuleNames {
        let owners: HashMap<&str, Owner> =
            groups.iter().enumerate().flat_map(|(index, group)| group.modules.iter().map(move |name| (*name, Owner::Group(index)))).collect();
        let mut names = ModuleNames { model_type: model.config.model_type().to_owned(), by_end: HashMap::new(), by_open_end: HashMap::new() };
        for name in items.iter().map(|item| module(&item.name)) {
            let owner = owners.get(name).copied().unwrap_or(Owner::Other);
            for spelling in names.spellings(name) {
                let ends = std::iter::once(0).chain(spelling.match_indices('.').map(|(at, _)| at + 1));
                for end in ends.filter_map(|at| spelling.get(at..)) {
                    for (known, key) in [(&mut names.by_end, end.to_owned()), (&mut names.by_open_end, open(end))] {
                        known.entry(key).and_modify(|known| *known = known.filter(|known| *known == owner)).or_insert(Some(owner));
                    }
                }
            }
        }
        names
    }

    /// The name of a module in the checkpoint and, where it is another one, in transformers.
    fn spellings(&self, name: &str) -> Vec<String> {
        let renamed = module_name(&self.model_type, name);
        if renamed == name { vec![renamed] } else { vec![name.to_owned(), renamed] }
    }

    /// The modules of a group among others: patterns of their ends, with numbers left open where all such modules are of the group.
    fn targets(&self, group: &Group) -> Vec<String> {
        let mut targets = Vec::new();
        let mut seen = HashSet::new();
        let pattern = |end: &str| format!("re:(.*\\.)?{end}$");
        for name in group.modules.iter().flat_map(|name| self.spellings(name)) {
            let is_own = |known: &HashMap<String, Option<Owner>>, end: &str| matches!(known.get(end), Some(Some(Owner::Group(_))));
            let entries = match end(&name) {
                Some(end) if is_own(&self.by_open_end, &open(end)) => vec![pattern(&open(end))],
                Some(end) if is_own(&self.by_end, end) => vec![name.clone(), pattern(&regex::escape(end))],
                _ => vec![name.clone()],
            };
            targets.extend(entries.into_iter().filter(|entry| seen.insert(entry.clone())));
        }
        targets
    }
}

/// The end of a name behind its first part.
fn end(name: &str) -> Option<&str> {
    name.split_once('.').map(|(_, end)| end)
}

/// A regular expression for names that are like this one up to numbers between their dots.
fn open(name: &str) -> String {
    let part = |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "\\d+".to_owned() } else { regex::escape(part) };
    name.split('.').map(part).collect::<Vec<_>>().join("\\.")
}

/// Modules left out, by their name in the checkpoint and by its end: loaders drop or change the first part
/// (`bert.pooler.dense` becomes `pooler.dense` when the base model is loaded alone).
fn ignored(items: &[Item], model: &Model, (groups, names): (&[Group], &ModuleNames), tied: &[&str]) -> Vec<String> {
    let quantized: BTreeSet<&str> = groups.iter().flat_map(|g| g.modules.iter().copied()).chain(tied.iter().copied()).collect();
    let embeddings = groups.iter().any(|g| g.class == "Embedding");
    let left_out = items
        .iter()
        .filter(|item| item.weight.encoding == Encoding::Dense && item.weight.shape.len() == 2 && item.name.ends_with(".weight"))
        .filter(|item| model.weights.folder(&item.name).is_none())
        .filter(|item| embeddings || !is_embedding(&item.name, &item.weight) || is_linear(&item.name, &item.weight))
        .map(|item| module(&item.name));
    // A head that is tied to a table of floats is stored nowhere, and is a linear layer all the same.
    let heads = HEADS
        .into_iter()
        .chain(model.tied_names().into_iter().map(|(alias, _)| module(alias)))
        .filter(|head| !quantized.iter().any(|name| name == head || name.ends_with(&format!(".{head}"))));
    let mut ignore = Vec::new();
    for name in left_out.flat_map(|name| names.spellings(name)) {
        let end = end(&name).filter(|end| names.by_end.get(*end) == Some(&Some(Owner::Other)));
        let pattern = end.map(|end| format!("re:(.*\\.)?{}$", regex::escape(end)));
        ignore.push(name);
        ignore.extend(pattern);
    }
    // vLLM looks up how experts are quantized by the names of linear layers within their module, like `experts.0.gate_proj`.
    for experts in items.iter().filter_map(|item| stacked_experts(&item.name, &item.weight)).collect::<BTreeSet<String>>() {
        let end = experts.split_once('.').map_or(experts.as_str(), |(_, end)| end);
        if !quantized.iter().any(|q| q.contains(&format!("{end}."))) {
            ignore.push(format!("re:(.*\\.)?{}(\\..*)?$", regex::escape(end)));
        }
    }
    ignore.extend(heads.map(str::to_owned));
    let mut seen = BTreeSet::new();
    ignore.retain(|entry| seen.insert(entry.clone()));
    ignore
}

/// Whether a weight is that of one expert, as in `mlp.experts.3.up_proj.weight`.
fn is_of_expert(name: &str) -> bool {
    name.split('.').zip(name.split('.').skip(1)).any(|(part, number)| part == "experts" && number.parse::<usize>().is_ok())
}

/// Layers by which compressed-tensors knows attention whose keys and values it caches.
const KEY_LAYERS: [&str; 4] = ["k_proj", "v_proj", "qkv_proj", "kv_b_proj"];

/// Whether compressed-tensors knows a module as attention.
fn is_known_attention(items: &[Item], module: &str) -> bool {
    let layer = |item: &Item| item.name.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).and_then(|rest| rest.split('.').next()).map(str::to_owned);
    items.iter().filter_map(layer).any(|layer| KEY_LAYERS.contains(&layer.as_str()))
}

/// What readers make of the schemes, where they differ.
pub(super) fn notes(items: &[Item], model: &Model) -> Vec<String> {
    let mut notes = Vec::new();
    let groups = groups(items);
    let dynamic = |g: &&Group| g.affine.activations == ActivationScheme::DynamicToken;
    if groups.iter().filter(dynamic).any(|g| !g.affine.symmetric) {
        notes.push("asymmetric weights with int8 activations: transformers loads them, vLLM takes symmetric weights only".to_owned());
    }
    if groups.iter().filter(dynamic).any(|g| matches!(g.affine.granularity, Granularity::Group(_))) {
        notes.push("groups of weights with int8 activations: transformers loads them, vLLM takes one scale for a tensor or a channel only".to_owned());
    }
    if groups.iter().any(|g| g.class == "Embedding") {
        notes.push("quantized embeddings: transformers 5 loads them, transformers 4 and vLLM do not in this form".to_owned());
    }
    let quantized = |item: &&Item| matches!(item.weight.encoding, Encoding::Affine(_));
    if items.iter().filter(quantized).any(|item| is_of_expert(&item.name)) {
        notes.push(
            "quantized experts: transformers 4 and vLLM load them; transformers 5 makes one tensor of all experts of a layer, and cannot of quantized ones"
                .to_owned(),
        );
    }
    if let Some(module) = items.iter().filter_map(|item| item.name.strip_suffix(".k_scale")).find(|module| !is_known_attention(items, module)) {
        notes.push(format!(
            "scales of cached keys and values: transformers leaves those of `{module}` aside and caches floats, because compressed-tensors knows attention by layers named {}; compress and its ONNX export use them",
            KEY_LAYERS.join(", ")
        ));
    }
    let integers = |g: &&Group| g.affine.codes.is_integer();
    if groups.iter().filter(integers).any(|g| g.class == "Linear" && g.affine.activations == ActivationScheme::None && !g.packed) {
        notes.push("weight-only int8 with zero points or a single scale: transformers loads it, vLLM has no kernel for it".to_owned());
    }
    if groups.iter().any(|g| g.packed && !g.affine.symmetric) {
        notes.push("packed zero points: vLLM loads them, transformers only with `CompressedTensorsConfig(dequantize=True)`".to_owned());
    }
    if groups.iter().any(|g| g.affine.codes == Codes::E4m3) {
        notes.push(
            "FP8: transformers computes in floats; vLLM multiplies FP8 on GPUs of compute capability 8.9 and up, and uses FP8 for weights alone below"
                .to_owned(),
        );
    }
    if groups.iter().any(|g| g.affine.codes == Codes::E2m1) {
        notes.push(
            "FP4: vLLM loads it from compressed-tensors 0.13 on, transformers from version 5 on; products of FP4 need a GPU of the Blackwell generation"
                .to_owned(),
        );
    }
    let narrow = |item: &&Item| matches!(&item.weight.encoding, Encoding::Affine(affine) if affine.codes == Codes::E2m1);
    if items.iter().filter(narrow).any(|item| item.weight.dtype != DType::BF16) {
        notes.push("FP4 of a model that is not bfloat16: transformers makes bfloat16 of the weights and then fails to multiply; `cast --to bf16` first, or load it with that dtype".to_owned());
    }
    let odd: BTreeSet<u8> = groups.iter().filter(|g| g.packed).map(|g| g.affine.codes.bits()).filter(|bits| 32 % bits != 0).collect();
    if !odd.is_empty() {
        notes.push(format!("words that hold {odd:?} bits densely: compressed-tensors reads them from 0.18 on"));
    }
    if groups.iter().any(|g| g.affine.activations == ActivationScheme::DynamicToken) {
        notes.push("int8 activations are quantized by the consumer while the model runs; the speed-up needs integer kernels (vLLM has them, transformers computes in floats)".to_owned());
    }
    if !groups.is_empty() && model.config.model_type().is_empty() {
        notes.push("there is no config.json with a model_type beside the weights: its quantization_config says how to read them, but no library can choose a model class from it".to_owned());
    }
    notes
}

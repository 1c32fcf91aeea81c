//! Recipes: YAML files that specify a model, passes, data and output.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod brackets;
pub(crate) mod message;
mod shell_paths;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::contract::Target;
use crate::error::{Error, Result};
use crate::evaluation::Evaluate;
use crate::export::Export;
use crate::files;
use crate::pass::Step;
use crate::store::{ByteSize, OpenSizes};

/// A recipe. Unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Recipe {
    /// The model: a folder, or a safetensors, ONNX or PyTorch file; relative to the recipe
    pub model: PathBuf,
    /// Seed of all random number generators
    #[serde(default)]
    pub seed: u64,
    /// Keep NaN and infinite weights instead of stopping with an error; as integers and FP4, NaN becomes zero
    /// and infinity the largest value
    #[serde(default)]
    pub allow_nonfinite: bool,
    /// Sizes of the dynamic axes of an .onnx file, by the name of the axis or of an input: { sequence: 128,
    /// input: [1, 512] }; or of the images in the texts of a model with a vision tower: { height: 448,
    /// width: 448 }
    #[serde(default, skip_serializing_if = "OpenSizes::is_empty")]
    pub sizes: OpenSizes,
    /// Measure the fidelity of the outputs to the input model's if no evaluation data is configured
    #[serde(default = "yes")]
    pub measure: bool,
    /// Data sets for calibration, training and evaluation
    #[cfg(feature = "run")]
    #[serde(default, skip_serializing_if = "crate::data::DataSets::is_empty")]
    pub data: crate::data::DataSets,
    /// Memory limit of running models, like 8GB; models that exceed it run block by block [default: three
    /// quarters of the free memory]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Passes to apply, in order
    #[serde(default)]
    pub passes: Vec<Step>,
    /// How to measure before and after; needs `data: { evaluation: ... }`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluate: Option<Evaluate>,
    /// Output formats [default: safetensors; ONNX for an .onnx model]
    #[serde(default)]
    pub export: Vec<Export>,
    /// Write a software bill of materials, bom.cdx.json: hashes of all files, the base model, data sets,
    /// metrics
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sbom: Option<Sbom>,
    /// Runtimes that must load the output: vllm, sglang, transformers, llama.cpp or onnxruntime; vllm@0.33 is
    /// a version. Their rules are checked before the run starts and on the written files
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::one_or_several")]
    #[cfg_attr(feature = "cli", schemars(schema_with = "crate::one_or_several::one_or_several_schema::<String>"))]
    pub loads: Vec<Target>,
    /// Write a model card (README.md) to the output folder; otherwise the README.md of the model is copied
    #[serde(default = "yes")]
    pub card: bool,
    /// Output folder, relative to the recipe
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<PathBuf>,
    /// Values to try, by key as for `--set`: one run for each combination of values, each in a separate
    /// folder
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sweep: BTreeMap<String, Vec<Value>>,
}

/// Format of a software bill of materials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Sbom {
    /// CycloneDX 1.6, JSON
    #[cfg_attr(feature = "cli", value(name = "cyclonedx"))]
    CycloneDx,
}

/// One recipe of a sweep.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Variant {
    /// Its values, as the name of its output folder: `amount=0.3`. Empty without a sweep.
    pub name: String,
    /// The recipe with these values.
    pub recipe: Recipe,
}

/// Path that selects the standard input. Paths in such a recipe are relative to the working directory.
const STDIN: &str = "-";

/// Maximum number of runs of a sweep.
const MAX_VARIANTS: usize = 1000;

/// Maximum number of values that YAML aliases may add to a recipe.
const MAX_ALIASED: usize = 10_000;

fn yes() -> bool {
    true
}

impl Recipe {
    /// A recipe for a model, without passes.
    pub fn new(model: impl Into<PathBuf>) -> Recipe {
        Recipe {
            model: model.into(),
            seed: 0,
            allow_nonfinite: false,
            sizes: OpenSizes::new(),
            measure: true,
            #[cfg(feature = "run")]
            data: crate::data::DataSets::default(),
            memory: None,
            passes: Vec::new(),
            evaluate: None,
            export: Vec::new(),
            sbom: None,
            loads: Vec::new(),
            card: true,
            output: None,
            sweep: BTreeMap::new(),
        }
    }

    /// Parses a recipe. Paths are not resolved.
    ///
    /// # Errors
    /// The recipe is invalid. The message contains the line, the column and a snippet, and for unknown names
    /// the accepted ones.
    pub fn parse(text: &str, path: &Path) -> Result<Recipe> {
        // Nested aliases expand exponentially.
        let aliases = serde_saphyr::alias_limits! { max_total_replayed_events: MAX_ALIASED };
        let options = serde_saphyr::options! { alias_limits: aliases };
        serde_saphyr::from_str_with_options(text, options).map_err(|e| located(path, text, e))
    }

    /// Reads a recipe, resolves its paths against its folder, and applies overrides (`key.inner=value`),
    /// whose paths are relative to the working directory.
    ///
    /// # Errors
    /// The recipe cannot be read or parsed, or a key does not exist.
    pub fn open(path: &Path, set: &[(String, String)]) -> Result<Recipe> {
        Recipe::parse_file(path)?.resolved(path).with_overrides(set)
    }

    /// Like [`open`](Recipe::open), for a recipe with a sweep, in the file or in `sweep`: returns one recipe
    /// for each combination of values.
    ///
    /// # Errors
    /// As [`open`](Recipe::open), or if a swept key has no value or an invalid one.
    pub fn open_variants(path: &Path, set: &[(String, String)], sweep: &[(String, Vec<Value>)]) -> Result<Vec<Variant>> {
        let mut recipe = Recipe::parse_file(path)?;
        let mut own = std::mem::take(&mut recipe.sweep);
        let sweep: BTreeMap<&String, &Vec<Value>> = sweep.iter().map(|(key, values)| (key, values)).collect();
        sweep.keys().for_each(|key| drop(own.remove(*key)));
        let variants = vary(vec![Variant { name: String::new(), recipe }], own.iter())?;
        let set = variants.into_iter().map(|variant| Ok(Variant { recipe: variant.recipe.resolved(path).with_overrides(set)?, ..variant }));
        let variants = vary(set.collect::<Result<_>>()?, sweep.into_iter())?;
        for (index, variant) in variants.iter().enumerate() {
            if variants.iter().take(index).any(|other| other.name == variant.name) {
                return Err(Error::option("sweep", format!("`{}` names the output folder of two runs", variant.name)));
            }
        }
        Ok(variants)
    }

    fn parse_file(path: &Path) -> Result<Recipe> {
        if path.is_dir() {
            return Err(Error::Recipe { path: path.to_owned(), message: "is a folder; a recipe is a YAML file".into() });
        }
        if path == Path::new(STDIN) {
            let text = io::read_to_string(io::stdin()).map_err(Error::io("read", path))?;
            return Recipe::parse(&text, Path::new("recipe"));
        }
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        // The key of the type is in all of these files.
        let describes_a_model = path.file_name().is_some_and(|name| name == "config.json") && text.contains("\"model_type\"");
        let recipe = Recipe::parse(&text, path).map_err(|error| match describes_a_model {
            true => Error::Recipe { path: path.to_owned(), message: "describes a model; a recipe is a YAML file".into() },
            false => error,
        })?;
        shell_paths::require_none(&recipe, &text).map_err(|message| Error::Recipe { path: path.to_owned(), message })?;
        Ok(recipe)
    }

    fn with_overrides(self, set: &[(String, String)]) -> Result<Recipe> {
        set.iter().try_fold(self, |recipe, (key, value)| {
            let parsed = serde_saphyr::from_str(value).map_err(|e| Error::option(format!("--set {key}"), message::explain(&e, value, value)))?;
            recipe.with(key, &parsed, "--set")
        })
    }

    /// The recipe with its paths resolved against its folder.
    fn resolved(mut self, path: &Path) -> Recipe {
        let folder = path.parent().unwrap_or(Path::new(""));
        self.model = files::resolve(folder, &self.model);
        #[cfg(feature = "run")]
        self.data.resolve(folder);
        self.passes.iter_mut().for_each(|step| step.pass_mut().resolve(folder));
        self.export.iter_mut().for_each(|export| export.format_mut().resolve(folder));
        self.output = self.output.map(|output| files::resolve(folder, &output));
        self
    }

    /// The recipe with one value replaced.
    fn with(&self, key: &str, value: &Value, flag: &str) -> Result<Recipe> {
        let example = key.split('.').rev().find_map(crate::yaml_text::example_of).map_or_else(String::new, |example| format!("; example: `{example}`"));
        let wrong = |e: serde_json::Error| Error::option(format!("{flag} {key}={}", plain(value)), message::explain_json(&e) + &example);
        // Serializing includes defaults, so that options that the file does not contain can be set.
        let mut values = serde_json::to_value(self).map_err(wrong)?;
        let refused = |reason: String| Error::option(format!("{flag} {key}"), reason);
        let unset = unset_option(&values, key, value).map_err(refused)?;
        set_value(&mut values, unset.as_deref().unwrap_or(key), value).map_err(refused)?;
        serde_json::from_value(values).map_err(wrong)
    }

    /// The recipe as YAML, including defaults.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).unwrap_or_default()
    }
}

/// Combines each variant with each value of each key.
fn vary<'v>(mut variants: Vec<Variant>, sweep: impl Iterator<Item = (&'v String, &'v Vec<Value>)>) -> Result<Vec<Variant>> {
    for (key, values) in sweep {
        if key == "output" {
            return Err(Error::option("sweep output", "is not possible: every run writes to its own folder inside `output`; sweep another key"));
        }
        if values.is_empty() || variants.len().saturating_mul(values.len()) > MAX_VARIANTS {
            return Err(Error::option(format!("sweep {key}"), format!("has no value, or results in more than {MAX_VARIANTS} runs")));
        }
        let mut more = Vec::new();
        for variant in &variants {
            for value in values {
                let recipe = variant.recipe.with(key, value, "sweep")?;
                let parts = [variant.name.clone(), format!("{key}={}", plain(value))];
                more.push(Variant { name: parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(","), recipe });
            }
        }
        variants = more;
    }
    Ok(variants)
}

fn located(path: &Path, text: &str, error: serde_saphyr::Error) -> Error {
    Error::Recipe { path: path.to_owned(), message: message::explain(&error, &path.to_string_lossy(), text) }
}

/// A value as text that is safe in the name of a folder.
fn plain(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.chars().map(|c| if c.is_alphanumeric() || "._-+:".contains(c) { c } else { '_' }).collect()
}

/// Sets the value at a path such as `a.b.0.c`. The name of a pass or format selects its entry in the list, as
/// in `prune-unstructured.amount`. An option that only one entry has needs no path: `amount`.
fn set_value(values: &mut Value, key: &str, value: &Value) -> Result<(), String> {
    let option = if values.get(key).is_some() { None } else { option_of(values, key)? };
    let key = option.as_deref().unwrap_or(key);
    let parts: Vec<&str> = key.split('.').collect();
    let Some((last, parents)) = parts.split_last() else { return Err("no key".into()) };
    let mut parts = parents.to_vec();
    if let Some(list) =
        parents.first().and_then(|first| ["passes", "export"].into_iter().find(|list| values.get(first).is_none() && find(values.get(list), first).is_some()))
    {
        parts.insert(0, list);
    }
    if let (Value::Object(map), Some(first @ ("data" | "evaluate"))) = (&mut *values, parts.first().copied()) {
        map.entry(first).or_insert_with(|| Value::Object(serde_json::Map::new()));
    }
    let missing = parts.first().filter(|first| values.get(**first).is_none());
    let near = missing.and_then(|first| nearest_name(values, first)).map_or(String::new(), |near| format!("; did you mean `{near}`?"));
    let (mut at, mut list) = (values, "");
    for part in parts {
        if let Value::Array(items) = at {
            let mut named = (0..items.len()).filter(|index| items.get(*index).is_some_and(|item| item.get(part).is_some()));
            let index = part.parse().ok().filter(|i| *i < items.len()).or_else(|| named.next());
            if let (Some(first), Some(_)) = (index, named.next()) {
                return Err(format!("there are several `{part}`: select one by its index, such as `{list}.{first}.{part}.{last}` for the first one"));
            }
            at = index.and_then(|index| items.get_mut(index)).ok_or_else(|| format!("the list has no entry `{part}`"))?;
            if part.parse::<usize>().is_err() {
                at = at.get_mut(part).ok_or_else(|| format!("no `{part}`"))?;
            }
        } else {
            at = at.get_mut(part).ok_or_else(|| format!("the recipe has no `{part}`{near}"))?;
        }
        list = part;
    }
    if at.is_null() {
        *at = Value::Object(serde_json::Map::new());
    }
    match at {
        Value::Object(map) => drop(map.insert((*last).to_owned(), value.clone())),
        Value::Array(items) => {
            let slot = last.parse::<usize>().ok().and_then(|i| items.get_mut(i)).ok_or_else(|| format!("the list has no entry `{last}`"))?;
            *slot = value.clone();
        }
        _ => return Err(format!("the value that contains `{last}` is neither a map nor a list")),
    }
    Ok(())
}

/// The entries of passes and formats: the path of each, and its options.
fn entries(values: &Value) -> impl Iterator<Item = (String, &Value)> {
    let lists = ["passes", "export"].into_iter().filter_map(move |list| Some((list, values.get(list)?.as_array()?)));
    let indexed = lists.flat_map(|(list, entries)| entries.iter().enumerate().map(move |(index, entry)| (list, index, entry)));
    indexed.flat_map(|(list, index, entry)| {
        let named = entry.as_object().into_iter().flatten();
        named.map(move |(name, options)| (format!("{list}.{index}.{name}"), options))
    })
}

/// Path of an option that exactly one pass or format has.
fn option_of(values: &Value, key: &str) -> Result<Option<String>, String> {
    let found: Vec<String> = entries(values).filter(|(_, options)| options.get(key).is_some()).map(|(path, _)| format!("{path}.{key}")).collect();
    if let (true, Some(near)) = (found.is_empty(), nearest_option(values, key)) {
        return Err(format!("unknown option `{key}`; did you mean `{near}`?"));
    }
    only(found)
}

/// Path of an option without a value that exactly one pass or format accepts.
fn unset_option(values: &Value, key: &str, value: &Value) -> Result<Option<String>, String> {
    // Keys of the recipe and options with values need no search.
    if key.contains('.') || values.get(key).is_some() || entries(values).any(|(_, options)| options.get(key).is_some()) {
        return Ok(None);
    }
    let is_unknown = |e: serde_json::Error| e.to_string().starts_with(&format!("unknown field `{key}`"));
    let is_accepted = |parent: &str| {
        let mut changed = values.clone();
        let inner = if parent.is_empty() { Some(&mut changed) } else { changed.pointer_mut(&format!("/{}", parent.replace('.', "/"))) };
        match inner {
            Some(Value::Object(options)) => drop(options.insert(key.to_owned(), value.clone())),
            Some(options) if options.is_null() => *options = serde_json::json!({ key: value }),
            _ => return false,
        }
        !serde_json::from_value::<Recipe>(changed).is_err_and(is_unknown)
    };
    if is_accepted("") {
        return Ok(None);
    }
    only(entries(values).filter(|(path, _)| is_accepted(path)).map(|(path, _)| format!("{path}.{key}")).collect())
}

/// The only path in a list of at most one.
fn only(mut found: Vec<String>) -> Result<Option<String>, String> {
    if found.len() > 1 { Err(format!("is an option of several entries: {}", found.join(", "))) } else { Ok(found.pop()) }
}

/// The option of a pass or format with the most similar name, if it is similar enough.
fn nearest_option(values: &Value, key: &str) -> Option<String> {
    similar(key, entries(values).filter_map(|(_, options)| options.as_object()).flat_map(|options| options.keys()))
}

/// The key of a recipe, or the pass or format in it, that is spelled almost like this.
fn nearest_name(values: &Value, name: &str) -> Option<String> {
    let entries = ["passes", "export"].into_iter().flat_map(|list| values.get(list).and_then(Value::as_array).into_iter().flatten());
    similar(name, entries.chain([values]).filter_map(Value::as_object).flat_map(|entry| entry.keys()))
}

fn similar<'n>(name: &str, names: impl Iterator<Item = &'n String>) -> Option<String> {
    let near = names.map(|other| (strsim::jaro_winkler(other, name), other)).filter(|(similarity, _)| *similarity > 0.9);
    near.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other.clone())
}

fn find<'v>(list: Option<&'v Value>, name: &str) -> Option<&'v Value> {
    list?.as_array()?.iter().find_map(|item| item.get(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "model: m\npasses:\n  - prune-unstructured: { amount: 0.5 }\n  - cast: { to: f16 }\nexport:\n  - safetensors\n";

    #[test]
    fn yaml_and_back() {
        let recipe = Recipe::parse(TEXT, Path::new("r.yaml")).unwrap();
        assert_eq!(Recipe::parse(&recipe.to_yaml(), Path::new("r.yaml")).unwrap(), recipe);
        assert_eq!(recipe.passes.len(), 2);
    }

    #[test]
    fn a_bare_name_means_default_options() {
        let parse = |passes: &str| Recipe::parse(&format!("model: m\npasses:\n  - {passes}\n"), Path::new("r.yaml"));
        let full = parse("cast: {}").unwrap();
        assert_eq!(parse("cast").unwrap(), full);
        assert_eq!(parse("cast:").unwrap(), full);
        let two = parse("cast: {}\n    quantize-dynamic: {}").unwrap_err().to_string();
        assert!(two.contains("`quantize-dynamic` is a second pass in one entry"), "{two}");
    }

    #[test]
    fn one_runtime_needs_no_list() {
        let loads = |text: &str| Recipe::parse(&format!("model: m\nloads: {text}\n"), Path::new("r.yaml")).map(|recipe| recipe.loads);
        assert_eq!(loads("vllm").unwrap(), loads("[vllm]").unwrap());
        assert!(loads("vlm").unwrap_err().to_string().contains("unknown runtime `vlm`"));
    }

    #[test]
    fn mistakes_are_located() {
        let error = |text: &str| Recipe::parse(text, Path::new("r.yaml")).unwrap_err().to_string();
        let typo = error("model: m\npasses:\n  - prune-unstructured: { amuont: 0.5 }\n");
        assert!(typo.contains("3") && typo.contains("amuont") && typo.contains("`amount`"), "{typo}");
        let name = error("model: m\npasses:\n  - prune: {}\n");
        assert!(name.contains("prune") && name.contains("prune-unstructured"), "{name}");
        let range = error("model: m\npasses:\n  - prune-unstructured:\n      amount: 1.5\n");
        assert!(range.contains("1.5") && range.contains("4"), "{range}");
        let format = error("model: m\nexport: [safetensor]\n");
        assert!(format.contains("safetensor") && format.contains("`safetensors`"), "{format}");
        assert!(error("passes: []\n").contains("model"));
    }

    #[test]
    fn values_can_be_overridden() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.yaml");
        std::fs::write(&path, TEXT).unwrap();
        let set = |pairs: &[(&str, &str)]| Recipe::open(&path, &pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Vec<_>>());
        let recipe = set(&[("prune-unstructured.amount", "0.25"), ("seed", "7"), ("passes.1.cast.to", "bf16"), ("output", "out")]).unwrap();
        assert_eq!(recipe.seed, 7);
        // Paths in the file are relative to its folder, paths on the command line to the working directory.
        assert_eq!((&recipe.model, recipe.output.as_deref()), (&folder.path().join("m"), Some(Path::new("out"))));
        assert!(set(&[("data.evaluation", "{ arrays: a.npz }")]).unwrap().to_yaml().contains("a.npz"));
        assert!(recipe.to_yaml().contains("0.25") && recipe.to_yaml().contains("bf16"));
        assert!(set(&[("safetensors.layout", "sparse")]).unwrap().to_yaml().contains("sparse"));
        assert!(set(&[("cast.to", "f8")]).unwrap_err().to_string().starts_with("--set cast.to=f8: unknown variant `f8`"));
        assert!(set(&[("cast.t", "f16")]).unwrap_err().to_string().contains("unknown key `t`, did you mean `to`?"));
        assert!(set(&[("quantize.amount", "1")]).unwrap_err().to_string().contains("no `quantize`"));
        assert!(set(&[("passes.7.cast.to", "f16")]).is_err());
        assert!(set(&[("seed", "x")]).is_err());
        assert!(set(&[("amont", "1")]).unwrap_err().to_string().contains("did you mean `amount`?"));
        assert!(set(&[("sed", "1")]).unwrap_err().to_string().contains("sed"));
        assert!(set(&[("amount", "0.75")]).unwrap().to_yaml().contains("0.75"));
        // Options without a value, of passes without options.
        std::fs::write(&path, "model: m\npasses: [prune-unstructured, cast]\n").unwrap();
        assert_eq!(set(&[("amount", "0.3")]).unwrap(), set(&[("prune-unstructured.amount", "0.3")]).unwrap());
        assert!(set(&[("amount", "3.5")]).unwrap_err().to_string().starts_with("--set amount=3.5: "));
        assert!(set(&[("amuont", "1")]).is_err() && set(&[("memory", "8GB")]).unwrap().memory.is_some());
    }

    #[test]
    fn a_sweep_expands_to_recipes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.yaml");
        std::fs::write(&path, format!("{TEXT}sweep: {{ amount: [0.25, 0.75] }}\n")).unwrap();
        let sweep = |key: &str, values: &[&str]| (key.to_owned(), values.iter().map(|v| serde_saphyr::from_str(v).unwrap()).collect::<Vec<Value>>());
        let names = |variants: &[Variant]| variants.iter().map(|variant| variant.name.clone()).collect::<Vec<_>>();
        let variants = Recipe::open_variants(&path, &[], &[]).unwrap();
        assert_eq!(names(&variants), ["amount=0.25", "amount=0.75"]);
        assert!(variants.iter().all(|v| v.recipe.sweep.is_empty() && v.recipe.model == folder.path().join("m")));
        assert!(variants[1].recipe.to_yaml().contains("0.75"));
        let variants = Recipe::open_variants(&path, &[], &[sweep("cast.to", &["f16", "bf16"])]).unwrap();
        assert_eq!(names(&variants), ["amount=0.25,cast.to=f16", "amount=0.25,cast.to=bf16", "amount=0.75,cast.to=f16", "amount=0.75,cast.to=bf16"]);
        let one = Recipe::open_variants(&path, &[], &[sweep("amount", &["0.5"])]).unwrap();
        assert_eq!(names(&one), ["amount=0.5"]);
        let refused = |key: &str, values: &[&str]| Recipe::open_variants(&path, &[], &[sweep(key, values)]).unwrap_err().to_string();
        assert!(refused("amount", &[]).contains("has no value"));
        assert!(refused("amount", &["2.5"]).starts_with("sweep amount=2.5: "));
        assert!(refused("output", &["a", "b"]).starts_with("sweep output: is not possible"));
        assert!(refused("amount", &["0.5", "0.5"]).contains("the output folder of two runs"));
        assert!(refused("nothing.at", &["1"]).contains("no `nothing`"));
        std::fs::write(&path, "model: m\npasses: [cast: {}, cast: {}]\n").unwrap();
        assert!(refused("to", &["f16"]).contains("several entries: passes.0.cast.to, passes.1.cast.to"));
        assert!(refused("cast.to", &["f16"]).contains("`passes.0.cast.to` for the first one"));
    }
}

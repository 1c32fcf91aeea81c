//! Outputs of every family compared with PyTorch, on the models of `scripts/goldens models`.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::exec::{Executor, Inputs, Parameters, Residence};
use compress_engine::model::Config;
use compress_graph::arch::{self, Settings};
use compress_graph::ir::{Builder, Graph, check};
use serde_json::{Map, Value};

const TOLERANCE: f32 = 1e-4;

/// The largest difference of each output of a model from those in a file of its folder.
pub fn differences(folder: &Path, golden: &str) -> compress::Result<Vec<(String, f32)>> {
    let model = Model::open(folder)?;
    let graph = model.graph()?;
    check(&graph)?;
    let text = graph.to_string();
    assert!(text.parse::<Graph>()?.to_string() == text, "the text form of {}", folder.display());
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let parameters = Parameters::load(&graph, &model.weights, &device(), DType::F32, Residence::Computed, &work)?;
    let golden = candle_core::safetensors::load(folder.join(golden), &Device::Cpu).unwrap();
    let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
    let outputs = Executor::new(&graph, parameters, device()).run(&inputs)?;
    let mut found = Vec::new();
    for (name, expected) in golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("out/")?, t))) {
        // transformers keeps two axes of size one after the pooled channels of a ResNet.
        let expected = &if expected.rank() == 4 && name == "pooler_output" { expected.flatten_from(1).unwrap() } else { expected.clone() };
        let Some(ours) = outputs.get(name).filter(|t| t.dims() == expected.dims()) else {
            found.push((format!("{name}, which is not among {:?}", outputs.iter().map(|(n, t)| (n, t.dims())).collect::<Vec<_>>()), f32::NAN));
            continue;
        };
        let worst: f32 = distance(&ours.to_device(&Device::Cpu).unwrap(), expected, golden.get("in/attention_mask"));
        found.push((name.to_owned(), worst));
    }
    Ok(found)
}

/// Largest difference over all tokens except padding.
fn distance(ours: &Tensor, expected: &Tensor, mask: Option<&Tensor>) -> f32 {
    let mut difference = (ours - expected).unwrap().abs().unwrap();
    if let Some(mask) = mask.filter(|m| difference.rank() == 3 && m.dims() == &difference.dims()[..2]) {
        difference = difference.broadcast_mul(&mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap();
    }
    difference.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// The same model with the configuration of transformers 4, if it exists.
fn with_older_config(folder: &Path) -> Option<tempfile::TempDir> {
    let config = folder.join("config-4.json");
    config.is_file().then(|| {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(config, copy.path().join("config.json")).unwrap();
        for name in ["model.safetensors", "golden.safetensors"] {
            std::os::unix::fs::symlink(folder.join(name), copy.path().join(name)).unwrap();
        }
        copy
    })
}

#[test]
fn every_family_has_the_outputs_of_pytorch() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 30, "the goldens are missing");
    let mut failures = Vec::new();
    for name in &names {
        let place = folder.join(name);
        let older = with_older_config(&place);
        let mut runs = vec![(place.as_path(), "golden.safetensors")];
        runs.extend(place.join("golden-short.safetensors").is_file().then_some((place.as_path(), "golden-short.safetensors")));
        runs.extend(older.as_ref().map(|folder| (folder.path(), "golden.safetensors")));
        for (place, golden) in runs {
            match differences(place, golden) {
                Ok(found) => {
                    assert!(!found.is_empty(), "{name} has no outputs");
                    failures.extend(
                        found
                            .into_iter()
                            .filter(|(_, worst)| *worst > TOLERANCE || worst.is_nan())
                            .map(|(output, worst)| format!("{name} {golden} {output}: {worst:e}")),
                    );
                }
                Err(e) => failures.push(format!("{name}: {e}")),
            }
        }
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), names.len(), failures.join("\n"));
}

/// Folders of sentence-transformers specify the class in which an encoder was trained.
#[test]
fn an_encoder_with_the_class_of_a_head_is_an_encoder() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let heads =
        [("bert", "Bert"), ("roberta", "Roberta"), ("distilbert", "DistilBert"), ("mpnet", "MPNet"), ("modernbert", "ModernBert"), ("deberta", "DebertaV2")];
    for (name, class) in heads {
        let copy = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(folder.join(name).join("config.json")).unwrap();
        let changed = text.replace(&format!("{class}Model"), &format!("{class}ForMaskedLM"));
        assert_ne!(text, changed);
        std::fs::write(copy.path().join("config.json"), changed).unwrap();
        for file in ["model.safetensors", "golden.safetensors"] {
            std::os::unix::fs::symlink(folder.join(name).join(file), copy.path().join(file)).unwrap();
        }
        let found = differences(copy.path(), "golden.safetensors").unwrap();
        assert!(found.iter().all(|(_, worst)| *worst < TOLERANCE), "{name}: {found:?}");
    }
}

/// The bias of a head has two names. If weights are not tied, transformers 4 stores and reads only the
/// shared name.
#[test]
fn the_bias_of_a_head_is_read_by_either_name() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/bert-masked-lm-untied");
    let [own, shared] = ["cls.predictions.decoder.bias", "cls.predictions.bias"];
    for (ties, stored, read) in [
        ("true", &[own, shared][..], Some(own)),
        ("true", &[own], Some(own)),
        ("true", &[shared], Some(shared)),
        ("false", &[own, shared], Some(own)),
        ("false", &[own], Some(own)),
        ("false", &[shared], Some(shared)),
        ("false", &[], None),
    ] {
        let copy = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        std::fs::write(copy.path().join("config.json"), config.replace("\"tie_word_embeddings\": true", &format!("\"tie_word_embeddings\": {ties}"))).unwrap();
        let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
        tensors.retain(|name, _| ![own, shared].contains(&name.as_str()) || stored.contains(&name.as_str()));
        candle_core::safetensors::save(&tensors, copy.path().join("model.safetensors")).unwrap();
        match (Model::open(copy.path()).unwrap().graph(), read) {
            (Ok(graph), Some(read)) => {
                let found: Vec<&str> = graph.params().map(|(_, value)| value.name.as_str()).filter(|name| [own, shared].contains(name)).collect();
                assert_eq!(found, [read], "{ties} {stored:?}");
            }
            (Err(e), None) => assert!(e.to_string().contains(own), "{e}"),
            (found, read) => panic!("{ties} {stored:?}: {:?} instead of {read:?}", found.err()),
        }
    }
}

/// Published T5 encoders are declared as encoder-decoder models, DeBERTa configurations list attention types
/// in one string, and those of Nemotron-H the types of layers. transformers maps a key of Granite 4 to
/// another.
#[test]
fn equivalent_configurations_are_accepted() {
    let types = "\"layers_block_type\": [\n    \"linear_attention\",\n    \"mlp\",\n    \"full_attention\",\n    \"moe\"\n  ]";
    for (name, before, after) in [
        ("t5-encoder", "\"is_encoder_decoder\": false", "\"is_encoder_decoder\": true"),
        ("deberta", "[\n    \"p2c\",\n    \"c2p\"\n  ]", "\"P2C | c2p\""),
        ("nemotron-h", types, "\"hybrid_override_pattern\": \"M-*E\", \"num_hidden_layers\": 4"),
        ("granite-hybrid", "\"layer_types\"", "\"layers_block_type\""),
        ("nemotron-h", "\"conv_kernel\": 3", "\"mamba_d_conv\": 3, \"conv_kernel\": 4"),
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
        let copy = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let changed = text.replace(before, after);
        assert_ne!(text, changed);
        std::fs::write(copy.path().join("config.json"), changed).unwrap();
        for file in ["model.safetensors", "golden.safetensors"] {
            std::os::unix::fs::symlink(folder.join(file), copy.path().join(file)).unwrap();
        }
        let found = differences(copy.path(), "golden.safetensors").unwrap();
        assert!(!found.is_empty() && found.iter().all(|(_, worst)| *worst < TOLERANCE), "{name}: {found:?}");
    }
}

#[test]
fn missing_sizes_have_the_defaults_of_transformers() {
    #[derive(serde::Deserialize)]
    struct Row {
        config: Map<String, Value>,
        tensors: usize,
        elements: usize,
        names: BTreeSet<String>,
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/defaults.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let rows: Vec<Row> = serde_json::from_value(golden["models"].clone()).unwrap();
    assert!(rows.len() > 5);
    for Row { config, tensors, elements, names } in rows {
        let graph = arch::build(&Settings::new(&config), &[], Builder::unchecked()).unwrap();
        let sizes = graph.params().map(|(_, value)| value.ty.shape.iter().map(|dim| dim.fixed().unwrap()).product::<usize>());
        let sizes: Vec<usize> = sizes.collect();
        assert_eq!((sizes.len(), sizes.iter().sum::<usize>()), (tensors, elements), "{config:?}");
        // From version 5, transformers omits the prefix of a separate tower.
        // It also omits the name of the family if the model is not part of another one.
        let family = format!("{}.", config["model_type"].as_str().unwrap());
        let put_before =
            ["vision_model.", "text_model.", &family].into_iter().filter(|part| !names.iter().any(|name| name.starts_with(part))).collect::<Vec<_>>();
        let of_tower = |name: &str| put_before.iter().find_map(|part| name.strip_prefix(part)).unwrap_or(name).to_owned();
        let digit = |c: &u8| c.is_ascii_digit();
        let without_numbers =
            |name: String| name.as_bytes().chunk_by(|a, b| digit(a) && digit(b)).map(|run| if digit(&run[0]) { '0' } else { run[0] as char }).collect();
        let found: BTreeSet<String> = graph.params().map(|(_, value)| without_numbers(of_tower(&value.name))).collect();
        assert_eq!(found, names, "{config:?}");
    }
}

/// Granite 4 has the types of layers under one of two keys. transformers prefers `layers_block_type` to
/// `layer_types`.
#[test]
fn errors_name_the_key_with_the_types_of_layers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/granite-hybrid");
    let (right, wrong) = (serde_json::json!(["mamba", "attention", "mamba"]), serde_json::json!(["mamba", "window", "mamba"]));
    let error = |types: &[(&str, &Value)]| {
        let mut model = Model::open(&folder).unwrap();
        let mut values = model.config.values().clone();
        values.shift_remove("layer_types").unwrap();
        values.extend(types.iter().map(|(key, types)| ((*key).to_owned(), (*types).clone())));
        model.config = Config::from_values(values);
        model.graph().err().map(|e| e.to_string()).unwrap_or_default()
    };
    for key in ["layer_types", "layers_block_type"] {
        assert_eq!(error(&[(key, &right)]), "");
        assert!(error(&[(key, &wrong)]).contains(&format!("`{key}` of layer 1")), "{}", error(&[(key, &wrong)]));
    }
    assert_eq!(error(&[("layer_types", &wrong), ("layers_block_type", &right)]), "");
}

/// If a folder with both towers specifies the class of one of them, the outputs are those of that tower.
#[test]
fn the_class_selects_the_tower_and_its_projection() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/clip");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
    let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
    for (class, wanted) in [
        ("CLIPTextModelWithProjection", ["last_hidden_state", "text_embeds"]),
        ("CLIPVisionModelWithProjection", ["image_embeds", "last_hidden_state"]),
        ("CLIPTextModel", ["last_hidden_state", "pooler_output"]),
        ("CLIPVisionModel", ["last_hidden_state", "pooler_output"]),
    ] {
        let copy = tempfile::tempdir().unwrap();
        std::fs::write(copy.path().join("config.json"), text.replace("CLIPModel", class).replace("\"projection_dim\": 512", "\"projection_dim\": 12")).unwrap();
        std::os::unix::fs::symlink(folder.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        let model = Model::open(copy.path()).unwrap();
        let graph = model.graph().unwrap();
        let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
        let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
        let own: Inputs =
            inputs.iter().filter(|(name, _)| graph.inputs().any(|(_, value)| value.name == **name)).map(|(n, t)| (n.clone(), t.clone())).collect();
        let found = Executor::new(&graph, parameters, Device::Cpu).run(&own).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), wanted, "{class}");
        for (name, vectors) in found.iter().filter(|(name, _)| name.ends_with("_embeds")) {
            // With both towers, embeddings are normalized.
            let length = vectors.sqr().unwrap().sum_keepdim(1).unwrap().sqrt().unwrap();
            assert!(distance(&vectors.broadcast_div(&length).unwrap(), &golden[&format!("out/{name}")], None) < TOLERANCE, "{class}");
        }
    }
}

/// Outlier channels use most of the quantization range of a token.
#[test]
fn int8_activations_with_outliers_match_the_consumer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/int8/llama-outliers");
    let found = differences(&folder, "golden.safetensors").unwrap();
    assert!(found.len() == 1 && found.iter().all(|(_, worst)| *worst < TOLERANCE), "{found:?}");
}

/// Three checksums over the first sample of each output, as in `scripts/goldens keys`.
fn numbers(graph: &Graph, model: &Model, folder: &Path) -> BTreeMap<String, Vec<f64>> {
    let number = |tensor: &Tensor| {
        let values = tensor.get(0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        [0.7, 1.0, 2.3].map(|pitch| values.iter().enumerate().map(|(i, x)| f64::from(*x) * (pitch * i as f64).cos()).sum()).to_vec()
    };
    runs(graph, model, folder).unwrap().iter().map(|(name, tensor)| (name.clone(), number(tensor))).collect()
}

/// Inputs of a golden model.
fn runs(graph: &Graph, model: &Model, folder: &Path) -> compress::Result<BTreeMap<String, Tensor>> {
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let parameters = Parameters::load(graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
    let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
    let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
    Executor::new(graph, parameters, Device::Cpu).run(&inputs)
}

/// Tolerance of the checksums. `scripts/goldens keys` ensures that keys with an effect change them by
/// more than twice as much.
const ROUNDING: f64 = 8e-4;

/// Behavior of a version of transformers for a model of `tests/golden/models` when a configuration key
/// is changed.
#[derive(serde::Deserialize)]
struct Keys {
    transformers: String,
    model: String,
    class: String,
    beyond: Vec<String>,
    usual: BTreeMap<String, Vec<f64>>,
    same: BTreeMap<String, Value>,
    other: BTreeMap<String, (Value, Answer)>,
    absent: BTreeMap<String, Answer>,
}

#[derive(serde::Deserialize, PartialEq, Debug)]
#[serde(untagged)]
enum Answer {
    Fails(String),
    Outputs(BTreeMap<String, Vec<f64>>),
}

/// Keys of a configuration; those of a tower have its name as a prefix.
fn names(config: &Map<String, Value>) -> Vec<String> {
    let of = |(key, value): (&String, &Value)| match value.as_object() {
        Some(tower) if key.ends_with("_config") => tower.keys().map(|inner| format!("{key}.{inner}")).collect(),
        _ => vec![key.clone()],
    };
    config.iter().flat_map(of).collect()
}

/// The configuration with another value of a key, or without the key.
fn with_key(config: &Map<String, Value>, key: &str, value: Option<&Value>) -> Map<String, Value> {
    let mut changed = config.clone();
    let (values, name) = match key.split_once('.') {
        Some((tower, name)) => (changed[tower].as_object_mut().unwrap(), name),
        None => (&mut changed, key),
    };
    match value {
        Some(value) => values.insert(name.to_owned(), value.clone()),
        None => values.shift_remove(name),
    };
    changed
}

/// A model of the table and its unchanged outputs.
struct Walk<'k> {
    keys: &'k Keys,
    folder: std::path::PathBuf,
    config: Map<String, Value>,
    graph: String,
    usual: BTreeMap<String, Vec<f64>>,
}

impl Walk<'_> {
    /// The model with this configuration.
    fn write(&self, config: &Map<String, Value>) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        std::fs::write(copy.path().join("config.json"), serde_json::to_string(config).unwrap()).unwrap();
        std::os::unix::fs::symlink(self.folder.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        copy
    }

    /// Differences to the behavior of transformers for a configuration with a changed key.
    fn with(&self, config: &Map<String, Value>, key: &str, answer: Option<&Answer>) -> Option<String> {
        let copy = self.write(config);
        let built = Model::open(copy.path()).and_then(|model| Ok((model.graph_and_unknown_keys()?, model)));
        let ((graph, unknown), model) = match built {
            // A rejection for another reason than the key is accepted.
            Err(e) => {
                let name = key.split('.').next_back().unwrap();
                let family = arch::family(config["model_type"].as_str().unwrap()).unwrap();
                if answer.is_none() && family.keys.harmless.contains(&name) && e.to_string().contains(&format!("`{key}`")) {
                    return Some(format!("is harmless, and refused: {e}"));
                }
                return (answer != Some(&Answer::Fails("fails".into())) && !e.to_string().contains(name)).then(|| format!("is refused without its name: {e}"));
            }
            Ok(found) => found,
        };
        let harmless = answer.is_none() && self.keys.beyond.iter().any(|beyond| beyond == key);
        if unknown.contains(&format!("config.json: {key}")) && !harmless {
            return Some("is not known".into());
        }
        let inputs = |text: &str| text.lines().filter(|line| line.starts_with("input ")).map(str::to_owned).collect::<Vec<_>>();
        if key.split('.').next_back() == Some("image_size") && inputs(&graph.to_string()) != inputs(&self.graph) {
            // The changed key requires other image sizes, so the golden images are rejected.
            return runs(&graph, &model, &self.folder).is_ok().then(|| "is the size of images, and others are taken".into());
        }
        let found = if graph.to_string() == self.graph { self.usual.clone() } else { numbers(&graph, &model, &self.folder) };
        let expected = match answer {
            None => &self.keys.usual,
            Some(Answer::Outputs(outputs)) => outputs,
            Some(Answer::Fails(_)) => return Some("is taken, transformers fails".into()),
        };
        let far = expected.iter().find(|(name, wanted)| found.get(*name).is_none_or(|found| found.iter().zip(*wanted).any(|(a, b)| (a - b).abs() > ROUNDING)));
        far.map(|(name, wanted)| format!("{name}: {wanted:?}, found {:?}", found.get(name)))
    }
}

/// transformers 4 ignores a stored head that the configuration ties; transformers 5 and this crate use
/// it. Without a setting, a head that is not stored is tied to the embedding in this crate and random in
/// transformers.
const TIE: &str = "tie_word_embeddings";
/// Prefixes of model names and keys for which transformers 4 differs from transformers 5. In transformers 4,
/// all layers of Qwen2-MoE use sliding windows or none, independent of their types, Granite, Cohere,
/// Qwen3-Next and Llama 4 reject the older key `type` of `rope_scaling`, which other families accept, the
/// convolution of Qwen3-Next always applies SiLU, routers of GLM-4.5 select experts of other groups before
/// those with a negative score, Granite 4 has no limits of step sizes, and attention of Llama 4 has no
/// biases.
const NEWER: [(&str, &str); 12] = [
    ("", TIE),
    ("", "is_causal"),
    ("qwen2-moe", "use_sliding_window"),
    ("t5", "scale_decoder_outputs"),
    ("granite", "rope_scaling"),
    ("granite-hybrid", "time_step_limit"),
    ("cohere", "rope_scaling"),
    ("qwen3-next", "rope_scaling"),
    ("qwen3-next", "hidden_act"),
    ("glm4-moe", "num_experts_per_tok"),
    ("llama4", "attention_bias"),
    ("llama4", "rope_scaling"),
];

#[test]
fn every_key_of_transformers_is_used_harmless_or_refused() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let table: Vec<Keys> = serde_json::from_str(&std::fs::read_to_string(golden.join("config-keys.json")).unwrap()).unwrap();
    assert!(table.len() > 30, "the table is missing");
    let mut failures = Vec::new();
    for keys in &table {
        let folder = golden.join("models").join(&keys.model);
        let older = folder.join("config-4.json");
        let place = if keys.transformers == "4" && older.is_file() { older } else { folder.join("config.json") };
        let mut config: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(place).unwrap()).unwrap();
        config.insert("architectures".into(), [keys.class.as_str()].into());
        let walk = Walk { keys, folder, config, graph: String::new(), usual: BTreeMap::new() };
        let copy = walk.write(&walk.config);
        let model = Model::open(copy.path()).unwrap();
        let graph = model.graph().unwrap();
        let walk = Walk { graph: graph.to_string(), usual: numbers(&graph, &model, &walk.folder), ..walk };
        let mut tell = |key: &str, what: &str, complaint: Option<String>| {
            failures.extend(complaint.map(|complaint| format!("transformers {}, {}: `{key}` {what}: {complaint}", keys.transformers, keys.model)));
        };
        let others = keys.same.iter().map(|(key, value)| (key, value, None)).chain(keys.other.iter().map(|(key, (value, answer))| (key, value, Some(answer))));
        for (key, value, answer) in
            others.filter(|(key, ..)| keys.transformers != "4" || !NEWER.iter().any(|(model, newer)| key == newer && keys.model.starts_with(model)))
        {
            let changed = with_key(&walk.config, key, Some(value));
            tell(key, &format!("of {value}"), walk.with(&changed, key, answer));
        }
        for key in names(&walk.config).iter().filter(|key| *key != TIE && (keys.same.contains_key(*key) || keys.other.contains_key(*key))) {
            let changed = with_key(&walk.config, key, None);
            tell(key, "left out", walk.with(&changed, key, keys.absent.get(key)));
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}

//! Model cards of output folders, and scores in the form that the Hub reads.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use compress::contract::Target;
use compress::export::{Layout, Safetensors};
use compress::pass::{Cast, PruneUnstructured, Quantize, QuantizeDynamic};
use compress::pipeline::{PartIndex, verify};
use compress::prelude::*;
use serde_json::{Map, Value, json};

use crate::common::{DType, Desk, Output, Tensor, contents, pipeline, work, write};
use crate::contract::check;
use crate::low_bits::BYTE_LEVEL;

const CARD: &str = "README.md";

/// The card of a model on the Hub.
const SOURCE_CARD: &str = "---
license: apache-2.0
language: [\"no\", en]
library_name: transformers
pipeline_tag: text-generation
base_model: org/pico
datasets: [org/corpus]
tags: [safetensors, conversational]
---
# Pico

A small model.
";

/// A small Llama with a card.
fn model(desk: &Desk, card: &str) -> PathBuf {
    let path = desk.pico(DType::F32, 1);
    fs::write(path.join(CARD), card).unwrap();
    path
}

/// A small Llama without a tokenizer and without a card.
fn golden(desk: &Desk) -> PathBuf {
    copied(desk, "llama")
}

/// The configuration and the weights of a reference model.
fn copied(desk: &Desk, name: &str) -> PathBuf {
    let (from, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name), desk.path().join(name));
    fs::create_dir(&to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    to
}

fn quantize() -> Quantize {
    serde_json::from_value(json!({ "scheme": "W4A16" })).unwrap()
}

fn prune() -> PruneUnstructured {
    PruneUnstructured { amount: Some(Amount::fraction(0.5)), ..PruneUnstructured::default() }
}

fn run(desk: &Desk, input: &Path, pass: impl Into<Step>) -> Output {
    desk.run(input, pipeline().measure(false).pass(pass)).unwrap()
}

fn card(folder: &Path) -> String {
    fs::read_to_string(folder.join(CARD)).unwrap()
}

/// The metadata of a card.
fn metadata(card: &str) -> Map<String, Value> {
    let (yaml, _) = card.strip_prefix("---\n").unwrap().split_once("\n---\n").unwrap();
    serde_saphyr::from_str(yaml).unwrap()
}

/// Whether all files of an output are those of its report.
fn is_verified(folder: &Path) -> bool {
    work(|work| verify(folder, work)).unwrap().iter().all(|check| check.ok)
}

#[test]
fn a_card_states_the_origin_the_passes_and_the_runtimes() {
    let desk = Desk::new();
    let input = model(&desk, SOURCE_CARD);
    let output = desk.run(&input, pipeline().pass(quantize())).unwrap();
    let card = card(&output.path);
    let expected = json!({
        "license": "apache-2.0", "language": ["no", "en"], "base_model": ["org/pico"], "base_model_relation": "quantized",
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["compress", "compressed-tensors", "conversational"],
    });
    assert_eq!(Value::Object(metadata(&card)), expected, "{card}");
    // Readers of YAML 1.1 take the language for a boolean.
    assert!(card.contains("- \"no\"") || card.contains("- 'no'"), "{card}");
    for part in [
        "(https://huggingface.co/org/pico)",
        "1. Linear weights were quantized (`quantize`, `scheme: W4A16`, `method: rtn`",
        "): 14 weights.",
        "## Quality",
        "| `logits`: cosine, mean and minimum; SQNR |",
        "| weights | ",
        "| `model.safetensors` | safetensors |",
        "vllm serve path/to/model",
        "python -m sglang.launch_server",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "compress run recipe.yaml -o out",
        &output.report.model.blake3,
    ] {
        assert!(card.contains(part), "{part}\n{card}");
    }
    assert!(!card.contains("llama-server") && !card.contains("onnxruntime") && !card.contains("A small model"), "{card}");
    let notes = output.report.notes.join("\n");
    assert!(notes.contains("not carried over from the input: README.md (the output has its own model card"), "{notes}");
    assert!(output.report.carried.iter().any(|file| file.path == CARD) && is_verified(&output.path));
}

#[test]
fn formats_determine_the_metadata_and_the_runtimes() {
    let desk = Desk::new();
    let input = golden(&desk);
    fs::write(input.join(CARD), "# Llama\n").unwrap();
    fs::write(input.join("tokenizer.json"), BYTE_LEVEL).unwrap();
    let export = |name: &str| {
        // ONNX files of 32-bit floats do not benefit from values that were rounded to 16 bits.
        let pass = Cast { to: if name == "onnx" { FloatFormat::F32 } else { FloatFormat::F16 }, ..Cast::default() };
        let export = Export::from_name(name).unwrap();
        card(&desk.run(&input, pipeline().measure(false).pass(pass).export(export)).unwrap().path)
    };
    let (gguf, onnx) = (export("gguf"), export("onnx"));
    for (card, name, code) in [(&gguf, "gguf", "llama-server -m path/to/model/"), (&onnx, "onnx", "InferenceSession(\"path/to/model/model.onnx\")")] {
        let metadata = metadata(card);
        assert_eq!((&metadata["library_name"], &metadata["tags"]), (&json!(name), &json!(["compress", name])), "{card}");
        assert_eq!(metadata["pipeline_tag"], "text-generation");
        assert!(!metadata.contains_key("license") && !metadata.contains_key("base_model") && !metadata.contains_key("base_model_relation"));
        assert!(card.contains(code) && !card.contains("vllm serve"), "{card}");
        assert!(card.contains(&format!("was written in the format `{name}`")) && card.contains("The `README.md` of the source"), "{card}");
    }
    // No runtime loads a folder without a configuration.
    let weights = desk.weights(&[("a.weight".to_owned(), Tensor::random(DType::F32, &[32, 32], 1))].into());
    let card = card(&run(&desk, &weights, prune()).path);
    assert!(card.contains("compress densify") && metadata(&card).keys().eq(["tags"]), "{card}");
}

/// Cards and rules know the same files of tokenizers.
#[test]
fn a_card_has_code_for_runtimes_that_find_the_tokenizer() {
    let desk = Desk::new();
    let input = golden(&desk);
    let without = card(&run(&desk, &input, prune()).path);
    assert!(!without.contains("vllm serve") && !without.contains("sglang") && without.contains("AutoModelForCausalLM"), "{without}");
    assert!(!without.contains("AutoTokenizer"), "{without}");
    fs::write(input.join("tekken.json"), "{}").unwrap();
    let with = card(&run(&desk, &input, prune()).path);
    assert!(with.contains("vllm serve") && with.contains("sglang") && with.contains("AutoTokenizer"), "{with}");
}

/// Published configurations of Mamba 2 contain infinity, which JSON does not have.
#[test]
fn infinity_in_a_configuration_is_read_by_cards_and_rules() {
    let desk = Desk::new();
    let input = copied(&desk, "mamba2");
    let text = fs::read_to_string(input.join("config.json")).unwrap();
    let config = text.replace("{\n      \"__float__\": \"Infinity\"\n    }", "Infinity");
    assert_ne!(text, config);
    fs::write(input.join("config.json"), &config).unwrap();
    let output = run(&desk, &input, prune()).path;
    assert_eq!(fs::read_to_string(output.join("config.json")).unwrap(), config);
    assert!(card(&output).contains("AutoModelForCausalLM"), "{}", card(&output));
    let violations = check(&output, "transformers").violations;
    assert!(violations.is_empty(), "{violations:?}");
}

/// Threads, parts and the location of the folders do not change a card.
#[test]
fn the_same_run_writes_the_same_card() {
    let desk = Desk::new();
    let input = model(&desk, SOURCE_CARD);
    let copy = desk.path().join("elsewhere").join(input.file_name().unwrap());
    for (name, bytes) in contents(&input).into_iter().chain([(CARD.to_owned(), SOURCE_CARD.into())]) {
        fs::create_dir_all(copy.join(&name).parent().unwrap()).unwrap();
        fs::write(copy.join(name), bytes).unwrap();
    }
    let first = card(&desk.run(&input, pipeline().pass(quantize()).threads(1)).unwrap().path);
    assert_eq!(first, card(&desk.run(&copy, pipeline().pass(quantize()).threads(3)).unwrap().path));
    let (whole, merged) = (card(&run(&desk, &input, quantize()).path), desk.place());
    let pipeline = pipeline().measure(false).pass(quantize()).build().unwrap();
    for number in [1, 2] {
        pipeline.run_part(Model::open(&input).unwrap(), &merged, PartIndex::new(number, 2).unwrap()).unwrap();
    }
    pipeline.merge(Model::open(&input).unwrap(), &merged, false).unwrap();
    assert_eq!(whole, card(&merged));
}

#[test]
fn a_second_run_continues_the_card_of_the_first() {
    let desk = Desk::new();
    let first = run(&desk, &model(&desk, SOURCE_CARD), prune());
    let second = run(&desk, &first.path, quantize());
    let (before, after) = (metadata(&card(&first.path)), metadata(&card(&second.path)));
    assert_eq!((&before["base_model_relation"], &after["base_model_relation"]), (&json!("finetune"), &json!("quantized")));
    for key in ["license", "base_model", "pipeline_tag"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    assert_eq!(after["tags"], json!(["compress", "compressed-tensors", "conversational"]));
    let text = card(&second.path);
    let steps: Vec<&str> = text.lines().filter(|line| line.contains("weights.") && line.contains("`")).collect();
    assert!(matches!(steps[..], [first, second] if first.starts_with("1. Weights with the smallest") && second.starts_with("2. Linear")), "{text}");
    assert_eq!(text.matches("# pico, compressed").count(), 1, "{text}");
}

/// Sizes, quality and hashes are relative to the folder that the run has read.
#[test]
fn the_card_of_a_second_run_names_the_folder_of_the_first() {
    let desk = Desk::new();
    let measured = |input: &Path, pass: Step| desk.run(input, pipeline().pass(pass)).unwrap().path;
    let first = measured(&model(&desk, SOURCE_CARD), prune().into());
    let second = card(&measured(&first, quantize().into()));
    let name = first.file_name().unwrap().to_str().unwrap();
    for part in [
        format!("from `{name}`, an earlier result from [org/pico](https://huggingface.co/org/pico): "),
        format!("Compared with `{name}`, not with the original model."),
        format!("to the path of `{name}`."),
        format!("The BLAKE3 hash of the weights of `{name}` is `"),
    ] {
        assert!(second.contains(&part), "{part}\n{second}");
    }
    assert!(!card(&first).contains("earlier result") && !card(&first).contains("Compared with"), "{}", card(&first));
}

/// A layout is a step like a pass: after it, the weights have other encodings.
#[test]
fn a_card_states_a_layout_that_changes_encodings() {
    let desk = Desk::new();
    let quantized = run(&desk, &model(&desk, SOURCE_CARD), QuantizeDynamic::default());
    let with = |layout: Layout| card(&desk.run(&quantized.path, pipeline().measure(false).export(Safetensors::with_layout(layout))).unwrap().path);
    let steps = |card: &str| card.lines().filter(|line| line.starts_with(['1', '2', '3'])).map(str::to_owned).collect::<Vec<_>>();
    let dense = steps(&with(Layout::Dense));
    assert!(dense.len() == 2 && dense[0].contains("were quantized to int8"), "{dense:?}");
    assert_eq!(dense[1], "2. All weights were written as plain floats (`safetensors`, `layout: dense`).");
    assert!(steps(&with(Layout::Sparse))[1].starts_with("2. Weights with many zeros were written as a bitmask"));
    assert_eq!(steps(&with(Layout::Auto)), dense[..1]);
}

/// The card states the versions of `loads`, and the newest ones of other runtimes.
#[test]
fn a_card_states_the_versions_that_the_run_has_checked() {
    let desk = Desk::new();
    let input = model(&desk, SOURCE_CARD);
    let with = |targets: &[&str]| {
        let targets: Vec<Target> = targets.iter().map(|target| target.parse().unwrap()).collect();
        card(&desk.run(&input, pipeline().measure(false).pass(prune()).loads(targets)).unwrap().path)
    };
    let section = |versions: &str| format!("### vLLM\n\nComplies with the rules of {versions} (a static check).\n");
    let cases: [(&[&str], &str); 3] = [(&[], "version 0.33"), (&["vllm@0.11"], "version 0.11"), (&["vllm@0.11", "sglang", "vllm"], "versions 0.11, 0.33")];
    for (targets, versions) in cases {
        let card = with(targets);
        assert!(card.contains(&section(versions)) && card.matches("vllm serve").count() == 1, "{targets:?}: {card}");
        assert!(card.contains("### SGLang\n\nComplies with the rules of version 0.5 "), "{targets:?}: {card}");
    }
}

#[test]
fn without_a_card_the_original_is_copied() {
    let desk = Desk::new();
    let input = model(&desk, SOURCE_CARD);
    let without = |input: &Path| desk.run(input, pipeline().measure(false).pass(Cast::default()).card(false)).unwrap();
    assert_eq!(card(&without(&input).path), SOURCE_CARD);
    // The card of an earlier run describes other weights.
    let earlier = run(&desk, &input, prune());
    let output = without(&earlier.path);
    assert!(!output.path.join(CARD).exists() && output.report.notes.iter().any(|note| note.contains("README.md") && note.contains("an earlier run")));
    // A single file has no card.
    let file = desk.path().join("out.onnx");
    pipeline().measure(false).build().unwrap().run(Model::open(golden(&desk)).unwrap(), &file).unwrap();
    assert!(file.exists() && !desk.path().join("out.onnx.report").join(CARD).exists() && !desk.path().join(CARD).exists());
    // Recipes have the same option.
    let recipe = Recipe::parse("model: x\ncard: false\n", Path::new("recipe.yaml")).unwrap();
    assert!(!recipe.card && Recipe::new("x").card);
}

#[test]
fn cards_of_other_programs_are_not_trusted() {
    let desk = Desk::new();
    let malformed = run(&desk, &model(&desk, "---\nlicense: [mit\n---\n"), prune());
    let note = malformed.report.notes.iter().find(|note| note.contains("the model card has no metadata of the source")).unwrap();
    assert!(note.contains("README.md") && !metadata(&card(&malformed.path)).contains_key("license"), "{note}");
    let hostile = "---\nlicense: \"mit\\n---\\n# injected\"\nbase_model: ../../secret\ntags: [{a: b}, \"x\\ny: z\"]\nlanguage: {a: b}\n---\n";
    let output = run(&desk, &model(&desk, hostile), prune());
    let metadata = metadata(&card(&output.path));
    assert_eq!(metadata["license"], "mit\n---\n# injected", "{}", card(&output.path));
    assert!(metadata["tags"] == json!(["compress", "x\ny: z"]) && !metadata.contains_key("base_model") && !metadata.contains_key("language"));
    assert!(!card(&output.path).lines().any(|line| line == "# injected"));
    // Not UTF-8.
    let path = desk.pico(DType::F32, 1);
    fs::write(path.join(CARD), [0xff, 0xfe, b'-']).unwrap();
    assert!(is_verified(&run(&desk, &path, prune()).path));
}

#[test]
fn a_repository_is_found_in_the_configuration_or_the_path() {
    let desk = Desk::new();
    let input = desk.pico(DType::F32, 1);
    let path = input.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let base = |input: &Path| metadata(&card(&run(&desk, input, prune()).path)).get("base_model").cloned();
    for (name, expected) in [("org/pico", Some(json!(["org/pico"]))), ("models/pico", None), ("/data/pico", None)] {
        config["_name_or_path"] = json!(name);
        fs::write(&path, config.to_string()).unwrap();
        assert_eq!(base(&input), expected, "{name}");
    }
    let cached = desk.path().join("models--org--pico-2/snapshots/0123");
    fs::create_dir_all(cached.parent().unwrap()).unwrap();
    fs::rename(&input, &cached).unwrap();
    assert_eq!(base(&cached), Some(json!(["org/pico-2"])));
    let text = card(&run(&desk, &cached, prune()).path);
    assert!(text.contains("# pico-2, compressed") && text.contains("[org/pico-2](https://huggingface.co/org/pico-2) (revision `0123`)"), "{text}");
}

/// A small encoder with a classification head.
fn encoder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/bert-sequence-classification")
}

fn integers(shape: &[usize], value: impl Fn(usize) -> i64) -> Tensor {
    let values = (0..shape.iter().product()).flat_map(|at| value(at).to_le_bytes());
    Tensor::new(DType::I64, shape, values.collect())
}

/// Six samples for the encoder.
fn samples() -> [(&'static str, Tensor); 3] {
    let ids = integers(&[6, 7], |at| 3 + (at * 5 % 30) as i64);
    [("input_ids", ids), ("attention_mask", integers(&[6, 7], |_| 1)), ("token_type_ids", integers(&[6, 7], |_| 0))]
}

/// Files in the cache of `huggingface_hub` belong to a data set of the Hub.
#[test]
fn a_card_lists_the_data_sets_of_the_hub() {
    let desk = Desk::new();
    let run = |folder: PathBuf| {
        fs::create_dir_all(&folder).unwrap();
        let arrays = folder.join("train.safetensors");
        write(&arrays, &samples().into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect());
        let recipe = json!({ "model": encoder(), "passes": ["quantize-static"], "data": { "calibration": { "arrays": arrays } } }).to_string();
        let recipe = Recipe::parse(&recipe, Path::new("recipe.yaml")).unwrap();
        metadata(&card(&desk.run(&encoder(), pipeline().recipe(&recipe)).unwrap().path))
    };
    assert_eq!(run(desk.place().join("datasets--org--corpus/snapshots/0"))["datasets"], json!(["org/corpus"]));
    assert_eq!(run(desk.place()).get("datasets"), None);
}

#[test]
fn scores_on_a_benchmark_are_written_for_the_hub() {
    let desk = Desk::new();
    let golden = encoder();
    let arrays = desk.place().with_extension("safetensors");
    let labels = ("labels", integers(&[6], |at| (at % 3) as i64));
    let run = |labelled: bool, benchmark: Value| {
        let rows = samples().into_iter().chain(labelled.then(|| labels.clone()));
        write(&arrays, &rows.map(|(name, tensor)| (name.to_owned(), tensor)).collect());
        let evaluate = json!({ "latency": false, "runtime": ["candle"], "benchmark": benchmark });
        let recipe = json!({ "model": golden, "passes": ["cast"], "data": { "evaluation": { "arrays": arrays } }, "evaluate": evaluate }).to_string();
        Recipe::parse(&recipe, Path::new("recipe.yaml")).map(|recipe| desk.run(&golden, pipeline().recipe(&recipe)).unwrap())
    };
    let benchmark = json!({ "dataset": "org/questions", "task": "default" });
    let output = run(true, benchmark.clone()).unwrap();
    let name = ".eval_results/questions.yaml";
    let written: Vec<Value> = serde_saphyr::from_str(&fs::read_to_string(output.path.join(name)).unwrap()).unwrap();
    let accuracy = output.report.accuracy.as_ref().unwrap();
    let value = *accuracy.after.values().next().unwrap();
    assert!(matches!(&written[..], [entry] if entry["dataset"] == json!({ "id": "org/questions", "task_id": "default" })), "{written:?}");
    assert!((written[0]["value"].as_f64().unwrap() - value).abs() < 1e-12 && written[0]["notes"].as_str().unwrap().starts_with("accuracy on 6 samples"));
    assert!(output.report.carried.iter().any(|file| file.path == name) && is_verified(&output.path));
    assert!(card(&output.path).contains("| accuracy, built-in executor |"), "{}", card(&output.path));
    let unlabelled = run(false, benchmark).unwrap();
    assert!(!unlabelled.path.join(name).exists());
    assert!(unlabelled.report.notes.iter().any(|note| note.contains("no score on the benchmark org/questions")), "{:?}", unlabelled.report.notes);
    let error = run(true, json!({ "dataset": "questions", "task": "default" })).err().unwrap().to_string();
    assert!(error.contains("`questions` is not of the form org/name"), "{error}");
}

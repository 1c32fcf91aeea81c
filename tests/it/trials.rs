//! `compress check --loads RUNTIME --try`: outputs, or twins of their first layers, are run in substitutes of
//! the runtimes, and the results are compared with those of the built-in executor.
#![cfg(all(feature = "run", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress::export::{Gguf, Onnx};
use compress_engine::exec::{Executor, Inputs, Parameters, Residence, Rounding};
use compress_graph::analysis;
use serde_json::{Value, json};

use crate::common::{Desk, Tensors, onnxruntime, pipeline, read};
use crate::contract::{changed, golden, model};
use crate::low_bits::{BYTE_LEVEL, outputs, quantize, samples};

/// A substitute of Python: stores the folder and the inputs, and answers with prepared outputs. `-c` asks for
/// a package that is not installed.
const PYTHON: &str = r#"#!/bin/sh
here=$(dirname "$0")
if [ "$1" = -c ]; then cat "$here/missing" 2>/dev/null; exit 0; fi
[ -f "$1" ] && [ -f "$3/compress_trial_runtime.py" ] || exit 4
rm -rf "$here/observed"; mkdir "$here/observed"
cp -r "$2" "$here/observed/folder"; cp "$3/inputs.safetensors" "$here/observed"
[ -f "$here/outputs" ] && cp "$here/outputs" "$3/outputs.safetensors"
[ -f "$here/result" ] || { echo "Killed: 9" >&2; exit 3; }
cp "$here/result" "$3/result.json"
"#;
/// A substitute of llama-perplexity.
const PERPLEXITY: &str = r#"#!/bin/sh
here=$(dirname "$0")
[ "$1" = --version ] && exit 0
rm -rf "$here/observed"; mkdir "$here/observed"
cp "$2" "$here/observed/model.gguf"; cp "$4" "$here/observed/text"
if [ -f "$here/stored" ]; then cp "$here/stored" "$6"; else echo "llama_model_load: error loading model: no tensor"; exit 1; fi
"#;

/// A folder with a program, which is first on the PATH of [`Stub::check`].
struct Stub(PathBuf);

impl Stub {
    fn new(desk: &Desk, name: &str, program: &str) -> Stub {
        let stub = Stub::empty(desk);
        stub.put(name, program);
        std::fs::set_permissions(stub.0.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        stub
    }

    /// Without a program.
    fn empty(desk: &Desk) -> Stub {
        let folder = desk.place();
        std::fs::create_dir_all(folder.join("scratch")).unwrap();
        Stub(folder)
    }

    fn put(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    fn observed(&self, name: &str) -> PathBuf {
        self.0.join("observed").join(name)
    }

    /// Exit code, the trial of the first runtime, and the output without `--json`.
    fn check(&self, output: &Path, runtime: &str, options: &[&str]) -> (i32, Value, String) {
        let path = std::env::join_paths([self.0.clone(), "/usr/bin".into(), "/bin".into()]).unwrap();
        let scratch = self.0.join("scratch");
        let run = |more: &[&str]| {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_compress"));
            command.arg("check").arg(output).args(["--loads", runtime]).args(options).args(more).env("PATH", &path).env("TMPDIR", &scratch);
            command.output().unwrap()
        };
        let (text, data) = (run(&[]), run(&["--json"]));
        let lines = format!("{}{}", String::from_utf8(text.stdout).unwrap(), String::from_utf8(text.stderr).unwrap());
        let data: Value = serde_json::from_slice(&data.stdout).unwrap_or_else(|e| panic!("{e}: {lines}"));
        assert_eq!(data["ok"], json!(text.status.success()), "{lines}");
        assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0, "a temporary folder remains");
        (text.status.code().unwrap(), data["loads"][0]["trial"].clone(), lines)
    }

    fn inputs(&self) -> Inputs {
        candle_core::safetensors::load(self.observed("inputs.safetensors"), &Device::Cpu).unwrap().into_iter().collect()
    }

    /// Prepares these tensors as the outputs of the program.
    fn answer<const N: usize>(&self, tensors: [(&str, Tensor); N]) {
        let tensors: HashMap<String, Tensor> = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        candle_core::safetensors::save(&tensors, self.0.join("outputs")).unwrap();
    }
}

fn quantized(desk: &Desk, model: &Path, scheme: &str) -> PathBuf {
    desk.run(model, pipeline().calibration(samples(desk.path())).pass(quantize(json!({ "scheme": scheme })))).unwrap().path
}

#[test]
fn the_results_of_the_runtime_decide() {
    let desk = Desk::new();
    let (model, stub) = (model(&desk), Stub::new(&desk, "python3", PYTHON));
    let folder = quantized(&desk, &model, "W4A16");
    // The library has ended the interpreter.
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (1, &json!("failed")), "{lines}");
    assert!(trial["finding"].as_str().unwrap().ends_with("without a result: Killed: 9"), "{trial}");
    stub.put("result", r#"{ "version": "5.23.0", "error": "ValueError: no scale" }"#);
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"], &trial["version"], &trial["scope"]), (1, &json!("failed"), &json!("5.23.0"), &json!("the output")));
    assert_eq!(lines.matches("transformers 5.23.0 does not run the output: ValueError: no scale").count(), 2, "{lines}");
    // Small outputs are run as a whole.
    assert_eq!(read(&stub.observed("folder")), read(&folder));

    stub.put("result", r#"{ "version": "5.23.0" }"#);
    let inputs = stub.inputs();
    stub.answer([("logits", outputs(&Model::open(&folder).unwrap(), &inputs, Rounding::Token))]);
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("agrees")), "{lines}");
    assert!(trial["relative_error"].as_f64().unwrap() < 1e-5 && trial["tolerance"] == json!(1e-3), "{trial}");
    assert!(lines.contains("transformers 5.23.0 loads the output and computes the same as the built-in executor"), "{lines}");
    // The runtime reads other scales.
    let other = changed(&desk, &folder, |_, tensors| {
        let scale = tensors.get_mut("model.layers.1.self_attn.v_proj.weight_scale").unwrap();
        scale.bytes.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&(f32::from_le_bytes((&*value).try_into().unwrap()) * 1.5).to_le_bytes()));
    });
    stub.answer([("logits", outputs(&Model::open(&other).unwrap(), &inputs, Rounding::Token))]);
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (1, &json!("differs")), "{lines}");
    assert!(lines.contains("check `quantization_config`"), "{lines}");
    let shape = outputs(&Model::open(&folder).unwrap(), &inputs, Rounding::Token).dims().to_vec();
    stub.answer([("logits", Tensor::full(f32::NAN, shape.clone(), &Device::Cpu).unwrap())]);
    assert_eq!(stub.check(&folder, "transformers", &["--try"]).1["status"], "differs");
    stub.answer([("logits", Tensor::zeros((shape[0], shape[1], shape[2] + 1), DType::F32, &Device::Cpu).unwrap())]);
    assert!(stub.check(&folder, "transformers", &["--try"]).2.contains("the outputs have other shapes"));
    // Outputs that cannot be compared, and missing tensors.
    stub.answer([("other", Tensor::new(&[1f32], &Device::Cpu).unwrap())]);
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("runs")), "{lines}");
    stub.put("result", r#"{ "version": "5.23.0", "missing_tensors": ["a.weight", "b.weight"] }"#);
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (1, &json!("failed")), "{lines}");
    assert!(lines.contains("fills 2 missing tensors with random values, the first of which is `a.weight`"), "{lines}");
    // A violated rule is not tried.
    let broken = changed(&desk, &folder, |_, tensors| drop(tensors.remove("model.layers.1.self_attn.o_proj.weight_scale")));
    let (code, trial, lines) = stub.check(&broken, "transformers", &["--try"]);
    assert_eq!((code, trial), (1, Value::Null), "{lines}");
    // Tokens without a graph: the model runs, but is not compared.
    stub.put("result", "{}");
    let unknown = changed(&desk, &model, |config, _| config["model_type"] = json!("codegen"));
    let (code, trial, lines) = stub.check(&unknown, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("runs")), "{lines}");
    assert_eq!(stub.inputs()["input_ids"].dims(), [2, 8]);
}

#[test]
fn runtimes_that_are_not_installed_are_not_errors() {
    let desk = Desk::new();
    let (folder, stub) = (model(&desk), Stub::new(&desk, "python3", PYTHON));
    stub.put("missing", "transformers\n");
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("not-installed")), "{lines}");
    assert!(lines.contains("a static check only, because transformers is not installed: `python3` has no package `transformers`"), "{lines}");
    std::fs::remove_file(stub.0.join("missing")).unwrap();
    stub.put("result", r#"{ "missing": "torch" }"#);
    assert_eq!(stub.check(&folder, "vllm", &["--try"]).1["status"], "not-installed");
    let (code, trial, lines) = stub.check(&folder, "sglang", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("not-run")), "{lines}");
    // An interpreter that the user has named must exist.
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try", "--python", "/nowhere/python"]);
    assert_eq!((code, &trial["status"]), (1, &json!("error")), "{lines}");
    assert!(lines.contains("cannot start /nowhere/python"), "{lines}");
    let other = stub.0.join("python3");
    assert_eq!(stub.check(&folder, "vllm", &["--try", "--python", other.to_str().unwrap()]).1["status"], "not-installed");
    for (options, reason) in [(&["--try=half"][..], "use one of auto, full, twin"), (&["--python", "x"], "--try")] {
        let run =
            std::process::Command::new(env!("CARGO_BIN_EXE_compress")).arg("check").arg(&folder).args(["--loads", "vllm"]).args(options).output().unwrap();
        assert!(run.status.code() == Some(2) && String::from_utf8_lossy(&run.stderr).contains(reason), "{options:?}");
    }
    let run = std::process::Command::new(env!("CARGO_BIN_EXE_compress")).arg("check").arg(&folder).arg("--try").output().unwrap();
    assert!(run.status.code() == Some(2) && String::from_utf8_lossy(&run.stderr).contains("--loads"));
}

/// vLLM returns log-probabilities of some tokens at each position.
#[test]
fn log_probabilities_are_compared_by_token() {
    let desk = Desk::new();
    let (folder, stub) = (quantized(&desk, &model(&desk), "FP8-DYNAMIC"), Stub::new(&desk, "python3", PYTHON));
    stub.put("result", r#"{ "version": "0.33.0" }"#);
    stub.check(&folder, "vllm", &["--try"]);
    let inputs = stub.inputs();
    let logits = outputs(&Model::open(&folder).unwrap(), &inputs, Rounding::Token).to_vec3::<f32>().unwrap();
    let answer = |shift: usize| {
        let (mut places, mut values) = ([const { Vec::<i64>::new() }; 3], Vec::<f32>::new());
        for (text, rows) in logits.iter().enumerate() {
            for (position, row) in rows.iter().enumerate() {
                let norm = row.iter().map(|value| value.exp()).sum::<f32>().ln();
                for (token, value) in row.iter().enumerate().take(20) {
                    let place = [text, position + shift, token];
                    places.iter_mut().zip(place).for_each(|(column, number)| column.push(number as i64));
                    values.push(value - norm);
                }
            }
        }
        let count = values.len();
        let [text, position, token] = places.map(|column| Tensor::from_vec(column, count, &Device::Cpu).unwrap());
        let values = Tensor::from_vec(values, count, &Device::Cpu).unwrap();
        stub.answer([("text", text), ("position", position), ("token", token), ("log_probability", values)]);
        stub.check(&folder, "vllm", &["--try"])
    };
    // A position is that of the predicted token.
    let (code, trial, lines) = answer(1);
    assert_eq!((code, &trial["status"]), (0, &json!("agrees")), "{lines}");
    assert!(trial["relative_error"].as_f64().unwrap() < 1e-2, "{trial}");
    let (code, trial, lines) = answer(2);
    assert!(code == 1, "{lines}: {trial}");
    let encoder = changed(&desk, &golden("models/bert"), |_, _| {});
    std::fs::write(encoder.join("tokenizer.json"), BYTE_LEVEL).unwrap();
    let (code, trial, lines) = stub.check(&encoder, "vllm", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("not-run")), "{lines}");
    assert!(lines.contains("vllm is run only with language models"), "{lines}");
}

/// A model with more layers, each a copy of one of its layers.
fn deepened(desk: &Desk, folder: &Path, prefix: &str, layers: usize, change: impl FnOnce(&mut Value)) -> PathBuf {
    changed(desk, folder, |config, tensors| {
        let (inside, others): (Tensors, Tensors) = std::mem::take(tensors).into_iter().partition(|(name, _)| name.starts_with(prefix));
        tensors.extend(others);
        let split = |name: &str| -> (usize, String) {
            let (number, rest) = name[prefix.len()..].split_once('.').unwrap();
            (number.parse().unwrap(), rest.to_owned())
        };
        let period = inside.keys().map(|name| split(name).0 + 1).max().unwrap();
        for (name, tensor) in &inside {
            let (number, rest) = split(name);
            tensors.extend((number..layers).step_by(period).map(|layer| (format!("{prefix}{layer}.{rest}"), tensor.clone())));
        }
        config["num_hidden_layers"] = json!(layers);
        change(config);
    })
}

/// The value after the layer `index` of a model.
fn hidden(model: &Model, index: usize, inputs: &Inputs) -> Vec<f32> {
    let graph = model.graph().unwrap();
    let output = analysis::layers(&graph).unwrap().layers[index].output.clone();
    let parameters = crate::common::work(|work| Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, work)).unwrap();
    let executor = Executor::new(&graph, parameters, Device::Cpu);
    let mut found = Vec::new();
    let mut observe = |_: &str, value: &Tensor| -> compress::Result<()> {
        found = value.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        Ok(())
    };
    executor.run_observed(&executor.observation(|name| name == output), inputs, &mut observe).unwrap();
    found
}

#[test]
fn a_twin_has_the_first_layers_of_each_kind() {
    let desk = Desk::new();
    let source = deepened(&desk, &golden("models/smollm3-sliding"), "model.layers.", 7, |config| {
        let kind = |layer: usize| if layer == 3 || layer == 5 { "sliding_attention" } else { "full_attention" };
        config["layer_types"] = (0..7).map(kind).collect();
        config["no_rope_layers"] = json!([1, 0, 1, 1, 0, 1, 1]);
        config["eos_token_id"] = json!([1, 2, 3, 4, 5, 6, 7]);
    });
    std::fs::write(source.join("tokenizer.json"), BYTE_LEVEL).unwrap();
    let folder = quantized(&desk, &source, "W8A8");
    std::fs::write(folder.join("other.onnx"), "not copied").unwrap();
    let stub = Stub::new(&desk, "python3", PYTHON);
    stub.put("result", r#"{ "version": "5.23.0", "error": "stop" }"#);
    let (_, trial, lines) = stub.check(&folder, "transformers", &["--try=twin"]);
    assert_eq!(trial["scope"], "the first 4 of 7 layers", "{lines}");
    let twin = stub.observed("folder");
    let [before, after] = [&folder, &twin].map(|folder| -> Value { serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap() });
    let mut expected = before.clone();
    expected["num_hidden_layers"] = json!(4);
    expected["layer_types"] = before["layer_types"].as_array().unwrap()[..4].into();
    expected["no_rope_layers"] = json!([1, 0, 1, 1]);
    assert_eq!(after, expected);
    assert!(after["quantization_config"].is_object());
    let is_later = |name: &str| (4..7).any(|layer| name.starts_with(&format!("model.layers.{layer}.")));
    let kept: Tensors = read(&folder).into_iter().filter(|(name, _)| !is_later(name)).collect();
    assert_eq!(read(&twin), kept);
    let names: BTreeSet<String> = std::fs::read_dir(&twin).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    // `config-4.json` is a file of the golden folder.
    assert_eq!(names, ["config-4.json", "config.json", "model.safetensors", "tokenizer.json"].map(str::to_owned).into());
    // The twin computes what the first layers of the output compute.
    let [full, first] = [&folder, &twin].map(|folder| Model::open(folder).unwrap());
    let inputs = stub.inputs();
    assert_eq!(hidden(&full, 3, &inputs), hidden(&first, 3, &inputs));
    // The runtime computes the same from the twin, and something else if it ignores a layer.
    stub.put("result", r#"{ "version": "5.23.0" }"#);
    stub.answer([("logits", outputs(&first, &inputs, Rounding::Token))]);
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try=twin"]);
    assert_eq!((code, &trial["status"]), (0, &json!("agrees")), "{lines}");
    stub.answer([("logits", outputs(&full, &inputs, Rounding::Token))]);
    assert_eq!(stub.check(&folder, "transformers", &["--try=twin"]).1["status"], "differs");
}

/// Published configurations of Nemotron-H have a letter for each layer. transformers 5 writes a list, and no
/// number of layers.
#[test]
fn twins_have_the_kinds_of_their_layers() {
    let desk = Desk::new();
    let stub = Stub::new(&desk, "python3", PYTHON);
    stub.put("result", r#"{ "error": "stop" }"#);
    for is_list in [false, true] {
        let folder = deepened(&desk, &golden("models/nemotron-h"), "backbone.layers.", 8, |config| {
            let kinds: Vec<Value> = config["layers_block_type"].as_array().unwrap().iter().cycle().take(8).cloned().collect();
            let config = config.as_object_mut().unwrap();
            if is_list {
                config.insert("layers_block_type".into(), kinds.into());
                config.remove("num_hidden_layers");
            } else {
                config.insert("hybrid_override_pattern".into(), json!("M-*EM-*E"));
                config.remove("layers_block_type");
            }
        });
        let (_, trial, lines) = stub.check(&folder, "transformers", &["--try=twin"]);
        assert_eq!(trial["scope"], "the first 4 of 8 layers", "{lines}");
        let twin = stub.observed("folder");
        let [before, after] = [&folder, &twin].map(|folder| -> Value { serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap() });
        let mut expected = before.clone();
        if is_list {
            expected["layers_block_type"] = before["layers_block_type"].as_array().unwrap()[..4].into();
        } else {
            expected["hybrid_override_pattern"] = json!("M-*E");
            expected["num_hidden_layers"] = json!(4);
        }
        assert_eq!(after, expected);
        let [full, first] = [&folder, &twin].map(|folder| Model::open(folder).unwrap());
        let inputs = stub.inputs();
        assert_eq!(hidden(&full, 3, &inputs), hidden(&first, 3, &inputs));
    }
}

/// Published configurations of Mamba 2 contain infinity, which JSON does not have.
#[test]
fn infinity_in_a_configuration_is_read_by_trials() {
    let desk = Desk::new();
    let folder = deepened(&desk, &golden("models/mamba2"), "backbone.layers.", 4, |config| config["model_type"] = json!("codegen"));
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let config = text.replace(r#"{"__float__":"Infinity"}"#, "Infinity");
    assert_ne!(text, config);
    std::fs::write(folder.join("config.json"), config).unwrap();
    let stub = Stub::new(&desk, "python3", PYTHON);
    stub.put("result", "{}");
    for (option, scope) in [("--try=full", "the output"), ("--try=twin", "the first 2 of 4 layers")] {
        let (code, trial, lines) = stub.check(&folder, "transformers", &[option]);
        assert_eq!((code, &trial["status"], &trial["scope"]), (0, &json!("runs"), &json!(scope)), "{lines}");
    }
    let twin: Value = serde_json::from_slice(&std::fs::read(stub.observed("folder").join("config.json")).unwrap()).unwrap();
    assert_eq!(twin["time_step_limit"], json!([0.0, { "__float__": "Infinity" }]));
}

#[test]
fn models_without_a_single_stack_of_layers_have_no_twin() {
    let desk = Desk::new();
    let stub = Stub::new(&desk, "python3", PYTHON);
    stub.put("result", r#"{ "error": "stop" }"#);
    for name in ["t5", "clip"] {
        let (code, trial, lines) = stub.check(&golden(&format!("models/{name}")), "transformers", &["--try=twin"]);
        assert_eq!((code, &trial["status"]), (0, &json!("not-run")), "{name}: {lines}");
        assert!(lines.contains("use `--try=full`"), "{lines}");
        assert_eq!(stub.check(&golden(&format!("models/{name}")), "transformers", &["--try"]).1["status"], "failed");
    }
}

/// The file that llama-perplexity stores for two windows of 32 tokens.
fn stored(model: &Model, vocabulary: usize, tokens: &[i64], noise: f32) -> Vec<u8> {
    let ids = Tensor::from_vec(tokens.to_vec(), (2, 32), &Device::Cpu).unwrap();
    let inputs = [("attention_mask".to_owned(), ids.ones_like().unwrap()), ("input_ids".to_owned(), ids)].into();
    let logits = outputs(model, &inputs, Rounding::Token).to_vec3::<f32>().unwrap();
    let mut bytes = b"_logits_".to_vec();
    [32, vocabulary as i32, 2].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    tokens.iter().for_each(|token| bytes.extend((*token as i32).to_le_bytes()));
    for row in logits.iter().flat_map(|rows| &rows[16..31]) {
        assert_eq!(row.len(), vocabulary);
        let norm = row.iter().map(|value| value.exp()).sum::<f32>().ln();
        let values: Vec<f32> = row.iter().enumerate().map(|(token, value)| value - norm + noise * (token as f32).sin()).collect();
        let (least, most) = values.iter().fold((f32::MAX, f32::MIN), |(least, most), value| (least.min(*value), most.max(*value)));
        let step = (most - least) / 65535.0;
        bytes.extend(step.to_le_bytes());
        bytes.extend(least.to_le_bytes());
        values.iter().for_each(|value| bytes.extend((((value - least) / step).round() as u16).to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(2) + 2 * (vocabulary % 2), 0);
    }
    bytes
}

#[test]
fn gguf_files_run_in_llama_cpp() {
    let desk = Desk::new();
    let source = deepened(&desk, &model(&desk), "model.layers.", 5, |_| ());
    std::fs::write(source.join("tokenizer.json"), BYTE_LEVEL).unwrap();
    let file = desk.place().with_extension("gguf");
    let gguf: Gguf = serde_json::from_value(json!({ "type": "Q8_0" })).unwrap();
    pipeline().export(gguf).build().unwrap().run(Model::open(&source).unwrap(), &file).unwrap();
    // Not installed.
    let empty = Stub::empty(&desk);
    let (code, trial, lines) = empty.check(&file, "llama.cpp", &["--try"]);
    assert_eq!((code, &trial["status"]), (0, &json!("not-installed")), "{lines}");
    let stub = Stub::new(&desk, "llama-perplexity", PERPLEXITY);
    let (code, trial, lines) = stub.check(&file, "llama.cpp", &["--try"]);
    assert_eq!((code, &trial["status"], &trial["scope"]), (1, &json!("failed"), &json!("the output")), "{lines}");
    assert!(lines.contains("llama_model_load: error loading model: no tensor"), "{lines}");
    assert_eq!(std::fs::read(stub.observed("model.gguf")).unwrap(), std::fs::read(&file).unwrap());
    let text = std::fs::read_to_string(stub.observed("text")).unwrap();
    assert!(text.len() >= 64 && text.chars().all(|c| "abc".contains(c)), "{text}");
    let tokens: Vec<i64> = (0..64).map(|at| at * at % 4).collect();
    for (options, layers) in [("--try=twin", 2), ("--try", 5)] {
        std::fs::remove_file(stub.0.join("stored")).ok();
        stub.check(&file, "llama.cpp", &[options]);
        let model = Model::open(stub.observed("model.gguf")).unwrap();
        assert_eq!(model.config.get("num_hidden_layers"), Some(&json!(layers)));
        let all = Model::open(&file).unwrap();
        for (name, weight) in &model.weights.by_name {
            assert_eq!(weight.floats(name).unwrap(), all.weights.by_name[name].floats(name).unwrap(), "{name}");
        }
        let vocabulary = model.weights.by_name["model.embed_tokens.weight"].shape[0];
        stub.put("stored", stored(&model, vocabulary, &tokens, 0.0));
        let (code, trial, lines) = stub.check(&file, "llama.cpp", &[options]);
        assert_eq!((code, &trial["status"]), (0, &json!("agrees")), "{lines}");
        assert!(trial["relative_error"].as_f64().unwrap() < 1e-3, "{trial}");
        stub.put("stored", stored(&model, vocabulary, &tokens, 2.0));
        let (code, trial, lines) = stub.check(&file, "llama.cpp", &[options]);
        assert_eq!((code, &trial["status"]), (1, &json!("differs")), "{lines}");
        stub.put("stored", "_logits_");
        assert!(stub.check(&file, "llama.cpp", &[options]).2.contains("unknown form"));
    }
}

#[test]
fn onnx_files_run_in_onnx_runtime() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let desk = Desk::new();
    let output = desk.run(&model(&desk), pipeline().export(Onnx::default()).measure(false)).unwrap().path;
    // The installed library is found without a PATH.
    let run = std::process::Command::new(env!("CARGO_BIN_EXE_compress"))
        .arg("check")
        .arg(&output)
        .args(["--loads", "onnxruntime", "--try", "--json"])
        .output()
        .unwrap();
    let data: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((run.status.code(), &data["loads"][0]["trial"]["status"]), (Some(0), &json!("agrees")), "{data}");
}

/// Twins of folders of other tools: several files with an index, and a configuration of a text tower.
#[test]
fn twins_of_sharded_folders_with_nested_configurations() {
    let desk = Desk::new();
    let source = deepened(&desk, &model(&desk), "model.layers.", 4, |_| ());
    let tensors: Tensors = read(&source).into_iter().map(|(name, tensor)| (format!("language_model.{name}"), tensor)).collect();
    let folder = desk.shards(&tensors, 3);
    let text: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    let config = json!({ "architectures": ["OtherForConditionalGeneration"], "model_type": "codegen", "text_config": text });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let stub = Stub::new(&desk, "python3", PYTHON);
    stub.put("result", "{}");
    let (code, trial, lines) = stub.check(&folder, "transformers", &["--try=twin"]);
    assert_eq!((code, &trial["status"], &trial["scope"]), (0, &json!("runs"), &json!("the first 2 of 4 layers")), "{lines}");
    let twin = stub.observed("folder");
    let config: Value = serde_json::from_slice(&std::fs::read(twin.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["text_config"]["num_hidden_layers"], &config["model_type"]), (&json!(2), &json!("codegen")));
    assert!(read(&twin).keys().all(|name| !name.contains("layers.2.") && !name.contains("layers.3.")));
    assert!(!twin.join("model.safetensors.index.json").exists());
}

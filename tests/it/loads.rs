//! `loads`: the rules of runtimes are checked on the plan, before any work, and on the written files.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use compress::contract::Target;
use compress::export::{Export, Gguf, Layout, Onnx, Safetensors};
use compress::pass::{Cast, PruneStructured, PruneUnstructured, QuantizeStatic};
use compress::pipeline::{Builder, PartIndex, Plan};
use compress::report::RuntimeCheck;
use compress::{Model, Report};
use compress_core::work::Event;
use serde_json::{Value, json};

use crate::common::{Desk, contents, pipeline};
use crate::contract::{SCHEMES, changed, check, golden, model, violated};
use crate::low_bits::{BYTE_LEVEL, quantize, samples};

fn targets(names: &[&str]) -> Vec<Target> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn plan(model: &Path, builder: Builder) -> compress::Result<Plan> {
    builder.build()?.plan(&Model::open(model)?)
}

/// Names of the rules that a plan decides.
fn planned(plan: &Plan) -> BTreeSet<&'static str> {
    plan.loads.iter().flat_map(|checked| &checked.rules).map(|rule| rule.name).collect()
}

/// Names of the rules of a written output.
fn rules(output: &Path, target: &str) -> BTreeSet<&'static str> {
    check(output, target).rules.iter().map(|rule| rule.name).collect()
}

fn without(mut names: BTreeSet<&'static str>, undecided: &[&'static str]) -> BTreeSet<&'static str> {
    assert!(undecided.iter().all(|name| names.remove(name)), "{names:?}");
    names
}

/// The plan of every scheme violates the same rules as the folder that the run writes.
#[test]
fn plans_and_folders_violate_the_same_rules() {
    let desk = Desk::new();
    let model = model(&desk);
    for options in SCHEMES.map(|scheme| json!({ "scheme": scheme })).into_iter().chain([json!({ "scheme": "W4A16", "kv_cache": "int8" })]) {
        let quantized = || pipeline().calibration(samples(desk.path())).measure(false).pass(quantize(options.clone()));
        let folder = desk.run(&model, quantized()).unwrap().path;
        for target in ["vllm", "vllm@0.11", "sglang", "transformers"] {
            let (planned_run, expected) = (plan(&model, quantized().loads(targets(&[target]))), violated(&folder, target));
            match planned_run {
                Ok(found) => {
                    assert_eq!(expected, BTreeSet::new(), "{options}: {target}");
                    let undecided: &[&'static str] = if target.starts_with("vllm") { &["global-scale"] } else { &[] };
                    assert_eq!(planned(&found), without(rules(&folder, target), undecided), "{options}: {target}");
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(!expected.is_empty() && expected.iter().all(|rule| text.contains(&format!("{rule}: `"))), "{options}: {expected:?}: {text}");
                }
            }
        }
    }
}

#[test]
fn a_violation_is_an_error_before_any_work() {
    let desk = Desk::new();
    let (model, events) = (model(&desk), Arc::new(AtomicUsize::new(0)));
    let counted = events.clone();
    let builder = || pipeline().pass(quantize(json!({ "scheme": "W3A16" }))).loads(targets(&["vllm@0.11", "sglang", "vllm"]));
    let watched = builder().progress(move |_: Event| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let before = contents(desk.path());
    let refused = desk.run(&model, watched).map(|output| output.path).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "loads: the output violates rules of vllm 0.11: bits: `group_0` has weights of 3 bits, but vllm 0.11 loads packed integers of 4, 8 bits; \
         the output violates rules of sglang 0.5: bits: `group_0` has weights of 3 bits, but sglang 0.5 loads packed integers of 4, 8 bits"
    );
    assert_eq!(refused.hint().unwrap(), "use `--scheme W4A16` or `W8A16`");
    assert_eq!((events.load(Ordering::Relaxed), plan(&model, builder()).unwrap_err().to_string()), (0, refused.to_string()));
    assert!(contents(desk.path()) == before);
    // The parts of a run are refused as well, and so are outputs on other machines.
    let part = |builder: Builder| builder.build().unwrap().run_part(Model::open(&model).unwrap(), desk.path().join("parts"), PartIndex::new(1, 2).unwrap());
    assert_eq!(part(builder()).unwrap_err().to_string(), refused.to_string());
    assert!(part(pipeline().pass(quantize(json!({ "scheme": "W4A16", "method": "rtn" }))).loads(targets(&["vllm"]))).is_ok());
    let remote = pipeline().loads(targets(&["vllm"])).build().unwrap().run(Model::open(&model).unwrap(), "s3://bucket/out").unwrap_err().to_string();
    assert!(remote.contains("is on another machine, and the rules of `loads`"), "{remote}");
    // Files that are missing from the input.
    std::fs::remove_file(model.join("tokenizer.json")).unwrap();
    let error = plan(&model, pipeline().loads(targets(&["vllm"]))).unwrap_err();
    assert!(error.to_string().contains("tokenizer: `tokenizer.json` is missing"), "{error}");
    // Next steps refer to the model: the output does not exist.
    assert!(error.hint().unwrap().contains("into the model's folder"), "{error:?}");
    assert!(plan(&model, pipeline().loads(targets(&["transformers"]))).is_ok());
}

/// Defects of the input with which no runtime loads the output: errors with `loads`, otherwise warnings.
#[test]
fn weights_that_do_not_fit_and_damaged_tokenizers_are_violations() {
    let desk = Desk::new();
    let model = model(&desk);
    let with_key = |key: &str, value: Value| changed(&desk, &model, |config, _| config[key] = value);
    let with_file = |name: &str, bytes: &[u8]| {
        let copy = changed(&desk, &model, |_, _| {});
        std::fs::write(copy.join(name), bytes).unwrap();
        copy
    };
    let bert = std::fs::read(golden("models/bert/config.json")).unwrap();
    let embedding = "shapes: `model.embed_tokens.weight` has shape [48, 32], but the configuration requires ";
    for (folder, reason) in [
        (with_key("hidden_size", json!(40)), format!("{embedding}[48, 40]")),
        (with_key("vocab_size", json!(50)), format!("{embedding}[50, 32]")),
        (with_key("num_key_value_heads", json!(3)), "shapes: `config.json` `num_attention_heads` 4 is not a multiple of `num_key_value_heads` 3".into()),
        (with_file("config.json", &bert), "shapes: `embeddings.".into()),
        (with_file("tokenizer.json", b""), "tokenizer-files: `tokenizer.json` is not valid JSON (EOF".into()),
        (with_file("tokenizer_config.json", b"{\"model_max_length\": "), "tokenizer-files: `tokenizer_config.json` is not valid JSON (EOF".into()),
    ] {
        for target in ["vllm", "sglang", "transformers"] {
            let found = check(&folder, target).violations;
            assert!(found.iter().any(|violation| violation.to_string().starts_with(&reason)), "{target}: {reason}: {found:?}");
            let builder = || pipeline().loads(targets(&[target]));
            let planned = plan(&folder, builder()).unwrap_err();
            assert!(planned.to_string().contains(&reason) && planned.hint().unwrap().contains("the model's folder"), "{target}: {reason}: {planned:?}");
            assert_eq!(desk.run(&folder, builder()).map(|output| output.path).unwrap_err().to_string(), planned.to_string());
        }
        let notes = desk.run(&folder, pipeline()).unwrap().report.notes;
        assert!(notes.iter().any(|note| note.starts_with("warning: ")), "{reason}: {notes:?}");
    }
    let vocabulary = br#"{"added_tokens": [], "model": {"type": "BPE", "vocab": ["a"], "merges": []}}"#;
    for (folder, reason) in [
        (with_key("hidden_act", json!("sily")), "shapes: `hidden_act` is \"sily\", expected the name of an activation function"),
        (with_file("tokenizer.json", vocabulary), "tokenizer-files: `tokenizer.json` is not read by the tokenizers package (invalid type: sequence"),
        (with_file("tokenizer_config.json", b"[]"), "tokenizer-files: `tokenizer_config.json` is not a JSON object (invalid type: sequence"),
    ] {
        for target in ["vllm", "sglang", "transformers"] {
            assert!(check(&folder, target).violations.iter().any(|violation| violation.to_string().starts_with(reason)), "{target}: {reason}");
            let planned = plan(&folder, pipeline().loads(targets(&[target]))).unwrap_err();
            assert!(planned.to_string().contains(reason) && planned.hint().unwrap().contains("the model's folder"), "{target}: {reason}: {planned:?}");
        }
    }
    assert_eq!(violated(&with_file("tokenizer_config.json", b"{\"model_max_length\": Infinity}"), "transformers"), BTreeSet::new());
    assert_eq!(violated(&with_file("tokenizer.json", b"{\"version\": Infinity}"), "transformers"), BTreeSet::from(["tokenizer-files"]));
    // Other files of a tokenizer are read only if tokenizer.json is missing.
    let slow = with_file("vocab.json", b"{");
    assert_eq!(violated(&slow, "transformers"), BTreeSet::new());
    std::fs::remove_file(slow.join("tokenizer.json")).unwrap();
    assert_eq!(violated(&slow, "transformers"), BTreeSet::from(["tokenizer-files"]));
    // After a key: the type, and an integer of four bytes.
    let mut bytes = std::fs::read(golden("gguf/tokenizer-gpt-2.gguf")).unwrap();
    let key = b"llama.feed_forward_length";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&96u32.to_le_bytes());
    let file = desk.place().with_extension("gguf");
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(violated(&file, "llama.cpp"), BTreeSet::from(["shapes"]));
}

/// Global scales are values, which the plan does not read.
#[test]
fn a_violation_in_the_written_files_leaves_no_output() {
    let desk = Desk::new();
    let model = model(&desk);
    let good = desk.run(&model, pipeline().pass(quantize(json!({ "scheme": "NVFP4A16" })))).unwrap().path;
    let broken = changed(&desk, &good, |_, tensors| {
        tensors.get_mut("model.layers.0.self_attn.k_proj.weight_global_scale").unwrap().bytes = 3.0f32.to_le_bytes().to_vec();
    });
    let builder = || pipeline().measure(false).loads(targets(&["vllm"]));
    assert!(plan(&broken, builder()).is_ok());
    let place = desk.place();
    let error = builder().build().unwrap().run(Model::open(&broken).unwrap(), &place).unwrap_err();
    assert!(error.to_string().starts_with("loads: the output violates rules of vllm 0.33: global-scale: `model.layers.0.self_attn."), "{error}");
    assert!(error.hint().unwrap().contains("shared global scale"), "{error:?}");
    let left: Vec<String> = std::fs::read_dir(desk.path()).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    assert!(!place.exists() && left.iter().all(|name| !name.starts_with('.')), "{left:?}");
    assert!(desk.run(&good, builder()).is_ok());
}

#[test]
fn the_report_and_the_recipe_record_the_runtimes() {
    let desk = Desk::new();
    let model = model(&desk);
    let output = desk.run(&model, pipeline().pass(Cast::default()).loads(targets(&["vllm", "sglang", "vllm@0.33"]))).unwrap();
    let count = |target: &str| check(&output.path, target).rules.len();
    let recorded: Vec<(&str, &str, usize)> =
        output.report.loads.iter().map(|RuntimeCheck { runtime, version, rules, .. }| (runtime.as_str(), version.as_str(), *rules)).collect();
    assert_eq!(recorded, [("vllm", "0.33", count("vllm")), ("sglang", "0.5", count("sglang"))]);
    assert_eq!(output.report.recipe["loads"], json!(["vllm@0.33", "sglang@0.5"]));
    let text = format!("{} rules of vllm 0.33, {} rules of sglang 0.5", count("vllm"), count("sglang"));
    for page in ["report.md", "report.html"] {
        assert!(std::fs::read_to_string(output.path.join(page)).unwrap().contains(&text), "{page}");
    }
    assert_eq!(Report::open(&output.path).unwrap().loads, output.report.loads);
    // The recipe of the output checks the same rules.
    let again = pipeline().recipe_file(output.path.join("recipe.yaml")).unwrap();
    assert_eq!(desk.run(&model, again).unwrap().report.loads, output.report.loads);
    assert!(desk.run(&model, pipeline()).unwrap().report.loads.is_empty());
}

/// Which weights are quantized depends on the samples, and which tensors are sparse on the weights: plans
/// decide only rules that do not depend on them.
#[test]
fn estimates_decide_only_rules_of_the_configuration() {
    let desk = Desk::new();
    let model = model(&desk);
    let found = |builder: Builder, target: &str| planned(&plan(&model, builder.loads(targets(&[target]))).unwrap());
    let quantized = || pipeline().calibration(samples(desk.path())).pass(QuantizeStatic::default());
    assert_eq!(found(quantized(), "vllm"), BTreeSet::from(["activation-function", "architectures", "tokenizer", "tokenizer-files"]));
    assert_eq!(found(quantized(), "transformers"), BTreeSet::from(["generation-config", "model-type", "tokenizer-files"]));
    assert_eq!(found(quantized().export(Onnx::default()), "onnxruntime"), BTreeSet::from(["ir-version", "opset"]));
    let sparse = || pipeline().measure(false).pass(PruneUnstructured::default()).export(Safetensors::with_layout(Layout::Sparse));
    assert_eq!(found(sparse(), "vllm"), BTreeSet::new());
    let error = desk.run(&model, sparse().loads(targets(&["vllm"]))).map(|output| output.path).unwrap_err();
    assert!(error.to_string().contains("own-format: `model_type` is `compress-llama`"), "{error}");
    let hint = error.hint().unwrap();
    assert!(hint.contains("`--layout dense`") && !hint.contains("densify"), "{hint}");
}

/// Without palettes and sparse weights, `--layout dense` has no effect.
#[test]
fn models_with_a_graph_file_need_another_pruning() {
    let desk = Desk::new();
    let uneven: PruneStructured = serde_json::from_value(json!({ "dims": ["mlp"], "amount": 0.5, "uniform": false, "ignore": ["model.layers.1.*"] })).unwrap();
    let error = desk.run(&model(&desk), pipeline().pass(uneven).loads(targets(&["transformers"]))).map(|output| output.path).unwrap_err();
    assert!(error.to_string().contains("own-format: `model_type` is `compress-llama`"), "{error}");
    let hint = error.hint().unwrap();
    assert!(hint.contains("one width for all layers") && !hint.contains("--layout") && !hint.contains("copy the config.json"), "{hint}");
}

#[test]
fn files_are_checked_for_the_runtimes_of_their_format() {
    let desk = Desk::new();
    let file = golden("gguf/tokenizer-gpt-2.gguf");
    let gguf = || pipeline().export(Gguf::default()).measure(false).loads(targets(&["llama.cpp"]));
    let output = desk.run(&file, gguf()).unwrap();
    assert_eq!(output.report.loads[0].rules, rules(&output.path, "llama.cpp").len());
    assert_eq!(planned(&plan(&file, gguf()).unwrap()), rules(&output.path, "llama.cpp"));
    // The output is a single file, whose name selects the format.
    let single = desk.place().with_extension("gguf");
    let named = || pipeline().measure(false).loads(targets(&["llama.cpp"])).build().unwrap();
    let model = || Model::open(&file).unwrap();
    assert_eq!(named().plan_output(&model(), &single).unwrap().files, [single.file_name().unwrap().to_str().unwrap()]);
    assert_eq!(named().run(model(), &single).unwrap().loads, output.report.loads);
    let error = named().plan(&model()).unwrap_err();
    assert!(error.to_string().contains("`export` does not contain `gguf`, the format of llama.cpp 2026"), "{error}");
    assert_eq!(error.hint().unwrap(), "write one with `--export gguf`");

    let llama = self::model(&desk);
    let onnx = |opset: u32, target: &str| {
        let export: Export = serde_json::from_value(json!({ "onnx": { "opset": opset } })).unwrap();
        // Groups need opset 21.
        let options = if opset == 17 { json!({ "scheme": "W8A16", "group_size": -1 }) } else { json!({ "scheme": "W4A16" }) };
        pipeline().pass(quantize(options)).export(export).measure(false).loads(targets(&[target]))
    };
    for opset in [17, 21] {
        let output = desk.run(&llama, onnx(opset, "onnxruntime")).unwrap();
        let expected = rules(&output.path, "onnxruntime");
        assert_eq!(planned(&plan(&llama, onnx(opset, "onnxruntime")).unwrap()), without(expected.clone(), &["external-data", "graph"]), "{opset}");
        // A file whose graph is not changed.
        let file = output.path.join("model.onnx");
        let copied = || pipeline().measure(false).loads(targets(&["onnxruntime"]));
        assert_eq!(planned(&plan(&file, copied()).unwrap()), without(expected, &["external-data", "graph", "int4"]));
        assert_eq!(desk.run(&file, copied()).unwrap().report.loads, output.report.loads);
    }
    let error = desk.run(&llama, onnx(21, "onnxruntime@1.17")).map(|output| output.path).unwrap_err().to_string();
    assert!(error.contains("opset: `opset_import` imports opset 21, but onnxruntime 1.17 supports opsets up to 20"), "{error}");
}

#[test]
#[cfg(feature = "cli")]
fn commands_check_the_requested_runtimes() {
    use crate::cli::support::{compress, data, ok, read_json};
    let desk = Desk::new();
    model(&desk);
    let folder = desk.path();
    std::fs::write(folder.join("recipe.yaml"), "model: llama\npasses: [quantize: { scheme: W3A16, method: rtn }]\nloads: [transformers]\noutput: out\n")
        .unwrap();
    let loads = |value: Value| value["loads"].as_array().unwrap().iter().map(|load| load["runtime"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(loads(data(folder, "plan recipe.yaml --json")), ["transformers"]);
    assert!(ok(folder, "plan recipe.yaml").stdout.contains(" rules of transformers 5.23; all rules are checked again on the written files"));
    for command in [
        "run recipe.yaml --loads sglang",
        "run recipe.yaml --loads sglang --dry-run",
        "run recipe.yaml --set loads=[sglang]",
        "plan recipe.yaml --loads sglang",
        "quantize llama -o out --scheme W3A16 --method rtn --loads sglang",
        "chain llama -o out --loads sglang -- quantize --scheme W3A16 --method rtn",
    ] {
        let run = compress(folder, command);
        let expected = "error: loads: the output violates rules of sglang 0.5: bits: `group_0` has weights of 3 bits";
        assert!(run.code == 1 && run.stderr.contains(expected) && run.stderr.contains("hint: use `--scheme W4A16`"), "{command}: {}", run.stderr);
        assert!(!folder.join("out").exists(), "{command}");
    }
    // In addition to the runtimes of the recipe.
    let run = ok(folder, "run recipe.yaml --loads vllm");
    assert!(run.stdout.contains(" complies with ") && run.stdout.contains(" rules of vllm 0.33 (a static check: no runtime was run)"), "{}", run.stdout);
    assert_eq!(loads(read_json(&folder.join("out/report.json"))), ["transformers", "vllm"]);
    let run = compress(folder, "quantize llama -o new --loads tgi");
    assert!(run.code == 2 && run.stderr.contains("unknown runtime `tgi`"), "{}", run.stderr);
    std::fs::write(folder.join("wrong.yaml"), "model: llama\nloads: [vllm, llama.cpp@b1]\n").unwrap();
    let run = compress(folder, "plan wrong.yaml");
    assert!(run.stderr.contains("the rules of llama.cpp b1 are not known: use one of 2026"), "{}", run.stderr);
    // A recipe whose output is a file.
    std::fs::write(folder.join("file.yaml"), "model: llama\nloads: [llama.cpp]\noutput: small.gguf\n").unwrap();
    std::fs::remove_file(folder.join("llama/tokenizer.json")).unwrap();
    let run = compress(folder, "plan file.yaml");
    assert!(run.code == 1 && run.stderr.contains("tokenizer: `tokenizer.ggml.model` is `no_vocab`"), "{}", run.stderr);
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    assert!(ok(folder, "plan file.yaml").stdout.contains("small.gguf"));
    assert_eq!(loads(data(folder, "run file.yaml --json")), ["llama.cpp"]);
}

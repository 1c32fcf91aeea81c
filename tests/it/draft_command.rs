//! `compress draft`: the folder is a draft of the model, its recipe trains the same weights again, held-out
//! prompts train nothing, and interrupted runs continue.
#![cfg(all(feature = "cli", feature = "run"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use candle_core::npy::NpzTensors;
use compress::Model;
use compress_core::work::MemoryLimit;
use compress_engine::generation::{Generate, LanguageModel, Sampling};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli::support::{command, compress, data, golden_model, names, ok, read_json};
use crate::common::{device, work};
use crate::generation::changed;

const PROMPTS: &str = "the cat\na red hat\nrain, rain\n\nour old barn\nmy big wet hat\nsmall drops\nthe cat\nno mat\nwe sat\n";
/// Options of a short run, in addition to the prompts.
const SHORT: &str = "--samples 12 --tokens 8 --steps 3 --batch-size 4 --learning-rate 1e-3 --quiet";

/// A Llama as the folder `in`, and prompts.
fn prepared() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json")]);
    fs::write(folder.path().join("prompts.txt"), PROMPTS).unwrap();
    folder
}

/// The continuations in the output of a run: pairs of prompt and continuation.
fn continuations(output: &Path) -> Vec<(Vec<i64>, Vec<i64>)> {
    let arrays = NpzTensors::new(output.join("continuations.npz")).unwrap();
    let rows = |name: &str| arrays.get(name).unwrap().unwrap().to_vec2::<i64>().unwrap();
    let rows = rows("input_ids").into_iter().zip(rows("attention_mask")).zip(rows("labels"));
    rows.map(|((ids, mask), labels)| {
        let length = mask.iter().filter(|mask| **mask == 1).count();
        let start = labels.iter().position(|label| *label != -100).unwrap();
        assert!(mask[..length].iter().all(|mask| *mask == 1) && labels[start..length] == ids[start..length] && labels[length..].iter().all(|l| *l == -100));
        (ids[..start].to_vec(), ids[start..length].to_vec())
    })
    .collect()
}

fn weights(output: &Path) -> Vec<u8> {
    fs::read(output.join("model.safetensors")).unwrap()
}

/// Tokens of texts, as the tokenizer of `in` splits them.
fn encoded(folder: &Path, texts: &[&str]) -> Vec<Vec<i64>> {
    let vocabulary = LanguageModel::new(Model::open(folder.join("in")).unwrap()).unwrap().vocabulary().unwrap();
    texts.iter().map(|text| vocabulary.encode(text).unwrap()).collect()
}

#[test]
fn the_output_is_a_draft_and_its_recipe_reproduces_it() {
    let folder = prepared();
    let folder = folder.path();
    let report = data(folder, &format!("draft in -o out --prompts prompts.txt --draft-tokens 1,3 --json {SHORT}"));
    for file in ["config.json", "tokenizer.json", "model.safetensors", "recipe.yaml", "continuations.npz", "report.html", "README.md"] {
        assert!(folder.join("out").join(file).is_file(), "{file}");
    }
    assert!(!names(folder).contains(&"out.unfinished".to_owned()));
    assert_eq!(read_json(&folder.join("out/config.json"))["num_hidden_layers"], 1);
    let draft = &report["draft"];
    assert_eq!((&draft["prompts"], &draft["tokens"]), (&json!(1), &json!(8)), "{draft}");
    let runs = draft["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| run["draft_tokens"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3]);
    for run in runs {
        let rate = run["acceptance_rate"].as_f64().unwrap();
        assert!(run["tokens_per_step"].as_f64().unwrap() >= 1.0 && (0.0..=1.0).contains(&rate) && run["tokens_per_second"].as_f64().unwrap() > 0.0, "{run}");
        assert!(run["acceptance_by_position"].as_array().unwrap().len() as u64 <= run["draft_tokens"].as_u64().unwrap(), "{run}");
        assert_eq!(run["same_texts"], 1, "{run}");
    }
    assert!([1, 3].contains(&draft["recommended"].as_u64().unwrap()), "{draft}");
    for (file, part) in [("report.md", "## Speculative decoding"), ("report.html", "id=\"draft\"")] {
        assert!(fs::read_to_string(folder.join("out").join(file)).unwrap().contains(part), "{file}");
    }
    let pass = &report["recipe"]["passes"][0]["distill"];
    assert_eq!((&pass["student"], &pass["max_steps"]), (&json!({ "layers": [0] }), &json!(3)), "{pass}");
    assert_eq!(pass["losses"]["soft"], json!({ "weight": 1.0, "temperature": 1.0, "divergence": "acceptance" }));
    assert_eq!(report["recipe"]["data"]["train"], json!({ "arrays": "continuations.npz" }));
    ok(folder, "verify out");
    let generated = data(folder, "generate in --draft out --against in --json --prompt abc --prompt the --tokens 12");
    assert!(generated["prompts"].as_array().unwrap().iter().all(|prompt| prompt["first_difference"].is_null()), "{generated}");
    assert!(generated["draft"]["proposed"].as_u64().unwrap() > 0, "{generated}");
    // The recipe, and the command again.
    ok(folder, "run out/recipe.yaml -o again --quiet");
    ok(folder, &format!("draft in -o twice --prompts prompts.txt --draft-tokens 2 {SHORT}"));
    for other in ["again", "twice"] {
        assert!(weights(&folder.join("out")) == weights(&folder.join(other)), "{other}");
    }
    assert_eq!(fs::read(folder.join("out/continuations.npz")).unwrap(), fs::read(folder.join("twice/continuations.npz")).unwrap());
    // The fidelity of a draft to the model is not measured.
    let is_warning = |note: &Value| note.as_str().unwrap().starts_with("warning");
    assert!(report["fidelity"].is_null() && !report["notes"].as_array().unwrap().iter().any(is_warning), "{report}");
    let unmeasured = data(folder, &format!("draft in -o unmeasured --prompts prompts.txt --no-measure --json {SHORT}"));
    assert!(unmeasured["draft"].is_null() && weights(&folder.join("out")) == weights(&folder.join("unmeasured")));
    // Other commands do not carry over the continuations.
    ok(folder, "cast out -o cast --to f16 --quiet");
    assert!(!folder.join("cast/continuations.npz").exists());
    let table = ok(folder, &format!("draft in -o printed --prompts prompts.txt --draft-tokens 2 {SHORT}")).stdout;
    assert!(table.contains("tokens per step") && table.contains("1 held-out prompt from prompts.txt"), "{table}");
}

/// The continuations are a draft without training.
#[test]
fn continuations_are_a_draft() {
    let folder = prepared();
    let folder = folder.path();
    let options = "--method ngrams --prompts prompts.txt --samples 12 --tokens 8 --quiet";
    let found = data(folder, &format!("draft in -o texts.npz {options} --draft-tokens 1,3 --json"));
    let runs = found["draft"]["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| (run["draft_tokens"].as_u64().unwrap(), run["same_texts"].as_u64().unwrap())).collect::<Vec<_>>(), [(1, 1), (3, 1)]);
    assert!(found["tokens"].as_u64().unwrap() > 12 && found["output"] == "texts.npz", "{found}");
    assert!(!names(folder).contains(&"texts.npz.unfinished".to_owned()));
    // The same continuations as those on which other drafts are trained.
    ok(folder, &format!("draft in -o out --prompts prompts.txt --no-measure {SHORT}"));
    assert_eq!(fs::read(folder.join("texts.npz")).unwrap(), fs::read(folder.join("out/continuations.npz")).unwrap());
    let generated = data(folder, "generate in --draft texts.npz --against in --json --prompt abc --prompt the --tokens 12");
    assert!(generated["prompts"].as_array().unwrap().iter().all(|prompt| prompt["first_difference"].is_null()), "{generated}");
    let printed = ok(folder, &format!("draft in -o texts.npz --force --draft-tokens 2 {options}")).stdout;
    for part in ["texts.npz: ", ": 12 continuations, ", "tokens per step", "1 held-out prompt from prompts.txt", "note: 12 continuations of up to 8 tokens"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let refused = |args: &str, part: &str| {
        let run = compress(folder, &format!("draft in --prompts prompts.txt --method ngrams {args}"));
        assert!(run.code != 0 && run.stderr.contains(part), "{args}: {} {}", run.code, run.stderr);
    };
    refused("-o texts.npz", "texts.npz: exists");
    refused("-o folder", "must be a file FILE.npz");
    refused("-o other.npz --steps 3", "--steps: has no effect with `--method ngrams`");
    refused("-o other.npz --vocabulary 8", "--vocabulary: needs `--method eagle3`");
    refused("-o other.npz --export gguf", "--export: has no effect");
    refused("-o other.npz --sbom cyclonedx", "--sbom: has no effect");
}

/// The model with int8 weights is a draft without training, whose proposals are mostly accepted.
#[test]
fn int8_weights_are_a_draft() {
    let folder = prepared();
    let folder = folder.path();
    let report = data(folder, "draft in -o out --method int8 --prompts prompts.txt --tokens 8 --draft-tokens 1,3 --quiet --json");
    let draft = &report["draft"];
    // All prompts are measured, the repeated one once.
    assert_eq!((draft["prompts"].as_u64(), draft["prompts_from"].as_str()), (Some(8), Some("prompts.txt")), "{draft}");
    for run in draft["runs"].as_array().unwrap() {
        let (tokens, proposed) = (run["tokens_per_step"].as_f64().unwrap(), run["draft_tokens"].as_f64().unwrap());
        assert!(run["same_texts"] == 8 && tokens > 1.0 + proposed / 2.0 && run["acceptance_rate"].as_f64().unwrap() > 0.5, "{run}");
    }
    ok(folder, "verify out");
    // All large weights are int8, also an output head of its own.
    for (name, tensor) in crate::common::read(&folder.join("out/model.safetensors")) {
        assert!(tensor.dtype != safetensors::Dtype::F32 || name.ends_with("norm.weight") || name.ends_with("scale"), "{name}");
    }
    ok(folder, "run out/recipe.yaml -o again --quiet");
    assert!(weights(&folder.join("out")) == weights(&folder.join("again")));
    let generated = data(folder, "generate in --draft out --against in --json --prompt abc --prompt the --tokens 12");
    assert!(generated["prompts"].as_array().unwrap().iter().all(|prompt| prompt["first_difference"].is_null()), "{generated}");
    let few = ok(folder, "draft in -o out --force --method int8 --prompts prompts.txt --samples 3 --tokens 4 --draft-tokens 2 --quiet").stdout;
    for part in ["measured on 3 prompts", "5 prompts not measured, because `--samples` is 3"] {
        assert!(few.contains(part), "{part}: {few}");
    }
    for (args, part) in [
        ("-o out", "exists"),
        ("-o other.gguf", "is a file, but a draft is a folder"),
        ("-o other --layers 1", "--layers: has no effect with `--method int8`"),
        ("-o other --vocabulary 8", "--vocabulary: needs `--method eagle3`"),
        ("-o other --temperature 1", "--temperature: has no effect with `--method int8`"),
        ("-o other --seed 1", "--seed: has no effect with `--method int8`"),
        ("-o other --resume", "--resume: has no effect with `--method int8`"),
        ("-o other --test prompts.txt", "--test: has no effect with `--method int8`"),
        ("-o other --no-measure", "--no-measure: has no effect with `--method int8`"),
        ("-o other --tokens 0", "--tokens: is 0"),
        ("-o other --samples 0", "--samples: is 0"),
        ("-o other --loads vllm", "vllm"),
    ] {
        let run = compress(folder, &format!("draft in --prompts prompts.txt --method int8 {args}"));
        assert!(run.code != 0 && run.stderr.contains(part) && !folder.join("other").exists(), "{args}: {} {}", run.code, run.stderr);
    }
    let twice = compress(folder, "draft out -o other --method int8 --prompts prompts.txt");
    assert!(twice.code != 0 && twice.stderr.contains("is already int8"), "{}", twice.stderr);
}

/// A head that is the embedding table is quantized with it, and prompts may be beginnings of a text.
#[test]
fn tied_models_have_int8_drafts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    crate::low_bits::llama(folder);
    fs::write(folder.join("llama/tokenizer.json"), crate::low_bits::BYTE_LEVEL).unwrap();
    fs::write(folder.join("book.txt"), "abcabbcab".repeat(100)).unwrap();
    let report = data(
        folder,
        "draft llama -o out --method int8 --data {\"text\":\"book.txt\",\"max_length\":8} --tokens 4 --draft-tokens 2 --export gguf --quiet --json",
    );
    assert_eq!(
        (report["passes"].as_array().unwrap().len(), report["draft"]["runs"][0]["same_texts"].as_u64()),
        (1, report["draft"]["prompts"].as_u64()),
        "{report}"
    );
    assert!(folder.join("out/model.gguf").is_file());
}

#[test]
fn models_with_different_layers_have_drafts() {
    let folder = prepared();
    ok(folder.path(), "prune-structured in -o pruned --dims mlp --target params=0.85 --round-to 1 --uniform false --no-measure --quiet");
    assert!(folder.path().join("pruned/graph.json").exists());
    let report = data(folder.path(), &format!("draft pruned -o out --prompts prompts.txt --draft-tokens 2 --json {SHORT}"));
    assert_eq!(report["draft"]["runs"][0]["same_texts"], 1, "{report}");
}

/// The model samples the same tokens without batches.
#[test]
fn held_out_prompts_are_not_trained_on() {
    let folder = prepared();
    let folder = folder.path();
    fs::write(folder.join("test.txt"), "we sat\nno mat\nnot a prompt\n").unwrap();
    let report = data(folder, &format!("draft in -o out --prompts prompts.txt --test test.txt --draft-tokens 2 --json {SHORT}"));
    assert_eq!((&report["draft"]["prompts"], &report["draft"]["prompts_from"]), (&json!(3), &json!("test.txt")));
    let trained = continuations(&folder.join("out"));
    let prompts = encoded(folder, &["the cat", "a red hat", "rain, rain", "our old barn", "my big wet hat", "small drops"]);
    let mut expected: Vec<Vec<i64>> = prompts.iter().cycle().take(12).cloned().collect();
    expected.sort_by_key(Vec::len);
    assert_eq!(trained.iter().map(|(prompt, _)| prompt.clone()).collect::<Vec<_>>(), expected);
    let model = LanguageModel::new(Model::open(folder.join("in")).unwrap()).unwrap();
    let options = Generate { tokens: 8, sampling: Some(Sampling::default()) };
    let sampled = work(|work| model.generate(&expected, &options, &device(), MemoryLimit::default(), work)).unwrap();
    assert_eq!(trained.into_iter().map(|(_, tokens)| tokens).collect::<Vec<_>>(), sampled.into_iter().map(|found| found.tokens).collect::<Vec<_>>());
    let without = data(folder, &format!("draft in -o own --prompts prompts.txt --draft-tokens 2 --json {SHORT}"));
    assert_eq!(without["draft"]["prompts"], 1);
    // The only prompt that no continuation begins with is the held-out one.
    let all = encoded(folder, &PROMPTS.lines().filter(|line| !line.is_empty()).collect::<Vec<_>>());
    let unused = all.iter().filter(|prompt| continuations(&folder.join("own")).iter().all(|(other, _)| other != *prompt)).count();
    assert_eq!(unused, 1);
}

/// In families with rotary embeddings, learned positions, sliding windows and experts.
#[test]
fn batches_generate_the_same_texts() {
    let prompts = [vec![9], vec![5, 6, 7], vec![8, 3, 4], vec![30, 31, 7], vec![1, 2, 3, 4, 5]];
    for name in ["llama", "llama-rope-dynamic", "gpt2", "opt", "qwen2-sliding", "gemma3", "gpt-oss", "mixtral", "deepseek-v3"] {
        let folder = changed(name, json!({ "eos_token_id": 7 }));
        let model = LanguageModel::new(Model::open(folder.path()).unwrap()).unwrap();
        for sampling in [None, Some(Sampling { seed: 3, ..Sampling::default() })] {
            let options = Generate { tokens: 9, sampling };
            let expected = work(|work| model.generate(&prompts, &options, &device(), MemoryLimit::default(), work)).unwrap();
            for done in [0, 2] {
                let mut found = Vec::new();
                let add = &mut |tokens: Vec<Vec<i64>>| {
                    found.extend(tokens);
                    Ok::<_, compress::Error>(())
                };
                work(|work| model.generate_batches((&prompts[..], done), &options, &device(), MemoryLimit::default(), work, add)).unwrap();
                let expected: Vec<&Vec<i64>> = expected[done..].iter().map(|found| &found.tokens).collect();
                assert_eq!(found.iter().collect::<Vec<_>>(), expected, "{name}, {sampling:?}");
            }
        }
    }
    // A prompt and its continuation fit into the positions of the model.
    let folder = changed("gpt2", json!({ "eos_token_id": null }));
    let model = LanguageModel::new(Model::open(folder.path()).unwrap()).unwrap();
    let options = Generate { tokens: 30, sampling: None };
    let mut lengths = Vec::new();
    let add = &mut |tokens: Vec<Vec<i64>>| {
        lengths.extend(tokens.iter().map(Vec::len));
        Ok::<_, compress::Error>(())
    };
    work(|work| model.generate_batches((&[vec![3; 4], vec![5; 15]][..], 0), &options, &device(), MemoryLimit::default(), work, add)).unwrap();
    assert_eq!(lengths, [12, 1]);
}

/// Starts a run that trains without end, and kills it when this many continuations are complete.
fn killed(folder: &Path, options: &str, count: usize) -> String {
    let arguments = format!("draft in -o out --steps 100000000 {options}");
    let mut child = command(folder).args(arguments.split_whitespace()).spawn().unwrap();
    let path = folder.join("out.unfinished/sampled.jsonl");
    let sampled = loop {
        let sampled = fs::read_to_string(&path).unwrap_or_default();
        if sampled.lines().count() > count {
            break sampled;
        }
        assert!(child.try_wait().unwrap().is_none(), "the run has ended");
        std::thread::sleep(Duration::from_millis(2));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    // The training of the next run has other options.
    let _ = fs::remove_dir_all(folder.join("out.unfinished/1-distill"));
    assert!(!folder.join("out").exists() || options.contains("--force"));
    sampled
}

/// Complete continuations are not sampled again, and the others are those of an uninterrupted run.
#[test]
fn interrupted_runs_continue() {
    let folder = prepared();
    let folder = folder.path();
    let options = "--prompts prompts.txt --samples 40 --tokens 8 --batch-size 4 --learning-rate 1e-3 --draft-tokens 2 --quiet";
    ok(folder, &format!("draft in -o whole --steps 3 {options}"));
    killed(folder, options, 2);
    let path = folder.join("out.unfinished/sampled.jsonl");
    let cut = fs::read_to_string(&path).unwrap().lines().take(8).map(|line| format!("{line}\n")).collect::<String>() + "[1, 2";
    fs::write(&path, &cut).unwrap();
    for (arguments, part) in [("", "was left by an interrupted run"), ("--resume --temperature 0.5", "another model, other prompts or other options")] {
        let run = compress(folder, &format!("draft in -o out --steps 3 {options} {arguments}"));
        assert!(run.code == 1 && run.stderr.contains(part), "{arguments}: {}", run.stderr);
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), cut);
    ok(folder, &format!("draft in -o out --steps 3 {options} --resume"));
    assert_eq!(fs::read(folder.join("out/continuations.npz")).unwrap(), fs::read(folder.join("whole/continuations.npz")).unwrap());
    assert!(weights(&folder.join("out")) == weights(&folder.join("whole")) && !folder.join("out.unfinished").exists());
    let sampled = killed(folder, &format!("{options} --force"), 40);
    let mut lines: Vec<&str> = sampled.lines().collect();
    lines[3] = "[40,41,42]";
    fs::write(&path, lines.join("\n") + "\n").unwrap();
    ok(folder, &format!("draft in -o out --steps 3 {options} --force --resume"));
    let found = continuations(&folder.join("out"));
    assert_eq!((found.len(), found[2].1.as_slice()), (40, [40, 41, 42].as_slice()));
}

/// An interruption names the continuations that it keeps, and the option with which they are used.
#[test]
fn an_interrupted_sampling_names_its_continuations() {
    let folder = prepared();
    let folder = folder.path();
    let arguments = "draft in -o out --prompts prompts.txt --samples 100000 --tokens 8 --steps 3 --quiet";
    let child = command(folder).args(arguments.split(' ')).stderr(Stdio::piped()).spawn().unwrap();
    let is_sampling = || fs::read_to_string(folder.join("out.unfinished/sampled.jsonl")).is_ok_and(|text| text.lines().count() > 1);
    while !is_sampling() {
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("no output was written; the complete continuations are saved in out.unfinished"), "{error}");
    assert!(error.contains("hint: run the same command again with `--resume`") && output.status.code() == Some(1), "{error}");
    assert!(is_sampling() && !folder.join("out").exists());
}

/// Prompts from windows of a text and from chats, and the number of steps for a time.
#[test]
fn texts_and_chats_are_prompts() {
    let folder = prepared();
    let folder = folder.path();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation");
    fs::copy(golden.join("book.txt"), folder.join("book.txt")).unwrap();
    let common = "--tokens 5 --draft-tokens 2 --batch-size 2 --quiet --json";
    let report = data(folder, &format!("draft in -o windows --data {{\"text\":\"book.txt\",\"max_length\":6}} --samples 20 --time 1s {common}"));
    let steps = report["recipe"]["passes"][0]["distill"]["max_steps"].as_u64().unwrap();
    assert!(steps >= 1 && report["passes"][0]["details"]["training"]["steps"] == steps, "{report}");
    let trained = continuations(&folder.join("windows"));
    assert!(trained.len() == 20 && trained.iter().all(|(prompt, tokens)| prompt.len() == 6 && (1..=5).contains(&tokens.len())), "{trained:?}");
    assert_eq!(report["draft"]["prompts"], 1);
    // By default, prompts have half of the positions of a small model.
    ok(folder, &format!("draft in -o default --data book.txt --samples 4 --steps 1 {common}"));
    assert!(continuations(&folder.join("default")).iter().all(|(prompt, _)| prompt.len() == 16));
    for (from, to) in [("merged.json", "tokenizer.json"), ("special.json", "tokenizer_config.json"), ("answers.jinja", "chat_template.jinja")] {
        fs::copy(golden.join(from), folder.join("in").join(to)).unwrap();
    }
    let chat = |text: &str| json!({ "messages": [{ "role": "user", "content": text }, { "role": "assistant", "content": "no" }] }).to_string();
    fs::write(folder.join("chats.jsonl"), format!("{}\n{}\n", chat("a hat"), chat("rain"))).unwrap();
    fs::write(folder.join("questions.txt"), "a hat\nrain\n").unwrap();
    let mut found = BTreeMap::new();
    for (name, arguments) in [("data", "--data chats.jsonl"), ("records", "--prompts chats.jsonl"), ("questions", "--prompts questions.txt --chat")] {
        ok(folder, &format!("draft in -o {name} {arguments} --samples 3 --steps 1 {common}"));
        found.insert(name, continuations(&folder.join(name)));
    }
    let run = compress(folder, "draft in -o other --data {\"text\":\"chats.jsonl\",\"max_length\":6}");
    assert!(run.code == 2 && run.stderr.contains("contains chats, for which only"), "{}", run.stderr);
    let text = "<s>user, a hat</s>assistant, ";
    let vocabulary = LanguageModel::new(Model::open(folder.join("in")).unwrap()).unwrap().vocabulary().unwrap();
    assert_eq!(found["data"][0].0, vocabulary.encode_chat(text).unwrap());
    assert!(found["data"] == found["records"] && found["data"] == found["questions"], "{found:?}");
}

/// vLLM loads the folder, and llama.cpp the GGUF file in it.
#[test]
fn the_output_may_contain_a_gguf_file() {
    let folder = tempfile::tempdir().unwrap();
    crate::low_bits::llama(folder.path());
    fs::write(folder.path().join("llama/tokenizer.json"), crate::low_bits::BYTE_LEVEL).unwrap();
    fs::write(folder.path().join("prompts.txt"), "abc\ncab\nabab\nbb\n").unwrap();
    ok(folder.path(), "draft llama -o out --prompts prompts.txt --samples 4 --tokens 4 --steps 1 --draft-tokens 2 --quiet --export gguf --loads vllm");
    for file in ["model.safetensors", "model.gguf"] {
        assert!(folder.path().join("out").join(file).is_file(), "{file}");
    }
    ok(folder.path(), "verify out");
}

#[test]
fn unsuitable_models_prompts_and_options_are_refused() {
    let folder = prepared();
    let folder = folder.path();
    for name in ["bert", "t5"] {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
        fs::create_dir(folder.join(name)).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(file), folder.join(name).join(file)).unwrap();
        }
    }
    for (file, text) in [("empty.txt", "\n\n"), ("one.txt", "the cat\nthe cat\n"), ("long.txt", "a hat\nthe cat sat on the mat and the hat was wet\n")] {
        fs::write(folder.join(file), text).unwrap();
    }
    ok(folder, &format!("draft in -o single --prompts prompts.txt --draft-tokens 2 {SHORT}"));
    fs::create_dir(folder.join("untokenized")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(folder.join("in").join(file), folder.join("untokenized").join(file)).unwrap();
    }
    for (arguments, part) in [
        ("bert -o out --prompts prompts.txt", "are not decoders"),
        ("t5 -o out --prompts prompts.txt", "takes source texts, not prompts to continue"),
        ("single -o out --prompts prompts.txt", "single has 1 layer: a draft omits layers"),
        ("untokenized -o out --prompts prompts.txt", "without tokenizer.json"),
        ("in -o out", "<--prompts <FILE>|--data <DATA>>"),
        ("in -o out --prompts nosuchfile.txt", "nosuchfile.txt"),
        ("in -o out --prompts empty.txt", "--prompts: empty.txt contains no prompts"),
        ("in -o out --prompts prompts.txt --test empty.txt", "--test: empty.txt contains no prompts"),
        ("in -o out --prompts one.txt", "contains only one prompt"),
        ("in -o out --prompts one.txt --test one.txt", "--test: contains all prompts of one.txt"),
        ("in -o out --prompts long.txt", "long.txt: line 2: the prompt has"),
        ("in -o out --data {\"arrays\":\"x.npz\"}", "--data: needs texts"),
        ("in -o out --data prompts.txt --prompts prompts.txt", "cannot be used with"),
        ("in -o out --prompts prompts.txt --chat", "chat_template"),
        ("in -o out --prompts prompts.txt --layers 0", "--layers: is 0"),
        ("in -o out --prompts prompts.txt --layers 2", "--layers: is 2, but the model has 2 layers"),
        ("in -o out --prompts prompts.txt --samples 0", "--samples: is 0"),
        ("in -o out --prompts prompts.txt --steps 0", "--steps: must be at least 1"),
        ("in -o out --prompts prompts.txt --temperature 0", "a low one, such as 0.1"),
        ("in -o out --prompts prompts.txt --tokens 0", "--tokens: is 0"),
        ("in -o out --prompts prompts.txt --lr 0", "--learning-rate: 0 is not"),
        ("in -o out --prompts prompts.txt --time 20", "is not a time like"),
        ("in -o out --prompts prompts.txt --time 20m --steps 3", "cannot be used with"),
        ("in -o out --prompts prompts.txt --time 20m --batch-size auto", "--time: needs a number as `--batch-size`"),
        ("in -o out --prompts prompts.txt --draft-tokens 2 --no-measure", "cannot be used with"),
        ("in -o out --data {\"text\":\"prompts.txt\",\"task\":\"classification\"}", "`task: classification` has no effect on prompts"),
        ("in -o out --prompts prompts.txt --draft-tokens 0", "--draft-tokens: must be at least 1"),
        ("in -o out --prompts prompts.txt --draft-tokens 3,4,3", "--draft-tokens: contains 3 twice"),
        ("in -o out.gguf --prompts prompts.txt", "--output: `out.gguf` is a file"),
        ("in -o in --prompts prompts.txt", "output"),
        ("in -o single --prompts prompts.txt", "exists"),
    ] {
        let run = compress(folder, &format!("draft {arguments}"));
        assert!(run.code != 0 && run.stderr.contains(part), "{arguments}: {}", run.stderr);
        let left: Vec<String> = names(folder).into_iter().filter(|name| name.starts_with("out")).collect();
        assert!(left.is_empty(), "{arguments}: {left:?}");
    }
    // The model is unchanged.
    assert_eq!(weights(&folder.join("in")), weights(&folder.join("untokenized")));
    let report: Value = read_json(&folder.join("single/report.json"));
    let has_note = |report: &Value, text: &str| report["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().starts_with(text));
    assert!(has_note(&report, "trained on 12 continuations of up to 8 tokens") && !has_note(&report, "4 prompts not continued"), "{report}");
    let few = data(folder, "draft in -o few --prompts prompts.txt --samples 3 --tokens 4 --steps 1 --no-measure --quiet --json");
    assert!(has_note(&few, "4 prompts not continued, because `--samples` is 3"), "{few}");
}

/// Starts a run, and sends it a signal while it trains.
fn stopped_in_training(folder: &Path, arguments: &str, signal: Signal) {
    let log = folder.join("out.unfinished/1-distill/training.csv");
    let begun = || fs::read_to_string(&log).is_ok_and(|text| text.lines().count() > 3);
    // A run that ends before it gets the signal is repeated.
    for _ in 0..5 {
        let mut child = command(folder).args(arguments.split_whitespace()).spawn().unwrap();
        while child.try_wait().unwrap().is_none() && !begun() {
            std::thread::sleep(Duration::from_millis(2));
        }
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), signal).unwrap();
        }
        if !child.wait().unwrap().success() {
            return;
        }
    }
    panic!("no run lived long enough to be stopped");
}

/// The training of a killed run begins again with the same continuations, and that of an interrupted one
/// continues at its last step. Both end with the weights of an uninterrupted run.
#[test]
fn trainings_of_drafts_continue() {
    let folder = prepared();
    let folder = folder.path();
    let options = "--prompts prompts.txt --samples 12 --tokens 8 --steps 600 --batch-size 4 --learning-rate 1e-3 --no-measure --quiet";
    ok(folder, &format!("draft in -o whole {options}"));
    for signal in [Signal::KILL, Signal::INT] {
        stopped_in_training(folder, &format!("draft in -o out --force {options}"), signal);
        let checkpoint = folder.join("out.unfinished/1-distill/checkpoint.safetensors");
        assert_eq!((folder.join("out.unfinished/sampled.jsonl").exists(), checkpoint.exists()), (true, signal == Signal::INT), "{signal:?}");
        ok(folder, &format!("draft in -o out --force --resume {options}"));
        assert!(weights(&folder.join("out")) == weights(&folder.join("whole")), "{signal:?}");
        assert_eq!(fs::read(folder.join("out/continuations.npz")).unwrap(), fs::read(folder.join("whole/continuations.npz")).unwrap(), "{signal:?}");
        assert_eq!(read_json(&folder.join("out/report.json"))["passes"][0]["details"]["training"]["steps"], 600, "{signal:?}");
        assert!(!folder.join("out.unfinished").exists(), "{signal:?}");
    }
}

//! Training with the binary: killed and resumed, and distributed over two processes.
#![cfg(all(feature = "run", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};

use crate::train::weights;

const MODEL: &str = "bert-sequence-classification";

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(MODEL)
}

/// Environment variables that launchers set for each process.
pub fn ranks<const COUNT: usize>() -> [Vec<(&'static str, String)>; COUNT] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::array::from_fn(|rank| {
        let values = [("RANK", rank.to_string()), ("WORLD_SIZE", COUNT.to_string()), ("LOCAL_RANK", rank.to_string())];
        values.into_iter().chain([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())]).collect()
    })
}

pub struct Workspace {
    folder: tempfile::TempDir,
    cache: tempfile::TempDir,
    pub model: PathBuf,
}

impl Workspace {
    pub fn new(samples: usize) -> Workspace {
        let folder = tempfile::tempdir().unwrap();
        let ids: Vec<i64> = (0..samples as i64 * 8).map(|i| 3 + i * 31 % 20).collect();
        let labels: Vec<i64> = (0..samples as i64).map(|i| i * 7 % 5 % 2).collect();
        let whole = |values: Vec<i64>, dims: &[usize]| Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
        let arrays = HashMap::from([
            ("attention_mask".to_owned(), whole(vec![1; samples * 8], &[samples, 8])),
            ("input_ids".to_owned(), whole(ids, &[samples, 8])),
            ("labels".to_owned(), whole(labels, &[samples])),
        ]);
        candle_core::safetensors::save(&arrays, folder.path().join("train.safetensors")).unwrap();
        Workspace { folder, cache: tempfile::tempdir().unwrap(), model: golden() }
    }

    /// Texts for a language model.
    pub fn tokens(samples: usize) -> Workspace {
        let place = Workspace { model: golden().with_file_name("llama-grouped-tied"), ..Workspace::new(samples) };
        let path = place.at("train.safetensors");
        let mut arrays = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        arrays.remove("labels");
        candle_core::safetensors::save(&arrays, path).unwrap();
        place
    }

    /// Images for a network with batch norms.
    fn images(model: &str, samples: usize) -> Workspace {
        let place = Workspace { model: golden().with_file_name(model), ..Workspace::new(0) };
        let pixels: Vec<f32> = (0..samples * 3 * 33 * 17).map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0).collect();
        let labels: Vec<i64> = (0..samples as i64).map(|i| i % 2).collect();
        let arrays = HashMap::from([
            ("pixel_values".to_owned(), Tensor::from_vec(pixels, (samples, 3, 33, 17), &Device::Cpu).unwrap()),
            ("labels".to_owned(), Tensor::from_vec(labels, samples, &Device::Cpu).unwrap()),
        ]);
        candle_core::safetensors::save(&arrays, place.folder.path().join("train.safetensors")).unwrap();
        place
    }

    pub fn recipe(&self, options: &str) -> PathBuf {
        self.recipe_with("train: { arrays: train.safetensors }", "finetune", options)
    }

    pub fn recipe_with(&self, data: &str, pass: &str, options: &str) -> PathBuf {
        let path = self.folder.path().join("recipe.yaml");
        let text = format!("model: {}\ndata: {{ {data} }}\npasses:\n  - {pass}: {{ {options} }}\n", self.model.display());
        std::fs::write(&path, text).unwrap();
        path
    }

    pub fn start(&self, recipe: &Path, out: &str, more: &[&str], environment: &[(&str, String)]) -> Child {
        let run = ["run", recipe.to_str().unwrap(), "-o", out, "--quiet"];
        // Cached results of one run would make another one with --resume too short to be killed.
        let cache = self.cache.path().join(out).to_str().unwrap().to_owned();
        self.command(&[&run[..], more].concat(), &[environment, &[("COMPRESS_CACHE", cache)]].concat())
    }

    /// Starts the binary in the folder.
    fn command(&self, args: &[&str], environment: &[(&str, String)]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_compress"));
        command.args(args).current_dir(self.folder.path()).envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn finish(&self, child: Child) {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// The error message of a process that fails.
    pub fn refused(&self, child: Child) -> String {
        let done = child.wait_with_output().unwrap();
        assert!(!done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        String::from_utf8_lossy(&done.stderr).into_owned()
    }

    pub fn report(&self, out: &str) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.folder.path().join(out).join("report.json")).unwrap()).unwrap()
    }

    /// Peak memory of the tensors of training.
    fn memory(&self, out: &str) -> u64 {
        self.report(out)["passes"][0]["details"]["memory"]["peak_bytes"].as_u64().unwrap()
    }

    pub fn at(&self, out: &str) -> PathBuf {
        self.folder.path().join(out)
    }

    pub fn weights(&self, out: &str) -> BTreeMap<String, Vec<f32>> {
        weights(&self.at(out))
    }
}

#[test]
fn a_killed_run_yields_the_result_of_an_uninterrupted_one() {
    check_killed_run("max_steps: 600");
}

/// The same with weights, gradients and state offloaded to files. Files left by a killed run are not
/// used and do not interfere.
#[test]
fn a_killed_run_with_offloaded_parameters_yields_the_same_result() {
    check_killed_run("max_steps: 200, offload: [parameters]");
}

fn check_killed_run(options: &str) {
    let place = Workspace::new(64);
    let recipe = place.recipe(&format!("batch_size: 8, learning_rate: 1e-3, checkpoint_every: {{ steps: 5 }}, {options}"));
    place.finish(place.start(&recipe, "whole", &[], &[]));
    let checkpoint = place.folder.path().join("parts.unfinished/1-finetune/checkpoint.safetensors");
    let (mut killed, mut has_ended) = (0, false);
    for number in 0..3 {
        let mut child = place.start(&recipe, "parts", &["--resume"], &[]);
        let start = Instant::now();
        // Long enough for a checkpoint, too short for all steps.
        while child.try_wait().unwrap().is_none() && (!checkpoint.exists() || start.elapsed() < Duration::from_millis(150 + 100 * number)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        killed += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        has_ended = child.wait().unwrap().success();
    }
    assert!(killed > 0, "no run lived long enough to be killed");
    if !place.folder.path().join("parts").exists() {
        place.finish(place.start(&recipe, "parts", &["--resume"], &[]));
        has_ended = true;
    }
    let (whole, parts) = (place.weights("whole"), place.weights("parts"));
    for (name, values) in &whole {
        assert!(values.iter().zip(&parts[name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} differs");
    }
    // A run that is killed after it has written the output leaves its checkpoints.
    assert!(!has_ended || !place.folder.path().join("parts.unfinished").exists());
}

/// With `cpu:strict`, it is an error if a step copies more than its samples and metrics between host and
/// device, and host kernels are not used.
#[test]
fn steps_do_not_change_with_strict_copies() {
    let cases = [
        ("finetune", "", ""),
        ("finetune", "average: 0.9, evaluate_every: 2, offload: [optimizer], gradient_checkpointing: blocks", ""),
        ("finetune", "evaluate_every: 2, scales: learnable", "  - quantize-dynamic: {}\n"),
        ("distill", "student: { layers: [0] }, offload: [teacher], losses: { soft: { temperature: 2 }, hidden: 1, attention: 1 }, average: 0.9", ""),
        ("distill a language model", "student: { layers: [0] }, offload: [teacher], losses: { soft: 1, hidden: 1, attention: 1 }", ""),
        ("distill a language model", "student: { layers: [0] }, offload: [parameters], losses: { soft: 1, hidden: 1, attention: 1 }, average: 0.9", ""),
        ("finetune", "evaluate_every: 2, scales: learnable, offload: [parameters]", "  - quantize-dynamic: {}\n"),
    ];
    for (pass, options, before) in cases {
        let place = if pass.contains("language") { Workspace::tokens(24) } else { Workspace::new(24) };
        let pass = pass.split(' ').next().unwrap();
        let path = place.folder.path().join("recipe.yaml");
        let data = "data: { train: { arrays: train.safetensors }, evaluation: { arrays: train.safetensors } }";
        let comma = if options.is_empty() { "" } else { ", " };
        let options = format!("max_steps: 4, batch_size: 6, gradient_accumulation: 2, learning_rate: 1e-3{comma}{options}");
        std::fs::write(&path, format!("model: {}\n{data}\npasses:\n{before}  - {pass}: {{ {options} }}\n", place.model.display())).unwrap();
        place.finish(place.start(&path, "kernels", &[], &[]));
        place.finish(place.start(&path, "strict", &["--device", "cpu:strict"], &[]));
        // The metrics of a step are copied together.
        let report = place.report("strict");
        let copies = report["passes"].as_array().unwrap().last().unwrap()["details"]["training"]["copies"].as_array().unwrap();
        let metrics = copies.iter().find(|copies| copies["direction"] == "out" && copies["cause"] == "step").unwrap();
        assert_eq!(metrics["per_step"], 1.0, "{pass} {options}");
        let (kernels, strict) = (place.weights("kernels"), place.weights("strict"));
        for (name, values) in kernels.iter().filter(|(name, _)| !name.contains("key.bias")) {
            let apart = values.iter().zip(&strict[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // 8-bit weights and activations may differ by one step.
            assert!(apart < if before.is_empty() { 1e-4 } else { 2e-2 }, "{pass} {options}, {name}: {apart}");
        }
    }
}

/// 8-bit optimizer states need tables, which are uploaded before the first step; parameters of fewer
/// than 4096 elements do not use them.
#[test]
fn steps_with_8_bit_states_copy_nothing_else() {
    let place = Workspace::images("efficientnet-image-classification", 12);
    assert!(weights(&place.model).values().any(|values| values.len() >= 4096));
    let recipe = place.recipe("max_steps: 4, batch_size: 6, learning_rate: 1e-3, optimizer: adamw8bit");
    let [kernels, strict] = [("kernels", &[][..]), ("strict", &["--device", "cpu:strict"][..])].map(|(out, more)| {
        place.finish(place.start(&recipe, out, more, &[]));
        let curve = place.report(out)["passes"][0]["details"]["training"]["curve"].clone();
        curve.as_array().unwrap().iter().map(|row| row["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(kernels.len(), 4);
    assert!(kernels.iter().zip(&strict).all(|(a, b)| (a - b).abs() <= 1e-3 * a.abs()), "{kernels:?} {strict:?}");
}

#[test]
fn two_processes_compute_the_steps_of_one() {
    let sharded = "shard: parameters, average: 0.9, evaluate_every: 3";
    let cases = ["", "shard_optimizer: true", "memory_limit: 0", "offload: [parameters]", "shard: parameters", sharded];
    for (options, data) in cases.map(|options| (options, "")).into_iter().chain([(sharded, "  - prune-unstructured: {}\n")]) {
        let (place, tight) = (Workspace::new(64), options.starts_with("memory_limit"));
        let recipe = |options: &str| {
            let path = place.recipe_with("train: { arrays: train.safetensors }, evaluation: { arrays: train.safetensors }", "finetune", options);
            std::fs::write(&path, std::fs::read_to_string(&path).unwrap().replace("passes:\n", &format!("passes:\n{data}"))).unwrap();
            path
        };
        // One process uses two micro-batches per step, two processes use one each.
        let alike = if options == sharded { ", average: 0.9, evaluate_every: 3" } else { "" };
        place.finish(place.start(&recipe(&format!("max_steps: 6, batch_size: 8, gradient_accumulation: 2, learning_rate: 1e-3{alike}")), "one", &[], &[]));
        let options = if tight { format!("memory_limit: {}", place.memory("one") * 9 / 10) } else { options.to_owned() };
        let comma = if options.is_empty() { "" } else { ", " };
        let recipe = recipe(&format!("max_steps: 6, batch_size: 8, learning_rate: 1e-3{comma}{options}"));
        let children: Vec<Child> = ranks::<2>().iter().map(|rank| place.start(&recipe, "two", &[], rank)).collect();
        children.into_iter().for_each(|child| place.finish(child));
        let (one, two) = (place.weights("one"), place.weights("two"));
        // Gradients of the biases of keys consist of rounding errors, which depend on the partition.
        for (name, values) in one.iter().filter(|(name, _)| !tight || !name.contains("key.bias")) {
            let apart = values.iter().zip(&two[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "{options}, {name}: {apart}");
        }
        if options == "shard: parameters" {
            assert!(place.memory("two") < place.memory("one") * 3 / 4, "{} and {}", place.memory("two"), place.memory("one"));
        }
        assert_eq!(place.report("two").to_string().contains("micro-batches"), tight);
    }
}

/// Only one of two processes has labels in its batch.
#[test]
fn ranks_without_labels_do_not_change_steps() {
    let place = Workspace::new(64);
    let path = place.at("train.safetensors");
    let mut arrays = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let labels: Vec<i64> = (0..64).map(|i| if i % 3 == 0 { i % 2 } else { -100 }).collect();
    arrays.insert("labels".to_owned(), Tensor::from_vec(labels, 64, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&arrays, path).unwrap();
    let options = "max_steps: 8, batch_size: 1, learning_rate: 0.1, optimizer: sgd";
    place.finish(place.start(&place.recipe(&format!("{options}, gradient_accumulation: 2")), "one", &[], &[]));
    let recipe = place.recipe(options);
    let children: Vec<Child> = ranks::<2>().iter().map(|rank| place.start(&recipe, "two", &[], rank)).collect();
    children.into_iter().for_each(|child| place.finish(child));
    let (one, two) = (place.weights("one"), place.weights("two"));
    for (name, values) in one {
        let apart = values.iter().zip(&two[&name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-5, "{name}: {apart}");
    }
}

#[test]
fn a_training_of_three_resumes_after_one_was_killed() {
    check_resume_after_kill("shard_optimizer: true");
    check_resume_after_kill("shard: optimizer, optimizer: adamw8bit, average: 0.9");
    check_resume_after_kill("shard: parameters, average: 0.9, evaluate_every: 4");
}

fn check_resume_after_kill(options: &str) {
    let place = Workspace::new(100);
    let evaluates = options.contains("evaluate_every");
    let data = format!("train: {{ arrays: train.safetensors }}{}", if evaluates { ", evaluation: { arrays: evaluation.safetensors }" } else { "" });
    let evaluation = place.folder.path().join("evaluation.safetensors");
    if evaluates {
        std::fs::copy(place.folder.path().join("train.safetensors"), &evaluation).unwrap();
    }
    let options = format!("max_steps: 80, batch_size: 4, learning_rate: 1e-3, checkpoint_every: {{ steps: 5 }}, {options}");
    let recipe = place.recipe_with(&data, "finetune", &options);
    let start = |out: &str, more: &[&str]| ranks::<3>().map(|rank| place.start(&recipe, out, more, &rank));
    start("whole", &[]).into_iter().for_each(|child| place.finish(child));
    let folder = place.folder.path().join("parts.unfinished/1-finetune");
    let [mut first, second, mut third] = start("parts", &[]);
    while first.try_wait().unwrap().is_none() && !folder.join("checkpoint.safetensors").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    third.kill().unwrap();
    for said in [place.refused(first), place.refused(second)] {
        assert!(said.contains("rank 2 at"), "{said}");
    }
    third.wait().unwrap();
    let resume = || start("parts", &["--resume"]).map(|child| place.refused(child));
    // Another number of processes, a missing shard, and one of another step.
    let said = place.refused(place.start(&recipe, "parts", &["--resume"], &[]));
    assert!(said.contains("checkpoint.safetensors") && said.contains("with 3 processes, but this one has 1"), "{said}");
    if evaluates {
        // The best weights would be selected by scores on two data sets.
        let bytes = std::fs::read(&evaluation).unwrap();
        let mut other = bytes.clone();
        *other.last_mut().unwrap() ^= 1;
        std::fs::write(&evaluation, other).unwrap();
        let [said, ..] = resume();
        assert!(said.contains("belongs to a training with different evaluation data"), "{said}");
        std::fs::write(&evaluation, bytes).unwrap();
    }
    let shares = || std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.to_string_lossy().ends_with("-2.safetensors"));
    let kept: Vec<(PathBuf, Vec<u8>)> = shares().map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect();
    kept.iter().for_each(|(path, _)| std::fs::remove_file(path).unwrap());
    for said in resume() {
        assert!(said.contains("-2.safetensors") && said.contains("is missing"), "{said}");
    }
    for (path, _) in &kept {
        // Shards of an unfinished checkpoint may be missing.
        let _ = std::fs::copy(path.to_string_lossy().replace("-2.safetensors", "-1.safetensors"), path);
    }
    let [_, _, said] = resume();
    assert!(said.contains("-2.safetensors") && said.contains("belongs to rank 1 of 3"), "{said}");
    kept.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    start("parts", &["--resume"]).into_iter().for_each(|child| place.finish(child));
    let (whole, parts) = (place.weights("whole"), place.weights("parts"));
    for (name, values) in &whole {
        assert!(values.iter().zip(&parts[name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} differs");
    }
    let _ = std::fs::remove_file(evaluation);
    assert_eq!(place.names(), ["parts", "recipe.yaml", "train.safetensors", "whole"]);
}

/// One process with one batch, one process with two consecutive batches, and two processes with one
/// batch each.
#[test]
fn batch_statistics_cover_all_processes() {
    let place = Workspace::images("torchvision-resnet18", 8);
    let recipe = |more: &str| place.recipe(&format!("max_steps: 1, batch_size: 4, optimizer: sgd, learning_rate: 1e-12{more}"));
    place.finish(place.start(&recipe(""), "first", &[], &[]));
    place.finish(place.start(&recipe(", gradient_accumulation: 2"), "both", &[], &[]));
    for (out, more) in [("two", ""), ("sharded", ", shard: parameters")] {
        let path = recipe(more);
        ranks::<2>().map(|rank| place.start(&path, out, &[], &rank)).into_iter().for_each(|child| place.finish(child));
    }
    let (two, sharded) = (place.weights("two"), place.weights("sharded"));
    for (name, values) in &two {
        let apart = values.iter().zip(&sharded[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-6, "{name}: {apart}");
    }
    let [before, first, both, two] = [place.model.clone(), place.at("first"), place.at("both"), place.at("two")].map(|folder| weights(&folder));
    let mut seen = 0;
    for (name, values) in two.iter().filter(|(name, _)| name.contains("running_")) {
        for (at, found) in values.iter().enumerate() {
            // Each run updates the running statistics by a tenth towards the statistics of its batches.
            let expected = (0.1 * first[name][at] + 0.9 * before[name][at] + both[name][at]) / 2.0;
            assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{name}: {found} instead of {expected}");
            seen += usize::from((found - first[name][at]).abs() > 1e-6);
        }
    }
    assert!(seen > 10, "the second process has other samples");
}

/// The other ranks have no evaluation samples; they stop when rank 0 stops.
#[test]
fn rank_0_of_three_evaluates_for_all() {
    for shard in ["optimizer", "parameters"] {
        check_rank_0_evaluates(shard);
    }
}

fn check_rank_0_evaluates(shard: &str) {
    let place = Workspace::new(32);
    let options = &format!("max_steps: 40, batch_size: 4, optimizer: sgd, learning_rate: 1e-12, evaluate_every: 2, patience: 2, shard: {shard}");
    let train = "train: { arrays: train.safetensors }";
    let [first, second, third] = ranks::<3>();
    let with = place.recipe_with(&format!("{train}, evaluation: {{ arrays: train.safetensors }}"), "finetune", options);
    let alone = place.folder.path().join("alone.yaml");
    std::fs::rename(&with, &alone).unwrap();
    let (with, alone) = (alone, place.recipe_with(train, "finetune", options));
    let children = [(&with, first), (&alone, second), (&alone, third)].map(|(recipe, rank)| place.start(recipe, "out", &[], &rank));
    children.into_iter().for_each(|child| place.finish(child));
    let report = place.report("out");
    // Neither the evaluation after 2 nor that after 4 steps is better than the initial one.
    assert_eq!(report["passes"][0]["details"]["training"]["steps"], 4, "{report}");
    assert!(report.to_string().contains("stopped early after step 4"), "{report}");
}

/// The first process converts files of logits, and the second one reads its results.
#[test]
fn files_of_logits_are_converted_once() {
    let place = Workspace::tokens(24);
    let ids = candle_core::safetensors::load(place.at("train.safetensors"), &Device::Cpu).unwrap()["input_ids"].to_vec2::<i64>().unwrap();
    let response = |row: &Vec<i64>| {
        let next = row[1..].iter().map(|id| serde_json::json!({ id.to_string(): -0.5 }));
        let rows: Vec<serde_json::Value> = [serde_json::Value::Null].into_iter().chain(next).collect();
        serde_json::json!({ "prompt_token_ids": row, "prompt_logprobs": rows })
    };
    std::fs::write(place.at("responses.jsonl"), ids.iter().map(|row| format!("{}\n", response(row))).collect::<String>()).unwrap();
    let options = "student: { layers: [0] }, losses: { soft: { temperature: 1 } }, teacher_logits: responses.jsonl, teacher_cache: answers, teacher_top: 1, epochs: 1, batch_size: 4, optimizer: sgd";
    let recipe = place.recipe_with("train: { arrays: train.safetensors, task: language-modelling }", "distill", options);
    ranks::<2>().map(|rank| place.start(&recipe, "out", &[], &rank)).into_iter().for_each(|child| place.finish(child));
    assert_eq!(std::fs::read_dir(place.at("answers")).unwrap().count(), 1, "each process would write its own file");
    let texts: std::collections::BTreeSet<_> = ids.iter().collect();
    let note = format!("the logits of 24 samples were read from files, {} of them", texts.len());
    assert!(place.report("out").to_string().contains(&note), "{note}");
    // The other process learns why the first one fails.
    std::fs::write(place.at("responses.jsonl"), format!("{}\n", response(&ids[0]))).unwrap();
    let children = ranks::<2>().map(|rank| place.start(&recipe, "refused", &[], &rank));
    for error in children.map(|child| place.refused(child)) {
        assert!(error.contains("no record has the token ids of sample"), "{error}");
    }
}

/// Each process computes logits for other samples, and reads those of the others.
#[test]
fn processes_share_cached_logits() {
    let place = Workspace::new(24);
    let options = "student: { layers: [0] }, losses: { soft: 1 }, teacher_cache: answers, teacher_top: 1, epochs: 2, batch_size: 4, optimizer: sgd";
    let recipe = place.recipe_with("train: { arrays: train.safetensors }", "distill", options);
    let size = |entry: std::fs::DirEntry| (entry.file_name(), entry.metadata().unwrap().len());
    let files = || std::fs::read_dir(place.at("answers")).unwrap().map(|entry| size(entry.unwrap())).collect::<BTreeMap<_, _>>();
    let mut sizes = Vec::new();
    for out in ["asked", "kept"] {
        ranks::<2>().map(|rank| place.start(&recipe, out, &[], &rank)).into_iter().for_each(|child| place.finish(child));
        sizes.push(files());
    }
    assert_eq!(sizes[0], sizes[1], "logits are not computed twice");
    assert_eq!(place.weights("asked"), place.weights("kept"));
}

#[test]
fn rank_0_of_two_writes() {
    let model = golden();
    let (model, train) = (model.to_str().unwrap(), "{ arrays: train.safetensors }");
    let steps = ["--max-steps", "2", "--batch-size", "4"];
    let finetune = [&["finetune", model, "-o", "out", "--train", train][..], &steps].concat();
    let distill = [&["distill", model, "-o", "out", "--train", train, "--student", "layers=0"][..], &steps].concat();
    let chain = [&["chain", model, "-o", "out", "--train", train, "--", "cast", "--", "finetune"][..], &steps].concat();
    // Training does not start before all processes have connected.
    for args in [finetune, distill, chain, vec!["quantize-dynamic", model, "-o", "out"]] {
        let place = Workspace::new(32);
        let children = ranks::<2>().map(|rank| place.command(&args, &rank));
        let [first, second] = children.map(|child| child.wait_with_output().unwrap());
        for done in [&first, &second] {
            assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        }
        assert!(String::from_utf8_lossy(&first.stdout).contains("written and verified: out"), "{args:?}");
        assert!(second.stdout.is_empty() && String::from_utf8_lossy(&second.stderr).contains("rank 0 writes out"), "{args:?}");
        assert_eq!(place.names(), ["out", "train.safetensors"], "{args:?}");
    }
}

#[test]
fn two_trainings_do_not_share_a_resume_folder() {
    let place = Workspace::new(64);
    let recipe = place.recipe("max_steps: 100000, batch_size: 8, learning_rate: 1e-3");
    let log = place.folder.path().join("out.unfinished/1-finetune/training.csv");
    let mut first = place.start(&recipe, "out", &[], &[]);
    while first.try_wait().unwrap().is_none() && !std::fs::read_to_string(&log).is_ok_and(|text| text.lines().count() > 3) {
        std::thread::sleep(Duration::from_millis(5));
    }
    for more in [&["--force"][..], &["--resume"], &[]] {
        let second = place.start(&recipe, "out", more, &[]).wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&second.stderr);
        assert!(second.status.code() == Some(1) && told.contains("out.unfinished: is used by another run"), "{more:?}: {told}");
    }
    assert!(first.try_wait().unwrap().is_none() && log.exists(), "the first run continues");
    first.kill().unwrap();
    first.wait().unwrap();
    let begun = std::fs::read_to_string(&log).unwrap();
    assert!(begun.lines().skip(1).enumerate().all(|(i, line)| line.starts_with(&format!("{},", i + 1))), "{begun}");
    // --force removes what a killed run has left, but not foreign files.
    let recipe = place.recipe("max_steps: 2, batch_size: 8");
    place.finish(place.start(&recipe, "out", &["--force"], &[]));
    assert_eq!(place.names(), ["out", "recipe.yaml", "train.safetensors"]);
    let theirs = place.folder.path().join("out.unfinished");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(theirs.join("thesis.tex"), "years").unwrap();
    let refused = place.start(&recipe, "out", &["--force"], &[]).wait_with_output().unwrap();
    assert!(refused.status.code() == Some(1) && String::from_utf8_lossy(&refused.stderr).contains("out.unfinished"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(theirs.join("thesis.tex")).unwrap(), "years");
}

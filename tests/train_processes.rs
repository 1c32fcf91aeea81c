//! Training by the binary: killed and gone on with, and by two processes at once.
#![cfg(all(feature = "run", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use compress::Model;

const MODEL: &str = "bert-sequence-classification";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(MODEL)
}

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new(samples: usize) -> Place {
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
        Place { folder }
    }

    fn recipe(&self, options: &str) -> PathBuf {
        let path = self.folder.path().join("recipe.yaml");
        let model = golden();
        let text = format!("model: {}\ndata: {{ train: {{ arrays: train.safetensors }} }}\npasses:\n  - finetune: {{ {options} }}\n", model.display());
        std::fs::write(&path, text).unwrap();
        path
    }

    fn start(&self, recipe: &Path, out: &str, more: &[&str], environment: &[(&str, String)]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_compress"));
        command.args(["run".as_ref(), recipe.as_os_str(), "-o".as_ref(), self.folder.path().join(out).as_os_str(), "--quiet".as_ref()]).args(more);
        // What takes long is kept, and would be found by another run.
        command.env("COMPRESS_CACHE", self.folder.path().join(format!("{out}-cache")));
        command.envs(environment.iter().map(|(name, value)| (name, value))).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn finish(&self, child: Child) {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    fn report(&self, out: &str) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.folder.path().join(out).join("report.json")).unwrap()).unwrap()
    }

    /// The most that tensors of training took.
    fn memory(&self, out: &str) -> u64 {
        self.report(out)["passes"][0]["details"]["memory"]["peak_bytes"].as_u64().unwrap()
    }

    fn weights(&self, out: &str) -> BTreeMap<String, Vec<f32>> {
        let model = Model::open(self.folder.path().join(out)).unwrap();
        model.weights.by_name.iter().map(|(name, weight)| (name.clone(), weight.floats(name).unwrap())).collect()
    }
}

#[test]
fn a_killed_run_ends_as_one_that_was_not() {
    let place = Place::new(64);
    let recipe = place.recipe("max_steps: 600, batch_size: 8, learning_rate: 1e-3, checkpoint_every: { steps: 5 }");
    place.finish(place.start(&recipe, "whole", &[], &[]));
    let checkpoint = place.folder.path().join("parts.unfinished/1-finetune/checkpoint.safetensors");
    let mut killed = 0;
    for number in 0..3 {
        let mut child = place.start(&recipe, "parts", &["--resume"], &[]);
        let start = Instant::now();
        // Long enough for a checkpoint of this run, too short for all steps.
        while child.try_wait().unwrap().is_none() && (!checkpoint.exists() || start.elapsed() < Duration::from_millis(150 + 100 * number)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        killed += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(killed > 0, "no run lived long enough to be killed");
    if !place.folder.path().join("parts").exists() {
        place.finish(place.start(&recipe, "parts", &["--resume"], &[]));
    }
    let (whole, parts) = (place.weights("whole"), place.weights("parts"));
    for (name, values) in &whole {
        assert!(values.iter().zip(&parts[name]).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} differs");
    }
    assert!(!place.folder.path().join("parts.unfinished").exists());
}

/// With `cpu:strict`, a step that copies more than its samples in and its figures out is an error, and no kernel of the host is used.
#[test]
fn steps_are_the_same_where_every_copy_counts() {
    let cases = [
        ("finetune", "", ""),
        ("finetune", "average: 0.9, evaluate_every: 2, offload: [optimizer], gradient_checkpointing: blocks", ""),
        ("finetune", "evaluate_every: 2, scales: learnable", "  - quantize-dynamic: {}\n"),
        ("distill", "student: { layers: [0] }, offload: [teacher], losses: { soft: { temperature: 2 }, hidden: 1, attention: 1 }, average: 0.9", ""),
    ];
    for (pass, options, before) in cases {
        let place = Place::new(24);
        let path = place.folder.path().join("recipe.yaml");
        let data = "data: { train: { arrays: train.safetensors }, evaluation: { arrays: train.safetensors } }";
        let comma = if options.is_empty() { "" } else { ", " };
        let options = format!("max_steps: 4, batch_size: 6, gradient_accumulation: 2, learning_rate: 1e-3{comma}{options}");
        std::fs::write(&path, format!("model: {}\n{data}\npasses:\n{before}  - {pass}: {{ {options} }}\n", golden().display())).unwrap();
        place.finish(place.start(&path, "kernels", &[], &[]));
        place.finish(place.start(&path, "strict", &["--device", "cpu:strict"], &[]));
        let (kernels, strict) = (place.weights("kernels"), place.weights("strict"));
        for (name, values) in kernels.iter().filter(|(name, _)| !name.contains("key.bias")) {
            let apart = values.iter().zip(&strict[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // One step of eight bits may be more or less.
            assert!(apart < if before.is_empty() { 1e-4 } else { 1e-2 }, "{pass} {options}, {name}: {apart}");
        }
    }
}

#[test]
fn two_processes_make_the_steps_of_one() {
    for (shard, tight) in [(false, false), (true, false), (false, true)] {
        let place = Place::new(64);
        // One process takes two batches a step, of two each takes one.
        place.finish(place.start(&place.recipe("max_steps: 6, batch_size: 8, gradient_accumulation: 2, learning_rate: 1e-3"), "one", &[], &[]));
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let limit = if tight { format!(", memory_limit: {}", place.memory("one") * 9 / 10) } else { String::new() };
        let recipe = place.recipe(&format!("max_steps: 6, batch_size: 8, learning_rate: 1e-3, shard_optimizer: {shard}{limit}"));
        let environment = |rank: usize| {
            let values = [("RANK", rank.to_string()), ("WORLD_SIZE", "2".into()), ("LOCAL_RANK", rank.to_string())];
            values.into_iter().chain([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())]).collect::<Vec<_>>()
        };
        let children: Vec<Child> = (0..2).map(|rank| place.start(&recipe, "two", &[], &environment(rank))).collect();
        children.into_iter().for_each(|child| place.finish(child));
        let (one, two) = (place.weights("one"), place.weights("two"));
        // Gradients of the biases of keys are nothing but rounding, which parts change.
        for (name, values) in one.iter().filter(|(name, _)| !tight || !name.contains("key.bias")) {
            let apart = values.iter().zip(&two[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "shard_optimizer: {shard}, memory_limit: {tight}, {name}: {apart}");
        }
        assert_eq!(place.report("two").to_string().contains("in parts"), tight);
    }
}

//! Layer-wise passes with the binary in several processes, which share the samples and the layers.
#![cfg(all(feature = "run", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use candle_core::{Device, Tensor};
use compress::Model;

use crate::gguf::importance::{Networks, tiny};
use crate::train_processes::{Workspace, golden, ranks};

const GPTQ: &str = "method: gptq, scheme: W4A16, group_size: 4";

/// A model with samples of random tokens.
fn workspace(model: &str, samples: i64) -> Workspace {
    let mut place = Workspace::new(0);
    place.model = golden().with_file_name(model);
    let ids = Tensor::from_vec((0..8 * samples).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (samples as usize, 8), &Device::Cpu).unwrap();
    let mask = ids.ones_like().unwrap();
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids), ("attention_mask".to_owned(), mask)].into(), place.at("train.safetensors")).unwrap();
    place
}

/// Starts a process for each of the ranks.
fn start<const COUNT: usize>(place: &Workspace, recipe: &Path, out: &str, more: &[&str]) -> [Child; COUNT] {
    ranks::<COUNT>().map(|rank| place.start(recipe, out, more, &rank))
}

fn bytes(place: &Workspace, out: &str) -> Vec<u8> {
    std::fs::read(place.at(out).join("model.safetensors")).unwrap()
}

fn values(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let weights = Model::open(folder).unwrap().weights;
    weights.by_name.iter().map(|(name, weight)| (name.clone(), weight.floats(name).unwrap())).collect()
}

/// The layers of the report, and the mean of their errors relative to rounding.
fn errors(place: &Workspace, out: &str) -> (BTreeSet<String>, f64) {
    let layers = place.report(out)["passes"][0]["details"]["layers"].as_array().unwrap().clone();
    let names: BTreeSet<String> = layers.iter().map(|layer| layer["weight"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names.len(), layers.len(), "{layers:?}");
    (names, layers.iter().map(|layer| layer["relative_error"].as_f64().unwrap()).sum::<f64>() / layers.len() as f64)
}

/// Statistics of features are sums in 64 bits, so that their order does not change 32-bit weights. Three
/// ranks have two, two and one of five batches, and four ranks one or two.
#[test]
fn ranks_compute_the_weights_of_one_process() {
    for (pass, options) in [
        ("prune-unstructured", "importance: wanda, amount: 0.4"),
        ("palettize", "bits: 4, group_size: 8, importance: activation"),
        ("quantize", "method: awq, scheme: W4A16, group_size: 8"),
        ("quantize", "method: smoothquant, scheme: W8A8"),
    ] {
        let place = workspace("llama", 40);
        let recipe = place.recipe_with("calibration: { arrays: train.safetensors, batch_size: 8, samples: 40 }", pass, options);
        place.finish(place.start(&recipe, "one", &[], &[]));
        start::<3>(&place, &recipe, "three", &[]).into_iter().for_each(|child| place.finish(child));
        start::<4>(&place, &recipe, "four", &[]).into_iter().for_each(|child| place.finish(child));
        assert!(bytes(&place, "one") == bytes(&place, "three") && bytes(&place, "one") == bytes(&place, "four"), "{pass} {options}");
        assert!(bytes(&place, "one") != std::fs::read(place.model.join("model.safetensors")).unwrap());
    }
}

/// Sums of products are added in 32 bits in another order, which rarely changes a code. With two batches, one
/// of three ranks has none. Experts have few tokens, which differ from rank to rank. Searched dampings and
/// coordinate descent would amplify the differences, so that only errors are compared with them.
#[test]
fn sums_of_products_in_the_order_of_ranks_rarely_change_codes() {
    let fixed = format!("{GPTQ}, damping: 0.1, propagation: 0.5, sweeps: 0");
    let (guided, corrected) = (format!("{fixed}, guide: loss"), format!("{fixed}, correct: {{ rank: 2 }}"));
    for (model, pass, options, batch) in [
        ("llama", "quantize", fixed.as_str(), 8),
        ("llama", "quantize", &fixed, 20),
        ("llama", "quantize", &guided, 8),
        ("llama", "quantize", &corrected, 8),
        ("llama", "prune-unstructured", "importance: sparsegpt, amount: 0.4", 8),
        ("qwen3-moe", "quantize", &fixed, 8),
        ("llama", "quantize", GPTQ, 20),
        ("qwen3-moe", "quantize", GPTQ, 8),
    ] {
        let place = workspace(model, 40);
        let data = format!("calibration: {{ arrays: train.safetensors, batch_size: {batch}, samples: 40 }}");
        let recipe = place.recipe_with(&data, pass, options);
        place.finish(place.start(&recipe, "one", &[], &[]));
        for out in ["three", "again"] {
            start::<3>(&place, &recipe, out, &[]).into_iter().for_each(|child| place.finish(child));
        }
        let said = format!("{model} {pass} {options} {batch}");
        assert!(bytes(&place, "three") == bytes(&place, "again"), "{said}");
        if options == GPTQ {
            let [(names, one), (others, three)] = ["one", "three"].map(|out| errors(&place, out));
            assert!(names == others && (one - three).abs() < 0.05 * one, "{said}: {one} and {three}");
            continue;
        }
        let (one, three) = (values(&place.at("one")), values(&place.at("three")));
        let apart = |name: &String, value: &Vec<f32>| value.iter().zip(&three[name]).filter(|(a, b)| (*a - *b).abs() > 1e-4).count();
        let different: usize = one.iter().map(|(name, value)| apart(name, value)).sum();
        let total: usize = one.values().map(Vec::len).sum();
        assert!(one.len() == three.len() && different * 200 < total, "{said}: {different} of {total}");
    }
}

/// Rows of blocks of GGUF files are divided among ranks. The order of sums rarely changes a value of the
/// first layers; compensation amplifies the differences in later ones.
#[test]
fn ranks_divide_rows_of_blocks() {
    let mut place = workspace("llama", 40);
    tiny(&place.at(""), Networks::Plain, 64);
    place.model = place.at("in");
    let options = "method: gptq, scheme: Q4_0, damping: 0.1, propagation: 0.5, sweeps: 0";
    let recipe = place.recipe_with("calibration: { arrays: train.safetensors, batch_size: 8, samples: 40 }", "quantize", options);
    place.finish(place.start(&recipe, "one.gguf", &[], &[]));
    for out in ["three.gguf", "again.gguf"] {
        start::<3>(&place, &recipe, out, &[]).into_iter().for_each(|child| place.finish(child));
    }
    let [three, again] = ["three.gguf", "again.gguf"].map(|out| std::fs::read(place.at(out)).unwrap());
    assert!(three == again);
    let [original, one, three] = ["in", "one.gguf", "three.gguf"].map(|out| values(&place.at(out)));
    for part in ["q", "k", "v"] {
        let name = format!("model.layers.0.self_attn.{part}_proj.weight");
        let count = |others: &[f32]| one[&name].iter().zip(others).filter(|(a, b)| (*a - *b).abs() > 1e-4).count();
        let (changed, different) = (count(&original[&name]), count(&three[&name]));
        assert!(changed > 1000 && different * 40 < changed, "{part}: {different} of {changed}");
    }
}

#[test]
fn a_killed_rank_ends_all_and_resumed_blocks_are_the_same() {
    let place = workspace("qwen3-moe", 1200);
    let recipe = place.recipe_with("calibration: { arrays: train.safetensors, batch_size: 8, samples: 1200 }", "quantize", GPTQ);
    start::<3>(&place, &recipe, "whole", &[]).into_iter().for_each(|child| place.finish(child));
    let folder = place.at("parts.unfinished/1-quantize");
    let is_block = |entry: std::io::Result<std::fs::DirEntry>| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("block-"));
    let [mut first, second, mut third] = start::<3>(&place, &recipe, "parts", &[]);
    while first.try_wait().unwrap().is_none() && !std::fs::read_dir(&folder).is_ok_and(|mut entries| entries.any(is_block)) {
        std::thread::sleep(Duration::from_millis(2));
    }
    third.kill().unwrap();
    for said in [place.refused(first), place.refused(second)] {
        assert!(said.contains("rank 2 at"), "{said}");
    }
    third.wait().unwrap();
    // Blocks of another number of processes have other sums.
    let said = place.refused(place.start(&recipe, "parts", &["--resume"], &[]));
    assert!(said.contains("another number of processes"), "{said}");
    start::<3>(&place, &recipe, "parts", &["--resume"]).into_iter().for_each(|child| place.finish(child));
    assert!(place.report("parts").to_string().contains("loaded from the checkpoints of an interrupted run"));
    assert!(bytes(&place, "whole") == bytes(&place, "parts"));
    assert_eq!(errors(&place, "whole"), errors(&place, "parts"));
    assert!(!place.at("parts.unfinished").exists());
}

/// Ranks with other samples would compute weights that do not belong together.
#[test]
fn ranks_with_other_samples_are_refused() {
    let place = workspace("llama", 16);
    let other = place.recipe_with("calibration: { arrays: train.safetensors, batch_size: 4, samples: 16 }", "quantize", GPTQ);
    std::fs::rename(&other, place.at("other.yaml")).unwrap();
    let recipe = place.recipe_with("calibration: { arrays: train.safetensors, batch_size: 8, samples: 16 }", "quantize", GPTQ);
    let [first, second] = ranks::<2>();
    let children = [place.start(&recipe, "out", &[], &first), place.start(&place.at("other.yaml"), "out", &[], &second)];
    for said in children.map(|child| place.refused(child)) {
        assert!(said.contains("rank 1") && said.contains("differ"), "{said}");
    }
    assert!(!place.at("out").exists());
}

/// Each token is counted once: with two samples, `down_proj` has 16 tokens for 24 features.
#[test]
fn ranks_count_each_token_once() {
    let place = workspace("llama", 2);
    let recipe = place.recipe_with("calibration: { arrays: train.safetensors, batch_size: 1, samples: 2 }", "quantize", GPTQ);
    start::<3>(&place, &recipe, "three", &[]).into_iter().for_each(|child| place.finish(child));
    let notes = place.report("three")["notes"].to_string();
    assert!(notes.contains("`layers.0.mlp.gated`: 16 for 24"), "{notes}");
}

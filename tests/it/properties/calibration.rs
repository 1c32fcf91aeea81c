//! Properties of calibrated passes: number, order and scarcity of samples.

use compress_engine::data::Data;
use compress_engine::exec::Inputs;
use rand::RngExt;
use rand::seq::SliceRandom;
use serde_json::{Value, json};

use crate::properties::draws::{Draw, Network, fidelity, permuted, seeds};

/// The first samples.
fn first(samples: &Inputs, count: usize) -> Inputs {
    permuted(samples, &(0..count as u32).collect::<Vec<_>>())
}

/// A network of either kind.
fn network(seed: u64) -> Draw {
    Draw::network(seed, if seed.is_multiple_of(2) { Network::Dense } else { Network::Convolutional })
}

#[test]
fn every_number_of_samples_verifies() {
    for seed in seeds(12) {
        let mut draw = Draw::any(seed);
        let count = draw.rng.random_range(1..=40);
        let data = draw.data(&draw.samples(count, seed));
        let what = format!("{}, {count} samples", draw.name);
        let written = draw.run(json!([{ "quantize-static": {} }]), json!(["onnx"]), |builder| builder.calibration(data));
        written.unwrap_or_else(|e| panic!("{what}: {e}")).check(&what);
    }
}

#[test]
fn one_more_sample_changes_little() {
    for seed in seeds(6) {
        let mut draw = network(seed);
        let count = draw.rng.random_range(8..=40);
        let (samples, held_out) = (draw.samples(count + 1, seed), draw.samples(50, seed + 1000));
        let [fewer, more] = [count, count + 1].map(|count| {
            let data = draw.data(&first(&samples, count));
            let written = draw.run(json!([{ "quantize-static": {} }]), json!(["onnx"]), |builder| builder.calibration(data)).unwrap();
            fidelity(&draw, &written.path, &held_out)
        });
        let moved = (fewer.cosine - more.cosine).abs();
        assert!(moved < 0.005, "{}: cosine {} with {count} samples, {} with one more", draw.name, fewer.cosine, more.cosine);
    }
}

#[test]
fn the_order_of_samples_does_not_change_ranges() {
    // Without smoothing and bias correction, which sum over samples, only ranges depend on the data.
    let pass = json!([{ "quantize-static": { "observer": "minmax", "smooth": "none", "bias_correction": false } }]);
    for seed in seeds(8) {
        let mut draw = network(seed);
        let count = draw.rng.random_range(2..=40);
        // A set with more samples than `samples` is not split: the pass reads all permuted samples.
        let samples = draw.samples(count + 1, seed);
        let mut order: Vec<u32> = (0..=count as u32).collect();
        order[..count].shuffle(&mut draw.rng);
        let [given, shuffled] = [samples.clone(), permuted(&samples, &order)].map(|samples| {
            let data = Data { samples: Some(count), ..draw.data(&samples) };
            draw.run(pass.clone(), json!(["onnx"]), |builder| builder.calibration(data)).unwrap().files()
        });
        assert!(given == shuffled, "{}: {count} samples in the order {order:?} give other ranges", draw.name);
    }
}

const RESCALED: &str = "4 bits, rescaled";

/// Passes that use samples, each with its data-free counterpart.
fn pairs() -> [(&'static str, [Value; 2]); 6] {
    // Rows of any width are one group.
    let quantize = |scheme: &str, method: &str| {
        let group_size = if scheme != "W8A16" { json!({ "group_size": -1 }) } else { json!({}) };
        let mut options = json!({ "scheme": scheme, "method": method });
        options.as_object_mut().unwrap().extend(group_size.as_object().unwrap().clone());
        json!([{ "quantize": options }])
    };
    let prune = |importance: &str| json!([{ "prune-unstructured": { "amount": 0.5, "importance": importance } }]);
    let decompose = |importance: &str| json!([{ "decompose": { "rank": 0.5, "importance": importance } }]);
    [
        ("8 bits", ["rtn", "gptq"].map(|method| quantize("W8A16", method))),
        ("4 bits", ["rtn", "gptq"].map(|method| quantize("W4A16", method))),
        (RESCALED, ["rtn", "awq"].map(|method| quantize("W4A16", method))),
        ("3 bits", ["rtn", "autoround"].map(|method| quantize("W3A16", method))),
        ("half of the weights", ["l1", "sparsegpt"].map(prune)),
        ("low rank", ["none", "activation"].map(decompose)),
    ]
}

/// Layers are compared on held-out tokens. The errors of the layers of a decoder add up differently in each
/// model, so that single draws vary, but not their mean.
#[test]
fn few_samples_are_not_worse_than_none() {
    for (what, [plain, by_samples]) in pairs() {
        let mut ratios = [Vec::new(), Vec::new()];
        for (seed, decoder) in seeds(6).flat_map(|seed| [(seed, None), (seed, Some(["llama", "qwen3"][seed as usize % 2]))]) {
            let mut draw = decoder.map_or_else(|| Draw::network(seed, Network::Dense), |name| Draw::family(seed, name));
            let count = draw.rng.random_range(1..=16);
            let (data, held_out) = (draw.data(&draw.samples(count, seed)), draw.samples(50, seed + 1000));
            let exports = json!([{ "safetensors": { "layout": "sparse" } }]);
            let without = draw.run(plain.clone(), exports.clone(), |builder| builder);
            let with = draw.run(by_samples.clone(), exports, |builder| builder.calibration(data));
            let [without, with] = match [without, with] {
                // Heads with the same input can be in different blocks, which block-wise calibration
                // rejects by name.
                [Ok(_), Err(error)] if error.to_string().contains("is not used in the same block") => continue,
                runs => runs.map(|written| written.unwrap_or_else(|e| panic!("{what}, {}: {e}", draw.name))),
            };
            let error = |folder| fidelity(&draw, folder, &held_out).sqnr_db.map_or(0.0, |db| 10f64.powf(-db / 20.0));
            let (without, ours) = (error(&without.path), error(&with.path));
            let is_noted = with.report.notes.iter().any(|note| note.contains("fewer calibration tokens than features"));
            let limit = match decoder {
                Some(_) => 1.15,
                // Rescaled layers are not compared with layers rounded without samples.
                None if what == RESCALED && is_noted => f64::INFINITY,
                None => 1.0,
            };
            assert!(ours <= limit * without, "{what}, {}: error {ours:.3e} with {count} samples, {without:.3e} without", draw.name);
            ratios[usize::from(decoder.is_some())].push((ours / without.max(f64::MIN_POSITIVE)).ln());
        }
        for ratios in ratios {
            let mean = (ratios.iter().sum::<f64>() / ratios.len() as f64).exp();
            assert!(mean <= 1.0, "{what}: {mean} times the error of no samples");
        }
    }
}

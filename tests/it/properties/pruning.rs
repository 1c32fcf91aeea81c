//! Properties of structured pruning: which units are removed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use compress_engine::exec::Inputs;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::common::{DType, Desk, Tensor, Tensors, read};
use crate::properties::draws::{Draw, fidelity, place, seeds};
use crate::properties::options::schema;

const FIRST: &str = "bert.encoder.layer.0.intermediate.dense";
const SECOND: &str = "bert.encoder.layer.0.output.dense.weight";

/// The importance criteria: every constant of the option in the schema of recipes.
fn importances() -> Vec<String> {
    let schema = schema();
    let option = &schema["$defs"]["PruneStructured"]["properties"]["importance"]["$ref"];
    let definition = option.as_str().unwrap().rsplit('/').next().unwrap();
    let values = schema["$defs"][definition]["oneOf"].as_array().unwrap();
    values.iter().map(|value| value["const"].as_str().unwrap().to_owned()).collect()
}

/// Multiplies the weights that write units of a hidden layer, or read them.
fn scale(weights: &mut Tensors, units: &[usize], writing: f64, reading: f64) {
    for (name, factor) in [(format!("{FIRST}.weight"), writing), (format!("{FIRST}.bias"), writing), (SECOND.to_owned(), reading)] {
        let tensor = &weights[&name];
        let (shape, mut values) = (tensor.shape.clone(), tensor.values());
        let width = shape.get(1).copied().unwrap_or(1);
        for (index, value) in values.iter_mut().enumerate() {
            let unit = if name == SECOND { index % width } else { index / width };
            if units.contains(&unit) {
                *value *= factor;
            }
        }
        weights.insert(name, Tensor::floats(DType::F32, &shape, &values));
    }
}

/// A drawn model with other weights.
fn folder(desk: &Desk, draw: &Draw, weights: &Tensors) -> PathBuf {
    let folder = place(desk, weights, 1);
    std::fs::copy(draw.path.join("config.json"), folder.join("config.json")).unwrap();
    folder
}

/// Prunes with labelled samples as calibration data, which `taylor` needs.
fn run(draw: &Draw, passes: Value, samples: &Inputs) -> compress::Result<PathBuf> {
    let mut arrays = samples.clone();
    let count = samples["input_ids"].dims()[0];
    let labels: Vec<i64> = (0..count as i64).map(|sample| sample % 3).collect();
    arrays.insert("labels".to_owned(), candle_core::Tensor::from_vec(labels, count, &candle_core::Device::Cpu).unwrap());
    let data = draw.data(&arrays);
    Ok(draw.run(passes, json!(["safetensors"]), |builder| builder.calibration(data))?.path)
}

/// The units of the hidden layer that a pruned model still has: rows of the original weight.
fn remaining(draw: &Draw, pruned: &Path) -> BTreeSet<usize> {
    let rows = |folder: &Path| {
        let bias = read(folder).remove(&format!("{FIRST}.bias")).unwrap();
        bias.bits()
    };
    let original = rows(&draw.path);
    rows(pruned).iter().map(|row| original.iter().position(|other| other == row).unwrap()).collect()
}

fn pruned(importance: &str, keep: usize, width: usize) -> Value {
    let amount = json!({ "mlp": format!("{} units", width - keep) });
    json!([{ "prune-structured": { "dims": ["mlp"], "amount": amount, "importance": importance, "round_to": 1, "targets": ["*layer.0*"] } }])
}

#[test]
fn dead_units_are_removed_first_by_every_importance() {
    for seed in seeds(3) {
        let mut draw = Draw::family(seed, "bert-sequence-classification");
        let width = 28;
        let (desk, weights, samples) = (Desk::new(), read(&draw.path), draw.samples(9, seed));
        let dead: BTreeSet<usize> = (0..5).map(|_| draw.rng.random_range(0..width)).collect();
        let some: Vec<usize> = dead.iter().copied().filter(|_| draw.rng.random_range(0..2) == 0).collect();
        let others: Vec<usize> = dead.iter().copied().filter(|unit| !some.contains(unit)).collect();
        let all: Vec<usize> = dead.iter().copied().collect();
        for importance in importances() {
            let mut weights = weights.clone();
            if ["l1", "l2"].contains(&importance.as_str()) {
                // Both sum the incoming and the outgoing weights of a unit.
                scale(&mut weights, &all, 0.0, 0.0);
            } else {
                // The contribution of a unit is zero if its outgoing weights or its activation are.
                scale(&mut weights, &some, 1.0, 0.0);
                scale(&mut weights, &others, 0.0, 1.0);
            }
            draw.path = folder(&desk, &draw, &weights);
            let what = format!("{}, importance {importance}", draw.name);
            let path = run(&draw, pruned(&importance, width - dead.len(), width), &samples).unwrap_or_else(|e| panic!("{what}: {e}"));
            let fidelity = fidelity(&draw, &path, &draw.samples(20, seed + 1));
            assert!(fidelity.cosine_min > 0.99999, "{what}: units {dead:?} are dead, and removing as many changes outputs: {fidelity:?}");
        }
    }
}

#[test]
fn removing_the_lowest_ranked_units_changes_less_than_removing_the_highest() {
    let mut totals: Vec<(String, [f64; 3])> = importances().into_iter().map(|name| (name, [0.0; 3])).collect();
    for seed in seeds(3) {
        let mut draw = Draw::family(seed, "bert-sequence-classification");
        let width = 28;
        // Units of different importance, each scaled by a random factor.
        let mut weights = read(&draw.path);
        let mut rng = StdRng::seed_from_u64(seed);
        for unit in 0..width {
            let factor = 4f64.powf(rng.random_range(-1.0..1.0));
            scale(&mut weights, &[unit], factor, factor);
        }
        let desk = Desk::new();
        draw.path = folder(&desk, &draw, &weights);
        let (samples, held_out) = (draw.samples(15, seed), draw.samples(40, seed + 1000));
        for (importance, [low, any, high]) in &mut totals {
            // The seven units that remain after harsh pruning rank highest.
            let [mild, harsh] = [width - 7, 7].map(|keep| run(&draw, pruned(importance, keep, width), &samples).unwrap());
            let highest: Vec<usize> = remaining(&draw, &harsh).into_iter().collect();
            let without = |units: &[usize]| {
                let mut without = weights.clone();
                scale(&mut without, units, 1.0, 0.0);
                folder(&desk, &draw, &without)
            };
            let error = |folder: &Path| fidelity(&draw, folder, &held_out).sqnr_db.map_or(0.0, |db| 10f64.powf(-db / 20.0));
            *low += error(&mild);
            *any += error(&without(&[0, 1, 2, 3, 4, 5, 6]));
            *high += error(&without(&highest));
        }
    }
    for (importance, [low, any, high]) in totals {
        let what =
            format!("importance {importance}: error {low:.4} without the lowest-ranked units, {any:.4} without the first, {high:.4} without the highest");
        assert!(low < 0.9 * any && low < high, "{what}");
    }
}

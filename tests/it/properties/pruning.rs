//! Properties of structured pruning: which units are removed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use compress_engine::exec::Inputs;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::common::{DType, Desk, Tensor, Tensors, read};
use crate::properties::draws::{Draw, fidelity, place, seeds};
use crate::properties::options::schema;

/// Units of a layer that structured pruning removes, and the weights that belong to them.
struct Units {
    family: &'static str,
    dim: &'static str,
    targets: &'static str,
    count: usize,
    /// Number of consecutive channels of a unit.
    width: usize,
    /// Weights and biases that write the units, along their first axis; the first one has other values for
    /// each unit.
    writing: &'static [&'static str],
    /// The weight that reads the units, along its second axis.
    reading: &'static str,
}

const UNITS: [Units; 3] = [
    Units {
        family: "bert-sequence-classification",
        dim: "mlp",
        targets: "*layer.0*",
        count: 28,
        width: 1,
        writing: &["bert.encoder.layer.0.intermediate.dense.bias", "bert.encoder.layer.0.intermediate.dense.weight"],
        reading: "bert.encoder.layer.0.output.dense.weight",
    },
    Units {
        family: "bert-sequence-classification",
        dim: "heads",
        targets: "*layer.0*",
        count: 2,
        width: 8,
        writing: &[
            "bert.encoder.layer.0.attention.self.value.bias",
            "bert.encoder.layer.0.attention.self.value.weight",
            "bert.encoder.layer.0.attention.self.query.bias",
            "bert.encoder.layer.0.attention.self.query.weight",
            "bert.encoder.layer.0.attention.self.key.bias",
            "bert.encoder.layer.0.attention.self.key.weight",
        ],
        reading: "bert.encoder.layer.0.attention.output.dense.weight",
    },
    Units {
        family: "torchvision-resnet18",
        dim: "channels",
        targets: "layer3.0.bn1*",
        count: 8,
        width: 1,
        writing: &["layer3.0.bn1.bias", "layer3.0.bn1.weight", "layer3.0.conv1.weight"],
        reading: "layer3.0.conv2.weight",
    },
];

impl Units {
    /// Multiplies the weights that write units, or read them.
    fn scale(&self, weights: &mut Tensors, units: &[usize], writing: f64, reading: f64) {
        let written = self.writing.iter().map(|name| (*name, 0, writing));
        for (name, axis, factor) in written.chain([(self.reading, 1, reading)]) {
            let tensor = &weights[name];
            let (shape, mut values) = (tensor.shape.clone(), tensor.values());
            let (size, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
            for (index, value) in values.iter_mut().enumerate() {
                if units.contains(&(index / inner % size / self.width)) {
                    *value *= factor;
                }
            }
            weights.insert(name.to_owned(), Tensor::floats(DType::F32, &shape, &values));
        }
    }

    /// The units that a pruned model still has.
    fn remaining(&self, draw: &Draw, pruned: &Path) -> Vec<usize> {
        let channels = |folder: &Path| read(folder).remove(self.writing[0]).unwrap().bits();
        let original = channels(&draw.path);
        channels(pruned).iter().step_by(self.width).map(|value| original.iter().position(|other| other == value).unwrap() / self.width).collect()
    }

    fn pruned(&self, importance: &str, removed: usize) -> Value {
        let amount = json!({ self.dim: format!("{removed} units") });
        json!([{ "prune-structured": { "dims": [self.dim], "amount": amount, "importance": importance, "round_to": 1, "targets": [self.targets] } }])
    }
}

/// The importance criteria: every constant of the option in the schema of recipes.
fn importances() -> Vec<String> {
    let schema = schema();
    let option = &schema["$defs"]["PruneStructured"]["properties"]["importance"]["$ref"];
    let definition = option.as_str().unwrap().rsplit('/').next().unwrap();
    let values = schema["$defs"][definition]["oneOf"].as_array().unwrap();
    values.iter().map(|value| value["const"].as_str().unwrap().to_owned()).collect()
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
    let count = samples.values().next().unwrap().dims()[0];
    let labels: Vec<i64> = (0..count as i64).map(|sample| sample % 3).collect();
    arrays.insert("labels".to_owned(), candle_core::Tensor::from_vec(labels, count, &candle_core::Device::Cpu).unwrap());
    let data = draw.data(&arrays);
    Ok(draw.run(passes, json!(["safetensors"]), |builder| builder.calibration(data))?.path)
}

/// Error of a folder's outputs relative to those of the drawn model.
fn error(draw: &Draw, folder: &Path, samples: &Inputs) -> f64 {
    fidelity(draw, folder, samples).sqnr_db.map_or(0.0, |db| 10f64.powf(-db / 20.0))
}

#[test]
fn dead_units_are_removed_first_by_every_importance() {
    for (seed, units) in seeds(3).flat_map(|seed| UNITS.iter().map(move |units| (seed, units))) {
        let mut draw = Draw::family(seed, units.family);
        let (desk, weights, samples) = (Desk::new(), read(&draw.path), draw.samples(9, seed));
        let dead: BTreeSet<usize> = (0..units.count.div_ceil(6)).map(|_| draw.rng.random_range(0..units.count)).collect();
        let some: Vec<usize> = dead.iter().copied().filter(|_| draw.rng.random_range(0..2) == 0).collect();
        let others: Vec<usize> = dead.iter().copied().filter(|unit| !some.contains(unit)).collect();
        let all: Vec<usize> = dead.iter().copied().collect();
        for importance in importances() {
            let mut weights = weights.clone();
            if ["l1", "l2"].contains(&importance.as_str()) {
                // Both sum the incoming and the outgoing weights of a unit.
                units.scale(&mut weights, &all, 0.0, 0.0);
            } else {
                // The contribution of a unit is zero if its outgoing weights or its activation are.
                units.scale(&mut weights, &some, 1.0, 0.0);
                units.scale(&mut weights, &others, 0.0, 1.0);
            }
            draw.path = folder(&desk, &draw, &weights);
            let what = format!("{}, {}, importance {importance}", draw.name, units.dim);
            let path = run(&draw, units.pruned(&importance, dead.len()), &samples).unwrap_or_else(|e| panic!("{what}: {e}"));
            let fidelity = fidelity(&draw, &path, &draw.samples(20, seed + 1));
            assert!(fidelity.cosine_min > 0.99999, "{what}: units {dead:?} are dead, and removing as many changes outputs: {fidelity:?}");
        }
    }
}

#[test]
fn removing_the_lowest_ranked_units_changes_less_than_removing_the_highest() {
    let kinds = UNITS.iter().flat_map(|units| importances().into_iter().map(move |importance| (units, importance)));
    let mut totals: Vec<_> = kinds.map(|kind| (kind, [0.0; 3])).collect();
    for (seed, units) in seeds(3).flat_map(|seed| UNITS.iter().map(move |units| (seed, units))) {
        let mut draw = Draw::family(seed, units.family);
        // Units of different importance, each scaled by a random factor.
        let mut weights = read(&draw.path);
        let mut rng = StdRng::seed_from_u64(seed);
        for unit in 0..units.count {
            let factor = 4f64.powf(rng.random_range(-1.0..1.0));
            units.scale(&mut weights, &[unit], factor, factor);
        }
        let desk = Desk::new();
        draw.path = folder(&desk, &draw, &weights);
        let (samples, held_out) = (draw.samples(15, seed), draw.samples(40, seed + 1000));
        // Units that remain after harsh pruning rank highest.
        let few = units.count.div_ceil(4);
        let without = |removed: &[usize]| {
            let mut without = weights.clone();
            units.scale(&mut without, removed, 1.0, 0.0);
            error(&draw, &folder(&desk, &draw, &without), &held_out)
        };
        let groups: Vec<usize> = (0..units.count).collect();
        let errors: Vec<f64> = groups.chunks(few).map(without).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        for ((_, importance), [low, any, high]) in totals.iter_mut().filter(|((kind, _), _)| kind.reading == units.reading) {
            let [mild, harsh] = [few, units.count - few].map(|removed| run(&draw, units.pruned(importance, removed), &samples).unwrap());
            *low += error(&draw, &mild, &held_out);
            *any += mean;
            *high += without(&units.remaining(&draw, &harsh));
        }
    }
    for ((units, importance), [low, any, high]) in totals {
        let what = format!(
            "{}, importance {importance}: error {low:.4} without the lowest-ranked units, {any:.4} on average, {high:.4} without the highest",
            units.dim
        );
        assert!(low < 0.9 * any && low < high, "{what}");
    }
}

/// Layers of Llama or experts of Mixtral, and the weights through which they act.
struct Parts {
    family: &'static str,
    dim: &'static str,
    count: usize,
    mixtures: usize,
    /// Parts of the names of weights; `#` is the number of a layer or expert, and `@` that of a mixture of
    /// experts.
    acting: &'static [&'static str],
}

const PARTS: [Parts; 2] = [
    Parts { family: "llama", dim: "layers", count: 2, mixtures: 1, acting: &["layers.#.self_attn.o_proj.", "layers.#.mlp.down_proj."] },
    Parts { family: "mixtral", dim: "experts", count: 4, mixtures: 2, acting: &["layers.@.block_sparse_moe.experts.#.w2."] },
];

impl Parts {
    /// Multiplies the outputs of layers, or of experts of a mixture.
    fn scale(&self, weights: &mut Tensors, mixture: usize, parts: &[usize], factor: f64) {
        let name = |name: &str, part: &usize| name.replace('#', &part.to_string()).replace('@', &mixture.to_string());
        let names = || parts.iter().flat_map(|part| self.acting.iter().map(move |acting| name(acting, part)));
        for (_, tensor) in weights.iter_mut().filter(|(name, _)| names().any(|part| name.contains(&part))) {
            let values: Vec<f64> = tensor.values().into_iter().map(|value| value * factor).collect();
            *tensor = Tensor::floats(DType::F32, &tensor.shape.clone(), &values);
        }
    }

    /// A drawn model whose router, if it has one, selects one expert for each token.
    fn draw(&self, seed: u64) -> (Draw, Tensors) {
        let draw = Draw::family(seed, self.family);
        let path = draw.path.join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        if self.dim == "experts" {
            config["num_experts_per_tok"] = json!(1);
        }
        std::fs::write(&path, config.to_string()).unwrap();
        let weights = read(&draw.path);
        (draw, weights)
    }

    /// The pruned model, and the removed layers, or experts of each mixture.
    fn pruned(&self, draw: &Draw, removed: usize, samples: &Inputs) -> (PathBuf, Vec<Vec<usize>>) {
        let passes = json!([{ "prune-structured": { "amount": { self.dim: format!("{removed} units") } } }]);
        let data = draw.data(samples);
        let written = draw.run(passes, json!(["safetensors"]), |builder| builder.calibration(data)).unwrap_or_else(|e| panic!("{}: {e}", draw.name));
        let details = &written.report.passes[0].details[self.dim];
        let mixtures = details.as_array().cloned().unwrap_or_else(|| vec![details.clone()]);
        (written.path, mixtures.iter().map(|mixture| serde_json::from_value(mixture["gone"].clone()).unwrap()).collect())
    }
}

#[test]
fn layers_and_experts_without_effect_are_removed_first() {
    for (seed, parts) in seeds(4).flat_map(|seed| PARTS.iter().map(move |parts| (seed, parts))) {
        let (desk, (mut draw, mut weights)) = (Desk::new(), parts.draw(seed));
        let mut dead: Vec<usize> = (0..parts.count).collect();
        dead.shuffle(&mut draw.rng);
        dead.truncate(parts.count / 2);
        if parts.dim == "layers" {
            parts.scale(&mut weights, 0, &dead, 0.0);
        }
        // Of two opposite rows, a router prefers one to a row of zeros.
        for (_, router) in weights.iter_mut().filter(|(name, _)| name.ends_with(".gate.weight")) {
            let (width, mut values) = (router.shape[1], router.values());
            let alive: Vec<usize> = (0..parts.count).filter(|expert| !dead.contains(expert)).collect();
            for at in 0..width {
                dead.iter().for_each(|expert| values[expert * width + at] = 0.0);
                values[alive[1] * width + at] = -values[alive[0] * width + at];
            }
            *router = Tensor::floats(DType::F32, &router.shape.clone(), &values);
        }
        draw.path = folder(&desk, &draw, &weights);
        let (path, gone) = parts.pruned(&draw, dead.len(), &draw.samples(9, seed));
        dead.sort_unstable();
        assert!(!gone.is_empty() && gone.iter().all(|gone| *gone == dead), "{}: {gone:?}, but {dead:?} are dead", draw.name);
        let fidelity = fidelity(&draw, &path, &draw.samples(20, seed + 1));
        assert!(fidelity.cosine_min > 0.99999, "{}: {fidelity:?}", draw.name);
    }
}

#[test]
fn layers_and_experts_with_the_least_effect_are_removed() {
    for parts in PARTS {
        let [mut low, mut high] = [0.0; 2];
        for seed in seeds(4) {
            let (mut draw, mut weights) = parts.draw(seed);
            for part in 0..parts.count {
                let factor = 4f64.powf(draw.rng.random_range(-1.0..1.0));
                (0..parts.mixtures).for_each(|mixture| parts.scale(&mut weights, mixture, &[part], factor));
            }
            let desk = Desk::new();
            draw.path = folder(&desk, &draw, &weights);
            let (_, gone) = parts.pruned(&draw, parts.count / 2, &draw.samples(15, seed));
            let without = |removed: &dyn Fn(&usize, &[usize]) -> bool| {
                let mut without = weights.clone();
                for (mixture, gone) in gone.iter().enumerate() {
                    let removed: Vec<usize> = (0..parts.count).filter(|part| removed(part, gone)).collect();
                    parts.scale(&mut without, mixture, &removed, 0.0);
                }
                error(&draw, &folder(&desk, &draw, &without), &draw.samples(40, seed + 1000))
            };
            low += without(&|part, gone| gone.contains(part));
            high += without(&|part, gone| !gone.contains(part));
        }
        assert!(low < 0.9 * high, "{}: error {low:.4} without the removed ones, {high:.4} without the others", parts.dim);
    }
}

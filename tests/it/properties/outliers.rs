//! Property of outliers: outlier channels of normalizations are rescaled in every family, or the report
//! names the normalization.

use compress_graph::ir::{Kind, Op};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::json;

use crate::common::{DType, Tensor, Tensors, contents, read, write};
use crate::properties::draws::{Draw, families, fidelity, seeds};

const FACTOR: f64 = 200.0;

/// A normalization that only linear layers read.
struct Norm {
    weight: String,
    /// Offset added to the stored weight.
    offset: f64,
    bias: Option<String>,
    /// Weights of the layers, and whether their inputs are the first axis.
    readers: Vec<(String, bool)>,
}

/// Whether a detector selects queries by their scores. Rounding can then select other queries, which changes
/// outputs by much more than the rounding errors that this test compares.
fn selects_queries(draw: &Draw) -> bool {
    draw.model().graph().unwrap().nodes().iter().any(|node| matches!(node.op, Op::TopK(_)))
}

/// Normalizations that share no weights with other layers, and whose consumers share none either.
fn norms(draw: &Draw) -> Vec<Norm> {
    let graph = draw.model().graph().unwrap();
    let name = |id| graph.value(id).name.clone();
    let is_own = |id| graph.nodes().iter().filter(|node| node.inputs.contains(&id)).count() == 1 && graph.value(id).kind == Kind::Param;
    let found = graph.nodes().iter().filter_map(|node| {
        let offset = match &node.op {
            Op::RmsNorm(op) => op.offset,
            Op::LayerNorm(_) => 0.0,
            _ => return None,
        };
        let is_output = graph.outputs().iter().any(|(_, id)| *id == node.output);
        let readers: Vec<_> = graph.nodes().iter().filter(|reader| reader.inputs.contains(&node.output)).collect();
        let readers = readers.iter().map(|reader| match &reader.op {
            Op::Linear(op) if reader.inputs[0] == node.output && is_own(reader.inputs[1]) => Some((name(reader.inputs[1]), op.input_major)),
            _ => None,
        });
        let readers = readers.collect::<Option<Vec<_>>>().filter(|readers| !readers.is_empty() && !is_output)?;
        let own = node.inputs[1..].iter().all(|id| is_own(*id));
        own.then(|| Norm { weight: name(node.inputs[1]), offset, bias: node.inputs.get(2).map(|id| name(*id)), readers })
    });
    found.collect()
}

fn change(weights: &mut Tensors, name: &str, value: impl Fn(usize, f64) -> f64) {
    let tensor = weights.get_mut(name).unwrap();
    let values: Vec<f64> = tensor.values().into_iter().enumerate().map(|(index, old)| value(index, old)).collect();
    *tensor = Tensor::floats(DType::F32, &tensor.shape.clone(), &values);
}

/// Multiplies one channel of every normalization, and divides the weights of its consumers: the same
/// outputs, with outliers.
fn plant(draw: &mut Draw, norms: &[Norm]) {
    let files = contents(&draw.path).into_keys().filter(|file| file.ends_with(".safetensors") && !file.contains('/'));
    let mut files: Vec<(String, Tensors)> = files.map(|file| (file.clone(), read(&draw.path.join(&file)))).collect();
    for norm in norms {
        let mut with = |name: &str, value: &dyn Fn(usize, f64) -> f64| {
            let (_, weights) = files.iter_mut().find(|(_, weights)| weights.contains_key(name)).unwrap();
            change(weights, name, value);
        };
        let width = draw.model().weights.by_name[&norm.weight].shape[0];
        let channel = draw.rng.random_range(0..width);
        with(&norm.weight, &|index, old| if index == channel { FACTOR * (old + norm.offset) - norm.offset } else { old });
        norm.bias.iter().for_each(|bias| with(bias, &|index, old| if index == channel { FACTOR * old } else { old }));
        for (reader, input_major) in &norm.readers {
            let outputs = draw.model().weights.by_name[reader].elements() / width;
            let input = |index: usize| if *input_major { index / outputs } else { index % width };
            with(reader, &|index, old| if input(index) == channel { old / FACTOR } else { old });
        }
    }
    files.iter().for_each(|(file, weights)| write(&draw.path.join(file), weights));
}

#[test]
fn planted_outliers_are_rescaled_or_named() {
    let families = families();
    let mut compared = 0;
    for seed in seeds(5) {
        let mut rng = StdRng::seed_from_u64(seed);
        // Some families have no normalization that only linear layers read.
        let is_suitable = |draw: &Draw| !norms(draw).is_empty() && !selects_queries(draw);
        let mut draw = std::iter::repeat_with(|| Draw::family(seed, families.choose(&mut rng).unwrap())).find(is_suitable).unwrap();
        let (samples, held_out, norms) = (draw.samples(12, seed), draw.samples(20, seed + 1000), norms(&draw));
        let before = draw.outputs(&held_out);
        let error = |draw: &Draw, scheme: &str, method: &str| {
            let (calibration, evaluation) = (draw.data(&samples), draw.data(&held_out));
            let pass = json!([{ "quantize": { "scheme": scheme, "method": method } }]);
            let written = draw.run(pass, json!([{ "safetensors": { "layout": "sparse" } }]), |builder| {
                let builder = builder.evaluation(compress_engine::data::Data { task: Some(compress_engine::data::Task::Fidelity), ..evaluation });
                if method == "rtn" { builder } else { builder.calibration(calibration) }
            });
            written.map(|written| (10f64.powf(-written.report.accuracy.clone().unwrap().fidelity.unwrap().sqnr_db.unwrap_or(200.0) / 20.0), written.report))
        };
        let Ok((plain, _)) = error(&draw, "W8A8", "rtn") else { continue };
        let weights_only = error(&draw, "W8A16", "rtn").unwrap().0;
        plant(&mut draw, &norms);
        let planted = draw.outputs(&held_out);
        let same = before.iter().all(|(name, output)| {
            let distance: f32 = (output - &planted[name]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap();
            distance < 1e-3 * output.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap().max(1.0)
        });
        assert!(same, "{}: planting changes outputs: {:?}", draw.name, fidelity(&draw, &draw.path, &held_out));
        for (scheme, method, plain) in [("W8A8", "smoothquant", plain), ("W8A16", "awq", weights_only)] {
            let (rounded, _) = error(&draw, scheme, "rtn").unwrap();
            // A weight that cannot be rounded by samples is refused by name.
            let Ok((ours, report)) = error(&draw, scheme, method) else { continue };
            let named: Vec<String> = serde_json::from_value(report.passes[0].details["not_rescaled"].clone()).unwrap_or_default();
            let is_named = norms.iter().any(|norm| named.contains(&norm.weight)) && report.notes.iter().any(|note| note.contains(&named[0]));
            // Experts share the scales of a norm, which then removes most of the error, but not all.
            let is_rescaled = ours < 2.0 * plain || ours - plain < 0.1 * (rounded - plain);
            let what = format!("{}: error {ours:.3} with {method}, {rounded:.3} without, {plain:.3} without outliers", draw.name);
            assert!(is_rescaled || is_named, "{what}; not rescaled: {named:?}; notes: {:?}", report.notes);
            compared += 1;
        }
    }
    assert!(compared > 3, "only {compared} models were quantized");
}

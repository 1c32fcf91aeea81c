//! Properties of the fidelity of two models' outputs.

use candle_core::{Device, Tensor};
use compress_engine::data::{Batch, References};
use compress_engine::evaluation::{Outputs, output_fidelity};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

use crate::properties::draws::{Draw, fidelity, seeds};

fn array(shape: &[usize], rng: &mut StdRng) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// One to three outputs of a batch, and the same with small errors.
fn outputs(seed: u64) -> (Batch, Outputs, Outputs, StdRng) {
    let mut rng = StdRng::seed_from_u64(seed);
    let samples = rng.random_range(1..=40);
    let (mut before, mut after) = (Outputs::new(), Outputs::new());
    for name in ["boxes", "logits", "scores"].iter().take(rng.random_range(1..=3)) {
        let rank = rng.random_range(1..=2);
        let shape: Vec<usize> = std::iter::once(samples).chain((0..rank).map(|_| rng.random_range(2..=9))).collect();
        let exact = array(&shape, &mut rng);
        let rounded = (&exact + (array(&shape, &mut rng) * 1e-3).unwrap()).unwrap();
        before.insert((*name).to_owned(), exact);
        after.insert((*name).to_owned(), rounded);
    }
    let inputs = [("x".to_owned(), array(&[samples, 4], &mut rng))].into();
    (Batch { inputs, references: References::None, samples }, before, after, rng)
}

#[test]
fn a_corrupted_output_lowers_every_metric() {
    for seed in seeds(40) {
        let (batch, before, after, mut rng) = outputs(seed);
        let good = output_fidelity(&batch, &before, &after).unwrap();
        for name in before.keys() {
            let mut corrupted = after.clone();
            corrupted.insert(name.clone(), array(before[name].dims(), &mut rng));
            let bad = output_fidelity(&batch, &before, &corrupted).unwrap();
            let what = format!("seed {seed}, `{name}`");
            assert!(bad.cosine < good.cosine && bad.cosine_min < good.cosine_min, "{what}: {bad:?}");
            assert!(bad.sqnr_db < good.sqnr_db && bad.max_abs_error > good.max_abs_error, "{what}: {bad:?}");
            assert_eq!(&bad.output, name, "{what}");
        }
    }
}

#[test]
fn another_output_changes_no_other_metric() {
    for seed in seeds(40) {
        let (batch, mut before, mut after, mut rng) = outputs(seed);
        let alone = output_fidelity(&batch, &before, &after).unwrap();
        let shape = [batch.samples, 5];
        before.insert("another".to_owned(), array(&shape, &mut rng));
        after.insert("another".to_owned(), array(&shape, &mut rng));
        let together = output_fidelity(&batch, &before, &after).unwrap();
        for (name, figures) in &alone.outputs {
            assert_eq!(&together.outputs[name], figures, "seed {seed}, `{name}`");
        }
        assert_eq!(together.outputs.len(), alone.outputs.len() + 1);
    }
}

/// An accuracy goal measures all outputs of a model, here two, and counts the worst.
#[test]
fn the_worst_output_decides_an_accuracy_goal() {
    for seed in seeds(2) {
        let draw = Draw::family(seed, "bert");
        let samples = draw.samples(12, seed);
        let data = draw.data(&samples);
        let pass = json!([{ "quantize-static": { "accuracy_goal": { "min_cosine": 0.0 } } }]);
        let written = draw.run(pass, json!(["safetensors"]), |builder| builder.calibration(data.clone()).evaluation(data)).unwrap();
        let goal = written.report.passes[0].details["accuracy_goal"]["tried"][0]["cosine"].as_f64().unwrap();
        let outputs = fidelity(&draw, &written.path, &samples).outputs;
        let cosines: Vec<f64> = outputs.values().map(|figures| figures.cosine).collect();
        let (worst, best) = (cosines.iter().copied().fold(f64::MAX, f64::min), cosines.iter().copied().fold(0.0, f64::max));
        assert!(outputs.len() == 2 && best - worst > 1e-4 && (goal - worst).abs() < 1e-5, "{}: {goal}, {outputs:?}", draw.name);
    }
}

//! `search-structure`: limits, scores, the chosen options, and the models that are written.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{D, DType, Device, Tensor};
use compress::pass::{Repair, SearchStructure, StructureLimit};
use compress::{Model, Pipeline};
use serde_json::Value;

use super::{Done, golden, outputs_of, run, tokens};

fn search(name: &str, pass: SearchStructure) -> Done {
    let folder = tempfile::tempdir().unwrap();
    run(name, Pipeline::builder().calibration(tokens(folder.path())).pass(pass))
}

/// A search in steps of two neurons.
fn pass(fraction: f64, uniform: bool) -> SearchStructure {
    SearchStructure { limit: StructureLimit::Layers(fraction), uniform: Some(uniform), round_to: 2, ..SearchStructure::default() }
}

fn details(done: &Done) -> &Value {
    &done.report.passes[0].details
}

fn parameters(model: &Model) -> u64 {
    model.weights.by_name.values().map(|weight| weight.shape.iter().product::<usize>() as u64).sum()
}

/// The last of every four samples that calibrate, which are held out. Runs reserve three of the twelve
/// samples.
fn held_out(folder: &Path) -> BTreeMap<String, Tensor> {
    tokens(folder);
    let samples = candle_core::safetensors::load(folder.join("ids.safetensors"), &Device::Cpu).unwrap();
    let rows = Tensor::new(&[3u32, 7], &Device::Cpu).unwrap();
    samples.into_iter().map(|(name, tensor)| (name, tensor.index_select(&rows, 0).unwrap())).collect()
}

/// Mean KL divergence of the logits of held-out tokens from those of the original model.
fn divergence(original: &Model, model: &Model) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let inputs = held_out(folder.path());
    let [p, q] = [original, model].map(|model| {
        let logits = outputs_of(model, &inputs)["logits"].to_dtype(DType::F64).unwrap();
        logits.broadcast_sub(&logits.log_sum_exp(D::Minus1).unwrap().unsqueeze(D::Minus1).unwrap()).unwrap()
    });
    let terms = (p.exp().unwrap() * (&p - &q).unwrap()).unwrap().sum(D::Minus1).unwrap();
    terms.mean_all().unwrap().to_scalar::<f64>().unwrap()
}

/// The size is within the limit, and the result that is opened again has the divergence that was measured.
#[test]
fn limits_are_respected_and_results_are_those_that_were_measured() {
    for name in ["llama", "llama-grouped-tied", "llama-biases", "qwen3", "gpt2", "gemma2", "gpt-neox"] {
        let original = Model::open(golden(name)).unwrap();
        for (fraction, uniform, steps) in [(0.7, true, 0), (0.5, true, 0), (0.4, true, 4), (0.7, false, 0), (0.3, false, 4)] {
            let done = search(name, SearchStructure { steps, ..pass(fraction, uniform) });
            let (model, details) = (done.model(), details(&done));
            let after = parameters(&model);
            assert_eq!(details["after"], after, "{name}");
            assert!(after <= details["limit"].as_u64().unwrap() && after < parameters(&original), "{name} {fraction} {uniform}: {details}");
            let (measured, expected) = (details["measured"].as_f64().unwrap(), divergence(&original, &model));
            assert!((measured - expected).abs() < 1e-4 * (1.0 + expected), "{name} {fraction} {uniform}: {measured}, not {expected}");
            assert!(!uniform || done.described(), "{name} {fraction}: {:?}", done.report.notes);
        }
    }
}

/// No other options within the limit have a smaller sum of scores.
#[test]
fn no_other_choice_has_less_loss() {
    for (fraction, round_to) in [(0.8, 2), (0.5, 4), (0.35, 8)] {
        let done = search("llama", SearchStructure { round_to, ..pass(fraction, false) });
        let details = details(&done);
        let rows = details["scores"].as_array().unwrap();
        let branches: Vec<Vec<&Value>> = (0..2)
            .flat_map(|layer| ["attention", "network"].map(|part| rows.iter().filter(|row| row["layer"] == layer && row["part"] == part).collect()))
            .collect();
        let total: u64 = details["before"].as_u64().unwrap();
        let whole: u64 = branches.iter().map(|options| options[0]["cost"].as_u64().unwrap()).sum();
        let limit = details["limit"].as_u64().unwrap() - (total - whole);
        let mut sums = vec![(0u64, 0.0, Vec::new())];
        for options in &branches {
            let extended = sums.iter().flat_map(|(cost, loss, kept): &(u64, f64, Vec<bool>)| {
                let with = move |row: &&Value| {
                    let is_removed = row["kept"] == "removed";
                    (
                        cost + row["cost"].as_u64().unwrap(),
                        loss + row["loss"].as_f64().unwrap(),
                        kept.iter().copied().chain([!is_removed]).collect::<Vec<bool>>(),
                    )
                };
                options.iter().map(with).collect::<Vec<_>>()
            });
            sums = extended.collect();
        }
        // One attention and one network remain: those with the largest score of their removal.
        let removal = |branch: usize| branches[branch].last().unwrap()["loss"].as_f64().unwrap();
        let remains = |part: usize| if removal(part) >= removal(part + 2) { part } else { part + 2 };
        let (attention, network) = (remains(0), remains(1));
        let possible = sums.iter().filter(|(cost, _, kept)| *cost <= limit && kept[attention] && kept[network]);
        let least = possible.map(|(_, loss, _)| *loss).fold(f64::INFINITY, f64::min);
        let chosen: f64 = rows.iter().filter(|row| row["chosen"] == true).map(|row| row["loss"].as_f64().unwrap()).sum();
        assert!((least - chosen).abs() < 1e-9 && (details["predicted"].as_f64().unwrap() - chosen).abs() < 1e-9, "{least}, not {chosen}: {details}");
        assert_eq!(rows.iter().filter(|row| row["chosen"] == true).count(), 4);
        let by_layer: f64 = details["layers"].as_array().unwrap().iter().map(|row| row["score"].as_f64().unwrap()).sum();
        assert!((by_layer - chosen).abs() < 1e-9, "{by_layer}, not {chosen}");
    }
}

/// The score of an option is the divergence of the model in which only this option is chosen. Removed
/// branches add nothing to the residual stream, like a layer with zeros.
#[test]
fn scores_are_divergences_of_single_options() {
    let original = Model::open(golden("llama")).unwrap();
    let done = search("llama", SearchStructure { repair: Repair::None, widths: vec![0.5], ..pass(0.5, false) });
    for row in details(&done)["scores"].as_array().unwrap().iter().filter(|row| row["kept"] == "removed") {
        let module = if row["part"] == "attention" { "self_attn.o_proj" } else { "mlp.down_proj" };
        let name = format!("model.layers.{}.{module}.weight", row["layer"]);
        let mut zeroed = original.clone();
        let weight = zeroed.weights.get(&name).unwrap().clone();
        zeroed.weights.by_name.insert(name.clone(), weight.with_values(&name, &vec![0.0; weight.elements()]).unwrap());
        let (score, expected) = (row["loss"].as_f64().unwrap(), divergence(&original, &zeroed));
        assert!((score - expected).abs() < 1e-5 * (1.0 + expected), "{name}: {score}, not {expected}");
    }
}

/// Training decreases the sum of the scores of options with fewer units, and has no effect on others.
#[test]
fn training_decreases_scores() {
    let scores = |steps: usize| {
        let done = search("llama", SearchStructure { steps, learning_rate: if steps > 0 { 1e-3 } else { 3e-4 }, ..pass(0.5, false) });
        let rows = details(&done)["scores"].as_array().unwrap().clone();
        let sum = |is_removal: bool| rows.iter().filter(|row| (row["kept"] == "removed") == is_removal).map(|row| row["loss"].as_f64().unwrap()).sum::<f64>();
        [sum(true), sum(false)]
    };
    let [[removal, widths], [trained_removal, trained_widths]] = [0, 20].map(scores);
    assert_eq!(removal, trained_removal);
    assert!(trained_widths < widths, "{trained_widths} after training, {widths} before");
}

/// A network without an effect is removed first, and the outputs are those of the original model.
#[test]
fn parts_without_an_effect_are_removed_first() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    std::fs::create_dir(&input).unwrap();
    let mut tensors = candle_core::safetensors::load(golden("llama").join("model.safetensors"), &Device::Cpu).unwrap();
    let unused = "model.layers.0.mlp.down_proj.weight";
    let zeros = tensors[unused].zeros_like().unwrap();
    tensors.insert(unused.to_owned(), zeros);
    candle_core::safetensors::save(&tensors, input.join("model.safetensors")).unwrap();
    std::fs::copy(golden("llama").join("config.json"), input.join("config.json")).unwrap();
    let original = Model::open(&input).unwrap();
    // The network has 3 x 384 parameters, and its norm 16.
    let limit = StructureLimit::Params(parameters(&original) - 1168);
    let pipeline = Pipeline::builder().calibration(tokens(folder.path())).pass(SearchStructure { limit, ..pass(0.5, false) }).build().unwrap();
    let out = folder.path().join("out");
    let report = pipeline.run(original.clone(), &out).unwrap();
    let layers = &report.passes[0].details["layers"];
    assert_eq!((layers[0]["network"].as_str(), layers[0]["attention"].as_str()), (Some("removed"), Some("whole")), "{layers}");
    assert_eq!((layers[1]["network"].as_str(), layers[1]["attention"].as_str()), (Some("whole"), Some("whole")), "{layers}");
    let model = Model::open(&out).unwrap();
    assert!(
        !model.weights.by_name.contains_key("model.layers.0.mlp.up_proj.weight")
            && !model.weights.by_name.contains_key("model.layers.0.post_attention_layernorm.weight")
    );
    assert!(out.join("graph.json").exists() && divergence(&original, &model) < 1e-9);
}

/// The error for an impossible limit names one that can be met.
#[test]
fn impossible_limits_name_the_nearest() {
    let folder = tempfile::tempdir().unwrap();
    let data = tokens(folder.path());
    let model = || Model::open(golden("llama")).unwrap();
    for uniform in [true, false] {
        for limit in ["layers=0.001", "params=100", "bytes=1KB"] {
            let pipeline = |limit: &str| {
                let pass = SearchStructure { limit: limit.parse().unwrap(), widths: vec![0.5], ..pass(0.5, uniform) };
                Pipeline::builder().calibration(data.clone()).pass(pass).build().unwrap()
            };
            let message = pipeline(limit).plan(&model()).map(|_| ()).unwrap_err().to_string();
            let nearest = message.split_once("the smallest possible limit is ").unwrap_or_else(|| panic!("{message}")).1.split(';').next().unwrap();
            assert!(message.contains(&format!("{limit} cannot be met")), "{message}");
            let out = folder.path().join(format!("{uniform}-{}", limit.replace('=', "-")));
            pipeline(nearest).run(model(), &out).unwrap();
        }
    }
}

/// Both usual choices are measured within the same limit.
#[test]
fn baselines_have_the_same_limit() {
    let done = search("llama", SearchStructure { baselines: true, ..pass(0.5, false) });
    let details = details(&done);
    let rows = details["baselines"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert!(row["size"].as_u64() <= details["limit"].as_u64() && row["measured"].as_f64().unwrap() > 0.0, "{rows:?}");
    }
    assert!(details["baselines"][0]["size"].as_u64().unwrap() < details["before"].as_u64().unwrap());
}

#[test]
fn unsuitable_models_and_samples_are_refused() {
    let refused = |name: &str, samples: usize| {
        let folder = tempfile::tempdir().unwrap();
        let data = compress_engine::data::Data { samples: Some(samples), ..tokens(folder.path()) };
        let pipeline = Pipeline::builder().calibration(data).pass(pass(0.5, false)).build().unwrap();
        let result = pipeline.run(Model::open(golden(name)).unwrap(), folder.path().join("out"));
        result.map(|_| ()).unwrap_err().to_string()
    };
    // A convolution in place of attention.
    let message = refused("lfm2", 12);
    assert!(message.contains("layer 0 is not the sum of its input, attention and a feed-forward network"), "{message}");
    let message = refused("llama", 2);
    assert!(message.contains("at least 3"), "{message}");
}

/// With a single changed branch, the result is the model that was scored: held-out samples do not repair it.
#[test]
fn a_single_option_has_its_score() {
    for repair in [Repair::None, Repair::LeastSquares] {
        let done = search("llama", SearchStructure { repair, widths: vec![0.5], round_to: 24, ..pass(0.89, false) });
        let [predicted, measured] = ["predicted", "measured"].map(|key| details(&done)[key].as_f64().unwrap());
        assert!(predicted > 0.01 && (predicted - measured).abs() < 1e-3 * (1.0 + predicted), "{measured}, not {predicted}");
    }
}

#[test]
fn heads_that_transformers_refuses_are_no_options() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    std::fs::create_dir(&input).unwrap();
    std::fs::copy(golden("llama").join("model.safetensors"), input.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden("llama").join("config.json")).unwrap()).unwrap();
    for (key, value) in [("num_attention_heads", 4), ("num_key_value_heads", 4), ("head_dim", 4)] {
        config[key] = value.into();
    }
    std::fs::write(input.join("config.json"), config.to_string()).unwrap();
    let search = SearchStructure { widths: vec![0.75, 0.5], ..pass(0.7, true) };
    let pipeline = Pipeline::builder().calibration(tokens(folder.path())).pass(search).build().unwrap();
    let report = pipeline.run(Model::open(&input).unwrap(), folder.path().join("out")).unwrap();
    let rows = report.passes[0].details["scores"].as_array().unwrap();
    let has = |kept: &str| rows.iter().any(|row| row["kept"] == kept);
    assert!(!has("3 of 4 key-value heads") && has("2 of 4 key-value heads"), "{rows:?}");
}

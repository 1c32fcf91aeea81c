//! Layer-wise passes, which process the layers in order while samples run through the model block by block.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::pass::WeightImportance as Importance;
use compress::pass::{Amount, Cast, Decompose, FloatFormat, InputImportance, NOfM, Palettize, PruneUnstructured, Step};
use compress::pass::{Guide, Method, Quantize, Scheme, WeightObserver};
use compress::pipeline::Builder;
use compress::{Error, Model, Pipeline, Report};
use compress_core::store::{Encoding, Weight};
use compress_core::work::{Cancel, Event};
use compress_engine::data::Data;
use compress_engine::exec::{Executor, Parameters, Residence, hardware};

use crate::common::{golden_model as golden, write_with_float64};

/// The tiny Llama with a few outlier channels in the inputs of linear layers after normalizations.
fn outliers(folder: &Path) -> String {
    let mut tensors = candle_core::safetensors::load(golden("llama/model.safetensors"), &Device::Cpu).unwrap();
    for (name, tensor) in &mut tensors {
        if name.ends_with("layernorm.weight") {
            let factors: Vec<f32> = (0..16).map(|at| if at % 7 == 3 { 12.0 } else { 1.0 }).collect();
            *tensor = (&*tensor * Tensor::new(factors, &Device::Cpu).unwrap()).unwrap();
        }
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    std::fs::copy(golden("llama/config.json"), folder.join("config.json")).unwrap();
    folder.to_str().unwrap().to_owned()
}

/// Samples of random tokens.
fn tokens(folder: &Path) -> Data {
    let ids = Tensor::from_vec((0..384i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (48, 8), &Device::Cpu).unwrap();
    let path = folder.join("ids.safetensors");
    if !path.exists() {
        candle_core::safetensors::save(&[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(), &path)
            .unwrap();
    }
    Data::at(&path)
}

struct Done {
    folder: tempfile::TempDir,
    report: Report,
}

impl Done {
    fn model(&self) -> Model {
        Model::open(self.folder.path().join("out")).unwrap()
    }
}

fn builder(folder: &Path, pass: impl Into<Step>) -> Builder {
    Pipeline::builder().calibration(tokens(folder)).pass(pass).threads(2)
}

fn attempt(name: &str, pass: impl Into<Step>) -> compress::Result<Done> {
    let folder = tempfile::tempdir().unwrap();
    let report = builder(folder.path(), pass).build()?.run(Model::open(golden(name)).unwrap(), folder.path().join("out"))?;
    assert!(!folder.path().join("out.unfinished").exists());
    Ok(Done { folder, report })
}

fn run(name: &str, pass: impl Into<Step>) -> Done {
    attempt(name, pass).unwrap()
}

fn outputs(model: &Model, inputs: &BTreeMap<String, Tensor>) -> Tensor {
    crate::common::outputs(model, inputs).into_values().next().unwrap()
}

/// Mean squared error of a model's outputs on the samples.
fn error(name: &str, done: &Done) -> f64 {
    error_of(name, &done.model(), done.folder.path())
}

/// The same of a model, with the samples in a folder.
fn error_of(name: &str, model: &Model, folder: &Path) -> f64 {
    let inputs = candle_core::safetensors::load(folder.join("ids.safetensors"), &Device::Cpu).unwrap().into_iter().collect();
    let (before, after) = (outputs(&Model::open(golden(name)).unwrap(), &inputs), outputs(model, &inputs));
    f64::from((after - before).unwrap().sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap())
}

fn pruned(importance: Importance) -> PruneUnstructured {
    PruneUnstructured { importance, amount: Some(Amount::fraction(0.4)), ..Default::default() }
}

fn zeros(done: &Done, name: &str) -> u64 {
    done.model().weights.get(name).unwrap().zeros().unwrap()
}

const PROJECTION: &str = "model.layers.0.mlp.down_proj.weight";

#[test]
fn pruning_with_samples_has_smaller_errors_and_exact_counts() {
    for (name, weight) in [("llama", PROJECTION), ("gpt2", "transformer.h.1.mlp.c_fc.weight"), ("bert", "encoder.layer.0.attention.self.query.weight")] {
        let [l1, wanda, sparse] = [Importance::L1, Importance::Wanda, Importance::Sparsegpt].map(|importance| run(name, pruned(importance)));
        let elements = l1.model().weights.get(weight).unwrap().elements() as f64;
        for done in [&wanda, &sparse] {
            assert_eq!(zeros(done, weight) as f64, (0.4 * elements).round_ties_even(), "{name}");
            assert_eq!(done.report.passes[0].details["samples"], 44);
        }
        let [l1, wanda, sparse] = [l1, wanda, sparse].map(|done| error(name, &done));
        assert!(sparse < l1 && sparse < wanda, "{name}: l1 {l1}, wanda {wanda}, sparsegpt {sparse}");
    }
}

/// A copy of the tiny Llama with 300 neurons and 1,024 positions.
fn wide(folder: &Path) -> Model {
    let mut tensors = candle_core::safetensors::load(golden("llama/model.safetensors"), &Device::Cpu).unwrap();
    for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains(".mlp.")) {
        let shape = if name.contains("down_proj") { (16, 300) } else { (300, 16) };
        *tensor = Tensor::from_vec((0..4800u64).map(|i| ((i * i * 31 + i * 7) % 1009) as f32 / 1009.0 - 0.5).collect::<Vec<_>>(), shape, &Device::Cpu).unwrap();
    }
    let folder = folder.join("wide");
    std::fs::create_dir_all(&folder).unwrap();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("llama/config.json")).unwrap()).unwrap();
    (config["intermediate_size"], config["max_position_embeddings"]) = (300.into(), 1024.into());
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Model::open(folder).unwrap()
}

/// Solutions are compared on some of the 300 outputs; the amount is that of the whole layer.
#[test]
fn a_count_prunes_as_much_as_its_fraction() {
    let folder = tempfile::tempdir().unwrap();
    let model = wide(folder.path());
    let files = [Amount::Count(3000), Amount::fraction(0.625)].map(|amount| {
        let targets = vec!["*gate_proj.weight".parse().unwrap()];
        let pass = PruneUnstructured { amount: Some(amount), targets, importance: Importance::Sparsegpt, ..Default::default() };
        let out = folder.path().join(format!("out-{amount}"));
        builder(folder.path(), pass).build().unwrap().run(model.clone(), &out).unwrap();
        std::fs::read(out.join("model.safetensors")).unwrap()
    });
    assert!(files[0] == files[1]);
}

/// The sample that is held out with this seed has a single token.
#[test]
fn a_short_held_out_sample_does_not_disable_compensation() {
    let folder = tempfile::tempdir().unwrap();
    let ids = Tensor::from_vec((0..2240i64).map(|i| (i * i * 7 + i / 3) % 41 % 40).collect::<Vec<_>>(), (4, 560), &Device::Cpu).unwrap();
    let mask = Tensor::from_vec((0..2240i64).map(|i| i64::from(i == 0 || i >= 560)).collect::<Vec<_>>(), (4, 560), &Device::Cpu).unwrap();
    let path = folder.path().join("short.safetensors");
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids), ("attention_mask".to_owned(), mask)].into(), &path).unwrap();
    let pass = quantized(Method::Gptq, Scheme::W4A16);
    let pipeline = Pipeline::builder().calibration(Data::at(&path)).pass(pass).threads(2).build().unwrap();
    let report = pipeline.run(wide(folder.path()), folder.path().join("out")).unwrap();
    let (choices, notes) = (&report.passes[0].details["choices"], &report.notes);
    assert!(choices["gptq"].as_u64().is_some_and(|count| count > 7), "{choices}, {notes:?}");
}

/// Weights are ranked by the inputs of their block before any of its layers is pruned: attention, then the
/// network that follows it.
#[test]
fn wanda_ranks_weights_by_the_inputs_of_the_unpruned_block() {
    let done = run("llama", PruneUnstructured { importance: Importance::Wanda, pattern: Some("2:4".parse::<NOfM>().unwrap()), ..Default::default() });
    let (mut before, after) = (Model::open(golden("llama")).unwrap(), done.model());
    let graph = before.graph().unwrap();
    let ids = candle_core::safetensors::load(done.folder.path().join("ids.safetensors"), &Device::Cpu).unwrap();
    // The last samples are held out for the fidelity.
    let inputs = ids.into_iter().map(|(name, values)| (name, values.narrow(0, 0, 44).unwrap())).collect();
    let mut compared = 0;
    for block in ["model.layers.0.self_attn.", "model.layers.0.mlp."] {
        let parameters = crate::common::work(|work| Parameters::load(&graph, &before.weights, &Device::Cpu, DType::F32, Residence::Computed, work)).unwrap();
        let executor = Executor::new(&graph, parameters, Device::Cpu);
        let mut norms: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        let mut observe = |value: &str, tensor: &Tensor| {
            let width = tensor.dims().last().copied().unwrap();
            norms.insert(value.to_owned(), tensor.reshape(((), width)).unwrap().sqr().unwrap().sum(0).unwrap().sqrt().unwrap().to_vec1().unwrap());
            Ok(())
        };
        let name = |node: &compress_graph::ir::Node, at: usize| node.inputs.get(at).map(|id| graph.value(*id).name.clone()).unwrap_or_default();
        let layers: Vec<_> = graph.nodes().iter().filter(|node| name(node, 1).starts_with(block)).collect();
        executor.run_observed(&executor.observation(|value| layers.iter().any(|layer| name(layer, 0) == value)), &inputs, &mut observe).unwrap();
        for layer in layers {
            let (norms, weight) = (&norms[&name(layer, 0)], name(layer, 1));
            let [all, remaining] = [&before, &after].map(|model| model.weights.get(&weight).unwrap().floats(&weight).unwrap());
            for (at, (all, remaining)) in all.chunks(4).zip(remaining.chunks(4)).enumerate() {
                let cost = |column: &usize| all[*column].abs() * norms[(4 * at + column) % norms.len()];
                let mut columns: Vec<usize> = (0..4).collect();
                columns.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
                let expected: Vec<f32> = (0..4).map(|column| if columns[..2].contains(&column) { 0.0 } else { all[column] }).collect();
                assert_eq!(remaining, expected, "{weight}, columns from {}", 4 * at);
            }
            before.weights.by_name.insert(weight.clone(), after.weights.get(&weight).unwrap().clone());
            compared += 1;
        }
    }
    assert_eq!(compared, 7);
}

#[test]
fn patterns_hold_in_every_row() {
    for importance in [Importance::Wanda, Importance::Sparsegpt] {
        let done = run("llama", PruneUnstructured { importance, pattern: Some("2:4".parse::<NOfM>().unwrap()), ..Default::default() });
        let values = done.model().weights.get(PROJECTION).unwrap().floats(PROJECTION).unwrap();
        assert!(values.chunks(4).all(|four| four.iter().filter(|w| **w == 0.0).count() == 2));
    }
}

/// Without samples, a pattern applies to the inputs of stacked experts, which are their last axis here. Of a
/// model without a graph, the axis is unknown.
#[test]
fn patterns_apply_to_the_inputs_of_stacked_experts() {
    let pass = || PruneUnstructured { pattern: Some("2:4".parse::<NOfM>().unwrap()), targets: vec!["*experts*".parse().unwrap()], ..Default::default() };
    let done = run("mixtral-fused", pass());
    let model = done.model();
    let experts: Vec<&String> = model.weights.by_name.keys().filter(|name| name.contains("experts.")).collect();
    assert_eq!(experts.len(), 4);
    for name in experts {
        let values = model.weights.get(name).unwrap().floats(name).unwrap();
        assert!(values.chunks(4).all(|four| four.iter().filter(|w| **w == 0.0).count() == 2), "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("mixtral-fused/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let pipeline = Pipeline::builder().pass(pass()).threads(2).build().unwrap();
    let error = pipeline.run(Model::open(folder.path()).unwrap(), folder.path().join("out")).err().unwrap().to_string();
    assert!(error.contains("experts.down_proj`: stacks the weights of experts (shape [4, 16, 12])") && error.contains("unknown which axis"), "{error}");
}

fn quantized(method: Method, scheme: Scheme) -> Quantize {
    Quantize { method, scheme, group_size: (scheme == Scheme::W4A16).then_some(8), ..Default::default() }
}

#[test]
fn experts_are_rounded_by_the_tokens_that_they_see() {
    let four = |method| Quantize { group_size: Some(4), ..quantized(method, Scheme::W4A16) };
    for name in ["mixtral", "qwen2-moe"] {
        let [rtn, gptq] = [Method::Rtn, Method::Gptq].map(|method| run(name, four(method)));
        let expert = |done: &Done| done.model().weights.by_name.iter().filter(|(name, w)| name.contains("experts.") && w.encoding != Encoding::Dense).count();
        assert_eq!((expert(&rtn), expert(&gptq)), (24, 24), "{name}");
        let [rtn, gptq] = [rtn, gptq].map(|done| error(name, &done));
        assert!(gptq < rtn, "{name}: rtn {rtn}, gptq {gptq}");
    }
    // Stacked experts are not changed, which the report states.
    let fused = run("qwen2-moe-fused", four(Method::Rtn));
    let said = |note: &String| note.contains("left unchanged: 4 tensors, each of which stacks all experts of a layer");
    assert!(fused.report.notes.iter().any(said), "{:?}", fused.report.notes);
}

#[test]
fn rounding_by_samples_loses_less() {
    for name in ["llama", "qwen3", "bert"] {
        let [rtn, gptq, awq] = [Method::Rtn, Method::Gptq, Method::Awq].map(|method| run(name, quantized(method, Scheme::W4A16)));
        assert!(awq.report.passes[0].details["rescaled"].as_u64().unwrap() > 0);
        let bits = |done: &Done| done.model().weights.by_name.values().filter(|w| w.describe().starts_with("int4 group 8")).count();
        assert!(bits(&gptq) > 10 && bits(&gptq) == bits(&rtn) && bits(&awq) == bits(&rtn));
        let [rtn, gptq, awq] = [rtn, gptq, awq].map(|done| error(name, &done));
        // Random weights have no salient channels, which AWQ relies on.
        assert!(gptq < 0.8 * rtn && awq < 1.2 * rtn, "{name}: rtn {rtn}, gptq {gptq}, awq {awq}");
    }
}

/// The codes of floats are chosen on samples like integers. Layers that runtimes fuse keep one global scale.
#[test]
fn floats_are_rounded_by_samples() {
    for (scheme, most) in [(Scheme::Nvfp4A16, 0.8), (Scheme::Fp8Dynamic, 0.95)] {
        let [rtn, gptq, awq] = [Method::Rtn, Method::Gptq, Method::Awq].map(|method| run("llama", quantized(method, scheme)));
        let encodings = |done: &Done| done.model().weights.by_name.values().map(|weight| weight.describe()).collect::<Vec<_>>();
        assert!(encodings(&gptq) == encodings(&rtn) && encodings(&awq) == encodings(&rtn), "{scheme:?}");
        let scale =
            |name: &str| gptq.model().weights.get(&format!("model.layers.0.self_attn.{name}_proj.weight")).unwrap().scales().unwrap().unwrap().global_scale;
        assert!(scale("q") == scale("k") && scale("k") == scale("v") && (scale("q") == 1.0) == (scheme != Scheme::Nvfp4A16), "{scheme:?}");
        let [rtn, gptq, awq] = [rtn, gptq, awq].map(|done| error("llama", &done));
        assert!(gptq < most * rtn && awq < 1.2 * rtn, "{scheme:?}: rtn {rtn}, gptq {gptq}, awq {awq}");
    }
}

/// A search among scales of floats, with four over six, has a smaller squared error.
#[test]
fn searched_scales_of_floats_have_smaller_errors() {
    let before = Model::open(golden("llama")).unwrap();
    for scheme in [Scheme::Nvfp4A16, Scheme::Fp8Dynamic] {
        let [usual, searched] = [WeightObserver::Minmax, WeightObserver::Mse].map(|observer| {
            let done = run("llama", Quantize { observer: Some(observer), ..quantized(Method::Rtn, scheme) });
            let error = |(name, after): (&String, &Weight)| {
                let (a, b) = (before.weights.get(name).unwrap().floats(name).unwrap(), after.floats(name).unwrap());
                a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
            };
            done.model().weights.by_name.iter().map(error).sum::<f64>()
        });
        assert!(searched < 0.97 * usual, "{scheme:?}: {usual}, {searched}");
    }
}

/// Blocks are trained from the result of GPTQ, with and without zero points, to integers and floats. The
/// report lists the layers of blocks whose error on held-out samples falls; the others keep that result.
#[test]
fn trained_rounding_loses_less() {
    for (name, scheme, group_size, most) in [
        ("llama", Scheme::W4A16, Some(8), 1.0),
        ("qwen3", Scheme::W2A16Asym, Some(8), 1.05),
        ("mixtral", Scheme::W3A16, Some(4), 1.05),
        ("llama", Scheme::Nvfp4A16, None, 1.05),
    ] {
        // On so few samples, coordinate descent alone gains as much as training.
        let [gptq, trained] = [Method::Gptq, Method::Autoround].map(|method| run(name, Quantize { group_size, sweeps: Some(0), ..quantized(method, scheme) }));
        let encodings = |done: &Done| done.model().weights.by_name.values().map(|weight| weight.describe()).collect::<Vec<_>>();
        assert_eq!(encodings(&gptq), encodings(&trained), "{name}");
        let details = &trained.report.passes[0].details;
        let layers: Vec<_> = details["layers"].as_array().unwrap().iter().filter(|layer| layer["choice"] == "autoround").collect();
        assert!(!layers.is_empty() && layers.iter().all(|layer| layer["relative_error"].as_f64().unwrap() < 1.0), "{details}");
        let [gptq, trained] = [gptq, trained].map(|done| error(name, &done));
        assert!(trained < most * gptq, "{name}: gptq {gptq}, trained {trained}");
    }
}

/// The report lists the solution of every layer; with both options there is nothing to choose.
#[test]
fn solutions_of_layers_are_chosen_on_held_out_samples() {
    let plain = Quantize { damping: Some(0.01), propagation: Some(0.0), sweeps: Some(0), ..quantized(Method::Gptq, Scheme::W4A16) };
    for (name, passes) in [
        ("gptq", [quantized(Method::Gptq, Scheme::W4A16).into(), plain.into()]),
        ("sparsegpt", [Step::from(pruned(Importance::Sparsegpt)), pruned(Importance::Wanda).into()]),
        ("activation", [InputImportance::Activation, InputImportance::None].map(|importance| Decompose { importance, ..Default::default() }.into())),
    ] {
        let [chosen, fixed] = passes.map(|pass| run("llama", pass));
        let details = &chosen.report.passes[0].details;
        let layers = details["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 14, "{name}");
        assert!(layers.iter().all(|layer| layer["relative_error"].as_f64().unwrap() <= 1.0), "{details}");
        let count = layers.iter().filter(|layer| layer["choice"] == name).count();
        assert!(count > 7 && details["choices"][name] == count, "{details}");
        assert!(fixed.report.passes[0].details.get("layers").is_none());
    }
}

#[test]
fn weights_that_cannot_be_written_are_rejected_in_a_plan() {
    let (folder, name) = (tempfile::tempdir().unwrap(), "model.layers.1.mlp.up_proj.weight");
    write_with_float64(folder.path(), name);
    let plan = |importance| builder(folder.path(), pruned(importance)).build().unwrap().plan(&Model::open(folder.path()).unwrap());
    for importance in [Importance::Sparsegpt, Importance::Wanda] {
        let error = plan(importance).unwrap_err();
        assert!(error.to_string().contains(&format!("`{name}`: is F64")), "{error}");
    }
    plan(Importance::L1).unwrap();
}

/// Damping and propagation are fixed, so that only the number of sweeps differs.
#[test]
fn coordinate_descent_lowers_the_error_of_gptq() {
    for scheme in [Scheme::W4A16, Scheme::W3A16] {
        let [plain, refined] = [0, 3].map(|sweeps| {
            let pass = Quantize { damping: Some(0.01), propagation: Some(0.0), sweeps: Some(sweeps), group_size: Some(8), ..quantized(Method::Gptq, scheme) };
            error("llama", &run("llama", pass))
        });
        assert!(refined < 0.98 * plain, "{scheme:?}: gptq {plain}, refined {refined}");
    }
}

/// A GPU, and in this test the CPU as one, factorizes second moments and rounds weights with tensors. Codes
/// halfway between two integers differ, which affects later columns, so that errors differ by a few percent.
#[test]
fn layers_solved_with_tensors_have_the_errors_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    tokens(folder.path());
    let tensors = std::env::var("COMPRESS_TEST_DEVICE").ok().filter(|device| device != "cpu").unwrap_or_else(|| "cpu:strict".to_owned());
    let cases: [&[&str]; 4] = [
        &["quantize", "--method", "gptq", "--scheme", "W4A16", "--group-size", "8"],
        &["quantize", "--method", "gptq", "--scheme", "W4A16-ASYM", "--group-size", "8", "--damping", "0.002", "--propagation", "0.5"],
        &["quantize", "--method", "gptq", "--scheme", "FP8-DYNAMIC"],
        &["prune-unstructured", "--importance", "sparsegpt", "--amount", "40%"],
    ];
    for (case, arguments) in cases.into_iter().enumerate() {
        let [host, tensors] = ["cpu", &tensors].map(|device| {
            let out = folder.path().join(format!("{case}-{}", device.replace(':', "-")));
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_compress"));
            command.args(arguments).arg(golden("llama")).arg("-o").arg(&out).args(["--calibration", "ids.safetensors", "--device", device, "--no-measure"]);
            let output = command.current_dir(folder.path()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            error_of("llama", &Model::open(&out).unwrap(), folder.path())
        });
        assert!((tensors - host).abs() < 0.2 * host, "{arguments:?}: {tensors} instead of {host}");
    }
}

#[test]
fn channels_that_matter_are_rounded_more_finely() {
    let folder = tempfile::tempdir().unwrap();
    let name = outliers(folder.path());
    let awq = quantized(Method::Awq, Scheme::W4A16);
    let usual = quantized(Method::Rtn, Scheme::W4A16);
    let alike = Quantize { observer: Some(WeightObserver::Mse), ..usual.clone() };
    let [awq, usual, alike] = [awq, usual, alike].map(|pass| error(&name, &run(&name, pass)));
    assert!(awq < 0.8 * alike && awq < 0.9 * usual, "awq {awq}, the same ranges without samples {alike}, the default ranges {usual}");
    for scheme in [Scheme::W8A8, Scheme::W8A8Static] {
        let [rtn, smooth] = [Method::Rtn, Method::Smoothquant].map(|method| error(&name, &run(&name, quantized(method, scheme))));
        assert!(smooth < 0.8 * rtn, "{scheme:?}: rtn {rtn}, smoothquant {smooth}");
    }
}

/// The same decoder with two channels of each normalization multiplied by 200, and the columns that read
/// them divided by 200.
fn planted(folder: &Path, family: &str) -> String {
    let mut tensors = candle_core::safetensors::load(golden(family).join("model.safetensors"), &Device::Cpu).unwrap();
    let has_offset = ["gemma", "qwen3-next", "qwen3_5"].iter().any(|name| family.starts_with(name));
    let [mixer_norm, mlp_norm] = match family {
        "gemma2" | "gemma3" => ["input_layernorm.weight", "pre_feedforward_layernorm.weight"],
        "lfm2" => ["operator_norm.weight", "ffn_norm.weight"],
        _ => ["input_layernorm.weight", "post_attention_layernorm.weight"],
    };
    let readers = [
        (mixer_norm, &["q_proj.", "k_proj.", "v_proj.", "qkv_proj.", ".in_proj"][..]),
        (mlp_norm, &["gate_proj.", "up_proj.", "gate_up_proj.", ".w1.", ".w3.", "gate.weight", ".input_linear."][..]),
    ];
    let names: Vec<String> = tensors.keys().cloned().collect();
    for (suffix, parts) in readers {
        for norm in names.iter().filter(|name| name.ends_with(suffix)) {
            let width = tensors[norm].elem_count();
            let factors: Vec<f32> = (0..width).map(|at| if at == 3 || at == width - 2 { 200.0 } else { 1.0 }).collect();
            let (factors, offset) = (Tensor::new(factors, &Device::Cpu).unwrap(), if has_offset { 1.0 } else { 0.0 });
            let scaled = (((&tensors[norm] + offset).unwrap() * &factors).unwrap() - offset).unwrap();
            tensors.insert(norm.clone(), scaled);
            let layer = norm.strip_suffix(suffix).unwrap();
            for name in names.iter().filter(|name| name.starts_with(layer) && name.ends_with(".weight") && parts.iter().any(|part| name.contains(part))) {
                let divided = tensors[name].broadcast_div(&factors).unwrap();
                tensors.insert(name.clone(), divided);
            }
        }
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    std::fs::copy(golden(family).join("config.json"), folder.join("config.json")).unwrap();
    folder.to_str().unwrap().to_owned()
}

/// Outliers after every kind of normalization move to the weights: with an offset, before experts,
/// before fused projections.
#[test]
fn outliers_of_activations_move_to_the_weights_of_every_family() {
    let hybrids = ["lfm2", "qwen3-next", "qwen3_5", "granite-hybrid-dense"];
    for family in ["llama", "gemma2", "gemma3", "granite", "phi3", "mixtral", "qwen2-moe", "qwen3-moe", "qwen3"].into_iter().chain(hybrids) {
        let folder = tempfile::tempdir().unwrap();
        let name = planted(folder.path(), family);
        let [rtn, smooth] = [Method::Rtn, Method::Smoothquant].map(|method| run(&name, quantized(method, Scheme::W8A8)));
        let skipped = smooth.report.notes.iter().any(|note| note.contains(" not rescaled, because other operators"));
        assert!(!skipped, "{family}: {:?}", smooth.report.notes);
        let [rtn, smooth] = [rtn, smooth].map(|done| error(&name, &done));
        assert!(smooth < 0.1 * rtn, "{family}: rtn {rtn}, smoothquant {smooth}");
    }
}

/// Outliers of a projection move to the layer that reads it, also if the projection is a range of rows
/// of a fused one.
#[test]
fn outliers_of_fused_projections_move_to_the_weights() {
    // The tensor and row of value 1, the columns of `o_proj` that read it, and the tensor and row of
    // neuron 5 of the MLP.
    let families = [
        ("llama", ("v_proj", 1), &[1usize][..], ("up_proj", 5)),
        // After 16 rows of queries and 8 of keys, and after 24 of the gate. Two heads share a value.
        ("phi3", ("qkv_proj", 25), &[1, 5], ("gate_up_proj", 29)),
    ];
    for (family, value, readers, neuron) in families {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = candle_core::safetensors::load(golden(family).join("model.safetensors"), &Device::Cpu).unwrap();
        for (name, tensor) in &mut tensors {
            let [rows, columns] = tensor.dims()[..] else { continue };
            let module = name.strip_suffix(".weight").unwrap().rsplit('.').next().unwrap();
            let factors = |count: usize, at: &[usize], factor: f32| (0..count).map(|index| if at.contains(&index) { factor } else { 1.0 }).collect::<Vec<_>>();
            let factors = match module {
                _ if module == value.0 => Tensor::from_vec(factors(rows, &[value.1], 256.0), (rows, 1), &Device::Cpu),
                _ if module == neuron.0 => Tensor::from_vec(factors(rows, &[neuron.1], 256.0), (rows, 1), &Device::Cpu),
                "o_proj" => Tensor::from_vec(factors(columns, readers, 1.0 / 256.0), (1, columns), &Device::Cpu),
                "down_proj" => Tensor::from_vec(factors(columns, &[5], 1.0 / 256.0), (1, columns), &Device::Cpu),
                _ => continue,
            };
            *tensor = tensor.broadcast_mul(&factors.unwrap()).unwrap();
        }
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
        std::fs::copy(golden(family).join("config.json"), folder.path().join("config.json")).unwrap();
        let name = folder.path().to_str().unwrap();
        let inputs = compress_engine::data::synthetic(&Model::open(name).unwrap().graph().unwrap(), 1).unwrap().inputs;
        let [planted, original] = [folder.path().to_owned(), golden(family)].map(|path| outputs(&Model::open(path).unwrap(), &inputs));
        let distance = (planted - original).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(distance, 0.0, "{family}: planting powers of two changes no output");
        // With a strength of one half, an outlier of 256 becomes one of 16 in activations and in weights.
        let [rtn, smooth] = [Method::Rtn, Method::Smoothquant].map(|method| error(name, &run(name, quantized(method, Scheme::W8A8))));
        assert!(smooth < 0.25 * rtn, "{family}: rtn {rtn}, smoothquant {smooth}");
    }
}

/// The note names the first normalization, the details all of them.
#[test]
fn normalizations_that_cannot_be_rescaled_are_listed() {
    let report = run("bert", quantized(Method::Smoothquant, Scheme::W8A8)).report;
    let note = report.notes.iter().find(|note| note.contains(" not rescaled, because other operators")).unwrap();
    let listed: Vec<&str> = report.passes[0].details["not_rescaled"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert!(listed.len() > 1 && note.contains(&format!("{} normalizations", listed.len())) && note.contains(listed[0]), "{note} {listed:?}");
    assert!(listed.iter().all(|name| name.contains("LayerNorm")), "{listed:?}");
}

#[test]
fn migrated_scales_do_not_change_float_outputs() {
    // Quantization to eight bits causes small errors, so that errors of the rescaling would be visible.
    for name in ["llama", "phi3"] {
        let [rtn, smooth] = [Method::Rtn, Method::Smoothquant].map(|method| run(name, quantized(method, Scheme::W8A8)));
        assert!(smooth.report.passes[0].details["rescaled"].as_u64().unwrap() > 0, "{name}: {}", smooth.report.passes[0].details);
        let [rtn, smooth] = [rtn, smooth].map(|done| error(name, &done));
        assert!(smooth <= 1.05 * rtn, "{name}: {rtn} {smooth}");
    }
}

#[test]
fn zeros_survive_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let both = builder(folder.path(), PruneUnstructured { pattern: Some("2:4".parse().unwrap()), amount: None, ..pruned(Importance::Sparsegpt) })
        .pass(quantized(Method::Gptq, Scheme::W4A16));
    both.build().unwrap().run(Model::open(golden("llama")).unwrap(), folder.path().join("out")).unwrap();
    let model = Model::open(folder.path().join("out")).unwrap();
    let values = model.weights.get(PROJECTION).unwrap().floats(PROJECTION).unwrap();
    assert!(values.chunks(4).all(|four| four.iter().filter(|w| **w == 0.0).count() >= 2));
}

fn palettized() -> Palettize {
    Palettize { bits: 4, group_size: 8, ..Palettize::default() }
}

#[test]
fn values_of_palettes_are_where_inputs_are_large() {
    let folder = tempfile::tempdir().unwrap();
    let name = outliers(folder.path());
    let plain = Palettize { importance: InputImportance::None, ..palettized() };
    let (plain, weighted) = (error(&name, &run(&name, plain)), error(&name, &run(&name, palettized())));
    assert!(weighted < 0.85 * plain, "{weighted} for {plain}");
    // Embeddings and tied heads are not linear layers; they are palettized without samples.
    let done = run("llama", Palettize { embeddings: true, ..palettized() });
    assert!(done.report.notes.iter().any(|note| note.contains("because not exactly one linear layer of activations reads")), "{:?}", done.report.notes);
    assert!(done.model().weights.get("model.embed_tokens.weight").unwrap().describe().starts_with("palette4"));
    // Layers that are stored input-major are clustered as they are stored.
    let (plain, weighted) = (Palettize { importance: InputImportance::None, ..palettized() }, palettized());
    assert!(error("gpt2", &run("gpt2", weighted)) < 1.1 * error("gpt2", &run("gpt2", plain)));
}

#[test]
fn an_interrupted_run_resumes_after_the_last_block() {
    let bytes = |folder: &Path| std::fs::read(folder.join("out/model.safetensors")).unwrap();
    // 16-bit weights are rounded when they are stored.
    let builder = |folder: &Path, pass: Step| {
        let passes = [Step::from(Cast { to: FloatFormat::Bf16, ..Default::default() }), pass];
        Pipeline::builder().calibration(tokens(folder)).passes(passes).threads(2)
    };
    let run = |pass: Step| {
        let folder = tempfile::tempdir().unwrap();
        let report = builder(folder.path(), pass).threads(4).build().unwrap().run(Model::open(golden("llama")).unwrap(), folder.path().join("out")).unwrap();
        (folder, report)
    };
    for pass in [
        Step::from(quantized(Method::Gptq, Scheme::W4A16)),
        Quantize { guide: Guide::Loss, ..quantized(Method::Gptq, Scheme::W4A16) }.into(),
        Quantize { guide: Guide::Loss, iterations: Some(20), ..quantized(Method::Autoround, Scheme::W4A16) }.into(),
        Quantize { iterations: Some(20), ..quantized(Method::Autoround, Scheme::Nvfp4A16) }.into(),
        quantized(Method::Awq, Scheme::W4A16).into(),
        quantized(Method::Smoothquant, Scheme::W8A8).into(),
        pruned(Importance::Sparsegpt).into(),
        palettized().into(),
        Decompose { rank: Amount::fraction(0.85), ..Decompose::default() }.into(),
    ] {
        let (whole, at_once) = run(pass.clone());
        let folder = tempfile::tempdir().unwrap();
        let cancel = Cancel::default();
        let handle = cancel.clone();
        let watch = move |event: Event| {
            if let Event::Begin { stage, .. } = event
                && stage.starts_with("Block 4 of")
            {
                handle.cancel();
            }
        };
        let model = || Model::open(golden("llama")).unwrap();
        let stopped = builder(folder.path(), pass.clone()).progress(watch).cancel(cancel).build().unwrap().run(model(), folder.path().join("out"));
        assert!(matches!(stopped.unwrap_err(), Error::Paused { .. } | Error::Interrupted { .. } | Error::Cancelled));
        assert!(folder.path().join("out.unfinished").exists());
        let other = builder(folder.path(), pass.clone()).seed(99).resume(true).build().unwrap().run(model(), folder.path().join("out"));
        assert!(other.unwrap_err().to_string().contains("other options"));
        // Different instruction sets would round blocks differently.
        let folders = std::fs::read_dir(folder.path().join("out.unfinished")).unwrap().map(|entry| entry.unwrap().path().join("identity"));
        let identity = folders.into_iter().find(|path| path.is_file()).unwrap();
        let text = std::fs::read_to_string(&identity).unwrap();
        let elsewhere = text.replace(&hardware(&crate::common::device()), "cpu another");
        std::fs::write(&identity, elsewhere).unwrap();
        let other = builder(folder.path(), pass.clone()).resume(true).build().unwrap().run(model(), folder.path().join("out"));
        assert!(other.unwrap_err().to_string().contains("another device or instruction set"));
        std::fs::write(identity, text).unwrap();
        let report = builder(folder.path(), pass.clone()).resume(true).build().unwrap().run(model(), folder.path().join("out")).unwrap();
        let (resumed, notes): (Vec<_>, Vec<_>) =
            report.notes.iter().cloned().partition(|note| note.contains("loaded from the checkpoints of an interrupted run"));
        assert_eq!(resumed.len(), 1);
        if matches!(pass, Step::Decompose(_)) {
            // Layers of the last blocks, which were decomposed after the interruption, are corrected.
            let layers = report.passes[1].details["layers"].as_array().unwrap();
            let is_corrected = |layer: &&serde_json::Value| layer["propagation"] == 0.25 && layer["weight"].as_str().unwrap().contains("layers.1.");
            assert!(layers.iter().filter(is_corrected).count() > 3, "{layers:?}");
        }
        // The report of a block is complete even if another process finished it.
        assert_eq!((&notes, &report.passes[1].details), (&at_once.notes, &at_once.passes[1].details));
        assert!(bytes(folder.path()) == bytes(whole.path()));
        assert!(!folder.path().join("out.unfinished").exists());
    }
}

/// Only static ranges depend on every sample, and only products of features on the number of tokens.
#[test]
fn a_single_sample_is_noted_where_it_matters() {
    let noted = |pass: Step, part: &str| {
        let folder = tempfile::tempdir().unwrap();
        let data = Data { samples: Some(1), ..tokens(folder.path()) };
        let pipeline = Pipeline::builder().calibration(data).pass(pass).threads(2).build().unwrap();
        let report = pipeline.run(Model::open(golden("llama")).unwrap(), folder.path().join("out")).unwrap();
        report.notes.iter().any(|note| note.contains(part))
    };
    let (single, few) = ("has 1 calibration sample", "fewer calibration tokens than features");
    assert!(!noted(pruned(Importance::Wanda).into(), single) && noted(compress::pass::QuantizeStatic::default().into(), single));
    assert!(!noted(pruned(Importance::Wanda).into(), few) && noted(pruned(Importance::Sparsegpt).into(), few));
}

/// A weight of DeBERTa that projects both tokens and positions.
const SHARED: &str = "encoder.layer.0.attention.self.key_proj.weight";

/// Data-free passes modify weights of several layers. Passes with samples leave them unchanged, or modify
/// them without samples.
#[test]
fn weights_that_samples_cannot_modify_are_noted() {
    let steps: [(Step, &str, bool); 8] = [
        (quantized(Method::Gptq, Scheme::W4A16).into(), "quantize: left unchanged, read by several layers: ", false),
        (quantized(Method::Awq, Scheme::W4A16).into(), "quantize: left unchanged, read by several layers: ", false),
        (pruned(Importance::Wanda).into(), "prune-unstructured: left unchanged, read by several layers: ", false),
        (
            PruneUnstructured { targets: vec!["encoder.layer.*.weight".parse().unwrap()], ..pruned(Importance::Sparsegpt) }.into(),
            "prune-unstructured: left unchanged, read by several layers: ",
            false,
        ),
        (
            Quantize { rules: vec![format!("{SHARED}=W8A16").parse().unwrap()], ..quantized(Method::Gptq, Scheme::W4A16) }.into(),
            "quantize: the rule of `encoder.layer.0.attention.self.key_proj.weight` has no effect",
            false,
        ),
        (
            PruneUnstructured { rules: vec!["*key_proj*=0.3".parse().unwrap()], ..pruned(Importance::Wanda) }.into(),
            "prune-unstructured: the rule of `*key_proj*` has no effect",
            false,
        ),
        (Palettize { importance: InputImportance::Activation, bits: 2, ..Palettize::default() }.into(), "not weighted by inputs", true),
        (Decompose { importance: InputImportance::Activation, ..Decompose::default() }.into(), "decomposed without calibration samples", true),
    ];
    let before = Model::open(golden("deberta")).unwrap().weights.get(SHARED).unwrap().floats(SHARED).unwrap();
    for (step, part, changes) in steps {
        let done = run("deberta", step);
        let notes = &done.report.notes;
        assert!(notes.iter().any(|note| note.contains(part)), "{notes:?}");
        let is_same = done.model().weights.get(SHARED).is_ok_and(|weight| weight.floats(SHARED).unwrap() == before);
        assert_eq!(is_same, !changes, "{part}");
    }
}

#[test]
fn unsupported_options_are_rejected_by_name() {
    let refused = |name: &str, pass: Step| attempt(name, pass).err().unwrap().to_string();
    let pattern = |text: &str| vec![text.parse().unwrap()];
    let cases: [(&str, Step, &str); 15] = [
        (
            "llama",
            PruneUnstructured { targets: pattern("model.embed_tokens.weight"), ..pruned(Importance::Wanda) }.into(),
            "an operator that is not a linear layer",
        ),
        ("llama", PruneUnstructured { pattern: Some("1:80".parse().unwrap()), amount: None, ..pruned(Importance::Sparsegpt) }.into(), "80"),
        ("llama", PruneUnstructured { rules: vec!["nothing*=0.5".parse().unwrap()], ..pruned(Importance::Sparsegpt) }.into(), "nothing*"),
        ("llama", PruneUnstructured { scope: compress::pass::Scope::Global, ..pruned(Importance::Wanda) }.into(), "scope: global"),
        ("llama", quantized(Method::Smoothquant, Scheme::W4A16).into(), "int8 activations"),
        ("llama", Quantize { damping: Some(0.1), ..quantized(Method::Rtn, Scheme::W4A16) }.into(), "damping"),
        ("llama", quantized(Method::Gptq, Scheme::Fp8).into(), "scales within rows"),
        ("llama", Quantize { iterations: Some(5), ..quantized(Method::Gptq, Scheme::W4A16) }.into(), "`iterations`"),
        ("llama", Quantize { batch: Some(0), ..quantized(Method::Autoround, Scheme::W4A16) }.into(), "batch"),
        ("llama", Quantize { guide: Guide::Loss, ..quantized(Method::Awq, Scheme::W4A16) }.into(), "`guide`"),
        ("bert", Quantize { guide: Guide::Loss, ..quantized(Method::Gptq, Scheme::W4A16) }.into(), "`logits`"),
        ("gpt2", quantized(Method::Gptq, Scheme::W4A16).into(), "which stores layers as [in, out]: compressed-tensors does not support this"),
        ("deberta", Quantize { targets: pattern(SHARED), ..quantized(Method::Gptq, Scheme::W4A16) }.into(), "is read by several layers"),
        ("deberta", PruneUnstructured { targets: pattern(SHARED), ..pruned(Importance::Sparsegpt) }.into(), "is read by several layers"),
        ("deberta", PruneUnstructured { targets: pattern("*query_proj.weight"), ..pruned(Importance::Wanda) }.into(), "supports none of the selected layers"),
    ];
    for (name, step, part) in cases {
        let text = refused(name, step);
        assert!(text.contains(part), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let small = builder(folder.path(), quantized(Method::Gptq, Scheme::W4A16)).memory(Some(1000)).build().unwrap();
    let text = small.run(Model::open(golden("llama")).unwrap(), folder.path().join("out")).err().unwrap().to_string();
    assert!(text.contains("the memory limit is"), "{text}");
    let alone = Pipeline::builder().pass(pruned(Importance::Wanda)).build().err().map(|e| e.to_string()).unwrap_or_else(|| {
        Pipeline::builder()
            .pass(pruned(Importance::Wanda))
            .build()
            .unwrap()
            .run(Model::open(golden("llama")).unwrap(), folder.path().join("out"))
            .unwrap_err()
            .to_string()
    });
    assert!(alone.contains("calibration"), "{alone}");
}

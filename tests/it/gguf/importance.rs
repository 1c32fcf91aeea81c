//! Importance from calibration samples: written blocks are compared with blocks quantized by an
//! importance computed here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::export::{FileType, Gguf};
use compress::pass::InputImportance;
use compress::{Model, Pipeline, Report};
use compress_core::store::gguf::GgufFile;
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::data::Data;
use compress_engine::exec::{Executor, Parameters, Residence};
use compress_graph::ir::Op;
use compress_kernels::ggml::BlockType;
use serde_json::json;

const HIDDEN: usize = 64;
/// A row length of complete blocks of 256.
const LARGE: usize = 256;
const EXPERTS: usize = 4;

/// Layout of the MLPs.
#[derive(Clone, Copy, PartialEq)]
pub enum Networks {
    Plain,
    /// Experts in separate tensors.
    Apart,
    /// Experts stacked in one tensor.
    Together,
}

/// Writes a tiny decoder of random weights with outlier channels in the inputs of layers, with the same
/// experts in both layouts.
pub fn tiny(folder: &Path, networks: Networks, hidden: usize) -> Model {
    let mut state = 7u64;
    let mut random = |shape: &[usize], scale: f32| {
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * scale
            })
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let norm = || Tensor::from_vec((0..hidden).map(|at| if at % 9 == 4 { 6.0f32 } else { 0.5 }).collect::<Vec<_>>(), hidden, &Device::Cpu).unwrap();
    tensors.insert("model.embed_tokens.weight".into(), random(&[48, hidden], 1.0));
    tensors.insert("model.norm.weight".into(), norm());
    // The search for scales of large blocks is slow.
    let layers = if hidden == LARGE { 1 } else { 2 };
    for layer in 0..layers {
        let mut put = |name: &str, tensor: Tensor| drop(tensors.insert(format!("model.layers.{layer}.{name}"), tensor));
        ["input_layernorm.weight", "post_attention_layernorm.weight"].iter().for_each(|name| put(name, norm()));
        for (name, rows) in [("q", hidden), ("k", hidden / 2), ("v", hidden / 2), ("o", hidden)] {
            put(&format!("self_attn.{name}_proj.weight"), random(&[rows, hidden], 0.3));
        }
        let mut matrix = || random(&[hidden, hidden], 0.3);
        if networks == Networks::Plain {
            ["gate", "up", "down"].iter().for_each(|name| put(&format!("mlp.{name}_proj.weight"), matrix()));
            continue;
        }
        let experts: Vec<[Tensor; 3]> = (0..EXPERTS).map(|_| [(); 3].map(|()| matrix())).collect();
        let gate = random(&[EXPERTS, hidden], 1.0);
        if networks == Networks::Together {
            let of = |parts: &dyn Fn(&[Tensor; 3]) -> Tensor| Tensor::stack(&experts.iter().map(parts).collect::<Vec<_>>(), 0).unwrap();
            put("mlp.experts.gate_up_proj", of(&|[gate, up, _]| Tensor::cat(&[gate, up], 0).unwrap()));
            put("mlp.experts.down_proj", of(&|[.., down]| down.clone()));
            put("mlp.gate.weight", gate);
        } else {
            for (number, parts) in experts.into_iter().enumerate() {
                parts.into_iter().zip(["w1", "w3", "w2"]).for_each(|(tensor, name)| put(&format!("block_sparse_moe.experts.{number}.{name}.weight"), tensor));
            }
            put("block_sparse_moe.gate.weight", gate);
        }
    }
    let folder = &folder.join("in");
    std::fs::create_dir(folder).unwrap();
    candle_core::safetensors::save(&tensors.into_iter().collect(), folder.join("model.safetensors")).unwrap();
    let (kind, class) = if networks == Networks::Plain { ("llama", "LlamaForCausalLM") } else { ("mixtral", "MixtralForCausalLM") };
    let config = json!({
        "model_type": kind, "architectures": [class], "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": true, "rope_theta": 10000.0,
    });
    let mut config = config;
    if networks != Networks::Plain {
        config["num_local_experts"] = EXPERTS.into();
        config["num_experts_per_tok"] = 2.into();
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Model::open(folder).unwrap()
}

/// Tokens of this number of samples.
fn samples(count: usize) -> (Tensor, Tensor) {
    let ids = Tensor::from_vec((0..8 * count as i64).map(|i| i * i * 7 % 41).collect::<Vec<_>>(), (count, 8), &Device::Cpu).unwrap();
    (ids.clone(), ids.ones_like().unwrap())
}

/// Number of calibration samples; further samples are held out.
const CALIBRATION_SAMPLES: usize = 48;

/// Writes a model with and without importance.
pub fn run(model: &Model, folder: &Path, file_type: FileType, importance: InputImportance) -> compress::Result<Report> {
    run_export(model, folder, Gguf { file_type, importance, ..Gguf::default() })
}

/// Writes a model with calibration samples.
pub fn run_export(model: &Model, folder: &Path, export: Gguf) -> compress::Result<Report> {
    let path = folder.join("ids.safetensors");
    let (ids, mask) = samples(2 * CALIBRATION_SAMPLES);
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids), ("attention_mask".to_owned(), mask)].into(), &path).unwrap();
    Pipeline::builder()
        .calibration(Data { samples: Some(CALIBRATION_SAMPLES), ..Data::at(&path) })
        .export(export)
        .measure(false)
        .force(true)
        .build()?
        .run(model.clone(), folder.join("out"))
}

/// Mean square of each input column of each layer, by weight.
fn counted(model: &Model) -> BTreeMap<String, Vec<f32>> {
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let graph = model.graph().unwrap();
    let of = |node: &compress_graph::ir::Node, at: usize| graph.value(node.inputs[at]).name.clone();
    let layers: Vec<_> = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_))).map(|node| (of(node, 1), of(node, 0))).collect();
    let read: BTreeSet<&str> = layers.iter().map(|(_, value)| value.as_str()).collect();
    let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, candle_core::DType::F32, Residence::Computed, &work).unwrap();
    let executor = Executor::new(&graph, parameters, Device::Cpu);
    let observation = executor.observation(|name| read.contains(name));
    let (ids, mask) = samples(CALIBRATION_SAMPLES);
    let mut sums: BTreeMap<String, (Vec<f64>, f64)> = BTreeMap::new();
    let inputs = [("input_ids".to_owned(), ids), ("attention_mask".to_owned(), mask)].into();
    let mut look = |name: &str, value: &Tensor| {
        let rows: Vec<Vec<f32>> = value.flatten(0, value.rank() - 2).unwrap().to_vec2().unwrap();
        let (sums, count) = sums.entry(name.to_owned()).or_default();
        for row in rows.iter().filter(|row| row.iter().any(|x| *x != 0.0)) {
            sums.resize(row.len(), 0.0);
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
            *count += 1.0;
        }
        Ok(())
    };
    executor.run_observed(&observation, &inputs, &mut look).unwrap();
    // Importance matrices store sums in 32 bits.
    let of = |value: &String| sums[value].0.iter().map(|sum| *sum as f32 / sums[value].1 as f32).collect();
    layers.iter().map(|(weight, value)| (weight.clone(), of(value))).collect()
}

#[test]
fn blocks_are_quantized_by_the_importance_of_inputs() {
    use BlockType::{Q4_0, Q4_K, Q5_0, Q6_K};
    let hold = check_importance;
    hold(Networks::Plain, HIDDEN, FileType::Q4_0, &[(Q4_0, 14)]);
    // Two matrices with more bits are Q8_0, which has no search for scales.
    hold(Networks::Plain, HIDDEN, FileType::Q4_K_M, &[(Q5_0, 12)]);
    hold(Networks::Plain, LARGE, FileType::Q4_K_M, &[(Q4_K, 5), (Q6_K, 2)]);
    hold(Networks::Apart, HIDDEN, FileType::Q4_0, &[(Q4_0, 32)]);
}

/// Writes a model of this width with importance, and compares the given number of matrices of each block
/// type with blocks quantized by the importance computed here.
fn check_importance(networks: Networks, width: usize, file_type: FileType, kinds: &[(BlockType, usize)]) {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), networks, width);
    let importance = counted(&model);
    let report = run(&model, folder.path(), file_type, InputImportance::Auto).unwrap();
    assert_eq!(report.recipe["export"][0]["gguf"]["importance"], "activation");
    let found = Model::open(folder.path().join("out/model.gguf")).unwrap();
    for (kind, count) in kinds {
        let weighted: Vec<_> = report.layers.iter().filter(|layer| layer.encoding == format!("{} by importance", kind.name().to_lowercase())).collect();
        assert_eq!(weighted.len(), *count, "{} of {}: {:?}", kind.name(), width, report.layers.iter().map(|l| (&l.name, &l.encoding)).collect::<Vec<_>>());
        for layer in weighted {
            let (columns, values) = (&importance[&layer.name], model.weights.by_name[&layer.name].floats("").unwrap());
            let mut expected = vec![0f32; values.len()];
            for (row, expected) in values.chunks(width).zip(expected.chunks_mut(width)) {
                let mut blocks = vec![0; width / kind.elements() * kind.bytes()];
                kind.encode_row(row, columns, &mut blocks);
                kind.decode(&blocks, expected);
            }
            // Sums in another order differ in the last bits, which rarely affects the choice of a scale.
            let values = found.weights.by_name[&layer.name].floats("").unwrap();
            let other = values.chunks(width).zip(expected.chunks(width)).filter(|(a, b)| a != b).count();
            assert!(50 * other <= values.len() / width, "{}: {other} rows", layer.name);
        }
    }
    let all: usize = kinds.iter().map(|(_, count)| count).sum();
    let weighted = report.layers.iter().filter(|layer| layer.encoding.contains("importance")).count();
    assert!(weighted == all && report.layers.iter().any(|layer| layer.name == "model.embed_tokens.weight" && !layer.encoding.contains("importance")));
    let note = report.notes.iter().find(|note| note.contains("on 48 calibration samples")).unwrap();
    assert!(note.contains(&format!("in {weighted} matrices")), "{note}");
    let plain = run(&model, folder.path(), file_type, InputImportance::None).unwrap();
    assert!(plain.layers.iter().all(|layer| !layer.encoding.contains("importance")));
    // The total weighted error of all layers decreases.
    let without = Model::open(folder.path().join("out/model.gguf")).unwrap();
    let cost = |held: &Model| {
        let of = |(name, columns): (&String, &Vec<f32>)| {
            let (now, before) = (held.weights.by_name[name].floats("").unwrap(), model.weights.by_name[name].floats("").unwrap());
            let error = |(at, (a, b)): (usize, (&f32, &f32))| f64::from(columns[at % width]) * f64::from(a - b).powi(2);
            now.iter().zip(&before).enumerate().map(error).sum::<f64>()
        };
        importance.iter().filter(|(name, _)| name.contains("layers")).map(of).sum::<f64>()
    };
    assert!(cost(&found) < 0.95 * cost(&without), "{} and {}", cost(&found), cost(&without));
}

#[test]
fn importance_needs_samples_and_a_type_with_a_search_for_scales() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Networks::Plain, HIDDEN);
    let error = run(&model, folder.path(), FileType::Q8_0, InputImportance::Activation).unwrap_err().to_string();
    assert!(error.contains("gguf: importance") && error.contains("has no effect for this type"), "{error}");
    let report = run(&model, folder.path(), FileType::Q8_0, InputImportance::Auto).unwrap();
    assert_eq!(report.recipe["export"][0]["gguf"]["importance"], "none");
    // Training data is not used for importance.
    let builder = Pipeline::builder().train(Data::at(&folder.path().join("ids.safetensors")));
    let builder = builder.export(Gguf { file_type: FileType::Q4_0, ..Gguf::default() });
    let report = builder.measure(false).force(true).build().unwrap().run(model.clone(), folder.path().join("out")).unwrap();
    assert_eq!(report.recipe["export"][0]["gguf"]["importance"], "none");
    let export = Gguf { file_type: FileType::Q4_0, importance: InputImportance::Activation, ..Gguf::default() };
    let error = Pipeline::builder().export(export).build().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("gguf") && error.contains("data: { calibration: ... }"), "{error}");
}

/// Tensors of a file as floats.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let file = GgufFile::open(&folder.join("out/model.gguf")).unwrap();
    file.tensors.iter().map(|(name, weight)| (name.clone(), (weight.shape.clone(), weight.floats(name).unwrap()))).collect()
}

/// Both layouts of experts result in identical files, with a separate importance for each expert.
#[test]
fn stacked_experts_are_written_like_separate_ones() {
    let [apart, together] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let models = [(&apart, Networks::Apart), (&together, Networks::Together)].map(|(folder, networks)| (folder, tiny(folder.path(), networks, HIDDEN)));
    for (file_type, importance) in
        [(FileType::F32, InputImportance::None), (FileType::Q4_0, InputImportance::None), (FileType::Q4_0, InputImportance::Activation)]
    {
        let reports = models.each_ref().map(|(folder, model)| run(model, folder.path(), file_type, importance).unwrap());
        let files = models.each_ref().map(|(folder, _)| tensors(folder.path()));
        assert!(files[0] == files[1], "{file_type:?} {importance:?}");
        assert_eq!(files[0]["blk.1.ffn_gate_exps.weight"].0, [EXPERTS, HIDDEN, HIDDEN]);
        let all = reports[1].layers.iter().find(|layer| layer.name == "model.layers.0.mlp.experts.gate_up_proj").unwrap();
        assert_eq!(all.shape, [EXPERTS, 2 * HIDDEN, HIDDEN]);
        let one = |report: &Report| report.layers.iter().filter(|layer| layer.name.contains("experts")).map(|layer| layer.bytes_after).sum::<u64>();
        assert_eq!(one(&reports[0]), one(&reports[1]));
        // Gate and up projections have different histogram bins.
        assert!(!serde_json::to_string(&reports[1].histograms).unwrap().contains("gate_up"));
        let weighted = importance == InputImportance::Activation;
        assert_eq!(all.encoding.contains("by importance"), weighted, "{}", all.encoding);
        for report in &reports {
            assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
        }
    }
}

//! Decoders as ONNX with a KV cache: incremental decoding in ONNX Runtime equals the executor's outputs
//! for whole texts.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::numbers::{angle, largest};
use crate::common::{golden_model as golden, onnxruntime};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::common::work;
use candle_core::{DType, Device, Tensor};
use compress::export::{Export, Onnx};
use compress::pass::{Quantize, QuantizeDynamic, Step};
use compress::{Model, Pipeline};
use compress_engine::evaluation::{Runtime, Subject};
use compress_engine::exec::{Executor, Inputs, Parameters, Residence, Rounding};
use compress_engine::generation::LanguageModel;
use compress_graph::ir::ops::{Rotary, RotaryScaling};
use compress_graph::ir::{Graph, GraphFile, Op, Port};
use compress_onnx::runtime::{DecoderCache, Options, Session};
use compress_onnx::{ModelFile, Precision, TiedHead, WeightOnly, file};
use serde_json::{Value, json};

const TOLERANCE: f32 = 1e-4;
/// Lengths of both texts; the shorter one is padded on the left.
const LENGTHS: [usize; 2] = [11, 7];
/// Number of columns of the prompt.
const PROMPT_COLUMNS: usize = 6;

fn cached() -> Onnx {
    Onnx { cache: true, ..Onnx::default() }
}

fn written(model: &Path, out: &Path, steps: Vec<Step>, exports: Vec<Export>) -> compress::Result<compress::report::Report> {
    let builder = steps.into_iter().fold(Pipeline::builder().threads(2).measure(false), compress::pipeline::Builder::pass);
    exports.into_iter().fold(builder, compress::pipeline::Builder::export).build()?.run(Model::open(model)?, out)
}

/// All golden decoders.
fn decoders() -> Vec<(String, Graph)> {
    let mut names: Vec<String> = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let decoder = |name: String| {
        let model = Model::open(golden(&name)).unwrap();
        let graph = model.graph().unwrap();
        // Encoder-decoder models are rejected by name.
        let alone = graph.inputs().all(|(_, value)| value.name != "decoder_input_ids");
        LanguageModel::new(model).ok().filter(|_| alone).map(|_| (name, graph))
    };
    names.into_iter().filter_map(decoder).collect()
}

fn scaling(graph: &Graph) -> Option<&RotaryScaling> {
    graph.nodes().iter().find_map(|node| if let Op::Rotary(Rotary { scaling, .. }) = &node.op { Some(scaling) } else { None })
}

fn tokens(row: usize, count: usize) -> Vec<i64> {
    (0..count as i64).map(|at| 3 + (at * at * 7 + at + 13 * row as i64) % 37).collect()
}

fn tensor(rows: &[Vec<i64>]) -> Tensor {
    Tensor::from_vec(rows.concat(), (rows.len(), rows[0].len()), &Device::Cpu).unwrap()
}

/// Logits of the executor for a text without padding, `[tokens, vocabulary]`.
fn executor_logits(model: &Model, graph: &Graph, text: &[i64], rounding: Rounding) -> Tensor {
    let parameters = work(|work| Parameters::load(graph, &model.weights, &Device::Cpu, DType::F32, Residence::Stored, work)).unwrap();
    let inputs: Inputs = [("input_ids".to_owned(), tensor(&[text.to_vec()])), ("attention_mask".to_owned(), tensor(&[vec![1; text.len()]]))].into();
    let outputs = Executor::new(graph, parameters, Device::Cpu).with_rounding(rounding).run(&inputs).unwrap();
    outputs["logits"].squeeze(0).unwrap()
}

/// Logits of a file for texts that are padded on the left, chunk by chunk: `[batch, columns,
/// vocabulary]` of each chunk.
fn in_chunks(folder: &Path, texts: &[Vec<i64>], pieces: &[usize]) -> Tensor {
    let longest = texts.iter().map(Vec::len).max().unwrap();
    let padded = |fill: i64, of: &dyn Fn(i64) -> i64| -> Vec<Vec<i64>> {
        let row = |text: &Vec<i64>| [vec![fill; longest - text.len()], text.iter().map(|token| of(*token)).collect()].concat();
        texts.iter().map(row).collect()
    };
    answers(folder, &tensor(&padded(0, &|token| token)), &tensor(&padded(0, &|_| 1)), pieces)
}

/// Logits of a file for columns of tokens, chunk by chunk.
fn answers(folder: &Path, ids: &Tensor, mask: &Tensor, pieces: &[usize]) -> Tensor {
    let (mut session, mut seen) = (Session::open(&folder.join(file::MODEL), Options::default()).unwrap(), DecoderCache::default());
    let (mut from, mut parts) = (0, Vec::new());
    for piece in pieces {
        let inputs: Inputs = [
            ("input_ids".to_owned(), ids.narrow(1, from, *piece).unwrap().contiguous().unwrap()),
            ("attention_mask".to_owned(), mask.narrow(1, 0, from + piece).unwrap().contiguous().unwrap()),
        ]
        .into();
        let outputs = session.run_next(&inputs, &mut seen).unwrap();
        assert_eq!(outputs.keys().collect::<Vec<_>>(), ["logits"]);
        parts.push(outputs["logits"].clone());
        from += piece;
    }
    Tensor::cat(&parts, 1).unwrap()
}

#[test]
fn every_decoder_continues_padded_texts_like_the_executor() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut families, mut failures) = (BTreeSet::new(), Vec::new());
    for (index, (name, graph)) in decoders().into_iter().enumerate() {
        let (out, opset) = (folder.path().join(&name), 17 + index as u32 % 5);
        let report = written(&golden(&name), &out, vec![], vec![Onnx { opset: Some(opset), ..cached() }.into()]);
        if matches!(scaling(&graph), Some(RotaryScaling::Dynamic { .. })) {
            let error = report.unwrap_err().to_string();
            assert!(error.contains("graph node `layers.0.self_attn.q_rotary`") && error.contains("`dynamic`"), "{error}");
            continue;
        }
        if let Some(node) = graph.nodes().iter().find(|node| matches!(node.op, Op::CausalConv(_) | Op::GatedDelta(_))) {
            let (error, node) = (report.unwrap_err().to_string(), &graph.value(node.output).name);
            assert!(error.contains(&format!("graph node `{node}`: is a CausalConv, whose state")) && error.contains("`cache`"), "{error}");
            continue;
        }
        let report = report.unwrap();
        assert!(report.outputs[0].verified.how.contains("run in ONNX Runtime on 2 synthetic samples"), "{}", report.outputs[0].verified.how);
        // The context length is that of config.json, independent of the frequencies of longer texts.
        assert!(!report.notes.iter().any(|note| note.contains("max_position_embeddings")), "{name}: {:?}", report.notes);
        let model = Model::open(golden(&name)).unwrap();
        families.insert(model.config.model_type().to_owned());
        // With two sets of frequencies, those of long texts apply to prompts that are already long.
        let cases: Vec<(Vec<usize>, Vec<usize>)> = match scaling(&graph) {
            Some(RotaryScaling::LongRope { original: 8, .. }) => vec![(vec![8, 5], vec![4, 1, 1, 2]), (vec![12], vec![10, 1, 1])],
            other => {
                assert!(!matches!(other, Some(RotaryScaling::LongRope { .. })), "{name}");
                vec![(LENGTHS.to_vec(), vec![PROMPT_COLUMNS, 1, 2, 1, 1])]
            }
        };
        for (lengths, pieces) in &cases {
            let texts: Vec<Vec<i64>> = lengths.iter().enumerate().map(|(row, count)| tokens(row, *count)).collect();
            let theirs = in_chunks(&out, &texts, pieces);
            for (row, text) in texts.iter().enumerate() {
                let ours = executor_logits(&model, &graph, text, Rounding::Tensor);
                let last = theirs.get(row).unwrap().narrow(0, theirs.dim(1).unwrap() - text.len(), text.len()).unwrap();
                let apart = largest(&(&ours - last).unwrap()) / largest(&ours).max(1.0);
                if apart > TOLERANCE || apart.is_nan() {
                    failures.push(format!("{name} at opset {opset}, text {row}: {apart:e}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for family in [
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "hunyuan_v1_dense",
        "llama",
        "llama4_text",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    ] {
        assert!(families.contains(family), "{family} is not among {families:?}");
    }
}

#[test]
fn windows_reach_over_padding_on_the_right() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["gemma2", "mistral", "qwen2-sliding"] {
        let (out, model) = (folder.path().join(name), Model::open(golden(name)).unwrap());
        let graph = model.graph().unwrap();
        assert!(graph.nodes().iter().any(|node| matches!(&node.op, Op::Attention(op) if op.window == Some(4))), "{name}");
        written(&golden(name), &out, vec![], vec![cached().into()]).unwrap();
        // Two prompts of 9 and 4 tokens, continued by 3 tokens, with more padding than the width of a
        // window.
        let (prompts, steps) = ([9, 4], 3);
        let texts: Vec<Vec<i64>> = prompts.iter().enumerate().map(|(row, count)| tokens(row, count + steps)).collect();
        let with_padding = |row: usize, fill: i64, of: &dyn Fn(i64) -> i64| -> Vec<i64> {
            let (prompt, more) = texts[row].split_at(prompts[row]);
            let part = |part: &[i64]| part.iter().map(|token| of(*token)).collect::<Vec<_>>();
            [part(prompt), vec![fill; prompts[0] - prompts[row]], part(more)].concat()
        };
        let ids = tensor(&[0, 1].map(|row| with_padding(row, 0, &|token| token)));
        let mask = tensor(&[0, 1].map(|row| with_padding(row, 0, &|_| 1)));
        let theirs = answers(&out, &ids, &mask, &[prompts[0], 1, 1, 1]);
        for (row, text) in texts.iter().enumerate() {
            let ours = executor_logits(&model, &graph, text, Rounding::Tensor);
            let row_of_theirs = theirs.get(row).unwrap();
            let parts = [(0, prompts[row]), (prompts[0], steps)].map(|(from, count)| row_of_theirs.narrow(0, from, count).unwrap());
            let apart = largest(&(&ours - Tensor::cat(&parts, 0).unwrap()).unwrap()) / largest(&ours).max(1.0);
            assert!(apart < TOLERANCE, "{name}, text {row}: {apart:e}");
        }
    }
}

#[test]
fn quantized_and_half_precision_decoders_continue_texts() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let int8 = || vec![Step::from(QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() })];
    let int4 = || vec![Step::from(serde_json::from_value::<Quantize>(json!({ "scheme": "W4A16", "group_size": 16 })).unwrap())];
    let cases: [(&str, Vec<Step>, Onnx, f64); 7] = [
        ("int8", int8(), cached(), 1e-2),
        ("int8 head", int8(), Onnx { tied_head: TiedHead::Int8, ..cached() }, 1e-2),
        ("int4", int4(), Onnx { opset: Some(21), ..cached() }, 1e-6),
        ("int4 in blocks", int4(), Onnx { weight_only: WeightOnly::MatmulNbits, ..cached() }, 1e-6),
        ("half", vec![], Onnx { precision: Precision::Float16, ..cached() }, 1e-4),
        ("half int8", int8(), Onnx { precision: Precision::Float16, ..cached() }, 1e-2),
        ("half int8 head", int8(), Onnx { precision: Precision::Float16, tied_head: TiedHead::Int8, ..cached() }, 1e-2),
    ];
    let folder = tempfile::tempdir().unwrap();
    let mut products = BTreeMap::new();
    for (case, steps, onnx, tolerance) in cases {
        let out = folder.path().join(case.replace(' ', "-"));
        let exports = vec![Export::default(), onnx.into()];
        written(&golden("llama-grouped-tied"), &out, steps, exports).unwrap_or_else(|error| panic!("{case}: {error}"));
        let model = Model::open(&out).unwrap();
        let graph = model.graph().unwrap();
        let text = tokens(0, 10);
        let theirs = in_chunks(&out, std::slice::from_ref(&text), &[5, 1, 3, 1]).squeeze(0).unwrap();
        // In ONNX, a chunk shares one scale of activations. In chunks of one token, this equals a scale
        // per token.
        let apart = angle(&executor_logits(&model, &graph, &text, Rounding::Token), &theirs);
        assert!(apart < tolerance, "{case}: {apart:e}");
        let session = Session::open(&out.join(file::MODEL), Options::default()).unwrap();
        let half = onnx.precision == Precision::Float16;
        let (inputs, outputs) = session.ports();
        assert_eq!((inputs.len(), outputs.len()), (3 + 4, 1 + 4), "{case}");
        assert!(ModelFile::open(&out.join(file::MODEL)).unwrap().has_kv_cache(), "{case}");
        let bytes = std::fs::read(out.join(file::MODEL)).unwrap();
        assert_eq!(element_of(&bytes, "past_key_values.1.value"), if half { 10 } else { 1 }, "{case}");
        let nodes = parsed(&bytes).node;
        products.insert(case, nodes.iter().filter(|node| node.op_type.as_deref() == Some("MatMulInteger")).count());
    }
    assert_eq!((products["int8 head"], products["half int8 head"]), (products["int8"] + 1, products["half int8"] + 1));
}

fn parsed(bytes: &[u8]) -> compress_onnx::proto::GraphProto {
    let model: compress_onnx::proto::ModelProto = prost::Message::decode(bytes).unwrap();
    model.graph.unwrap()
}

/// The element type of an input, as ONNX numbers it.
fn element_of(bytes: &[u8], name: &str) -> i32 {
    let input = parsed(bytes).input.into_iter().find(|input| input.name.as_deref() == Some(name)).unwrap();
    input.r#type.unwrap().tensor_type.unwrap().elem_type.unwrap()
}

#[test]
fn names_are_those_of_other_exporters_and_runtimes() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let from = folder.path().join("model");
    std::fs::create_dir(&from).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama-grouped-tied").join(name), from.join(name)).unwrap();
    }
    std::fs::write(from.join("generation_config.json"), json!({ "eos_token_id": [5, 2], "pad_token_id": -1, "top_k": 7, "do_sample": true }).to_string())
        .unwrap();
    std::fs::write(from.join("genai_config.json"), "{}").unwrap();
    let report = written(&from, &out, vec![], vec![cached().into()]).unwrap();
    assert_eq!(report.outputs.iter().map(|output| output.path.as_str()).collect::<Vec<_>>(), ["model.onnx", "genai_config.json"]);
    assert!(report.notes.iter().any(|note| note.contains("not carried over") && note.contains("genai_config.json")), "{:?}", report.notes);
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("genai_config.json")).unwrap()).unwrap();
    let model = &config["model"];
    let said = |key: &str| model[key].clone();
    assert_eq!((said("type"), said("context_length"), said("eos_token_id"), said("pad_token_id")), (json!("llama"), json!(32), json!([5, 2]), json!(5)));
    let decoder = &model["decoder"];
    assert_eq!(decoder["filename"], "model.onnx");
    assert_eq!(decoder["inputs"]["past_key_names"], "past_key_values.%d.key");
    assert_eq!(decoder["outputs"]["present_value_names"], "present.%d.value");
    assert_eq!(
        (&config["search"]["top_k"], &config["search"]["do_sample"], &config["search"]["past_present_share_buffer"]),
        (&json!(7), &json!(true), &json!(false))
    );
    let graph = Model::open(&from).unwrap().graph().unwrap();
    let attention = graph.nodes().iter().find(|node| matches!(node.op, Op::Attention(_))).unwrap();
    let size = |input: usize, axis: usize| graph.value(attention.inputs[input]).ty.shape[axis].fixed().unwrap();
    assert_eq!(
        ["num_attention_heads", "num_key_value_heads", "head_size"].map(|key| decoder[key].clone()),
        [json!(size(0, 1)), json!(size(1, 1)), json!(size(1, 3))]
    );
    assert_ne!(size(0, 1), size(1, 1), "keys are grouped");
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    // A folder that contains only the file is run like the file.
    assert_eq!(Subject::open(&out, 1).unwrap().runtime(), Runtime::OnnxRuntime);
    let session = Session::open(&out.join(file::MODEL), Options::default()).unwrap();
    let names = |ports: &[Port]| ports.iter().map(|port| port.name.clone()).collect::<Vec<_>>();
    let kept = |prefix: &str| -> Vec<String> { (0..2).flat_map(|layer| ["key", "value"].map(|part| format!("{prefix}.{layer}.{part}"))).collect() };
    let (inputs, outputs) = session.ports();
    let first = ["input_ids", "attention_mask", "position_ids"].map(str::to_owned).to_vec();
    assert_eq!((names(&inputs), names(&outputs)), ([first, kept("past_key_values")].concat(), [vec!["logits".to_owned()], kept("present")].concat()));
    assert_eq!(inputs[3].shape, [None, Some(size(1, 1)), None, Some(size(1, 3))]);
    // Data sets provide only tokens and their mask.
    let (inputs, outputs) = session.public_ports();
    assert_eq!((names(&inputs), names(&outputs)), (vec!["input_ids".to_owned(), "attention_mask".to_owned()], vec!["logits".to_owned()]));
}

#[test]
fn models_that_do_not_support_a_cache_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |model: &Path| written(model, &folder.path().join("out"), vec![], vec![cached().into()]).unwrap_err().to_string();
    for (name, reason) in [("bert", "`bert` are not decoders"), ("vit", "`vit` are not decoders"), ("clip-text", "are not decoders")] {
        let error = refused(&golden(name));
        assert!(error.contains(reason), "{name}: {error}");
    }
    let changed = |key: &str, value: Value| {
        let from = tempfile::tempdir().unwrap();
        std::fs::copy(golden("llama").join("model.safetensors"), from.path().join("model.safetensors")).unwrap();
        let mut config: Value = serde_json::from_slice(&std::fs::read(golden("llama").join("config.json")).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(from.path().join("config.json"), config.to_string()).unwrap();
        from
    };
    let described = |from: &str, to: Option<&str>| {
        let folder = changed("use_cache", json!(true));
        let mut graph = serde_json::to_value(GraphFile::from(&Model::open(folder.path()).unwrap().graph().unwrap())).unwrap();
        for node in graph["nodes"].as_array_mut().unwrap().iter_mut() {
            let inputs: Vec<Value> = node["inputs"].as_array().unwrap().clone();
            let other = |name: Value| if name == from { to.map(Value::from) } else { Some(name) };
            node["inputs"] = inputs.into_iter().filter_map(other).collect();
        }
        if to.is_none() {
            graph["inputs"].as_object_mut().unwrap().remove(from);
        }
        std::fs::write(folder.path().join("graph.json"), graph.to_string()).unwrap();
        folder
    };
    let error = refused(described("attention_mask", None).path());
    assert!(error.contains("has no input `attention_mask`"), "{error}");
    let error = refused(described("attention_mask", Some("input_ids")).path());
    assert!(error.contains("a mask other than `attention_mask`"), "{error}");
    let report = written(&golden("llama"), &folder.path().join("untied"), vec![], vec![Onnx { tied_head: TiedHead::Int8, ..Onnx::default() }.into()]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("`tied_head: int8` has no effect")), "{:?}", report.notes);
    let error = refused(changed("is_causal", json!(false)).path());
    assert!(error.contains("graph node `layers.0.self_attn.context_heads`") && error.contains("attend to later tokens"), "{error}");
    // Without an end-of-text token, the file is written, but not its description for onnxruntime-genai.
    let from = changed("eos_token_id", Value::Null);
    let report = written(from.path(), &folder.path().join("endless"), vec![], vec![cached().into()]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("genai_config.json is not written") && note.contains("eos_token_id")), "{:?}", report.notes);
    let alone = folder.path().join("alone.onnx");
    let report = written(&golden("llama"), &alone, vec![], vec![cached().into()]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("genai_config.json is not written, because the output is a file")), "{:?}", report.notes);
    let described: BTreeMap<String, Value> = serde_json::from_value(Export::from(cached()).format().options()).unwrap();
    assert_eq!((&described["cache"], &described["tied_head"]), (&json!(true), &json!("float32")));
}

#[test]
fn the_description_for_runtimes_is_copied_with_an_unchanged_file() {
    let folder = tempfile::tempdir().unwrap();
    let [first, again, renamed, other] = ["first", "again", "renamed", "other"].map(|name| folder.path().join(name));
    written(&golden("llama-grouped-tied"), &first, vec![], vec![cached().into()]).unwrap();
    let int8 = || vec![Step::from(QuantizeDynamic::default())];
    written(&first, &again, int8(), vec![]).unwrap();
    let read = |folder: &Path| std::fs::read(folder.join("genai_config.json")).unwrap();
    assert_eq!(read(&again), read(&first));
    std::fs::create_dir(&renamed).unwrap();
    for (from, to) in [("model.onnx", "decoder.onnx"), ("config.json", "config.json"), ("genai_config.json", "genai_config.json")] {
        std::fs::copy(first.join(from), renamed.join(to)).unwrap();
    }
    let report = written(&renamed, &other, int8(), vec![]).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("genai_config.json (they describe the original ONNX file)")), "{:?}", report.notes);
    assert!(!other.join("genai_config.json").exists());
}

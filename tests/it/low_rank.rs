//! Low-rank decomposition and palettization: outputs, sizes, and which formats support the result.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::{golden_model as golden, onnxruntime, outputs};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use compress::export::{Gguf, Layout, Onnx, Safetensors};
use compress::pass::{Amount, Cast, Decompose, FloatFormat, InputImportance, Palettize, PruneStructured, PruneUnstructured, PrunedPart, Quantize, Step};
use compress::pipeline::Builder;
use compress::{Model, Pipeline, Report};
use compress_core::store::{Bytes, Encoding, Weight};
use compress_engine::data::{Data, synthetic};
use compress_kernels::dense;
use compress_kernels::low_rank::LowRank;
use compress_kernels::palette::Points;
use compress_onnx::proto::{DataType, ModelProto};
use compress_onnx::runtime::{Options, Session};
use compress_onnx::{Precision, file};
use prost::Message;
use serde_json::Value;

struct Done {
    folder: tempfile::TempDir,
    report: Report,
}

impl Done {
    fn path(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn model(&self) -> Model {
        Model::open(self.path()).unwrap()
    }
}

fn attempt(name: &str, builder: Builder) -> compress::Result<Done> {
    let folder = tempfile::tempdir().unwrap();
    let report = builder.threads(2).build()?.run(Model::open(golden(name))?, folder.path().join("out"))?;
    Ok(Done { folder, report })
}

fn run(name: &str, builder: Builder) -> Done {
    attempt(name, builder).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn distance(a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>) -> f32 {
    let far =
        |(name, tensor): (&String, &Tensor)| (tensor - &b[name]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    assert_eq!(a.len(), b.len());
    a.iter().map(far).fold(0.0, f32::max)
}

fn rank(rank: f64) -> Decompose {
    Decompose { rank: Amount::fraction(rank), ..Decompose::default() }
}

fn all(name: &str) -> Decompose {
    // Convolutions are only decomposed if they are selected by name.
    Decompose { targets: vec![if name.contains("resnet") { "*conv*.weight".parse().unwrap() } else { "*.weight".parse().unwrap() }], ..rank(0.6) }
}

/// The original model in which each decomposed layer is replaced by the product of its two factors.
fn multiplied(original: &Model, done: &Model, input_major: bool) -> Model {
    let mut model = original.clone();
    let mut found = 0;
    for (name, weight) in &original.weights.by_name {
        let part = |part: usize| name.strip_suffix("weight").and_then(|module| done.weights.by_name.get(&format!("{module}{part}.weight")));
        let (Some(inner), Some(outer)) = (part(0), part(1)) else { continue };
        found += 1;
        assert!(!done.weights.by_name.contains_key(name) && !done.weights.by_name.contains_key(&name.replace(".weight", ".bias")), "{name}");
        let (first, second) = if input_major { (inner, outer) } else { (outer, inner) };
        let matrix = |weight: &Weight| Tensor::new(weight.floats(name).unwrap(), &Device::Cpu).unwrap().reshape((weight.shape[0], weight.row())).unwrap();
        let product = matrix(first).matmul(&matrix(second)).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let bytes = Bytes { dtype: crate::common::DType::F32, bytes: product.iter().flat_map(|x| x.to_le_bytes()).collect() };
        model.weights.by_name.insert(name.clone(), Weight::new(bytes.dtype, weight.shape.clone(), Encoding::Dense, Arc::new(bytes)));
    }
    assert!(found > 0);
    model
}

#[test]
fn two_layers_equal_their_product_in_every_family() {
    for name in ["llama-biases", "gpt2", "qwen3", "bert", "distilbert-masked-lm", "xlm-roberta", "sentence-mean", "vit", "torchvision-resnet18"] {
        let done = run(name, Pipeline::builder().pass(all(name)).export(Safetensors::default()).export(Onnx::default()));
        let (original, model) = (Model::open(golden(name)).unwrap(), done.model());
        let inputs = synthetic(&original.graph().unwrap(), 3).unwrap().inputs;
        let (found, wanted) = (outputs(&model, &inputs), outputs(&multiplied(&original, &model, name == "gpt2"), &inputs));
        assert!(distance(&found, &wanted) < 2e-4, "{name}: {}", distance(&found, &wanted));
        assert!(distance(&found, &outputs(&original, &inputs)) > 1e-4, "{name}: nothing has changed");
        // Other libraries do not load it as a model of the family.
        assert!(done.path().join("graph.json").is_file() && done.report.notes.iter().any(|note| note.contains("graph.json")));
        if onnxruntime::has_onnx_runtime() {
            let theirs = Session::open(&done.path().join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap();
            let theirs = found.keys().map(|name| (name.clone(), theirs[name].clone())).collect();
            assert!(distance(&found, &theirs) < 2e-4, "{name}: {}", distance(&found, &theirs));
        }
    }
}

/// Runs that do not change the graph preserve graph.json and the mark of `model_type`: transformers would
/// load the folder with random weights in place of the factors. GGUF files cannot contain the graph.
#[test]
fn later_runs_keep_the_mark_of_model_type() {
    let done = run("llama-biases", Pipeline::builder().pass(rank(0.6)));
    let mark = |folder: &Path| serde_json::from_str::<Value>(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()["model_type"].clone();
    assert_eq!(mark(&done.path()), "compress-llama");
    let quantize: Quantize = serde_json::from_value(serde_json::json!({ "scheme": "W8A16" })).unwrap();
    let half: Cast = serde_json::from_value(serde_json::json!({ "to": "bf16" })).unwrap();
    for step in [Step::from(half), quantize.into(), PruneUnstructured::default().into()] {
        let again = run(done.path().to_str().unwrap(), Pipeline::builder().pass(step));
        assert_eq!(mark(&again.path()), "compress-llama");
        assert!(again.path().join("graph.json").is_file() && again.report.notes.iter().any(|note| note.contains("graph.json describes it")));
    }
    let refused = attempt(done.path().to_str().unwrap(), Pipeline::builder().export(Gguf::default())).err().unwrap().to_string();
    assert!(refused.contains("gguf:") && refused.contains("a model that config.json does not describe"), "{refused}");
    // A graph.json that config.json makes redundant.
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama-biases").join(file), folder.path().join(file)).unwrap();
    }
    let graph = compress_graph::ir::GraphFile::from(&Model::open(golden("llama-biases")).unwrap().graph().unwrap());
    std::fs::write(folder.path().join("graph.json"), serde_json::to_string(&graph).unwrap()).unwrap();
    assert_eq!(mark(&run(folder.path().to_str().unwrap(), Pipeline::builder().pass(Cast::default())).path()), "llama");
}

/// The factors of an ONNX file are layers, and patterns match the names of their nodes: those of the original
/// layers with the number of the factor.
#[test]
fn patterns_match_the_nodes_of_factors() {
    let name = golden("../exported/llama.onnx");
    let factors = |ignore: &[&str]| {
        let quantize: compress::pass::QuantizeDynamic = serde_json::from_value(serde_json::json!({ "ignore": ignore })).unwrap();
        let decompose = Decompose { importance: InputImportance::None, ..rank(0.9) };
        let plan = Pipeline::builder().pass(decompose).pass(quantize).build().unwrap().plan(&Model::open(&name).unwrap());
        plan.map(|plan| plan.passes[1].selected.len()).map_err(|e| e.to_string())
    };
    let all = factors(&[]).unwrap();
    assert_eq!(factors(&["/model/layers.0/mlp/down_proj/MatMul.0"]), Ok(all - 1));
    assert_eq!(factors(&["/model/layers.0/mlp/down_proj/MatMul.1"]), Ok(all - 1));
    assert_eq!(factors(&["*/down_proj/*"]), Ok(all - 2));
    assert!(factors(&["*/down_proj/MatMul.2"]).unwrap_err().contains("matches no tensor"));
}

/// The second convolution has a window of the same rank as the first.
#[test]
fn convolutions_of_sequences_are_decomposed() {
    let folder = tempfile::tempdir().unwrap();
    let text = "input x: float[batch, 8, 12]\nparam c.weight: float[16, 8, 3]\nparam c.bias: float[16]\n\
        y = Conv{\"stride\":2,\"padding\":1}(x, c.weight, c.bias) -> float[batch, 16, 6]\noutput y = y\n";
    let save_graph = |text: &str| {
        let graph = compress_graph::ir::GraphFile::from(&text.parse::<compress_graph::ir::Graph>().unwrap());
        std::fs::write(folder.path().join("graph.json"), serde_json::to_string(&graph).unwrap()).unwrap();
    };
    save_graph(text);
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let values = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        Tensor::from_vec((0..count).map(|at| (at * at * 31 % 97) as f32 / 97.0 - 0.5).collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
    };
    let tensors = [("c.weight".to_owned(), values(&[16, 8, 3])), ("c.bias".to_owned(), values(&[16]))];
    candle_core::safetensors::save(&tensors.into(), folder.path().join("model.safetensors")).unwrap();
    let name = folder.path().to_str().unwrap();
    let pass = Decompose { rank: Amount::Count(4), targets: vec!["c.weight".parse().unwrap()], ..Decompose::default() };
    let done = run(name, Pipeline::builder().pass(pass.clone()));
    let (original, model) = (Model::open(folder.path()).unwrap(), done.model());
    assert_eq!(model.weights.get("c.0.weight").unwrap().shape, [4, 8, 3]);
    assert_eq!(model.weights.get("c.1.weight").unwrap().shape, [16, 4, 1]);
    let inputs = BTreeMap::from([("x".to_owned(), values(&[2, 8, 12]))]);
    let (found, wanted) = (outputs(&model, &inputs), outputs(&multiplied(&original, &model, false), &inputs));
    assert!(distance(&found, &wanted) < 1e-4, "{}", distance(&found, &wanted));
    // A computed value has the name of a factor.
    save_graph(&text.replace("y = Conv", "c.0.weight = Relu(x) -> float[batch, 8, 12]\ny = Conv").replace("(x, c.w", "(c.0.weight, c.w"));
    let error = attempt(name, Pipeline::builder().pass(pass)).err().unwrap().to_string();
    assert!(error.contains("`c.0.weight`: exists already"), "{error}");
}

#[test]
fn parameters_and_products_match_the_plan() {
    let (kept, name) = (0.5, "llama");
    let builder = || Pipeline::builder().pass(Decompose { targets: vec!["*mlp*".parse().unwrap()], ..rank(kept) });
    let plan = builder().build().unwrap().plan(&Model::open(golden(name)).unwrap()).unwrap();
    let done = run(name, builder());
    assert!(plan.output_exact && plan.output_bytes == done.report.size.after.bytes);
    assert!(plan.notes.iter().any(|note| note.contains("compute 4") || note.contains("compute 5")), "{:?}", plan.notes);
    let details = &done.report.passes[0].details;
    let number = |key: &str| details[key].as_u64().unwrap();
    let gone = number("parameters_before") - number("parameters_after");
    assert_eq!(done.report.size.before.parameters - done.report.size.after.parameters, gone);
    assert!(number("parameters_after") as f64 <= kept * number("parameters_before") as f64);
    // Each parameter of these layers is multiplied once per token.
    let compute = done.report.compute.as_ref().unwrap();
    let tokens = compute.before.macs - compute.after.macs;
    assert!(tokens.is_multiple_of(gone) && tokens > 0, "{tokens} {gone}");
    // The report contains the error of each layer.
    let lost = details["lost"].as_object().unwrap();
    assert!(lost.len() as u64 == number("decomposed") && lost.values().all(|lost| (0.0..1.0).contains(&lost.as_f64().unwrap())));
    // A rank and rules.
    let rules = vec!["*up_proj*=0.9".parse().unwrap()];
    let done = run(name, Pipeline::builder().pass(Decompose { rank: Amount::Count(3), rules, ..Decompose::default() }));
    let weights = done.model().weights;
    assert_eq!(weights.get("model.layers.0.self_attn.q_proj.0.weight").unwrap().shape[0], 3);
    assert!(weights.get("model.layers.0.mlp.up_proj.0.weight").unwrap().shape[0] > 3);
}

#[test]
fn palettes_in_onnx_equal_the_executor() {
    // Embeddings, tied heads, layers in both layouts, convolutions; four bits from opset 21.
    let names = ["llama-grouped-tied", "gpt2", "bert-masked-lm", "vit-image-classification", "torchvision-mobilenet-v2"];
    for (name, opset) in names.into_iter().zip([21, 17, 21, 19, 20]) {
        let pass = Palettize { bits: 2, group_size: 6, embeddings: true, ..Palettize::default() };
        let precision = if name == "gpt2" { Precision::Float16 } else { Precision::Float32 };
        let builder = Pipeline::builder().pass(pass).export(Safetensors::default()).export(Onnx { opset: Some(opset), precision, ..Onnx::default() });
        let done = run(name, builder);
        assert!(done.report.notes.iter().any(|note| note.contains("indices into codebooks (palettes; ")), "{:?}", done.report.notes);
        let graph = ModelProto::decode(std::fs::read(done.path().join(file::MODEL)).unwrap().as_slice()).unwrap().graph.unwrap();
        let halves = graph.initializer.iter().filter(|tensor| tensor.data_type() == DataType::Uint4).count();
        assert_eq!(halves > 0, opset == 21, "{name}: {halves}");
        if onnxruntime::has_onnx_runtime() {
            let inputs = synthetic(&done.model().graph().unwrap(), 3).unwrap().inputs;
            let found = outputs(&done.model(), &inputs);
            let theirs = Session::open(&done.path().join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap();
            let theirs = found.keys().map(|name| (name.clone(), theirs[name].clone())).collect();
            let tolerance = if name == "gpt2" { 2e-2 } else { 1e-4 };
            assert!(distance(&found, &theirs) < tolerance, "{name}: {}", distance(&found, &theirs));
        }
    }
}

fn tokens(folder: &Path) -> Data {
    let ids = Tensor::from_vec((0..768i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (96, 8), &Device::Cpu).unwrap();
    let path = folder.join("ids.safetensors");
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(), &path).unwrap();
    Data::at(&path)
}

#[test]
fn samples_weight_the_errors_of_low_rank_layers() {
    let folder = tempfile::tempdir().unwrap();
    // Outlier channels in the inputs of linear layers after normalizations.
    let path = folder.path().join("outliers");
    std::fs::create_dir(&path).unwrap();
    let mut tensors = candle_core::safetensors::load(golden("llama/model.safetensors"), &Device::Cpu).unwrap();
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with("layernorm.weight")) {
        let factors: Vec<f32> = (0..16).map(|at| if at % 7 == 3 { 12.0 } else { 1.0 }).collect();
        *tensor = (&*tensor * Tensor::new(factors, &Device::Cpu).unwrap()).unwrap();
    }
    candle_core::safetensors::save(&tensors, path.join("model.safetensors")).unwrap();
    std::fs::copy(golden("llama/config.json"), path.join("config.json")).unwrap();
    let data = tokens(folder.path());
    let inputs = candle_core::safetensors::load(folder.path().join("ids.safetensors"), &Device::Cpu).unwrap().into_iter().collect();
    let wanted = outputs(&Model::open(&path).unwrap(), &inputs);
    let error = |importance| {
        let done = run(path.to_str().unwrap(), Pipeline::builder().calibration(data.clone()).pass(Decompose { importance, ..rank(0.7) }));
        let found = outputs(&done.model(), &inputs);
        let error = (&found["logits"] - &wanted["logits"]).unwrap().sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
        (error, done.report)
    };
    let ((plain, _), (aware, report)) = (error(InputImportance::None), error(InputImportance::Auto));
    assert!(aware < 0.8 * plain, "{aware} for {plain}");
    assert_eq!(report.recipe["passes"][0]["decompose"]["importance"], "activation");
    assert!(report.passes[0].details["samples"].as_u64().unwrap() > 80);
    // Layers whose inputs have changed are corrected, and those of the first input are not.
    let layers = report.passes[0].details["layers"].as_array().unwrap();
    let corrected: BTreeSet<&str> = layers.iter().filter(|layer| layer["propagation"] == 0.25).map(|layer| layer["weight"].as_str().unwrap()).collect();
    let is_first = |name: &&str| ["q_proj", "k_proj", "v_proj"].iter().any(|layer| *name == format!("model.layers.0.self_attn.{layer}.weight"));
    assert!(corrected.len() > 3 && !corrected.iter().any(is_first), "{layers:?}");
    // A note reports that there are fewer samples than features.
    let few = Data { samples: Some(1), ..tokens(folder.path()) };
    let done = run("llama", Pipeline::builder().calibration(few).pass(rank(0.7)));
    assert!(done.report.notes.iter().any(|note| note.contains("fewer calibration tokens than features")), "{:?}", done.report.notes);
}

#[test]
fn the_same_options_give_the_same_bytes_on_any_number_of_threads() {
    let bytes = |threads| {
        let folder = tempfile::tempdir().unwrap();
        let pipeline = Pipeline::builder().pass(rank(0.5)).threads(threads).build().unwrap();
        pipeline.run(Model::open(golden("bert")).unwrap(), folder.path().join("out")).unwrap();
        assert!(!folder.path().join("out.unfinished").exists());
        std::fs::read(folder.path().join("out/model.safetensors")).unwrap()
    };
    assert!(bytes(1) == bytes(3));
}

#[test]
fn other_passes_process_low_rank_layers() {
    let folder = tempfile::tempdir().unwrap();
    let steps: [Step; 3] = [
        rank(0.7).into(),
        PruneStructured { dims: vec![PrunedPart::Mlp], ..Default::default() }.into(),
        Quantize { group_size: Some(-1), ..Quantize::default() }.into(),
    ];
    let done = run("llama", Pipeline::builder().calibration(tokens(folder.path())).passes(steps));
    assert!(done.model().weights.by_name.keys().any(|name| name.ends_with("up_proj.1.weight")));
    // The written folder is opened and converted: to palettes, to floats, and between formats.
    let again = |model: &Path, builder: Builder, to: &str| {
        let to = folder.path().join(to);
        builder.threads(2).build().unwrap().run(Model::open(model).unwrap(), &to).unwrap();
        to
    };
    let first = run("llama", Pipeline::builder().pass(rank(0.7)));
    let palettes = again(&first.path(), Pipeline::builder().pass(Palettize { group_size: 8, ..Palettize::default() }), "palettes");
    let dense = again(&palettes, Pipeline::builder().export(Safetensors::with_layout(Layout::Dense)), "dense");
    let inputs = synthetic(&Model::open(golden("llama")).unwrap().graph().unwrap(), 3).unwrap().inputs;
    let of = |path: &Path| outputs(&Model::open(path).unwrap(), &inputs);
    assert_eq!(distance(&of(&palettes), &of(&dense)), 0.0);
    assert!(distance(&of(&first.path()), &of(&dense)) > 0.0);
    // A decomposed layer can be decomposed again.
    let twice = again(&first.path(), Pipeline::builder().pass(Decompose { targets: vec!["*up_proj.1.weight".parse().unwrap()], ..rank(0.5) }), "twice");
    assert!(Model::open(twice).unwrap().weights.by_name.contains_key("model.layers.0.mlp.up_proj.1.0.weight"));
    // 16-bit floats.
    let half = compress::pass::Cast { to: FloatFormat::Bf16, ..Default::default() };
    let narrow = run("llama", Pipeline::builder().passes([Step::from(half), rank(0.7).into()]));
    assert!(narrow.model().weights.by_name.values().all(|weight| weight.dtype == crate::common::DType::BF16));
}

#[test]
fn layers_that_cannot_be_decomposed_are_rejected_by_name() {
    let refused = |name: &str, pass: Decompose| attempt(name, Pipeline::builder().pass(pass)).err().unwrap().to_string();
    let targets = |pattern: &str, pass: Decompose| Decompose { targets: vec![pattern.parse().unwrap()], ..pass };
    for (name, pass, part) in [
        ("llama", Decompose { rank: Amount::Count(0), ..Decompose::default() }, "at least 1"),
        ("llama", rank(1.0), "between 0 and 1"),
        ("llama", Decompose { rank: Amount::Count(16), ..Decompose::default() }, "not larger than the two layers"),
        ("llama", rank(0.01), "too small"),
        ("llama", targets("model.embed_tokens.weight", rank(0.5)), "other operators than linear layers"),
        ("llama", targets("*norm.weight", rank(0.5)), "other operators than linear layers"),
        (
            "torchvision-mobilenet-v2",
            targets("features.1.conv.0.0.weight", rank(0.5)),
            "`features.1.conv.0.0.weight`: is used by grouped convolutions, which decompose does not support",
        ),
        ("llama", Decompose { rules: vec!["nothing*=0.5".parse().unwrap()], ..Decompose::default() }, "nothing*"),
        ("llama", Decompose { rules: vec!["*embed_tokens*=0.5".parse().unwrap()], ..Decompose::default() }, "has no effect: no selected weight matches it"),
        ("llama", Decompose { importance: InputImportance::Activation, ..Decompose::default() }, "calibration"),
    ] {
        let text = refused(name, pass);
        assert!(text.contains(part), "{text}");
    }
    // A note lists the layers that were skipped.
    let done = run("llama", Pipeline::builder().pass(targets("*", rank(0.5))));
    assert!(
        done.report.notes.iter().any(|note| note.contains("decompose: left unchanged, read by other operators than linear layers and convolutions: ")),
        "{:?}",
        done.report.notes
    );
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = candle_core::safetensors::load(golden("llama/model.safetensors"), &Device::Cpu).unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    tensors.insert(name.to_owned(), (&tensors[name] * f64::NAN).unwrap());
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    std::fs::copy(golden("llama/config.json"), folder.path().join("config.json")).unwrap();
    assert!(refused(folder.path().to_str().unwrap(), rank(0.5)).contains("`model.layers.0.mlp.up_proj.weight`: contains infinite or NaN values"));
    let quantized = run("llama", Pipeline::builder().pass(Quantize::default()));
    assert!(refused(quantized.path().to_str().unwrap(), rank(0.5)).contains("already"));
}

/// Values of a golden case.
fn numbers(case: &Value, key: &str) -> Vec<f64> {
    case[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Errors and factors computed by NumPy.
fn reference() -> Value {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/low-rank.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Each direction of a factorization: the row of the inner factor, and the column of the outer one.
fn directions(inner: &[f64], outer: &[f64], rank: usize) -> Vec<Vec<f64>> {
    let rows = inner.chunks_exact(inner.len() / rank).enumerate();
    rows.map(|(at, row)| row.iter().chain(outer.iter().skip(at).step_by(rank)).copied().collect()).collect()
}

/// A layer with a residual connection, and the next one, whose weight is corrected for the inputs that the
/// factors of the first one change.
#[test]
fn factors_equal_those_of_numpy() {
    let golden = reference();
    let case = &golden["residual"];
    let [size, rank, samples] = ["size", "rank", "samples"].map(|key| case[key].as_u64().unwrap() as usize);
    let matrix = |values: &Value| {
        let values: Vec<f32> = values.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        Tensor::from_vec(values.clone(), (values.len() / size, size), &Device::Cpu).unwrap()
    };
    let [first, second] = [0usize, 1].map(|layer| matrix(&case["weights"][layer]));
    let outputs = second.dim(0).unwrap();
    let text = format!(
        "input x: float[batch, {size}]\nparam a.weight: float[{size}, {size}]\nparam b.weight: float[{outputs}, {size}]\n\
        a = Linear(x, a.weight) -> float[batch, {size}]\ns = Add(a, x) -> float[batch, {size}]\n\
        b = Linear(s, b.weight) -> float[batch, {outputs}]\noutput y = b\n"
    );
    let folder = tempfile::tempdir().unwrap();
    let graph = compress_graph::ir::GraphFile::from(&text.parse::<compress_graph::ir::Graph>().unwrap());
    std::fs::write(folder.path().join("graph.json"), serde_json::to_string(&graph).unwrap()).unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let tensors = [("a.weight".to_owned(), first), ("b.weight".to_owned(), second)];
    candle_core::safetensors::save(&tensors.into(), folder.path().join("model.safetensors")).unwrap();
    let path = folder.path().join("x.safetensors");
    candle_core::safetensors::save(&[("x".to_owned(), matrix(&case["inputs"]))].into(), &path).unwrap();
    let pass = Decompose { rank: Amount::Count(rank as u64), ..Decompose::default() };
    let data = Data { samples: Some(samples), ..Data::at(&path) };
    let done = run(folder.path().to_str().unwrap(), Pipeline::builder().calibration(data).pass(pass));
    let layers = done.report.passes[0].details["layers"].as_array().unwrap();
    assert_eq!(layers.iter().map(|layer| layer["propagation"].as_f64()).collect::<Vec<_>>(), [None, Some(0.25)], "{layers:?}");
    let model = done.model();
    for (layer, expected) in ["a", "b"].into_iter().zip(case["factors"].as_array().unwrap()) {
        let factor = |part: usize| {
            let name = format!("{layer}.{part}.weight");
            let values = model.weights.get(&name).unwrap().floats(&name).unwrap();
            values.into_iter().map(f64::from).collect::<Vec<_>>()
        };
        let found = directions(&factor(0), &factor(1), rank);
        let expected = directions(&numbers(expected, "inner"), &numbers(expected, "outer"), rank);
        assert_eq!(found.len(), expected.len());
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.len(), expected.len());
            // The sign of a direction is arbitrary.
            let sign = found.iter().zip(expected).map(|(a, b)| a * b).sum::<f64>().signum();
            let error = found.iter().zip(expected).map(|(a, b)| (sign * a - b).abs()).fold(0.0, f64::max);
            assert!(error < 1e-4, "{layer}, direction {number}: {error}");
        }
    }
}

#[test]
fn errors_equal_the_minimum_of_numpy() {
    let golden = reference();
    let near = |found: f64, wanted: f64, all: f64| (found - wanted).abs() <= 1e-4 * wanted + 1e-5 * all;
    let mut ranks = 0;
    for case in golden["matrices"].as_array().unwrap() {
        let [rows, size] = ["rows", "size"].map(|key| case[key].as_u64().unwrap() as usize);
        let (matrix, inputs) = (numbers(case, "matrix"), numbers(case, "inputs"));
        let narrow: Vec<f32> = matrix.iter().map(|x| *x as f32).collect();
        let moments: Vec<f32> = dense::gram(&dense::transposed(&inputs, size), inputs.len() / size).iter().map(|x| *x as f32).collect();
        let squares = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
        let outputs = |matrix: &[f64]| squares(&dense::product(matrix, &dense::transposed(&inputs, size), size, inputs.len() / size));
        for (products, key) in [(None, "errors"), (Some(moments.as_slice()), "output_errors")] {
            for (rank, wanted) in (1..).zip(numbers(case, key)) {
                let found = LowRank::new(&narrow, size, rank, products).unwrap();
                let product = dense::product(&found.outer, &found.inner, rank, size);
                let gone: Vec<f64> = matrix.iter().zip(&product).map(|(a, b)| a - b).collect();
                let (error, all) = if products.is_none() { (squares(&gone), squares(&matrix)) } else { (outputs(&gone), outputs(&matrix)) };
                assert!(near(error, wanted, all) && near(found.lost * all, wanted, all), "{rows}x{size} {key} {rank}: {error} instead of {wanted}");
                ranks += 1;
            }
        }
    }
    assert!(ranks > 40);
    for case in golden["palettes"].as_array().unwrap() {
        let count = case["count"].as_u64().unwrap() as usize;
        let (values, weights) = (numbers(case, "values"), numbers(case, "weights"));
        for (weights, key) in [(vec![1.0; values.len()], "error"), (weights, "weighted_error")] {
            let palette = Points::new(values.iter().zip(&weights).map(|(value, weight)| (*value as f32, *weight as f32)).collect()).palette(count);
            let least = |value: f64| palette.iter().map(|entry| (value - entry).powi(2)).fold(f64::INFINITY, f64::min);
            let error: f64 = values.iter().zip(&weights).map(|(value, weight)| weight * least(*value)).sum();
            assert!((error - case[key].as_f64().unwrap()).abs() < 1e-9, "{key} {count}: {error}");
        }
    }
}

/// The disk space of the checkpoints of decomposed layers is predicted before the run.
#[test]
fn room_for_unfinished_layers_is_counted() {
    use compress::pass::Pass;
    let (model, pass, state) = (Model::open(golden("llama")).unwrap(), Decompose::default(), compress::internal::RunState::default());
    let plan = pass.plan(&model, &state).unwrap();
    let made = plan.model.weights.by_name.iter().filter(|(name, _)| !model.weights.by_name.contains_key(*name));
    let bytes: u64 = made.map(|(_, weight)| weight.value_bytes()).sum();
    assert!(bytes > 0);
    assert_eq!(plan.applied.checkpoint_bytes, Some(bytes));
}

/// Names, shapes and encodings are planned. A pass may deviate only if its plan is an estimate.
#[test]
fn execution_produces_the_planned_model() {
    use compress::pass::{Cast, Context, Pass, Plan};
    let (model, pass, state) =
        (Model::open(golden("llama")).unwrap(), Cast { to: FloatFormat::F16, ..Cast::default() }, compress::internal::RunState::default());
    let cast = pass.plan(&model, &state).unwrap();
    let name = cast.applied.tensors.first().unwrap();
    let mut smaller = model.clone();
    smaller.weights.by_name.remove(name);
    let executed = |planned: &Model, result: &Model, estimated: bool| {
        let mut applied = cast.applied.clone();
        applied.estimated = estimated;
        let plan = Plan::new(planned.clone(), applied.clone()).with_execution(move |_| Ok((result.clone(), applied)));
        let data = compress_engine::data::DataSets::default();
        let (seed, device, memory) = (0, candle_core::Device::Cpu, compress_core::work::MemoryLimit::default());
        let result =
            crate::common::work(|work| plan.execute(&Context { work: *work, seed, data: &data, device, memory, memory_tracker: None, checkpoints: None }));
        result.map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(executed(&model, &model, false), Ok(()));
    for (planned, result, difference) in [(&model, &smaller, "missing"), (&smaller, &model, "not planned"), (&cast.model, &model, "not f16")] {
        let error = executed(planned, result, false).unwrap_err();
        assert!(error.contains(&format!("`{name}`")) && error.contains(difference), "{error}");
        assert_eq!(executed(planned, result, true), Ok(()));
    }
}

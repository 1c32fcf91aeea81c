//! Attention and rotary embeddings as written by exporters, and near misses of these patterns.

use compress::pass::{PruneStructured, QuantizeDynamic, QuantizeStatic, Step};
use compress::{Model, Pipeline};
use compress_engine::data::Data;
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, ModelProto, NodeProto, TensorProto};
use prost::Message;

use crate::common::nodes::{close, executed, floats, given, in_runtime, ints, model, node, numbers, sample, value};

/// Tokens, heads and head size. The last two are equal, so that products in the wrong order have valid
/// sizes.
pub(super) const TOKENS: i64 = 4;
pub(super) const HEADS: i64 = 2;
pub(super) const WIDTH: i64 = 4;

pub(super) fn one(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    node(op, inputs, output, vec![])
}

fn transpose(x: &str, y: &str, perm: &[i64]) -> NodeProto {
    node("Transpose", &[x], y, vec![AttributeProto::ints("perm", perm.iter().copied())])
}

/// Heads `[n, tokens, heads, width]` of a layer.
fn layer(weight: &str, y: &str) -> Vec<NodeProto> {
    let rows = format!("{y}_rows");
    vec![one("MatMul", &["x", weight], &rows), one("Reshape", &[&rows, "by_head"], y)]
}

/// Attention nodes from `q`, `k` and `v`, in rows, to `c`, in heads.
pub(super) fn forms() -> Vec<(&'static str, Vec<NodeProto>)> {
    let softmax = || node("Softmax", &["s"], "p", vec![AttributeProto::int("axis", -1)]);
    let context = || one("MatMul", &["p", "vh"], "c");
    let heads = || vec![transpose("q", "qh", &[0, 2, 1, 3]), transpose("v", "vh", &[0, 2, 1, 3])];
    let with = |more: Vec<NodeProto>| [heads(), more].concat();
    vec![
        (
            "BERT",
            with(vec![
                transpose("k", "kt", &[0, 2, 3, 1]),
                one("MatMul", &["qh", "kt"], "m"),
                one("Div", &["m", "two"], "d"),
                one("Add", &["d", "mask"], "s"),
                softmax(),
                context(),
            ]),
        ),
        (
            "GPT-2",
            with(vec![
                transpose("k", "kh", &[0, 2, 1, 3]),
                transpose("kh", "kt", &[0, 1, 3, 2]),
                one("MatMul", &["qh", "kt"], "m"),
                one("Mul", &["half", "m"], "d"),
                one("Add", &["order", "d"], "s"),
                softmax(),
                context(),
            ]),
        ),
        (
            "ViT",
            with(vec![
                one("Mul", &["qh", "half"], "qs"),
                transpose("k", "kt", &[0, 2, 3, 1]),
                one("MatMul", &["qs", "kt"], "s"),
                node("Softmax", &["s"], "p", vec![AttributeProto::int("axis", 3)]),
                context(),
            ]),
        ),
        (
            "scaled_dot_product_attention",
            with(vec![
                transpose("k", "kh", &[0, 2, 1, 3]),
                one("Reshape", &["kh", "flat"], "kf"),
                transpose("kf", "kft", &[0, 2, 1]),
                one("Reshape", &["kft", "back"], "kt"),
                one("Sqrt", &["half"], "root"),
                one("Mul", &["qh", "root"], "qs"),
                one("Mul", &["kt", "root"], "ks"),
                one("MatMul", &["qs", "ks"], "m"),
                one("Add", &["m", "order"], "s"),
                softmax(),
                context(),
            ]),
        ),
    ]
}

/// Nodes that prevent NaN for rows without any key.
pub(super) fn guard() -> Vec<NodeProto> {
    vec![one("IsNaN", &["p"], "nothing"), one("Where", &["nothing", "zero", "p"], "g")]
}

/// The pattern between linear layers, with its inputs.
pub(super) fn between_layers(form: Vec<NodeProto>) -> ModelProto {
    let mut nodes = [layer("wq", "q"), layer("wk", "k"), layer("wv", "v"), form].concat();
    nodes.extend([transpose("c", "cr", &[0, 2, 1, 3]), one("Reshape", &["cr", "merged"], "o"), one("MatMul", &["o", "wo"], "y")]);
    let all = HEADS * WIDTH;
    let scalar = |name: &str, number: f32| TensorProto { dims: vec![], ..given(name, &[], &[number]) };
    let later = |hidden: f32| -> Vec<f32> { (0..TOKENS * TOKENS).map(|at| if at % TOKENS > at / TOKENS { hidden } else { 0.0 }).collect() };
    // All keys are masked for the last query.
    let nowhere: Vec<f32> = (0..TOKENS * TOKENS).map(|at| if at / TOKENS == TOKENS - 1 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let mut weights: Vec<TensorProto> = ["wq", "wk", "wv", "wo"]
        .iter()
        .enumerate()
        .map(|(at, name)| {
            let values: Vec<f32> = (0..all * all).map(|i| ((i * 37 + at as i64 * 11) % 23) as f32 * 0.04 - 0.44).collect();
            given(name, &[all, all], &values)
        })
        .collect();
    weights.extend([
        ints("by_head", &[0, 0, HEADS, WIDTH]),
        ints("merged", &[0, 0, all]),
        ints("flat", &[-1, TOKENS, WIDTH]),
        ints("back", &[-1, HEADS, WIDTH, TOKENS]),
        scalar("two", 2.0),
        scalar("half", 0.5),
        scalar("zero", 0.0),
        given("mask", &[1, 1, 1, TOKENS], &[0.0, 0.0, 0.0, -10_000.0]),
        given("order", &[1, 1, TOKENS, TOKENS], &later(f32::MIN)),
        given("nowhere", &[1, 1, TOKENS, TOKENS], &nowhere),
        floats("cos", &[1, 1, TOKENS, WIDTH]),
        floats("sin", &[1, 1, TOKENS, WIDTH]),
    ]);
    let read = |weight: &TensorProto| nodes.iter().any(|node| node.input.iter().any(|input| input == weight.name()));
    weights.retain(read);
    model(13, &[0, TOKENS, all], nodes, weights)
}

pub(super) fn opened(file: &ModelProto) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let model = Model::open(&path).unwrap();
    (folder, model)
}

pub(super) fn ops(model: &Model) -> Vec<String> {
    model.graph().unwrap_or_else(|e| panic!("{e}")).nodes().iter().map(|node| node.op.name().to_owned()).collect()
}

const WHOLE: [&str; 9] = ["Linear", "SplitHeads", "Linear", "SplitHeads", "Linear", "SplitHeads", "Attention", "MergeHeads", "Linear"];

#[test]
fn attention_of_exporters_is_one_op_and_is_written_as_such() {
    let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
    for (what, form) in forms() {
        let file = between_layers(form);
        let (folder, model) = opened(&file);
        let (path, out, again) = (folder.path().join("model.onnx"), folder.path().join("out.onnx"), folder.path().join("again.onnx"));
        let (mut found, mut wanted) = (ops(&model), WHOLE.map(str::to_owned));
        found.sort();
        wanted.sort();
        assert_eq!(found, wanted, "{what}: {}", model.graph().unwrap());
        let graph = model.graph().unwrap();
        let scale = graph.nodes().iter().find_map(|node| if let Op::Attention(op) = &node.op { Some(op.scale) } else { None }).unwrap();
        assert!((scale - 0.5).abs() < 1e-6, "{what}: {scale}");
        // Unchanged parts are preserved.
        Pipeline::builder().measure(false).build().unwrap().run(model.clone(), &again).unwrap();
        assert!(std::fs::read(&again).unwrap() == file.encode_to_vec(), "{what}");
        let samples = folder.path().join("samples.safetensors");
        candle_core::safetensors::save(&sample(&[32, TOKENS, HEADS * WIDTH]).into_iter().collect(), &samples).unwrap();
        let calibration = Data { arrays: Some(samples), ..Data::default() };
        let pass = QuantizeStatic::default();
        Pipeline::builder().pass(pass).calibration(calibration).measure(false).build().unwrap().run(model.clone(), &out).unwrap();
        if crate::common::onnxruntime::has_onnx_runtime() {
            let theirs = in_runtime(&path, &inputs);
            close(what, &executed(model, &inputs).unwrap(), &theirs);
            let quantized = in_runtime(&out, &inputs);
            let largest = theirs.1.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            let off = quantized.1.iter().zip(&theirs.1).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(off < 0.06 * largest, "{what}: {off} of {largest}");
        }
    }
}

#[test]
fn heads_of_a_file_are_pruned() {
    let (_, form) = forms().swap_remove(0);
    let (folder, model) = opened(&between_layers(form));
    let out = folder.path().join("out.onnx");
    let step: Step = serde_json::from_str::<PruneStructured>(r#"{ "amount": 0.5, "dims": ["heads"] }"#).unwrap().into();
    let report = Pipeline::builder().pass(step).threads(2).build().unwrap().run(model, &out).unwrap();
    let all = (HEADS * WIDTH) as u64;
    assert_eq!(report.size.before.parameters - report.size.after.parameters, all * all * 4 / 2, "{:?}", report.size);
    let again = Model::open(&out).unwrap();
    let graph = again.graph().unwrap();
    let attention = graph.nodes().iter().find(|node| matches!(node.op, Op::Attention(_))).unwrap_or_else(|| panic!("{graph}"));
    assert_eq!(graph.value(attention.inputs[0]).ty.shape[1].fixed(), Some(1));
    if crate::common::onnxruntime::has_onnx_runtime() {
        let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
        close("pruned", &executed(again, &inputs).unwrap(), &in_runtime(&out, &inputs));
    }
}

/// Passes do not change the configuration, which belongs to other libraries.
#[test]
fn a_copied_configuration_of_a_pruned_file_is_a_warning() {
    let (_, form) = forms().swap_remove(0);
    let (folder, _) = opened(&between_layers(form));
    let path = |name: &str| folder.path().join(name);
    let config = r#"{ "num_attention_heads": 2 }"#;
    std::fs::write(path("config.json"), config).unwrap();
    let heads = || -> Step { serde_json::from_str::<PruneStructured>(r#"{ "amount": 0.5, "dims": ["heads"] }"#).unwrap().into() };
    for (step, output, expected) in [(heads(), "out", true), (heads(), "out.onnx", false), (QuantizeDynamic::default().into(), "dynamic", false)] {
        let pipeline = Pipeline::builder().pass(step).threads(2).measure(false).build().unwrap();
        let model = Model::open(path("model.onnx")).unwrap();
        let planned = pipeline.plan_output(&model, &path(output)).unwrap().notes;
        for notes in [planned, pipeline.run(model, path(output)).unwrap().notes] {
            assert_eq!(notes.iter().any(|note| note.starts_with("warning: config.json is copied")), expected, "{output}: {notes:?}");
        }
    }
    assert_eq!(std::fs::read_to_string(path("out/config.json")).unwrap(), config);
}

/// The nodes with one of them changed.
pub(super) fn changed(nodes: &[NodeProto], output: &str, change: impl Fn(&mut NodeProto)) -> Vec<NodeProto> {
    let mut nodes = nodes.to_vec();
    change(nodes.iter_mut().find(|node| node.output[0] == output).unwrap());
    nodes
}

#[test]
fn near_misses_of_attention_are_not_changed() {
    let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
    let forms: Vec<Vec<NodeProto>> = forms().into_iter().map(|(_, form)| form).collect();
    let perm = |perm: [i64; 4]| move |node: &mut NodeProto| node.attribute = vec![AttributeProto::ints("perm", perm)];
    let axis = |axis: i64| move |node: &mut NodeProto| node.attribute = vec![AttributeProto::int("axis", axis)];
    let op = |name: &'static str| move |node: &mut NodeProto| node.op_type = Some(name.into());
    let reads = |at: usize, name: &'static str| move |node: &mut NodeProto| node.input[at] = name.into();
    let almost: Vec<(&str, Vec<NodeProto>)> = vec![
        ("a softmax over the queries", changed(&forms[0], "p", axis(2))),
        ("keys that are not transposed", changed(&forms[1], "kt", perm([0, 1, 2, 3]))),
        ("keys in another order of axes", changed(&forms[0], "kt", perm([0, 2, 1, 3]))),
        ("a mask that is multiplied", changed(&forms[0], "s", op("Mul"))),
        ("a mask that is subtracted", changed(&forms[0], "s", op("Sub"))),
        ("products over a mask", changed(&forms[0], "d", reads(1, "mask"))),
        ("keys that are not transposed in each sample", changed(&forms[3], "kft", |node| node.attribute = vec![AttributeProto::ints("perm", [0, 1, 2])])),
        ("a factor that is another each time", {
            let mut nodes = forms[2].clone();
            let shape = AttributeProto::ints("shape", [1]);
            let attributes = vec![AttributeProto::float("low", 0.5), AttributeProto::float("high", 0.500_001), shape];
            nodes.insert(0, node("RandomUniform", &[], "chance", attributes));
            changed(&nodes, "qs", |node| node.input[1] = "chance".into())
        }),
        ("values in the place of weights", changed(&forms[2], "c", |node| node.input.reverse())),
        ("scores that something else reads", {
            let mut nodes = changed(&forms[2], "c", |node| node.output[0] = "context".into());
            nodes.extend([one("Mul", &["s", "p"], "sp"), one("MatMul", &["sp", "vh"], "more"), one("Add", &["context", "more"], "c")]);
            nodes
        }),
    ];
    for (what, nodes) in almost {
        let file = between_layers(nodes);
        let (folder, model) = opened(&file);
        assert!(ops(&model).iter().all(|op| op != "Attention"), "{what}: {}", model.graph().unwrap());
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(what, &executed(model, &inputs).unwrap(), &in_runtime(&folder.path().join("model.onnx"), &inputs));
        }
    }
    // Inner values that are outputs are computed, and so are their predecessors.
    for inner in ["s", "p", "m"] {
        let mut file = between_layers(forms[0].clone());
        file.graph.as_mut().unwrap().output.push(value(inner, DataType::Float, None));
        let (_folder, model) = opened(&file);
        let graph = model.graph().unwrap();
        assert_eq!(ops(&model).iter().any(|op| op == "Attention"), inner == "m", "{inner}: {graph}");
        assert!(graph.values().iter().any(|value| value.name == inner), "{inner}: {graph}");
    }
}

/// If all keys of a query are masked, the output is zero if the file specifies that, otherwise NaN.
#[test]
fn nan_protection_of_rows_without_keys_is_part_of_attention() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
    let form = changed(&forms().swap_remove(3).1, "s", |node| node.input[1] = "nowhere".into());
    let guarded = [changed(&form, "c", |node| node.input[0] = "g".into()), guard()].concat();
    for (nodes, zeros) in [(guarded.clone(), true), (form, false)] {
        let (folder, model) = opened(&between_layers(nodes));
        let graph = model.graph().unwrap();
        let found = graph.nodes().iter().find_map(|node| if let Op::Attention(op) = &node.op { Some(op.zero_where_hidden) } else { None });
        assert_eq!((found, graph.nodes().len()), (Some(zeros), WHOLE.len()), "{graph}");
        let (_, ours) = executed(model, &inputs).unwrap();
        let (_, theirs) = in_runtime(&folder.path().join("model.onnx"), &inputs);
        assert_eq!(theirs.iter().any(|value| value.is_nan()), !zeros);
        assert!(ours.iter().zip(&theirs).all(|(a, b)| (a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-5), "{ours:?} for {theirs:?}");
    }
    // Another number instead, or the reversed order.
    for (what, nodes) in [
        ("another number", changed(&guarded, "g", |node| node.input[1] = "half".into())),
        ("another test", changed(&guarded, "nothing", |node| node.op_type = Some("IsInf".into()))),
        ("the other values", changed(&guarded, "g", |node| node.input.swap(1, 2))),
    ] {
        let (folder, model) = opened(&between_layers(nodes));
        assert!(ops(&model).iter().all(|op| op != "Attention"), "{what}");
        let (_, ours) = executed(model, &inputs).unwrap();
        let (_, theirs) = in_runtime(&folder.path().join("model.onnx"), &inputs);
        assert!(ours.iter().zip(&theirs).all(|(a, b)| (a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-5), "{what}: {ours:?} for {theirs:?}");
    }
}

/// A computed bias with fewer axes than the scores holds for all samples and heads.
#[test]
fn a_bias_of_queries_and_keys_is_one_for_all_heads() {
    let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
    let mut nodes = changed(&forms().swap_remove(1).1, "s", |node| node.input[0] = "computed".into());
    nodes.insert(0, one("Neg", &["bias"], "computed"));
    let mut file = between_layers(nodes);
    file.graph.as_mut().unwrap().initializer.push(floats("bias", &[TOKENS, TOKENS]));
    let (folder, model) = opened(&file);
    assert!(ops(&model).contains(&"Attention".to_owned()), "{}", model.graph().unwrap());
    if crate::common::onnxruntime::has_onnx_runtime() {
        close("bias", &executed(model, &inputs).unwrap(), &in_runtime(&folder.path().join("model.onnx"), &inputs));
    }
}

/// Cosines or sines of a base, from a position on, repeated for both elements of a pair.
fn table(name: &str, base: f64, first: i64, function: fn(f64) -> f64) -> TensorProto {
    let angle = |at: i64| (at / WIDTH + first) as f64 * base.powf(-2.0 * (at % WIDTH % (WIDTH / 2)) as f64 / WIDTH as f64);
    given(name, &[1, 1, TOKENS, WIDTH], &(0..TOKENS * WIDTH).map(|at| function(angle(at)) as f32).collect::<Vec<f32>>())
}

/// Attention with rotary embeddings.
fn rotated(tables: [TensorProto; 2], change: impl Fn(&mut Vec<NodeProto>)) -> ModelProto {
    let (_, mut form) = forms().swap_remove(0);
    form[0].output[0] = "qp".into();
    let slice = |from: &str, to: &str, y: &str| one("Slice", &["qp", from, to, "last"], y);
    let mut rotary = vec![
        slice("nowhere_yet", "middle", "first"),
        slice("middle", "end", "second"),
        one("Neg", &["second"], "minus"),
        node("Concat", &["minus", "first"], "crossed", vec![AttributeProto::int("axis", -1)]),
        one("Mul", &["qp", "cos"], "straight"),
        one("Mul", &["crossed", "sin"], "sideways"),
        one("Add", &["straight", "sideways"], "qh"),
    ];
    change(&mut rotary);
    let mut file = between_layers([form, rotary].concat());
    let graph = file.graph.as_mut().unwrap();
    graph.initializer.retain(|weight| !["cos", "sin"].contains(&weight.name()));
    graph.initializer.extend(tables);
    graph.initializer.extend([ints("nowhere_yet", &[0]), ints("middle", &[WIDTH / 2]), ints("end", &[i64::MAX]), ints("last", &[3])]);
    file
}

#[test]
fn rotary_embeddings_are_recognized_by_their_tables() {
    let inputs = sample(&[0, TOKENS, HEADS * WIDTH]);
    let tables = |base: f64, first: i64| [table("cos", base, first, f64::cos), table("sin", base, first, f64::sin)];
    let same = |_: &mut Vec<NodeProto>| {};
    let number = |model: &Model| model.graph().unwrap().nodes().iter().find_map(|node| if let Op::Rotary(op) = &node.op { Some(op.theta) } else { None });
    let check = |what: &str, file: ModelProto, wanted: Option<f64>| {
        let (folder, model) = opened(&file);
        assert_eq!(number(&model), wanted, "{what}: {}", model.graph().unwrap());
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(what, &executed(model, &inputs).unwrap(), &in_runtime(&folder.path().join("model.onnx"), &inputs));
        }
    };
    check("the usual base", rotated(tables(10_000.0, 0), same), Some(10_000.0));
    check("another base", rotated(tables(500_000.0, 0), same), Some(500_000.0));
    check("positions from one on", rotated(tables(10_000.0, 1), same), None);
    check("a base that is not a whole number", rotated(tables(10_000.5, 0), same), None);
    let [cos, _] = tables(10_000.0, 0);
    check("sines of another base", rotated([cos, table("sin", 500.0, 0, f64::sin)], same), None);
    let half = [table("cos", 10_000.0, 0, |angle| angle.cos() * 0.5), table("sin", 10_000.0, 0, |angle| angle.sin() * 0.5)];
    check("tables with a factor", rotated(half, same), None);
    let change = |change: &dyn Fn(&mut Vec<NodeProto>)| rotated(tables(10_000.0, 0), change);
    check("halves in their order", change(&|nodes| nodes[3].input.reverse()), None);
    check("the first half negated", change(&|nodes| nodes[2].input[0] = "first".into()), None);
    check("the first half twice", change(&|nodes| nodes[3].input[0] = "first".into()), None);
    check("tables exchanged", change(&|nodes| (nodes[4].input[1], nodes[5].input[1]) = ("sin".into(), "cos".into())), None);
    check("a difference", change(&|nodes| nodes[6].op_type = Some("Sub".into())), None);
    check("a transpose of another value", change(&|nodes| nodes[4].input[0] = "vh".into()), None);
    check("halves of the same part", change(&|nodes| (nodes[1].input[1], nodes[1].input[2]) = ("nowhere_yet".into(), "middle".into())), None);
}

/// Attention of four query heads with two key heads, which are repeated: each for consecutive query heads,
/// or, with `alternating`, in turn.
fn grouped(alternating: bool) -> ModelProto {
    let repeated = |weight: &str, x: &str| {
        let name = |part: &str| format!("{x}_{part}");
        vec![
            one("MatMul", &["x", weight], &name("rows")),
            one("Reshape", &[&name("rows"), "by_group"], &name("heads")),
            transpose(&name("heads"), &name("first"), &[0, 2, 1, 3]),
            one("Unsqueeze", &[&name("first"), if alternating { "before" } else { "after" }], &name("single")),
            one("Expand", &[&name("single"), "target"], &name("repeated")),
            one("Reshape", &[&name("repeated"), "all_heads"], x),
        ]
    };
    let mut nodes = vec![
        one("Shape", &["x"], "sizes"),
        one("Slice", &["sizes", "zeros", "ones"], "batch"),
        node("Concat", &["batch", "others"], "target", vec![AttributeProto::int("axis", 0)]),
        one("MatMul", &["x", "wq"], "q_rows"),
        one("Reshape", &["q_rows", "by_head"], "q"),
        transpose("q", "qh", &[0, 2, 1, 3]),
    ];
    nodes.extend([repeated("wk", "k"), repeated("wv", "v")].concat());
    nodes.extend([
        transpose("k", "kt", &[0, 1, 3, 2]),
        one("MatMul", &["qh", "kt"], "m"),
        one("Mul", &["m", "half"], "s"),
        node("Softmax", &["s"], "p", vec![AttributeProto::int("axis", -1)]),
        one("MatMul", &["p", "v"], "c"),
        transpose("c", "cr", &[0, 2, 1, 3]),
        one("Reshape", &["cr", "merged"], "o"),
        one("MatMul", &["o", "wo"], "y"),
    ]);
    let weights = vec![
        floats("wq", &[16, 16]),
        given("wk", &[16, 8], &numbers(128, 0.3)),
        given("wv", &[16, 8], &numbers(128, 0.9)),
        floats("wo", &[16, 16]),
        given("half", &[], &[0.5]),
        ints("by_head", &[0, 0, 4, WIDTH]),
        ints("by_group", &[0, 0, 2, WIDTH]),
        ints(if alternating { "before" } else { "after" }, &[if alternating { 1 } else { 2 }]),
        ints("zeros", &[0]),
        ints("ones", &[1]),
        ints("others", &[2, 2, TOKENS, WIDTH]),
        ints("all_heads", &[-1, 4, TOKENS, WIDTH]),
        ints("merged", &[0, 0, 16]),
    ];
    model(13, &[0, TOKENS, 16], nodes, weights)
}

#[test]
fn key_heads_that_query_heads_share_are_not_repeated() {
    let inputs = sample(&[0, TOKENS, 16]);
    for alternating in [false, true] {
        let (folder, model) = opened(&grouped(alternating));
        let found = ops(&model);
        let count = |op: &str| found.iter().filter(|name| *name == op).count();
        assert_eq!((count("Attention"), count("Opaque")), (1, if alternating { 2 } else { 0 }), "{}", model.graph().unwrap());
        let ours = executed(model, &inputs).unwrap();
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(if alternating { "alternating" } else { "consecutive" }, &ours, &in_runtime(&folder.path().join("model.onnx"), &inputs));
        }
    }
}

/// The operator of opset 23, on three or four axes.
#[test]
fn attention_as_one_operator_is_an_op() {
    let heads = |mut more: Vec<AttributeProto>| {
        more.extend([AttributeProto::int("q_num_heads", 4), AttributeProto::int("kv_num_heads", 2)]);
        more
    };
    let rows = |more: Vec<AttributeProto>, mask: &str| {
        let projections = [("q", "wq"), ("k", "wk"), ("v", "wv")].map(|(output, weight)| one("MatMul", &["x", weight], output));
        let inputs: Vec<&str> = ["q", "k", "v", mask].into_iter().filter(|name| !name.is_empty()).collect();
        [projections.to_vec(), vec![one("Neg", &["vector"], "negative"), node("Attention", &inputs, "o", heads(more)), one("MatMul", &["o", "wo"], "y")]]
            .concat()
    };
    let mut in_heads = vec![one("MatMul", &["x", "wq"], "q_rows"), one("Reshape", &["q_rows", "by_head"], "q"), transpose("q", "qh", &[0, 2, 1, 3])];
    in_heads.extend([node("Attention", &["qh", "qh", "qh"], "c", vec![AttributeProto::float("scale", 0.3)]), transpose("c", "cr", &[0, 2, 1, 3])]);
    in_heads.extend([one("Reshape", &["cr", "merged"], "o"), one("MatMul", &["o", "wo"], "y")]);
    let causal = || vec![AttributeProto::int("is_causal", 1)];
    let inputs = sample(&[0, TOKENS, 16]);
    for (what, nodes, is_op) in [
        ("rows", rows(vec![], ""), true),
        ("causal", rows(causal(), ""), true),
        ("a mask", rows(vec![], "order"), true),
        ("a mask of keys", rows(vec![], "negative"), true),
        ("heads", in_heads, true),
        ("capped scores", rows(vec![AttributeProto::float("softcap", 2.0)], ""), false),
    ] {
        let mut weights = vec![floats("wq", &[16, 16]), given("wk", &[16, 8], &numbers(128, 0.3)), given("wv", &[16, 8], &numbers(128, 0.9))];
        weights.extend([floats("wo", &[16, 16]), floats("order", &[1, 1, TOKENS, TOKENS]), floats("vector", &[TOKENS, TOKENS])]);
        weights.extend([ints("by_head", &[0, 0, 4, WIDTH]), ints("merged", &[0, 0, 16])]);
        let nodes: Vec<NodeProto> = nodes.clone().into_iter().filter(|node| node.output[0] != "negative" || what == "a mask of keys").collect();
        weights.retain(|weight| nodes.iter().any(|node| node.input.iter().any(|input| input == weight.name())));
        if !is_op && !crate::common::onnxruntime::has_onnx_runtime() {
            continue;
        }
        let (folder, model) = opened(&model(23, &[0, TOKENS, 16], nodes, weights));
        let found = ops(&model);
        assert_eq!((found.contains(&"Attention".to_owned()), found.contains(&"Opaque".to_owned())), (is_op, !is_op), "{what}: {found:?}");
        let ours = executed(model, &inputs).unwrap();
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(what, &ours, &in_runtime(&folder.path().join("model.onnx"), &inputs));
        }
    }
}

//! Arithmetic on integers, masks and shapes, which runs without ONNX Runtime.
#![cfg(feature = "cli")]

use std::path::Path;

use compress::Model;
use compress_onnx::proto::{AttributeProto, DataType, ModelProto, NodeProto, TensorProto};
use prost::Message;

use crate::cli::support::command;
use crate::common::nodes::{close, executed, given, in_runtime, ints, model, node, sample, value};

fn one(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    node(op, inputs, output, vec![])
}

fn cast(from: &str, to: &str, ty: DataType) -> NodeProto {
    node("Cast", &[from], to, vec![AttributeProto::int("to", ty as i64)])
}

/// Names, and nodes that compute `r` from `x` `[n, 2, 3]`, from its integers `i` from -10 to 10, and from
/// constants.
fn cases() -> Vec<(String, Vec<NodeProto>)> {
    let int = AttributeProto::int;
    let list = |name: &str, values: &[i64]| AttributeProto::ints(name, values.iter().copied());
    let mut cases: Vec<(String, Vec<NodeProto>)> = Vec::new();
    let mut case = |what: &str, nodes: Vec<NodeProto>| cases.push((what.to_owned(), nodes));
    for op in ["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"] {
        case(op, vec![one(op, &["i", "k"], "r")]);
    }
    case("Equal", vec![one("Equal", &["i", "limits"], "r")]);
    for op in ["Less", "GreaterOrEqual"] {
        case(&format!("{op} of floats"), vec![one(op, &["x", "few"], "r")]);
    }
    case("Mod as in C", vec![node("Mod", &["i", "k"], "r", vec![int("fmod", 1)])]);
    case("Mod of floats", vec![node("Mod", &["x", "few"], "r", vec![int("fmod", 1)])]);
    case("Pow", vec![one("Pow", &["i", "two"], "r")]);
    case("Max of three", vec![one("Max", &["i", "k", "two"], "r")]);
    case("products of 32 bits", vec![cast("i", "n", DataType::Int32), cast("large", "l", DataType::Int32), one("Mul", &["n", "l"], "r")]);
    for op in ["Neg", "Abs", "Sign"] {
        case(op, vec![one(op, &["i"], "r")]);
    }
    for op in ["Ceil", "Floor", "Round", "Sign", "Sin", "Cos"] {
        case(&format!("{op} of floats"), vec![one(op, &["scaled"], "r")]);
    }
    for op in ["And", "Or", "Xor"] {
        case(op, vec![one("Less", &["i", "limits"], "a"), one("Greater", &["i", "two"], "b"), one(op, &["a", "b"], "r")]);
    }
    case("Not", vec![one("Less", &["i", "k"], "a"), one("Not", &["a"], "r")]);
    case("IsNaN", vec![one("Log", &["x"], "l"), one("IsNaN", &["l"], "r")]);
    case("Where", vec![one("Less", &["i", "k"], "a"), one("Where", &["a", "i", "k"], "r")]);
    case("Where of floats", vec![one("Less", &["x", "few"], "a"), one("Where", &["a", "x", "lowest"], "r")]);
    case("Clip", vec![one("Clip", &["i", "minus", "two"], "r")]);
    case("Clip from above", vec![one("Clip", &["i", "", "two"], "r")]);
    for ty in [DataType::Int32, DataType::Bool] {
        case(&format!("Cast to {ty:?}"), vec![cast("scaled", "r", ty)]);
        case(&format!("Cast of integers to {ty:?}"), vec![cast("i", "r", ty)]);
    }
    case("Shape and Size", vec![one("Shape", &["i"], "s"), one("Size", &["i"], "c"), one("Add", &["s", "c"], "r")]);
    case(
        "Shape of some axes",
        vec![node("Shape", &["i"], "s", vec![int("start", -2), int("end", 5)]), one("Mul", &["s", "s"], "t"), one("Identity", &["t"], "r")],
    );
    case("Reshape", vec![one("Reshape", &["i", "three_rest"], "r")]);
    case("Reshape with a copied axis", vec![one("Reshape", &["i", "copy_rest"], "r")]);
    case("Flatten", vec![node("Flatten", &["i"], "r", vec![int("axis", 2)])]);
    case("Flatten to a row", vec![node("Flatten", &["i"], "r", vec![int("axis", 0)])]);
    case("Unsqueeze and Squeeze", vec![one("Unsqueeze", &["i", "new_axes"], "u"), one("Squeeze", &["u", "first_axis"], "r")]);
    case("Expand", vec![one("Unsqueeze", &["i", "first_axis"], "u"), one("Expand", &["u", "wide"], "r")]);
    case("Tile", vec![one("Tile", &["i", "twice"], "r")]);
    case("Transpose", vec![node("Transpose", &["i"], "r", vec![list("perm", &[2, 0, 1])])]);
    case("Transpose of all axes", vec![one("Transpose", &["i"], "r")]);
    case("Concat", vec![one("Neg", &["i"], "m"), node("Concat", &["i", "m"], "r", vec![int("axis", -1)])]);
    let filled = AttributeProto { t: Some(ints("", &[7])), i: None, r#type: Some(4), ..int("value", 0) };
    case("ConstantOfShape", vec![one("Shape", &["i"], "s"), node("ConstantOfShape", &["s"], "c", vec![filled]), one("Add", &["c", "i"], "r")]);
    case("ConstantOfShape of floats", vec![one("Shape", &["i"], "s"), one("ConstantOfShape", &["s"], "c"), one("Cos", &["c"], "r")]);
    let first = || vec![one("Shape", &["i"], "s"), node("Gather", &["s", "zero"], "n", vec![int("axis", 0)])];
    case("Range", [first(), vec![one("Range", &["minus", "n", "one"], "r")]].concat());
    case("Range backwards", [first(), vec![one("Range", &["n", "minus", "minus_two"], "r")]].concat());
    for (what, upper, diagonal) in [("Trilu", 1, "one"), ("Trilu below", 0, "minus")] {
        case(what, vec![node("Trilu", &["i", diagonal], "r", vec![int("upper", upper)])]);
    }
    case("Gather", vec![node("Gather", &["i", "picked"], "r", vec![int("axis", 2)])]);
    case("Gather of one", vec![node("Gather", &["i", "minus"], "r", vec![int("axis", 1)])]);
    case("GatherElements", vec![node("GatherElements", &["i", "each"], "r", vec![int("axis", 1)])]);
    case("GatherND", vec![one("GatherND", &["i", "pairs"], "r")]);
    let in_batches = node("GatherND", &["t", "per_batch"], "r", vec![int("batch_dims", 1)]);
    case("GatherND in batches", vec![node("Transpose", &["i"], "t", vec![list("perm", &[1, 2, 0])]), in_batches]);
    case("ScatterND", vec![one("ScatterND", &["i", "pairs", "rows"], "r")]);
    case("Slice", vec![one("Slice", &["i", "from", "to", "some_axes", "steps"], "r")]);
    case("Slice beyond the ends", vec![one("Slice", &["i", "far_from", "far_to", "some_axes"], "r")]);
    let parts = |node: NodeProto| NodeProto { output: vec!["a".into(), "b".into()], ..node };
    case("Split", vec![parts(node("Split", &["i", "lengths"], "", vec![int("axis", 2)])), one("Mul", &["a", "b"], "r")]);
    for op in ["ReduceSum", "ReduceProd"] {
        let axes = if op == "ReduceSum" { (vec!["i", "first_axis"], vec![]) } else { (vec!["i"], vec![list("axes", &[1])]) };
        case(op, vec![node(op, &axes.0, "r", axes.1)]);
    }
    case("ReduceMax", vec![node("ReduceMax", &["i"], "r", vec![list("axes", &[-1, 0]), int("keepdims", 0)])]);
    case("ReduceMin of all", vec![one("ReduceMin", &["i"], "r")]);
    case("ArgMax", vec![node("ArgMax", &["x"], "r", vec![int("axis", -1), int("keepdims", 0)])]);
    case(
        "ArgMax, the last",
        vec![
            node("ReduceMax", &["x"], "m", vec![]),
            one("Equal", &["m", "m"], "e"),
            cast("e", "f", DataType::Float),
            one("Expand", &["f", "wide_three"], "w"),
            node("ArgMax", &["w"], "r", vec![int("select_last_index", 1)]),
        ],
    );
    case("CumSum", vec![node("CumSum", &["i", "one"], "r", vec![int("exclusive", 1)])]);
    case("CumSum, reversed", vec![node("CumSum", &["i", "minus"], "r", vec![int("reverse", 1)])]);
    cases
}

fn expression(nodes: &[NodeProto]) -> ModelProto {
    let scalar = |name: &str, number: i64| TensorProto { dims: vec![], ..ints(name, &[number]) };
    let shaped = |name: &str, dims: &[i64], values: &[i64]| TensorProto { dims: dims.to_vec(), ..ints(name, values) };
    let constants = vec![
        given("ten", &[], &[10.0]),
        given("few", &[3], &[0.1, -0.4, 0.7]),
        given("lowest", &[], &[-100.0]),
        ints("k", &[2, -3, 5]),
        ints("limits", &[8, 5, 9]),
        scalar("zero", 0),
        scalar("one", 1),
        scalar("two", 2),
        scalar("minus", -1),
        scalar("minus_two", -2),
        scalar("large", 1 << 30),
        ints("three_rest", &[3, -1]),
        ints("copy_rest", &[0, -1]),
        ints("new_axes", &[0, -1]),
        ints("first_axis", &[0]),
        ints("wide", &[4, 1, 2, 3]),
        ints("wide_three", &[3, 2, 3]),
        ints("twice", &[1, 2, 2]),
        ints("picked", &[-1, 0, 2, 2]),
        shaped("each", &[2, 1, 3], &[0, 1, -1, 1, 0, 0]),
        shaped("pairs", &[2, 2], &[0, 1, 1, -2]),
        shaped("per_batch", &[2, 1], &[1, 0]),
        shaped("rows", &[2, 3], &[100, 200, 300, 400, 500, 600]),
        ints("from", &[-1, 1]),
        ints("to", &[i64::MIN, i64::MAX]),
        ints("some_axes", &[2, 1]),
        ints("steps", &[-2, 1]),
        ints("far_from", &[-9, 0]),
        ints("far_to", &[9, -1]),
        ints("lengths", &[1, 2]),
    ];
    let inputs = vec![one("Mul", &["x", "ten"], "scaled"), cast("scaled", "i", DataType::Int64)];
    let nodes = [inputs, nodes.to_vec(), vec![cast("r", "y", DataType::Float)]].concat();
    let read = |weight: &TensorProto| nodes.iter().any(|node| node.input.iter().any(|input| input == weight.name()));
    model(15, &[0, 2, 3], nodes.clone(), constants.into_iter().filter(read).collect())
}

/// Prints the graph of a file in a process without ONNX Runtime.
fn without_runtime(path: &Path) -> (i32, String) {
    let folder = path.parent().unwrap();
    let run = command(folder).env("ORT_DYLIB_PATH", "/nowhere/libonnxruntime.so").args(["inspect", "--graph"]).arg(path).output().unwrap();
    (run.status.code().unwrap(), String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr))
}

#[test]
fn operators_on_integers_and_masks_need_no_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (what, nodes) in cases() {
        std::fs::write(&path, expression(&nodes).encode_to_vec()).unwrap();
        let (code, printed) = without_runtime(&path);
        assert!(code == 0 && printed.contains("output y"), "{what}: {printed}");
        let inputs = sample(&[0, 2, 3]);
        let ours = executed(Model::open(&path).unwrap(), &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(ours.1.iter().any(|value| *value != 0.0), "{what}: {ours:?}");
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(&what, &ours, &in_runtime(&path, &inputs));
        }
    }
}

/// Errors name the node and the reason. Values that are too large are refused before they are computed.
#[test]
fn invalid_integers_are_reported_by_node() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let scalar = |name: &str, number: i64| TensorProto { dims: vec![], ..ints(name, &[number]) };
    let to_end = vec![one("Sign", &["i"], "s"), one("Range", &["c", "d", "e"], "t"), one("Gather", &["t", "s"], "r")];
    for (nodes, wanted) in [
        (vec![one("Div", &["i", "c"], "r")], "node `r` (Div): it divides by zero"),
        (vec![one("Gather", &["i", "d"], "r")], "node `r` (Gather): index 1099511627776 is out of range for 5 elements"),
        (to_end, "(Range) creates 1099511627777 elements"),
    ] {
        let mut file = expression(&nodes);
        let graph = file.graph.as_mut().unwrap();
        let numbers = [scalar("c", 0), scalar("d", 1 << 40), scalar("e", 1)];
        graph.initializer.extend(numbers.into_iter().filter(|number| nodes.iter().any(|node| node.input.iter().any(|input| input == number.name()))));
        // Trials use several sizes of an open axis.
        graph.input = vec![value("x", DataType::Float, Some(&[5, 2, 3]))];
        std::fs::write(&path, file.encode_to_vec()).unwrap();
        let (code, printed) = without_runtime(&path);
        assert!(code != 0 && printed.contains(wanted), "{wanted}: {printed}");
    }
}

/// Encoders and decoders of PyTorch's exporter open without ONNX Runtime, as the same graphs.
#[test]
fn exported_models_need_no_runtime() {
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exported")).unwrap() {
        let path = entry.unwrap().path();
        let (code, printed) = without_runtime(&path);
        let nodes = printed.lines().filter(|line| line.contains(") -> ")).count();
        assert_eq!((code, nodes), (0, Model::open(&path).unwrap().graph().unwrap().nodes().len()), "{}: {printed}", path.display());
    }
}

/// The last elements are consecutive, and the last and the first one are not.
#[test]
fn elements_at_both_ends_are_gathered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let inputs = sample(&[0, 5, 4]);
    let values: Vec<f32> = inputs["x"].flatten_all().unwrap().to_vec1().unwrap();
    for indices in [[-2i64, -1], [-1, 0]] {
        let gather = node("Gather", &["x", "at"], "y", vec![AttributeProto::int("axis", 1)]);
        std::fs::write(&path, model(13, &[0, 5, 4], vec![gather], vec![ints("at", &indices)]).encode_to_vec()).unwrap();
        let rows = (0..2).flat_map(|sample| indices.map(|at| sample * 5 + at.rem_euclid(5) as usize));
        let wanted: Vec<f32> = rows.flat_map(|row| values[row * 4..row * 4 + 4].to_vec()).collect();
        assert_eq!(executed(Model::open(&path).unwrap(), &inputs).unwrap(), (vec![2, 2, 4], wanted), "{indices:?}");
    }
}

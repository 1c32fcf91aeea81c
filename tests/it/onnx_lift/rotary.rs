//! Rotary embeddings with tables computed for the current length.

use compress::Model;
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, Dimension, ModelProto, NodeProto, TensorProto};
use prost::Message;

use crate::common::nodes::{given, ints, model, node, value};

const WIDTH: i64 = 8;

fn one(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    node(op, inputs, output, vec![])
}

/// Rotary embeddings of `x` in heads with a dynamic batch size and length. The positions are computed
/// from the numbers `first`, `length` and `rows`.
fn rotated(positions: &[NodeProto]) -> ModelProto {
    let axis = |axis: i64| vec![AttributeProto::int("axis", axis)];
    let size = |at: &str, y: &str| node("Gather", &["sizes", at], y, axis(0));
    let mut nodes = vec![one("Shape", &["x"], "sizes"), size("0", "rows"), size("2", "length")];
    nodes.extend(positions.iter().cloned());
    nodes.extend([
        one("Unsqueeze", &["positions", "1s"], "column"),
        one("Mul", &["column", "frequencies"], "angles"),
        node("Concat", &["angles", "angles"], "both", axis(-1)),
        one("Cos", &["both"], "cos"),
        one("Sin", &["both"], "sin"),
        one("Slice", &["x", "0s", "middle", "3s"], "first"),
        one("Slice", &["x", "middle", "end", "3s"], "second"),
        one("Neg", &["second"], "minus"),
        node("Concat", &["minus", "first"], "crossed", axis(-1)),
        one("Mul", &["x", "cos"], "straight"),
        one("Mul", &["crossed", "sin"], "sideways"),
        one("Add", &["straight", "sideways"], "turned"),
        one("MatMul", &["turned", "w"], "y"),
    ]);
    let scalar = |name: &str, number: i64| TensorProto { dims: vec![], ..ints(name, &[number]) };
    let frequencies: Vec<f32> = (0..WIDTH / 2).map(|at| 10_000f64.powf(-2.0 * at as f64 / WIDTH as f64) as f32).collect();
    let mut weights: Vec<TensorProto> = [("0", 0), ("1", 1), ("2", 2), ("long", 4096)].map(|(name, number)| scalar(name, number)).into();
    weights.extend([("0s", 0), ("1s", 1), ("3s", 3), ("middle", WIDTH / 2), ("end", i64::MAX)].map(|(name, number)| ints(name, &[number])));
    weights.extend([given("frequencies", &[WIDTH / 2], &frequencies), given("w", &[WIDTH, 2], &[0.5; 2 * WIDTH as usize])]);
    weights.extend([("half", 0.5), ("whole", 1.0)].map(|(name, number)| TensorProto { dims: vec![], ..given(name, &[], &[number]) }));
    let mut file = model(13, &[0, 2, 0, WIDTH], nodes, weights);
    let graph = file.graph.as_mut().unwrap();
    let mut x = value("x", DataType::Float, Some(&[0, 2, 0, WIDTH]));
    let shape = x.r#type.as_mut().and_then(|ty| ty.tensor_type.as_mut()).and_then(|tensor| tensor.shape.as_mut()).unwrap();
    shape.dim[0].value = Some(Dimension::DimParam("batch".into()));
    graph.input = vec![x];
    file
}

#[test]
fn tables_that_depend_on_more_than_the_position_are_rejected() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let range = |first: &str, last: &str| vec![one("Range", &[first, last, "1"], "whole_positions")];
    let as_floats = |y: &str| node("Cast", &["whole_positions"], y, vec![AttributeProto::int("to", 1)]);
    let plain = [range("0", "length"), vec![as_floats("positions")]].concat();
    let by_rows =
        [vec![one("Sub", &["rows", "1"], "before"), one("Add", &["before", "length"], "behind")], range("before", "behind"), vec![as_floats("positions")]];
    let when_long = [
        range("0", "length"),
        vec![
            as_floats("unscaled"),
            one("Greater", &["length", "long"], "is_long"),
            one("Where", &["is_long", "half", "whole"], "scale"),
            one("Mul", &["unscaled", "scale"], "positions"),
        ],
    ];
    let scaled = [
        range("0", "length"),
        vec![
            as_floats("unscaled"),
            one("Sub", &["rows", "2"], "more"),
            node("Cast", &["more"], "scale", vec![AttributeProto::int("to", 1)]),
            one("Mul", &["unscaled", "scale"], "positions"),
        ],
    ];
    for (what, positions, wanted) in [
        ("plain", plain, Some(10_000.0)),
        ("by samples", by_rows.concat(), None),
        ("scaled by samples", scaled.concat(), None),
        ("when long", when_long.concat(), None),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, rotated(&positions).encode_to_vec()).unwrap();
        let graph = Model::open(&path).unwrap().graph().unwrap_or_else(|e| panic!("{what}: {e}"));
        let theta = graph.nodes().iter().find_map(|node| if let Op::Rotary(op) = &node.op { Some(op.theta) } else { None });
        assert_eq!(theta, wanted, "{what}: {graph}");
    }
}

/// The search for tables is bounded for any number of nodes.
#[test]
fn tables_after_many_nodes_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let mut file = rotated(&[one("Abs", &["stored"], "positions")]);
    let graph = file.graph.as_mut().unwrap();
    graph.input = vec![value("x", DataType::Float, Some(&[1, 2, 4, WIDTH]))];
    graph.initializer.push(given("stored", &[4], &[0.0, 1.0, 2.0, 3.0]));
    let at = graph.node.iter().position(|node| node.output[0] == "cos").unwrap();
    let link = |at: usize| one("Neg", &[&if at == 0 { "both".to_owned() } else { format!("link{at}") }], &format!("link{}", at + 1));
    const LINKS: usize = 20_000;
    graph.node[at].input[0] = format!("link{LINKS}");
    graph.node.splice(at..at, (0..LINKS).map(link));
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let graph = Model::open(&path).unwrap().graph().unwrap();
    assert!(graph.nodes().iter().all(|node| !matches!(node.op, Op::Rotary(_))));
    assert!(graph.nodes().len() > LINKS, "{}", graph.nodes().len());
}

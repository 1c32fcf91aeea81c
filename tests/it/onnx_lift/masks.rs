//! Mask, shape and position id arithmetic of exporters.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use compress::Model;
use compress_core::store::{OpenSize, OpenSizes};
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, ModelProto, NodeProto, TensorProto};
use prost::Message;

use crate::common::nodes::{close, executed, floats, given, in_runtime, ints, model, node, value};

/// Maximum number of position ids.
const LONGEST: i64 = 80;

/// An encoder as exported by PyTorch 1 and 2.0: token and position embeddings, and scores with an
/// additive mask.
fn encoder(mask: DataType, positions: Vec<i64>, is_row: bool, step: i64) -> ModelProto {
    let list = |name: &str, values: &[i64]| AttributeProto::ints(name, values.iter().copied());
    let rows = if is_row { TensorProto { dims: vec![1, positions.len() as i64], ..ints("ids", &positions) } } else { ints("ids", &positions) };
    let axis = i64::from(is_row);
    let nodes = vec![
        node("Unsqueeze", &["attention_mask"], "m1", vec![list("axes", &[1])]),
        node("Unsqueeze", &["m1"], "m2", vec![list("axes", &[2])]),
        node("Cast", &["m2"], "kept", vec![AttributeProto::int("to", DataType::Float as i64)]),
        node("Sub", &["one", "kept"], "hidden", vec![]),
        node("Mul", &["hidden", "lowest"], "bias", vec![]),
        node("Shape", &["input_ids"], "shape", vec![]),
        node("Gather", &["shape", "second"], "length", vec![AttributeProto::int("axis", 0)]),
        node("Unsqueeze", &["length"], "end", vec![list("axes", &[0])]),
        node("Slice", &["ids", "start", "end", "axis", "step"], "position_ids", vec![]),
        node("Gather", &["words", "input_ids"], "w", vec![]),
        node("Gather", &["places", "position_ids"], "p", vec![]),
        node("Add", &["w", "p"], "x", vec![]),
        node("Unsqueeze", &["x"], "heads", vec![list("axes", &[1])]),
        node("Transpose", &["heads"], "turned", vec![list("perm", &[0, 1, 3, 2])]),
        node("MatMul", &["heads", "turned"], "scores", vec![]),
        node("Add", &["scores", "bias"], "masked", vec![]),
        node("Softmax", &["masked"], "weights", vec![AttributeProto::int("axis", 3)]),
        node("MatMul", &["weights", "heads"], "y", vec![]),
    ];
    let scalar = |name: &str, number: f32| TensorProto { dims: vec![], ..given(name, &[], &[number]) };
    let second = TensorProto { dims: vec![], ..ints("second", &[1]) };
    let constants = vec![
        rows,
        scalar("one", 1.0),
        scalar("lowest", f32::MIN),
        second,
        ints("start", &[0]),
        ints("axis", &[axis]),
        ints("step", &[step]),
        floats("words", &[40, 8]),
        floats("places", &[LONGEST + 2, 8]),
    ];
    let mut model = model(11, &[], nodes, constants);
    let graph = model.graph.as_mut().unwrap();
    graph.input = [("input_ids", DataType::Int64), ("attention_mask", mask)].map(|(name, ty)| value(name, ty, Some(&[0, 0]))).to_vec();
    for (port, axis) in graph.input.iter_mut().flat_map(|port| [(port.clone(), 0), (port.clone(), 1)]).collect::<Vec<_>>() {
        let port = graph.input.iter_mut().find(|other| other.name == port.name).unwrap();
        let shape = port.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap().shape.as_mut().unwrap();
        shape.dim[axis].value = Some(compress_onnx::proto::Dimension::DimParam(["batch", "sequence"][axis].into()));
    }
    model
}

fn inputs(length: usize) -> BTreeMap<String, Tensor> {
    let whole = |values: Vec<i64>| Tensor::from_vec(values, (2, length), &Device::Cpu).unwrap();
    let tokens = whole((0..2 * length).map(|at| (at * 7 % 40) as i64).collect());
    let mask = whole((0..2 * length).map(|at| i64::from(at + 3 < 2 * length)).collect());
    [("input_ids".to_owned(), tokens), ("attention_mask".to_owned(), mask)].into()
}

#[test]
fn masks_and_positions_of_exporters_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let count = |from: i64| (from..from + LONGEST).collect::<Vec<_>>();
    let mut swapped = count(0);
    swapped.swap(3, 4);
    for (what, model, is_typed) in [
        ("a row", encoder(DataType::Int64, count(0), true, 1), true),
        ("a vector, from two on", encoder(DataType::Int64, count(2), false, 1), true),
        ("a mask of truth values", encoder(DataType::Bool, count(0), true, 1), true),
        ("a mask of 32 bits", encoder(DataType::Int32, count(0), true, 1), true),
        ("another order", encoder(DataType::Int64, swapped, true, 1), false),
    ] {
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        if !is_typed && !crate::common::onnxruntime::has_onnx_runtime() {
            continue;
        }
        let graph = Model::open(&path).unwrap().graph().unwrap_or_else(|e| panic!("{what}: {e}"));
        let opaque = graph.nodes().iter().filter(|node| matches!(node.op, Op::Opaque(_))).count();
        assert_eq!(opaque == 0, is_typed, "{what}: {graph}");
        // A row has an axis more than a vector.
        let embedded = graph.nodes().iter().map(|node| graph.value(node.output)).find(|value| value.name == "p").unwrap();
        assert_eq!(embedded.ty.shape.len(), if what.starts_with("a vector") { 2 } else { 3 }, "{what}: {graph}");
        for length in [1, 11, LONGEST as usize] {
            let ours = executed(Model::open(&path).unwrap(), &inputs(length)).unwrap_or_else(|e| panic!("{what}: {e}"));
            if crate::common::onnxruntime::has_onnx_runtime() {
                close(what, &ours, &in_runtime(&path, &inputs(length)));
            }
        }
        // A fixed length needs no dynamic slice.
        let sizes: OpenSizes = [("batch", 2), ("sequence", 11)].into_iter().map(|(name, size)| (name.to_owned(), OpenSize::One(size))).collect();
        let fixed = Model::open(&path).unwrap();
        fixed.fix_sizes(&sizes).unwrap();
        if is_typed {
            let graph = fixed.graph().unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(graph.nodes().iter().all(|node| !matches!(node.op, Op::Opaque(_))), "{what}: {graph}");
        }
        // The embedding has two rows more than the constant.
        let long = executed(Model::open(&path).unwrap(), &inputs(LONGEST as usize + 3)).map(|(dims, _)| dims);
        assert!(long.is_err(), "{what}: {long:?}");
    }
}

/// Position embeddings as RoBERTa computes them, by a few of the forms that exporters write.
fn roberta(padding: i64, first: i64, nodes: Vec<NodeProto>) -> ModelProto {
    let number = |name: &str, number: i64| TensorProto { dims: vec![], ..ints(name, &[number]) };
    let narrow = TensorProto { data_type: Some(DataType::Int32 as i32), raw_data: Some(0i32.to_le_bytes().to_vec()), ..number("past", 0) };
    let constants = vec![number("padding", padding), number("first", first), number("axis", 1), number("last", -1), narrow, floats("places", &[30, 8])];
    let look_up = node("Gather", &["places", "position_ids"], "y", vec![]);
    let mut model = model(14, &[], nodes.into_iter().chain([look_up]).collect(), constants);
    model.graph.as_mut().unwrap().input = vec![value("input_ids", DataType::Int64, Some(&[2, 0]))];
    model
}

#[test]
fn positions_that_count_tokens_are_typed() {
    let cast = |from: &str, to: &str, ty: DataType| node("Cast", &[from], to, vec![AttributeProto::int("to", ty as i64)]);
    let int = AttributeProto::int;
    // `create_position_ids_from_input_ids` of transformers, exported by PyTorch.
    let transformers = vec![
        node("Equal", &["input_ids", "padding"], "padded", vec![]),
        node("Not", &["padded"], "not_padded", vec![]),
        cast("not_padded", "real", DataType::Int32),
        cast("real", "real_wide", DataType::Int64),
        node("CumSum", &["real_wide", "axis"], "counts", vec![]),
        cast("counts", "counts_narrow", DataType::Int32),
        node("Add", &["counts_narrow", "past"], "counts_past", vec![]),
        node("Mul", &["counts_past", "real"], "places_narrow", vec![]),
        cast("places_narrow", "places_wide", DataType::Int64),
        node("Add", &["places_wide", "first"], "position_ids", vec![]),
    ];
    let short = |sum: Vec<AttributeProto>, second: &str| {
        vec![
            node("Equal", &["padding", "input_ids"], "padded", vec![]),
            node("Not", &["padded"], "not_padded", vec![]),
            cast("not_padded", "real", DataType::Int64),
            node("CumSum", &["real", "last"], "counts", sum),
            node("Mul", &[second, "counts"], "product", vec![]),
            node("Add", &["first", "product"], "position_ids", vec![]),
        ]
    };
    let direct = vec![node("CumSum", &["input_ids", "last"], "position_ids", vec![])];
    let narrow = vec![cast("input_ids", "narrow", DataType::Int32), node("CumSum", &["narrow", "last"], "position_ids", vec![])];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (what, model, is_typed) in [
        ("as transformers", roberta(1, 1, transformers.clone()), true),
        ("another first position", roberta(0, 5, transformers), true),
        ("other operand orders", roberta(3, 3, short(vec![], "real")), true),
        ("an exclusive sum", roberta(1, 1, short(vec![int("exclusive", 1)], "real")), false),
        ("a reverse sum", roberta(1, 1, short(vec![int("reverse", 1)], "real")), false),
        ("another factor", roberta(1, 1, short(vec![], "input_ids")), false),
        ("sums of token ids", roberta(1, 1, direct), true),
        ("sums of narrow integers", roberta(1, 1, narrow), false),
    ] {
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let has_runtime = crate::common::onnxruntime::has_onnx_runtime();
        if !is_typed && !has_runtime {
            continue;
        }
        let graph = Model::open(&path).unwrap().graph().unwrap_or_else(|e| panic!("{what}: {e}"));
        let count = |is: fn(&Op) -> bool| graph.nodes().iter().filter(|node| is(&node.op)).count();
        assert_eq!(count(|op| matches!(op, Op::Opaque(_))) == 0, is_typed, "{what}: {graph}");
        let is_sum = what == "sums of token ids";
        assert_eq!(count(|op| matches!(op, Op::Positions(_))), usize::from(is_typed && !is_sum), "{what}: {graph}");
        assert_eq!(count(|op| matches!(op, Op::CumSum(_))), usize::from(is_sum), "{what}: {graph}");
        for length in [1, 2, 9] {
            let tokens = (0..2 * length).map(|at| (at * 3 % 4) as i64).collect::<Vec<_>>();
            let inputs = [("input_ids".to_owned(), Tensor::from_vec(tokens, (2, length), &Device::Cpu).unwrap())].into();
            let ours = executed(Model::open(&path).unwrap(), &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
            if has_runtime {
                close(what, &ours, &in_runtime(&path, &inputs));
            }
        }
    }
}

/// Positions have 64 bits.
#[test]
fn ranges_of_32_bits_are_not_positions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (ty, casts) in [DataType::Int64, DataType::Int32].into_iter().flat_map(|ty| [false, true].map(|casts| (ty, casts))) {
        // The first and the last number are constants of the type of the range, or casts to it.
        let stored = if casts { DataType::Int64 } else { ty };
        let number = |name: &str, number: i64| {
            let bytes = if stored == DataType::Int32 { (number as i32).to_le_bytes().to_vec() } else { number.to_le_bytes().to_vec() };
            TensorProto { dims: vec![], data_type: Some(stored as i32), raw_data: Some(bytes), ..ints(name, &[]) }
        };
        let cast = |from: &str, to: &str| node("Cast", &[from], to, vec![AttributeProto::int("to", ty as i64)]);
        let [from, by] = if casts { ["first", "step"] } else { ["from", "by"] };
        let mut nodes = if casts { vec![cast("first", "from"), cast("step", "by")] } else { Vec::new() };
        nodes.extend([
            node("Shape", &["input_ids"], "shape", vec![]),
            node("Gather", &["shape", "second"], "length", vec![]),
            node("Cast", &["length"], "end", vec![AttributeProto::int("to", ty as i64)]),
            node("Range", &["from", "end", "by"], "position_ids", vec![]),
            node("Gather", &["places", "position_ids"], "y", vec![]),
        ]);
        let second = TensorProto { dims: vec![], ..ints("second", &[1]) };
        let mut model = model(14, &[], nodes, vec![second, number(from, 0), number(by, 1), floats("places", &[30, 8])]);
        model.graph.as_mut().unwrap().input = vec![value("input_ids", DataType::Int64, Some(&[2, 0]))];
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let has_runtime = crate::common::onnxruntime::has_onnx_runtime();
        if ty == DataType::Int32 && !has_runtime {
            continue;
        }
        let graph = Model::open(&path).unwrap().graph().unwrap_or_else(|e| panic!("{ty:?}: {e}"));
        let found = graph.nodes().iter().filter(|node| matches!(node.op, Op::Positions(_))).count();
        assert_eq!(found, usize::from(ty == DataType::Int64), "{ty:?}, {casts}: {graph}");
        let inputs = [("input_ids".to_owned(), Tensor::zeros((2, 9), candle_core::DType::I64, &Device::Cpu).unwrap())].into();
        let ours = executed(Model::open(&path).unwrap(), &inputs).unwrap_or_else(|e| panic!("{ty:?}: {e}"));
        if has_runtime {
            close(&format!("{ty:?}"), &ours, &in_runtime(&path, &inputs));
        }
    }
}

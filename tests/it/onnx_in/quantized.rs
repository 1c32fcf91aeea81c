//! Quantized ONNX files: their integers are read as dequantized weights, and are not quantized again.

use compress::internal::RunState;
use compress::pass::{Cast, Dequantize, FloatFormat, PruneUnstructured, QuantizeDynamic, Step};
use compress_core::store::Encoding;
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use compress_onnx::runtime;

use crate::onnx_in::layers::{answers_of, distance};
use crate::onnx_in::{Place, builder, constant, node, raw, tensor, value};

fn bytes(name: &str, ty: DataType, dims: &[i64], seed: i32) -> TensorProto {
    let count = dims.iter().product::<i64>() as i32;
    let byte = |at: i32| ((at * 37 + seed) % 251 - 125) as i8;
    let shift = if ty == DataType::Uint8 { 0x80 } else { 0 };
    TensorProto { raw_data: Some((0..count).map(|at| byte(at) as u8 ^ shift).collect()), ..tensor(name, ty, dims) }
}

fn scales(name: &str, dims: &[i64]) -> TensorProto {
    let count = dims.iter().product::<i64>() as usize;
    let values = (0..count).flat_map(|at| (0.004 + at as f32 * 1e-4).to_le_bytes()).collect();
    TensorProto { raw_data: Some(values), ..tensor(name, DataType::Float, dims) }
}

fn one(name: &str, ty: DataType, byte: u8) -> TensorProto {
    TensorProto { raw_data: Some(vec![byte]), ..tensor(name, ty, &[]) }
}

/// Quantization step of the activations.
const STEP: f32 = 0.008;

fn axis(axis: i64) -> Vec<AttributeProto> {
    vec![AttributeProto::int("axis", axis)]
}

fn file(opset: i64, nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    let graph = GraphProto {
        name: Some("quantized".into()),
        node: nodes,
        initializer,
        input: vec![value("x", DataType::Float, &["n", "20"])],
        output: vec![value("y", DataType::Float, &["n", "6"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(opset) }];
    ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() }
}

/// Activations, weights and biases as written by ONNX Runtime's quantization tool.
pub fn rounded() -> ModelProto {
    let sums: Vec<u8> = (0..6i32).flat_map(|at| (at * 20_000 - 50_000).to_le_bytes()).collect();
    // Integer kernels require biases with the scale of the product.
    let steps: Vec<u8> = (0..6).flat_map(|at| (STEP * (0.004 + at as f32 * 1e-4)).to_le_bytes()).collect();
    file(
        13,
        vec![
            node("QuantizeLinear", &["x", "x_scale", "x_zero"], &["x_integers"], vec![]),
            node("DequantizeLinear", &["x_integers", "x_scale", "x_zero"], &["x_rounded"], vec![]),
            node("DequantizeLinear", &["w", "w_scale", "w_zero"], &["w_floats"], axis(1)),
            node("DequantizeLinear", &["b", "b_scale"], &["b_floats"], axis(0)),
            NodeProto { name: Some("/head/MatMul".into()), ..node("MatMul", &["x_rounded", "w_floats"], &["product"], vec![]) },
            node("Add", &["product", "b_floats"], &["y"], vec![]),
        ],
        vec![
            bytes("w", DataType::Int8, &[20, 6], 3),
            scales("w_scale", &[6]),
            TensorProto { raw_data: Some(vec![0; 6]), ..tensor("w_zero", DataType::Int8, &[6]) },
            TensorProto { raw_data: Some(sums), ..tensor("b", DataType::Int32, &[6]) },
            TensorProto { raw_data: Some(steps), ..tensor("b_scale", DataType::Float, &[6]) },
            TensorProto { raw_data: Some(STEP.to_le_bytes().to_vec()), ..tensor("x_scale", DataType::Float, &[]) },
            one("x_zero", DataType::Uint8, 120),
        ],
    )
}

/// Weight-only quantization in the forms of several opsets: bytes with a zero point, an embedding, and
/// products with scales.
pub fn weights_alone() -> ModelProto {
    let to = || vec![AttributeProto::int("to", DataType::Float as i64)];
    file(
        13,
        vec![
            node("DequantizeLinear", &["first", "first_scale", "first_zero"], &["first_floats"], vec![]),
            node("MatMul", &["x", "first_floats"], &["a"], vec![]),
            node("Cast", &["second"], &["second_numbers"], to()),
            node("Mul", &["second_scale", "second_numbers"], &["second_floats"], vec![]),
            node("Gemm", &["a", "second_floats"], &["b"], vec![AttributeProto::int("transB", 1)]),
            constant(bytes("table", DataType::Uint8, &[5, 6], 9)),
            constant(scales("table_scale", &[5])),
            node("DequantizeLinear", &["table", "table_scale"], &["table_floats"], axis(0)),
            node("Gather", &["table_floats", "row"], &["rows"], vec![]),
            node("Add", &["b", "rows"], &["y"], vec![]),
        ],
        vec![
            bytes("first", DataType::Uint8, &[20, 8], 5),
            scales("first_scale", &[]),
            one("first_zero", DataType::Uint8, 131),
            bytes("second", DataType::Int8, &[6, 8], 1),
            scales("second_scale", &[6, 1]),
            TensorProto { int64_data: vec![3], ..tensor("row", DataType::Int64, &[1]) },
        ],
    )
}

#[test]
fn integers_are_read_as_dequantized_weights() {
    let place = Place::new(&rounded());
    let opened = place.open();
    let described: Vec<(&str, String)> = opened.weights.by_name.iter().map(|(name, weight)| (name.as_str(), weight.describe())).collect();
    assert_eq!(described.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["b_floats", "w_floats"], "{described:?}");
    let weight = &opened.weights.by_name["w_floats"];
    assert_eq!((weight.shape.as_slice(), weight.readers.as_slice()), (&[6, 20][..], &["/head/MatMul".to_owned()][..]));
    let values = weight.floats("").unwrap();
    let stored = bytes("w", DataType::Int8, &[20, 6], 3).raw_data.unwrap();
    for (output, input) in (0..6).flat_map(|output| (0..20).map(move |input| (output, input))) {
        let scale = 0.004f32 + output as f32 * 1e-4;
        assert_eq!(values[output * 20 + input], f32::from(stored[input * 6 + output] as i8) * scale);
    }
    assert_eq!(opened.weights.by_name["b_floats"].floats("").unwrap()[1], -30_000.0 * (STEP * (0.004 + 1e-4)));
    // Nothing is opaque: activations are quantized by an op.
    let graph = opened.graph().unwrap();
    assert!(graph.nodes().iter().any(|node| matches!(&node.op, Op::FakeQuantize(by) if by.zero_point == -8 && by.scale == STEP)));
    assert!(!graph.nodes().iter().any(|node| matches!(node.op, Op::Opaque(_))));
    for model in [rounded(), weights_alone()] {
        let place = Place::new(&model);
        let report = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        assert_eq!(place.written("out.onnx"), model);
        assert!(report.notes.iter().any(|note| note.contains("already quantized (the first: `")), "{:?}", report.notes);
    }
}

#[test]
fn integer_types_of_quantizers_are_respected() {
    let rounding = |ty: i64, of_floats: i64| {
        let mut model = rounded();
        model.opset_import[0].version = Some(21);
        let graph = model.graph.as_mut().unwrap();
        for node in &mut graph.node[..2] {
            node.input.truncate(2);
        }
        graph.node[0].attribute.push(AttributeProto::int("output_dtype", ty));
        graph.node[1].attribute.push(AttributeProto::int("output_dtype", of_floats));
        let name = graph.initializer.pop().unwrap().name;
        assert_eq!(name.as_deref(), Some("x_zero"));
        // Quantization to more than 256 levels is opaque, which needs ONNX Runtime.
        let graph = Place::new(&model).open().graph().ok()?;
        graph.nodes().iter().find_map(|node| if let Op::FakeQuantize(by) = &node.op { Some(by.zero_point) } else { None })
    };
    let (uint8, int8, int16) = (DataType::Uint8 as i64, DataType::Int8 as i64, DataType::Int16 as i64);
    assert_eq!([0, uint8, int8, int16].map(|ty| rounding(ty, 0)), [Some(-128), Some(-128), Some(0), None]);
    assert_eq!(rounding(int8, DataType::Float16 as i64), None);
}

#[test]
fn quantized_weights_are_not_quantized_or_pruned() {
    for model in [rounded(), weights_alone()] {
        let place = Place::new(&model);
        let prune = PruneUnstructured { targets: vec!["re:(w|first)_floats".parse().unwrap()], ..PruneUnstructured::default() };
        for step in [Step::from(QuantizeDynamic::default()), prune.into()] {
            let error = builder().pass(step).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap_err();
            assert!(error.to_string().contains("_floats`: is already int8"), "{error}");
            assert!(error.hint().unwrap().contains("run `dequantize` before this pass"), "{error}");
        }
    }
    // Weights that a quantizer reads as floats are pruned only if they are selected by name.
    let mut model = rounded();
    let graph = model.graph.as_mut().unwrap();
    graph.node[2].input[0] = "w_integers".into();
    graph.node.insert(0, node("QuantizeLinear", &["w", "w_scale", "w_zero"], &["w_integers"], axis(1)));
    graph.initializer[0] = raw("w", &[20, 6]);
    let place = Place::new(&model);
    let pass = QuantizeDynamic::default();
    let error = builder().pass(pass).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap_err();
    assert!(error.to_string().contains("no weight is selected"), "{error}");
}

#[test]
fn quantized_weights_are_dequantized_on_request() {
    let (rounded, alone) = (Place::new(&rounded()), Place::new(&weights_alone()));
    for place in [&rounded, &alone] {
        builder().pass(Dequantize::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        let graph = place.written("out.onnx").graph.unwrap();
        assert!(graph.node.iter().all(|node| !node.op_type().contains("antizeLinear") && node.op_type() != "Cast"), "{:?}", graph.node);
        let (before, after) = (place.open(), compress::Model::open(place.path("out.onnx")).unwrap());
        assert!(after.weights.by_name.values().all(|weight| weight.encoding == Encoding::Dense));
        for (name, weight) in before.weights.by_name.iter().filter(|(_, weight)| weight.is_float()) {
            assert_eq!(after.weights.by_name[name].floats(name).unwrap(), weight.floats(name).unwrap(), "{name}");
        }
    }
    // Later passes process them; the rest of the file is unchanged.
    let both = builder().pass(Dequantize::default()).pass(QuantizeDynamic::default()).build().unwrap();
    both.run(alone.open(), alone.path("again.onnx")).unwrap();
    let narrow = builder().pass(Dequantize::default()).pass(Cast { to: FloatFormat::F16, ..Cast::default() }).build().unwrap();
    narrow.run(alone.open(), alone.path("narrow.onnx")).unwrap();
    if crate::common::onnxruntime::has_onnx_runtime() {
        assert_eq!(answers_of(&alone.input()), answers_of(&alone.path("out.onnx")));
        // Activations are no longer quantized.
        assert!(distance(&rounded.input(), &rounded.path("out.onnx")) < 0.02);
        assert!(distance(&alone.input(), &alone.path("again.onnx")) < 0.05);
        assert!(distance(&alone.input(), &alone.path("narrow.onnx")) < 2e-3);
    }
}

/// ONNX Runtime's quantization tool omits ReLU, ReLU6 and Hardtanh before quantizers whose range implies
/// them.
#[test]
fn activation_functions_that_quantizers_imply_are_restored() {
    for zero in [0, 255, 120] {
        let mut model = rounded();
        let graph = model.graph.as_mut().unwrap();
        graph.node[5].output[0] = "sum".into();
        graph.node.push(node("QuantizeLinear", &["sum", "y_scale", "y_zero"], &["y_integers"], vec![]));
        graph.node.push(node("DequantizeLinear", &["y_integers", "y_scale", "y_zero"], &["rounded"], vec![]));
        // Its range is that of the first quantizer.
        graph.node.push(node("Identity", &["rounded"], &["same"], vec![]));
        graph.node.push(node("QuantizeLinear", &["same", "y_scale", "y_zero"], &["same_integers"], vec![]));
        graph.node.push(node("DequantizeLinear", &["same_integers", "y_scale", "y_zero"], &["y"], vec![]));
        graph.initializer.extend([float("y_scale", 0.01), one("y_zero", DataType::Uint8, zero)]);
        let place = Place::new(&model);
        let report = builder().pass(Dequantize::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        let graph = place.written("out.onnx").graph.unwrap();
        let operators: Vec<&str> = graph.node.iter().map(NodeProto::op_type).collect();
        // No activation function can precede the input of the network.
        assert_eq!(operators, ["Gemm", "Clip"], "zero point {zero}");
        assert!(report.notes.iter().any(|note| note.contains("1 activation still clamped")), "{:?}", report.notes);
        if crate::common::onnxruntime::has_onnx_runtime() {
            let distance = distance(&place.input(), &place.path("out.onnx"));
            assert!(distance < 0.02, "zero point {zero}: {distance}");
        }
    }
}

#[test]
fn a_lifted_file_computes_the_same() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    for model in [rounded(), weights_alone()] {
        let place = Place::new(&model);
        let x = candle_core::Tensor::from_vec(crate::onnx_in::numbers(60), (3, 20), &candle_core::Device::Cpu).unwrap();
        let inputs: compress_engine::exec::Inputs = [("x".to_owned(), x)].into();
        let opened = place.open();
        let graph = opened.graph().unwrap();
        let work = compress_core::work::Work { threads: 1, progress: &compress_core::work::Silent, cancel: &compress_core::work::Cancel::default() };
        let device = candle_core::Device::Cpu;
        let parameters =
            compress_engine::exec::Parameters::load(&graph, &opened.weights, &device, candle_core::DType::F32, compress_engine::exec::Residence::Stored, &work);
        let ours = compress_engine::exec::Executor::new(&graph, parameters.unwrap(), device).run(&inputs).unwrap();
        let ours: Vec<f32> = ours["y"].flatten_all().unwrap().to_vec1().unwrap();
        let theirs = answers_of(&place.input()).unwrap();
        let largest = theirs.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(off < 1e-5 * largest, "{off} of {largest}");
    }
}

/// A network over images with four channels, with `nodes` as its convolution, and an output.
fn image_file(opset: i64, nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    let mut model = file(opset, nodes, initializer);
    let graph = model.graph.as_mut().unwrap();
    graph.input = vec![value("x", DataType::Float, &["n", "4", "6", "6"])];
    graph.output = vec![value("y", DataType::Float, &["n", "3", "6", "6"])];
    model
}

fn float(name: &str, number: f32) -> TensorProto {
    TensorProto { raw_data: Some(number.to_le_bytes().to_vec()), ..tensor(name, DataType::Float, &[]) }
}

/// Integer convolutions: between quantizers in the forms of several opsets, and as integer operators.
fn convolutions() -> Vec<(&'static str, ModelProto)> {
    let pads = || vec![AttributeProto::ints("pads", [1; 4])];
    let rounding = |inputs: &[&str]| {
        let quantize = node("QuantizeLinear", &[&["x"], inputs].concat(), &["xi"], vec![]);
        vec![quantize, node("DequantizeLinear", &[&["xi"], inputs].concat(), &["xr"], vec![])]
    };
    let (x_scale, x_zero, kernel) = (|| float("x_scale", STEP), || one("x_zero", DataType::Uint8, 120), |ty| bytes("w", ty, &[3, 4, 3, 3], 3));
    let zeros = || TensorProto { raw_data: Some(vec![0; 3]), ..tensor("w_zero", DataType::Int8, &[3]) };
    let conv = || node("Conv", &["xr", "wf"], &["y"], pads());
    // Without an axis, as before opset 13.
    let old = [rounding(&["x_scale", "x_zero"]), vec![node("DequantizeLinear", &["w", "w_scale", "w_zero"], &["wf"], vec![]), conv()]].concat();
    let by_channel = [rounding(&["x_scale", "x_zero"]), vec![node("DequantizeLinear", &["w", "w_scale", "w_zero"], &["wf"], axis(0)), conv()]].concat();
    let mut typed = [rounding(&["x_scale"]), vec![node("DequantizeLinear", &["w", "w_scale", "w_zero"], &["wf"], axis(0)), conv()]].concat();
    typed[0].attribute.push(AttributeProto::int("output_dtype", DataType::Int8 as i64));
    let linear = vec![
        node("QuantizeLinear", &["x", "x_scale", "x_zero"], &["xi"], vec![]),
        node("QLinearConv", &["xi", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "x_zero"], &["yi"], pads()),
        node("DequantizeLinear", &["yi", "y_scale", "x_zero"], &["y"], vec![]),
    ];
    let integer = vec![
        NodeProto { output: ["xi", "s", "z"].map(str::to_owned).to_vec(), ..node("DynamicQuantizeLinear", &["x"], &[], vec![]) },
        node("ConvInteger", &["xi", "w", "z", "w_zero"], &["sums"], pads()),
        node("Cast", &["sums"], &["floats"], vec![AttributeProto::int("to", 1)]),
        node("Mul", &["s", "w_scale"], &["scale"], vec![]),
        node("Mul", &["floats", "scale"], &["y"], vec![]),
    ];
    let whole = || vec![kernel(DataType::Int8), scales("w_scale", &[]), one("w_zero", DataType::Int8, 0), x_scale(), x_zero()];
    vec![
        ("QDQ, opset 10", image_file(10, old, whole())),
        ("QDQ by channel", image_file(13, by_channel, vec![kernel(DataType::Int8), scales("w_scale", &[3]), zeros(), x_scale(), x_zero()])),
        ("QDQ, opset 21, types as attributes", image_file(21, typed, vec![kernel(DataType::Int8), scales("w_scale", &[3]), zeros(), x_scale()])),
        ("QLinearConv", image_file(10, linear, [whole(), vec![float("y_scale", 0.03)]].concat())),
        ("ConvInteger", image_file(11, integer, whole()[..3].to_vec())),
    ]
}

#[test]
fn integer_convolutions_are_supported_or_reported() {
    for (what, model) in convolutions() {
        let (place, between_quantizers) = (Place::new(&model), what.starts_with("QDQ"));
        let report = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        assert_eq!(place.written("out.onnx"), model, "{what}");
        let said = if between_quantizers {
            "1 weight already quantized (the first: `wf`)".to_owned()
        } else {
            format!("integer arithmetic are left unchanged: 1 {what}")
        };
        assert!(report.notes.iter().any(|note| note.contains(&said)), "{what}: {:?}", report.notes);
        let error = builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("again.onnx")).unwrap_err().to_string();
        assert!(error.contains("already") || error.contains("no weight is selected"), "{what}: {error}");
        if between_quantizers {
            let weight = &place.open().weights.by_name["wf"];
            assert_eq!((weight.shape.as_slice(), weight.encoding == Encoding::Dense), (&[3, 4, 3, 3][..], false), "{what}");
            let stored = bytes("w", DataType::Int8, &[3, 4, 3, 3], 3).raw_data.unwrap();
            let scale = |row: usize| if what.ends_with("10") { 0.004 } else { 0.004f32 + row as f32 * 1e-4 };
            let wanted: Vec<f32> = stored.iter().enumerate().map(|(at, byte)| f32::from(*byte as i8) * scale(at / 36)).collect();
            assert_eq!(weight.floats("wf").unwrap(), wanted, "{what}");
            builder().pass(Dequantize::default()).build().unwrap().run(place.open(), place.path("floats.onnx")).unwrap();
            let graph = place.written("floats.onnx").graph.unwrap();
            assert!(graph.node.iter().all(|node| !node.op_type().contains("antizeLinear")), "{what}: {:?}", graph.node);
        }
        if crate::common::onnxruntime::has_onnx_runtime() {
            let x = candle_core::Tensor::from_vec(crate::onnx_in::numbers(2 * 144), (2, 4, 6, 6), &candle_core::Device::Cpu).unwrap();
            let inputs: compress_engine::exec::Inputs = [("x".to_owned(), x)].into();
            let graph = place.open().graph().unwrap();
            let typed =
                graph.nodes().iter().any(|node| matches!(node.op, Op::FakeQuantize(_))) && graph.nodes().iter().any(|node| matches!(node.op, Op::Conv(_)));
            assert_eq!(typed, between_quantizers, "{what}: {graph}");
            let (device, opened) = (candle_core::Device::Cpu, place.open());
            let work = compress_core::work::Work { threads: 1, progress: &compress_core::work::Silent, cancel: &compress_core::work::Cancel::default() };
            let parameters = compress_engine::exec::Parameters::load(
                &graph,
                &opened.weights,
                &device,
                candle_core::DType::F32,
                compress_engine::exec::Residence::Stored,
                &work,
            );
            let ours = compress_engine::exec::Executor::new(&graph, parameters.unwrap(), device).run(&inputs).unwrap()["y"]
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap();
            let theirs = runtime::Session::open(&place.input(), runtime::Options::default()).unwrap().run(&inputs).unwrap();
            let theirs = theirs["y"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let largest = theirs.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(off < 1e-4 * largest, "{what}: {off} of {largest}");
        }
    }
}

/// Bytes that are cast and multiplied in an unsupported form are reported.
#[test]
fn unsupported_forms_of_dequantization_are_reported() {
    let mut model = weights_alone();
    let graph = model.graph.as_mut().unwrap();
    // With a scale for each element, or transposed before scaling.
    let at = graph.initializer.iter().position(|tensor| tensor.name() == "second_scale").unwrap();
    graph.initializer[at] = scales("second_scale", &[6, 8]);
    let place = Place::new(&model);
    let report = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert!(
        report.notes.iter().any(|note| note.contains("1 integer tensor left unchanged: dequantized (by DequantizeLinear or Cast) in an unsupported pattern")
            && note.contains("`second`")),
        "{:?}",
        report.notes
    );
    assert_eq!(place.written("out.onnx"), model);
    assert!(!Place::new(&weights_alone()).open().auxiliary.in_weight_files.iter().any(|note| note.contains("unsupported pattern")));
}

/// ONNX Runtime requires the size of the bias when it loads the node.
#[test]
fn products_of_blocks_may_have_a_bias() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let attributes = [("K", 20), ("N", 6), ("bits", 4), ("block_size", 32)].map(|(name, number)| AttributeProto::int(name, number));
    let product = node("MatMulNBits", &["x", "integers", "scales", "", "", "bias"], &["y"], attributes.to_vec());
    let initializers = vec![bytes("integers", DataType::Uint8, &[6, 1, 16], 3), scales("scales", &[6]), raw("bias", &[6])];
    let mut model = file(17, vec![NodeProto { domain: Some("com.microsoft".into()), ..product }], initializers);
    model.opset_import.push(OperatorSetIdProto { domain: Some("com.microsoft".into()), version: Some(1) });
    Place::new(&model).open().graph().unwrap();
}

/// ONNX Runtime fails to load or run these files with the session option for exact sums.
#[test]
fn files_without_zero_points_and_with_shared_integers_are_run() {
    let weight = |name: &str| node("DequantizeLinear", &["w", "w_scale"], &[name], axis(1));
    let product = |weight: &str, output: &str| node("MatMul", &["x", weight], &[output], vec![]);
    let stored = || vec![bytes("w", DataType::Int8, &[20, 6], 3), scales("w_scale", &[6])];
    let sum = node("Add", &["p", "q"], &["y"], vec![]);
    let cases = [
        (1.0, file(13, vec![weight("a"), product("a", "y")], stored())),
        (2.0, file(13, vec![weight("a"), weight("b"), product("a", "p"), product("b", "q"), sum], stored())),
    ];
    for (times, model) in cases {
        let place = Place::new(&model);
        if !crate::common::onnxruntime::has_onnx_runtime() {
            return;
        }
        let integers = stored()[0].raw_data.clone().unwrap();
        let x: Vec<f32> = (0..60).map(|at| (at as f32 * 0.1).sin()).collect();
        let y = |row: usize, column: usize| -> f32 {
            let scale = times * (0.004 + column as f32 * 1e-4);
            (0..20).map(|at| x[row * 20 + at] * f32::from(integers[at * 6 + column] as i8) * scale).sum()
        };
        let given = candle_core::Tensor::from_slice(&x, (3, 20), &candle_core::Device::Cpu).unwrap();
        let mut session = runtime::Session::open(&place.input(), runtime::Options::default()).unwrap();
        let found = session.run(&[("x".to_owned(), given)].into()).unwrap().remove("y").unwrap().to_vec2::<f32>().unwrap();
        let wrong = (0..18).find(|at| (found[at / 6][at % 6] - y(at / 6, at % 6)).abs() > 1e-4);
        assert_eq!(wrong, None, "{found:?}");
    }
}

/// ONNX Runtime and the built-in executor convert 16-bit weights of a file with quantized activations.
#[test]
fn floats_of_a_quantized_file_are_cast() {
    let mut model = rounded();
    let graph = model.graph.as_mut().unwrap();
    graph.node.last_mut().unwrap().output = vec!["sum".into()];
    graph.node.push(node("Mul", &["sum", "gain"], &["y"], vec![]));
    graph.initializer.push(raw("gain", &[6]));
    let place = Place::new(&model);
    for to in [FloatFormat::F16, FloatFormat::Bf16] {
        let step: Step = Cast { to, ..Cast::default() }.into();
        step.pass().plan(&place.open(), &RunState::default()).unwrap().model.graph().unwrap_or_else(|e| panic!("{to:?}: {e}"));
        let out = place.path(&format!("{to:?}.onnx"));
        builder().pass(step).build().unwrap().run(place.open(), &out).unwrap_or_else(|e| panic!("{to:?}: {e}"));
        let gain = &compress::Model::open(&out).unwrap().weights.by_name["gain"];
        assert_eq!(gain.dtype.bitsize(), 16, "{to:?}");
        if crate::common::onnxruntime::has_onnx_runtime() {
            let distance = distance(&place.input(), &out);
            assert!(distance < 0.01, "{to:?}: {distance}");
        }
    }
}

/// Scales stay float32 whatever the operator, and biases stay integers.
#[test]
fn a_cast_leaves_scales_and_integer_biases_unchanged() {
    // ONNX Runtime has the same operators in its own domain, also for 16 bits.
    let mut foreign = rounded();
    foreign.opset_import.push(OperatorSetIdProto { domain: Some("com.microsoft".into()), version: Some(1) });
    let nodes = foreign.graph.as_mut().unwrap().node.iter_mut().filter(|node| node.op_type().ends_with("antizeLinear"));
    nodes.for_each(|node| node.domain = Some("com.microsoft".into()));
    let cast = |place: &Place| builder().pass(Cast { to: FloatFormat::F16, ..Cast::default() }).build().unwrap().run(place.open(), place.path("out.onnx"));
    for (what, model) in convolutions().into_iter().chain([("another domain", foreign), ("integers only", rounded())]) {
        let error = cast(&Place::new(&model)).unwrap_err().to_string();
        assert!(error.contains("no weight is selected"), "{what}: {error}");
    }
    let place = Place::new(&rounded());
    let cast = Cast { to: FloatFormat::F16, targets: vec!["b_floats".parse().unwrap()], ..Cast::default() };
    let error = builder().pass(cast).build().unwrap().run(place.open(), place.path("bias.onnx")).unwrap_err();
    assert!(error.to_string().contains("`b_floats`: is stored as 32-bit integers with scales"), "{error}");
}

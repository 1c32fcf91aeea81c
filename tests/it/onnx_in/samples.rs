//! Static int8 with typical sample formats: images in a folder, arrays by input, recorded runs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use compress::export::Onnx;
use compress::pass::{ActivationTarget, Decompose, QuantizeDynamic, QuantizeStatic, Step};
use compress::pipeline::ResultCache;
use compress::{Model, Pipeline, Report, Result};
use compress_core::store::OpenSizes;
use compress_engine::data::{ChannelOrder, Data, ImageLayout};
use compress_engine::evaluation::SamplesFrom;
use compress_onnx::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use prost::Message;

use crate::onnx_in::{Place, builder, model, node, numbers, raw, tensor, value};

const PICTURES: usize = 12;

/// A small network over images in channels-last layout, as in TensorFlow's files.
fn network() -> ModelProto {
    let list = |name: &str, values: &[i64]| AttributeProto::ints(name, values.iter().copied());
    let graph = GraphProto {
        name: Some("pictures".into()),
        node: vec![
            node("Transpose", &["x"], &["planes"], vec![list("perm", &[0, 3, 1, 2])]),
            node("Conv", &["planes", "kernel"], &["convolved"], vec![list("pads", &[1, 1, 1, 1])]),
            node("Relu", &["convolved"], &["active"], vec![]),
            node("GlobalAveragePool", &["active"], &["pooled"], vec![]),
            node("Reshape", &["pooled", "flat"], &["features"], vec![]),
            node("MatMul", &["features", "head"], &["y"], vec![]),
        ],
        initializer: vec![
            raw("kernel", &[16, 3, 3, 3]),
            TensorProto { int64_data: vec![0, -1], ..tensor("flat", DataType::Int64, &[2]) },
            raw("head", &[16, 8]),
        ],
        input: vec![value("x", DataType::Float, &["n", "8", "6", "3"])],
        output: vec![value("y", DataType::Float, &["n", "8"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(11) }];
    ModelProto { ir_version: Some(6), graph: Some(graph), opset_import, ..ModelProto::default() }
}

fn byte(picture: usize, y: usize, x: usize, channel: usize) -> u8 {
    (picture * 53 + y * 31 + x * 17 + channel * 71) as u8
}

/// Images of 10 x 10 without classes.
fn pictures(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    for picture in 0..PICTURES {
        let image = image::RgbImage::from_fn(10, 10, |x, y| image::Rgb([0, 1, 2].map(|channel| byte(picture, y as usize, x as usize, channel))));
        image.save(folder.join(format!("{picture:02}.png"))).unwrap();
    }
}

/// The preprocessed images: center crop of 8 x 6, BGR, no mean.
fn prepared() -> Tensor {
    let mut values = Vec::new();
    for (picture, y) in (0..PICTURES).flat_map(|picture| (1..9).map(move |y| (picture, y))) {
        for (x, (channel, mean)) in (2..8).flat_map(|x| [(2, 104.0), (1, 117.0), (0, 123.0)].map(|place| (x, place))) {
            values.push(f32::from(byte(picture, y, x, channel)) - mean);
        }
    }
    Tensor::from_vec(values, (PICTURES, 8, 6, 3), &Device::Cpu).unwrap()
}

fn preprocessed(folder: &Path) -> Data {
    Data {
        images: Some(folder.to_owned()),
        crop: Some(vec![8, 6]),
        channels: Some(ChannelOrder::Bgr),
        rescale: Some(1.0),
        mean: vec![104.0, 117.0, 123.0],
        ..Data::default()
    }
}

fn quantized(place: &Place, data: Data, output: &str) -> Result<Report> {
    builder().pass(QuantizeStatic::default()).calibration(data).build()?.run(place.open(), place.path(output))
}

/// An array in NumPy's format.
fn npy(path: &Path, kind: &str, shape: &str, elements: &[u8]) {
    let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}), }}");
    let length = (header.len() as u16).to_le_bytes();
    std::fs::write(path, [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), elements].concat()).unwrap();
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A network over tokens.
fn of_tokens() -> ModelProto {
    let ports = ["input_ids", "attention_mask"].map(|name| value(name, DataType::Int64, &["n", "tokens"]));
    let graph = GraphProto {
        name: Some("tokens".into()),
        node: vec![
            node("Gather", &["table", "input_ids"], &["rows"], vec![]),
            node("Cast", &["attention_mask"], &["mask"], vec![AttributeProto::int("to", 1)]),
            node("Unsqueeze", &["mask"], &["column"], vec![AttributeProto::ints("axes", [2])]),
            node("Mul", &["rows", "column"], &["kept"], vec![]),
            node("MatMul", &["kept", "head"], &["y"], vec![]),
        ],
        initializer: vec![raw("table", &[200, 16]), raw("head", &[16, 8])],
        input: ports.to_vec(),
        output: vec![value("y", DataType::Float, &["n", "tokens", "8"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(11) }];
    ModelProto { ir_version: Some(6), graph: Some(graph), opset_import, ..ModelProto::default() }
}

#[test]
fn texts_use_the_tokenizer_of_the_file_or_of_its_repository() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/word-pieces.json");
    // The folder of the file, that of the tokenizer, and whether they belong together.
    for (file, tokens, found) in [("", "", true), ("onnx", "", true), ("onnx", "onnx", true), ("other", "", false)] {
        let place = Place::new(&of_tokens());
        let folder = place.path(file);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::rename(place.input(), folder.join("model.onnx")).unwrap();
        std::fs::copy(&tokenizer, place.path(tokens).join("tokenizer.json")).unwrap();
        std::fs::write(place.path(tokens).join("config.json"), r#"{"max_position_embeddings": 6}"#).unwrap();
        let texts = place.path("texts.txt");
        std::fs::write(&texts, "once upon a time there was a king\n".repeat(12)).unwrap();
        for opened in [folder.join("model.onnx"), folder] {
            let model = compress::Model::open(&opened).unwrap();
            let data = Data { text: Some(texts.clone()), ..Data::default() };
            let out = tempfile::tempdir().unwrap();
            let run = builder().pass(QuantizeStatic::default()).calibration(data.clone()).build().unwrap().run(model.clone(), out.path().join("out.onnx"));
            let inputs = model.inputs();
            for name in ["tokenizer.json", "config.json"] {
                assert_eq!(inputs.iter().any(|input| input.ends_with(name)), found, "{name}: {inputs:?}");
            }
            match run {
                Ok(report) => assert!(found && report.fidelity.is_some(), "{:?}", report.notes),
                Err(e) => assert!(!found && e.to_string().contains("without tokenizer.json"), "{}: {e}", opened.display()),
            }
            if found {
                let subject = compress_engine::evaluation::Subject::from_model(model).unwrap();
                let set = compress_engine::data::DataSets::default().open(&data, subject.target()).unwrap();
                // The configuration limits the length.
                assert_eq!(set.first().unwrap().inputs["input_ids"].dims()[1], 6, "{}", opened.display());
            }
        }
    }
}

/// Samples of such a network.
fn token_samples(place: &Place) -> Data {
    let tokens: Vec<i64> = (0..48).map(|at| at * 31 % 200).collect();
    let input = |name: &str, values: Vec<i64>| (name.to_owned(), Tensor::from_vec(values, (12, 4), &Device::Cpu).unwrap());
    let path = place.path("tokens.safetensors");
    candle_core::safetensors::save(&[input("input_ids", tokens), input("attention_mask", vec![1; 48])].into(), &path).unwrap();
    Data { arrays: Some(path), ..Data::default() }
}

/// Elements that the model sets to minus infinity agree in both runtimes.
#[test]
fn masked_outputs_are_verified() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let mut model = of_tokens();
    let graph = model.graph.as_mut().unwrap();
    graph.node.last_mut().unwrap().output = vec!["scores".to_owned()];
    graph.node.push(node("Where", &["is_token", "scores", "least"], &["y"], vec![]));
    let is_token = TensorProto { raw_data: Some(vec![1, 1, 0, 1, 1, 1, 1, 1]), ..tensor("is_token", DataType::Bool, &[8]) };
    graph.initializer.extend([is_token, TensorProto { float_data: vec![f32::NEG_INFINITY], ..tensor("least", DataType::Float, &[]) }]);
    let place = Place::new(&model);
    quantized(&place, token_samples(&place), "out.onnx").unwrap();
}

/// Tables that `ignore` names, tables of integers, and the scales of their rows.
#[test]
fn other_tables_are_left_unchanged() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let place = Place::new(&of_tokens());
    let run = |pass: Step, from: &str, to: &str| {
        builder().pass(pass).calibration(token_samples(&place)).build().unwrap().run(Model::open(place.path(from)).unwrap(), place.path(to)).unwrap();
        let graph = place.written(to).graph.unwrap();
        let types = graph.initializer.into_iter().chain(graph.node.into_iter().filter_map(|node| node.attribute.into_iter().next()?.t));
        types.map(|tensor| (tensor.name().to_owned(), tensor.data_type())).collect::<BTreeMap<String, DataType>>()
    };
    let ignored = QuantizeStatic { ignore: vec!["table".parse().unwrap()], ..QuantizeStatic::default() };
    assert_eq!(run(ignored.into(), "in.onnx", "ignored.onnx")["table"], DataType::Float);
    let dynamic = QuantizeDynamic { embeddings: true, targets: vec!["table".parse().unwrap()], ..QuantizeDynamic::default() };
    let stored = run(dynamic.into(), "in.onnx", "dynamic.onnx");
    let types = run(QuantizeStatic::default().into(), "dynamic.onnx", "both.onnx");
    let [integers, scales] = ["table/quantized", "table/scale"].map(|name| (stored[name], types[name]));
    assert_eq!([integers, scales], [(DataType::Int8, DataType::Int8), (DataType::Float, DataType::Float)]);
    let mut model = of_tokens();
    let graph = model.graph.as_mut().unwrap();
    graph.node.insert(0, node("DequantizeLinear", &["integers", "step", "zero"], &["table"], vec![]));
    let integers = TensorProto { raw_data: Some((0..3200).map(|at| (at * 37 % 251) as u8).collect()), ..tensor("integers", DataType::Int8, &[200, 16]) };
    let step = TensorProto { float_data: vec![0.01], ..tensor("step", DataType::Float, &[]) };
    let zero = TensorProto { int32_data: vec![0], ..tensor("zero", DataType::Int8, &[]) };
    graph.initializer.splice(0..1, [integers, step, zero]);
    std::fs::write(place.path("rounded.onnx"), model.encode_to_vec()).unwrap();
    assert_eq!(run(QuantizeStatic::default().into(), "rounded.onnx", "rounded-static.onnx")["table"], DataType::Int8);
}

#[test]
fn images_calibrate_like_the_preprocessed_arrays() {
    let place = Place::new(&network());
    pictures(&place.path("pictures"));
    let report = quantized(&place, preprocessed(&place.path("pictures")), "from-pictures.onnx").unwrap();
    let fidelity = report.fidelity.unwrap_or_else(|| panic!("{:?}", report.notes));
    assert_eq!(fidelity.samples_from, SamplesFrom::HeldOut);
    assert!(fidelity.fidelity.cosine > 0.999, "{}", fidelity.fidelity.cosine);
    // Samples of folders are spread and those of arrays are the first ones, so both use all samples.
    let all = |data: Data| Data { samples: Some(PICTURES), ..data };
    let arrays = place.path("arrays.safetensors");
    candle_core::safetensors::save(&[("x".to_owned(), prepared())].into(), &arrays).unwrap();
    quantized(&place, all(Data { arrays: Some(arrays), ..Data::default() }), "from-arrays.onnx").unwrap();
    let folder = place.path("by-input");
    std::fs::create_dir(&folder).unwrap();
    npy(&folder.join("x.npy"), "<f4", "12, 8, 6, 3", &floats(&prepared().flatten_all().unwrap().to_vec1().unwrap()));
    quantized(&place, all(Data { arrays: Some(folder), ..Data::default() }), "from-folder.onnx").unwrap();
    quantized(&place, all(preprocessed(&place.path("pictures"))), "from-all-pictures.onnx").unwrap();
    let graph = |name: &str| place.written(name).graph.unwrap();
    assert_eq!(graph("from-all-pictures.onnx"), graph("from-arrays.onnx"));
    assert_eq!(graph("from-folder.onnx"), graph("from-arrays.onnx"));
    let rescaled = |rescale| Data { rescale, ..preprocessed(&place.path("pictures")) };
    let refused = quantized(&place, all(rescaled(None)), "no.onnx").unwrap_err().to_string();
    assert!(refused.contains("scales pixels to 0 to 1"), "{refused}");
    quantized(&place, all(rescaled(Some(0.5))), "from-others.onnx").unwrap();
    assert_ne!(graph("from-others.onnx"), graph("from-arrays.onnx"));
}

#[test]
fn unsupported_image_inputs_are_reported() {
    let place = Place::new(&network());
    pictures(&place.path("pictures"));
    let refused = |change: &dyn Fn(&mut Data)| {
        let mut data = preprocessed(&place.path("pictures"));
        change(&mut data);
        let error = quantized(&place, data, "out.onnx").unwrap_err().to_string();
        assert!(!place.path("out.onnx").exists(), "{error}");
        error
    };
    assert!(refused(&|data| data.crop = None).contains("is 10 x 10, but the model's input `x` is any x 8 x 6 x 3"));
    assert!(refused(&|data| data.crop = Some(vec![20])).contains("smaller than the center crop of 20 x 20"));
    assert!(refused(&|data| data.layout = Some(ImageLayout::Nchw)).contains("3 channels, this one has 8"));
    assert!(refused(&|data| data.mean = vec![1.0, 2.0]).contains("`mean` has 2 values"));
    assert!(refused(&|data| data.images = Some(place.path("none"))).contains("none"));
}

/// Recorded runs of a model with a boolean scalar and rows as inputs: one file per run, with all inputs.
fn runs(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    for run in 0..PICTURES {
        let rows = 1 + run % 4;
        let x = Tensor::from_vec(numbers(60 + run)[run..run + rows * 15].iter().chain(&numbers(rows * 5)).copied().collect(), (rows, 20), &Device::Cpu);
        let positive = Tensor::new((run % 2) as u8, &Device::Cpu).unwrap();
        let all = [("x".to_owned(), x.unwrap()), ("positive".to_owned(), positive)];
        candle_core::safetensors::save(&all.into(), folder.join(format!("{run}.safetensors"))).unwrap();
    }
}

#[test]
fn recorded_runs_have_inputs_of_any_rank_and_type() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let place = Place::new(&model());
    runs(&place.path("runs"));
    let data = || Data { arrays: Some(place.path("runs")), ..Data::default() };
    let report = quantized(&place, data(), "out.onnx").unwrap();
    assert!(report.notes.iter().any(|note| note.contains("the first 11 calibration samples")), "{:?}", report.notes);
    let fidelity = report.fidelity.unwrap_or_else(|| panic!("{:?}", report.notes));
    assert_eq!((fidelity.samples_from, fidelity.samples), (SamplesFrom::HeldOut, 1));
    assert!(fidelity.fidelity.cosine > 0.999, "{}", fidelity.fidelity.cosine);
    let refused = |data: Data| quantized(&place, data, "no.onnx").unwrap_err().to_string();
    assert!(refused(Data { batch_size: Some(4), ..data() }).contains("remove `batch_size`"));
    assert!(refused(Data { mean: vec![0.5], ..data() }).contains("remove `mean`"));
    assert!(refused(Data { inputs: vec![("z".into(), "x".into())], ..data() }).contains("no input `z`"));
    std::fs::remove_file(place.path("runs/10.safetensors")).unwrap();
    let wide = Tensor::zeros((2, 21), DType::F32, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), wide)].into(), place.path("runs/10.safetensors")).unwrap();
    assert!(refused(data()).contains("array `x` has the shape [2, 21], but the model's input `x` is any x 20"));
    let positive = Tensor::new(1u8, &Device::Cpu);
    let unread = [("x", Tensor::zeros((2, 20), DType::F32, &Device::Cpu)), ("positive", positive), ("more", Tensor::zeros(3, DType::F32, &Device::Cpu))];
    let unread = unread.into_iter().map(|(name, tensor)| (name.to_owned(), tensor.unwrap())).collect();
    candle_core::safetensors::save(&unread, place.path("runs/0.safetensors")).unwrap();
    assert!(refused(data()).contains("`more` is not used"), "{}", refused(data()));
    // A boolean scalar has no rows.
    let rows = place.path("rows.safetensors");
    let all = [
        ("x".to_owned(), Tensor::zeros((2, 20), DType::F32, &Device::Cpu).unwrap()),
        ("positive".to_owned(), Tensor::zeros(2, DType::U8, &Device::Cpu).unwrap()),
    ];
    candle_core::safetensors::save(&all.into(), &rows).unwrap();
    assert!(refused(Data { arrays: Some(rows), ..Data::default() }).contains("`positive` is a scalar without a batch axis"));
    let empty = place.path("empty");
    std::fs::create_dir(&empty).unwrap();
    assert!(refused(Data { arrays: Some(empty), ..Data::default() }).contains("contains no arrays"));
}

/// Half of the channels of a quantized value are read by a layer, the others in floats.
#[test]
fn signed_activations_run_with_all_opsets() {
    let graph = GraphProto {
        name: Some("halves".into()),
        node: vec![
            node("Conv", &["x", "first"], &["a"], vec![]),
            node("Relu", &["a"], &["r"], vec![]),
            node("Split", &["r", "sizes"], &["left", "right"], vec![AttributeProto::int("axis", 1)]),
            node("Conv", &["left", "second"], &["c"], vec![]),
            node("Mul", &["c", "right"], &["m"], vec![]),
            node("Conv", &["m", "third"], &["y"], vec![]),
        ],
        initializer: vec![
            raw("first", &[16, 8, 1, 1]),
            TensorProto { int64_data: vec![8, 8], ..tensor("sizes", DataType::Int64, &[2]) },
            raw("second", &[8, 8, 1, 1]),
            raw("third", &[4, 8, 1, 1]),
        ],
        input: vec![value("x", DataType::Float, &["n", "8", "6", "6"])],
        output: vec![value("y", DataType::Float, &["n", "4", "6", "6"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(17) }];
    let place = Place::new(&ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() });
    let rows = place.path("rows.safetensors");
    let x = Tensor::from_vec(numbers(12 * 288), (12, 8, 6, 6), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), x)].into(), &rows).unwrap();
    let mut scales = Vec::new();
    for opset in [17, 19, 21] {
        let output = format!("{opset}.onnx");
        let (pass, export) = (QuantizeStatic { target: ActivationTarget::Arm, ..QuantizeStatic::default() }, Onnx { opset: Some(opset), ..Onnx::default() });
        let data = Data { arrays: Some(rows.clone()), ..Data::default() };
        // If ONNX Runtime refuses the file, the run fails.
        builder().pass(pass).calibration(data).export(export).build().unwrap().run(place.open(), place.path(&output)).unwrap();
        let nodes = place.written(&output).graph.unwrap().node;
        scales.push(nodes.iter().filter(|node| node.op_type() == "DequantizeLinear" && node.output[0] == "r/quantized/channels").count());
    }
    assert_eq!(scales, [0, 0, 1]);
}

/// Sizes affect the written graph, so results for other sizes are not reused.
#[test]
fn sizes_are_part_of_the_key_of_cached_results() {
    let graph = GraphProto {
        name: Some("rows".into()),
        node: vec![node("MatMul", &["x", "w"], &["m"], vec![]), node("Relu", &["m"], &["y"], vec![])],
        initializer: vec![raw("w", &[8, 8])],
        input: vec![value("x", DataType::Float, &["n", "8"])],
        output: vec![value("y", DataType::Float, &["n", "8"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(13) }];
    let folder = tempfile::tempdir().unwrap();
    let (path, samples) = (folder.path().join("in.onnx"), folder.path().join("samples.safetensors"));
    std::fs::write(&path, ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() }.encode_to_vec()).unwrap();
    let rows = Tensor::from_vec(numbers(64 * 8), (64, 8), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), rows)].into(), &samples).unwrap();
    let cache = ResultCache::new(folder.path().join("cache"), Duration::ZERO);
    let run = |n: &str, out: &str| {
        let data = Data { arrays: Some(samples.clone()), ..Data::default() };
        let sizes: OpenSizes = [("n".to_owned(), n.parse().unwrap())].into();
        let builder = Pipeline::builder().pass(QuantizeStatic::default()).calibration(data).sizes(sizes).cache(cache.clone(), true);
        let report = builder.build().unwrap().run(Model::open(&path).unwrap(), folder.path().join(out)).unwrap();
        report.notes.iter().any(|note| note.contains("was reused"))
    };
    assert_eq!([run("4", "four"), run("8", "eight"), run("4", "again")], [false, false, true]);
}

/// A file with a graph, and 32 samples of its input `x` of 20 features.
fn with_samples(graph: GraphProto) -> (Place, std::path::PathBuf) {
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(13) }];
    let place = Place::new(&ModelProto { ir_version: Some(7), graph: Some(graph), opset_import, ..ModelProto::default() });
    let samples = place.path("samples.safetensors");
    candle_core::safetensors::save(&[("x".to_owned(), Tensor::from_vec(numbers(640), (32, 20), &Device::Cpu).unwrap())].into(), &samples).unwrap();
    (place, samples)
}

/// Layers of 64-bit floats are not quantized; the error names the node and the next step.
#[test]
fn layers_of_64_bit_floats_are_named() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let cast = |from: &str, to: &str, ty: DataType| node("Cast", &[from], &[to], vec![AttributeProto::int("to", ty as i64)]);
    let bytes: Vec<u8> = numbers(20 * 8).into_iter().flat_map(|value| f64::from(value).to_le_bytes()).collect();
    let double = TensorProto { raw_data: Some(bytes), ..tensor("double", DataType::Double, &[20, 8]) };
    let product = NodeProto { name: Some("wide".into()), ..node("MatMul", &["h", "double"], &["a"], vec![]) };
    let graph = GraphProto {
        name: Some("g".into()),
        node: vec![cast("x", "h", DataType::Double), product, cast("a", "y", DataType::Float)],
        initializer: vec![double],
        input: vec![value("x", DataType::Float, &["n", "20"])],
        output: vec![value("y", DataType::Float, &["n", "8"])],
        ..GraphProto::default()
    };
    let (place, samples) = with_samples(graph);
    let error = quantized(&place, Data::at(&samples), "out.onnx").unwrap_err();
    assert!(error.to_string().contains("`double`: cannot be quantized: node `wide` computes with F64"), "{error}");
    assert!(error.hint().unwrap().contains("export the model in float32"), "{error:?}");
}

/// A Gemm that also scales its product is not a linear layer; errors name it instead of its weight's readers.
#[test]
fn scaled_products_are_named() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let scaled = vec![AttributeProto::float("alpha", 0.5)];
    let graph = GraphProto {
        name: Some("g".into()),
        node: vec![NodeProto { name: Some("half".into()), ..node("Gemm", &["x", "w"], &["y"], scaled) }],
        initializer: vec![raw("w", &[20, 8])],
        input: vec![value("x", DataType::Float, &["n", "20"])],
        output: vec![value("y", DataType::Float, &["n", "8"])],
        ..GraphProto::default()
    };
    let (place, samples) = with_samples(graph);
    let error = quantized(&place, Data::at(&samples), "out.onnx").unwrap_err();
    assert!(error.to_string().contains("`w`: cannot be quantized: node `half` is a Gemm with `alpha`, `beta` or `transA`"), "{error}");
    assert!(error.hint().unwrap().contains("use `quantize-dynamic`"), "{error:?}");
    let error = builder().pass(Decompose::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap_err();
    assert!(error.to_string().contains("read by a Gemm with `alpha`, `beta` or `transA`: 1 weight (the first: `w`)"), "{error}");
}

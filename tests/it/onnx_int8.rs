//! Int8 and 16-bit weights in ONNX: the tensors of the file, and the operators that use them.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::{golden_model as golden, onnxruntime};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use compress::export::Onnx;
use compress::internal::RunState;
use compress::pass::{ActivationRounding, Cast, FloatFormat, GranularityKind, QuantizeDynamic};
use compress::report::Report;
use compress::{Model, Pipeline};
use compress_core::store::writer::{Item, write_pieces};
use compress_core::store::{ActivationScheme, Codes, DType, Encoding, Granularity, QuantizationSpec, Rescaled};
use compress_core::work::{Cancel, Silent, Work};
use compress_onnx::proto::{DataType, GraphProto, ModelProto, NodeProto, TensorProto};
use compress_onnx::{Precision, Style, draft, file};
use prost::Message;

fn quantized(name: &str, pass: &QuantizeDynamic, format: Onnx) -> compress::Result<(GraphProto, Report)> {
    let out = tempfile::tempdir().unwrap();
    let pipeline = Pipeline::builder().pass(pass.clone()).export(format).measure(false).build()?;
    let report = pipeline.run(Model::open(golden(name))?, out.path().join("out"))?;
    let bytes = std::fs::read(out.path().join("out").join(file::MODEL)).unwrap();
    Ok((ModelProto::decode(bytes.as_slice()).unwrap().graph.unwrap(), report))
}

/// A model folder with one linear layer, described by a graph.json.
fn one_layer(path: &Path, rows: usize, columns: usize, values: &[f32]) -> Model {
    std::fs::create_dir(path).unwrap();
    let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![rows, columns], &data).unwrap();
    safetensors::serialize_to_file([("fc.weight", view)], None, &path.join("model.safetensors")).unwrap();
    std::fs::write(path.join("config.json"), "{}").unwrap();
    let text = format!(
        "input x: float[batch, 2, {columns}]\nparam fc.weight: float[{rows}, {columns}]\nfc = Linear(x, fc.weight) -> float[batch, 2, {rows}]\noutput y = fc\n"
    );
    let graph: compress_graph::ir::Graph = text.parse().unwrap();
    std::fs::write(path.join("graph.json"), serde_json::to_string(&compress_graph::ir::GraphFile::from(&graph)).unwrap()).unwrap();
    Model::open(path).unwrap()
}

fn tensor<'g>(graph: &'g GraphProto, name: &str) -> &'g TensorProto {
    graph.initializer.iter().find(|t| t.name() == name).unwrap_or_else(|| panic!("no tensor {name}"))
}

fn nodes<'g>(graph: &'g GraphProto, op: &str) -> Vec<&'g NodeProto> {
    graph.node.iter().filter(|node| node.op_type() == op).collect()
}

/// The integers and scales of a weight after the pass, computed by the store.
fn stored(name: &str, weight: &str, pass: &QuantizeDynamic) -> (Vec<usize>, Vec<u8>, Vec<f32>) {
    use compress::pass::Pass;
    let model = pass.plan(&Model::open(golden(name)).unwrap(), &RunState::default()).unwrap().model;
    let weight = &model.weights.by_name[weight];
    let (mut integers, mut scales) = (Vec::new(), Vec::new());
    weight
        .visit(1, &mut |block| {
            integers.extend_from_slice(block.now.values);
            let (affine, _) = block.now.affine.unwrap();
            let count = block.now.scales.len() / (affine.scale_dtype.bitsize() / 8);
            scales.extend((0..count).map(|index| block.now.parameters(affine, index).0));
            Ok(())
        })
        .unwrap();
    (weight.shape.clone(), integers, scales)
}

fn transposed(bytes: &[u8], columns: usize) -> Vec<u8> {
    (0..columns).flat_map(|c| bytes.chunks(columns).map(move |row| row[c])).collect()
}

fn floats(tensor: &TensorProto) -> Vec<f32> {
    tensor.raw_data().as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
}

const QUERY: &str = "encoder.layer.0.attention.self.query.weight";

#[test]
fn the_file_contains_the_integers_of_the_store() {
    let pass = QuantizeDynamic::default();
    let (graph, report) = quantized("bert", &pass, Onnx::default()).unwrap();
    let (shape, integers, scales) = stored("bert", QUERY, &pass);
    let (elements, beside) = (tensor(&graph, QUERY), tensor(&graph, &format!("{QUERY}_scale")));
    assert_eq!(elements.data_type(), DataType::Int8);
    assert_eq!(elements.dims, [shape[1] as i64, shape[0] as i64]);
    assert!(elements.raw_data() == transposed(&integers, shape[1]));
    assert_eq!((beside.data_type(), beside.dims.as_slice()), (DataType::Float, [shape[0] as i64].as_slice()));
    assert_eq!(floats(beside), scales);
    let layers = report.layers.iter().filter(|layer| layer.encoding == "int8 channel").count();
    assert!(layers > 10);
    assert_eq!(nodes(&graph, "MatMulInteger").len(), layers);
    assert!(report.notes.iter().all(|note| !note.contains("dequantized floats")), "{:?}", report.notes);
    let size = report.outputs.iter().find(|o| o.path.ends_with(file::MODEL)).unwrap().bytes;
    let float = graph.initializer.iter().filter(|t| t.data_type() == DataType::Float).map(|t| t.raw_data().len() as u64).sum::<u64>();
    assert!(float < size);
}

#[test]
fn verify_runs_the_file_of_a_folder_with_only_onnx() {
    let out = tempfile::tempdir().unwrap();
    let checked = |folder: &Path| {
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        let checks = compress::pipeline::verify(folder, &work).unwrap();
        checks.into_iter().find(|check| check.path == "model.onnx, run").unwrap()
    };
    for (name, cache) in [("bert", false), ("gpt2", false), ("gpt2", true)] {
        let folder = out.path().join(format!("{name} {cache}"));
        let pipeline = Pipeline::builder().pass(QuantizeDynamic::default()).export(Onnx { cache, ..Onnx::default() }).measure(false).build().unwrap();
        pipeline.run(Model::open(golden(name)).unwrap(), &folder).unwrap();
        let check = checked(&folder);
        if !onnxruntime::has_onnx_runtime() {
            assert!(check.ok && check.finding.contains("not run"), "{check:?}");
            continue;
        }
        let expected = if cache { "ONNX Runtime runs it" } else { "ONNX Runtime against the built-in executor on 1 synthetic sample:" };
        assert!(check.ok && check.skipped == cache && check.finding.contains(expected), "{name}: {check:?}");
        let mut model = ModelProto::decode(std::fs::read(folder.join(file::MODEL)).unwrap().as_slice()).unwrap();
        model.graph.as_mut().unwrap().node[0].op_type = Some("Unknown".into());
        std::fs::write(folder.join(file::MODEL), model.encode_to_vec()).unwrap();
        let check = checked(&folder);
        assert!(!check.ok && check.finding.contains("Unknown"), "{name}: {check:?}");
    }
}

#[test]
fn layers_with_one_input_share_its_quantizer() {
    let (graph, _) = quantized("bert", &QuantizeDynamic::default(), Onnx::default()).unwrap();
    let products = nodes(&graph, "MatMulInteger");
    let of = |part: &str| products.iter().find(|n| n.name() == format!("encoder.layer.0.attention.self.{part}/sums")).unwrap();
    assert_eq!(of("query").input[0], of("key").input[0]);
    assert_eq!(of("query").input[2], of("value").input[2]);
    let inputs: BTreeSet<&str> = nodes(&graph, "DynamicQuantizeLinear").iter().map(|n| n.input[0].as_str()).collect();
    assert_eq!(inputs.len(), nodes(&graph, "DynamicQuantizeLinear").len());
    assert!(inputs.len() < products.len());
    // The pattern that ONNX Runtime fuses: activation scale first, then the weight's; the product, then
    // the bias.
    let scale = nodes(&graph, "Mul").into_iter().find(|n| n.name().ends_with("self.query/scale")).unwrap();
    assert!(scale.input[0].ends_with("/quantized/scale") && scale.input[1] == format!("{QUERY}_scale"));
    let sum = nodes(&graph, "Add").into_iter().find(|n| n.name() == "encoder.layer.0.attention.self.query").unwrap();
    assert!(sum.input[0].ends_with("/product") && sum.input[1].ends_with(".bias"));
}

#[test]
fn one_scale_and_zero_points() {
    let pass = QuantizeDynamic { granularity: GranularityKind::Tensor, symmetric: false, ..QuantizeDynamic::default() };
    let (graph, _) = quantized("bert", &pass, Onnx::default()).unwrap();
    let dims = |part: &str, what: &str| tensor(&graph, &format!("encoder.layer.0.attention.self.{part}.weight_{what}")).dims.clone();
    // Equal scales of two layers that share an input would be merged if they had the same rank.
    assert_eq!((dims("query", "scale"), dims("key", "scale")), (vec![], vec![1]));
    assert_eq!((dims("query", "zero_point"), dims("key", "zero_point")), (vec![], vec![]));
    assert_eq!(tensor(&graph, &format!("{QUERY}_zero_point")).data_type(), DataType::Int8);
    assert!(nodes(&graph, "MatMulInteger").iter().all(|n| n.input.len() == 4));
}

#[test]
fn weight_only_layers_are_dequantized_and_groups_need_an_opset() {
    let pass = QuantizeDynamic { activations: ActivationRounding::None, ..QuantizeDynamic::default() };
    let (graph, _) = quantized("llama", &pass, Onnx::default()).unwrap();
    assert!(nodes(&graph, "MatMulInteger").is_empty() && nodes(&graph, "DequantizeLinear").len() > 10);
    let pass = QuantizeDynamic { granularity: GranularityKind::Group, group_size: Some(4), symmetric: false, ..QuantizeDynamic::default() };
    let error = quantized("llama", &pass, Onnx { opset: Some(20), ..Onnx::default() }).unwrap_err().to_string();
    assert!(error.contains("proj.weight") && error.contains("opset 21"), "{error}");
    let (graph, report) = quantized("llama", &pass, Onnx::default()).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("applied to float activations")), "{:?}", report.notes);
    let name = "model.layers.0.self_attn.q_proj.weight";
    let (shape, integers, scales) = stored("llama", name, &pass);
    let (elements, beside) = (tensor(&graph, name), tensor(&graph, &format!("{name}_scale")));
    assert!(elements.raw_data() == transposed(&integers, shape[1]));
    let groups = shape[1] / 4;
    assert_eq!(beside.dims, [groups as i64, shape[0] as i64]);
    let across: Vec<f32> = (0..groups).flat_map(|g| scales.chunks(groups).map(move |row| row[g])).collect();
    assert_eq!(floats(beside), across);
    assert_eq!(tensor(&graph, &format!("{name}_zero_point")).dims, beside.dims);
}

#[test]
fn tables_are_looked_up_as_integers_and_stored_once() {
    let pass = QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() };
    let (graph, report) = quantized("llama-grouped-tied", &pass, Onnx::default()).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("`model.embed_tokens.weight`") && note.contains("output head")), "{:?}", report.notes);
    let table = tensor(&graph, "model.embed_tokens.weight");
    assert_eq!(table.data_type(), DataType::Int8);
    let alike = graph.initializer.iter().filter(|t| t.dims.iter().product::<i64>() == table.dims.iter().product::<i64>());
    assert_eq!(alike.count(), 1);
    let readers: BTreeSet<&str> = graph.node.iter().filter(|n| n.input.iter().any(|i| i == table.name())).map(NodeProto::op_type).collect();
    assert_eq!(readers, ["Gather", "Transpose"].into());
    assert!(nodes(&graph, "DequantizeLinear").is_empty());
}

#[test]
fn scales_of_inputs_go_to_the_input() {
    let (graph, _) = quantized("gpt2", &QuantizeDynamic::default(), Onnx::default()).unwrap();
    let name = "h.0.attn.c_attn.weight";
    let weight = graph.initializer.iter().find(|t| t.name().ends_with(name)).unwrap();
    let (shape, integers, _) = stored("gpt2", weight.name(), &QuantizeDynamic::default());
    assert!(weight.data_type() == DataType::Int8 && weight.raw_data() == integers);
    assert_eq!(weight.dims, shape.iter().map(|d| *d as i64).collect::<Vec<_>>());
    let scaled = nodes(&graph, "Mul").into_iter().find(|n| n.name() == "h.0.attn.c_attn/scaled_input").unwrap();
    assert!(scaled.input[1].ends_with("c_attn.weight_scale"));
    assert!(nodes(&graph, "DynamicQuantizeLinear").iter().any(|n| n.input[0] == scaled.output[0]));
}

#[test]
fn weights_with_other_uses_are_written_as_floats_with_a_note() {
    let text = "input x: float[batch, 3, 4]\nparam w: float[4, 4]\nfc = Linear(x, w) -> float[batch, 3, 4]\noutput y = fc\noutput z = w\n";
    let affine = QuantizationSpec {
        codes: Codes::INT8,
        granularity: Granularity::Channel,
        symmetric: true,
        scale_dtype: DType::F32,
        activations: ActivationScheme::None,
    };
    let style = Style { integers: [("w".to_owned(), affine)].into(), ..Style::default() };
    let made = draft(&text.parse().unwrap(), &style, &BTreeMap::new()).unwrap();
    assert!(made.weights[0].integers.is_none() && made.weights[0].remark.unwrap().contains("as dequantized floats"));
    assert_eq!(made.tensors(), 1);
}

#[test]
fn scales_become_floats_and_integers_are_external() {
    let pass = QuantizeDynamic { symmetric: false, ..QuantizeDynamic::default() };
    use compress::pass::Pass;
    let cast = Cast { to: FloatFormat::Bf16, ..Cast::default() };
    let out = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..64 * 48).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
    let state = RunState::default();
    let model = cast.plan(&one_layer(&out.path().join("m"), 64, 48, &values), &state).unwrap().model;
    let model = pass.plan(&model, &state).unwrap().model;
    let mut style = Style::default();
    for (name, weight) in &model.weights.by_name {
        if let Encoding::Quantized(affine) = &weight.encoding {
            assert_eq!(affine.scale_dtype, DType::BF16);
            style.integers.insert(name.clone(), affine.clone());
        }
    }
    let made = draft(&model.graph().unwrap(), &style, &BTreeMap::new()).unwrap();
    let item = |slot: &compress_onnx::InitializerLayout| {
        let weight = &model.weights.by_name[&slot.weight];
        let weight = match &slot.integers {
            None => {
                let source = compress_core::store::Decoded { upstream: weight.source(), dtype: DType::F32, name: slot.weight.clone() };
                weight.then(DType::F32, Encoding::Dense, std::sync::Arc::new(source))
            }
            Some(affine) => {
                let affine = QuantizationSpec { scale_dtype: DType::F32, ..affine.clone() };
                let source = Rescaled { upstream: weight.source(), affine: affine.clone(), name: slot.weight.clone() };
                weight.then(DType::F32, Encoding::Quantized(affine), std::sync::Arc::new(source))
            }
        };
        Item { name: slot.weight.clone(), weight, storage_format: slot.storage_format }
    };
    let items: Vec<Item> = made.weights.iter().map(item).collect();
    let layout = file::layout(&made, 1).unwrap();
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    write_pieces(&compress_core::files::Destination::local(out.path()), &layout, &items, &work).unwrap();
    let graph = ModelProto::decode(std::fs::read(out.path().join(file::MODEL)).unwrap().as_slice()).unwrap().graph.unwrap();
    let data = std::fs::read(out.path().join(file::DATA)).unwrap();
    let bytes = |t: &TensorProto| {
        let entry = |key: &str| t.external_data.iter().find(|e| e.key() == key).map(|e| e.value().to_owned());
        let Some(offset) = entry("offset") else { return t.raw_data().to_vec() };
        let (offset, length): (usize, usize) = (offset.parse().unwrap(), entry("length").unwrap().parse().unwrap());
        data[offset..offset + length].to_vec()
    };
    let (mut integers, mut outside) = (0, 0);
    for tensor in graph.initializer.iter().filter(|t| t.data_type() == DataType::Int8) {
        assert_eq!(bytes(tensor).len() as i64, tensor.dims.iter().product::<i64>(), "{}", tensor.name());
        integers += 1;
        outside += usize::from(!tensor.external_data.is_empty());
    }
    // Elements and zero points; only the former are large.
    assert_eq!((integers, outside), (2, 1));
    let mut integers = Vec::new();
    model.weights.by_name["fc.weight"]
        .visit(1, &mut |block| {
            integers.extend_from_slice(block.now.values);
            Ok(())
        })
        .unwrap();
    assert!(bytes(tensor(&graph, "fc.weight")) == transposed(&integers, 48));
    let scale = tensor(&graph, "fc.weight_scale");
    let scales: Vec<f32> = bytes(scale).as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
    assert!(scales.iter().all(|s| *s > 0.0 && s.to_bits() & 0xFFFF == 0), "{scales:?}");
}

#[test]
fn half_precision_inside_and_single_precision_outside() {
    let out = tempfile::tempdir().unwrap();
    let format = Onnx { precision: Precision::Float16, ..Onnx::default() };
    let pipeline = Pipeline::builder().export(format).build().unwrap();
    pipeline.run(Model::open(golden("torchvision-resnet18")).unwrap(), out.path().join("out")).unwrap();
    let graph = ModelProto::decode(std::fs::read(out.path().join("out/model.onnx")).unwrap().as_slice()).unwrap().graph.unwrap();
    let kind = |value: &compress_onnx::proto::ValueInfoProto| value.r#type.clone().unwrap().tensor_type.unwrap().elem_type();
    assert!(graph.input.iter().chain(&graph.output).all(|value| kind(value) == DataType::Float));
    for tensor in graph.initializer.iter().filter(|t| t.name().starts_with("layer") || t.name().starts_with("bn")) {
        let statistics = tensor.name().contains("running_");
        assert_eq!(tensor.data_type() == DataType::Float, statistics, "{}", tensor.name());
    }
    let given = &nodes(&graph, "Cast")[0];
    assert_eq!(given.input[0], graph.input[0].name());
    // Int8 layers compute in 32 bits, between casts; their biases are 32 bits wide.
    let (graph, _) = quantized("bert", &QuantizeDynamic::default(), format).unwrap();
    assert_eq!(tensor(&graph, "encoder.layer.0.attention.self.query.bias").data_type(), DataType::Float);
    assert_eq!(tensor(&graph, "embeddings.LayerNorm.weight").data_type(), DataType::Float16);
    assert_eq!(tensor(&graph, &format!("{QUERY}_scale")).data_type(), DataType::Float);
}

#[test]
fn values_that_overflow_16_bit_floats_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = one_layer(&folder.path().join("m"), 2, 2, &[1.0, 65_519.0, 70_000.0, 0.0]);
    let pipeline = Pipeline::builder().export(Onnx { precision: Precision::Float16, ..Onnx::default() }).build().unwrap();
    let error = pipeline.run(model, folder.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("`fc.weight`") && error.contains("7e4"), "{error}");
    assert!(!folder.path().join("out").exists());
}

/// Matrices of 16-bit floats are stored as such, and converted for arithmetic in 32 bits. The run compares
/// the file with the built-in executor.
#[test]
fn matrices_of_16_bits_are_converted_when_the_file_is_loaded() {
    let cast = || Cast { to: FloatFormat::F16, ..Cast::default() };
    let export = Onnx { float16_weights: true, ..Onnx::default() };
    let folder = tempfile::tempdir().unwrap();
    for (name, weight, bias) in [
        ("bert", QUERY, "encoder.layer.0.attention.self.query.bias"),
        ("gpt2", "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias"),
        ("resnet-basic", "embedder.embedder.convolution.weight", "embedder.embedder.normalization.weight"),
    ] {
        let out = folder.path().join(name);
        let model = Model::open(golden(name)).unwrap();
        let [weight, bias] = [weight, bias].map(|wanted| model.weights.by_name.keys().find(|known| known.ends_with(wanted)).unwrap().clone());
        let elements = model.weights.by_name[&weight].elements();
        Pipeline::builder().pass(cast()).export(export).build().unwrap().run(model, &out).unwrap();
        let graph = ModelProto::decode(std::fs::read(out.join(file::MODEL)).unwrap().as_slice()).unwrap().graph.unwrap();
        let stored = tensor(&graph, &format!("{weight}_float16"));
        assert_eq!((stored.data_type(), stored.raw_data().len()), (DataType::Float16, 2 * elements), "{name}");
        assert!(nodes(&graph, "Cast").iter().any(|node| node.output == [weight.clone()] && node.input == [stored.name()]), "{name}");
        assert_eq!(tensor(&graph, &bias).data_type(), DataType::Float, "{name}");
        // The weights of the file have 16 bits.
        let opened = Model::open(out.join(file::MODEL)).unwrap();
        assert_eq!(opened.weights.by_name[&weight].dtype, DType::F16, "{name}");
    }
    let both = Onnx { precision: Precision::Float16, ..export };
    let run = Pipeline::builder().pass(cast()).export(both).build().unwrap().run(Model::open(golden("bert")).unwrap(), folder.path().join("both"));
    assert!(run.err().unwrap().to_string().contains("float16_weights: has no effect with `precision: float16`"));
}

/// ONNX has no scales of blocks of several rows.
#[test]
fn integers_in_blocks_of_rows_are_written_as_floats() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in");
    one_layer(&path, 32, 64, &[0.0; 32 * 64]);
    let (codes, scales) = (vec![1; 32 * 64], [0.5f32; 4].map(f32::to_le_bytes).concat());
    let view = |dtype, shape: [usize; 2], bytes| safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    let tensors = [
        ("fc.weight", view(safetensors::Dtype::I8, [32, 64], codes.as_slice())),
        ("fc.weight_scale", view(safetensors::Dtype::F32, [2, 2], scales.as_slice())),
    ];
    safetensors::serialize_to_file(tensors, None, &path.join("model.safetensors")).unwrap();
    let weights = serde_json::json!({ "num_bits": 8, "type": "int", "symmetric": true, "strategy": "block", "block_structure": [16, 32] });
    let group = serde_json::json!({ "targets": ["Linear"], "weights": weights });
    let config = serde_json::json!({
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "config_groups": { "group_0": group }
    });
    std::fs::write(path.join("config.json"), serde_json::json!({ "quantization_config": config }).to_string()).unwrap();
    let pipeline = Pipeline::builder().export(Onnx::default()).measure(false).build().unwrap();
    let report = pipeline.run(Model::open(&path).unwrap(), folder.path().join("out")).unwrap();
    let bytes = std::fs::read(folder.path().join("out").join(file::MODEL)).unwrap();
    let graph = ModelProto::decode(bytes.as_slice()).unwrap().graph.unwrap();
    assert!(nodes(&graph, "DequantizeLinear").is_empty());
    assert!(graph.initializer.iter().any(|tensor| tensor.data_type() == DataType::Float && tensor.dims.iter().product::<i64>() == 32 * 64));
    assert!(report.notes.iter().any(|note| note.contains("1 integer weight dequantized, so that they are not smaller")), "{:?}", report.notes);
}

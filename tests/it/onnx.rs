//! Every golden model as ONNX: written, read back, and checked against the rules of the format.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use compress::export::Onnx;
use compress::{Model, Pipeline, Recipe};
use compress_core::store::Weight;
use compress_core::store::writer::{Item, write_pieces};
use compress_core::work::{Cancel, Silent, Work};
use compress_graph::ir::Graph;
use compress_onnx::proto::{DataType, Dimension, ModelProto};
use compress_onnx::{Draft, Precision, Style, draft, file};
use prost::Message;

const OPSETS: [u32; 8] = [17, 18, 19, 20, 21, 22, 23, 24];

fn folders() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    assert!(found.len() > 30, "the goldens are missing");
    found
}

fn plain(opset: u32) -> Style {
    Style { opset, ..Style::default() }
}

fn values(weight: &Weight) -> Vec<f32> {
    let mut values = vec![0f32; weight.elements()];
    let mut at = 0;
    weight
        .visit(1, &mut |block| {
            let count = block.now.elements();
            assert!(block.now.decode(0, &mut values[at..at + count]));
            at += count;
            Ok(())
        })
        .unwrap();
    values
}

fn export(folder: &Path, opset: u32, to: &Path) -> ModelProto {
    let pipeline = Pipeline::builder().export(Onnx { opset: Some(opset), ..Onnx::default() }).threads(2).build().unwrap();
    let report = pipeline.run(Model::open(folder).unwrap(), to).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    assert!(report.outputs.iter().all(|o| o.format == "onnx"));
    ModelProto::decode(std::fs::read(to.join(file::MODEL)).unwrap().as_slice()).unwrap()
}

#[test]
fn every_family_is_written_and_reads_back_bit_for_bit() {
    for folder in folders() {
        let model = Model::open(&folder).unwrap();
        let out = tempfile::tempdir().unwrap();
        let written = export(&folder, 17, &out.path().join("out"));
        let Draft { model: mut wanted, weights, .. } = draft(&model.graph().unwrap(), &plain(17), &BTreeMap::new()).unwrap();
        let mut graph = written.graph.clone().unwrap();
        let constants = wanted.graph.as_ref().unwrap().initializer.len();
        let tensors = graph.initializer.split_off(constants);
        wanted.metadata_props.clone_from(&written.metadata_props);
        assert_eq!(ModelProto { graph: Some(graph), ..written }, wanted, "{}", folder.display());
        assert_eq!(tensors.len(), weights.len());
        for (tensor, slot) in tensors.iter().zip(&weights) {
            let weight = &model.weights.by_name[&slot.weight];
            let mut expected = values(weight);
            let mut dims: Vec<i64> = weight.shape.iter().map(|d| *d as i64).collect();
            if slot.transposed() {
                let (rows, columns) = (weight.shape[0], weight.shape[1]);
                expected = (0..columns).flat_map(|c| (0..rows).map(move |r| r * columns + c)).map(|at| expected[at]).collect();
                dims.reverse();
            }
            assert_eq!(tensor.name.as_deref(), Some(slot.tensors[0].name.as_str()));
            assert_eq!(tensor.dims, dims, "{}", slot.weight);
            let bytes: Vec<u8> = expected.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert!(tensor.raw_data.as_deref() == Some(bytes.as_slice()), "{} of {}", slot.weight, folder.display());
        }
    }
}

/// Checks the rules of the format: nodes are in topological order, names are unique, results are used,
/// attributes have types.
fn assert_follows_rules(draft: &Draft, graph: &Graph, what: &str) {
    let body = draft.model.graph.as_ref().unwrap();
    let mut names = BTreeSet::new();
    let mut fresh = |name: &str| assert!(!name.is_empty() && names.insert(name.to_owned()), "{what}: `{name}` is written twice");
    body.input.iter().for_each(|input| fresh(input.name.as_deref().unwrap()));
    body.initializer.iter().for_each(|tensor| fresh(tensor.name.as_deref().unwrap()));
    draft.weights.iter().flat_map(|slot| &slot.tensors).for_each(|tensor| fresh(&tensor.name));
    let mut read = BTreeSet::new();
    let mut node_names = BTreeSet::new();
    for node in &body.node {
        let name = node.name.as_deref().unwrap();
        assert!(node_names.insert(name), "{what}: two nodes are named `{name}`");
        for input in &node.input {
            // The name of an omitted input is empty.
            assert!(input.is_empty() || names.contains(input), "{what}: `{name}` reads `{input}`, which does not exist yet");
            read.insert(input.clone());
        }
        for output in &node.output {
            assert!(names.insert(output.clone()), "{what}: `{output}` is written twice");
        }
        // Nodes of a body read their own values and those of the graph around it.
        let bodies = node.attribute.iter().filter_map(|attribute| attribute.g.as_ref());
        read.extend(bodies.flat_map(|body| &body.node).flat_map(|node| &node.input).filter(|input| names.contains(*input)).cloned());
        assert!(node.attribute.iter().all(|a| a.r#type.is_some_and(|kind| kind != 0)), "{what}: an attribute of `{name}` has no type");
    }
    let results: BTreeSet<&str> = body.output.iter().map(|o| o.name.as_deref().unwrap()).collect();
    assert!(results.iter().all(|name| names.contains(*name)), "{what}: an output is not computed");
    // Of a node with several results, one is used.
    let outputs = body.node.iter().filter(|node| node.output.iter().any(|output| read.contains(output))).flat_map(|node| &node.output);
    let read: BTreeSet<String> = outputs.cloned().chain(read.iter().cloned()).collect();
    let idle: Vec<&String> = names.iter().filter(|name| !read.contains(*name) && !results.contains(name.as_str())).collect();
    assert!(idle.iter().all(|name| body.input.iter().any(|i| i.name.as_ref() == Some(name))), "{what}: {idle:?} is not used");
    for tensor in &body.initializer {
        let size = match tensor.data_type() {
            DataType::Float => 4,
            DataType::Float16 => 2,
            DataType::Int64 | DataType::Double => 8,
            other => panic!("{what}: a constant of {other:?}"),
        };
        assert_eq!(tensor.raw_data.as_ref().unwrap().len() as i64, size * tensor.dims.iter().product::<i64>(), "{what}: {:?}", tensor.name);
    }
    let ones = body.initializer.iter().filter(|tensor| tensor.data_type() == DataType::Float && tensor.raw_data.as_deref() == Some(&1f32.to_le_bytes()));
    let ones: BTreeSet<&str> = ones.filter_map(|tensor| tensor.name.as_deref()).collect();
    let idle = body.node.iter().find(|node| node.op_type() == "Mul" && node.input.iter().any(|name| ones.contains(name.as_str())));
    assert!(idle.is_none(), "{what}: multiplies by one: {idle:?}");
    // Dynamic axes have the same names in the file as in the graph.
    let dims = body.input.iter().flat_map(|i| i.r#type.as_ref().unwrap().tensor_type.as_ref().unwrap().shape.as_ref().unwrap().dim.iter());
    assert!(
        dims.filter(|d| matches!(&d.value, Some(Dimension::DimParam(name)) if name == "batch")).count() >= graph.inputs().count(),
        "{what}: the batch is fixed"
    );
}

#[test]
fn the_graphs_keep_the_rules_of_the_format() {
    for folder in folders() {
        let graph = Model::open(&folder).unwrap().graph().unwrap();
        for opset in OPSETS {
            let what = format!("{} at opset {opset}", folder.file_name().unwrap().to_string_lossy());
            let half = draft(&graph, &Style { precision: Precision::Float16, ..plain(opset) }, &BTreeMap::new()).unwrap();
            assert_follows_rules(&half, &graph, &format!("{what}, 16 bits"));
            let draft = draft(&graph, &plain(opset), &BTreeMap::new()).unwrap();
            assert_follows_rules(&draft, &graph, &what);
            assert_eq!(draft.model.opset_import[0].version, Some(i64::from(opset)));
            assert_eq!(draft.model.ir_version, Some([8, 8, 9, 9, 10, 10, 11, 12][opset as usize - 17]));
            let nodes = &draft.model.graph.as_ref().unwrap().node;
            assert!(
                graph.nodes().iter().all(|n| nodes.iter().any(|o| o.name.as_ref() == Some(&graph.value(n.output).name))),
                "{what}: a node of the graph is not named"
            );
        }
    }
}

#[test]
fn names_of_outputs_do_not_collide() {
    let draft_of = |text: &str| draft(&text.parse().unwrap(), &plain(17), &BTreeMap::new());
    let text = "input x: float[batch, 4]\na = Relu(x) -> float[batch, 4]\na/relu = Tanh(a) -> float[batch, 4]\nb = Silu(a/relu) -> float[batch, 4]\noutput b = a\noutput c = b\noutput d = b\noutput e = x\n";
    let graph: Graph = text.parse().unwrap();
    let made = draft(&graph, &plain(17), &BTreeMap::new()).unwrap();
    assert_follows_rules(&made, &graph, "names");
    let outputs: Vec<_> = made.model.graph.unwrap().output.into_iter().map(|o| o.name.unwrap()).collect();
    assert_eq!(outputs, ["b", "c", "d", "e"]);
    let error = draft_of("input x: float[batch, 4]\na = Relu(x) -> float[batch, 4]\noutput x = a\n").unwrap_err().to_string();
    assert!(error.contains("`x`") && error.contains("rename"), "{error}");
    let error = draft(&graph, &plain(25), &BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("25") && error.contains("17 to 24"), "{error}");
}

#[test]
fn weights_of_large_models_are_external() {
    let folder = folders().into_iter().find(|f| f.ends_with("llama-grouped-tied")).unwrap();
    let model = Model::open(&folder).unwrap();
    let draft = draft(&model.graph().unwrap(), &plain(17), &BTreeMap::new()).unwrap();
    let item = |slot: &compress_onnx::InitializerLayout| Item {
        name: slot.weight.clone(),
        weight: model.weights.by_name[&slot.weight].clone(),
        storage_format: slot.storage_format,
    };
    let items: Vec<Item> = draft.weights.iter().map(item).collect();
    let out = tempfile::tempdir().unwrap();
    let layout = file::layout(&draft, 10_000).unwrap();
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let (files, _) = write_pieces(&compress_core::files::Destination::local(out.path()), &layout, &items, &work).unwrap();
    assert_eq!(files.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(), [file::MODEL, file::DATA]);
    let data = std::fs::read(out.path().join(file::DATA)).unwrap();
    let read = ModelProto::decode(std::fs::read(out.path().join(file::MODEL)).unwrap().as_slice()).unwrap();
    let whole = export(&folder, 17, &out.path().join("whole"));
    let mut beside = 0;
    for (tensor, inline) in read.graph.unwrap().initializer.iter().zip(whole.graph.unwrap().initializer) {
        let entry = |key: &str| tensor.external_data.iter().find(|e| e.key.as_deref() == Some(key)).and_then(|e| e.value.clone()).unwrap();
        assert_eq!((&tensor.name, &tensor.dims), (&inline.name, &inline.dims));
        if tensor.external_data.is_empty() {
            assert_eq!(tensor.raw_data, inline.raw_data);
            continue;
        }
        let (offset, length): (usize, usize) = (entry("offset").parse().unwrap(), entry("length").parse().unwrap());
        assert!(offset.is_multiple_of(4096) && entry("location") == file::DATA && tensor.raw_data.is_none());
        assert!(inline.raw_data.as_deref() == Some(&data[offset..offset + length]), "{:?}", tensor.name);
        beside += 1;
    }
    assert!(beside > 10, "{beside} tensors are external");
}

#[test]
fn recipes_name_opset_and_precision() {
    let recipe = |options: &str| Recipe::parse(&format!("model: m\nexport:\n  - onnx: {{ {options} }}\n"), Path::new("r.yaml"));
    assert_eq!(recipe("opset: 21").unwrap().export, [Onnx { opset: Some(21), ..Onnx::default() }.into()]);
    assert_eq!(recipe("precision: float16").unwrap().export, [Onnx { precision: Precision::Float16, ..Onnx::default() }.into()]);
    let error = recipe("opset: 25").unwrap_err().to_string();
    assert!(error.contains("17 to 24"), "{error}");
    let error = recipe("precision: float8").unwrap_err().to_string();
    assert!(error.contains("float8") && error.contains("float16"), "{error}");
}

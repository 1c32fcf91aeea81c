//! Layers in the bodies of `If`, `Loop` and `Scan`: their inputs are observed as values of a graph for
//! calibration, and quantized in the bodies.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{DType, Device, Tensor, TensorId};

use super::body_layers::{self, BodyLayer, body_at, node_of};
use super::check::{bodies, bodies_mut};
use super::opaque_subgraph::{LoadedSubgraph, OpaqueSubgraph};
use super::proto::{AttributeProto, DataType, NodeProto, TensorProto, TensorTypeProto, TypeProto, ValueInfoProto};
use crate::error::Result;
use crate::ir::ops::{FakeQuantize, Function, Opaque};
use crate::ir::{Catalog, Dim, Element, Graph, GraphFile, Kind, Node, Op, Rewrite, TensorType, rebuild};

/// Adds a value of a body to the outputs of the node that contains it, and returns its name there. Values of
/// loops are stacked. A branch that does not compute the value returns an empty one.
fn expose(nodes: &mut [NodeProto], within: &[(usize, usize)], value: &str, fresh: &mut dyn FnMut(String) -> String) -> Option<String> {
    let ((at, which), rest) = within.split_first()?;
    let node = nodes.get_mut(*at)?;
    let is_branch = node.op_type() == "If";
    let results = match node.op_type() {
        "If" | "Scan" => 0usize,
        // The first result of the body is the condition.
        "Loop" => 1,
        _ => return None,
    };
    let mut count = 0usize;
    for (number, body) in bodies_mut(node).enumerate() {
        let name = match number == *which {
            true if rest.is_empty() => {
                let name = fresh(format!("{value}/observed"));
                body.node.push(node_of("Identity", vec![value.to_owned()], &name, vec![]));
                name
            }
            true => expose(&mut body.node, rest, value, fresh)?,
            false if is_branch => {
                let name = fresh(format!("{value}/none"));
                let none = TensorProto { data_type: Some(DataType::Float as i32), dims: vec![0], raw_data: Some(Vec::new()), ..TensorProto::default() };
                body.node.push(node_of("Constant", vec![], &name, vec![AttributeProto::tensor("value", none)]));
                name
            }
            false => continue,
        };
        let tensor_type = Some(TensorTypeProto { elem_type: Some(DataType::Float as i32), shape: None });
        body.output.push(ValueInfoProto { name: Some(name), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() });
        count = body.output.len();
    }
    for attribute in node.attribute.iter_mut().filter(|attribute| ["scan_output_axes", "scan_output_directions"].contains(&attribute.name())) {
        attribute.ints.push(0);
    }
    while node.output.len() < count.saturating_sub(results) {
        node.output.push(fresh(format!("{value}/outer")));
    }
    node.output.last().cloned()
}

/// The inputs of a layer, as rows of channels.
#[derive(Debug)]
struct Observer {
    subgraph: Arc<ObservedSubgraph>,
    output: String,
    channels: usize,
    /// Number of axes after that of the channels.
    spatial: usize,
}

/// The inputs of a run, and its results by name.
type Run = (Vec<TensorId>, BTreeMap<String, Tensor>);

/// A subgraph that also returns values of its bodies.
#[derive(Debug)]
struct ObservedSubgraph {
    loaded: LoadedSubgraph,
    /// The inputs and results of the last run, which all observers share.
    last: Mutex<Option<Run>>,
    /// Why a run failed.
    failed: OnceLock<String>,
}

impl ObservedSubgraph {
    fn value(&self, output: &str, inputs: &[Tensor]) -> Result<Tensor, String> {
        let ids: Vec<TensorId> = inputs.iter().map(Tensor::id).collect();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(known, _)| *known != ids) {
            *last = Some((ids, self.loaded.run_all(inputs, None)?));
        }
        let value = last.as_ref().and_then(|(_, outputs)| outputs.get(output).cloned());
        value.ok_or_else(|| format!("`{output}` is not a numeric tensor"))
    }
}

impl Observer {
    fn rows(&self, inputs: &[Tensor]) -> Result<Tensor, String> {
        let value = self.subgraph.value(&self.output, inputs)?;
        let axis = value.rank().checked_sub(self.spatial).and_then(|axis| axis.checked_sub(1));
        let Some(axis) = axis.filter(|_| value.elem_count() > 0) else { return self.none(inputs) };
        let order: Vec<usize> = (0..value.rank()).filter(|other| *other != axis).chain([axis]).collect();
        let rows = value.to_dtype(DType::F32).and_then(|value| value.permute(order)?.contiguous()?.reshape(((), self.channels)));
        rows.map_err(|e| e.to_string())
    }

    fn none(&self, inputs: &[Tensor]) -> Result<Tensor, String> {
        let device = inputs.first().map_or(Device::Cpu, |input| input.device().clone());
        Tensor::zeros((0, self.channels), DType::F32, &device).map_err(|e| e.to_string())
    }
}

impl Function for Observer {
    fn shape(&self, _: &[Vec<usize>]) -> Result<Vec<usize>, String> {
        Err("its number of rows depends on values".into())
    }

    fn has_open_shape(&self) -> bool {
        true
    }

    /// Without rows if the layer is not computed or the run fails, see [`failures`].
    fn run(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let rows = self.rows(inputs).or_else(|reason| {
            let _ = self.subgraph.failed.set(reason);
            self.none(inputs)
        });
        rows.map_err(candle_core::Error::Msg)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The value of [`observed`] that contains the inputs of a layer.
pub fn observed_input(weight: &str) -> String {
    format!("{weight}/input")
}

/// Adds nodes that return the inputs of layers in bodies, as rows of channels, see [`observed_input`].
pub fn observed(graph: &Graph, catalog: &dyn Catalog, weights: &BTreeSet<String>) -> Result<Graph> {
    let known = layers(graph);
    let mut added = Vec::new();
    for node in graph.nodes() {
        let Op::Opaque(op) = &node.op else { continue };
        let Some(subgraph) = subgraph(op) else { continue };
        let of_node: Vec<BodyLayer> = body_layers::layers(subgraph.parts())
            .into_iter()
            .filter(|layer| weights.contains(&layer.weight) && known.get(&layer.weight) == Some(layer))
            .collect();
        let inputs: Vec<String> = node.inputs.iter().map(|id| graph.value(*id).name.clone()).collect();
        for (name, op) in observers(op, subgraph, &of_node) {
            added.push((name, op.into(), inputs.clone()));
        }
    }
    GraphFile::from(graph).extended(added).build(catalog)
}

/// Observers of these layers. Layers whose inputs cannot be observed have none.
fn observers(op: &Opaque, subgraph: &OpaqueSubgraph, layers: &[BodyLayer]) -> Vec<(String, Opaque)> {
    let mut parts = subgraph.parts().clone();
    let mut taken: BTreeSet<String> = parts.inputs.iter().map(|(name, _)| name.clone()).collect();
    parts.nodes.iter().for_each(|node| names_of(node, &mut taken));
    let mut fresh = |wanted: String| super::fresh(&mut taken, wanted);
    let mut exposed = Vec::new();
    for layer in layers {
        let input = body_at(&mut parts.nodes, &layer.position.within).and_then(|body| body.node.get(layer.position.node)?.input.first().cloned());
        let output = input.and_then(|input| expose(&mut parts.nodes, &layer.position.within, &input, &mut fresh));
        let shape: Option<Vec<usize>> = op.inputs.get(layer.input).and_then(|ty| ty.shape.iter().map(Dim::fixed).collect());
        let Some((output, shape)) = output.zip(shape) else { continue };
        let Some(channels) = shape.get(1).map(|inputs| inputs.saturating_mul(layer.groups.unwrap_or(1))) else { continue };
        exposed.push((observed_input(&layer.weight), output, channels, shape.len().saturating_sub(2)));
    }
    parts.outputs = exposed.iter().map(|(_, output, ..)| output.clone()).collect();
    let Ok(loaded) = LoadedSubgraph::new(parts, &op.inputs, subgraph.path(), true) else { return Vec::new() };
    let observed = Arc::new(ObservedSubgraph { loaded, last: Mutex::new(None), failed: OnceLock::new() });
    let observer = |(name, output, channels, spatial): (String, String, usize, usize)| {
        let ty = TensorType { element: Element::Float, shape: vec![Dim::Named("observed_rows".into()), Dim::Fixed(channels)] };
        let function = Observer { subgraph: observed.clone(), output, channels, spatial };
        (name, Opaque { output: Some(ty), function: Some(Arc::new(function)), quantizers: BTreeMap::new(), ..op.clone() })
    };
    exposed.into_iter().map(observer).collect()
}

/// All names of values in a node and its bodies.
fn names_of(node: &NodeProto, names: &mut BTreeSet<String>) {
    names.extend(node.input.iter().chain(&node.output).cloned());
    bodies(node).for_each(|body| super::check::names(body, names));
}

/// Why the inputs of layers could not be observed for all samples, by the names of the weights. A graph of
/// [`observed`] is required that has run.
pub fn failures(graph: &Graph) -> BTreeMap<String, String> {
    let failure = |node: &Node| {
        let Op::Opaque(op) = &node.op else { return None };
        let reason = op.function.as_ref()?.as_any().downcast_ref::<Observer>()?.subgraph.failed.get()?;
        Some((graph.value(node.output).name.clone(), reason.clone()))
    };
    graph.nodes().iter().filter_map(failure).collect()
}

fn subgraph(op: &Opaque) -> Option<&OpaqueSubgraph> {
    op.function.as_ref()?.as_any().downcast_ref::<OpaqueSubgraph>()
}

/// The layers in bodies of the subgraphs of a graph, by the names of their weights, which no other node
/// reads.
pub fn layers(graph: &Graph) -> BTreeMap<String, BodyLayer> {
    let mut readers: BTreeMap<_, usize> = BTreeMap::new();
    for id in graph.nodes().iter().flat_map(|node| &node.inputs).chain(graph.outputs().iter().map(|(_, id)| id)) {
        let count = readers.entry(*id).or_default();
        *count = count.saturating_add(1);
    }
    let of = |node: &Node| {
        let Op::Opaque(op) = &node.op else { return Vec::new() };
        let mut found = subgraph(op).map(|subgraph| body_layers::layers(subgraph.parts())).unwrap_or_default();
        let is_own = |layer: &BodyLayer| {
            let weight = node.inputs.get(layer.input).filter(|id| readers.get(id) == Some(&1)).map(|id| graph.value(*id));
            weight.is_some_and(|value| value.kind == Kind::Param && value.name == layer.weight)
        };
        found.retain(is_own);
        found
    };
    graph.nodes().iter().flat_map(of).map(|layer| (layer.weight.clone(), layer)).collect()
}

/// Quantizes the inputs of layers in bodies, by the names of the weights.
pub fn quantized(graph: &Graph, catalog: &dyn Catalog, quantizers: &BTreeMap<String, FakeQuantize>) -> Result<Graph> {
    if quantizers.is_empty() {
        return Ok(graph.clone());
    }
    rebuild(graph, catalog, &mut |step: Rewrite| {
        let Op::Opaque(op) = &step.node.op else { return step.copy() };
        let own = subgraph(op).map(|subgraph| body_layers::layers(subgraph.parts())).unwrap_or_default();
        let own = own.into_iter().filter_map(|layer| Some((layer.weight.clone(), *quantizers.get(&layer.weight)?)));
        // A pass before may have quantized other layers of the subgraph.
        let all = op.quantizers.clone().into_iter().chain(own).collect();
        let op = op.clone().with_quantizers(all).map_err(|reason| crate::error::Error::graph(format!("graph node `{}`", step.name), reason))?;
        step.builder.node(step.name, op, &step.inputs)
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use prost::Message;

    use super::super::file::{LARGEST, decode, layout};
    use super::super::model_file::ModelFile;
    use super::super::proto::{GraphProto, ModelProto, OperatorSetIdProto};
    use super::super::{Style, draft};
    use super::*;
    use crate::ir::OpSpec;
    use crate::runtime::{Options, Session};
    use crate::store::{ActivationScheme, Codes, DType as Stored, Granularity, QuantizationSpec};

    fn node(op: &str, input: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
        node_of(op, input.iter().map(|name| (*name).to_owned()).collect(), output, attribute)
    }

    fn port(name: &str, ty: DataType, rank: usize) -> ValueInfoProto {
        use super::super::proto::{Dimension, DimensionProto, TensorShapeProto};
        let size = |axis: usize| if axis == 0 { Dimension::DimParam("n".into()) } else { Dimension::DimValue(4) };
        let dim = (0..rank).map(|axis| DimensionProto { value: Some(size(axis)), denotation: None }).collect();
        let tensor_type = Some(TensorTypeProto { elem_type: Some(ty as i32), shape: Some(TensorShapeProto { dim }) });
        ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
    }

    fn body(attribute: &str, nodes: Vec<NodeProto>, input: Vec<ValueInfoProto>, output: Vec<ValueInfoProto>) -> AttributeProto {
        let graph = GraphProto { name: Some(attribute.into()), node: nodes, input, output, ..GraphProto::default() };
        AttributeProto { g: Some(graph), i: None, r#type: Some(5), ..AttributeProto::int(attribute, 0) }
    }

    fn weight(name: &str) -> TensorProto {
        let bytes = (0..16).flat_map(|at| (at as f32 * 0.37 + 0.1).sin().to_le_bytes()).collect();
        TensorProto { name: Some(name.into()), data_type: Some(1), dims: vec![4, 4], raw_data: Some(bytes), ..TensorProto::default() }
    }

    /// A graph with these nodes from `x` to `y`, and the weights `v` and `w`.
    fn lifted(nodes: Vec<NodeProto>, more: Vec<TensorProto>) -> (tempfile::TempDir, ModelFile, Graph) {
        let graph = GraphProto {
            name: Some("g".into()),
            node: nodes,
            initializer: [vec![weight("v"), weight("w")], more].concat(),
            input: vec![port("x", DataType::Float, 2)],
            output: vec![port("y", DataType::Float, 2)],
            ..GraphProto::default()
        };
        let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(13) }];
        let model = ModelProto { ir_version: Some(7), graph: Some(graph), opset_import, ..ModelProto::default() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let file = ModelFile::open(&path).unwrap();
        let graph = file.lift(&file.all_weights()).unwrap();
        (folder, file, graph)
    }

    /// The value of a node that reads `x`, numbers and weights.
    fn computed(file: &ModelFile, graph: &Graph, name: &str) -> Tensor {
        let node = graph.nodes().iter().find(|node| graph.value(node.output).name == name).unwrap();
        let weights = file.all_weights();
        let input = |id: &crate::ir::ValueId| {
            let value = graph.value(*id);
            match weights.by_name.get(&value.name) {
                Some(weight) => Tensor::from_vec(weight.floats(&value.name).unwrap(), weight.shape.as_slice(), &Device::Cpu).unwrap(),
                None if value.ty.shape.is_empty() => Tensor::new(1f32, &Device::Cpu).unwrap(),
                None => Tensor::from_vec((0..12).map(|at| (at as f32 * 0.7).cos()).collect(), (3, 4), &Device::Cpu).unwrap(),
            }
        };
        let Op::Opaque(op) = &node.op else { panic!("{name} has a typed form") };
        op.eval(&node.inputs.iter().map(input).collect::<Vec<_>>()).unwrap()
    }

    /// Observes and quantizes `v` and `w`, and writes the graph with integer weights. Returns the inputs of
    /// the layers and the operators in the bodies.
    fn check(file: &ModelFile, graph: &Graph) -> ([Tensor; 2], Vec<String>) {
        let weights = file.all_weights();
        assert_eq!(layers(graph).into_keys().collect::<Vec<_>>(), ["v", "w"]);
        let observed = observed(graph, &weights, &["v", "w"].map(str::to_owned).into()).unwrap();
        let inputs = ["v", "w"].map(|weight| computed(file, &observed, &observed_input(weight)));
        assert_eq!(failures(&observed), BTreeMap::new());
        let by = FakeQuantize { scale: 0.02, zero_point: 3 };
        let one = |graph: &Graph, name: &str| quantized(graph, &weights, &[(name.to_owned(), by)].into()).unwrap();
        let in_turn = one(&one(graph, "v"), "w");
        let quantized = quantized(graph, &weights, &["v", "w"].map(|name| (name.to_owned(), by)).into()).unwrap();
        let name = graph.value(graph.nodes().last().unwrap().output).name.clone();
        let [before, after] = [graph, &quantized].map(|graph| computed(file, graph, &name).flatten_all().unwrap().to_vec1::<f32>().unwrap());
        let differences: Vec<f32> = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).collect();
        assert!(differences.iter().all(|difference| *difference < 0.1) && differences.iter().any(|difference| *difference > 0.0), "{before:?} {after:?}");
        assert_eq!(computed(file, &in_turn, &name).flatten_all().unwrap().to_vec1::<f32>().unwrap(), after);
        // JSON contains the quantizers, and functions are restored with them.
        let text = serde_json::to_string(&GraphFile::from(&quantized)).unwrap();
        let restored: GraphFile = serde_json::from_str(&text).unwrap();
        let restored = restored.with_functions(&|| Ok(graph.clone())).unwrap().build(&weights).unwrap();
        assert_eq!(computed(file, &restored, &name).flatten_all().unwrap().to_vec1::<f32>().unwrap(), after);
        let spec = QuantizationSpec {
            codes: Codes::INT8,
            granularity: Granularity::Channel,
            symmetric: true,
            scale_dtype: Stored::F32,
            activations: ActivationScheme::None,
        };
        let style = Style { integers: ["v", "w"].map(|name| (name.to_owned(), spec.clone())).into(), ..Style::default() };
        let written = decode(&layout(&draft(&quantized, &style, &BTreeMap::new()).unwrap(), LARGEST).unwrap()[0].1).unwrap();
        Session::from_model(&written, Path::new("model.onnx"), Options::default()).unwrap_or_else(|e| panic!("{e}: {written:?}"));
        let graph = written.graph.unwrap();
        let integers = graph.initializer.iter().filter(|tensor| ["v", "w"].contains(&tensor.name())).map(TensorProto::data_type);
        assert_eq!(integers.collect::<Vec<_>>(), [DataType::Int8; 2]);
        let ops = graph.node.iter().flat_map(bodies).flat_map(|body| &body.node).map(|node| node.op_type().to_owned());
        (inputs, ops.collect())
    }

    const INSERTED: [&str; 4] = ["QuantizeLinear", "DequantizeLinear", "Reshape", "DequantizeLinear"];

    #[test]
    fn layers_of_loops_are_observed_and_quantized() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let nodes = vec![
            node("Identity", &["go"], "goes", vec![]),
            node("MatMul", &["state", "v"], "a", vec![]),
            node("Gemm", &["a", "w"], "b", vec![AttributeProto::int("transB", 1)]),
            node("Tanh", &["b"], "next", vec![]),
        ];
        let ports = vec![port("i", DataType::Int64, 0), port("go", DataType::Bool, 0), port("state", DataType::Float, 2)];
        let results = vec![port("goes", DataType::Bool, 0), port("next", DataType::Float, 2)];
        let trips = TensorProto { name: Some("trips".into()), data_type: Some(7), int64_data: vec![2], ..TensorProto::default() };
        let (_folder, file, graph) = lifted(vec![node("Loop", &["trips", "", "x"], "y", vec![body("body", nodes, ports, results)])], vec![trips]);
        let ([v, w], ops) = check(&file, &graph);
        // Three rows in each of two iterations.
        assert_eq!((v.dims(), w.dims()), (&[6, 4][..], &[6, 4][..]));
        let first: Vec<f32> = v.narrow(0, 0, 3).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(first, (0..12).map(|at| (at as f32 * 0.7).cos()).collect::<Vec<_>>());
        let expected = [&["Identity"][..], &INSERTED, &["MatMul"], &INSERTED, &["Gemm", "Tanh"]].concat();
        assert_eq!(ops, expected);
    }

    /// The second branch runs. Its body contains another one, in which `w` is.
    #[test]
    fn layers_of_branches_are_observed_if_they_run() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let branch = |attribute: &str, nodes: Vec<NodeProto>, output: &str| body(attribute, nodes, vec![], vec![port(output, DataType::Float, 2)]);
        let inner = vec![
            branch("then_branch", vec![node("Neg", &["x"], "n", vec![])], "n"),
            branch("else_branch", vec![node("MatMul", &["e", "w"], "m", vec![])], "m"),
        ];
        let outer = vec![node("Relu", &["x"], "e", vec![]), node("If", &["small"], "f", inner)];
        let limit = TensorProto { name: Some("limit".into()), data_type: Some(1), float_data: vec![-9.0], ..TensorProto::default() };
        let nodes = vec![
            node("ReduceMax", &["x"], "largest", vec![AttributeProto::int("keepdims", 0)]),
            node("Less", &["largest", "limit"], "small", vec![]),
            node("If", &["small"], "y", vec![branch("then_branch", vec![node("MatMul", &["x", "v"], "t", vec![])], "t"), branch("else_branch", outer, "f")]),
        ];
        let (_folder, file, graph) = lifted(nodes, vec![limit]);
        let ([v, w], _) = check(&file, &graph);
        assert_eq!((v.dims(), w.dims()), (&[0, 4][..], &[3, 4][..]));
    }
}

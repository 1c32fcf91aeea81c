//! The state of lowering: names, constants, and values that nodes share.

use std::collections::{BTreeMap, BTreeSet};

use super::initializer_layout::InitializerLayout;
use super::kv_cache::KvCache;
use super::proto::{AttributeProto, DataType, GraphProto, NodeProto, TensorProto};
use super::style::{Cache, Precision, Style, TiedHead};
use crate::error::{Error, Result};
use crate::ir::ops::{Binary, BinaryKind};
use crate::ir::{Element, Graph, Kind, Node, Op, TensorType, ValueId};

/// An ONNX graph under construction, and the node that is being lowered.
pub(super) struct Lowering<'g> {
    pub graph: &'g Graph,
    pub opset: u32,
    /// Whether floats have 16 bits.
    pub half: bool,
    /// Whether activations are quantized to int8 instead of uint8.
    pub signed: bool,
    /// The number of output heads that share an int8 table and multiply integers, if this is enabled.
    pub integer_heads: Option<usize>,
    /// The KV cache, if the file has one.
    pub cache: Option<KvCache>,
    /// Names of the graph's values, by position.
    pub names: Vec<String>,
    used_names: BTreeSet<String>,
    /// Names of values in the graph.
    value_names: BTreeSet<&'g str>,
    /// Storage of the parameters, by position.
    pub layouts: BTreeMap<usize, Vec<InitializerLayout>>,
    pub nodes: Vec<NodeProto>,
    pub constants: Vec<TensorProto>,
    /// Requested operator set versions of other domains.
    pub imports: BTreeMap<String, i64>,
    /// The consumers of each value, by position.
    readers: Vec<Vec<&'g Node>>,
    /// Whether each value depends on a model input, by position.
    varies: Vec<bool>,
    shared: BTreeMap<String, Vec<String>>,
    /// Whether casts between integer layers of a file with 16-bit floats are omitted.
    pub(super) keeps_wide: bool,
    /// The 32-bit values from which values of 16 bits were cast, by the names of the latter.
    pub(super) wide_values: BTreeMap<String, String>,
    scope: String,
    node: Option<&'g Node>,
}

impl<'g> Lowering<'g> {
    pub fn new(graph: &'g Graph, style: &Style, names: Vec<String>, used_names: BTreeSet<String>, layouts: BTreeMap<usize, Vec<InitializerLayout>>) -> Self {
        let mut readers = vec![Vec::new(); graph.values().len()];
        let mut varies: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Input).collect();
        for node in graph.nodes() {
            node.inputs.iter().for_each(|id| readers[id.index()].push(node));
            varies[node.output.index()] = node.inputs.iter().any(|id| varies[id.index()]);
        }
        let half = style.precision == Precision::Float16;
        Self {
            graph,
            opset: style.opset,
            half,
            signed: style.signed,
            integer_heads: (style.tied_head == TiedHead::Int8).then_some(0),
            cache: (style.cache != Cache::None).then(|| KvCache { after_encoder: style.cache == Cache::AfterEncoder, ..KvCache::default() }),
            names,
            used_names,
            value_names: graph.values().iter().map(|value| value.name.as_str()).collect(),
            layouts,
            nodes: Vec::new(),
            constants: Vec::new(),
            imports: BTreeMap::new(),
            readers,
            varies,
            shared: BTreeMap::new(),
            keeps_wide: half && graph.nodes().iter().any(|node| matches!(node.op, Op::FakeQuantize(_))),
            wide_values: BTreeMap::new(),
            scope: String::new(),
            node: None,
        }
    }

    /// Whether the graph has a value of this name.
    pub fn has_value(&self, name: &str) -> bool {
        self.value_names.contains(name)
    }

    /// Starts lowering a node.
    pub fn enter(&mut self, node: &'g Node) {
        self.scope.clone_from(&self.graph.value(node.output).name);
        self.node = Some(node);
    }

    /// Name of the current node's input.
    pub fn input(&self, index: usize) -> String {
        self.operand(index).map_or(String::new(), |id| self.names[id].clone())
    }

    /// Number of inputs of the current node.
    pub fn inputs(&self) -> usize {
        self.node.map_or(0, |node| node.inputs.len())
    }

    /// Storage of the parameter that an input refers to; `None` if it is not a parameter.
    pub fn layout(&self, index: usize) -> Option<&InitializerLayout> {
        self.layouts_of(index).first()
    }

    /// All layouts of the parameter that an input refers to.
    pub fn layouts_of(&self, index: usize) -> &[InitializerLayout] {
        self.operand(index).and_then(|id| self.layouts.get(&id)).map_or(&[], Vec::as_slice)
    }

    /// The current node.
    pub fn node(&self) -> Option<&'g Node> {
        self.node
    }

    /// Number of node inputs that refer to a value.
    pub fn reads(&self, value: ValueId) -> usize {
        self.readers[value.index()].len()
    }

    /// Whether an input of the current node depends on a model input.
    pub fn varies(&self, index: usize) -> bool {
        self.operand(index).is_none_or(|id| self.varies[id])
    }

    /// Number of consumers of an input of the current node that depend on a model input.
    pub fn varying_readers(&self, index: usize) -> usize {
        self.operand(index).map_or(0, |id| self.readers[id].iter().filter(|node| self.varies[node.output.index()]).count())
    }

    /// Whether the current node is the first linear layer or convolution with its weight. ONNX Runtime
    /// names integer kernels after the weight and refuses duplicates, so later layers must read floats.
    pub fn is_first_layer_of_weight(&self) -> bool {
        let is_layer = |node: &&Node| matches!(node.op, Op::Linear(_) | Op::Conv(_)) && self.varies[node.output.index()];
        let readers = self.operand(1).map_or(&[][..], |id| self.readers[id].as_slice());
        let first = readers.iter().copied().find(|node| is_layer(node) && node.inputs.get(1).map(|id| id.index()) == self.operand(1));
        first.map(|node| node.output) == self.node.map(|node| node.output)
    }

    /// Whether the only consumer of the current node's value is a layer normalization.
    pub fn feeds_layer_norm(&self) -> bool {
        let Some(output) = self.node.map(|node| node.output) else { return false };
        let public = self.graph.outputs().iter().any(|(_, id)| *id == output);
        !public && matches!(self.readers[output.index()][..], [Node { op: Op::LayerNorm(_), .. }])
    }

    /// Whether the first input of the current node is the difference of two values.
    pub fn reads_difference(&self) -> bool {
        let producer = self.operand(0).and_then(|id| self.graph.nodes().iter().find(|node| node.output.index() == id));
        matches!(producer, Some(Node { op: Op::Binary(Binary { kind: BinaryKind::Sub }), .. }))
    }

    /// Position of the value that an input refers to.
    fn operand(&self, index: usize) -> Option<usize> {
        self.node.and_then(|node| node.inputs.get(index)).map(|id| id.index())
    }

    /// Type of an input.
    pub fn ty(&self, index: usize) -> Result<&'g TensorType> {
        let graph = self.graph;
        self.operand(index).map(|id| &graph.values()[id].ty).ok_or_else(|| self.node_error(format!("has no input {index}")))
    }

    /// A size of an input, which must be fixed.
    pub fn fixed(&self, index: usize, axis: usize) -> Result<i64> {
        let ty = self.ty(index)?;
        ty.shape
            .get(axis)
            .and_then(|d| d.fixed())
            .map(|d| d as i64)
            .ok_or_else(|| self.node_error(format!("axis {axis} of its input {ty} must have a fixed size in ONNX: fix it in the inputs of the graph")))
    }

    /// The last size of an input, which must be fixed.
    pub fn width(&self, index: usize) -> Result<i64> {
        self.fixed(index, self.ty(index)?.shape.len().saturating_sub(1))
    }

    pub fn node_error(&self, reason: String) -> Error {
        Error::option(format!("graph node `{}`", self.scope), reason)
    }

    /// Returns a unique name.
    pub fn fresh(&mut self, wanted: String) -> String {
        super::fresh(&mut self.used_names, wanted)
    }

    /// Adds an operator, in 32 bits if its float inputs were cast from 32 bits, see
    /// [`wide_operands`](Self::wide_operands).
    fn push(&mut self, op: &str, name: String, inputs: &[&str], outputs: Vec<String>, attributes: Vec<AttributeProto>) {
        match (self.wide_operands(op, inputs), &outputs[..]) {
            (Some(inputs), [output]) => {
                let wide = self.fresh(format!("{output}/wide"));
                let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
                self.add_node(op, wide.clone(), &inputs, vec![wide.clone()], attributes);
                self.add_narrow(name, wide, output.clone());
            }
            _ => self.add_node(op, name, inputs, outputs, attributes),
        }
    }

    pub(super) fn add_node(&mut self, op: &str, name: String, inputs: &[&str], outputs: Vec<String>, attributes: Vec<AttributeProto>) {
        let input = inputs.iter().map(|i| (*i).to_owned()).collect();
        let (domain, op) = op.split_once("::").map_or((None, op), |(domain, op)| (Some(domain.to_owned()), op));
        self.nodes.push(NodeProto {
            input,
            output: outputs,
            name: Some(name),
            op_type: Some(op.to_owned()),
            attribute: attributes,
            domain,
            ..NodeProto::default()
        });
    }

    /// Adds an operator for an intermediate value of the current node, and returns its name.
    pub fn emit(&mut self, op: &str, part: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let name = self.fresh(format!("{}/{part}", self.scope));
        self.push(op, name.clone(), inputs, vec![name.clone()], attributes);
        name
    }

    /// Adds an operator with several outputs.
    pub fn emit_many<const N: usize>(&mut self, op: &str, parts: [&str; N], inputs: &[&str], attributes: Vec<AttributeProto>) -> [String; N] {
        let names = parts.map(|part| self.fresh(format!("{}/{part}", self.scope)));
        self.push(op, names[0].clone(), inputs, names.to_vec(), attributes);
        names
    }

    /// Adds a cast.
    pub fn cast(&mut self, part: &str, x: &str, to: DataType) -> String {
        self.emit("Cast", part, &[x], vec![AttributeProto::int("to", to as i64)])
    }

    /// Casts a value to 32 bits if the model has 16-bit floats.
    pub fn wide(&mut self, x: &str) -> Result<String> {
        if !self.half || self.is_wide(x) {
            return Ok(self.wide_name(x).to_owned());
        }
        self.share(&format!("{x}/wide|"), |n| Ok(n.cast("value", x, DataType::Float)))
    }

    /// Casts a 32-bit value to the precision of the model.
    pub fn narrow(&mut self, part: &str, x: String) -> String {
        if self.half { self.cast(part, &x, DataType::Float16) } else { x }
    }

    /// [`finish`](Self::finish) for an operator with 32-bit inputs.
    pub fn finish_wide(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        if !self.half {
            return self.finish(op, inputs, attributes);
        }
        let wide = self.emit(op, "wide", inputs, attributes);
        self.add_narrow(self.scope.clone(), wide, self.output());
    }

    /// [`finish_wide`](Self::finish_wide) for the output with this index.
    pub fn finish_wide_at(&mut self, op: &str, index: usize, inputs: &[&str], attributes: Vec<AttributeProto>) {
        let name = if self.half { self.fresh(format!("{}/wide", self.scope)) } else { self.output() };
        let mut outputs = vec![String::new(); index];
        outputs.push(name.clone());
        self.push(op, self.scope.clone(), inputs, outputs, attributes);
        if self.half {
            self.finish("Cast", &[&name], vec![AttributeProto::int("to", DataType::Float16 as i64)]);
        }
    }

    /// Marks the names in a body as taken.
    pub fn reserve(&mut self, body: &GraphProto) {
        super::check::names(body, &mut self.used_names);
    }

    /// Name of the current node's value.
    pub fn output(&self) -> String {
        self.node.map_or(String::new(), |node| self.names[node.output.index()].clone())
    }

    /// Casts a model input from another float type to that of the model.
    pub fn convert_input(&mut self, value: usize, public: &str, from: DataType) {
        public.clone_into(&mut self.scope);
        let (part, to) = if self.half { ("half", DataType::Float16) } else { ("float", DataType::Float) };
        self.names[value] = self.cast(part, public, to);
        if self.keeps_wide && from == DataType::Float {
            self.wide_values.insert(self.names[value].clone(), public.to_owned());
        }
    }

    /// Adds the operator that computes a parameter, under its name.
    pub fn compute(&mut self, value: usize, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        let name = self.names[value].clone();
        self.push(op, name.clone(), inputs, vec![name], attributes);
    }

    /// The layout of a parameter that is computed from its tensors, which are palettes or 16-bit floats, and
    /// whose computation is written next; `None` for other parameters.
    pub fn enter_computed(&mut self, value: usize) -> Option<InitializerLayout> {
        let slot = self.layouts.get(&value)?.iter().find(|slot| slot.palette.is_some() || slot.widened)?.clone();
        self.scope.clone_from(&self.names[value]);
        Some(slot)
    }

    /// Adds the operator that computes the current node's value.
    pub fn finish(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        self.push(op, self.scope.clone(), inputs, vec![self.output()], attributes);
    }

    /// Adds the operator that computes a model output.
    pub fn publish(&mut self, public: &str, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        // A node has the name of the graph value that it computes, which may be that of an output.
        let is_used = self.nodes.iter().any(|node| node.name() == public);
        let name = if is_used { self.fresh(format!("{public}/output")) } else { public.to_owned() };
        self.push(op, name, inputs, vec![public.to_owned()], attributes);
        public.to_owned()
    }

    /// Adds a model output that copies a value. Floats are cast to this type, or to 32 bits.
    pub fn alias(&mut self, value: usize, public: &str, ty: Option<DataType>) {
        let name = self.names[value].clone();
        // The same output may be listed twice.
        if name == public {
            return;
        }
        let float = if self.half { DataType::Float16 } else { DataType::Float };
        let wanted = ty.unwrap_or(DataType::Float);
        let is_wide = wanted == DataType::Float && self.is_wide(&name);
        let is_other = self.graph.values()[value].ty.element == Element::Float && wanted != float && !is_wide;
        let (op, attributes) = if is_other { ("Cast", vec![AttributeProto::int("to", wanted as i64)]) } else { ("Identity", vec![]) };
        let name = if is_wide { self.wide_name(&name).to_owned() } else { name };
        self.publish(public, op, &[&name], attributes);
    }

    /// Returns a value that several nodes share. It is written on first use, under the name of the key.
    pub fn share(&mut self, key: &str, write: impl FnOnce(&mut Self) -> Result<String>) -> Result<String> {
        self.share_many(key, |n| Ok([write(n)?])).map(|[name]| name)
    }

    /// [`share`](Self::share) for several values.
    pub fn share_many<const N: usize>(&mut self, key: &str, write: impl FnOnce(&mut Self) -> Result<[String; N]>) -> Result<[String; N]> {
        if let Some(names) = self.shared.get(key).and_then(|names| names.clone().try_into().ok()) {
            return Ok(names);
        }
        let scope = std::mem::replace(&mut self.scope, key.split('|').next().unwrap_or(key).to_owned());
        let names = write(self);
        self.scope = scope;
        let names = names?;
        self.shared.insert(key.to_owned(), names.to_vec());
        Ok(names)
    }

    /// Adds a constant that is never shared.
    fn unique_constant(&mut self, wanted: String, kind: DataType, dims: Vec<i64>, bytes: Vec<u8>) -> String {
        let name = self.fresh(wanted);
        let tensor = TensorProto { dims, data_type: Some(kind as i32), name: Some(name.clone()), raw_data: Some(bytes), ..TensorProto::default() };
        self.constants.push(tensor);
        name
    }

    fn constant(&mut self, wanted: &str, kind: DataType, dims: &[i64], bytes: Vec<u8>) -> String {
        let key = format!("constant {kind:?} {dims:?} {bytes:02x?}");
        if let Some([name]) = self.shared.get(&key).map(Vec::as_slice) {
            return name.clone();
        }
        let name = self.unique_constant(wanted.to_owned(), kind, dims.to_vec(), bytes);
        self.shared.insert(key, vec![name.clone()]);
        name
    }

    /// An integer vector: a shape or axes.
    pub fn ints(&mut self, values: &[i64]) -> String {
        let text = values.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        self.constant(&format!("ints/{text}"), DataType::Int64, &[values.len() as i64], values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A scalar integer.
    pub fn int(&mut self, value: i64) -> String {
        self.constant(&format!("int/{value}"), DataType::Int64, &[], value.to_le_bytes().to_vec())
    }

    /// A zero point of activations, from its int8 value: a scalar, or a vector of `count` equal elements.
    pub fn zero_point(&mut self, value: i32, count: Option<usize>) -> String {
        let (kind, value) = if self.signed { (DataType::Int8, value) } else { (DataType::Uint8, value + 128) };
        let dims: Vec<i64> = count.into_iter().map(|count| count as i64).collect();
        self.constant(&format!("zero_point/{value}"), kind, &dims, vec![value.to_le_bytes()[0]; count.unwrap_or(1)])
    }

    /// 32-bit integers that are never shared.
    pub fn own_ints(&mut self, part: &str, dims: Vec<i64>, values: &[i32]) -> String {
        self.unique_constant(format!("{}/{part}", self.scope), DataType::Int32, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A vector of one 8-bit zero.
    pub fn zero_vector(&mut self, kind: DataType) -> String {
        self.constant(&format!("zero/{kind:?}"), kind, &[1], vec![0])
    }

    /// One int8 zero, or a vector of `count`, which is never shared: runtimes that rewrite zero points
    /// do so per consumer.
    pub fn own_int8_zeros(&mut self, count: Option<usize>) -> String {
        let dims = count.into_iter().map(|count| count as i64).collect();
        self.unique_constant(format!("{}/zero_points", self.scope), DataType::Int8, dims, vec![0; count.unwrap_or(1)])
    }

    /// A scalar in the precision of the model.
    pub fn float(&mut self, value: f64) -> String {
        if !self.half {
            return self.float_wide(value);
        }
        let value = half::f16::from_f64(value);
        self.constant(&format!("half/{value:?}"), DataType::Float16, &[], value.to_le_bytes().to_vec())
    }

    /// A 32-bit float scalar.
    pub fn float_wide(&mut self, value: f64) -> String {
        let value = value as f32;
        self.constant(&format!("float/{value:?}"), DataType::Float, &[], value.to_le_bytes().to_vec())
    }

    /// A 32-bit float vector.
    pub fn floats(&mut self, name: &str, values: &[f64]) -> String {
        self.constant(name, DataType::Float, &[values.len() as i64], values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect())
    }

    /// 32-bit floats that are never shared.
    pub fn own_floats(&mut self, part: &str, values: &[f32]) -> String {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.unique_constant(format!("{}/{part}", self.scope), DataType::Float, vec![values.len() as i64], bytes)
    }

    /// 64-bit floats; empty `dims` mean a scalar.
    pub fn doubles(&mut self, name: &str, dims: &[i64], values: &[f64]) -> String {
        self.constant(name, DataType::Double, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// The size of an axis of an input, as a scalar.
    pub fn size(&mut self, input: usize, axis: usize) -> Result<String> {
        let (dim, value) = (self.ty(input)?.shape.get(axis).map(ToString::to_string).unwrap_or_default(), self.input(input));
        let axis = axis as i64;
        self.share(&format!("size/{dim}"), |n| {
            let size = n.emit("Shape", "shape", &[&value], vec![AttributeProto::int("start", axis), AttributeProto::int("end", axis + 1)]);
            let zero = n.ints(&[0]);
            Ok(n.emit("Squeeze", "size", &[&size, &zero], vec![]))
        })
    }

    /// `0, 1, 2, …` up to the size of an axis of an input.
    pub fn range(&mut self, input: usize, axis: usize) -> Result<String> {
        let size = self.size(input, axis)?;
        let dim = self.ty(input)?.shape.get(axis).map(ToString::to_string).unwrap_or_default();
        self.share(&format!("range/{dim}"), |n| {
            let (zero, one) = (n.int(0), n.int(1));
            Ok(n.emit("Range", "range", &[&zero, &size, &one], vec![]))
        })
    }

    /// Adds a reduction in the form that the opset requires.
    pub fn reduce(&mut self, op: &str, part: &str, x: &str, axis: i64, keep: bool) -> String {
        let (axes, attributes) = self.reduction(op, &[axis], keep);
        self.emit(op, part, &[x].into_iter().chain(axes.as_deref()).collect::<Vec<_>>(), attributes)
    }

    /// Axes input and attributes of a reduction, depending on the opset. Empty axes mean all.
    pub fn reduction(&mut self, op: &str, axes: &[i64], keep: bool) -> (Option<String>, Vec<AttributeProto>) {
        let keep = AttributeProto::int("keepdims", i64::from(keep));
        match axes {
            [] => (None, vec![keep]),
            axes if self.opset >= 18 || op == "ReduceSum" => (Some(self.ints(axes)), vec![keep]),
            axes => (None, vec![AttributeProto::ints("axes", axes.iter().copied()), keep]),
        }
    }
}

//! What the functions of [`lower`](super::lower) write with: names, constants, and values that nodes share.

use std::collections::{BTreeMap, BTreeSet};

use super::cached::Cache;
use super::place::Slot;
use super::proto::{AttributeProto, DataType, GraphProto, NodeProto, TensorProto};
use super::style::{Precision, Style, TiedHead};
use crate::error::{Error, Result};
use crate::ir::{Element, Graph, Kind, Node, Op, TensorType, ValueId};

/// The ONNX graph as far as it is written.
pub(super) struct Lowering<'g> {
    pub graph: &'g Graph,
    pub opset: u32,
    /// Whether floats are 16 bits wide.
    pub half: bool,
    /// Whether activations become int8, and not uint8.
    pub signed: bool,
    /// How many heads that share their weight with an int8 table are products of integers, where they may be.
    pub integer_heads: Option<usize>,
    /// What is kept of earlier tokens, where that is an input.
    pub cache: Option<Cache>,
    /// Names of the graph's values, by position.
    pub names: Vec<String>,
    taken: BTreeSet<String>,
    /// How parameters are stored, by position.
    pub places: BTreeMap<usize, Vec<Slot>>,
    pub nodes: Vec<NodeProto>,
    pub constants: Vec<TensorProto>,
    /// Versions of operators of other domains, where one was asked for.
    pub imports: BTreeMap<String, i64>,
    /// The nodes that read each value, by position.
    readers: Vec<Vec<&'g Node>>,
    /// Which values depend on what the model is given, by position.
    varies: Vec<bool>,
    shared: BTreeMap<String, Vec<String>>,
    scope: String,
    node: Option<&'g Node>,
}

impl<'g> Lowering<'g> {
    pub fn new(graph: &'g Graph, style: &Style, names: Vec<String>, taken: BTreeSet<String>, places: BTreeMap<usize, Vec<Slot>>) -> Self {
        let mut readers = vec![Vec::new(); graph.values().len()];
        let mut varies: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Input).collect();
        for node in graph.nodes() {
            node.inputs.iter().for_each(|id| readers[id.index()].push(node));
            varies[node.output.index()] = node.inputs.iter().any(|id| varies[id.index()]);
        }
        Self {
            graph,
            opset: style.opset,
            half: style.precision == Precision::Float16,
            signed: style.signed,
            integer_heads: (style.tied_head == TiedHead::Int8).then_some(0),
            cache: style.cache.then(Cache::default),
            names,
            taken,
            places,
            nodes: Vec::new(),
            constants: Vec::new(),
            imports: BTreeMap::new(),
            readers,
            varies,
            shared: BTreeMap::new(),
            scope: String::new(),
            node: None,
        }
    }

    /// Turns to a node.
    pub fn enter(&mut self, node: &'g Node) {
        self.scope.clone_from(&self.graph.value(node.output).name);
        self.node = Some(node);
    }

    /// Name of the current node's input.
    pub fn input(&self, index: usize) -> String {
        self.operand(index).map_or(String::new(), |id| self.names[id].clone())
    }

    /// How many inputs the current node has.
    pub fn inputs(&self) -> usize {
        self.node.map_or(0, |node| node.inputs.len())
    }

    /// How the parameter behind an input is stored, if it is one.
    pub fn place(&self, index: usize) -> Option<&Slot> {
        self.slots(index).first()
    }

    /// All that is stored for the parameter behind an input.
    pub fn slots(&self, index: usize) -> &[Slot] {
        self.operand(index).and_then(|id| self.places.get(&id)).map_or(&[], Vec::as_slice)
    }

    /// The current node.
    pub fn node(&self) -> Option<&'g Node> {
        self.node
    }

    /// How many inputs of nodes a value is.
    pub fn reads(&self, value: ValueId) -> usize {
        self.readers[value.index()].len()
    }

    /// Whether an input of the current node depends on what the model is given.
    pub fn varies(&self, index: usize) -> bool {
        self.operand(index).is_none_or(|id| self.varies[id])
    }

    /// How many nodes that depend on what the model is given read an input of the current node.
    pub fn varying_readers(&self, index: usize) -> usize {
        self.operand(index).map_or(0, |id| self.readers[id].iter().filter(|node| self.varies[node.output.index()]).count())
    }

    /// Whether no earlier product or convolution reads the weight of the current one. ONNX Runtime makes integer kernels under the name of
    /// the weight, and refuses a second one: later layers have to read floats.
    pub fn is_first_layer_of_weight(&self) -> bool {
        let is_layer = |node: &&Node| matches!(node.op, Op::Linear(_) | Op::Conv(_)) && self.varies[node.output.index()];
        let readers = self.operand(1).map_or(&[][..], |id| self.readers[id].as_slice());
        let first = readers.iter().copied().find(|node| is_layer(node) && node.inputs.get(1).map(|id| id.index()) == self.operand(1));
        first.map(|node| node.output) == self.node.map(|node| node.output)
    }

    /// Whether the current node's value is read by one layer normalisation and nobody else.
    pub fn feeds_layer_norm(&self) -> bool {
        let Some(output) = self.node.map(|node| node.output) else { return false };
        let public = self.graph.outputs().iter().any(|(_, id)| *id == output);
        !public && matches!(self.readers[output.index()][..], [Node { op: Op::LayerNorm(_), .. }])
    }

    /// Position of the value behind an input.
    fn operand(&self, index: usize) -> Option<usize> {
        self.node.and_then(|node| node.inputs.get(index)).map(|id| id.index())
    }

    /// Type of an input.
    pub fn ty(&self, index: usize) -> Result<&'g TensorType> {
        let graph = self.graph;
        self.operand(index).map(|id| &graph.values()[id].ty).ok_or_else(|| self.wrong(format!("has no input {index}")))
    }

    /// A size that must be known.
    pub fn fixed(&self, index: usize, axis: usize) -> Result<i64> {
        let ty = self.ty(index)?;
        ty.shape
            .get(axis)
            .and_then(|d| d.fixed())
            .map(|d| d as i64)
            .ok_or_else(|| self.wrong(format!("axis {axis} of its input {ty} must be known to be written as ONNX; fix it in the inputs of the graph")))
    }

    /// The last size, which must be known.
    pub fn width(&self, index: usize) -> Result<i64> {
        self.fixed(index, self.ty(index)?.shape.len().saturating_sub(1))
    }

    pub fn wrong(&self, reason: String) -> Error {
        Error::option(format!("graph node `{}`", self.scope), reason)
    }

    /// A name that nobody has taken.
    pub fn fresh(&mut self, wanted: String) -> String {
        super::fresh(&mut self.taken, wanted)
    }

    fn push(&mut self, op: &str, name: String, inputs: &[&str], outputs: Vec<String>, attributes: Vec<AttributeProto>) {
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

    /// An operator whose result only this node needs.
    pub fn emit(&mut self, op: &str, part: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let name = self.fresh(format!("{}/{part}", self.scope));
        self.push(op, name.clone(), inputs, vec![name.clone()], attributes);
        name
    }

    /// An operator with several results.
    pub fn emit_many<const N: usize>(&mut self, op: &str, parts: [&str; N], inputs: &[&str], attributes: Vec<AttributeProto>) -> [String; N] {
        let names = parts.map(|part| self.fresh(format!("{}/{part}", self.scope)));
        self.push(op, names[0].clone(), inputs, names.to_vec(), attributes);
        names
    }

    /// Elements in another format.
    pub fn cast(&mut self, part: &str, x: &str, to: DataType) -> String {
        self.emit("Cast", part, &[x], vec![AttributeProto::int("to", to as i64)])
    }

    /// A value in 32 bits, where arithmetic needs their range.
    pub fn wide(&mut self, x: &str) -> Result<String> {
        if !self.half {
            return Ok(x.to_owned());
        }
        self.share(&format!("{x}/wide|"), |n| Ok(n.cast("value", x, DataType::Float)))
    }

    /// A value of 32 bits in the width of the model's floats.
    pub fn narrow(&mut self, part: &str, x: String) -> String {
        if self.half { self.cast(part, &x, DataType::Float16) } else { x }
    }

    /// As [`finish`](Self::finish), for an operator that works on 32 bits.
    pub fn finish_wide(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        if !self.half {
            return self.finish(op, inputs, attributes);
        }
        let wide = self.emit(op, "wide", inputs, attributes);
        self.finish("Cast", &[&wide], vec![AttributeProto::int("to", DataType::Float16 as i64)]);
    }

    /// As [`finish_wide`](Self::finish_wide), where the node's value is a later one of an operator's results.
    pub fn finish_wide_at(&mut self, op: &str, place: usize, inputs: &[&str], attributes: Vec<AttributeProto>) {
        let name = if self.half { self.fresh(format!("{}/wide", self.scope)) } else { self.output() };
        let mut outputs = vec![String::new(); place];
        outputs.push(name.clone());
        self.push(op, self.scope.clone(), inputs, outputs, attributes);
        if self.half {
            self.finish("Cast", &[&name], vec![AttributeProto::int("to", DataType::Float16 as i64)]);
        }
    }

    /// Keeps the names of a body for it.
    pub fn reserve(&mut self, body: &GraphProto) {
        super::check::names(body, &mut self.taken);
    }

    /// Name of the current node's value.
    pub fn output(&self) -> String {
        self.node.map_or(String::new(), |node| self.names[node.output.index()].clone())
    }

    /// People give 32 bits; what follows works on 16.
    pub fn narrow_input(&mut self, value: usize, public: &str) {
        public.clone_into(&mut self.scope);
        self.names[value] = self.cast("half", public, DataType::Float16);
    }

    /// The operator that computes a parameter's value, under the parameter's name.
    pub fn compute(&mut self, value: usize, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        let name = self.names[value].clone();
        self.push(op, name.clone(), inputs, vec![name], attributes);
    }

    /// What is stored for a parameter that is places in palettes; what is written next belongs to it.
    pub fn turn_to_palette(&mut self, value: usize) -> Option<Slot> {
        let slot = self.places.get(&value)?.iter().find(|slot| slot.palette.is_some())?.clone();
        self.scope.clone_from(&self.names[value]);
        Some(slot)
    }

    /// The operator that computes the current node's value.
    pub fn finish(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        self.push(op, self.scope.clone(), inputs, vec![self.output()], attributes);
    }

    /// The operator that computes an output of the model.
    pub fn publish(&mut self, public: &str, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        self.push(op, public.to_owned(), inputs, vec![public.to_owned()], attributes);
        public.to_owned()
    }

    /// A copy of a value under a public name; floats in the 32 bits that people expect.
    pub fn alias(&mut self, value: usize, public: &str) {
        let name = self.names[value].clone();
        let narrow = self.half && self.graph.values()[value].ty.element == Element::Float;
        let (op, attributes) = if narrow { ("Cast", vec![AttributeProto::int("to", DataType::Float as i64)]) } else { ("Identity", vec![]) };
        self.publish(public, op, &[&name], attributes);
    }

    /// A value that several nodes need: written when it is first asked for, under the name of the key.
    pub fn share(&mut self, key: &str, write: impl FnOnce(&mut Self) -> Result<String>) -> Result<String> {
        self.share_many(key, |n| Ok([write(n)?])).map(|[name]| name)
    }

    /// Several values that nodes need together.
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

    /// Numbers that only one node needs, even if others need the same.
    fn own(&mut self, wanted: String, kind: DataType, dims: Vec<i64>, bytes: Vec<u8>) -> String {
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
        let name = self.own(wanted.to_owned(), kind, dims.to_vec(), bytes);
        self.shared.insert(key, vec![name.clone()]);
        name
    }

    /// A vector of whole numbers: a shape, axes.
    pub fn ints(&mut self, values: &[i64]) -> String {
        let text = values.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        self.constant(&format!("ints/{text}"), DataType::Int64, &[values.len() as i64], values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A whole number.
    pub fn int(&mut self, value: i64) -> String {
        self.constant(&format!("int/{value}"), DataType::Int64, &[], value.to_le_bytes().to_vec())
    }

    /// The integer that stands for zero in the quantized first input, given as int8.
    pub fn zero_point(&mut self, value: i32) -> String {
        let (kind, value) = if self.signed { (DataType::Int8, value) } else { (DataType::Uint8, value + 128) };
        self.constant(&format!("zero_point/{value}"), kind, &[], vec![value.to_le_bytes()[0]])
    }

    /// Whole numbers of 32 bits that only this node needs.
    pub fn own_ints(&mut self, part: &str, dims: Vec<i64>, values: &[i32]) -> String {
        self.own(format!("{}/{part}", self.scope), DataType::Int32, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A zero of eight bits in a vector of one.
    pub fn zero_of(&mut self, kind: DataType) -> String {
        self.constant(&format!("zero/{kind:?}"), kind, &[1], vec![0])
    }

    /// One zero of int8, or a vector of them, that only this node needs: runtimes that change zero points do so once for each that
    /// reads them.
    pub fn own_int8_zeros(&mut self, count: Option<usize>) -> String {
        let dims = count.into_iter().map(|count| count as i64).collect();
        self.own(format!("{}/zero_points", self.scope), DataType::Int8, dims, vec![0; count.unwrap_or(1)])
    }

    /// A number as wide as the model's floats.
    pub fn float(&mut self, value: f64) -> String {
        if !self.half {
            return self.float_wide(value);
        }
        let value = half::f16::from_f64(value);
        self.constant(&format!("half/{value:?}"), DataType::Float16, &[], value.to_le_bytes().to_vec())
    }

    /// A number of 32 bits.
    pub fn float_wide(&mut self, value: f64) -> String {
        let value = value as f32;
        self.constant(&format!("float/{value:?}"), DataType::Float, &[], value.to_le_bytes().to_vec())
    }

    /// Numbers of 32 bits.
    pub fn floats(&mut self, name: &str, values: &[f64]) -> String {
        self.constant(name, DataType::Float, &[values.len() as i64], values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect())
    }

    /// Numbers of 32 bits that only this node needs, even if others need the same.
    pub fn own_floats(&mut self, part: &str, values: &[f32]) -> String {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.own(format!("{}/{part}", self.scope), DataType::Float, vec![values.len() as i64], bytes)
    }

    /// Numbers of double precision; none of `dims` is one number.
    pub fn doubles(&mut self, name: &str, dims: &[i64], values: &[f64]) -> String {
        self.constant(name, DataType::Double, dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// The size of an axis of an input, as one whole number.
    pub fn size(&mut self, input: usize, axis: usize) -> Result<String> {
        let (dim, value) = (self.ty(input)?.shape.get(axis).map(ToString::to_string).unwrap_or_default(), self.input(input));
        let axis = axis as i64;
        self.share(&format!("size/{dim}"), |n| {
            let size = n.emit("Shape", "shape", &[&value], vec![AttributeProto::int("start", axis), AttributeProto::int("end", axis + 1)]);
            let zero = n.ints(&[0]);
            Ok(n.emit("Squeeze", "size", &[&size, &zero], vec![]))
        })
    }

    /// 0, 1, 2, … along an axis of an input.
    pub fn range(&mut self, input: usize, axis: usize) -> Result<String> {
        let size = self.size(input, axis)?;
        let dim = self.ty(input)?.shape.get(axis).map(ToString::to_string).unwrap_or_default();
        self.share(&format!("range/{dim}"), |n| {
            let (zero, one) = (n.int(0), n.int(1));
            Ok(n.emit("Range", "range", &[&zero, &size, &one], vec![]))
        })
    }

    /// A reduction over axes, as the opset spells it.
    pub fn reduce(&mut self, op: &str, part: &str, x: &str, axis: i64, keep: bool) -> String {
        let (axes, attributes) = self.reduction(op, &[axis], keep);
        self.emit(op, part, &[x].into_iter().chain(axes.as_deref()).collect::<Vec<_>>(), attributes)
    }

    /// The axes of a reduction as an input where the opset has it so, and the attributes; no axes are all of them.
    pub fn reduction(&mut self, op: &str, axes: &[i64], keep: bool) -> (Option<String>, Vec<AttributeProto>) {
        let keep = AttributeProto::int("keepdims", i64::from(keep));
        match axes {
            [] => (None, vec![keep]),
            axes if self.opset >= 18 || op == "ReduceSum" => (Some(self.ints(axes)), vec![keep]),
            axes => (None, vec![AttributeProto::ints("axes", axes.iter().copied()), keep]),
        }
    }
}

//! Conversion of an ONNX file to a graph of typed ops.
//!
//! The table in `rules.rs` converts single operators. Integers from which shapes are computed are
//! tracked symbolically (`numbers.rs`). Position ids are recognized (`positions.rs`).
//! Nodes without a typed form become opaque subgraphs (`opaque.rs`), which the interpreter or ONNX Runtime
//! runs. Patterns of several ops are fused (`patterns.rs`).

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod attention;
mod folding;
mod gathering;
mod hints;
mod opaque;
mod patterns;
mod positions;
mod quantizer;
mod rules;

use std::collections::{BTreeMap, BTreeSet};

use super::check::{self, label};
use super::elements;
use super::initializer_roles::copies;
use super::model_file::ModelFile;
use super::numbers::{self, KnownValues, Number, Numbers};
use super::opaque_subgraph;
use super::proto::{DataType, NodeProto, TensorProto, ValueInfoProto};
use super::value_info::input_shape;
use crate::error::{Error, Result};
use crate::ir::ops::Transpose;
use crate::ir::{Builder, Dim, Element, Graph, Op, TensorType, ValueId};
use crate::store::{Role, Weights};

/// Operators with integer results, which are recomputed where they are needed instead of being shared.
const SHAPES: [&str; 10] = ["Shape", "Size", "Equal", "Greater", "Less", "Not", "And", "Or", "Range", "QuantizeLinear"];

/// Maximum number of reasons in an error message.
const MAX_REASONS: usize = 3;

/// The state of a value of the file.
#[derive(Clone)]
enum LiftedValue {
    /// A value of the graph.
    Value(ValueId),
    /// Integers, some of which may be unknown.
    Numbers(Numbers),
    /// A constant: a weight, or a value that can only be an attribute.
    Constant,
    /// The output of a node without a typed form.
    Untyped,
    /// The same for a node that depends only on constants.
    Folded,
    /// It depends on an input of an unsupported type.
    Unavailable,
}

/// The typed op for a node.
struct TypedNode {
    op: Op,
    /// Positions of the node inputs that it reads.
    inputs: Vec<usize>,
}

/// Lifts a file with the current weights.
pub(super) struct Lift<'f> {
    file: &'f ModelFile,
    weights: &'f Weights,
    builder: Builder<'f>,
    lifted: BTreeMap<&'f str, LiftedValue>,
    opset: i64,
    /// Producers of values, with their topological positions.
    producers: BTreeMap<&'f str, (usize, &'f NodeProto)>,
    initializers: BTreeMap<&'f str, &'f TensorProto>,
    /// The values that `Identity` nodes copy, by the names of the copies.
    copies: BTreeMap<&'f str, &'f str>,
    /// Number of consumers of each value.
    readers: BTreeMap<&'f str, usize>,
    /// ONNX element type numbers of values that are neither 32-bit floats nor 64-bit integers.
    numbers: BTreeMap<ValueId, i32>,
    /// Dequantized values, by the names of their integers.
    quantized: BTreeMap<&'f str, ValueId>,
    /// Names of batch dimensions.
    batches: BTreeSet<String>,
    /// Values that cannot be represented in the graph, with reasons.
    refused: BTreeMap<&'f str, String>,
    /// Values that ONNX Runtime cannot compute as a subgraph either, with reasons.
    broken: BTreeMap<&'f str, String>,
    /// Values that depend only on constants and weights.
    from_constants: BTreeSet<&'f str>,
    /// Shapes of these values.
    folded_sizes: BTreeMap<&'f str, Vec<u64>>,
    /// Total number of elements of the values that are folded.
    folded_elements: u64,
    /// Lower bounds for the number of elements of values, for all sizes of open dimensions.
    min_elements: BTreeMap<&'f str, u64>,
    /// Reasons for nodes without a typed form.
    unsupported: Vec<String>,
    /// Reasons for inputs and outputs that cannot be run at all.
    failed: Vec<String>,
}

impl ModelFile {
    /// Converts the file to a graph of typed ops with the current weights. ONNX Runtime runs everything
    /// that has no typed form. Fails if an input has an unsupported type, or nodes have no typed form and
    /// ONNX Runtime is missing or cannot run them. The error lists the first nodes.
    pub fn lift(&self, weights: &Weights) -> Result<Graph> {
        let expanded = self.expanded()?;
        let nodes = expanded.nodes.as_slice();
        let order = check::order(nodes);
        let ordered: Vec<&NodeProto> = order.into_iter().filter_map(|number| nodes.get(number)).collect();
        let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
        for name in ordered.iter().flat_map(|node| check::reads(node)) {
            let count = readers.entry(name).or_default();
            *count = count.saturating_add(1);
        }
        let outputs = ordered.iter().enumerate().flat_map(|(place, node)| node.output.iter().map(move |name| (name.as_str(), (place, *node))));
        let initializers = self.model.graph.iter().flat_map(|graph| &graph.initializer).chain(&expanded.initializers);
        let lift = Lift {
            file: self,
            weights,
            builder: Builder::new(weights),
            lifted: BTreeMap::new(),
            opset: self.opset(),
            producers: outputs.filter(|(name, _)| !name.is_empty()).collect(),
            initializers: initializers.map(|tensor| (tensor.name(), tensor)).collect(),
            copies: self.model.graph.as_ref().map(copies).unwrap_or_default(),
            readers,
            numbers: BTreeMap::new(),
            quantized: BTreeMap::new(),
            batches: BTreeSet::new(),
            refused: BTreeMap::new(),
            broken: BTreeMap::new(),
            from_constants: BTreeSet::new(),
            folded_sizes: BTreeMap::new(),
            folded_elements: 0,
            min_elements: BTreeMap::new(),
            unsupported: Vec::new(),
            failed: Vec::new(),
        };
        lift.lift_graph(&ordered)
    }
}

impl<'f> Lift<'f> {
    fn lift_graph(mut self, ordered: &[&'f NodeProto]) -> Result<Graph> {
        let file = self.file;
        let Some(graph) = &file.model.graph else { return Err(self.refused(&["it has no graph".to_owned()])) };
        for input in graph.input.iter().filter(|input| !file.weights_as_inputs.contains(input.name())) {
            match ty(file, input) {
                Ok((ty, number)) => {
                    if let (Some(Dim::Named(name)), 2..) = (ty.shape.first(), ty.shape.len()) {
                        self.batches.insert(name.clone());
                    }
                    let id = self.builder.input(input.name(), ty)?;
                    self.numbers.insert(id, number);
                    self.lifted.insert(input.name(), LiftedValue::Value(id));
                }
                Err(reason) => {
                    self.lifted.insert(input.name(), LiftedValue::Unavailable);
                    self.failed.push(format!("input `{}` {reason}", input.name()));
                }
            }
        }
        ordered.iter().for_each(|node| self.lift_node(node));
        for output in &graph.output {
            match self.lifted.get(output.name()) {
                Some(LiftedValue::Unavailable) => {}
                _ => match self.output(output.name()) {
                    Ok(id) => self.builder.output(output.name(), id),
                    Err(reason) => self.failed.push(format!("output `{}`: {reason}", output.name())),
                },
            }
        }
        if !self.failed.is_empty() {
            // The reasons that prevent running come first.
            self.failed.append(&mut self.unsupported);
            return Err(self.refused(&self.failed));
        }
        patterns::fuse(&self.builder.finish()?, self.weights)
    }

    /// The value of a graph output, in 32 bits if the file casts it to another float type, see
    /// [`converted_outputs`](ModelFile::converted_outputs).
    fn output(&mut self, name: &'f str) -> Result<ValueId, String> {
        if !self.lifted.contains_key(name) && self.is_parameter(name) {
            return self.parameter(name);
        }
        let cast = self.producers.get(name).and_then(|(_, node)| node.input.first()).filter(|_| self.file.converted_outputs().contains_key(name));
        match cast {
            Some(input) => {
                let id = self.opaque(input)?;
                if self.builder.ty(id).element == Element::Float { Ok(id) } else { Err("it casts integers to a float type other than float32".into()) }
            }
            None => self.opaque(name),
        }
    }

    /// A weight, in the axis order of the file.
    fn parameter(&mut self, name: &str) -> Result<ValueId, String> {
        let shape = self.weight(name).ok_or_else(|| format!("`{name}` has been removed"))?.shape.clone();
        let id = self.builder.param(name, &shape).map_err(|e| e.to_string())?;
        if !self.file.is_flipped(name) {
            return Ok(id);
        }
        let rows = format!("{name}/rows");
        // Several copies of a weight share the node.
        let found = self.builder.find(&rows).map(Ok);
        found.unwrap_or_else(|| self.builder.node(&rows, Transpose { perm: vec![1, 0] }, &[id])).map_err(|e| e.to_string())
    }

    fn refused(&self, reasons: &[String]) -> Error {
        let more = reasons.len().saturating_sub(MAX_REASONS);
        let shown = reasons.iter().take(MAX_REASONS).map(String::as_str).collect::<Vec<_>>().join("; ");
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        Error::Unsupported {
            what: format!(
                "{}: running it in the built-in executor, which does not support {} of its nodes ({shown}{more}),",
                self.file.path.display(),
                reasons.len()
            ),
            hint: self.hint(),
        }
    }

    /// Lifts a node, or records why it has no typed form.
    fn lift_node(&mut self, node: &'f NodeProto) {
        let unavailable = check::reads(node).into_iter().any(|name| matches!(self.lifted.get(name), Some(LiftedValue::Unavailable)));
        if !unavailable && rules::MULTI_OUTPUT.contains(&node.op_type()) && self.lift_outputs(node) {
            return;
        }
        let found = if unavailable { Ok(LiftedValue::Unavailable) } else { self.lift_output(node, 0) };
        let others = if unavailable { LiftedValue::Unavailable } else { LiftedValue::Untyped };
        let found = found.unwrap_or_else(|reason| {
            self.unsupported.push(format!("{}: {reason}", label(node)));
            LiftedValue::Untyped
        });
        let untyped = matches!(found, LiftedValue::Untyped);
        let outputs: Vec<&'f str> = node.output.iter().map(String::as_str).collect();
        outputs.iter().skip(1).filter(|name| !name.is_empty()).for_each(|other| drop(self.lifted.insert(other, others.clone())));
        if let Some(first) = outputs.first().filter(|name| !name.is_empty()) {
            self.lifted.insert(first, found);
        }
        // Values with several consumers are computed once.
        for name in outputs.into_iter().filter(|_| untyped) {
            if !SHAPES.contains(&node.op_type()) && self.readers.get(name).is_some_and(|count| *count > 1) {
                drop(self.opaque(name));
            }
        }
    }

    /// Lifts all outputs of a node. Returns false unless each one has a typed form.
    fn lift_outputs(&mut self, node: &'f NodeProto) -> bool {
        let found: Result<Vec<(&'f str, LiftedValue)>, String> =
            node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()).map(|(at, name)| Ok((name.as_str(), self.lift_output(node, at)?))).collect();
        found.map(|all| self.lifted.extend(all)).is_ok()
    }

    /// Lifts one output of a node.
    fn lift_output(&mut self, node: &'f NodeProto, at: usize) -> Result<LiftedValue, String> {
        if !check::is_own(node.domain()) {
            return Err(format!("it belongs to the domain {}", node.domain()));
        }
        if let Some(numbers) = numbers::evaluate(self, node) {
            return Ok(LiftedValue::Numbers(numbers));
        }
        let output = node.output.get(at).ok_or("it has no output")?;
        self.check_min_elements(node, output)?;
        if node.op_type() == "Constant" || self.file.dequantized_values.contains(output) {
            return Ok(LiftedValue::Constant);
        }
        let positions = self.positions(node, output).or_else(|| self.counted_positions(node, output));
        if let Some(id) = positions.or_else(|| self.counted_range(node, output)) {
            return Ok(LiftedValue::Value(id));
        }
        if let Some(found) = self.fold(node)? {
            return Ok(found);
        }
        if let Some((op, quantizer)) = self.quantizer(node) {
            if let Some(name) =
                quantizer.input.first().filter(|name| matches!(self.lifted.get(name.as_str()), Some(LiftedValue::Untyped | LiftedValue::Folded)))
            {
                self.opaque(name)?;
            }
            // All consumers of a quantized value read one node.
            let codes = quantizer.output.first().ok_or("it has no output")?.as_str();
            if let Some(id) = self.quantized.get(codes) {
                return Ok(LiftedValue::Value(*id));
            }
            let value = self.value(quantizer, 0)?;
            let id = self.builder.node(output, op, &[value]).map_err(|e| e.to_string())?;
            self.quantized.insert(codes, id);
            return Ok(LiftedValue::Value(id));
        }
        if let Some(id) = self.attention_operator(node, output) {
            return Ok(LiftedValue::Value(id));
        }
        let (_, rule) = rules::RULES.iter().find(|(op, _)| *op == node.op_type()).ok_or("the operator is not supported")?;
        for name in &node.input {
            if matches!(self.lifted.get(name.as_str()), Some(LiftedValue::Untyped | LiftedValue::Folded)) {
                self.opaque(name)?;
            }
        }
        if let Some(id) = self.gathered(node, output) {
            return Ok(LiftedValue::Value(id));
        }
        let typed = rule(&NodeContext { lift: self, node, output: at })?;
        let Some(TypedNode { op, inputs }) = typed else { return self.forward_first_input(node) };
        let is_layer = matches!(op, Op::Linear(_));
        let input = |position| if is_layer && position == 1 { self.named_value(self.original(node, position)) } else { self.value(node, position) };
        let inputs = inputs.into_iter().map(input).collect::<Result<Vec<_>, _>>()?;
        let id = self.builder.node(output, op, &inputs).map_err(|e| e.to_string())?;
        // Integers keep their element type of the file.
        let number = inputs.first().and_then(|input| self.numbers.get(input)).copied();
        if let Some(number) = number.filter(|_| self.builder.ty(id).element == Element::Int) {
            self.numbers.insert(id, number);
        }
        Ok(LiftedValue::Value(id))
    }

    /// The first input, for nodes that return it unchanged.
    fn forward_first_input(&mut self, node: &NodeProto) -> Result<LiftedValue, String> {
        let name = node.input_name(0);
        let is_computed = matches!(self.lifted.get(name), Some(LiftedValue::Value(_)));
        let id = if !is_computed && self.is_parameter(name) { self.parameter(name) } else { self.named_value(name) };
        id.map(LiftedValue::Value)
    }

    /// A constant of floats that is not a weight, as those of functions.
    fn float_constant(&self, name: &str) -> Option<&'f TensorProto> {
        self.constant_tensor(name).filter(|tensor| tensor.data_type() == DataType::Float && !self.file.weights.contains_key(name))
    }

    /// The name of an input, or of the value that it copies.
    fn original(&self, node: &'f NodeProto, position: usize) -> &'f str {
        let name = node.input_name(position);
        self.copies.get(name).copied().unwrap_or(name)
    }

    /// The graph value of an input.
    fn value(&mut self, node: &NodeProto, position: usize) -> Result<ValueId, String> {
        self.named_value(node.input_name(position))
    }

    fn named_value(&mut self, name: &str) -> Result<ValueId, String> {
        match (self.lifted.get(name), self.weights.by_name.get(name)) {
            (Some(LiftedValue::Value(id)), _) => Ok(*id),
            (_, Some(weight)) if weight.is_float() => {
                if !self.is_parameter(name) {
                    return Err(format!(
                        "`{name}` is {}, but the built-in executor supports only f32 and f16, and bf16 that a Cast converts to f32",
                        weight.dtype
                    ));
                }
                self.builder.param(name, &weight.shape).map_err(|e| e.to_string())
            }
            _ => Err(format!("`{name}` is neither a float weight nor a value of the graph")),
        }
    }
}

/// The type of an input, and its ONNX element type number.
fn ty(file: &ModelFile, input: &ValueInfoProto) -> Result<(TensorType, i32), String> {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()).ok_or("is not a tensor")?;
    let number = if tensor.elem_type == Some(DataType::Float16 as i32) { DataType::Float as i32 } else { tensor.elem_type.unwrap_or(0) };
    let wrong = || format!("is {:?}, but the built-in executor supports 16-bit and 32-bit floats, integers of up to 64 bits, and booleans", tensor.elem_type());
    let element = opaque_subgraph::element(number).ok_or_else(wrong)?;
    let shape = input_shape(input).ok_or("has an unknown rank")?;
    let fixed = |size: Dim| file.fixed_size(&size).map_or(size, Dim::Fixed);
    Ok((TensorType { element, shape: shape.into_iter().map(fixed).collect() }, number))
}

/// A node with its context, for the rules.
struct NodeContext<'l, 'f> {
    lift: &'l Lift<'f>,
    node: &'f NodeProto,
    /// Position of the output to lift.
    output: usize,
}

impl<'f> NodeContext<'_, 'f> {
    fn opset(&self) -> i64 {
        self.lift.opset
    }

    /// Whether an optional input is present.
    fn has(&self, position: usize) -> bool {
        !self.node.input_name(position).is_empty()
    }

    /// Positions of all inputs that are present.
    fn present_inputs(&self) -> Vec<usize> {
        (0..self.node.input.len()).filter(|position| self.has(*position)).collect()
    }

    /// The type of an input, which can be a weight or a constant of a function.
    fn ty(&self, position: usize) -> Result<TensorType, String> {
        let name = self.node.input_name(position);
        match (self.lift.lifted.get(name), self.lift.weights.by_name.get(name)) {
            (Some(LiftedValue::Value(id)), _) => Ok(self.lift.builder.ty(*id).clone()),
            (_, Some(weight)) => Ok(TensorType::float(weight.shape.iter().copied())),
            _ => {
                let shape = self.lift.float_constant(name).and_then(|tensor| elements::shape(tensor).ok());
                shape.map(|(shape, _)| TensorType::float(shape)).ok_or_else(|| format!("the shape of `{name}` is unknown"))
            }
        }
    }

    /// Whether an input holds 64-bit integers in the file.
    fn is_int64(&self, position: usize) -> bool {
        let name = self.node.input_name(position);
        let Some(LiftedValue::Value(id)) = self.lift.lifted.get(name) else { return false };
        self.lift.numbers.get(id).is_none_or(|number| *number == DataType::Int64 as i32)
    }

    fn rank(&self) -> Result<usize, String> {
        Ok(self.ty(0)?.shape.len())
    }

    /// The role of an input, if it is a weight.
    fn role(&self, position: usize) -> Option<Role> {
        self.lift.weights.by_name.get(self.lift.original(self.node, position))?.role
    }

    /// Integers of an input, all of which must be known statically.
    fn numbers(&self, position: usize) -> Result<Vec<i64>, String> {
        let name = self.node.input_name(position);
        self.lift.numbers(name).and_then(|numbers| numbers.all()).ok_or_else(|| format!("the values of `{name}` are not known statically"))
    }

    /// Integers of an input, some of which may be unknown.
    fn some_numbers(&self, position: usize) -> Result<Vec<Number>, String> {
        let name = self.node.input_name(position);
        self.lift.numbers(name).map(|numbers| numbers.each()).ok_or_else(|| format!("the values of `{name}` are not known statically"))
    }

    /// The value of a constant input with one element.
    fn scalar(&self, position: usize) -> Result<f64, String> {
        let name = self.node.input_name(position);
        let weight = self.lift.weights.by_name.get(name).filter(|weight| weight.elements() == 1);
        let of_function = || elements::small_floats(self.lift.float_constant(name)?);
        let values = weight.map_or_else(of_function, |weight| weight.floats(name).ok()).filter(|values| values.len() == 1);
        values.and_then(|values| values.first().copied()).map(f64::from).ok_or_else(|| format!("`{name}` is not a constant scalar"))
    }

    /// The scales of a resize, which must be constant.
    fn scales(&self, position: usize) -> Result<Vec<f32>, String> {
        let name = self.node.input_name(position);
        let weight = self.lift.weights.by_name.get(name).filter(|weight| weight.shape.len() == 1);
        weight.and_then(|weight| weight.floats(name).ok()).ok_or_else(|| format!("the scales `{name}` are not constant"))
    }

    fn int(&self, name: &str, missing: i64) -> i64 {
        super::initializer_roles::int(self.node, name, missing)
    }

    fn float(&self, name: &str, missing: f32) -> f64 {
        super::initializer_roles::float(self.node, name, missing).into()
    }

    fn text(&self, name: &str) -> Option<String> {
        super::initializer_roles::text(self.node, name)
    }

    fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.node.attribute.iter().find(|attribute| attribute.name() == name).map(|attribute| attribute.ints.clone())
    }

    /// Integers that are an attribute in older opsets and an input in newer ones; `None` if they are
    /// omitted.
    fn attribute_or_input(&self, name: &str, position: usize) -> Result<Option<Vec<i64>>, String> {
        match self.ints(name) {
            Some(ints) => Ok(Some(ints)),
            None if self.has(position) => self.numbers(position).map(Some),
            None => Ok(None),
        }
    }
}

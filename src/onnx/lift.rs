//! A file's operators as typed ops.
//!
//! Each operator is a row of the table in `rules.rs`. Whole numbers that shapes are computed with are followed as numbers (`numbers.rs`). Slices of constant position ids are recognized (`positions.rs`). Nodes
//! without a typed form become pieces that ONNX Runtime runs (`opaque.rs`). What several nodes are together is put together (`patterns.rs`).

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod folding;
mod numbers;
mod opaque;
mod patterns;
mod positions;
mod quantizer;
mod rules;

use std::collections::{BTreeMap, BTreeSet};

use super::check::{self, label};
use super::model_file::ModelFile;
use super::piece;
use super::proto::{DataType, NodeProto, TensorProto, ValueInfoProto};
use super::sizes;
use crate::error::{Error, Result};
use crate::ir::{Builder, Dim, Element, Graph, Op, TensorType, ValueId};
use crate::store::{DType, Role, Weights};
use numbers::{Number, Numbers};
pub(super) use opaque::Pieces;

/// Operators that make whole numbers, which are computed again where they are needed; of quantizers that is seldom.
const SHAPES: [&str; 10] = ["Shape", "Size", "Equal", "Greater", "Less", "Not", "And", "Or", "Range", "QuantizeLinear"];

/// Reasons that are told of nodes without a typed form.
const TOLD: usize = 3;

/// What is known of a value.
#[derive(Clone)]
enum Known {
    /// A value of the graph.
    Value(ValueId),
    /// Whole numbers, as far as they are known beforehand.
    Numbers(Numbers),
    /// A constant: a weight, or something that only an attribute can be.
    Constant,
    /// It comes from a node that has no typed form.
    Untyped,
    /// The same, of constants alone.
    Folded,
    /// It comes from an input that cannot be given.
    Nothing,
}

/// An op in the place of a node.
struct Made {
    op: Op,
    /// The node's inputs that it reads, by position.
    inputs: Vec<usize>,
}

/// Lifts a file over its weights as they are by now.
pub(super) struct Lift<'f> {
    file: &'f ModelFile,
    weights: &'f Weights,
    builder: Builder<'f>,
    known: BTreeMap<&'f str, Known>,
    opset: i64,
    /// Nodes by what they compute, with their places in the order in which they run.
    makers: BTreeMap<&'f str, (usize, &'f NodeProto)>,
    initializers: BTreeMap<&'f str, &'f TensorProto>,
    /// How many nodes read a value.
    readers: BTreeMap<&'f str, usize>,
    /// Element types as ONNX numbers them, of values that are neither floats nor integers of 64 bits.
    numbers: BTreeMap<ValueId, i32>,
    /// Open sizes that are numbers of samples.
    batches: BTreeSet<String>,
    /// Values that are none of the graph, and why.
    refused: BTreeMap<&'f str, String>,
    /// Values that ONNX Runtime does not compute by themselves either, and why.
    broken: BTreeMap<&'f str, String>,
    /// Values that are made of constants and weights alone.
    of_constants: BTreeSet<&'f str>,
    /// Their sizes, and how many elements those are that are computed once.
    folded_sizes: BTreeMap<&'f str, Vec<u64>>,
    folded_elements: u64,
    /// How many elements values have at least, whatever the open sizes are.
    least: BTreeMap<&'f str, u64>,
    /// Nodes without a typed form, and why.
    left: Vec<String>,
    /// What cannot be run either.
    failed: Vec<String>,
}

impl ModelFile {
    /// The graph of typed ops that the file is, over its weights as they are by now. What has no typed form is run by ONNX Runtime.
    ///
    /// # Errors
    /// An input has no typed form, or nodes have none, and there is no ONNX Runtime or it cannot run them by themselves; the first ones by name.
    pub fn lift(&self, weights: &Weights) -> Result<Graph> {
        let nodes = self.model.graph.as_ref().map_or(&[][..], |graph| &graph.node);
        let order = check::order(nodes);
        let ordered: Vec<&NodeProto> = order.into_iter().filter_map(|number| nodes.get(number)).collect();
        let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
        for name in ordered.iter().flat_map(|node| check::reads(node)) {
            let count = readers.entry(name).or_default();
            *count = count.saturating_add(1);
        }
        let outputs = ordered.iter().enumerate().flat_map(|(place, node)| node.output.iter().map(move |name| (name.as_str(), (place, *node))));
        let lift = Lift {
            file: self,
            weights,
            builder: Builder::new(weights),
            known: BTreeMap::new(),
            opset: self.opset(),
            makers: outputs.filter(|(name, _)| !name.is_empty()).collect(),
            initializers: self.model.graph.iter().flat_map(|graph| &graph.initializer).map(|tensor| (tensor.name(), tensor)).collect(),
            readers,
            numbers: BTreeMap::new(),
            batches: BTreeSet::new(),
            refused: BTreeMap::new(),
            broken: BTreeMap::new(),
            of_constants: BTreeSet::new(),
            folded_sizes: BTreeMap::new(),
            folded_elements: 0,
            least: BTreeMap::new(),
            left: Vec::new(),
            failed: Vec::new(),
        };
        lift.whole(&ordered)
    }
}

impl<'f> Lift<'f> {
    fn whole(mut self, ordered: &[&'f NodeProto]) -> Result<Graph> {
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
                    self.known.insert(input.name(), Known::Value(id));
                }
                Err(reason) => {
                    self.known.insert(input.name(), Known::Nothing);
                    self.failed.push(format!("input `{}` {reason}", input.name()));
                }
            }
        }
        ordered.iter().for_each(|node| self.take(node));
        for output in &graph.output {
            match self.known.get(output.name()) {
                Some(Known::Nothing) => {}
                _ => match self.opaque(output.name()) {
                    Ok(id) => self.builder.output(output.name(), id),
                    Err(reason) => self.failed.push(format!("output `{}`: {reason}", output.name())),
                },
            }
        }
        if !self.failed.is_empty() {
            // What stands in the way comes first.
            self.failed.append(&mut self.left);
            return Err(self.refused(&self.failed));
        }
        patterns::together(&self.builder.finish()?, self.weights)
    }

    fn refused(&self, reasons: &[String]) -> Error {
        let more = reasons.len().saturating_sub(TOLD);
        let shown = reasons.iter().take(TOLD).map(String::as_str).collect::<Vec<_>>().join("; ");
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        Error::Unsupported {
            what: format!(
                "{}: running it in the built-in executor, which knows no form of {} of its nodes ({shown}{more}),",
                self.file.path.display(),
                reasons.len()
            ),
            hint: self.hint(),
        }
    }

    fn hint(&self) -> String {
        let hint = "ONNX Runtime runs it, and what has no form needs it (`compress doctor --fetch`); passes over weights take it";
        match self.file.open_sizes().as_slice() {
            [] => hint.into(),
            open => format!("{hint}; what takes some sizes alone must be told them, as `--size NAME=1x512` for an input: open are {}", open.join(", ")),
        }
    }

    /// Takes a node, or notes why it has no typed form.
    fn take(&mut self, node: &'f NodeProto) {
        let nothing = check::reads(node).into_iter().any(|name| matches!(self.known.get(name), Some(Known::Nothing)));
        if !nothing && rules::SEVERAL.contains(&node.op_type()) && self.each(node) {
            return;
        }
        let found = if nothing { Ok(Known::Nothing) } else { self.one(node, 0) };
        let others = if nothing { Known::Nothing } else { Known::Untyped };
        let found = found.unwrap_or_else(|reason| {
            self.left.push(format!("{}: {reason}", label(node)));
            Known::Untyped
        });
        let untyped = matches!(found, Known::Untyped);
        let outputs: Vec<&'f str> = node.output.iter().map(String::as_str).collect();
        outputs.iter().skip(1).filter(|name| !name.is_empty()).for_each(|other| drop(self.known.insert(other, others.clone())));
        if let Some(first) = outputs.first().filter(|name| !name.is_empty()) {
            self.known.insert(first, found);
        }
        // What several nodes read is computed once.
        for name in outputs.into_iter().filter(|_| untyped) {
            if !SHAPES.contains(&node.op_type()) && self.readers.get(name).is_some_and(|count| *count > 1) {
                drop(self.opaque(name));
            }
        }
    }

    /// Takes everything that a node computes, if all of it has a typed form.
    fn each(&mut self, node: &'f NodeProto) -> bool {
        let found: Result<Vec<(&'f str, Known)>, String> =
            node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()).map(|(at, name)| Ok((name.as_str(), self.one(node, at)?))).collect();
        found.map(|all| self.known.extend(all)).is_ok()
    }

    /// What stands for one of the values that a node computes.
    fn one(&mut self, node: &'f NodeProto, at: usize) -> Result<Known, String> {
        if !check::is_own(node.domain()) {
            return Err(format!("it is of the domain {}", node.domain()));
        }
        if let Some(numbers) = numbers::of(self, node) {
            return Ok(Known::Numbers(numbers));
        }
        let output = node.output.get(at).ok_or("it computes nothing")?;
        self.bounded(node, output)?;
        if node.op_type() == "Constant" || self.file.made_floats.contains(output) {
            return Ok(Known::Constant);
        }
        if let Some(id) = self.positions(node, output) {
            return Ok(Known::Value(id));
        }
        if let Some(found) = self.folded(node)? {
            return Ok(found);
        }
        if let Some((op, quantizer)) = self.quantizer(node) {
            if let Some(name) = quantizer.input.first().filter(|name| matches!(self.known.get(name.as_str()), Some(Known::Untyped | Known::Folded))) {
                self.opaque(name)?;
            }
            let value = self.value(quantizer, 0)?;
            return self.builder.node(output, op, &[value]).map(Known::Value).map_err(|e| e.to_string());
        }
        let (_, rule) = rules::RULES.iter().find(|(op, _)| *op == node.op_type()).ok_or("the operator is not known")?;
        for name in &node.input {
            if matches!(self.known.get(name.as_str()), Some(Known::Untyped | Known::Folded)) {
                self.opaque(name)?;
            }
        }
        let made = rule(&At { lift: self, node, output: at })?;
        let Some(Made { op, inputs }) = made else { return self.same(node) };
        let inputs = inputs.into_iter().map(|position| self.value(node, position)).collect::<Result<Vec<_>, _>>()?;
        let id = self.builder.node(output, op, &inputs).map_err(|e| e.to_string())?;
        // Integers keep the type that they have in the file.
        let number = inputs.first().and_then(|input| self.numbers.get(input)).copied();
        if let Some(number) = number.filter(|_| self.builder.ty(id).element == Element::Int) {
            self.numbers.insert(id, number);
        }
        Ok(Known::Value(id))
    }

    /// The first input, which the node passes on.
    fn same(&mut self, node: &NodeProto) -> Result<Known, String> {
        self.value(node, 0).map(Known::Value)
    }

    /// The value behind an input.
    fn value(&mut self, node: &NodeProto, position: usize) -> Result<ValueId, String> {
        let name = node.input.get(position).map_or("", String::as_str);
        match (self.known.get(name), self.weights.by_name.get(name)) {
            (Some(Known::Value(id)), _) => Ok(*id),
            (_, Some(weight)) if weight.is_float() => {
                if weight.dtype != DType::F32 {
                    return Err(format!("`{name}` is {}, the executor's graphs are of f32", weight.dtype));
                }
                self.builder.param(name, &weight.shape).map_err(|e| e.to_string())
            }
            _ => Err(format!("`{name}` is no value of floats or of samples")),
        }
    }
}

/// The type of an input, and what its elements are as ONNX numbers them.
fn ty(file: &ModelFile, input: &ValueInfoProto) -> Result<(TensorType, i32), String> {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref()).ok_or("is no tensor")?;
    let number = tensor.elem_type.unwrap_or(0);
    let wrong = || format!("is {:?}, the executor takes 32-bit floats, integers of up to 64 bits, and truth values", tensor.elem_type());
    let element = piece::element(number).ok_or_else(wrong)?;
    let shape = sizes::sizes(input).ok_or("has no number of axes")?;
    let told = |size: Dim| file.told(&size).map_or(size, Dim::Fixed);
    Ok((TensorType { element, shape: shape.into_iter().map(told).collect() }, number))
}

/// A name of a size without what means something in formulas of sizes.
pub(super) fn plain(name: &str) -> String {
    let letters: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if letters.starts_with(|c: char| c.is_ascii_digit()) { format!("size_{letters}") } else { letters }
}

/// A node where it stands.
struct At<'l, 'f> {
    lift: &'l Lift<'f>,
    node: &'f NodeProto,
    /// Which of the values that it computes is meant.
    output: usize,
}

impl<'f> At<'_, 'f> {
    fn opset(&self) -> i64 {
        self.lift.opset
    }

    /// Whether an input is given.
    fn has(&self, position: usize) -> bool {
        self.node.input.get(position).is_some_and(|name| !name.is_empty())
    }

    /// Positions of all inputs that are given.
    fn all(&self) -> Vec<usize> {
        (0..self.node.input.len()).filter(|position| self.has(*position)).collect()
    }

    /// The type of an input: sizes of weights are known.
    fn ty(&self, position: usize) -> Result<TensorType, String> {
        let name = self.node.input.get(position).map_or("", String::as_str);
        match (self.lift.known.get(name), self.lift.weights.by_name.get(name)) {
            (Some(Known::Value(id)), _) => Ok(self.lift.builder.ty(*id).clone()),
            (_, Some(weight)) => Ok(TensorType::float(weight.shape.iter().copied())),
            _ => Err(format!("the shape of `{name}` is not known")),
        }
    }

    /// Whether an input holds 64-bit integers in the file.
    fn is_int64(&self, position: usize) -> bool {
        let name = self.node.input.get(position).map_or("", String::as_str);
        let Some(Known::Value(id)) = self.lift.known.get(name) else { return false };
        self.lift.numbers.get(id).is_none_or(|number| *number == DataType::Int64 as i32)
    }

    fn rank(&self) -> Result<usize, String> {
        Ok(self.ty(0)?.shape.len())
    }

    /// What an input is for, if it is a weight.
    fn role(&self, position: usize) -> Option<Role> {
        self.lift.weights.by_name.get(self.node.input.get(position)?)?.role
    }

    /// Whole numbers of an input, all of which must be known.
    fn numbers(&self, position: usize) -> Result<Vec<i64>, String> {
        let name = self.node.input.get(position).map_or("", String::as_str);
        numbers::known(self.lift, name).and_then(|numbers| numbers.all()).ok_or_else(|| format!("the numbers of `{name}` are not known beforehand"))
    }

    /// Whole numbers of an input as far as they are known beforehand.
    fn some_numbers(&self, position: usize) -> Result<Vec<Number>, String> {
        let name = self.node.input.get(position).map_or("", String::as_str);
        numbers::known(self.lift, name).map(|numbers| numbers.each()).ok_or_else(|| format!("the numbers of `{name}` are not known beforehand"))
    }

    /// The one number of an input that is a constant.
    fn number(&self, position: usize) -> Result<f64, String> {
        let name = self.node.input.get(position).map_or("", String::as_str);
        let weight = self.lift.weights.by_name.get(name).filter(|weight| weight.elements() == 1);
        let values = weight.and_then(|weight| weight.floats(name).ok());
        values.and_then(|values| values.first().copied()).map(f64::from).ok_or_else(|| format!("`{name}` is not one number that is known beforehand"))
    }

    /// Scales of a resize, which are a constant.
    fn scales(&self) -> Result<Vec<f32>, String> {
        let name = self.node.input.get(2).map_or("", String::as_str);
        let weight = self.lift.weights.by_name.get(name).filter(|weight| weight.shape.len() == 1);
        weight.and_then(|weight| weight.floats(name).ok()).ok_or_else(|| format!("the scales `{name}` are not known beforehand"))
    }

    fn int(&self, name: &str, missing: i64) -> i64 {
        super::uses::int(self.node, name, missing)
    }

    fn float(&self, name: &str, missing: f32) -> f64 {
        super::uses::float(self.node, name, missing).into()
    }

    fn text(&self, name: &str) -> Option<String> {
        let attribute = self.node.attribute.iter().find(|attribute| attribute.name() == name)?;
        Some(String::from_utf8_lossy(attribute.s()).into_owned())
    }

    fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.node.attribute.iter().find(|attribute| attribute.name() == name).map(|attribute| attribute.ints.clone())
    }

    /// Numbers that are an attribute before an opset, and an input from there on; nothing where they are left out.
    fn given(&self, name: &str, position: usize) -> Result<Option<Vec<i64>>, String> {
        match self.ints(name) {
            Some(ints) => Ok(Some(ints)),
            None if self.has(position) => self.numbers(position).map(Some),
            None => Ok(None),
        }
    }
}

//! Nodes without a typed form, as pieces that ONNX Runtime runs.
//!
//! A piece is what a value is computed with, back to values of the graph, to its inputs, and to weights: a function of one result. So nodes that
//! belong together stay together, and what several nodes read is computed once.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use super::super::check::{self, bodies, label};
use super::super::piece::{self, Loaded, Parts, Piece};
use super::super::proto::{AttributeProto, DataType, GraphProto, NodeProto, TensorProto};
use super::{Known, Lift};
use crate::ir::ops::Opaque;
use crate::ir::{Element, TensorType, ValueId};
use crate::store::{DType, Weight};

/// Loaded pieces of a file, by outputs, inputs, and whether they were optimized.
pub(in super::super) type Pieces = BTreeMap<(Vec<String>, Vec<String>, bool), Result<Arc<Loaded>, String>>;

/// Elements at most of a value within a piece that is tried with several sizes, where every open size is one.
const LARGEST: u64 = 1 << 25;

/// The tensor that a node gives as it stands.
pub(super) fn constant(node: &NodeProto) -> Option<&TensorProto> {
    let attribute = node.attribute.iter().find(|attribute| node.op_type() == "Constant" && attribute.name() == "value")?;
    attribute.t.as_ref()
}

/// What a piece is made of, while it is gathered.
#[derive(Default)]
pub(super) struct Cone<'f> {
    /// Nodes by their place in the order in which they run.
    nodes: BTreeMap<usize, &'f NodeProto>,
    /// Values of the graph that it reads, by the file's name.
    pub values: BTreeMap<&'f str, ValueId>,
    /// Weights that it reads.
    pub weights: BTreeSet<&'f str>,
    constants: BTreeMap<&'f str, &'f TensorProto>,
    /// Numbers that are known beforehand.
    numbers: BTreeMap<&'f str, (Vec<i64>, bool)>,
}

impl<'f> Lift<'f> {
    /// A value whose node has no typed form, as one of the graph.
    pub(super) fn opaque(&mut self, name: &'f str) -> Result<ValueId, String> {
        if let Some(Known::Value(id)) = self.known.get(name) {
            return Ok(*id);
        }
        if let Some(reason) = self.refused.get(name) {
            return Err(reason.clone());
        }
        let found = self.piece(name);
        match &found {
            Ok(id) => drop(self.known.insert(name, Known::Value(*id))),
            Err(reason) => drop(self.refused.insert(name, reason.clone())),
        }
        found
    }

    fn piece(&mut self, name: &'f str) -> Result<ValueId, String> {
        let cone = self.cone(name, false)?;
        let (mut ids, mut inputs, mut types, mut turned) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (inner, id) in &cone.values {
            let ty = self.builder.ty(*id).clone();
            let number = self.numbers.get(id).copied().unwrap_or(if ty.element == Element::Float { DataType::Float } else { DataType::Int64 } as i32);
            inputs.push(((*inner).to_owned(), number));
            ids.push(*id);
            types.push(ty);
        }
        for weight in &cone.weights {
            let shape = self.weight(weight).ok_or_else(|| format!("`{weight}` is gone"))?.shape.clone();
            let id = self.builder.param(weight, &shape).map_err(|e| e.to_string())?;
            let flipped = self.file.tensors.iter().any(|held| held.flipped && held.weight.as_deref() == Some(*weight));
            let inner = if flipped { format!("{weight}/rows") } else { (*weight).to_owned() };
            if flipped {
                turned.push(NodeProto {
                    op_type: Some("Transpose".into()),
                    input: vec![inner.clone()],
                    output: vec![(*weight).to_owned()],
                    attribute: vec![AttributeProto::ints("perm", [1, 0])],
                    ..NodeProto::default()
                });
            }
            inputs.push((inner, DataType::Float as i32));
            ids.push(id);
            types.push(TensorType::float(shape));
        }
        let is_open = types.iter().any(|ty| ty.shape.iter().any(|size| size.fixed().is_none()));
        let largest = cone.nodes.values().flat_map(|node| &node.output).map(|output| self.least_of(output)).max().unwrap_or(0);
        if is_open && largest > LARGEST {
            let reason = format!("`{name}` takes values of {largest} elements and more, and would be tried with several sizes");
            self.broken.insert(name, reason.clone());
            return Err(reason);
        }
        let piece = self.loaded(&cone, turned, inputs, &types, name, true).inspect_err(|reason| drop(self.broken.insert(name, reason.clone())))?;
        let batches = &self.batches;
        let output = piece.learn(&types, &|size| batches.contains(size)).inspect_err(|reason| {
            if piece::element(piece.element).is_some() {
                self.broken.insert(name, reason.clone());
            }
        })?;
        let more = cone.nodes.len().saturating_sub(1);
        let last = cone.nodes.values().next_back().map_or_else(|| format!("`{name}`"), |node| label(node));
        let label = if more > 0 { format!("{last} and {more} more") } else { last };
        let number = piece.element;
        let op = Opaque { label, inputs: types, output: Some(output), function: Some(Arc::new(piece)) };
        let id = self.builder.node(name, op, &ids).map_err(|e| e.to_string())?;
        self.numbers.insert(id, number);
        Ok(id)
    }

    /// A piece, loaded once for a file, and once for all that its last node computes. Without `optimize`, loading computes nothing.
    pub(super) fn loaded(
        &self,
        cone: &Cone<'f>,
        turned: Vec<NodeProto>,
        inputs: Vec<(String, i32)>,
        types: &[TensorType],
        name: &str,
        optimize: bool,
    ) -> Result<Piece, String> {
        let outputs: Vec<String> = match self.makers.get(name) {
            Some((_, node)) => node.output.iter().filter(|output| !output.is_empty()).cloned().collect(),
            None => vec![name.to_owned()],
        };
        let key = (outputs.clone(), inputs.iter().map(|(inner, _)| inner.clone()).collect(), optimize);
        let pieces = || self.file.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = pieces().get(&key) {
            return held.clone().and_then(|loaded| Piece::new(loaded, name));
        }
        let ranks: Vec<usize> = types.iter().map(|ty| ty.shape.len()).collect();
        let made = self.gathered(cone, turned, inputs, outputs).and_then(|parts| Loaded::new(parts, &ranks, &self.file.path, optimize)).map(Arc::new);
        pieces().insert(key, made.clone());
        made.and_then(|loaded| Piece::new(loaded, name))
    }

    pub(super) fn weight(&self, name: &str) -> Option<&'f Weight> {
        self.weights.by_name.get(name)
    }

    /// Everything that a value is computed with, back to what the graph has; back to numbers that are known, too, where they are `trusted` to be
    /// of 64 bits.
    pub(super) fn cone(&self, name: &'f str, trusted: bool) -> Result<Cone<'f>, String> {
        let mut cone = Cone::default();
        let mut open = vec![name];
        let mut seen = BTreeSet::new();
        while let Some(inner) = open.pop() {
            if !seen.insert(inner) {
                continue;
            }
            // What could not be run cannot be run as a part of more.
            if let Some(reason) = self.broken.get(inner) {
                return Err(reason.clone());
            }
            // Whole numbers are computed again, as far as they follow from sizes: a piece that reads them could not be tried without.
            let passed = |id: ValueId| self.builder.ty(id).element == Element::Float || !self.makers.contains_key(inner);
            if let Some(Known::Value(id)) = self.known.get(inner)
                && passed(*id)
            {
                cone.values.insert(inner, *id);
            } else if let (true, Some(Known::Numbers(numbers))) = (trusted, self.known.get(inner))
                && let Some(known) = numbers.known()
            {
                cone.numbers.insert(inner, known);
            } else if self.is_parameter(inner) {
                cone.weights.insert(inner);
            } else if let Some(tensor) = self.initializers.get(inner) {
                self.require_untouched(inner)?;
                cone.constants.insert(inner, tensor);
            } else if let Some((place, node)) = self.makers.get(inner) {
                self.require_untouched(inner)?;
                if cone.nodes.insert(*place, node).is_none() {
                    open.extend(check::reads(node));
                    bodies(node).try_for_each(|body| self.of_body(body, &mut cone))?;
                }
            } else {
                return Err(format!("`{inner}` cannot be given to ONNX Runtime"));
            }
        }
        Ok(cone)
    }

    /// Weights in bodies are given from outside, so that passes may change them.
    fn of_body(&self, body: &'f GraphProto, cone: &mut Cone<'f>) -> Result<(), String> {
        let constants = body.node.iter().filter_map(constant);
        for name in body.initializer.iter().chain(constants).filter_map(|tensor| self.weight_of(tensor)) {
            if self.is_parameter(name) {
                cone.weights.insert(name);
            } else {
                self.require_untouched(name)?;
            }
        }
        body.node.iter().flat_map(bodies).try_for_each(|body| self.of_body(body, cone))
    }

    /// The weight that a tensor of the file is. Its name alone does not tell: a body may call something else as the graph calls a weight.
    fn weight_of(&self, tensor: &TensorProto) -> Option<&'f str> {
        let mark = tensor.mark.and_then(|mark| usize::try_from(mark).ok())?;
        self.file.tensors.get(mark)?.weight.as_deref()
    }

    pub(super) fn is_parameter(&self, name: &str) -> bool {
        self.weight(name).is_some_and(|weight| weight.dtype == DType::F32)
    }

    /// What is taken over as it stands in the file must be what it was.
    pub(super) fn require_untouched(&self, name: &str) -> Result<(), String> {
        match (self.weight(name), self.file.weights.get(name)) {
            (Some(now), Some(before)) if !Arc::ptr_eq(&now.source(), &before.source()) => {
                Err(format!("`{name}` was changed, is {} and read by a node without typed form", now.dtype))
            }
            (None, Some(_)) => Err(format!("`{name}` is gone")),
            _ => Ok(()),
        }
    }

    fn gathered(&self, cone: &Cone<'f>, mut nodes: Vec<NodeProto>, inputs: Vec<(String, i32)>, outputs: Vec<String>) -> Result<Parts, String> {
        let model = &self.file.model;
        let own = |node: &&NodeProto| model.functions.iter().any(|of| of.name() == node.op_type() && of.domain() == node.domain());
        if let Some(node) = cone.nodes.values().find(|node| own(node)) {
            return Err(format!("{} is a function of the file", label(node)));
        }
        for node in cone.nodes.values() {
            let mut node = (*node).clone();
            self.fill(&mut node, cone)?;
            nodes.push(node);
        }
        let mut constants = cone.constants.values().map(|tensor| self.filled(tensor)).collect::<Result<Vec<_>, _>>()?;
        constants.extend(cone.numbers.iter().map(|(name, (values, vector))| TensorProto {
            name: Some((*name).to_owned()),
            data_type: Some(DataType::Int64 as i32),
            dims: vector.then(|| i64::try_from(values.len()).unwrap_or(i64::MAX)).into_iter().collect(),
            raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            ..TensorProto::default()
        }));
        let tried = inputs.iter().filter_map(|(name, _)| Some((name.clone(), self.file.told_number(name)?))).collect();
        Ok(Parts { nodes, constants, inputs, tried, outputs, opsets: model.opset_import.clone(), ir_version: model.ir_version })
    }

    /// Puts elements back into a node, and takes weights out of its bodies.
    fn fill(&self, node: &mut NodeProto, cone: &Cone<'f>) -> Result<(), String> {
        for attribute in &mut node.attribute {
            for tensor in attribute.t.iter_mut().chain(&mut attribute.tensors) {
                *tensor = self.filled(tensor)?;
            }
            if attribute.sparse_tensor.is_some() || !attribute.sparse_tensors.is_empty() {
                return Err("it has a sparse tensor".into());
            }
            for body in attribute.g.iter_mut().chain(&mut attribute.graphs) {
                let given = |tensor: &TensorProto| self.weight_of(tensor).is_some_and(|name| cone.weights.contains(name));
                body.initializer.retain(|tensor| !given(tensor));
                body.node.retain(|node| !constant(node).is_some_and(given));
                for tensor in &mut body.initializer {
                    *tensor = self.filled(tensor)?;
                }
                body.node.iter_mut().try_for_each(|node| self.fill(node, cone))?;
            }
        }
        Ok(())
    }

    /// A tensor with its elements.
    pub(super) fn filled(&self, tensor: &TensorProto) -> Result<TensorProto, String> {
        let mut whole = TensorProto { mark: None, ..tensor.clone() };
        let Some(bytes) = self.file.elements_away(tensor) else { return Ok(whole) };
        let bytes = bytes?;
        (whole.raw_data, whole.data_location) = (Some(bytes), None);
        whole.external_data.clear();
        Ok(whole)
    }
}

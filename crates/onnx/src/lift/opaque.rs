//! Nodes without a typed form, as opaque subgraphs that ONNX Runtime runs.
//!
//! An opaque subgraph computes one value from typed values, inputs and weights. Related nodes stay in
//! one subgraph, and values with several consumers are computed once.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use super::super::check::{self, bodies, label};
use super::super::initializer_roles;
use super::super::opaque_subgraph::{self, LoadedSubgraph, OpaqueSubgraph};
use super::super::proto::{AttributeProto, DataType, GraphProto, NodeProto, TensorProto};
use super::super::renaming::shadowed;
use super::super::subgraph_parts::SubgraphParts;
use super::super::widened::widen_tensor;
use super::{Lift, LiftedValue};
use crate::ir::ops::Opaque;
use crate::ir::{Element, TensorType, ValueId};
use crate::store::{DType, Weight};

/// Maximum number of elements of a value within a subgraph that runs trials, if all open dimensions were
/// one.
const MAX_TRIAL_ELEMENTS: u64 = 1 << 25;

/// The tensor of a `Constant` node.
pub(super) fn constant(node: &NodeProto) -> Option<&TensorProto> {
    let attribute = node.attribute.iter().find(|attribute| node.op_type() == "Constant" && attribute.name() == "value")?;
    attribute.t.as_ref()
}

/// Floats that determine the shape of a node's output. They stay constants, because trials with other
/// values fail.
fn size_inputs(node: &NodeProto) -> impl Iterator<Item = &str> {
    let places = initializer_roles::size_inputs(node);
    node.input.get(places.start..places.end.min(node.input.len())).unwrap_or_default().iter().map(String::as_str)
}

/// The contents of a subgraph under construction.
#[derive(Default)]
pub(super) struct Cone<'f> {
    /// Nodes, by topological position.
    nodes: BTreeMap<usize, &'f NodeProto>,
    /// Values of the graph that it reads, by name in the file.
    pub values: BTreeMap<&'f str, ValueId>,
    /// Weights that it reads.
    pub weights: BTreeSet<&'f str>,
    constants: BTreeMap<&'f str, &'f TensorProto>,
    /// Statically known integers.
    numbers: BTreeMap<&'f str, (Vec<i64>, bool)>,
}

impl<'f> Lift<'f> {
    /// Adds a value without a typed form to the graph.
    pub(super) fn opaque(&mut self, name: &'f str) -> Result<ValueId, String> {
        if let Some(LiftedValue::Value(id)) = self.lifted.get(name) {
            return Ok(*id);
        }
        if let Some(reason) = self.refused.get(name) {
            return Err(reason.clone());
        }
        let found = self.build_subgraph(name);
        match &found {
            Ok(id) => drop(self.lifted.insert(name, LiftedValue::Value(*id))),
            Err(reason) => drop(self.refused.insert(name, reason.clone())),
        }
        found
    }

    fn build_subgraph(&mut self, name: &'f str) -> Result<ValueId, String> {
        let cone = self.cone(name, false)?;
        let (mut ids, mut inputs, mut types, mut transposes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (inner, id) in &cone.values {
            let ty = self.builder.ty(*id).clone();
            let number = self.numbers.get(id).copied().unwrap_or(if ty.element == Element::Float { DataType::Float } else { DataType::Int64 } as i32);
            inputs.push(((*inner).to_owned(), number));
            ids.push(*id);
            types.push(ty);
        }
        for weight in &cone.weights {
            let shape = self.weight(weight).ok_or_else(|| format!("`{weight}` has been removed"))?.shape.clone();
            let id = self.builder.param(weight, &shape).map_err(|e| e.to_string())?;
            let flipped = self.file.is_flipped(weight);
            let inner = if flipped { format!("{weight}/rows") } else { (*weight).to_owned() };
            if flipped {
                transposes.push(NodeProto {
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
        let largest = cone.nodes.values().flat_map(|node| &node.output).map(|output| self.min_elements_of(output)).max().unwrap_or(0);
        if is_open && largest > MAX_TRIAL_ELEMENTS {
            let reason = format!("`{name}` computes values with at least {largest} elements, which is too large for trials with several sizes");
            self.broken.insert(name, reason.clone());
            return Err(reason);
        }
        let subgraph =
            self.load_subgraph(&cone, transposes, inputs, &types, name, true).inspect_err(|reason| drop(self.broken.insert(name, reason.clone())))?;
        let batches = &self.batches;
        let output = subgraph.infer_type(&types, &|size| batches.contains(size)).inspect_err(|reason| {
            if opaque_subgraph::element(subgraph.element).is_some() {
                self.broken.insert(name, reason.clone());
            }
        })?;
        let more = cone.nodes.len().saturating_sub(1);
        let last = cone.nodes.values().next_back().map_or_else(|| format!("`{name}`"), |node| label(node));
        let label = if more > 0 { format!("{last} and {more} more") } else { last };
        let number = subgraph.element;
        let op = Opaque { label, inputs: types, output: Some(output), function: Some(Arc::new(subgraph)), ..Opaque::default() };
        let id = self.builder.node(name, op, &ids).map_err(|e| e.to_string())?;
        self.numbers.insert(id, number);
        Ok(id)
    }

    /// Loads a subgraph, or returns it from the cache of the file. All outputs of a node share one.
    /// Without `optimize`, loading does not fold constants.
    pub(super) fn load_subgraph(
        &self,
        cone: &Cone<'f>,
        transposes: Vec<NodeProto>,
        inputs: Vec<(String, i32)>,
        types: &[TensorType],
        name: &str,
        optimize: bool,
    ) -> Result<OpaqueSubgraph, String> {
        let outputs: Vec<String> = match self.producers.get(name) {
            Some((_, node)) => node.output.iter().filter(|output| !output.is_empty()).cloned().collect(),
            None => vec![name.to_owned()],
        };
        let key = (outputs.clone(), inputs.iter().map(|(inner, _)| inner.clone()).collect(), optimize);
        let subgraphs = || self.file.subgraphs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cached) = subgraphs().get(&key) {
            return cached.clone().and_then(|loaded| OpaqueSubgraph::new(loaded, name));
        }
        let loaded =
            self.subgraph_parts(cone, transposes, inputs, outputs).and_then(|parts| LoadedSubgraph::new(parts, types, &self.file.path, optimize)).map(Arc::new);
        subgraphs().insert(key, loaded.clone());
        loaded.and_then(|loaded| OpaqueSubgraph::new(loaded, name))
    }

    pub(super) fn weight(&self, name: &str) -> Option<&'f Weight> {
        self.weights.by_name.get(name)
    }

    /// Collects the nodes from which a value is computed, up to typed values. `trusted`: also up to
    /// statically known integers, which are then assumed to have 64 bits.
    pub(super) fn cone(&self, name: &'f str, trusted: bool) -> Result<Cone<'f>, String> {
        let mut cone = Cone::default();
        let mut open = vec![name];
        let (mut seen, mut sizes) = (BTreeSet::new(), BTreeSet::new());
        while let Some(inner) = open.pop() {
            if !seen.insert(inner) {
                continue;
            }
            // A part that failed to run also fails in a larger subgraph.
            if let Some(reason) = self.broken.get(inner) {
                return Err(reason.clone());
            }
            // Integers that depend on sizes are recomputed within the subgraph: trials of a subgraph
            // with integer inputs would not have valid values for them.
            let passed = |id: ValueId| self.builder.ty(id).element == Element::Float || !self.producers.contains_key(inner);
            if let Some(LiftedValue::Value(id)) = self.lifted.get(inner)
                && passed(*id)
            {
                cone.values.insert(inner, *id);
            } else if let (true, Some(LiftedValue::Numbers(numbers))) = (trusted, self.lifted.get(inner))
                && let Some(known) = numbers.constants()
            {
                cone.numbers.insert(inner, known);
            } else if self.is_parameter(inner) && !(sizes.contains(inner) && self.require_unchanged(inner).is_ok()) {
                cone.weights.insert(inner);
            } else if let Some(tensor) = self.initializers.get(inner) {
                self.require_unchanged(inner)?;
                cone.constants.insert(inner, tensor);
            } else if let Some((place, node)) = self.producers.get(inner) {
                self.require_unchanged(inner)?;
                if cone.nodes.insert(*place, node).is_none() {
                    open.extend(check::reads(node));
                    sizes.extend(size_inputs(node));
                    bodies(node).try_for_each(|body| self.collect_body_weights(body, &mut cone))?;
                }
            } else {
                return Err(format!("`{inner}` cannot be passed to ONNX Runtime"));
            }
        }
        Ok(cone)
    }

    /// Weights in bodies become inputs of the subgraph, so that passes can change them.
    fn collect_body_weights(&self, body: &'f GraphProto, cone: &mut Cone<'f>) -> Result<(), String> {
        let constants = body.node.iter().filter_map(constant);
        for name in body.initializer.iter().chain(constants).filter_map(|tensor| self.weight_of(tensor)) {
            if self.is_parameter(name) {
                cone.weights.insert(name);
            } else {
                self.require_unchanged(name)?;
            }
        }
        body.node.iter().flat_map(bodies).try_for_each(|body| self.collect_body_weights(body, cone))
    }

    /// The weight of a tensor. The name does not identify it, because bodies may shadow names.
    fn weight_of(&self, tensor: &TensorProto) -> Option<&'f str> {
        let mark = tensor.mark.and_then(|mark| usize::try_from(mark).ok())?;
        self.file.tensors.get(mark)?.weight.as_deref()
    }

    /// Whether a value is a weight that the graph reads in 32 bits. It may be stored in 16 bits: the file
    /// converts it, will do so if a pass has changed its dtype, or computes with 16 bits.
    pub(super) fn is_parameter(&self, name: &str) -> bool {
        let Some(weight) = self.weight(name) else { return false };
        let before = self.file.weights.get(name);
        let is_converted = before.is_some_and(|before| before.dtype == DType::F32 || self.file.dequantized_values.contains(name));
        weight.dtype == DType::F32 || (is_converted || self.file.is_half) && matches!(weight.dtype, DType::F16 | DType::BF16)
    }

    /// Rejects changed weights in parts of the file that are copied verbatim.
    pub(super) fn require_unchanged(&self, name: &str) -> Result<(), String> {
        match (self.weight(name), self.file.weights.get(name)) {
            (Some(now), Some(before)) if !Arc::ptr_eq(&now.source(), &before.source()) => {
                Err(format!("`{name}` was changed to {} and is read by a node without a typed form", now.dtype))
            }
            (None, Some(_)) => Err(format!("`{name}` has been removed")),
            _ => Ok(()),
        }
    }

    fn subgraph_parts(&self, cone: &Cone<'f>, mut nodes: Vec<NodeProto>, inputs: Vec<(String, i32)>, outputs: Vec<String>) -> Result<SubgraphParts, String> {
        let model = &self.file.model;
        let own = |node: &&NodeProto| model.functions.iter().any(|of| of.name() == node.op_type() && of.domain() == node.domain());
        if let Some(node) = cone.nodes.values().find(|node| own(node)) {
            return Err(format!("{} is a function that is defined in the file", label(node)));
        }
        let mut taken: BTreeSet<String> = cone.nodes.values().flat_map(|node| node.output.iter().cloned()).collect();
        for node in cone.nodes.values() {
            let mut node = (*node).clone();
            // Another output is needed, such as the mask of a sequence.
            let is_given = |name: &str| inputs.iter().any(|(input, _)| input == name);
            node.output.iter_mut().filter(|name| is_given(name)).for_each(|name| *name = super::super::fresh(&mut taken, format!("{name}/again")));
            self.fill_node(&mut node, cone)?;
            if let Some(name) = shadowed(&node) {
                return Err(format!("a body of {} defines `{name}`, and another one reads a value of this name outside: rename one of them", label(&node)));
            }
            nodes.push(node);
        }
        let mut constants = cone.constants.values().map(|tensor| self.with_elements(tensor)).collect::<Result<Vec<_>, _>>()?;
        constants.extend(cone.numbers.iter().map(|(name, (values, vector))| TensorProto {
            name: Some((*name).to_owned()),
            data_type: Some(DataType::Int64 as i32),
            dims: vector.then(|| i64::try_from(values.len()).unwrap_or(i64::MAX)).into_iter().collect(),
            raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            ..TensorProto::default()
        }));
        let trial_values = inputs.iter().filter_map(|(name, _)| Some((name.clone(), self.file.fixed_scalar(name)?))).collect();
        Ok(SubgraphParts { nodes, constants, inputs, trial_values, outputs, opsets: model.opset_import.clone(), ir_version: model.ir_version })
    }

    /// Restores tensor elements in a node, and removes weights from its bodies.
    fn fill_node(&self, node: &mut NodeProto, cone: &Cone<'f>) -> Result<(), String> {
        for attribute in &mut node.attribute {
            for tensor in attribute.t.iter_mut().chain(&mut attribute.tensors) {
                *tensor = self.with_elements(tensor)?;
            }
            if attribute.sparse_tensor.is_some() || !attribute.sparse_tensors.is_empty() {
                return Err("it has a sparse tensor".into());
            }
            for body in attribute.g.iter_mut().chain(&mut attribute.graphs) {
                let given = |tensor: &TensorProto| self.weight_of(tensor).is_some_and(|name| cone.weights.contains(name));
                body.initializer.retain(|tensor| !given(tensor));
                body.node.retain(|node| !constant(node).is_some_and(given));
                for tensor in &mut body.initializer {
                    *tensor = self.with_elements(tensor)?;
                }
                body.node.iter_mut().try_for_each(|node| self.fill_node(node, cone))?;
            }
        }
        Ok(())
    }

    /// A tensor with its elements.
    pub(super) fn with_elements(&self, tensor: &TensorProto) -> Result<TensorProto, String> {
        let mut full = TensorProto { mark: None, ..tensor.clone() };
        if let Some(bytes) = self.file.out_of_line_elements(tensor) {
            (full.raw_data, full.data_location) = (Some(bytes?), None);
            full.external_data.clear();
        }
        if self.file.is_half {
            widen_tensor(&mut full)?;
        }
        Ok(full)
    }
}

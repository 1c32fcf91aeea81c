//! Folding of nodes that depend only on constants, with limits on their size.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::check::{self, label};
use super::super::elements;
use super::super::numbers::{self, KnownValues, Number, Numbers};
use super::super::opaque_subgraph::RANDOM;
use super::super::proto::NodeProto;
use super::super::sizes::{BROADCAST, GROWING, SAME_SHAPE, output_sizes, product};
use super::{Lift, LiftedValue};
use crate::ir::{Dim, ValueId};

/// Maximum number of elements that the nodes of a file may compute from constants: 1 GiB of floats.
const MAX_ELEMENTS: u64 = 1 << 28;

impl<'f> Lift<'f> {
    /// Folds a node that depends only on constants. ONNX Runtime computes the value if it is a few
    /// integers. Fails if the result is too large.
    pub(super) fn fold(&mut self, node: &'f NodeProto) -> Result<Option<LiftedValue>, String> {
        let [name] = node.output.as_slice() else { return Ok(None) };
        let constant = |name: &&str| match self.lifted.get(name) {
            Some(LiftedValue::Numbers(numbers)) => numbers.all().is_some(),
            Some(LiftedValue::Constant | LiftedValue::Folded) => true,
            Some(_) => false,
            None => self.initializers.contains_key(name),
        };
        let reads = check::reads(node);
        // The limit applies only to values that depend on nothing but constants.
        if reads.is_empty() || !reads.iter().all(|name| self.from_constants.contains(name) || constant(name)) {
            return Ok(None);
        }
        let folds = reads.iter().all(|name| constant(name) && !self.is_parameter(name)) && !RANDOM.contains(&node.op_type());
        self.from_constants.insert(name);
        self.check_growth(node, name, folds)?;
        if !folds {
            return Ok(None);
        }
        let Some(cone) = self.cone(name, true).ok().filter(|cone| cone.values.is_empty() && cone.weights.is_empty()) else { return Ok(None) };
        let Ok(subgraph) = self.load_subgraph(&cone, Vec::new(), Vec::new(), &[], name, false) else { return Ok(None) };
        // Larger constants are computed by their consumers.
        if self.folded_sizes.get(name.as_str()).is_some_and(|sizes| product(sizes) > numbers::MAX_TRACKED as u64) {
            return Ok(Some(LiftedValue::Folded));
        }
        Ok(Some(subgraph.numbers().and_then(|(values, vector)| Numbers::new(&values, vector)).map_or(LiftedValue::Folded, LiftedValue::Numbers)))
    }

    /// Rejects a node whose output exceeds the limit for all sizes of open dimensions, even if it
    /// depends on inputs.
    pub(super) fn check_min_elements(&mut self, node: &'f NodeProto, name: &'f str) -> Result<(), String> {
        let input = |at: usize| node.input_name(at);
        let numbers = |at: usize| {
            let each = self.numbers(input(at)).map(|numbers| numbers.each()).unwrap_or_default();
            each.iter().filter_map(Number::constant).fold(1u64, |all, number| all.saturating_mul(u64::try_from(number).unwrap_or(1)))
        };
        let before = self.min_elements_of(input(0));
        let min_elements = match node.op_type() {
            "ConstantOfShape" => numbers(0),
            "Expand" => numbers(1).max(if numbers(1) == 0 { 0 } else { before }),
            "Tile" => before.saturating_mul(numbers(1)),
            "Concat" => node.input.iter().fold(0u64, |all, name| all.saturating_add(self.min_elements_of(name))),
            op if SAME_SHAPE.contains(&op) => before,
            op if BROADCAST.contains(&op) => node.input.iter().map(|name| self.min_elements_of(name)).max().unwrap_or(1),
            _ => return Ok(()),
        };
        if min_elements > MAX_ELEMENTS && GROWING.contains(&node.op_type()) && min_elements > before {
            let reason = format!("{} creates at least {min_elements} elements, which exceeds the limit of {MAX_ELEMENTS}", label(node));
            self.broken.insert(name, reason.clone());
            self.refused.insert(name, reason.clone());
            return Err(reason);
        }
        self.min_elements.insert(name, min_elements);
        Ok(())
    }

    pub(super) fn min_elements_of(&self, name: &str) -> u64 {
        let open = |id: ValueId| self.builder.ty(id).shape.iter().filter_map(Dim::fixed).fold(1u64, |all, size| all.saturating_mul(size as u64));
        match (self.min_elements.get(name), self.lifted.get(name)) {
            (Some(min_elements), _) => *min_elements,
            (None, Some(LiftedValue::Value(id))) => open(*id),
            _ => 1,
        }
    }

    /// Rejects a node that expands constants beyond the limit, and records its output shape. `folds`:
    /// the output counts towards the limit of the file.
    fn check_growth(&mut self, node: &'f NodeProto, name: &'f str, folds: bool) -> Result<(), String> {
        let Some(sizes) = output_sizes(self, node) else { return Ok(()) };
        let count = product(&sizes);
        let larger = |name: &&str| self.sizes(name).is_none_or(|sizes| product(&sizes) < count);
        let grows = (GROWING.contains(&node.op_type()) || BROADCAST.contains(&node.op_type())) && check::reads(node).iter().all(larger);
        let all = self.folded_elements.saturating_add(if folds && grows { count } else { 0 });
        if grows && (count > MAX_ELEMENTS || all > MAX_ELEMENTS) {
            let what = if count > MAX_ELEMENTS { format!("{count} elements") } else { format!("{all} elements in total with other folded constants") };
            let reason = format!("{} creates {what}, which exceeds the limit of {MAX_ELEMENTS}", label(node));
            // It cannot be a part of an opaque subgraph either.
            self.broken.insert(name, reason.clone());
            self.refused.insert(name, reason.clone());
            return Err(reason);
        }
        self.folded_elements = all;
        self.folded_sizes.insert(name, sizes);
        Ok(())
    }
}

impl KnownValues for Lift<'_> {
    fn numbers(&self, name: &str) -> Option<Numbers> {
        match self.lifted.get(name) {
            Some(LiftedValue::Numbers(numbers)) => Some(numbers.clone()),
            Some(_) => None,
            None => numbers::constant(self.initializers.get(name)?),
        }
    }

    fn shape(&self, name: &str) -> Option<Vec<Dim>> {
        match self.lifted.get(name)? {
            LiftedValue::Value(id) => Some(self.builder.ty(*id).shape.clone()),
            LiftedValue::Numbers(numbers) => Some(numbers.shape()),
            _ => None,
        }
    }

    fn sizes(&self, name: &str) -> Option<Vec<u64>> {
        if let Some(sizes) = self.folded_sizes.get(name) {
            return Some(sizes.clone());
        }
        if let Some(numbers) = self.numbers(name) {
            let (count, vector) = (numbers.each().len() as u64, numbers.constants().is_none_or(|(_, vector)| vector));
            return Some(if vector { vec![count] } else { Vec::new() });
        }
        if let Some(LiftedValue::Value(id)) = self.lifted.get(name) {
            return self.builder.ty(*id).shape.iter().map(|size| size.fixed().map(|size| size as u64)).collect();
        }
        let (sizes, _) = elements::shape(self.constant_tensor(name)?).ok()?;
        Some(sizes.into_iter().map(|size| size as u64).collect())
    }

    fn scales(&self, name: &str) -> Option<Vec<f32>> {
        self.weight(name).filter(|weight| weight.elements() <= 8)?.floats(name).ok()
    }
}

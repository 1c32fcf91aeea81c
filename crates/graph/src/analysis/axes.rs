//! Equality of axes across a graph, from the axis notation of its ops.

use std::collections::BTreeMap;

use super::atoms::{Atoms, AxisId};
use crate::error::Result;
use crate::ir::{Axes, Axis, Dim, Graph, Kind, Node, Slicing, Value};

/// Outputs that carry features instead of predictions: they may become narrower.
const FEATURES: [&str; 3] = ["last_hidden_state", "pooler_output", "sentence_embedding"];

/// The axes of a graph's values and the letters of its nodes.
pub(super) struct Traced {
    pub atoms: Atoms,
    /// Axes of each value; `None` for dynamic sizes.
    pub values: Vec<Vec<Option<AxisId>>>,
    /// Letters of each node.
    pub letters: Vec<BTreeMap<String, (AxisId, Slicing)>>,
    /// Feature outputs, with their last axes.
    pub features: Vec<(String, AxisId)>,
}

/// Traces all axes.
pub(super) fn trace(graph: &Graph) -> Result<Traced> {
    let mut atoms = Atoms::default();
    let axes = |value: &Value, atoms: &mut Atoms| value.ty.shape.iter().map(|dim| dim.fixed().map(|size| atoms.atom(size))).collect();
    let values: Vec<Vec<Option<AxisId>>> = graph.values().iter().map(|value| axes(value, &mut atoms)).collect();
    let mut traced = Traced { atoms, values, letters: Vec::with_capacity(graph.nodes().len()), features: Vec::new() };
    for node in graph.nodes() {
        let letters = traced.node(graph, node)?;
        traced.letters.push(letters);
    }
    for (id, value) in graph.inputs() {
        traced.freeze(id.index(), &format!("input `{}`", value.name));
    }
    // Feature outputs of a model that also has predictions are ignored.
    let answers = graph.outputs().iter().any(|(name, _)| !FEATURES.contains(&name.as_str()));
    for (name, id) in graph.outputs() {
        if !FEATURES.contains(&name.as_str()) {
            traced.freeze(id.index(), &format!("output `{name}`"));
        } else if !answers && let Some(Some(axis)) = traced.values[id.index()].last() {
            traced.features.push((name.clone(), *axis));
        }
    }
    Ok(traced)
}

impl Traced {
    fn freeze(&mut self, value: usize, reason: &str) {
        for axis in self.values[value].clone().into_iter().flatten() {
            self.atoms.freeze(axis, reason);
        }
    }

    fn node(&mut self, graph: &Graph, node: &Node) -> Result<BTreeMap<String, (AxisId, Slicing)>> {
        let axes = Axes::parse(&node.op.spec().axes(&graph.input_types(node)))?;
        let what = format!("{} `{}`", node.op.name(), graph.value(node.output).name);
        let mut binding = Binding { traced: self, letters: BTreeMap::new(), what };
        let tensors: Vec<(usize, &[Axis])> = node.inputs.iter().map(|id| id.index()).zip(axes.inputs.iter().map(Vec::as_slice)).collect();
        let output = (node.output.index(), axes.output.as_slice());
        let all = || tensors.iter().copied().chain([output]);
        // Letters get their sizes from axes of a single letter, then those in compound axes from the
        // remaining size.
        all().for_each(|(value, axes)| binding.letters(graph, value, axes));
        all().for_each(|(value, axes)| binding.compounds(graph, value, axes));
        let leading = |(value, axes): (usize, &[Axis])| {
            axes.contains(&Axis::Leading).then(|| (value, (graph.values()[value].ty.shape.len() + 1).saturating_sub(axes.len())))
        };
        if let Some(output) = leading(output) {
            tensors.iter().filter_map(|tensor| leading(*tensor)).for_each(|input| binding.leading(graph, input, output));
        }
        let Binding { letters, what, .. } = binding;
        for (axis, slicing) in letters.values() {
            if *slicing == Slicing::Frozen {
                self.atoms.freeze(*axis, &what);
            }
        }
        Ok(letters)
    }
}

/// The letters of a node while they are bound to axes.
struct Binding<'t> {
    traced: &'t mut Traced,
    letters: BTreeMap<String, (AxisId, Slicing)>,
    what: String,
}

impl Binding<'_> {
    /// The axes of a value with their notation.
    fn pairs<'a>(&self, graph: &Graph, value: usize, axes: &'a [Axis]) -> Vec<(AxisId, &'a Axis)> {
        let rank = graph.values()[value].ty.shape.len();
        let lead = if axes.contains(&Axis::Leading) { (rank + 1).saturating_sub(axes.len()) } else { 0 };
        let mut found = Vec::new();
        let mut at = 0;
        for axis in axes {
            if *axis == Axis::Leading {
                at += lead;
            } else {
                found.extend(self.traced.values[value].get(at).copied().flatten().map(|id| (id, axis)));
                at += 1;
            }
        }
        found
    }

    fn letters(&mut self, graph: &Graph, value: usize, axes: &[Axis]) {
        for (id, axis) in self.pairs(graph, value, axes) {
            match axis {
                Axis::Frozen => self.traced.atoms.freeze(id, &self.what),
                Axis::Letter { name, slicing, .. } => self.bind(name, *slicing, id),
                _ => {}
            }
        }
    }

    fn bind(&mut self, name: &str, slicing: Slicing, id: AxisId) {
        match self.letters.get(name).copied() {
            None => drop(self.letters.insert(name.to_owned(), (id, slicing))),
            // An axis of size 1 is broadcast.
            Some((known, _)) if self.traced.atoms.size(known) != self.traced.atoms.size(id) => {
                if self.traced.atoms.size(known) == 1 {
                    self.letters.insert(name.to_owned(), (id, slicing));
                }
            }
            Some((known, _)) => self.traced.atoms.unify(known, id, &self.what),
        }
    }

    fn compounds(&mut self, graph: &Graph, value: usize, axes: &[Axis]) {
        for (id, axis) in self.pairs(graph, value, axes) {
            let (parts, product) = match axis {
                Axis::Product(parts) => (parts, true),
                Axis::Concatenation(parts) => (parts, false),
                _ => continue,
            };
            match self.parts(parts, self.traced.atoms.size(id), product) {
                Some(parts) => {
                    let atoms = &mut self.traced.atoms;
                    let whole = if product { atoms.product(parts) } else { atoms.concatenation(parts) };
                    atoms.unify(whole, id, &self.what);
                }
                None => self.traced.atoms.freeze(id, &self.what),
            }
        }
    }

    /// The axes of the letters of a compound axis of size `total`; at most one of them may be unbound.
    fn parts(&mut self, parts: &[Axis], total: usize, product: bool) -> Option<Vec<AxisId>> {
        let mut known = Vec::with_capacity(parts.len());
        for part in parts {
            let Axis::Letter { name, size, slicing } = part else { return None };
            let axis = self.letters.get(name).map(|(id, _)| *id).or_else(|| size.map(|size| self.traced.atoms.atom(size)));
            known.push((name, *slicing, axis));
        }
        let sizes = known.iter().filter_map(|(_, _, axis)| axis.map(|axis| self.traced.atoms.size(axis)));
        let rest = if product { total / sizes.product::<usize>().max(1) } else { total.checked_sub(sizes.sum())? };
        let mut found = Vec::with_capacity(known.len());
        for (name, slicing, axis) in known {
            let axis = axis.unwrap_or_else(|| self.traced.atoms.atom(rest));
            self.letters.entry(name.clone()).or_insert((axis, slicing));
            found.push(axis);
        }
        let sizes = found.iter().map(|axis| self.traced.atoms.size(*axis));
        (total == if product { sizes.product::<usize>() } else { sizes.sum() }).then_some(found)
    }

    /// Unifies leading axes, aligned at the last one, unless they are broadcast.
    fn leading(&mut self, graph: &Graph, (input, count): (usize, usize), (output, all): (usize, usize)) {
        for back in 1..=count.min(all) {
            let fixed = |value: usize, at: usize| matches!(graph.values()[value].ty.shape.get(at), Some(Dim::Fixed(_)));
            if !fixed(input, count - back) || !fixed(output, all - back) {
                continue;
            }
            if let (Some(a), Some(b)) = (self.traced.values[input][count - back], self.traced.values[output][all - back])
                && self.traced.atoms.size(a) == self.traced.atoms.size(b)
            {
                self.traced.atoms.unify(a, b, &self.what);
            }
        }
    }
}

/// Whether a value is a tensor of the checkpoint.
pub(super) fn is_param(value: &Value) -> bool {
    value.kind == Kind::Param
}

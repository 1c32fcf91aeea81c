//! Edits a graph by rebuilding it node by node, so that every edit is type-checked immediately.

use super::graph::{Graph, Kind, Node, ValueId};
use super::{Builder, Catalog};
use crate::error::{Error, Result};

/// One node of the old graph while it is rebuilt.
pub struct Rewrite<'s, 'c> {
    /// The builder of the new graph.
    pub builder: &'s mut Builder<'c>,
    /// The node of the old graph.
    pub node: &'s Node,
    /// Its name.
    pub name: &'s str,
    /// The node's inputs, in the new graph.
    pub inputs: Vec<ValueId>,
}

impl Rewrite<'_, '_> {
    /// Copies the node without changes.
    pub fn copy(self) -> Result<ValueId> {
        self.builder.node(self.name, self.node.op.clone(), &self.inputs)
    }
}

/// Rebuilds a graph over the tensors of a checkpoint. `edit` wires the replacement of each node and
/// returns its value. Nodes and parameters that no output depends on are removed.
pub fn rebuild(graph: &Graph, catalog: &dyn Catalog, edit: &mut dyn FnMut(Rewrite) -> Result<ValueId>) -> Result<Graph> {
    let built = once(graph, catalog, edit)?;
    // Parts that became unused through later edits are already in the new graph: a second pass removes
    // them.
    if unread(&built) { once(&built, catalog, &mut |step| step.copy()) } else { Ok(built) }
}

/// Whether the graph has nodes or parameters that no output depends on.
fn unread(graph: &Graph) -> bool {
    let needed = graph.dependencies(graph.outputs().iter().map(|(_, id)| *id));
    graph.ids().any(|id| !needed[id.index()] && graph.value(id).kind != Kind::Input)
}

/// Rebuilds a graph in one pass, without removing what `edit` stops using.
fn once(graph: &Graph, catalog: &dyn Catalog, edit: &mut dyn FnMut(Rewrite) -> Result<ValueId>) -> Result<Graph> {
    let needed = graph.dependencies(graph.outputs().iter().map(|(_, id)| *id));
    let mut builder = Builder::new(catalog);
    let mut built: Vec<Option<ValueId>> = vec![None; graph.values().len()];
    for (id, value) in graph.inputs() {
        built[id.index()] = Some(builder.input(&value.name, value.ty.clone())?);
    }
    for node in graph.nodes().iter().filter(|node| needed[node.output.index()]) {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for id in &node.inputs {
            let value = graph.value(*id);
            inputs.push(match built[id.index()] {
                Some(new) => new,
                None if value.kind == Kind::Param => parameter(&mut builder, catalog, &value.name)?,
                None => return Err(Error::graph(format!("graph value `{}`", value.name), "is read before it is computed")),
            });
        }
        let name = graph.value(node.output).name.as_str();
        built[node.output.index()] = Some(edit(Rewrite { builder: &mut builder, node, name, inputs })?);
    }
    for (name, id) in graph.outputs() {
        let value = match built[id.index()] {
            Some(new) => new,
            None => parameter(&mut builder, catalog, &graph.value(*id).name)?,
        };
        builder.output(name, value);
    }
    builder.finish()
}

/// The parameters of a graph as a catalog, with the shapes that the graph states.
struct Own<'g>(&'g Graph);

impl Catalog for Own<'_> {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let (_, value) = self.0.params().find(|(_, value)| value.name == name)?;
        value.ty.shape.iter().map(super::Dim::fixed).collect()
    }

    fn nearest(&self, _name: &str) -> Option<String> {
        None
    }
}

/// Extracts the subgraph that computes `values`, which become its outputs under their own names. `op`
/// maps the op of each node to its replacement. Fails if a value does not exist, or a replaced op does not
/// accept its inputs.
pub fn subgraph(graph: &Graph, values: &[String], op: &dyn Fn(&super::Op) -> super::Op) -> Result<Graph> {
    let mut smaller = graph.clone();
    smaller.outputs = values
        .iter()
        .map(|name| match graph.ids().find(|id| graph.value(*id).name == *name) {
            Some(id) => Ok((name.clone(), id)),
            None => Err(Error::graph(format!("graph value `{name}`"), "does not exist")),
        })
        .collect::<Result<_>>()?;
    rebuild(&smaller, &Own(graph), &mut |step| step.builder.node(step.name, op(&step.node.op), &step.inputs))
}

/// Extracts the part of a graph that computes `outputs` from `inputs`, which are named values of the graph.
/// Inputs that the part does not need are left out. Fails if it needs others.
pub fn part(graph: &Graph, inputs: &[(String, ValueId)], outputs: &[(String, ValueId)]) -> Result<Graph> {
    let given: Vec<ValueId> = inputs.iter().map(|(_, id)| *id).collect();
    let needed = graph.dependencies_after(outputs.iter().map(|(_, id)| *id), &given);
    let catalog = Own(graph);
    let mut builder = Builder::new(&catalog);
    let mut built: Vec<Option<ValueId>> = vec![None; graph.values().len()];
    for (name, id) in inputs.iter().filter(|(_, id)| needed[id.index()]) {
        built[id.index()] = Some(builder.input(name, graph.value(*id).ty.clone())?);
    }
    let find = |builder: &mut Builder, built: &[Option<ValueId>], id: ValueId| match built[id.index()] {
        Some(new) => Ok(new),
        None if graph.value(id).kind == Kind::Param => parameter(builder, &catalog, &graph.value(id).name),
        None => Err(Error::graph(format!("graph value `{}`", graph.value(id).name), "is needed by a part of the graph that does not have it as an input")),
    };
    for node in graph.nodes().iter().filter(|node| needed[node.output.index()]) {
        if built[node.output.index()].is_some() {
            continue;
        }
        let operands = node.inputs.iter().map(|id| find(&mut builder, &built, *id)).collect::<Result<Vec<_>>>()?;
        built[node.output.index()] = Some(builder.node(&graph.value(node.output).name, node.op.clone(), &operands)?);
    }
    for (name, id) in outputs {
        let value = find(&mut builder, &built, *id)?;
        builder.output(name, value);
    }
    builder.finish()
}

/// Adds a parameter with the shape that the checkpoint has.
fn parameter(builder: &mut Builder, catalog: &dyn Catalog, name: &str) -> Result<ValueId> {
    match catalog.shape(name) {
        Some(shape) => builder.param(name, &shape),
        None => Err(Error::tensor(name, "is used by the graph, but missing in the checkpoint", "")),
    }
}

/// The text form of a graph over a checkpoint, independent of the order in which its nodes were declared.
fn normalized(graph: &Graph, catalog: &dyn Catalog) -> Result<String> {
    rebuild(graph, catalog, &mut |step: Rewrite| step.copy()).map(|graph| graph.to_string())
}

/// Whether two graphs over the same checkpoint have the same nodes, regardless of the order of
/// declaration.
pub fn is_equivalent(a: &Graph, b: &Graph, catalog: &dyn Catalog) -> bool {
    match (normalized(a, catalog), normalized(b, catalog)) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

/// Returns the first line in which the text forms of two graphs over the same checkpoint differ.
/// Attributes are compared in 32-bit precision.
pub fn difference(a: &Graph, b: &Graph, catalog: &dyn Catalog) -> Result<Option<[String; 2]>> {
    let (a, b) = (normalized(a, catalog)?, normalized(b, catalog)?);
    let (mut a, mut b) = (a.lines(), b.lines());
    loop {
        match (a.next(), b.next()) {
            (None, None) => return Ok(None),
            (Some(a), Some(b)) if equal_in_f32(a, b) => {}
            (a, b) => return Ok(Some([a, b].map(|line| line.unwrap_or("nothing").to_owned()))),
        }
    }
}

/// Whether two lines are equal except for floats that differ by rounding to 32 bits.
fn equal_in_f32(a: &str, b: &str) -> bool {
    let tokens = |text| str::split_inclusive(text, [',', ':', '[', ']', '{', '}', '(', ')', ' ']);
    let float = |token: &str| token.contains(['.', 'e']).then(|| token.trim_end_matches([',', ']', '}', ')', ' ']).parse::<f64>().ok()).flatten();
    let (mut a, mut b) = (tokens(a), tokens(b));
    loop {
        let equal = match (a.next(), b.next()) {
            (None, None) => return true,
            (Some(a), Some(b)) if a == b => true,
            (Some(a), Some(b)) => match (float(a), float(b)) {
                (Some(x), Some(y)) => a.chars().last() == b.chars().last() && (x - y).abs() <= 4.0 * f64::from(f32::EPSILON) * x.abs(),
                _ => false,
            },
            _ => false,
        };
        if !equal {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ir::Op;
    use crate::ir::ops::Clip;

    struct Shapes(BTreeMap<&'static str, Vec<usize>>);

    impl Catalog for Shapes {
        fn shape(&self, name: &str) -> Option<Vec<usize>> {
            self.0.get(name).cloned()
        }

        fn nearest(&self, _name: &str) -> Option<String> {
            None
        }
    }

    #[test]
    fn differences_are_found_in_the_precision_of_32_bits() {
        let shapes = Shapes([("w", vec![2, 4])].into());
        let with = |text: &str| TEXT.replace("act = Relu(fc)", &format!("act = Clip{{\"min\":0.0,\"max\":{text}}}(fc)")).parse::<Graph>().unwrap();
        for (other, equal) in [("0.00001", true), ("9.999999747378752e-6", true), ("0.0000101", false), ("1e-6", false)] {
            assert_eq!(difference(&with("1e-5"), &with(other), &shapes).unwrap().is_none(), equal, "{other}");
        }
        let [before, after] = difference(&with("6.0"), &with("7.0"), &shapes).unwrap().unwrap();
        assert!(before.contains("6.0") && after.contains("7.0") && before.starts_with("act"), "{before} {after}");
        assert!(
            equal_in_f32("f(1.0)", "f(1.0)") && !equal_in_f32("f(1.0)", "f(1.0,") && !equal_in_f32("layers.1.e", "layers.2.e") && !equal_in_f32("a", "a b")
        );
    }

    const TEXT: &str = "input x: float[batch, 4]\nparam unread: float[3]\nparam w: float[2, 4]\nfc = Linear{\"input_major\":false}(x, w) -> float[batch, 2]\ndead = Relu(x) -> float[batch, 4]\nact = Relu(fc) -> float[batch, 2]\noutput logits = act\n";

    #[test]
    fn unused_values_are_removed_and_edits_are_typed() {
        let graph: Graph = TEXT.parse().unwrap();
        let shapes = Shapes([("w", vec![2, 4])].into());
        let plain = rebuild(&graph, &shapes, &mut |step: Rewrite| step.copy()).unwrap();
        assert!(!plain.to_string().contains("dead") && !plain.to_string().contains("unread"));
        assert!(is_equivalent(&graph, &plain, &shapes));
        let clipped = |step: Rewrite| match step.node.op {
            Op::Relu(_) => step.builder.node(step.name, Clip { min: 0.0, max: 1.0 }, &step.inputs),
            _ => step.copy(),
        };
        let skipped = |step: Rewrite| if step.name == "fc" { Ok(step.inputs[0]) } else { step.copy() };
        assert!(!rebuild(&graph, &shapes, &mut { skipped }).unwrap().to_string().contains("param w"));
        let edited = rebuild(&graph, &shapes, &mut { clipped }).unwrap();
        assert!(edited.to_string().contains("act = Clip") && !is_equivalent(&graph, &edited, &shapes));
        let wider = Shapes([("w", vec![3, 4])].into());
        assert!(rebuild(&graph, &wider, &mut |step: Rewrite| step.copy()).unwrap().to_string().contains("act = Relu(fc) -> float[batch, 3]"));
        let wrong = Shapes([("w", vec![2, 5])].into());
        assert!(rebuild(&graph, &wrong, &mut |step: Rewrite| step.copy()).is_err());
    }
}

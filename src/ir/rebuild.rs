//! Editing a graph by building it again, node by node, so that every edit is typed as it is made.

use super::graph::{Graph, Kind, Node, ValueId};
use super::{Builder, Catalog};
use crate::error::{Error, Result};

/// One node on its way from the old graph to the new one.
pub struct Rewrite<'s, 'c> {
    /// The graph that is made.
    pub builder: &'s mut Builder<'c>,
    /// The node of the old graph.
    pub node: &'s Node,
    /// Its name.
    pub name: &'s str,
    /// What it reads, in the new graph.
    pub inputs: Vec<ValueId>,
}

impl Rewrite<'_, '_> {
    /// The node as it is, over its inputs.
    ///
    /// # Errors
    /// It does not fit them.
    pub fn keep(self) -> Result<ValueId> {
        self.builder.node(self.name, self.node.op.clone(), &self.inputs)
    }
}

/// Builds a graph again over the tensors of a checkpoint. `edit` wires what stands for a node and answers its value; values
/// that nobody reads and that are no result are left out, parameters too.
///
/// # Errors
/// Those of `edit`; a tensor is missing or has lost its shape.
pub fn rebuild(graph: &Graph, catalog: &dyn Catalog, edit: &mut dyn FnMut(Rewrite) -> Result<ValueId>) -> Result<Graph> {
    let made = once(graph, catalog, edit)?;
    // What the edit has stopped reading was made before it could say so.
    if unread(&made) { once(&made, catalog, &mut |step| step.keep()) } else { Ok(made) }
}

/// Whether no result depends on some node or parameter.
fn unread(graph: &Graph) -> bool {
    let needed = graph.dependencies(graph.outputs().iter().map(|(_, id)| *id));
    graph.ids().any(|id| !needed[id.index()] && graph.value(id).kind != Kind::Input)
}

fn once(graph: &Graph, catalog: &dyn Catalog, edit: &mut dyn FnMut(Rewrite) -> Result<ValueId>) -> Result<Graph> {
    let needed = graph.dependencies(graph.outputs().iter().map(|(_, id)| *id));
    let mut builder = Builder::new(catalog);
    let mut made: Vec<Option<ValueId>> = vec![None; graph.values().len()];
    for (id, value) in graph.inputs() {
        made[id.index()] = Some(builder.input(&value.name, value.ty.clone())?);
    }
    for node in graph.nodes().iter().filter(|node| needed[node.output.index()]) {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for id in &node.inputs {
            let value = graph.value(*id);
            inputs.push(match made[id.index()] {
                Some(new) => new,
                None if value.kind == Kind::Param => parameter(&mut builder, catalog, &value.name)?,
                None => return Err(Error::graph(format!("graph value `{}`", value.name), "is read before it is computed")),
            });
        }
        let name = graph.value(node.output).name.as_str();
        made[node.output.index()] = Some(edit(Rewrite { builder: &mut builder, node, name, inputs })?);
    }
    for (name, id) in graph.outputs() {
        let value = match made[id.index()] {
            Some(new) => new,
            None => parameter(&mut builder, catalog, &graph.value(*id).name)?,
        };
        builder.output(name, value);
    }
    builder.finish()
}

/// A graph's own parameters, in the shapes that it has for them.
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

/// The part of a graph that some of its values depend on, which become its outputs under their own names; `op` says what
/// each node's op becomes.
///
/// # Errors
/// A value does not exist, or another op does not fit.
pub fn part(graph: &Graph, values: &[String], op: &dyn Fn(&super::Op) -> super::Op) -> Result<Graph> {
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

/// A tensor of the checkpoint in the shape that it has there.
fn parameter(builder: &mut Builder, catalog: &dyn Catalog, name: &str) -> Result<ValueId> {
    match catalog.shape(name) {
        Some(shape) => builder.param(name, &shape),
        None => Err(Error::tensor(name, "is part of the graph, but not of the checkpoint", "")),
    }
}

/// The text of a graph over a checkpoint, independent of the order in which its nodes were declared.
fn normalized(graph: &Graph, catalog: &dyn Catalog) -> Result<String> {
    rebuild(graph, catalog, &mut |step: Rewrite| step.keep()).map(|graph| graph.to_string())
}

/// Whether two graphs over the same checkpoint compute the same in the same nodes, in whatever order they were declared.
pub fn same(a: &Graph, b: &Graph, catalog: &dyn Catalog) -> bool {
    match (normalized(a, catalog), normalized(b, catalog)) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

/// The first line in which two graphs over the same checkpoint differ. Attributes are compared in the precision of 32-bit floats.
///
/// # Errors
/// A graph does not fit the checkpoint.
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

/// Whether two texts differ at most in floats, by no more than rounding to 32 bits and computing with the result makes of them.
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
    fn what_nobody_reads_is_left_out_and_edits_are_typed() {
        let graph: Graph = TEXT.parse().unwrap();
        let shapes = Shapes([("w", vec![2, 4])].into());
        let plain = rebuild(&graph, &shapes, &mut |step: Rewrite| step.keep()).unwrap();
        assert!(!plain.to_string().contains("dead") && !plain.to_string().contains("unread"));
        assert!(same(&graph, &plain, &shapes));
        let clipped = |step: Rewrite| match step.node.op {
            Op::Relu(_) => step.builder.node(step.name, Clip { min: 0.0, max: 1.0 }, &step.inputs),
            _ => step.keep(),
        };
        let skipped = |step: Rewrite| if step.name == "fc" { Ok(step.inputs[0]) } else { step.keep() };
        assert!(!rebuild(&graph, &shapes, &mut { skipped }).unwrap().to_string().contains("param w"));
        let edited = rebuild(&graph, &shapes, &mut { clipped }).unwrap();
        assert!(edited.to_string().contains("act = Clip") && !same(&graph, &edited, &shapes));
        let wider = Shapes([("w", vec![3, 4])].into());
        assert!(rebuild(&graph, &wider, &mut |step: Rewrite| step.keep()).unwrap().to_string().contains("act = Relu(fc) -> float[batch, 3]"));
        let wrong = Shapes([("w", vec![2, 5])].into());
        assert!(rebuild(&graph, &wrong, &mut |step: Rewrite| step.keep()).is_err());
    }
}

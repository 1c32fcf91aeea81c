//! Linear layers with a low-rank term, as in LoRA: `y = x Wᵀ + b + (x Aᵀ) Bᵀ`.

use std::collections::{BTreeMap, BTreeSet};

use super::ops::{Add, Binary, BinaryKind, Linear, Mul, Op, Scale};
use super::quantizers::layer_weight;
use super::rebuild::{Rewrite, rebuild};
use super::{Builder, Catalog, Graph, Kind, Node, ValueId};
use crate::error::{Error, Result};

/// Low-rank terms of linear layers.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'n> {
    /// Names of `A` `[rank, in]` and `B` `[out, rank]` of each layer, by the name of its weight.
    pub factors: &'n BTreeMap<String, [String; 2]>,
    /// Constant that the terms are multiplied by.
    pub scale: f64,
    /// Names of two vectors `[out]` of some layers: their outputs without the bias are multiplied by the
    /// first one and divided by the second one, as in DoRA.
    pub norms: &'n BTreeMap<String, [String; 2]>,
}

/// Adds low-rank terms with a scale of one to linear layers. `factors` has the names of `A` `[rank, in]` and
/// `B` `[out, rank]` of each layer, by the name of its weight, and `norms` is that of [`Terms`]. Fails if a
/// layer does not exist, or its factors have other shapes.
pub fn insert(graph: &Graph, catalog: &dyn Catalog, factors: &BTreeMap<String, [String; 2]>, norms: &BTreeMap<String, [String; 2]>) -> Result<Graph> {
    insert_terms(graph, catalog, Terms { factors, scale: 1.0, norms })
}

/// As [`insert`], also for terms with another scale.
pub fn insert_terms(graph: &Graph, catalog: &dyn Catalog, terms: Terms) -> Result<Graph> {
    let Terms { factors, scale, norms } = terms;
    let is_linear = |node: &super::Node| matches!(node.op, Op::Linear(_));
    let layers: BTreeSet<&str> = graph.nodes().iter().filter(|node| is_linear(node)).filter_map(|node| layer_weight(graph, node)).collect();
    if let Some((weight, [name, _])) = factors.iter().find(|(weight, _)| !layers.contains(weight.as_str())) {
        return Err(Error::tensor(name, format!("is a factor of the layer of `{weight}`, which the model does not have"), "start from the original model"));
    }
    rebuild(graph, catalog, &mut |step: Rewrite| {
        let Some(weight) = layer_weight(graph, step.node).filter(|_| is_linear(step.node)) else { return step.copy() };
        let Some([inner, outer]) = factors.get(weight) else { return step.copy() };
        let Rewrite { builder, node, name, inputs } = step;
        let inner = parameter(builder, catalog, inner)?;
        let outer = parameter(builder, catalog, outer)?;
        let norms = norms.get(weight);
        // The bias is added to the normalized output.
        let read = if norms.is_some() { &inputs[..2] } else { &inputs[..] };
        let product = builder.node(&format!("{name}/base"), node.op.clone(), read)?;
        let low = builder.node(&format!("{name}/lora_A"), Linear::default(), &[inputs[0], inner])?;
        let mut term = builder.node(&format!("{name}/lora_B"), Linear::default(), &[low, outer])?;
        if scale != 1.0 {
            term = builder.node(&format!("{name}/lora"), Scale { factor: scale }, &[term])?;
        }
        let Some([magnitude, norm]) = norms else { return builder.node(name, Add {}, &[product, term]) };
        let magnitude = parameter(builder, catalog, magnitude)?;
        let norm = parameter(builder, catalog, norm)?;
        let sum = builder.node(&format!("{name}/sum"), Add {}, &[product, term])?;
        let scaled = builder.node(&format!("{name}/magnitude"), Mul {}, &[sum, magnitude])?;
        let divide = Binary { kind: BinaryKind::Div };
        match inputs.get(2) {
            None => builder.node(name, divide, &[scaled, norm]),
            Some(bias) => {
                let normalized = builder.node(&format!("{name}/normalized"), divide, &[scaled, norm])?;
                builder.node(name, Add {}, &[normalized, *bias])
            }
        }
    })
}

/// Adds a parameter of a term.
fn parameter(builder: &mut Builder, catalog: &dyn Catalog, name: &str) -> Result<ValueId> {
    let shape = catalog.shape(name).ok_or_else(|| Error::tensor(name, "is missing", "the checkpoint is incomplete; save it again"))?;
    builder.param(name, &shape)
}

/// The layer whose low-rank term ends with a node, and the bias that was added after the norms. `is_term`
/// returns whether a value is a low-rank product.
fn layer_before<'g>(graph: &'g Graph, last: &Node, is_term: &dyn Fn(ValueId) -> bool) -> Option<(&'g Node, Option<ValueId>)> {
    let sum = |node: &Node| match (&node.op, node.inputs.as_slice()) {
        (Op::Add(_), [product, term]) if is_term(*term) => graph.producer(*product),
        _ => None,
    };
    // The sum is multiplied by one vector and divided by another one.
    let normalized = |node: &Node| match (&node.op, node.inputs.as_slice()) {
        (Op::Binary(Binary { kind: BinaryKind::Div }), [scaled, _]) => {
            let scaled = graph.producer(*scaled).filter(|node| matches!(node.op, Op::Mul(_)))?;
            sum(graph.producer(*scaled.inputs.first()?)?)
        }
        _ => None,
    };
    if let Some(layer) = sum(last).or_else(|| normalized(last)) {
        return Some((layer, None));
    }
    match (&last.op, last.inputs.as_slice()) {
        (Op::Add(_), [value, bias]) if graph.value(*bias).kind == Kind::Param => Some((normalized(graph.producer(*value)?)?, Some(*bias))),
        _ => None,
    }
}

/// Removes the low-rank terms whose factor `B` is one of `outer`. Undoes [`insert`].
pub fn remove(graph: &Graph, catalog: &dyn Catalog, outer: &BTreeSet<&str>) -> Result<Graph> {
    let is_term = |id: ValueId| graph.producer(id).and_then(|node| layer_weight(graph, node)).is_some_and(|factor| outer.contains(factor));
    let mut inputs_of_layers: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    rebuild(graph, catalog, &mut |step: Rewrite| {
        // The layer gets its name back, which is that of the last node.
        if let Some((layer, bias)) = layer_before(graph, step.node, &is_term)
            && let Some(inputs) = inputs_of_layers.get(&layer.output)
        {
            let inputs: Vec<ValueId> = inputs.iter().copied().chain(bias.and_then(|_| step.inputs.last().copied())).collect();
            return step.builder.node(step.name, layer.op.clone(), &inputs);
        }
        if matches!(step.node.op, Op::Linear(_)) {
            inputs_of_layers.insert(step.node.output, step.inputs.clone());
        }
        step.copy()
    })
}

#[cfg(test)]
mod tests {
    use super::super::is_equivalent;
    use super::*;

    const TEXT: &str = "input x: float[batch, 6]\nparam a.weight: float[4, 6]\nparam a.bias: float[4]\n\
        y = Linear(x, a.weight, a.bias) -> float[batch, 4]\noutput y = y\n";

    #[test]
    fn a_layer_has_a_low_rank_term() {
        let graph: Graph = TEXT.parse().unwrap();
        let shapes = |outer: usize| {
            let shapes = [("a.weight", vec![4, 6]), ("a.bias", vec![4]), ("A", vec![2, 6]), ("B", vec![outer, 2])];
            BTreeMap::from(shapes.map(|(name, shape)| (name.to_owned(), shape)))
        };
        let factors = |weight: &str| BTreeMap::from([(weight.to_owned(), ["A", "B"].map(str::to_owned))]);
        let changed = insert(&graph, &shapes(4), &factors("a.weight"), &BTreeMap::new()).unwrap();
        let ops: Vec<&str> = changed.nodes().iter().map(|node| node.op.name()).collect();
        assert_eq!(ops, ["Linear", "Linear", "Linear", "Add"]);
        assert_eq!(changed.value(changed.outputs()[0].1).name, "y");
        assert!(is_equivalent(&remove(&changed, &shapes(4), &["B"].into()).unwrap(), &graph, &shapes(4)));
        let norms = BTreeMap::from([("a.weight".to_owned(), ["m", "n"].map(str::to_owned))]);
        let mut vectors = shapes(4);
        vectors.extend(["m", "n"].map(|name| (name.to_owned(), vec![4])));
        for (norms, expected) in [(&BTreeMap::new(), &["Scale", "Add"][..]), (&norms, &["Scale", "Add", "Mul", "Binary", "Add"][..])] {
            let scaled = insert_terms(&graph, &vectors, Terms { factors: &factors("a.weight"), scale: 1.5, norms }).unwrap();
            let ops: Vec<&str> = scaled.nodes().iter().map(|node| node.op.name()).collect();
            assert_eq!((&ops[..3], &ops[3..]), (&["Linear"; 3][..], expected));
            assert_eq!(scaled.value(scaled.outputs()[0].1).name, "y");
        }
        // The layers with and without a bias get their inputs back.
        let plain: Graph = TEXT.replace("param a.bias: float[4]\n", "").replace(", a.bias", "").parse().unwrap();
        for graph in [&graph, &plain] {
            let normalized = insert(graph, &vectors, &factors("a.weight"), &norms).unwrap();
            assert!(is_equivalent(&remove(&normalized, &vectors, &["B"].into()).unwrap(), graph, &vectors));
            assert!(is_equivalent(&remove(&normalized, &vectors, &["C"].into()).unwrap(), &normalized, &vectors));
        }
        assert!(is_equivalent(&remove(&changed, &shapes(4), &["C"].into()).unwrap(), &changed, &shapes(4)));
        let message = |shapes: BTreeMap<String, Vec<usize>>, factors: BTreeMap<String, [String; 2]>| {
            insert(&graph, &shapes, &factors, &BTreeMap::new()).unwrap_err().to_string()
        };
        assert!(message(shapes(4), factors("b.weight")).contains("`b.weight`, which the model does not have"));
        assert!(message(shapes(5), factors("a.weight")).contains("graph node `y`"));
    }
}

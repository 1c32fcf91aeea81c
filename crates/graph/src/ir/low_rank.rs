//! Linear layers with a low-rank term, as in LoRA: `y = x Wᵀ + b + (x Aᵀ) Bᵀ`.

use std::collections::{BTreeMap, BTreeSet};

use super::ops::{Add, Linear, Op};
use super::quantizers::layer_weight;
use super::rebuild::{Rewrite, rebuild};
use super::{Catalog, Graph, Node, ValueId};
use crate::error::{Error, Result};

/// Adds low-rank terms to linear layers. `factors` has the names of `A` `[rank, in]` and `B` `[out, rank]`
/// of each layer, by the name of its weight. Fails if a layer does not exist, or its factors have other
/// shapes.
pub fn insert(graph: &Graph, catalog: &dyn Catalog, factors: &BTreeMap<String, [String; 2]>) -> Result<Graph> {
    let is_linear = |node: &super::Node| matches!(node.op, Op::Linear(_));
    let layers: BTreeSet<&str> = graph.nodes().iter().filter(|node| is_linear(node)).filter_map(|node| layer_weight(graph, node)).collect();
    if let Some((weight, [name, _])) = factors.iter().find(|(weight, _)| !layers.contains(weight.as_str())) {
        return Err(Error::tensor(name, format!("is a factor of the layer of `{weight}`, which the model does not have"), "start from the original model"));
    }
    rebuild(graph, catalog, &mut |step: Rewrite| {
        let Some([inner, outer]) = layer_weight(graph, step.node).filter(|_| is_linear(step.node)).and_then(|weight| factors.get(weight)) else {
            return step.copy();
        };
        let mut factor = |name: &str| {
            let shape = catalog.shape(name).ok_or_else(|| Error::tensor(name, "is missing", "the checkpoint is incomplete; save it again"))?;
            step.builder.param(name, &shape)
        };
        let (inner, outer) = (factor(inner)?, factor(outer)?);
        let product = step.builder.node(&format!("{}/base", step.name), step.node.op.clone(), &step.inputs)?;
        let low = step.builder.node(&format!("{}/lora_A", step.name), Linear::default(), &[step.inputs[0], inner])?;
        let term = step.builder.node(&format!("{}/lora_B", step.name), Linear::default(), &[low, outer])?;
        step.builder.node(step.name, Add {}, &[product, term])
    })
}

/// Removes the low-rank terms whose factor `B` is one of `outer`. Undoes [`insert`].
pub fn remove(graph: &Graph, catalog: &dyn Catalog, outer: &BTreeSet<&str>) -> Result<Graph> {
    let is_term = |id: ValueId| graph.producer(id).and_then(|node| layer_weight(graph, node)).is_some_and(|factor| outer.contains(factor));
    let layer = |sum: &Node| match (&sum.op, sum.inputs.as_slice()) {
        (Op::Add(_), [product, term]) if is_term(*term) => graph.producer(*product),
        _ => None,
    };
    let mut inputs_of_layers: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    rebuild(graph, catalog, &mut |step: Rewrite| {
        // The layer gets its name back, which is that of the sum.
        if let Some(layer) = layer(step.node)
            && let Some(inputs) = inputs_of_layers.get(&layer.output)
        {
            return step.builder.node(step.name, layer.op.clone(), inputs);
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
        let changed = insert(&graph, &shapes(4), &factors("a.weight")).unwrap();
        let ops: Vec<&str> = changed.nodes().iter().map(|node| node.op.name()).collect();
        assert_eq!(ops, ["Linear", "Linear", "Linear", "Add"]);
        assert_eq!(changed.value(changed.outputs()[0].1).name, "y");
        assert!(is_equivalent(&remove(&changed, &shapes(4), &["B"].into()).unwrap(), &graph, &shapes(4)));
        assert!(is_equivalent(&remove(&changed, &shapes(4), &["C"].into()).unwrap(), &changed, &shapes(4)));
        let message = |shapes: BTreeMap<String, Vec<usize>>, factors: BTreeMap<String, [String; 2]>| insert(&graph, &shapes, &factors).unwrap_err().to_string();
        assert!(message(shapes(4), factors("b.weight")).contains("`b.weight`, which the model does not have"));
        assert!(message(shapes(5), factors("a.weight")).contains("graph node `y`"));
    }
}

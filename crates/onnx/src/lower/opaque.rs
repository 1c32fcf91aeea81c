//! Opaque subgraphs of the input file, written unchanged except for names and opset.

use std::collections::BTreeMap;

use super::super::body_layers::{BodyLayer, IntegerWeight, insert_quantizers};
use super::super::check;
use super::super::opaque_subgraph::OpaqueSubgraph;
use super::super::proto::{AttributeProto, DataType};
use super::super::renaming::{NameMap, rename, rename_node};
use super::super::upgrade::upgrade;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{FakeQuantize, Opaque};
use crate::store::Granularity;

pub(super) fn opaque(op: &Opaque, n: &mut Lowering) -> Result<()> {
    let Some(subgraph) = op.function.as_ref().and_then(|function| function.as_any().downcast_ref::<OpaqueSubgraph>()) else {
        return Err(n.node_error(format!("{} can only be written from the .onnx file that defines it", op.label)));
    };
    let (parts, quantized) = subgraph.quantized.as_ref().map_or((subgraph.parts(), &[][..]), |(parts, layers)| (parts, layers.as_slice()));
    let weights = integer_weights(quantized, n)?;
    let from = parts.opsets.iter().find(|import| check::is_own(import.domain())).map_or(1, |import| import.version());
    for import in parts.opsets.iter().filter(|import| !check::is_own(import.domain())) {
        n.imports.insert(import.domain().to_owned(), import.version());
    }
    for body in parts.nodes.iter().flat_map(check::bodies) {
        n.reserve(body);
    }
    // The nodes compute with 32-bit floats.
    let mut names = NameMap::new();
    for (at, (name, number)) in parts.inputs.iter().enumerate() {
        let input = n.input(at);
        if quantized.iter().any(|(layer, _)| layer.input == at && weights.contains_key(layer.weight.as_str())) {
            continue;
        }
        names.insert(name.clone(), if *number == DataType::Float as i32 { n.wide(&input)? } else { input });
    }
    let is_cast = n.half && subgraph.element == DataType::Float as i32;
    let output = if is_cast { n.fresh(format!("{}/wide", n.output())) } else { n.output() };
    names.insert(subgraph.output.clone(), output.clone());
    let computed = parts.nodes.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty());
    for name in parts.constants.iter().map(|tensor| tensor.name().to_owned()).chain(computed.cloned()) {
        names.entry(name).or_insert_with_key(|name| n.fresh(name.clone()));
    }
    let mut within = BTreeMap::new();
    parts.nodes.iter().flat_map(check::bodies).for_each(|body| check::definition_counts(body, &mut within));
    if let Some((_, new)) = names.iter().find(|(old, new)| old != new && within.contains_key(new.as_str())) {
        return Err(
            n.node_error(format!("a body of {} defines `{new}`, which is also the name of a value that the body reads: rename it in the file", op.label))
        );
    }
    for tensor in &parts.constants {
        let mut tensor = tensor.clone();
        rename(&names, tensor.name.iter_mut());
        n.constants.push(tensor);
    }
    let to = i64::from(n.opset);
    let mut nodes = parts.nodes.clone();
    nodes.iter_mut().for_each(|node| rename_node(&names, node));
    let signed = n.signed;
    insert_quantizers(&mut nodes, quantized, signed, &weights, &mut |name| n.fresh(name)).map_err(|reason| n.node_error(reason))?;
    for node in nodes {
        let upgraded = upgrade(node, from, to, &mut |name| n.fresh(name.to_owned()));
        for mut node in upgraded.map_err(|reason| n.node_error(format!("{}: {reason}", op.label)))? {
            node.name = Some(n.fresh(node.name.filter(|name| !name.is_empty()).or_else(|| node.output.first().cloned()).unwrap_or_default()));
            n.nodes.push(node);
        }
    }
    if is_cast {
        n.finish("Cast", &[&output], vec![AttributeProto::int("to", DataType::Float16 as i64)]);
    }
    Ok(())
}

/// The integer weights of quantized layers, in the axis order of the file. Runtimes fold transpositions when
/// they load the file.
fn integer_weights<'l>(quantized: &'l [(BodyLayer, FakeQuantize)], n: &mut Lowering) -> Result<BTreeMap<&'l str, IntegerWeight>> {
    let mut weights = BTreeMap::new();
    for (layer, _) in quantized {
        let Some(layout) = n.layout(layer.input) else { continue };
        let (Some(affine), [values, scales, ..]) = (layout.integers.clone(), layout.tensors.as_slice()) else { continue };
        let (mut values, scales) = (values.name.clone(), scales.name.clone());
        if layer.is_flipped {
            values = n.share(&format!("{values}/transposed|"), |n| Ok(n.emit("Transpose", "value", &[&values], vec![AttributeProto::ints("perm", [1, 0])])))?;
        }
        let per_tensor = affine.granularity == Granularity::Tensor;
        let axis = if per_tensor { None } else { Some((i64::from(layer.is_flipped), n.fixed(layer.input, 0)? as usize)) };
        weights.insert(layer.weight.as_str(), IntegerWeight { values, rank: n.ty(layer.input)?.shape.len(), scales, axis });
    }
    Ok(weights)
}

//! Pieces of the file that a model was opened from, written as they stood there.

use std::collections::{BTreeMap, BTreeSet};

use super::super::check;
use super::super::piece::Piece;
use super::super::proto::{GraphProto, NodeProto};
use super::super::upgrade::upgrade;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::Opaque;

/// Old names and new ones.
type Renamed = BTreeMap<String, String>;

pub(super) fn opaque(op: &Opaque, n: &mut Lowering) -> Result<()> {
    let Some(piece) = op.function.as_ref().and_then(|function| function.as_any().downcast_ref::<Piece>()) else {
        return Err(n.wrong(format!("what {} computes is known in the .onnx file alone", op.label)));
    };
    if n.half {
        return Err(n.wrong(format!("{} computes in the floats that it was written for: export with `precision: float32`", op.label)));
    }
    let parts = piece.parts();
    let from = parts.opsets.iter().find(|import| check::is_own(import.domain())).map_or(1, |import| import.version());
    for import in parts.opsets.iter().filter(|import| !check::is_own(import.domain())) {
        n.imports.insert(import.domain().to_owned(), import.version());
    }
    for body in parts.nodes.iter().flat_map(check::bodies) {
        n.reserve(body);
    }
    let mut names: Renamed = parts.inputs.iter().enumerate().map(|(at, (name, _))| (name.clone(), n.input(at))).collect();
    names.insert(piece.output.clone(), n.output());
    let computed = parts.nodes.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty());
    for name in parts.constants.iter().map(|tensor| tensor.name().to_owned()).chain(computed.cloned()) {
        names.entry(name).or_insert_with_key(|name| n.fresh(name.clone()));
    }
    let mut within = BTreeMap::new();
    parts.nodes.iter().flat_map(check::bodies).for_each(|body| check::given_times(body, &mut within));
    if let Some((_, new)) = names.iter().find(|(old, new)| old != new && within.contains_key(new.as_str())) {
        return Err(
            n.wrong(format!("a body of {} calls something of its own `{new}`, as the graph calls what the body reads: rename it in the file", op.label))
        );
    }
    for tensor in &parts.constants {
        let mut tensor = tensor.clone();
        rename(&names, tensor.name.iter_mut());
        n.constants.push(tensor);
    }
    let to = i64::from(n.opset);
    for node in &parts.nodes {
        let mut node = node.clone();
        rename_node(&names, &mut node);
        let made = upgrade(node, from, to, &mut |name| n.fresh(name.to_owned()));
        for mut node in made.map_err(|reason| n.wrong(format!("{}: {reason}", op.label)))? {
            node.name = Some(n.fresh(node.name.filter(|name| !name.is_empty()).or_else(|| node.output.first().cloned()).unwrap_or_default()));
            n.nodes.push(node);
        }
    }
    Ok(())
}

fn rename<'n>(names: &Renamed, of: impl Iterator<Item = &'n mut String>) {
    of.for_each(|name| names.get(name).into_iter().for_each(|new| name.clone_from(new)));
}

fn rename_node(names: &Renamed, node: &mut NodeProto) {
    rename(names, node.input.iter_mut().chain(&mut node.output));
    let bodies = node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs));
    bodies.for_each(|body| rename_body(names, body));
}

/// What a body calls by a name of its own is something else than what the name stands for around it.
fn rename_body(names: &Renamed, body: &mut GraphProto) {
    let own: BTreeSet<&str> = check::own_names(body).collect();
    let names = &names.iter().filter(|(name, _)| !own.contains(name.as_str())).map(|(name, new)| (name.clone(), new.clone())).collect();
    body.node.iter_mut().for_each(|node| rename_node(names, node));
    rename(names, body.output.iter_mut().filter_map(|output| output.name.as_mut()));
}

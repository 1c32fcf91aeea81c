//! Copies the messages of a model with edits. Unedited fields are copied byte for byte.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use super::proto::{NodeProto, ValueInfoProto};
use super::wire::{self, Field, Kind, data, fields};
use crate::store::writer::Piece;

/// Edits of a model.
#[derive(Default)]
pub(super) struct Edits {
    /// Encoded fields of the model, by number. Each replaces the first occurrence of the field.
    pub model: BTreeMap<u64, Vec<u8>>,
    /// Graph inputs to remove.
    pub inputs: BTreeSet<String>,
    /// Tensors with new elements, by number.
    pub tensors: BTreeMap<u64, NewTensor>,
    /// Initializers and constants to replace, by tensor number.
    pub expansions: BTreeMap<u64, Expansion>,
    /// Nodes of the graph to replace, by position.
    pub nodes: BTreeMap<usize, Vec<NodeProto>>,
}

/// A tensor with new elements.
pub(super) struct NewTensor {
    /// Encoded fields to replace, by number.
    pub fields: BTreeMap<u64, Vec<u8>>,
    pub data: Data,
}

/// Source of the elements of a tensor.
#[derive(Clone)]
pub(super) enum Data {
    /// A part of an item, which is stored in this field.
    Item { field: u64, piece: Piece },
    /// An external data file.
    External,
}

/// Initializers and nodes that replace a tensor.
pub(super) struct Expansion {
    /// Encoded initializers without elements, and the source of the elements.
    pub tensors: Vec<(Vec<u8>, Data)>,
    /// Nodes that compute the replaced tensor.
    pub nodes: Vec<NodeProto>,
}

/// An encoded message under construction.
#[derive(Default)]
struct Out {
    pieces: Vec<Piece>,
    length: u64,
}

impl Out {
    fn bytes(&mut self, bytes: &[u8]) {
        self.length = self.length.saturating_add(bytes.len() as u64);
        match self.pieces.last_mut() {
            Some(Piece::Bytes(last)) => last.extend_from_slice(bytes),
            _ => self.pieces.push(Piece::Bytes(bytes.to_vec())),
        }
    }

    fn message(&mut self, field: u64, inner: Out) {
        let mut head = Vec::new();
        wire::bytes(field, inner.length, &mut head);
        self.bytes(&head);
        for piece in inner.pieces {
            match piece {
                Piece::Bytes(bytes) => self.bytes(&bytes),
                item => {
                    self.length = self.length.saturating_add(item.len());
                    self.pieces.push(item);
                }
            }
        }
    }

    fn data(&mut self, data: &Data) {
        if let Data::Item { field, piece } = data {
            let mut head = Vec::new();
            wire::bytes(*field, piece.len(), &mut head);
            self.bytes(&head);
            self.length = self.length.saturating_add(piece.len());
            self.pieces.push(piece.clone());
        }
    }

    fn node(&mut self, node: &NodeProto) {
        let bytes = node.encode_to_vec();
        let mut head = Vec::new();
        wire::bytes(1, bytes.len() as u64, &mut head);
        self.bytes(&head);
        self.bytes(&bytes);
    }

    fn initializer(&mut self, (head, data): &(Vec<u8>, Data)) {
        let mut inner = Out::default();
        inner.bytes(head);
        inner.data(data);
        self.message(5, inner);
    }
}

/// The pieces of the edited file.
pub(super) fn splice(skeleton: &[u8], edits: &Edits) -> Vec<Piece> {
    let mut out = Out::default();
    message(Kind::Model, skeleton, false, edits, &mut out);
    out.pieces
}

/// The number of a tensor.
fn mark(tensor: &[u8]) -> Option<u64> {
    fields(tensor).find(|field| field.number == data::MARK).map(|field| field.value)
}

/// The tensor of a constant.
fn constant(node: &[u8]) -> Option<u64> {
    let is_constant = fields(node).any(|field| field.number == 4 && field.content == b"Constant");
    let attributes = fields(node).filter(|field| is_constant && field.number == 5);
    attributes.flat_map(|attribute| fields(attribute.content)).find(|field| field.number == 5).and_then(|tensor| mark(tensor.content))
}

/// Appends a message. `top`: it is the main graph.
fn message(kind: Kind, bytes: &[u8], top: bool, edits: &Edits, out: &mut Out) {
    match kind {
        Kind::Tensor => tensor(bytes, edits, out),
        Kind::Graph => graph(bytes, top, edits, out),
        Kind::Model => model(bytes, edits, out),
        _ => fields(bytes).for_each(|field| nested(kind, &field, false, edits, out)),
    }
}

/// Appends the model. Repeated occurrences of the graph are merged if nodes are edited, because node
/// positions refer to the merged graph.
fn model(bytes: &[u8], edits: &Edits, out: &mut Out) {
    let is_graph = |field: &Field| field.number == 7 && field.wire_type == wire::BYTES;
    let graphs: Vec<&[u8]> = fields(bytes).filter(is_graph).map(|field| field.content).collect();
    let mut merged = (graphs.len() > 1 && !(edits.expansions.is_empty() && edits.nodes.is_empty())).then(|| graphs.concat());
    let merges = merged.is_some();
    with_fields(&edits.model, bytes, out, |field, out| {
        if !(merges && is_graph(field)) {
            nested(Kind::Model, field, is_graph(field), edits, out);
        } else if let Some(content) = merged.take() {
            nested(Kind::Model, &Field { content: &content, ..*field }, true, edits, out);
        }
    });
}

fn nested(kind: Kind, field: &Field, top: bool, edits: &Edits, out: &mut Out) {
    match kind.child(field.number) {
        Some(child) if field.wire_type == wire::BYTES => {
            let mut inner = Out::default();
            message(child, field.content, top, edits, &mut inner);
            out.message(field.number, inner);
        }
        _ => out.bytes(field.raw),
    }
}

/// Appends fields. `replacements` have precedence.
fn with_fields(replacements: &BTreeMap<u64, Vec<u8>>, bytes: &[u8], out: &mut Out, mut other: impl FnMut(&Field, &mut Out)) {
    let mut written = BTreeSet::new();
    for field in fields(bytes) {
        match replacements.get(&field.number) {
            Some(new) if written.insert(field.number) => out.bytes(new),
            Some(_) => {}
            None => other(&field, out),
        }
    }
    replacements.iter().filter(|(number, _)| !written.contains(*number)).for_each(|(_, new)| out.bytes(new));
}

fn tensor(bytes: &[u8], edits: &Edits, out: &mut Out) {
    let Some(new) = mark(bytes).and_then(|mark| edits.tensors.get(&mark)) else {
        return fields(bytes).filter(|field| field.number != data::MARK).for_each(|field| out.bytes(field.raw));
    };
    let moved = |number: u64| data::is_run(number) || [data::EXTERNAL, data::LOCATION].contains(&number);
    with_fields(&new.fields, bytes, out, |field, out| match field.number {
        data::MARK => out.data(&new.data),
        number if moved(number) => {}
        _ => out.bytes(field.raw),
    });
}

fn graph(bytes: &[u8], top: bool, edits: &Edits, out: &mut Out) {
    let tensor_mark = |field: &Field| match field.number {
        5 => mark(field.content),
        1 => constant(field.content),
        _ => None,
    };
    let expansion = |field: &Field| tensor_mark(field).and_then(|mark| edits.expansions.get(&mark));
    if !edits.expansions.is_empty() {
        // Replaced initializers are computed before all other nodes.
        let before = fields(bytes).filter(|field| field.number == 5).filter_map(|field| expansion(&field));
        before.flat_map(|expansion| &expansion.nodes).for_each(|node| out.node(node));
    }
    let mut number = 0usize;
    for field in fields(bytes) {
        let position = number;
        number = number.saturating_add(usize::from(field.number == 1));
        let dropped = || ValueInfoProto::decode(field.content).is_ok_and(|input| edits.inputs.contains(input.name()));
        match (field.number, expansion(&field), edits.nodes.get(&position)) {
            (5, Some(expansion), _) => expansion.tensors.iter().for_each(|tensor| out.initializer(tensor)),
            (1, Some(expansion), _) => {
                expansion.tensors.iter().for_each(|tensor| out.initializer(tensor));
                expansion.nodes.iter().for_each(|node| out.node(node));
            }
            (1, None, Some(nodes)) if top => nodes.iter().for_each(|node| out.node(node)),
            (11, ..) if top && dropped() => {}
            _ => nested(Kind::Graph, &field, false, edits, out),
        }
    }
}

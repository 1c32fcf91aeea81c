//! A model's messages written again with other tensors: every field that nobody changes is the bytes that were read.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use super::proto::{NodeProto, ValueInfoProto};
use super::wire::{self, Field, Kind, data, fields};
use crate::store::writer::Piece;

/// What is written in the place of what was read.
#[derive(Default)]
pub(super) struct Edits {
    /// Fields of the model, as they are written, by their number: once, in the place of the first that there was.
    pub model: BTreeMap<u64, Vec<u8>>,
    /// Inputs of the graph that are left out.
    pub inputs: BTreeSet<String>,
    /// Tensors by their number.
    pub tensors: BTreeMap<u64, NewTensor>,
    /// Initializers and constants, by the number of their tensor, that become something else.
    pub made: BTreeMap<u64, Made>,
    /// Nodes of the graph, by position, that become others.
    pub nodes: BTreeMap<usize, Vec<NodeProto>>,
}

/// A tensor whose elements come from elsewhere.
pub(super) struct NewTensor {
    /// Fields, as they are written, by their number.
    pub fields: BTreeMap<u64, Vec<u8>>,
    pub data: Data,
}

/// Where elements come from.
#[derive(Clone)]
pub(super) enum Data {
    /// A part of an item, in this field.
    Item { field: u64, piece: Piece },
    /// Another file.
    Outside,
}

/// Tensors and nodes that stand for a tensor.
pub(super) struct Made {
    /// Initializers, as they are written but for their elements.
    pub tensors: Vec<(Vec<u8>, Data)>,
    /// What makes the tensor of them.
    pub nodes: Vec<NodeProto>,
}

/// A message on its way out.
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

/// The pieces of a file.
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

/// Appends a message; `top` says that it is the graph of the model.
fn message(kind: Kind, bytes: &[u8], top: bool, edits: &Edits, out: &mut Out) {
    match kind {
        Kind::Tensor => tensor(bytes, edits, out),
        Kind::Graph => graph(bytes, top, edits, out),
        Kind::Model => model(bytes, edits, out),
        _ => fields(bytes).for_each(|field| nested(kind, &field, false, edits, out)),
    }
}

/// Appends the model. Several occurrences of the graph are merged where nodes change, because nodes are counted over all of them.
fn model(bytes: &[u8], edits: &Edits, out: &mut Out) {
    let is_graph = |field: &Field| field.number == 7 && field.stored == wire::BYTES;
    let graphs: Vec<&[u8]> = fields(bytes).filter(is_graph).map(|field| field.content).collect();
    let mut merged = (graphs.len() > 1 && !(edits.made.is_empty() && edits.nodes.is_empty())).then(|| graphs.concat());
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
        Some(child) if field.stored == wire::BYTES => {
            let mut inner = Out::default();
            message(child, field.content, top, edits, &mut inner);
            out.message(field.number, inner);
        }
        _ => out.bytes(field.whole),
    }
}

/// Appends fields, those that are given in the place of those that there are.
fn with_fields(given: &BTreeMap<u64, Vec<u8>>, bytes: &[u8], out: &mut Out, mut other: impl FnMut(&Field, &mut Out)) {
    let mut written = BTreeSet::new();
    for field in fields(bytes) {
        match given.get(&field.number) {
            Some(new) if written.insert(field.number) => out.bytes(new),
            Some(_) => {}
            None => other(&field, out),
        }
    }
    given.iter().filter(|(number, _)| !written.contains(*number)).for_each(|(_, new)| out.bytes(new));
}

fn tensor(bytes: &[u8], edits: &Edits, out: &mut Out) {
    let Some(new) = mark(bytes).and_then(|mark| edits.tensors.get(&mark)) else {
        return fields(bytes).filter(|field| field.number != data::MARK).for_each(|field| out.bytes(field.whole));
    };
    let moved = |number: u64| data::is_run(number) || [data::EXTERNAL, data::LOCATION].contains(&number);
    with_fields(&new.fields, bytes, out, |field, out| match field.number {
        data::MARK => out.data(&new.data),
        number if moved(number) => {}
        _ => out.bytes(field.whole),
    });
}

fn graph(bytes: &[u8], top: bool, edits: &Edits, out: &mut Out) {
    let made = |field: &Field| match field.number {
        5 => mark(field.content),
        1 => constant(field.content),
        _ => None,
    };
    let made = |field: &Field| made(field).and_then(|mark| edits.made.get(&mark));
    if !edits.made.is_empty() {
        // What initializers become is computed before anything else.
        let before = fields(bytes).filter(|field| field.number == 5).filter_map(|field| made(&field));
        before.flat_map(|made| &made.nodes).for_each(|node| out.node(node));
    }
    let mut number = 0usize;
    for field in fields(bytes) {
        let position = number;
        number = number.saturating_add(usize::from(field.number == 1));
        let dropped = || ValueInfoProto::decode(field.content).is_ok_and(|input| edits.inputs.contains(input.name()));
        match (field.number, made(&field), edits.nodes.get(&position)) {
            (5, Some(made), _) => made.tensors.iter().for_each(|tensor| out.initializer(tensor)),
            (1, Some(made), _) => {
                made.tensors.iter().for_each(|tensor| out.initializer(tensor));
                made.nodes.iter().for_each(|node| out.node(node));
            }
            (1, None, Some(nodes)) if top => nodes.iter().for_each(|node| out.node(node)),
            (11, ..) if top && dropped() => {}
            _ => nested(Kind::Graph, &field, false, edits, out),
        }
    }
}

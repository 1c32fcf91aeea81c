//! A model file written again: what no pass has touched as it was, bytes of weights that one has in their places.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use prost::Message;

use super::file::{self, Pieces};
use super::model_file::{Away, Held, ModelFile};
use super::proto::{DataLocation, StringStringEntryProto, TensorProto};
use super::quantized::{Replaced, Replacing};
use super::splice::{Data, Edits, Made, NewTensor, splice};
use super::wire::{self, VARINT, data};
use crate::error::{Error, Result};
use crate::store::header::byte_count;
use crate::store::writer::{Item, Piece};
use crate::store::{DType, Encoding, RawTensor, StorageFormat, Weight, Weights};

/// What a model file becomes.
pub struct Rewritten {
    /// The files, piece by piece; items have the numbers of `items`.
    pub layout: Pieces,
    /// What the pieces are made of.
    pub items: Vec<Item>,
    /// Positions of items that are no weights, but bytes that go over as they are.
    pub carried: BTreeSet<usize>,
    /// Weights that are written as they stand in the messages of the file.
    pub as_they_stand: Vec<Item>,
    /// Tensors that the weights are written as.
    pub tensors: usize,
    /// Plain words.
    pub notes: Vec<String>,
}

impl ModelFile {
    /// Lays out a file with other weights, and a second one where it would be larger than `largest`; both have names.
    ///
    /// # Errors
    /// A weight is missing, or is of a shape or type that the graph does not take.
    pub fn rewrite(&self, weights: &Weights, [name, data]: [&str; 2], metadata: &BTreeMap<String, String>, largest: u64) -> Result<Rewritten> {
        let mut plan = Plan {
            file: self,
            weights,
            edits: self.edits(metadata),
            replacing: Replacing::new(&self.model, self.opset()),
            items: Vec::new(),
            carried: BTreeSet::new(),
            as_they_stand: Vec::new(),
            remarks: BTreeMap::new(),
            data: data.to_owned(),
        };
        plan.take_out();
        let outside = self.tensors.iter().enumerate().try_fold(0u64, |sum, (number, held)| plan.add(number, held).map(|size| sum.saturating_add(size)))?;
        for (position, quantizer) in plan.replacing.quantizers() {
            plan.edits.nodes.entry(position).or_default().insert(0, quantizer);
        }
        plan.name_nodes();
        // Before version 4, initializers have to be inputs.
        if self.model.ir_version() < 4 && !(self.weights_as_inputs.is_empty() && plan.edits.made.is_empty()) {
            let mut version = Vec::new();
            wire::tag(1, VARINT, &mut version);
            wire::varint(4, &mut version);
            plan.edits.model.insert(1, version);
        }
        let mut layout = Vec::new();
        let beside = if outside.saturating_add(self.skeleton.len() as u64) > largest { plan.move_out()? } else { Vec::new() };
        layout.push((name.to_owned(), splice(&self.skeleton, &plan.edits)));
        if file::bytes(layout.last().map_or(&[][..], |(_, pieces)| pieces)) > largest {
            return Err(Error::malformed(&self.path, "cannot be written: its messages alone are larger than 2 GB"));
        }
        if !beside.is_empty() {
            layout.push((plan.data.clone(), beside));
        }
        let Plan { items, carried, as_they_stand, remarks, .. } = plan;
        let mut notes: Vec<String> = Vec::new();
        for (remark, names) in remarks {
            notes.push(format!("{name}: {} quantized weights are {remark} (the first: `{}`)", names.len(), names.first().map_or("", String::as_str)));
        }
        if let Some(first) = self.weights_as_inputs.first() {
            notes.push(format!(
                "{name}: {} initializers were inputs too, where a caller could replace them; they are weights now and no inputs, and runtimes fold them (the first: `{first}`)",
                self.weights_as_inputs.len()
            ));
        }
        let made = items.iter().enumerate().filter(|(at, _)| !carried.contains(at)).map(|(_, item)| item.storage_format.parts(&item.name, &item.weight).len());
        let tensors = made.fold(as_they_stand.len(), usize::saturating_add);
        Ok(Rewritten { layout, items, carried, as_they_stand, tensors, notes })
    }

    /// What changes whatever the weights are.
    fn edits(&self, metadata: &BTreeMap<String, String>) -> Edits {
        let mut edits = Edits { inputs: self.weights_as_inputs.clone(), ..Edits::default() };
        if !metadata.is_empty() {
            let kept = self.model.metadata_props.iter().filter(|entry| !metadata.contains_key(entry.key())).cloned();
            let mut all = Vec::new();
            for entry in kept.chain(metadata.iter().map(|(key, value)| StringStringEntryProto::new(key, value))) {
                wire::bytes(14, entry.encoded_len() as u64, &mut all);
                all.extend(entry.encode_to_vec());
            }
            edits.model.insert(14, all);
        }
        edits
    }
}

struct Plan<'m> {
    file: &'m ModelFile,
    weights: &'m Weights,
    edits: Edits,
    replacing: Replacing<'m>,
    items: Vec<Item>,
    carried: BTreeSet<usize>,
    as_they_stand: Vec<Item>,
    /// Weights by what is not as their encodings ask for.
    remarks: BTreeMap<&'static str, Vec<String>>,
    /// Name of the second file.
    data: String,
}

impl Plan<'_> {
    /// Takes out what made floats of integers that a pass has changed.
    fn take_out(&mut self) {
        let changed = |name: &str| match (self.weights.by_name.get(name), self.file.weights.get(name)) {
            (Some(now), Some(before)) => !Arc::ptr_eq(&before.source(), &now.source()),
            _ => false,
        };
        let made = |held: &&Held| held.weight.as_deref().is_some_and(changed);
        for gone in self.file.tensors.iter().filter(made).filter_map(|held| held.dequantized.as_ref()) {
            self.edits.nodes.extend(gone.nodes.iter().map(|node| (*node, Vec::new())));
            self.edits.made.extend(gone.parts.iter().map(|part| (*part as u64, Made { tensors: Vec::new(), nodes: Vec::new() })));
        }
    }

    /// Gives new nodes names that no node of the file has: they have those of their outputs.
    fn name_nodes(&mut self) {
        let nodes = self.file.model.graph.iter().flat_map(|graph| &graph.node).enumerate();
        let stay = nodes.filter(|(position, _)| !self.edits.nodes.contains_key(position)).map(|(_, node)| node.name().to_owned());
        let mut taken: BTreeSet<String> = stay.filter(|name| !name.is_empty()).collect();
        let made = self.edits.made.values_mut().flat_map(|made| &mut made.nodes);
        for node in made.chain(self.edits.nodes.values_mut().flatten()) {
            node.name = node.name.take().filter(|name| !name.is_empty()).map(|name| super::fresh(&mut taken, name));
        }
    }

    /// Plans a tensor: how many bytes of it are no part of the messages that were read.
    fn add(&mut self, number: usize, held: &Held) -> Result<u64> {
        if self.edits.made.contains_key(&(number as u64)) {
            return Ok(0);
        }
        let Some(name) = &held.weight else {
            return match &held.away {
                Some(Away { bytes, field }) => self.carry(number, *field, bytes),
                None => Ok(0),
            };
        };
        let missing = || Error::tensor(name, "is part of the graph, and a pass has removed it", "take the pass out");
        let now = self.weights.by_name.get(name).ok_or_else(missing)?.clone();
        let before = self.file.weights.get(name).ok_or_else(missing)?;
        let item = |storage_format| Item { name: name.clone(), weight: now.clone(), storage_format };
        if Arc::ptr_eq(&before.source(), &now.source()) {
            let Some(Away { bytes, field }) = &held.away else {
                self.as_they_stand.push(item(StorageFormat::Plain));
                return Ok(0);
            };
            if held.flipped || held.dequantized.is_some() || field.is_some_and(data::is_varints) {
                // What was read is told, and the bytes stay what they are.
                self.as_they_stand.push(item(StorageFormat::Plain));
                return self.carry(number, *field, bytes);
            }
            return self.put(number, item(StorageFormat::Plain), field.unwrap_or(data::RAW));
        }
        if now.shape != before.shape {
            let reason = format!("has shape {:?} now, {} takes {:?}", now.shape, self.file.path.display(), before.shape);
            return Err(Error::tensor(name, reason, "take the pass out that cuts it"));
        }
        if now.encoding == Encoding::Dense && now.dtype == before.dtype && held.dequantized.is_none() {
            let format = if held.flipped { StorageFormat::Transposed } else { StorageFormat::Plain };
            return self.put(number, item(format), data::RAW);
        }
        let uses = self.file.uses.get(name).map_or(&[][..], Vec::as_slice);
        let Replaced { item, tensors, nodes, readers, remark } = self.replacing.replace(name, before, &now, uses, held.flipped)?;
        remark.into_iter().for_each(|remark| self.remarks.entry(remark).or_default().push(name.clone()));
        let (mut made, mut sum, index) = (Vec::new(), 0u64, self.items.len());
        let parts = item.storage_format.parts(name, &item.weight);
        for (part, (tensor, stored)) in tensors.iter().zip(&parts).enumerate() {
            let bytes = byte_count(stored.dtype, &stored.shape).ok_or_else(|| overflows(name))?;
            sum = sum.saturating_add(bytes);
            made.push((tensor.encode_to_vec(), Data::Item { field: data::RAW, piece: Piece::Item { index, part, bytes } }));
        }
        self.items.push(item);
        self.edits.made.insert(number as u64, Made { tensors: made, nodes });
        self.edits.nodes.extend(readers);
        Ok(sum)
    }

    /// Puts an item in the place of a tensor's elements.
    fn put(&mut self, number: usize, item: Item, field: u64) -> Result<u64> {
        let bytes = byte_count(item.weight.dtype, &item.weight.shape).ok_or_else(|| overflows(&item.name))?;
        let piece = Piece::Item { index: self.items.len(), part: 0, bytes };
        self.edits.tensors.insert(number as u64, NewTensor { fields: BTreeMap::new(), data: Data::Item { field, piece } });
        self.items.push(item);
        Ok(bytes)
    }

    /// Bytes that go over as they are.
    fn carry(&mut self, number: usize, field: Option<u64>, bytes: &RawTensor) -> Result<u64> {
        let mut weight = Weight::new(DType::U8, vec![bytes.bytes() as usize], Encoding::Dense, Arc::new(bytes.clone()));
        weight.stored_bytes = bytes.bytes();
        self.carried.insert(self.items.len());
        self.put(number, Item { name: format!("tensor {number}"), weight, storage_format: StorageFormat::Plain }, field.unwrap_or(data::RAW))
    }

    /// Moves elements into a second file, where they can be mapped into memory.
    fn move_out(&mut self) -> Result<Vec<Piece>> {
        let mut beside = Outside { pieces: Vec::new(), at: 0, name: &self.data, path: &self.file.path };
        for new in self.edits.tensors.values_mut() {
            if let Some(place) = beside.take(&mut new.data)? {
                new.fields.insert(data::LOCATION, place);
            }
        }
        for (head, data) in self.edits.made.values_mut().flat_map(|made| &mut made.tensors) {
            head.extend(beside.take(data)?.unwrap_or_default());
        }
        Ok(beside.pieces)
    }
}

fn overflows(name: &str) -> Error {
    Error::tensor(name, "its size overflows", "")
}

/// The second file.
struct Outside<'n> {
    pieces: Vec<Piece>,
    at: u64,
    name: &'n str,
    path: &'n Path,
}

impl Outside<'_> {
    /// Takes elements in, if they are large enough: the fields that say where they are.
    fn take(&mut self, from: &mut Data) -> Result<Option<Vec<u8>>> {
        let Data::Item { field, piece } = &*from else { return Ok(None) };
        let size = piece.len();
        // Numbers of any length have no place outside.
        if size < file::SMALL || data::is_varints(*field) {
            return Ok(None);
        }
        let overflows = || Error::malformed(self.path, "has more bytes than can be counted");
        let start = self.at.checked_next_multiple_of(file::ALIGNMENT).ok_or_else(overflows)?;
        let end = start.checked_add(size).ok_or_else(overflows)?;
        self.pieces.push(Piece::Bytes(vec![0; start.saturating_sub(self.at) as usize]));
        self.pieces.push(piece.clone());
        self.at = end;
        let place = [("location", self.name.to_owned()), ("offset", start.to_string()), ("length", size.to_string())];
        let tensor = TensorProto {
            external_data: place.map(|(key, value)| StringStringEntryProto::new(key, value)).to_vec(),
            data_location: Some(DataLocation::External as i32),
            ..TensorProto::default()
        };
        *from = Data::Outside;
        Ok(Some(tensor.encode_to_vec()))
    }
}

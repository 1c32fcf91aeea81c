//! A model file written again: what no pass has touched as it was, bytes of weights that one has in their places.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message;

use super::elements::data_type;
use super::file::{self, Pieces};
use super::model_file::{Away, Held, ModelFile};
use super::proto::{DataLocation, StringStringEntryProto, TensorProto};
use super::splice::{Data, Edits, NewTensor, splice};
use super::wire::{self, VARINT, data};
use crate::error::{Error, Result};
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
    /// Number of tensors.
    pub tensors: usize,
    /// Plain words.
    pub notes: Vec<String>,
}

impl ModelFile {
    /// Lays out a file of this name with other weights, and a second one where it would be larger than `largest`.
    ///
    /// # Errors
    /// A weight is missing, or is of a shape or type that the graph does not take.
    pub fn rewrite(&self, weights: &Weights, name: &str, metadata: &BTreeMap<String, String>, largest: u64) -> Result<Rewritten> {
        let mut plan = Plan { file: self, weights, edits: self.edits(metadata), items: Vec::new(), carried: BTreeSet::new(), as_they_stand: Vec::new(), data: file::data_file(name) };
        let outside = self.tensors.iter().enumerate().try_fold(0u64, |sum, (number, held)| plan.add(number, held).map(|size| sum.saturating_add(size)))?;
        let mut layout = Vec::new();
        let beside = if outside.saturating_add(self.skeleton.len() as u64) > largest { plan.move_out()? } else { Vec::new() };
        layout.push((name.to_owned(), splice(&self.skeleton, &plan.edits)));
        if file::bytes(layout.last().map_or(&[][..], |(_, pieces)| pieces)) > largest {
            return Err(Error::malformed(&self.path, "cannot be written: its messages alone are larger than 2 GB"));
        }
        if !beside.is_empty() {
            layout.push((plan.data.clone(), beside));
        }
        let Plan { items, carried, as_they_stand, .. } = plan;
        let mut notes = Vec::new();
        if let Some(first) = self.weights_as_inputs.first() {
            notes.push(format!(
                "{name}: {} initializers were inputs too, where a caller could replace them; they are weights now and no inputs, and runtimes fold them (the first: `{first}`)",
                self.weights_as_inputs.len()
            ));
        }
        Ok(Rewritten { layout, items, carried, as_they_stand, tensors: self.tensors.len(), notes })
    }

    /// What changes whatever the weights are.
    fn edits(&self, metadata: &BTreeMap<String, String>) -> Edits {
        let mut edits = Edits { inputs: self.weights_as_inputs.clone(), ..Edits::default() };
        // Before version 4, initializers have to be inputs.
        if !self.weights_as_inputs.is_empty() && self.model.ir_version() < 4 {
            let mut version = Vec::new();
            wire::tag(1, VARINT, &mut version);
            wire::varint(4, &mut version);
            edits.model.insert(1, version);
        }
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
    items: Vec<Item>,
    carried: BTreeSet<usize>,
    as_they_stand: Vec<Item>,
    /// Name of the second file.
    data: String,
}

impl Plan<'_> {
    /// Plans a tensor: how many bytes of it are no part of the messages that were read.
    fn add(&mut self, number: usize, held: &Held) -> Result<u64> {
        let named = match &held.weight {
            Some(name) => Some((name.as_str(), self.file.weights.get(name), self.now(name)?)),
            None => None,
        };
        let item = match (&held.away, named) {
            (None, None) => return Ok(0),
            (away, Some((name, Some(before), now))) => {
                let item = Item { name: name.to_owned(), weight: now.clone(), storage_format: StorageFormat::Plain };
                let changed = !Arc::ptr_eq(&before.source(), &now.source());
                match away {
                    None if !changed => {
                        self.as_they_stand.push(item);
                        return Ok(0);
                    }
                    // What numbers of any length become is told, and their bytes stay what they are.
                    Some(Away { field: Some(field), bytes }) if !changed && data::is_varints(*field) => {
                        self.as_they_stand.push(item);
                        self.carried(number, Some(*field), bytes)
                    }
                    Some(Away { field, .. }) if !changed => (item, field.unwrap_or(data::RAW)),
                    _ => {
                        self.hold(name, before, &now)?;
                        (item, data::RAW)
                    }
                }
            }
            (Some(Away { bytes, field }), _) => self.carried(number, *field, bytes),
            (None, Some((name, None, _))) => return Err(Error::tensor(name, "is in no file", "this is a bug in compress, please report it")),
        };
        let (item, field) = item;
        let size = crate::store::header::byte_count(item.weight.dtype, &item.weight.shape).ok_or_else(|| Error::tensor(&item.name, "its size overflows", ""))?;
        let piece = Piece::Item { index: self.items.len(), part: 0, bytes: size };
        self.edits.tensors.insert(number as u64, NewTensor { fields: BTreeMap::new(), data: Data::Item { field, piece } });
        self.items.push(item);
        Ok(size)
    }

    /// Bytes that go over as they are.
    fn carried(&mut self, number: usize, field: Option<u64>, bytes: &RawTensor) -> (Item, u64) {
        let mut weight = Weight::new(DType::U8, vec![bytes.bytes() as usize], Encoding::Dense, Arc::new(bytes.clone()));
        weight.stored_bytes = bytes.bytes();
        self.carried.insert(self.items.len());
        (Item { name: format!("tensor {number}"), weight, storage_format: StorageFormat::Plain }, field.unwrap_or(data::RAW))
    }

    fn now(&self, name: &str) -> Result<Weight> {
        let none = || Error::tensor(name, "is part of the graph, and a pass has removed it", "take the pass out");
        self.weights.by_name.get(name).cloned().ok_or_else(none)
    }

    /// Holds a weight that a pass has made to what the graph takes.
    fn hold(&self, name: &str, before: &Weight, now: &Weight) -> Result<()> {
        let path = self.file.path.display();
        if now.shape != before.shape {
            return Err(Error::tensor(name, format!("has shape {:?} now, {path} takes {:?}", now.shape, before.shape), "take the pass out that cuts it"));
        }
        if now.encoding != Encoding::Dense || now.dtype != before.dtype || data_type(now.dtype).is_none() {
            let (now, before) = (now.describe(), before.describe());
            return Err(Error::tensor(name, format!("is {now} now, the graph of {path} takes {before}"), "add it to `ignore`"));
        }
        Ok(())
    }

    /// Moves elements into a second file, where they can be mapped into memory.
    fn move_out(&mut self) -> Result<Vec<Piece>> {
        let (mut pieces, mut at) = (Vec::new(), 0u64);
        for new in self.edits.tensors.values_mut() {
            let Data::Item { field, piece } = &new.data else { continue };
            let size = piece.len();
            // Numbers of any length have no place outside.
            if size < file::SMALL || data::is_varints(*field) {
                continue;
            }
            let overflows = || Error::malformed(&self.file.path, "has more bytes than can be counted");
            let start = at.checked_next_multiple_of(file::ALIGNMENT).ok_or_else(overflows)?;
            pieces.push(Piece::Bytes(vec![0; start.saturating_sub(at) as usize]));
            pieces.push(piece.clone());
            at = start.checked_add(size).ok_or_else(overflows)?;
            let place = [("location", self.data.clone()), ("offset", start.to_string()), ("length", size.to_string())];
            let tensor = TensorProto {
                external_data: place.map(|(key, value)| StringStringEntryProto::new(key, value)).to_vec(),
                data_location: Some(DataLocation::External as i32),
                ..TensorProto::default()
            };
            new.fields.insert(data::LOCATION, tensor.encode_to_vec());
            new.data = Data::Outside;
        }
        Ok(pieces)
    }
}

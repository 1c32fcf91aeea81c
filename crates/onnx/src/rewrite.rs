//! Writing of an opened model file with changed weights. Everything that no pass has changed is copied
//! verbatim.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use prost::Message;

use super::file::{self, Pieces};
use super::model_file::{ModelFile, OutOfLineData, TensorEntry};
use super::proto::{DataLocation, StringStringEntryProto, TensorProto};
use super::replacement::{Replacement, Replacer};
use super::splice::{Data, Edits, Expansion, NewTensor, splice};
use super::wire::{self, VARINT, data};
use crate::error::{Error, Result, counted};
use crate::store::header::byte_count;
use crate::store::writer::{Item, Piece};
use crate::store::{DType, Encoding, RawTensor, StorageFormat, Weight, Weights};

/// The plan of a rewritten model file.
pub struct Rewritten {
    /// The pieces of each file. Their items are indices into `items`.
    pub layout: Pieces,
    /// The weights and copied tensors to write.
    pub items: Vec<Item>,
    /// Positions of the items that are copied bytes, not weights.
    pub copied: BTreeSet<usize>,
    /// Weights that are written verbatim, as a part of the messages.
    pub unmodified: Vec<Item>,
    /// Number of tensors that represent the weights.
    pub tensors: usize,
    /// Notes for the report.
    pub notes: Vec<String>,
}

impl ModelFile {
    /// Plans a file with these weights, and a data file if it would exceed `largest` bytes.
    pub fn rewrite(&self, weights: &Weights, [name, data]: [&str; 2], metadata: &BTreeMap<String, String>, largest: u64) -> Result<Rewritten> {
        let mut plan = Plan {
            file: self,
            weights,
            edits: self.edits(metadata),
            replacer: Replacer::new(&self.model, self.opset()),
            items: Vec::new(),
            copied: BTreeSet::new(),
            unmodified: Vec::new(),
            remarks: BTreeMap::new(),
            data: data.to_owned(),
        };
        plan.remove_dequantization();
        let outside = self.tensors.iter().enumerate().try_fold(0u64, |sum, (number, entry)| plan.add(number, entry).map(|size| sum.saturating_add(size)))?;
        for (position, quantizer) in plan.replacer.quantizers() {
            plan.edits.nodes.entry(position).or_default().insert(0, quantizer);
        }
        plan.name_nodes();
        // Before IR version 4, initializers had to be graph inputs.
        if self.model.ir_version() < 4 && !(self.weights_as_inputs.is_empty() && plan.edits.expansions.is_empty()) {
            let mut version = Vec::new();
            wire::tag(1, VARINT, &mut version);
            wire::varint(4, &mut version);
            plan.edits.model.insert(1, version);
        }
        let mut layout = Vec::new();
        let external = if outside.saturating_add(self.skeleton.len() as u64) > largest { plan.move_to_data_file()? } else { Vec::new() };
        layout.push((name.to_owned(), splice(&self.skeleton, &plan.edits)));
        if file::bytes(layout.last().map_or(&[][..], |(_, pieces)| pieces)) > largest {
            return Err(Error::malformed(&self.path, "cannot be written: its messages without weights are larger than 2 GB"));
        }
        if !external.is_empty() {
            layout.push((plan.data.clone(), external));
        }
        let Plan { items, copied, unmodified, remarks, .. } = plan;
        let mut notes: Vec<String> = Vec::new();
        for (remark, names) in remarks {
            notes.push(format!("{name}: {}, {remark} (the first: `{}`)", counted(names.len(), "quantized weight"), names.first().map_or("", String::as_str)));
        }
        notes.extend(self.note_on_removed_inputs(name));
        let written =
            items.iter().enumerate().filter(|(at, _)| !copied.contains(at)).map(|(_, item)| item.storage_format.parts(&item.name, &item.weight).len());
        let tensors = written.fold(unmodified.len(), usize::saturating_add);
        Ok(Rewritten { layout, items, copied, unmodified, tensors, notes })
    }

    /// A note on initializers that were also inputs, for the file that is written with this name.
    pub fn note_on_removed_inputs(&self, name: &str) -> Option<String> {
        let first = self.weights_as_inputs.first()?;
        Some(format!(
            "{name}: {} removed from the inputs, so that runtimes can fold constants; callers can no longer override the values (the first: `{first}`)",
            counted(self.weights_as_inputs.len(), "initializer")
        ))
    }

    /// Edits that do not depend on the weights.
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
    replacer: Replacer<'m>,
    items: Vec<Item>,
    copied: BTreeSet<usize>,
    unmodified: Vec<Item>,
    /// Names of weights by remark.
    remarks: BTreeMap<&'static str, Vec<String>>,
    /// Name of the data file.
    data: String,
}

impl Plan<'_> {
    /// Removes nodes and tensors for the dequantization of weights that a pass has changed.
    fn remove_dequantization(&mut self) {
        let changed = |name: &str| match (self.weights.by_name.get(name), self.file.weights.get(name)) {
            (Some(now), Some(before)) => !Arc::ptr_eq(&before.source(), &now.source()),
            _ => false,
        };
        let is_changed = |entry: &&TensorEntry| entry.weight.as_deref().is_some_and(changed);
        for gone in self.file.tensors.iter().filter(is_changed).filter_map(|entry| entry.dequantized.as_ref()) {
            self.edits.nodes.extend(gone.nodes.iter().map(|node| (*node, Vec::new())));
            self.edits.expansions.extend(gone.parts.iter().map(|part| (*part as u64, Expansion { tensors: Vec::new(), nodes: Vec::new() })));
        }
    }

    /// Makes the names of new nodes unique. Initially, they have the names of their outputs.
    fn name_nodes(&mut self) {
        let nodes = self.file.model.graph.iter().flat_map(|graph| &graph.node).enumerate();
        let stay = nodes.filter(|(position, _)| !self.edits.nodes.contains_key(position)).map(|(_, node)| node.name().to_owned());
        let mut taken: BTreeSet<String> = stay.filter(|name| !name.is_empty()).collect();
        let added = self.edits.expansions.values_mut().flat_map(|expansion| &mut expansion.nodes);
        for node in added.chain(self.edits.nodes.values_mut().flatten()) {
            node.name = node.name.take().filter(|name| !name.is_empty()).map(|name| super::fresh(&mut taken, name));
        }
    }

    /// Plans a tensor, and returns its number of bytes outside of the messages.
    fn add(&mut self, number: usize, entry: &TensorEntry) -> Result<u64> {
        if self.edits.expansions.contains_key(&(number as u64)) {
            return Ok(0);
        }
        let Some(name) = &entry.weight else {
            return match &entry.out_of_line {
                Some(OutOfLineData { bytes, field }) => self.copy_bytes(number, *field, bytes),
                None => Ok(0),
            };
        };
        let missing = || Error::tensor(name, "is part of the graph, but a pass has removed it", "remove the pass from the recipe");
        let now = self.weights.by_name.get(name).ok_or_else(missing)?.clone();
        let before = self.file.weights.get(name).ok_or_else(missing)?;
        let item = |storage_format| Item { name: name.clone(), weight: now.clone(), storage_format };
        if Arc::ptr_eq(&before.source(), &now.source()) {
            let Some(OutOfLineData { bytes, field }) = &entry.out_of_line else {
                self.unmodified.push(item(StorageFormat::Plain));
                return Ok(0);
            };
            if entry.flipped || entry.dequantized.is_some() || field.is_some_and(data::is_varints) {
                // The weight is reported, and its bytes are copied.
                self.unmodified.push(item(StorageFormat::Plain));
                return self.copy_bytes(number, *field, bytes);
            }
            return self.replace_elements(number, item(StorageFormat::Plain), field.unwrap_or(data::RAW));
        }
        if now.shape != before.shape {
            let reason = format!("has been changed to shape {:?}, but {} requires {:?}", now.shape, self.file.path.display(), before.shape);
            return Err(Error::tensor(name, reason, "remove the pass that changes its shape"));
        }
        if now.encoding == Encoding::Dense && now.dtype == before.dtype && entry.dequantized.is_none() {
            let format = if entry.flipped { StorageFormat::Transposed } else { StorageFormat::Plain };
            return self.replace_elements(number, item(format), data::RAW);
        }
        let mut before = before.clone();
        if let Some(cast) = entry.converted {
            // The graph reads the result of the cast, which the replacement computes.
            self.edits.nodes.insert(cast, Vec::new());
            before.dtype = DType::F32;
        }
        let usages = self.file.usages.get(name).map_or(&[][..], Vec::as_slice);
        let Replacement { item, tensors, nodes, readers, remark } = self.replacer.replace(name, &before, &now, usages, entry.flipped)?;
        remark.into_iter().for_each(|remark| self.remarks.entry(remark).or_default().push(name.clone()));
        let (mut new_tensors, mut sum, index) = (Vec::new(), 0u64, self.items.len());
        let parts = item.storage_format.parts(name, &item.weight);
        for (part, (tensor, stored)) in tensors.iter().zip(&parts).enumerate() {
            let bytes = byte_count(stored.dtype, &stored.shape).ok_or_else(|| overflows(name))?;
            sum = sum.saturating_add(bytes);
            new_tensors.push((tensor.encode_to_vec(), Data::Item { field: data::RAW, piece: Piece::Item { index, part, bytes } }));
        }
        self.items.push(item);
        self.edits.expansions.insert(number as u64, Expansion { tensors: new_tensors, nodes });
        self.edits.nodes.extend(readers);
        Ok(sum)
    }

    /// Replaces the elements of a tensor by an item.
    fn replace_elements(&mut self, number: usize, item: Item, field: u64) -> Result<u64> {
        let bytes = byte_count(item.weight.dtype, &item.weight.shape).ok_or_else(|| overflows(&item.name))?;
        let piece = Piece::Item { index: self.items.len(), part: 0, bytes };
        self.edits.tensors.insert(number as u64, NewTensor { fields: BTreeMap::new(), data: Data::Item { field, piece } });
        self.items.push(item);
        Ok(bytes)
    }

    /// Copies bytes verbatim.
    fn copy_bytes(&mut self, number: usize, field: Option<u64>, bytes: &RawTensor) -> Result<u64> {
        let mut weight = Weight::new(DType::U8, vec![bytes.bytes() as usize], Encoding::Dense, Arc::new(bytes.clone()));
        weight.stored_bytes = bytes.bytes();
        self.copied.insert(self.items.len());
        self.replace_elements(number, Item { name: format!("tensor {number}"), weight, storage_format: StorageFormat::Plain }, field.unwrap_or(data::RAW))
    }

    /// Moves elements into a data file, in which they can be mapped into memory.
    fn move_to_data_file(&mut self) -> Result<Vec<Piece>> {
        let mut external = ExternalFile { pieces: Vec::new(), at: 0, name: &self.data, path: &self.file.path };
        for new in self.edits.tensors.values_mut() {
            if let Some(location) = external.take(&mut new.data)? {
                new.fields.insert(data::LOCATION, location);
            }
        }
        for (head, data) in self.edits.expansions.values_mut().flat_map(|expansion| &mut expansion.tensors) {
            head.extend(external.take(data)?.unwrap_or_default());
        }
        Ok(external.pieces)
    }
}

fn overflows(name: &str) -> Error {
    Error::tensor(name, "its size overflows", "")
}

/// The external data file.
struct ExternalFile<'n> {
    pieces: Vec<Piece>,
    at: u64,
    name: &'n str,
    path: &'n Path,
}

impl ExternalFile<'_> {
    /// Moves elements into the file if they are large enough. Returns the encoded tensor fields with
    /// their location.
    fn take(&mut self, from: &mut Data) -> Result<Option<Vec<u8>>> {
        let Data::Item { field, piece } = &*from else { return Ok(None) };
        let size = piece.len();
        // Elements that are stored as varints cannot be external data.
        if size < file::SMALL || data::is_varints(*field) {
            return Ok(None);
        }
        let overflows = || Error::malformed(self.path, "has more bytes than can be counted");
        let start = self.at.checked_next_multiple_of(file::ALIGNMENT).ok_or_else(overflows)?;
        let end = start.checked_add(size).ok_or_else(overflows)?;
        self.pieces.push(Piece::Bytes(vec![0; start.saturating_sub(self.at) as usize]));
        self.pieces.push(piece.clone());
        self.at = end;
        let entries = [("location", self.name.to_owned()), ("offset", start.to_string()), ("length", size.to_string())];
        let tensor = TensorProto {
            external_data: entries.map(|(key, value)| StringStringEntryProto::new(key, value)).to_vec(),
            data_location: Some(DataLocation::External as i32),
            ..TensorProto::default()
        };
        *from = Data::External;
        Ok(Some(tensor.encode_to_vec()))
    }
}

//! Items that other processes have already computed, completely or as ranges of rows. They are copied
//! instead of being computed again.

// Parses files of other processes.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::header::Header;
use super::item::{Item, PlannedFile};
use super::measure::{WeightMeasurement, merge_rows};
use super::part_writer::PartWriter;
use super::{RawTensor, Weight};
use crate::error::{Error, Result};
use crate::work::Work;

/// Items computed by other processes: their stored tensors and measurements.
#[derive(Debug, Default)]
pub struct Prebuilt {
    /// Stored tensors by name. For an item split into ranges of rows, one tensor per range, in order.
    pub tensors: BTreeMap<String, Vec<RawTensor>>,
    /// Measurements by item name, likewise.
    pub items: BTreeMap<String, Vec<WeightMeasurement>>,
    /// Files that can be hard-linked instead of copied if an output file has the same header.
    pub files: Vec<PrebuiltFile>,
}

/// A file with items computed by another process.
#[derive(Debug)]
pub struct PrebuiltFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Name inside its output folder.
    pub name: String,
    /// Header of the file.
    pub header: Header,
    /// Hash of the file, computed by this process.
    pub blake3: blake3::Hash,
}

/// Bytes copied at once.
const COPY_BYTES: u64 = 256 << 10;

impl Prebuilt {
    /// The prebuilt file with the header and folder of `file`.
    pub(super) fn file(&self, file: &PlannedFile) -> Option<&PrebuiltFile> {
        let inside = |name: &str| Path::new(name).parent().map(Path::to_owned);
        self.files.iter().find(|prebuilt| prebuilt.header == file.header && inside(&prebuilt.name) == inside(&file.name))
    }

    /// Hard-links the matching prebuilt file to `path` and returns its hash. `None` without a matching file,
    /// or if the file system does not support links.
    pub(super) fn link(&self, file: &PlannedFile, path: &Path) -> Option<blake3::Hash> {
        let prebuilt = self.file(file)?;
        std::fs::hard_link(&prebuilt.path, path).ok().map(|()| prebuilt.blake3)
    }

    /// Copies the prebuilt tensors of an item and returns its measurement. `writers` is empty if the
    /// file was linked.
    pub(super) fn copy(&self, item: &Item, names: &[&str], writers: &mut [PartWriter], work: &Work) -> Result<WeightMeasurement> {
        let (ranges, mut measurement) = self.measurement(item)?;
        for (part, (name, writer)) in names.iter().zip(writers.iter_mut()).enumerate() {
            let tensors = self.tensors.get(*name).map_or(&[][..], Vec::as_slice);
            if tensors.len() != ranges.len() {
                return Err(unfit(name, format!("is stored in {} parts, but its rows were measured in {}", tensors.len(), ranges.len())));
            }
            for (tensor, rows) in tensors.iter().zip(&ranges) {
                require(item, part, tensor, rows)?;
            }
            match item.storage_format.shape_part(part, &item.weight) {
                Some(bytes) => writer.write(&bytes)?,
                None => tensors.iter().try_for_each(|tensor| copy(tensor, writer, work))?,
            }
        }
        if ranges.len() > 1 {
            measurement.bytes = writers.iter().fold(0, |sum, writer| sum.saturating_add(writer.length));
        }
        work.advance(item.weight.stored_bytes.max(1))?;
        Ok(measurement)
    }

    /// The ranges of rows computed by the parts, in order, and the merged measurement.
    fn measurement(&self, item: &Item) -> Result<(Vec<Range<usize>>, WeightMeasurement)> {
        let (name, all) = (item.name.as_str(), item.weight.all_rows());
        let pieces = match self.items.get(name).map_or(&[][..], Vec::as_slice) {
            [] => return Err(unfit(name, "was computed by no part".into())),
            [whole] if whole.rows.is_none() => return Ok((vec![all], whole.clone())),
            [_] => return Err(unfit(name, "has only some of its rows in one part, and the others in no part".into())),
            pieces => pieces,
        };
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for piece in pieces {
            let Some(found) = &piece.rows else { return Err(unfit(name, "is in several parts, and completely in one of them".into())) };
            let from = ranges.last().map_or(0, |before| before.end);
            if found.of != all.end {
                return Err(unfit(name, format!("was split as a tensor of {} rows, but has {}", found.of, all.end)));
            }
            if found.rows.start != from || found.rows.is_empty() {
                return Err(unfit(
                    name,
                    format!("is split into pieces that are not adjacent: rows {} to {} follow row {from}", found.rows.start, found.rows.end),
                ));
            }
            ranges.push(found.rows.clone());
        }
        let end = ranges.last().map_or(0, |before| before.end);
        if end != all.end {
            return Err(unfit(name, format!("has {} rows, but rows from {end} onwards are in no part", all.end)));
        }
        match merge_rows(pieces) {
            Some(merged) => Ok((ranges, merged)),
            None => Err(unfit(name, "was not measured completely by its parts".into())),
        }
    }
}

fn unfit(name: &str, reason: String) -> Error {
    Error::tensor(name, reason, "remove the folders of the parts that contain it, and run these parts again")
}

/// Checks that a prebuilt tensor of a range of rows has the expected dtype and shape.
fn require(item: &Item, part: usize, tensor: &RawTensor, rows: &Range<usize>) -> Result<()> {
    let mut piece: Weight = item.weight.clone();
    if let Some(size) = piece.shape.first_mut() {
        *size = rows.len();
    }
    match item.storage_format.parts(&item.name, &piece).get(part) {
        Some(expected) if expected.shape == tensor.shape && expected.dtype == tensor.dtype => Ok(()),
        Some(expected) => {
            let what = format!(
                "is {} {:?} in a part, but {} {:?} is expected for rows {} to {}",
                tensor.dtype, tensor.shape, expected.dtype, expected.shape, rows.start, rows.end
            );
            Err(unfit(&expected.name, what))
        }
        None => Err(unfit(&item.name, "has more tensors in a part than expected".into())),
    }
}

fn copy(tensor: &RawTensor, writer: &mut PartWriter, work: &Work) -> Result<()> {
    let mut buffer = Vec::new();
    for start in (0..tensor.bytes()).step_by(COPY_BYTES as usize) {
        buffer.resize(COPY_BYTES.min(tensor.bytes().saturating_sub(start)) as usize, 0);
        tensor.read_at(start, &mut buffer)?;
        writer.write(&buffer)?;
        work.cancel.check()?;
    }
    Ok(())
}

//! What other processes have made of items, whole or some rows of each: taken over instead of being made again.

// What is read here, other processes have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::header::Header;
use super::measure::of_rows;
use super::part_writer::PartWriter;
use super::writer::{Item, LaidOut, WeightMeasurement};
use super::{RawTensor, Weight};
use crate::error::{Error, Result};
use crate::work::Work;

/// Items that other processes have made: the tensors that they are stored as, and what was seen of each.
#[derive(Debug, Default)]
pub struct Made {
    /// By the names in the files; of an item that was cut, one for each run of its rows, in order.
    pub tensors: BTreeMap<String, Vec<RawTensor>>,
    /// By the name of the item, likewise.
    pub items: BTreeMap<String, Vec<WeightMeasurement>>,
    /// Files that can become files of the whole where these have the same header: linked, and not copied.
    pub files: Vec<MadeFile>,
}

/// A file of items that other processes have made.
#[derive(Debug)]
pub struct MadeFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its name inside the folder that it was made in.
    pub name: String,
    /// What is in it.
    pub header: Header,
    /// Hash of the file, as it was read just now.
    pub blake3: blake3::Hash,
}

/// Bytes that are copied at once.
const COPIED: u64 = 256 << 10;

impl Made {
    /// The file that was made with this header, for the same folder.
    pub(super) fn file(&self, file: &LaidOut) -> Option<&MadeFile> {
        let inside = |name: &str| Path::new(name).parent().map(Path::to_owned);
        self.files.iter().find(|made| made.header == file.header && inside(&made.name) == inside(&file.name))
    }

    /// The hash of a file that was made with this header, which has this name now; nothing where there is none, or the file system has no links.
    pub(super) fn link(&self, file: &LaidOut, path: &Path) -> Option<blake3::Hash> {
        let made = self.file(file)?;
        std::fs::hard_link(&made.path, path).ok().map(|()| made.blake3)
    }

    /// Copies what was made of an item, and tells what was seen of it. There are no writers where a whole file is linked.
    pub(super) fn copy(&self, item: &Item, names: &[&str], writers: &mut [PartWriter], work: &Work) -> Result<WeightMeasurement> {
        let (cuts, mut seen) = self.seen(item)?;
        for (part, (name, writer)) in names.iter().zip(writers.iter_mut()).enumerate() {
            let tensors = self.tensors.get(*name).map_or(&[][..], Vec::as_slice);
            if tensors.len() != cuts.len() {
                return Err(unfit(name, format!("is in {} parts, and its rows are in {}", tensors.len(), cuts.len())));
            }
            for (tensor, rows) in tensors.iter().zip(&cuts) {
                require(item, part, tensor, rows)?;
            }
            match item.storage_format.shape_part(part, &item.weight) {
                Some(bytes) => writer.write(&bytes)?,
                None => tensors.iter().try_for_each(|tensor| copy(tensor, writer, work))?,
            }
        }
        if cuts.len() > 1 {
            seen.bytes = writers.iter().fold(0, |sum, writer| sum.saturating_add(writer.length));
        }
        work.advance(item.weight.stored_bytes.max(1))?;
        Ok(seen)
    }

    /// The rows that parts have made of an item, in order, and what is to be seen of all of them.
    fn seen(&self, item: &Item) -> Result<(Vec<Range<usize>>, WeightMeasurement)> {
        let (name, all) = (item.name.as_str(), item.weight.all_rows());
        let pieces = match self.items.get(name).map_or(&[][..], Vec::as_slice) {
            [] => return Err(unfit(name, "was seen by no part".into())),
            [whole] if whole.rows.is_none() => return Ok((vec![all], whole.clone())),
            [_] => return Err(unfit(name, "has some of its rows in one part, and the others in none".into())),
            pieces => pieces,
        };
        let mut cuts: Vec<Range<usize>> = Vec::new();
        for piece in pieces {
            let Some(seen) = &piece.rows else { return Err(unfit(name, "is in several parts, and whole in one of them".into())) };
            let from = cuts.last().map_or(0, |before| before.end);
            if seen.of != all.end {
                return Err(unfit(name, format!("was cut as a tensor of {} rows, and has {}", seen.of, all.end)));
            }
            if seen.rows.start != from || seen.rows.is_empty() {
                return Err(unfit(name, format!("is cut into pieces that do not meet: rows {} to {} lie behind row {from}", seen.rows.start, seen.rows.end)));
            }
            cuts.push(seen.rows.clone());
        }
        let made = cuts.last().map_or(0, |before| before.end);
        if made != all.end {
            return Err(unfit(name, format!("has {} rows, and those from {made} on are in no part", all.end)));
        }
        match of_rows(pieces) {
            Some(whole) => Ok((cuts, whole)),
            None => Err(unfit(name, "was not seen whole by its parts".into())),
        }
    }
}

fn unfit(name: &str, reason: String) -> Error {
    Error::tensor(name, reason, "remove the folders of the parts that have it, and run these parts again")
}

/// Holds a tensor of some rows of an item to what these rows are stored as.
fn require(item: &Item, part: usize, tensor: &RawTensor, rows: &Range<usize>) -> Result<()> {
    let mut piece: Weight = item.weight.clone();
    if let Some(size) = piece.shape.first_mut() {
        *size = rows.len();
    }
    match item.storage_format.parts(&item.name, &piece).get(part) {
        Some(meant) if meant.shape == tensor.shape && meant.dtype == tensor.dtype => Ok(()),
        Some(meant) => {
            let what = format!(
                "is {} {:?} in a part, and {} {:?} is meant for rows {} to {}",
                tensor.dtype, tensor.shape, meant.dtype, meant.shape, rows.start, rows.end
            );
            Err(unfit(&meant.name, what))
        }
        None => Err(unfit(&item.name, "has more tensors in a part than are meant".into())),
    }
}

fn copy(tensor: &RawTensor, writer: &mut PartWriter, work: &Work) -> Result<()> {
    let mut buffer = Vec::new();
    for start in (0..tensor.bytes()).step_by(COPIED as usize) {
        buffer.resize(COPIED.min(tensor.bytes().saturating_sub(start)) as usize, 0);
        tensor.read_at(start, &mut buffer)?;
        writer.write(&buffer)?;
        work.cancel.check()?;
    }
    Ok(())
}

//! Runs in parts: several processes each write a share of the weights.

// Parses files written by other processes.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, ParseError, Result};
use crate::store::Weight;

/// Number of a part and the number of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PartIndex {
    /// Number of this part, from 1.
    pub(crate) number: usize,
    /// Number of parts.
    pub(crate) count: usize,
}

/// Maximum number of parts.
const MAX_PARTS: usize = 99_999;

impl PartIndex {
    /// Part `number` of `count`.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn new(number: usize, count: usize) -> Result<PartIndex, ParseError> {
        match (1..=MAX_PARTS).contains(&count) && (1..=count).contains(&number) {
            true => Ok(PartIndex { number, count }),
            false => Err(format!("part {number} of {count} does not exist: parts are numbered from 1, and there can be at most {MAX_PARTS}").into()),
        }
    }

    /// The part of this job in a job array, from the environment variables of Slurm or Kubernetes.
    /// `count` is the number of parts, if it is specified.
    fn from_environment(count: Option<usize>, read: &dyn Fn(&str) -> Option<String>) -> Result<PartIndex, ParseError> {
        let number = |name: &str| -> Result<Option<usize>, String> {
            let Some(text) = read(name) else { return Ok(None) };
            text.trim().parse().map(Some).map_err(|_| format!("{name} is `{text}`, which is not a whole number"))
        };
        if let Some(id) = number("SLURM_ARRAY_TASK_ID")? {
            // SLURM_ARRAY_TASK_MIN refers to the current submission. It cannot be used if single parts
            // are resubmitted.
            if let Some(count) = count {
                return PartIndex::new(id, count).map_err(|reason| format!("SLURM_ARRAY_TASK_ID: {reason}, as in --array=1-{count}").into());
            }
            let (least, step) = (number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(1), number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1));
            let count = number("SLURM_ARRAY_TASK_COUNT")?.ok_or("SLURM_ARRAY_TASK_COUNT is not set: specify the number of parts, as in auto/16")?;
            let number = id.checked_sub(least).and_then(|offset| offset.checked_div(step)).and_then(|index| index.checked_add(1));
            return PartIndex::new(number.ok_or_else(|| format!("SLURM_ARRAY_TASK_ID {id} is below SLURM_ARRAY_TASK_MIN {least}"))?, count);
        }
        if let Some(index) = number("JOB_COMPLETION_INDEX")? {
            let count = count
                .ok_or("Kubernetes provides the index of this job (JOB_COMPLETION_INDEX) but not the number of jobs: write auto/16 for `completions: 16`")?;
            return PartIndex::new(index.saturating_add(1), count);
        }
        Err("neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set, so this is not a job of an array: write I/N, as in 2/16".into())
    }

    /// Name for files and folders of this part, such as `00002-of-00016`.
    #[doc(hidden)]
    pub fn name(&self) -> String {
        format!("{:05}-of-{:05}", self.number, self.count)
    }

    /// All parts.
    #[doc(hidden)]
    pub fn all(&self) -> impl Iterator<Item = PartIndex> + use<> {
        let count = self.count;
        (1..=count).map(move |number| PartIndex { number, count })
    }
}

impl FromStr for PartIndex {
    type Err = ParseError;

    /// Parses `2/16`, `auto` in a Slurm job array, or `auto/16` in a job array of Slurm or Kubernetes.
    fn from_str(text: &str) -> Result<PartIndex, ParseError> {
        let (number, count) = text.split_once('/').map_or((text, None), |(number, count)| (number, Some(count)));
        let whole = |text: &str| text.parse::<usize>().map_err(|_| format!("`{text}` is not a whole number: expected I/N, as in 2/16, or auto"));
        let count = count.map(whole).transpose()?;
        match (number, count) {
            ("auto", count) => PartIndex::from_environment(count, &|name| std::env::var(name).ok()),
            (number, Some(count)) => PartIndex::new(whole(number)?, count),
            (_, None) => Err("expected I/N, as in 2/16, or auto".into()),
        }
    }
}

impl fmt::Display for PartIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part {} of {}", self.number, self.count)
    }
}

/// A weight to be assigned to parts.
#[derive(Debug, Clone)]
pub struct Assignment {
    /// Name of the weight.
    pub name: String,
    /// Its size in the input, in bytes.
    pub bytes: u64,
    /// Size of its first axis.
    pub rows: usize,
    /// If the weight is split, the number of rows of each slice is a multiple of this. `None` if it must
    /// not be split.
    pub row_multiple: Option<usize>,
}

/// The owner of a weight or of a range of its rows.
#[derive(Debug)]
struct Owner {
    name: String,
    /// `None` for all rows.
    rows: Option<Range<usize>>,
    /// Number of the part.
    owner: usize,
}

/// The part of a run that a process executes, and the exchange of counts with other parts.
#[derive(Debug)]
pub struct Part {
    index: PartIndex,
    /// Sorted by name and rows.
    owned: Vec<Owner>,
    /// Folder through which parts exchange counts.
    folder: PathBuf,
}

/// Weights smaller than 1/4 of a share are not split.
const MIN_SPLIT_DIVISOR: u128 = 4;

impl Part {
    /// Assigns weights to parts by size, in the order of their names. If there are at least as many
    /// files as parts, whole files are assigned, so that parts can be merged without copying. Otherwise,
    /// and for files larger than a share, weights are assigned one by one, and large weights of at least
    /// `min_split_bytes` are split where shares end.
    pub fn new(index: PartIndex, mut files: Vec<Vec<Assignment>>, min_split_bytes: u64, folder: PathBuf) -> Part {
        let count = index.count as u128;
        let size = |weights: &[Assignment]| weights.iter().map(|weight| u128::from(weight.bytes)).sum::<u128>();
        let total = files.iter().map(|weights| size(weights)).sum::<u128>().max(1);
        let large = |weight: &Assignment| {
            let is_large = u128::from(weight.bytes).saturating_mul(count).saturating_mul(MIN_SPLIT_DIVISOR) > total;
            is_large && weight.bytes >= min_split_bytes && weight.row_multiple.is_some_and(|multiple| multiple < weight.rows)
        };
        files.sort_by(|a, b| a.first().map(|weight| &weight.name).cmp(&b.first().map(|weight| &weight.name)));
        let whole = files.len() >= index.count && files.iter().flatten().is_sorted_by_key(|weight| &weight.name);
        let (mut before, mut owned) = (0u128, Vec::new());
        let mut assign = |unit: Vec<Assignment>, split: bool| {
            let bytes = size(&unit);
            let part = |offset: u128| usize::try_from(offset.checked_div(total).unwrap_or(0)).unwrap_or(usize::MAX).min(index.count.saturating_sub(1));
            if let (true, [weight]) = (split, unit.as_slice()) {
                let last = part(before.saturating_add(bytes).saturating_sub(1).saturating_mul(count));
                let mut start = 0;
                for owner in part(before.saturating_mul(count))..=last {
                    let share_end = total.saturating_mul(owner as u128).saturating_add(total).checked_div(count).unwrap_or(0);
                    let end = if owner == last { weight.rows } else { nearest_split(weight, share_end.saturating_sub(before)) };
                    if end > start {
                        let rows = Some(start..end).filter(|rows| *rows != (0..weight.rows));
                        owned.push(Owner { name: weight.name.clone(), rows, owner: owner.saturating_add(1) });
                        start = end;
                    }
                }
            } else {
                // A unit is assigned to the part that contains its midpoint.
                let owner = part(before.saturating_mul(2).saturating_add(bytes).saturating_mul(count).checked_div(2).unwrap_or(0)).saturating_add(1);
                owned.extend(unit.into_iter().map(|weight| Owner { name: weight.name, rows: None, owner }));
            }
            before = before.saturating_add(bytes);
        };
        if !whole {
            files = vec![files.into_iter().flatten().collect()];
            files.iter_mut().for_each(|weights| weights.sort_by(|a, b| a.name.cmp(&b.name)));
        }
        for weights in files {
            if whole && !(size(&weights).saturating_mul(count) > total && weights.iter().any(large)) {
                assign(weights, false);
            } else {
                weights.into_iter().for_each(|weight| {
                    let split = large(&weight);
                    assign(vec![weight], split);
                });
            }
        }
        Part { index, owned, folder }
    }

    /// The entry of this part for a weight; `None` if it owns none of its rows. Names that were not
    /// assigned, such as those of scales, belong to the owner of the preceding name.
    fn owned(&self, name: &str) -> Option<&Owner> {
        let end = self.owned.partition_point(|owned| owned.name.as_str() <= name);
        let mut before = self.owned.get(..end.max(1)).unwrap_or_default().iter().rev();
        let last = before.next()?;
        let mine = |owned: &&Owner| owned.owner == self.index.number;
        Some(last).filter(mine).or_else(|| before.take_while(|owned| owned.name == name).find(mine))
    }

    /// Whether this part owns some rows of a weight.
    pub fn owns(&self, name: &str) -> bool {
        self.owned(name).is_some()
    }

    /// The weight, or the rows of it, that this part owns; `None` if it owns none.
    ///
    /// # Errors
    /// The rows cannot be computed separately.
    pub fn own_rows(&self, name: &str, weight: &Weight) -> Result<Option<Weight>> {
        let Some(owned) = self.owned(name) else { return Ok(None) };
        let Some(rows) = owned.rows.as_ref().filter(|_| owned.name == name) else { return Ok(Some(weight.clone())) };
        let missing =
            || Error::tensor(name, format!("rows {} to {} cannot be computed separately", rows.start, rows.end), "this is a bug in compress, please report it");
        weight.rows(rows, 1).map(|(weight, _)| Some(weight)).ok_or_else(missing)
    }

    /// Sums of the counts of all parts and of the preceding parts in a round; `None` if the counts of a
    /// part are missing. The `length` counts of this part are computed by `own` and written to a file
    /// for the other parts.
    ///
    /// # Errors
    /// Counting, reading or writing fails, or the counts of another part are malformed.
    pub fn counts(&self, round: &str, length: usize, own: &mut dyn FnMut() -> Result<Vec<u64>>) -> Result<Option<[Vec<u64>; 2]>> {
        let path_of = |index: PartIndex| self.folder.join(format!("{round}-{}.json", index.name()));
        let path = path_of(self.index);
        if !path.exists() {
            let text = serde_json::to_string(&own()?).map_err(|e| Error::malformed(&path, e))?;
            std::fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
            // The rename is atomic for readers. Process ids are not unique across containers, so the
            // name contains the time.
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_nanos());
            let new = self.folder.join(format!(".{round}-{}.{}-{now}", self.index.name(), std::process::id()));
            std::fs::write(&new, text).map_err(Error::io("write", &new))?;
            std::fs::rename(&new, &path).map_err(Error::io("move", &path))?;
        }
        let [mut all, mut before] = [vec![0u64; length], vec![0u64; length]];
        let add = |sums: &mut [u64], counts: &[u64]| sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        for index in self.index.all() {
            let Some(counts) = read_counts(&path_of(index), length)? else { return Ok(None) };
            add(&mut all, &counts);
            if index.number < self.index.number {
                add(&mut before, &counts);
            }
        }
        Ok(Some([all, before]))
    }
}

/// The row at which a weight can be split that is nearest to a byte offset.
fn nearest_split(weight: &Assignment, offset: u128) -> usize {
    let multiple = weight.row_multiple.unwrap_or(weight.rows).max(1);
    let row = offset.saturating_mul(weight.rows as u128).checked_div(u128::from(weight.bytes)).unwrap_or(0);
    let row = usize::try_from(row).unwrap_or(usize::MAX);
    let units = row.saturating_add(multiple / 2).checked_div(multiple).unwrap_or(0);
    units.saturating_mul(multiple).min(weight.rows)
}

/// Reads the counts of a part; `None` if the file does not exist.
fn read_counts(path: &Path, length: usize) -> Result<Option<Vec<u64>>> {
    let wrong = |reason: &dyn fmt::Display| Error::malformed(path, format!("is not a list of {length} counts ({reason}): remove it, and run its part again"));
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", path)(error)),
        Ok(text) => text,
    };
    let counts: Vec<u64> = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    if counts.len() == length { Ok(Some(counts)) } else { Err(wrong(&format!("it has {}", counts.len()))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_parsed_or_read_from_the_environment() {
        assert_eq!("2/16".parse(), Ok(PartIndex { number: 2, count: 16 }));
        for text in ["0/4", "5/4", "1/0", "2", "a/4", "2/b", "1/100000", "-1/2", "auto/x", "/4", ""] {
            assert!(text.parse::<PartIndex>().is_err(), "{text}");
        }
        let read = |set: &'static [(&str, &str)]| move |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        let found = |count, set: &'static [(&str, &str)]| PartIndex::from_environment(count, &read(set));
        let slurm = &[("SLURM_ARRAY_TASK_ID", "14"), ("SLURM_ARRAY_TASK_COUNT", "4"), ("SLURM_ARRAY_TASK_MIN", "10"), ("SLURM_ARRAY_TASK_STEP", "2")];
        assert_eq!(found(None, slurm), Ok(PartIndex { number: 3, count: 4 }));
        // A single part that is resubmitted.
        assert_eq!(
            found(Some(16), &[("SLURM_ARRAY_TASK_ID", "7"), ("SLURM_ARRAY_TASK_COUNT", "1"), ("SLURM_ARRAY_TASK_MIN", "7")]),
            Ok(PartIndex { number: 7, count: 16 })
        );
        assert!(found(Some(16), &[("SLURM_ARRAY_TASK_ID", "0")]).unwrap_err().to_string().contains("--array=1-16"));
        assert!(found(Some(1), &[("SLURM_ARRAY_TASK_ID", "7")]).unwrap_err().to_string().contains("part 7 of 1 does not exist"));
        assert_eq!(found(Some(16), &[("JOB_COMPLETION_INDEX", "0")]), Ok(PartIndex { number: 1, count: 16 }));
        assert!(found(None, &[("JOB_COMPLETION_INDEX", "0")]).unwrap_err().to_string().contains("auto/16"));
        assert!(found(None, &[]).unwrap_err().to_string().contains("not a job of an array"));
        assert!(found(None, &[("SLURM_ARRAY_TASK_ID", "x")]).unwrap_err().to_string().contains("not a whole number"));
    }

    #[test]
    fn every_weight_has_one_owner_and_parts_are_balanced() {
        let weights: Vec<(String, u64)> = (0..100).map(|i| (format!("w{i:03}"), 100 + i)).collect();
        for count in [1, 3, 16, 150] {
            let weight = |(name, bytes): &(String, u64)| Assignment { name: name.clone(), bytes: *bytes, rows: 4, row_multiple: Some(4) };
            let files: Vec<Vec<Assignment>> = weights.chunks(5).map(|file| file.iter().map(weight).collect()).collect();
            let parts: Vec<Part> = PartIndex { number: 1, count }.all().map(|index| Part::new(index, files.clone(), 0, "x".into())).collect();
            let bytes = |part: &Part| weights.iter().filter(|(name, _)| part.owns(name)).map(|(_, bytes)| bytes).sum::<u64>();
            let sizes: Vec<u64> = parts.iter().map(bytes).collect();
            assert_eq!(sizes.iter().sum::<u64>(), weights.iter().map(|(_, bytes)| bytes).sum::<u64>());
            let fair = sizes.iter().sum::<u64>() / count as u64;
            assert!(sizes.iter().all(|size| size.abs_diff(fair) <= 1000), "{count}: {sizes:?}");
            let whole = |part: &Part| files.iter().all(|file| [0, file.len()].contains(&file.iter().filter(|weight| part.owns(&weight.name)).count()));
            assert_eq!(parts.iter().all(whole), count <= files.len(), "{count}");
            assert_eq!(parts.iter().filter(|part| part.owns("w050_scale")).count(), 1);
            assert_eq!(parts.iter().filter(|part| part.owns("a")).count(), 1);
        }
    }

    /// Rows of each weight that a part owns.
    fn rows_of(part: &Part, weights: &[Assignment]) -> Vec<Option<Range<usize>>> {
        let own = |weight: &Assignment| part.owned(&weight.name).map(|owned| owned.rows.clone().unwrap_or(0..weight.rows));
        weights.iter().map(own).collect()
    }

    #[test]
    fn weights_larger_than_a_share_are_split_where_shares_end() {
        let weight = |name: &str, bytes, rows, row_multiple| Assignment { name: name.into(), bytes, rows, row_multiple };
        let weights = [weight("a", 500, 10, None), weight("b", 10_000, 1000, Some(8)), weight("c", 700, 10, Some(1)), weight("d", 30, 3, Some(1))];
        for count in [1, 2, 3, 16] {
            let parts: Vec<Part> = PartIndex { number: 1, count }.all().map(|index| Part::new(index, vec![weights.to_vec()], 600, "x".into())).collect();
            let fair = weights.iter().map(|weight| weight.bytes).sum::<u64>() / count as u64;
            let mut next = [0; 4];
            for part in &parts {
                let rows = rows_of(part, &weights);
                let size: u64 =
                    weights.iter().zip(&rows).filter_map(|(weight, rows)| Some(weight.bytes * rows.as_ref()?.len() as u64 / weight.rows as u64)).sum();
                assert!(size.abs_diff(fair) <= 300, "{count}: {size} of {fair}");
                for (rows, next) in rows.iter().zip(&mut next) {
                    let Some(rows) = rows else { continue };
                    assert_eq!(rows.start, *next);
                    *next = rows.end;
                }
                let slice = rows[1].clone().unwrap_or(0..0);
                assert!(slice.start.is_multiple_of(8) && (slice.end.is_multiple_of(8) || slice.end == 1000), "{slice:?}");
            }
            assert_eq!(next, [10, 1000, 10, 3]);
            assert_eq!(parts.iter().filter(|part| part.owns("b_scale")).count(), 1);
            // Weights that are too small or cannot be split have one owner.
            for (index, name) in [(0, "a"), (3, "d")] {
                assert_eq!(parts.iter().filter(|part| rows_of(part, &weights)[index].is_some()).count(), 1, "{name}");
            }
        }
        // As many files as parts, one of them larger than a share.
        let files = [vec![weights[0].clone()], vec![weights[1].clone()], weights[2..].to_vec()];
        let parts: Vec<Part> = PartIndex { number: 1, count: 3 }.all().map(|index| Part::new(index, files.to_vec(), 600, "x".into())).collect();
        assert!(parts.iter().all(|part| part.owns("b")));
        let parts: Vec<Part> = PartIndex { number: 1, count: 3 }.all().map(|index| Part::new(index, files.to_vec(), 20_000, "x".into())).collect();
        assert_eq!(parts.iter().filter(|part| part.owns("b")).count(), 1);
    }

    #[test]
    fn files_in_folders_are_assigned_in_the_order_of_names() {
        let weight = |name: &str| Assignment { name: name.into(), bytes: 10, rows: 1, row_multiple: None };
        let files = [vec![weight("b"), weight("d")], vec![weight("c/x")], vec![weight("a/x")]];
        for count in [1, 2, 3, 4] {
            let parts: Vec<Part> = PartIndex { number: 1, count }.all().map(|index| Part::new(index, files.to_vec(), 0, "x".into())).collect();
            let owner = |name: &str| parts.iter().position(|part| part.owns(name)).unwrap();
            assert!(["a/x", "b", "c/x", "d"].map(owner).is_sorted(), "{count}");
        }
    }
}

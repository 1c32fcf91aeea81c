//! A run that several processes share: each makes the weights of its part.

// What is read here, other processes have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::store::Weight;

/// Which part of how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// From 1.
    pub number: usize,
    /// All parts.
    pub count: usize,
}

/// Parts at most.
const MOST: usize = 99_999;

impl Share {
    /// A part of so many.
    ///
    /// # Errors
    /// There is no such part.
    pub fn new(number: usize, count: usize) -> Result<Share, String> {
        match (1..=MOST).contains(&count) && (1..=count).contains(&number) {
            true => Ok(Share { number, count }),
            false => Err(format!("there is no part {number} of {count}: parts are numbered from 1, up to {MOST} of them")),
        }
    }

    /// The part that a job of an array is to make, of what Slurm or Kubernetes put into the environment; `count` where only that is told.
    fn of_environment(count: Option<usize>, read: &dyn Fn(&str) -> Option<String>) -> Result<Share, String> {
        let number = |name: &str| -> Result<Option<usize>, String> {
            let Some(text) = read(name) else { return Ok(None) };
            text.trim().parse().map(Some).map_err(|_| format!("{name} is `{text}`, no whole number"))
        };
        if let Some(id) = number("SLURM_ARRAY_TASK_ID")? {
            // Slurm tells the least number of what was submitted now: of a part that is made again alone, its own.
            if let Some(count) = count {
                return Share::new(id, count).map_err(|reason| format!("SLURM_ARRAY_TASK_ID: {reason}, as in --array=1-{count}"));
            }
            let (least, step) = (number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(1), number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1));
            let told = number("SLURM_ARRAY_TASK_COUNT")?.ok_or("SLURM_ARRAY_TASK_COUNT is not set: say how many parts there are, as in auto/16")?;
            let place = id.checked_sub(least).and_then(|place| place.checked_div(step)).and_then(|place| place.checked_add(1));
            return Share::new(place.ok_or_else(|| format!("SLURM_ARRAY_TASK_ID {id} is below SLURM_ARRAY_TASK_MIN {least}"))?, told);
        }
        if let Some(index) = number("JOB_COMPLETION_INDEX")? {
            let count = count
                .ok_or("Kubernetes tells the number of this job (JOB_COMPLETION_INDEX), and not how many there are: write auto/16 for `completions: 16`")?;
            return Share::new(index.saturating_add(1), count);
        }
        Err("neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set: this is no job of an array; write I/N, as in 2/16".into())
    }

    /// Name of a file or folder of this part.
    pub fn name(&self) -> String {
        format!("{:05}-of-{:05}", self.number, self.count)
    }

    /// All parts.
    pub fn all(&self) -> impl Iterator<Item = Share> + use<> {
        let count = self.count;
        (1..=count).map(move |number| Share { number, count })
    }
}

impl FromStr for Share {
    type Err = String;

    /// `2/16`, `auto` in a job array of Slurm, `auto/16` in one of Slurm or Kubernetes.
    fn from_str(text: &str) -> Result<Share, String> {
        let (number, count) = text.split_once('/').map_or((text, None), |(number, count)| (number, Some(count)));
        let whole = |text: &str| text.parse::<usize>().map_err(|_| format!("`{text}` is no whole number: expected I/N, as in 2/16, or auto"));
        let count = count.map(whole).transpose()?;
        match (number, count) {
            ("auto", count) => Share::of_environment(count, &|name| std::env::var(name).ok()),
            (number, Some(count)) => Share::new(whole(number)?, count),
            (_, None) => Err("expected I/N, as in 2/16, or auto".into()),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part {} of {}", self.number, self.count)
    }
}

/// A weight that is to be dealt out.
#[derive(Debug, Clone)]
pub struct Dealt {
    /// Its name.
    pub name: String,
    /// Bytes that it takes in the input.
    pub bytes: u64,
    /// Rows along its first axis.
    pub rows: usize,
    /// Rows that stay together where it is cut; nothing where it stays whole.
    pub together: Option<usize>,
}

/// Whose some rows of a weight are.
#[derive(Debug)]
struct Owned {
    name: String,
    /// Nothing where it is the whole weight.
    rows: Option<Range<usize>>,
    owner: usize,
}

/// What a process makes of a run, and how it hears of the others.
#[derive(Debug)]
pub struct Part {
    share: Share,
    /// In the order of names and rows.
    owned: Vec<Owned>,
    /// Where parts write what others must know.
    folder: PathBuf,
}

/// Weights of less than this part of a share are not cut: they hardly matter.
const MATTERS: u128 = 4;

impl Part {
    /// Deals weights out, in the order of their names, by bytes: whole files, where there are as many as parts, so that parts are joined
    /// without copying. Of other files, and of those that are more than a share, large weights of at least `least` bytes are cut where
    /// shares end.
    pub fn new(share: Share, mut files: Vec<Vec<Dealt>>, least: u64, folder: PathBuf) -> Part {
        let count = share.count as u128;
        let size = |weights: &[Dealt]| weights.iter().map(|weight| u128::from(weight.bytes)).sum::<u128>();
        let total = files.iter().map(|weights| size(weights)).sum::<u128>().max(1);
        let large = |weight: &Dealt| {
            let matters = u128::from(weight.bytes).saturating_mul(count).saturating_mul(MATTERS) > total;
            matters && weight.bytes >= least && weight.together.is_some_and(|together| together < weight.rows)
        };
        files.sort_by(|a, b| a.first().map(|weight| &weight.name).cmp(&b.first().map(|weight| &weight.name)));
        let whole = files.len() >= share.count && files.iter().flatten().is_sorted_by_key(|weight| &weight.name);
        let (mut before, mut owned) = (0u128, Vec::new());
        let mut deal = |unit: Vec<Dealt>, cut: bool| {
            let bytes = size(&unit);
            let part = |place: u128| usize::try_from(place.checked_div(total).unwrap_or(0)).unwrap_or(usize::MAX).min(share.count.saturating_sub(1));
            if let (true, [weight]) = (cut, unit.as_slice()) {
                let last = part(before.saturating_add(bytes).saturating_sub(1).saturating_mul(count));
                let mut start = 0;
                for owner in part(before.saturating_mul(count))..=last {
                    let share_end = total.saturating_mul(owner as u128).saturating_add(total).checked_div(count).unwrap_or(0);
                    let end = if owner == last { weight.rows } else { nearest_cut(weight, share_end.saturating_sub(before)) };
                    if end > start {
                        let rows = Some(start..end).filter(|rows| *rows != (0..weight.rows));
                        owned.push(Owned { name: weight.name.clone(), rows, owner: owner.saturating_add(1) });
                        start = end;
                    }
                }
            } else {
                // A unit belongs to the part that its middle lies in.
                let owner = part(before.saturating_mul(2).saturating_add(bytes).saturating_mul(count).checked_div(2).unwrap_or(0)).saturating_add(1);
                owned.extend(unit.into_iter().map(|weight| Owned { name: weight.name, rows: None, owner }));
            }
            before = before.saturating_add(bytes);
        };
        if !whole {
            files = vec![files.into_iter().flatten().collect()];
            files.iter_mut().for_each(|weights| weights.sort_by(|a, b| a.name.cmp(&b.name)));
        }
        for weights in files {
            if whole && !(size(&weights).saturating_mul(count) > total && weights.iter().any(large)) {
                deal(weights, false);
            } else {
                weights.into_iter().for_each(|weight| {
                    let cut = large(&weight);
                    deal(vec![weight], cut);
                });
            }
        }
        Part { share, owned, folder }
    }

    /// Which part it is.
    pub fn share(&self) -> Share {
        self.share
    }

    /// What this part makes of a weight, or of what is stored with the weight before it in the order of names: all of it, some rows, or
    /// nothing.
    fn piece(&self, name: &str) -> Option<&Owned> {
        let end = self.owned.partition_point(|owned| owned.name.as_str() <= name);
        let mut before = self.owned.get(..end.max(1)).unwrap_or_default().iter().rev();
        let last = before.next()?;
        let mine = |owned: &&Owned| owned.owner == self.share.number;
        Some(last).filter(mine).or_else(|| before.take_while(|owned| owned.name == name).find(mine))
    }

    /// Whether this part makes something of a weight.
    pub fn owns(&self, name: &str) -> bool {
        self.piece(name).is_some()
    }

    /// What this part makes of a weight: all of it, some rows, or nothing.
    ///
    /// # Errors
    /// It was dealt out in rows that are no weight of their own.
    pub fn own(&self, name: &str, weight: &Weight) -> Result<Option<Weight>> {
        let Some(owned) = self.piece(name) else { return Ok(None) };
        let Some(rows) = owned.rows.as_ref().filter(|_| owned.name == name) else { return Ok(Some(weight.clone())) };
        let missing =
            || Error::tensor(name, format!("cannot be made in rows {} to {} alone", rows.start, rows.end), "this is a bug in compress, please report it");
        weight.rows(rows, 1).map(|(weight, _)| Some(weight)).ok_or_else(missing)
    }

    /// What all parts have counted in a round, and what those before this one have, added up; nothing while one has not. What this part has
    /// counted, `length` numbers, is written where the others find it.
    ///
    /// # Errors
    /// Counting, reading or writing fails, or another part has written something else.
    pub fn counts(&self, round: &str, length: usize, own: &mut dyn FnMut() -> Result<Vec<u64>>) -> Result<Option<[Vec<u64>; 2]>> {
        let place = |share: Share| self.folder.join(format!("{round}-{}.json", share.name()));
        let path = place(self.share);
        if !path.exists() {
            let text = serde_json::to_string(&own()?).map_err(|e| Error::malformed(&path, e))?;
            std::fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
            // Others read it as soon as it has its name; containers each have a process 1.
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_nanos());
            let new = self.folder.join(format!(".{round}-{}.{}-{now}", self.share.name(), std::process::id()));
            std::fs::write(&new, text).map_err(Error::io("write", &new))?;
            std::fs::rename(&new, &path).map_err(Error::io("move", &path))?;
        }
        let [mut all, mut before] = [vec![0u64; length], vec![0u64; length]];
        let add = |sums: &mut [u64], counts: &[u64]| sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        for share in self.share.all() {
            let Some(counts) = counts_of(&place(share), length)? else { return Ok(None) };
            add(&mut all, &counts);
            if share.number < self.share.number {
                add(&mut before, &counts);
            }
        }
        Ok(Some([all, before]))
    }
}

/// The row of a weight, between those that stay together, that is nearest to this place in its bytes.
fn nearest_cut(weight: &Dealt, place: u128) -> usize {
    let together = weight.together.unwrap_or(weight.rows).max(1);
    let row = place.saturating_mul(weight.rows as u128).checked_div(u128::from(weight.bytes)).unwrap_or(0);
    let row = usize::try_from(row).unwrap_or(usize::MAX);
    let units = row.saturating_add(together / 2).checked_div(together).unwrap_or(0);
    units.saturating_mul(together).min(weight.rows)
}

fn counts_of(path: &Path, length: usize) -> Result<Option<Vec<u64>>> {
    let wrong = |reason: &dyn fmt::Display| Error::malformed(path, format!("no list of {length} counts ({reason}): remove it, and run its part again"));
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", path)(error)),
        Ok(text) => text,
    };
    let counts: Vec<u64> = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    if counts.len() == length { Ok(Some(counts)) } else { Err(wrong(&format!("has {}", counts.len()))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_told_or_found_in_the_environment() {
        assert_eq!("2/16".parse(), Ok(Share { number: 2, count: 16 }));
        for text in ["0/4", "5/4", "1/0", "2", "a/4", "2/b", "1/100000", "-1/2", "auto/x", "/4", ""] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
        let read = |set: &'static [(&str, &str)]| move |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        let found = |count, set: &'static [(&str, &str)]| Share::of_environment(count, &read(set));
        let slurm = &[("SLURM_ARRAY_TASK_ID", "14"), ("SLURM_ARRAY_TASK_COUNT", "4"), ("SLURM_ARRAY_TASK_MIN", "10"), ("SLURM_ARRAY_TASK_STEP", "2")];
        assert_eq!(found(None, slurm), Ok(Share { number: 3, count: 4 }));
        // A part alone, done again.
        assert_eq!(
            found(Some(16), &[("SLURM_ARRAY_TASK_ID", "7"), ("SLURM_ARRAY_TASK_COUNT", "1"), ("SLURM_ARRAY_TASK_MIN", "7")]),
            Ok(Share { number: 7, count: 16 })
        );
        assert!(found(Some(16), &[("SLURM_ARRAY_TASK_ID", "0")]).unwrap_err().contains("--array=1-16"));
        assert!(found(Some(1), &[("SLURM_ARRAY_TASK_ID", "7")]).unwrap_err().contains("no part 7 of 1"));
        assert_eq!(found(Some(16), &[("JOB_COMPLETION_INDEX", "0")]), Ok(Share { number: 1, count: 16 }));
        assert!(found(None, &[("JOB_COMPLETION_INDEX", "0")]).unwrap_err().contains("auto/16"));
        assert!(found(None, &[]).unwrap_err().contains("no job of an array"));
        assert!(found(None, &[("SLURM_ARRAY_TASK_ID", "x")]).unwrap_err().contains("no whole number"));
    }

    #[test]
    fn every_weight_is_of_one_part_and_parts_are_alike() {
        let weights: Vec<(String, u64)> = (0..100).map(|i| (format!("w{i:03}"), 100 + i)).collect();
        for count in [1, 3, 16, 150] {
            let dealt = |(name, bytes): &(String, u64)| Dealt { name: name.clone(), bytes: *bytes, rows: 4, together: Some(4) };
            let files: Vec<Vec<Dealt>> = weights.chunks(5).map(|file| file.iter().map(dealt).collect()).collect();
            let parts: Vec<Part> = Share { number: 1, count }.all().map(|share| Part::new(share, files.clone(), 0, "x".into())).collect();
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
    /// Rows of each weight that a part has.
    fn rows_of(part: &Part, weights: &[Dealt]) -> Vec<Option<Range<usize>>> {
        let own = |weight: &Dealt| part.piece(&weight.name).map(|owned| owned.rows.clone().unwrap_or(0..weight.rows));
        weights.iter().map(own).collect()
    }

    #[test]
    fn a_weight_that_is_more_than_a_share_is_cut_where_shares_end() {
        let dealt = |name: &str, bytes, rows, together| Dealt { name: name.into(), bytes, rows, together };
        let weights = [dealt("a", 500, 10, None), dealt("b", 10_000, 1000, Some(8)), dealt("c", 700, 10, Some(1)), dealt("d", 30, 3, Some(1))];
        for count in [1, 2, 3, 16] {
            let parts: Vec<Part> = Share { number: 1, count }.all().map(|share| Part::new(share, vec![weights.to_vec()], 600, "x".into())).collect();
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
                let piece = rows[1].clone().unwrap_or(0..0);
                assert!(piece.start.is_multiple_of(8) && (piece.end.is_multiple_of(8) || piece.end == 1000), "{piece:?}");
            }
            assert_eq!(next, [10, 1000, 10, 3]);
            assert_eq!(parts.iter().filter(|part| part.owns("b_scale")).count(), 1);
            // What is too small, or cannot be cut, is whole.
            for (at, name) in [(0, "a"), (3, "d")] {
                assert_eq!(parts.iter().filter(|part| rows_of(part, &weights)[at].is_some()).count(), 1, "{name}");
            }
        }
        // As many files as parts, one of them larger than a share.
        let files = [vec![weights[0].clone()], vec![weights[1].clone()], weights[2..].to_vec()];
        let parts: Vec<Part> = Share { number: 1, count: 3 }.all().map(|share| Part::new(share, files.to_vec(), 600, "x".into())).collect();
        assert!(parts.iter().all(|part| part.owns("b")));
        let parts: Vec<Part> = Share { number: 1, count: 3 }.all().map(|share| Part::new(share, files.to_vec(), 20_000, "x".into())).collect();
        assert_eq!(parts.iter().filter(|part| part.owns("b")).count(), 1);
    }

    #[test]
    fn files_of_folders_take_their_place_in_the_order_of_names() {
        let dealt = |name: &str| Dealt { name: name.into(), bytes: 10, rows: 1, together: None };
        let files = [vec![dealt("b"), dealt("d")], vec![dealt("c/x")], vec![dealt("a/x")]];
        for count in [1, 2, 3, 4] {
            let parts: Vec<Part> = Share { number: 1, count }.all().map(|share| Part::new(share, files.to_vec(), 0, "x".into())).collect();
            let owner = |name: &str| parts.iter().position(|part| part.owns(name)).unwrap();
            assert!(["a/x", "b", "c/x", "d"].map(owner).is_sorted(), "{count}");
        }
    }
}

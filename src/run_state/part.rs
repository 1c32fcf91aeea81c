//! A run that several processes share: each makes the weights of its part.

// What is read here, other processes have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};

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

/// What a process makes of a run, and how it hears of the others.
#[derive(Debug)]
pub struct Part {
    share: Share,
    /// Names of the weights, in order, and whose they are.
    owners: Vec<(String, usize)>,
    /// Where parts write what others must know.
    folder: PathBuf,
}

impl Part {
    /// Deals weights out, in the order of their names, by bytes: whole files, where there are as many as parts, so that parts are joined
    /// without copying.
    pub fn new(share: Share, files: &[Vec<String>], bytes: &dyn Fn(&str) -> u64, folder: PathBuf) -> Part {
        let single = |names: &Vec<String>| names.iter().map(|name| vec![name.clone()]).collect::<Vec<_>>();
        let units = if files.len() < share.count { files.iter().flat_map(single).collect() } else { files.to_vec() };
        let sizes: Vec<u128> = units.iter().map(|names| names.iter().map(|name| u128::from(bytes(name))).sum()).collect();
        let total = sizes.iter().sum::<u128>().max(1);
        let (mut before, mut owners) = (0u128, Vec::new());
        for (names, size) in units.into_iter().zip(sizes) {
            // A unit belongs to the part that its middle lies in.
            let middle = before.saturating_mul(2).saturating_add(size);
            before = before.saturating_add(size);
            let part = middle.saturating_mul(share.count as u128).checked_div(total.saturating_mul(2)).unwrap_or(0);
            let owner = usize::try_from(part).unwrap_or(usize::MAX).min(share.count.saturating_sub(1)).saturating_add(1);
            owners.extend(names.into_iter().map(|name| (name, owner)));
        }
        Part { share, owners, folder }
    }

    /// Which part it is.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Whether this part makes a weight, or what is stored with the weight before it in the order of names.
    pub fn owns(&self, name: &str) -> bool {
        let place = self.owners.partition_point(|(own, _)| own.as_str() <= name).saturating_sub(1);
        self.owners.get(place).map_or(1, |(_, owner)| *owner) == self.share.number
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
            let size = |name: &str| weights.iter().find(|(own, _)| own == name).unwrap().1;
            let files: Vec<Vec<String>> = weights.chunks(5).map(|file| file.iter().map(|(name, _)| name.clone()).collect()).collect();
            let parts: Vec<Part> = Share { number: 1, count }.all().map(|share| Part::new(share, &files, &size, "x".into())).collect();
            let bytes = |part: &Part| weights.iter().filter(|(name, _)| part.owns(name)).map(|(_, bytes)| bytes).sum::<u64>();
            let sizes: Vec<u64> = parts.iter().map(bytes).collect();
            assert_eq!(sizes.iter().sum::<u64>(), weights.iter().map(|(_, bytes)| bytes).sum::<u64>());
            let fair = sizes.iter().sum::<u64>() / count as u64;
            assert!(sizes.iter().all(|size| size.abs_diff(fair) <= 1000), "{count}: {sizes:?}");
            let whole = |part: &Part| files.iter().all(|file| [0, file.len()].contains(&file.iter().filter(|name| part.owns(name)).count()));
            assert_eq!(parts.iter().all(whole), count <= files.len(), "{count}");
            assert_eq!(parts.iter().filter(|part| part.owns("w050_scale")).count(), 1);
            assert_eq!(parts.iter().filter(|part| part.owns("a")).count(), 1);
        }
    }
}

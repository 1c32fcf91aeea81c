//! Samples of a data set that a pass which reads it leaves alone, to measure on.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;

use candle_core::{DType, Tensor};

use super::{Batch, Data, DataSet, DataSets, Order, Pending, Side, Target, shaped};
use crate::error::Result;

/// One of so many samples is kept from passes that would use all of them.
const PART: usize = 10;
/// Samples that are kept at most.
const MOST: usize = 64;
/// Maximum number of batches that are compared with other sets.
const CANDIDATES: usize = 4 * MOST;
/// Samples that are compared for a warning about overlapping sets.
const COMPARED: usize = 256;
/// Maximum number of samples read from the other set.
const SCANNED: usize = 1 << 14;

impl DataSets {
    /// A set of them with `samples` set so that some are left to measure on: a tenth of a set that would be used as a whole, at most 64.
    /// Sets of fewer than ten samples stay as they are, and so do those that hold more than they are asked for.
    ///
    /// # Errors
    /// The data cannot be read, or does not fit the model.
    pub fn holding_out(&self, set: &Data, target: Target) -> Result<Data> {
        let one_more = set.samples.map(|wanted| wanted.saturating_add(1));
        let all = self.open(&Data { samples: one_more, ..set.clone() }, target)?;
        let there = all.count()?;
        if set.samples.is_some_and(|wanted| there > wanted) || there < PART {
            return Ok(set.clone());
        }
        // Those that are left, and those that are used, fill batches where their size is fixed.
        let batch = batch_of(&all, target);
        let used = there.saturating_sub(there.div_euclid(PART).min(MOST));
        let used = used.saturating_sub(used.checked_rem(batch).unwrap_or(0));
        Ok(if used == 0 { set.clone() } else { Data { samples: Some(used), ..set.clone() } })
    }

    /// Passes up to 64 held-out samples of a set to `consume`, one by one, until it returns `Break`: not the first `used`, which a pass
    /// reads, and none with the content of a sample in `others`.
    ///
    /// # Errors
    /// The data cannot be read, does not fit the model, or `consume` fails.
    pub fn for_each_beyond(
        &self,
        options: &Data,
        used: usize,
        others: &[&Data],
        target: Target,
        mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let set = self.open(&Data { samples: None, ..options.clone() }, target)?;
        let batch = batch_of(&set, target);
        let folder = options.images.as_ref().is_some_and(|path| path.is_dir());
        // Batches of neighbours hold samples that are used: those that are used lie all over a folder.
        if folder && batch > 1 {
            return Ok(());
        }
        let used = used.div_ceil(batch);
        let works = set.source.works(Order { batch: Some(batch), ..Order::default() })?.enumerate();
        // Of a folder, `samples` are spread over all classes; of anything else they are the first.
        let left: Box<dyn Iterator<Item = (usize, Result<Pending>)>> = if let (true, Some(all)) = (folder, set.samples()) {
            let mut left: Vec<_> = works.filter(|(index, _)| !is_spread(*index, all, used)).collect();
            left.sort_by_key(|(index, _)| index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            Box::new(left.into_iter())
        } else {
            Box::new(works.skip(used))
        };
        let left: Box<dyn Iterator<Item = Result<Pending>>> = if others.is_empty() {
            Box::new(left.map(|(_, pending)| pending))
        } else {
            let left: Vec<_> = left.take(CANDIDATES).collect();
            let shared = self.shared(&set, batch, left.iter().map(|(index, _)| *index).collect(), others, target)?;
            Box::new(left.into_iter().filter(move |(index, _)| !shared.contains(index)).map(|(_, pending)| pending))
        };
        for pending in left.take(MOST) {
            if consume(pending?()?)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Which of the `wanted` batches of a set, by position, share content with other sets.
    fn shared(&self, set: &DataSet, batch: usize, wanted: BTreeSet<usize>, others: &[&Data], target: Target) -> Result<BTreeSet<usize>> {
        let mut hashes: HashMap<u64, Vec<usize>> = HashMap::new();
        let end = wanted.last().map_or(0, |last| last.saturating_add(1).saturating_mul(batch));
        for (sample, identity) in set.source.identities(batch, true)?.take(end).enumerate() {
            let position = sample.checked_div(batch).unwrap_or(sample);
            for hash in identity?.into_iter().filter(|_| wanted.contains(&position)) {
                hashes.entry(hash).or_default().push(position);
            }
        }
        let mut shared = BTreeSet::new();
        for other in others {
            let other = self.open(other, target)?;
            for identity in other.source.identities(batch_of(&other, target), false)?.take(SCANNED) {
                shared.extend(identity?.iter().filter_map(|hash| hashes.get(hash)).flatten());
            }
        }
        Ok(shared)
    }

    /// Compares the first samples of a set with another set; returns how many overlap, and how many were compared.
    ///
    /// # Errors
    /// The data cannot be read, or does not fit the model.
    pub fn overlap(&self, options: &Data, other: &Data, target: Target) -> Result<(usize, usize)> {
        let set = self.open(options, target)?;
        let batch = batch_of(&set, target);
        let count = set.source.identities(batch, false)?.take(COMPARED).count();
        let batches = (0..count.div_ceil(batch)).collect();
        let shared = self.shared(&set, batch, batches, &[other], target)?;
        Ok((shared.len().saturating_mul(batch).min(count), count))
    }
}

/// Tokens per hash.
const RUN: usize = 32;

/// Hashes of runs of 32 tokens: consecutive runs, or with `everywhere` the runs at every offset.
pub(super) fn token_hashes(tokens: &[i64], everywhere: bool) -> Vec<u64> {
    let bytes = |run: &[i64]| hash(&run.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>());
    if tokens.len() < RUN {
        return vec![bytes(tokens)];
    }
    tokens.windows(RUN).step_by(if everywhere { 1 } else { RUN }).map(bytes).collect()
}

/// Hash of the model inputs of a sample, without padding.
pub(super) fn identity(sample: &Batch) -> Result<u64> {
    let mut hasher = blake3::Hasher::new();
    for (name, tensor) in &sample.inputs {
        let side = Side::of_input(name);
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let kept = sample.mask(side).filter(|mask| mask.dims() == tensor.dims()).map(values).transpose().map_err(shaped)?;
        hasher.update(name.as_bytes());
        for (at, value) in values(tensor).map_err(shaped)?.into_iter().enumerate() {
            if kept.as_ref().and_then(|kept| kept.get(at)) != Some(&0.0) {
                hasher.update(&value.to_le_bytes());
            }
        }
    }
    Ok(first_bytes(&hasher.finalize()))
}

/// 64-bit hash of bytes.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    first_bytes(&blake3::hash(bytes))
}

fn first_bytes(hash: &blake3::Hash) -> u64 {
    hash.as_bytes().iter().take(8).fold(0, |number, byte| number.wrapping_shl(8) | u64::from(*byte))
}

/// How many samples are taken at a time: one, or as many as the model takes that takes no other number.
fn batch_of(set: &DataSet, target: Target) -> usize {
    if set.source.runs_alone() { 1 } else { target.fixed_batch().unwrap_or(1).max(1) }
}

/// Whether a position is among so many that are spread evenly over all: `all * n / count` of some `n`.
fn is_spread(position: usize, all: usize, count: usize) -> bool {
    let number = position.saturating_mul(count).div_ceil(all.max(1));
    number < count && all.saturating_mul(number).checked_div(count) == Some(position)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spread_and_what_is_left_are_the_whole() {
        for (all, count) in [(1, 1), (10, 9), (128, 116), (1000, 3), (7, 7), (7, 9)] {
            let spread: Vec<usize> = if count < all { (0..count).map(|n| all * n / count).collect() } else { (0..all).collect() };
            let found: Vec<usize> = (0..all).filter(|position| is_spread(*position, all, count.min(all))).collect();
            assert_eq!(found, spread, "{count} of {all}");
        }
    }

    /// Also when both sets come from one file, or from copies.
    #[test]
    fn samples_of_other_sets_are_not_held_out() {
        let folder = tempfile::tempdir().unwrap();
        let save = |name: &str, rows: std::ops::Range<u32>| {
            let path = folder.path().join(name);
            let values: Vec<f32> = rows.clone().flat_map(|row| [row as f32, 1.0]).collect();
            let tensor = Tensor::from_vec(values, (rows.len(), 2), &candle_core::Device::Cpu).unwrap();
            candle_core::safetensors::save(&[("x".to_owned(), tensor)].into(), &path).unwrap();
            Data { arrays: Some(path), ..Data::default() }
        };
        let graph: crate::ir::Graph = "input x: float[batch, 2]\noutput y = x\n".parse().unwrap();
        let (inputs, outputs) = crate::ir::Port::of(&graph);
        let (config, made, sets) = (serde_json::Map::new(), crate::model::Made::new(), DataSets::default());
        let target = Target { folder: folder.path(), made: &made, config: &config, inputs: &inputs, outputs: &outputs };
        let (all, copy) = (save("all.safetensors", 0..40), save("copy.safetensors", 10..20));
        let left = |used: usize, others: &[&Data]| {
            let mut found: Vec<u32> = Vec::new();
            let take = |batch: Batch| {
                found.push(batch.inputs["x"].to_vec2::<f32>().unwrap()[0][0] as u32);
                Ok(ControlFlow::Continue(()))
            };
            sets.for_each_beyond(&all, used, others, target, take).unwrap();
            found
        };
        assert_eq!(left(5, &[]), (5..40).collect::<Vec<_>>());
        assert_eq!(left(5, &[&copy]), (5..10).chain(20..40).collect::<Vec<_>>());
        assert_eq!(left(5, &[&all]), [0u32; 0], "the other set is the same file");
        assert_eq!(left(5, &[&Data { samples: Some(30), ..all.clone() }, &copy]), (30..40).collect::<Vec<_>>());
        assert_eq!(sets.overlap(&copy, &all, target).unwrap(), (10, 10));
        assert_eq!(sets.overlap(&all, &copy, target).unwrap(), (10, 40));
        assert_eq!(sets.overlap(&copy, &Data { samples: Some(10), ..all.clone() }, target).unwrap(), (0, 10));
    }

    #[test]
    fn windows_that_begin_elsewhere_share_hashes() {
        let tokens: Vec<i64> = (0..500).map(|i| (i * i) % 8191).collect();
        let shared = |a: std::ops::Range<usize>, b: std::ops::Range<usize>| {
            let every = token_hashes(&tokens[a], true);
            token_hashes(&tokens[b], false).iter().any(|hash| every.contains(hash))
        };
        assert!(shared(0..128, 57..400) && shared(100..300, 0..190) && shared(3..20, 3..20));
        assert!(!shared(0..128, 128..256) && !shared(300..420, 0..300));
    }
}

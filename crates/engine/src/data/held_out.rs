//! Held-out samples: samples of a data set that are reserved for measurements, and not used by passes.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::{Batch, BatchSizes, Data, DataSet, DataSets, Order, Pending, SequenceRole, Target, shaped};
use crate::error::Result;

/// Fraction of the samples that is held out: one in this many.
const HELD_OUT_RATIO: usize = 10;
/// Maximum number of held-out samples.
const MAX_HELD_OUT: usize = 64;
/// Maximum number of batches that are compared with other sets.
const CANDIDATES: usize = 4 * MAX_HELD_OUT;
/// Samples that are compared for a warning about overlapping sets.
const COMPARED: usize = 256;
/// Maximum number of samples of another text that are compared: each has to be tokenized.
const SCANNED: usize = if cfg!(test) { 32 } else { 1 << 14 };

impl DataSets {
    /// Limits `samples` of a set that would be used completely, so that a tenth of it, at most 64
    /// samples, is held out. Sets with fewer than ten samples, and sets that are already limited, are
    /// returned unchanged.
    pub fn reserve_held_out(&self, set: &Data, target: Target) -> Result<Data> {
        // With a fixed batch size, incomplete batches do not count.
        let one_more = set.samples.map(|limit| limit.saturating_add(target.fixed_batch().unwrap_or(1).max(1)));
        let options = Data { samples: one_more, ..set.clone() };
        // A set with one more sample is not used again: its tokenizer would stay in memory.
        let all = if options == *set { self.open(set, target)? } else { Arc::new(DataSet::open(&options, target)?) };
        let count = all.count()?;
        if set.samples.is_some_and(|limit| count > limit) || count < HELD_OUT_RATIO {
            return Ok(set.clone());
        }
        // With a fixed batch size, both the used and the held-out samples must fill batches.
        let batch = batch_of(&all, target);
        let used = count.saturating_sub(count.div_euclid(HELD_OUT_RATIO).min(MAX_HELD_OUT));
        let used = used.saturating_sub(used.checked_rem(batch).unwrap_or(0));
        Ok(if used == 0 { set.clone() } else { Data { samples: Some(used), ..set.clone() } })
    }

    /// Passes up to 64 held-out samples of a set to `consume`, one by one, until it returns `Break`.
    /// Excludes the `used` samples that a pass reads, windows that overlap them, and samples whose content
    /// also occurs in `others`.
    /// If no pass reads any, `samples` and `sampling` of the set apply.
    /// Returns `false`, without calling `consume`, if one of `others` is a text with too many samples to
    /// compare.
    pub fn for_each_held_out(
        &self,
        options: &Data,
        used: usize,
        others: &[&Data],
        target: Target,
        mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>,
    ) -> Result<bool> {
        let all = Data { samples: None, sampling: None, ..options.clone() };
        let set = self.open(if used == 0 { options } else { &all }, target)?;
        // Spread windows can be anywhere in the text: they are excluded by their content.
        let spread = Some(Data { samples: Some(used), ..options.clone() }).filter(|data| used > 0 && data.is_spread());
        let others: Vec<&Data> = others.iter().copied().chain(&spread).collect();
        let used = if spread.is_some() { 0 } else { used };
        let batch = batch_of(&set, target);
        let folder = options.images.as_ref().is_some_and(|path| path.is_dir());
        // The used samples are spread over the whole folder, so that every batch of several samples
        // contains some.
        if folder && batch > 1 {
            return Ok(true);
        }
        let overlapping = match (options.stride, set.source.batch_sizes()) {
            (Some(stride), BatchSizes::Varying { tokens: Some(length) }) if used > 0 => length.div_ceil(stride.max(1)).saturating_sub(1),
            _ => 0,
        };
        let used = used.saturating_add(overlapping).div_ceil(batch);
        let batches = set.source.pending_batches(Order { batch: Some(batch), drop_incomplete: true, ..Order::default() })?.enumerate();
        // In a folder, `samples` are spread over all classes; otherwise they are the first ones.
        let unused: Box<dyn Iterator<Item = (usize, Result<Pending>)>> = if let (true, Some(all)) = (folder, set.samples()) {
            let mut unused: Vec<_> = batches.filter(|(index, _)| !is_spread(*index, all, used)).collect();
            unused.sort_by_key(|(index, _)| index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            Box::new(unused.into_iter())
        } else {
            Box::new(batches.skip(used))
        };
        let held_out: Box<dyn Iterator<Item = Result<Pending>>> = if others.is_empty() {
            Box::new(unused.map(|(_, pending)| pending))
        } else {
            let candidates: Vec<_> = unused.take(CANDIDATES).collect();
            let (shared, complete) = self.shared((options, &set), batch, candidates.iter().map(|(index, _)| *index).collect(), &others, target)?;
            if !complete {
                return Ok(false);
            }
            Box::new(candidates.into_iter().filter(move |(index, _)| !shared.contains(index)).map(|(_, pending)| pending))
        };
        for pending in held_out.take(MAX_HELD_OUT) {
            if consume(pending?()?)?.is_break() {
                break;
            }
        }
        Ok(true)
    }

    /// Returns which of the `candidates` (positions of batches) share content with other sets, and
    /// whether all samples of these were compared.
    fn shared(
        &self,
        (options, set): (&Data, &DataSet),
        batch: usize,
        candidates: BTreeSet<usize>,
        others: &[&Data],
        target: Target,
    ) -> Result<(BTreeSet<usize>, bool)> {
        if others.iter().any(|other| includes(other, options)) {
            return Ok((candidates, true));
        }
        let mut hashes: HashMap<u64, Vec<usize>> = HashMap::new();
        let end = candidates.last().map_or(0, |last| last.saturating_add(1).saturating_mul(batch));
        for (sample, identity) in set.source.identities(batch, true)?.take(end).enumerate() {
            let position = sample.checked_div(batch).unwrap_or(sample);
            for hash in identity?.into_iter().filter(|_| candidates.contains(&position)) {
                hashes.entry(hash).or_default().push(position);
            }
        }
        let (mut shared, mut complete) = (BTreeSet::new(), true);
        for other in others {
            let limit = if other.has_texts() { SCANNED } else { usize::MAX };
            // A training draws from all samples of a mixture, whatever their number.
            let all = Data { samples: other.samples.filter(|_| other.mix.is_empty()), ..(*other).clone() };
            let other = self.open(&all, target)?;
            for (sample, identity) in other.source.identities(batch_of(&other, target), false)?.enumerate() {
                if shared.len() == candidates.len() {
                    return Ok((shared, true));
                }
                if sample == limit {
                    complete = false;
                    break;
                }
                shared.extend(identity?.iter().filter_map(|hash| hashes.get(hash)).flatten());
            }
        }
        Ok((shared, complete))
    }

    /// Compares the first samples of a set with another set; returns how many overlap, and how many were
    /// compared.
    pub fn overlap(&self, options: &Data, other: &Data, target: Target) -> Result<(usize, usize)> {
        let set = self.open(options, target)?;
        let batch = batch_of(&set, target);
        let count = set.source.identities(batch, false)?.take(COMPARED).count();
        let batches = (0..count.div_ceil(batch)).collect();
        let (shared, _) = self.shared((options, &set), batch, batches, &[other], target)?;
        Ok((shared.len().saturating_mul(batch).min(count), count))
    }
}

/// Whether a set reads every sample of another one: the same files in the same way, without a limit.
/// Labels and packing do not matter.
fn includes(set: &Data, other: &Data) -> bool {
    let inputs = |data: &Data| {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.canonicalize().unwrap_or_else(|_| path.clone()));
        let data = Data { task: None, label_column: None, label_kind: None, labels: None, loss_on: None, ..data.unpacked() };
        let [text, images, arrays] = [&data.text, &data.images, &data.arrays].map(path);
        Data { text, images, arrays, samples: None, sampling: None, batch_size: None, ..data }
    };
    set.samples.is_none() && inputs(set) == inputs(other)
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

impl Batch {
    /// Hash of the inputs, without padding.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> Result<String> {
        Ok(format!("{:016x}", identity(self)?))
    }
}

/// Hash of the model inputs of a sample, without padding.
pub(super) fn identity(sample: &Batch) -> Result<u64> {
    let mut hasher = blake3::Hasher::new();
    for (name, tensor) in &sample.inputs {
        let role = SequenceRole::from_input(name);
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let mask = sample.mask(role).filter(|mask| mask.dims() == tensor.dims()).map(values).transpose().map_err(shaped)?;
        hasher.update(name.as_bytes());
        let values = values(tensor).map_err(shaped)?.into_iter().enumerate();
        let kept = values.filter(|(at, _)| mask.as_ref().and_then(|mask| mask.get(*at)) != Some(&0.0));
        // In one piece, which is much faster than number by number.
        hasher.update(&kept.flat_map(|(_, value)| value.to_le_bytes()).collect::<Vec<u8>>());
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

/// Samples per batch: the model's fixed batch size, or one.
fn batch_of(set: &DataSet, target: Target) -> usize {
    if set.source.is_unbatched() { 1 } else { target.fixed_batch().unwrap_or(1).max(1) }
}

/// Whether a position is one of `count` positions spread evenly over `all`: `all * n / count` for some `n`.
fn is_spread(position: usize, all: usize, count: usize) -> bool {
    let number = position.saturating_mul(count).div_ceil(all.max(1));
    number < count && all.saturating_mul(number).checked_div(count) == Some(position)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_positions_match_their_definition() {
        for (all, count) in [(1, 1), (10, 9), (128, 116), (1000, 3), (7, 7), (7, 9)] {
            let spread: Vec<usize> = if count < all { (0..count).map(|n| all * n / count).collect() } else { (0..all).collect() };
            let found: Vec<usize> = (0..all).filter(|position| is_spread(*position, all, count.min(all))).collect();
            assert_eq!(found, spread, "{count} of {all}");
        }
    }

    /// Also if both sets come from one file, or from copies.
    #[test]
    fn samples_of_other_sets_are_not_held_out() {
        let folder = tempfile::tempdir().unwrap();
        let save_rows = |name: &str, rows: &[u32]| {
            let path = folder.path().join(name);
            let values: Vec<f32> = rows.iter().flat_map(|row| [*row as f32, 1.0]).collect();
            let tensor = Tensor::from_vec(values, (rows.len(), 2), &candle_core::Device::Cpu).unwrap();
            candle_core::safetensors::save(&[("x".to_owned(), tensor)].into(), &path).unwrap();
            Data { arrays: Some(path), ..Data::default() }
        };
        let save = |name: &str, rows: std::ops::Range<u32>| save_rows(name, &rows.collect::<Vec<_>>());
        let graph: crate::ir::Graph = "input x: float[batch, 2]\noutput y = x\n".parse().unwrap();
        let (inputs, outputs) = crate::ir::Port::from_graph(&graph);
        let (config, synthesized, sets) = (serde_json::Map::new(), crate::model::SynthesizedFiles::new(), DataSets::default());
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(folder.path(), &synthesized, &config) };
        let (all, copy) = (save("all.safetensors", 0..40), save("copy.safetensors", 10..20));
        let held_out_of = |set: &Data, used: usize, others: &[&Data]| {
            let mut found: Vec<u32> = Vec::new();
            let consume = |batch: Batch| {
                found.push(batch.inputs["x"].to_vec2::<f32>().unwrap()[0][0] as u32);
                Ok(ControlFlow::Continue(()))
            };
            sets.for_each_held_out(set, used, others, target, consume).unwrap();
            found
        };
        let (few, held_out) = (Data { samples: Some(5), ..all.clone() }, |used: usize, others: &[&Data]| held_out_of(&all, used, others));
        assert_eq!(held_out(5, &[]), (5..40).collect::<Vec<_>>());
        // `samples` limits what a pass reads, or else the set itself.
        assert_eq!(held_out_of(&few, 5, &[]), (5..40).collect::<Vec<_>>());
        assert_eq!(held_out_of(&few, 0, &[]), [0, 1, 2, 3, 4]);
        assert_eq!(held_out_of(&few, 0, &[&Data { samples: Some(3), ..all.clone() }]), [3, 4]);
        assert_eq!(held_out(5, &[&copy]), (5..10).chain(20..40).collect::<Vec<_>>());
        assert_eq!(held_out(5, &[&all]), [0u32; 0], "the other set is the same file");
        assert_eq!(held_out(5, &[&Data { samples: Some(30), ..all.clone() }, &copy]), (30..40).collect::<Vec<_>>());
        let mut rows: Vec<u32> = (100..100 + 2 * SCANNED as u32).collect();
        rows.extend(10..20);
        let late = save_rows("late.safetensors", &rows);
        assert_eq!(held_out(5, &[&late]), (5..10).chain(20..40).collect::<Vec<_>>(), "arrays are compared as a whole");
        // Recognized as the same file without reading it.
        let link = folder.path().join("link.safetensors");
        std::os::unix::fs::symlink(all.arrays.as_ref().unwrap(), &link).unwrap();
        assert!(includes(&Data { arrays: Some(link), label_column: Some("y".parse().unwrap()), ..Data::default() }, &all));
        assert!(!includes(&Data { samples: Some(39), ..all.clone() }, &all) && !includes(&copy, &all));
        assert_eq!(sets.overlap(&copy, &all, target).unwrap(), (10, 10));
        assert_eq!(sets.overlap(&all, &copy, target).unwrap(), (10, 40));
        assert_eq!(sets.overlap(&copy, &Data { samples: Some(10), ..all.clone() }, target).unwrap(), (0, 10));
    }

    /// A model with a fixed batch size runs complete batches only, whatever the number of samples.
    #[test]
    fn models_with_a_fixed_batch_size_get_complete_batches() {
        let folder = tempfile::tempdir().unwrap();
        let graph: crate::ir::Graph = "input x: float[4, 2]\noutput y = x\n".parse().unwrap();
        let (inputs, outputs) = crate::ir::Port::from_graph(&graph);
        let (config, synthesized, sets) = (serde_json::Map::new(), crate::model::SynthesizedFiles::new(), DataSets::default());
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(folder.path(), &synthesized, &config) };
        for count in [3usize, 4, 5, 17, 18, 20] {
            let path = folder.path().join(format!("{count}.safetensors"));
            let tensor = Tensor::zeros((count, 2), DType::F32, &candle_core::Device::Cpu).unwrap();
            candle_core::safetensors::save(&[("x".to_owned(), tensor)].into(), &path).unwrap();
            let data = Data { arrays: Some(path), task: Some(super::super::Task::Fidelity), ..Data::default() };
            let set = sets.open(&data, target).unwrap();
            assert_eq!(set.count().unwrap(), count / 4 * 4);
            let note = set.dropped_note().unwrap();
            assert_eq!(note.is_some_and(|note| note.contains("batches of 4")), count % 4 > 0, "{count}");
            let mut read = Vec::new();
            let all = set.for_each(|batch| {
                read.push(batch.samples);
                Ok(())
            });
            assert_eq!(read, vec![4; count / 4]);
            match all {
                Ok(()) => assert_eq!(set.first().unwrap().samples, 4),
                Err(e) => assert!(count < 4 && e.to_string().contains("contains 3 samples, but the model accepts only batches of 4"), "{e}"),
            }
            let error = set.for_each_in(Order { batch: Some(32), ..Order::default() }, |_| Ok(ControlFlow::Continue(()))).unwrap_err().to_string();
            assert!(error.contains("batch_size: the model accepts only batches of 4, not of 32"), "{error}");
            let few = sets.open(&Data { samples: Some(2), ..data.clone() }, target).unwrap().first().unwrap_err().to_string();
            assert!(few.contains("samples: the model accepts only batches of 4, but the limit is 2"), "{few}");
            let reserved = sets.reserve_held_out(&data, target).unwrap();
            let used = reserved.samples.unwrap_or(count);
            assert_eq!(reserved.samples.is_some(), count >= 12, "{count}");
            let mut held_out = Vec::new();
            let consume = |batch: Batch| {
                held_out.push(batch.samples);
                Ok(ControlFlow::Continue(()))
            };
            sets.for_each_held_out(&data, used, &[], target, consume).unwrap();
            assert_eq!(held_out, vec![4; (count / 4).saturating_sub(used.div_ceil(4))], "{count}");
        }
    }

    /// Comparing texts takes time: a text with too many samples is not compared, and then no sample
    /// counts as held out.
    #[test]
    fn no_samples_are_held_out_if_a_text_is_too_long_to_compare() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/evaluation/word-pieces.json");
        std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
        let save = |name: &str, lines: usize| {
            let path = folder.path().join(format!("{name}.txt"));
            // The tokenizer's vocabulary consists of the letters `a` to `q`.
            let word = |line: usize| line.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>();
            std::fs::write(&path, (0..lines).map(|line| format!("{name} {}\n", word(line))).collect::<String>()).unwrap();
            Data { text: Some(path), task: Some(super::super::Task::Fidelity), ..Data::default() }
        };
        let graph: crate::ir::Graph = "input input_ids: int[batch, sequence]\noutput y = input_ids\n".parse().unwrap();
        let (inputs, outputs) = crate::ir::Port::from_graph(&graph);
        let (config, synthesized, sets) = (serde_json::Map::new(), crate::model::SynthesizedFiles::new(), DataSets::default());
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(folder.path(), &synthesized, &config) };
        let set = save("k", 12);
        for (lines, compared) in [(SCANNED, true), (SCANNED + 1, false)] {
            let (mut found, other) = (0, save("l", lines));
            let consume = |_| {
                found += 1;
                Ok(ControlFlow::Continue(()))
            };
            assert_eq!(sets.for_each_held_out(&set, 2, &[&other], target, consume).unwrap(), compared);
            assert_eq!(found > 0, compared, "{lines}");
        }
    }

    /// Windows may overlap the used ones.
    #[test]
    fn held_out_windows_contain_no_text_that_a_pass_reads() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/evaluation/word-pieces.json");
        std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
        // Letters of a random number generator, because windows of a text that repeats itself are equal.
        let random = std::iter::successors(Some(48_271_u64), |x| Some(x * 48_271 % 2_147_483_647));
        let letters = random.take(400).flat_map(|x| [char::from(b'a' + (x % 17) as u8), ' ']);
        let path = folder.path().join("text.txt");
        std::fs::write(&path, letters.collect::<String>()).unwrap();
        let set = Data { text: Some(path), task: Some(super::super::Task::LanguageModelling), max_length: Some(64), stride: Some(8), ..Data::default() };
        let graph: crate::ir::Graph = "input input_ids: int[batch, sequence]\noutput y = input_ids\n".parse().unwrap();
        let (inputs, outputs) = crate::ir::Port::from_graph(&graph);
        let (config, synthesized, sets) = (serde_json::Map::new(), crate::model::SynthesizedFiles::new(), DataSets::default());
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(folder.path(), &synthesized, &config) };
        let tokens = |batch: &Batch| batch.inputs["input_ids"].flatten_all().unwrap().to_vec1::<i64>().unwrap();
        let (mut all, mut held_out) = (Vec::new(), Vec::new());
        let read = |batch: Batch| {
            all.push(tokens(&batch));
            Ok(())
        };
        sets.open(&Data { batch_size: Some(1), ..set.clone() }, target).unwrap().for_each(read).unwrap();
        let consume = |batch: Batch| {
            held_out.push(tokens(&batch));
            Ok(ControlFlow::Continue(()))
        };
        sets.for_each_held_out(&set, 5, &[], target, consume).unwrap();
        let used: BTreeSet<u64> = all[..5].iter().flat_map(|window| token_hashes(window, true)).collect();
        assert!(token_hashes(&all[5], true).iter().any(|hash| used.contains(hash)), "the next window overlaps the used ones");
        assert!(!held_out.is_empty() && held_out.len() < all.len() - 5, "{} of {}", held_out.len(), all.len());
        assert!(held_out.iter().all(|window| !token_hashes(window, true).iter().any(|hash| used.contains(hash))));
    }

    #[test]
    fn overlapping_windows_share_hashes() {
        let tokens: Vec<i64> = (0..500).map(|i| (i * i) % 8191).collect();
        let shared = |a: std::ops::Range<usize>, b: std::ops::Range<usize>| {
            let every = token_hashes(&tokens[a], true);
            token_hashes(&tokens[b], false).iter().any(|hash| every.contains(hash))
        };
        assert!(shared(0..128, 57..400) && shared(100..300, 0..190) && shared(3..20, 3..20));
        assert!(!shared(0..128, 128..256) && !shared(300..420, 0..300));
    }
}

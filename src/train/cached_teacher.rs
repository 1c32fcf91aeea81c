//! A teacher's answers out of its cache, and into it.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use super::Teacher;
use super::batches::{Batches, Cursor};
use super::cache::{self, Cache, Entries};
use super::losses::Logits;
use super::run::Trainer;
use super::state::Position;
use crate::data::Batch;
use crate::error::Result;
use crate::exec::BlockwiseOptions;
use crate::work::Work;

/// Bytes of samples that a teacher takes through its blocks together.
const TOGETHER: usize = 256 << 20;

/// Which answers of a teacher are wanted, and where they are kept.
pub(super) struct Answers<'a> {
    pub teacher: &'a Teacher,
    pub losses: &'a Logits,
}

impl Trainer<'_> {
    /// What is asked of the teacher, where its answers are kept.
    pub(super) fn answers(&self) -> Option<Answers<'_>> {
        Some(Answers { teacher: self.teacher?, losses: self.objective.over_logits()? })
    }

    /// Answers of a teacher that is read whenever it is used: for all samples of an epoch at once.
    pub(super) fn answer_ahead(&self, batches: &Batches, position: &Position) -> Result<usize> {
        let (Some(answers), Some(cache)) = (self.answers().filter(|answers| answers.teacher.is_streamed()), self.cache) else { return Ok(0) };
        let options = BlockwiseOptions { spill: self.around.folder.clone(), ..BlockwiseOptions::on(self.device) };
        answers.ahead(&mut cache.borrow_mut(), batches, (position.data, position.step), &options, &self.around.work)
    }
}

impl Answers<'_> {
    fn keys(&self, batch: &Batch) -> Result<(Vec<u128>, Vec<usize>)> {
        let places = self.losses.places(batch)?;
        let keys = cache::keys(batch, &places, self.losses.classes)?;
        Ok((keys, places.iter().map(Vec::len).collect()))
    }

    /// The answers to some samples, as they were given the first time: of those that are not known, the teacher is asked now.
    pub fn of(&self, cache: &mut Cache, batch: &Batch) -> Result<Entries> {
        let (keys, rows) = self.keys(batch)?;
        let mut from = 0;
        while let Some(begin) = (from..keys.len()).find(|at| !cache.knows(keys[*at])) {
            let end = (begin..keys.len()).find(|at| cache.knows(keys[*at])).unwrap_or(keys.len());
            let part = batch.narrow(begin, end - begin)?;
            let values = self.teacher.values(&part.inputs)?;
            self.keep(cache, (&keys[begin..end], &rows[begin..end]), &values, &part)?;
            from = end;
        }
        cache.get(&keys)
    }

    fn keep(&self, cache: &mut Cache, (keys, rows): (&[u128], &[usize]), values: &super::teacher::Values, batch: &Batch) -> Result<()> {
        let mut entries = Entries::new();
        self.losses.for_each_of_teacher((values, self.teacher.parameters()), batch, &mut |logits| {
            entries.extend(cache.largest(logits)?);
            Ok(())
        })?;
        cache.put(keys, rows, &entries)
    }

    /// Asks a teacher that is not in memory for all that an epoch from a place on does not know, block by block; gives the number of samples.
    ///
    /// # Errors
    /// Those of reading samples and of the teacher.
    pub fn ahead(&self, cache: &mut Cache, batches: &Batches, (at, step): (Cursor, u64), options: &BlockwiseOptions, work: &Work) -> Result<usize> {
        let (mut waiting, mut bytes, mut asked, mut count) = (Vec::new(), 0, BTreeSet::new(), 0);
        batches.for_each_step(at, step, |samples| {
            for batch in samples.batches {
                let (keys, rows) = self.keys(&batch)?;
                if keys.iter().all(|key| cache.knows(*key) || asked.contains(key)) {
                    continue;
                }
                count += keys.iter().filter(|key| !cache.knows(**key) && asked.insert(**key)).count();
                bytes += batch.inputs.values().map(|input| input.elem_count() * input.dtype().size_in_bytes()).sum::<usize>();
                waiting.push((batch, keys, rows));
                if bytes > TOGETHER {
                    self.ask(cache, std::mem::take(&mut waiting), options, work)?;
                    bytes = 0;
                }
            }
            Ok(if samples.next.epoch == at.epoch { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        self.ask(cache, waiting, options, work).map(|()| count)
    }

    /// Asks for batches with their keys and rows.
    fn ask(&self, cache: &mut Cache, waiting: Vec<(Batch, Vec<u128>, Vec<usize>)>, options: &BlockwiseOptions, work: &Work) -> Result<()> {
        let (batches, places): (Vec<Batch>, Vec<_>) = waiting.into_iter().map(|(batch, keys, rows)| (batch, (keys, rows))).unzip();
        let mut places = places.into_iter();
        self.teacher.block_by_block(batches, options, work, |batch, values| {
            let (keys, rows) = places.next().unwrap_or_default();
            self.keep(cache, (&keys, &rows), values, batch)
        })
    }
}

//! Teacher logits, read from the cache on disk or computed and added to it.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use super::Teacher;
use super::batches::{Batches, Cursor};
use super::cache::{self, Cache, Entries};
use super::losses::{Logits, LogitsSource};
use crate::data::Batch;
use crate::error::Result;
use crate::exec::BlockwiseOptions;
use crate::work::Work;

/// Input bytes after which the queued samples run through a streamed teacher.
const MAX_QUEUED_BYTES: usize = 256 << 20;

/// A batch with the cache keys of its samples and their numbers of logit rows.
type QueuedBatch = (Batch, Vec<u128>, Vec<usize>);

/// Batches that wait for a streamed teacher.
struct Queue {
    batches: Vec<QueuedBatch>,
    /// Bytes of their inputs.
    bytes: usize,
    /// Largest number of bytes that may wait for further batches.
    limit: usize,
}

impl Queue {
    fn new(limit: usize) -> Queue {
        Queue { batches: Vec::new(), bytes: 0, limit }
    }

    /// Adds a batch. Returns all batches, and empties the queue, if their inputs exceed the limit.
    fn push(&mut self, added: QueuedBatch) -> Option<Vec<QueuedBatch>> {
        self.bytes += added.0.inputs.values().map(|input| input.elem_count() * input.dtype().size_in_bytes()).sum::<usize>();
        self.batches.push(added);
        if self.bytes <= self.limit {
            return None;
        }
        self.bytes = 0;
        Some(std::mem::take(&mut self.batches))
    }
}

/// A teacher whose top logits are cached on disk, and the loss that reads them.
pub(super) struct CachedTeacher<'a> {
    /// `None` if the cache has all samples.
    pub teacher: Option<&'a Teacher>,
    pub losses: &'a Logits,
    /// Source of its logits.
    pub source: &'a LogitsSource,
}

impl CachedTeacher<'_> {
    /// Cache keys of the samples, and their numbers of logit rows.
    fn keys(&self, batch: &Batch) -> Result<(Vec<u128>, Vec<usize>)> {
        let positions = self.losses.positions(batch)?;
        let keys = cache::keys(batch, &positions, self.losses.classes)?;
        Ok((keys, positions.iter().map(Vec::len).collect()))
    }

    /// Returns the cached logits of the samples. Runs the teacher for samples that are not cached yet.
    pub fn entries(&self, cache: &mut Cache, batch: &Batch) -> Result<Entries> {
        let (keys, rows) = self.keys(batch)?;
        let mut from = 0;
        while let Some(begin) = (from..keys.len()).find(|at| !cache.contains(keys[*at])) {
            let end = (begin..keys.len()).find(|at| cache.contains(keys[*at])).unwrap_or(keys.len());
            // Without a teacher, the cache reports the sample.
            let Some(teacher) = self.teacher else { break };
            let part = batch.narrow(begin, end - begin)?;
            let values = teacher.values(&part.inputs)?;
            self.insert(cache, teacher, (&keys[begin..end], &rows[begin..end]), &values, &part)?;
            from = end;
        }
        cache.get(&keys)
    }

    /// Adds the teacher's logits for a batch to the cache.
    fn insert(&self, cache: &mut Cache, teacher: &Teacher, (keys, rows): (&[u128], &[usize]), values: &super::teacher::Values, batch: &Batch) -> Result<()> {
        let mut entries = Entries::default();
        self.losses.for_each_teacher_chunk((self.source, (values, teacher.parameters())), batch, &mut |logits| {
            entries.append(cache.top_logits(logits)?);
            Ok(())
        })?;
        cache.put(keys, rows, &entries)
    }

    /// Runs a streamed teacher block by block over all samples from a cursor to the end of its epoch
    /// that are not cached. Returns the number of samples added.
    pub fn fill(&self, cache: &mut Cache, batches: &Batches, (at, step): (Cursor, u64), options: &BlockwiseOptions, work: &Work) -> Result<usize> {
        let (mut queue, mut queued, mut count) = (Queue::new(MAX_QUEUED_BYTES), BTreeSet::new(), 0);
        let wait = |_: &Batch| work.cancel.check();
        batches.for_each_step(at, step, wait, |samples| {
            for batch in samples.batches {
                let (keys, rows) = self.keys(&batch)?;
                if keys.iter().all(|key| cache.contains(*key) || queued.contains(key)) {
                    continue;
                }
                count += keys.iter().filter(|key| !cache.contains(**key) && queued.insert(**key)).count();
                if let Some(full) = queue.push((batch, keys, rows)) {
                    self.run_teacher(cache, full, options, work)?;
                }
            }
            Ok(if samples.next.epoch == at.epoch { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        self.run_teacher(cache, queue.batches, options, work).map(|()| count)
    }

    /// Runs a streamed teacher over batches, each with its keys and row counts, and caches the logits.
    fn run_teacher(&self, cache: &mut Cache, queue: Vec<QueuedBatch>, options: &BlockwiseOptions, work: &Work) -> Result<()> {
        let (batches, targets): (Vec<Batch>, Vec<_>) = queue.into_iter().map(|(batch, keys, rows)| (batch, (keys, rows))).unzip();
        let mut targets = targets.into_iter();
        let Some(teacher) = self.teacher else { return Ok(()) };
        teacher.block_by_block(batches, options, work, |batch, values| {
            let (keys, rows) = targets.next().unwrap_or_default();
            self.insert(cache, teacher, (&keys, &rows), values, batch)
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::data::References;

    /// A batch with a number of token ids, of eight bytes each, and as many floats, of four.
    fn batch(tokens: usize) -> QueuedBatch {
        let input = |dtype| Tensor::zeros((1, tokens), dtype, &Device::Cpu).unwrap();
        let inputs = [("input_ids".to_owned(), input(DType::I64)), ("weights".to_owned(), input(DType::F32))];
        (Batch { inputs: inputs.into(), references: References::None, samples: 1 }, vec![tokens as u128], vec![tokens])
    }

    #[test]
    fn inputs_that_wait_for_a_streamed_teacher_are_bounded() {
        let mut queue = Queue::new(120);
        for _ in 0..3 {
            // Two batches are as large as the limit.
            assert!(queue.push(batch(5)).is_none() && queue.push(batch(5)).is_none());
            assert_eq!((queue.batches.len(), queue.bytes), (2, 120));
            let full = queue.push(batch(1)).unwrap();
            assert_eq!(full.iter().map(|(_, keys, _)| keys[0]).collect::<Vec<_>>(), [5, 5, 1]);
            assert_eq!((queue.batches.len(), queue.bytes), (0, 0));
        }
        // A single batch may be larger.
        assert_eq!(queue.push(batch(11)).unwrap().len(), 1);
    }
}

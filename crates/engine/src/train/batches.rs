//! The assignment of samples to training steps, across epochs and processes.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Training;
use crate::data::{Batch, DataSet, LargestInputs, Order};
use crate::error::Result;
use crate::exec::bytes_of;
use crate::work::Work;

/// Position in the data of this process, between two batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Completed passes over the data.
    pub epoch: u64,
    /// Batches consumed in the current epoch.
    pub batches: usize,
}

/// Samples of one step.
pub struct Samples {
    /// The batches, in order.
    pub batches: Vec<Batch>,
    /// Position after the last batch.
    pub next: Cursor,
    /// Time spent waiting for the batches.
    pub waited: Duration,
}

/// All batches of a training. Every process has the same number of batches per epoch.
pub struct Batches<'d> {
    data: &'d DataSet,
    order: Order,
    seed: u64,
    /// Batches of one step (gradient accumulation).
    batches_per_step: usize,
    /// Batches of this process per epoch and in total; `None` if the length is given in steps.
    batch_counts: Option<(u64, u64)>,
    steps: u64,
}

impl<'d> Batches<'d> {
    /// Batches of `size` samples for process `part.0` of `part.1`.
    pub fn new(data: &'d DataSet, size: usize, options: &Training, seed: u64, part: (usize, usize)) -> Result<Batches<'d>> {
        let order = Order { batch: Some(size), part, drop_single: true, ..Order::default() };
        let batches_per_step = options.gradient_accumulation;
        let (batch_counts, steps) = match options.max_steps {
            Some(steps) => (None, steps),
            None => {
                let epoch = data.batches(order)? as u64;
                let all = epoch.saturating_mul(options.epochs.unwrap_or(1));
                // At least one step, even without data: reading its first batch then reports the cause.
                (Some((epoch, all)), all.div_ceil(batches_per_step.max(1) as u64).max(1))
            }
        };
        Ok(Batches { data, order, seed, batches_per_step, batch_counts, steps })
    }

    /// Number of steps of the training.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether fewer than `gradient_accumulation` batches belonged to the last of `step` steps, which ended
    /// at the cursor.
    pub fn ends_within_a_step(&self, at: Cursor, step: u64) -> Result<bool> {
        if self.batches_per_step <= 1 {
            return Ok(false);
        }
        let epoch = self.data.batches(self.order)? as u64;
        Ok(at.epoch.saturating_mul(epoch).saturating_add(at.batches as u64) < step.saturating_mul(self.batches_per_step as u64))
    }

    /// Passes the samples of each step after `step`, from the cursor `at` on, to `consume` until it breaks.
    /// Calls `wait` with each batch that waits for further batches of its step. Fails if there are fewer
    /// batches than processes.
    pub fn for_each_step(
        &self,
        mut at: Cursor,
        mut step: u64,
        mut wait: impl FnMut(&Batch) -> Result<()>,
        mut consume: impl FnMut(Samples) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let (mut batches, mut waited, mut wait_start) = (Vec::new(), Duration::ZERO, Instant::now());
        while step < self.steps {
            let mut is_done = false;
            self.data.for_each_in(Order { shuffle: Some(shuffle(self.seed, at.epoch)), skip: at.batches, ..self.order }, |batch| {
                waited += wait_start.elapsed();
                at.batches += 1;
                let last = self.batch_counts.is_some_and(|(epoch, all)| at.epoch * epoch + at.batches as u64 >= all);
                let is_complete = batches.len() + 1 == self.batches_per_step || last;
                if !is_complete {
                    wait(&batch)?;
                }
                batches.push(batch);
                if is_complete {
                    step += 1;
                    let samples = Samples { batches: std::mem::take(&mut batches), next: at, waited: std::mem::take(&mut waited) };
                    is_done = consume(samples)?.is_break() || step >= self.steps;
                }
                wait_start = Instant::now();
                Ok(if is_done { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            })?;
            if is_done {
                break;
            }
            at = Cursor { epoch: at.epoch + 1, batches: 0 };
        }
        Ok(())
    }
}

/// Bytes of the inputs of a batch.
pub fn input_bytes(batch: &Batch) -> u64 {
    batch.inputs.values().map(bytes_of).sum()
}

/// Seed of the order of an epoch.
fn shuffle(seed: u64, epoch: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(epoch)
}

/// The largest inputs of a training with batches of `size` samples in each of `processes` processes: those of
/// its first epoch.
pub fn largest_inputs(data: &DataSet, size: usize, options: &Training, (seed, processes): (u64, usize), work: &Work) -> Result<LargestInputs> {
    let each = options.gradient_accumulation.saturating_mul(processes);
    let count = options.max_steps.map_or(usize::MAX, |steps| usize::try_from(steps).unwrap_or(usize::MAX).saturating_mul(each));
    // The order matters only if the training can end within the epoch.
    let shuffle = options.max_steps.map(|_| shuffle(seed, 0));
    data.largest_inputs(Order { batch: Some(size), shuffle, ..Order::default() }, count, work)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Data, Target};
    use crate::exec::transfer;
    use crate::ir::{Element, Port};

    /// A data set whose samples consist of their index.
    fn numbered(count: usize) -> (tempfile::TempDir, DataSet) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("numbers.safetensors");
        let numbers = candle_core::Tensor::from_vec((0..count as u32).collect(), (count, 1), &candle_core::Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("number".to_owned(), numbers)].into(), &path).unwrap();
        let inputs = [Port { name: "number".into(), element: Element::Int, shape: vec![None, Some(1)], number: None }];
        let (synthesized, config) = Default::default();
        let target = Target { inputs: &inputs, ..Target::new(folder.path(), &synthesized, &config) };
        let data = DataSet::open(&Data { arrays: Some(path), ..Data::default() }, target).unwrap();
        (folder, data)
    }

    /// Position after every step, with the indices of its samples.
    fn steps(count: usize, size: usize, options: &Training, part: (usize, usize), from: (Cursor, u64)) -> Vec<(Cursor, Vec<i64>)> {
        let (_folder, data) = numbered(count);
        let batches = Batches::new(&data, size, options, 3, part).unwrap();
        let mut found = Vec::new();
        let read = |batch: &Batch| transfer::read::<i64>(&batch.inputs["number"]).unwrap();
        let consume = |samples: Samples| {
            found.push((samples.next, samples.batches.iter().flat_map(read).collect()));
            Ok(ControlFlow::Continue(()))
        };
        batches.for_each_step(from.0, from.1, |_| Ok(()), consume).unwrap();
        assert_eq!(found.len() as u64 + from.1, batches.steps());
        found
    }

    fn epochs(epochs: u64, gradient_accumulation: usize) -> Training {
        Training { epochs: Some(epochs), gradient_accumulation, ..Training::default() }
    }

    #[test]
    fn an_epoch_visits_every_sample_once() {
        for (count, size, accumulation, expected) in [(10, 8, 1, 2), (65, 16, 1, 4), (65, 16, 3, 2), (1, 16, 1, 1), (12, 1, 5, 3), (48, 16, 2, 2)] {
            let all = steps(count, size, &epochs(1, accumulation), (0, 1), Default::default());
            assert_eq!(all.len(), expected, "{count} samples, batches of {size}, {accumulation} per step");
            let mut numbers: Vec<i64> = all.iter().flat_map(|(_, numbers)| numbers.clone()).collect();
            numbers.sort_unstable();
            numbers.dedup();
            // A last batch of a single sample is dropped.
            let single = count > 1 && size > 1 && count % size == 1;
            assert_eq!(numbers.len(), count - usize::from(single));
            assert!(all.iter().all(|(next, _)| next.epoch == 0));
        }
    }

    #[test]
    fn batches_wait_for_the_others_of_their_step() {
        let (_folder, data) = numbered(14);
        let batches = Batches::new(&data, 2, &epochs(1, 3), 3, (0, 1)).unwrap();
        let (waiting, mut found) = (std::cell::Cell::new(0), Vec::new());
        let wait = |batch: &Batch| {
            waiting.set(waiting.get() + input_bytes(batch));
            Ok(())
        };
        let consume = |samples: Samples| {
            found.push((waiting.take(), samples.batches.iter().map(input_bytes).sum::<u64>()));
            Ok(ControlFlow::Continue(()))
        };
        batches.for_each_step(Cursor::default(), 0, wait, consume).unwrap();
        let bytes = found[2].1;
        assert_eq!(found, [(2 * bytes, 3 * bytes), (2 * bytes, 3 * bytes), (0, bytes)]);
        let stop = |_: &Batch| Err(crate::error::Error::Cancelled);
        let error = batches.for_each_step(Cursor::default(), 0, stop, |_| panic!("no step is complete")).unwrap_err();
        assert!(matches!(error, crate::error::Error::Cancelled), "{error}");
    }

    #[test]
    fn a_run_resumes_after_every_step() {
        for options in [epochs(3, 1), epochs(3, 3), Training { max_steps: Some(11), epochs: None, ..epochs(1, 2) }] {
            for (count, size, part) in [(65, 16, (0, 1)), (81, 16, (1, 2)), (9, 2, (2, 3))] {
                let whole = steps(count, size, &options, part, Default::default());
                for done in 1..whole.len() {
                    let rest = steps(count, size, &options, part, (whole[done - 1].0, done as u64));
                    assert_eq!(rest, whole[done..], "{count} samples, batches of {size}, {part:?}, after step {done}");
                }
            }
        }
    }

    #[test]
    fn processes_read_disjoint_samples_of_the_same_epoch() {
        for (count, size, processes) in [(81, 16, 2), (65, 16, 2), (100, 7, 3)] {
            let all: Vec<_> = (0..processes).map(|rank| steps(count, size, &epochs(3, 1), (rank, processes), Default::default())).collect();
            for step in 0..all[0].len() {
                let cursors: Vec<Cursor> = all.iter().map(|own| own[step].0).collect();
                assert!(cursors.iter().all(|cursor| *cursor == cursors[0]), "{cursors:?}");
                let mut numbers: Vec<i64> = all.iter().flat_map(|own| own[step].1.clone()).collect();
                let count = numbers.len();
                numbers.sort_unstable();
                numbers.dedup();
                assert_eq!(numbers.len(), count);
            }
        }
    }

    #[test]
    fn too_few_batches_are_rejected() {
        for (count, processes, expected) in [(0, 1, "no samples"), (16, 2, "fewer batches"), (0, 2, "fewer batches")] {
            let (_folder, data) = numbered(count);
            let batches = Batches::new(&data, 16, &epochs(1, 1), 3, (0, processes)).unwrap();
            let error = batches.for_each_step(Cursor::default(), 0, |_| Ok(()), |_| Ok(ControlFlow::Continue(()))).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! The schedule of batches: which samples make which step, in this process beside all others.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Training;
use crate::data::{Batch, DataSet, Order};
use crate::error::Result;

/// A place between two batches of this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Times that the data has been gone through.
    pub epoch: u64,
    /// Batches of this time that are done.
    pub batches: usize,
}

/// Samples of one step.
pub struct Samples {
    /// In order.
    pub batches: Vec<Batch>,
    /// Behind the last of them.
    pub next: Cursor,
    /// How long they were waited for.
    pub waited: Duration,
}

/// All batches of a training. Every process has equally many, in the same epochs.
pub struct Batches<'d> {
    data: &'d DataSet,
    order: Order,
    seed: u64,
    /// Batches of a step.
    together: usize,
    /// Batches of this process in an epoch and in all, where epochs are counted.
    counted: Option<(u64, u64)>,
    steps: u64,
}

impl<'d> Batches<'d> {
    /// Batches of `size` samples; of so many processes (second), those of this one (first).
    ///
    /// # Errors
    /// Samples cannot be counted.
    pub fn new(data: &'d DataSet, size: usize, options: &Training, seed: u64, part: (usize, usize)) -> Result<Batches<'d>> {
        let order = Order { batch: Some(size), part, drop_single: true, ..Order::default() };
        let together = options.gradient_accumulation;
        let (counted, steps) = match options.max_steps {
            Some(steps) => (None, steps),
            None => {
                let epoch = data.batches(order)? as u64;
                let all = epoch.saturating_mul(options.epochs.unwrap_or(1));
                // One that cannot be made, where there is no batch: reading says why.
                (Some((epoch, all)), all.div_ceil(together.max(1) as u64).max(1))
            }
        };
        Ok(Batches { data, order, seed, together, counted, steps })
    }

    /// How many steps there are.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Hands over the samples of all steps behind so many, from a place on, until `consume` has enough.
    ///
    /// # Errors
    /// Those of reading and of `consume`; there are no samples, or too few for all processes.
    pub fn for_each_step(&self, mut at: Cursor, mut step: u64, mut consume: impl FnMut(Samples) -> Result<ControlFlow<()>>) -> Result<()> {
        let (mut batches, mut waited, mut asked) = (Vec::new(), Duration::ZERO, Instant::now());
        while step < self.steps {
            let mut enough = false;
            let shuffle = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at.epoch);
            self.data.for_each_in(Order { shuffle: Some(shuffle), skip: at.batches, ..self.order }, |batch| {
                waited += asked.elapsed();
                batches.push(batch);
                at.batches += 1;
                let last = self.counted.is_some_and(|(epoch, all)| at.epoch * epoch + at.batches as u64 >= all);
                if batches.len() == self.together || last {
                    step += 1;
                    let samples = Samples { batches: std::mem::take(&mut batches), next: at, waited: std::mem::take(&mut waited) };
                    enough = consume(samples)?.is_break() || step >= self.steps;
                }
                asked = Instant::now();
                Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            })?;
            if enough {
                break;
            }
            at = Cursor { epoch: at.epoch + 1, batches: 0 };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Data, Target};
    use crate::exec::transfer;
    use crate::ir::{Element, Port};

    /// Samples that are nothing but their numbers.
    fn numbered(count: usize) -> (tempfile::TempDir, DataSet) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("numbers.safetensors");
        let numbers = candle_core::Tensor::from_vec((0..count as u32).collect(), (count, 1), &candle_core::Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("number".to_owned(), numbers)].into(), &path).unwrap();
        let inputs = [Port { name: "number".into(), element: Element::Int, shape: vec![None, Some(1)], number: None }];
        let target = Target { folder: folder.path(), made: &crate::model::Made::new(), config: &serde_json::Map::new(), inputs: &inputs, outputs: &[] };
        let data = DataSet::open(&Data { arrays: Some(path), ..Data::default() }, target).unwrap();
        (folder, data)
    }

    /// Epoch and sample numbers of every step, with the place behind it.
    fn steps(count: usize, size: usize, options: &Training, part: (usize, usize), from: (Cursor, u64)) -> Vec<(Cursor, Vec<i64>)> {
        let (_folder, data) = numbered(count);
        let batches = Batches::new(&data, size, options, 3, part).unwrap();
        let mut seen = Vec::new();
        let read = |batch: &Batch| transfer::read::<i64>(&batch.inputs["number"]).unwrap();
        let consume = |samples: Samples| {
            seen.push((samples.next, samples.batches.iter().flat_map(read).collect()));
            Ok(ControlFlow::Continue(()))
        };
        batches.for_each_step(from.0, from.1, consume).unwrap();
        assert_eq!(seen.len() as u64 + from.1, batches.steps());
        seen
    }

    fn epochs(epochs: u64, together: usize) -> Training {
        Training { epochs: Some(epochs), gradient_accumulation: together, ..Training::default() }
    }

    #[test]
    fn an_epoch_is_every_sample_once() {
        for (count, size, together, expected) in [(10, 8, 1, 2), (65, 16, 1, 4), (65, 16, 3, 2), (1, 16, 1, 1), (12, 1, 5, 3), (48, 16, 2, 2)] {
            let all = steps(count, size, &epochs(1, together), (0, 1), Default::default());
            assert_eq!(all.len(), expected, "{count} samples, {size} at a time, {together} together");
            let mut numbers: Vec<i64> = all.iter().flat_map(|(_, numbers)| numbers.clone()).collect();
            numbers.sort_unstable();
            numbers.dedup();
            // A single sample behind whole batches is left out.
            let single = count > 1 && size > 1 && count % size == 1;
            assert_eq!(numbers.len(), count - usize::from(single));
            assert!(all.iter().all(|(next, _)| next.epoch == 0));
        }
    }

    #[test]
    fn a_run_goes_on_from_every_step() {
        for options in [epochs(3, 1), epochs(3, 3), Training { max_steps: Some(11), epochs: None, ..epochs(1, 2) }] {
            for (count, size, part) in [(65, 16, (0, 1)), (81, 16, (1, 2)), (9, 2, (2, 3))] {
                let whole = steps(count, size, &options, part, Default::default());
                for done in 1..whole.len() {
                    let rest = steps(count, size, &options, part, (whole[done - 1].0, done as u64));
                    assert_eq!(rest, whole[done..], "{count} samples, {size} at a time, {part:?}, behind step {done}");
                }
            }
        }
    }

    #[test]
    fn processes_take_other_samples_in_the_same_epochs() {
        for (count, size, processes) in [(81, 16, 2), (65, 16, 2), (100, 7, 3)] {
            let all: Vec<_> = (0..processes).map(|rank| steps(count, size, &epochs(3, 1), (rank, processes), Default::default())).collect();
            for step in 0..all[0].len() {
                let places: Vec<Cursor> = all.iter().map(|own| own[step].0).collect();
                assert!(places.iter().all(|place| *place == places[0]), "{places:?}");
                let mut numbers: Vec<i64> = all.iter().flat_map(|own| own[step].1.clone()).collect();
                let count = numbers.len();
                numbers.sort_unstable();
                numbers.dedup();
                assert_eq!(numbers.len(), count);
            }
        }
    }

    #[test]
    fn what_cannot_be_shared_out_is_refused() {
        for (count, processes, said) in [(0, 1, "no samples"), (16, 2, "fewer batches"), (0, 2, "fewer batches")] {
            let (_folder, data) = numbered(count);
            let batches = Batches::new(&data, 16, &epochs(1, 1), 3, (0, processes)).unwrap();
            let error = batches.for_each_step(Cursor::default(), 0, |_| Ok(ControlFlow::Continue(()))).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}

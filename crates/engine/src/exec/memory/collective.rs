//! Collectives of processes on flat tensors, of which each rank has a part.

use std::fmt;
use std::ops::Range;
use std::sync::mpsc::Receiver;

use candle_core::Tensor;

use crate::error::{Error, Result};

/// Elements of a flat tensor, and the rank that they belong to.
pub type Segment = (usize, Range<usize>);

/// Result of a collective that runs in the background.
#[derive(Debug)]
pub struct Pending<T>(Receiver<Result<T>>);

impl<T> Pending<T> {
    /// The result that will be sent on a channel.
    pub fn new(result: Receiver<Result<T>>) -> Pending<T> {
        Pending(result)
    }

    /// Waits for the result.
    pub fn wait(self) -> Result<T> {
        self.0.recv().map_err(|_| Error::run("the exchange between processes", "has ended", "check the last output of the other processes"))?
    }
}

/// Collective operations of processes, which all ranks start in the same order. They run in that order.
pub trait Collective: Send + Sync + fmt::Debug {
    /// The rank of this process.
    fn rank(&self) -> usize;

    /// The number of processes.
    fn size(&self) -> usize;

    /// The sum of the f32 tensors of all ranks (all-reduce).
    fn sum(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Starts a reduce-scatter: the sum of the flat f32 tensors of all ranks, of which this rank receives
    /// its own segments, concatenated. The segments cover the tensor in order, without gaps.
    fn start_reduce_scatter(&self, tensor: &Tensor, segments: Vec<Segment>) -> Pending<Tensor>;

    /// Starts an all-gather: a flat f32 tensor with the segments of all ranks. Of `tensor`, only the own
    /// segments are read.
    fn start_all_gather(&self, tensor: &Tensor, segments: Vec<Segment>) -> Pending<Tensor>;
}

/// Concatenates the segments of a flat tensor that belong to a rank.
pub fn segments_of(rank: usize, tensor: &Tensor, segments: &[Segment]) -> candle_core::Result<Tensor> {
    let own = segments.iter().filter(|(owner, _)| *owner == rank);
    let parts = own.map(|(_, range)| tensor.narrow(0, range.start, range.len())).collect::<candle_core::Result<Vec<_>>>()?;
    if parts.is_empty() { tensor.narrow(0, 0, 0)?.copy() } else { Tensor::cat(&parts, 0) }
}

/// Splits `elements` into one range for each rank, in rank order, such that the loads become as equal as
/// possible, and adds them to the loads. Ranges consist of whole units, except for the last elements.
pub fn split_evenly(loads: &mut [u64], elements: usize, unit: usize, unit_bytes: u64) -> Vec<Range<usize>> {
    let (unit, cost) = (unit.max(1), unit_bytes.max(1));
    let units = elements.div_ceil(unit) as u64;
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|rank| loads[*rank]);
    // The ranks with the least loads are filled to a common level.
    let (mut level, mut sum) = (0, 0);
    for (count, rank) in order.into_iter().enumerate() {
        if count > 0 && loads[rank] >= level {
            break;
        }
        sum += loads[rank];
        level = (sum + units * cost) / (count as u64 + 1);
    }
    let mut counts: Vec<u64> = loads.iter().map(|load| level.saturating_sub(*load) / cost).collect();
    for _ in counts.iter().sum::<u64>()..units {
        let least = (0..counts.len()).min_by_key(|rank| loads[*rank] + cost * counts[*rank]);
        counts[least.unwrap_or(0)] += 1;
    }
    let mut start = 0;
    let range = |(load, count): (&mut u64, u64)| {
        *load += cost * count;
        let range = start..elements.min(start + unit * count as usize);
        start = range.end;
        range
    };
    loads.iter_mut().zip(counts).map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads differ by at most one unit of the last tensor that was split, as long as tensors are divisible.
    #[test]
    fn loads_are_balanced_within_tensors() {
        for ranks in 1..8 {
            let (mut loads, mut total, mut largest) = (vec![0; ranks], 0, 0);
            for (elements, unit, bytes) in [(49_152 * 576, 1, 8), (7, 1, 8), (576, 256, 520), (0, 1, 8), (1, 1, 8), (100_001, 256, 520), (40, 1, 8)] {
                let ranges = split_evenly(&mut loads, elements, unit, bytes);
                assert_eq!((ranges.len(), ranges[0].start, ranges[ranks - 1].end), (ranks, 0, elements));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
                assert!(ranges.iter().all(|range| range.end == elements || range.end.is_multiple_of(unit)), "{ranges:?}");
                (total, largest) = (total + elements.div_ceil(unit) as u64 * bytes, largest.max(bytes));
                assert_eq!(loads.iter().sum::<u64>(), total);
                assert!(loads.iter().all(|load| *load <= total.div_ceil(ranks as u64) + largest), "{loads:?}");
            }
        }
    }

    #[test]
    fn indivisible_tensors_belong_to_one_rank() {
        let mut loads = vec![5, 1, 3];
        assert_eq!(split_evenly(&mut loads, 10, 10, 40), [0..0, 0..10, 10..10]);
        assert_eq!(loads, [5, 41, 3]);
        // The remaining elements go to the other ranks.
        assert_eq!(split_evenly(&mut loads, 10, 1, 4), [0..5, 5..5, 5..10]);
    }
}

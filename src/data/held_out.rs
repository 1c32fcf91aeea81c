//! Samples of a data set that a pass which reads it leaves alone, to measure on.

use std::ops::ControlFlow;

use super::{Batch, Data, DataSet, DataSets, Order, Pending, Target};
use crate::error::Result;

/// One of so many samples is kept from passes that would use all of them.
const PART: usize = 10;
/// Samples that are kept at most.
const MOST: usize = 64;

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

    /// Hands over samples of a set one by one that are not among the `used` that a pass takes of it, at most 64, until `consume` has
    /// enough.
    ///
    /// # Errors
    /// The data cannot be read, does not fit the model, or `consume` fails.
    pub fn for_each_beyond(&self, options: &Data, used: usize, target: Target, mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<()> {
        let set = self.open(&Data { samples: None, ..options.clone() }, target)?;
        let batch = batch_of(&set, target);
        let folder = options.images.as_ref().is_some_and(|path| path.is_dir());
        // Batches of neighbours hold samples that are used: those that are used lie all over a folder.
        if folder && batch > 1 {
            return Ok(());
        }
        let used = used.div_ceil(batch);
        let works = set.source.works(Order { batch: Some(batch), shuffle: None, skip: 0, part: (0, 1), drop_single: false })?.enumerate();
        // Of a folder, `samples` are spread over all classes; of anything else they are the first.
        let left: Box<dyn Iterator<Item = Result<Pending>>> = if let (true, Some(all)) = (folder, set.samples()) {
            let mut left: Vec<_> = works.filter(|(index, _)| !is_spread(*index, all, used)).collect();
            left.sort_by_key(|(index, _)| index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            Box::new(left.into_iter().map(|(_, pending)| pending))
        } else {
            Box::new(works.skip(used).map(|(_, pending)| pending))
        };
        for pending in left.take(MOST) {
            if consume(pending?()?)?.is_break() {
                break;
            }
        }
        Ok(())
    }
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
}

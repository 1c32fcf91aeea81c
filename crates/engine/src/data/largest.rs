//! The largest inputs of the batches of a data set, from which memory is predicted.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::{Batch, DataSet, Order};
use crate::error::Result;
use crate::work::Work;

/// How the sizes of inputs differ between batches, apart from an incomplete last batch.
pub(super) enum BatchSizes {
    /// All batches have the sizes of the first one.
    Equal,
    /// Each batch has its own sizes, such as the length of its longest text.
    Varying {
        /// The number of tokens that no text exceeds, if it is known.
        tokens: Option<usize>,
    },
}

/// The largest size of each axis of the inputs in several batches.
#[derive(Debug, Default)]
pub struct LargestInputs {
    /// Sizes by the name of the input.
    pub shapes: BTreeMap<String, Vec<usize>>,
}

impl LargestInputs {
    fn add(&mut self, batch: &Batch) {
        for (name, tensor) in &batch.inputs {
            match self.shapes.get_mut(name).filter(|shape| shape.len() == tensor.rank()) {
                Some(shape) => shape.iter_mut().zip(tensor.dims()).for_each(|(most, size)| *most = (*most).max(*size)),
                None => _ = self.shapes.insert(name.clone(), tensor.dims().to_vec()),
            }
        }
    }
}

impl DataSet {
    /// The largest inputs of the first `count` batches in an order. Reads and tokenizes these batches, until
    /// one has the maximum length; if all batches have equal sizes, reads only the first one.
    pub fn largest_inputs(&self, order: Order, count: usize, work: &Work) -> Result<LargestInputs> {
        let mut largest = LargestInputs::default();
        let BatchSizes::Varying { tokens } = self.source.batch_sizes() else {
            let first = self.first()?;
            largest.add(&first);
            let samples = order.batch.map(|size| size.min(self.samples().unwrap_or(size)));
            let rows = largest.shapes.values_mut().filter_map(|shape| shape.first_mut()).filter(|rows| **rows == first.samples);
            rows.for_each(|rows| *rows = samples.unwrap_or(*rows));
            return Ok(largest);
        };
        let (mut read, mut is_longest) = (0usize, false);
        self.for_each_in(order, |batch| {
            work.cancel.check()?;
            read = read.saturating_add(1);
            is_longest |= tokens.is_some() && batch.token_count() == tokens;
            largest.add(&batch);
            Ok(if is_longest || read >= count { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(largest)
    }
}

//! Order and batching of samples.

use crate::error::Result;

/// Size of the shuffle buffer, in bytes: large data sets are shuffled within a moving window.
const BUFFER_BYTES: usize = 64 << 20;
/// Maximum number of samples in the shuffle buffer.
const BUFFER_SAMPLES: usize = 1 << 18;

/// Order and batching of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// Batch size, overriding that of the data options.
    pub batch: Option<usize>,
    /// Seed of the shuffle; `None` for the order of the files.
    pub shuffle: Option<u64>,
    /// Number of batches of this process to skip at the beginning.
    pub skip: usize,
    /// Rank and number of processes: batches are distributed round-robin, and every process gets the
    /// same number.
    pub part: (usize, usize),
    /// Whether to drop a last batch of a single sample, whose batch statistics are undefined.
    pub drop_single: bool,
    /// Whether to drop an incomplete last batch, because the model accepts only one batch size.
    pub drop_incomplete: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { batch: None, shuffle: None, skip: 0, part: (0, 1), drop_single: false, drop_incomplete: false }
    }
}

impl Order {
    /// Whether `items` items after `batches` full batches of `size` form a batch.
    pub(super) fn accepts(self, items: usize, batches: usize, size: usize) -> bool {
        items > 0 && !(self.drop_single && items == 1 && size > 1 && batches > 0) && !(self.drop_incomplete && items < size)
    }

    /// The items in this order; `bytes` is the approximate memory per item.
    pub(super) fn shuffled<'s, T: Send + 's>(
        self,
        items: impl Iterator<Item = Result<T>> + Send + 's,
        bytes: usize,
    ) -> Box<dyn Iterator<Item = Result<T>> + Send + 's> {
        let Some(seed) = self.shuffle else { return Box::new(items) };
        let size = BUFFER_BYTES.checked_div(bytes).map_or(BUFFER_SAMPLES, |count| count.clamp(2, BUFFER_SAMPLES));
        Box::new(Shuffled { items, buffer: Vec::new(), size, random: fastrand::Rng::with_seed(seed), is_exhausted: false })
    }
}

/// Shuffle buffer: returns a random item of the buffer, and replaces it by the next one.
struct Shuffled<I, T> {
    items: I,
    buffer: Vec<T>,
    size: usize,
    random: fastrand::Rng,
    is_exhausted: bool,
}

impl<T, I: Iterator<Item = Result<T>>> Iterator for Shuffled<I, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.is_exhausted && self.buffer.len() < self.size {
            match self.items.next() {
                Some(Ok(item)) => self.buffer.push(item),
                Some(Err(e)) => return Some(Err(e)),
                None => self.is_exhausted = true,
            }
        }
        (!self.buffer.is_empty()).then(|| Ok(self.buffer.swap_remove(self.random.usize(..self.buffer.len()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(seed: u64, bytes: usize) -> Vec<usize> {
        let order = Order { shuffle: Some(seed), ..Order::default() };
        order.shuffled((0..1000).map(Ok), bytes).map(Result::unwrap).collect()
    }

    #[test]
    fn shuffling_is_a_permutation_that_depends_on_the_seed() {
        for bytes in [1, BUFFER_BYTES / 50, BUFFER_BYTES] {
            let mut found = order(3, bytes);
            assert_eq!(found, order(3, bytes));
            assert_ne!(found, order(4, bytes));
            assert_ne!(found, (0..1000).collect::<Vec<_>>());
            found.sort_unstable();
            assert_eq!(found, (0..1000).collect::<Vec<_>>());
        }
    }
}

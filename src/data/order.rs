//! In which order samples are taken.

use crate::error::Result;

/// Bytes of samples that are shuffled among each other: all of a small data set, a moving window of a large one.
const WINDOW: usize = 64 << 20;
/// And at most so many samples.
const MOST: usize = 1 << 18;

/// In which order samples are taken, and how many together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// Samples that run together, where the options of the data do not count.
    pub batch: Option<usize>,
    /// Start of the random order; without one, that of the files.
    pub shuffle: Option<u64>,
    /// Batches of this process at the beginning that are left out.
    pub skip: usize,
    /// Of so many processes (second), the batches of this one (first): each takes one in turn, and all take equally many.
    pub part: (usize, usize),
    /// Whether a last batch of one sample is left out behind others: it has no statistics of its own.
    pub drop_single: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { batch: None, shuffle: None, skip: 0, part: (0, 1), drop_single: false }
    }
}

impl Order {
    /// Whether so many items, behind as many whole batches of `size`, are a batch.
    pub(super) fn takes(self, items: usize, batches: usize, size: usize) -> bool {
        items > 0 && !(self.drop_single && items == 1 && size > 1 && batches > 0)
    }

    /// The items in this order; `bytes` is about what one takes.
    pub(super) fn shuffled<'s, T: Send + 's>(
        self,
        items: impl Iterator<Item = Result<T>> + Send + 's,
        bytes: usize,
    ) -> Box<dyn Iterator<Item = Result<T>> + Send + 's> {
        let Some(seed) = self.shuffle else { return Box::new(items) };
        let size = WINDOW.checked_div(bytes).map_or(MOST, |count| count.clamp(2, MOST));
        Box::new(Shuffled { items, window: Vec::new(), size, random: fastrand::Rng::with_seed(seed), over: false })
    }
}

/// A window of items: a random one leaves, the next one takes its place.
struct Shuffled<I, T> {
    items: I,
    window: Vec<T>,
    size: usize,
    random: fastrand::Rng,
    over: bool,
}

impl<T, I: Iterator<Item = Result<T>>> Iterator for Shuffled<I, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.over && self.window.len() < self.size {
            match self.items.next() {
                Some(Ok(item)) => self.window.push(item),
                Some(Err(e)) => return Some(Err(e)),
                None => self.over = true,
            }
        }
        (!self.window.is_empty()).then(|| Ok(self.window.swap_remove(self.random.usize(..self.window.len()))))
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
    fn every_item_comes_once_and_the_seed_says_when() {
        for bytes in [1, WINDOW / 50, WINDOW] {
            let mut found = order(3, bytes);
            assert_eq!(found, order(3, bytes));
            assert_ne!(found, order(4, bytes));
            assert_ne!(found, (0..1000).collect::<Vec<_>>());
            found.sort_unstable();
            assert_eq!(found, (0..1000).collect::<Vec<_>>());
        }
    }
}

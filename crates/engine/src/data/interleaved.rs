//! Items of several sets in given proportions.

use std::path::Path;

use crate::error::{Error, Result};

/// Items of one pass over a set.
type Items<'s, T> = Box<dyn Iterator<Item = Result<T>> + Send + 's>;

/// A set that can be read several times.
pub(super) struct Set<'s, T> {
    path: &'s Path,
    weight: f64,
    open: Box<dyn Fn(u64) -> Result<Items<'s, T>> + Send + 's>,
    items: Option<Items<'s, T>>,
    /// Completed passes.
    passes: u64,
    /// Items that were returned, in all passes.
    returned: usize,
}

impl<'s, T> Set<'s, T> {
    /// A set with the path `path` and a positive weight; `open` starts a pass, given its number.
    pub fn new(path: &'s Path, weight: f64, open: impl Fn(u64) -> Result<Items<'s, T>> + Send + 's) -> Set<'s, T> {
        Set { path, weight, open: Box::new(open), items: None, passes: 0, returned: 0 }
    }

    /// The next item of the current pass.
    fn next_item(&mut self) -> Result<Option<T>> {
        let items = match &mut self.items {
            Some(items) => items,
            missing => missing.insert((self.open)(self.passes)?),
        };
        let item = items.next().transpose()?;
        match item {
            Some(_) => self.returned = self.returned.saturating_add(1),
            None => (self.items, self.passes) = (None, self.passes.saturating_add(1)),
        }
        Ok(item)
    }

    /// The number of items, including the next one, in units of the weight.
    fn share(&self) -> f64 {
        self.returned.saturating_add(1) as f64 / self.weight
    }
}

/// Iterator over the items of several sets, each with the index of its set.
pub(super) struct Interleaved<'s, T, C> {
    sets: Vec<Set<'s, T>>,
    /// Draws the sets; without it, each item is returned once.
    random: Option<fastrand::Rng>,
    count: C,
    returned: usize,
    /// Number of items of all sets; known once a set has ended.
    limit: Option<usize>,
    is_failed: bool,
}

impl<'s, T, C: Fn() -> Result<usize>> Interleaved<'s, T, C> {
    /// With a `seed`, sets are drawn by weight, a set that ends begins again, and as many items are returned
    /// as `count` returns. Without a seed, each item is returned once: the next one comes from the set that
    /// is farthest behind its share.
    pub fn new(sets: Vec<Set<'s, T>>, seed: Option<u64>, count: C) -> Interleaved<'s, T, C> {
        Interleaved { sets, random: seed.map(fastrand::Rng::with_seed), count, returned: 0, limit: None, is_failed: false }
    }

    /// Draws a set by weight.
    fn draw(&mut self) -> Option<usize> {
        let total: f64 = self.sets.iter().map(|set| set.weight).sum();
        let mut rest = self.random.as_mut()?.f64() * total;
        let before = |set: &Set<'s, T>| {
            rest -= set.weight;
            rest < 0.0
        };
        // Rounding of the sum may leave a rest.
        self.sets.iter().position(before).or_else(|| self.sets.len().checked_sub(1))
    }

    fn next_item(&mut self) -> Result<Option<(usize, T)>> {
        match self.draw() {
            Some(index) => self.next_of(index),
            None => self.next_behind(),
        }
    }

    /// The next item of a set, which begins again if it has ended.
    fn next_of(&mut self, index: usize) -> Result<Option<(usize, T)>> {
        if self.limit.is_some_and(|limit| self.returned >= limit) {
            return Ok(None);
        }
        let Some(set) = self.sets.get_mut(index) else { return Ok(None) };
        if let Some(item) = set.next_item()? {
            return Ok(Some((index, item)));
        }
        let limit = match self.limit {
            Some(limit) => limit,
            None => *self.limit.insert((self.count)()?),
        };
        if self.returned >= limit {
            return Ok(None);
        }
        match set.next_item()? {
            Some(item) => Ok(Some((index, item))),
            None => Err(Error::malformed(set.path, "contains no samples, so that it cannot be mixed with others")),
        }
    }

    /// The next item of the set that is farthest behind its share. Sets that have ended are skipped.
    fn next_behind(&mut self) -> Result<Option<(usize, T)>> {
        loop {
            let open = self.sets.iter_mut().enumerate().filter(|(_, set)| set.passes == 0);
            let Some((index, set)) = open.min_by(|(_, a), (_, b)| a.share().total_cmp(&b.share())) else { return Ok(None) };
            if let Some(item) = set.next_item()? {
                return Ok(Some((index, item)));
            }
        }
    }
}

impl<T, C: Fn() -> Result<usize>> Iterator for Interleaved<'_, T, C> {
    type Item = Result<(usize, T)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_failed {
            return None;
        }
        let item = self.next_item();
        self.is_failed = item.is_err();
        self.returned = self.returned.saturating_add(1);
        item.transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Items of sets of these sizes: pairs of set and position, with positions of later passes from 1000 on.
    fn items(sizes: &[usize], weights: &[f64], seed: Option<u64>) -> Vec<(usize, usize)> {
        let set = |(size, weight): (&usize, &f64)| {
            let size = *size;
            Set::new(Path::new("set"), *weight, move |pass| Ok(Box::new((0..size).map(move |at| Ok::<_, Error>(at + 1000 * pass as usize)))))
        };
        let total = sizes.iter().sum();
        Interleaved::new(sizes.iter().zip(weights).map(set).collect(), seed, || Ok(total)).map(Result::unwrap).collect()
    }

    #[test]
    fn sets_are_drawn_by_weight_and_begin_again() {
        let found = items(&[2000, 10, 990], &[1.0, 3.0, 4.0], Some(7));
        assert_eq!((found.len(), &found), (3000, &items(&[2000, 10, 990], &[1.0, 3.0, 4.0], Some(7))));
        assert_ne!(found, items(&[2000, 10, 990], &[1.0, 3.0, 4.0], Some(8)));
        for (set, weight) in [(0, 1.0), (1, 3.0), (2, 4.0)] {
            let own: Vec<usize> = found.iter().filter(|(index, _)| *index == set).map(|(_, item)| *item).collect();
            let expected = 3000.0 * weight / 8.0;
            assert!((own.len() as f64 - expected).abs() < 0.1 * expected, "{} of set {set}", own.len());
            let size = [2000, 10, 990][set];
            assert_eq!(own, (0..own.len()).map(|at| at % size + 1000 * (at / size)).collect::<Vec<_>>());
        }
        // A single set is returned once.
        assert_eq!(items(&[5], &[2.0], Some(1)), (0..5).map(|at| (0, at)).collect::<Vec<_>>());
    }

    #[test]
    fn without_a_seed_each_item_is_returned_once_in_proportion() {
        let found = items(&[9, 3, 4], &[3.0, 1.0, 1.0], None);
        assert_eq!(found[..5].iter().filter(|(index, _)| *index == 0).count(), 3, "{found:?}");
        let mut sorted = found.clone();
        sorted.sort_unstable();
        let all = |set: usize, size: usize| (0..size).map(move |at| (set, at));
        assert_eq!(sorted, all(0, 9).chain(all(1, 3)).chain(all(2, 4)).collect::<Vec<_>>());
        assert_eq!(items(&[0, 2], &[1.0, 1.0], None), [(1, 0), (1, 1)]);
    }

    #[test]
    fn empty_sets_and_errors_end_the_iteration() {
        let empty = Set::new(Path::new("empty.txt"), 1.0, |_| Ok(Box::new(std::iter::empty::<Result<usize>>())));
        let mut found = Interleaved::new(vec![empty], Some(1), || Ok(1));
        assert!(found.next().unwrap().unwrap_err().to_string().contains("empty.txt: contains no samples"));
        assert!(found.next().is_none());
    }
}

//! The exact magnitude below which a number of weights lie, over one tensor or a whole model, by counting.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::kernel::histogram::{MagnitudeHistogram, Window};
use crate::kernel::{Float, convert, with_float};
use crate::run_state::{Part, Prepare};
use crate::store::{DType, Weight};
use crate::work::{Work, lock};

/// Where a tensor is cut: elements of smaller magnitude go, of equal magnitude the first `ties`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// A magnitude of the tensor's own format.
    pub threshold: u64,
    /// How many elements of exactly that magnitude go.
    pub ties: u64,
}

/// Weights that are ranked together.
pub struct Pool {
    members: Vec<(String, Weight)>,
    count: u64,
    key: DType,
    /// Whether it is counted before anything is written.
    before: bool,
    cuts: Mutex<Cuts>,
}

/// By the number of the member and its rows: all, or those of a part of a run.
type Cuts = BTreeMap<(usize, usize, usize), Cut>;

impl Pool {
    /// Ranks these weights together, to find the `count` smallest, `before` anything is written or when a cut is asked for.
    ///
    /// # Errors
    /// F64 weights are mixed with others.
    pub fn new(members: Vec<(String, Weight)>, count: u64, before: bool) -> Result<Pool> {
        let first = members.first().map_or(DType::F32, |(_, w)| w.dtype);
        let key = if members.iter().all(|(_, w)| w.dtype == first) { first } else { DType::F32 };
        if key != DType::F64
            && let Some((name, _)) = members.iter().find(|(_, w)| w.dtype == DType::F64)
        {
            return Err(Error::tensor(
                name,
                "is F64 and cannot be ranked together with narrower floats",
                "prune it in a pass of its own, or use scope: tensor",
            ));
        }
        Ok(Pool { members, count, key, before, cuts: Mutex::default() })
    }

    /// How many of the smallest elements go.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The weights by name, in order.
    pub fn members(&self) -> &[(String, Weight)] {
        &self.members
    }

    /// Whether parts of a run count together before they write.
    pub fn is_counted_before(&self) -> bool {
        self.before
    }

    /// Where these rows of member number `index` are cut; found now if it has not been, from all weights: of another part of a run, too, where a weight of
    /// this part reads it.
    ///
    /// # Errors
    /// Reading fails.
    pub fn cut(&self, index: usize, rows: &Range<usize>) -> Result<Cut> {
        let mut cuts = lock(&self.cuts);
        let place = (index, rows.start, rows.end);
        if !cuts.contains_key(&place) {
            cuts.extend(self.solve(None, None)?.into_iter().flatten());
        }
        let name = self.members.get(index).map_or("", |(name, _)| name);
        cuts.get(&place).copied().ok_or_else(|| Error::tensor(name, "is not among the weights that are ranked together", ""))
    }

    fn readings(&self) -> u64 {
        match self.key {
            DType::F16 | DType::BF16 => 1,
            DType::F32 => 2,
            _ => 4,
        }
    }

    /// Where each is cut, as far as it is this part's; nothing while other parts have not counted.
    fn solve(&self, work: Option<&Work>, part: Option<(&Part, &str)>) -> Result<Option<Cuts>> {
        let wrong = || Error::option("prune-unstructured", "weights that are not floats");
        with_float!(self.key, F => self.solve_as::<F>(work, part), else Err(wrong()))
    }

    fn solve_as<F: Float>(&self, work: Option<&Work>, part: Option<(&Part, &str)>) -> Result<Option<Cuts>> {
        let own = |(name, weight): &(String, Weight)| part.map_or_else(|| Ok(Some(weight.clone())), |(part, _)| part.own(name, weight));
        let own = self.members.iter().enumerate().map(|(index, member)| Ok(own(member)?.map(|weight| (index, weight)))).collect::<Result<Vec<_>>>()?;
        let own: Vec<(usize, Weight)> = own.into_iter().flatten().collect();
        let mut wanted = self.count;
        let mut window = Window::leading(F::BITS);
        let mut round = 0;
        loop {
            let count_own = || match work {
                None => own.iter().map(|(_, w)| count::<F>(w, window, &|_| Ok(()))).collect::<Result<Vec<_>>>(),
                Some(work) => work.run("Ranking", &own, |(_, w)| w.stored_bytes, |(_, w)| count::<F>(w, window, &|bytes| work.advance(bytes))),
            };
            let mut counts = None;
            let mut count_here = || Ok(totals(counts.insert(count_own()?), window));
            let [all, before] = match part {
                None => [count_here()?, Vec::new()],
                Some((part, name)) => match part.counts(&format!("{name}-{round}"), 1 << window.width, &mut count_here)? {
                    None => return Ok(None),
                    Some(counts) => counts,
                },
            };
            // The last bin that starts before the wanted count is passed; 0 wanted cuts below everything.
            let mut bin = 0;
            while bin + 1 < all.len() && all[bin] < wanted {
                wanted -= all[bin];
                bin += 1;
            }
            if let Some(inside) = window.inside(bin as u64) {
                (window, round) = (inside, round + 1);
                continue;
            }
            let threshold = window.key(bin as u64);
            let counts = counts.map_or_else(count_own, Ok)?;
            // Ties go in the order of names, which is that of parts.
            let mut wanted = wanted.saturating_sub(before.get(bin).copied().unwrap_or(0));
            let cuts = own.iter().zip(&counts).map(|((index, weight), counts)| {
                let equal = counts.iter().find(|(b, _)| usize::from(*b) == bin).map_or(0, |(_, n)| *n);
                let ties = equal.min(wanted);
                wanted -= ties;
                let first = weight.rows_of.map_or(0, |of| of.first);
                let rows = weight.all_rows();
                ((*index, first + rows.start, first + rows.end), own_cut(self.key, weight.dtype, threshold, ties))
            });
            return Ok(Some(cuts.collect()));
        }
    }
}

/// How many magnitudes of all weights lie in each bin.
fn totals(counts: &[Vec<(u16, u64)>], window: Window) -> Vec<u64> {
    let mut totals = vec![0u64; 1 << window.width];
    for (bin, n) in counts.iter().flatten() {
        totals[usize::from(*bin)] += n;
    }
    totals
}

/// Counts one weight's magnitudes in the format of the pool.
fn count<F: Float>(weight: &Weight, window: Window, advance: &dyn Fn(u64) -> Result<()>) -> Result<Vec<(u16, u64)>> {
    let mut histogram = MagnitudeHistogram::new(window);
    let (mut floats, mut bytes) = (Vec::new(), Vec::new());
    weight.visit(1, &mut |block| {
        if block.now.dtype == F::DTYPE {
            histogram.add::<F>(block.now.values);
        } else {
            floats.resize(block.now.elements(), 0.0);
            bytes.resize(floats.len() * F::SIZE, 0);
            if block.now.decode(0, &mut floats) && convert::from_f32(F::DTYPE, &floats, &mut bytes) {
                histogram.add::<F>(&bytes);
            }
        }
        advance(block.before.values.len() as u64)
    })?;
    Ok(histogram.take())
}

/// The cut of the pool in the format of one of its members: when no magnitude of the member equals the
/// threshold, the next smaller one takes its place, and all its ties go.
fn own_cut(key: DType, own: DType, threshold: u64, ties: u64) -> Cut {
    if key == own {
        return Cut { threshold, ties };
    }
    let to_key = |magnitude: u64| match own {
        DType::F16 => u64::from(crate::kernel::F16::to_f32((magnitude as u16).to_le_bytes()).to_bits()),
        DType::BF16 => magnitude << 16,
        _ => magnitude,
    };
    let limit = if own == DType::F32 { 1u64 << 31 } else { 1 << 15 };
    let (mut low, mut high) = (0, limit);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if to_key(middle) <= threshold { low = middle } else { high = middle }
    }
    Cut { threshold: low, ties: if to_key(low) == threshold { ties } else { u64::MAX } }
}

impl Prepare for Pool {
    fn bytes(&self) -> u64 {
        self.readings() * self.members.iter().map(|(_, w)| w.stored_bytes).sum::<u64>()
    }

    fn prepare(&self, work: &Work, part: Option<(&Part, &str)>) -> Result<bool> {
        let cuts = self.solve(Some(work), part)?;
        let found = cuts.is_some();
        lock(&self.cuts).extend(cuts.into_iter().flatten());
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_in_a_wider_format_is_translated() {
        let one = u64::from(1f32.to_bits());
        assert_eq!(own_cut(DType::F32, DType::BF16, one, 3), Cut { threshold: 0x3F80, ties: 3 });
        assert_eq!(own_cut(DType::F32, DType::BF16, one + 1, 3), Cut { threshold: 0x3F80, ties: u64::MAX });
        assert_eq!(own_cut(DType::F32, DType::F16, one - 1, 0), Cut { threshold: 0x3BFF, ties: u64::MAX });
        assert_eq!(own_cut(DType::F32, DType::F16, 0, 0), Cut { threshold: 0, ties: 0 });
    }
}

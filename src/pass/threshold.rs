//! Exact magnitude thresholds for pruning a number of weights in one tensor or in several, by multi-round
//! histogram selection.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::kernel::histogram::{MagnitudeHistogram, Window};
use crate::kernel::{Float, convert, with_float};
use crate::run_state::{Part, Prepare};
use crate::store::{DType, Weight};
use crate::work::{Work, lock};

/// Pruning threshold of a tensor. Elements of smaller magnitude are zeroed, and so are the first `ties`
/// of equal magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Magnitude as an integer key in the format of the tensor.
    pub threshold: u64,
    /// Number of elements of exactly that magnitude to zero.
    pub ties: u64,
}

/// Weights whose elements are ranked jointly.
pub struct RankingGroup {
    members: Vec<(String, Weight)>,
    count: u64,
    key: DType,
    /// Whether thresholds are computed before writing, jointly by all parts of a distributed run.
    before: bool,
    cuts: Mutex<Cuts>,
}

/// Thresholds by member index, first row and end row. In a distributed run, each part has a range of rows.
type Cuts = BTreeMap<(usize, usize, usize), Cut>;

impl RankingGroup {
    /// Ranks these weights jointly to find the `count` smallest elements, either `before` writing or on
    /// demand. Returns an error if F64 weights are mixed with others.
    pub fn new(members: Vec<(String, Weight)>, count: u64, before: bool) -> Result<RankingGroup> {
        let first = members.first().map_or(DType::F32, |(_, w)| w.dtype);
        let key = if members.iter().all(|(_, w)| w.dtype == first) { first } else { DType::F32 };
        if key != DType::F64
            && let Some((name, _)) = members.iter().find(|(_, w)| w.dtype == DType::F64)
        {
            return Err(Error::tensor(name, "is F64 and cannot be ranked jointly with narrower floats", "prune it in a separate pass, or use `scope: tensor`"));
        }
        Ok(RankingGroup { members, count, key, before, cuts: Mutex::default() })
    }

    /// Number of elements to zero.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Names and weights, in order.
    pub fn members(&self) -> &[(String, Weight)] {
        &self.members
    }

    /// Whether thresholds are computed before writing, jointly by all parts of a distributed run.
    pub fn is_counted_before(&self) -> bool {
        self.before
    }

    /// The threshold for these rows of member `index`. If it is not cached, it is computed from all
    /// weights, which happens also if a weight of this part of a distributed run reads rows of another
    /// part.
    pub fn cut(&self, index: usize, rows: &Range<usize>) -> Result<Cut> {
        let mut cuts = lock(&self.cuts);
        let key = (index, rows.start, rows.end);
        if !cuts.contains_key(&key) {
            cuts.extend(self.solve(None, None)?.into_iter().flatten());
        }
        let name = self.members.get(index).map_or("", |(name, _)| name);
        cuts.get(&key).copied().ok_or_else(|| Error::tensor(name, "is not among the jointly ranked weights", ""))
    }

    /// Number of times that all weights are read.
    fn rounds(&self) -> u64 {
        match self.key {
            DType::F16 | DType::BF16 => 1,
            DType::F32 => 2,
            _ => 4,
        }
    }

    /// Computes the thresholds of this part's rows. Returns `None` while counts of other parts are missing.
    fn solve(&self, work: Option<&Work>, part: Option<(&Part, &str)>) -> Result<Option<Cuts>> {
        let wrong = || Error::option("prune-unstructured", "the selected weights are not floats");
        with_float!(self.key, F => self.solve_as::<F>(work, part), else Err(wrong()))
    }

    fn solve_as<F: Float>(&self, work: Option<&Work>, part: Option<(&Part, &str)>) -> Result<Option<Cuts>> {
        let own = |(name, weight): &(String, Weight)| part.map_or_else(|| Ok(Some(weight.clone())), |(part, _)| part.own_rows(name, weight));
        let own = self.members.iter().enumerate().map(|(index, member)| Ok(own(member)?.map(|weight| (index, weight)))).collect::<Result<Vec<_>>>()?;
        let own: Vec<(usize, Weight)> = own.into_iter().flatten().collect();
        let mut remaining = self.count;
        let mut window = Window::leading(F::BITS);
        let mut round = 0;
        loop {
            let count_own = || match work {
                None => own.iter().map(|(_, w)| count::<F>(w, window, &|_| Ok(()))).collect::<Result<Vec<_>>>(),
                Some(work) => work.run("Ranking", &own, |(_, w)| w.stored_bytes, |(_, w)| count::<F>(w, window, &|bytes| work.advance(bytes))),
            };
            let mut counts = None;
            let mut own_totals = || Ok(totals(counts.insert(count_own()?), window));
            let [all, before] = match part {
                None => [own_totals()?, Vec::new()],
                Some((part, name)) => match part.counts(&format!("{name}-{round}"), 1 << window.width, &mut own_totals)? {
                    None => return Ok(None),
                    Some(counts) => counts,
                },
            };
            // Find the bin that contains the threshold. A count of 0 selects the first bin, with no ties.
            let mut bin = 0;
            while bin + 1 < all.len() && all[bin] < remaining {
                remaining -= all[bin];
                bin += 1;
            }
            if let Some(inside) = window.inside(bin as u64) {
                (window, round) = (inside, round + 1);
                continue;
            }
            let threshold = window.key(bin as u64);
            let counts = counts.map_or_else(count_own, Ok)?;
            // Ties are zeroed in the order of names, which is the order of parts.
            let mut remaining = remaining.saturating_sub(before.get(bin).copied().unwrap_or(0));
            let cuts = own.iter().zip(&counts).map(|((index, weight), counts)| {
                let equal = counts.iter().find(|(b, _)| usize::from(*b) == bin).map_or(0, |(_, n)| *n);
                let ties = equal.min(remaining);
                remaining -= ties;
                let first = weight.rows_of.map_or(0, |of| of.first);
                let rows = weight.all_rows();
                ((*index, first + rows.start, first + rows.end), own_cut(self.key, weight.dtype, threshold, ties))
            });
            return Ok(Some(cuts.collect()));
        }
    }
}

/// Sums the counts of all weights.
fn totals(counts: &[Vec<(u16, u64)>], window: Window) -> Vec<u64> {
    let mut totals = vec![0u64; 1 << window.width];
    for (bin, n) in counts.iter().flatten() {
        totals[usize::from(*bin)] += n;
    }
    totals
}

/// Histogram of the magnitudes of one weight, converted to the format `F`.
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

/// Converts a threshold from the format `key` to the format `own` of a member. If the threshold is not
/// representable there, the result is the next smaller magnitude with all of its ties.
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

impl Prepare for RankingGroup {
    fn bytes(&self) -> u64 {
        self.rounds() * self.members.iter().map(|(_, w)| w.stored_bytes).sum::<u64>()
    }

    fn prepare(&self, work: &Work, part: Option<(&Part, &str)>) -> Result<bool> {
        let cuts = self.solve(Some(work), part)?;
        let complete = cuts.is_some();
        lock(&self.cuts).extend(cuts.into_iter().flatten());
        Ok(complete)
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

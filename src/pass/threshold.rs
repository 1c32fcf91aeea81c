//! The exact magnitude below which a number of weights lie, over one tensor or a whole model, by counting.

use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::kernel::histogram::{MagnitudeHistogram, Window};
use crate::kernel::{Float, convert, with_float};
use crate::run_state::Prepare;
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
    cuts: Mutex<Option<Arc<Vec<Cut>>>>,
}

impl Pool {
    /// Ranks these weights together, to find the `count` smallest.
    ///
    /// # Errors
    /// F64 weights are mixed with others.
    pub fn new(members: Vec<(String, Weight)>, count: u64) -> Result<Pool> {
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
        Ok(Pool { members, count, key, cuts: Mutex::new(None) })
    }

    /// How many of the smallest elements go.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The weights by name, in order.
    pub fn members(&self) -> &[(String, Weight)] {
        &self.members
    }

    /// Where member number `index` is cut; found now if it has not been.
    ///
    /// # Errors
    /// Reading fails.
    pub fn cut(&self, index: usize) -> Result<Cut> {
        let mut cuts = lock(&self.cuts);
        let cuts = match &*cuts {
            Some(found) => found.clone(),
            None => cuts.insert(Arc::new(self.solve(None)?)).clone(),
        };
        Ok(cuts[index])
    }

    fn readings(&self) -> u64 {
        match self.key {
            DType::F16 | DType::BF16 => 1,
            DType::F32 => 2,
            _ => 4,
        }
    }

    fn solve(&self, work: Option<&Work>) -> Result<Vec<Cut>> {
        with_float!(self.key, F => self.solve_as::<F>(work), else Err(Error::option("prune-unstructured", "weights that are not floats")))
    }

    fn solve_as<F: Float>(&self, work: Option<&Work>) -> Result<Vec<Cut>> {
        let mut wanted = self.count;
        let mut window = Window::leading(F::BITS);
        loop {
            let counts = match work {
                None => self.members.iter().map(|(_, w)| count::<F>(w, window, &|_| Ok(()))).collect::<Result<Vec<_>>>()?,
                Some(work) => work.run("Ranking", &self.members, |(_, w)| w.stored_bytes, |(_, w)| count::<F>(w, window, &|bytes| work.advance(bytes)))?,
            };
            let mut totals = vec![0u64; 1 << window.width];
            for (bin, n) in counts.iter().flatten() {
                totals[usize::from(*bin)] += n;
            }
            // The last bin that starts before the wanted count is passed; 0 wanted cuts below everything.
            let mut bin = 0;
            while bin + 1 < totals.len() && totals[bin] < wanted {
                wanted -= totals[bin];
                bin += 1;
            }
            if let Some(inside) = window.inside(bin as u64) {
                window = inside;
                continue;
            }
            let threshold = window.key(bin as u64);
            let mut cuts = Vec::with_capacity(self.members.len());
            for ((_, weight), counts) in self.members.iter().zip(&counts) {
                let equal = counts.iter().find(|(b, _)| usize::from(*b) == bin).map_or(0, |(_, n)| *n);
                let ties = equal.min(wanted);
                wanted -= ties;
                cuts.push(own_cut(self.key, weight.dtype, threshold, ties));
            }
            return Ok(cuts);
        }
    }
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

    fn prepare(&self, work: &Work) -> Result<()> {
        let cuts = Arc::new(self.solve(Some(work))?);
        *lock(&self.cuts) = Some(cuts);
        Ok(())
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

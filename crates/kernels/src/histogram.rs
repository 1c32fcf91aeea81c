//! Exact histograms of magnitudes, 15 or 16 bits at a time, to find the k-th smallest weight of a model
//! without sorting.
//!
//! Magnitudes of IEEE floats have the order of unsigned integers, so the k-th smallest is in the bin of
//! leading bits where the cumulative count exceeds k. Another pass counts the next bits within that bin.
//! 16-bit floats need one pass, f32 two, f64 four.

use super::Float;

/// The bits of a magnitude that are counted: `width` bits at position `shift`, of elements whose higher
/// bits equal `prefix`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Position of the lowest counted bit.
    pub shift: u32,
    /// Number of counted bits: 15 in the first pass (without the sign bit), then 16.
    pub width: u32,
    /// Required value of the higher bits.
    pub prefix: u64,
}

impl Window {
    /// The leading 15 bits of a magnitude of `bits` bits.
    pub fn leading(bits: u32) -> Window {
        Window { shift: bits - 15, width: 15, prefix: 0 }
    }

    /// The next 16 bits within `bin`. `None` if no bits remain.
    pub fn inside(self, bin: u64) -> Option<Window> {
        (self.shift > 0).then(|| Window { shift: self.shift - 16, width: 16, prefix: self.key(bin) })
    }

    /// The leading bits of every magnitude in `bin`.
    pub fn key(self, bin: u64) -> u64 {
        (self.prefix << self.width) | bin
    }
}

const TABLES: usize = 4;

/// Number of bins of a leading window.
const LEADING: usize = 1 << 15;

/// Histogram of one window. Four tables are used in rotation, so that the increments of equal adjacent
/// values do not depend on each other.
#[derive(Debug)]
pub struct MagnitudeHistogram {
    window: Window,
    tables: Vec<u32>,
    totals: Vec<u64>,
    pending: u64,
}

impl MagnitudeHistogram {
    /// An empty histogram.
    pub fn new(window: Window) -> Self {
        let bins = 1usize << window.width;
        Self { window, tables: vec![0; bins * TABLES], totals: vec![0; bins], pending: 0 }
    }

    /// Counts the elements of a block.
    pub fn add<F: Float>(&mut self, bytes: &[u8]) {
        let elements = F::split(bytes);
        self.pending += elements.len() as u64;
        if self.pending > u64::from(u32::MAX) {
            self.flush();
            self.pending = elements.len() as u64;
        }
        if self.window == Window::leading(F::BITS) {
            self.add_leading::<F>(elements);
        } else {
            let Window { shift, width, prefix } = self.window;
            let mask = (1 << width) - 1;
            for &e in elements {
                let magnitude: u64 = F::magnitude(e).into();
                if magnitude >> (shift + width) == prefix {
                    self.tables[(magnitude >> shift) as usize & mask] += 1;
                }
            }
        }
    }

    /// Specialized for the leading window: without bounds checks, and with constant shifts.
    fn add_leading<F: Float>(&mut self, elements: &[F::Bytes]) {
        let bin = |e: F::Bytes| (F::magnitude(e).into() >> (F::BITS - 15)) as usize & (LEADING - 1);
        let [t0, t1, t2, t3] = self.tables.as_chunks_mut::<LEADING>().0 else { return };
        let (quads, tail) = elements.as_chunks::<TABLES>();
        for &[a, b, c, d] in quads {
            t0[bin(a)] += 1;
            t1[bin(b)] += 1;
            t2[bin(c)] += 1;
            t3[bin(d)] += 1;
        }
        for &e in tail {
            t0[bin(e)] += 1;
        }
    }

    fn flush(&mut self) {
        for table in self.tables.chunks_exact_mut(self.totals.len()) {
            for (total, count) in self.totals.iter_mut().zip(table) {
                *total += u64::from(*count);
                *count = 0;
            }
        }
        self.pending = 0;
    }

    /// Returns the nonempty bins in order with their counts, and clears the histogram.
    pub fn take(&mut self) -> Vec<(u16, u64)> {
        self.flush();
        let filled = self.totals.iter().enumerate().filter(|(_, n)| **n > 0).map(|(bin, n)| (bin as u16, *n)).collect();
        self.totals.fill(0);
        filled
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Bf16, F32};
    use super::*;

    #[test]
    fn windows_narrow_down_to_one_value() {
        let value = -1.337f32;
        let bits = u64::from(F32::magnitude(value.to_le_bytes()));
        let bytes = [value.to_le_bytes(), 7f32.to_le_bytes()].concat();
        let first = Window::leading(F32::BITS);
        let mut histogram = MagnitudeHistogram::new(first);
        histogram.add::<F32>(&bytes);
        assert!(histogram.take().contains(&((bits >> 16) as u16, 1)));
        let second = first.inside(bits >> 16).unwrap();
        let mut histogram = MagnitudeHistogram::new(second);
        histogram.add::<F32>(&bytes);
        assert_eq!(histogram.take(), [(bits as u16, 1)]);
        assert_eq!(second.key(bits & 0xFFFF), bits);
        assert_eq!(second.inside(0), None);
    }

    #[test]
    fn sixteen_bit_floats_need_one_window() {
        let window = Window::leading(Bf16::BITS);
        let mut histogram = MagnitudeHistogram::new(window);
        histogram.add::<Bf16>(&[0x80, 0x3F, 0x80, 0xBF, 0x00, 0x80]);
        assert_eq!(histogram.take(), [(0, 1), (0x3F80, 2)]);
        assert_eq!(window.inside(3), None);
    }
}

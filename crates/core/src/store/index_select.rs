//! Selection of indices along one dimension of a weight.

use std::sync::Arc;

use super::{Block, BlockSink, Encoding, View, Weight, WeightSource, block_elements};
use crate::error::{Error, Result};
use crate::work::Meter;

/// A weight reduced to some indices of one dimension.
struct IndexSelect {
    upstream: Weight,
    /// Original size of the dimension.
    size: usize,
    /// Number of elements per index of the dimension.
    inner: usize,
    /// Selected ranges of the dimension: first index and length.
    runs: Vec<(usize, usize)>,
    meter: Arc<Meter>,
}

/// Below this many elements per index, complete lines of the dimension are read.
const SHORT: usize = 64;

impl Weight {
    /// The weight with only these indices of a dimension, in ascending order. Fails if the weight is
    /// quantized, the dimension or an index is out of range, or elements are narrower than a byte.
    pub fn index_select(&self, name: &str, axis: usize, indices: &[usize], meter: Arc<Meter>) -> Result<Weight> {
        if self.encoding != Encoding::Dense || self.dtype.bitsize() < 8 {
            return Err(Error::tensor(
                name,
                format!("is already {}, so that parts of it cannot be removed", self.describe()),
                "quantize last, or run `compress densify` first",
            ));
        }
        let size = *self.shape.get(axis).ok_or_else(|| Error::tensor(name, format!("has no axis {axis}, shape {:?}", self.shape), ""))?;
        if indices.iter().any(|index| *index >= size) || indices.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(Error::tensor(name, format!("has {size} elements on axis {axis}, and the requested indices are out of range or not ascending"), ""));
        }
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for &index in indices {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == index => *count += 1,
                _ => runs.push((index, 1)),
            }
        }
        let inner = self.shape[axis + 1..].iter().product();
        let source = IndexSelect { upstream: self.clone(), size, inner, runs, meter };
        let mut weight = self.then(self.dtype, Encoding::Dense, Arc::new(source));
        weight.shape[axis] = indices.len();
        Ok(weight)
    }
}

/// Selected elements that were not passed to the sink yet.
#[derive(Default)]
struct Gathered {
    now: Vec<u8>,
    before: Vec<u8>,
    /// Whether a previous stage has changed any value.
    changed: bool,
}

impl IndexSelect {
    /// Appends the selected ones of the elements starting at `from` to `output`.
    fn gather(&self, from: usize, values: &[u8], width: usize, output: &mut Vec<u8>) {
        let (line, count) = (self.size * self.inner, values.len() / width);
        let mut at = from;
        let end = from + count;
        while at < end {
            let start = at / line * line;
            let first = self.runs.partition_point(|(run, length)| start + (run + length) * self.inner <= at);
            for (run, length) in &self.runs[first..] {
                let (begin, stop) = ((start + run * self.inner).max(at), (start + (run + length) * self.inner).min(end));
                if begin >= stop {
                    break;
                }
                output.extend_from_slice(&values[(begin - from) * width..(stop - from) * width]);
            }
            at = start + line;
        }
    }

    /// Passes complete blocks to the sink; at the end, everything.
    fn flush(&self, gathered: &mut Gathered, unit: usize, end: bool, sink: BlockSink) -> Result<()> {
        let width = self.upstream.dtype.bitsize() / 8;
        let block = block_elements(unit) * width;
        while gathered.now.len() >= block || (end && !gathered.now.is_empty()) {
            let length = gathered.now.len().min(block);
            let now = View::dense(self.upstream.dtype, &gathered.now[..length]);
            if gathered.changed {
                sink(Block { now, before: View::dense(self.upstream.dtype, &gathered.before[..length]) })?;
                gathered.before.drain(..length);
            } else {
                sink(Block::untouched(now))?;
            }
            gathered.now.drain(..length);
        }
        Ok(())
    }
}

impl WeightSource for IndexSelect {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let width = self.upstream.dtype.bitsize() / 8;
        let line = self.size * self.inner;
        // With many short runs, complete lines reduce the number of searches for the first run.
        let upstream_unit = if self.inner < SHORT { line } else { 1 };
        let mut gathered = Gathered::default();
        let mut at = 0;
        self.upstream.visit(upstream_unit.max(1), &mut |block: Block| {
            let elements = block.now.elements();
            self.meter.time(|| {
                if !block.now.is(&block.before) && !gathered.changed {
                    gathered.changed = true;
                    gathered.before.clone_from(&gathered.now);
                }
                self.gather(at, block.now.values, width, &mut gathered.now);
                let comparable = block.before.affine.is_none() && block.before.dtype == block.now.dtype;
                if gathered.changed {
                    let before = if comparable { block.before.values } else { block.now.values };
                    self.gather(at, before, width, &mut gathered.before);
                }
            });
            at += elements;
            self.flush(&mut gathered, unit, false, sink)
        })?;
        self.flush(&mut gathered, unit, true, sink)
    }
}

#[cfg(test)]
mod tests {
    use super::super::DType;
    use super::*;

    struct Numbers(Vec<u8>, usize);

    impl WeightSource for Numbers {
        fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
            self.0.chunks(unit.max(self.1) / unit * unit * 2).try_for_each(|part| sink(Block::untouched(View::dense(DType::U16, part))))
        }
    }

    fn values(weight: &Weight) -> Vec<u8> {
        let mut found = Vec::new();
        weight
            .visit(1, &mut |block| {
                found.extend(block.now.values.iter().step_by(2));
                Ok(())
            })
            .unwrap();
        found
    }

    #[test]
    fn elements_of_any_axis_are_selected_for_any_block_size() {
        let numbers: Vec<u8> = (0..24u8).flat_map(|n| [n, 0]).collect();
        for chunk in [1, 5, 24] {
            let weight = Weight::new(DType::U16, vec![2, 3, 4], Encoding::Dense, Arc::new(Numbers(numbers.clone(), chunk)));
            let pick = |axis, kept: &[usize]| values(&weight.index_select("w", axis, kept, Arc::default()).unwrap());
            assert_eq!(pick(0, &[1]), (12..24).collect::<Vec<u8>>());
            assert_eq!(pick(1, &[0, 2]), [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23]);
            assert_eq!(pick(2, &[1, 3]), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]);
            assert!(weight.index_select("w", 3, &[0], Arc::default()).is_err() && weight.index_select("w", 0, &[2], Arc::default()).is_err());
        }
    }
}

//! Comparison of two models, weight by weight.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::mpsc::sync_channel;

use serde::Serialize;

use super::Model;
use crate::error::{Error, Result, counted};
use crate::kernel::compare::{self, Difference};
use crate::store::{Block, DType, View, Weight};
use crate::work::Work;

/// Differences of one weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WeightDiff {
    /// Name in the checkpoints.
    pub name: String,
    /// Storage format in the first model.
    pub before: Option<String>,
    /// Storage format in the second model.
    pub after: Option<String>,
    /// Whether all values are equal.
    pub equal: bool,
    /// Signal-to-quantization-noise ratio in dB, with the first model as the signal; `None` if the
    /// values are equal. This figure, those below, and the zeros are those of the values in f32.
    pub sqnr_db: Option<f64>,
    /// Cosine similarity.
    pub cosine: Option<f64>,
    /// Largest absolute difference.
    pub max_abs_error: Option<f64>,
    /// Number of zeros in the first model.
    pub zeros_before: u64,
    /// Number of zeros in the second model.
    pub zeros_after: u64,
    /// Number of elements.
    pub elements: u64,
    /// Reason why values could not be compared, or the number of elements that are NaN in only one model.
    pub note: Option<String>,
}

/// Differences of two models.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diff {
    /// Bytes of the tensors of the first model.
    pub bytes_before: u64,
    /// Bytes of the tensors of the second model.
    pub bytes_after: u64,
    /// Weights, by name.
    pub weights: Vec<WeightDiff>,
}

/// Compares the values of two models; quantized and sparse weights are decoded.
pub fn diff(before: &Model, after: &Model, work: &Work) -> Result<Diff> {
    let names: BTreeSet<&String> = before.weights.by_name.keys().chain(after.weights.by_name.keys()).collect();
    let jobs: Vec<(&String, Option<&Weight>, Option<&Weight>)> =
        names.into_iter().map(|name| (name, before.weights.by_name.get(name), after.weights.by_name.get(name))).collect();
    let bytes = |w: Option<&Weight>| w.map_or(0, |w| w.stored_bytes);
    let weights = work.run(
        "Comparing",
        &jobs,
        |(_, a, b)| bytes(*a).saturating_add(bytes(*b)),
        |(name, a, b)| {
            let done = weight_diff(name, *a, *b)?;
            work.advance(bytes(*a).saturating_add(bytes(*b)))?;
            Ok(done)
        },
    )?;
    Ok(Diff { bytes_before: before.stored_bytes(), bytes_after: after.stored_bytes(), weights })
}

fn weight_diff(name: &str, a: Option<&Weight>, b: Option<&Weight>) -> Result<WeightDiff> {
    let mut diff = WeightDiff {
        name: name.to_owned(),
        before: a.map(Weight::describe_stored),
        after: b.map(Weight::describe_stored),
        equal: false,
        sqnr_db: None,
        cosine: None,
        max_abs_error: None,
        zeros_before: 0,
        zeros_after: 0,
        elements: a.or(b).map_or(0, |w| w.elements() as u64),
        note: None,
    };
    let (Some(a), Some(b)) = (a, b) else {
        diff.note = Some(format!("only in the {}", if a.is_some() { "first" } else { "second" }));
        return Ok(diff);
    };
    if a.shape != b.shape {
        diff.note = Some(format!("shapes differ: {:?} and {:?}", a.shape, b.shape));
        return Ok(diff);
    }
    let mut sums = Difference::default();
    let (mut same, mut unlike, mut max) = (true, 0usize, 0f64);
    let floats = a.is_float() && b.is_float();
    let is_wide = a.dtype == DType::F64 || b.dtype == DType::F64;
    if !floats && a.dtype != b.dtype {
        diff.note = Some(format!("types differ: {} and {}", a.dtype, b.dtype));
        return Ok(diff);
    }
    let (mut x, mut y) = (vec![0f32; CHUNK], vec![0f32; CHUNK]);
    zip(name, a, b, &mut |one, two| {
        let same_bytes = a.dtype == b.dtype && one.now.values == two;
        if !floats {
            same &= same_bytes;
            sums.zeros_before = sums.zeros_before.saturating_add(zero_elements(one.now.values, a.dtype));
            sums.zeros_after = sums.zeros_after.saturating_add(zero_elements(two, b.dtype));
            return Ok(());
        }
        let two = View::dense(b.dtype, two);
        let elements = one.now.elements();
        for start in (0..elements).step_by(CHUNK) {
            let count = CHUNK.min(elements.saturating_sub(start));
            let ((x, _), (y, _)) = (x.split_at_mut(count), y.split_at_mut(count));
            if one.now.decode(start, x) && two.decode(start, y) {
                if is_wide {
                    doubles(&one.now, start, x).zip(doubles(&two, start, y)).for_each(|pair| max = max.max(add_doubles(&mut sums, pair)));
                } else {
                    sums.add(&compare::floats(x, y));
                }
                unlike = unlike.saturating_add(x.iter().zip(y.iter()).filter(|(x, y)| x.is_nan() != y.is_nan()).count());
                same &= same_bytes || (x == y && (!is_wide || doubles(&one.now, start, x).eq(doubles(&two, start, y))));
            }
        }
        Ok(())
    })?;
    diff.equal = same;
    if floats {
        (diff.sqnr_db, diff.cosine, diff.max_abs_error) = (sums.sqnr_db(), sums.cosine(), Some(max.max(f64::from(sums.max))));
    }
    (diff.zeros_before, diff.zeros_after) = (sums.zeros_before, sums.zeros_after);
    if unlike > 0 {
        diff.max_abs_error = Some(f64::INFINITY);
        diff.note = Some(format!("NaN in only one model: {}", counted(unlike, "element")));
    }
    Ok(diff)
}

/// The values of elements from `start` on, which are `floats` in f32.
fn doubles<'a>(view: &View<'a>, start: usize, floats: &'a [f32]) -> impl Iterator<Item = f64> + 'a {
    let wide = if view.dtype == DType::F64 && view.affine.is_none() { view.values.as_chunks().0 } else { &[] };
    let wide = wide.get(start..).unwrap_or_default();
    floats.iter().enumerate().map(|(at, float)| wide.get(at).map_or(f64::from(*float), |bytes| f64::from_le_bytes(*bytes)))
}

/// Adds a pair of doubles, which may be outside of the range of f32, and returns their distance.
fn add_doubles(sums: &mut Difference, (x, y): (f64, f64)) -> f64 {
    sums.signal += x * x;
    sums.other += y * y;
    sums.noise += (x - y) * (x - y);
    sums.dot += x * y;
    sums.zeros_before = sums.zeros_before.saturating_add(u64::from(x == 0.0));
    sums.zeros_after = sums.zeros_after.saturating_add(u64::from(y == 0.0));
    (x - y).abs()
}

/// Number of zeros of either sign. Complex numbers, and elements smaller than a byte, which may cross
/// bytes, count if all their bits are zero.
fn zero_elements(bytes: &[u8], dtype: DType) -> u64 {
    let bits = dtype.bitsize();
    if bits >= 8 {
        // A complex number has as many bits as a `u64`.
        return View::dense(if dtype == DType::C64 { DType::U64 } else { dtype }, bytes).zeros();
    }
    // Eight elements have `bits` bytes.
    let is_zero = |run: &[u8], element: usize| {
        (0..bits).map(|bit| element.saturating_mul(bits).saturating_add(bit)).all(|bit| run.get(bit / 8).is_none_or(|byte| byte >> (bit % 8) & 1 == 0))
    };
    let elements = |run: &[u8]| run.len().saturating_mul(8).checked_div(bits).unwrap_or(0);
    bytes.chunks(bits.max(1)).map(|run| (0..elements(run)).filter(|element| is_zero(run, *element)).count() as u64).sum()
}

/// Elements compared at a time.
const CHUNK: usize = 4096;
/// Number of blocks that the second reader may be ahead.
const AHEAD: usize = 2;

/// Visits the values of two weights of one shape in lockstep, rounded to their dtypes, the second as plain
/// bytes; its reader runs on a separate thread.
fn zip(name: &str, a: &Weight, b: &Weight, sink: &mut dyn FnMut(&Block, &[u8]) -> Result<()>) -> Result<()> {
    let unit = a.row().max(1);
    let (send, receive) = sync_channel::<Vec<u8>>(AHEAD);
    // The blocks of the two weights may have different sizes.
    let (size, mut pending) = ((b.dtype.bitsize() / 8).max(1), Vec::<u8>::new());
    std::thread::scope(|scope| {
        let read = move || {
            b.dense("").visit(unit, &mut |block| {
                // The receiver is closed if reading the first weight has failed; that error is returned.
                send.send(block.now.values.to_vec()).map_err(|_| Error::Cancelled)
            })
        };
        let reader = std::thread::Builder::new().spawn_scoped(scope, read).map_err(Error::io("start a thread to read", Path::new(name)))?;
        let first = a.dense(name).visit(unit, &mut |block| {
            let needed = block.now.elements().saturating_mul(size);
            while pending.len() < needed {
                let bytes = receive.recv().map_err(|_| Error::Cancelled)?;
                if pending.is_empty() {
                    pending = bytes;
                } else {
                    pending.extend(bytes);
                }
            }
            let rest = pending.split_off(needed);
            sink(&block, &pending)?;
            pending = rest;
            Ok(())
        });
        drop(receive);
        let second = reader.join().unwrap_or(Err(Error::Cancelled));
        match (first, second) {
            (Err(Error::Cancelled), Err(error)) => Err(error),
            (first, _) => first,
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::{BlockSink, Encoding, WeightSource};

    /// Numbers in blocks of a number of elements that does not depend on the unit.
    struct Numbers {
        dtype: DType,
        bytes: Vec<u8>,
        block: usize,
    }

    impl WeightSource for Numbers {
        fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
            let parts = self.bytes.chunks(self.block * self.dtype.bitsize() / 8);
            parts.map(|part| View::dense(self.dtype, part)).try_for_each(|view| sink(Block::untouched(view)))
        }
    }

    #[test]
    fn doubles_are_compared_outside_of_the_range_of_floats() {
        let weight = |values: &[f64]| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Weight::new(DType::F64, vec![values.len()], Encoding::Dense, Arc::new(Numbers { dtype: DType::F64, bytes, block: 2 }))
        };
        let unit = 2f64.powi(-200);
        let (a, b) = (weight(&[unit, 0.0, -2.0 * unit]), weight(&[1.5 * unit, 0.0, -3.0 * unit]));
        let found = weight_diff("w", Some(&a), Some(&b)).unwrap();
        assert_eq!((found.equal, found.zeros_before, found.zeros_after, found.max_abs_error), (false, 1, 1, Some(unit)));
        assert!((found.sqnr_db.unwrap() - 6.0206).abs() < 1e-3, "{:?}", found.sqnr_db);
    }

    #[test]
    fn zeros_of_small_elements_are_counted_one_by_one() {
        assert_eq!(zero_elements(&[0x00, 0x10, 0xFF], DType::F4), 3);
        // Eight elements of six bits, of which the second is not zero.
        assert_eq!(zero_elements(&[0x40, 0, 0, 0, 0, 0], DType::F6_E2M3), 7);
        assert_eq!(zero_elements(&[0, 0, 1, 0], DType::I16), 1);
        assert_eq!([DType::F8_E4M3, DType::F8_E5M2, DType::F8_E8M0].map(|dtype| zero_elements(&[0, 0x80, 1], dtype)), [2, 2, 0]);
        assert_eq!(zero_elements(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], DType::C64), 1);
    }

    #[test]
    fn an_element_that_is_nan_in_only_one_model_is_an_infinite_error() {
        let weight = |values: &[f32]| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Weight::new(DType::F32, vec![values.len()], Encoding::Dense, Arc::new(Numbers { dtype: DType::F32, bytes, block: 2 }))
        };
        let (numbers, broken) = (weight(&[1.0, 2.0, 3.0]), weight(&[1.0, f32::NAN, f32::NAN]));
        for (a, b) in [(&numbers, &broken), (&broken, &numbers)] {
            let found = weight_diff("w", Some(a), Some(b)).unwrap();
            assert_eq!((found.equal, found.max_abs_error), (false, Some(f64::INFINITY)));
            assert_eq!(found.note.as_deref(), Some("NaN in only one model: 2 elements"));
        }
        let found = weight_diff("w", Some(&broken), Some(&broken)).unwrap();
        assert_eq!((found.equal, found.note), (true, None));
    }

    #[test]
    fn blocks_of_different_sizes_are_compared() {
        let weight = |dtype, bytes, block| Weight::new(dtype, vec![10, 1], Encoding::Dense, Arc::new(Numbers { dtype, bytes, block }));
        let single = |block: usize| weight(DType::F32, (0..10u8).flat_map(|number| f32::from(number).to_le_bytes()).collect(), block);
        let double = |last: u8, block: usize| {
            let numbers = (0..9u8).chain([last]);
            weight(DType::F64, numbers.flat_map(|number| f64::from(number).to_le_bytes()).collect(), block)
        };
        for (one, two) in [(3, 3), (3, 5), (5, 3), (1, 10), (10, 1), (4, 7)] {
            for (a, b) in [(single(one), single(two)), (single(one), double(9, two)), (double(9, one), single(two))] {
                let found = weight_diff("w", Some(&a), Some(&b)).unwrap();
                assert_eq!((found.equal, found.max_abs_error, found.zeros_before, found.zeros_after), (true, Some(0.0), 1, 1), "{one} {two}");
            }
            let near = |value: f64| weight(DType::F64, [value; 10].iter().flat_map(|number| number.to_le_bytes()).collect(), two);
            let ones = weight(DType::F32, [1f32; 10].iter().flat_map(|number| number.to_le_bytes()).collect(), one);
            let is_equal = |a: &Weight, b: &Weight| weight_diff("w", Some(a), Some(b)).unwrap().equal;
            assert!(is_equal(&ones, &near(1.0)) && !is_equal(&ones, &near(1.0 + 1e-9)) && !is_equal(&near(1.0 + 1e-9), &near(1.0)));
            let found = weight_diff("w", Some(&single(one)), Some(&double(11, two))).unwrap();
            assert_eq!((found.equal, found.max_abs_error), (false, Some(2.0)), "{one} {two}");
        }
    }
}

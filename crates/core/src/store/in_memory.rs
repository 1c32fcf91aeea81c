//! Weights whose values are in memory: computed by a pass and not stored in a file.

use std::sync::Arc;

use super::{Block, BlockSink, DType, Encoding, Granularity, Origin, QuantizationSpec, View, Weight, WeightSource, least_common_multiple};
use crate::error::{Error, Result};
use crate::kernel::{convert, packing};

/// A small tensor in memory.
pub struct Bytes {
    /// Element type.
    pub dtype: DType,
    /// The elements.
    pub bytes: Vec<u8>,
}

impl WeightSource for Bytes {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        sink(Block::untouched(View::dense(self.dtype, &self.bytes)))
    }
}

/// Float values that replace those of `before`, which is visited too, for comparison.
struct InMemory {
    before: Weight,
    dtype: DType,
    bytes: Vec<u8>,
}

impl WeightSource for InMemory {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (mut at, size) = (0, (self.dtype.bitsize() / 8).max(1));
        self.before.visit(unit, &mut |block| {
            let from = at;
            at += block.now.elements() * size;
            sink(block.becomes(View::dense(self.dtype, &self.bytes[from..at])))
        })
    }
}

/// As [`InMemory`], with values that are computed each time the weight is visited.
struct LazyValues<F> {
    before: Weight,
    name: String,
    values: F,
}

impl<F: Fn() -> Result<Vec<f32>> + Send + Sync> WeightSource for LazyValues<F> {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.before.with_values(&self.name, &(self.values)()?)?.visit(unit, sink)
    }
}

/// Codes with their scales in memory.
struct InMemoryCodes {
    before: Weight,
    dtype: DType,
    affine: QuantizationSpec,
    row: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    zero_points: Vec<u8>,
    global_scale: f32,
}

impl WeightSource for InMemoryCodes {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let run = self.affine.granularity.run(self.row, self.codes.len());
        let size = self.affine.codes.entries() * self.affine.scale_dtype.bitsize() / 8;
        let mut at = 0;
        self.before.visit(least_common_multiple(unit, self.row), &mut |block| {
            let first = at;
            at += block.now.elements();
            let (from, to) = match self.affine.granularity {
                Granularity::Tensor => (0, 1),
                _ => (first / run, at / run),
            };
            let zero_points = if self.affine.symmetric { &[][..] } else { &self.zero_points[from..to] };
            sink(block.becomes(View {
                dtype: self.dtype,
                values: &self.codes[first..at],
                affine: Some((&self.affine, self.row)),
                scales: &self.scales[from * size..to * size],
                zero_points,
                global_scale: self.global_scale,
                blocks: &[],
            }))
        })
    }
}

/// Scales and zero points of a quantized weight, one per group of elements that share a scale. For
/// palettes, the values of one palette per group.
#[derive(Debug, Clone, PartialEq)]
pub struct Scales {
    /// Number of elements per scale.
    pub run: usize,
    /// The scales.
    pub scales: Vec<f32>,
    /// Zero points.
    pub zero_points: Vec<f32>,
    /// Divisor of the scales (NVFP4); otherwise 1.
    pub global_scale: f32,
}

fn not_computed(name: &str, dtype: DType) -> Error {
    Error::tensor(name, format!("is {dtype}, but computed weights must be F32, F16 or BF16"), "convert it to F32 first")
}

fn encoded(name: &str, dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let mut bytes = vec![0; values.len() * dtype.bitsize() / 8];
    if convert::from_f32(dtype, values, &mut bytes) { Ok(bytes) } else { Err(not_computed(name, dtype)) }
}

impl Weight {
    /// A new weight with these values. `name` is used in errors. Fails if the dtype is not F32, F16 or BF16.
    pub fn computed(name: &str, dtype: DType, shape: Vec<usize>, values: &[f32]) -> Result<Weight> {
        Ok(Weight::new(dtype, shape, Encoding::Dense, Arc::new(Bytes { dtype, bytes: encoded(name, dtype, values)? })))
    }

    /// Fails if other values of a weight of this dtype cannot be computed.
    pub fn require_computable(&self, name: &str) -> Result<()> {
        encoded(name, self.dtype, &[]).map(drop)
    }

    /// The same weight with other values, in its own dtype. Fails if the number of values is wrong, or the
    /// dtype is not F32, F16 or BF16.
    pub fn with_values(&self, name: &str, values: &[f32]) -> Result<Weight> {
        if self.elements() != values.len() {
            return Err(not_computed(name, self.dtype));
        }
        let bytes = encoded(name, self.dtype, values)?;
        Ok(self.then(self.dtype, Encoding::Dense, Arc::new(InMemory { before: self.clone(), dtype: self.dtype, bytes })).with_origin(Origin::Learned))
    }

    /// The same weight with `count` values that are recomputed for each visit, because they are too
    /// large to stay in memory.
    pub fn with_lazy_values(&self, name: &str, count: usize, values: impl Fn() -> Result<Vec<f32>> + Send + Sync + 'static) -> Result<Weight> {
        if self.elements() != count || !convert::from_f32(self.dtype, &[], &mut []) {
            return Err(not_computed(name, self.dtype));
        }
        let source = LazyValues { before: self.clone(), name: name.to_owned(), values };
        Ok(self.then(self.dtype, Encoding::Dense, Arc::new(source)).with_origin(Origin::Learned))
    }

    /// The scales of a quantized weight. `None` if it is dense.
    pub fn scales(&self) -> Result<Option<Scales>> {
        let Encoding::Quantized(affine) = &self.encoding else { return Ok(None) };
        let mut found = Scales { run: affine.granularity.run(self.row(), self.elements()), scales: Vec::new(), zero_points: Vec::new(), global_scale: 1.0 };
        self.visit(self.row(), &mut |block| {
            let count = if affine.granularity == Granularity::Tensor { usize::from(found.scales.is_empty()) } else { block.now.elements() / found.run };
            found.global_scale = block.now.global_scale;
            if affine.codes.is_palette() {
                let at = found.scales.len();
                found.scales.resize(at + count * affine.codes.entries(), 0.0);
                let decoded = convert::decode(affine.scale_dtype, block.now.scales, &mut found.scales[at..]);
                debug_assert!(decoded, "palettes are floats");
                return Ok(());
            }
            let view = super::View { global_scale: 1.0, ..block.now };
            for (scale, zero) in (0..count).map(|index| view.parameters(affine, index)) {
                found.scales.push(scale);
                found.zero_points.push(zero);
            }
            Ok(())
        })?;
        Ok(Some(found))
    }

    /// The same quantized weight with other, learned codes and scales. Fails if the weight is not quantized,
    /// or the number of codes or scales is wrong.
    pub fn with_integers(&self, name: &str, integers: Vec<i8>, scales: &Scales) -> Result<Weight> {
        let Encoding::Quantized(affine) = &self.encoding else { return Err(Error::tensor(name, "is not quantized", "")) };
        Ok(self.quantized(name, affine.clone(), integers, scales)?.with_origin(Origin::Learned))
    }

    /// Replaces this weight by codes `[out, in]` and their scales. Differences are measured relative to
    /// this weight. Fails if the number of codes or scales does not match the shape and `affine`, or the
    /// codes exceed their bit width.
    pub fn quantized(&self, name: &str, affine: QuantizationSpec, integers: Vec<i8>, scales: &Scales) -> Result<Weight> {
        let mut bytes = vec![0; scales.scales.len() * affine.scale_dtype.bitsize() / 8];
        let row = self.row();
        let count = if affine.granularity == Granularity::Tensor { 1 } else { affine.granularity.groups(row) * self.elements().checked_div(row).unwrap_or(0) };
        let divides = affine.granularity.run(self.row(), self.elements()) * count == self.elements();
        let zero_points: Vec<u8> = scales.zero_points.iter().map(|zero| *zero as i8 as u8).collect();
        let zeros = if affine.symmetric { zero_points.iter().all(|zero| *zero == 0) } else { zero_points.len() == count };
        let fits = divides && integers.len() == self.elements() && scales.scales.len() == count * affine.codes.entries() && zeros;
        if !fits || !convert::encode_scales(affine.scale_dtype, &scales.scales, &mut bytes) {
            return Err(Error::tensor(name, "has a wrong number of elements, or scales of a wrong number or dtype", ""));
        }
        let dtype = affine.value_dtype(self.dtype);
        let integers: Vec<u8> = integers.into_iter().map(|integer| integer as u8).collect();
        if affine.codes.is_integer() && !packing::fits(&integers, affine.codes.bits()) {
            return Err(Error::tensor(name, format!("contains integers that do not fit {}", affine.codes), ""));
        }
        let source = InMemoryCodes {
            before: self.clone(),
            dtype,
            affine: affine.clone(),
            row,
            codes: integers,
            scales: bytes,
            zero_points,
            global_scale: scales.global_scale,
        };
        Ok(self.then(dtype, Encoding::Quantized(affine), Arc::new(source)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{ActivationScheme, Block, Codes, StatedEncoding, block_elements};

    /// Zeros, in blocks like those of a file.
    struct Zeros(DType, usize);

    impl WeightSource for Zeros {
        fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
            let size = self.0.bitsize() / 8;
            let bytes = vec![0; self.1 * size];
            bytes.chunks(block_elements(unit) * size).try_for_each(|part| sink(Block::untouched(View::dense(self.0, part))))
        }
    }

    #[test]
    fn integers_are_returned_with_their_scales() {
        for granularity in [Granularity::Tensor, Granularity::Channel, Granularity::Group(50)] {
            for symmetric in [true, false] {
                let affine = QuantizationSpec { codes: Codes::INT8, granularity, symmetric, scale_dtype: DType::F32, activations: ActivationScheme::None };
                let (rows, row) = (3000, 100);
                let weight = Weight::new(DType::F32, vec![rows, row], Encoding::Quantized(affine), Arc::new(Zeros(DType::F32, rows * row)));
                let run = granularity.run(row, rows * row);
                let count = rows * row / run;
                let zero = |i: usize| if symmetric { 0.0 } else { (i % 11) as f32 - 5.0 };
                let scales =
                    Scales { run, scales: (1..=count).map(|i| i as f32 / 64.0).collect(), zero_points: (0..count).map(zero).collect(), global_scale: 1.0 };
                let integers: Vec<i8> = (0..rows * row).map(|i| (i * 31 % 255) as u8 as i8).collect();
                let held = weight.with_integers("w", integers.clone(), &scales).unwrap();
                assert_eq!(held.scales().unwrap().unwrap(), scales);
                let values = held.floats("w").unwrap();
                for (i, value) in values.iter().enumerate() {
                    assert_eq!(*value, (f32::from(integers[i]) - scales.zero_points[i / run]) * scales.scales[i / run]);
                }
            }
        }
    }

    #[test]
    fn computed_integers_survive_a_file_for_every_bit_width() {
        use crate::store::writer::{FileLayout, Item, write};
        use crate::store::{Checkpoint, StorageFormat, Weights};
        use crate::work::{Cancel, Silent, Work};

        let (rows, row) = (45, 96);
        let before = Weight::new(DType::BF16, vec![rows, row], Encoding::Dense, Arc::new(Zeros(DType::BF16, rows * row)));
        for (bits, granularity, symmetric) in
            (2..=8).flat_map(|bits| [Granularity::Channel, Granularity::Group(32)].into_iter().flat_map(move |by| [(bits, by, true), (bits, by, false)]))
        {
            let folder = tempfile::tempdir().unwrap();
            let [least, most] = packing::range(bits).map(i64::from);
            let affine =
                QuantizationSpec { codes: Codes::Integer(bits), granularity, symmetric, scale_dtype: DType::BF16, activations: ActivationScheme::None };
            let integers: Vec<i8> = (0..rows * row).map(|i| (least + i as i64 * 31 % (most - least + 1)) as i8).collect();
            let run = granularity.run(row, rows * row);
            let zero = |i: usize| if symmetric { 0.0 } else { (least + i as i64 % (most - least + 1)) as f32 };
            let count = rows * row / run;
            let scales =
                Scales { run, scales: (1..=count).map(|i| i as f32 / 128.0).collect(), zero_points: (0..count).map(zero).collect(), global_scale: 1.0 };
            let held = before.quantized("w", affine.clone(), integers.clone(), &scales).unwrap();
            assert_eq!((held.describe().contains(&format!("int{bits} ")), held.origin), (true, Origin::File));
            let items = [Item { name: "w".into(), weight: held.clone(), storage_format: StorageFormat::Packed }];
            let layout = FileLayout::new(&items, &Default::default(), &[], u64::MAX).unwrap();
            write(&crate::files::Destination::local(folder.path()), &items, &layout, None, &Work { threads: 1, progress: &Silent, cancel: &Cancel::default() })
                .unwrap();
            let read =
                Weights::from_checkpoint_with(Checkpoint::open(folder.path()).unwrap(), &|_| StatedEncoding { bits: Some(bits), ..StatedEncoding::default() })
                    .unwrap();
            let again = before.restored("w", read.get("w").unwrap().clone());
            assert_eq!(again.encoding, Encoding::Quantized(affine.clone()));
            assert_eq!((again.scales().unwrap().unwrap(), again.floats("w").unwrap()), (scales.clone(), held.floats("w").unwrap()));
            if bits < 8 {
                let wide = integers.iter().map(|q| q.saturating_mul(2)).collect();
                assert!(before.quantized("w", affine.clone(), wide, &scales).is_err(), "{bits}");
            }
            assert!(before.quantized("w", affine, integers[1..].to_vec(), &scales).is_err());
        }
    }

    #[test]
    fn values_are_rounded_to_the_dtype() {
        let weight = Weight::new(DType::BF16, vec![2], Encoding::Dense, Arc::new(Zeros(DType::BF16, 2)));
        assert_eq!(weight.with_values("w", &[1.0, 1.0 + 1.0 / 512.0]).unwrap().floats("w").unwrap(), [1.0, 1.0]);
        assert!(weight.with_values("w", &[1.0]).is_err());
    }
}

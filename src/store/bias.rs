//! A bias as it is added to sums of integers: in units of the products.

use std::sync::{Arc, OnceLock};

use super::{Block, BlockSink, DType, Encoding, Granularity, View, Weight, WeightSource};
use crate::error::{Error, Result};

/// The forms of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasForm {
    /// `round(bias / (input scale · weight scale))`, as I32.
    Integers,
    /// Those products of scales, one for each output, as F32.
    Scales,
    /// What the integers stand for, as F32: a network of floats then computes what one of integers does.
    Floats,
}

/// A bias, and the layer whose products it is added to.
pub struct Bias {
    /// Name, for errors.
    pub name: String,
    /// The bias as floats, `[out]`.
    pub values: Weight,
    /// The quantized weight of its layer.
    pub weight: Weight,
    /// Scale of the layer's input.
    pub input_scale: f32,
    /// What is wanted of it.
    pub form: BiasForm,
}

/// A form is asked for again and again, by the executor and by every format, and making it rounds the whole weight.
struct Remembered {
    bias: Bias,
    bytes: OnceLock<Vec<u8>>,
}

impl Bias {
    /// That form as a weight of its own.
    pub fn weight(self) -> Weight {
        Weight::new(self.dtype(), self.values.shape.clone(), Encoding::Dense, Arc::new(Remembered { bias: self, bytes: OnceLock::new() }))
    }

    fn dtype(&self) -> DType {
        if self.form == BiasForm::Integers { DType::I32 } else { DType::F32 }
    }

    /// Scales of the sums, one for each output.
    fn products(&self) -> Result<Vec<f32>> {
        let mut scales = Vec::new();
        self.weight.visit(1, &mut |block| {
            if let Some((affine, _)) = block.now.affine {
                let count = block.now.scales.len() / (affine.scale_dtype.bitsize() / 8).max(1);
                scales.extend((0..count).map(|index| block.now.parameters(affine, index).0 * self.input_scale));
            }
            Ok(())
        })?;
        let tensor = matches!(&self.weight.encoding, Encoding::Affine(affine) if affine.granularity == Granularity::Tensor);
        if tensor && let Some(one) = scales.first().copied() {
            scales = vec![one; self.values.elements()];
        }
        if scales.len() != self.values.elements() {
            return Err(Error::tensor(&self.name, format!("has {} elements, its layer {} scales", self.values.elements(), scales.len()), ""));
        }
        Ok(scales)
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let scales = self.products()?;
        if self.form == BiasForm::Scales {
            return Ok(scales.iter().flat_map(|scale| scale.to_le_bytes()).collect());
        }
        let values = self.values.floats(&self.name)?;
        let mut bytes = Vec::with_capacity(4 * values.len());
        for (value, scale) in values.iter().zip(&scales) {
            let units = (f64::from(*value) / f64::from(*scale)).round_ties_even();
            if self.form == BiasForm::Floats {
                let whole = units as f32 * scale;
                bytes.extend(if whole.is_finite() { whole } else { *value }.to_le_bytes());
                continue;
            }
            if units.is_nan() || units.abs() > f64::from(i32::MAX) {
                return Err(Error::tensor(
                    &self.name,
                    format!("holds {value:e}, too large beside sums in steps of {scale:e}"),
                    "add the layer's weight to `ignore`: its outputs are nearly constant",
                ));
            }
            bytes.extend((units as i32).to_le_bytes());
        }
        Ok(bytes)
    }
}

impl WeightSource for Remembered {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        if self.bytes.get().is_none() {
            let _ = self.bytes.set(self.bias.bytes()?);
        }
        self.bytes.get().map_or(Ok(()), |bytes| sink(Block::untouched(View::dense(self.bias.dtype(), bytes))))
    }
}

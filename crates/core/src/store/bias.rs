//! Biases of layers with integer products, in units of the accumulator.

use std::sync::{Arc, OnceLock};

use super::{Block, BlockSink, DType, Encoding, Granularity, View, Weight, WeightSource};
use crate::error::{Error, Result};

/// Representation of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasForm {
    /// `round(bias / (input scale · weight scale))`, as I32.
    Integers,
    /// The products `input scale · weight scale`, one per output, as F32.
    Scales,
    /// The dequantized integers as F32, so that a float network computes the same result as an integer
    /// one.
    Floats,
}

/// A bias with its layer.
pub struct Bias {
    /// Name for errors.
    pub name: String,
    /// The bias as floats, `[out]`.
    pub values: Weight,
    /// The quantized weight of the layer.
    pub weight: Weight,
    /// Scale of the layer's input.
    pub input_scale: f32,
    /// The requested representation.
    pub form: BiasForm,
}

/// Caches the representation, because the executor and the formats read it repeatedly and its
/// computation visits the complete weight.
struct CachedBias {
    bias: Bias,
    bytes: OnceLock<Vec<u8>>,
}

impl Bias {
    /// The representation as a weight.
    pub fn weight(self) -> Weight {
        Weight::new(self.dtype(), self.values.shape.clone(), Encoding::Dense, Arc::new(CachedBias { bias: self, bytes: OnceLock::new() }))
    }

    fn dtype(&self) -> DType {
        if self.form == BiasForm::Integers { DType::I32 } else { DType::F32 }
    }

    /// Scale of the accumulator for each output.
    fn products(&self) -> Result<Vec<f32>> {
        let mut scales = Vec::new();
        self.weight.visit(1, &mut |block| {
            if let Some((affine, _)) = block.now.affine {
                let count = block.now.scales.len() / (affine.scale_dtype.bitsize() / 8).max(1);
                scales.extend((0..count).map(|index| block.now.parameters(affine, index).0 * self.input_scale));
            }
            Ok(())
        })?;
        let tensor = matches!(&self.weight.encoding, Encoding::Quantized(affine) if affine.granularity == Granularity::Tensor);
        if tensor && let Some(one) = scales.first().copied() {
            scales = vec![one; self.values.elements()];
        }
        if scales.len() != self.values.elements() {
            return Err(Error::tensor(&self.name, format!("has {} elements, but its layer has {} scales", self.values.elements(), scales.len()), ""));
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
                let rounded = units as f32 * scale;
                bytes.extend(if rounded.is_finite() { rounded } else { *value }.to_le_bytes());
                continue;
            }
            if units.is_nan() || units.abs() > f64::from(i32::MAX) {
                return Err(Error::tensor(
                    &self.name,
                    format!("contains {value:e}, which is too large for an int32 accumulator with scale {scale:e}"),
                    "add the layer's weight to `ignore`: its outputs are nearly constant",
                ));
            }
            bytes.extend((units as i32).to_le_bytes());
        }
        Ok(bytes)
    }
}

impl WeightSource for CachedBias {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        if self.bytes.get().is_none() {
            let _ = self.bytes.set(self.bias.bytes()?);
        }
        self.bytes.get().map_or(Ok(()), |bytes| sink(Block::untouched(View::dense(self.bias.dtype(), bytes))))
    }
}

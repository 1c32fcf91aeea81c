//! A bias as it is added to sums of integers: 32 bits, in units of the products.

use std::sync::Arc;

use super::{Block, BlockSink, DType, Encoding, Granularity, View, Weight, WeightSource};
use crate::error::{Error, Result};

/// `round(bias / (input scale · weight scale))`, or those products of scales, one for each output.
pub struct Bias {
    /// Name, for errors.
    pub name: String,
    /// The bias as floats, `[out]`.
    pub values: Weight,
    /// The quantized weight of its layer.
    pub weight: Weight,
    /// Scale of the layer's input.
    pub input_scale: f32,
    /// Whether the scales are wanted, and not the integers.
    pub scales: bool,
}

impl Bias {
    /// The integers (I32) or scales (F32) as a weight of their own.
    pub fn weight(self) -> Weight {
        let dtype = if self.scales { DType::F32 } else { DType::I32 };
        Weight::new(dtype, self.values.shape.clone(), Encoding::Dense, Arc::new(self))
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
}

impl WeightSource for Bias {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        let scales = self.products()?;
        if self.scales {
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            return sink(Block::untouched(View::dense(DType::F32, &bytes)));
        }
        let values = self.values.floats(&self.name)?;
        let mut bytes = Vec::with_capacity(4 * values.len());
        for (value, scale) in values.iter().zip(&scales) {
            let units = (f64::from(*value) / f64::from(*scale)).round_ties_even();
            if units.is_nan() || units.abs() > f64::from(i32::MAX) {
                return Err(Error::tensor(
                    &self.name,
                    format!("holds {value:e}, too large beside sums in steps of {scale:e}"),
                    "add the layer's weight to `ignore`: its outputs are nearly constant",
                ));
            }
            bytes.extend((units as i32).to_le_bytes());
        }
        sink(Block::untouched(View::dense(DType::I32, &bytes)))
    }
}

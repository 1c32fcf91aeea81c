//! Weights with the product of two factors added.

use std::sync::Arc;

use super::{BlockSink, DType, Encoding, Origin, Transposed, Weight, WeightSource, changed_floats};
use crate::error::{Error, Result};

/// A matrix and the factors of a low-rank term.
pub struct Corrected {
    /// Name for errors.
    pub name: String,
    /// The matrix, `[out, in]`, which must be floats.
    pub upstream: Weight,
    /// The factor that is applied first, `[rank, in]`.
    pub inner: Weight,
    /// The factor that is applied last, `[out, rank]`.
    pub outer: Weight,
}

impl Corrected {
    /// The same term for a matrix that is stored as `[in, out]`.
    #[must_use]
    pub fn input_major(self) -> Corrected {
        let transposed = |upstream| Transposed { upstream }.weight();
        let Corrected { name, upstream, inner, outer } = self;
        Corrected { name, upstream, inner: transposed(outer), outer: transposed(inner) }
    }

    /// The sum of the matrix and the product `outer · inner`, in the dtype of the matrix; F32 for F64.
    ///
    /// # Errors
    /// The shapes do not fit.
    pub fn weight(self) -> Result<Weight> {
        let dtype = if self.upstream.dtype == DType::F64 { DType::F32 } else { self.upstream.dtype };
        self.weight_as(dtype)
    }

    /// As [`weight`](Corrected::weight), in another dtype.
    ///
    /// # Errors
    /// The shapes do not fit.
    pub fn weight_as(self, dtype: DType) -> Result<Weight> {
        let Corrected { name, upstream, inner, outer } = &self;
        let fits = match (&upstream.shape[..], &inner.shape[..], &outer.shape[..]) {
            ([rows, columns], [rank, inputs], [outputs, shared]) => (rows, columns, rank) == (outputs, inputs, shared),
            _ => false,
        };
        if !fits {
            let reason = format!("has the shape {:?}, but the factors of its correction have {:?} and {:?}", upstream.shape, inner.shape, outer.shape);
            return Err(Error::tensor(name, reason, "use the adapter that was written with these weights"));
        }
        let mut sum = upstream.clone();
        for factor in [inner, outer] {
            sum.stored_bytes += factor.stored_bytes;
            sum.stored_as.extend(factor.stored_as.iter().cloned());
        }
        Ok(sum.then(dtype, Encoding::Dense, Arc::new(Typed { corrected: self, dtype })).with_origin(Origin::Rescaled))
    }
}

struct Typed {
    corrected: Corrected,
    dtype: DType,
}

impl WeightSource for Typed {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let Corrected { name, upstream, inner, outer } = &self.corrected;
        let (columns, rank) = (upstream.row().max(1), outer.row());
        let (inner, outer) = (inner.floats(name)?, outer.floats(name)?);
        changed_floats::visit(name, upstream, self.dtype, unit, sink, |first, values| {
            let (mut at, mut rest) = (first, values);
            // A block may begin and end within a row.
            while !rest.is_empty() {
                let (row, column) = (at / columns, at % columns);
                let length = (columns - column).min(rest.len());
                let (part, after) = std::mem::take(&mut rest).split_at_mut(length);
                for (factor, inner) in outer[row * rank..(row + 1) * rank].iter().zip(inner.chunks_exact(columns)) {
                    part.iter_mut().zip(&inner[column..]).for_each(|(value, x)| *value += factor * x);
                }
                (at, rest) = (at + length, after);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Computed;

    #[test]
    fn the_product_of_the_factors_is_added() {
        let weight = |shape: [usize; 2], scale: f32| {
            let count = shape[0] * shape[1];
            Computed { values: move || Ok((0..count).map(|i| scale * (i % 7) as f32).collect()) }.weight(shape.to_vec())
        };
        let corrected = |inner| Corrected { name: "w".into(), upstream: weight([3, 5], 1.0), inner, outer: weight([3, 2], 0.25) };
        let sum = corrected(weight([2, 5], 0.5)).weight().unwrap();
        let found = sum.floats("w").unwrap();
        let at = |weight: &Weight, row: usize, column: usize| weight.floats("").unwrap()[row * weight.shape[1] + column];
        let (inner, outer) = (weight([2, 5], 0.5), weight([3, 2], 0.25));
        for (row, column) in (0..3).flat_map(|row| (0..5).map(move |column| (row, column))) {
            let product: f32 = (0..2).map(|k| at(&outer, row, k) * at(&inner, k, column)).sum();
            assert_eq!(found[row * 5 + column], at(&weight([3, 5], 1.0), row, column) + product);
        }
        let transposed = Transposed { upstream: weight([3, 5], 1.0) }.weight();
        let sum = Corrected { upstream: transposed, ..corrected(weight([2, 5], 0.5)) }.input_major().weight().unwrap();
        assert_eq!((Transposed { upstream: sum }.weight().floats("w").unwrap(), found.len()), (found, 15));
        assert!(corrected(weight([3, 5], 0.5)).weight().unwrap_err().to_string().contains("the factors of its correction"));
    }
}

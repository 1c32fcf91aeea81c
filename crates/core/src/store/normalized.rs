//! Matrices whose outputs have given norms.

use std::sync::Arc;

use super::{BlockSink, DType, Encoding, Origin, Scaled, Weight, WeightSource};
use crate::error::{Error, Result};

/// A matrix, and the norms that the weights of each output get.
pub struct Normalized {
    /// Name for errors.
    pub name: String,
    /// The matrix, which must be floats.
    pub upstream: Weight,
    /// The norms, one for each output.
    pub norms: Weight,
    /// Whether the matrix is stored as `[in, out]`.
    pub input_major: bool,
}

impl Normalized {
    /// The matrix with these norms as a weight of dtype `dtype`. Outputs of norm zero stay zero.
    pub fn weight(self, dtype: DType) -> Weight {
        let upstream = self.upstream.clone();
        upstream.then(dtype, Encoding::Dense, Arc::new(Typed { normalized: self, dtype })).with_origin(Origin::Rescaled)
    }
}

/// The Euclidean norm of the weights of each output of a matrix of floats. `input_major` states that it is
/// stored as `[in, out]`.
///
/// # Errors
/// The values are not floats.
pub fn output_norms(name: &str, matrix: &Weight, input_major: bool) -> Result<Vec<f64>> {
    let outputs = matrix.shape.get(usize::from(input_major)).copied().unwrap_or(0);
    let row = matrix.row().max(1);
    let mut squares = vec![0f64; outputs];
    let (mut at, mut floats, mut values) = (0, true, Vec::new());
    matrix.visit(1, &mut |block| {
        values.resize(block.now.elements(), 0f32);
        floats &= block.now.decode(0, &mut values);
        for value in &values {
            let output = if input_major { at % row } else { at / row };
            if let Some(sum) = squares.get_mut(output) {
                *sum += f64::from(*value).powi(2);
            }
            at += 1;
        }
        Ok(())
    })?;
    if !floats {
        return Err(Error::tensor(name, format!("is {}, expected F16, BF16 or F32", matrix.dtype), "convert it to F32 first"));
    }
    Ok(squares.into_iter().map(f64::sqrt).collect())
}

struct Typed {
    normalized: Normalized,
    dtype: DType,
}

impl WeightSource for Typed {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let Normalized { name, upstream, norms, input_major } = &self.normalized;
        let wanted = norms.floats(name)?;
        let found = output_norms(name, upstream, *input_major)?;
        if wanted.len() != found.len() {
            return Err(Error::tensor(name, format!("has {} outputs, but there are {} norms", found.len(), wanted.len()), "report this error"));
        }
        let factor = |(wanted, found): (f32, f64)| if found > 0.0 { (f64::from(wanted) / found) as f32 } else { 0.0 };
        let factors = Some(Arc::new(wanted.into_iter().zip(found).map(factor).collect::<Vec<f32>>()));
        let (rows, columns) = if *input_major { (None, factors) } else { (factors, None) };
        Scaled { name: name.clone(), upstream: upstream.clone(), rows, columns, offset: 0.0 }.weight(self.dtype).visit(unit, sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Computed, Transposed};

    #[test]
    fn outputs_get_the_requested_norms() {
        let matrix = Computed { values: || Ok(vec![3.0, 4.0, 0.0, 0.0, 0.0, 2.0]) }.weight(vec![3, 2]);
        let norms = Computed { values: || Ok(vec![10.0, 7.0, 0.5]) }.weight(vec![3]);
        let expected = [6.0, 8.0, 0.0, 0.0, 0.0, 0.5];
        let normalized = |upstream: Weight, input_major| Normalized { name: "w".into(), upstream, norms: norms.clone(), input_major }.weight(DType::F32);
        assert_eq!(normalized(matrix.clone(), false).floats("w").unwrap(), expected);
        let transposed = normalized(Transposed { upstream: matrix.clone() }.weight(), true);
        assert_eq!(Transposed { upstream: transposed }.weight().floats("w").unwrap(), expected);
        assert!(normalized(Transposed { upstream: matrix }.weight(), false).floats("w").unwrap_err().to_string().contains("2 outputs"));
    }
}

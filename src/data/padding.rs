//! Which tokens of a batch are padding.

use candle_core::DType;

use super::Batch;

/// Tokens that are none of any sample's.
pub(crate) struct Padding {
    /// `[batch, sequence]`; nothing where there is no padding.
    shape: Vec<usize>,
    kept: Vec<bool>,
}

impl Padding {
    /// Reads the mask of a batch, if it has one.
    ///
    /// # Errors
    /// It cannot be copied to main memory.
    pub fn of(batch: &Batch) -> candle_core::Result<Padding> {
        let Some(mask) = batch.mask() else { return Ok(Padding { shape: Vec::new(), kept: Vec::new() }) };
        let values = mask.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
        let kept: Vec<bool> = values.into_iter().map(|value| value != 0).collect();
        Ok(Padding { shape: if kept.contains(&false) { mask.dims().to_vec() } else { Vec::new() }, kept })
    }

    /// For values with a row for each token: which rows are a sample's, where there is padding.
    pub fn kept(&self, shape: &[usize]) -> Option<&[bool]> {
        (shape.len() == 3 && !self.shape.is_empty() && shape.starts_with(&self.shape)).then_some(&self.kept)
    }
}

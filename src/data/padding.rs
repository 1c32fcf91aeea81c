//! Which tokens of a batch are padding.

use candle_core::{DType, Tensor};

use super::{Batch, Side};

/// Tokens that are none of any sample's, by the side that they are on.
pub(crate) struct Padding {
    read: Rows,
    said: Rows,
}

/// Those of one side.
#[derive(Default)]
struct Rows {
    /// `[batch, sequence]`; nothing where there is no padding.
    shape: Vec<usize>,
    kept: Vec<bool>,
}

impl Rows {
    fn of(mask: Option<&Tensor>) -> candle_core::Result<Rows> {
        let Some(mask) = mask else { return Ok(Rows::default()) };
        let values = mask.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
        let kept: Vec<bool> = values.into_iter().map(|value| value != 0).collect();
        Ok(Rows { shape: if kept.contains(&false) { mask.dims().to_vec() } else { Vec::new() }, kept })
    }
}

impl Padding {
    /// Reads the masks of a batch, where it has some.
    ///
    /// # Errors
    /// They cannot be copied to main memory.
    pub fn of(batch: &Batch) -> candle_core::Result<Padding> {
        Ok(Padding { read: Rows::of(batch.mask(Side::Read))?, said: Rows::of(batch.mask(Side::Said))? })
    }

    /// For values of a side with a row for each token: which rows are a sample's, where there is padding.
    pub fn kept(&self, side: Side, shape: &[usize]) -> Option<&[bool]> {
        let rows = if side == Side::Read { &self.read } else { &self.said };
        (shape.len() == 3 && !rows.shape.is_empty() && shape.starts_with(&rows.shape)).then_some(&rows.kept)
    }
}

//! Which tokens of a batch are padding.

use std::borrow::Cow;

use candle_core::{DType, Tensor};

use super::{Batch, Side, TokenAxis};

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

    /// Which rows of the last axis of a value belong to tokens that are not padding; none where the batch has no padding, or the value no
    /// row for each token.
    pub fn kept(&self, TokenAxis { side, axis }: TokenAxis, shape: &[usize]) -> Option<Cow<'_, [bool]>> {
        let rows = if side == Side::Read { &self.read } else { &self.said };
        let (axis, last) = (axis?, shape.len().checked_sub(1)?);
        let [batch, length] = rows.shape[..] else { return None };
        if axis >= last || shape.first() != Some(&batch) || shape.get(axis) != Some(&length) {
            return None;
        }
        // The mask of a sample is repeated for each head before the token axis, and each element of it for the axes after.
        let (before, after) = (shape.get(1..axis)?.iter().product(), shape.get(axis.checked_add(1)?..last)?.iter().product());
        if (before, after) == (1usize, 1usize) {
            return Some(Cow::Borrowed(&rows.kept));
        }
        let sample = |kept: &[bool]| kept.iter().flat_map(|kept| std::iter::repeat_n(*kept, after)).collect::<Vec<_>>().repeat(before);
        Some(Cow::Owned(rows.kept.chunks(length.max(1)).flat_map(sample).collect()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::References;

    /// The rows that are kept are those of the tokens, whatever axes lie between the batch and the tokens, or after them.
    #[test]
    fn rows_of_padding_are_found_in_values_of_any_rank() {
        let mask = Tensor::new(&[[1i64, 1, 0], [1, 0, 0]], &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("attention_mask".to_owned(), mask)].into(), references: References::None, samples: 2 };
        let padding = Padding::of(&batch).unwrap();
        for (shape, axis) in [(&[2, 3, 5][..], 1), (&[2, 4, 3, 5], 2), (&[2, 3, 4, 5], 1), (&[2, 2, 3, 2, 5], 2)] {
            let kept = padding.kept(TokenAxis { side: Side::Read, axis: Some(axis) }, shape).unwrap();
            let strides: Vec<usize> = (0..shape.len() - 1).map(|at| shape[at + 1..shape.len() - 1].iter().product()).collect();
            let wanted = |row: usize| [[true, true, false], [true, false, false]][row / strides[0]][row / strides[axis] % 3];
            assert_eq!(*kept, (0..shape[..shape.len() - 1].iter().product()).map(wanted).collect::<Vec<_>>(), "{shape:?}");
        }
        for (side, axis, shape) in
            [(Side::Read, None, &[2, 3, 5][..]), (Side::Said, Some(1), &[2, 3, 5]), (Side::Read, Some(2), &[2, 4, 3]), (Side::Read, Some(1), &[2, 4, 5])]
        {
            assert_eq!(padding.kept(TokenAxis { side, axis }, shape), None, "{shape:?}");
        }
    }
}

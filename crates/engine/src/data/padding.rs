//! Padding masks of a batch.

use std::borrow::Cow;

use candle_core::{DType, Tensor};

use super::{Batch, SequenceRole, TokenAxis};

/// Padding masks of the input sequence and of the decoder sequence.
pub struct Padding {
    input: Mask,
    decoder: Mask,
}

/// Padding mask of one sequence.
#[derive(Default)]
struct Mask {
    /// `[batch, sequence]`; empty if there is no padding.
    shape: Vec<usize>,
    is_token: Vec<bool>,
}

impl Mask {
    fn from_tensor(mask: Option<&Tensor>) -> candle_core::Result<Mask> {
        let Some(mask) = mask else { return Ok(Mask::default()) };
        let values = mask.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
        let is_token: Vec<bool> = values.into_iter().map(|value| value != 0).collect();
        Ok(Mask { shape: if is_token.contains(&false) { mask.dims().to_vec() } else { Vec::new() }, is_token })
    }
}

impl Padding {
    /// Reads the attention masks of a batch.
    pub fn from_batch(batch: &Batch) -> candle_core::Result<Padding> {
        Ok(Padding { input: Mask::from_tensor(batch.mask(SequenceRole::Input))?, decoder: Mask::from_tensor(batch.mask(SequenceRole::Decoder))? })
    }

    /// Returns which rows (along the last axis) of a value belong to tokens, not padding. `None` if the
    /// batch has no padding, or the axis is not the token axis of the value.
    pub fn token_rows(&self, TokenAxis { role, axis }: TokenAxis, shape: &[usize]) -> Option<Cow<'_, [bool]>> {
        let mask = if role == SequenceRole::Input { &self.input } else { &self.decoder };
        let (axis, last) = (axis?, shape.len().checked_sub(1)?);
        let [batch, length] = mask.shape[..] else { return None };
        if axis >= last || shape.first() != Some(&batch) || shape.get(axis) != Some(&length) {
            return None;
        }
        // The mask of a sample is repeated for each head before the token axis, and each element of it
        // for the axes after.
        let (before, after) = (shape.get(1..axis)?.iter().product(), shape.get(axis.checked_add(1)?..last)?.iter().product());
        if (before, after) == (1usize, 1usize) {
            return Some(Cow::Borrowed(&mask.is_token));
        }
        let repeat = |mask: &[bool]| mask.iter().flat_map(|is_token| std::iter::repeat_n(*is_token, after)).collect::<Vec<_>>().repeat(before);
        Some(Cow::Owned(mask.is_token.chunks(length.max(1)).flat_map(repeat).collect()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::References;

    /// Values may have further axes between the batch axis and the token axis, and after it.
    #[test]
    fn token_rows_are_found_in_values_of_any_rank() {
        let mask = Tensor::new(&[[1i64, 1, 0], [1, 0, 0]], &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("attention_mask".to_owned(), mask)].into(), references: References::None, samples: 2 };
        let padding = Padding::from_batch(&batch).unwrap();
        for (shape, axis) in [(&[2, 3, 5][..], 1), (&[2, 4, 3, 5], 2), (&[2, 3, 4, 5], 1), (&[2, 2, 3, 2, 5], 2)] {
            let rows = padding.token_rows(TokenAxis { role: SequenceRole::Input, axis: Some(axis) }, shape).unwrap();
            let strides: Vec<usize> = (0..shape.len() - 1).map(|at| shape[at + 1..shape.len() - 1].iter().product()).collect();
            let expected = |row: usize| [[true, true, false], [true, false, false]][row / strides[0]][row / strides[axis] % 3];
            assert_eq!(*rows, (0..shape[..shape.len() - 1].iter().product()).map(expected).collect::<Vec<_>>(), "{shape:?}");
        }
        for (role, axis, shape) in [
            (SequenceRole::Input, None, &[2, 3, 5][..]),
            (SequenceRole::Decoder, Some(1), &[2, 3, 5]),
            (SequenceRole::Input, Some(2), &[2, 4, 3]),
            (SequenceRole::Input, Some(1), &[2, 4, 5]),
        ] {
            assert_eq!(padding.token_rows(TokenAxis { role, axis }, shape), None, "{shape:?}");
        }
    }
}

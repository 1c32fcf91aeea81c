//! Records in a safetensors file: the token ids, with all texts concatenated, and the largest
//! log-probabilities of each token.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::{Record, Source};
use crate::error::{Error, Result};
use crate::store::{self, RawTensor};

/// Maximum length of a text in tokens.
const LONGEST: u64 = 1 << 24;

pub(super) struct Arrays {
    /// Position of the first token of each text, and their total number.
    begins: Vec<u64>,
    tokens: RawTensor,
    /// Token ids `[tokens, count]`; negative ids are not used.
    top_tokens: RawTensor,
    top_logprobs: RawTensor,
    /// Number of log-probabilities of a token.
    count: u64,
}

impl Arrays {
    pub fn open(path: &Path) -> Result<Arrays> {
        let mut file = store::Checkpoint::open(path)?.tensors;
        let mut take = |name: &str| file.remove(name).ok_or_else(|| Error::malformed(path, format!("has no tensor `{name}`")));
        let [lengths, tokens, top_tokens, top_logprobs] = [take("lengths")?, take("tokens")?, take("top_tokens")?, take("top_logprobs")?];
        if let Some(name) = file.keys().next() {
            return Err(Error::malformed(path, format!("has an unknown tensor `{name}`: lengths, tokens, top_tokens and top_logprobs are read")));
        }
        let (mut begins, mut end) = (vec![0u64], 0u64);
        for length in elements(&lengths, 0, lengths.elements() as u64)? {
            let length = u64::try_from(length).ok().filter(|length| (1..=LONGEST).contains(length));
            let length = length.ok_or_else(|| Error::malformed(path, format!("`lengths` must contain numbers from 1 to {LONGEST}")))?;
            end = end.saturating_add(length);
            begins.push(end);
        }
        let count = match (&top_tokens.shape[..], &top_logprobs.shape[..]) {
            ([rows, count], [other_rows, other]) if rows == other_rows && count == other && *rows as u64 == end => *count as u64,
            _ => return Err(Error::malformed(path, format!("`top_tokens` and `top_logprobs` must have the shape [{end}, count], the sum of `lengths`"))),
        };
        if tokens.shape != [top_tokens.shape.first().copied().unwrap_or_default()] {
            return Err(Error::malformed(path, format!("`tokens` must have the shape [{end}], the sum of `lengths`")));
        }
        Ok(Arrays { begins, tokens, top_tokens, top_logprobs, count })
    }

    /// The first token of a text, and their number.
    fn range(&self, location: u64) -> (u64, u64) {
        let at = |number: u64| usize::try_from(number).ok().and_then(|number| self.begins.get(number)).copied().unwrap_or_default();
        let begin = at(location);
        (begin, at(location.saturating_add(1)).saturating_sub(begin))
    }
}

/// Reads elements of a tensor in another type.
fn read<T: candle_core::WithDType>(tensor: &RawTensor, from: u64, count: u64) -> Result<Vec<T>> {
    let wrong = |e: &dyn std::fmt::Display| Error::malformed(tensor.path(), e);
    let dtype = DType::try_from(tensor.dtype).map_err(|e| wrong(&e))?;
    let size = dtype.size_in_bytes() as u64;
    let mut bytes = vec![0; usize::try_from(count.saturating_mul(size)).map_err(|e| wrong(&e))?];
    tensor.read_at(from.saturating_mul(size), &mut bytes)?;
    let values = Tensor::from_raw_buffer(&bytes, dtype, &[count as usize], &Device::Cpu).and_then(|values| values.to_dtype(T::DTYPE)?.to_vec1::<T>());
    values.map_err(|e| wrong(&e))
}

fn elements(tensor: &RawTensor, from: u64, count: u64) -> Result<Vec<i64>> {
    read::<i64>(tensor, from, count)
}

impl Source for Arrays {
    fn for_each(&self, each: &mut dyn FnMut(u64, &[i64]) -> Result<()>) -> Result<()> {
        for location in 0..(self.begins.len() as u64).saturating_sub(1) {
            let (begin, length) = self.range(location);
            each(location, &elements(&self.tokens, begin, length)?)?;
        }
        Ok(())
    }

    fn read(&self, location: u64) -> Result<Record> {
        let (begin, length) = self.range(location);
        let tokens = elements(&self.tokens, begin, length)?;
        let (from, all) = (begin.saturating_mul(self.count), length.saturating_mul(self.count));
        let (ids, values) = (elements(&self.top_tokens, from, all)?, read::<f32>(&self.top_logprobs, from, all)?);
        let width = usize::try_from(self.count).unwrap_or(usize::MAX).max(1);
        let rows = ids.chunks(width).zip(values.chunks(width)).map(|(ids, values)| {
            let row: Vec<(u32, f32)> = ids.iter().zip(values).filter_map(|(id, value)| Some((u32::try_from(*id).ok()?, *value))).collect();
            (!row.is_empty()).then_some(row)
        });
        Ok(Record { tokens, rows: rows.collect() })
    }

    fn describe(&self, location: u64) -> String {
        format!("{}, text {}", self.tokens.path().display(), location.saturating_add(1))
    }
}

//! Projections of latent vectors to the keys and values of all heads, as in DeepSeek-V3: `[heads · (keys +
//! values), latent]` in checkpoints, with the rows of the keys of each head before those of its values. GGUF
//! files store the keys as `[heads, latent, keys]`, and the values as `[heads, values, latent]`.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::fused_experts::expert_rows;
use super::input_major_experts::{Outputs, expert_outputs};
use super::joined::visit_floats;
use crate::error::{Error, Result};
use crate::store::{BlockSink, DType, Encoding, Weight, WeightSource};

/// The projections to keys and to values, with this number of rows of each head.
///
/// # Errors
/// The weight does not have the rows of `heads` heads.
pub fn latent_parts(weight: &Weight, heads: usize, [keys, values]: [usize; 2], name: &str) -> Result<[Weight; 2]> {
    let rows = keys.saturating_add(values);
    let [all, latent] = weight.shape[..] else { return Err(wrong(weight, heads, rows, name)) };
    if heads.checked_mul(rows) != Some(all) || latent == 0 || keys == 0 || values == 0 {
        return Err(wrong(weight, heads, rows, name));
    }
    let mut by_head = weight.clone();
    by_head.shape = vec![heads, rows, latent];
    let of_keys = Outputs { inputs: 0..keys, start: 0, step: 1, count: latent };
    Ok([expert_outputs(&by_head, of_keys, name), expert_rows(&by_head, keys, values, name)])
}

fn wrong(weight: &Weight, heads: usize, rows: usize, name: &str) -> Error {
    let reason = format!("has the shape {:?}, but config.json specifies {heads} heads with {rows} rows of keys and values", weight.shape);
    Error::tensor(name, reason, "the checkpoint and its config.json do not match")
}

/// The keys `[latent, keys]` and the values `[values, latent]` of each head.
struct LatentHeads {
    heads: Vec<[Weight; 2]>,
    latent: usize,
    dtype: DType,
    name: String,
}

/// The projection in the form of checkpoints, from the keys and the values of each head.
///
/// # Errors
/// The shapes do not match each other.
pub fn joined_latent(heads: Vec<Vec<Weight>>, name: &str) -> Result<Weight> {
    let mismatch = || Error::tensor(name, "has keys and values of different shapes", "the tensors do not match each other");
    let heads: Vec<[Weight; 2]> = heads.into_iter().map(<[Weight; 2]>::try_from).collect::<std::result::Result<_, _>>().map_err(|_| mismatch())?;
    let [keys, values] = heads.first().ok_or_else(mismatch)?;
    let (shapes, dtypes) = ((keys.shape.clone(), values.shape.clone()), [keys.dtype, values.dtype]);
    let ([latent, wide], [high, width]) = (&shapes.0[..], &shapes.1[..]) else { return Err(mismatch()) };
    if latent != width || !keys.is_float() || !values.is_float() || heads.iter().any(|[keys, values]| (&keys.shape, &values.shape) != (&shapes.0, &shapes.1)) {
        return Err(mismatch());
    }
    let rows = heads.len().saturating_mul(wide.saturating_add(*high));
    let bytes = heads.iter().flatten().fold(0u64, |sum, weight| sum.saturating_add(weight.stored_bytes));
    let stored_as = [keys, values].into_iter().flat_map(|weight| weight.stored_as.clone()).collect();
    let dtype = if dtypes == [keys.dtype; 2] { keys.dtype } else { DType::F32 };
    let (latent, stored_type) = (*latent, values.stored_type);
    let source = LatentHeads { heads, latent, dtype, name: name.to_owned() };
    let mut weight = Weight::new(dtype, vec![rows, latent], Encoding::Dense, Arc::new(source));
    (weight.stored_bytes, weight.stored_as, weight.stored_type) = (bytes, stored_as, stored_type);
    Ok(weight)
}

impl WeightSource for LatentHeads {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let each = self.heads.first().map_or(1, |[keys, values]| keys.elements().saturating_add(values.elements()));
        visit_floats(&self.heads, each, (self.dtype, &self.name), unit, sink, |[keys, values], floats| {
            let transposed = keys.floats(&self.name)?;
            let wide = keys.elements().checked_div(self.latent).unwrap_or(0);
            for key in 0..wide {
                floats.extend(transposed.iter().skip(key).step_by(wide.max(1)));
            }
            floats.extend(values.floats(&self.name)?);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Bytes, Computed};

    #[test]
    fn parts_are_those_of_each_head_and_join_to_the_whole() {
        // Two heads with two rows of keys and one of values, and latent vectors of three elements.
        let bytes: Vec<u8> = (0..18u8).flat_map(|value| f32::from(value).to_le_bytes()).collect();
        let whole = Weight::new(DType::F32, vec![6, 3], Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
        let [keys, values] = latent_parts(&whole, 2, [2, 1], "kv_b").unwrap();
        assert_eq!((keys.shape.as_slice(), values.shape.as_slice()), ([2, 3, 2].as_slice(), [2, 1, 3].as_slice()));
        assert_eq!(keys.floats("k").unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 9.0, 12.0, 10.0, 13.0, 11.0, 14.0]);
        assert_eq!(values.floats("v").unwrap(), [6.0, 7.0, 8.0, 15.0, 16.0, 17.0]);
        let part = |weight: &Weight, head: usize, shape: [usize; 2]| {
            let count = shape[0] * shape[1];
            let all = weight.floats("").unwrap()[head * count..(head + 1) * count].to_vec();
            Computed { values: move || Ok(all.clone()) }.weight(shape.to_vec())
        };
        let heads = (0..2).map(|head| vec![part(&keys, head, [3, 2]), part(&values, head, [1, 3])]).collect();
        let joined = joined_latent(heads, "kv_b").unwrap();
        assert_eq!((joined.shape.as_slice(), joined.floats("kv_b").unwrap()), ([6, 3].as_slice(), whole.floats("").unwrap()));
        assert!(latent_parts(&whole, 2, [2, 2], "kv_b").is_err());
        assert!(joined_latent(vec![vec![part(&keys, 0, [3, 2]), part(&values, 0, [3, 1])]], "kv_b").is_err());
    }
}

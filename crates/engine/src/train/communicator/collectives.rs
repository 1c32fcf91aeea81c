//! Bucketed collectives of a training step.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::Communicator;
use crate::error::{Error, Result};

/// Most bytes of one message: large enough to hide latency, small compared to a model.
const BUCKET: usize = 25 << 20;
/// Number of messages for smaller models.
const BUCKETS: usize = 8;

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::candle(format!("`{name}` between processes"), e)
}

/// Divides consecutive f32 tensors with these numbers of elements into groups of at most a `BUCKETS`th of
/// their bytes, and at most `BUCKET` bytes, unless a tensor is larger. Returns the length of each group.
pub fn buckets(elements: &[usize]) -> Vec<usize> {
    let limit = (4 * elements.iter().sum::<usize>()).div_ceil(BUCKETS).min(BUCKET);
    let (mut lengths, mut bytes) = (Vec::<usize>::new(), usize::MAX);
    for own in elements.iter().map(|count| 4 * count) {
        match lengths.last_mut().filter(|_| bytes.saturating_add(own) <= limit) {
            Some(length) => *length += 1,
            None => {
                lengths.push(1);
                bytes = 0;
            }
        }
        bytes += own;
    }
    lengths
}

/// Concatenates flattened tensors.
pub fn flat<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Result<Tensor> {
    let parts = tensors.map(Tensor::flatten_all).collect::<candle_core::Result<Vec<_>>>();
    parts.and_then(|parts| Tensor::cat(&parts, 0)).map_err(|e| Error::candle("tensors for other processes", e))
}

/// Replaces gradients by their means over all ranks. All ranks pass f32 gradients with the same names
/// and shapes, on one device.
pub fn average_gradients(communicator: &mut dyn Communicator, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
    if communicator.size() == 1 {
        return Ok(());
    }
    let factor = 1.0 / communicator.size() as f64;
    let elements: Vec<usize> = gradients.values().map(Tensor::elem_count).collect();
    let mut rest = gradients.iter_mut();
    for length in buckets(&elements) {
        let bucket: Vec<_> = rest.by_ref().take(length).collect();
        let sum = communicator.sum(&flat(bucket.iter().map(|(_, gradient)| &**gradient))?)?;
        let mut start = 0;
        for (name, gradient) in bucket {
            let count = gradient.elem_count();
            let mean = || sum.narrow(0, start, count)?.affine(factor, 0.0)?.reshape(gradient.dims());
            *gradient = mean().map_err(failed(name))?;
            start += count;
        }
    }
    Ok(())
}

/// Assigns tasks to ranks: greedily, those with the largest cost first, to the rank with the smallest load.
/// Depends only on names and costs.
pub fn assign_owners(costs: &BTreeMap<String, u64>, ranks: usize) -> BTreeMap<String, usize> {
    let mut order: Vec<(&String, u64)> = costs.iter().map(|(name, cost)| (name, *cost)).collect();
    order.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
    let mut loads = vec![0u64; ranks.max(1)];
    let mut owners = BTreeMap::new();
    for (name, cost) in order {
        let rank = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        loads[rank] += cost;
        owners.insert(name.clone(), rank);
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::super::tests::run_ranks;
    use super::*;
    use candle_core::{DType, Device};

    fn ones(dims: &[usize], value: f64) -> Tensor {
        Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap().affine(value, 0.0).unwrap()
    }

    fn parameters(value: f64) -> BTreeMap<String, Tensor> {
        let shapes: [(&str, &[usize]); 4] = [("a", &[3, 2]), ("b", &[7_000_000]), ("c", &[5]), ("d", &[])];
        shapes.map(|(name, dims)| (name.to_owned(), ones(dims, value))).into()
    }

    fn mean(tensor: &Tensor) -> f64 {
        tensor.to_dtype(DType::F64).unwrap().mean_all().unwrap().to_scalar().unwrap()
    }

    #[test]
    fn buckets_are_small() {
        assert_eq!(buckets(&[6, 7_000_000, 5, 1]), [1, 1, 2]);
        assert_eq!(buckets(&[10; 16]), [2; 8]);
        assert_eq!(buckets(&[1 << 20; 100]).iter().max(), Some(&6));
        assert!(buckets(&[]).is_empty());
    }

    #[test]
    fn gradients_are_averaged() {
        let all = run_ranks(3, |mut communicator| {
            let mut gradients = parameters(communicator.rank() as f64 * 3.0);
            average_gradients(&mut communicator, &mut gradients)?;
            Ok(gradients)
        });
        for gradients in all {
            let gradients = gradients.unwrap();
            for (name, tensor) in parameters(0.0) {
                assert_eq!((gradients[&name].dims(), mean(&gradients[&name])), (tensor.dims(), 3.0), "{name}");
            }
        }
    }

    #[test]
    fn loads_are_balanced() {
        let bytes: BTreeMap<String, u64> = (0..100u64).map(|i| (format!("w{i}"), 1000 + i * 7919 % 1000)).collect();
        for ranks in 1..8 {
            let owners = assign_owners(&bytes, ranks);
            assert!(owners.keys().eq(bytes.keys()));
            let mut loads = vec![0; ranks];
            owners.iter().for_each(|(name, rank)| loads[*rank] += bytes[name]);
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            assert!(most - least <= 2000, "{loads:?}");
        }
        assert!(assign_owners(&BTreeMap::new(), 3).is_empty());
    }
}

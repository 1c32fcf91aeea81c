//! Bucketed collectives of a training step: averaged gradients and updated parameters.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::super::floats;
use super::Communicator;
use crate::error::{Error, Result};

/// Bytes of one message: large enough to hide latency, small compared to a model.
const BUCKET: usize = 25 << 20;

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::candle(format!("`{name}` between processes"), e)
}

/// Consecutive tensors in groups of about `BUCKET` bytes.
fn buckets<'a>(tensors: impl Iterator<Item = (&'a String, &'a Tensor)>) -> Vec<Vec<(&'a String, &'a Tensor)>> {
    let (mut buckets, mut bytes) = (Vec::<Vec<_>>::new(), usize::MAX);
    for (name, tensor) in tensors {
        let own = 4 * tensor.elem_count();
        match buckets.last_mut().filter(|_| bytes.saturating_add(own) <= BUCKET) {
            Some(bucket) => bucket.push((name, tensor)),
            None => {
                buckets.push(vec![(name, tensor)]);
                bytes = 0;
            }
        }
        bytes += own;
    }
    buckets
}

/// Concatenates the flattened tensors of a bucket.
fn flat(bucket: &[(&String, &Tensor)]) -> candle_core::Result<Tensor> {
    let parts = bucket.iter().map(|(_, tensor)| tensor.flatten_all()).collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&parts, 0)
}

/// Splits a flat tensor into the tensors of a bucket, and calls `each` with the name, the original
/// tensor and the part.
fn for_each_part(bucket: &[(&String, &Tensor)], flat: &Tensor, mut each: impl FnMut(&str, &Tensor, Tensor) -> candle_core::Result<()>) -> Result<()> {
    let mut start = 0;
    for (name, tensor) in bucket {
        let part = || flat.narrow(0, start, tensor.elem_count())?.reshape(tensor.dims());
        part().and_then(|part| each(name, tensor, part)).map_err(failed(name))?;
        start += tensor.elem_count();
    }
    Ok(())
}

/// Replaces gradients by their means over all ranks. All ranks pass f32 gradients with the same names
/// and shapes, on one device. The results of a bucket share memory.
pub fn average_gradients(communicator: &mut dyn Communicator, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
    if communicator.size() == 1 {
        return Ok(());
    }
    let factor = 1.0 / communicator.size() as f64;
    let mut averaged = BTreeMap::new();
    for bucket in buckets(gradients.iter()) {
        let first = bucket[0].0;
        let sum = communicator.sum(&flat(&bucket).map_err(failed(first))?)?;
        let mean = sum.affine(factor, 0.0).map_err(failed(first))?;
        for_each_part(&bucket, &mean, |name, _, part| {
            averaged.insert(name.to_owned(), part);
            Ok(())
        })?;
    }
    *gradients = averaged;
    Ok(())
}

/// Assigns each parameter to the rank that holds its optimizer state and updates it: greedily, largest
/// first, to the rank with the smallest load. Depends only on names and sizes.
pub fn assign_owners(bytes: &BTreeMap<String, u64>, ranks: usize) -> BTreeMap<String, usize> {
    let mut order: Vec<(&String, u64)> = bytes.iter().map(|(name, bytes)| (name, *bytes)).collect();
    order.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let mut loads = vec![0u64; ranks.max(1)];
    let mut owners = BTreeMap::new();
    for (name, bytes) in order {
        let rank = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        loads[rank] += bytes;
        owners.insert(name.clone(), rank);
    }
    owners
}

/// Broadcasts each parameter from its owner to all ranks, in place. Fails if a parameter has no owner.
pub fn broadcast_parameters(communicator: &mut dyn Communicator, parameters: &BTreeMap<String, Tensor>, owners: &BTreeMap<String, usize>) -> Result<()> {
    if communicator.size() == 1 {
        return Ok(());
    }
    if let Some(name) = parameters.keys().find(|name| owners.get(*name).is_none_or(|owner| *owner >= communicator.size())) {
        return Err(Error::tensor(name, "is not assigned to a rank", ""));
    }
    for owner in 0..communicator.size() {
        for bucket in buckets(parameters.iter().filter(|(name, _)| owners.get(*name) == Some(&owner))) {
            let flat = flat(&bucket).map_err(failed(bucket[0].0))?;
            let shared = communicator.broadcast(&flat, owner)?;
            if owner != communicator.rank() {
                for_each_part(&bucket, &shared, |_, parameter, part| floats::assign(parameter, &part))?;
            }
        }
    }
    Ok(())
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
    fn buckets_keep_the_order() {
        let names: Vec<Vec<String>> = buckets(parameters(0.0).iter()).into_iter().map(|b| b.into_iter().map(|(name, _)| name.clone()).collect()).collect();
        assert_eq!(names, [vec!["a"], vec!["b"], vec!["c", "d"]]);
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
    fn updated_parameters_are_broadcast() {
        let all = run_ranks(3, |mut communicator| {
            let parameters = parameters(0.0);
            let owners = assign_owners(&parameters.iter().map(|(name, tensor)| (name.clone(), tensor.elem_count() as u64)).collect(), 3);
            for (name, _) in owners.iter().filter(|(_, owner)| **owner == communicator.rank()) {
                floats::assign(&parameters[name], &ones(parameters[name].dims(), 1.0 + communicator.rank() as f64)).unwrap();
            }
            broadcast_parameters(&mut communicator, &parameters, &owners)?;
            Ok((parameters, owners))
        });
        for shared in all {
            let (parameters, owners) = shared.unwrap();
            for (name, tensor) in parameters {
                assert!((mean(&tensor) - 1.0 - owners[&name] as f64).abs() < 1e-9, "{name}");
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
        let error = broadcast_parameters(&mut Two, &parameters(0.0), &BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("`a`"), "{error}");
    }

    /// Rank 0 of two, without a connection.
    struct Two;

    impl Communicator for Two {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            2
        }

        fn sum(&mut self, tensor: &Tensor) -> Result<Tensor> {
            Ok(tensor.clone())
        }

        fn broadcast(&mut self, tensor: &Tensor, _: usize) -> Result<Tensor> {
            Ok(tensor.clone())
        }

        fn gather_bytes(&mut self, _: &[u8]) -> Result<Vec<Vec<u8>>> {
            Ok(Vec::new())
        }
    }
}

//! Parts of the optimizer state on several ranks, split within tensors.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::Optimizer;
use crate::exec::split_evenly;

/// Elements of parameters that each rank updates, and whose state it has: by name, in rank order.
pub type Parts = BTreeMap<String, Vec<Range<usize>>>;

/// Splits the state of parameters across ranks, within tensors: parts of each parameter, and the bytes of the
/// state by rank, which are as equal as units allow. Those with large units are assigned first.
pub fn shard<'n>(optimizer: &dyn Optimizer, parameters: impl Iterator<Item = (&'n str, &'n [usize])>, ranks: usize) -> (Parts, Vec<u64>) {
    let mut loads = vec![0; ranks.max(1)];
    let unit = |(name, dims): (&'n str, &'n [usize])| {
        let unit = optimizer.unit(name, dims).max(1);
        (name, dims.iter().product(), unit, optimizer.part_bytes(name, dims, unit))
    };
    let mut parameters: Vec<(&str, usize, usize, u64)> = parameters.map(unit).collect();
    parameters.sort_by_key(|(_, _, _, bytes)| Reverse(*bytes));
    // Without a state, the work is shared.
    let is_stateless = parameters.iter().all(|(_, _, _, bytes)| *bytes == 0);
    let part = |(name, elements, unit, bytes): (&str, usize, usize, u64)| {
        (name.to_owned(), split_evenly(&mut loads, elements, unit, if is_stateless { unit as u64 } else { bytes }))
    };
    let parts = parameters.into_iter().map(part).collect();
    (parts, if is_stateless { vec![0; ranks.max(1)] } else { loads })
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::tests::{settings, tensor};
    use super::super::{Kind, build};
    use super::*;
    use crate::exec::Placement;

    /// Parts that ranks update have the bits of the whole update, and the bytes of their state are balanced.
    #[test]
    fn parts_are_updated_like_the_whole() {
        let shapes: [(&str, &[usize]); 4] = [("bias", &[77]), ("embedding", &[300, 31]), ("small", &[3, 5]), ("w", &[40, 60])];
        for (kind, ranks) in Kind::ALL.into_iter().flat_map(|kind| [1, 2, 3, 5].map(|ranks| (kind, ranks))) {
            let new = || build(kind, &settings(), &Placement::Memory(Device::Cpu)).unwrap();
            let mut whole = new();
            let (parts, loads) = shard(&*whole, shapes.into_iter(), ranks);
            let mut own: Vec<Box<dyn Optimizer>> = (0..ranks).map(|_| new()).collect();
            for (seed, (name, dims)) in (100..).zip(shapes) {
                let (parameter, other) = (tensor(dims, seed), tensor(dims, seed));
                for step in 1..=3 {
                    let gradient = tensor(dims, seed * step);
                    whole.update(name, &parameter, &gradient, 0.01, step).unwrap();
                    for (optimizer, range) in own.iter_mut().zip(&parts[name]).filter(|(_, range)| !range.is_empty()) {
                        let part = |tensor: &Tensor| match range.len() == tensor.elem_count() {
                            true => tensor.clone(),
                            false => tensor.flatten_all().unwrap().narrow(0, range.start, range.len()).unwrap(),
                        };
                        optimizer.update_part(name, dims, &part(&other), &part(&gradient), 0.01, step).unwrap();
                    }
                }
                let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(values(&parameter), values(&other), "{kind:?}, {ranks} ranks, {name}");
            }
            let unit = shapes.iter().map(|(name, dims)| whole.part_bytes(name, dims, whole.unit(name, dims))).max().unwrap();
            let bytes: Vec<u64> = own.iter().map(|optimizer| optimizer.bytes()).collect();
            assert!(bytes.iter().zip(&loads).all(|(bytes, load)| bytes <= load), "{bytes:?} {loads:?}");
            assert!(bytes.iter().all(|bytes| *bytes <= whole.bytes().div_ceil(ranks as u64) + unit), "{kind:?}: {bytes:?} of {}", whole.bytes());
        }
    }
}

//! Second moments of the gradients of the outputs of layers: the other Kronecker factor of the Fisher
//! information, next to the second moments of their inputs (Martens and Grosse 2015, K-FAC,
//! <https://arxiv.org/abs/1503.05671>).

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::ranks::Ranks;
use super::{Moments, MomentsRequest};
use crate::error::{Error, Result};
use crate::exec::{floats_on_host, read, transfer::Cause};
use crate::pass::calibrate::tensor_error;

/// Maximum number of consecutive outputs whose gradients are multiplied with each other.
const GROUP: usize = 2048;

/// Sizes of the groups of consecutive outputs of a layer.
fn groups(outputs: usize) -> impl Iterator<Item = usize> {
    let count = outputs.div_ceil(GROUP).max(1);
    (0..count).map(move |group| (group + 1) * outputs / count - group * outputs / count)
}

/// Bytes of the moments of a layer.
pub(super) fn bytes(outputs: usize) -> usize {
    groups(outputs).map(|width| 4 * width * width).sum()
}

/// Sums over the gradients of the outputs of a layer.
pub(super) struct OutputSums(Vec<Sums>);

/// Sums of a group of outputs.
struct Sums {
    moments: Moments,
    /// Sum of the fourth powers of the norms of the gradients.
    fourth_powers: f64,
}

/// Second moments of the gradients of the outputs of a layer, in groups of consecutive outputs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OutputMoments {
    pub groups: Vec<OutputGroup>,
}

/// Second moments of a group of outputs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OutputGroup {
    pub size: usize,
    /// The upper triangle of `GᵀG` `[size, size]` of the gradients `G`.
    pub products: Vec<f32>,
    /// The damping with which they approximate those of all tokens best, as a fraction of the mean of their
    /// diagonal.
    pub damping: f32,
}

impl OutputSums {
    /// Sums of a layer with this number of outputs.
    pub fn new(outputs: usize) -> OutputSums {
        let request = MomentsRequest { products: true, ..MomentsRequest::default() };
        OutputSums(groups(outputs).map(|width| Sums { moments: Moments::new(width, request), fourth_powers: 0.0 }).collect())
    }

    /// Adds gradients `[n, outputs]` of the layer with this weight.
    pub fn add(&mut self, weight: &str, gradients: &Tensor) -> Result<()> {
        let mut first = 0;
        for Sums { moments, fourth_powers } in &mut self.0 {
            let part = gradients.narrow(1, first, moments.size).and_then(|part| part.contiguous()).map_err(tensor_error)?;
            let norms = part.sqr().and_then(|squares| floats_on_host(&squares.sum(1)?, Cause::Statistics)).map_err(tensor_error)?;
            let powers = read(&norms, |norms| Ok(norms.iter().map(|norm| f64::from(*norm).powi(2)).sum::<f64>()));
            *fourth_powers += powers.map_err(tensor_error)?;
            first += moments.size;
            moments.add(weight, &part)?;
        }
        Ok(())
    }

    /// The moments of the gradients of all ranks.
    pub fn finish(self, weight: &str, ranks: &Ranks, device: &Device) -> Result<OutputMoments> {
        let groups = self.0.into_iter().map(|Sums { mut moments, fourth_powers }| {
            moments.reduce(ranks, device)?;
            moments.finish(weight)?;
            let powers: f64 = ranks.gather(&[fourth_powers], f64::to_le_bytes, f64::from_le_bytes)?.into_iter().flatten().sum();
            let (size, products) = (moments.size, moments.products);
            let damping = damping(&products, size, moments.count, powers);
            Ok(OutputGroup { size, products, damping })
        });
        Ok(OutputMoments { groups: groups.collect::<Result<_>>()? })
    }
}

/// The damping of the second moments of `count` gradients with which they approximate those of all tokens
/// best in the Frobenius norm (Ledoit and Wolf 2004, <https://doi.org/10.1016/S0047-259X(03)00096-4>).
fn damping(products: &[f32], size: usize, count: usize, fourth_powers: f64) -> f32 {
    let count = count.max(1) as f64;
    let (mut squares, mut trace) = (0.0, 0.0);
    for (at, line) in products.chunks_exact(size.max(1)).enumerate() {
        let diagonal = f64::from(line[at]) / count;
        trace += diagonal;
        squares += diagonal * diagonal + 2.0 * line[at + 1..].iter().map(|product| (f64::from(*product) / count).powi(2)).sum::<f64>();
    }
    // The squared distances from the expected moments, and from a multiple of the identity.
    let noise = (fourth_powers / count - squares) / count;
    let distance = squares - trace * trace / size.max(1) as f64;
    let shrinkage = if distance > 0.0 { (noise / distance).clamp(0.0, MAX_SHRINKAGE) } else { MAX_SHRINKAGE };
    (shrinkage / (1.0 - shrinkage)).max(MIN_DAMPING) as f32
}

/// Largest fraction of the identity in the shrunk moments.
const MAX_SHRINKAGE: f64 = 0.99;
/// Smallest damping.
const MIN_DAMPING: f64 = 0.01;

impl OutputMoments {
    /// Whether all gradients are zero.
    pub fn is_zero(&self) -> bool {
        self.groups.iter().flat_map(|group| &group.products).all(|product| *product == 0.0)
    }

    pub fn load(path: &Path) -> candle_core::Result<OutputMoments> {
        let tensors = candle_core::safetensors::load(path, &Device::Cpu)?;
        let dampings = tensors.get(DAMPING).ok_or_else(|| candle_core::Error::Msg("has no dampings".into()))?;
        let dampings = read(dampings, |values| Ok(values.to_vec()))?;
        let group = |(at, damping): (usize, f32)| {
            let products = tensors.get(&at.to_string()).ok_or_else(|| candle_core::Error::Msg(format!("has no tensor `{at}`")))?;
            Ok(OutputGroup { size: products.dim(0)?, products: read(products, |values| Ok(values.to_vec()))?, damping })
        };
        Ok(OutputMoments { groups: dampings.into_iter().enumerate().map(group).collect::<candle_core::Result<_>>()? })
    }

    pub fn store(self, path: &Path) -> Result<()> {
        let dampings: Vec<f32> = self.groups.iter().map(|group| group.damping).collect();
        let products = |(at, group): (usize, OutputGroup)| Ok((at.to_string(), Tensor::from_vec(group.products, (group.size, group.size), &Device::Cpu)?));
        let tensors = || {
            let mut tensors = self.groups.into_iter().enumerate().map(products).collect::<candle_core::Result<HashMap<_, _>>>()?;
            tensors.insert(DAMPING.to_owned(), Tensor::new(dampings, &Device::Cpu)?);
            Ok(tensors)
        };
        let unfinished = path.with_extension("unfinished");
        tensors().and_then(|tensors| candle_core::safetensors::save(&tensors, &unfinished)).map_err(tensor_error)?;
        fs::rename(&unfinished, path).map_err(Error::io("write", path))
    }
}

/// The tensor with the damping of each group.
const DAMPING: &str = "damping";

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(seed: u64, count: usize, size: usize) -> OutputMoments {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut sums = OutputSums::new(size);
        // Sums of twelve uniform numbers, as an approximation of normal ones, with a common part.
        for _ in 0..count / 50 {
            let mut normal = || (0..12).map(|_| random.f32()).sum::<f32>() - 6.0;
            let rows: Vec<f32> = (0..50)
                .flat_map(|_| {
                    let common = normal();
                    (0..size).map(|_| common + normal()).collect::<Vec<f32>>()
                })
                .collect();
            sums.add("w", &Tensor::from_vec(rows, (50, size), &Device::Cpu).unwrap()).unwrap();
        }
        let groups = sums.0.into_iter().map(|Sums { moments, fourth_powers }| {
            let damping = damping(&moments.products, moments.size, moments.count, fourth_powers);
            OutputGroup { size: moments.size, products: moments.products, damping }
        });
        OutputMoments { groups: groups.collect() }
    }

    /// The shrunk moments are nearer to the expected ones than those without shrinkage, and than those with
    /// half or twice the damping, on average over samples.
    #[test]
    fn damping_decreases_the_distance_from_the_expected_moments() {
        let (size, count) = (24, 100);
        let mut distances = [0.0; 4];
        for seed in 0..20 {
            let moments = moments(seed, count, size);
            let OutputGroup { products, damping, .. } = &moments.groups[0];
            let mean = (0..size).map(|at| f64::from(products[at * (size + 1)])).sum::<f64>() / (size * count) as f64;
            for (distance, damping) in distances.iter_mut().zip([*damping, 0.0, damping / 4.0, damping * 4.0].map(f64::from)) {
                for at in 0..size {
                    for other in at..size {
                        let (expected, weight) = if at == other { (2.0, 1.0) } else { (1.0, 2.0) };
                        let added = if at == other { damping * mean } else { 0.0 };
                        let shrunk = (f64::from(products[at * size + other]) / count as f64 + added) / (1.0 + damping);
                        *distance += weight * (shrunk - expected).powi(2);
                    }
                }
            }
        }
        assert!(distances[1..].iter().all(|other| distances[0] < 0.98 * other), "{distances:?}");
    }

    #[test]
    fn damping_falls_with_the_number_of_tokens() {
        let found = [50, 200, 5000].map(|count| moments(1, count, 24).groups[0].damping);
        assert!(found[0] > 2.0 * found[1] && found[1] > 2.0 * found[2], "{found:?}");
        assert_eq!(damping(&[0.0; 4], 2, 10, 0.0), (MAX_SHRINKAGE / (1.0 - MAX_SHRINKAGE)) as f32, "without gradients");
    }

    #[test]
    fn many_outputs_are_divided_into_groups() {
        assert_eq!(groups(GROUP).collect::<Vec<_>>(), [GROUP]);
        assert_eq!(groups(2 * GROUP + 1).collect::<Vec<_>>(), [1365, 1366, 1366]);
        assert_eq!(groups(0).collect::<Vec<_>>(), [0]);
        let width = GROUP + 6;
        let found = moments(3, 50, width);
        assert_eq!(found.groups.iter().map(|group| group.size).collect::<Vec<_>>(), [width / 2; 2]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        found.clone().store(&path).unwrap();
        let loaded = OutputMoments::load(&path).unwrap();
        assert!(loaded == found);
    }
}

//! Gradients of the loss on calibration tokens, by one backward pass of the original model, block by block:
//! the mean square of the gradients of each layer's outputs for each token (Kim et al. 2025, GuidedQuant,
//! <https://arxiv.org/abs/2505.07004>, with one group of outputs), and their second moments. The targets are
//! drawn from the model's own predictions, so that the expected products are those of the Fisher information,
//! the second-order approximation of the KL divergence.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{D, Device, Tensor};
use rayon::prelude::*;

use super::output_moments::{self, OutputMoments, OutputSums};
use super::ranks::Ranks;
use super::{Layer, Site, sites};
use crate::analysis;
use crate::data::{Batch, DataSet, Padding, SequenceRoles};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{MemoryCategory, Tape, floats_on_host, read};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate::{numbers, parameters_to_differentiate, rows, tensor_error};

/// The output that the loss is computed from.
const LOGITS: &str = "logits";
/// File of the factors next to the checkpoints of blocks.
const FILE: &str = "guide.safetensors";
/// Folder of second moments next to the checkpoints of blocks.
const MOMENTS: &str = "guide";
/// Memory of the second moments that one pass over the samples sums, in bytes, unless a limit is given.
const MOMENTS_BYTES: u64 = 1 << 30;
/// Smallest squared factor, relative to the mean of all tokens: gradients of other samples differ.
const LEAST: f64 = 0.05;

/// How the gradients of the loss are used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Guidance {
    #[default]
    None,
    /// The inputs of each layer are weighted by the mean squares of the gradients of its outputs.
    Tokens,
    /// Errors of the outputs of each layer are weighted by the second moments of their gradients.
    Outputs,
}

/// Factors of the rows of the inputs of layers and of the outputs of blocks.
#[derive(Debug)]
pub(super) struct Guide {
    /// For each sample, the factor of each row that is not padding, by the name of the output of a block, or
    /// with [`Guidance::Tokens`] of the weight of a layer.
    by_name: BTreeMap<String, Vec<Vec<f32>>>,
    /// Mean square of the gradients of each output of a layer over all tokens, by the name of its weight.
    pub outputs: BTreeMap<String, Vec<f64>>,
    moments: StoredMoments,
}

/// Storage of the second moments of the gradients of outputs, by the name of the weight.
#[derive(Debug)]
enum StoredMoments {
    None,
    /// Without checkpoints.
    InMemory(BTreeMap<String, OutputMoments>),
    /// A file of each layer, by its number.
    Files(PathBuf, BTreeMap<String, usize>),
}

/// The factors of the next rows of a layer.
pub(super) struct Factors<'g>(Box<dyn Iterator<Item = f32> + 'g>);

impl Guide {
    /// Loads the factors and moments from the checkpoint, or computes and stores them.
    pub fn open(guidance: Guidance, sites: &[Site], subject: (&Graph, &Model), samples: &DataSet, ranks: &Ranks, context: &Context) -> Result<Guide> {
        let path = ranks.checkpoints().map(|checkpoints| checkpoints.folder().join(FILE));
        let is_stored = ranks.first(|| Ok(path.as_ref().is_some_and(|path| path.is_file())))?;
        if let Some(path) = path.as_ref().filter(|_| is_stored) {
            let by_name = Guide::load(path).map_err(tensor_error)?;
            return Ok(Guide { by_name, outputs: BTreeMap::new(), moments: StoredMoments::new(guidance, sites, ranks) });
        }
        let guide = Guide::compute(guidance, sites, subject, samples, ranks, context)?;
        if let Some(path) = path.filter(|_| ranks.is_first()) {
            let unfinished = path.with_extension("unfinished");
            guide.store(&unfinished).map_err(tensor_error)?;
            fs::rename(&unfinished, &path).map_err(Error::io("write", &path))?;
        }
        Ok(guide)
    }

    /// Reads a matrix of each name, whose rows end at the first negative number.
    fn load(path: &Path) -> candle_core::Result<BTreeMap<String, Vec<Vec<f32>>>> {
        let tensors = candle_core::safetensors::load(path, &Device::Cpu)?;
        let row = |row: &[f32]| row.iter().copied().take_while(|factor| *factor >= 0.0).collect();
        let factors = |tensor: &Tensor| read(tensor, |values| Ok(values.chunks(tensor.dim(1)?).map(row).collect()));
        // Only a search needs the gradients of outputs, and it has no checkpoints.
        tensors.into_iter().map(|(name, tensor)| Ok((name, factors(&tensor)?))).collect()
    }

    fn store(&self, path: &Path) -> candle_core::Result<()> {
        let tensor = |samples: &Vec<Vec<f32>>| {
            let longest = samples.iter().map(Vec::len).max().unwrap_or(0).max(1);
            let rows = samples.iter().flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(-1.0, longest - row.len())));
            Tensor::from_vec(rows.collect::<Vec<f32>>(), (samples.len(), longest), &Device::Cpu)
        };
        let tensors = self.by_name.iter().map(|(name, samples)| Ok((name.clone(), tensor(samples)?)));
        candle_core::safetensors::save(&tensors.collect::<candle_core::Result<HashMap<_, _>>>()?, path)
    }

    /// Each rank differentiates its own samples.
    fn compute(guidance: Guidance, sites: &[Site], (graph, model): (&Graph, &Model), samples: &DataSet, ranks: &Ranks, context: &Context) -> Result<Guide> {
        let Some((_, logits)) = graph.outputs().iter().find(|(name, _)| name == LOGITS) else {
            return Err(Error::option("guide: loss", format!("requires a model with the output `{LOGITS}`")));
        };
        model.require_distribution(graph, "guide: loss", "remove `guide`")?;
        let weights: BTreeSet<&str> = sites.iter().flat_map(|site| &site.layers).map(|layer| layer.weight.as_str()).collect();
        let blocks: BTreeSet<String> = analysis::blocks(graph).into_iter().map(|block| block.value).collect();
        // The name in the result of each value: the weight of a layer for its output.
        let mut names: BTreeMap<&str, &str> = BTreeMap::new();
        let mut observed = BTreeSet::new();
        for node in graph.nodes() {
            let output = graph.value(node.output).name.as_str();
            let weight = node.inputs.get(1).and_then(|id| weights.get(graph.value(*id).name.as_str()).copied());
            if let Some(name) = weight.or_else(|| blocks.contains(output).then_some(output)) {
                names.insert(output, name);
                observed.insert(node.output);
            }
        }
        let (parameters, cuts) = parameters_to_differentiate(graph, model, context)?;
        let tape = Tape::observing(graph, context.device.clone(), [*logits].into(), observed, &cuts);
        let tracker = context.memory_tracker.clone().unwrap_or_default();
        tracker.set(MemoryCategory::Weights, parameters.bytes())?;
        let has_factors = |name: &str| guidance == Guidance::Tokens || !weights.contains(name);
        let (roles, op) = (SequenceRoles::new(graph), Op::Linear(crate::ir::ops::Linear::default()));
        let mut squares: BTreeMap<String, Vec<Vec<f64>>> = BTreeMap::new();
        let mut by_output: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut moments = StoredMoments::new(guidance, sites, ranks);
        let portions = if guidance == Guidance::Outputs { portions(sites, context.memory.bytes.filter(|_| context.memory.explicit)) } else { vec![Vec::new()] };
        for (portion, layers) in portions.into_iter().enumerate() {
            let mut sums: BTreeMap<&str, OutputSums> = layers.iter().map(|layer| (layer.weight.as_str(), OutputSums::new(layer.rows))).collect();
            let (own, mut number, mut window) = (ranks.batches(samples)?, 0, 0);
            samples.for_each_batch("Differentiating", &context.work, |batch| {
                number += 1;
                if !own.contains(&(number - 1)) {
                    window += batch.samples as u64;
                    return Ok(());
                }
                for sample in 0..batch.samples {
                    let batch = batch.narrow(sample, 1)?;
                    tracker.begin_step(None);
                    let forward = tape.forward(&parameters, &batch.inputs, &tracker, None)?;
                    let outputs = forward.taps().get(logits).cloned().ok_or_else(|| Error::graph(LOGITS, "is not computed"))?;
                    let gradient = gradient_of_drawn_targets(&outputs, &batch, &roles, context.seed.wrapping_add(window)).map_err(tensor_error)?;
                    drop(outputs);
                    window += 1;
                    tape.backward(forward, [(*logits, gradient)].into(), &parameters, &tracker, &mut |name, gradient| {
                        let Some(key) = names.get(name) else { return Ok(()) };
                        let rows = rows(&gradient, &op, &batch, roles.token_axis(name))?;
                        if let Some(sums) = sums.get_mut(key) {
                            sums.add(key, &rows)?;
                        }
                        if portion > 0 || !has_factors(key) {
                            return Ok(());
                        }
                        let rows = rows.sqr().map_err(tensor_error)?;
                        let sums = numbers(&rows.sum(0).map_err(tensor_error)?)?;
                        let all = by_output.entry((*key).to_owned()).or_insert_with(|| vec![0.0; sums.len()]);
                        all.iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
                        squares.entry((*key).to_owned()).or_default().push(numbers(&rows.mean(D::Minus1).map_err(tensor_error)?)?);
                        Ok(())
                    })?;
                    parameters.enter(&BTreeSet::new(), Some(&tracker))?;
                }
                Ok(())
            })?;
            for layer in layers {
                let Some(sums) = sums.remove(layer.weight.as_str()) else { continue };
                moments.insert(&layer.weight, sums.finish(&layer.weight, ranks, &context.device)?, ranks)?;
            }
        }
        tracker.set(MemoryCategory::Weights, 0)?;
        if ranks.count() > 1 {
            squares = all_squares(names.values().copied().filter(|name| has_factors(name)).collect(), &squares, ranks)?;
        }
        for (name, sums) in &mut by_output {
            let tokens = squares.get(name).map_or(0, |samples| samples.iter().map(Vec::len).sum::<usize>());
            sums.iter_mut().for_each(|sum| *sum /= tokens.max(1) as f64);
        }
        Ok(Guide { by_name: squares.into_iter().map(|(name, squares)| (name, factors(&squares))).collect(), outputs: by_output, moments })
    }

    /// The second moments of the gradients of a layer's outputs; `None` if they were not requested.
    pub fn moments(&self, weight: &str) -> Result<Option<OutputMoments>> {
        match &self.moments {
            StoredMoments::None => Ok(None),
            StoredMoments::InMemory(moments) => Ok(moments.get(weight).cloned()),
            StoredMoments::Files(folder, numbers) => {
                let path = |number: &usize| moments_path(folder, *number);
                numbers.get(weight).map(|number| OutputMoments::load(&path(number)).map_err(tensor_error)).transpose()
            }
        }
    }

    /// The factors of the rows of a layer's input, in the order of the samples, from the sample `first` on.
    pub fn factors(&self, weight: &str, first: usize) -> Option<Factors<'_>> {
        self.by_name.get(weight).map(|samples| Factors(Box::new(samples.iter().skip(first).flatten().copied())))
    }

    /// The factors of the rows of a block's output for one sample.
    pub fn sample(&self, value: &str, sample: usize) -> Option<&[f32]> {
        self.by_name.get(value)?.get(sample).map(Vec::as_slice)
    }
}

impl StoredMoments {
    fn new(guidance: Guidance, sites: &[Site], ranks: &Ranks) -> StoredMoments {
        let numbers = || (0..).zip(layers(sites)).map(|(number, layer)| (layer.weight.clone(), number)).collect();
        match (guidance, ranks.checkpoints()) {
            (Guidance::None | Guidance::Tokens, _) => StoredMoments::None,
            (Guidance::Outputs, None) => StoredMoments::InMemory(BTreeMap::new()),
            (Guidance::Outputs, Some(checkpoints)) => StoredMoments::Files(checkpoints.folder().join(MOMENTS), numbers()),
        }
    }

    /// Stores the moments of a layer. Rank 0 writes the files of all ranks.
    fn insert(&mut self, weight: &str, moments: OutputMoments, ranks: &Ranks) -> Result<()> {
        match self {
            StoredMoments::None => Ok(()),
            StoredMoments::InMemory(all) => {
                all.insert(weight.to_owned(), moments);
                Ok(())
            }
            StoredMoments::Files(folder, numbers) => ranks.first(|| {
                fs::create_dir_all(&*folder).map_err(Error::io("create", &*folder))?;
                numbers.get(weight).map_or(Ok(()), |number| moments.store(&moments_path(folder, *number)))
            }),
        }
    }
}

fn moments_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("{number}.safetensors"))
}

fn layers(sites: &[Site]) -> impl Iterator<Item = &Layer> {
    sites.iter().flat_map(|site| &site.layers)
}

/// Bytes of the second moments that remain in memory until all layers are changed.
pub(super) fn bytes_in_memory(guidance: Guidance, sites: &[Site], has_checkpoints: bool) -> u64 {
    if guidance != Guidance::Outputs || has_checkpoints { 0 } else { layers(sites).map(|layer| output_moments::bytes(layer.rows) as u64).sum() }
}

/// Number of passes over the samples for the second moments of all layers with these weights, if the memory
/// is not limited.
pub(super) fn passes(graph: &Graph, weights: &BTreeSet<String>) -> Result<u64> {
    let weights = weights.iter().map(String::as_str).collect();
    Ok(portions(&sites("quantize", graph, &weights, false)?, None).len() as u64)
}

/// Layers whose moments fit into memory at the same time: a quarter of the limit, if there is one.
fn portions(sites: &[Site], limit: Option<u64>) -> Vec<Vec<&Layer>> {
    let limit = limit.map_or(MOMENTS_BYTES, |limit| limit / 4) as usize;
    let (mut portions, mut bytes) = (vec![Vec::new()], 0);
    for layer in layers(sites) {
        let added = output_moments::bytes(layer.rows);
        if bytes > 0 && bytes + added > limit {
            portions.push(Vec::new());
            bytes = 0;
        }
        portions.last_mut().into_iter().for_each(|portion| portion.push(layer));
        bytes += added;
    }
    portions
}

/// The squares of the samples of all ranks, which are in the order of ranks.
fn all_squares(names: BTreeSet<&str>, own: &BTreeMap<String, Vec<Vec<f64>>>, ranks: &Ranks) -> Result<BTreeMap<String, Vec<Vec<f64>>>> {
    let mut all = BTreeMap::new();
    for name in names {
        let samples = own.get(name).map_or(&[][..], Vec::as_slice);
        let sizes: Vec<u64> = samples.iter().map(|squares| squares.len() as u64).collect();
        let sizes = ranks.gather(&sizes, u64::to_le_bytes, u64::from_le_bytes)?;
        let squares = ranks.gather(&samples.concat(), f64::to_le_bytes, f64::from_le_bytes)?;
        let mut samples = Vec::new();
        for (sizes, squares) in sizes.iter().zip(&squares) {
            let mut rest = squares.iter().copied();
            samples.extend(sizes.iter().map(|size| rest.by_ref().take(*size as usize).collect::<Vec<f64>>()));
        }
        if !samples.is_empty() {
            all.insert(name.to_owned(), samples);
        }
    }
    Ok(all)
}

/// Square roots of means of squares, relative to their mean over all samples.
fn factors(samples: &[Vec<f64>]) -> Vec<Vec<f32>> {
    let count = samples.iter().map(Vec::len).sum::<usize>();
    let mean = samples.iter().flatten().sum::<f64>() / count.max(1) as f64;
    let factor = |square: &f64| if mean.is_finite() && mean > 0.0 { (square / mean).max(LEAST).sqrt() as f32 } else { 1.0 };
    samples.iter().map(|squares| squares.iter().map(factor).collect()).collect()
}

impl Factors<'_> {
    /// Multiplies the next rows `[n, size]` of a value, in each of the tensors.
    pub fn scale(&mut self, value: &str, tensors: [Option<&mut Tensor>; 2]) -> Result<()> {
        let count = tensors[0].as_ref().map_or(0, |rows| rows.dims()[0]);
        let factors: Vec<f32> = self.0.by_ref().take(count).collect();
        if factors.len() < count {
            return Err(Error::graph(format!("graph value `{value}`"), "has more rows than gradients"));
        }
        for tensor in tensors.into_iter().flatten() {
            let column = Tensor::from_slice(&factors, (count, 1), &Device::Cpu).and_then(|column| transfer::to_device(&column, tensor.device(), Cause::Batch));
            *tensor = column.and_then(|column| tensor.broadcast_mul(&column)).map_err(tensor_error)?;
        }
        Ok(())
    }
}

/// Gradient of the sum of cross-entropies with respect to logits `[…, classes]`, with a target for each token
/// that is drawn from their distribution.
fn gradient_of_drawn_targets(logits: &Tensor, batch: &Batch, roles: &SequenceRoles, seed: u64) -> candle_core::Result<Tensor> {
    let classes = logits.dims().last().copied().unwrap_or(1).max(1);
    let padding = Padding::from_batch(batch)?;
    let is_token = padding.token_rows(roles.token_axis(LOGITS), logits.dims());
    let mut gradient = read(&floats_on_host(logits, Cause::Statistics)?, |values| Ok(values.to_vec()))?;
    gradient.par_chunks_mut(classes).enumerate().for_each(|(row, logits)| {
        if is_token.as_ref().is_some_and(|is_token| !is_token[row]) {
            return logits.fill(0.0);
        }
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        logits.iter_mut().for_each(|logit| *logit = (*logit - largest).exp());
        let sum: f64 = logits.iter().map(|power| f64::from(*power)).sum();
        let mut left = sum * fastrand::Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ row as u64).f64();
        let mut drawn = logits.len() - 1;
        for (class, power) in logits.iter_mut().enumerate() {
            left -= f64::from(*power);
            if left < 0.0 && drawn == classes - 1 {
                drawn = class;
            }
            *power = (f64::from(*power) / sum) as f32;
        }
        logits[drawn] -= 1.0;
    });
    transfer::to_device(&Tensor::from_vec(gradient, logits.dims(), &Device::Cpu)?, logits.device(), Cause::Batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::References;
    use crate::evaluation::Subject;
    use crate::pass::testing;

    #[test]
    fn factors_are_stored_for_samples_of_any_length() {
        let by_name = BTreeMap::from([("a".to_owned(), vec![vec![1.0, 0.5], vec![], vec![2.0]]), ("b".to_owned(), vec![vec![0.25]])]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        Guide { by_name: by_name.clone(), outputs: BTreeMap::new(), moments: StoredMoments::None }.store(&path).unwrap();
        let guide = Guide { by_name: Guide::load(&path).unwrap(), outputs: BTreeMap::new(), moments: StoredMoments::None };
        assert_eq!(guide.by_name, by_name);
        let mut rows = Tensor::ones((2, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        let mut factors = guide.factors("a", 0).unwrap();
        factors.scale("x", [Some(&mut rows), None]).unwrap();
        assert_eq!(rows.to_vec2::<f32>().unwrap(), [[1.0; 3], [0.5; 3]]);
        factors.scale("x", [Some(&mut rows), None]).unwrap_err();
        assert_eq!(guide.sample("a", 2), Some(&[2.0][..]));
        let mut last = Tensor::ones((1, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        guide.factors("a", 2).unwrap().scale("x", [Some(&mut last), None]).unwrap();
        assert_eq!(last.to_vec2::<f32>().unwrap(), [[2.0; 3]]);
    }

    #[test]
    fn squared_factors_have_the_mean_one() {
        let found = factors(&[vec![1.0, 3.0], vec![2.0]]);
        assert_eq!(found, [vec![0.5f32.sqrt(), 1.5f32.sqrt()], vec![1.0]]);
        assert_eq!(factors(&[vec![0.0, 0.0]]), [vec![1.0, 1.0]]);
    }

    /// The mean of the squared gradients over many draws is the variance of the predicted distribution.
    #[test]
    fn targets_are_drawn_from_the_predictions() {
        let graph: Graph = "input x: float[1, 4]\nparam w: float[3, 4]\nlogits = Linear(x, w) -> float[1, 3]\noutput logits = logits\n".parse().unwrap();
        let roles = SequenceRoles::new(&graph);
        let probabilities = [0.5f32, 0.3, 0.2];
        let logits = Tensor::new(&[probabilities.map(f32::ln)], &Device::Cpu).unwrap();
        let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 1 };
        let mut squares = [0f64; 3];
        for seed in 0..4000 {
            let gradient = gradient_of_drawn_targets(&logits, &batch, &roles, seed).unwrap().to_vec2::<f32>().unwrap();
            squares.iter_mut().zip(&gradient[0]).for_each(|(sum, gradient)| *sum += f64::from(gradient * gradient) / 4000.0);
        }
        for (square, p) in squares.iter().zip(probabilities) {
            assert!((square - f64::from(p * (1.0 - p))).abs() < 0.02, "{squares:?}");
        }
    }

    /// The targets of each sample are drawn separately. Gradients of the first layer are computed by hand.
    #[test]
    fn factors_follow_from_the_gradients_of_each_sample() {
        let text = "input x: float[batch, 5, 4]\nparam a: float[6, 4]\nparam b: float[3, 6]\n\
            h = Linear{\"input_major\":false}(x, a) -> float[batch, 5, 6]\nt = Tanh(h) -> float[batch, 5, 6]\n\
            logits = Linear{\"input_major\":false}(t, b) -> float[batch, 5, 3]\noutput logits = logits\n";
        let (_folder, model) = testing::model(text, |_, shape| testing::numbers(shape)).unwrap();
        let graph = model.graph().unwrap();
        let inputs = BTreeMap::from([("x".to_owned(), Tensor::from_vec(testing::numbers(&[3, 5, 4]), (3, 5, 4), &Device::Cpu).unwrap())]);
        let sites = super::super::sites("quantize", &graph, &["a", "b"].into(), true).unwrap();
        let open = |context: &Context| {
            let subject = Subject::from_model(model.clone()).unwrap();
            let samples = context.data.open(context.data.calibration.as_ref().unwrap(), subject.target()).unwrap();
            let team = super::super::ranks::connect(context).unwrap();
            let ranks = Ranks::open(&team, context).unwrap();
            [Guidance::Tokens, Guidance::Outputs].map(|guidance| Guide::open(guidance, &sites, (&graph, &model), &samples, &ranks, context).unwrap())
        };
        let [guide, guide_of_outputs] = testing::calibrated(&inputs, open).unwrap();
        // Guidance of tokens needs the factors of layers, and guidance of outputs the moments.
        assert!(["a", "b"].iter().all(|name| !guide_of_outputs.by_name.contains_key(*name) && guide.moments(name).unwrap().is_none()));
        let bytes: u64 = ["a", "b"]
            .map(|name| guide_of_outputs.moments(name).unwrap().unwrap())
            .iter()
            .flat_map(|found| &found.groups)
            .map(|group| 4 * group.products.len() as u64)
            .sum();
        assert_eq!([false, true].map(|has_checkpoints| bytes_in_memory(Guidance::Outputs, &sites, has_checkpoints)), [bytes, 0]);
        assert_eq!(bytes_in_memory(Guidance::Tokens, &sites, false), 0);

        let values = testing::values(&graph, &model, &inputs, |_| true).unwrap();
        let b = Tensor::from_vec(testing::numbers(&[3, 6]), (3, 6), &Device::Cpu).unwrap();
        let mut squares: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
        let mut products: BTreeMap<&str, Tensor> = BTreeMap::new();
        for sample in 0..3 {
            let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 1 };
            let part = |name: &str| values[name].narrow(0, sample, 1).unwrap();
            let logits = gradient_of_drawn_targets(&part("logits"), &batch, &SequenceRoles::new(&graph), sample as u64).unwrap().squeeze(0).unwrap();
            let slope = (1.0 - part("t").sqr().unwrap()).unwrap().squeeze(0).unwrap();
            for (name, gradient) in [("a", (logits.matmul(&b).unwrap() * slope).unwrap()), ("b", logits)] {
                let product = gradient.t().unwrap().matmul(&gradient).unwrap();
                let sum = products.remove(name).map_or(product.clone(), |sum| (sum + product).unwrap());
                products.insert(name, sum);
                let rows = gradient.to_vec2::<f32>().unwrap();
                let mean = |row: &Vec<f32>| row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / row.len() as f64;
                squares.entry(name).or_default().push(rows.iter().map(mean).collect());
            }
        }
        for (name, squares) in squares {
            let (found, expected) = (&guide.by_name[name], factors(&squares));
            let is_close = |found: &[f32], expected: &[f32]| found.len() == 5 && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4);
            assert!(found.len() == 3 && found.iter().zip(&expected).all(|(a, b)| is_close(a, b)), "{name}: {found:?}, not {expected:?}");
        }
        for (name, products) in products {
            let found = guide_of_outputs.moments(name).unwrap().unwrap();
            let [group] = &found.groups[..] else { panic!("{found:?}") };
            let expected = products.to_vec2::<f32>().unwrap();
            let is_close = |row: usize, column: usize| (group.products[row * group.size + column] - expected[row][column]).abs() < 1e-4;
            assert!(group.size == expected.len() && (0..group.size).all(|row| (row..group.size).all(|column| is_close(row, column))), "{name}: {found:?}");
        }
    }
}

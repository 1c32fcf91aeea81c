//! Repair of the layers that read removed units, with calibration data and without training.
//!
//! Layers are processed in the order of the graph. The inputs `x` of a layer in the original model are
//! estimated from its inputs `y` in the pruned model by least squares, `x ≈ M y + c`. The weight `W`
//! becomes `W M`, and the bias `b + W c` (He et al., *Channel Pruning for Accelerating Very Deep Neural
//! Networks*, 2017, <https://arxiv.org/abs/1707.06168>, jointly for all taps of a window). The difference
//! of `M` from a selection of the surviving features is scaled by the factor with the smallest error on
//! held-out samples, which is 0 if it fits noise. Later layers are repaired with the inputs that result
//! from repaired ones. The statistics of batch normalization are updated so that its output has the same
//! mean and variance as before. Only sums of products of features are stored.

pub(in crate::pass) mod least_squares;
mod paired_runs;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use candle_core::{Device, Tensor};

use super::cut::Surviving;
use super::{NAME, Repair};
use crate::calibration::select_rows;
use crate::data::SequenceRoles;
use crate::error::{Error, Result, counted};
use crate::exec::Parameters;
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::{BatchNorm, transposed_product};
use crate::ir::{self, Graph, Node, Op, ValueId};
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate::{self, Moments, numbers, tensor_error};
use crate::pass::consumers::readers;
use least_squares::{ProductSums, Sums, held_out_share, row_weights};
use paired_runs::PairedRuns;

/// A model before and after pruning, and the repair method.
pub(super) struct Repairing<'a> {
    pub before: &'a Model,
    pub graph: &'a Graph,
    pub after: &'a mut Model,
    pub surviving: &'a Surviving,
    pub repair: Repair,
    /// Whether a sample is held out, by its index, so that no layer is fitted to it.
    pub is_held_out: &'a dyn Fn(usize) -> bool,
}

/// Sums over the inputs of the nodes that read a weight, and of the normalizations with a running mean, by
/// the index of the node.
#[derive(Default)]
struct Found<'g> {
    uses: BTreeMap<ValueId, BTreeMap<usize, (&'g Node, Rc<Sums>)>>,
    moments: BTreeMap<ValueId, BTreeMap<usize, [Moments; 2]>>,
}

/// Whether several nodes read a parameter.
fn is_shared(graph: &Graph, parameter: ValueId) -> bool {
    readers(graph, parameter).0.len() > 1
}

/// How many times all these nodes are repaired in turn: twice if a weight has several uses, because the
/// nodes after the first one depend on its values, which depend on the inputs of the last one.
pub(super) fn sweeps<'g>(mut nodes: impl Iterator<Item = &'g Node>) -> u64 {
    let parameter = |node: &Node| match node.op {
        Op::Linear(_) | Op::Conv(_) => node.inputs.get(1).copied(),
        Op::BatchNorm(_) => node.inputs.get(3).copied(),
        _ => None,
    };
    let mut read = BTreeSet::new();
    if nodes.all(|node| parameter(node).is_none_or(|parameter| read.insert(parameter))) { 1 } else { 2 }
}

/// A value, and the nodes to repair that read it.
struct Site {
    value: String,
    nodes: Vec<usize>,
    kind: Kind,
}

enum Kind {
    /// Layers that read the surviving features of the value.
    Layers { op: Op, surviving: Vec<usize>, features: usize },
    /// A batch normalization.
    Statistics { op: BatchNorm },
}

impl Repairing<'_> {
    /// Repairs the model. Returns the numbers of repaired layers and normalizations.
    pub fn run(mut self, context: &Context) -> Result<(usize, usize)> {
        let smaller = self.after.graph()?;
        let sites = self.sites(&smaller)?;
        let mut found = Found::default();
        for _ in 0..sweeps(sites.iter().flat_map(|site| &site.nodes).map(|index| &smaller.nodes()[*index])) {
            self.sweep(&smaller, &sites, &mut found, context)?;
        }
        let layers = sites.iter().filter(|site| matches!(site.kind, Kind::Layers { .. })).map(|site| site.nodes.len()).sum();
        Ok((layers, sites.iter().filter(|site| matches!(site.kind, Kind::Statistics { .. })).count()))
    }

    /// Repairs all sites in the order of the graph. `found` holds the sums of an earlier sweep, which are
    /// those of later uses of a weight.
    fn sweep<'g>(&mut self, smaller: &'g Graph, sites: &[Site], found: &mut Found<'g>, context: &Context) -> Result<()> {
        let values: BTreeSet<&str> = sites.iter().map(|site| site.value.as_str()).collect();
        let mut runs =
            PairedRuns::new([(self.graph, &self.before.weights), (smaller, &self.after.weights)], |name| values.contains(name), self.before, context)?;
        let sides = SequenceRoles::new(smaller);
        for site in sites {
            let tokens = sides.token_axis(&site.value);
            let changed = match &site.kind {
                Kind::Layers { op, surviving, features } => {
                    let mut halves = [0, 1].map(|_| ProductSums::new(*features, surviving.len()));
                    let weighted = !matches!(op, Op::Conv(_));
                    let (batches, mut samples) = (runs.batches(), 0);
                    runs.each(&site.value, |batch, [x, y]| {
                        let (x, mut sizes) = calibrate::rows_by_sample(x, op, batch, tokens)?;
                        let y = calibrate::rows(y, op, batch, tokens)?;
                        let weights = weighted.then(|| row_weights(&x)).transpose()?;
                        if let ([rows], 1) = (&sizes[..], batches) {
                            sizes = vec![rows / 2, rows - rows / 2];
                        }
                        for (sums, rows) in halves.iter_mut().zip(alternating_rows(&sizes, samples, self.is_held_out)).filter(|(_, rows)| !rows.is_empty()) {
                            let part = |tensor: &Tensor| select_rows(tensor, rows.clone()).map_err(tensor_error);
                            sums.add(&part(&x)?, &part(&y)?, weights.as_ref().map(part).transpose()?.as_ref())?;
                        }
                        samples += sizes.len();
                        Ok(())
                    })?;
                    let sums = Rc::new(Sums::from_halves(halves));
                    let mut changed = Vec::new();
                    for index in &site.nodes {
                        let node = &smaller.nodes()[*index];
                        let uses = found.uses.entry(node.inputs[1]).or_default();
                        uses.insert(*index, (node, sums.clone()));
                        changed.extend(self.refit(smaller, uses, surviving, context)?);
                    }
                    found.uses.retain(|weight, _| is_shared(smaller, *weight));
                    changed
                }
                Kind::Statistics { op } => {
                    let (index, node) = (site.nodes[0], &smaller.nodes()[site.nodes[0]]);
                    let mut own = [Moments::default(), Moments::default()];
                    runs.each(&site.value, |batch, tensors| {
                        let both = own.iter_mut().zip(tensors);
                        both.into_iter().try_for_each(|(moments, value)| moments.add(&calibrate::rows(value, &Op::BatchNorm(*op), batch, tokens)?))
                    })?;
                    let all = found.moments.entry(node.inputs[3]).or_default();
                    all.insert(index, own);
                    let mut total = [Moments::default(), Moments::default()];
                    all.values().for_each(|own| total.iter_mut().zip(own).for_each(|(total, own)| total.merge(own)));
                    self.statistics(smaller, node, op, &parameters_of(smaller, node, self.before, context)?, &total, &context.device)?
                }
            };
            for (name, tensor) in changed {
                set_weight(self.after, &name, &tensor)?;
                runs.replace(&name, tensor);
            }
        }
        Ok(())
    }

    /// New parameters of a weight, for the inputs of all these nodes that read it. Each bias is adjusted to
    /// those of its own nodes.
    fn refit(&self, graph: &Graph, uses: &BTreeMap<usize, (&Node, Rc<Sums>)>, surviving: &[usize], context: &Context) -> Result<Vec<(String, Tensor)>> {
        let refit = Refit { surviving: self.surviving, repair: self.repair };
        let mut changed = Vec::new();
        let mut by_bias: BTreeMap<Option<ValueId>, Vec<(&Node, &Rc<Sums>)>> = BTreeMap::new();
        uses.values().for_each(|(node, sums)| by_bias.entry(node.inputs.get(2).copied()).or_default().push((node, sums)));
        for uses_of_bias in by_bias.values() {
            let (all, own) = (Sums::of_all(uses.values().map(|(_, sums)| sums)), Sums::of_all(uses_of_bias.iter().map(|(_, sums)| *sums)));
            let Some(((all, own), (node, _))) = all.zip(own).zip(uses_of_bias.first()) else { continue };
            changed.extend(refit.layer(graph, node, &parameters_of(graph, node, self.before, context)?, surviving, (&all, &own.all))?);
        }
        Ok(changed)
    }

    /// All sites in the order of the graph.
    fn sites(&self, graph: &Graph) -> Result<Vec<Site>> {
        let mut sites: Vec<Site> = Vec::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            let axis = match &node.op {
                Op::BatchNorm(op) => {
                    sites.push(Site { value: graph.value(node.inputs[0]).name.clone(), nodes: vec![index], kind: Kind::Statistics { op: *op } });
                    continue;
                }
                Op::Linear(op) => usize::from(!op.input_major),
                Op::Conv(op) if op.groups == 1 => 1,
                _ => continue,
            };
            let name = |at: usize| node.inputs.get(at).map(|id| graph.value(*id).name.clone()).unwrap_or_default();
            let Some(surviving) = self.surviving.get(&(name(1), axis)) else { continue };
            self.before.weights.get(&name(1))?.require_computable(&name(1))?;
            if self.repair == Repair::Bias && node.inputs.len() < 3 && !is_normalized(graph, node) {
                let what = format!("`{}` has no bias to adjust: use `repair: least-squares`", graph.value(node.output).name);
                return Err(Error::option(format!("{NAME}: repair"), what));
            }
            let value = name(0);
            match sites.iter_mut().find(|site| site.value == value && matches!(site.kind, Kind::Layers { .. })) {
                Some(site) => site.nodes.push(index),
                None => {
                    let features = self.before.weights.get(&name(1))?.shape[axis];
                    sites.push(Site { value, nodes: vec![index], kind: Kind::Layers { op: node.op.clone(), surviving: surviving.clone(), features } });
                }
            }
        }
        Ok(sites)
    }

    /// Running mean and variance with which the output of a normalization has the same mean and variance
    /// as in the original model.
    fn statistics(
        &self,
        graph: &Graph,
        node: &Node,
        op: &BatchNorm,
        original: &Parameters,
        moments: &[Moments; 2],
        device: &Device,
    ) -> Result<Vec<(String, Tensor)>> {
        let name = |at: usize| graph.value(node.inputs[at]).name.clone();
        let (mean_name, variance_name) = (name(3), name(4));
        let channels = moments[1].features();
        let surviving = self.surviving.get(&(mean_name.clone(), 0)).cloned().unwrap_or_else(|| (0..channels).collect());
        let stored = |name: &str| original.get(name).map_err(tensor_error).and_then(|tensor| numbers(&tensor));
        let (means, variances) = (stored(&mean_name)?, stored(&variance_name)?);
        let (mut mean, mut variance) = (Vec::with_capacity(channels), Vec::with_capacity(channels));
        for (now, before) in surviving.into_iter().enumerate() {
            let [(old_mean, old), (new_mean, new)] = [moments[0].mean_variance(before), moments[1].mean_variance(now)];
            // The variance of a constant channel is not changed.
            let ratio = if old > 0.0 && new > 0.0 { (new / old).sqrt() } else { 1.0 };
            mean.push((new_mean - (old_mean - means[before]) * ratio) as f32);
            variance.push(((variances[before] + op.epsilon) * ratio * ratio - op.epsilon).max(0.0) as f32);
        }
        let tensor = |values: Vec<f32>| Tensor::from_slice(&values, values.len(), device).map_err(tensor_error);
        Ok(vec![(mean_name, tensor(mean)?), (variance_name, tensor(variance)?)])
    }
}

/// The parameters of a node in a model.
pub(in crate::pass) fn parameters_of(graph: &Graph, node: &Node, model: &Model, context: &Context) -> Result<Parameters> {
    let names = node.inputs.iter().map(|id| graph.value(*id)).filter(|value| value.kind == ir::Kind::Param).map(|value| &value.name).collect();
    calibrate::some_parameters(names, model, context)
}

/// Refits the layers that read removed units.
pub(in crate::pass) struct Refit<'a> {
    pub surviving: &'a Surviving,
    pub repair: Repair,
}

impl Refit<'_> {
    /// New weight and bias of a layer. `own` are the sums over the rows of its own inputs, if the same weight
    /// also has others.
    pub fn layer(
        &self,
        graph: &Graph,
        node: &Node,
        original: &Parameters,
        surviving: &[usize],
        (Sums { all: sums, halves }, own): (&Sums, &ProductSums),
    ) -> Result<Vec<(String, Tensor)>> {
        let name = |at: usize| node.inputs.get(at).map(|id| graph.value(*id).name.clone());
        let (Some(weight), bias) = (name(1), name(2)) else { return Ok(Vec::new()) };
        let correction = match self.repair {
            Repair::LeastSquares => sums.correction(surviving, bias.is_some()).map(Some),
            _ => Some(None),
        };
        let Some(correction) = correction else {
            return Err(Error::run(NAME, format!("there are too few calibration samples to refit `{weight}`"), "use more samples"));
        };
        let (features, remaining) = (sums.x.len(), sums.y.len());
        // The original weight for the remaining outputs, [out, taps, features].
        let full_weight = || {
            let mut full = original.get(&weight)?;
            for axis in 0..full.rank() {
                let read = if full.rank() > 2 { 1 } else { usize::from(!is_input_major(&node.op)) };
                if let Some(surviving) = self.surviving.get(&(weight.clone(), axis)).filter(|_| axis != read) {
                    let index: Vec<u32> = surviving.iter().map(|at| *at as u32).collect();
                    full = full.index_select(&Tensor::from_vec(index.clone(), index.len(), full.device())?, axis)?;
                }
            }
            let shape = full.dims().to_vec();
            let full = match shape.as_slice() {
                [_, _, _, ..] => full.flatten_from(2)?.transpose(1, 2)?.contiguous()?,
                _ if is_input_major(&node.op) => full.t()?.contiguous()?.unsqueeze(1)?,
                _ => full.unsqueeze(1)?,
            };
            Ok((full, shape))
        };
        let (full, shape) = full_weight().map_err(tensor_error)?;
        let mut estimate = sums.selection(surviving);
        if let Some(correction) = correction {
            let rows = full.flatten_to(1).map_err(tensor_error)?;
            let share = held_out_share(&rows, halves, surviving, bias.is_some())?;
            estimate.iter_mut().zip(correction).for_each(|(estimate, correction)| *estimate += share * correction);
        }
        let compute = || {
            let (out, taps, _) = full.dims3()?;
            let matrix: Vec<f32> = estimate.iter().map(|v| *v as f32).collect();
            let matrix = Tensor::from_vec(matrix, (features, remaining), full.device())?;
            let product = |rows: &Tensor, matrix: &Tensor| transposed_product(&rows.t()?.contiguous()?, matrix);
            let new = product(&full.reshape((out * taps, features))?, &matrix)?.reshape((out, taps, remaining))?;
            let mut changed = Vec::with_capacity(2);
            if let Some(bias) = &bias {
                let means = |values: &[f64]| values.iter().map(|sum| own.mean(*sum) as f32).collect::<Vec<_>>();
                let column = |values: &[f64]| Tensor::from_vec(means(values), (values.len(), 1), full.device());
                let before = product(&full.sum(1)?, &column(&own.x)?)?;
                let after = product(&new.sum(1)?, &column(&own.y)?)?;
                let shift = (before - after)?.flatten_all()?;
                let mut old = original.get(bias)?;
                if let Some(surviving) = self.surviving.get(&(bias.clone(), 0)) {
                    let index: Vec<u32> = surviving.iter().map(|at| *at as u32).collect();
                    old = old.index_select(&Tensor::from_vec(index.clone(), index.len(), old.device())?, 0)?;
                }
                changed.push((bias.clone(), (old + shift)?));
            }
            if self.repair == Repair::LeastSquares {
                let new = match shape.as_slice() {
                    [_, _, window @ ..] if !window.is_empty() => new.transpose(1, 2)?.contiguous()?.reshape([&[out, remaining], window].concat())?,
                    _ if is_input_major(&node.op) => new.squeeze(1)?.t()?.contiguous()?,
                    _ => new.squeeze(1)?,
                };
                changed.push((weight.clone(), new));
            }
            Ok(changed)
        };
        compute().map_err(tensor_error)
    }
}

pub(in crate::pass) fn is_input_major(op: &Op) -> bool {
    matches!(op, Op::Linear(op) if op.input_major)
}

/// Indices of the rows of a batch in each half of the samples: even samples and odd samples, without held-out
/// ones. Rows of one sample are correlated, and are in the same half. `first` is the index of the first
/// sample of the batch, `sizes` the number of rows of each of its samples.
pub(in crate::pass) fn alternating_rows(sizes: &[usize], first: usize, is_held_out: &dyn Fn(usize) -> bool) -> [Vec<u32>; 2] {
    let mut halves = [Vec::new(), Vec::new()];
    let mut begin = 0u32;
    for (sample, size) in (first..).zip(sizes) {
        let end = begin + *size as u32;
        if !is_held_out(sample) {
            halves[sample % 2].extend(begin..end);
        }
        begin = end;
    }
    halves
}

/// Why no layer is repaired.
pub(super) fn reason_for_no_layers(graph: &Graph, surviving: &Surviving) -> String {
    const SUPPORTED: &str = "it supports linear layers and convolutions with `groups: 1`";
    let weight = |node: &Node| node.inputs.get(1).map(|id| graph.value(*id).name.clone()).unwrap_or_default();
    let is_cut = |node: &&Node| matches!(&node.op, Op::Conv(op) if op.groups > 1) && surviving.keys().any(|(name, _)| *name == weight(node));
    let grouped: Vec<String> = graph.nodes().iter().filter(is_cut).map(weight).collect();
    match grouped.first() {
        Some(first) => format!("{SUPPORTED}, but the removed units belong to {}, such as `{first}`", counted(grouped.len(), "grouped convolution")),
        None => format!("{SUPPORTED}, none of which reads the removed units"),
    }
}

/// Whether a batch normalization reads the output of a node. Its updated statistics replace a bias
/// correction.
fn is_normalized(graph: &Graph, node: &Node) -> bool {
    graph.nodes().iter().any(|next| matches!(next.op, Op::BatchNorm(_)) && next.inputs.first() == Some(&node.output))
}

/// Replaces the values of a weight. Its dtype does not change.
pub(in crate::pass) fn set_weight(model: &mut Model, name: &str, tensor: &Tensor) -> Result<()> {
    let weight = model.weights.get(name)?.clone();
    let values: Vec<f32> = transfer::values(tensor, Cause::Statistics).map_err(tensor_error)?;
    let weight = weight.with_values(name, &values)?;
    model.weights.by_name.insert(name.to_owned(), weight);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Inputs;
    use crate::pass::Amount;
    use crate::pass::prune_structured::{Amounts, Importance, PruneStructured, Ranking};
    use crate::pass::testing::{calibrated, model};

    /// The last four of eight neurons equal the first four and are removed: the layer that reads them then
    /// has the sums of both weights, in either layout.
    #[test]
    fn weights_of_removed_duplicates_are_added_to_those_of_survivors() {
        const READERS: [[f32; 4]; 2] = [[1.0, -0.8, 0.9, 0.7], [0.6, 0.9, -0.7, 1.0]];
        let mut random = fastrand::Rng::with_seed(1);
        let x = Tensor::from_vec((0..1600).map(|_| 2.0 * random.f32() - 1.0).collect::<Vec<_>>(), (400, 4), &Device::Cpu).unwrap();
        let pass = PruneStructured {
            amount: Some(Amounts::All(Amount::fraction(0.5))),
            importance: Importance::Activation,
            repair: Repair::LeastSquares,
            round_to: 1,
            ..PruneStructured::default()
        };
        for input_major in [false, true] {
            let (first, second) = if input_major { ("4, 8", "8, 2") } else { ("8, 4", "2, 8") };
            let text = format!(
                "input x: float[batch, 4]\nparam a.weight: float[{first}]\nparam b.weight: float[{second}]\nparam b.bias: float[2]\n\
                h = Linear{{\"input_major\":{input_major}}}(x, a.weight) -> float[batch, 8]\nt = Tanh(h) -> float[batch, 8]\n\
                y = Linear{{\"input_major\":{input_major}}}(t, b.weight, b.bias) -> float[batch, 2]\noutput y = y\n"
            );
            // Values of a matrix in its layout, by output and input.
            let stored = |outputs: usize, inputs: usize, value: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
                let index = |at: usize| if input_major { (at % outputs, at / outputs) } else { (at / inputs, at % inputs) };
                (0..outputs * inputs).map(|at| value(index(at).0, index(at).1)).collect()
            };
            let values = |name: &str, _: &[usize]| match name {
                "a.weight" => stored(8, 4, &|neuron, input| if neuron % 4 == input { 1.5 } else { 0.2 }),
                "b.weight" => stored(2, 8, &|output, neuron| READERS[output][neuron % 4] * if neuron < 4 { 1.0 } else { 0.5 }),
                _ => vec![0.1, -0.2],
            };
            let (_folder, original) = model(&text, values).unwrap();
            let inputs = Inputs::from([("x".to_owned(), x.clone())]);
            let (pruned, _) = calibrated(&inputs, |context| pass.prune(original, Ranking::Measured(context))).unwrap().unwrap();
            let expected = [stored(2, 4, &|output, neuron| 1.5 * READERS[output][neuron]), vec![0.1, -0.2]];
            for (name, expected) in ["b.weight", "b.bias"].into_iter().zip(expected) {
                let found = pruned.weights.get(name).unwrap().floats(name).unwrap();
                let is_close = found.len() == expected.len() && found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 0.05);
                assert!(is_close, "input_major: {input_major}, {name}: {found:?}, not {expected:?}");
            }
        }
    }

    /// Layers that are computed for two inputs are repaired like those of a model with the samples of both.
    #[test]
    fn shared_weights_are_fitted_to_all_of_their_inputs() {
        const PARAMS: &str = "param a.weight: float[8, 4, 1, 1]\nparam b.weight: float[3, 8, 1, 1]\nparam b.bias: float[3]\n\
            param n.weight: float[3]\nparam n.bias: float[3]\nparam n.mean: float[3]\nparam n.variance: float[3]\n";
        let conv = "Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}";
        let branch = |i: &str| {
            format!(
                "h{i} = {conv}(x{i}, a.weight) -> float[batch, 8, 1, 1]\nt{i} = Relu(h{i}) -> float[batch, 8, 1, 1]\n\
                o{i} = {conv}(t{i}, b.weight, b.bias) -> float[batch, 3, 1, 1]\n\
                y{i} = BatchNorm{{\"epsilon\":1e-5}}(o{i}, n.weight, n.bias, n.mean, n.variance) -> float[batch, 3, 1, 1]\n"
            )
        };
        let input = |i: &str| format!("input x{i}: float[batch, 4, 1, 1]\n");
        let one = format!("{}{PARAMS}{}output y = y0\n", input("0"), branch("0"));
        let two = format!("{}{}{PARAMS}{}{}output y = y1\noutput z = y2\n", input("1"), input("2"), branch("1"), branch("2"));
        let mut random = fastrand::Rng::with_seed(3);
        let mut numbers = |count: usize, shift: f32| (0..count).map(|_| 2.0 * random.f32() - 1.0 + shift).collect::<Vec<f32>>();
        let (first, second, weights) = (numbers(800, 0.6), numbers(800, -0.4), numbers(100, 0.0));
        // Pairs of samples in turns, so that even and odd ones are those of the model with two inputs.
        let both: Vec<f32> = first.chunks(8).zip(second.chunks(8)).flat_map(|(a, b)| a.iter().chain(b).copied()).collect();
        let tensor = |values: &[f32]| Tensor::from_slice(values, (values.len() / 4, 4, 1, 1), &Device::Cpu).unwrap();
        let repaired = |text: &str, inputs: &[(&str, &[f32])], repair: Repair| {
            let values = |name: &str, shape: &[usize]| {
                let count = shape.iter().product();
                if name == "n.variance" { vec![1.0; count] } else { weights[name.len() % 5..][..count].to_vec() }
            };
            let (_folder, original) = model(text, values).unwrap();
            let pass = PruneStructured { amount: Some(Amounts::All(Amount::fraction(0.5))), repair, round_to: 1, ..PruneStructured::default() };
            let inputs: Inputs = inputs.iter().map(|(name, values)| ((*name).to_owned(), tensor(values))).collect();
            let (pruned, _) = calibrated(&inputs, |context| pass.prune(original, Ranking::Measured(context))).unwrap().unwrap();
            let floats = |name: &str| pruned.weights.get(name).unwrap().floats(name).unwrap().to_vec();
            ["b.weight", "b.bias", "n.mean", "n.variance"].map(floats).concat()
        };
        for repair in [Repair::LeastSquares, Repair::Bias] {
            let expected = repaired(&one, &[("x0", &both)], repair);
            let found = repaired(&two, &[("x1", &first), ("x2", &second)], repair);
            assert!(found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 1e-3), "{repair:?}: {found:?}, not {expected:?}");
        }
    }

    #[test]
    fn grouped_convolutions_are_not_repaired() {
        let conv = |groups: usize| format!("Conv{{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":{groups}}}");
        let graph: Graph = format!(
            "input x: float[batch, 4, 6, 6]\nparam a.weight: float[8, 4, 1, 1]\nparam b.weight: float[8, 1, 1, 1]\n\
            h = {}(x, a.weight) -> float[batch, 8, 6, 6]\ny = {}(h, b.weight) -> float[batch, 8, 6, 6]\noutput y = y\n",
            conv(1),
            conv(8)
        )
        .parse()
        .unwrap();
        let reason = |names: &[&str]| reason_for_no_layers(&graph, &names.iter().map(|name| (((*name).to_owned(), 0), vec![0])).collect());
        assert!(reason(&["a.weight", "b.weight"]).ends_with("the removed units belong to 1 grouped convolution, such as `b.weight`"));
        assert!(reason(&["a.weight"]).ends_with("none of which reads the removed units"));
    }

    /// With one sample per batch, the second half would otherwise hold rows of the same samples as the
    /// first.
    #[test]
    fn halves_consist_of_whole_samples() {
        assert_eq!(alternating_rows(&[2, 1, 3], 0, &|_| false), [vec![0, 1, 3, 4, 5], vec![2]]);
        assert_eq!((alternating_rows(&[2], 4, &|_| false), alternating_rows(&[2], 5, &|_| false)), ([vec![0, 1], vec![]], [vec![], vec![0, 1]]));
    }
}

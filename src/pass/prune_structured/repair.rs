//! Mending the layers that read what was taken out, from calibration data, without training.
//!
//! Layer by layer, in the order of the graph: the values `x` that a layer read in the whole model are estimated from the
//! values `y` that are left for it in the smaller one, `x ≈ M y + c` by least squares, and the layer's weight `W` becomes
//! `W M`, its bias `b + W c` (He et al., *Channel Pruning for Accelerating Very Deep Neural Networks*, 2017,
//! <https://arxiv.org/abs/1707.06168>, for all taps of a window together). Layers behind see what came of it. Batch
//! normalisation gets statistics with which it gives values of the same mean and variance as before. Only sums of products of features are kept.

use candle_core::{D, Device, Tensor};

use super::calibrate::{self, computed, numbers};
use super::cut::Surviving;
use super::{NAME, Repair};
use crate::error::{Error, Result};
use crate::exec::{Executor, Parameters};
use crate::ir::{Graph, Node, Op};
use crate::kernel::solve;
use crate::model::Model;
use crate::pass::Context;

/// What is added to squares at least, in parts of their mean: keeps weights near what they were where data says little. With
/// few rows it is features by rows.
const RIDGE: f64 = 1e-3;

/// A model before and after, and what is to be mended between them.
pub(super) struct Mending<'a> {
    pub before: &'a Model,
    pub graph: &'a Graph,
    pub after: &'a mut Model,
    pub kept: &'a Surviving,
    pub repair: Repair,
}

/// A place where something is mended.
enum Site {
    /// Layers that read a value of which these features are left.
    Layers { value: String, op: Op, nodes: Vec<usize>, kept: Vec<usize>, features: usize },
    /// A batch normalisation.
    Statistics { node: usize },
}

impl Mending<'_> {
    /// Mends; answers how many layers and normalisations.
    ///
    /// # Errors
    /// A layer has no bias to mend, the data does not fit, or memory runs out.
    pub fn run(self, context: &Context) -> Result<(usize, usize)> {
        let smaller = self.after.graph()?;
        let whole = calibrate::parameters(self.graph, self.before, context)?;
        let mut parts = calibrate::parameters(&smaller, self.after, context)?;
        let sites = self.sites(&smaller)?;
        let mut counts = (0, 0);
        for site in &sites {
            let changed = match site {
                Site::Layers { value, op, nodes, kept, features } => {
                    let sums = self.sums(&smaller, [&whole, &parts], value, op, *features, kept.len(), context)?;
                    counts.0 += nodes.len();
                    let mut changed = Vec::new();
                    for node in nodes {
                        changed.extend(self.layer(&smaller, &smaller.nodes()[*node], &whole, kept, &sums)?);
                    }
                    changed
                }
                Site::Statistics { node } => {
                    counts.1 += 1;
                    self.statistics(&smaller, &smaller.nodes()[*node], [&whole, &parts], context)?
                }
            };
            for (name, tensor) in changed {
                hold(self.after, &name, &tensor)?;
                parts = parts.with(&name, tensor);
            }
        }
        Ok(counts)
    }

    /// Places in the order of the graph.
    fn sites(&self, graph: &Graph) -> Result<Vec<Site>> {
        let mut sites: Vec<Site> = Vec::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            let axis = match &node.op {
                Op::BatchNorm(_) => {
                    sites.push(Site::Statistics { node: index });
                    continue;
                }
                Op::Linear(op) => usize::from(!op.input_major),
                Op::Conv(op) if op.groups == 1 => 1,
                _ => continue,
            };
            let name = |at: usize| node.inputs.get(at).map(|id| graph.value(*id).name.clone()).unwrap_or_default();
            let Some(kept) = self.kept.get(&(name(1), axis)) else { continue };
            if self.repair == Repair::Bias && node.inputs.len() < 3 && !normalised(graph, node) {
                let what = format!("`{}` has no bias that could be mended: repair: least-squares does without", graph.value(node.output).name);
                return Err(Error::option(format!("{NAME}: repair"), what));
            }
            let value = name(0);
            let same = sites.iter_mut().find_map(|site| match site {
                Site::Layers { value: other, nodes, .. } if *other == value => Some(nodes),
                _ => None,
            });
            match same {
                Some(nodes) => nodes.push(index),
                None => {
                    let features = self.before.weights.get(&name(1))?.shape[axis];
                    sites.push(Site::Layers { value, op: node.op.clone(), nodes: vec![index], kept: kept.clone(), features });
                }
            }
        }
        Ok(sites)
    }

    /// Sums over the features that a value has in the whole and in the smaller model.
    #[allow(clippy::too_many_arguments)]
    fn sums(&self, smaller: &Graph, [whole, parts]: [&Parameters; 2], value: &str, op: &Op, features: usize, left: usize, context: &Context) -> Result<Sums> {
        let executors = [Executor::new(self.graph, whole.clone(), context.device.clone()), Executor::new(smaller, parts.clone(), context.device.clone())];
        let mut sums = Sums { rows: 0.0, count: 0.0, x: vec![0.0; features], y: vec![0.0; left], xy: vec![0.0; features * left], yy: vec![0.0; left * left] };
        calibrate::for_each("Repairing", self.before, context, |batch| {
            let mut seen = Vec::with_capacity(2);
            for executor in &executors {
                executor.run_observed(&batch.inputs, &mut |name, tensor| {
                    if name == value {
                        seen.push(calibrate::rows(tensor, op, &batch)?);
                    }
                    Ok(())
                })?;
            }
            let [x, y] = seen.as_slice() else { return Err(Error::graph(format!("graph value `{value}`"), "is not computed")) };
            if matches!(op, Op::Conv(_)) { sums.add(x, y, None) } else { sums.add(x, y, Some(&evenly(x)?)) }
        })?;
        Ok(sums)
    }

    /// New weight and bias of a layer.
    fn layer(&self, graph: &Graph, node: &Node, whole: &Parameters, kept: &[usize], sums: &Sums) -> Result<Vec<(String, Tensor)>> {
        let name = |at: usize| node.inputs.get(at).map(|id| graph.value(*id).name.clone());
        let (Some(weight), bias) = (name(1), name(2)) else { return Ok(Vec::new()) };
        let estimate = match self.repair {
            Repair::LeastSquares => sums.estimate(kept, bias.is_some()),
            _ => Some(sums.selection(kept)),
        };
        let Some(estimate) = estimate else {
            return Err(Error::run(NAME, format!("calibration data says too little about the inputs of `{weight}`"), "use more samples"));
        };
        let (features, left) = (sums.x.len(), sums.y.len());
        let compute = || {
            // [out, taps, features]: the weight of the whole model for the outputs that are left.
            let mut full = whole.get(&weight)?;
            for axis in 0..full.rank() {
                let read = if full.rank() == 4 { 1 } else { usize::from(!is_input_major(&node.op)) };
                if let Some(kept) = self.kept.get(&(weight.clone(), axis)).filter(|_| axis != read) {
                    let index: Vec<u32> = kept.iter().map(|at| *at as u32).collect();
                    full = full.index_select(&Tensor::from_vec(index.clone(), index.len(), full.device())?, axis)?;
                }
            }
            let shape = full.dims().to_vec();
            let full = match shape.as_slice() {
                [out, _, height, width] => full.permute((0, 2, 3, 1))?.contiguous()?.reshape((*out, height * width, features))?,
                _ if is_input_major(&node.op) => full.t()?.contiguous()?.unsqueeze(1)?,
                _ => full.unsqueeze(1)?,
            };
            let (out, taps, _) = full.dims3()?;
            let matrix: Vec<f32> = estimate.iter().map(|v| *v as f32).collect();
            let matrix = Tensor::from_vec(matrix, (features, left), full.device())?;
            let new = full.reshape((out * taps, features))?.matmul(&matrix)?.reshape((out, taps, left))?;
            let mut changed = Vec::with_capacity(2);
            if let Some(bias) = &bias {
                let column =
                    |values: &[f64]| Tensor::from_vec(values.iter().map(|v| (v / sums.count) as f32).collect::<Vec<_>>(), (values.len(), 1), full.device());
                let before = full.sum(1)?.matmul(&column(&sums.x)?)?;
                let after = new.sum(1)?.matmul(&column(&sums.y)?)?;
                let shift = (before - after)?.flatten_all()?;
                let mut old = whole.get(bias)?;
                if let Some(kept) = self.kept.get(&(bias.clone(), 0)) {
                    let index: Vec<u32> = kept.iter().map(|at| *at as u32).collect();
                    old = old.index_select(&Tensor::from_vec(index.clone(), index.len(), old.device())?, 0)?;
                }
                changed.push((bias.clone(), (old + shift)?));
            }
            if self.repair == Repair::LeastSquares {
                let new = match shape.as_slice() {
                    [_, _, height, width] => new.reshape((out, *height, *width, left))?.permute((0, 3, 1, 2))?.contiguous()?,
                    _ if is_input_major(&node.op) => new.squeeze(1)?.t()?.contiguous()?,
                    _ => new.squeeze(1)?,
                };
                changed.push((weight.clone(), new));
            }
            Ok(changed)
        };
        compute().map_err(computed)
    }

    /// Mean and variance with which a normalisation gives values of the same mean and variance as in the whole model.
    fn statistics(&self, graph: &Graph, node: &Node, [whole, parts]: [&Parameters; 2], context: &Context) -> Result<Vec<(String, Tensor)>> {
        let names: Vec<String> = node.inputs.iter().map(|id| graph.value(*id).name.clone()).collect();
        let ([value, _, _, mean_name, variance_name], Op::BatchNorm(op)) = (names.as_slice(), &node.op) else { return Ok(Vec::new()) };
        let executors = [Executor::new(self.graph, whole.clone(), context.device.clone()), Executor::new(graph, parts.clone(), context.device.clone())];
        let mut moments = [Moments::default(), Moments::default()];
        calibrate::for_each("Repairing", self.before, context, |batch| {
            for (executor, moments) in executors.iter().zip(&mut moments) {
                executor.run_observed(&batch.inputs, &mut |name, tensor| {
                    if name == value.as_str() { moments.add(&calibrate::rows(tensor, &node.op, &batch)?) } else { Ok(()) }
                })?;
            }
            Ok(())
        })?;
        let channels = moments[1].sums.len();
        let kept = self.kept.get(&(mean_name.clone(), 0)).cloned().unwrap_or_else(|| (0..channels).collect());
        let stored = |name: &str| whole.get(name).map_err(computed).and_then(|tensor| numbers(&tensor));
        let (means, variances) = (stored(mean_name)?, stored(variance_name)?);
        let (mut mean, mut variance) = (Vec::with_capacity(channels), Vec::with_capacity(channels));
        for (now, before) in kept.into_iter().enumerate() {
            let [(old_mean, old), (new_mean, new)] = [moments[0].of(before), moments[1].of(now)];
            // A channel that says nothing stays as it is.
            let ratio = if old > 0.0 && new > 0.0 { (new / old).sqrt() } else { 1.0 };
            mean.push((new_mean - (old_mean - means[before]) * ratio) as f32);
            variance.push(((variances[before] + op.epsilon) * ratio * ratio - op.epsilon).max(0.0) as f32);
        }
        let tensor = |values: Vec<f32>| Tensor::from_vec(values.clone(), values.len(), &context.device).map_err(computed);
        Ok(vec![(mean_name.clone(), tensor(mean)?), (variance_name.clone(), tensor(variance)?)])
    }
}

/// Sums and sums of squares of features.
#[derive(Default)]
struct Moments {
    count: f64,
    sums: Vec<f64>,
    squares: Vec<f64>,
}

impl Moments {
    fn add(&mut self, rows: &Tensor) -> Result<()> {
        self.count += rows.dims()[0] as f64;
        add(&mut self.sums, &numbers(&rows.sum(0).map_err(computed)?)?);
        add(&mut self.squares, &numbers(&rows.sqr().and_then(|s| s.sum(0)).map_err(computed)?)?);
        Ok(())
    }

    /// Mean and variance of a feature.
    fn of(&self, at: usize) -> (f64, f64) {
        let mean = self.sums[at] / self.count;
        (mean, (self.squares[at] / self.count - mean * mean).max(0.0))
    }
}

fn is_input_major(op: &Op) -> bool {
    matches!(op, Op::Linear(op) if op.input_major)
}

/// Whether what a node computes goes into a batch normalisation, whose statistics are taken again.
fn normalised(graph: &Graph, node: &Node) -> bool {
    graph.nodes().iter().any(|next| matches!(next.op, Op::BatchNorm(_)) && next.inputs.first() == Some(&node.output))
}

/// Weights of rows `[n, 1]` with which every row counts the same, however large its numbers are: a few tokens that carry
/// huge numbers would decide everything, and the normalisation behind the layer takes size out again.
fn evenly(rows: &Tensor) -> Result<Tensor> {
    let weights = || {
        let squares = rows.sqr()?.sum_keepdim(D::Minus1)?;
        let mean = squares.mean_all()?.to_scalar::<f32>()?;
        let mean = f64::from(mean).max(f64::from(f32::MIN_POSITIVE));
        (squares + 0.1 * mean)?.recip()? * mean
    };
    weights().map_err(computed)
}

fn add(sums: &mut Vec<f64>, values: &[f64]) {
    sums.resize(values.len(), 0.0);
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

/// Sums of features `x` of the whole model and `y` of the smaller one, and of their products.
struct Sums {
    /// How many rows, and the sum of their weights.
    rows: f64,
    count: f64,
    x: Vec<f64>,
    y: Vec<f64>,
    xy: Vec<f64>,
    yy: Vec<f64>,
}

impl Sums {
    /// Adds rows, each with a weight where there are some.
    fn add(&mut self, x: &Tensor, y: &Tensor, weights: Option<&Tensor>) -> Result<()> {
        self.rows += x.dims()[0] as f64;
        let Some(weights) = weights else {
            self.count += x.dims()[0] as f64;
            return self.add_weighted([x, x], [y, y]);
        };
        self.count += numbers(weights)?.iter().sum::<f64>();
        let weighted = |rows: &Tensor| rows.broadcast_mul(weights).map_err(computed);
        self.add_weighted([x, &weighted(x)?], [y, &weighted(y)?])
    }

    fn add_weighted(&mut self, [x, weighted_x]: [&Tensor; 2], [y, weighted_y]: [&Tensor; 2]) -> Result<()> {
        let product = |a: &Tensor, b: &Tensor| a.t().and_then(|a| a.contiguous()).and_then(|a| a.matmul(&b.contiguous()?)).map_err(computed);
        add(&mut self.x, &numbers(&weighted_x.sum(0).map_err(computed)?)?);
        add(&mut self.y, &numbers(&weighted_y.sum(0).map_err(computed)?)?);
        add(&mut self.xy, &numbers(&product(x, weighted_y)?)?);
        add(&mut self.yy, &numbers(&product(y, weighted_y)?)?);
        Ok(())
    }

    /// The matrix `[x, y]` that takes what is left as it is.
    fn selection(&self, kept: &[usize]) -> Vec<f64> {
        let left = self.y.len();
        let mut matrix = vec![0.0; self.x.len() * left];
        kept.iter().enumerate().for_each(|(j, i)| matrix[i * left + j] = 1.0);
        matrix
    }

    /// The matrix `M` of `x ≈ M y + c`, with `c` free or zero.
    fn estimate(&self, kept: &[usize], centred: bool) -> Option<Vec<f64>> {
        let (n, left) = (self.x.len(), self.y.len());
        let mean = |sums: &[f64], at: usize| if centred { sums[at] / self.count } else { 0.0 };
        let mut yy: Vec<f64> = (0..left * left).map(|at| self.yy[at] / self.count - mean(&self.y, at / left) * mean(&self.y, at % left)).collect();
        let scale = (0..left).map(|j| yy[j * left + j]).sum::<f64>() / left.max(1) as f64;
        let ridge = RIDGE.max(left as f64 / self.rows.max(1.0));
        let mut matrix = self.selection(kept);
        // What the selection leaves over is estimated, so that the ridge draws towards the selection.
        let rest: Vec<f64> = (0..n * left)
            .map(|at| {
                let (i, j) = (at / left, at % left);
                let xy = self.xy[at] / self.count - mean(&self.x, i) * mean(&self.y, j);
                xy - kept.binary_search(&i).map_or(0.0, |own| yy[own * left + j])
            })
            .collect();
        (0..left).for_each(|j| yy[j * left + j] += ridge * scale + f64::MIN_POSITIVE);
        if !solve::factor(&mut yy, left) {
            return None;
        }
        for (row, target) in rest.chunks(left).zip(matrix.chunks_mut(left)) {
            let mut row = row.to_vec();
            solve::solve(&yy, left, &mut row);
            target.iter_mut().zip(row).for_each(|(m, r)| *m += r);
        }
        Some(matrix)
    }
}

/// Puts a tensor in the place of a weight, in the weight's own format.
fn hold(model: &mut Model, name: &str, tensor: &Tensor) -> Result<()> {
    let weight = model.weights.get(name)?.clone();
    let values: Vec<f32> = tensor.to_device(&Device::Cpu).and_then(|t| t.flatten_all()?.to_vec1()).map_err(computed)?;
    let held = weight.with_values(name, &values)?;
    model.weights.by_name.insert(name.to_owned(), held);
    Ok(())
}

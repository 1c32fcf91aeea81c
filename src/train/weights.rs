//! The student's weights while it trains: f32 masters, what the graph sees of them, and what is written in the end.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor};

use super::Team;
use super::checkpoint::Stream;
use super::scales::{self, Quantizers};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{MemoryCategory, MemoryTracker, Parameters, Residence, bytes_of};
use crate::ir::ops::round_half_even;
use crate::ir::{Graph, Node, Op};
use crate::kernel::quantize;
use crate::model::Model;
use crate::store::{DType as Stored, Encoding, Pattern, Scales, Weight, select};
use crate::work::Work;

/// Weights that train and weights that do not.
pub struct Weights {
    /// In f32; changed in place.
    pub trained: BTreeMap<String, Tensor>,
    /// In the precision of the computation.
    fixed: BTreeMap<String, Tensor>,
    /// 0 where a pruned weight stays zero.
    masks: BTreeMap<String, Tensor>,
    /// Weights whose layers see them rounded to integers.
    rounded: BTreeMap<String, Rounding>,
    /// Logarithms of learned scales of values, and what their gradients are multiplied with.
    values: BTreeMap<String, f64>,
    device: Device,
    compute: DType,
}

/// Rounding to integers that gradients do not see (Bengio et al., *Estimating or Propagating Gradients Through Stochastic
/// Neurons*, 2013; Jacob et al., *Quantization and Training of Neural Networks*, 2018).
struct Rounding {
    scales: Scales,
    /// One row for each run of elements under one scale.
    scale: Tensor,
    /// The format that scales are written in.
    stored: DType,
    zero: Tensor,
    /// The least and the largest integer.
    bounds: [f32; 2],
}

impl Rounding {
    fn new(scales: Scales, stored: DType, bounds: [f32; 2], device: &Device) -> candle_core::Result<Rounding> {
        let column = |values: &[f32]| Tensor::from_slice(values, (values.len(), 1), device);
        Ok(Rounding { scale: column(&scales.scales)?, stored, zero: column(&scales.zero_points)?, bounds, scales })
    }

    /// The scales with these logarithms on them, as they will be written.
    fn scale(&self, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        match learned {
            Some(logarithms) => (&self.scale * logarithms.exp()?.reshape(self.scale.dims())?)?.to_dtype(self.stored)?.to_dtype(DType::F32),
            None => Ok(self.scale.clone()),
        }
    }

    /// A weight in steps, `[runs, elements of a run]`.
    fn steps(&self, weight: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        weight.reshape((self.scales.scales.len(), self.scales.run))?.broadcast_div(scale)
    }

    /// Integers, as floats, `[runs, elements of a run]`.
    fn integers(&self, weight: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        let [least, most] = self.bounds;
        round_half_even(&self.steps(weight, scale)?)?.broadcast_add(&self.zero)?.clamp(least, most)
    }

    fn apply(&self, weight: &Tensor, learned: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let scale = self.scale(learned)?;
        self.integers(weight, &scale)?.broadcast_sub(&self.zero)?.broadcast_mul(&scale)?.reshape(weight.dims())
    }

    /// Gradients of the logarithms of scales, given that of the rounded weight: as for
    /// [`LearnedFakeQuantize`](crate::ir::ops::LearnedFakeQuantize).
    fn of_logarithms(&self, weight: &Tensor, learned: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let scale = self.scale(Some(learned))?;
        let steps = self.steps(weight, &scale)?;
        let rounded = self.integers(weight, &scale)?.broadcast_sub(&self.zero)?;
        let passes = round_half_even(&steps)?.eq(&rounded)?.to_dtype(steps.dtype())?;
        let moved = (rounded - (steps * passes)?)?.broadcast_mul(&scale)?;
        (gradient.reshape(moved.dims())? * moved)?.sum(1)?.affine(scales::damping(self.scales.run), 0.0)
    }
}

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    let what = format!("tensor `{name}`");
    move |e| Error::computed(what, e)
}

/// Parameters that are statistics and not weights.
fn statistics(graph: &Graph) -> BTreeSet<&str> {
    let of = |node: &'_ Node| match node.op {
        Op::BatchNorm(_) => 3,
        Op::CacheQuantize(_) => 1,
        _ => usize::MAX,
    };
    let inputs = graph.nodes().iter().flat_map(|node| node.inputs.get(of(node)..).unwrap_or(&[]));
    inputs.map(|id| graph.value(*id).name.as_str()).collect()
}

/// Which parameters train.
pub(super) fn selected<'a>(graph: &'a Graph, targets: &'a [Pattern], ignore: &'a [Pattern]) -> impl Fn(&str) -> bool + 'a {
    let statistics = statistics(graph);
    let any = |patterns: &[Pattern], name: &str| patterns.iter().any(|pattern| pattern.matches(name));
    move |name| !statistics.contains(name) && (targets.is_empty() || any(targets, name)) && !any(ignore, name)
}

impl Weights {
    /// Loads the weights of a graph.
    ///
    /// # Errors
    /// A pattern matches nothing, nothing is left to train, reading fails, or memory runs out.
    pub fn load(
        graph: &Graph,
        model: &Model,
        (targets, ignore): (&[Pattern], &[Pattern]),
        device: &Device,
        compute: DType,
        memory_tracker: &MemoryTracker,
        work: &Work,
    ) -> Result<Weights> {
        let statistics = statistics(graph);
        let names: Vec<&String> = graph.params().map(|(_, value)| &value.name).collect();
        select::check("targets", targets, names.iter().copied())?;
        select::check("ignore", ignore, names.iter().copied())?;
        let selected = selected(graph, targets, ignore);
        // Masters are what was there before rounding, where that is known.
        let mut unrounded = model.weights.clone();
        for (name, weight) in &mut unrounded.by_name {
            if let Some(before) = weight.source().unrounded().filter(|_| selected(name)) {
                *weight = before.clone();
            }
        }
        let loaded = Parameters::load(graph, &unrounded, device, DType::F32, Residence::Computed, work)?;
        let mut weights = Weights {
            trained: BTreeMap::new(),
            fixed: BTreeMap::new(),
            masks: BTreeMap::new(),
            rounded: BTreeMap::new(),
            values: BTreeMap::new(),
            device: device.clone(),
            compute,
        };
        for name in names {
            let weight = model.weights.get(name)?;
            let tensor = loaded.get(name).map_err(failed(name))?;
            let keep = statistics.contains(name.as_str());
            if !selected(name) {
                let tensor = if keep { Ok(tensor) } else { tensor.to_dtype(compute) };
                weights.fixed.insert(name.clone(), tensor.map_err(failed(name))?);
                continue;
            }
            if let (Some(scales), Encoding::Affine(affine)) = (weight.scales()?, &weight.encoding) {
                if !affine.codes.is_integer() {
                    return Err(Error::tensor(
                        name,
                        format!("is {}, and training goes through the rounding of integers only", weight.describe()),
                        "train before quantizing, or add it to `ignore`",
                    ));
                }
                let stored = match affine.scale_dtype {
                    Stored::BF16 => DType::BF16,
                    Stored::F16 => DType::F16,
                    _ => DType::F32,
                };
                let bounds = quantize::bounds(affine.codes.bits());
                let rounding = Rounding::new(scales, stored, bounds, device);
                weights.rounded.insert(name.clone(), rounding.map_err(failed(name))?);
            }
            if let Some(mask) = mask(&tensor).map_err(failed(name))? {
                weights.masks.insert(name.clone(), mask);
            }
            weights.trained.insert(name.clone(), tensor);
        }
        if weights.trained.is_empty() {
            return Err(Error::option("targets", "leaves nothing to train"));
        }
        for (name, tensor) in weights.trained.iter().chain(&weights.fixed).chain(&weights.masks) {
            memory_tracker.take_for(MemoryCategory::Weights, name, bytes_of(tensor))?;
        }
        for (name, tensor) in weights.trained.iter().filter(|_| compute != DType::F32) {
            memory_tracker.take_for(MemoryCategory::Weights, name, (tensor.elem_count() * compute.size_in_bytes()) as u64)?;
        }
        Ok(weights)
    }

    /// Adds a matrix that trains beside the model.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn add(&mut self, name: &str, tensor: &Tensor, device: &Device) -> Result<()> {
        self.trained.insert(name.to_owned(), transfer::to_device(tensor, device, Cause::Weights).map_err(failed(name))?);
        Ok(())
    }

    /// Lets scales train: those of rounded weights, and those of quantizers.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn learn_scales(&mut self, quantizers: &Quantizers, device: &Device) -> Result<()> {
        let zeros = |name: &str, count: usize| Tensor::zeros(count, DType::F32, device).map_err(failed(name));
        for (name, rounding) in &self.rounded {
            self.trained.insert(scales::logarithm(name), zeros(name, rounding.scales.scales.len())?);
        }
        for (name, damping) in quantizers.logarithms() {
            self.trained.insert(name.clone(), zeros(&name, 1)?);
            self.values.insert(name, damping);
        }
        Ok(())
    }

    /// Whether a parameter trains.
    pub fn trains(&self, name: &str) -> bool {
        self.trained.contains_key(name)
    }

    /// How many weights stay zero, of how many tensors, and how many tensors are seen rounded.
    pub fn held(&self) -> candle_core::Result<(u64, usize, usize)> {
        let mut zeros = 0;
        for mask in self.masks.values() {
            zeros += mask.elem_count() as u64 - transfer::number(&mask.sum_all()?, Cause::Weights)? as u64;
        }
        Ok((zeros, self.masks.len(), self.rounded.len()))
    }

    /// What the graph computes with in this step.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn parameters(&self) -> Result<Parameters> {
        self.parameters_of(&self.trained)
    }

    /// The same with other masters: their average, or the best so far.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn parameters_of(&self, masters: &BTreeMap<String, Tensor>) -> Result<Parameters> {
        let mut tensors = self.fixed.clone();
        for (name, master) in masters {
            let seen = || {
                let master = self.here(master)?;
                let seen = match self.rounded.get(name) {
                    Some(rounding) => rounding.apply(&master, self.learned(masters, name)?.as_ref())?,
                    None => master,
                };
                seen.to_dtype(self.compute)
            };
            tensors.insert(name.clone(), seen().map_err(failed(name))?);
        }
        Ok(Parameters::of(tensors, self.compute))
    }

    /// Averages and the best weights so far may lie on the host.
    fn here(&self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        transfer::beside(tensor, &self.device, Cause::Offload)
    }

    /// The logarithms on a weight's scales, where they train.
    fn learned(&self, state: &BTreeMap<String, Tensor>, name: &str) -> candle_core::Result<Option<Tensor>> {
        state.get(&scales::logarithm(name)).map(|logarithms| self.here(logarithms)).transpose()
    }

    /// Adds gradients of scales that train.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn add_scales(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, rounding) in &self.rounded {
            let of = scales::logarithm(name);
            let (Some(weight), Some(learned), Some(gradient)) = (self.trained.get(name), self.trained.get(&of), gradients.get(name)) else { continue };
            let found = rounding.of_logarithms(weight, learned, gradient).map_err(failed(name))?;
            gradients.insert(of, found);
        }
        for (name, damping) in &self.values {
            if let Some(gradient) = gradients.get_mut(name) {
                *gradient = gradient.affine(*damping, 0.0).map_err(failed(name))?;
            }
        }
        Ok(())
    }

    /// Takes out of gradients what would move weights that stay zero.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn mask(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, mask) in &self.masks {
            if let Some(gradient) = gradients.get_mut(name) {
                *gradient = (&*gradient * mask).map_err(failed(name))?;
            }
        }
        Ok(())
    }

    /// Moves stored statistics of a normalisation towards those of a batch.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn follow(&mut self, name: &str, batch: &Tensor) -> Result<()> {
        if let Some(stored) = self.fixed.get_mut(name) {
            let moved = || (stored.affine(1.0 - MOMENTUM, 0.0)? + batch.to_dtype(stored.dtype())?.affine(MOMENTUM, 0.0)?)?.contiguous();
            *stored = moved().map_err(failed(name))?;
        }
        Ok(())
    }

    /// Gives all processes the same statistics: the means of what each has.
    ///
    /// # Errors
    /// Memory runs out, or another process is gone.
    pub fn share_statistics(&mut self, graph: &Graph, team: &Team) -> Result<()> {
        let statistics = statistics(graph);
        let mut means = self.fixed.iter().filter(|(name, _)| statistics.contains(name.as_str())).map(|(name, own)| (name.clone(), own.clone())).collect();
        team.average(&mut means)?;
        self.fixed.append(&mut means);
        Ok(())
    }

    /// Statistics and masters, for a file that training goes on from.
    pub fn state(&self, graph: &Graph) -> BTreeMap<String, Tensor> {
        let statistics = statistics(graph);
        let kept = self.fixed.iter().filter(|(name, _)| statistics.contains(name.as_str()));
        self.trained.iter().chain(kept).map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
    }

    /// Takes masters and statistics from such a file.
    ///
    /// # Errors
    /// One is not of this training, or has another shape.
    pub fn restore(&mut self, state: &mut Stream) -> Result<()> {
        for tensor in state {
            let (name, tensor) = tensor?;
            let place = self.trained.get_mut(&name).or_else(|| self.fixed.get_mut(&name));
            let place = place.filter(|place| place.dims() == tensor.dims()).ok_or_else(|| Error::tensor(&name, "is not part of this training", ""))?;
            let restore = || transfer::to_device(&tensor, place.device(), Cause::State)?.to_dtype(place.dtype())?.force_contiguous();
            *place = restore().map_err(failed(&name))?;
        }
        Ok(())
    }

    /// Puts weights into a model: in their own formats, rounded ones as integers with their scales.
    ///
    /// # Errors
    /// A weight cannot be held in its format.
    pub fn put(&self, state: &BTreeMap<String, Tensor>, model: &mut Model) -> Result<BTreeSet<String>> {
        let mut changed = BTreeSet::new();
        for (name, tensor) in state {
            let Some(weight) = model.weights.by_name.get(name) else { continue };
            let new = self.weight(name, tensor, state, weight)?;
            model.weights.by_name.insert(name.clone(), new);
            changed.insert(name.clone());
        }
        Ok(changed)
    }

    fn weight(&self, name: &str, tensor: &Tensor, state: &BTreeMap<String, Tensor>, weight: &Weight) -> Result<Weight> {
        let floats = |tensor: &Tensor| transfer::values::<f32>(tensor, Cause::State);
        match self.rounded.get(name) {
            Some(rounding) => {
                let round = || {
                    let scale = rounding.scale(self.learned(state, name)?.as_ref())?;
                    Ok((floats(&rounding.integers(&self.here(tensor)?, &scale)?)?, floats(&scale)?))
                };
                let (integers, scales) = round().map_err(failed(name))?;
                let scales = Scales { scales, ..rounding.scales.clone() };
                scales.scales.iter().try_for_each(|scale| scales::require_scale(name, *scale))?;
                weight.with_integers(name, integers.into_iter().map(|value| value as i8).collect(), &scales)
            }
            None => weight.with_values(name, &floats(tensor).map_err(failed(name))?),
        }
    }
}

/// Part of a batch's statistics that goes into the stored ones, as in PyTorch.
const MOMENTUM: f64 = 0.1;

/// Zeros below this part are no pruning: the row of a padding token, or chance.
const LEAST: f64 = 0.005;

/// A mask of a matrix that some pass has zeroed weights of: it holds zeros, and not only zeros.
fn mask(tensor: &Tensor) -> candle_core::Result<Option<Tensor>> {
    if tensor.rank() < 2 {
        return Ok(None);
    }
    let mask = tensor.ne(0f32)?.to_dtype(DType::F32)?;
    let kept = transfer::number(&mask.sum_all()?, Cause::Weights)?;
    Ok((kept > 0.0 && kept < (1.0 - LEAST) * tensor.elem_count() as f64).then_some(mask))
}

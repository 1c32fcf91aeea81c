//! The student's weights while it trains: f32 masters, what the graph sees of them, and what is written in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};

use super::Team;
use super::checkpoint::Stream;
use super::scales::{self, Quantizers};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Home, Kept, MemoryCategory, MemoryTracker, Parameters, Residence};
use crate::ir::ops::round_half_even;
use crate::ir::{Graph, Node, Op};
use crate::kernel::quantize;
use crate::model::Model;
use crate::store::{DType as Stored, Encoding, Pattern, Scales, Weight, select};
use crate::work::Work;

/// Meaning of the zeros of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeros {
    /// Pruned weights, which stay zero.
    Pruned,
    /// Weights of a model that is known to be pruned. They stay zero, unless the whole matrix is zero: such a matrix was initialized so.
    OfPrunedModel,
    /// Floats that nothing states to be pruned.
    Unexplained,
    /// Integers that are zero by rounding.
    Codes,
}

/// Tells the meaning of the zeros of a weight.
pub type MeaningOfZeros<'a> = &'a dyn Fn(&Weight) -> Zeros;

/// Weights that train and weights that do not.
pub struct Weights {
    /// In f32; changed in place.
    pub trained: BTreeMap<String, Kept>,
    /// In the precision of the computation.
    fixed: BTreeMap<String, Kept>,
    /// 0 where a pruned weight stays zero.
    masks: BTreeMap<String, Kept>,
    /// How many weights that are.
    zeros: u64,
    /// Tensors that hold zeros which nothing states to be pruned weights.
    unexplained: usize,
    /// Weights whose layers see them rounded to integers.
    rounded: Arc<BTreeMap<String, Rounding>>,
    /// Logarithms of learned scales of values, and what their gradients are multiplied with.
    values: BTreeMap<String, f64>,
    home: Home,
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
    /// Of a weight that is written as integers.
    fn of(name: &str, weight: &Weight, device: &Device) -> Result<Option<Rounding>> {
        let (Some(scales), Encoding::Affine(affine)) = (weight.scales()?, &weight.encoding) else { return Ok(None) };
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
        Rounding::new(scales, stored, quantize::bounds(affine.codes.bits()), device).map(Some).map_err(failed(name))
    }

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
    /// Loads the weights of a graph, which live in a home and compute on a device.
    ///
    /// # Errors
    /// A pattern matches nothing, nothing is left to train, reading fails, or memory runs out.
    pub fn load(
        graph: &Graph,
        model: &Model,
        (targets, ignore, zeros): (&[Pattern], &[Pattern], MeaningOfZeros),
        (home, device, compute): (Home, &Device, DType),
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
        let mut rounded = BTreeMap::new();
        let mut weights = Weights {
            trained: BTreeMap::new(),
            fixed: BTreeMap::new(),
            masks: BTreeMap::new(),
            zeros: 0,
            unexplained: 0,
            rounded: Arc::default(),
            values: BTreeMap::new(),
            home,
            device: device.clone(),
            compute,
        };
        let together = weights.home.together(names.into_iter());
        for names in &together {
            let work = if together.len() > 1 { work.quiet() } else { *work };
            work.cancel.check()?;
            let loaded = Parameters::load_named(names.iter().collect(), &unrounded, device, DType::F32, Residence::Computed, &work)?;
            for name in names {
                let tensor = loaded.get(name).map_err(failed(name))?;
                if !selected(name) {
                    let tensor = if statistics.contains(name.as_str()) { Ok(tensor) } else { tensor.to_dtype(compute) };
                    weights.fixed.insert(name.clone(), weights.home.keep(&tensor.map_err(failed(name))?)?);
                    continue;
                }
                if let Some(rounding) = Rounding::of(name, model.weights.get(name)?, device)? {
                    rounded.insert(name.clone(), rounding);
                }
                let kept = weights.home.keep(&tensor)?;
                let meaning = zeros(model.weights.get(name)?);
                if let Some((mask, zeros)) = mask(&tensor).map_err(failed(name))?.filter(|_| meaning != Zeros::Codes) {
                    let some = zeros < tensor.elem_count() as u64;
                    if meaning == Zeros::Pruned || meaning == Zeros::OfPrunedModel && some {
                        weights.masks.insert(name.clone(), weights.home.keep_with(&mask, &kept)?);
                        weights.zeros += zeros;
                    } else {
                        weights.unexplained += usize::from(some && zeros as f64 > LEAST * tensor.elem_count() as f64);
                    }
                }
                weights.trained.insert(name.clone(), kept);
            }
        }
        weights.rounded = Arc::new(rounded);
        if weights.trained.is_empty() {
            return Err(Error::option("targets", "leaves nothing to train"));
        }
        for (name, kept) in weights.trained.iter().chain(&weights.fixed).chain(&weights.masks) {
            memory_tracker.take_for(MemoryCategory::Weights, name, kept.bytes())?;
        }
        for (name, kept) in weights.trained.iter().filter(|_| compute != DType::F32 && weights.home.is_memory()) {
            memory_tracker.take_for(MemoryCategory::Weights, name, kept.bytes() / 4 * compute.size_in_bytes() as u64)?;
        }
        Ok(weights)
    }

    /// Adds a matrix that trains beside the model.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn add(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let tensor = transfer::to_device(tensor, &self.device, Cause::Weights).map_err(failed(name))?;
        self.trained.insert(name.to_owned(), self.home.keep(&tensor)?);
        Ok(())
    }

    /// Where they live between uses.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Some that train, on the device.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn some<'n>(&self, names: impl IntoIterator<Item = &'n String>) -> Result<BTreeMap<String, Tensor>> {
        let known = names.into_iter().filter_map(|name| Some((name, self.trained.get(name)?)));
        known.map(|(name, kept)| Ok((name.clone(), kept.load(&self.device)?))).collect()
    }

    /// Lets scales train: those of rounded weights, and those of quantizers.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn learn_scales(&mut self, quantizers: &Quantizers) -> Result<()> {
        let zeros = |name: &str, count: usize| self.home.keep(&Tensor::zeros(count, DType::F32, &self.device).map_err(failed(name))?);
        for (name, rounding) in &*self.rounded {
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

    /// Numbers of weights that stay zero, of tensors with such weights, of tensors with fake quantization, and of tensors with zeros that no
    /// pruning explains.
    pub fn constraint_counts(&self) -> (u64, usize, usize, usize) {
        (self.zeros, self.masks.len(), self.rounded.len(), self.unexplained)
    }

    /// Whole tensors where processes share them out: in a file, or nothing where they are not wanted. All processes ask together.
    ///
    /// # Errors
    /// The disk is full, or another process is gone.
    pub fn whole(&self, tensors: BTreeMap<String, Kept>, wanted: bool) -> Result<BTreeMap<String, Kept>> {
        let Home::Shared(shares) = &self.home else { return Ok(tensors) };
        let home = shares.aside().another()?;
        let whole = tensors.into_iter().map(|(name, kept)| kept.load(&self.device).map(|tensor| (name, tensor)));
        whole.filter(|tensor| wanted || tensor.is_err()).map(|tensor| tensor.and_then(|(name, tensor)| Ok((name, home.keep(&tensor)?)))).collect()
    }

    /// The same with all that does not train, for an evaluation in one process.
    ///
    /// # Errors
    /// As [`whole`](Weights::whole).
    pub fn whole_model(&self, masters: &BTreeMap<String, Kept>, wanted: bool) -> Result<BTreeMap<String, Kept>> {
        let fixed = if self.home.is_shared() { self.fixed.clone() } else { BTreeMap::new() };
        self.whole(fixed.into_iter().chain(masters.clone()).collect(), wanted)
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
    pub fn parameters_of(&self, masters: &BTreeMap<String, Kept>) -> Result<Parameters> {
        let seen =
            Seen { masters: masters.clone(), fixed: self.fixed.clone(), rounded: self.rounded.clone(), device: self.device.clone(), compute: self.compute };
        if !self.home.is_memory() {
            return Ok(Parameters::fetched(Box::new(move |name| seen.get(name)), self.compute));
        }
        let names = self.fixed.keys().chain(masters.keys());
        let tensors = names.map(|name| Ok((name.clone(), seen.get(name)?))).collect::<Result<_>>()?;
        Ok(Parameters::of(tensors, self.compute))
    }

    /// Adds gradients of scales that train.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn add_scales(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, rounding) in &*self.rounded {
            let of = scales::logarithm(name);
            let (Some(weight), Some(learned), Some(gradient)) = (self.trained.get(name), self.trained.get(&of), gradients.get(name)) else { continue };
            let (weight, learned) = (weight.load(&self.device)?, learned.load(&self.device)?);
            let found = rounding.of_logarithms(&weight, &learned, gradient).map_err(failed(name))?;
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
                let Some(mask) = mask.load_own(&self.device)? else { continue };
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
            // Where processes share statistics out, the mean of all batches moves them.
            let part = if let Home::Shared(shares) = &self.home { MOMENTUM / shares.processes() as f64 } else { MOMENTUM };
            let batch = stored.sum_of_all(batch.to_dtype(stored.dtype()).map_err(failed(name))?)?;
            let Some(before) = stored.load_own(&self.device)? else { return Ok(()) };
            let moved = || (before.affine(1.0 - MOMENTUM, 0.0)? + batch.affine(part, 0.0)?)?.contiguous();
            stored.put(moved().map_err(failed(name))?)?;
        }
        Ok(())
    }

    /// Gives all processes the same statistics: the means of what each has.
    ///
    /// # Errors
    /// Memory runs out, or another process is gone.
    pub fn share_statistics(&mut self, graph: &Graph, team: &Team) -> Result<()> {
        if self.home.is_shared() {
            return Ok(());
        }
        let statistics = statistics(graph);
        let own = self.fixed.iter().filter(|(name, _)| statistics.contains(name.as_str()));
        let mut means = own.map(|(name, kept)| Ok((name.clone(), kept.load(&self.device)?))).collect::<Result<_>>()?;
        team.average(&mut means)?;
        means.into_iter().try_for_each(|(name, mean)| self.fixed.get_mut(&name).map_or(Ok(()), |kept| kept.put(mean)))
    }

    /// Statistics and masters, for a file that training goes on from.
    pub fn state(&self, graph: &Graph) -> BTreeMap<String, Kept> {
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
            let restore = || transfer::to_device(&tensor, &self.device, Cause::State)?.to_dtype(place.dtype())?.force_contiguous();
            place.put(restore().map_err(failed(&name))?)?;
        }
        Ok(())
    }

    /// Puts weights into a model: in their own formats, rounded ones as integers with their scales.
    ///
    /// # Errors
    /// A weight cannot be held in its format.
    pub fn put(&self, state: &BTreeMap<String, Kept>, model: &mut Model) -> Result<BTreeSet<String>> {
        let mut changed = BTreeSet::new();
        for (name, kept) in state {
            let Some(weight) = model.weights.by_name.get(name) else { continue };
            let new = self.weight(name, kept, state, weight)?;
            model.weights.by_name.insert(name.clone(), new);
            changed.insert(name.clone());
        }
        Ok(changed)
    }

    fn weight(&self, name: &str, kept: &Kept, state: &BTreeMap<String, Kept>, weight: &Weight) -> Result<Weight> {
        let floats = |tensor: &Tensor| transfer::values::<f32>(tensor, Cause::State);
        match self.rounded.get(name) {
            Some(rounding) => {
                let (tensor, learned) = (kept.load(&self.device)?, learned(state, name, &self.device)?);
                let round = || {
                    let scale = rounding.scale(learned.as_ref())?;
                    Ok((floats(&rounding.integers(&tensor, &scale)?)?, floats(&scale)?))
                };
                let (integers, scales) = round().map_err(failed(name))?;
                let scales = Scales { scales, ..rounding.scales.clone() };
                scales.scales.iter().try_for_each(|scale| scales::require_scale(name, *scale))?;
                weight.with_integers(name, integers.into_iter().map(|value| value as i8).collect(), &scales)
            }
            None if kept.is_in_file() => {
                let (count, kept, named) = (kept.dims().iter().product(), kept.clone(), name.to_owned());
                weight.with_values_of(name, count, move || floats(&kept.open()?).map_err(failed(&named)))
            }
            None => weight.with_values(name, &floats(&kept.open()?).map_err(failed(name))?),
        }
    }
}

/// What the graph sees of masters.
struct Seen {
    masters: BTreeMap<String, Kept>,
    fixed: BTreeMap<String, Kept>,
    rounded: Arc<BTreeMap<String, Rounding>>,
    device: Device,
    compute: DType,
}

impl Seen {
    fn get(&self, name: &str) -> Result<Tensor> {
        let Some(master) = self.masters.get(name) else {
            return self.fixed.get(name).ok_or_else(|| Error::tensor(name, "is no parameter of this training", ""))?.load(&self.device);
        };
        let (master, rounding) = (master.load(&self.device)?, self.rounded.get(name));
        let learned = if rounding.is_some() { learned(&self.masters, name, &self.device)? } else { None };
        let seen = rounding.map_or_else(|| Ok(master.clone()), |rounding| rounding.apply(&master, learned.as_ref()));
        seen.and_then(|seen| seen.to_dtype(self.compute)).map_err(failed(name))
    }
}

/// The logarithms on a weight's scales, where they train.
fn learned(state: &BTreeMap<String, Kept>, name: &str, device: &Device) -> Result<Option<Tensor>> {
    state.get(&scales::logarithm(name)).map(|logarithms| logarithms.load(device)).transpose()
}

/// Part of a batch's statistics that goes into the stored ones, as in PyTorch.
const MOMENTUM: f64 = 0.1;

/// Up to this fraction, zeros of a model that is not known to be pruned need no note: the row of a padding token, or chance.
const LEAST: f64 = 0.005;

/// The mask of a matrix that holds zeros, and their number.
fn mask(tensor: &Tensor) -> candle_core::Result<Option<(Tensor, u64)>> {
    if tensor.rank() < 2 {
        return Ok(None);
    }
    let mask = tensor.ne(0f32)?.to_dtype(DType::F32)?;
    // Sums of more than 2^24 ones are not exact in f32.
    let kept = transfer::number(&mask.sum(D::Minus1)?.to_dtype(DType::F64)?.sum_all()?, Cause::Weights)?;
    let zeros = tensor.elem_count() as u64 - kept as u64;
    Ok((zeros > 0).then_some((mask, zeros)))
}

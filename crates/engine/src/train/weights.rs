//! The student's weights during training: f32 master weights, the parameters of the forward pass, and
//! conversion back to the weights of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::absorbed::Absorbed;
use super::checkpoint::Stream;
use super::fixed_codes::{FixedBlocks, FixedCodes};
use super::floats::failed;
use super::forward_weights::{ForwardWeights, factors, learned, not_part};
use super::frozen::Frozen;
use super::optimizer::{self, Optimizer, Settings};
use super::output_norm::{OutputNorm, OutputNorms};
use super::pruning_mask::{NOTED_FRACTION, pruning_mask};
use super::scales::{self, Quantizers};
use super::selection::{hidden_layers, selected, statistics};
use super::weight_rounding::Rounding;
use super::{QuantizerScales, Team, Training, floats};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{ManagedTensor, MemoryCategory, MemoryTracker, Parameters, Pending, Placement, Residence, rounding_scheme};
use crate::ir::Graph;
use crate::model::Model;
use crate::store::{ActivationScheme, Weight, select};
use crate::work::Work;

/// Origin of the zeros of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroKind {
    /// Pruned weights, which stay zero.
    Pruned,
    /// Zeros in a model that is known to be pruned. They stay zero, unless the whole matrix is zero,
    /// which is an initialization.
    OfPrunedModel,
    /// Zeros in floats, without a record of pruning.
    Unexplained,
    /// Integers that were rounded to zero.
    Codes,
}

/// Determines the origin of the zeros of a weight.
pub type ClassifyZeros<'a> = &'a dyn Fn(&Weight) -> ZeroKind;

/// Trained and frozen weights.
pub struct Weights {
    /// Master weights in f32, updated in place.
    pub trained: BTreeMap<String, ManagedTensor>,
    /// Frozen weights in the compute precision (in that of their files, if adapters are trained), running
    /// statistics, and the codes of weights of which only the scales are trained.
    fixed: BTreeMap<String, ManagedTensor>,
    /// Frozen weights that are dequantized on each use.
    packed: Arc<BTreeMap<String, Weight>>,
    /// Frozen parameters that are computed from others in each step.
    norms: Arc<OutputNorms>,
    /// Pruning masks: 0 for weights that stay zero.
    masks: BTreeMap<String, ManagedTensor>,
    /// Number of weights that stay zero.
    zeros: u64,
    /// Number of tensors with zeros of unknown origin.
    unexplained: usize,
    /// Fake quantization of weights that are written as codes.
    rounded: Arc<BTreeMap<String, Rounding>>,
    /// Quantized weights of which only the scales are trained.
    with_fixed_codes: Arc<BTreeMap<String, Box<dyn FixedCodes>>>,
    /// Weights that absorb adapters, of which the factors are trained.
    absorbed: Arc<BTreeMap<String, Absorbed>>,
    /// Rounding of the inputs of layers at run time, by the names of their weights.
    input_schemes: BTreeMap<String, ActivationScheme>,
    /// Names of the logarithms of learned activation scales, and the factors on their gradients.
    activation_scales: BTreeMap<String, f64>,
    /// Trained weights of hidden linear layers.
    linear: BTreeSet<String>,
    /// Whether the frozen weights are those of the model, next to which adapters are trained.
    keeps_base: bool,
    home: Placement,
    /// Elements that the optimizer updates together, and that one process stores.
    layout: Box<dyn Optimizer>,
    device: Device,
    compute: DType,
}

impl Weights {
    /// Loads the weights of a graph, stored at `home` and used on `device` in the dtype `compute`. Fails if a
    /// pattern matches nothing or nothing is left to train.
    pub fn load(
        graph: &Graph,
        model: &Model,
        (options, zeros): (&Training, ClassifyZeros),
        (home, device, compute): (Placement, &Device, DType),
        memory_tracker: &MemoryTracker,
        work: &Work,
    ) -> Result<Weights> {
        let statistics = statistics(graph);
        let absorbs = options.adapter.as_ref().is_some_and(|adapter| adapter.absorb);
        let (targets, ignore, has_fixed_codes) = (&*options.targets, &*options.ignore, options.scales == QuantizerScales::Only);
        let names: Vec<&String> = graph.params().map(|(_, value)| &value.name).collect();
        select::check("targets", targets, names.iter().copied())?;
        select::check("ignore", ignore, names.iter().copied())?;
        let selected = selected((graph, model), targets, ignore);
        // Master weights start from the values before quantization, if these are available.
        let mut unrounded = model.weights.clone();
        for (name, weight) in &mut unrounded.by_name {
            if let Some(before) = weight.source().unrounded().filter(|_| selected(name) && !has_fixed_codes) {
                *weight = before.clone();
            }
        }
        let (mut rounded, mut with_fixed_codes) = (BTreeMap::new(), BTreeMap::<String, Box<dyn FixedCodes>>::new());
        let hidden = hidden_layers(graph, model);
        let layout = layout(options.optimizer, hidden.clone())?;
        let mut weights = Weights {
            trained: BTreeMap::new(),
            fixed: BTreeMap::new(),
            packed: Arc::default(),
            norms: Arc::default(),
            masks: BTreeMap::new(),
            zeros: 0,
            unexplained: 0,
            rounded: Arc::default(),
            with_fixed_codes: Arc::default(),
            absorbed: Arc::default(),
            input_schemes: model.weights.by_name.iter().filter_map(|(name, weight)| Some((name.clone(), rounding_scheme(weight)?))).collect(),
            activation_scales: BTreeMap::new(),
            linear: BTreeSet::new(),
            keeps_base: options.adapter.is_some(),
            home,
            layout,
            device: device.clone(),
            compute,
        };
        let keeps_stored = |name: &str| options.adapter.is_some() && !selected(name) && !statistics.contains(name);
        let (stored, names): (Vec<&String>, Vec<&String>) = names.into_iter().partition(|name| keeps_stored(name));
        let Frozen { dense, packed } = Frozen::load(stored, &model.weights, (&weights.home, device, compute), work)?;
        (weights.fixed, weights.packed) = (dense, Arc::new(packed));
        let mut others = Vec::new();
        for name in names {
            work.cancel.check()?;
            let blocks = if has_fixed_codes && selected(name) { FixedBlocks::from_weight(name, model.weights.get(name)?)? } else { None };
            let Some((blocks, bytes)) = blocks else {
                others.push(name);
                continue;
            };
            weights.fixed.insert(name.clone(), weights.home.store(&bytes)?);
            with_fixed_codes.insert(name.clone(), Box::new(blocks));
        }
        let groups = weights.home.name_groups(others.into_iter());
        for names in &groups {
            let work = if groups.len() > 1 { work.quiet() } else { *work };
            work.cancel.check()?;
            let loaded = Parameters::load_named(names.iter().collect(), &unrounded, device, DType::F32, Residence::Computed, &work)?;
            for name in names {
                let tensor = loaded.get(name).map_err(failed(name))?;
                if !selected(name) {
                    // The executor keeps dequantized weights of 16-bit models in 16 bits.
                    let stored = Residence::Stored.dtype(model.weights.get(name)?, DType::F32);
                    let tensor = if statistics.contains(name.as_str()) { Ok(tensor) } else { tensor.to_dtype(stored).and_then(|t| t.to_dtype(compute)) };
                    weights.fixed.insert(name.clone(), weights.home.store(&tensor.map_err(failed(name))?)?);
                    continue;
                }
                if let Some(rounding) = Rounding::from_weight(name, model.weights.get(name)?, device)? {
                    if has_fixed_codes {
                        weights.fixed.insert(name.clone(), weights.home.store(&rounding.codes(&tensor).map_err(failed(name))?)?);
                        with_fixed_codes.insert(name.clone(), Box::new(rounding));
                        continue;
                    }
                    rounded.insert(name.clone(), rounding);
                    if absorbs {
                        weights.fixed.insert(name.clone(), weights.home.store(&tensor)?);
                        continue;
                    }
                }
                let kept = weights.home.store_in_units(&tensor, weights.layout.unit(name, tensor.dims()))?;
                let kind = zeros(model.weights.get(name)?);
                if let Some((mask, zeros)) = pruning_mask(&tensor).map_err(failed(name))?.filter(|_| kind != ZeroKind::Codes) {
                    let has_nonzeros = zeros < tensor.elem_count() as u64;
                    if kind == ZeroKind::Pruned || kind == ZeroKind::OfPrunedModel && has_nonzeros {
                        weights.masks.insert(name.clone(), weights.home.store_with(&mask, &kept)?);
                        weights.zeros += zeros;
                    } else {
                        weights.unexplained += usize::from(has_nonzeros && zeros as f64 > NOTED_FRACTION * tensor.elem_count() as f64);
                    }
                }
                if hidden.contains(name) {
                    weights.linear.insert(name.clone());
                }
                weights.trained.insert(name.clone(), kept);
            }
        }
        (weights.rounded, weights.with_fixed_codes) = (Arc::new(rounded), Arc::new(with_fixed_codes));
        if has_fixed_codes && weights.with_fixed_codes.is_empty() {
            return Err(Error::option("scales", "`only` needs quantized weights in the trained tensors: quantize first"));
        }
        if weights.trained.is_empty() && weights.rounded.is_empty() && weights.with_fixed_codes.is_empty() {
            return Err(Error::option("targets", "matches no parameter that can be trained"));
        }
        for (name, kept) in weights.trained.iter().chain(&weights.fixed).chain(&weights.masks) {
            memory_tracker.allocate_named(MemoryCategory::Weights, name, kept.bytes())?;
        }
        // Rounded, dequantized and converted weights of the forward pass are copies.
        let is_quantized = |name: &String| weights.rounded.contains_key(name) || weights.with_fixed_codes.contains_key(name);
        let is_copied = |name: &String| is_quantized(name) || compute != DType::F32 && weights.trained.contains_key(name);
        for (name, _) in weights.trained.iter().chain(&weights.fixed).filter(|(name, _)| weights.home.is_memory() && is_copied(name)) {
            let elements = model.weights.get(name)?.elements();
            memory_tracker.allocate_named(MemoryCategory::Weights, name, (elements * compute.size_in_bytes()) as u64)?;
        }
        Ok(weights)
    }

    /// Adds a trained matrix that is not part of the model.
    pub fn add(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let tensor = transfer::to_device(tensor, &self.device, Cause::Weights).map_err(failed(name))?;
        let unit = self.layout.unit(name, tensor.dims());
        self.trained.insert(name.to_owned(), self.home.store_in_units(&tensor, unit)?);
        Ok(())
    }

    /// Computes frozen parameters in each step.
    pub fn set_norms(&mut self, norms: BTreeMap<String, OutputNorm>, memory_tracker: &Arc<MemoryTracker>) -> Result<()> {
        // The computed norms are in memory together with the initial ones. Offloaded ones are recorded when
        // they are used.
        for (name, kept) in norms.keys().filter(|_| self.home.is_memory()).filter_map(|name| self.fixed.get_key_value(name)) {
            memory_tracker.allocate_named(MemoryCategory::Weights, name, kept.size())?;
        }
        self.norms = Arc::new(OutputNorms::new(norms, memory_tracker.clone()));
        Ok(())
    }

    /// Adds the factors of adapters that quantized weights absorb, with their initial values.
    pub fn absorb(
        &mut self,
        (absorbed, factors): (BTreeMap<String, Absorbed>, BTreeMap<String, Tensor>),
        optimizer: optimizer::Kind,
        memory_tracker: &MemoryTracker,
    ) -> Result<()> {
        if let Some(name) = absorbed.keys().find(|name| !self.rounded.contains_key(*name)) {
            return Err(Error::tensor(name, "has no scales with which its codes could absorb an adapter", "select other layers in `targets` of `adapter`"));
        }
        // Optimizers treat factors like the matrices of linear layers.
        self.linear.extend(factors.keys().cloned());
        self.layout = layout(optimizer, self.linear.clone())?;
        for (name, values) in &factors {
            self.add(name, values)?;
            memory_tracker.allocate_named(MemoryCategory::Weights, name, self.trained.get(name).map_or(0, ManagedTensor::bytes))?;
        }
        self.absorbed = Arc::new(absorbed);
        Ok(())
    }

    /// Names of the trained weights of linear layers.
    pub fn linear(&self) -> &BTreeSet<String> {
        &self.linear
    }

    /// Placement of the weights between uses.
    pub fn home(&self) -> &Placement {
        &self.home
    }

    /// Loads the named trained parameters to the device; other names are ignored.
    pub fn load_trained<'n>(&self, names: impl IntoIterator<Item = &'n String>) -> Result<BTreeMap<String, Tensor>> {
        let trained = names.into_iter().filter_map(|name| Some((name, self.trained.get(name)?)));
        trained.map(|(name, kept)| Ok((name.clone(), kept.load(&self.device)?))).collect()
    }

    /// Adds the scales of quantized weights and activations to the trained parameters. Fails without scales.
    pub fn learn_scales(&mut self, quantizers: &Quantizers) -> Result<()> {
        let count = self.trained.len();
        let zeros = |name: &str, count: usize| self.home.store(&Tensor::zeros(count, DType::F32, &self.device).map_err(failed(name))?);
        let rounded = self.rounded.iter().map(|(name, rounding)| (name, rounding as &dyn FixedCodes));
        for (name, codes) in rounded.chain(self.with_fixed_codes.iter().map(|(name, codes)| (name, &**codes))) {
            self.trained.insert(scales::logarithm_name(name), zeros(name, codes.learned_scales())?);
        }
        for (name, factor) in quantizers.logarithms() {
            self.trained.insert(name.clone(), zeros(&name, 1)?);
            self.activation_scales.insert(name, factor);
        }
        let reason = "`learnable` needs quantized weights or activations: quantize first, or remove it";
        if self.trained.len() > count { Ok(()) } else { Err(Error::option("scales", reason)) }
    }

    /// Whether a parameter is trained: itself, by its scales, or by the factors of an adapter.
    pub fn trains(&self, name: &str) -> bool {
        self.trained.contains_key(name) || self.is_computed(name)
    }

    /// Whether a parameter is computed from trained ones: its scales, or the factors of an adapter.
    pub fn is_computed(&self, name: &str) -> bool {
        self.has_fixed_codes(name) || self.absorbed.contains_key(name)
    }

    /// Whether only the scales of a parameter are trained.
    pub fn has_fixed_codes(&self, name: &str) -> bool {
        self.with_fixed_codes.contains_key(name)
    }

    /// The trained parameters that a gradient belongs to, and their gradients: the scales of a weight with
    /// fixed codes, the factors of an adapter, or the parameter itself.
    pub fn trained_gradients(&self, name: &str, gradient: Tensor) -> Result<Vec<(String, Tensor)>> {
        if let Some(absorbed) = self.absorbed.get(name) {
            let [inner, outer] = factors(&self.trained, absorbed, &self.device)?;
            let gradients = absorbed.gradients(&gradient, [&inner, &outer]).map_err(failed(name))?;
            return Ok(absorbed.factors.iter().cloned().zip(gradients).collect());
        }
        let Some(fixed_codes) = self.with_fixed_codes.get(name) else { return Ok(vec![(name.to_owned(), gradient)]) };
        let codes = self.fixed_value(name)?;
        let learned = learned(&self.trained, name, &self.device)?;
        let gradient = fixed_codes.code_scale_gradient(&codes, learned.as_ref(), &gradient).map_err(failed(name))?;
        Ok(vec![(scales::logarithm_name(name), gradient)])
    }

    fn fixed_value(&self, name: &str) -> Result<Tensor> {
        self.fixed.get(name).ok_or_else(|| not_part(name))?.load(&self.device)
    }

    /// Number of weights that stay zero, of tensors with such weights, of tensors with fake
    /// quantization, and of tensors with zeros of unknown origin.
    pub fn constraint_counts(&self) -> (u64, usize, usize, usize) {
        (self.zeros, self.masks.len(), self.rounded.len() + self.with_fixed_codes.len(), self.unexplained)
    }

    /// Gathers sharded tensors into a temporary file if `required` on this rank; the result is empty
    /// otherwise. Tensors that are not sharded are returned unchanged. A collective: all processes call
    /// it.
    pub fn gather(&self, tensors: BTreeMap<String, ManagedTensor>, required: bool) -> Result<BTreeMap<String, ManagedTensor>> {
        let Placement::Sharded(shares) = &self.home else { return Ok(tensors) };
        let home = Placement::File(shares.spill_file()?);
        let gathered = tensors.into_iter().map(|(name, kept)| kept.load(&self.device).map(|tensor| (name, tensor)));
        gathered.filter(|tensor| required || tensor.is_err()).map(|tensor| tensor.and_then(|(name, tensor)| Ok((name, home.store(&tensor)?)))).collect()
    }

    /// Gathers master weights for an evaluation in one process, together with the frozen weights, unless
    /// these are read from the model.
    pub fn gather_model(&self, masters: &BTreeMap<String, ManagedTensor>, required: bool) -> Result<BTreeMap<String, ManagedTensor>> {
        let fixed = if self.home.is_sharded() && !self.keeps_base { self.fixed.clone() } else { BTreeMap::new() };
        self.gather(fixed.into_iter().chain(masters.clone()).collect(), required)
    }

    /// The parameters of the forward pass in this step.
    pub fn parameters(&self) -> Result<Parameters> {
        self.parameters_of(&self.trained)
    }

    /// The parameters of the forward pass with other master weights, such as the moving average.
    pub fn parameters_of(&self, masters: &BTreeMap<String, ManagedTensor>) -> Result<Parameters> {
        let forward = ForwardWeights {
            masters: masters.clone(),
            fixed: self.fixed.clone(),
            packed: self.packed.clone(),
            norms: self.norms.clone(),
            rounded: self.rounded.clone(),
            with_fixed_codes: self.with_fixed_codes.clone(),
            absorbed: self.absorbed.clone(),
            device: self.device.clone(),
            compute: self.compute,
        };
        if !self.home.is_memory() {
            return Ok(Parameters::fetched(Box::new(move |name| forward.get(name)), self.compute).with_input_schemes(self.input_schemes.clone()));
        }
        let names = self.fixed.keys().chain(masters.keys());
        let tensors = names.map(|name| Ok((name.clone(), forward.get(name)?))).collect::<Result<_>>()?;
        let parameters = Parameters::from_tensors(tensors, self.compute).with_input_schemes(self.input_schemes.clone());
        Ok(if self.packed.is_empty() { parameters } else { parameters.with_transient(Box::new(move |name| forward.get(name))) })
    }

    /// Adds the gradients of learned weight scales, and scales those of activation scales.
    pub fn add_scale_gradients(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, rounding) in &*self.rounded {
            let logarithm = scales::logarithm_name(name);
            let (Some(weight), Some(learned), Some(gradient)) = (self.trained.get(name), self.trained.get(&logarithm), gradients.get(name)) else { continue };
            let (weight, learned) = (weight.load(&self.device)?, learned.load(&self.device)?);
            let scale_gradient = rounding.scale_gradient(&weight, &learned, gradient).map_err(failed(name))?;
            gradients.insert(logarithm, scale_gradient);
        }
        for (name, factor) in &self.activation_scales {
            if let Some(gradient) = gradients.get_mut(name) {
                *gradient = gradient.affine(*factor, 0.0).map_err(failed(name))?;
            }
        }
        Ok(())
    }

    /// Applies the pruning masks to gradients.
    pub fn mask(&self, gradients: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, mask) in &self.masks {
            if let Some(gradient) = gradients.get_mut(name) {
                let Some(mask) = mask.load_own(&self.device)? else { continue };
                *gradient = (&*gradient * mask).map_err(failed(name))?;
            }
        }
        Ok(())
    }

    /// Sets the pruned weights of a parameter, or of a part of its elements, to zero after an update that
    /// does not act on each element separately.
    pub fn keep_zeros(&self, name: &str, part: Option<&Range<usize>>, elements: &Tensor) -> Result<()> {
        let mask = self.masks.get(name).map(|mask| mask.load_own(&self.device)).transpose()?.flatten();
        let kept = mask.map(|mask| {
            let mask = part.map_or(Ok(mask.clone()), |part| mask.flatten_all()?.narrow(0, part.start, part.len()))?.reshape(elements.dims())?;
            floats::assign(elements, &(elements * mask.to_dtype(elements.dtype())?)?)
        });
        kept.transpose().map(drop).map_err(failed(name))
    }

    /// Updates a running statistic of a batch normalization with that of a batch.
    pub fn update_statistics(&mut self, name: &str, batch: &Tensor) -> Result<()> {
        if let Some(stored) = self.fixed.get_mut(name) {
            // With sharded weights, the batch statistics are summed over the processes: use their mean.
            let factor = if let Placement::Sharded(shares) = &self.home { MOMENTUM / shares.processes() as f64 } else { MOMENTUM };
            let batch = batch.to_dtype(stored.dtype()).map_err(failed(name))?;
            let batch = stored.start_sum(&batch)?.map_or(Ok(batch), Pending::wait)?;
            let Some(before) = stored.load_own(&self.device)? else { return Ok(()) };
            let batch = batch.reshape(before.dims()).map_err(failed(name))?;
            let moved = || (before.affine(1.0 - MOMENTUM, 0.0)? + batch.affine(factor, 0.0)?)?.contiguous();
            stored.put(moved().map_err(failed(name))?)?;
        }
        Ok(())
    }

    /// Averages the running statistics over all processes.
    pub fn average_statistics(&mut self, graph: &Graph, team: &Team) -> Result<()> {
        if self.home.is_sharded() {
            return Ok(());
        }
        let statistics = statistics(graph);
        let own = self.fixed.iter().filter(|(name, _)| statistics.contains(name.as_str()));
        let mut means = own.map(|(name, kept)| Ok((name.clone(), kept.load(&self.device)?))).collect::<Result<_>>()?;
        team.average(&mut means)?;
        means.into_iter().try_for_each(|(name, mean)| self.fixed.get_mut(&name).map_or(Ok(()), |kept| kept.put(mean)))
    }

    /// Master weights and running statistics, for a checkpoint.
    pub fn state(&self, graph: &Graph) -> BTreeMap<String, ManagedTensor> {
        let statistics = statistics(graph);
        let kept = self.fixed.iter().filter(|(name, _)| statistics.contains(name.as_str()));
        self.trained.iter().chain(kept).map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
    }

    /// Restores master weights and running statistics from a checkpoint. Fails if a tensor is not part of
    /// this training, or has a different shape.
    pub fn restore(&mut self, state: &mut Stream) -> Result<()> {
        for tensor in state {
            let (name, tensor) = tensor?;
            let target = self.trained.get_mut(&name).or_else(|| self.fixed.get_mut(&name));
            let target =
                target.filter(|target| target.local_dims() == tensor.dims()).ok_or_else(|| Error::tensor(&name, "is not part of this training", ""))?;
            let restore = || transfer::to_device(&tensor, &self.device, Cause::State)?.to_dtype(target.dtype())?.force_contiguous();
            target.put(restore().map_err(failed(&name))?)?;
        }
        Ok(())
    }

    /// Writes trained weights into a model in their storage formats; quantized weights as codes with
    /// their scales. Returns the names of the changed weights. Fails if a weight cannot be represented in its
    /// format.
    pub fn write_to(&self, state: &BTreeMap<String, ManagedTensor>, model: &mut Model) -> Result<BTreeSet<String>> {
        let mut changed = BTreeSet::new();
        for name in state.keys().chain(self.absorbed.keys()).chain(self.with_fixed_codes.keys()) {
            let Some(weight) = model.weights.by_name.get(name) else { continue };
            let new = self.weight(name, state, weight)?;
            model.weights.by_name.insert(name.clone(), new);
            changed.insert(name.clone());
        }
        Ok(changed)
    }

    fn weight(&self, name: &str, state: &BTreeMap<String, ManagedTensor>, weight: &Weight) -> Result<Weight> {
        let floats = |tensor: &Tensor| transfer::values::<f32>(tensor, Cause::State);
        let master = state.get(name);
        if let Some(codes) = self.with_fixed_codes.get(name) {
            return codes.written((name, weight), &self.fixed_value(name)?, learned(state, name, &self.device)?.as_ref());
        }
        if let Some(rounding) = self.rounded.get(name) {
            let learned = learned(state, name, &self.device)?;
            let mut tensor = master.map_or_else(|| self.fixed_value(name), |master| master.load(&self.device))?;
            if let Some(absorbed) = self.absorbed.get(name) {
                let [inner, outer] = factors(state, absorbed, &self.device)?;
                tensor = absorbed.sum(&tensor, [&inner, &outer]).map_err(failed(name))?;
            }
            return rounding.write((name, weight), &tensor, false, learned.as_ref());
        }
        let kept = master.ok_or_else(|| not_part(name))?;
        if kept.is_in_file() {
            let (count, kept, named) = (kept.dims().iter().product(), kept.clone(), name.to_owned());
            return weight.with_lazy_values(name, count, move || floats(&kept.open()?).map_err(failed(&named)));
        }
        weight.with_values(name, &floats(&kept.open()?).map_err(failed(name))?)
    }
}

/// An optimizer that defines which elements of parameters are updated together.
fn layout(kind: optimizer::Kind, linear_weights: BTreeSet<String>) -> Result<Box<dyn Optimizer>> {
    optimizer::build(kind, &Settings { linear_weights, ..Settings::default() }, &Placement::Memory(Device::Cpu))
}

/// Momentum of the running statistics, as in PyTorch.
const MOMENTUM: f64 = 0.1;

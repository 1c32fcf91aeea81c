//! Optimizers, one algorithm per file. An algorithm defines its state tensors and its update. This
//! module manages the state: placement, saving, restoring, and transfers between devices.

mod adafactor;
mod adamw;
mod adamw8bit;
mod muon;
mod parts;
mod settings;
mod sgd;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

pub use parts::{Parts, shard};
pub use settings::{Rates, Settings};

use super::checkpoint::Stream;
use super::floats;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{ManagedTensor, Placement};
use crate::ir::ops::on_host;

/// Optimizer algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(rename = "OptimizerKind"))]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Adam with decoupled weight decay
    #[default]
    #[cfg_attr(feature = "cli", value(name = "adamw"))]
    AdamW,
    /// AdamW with 8-bit moments
    #[cfg_attr(feature = "cli", value(name = "adamw8bit"))]
    AdamW8bit,
    /// Factored second moments, no first moment
    #[cfg_attr(feature = "cli", value(name = "adafactor"))]
    Adafactor,
    /// Orthogonalized momentum for linear layers, AdamW for other parameters
    #[cfg_attr(feature = "cli", value(name = "muon"))]
    Muon,
    /// Gradient descent, with momentum
    #[cfg_attr(feature = "cli", value(name = "sgd"))]
    Sgd,
}

impl Kind {
    /// All algorithms.
    pub const ALL: [Kind; 5] = [Kind::AdamW, Kind::AdamW8bit, Kind::Adafactor, Kind::Muon, Kind::Sgd];
}

/// An optimizer with its state.
pub trait Optimizer: Send + Sync {
    /// Updates a parameter of this shape in place, or a part of its elements, which is flat and consists of
    /// whole units. `step` counts from 1. Elements are contiguous f32; the gradient has their shape.
    fn update_part(&mut self, name: &str, dims: &[usize], elements: &Tensor, gradient: &Tensor, rate: f64, step: u64) -> Result<()>;

    /// Updates a whole parameter in place.
    fn update(&mut self, name: &str, parameter: &Tensor, gradient: &Tensor, rate: f64, step: u64) -> Result<()> {
        self.update_part(name, parameter.dims(), parameter, gradient, rate, step)
    }

    /// Number of consecutive elements of a parameter that must be updated together.
    fn unit(&self, name: &str, dims: &[usize]) -> usize;

    /// The state, by `part/parameter`. The tensors are not copied: the next step modifies them.
    fn state(&self) -> BTreeMap<String, ManagedTensor>;

    /// Replaces the state with that of another optimizer of the same kind. Fails if a tensor is not part of
    /// the state of this kind of optimizer.
    fn restore(&mut self, state: &mut Stream) -> Result<()>;

    /// Bytes of the state that stay in memory between steps.
    fn bytes(&self) -> u64;

    /// Bytes of the state of this many elements of a parameter with this name and shape.
    fn part_bytes(&self, name: &str, dims: &[usize], elements: usize) -> u64;

    /// Bytes of the state of a parameter with this name and shape.
    fn state_bytes(&self, name: &str, dims: &[usize]) -> u64 {
        self.part_bytes(name, dims, dims.iter().product())
    }

    /// Bytes of matrices that the update of a parameter with this name and shape creates temporarily.
    fn workspace_bytes(&self, name: &str, dims: &[usize]) -> u64;
}

/// Creates an optimizer that stores its state at the given placement: with the parameters, or on the CPU
/// to save GPU memory.
pub fn build(kind: Kind, settings: &Settings, home: &Placement) -> Result<Box<dyn Optimizer>> {
    fn stateful<A: Algorithm + 'static>(algorithm: A, settings: &Settings, home: &Placement) -> Box<dyn Optimizer> {
        Box::new(StatefulOptimizer {
            algorithm,
            weight_decay: settings.weight_decay,
            exempt_vectors: settings.exempt_vectors,
            groups: settings.groups.clone(),
            home: home.clone(),
            state: BTreeMap::new(),
        })
    }
    settings.check()?;
    Ok(match kind {
        Kind::AdamW => stateful(adamw::AdamW::new(settings), settings, home),
        Kind::AdamW8bit => {
            let algorithm = adamw8bit::AdamW8bit::new(settings, home.device()).map_err(|e| Error::candle("the tables of adamw8bit", e))?;
            stateful(algorithm, settings, home)
        }
        Kind::Adafactor => stateful(adafactor::Adafactor::new(settings), settings, home),
        Kind::Muon => stateful(muon::Muon::new(settings), settings, home),
        Kind::Sgd => stateful(sgd::Sgd::new(settings), settings, home),
    })
}

/// Name, shape and dtype of a state tensor; it is initialized with zeros.
type StateTensor = (&'static str, Vec<usize>, DType);

/// Step number and rates of one update.
#[derive(Debug, Clone, Copy)]
struct StepContext {
    /// Learning rate.
    rate: f64,
    /// Counted from 1.
    step: u64,
    weight_decay: f64,
}

/// State layout and update rule of an algorithm. State tensors are passed in the order of
/// [`parts`](Algorithm::parts).
trait Algorithm: Send + Sync {
    /// All possible names of state tensors.
    const PARTS: &'static [&'static str];

    /// State tensors of a parameter with this name and shape, or of a part of it with the shape `own`.
    fn parts(&self, name: &str, dims: &[usize], own: &[usize]) -> Vec<StateTensor>;

    /// Number of consecutive elements of a parameter that must be updated together.
    fn unit(&self, _name: &str, _dims: &[usize]) -> usize {
        1
    }

    /// Bytes of matrices that an update creates temporarily. Elementwise temporaries are not counted.
    fn workspace_bytes(&self, _: &str, _: &[usize]) -> u64 {
        0
    }

    /// Updates a parameter and its state in host memory.
    fn on_host(&self, context: StepContext, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> candle_core::Result<()>;

    /// The same update by one kernel on a GPU, in place. Returns whether there is one for these tensors.
    fn on_gpu(&self, _context: StepContext, _parameter: &Tensor, _gradient: &Tensor, _state: &[Tensor]) -> candle_core::Result<bool> {
        Ok(false)
    }

    /// The same update with tensor operations. Updates the state in place, and returns the new parameter.
    fn by_operations(&self, context: StepContext, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> candle_core::Result<Tensor>;
}

/// An algorithm with its state.
struct StatefulOptimizer<A> {
    algorithm: A,
    weight_decay: f64,
    exempt_vectors: bool,
    groups: BTreeMap<String, Rates>,
    home: Placement,
    /// State tensors by parameter, then by part.
    state: BTreeMap<String, BTreeMap<&'static str, ManagedTensor>>,
}

impl<A: Algorithm> StatefulOptimizer<A> {
    /// Loads the state of a parameter, creating it if necessary.
    fn load(&mut self, name: &str, dims: &[usize], own: &[usize]) -> Result<Vec<Tensor>> {
        let failed = |e: candle_core::Error| Error::candle(format!("the optimizer's step of `{name}`"), e);
        if !self.state.contains_key(name) {
            self.state.insert(name.to_owned(), BTreeMap::new());
        }
        let parts = self.state.entry(name.to_owned()).or_default();
        let mut tensors = Vec::new();
        for (part, dims, dtype) in self.algorithm.parts(name, dims, own) {
            let tensor = match parts.get(part) {
                Some(kept) if kept.dims() != dims || kept.dtype() != dtype => {
                    let reason = format!("its restored state `{part}` is {:?} {:?} instead of {dtype:?} {dims:?}", kept.dtype(), kept.dims());
                    return Err(failed(candle_core::Error::Msg(reason)));
                }
                Some(kept) => kept.open()?,
                None => Tensor::zeros(dims, dtype, self.home.device()).map_err(failed)?,
            };
            if !parts.contains_key(part) {
                parts.insert(part, self.home.store(&tensor)?);
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Stores the state of a parameter after it was modified in place.
    fn store(&mut self, name: &str, dims: &[usize], own: &[usize], state: Vec<Tensor>) -> Result<()> {
        let Some(stored) = self.state.get_mut(name) else { return Ok(()) };
        let parts = self.algorithm.parts(name, dims, own).into_iter().zip(state);
        parts.into_iter().try_for_each(|((part, ..), tensor)| stored.get_mut(part).map_or(Ok(()), |kept| kept.put(tensor)))
    }

    fn step(&self, parameter: &Tensor, gradient: &Tensor, state: &[Tensor], context: StepContext) -> candle_core::Result<()> {
        if parameter.dims() != gradient.dims() {
            candle_core::bail!("its shape is {:?}, that of its gradient {:?}", parameter.dims(), gradient.dims());
        }
        let device = self.home.device();
        if self.algorithm.on_gpu(context, parameter, gradient, state)? {
            return Ok(());
        }
        if !on_host(device) {
            // The update runs on the state's device, which may differ from the parameter's.
            let to_device = |tensor: &Tensor| transfer::move_to(tensor, device, Cause::Offload)?.to_dtype(DType::F32);
            return floats::assign(parameter, &self.algorithm.by_operations(context, &to_device(parameter)?, &to_device(gradient)?, state)?);
        }
        floats::read(&floats::on_host(gradient)?, |gradient| {
            let step = |parameter: &Tensor| floats::change(parameter, |elements| self.algorithm.on_host(context, parameter.dims(), elements, gradient, state));
            if parameter.device().is_cpu() {
                return step(parameter);
            }
            let copy = floats::on_host(parameter)?;
            step(&copy)?;
            floats::assign(parameter, &copy)
        })
    }
}

impl<A: Algorithm> Optimizer for StatefulOptimizer<A> {
    fn update_part(&mut self, name: &str, dims: &[usize], elements: &Tensor, gradient: &Tensor, rate: f64, step: u64) -> Result<()> {
        // The biases of all experts are one matrix.
        let is_exempt = self.exempt_vectors && (dims.len() <= 1 || name.ends_with("bias"));
        let rates = self.groups.get(name).copied().unwrap_or(Rates { factor: 1.0, weight_decay: None });
        let weight_decay = rates.weight_decay.unwrap_or(if is_exempt { 0.0 } else { self.weight_decay });
        let context = StepContext { rate: rate * rates.factor, step: step.max(1), weight_decay };
        let state = self.load(name, dims, elements.dims())?;
        self.step(elements, gradient, &state, context).map_err(|e| Error::candle(format!("the optimizer's step of `{name}`"), e))?;
        self.store(name, dims, elements.dims(), state)
    }

    fn unit(&self, name: &str, dims: &[usize]) -> usize {
        self.algorithm.unit(name, dims)
    }

    fn state(&self) -> BTreeMap<String, ManagedTensor> {
        let named = |(name, parts): (&String, &BTreeMap<&'static str, ManagedTensor>)| {
            parts.iter().map(|(part, tensor)| (format!("{part}/{name}"), tensor.clone())).collect::<Vec<_>>()
        };
        self.state.iter().flat_map(named).collect()
    }

    fn restore(&mut self, state: &mut Stream) -> Result<()> {
        let mut restored: BTreeMap<String, BTreeMap<&'static str, ManagedTensor>> = BTreeMap::new();
        for tensor in state {
            let (name, tensor) = tensor?;
            let found = name.split_once('/').and_then(|(part, parameter)| Some((A::PARTS.iter().find(|supported| **supported == part)?, parameter)));
            let Some((part, parameter)) = found else {
                let parts = A::PARTS.join(", ");
                return Err(Error::tensor(
                    &name,
                    format!("is not part of the state of this optimizer, which has {parts}"),
                    "resume with the optimizer that the training started with",
                ));
            };
            let own = || transfer::move_to(&tensor, self.home.device(), Cause::State)?.force_contiguous();
            let tensor = own().map_err(|e| Error::tensor(&name, format!("cannot be restored: {e}"), ""))?;
            restored.entry(parameter.to_owned()).or_default().insert(part, self.home.store(&tensor)?);
        }
        self.state = restored;
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.state.values().flat_map(BTreeMap::values).map(ManagedTensor::bytes).sum()
    }

    fn workspace_bytes(&self, name: &str, dims: &[usize]) -> u64 {
        self.algorithm.workspace_bytes(name, dims)
    }

    fn part_bytes(&self, name: &str, dims: &[usize], elements: usize) -> u64 {
        let flat = [elements];
        let own = if elements == dims.iter().product::<usize>() { dims } else { &flat };
        self.algorithm.parts(name, dims, own).iter().map(|(_, dims, dtype)| (dims.iter().product::<usize>() * dtype.size_in_bytes()) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// A group has its own rates, also for vectors.
    #[test]
    fn groups_have_their_own_rates() {
        let groups =
            BTreeMap::from([("a".to_owned(), Rates { factor: 0.5, weight_decay: Some(0.1) }), ("b".to_owned(), Rates { factor: 0.0, weight_decay: None })]);
        let settings = Settings { weight_decay: 0.2, groups, ..Settings::default() };
        let mut optimizer = build(Kind::AdamW, &settings, &Placement::Memory(Device::Cpu)).unwrap();
        let mut stepped = |name: &str| {
            let parameter = Tensor::new(&[1f32], &Device::Cpu).unwrap();
            optimizer.update(name, &parameter, &Tensor::new(&[3f32], &Device::Cpu).unwrap(), 0.25, 1).unwrap();
            parameter.to_vec1::<f32>().unwrap()[0]
        };
        // The first step of AdamW has the size of the learning rate.
        for (name, expected) in [("a", 1.0 - 0.125 * 0.1 - 0.125), ("b", 1.0), ("c", 0.75)] {
            assert!((stepped(name) - expected as f32).abs() < 1e-5, "{name}: {} instead of {expected}", stepped(name));
        }
    }

    /// Pseudorandom numbers in -1..1.
    pub(super) fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(next).collect()
    }

    pub(super) fn tensor(dims: &[usize], seed: u64) -> Tensor {
        Tensor::from_vec(numbers(dims.iter().product(), seed), dims, &Device::Cpu).unwrap()
    }

    pub(super) fn settings() -> Settings {
        Settings { momentum: 0.9, weight_decay: 0.1, linear_weights: ["host", "device", "w"].map(str::to_owned).into(), ..Settings::default() }
    }

    /// Largest difference between an update on the host and the same with tensor operations, of
    /// parameters and f32 state.
    fn largest_difference<A: Algorithm>(algorithm: A, dims: &[usize]) -> f64 {
        let (groups, state) = (BTreeMap::new(), BTreeMap::new());
        let mut optimizer = StatefulOptimizer { algorithm, weight_decay: 0.0, exempt_vectors: false, groups, home: Placement::Memory(Device::Cpu), state };
        let (host, device) = (tensor(dims, 1), tensor(dims, 1));
        let ours = optimizer.load("host", dims, dims).unwrap();
        let theirs = optimizer.load("device", dims, dims).unwrap();
        for step in 1..=5 {
            let gradient = tensor(dims, 10 + step);
            let context = StepContext { rate: 0.01, step, weight_decay: 0.1 };
            floats::read(&gradient, |g| floats::change(&host, |x| optimizer.algorithm.on_host(context, dims, x, g, &ours))).unwrap();
            let new = optimizer.algorithm.by_operations(context, &device, &gradient, &theirs).unwrap();
            floats::assign(&device, &new).unwrap();
        }
        let difference = |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        let mut largest = difference(&host, &device);
        for (ours, theirs) in ours.iter().zip(&theirs).filter(|(ours, _)| ours.dtype() == DType::F32) {
            largest = largest.max(difference(ours, theirs));
        }
        largest.into()
    }

    #[test]
    fn host_and_tensor_operations_agree() {
        for dims in [&[40, 130][..], &[5300], &[8, 6, 3, 3], &[7]] {
            assert!(largest_difference(adamw::AdamW::new(&settings()), dims) < 1e-5, "{dims:?}");
            assert!(largest_difference(sgd::Sgd::new(&settings()), dims) < 1e-5, "{dims:?}");
            assert!(largest_difference(sgd::Sgd::new(&Settings { nesterov: true, ..settings() }), dims) < 1e-5, "{dims:?}");
            assert!(largest_difference(sgd::Sgd::new(&Settings::default()), dims) < 1e-5, "{dims:?}");
            assert!(largest_difference(adafactor::Adafactor::new(&settings()), dims) < 1e-5, "{dims:?}");
            assert!(largest_difference(muon::Muon::new(&settings()), dims) < 1e-5, "{dims:?}");
            // A number between two codes may round to either.
            assert!(largest_difference(adamw8bit::AdamW8bit::new(&settings(), &Device::Cpu).unwrap(), dims) < 5e-3, "{dims:?}");
        }
    }

    #[test]
    fn state_is_restored_in_another_optimizer() {
        for kind in Kind::ALL {
            let (whole, halves) = (tensor(&[70, 80], 1), tensor(&[70, 80], 1));
            let mut first = build(kind, &settings(), &Placement::Memory(Device::Cpu)).unwrap();
            let mut second = build(kind, &settings(), &Placement::Memory(Device::Cpu)).unwrap();
            for step in 1..=6 {
                let gradient = tensor(&[70, 80], step + 5);
                first.update("w", &whole, &gradient, 0.01, step).unwrap();
                second.update("w", &halves, &gradient, 0.01, step).unwrap();
                let mut third = build(kind, &settings(), &Placement::Memory(Device::Cpu)).unwrap();
                third.restore(&mut second.state().into_iter().map(|(name, kept)| Ok((name, kept.open()?)))).unwrap();
                assert_eq!(third.bytes(), first.bytes());
                second = third;
            }
            assert_eq!(whole.to_vec2::<f32>().unwrap(), halves.to_vec2::<f32>().unwrap(), "{kind:?}");
        }
    }

    #[test]
    fn results_do_not_depend_on_threads() {
        let run = |kind, threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let parameter = tensor(&[300, 170], 1);
                let mut optimizer = build(kind, &settings(), &Placement::Memory(Device::Cpu)).unwrap();
                (1..=3).for_each(|step| optimizer.update("w", &parameter, &tensor(&[300, 170], step + 5), 0.01, step).unwrap());
                parameter.to_vec2::<f32>().unwrap()
            })
        };
        for kind in Kind::ALL {
            assert_eq!(run(kind, 1), run(kind, 3), "{kind:?}");
        }
    }

    #[test]
    fn vectors_and_biases_are_exempt_from_weight_decay() {
        let cases = [(true, vec![3], "b", 1.0), (false, vec![3], "b", 0.9), (true, vec![2, 3], "experts.down_proj_bias", 1.0), (true, vec![2, 3], "b", 0.9)];
        for (exempt_vectors, shape, name, expected) in cases {
            let parameter = Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
            let settings = Settings { weight_decay: 0.1, exempt_vectors, ..Settings::default() };
            build(Kind::AdamW, &settings, &Placement::Memory(Device::Cpu)).unwrap().update(name, &parameter, &parameter.zeros_like().unwrap(), 1.0, 1).unwrap();
            assert!(parameter.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|value| *value == expected), "{name}");
        }
    }

    #[test]
    fn mismatched_tensors_are_named() {
        let mut optimizer = build(Kind::AdamW, &Settings::default(), &Placement::Memory(Device::Cpu)).unwrap();
        let (small, large) = (tensor(&[2], 1), tensor(&[3], 1));
        let error = optimizer.update("a.bias", &small, &large, 0.1, 1).unwrap_err().to_string();
        assert!(error.contains("`a.bias`") && error.contains("[3]"), "{error}");
        optimizer.update("a.bias", &small, &small.copy().unwrap(), 0.1, 1).unwrap();
        assert_eq!(optimizer.bytes(), 16);
        assert_eq!(optimizer.state().into_keys().collect::<Vec<_>>(), ["mean/a.bias", "square/a.bias"]);
        let error = optimizer.update("a.bias", &large, &large.copy().unwrap(), 0.1, 2).unwrap_err().to_string();
        assert!(error.contains("`mean`"), "{error}");
        let error = optimizer.restore(&mut std::iter::once(Ok(("velocity/a".into(), small)))).unwrap_err().to_string();
        assert!(error.contains("velocity/a"), "{error}");
    }
}

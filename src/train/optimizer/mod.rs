//! Optimizers: one algorithm a file. An algorithm says what it keeps of a parameter and makes one step; where the state lies, how
//! it is saved and what moves between devices is decided here, once.

mod adafactor;
mod adamw;
mod adamw8bit;
mod sgd;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::checkpoint::Stream;
use super::floats;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Home, Kept};
use crate::ir::ops::on_host;

/// The algorithm that makes steps of gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Adam with decoupled weight decay
    #[default]
    #[cfg_attr(feature = "cli", value(name = "adamw"))]
    AdamW,
    /// AdamW with 8-bit moments
    #[cfg_attr(feature = "cli", value(name = "adamw8bit"))]
    AdamW8bit,
    /// Second moments by row and column, no first moment
    #[cfg_attr(feature = "cli", value(name = "adafactor"))]
    Adafactor,
    /// Gradient descent, with momentum
    #[cfg_attr(feature = "cli", value(name = "sgd"))]
    Sgd,
}

/// What the algorithms are set to. The defaults are those of PyTorch, and of transformers for Adafactor.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// AdamW: what is left of the first moment after a step.
    pub beta1: f64,
    /// AdamW: what is left of the second moment after a step.
    pub beta2: f64,
    /// AdamW: added to the root of the second moment.
    pub epsilon: f64,
    /// What a step takes off a parameter, as a multiple of the learning rate. With SGD, it is added to the gradient.
    pub weight_decay: f64,
    /// No weight decay on parameters of one axis: biases, and weights of normalisations.
    pub spare_vectors: bool,
    /// SGD: what is left of the velocity after a step.
    pub momentum: f64,
    /// SGD: Nesterov's momentum.
    pub nesterov: bool,
    /// Adafactor: step `t` takes `t` to the minus this power of the squared gradient into the second moment.
    pub decay_power: f64,
    /// Adafactor: largest root mean square of an update, before the learning rate.
    pub clip_threshold: f64,
    /// Adafactor: added to the squared gradient.
    pub square_epsilon: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            spare_vectors: true,
            momentum: 0.0,
            nesterov: false,
            decay_power: 0.8,
            clip_threshold: 1.0,
            square_epsilon: 1e-30,
        }
    }
}

impl Settings {
    /// Refuses what no algorithm can work with.
    ///
    /// # Errors
    /// The first setting that is impossible, by name.
    pub fn check(&self) -> Result<()> {
        let shares = [("beta1", self.beta1), ("beta2", self.beta2), ("momentum", self.momentum)];
        if let Some((name, value)) = shares.into_iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return Err(Error::option(name, format!("{value} is not at least 0 and less than 1")));
        }
        let amounts = [("epsilon", self.epsilon), ("weight_decay", self.weight_decay), ("square_epsilon", self.square_epsilon)];
        if let Some((name, value)) = amounts.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Err(Error::option(name, format!("{value} is not a number from 0 up")));
        }
        let positive = [("decay_power", self.decay_power), ("clip_threshold", self.clip_threshold)];
        if let Some((name, value)) = positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            return Err(Error::option(name, format!("{value} is not above 0")));
        }
        match self.nesterov && self.momentum == 0.0 {
            true => Err(Error::option("nesterov", "needs a `momentum` above 0")),
            false => Ok(()),
        }
    }
}

/// Changes parameters along their gradients.
pub trait Optimizer: Send {
    /// One step of one parameter, in place. `step` counts from 1. The parameter is f32 without gaps; the gradient has its shape.
    ///
    /// # Errors
    /// By the name of the parameter: shapes that differ, restored state of another shape, memory that runs out.
    fn update(&mut self, name: &str, parameter: &Tensor, gradient: &Tensor, rate: f64, step: u64) -> Result<()>;

    /// What is remembered from step to step, as `part/parameter`. The tensors are those of the optimizer: the next step changes them.
    fn state(&self) -> BTreeMap<String, Kept>;

    /// Goes on where another optimizer of the same kind has stopped.
    ///
    /// # Errors
    /// A tensor that this kind of optimizer does not keep, by name; memory runs out.
    fn restore(&mut self, state: &mut Stream) -> Result<()>;

    /// Bytes of the state that are in memory between steps.
    fn bytes(&self) -> u64;

    /// Bytes that are remembered of a parameter of this shape.
    fn needs(&self, dims: &[usize]) -> u64;
}

/// An optimizer whose state lives here: where the parameters do, or on the CPU to leave a GPU's memory to other things.
///
/// # Errors
/// As [`Settings::check`].
pub fn build(kind: Kind, settings: &Settings, home: &Home) -> Result<Box<dyn Optimizer>> {
    fn kept<A: Algorithm + 'static>(algorithm: A, settings: &Settings, home: &Home) -> Box<dyn Optimizer> {
        Box::new(Keeper { algorithm, weight_decay: settings.weight_decay, spare_vectors: settings.spare_vectors, home: home.clone(), state: BTreeMap::new() })
    }
    settings.check()?;
    Ok(match kind {
        Kind::AdamW => kept(adamw::AdamW::new(settings), settings, home),
        Kind::AdamW8bit => kept(adamw8bit::AdamW8bit::new(settings), settings, home),
        Kind::Adafactor => kept(adafactor::Adafactor::new(settings), settings, home),
        Kind::Sgd => kept(sgd::Sgd::new(settings), settings, home),
    })
}

/// Name, shape and type of a tensor that is kept of a parameter; it starts as zeros.
type StateTensor = (&'static str, Vec<usize>, DType);

/// What holds for one step of one parameter.
#[derive(Debug, Clone, Copy)]
struct Now {
    rate: f64,
    /// From 1.
    step: u64,
    weight_decay: f64,
}

/// What an algorithm keeps, and one step of it. State comes in the order of its parts.
trait Algorithm: Send {
    /// All names of parts there can be.
    const PARTS: &'static [&'static str];

    /// What is kept of a parameter of this shape.
    fn parts(&self, dims: &[usize]) -> Vec<StateTensor>;

    /// A step in host memory.
    fn on_host(&self, now: Now, dims: &[usize], parameter: &mut [f32], gradient: &[f32], state: &[Tensor]) -> candle_core::Result<()>;

    /// The same step by operations of the device. Puts the new state in its place, gives back the new parameter.
    fn by_operations(&self, now: Now, parameter: &Tensor, gradient: &Tensor, state: &[Tensor]) -> candle_core::Result<Tensor>;
}

/// An algorithm with its state.
struct Keeper<A> {
    algorithm: A,
    weight_decay: f64,
    spare_vectors: bool,
    home: Home,
    /// By parameter, then by part.
    state: BTreeMap<String, BTreeMap<&'static str, Kept>>,
}

impl<A: Algorithm> Keeper<A> {
    /// The state of a parameter, made where there is none.
    fn of(&mut self, name: &str, dims: &[usize]) -> Result<Vec<Tensor>> {
        let failed = |e: candle_core::Error| Error::computed(format!("the optimizer's step of `{name}`"), e);
        if !self.state.contains_key(name) {
            self.state.insert(name.to_owned(), BTreeMap::new());
        }
        let held = self.state.entry(name.to_owned()).or_default();
        let mut tensors = Vec::new();
        for (part, dims, dtype) in self.algorithm.parts(dims) {
            let tensor = match held.get(part) {
                Some(kept) if kept.dims() != dims || kept.dtype() != dtype => {
                    let reason = format!("its restored `{part}` is {:?} {:?}, where {dtype:?} {dims:?} belongs", kept.dtype(), kept.dims());
                    return Err(failed(candle_core::Error::Msg(reason)));
                }
                Some(kept) => kept.open()?,
                None => Tensor::zeros(dims, dtype, self.home.device()).map_err(failed)?,
            };
            if !held.contains_key(part) {
                held.insert(part, self.home.keep(&tensor)?);
            }
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    /// Puts a state back that has changed in place.
    fn put(&mut self, name: &str, dims: &[usize], state: Vec<Tensor>) -> Result<()> {
        let Some(held) = self.state.get_mut(name) else { return Ok(()) };
        let parts = self.algorithm.parts(dims).into_iter().zip(state);
        parts.into_iter().try_for_each(|((part, ..), tensor)| held.get_mut(part).map_or(Ok(()), |kept| kept.put(tensor)))
    }

    fn step(&self, parameter: &Tensor, gradient: &Tensor, state: &[Tensor], now: Now) -> candle_core::Result<()> {
        if parameter.dims() != gradient.dims() {
            candle_core::bail!("its shape is {:?}, that of its gradient {:?}", parameter.dims(), gradient.dims());
        }
        let device = self.home.device();
        if !on_host(device) {
            // The state's device computes, which may be another than the parameter's.
            let there = |tensor: &Tensor| transfer::beside(tensor, device, Cause::Offload)?.to_dtype(DType::F32);
            return floats::assign(parameter, &self.algorithm.by_operations(now, &there(parameter)?, &there(gradient)?, state)?);
        }
        floats::read(&floats::on_host(gradient)?, |gradient| {
            let step = |parameter: &Tensor| floats::change(parameter, |elements| self.algorithm.on_host(now, parameter.dims(), elements, gradient, state));
            if parameter.device().is_cpu() {
                return step(parameter);
            }
            let copy = floats::on_host(parameter)?;
            step(&copy)?;
            floats::assign(parameter, &copy)
        })
    }
}

impl<A: Algorithm> Optimizer for Keeper<A> {
    fn update(&mut self, name: &str, parameter: &Tensor, gradient: &Tensor, rate: f64, step: u64) -> Result<()> {
        let spared = self.spare_vectors && parameter.rank() <= 1;
        let now = Now { rate, step: step.max(1), weight_decay: if spared { 0.0 } else { self.weight_decay } };
        let state = self.of(name, parameter.dims())?;
        self.step(parameter, gradient, &state, now).map_err(|e| Error::computed(format!("the optimizer's step of `{name}`"), e))?;
        self.put(name, parameter.dims(), state)
    }

    fn state(&self) -> BTreeMap<String, Kept> {
        let named = |(name, parts): (&String, &BTreeMap<&'static str, Kept>)| {
            parts.iter().map(|(part, tensor)| (format!("{part}/{name}"), tensor.clone())).collect::<Vec<_>>()
        };
        self.state.iter().flat_map(named).collect()
    }

    fn restore(&mut self, state: &mut Stream) -> Result<()> {
        let mut restored: BTreeMap<String, BTreeMap<&'static str, Kept>> = BTreeMap::new();
        for tensor in state {
            let (name, tensor) = tensor?;
            let found = name.split_once('/').and_then(|(part, parameter)| Some((A::PARTS.iter().find(|known| **known == part)?, parameter)));
            let Some((part, parameter)) = found else {
                let known = A::PARTS.join(", ");
                return Err(Error::tensor(
                    &name,
                    format!("is no state of this optimizer, which keeps {known}"),
                    "continue with the optimizer that the training started with",
                ));
            };
            let own = || transfer::beside(&tensor, self.home.device(), Cause::State)?.force_contiguous();
            let tensor = own().map_err(|e| Error::tensor(&name, format!("cannot be restored: {e}"), ""))?;
            restored.entry(parameter.to_owned()).or_default().insert(part, self.home.keep(&tensor)?);
        }
        self.state = restored;
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.state.values().flat_map(BTreeMap::values).map(Kept::bytes).sum()
    }

    fn needs(&self, dims: &[usize]) -> u64 {
        self.algorithm.parts(dims).iter().map(|(_, dims, dtype)| (dims.iter().product::<usize>() * dtype.size_in_bytes()) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Some numbers, always the same for one seed.
    pub(super) fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(next).collect()
    }

    fn tensor(dims: &[usize], seed: u64) -> Tensor {
        Tensor::from_vec(numbers(dims.iter().product(), seed), dims, &Device::Cpu).unwrap()
    }

    fn settings() -> Settings {
        Settings { momentum: 0.9, weight_decay: 0.1, ..Settings::default() }
    }

    const KINDS: [Kind; 4] = [Kind::AdamW, Kind::AdamW8bit, Kind::Adafactor, Kind::Sgd];

    /// Largest difference between a step on the host and the same step by operations, and between what both remember.
    fn ways_apart<A: Algorithm>(algorithm: A, dims: &[usize]) -> f64 {
        let mut keeper = Keeper { algorithm, weight_decay: 0.0, spare_vectors: false, home: Home::Memory(Device::Cpu), state: BTreeMap::new() };
        let (host, device) = (tensor(dims, 1), tensor(dims, 1));
        let ours = keeper.of("host", dims).unwrap();
        let theirs = keeper.of("device", dims).unwrap();
        for step in 1..=5 {
            let gradient = tensor(dims, 10 + step);
            let now = Now { rate: 0.01, step, weight_decay: 0.1 };
            floats::read(&gradient, |g| floats::change(&host, |x| keeper.algorithm.on_host(now, dims, x, g, &ours))).unwrap();
            let new = keeper.algorithm.by_operations(now, &device, &gradient, &theirs).unwrap();
            floats::assign(&device, &new).unwrap();
        }
        let apart = |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        let mut most = apart(&host, &device);
        for (ours, theirs) in ours.iter().zip(&theirs).filter(|(ours, _)| ours.dtype() == DType::F32) {
            most = most.max(apart(ours, theirs));
        }
        most.into()
    }

    #[test]
    fn both_ways_to_step_agree() {
        for dims in [&[40, 130][..], &[5300], &[8, 6, 3, 3], &[7]] {
            assert!(ways_apart(adamw::AdamW::new(&settings()), dims) < 1e-5, "{dims:?}");
            assert!(ways_apart(sgd::Sgd::new(&settings()), dims) < 1e-5, "{dims:?}");
            assert!(ways_apart(sgd::Sgd::new(&Settings { nesterov: true, ..settings() }), dims) < 1e-5, "{dims:?}");
            assert!(ways_apart(sgd::Sgd::new(&Settings::default()), dims) < 1e-5, "{dims:?}");
            assert!(ways_apart(adafactor::Adafactor::new(&settings()), dims) < 1e-5, "{dims:?}");
            // A number between two codes may become either.
            assert!(ways_apart(adamw8bit::AdamW8bit::new(&settings()), dims) < 5e-3, "{dims:?}");
        }
    }

    #[test]
    fn state_goes_on_in_another_optimizer() {
        for kind in KINDS {
            let (whole, halves) = (tensor(&[70, 80], 1), tensor(&[70, 80], 1));
            let mut first = build(kind, &settings(), &Home::Memory(Device::Cpu)).unwrap();
            let mut second = build(kind, &settings(), &Home::Memory(Device::Cpu)).unwrap();
            for step in 1..=6 {
                let gradient = tensor(&[70, 80], step + 5);
                first.update("w", &whole, &gradient, 0.01, step).unwrap();
                second.update("w", &halves, &gradient, 0.01, step).unwrap();
                let mut third = build(kind, &settings(), &Home::Memory(Device::Cpu)).unwrap();
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
                let mut optimizer = build(kind, &settings(), &Home::Memory(Device::Cpu)).unwrap();
                (1..=3).for_each(|step| optimizer.update("w", &parameter, &tensor(&[300, 170], step + 5), 0.01, step).unwrap());
                parameter.to_vec2::<f32>().unwrap()
            })
        };
        for kind in KINDS {
            assert_eq!(run(kind, 1), run(kind, 3), "{kind:?}");
        }
    }

    #[test]
    fn vectors_are_spared_of_weight_decay() {
        for (spare_vectors, expected) in [(true, 1.0), (false, 0.9)] {
            let parameter = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
            let settings = Settings { weight_decay: 0.1, spare_vectors, ..Settings::default() };
            build(Kind::AdamW, &settings, &Home::Memory(Device::Cpu)).unwrap().update("b", &parameter, &parameter.zeros_like().unwrap(), 1.0, 1).unwrap();
            assert_eq!(parameter.to_vec1::<f32>().unwrap(), [expected; 3]);
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut optimizer = build(Kind::AdamW, &Settings::default(), &Home::Memory(Device::Cpu)).unwrap();
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

    #[test]
    fn impossible_settings_are_refused() {
        let wrong = [
            Settings { beta1: 1.0, ..Settings::default() },
            Settings { epsilon: f64::NAN, ..Settings::default() },
            Settings { clip_threshold: 0.0, ..Settings::default() },
            Settings { nesterov: true, ..Settings::default() },
        ];
        for settings in wrong {
            assert!(build(Kind::Sgd, &settings, &Home::Memory(Device::Cpu)).err().unwrap().is_misuse(), "{settings:?}");
        }
        assert_eq!(serde_json::to_value(Kind::AdamW8bit).unwrap(), "adamw8bit");
        assert_eq!(serde_json::from_str::<Kind>("\"adamw\"").unwrap(), Kind::default());
    }
}

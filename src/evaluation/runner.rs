//! Models that can be run, whoever runs them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::{Outputs, Precision, Runtime};
use crate::data::{Batch, References};
use crate::error::Result;
use crate::exec::{Blockwise, BlockwiseOptions, Executor, Inputs, Parameters, Residence, Rounding, state_bytes};
use crate::ir::decoder::{MASK, TOKENS};
use crate::ir::{Graph, Port};
use crate::model::Model;
use crate::runtime::{self, KeptTokens, Limits, Session};
use crate::store::Weights;
use crate::work::{Cancel, Work};

impl Precision {
    /// Type of elements.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// A model that is ready.
pub trait Runner {
    /// Who runs it.
    fn runtime(&self) -> Runtime;
    /// Answers a batch. Answers are where the model ran, and are there when this returns.
    ///
    /// # Errors
    /// An input is missing or does not fit; memory runs out.
    fn run(&mut self, inputs: &Inputs) -> Result<Outputs>;
    /// How many batches like this one it is to be told of before it runs them; nothing where that makes no difference.
    fn together(&self, _inputs: &Inputs) -> Option<usize> {
        None
    }
    /// Takes batches that it is asked to run next, in this order.
    ///
    /// # Errors
    /// As [`run`](Runner::run).
    fn prepare(&mut self, _batches: &[Batch]) -> Result<()> {
        Ok(())
    }
}

/// The built-in executor.
#[derive(Debug)]
pub struct Candle<'g> {
    executor: Executor<'g>,
}

impl<'g> Candle<'g> {
    /// Loads a model's parameters. 16-bit weights stay as they are and are converted where they are used.
    ///
    /// # Errors
    /// Reading fails, or memory runs out.
    pub fn load(model: &Model, graph: &'g Graph, precision: Precision, device: &Device, work: &Work) -> Result<Candle<'g>> {
        let parameters = Parameters::load(graph, &model.weights, device, precision.dtype(), Residence::Stored, work)?;
        Ok(Candle { executor: Executor::new(graph, parameters, device.clone()) })
    }

    /// An executor that is ready.
    pub fn of(executor: Executor<'g>) -> Candle<'g> {
        Candle { executor }
    }

    /// The same with inputs of int8 layers rounded in another way.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Candle { executor: self.executor.with_rounding(rounding) }
    }
}

impl Runner for Candle<'_> {
    fn runtime(&self) -> Runtime {
        Runtime::Candle
    }

    fn run(&mut self, inputs: &Inputs) -> Result<Outputs> {
        ready(self.executor.run(inputs)?)
    }
}

/// Outputs that are computed: a device may still be at work on them.
fn ready(outputs: Outputs) -> Result<Outputs> {
    outputs.values().next().map_or(Ok(()), |tensor| tensor.device().synchronize()).map_err(super::computed)?;
    Ok(outputs)
}

/// The built-in executor for a model that is larger than memory: batches that it is told of go through its blocks together, and the
/// parameters are read once for all of them.
pub struct ByBlocks<'m> {
    graph: &'m Graph,
    weights: &'m Weights,
    options: BlockwiseOptions,
    /// Bytes of states that batches may hold between blocks.
    states: u64,
    work: Work<'m>,
    /// Batches in the last block, and how many of them were asked for.
    prepared: Option<(Blockwise<'m>, usize)>,
}

impl<'m> ByBlocks<'m> {
    /// Prepares a model; `states` are the bytes that batches may hold between blocks.
    pub fn new(model: &'m Model, graph: &'m Graph, options: BlockwiseOptions, states: u64, work: &Work<'m>) -> ByBlocks<'m> {
        let options = BlockwiseOptions { limit: u64::MAX, ..options };
        ByBlocks { graph, weights: &model.weights, options, states, work: *work, prepared: None }
    }
}

impl Runner for ByBlocks<'_> {
    fn runtime(&self) -> Runtime {
        Runtime::Candle
    }

    fn run(&mut self, inputs: &Inputs) -> Result<Outputs> {
        let ids = |inputs: &Inputs| inputs.values().map(Tensor::id).collect::<Vec<_>>();
        let next = |(run, next): &(Blockwise, usize)| *next < run.batches() && ids(&run.batch(*next).inputs) == ids(inputs);
        if !self.prepared.as_ref().is_some_and(next) {
            self.prepare(&[Batch { inputs: inputs.clone(), references: References::None, samples: 1 }])?;
        }
        let Some((run, next)) = &mut self.prepared else { return Ok(Outputs::new()) };
        *next += 1;
        ready(run.answer(*next - 1)?)
    }

    fn together(&self, inputs: &Inputs) -> Option<usize> {
        Some(usize::try_from(self.states / state_bytes(self.graph, inputs).max(1)).unwrap_or(usize::MAX).max(1))
    }

    fn prepare(&mut self, batches: &[Batch]) -> Result<()> {
        self.prepared = None;
        let mut run = Blockwise::new(self.graph, self.weights, |_| false, self.options.clone(), &self.work);
        batches.iter().try_for_each(|batch| run.push(batch.clone()))?;
        (0..run.blocks().len()).try_for_each(|block| Blockwise::together(&mut [&mut run], block, &BTreeSet::new()))?;
        self.prepared = Some((run, 0));
        Ok(())
    }
}

/// A model file in ONNX Runtime.
#[derive(Debug)]
pub struct OnnxRuntime {
    session: Session,
    /// Tokens that a decoder with a cache is given one by one, behind all others.
    steps: usize,
    /// Limits of a run.
    limits: Option<Limits>,
}

impl OnnxRuntime {
    /// Loads a model file.
    ///
    /// # Errors
    /// There is no ONNX Runtime, or it refuses the file.
    pub fn open(path: &Path, threads: usize) -> Result<OnnxRuntime> {
        Ok(OnnxRuntime { session: Session::open(path, runtime::Options { threads, ..runtime::Options::default() })?, steps: 0, limits: None })
    }

    pub(crate) fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Terminates runs that exceed these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> OnnxRuntime {
        OnnxRuntime { limits: Some(limits), ..self }
    }

    /// Terminates runs when this handle is cancelled.
    #[must_use]
    pub fn cancelled_by(self, cancel: &Cancel) -> OnnxRuntime {
        OnnxRuntime { session: self.session.cancelled_by(cancel), ..self }
    }

    /// What the model takes and gives.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        self.session.public_ports()
    }

    /// The same where the last tokens of each text, so many, are given one by one if the model keeps the others.
    #[must_use]
    pub fn with_steps(self, steps: usize) -> OnnxRuntime {
        OnnxRuntime { steps, ..self }
    }

    /// Answers for all tokens of a decoder with a cache.
    fn run_in_steps(&mut self, inputs: &Inputs) -> Result<Outputs> {
        let columns = |from: usize, to: usize| {
            let part = |(name, tensor): (&String, &Tensor)| {
                let from = if name == MASK { 0 } else { from };
                Ok((name.clone(), tensor.narrow(1, from, to - from)?.contiguous()?))
            };
            inputs.iter().map(part).collect::<candle_core::Result<Inputs>>().map_err(super::computed)
        };
        let length = inputs.get(TOKENS).and_then(|tokens| tokens.dim(1).ok()).unwrap_or(0);
        let first = length.saturating_sub(self.steps).max(1).min(length);
        let (mut seen, mut parts) = (KeptTokens::default(), Vec::new());
        for (from, to) in [(0, first)].into_iter().chain((first..length).map(|at| (at, at + 1))) {
            parts.push(self.session.run_next(&columns(from, to)?, &mut seen)?);
        }
        let names: Vec<String> = parts.first().into_iter().flat_map(Outputs::keys).cloned().collect();
        let whole = |name: String| {
            let parts: Vec<&Tensor> = parts.iter().filter_map(|outputs| outputs.get(&name)).collect();
            Ok((name, Tensor::cat(&parts, 1).map_err(super::computed)?))
        };
        names.into_iter().map(whole).collect()
    }
}

impl Runner for OnnxRuntime {
    fn runtime(&self) -> Runtime {
        Runtime::OnnxRuntime
    }

    fn run(&mut self, inputs: &Inputs) -> Result<Outputs> {
        if self.session.keeps() { self.run_in_steps(inputs) } else { self.session.run_within(inputs, self.limits) }
    }
}

/// How long a run takes.
pub(super) fn seconds(runner: &mut dyn Runner, inputs: &Inputs) -> Result<f64> {
    let start = Instant::now();
    runner.run(inputs)?;
    Ok(start.elapsed().as_secs_f64())
}

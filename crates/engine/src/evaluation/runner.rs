//! Loaded models that run in the built-in executor or in ONNX Runtime.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

use super::{Outputs, Precision, Runtime};
use crate::data::{Batch, References};
use crate::error::Result;
use crate::exec::{Blockwise, BlockwiseOptions, Executor, Inputs, MemoryTracker, Parameters, Residence, Rounding, state_bytes};
use crate::ir::decoder::{MASK, TOKENS};
use crate::ir::{Graph, Port};
use crate::model::Model;
use crate::runtime::{self, DecoderCache, EncoderDecoderSession, Limits, Session};
use crate::store::Weights;
use crate::work::{Cancel, MemoryLimit, Work};

impl Precision {
    /// The element type.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// A loaded model.
pub trait Runner {
    /// The runtime that runs the model.
    fn runtime(&self) -> Runtime;
    /// Runs the model on a batch. Outputs are on the device of the model, and their computation has
    /// finished on return.
    fn run(&mut self, inputs: &Inputs) -> Result<Outputs>;
    /// Number of batches like this one to pass to [`prepare`](Runner::prepare) at once; `None` if the
    /// runner has no use for it.
    fn group_size(&self, _inputs: &Inputs) -> Option<usize> {
        None
    }
    /// Announces the batches of the next calls of [`run`](Runner::run), in order.
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
    /// Loads the parameters of a model. 16-bit weights stay in memory as 16-bit values, and integers as
    /// integers; they are converted when they are used.
    pub fn load(model: &Model, graph: &'g Graph, precision: Precision, device: &Device, work: &Work) -> Result<Candle<'g>> {
        let parameters = Parameters::load(graph, &model.weights, device, precision.dtype(), Residence::most_compact(device, precision.dtype()), work)?;
        Ok(Candle { executor: Executor::new(graph, parameters, device.clone()) })
    }

    /// Wraps an executor.
    pub fn new(executor: Executor<'g>) -> Candle<'g> {
        Candle { executor }
    }

    /// Sets the granularity of the dynamic quantization of activations.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Candle { executor: self.executor.with_rounding(rounding) }
    }

    /// Records values in a memory tracker, if there is one.
    #[must_use]
    pub fn tracked(self, tracker: Option<&Arc<MemoryTracker>>) -> Self {
        Candle { executor: self.executor.tracked(tracker) }
    }
}

impl Runner for Candle<'_> {
    fn runtime(&self) -> Runtime {
        Runtime::Candle
    }

    fn run(&mut self, inputs: &Inputs) -> Result<Outputs> {
        synchronized(self.executor.run(inputs)?)
    }
}

/// Waits until the device has computed the outputs.
fn synchronized(outputs: Outputs) -> Result<Outputs> {
    outputs.values().next().map_or(Ok(()), |tensor| tensor.device().synchronize()).map_err(super::tensor_error)?;
    Ok(outputs)
}

/// The built-in executor, block by block. All announced batches pass through a block before the next block
/// is loaded, so that parameters are read once per group of batches.
pub struct BlockwiseCandle<'m> {
    graph: &'m Graph,
    weights: &'m Weights,
    options: BlockwiseOptions,
    /// Limit of the activations cached between blocks, in bytes.
    cache_bytes: u64,
    work: Work<'m>,
    /// Whether the first group is a single batch.
    tries_first: bool,
    /// Announced batches after the last block, and the index of the next one to return.
    prepared: Option<(Blockwise<'m>, usize)>,
}

impl<'m> BlockwiseCandle<'m> {
    /// Wraps a model. `cache_bytes` limits the memory of the activations cached between blocks.
    pub fn new(model: &'m Model, graph: &'m Graph, options: BlockwiseOptions, cache_bytes: u64, work: &Work<'m>) -> BlockwiseCandle<'m> {
        let options = BlockwiseOptions { limit: u64::MAX, ..options };
        BlockwiseCandle { graph, weights: &model.weights, options, cache_bytes, work: *work, tries_first: false, prepared: None }
    }

    /// Runs the first batch on its own, so that an unsuitable model or data set fails early. The parameters
    /// are read once more.
    #[must_use]
    pub fn trying_first(self, tries_first: bool) -> Self {
        BlockwiseCandle { tries_first, ..self }
    }
}

impl Runner for BlockwiseCandle<'_> {
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
        synchronized(run.outputs_of(*next - 1)?)
    }

    fn group_size(&self, inputs: &Inputs) -> Option<usize> {
        if self.tries_first && self.prepared.is_none() {
            return Some(1);
        }
        Some(usize::try_from(self.cache_bytes / state_bytes(self.graph, inputs).max(1)).unwrap_or(usize::MAX).max(1))
    }

    fn prepare(&mut self, batches: &[Batch]) -> Result<()> {
        self.prepared = None;
        let mut run = Blockwise::new(self.graph, self.weights, |_| false, self.options.clone(), &self.work);
        batches.iter().try_for_each(|batch| run.push(batch.clone()))?;
        (0..run.blocks().len()).try_for_each(|block| Blockwise::run_block(&mut [&mut run], block, &BTreeSet::new()))?;
        self.prepared = Some((run, 0));
        Ok(())
    }
}

/// The sessions of a model in ONNX Runtime.
#[derive(Debug)]
enum Sessions {
    One(Box<Session>),
    EncoderDecoder(Box<EncoderDecoderSession>),
}

/// A model in ONNX Runtime: a file, or the files of an encoder-decoder model.
#[derive(Debug)]
pub struct OnnxRuntime {
    model: Sessions,
    /// Number of tokens at the end of a text that a decoder with a KV cache processes one at a time.
    steps: usize,
}

impl OnnxRuntime {
    /// Loads a model file.
    pub fn open(path: &Path, threads: usize) -> Result<OnnxRuntime> {
        let session = Session::open(path, runtime::Options { threads, ..runtime::Options::default() })?;
        Ok(OnnxRuntime { model: Sessions::One(Box::new(session)), steps: 0 })
    }

    /// Loads a written model: a file, or the files of an encoder-decoder model if the path is that of its
    /// encoder.
    pub fn open_written(path: &Path, threads: usize) -> Result<OnnxRuntime> {
        match EncoderDecoderSession::open(path, runtime::Options { threads, ..runtime::Options::default() })? {
            Some(model) => Ok(OnnxRuntime { model: Sessions::EncoderDecoder(Box::new(model)), steps: 0 }),
            None => OnnxRuntime::open(path, threads),
        }
    }

    /// The sessions that run the model.
    pub fn sessions_mut(&mut self) -> &mut [Session] {
        match &mut self.model {
            Sessions::One(session) => std::slice::from_mut(session),
            Sessions::EncoderDecoder(model) => model.sessions_mut(),
        }
    }

    fn map(self, mut change: impl FnMut(Session) -> Session) -> OnnxRuntime {
        let model = match self.model {
            Sessions::One(session) => Sessions::One(Box::new(change(*session))),
            Sessions::EncoderDecoder(model) => Sessions::EncoderDecoder(Box::new(model.map(change))),
        };
        OnnxRuntime { model, ..self }
    }

    /// Terminates runs that exceed these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> OnnxRuntime {
        self.map(|session| session.with_limits(limits))
    }

    /// Without other limits, limits the memory of each run on inputs of this size: it may need a few
    /// copies of weights and inputs, or part of the memory that models may take.
    pub fn with_default_limits(mut self, inputs: u64, memory: MemoryLimit) -> OnnxRuntime {
        if self.sessions_mut().iter().any(|session| session.limits().is_some()) {
            return self;
        }
        let bytes = self.sessions_mut().iter().map(Session::bytes).fold(inputs, u64::saturating_add);
        // A run is only stopped between operators, each of which may double the memory.
        let part = memory.bytes.map_or(0, |bytes| if memory.explicit { bytes } else { bytes / 3 });
        let limits = Limits::for_size(Duration::MAX, bytes);
        self.with_limits(Limits { memory: limits.memory.max(part), ..limits })
    }

    /// Terminates runs when this handle is cancelled.
    #[must_use]
    pub fn cancelled_by(self, cancel: &Cancel) -> OnnxRuntime {
        self.map(|session| session.cancelled_by(cancel))
    }

    /// Inputs and outputs of the model, without those of its KV cache.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        match &self.model {
            Sessions::One(session) => session.public_ports(),
            Sessions::EncoderDecoder(model) => model.ports(),
        }
    }

    /// Processes the last `steps` tokens of each text one at a time, if the model has a KV cache.
    #[must_use]
    pub fn with_steps(self, steps: usize) -> OnnxRuntime {
        OnnxRuntime { steps, ..self }
    }

    /// Runs a decoder with a KV cache incrementally and concatenates the outputs of all tokens.
    fn run_incrementally(session: &mut Session, steps: usize, inputs: &Inputs) -> Result<Outputs> {
        let columns = |from: usize, to: usize| {
            let part = |(name, tensor): (&String, &Tensor)| {
                let from = if name == MASK { 0 } else { from };
                Ok((name.clone(), tensor.narrow(1, from, to - from)?.contiguous()?))
            };
            inputs.iter().map(part).collect::<candle_core::Result<Inputs>>().map_err(super::tensor_error)
        };
        let length = inputs.get(TOKENS).and_then(|tokens| tokens.dim(1).ok()).unwrap_or(0);
        let first = length.saturating_sub(steps).max(1).min(length);
        let (mut cache, mut parts) = (DecoderCache::default(), Vec::new());
        for (from, to) in [(0, first)].into_iter().chain((first..length).map(|at| (at, at + 1))) {
            parts.push(session.run_next(&columns(from, to)?, &mut cache)?);
        }
        let names: Vec<String> = parts.first().into_iter().flat_map(Outputs::keys).cloned().collect();
        let concatenated = |name: String| {
            let parts: Vec<&Tensor> = parts.iter().filter_map(|outputs| outputs.get(&name)).collect();
            Ok((name, Tensor::cat(&parts, 1).map_err(super::tensor_error)?))
        };
        names.into_iter().map(concatenated).collect()
    }
}

impl Runner for OnnxRuntime {
    fn runtime(&self) -> Runtime {
        Runtime::OnnxRuntime
    }

    fn run(&mut self, inputs: &Inputs) -> Result<Outputs> {
        match &mut self.model {
            Sessions::EncoderDecoder(model) => model.run(inputs, self.steps),
            Sessions::One(session) if session.has_kv_cache() => OnnxRuntime::run_incrementally(session, self.steps, inputs),
            Sessions::One(session) => session.run(inputs),
        }
    }
}

/// Run time in seconds.
pub(super) fn seconds(runner: &mut dyn Runner, inputs: &Inputs) -> Result<f64> {
    let start = Instant::now();
    runner.run(inputs)?;
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::transfer::{self, Cause};
    use crate::work::Silent;

    /// A model that is larger than memory is read once per group of batches.
    #[test]
    fn announced_batches_run_together() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama");
        let (model, cancel) = (Model::open(folder).unwrap(), Cancel::default());
        let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
        let graph = model.graph().unwrap();
        let batch = |first: i64| {
            let ids = Tensor::new(&[[first, 2, 3, 4]], &Device::Cpu).unwrap();
            let inputs = [(MASK.to_owned(), ids.ones_like().unwrap()), (TOKENS.to_owned(), ids)];
            Batch { inputs: inputs.into(), references: References::None, samples: 1 }
        };
        let batches = [1, 5, 9].map(batch);
        let mut runner = BlockwiseCandle::new(&model, &graph, BlockwiseOptions::on(&Device::Cpu), u64::MAX, &work);
        let values = |outputs: Outputs| outputs.values().map(|tensor| transfer::values::<f32>(tensor, Cause::Answers).unwrap()).collect::<Vec<_>>();
        let separate = batches.each_ref().map(|batch| values(runner.run(&batch.inputs).unwrap()));
        assert_ne!(separate[0], separate[1]);
        runner.prepare(&batches).unwrap();
        for (number, (batch, expected)) in batches.iter().zip(separate).enumerate() {
            assert_eq!(values(runner.run(&batch.inputs).unwrap()), expected);
            let state = runner.prepared.as_ref().map(|(run, next)| (run.batches(), *next));
            assert_eq!(state, Some((batches.len(), number + 1)));
        }
        // The first batch has a group of its own.
        let mut runner = BlockwiseCandle::new(&model, &graph, BlockwiseOptions::on(&Device::Cpu), u64::MAX, &work).trying_first(true);
        assert_eq!(runner.group_size(&batches[0].inputs), Some(1));
        runner.run(&batches[0].inputs).unwrap();
        assert!(runner.group_size(&batches[0].inputs) > Some(1000));
    }
}

//! Models that can be run, whoever runs them.

use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::{Outputs, Runtime};
use crate::error::Result;
use crate::exec::transfer::{self, Cause};
use crate::exec::{Executor, Inputs, Parameters, Residence, Rounding};
use crate::ir::{Graph, Port};
use crate::model::Model;
use crate::runtime::{self, Session};
use crate::work::Work;

/// A model that is ready.
pub trait Runner {
    /// Who runs it.
    fn runtime(&self) -> Runtime;
    /// Answers a batch, floats as f32 in main memory.
    ///
    /// # Errors
    /// An input is missing or does not fit; memory runs out.
    fn run(&mut self, inputs: &Inputs) -> Result<Outputs>;
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
    pub fn load(model: &Model, graph: &'g Graph, device: &Device, work: &Work) -> Result<Candle<'g>> {
        let parameters = Parameters::load(graph, &model.weights, device, DType::F32, Residence::Stored, work)?;
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
        let outputs = self.executor.run(inputs)?;
        let home = |(name, tensor): (String, Tensor)| transfer::to_host(&tensor, Cause::Answers).map(|tensor| (name, tensor)).map_err(super::computed);
        outputs.into_iter().map(home).collect()
    }
}

/// A model file in ONNX Runtime.
#[derive(Debug)]
pub struct OnnxRuntime {
    session: Session,
}

impl OnnxRuntime {
    /// Loads a model file.
    ///
    /// # Errors
    /// There is no ONNX Runtime, or it refuses the file.
    pub fn open(path: &Path, threads: usize) -> Result<OnnxRuntime> {
        Ok(OnnxRuntime { session: Session::open(path, runtime::Options { threads })? })
    }

    /// What the model takes and gives.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        self.session.ports()
    }
}

impl Runner for OnnxRuntime {
    fn runtime(&self) -> Runtime {
        Runtime::OnnxRuntime
    }

    fn run(&mut self, inputs: &Inputs) -> Result<Outputs> {
        self.session.run(inputs)
    }
}

/// How long a run takes.
pub(super) fn seconds(runner: &mut dyn Runner, inputs: &Inputs) -> Result<f64> {
    let start = Instant::now();
    runner.run(inputs)?;
    Ok(start.elapsed().as_secs_f64())
}

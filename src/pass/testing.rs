//! Models and calibration data of unit tests.

#![cfg(test)]

use std::error::Error;

use candle_core::{DType, Device, Tensor};
use tempfile::TempDir;

use super::Context;
use crate::data::{Data, DataSets};
use crate::exec::{Executor, Inputs, Parameters, Residence};
use crate::ir::{Graph, GraphFile};
use crate::model::Model;
use crate::work::{Cancel, MemoryLimit, Silent, Work};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Writes a model with this graph to a temporary folder. `values` returns the values of a parameter, by
/// name and shape.
pub(in crate::pass) fn model(text: &str, mut values: impl FnMut(&str, &[usize]) -> Vec<f32>) -> Result<(TempDir, Model)> {
    let (graph, folder) = (text.parse::<Graph>()?, tempfile::tempdir()?);
    std::fs::write(folder.path().join("config.json"), "{}")?;
    std::fs::write(folder.path().join("graph.json"), serde_json::to_string(&GraphFile::from(&graph))?)?;
    let tensors = graph.params().map(|(_, value)| {
        let shape: Vec<usize> = value.ty.shape.iter().filter_map(|dim| dim.fixed()).collect();
        Ok((value.name.clone(), Tensor::from_vec(values(&value.name, &shape), shape, &Device::Cpu)?))
    });
    candle_core::safetensors::save(&tensors.collect::<candle_core::Result<_>>()?, folder.path().join("model.safetensors"))?;
    let model = Model::open(folder.path())?;
    Ok((folder, model))
}

/// Numbers between -0.9 and 1.1 that do not repeat within a row.
pub(in crate::pass) fn numbers(shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product()).map(|at: usize| (at * 37 % 23) as f32 / 11.0 - 0.9).collect()
}

/// Calls a function with a context that has these calibration samples.
pub(in crate::pass) fn calibrated<T>(inputs: &Inputs, function: impl FnOnce(&Context) -> T) -> Result<T> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("samples.safetensors");
    candle_core::safetensors::save(&inputs.clone().into_iter().collect(), &path)?;
    let data = DataSets { calibration: Some(Data { arrays: Some(path), ..Data::default() }), ..DataSets::default() };
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let (device, memory) = (Device::Cpu, MemoryLimit::default());
    Ok(function(&Context { work, seed: 0, data: &data, device, memory, memory_tracker: None, checkpoints: None }))
}

/// The selected values of a model, and its outputs.
pub(in crate::pass) fn values(graph: &Graph, model: &Model, inputs: &Inputs, is_selected: impl Fn(&str) -> bool) -> Result<Inputs> {
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let executor = Executor::new(graph, Parameters::load(graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work)?, Device::Cpu);
    let mut found = executor.run(inputs)?;
    let mut observe = |name: &str, value: &Tensor| {
        found.insert(name.to_owned(), value.clone());
        Ok(())
    };
    executor.run_observed(&executor.observation(is_selected), inputs, &mut observe)?;
    Ok(found)
}

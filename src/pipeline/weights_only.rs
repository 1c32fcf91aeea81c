//! Stand-in for `running` in builds without the feature `run`: models cannot be executed.
#![allow(clippy::unnecessary_wraps, clippy::unused_self)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::Pipeline;
use super::measured::Measured;
use super::plan::ModelMemory;
use super::time::{StageWork, WRITING};
use crate::error::{Error, Result};
use crate::export::Exported;
use crate::files::Destination;
use crate::model::Model;
use crate::pass::Samples;
use crate::recipe::Recipe;
use crate::report::{Environment, Peak, Report};
use crate::run_state::RunState;
use crate::store::{ByteSize, ContentKey};
use crate::work::Work;

/// Whether the weights of a model match its configuration, as far as this build reads it.
pub(super) fn matches_config(_: &Model) -> bool {
    true
}

/// Describes layers that the configuration does not contain, which needs the graph of the model.
pub(super) fn unused_layers(_: &Model) -> Option<String> {
    None
}

/// Whether this build opens ONNX files.
pub(super) const OPENS_ONNX: bool = false;

/// Settings that a build without model execution accepts: passes over weights need neither data nor a
/// device.
#[derive(Debug, Clone, Default)]
pub(super) struct Running {
    /// Whether a recipe requests an evaluation, which this build does not support.
    evaluates: bool,
    /// Unused; written back to recipes.
    memory: Option<ByteSize>,
}

impl Running {
    pub fn apply_recipe(&mut self, recipe: &Recipe) {
        (self.evaluates, self.memory) = (recipe.evaluate.is_some(), recipe.memory);
    }

    pub fn fill_recipe(&self, recipe: &mut Recipe) {
        recipe.memory = self.memory;
    }

    pub fn check(&self, mut runs: impl Iterator<Item = (&'static str, Samples)>) -> Result<()> {
        if let Some((name, _)) = runs.find(|(_, samples)| *samples != Samples::None) {
            return Err(Error::option(name, "this build cannot run models: build it with the feature `run`"));
        }
        if self.evaluates {
            return Err(Error::option("evaluate", "this build cannot run models: build it with the feature `run`"));
        }
        Ok(())
    }

    pub fn configured_sets(&self) -> Vec<Samples> {
        Vec::new()
    }

    pub fn default_data(&mut self, _calibrates: bool, _with_labels: bool) {}

    pub fn reset_data(&mut self) {}

    pub fn add_data(&self, _key: &mut ContentKey, _work: &Work) -> Result<()> {
        Ok(())
    }

    pub fn data_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }
}

impl Pipeline {
    /// Whether this process writes the output: always, since no pass of this build trains.
    ///
    /// # Errors
    /// Never fails.
    pub fn is_leader(&self) -> Result<bool> {
        Ok(true)
    }

    pub(super) fn count_samples(&self, _model: &Model) -> Result<(BTreeMap<&'static str, usize>, Vec<String>)> {
        Ok((BTreeMap::new(), Vec::new()))
    }

    pub(super) fn planned_work(&self, _model: &Model, _run: &RunState, [read, written]: [u64; 2]) -> Result<Vec<StageWork>> {
        let writing = StageWork { name: WRITING.into(), macs: Some(0), read_bytes: read + written, written_bytes: written, ..StageWork::default() };
        Ok(vec![writing.timed(self.rates.as_deref())])
    }

    pub(super) fn planned_vram(&self) -> Result<Option<u64>> {
        Ok(Some(0))
    }

    pub(super) fn planned_model_memory(&self, _model: &Model) -> Result<Option<ModelMemory>> {
        Ok(None)
    }

    pub(super) fn watch_memory(&self) -> Result<Peak> {
        Ok(Peak::start())
    }

    pub(super) fn environment(&self, _measured: bool) -> Result<Environment> {
        Ok(Environment::detect())
    }

    pub(super) fn open_samples(&mut self, _model: &Model) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    pub(super) fn apply_passes(&self, _model: &Model, _work_dir: Option<&Path>, _peak: &mut Peak) -> Result<Option<(Model, RunState)>> {
        Ok(None)
    }

    pub(super) fn measure(
        &self,
        _models: [&Model; 2],
        _destination: &Destination,
        _file: Option<&str>,
        _exports: &mut [(&'static str, Exported)],
        _start: Instant,
    ) -> Result<Measured> {
        Ok(Measured::default())
    }
}

/// Path, result and finding of a check of the ONNX file of an output, which could not be made.
pub(super) fn check_onnx(_output: &Path, _folder: &Path, report: &Report, _work: &Work) -> Result<Option<(String, Option<bool>, String)>> {
    let file = report.outputs.iter().find(|file| file.path.ends_with(".onnx"));
    Ok(file.map(|file| (format!("{}, run", file.path), None, "not run: this build cannot run models".into())))
}

/// Does nothing: passes over weights do not change the graph.
pub(super) fn write_graph(_after: &Model, _folder: &Path) -> Result<Option<String>> {
    Ok(None)
}

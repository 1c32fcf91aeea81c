//! Settings and resources for running models.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use candle_core::Device;

use super::cached_results::ResultCache;
use super::draft::DraftTest;
use super::memory::memory_limit;
use crate::data::{Data, DataSets, OpenSets};
use crate::error::{Error, Result};
use crate::evaluation::Evaluate;
use crate::exec::DeviceChoice;
use crate::pass::{Pass, Samples};
use crate::recipe::Recipe;
use crate::store::{ByteSize, ContentKey};
use crate::train::communicator::RankConfig;
use crate::work::{MemoryLimit, Work};

/// Number of training samples that are used for calibration if no calibration data is configured.
const CALIBRATION_FALLBACK: usize = 128;

/// Settings and resources for running models.
#[derive(Clone, Default)]
pub struct Running {
    pub data: DataSets,
    pub evaluate: Option<Evaluate>,
    pub device: DeviceChoice,
    /// Requested memory limit of running models.
    pub memory: Option<ByteSize>,
    /// The device, once it has been opened; clones of the pipeline share it.
    pub opened: Arc<OnceLock<Device>>,
    /// The cache of pass results, and whether cached results are used even when not resuming.
    pub cache: Option<(ResultCache, bool)>,
    /// Whether a memory trace is written.
    pub memory_trace: bool,
    /// Whether this process only takes part in passes that several processes run together.
    pub follows: bool,
    /// How the output is measured as a draft of the input.
    pub draft_test: Option<Arc<DraftTest>>,
}

impl Running {
    /// Applies the settings of a recipe.
    pub fn apply_recipe(&mut self, recipe: &Recipe) {
        self.data = recipe.data.clone();
        self.evaluate.clone_from(&recipe.evaluate);
        // The limit from the command line takes precedence.
        self.memory = self.memory.or(recipe.memory);
    }

    /// Writes the settings to a recipe, with absolute paths.
    pub fn fill_recipe(&self, recipe: &mut Recipe) {
        recipe.data = self.data.absolute();
        recipe.evaluate.clone_from(&self.evaluate);
        recipe.memory = self.memory;
    }

    /// Checks that the data needed by the evaluation and by passes that run the model is configured.
    pub fn check(&self, runs: impl Iterator<Item = (&'static str, Samples)>) -> Result<()> {
        match (&self.evaluate, &self.data.evaluation) {
            (Some(_), None) => return Err(Error::option("evaluate", "needs samples: add `data: { evaluation: ... }`")),
            (_, Some(data)) => data.check()?,
            (None, None) => {}
        }
        for (key, set) in [("evaluation", &self.data.evaluation), ("calibration", &self.data.calibration)] {
            set.as_ref().map_or(Ok(()), |set| set.require_unpacked(format!("data: {key}")))?;
        }
        for (name, samples) in runs {
            if let Some((key, None)) = self.data_set(samples) {
                return Err(Error::option(
                    name,
                    format!("needs samples to run the model on: add `data: {{ {key}: ... }}`, or `--{key} FILE` on the command line"),
                ));
            }
        }
        Ok(())
    }

    /// The data sets that are configured.
    pub fn configured_sets(&self) -> Vec<Samples> {
        [Samples::Calibration, Samples::Train].into_iter().filter(|samples| matches!(self.data_set(*samples), Some((_, Some(_))))).collect()
    }

    /// The data sets that a pass reads, by name. The evaluation data is included: training selects the
    /// best checkpoint by it, and passes with an accuracy goal are measured on it.
    pub fn read_by(&self, pass: &dyn Pass) -> Vec<(&'static str, &Data)> {
        let DataSets { calibration, train, evaluation, opened: _ } = &self.data;
        let first = match pass.runs_on() {
            None | Some(Samples::None) => return Vec::new(),
            Some(Samples::Calibration) => ("calibration", calibration),
            Some(Samples::Train) => ("train", train),
        };
        [first, ("evaluation", evaluation)].into_iter().filter_map(|(name, set)| Some((name, set.as_ref()?))).collect()
    }

    /// Completes the data options: if a pass calibrates and no calibration data is configured, a part of
    /// the training data is used. Labels of calibration data are ignored, unless a pass reads them
    /// (`with_labels`).
    pub fn default_data(&mut self, calibrates: bool, with_labels: bool) {
        self.data.ignore_labels(with_labels);
        if calibrates && self.data.calibration.is_none() {
            let limited =
                |data: &Data| Data { samples: Some(data.samples.map_or(CALIBRATION_FALLBACK, |samples| samples.min(CALIBRATION_FALLBACK))), ..data.unpacked() };
            self.data.calibration = self.data.train.as_ref().map(limited);
        }
    }

    /// Closes the data sets of an earlier run, whose files may have changed.
    pub fn reset_data(&mut self) {
        self.data.opened = OpenSets::default();
    }

    /// The device that models run on. It is opened at the first call; processes on the same machine each
    /// open the device of their local rank. Errors in the rank variables are ignored here: distributed
    /// training reports them.
    pub fn device(&self) -> Result<Device> {
        if let Some(device) = self.opened.get() {
            return Ok(device.clone());
        }
        let rank = RankConfig::from_environment().ok().flatten();
        let device = self.device.open_for(rank.map_or(0, |rank| rank.local_rank))?;
        Ok(self.opened.get_or_init(|| device).clone())
    }

    /// The memory limit of running models.
    pub fn memory(&self) -> Result<MemoryLimit> {
        Ok(memory_limit(self.memory, &self.device()?))
    }

    /// All data sets, including unused ones.
    pub fn sets(&self) -> impl Iterator<Item = &Data> {
        [&self.data.calibration, &self.data.train, &self.data.evaluation].into_iter().flatten()
    }

    /// Files and folders of all data sets.
    pub fn data_paths(&self) -> Vec<PathBuf> {
        self.sets().flat_map(Data::paths).cloned().collect()
    }

    /// Adds the options and the contents of all data sets to a key.
    pub fn add_data(&self, key: &mut ContentKey, work: &Work) -> Result<()> {
        self.sets().try_for_each(|data| data.content(work).map(|content| key.line(&content)))
    }

    /// Whether evaluation data is configured.
    pub fn evaluates(&self) -> bool {
        self.data.evaluation.is_some()
    }

    /// The recipe key of a data set, and its options if it is configured.
    pub fn data_set(&self, samples: Samples) -> Option<(&'static str, Option<&Data>)> {
        match samples {
            Samples::Calibration => Some(("calibration", self.data.calibration.as_ref())),
            Samples::Train => Some(("train", self.data.train.as_ref())),
            Samples::None => None,
        }
    }
}

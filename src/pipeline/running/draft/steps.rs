//! The number of training steps that a time allows.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, Result, counted};
use crate::model::Model;
use crate::pass::{Context, Distill, Pass, Training};
use crate::report::format;
use crate::run_state::RunState;
use crate::work::{Event, Work};

/// File in the work folder with the time and the options of the training, and the number of steps for them.
const FILE: &str = "steps.json";
/// Number of steps of a short training. The first one is not counted, because it allocates memory.
const MEASURED: u64 = 4;

/// The training of a draft that should take a certain time.
pub struct Steps<'a> {
    /// The model.
    pub model: &'a Model,
    /// The training.
    pub distill: &'a Distill,
    /// Number of samples per step.
    pub batch: usize,
    /// Duration of the training.
    pub time: Duration,
    /// The work folder.
    pub folder: &'a Path,
}

impl Steps<'_> {
    /// The number of steps that take about this time, or that of an interrupted run with the same time.
    ///
    /// # Errors
    /// The training fails.
    pub fn count(&self, context: &Context, work: &Work) -> Result<u64> {
        let path = self.folder.join(FILE);
        // A training continues on another device with the same steps, so that the device is not part of the
        // key.
        let key = serde_json::json!([self.time.as_secs_f64(), self.distill.options()]).to_string();
        let stored = fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str::<(String, u64)>(&text).ok());
        if let Some((_, steps)) = stored.filter(|(found, _)| *found == key) {
            return Ok(steps);
        }
        let step = self.measure(context)?;
        let steps = ((self.time.as_secs_f64() / step) as u64).max(1);
        let text = serde_json::json!([key, steps]).to_string();
        fs::write(&path, text).map_err(Error::io("write", &path))?;
        let message =
            format!("a training step takes {}: {} in {}", format::seconds(step), counted(steps as usize, "step"), format::seconds(self.time.as_secs_f64()));
        work.progress.on(Event::Message(&message));
        Ok(steps)
    }

    /// The mean time of a step in seconds.
    fn measure(&self, context: &Context) -> Result<f64> {
        let training = Training { max_steps: Some(MEASURED), ..self.distill.training.clone() };
        let distill = Distill { training, ..self.distill.clone() };
        let state = RunState { input: Some(self.model.path.clone()), seed: context.seed, ..RunState::default() };
        let (_, applied) = distill.plan(self.model, &state)?.execute(context)?;
        let curve = applied.details.pointer("/training/curve").and_then(Value::as_array).into_iter().flatten();
        let speeds = curve.skip(1).filter_map(|step| step.get("samples_per_second")?.as_f64()).filter(|speed| *speed > 0.0);
        let times: Vec<f64> = speeds.map(|speed| self.batch as f64 / speed).collect();
        if times.is_empty() {
            return Err(Error::run("--time", "no training step could be timed", "specify the number of steps with --steps"));
        }
        Ok(times.iter().sum::<f64>() / times.len() as f64)
    }
}

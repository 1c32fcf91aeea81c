//! The counted work of a run, and its estimated and actual times.

use super::Pipeline;
use super::time::{StageWork, sum_of};
use crate::error::Result;
use crate::model::Model;
use crate::report::{StageTime, Timing};
use crate::run_state::RunState;

impl Pipeline {
    /// The counted work of a run whose pipeline is resolved.
    pub(super) fn work_of(&self, input: &Model, after: &Model, run: &RunState) -> Result<Vec<StageWork>> {
        let bytes = self.export.iter().map(|export| Ok(export.format().forecast(after, run)?.bytes)).sum::<Result<u64>>()?;
        self.planned_work(after.for_samples(input), run, [input.stored_bytes(), bytes])
    }

    /// Estimated and actual times of a run, if the rates of the machine are known.
    pub(super) fn timing(&self, estimated: &[StageWork], state: &RunState, [writing, measuring]: [f64; 2]) -> Option<Timing> {
        self.rates.as_ref()?;
        // The stages are those of `planned_work`. A pass that continues an earlier run may do less work.
        let run_model = self.steps.iter().zip(&state.history).filter(|(step, _)| step.pass().runs_on().is_some());
        let seconds = run_model.map(|(_, applied)| applied.seconds.filter(|_| !self.resume)).chain([Some(writing), Some(measuring)]);
        let stage = |(stage, seconds): (&StageWork, Option<f64>)| StageTime {
            name: stage.name.clone(),
            estimated_seconds: stage.estimated_seconds,
            at_most: stage.at_most,
            seconds,
        };
        Some(Timing { estimated_seconds: sum_of(estimated), stages: estimated.iter().zip(seconds).map(stage).collect() })
    }
}

//! The counted work of a run, and its estimated and actual times.

use super::Pipeline;
use super::time::{MEASURING, StageWork, WRITING, sum_of};
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
        let mut passes = state.history.iter();
        let stage = |stage: &StageWork| {
            let seconds = match stage.name.as_str() {
                WRITING => Some(writing),
                MEASURING => Some(measuring),
                name => passes.find(|applied| applied.name == name).and_then(|applied| applied.seconds),
            };
            StageTime { name: stage.name.clone(), estimated_seconds: stage.estimated_seconds, at_most: stage.at_most, seconds }
        };
        Some(Timing { estimated_seconds: sum_of(estimated), stages: estimated.iter().map(stage).collect() })
    }
}

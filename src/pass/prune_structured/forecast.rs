//! Counted runs of the model.

use super::repair::sweeps;
use super::selection::ATTEMPTS;
use super::sensitivity::layer_inputs;
use super::{Importance, PruneStructured, PrunedPart, Repair, Target, latency};
use crate::error::Result;
use crate::model::Model;
use crate::pass::calibrate;
use crate::run_state::ModelRun;

impl PruneStructured {
    /// The runs for the importance of layers, experts and units, for the latencies of smaller models, and for
    /// the repair; `None` if there are none.
    pub(super) fn model_runs(&self, model: &Model) -> Result<Option<Vec<ModelRun>>> {
        let graph = model.graph()?;
        let at_most = |run: ModelRun| ModelRun { at_most: true, ..run };
        // Each of these parts is ranked in a run of its own, and removed before units are ranked.
        let mut runs: Vec<ModelRun> = PrunedPart::WHOLE.into_iter().filter(|part| self.selects(*part)).map(|_| calibrate::whole_run(&graph)).collect();
        let is_smaller = !runs.is_empty();
        if self.selects_units() {
            let inputs = layer_inputs(&graph);
            runs.extend(match self.importance {
                Importance::Auto | Importance::L1 | Importance::L2 => None,
                Importance::Activation => Some(calibrate::run_to(&graph, |name| inputs.contains(name))),
                Importance::Taylor => Some(calibrate::whole_run(&graph).times(3)),
            });
            runs.extend(matches!(self.target, Some(Target::Latency(_))).then(|| latency::runs(&graph, ATTEMPTS)));
            // The original and the smaller model run in parallel.
            runs.extend((self.repair != Repair::None).then(|| at_most(calibrate::whole_run(&graph).times(2 * sweeps(graph.nodes().iter())))));
        }
        let runs: Vec<ModelRun> = runs.into_iter().map(|run| if is_smaller { at_most(run) } else { run }).collect();
        Ok((!runs.is_empty()).then_some(runs))
    }
}

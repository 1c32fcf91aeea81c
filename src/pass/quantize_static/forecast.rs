//! Counted runs of the model.

use super::prepare::Prepared;
use super::{QuantizeStatic, sites};
use crate::calibration::ActivationObserver;
use crate::error::Result;
use crate::pass::calibrate;
use crate::run_state::ModelRun;

impl QuantizeStatic {
    /// The runs of the prepared model.
    pub(super) fn model_runs(&self, prepared: &Prepared) -> Result<Option<Vec<ModelRun>>> {
        // Factors that are inserted do not multiply matrices.
        let requests = sites::Sites::new(&prepared.graph, &prepared.layers).requests(&prepared.graph);
        let observed = calibrate::run_to(&prepared.graph, |name| requests.contains_key(name));
        // Large images are observed again after rescaling.
        let is_repeated = self.observer == ActivationObserver::Mse && prepared.has_images();
        let mut runs = vec![if is_repeated { ModelRun { at_most: true, ..observed.times(2) } } else { observed }];
        if let Some(goal) = &self.accuracy_goal {
            let whole = calibrate::whole_run(&prepared.graph);
            // The original model and each layer are compared once, and the tried models.
            let tried = 2 + prepared.layers.len() + goal.max_trials;
            runs.push(ModelRun { at_most: true, ..whole.times(tried as u64) });
        }
        Ok(Some(runs))
    }
}

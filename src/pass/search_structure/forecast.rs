//! Counted runs of the model.

use super::SearchStructure;
use super::samples::MAX_HELD_OUT;
use super::structure::Structure;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::calibrate;
use crate::pass::prune_structured::Repair;
use crate::run_state::ModelRun;

impl SearchStructure {
    /// The runs for the scores of all options, and for the repair of the choices, at most; `None` if nothing
    /// is removed, or if options are trained, whose work depends on the numbers of batches.
    pub(super) fn model_runs(&self, model: &Model, graph: &Graph) -> Result<Option<Vec<ModelRun>>> {
        let uniform = self.is_uniform(model);
        let structure = Structure::new(self, model, graph, uniform)?;
        if self.steps > 0 || structure.cost(model) <= structure.limit_cost() {
            return Ok(None);
        }
        let whole = || ModelRun { at_most: true, ..calibrate::whole_run(graph) };
        let layers = structure.found.layers.len();
        let options = structure.options.iter().map(|options| options.len() - 1).sum::<usize>() + if uniform && layers > 1 { layers } else { 0 };
        let choices = if self.baselines { 3 } else { 1 };
        // Outputs of the original model are computed again if they are too large to be cached.
        let compared = (2 * MAX_HELD_OUT * (options + choices)) as u64;
        let repaired = if self.repair == Repair::None { 0 } else { 2 * choices as u64 };
        // One run fits all options, and one finds the influence of layers.
        let runs = 1 + u64::from(self.baselines) + repaired;
        Ok(Some(vec![whole().times(runs), ModelRun { batches: Some((compared, 1)), ..whole() }]))
    }
}

//! Counted runs of models in layerwise passes.

use std::collections::BTreeSet;

use super::{guide, unsupported};
use crate::error::Result;
use crate::model::Model;
use crate::pass::calibrate;
use crate::pass::quantize::{Guide, Method as By, Quantize};
use crate::run_state::ModelRun;

/// Runs of as many models up to the inputs of the layers with these weights.
pub(in crate::pass) fn runs_to_layers(weights: &BTreeSet<String>, models: u64, model: &Model) -> Result<Option<Vec<ModelRun>>> {
    Ok(Some(vec![calibrate::run_to_inputs(&model.graph()?, weights).times(models)]))
}

/// As [`runs_to_layers`], without layers that layerwise passes do not support.
pub(in crate::pass) fn runs_to_supported(weights: &BTreeSet<String>, models: u64, model: &Model) -> Result<Option<Vec<ModelRun>>> {
    let unsupported: BTreeSet<&str> = unsupported(model, &weights.iter().map(String::as_str).collect())?.into_values().flatten().collect();
    runs_to_layers(&weights.iter().filter(|name| !unsupported.contains(name.as_str())).cloned().collect(), models, model)
}

/// The runs of the model for a pass that changes these weights; `None` if the pass has other runs too.
pub(in crate::pass) fn model_runs(pass: &Quantize, weights: &BTreeSet<String>, model: &Model) -> Result<Option<Vec<ModelRun>>> {
    if pass.kv_cache.is_some() || pass.correct.is_some() {
        return Ok(None);
    }
    let graph = model.graph()?;
    let inputs = || calibrate::run_to_inputs(&graph, weights);
    let scales = u64::from(pass.stores_scales());
    let solver = match pass.method {
        By::Rtn | By::Best => 0,
        // Channels are rescaled in a run of their own.
        By::Awq | By::Smoothquant => 2,
        // The original model runs in parallel if errors of earlier layers are propagated.
        By::Gptq => 1 + u64::from(pass.propagation != Some(0.0)),
        By::Autoround => 2,
    };
    let mut runs = vec![inputs().times(scales + solver)];
    if pass.guide == Guide::Loss {
        runs.push(calibrate::whole_run(&graph).times(3 * guide::passes(&graph, weights)?));
    }
    if pass.method == By::Autoround {
        let steps = (pass.iterations() * pass.batch()) as u64;
        runs.push(ModelRun { batches: Some((steps, 1)), at_most: true, ..inputs().times(3) });
    }
    Ok(Some(runs))
}

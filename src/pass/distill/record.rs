//! Notes and figures of a training for the report.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::adapters::Adapters;
use crate::error::counted;
use crate::exec::{MemoryTrace, MemoryTracker};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::Checkpoints;
use crate::train::losses::Losses;
use crate::train::{BatchNorm, LogFormat, MemoryForecast, QuantizerScales, Quantizers, Trained, Training, literals, operands, selected};

/// Numbers of weights that are treated in a special way, known before the first step.
pub(super) struct Counts {
    /// Elements that are kept at zero.
    pub zeros: u64,
    /// Tensors with such elements.
    pub masked: usize,
    /// Weights that are trained with fake quantization.
    pub rounded: usize,
    /// Tensors with zeros of unknown origin, which are trained.
    pub unexplained: usize,
    /// Tensors with zeros of unknown origin, which merged adapters replace.
    pub filled: usize,
    /// Layers whose inputs are quantized dynamically.
    pub dynamic: usize,
    /// Layers whose inputs have calibrated scales of low-bit floats.
    pub calibrated: usize,
}

impl Counts {
    /// Notes on the trained weights. `quantizers` are those whose scales have changed.
    pub fn notes(&self, name: &str, training: &Training, adapters: Option<&Adapters>, quantizers: Option<&Quantizers>) -> Vec<String> {
        let mut notes: Vec<String> = adapters.map(|adapters| adapters.note(name)).into_iter().collect();
        if self.masked > 0 {
            notes.push(format!("{} of {} were kept at zero", counted(self.zeros as usize, "zero weight"), counted(self.masked, "tensor")));
        }
        if self.filled > 0 {
            notes.push(format!(
                "zeros of unknown origin in {} were replaced by the merged adapters, because neither a pass, a report nor config.json states that they were pruned; with `merge: false` in `adapter`, the base keeps them",
                counted(self.filled, "tensor")
            ));
        }
        if self.unexplained > 0 {
            notes.push(format!(
                "zeros of unknown origin in {} were trained like other weights, because neither a pass, a report nor config.json states that they were pruned; \
                 `keep_zeros: true` keeps them zero",
                counted(self.unexplained, "tensor")
            ));
        }
        if self.rounded > 0 {
            notes.push(match training.scales {
                QuantizerScales::Only => format!("the codes of {} did not change", counted(self.rounded, "quantized weight")),
                _ => format!("trained with fake quantization to the codes that are written: {}", counted(self.rounded, "weight")),
            });
        }
        if self.dynamic > 0 {
            notes.push(format!("the inputs of {} were quantized in training as at run time", counted(self.dynamic, "layer")));
        }
        if let Some(quantizers) = quantizers {
            notes.push(format!("the scales of {} and of {} were trained", counted(self.rounded, "weight"), counted(quantizers.count(), "activation")));
            if self.calibrated > 0 {
                notes.push(format!(
                    "the calibrated scales of the low-bit float inputs of {} were not trained, because `scales` trains only those of integers",
                    counted(self.calibrated, "layer")
                ));
            }
        }
        notes
    }
}

/// Notes on options without an effect on the training of this graph by this number of processes.
pub(super) fn unused_options(training: &Training, graph: &Graph, processes: usize) -> Vec<String> {
    let has_norms = graph.nodes().iter().any(|node| matches!(node.op, Op::BatchNorm(_)));
    let options = [
        (training.batch_norm == BatchNorm::Fixed && !has_norms, "`batch_norm: fixed` has no effect, because the model has no batch normalization"),
        (
            training.shards_optimizer() && processes == 1,
            "`shard` has no effect, because the training has one process: start several, for example with `torchrun`",
        ),
    ];
    options.into_iter().filter(|(is_unused, _)| *is_unused).map(|(_, note)| note.to_owned()).collect()
}

/// Notes on the parameters of an ONNX file that may be numbers in the code of its model instead of weights.
pub(super) fn possible_literals((graph, model): (&Graph, &Model), training: &Training) -> Vec<String> {
    if model.onnx.is_none() || training.adapter.is_some() {
        return Vec::new();
    }
    let selected = selected((graph, model), &training.targets, &training.ignore);
    let listed = |names: &BTreeSet<&str>| format!("{} (the first: `{}`)", counted(names.len(), "tensor"), names.first().unwrap_or(&""));
    let (mut fixed, mut operands) = (literals(graph, model), operands(graph));
    operands.retain(|name| selected(name) && !fixed.contains(name));
    fixed.retain(|name| !selected(name));
    let mut notes = Vec::new();
    if !fixed.is_empty() && training.targets.is_empty() {
        let reason = "not trained, because they are numbers of the graph, such as the epsilon of a norm";
        notes.push(format!("{reason}: {}; `targets` can select them", listed(&fixed)));
    }
    if !operands.is_empty() {
        let reason = "trained, although no layer reads them as its weight or bias";
        notes.push(format!("{reason}: {}; if they are constants of the model, name them in `ignore`", listed(&operands)));
    }
    notes
}

/// A note on the auxiliary loss that balances the load of experts, if transformers adds it to the loss of a
/// model with this configuration.
pub(super) fn router_loss(config: &Map<String, Value>) -> Option<String> {
    // Models of texts and images have the keys of the language model in `text_config`.
    let text = config.get("text_config").and_then(Value::as_object);
    let config = [Some(config), text].into_iter().flatten().find(|config| config.get("output_router_logits") == Some(&Value::Bool(true)))?;
    let coefficient = config.get("router_aux_loss_coef");
    if coefficient.and_then(Value::as_f64) == Some(0.0) {
        return None;
    }
    let value = coefficient.map_or_else(String::new, |value| format!(" of {value}"));
    Some(format!(
        "`output_router_logits: true` of config.json has no effect: the auxiliary loss of the router, \
         with `router_aux_loss_coef`{value}, is not part of the training"
    ))
}

/// The tables and logs of the steps, by file name in the report. `earlier` is the number of passes of the run
/// with the same name.
pub(super) fn logs(name: &str, earlier: usize, training: &Training, checkpoints: Option<&Checkpoints>) -> BTreeMap<String, Arc<Vec<u8>>> {
    let stem = if earlier == 0 { name.to_owned() } else { format!("{name}-{}", earlier + 1) };
    let read = |format: LogFormat| {
        let content = std::fs::read(checkpoints?.folder.join(format.file())).ok()?;
        Some((format!("{stem}.{}", format.extension()), Arc::new(content)))
    };
    LogFormat::with_table(&training.logs).into_iter().filter_map(read).collect()
}

/// Figures of the training, and of its memory.
pub(super) fn details(
    trained: &Trained,
    losses: &Losses,
    counts: &Counts,
    (memory, trace): (&MemoryTracker, &MemoryTrace),
    forecast: &MemoryForecast,
) -> Value {
    let per_step = |count: u64| count as f64 / trained.steps_of_this_run.max(1) as f64;
    let copies: Vec<Value> =
        trained.copies.iter().map(|((direction, cause), count)| json!({ "direction": direction, "cause": cause, "per_step": per_step(*count) })).collect();
    let (peaks, peak) = memory.peaks();
    let phases: Vec<Value> =
        peaks.iter().map(|(category, bytes)| json!({ "name": category.name(), "predicted_bytes": forecast.of(*category), "measured_bytes": bytes })).collect();
    json!({
        "training": { "steps": trained.steps, "skipped_steps": trained.skipped_steps, "zeros_kept": counts.zeros, "losses": losses, "curve": trained.curve, "evaluations": trained.evaluations, "copies": copies },
        "memory": { "peak_bytes": peak, "predicted_bytes": forecast.total(), "phases": phases, "timeline": trained.timeline.points, "peak_step": trace.timeline() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auxiliary_losses_of_routers_are_noted() {
        let note = |config: Value| router_loss(config.as_object().unwrap());
        let set = json!({ "output_router_logits": true, "router_aux_loss_coef": 0.5 });
        assert!(note(set.clone()).unwrap().contains("`router_aux_loss_coef` of 0.5, is not part of the training"));
        assert!(note(json!({ "text_config": set })).is_some() && note(json!({ "output_router_logits": true })).is_some());
        for unset in [
            json!({}),
            json!({ "output_router_logits": false, "router_aux_loss_coef": 0.5 }),
            json!({ "output_router_logits": true, "router_aux_loss_coef": 0.0 }),
        ] {
            assert_eq!(note(unset), None);
        }
    }
}

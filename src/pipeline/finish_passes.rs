//! The end of the passes: reconciles tied weights, and checks what the formats keep of the passes' results.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use super::Pipeline;
use super::running::unused_layers;
use crate::error::{Error, Result, counted};
use crate::export::{Export, LostResult};
use crate::model::{Model, stacked_experts};
use crate::report::WARNING;
use crate::run_state::{Applied, RunState};
use crate::store::{Encoding, OpenSizes, Weight};

impl Pipeline {
    /// Adds the record of a pass to a run, and a warning if the pass changes weights that an earlier one has
    /// quantized to blocks of a GGUF file.
    pub(super) fn add_record(run: &mut RunState, mut applied: Applied, (before, after): (&Model, &Model)) {
        applied.compare(&before.weights, &after.weights);
        let (before, after) = (&before.weights.by_name, &after.weights.by_name);
        let source = |weight: &Weight| Arc::as_ptr(&weight.source()).cast::<()>();
        let unrounded = |weight: &Weight| weight.exact_blocks().and_then(|_| weight.source().unrounded().map(source));
        let sources: BTreeSet<*const ()> = before.values().map(source).collect();
        // Blocks with the same values before rounding have the same codes, and trained scales. A pass may
        // rename layers.
        let blocks: BTreeSet<*const ()> = before.values().filter_map(unrounded).collect();
        let is_changed = |(name, weight): &(&String, &Weight)| {
            let keeps_codes = unrounded(weight).is_some_and(|values| blocks.contains(&values)) || sources.contains(&source(weight));
            before.get(*name).and_then(unrounded).is_some() && !keeps_codes
        };
        let count = after.iter().filter(is_changed).count();
        if count > 0 {
            run.notes.push(format!(
                "{WARNING}{}: {} that `quantize` has stored in blocks of a GGUF file are changed, so that a file rounds them again: make `quantize` the last pass, or train only their scales (`scales: only`)",
                applied.name,
                counted(count, "weight")
            ));
        }
        run.add(applied);
    }

    /// Finishes the passes: updates the norms of adapters, reconciles tied weights, and adds notes about
    /// resolved defaults, about weights that no pass changed, about results that a format does not keep, and
    /// about the sizes that the user has specified.
    ///
    /// # Errors
    /// No format keeps the result of the last pass, or a format does not store all layers of the checkpoint.
    pub(super) fn finish_passes(&self, after: &mut Model, before: &Model, run: &mut RunState) -> Result<()> {
        after.update_norms();
        run.notes.extend(self.notes.iter().cloned());
        run.notes.extend(after.settle_ties(before)?);
        run.notes.extend(fixed_sizes(after, &self.sizes));
        run.notes.extend(unchanged_experts(after, run));
        run.notes.extend(self.layers_outside_of_config(before)?);
        run.notes.extend(self.lost_results(after, run)?);
        run.notes.extend(self.copy_note(before));
        run.notes.extend(adapter_note(before));
        Ok(())
    }

    /// A warning about a recipe that changes neither the weights nor their format, which is probably
    /// incomplete.
    fn copy_note(&self, model: &Model) -> Option<String> {
        let is_plain = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
        let is_copied = model.weight_files.iter().all(is_plain) && model.weights.by_name.values().all(|weight| weight.encoding == Encoding::Dense);
        let is_default = self.exports(model).iter().all(|export| *export == Export::default());
        let is_copy = self.has_recipe && self.steps.is_empty() && is_copied && is_default;
        is_copy.then(|| format!("{WARNING}`passes` is empty: the weights are only copied"))
    }

    /// A warning about layers that `config.json` does not contain.
    ///
    /// # Errors
    /// A format does not store these layers, so that correcting `config.json` later would not add them.
    fn layers_outside_of_config(&self, model: &Model) -> Result<Option<String>> {
        const NEXT: &str = "correct config.json if they belong to the model, otherwise remove their tensors";
        let Some(layers) = unused_layers(model) else { return Ok(None) };
        let exports = self.exports(model);
        match exports.iter().map(|export| export.format().name()).find(|format| *format != "safetensors") {
            Some(format) => Err(Error::run(format, format!("{layers}, which the file would not contain"), NEXT)),
            None => Ok(Some(format!(
                "{WARNING}{layers}: runtimes ignore these layers, the measured figures do not include them, and safetensors still store them; {NEXT}"
            ))),
        }
    }

    /// Warnings about results of passes that a format does not keep.
    ///
    /// # Errors
    /// The only format does not keep the result of the last pass.
    fn lost_results(&self, after: &Model, run: &RunState) -> Result<Vec<String>> {
        let exports = self.exports(after);
        let lost = exports.iter().map(Export::format).filter_map(|format| Some((format.name(), format.lost_result(after, run)?)));
        let lost: Vec<_> = lost.collect();
        // Other passes and formats may use the result, and types of ONNX files depend on their other nodes.
        let is_only = |lost: &LostResult| exports.len() == 1 && after.onnx.is_none() && run.history.last().is_some_and(|last| last.name == lost.pass);
        match lost.as_slice() {
            [(format, lost)] if is_only(lost) => Err(Error::option(format, format!("{}: {}", lost.reason, lost.remedy))),
            _ => Ok(lost.iter().map(|(format, lost)| format!("{WARNING}{format}: {}: {}", lost.reason, lost.remedy)).collect()),
        }
    }
}

/// A warning about an adapter whose base model is missing.
fn adapter_note(model: &Model) -> Option<String> {
    let is_adapter = |path: &PathBuf| path.file_stem().is_some_and(|stem| stem == "adapter_model");
    let is_alone = !model.weight_files.is_empty() && model.weight_files.iter().all(is_adapter);
    is_alone.then(|| {
        format!(
            "{WARNING}the input is a LoRA adapter without its base model, and PEFT does not load the output: merge the adapter into its base model with `merge_and_unload` of PEFT, and compress the merged model"
        )
    })
}

/// A note if a pass has changed the graph of an ONNX file, whose open dimensions have specified sizes.
fn fixed_sizes(after: &Model, sizes: &OpenSizes) -> Option<String> {
    let sizes: Vec<String> = sizes.iter().map(|(name, size)| format!("{name}={size}")).collect();
    (after.changed_graph.is_some() && !sizes.is_empty())
        .then(|| format!("the changed graph supports only the specified sizes, although its inputs may declare others: {}", sizes.join(", ")))
}

/// A note if passes changed weights, but none of the tensors that stack all experts of a layer.
fn unchanged_experts(model: &Model, run: &RunState) -> Option<String> {
    let is_unchanged = |name: &str, weight: &Weight| stacked_experts(name, weight).is_some() && !run.is_changed(name);
    let sizes: Vec<f64> =
        model.weights.by_name.iter().filter(|(name, weight)| is_unchanged(name, weight)).map(|(_, weight)| weight.elements() as f64).collect();
    if sizes.is_empty() || run.history.iter().all(|applied| applied.tensors.is_empty()) {
        return None;
    }
    let percent = 100.0 * sizes.iter().sum::<f64>() / model.weights.parameters().max(1) as f64;
    Some(format!(
        "left unchanged: {}, each of which stacks all experts of a layer, {percent:.0} % of the parameters; passes process only experts stored as separate tensors (see `split-experts`)",
        counted(sizes.len(), "tensor")
    ))
}

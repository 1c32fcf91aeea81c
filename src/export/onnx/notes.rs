//! Notes of an export.

use std::collections::BTreeMap;

use crate::arch;
use crate::error::counted;
use crate::ir::Graph;
use crate::model::Model;
use crate::onnx::proto::DataType;
use crate::onnx::{InitializerLayout, file};
use crate::run_state::WARNING;
use crate::store::{ActivationScheme, Encoding, Granularity, QuantizationSpec};

/// Outputs of models without a head.
const HIDDEN_STATES: [&str; 2] = ["last_hidden_state", "pooler_output"];

/// Whether a weight consists of integers with a scale per block of rows and columns.
pub(super) fn is_in_blocks(spec: &QuantizationSpec) -> bool {
    spec.codes.is_integer() && matches!(spec.granularity, Granularity::Block(_))
}

/// Notes about how weights are stored and about tensors that are not written.
pub(super) fn notes(model: &Model, graph: &Graph, slots: &[&InitializerLayout]) -> Vec<String> {
    let mut notes = Vec::new();
    let mut remarks: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for slot in slots {
        slot.remark.iter().for_each(|remark| remarks.entry(remark).or_default().push(&slot.weight));
    }
    notes.extend(
        remarks
            .into_iter()
            .map(|(remark, names)| format!("{}: {}, {remark} (the first: `{}`)", file::MODEL, counted(names.len(), "quantized weight"), names[0])),
    );
    let palettes = slots.iter().filter(|slot| slot.palette.is_some()).count();
    if palettes > 0 {
        let width = if slots.iter().any(|slot| slot.tensors.iter().any(|tensor| tensor.data_type == DataType::Uint4)) {
            "four bits or a byte each"
        } else {
            "a byte each; with `opset: 21`, four bits for codebooks of up to 16 values"
        };
        notes.push(format!(
            "{}: {} stored as indices into codebooks (palettes; {width}), which runtimes dequantize when they load the file",
            file::MODEL,
            counted(palettes, "weight")
        ));
    }
    let specs = || {
        slots.iter().filter_map(|slot| match &model.weights.by_name.get(&slot.weight)?.encoding {
            Encoding::Quantized(spec) => Some(spec),
            Encoding::Dense => None,
        })
    };
    let rounded = specs().filter(|spec| spec.codes.is_integer() && matches!(spec.activations, ActivationScheme::Float(..))).count();
    if rounded > 0 {
        notes.push(format!("{}: the activations of {} with FP8 activations stay floats", file::MODEL, counted(rounded, "weight")));
    }
    let blocks = specs().filter(|spec| is_in_blocks(spec)).count();
    if blocks > 0 {
        notes.push(format!(
            "{WARNING}{}: {} dequantized, so that they are not smaller, and activations stay floats: ONNX has no scales of blocks of several rows; use `quantize --scheme W4A16` or `quantize-dynamic`",
            file::MODEL,
            counted(blocks, "integer weight")
        ));
    }
    let floats = specs().filter(|spec| spec.codes.float().is_some()).count();
    if floats > 0 {
        notes.push(format!(
            "{WARNING}{}: {} dequantized, so that they are not smaller, and activations stay floats: ONNX Runtime does not multiply low-bit floats on CPUs; use `quantize --scheme W4A16` or `quantize-dynamic`",
            file::MODEL,
            counted(floats, "low-bit float weight")
        ));
    }
    if let Some(original) = &model.onnx {
        notes.push(format!("{}: a pass has changed the graph, so it is exported anew with the original value names", file::MODEL));
        notes.extend(original.note_on_removed_inputs(file::MODEL));
        return notes;
    }
    let unused = model.unused(graph);
    match model.image_size.get() {
        Some([height, width]) => notes.push(format!("{} reads texts with one image of {height} x {width} pixels each", file::MODEL)),
        None if arch::has_tower(model.config.model_type()) => {
            notes.push(format!("{WARNING}{} has only the language model, for texts without images", file::MODEL));
        }
        None => {}
    }
    let is_matrix = |name: &&String| model.weights.by_name.get(*name).is_some_and(|weight| weight.shape.len() == 2 && weight.is_float());
    let outputs: Vec<&str> = graph.outputs().iter().map(|(name, _)| name.as_str()).collect();
    let lacks_head = model.config.has_head() && outputs.iter().all(|name| HIDDEN_STATES.contains(name));
    if let Some(head) = unused.iter().find(is_matrix).filter(|_| lacks_head) {
        let reason = format!("the graph of {} has no output of its head", model.config.class());
        notes.push(format!("{WARNING}{} computes {} only, without `{head}`: {reason}", file::MODEL, outputs.join(", ")));
    }
    if let Some(first) = unused.first() {
        notes.push(format!("not part of the graph and not in {}: {} of the checkpoint (the first: `{first}`)", file::MODEL, counted(unused.len(), "tensor")));
    }
    notes
}

//! Dequantizes weights, adds their low-rank corrections, and removes the quantization of activations and of
//! the KV cache.
//!
//! ```yaml
//! passes:
//!   - dequantize
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result, counted};
use crate::ir::ops::{Clip, FakeQuantize};
use crate::ir::{Graph, Op, ValueId, low_rank, rebuild};
use crate::model::Model;
use crate::onnx::ModelFile;
use crate::pass::targets::{self, SelectedWeights};
use crate::pass::{Pass, Plan, options_of};
use crate::run_state::{Applied, RunState, WARNING};
use crate::store::{DType, Decoded, Encoding, Pattern, Weight, ZeroOrigin};

/// Dequantize weights, so that later passes can process them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Dequantize {
    /// Tensors to dequantize: names with `*`, or `re:` and a regular expression [default: all quantized
    /// weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave quantized; activations then stay quantized too
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

const NAME: &str = "dequantize";

impl Pass for Dequantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn plan(&self, model: &Model, _state: &RunState) -> Result<Plan<'static>> {
        // A part of the weights does not determine whether the cache is quantized.
        let without_cache = if self.targets.is_empty() && self.ignore.is_empty() { model.without_cache()? } else { None };
        let cache = without_cache.is_some().then(|| "the KV cache is no longer quantized: `kv_cache_scheme` and its scales are removed".to_owned());
        let (weights, mut model) = (&model.weights, without_cache.unwrap_or_else(|| model.clone()));
        let corrections = model.corrections();
        let quantized = |name: &str, weight: &Weight| weight.encoding != Encoding::Dense || weight.original_format.is_some() || corrections.contains_key(name);
        if !weights.by_name.iter().any(|(name, weight)| quantized(name, weight)) {
            if let Some(note) = cache {
                return Ok(Plan::new(model, Applied { notes: vec![note], details: json!({ "dequantized": 0 }), ..Applied::new(NAME, self.options()) }));
            }
            let reason = match &model.onnx {
                Some(file) => {
                    let left = file.unsupported_integers().map_or_else(String::new, |note| format!(" ({note})"));
                    format!(
                        "no weights of the .onnx file are dequantized in a supported pattern of DequantizeLinear or Cast{left}. Integers that MatMulInteger, QLinearMatMul and similar operators read cannot be dequantized: start from the file that was quantized"
                    )
                }
                None => {
                    "the model has no quantized weights. Blocks of GGUF files are dequantized when the file is opened: `compress cast` writes them as floats"
                        .to_owned()
                }
            };
            return Err(Error::option(NAME, reason));
        }
        let SelectedWeights { names, rule, .. } = targets::select_weights(NAME, weights, &self.targets, &self.ignore, "all quantized weights", quantized)?;
        let chosen: BTreeSet<String> =
            names.into_iter().filter(|name| weights.get(name).is_ok_and(|weight| quantized(name, weight))).map(str::to_owned).collect();
        let all = weights.by_name.iter().filter(|(name, weight)| quantized(name, weight)).count() == chosen.len();
        let mut quantizers = fake_quantizers(&model)?;
        for name in &chosen {
            let weight = weights.get(name)?;
            // Scales have at most 32 bits, so F64 would not be more precise.
            let dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
            let source = Decoded { upstream: weight.source(), dtype, name: name.clone() };
            model.weights.by_name.insert(name.clone(), weight.then(dtype, Encoding::Dense, Arc::new(source)));
        }
        let mut notes: Vec<String> = model.onnx.iter().filter_map(|file| file.unsupported_integers()).chain(cache).collect();
        let folded: BTreeSet<&str> = corrections.iter().filter(|(name, _)| chosen.contains(*name)).map(|(_, [_, outer])| outer.as_str()).collect();
        if !folded.is_empty() {
            if !model.has_derived_graph() {
                model.changed_graph = Some(Arc::new(low_rank::remove(&model.graph()?, weights, &folded)?));
                quantizers = fake_quantizers(&model)?;
            }
            let is_pruned = |name: &&String| chosen.contains(name.as_str()) && weights.by_name[*name].zero_origin == Some(ZeroOrigin::Pruning);
            let pruned = corrections.keys().filter(is_pruned).count();
            model.fold_corrections(&chosen)?;
            if pruned > 0 {
                notes.push(format!("{WARNING}{} are no longer sparse: the low-rank products replace their pruned zeros", counted(pruned, "weight")));
            }
            notes.push(format!("the low-rank corrections of {} (`adapter`) are added to the weights", counted(folded.len(), "layer")));
        }
        if let Some((graph, count)) = quantizers {
            let unsupported = ModelFile::opaque_quantizers(&graph);
            if unsupported > 0 {
                notes.push(format!(
                    "{unsupported} QuantizeLinear nodes are not removed and still quantize their inputs: scales along an axis and integers of other widths than 8 bits are not supported"
                ));
            }
            if all && count > 0 {
                let bounds = bounds_without_activation_function(&graph);
                let mut clamps = 0usize;
                let floats = rebuild(&graph, &model.weights, &mut |step| match (&step.node.op, step.inputs.as_slice()) {
                    (Op::FakeQuantize(quantizer), [value]) if bounds.get(&step.node.inputs[0]).is_some_and(|bounds| exceeds(*bounds, quantizer)) => {
                        clamps += 1;
                        let (low, high) = quantizer.range();
                        step.builder.node(step.name, Clip { min: low.into(), max: high.into() }, &[*value])
                    }
                    (Op::FakeQuantize(_), [value]) => Ok(*value),
                    _ => step.copy(),
                })?;
                if clamps > 0 {
                    notes.push(format!("{} still clamped to the range of the quantizer", counted(clamps, "activation")));
                }
                model.changed_graph = Some(Arc::new(floats));
            } else if count > 0 {
                notes.push(format!("{count} activations stay quantized, because some weights stay quantized"));
            }
        }
        let details = json!({ "dequantized": chosen.len() });
        model.weights.set_zero_origin(chosen.iter().map(String::as_str), ZeroOrigin::Rounding);
        Ok(Plan::new(model, Applied { tensors: chosen, rule, notes, details, ..Applied::new(NAME, self.options()) }))
    }

    fn remedy(&self) -> &'static str {
        ""
    }
}

/// Whether values within these bounds exceed the range of a quantizer by more than a step.
fn exceeds((low, high): (f32, f32), quantizer: &FakeQuantize) -> bool {
    let (least, largest) = quantizer.range();
    low < least - quantizer.scale || high > largest + quantizer.scale
}

/// Bounds of the values that may have both signs. ONNX Runtime omits an activation function before a
/// quantizer whose range implies it, so a quantizer of such a value may be the only clamp.
fn bounds_without_activation_function(graph: &Graph) -> BTreeMap<ValueId, (f32, f32)> {
    const UNBOUNDED: (f32, f32) = (f32::NEG_INFINITY, f32::INFINITY);
    let mut found: BTreeMap<ValueId, (f32, f32)> = BTreeMap::new();
    for node in graph.nodes() {
        let first = node.inputs.first().and_then(|input| found.get(input)).copied();
        let within = |low: f32, high: f32| first.map(|(least, largest)| (least.max(low), largest.min(high))).filter(|(low, high)| *low < 0.0 && *high > 0.0);
        let bounds = match &node.op {
            Op::Relu(_) | Op::Sigmoid(_) | Op::HardSigmoid(_) | Op::Softmax(_) | Op::Softplus(_) | Op::Abs(_) | Op::Exp(_) | Op::Sqrt(_) => None,
            Op::Clip(op) => within(op.min as f32, op.max as f32),
            Op::FakeQuantize(op) => {
                let (low, high) = op.range();
                within(low, high)
            }
            Op::Reshape(_) | Op::Transpose(_) | Op::Flatten(_) | Op::Slice(_) | Op::MaxPool(_) | Op::AveragePool(_) | Op::GlobalAveragePool(_) => first,
            Op::Linear(_) | Op::Conv(_) | Op::ConvTranspose(_) | Op::BatchNorm(_) | Op::MatMul(_) | Op::LayerNorm(_) | Op::RmsNorm(_) => Some(UNBOUNDED),
            Op::Binary(_) | Op::Power(_) | Op::Scale(_) | Op::Neg(_) | Op::Log(_) | Op::Gelu(_) | Op::Silu(_) | Op::Elu(_) => Some(UNBOUNDED),
            _ => node.inputs.iter().any(|input| found.contains_key(input)).then_some(UNBOUNDED),
        };
        found.extend(bounds.map(|bounds| (node.output, bounds)));
    }
    found
}

/// The graph of the model, if it may quantize activations, and the number of its `FakeQuantize` nodes.
fn fake_quantizers(model: &Model) -> Result<Option<(Graph, usize)>> {
    let may_quantize = match (&model.changed_graph, &model.onnx) {
        (None, Some(file)) => file.quantizes_activations(),
        (None, None) => !model.is_described(),
        (Some(_), _) => true,
    };
    if !may_quantize {
        return Ok(None);
    }
    let graph = model.graph()?;
    let count = graph.nodes().iter().filter(|node| matches!(node.op, Op::FakeQuantize(_))).count();
    Ok(Some((graph, count)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that a clamp or an activation function limits to one sign have no bounds.
    #[test]
    fn only_values_of_both_signs_have_bounds() {
        let text = "input x: float[batch, 4]\nparam w: float[4, 4]\nh = Linear{\"input_major\":false}(x, w) -> float[batch, 4]\n\
            both = Clip{\"min\":-1.0,\"max\":2.0}(h) -> float[batch, 4]\nmore = Clip{\"min\":-3.0,\"max\":1.0}(both) -> float[batch, 4]\n\
            above = Clip{\"min\":0.0,\"max\":6.0}(h) -> float[batch, 4]\nbelow = Clip{\"min\":-1.0,\"max\":0.0}(h) -> float[batch, 4]\n\
            relu = Relu(h) -> float[batch, 4]\noutput more = more\noutput above = above\noutput below = below\noutput relu = relu\n";
        let graph: Graph = text.parse().unwrap();
        let found: BTreeMap<&str, (f32, f32)> =
            bounds_without_activation_function(&graph).into_iter().map(|(id, bounds)| (graph.value(id).name.as_str(), bounds)).collect();
        assert_eq!(found, BTreeMap::from([("h", (f32::NEG_INFINITY, f32::INFINITY)), ("both", (-1.0, 2.0)), ("more", (-1.0, 1.0))]));
    }
}

//! Quantized weights as the floats that they stand for, and activations no longer rounded.
//!
//! ```yaml
//! passes:
//!   - dequantize
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::ir::{Graph, Op, rebuild};
use crate::model::Model;
use crate::onnx::ModelFile;
use crate::pass::targets::{self, Chosen};
use crate::pass::{Context, Pass, options_of};
use crate::run_state::{Applied, RunState};
use crate::store::{DType, Decoded, Encoding, Pattern, Weight, ZeroOrigin};
use crate::work::Meter;

/// Make floats of quantized weights, so that other passes take them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Dequantize {
    /// Tensors to make floats of: names with `*`, or `re:` and a regular expression [default: all quantized weights]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave quantized; activations stay rounded then
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

    fn apply(&self, mut model: Model, run: &mut RunState, _context: Option<&Context>) -> Result<Model> {
        let weights = model.weights.clone();
        let quantized = |_: &str, weight: &Weight| weight.encoding != Encoding::Dense;
        if !weights.by_name.iter().any(|(name, weight)| quantized(name, weight)) {
            let reason = "no weight is selected: none is quantized. Block types of GGUF files are decoded when a file is opened: `compress cast` writes floats";
            return Err(Error::option(NAME, reason));
        }
        let Chosen { names, rule } = targets::choose(NAME, &weights, &self.targets, &self.ignore, "all quantized weights", quantized)?;
        let chosen: BTreeSet<String> =
            names.into_iter().filter(|name| weights.get(name).is_ok_and(|weight| quantized(name, weight))).map(str::to_owned).collect();
        let all = weights.by_name.iter().filter(|(name, weight)| quantized(name, weight)).count() == chosen.len();
        let rounded = rounding(&model)?;
        for name in &chosen {
            let weight = weights.get(name)?;
            // Floats of 64 bits are those of 32: scales have no more.
            let dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
            let source = Decoded { upstream: weight.source(), dtype, name: name.clone() };
            model.weights.by_name.insert(name.clone(), weight.then(dtype, Encoding::Dense, Arc::new(source)));
        }
        let mut notes: Vec<String> = model.onnx.iter().filter_map(|file| file.unknown_integers()).collect();
        if let Some((graph, count)) = rounded {
            let stay = ModelFile::roundings_in_pieces(&graph);
            if stay > 0 {
                notes.push(format!(
                    "{stay} nodes QuantizeLinear stay and round what they read: scales along an axis, and integers of other than 8 bits, are not taken out"
                ));
            }
            if all && count > 0 {
                let floats = rebuild(&graph, &model.weights, &mut |step| match (&step.node.op, step.inputs.as_slice()) {
                    (Op::FakeQuantize(_), [value]) => Ok(*value),
                    _ => step.keep(),
                })?;
                model.changed_graph = Some(Arc::new(floats));
            } else if count > 0 {
                notes.push(format!("{count} activations stay rounded, as some weights stay quantized"));
            }
        }
        let count = chosen.len();
        model.weights.set_zero_origin(chosen.iter().map(String::as_str), ZeroOrigin::Rounding);
        let meter = Arc::new(Meter::default());
        run.history.push(Applied {
            tensors: chosen,
            rule,
            meter,
            notes,
            details: Arc::new(move || json!({ "dequantized": count })),
            ..Applied::new(NAME, self.options())
        });
        Ok(model)
    }

    fn remedy(&self) -> &'static str {
        "`targets` that leave the weight as it is"
    }
}

/// The model's graph where it says that activations are rounded, and how many of them.
fn rounding(model: &Model) -> Result<Option<(Graph, usize)>> {
    let said = match (&model.changed_graph, &model.onnx) {
        (None, Some(file)) => file.quantizes_activations(),
        (None, None) => !model.is_described(),
        (Some(_), _) => true,
    };
    if !said {
        return Ok(None);
    }
    let graph = model.graph()?;
    let count = graph.nodes().iter().filter(|node| matches!(node.op, Op::FakeQuantize(_))).count();
    Ok(Some((graph, count)))
}

//! `compress inspect`

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::Global;
use super::output;
use crate::error::Result;
use crate::model::{Model, is_linear};
use crate::report::format::{bytes, count, natural, percent, shape};
use crate::report::terminal::{facts, table};
use crate::store::Weight;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Model folder or .safetensors file
    path: PathBuf,
    /// Read headers only: no zeros are counted
    #[arg(long)]
    header_only: bool,
    #[cfg(feature = "run")]
    #[command(flatten)]
    graph: super::running::Graph,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let model = Model::open(&self.path)?;
        #[cfg(feature = "run")]
        if self.graph.show(&model, global)? {
            return Ok(());
        }
        let mut weights: Vec<(&String, &Weight)> = model.weights.by_name.iter().collect();
        weights.sort_by(|a, b| natural(a.0, b.0));
        let zeros = if self.header_only {
            vec![None; weights.len()]
        } else {
            global.work(|work| {
                work.run(
                    "Reading",
                    &weights,
                    |(_, w)| w.stored_bytes,
                    |(_, w)| {
                        let zeros = count_zeros(w)?;
                        work.advance(w.stored_bytes)?;
                        Ok(zeros)
                    },
                )
            })?
        };
        let unused = unused(&model);
        let interface = Interface::of(&model);
        if global.json {
            let tensors: Vec<_> = weights
                .iter()
                .zip(&zeros)
                .map(|((name, w), zeros)| json!({ "name": name, "dtype": w.dtype, "shape": w.shape, "parameters": w.elements(), "encoding": w.describe(), "bytes": w.stored_bytes, "zeros": zeros, "stored_as": w.stored_as }))
                .collect();
            return output::json(
                &json!({ "path": model.path.to_string_lossy(), "architecture": model.config.model_type(), "parameters": model.weights.parameters(), "bytes": model.stored_bytes(), "metadata": model.weights.metadata, "inputs": interface.inputs, "outputs": interface.outputs, "cannot_run": interface.reason, "unused": unused, "tensors": tensors }),
            );
        }
        let rows = weights.iter().zip(&zeros).map(|((name, w), zeros)| {
            vec![
                (*name).clone(),
                shape(&w.shape),
                w.describe(),
                count(w.elements() as u64),
                bytes(w.stored_bytes),
                zeros.map_or("-".into(), |z| percent(z, w.elements() as u64)),
            ]
        });
        output::print(&format!("{}\n", table(&["tensor", "shape", "encoding", "parameters", "bytes", "zeros"], rows)))?;
        for (label, key) in [("keys that are not known", "keys"), ("weights that nothing is computed with", "weights")] {
            match &unused[key] {
                Value::Array(names) if !names.is_empty() => {
                    output::print(&format!("\n {label}: {}\n", names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")))?;
                }
                _ => {}
            }
        }
        output::print(&format!("\n{}\n", summary(&model, (!self.header_only).then(|| zeros.iter().flatten().sum()), interface)))
    }
}

/// What of a folder nothing is computed by: keys of its files, weights; or why it cannot be run. Nothing for weights alone.
fn unused(model: &Model) -> Value {
    #[cfg(feature = "run")]
    if model.describes_itself() {
        let found = || -> Result<Value> {
            let weights = model.unused(&model.graph()?);
            let mut keys = model.unknown_keys()?;
            keys.extend(crate::data::unknown_keys(&model.path)?);
            Ok(json!({ "keys": keys, "weights": weights }))
        };
        return found().unwrap_or_else(|e| json!({ "refused": e.to_string() }));
    }
    let _ = model;
    Value::Null
}

/// What the model is, takes and gives, as far as that is known.
#[derive(Default)]
struct Interface {
    inputs: Vec<String>,
    outputs: Vec<String>,
    /// Why it cannot be run.
    reason: Option<String>,
}

impl Interface {
    #[cfg(feature = "run")]
    fn of(model: &Model) -> Interface {
        let graph = match model.graph() {
            Ok(graph) => graph,
            Err(reason) => return Interface { reason: Some(reason.to_string()), ..Interface::default() },
        };
        let inputs = graph.inputs().map(|(_, value)| format!("{}: {}", value.name, value.ty)).collect();
        let outputs = graph.outputs().iter().map(|(name, id)| format!("{name}: {}", graph.value(*id).ty)).collect();
        Interface { inputs, outputs, reason: None }
    }

    #[cfg(not(feature = "run"))]
    fn of(_model: &Model) -> Interface {
        Interface::default()
    }
}

/// The model in a few lines, `zeros` where they were counted.
fn summary(model: &Model, zeros: Option<u64>, interface: Interface) -> comfy_table::Table {
    let weights = &model.weights;
    let class = model.config.values().get("architectures").and_then(|names| names.get(0)?.as_str());
    let names: Vec<&str> = [model.config.model_type()].into_iter().filter(|name| !name.is_empty()).chain(class).collect();
    let linear: u64 = weights.by_name.iter().filter(|(name, w)| is_linear(name, w)).map(|(_, w)| w.elements() as u64).sum();
    let mut encodings: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for weight in weights.by_name.values() {
        let of = encodings.entry(weight.describe()).or_default();
        *of = (of.0 + 1, of.1 + weight.stored_bytes);
    }
    let stored = encodings.iter().map(|(encoding, (tensors, size))| format!("{tensors} {encoding} ({})", bytes(*size))).collect::<Vec<_>>().join(", ");
    let parameters = weights.parameters();
    let zeros = zeros.map_or(String::new(), |zeros| format!("; {} are zero", percent(zeros, parameters)));
    let rows = [
        ("model", model.path.display().to_string()),
        ("architecture", if names.is_empty() { "not said by a config.json".into() } else { names.join(", ") }),
        ("parameters", format!("{}, of them {} in linear layers{zeros}", count(parameters), count(linear))),
        ("tensors", stored),
        ("size", format!("{} in {} file{}", bytes(model.stored_bytes()), model.weight_files.len(), if model.weight_files.len() == 1 { "" } else { "s" })),
        ("takes", interface.inputs.join(", ")),
        ("gives", interface.outputs.join(", ")),
        ("cannot be run", interface.reason.map_or(String::new(), |reason| format!("{reason}; passes over weights take it"))),
    ];
    facts(rows.into_iter().filter(|(_, value)| !value.is_empty()))
}

/// Values that are zero; none for types that are not floats.
fn count_zeros(weight: &Weight) -> Result<Option<u64>> {
    if !weight.is_float() {
        return Ok(None);
    }
    let mut zeros = 0;
    weight.visit(1, &mut |block| {
        zeros += block.now.zeros();
        Ok(())
    })?;
    Ok(Some(zeros))
}

//! `compress inspect`

use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::Global;
use super::output;
use crate::error::Result;
use crate::model::Model;
use crate::report::format::{bytes, count, natural, percent, shape};
use crate::report::terminal::table;
use crate::store::{Encoding, Weight};

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
        if global.json {
            let tensors: Vec<_> = weights
                .iter()
                .zip(&zeros)
                .map(|((name, w), zeros)| json!({ "name": name, "dtype": w.dtype, "shape": w.shape, "parameters": w.elements(), "encoding": w.describe(), "bytes": w.stored_bytes, "zeros": zeros, "stored_as": w.stored_as }))
                .collect();
            return output::json(
                &json!({ "path": model.path.to_string_lossy(), "architecture": model.config.model_type(), "parameters": model.weights.parameters(), "bytes": model.stored_bytes(), "metadata": model.weights.metadata, "unused": unused, "tensors": tensors }),
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
        let architecture = Some(model.config.model_type()).filter(|t| !t.is_empty()).map_or(String::new(), |t| format!("{t}, "));
        let quantized = weights.iter().filter(|(_, w)| w.encoding != Encoding::Dense).count();
        output::print(&format!("{}\n", table(&["tensor", "shape", "encoding", "parameters", "bytes", "zeros"], rows)))?;
        for (label, key) in [("keys that are not known", "keys"), ("weights that nothing is computed with", "weights"), ("cannot be run", "refused")] {
            match &unused[key] {
                Value::Array(names) if !names.is_empty() => {
                    output::print(&format!("\n {label}: {}\n", names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")))?;
                }
                Value::String(reason) => output::print(&format!("\n {label}: {reason}\n"))?,
                _ => {}
            }
        }
        let quantized = if quantized > 0 { format!(", {quantized} quantized") } else { String::new() };
        output::print(&format!(
            "\n {}: {architecture}{} weights{quantized}, {} parameters, {}\n",
            model.path.display(),
            weights.len(),
            count(model.weights.parameters()),
            bytes(model.stored_bytes())
        ))
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

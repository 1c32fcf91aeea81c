//! `compress inspect`

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value, json};

use super::args::Global;
use super::output;
use super::running::{Computation, Graph};
use crate::error::{Result, counted};
use crate::kernel::cache::CacheScales;
use crate::model::{Model, is_linear};
use crate::report::format::{bytes, count, natural, percent, shape};
use crate::report::terminal::{facts, table};
use crate::store::{DType, Weight};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Model folder, or a file: .safetensors, .onnx, .gguf, or .bin, .pt or .pth of PyTorch; also
    /// hf:org/name, s3://bucket/name
    path: PathBuf,
    /// Read headers only, without counting zeros
    #[arg(long)]
    header_only: bool,
    #[command(flatten)]
    graph: Graph,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let model = Model::open(&self.path)?;
        if self.graph.show(&model, global)? {
            return Ok(());
        }
        let mut weights: Vec<(&String, &Weight)> = model.weights.by_name.iter().collect();
        weights.sort_by(|a, b| natural(a.0, b.0));
        let zeros = if self.header_only {
            vec![None; weights.len()]
        } else {
            global.work(|work| {
                let zeros = work.run(
                    "Reading",
                    &weights,
                    |(_, w)| w.stored_bytes,
                    |(_, w)| {
                        let zeros = count_zeros(w)?;
                        work.advance(w.stored_bytes)?;
                        Ok(zeros)
                    },
                )?;
                model.check_contents(work).map(|()| zeros)
            })?
        };
        let Computation { inputs, outputs, cannot_run, unused } = Computation::from_model(&model);
        if global.json {
            let about = json!({ "path": model.path.to_string_lossy(), "architecture": model.config.model_type(), "parameters": model.weights.parameters(), "bytes": model.stored_bytes(), "metadata": model.weights.metadata, "notes": model.auxiliary.in_weight_files, "kv_cache_scheme": model.config.carried_quantization().get("kv_cache_scheme"), "inputs": inputs, "outputs": outputs, "cannot_run": cannot_run, "unused": unused });
            return output::json(&Inspected {
                about,
                tensors: weights.iter().zip(zeros).map(|((name, weight), zeros)| Tensor::new(name, weight, zeros)).collect(),
            });
        }
        let counted_zeros: Vec<[u64; 2]> = weights.iter().zip(&zeros).filter_map(|((_, weight), zeros)| Some([(*zeros)?, weight.elements() as u64])).collect();
        let rows = weights.iter().zip(&zeros).map(|((name, w), zeros)| {
            vec![
                (*name).clone(),
                shape(&w.shape),
                w.describe_stored(),
                count(w.elements() as u64),
                bytes(w.stored_bytes),
                zeros.map_or("-".into(), |z| percent(z, w.elements() as u64)),
            ]
        });
        output::print(&format!("{}\n", table(&["tensor", "shape", "encoding", "parameters", "bytes", "zeros"], rows)))?;
        for (label, names) in unused.iter().flat_map(|unused| [("unknown keys", &unused.keys), ("unused weights", &unused.weights)]) {
            if !names.is_empty() {
                output::print(&format!("\n {label}: {}\n", names.join(", ")))?;
            }
        }
        if let Some(unused) = unused.as_ref().filter(|unused| !unused.token_maps.is_empty()) {
            output::print(&format!("\n token maps: {}, between the token ids of the head and those of its model\n", unused.token_maps.join(", ")))?;
        }
        if let Some(unused) = unused.as_ref().filter(|unused| !unused.tower.is_empty()) {
            output::print(&format!("\n vision tower: {}, which passes copy unchanged\n", counted(unused.tower.len(), "tensor")))?;
        }
        output::print(&format!("\n{}\n", summary(&model, &counted_zeros, [inputs.join("\n"), outputs.join("\n")], cannot_run)))
    }
}

/// The model in JSON.
#[derive(Serialize)]
struct Inspected<'a> {
    #[serde(flatten)]
    about: Value,
    tensors: Vec<Tensor<'a>>,
}

/// A weight in JSON.
#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    parameters: usize,
    encoding: String,
    bytes: u64,
    zeros: Option<u64>,
    stored_as: &'a [String],
}

impl<'a> Tensor<'a> {
    fn new(name: &'a str, weight: &'a Weight, zeros: Option<u64>) -> Tensor<'a> {
        Tensor {
            name,
            dtype: weight.dtype,
            shape: &weight.shape,
            parameters: weight.elements(),
            encoding: weight.describe_stored(),
            bytes: weight.stored_bytes,
            zeros,
            stored_as: &weight.stored_as,
        }
    }
}

/// Summary of the model; `counted_zeros` has the number of zeros and of elements of each weight whose zeros
/// were counted.
fn summary(model: &Model, counted_zeros: &[[u64; 2]], [inputs, outputs]: [String; 2], cannot_run: Option<String>) -> comfy_table::Table {
    let weights = &model.weights;
    let names: Vec<&str> = [model.config.model_type(), model.config.class()].into_iter().filter(|name| !name.is_empty()).collect();
    let linear: u64 = weights.by_name.iter().filter(|(name, w)| is_linear(name, w)).map(|(_, w)| w.elements() as u64).sum();
    let mut encodings: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for weight in weights.by_name.values() {
        let (tensors, bytes) = encodings.entry(weight.describe_stored()).or_default();
        *tensors += 1;
        *bytes += weight.stored_bytes;
    }
    let stored = encodings.iter().map(|(encoding, (tensors, size))| format!("{tensors} {encoding} ({})", bytes(*size))).collect::<Vec<_>>().join(", ");
    let parameters = weights.parameters();
    let [zeros, elements] = [0, 1].map(|at| counted_zeros.iter().map(|counts| counts[at]).sum::<u64>());
    let of = if elements == parameters { String::new() } else { format!(" of the {} floats", count(elements)) };
    let zeros = if elements == 0 { String::new() } else { format!("; {}{of} are zero", percent(zeros, elements)) };
    let cache = match model.config.cache() {
        Ok(None) => String::new(),
        Ok(Some(scheme)) => {
            let scales = if scheme.scales == CacheScales::Head { ", a scale per head" } else { "" };
            format!("keys and values as {}{scales}", scheme.format.name())
        }
        Err(e) => e.to_string(),
    };
    let rows = [
        ("model", model.path.display().to_string()),
        ("architecture", if names.is_empty() { "unknown: no config.json specifies it".into() } else { names.join(", ") }),
        ("parameters", format!("{}, {} of them in linear layers{zeros}", count(parameters), count(linear))),
        ("tensors", stored),
        ("size", format!("{} in {}", bytes(model.stored_bytes()), counted(model.weight_files.len(), "file"))),
        ("KV cache", cache),
        ("notes", model.auxiliary.in_weight_files.join("\n")),
        ("inputs", inputs),
        ("outputs", outputs),
        ("cannot be run", cannot_run.map_or(String::new(), |reason| format!("{reason}; passes over weights can process it"))),
    ];
    facts(rows.into_iter().filter(|(_, value)| !value.is_empty()))
}

/// Number of zeros; `None` for types that are not floats.
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

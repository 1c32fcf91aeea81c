//! ONNX, in one file, or with the weights beside it where one file would be too large.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::{Exported, Forecast, Format};
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::model::Model;
use crate::onnx::write::OPSETS;
use crate::onnx::{Draft, draft, file};
use crate::store::writer::{self, Item};
use crate::store::{DType, Decoded, Encoding, Spelling, Sweep, Weight};

/// The ONNX format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Onnx {
    /// Set of operators, 17 to 21; higher ones need newer runtimes
    #[serde(deserialize_with = "opset")]
    #[cfg_attr(feature = "cli", schemars(range(min = 17, max = 21)))]
    pub opset: u32,
}

impl Default for Onnx {
    fn default() -> Self {
        Self { opset: *OPSETS.start() }
    }
}

fn opset<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let opset = u32::deserialize(deserializer)?;
    if OPSETS.contains(&opset) { Ok(opset) } else { Err(D::Error::custom(format!("opset {opset} is not one of {} to {}", OPSETS.start(), OPSETS.end()))) }
}

struct Prepared {
    graph: Graph,
    draft: Draft,
    items: Vec<Item>,
    layout: file::Layout,
}

impl Onnx {
    fn prepare(&self, model: &Model) -> Result<Prepared> {
        let graph = model.graph()?;
        let draft = draft(&graph, self.opset, &metadata(model))?;
        let mut items = Vec::with_capacity(draft.weights.len());
        for slot in &draft.weights {
            let weight = model.weights.get(&slot.weight)?;
            if !weight.is_float() {
                return Err(Error::tensor(
                    &slot.weight,
                    format!("is {}, the graph needs floats", weight.dtype),
                    "store it as floats, or describe the model in a graph.json that does not use it",
                ));
            }
            let spelling = if slot.transposed { Spelling::Transposed } else { Spelling::Plain };
            items.push(Item { name: slot.weight.clone(), weight: float(&slot.weight, weight), spelling });
        }
        let shapes: Vec<Vec<usize>> =
            items.iter().map(|item| item.spelling.parts(&item.name, &item.weight).into_iter().flat_map(|part| part.shape).collect()).collect();
        let layout = file::layout(&draft, &shapes, file::LARGEST)?;
        Ok(Prepared { graph, draft, items, layout })
    }
}

/// A weight as 32-bit floats; quantized ones as the floats that they stand for.
fn float(name: &str, weight: &Weight) -> Weight {
    let source = Decoded { upstream: weight.source(), dtype: DType::F32, name: name.to_owned() };
    weight.then(DType::F32, Encoding::Dense, std::sync::Arc::new(source))
}

fn metadata(model: &Model) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::new();
    if !model.config.model_type().is_empty() {
        metadata.insert("compress.model_type".to_owned(), model.config.model_type().to_owned());
    }
    if !model.history.is_empty() {
        let passes: Vec<Value> = model.history.iter().map(|applied| json!({ applied.name: applied.options })).collect();
        metadata.insert("compress.passes".to_owned(), Value::Array(passes).to_string());
    }
    metadata
}

fn notes(model: &Model, graph: &Graph, items: &[Item]) -> Vec<String> {
    let mut notes = Vec::new();
    let quantized = items.iter().filter(|item| model.weights.by_name.get(&item.name).is_some_and(|w| w.encoding != Encoding::Dense)).count();
    if quantized > 0 {
        notes.push(format!("{quantized} quantized weights are written to {} as the floats that they stand for: no size gain there", file::MODEL));
    }
    let unused = model.unused(graph);
    if let Some(first) = unused.first() {
        notes.push(format!("{} tensors of the checkpoint are not part of the graph and not in {} (the first: `{first}`)", unused.len(), file::MODEL));
    }
    notes
}

impl Format for Onnx {
    fn name(&self) -> &'static str {
        "onnx"
    }

    fn options(&self) -> Value {
        serde_json::to_value(self).unwrap_or(Value::Null)
    }

    fn forecast(&self, model: &Model) -> Result<Forecast> {
        let Prepared { items, layout, .. } = self.prepare(model)?;
        Ok(Forecast {
            files: layout.iter().map(|(name, _)| name.clone()).collect(),
            bytes: layout.iter().map(|(_, pieces)| file::bytes(pieces)).sum(),
            exact: true,
            tensors: items.len(),
        })
    }

    fn write(&self, model: &Model, folder: &Path, sweep: &Sweep) -> Result<Exported> {
        let Prepared { graph, draft, items, layout } = self.prepare(model)?;
        let (files, seen) = writer::write_pieces(folder, &layout, &items, sweep)?;
        Ok(Exported {
            files,
            how: "read back: the graph and every weight's bytes equal to what was made".into(),
            max_abs_error: 0.0,
            tensors: draft.weights.len(),
            encodings: items.iter().map(|item| item.weight.describe()).collect(),
            config: None,
            notes: notes(model, &graph, &items),
            weights: items.into_iter().map(|item| item.name).zip(seen).collect(),
        })
    }
}

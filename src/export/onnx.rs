//! ONNX, in one file, or with the weights beside it where one file would be too large.
//!
//! Int8 weights stay int8. A linear layer whose activations are quantized becomes `DynamicQuantizeLinear` and
//! `MatMulInteger`, in the form that ONNX Runtime runs as one integer kernel; with float activations its weights go
//! through `DequantizeLinear`; of an embedding only the rows that are looked up become floats.

mod genai;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::{Exported, Format, SizeForecast};
use crate::error::{Error, Result};
use crate::files::{Destination, LocalNames};
use crate::generation::LanguageModel;
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::onnx::proto::DataType;
use crate::onnx::{Draft, ModelFile, OPSETS, Precision, Rewritten, Slot, Style, TiedHead, WeightOnly, draft, file};
use crate::run_state::RunState;
use crate::store::writer::{self, Item, Made, Piece};
use crate::store::{Affine, Bias, BiasForm, Codes, DType, Decoded, Encoding, Rescaled, StorageFormat, Weight, Weights};
use crate::work::Work;

/// The ONNX format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Onnx {
    /// Set of operators, 17 to 21; higher ones need newer runtimes
    #[serde(deserialize_with = "opset")]
    #[cfg_attr(feature = "cli", schemars(range(min = 17, max = 21)))]
    pub opset: u32,
    /// Width of weights and arithmetic; int8 weights stay int8, and their layers compute in float32
    pub precision: Precision,
    /// What statically quantized activations are: uint8 suits x86, int8 ARM and GPUs
    pub activations: Integers,
    /// How layers are written whose weights are integers and whose activations are floats (W4A16, W8A16)
    pub weight_only: WeightOnly,
    /// How an output head is written that shares its weight with an int8 embedding table
    pub tied_head: TiedHead,
    /// Whether a decoder takes keys and values of earlier tokens and gives those of all, so that each step computes one token
    pub cache: bool,
}

/// Eight bits, with or without a sign.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Integers {
    /// As the pass says that quantized them; else uint8
    #[default]
    Auto,
    /// 0 to 255
    Uint8,
    /// -128 to 127
    Int8,
}

impl Default for Onnx {
    fn default() -> Self {
        Self {
            opset: *OPSETS.start(),
            precision: Precision::default(),
            activations: Integers::default(),
            weight_only: WeightOnly::default(),
            tied_head: TiedHead::default(),
            cache: false,
        }
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
    layout: file::Pieces,
    /// What is to be said of the cache and of options.
    notes: Vec<String>,
}

impl Onnx {
    fn prepare(&self, model: &Model, run: &RunState) -> Result<Prepared> {
        let graph = model.graph()?;
        let opaque = graph.nodes().iter().any(|node| matches!(node.op, Op::Opaque(_)));
        // What is written as it stands in a file keeps to its operators, or newer ones.
        let least = model.onnx.as_ref().filter(|_| opaque).and_then(|file| u32::try_from(file.opset()).ok()).unwrap_or(0);
        let mut style = Style {
            opset: self.opset.max(least),
            precision: self.precision,
            signed: self.activations == Integers::Int8 || (self.activations == Integers::Auto && model.signed_activations),
            weight_only: self.weight_only,
            tied_head: self.tied_head,
            cache: self.cache,
            ..Style::default()
        };
        let decoder = if self.cache { Some(LanguageModel::of(model.clone())?) } else { None };
        for (_, value) in graph.params() {
            if let Encoding::Affine(affine) = &model.weights.get(&value.name)?.encoding {
                match affine.codes {
                    Codes::Integer(_) => style.integers.insert(value.name.clone(), affine.clone()),
                    Codes::Palette(_) => style.palettes.insert(value.name.clone(), affine.clone()),
                    Codes::E4m3 | Codes::E2m1 => None,
                };
            }
        }
        let mut draft = draft(&graph, &style, &metadata(model, run))?;
        model.onnx.iter().for_each(|file| draft.described_as(&file.model));
        let items = draft.weights.iter().map(|slot| item(slot, &model.weights)).collect::<Result<_>>()?;
        let mut layout = file::layout_as(file_names(run), &draft, file::LARGEST)?;
        let mut notes = Vec::new();
        if draft.integer_heads == Some(0) {
            notes.push(format!(
                "{}: `tied_head: int8` changes nothing: no output head shares an int8 embedding table (`embeddings: true` of `quantize-dynamic`)",
                file::MODEL
            ));
        }
        if let Some(decoder) = &decoder {
            match genai::config(model, decoder, &graph, &draft, file_names(run)[0])? {
                _ if run.file.is_some() => notes.push(format!("{} belongs into a folder, and is not written beside a file", genai::FILE)),
                Ok(text) => layout.push((genai::FILE.into(), vec![Piece::Bytes(text.into_bytes())])),
                Err(reason) => notes.push(format!("{} is not written: {reason}", genai::FILE)),
            }
            notes.extend(genai::same_angles(&graph).map(|tokens| {
                format!("{}: rotary embeddings have other angles in texts of more than {tokens} tokens; a text that grows past them must begin again with an empty cache", file::MODEL)
            }));
        }
        Ok(Prepared { graph, draft, items, layout, notes })
    }

    /// A model that was opened from an ONNX file, in the operators that it has.
    fn rewritten(&self, file: &ModelFile, model: &Model, run: &RunState) -> Result<Rewritten> {
        let options = self.options();
        let usual = Onnx::default().options();
        if let Some((name, _)) = options.as_object().into_iter().flatten().find(|(name, value)| usual.get(name) != Some(value)) {
            return Err(Error::option(
                format!("onnx: {name}"),
                format!("{} is an .onnx model, which is written in the operators that it has: leave the option out", model.path.display()),
            ));
        }
        let metadata = if run.history.is_empty() { BTreeMap::new() } else { metadata(model, run) };
        let metadata = metadata.into_iter().filter(|(key, value)| model.weights.metadata.get(key) != Some(value)).collect();
        file.rewrite(&model.weights, file_names(run), &metadata, file::LARGEST)
    }

    fn write_again(&self, file: &ModelFile, model: &Model, run: &RunState, folder: &Destination, work: &Work) -> Result<Exported> {
        let Rewritten { layout, items, carried, as_they_stand, tensors, notes } = self.rewritten(file, model, run)?;
        let (files, seen) = writer::write_pieces(folder, &layout, &items, work)?;
        let measured = as_they_stand.iter().map(|item| writer::measure(&item.weight)).collect::<Result<Vec<_>>>()?;
        let written = items.into_iter().zip(seen).enumerate().filter(|(position, _)| !carried.contains(position)).map(|(_, weight)| weight);
        let weights: Vec<_> = written.chain(as_they_stand.into_iter().zip(measured)).collect();
        Ok(Exported {
            files,
            how: "read back: what no pass has changed is the bytes of the input, every other weight what was computed".into(),
            max_abs_error: 0.0,
            tensors,
            encodings: weights.iter().map(|(item, _)| item.weight.describe()).collect(),
            held: None,
            config: None,
            notes,
            weights: weights.into_iter().map(|(item, seen)| (item.name, seen)).collect(),
        })
    }
}

/// A weight as the file wants it: integers with scales of 32 bits, or floats; quantized ones as those that they stand for.
fn item(slot: &Slot, weights: &Weights) -> Result<Item> {
    let name = slot.weight.clone();
    let weight = weights.get(&name)?;
    if let Some(sums) = &slot.sums {
        let form = if sums.scales { BiasForm::Scales } else { BiasForm::Integers };
        let of = Bias { name: name.clone(), values: weight.clone(), weight: weights.get(&sums.weight)?.clone(), input_scale: sums.input_scale, form };
        let name = if sums.scales { format!("{name}_scale") } else { name };
        return Ok(Item { name, weight: of.weight(), storage_format: StorageFormat::Plain });
    }
    if !weight.is_float() {
        return Err(Error::tensor(
            &name,
            format!("is {}, the graph needs floats", weight.dtype),
            "store it as floats, or describe the model in a graph.json that does not use it",
        ));
    }
    let half = slot.tensors.iter().any(|tensor| tensor.data_type == DataType::Float16);
    let dtype = if half { DType::F16 } else { DType::F32 };
    let weight = if let Some(affine) = slot.integers.as_ref().or(slot.palette.as_ref()) {
        let affine = Affine { scale_dtype: dtype, ..affine.clone() };
        let source = Rescaled { upstream: weight.source(), affine: affine.clone(), name: name.clone() };
        weight.then(dtype, Encoding::Affine(affine), Arc::new(source))
    } else {
        let source = Decoded { upstream: weight.source(), dtype, name: name.clone() };
        weight.then(dtype, Encoding::Dense, Arc::new(source))
    };
    Ok(Item { name, weight, storage_format: slot.storage_format })
}

/// The ONNX file that a model was opened from, where no pass has changed what it computes.
fn unchanged(model: &Model) -> Option<&ModelFile> {
    model.onnx.as_deref().filter(|_| model.changed_graph.is_none())
}

/// Names of the model file, and of the file with the weights of a large one.
fn file_names(run: &RunState) -> [&str; 2] {
    [run.file.as_deref().unwrap_or(file::MODEL), run.data_file.as_deref().unwrap_or(file::DATA)]
}

fn metadata(model: &Model, run: &RunState) -> BTreeMap<String, String> {
    let mut metadata = if model.onnx.is_some() { model.weights.metadata.clone() } else { BTreeMap::new() };
    if !model.config.model_type().is_empty() {
        metadata.insert("compress.model_type".to_owned(), model.config.model_type().to_owned());
    }
    if !run.history.is_empty() {
        let passes = Value::Array(run.history.iter().map(|applied| json!({ applied.name: applied.options })).collect());
        metadata.insert("compress.passes".to_owned(), LocalNames::new(&passes, None).value(&passes).to_string());
    }
    metadata
}

fn notes(model: &Model, graph: &Graph, slots: &[Slot]) -> Vec<String> {
    let mut notes = Vec::new();
    let mut remarks: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for slot in slots {
        slot.remark.iter().for_each(|remark| remarks.entry(remark).or_default().push(&slot.weight));
    }
    notes.extend(
        remarks.into_iter().map(|(remark, names)| format!("{}: {} quantized weights are {remark} (the first: `{}`)", file::MODEL, names.len(), names[0])),
    );
    let palettes = slots.iter().filter(|slot| slot.palette.is_some()).count();
    if palettes > 0 {
        let width = if slots.iter().any(|slot| slot.tensors.iter().any(|tensor| tensor.data_type == DataType::Uint4)) {
            "four bits or a byte"
        } else {
            "a byte each; `opset: 21` has four bits for palettes of up to 16 values"
        };
        notes.push(format!("{}: {palettes} weights are places in palettes ({width}), of which runtimes make floats when they load the file", file::MODEL));
    }
    let narrow = |weight: &&Weight| matches!(&weight.encoding, Encoding::Affine(affine) if matches!(affine.codes, Codes::E4m3 | Codes::E2m1));
    let floats = slots.iter().filter_map(|slot| model.weights.by_name.get(&slot.weight)).filter(narrow).count();
    if floats > 0 {
        notes.push(format!(
            "{}: {floats} weights of FP8 or FP4 are written as the floats that they stand for, and activations stay floats: ONNX Runtime has no product of either on CPUs",
            file::MODEL
        ));
    }
    if model.onnx.is_some() {
        notes.push(format!(
            "{}: a pass has changed what the model computes: it is written in operators of the export, under the names of its values",
            file::MODEL
        ));
        return notes;
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

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        let (layout, tensors) = match unchanged(model) {
            Some(file) => {
                let rewritten = self.rewritten(file, model, run)?;
                (rewritten.layout, rewritten.tensors)
            }
            None => {
                let Prepared { draft, layout, .. } = self.prepare(model, run)?;
                (layout, draft.tensors())
            }
        };
        Ok(SizeForecast {
            files: layout.iter().map(|(name, _)| name.clone()).collect(),
            bytes: layout.iter().map(|(_, pieces)| file::bytes(pieces)).sum(),
            exact: !run.estimated,
            tensors,
        })
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, _made: Option<&Made>, work: &Work) -> Result<Exported> {
        // Runtimes open it where it lies.
        let folder = &Destination::here(folder.path());
        if let Some(file) = unchanged(model) {
            return self.write_again(file, model, run, folder, work);
        }
        let Prepared { graph, draft, items, layout, notes: more } = self.prepare(model, run)?;
        let (files, seen) = writer::write_pieces(folder, &layout, &items, work)?;
        Ok(Exported {
            files,
            how: "read back: the graph and the bytes of every weight are equal to what was computed".into(),
            max_abs_error: 0.0,
            tensors: draft.tensors(),
            encodings: items.iter().map(|item| item.weight.describe()).collect(),
            held: None,
            config: None,
            notes: [notes(model, &graph, &draft.weights), more].concat(),
            weights: items.into_iter().map(|item| item.name).zip(seen).collect(),
        })
    }
}

//! ONNX: one file, or a file with external data if one file would be too large.
//!
//! Int8 weights stay int8. A linear layer whose activations are quantized becomes
//! `DynamicQuantizeLinear` and `MatMulInteger`, in the form that ONNX Runtime fuses to one integer
//! kernel. If the activations are constant, the layer is a product of rounded floats, which is computed when
//! the file is loaded. With float activations, the weights are dequantized by `DequantizeLinear`. Of an
//! embedding, only the rows that are looked up are dequantized.

mod genai;
mod notes;
mod parts;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use self::notes::{is_in_blocks, notes};
use self::parts::Part;
use super::{Exported, Format, LostResult, SizeForecast, lost_blocks};
use crate::analysis::EncoderDecoder;
use crate::contract::Planned;
use crate::error::{Error, Result, counted};
use crate::files::{Destination, LocalNames};
use crate::generation::LanguageModel;
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::onnx::proto::{DataType, TensorProto};
use crate::onnx::{Cache, Draft, InitializerLayout, ModelFile, OPSETS, Precision, Rewritten, Style, TiedHead, WeightOnly, draft, file, first_opset};
use crate::run_state::RunState;
use crate::store::writer::{self, Item, Piece, Prebuilt, WeightMeasurement, Written};
use crate::store::{Bias, BiasForm, Codes, DType, Decoded, Encoding, QuantizationSpec, Rescaled, StorageFormat, Weight, Weights};
use crate::work::Work;

/// The ONNX format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Onnx {
    /// Opset version, 17 to 24; higher versions need newer runtimes. By default 17, or 21 for weights with
    /// a scale per group
    #[serde(deserialize_with = "opset", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "cli", schemars(range(min = 17, max = 24)))]
    pub opset: Option<u32>,
    /// Floating-point precision of weights and arithmetic; int8 weights stay int8, and their layers
    /// compute in float32
    pub precision: Precision,
    /// Integer type of statically quantized activations: uint8 is best for x86, int8 for ARM and GPUs
    pub activations: ActivationType,
    /// How layers with integer weights and float activations are written (W4A16, W8A16)
    pub weight_only: WeightOnly,
    /// How an output head that is tied to an int8 embedding is written
    pub tied_head: TiedHead,
    /// Whether matrices with 16-bit floats, as after `cast`, are stored as such, and converted to 32 bits
    /// when a runtime loads the file
    pub float16_weights: bool,
    /// Whether a decoder has inputs and outputs for a KV cache, so that each step computes only new tokens;
    /// encoder-decoder models become three files
    pub cache: bool,
}

/// Integer type of statically quantized activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ActivationType {
    /// The type chosen by the quantization pass, otherwise uint8
    #[default]
    Auto,
    /// 0 to 255
    Uint8,
    /// -128 to 127
    Int8,
}

fn opset<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match Option::<u32>::deserialize(deserializer)? {
        Some(opset) if !OPSETS.contains(&opset) => Err(D::Error::custom(format!("opset {opset} is not one of {} to {}", OPSETS.start(), OPSETS.end()))),
        opset => Ok(opset),
    }
}

/// The pass that converts floats to another type.
const CAST: &str = "cast";
/// The pass that stores weights as indices into codebooks.
const PALETTIZE: &str = "palettize";

/// Note on an option without effect.
const NO_HALVES: &str = "`float16_weights` has no effect: no matrix has 16-bit floats (add `cast: { to: f16 }` to the passes)";

/// A planned export.
struct Prepared {
    graph: Graph,
    /// One file for each.
    drafts: Vec<Draft>,
    items: Vec<Item>,
    /// Indices of the items that an earlier file has too.
    repeated: BTreeSet<usize>,
    layout: file::Pieces,
    /// Notes about the KV cache and about options.
    notes: Vec<String>,
}

impl Prepared {
    fn tensors(&self) -> usize {
        self.drafts.iter().map(Draft::tensors).sum()
    }

    /// The weights of all files, each once.
    fn weights(&self) -> impl Iterator<Item = &InitializerLayout> {
        let all = self.drafts.iter().flat_map(|draft| &draft.weights).enumerate();
        all.filter(|(index, _)| !self.repeated.contains(index)).map(|(_, slot)| slot)
    }
}

impl Onnx {
    /// Plans the export of a typed graph.
    fn prepare(&self, model: &Model, run: &RunState) -> Result<Prepared> {
        let graph = model.graph()?;
        let opaque = graph.nodes().iter().find_map(|node| if let Op::Opaque(opaque) = &node.op { Some(&opaque.label) } else { None });
        // A file keeps its opset. Subgraphs that are copied from the original file need its opset or a
        // newer one.
        let of_file = model.onnx.as_ref().and_then(|file| u32::try_from(file.opset()).ok());
        let min_opset = of_file.filter(|opset| opaque.is_some() || OPSETS.contains(opset)).unwrap_or(0);
        if let Some(label) = opaque.filter(|_| min_opset > *OPSETS.end()) {
            let (oldest, newest) = (OPSETS.start(), OPSETS.end());
            return Err(Error::Unsupported {
                what: format!(
                    "{}: copying {label}, which has no typed form, from opset {min_opset} to a file of opset {oldest} to {newest}",
                    model.path.display()
                ),
                hint: format!("convert the file to opset {newest} first: `onnx.version_converter.convert_version(model, {newest})` in Python"),
            });
        }
        let file = model.onnx.as_deref();
        let precision = if self.precision == Precision::Float32 { file.map_or(Precision::Float32, ModelFile::precision) } else { self.precision };
        // Files with layers of both types keep the stored types.
        let keeps_halves = self.float16_weights || (precision == Precision::Float32 && file.is_some_and(ModelFile::is_half));
        let mut style = Style {
            opset: min_opset,
            precision,
            signed: self.activations == ActivationType::Int8 || (self.activations == ActivationType::Auto && model.signed_activations),
            weight_only: self.weight_only,
            tied_head: self.tied_head,
            cache: if self.cache { Cache::Decoder } else { Cache::None },
            input_types: file.map(ModelFile::input_types).unwrap_or_default(),
            output_types: file.map(ModelFile::output_types).unwrap_or_default(),
            ..Style::default()
        };
        if self.cache && model.image_size.get().is_some() {
            return Err(Error::option("onnx: cache", "does not apply to texts with images: remove `cache` or `sizes`"));
        }
        let is_split = self.cache && EncoderDecoder::is_in(&graph);
        let decoder = if self.cache && !is_split { Some(LanguageModel::new(model.clone())?) } else { None };
        if self.float16_weights && self.precision == Precision::Float16 {
            return Err(Error::option(
                "onnx: float16_weights",
                "has no effect with `precision: float16`, which stores all floats in 16 bits: omit one of them",
            ));
        }
        for (_, value) in graph.params() {
            let weight = model.weights.get(&value.name)?;
            match &weight.encoding {
                Encoding::Quantized(spec) => match spec.codes {
                    Codes::Integer(_) if is_in_blocks(spec) => {}
                    Codes::Integer(_) => drop(style.integers.insert(value.name.clone(), spec.clone())),
                    Codes::Palette(_) => drop(style.palettes.insert(value.name.clone(), spec.clone())),
                    Codes::Float(_) => {}
                },
                Encoding::Dense => {
                    if keeps_halves && weight.dtype == DType::F16 && weight.shape.len() > 1 {
                        style.halves.insert(value.name.clone());
                    }
                }
            }
        }
        style.opset = style.opset.max(self.opset.unwrap_or_else(|| first_opset(&graph, &style)));
        let parts = match is_split {
            true => parts::encoder_decoder(&graph, &style, model, run)?,
            false => vec![Part { names: file_names(run).map(str::to_owned), graph: graph.clone(), style }],
        };
        let (mut drafts, mut items, mut repeated, mut layout) = (Vec::new(), Vec::new(), BTreeSet::new(), Vec::new());
        let mut written: BTreeSet<String> = BTreeSet::new();
        for Part { names: [name, data_name], graph, style } in &parts {
            let mut draft = draft(graph, style, &metadata(model, run))?;
            model.onnx.iter().for_each(|file| draft.copy_descriptions(&file.model));
            let mut files = file::layout_as([name, data_name], &draft, file::LARGEST)?;
            for piece in files.iter_mut().flat_map(|(_, pieces)| pieces) {
                if let Piece::Item { index, .. } = piece {
                    *index += items.len();
                }
            }
            layout.append(&mut files);
            let again = draft.weights.iter().enumerate().filter(|(_, slot)| written.contains(&slot.weight));
            repeated.extend(again.map(|(index, _)| items.len() + index));
            written.extend(draft.weights.iter().map(|slot| slot.weight.clone()));
            items.extend(draft.weights.iter().map(|slot| item(slot, &model.weights)).collect::<Result<Vec<_>>>()?);
            drafts.push(draft);
        }
        let mut notes = Vec::new();
        if drafts.iter().all(|draft| draft.integer_heads == Some(0)) {
            notes.push(format!(
                "{}: `tied_head: int8` has no effect: no output head is tied to an int8 embedding (set `embeddings: true` of `quantize-dynamic`)",
                file::MODEL
            ));
        }
        if self.float16_weights && drafts.iter().flat_map(|draft| &draft.weights).all(|slot| !slot.widened) {
            notes.push(format!("{}: {NO_HALVES}", file::MODEL));
        }
        if let Some((decoder, draft)) = decoder.as_ref().zip(drafts.first()) {
            match genai::config(model, decoder, &graph, draft, file_names(run)[0])? {
                _ if run.file.is_some() => notes.push(format!("{} is not written, because the output is a file and not a folder", genai::FILE)),
                Ok(text) => layout.push((genai::FILE.into(), vec![Piece::Bytes(text.into_bytes())])),
                Err(reason) => notes.push(format!("{} is not written: {reason}", genai::FILE)),
            }
            notes.extend(genai::rope_limit(&graph).map(|tokens| {
                format!("{}: rotary embeddings use other frequencies in texts of more than {tokens} tokens; a text that grows beyond that must be recomputed with an empty cache", file::MODEL)
            }));
        }
        Ok(Prepared { graph, drafts, items, repeated, layout, notes })
    }

    /// Plans a model that was opened from an ONNX file, with its original graph.
    fn rewritten(&self, file: &ModelFile, model: &Model, run: &RunState) -> Result<Rewritten> {
        let options = self.options();
        let defaults = Onnx::default().options();
        // The file keeps 16-bit weights anyway.
        let is_refused = |(name, value): &(&String, &Value)| *name != "float16_weights" && defaults.get(name) != Some(value);
        if let Some((name, _)) = options.as_object().into_iter().flatten().find(is_refused) {
            return Err(Error::option(
                format!("onnx: {name}"),
                format!("{} is an .onnx model, whose graph is not changed: omit the option", model.path.display()),
            ));
        }
        let metadata = if run.history.is_empty() { BTreeMap::new() } else { metadata(model, run) };
        let metadata = metadata.into_iter().filter(|(key, value)| model.weights.metadata.get(key) != Some(value)).collect();
        let mut rewritten = file.rewrite(&model.weights, file_names(run), &metadata, file::LARGEST)?;
        let is_half = |weight: &Weight| weight.encoding == Encoding::Dense && weight.dtype == DType::F16 && weight.shape.len() > 1;
        if self.float16_weights && !model.weights.by_name.values().any(is_half) {
            rewritten.notes.push(format!("{}: {NO_HALVES}", file_names(run)[0]));
        }
        Ok(rewritten)
    }

    /// Writes a model that was opened from an ONNX file, with its original graph.
    fn write_original_graph(&self, file: &ModelFile, model: &Model, run: &RunState, folder: &Destination, work: &Work) -> Result<Exported> {
        let Rewritten { layout, items, copied, unmodified, tensors, notes } = self.rewritten(file, model, run)?;
        let (files, written) = writer::write_pieces(folder, &layout, &items, work)?;
        let measured = unmodified.iter().map(|item| writer::measure(&item.weight)).collect::<Result<Vec<_>>>()?;
        let changed = items.into_iter().zip(written).enumerate().filter(|(position, _)| !copied.contains(position)).map(|(_, weight)| weight);
        let weights: Vec<_> = changed.chain(unmodified.into_iter().zip(measured)).collect();
        let how = "read back: everything that no pass has changed is equal to the input, and the bytes of every other weight are equal to the computed ones";
        Ok(exported(how, (files, tensors), weights, notes))
    }
}

/// The result of writing an ONNX file with these weights, in which all bytes were verified.
fn exported(how: &str, (files, tensors): (Vec<Written>, usize), weights: Vec<(Item, WeightMeasurement)>, notes: Vec<String>) -> Exported {
    Exported {
        files,
        how: how.into(),
        max_abs_error: 0.0,
        tensors,
        encodings: weights.iter().map(|(item, _)| item.weight.describe()).collect(),
        stored_weights: None,
        config: None,
        notes,
        weights: weights.into_iter().map(|(item, measured)| (item.name, measured)).collect(),
    }
}

/// A weight in the form of its initializer: integers with float scales of the precision of the file, or
/// floats.
fn item(slot: &InitializerLayout, weights: &Weights) -> Result<Item> {
    let name = slot.weight.clone();
    let weight = weights.get(&name)?;
    if let Some(bias) = &slot.integer_bias {
        let form = if bias.scales { BiasForm::Scales } else { BiasForm::Integers };
        let source = Bias { name: name.clone(), values: weight.clone(), weight: weights.get(&bias.weight)?.clone(), input_scale: bias.input_scale, form };
        let name = if bias.scales { format!("{name}_scale") } else { name };
        return Ok(Item { name, weight: source.weight(), storage_format: StorageFormat::Plain });
    }
    if !weight.is_float() {
        return Err(Error::tensor(
            &name,
            format!("is {}, but the graph needs floats", weight.dtype),
            "store it as floats, or describe the model in a graph.json that does not use it",
        ));
    }
    let is_half = slot.tensors.iter().any(|tensor| tensor.data_type == DataType::Float16);
    let dtype = if is_half { DType::F16 } else { DType::F32 };
    let weight = if let Some(spec) = slot.integers.as_ref().or(slot.palette.as_ref()) {
        let spec = QuantizationSpec { scale_dtype: dtype, ..spec.clone() };
        let source = Rescaled { upstream: weight.source(), affine: spec.clone(), name: name.clone() };
        weight.then(dtype, Encoding::Quantized(spec), Arc::new(source))
    } else {
        let source = Decoded { upstream: weight.source(), dtype, name: name.clone() };
        weight.then(dtype, Encoding::Dense, Arc::new(source))
    };
    Ok(Item { name, weight, storage_format: slot.storage_format })
}

/// The ONNX file that a model was opened from, if no pass has changed the graph.
fn original_file(model: &Model) -> Option<&ModelFile> {
    model.onnx.as_deref().filter(|_| model.changed_graph.is_none())
}

/// Names of the model file and of its external data file.
fn file_names(run: &RunState) -> [&str; 2] {
    [run.file.as_deref().unwrap_or(file::MODEL), run.data_file.as_deref().unwrap_or(file::DATA)]
}

/// Metadata of the file: the model type and the passes, and the metadata of an ONNX input.
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

impl Format for Onnx {
    fn name(&self) -> &'static str {
        "onnx"
    }

    fn options(&self) -> Value {
        serde_json::to_value(self).unwrap_or(Value::Null)
    }

    fn lost_result(&self, model: &Model, run: &RunState) -> Option<LostResult> {
        if let Some(lost) = lost_blocks(model) {
            return Some(lost);
        }
        let is_palette = |weight: &&Weight| matches!(&weight.encoding, Encoding::Quantized(spec) if spec.codes.is_palette());
        let palettes = original_file(model).map_or(0, |_| model.weights.by_name.values().filter(is_palette).count());
        if palettes > 0 {
            return Some(LostResult {
                pass: PALETTIZE,
                reason: format!(
                    "writes the values of {} as floats, which are not smaller, because the graph of an .onnx file is not changed",
                    counted(palettes, "palettized weight")
                ),
                remedy: "palettize the model folder from which the file was exported, or use `quantize-dynamic` or `cast: { to: f16 }`".into(),
            });
        }
        let cast = run.history.iter().rfind(|applied| applied.name == CAST)?;
        let to = cast.options.get("to").and_then(Value::as_str).filter(|to| ["f16", "bf16"].contains(to))?;
        let is_kept = original_file(model).is_some() || self.precision == Precision::Float16 || (to == "f16" && self.float16_weights);
        let remedy = match to {
            "f16" => {
                "set `precision: float16`, as in `--export 'onnx: { precision: float16 }'`, or `float16_weights: true` for arithmetic in 32 bits, or convert with `to: f32`"
            }
            _ => "ONNX has only float32 (`to: f32`) and float16: `to: f16` with `--export 'onnx: { precision: float16 }'`",
        };
        let reason = format!("stores weights as float32, so that values that `cast` has rounded to {to} save no bytes");
        (!is_kept).then(|| LostResult { pass: CAST, reason, remedy: remedy.into() })
    }

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        let (layout, tensors) = match original_file(model) {
            Some(file) => {
                let rewritten = self.rewritten(file, model, run)?;
                (rewritten.layout, rewritten.tensors)
            }
            None => {
                let prepared = self.prepare(model, run)?;
                let tensors = prepared.tensors();
                (prepared.layout, tensors)
            }
        };
        Ok(SizeForecast {
            files: layout.iter().map(|(name, _)| name.clone()).collect(),
            bytes: layout.iter().map(|(_, pieces)| file::bytes(pieces)).sum(),
            exact: !run.is_estimated(),
            tensors,
        })
    }

    fn planned(&self, model: &Model, run: &RunState) -> Result<Option<Planned>> {
        if let Some(file) = original_file(model) {
            return Ok(Some(Planned::onnx(vec![file.model.clone()], false)));
        }
        let with_initializers = |Draft { mut model, weights, .. }: Draft| {
            let initializers = weights.into_iter().flat_map(|weight| weight.tensors).map(|tensor| TensorProto {
                name: Some(tensor.name),
                data_type: Some(tensor.data_type as i32),
                ..TensorProto::default()
            });
            if let Some(graph) = &mut model.graph {
                graph.initializer.extend(initializers);
            }
            model
        };
        let drafts = self.prepare(model, run)?.drafts;
        Ok(Some(Planned::onnx(drafts.into_iter().map(with_initializers).collect(), true)))
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, _prebuilt: Option<&Prebuilt>, work: &Work) -> Result<Exported> {
        // Runtimes open ONNX files from a local disk.
        let folder = &Destination::local(folder.path());
        if let Some(file) = original_file(model) {
            return self.write_original_graph(file, model, run, folder, work);
        }
        let prepared = self.prepare(model, run)?;
        let (files, measured) = writer::write_pieces(folder, &prepared.layout, &prepared.items, work)?;
        let (tensors, slots) = (prepared.tensors(), prepared.weights().collect::<Vec<_>>());
        let notes = [notes(model, &prepared.graph, &slots), prepared.notes.clone()].concat();
        let weights = prepared.items.into_iter().zip(measured).enumerate().filter(|(index, _)| !prepared.repeated.contains(index));
        let weights: Vec<_> = weights.map(|(_, weight)| weight).collect();
        let how = "read back: the graph and the bytes of every weight are equal to the computed ones";
        Ok(exported(how, (files, tensors), weights, notes))
    }
}

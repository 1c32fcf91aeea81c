//! Safetensors folders, in three layouts.
//!
//! - `dense`: every weight as floats, for any reader; quantized weights are dequantized.
//! - `compressed-tensors`: integer weights as `int-quantized` or, weight-only, `pack-quantized`;
//!   transformers with compressed-tensors and vLLM load the folder directly.
//! - `sparse`: a bitmask and the non-zero values, if that is smaller; only `compress` reads it
//!   (see [`store::sparse`](crate::store::sparse)).
//!
//! Weights encoded as indices into codebooks (palettes) keep that encoding in all layouts except
//! `dense`; only `compress` reads them.

mod module_names;
mod original;
mod planned;
mod quantization;
mod support;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ByteSize, Exported, Format, LostResult, SizeForecast, lost_blocks};
use crate::contract::Planned;
use crate::error::{Error, Result, counted};
use crate::files::Destination;
use crate::kernel::{bitmask, convert};
use crate::model::{Config, Model, class, is_embedding};
use crate::run_state::{Assignment, RunState};
use crate::store::writer::{self, Item, Prebuilt};
use crate::store::{
    ActivationScheme, Block, BlockSink, Bytes, DType, Encoding, FloatScale, Granularity, QuantizationSpec, StorageFormat, View, Weight, WeightSource, Weights,
    ZeroOrigin, block_elements, sparse,
};
use crate::work::Work;

/// Layout of the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Layout {
    /// compressed-tensors if a weight is quantized, otherwise dense
    #[default]
    Auto,
    /// Plain floats, for any reader
    Dense,
    /// Quantized weights in the format of transformers and vLLM
    CompressedTensors,
    /// Bitmask and non-zero values if smaller; only compress reads it
    Sparse,
}

/// The safetensors format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Safetensors {
    /// Layout of the weights
    pub layout: Layout,
    /// Maximum size of a file: larger checkpoints are split; a larger tensor gets a separate file
    pub shard_size: ByteSize,
}

impl Default for Safetensors {
    fn default() -> Self {
        Self { layout: Layout::Auto, shard_size: ByteSize(5_000_000_000) }
    }
}

impl Safetensors {
    /// The format with this layout and default options.
    pub fn with_layout(layout: Layout) -> Self {
        Self { layout, ..Self::default() }
    }

    /// The tensors to write. `nonzeros` returns the number of non-zero values of a weight.
    fn items(&self, model: &Model, run: &RunState, mut nonzeros: impl FnMut(&str, &Weight) -> Result<u64>) -> Result<Vec<Item>> {
        let keeps_original = original::are_kept(model, self.layout);
        let item = |(name, weight): (&String, &Weight)| {
            let original = weight.original_format.filter(|_| keeps_original);
            let (weight, storage_format) = match (self.layout, original) {
                (_, Some(format)) => (weight.clone(), StorageFormat::Original(format)),
                _ if !keeps_encoding(model, self.layout, name) => (weight.dense(name), StorageFormat::Plain),
                (Layout::Sparse, None) => {
                    let nonzeros = nonzeros(name, weight)?;
                    let size = value_size(weight);
                    let bytes = sparse::stored_bytes(weight.elements() as u64, nonzeros, size, weight.shape.len() as u64);
                    let is_smaller = eligible_for_sparse(weight) && bytes < weight.value_bytes();
                    let otherwise = if is_palette(weight) || (weight.value_bytes() < weight.elements() as u64 && is_packed(name, weight)) {
                        StorageFormat::Packed
                    } else {
                        StorageFormat::Plain
                    };
                    (weight.clone(), if is_smaller { StorageFormat::Sparse { nonzeros } } else { otherwise })
                }
                _ => {
                    self.require_matrix_layout(model, name, weight)?;
                    (weight.clone(), if is_packed(name, weight) { StorageFormat::Packed } else { StorageFormat::Plain })
                }
            };
            Ok(Item { name: name.clone(), weight, storage_format })
        };
        let mut items: Vec<Item> = model.weights.by_name.iter().map(item).collect::<Result<_>>()?;
        if !keeps_original && matches!(self.layout, Layout::Auto | Layout::CompressedTensors) {
            items.extend(shared_parameters(model));
        }
        if !keeps_original {
            items.extend(input_scales(model, self.layout));
        }
        let own = |item: Item| Ok(run.own_rows(&item.name, &item.weight)?.map(|weight| Item { weight, ..item }));
        let mut items: Vec<Item> = items.into_iter().map(own).filter_map(Result::transpose).collect::<Result<_>>()?;
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    /// Checks that compressed-tensors can represent a weight.
    fn require_matrix_layout(&self, model: &Model, name: &str, weight: &Weight) -> Result<()> {
        let (what, hint) = match (&weight.encoding, is_palette(weight)) {
            (_, true) if self.layout == Layout::CompressedTensors => (
                "is encoded as indices into codebooks (palettes), which compressed-tensors does not support".to_owned(),
                "export with layout: auto or layout: dense",
            ),
            (Encoding::Quantized(_), false) if model.config.has_conv1d() => (
                format!(
                    "is a quantized weight of a {} model, which stores layers as [in, out]: compressed-tensors does not support this",
                    model.config.model_type()
                ),
                "export with layout: sparse or layout: dense, or do not quantize these layers",
            ),
            _ => return Ok(()),
        };
        Err(Error::tensor(name, what, hint))
    }

    fn file_layout(&self, items: &[Item], model: &Model) -> Result<writer::FileLayout> {
        let mut metadata = model.weights.metadata.clone();
        // Some readers require metadata that names a framework.
        metadata.entry("format".into()).or_insert_with(|| "pt".into());
        if items.iter().any(|item| matches!(item.storage_format, StorageFormat::Sparse { .. })) {
            metadata.insert(sparse::MARK.into(), sparse::VERSION.into());
            if let Some(item) = items.iter().find(|item| item.storage_format == StorageFormat::Plain && item.name.ends_with(".bitmask")) {
                return Err(Error::tensor(&item.name, "has the name of the mask of a sparse tensor", "rename it, or choose another layout"));
            }
        }
        let mut names = std::collections::BTreeSet::new();
        for part in items.iter().flat_map(|item| item.storage_format.parts(&item.name, &item.weight)) {
            if !names.insert(part.name.clone()) {
                return Err(Error::tensor(
                    &part.name,
                    "would be written twice: the scales or the mask of another tensor have this name",
                    "rename it, or add the other tensor to `ignore`",
                ));
            }
        }
        quantization::require_free_names(items, model)?;
        writer::FileLayout::new(items, &metadata, &model.weights.folders, self.shard_size.0)
    }

    fn config(&self, model: &Model, run: &RunState, items: &[Item]) -> Config {
        let mut config = original::config(model, items);
        let integers = items.iter().any(|item| item.weight.encoding != Encoding::Dense && !original::is_kept(item));
        let palettes = quantization::palettes(items);
        let sparse = items.iter().any(|item| matches!(item.storage_format, StorageFormat::Sparse { .. }));
        let described = quantization::is_needed(items, model, run).then(|| quantization::describe(items, model, run));
        // Other libraries support int8 only in linear layers and embeddings, and ignore graph.json: they
        // would silently compute something else.
        let convolutions = items.iter().any(|item| item.weight.encoding != Encoding::Dense && class(&item.name, &item.weight) == "Conv2d");
        let own = sparse || palettes.is_some() || requires_graph_file(model) || (integers && convolutions);
        if own {
            config.mark_own();
        }
        if sparse || (integers && own) {
            let own = crate::model::OWN_METHOD;
            let layout = if sparse {
                "sparse"
            } else if palettes.is_some() {
                "palettes"
            } else {
                "integers"
            };
            let mut description = json!({ "quant_method": own, "layout": layout, (own): described });
            if let Some(palettes) = palettes {
                description["palettes"] = palettes;
            }
            config.set("quantization_config", description);
        } else if let Some(described) = described {
            config.set("quantization_config", described);
        }
        config
    }

    /// The weights as stored in the files, if quantized weights of modules are stored as floats.
    fn stored_weights(&self, model: &Model) -> Option<Weights> {
        let dense = |(name, weight): &(&String, &Weight)| weight.encoding != Encoding::Dense && !keeps_encoding(model, self.layout, name);
        let floats: Vec<_> = model.weights.by_name.iter().filter(dense).map(|(name, weight)| (name.clone(), weight.dense(name))).collect();
        if self.layout == Layout::Dense || floats.is_empty() {
            return None;
        }
        let mut weights = model.weights.clone();
        weights.by_name.extend(floats);
        Some(weights)
    }

    fn notes(&self, model: &Model, run: &RunState, items: &[Item], measured: &[writer::WeightMeasurement]) -> Vec<String> {
        let mut notes = original::notes(model, items);
        let dropped = quantization::dropped_keys(items, model, run);
        if !dropped.is_empty() {
            notes.push(format!("`{}` of the input's quantization_config is not written: it describes the original weights", dropped.join("`, `")));
        }
        let sparse = items.iter().filter(|item| matches!(item.storage_format, StorageFormat::Sparse { .. })).count();
        if sparse > 0 {
            notes.push(format!(
                "{} stored sparse: only compress reads this folder; `compress densify` converts it back without loss",
                counted(sparse, "tensor")
            ));
        }
        // Custom passes do not state the origin of zeros: rounding produces few, pruning many.
        let is_pruned = |item: &Item, measured: &writer::WeightMeasurement| {
            let grew = measured.changed && measured.difference.zeros_after > measured.difference.zeros_before + item.weight.elements() as u64 / 10;
            grew || item.weight.zero_origin == Some(ZeroOrigin::Pruning)
        };
        let (mut zeros, mut elements) = (0, 0);
        for (item, measured) in items.iter().zip(measured) {
            if is_pruned(item, measured) && !matches!(item.storage_format, StorageFormat::Sparse { .. }) {
                zeros += measured.difference.zeros_after;
                elements += item.weight.elements() as u64;
            }
        }
        let pruning = run.history.iter().any(|applied| applied.zeroes);
        if pruning && elements > 0 && self.layout != Layout::Sparse {
            notes.push(format!(
                "{:.0} % zeros in the pruned tensors, which are stored dense: this reduces neither size nor latency; add `layout: sparse` to store fewer bytes",
                100.0 * zeros as f64 / elements as f64
            ));
        }
        let quantized = |name: &String| model.weights.by_name.get(name).is_some_and(|weight| weight.encoding != Encoding::Dense);
        if let Some(item) = items.iter().find(|item| quantized(&item.name) && self.layout != Layout::Dense && !keeps_encoding(model, self.layout, &item.name)) {
            notes.push(format!(
                "`{}` and other quantized weights of modules with separate files are stored dequantized, and the inputs of these layers are not quantized: sentence-transformers supports only floats",
                item.name
            ));
        }
        let palettes = items.iter().filter(|item| is_palette(&item.weight)).count();
        if palettes > 0 {
            notes.push(format!(
                "{} stored as indices into codebooks (palettes): only compress and its ONNX export read this folder; `compress densify` converts it to floats; `model_type` is marked so that other libraries reject the folder",
                counted(palettes, "tensor")
            ));
        }
        if sparse == 0 && requires_graph_file(model) {
            notes.push("config.json cannot describe this model, so graph.json describes it, which only compress and its ONNX export read; `model_type` is marked so that other libraries reject the folder".to_owned());
        } else if sparse == 0 && palettes == 0 {
            notes.extend(support::notes(items, model));
        }
        notes
    }
}

/// Scales and zero points of heads that are tied to a quantized embedding: loaders share the integers with
/// the head, but not these.
fn shared_parameters(model: &Model) -> Vec<Item> {
    let mut items = Vec::new();
    for (alias, original) in model.tied_names() {
        let Some(weight) = model.weights.by_name.get(original).filter(|_| !model.weights.by_name.contains_key(alias)) else { continue };
        let Encoding::Quantized(spec) = &weight.encoding else { continue };
        if spec.codes.is_palette() {
            continue;
        }
        let mut item = |suffix: &str, dtype, zero_points| {
            let source = Parameters { weight: weight.clone(), dtype, zero_points };
            let weight = Weight::new(dtype, spec.scale_shape(&weight.shape), Encoding::Dense, std::sync::Arc::new(source));
            items.push(Item { name: format!("{alias}{suffix}"), weight, storage_format: StorageFormat::Plain });
        };
        item("_scale", spec.scale_format().stored_dtype(spec.scale_dtype), false);
        if !spec.symmetric {
            item("_zero_point", DType::I8, true);
        }
    }
    items
}

/// Scales and zero points of statically quantized activations, one of each per layer.
fn input_scales(model: &Model, layout: Layout) -> Vec<Item> {
    let mut items = Vec::new();
    for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| keeps_encoding(model, layout, name)) {
        let Encoding::Quantized(QuantizationSpec { activations, scale_dtype, .. }) = &weight.encoding else { continue };
        let Some(params) = activations.parameters() else { continue };
        let is_global = matches!(activations, ActivationScheme::Float(_, FloatScale::Relative(_)));
        let (suffix, scale_dtype) = (activations.scale_name(), if is_global { &DType::F32 } else { scale_dtype });
        let module = name.strip_suffix("weight").unwrap_or(name);
        let mut scale = vec![0; scale_dtype.bitsize() / 8];
        let written = convert::from_f32(*scale_dtype, &[params.scale()], &mut scale);
        debug_assert!(written, "scales are floats");
        let mut item = |suffix: &str, dtype, bytes| {
            let weight = Weight::new(dtype, vec![1], Encoding::Dense, std::sync::Arc::new(Bytes { dtype, bytes }));
            items.push(Item { name: format!("{module}{suffix}"), weight, storage_format: StorageFormat::Plain });
        };
        item(suffix, *scale_dtype, scale);
        if let Some(zero_point) = params.zero_point {
            item("input_zero_point", DType::I8, vec![zero_point as u8]);
        }
    }
    items
}

/// The scales or the zero points of a quantized weight in the shape of the file, as a weight.
struct Parameters {
    weight: Weight,
    dtype: DType,
    zero_points: bool,
}

impl Parameters {
    /// Appends the parameters of a block that starts at a row.
    fn add(&self, view: &View, row: usize, bytes: &mut Vec<u8>) {
        let Some((affine, width)) = view.affine else { return };
        let values = if self.zero_points { view.zero_points } else { view.scales };
        match affine.granularity {
            // The scale of the tensor is part of every block.
            Granularity::Tensor if row > 0 => {}
            Granularity::Block([high, _]) => {
                let line = affine.granularity.groups(width) * self.dtype.bitsize() / 8;
                let first = (row..).zip(values.chunks(line.max(1))).filter(|(row, _)| row.is_multiple_of(high.max(1)));
                first.for_each(|(_, line)| bytes.extend_from_slice(line));
            }
            Granularity::Tensor | Granularity::Channel | Granularity::Group(_) => bytes.extend_from_slice(values),
        }
    }
}

impl WeightSource for Parameters {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let most = block_elements(unit).saturating_mul((self.dtype.bitsize() / 8).max(1));
        let (width, mut row, mut bytes) = (self.weight.row().max(1), 0, Vec::new());
        self.weight.visit(width, &mut |block| {
            self.add(&block.now, row, &mut bytes);
            row += block.now.elements() / width;
            while bytes.len() > most {
                sink(Block::untouched(View::dense(self.dtype, &bytes[..most])))?;
                bytes.drain(..most);
            }
            Ok(())
        })?;
        if bytes.is_empty() { Ok(()) } else { sink(Block::untouched(View::dense(self.dtype, &bytes))) }
    }
}

/// Whether a weight is stored with its encoding. Weights of modules are stored as floats, which is all
/// that sentence-transformers supports.
fn keeps_encoding(model: &Model, layout: Layout, name: &str) -> bool {
    layout == Layout::Sparse || (layout != Layout::Dense && model.weights.folder(name).is_none())
}

/// Whether other libraries, which ignore `graph.json`, would open the folder and compute something else.
fn requires_graph_file(model: &Model) -> bool {
    // No library opens the folder of an own network, which has no model_type.
    let has_type = model.changed_graph.is_some() || !model.config.model_type().is_empty();
    has_type && model.needs_graph_file()
}

/// Size of a stored value in bytes.
fn value_size(weight: &Weight) -> u64 {
    if weight.encoding == Encoding::Dense { weight.dtype.bitsize() as u64 / 8 } else { 1 }
}

/// Whether a weight can be stored sparse: its values must be at least one byte wide.
fn eligible_for_sparse(weight: &Weight) -> bool {
    let is_narrow = matches!(&weight.encoding, Encoding::Quantized(spec) if spec.codes.is_always_packed());
    (weight.is_float() || weight.encoding != Encoding::Dense) && !is_narrow && weight.elements() > 0
}

/// Whether the values of a quantized weight are bit-packed. vLLM has kernels for weight-only integers
/// only if they are packed. transformers reads int8 with a single scale or with zero points, and
/// embeddings, only if they are not packed. No consumer reads unpacked zero points of fewer than 8 bits.
fn is_packed(name: &str, weight: &Weight) -> bool {
    match &weight.encoding {
        Encoding::Dense => false,
        Encoding::Quantized(spec) if !spec.codes.is_integer() => spec.codes.is_always_packed(),
        Encoding::Quantized(_) if is_embedding(name, weight) => false,
        Encoding::Quantized(spec) => {
            let (is_single, is_int8) = (spec.granularity == Granularity::Tensor, spec.codes.bits() == 8);
            let is_packable = if is_int8 { spec.symmetric && !is_single } else { spec.symmetric || !is_single };
            // Integers for kernels with int8 activations have one byte each.
            let has_packed_kernels = match spec.activations {
                ActivationScheme::None => true,
                ActivationScheme::Float(..) => spec.codes.bits() == 4,
                ActivationScheme::DynamicToken | ActivationScheme::Static(_) => false,
            };
            weight.shape.len() == 2 && has_packed_kernels && is_packable
        }
    }
}

fn is_palette(weight: &Weight) -> bool {
    matches!(&weight.encoding, Encoding::Quantized(spec) if spec.codes.is_palette())
}

impl Format for Safetensors {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn options(&self) -> Value {
        serde_json::to_value(self).unwrap_or(Value::Null)
    }

    fn streams(&self) -> bool {
        true
    }

    fn lost_result(&self, model: &Model, _run: &RunState) -> Option<LostResult> {
        lost_blocks(model)
    }

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        if model.onnx.is_some() {
            return Err(Error::Unsupported {
                what: format!("{}: writing an .onnx model as safetensors, which cannot represent a graph,", model.path.display()),
                hint: "omit `export`, or export `onnx`; the pass `dequantize` converts quantized weights to floats".into(),
            });
        }
        let items = self.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
        let layout = self.file_layout(&items, model)?;
        Ok(SizeForecast {
            files: layout.names(),
            bytes: layout.bytes(),
            exact: self.layout != Layout::Sparse && !run.is_estimated(),
            tensors: layout.tensors(),
        })
    }

    fn planned(&self, model: &Model, run: &RunState) -> Result<Option<Planned>> {
        planned::folder(self, model, run)
    }

    fn weights_by_file(&self, model: &Model, run: &RunState) -> Result<Option<Vec<Vec<Assignment>>>> {
        let items = self.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
        let assignment = |item: &Item| Assignment {
            name: item.name.clone(),
            bytes: item.weight.stored_bytes.max(1),
            rows: item.weight.all_rows().end,
            // Whether a weight is stored sparse depends on the zeros in all of its rows.
            row_multiple: if self.layout == Layout::Sparse && eligible_for_sparse(&item.weight) {
                None
            } else {
                item.storage_format.row_alignment(&item.weight)
            },
        };
        let by_file = self.file_layout(&items, model)?.items_by_file();
        Ok(Some(by_file.into_iter().map(|file| file.into_iter().filter_map(|index| items.get(index)).map(assignment).collect()).collect()))
    }

    fn linked_bytes(&self, model: &Model, run: &RunState, prebuilt: &Prebuilt) -> Result<u64> {
        let items = self.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
        Ok(self.file_layout(&items, model)?.linked_bytes(prebuilt))
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, prebuilt: Option<&Prebuilt>, work: &Work) -> Result<Exported> {
        let mut nonzeros: BTreeMap<&str, u64> = BTreeMap::new();
        if let Some(prebuilt) = prebuilt {
            nonzeros = prebuilt.items.iter().filter_map(|(name, measured)| Some((name.as_str(), measured.first()?.nonzeros?))).collect();
        } else if self.layout == Layout::Sparse {
            let jobs: Vec<(&String, &Weight)> = model.weights.by_name.iter().filter(|(name, w)| run.writes(name) && eligible_for_sparse(w)).collect();
            let counts = work.run(
                "Counting zeros",
                &jobs,
                |(_, w)| w.stored_bytes,
                |(_, weight)| {
                    let mut count = 0;
                    weight.visit(1, &mut |block| {
                        count += bitmask::count(block.now.values, value_size(weight) as usize);
                        work.advance(block.before.values.len() as u64)
                    })?;
                    Ok(count)
                },
            )?;
            nonzeros = jobs.into_iter().map(|(name, _)| name.as_str()).zip(counts).collect();
        }
        let items = self.items(model, run, |name, weight| Ok(nonzeros.get(name).copied().unwrap_or(weight.elements() as u64)))?;
        let layout = self.file_layout(&items, model)?;
        let (files, measured) = writer::write(folder, &items, &layout, prebuilt, work)?;
        Ok(Exported {
            files,
            how: "read back: the header is equal to the written one, and the bytes of every tensor are equal to the computed ones".into(),
            max_abs_error: 0.0,
            tensors: layout.tensors(),
            encodings: items.iter().map(Item::describe).collect(),
            stored_weights: self.stored_weights(model),
            config: Some(self.config(model, run, &items)),
            notes: self.notes(model, run, &items, &measured),
            weights: items.into_iter().map(|item| item.name).zip(measured).collect(),
        })
    }
}

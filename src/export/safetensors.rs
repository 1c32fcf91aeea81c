//! Safetensors folders, in three layouts.
//!
//! - `dense`: every weight as floats, for any reader; quantized weights as the floats they stand for.
//! - `compressed-tensors`: integer weights as `int-quantized` or, weight-only, `pack-quantized`; transformers with
//!   compressed-tensors and vLLM load the folder as it is.
//! - `sparse`: a bitmask and the values that are not zero, where that is smaller; only `compress` reads it
//!   (see [`store::sparse`](crate::store::sparse)).
//!
//! Weights that are places in palettes stay so in all but `dense`; only `compress` reads them.

mod quantization;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ByteSize, Exported, Format, SizeForecast};
use crate::error::{Error, Result};
use crate::files::Destination;
use crate::kernel::{bitmask, convert};
use crate::model::{Config, Model, class, is_embedding};
use crate::run_state::{Dealt, RunState};
use crate::store::writer::{self, Item, Made};
use crate::store::{
    ActivationScheme, Affine, Block, BlockSink, Bytes, Codes, DType, Encoding, Granularity, StorageFormat, View, Weight, WeightSource, Weights, sparse,
};
use crate::work::Work;

/// How weights are laid out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// compressed-tensors when something is quantized, else dense
    #[default]
    Auto,
    /// Plain floats, for any reader
    Dense,
    /// Quantized weights as transformers and vLLM read them
    CompressedTensors,
    /// Bitmask and values where smaller; only compress reads it
    Sparse,
}

/// The safetensors format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Safetensors {
    /// How weights are laid out
    pub layout: Layout,
    /// Largest size of a file; larger checkpoints are split, a larger tensor gets a file of its own
    pub shard_size: ByteSize,
}

impl Default for Safetensors {
    fn default() -> Self {
        Self { layout: Layout::Auto, shard_size: ByteSize(5_000_000_000) }
    }
}

impl Safetensors {
    /// This layout, everything else by default.
    pub fn layout(layout: Layout) -> Self {
        Self { layout, ..Self::default() }
    }

    fn items(&self, model: &Model, run: &RunState, mut kept: impl FnMut(&str, &Weight) -> Result<u64>) -> Result<Vec<Item>> {
        let item = |(name, weight): (&String, &Weight)| {
            let (weight, storage_format) = match self.layout {
                _ if !keeps_encoding(model, self.layout, name) => (weight.dense(name), StorageFormat::Plain),
                Layout::Sparse => {
                    let kept = kept(name, weight)?;
                    let size = value_size(weight);
                    let bytes = sparse::stored_bytes(weight.elements() as u64, kept, size, weight.shape.len() as u64);
                    let smaller = eligible_for_sparse(weight) && bytes < weight.value_bytes();
                    let otherwise = if is_palette(weight) || (weight.value_bytes() < weight.elements() as u64 && is_packed(name, weight)) {
                        StorageFormat::Packed
                    } else {
                        StorageFormat::Plain
                    };
                    (weight.clone(), if smaller { StorageFormat::Sparse { kept } } else { otherwise })
                }
                _ => {
                    self.require_matrix_layout(model, name, weight)?;
                    (weight.clone(), if is_packed(name, weight) { StorageFormat::Packed } else { StorageFormat::Plain })
                }
            };
            Ok(Item { name: name.clone(), weight, storage_format })
        };
        let mut items: Vec<Item> = model.weights.by_name.iter().map(item).collect::<Result<_>>()?;
        if matches!(self.layout, Layout::Auto | Layout::CompressedTensors) {
            items.extend(shared_scales(model));
        }
        items.extend(input_scales(model, self.layout));
        let own = |item: Item| Ok(run.own(&item.name, &item.weight)?.map(|weight| Item { weight, ..item }));
        let mut items: Vec<Item> = items.into_iter().map(own).filter_map(Result::transpose).collect::<Result<_>>()?;
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    fn require_matrix_layout(&self, model: &Model, name: &str, weight: &Weight) -> Result<()> {
        let (what, hint) = match (&weight.encoding, is_palette(weight)) {
            (_, true) if self.layout == Layout::CompressedTensors => {
                ("is stored as places in palettes, which compressed-tensors has none of".to_owned(), "export with layout: auto or layout: dense")
            }
            (Encoding::Affine(_), false) if model.config.has_conv1d() => (
                format!(
                    "is a quantized weight of a {} model, whose layers are stored as [in, out]: compressed-tensors cannot express them",
                    model.config.model_type()
                ),
                "export with layout: sparse or layout: dense, or leave these layers alone",
            ),
            _ => return Ok(()),
        };
        Err(Error::tensor(name, what, hint))
    }

    fn layout_of(&self, items: &[Item], model: &Model) -> Result<writer::FileLayout> {
        let mut metadata = model.weights.metadata.clone();
        // Readers refuse metadata that does not name a framework.
        metadata.entry("format".into()).or_insert_with(|| "pt".into());
        if items.iter().any(|item| matches!(item.storage_format, StorageFormat::Sparse { .. })) {
            metadata.insert(sparse::MARK.into(), sparse::VERSION.into());
            if let Some(item) = items.iter().find(|item| item.storage_format == StorageFormat::Plain && item.name.ends_with(".bitmask")) {
                return Err(Error::tensor(&item.name, "is named like the mask of a sparse tensor", "rename it, or choose another layout"));
            }
        }
        let mut names = std::collections::BTreeSet::new();
        for part in items.iter().flat_map(|item| item.storage_format.parts(&item.name, &item.weight)) {
            if !names.insert(part.name.clone()) {
                return Err(Error::tensor(
                    &part.name,
                    "would be written twice: another tensor's scales or mask have this name",
                    "rename it, or add the other tensor to `ignore`",
                ));
            }
        }
        writer::FileLayout::new(items, &metadata, &model.weights.folders, self.shard_size.0)
    }

    fn config(&self, model: &Model, run: &RunState, items: &[Item]) -> Config {
        let mut config = model.config.clone();
        let integers = items.iter().any(|item| item.weight.encoding != Encoding::Dense);
        let palettes = quantization::palettes(items);
        let sparse = items.iter().any(|item| matches!(item.storage_format, StorageFormat::Sparse { .. }));
        let described = quantization::is_needed(items, model, run).then(|| quantization::describe(items, model, run));
        // Others know int8 in linear layers and embeddings only, and nothing of a graph.json: they would silently
        // compute something else.
        let convolutions = items.iter().any(|item| item.weight.encoding != Encoding::Dense && class(&item.name, &item.weight) == "Conv2d");
        let own = sparse || palettes.is_some() || model.needs_graph_file() || (integers && convolutions);
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

    /// The weights as the files hold them, where floats take the place of quantized weights of modules.
    fn held(&self, model: &Model) -> Option<Weights> {
        let dense = |(name, weight): &(&String, &Weight)| weight.encoding != Encoding::Dense && !keeps_encoding(model, self.layout, name);
        let floats: Vec<_> = model.weights.by_name.iter().filter(dense).map(|(name, weight)| (name.clone(), weight.dense(name))).collect();
        if self.layout == Layout::Dense || floats.is_empty() {
            return None;
        }
        let mut weights = model.weights.clone();
        weights.by_name.extend(floats);
        Some(weights)
    }

    fn notes(&self, model: &Model, run: &RunState, items: &[Item], seen: &[writer::WeightMeasurement]) -> Vec<String> {
        let mut notes = Vec::new();
        let left_out = quantization::left_out(items, model, run);
        if !left_out.is_empty() {
            notes.push(format!("`{}` of the input's quantization_config is left out: it describes the weights as they were", left_out.join("`, `")));
        }
        let sparse = items.iter().filter(|item| matches!(item.storage_format, StorageFormat::Sparse { .. })).count();
        if sparse > 0 {
            notes.push(format!("{sparse} tensors are stored sparse: only compress reads this folder, `compress densify` brings it back bit for bit"));
        }
        // Rounding alone makes a few zeros; pruning makes many.
        let pruned =
            |elements: u64, seen: &writer::WeightMeasurement| seen.changed && seen.difference.zeros_after > seen.difference.zeros_before + elements / 10;
        let (mut zeros, mut elements) = (0, 0);
        for (item, seen) in items.iter().zip(seen) {
            let count = item.weight.elements() as u64;
            if pruned(count, seen) && !matches!(item.storage_format, StorageFormat::Sparse { .. }) {
                zeros += seen.difference.zeros_after;
                elements += count;
            }
        }
        let pruning = run.history.iter().any(|applied| applied.zeroes);
        if pruning && elements > 0 && self.layout != Layout::Sparse {
            notes.push(format!(
                "{:.0} % zeros in the pruned tensors, stored dense: no size gain and no speed-up by themselves; add `layout: sparse` to store fewer bytes",
                100.0 * zeros as f64 / elements as f64
            ));
        }
        let quantized = |name: &String| model.weights.by_name.get(name).is_some_and(|weight| weight.encoding != Encoding::Dense);
        if let Some(item) = items.iter().find(|item| quantized(&item.name) && self.layout != Layout::Dense && !keeps_encoding(model, self.layout, &item.name)) {
            notes.push(format!(
                "`{}` and other quantized weights of modules with files of their own are stored as the floats that they stand for, and inputs of these layers are not quantized: sentence-transformers reads nothing else",
                item.name
            ));
        }
        let palettes = items.iter().filter(|item| is_palette(&item.weight)).count();
        if palettes > 0 {
            notes.push(format!("{palettes} tensors are stored as places in palettes: only compress and its ONNX export read this folder, `compress densify` makes floats of them; `model_type` is marked so that other libraries refuse it"));
        }
        if sparse == 0 && model.needs_graph_file() {
            notes.push("config.json cannot say what this model computes: graph.json does, which only compress and its ONNX export read; `model_type` is marked so that other libraries refuse the folder".to_owned());
        } else if sparse == 0 && palettes == 0 {
            notes.extend(quantization::notes(items, model));
        }
        notes
    }
}

/// A head that is tied to a quantized embedding is loaded with the embedding's integers, and needs scales of its own.
fn shared_scales(model: &Model) -> impl Iterator<Item = Item> {
    model.tied_names().into_iter().filter_map(|(alias, original)| {
        let weight = model.weights.by_name.get(original)?;
        let Encoding::Affine(affine) = &weight.encoding else { return None };
        if affine.codes.is_palette() {
            return None;
        }
        let source = Scales { of: weight.clone(), dtype: affine.scale_dtype };
        let scales = Weight::new(affine.scale_dtype, affine.scale_shape(&weight.shape), Encoding::Dense, std::sync::Arc::new(source));
        (!model.weights.by_name.contains_key(alias)).then(|| Item { name: format!("{alias}_scale"), weight: scales, storage_format: StorageFormat::Plain })
    })
}

/// What static activations are quantized by, one scale and zero point for each layer.
fn input_scales(model: &Model, layout: Layout) -> Vec<Item> {
    let mut items = Vec::new();
    for (name, weight) in model.weights.by_name.iter().filter(|(name, _)| keeps_encoding(model, layout, name)) {
        let Encoding::Affine(Affine { activations, scale_dtype, .. }) = &weight.encoding else { continue };
        let (by, what, scale_dtype) = match activations {
            ActivationScheme::Static(by) | ActivationScheme::Float8Static(by) => (by, "input_scale", scale_dtype),
            ActivationScheme::Nvfp4(by) => (by, "input_global_scale", &DType::F32),
            _ => continue,
        };
        let module = name.strip_suffix("weight").unwrap_or(name);
        let mut scale = vec![0; scale_dtype.bitsize() / 8];
        let written = convert::from_f32(*scale_dtype, &[by.scale()], &mut scale);
        debug_assert!(written, "scales are floats");
        let mut item = |what: &str, dtype, bytes| {
            let weight = Weight::new(dtype, vec![1], Encoding::Dense, std::sync::Arc::new(Bytes { dtype, bytes }));
            items.push(Item { name: format!("{module}{what}"), weight, storage_format: StorageFormat::Plain });
        };
        item(what, *scale_dtype, scale);
        if let Some(zero_point) = by.zero_point {
            item("input_zero_point", DType::I8, vec![zero_point as u8]);
        }
    }
    items
}

/// The scales of a quantized weight, as a weight.
struct Scales {
    of: Weight,
    dtype: DType,
}

impl WeightSource for Scales {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let mut first = true;
        self.of.visit(unit, &mut |block| {
            let one = block.now.affine.is_some_and(|(affine, _)| affine.granularity == Granularity::Tensor);
            let seen = !std::mem::replace(&mut first, false);
            if one && seen { Ok(()) } else { sink(Block::untouched(View::dense(self.dtype, block.now.scales))) }
        })
    }
}

/// Whether a weight is stored as it is encoded: of modules, sentence-transformers reads floats alone.
fn keeps_encoding(model: &Model, layout: Layout, name: &str) -> bool {
    layout == Layout::Sparse || (layout != Layout::Dense && model.weights.folder(name).is_none())
}

fn value_size(weight: &Weight) -> u64 {
    if weight.encoding == Encoding::Dense { weight.dtype.bitsize() as u64 / 8 } else { 1 }
}

fn eligible_for_sparse(weight: &Weight) -> bool {
    let halves = matches!(&weight.encoding, Encoding::Affine(affine) if affine.codes == Codes::E2m1);
    (weight.is_float() || weight.encoding != Encoding::Dense) && !halves && !is_palette(weight) && weight.elements() > 0
}

/// Weight-only integers have kernels in vLLM only when they are packed; a single scale or zero points of int8 are read by
/// transformers only when they are not, and so are embeddings. Zero points of fewer bits have no consumer that takes a byte for each.
fn is_packed(name: &str, weight: &Weight) -> bool {
    match &weight.encoding {
        Encoding::Dense => false,
        Encoding::Affine(affine) if !affine.codes.is_integer() => affine.codes == Codes::E2m1 || affine.codes.is_palette(),
        Encoding::Affine(_) if is_embedding(name, weight) => false,
        Encoding::Affine(affine) => {
            let (one, wide) = (affine.granularity == Granularity::Tensor, affine.codes.bits() == 8);
            weight.shape.len() == 2 && affine.activations == ActivationScheme::None && if wide { affine.symmetric && !one } else { affine.symmetric || !one }
        }
    }
}

fn is_palette(weight: &Weight) -> bool {
    matches!(&weight.encoding, Encoding::Affine(affine) if affine.codes.is_palette())
}

fn encoding(item: &Item) -> String {
    match item.storage_format {
        StorageFormat::Sparse { .. } => format!("{} sparse", item.weight.describe()),
        StorageFormat::Packed => format!("{} packed", item.weight.describe()),
        _ => item.weight.describe(),
    }
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

    fn forecast(&self, model: &Model, run: &RunState) -> Result<SizeForecast> {
        if model.onnx.is_some() {
            return Err(Error::Unsupported {
                what: format!("{}: writing an .onnx model as safetensors, which hold no operators,", model.path.display()),
                hint: "leave `export` out, or write `onnx`; the pass `dequantize` makes floats of quantized weights".into(),
            });
        }
        let items = self.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
        let layout = self.layout_of(&items, model)?;
        Ok(SizeForecast { files: layout.names(), bytes: layout.bytes(), exact: self.layout != Layout::Sparse && !run.estimated, tensors: layout.tensors() })
    }

    fn weights_by_file(&self, model: &Model, run: &RunState) -> Result<Option<Vec<Vec<Dealt>>>> {
        let items = self.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
        let dealt = |item: &Item| Dealt {
            name: item.name.clone(),
            bytes: item.weight.stored_bytes.max(1),
            rows: item.weight.all_rows().end,
            // How many values stay decides how all of a weight is stored.
            together: if self.layout == Layout::Sparse && eligible_for_sparse(&item.weight) { None } else { item.storage_format.rows_together(&item.weight) },
        };
        let by_file = self.layout_of(&items, model)?.items_by_file();
        Ok(Some(by_file.into_iter().map(|file| file.into_iter().filter_map(|index| items.get(index)).map(dealt).collect()).collect()))
    }

    fn linked_bytes(&self, model: &Model, run: &RunState, made: &Made) -> Result<u64> {
        let items = self.items(model, run, |_, weight| Ok(weight.elements() as u64))?;
        Ok(self.layout_of(&items, model)?.linked_bytes(made))
    }

    fn write(&self, model: &Model, run: &RunState, folder: &Destination, made: Option<&Made>, work: &Work) -> Result<Exported> {
        let mut kept: BTreeMap<&str, u64> = BTreeMap::new();
        if let Some(made) = made {
            kept = made.items.iter().filter_map(|(name, seen)| Some((name.as_str(), seen.first()?.kept?))).collect();
        } else if self.layout == Layout::Sparse {
            let jobs: Vec<(&String, &Weight)> = model.weights.by_name.iter().filter(|(name, w)| run.makes(name) && eligible_for_sparse(w)).collect();
            let counts = work.run(
                "Counting zeros",
                &jobs,
                |(_, w)| w.stored_bytes,
                |(_, weight)| {
                    let mut kept = 0;
                    weight.visit(1, &mut |block| {
                        kept += bitmask::count(block.now.values, value_size(weight) as usize);
                        work.advance(block.before.values.len() as u64)
                    })?;
                    Ok(kept)
                },
            )?;
            kept = jobs.into_iter().map(|(name, _)| name.as_str()).zip(counts).collect();
        }
        let items = self.items(model, run, |name, weight| Ok(kept.get(name).copied().unwrap_or(weight.elements() as u64)))?;
        let layout = self.layout_of(&items, model)?;
        let (files, seen) = writer::write(folder, &items, &layout, made, work)?;
        Ok(Exported {
            files,
            how: "read back: the header is parsed strictly and equal, the bytes of every tensor are equal to what was computed".into(),
            max_abs_error: 0.0,
            tensors: layout.tensors(),
            encodings: items.iter().map(encoding).collect(),
            held: self.held(model),
            config: Some(self.config(model, run, &items)),
            notes: self.notes(model, run, &items, &seen),
            weights: items.into_iter().map(|item| item.name).zip(seen).collect(),
        })
    }
}

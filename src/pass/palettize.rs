//! Palettization: each group of rows of a weight has a small codebook (palette) found by k-means, and
//! elements are stored as indices into it.
//!
//! ```yaml
//! passes:
//!   - palettize: { bits: 4, group_size: 64 }
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::targets::{self, SelectedWeights};
use super::{InputImportance, Pass, Plan, Samples, layerwise, options_of};
use crate::error::{Error, Result, counted};
use crate::kernel::convert;
use crate::kernel::palette::{Points, nearest};
use crate::model::{self, Model};
use crate::run_state::{Applied, RunState};
use crate::store::header::byte_count;
use crate::store::{
    Block, BlockSink, DType, Encoding, Granularity, Pattern, QuantizationSpec, Rows, StorageFormat, View, Weight, WeightSource, least_common_multiple,
};
use crate::work::{Meter, lock};

/// Store weights as indices into small codebooks (palettes).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Palettize {
    /// Bits per index, 2 to 8: a palette has 2^bits values
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().bits))]
    #[cfg_attr(feature = "cli", schemars(range(min = 2, max = 8)))]
    pub bits: u8,
    /// Maximum number of rows (output channels) of a weight that share a palette, or -1 for all rows
    #[cfg_attr(feature = "cli", arg(long, value_name = "ROWS", allow_negative_numbers = true, default_value_t = Self::default().group_size))]
    pub group_size: i64,
    /// Weighting of quantization errors when palettes are computed
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = Self::default().importance))]
    pub importance: InputImportance,
    /// Palettize embedding tables too
    #[cfg_attr(feature = "cli", arg(long))]
    pub embeddings: bool,
    /// Tensors to palettize: names with `*`, or `re:` and a regular expression [default: linear weights
    /// and convolutions]
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::one_or_several::non_empty")]
    pub targets: Vec<Pattern>,
    /// Tensors to leave unchanged
    #[cfg_attr(feature = "cli", arg(long, value_name = "PATTERN"))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<Pattern>,
}

impl Default for Palettize {
    fn default() -> Self {
        Self { bits: 4, group_size: 64, importance: InputImportance::Auto, embeddings: false, targets: Vec::new(), ignore: Vec::new() }
    }
}

const NAME: &str = "palettize";

/// Maximum number of values that share a palette. The values of a group are in memory at the same time.
const MAX_GROUP_VALUES: usize = 1 << 24;

/// Bytes per value while a palette is computed: sorted copies and prefix sums.
const VALUE_BYTES: u64 = 64;

/// Total size of the palettized weights before and after, in bytes.
#[derive(Default)]
struct Sizes {
    before: u64,
    after: u64,
}

impl Palettize {
    /// Selects weights. Returns their encodings, their total sizes, and the record of the pass.
    fn encodings(&self, model: &Model) -> Result<(BTreeMap<String, QuantizationSpec>, Sizes, Applied)> {
        let weights = &model.weights;
        let rule = if self.embeddings { format!("{}; and embeddings", model::PRUNABLE_RULE) } else { model::PRUNABLE_RULE.to_owned() };
        let eligible = |name: &str, weight: &Weight| model::is_prunable(name, weight) || (self.embeddings && model::is_embedding(name, weight));
        let SelectedWeights { names, rule, notes } = targets::select_weights(NAME, weights, &self.targets, &self.ignore, &rule, eligible)?;
        let (mut encodings, mut sizes, mut grown) = (BTreeMap::new(), Sizes::default(), Vec::new());
        for name in names {
            let weight = weights.get(name)?;
            targets::require_float(NAME, name, weight)?;
            let group = usize::try_from(self.group_size).unwrap_or(usize::MAX);
            let dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
            let affine = QuantizationSpec::palettes(self.bits, group, &weight.shape, dtype);
            if let Granularity::Block([rows, row]) = affine.granularity
                && rows.saturating_mul(row) > MAX_GROUP_VALUES
            {
                return Err(Error::tensor(
                    name,
                    format!("has {rows} rows of {row} values per palette, which exceeds the limit of {MAX_GROUP_VALUES} values"),
                    format!("set `group_size` to at most {}, or add it to `ignore`", (MAX_GROUP_VALUES / row).max(1)),
                ));
            }
            let palettized = weight.then(dtype, Encoding::Quantized(affine.clone()), weight.source());
            let parts = StorageFormat::Packed.parts(name, &palettized);
            let after = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(byte_count(part.dtype, &part.shape)?)).unwrap_or(u64::MAX);
            if after >= weight.value_bytes() {
                grown.push(name);
                continue;
            }
            sizes.before += weight.value_bytes();
            sizes.after += after;
            encodings.insert(name.to_owned(), affine);
        }
        let mut applied = Applied { rule, notes, tensors: encodings.keys().cloned().collect(), ..Applied::new(NAME, self.options()) };
        if let Some(first) = grown.first() {
            let rows = if self.group_size > 0 { counted(usize::try_from(self.group_size).unwrap_or(0), "row") } else { "all rows".to_owned() };
            let what = format!("{}-bit indices and palettes for {rows} would not be smaller than the values of {}", self.bits, counted(grown.len(), "weight"));
            if encodings.is_empty() {
                return Err(Error::option(
                    NAME,
                    format!("{what}, which are all selected weights (the first: `{first}`); use fewer bits or a larger group_size"),
                ));
            }
            applied.notes.push(format!("palettize: {what}, which are left unchanged (the first: `{first}`)"));
        }
        let values: u64 = encodings.keys().map(|name| Ok(weights.get(name)?.elements() as u64)).sum::<Result<u64>>()?;
        // An .onnx file whose graph is not changed stores floats.
        if model.onnx.is_none() || model.changed_graph.is_some() {
            applied.notes.push(format!(
                "palettize: the size of {} falls from {:.1} MB to {:.1} MB, {:.2} bits per value",
                counted(encodings.len(), "weight"),
                sizes.before as f64 / 1e6,
                sizes.after as f64 / 1e6,
                8.0 * sizes.after as f64 / values.max(1) as f64
            ));
        }
        Ok((encodings, sizes, applied))
    }
}

impl Pass for Palettize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn options(&self) -> Value {
        options_of(self)
    }

    fn check(&self) -> Result<()> {
        if !(2..=8).contains(&self.bits) {
            return Err(Error::option(format!("{NAME}: bits"), format!("must be 2 to 8, not {}", self.bits)));
        }
        if self.group_size == 0 || self.group_size < -1 {
            return Err(Error::option(format!("{NAME}: group_size"), "must be at least 1, or -1 for all rows"));
        }
        if self.importance == InputImportance::Activation { layerwise::require(&format!("{NAME}: importance")) } else { Ok(()) }
    }

    fn resolve_defaults(&mut self, _model: &Model, sets: &[Samples]) {
        self.importance = self.importance.resolved(sets);
    }

    fn runs_on(&self) -> Option<Samples> {
        (self.importance == InputImportance::Activation).then_some(Samples::Calibration)
    }

    fn shares_samples(&self) -> bool {
        self.runs_on().is_some()
    }

    fn plan<'a>(&'a self, model: &'a Model, _state: &'a RunState) -> Result<Plan<'a>> {
        let (encodings, sizes, mut applied) = self.encodings(model)?;
        let group = |affine: &QuantizationSpec| if let Granularity::Block([rows, row]) = affine.granularity { (rows * row) as u64 } else { 0 };
        applied.memory_by_thread = VALUE_BYTES * encodings.values().map(group).max().unwrap_or(0);
        let mut planned = model.clone();
        for (name, affine) in &encodings {
            let palettized = Palettized::new(name, model.weights.get(name)?, affine.clone(), &applied.meter);
            planned.weights.by_name.insert(name.clone(), palettized.weight());
        }
        applied.details = json!({ "palettized": encodings.len(), "bytes_before": sizes.before, "bytes_after": sizes.after });
        if self.importance != InputImportance::Activation {
            return Ok(Plan::new(planned, applied));
        }
        applied.checkpoint_bytes = Some(layerwise::checkpoint_bytes(&applied.tensors, &planned.weights));
        applied.model_runs = layerwise::runs_to_layers(&applied.tensors, 1, model)?;
        let palettized = planned.weights.by_name.clone();
        Ok(Plan::new(planned, applied.clone()).with_execution(move |context| {
            let mut after = model.clone();
            applied.details["samples"] = layerwise::palettize(self, &encodings, &mut after, context, &mut applied)?.into();
            let plain = palettized.into_iter().filter(|(name, weight)| encodings.contains_key(name) && weight.encoding != after.weights.by_name[name].encoding);
            after.weights.by_name.extend(plain.collect::<Vec<_>>());
            Ok((after, applied))
        }))
    }

    fn remedy(&self) -> &'static str {
        if self.importance == InputImportance::Activation {
            return "a smaller `group_size`, more bits, or `ignore` for the layers that `compress analyze` names";
        }
        "`importance: activation` with calibration data, a smaller `group_size`, more bits, or `ignore` for the layers that `compress analyze` names"
    }
}

/// Percentage of zeros from which a group is considered sparse. The palette of a sparse group contains
/// zero exactly.
const SPARSE_PERCENT: usize = 5;

/// Number of values that share a palette, for rows of this length.
pub(super) fn group_of(affine: &QuantizationSpec, row: usize) -> usize {
    row * if let Granularity::Block([rows, _]) = affine.granularity { rows.max(1) } else { 1 }
}

/// Computes the palette of a group of values, rounded to the stored dtype and without duplicates or
/// padding. `cost` returns the weight of the squared error of an element. Returns an error if a value is
/// not finite, as values of f64 outside of the range of f32 are.
pub(super) fn fit(name: &str, affine: &QuantizationSpec, values: &[f32], cost: impl Fn(usize) -> f32) -> Result<Vec<f32>> {
    if values.iter().any(|value| !value.is_finite()) {
        return Err(Error::tensor(
            name,
            "contains infinite or NaN values, or values outside of the range of f32, which a palette cannot represent",
            "use a checkpoint without such values, scale the weights down, or add the tensor to `ignore`",
        ));
    }
    let entries = affine.codes.entries();
    let points = Points::new(values.iter().enumerate().map(|(at, value)| (*value, cost(at))).collect());
    let mut palette = points.palette(entries);
    let zeros = values.iter().filter(|value| **value == 0.0).count();
    if zeros * 100 >= SPARSE_PERCENT * values.len()
        && let Some(least) = palette.iter_mut().min_by(|a, b| a.abs().total_cmp(&b.abs()))
    {
        *least = 0.0;
    }
    let mut palette: Vec<f32> = palette.into_iter().map(|value| convert::rounded(affine.scale_dtype, value as f32)).collect();
    palette.dedup();
    Ok(palette)
}

/// Pads a palette to its stored length by repeating the last value.
pub(super) fn padded(mut palette: Vec<f32>, affine: &QuantizationSpec) -> Vec<f32> {
    palette.resize(affine.codes.entries(), palette.last().copied().unwrap_or(0.0));
    palette
}

/// Palettized weight.
struct Palettized {
    name: String,
    upstream: Weight,
    affine: QuantizationSpec,
    /// Palettes by group index, cached because weights are read more than once.
    cache: Mutex<BTreeMap<usize, Arc<Vec<f32>>>>,
    meter: Arc<Meter>,
}

impl Palettized {
    fn new(name: &str, upstream: &Weight, affine: QuantizationSpec, meter: &Arc<Meter>) -> Self {
        Self { name: name.to_owned(), upstream: upstream.clone(), affine, cache: Mutex::default(), meter: meter.clone() }
    }

    fn palette(&self, group: usize, values: &[f32]) -> Result<Arc<Vec<f32>>> {
        if let Some(palette) = lock(&self.cache).get(&group) {
            return Ok(palette.clone());
        }
        let palette = Arc::new(fit(&self.name, &self.affine, values, |_| 1.0)?);
        lock(&self.cache).insert(group, palette.clone());
        Ok(palette)
    }

    /// Number of elements that share a palette.
    fn group(&self) -> usize {
        group_of(&self.affine, self.upstream.row().max(1))
    }

    fn weight(self) -> Weight {
        let (upstream, affine) = (self.upstream.clone(), self.affine.clone());
        upstream.then(affine.scale_dtype, Encoding::Quantized(affine), Arc::new(self))
    }
}

impl WeightSource for Palettized {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (row, group) = (self.upstream.row().max(1), self.group());
        let (dtype, size) = (self.affine.scale_dtype, self.affine.codes.entries() * self.affine.scale_dtype.bitsize() / 8);
        let (mut values, mut indices, mut palettes) = (Vec::new(), Vec::new(), Vec::new());
        let mut index = 0;
        self.upstream.visit(least_common_multiple(unit, group), &mut |block: Block| {
            let count = block.now.elements();
            values.resize(count, 0f32);
            indices.resize(count, 0u8);
            palettes.clear();
            let decoded = block.now.decode(0, &mut values);
            debug_assert!(decoded, "only floats are palettized");
            self.meter.time(|| {
                let mut bytes = vec![0; size];
                for (values, indices) in values.chunks(group).zip(indices.chunks_mut(group)) {
                    let palette = self.palette(index, values)?;
                    index += 1;
                    nearest(values, &palette, indices);
                    let encoded = convert::from_f32(dtype, &padded(palette.to_vec(), &self.affine), &mut bytes);
                    debug_assert!(encoded, "palettes have at most 32 bits per value");
                    (0..values.len() / row).for_each(|_| palettes.extend_from_slice(&bytes));
                }
                Ok(())
            })?;
            sink(block.becomes(View {
                dtype,
                values: &indices,
                affine: Some((&self.affine, row)),
                scales: &palettes,
                zero_points: &[],
                global_scale: 1.0,
                blocks: &[],
            }))
        })
    }

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let (upstream, block) = self.upstream.rows(rows, least_common_multiple(unit, self.group()))?;
        Some(Rows { source: Arc::new(Palettized::new(&self.name, &upstream, self.affine.clone(), &self.meter)), block })
    }
}

//! Scales of an 8-bit KV cache, found on calibration samples.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::Tensor;

use super::{Context, calibrate};
use crate::calibration::{Axis, Request, ValueStatistics};
use crate::data::{Batch, Padding, SequenceRoles};
use crate::error::{Error, Result};
use crate::exec::transfer::Cause;
use crate::exec::{floats_on_host, read};
use crate::ir::Graph;
use crate::ir::kv_cache::{self, CachedAttention};
use crate::kernel::cache::{CacheScales, CacheScheme};
use crate::kernel::convert;
use crate::model::Model;
use crate::store::{DType, Weight};

/// Adds key and value scales of one to each attention layer, in place of the scales of the input. Returns the
/// number of attention layers.
pub(in crate::pass) fn add(scheme: CacheScheme, model: &mut Model) -> Result<usize> {
    if let Some(floats) = model.without_cache()? {
        *model = floats;
    }
    let graph = model.graph()?;
    let cached = kv_cache::cached_attentions(&graph)?;
    insert(scheme, model, &graph, &cached, |_, count| vec![scheme.format.steps(); count])?;
    Ok(cached.len())
}

/// Adds key and value scales to each attention layer. They map the largest magnitude over all samples (of
/// keys, after the rotary embedding) to the largest code. A scale of keys or values that are only zeros on
/// the samples is one, and a note names it. Replaces the scales of the input.
pub(in crate::pass) fn add_calibrated(pass: &str, scheme: CacheScheme, model: &mut Model, context: &Context, notes: &mut Vec<String>) -> Result<()> {
    if let Some(floats) = model.without_cache()? {
        *model = floats;
        notes.push("the `kv_cache_scheme` of the input and its scales are replaced".to_owned());
    }
    let graph = model.graph()?;
    let cached = kv_cache::cached_attentions(&graph)?;
    let largest = match scheme.scales {
        CacheScales::Tensor => largest_by_layer(pass, &graph, model, &cached, context)?,
        CacheScales::Head => largest_by_head(&graph, model, &cached, context)?,
    };
    let zeros = insert(scheme, model, &graph, &cached, |value, count| largest.get(value).cloned().unwrap_or_else(|| vec![scheme.format.steps(); count]))?;
    if !zeros.is_empty() {
        notes.push(format!("warning: the calibration samples have only zeros in {} of the caches, whose scales are 1: {}", zeros.len(), zeros.join(", ")));
    }
    Ok(())
}

/// The largest magnitude of the keys and values of each layer, by the name of the value.
fn largest_by_layer(pass: &str, graph: &Graph, model: &Model, cached: &[CachedAttention], context: &Context) -> Result<BTreeMap<String, Vec<f32>>> {
    let request = Request { axis: Axis::Last, histograms: false, joint: false, weights: None };
    let requests: BTreeMap<String, Request> = cached.iter().flat_map(|found| found.reads.clone()).map(|value| (value, request.clone())).collect();
    let statistics = calibrate::statistics(pass, graph, model, &requests, context)?;
    let largest = |observed: &ValueStatistics| vec![observed.channels().largest().into_iter().fold(0f32, f32::max)];
    Ok(statistics.iter().map(|(value, observed)| (value.clone(), largest(observed))).collect())
}

/// The largest magnitude of the keys and values `[batch, heads, tokens, size]` of each head.
fn largest_by_head(graph: &Graph, model: &Model, cached: &[CachedAttention], context: &Context) -> Result<BTreeMap<String, Vec<f32>>> {
    let values: BTreeSet<&str> = cached.iter().flat_map(|found| &found.reads).map(String::as_str).collect();
    let roles = SequenceRoles::new(graph);
    let mut largest: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let record = |batch: &Batch, name: &str, value: &Tensor| {
        let [_, heads, tokens, size] = value.dims() else {
            let reason = "does not have the shape [batch, heads, tokens, size]: use one scale per layer (`scales: tensor`)";
            return Err(Error::graph(format!("graph value `{name}`"), reason));
        };
        let padding = Padding::from_batch(batch).map_err(calibrate::tensor_error)?;
        let is_token = padding.token_rows(roles.token_axis(name), value.dims());
        let found = largest.entry(name.to_owned()).or_insert_with(|| vec![0.0; *heads]);
        let mut is_finite = true;
        let mut add = |values: &[f32]| {
            for (row, values) in values.chunks_exact((*size).max(1)).enumerate() {
                if is_token.as_ref().is_none_or(|is_token| is_token.get(row).copied().unwrap_or(true)) {
                    let magnitude = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                    is_finite &= values.iter().all(|x| x.is_finite());
                    let head = row / (*tokens).max(1) % (*heads).max(1);
                    found[head] = found[head].max(magnitude);
                }
            }
            Ok(())
        };
        floats_on_host(value, Cause::Statistics).and_then(|value| read(&value, &mut add)).map_err(calibrate::tensor_error)?;
        if is_finite { Ok(()) } else { Err(calibrate::not_finite(name)) }
    };
    calibrate::observe(graph, model, |name| values.contains(name), context, record)?;
    Ok(largest)
}

/// Adds scales for caches with these largest magnitudes, of which `largest` returns the given number, in
/// the dtype of the attention weights, like those of llm-compressor. Returns the names of scales of caches
/// with only zeros.
fn insert(scheme: CacheScheme, model: &mut Model, graph: &Graph, cached: &[CachedAttention], largest: impl Fn(&str, usize) -> Vec<f32>) -> Result<Vec<String>> {
    let described = model.has_derived_graph();
    let mut zeros = Vec::new();
    for found in cached {
        for (value, name) in found.reads.iter().zip(found.scales()) {
            let dtype = dtype_of(model, &found.module);
            let (count, shape) = match scheme.scales {
                CacheScales::Tensor => (1, vec![1]),
                CacheScales::Head => heads(graph, value).map(|heads| (heads, vec![heads, 1, 1]))?,
            };
            let scales = largest(value, count).into_iter().map(|largest| convert::scale(dtype, f64::from(largest) / f64::from(scheme.format.steps())));
            let scales: Vec<f32> = scales.collect();
            if scales.iter().any(|scale| !scale.is_normal()) {
                zeros.push(format!("`{name}`"));
            }
            let scales: Vec<f32> = scales.into_iter().map(|scale| if scale.is_normal() { scale } else { 1.0 }).collect();
            let weight = Weight::computed(&name, dtype, shape, &scales)?;
            model.weights.by_name.insert(name, weight);
        }
    }
    model.config.set_cache(scheme);
    if !described {
        model.changed_graph = Some(Arc::new(kv_cache::insert(graph, &model.weights, scheme)?));
    }
    Ok(zeros)
}

/// The number of heads of keys or values.
fn heads(graph: &Graph, value: &str) -> Result<usize> {
    let found = graph.values().iter().find(|other| other.name == value);
    let heads = found.and_then(|value| if let [_, heads, _, _] = &value.ty.shape[..] { heads.fixed() } else { None });
    heads.ok_or_else(|| Error::graph(format!("graph value `{value}`"), "has no fixed number of heads: use one scale per layer (`scales: tensor`)"))
}

/// The dtype of the weights of a module; of quantized weights, that of their scales.
fn dtype_of(model: &Model, module: &str) -> DType {
    let inside = |name: &str| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
    let weight = model.weights.by_name.iter().find(|(name, weight)| inside(name) && weight.is_float());
    weight.map_or(DType::F32, |(_, weight)| if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;

    use super::*;
    use crate::kernel::cache::CacheFormat;
    use crate::pass::testing::calibrated;

    /// The golden file is written by `scripts/goldens cache`.
    #[test]
    fn scales_match_llm_compressor() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let golden = candle_core::safetensors::load(folder.join("cache.safetensors"), &Device::Cpu).unwrap();
        let inputs = ["input_ids", "attention_mask"].map(|name| (name.to_owned(), golden[name].clone())).into();
        let mut compared = 0;
        for name in ["llama-grouped-tied", "qwen3"] {
            for (text, format) in [("fp8", CacheFormat::Fp8), ("int8", CacheFormat::Int8)] {
                let mut model = Model::open(folder.join("models").join(name)).unwrap();
                for scales in [CacheScales::Tensor, CacheScales::Head] {
                    let scheme = CacheScheme { format, scales };
                    let prefix = if scales == CacheScales::Head { format!("{name}/{text}-head/") } else { format!("{name}/{text}/") };
                    // The range of heads is wider by 1 % in the reference.
                    let margin = if scales == CacheScales::Head { 1.01 } else { 1.0 };
                    assert_eq!(add(scheme, &mut model.clone()).unwrap(), 2);
                    calibrated(&inputs, |context| add_calibrated("quantize", scheme, &mut model, context, &mut Vec::new())).unwrap().unwrap();
                    for (key, expected) in golden.iter().filter(|(key, _)| key.ends_with("_scale")) {
                        let Some(tensor) = key.strip_prefix(&prefix) else { continue };
                        let (found, expected) = (model.weights.get(tensor).unwrap(), expected);
                        assert_eq!(found.shape, expected.dims());
                        let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                        let found = found.floats(tensor).unwrap();
                        assert!(found.iter().zip(&expected).all(|(a, b)| (a * margin / b - 1.0).abs() < 1e-6), "{key}: {found:?}, not {expected:?}");
                        compared += 1;
                    }
                }
            }
        }
        assert_eq!(compared, 32);
    }
}

//! Scales of an 8-bit KV cache, found on calibration samples.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Context, calibrate};
use crate::calibration::{Axis, Request};
use crate::error::Result;
use crate::ir::Graph;
use crate::ir::kv_cache::{self, CachedAttention};
use crate::kernel::cache::CacheFormat;
use crate::kernel::convert;
use crate::model::Model;
use crate::store::{DType, Weight};

/// Adds key and value scales of one to each attention layer, in place of the scales of the input. Returns the
/// number of attention layers.
pub(in crate::pass) fn add(format: CacheFormat, model: &mut Model) -> Result<usize> {
    if let Some(floats) = model.without_cache()? {
        *model = floats;
    }
    let graph = model.graph()?;
    let cached = kv_cache::cached_attentions(&graph)?;
    insert(format, model, &graph, &cached, |_| format.steps())?;
    Ok(cached.len())
}

/// Adds key and value scales to each attention layer. They map the largest magnitude over all samples (of
/// keys, after the rotary embedding) to the largest code. The scale of a cache in which the samples have
/// only zeros is one, and a note names it. Replaces the scales of the input.
pub(in crate::pass) fn add_calibrated(pass: &str, format: CacheFormat, model: &mut Model, context: &Context, notes: &mut Vec<String>) -> Result<()> {
    if let Some(floats) = model.without_cache()? {
        *model = floats;
        notes.push("the `kv_cache_scheme` of the input and its scales are replaced".to_owned());
    }
    let graph = model.graph()?;
    let cached = kv_cache::cached_attentions(&graph)?;
    let request = Request { axis: Axis::Last, histograms: false, weights: None };
    let requests: BTreeMap<String, Request> = cached.iter().flat_map(|found| found.reads.clone()).map(|value| (value, request.clone())).collect();
    let statistics = calibrate::statistics(pass, &graph, model, &requests, context)?;
    let largest = |value: &str| statistics.get(value).map_or(format.steps(), |observed| observed.channels().largest().into_iter().fold(0f32, f32::max));
    let zeros = insert(format, model, &graph, &cached, largest)?;
    if !zeros.is_empty() {
        notes.push(format!("warning: the calibration samples have only zeros in {} of the caches, whose scales are 1: {}", zeros.len(), zeros.join(", ")));
    }
    Ok(())
}

/// Adds scales for caches with these largest magnitudes, in the dtype of the attention weights, like those
/// of llm-compressor. Returns the names of scales of caches with only zeros.
fn insert(format: CacheFormat, model: &mut Model, graph: &Graph, cached: &[CachedAttention], largest: impl Fn(&str) -> f32) -> Result<Vec<String>> {
    let described = model.is_described() && model.changed_graph.is_none();
    let mut zeros = Vec::new();
    for found in cached {
        for (value, name) in found.reads.iter().zip(found.scales()) {
            let dtype = dtype_of(model, &found.module);
            let scale = convert::scale(dtype, f64::from(largest(value)) / f64::from(format.steps()));
            if !scale.is_normal() {
                zeros.push(format!("`{name}`"));
            }
            let weight = Weight::computed(&name, dtype, vec![1], &[if scale.is_normal() { scale } else { 1.0 }])?;
            model.weights.by_name.insert(name, weight);
        }
    }
    model.config.set_cache(format);
    if !described {
        model.changed_graph = Some(Arc::new(kv_cache::insert(graph, &model.weights, format)?));
    }
    Ok(zeros)
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
                assert_eq!(add(format, &mut model.clone()).unwrap(), 2);
                calibrated(&inputs, |context| add_calibrated("quantize", format, &mut model, context, &mut Vec::new())).unwrap().unwrap();
                for (key, expected) in golden.iter().filter(|(key, _)| key.ends_with("_scale")) {
                    let Some(tensor) = key.strip_prefix(&format!("{name}/{text}/")) else { continue };
                    let (found, expected) = (model.weights.get(tensor).unwrap().floats(tensor).unwrap()[0], expected.to_vec1::<f32>().unwrap()[0]);
                    assert!((found / expected - 1.0).abs() < 1e-6, "{key}: {found}, not {expected}");
                    compared += 1;
                }
            }
        }
        assert_eq!(compared, 16);
    }
}

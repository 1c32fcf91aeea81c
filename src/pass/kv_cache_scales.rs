//! Scales of keys and values that a decoder's cache keeps in eight bits, found on calibration samples.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Context, calibrate};
use crate::calibration::{Axis, Request};
use crate::error::Result;
use crate::ir::cache;
use crate::kernel::cache::CacheFormat;
use crate::kernel::convert;
use crate::model::Model;
use crate::store::{DType, Weight};

/// Gives each attention the scales of its keys, behind the rotary embedding, and of its values: the largest magnitude of any sample is
/// the largest number of steps. Without a context, scales of one. They have the format of the weights of attention, as those that
/// llm-compressor writes.
///
/// # Errors
/// The model has no attention or no cache, there are no samples, or the model cannot be run.
pub(in crate::pass) fn find(pass: &str, format: CacheFormat, model: &mut Model, context: Option<&Context>) -> Result<usize> {
    let graph = model.graph()?;
    let described = model.is_described() && model.changed_graph.is_none();
    let cached = cache::cached(&graph)?;
    let request = Request { axis: Axis::Last, histograms: false };
    let requests: BTreeMap<String, Request> = cached.iter().flat_map(|found| found.reads.clone()).map(|value| (value, request)).collect();
    let seen = context.map(|context| calibrate::statistics(pass, &graph, model, &requests, context)).transpose()?;
    for found in &cached {
        for (value, name) in found.reads.iter().zip(found.scales()) {
            let seen = seen.as_ref().and_then(|seen| seen.get(value));
            let largest = seen.map_or(format.steps(), |seen| seen.channels().largest().into_iter().fold(0f32, f32::max));
            let dtype = dtype_of(model, &found.module);
            let scale = convert::scale(dtype, f64::from(largest) / f64::from(format.steps()));
            let scale = if scale.is_normal() { scale } else { f32::EPSILON };
            let weight = Weight::computed(&name, dtype, vec![1], &[scale])?;
            model.weights.by_name.insert(name, weight);
        }
    }
    model.config.set_cache(format);
    if !described {
        model.changed_graph = Some(Arc::new(cache::insert(&graph, &model.weights, format)?));
    }
    Ok(cached.len())
}

/// The format of a module's weights: what their values are, that of scales where they are quantized.
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
    use crate::data::{Data, DataSets};
    use crate::work::{Cancel, MemoryLimit, Silent, Work};

    /// `scripts/goldens-cache` makes the file.
    #[test]
    fn scales_are_those_of_llm_compressor() {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let golden = candle_core::safetensors::load(place.join("cache.safetensors"), &Device::Cpu).unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("samples.safetensors");
        let inputs = ["input_ids", "attention_mask"].map(|name| (name.to_owned(), golden[name].clone()));
        candle_core::safetensors::save(&inputs.into(), &path).unwrap();
        let data = DataSets { calibration: Some(Data { arrays: Some(path), ..Data::default() }), ..DataSets::default() };
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        let (device, memory) = (Device::Cpu, MemoryLimit::default());
        let context = Context { work, seed: 0, data: &data, device, memory, memory_tracker: None, workplace: None, resume: false };
        let mut compared = 0;
        for name in ["llama-grouped-tied", "qwen3"] {
            for (text, format) in [("fp8", CacheFormat::Fp8), ("int8", CacheFormat::Int8)] {
                let mut model = Model::open(place.join("models").join(name)).unwrap();
                assert_eq!(find("quantize", format, &mut model, Some(&context)).unwrap(), 2);
                for (key, wanted) in golden.iter().filter(|(key, _)| key.ends_with("_scale")) {
                    let Some(tensor) = key.strip_prefix(&format!("{name}/{text}/")) else { continue };
                    let (found, wanted) = (model.weights.get(tensor).unwrap().floats(tensor).unwrap()[0], wanted.to_vec1::<f32>().unwrap()[0]);
                    assert!((found / wanted - 1.0).abs() < 1e-6, "{key}: {found}, not {wanted}");
                    compared += 1;
                }
            }
        }
        assert_eq!(compared, 16);
    }
}

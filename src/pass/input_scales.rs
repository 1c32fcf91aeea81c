//! Static activation scales found on calibration samples: those of FP8 and int8, and the global scales of
//! NVFP4.

use std::collections::BTreeMap;

use super::{Context, calibrate};
use crate::calibration::{Axis, Request};
use crate::error::{Error, Result, counted};
use crate::ir::quantizers::layer_weight;
use crate::kernel::{convert, minifloat};
use crate::model::Model;
use crate::store::{ActivationScheme, DType, FloatScale, QuantizationSpec, Static};

/// Number of int8 steps of the largest magnitude, as in compressed-tensors.
const INT8_STEPS: f64 = 127.5;

/// Sets the input scale of each weight whose scheme has static activation scales. The scale is computed
/// from the largest magnitude over all samples, so that layers that read the same value have the same
/// scale. An expert without samples uses the largest magnitude of the other experts of its layer. Returns
/// notes on layers without samples.
pub(in crate::pass) fn find(pass: &str, encodings: &mut BTreeMap<String, QuantizationSpec>, model: &Model, context: &Context) -> Result<Vec<String>> {
    let graph = model.graph()?;
    let mut inputs: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in graph.nodes() {
        if let (Some(weight), Some(input)) = (layer_weight(&graph, node), node.inputs.first()) {
            inputs.entry(weight).or_default().push(&graph.value(*input).name);
        }
    }
    let read = |name: &str| {
        let unread = || Error::tensor(name, "is not the weight of a layer, so that its input scale cannot be calibrated", "add it to `ignore`");
        inputs.get(name).ok_or_else(unread)
    };
    let scaled: Vec<&String> = encodings.iter().filter(|(_, affine)| affine.activations.parameters().is_some()).map(|(name, _)| name).collect();
    let mut requests = BTreeMap::new();
    for name in &scaled {
        requests.extend(read(name)?.iter().map(|value| ((*value).to_owned(), Request { axis: Axis::Last, histograms: false, joint: false, weights: None })));
    }
    let statistics = calibrate::statistics(pass, &graph, model, &requests, context)?;
    let mut largest: BTreeMap<String, f32> = BTreeMap::new();
    for name in scaled {
        let values = read(name)?.iter().filter_map(|value| statistics.get(*value));
        largest.insert(name.clone(), values.flat_map(|value| value.channels().largest()).fold(0f32, f32::max));
    }
    let notes = fill_unreached(&mut largest);
    for (name, affine) in encodings {
        affine.activations = for_largest(affine.activations, affine.scale_dtype, largest.get(name).copied().unwrap_or_default());
    }
    Ok(notes)
}

/// The scheme with the static scale for inputs of this largest magnitude. Schemes without a static scale are
/// unchanged.
pub(in crate::pass) fn for_largest(scheme: ActivationScheme, scale_dtype: DType, largest: f32) -> ActivationScheme {
    let scale = |steps: f64| convert::scale(scale_dtype, f64::from(largest) / steps);
    let scale = match scheme {
        ActivationScheme::Static(_) => scale(INT8_STEPS),
        ActivationScheme::Float(format, FloatScale::Static(_)) => scale(format.row().max.into()),
        ActivationScheme::Float(format, FloatScale::Relative(_)) => format.global_scale(largest, minifloat::E4M3_MAX),
        ActivationScheme::Float(_, FloatScale::Token | FloatScale::Group(_) | FloatScale::PowerOfTwo)
        | ActivationScheme::DynamicToken
        | ActivationScheme::None => return scheme,
    };
    // Scales are normal numbers. Inputs that are all zero have the scale 1.
    let normal = if largest > 0.0 { scale.clamp(f32::MIN_POSITIVE, f32::MAX) } else { 1.0 };
    scheme.with_parameters(Static::new(normal, None))
}

/// Replaces the magnitude 0 of layers without samples by the largest magnitude of the same layer in other
/// experts.
fn fill_unreached(largest: &mut BTreeMap<String, f32>) -> Vec<String> {
    let unreached: Vec<String> = largest.iter().filter(|(_, largest)| **largest == 0.0).map(|(name, _)| name.clone()).collect();
    let mut of_experts: BTreeMap<String, f32> = BTreeMap::new();
    for (name, largest) in &*largest {
        if let Some(layer) = without_expert(name) {
            let all = of_experts.entry(layer).or_default();
            *all = all.max(*largest);
        }
    }
    let (mut filled, mut empty) = (Vec::new(), Vec::new());
    for name in &unreached {
        let found = without_expert(name).and_then(|layer| of_experts.get(&layer)).copied().unwrap_or_default();
        largest.insert(name.clone(), found);
        if found > 0.0 { filled.push(name) } else { empty.push(name) }
    }
    let note = |names: Vec<&String>, what: &str| {
        names
            .first()
            .map(|first| format!("warning: no calibration samples for {} (the first: `{first}`): {what}; use more samples", counted(names.len(), "layer")))
    };
    let filled = note(filled, "their input scales are copied from the other experts of the layer");
    filled.into_iter().chain(note(empty, "their input scales are 1")).collect()
}

/// Replaces the index of the expert in the name of a layer by `*`.
fn without_expert(name: &str) -> Option<String> {
    let (before, rest) = name.split_once("experts.")?;
    let (number, after) = rest.split_once('.')?;
    number.parse::<usize>().is_ok().then(|| format!("{before}experts.*.{after}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::{Device, Tensor};

    use super::*;
    use crate::exec::Inputs;
    use crate::pass::testing::{calibrated, values};
    use crate::pass::{Pass, Quantize};
    use crate::run_state::RunState;
    use crate::store::{Encoding, Weight};

    #[test]
    fn experts_without_samples_use_the_scale_of_other_experts() {
        let values = [
            ("l.experts.0.up.weight", 3.0),
            ("l.experts.1.up.weight", 0.0),
            ("l.experts.2.up.weight", 5.0),
            ("l.experts.1.down.weight", 0.0),
            ("q.weight", 0.0),
        ];
        let mut largest: BTreeMap<String, f32> = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let notes = fill_unreached(&mut largest);
        assert_eq!((largest["l.experts.1.up.weight"], largest["l.experts.0.up.weight"], largest["q.weight"]), (5.0, 3.0, 0.0));
        assert!(notes.len() == 2 && notes[0].contains("1 layer (the first: `l.experts.1.up.weight`)") && notes[1].contains("2 layers"), "{notes:?}");
    }

    /// Static scales map the largest input to the largest E4M3 value, 448, or to 127.5 steps of int8. Global
    /// scales of NVFP4 map it to the largest E2M1 value, 6, with the group scale 448.
    #[test]
    fn scales_follow_from_the_inputs_of_layers() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama");
        let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
        // The first sample has no padding, which calibration ignores.
        let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.narrow(0, 0, 1).unwrap()))).collect();
        let model = Model::open(&folder).unwrap();
        let graph = model.graph().unwrap();
        let seen = values(&graph, &model, &inputs, |_| true).unwrap();
        let largest: BTreeMap<&str, f32> = graph
            .nodes()
            .iter()
            .filter_map(|node| {
                let weight = layer_weight(&graph, node)?;
                let input = seen[&graph.value(node.inputs[0]).name].abs().unwrap().flatten_all().unwrap();
                Some((weight, input.max(0).unwrap().to_scalar().unwrap()))
            })
            .collect();
        // Groups of 16 do not divide the 24 inputs of the two layers `down_proj`.
        for (scheme, name, count) in [("FP8", "Float(E4m3, Static", 14), ("W8A8-STATIC", "Static(", 14), ("NVFP4", "Float(E2m1, Relative", 12)] {
            let pass: Quantize = serde_json::from_value(serde_json::json!({ "scheme": scheme })).unwrap();
            let state = RunState::default();
            let planned = pass.plan(&model, &state).unwrap().model;
            let (done, _) = calibrated(&inputs, |context| pass.plan(&model, &state).unwrap().execute(context)).unwrap().unwrap();
            let mut compared = 0;
            for (weight, now) in &done.weights.by_name {
                let (Encoding::Quantized(planned), Encoding::Quantized(now)) = (&planned.weights.by_name[weight].encoding, &now.encoding) else { continue };
                assert_eq!(planned.scheme(), now.scheme());
                let Some(by) = now.activations.parameters() else { panic!("{weight}: {now:?}") };
                assert!(format!("{:?}", now.activations).starts_with(name), "{weight}: {now:?}");
                let largest = largest[weight.as_str()];
                let expected = match scheme {
                    "FP8" => largest / 448.0,
                    "W8A8-STATIC" => largest / 127.5,
                    _ => 448.0 * 6.0 / largest,
                };
                assert!((by.scale() / expected - 1.0).abs() < 1e-5, "{scheme} {weight}: {}, not {expected}", by.scale());
                compared += 1;
            }
            assert_eq!(compared, count, "{scheme}");
        }
    }

    /// SmoothQuant and AWQ divide the inputs of layers by the factors of the norm before them, which has an
    /// outlier here.
    #[test]
    fn scales_follow_from_the_rescaled_inputs() {
        let (norm, layer) = ("model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama");
        let ids = Tensor::from_vec((0..128i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (16, 8), &Device::Cpu).unwrap();
        let inputs: Inputs = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into();
        let mut model = Model::open(&folder).unwrap();
        let mut before = model.weights.get(norm).unwrap().floats(norm).unwrap();
        before[3] *= 100.0;
        let shape = model.weights.get(norm).unwrap().shape.clone();
        model.weights.by_name.insert(norm.to_owned(), Weight::computed(norm, DType::F32, shape, &before).unwrap());
        let graph = model.graph().unwrap();
        let seen = values(&graph, &model, &inputs, |_| true).unwrap();
        let reader = graph.nodes().iter().find(|node| layer_weight(&graph, node) == Some(layer)).unwrap();
        let rows = seen[&graph.value(reader.inputs[0]).name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for method in ["smoothquant", "awq"] {
            let pass: Quantize = serde_json::from_value(serde_json::json!({ "scheme": "W8A8-STATIC", "method": method })).unwrap();
            let state = RunState::default();
            let (done, applied) = calibrated(&inputs, |context| pass.plan(&model, &state).unwrap().execute(context)).unwrap().unwrap();
            assert!(applied.details["rescaled"].as_u64() > Some(0), "{method}: {}", applied.details);
            let after = done.weights.get(norm).unwrap().floats(norm).unwrap();
            assert_ne!(after, before, "{method}");
            let rescaled = rows.chunks(before.len()).flat_map(|row| row.iter().zip(after.iter().zip(&before)).map(|(x, (after, before))| x * after / before));
            let largest = rescaled.fold(0f32, |largest, x| largest.max(x.abs()));
            let Encoding::Quantized(affine) = &done.weights.get(layer).unwrap().encoding else { panic!("{layer} is dense") };
            let scale = affine.activations.parameters().unwrap().scale();
            assert!((scale * 127.5 / largest - 1.0).abs() < 1e-4, "{method}: {scale}, not {}", largest / 127.5);
        }
    }
}

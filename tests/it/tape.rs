//! Gradients of whole models: the tape compared with the backward rules of ops, with and without
//! recomputation of segments.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress_core::store::{ActivationScheme, FloatFormat, FloatScale, Static};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::exec::{Executor, Inputs, MemoryCategory, MemoryTracker, Parameters, Residence, Tape};
use compress_graph::ir::ops::{Backward, Saved};
use compress_graph::ir::{Bindings, Dim, Graph, Node, input_tensor};

/// A different weight for each element.
fn weights(like: &Tensor) -> Tensor {
    let values: Vec<f32> = (0..like.elem_count()).map(|i| (1.7 * i as f32 + 0.3).sin()).collect();
    Tensor::from_vec(values, like.dims(), &Device::Cpu).unwrap()
}

/// Reference gradients of the parameters: all values are kept, and the backward rule of each node is
/// evaluated separately.
fn reference(graph: &Graph, parameters: &Parameters, inputs: &Inputs) -> BTreeMap<String, Tensor> {
    let mut values: Vec<Option<Tensor>> =
        graph.values().iter().map(|value| parameters.get(&value.name).ok().or_else(|| input_tensor(inputs, &value.name)?.ok())).collect();
    let operands = |values: &[Option<Tensor>], node: &Node| node.inputs.iter().map(|id| values[id.index()].clone().unwrap()).collect::<Vec<_>>();
    for node in graph.nodes() {
        values[node.output.index()] = Some(node.op.spec().eval(&operands(&values, node)).unwrap());
    }
    let mut gradients: Vec<Option<Tensor>> = vec![None; values.len()];
    let add = |gradients: &mut [Option<Tensor>], at: usize, found: Tensor| {
        gradients[at] = Some(gradients[at].take().map_or(found.clone(), |other| (other + &found).unwrap()));
    };
    for (_, id) in graph.outputs() {
        add(&mut gradients, id.index(), weights(values[id.index()].as_ref().unwrap()));
    }
    for node in graph.nodes().iter().rev() {
        let Some(gradient) = gradients[node.output.index()].take() else { continue };
        let inputs: Vec<Saved> = operands(&values, node).into_iter().map(Saved::full).collect();
        let output = Saved::full(values[node.output.index()].clone().unwrap());
        let backward = Backward { inputs: &inputs, output: &output, gradient: &gradient, needs_gradient: &vec![true; inputs.len()] };
        for (id, found) in node.inputs.iter().zip(node.op.spec().backward(&backward).unwrap()) {
            if let Some(found) = found {
                add(&mut gradients, id.index(), found);
            }
        }
    }
    graph.params().filter_map(|(id, value)| Some((value.name.clone(), gradients[id.index()].clone()?))).collect()
}

/// Gradients of the tape for these gradients of the outputs, and the peak memory of activations.
fn walked_from(
    Golden { device, graph, parameters, inputs, .. }: &Golden,
    cuts: &[usize],
    weights: &dyn Fn(&str, &Tensor) -> Tensor,
) -> (BTreeMap<String, Tensor>, u64) {
    let taps = graph.outputs().iter().map(|(_, id)| *id).collect();
    let tape = Tape::new(graph, device.clone(), taps, &|_| true, cuts);
    let memory_tracker = MemoryTracker::default();
    let forward = tape.forward(parameters, inputs, &memory_tracker, None).unwrap();
    let mut from = BTreeMap::new();
    for (name, id) in graph.outputs() {
        let gradient = weights(name, &forward.taps()[id]).to_device(device).unwrap();
        from.entry(*id).and_modify(|other: &mut Tensor| *other = (&*other + &gradient).unwrap()).or_insert(gradient);
    }
    let mut found: BTreeMap<String, Tensor> = BTreeMap::new();
    tape.backward(forward, from, parameters, &memory_tracker, &mut |name, gradient| {
        let sum = found.get(name).map_or_else(|| gradient.clone(), |other| (other + &gradient).unwrap());
        found.insert(name.to_owned(), sum);
        Ok(())
    })
    .unwrap();
    assert_eq!((memory_tracker.now(MemoryCategory::Activations), memory_tracker.now(MemoryCategory::Data)), (0, 0), "memory is still accounted for");
    let peaks = memory_tracker.peaks().0;
    (found, peaks.iter().find(|(category, _)| *category == MemoryCategory::Activations).unwrap().1)
}

fn walked(golden: &Golden, cuts: &[usize]) -> (BTreeMap<String, Tensor>, u64) {
    walked_from(golden, cuts, &|_, output| weights(output))
}

/// Weights of the loss of `scripts/goldens gradients`.
fn formula(count: usize, series: usize) -> Vec<f32> {
    (0..count).map(|i| (((7919 * i + 104_729 * series) % 2003) as f64 / 2003.0 - 0.5) as f32).collect()
}

struct Golden {
    device: Device,
    graph: Graph,
    parameters: Parameters,
    inputs: Inputs,
    outputs: Vec<String>,
    mask: Option<Tensor>,
}

fn golden(name: &str, device: Device) -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let model = Model::open(&folder).unwrap();
    let graph = model.graph().unwrap();
    let parameters = Parameters::load(&graph, &model.weights, &device, DType::F32, Residence::Computed, &work).unwrap();
    let stored = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
    let named = |prefix: &str| stored.iter().filter_map(|(name, t)| Some((name.strip_prefix(prefix)?.to_owned(), t.clone()))).collect::<BTreeMap<_, _>>();
    let mask = stored.get("in/attention_mask").cloned();
    Golden { device, graph, parameters, inputs: named("in/"), outputs: named("out/").into_keys().collect(), mask }
}

fn names() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn whole_models_have_the_gradients_of_pytorch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gradients/models.safetensors");
    let stored = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let (mut failures, mut compared) = (Vec::new(), 0);
    for name in names() {
        let golden = golden(&name, device());
        let weights = |output: &str, value: &Tensor| {
            let Some(series) = golden.outputs.iter().position(|other| other == output) else { return value.zeros_like().unwrap() };
            let weights = Tensor::from_vec(formula(value.elem_count(), series), value.dims(), &Device::Cpu).unwrap();
            match golden.mask.as_ref().filter(|mask| value.rank() == 3 && mask.dims() == &value.dims()[..2]) {
                Some(mask) => weights.broadcast_mul(&mask.ne(0i64).unwrap().to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap(),
                None => weights,
            }
        };
        let (found, _) = walked_from(&golden, &[], &weights);
        let prefix = format!("{name}/");
        let expected: BTreeMap<&str, Vec<f32>> =
            stored.iter().filter_map(|(key, tensor)| Some((key.strip_prefix(&prefix)?, tensor.to_vec1().unwrap()))).collect();
        let largest = expected.values().map(|numbers| numbers[0]).fold(0.0, f32::max);
        for (param, expected) in expected {
            let Some(gradient) = found.get(param) else {
                // PyTorch has gradients of zero for parameters whose effects are detached.
                if expected.iter().any(|number| *number != 0.0) {
                    failures.push(format!("{name}: no gradient of {param}"));
                }
                continue;
            };
            let gradient: Vec<f32> = gradient.flatten_all().unwrap().to_vec1().unwrap();
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32;
            let dot = gradient.iter().zip(formula(gradient.len(), 1000)).map(|(g, w)| f64::from(*g) * f64::from(w)).sum::<f64>() as f32;
            let ours: Vec<f32> = [norm, dot].into_iter().chain(gradient.iter().copied().take(8)).collect();
            let size = expected[0].max(1e-2 * largest);
            // The sum has as many terms as there are elements.
            let room = |at: usize| 1e-4 * size * if at == 1 { (gradient.len() as f32).sqrt().max(1.0) } else { 1.0 };
            for (at, (ours, theirs)) in ours.iter().zip(&expected).enumerate() {
                compared += 1;
                if (ours - theirs).abs() > room(at) || ours.is_nan() {
                    failures.push(format!("{name}, {param}, number {at}: {ours} for {theirs}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
    assert!(compared > 10_000, "only {compared} numbers were compared");
}

fn furthest(a: &Tensor, b: &Tensor) -> f32 {
    // Gradients that are zero up to rounding (biases of keys) have no relative error.
    let largest = b.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap().max(0.5);
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap() / largest
}

/// Bytes of the values that are computed before a node and read by it or later nodes.
fn across(graph: &Graph, inputs: &Inputs, cut: usize) -> u64 {
    let mut sizes = Bindings::new();
    for (_, value) in graph.inputs() {
        let Some(tensor) = inputs.get(&value.name) else { continue };
        let named = value.ty.shape.iter().zip(tensor.dims());
        sizes.extend(named.filter_map(|(dim, size)| if let Dim::Named(name) = dim { Some((name.clone(), *size)) } else { None }));
    }
    let (before, behind) = graph.nodes().split_at(cut);
    let kept = before.iter().map(|node| node.output).filter(|id| behind.iter().any(|node| node.inputs.contains(id)));
    kept.map(|id| graph.value(id).ty.shape.iter().map(|dim| dim.evaluate(&sizes).unwrap() as u64).product::<u64>() * 4).sum()
}

#[test]
fn whole_models_match_the_backward_rules_of_ops() {
    let mut failures = Vec::new();
    let names = names();
    for name in &names {
        let golden = golden(name, Device::Cpu);
        let Golden { graph, parameters, inputs, .. } = &golden;
        let expected = reference(graph, parameters, inputs);
        let nodes = graph.nodes().len();
        let (_, most) = walked(&golden, &[]);
        for cuts in [vec![], vec![nodes / 2], (1..nodes).step_by(7).collect(), (1..nodes).collect::<Vec<_>>()] {
            let (found, peak) = walked(&golden, &cuts);
            // Very short segments store more at their boundaries than they save. At each boundary, at
            // most the values that cross it are stored.
            let across = cuts.first().map_or(0, |cut| across(graph, inputs, *cut));
            assert!(cuts.len() > 1 || peak <= most + across, "{name}: {} segments took {peak} bytes, one took {most}", cuts.len() + 1);
            if found.keys().ne(expected.keys()) {
                failures.push(format!("{name}: gradients of {:?}, not of {:?}", found.keys(), expected.keys()));
                continue;
            }
            for (param, gradient) in &found {
                let worst = furthest(gradient, &expected[param]);
                if worst.is_nan() || worst > 1e-4 {
                    failures.push(format!("{name} in {} segments, {param}: {worst:e}", cuts.len() + 1));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), names.len(), failures.join("\n"));
}

/// Decays accumulate over the tokens, so that computations with 16 bits keep 32 bits of them, as in
/// transformers.
#[test]
fn decays_are_not_rounded_to_16_bits() {
    let graph: Graph = "input x: float[batch, sequence, 1]\nparam b: float[1]\nparam l: float[1]\n\
        y = Decay(x, b, l) -> float[batch, sequence, 1]\noutput y = y\n"
        .parse()
        .unwrap();
    let tensor = |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
    let parameters = Parameters::from_tensors([("b".to_owned(), tensor(&[0.0625], &[1])), ("l".to_owned(), tensor(&[1.5], &[1]))].into(), DType::BF16);
    let inputs: Inputs = [("x".to_owned(), tensor(&[-3.25, 0.5], &[1, 2, 1]))].into();
    let found = Executor::new(&graph, parameters, Device::Cpu).run(&inputs).unwrap().remove("y").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (x, found) in [-3.25f64, 0.5].into_iter().zip(found) {
        let expected = -1.5f64.exp() * (x + 0.0625).exp().ln_1p();
        assert!((f64::from(found) / expected - 1.0).abs() < 1e-5, "{x}: {found} instead of {expected}");
    }
}

/// The product with the unit matrix has the rounded input as output, with straight-through gradients, and the
/// gradient of the matrix is that of a product with the rounded input.
#[test]
fn rounded_inputs_have_the_gradients_of_pytorch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/fake-quantization.safetensors");
    let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let tensor = |name: &str| golden[&format!("activations/{name}")].to_dtype(DType::F32).unwrap().flatten_to(1).unwrap();
    let graph: Graph = "input b: float[10, 64]\nparam x: float[10, 64]\nparam w: float[64, 64]\nz = Linear(x, w) -> float[10, 64]\n\
                        y = Add(z, b) -> float[10, 64]\noutput y = y\n"
        .parse()
        .unwrap();
    let inputs: Inputs = [("b".to_owned(), Tensor::zeros((10, 64), DType::F32, &Device::Cpu).unwrap())].into();
    let output = graph.outputs()[0].1;
    let fixed = |name: &str| Static::new(golden[&format!("activations/{name}/scale")].to_vec1::<f32>().unwrap()[0], None);
    for (name, scheme) in [
        ("int8-token", ActivationScheme::DynamicToken),
        ("fp8-token", ActivationScheme::Float(FloatFormat::E4m3, FloatScale::Token)),
        ("fp8-static", ActivationScheme::Float(FloatFormat::E4m3, FloatScale::Static(fixed("fp8-static")))),
        ("mxfp4", ActivationScheme::Float(FloatFormat::E2m1, FloatScale::PowerOfTwo)),
        ("mxfp8", ActivationScheme::Float(FloatFormat::E4m3, FloatScale::PowerOfTwo)),
        ("nvfp4", ActivationScheme::Float(FloatFormat::E2m1, FloatScale::Relative(fixed("nvfp4")))),
    ] {
        let tensors = [("x".to_owned(), tensor("in")), ("w".to_owned(), Tensor::eye(64, DType::F32, &Device::Cpu).unwrap())];
        let parameters = Parameters::from_tensors(tensors.into(), DType::F32).with_input_schemes([("w".to_owned(), scheme)].into());
        let tape = Tape::new(&graph, Device::Cpu, [output].into(), &|_| true, &[]);
        let tracker = MemoryTracker::default();
        let forward = tape.forward(&parameters, &inputs, &tracker, None).unwrap();
        let rounded = forward.taps()[&output].clone();
        let mut found: BTreeMap<String, Tensor> = BTreeMap::new();
        tape.backward(forward, [(output, tensor("gradient"))].into(), &parameters, &tracker, &mut |name, gradient| {
            found.insert(name.to_owned(), gradient);
            Ok(())
        })
        .unwrap();
        let expected = tensor(&format!("{name}/rounded"));
        let of_matrix = tensor("gradient").t().unwrap().matmul(&expected).unwrap();
        for (what, found, expected) in
            [("output", &rounded, &expected), ("x", &found["x"], &tensor(&format!("{name}/gradient"))), ("w", &found["w"], &of_matrix)]
        {
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let (found, expected) = (values(found), values(expected));
            let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(found.len() == expected.len() && far <= 2e-6 * largest, "{name}: {what} differs by {far} of {largest}");
        }
    }
}

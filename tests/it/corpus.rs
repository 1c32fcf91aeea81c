//! Checks the seeds and the corpus of `fuzz/` without a fuzzer: inputs that cover the parsers, and
//! inputs that once crashed them.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::checks;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use std::sync::Arc;

use candle_core::{DType, Device};
use compress::Model;
use compress::export::{Onnx, Safetensors};
use compress::pass::{Cast, PruneStructured, QuantizeDynamic};
use compress::pipeline::Pipeline;
use compress::recipe::Recipe;
use compress_core::store::writer::Piece;
use compress_core::store::{self, Block, BlockSink, Encoding, View, Weight, WeightSource, Weights};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::data::synthetic_with_sizes;
use compress_engine::exec::{Executor, Inputs, MemoryTracker, Parameters, Residence, Tape};
use compress_graph::analysis::cost;
use compress_graph::ir::{Catalog, Graph, GraphFile};
use compress_onnx::file::decode;
use compress_onnx::proto::ModelProto;
use prost::Message;

fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("seed-"))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).unwrap()))
        .collect();
    found.sort();
    found
}

/// Files found by fuzzers, minimized to a small set with the same coverage.
fn corpus_files(target: &str) -> Vec<(String, Vec<u8>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(format!("{target}.tar.gz"));
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(File::open(path).unwrap()));
    let files = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().display().to_string(), bytes)
    });
    files.collect()
}

/// The names of tensors specify their shapes: `w3x4` is `[3, 4]`.
struct Named;

impl Catalog for Named {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        name.strip_prefix('w')?.split('x').map(|size| size.parse().ok()).collect()
    }

    fn nearest(&self, _name: &str) -> Option<String> {
        None
    }
}

#[test]
fn seeds_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (mut read, mut refused) = (0, 0);
    let mut count = |ok: bool| if ok { read += 1 } else { refused += 1 };
    for (name, bytes) in seeds("reader") {
        let path = folder.path().join(format!("{name}.safetensors"));
        std::fs::write(&path, bytes).unwrap();
        count(Model::open(path).is_ok());
    }
    for (_, bytes) in seeds("recipe") {
        count(Recipe::parse(&String::from_utf8_lossy(&bytes), Path::new("recipe.yaml")).is_ok());
    }
    assert!(read > 10 && refused > 20, "{read} read, {refused} rejected");
    let files = seeds("opening");
    assert!(files.len() > 5);
    for (name, bytes) in files {
        let path = folder.path().join(format!("{name}.onnx"));
        std::fs::write(&path, bytes).unwrap();
        match Model::open(&path) {
            Ok(model) => assert!(model.weights.by_name.values().all(|weight| weight.visit(1, &mut |_| Ok(())).is_ok()), "{name}"),
            Err(e) => assert!(name == "seed-external" && e.to_string().contains("`weights`"), "{name}: {e}"),
        }
    }
    for (name, bytes) in seeds("gguf") {
        let path = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&path, bytes).unwrap();
        match Model::open(&path) {
            Ok(model) => assert!(model.weights.by_name.values().all(|weight| weight.visit(1, &mut |_| Ok(())).is_ok()), "{name}"),
            Err(e) => {
                let named = [("seed-blocks", "the architecture `none`"), ("seed-rows-of-nothing", "not divisible into heads")];
                assert!(named.iter().any(|(seed, what)| name == *seed && e.to_string().contains(what)), "{name}: {e}");
            }
        }
    }
    for (name, bytes) in seeds("pytorch") {
        let path = folder.path().join(format!("{name}.pt"));
        std::fs::write(&path, bytes).unwrap();
        let opened = Model::open(&path).map(|model| model.weights.by_name.values().all(|weight| weight.visit(1, &mut |_| Ok(())).is_ok()));
        assert_eq!(opened.unwrap_or(false), !["seed-object", "seed-repeated", "seed-sparse"].contains(&name.as_str()), "{name}");
    }
    let graphs = seeds("graph");
    assert!(graphs.len() > 5);
    for (name, bytes) in graphs {
        let file: GraphFile = serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        match file.build(&Named) {
            Ok(graph) => {
                let again: GraphFile = serde_json::from_value(serde_json::to_value(GraphFile::from(&graph)).unwrap()).unwrap();
                assert_eq!(again.build(&Named).unwrap().to_string(), graph.to_string(), "{name}");
                compress_graph::analysis::groups(&graph).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            Err(e) => assert!(e.to_string().contains("graph"), "{name}: {e}"),
        }
    }
}

#[test]
fn inputs_of_the_corpus_are_read_or_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    let scratch = checks::Scratch::new("corpus-files");
    let (mut read, mut all) = ([0; 7], [0; 7]);
    for (target, name) in ["reader", "recipe", "graph", "onnx", "opening", "gguf", "pytorch"].into_iter().enumerate() {
        for (_, bytes) in corpus_files(name) {
            all[target] += 1;
            read[target] += usize::from(match name {
                "reader" => {
                    std::fs::write(&path, bytes).unwrap();
                    Model::open(&path).is_ok_and(|model| model.weights.by_name.values().all(|weight| weight.visit(1, &mut |_| Ok(())).is_ok()))
                }
                "recipe" => Recipe::parse(&String::from_utf8_lossy(&bytes), Path::new("recipe.yaml")).is_ok(),
                "graph" => serde_json::from_slice::<GraphFile>(&bytes).is_ok_and(|file| file.build(&Named).is_ok()),
                "opening" => {
                    let path = path.with_extension("onnx");
                    std::fs::write(&path, bytes).unwrap();
                    Model::open(&path).is_ok_and(|model| model.weights.by_name.values().all(|weight| weight.visit(1, &mut |_| Ok(())).is_ok()))
                }
                "gguf" => checks::gguf(&scratch, &bytes, true) != checks::GgufResult::Rejected,
                "pytorch" => checks::pytorch(&scratch, &bytes),
                _ => decode(&[Piece::Bytes(bytes)]).is_ok_and(|model| ModelProto::decode(model.encode_to_vec().as_slice()).is_ok()),
            });
        }
    }
    let both = |read: usize, all: usize| read > 20 && all > read + 20;
    assert!(read.into_iter().zip(all).all(|(read, all)| both(read, all)), "{read:?} of {all:?} are read");
}

/// Floats in memory.
struct Floats(Vec<u8>);

impl WeightSource for Floats {
    fn visit(&self, _unit: usize, sink: BlockSink) -> compress::Result<()> {
        sink(Block::untouched(View::dense(store::DType::F32, &self.0)))
    }
}

/// The shape and the values of a tensor; `None` for large tensors.
fn tensor(name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
    let shape = Named.shape(name)?;
    let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size)).filter(|elements| *elements <= 4096)?;
    Some((shape, (0..elements).map(|i| (i as f32 * 0.7).sin()).collect()))
}

fn weights(graph: &Graph) -> Option<Weights> {
    let weight = |name: &str| {
        let (shape, values) = tensor(name)?;
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Some(Weight::new(store::DType::F32, shape, Encoding::Dense, Arc::new(Floats(bytes))))
    };
    let by_name = graph.params().map(|(_, value)| Some((value.name.clone(), weight(&value.name)?))).collect::<Option<_>>()?;
    Some(Weights { by_name, ..Default::default() })
}

/// The valid graphs, by the name of their file.
fn graphs() -> impl Iterator<Item = (String, Graph)> {
    let files = seeds("answers").into_iter().chain(corpus_files("answers"));
    files.filter_map(|(name, bytes)| Some((name, serde_json::from_slice::<GraphFile>(&bytes).ok()?.build(&Named).ok()?)))
}

/// Backward pass from gradients of ones at every output. Returns whether it succeeds.
fn learns(graph: &Graph, parameters: &Parameters, inputs: &Inputs) -> bool {
    let taps = graph.outputs().iter().map(|(_, id)| *id).collect();
    let (tape, memory_tracker) = (Tape::new(graph, Device::Cpu, taps, &|_| true, &[]), MemoryTracker::default());
    let Ok(forward) = tape.forward(parameters, inputs, &memory_tracker, None) else { return false };
    let ones = forward.taps().iter().filter(|(_, tensor)| tensor.dtype().is_float()).map(|(id, tensor)| Some((*id, tensor.ones_like().ok()?)));
    let Some(from) = ones.collect() else { return false };
    tape.backward(forward, from, parameters, &memory_tracker, &mut |name, gradient| {
        assert_eq!(Named.shape(name).as_deref(), Some(gradient.dims()), "{name}");
        Ok(())
    })
    .is_ok()
}

#[test]
fn graphs_that_fuzzers_have_found_answer_or_are_refused() {
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let (mut answered, mut refused, mut learned) = (0, 0, 0);
    for (name, graph) in graphs() {
        // Sizes from 1 to 8, derived from the names of the axes.
        let sizes = graph.bind(|name| name.bytes().fold(0, |a, b| (a + usize::from(b)) % 8) + 1);
        let (macs, memory) = cost(&graph, &sizes);
        let (Some(weights), true) = (weights(&graph), macs <= 1 << 18 && memory <= 1 << 20) else { continue };
        let Ok(batch) = synthetic_with_sizes(&graph, 0, &sizes) else { continue };
        let parameters = Parameters::load(&graph, &weights, &Device::Cpu, DType::F32, Residence::Computed, &work);
        learned += usize::from(parameters.as_ref().is_ok_and(|parameters| learns(&graph, parameters, &batch.inputs)));
        let Ok(answers) = parameters.and_then(|parameters| Executor::new(&graph, parameters, Device::Cpu).run(&batch.inputs)) else {
            refused += 1;
            continue;
        };
        answered += 1;
        for (output, id) in graph.outputs() {
            let wanted: Option<Vec<usize>> = graph.value(*id).ty.shape.iter().map(|dim| dim.evaluate(&sizes)).collect();
            assert!(wanted.is_none_or(|wanted| wanted == answers[output].dims()), "{name}: {output}");
        }
    }
    assert!(answered > 100 && refused > 0 && learned > 100, "{answered} computed, {refused} rejected, {learned} with gradients");
}

/// A folder with a graph and random weights for it; `None` if a weight would be large.
fn folder(graph: &Graph, path: &Path) -> Option<()> {
    let mut tensors = std::collections::HashMap::new();
    for (_, value) in graph.params() {
        let (shape, values) = tensor(&value.name)?;
        tensors.insert(value.name.clone(), candle_core::Tensor::from_vec(values, shape, &Device::Cpu).ok()?);
    }
    candle_core::safetensors::save(&tensors, path.join("model.safetensors")).ok()?;
    std::fs::write(path.join("graph.json"), serde_json::to_string(&GraphFile::from(graph)).ok()?).ok()
}

#[test]
fn graphs_that_fuzzers_have_found_are_compressed_or_refused() {
    let int8 = QuantizeDynamic { targets: vec!["*".parse().unwrap()], ..QuantizeDynamic::default() };
    let (mut written, mut refused) = (0, 0);
    let place = tempfile::tempdir().unwrap();
    for (number, (_, graph)) in graphs().enumerate() {
        let inside = place.path().join(number.to_string());
        std::fs::create_dir(&inside).unwrap();
        if folder(&graph, &inside).is_none() {
            continue;
        }
        let Ok(model) = Model::open(&inside) else { continue };
        let onnx = || Pipeline::builder().export(Onnx::default()).export(Safetensors::default()).threads(1).force(true);
        for builder in [onnx().pass(Cast::default()), onnx().pass(int8.clone()), onnx().pass(PruneStructured::default())] {
            let done = builder.build().and_then(|pipeline| pipeline.run(model.clone(), place.path().join("out")));
            if done.is_ok() { written += 1 } else { refused += 1 }
        }
    }
    assert!(written > 100 && refused > 100, "{written} written, {refused} rejected");
}

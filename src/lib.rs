//! Compression of neural network checkpoints: pruning, quantization, low-rank layers, distillation, and
//! export as safetensors, ONNX and GGUF.
//!
//! A [`Pipeline`] has passes, output formats and settings. It opens a [`Model`] without reading its
//! weights, computes them block by block while it writes them, verifies the files, and returns a
//! [`Report`]. The output folder appears complete or not at all.
//!
//! ```
//! use compress::prelude::*;
//!
//! # fn main() -> compress::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let (model, output) = (concat!(env!("CARGO_MANIFEST_DIR"), "/examples/build_script/model"), folder.path().join("out"));
//! let pipeline = Pipeline::builder()
//!     .pass(PruneUnstructured { amount: Some(Amount::fraction(0.5)), ..Default::default() })
//!     .pass(QuantizeDynamic::default())
//!     .export(Safetensors::with_layout(Layout::Sparse))
//!     .build()?;
//! let model = Model::open(model)?;
//! let plan = pipeline.plan(&model)?;
//! let report = pipeline.run(model, &output)?;
//! assert!(report.size.ratio > 2.0 && report.outputs[0].path == plan.files[0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Passes
//!
//! A pass is a struct with the options of a recipe. [`Step::from_name`](pass::Step::from_name) returns it
//! by its name.
//!
//! ```
//! use compress::pass::*;
//! use compress::prelude::*;
//!
//! # fn main() -> compress::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! let run = |name: &str, pass: Step| -> compress::Result<Report> {
//!     let model = Model::open(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/build_script/model"))?;
//!     Pipeline::builder().pass(pass).measure(false).build()?.run(model, folder.path().join(name))
//! };
//! // Keeps two of every four weights.
//! let pruned = run("pruned", PruneUnstructured { pattern: Some(NOfM { n: 2, m: 4 }), ..Default::default() }.into())?;
//! assert!(pruned.size.after.nonzero < 20_000 && pruned.size.before.nonzero > 38_000);
//! // Integers of 8 bits with a scale per output channel, for vLLM.
//! run("w8a8", Quantize { scheme: Scheme::W8A8, ..Default::default() }.into())?;
//! // The same for ONNX Runtime and compressed-tensors, with scales that minimize the squared error.
//! run("int8", QuantizeDynamic { observer: WeightObserver::Mse, ..Default::default() }.into())?;
//! // Codebooks of 16 values.
//! run("palettes", Palettize { bits: 4, ..Default::default() }.into())?;
//! let halved = run("bf16", Cast { to: FloatFormat::Bf16, ..Default::default() }.into())?;
//! assert!((1.9..2.1).contains(&halved.size.ratio));
//! # Ok(())
//! # }
//! ```
//!
//! The other passes run the model, and need the feature `run`. Samples are in files, or come from the
//! program:
#![cfg_attr(feature = "run", doc = "```")]
#![cfg_attr(not(feature = "run"), doc = "```ignore")]
//! use compress::pass::*;
//! use compress::plugin::{Array, DataSource, Sample, register_source};
//! use compress::prelude::*;
//!
//! struct Images;
//!
//! impl DataSource for Images {
//!     fn count(&self) -> usize {
//!         64
//!     }
//!
//!     fn sample(&self, number: usize) -> compress::Result<Sample> {
//!         let pixels: Vec<f32> = (0..784).map(|at| ((at * (number + 3)) % 255) as f32 / 255.0).collect();
//!         let mut sample = Sample::new("pixels", Array::floats([784], pixels));
//!         sample.class = Some(number % 10);
//!         Ok(sample)
//!     }
//!
//!     fn has_classes(&self) -> bool {
//!         true
//!     }
//! }
//!
//! # fn main() -> compress::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! register_source("images", Images)?;
//! let data = Data { source: Some("images".into()), ..Default::default() };
//! let run = |name: &str, passes: Vec<Step>| -> compress::Result<Report> {
//!     let model = Model::open(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/build_script/model"))?;
//!     let builder = Pipeline::builder().calibration(data.clone()).train(data.clone());
//!     builder.passes(passes).measure(false).build()?.run(model, folder.path().join(name))
//! };
//! // Removes half of the neurons.
//! let amount = Some(Amounts::All(Amount::fraction(0.5)));
//! let smaller = run("structured", vec![PruneStructured { amount, ..Default::default() }.into()])?;
//! assert!(smaller.size.after.parameters < smaller.size.before.parameters);
//! // Two layers with half of the parameters in place of each layer.
//! run("low-rank", vec![Decompose { rank: Amount::fraction(0.5), ..Default::default() }.into()])?;
//! // Activations in int8, with scales from the samples; then floats again.
//! run("static", vec![QuantizeStatic::default().into(), Dequantize::default().into()])?;
//! // One step of training on the classes, and one on the outputs of the model before pruning.
//! let prune = PruneUnstructured { amount: Some(Amount::fraction(0.5)), ..Default::default() };
//! let training = Training { max_steps: Some(1), ..Default::default() };
//! let finetune = Finetune { training: training.clone(), ..Default::default() };
//! run("finetuned", vec![prune.clone().into(), finetune.into()])?;
//! run("distilled", vec![prune.into(), Distill { training, ..Default::default() }.into()])?;
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! | --- | --- |
//! | none | opening and writing safetensors and PyTorch checkpoints, passes over weights |
//! | `run` | execution of models: calibration, training, evaluation, ONNX |
//! | `remote` | models and results on the Hugging Face Hub, in buckets and on web servers |
//! | `zstd` | reports state the size after general-purpose compression |
//! | `provenance` | outputs can be signed and have a software bill of materials |
//! | `cli` | the program `compress`; a library does not need it |
//! | `cuda`, `nccl` | execution on NVIDIA GPUs, on several of them |
//!
//! Features only add items. The default is `cli`, `remote` and `run`; a dependency sets
//! `default-features = false`. [`build::embed`] compresses a model in a build script, and [`plugin`]
//! registers passes, formats, metrics, data sources and stores.
//!
//! # Threads
//!
//! All functions block. They can be called in an asynchronous task if it may block, as in
//! `tokio::task::spawn_blocking`. [`Builder::threads`](pipeline::Builder::threads) limits the threads that
//! compute and write weights, and a [`Cancel`] handle stops a run from another thread. Nothing is printed.
//!
//! # Stability
//!
//! The public API is that of this crate. The crates `compress-core`, `compress-kernels`,
//! `compress-graph`, `compress-onnx` and `compress-engine` are its parts and change with every version, as
//! do items that are not documented here, such as fields of [`Model`].
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod build;
pub mod contract;
mod entry;
pub mod export;
pub mod pass;
pub mod pipeline;
pub mod plugin;
pub mod prelude;
pub mod provenance;
pub mod recipe;
pub mod report;
mod run_state;

#[cfg(feature = "cli")]
pub mod cli;

/// Items for the tests of this repository.
#[doc(hidden)]
pub mod internal {
    pub use crate::run_state::RunState;
}

pub use compress_core::work::{Cancel, Event, Progress, ProgressUnit};
pub use compress_core::{Error, ParseError, Result};
pub use compress_engine::Model;
pub use pipeline::Pipeline;
pub use recipe::Recipe;
pub use report::Report;

use compress_core::{aliases, cache, error, files, one_or_several, output, program, ratio, registry, store, work};
use compress_engine::{evaluation, model, yaml_text};
use compress_graph::arch;
use compress_kernels as kernel;
#[cfg(feature = "run")]
use {
    compress_core::heap,
    compress_engine::{calibration, data, exec, generation, train},
    compress_graph::{analysis, gpu, ir},
    compress_onnx::{self as onnx, runtime},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct RustPage;

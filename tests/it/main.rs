//! Integration tests, as one binary: `cargo test --test it NAME::` runs those of one module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod blockwise;
mod cached;
mod cached_results;
mod cards;
#[path = "../../fuzz/changes.rs"]
mod changes;
#[path = "../../fuzz/checks.rs"]
mod checks;
mod cli;
mod common;
mod configs;
mod contract;
mod corpus;
mod corrections;
mod deployment;
mod drafts;
mod evaluation;
mod families;
mod generation;
mod gguf;
mod goldens;
mod groups;
mod imports;
mod language;
mod laws;
mod layerwise;
mod loads;
mod low_bits;
mod low_rank;
mod mixed_schemes;
mod mutated;
mod onnx;
mod onnx_cached;
mod onnx_in;
mod onnx_int8;
mod onnx_lift;
mod onnx_opaque;
mod onnx_outputs;
mod ops;
mod optimizers;
mod package;
mod parity;
mod parts;
mod pieces;
mod plugins;
mod properties;
mod provenance;
mod python_package;
mod quantization_config;
mod readme;
mod report;
mod run;
mod runtime;
mod search;
mod static_int8;
mod structured;
mod tape;
mod tidy;
mod train;
mod train_encoder_decoder;
mod train_processes;
mod train_reports;
mod training_data;
mod vocabulary;

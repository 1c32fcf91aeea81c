//! Stand-in for `running` in builds without the feature `run`.
#![allow(clippy::unnecessary_wraps, clippy::unused_self)]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::args::Global;
use crate::contract::Target;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pipeline::{Builder, Pipeline};
use crate::report::{Environment, Report};

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Graph {}

impl Graph {
    pub fn show(&self, _model: &Model, _global: &Global) -> Result<bool> {
        Ok(false)
    }
}

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Samples {}

impl Samples {
    pub fn configure(self, builder: Builder) -> Builder {
        builder
    }
}

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Trials {}

#[derive(Serialize)]
pub(super) struct Attempt {
    pub is_ok: bool,
    pub text: String,
    pub value: Value,
}

impl Trials {
    pub fn attempt(&self, _output: &Path, _target: Target, _global: &Global) -> Result<Option<Attempt>> {
        Ok(None)
    }
}

#[derive(Debug, Default, clap::Args)]
#[group(skip)]
pub(super) struct Models {}

impl Models {
    pub fn configure(&self, builder: Builder) -> Result<Builder> {
        Ok(builder)
    }

    pub fn environment(&self) -> Result<Environment> {
        Ok(Environment::detect())
    }
}

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Fetch {}

impl Fetch {
    pub fn fetch(&self) -> Result<Option<PathBuf>> {
        Ok(None)
    }
}

pub(super) struct Runtimes {
    pub remark: &'static str,
    pub onnxruntime: Result<(String, String)>,
    pub cache: Option<String>,
}

impl Runtimes {
    pub fn find() -> Runtimes {
        let missing = Error::run("ONNX Runtime", "is not part of this program", "build with the feature `run`");
        Runtimes { remark: " (this program was built without support for running models)", onnxruntime: Err(missing), cache: None }
    }
}

#[derive(Default)]
pub(super) struct Computation {
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    pub cannot_run: Option<String>,
    pub unused: Option<Unused>,
}

#[derive(Serialize)]
pub(super) struct Unused {
    pub keys: Vec<String>,
    pub weights: Vec<String>,
    pub tower: Vec<String>,
    pub token_maps: Vec<String>,
}

impl Computation {
    pub fn from_model(_model: &Model) -> Computation {
        Computation::default()
    }
}

pub(super) fn set_threads(_threads: NonZeroUsize) {}

pub(super) fn with_cache(builder: Builder, _reuse: bool) -> Builder {
    builder
}

pub(super) fn with_rates(builder: Builder, _global: &Global, _measures: bool) -> Builder {
    builder
}

pub(super) fn record_times(_report: &Report, _global: &Global) {}

pub(super) fn follow(_pipeline: &Pipeline, _model: &Model, _folder: &Path) -> Result<()> {
    Ok(())
}

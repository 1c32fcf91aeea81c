//! What runs models on this machine: for every command, and for `compress doctor`.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::exec::{self, Choice};
use crate::model::Model;
use crate::pipeline::Builder;
use crate::report::Environment;
use crate::store::{ByteSize, OpenSize, OpenSizes};
use crate::{cache, runtime};

// As for `Samples`.
#[derive(Debug, Default, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Models {
    /// Device to run models on: auto, cpu, cuda or cuda:N; weight passes need none
    #[arg(long, global = true, default_value_t, value_name = "DEVICE")]
    pub device: Choice,
    /// Most memory that models may take when they run, like 8GB: those that do not fit run block by block [default: what is free]
    #[arg(long, global = true, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Sizes that an .onnx file leaves open: NAME=128, or INPUT=1x512
    #[arg(long = "size", global = true, value_name = "NAME=SIZE", value_parser = open_size)]
    sizes: Vec<(String, OpenSize)>,
    /// Write memory-trace.json: what passes that run the model hold in memory when, for ui.perfetto.dev and chrome://tracing
    #[arg(long, global = true)]
    pub memory_trace: bool,
}

impl Models {
    /// Tells a pipeline.
    ///
    /// # Errors
    /// As [`sizes`](Models::sizes).
    pub fn tell(&self, builder: Builder) -> Result<Builder> {
        let builder = builder.device(self.device).memory(self.memory.map(|size| size.0)).memory_trace(self.memory_trace);
        Ok(builder.sizes(self.sizes()?))
    }

    /// Tells a model that is run outside a pipeline.
    pub fn tell_model(&self, model: &Model) -> Result<()> {
        model.tell_sizes(&self.sizes()?)
    }

    /// Sizes that are told.
    ///
    /// # Errors
    /// A name stands twice.
    pub fn sizes(&self) -> Result<OpenSizes> {
        let mut told = OpenSizes::new();
        for (name, size) in &self.sizes {
            if told.insert(name.clone(), size.clone()).is_some() {
                return Err(Error::option("sizes", format!("`{name}` is told twice: leave one `--size {name}=` out")));
            }
        }
        Ok(told)
    }

    /// The machine, with the device that models run on.
    pub fn environment(&self) -> Result<Environment> {
        Ok(Environment::detect().on(exec::name(&self.device.open()?), runtime::description()))
    }
}

/// A name and its size; names of sizes may be formulas.
fn open_size(text: &str) -> std::result::Result<(String, OpenSize), String> {
    let (name, size) = text.rsplit_once('=').ok_or_else(|| format!("`{text}` is not of the form NAME=SIZE"))?;
    Ok((name.trim().to_owned(), size.parse()?))
}

// As for `Samples`.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Fetch {
    /// Bring ONNX Runtime, which runs .onnx files: pip downloads its wheel, the library in it goes to the cache
    #[arg(long)]
    fetch: bool,
}

impl Fetch {
    /// Brings what was asked for.
    pub fn fetch(&self) -> Result<Option<PathBuf>> {
        self.fetch.then(runtime::fetch).transpose()
    }
}

/// What runs models on this machine.
pub(in crate::cli) struct Runtimes {
    /// What is to be said of the device.
    pub remark: &'static str,
    /// Version and place of ONNX Runtime, or why it cannot be used.
    pub onnxruntime: Result<(String, String)>,
    pub cache: Option<String>,
}

impl Runtimes {
    pub fn find() -> Runtimes {
        let remark = if candle_core::utils::cuda_is_available() { "" } else { " (this program was built without CUDA)" };
        let onnxruntime = runtime::library().map(|path| runtime::description().unwrap_or_else(|| (String::new(), path.display().to_string())));
        Runtimes { remark, onnxruntime, cache: cache::folder(cache::variable).map(|folder| folder.display().to_string()) }
    }
}

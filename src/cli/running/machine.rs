//! Device, memory, threads and cache of running models, and the runtimes for `compress doctor`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crate::error::{Error, ParseError, Result};
use crate::exec::{self, DeviceChoice};
use crate::model::Model;
use crate::pipeline::{Builder, Pipeline, ResultCache};
use crate::report::Environment;
use crate::store::{ByteSize, OpenSize, OpenSizes};
use crate::{cache, runtime};

// As for `Samples`.
#[derive(Debug, Default, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Models {
    /// Device to run models on: auto, cpu, cuda or cuda:N; not used by passes over weights
    #[arg(long, global = true, default_value_t, value_name = "DEVICE")]
    pub device: DeviceChoice,
    /// Memory limit of running models, like 8GB; models that exceed it run block by block [default: three
    /// quarters of the free memory]
    #[arg(long, global = true, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Size of a dynamic axis of an .onnx file: NAME=128, or INPUT=1x512; or height=448 and width=448, the
    /// size of images in the texts of a model with a vision tower
    #[arg(long = "size", global = true, value_name = "NAME=SIZE", value_parser = open_size)]
    sizes: Vec<(String, OpenSize)>,
    /// Write memory-trace.json: the allocations over time of passes that run the model, for ui.perfetto.dev
    /// and chrome://tracing
    #[arg(long, global = true)]
    pub memory_trace: bool,
}

impl Models {
    /// Applies the arguments to a pipeline.
    pub fn configure(&self, builder: Builder) -> Result<Builder> {
        let builder = builder.device(self.device).memory(self.memory.map(|size| size.0)).memory_trace(self.memory_trace);
        Ok(builder.sizes(self.sizes()?))
    }

    /// Applies the sizes to a model that is run outside of a pipeline.
    pub fn configure_model(&self, model: &Model) -> Result<()> {
        model.fix_sizes(&self.sizes()?)
    }

    /// Rejects sizes, for a command that does not use them.
    pub fn require_no_sizes(&self) -> Result<()> {
        if self.sizes.is_empty() { Ok(()) } else { Err(Error::option("--size", "has no effect on this command: remove it")) }
    }

    /// The sizes by name.
    ///
    /// # Errors
    /// A name is specified twice.
    pub fn sizes(&self) -> Result<OpenSizes> {
        let mut sizes = OpenSizes::new();
        for (name, size) in &self.sizes {
            if sizes.insert(name.clone(), size.clone()).is_some() {
                return Err(Error::option("sizes", format!("`{name}` is specified twice: remove one `--size {name}=`")));
            }
        }
        Ok(sizes)
    }

    /// The machine, with the device that models run on.
    pub fn environment(&self) -> Result<Environment> {
        Ok(Environment::detect().on(exec::device_name(&self.device.open()?), runtime::description()))
    }
}

/// Parses a name and its size. Names of axes may be formulas.
fn open_size(text: &str) -> std::result::Result<(String, OpenSize), ParseError> {
    let (name, size) = text
        .rsplit_once('=')
        .ok_or_else(|| format!("`{text}` is not of the form NAME=SIZE, the size of an axis of an ONNX file; `--max-size` of `auto` limits the output"))?;
    Ok((name.trim().to_owned(), size.parse()?))
}

// As for `Samples`.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Fetch {
    /// Install ONNX Runtime, which runs .onnx files: pip downloads its wheel, and the library is copied to
    /// the cache
    #[arg(long)]
    fetch: bool,
}

impl Fetch {
    /// Installs ONNX Runtime, if requested.
    pub fn fetch(&self) -> Result<Option<PathBuf>> {
        self.fetch.then(runtime::fetch).transpose()
    }
}

/// Runtimes of this machine.
pub(in crate::cli) struct Runtimes {
    /// Remark about the device.
    pub remark: &'static str,
    /// Version and path of ONNX Runtime, or the reason why it cannot be used.
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

/// Sets the number of threads that run models.
pub(in crate::cli) fn set_threads(threads: NonZeroUsize) {
    // Fails only if the global thread pool was already initialized.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads.get()).build_global();
}

/// Enables the cache of pass results in the user's cache folder. `reuse`: results of earlier runs are also
/// used without --resume.
pub(in crate::cli) fn with_cache(builder: Builder, reuse: bool) -> Builder {
    match ResultCache::in_user_cache() {
        Some(cache) => builder.cache(cache, reuse),
        None => builder,
    }
}

/// Runs a pipeline in a process other than rank 0.
pub(in crate::cli) fn follow(pipeline: &Pipeline, model: &Model, folder: &Path) -> Result<()> {
    pipeline.follow(model, folder)
}

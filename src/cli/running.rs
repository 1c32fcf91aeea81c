//! Commands and arguments of builds that can run models.

mod analyze;
mod cache;
mod computation;
mod eval;
mod generate;
mod graph;
mod init;
mod machine;
mod samples;

use std::num::NonZeroUsize;
use std::path::Path;

use clap::Subcommand;

use super::args::{self, Global};
use super::{output, run};
use crate::error::Result;
use crate::model::Model;
use crate::pipeline::{Builder, Pipeline, ResultCache};
pub(super) use computation::Computation;
pub(super) use graph::Graph;
pub(super) use machine::{Fetch, Models, Runtimes};
pub(super) use samples::Samples;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Inspect a model and write a commented first recipe for it
    Init(init::Args),
    /// Measure a model's quality: accuracy, perplexity, fidelity to another model
    Eval(Box<eval::Args>),
    /// Continue prompts with a language model, and optionally compare with another model
    Generate(Box<generate::Args>),
    /// Measure how sensitive the model is to quantizing each layer, and write a mixed recipe
    Analyze(analyze::Args),
    /// Show or clear cached results of earlier runs
    Cache(cache::Args),
}

impl Command {
    pub fn run(self, global: &Global) -> Result<()> {
        match self {
            Command::Init(args) => args.run(global),
            Command::Eval(args) => args.run(global),
            Command::Generate(args) => args.run(global),
            Command::Analyze(args) => args.run(global),
            Command::Cache(args) => args.run(global),
        }
    }
}

/// Number of columns of the terminal; `None` if stdout is not a terminal.
fn columns() -> Option<u16> {
    rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col).filter(|columns| *columns > 0)
}

/// Sets the number of threads that run models.
pub(super) fn set_threads(threads: NonZeroUsize) {
    // Fails only if the global thread pool was already initialized.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads.get()).build_global();
}

/// Enables the cache of pass results in the user's cache folder. `reuse`: results of earlier runs are also used without --resume.
pub(super) fn with_cache(builder: Builder, reuse: bool) -> Builder {
    match ResultCache::in_user_cache() {
        Some(cache) => builder.cache(cache, reuse),
        None => builder,
    }
}

/// Runs a pipeline in a process other than rank 0.
pub(super) fn follow(pipeline: &Pipeline, model: &Model, folder: &Path) -> Result<()> {
    pipeline.follow(model, folder)
}

//! What the command line has more where the build runs models: commands, and arguments of others.

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
    /// Inspect a model and write a first recipe for it, with the reason for every line
    Init(init::Args),
    /// Measure a model's quality: accuracy, perplexity, fidelity to another model
    Eval(Box<eval::Args>),
    /// Continue prompts with a language model, beside another model where one is named
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

/// Columns of the terminal that stdout is, if it is one.
fn columns() -> Option<u16> {
    rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col).filter(|columns| *columns > 0)
}

/// Has models run on so many threads.
pub(super) fn compute_on(threads: NonZeroUsize) {
    // A second pool is refused, and there is none.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads.get()).build_global();
}

/// Has a pipeline cache the results of its passes in the user's cache, and with `reuse` take those of earlier runs.
pub(super) fn cached(builder: Builder, reuse: bool) -> Builder {
    match ResultCache::usual() {
        Some(cache) => builder.cache(cache, reuse),
        None => builder,
    }
}

/// Does the part of a process that does not write.
pub(super) fn follow(pipeline: &Pipeline, model: &Model, folder: &Path) -> Result<()> {
    pipeline.follow(model, folder)
}

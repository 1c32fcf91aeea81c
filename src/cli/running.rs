//! What the command line has more where the build runs models: commands, and arguments of others.

mod analyze;
mod cache;
mod eval;
mod graph;
mod init;
mod samples;

use clap::Subcommand;

use super::args::{self, Global};
use super::{output, run};
use crate::error::Result;
pub(super) use graph::Graph;
pub(super) use samples::Samples;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Inspect a model and write a first recipe for it, with the reason for every line
    Init(init::Args),
    /// Measure a model's quality: accuracy, perplexity, fidelity to another model
    Eval(Box<eval::Args>),
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
            Command::Analyze(args) => args.run(global),
            Command::Cache(args) => args.run(global),
        }
    }
}

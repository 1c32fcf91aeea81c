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
    /// Look at a model and write a first recipe for it, with the reason for every line
    Init(init::Args),
    /// Measure how good a model's answers are: accuracy, perplexity, likeness to another model
    Eval(Box<eval::Args>),
    /// Say what quantizing each layer does to the model's answers, and write a mixed recipe
    Analyze(analyze::Args),
    /// Show what earlier runs have kept for later ones, or remove it
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

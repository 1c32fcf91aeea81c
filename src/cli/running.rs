//! Commands and arguments of builds that can run models.

mod analyze;
mod auto;
mod cache;
mod computation;
mod draft;
mod eval;
mod generate;
mod graph;
mod init;
mod machine;
mod rates;
mod samples;
mod trial;

use clap::Subcommand;

use super::args::{self, Global};
use super::{output, run};
use crate::error::Result;
pub(super) use computation::Computation;
pub(super) use graph::Graph;
pub(super) use machine::{Fetch, Models, Runtimes, follow, set_threads, with_cache};
pub(super) use rates::{record_times, with_rates};
pub(super) use samples::Samples;
pub(super) use trial::{Attempt, Trials};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Inspect a model and write a commented first recipe for it
    Init(init::Args),
    /// Measure a model's quality: accuracy, perplexity, fidelity to another model
    Eval(Box<eval::Args>),
    /// Continue prompts with a language model, and optionally compare with another model
    Generate(Box<generate::Args>),
    /// Make a draft for speculative decoding: the model in int8, some of its layers, a head, or texts
    Draft(Box<draft::Args>),
    /// Search for the best formats of a model's weights within a size, a loss or a latency, and quantize it
    Auto(Box<auto::Args>),
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
            Command::Draft(args) => args.run(global),
            Command::Auto(args) => args.run(global),
            Command::Analyze(args) => args.run(global),
            Command::Cache(args) => args.run(global),
        }
    }
}

/// Number of columns of the terminal; `None` if stdout is not a terminal.
fn columns() -> Option<u16> {
    rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col).filter(|columns| *columns > 0)
}

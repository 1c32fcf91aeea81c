//! `compress merge`

use std::path::PathBuf;

use super::args::{Global, Signing};
use super::output;
use crate::error::Result;
use crate::model::Model;
use crate::pipeline::recipe_from_parts;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress run recipe.yaml -o out --part 1/2      on one machine
  compress run recipe.yaml -o out --part 2/2      on another machine, at the same time
  compress merge out

The output is identical to that of a run by one process. Global thresholds need several rounds: run all parts again until each reports that it is written.")]
pub(super) struct Args {
    /// The output folder of the parts
    output: PathBuf,
    /// Do not remove OUT.parts
    #[arg(long)]
    keep_parts: bool,
    /// Replace the output of an earlier run; files that its report does not list are never deleted
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    signing: Signing,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let recipe = recipe_from_parts(&self.output)?;
        let pipeline = self.signing.configure(global.builder()?.recipe(&recipe).force(self.force))?.build()?;
        let report = pipeline.merge(Model::open(&recipe.model)?, &self.output, self.keep_parts)?;
        output::report(&report, &self.output, global)
    }
}

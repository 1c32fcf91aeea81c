//! `compress schema`

use clap::ValueEnum;

use super::output;
use crate::error::Result;
use crate::recipe::Recipe;
use crate::report::Report;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Type of the files that the schema describes
    #[arg(value_enum, default_value_t)]
    file: File,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum File {
    /// Recipes
    #[default]
    Recipe,
    /// report.json of an output folder
    Report,
}

impl Args {
    pub(super) fn run(self) -> Result<()> {
        output::json(&match self.file {
            File::Recipe => schemars::schema_for!(Recipe),
            File::Report => schemars::schema_for!(Report),
        })
    }
}

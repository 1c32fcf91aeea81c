//! `compress run`

use std::path::PathBuf;

use super::args::Global;
use super::output;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::recipe::Recipe;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The recipe
    recipe: PathBuf,
    /// Output folder, instead of the recipe's
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Change a value of the recipe: `seed=1`, `prune-unstructured.amount=0.3`, `passes.0.cast.to=f16`
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_set)]
    set: Vec<(String, String)>,
    /// Replace the output folder if it exists
    #[arg(long)]
    force: bool,
    /// Only say what would be done
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn parse_set(text: &str) -> Result<(String, String), String> {
    text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).ok_or_else(|| format!("`{text}` is not KEY=VALUE"))
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let recipe = Recipe::open(&self.recipe, &self.set)?;
        let output = self.output.or(recipe.output.clone());
        let pipeline = global.builder().recipe(&recipe).force(self.force).build()?;
        let output = output.ok_or_else(|| Error::option(self.recipe.display(), "no `output`; name a folder there or with -o"))?;
        let model = Model::open(&recipe.model)?;
        if self.dry_run {
            crate::store::staging::check_place(&output, self.force, &recipe.model)?;
            return output::plan(&pipeline.plan(&model)?, &recipe.model, global);
        }
        let report = pipeline.run(model, &output)?;
        output::report(&report, &output, global)
    }
}

//! `compress plan`

use std::path::PathBuf;

use super::args::Global;
use super::{output, run};
use crate::error::Result;
use crate::model::Model;
use crate::recipe::{Recipe, Variant};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The recipe
    recipe: PathBuf,
    /// Change a value of the recipe, as in `compress run`
    #[arg(long, value_name = "KEY=VALUE", value_parser = run::parse_set)]
    set: Vec<(String, String)>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let mut plans = Vec::new();
        for Variant { name, recipe } in Recipe::open_variants(&self.recipe, &self.set, &[])? {
            let pipeline = global.builder()?.recipe(&recipe).build()?;
            let model = Model::open(&recipe.model)?;
            let mut plan = pipeline.plan(&model)?;
            plan.notes.extend(recipe.output.as_deref().and_then(|output| pipeline.local_staging_note(&model, output)));
            plans.push((name, plan));
        }
        output::plans(&plans, global)
    }
}

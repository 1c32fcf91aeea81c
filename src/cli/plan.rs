//! `compress plan`

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::{Global, Runtimes};
use super::running::with_rates;
use super::{output, run};
use crate::error::{Error, Result, counted};
use crate::pipeline::{Pipeline, Plan};
use crate::recipe::{Recipe, Variant};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress plan recipe.yaml
  compress plan recipe.yaml --set amount=0.3
  compress plan --recipe-only recipes/*.yaml     check recipes where the models are missing, such as before a commit")]
pub(super) struct Args {
    /// The recipes
    #[arg(required = true, value_name = "RECIPE")]
    recipes: Vec<PathBuf>,
    /// Change a value of the recipe, as in `compress run`
    #[arg(long, value_name = "KEY=VALUE", value_parser = run::parse_set)]
    set: Vec<(String, String)>,
    /// Check only the recipes, and open neither models nor data: keys, values, options of the passes, and
    /// whether samples are configured for passes that need them
    #[arg(long)]
    recipe_only: bool,
    #[command(flatten)]
    runtimes: Runtimes,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        if self.recipe_only {
            return self.check(global);
        }
        let mut plans = Vec::new();
        for path in &self.recipes {
            plans.extend(self.plans(path, global).map_err(|error| run::with_line(path, error))?);
        }
        output::plans(&plans, global)
    }

    /// The plans of a recipe, by the name of the run.
    fn plans(&self, path: &Path, global: &Global) -> Result<Vec<(String, Plan)>> {
        let mut plans = Vec::new();
        for Variant { name, recipe } in self.variants(path)? {
            let pipeline = pipeline(path, &recipe, (global, true), &self.runtimes)?;
            let model = run::open_model(path, &recipe)?;
            // An output that exists may be that of an earlier run of the recipe.
            let is_new = |output: &&Path| !crate::files::is_remote(output) && output.symlink_metadata().is_err();
            recipe.output.as_deref().filter(is_new).map_or(Ok(()), |output| pipeline.check_output(&model, output))?;
            let mut plan = recipe.output.as_deref().map_or_else(|| pipeline.plan(&model), |output| pipeline.plan_output(&model, output))?;
            plan.notes.extend(recipe.output.as_deref().and_then(|output| pipeline.local_staging_note(&model, output)));
            let name = if self.recipes.len() > 1 { format!("{} {name}", path.display()).trim_end().to_owned() } else { name };
            plans.push((name, plan));
        }
        Ok(plans)
    }

    fn variants(&self, path: &Path) -> Result<Vec<Variant>> {
        Recipe::open_variants(path, &self.set, &[]).map_err(|e| named(path, e))
    }

    fn check(&self, global: &Global) -> Result<()> {
        let mut checked = Vec::new();
        for path in &self.recipes {
            let variants = self.variants(path)?;
            for Variant { name, recipe } in &variants {
                // The runs of a sweep write to folders inside the output.
                let output = recipe.output.as_deref().filter(|_| name.is_empty());
                pipeline(path, recipe, (global, false), &self.runtimes)?.check_formats(output).map_err(|e| named(path, e))?;
            }
            checked.push((path, variants.len()));
        }
        if global.json {
            return output::json(&checked.iter().map(|(path, runs)| json!({ "recipe": path, "runs": runs })).collect::<Vec<_>>());
        }
        checked.iter().try_for_each(|(path, runs)| output::print(&format!("{}: valid, {}\n", path.display(), counted(*runs, "run"))))
    }
}

/// The pipeline of a recipe. `measures`: the rates of the machine are measured, unless they are known.
fn pipeline(path: &Path, recipe: &Recipe, (global, measures): (&Global, bool), runtimes: &Runtimes) -> Result<Pipeline> {
    let builder = with_rates(global.builder()?, global, measures);
    builder.recipe(recipe).loads(runtimes.loads.iter().copied()).build().map_err(|e| named(path, e))
}

/// An error that names the recipe.
fn named(path: &Path, error: Error) -> Error {
    match error {
        Error::Option { what, reason } => Error::Option { what: format!("{}: {what}", path.display()), reason },
        other => other,
    }
}

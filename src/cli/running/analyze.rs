//! `compress analyze`

use std::path::PathBuf;

use serde_json::json;

use super::args::{Global, TextFile};
use super::{output, run};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::model::Model;
use crate::pass::{Context, Damage, QuantizeDynamic, QuantizeStatic, Step, worth_keeping};
use crate::pipeline::memory_limit;
use crate::recipe::Recipe;
use crate::report::format::decibels;
use crate::report::terminal::table;
use crate::store::Pattern;

#[derive(Debug, clap::Args)]
#[command(mut_arg("output", |arg| arg.help("Write a recipe that leaves the most sensitive layers in floats")), after_help = "Examples:
  compress analyze recipe.yaml                 the sensitivity of each layer, largest first
  compress analyze recipe.yaml -o mixed.yaml   and a recipe that leaves the most sensitive ones in floats

The recipe names the model, `data: { calibration: ... }` (without it only weights are looked at), and may hold a
quantize-static pass, whose options apply.")]
pub(in crate::cli) struct Args {
    /// The recipe
    recipe: PathBuf,
    #[command(flatten)]
    file: TextFile,
    /// Change a value of the recipe, as in `compress run`
    #[arg(long, value_name = "KEY=VALUE", value_parser = run::parse_set)]
    set: Vec<(String, String)>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let mut recipe = Recipe::open(&self.recipe, &self.set)?;
        let at = recipe.passes.iter().position(|step| matches!(step, Step::QuantizeStatic(_) | Step::QuantizeDynamic(_)));
        let pass = match at.map(|at| &recipe.passes[at]) {
            Some(Step::QuantizeStatic(pass)) => pass.clone(),
            _ => QuantizeStatic::default(),
        };
        self.file.check()?;
        let model = Model::open(&recipe.model)?;
        recipe.data.ignore_labels();
        if let Some(options) = &recipe.data.calibration {
            recipe.data.open(options, Subject::of(model.clone())?.target())?;
        }
        let device = global.models.device.open()?;
        let (seed, data) = (recipe.seed, recipe.data.clone());
        let memory = memory_limit(global.models.memory.or(recipe.memory), &device);
        let damages = global.work(|work| {
            pass.analyze(model, &Context { work: *work, seed, data: &data, device, memory, memory_tracker: None, workplace: None, resume: false })
        })?;
        let kept = worth_keeping(&damages);
        self.file.write(|| {
            let patterns = kept.iter().map(|name| name.parse().map_err(|e| Error::option("analyze", e))).collect::<Result<Vec<Pattern>>>()?;
            let position = at.unwrap_or(recipe.passes.len());
            if at.is_none() {
                // Without samples there is nothing to find scales of activations on.
                recipe.passes.push(if recipe.data.calibration.is_some() { pass.into() } else { QuantizeDynamic::default().into() });
            }
            match &mut recipe.passes[position] {
                Step::QuantizeStatic(pass) => pass.ignore.extend(patterns),
                Step::QuantizeDynamic(pass) => pass.ignore.extend(patterns),
                _ => {}
            }
            Ok(recipe.to_yaml())
        })?;
        if global.json {
            return output::json(&json!({ "layers": damages, "worth_keeping": kept }));
        }
        output::print(&self.text(&damages, &kept))
    }

    fn text(&self, damages: &[Damage], kept: &[String]) -> String {
        let lost = |cosine: Option<f64>| cosine.map_or("-".to_owned(), |c| format!("{:.2e}", 1.0 - c));
        let rows = damages.iter().map(|d| {
            let bar = damages.first().map_or(0.0, |first| d.lost() / first.lost().max(f64::MIN_POSITIVE));
            vec![d.name.clone(), decibels(d.weight_sqnr_db), lost(d.weights), lost(d.dynamic), lost(d.quantized), "#".repeat((20.0 * bar).round() as usize)]
        });
        let mut table = table(&["layer, quantized alone", "weight SQNR", "int8 weights", "dynamic", "static", ""], rows);
        if let Some(column) = table.column_mut(5) {
            column.set_cell_alignment(comfy_table::CellAlignment::Left);
        }
        let mut text = format!("{table}\n\n");
        text += if damages.iter().any(|d| d.quantized.or(d.weights).is_some()) {
            "Columns are 1 - the mean cosine of the model's outputs with the original's.\n"
        } else {
            "The effect on outputs is not measured: name samples in `data: { calibration: ... }`.\n"
        };
        match (kept.len(), &self.file.output) {
            (0, _) => text += "No layer stands out: quantize them all.\n",
            (count, Some(path)) => text += &format!("{} leaves {count} layers in floats.\n", path.display()),
            (count, None) => text += &format!("{count} layers do half of the damage: {}\n", kept.join(", ")),
        }
        text
    }
}

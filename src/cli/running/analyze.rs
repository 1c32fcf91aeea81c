//! `compress analyze`

use std::path::PathBuf;

use serde_json::json;

use super::args::{Global, TextFile};
use super::{output, run};
use crate::error::{Error, Result, counted};
use crate::evaluation::Subject;
use crate::model::Model;
use crate::pass::{Context, Damage, QuantizeDynamic, QuantizeStatic, Step, recommend_floats};
use crate::pipeline::memory_limit;
use crate::recipe::Recipe;
use crate::report::format::decibels;
use crate::report::terminal::table;
use crate::store::Pattern;

#[derive(Debug, clap::Args)]
#[command(mut_arg("output", |arg| arg.help("Write a recipe that does not quantize the most sensitive layers")), after_help = "Examples:
  compress analyze recipe.yaml                 the sensitivity of each layer, largest first
  compress analyze recipe.yaml -o mixed.yaml   also write a recipe that does not quantize the most sensitive layers

The recipe specifies the model and `data: { calibration: ... }`; without calibration data only weights are analyzed. If it
contains a quantize-static pass, the options of the pass apply.")]
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
        let position = recipe.passes.iter().position(|step| matches!(step, Step::QuantizeStatic(_) | Step::QuantizeDynamic(_)));
        let pass = match position.map(|position| &recipe.passes[position]) {
            Some(Step::QuantizeStatic(pass)) => pass.clone(),
            _ => QuantizeStatic::default(),
        };
        self.file.check(&super::init::RECIPE)?;
        let other = recipe.passes.iter().find(|step| matches!(step, Step::Quantize(_) | Step::Palettize(_)));
        if let Some(other) = other.filter(|_| position.is_none() && self.file.output.is_some()) {
            let reason = format!(
                "the recipe already quantizes by `{}`, and int8 would round its weights again: remove this pass, or use `compress auto`, which chooses a format for each layer",
                other.pass().name()
            );
            return Err(Error::option("--output", reason));
        }
        // Without a pass to analyze, other quantization does not precede the analysis.
        let is_other = |step: &&Step| position.is_none() && matches!(step, Step::Quantize(_) | Step::Palettize(_));
        if let Some(step) = recipe.passes.iter().take(position.unwrap_or(recipe.passes.len())).find(|step| !is_other(step)) {
            let (name, analyzed) = (step.pass().name(), position.map_or("quantization to int8", |position| recipe.passes[position].pass().name()));
            let reason = format!(
                "`{name}` changes the model before {analyzed}, but only the input model can be analyzed: run a recipe that ends with `{name}`, and set `model` to its output folder in a recipe without it",
            );
            return Err(Error::option("passes", reason));
        }
        let model = Model::open(&recipe.model)?;
        global.models.configure_model(&model)?;
        model.fix_sizes(&recipe.sizes)?;
        recipe.data.ignore_labels(false);
        if let Some(options) = &recipe.data.calibration {
            options.require_unpacked("data: calibration")?;
            recipe.data.open(options, Subject::from_model(model.clone())?.target())?;
        }
        let device = global.models.device.open()?;
        let (seed, data) = (recipe.seed, recipe.data.clone());
        let memory = memory_limit(global.models.memory.or(recipe.memory), &device);
        let damages = global.work(|work| {
            let context = Context { work: *work, seed, data: &data, device, memory, memory_tracker: None, checkpoints: None };
            pass.analyze(model.clone(), &context).and_then(|damages| model.check_contents(work).map(|()| damages))
        })?;
        let sensitive = recommend_floats(&damages);
        self.file.write(&super::init::RECIPE, || {
            let patterns = sensitive.iter().map(|name| name.parse().map_err(|e| Error::option("analyze", e))).collect::<Result<Vec<Pattern>>>()?;
            let index = position.unwrap_or(recipe.passes.len());
            if position.is_none() {
                // Static scales of activations need calibration samples.
                recipe.passes.push(if recipe.data.calibration.is_some() { pass.into() } else { QuantizeDynamic::default().into() });
            }
            match &mut recipe.passes[index] {
                Step::QuantizeStatic(pass) => pass.ignore.extend(patterns),
                Step::QuantizeDynamic(pass) => pass.ignore.extend(patterns),
                _ => {}
            }
            Ok(recipe.to_yaml())
        })?;
        if global.json {
            return output::json(&json!({ "layers": damages, "worth_keeping": sensitive }));
        }
        output::print(&self.text(&damages, &sensitive))
    }

    fn text(&self, damages: &[Damage], sensitive: &[String]) -> String {
        let lost = |cosine: Option<f64>| cosine.map_or("-".to_owned(), |c| format!("{:.2e}", 1.0 - c));
        let rows = damages.iter().map(|d| {
            let bar = damages.first().map_or(0.0, |first| d.lost() / first.lost().max(f64::MIN_POSITIVE));
            vec![d.name.clone(), decibels(d.weight_sqnr_db), lost(d.weights), lost(d.dynamic), lost(d.quantized), "#".repeat((20.0 * bar).round() as usize)]
        });
        let mut table = table(&["only this layer quantized", "weight SQNR", "int8 weights", "dynamic", "static", ""], rows);
        table.align_left(5);
        let mut text = format!("{table}\n\n");
        text += if damages.iter().any(|d| d.quantized.or(d.weights).is_some()) {
            "Columns are 1 minus the mean cosine similarity of the outputs to the original model's.\n"
        } else {
            "The effect on the outputs was not measured: add samples in `data: { calibration: ... }`.\n"
        };
        match (sensitive.len(), &self.file.output) {
            (0, _) => text += "No layer is particularly sensitive: quantize all of them.\n",
            (count, Some(path)) => text += &format!("{} does not quantize {}.\n", path.display(), counted(count, "layer")),
            (count, None) => text += &format!("Half of the error is due to {}: {}\n", counted(count, "layer"), sensitive.join(", ")),
        }
        text
    }
}

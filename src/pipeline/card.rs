//! Writes the model card of an output folder.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::carry::write_text;
use super::run::Run;
use crate::contract::{Runtime, Target, WrittenOutput};
use crate::error::{Error, Result};
use crate::files;
use crate::model::{ExclusionReason, parse_config};
use crate::report::Report;
use crate::report::card::{self, Card, Source};

impl Run<'_> {
    /// Whether the output has a card. A single file has none.
    fn has_card(&self) -> bool {
        self.pipeline.card && self.state.file.is_none()
    }

    /// Excludes the card of the source if the output has its own, or if it describes an earlier run.
    pub fn exclude_source_card(&mut self) -> Result<()> {
        let path = self.after.path.join(card::FILE);
        if self.has_card() {
            self.after.auxiliary.exclude(ExclusionReason::Card, |file| file == Path::new(card::FILE));
        } else if self.after.auxiliary.files.iter().any(|file| file == Path::new(card::FILE)) {
            let text = files::read(&path).map_err(Error::io("read", &path))?;
            if card::is_own(&String::from_utf8_lossy(&text)) {
                self.after.auxiliary.exclude(ExclusionReason::Replaced, |file| file == Path::new(card::FILE));
            }
        }
        Ok(())
    }

    /// Writes the card, and the score on a benchmark.
    pub fn write_card(&self, folder: &Path, report: &mut Report) -> Result<()> {
        if !self.has_card() {
            return Ok(());
        }
        let source = Source::open(&self.after)?;
        report.notes.extend(source.notes.iter().cloned());
        let config = folder.join("config.json");
        let config: Map<String, Value> = if files::is_file(&config) {
            let text = files::read_to_string(&config).map_err(Error::io("read", &config))?;
            parse_config(&text).map_err(|e| Error::malformed(&config, e))?
        } else {
            Map::new()
        };
        let names = files::files(folder).map_err(Error::io("list", folder))?;
        let names: BTreeSet<String> = names.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned())).collect();
        // Weights that were uploaded while they were written are not in the folder.
        let is_local = report.outputs.iter().all(|file| folder.join(&file.path).is_file());
        // No runtime is named if the weights do not match the configuration.
        let is_consistent = super::running::matches_config(&self.after);
        let loaded_by = (is_local && is_consistent).then(|| complying(folder, &self.pipeline.loads));
        let data_sets = self.data_sets();
        let loaded_by = loaded_by.as_deref();
        let card = Card { report, source: &source, config: &config, files: &names, loaded_by, data_sets: &data_sets };
        write_text(&folder.join(card::FILE), &card.render())?;
        self.write_score(folder, report)
    }

    /// Writes the score on the benchmark of the recipe, if it names one.
    fn write_score(&self, folder: &Path, report: &mut Report) -> Result<()> {
        let Some(benchmark) = self.pipeline.recipe(&self.input).evaluate.and_then(|evaluate| evaluate.benchmark) else { return Ok(()) };
        let Some((name, text)) = card::eval_results(report, &benchmark) else {
            report.notes.push(format!("no score on the benchmark {} was written: the evaluation data has no labels", benchmark.dataset));
            return Ok(());
        };
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        write_text(&path, &text)
    }

    /// Data sets on the Hub that calibration and training read.
    fn data_sets(&self) -> Vec<String> {
        let recipe = serde_json::to_value(self.pipeline.recipe(&self.input)).unwrap_or_default();
        let mut found = Vec::new();
        for set in ["calibration", "train"] {
            collect(recipe.get("data").and_then(|data| data.get(set)), &mut found);
        }
        found.sort();
        found.dedup();
        found
    }
}

/// Collects the data sets on the Hub that texts of a value name.
fn collect(value: Option<&Value>, found: &mut Vec<String>) {
    match value {
        Some(Value::String(text)) => found.extend(files::data_set_id(text)),
        Some(Value::Array(values)) => values.iter().for_each(|value| collect(Some(value), found)),
        Some(Value::Object(values)) => values.values().for_each(|value| collect(Some(value), found)),
        _ => {}
    }
}

/// The runtimes whose rules an output complies with: the versions that the run names, and the newest versions
/// of other runtimes. An output that cannot be read for a runtime does not comply.
fn complying(folder: &Path, named: &[Target]) -> Vec<Target> {
    let mut output = WrittenOutput::new(folder);
    // The run has checked the named versions on these files.
    let complies = |target: &Target| named.contains(target) || output.check(*target).is_ok_and(|checked| checked.is_met());
    let versions = |runtime: Runtime| {
        let named: Vec<Target> = named.iter().copied().filter(|target| target.runtime() == runtime).collect();
        if named.is_empty() { vec![Target::newest(runtime)] } else { named }
    };
    Runtime::ALL.into_iter().flat_map(versions).filter(complies).collect()
}

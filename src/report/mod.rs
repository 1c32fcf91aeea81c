//! Reports of runs: the passes, sizes, quality and files of the output.
//!
//! The fields of [`Report`] are the keys of `report.json`. Keys may be added, but are never renamed. Types
//! whose fields are not public, such as [`Environment`] and [`Timing`], have the same keys if they
//! are serialized.

mod budget;
pub(crate) mod card;
mod compare;
pub(crate) mod draft;
pub(crate) mod environment;
#[doc(hidden)]
pub mod escape;
#[doc(hidden)]
pub mod format;
mod html;
mod markdown;
pub(crate) mod measured;
pub(crate) mod search;
mod sections;
#[cfg(feature = "cli")]
pub mod terminal;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use budget::{Budgets, Finding};
pub use compare::Comparison;
pub use draft::DraftQuality;
pub use environment::Environment;
pub(crate) use environment::{Peak, processor};
pub use search::FormatSearch;
pub(crate) use sections::StageTime;
pub use sections::{
    CarriedFile, Layer, ModelId, OutputFile, PassReport, RuntimeCheck, SignatureFile, Size, Sizes, Timing, Tool, Totals, Verified, WeightHistogram,
};

use crate::error::{Error, Result, counted};
pub use crate::evaluation::{Accuracy, Compute, Continuation, Cost, Fidelity, Latency, MeasuredFidelity, OutputFidelity, Quantiles, Runtime, SamplesFrom};
use crate::files;
pub use crate::run_state::WARNING;

/// Version of the schema of `report.json`.
pub const SCHEMA: u32 = 1;
/// File name of the JSON report.
pub const FILE: &str = FILES[0];
/// File names of the report in all formats.
pub(crate) const FILES: [&str; 3] = crate::output::REPORT_FILES;
/// Part of the notes about files that could not be run, after their names.
#[doc(hidden)]
pub const NOT_VERIFIED: &str = " was not verified end to end";

/// A report, as serialized to `report.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Report {
    /// Version of the schema.
    pub schema: u32,
    /// Program that wrote the report.
    pub tool: Tool,
    /// Machine on which the run was executed.
    pub environment: Environment,
    /// Input model.
    pub model: ModelId,
    /// Seed of all random number generators.
    pub seed: u64,
    /// The recipe, including defaults.
    pub recipe: Value,
    /// The passes, in order.
    pub passes: Vec<PassReport>,
    /// Stored sizes before and after.
    pub size: Sizes,
    /// Cost of one forward pass, if the model has a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Compute>,
    /// Scores before and after, if evaluation data was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<Accuracy>,
    /// Fidelity of the outputs to the input model's, if the model could be run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<MeasuredFidelity>,
    /// Continuations of prompts before and after, for language models that were measured on texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub continuations: Vec<Continuation>,
    /// Latency of one batch, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
    /// The search that chose the formats, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search: Option<FormatSearch>,
    /// Speculative decoding with the output as the draft of the input, as measured by `compress draft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftQuality>,
    /// The runtimes that must load the output, whose rules it complies with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<RuntimeCheck>,
    /// The weights.
    pub layers: Vec<Layer>,
    /// Histograms of the values of the weights that changed most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<WeightHistogram>,
    /// Files that were written and verified.
    pub outputs: Vec<OutputFile>,
    /// All other files of the folder, except report.json: copied from the input, or written for this run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carried: Vec<CarriedFile>,
    /// The signature of the folder, if the run signed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<SignatureFile>,
    /// Notes and warnings: ineffective settings, and skipped steps with the reason.
    pub notes: Vec<String>,
    /// Estimated and actual times, if the rates of the machine were known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    /// Totals of the run.
    pub totals: Totals,
}

impl Report {
    /// All listed files: name, size and BLAKE3.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, u64, &str)> {
        let outputs = self.outputs.iter().map(|file| (file.path.as_str(), file.bytes, file.blake3.as_str()));
        outputs.chain(self.carried.iter().map(|file| (file.path.as_str(), file.bytes, file.blake3.as_str())))
    }

    /// Whether no note states that a file [could not be run](NOT_VERIFIED).
    #[doc(hidden)]
    #[must_use]
    pub fn is_verified(&self) -> bool {
        !self.notes.iter().any(|note| note.contains(NOT_VERIFIED))
    }

    /// The warnings, without their prefix, and the other notes.
    pub(crate) fn warnings_and_notes(&self) -> (Vec<&str>, Vec<&str>) {
        let (warnings, notes): (Vec<&str>, Vec<&str>) = self.notes.iter().map(String::as_str).partition(|note| note.starts_with(WARNING));
        (warnings.into_iter().filter_map(|note| note.strip_prefix(WARNING)).collect(), notes)
    }

    /// The rules of runtimes that the output complies with, as a list: `25 rules of vllm 0.33`.
    pub(crate) fn checked_rules(&self) -> String {
        let list: Vec<String> = self.loads.iter().map(|check| format!("{} of {} {}", counted(check.rules, "rule"), check.runtime, check.version)).collect();
        list.join(", ")
    }

    /// Reads a report from its file, or from an output folder or file.
    ///
    /// # Errors
    /// The report is missing, or it does not match this schema.
    pub fn open(path: &Path) -> Result<Report> {
        let report_folder = crate::output::file_name(path).map(|_| crate::output::report_folder(path));
        let path = match report_folder {
            Some(folder) => folder.join(FILE),
            None if files::is_dir(path) => path.join(FILE),
            None => path.to_owned(),
        };
        let invalid = |reason: &str| Error::run(path.display(), reason, "specify the output folder of a run, or its report.json");
        let missing = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => invalid("the report does not exist"),
            _ => Error::io("read", &path)(e),
        };
        let text = files::read_to_string(&path).map_err(missing)?;
        serde_json::from_str(&text).map_err(|e| invalid(&format!("not a report of schema {SCHEMA}: {e}")))
    }

    /// The contents of `report.json`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).map(|text| text + "\n").unwrap_or_default()
    }

    /// The changed weights, sorted by ascending signal-to-noise ratio.
    #[doc(hidden)]
    pub fn most_changed(&self) -> Vec<&Layer> {
        let mut changed: Vec<_> = self.layers.iter().filter_map(|layer| Some((layer.sqnr_db?, layer))).collect();
        changed.sort_by(|a, b| a.0.total_cmp(&b.0));
        changed.into_iter().map(|(_, layer)| layer).collect()
    }

    /// The contents of `report.html`.
    pub fn to_html(&self) -> String {
        html::render(self)
    }

    /// The contents of `report.md`.
    pub fn to_markdown(&self) -> String {
        markdown::render(self)
    }
}

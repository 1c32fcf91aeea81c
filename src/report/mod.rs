//! What was done to a model and what came of it, measured on the written files.
//!
//! The keys of [`Report`] are those of `report.json`; they are added to, never renamed.

mod budget;
mod compare;
pub(crate) mod environment;
pub mod escape;
pub mod format;
mod html;
mod markdown;
pub(crate) mod measured;
mod sections;
#[cfg(feature = "cli")]
pub mod terminal;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use budget::{Budgets, Finding};
pub use compare::{Comparison, Differing, Summary};
pub use environment::Environment;
pub(crate) use environment::Peak;
pub use sections::{CarriedFile, Layer, ModelId, OutputFile, PassReport, Size, Sizes, Tool, Totals, Verified, WeightHistogram};

use crate::error::{Error, Result};
use crate::evaluation::{Accuracy, Compute, Continued, Latency, MeasuredFidelity};
use crate::files;

/// How notes begin that a reader must not miss; they come first.
pub const WARNING: &str = "warning: ";
/// Version of the keys.
pub const SCHEMA: u32 = 1;
/// Name of the file in an output folder.
pub const FILE: &str = FILES[0];
/// Names of the report in all its forms.
pub const FILES: [&str; 3] = crate::output::REPORT_FILES;

/// A report; `report.json` holds it as it stands here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the keys.
    pub schema: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// On what machine.
    pub environment: Environment,
    /// From what.
    pub model: ModelId,
    /// Start of every random choice.
    pub seed: u64,
    /// What was asked for, defaults written out.
    pub recipe: Value,
    /// What was done, in order.
    pub passes: Vec<PassReport>,
    /// Before and after, as stored.
    pub size: Sizes,
    /// Cost of one run, when it is known what the model computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Compute>,
    /// How good the answers are, when there is evaluation data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<Accuracy>,
    /// How close the output's answers are to the input's, where the model could be run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<MeasuredFidelity>,
    /// Texts as they go on before and after, of language models that were measured on texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub continuations: Vec<Continued>,
    /// How long one batch takes, when it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
    /// Weight by weight.
    pub layers: Vec<Layer>,
    /// How values lie, of the weights that changed most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<WeightHistogram>,
    /// Files that were written and read back.
    pub outputs: Vec<OutputFile>,
    /// All other files of the folder, but for the report: carried over from the input, or written for this model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carried: Vec<CarriedFile>,
    /// Plain words: what gave no size or no speed, what was skipped and why.
    pub notes: Vec<String>,
    /// The whole run.
    pub totals: Totals,
}

impl Report {
    /// The warnings, without their prefix, and the other notes.
    pub(crate) fn warnings_and_notes(&self) -> (Vec<&str>, Vec<&str>) {
        let (warnings, notes): (Vec<&str>, Vec<&str>) = self.notes.iter().map(String::as_str).partition(|note| note.starts_with(WARNING));
        (warnings.into_iter().filter_map(|note| note.strip_prefix(WARNING)).collect(), notes)
    }

    /// Reads a report, or that of an output folder or file.
    ///
    /// # Errors
    /// It is missing or not a report of this schema.
    pub fn open(path: &Path) -> Result<Report> {
        let of_file = crate::output::file_name(path).map(|_| crate::output::report_folder(path));
        let path = match of_file {
            Some(folder) => folder.join(FILE),
            None if files::is_dir(path) => path.join(FILE),
            None => path.to_owned(),
        };
        let none = |reason: &str| Error::run(path.display(), reason, "name the output folder of a run, or its report.json");
        let missing = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => none("there is no report here"),
            _ => Error::io("read", &path)(e),
        };
        let text = files::read_to_string(&path).map_err(missing)?;
        serde_json::from_str(&text).map_err(|e| none(&format!("not a report of schema {SCHEMA}: {e}")))
    }

    /// The text of `report.json`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).map(|text| text + "\n").unwrap_or_default()
    }

    /// The weights that changed, those that lost most first.
    pub fn most_changed(&self) -> Vec<&Layer> {
        let mut changed: Vec<_> = self.layers.iter().filter_map(|layer| Some((layer.sqnr_db?, layer))).collect();
        changed.sort_by(|a, b| a.0.total_cmp(&b.0));
        changed.into_iter().map(|(_, layer)| layer).collect()
    }

    /// The text of `report.html`.
    pub fn to_html(&self) -> String {
        html::render(self)
    }

    /// The text of `report.md`.
    pub fn to_markdown(&self) -> String {
        markdown::render(self)
    }
}

//! The sections of a report.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::format::seconds;

/// Program that wrote the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Tool {
    /// `compress`.
    pub name: String,
    /// Version of the crate.
    pub version: String,
    /// Commit from which it was built, if known.
    pub commit: Option<String>,
}

impl Default for Tool {
    fn default() -> Self {
        let commit = option_env!("COMPRESS_COMMIT").filter(|c| !c.is_empty()).map(str::to_owned);
        Self { name: compress_core::NAME.into(), version: env!("CARGO_PKG_VERSION").into(), commit }
    }
}

/// Input model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ModelId {
    /// Folder or file.
    pub source: PathBuf,
    /// `model_type` of `config.json`.
    pub architecture: Option<String>,
    /// BLAKE3 over the lines `name dtype shape blake3(values)`, sorted by name. It does not depend on
    /// the sharding.
    pub blake3: String,
}

/// An applied pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct PassReport {
    /// Name of the pass.
    pub name: String,
    /// Its options, including defaults.
    pub options: Value,
    /// Time spent in the pass in seconds, summed over threads; reading and writing are included only in
    /// the totals.
    pub seconds: f64,
    /// Peak resident memory of the process up to the end of the pass.
    pub peak_rss_bytes: Option<u64>,
    /// Peak GPU memory of the pass; `None` if it did not use a GPU.
    pub peak_vram_bytes: Option<u64>,
    /// Multiply-accumulates of the models that it ran, counted if a memory trace was recorded; those of a
    /// backward pass count twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub macs: Option<u64>,
    /// Number of weights that it changed.
    pub tensors_changed: usize,
    /// How the weights were selected; empty for passes that do not select weights.
    #[serde(default)]
    pub rule: String,
    /// Float weights of two or more dimensions that it did not change, if it selects weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unselected: Vec<String>,
    /// Details that are specific to the pass.
    pub details: Value,
}

/// Size before and after.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Sizes {
    /// Size of the input.
    pub before: Size,
    /// Size of the output.
    pub after: Size,
    /// Bytes of the input divided by bytes of the output.
    pub ratio: f64,
}

/// Size of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Size {
    /// Elements of all weights.
    pub parameters: u64,
    /// Number of elements that are not zero.
    pub nonzero: u64,
    /// Number of tensors in the files.
    pub tensors: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes of the files after compression with zstd, level 3; `None` in builds without zstd.
    pub bytes_zstd: Option<u64>,
    /// Whether `bytes_zstd` was extrapolated from evenly spaced blocks.
    #[serde(default)]
    pub bytes_zstd_sampled: bool,
}

/// One weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Layer {
    /// Name in the checkpoint.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Description of how it is stored.
    pub encoding: String,
    /// Stored bytes before, including scales.
    pub bytes_before: u64,
    /// Stored bytes after, including scales and masks.
    pub bytes_after: u64,
    /// Number of zeros after.
    pub zeros: u64,
    /// Signal-to-noise ratio relative to the input in dB; `None` if the values did not change.
    pub sqnr_db: Option<f64>,
}

/// Histograms of a sample of the values of a weight before and after, with bins of equal width.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct WeightHistogram {
    /// Name in the checkpoint.
    pub(crate) name: String,
    /// Lower end of the first bin, which also counts smaller values.
    pub(crate) low: f32,
    /// Upper end of the last bin, which also counts larger values.
    pub(crate) high: f32,
    /// Counts of the input's values.
    pub(crate) before: Vec<u32>,
    /// Counts of the written values.
    pub(crate) after: Vec<u32>,
}

/// A runtime whose rules the output complies with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct RuntimeCheck {
    /// Name of the runtime.
    pub runtime: String,
    /// Version of the runtime.
    pub version: String,
    /// Number of rules, all of which were checked on the written files. The runtime was not run.
    pub rules: usize,
}

/// A file of the output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct OutputFile {
    /// Format that it belongs to.
    pub format: String,
    /// Name in the folder.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 of the file, as `b3sum` prints it.
    pub blake3: String,
    /// Result of the verification.
    pub verified: Verified,
}

/// A file in addition to the outputs of formats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct CarriedFile {
    /// Name in the folder.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 of the file, as `b3sum` prints it.
    pub blake3: String,
}

/// The signature of an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub struct SignatureFile {
    /// Name in the folder. The signature covers all files of the folder, including the report.
    pub path: String,
    /// SHA-256 of the PEM file of the public key.
    pub public_key_sha256: String,
}

/// Verification of a written file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Verified {
    /// Description of the verification.
    pub how: String,
    /// Largest absolute difference to the expected values; 0 if compared bit for bit.
    pub max_abs_error: f64,
    /// Whether it passed.
    pub ok: bool,
}

/// Estimated and actual times of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Timing {
    /// Sum of the estimated times of the stages.
    pub(crate) estimated_seconds: Option<f64>,
    /// The stages in order.
    pub(crate) stages: Vec<StageTime>,
}

impl Timing {
    /// Titles of the columns of a table.
    pub(crate) const TITLES: [&str; 3] = ["stage", "estimated time", "actual time"];

    /// The rows of a table.
    pub(crate) fn rows(&self) -> Vec<[String; 3]> {
        let shown = |time: Option<f64>| time.map_or("-".into(), seconds);
        let about = |stage: &StageTime| format!("{}{}", if stage.at_most { "at most " } else { "" }, shown(stage.estimated_seconds));
        self.stages.iter().map(|stage| [stage.name.clone(), about(stage), shown(stage.seconds)]).collect()
    }
}

/// Estimated and actual time of a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub(crate) struct StageTime {
    /// Name of the pass, or of the stage.
    pub(crate) name: String,
    /// Estimated time in seconds; `None` if the work was not known in advance.
    pub(crate) estimated_seconds: Option<f64>,
    /// Whether the estimate is an upper bound of the work, because the stage may do less.
    #[serde(default)]
    pub(crate) at_most: bool,
    /// Actual time in seconds; `None` if a result of an earlier run was used.
    pub(crate) seconds: Option<f64>,
}

/// Totals of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Totals {
    /// Wall time in seconds.
    pub seconds: f64,
    /// Peak resident memory of the process.
    pub peak_rss_bytes: Option<u64>,
    /// Peak GPU memory; `None` if no GPU was used.
    #[serde(default)]
    pub peak_vram_bytes: Option<u64>,
}

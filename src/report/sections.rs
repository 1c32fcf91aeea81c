//! The parts of a report.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Who wrote the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// `compress`.
    pub name: String,
    /// Version of the crate.
    pub version: String,
    /// Commit that it was built from, when known.
    pub commit: Option<String>,
}

impl Default for Tool {
    fn default() -> Self {
        let commit = option_env!("COMPRESS_COMMIT").filter(|c| !c.is_empty()).map(str::to_owned);
        Self { name: env!("CARGO_PKG_NAME").into(), version: env!("CARGO_PKG_VERSION").into(), commit }
    }
}

/// The input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelId {
    /// Folder or file.
    pub source: PathBuf,
    /// `model_type` of `config.json`.
    pub architecture: Option<String>,
    /// BLAKE3 over the lines `name dtype shape blake3(values)`, by name: the same for any sharding.
    pub blake3: String,
}

/// A pass that was applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// Name of the pass.
    pub name: String,
    /// Its options, defaults written out.
    pub options: Value,
    /// Time in the pass's own work, summed over threads; reading and writing are in the totals.
    pub seconds: f64,
    /// Peak resident memory of the process up to the end of the pass.
    pub peak_rss_bytes: Option<u64>,
    /// Peak memory of the GPU that the pass ran on; none where it used none.
    pub peak_vram_bytes: Option<u64>,
    /// Weights that it changed.
    pub tensors_changed: usize,
    /// How its weights were chosen; empty for passes that do not choose weights.
    #[serde(default)]
    pub rule: String,
    /// Float weights of two or more dimensions that it left as they were, if it chooses weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unselected: Vec<String>,
    /// What the pass has to say about itself.
    pub details: Value,
}

/// Size before and after.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    /// Of the input.
    pub before: Size,
    /// Of the output.
    pub after: Size,
    /// Bytes before for each byte after.
    pub ratio: f64,
}

/// Size of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Size {
    /// Elements of all weights.
    pub parameters: u64,
    /// Of these, not zero.
    pub nonzero: u64,
    /// Tensors in the files.
    pub tensors: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes of the files after zstd, level 3, when it is built in.
    pub bytes_zstd: Option<u64>,
    /// Whether `bytes_zstd` was extrapolated from evenly spaced blocks.
    #[serde(default)]
    pub bytes_zstd_sampled: bool,
}

/// One weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Name in the checkpoint.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub encoding: String,
    /// Stored bytes before, scales included.
    pub bytes_before: u64,
    /// Stored bytes after, scales and masks included.
    pub bytes_after: u64,
    /// Elements that are zero after.
    pub zeros: u64,
    /// Signal to noise against the input; none when nothing changed.
    pub sqnr_db: Option<f64>,
}

/// How the values of a weight lie before and after: counts of a sample, in bins of equal width.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WeightHistogram {
    /// Name in the checkpoint.
    pub name: String,
    /// Where the first bin begins; values below count in it.
    pub low: f32,
    /// Where the last bin ends; values above count in it.
    pub high: f32,
    /// Counts of the input's values.
    pub before: Vec<u32>,
    /// Counts of the written values.
    pub after: Vec<u32>,
}

/// A file of the output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputFile {
    /// Which format it belongs to.
    pub format: String,
    /// Name in the folder.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// BLAKE3 of the file, as `b3sum` prints it.
    pub blake3: String,
    /// How it was checked.
    pub verified: Verified,
}

/// A file beside the outputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedFile {
    /// Name in the folder.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// BLAKE3 of the file, as `b3sum` prints it.
    pub blake3: String,
}

/// How a file was checked after it was written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// In plain words.
    pub how: String,
    /// Largest difference to what was meant; 0 when compared bit for bit.
    pub max_abs_error: f64,
    /// Whether it passed.
    pub ok: bool,
}

/// The whole run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Wall time.
    pub seconds: f64,
    /// Peak resident memory of the process.
    pub peak_rss_bytes: Option<u64>,
    /// Peak memory of the GPU; none where none was used.
    #[serde(default)]
    pub peak_vram_bytes: Option<u64>,
}

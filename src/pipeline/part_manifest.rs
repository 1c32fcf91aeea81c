//! The manifest of a part: a JSON file next to its weights, from which the parts are merged.

// Parses files written by other processes.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kernel::compare::Difference;
use crate::kernel::exact::ExactSum;
use crate::store::ValueHistogram;
use crate::store::hash::Subtree;
use crate::store::writer::{RowRange, WeightMeasurement};

/// Description of a finished part.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartManifest {
    /// Hash of everything that must be the same for all parts.
    pub key: String,
    pub version: String,
    pub part: usize,
    pub parts: usize,
    /// As YAML.
    pub recipe: String,
    /// Seconds of each pass.
    pub seconds: Vec<f64>,
    /// Peak resident memory.
    pub peak_rss_bytes: Option<u64>,
    /// Names, sizes in bytes, and BLAKE3 hashes of the files.
    pub files: Vec<(String, u64, String)>,
    pub weights: Vec<WeightRecord>,
}

/// Name of the manifest file.
pub(super) const MANIFEST: &str = "part.json";

impl PartManifest {
    /// Reads the manifest of the part in a folder.
    pub fn open(folder: &Path) -> Result<PartManifest> {
        let path = folder.join(MANIFEST);
        let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        serde_json::from_str(&text).map_err(|e| Error::malformed(&path, format!("not written by this version of compress: {e}")))
    }
}

/// Measurements of a weight. Floats are stored as their bits, because JSON has no infinities.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WeightRecord {
    pub name: String,
    /// Signal, other, noise and product.
    sums: [u64; 4],
    max: u32,
    zeros: [u64; 2],
    changed: bool,
    nonfinite: u64,
    input_hash: Option<String>,
    bytes: u64,
    #[serde(rename = "kept")]
    nonzeros: Option<u64>,
    histogram: Option<([u32; 2], [Vec<u32>; 2])>,
    /// Present if the part has only some rows of the weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<RowRecord>,
}

/// Measurements of a range of rows, from which those of the whole weight are computed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowRecord {
    /// The first row, the end of the range, and the number of all rows.
    rows: [usize; 3],
    /// Signal, other, noise and product as exact sums.
    sums: [[u64; 7]; 4],
    /// Length in bytes and hash of each subtree.
    hash: Vec<(u64, String)>,
    /// Sampled values before and after.
    sample: [Vec<u32>; 2],
}

impl RowRecord {
    fn new(range: &RowRange) -> RowRecord {
        let RowRange { rows, of, sums, hash, sample } = range;
        RowRecord {
            rows: [rows.start, rows.end, *of],
            sums: sums.map(|sum| sum.to_bits()),
            hash: hash.iter().map(|subtree| (subtree.bytes, blake3::Hash::from_bytes(subtree.value).to_string())).collect(),
            sample: sample.each_ref().map(|values| values.iter().map(|value| value.to_bits()).collect()),
        }
    }

    fn row_range(self) -> Option<RowRange> {
        let [start, end, of] = self.rows;
        let subtree = |(bytes, value): (u64, String)| Some(Subtree { bytes, value: *blake3::Hash::from_hex(value).ok()?.as_bytes() });
        Some(RowRange {
            rows: start..end,
            of,
            sums: self.sums.map(ExactSum::from_bits),
            hash: self.hash.into_iter().map(subtree).collect::<Option<_>>()?,
            sample: self.sample.map(|values| values.into_iter().map(f32::from_bits).collect()),
        })
    }
}

impl WeightRecord {
    pub fn new(name: &str, measured: &WeightMeasurement) -> WeightRecord {
        let Difference { signal, other, noise, dot, max, zeros_before, zeros_after } = measured.difference;
        let histogram = measured.histogram.as_ref().map(|h| ([h.low, h.high].map(f32::to_bits), [h.before.clone(), h.after.clone()]));
        WeightRecord {
            name: name.to_owned(),
            sums: [signal, other, noise, dot].map(f64::to_bits),
            max: max.to_bits(),
            zeros: [zeros_before, zeros_after],
            changed: measured.changed,
            nonfinite: measured.nonfinite,
            input_hash: measured.input_hash.map(|hash| hash.to_string()),
            bytes: measured.bytes,
            nonzeros: measured.nonzeros,
            histogram,
            rows: measured.rows.as_deref().map(RowRecord::new),
        }
    }

    /// Whether the part has only some rows of the weight.
    pub fn is_split(&self) -> bool {
        self.rows.is_some()
    }

    /// The measurements; `None` if a hash cannot be parsed.
    pub fn measurement(self) -> Option<WeightMeasurement> {
        let ([signal, other, noise, dot], [zeros_before, zeros_after]) = (self.sums.map(f64::from_bits), self.zeros);
        let histogram = self.histogram.map(|(ends, [before, after])| {
            let [low, high] = ends.map(f32::from_bits);
            ValueHistogram { low, high, before, after }
        });
        Some(WeightMeasurement {
            difference: Difference { signal, other, noise, dot, max: f32::from_bits(self.max), zeros_before, zeros_after },
            changed: self.changed,
            nonfinite: self.nonfinite,
            input_hash: self.input_hash.map(blake3::Hash::from_hex).transpose().ok()?,
            bytes: self.bytes,
            nonzeros: self.nonzeros,
            histogram,
            rows: match self.rows {
                Some(rows) => Some(Box::new(rows.row_range()?)),
                None => None,
            },
        })
    }
}

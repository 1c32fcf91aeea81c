//! What a part of a run tells about itself, in a file beside its weights.

// What is read here, other processes have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kernel::compare::Difference;
use crate::kernel::exact::ExactSum;
use crate::store::ValueHistogram;
use crate::store::hash::Subtree;
use crate::store::writer::{SeenRows, WeightMeasurement};

/// What a part tells about itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Told {
    /// Of everything that must be the same for all parts.
    pub key: String,
    pub version: String,
    pub part: usize,
    pub parts: usize,
    /// As YAML.
    pub recipe: String,
    /// Seconds of each pass.
    pub seconds: Vec<f64>,
    /// The most memory that was resident.
    pub peak_rss_bytes: Option<u64>,
    /// Names, sizes and BLAKE3 of the files.
    pub files: Vec<(String, u64, String)>,
    pub weights: Vec<Seen>,
}

/// The file in which a part tells about itself.
pub(super) const TOLD: &str = "part.json";

impl Told {
    /// What the part in a folder tells.
    pub fn open(folder: &Path) -> Result<Told> {
        let path = folder.join(TOLD);
        let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        serde_json::from_str(&text).map_err(|e| Error::malformed(&path, format!("not written by this version of compress: {e}")))
    }
}

/// What was seen of a weight. Numbers are kept as their bits: text has no infinities.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Seen {
    pub name: String,
    /// Signal, other, noise and product.
    sums: [u64; 4],
    max: u32,
    zeros: [u64; 2],
    changed: bool,
    nonfinite: u64,
    input_hash: Option<String>,
    bytes: u64,
    kept: Option<u64>,
    histogram: Option<([u32; 2], [Vec<u32>; 2])>,
    /// Where the part has some rows of the weight alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Cut>,
}

/// What was seen of some rows, as far as it takes to tell what is to be seen of all.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cut {
    /// The first row, the one behind the last, and all.
    rows: [usize; 3],
    /// Signal, other, noise and product, exactly.
    sums: [[u64; 7]; 4],
    /// Bytes and value of each subtree of the hash.
    hash: Vec<(u64, String)>,
    /// Values before and after.
    sample: [Vec<u32>; 2],
}

impl Cut {
    fn of(seen: &SeenRows) -> Cut {
        let SeenRows { rows, of, sums, hash, sample } = seen;
        Cut {
            rows: [rows.start, rows.end, *of],
            sums: sums.map(|sum| sum.to_bits()),
            hash: hash.iter().map(|subtree| (subtree.bytes, blake3::Hash::from_bytes(subtree.value).to_string())).collect(),
            sample: sample.each_ref().map(|values| values.iter().map(|value| value.to_bits()).collect()),
        }
    }

    fn seen(self) -> Option<SeenRows> {
        let [start, end, of] = self.rows;
        let subtree = |(bytes, value): (u64, String)| Some(Subtree { bytes, value: *blake3::Hash::from_hex(value).ok()?.as_bytes() });
        Some(SeenRows {
            rows: start..end,
            of,
            sums: self.sums.map(ExactSum::from_bits),
            hash: self.hash.into_iter().map(subtree).collect::<Option<_>>()?,
            sample: self.sample.map(|values| values.into_iter().map(f32::from_bits).collect()),
        })
    }
}

impl Seen {
    pub fn of(name: &str, seen: &WeightMeasurement) -> Seen {
        let Difference { signal, other, noise, dot, max, zeros_before, zeros_after } = seen.difference;
        let histogram = seen.histogram.as_ref().map(|h| ([h.low, h.high].map(f32::to_bits), [h.before.clone(), h.after.clone()]));
        Seen {
            name: name.to_owned(),
            sums: [signal, other, noise, dot].map(f64::to_bits),
            max: max.to_bits(),
            zeros: [zeros_before, zeros_after],
            changed: seen.changed,
            nonfinite: seen.nonfinite,
            input_hash: seen.input_hash.map(|hash| hash.to_string()),
            bytes: seen.bytes,
            kept: seen.kept,
            histogram,
            rows: seen.rows.as_deref().map(Cut::of),
        }
    }

    /// Whether the part has some rows of the weight alone.
    pub fn is_cut(&self) -> bool {
        self.rows.is_some()
    }

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
            kept: self.kept,
            histogram,
            rows: match self.rows {
                Some(cut) => Some(Box::new(cut.seen()?)),
                None => None,
            },
        })
    }
}

//! The state of a run: the passes that were applied to a model, what is left to do before writing, and what the report will say.

mod importance;
mod part;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

pub use self::importance::{ColumnImportance, InputImportance, Samples};
pub use self::part::{Dealt, Part, Share};

use crate::error::Result;
use crate::store::{Weight, Weights};
use crate::work::{Meter, Work};

/// Work that must be over before the weights can be written: a reading of data that several of them share.
pub trait Prepare: Send + Sync {
    /// Input bytes that it reads, all readings together.
    fn bytes(&self) -> u64;
    /// Does it; afterwards it need not be done again. In a run of several parts, each does its own, under a name that all give it, and
    /// says whether the others have done theirs.
    ///
    /// # Errors
    /// Reading fails, or the work is cancelled.
    fn prepare(&self, work: &Work, part: Option<(&Part, &str)>) -> Result<bool>;
}

/// A pass that was applied.
#[derive(Clone)]
pub struct Applied {
    /// The pass's name.
    pub name: &'static str,
    /// Its options, defaults written out.
    pub options: Value,
    /// Weights that it changes.
    pub tensors: BTreeSet<String>,
    /// How the weights were chosen, in plain words.
    pub rule: String,
    /// Time spent in it.
    pub meter: Arc<Meter>,
    /// The most memory that was resident while it ran; nothing for passes that take part in writing.
    pub peak_rss_bytes: Option<u64>,
    /// The most memory of a GPU that was taken while it ran; nothing where none was used.
    pub peak_vram_bytes: Option<u64>,
    /// What only the work itself can tell; asked for when everything is written.
    pub details: Arc<dyn Fn() -> Value + Send + Sync>,
    /// Plain words for the report.
    pub notes: Vec<String>,
    /// Whether it sets weights to zero.
    pub zeroes: bool,
}

impl Applied {
    /// Float weights of two or more dimensions that the pass does not change; none for passes that do not choose weights.
    pub fn unselected(&self, weights: &Weights) -> Vec<String> {
        let left = |(name, w): &(&String, &Weight)| !self.rule.is_empty() && w.shape.len() > 1 && w.is_float() && !self.tensors.contains(*name);
        weights.by_name.iter().filter(left).map(|(name, _)| name.clone()).collect()
    }

    /// A pass of which nothing more is known yet.
    pub fn new(name: &'static str, options: Value) -> Applied {
        Applied {
            name,
            options,
            tensors: BTreeSet::new(),
            rule: String::new(),
            meter: Arc::new(Meter::default()),
            peak_rss_bytes: None,
            peak_vram_bytes: None,
            details: Arc::new(|| Value::Null),
            notes: Vec::new(),
            zeroes: false,
        }
    }
}

/// What a run knows beside the model; the default is a run that has not begun.
#[derive(Clone, Default)]
pub struct RunState {
    /// Where the model is that the run began with; none outside of a pipeline.
    pub input: Option<PathBuf>,
    /// The passes that were applied, in order.
    pub history: Vec<Applied>,
    /// Files other than the model that the passes so far have read, by data set or pass.
    pub read: BTreeMap<String, Vec<PathBuf>>,
    /// What must be done before writing.
    pub preparations: Vec<Arc<dyn Prepare>>,
    /// Whether the sizes of weights are a guess, since only the work itself can tell.
    pub estimated: bool,
    /// Memory that passes need beyond what weights take on their way, in bytes, as far as it is known beforehand.
    pub memory: u64,
    /// The same for each thread that writes.
    pub memory_by_thread: u64,
    /// Bytes on disk that unfinished work of the passes takes beside the output, as far as it is known beforehand.
    pub kept_bytes: u64,
    /// Small files that passes have made, by name.
    pub attached: BTreeMap<String, Arc<Vec<u8>>>,
    /// Plain words for the report.
    pub notes: Vec<String>,
    /// What this process makes, where several share the run.
    pub part: Option<Arc<Part>>,
    /// What errors in columns count for, where a format asks for it.
    pub importance: Option<Arc<ColumnImportance>>,
    /// Name of the model file, where the output is one and no folder.
    pub file: Option<String>,
    /// Name of the file with its weights, where it is too large for one.
    pub data_file: Option<String>,
}

impl RunState {
    /// Whether this process makes what is stored under a name.
    pub fn makes(&self, name: &str) -> bool {
        self.part.as_ref().is_none_or(|part| part.owns(name))
    }

    /// What this process makes of a weight, if anything.
    ///
    /// # Errors
    /// The weight cannot be made in the rows that are this part's.
    pub fn own(&self, name: &str, weight: &Weight) -> Result<Option<Weight>> {
        self.part.as_ref().map_or_else(|| Ok(Some(weight.clone())), |part| part.own(name, weight))
    }

    /// Does what the passes left to be done before writing; whether all of it is done, for which parts of a run wait for one another.
    ///
    /// # Errors
    /// Reading fails, or the work is cancelled.
    pub fn prepare(&mut self, work: &Work) -> Result<bool> {
        for (number, preparation) in std::mem::take(&mut self.preparations).into_iter().enumerate() {
            let name = format!("preparation-{number}");
            if !preparation.prepare(work, self.part.as_deref().map(|part| (part, name.as_str())))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

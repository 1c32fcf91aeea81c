//! The state of a run: applied passes, work to do before writing, and notes for the report.

mod importance;
mod model_run;
mod part;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

pub use self::importance::{ColumnImportance, InputImportance, Samples};
pub use self::model_run::ModelRun;
pub use self::part::{Assignment, Part, PartIndex};

use crate::error::Result;
use crate::store::{Encoding, Weight, Weights};
use crate::work::{Meter, Work};

/// Work that must be done before the weights can be written: computing statistics that several weights
/// share.
pub trait Prepare: Send + Sync {
    /// Total number of input bytes that it reads.
    fn bytes(&self) -> u64;
    /// Does the work. In a run in parts, each part computes its own share and stores it under a name
    /// common to all parts. Returns whether the results of all parts are complete.
    ///
    /// # Errors
    /// Reading fails, or the work is cancelled.
    fn prepare(&self, work: &Work, part: Option<(&Part, &str)>) -> Result<bool>;
}

/// An applied pass.
#[derive(Clone)]
pub struct Applied {
    /// The pass's name.
    pub name: &'static str,
    /// Its options, including defaults.
    pub options: Value,
    /// Weights that it changes.
    pub tensors: BTreeSet<String>,
    /// Elements of these weights.
    pub parameters: u64,
    /// Float weights of two or more dimensions that it leaves unchanged; empty for passes that do not select
    /// weights.
    pub unselected: Vec<String>,
    /// The names before the pass of weights that have another name after it.
    pub previous_names: BTreeMap<String, String>,
    /// Description of how the weights were selected.
    pub rule: String,
    /// Time spent in it.
    pub meter: Arc<Meter>,
    /// Counted runs of models before writing; `None` if they are not known in advance.
    pub model_runs: Option<Vec<ModelRun>>,
    /// Elapsed time of the work before writing; `None` without such work, or for a cached result.
    pub seconds: Option<f64>,
    /// Multiply-accumulates of the models that it ran, if they were counted.
    pub counted_macs: Option<u64>,
    /// Peak resident memory while it ran; `None` for passes that are executed during writing.
    pub peak_rss_bytes: Option<u64>,
    /// Peak GPU memory while it ran; `None` if no GPU was used.
    pub peak_vram_bytes: Option<u64>,
    /// Details for the report.
    pub details: Value,
    /// Notes for the report.
    pub notes: Vec<String>,
    /// Whether it sets weights to zero.
    pub zeroes: bool,
    /// Small files for the output folder, by name.
    pub attached: BTreeMap<String, Arc<Vec<u8>>>,
    /// Work to do before writing.
    pub preparations: Vec<Arc<dyn Prepare>>,
    /// Whether the planned names, shapes or encodings are estimates, because they depend on values or
    /// samples.
    pub estimated: bool,
    /// Memory needed in addition to blocks of weights, in bytes, as far as known in advance.
    pub memory: u64,
    /// The same for each thread that writes.
    pub memory_by_thread: u64,
    /// Size in bytes of the checkpoints on the disk of the output, as far as known in advance; `None` if
    /// the pass writes none, so that it cannot be resumed.
    pub checkpoint_bytes: Option<u64>,
}

/// Prefix of notes that are listed first.
pub const WARNING: &str = "warning: ";

impl Applied {
    /// Records the weights that the pass selected and renamed, from the weights before and after it.
    pub fn compare(&mut self, before: &Weights, after: &Weights) {
        let (before, after) = (&before.by_name, &after.by_name);
        let changed = self.tensors.iter().filter_map(|name| before.get(name).or_else(|| after.get(name)));
        self.parameters = changed.map(|weight| weight.elements() as u64).sum();
        let is_unselected = |(name, weight): &(&String, &Weight)| {
            let is_float_matrix = weight.shape.len() > 1 && weight.is_float() && weight.encoding == Encoding::Dense;
            is_float_matrix && !self.tensors.contains(*name) && after.contains_key(*name)
        };
        let selects = !self.rule.is_empty();
        self.unselected = before.iter().filter(|_| selects).filter(is_unselected).map(|(name, _)| name.clone()).collect();
        self.previous_names = previous_names(before, after);
    }

    /// The name of a weight before the pass.
    fn previous_name<'s>(&'s self, name: &'s str) -> &'s str {
        self.previous_names.get(name).map_or(name, String::as_str)
    }

    /// A record of a pass without results.
    pub fn new(name: &'static str, options: Value) -> Applied {
        Applied {
            name,
            options,
            tensors: BTreeSet::new(),
            parameters: 0,
            unselected: Vec::new(),
            previous_names: BTreeMap::new(),
            rule: String::new(),
            meter: Arc::new(Meter::default()),
            model_runs: None,
            seconds: None,
            counted_macs: None,
            peak_rss_bytes: None,
            peak_vram_bytes: None,
            details: Value::Null,
            notes: Vec::new(),
            zeroes: false,
            attached: BTreeMap::new(),
            preparations: Vec::new(),
            estimated: false,
            memory: 0,
            memory_by_thread: 0,
            checkpoint_bytes: None,
        }
    }
}

/// The names in `before` of weights that have another name in `after`: they have the same source, or were
/// read from the same tensors.
fn previous_names(before: &BTreeMap<String, Weight>, after: &BTreeMap<String, Weight>) -> BTreeMap<String, String> {
    let source = |weight: &Weight| Arc::as_ptr(&weight.source()).cast::<()>();
    let by_source: BTreeMap<_, &String> = before.iter().map(|(name, weight)| (source(weight), name)).collect();
    let mut by_tensors = BTreeMap::<&[String], Vec<&String>>::new();
    before.iter().for_each(|(name, weight)| by_tensors.entry(&weight.stored_as).or_default().push(name));
    let previous = |(name, weight): (&String, &Weight)| {
        if before.get(name).is_some_and(|before| source(before) == source(weight) || before.stored_as == weight.stored_as) {
            return None;
        }
        let only = || match by_tensors.get(weight.stored_as.as_slice())?.as_slice() {
            [only] if !weight.stored_as.is_empty() => Some(*only),
            _ => None,
        };
        by_source.get(&source(weight)).copied().or_else(only).map(|previous| (name.clone(), previous.clone()))
    };
    after.iter().filter_map(previous).collect()
}

/// State of a run in addition to the model. The default is the state before the first pass.
#[derive(Clone, Default)]
pub struct RunState {
    /// Path of the input model; `None` outside of a pipeline.
    pub input: Option<PathBuf>,
    /// Seed of all random number generators.
    pub seed: u64,
    /// The passes that were applied, in order.
    pub history: Vec<Applied>,
    /// Small files generated by passes, by name.
    pub attached: BTreeMap<String, Arc<Vec<u8>>>,
    /// Notes for the report.
    pub notes: Vec<String>,
    /// The part of the run that this process executes, if the run is divided into parts.
    pub part: Option<Arc<Part>>,
    /// Importance of weight columns, if an output format needs it.
    pub importance: Option<Arc<ColumnImportance>>,
    /// Name of the model file, if the output is a file instead of a folder.
    pub file: Option<String>,
    /// Name of the file for its external weights, if it is too large for one file.
    pub data_file: Option<String>,
}

impl RunState {
    /// Adds the record of a pass.
    pub fn add(&mut self, mut applied: Applied) {
        self.attached.append(&mut applied.attached);
        self.history.push(applied);
    }

    /// The passes from the last to the first, each with the name that a weight of the final model has after
    /// it.
    fn names_of<'s>(&'s self, mut name: &'s str) -> impl Iterator<Item = (&'s Applied, &'s str)> {
        self.history.iter().rev().map(move |applied| {
            let current = name;
            name = applied.previous_name(name);
            (applied, current)
        })
    }

    /// The name that a weight of the final model has after a pass of this run.
    pub fn name_after<'s>(&'s self, pass: &Applied, name: &'s str) -> &'s str {
        self.names_of(name).find(|(applied, _)| std::ptr::eq(*applied, pass)).map_or(name, |(_, name)| name)
    }

    /// Whether a pass changed this weight of the final model.
    pub fn is_changed(&self, name: &str) -> bool {
        self.names_of(name).any(|(applied, name)| applied.tensors.contains(name))
    }

    /// The name that a weight of the final model has in the input.
    pub fn original_name<'s>(&'s self, name: &'s str) -> &'s str {
        self.history.iter().rev().fold(name, |name, applied| applied.previous_name(name))
    }

    /// Whether the sizes of weights are estimates, because they depend on values or samples.
    pub fn is_estimated(&self) -> bool {
        self.history.iter().any(|applied| applied.estimated)
    }

    /// Size in bytes of the checkpoints of all passes, as far as known in advance; `None` if no pass
    /// writes checkpoints.
    pub fn checkpoint_bytes(&self) -> Option<u64> {
        self.history.iter().filter_map(|applied| applied.checkpoint_bytes).reduce(u64::saturating_add)
    }

    /// Whether this process writes the tensor with this name.
    pub fn writes(&self, name: &str) -> bool {
        self.part.as_ref().is_none_or(|part| part.owns(name))
    }

    /// The weight, or the rows of it, that this process writes; `None` if it writes none of it.
    ///
    /// # Errors
    /// The rows of this part cannot be computed separately.
    pub fn own_rows(&self, name: &str, weight: &Weight) -> Result<Option<Weight>> {
        self.part.as_ref().map_or_else(|| Ok(Some(weight.clone())), |part| part.own_rows(name, weight))
    }

    /// Does the remaining work before writing. Returns `false` if results of other parts of the run are
    /// missing.
    ///
    /// # Errors
    /// Reading fails, or the work is cancelled.
    pub fn prepare(&mut self, work: &Work) -> Result<bool> {
        let preparations = self.history.iter_mut().flat_map(|applied| std::mem::take(&mut applied.preparations));
        for (number, preparation) in preparations.enumerate() {
            let name = format!("preparation-{number}");
            if !preparation.prepare(work, self.part.as_deref().map(|part| (part, name.as_str())))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

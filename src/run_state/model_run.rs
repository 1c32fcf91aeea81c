//! Counted runs of models, from which the time of a pass is estimated.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

type Macs = dyn Fn(&BTreeMap<String, usize>) -> u64 + Send + Sync;

/// Runs of models over the samples of a pass.
#[derive(Clone)]
pub struct ModelRun {
    /// Multiply-accumulates for a batch with these sizes of the named axes; those of a backward pass count
    /// twice.
    pub(crate) macs: Arc<Macs>,
    /// Number of batches of this many samples; `None` for all samples of the data set, once.
    pub batches: Option<(u64, usize)>,
    /// Whether the pass may stop earlier.
    pub at_most: bool,
    /// Whether each sample runs at most once, because its results are cached.
    pub is_cached: bool,
}

impl fmt::Debug for ModelRun {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("ModelRun").field("batches", &self.batches).field("at_most", &self.at_most).finish_non_exhaustive()
    }
}

impl ModelRun {
    /// One run over all samples.
    pub fn new(macs: impl Fn(&BTreeMap<String, usize>) -> u64 + Send + Sync + 'static) -> ModelRun {
        ModelRun { macs: Arc::new(macs), batches: None, at_most: false, is_cached: false }
    }

    /// As many runs.
    #[must_use]
    pub fn times(self, count: u64) -> ModelRun {
        let macs = self.macs.clone();
        ModelRun { macs: Arc::new(move |sizes: &BTreeMap<String, usize>| macs(sizes).saturating_mul(count)), ..self }
    }

    /// Multiply-accumulates for a batch with these sizes of the named axes.
    pub fn macs(&self, sizes: &BTreeMap<String, usize>) -> u64 {
        (self.macs)(sizes)
    }
}

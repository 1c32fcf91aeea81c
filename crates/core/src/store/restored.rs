//! Weights restored from files of an earlier run, measured relative to the original weights.

use std::sync::Arc;

use super::{BlockSink, DType, Encoding, Weight, WeightSource};
use crate::error::Result;

/// Replaces the values of `before` by those of `now`. The values are read completely when visited, so
/// that each thread has at most one such weight in memory.
struct Restored {
    name: String,
    before: Weight,
    now: Weight,
}

impl Restored {
    /// The values of `now` as a weight derived from `before`.
    fn values(&self) -> Result<Weight> {
        let base = self.before.then(self.now.dtype, self.now.encoding.clone(), self.before.source());
        let Some(scales) = self.now.scales()? else {
            return base.with_values(&self.name, &self.now.floats(&self.name)?);
        };
        let mut integers = Vec::with_capacity(self.now.elements());
        self.now.visit(self.now.row(), &mut |block| {
            integers.extend(block.now.values.iter().map(|byte| *byte as i8));
            Ok(())
        })?;
        base.with_integers(&self.name, integers, &scales)
    }
}

impl WeightSource for Restored {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.values()?.visit(unit, sink)
    }
}

/// A rounded weight with its master weight, the values before rounding.
struct WithMaster {
    source: Arc<dyn WeightSource>,
    master: Weight,
}

impl WeightSource for WithMaster {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.source.visit(unit, sink)
    }

    fn unrounded(&self) -> Option<&Weight> {
        Some(&self.master)
    }
}

impl Weight {
    /// Attaches the master weight, from which training starts.
    #[must_use]
    pub fn with_master(self, master: Weight) -> Weight {
        let source = Arc::new(WithMaster { source: self.source(), master });
        let mut weight = self.then(self.dtype, self.encoding.clone(), source);
        weight.stored_type = self.stored_type;
        weight
    }

    /// The weight with the values of `now`. If `now` has another shape, or a dtype that passes do not
    /// compute, `now` is returned.
    #[must_use]
    pub fn restored(&self, name: &str, now: Weight) -> Weight {
        let computed = now.encoding != Encoding::Dense || matches!(now.dtype, DType::F32 | DType::F16 | DType::BF16);
        if self.shape != now.shape || !computed {
            return now;
        }
        let source = Restored { name: name.to_owned(), before: self.clone(), now: now.clone() };
        self.then(now.dtype, now.encoding, Arc::new(source))
    }
}

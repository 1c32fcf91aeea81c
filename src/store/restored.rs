//! Weights that an earlier run has computed and a file holds, told beside what they were computed from.

use std::sync::Arc;

use super::{BlockSink, DType, Encoding, Weight, WeightSource};
use crate::error::Result;

/// Read whole when it is gone over: no more than one of them is in memory at a time for each thread.
struct Reread {
    name: String,
    before: Weight,
    now: Weight,
}

impl Reread {
    /// The values of the one in the form of the other.
    fn values(&self) -> Result<Weight> {
        let like = self.before.then(self.now.dtype, self.now.encoding.clone(), self.before.source());
        let Some(scales) = self.now.scales()? else {
            return like.with_values(&self.name, &self.now.floats(&self.name)?);
        };
        let mut integers = Vec::with_capacity(self.now.elements());
        self.now.visit(self.now.row(), &mut |block| {
            integers.extend(block.now.values.iter().map(|byte| *byte as i8));
            Ok(())
        })?;
        like.with_integers(&self.name, integers, &scales)
    }
}

impl WeightSource for Reread {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.values()?.visit(unit, sink)
    }
}

/// A rounded weight together with the values that it was rounded from.
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
    /// This weight with the values that it was rounded from, which training starts at.
    #[must_use]
    pub fn with_master(self, master: Weight) -> Weight {
        let source = Arc::new(WithMaster { source: self.source(), master });
        let mut weight = self.then(self.dtype, self.encoding.clone(), source);
        weight.stored_type = self.stored_type;
        weight
    }

    /// This weight with the values that `now` holds of it; of another shape, or of a format that passes do not compute, `now` itself.
    #[must_use]
    pub fn reread(&self, name: &str, now: Weight) -> Weight {
        let computed = now.encoding != Encoding::Dense || matches!(now.dtype, DType::F32 | DType::F16 | DType::BF16);
        if self.shape != now.shape || !computed {
            return now;
        }
        let source = Reread { name: name.to_owned(), before: self.clone(), now: now.clone() };
        self.then(now.dtype, now.encoding, Arc::new(source))
    }
}

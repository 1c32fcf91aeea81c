//! Weights whose rows lie in another order in GGUF files, and those that are told from another number.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource, least_common_multiple};

/// Another dense weight of floats, with its rows in another order and a number added.
pub struct Arranged {
    /// Where the values come from.
    pub upstream: Weight,
    /// Rows of a window, and for each row of it the one that comes there; none for the order that there is.
    pub order: Option<Arc<Vec<usize>>>,
    /// What is added to every value; they are 32-bit floats then.
    pub added: f32,
    /// Name, for errors.
    pub name: String,
}

impl Arranged {
    /// The order that brings the two halves of each head's rows beside each other: rows 0, n/2, 1, n/2 + 1 … of a head of `n` rows.
    pub fn beside_each_other(head: usize) -> Arc<Vec<usize>> {
        let half = head.checked_div(2).unwrap_or(0);
        Arc::new((0..half).flat_map(|row| [row, row.saturating_add(half)]).collect())
    }

    /// The order that parts them again: rows 0, 2, 4 … of a head, then 1, 3, 5 ….
    pub fn apart(head: usize) -> Arc<Vec<usize>> {
        Arc::new((0..head).step_by(2).chain((1..head).step_by(2)).collect())
    }

    /// The weight.
    ///
    /// # Errors
    /// Its rows are no whole windows, or it holds no floats.
    pub fn weight(self) -> Result<Weight> {
        let rows = self.upstream.shape.first().copied().unwrap_or(1);
        if let Some(order) = &self.order
            && (order.is_empty() || !rows.is_multiple_of(order.len()))
        {
            return Err(Error::tensor(&self.name, format!("has {rows} rows, which are no whole heads of {}", order.len()), ""));
        }
        if !self.upstream.is_float() || self.upstream.encoding != Encoding::Dense {
            return Err(Error::tensor(&self.name, format!("is {}, where floats are needed", self.upstream.describe()), ""));
        }
        let dtype = if self.added == 0.0 { self.upstream.dtype } else { DType::F32 };
        let (upstream, kind) = (self.upstream.clone(), self.upstream.stored_type);
        let mut weight = upstream.then(dtype, Encoding::Dense, Arc::new(self));
        weight.stored_type = kind;
        Ok(weight)
    }

    /// Elements of a row.
    fn row(&self) -> usize {
        self.upstream.elements().checked_div(self.upstream.shape.first().copied().unwrap_or(1)).unwrap_or(1).max(1)
    }

    fn arrange(&self, view: &View, bytes: &mut Vec<u8>) -> Result<DType> {
        let mut floats = Vec::new();
        let (dtype, values) = plain(view, self.added, &self.name, &mut floats)?;
        bytes.clear();
        let row = self.row().saturating_mul(dtype.bitsize() / 8);
        match &self.order {
            None => bytes.extend_from_slice(values),
            Some(order) => {
                for window in values.chunks_exact(row.saturating_mul(order.len()).max(1)) {
                    let from = |index: &usize| window.get(index.saturating_mul(row)..index.saturating_add(1).saturating_mul(row)).unwrap_or_default();
                    order.iter().for_each(|index| bytes.extend_from_slice(from(index)));
                }
            }
        }
        Ok(dtype)
    }
}

/// The values of a view as they lie, or as floats in `floats` where they are codes or something is added to them.
///
/// # Errors
/// They stand for no floats.
pub(super) fn plain<'v>(view: &View<'v>, added: f32, name: &str, floats: &'v mut Vec<u8>) -> Result<(DType, &'v [u8])> {
    if added == 0.0 && view.affine.is_none() {
        return Ok((view.dtype, view.values));
    }
    let mut values = vec![0f32; view.elements()];
    if !view.decode(0, &mut values) {
        return Err(Error::tensor(name, format!("is {}, where floats are needed", view.dtype), ""));
    }
    values.iter_mut().for_each(|value| *value += added);
    floats.resize(values.len().saturating_mul(4), 0);
    convert::f32_bytes(&values, floats);
    Ok((DType::F32, floats))
}

impl WeightSource for Arranged {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let window = self.order.as_ref().map_or(1, |order| order.len().saturating_mul(self.row()));
        let (mut now, mut before) = (Vec::new(), Vec::new());
        self.upstream.visit(least_common_multiple(unit, window), &mut |block| {
            let same = block.now.is(&block.before);
            let dtype = self.arrange(&block.now, &mut now)?;
            if same {
                return sink(Block::untouched(View::dense(dtype, &now)));
            }
            let before_dtype = self.arrange(&block.before, &mut before)?;
            sink(Block { now: View::dense(dtype, &now), before: View::dense(before_dtype, &before) })
        })
    }
}

//! Attention scores between content and relative positions.

use std::ops::Range;

use candle_core::{Device, Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, require_floats, sums};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Products of each query, or of each key, with an embedding of the relative position (Shaw et al., 2018;
/// DeBERTa's content-to-position and position-to-content scores: He et al., 2021): heads `[batch, heads,
/// sequence, width]` and a table `[rows, heads · width]` to `[batch, heads, sequence, sequence]`, queries
/// before keys.
///
/// The middle row of the table is for a key at the position of the query. Keys before the query have
/// later rows. Distances beyond the table use the first or the last row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RelativeProducts {
    /// Factor on the products.
    pub scale: f64,
    /// Number of rows of the table on either side of the middle.
    pub span: usize,
    /// From half of `span` on, distances share rows on a logarithmic scale, and this distance has the
    /// last row. Without it, each distance has its own row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_distance: Option<usize>,
    /// Whether the heads are those of keys.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub of_keys: bool,
}

impl Default for RelativeProducts {
    fn default() -> Self {
        Self { scale: 1.0, span: 256, max_distance: None, of_keys: false }
    }
}

/// Maximum number of products in temporary memory, unless one sample needs more.
const PRODUCTS: usize = if cfg!(test) { 1 << 9 } else { 1 << 24 };
/// Maximum span and distance that are accepted as plausible.
const MAX_SPAN: usize = 1 << 20;

impl RelativeProducts {
    fn validate(&self) -> Result<(), String> {
        let exact = self.span / 2;
        match self.max_distance {
            _ if self.span == 0 || self.span > MAX_SPAN => Err(format!("a table cannot have {} rows on either side", self.span)),
            Some(far) if exact < 2 || far <= exact || far > MAX_SPAN => {
                Err(format!("{} rows on either side and a maximum distance of {far} leave no rows for shared distances", self.span))
            }
            _ if self.reach() > MAX_SPAN => Err(format!("{} rows on either side are never all used with this maximum distance", self.span)),
            _ => Ok(()),
        }
    }

    /// Offset of the row for a distance from the middle row.
    fn steps(&self, distance: usize) -> usize {
        let exact = self.span / 2;
        let Some(far) = self.max_distance.filter(|_| distance > exact) else { return distance };
        // In 32 bits and in this order, as in the training code of the checkpoints.
        let part = (distance as f32 / exact as f32).ln() / ((far as f64 / exact as f64) as f32).ln();
        (part * (exact - 1) as f32).ceil() as usize + exact
    }

    /// The row for a key `before` positions before the query.
    fn row(&self, before: i64) -> usize {
        let steps = self.steps(before.unsigned_abs() as usize);
        if before < 0 { self.span.saturating_sub(steps) } else { (self.span + steps).min(2 * self.span - 1) }
    }

    /// The smallest distance from which on all use the outermost rows.
    fn reach(&self) -> usize {
        let (mut near, mut far) = (0, 2 * MAX_SPAN * MAX_SPAN);
        while near < far {
            let middle = near + (far - near) / 2;
            if self.steps(middle) < self.span { near = middle + 1 } else { far = middle }
        }
        near
    }

    /// The rows for relative positions from `-reach` to `reach`, and `reach`; relative to the query, or
    /// to the key if the heads are those of keys.
    pub fn by_distance(&self) -> (Vec<i64>, i64) {
        let reach = self.reach() as i64;
        ((-reach..=reach).map(|places| self.row(if self.of_keys { places } else { -places }) as i64).collect(), reach)
    }

    /// Rows in the order of the columns of products, twice as many as positions: column `c` of row `r`
    /// has the relative position `c + r + 1 - sequence`.
    fn columns(&self, sequence: usize, device: &Device) -> Computed<Tensor> {
        constant(format!("rows of places {self:?} {sequence}"), device, |device| {
            let places = (0..2 * sequence as i64).map(|column| column + 1 - sequence as i64);
            let rows: Vec<i64> = places.map(|ahead| self.row(if self.of_keys { ahead } else { -ahead }) as i64).collect();
            Tensor::from_vec(rows, 2 * sequence, device)
        })
    }

    /// The embeddings in that order, `[heads, columns, width]`.
    fn vectors(&self, table: &Tensor, heads: usize, sequence: usize) -> Computed<Tensor> {
        let rows = table.index_select(&self.columns(sequence, table.device())?, 0)?;
        rows.reshape((2 * sequence, heads, ()))?.transpose(0, 1)?.contiguous()
    }

    /// Ranges of samples that are processed together: first sample and count.
    fn parts(x: &Tensor) -> Computed<impl Iterator<Item = (usize, usize)>> {
        let (batch, heads, sequence, _) = x.dims4()?;
        let samples = (PRODUCTS / (2 * heads * sequence * sequence).max(1)).max(1);
        Ok((0..batch).step_by(samples).map(move |first| (first, samples.min(batch - first))))
    }
}

/// Shifts each row of `[batch, heads, rows, 2 · rows]` so that its own relative positions start at the
/// first column: `[batch, heads, rows, rows]`.
fn moved(products: &Tensor) -> Computed<Tensor> {
    let (batch, heads, rows, columns) = products.dims4()?;
    let flat = products.reshape((batch, heads, rows * columns))?;
    let from_first = flat.narrow(2, rows.saturating_sub(1), rows * columns.saturating_sub(1))?.contiguous()?;
    from_first.reshape((batch, heads, rows, columns.saturating_sub(1)))?.narrow(3, 0, rows)?.contiguous()
}

/// The inverse of [`moved`], with zeros for dropped elements.
fn moved_back(gradient: &Tensor) -> Computed<Tensor> {
    let (batch, heads, rows, _) = gradient.dims4()?;
    let wide = gradient.pad_with_zeros(3, 0, rows.saturating_sub(1))?.reshape((batch, heads, ()))?;
    wide.pad_with_zeros(2, rows.saturating_sub(1), 1)?.reshape((batch, heads, rows, 2 * rows))
}

impl OpSpec for RelativeProducts {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [heads, table] = [inputs[0], inputs[1]];
        require_floats(heads, 4, "the heads")?;
        require_floats(table, 2, "the table")?;
        self.validate()?;
        if Dim::all([&heads.shape[1], &heads.shape[3]]).as_ref() != Some(&table.shape[1]) {
            return Err(format!("the rows of the table must have the size of {} heads of width {}", heads.shape[1], heads.shape[3]));
        }
        match table.shape[0].fixed() {
            Some(rows) if rows >= 2 * self.span => {}
            _ => return Err(format!("the table must have at least {} rows", 2 * self.span)),
        }
        let [batch, count, sequence] = [0, 1, 2].map(|axis| heads.shape[axis].clone());
        Ok(TensorType { element: Element::Float, shape: vec![batch, count, sequence.clone(), sequence] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b h s! d, _ (h d) -> b h s! s!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        let (x, table) = (&inputs[0], &inputs[1]);
        let (_, heads, sequence, _) = x.dims4()?;
        let vectors = self.vectors(table, heads, sequence)?.t()?.contiguous()?;
        let part = |(first, count)| moved(&(x.narrow(0, first, count)?.contiguous()? * self.scale)?.broadcast_matmul(&vectors)?);
        let products = Tensor::cat(&Self::parts(x)?.map(part).collect::<Computed<Vec<_>>>()?, 0)?;
        if self.of_keys { products.transpose(2, 3)?.contiguous() } else { Ok(products) }
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let [x, table] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?];
        let (_, heads, sequence, width) = x.dims4()?;
        let vectors = self.vectors(table, heads, sequence)?;
        let (mut of_heads, mut of_vectors) = (Vec::new(), None);
        for (first, count) in Self::parts(x)? {
            let gradient = backward.gradient.narrow(0, first, count)?;
            let gradient = if self.of_keys { gradient.transpose(2, 3)? } else { gradient }.contiguous()?;
            let of_products = (moved_back(&gradient)? * self.scale)?;
            if backward.needs_gradient(0) {
                of_heads.push(of_products.broadcast_matmul(&vectors)?);
            }
            if backward.needs_gradient(1) {
                let x = x.narrow(0, first, count)?.contiguous()?;
                let sum = wide(&of_products.transpose(2, 3)?.contiguous()?.matmul(&x)?)?.sum(0)?;
                of_vectors = Some(of_vectors.map_or(Ok(sum.clone()), |other: Tensor| other + sum)?);
            }
        }
        let of_table = |sum: Tensor| {
            let rows = sum.transpose(0, 1)?.contiguous()?.reshape((2 * sequence, heads * width))?;
            let columns = self.columns(sequence, rows.device())?;
            sum_rows_by_index(&rows, &columns, table.dim(0)?)?.to_dtype(table.dtype())
        };
        Ok(vec![backward.gradient_of(0, || Tensor::cat(&of_heads, 0))?, of_vectors.map(of_table).transpose()?])
    }

    fn macs(&self, inputs: &[&TensorType], _output: &TensorType, bindings: &Bindings) -> u64 {
        sums(inputs[0], [&inputs[0].shape[2]], bindings).saturating_mul(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference values: `make_log_bucket_position` of transformers, offset to the middle of the table
    /// and clamped to its rows.
    #[test]
    fn rows_match_the_reference() {
        let at = |op: &RelativeProducts, places: &[i64]| places.iter().map(|before| op.row(*before)).collect::<Vec<_>>();
        let base = RelativeProducts { max_distance: Some(511), ..RelativeProducts::default() };
        assert_eq!(at(&base, &[0, 1, 127, 128, 129, 130, 200, 300, 510, 511, 512, 900]), [256, 257, 383, 384, 385, 386, 425, 463, 511, 511, 511, 511]);
        assert_eq!(at(&base, &[-1, -128, -129, -200, -510, -511, -512, -900]), [255, 128, 127, 87, 1, 1, 0, 0]);
        let plain = RelativeProducts { span: 4, ..RelativeProducts::default() };
        assert_eq!(at(&plain, &[-9, -4, -3, 0, 3, 4, 9]), [0, 0, 1, 4, 7, 7, 7]);
        assert_eq!((plain.reach(), base.reach()), (4, 512));
        // Checksums over all distances up to 2000 on either side.
        for (span, far, sum) in
            [(256, 511, 611_418_067), (8, 19, 670_980_956), (4, 8, 536_175_710), (32, 511, 982_463_230), (64, 99, 7_542_076), (5, 11, 542_895_369)]
        {
            let op = RelativeProducts { span, max_distance: Some(far), ..base };
            let found = (-2000..=2000).fold(0, |sum, before| (sum * 31 + op.row(before)) % 1_000_000_007);
            assert_eq!(found, sum, "{op:?}");
            let (rows, reach) = op.by_distance();
            let last = 2 * reach as usize;
            assert_eq!((rows[0], rows[last], rows[last - 1] > 0), (2 * span as i64 - 1, 0, true));
            assert!(op.validate().is_ok());
        }
        let refused = |span, far| RelativeProducts { span, max_distance: Some(far), ..base }.validate().unwrap_err();
        assert!(refused(3, 9).contains("shared distances") && refused(8, 4).contains("shared distances") && refused(5, 1 << 19).contains("never all used"));
    }
}

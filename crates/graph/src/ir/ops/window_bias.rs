//! Relative position bias of windowed attention over images (Swin).

use std::ops::Range;

use candle_core::{Device, Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, Element, TensorType};

/// Relative position bias and mask of shifted-window attention (Swin: Liu et al., 2021): a table `[(2 ·
/// window - 1)², heads]`, indexed by the vertical and horizontal distance of two patches, to `[heads ·
/// windows, patches, patches]`. In shifted windows, pairs of patches from different regions of the image
/// get `MASK_PENALTY` subtracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WindowBias {
    /// Side length of a window in patches.
    pub window: usize,
    /// Rows and columns of windows.
    pub windows: [usize; 2],
    /// Cyclic shift of the windows to the bottom right, in patches.
    #[serde(skip_serializing_if = "super::is_zero")]
    pub shift: usize,
}

impl Default for WindowBias {
    fn default() -> Self {
        Self { window: 7, windows: [1, 1], shift: 0 }
    }
}

/// Maximum number of patch pairs of all windows.
const MAX_PAIRS: usize = 1 << 26;

impl WindowBias {
    /// Subtracted from products of patches from different regions of the image.
    pub const MASK_PENALTY: f64 = 100.0;

    fn sizes(&self) -> Option<[usize; 3]> {
        let [rows, columns] = self.windows;
        let places = self.window.checked_mul(self.window)?;
        let windows = rows.checked_mul(columns).filter(|windows| *windows > 0)?;
        let side = self.window.checked_mul(2)?.checked_sub(1)?;
        windows.checked_mul(places)?.checked_mul(places).filter(|pairs| *pairs <= MAX_PAIRS)?;
        Some([windows, places, side * side])
    }

    /// The table row of each pair of patches, query by query.
    pub fn pairs(&self) -> Vec<i64> {
        let side = self.window as i64;
        let places = || (0..side * side).map(move |place| (place / side, place % side));
        let row = |(down, right): (i64, i64)| (down + side - 1) * (2 * side - 1) + right + side - 1;
        places().flat_map(|query| places().map(move |key| row((query.0 - key.0, query.1 - key.1)))).collect()
    }

    /// The region of the image that each patch of each window belongs to.
    pub fn regions(&self) -> Vec<i64> {
        let [rows, columns] = self.windows;
        // The last patches of a side wrapped around the edge.
        let part = |window: usize, of: usize, place: usize| if window + 1 < of { 0 } else { 1 + i64::from(place + self.shift >= self.window) };
        let places = |window: usize| (0..self.window * self.window).map(move |place| (window, place));
        let of = |(window, place): (usize, usize)| part(window / columns, rows, place / self.window) * 3 + part(window % columns, columns, place % self.window);
        (0..rows * columns).flat_map(places).map(of).collect()
    }

    fn rows(&self, device: &Device) -> Computed<Tensor> {
        constant(format!("rows of pairs in {}", self.window), device, |device| {
            let pairs = self.pairs();
            let count = pairs.len();
            Tensor::from_vec(pairs, count, device)
        })
    }

    /// The mask that is added to pairs, `[1, windows, pairs]`.
    fn mask(&self, device: &Device) -> Computed<Tensor> {
        constant(format!("parts of pictures {self:?}"), device, |device| {
            let (places, parts) = (self.window * self.window, self.regions());
            let windows = parts.chunks(places.max(1));
            let number = |same: bool| if same { 0.0 } else { -Self::MASK_PENALTY as f32 };
            let all: Vec<f32> = windows.flat_map(|parts| parts.iter().flat_map(|query| parts.iter().map(move |key| number(query == key)))).collect();
            Tensor::from_vec(all, (1, parts.len() / places.max(1), places * places), device)
        })
    }
}

impl OpSpec for WindowBias {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let table = inputs[0];
        require_floats(table, 2, "the table")?;
        let sizes = self.sizes();
        let [windows, places, rows] =
            sizes.ok_or_else(|| format!("{:?} windows with a side of {} patches are empty or too large", self.windows, self.window))?;
        if self.shift >= self.window {
            return Err(format!("windows with a side of {} patches cannot be shifted by {}", self.window, self.shift));
        }
        if table.shape[0] != Dim::Fixed(rows) {
            return Err(format!("the table must have {rows} rows"));
        }
        let heads = table.shape[1].fixed().ok_or("the number of heads must be fixed")?;
        Ok(TensorType { element: Element::Float, shape: vec![Dim::product(heads, windows)?, places.into(), places.into()] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        format!("_ h -> (h w!={}) _ _", self.windows[0].saturating_mul(self.windows[1]))
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        let (table, places) = (&inputs[0], self.window * self.window);
        let (heads, windows) = (table.dim(1)?, self.windows[0] * self.windows[1]);
        let by_head = table.index_select(&self.rows(table.device())?, 0)?.t()?.contiguous()?.unsqueeze(1)?;
        let all = if self.shift == 0 {
            by_head.broadcast_as((heads, windows, places * places))?.contiguous()?
        } else {
            by_head.broadcast_add(&self.mask(table.device())?.to_dtype(table.dtype())?)?
        };
        all.reshape((heads * windows, places, places))
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let table = backward.inputs[0].dims();
        let of_table = backward.gradient_of(0, || {
            let (heads, places) = (table.get(1).copied().unwrap_or(0), self.window * self.window);
            let by_window = wide(backward.gradient)?.reshape((heads, (), places * places))?;
            let pairs = by_window.sum(1)?.t()?.contiguous()?;
            let rows = self.rows(pairs.device())?;
            sum_rows_by_index(&pairs, &rows, table[0])?.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_table])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference values: `SwinLayer.get_attn_mask` of transformers, for 2 x 3 windows with a side of 4
    /// patches, shifted by 1.
    #[test]
    fn regions_match_the_reference() {
        let op = WindowBias { window: 4, windows: [2, 3], shift: 1 };
        let parts = op.regions();
        let window = |at: usize| parts[at * 16..(at + 1) * 16].to_vec();
        assert_eq!(window(0), [0; 16]);
        assert_eq!(window(2), [1, 1, 1, 2].repeat(4));
        assert_eq!(window(3), [[3; 4], [3; 4], [3; 4], [6; 4]].concat());
        assert_eq!(window(5), [[4, 4, 4, 5], [4, 4, 4, 5], [4, 4, 4, 5], [7, 7, 7, 8]].concat());
        assert_eq!(WindowBias { window: 2, ..op }.pairs(), [4, 3, 1, 0, 5, 4, 2, 1, 7, 6, 4, 3, 8, 7, 5, 4]);
    }

    #[test]
    fn invalid_windows_are_refused() {
        let infer = |op: WindowBias, rows: usize| op.infer(&[&TensorType::float([rows, 2])]).map(|ty| ty.to_string());
        let op = WindowBias { window: 2, windows: [2, 3], shift: 1 };
        assert_eq!(infer(op, 9).unwrap(), "float[12, 4, 4]");
        assert!(infer(op, 8).unwrap_err().contains("9 rows"));
        assert!(infer(WindowBias { shift: 2, ..op }, 9).unwrap_err().contains("cannot be shifted by 2"));
        assert!(infer(WindowBias { window: 0, ..op }, 9).unwrap_err().contains("[2, 3] windows with a side of 0"));
        assert!(infer(WindowBias { window: usize::MAX / 2, ..op }, 9).is_err() && infer(WindowBias { windows: [1 << 40, 1 << 40], ..op }, 9).is_err());
    }
}

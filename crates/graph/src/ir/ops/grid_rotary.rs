//! Rotary position embedding of the patches of an image.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::rotary::rotate_halves;
use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, TensorType};

/// Rotates pairs of elements `(i, i + d/2)` of each head `[batch, heads, rows · columns, d]`: the first half
/// of the pairs by angles proportional to the row of the patch, the second half by its column, both with the
/// frequencies of a head of width `d/2` (Qwen2-VL: Wang et al., 2024). The patches of a block are adjacent:
/// blocks, and patches within a block, are in row-major order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GridRotary {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Side length of a block in patches.
    pub block: usize,
}

impl Default for GridRotary {
    fn default() -> Self {
        Self { theta: 10_000.0, grid: [1, 1], block: 1 }
    }
}

/// Maximum number of patches.
const MAX_PATCHES: usize = 1 << 20;

impl GridRotary {
    /// Row and column of each patch.
    pub fn positions(&self) -> Vec<[usize; 2]> {
        let (block, [rows, columns]) = (self.block.max(1), self.grid);
        let blocks = (0..rows / block).flat_map(|row| (0..columns / block).map(move |column| [row, column]));
        let inside = || (0..block).flat_map(|row| (0..block).map(move |column| [row, column]));
        blocks.flat_map(|[row, column]| inside().map(move |[below, right]| [row * block + below, column * block + right])).collect()
    }

    /// The angle of each pair of elements of each patch, for heads of this width.
    pub fn angles(&self, width: usize) -> Vec<f32> {
        let quarter = width / 4;
        let frequencies: Vec<f32> = (0..quarter).map(|i| self.theta.powf(-(i as f64) / quarter as f64) as f32).collect();
        // transformers computes angles as products of f32 numbers.
        let of_axis = |position: usize| frequencies.iter().map(move |frequency| position as f32 * frequency);
        self.positions().into_iter().flat_map(|at| at.into_iter().flat_map(of_axis)).collect()
    }

    /// Cosines and sines of the angles, `[patches, width / 2]` each.
    pub fn tables(&self, width: usize, device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
        let tables = constant(format!("{self:?} {width}"), device, |device| {
            let angles = self.angles(width);
            let values: Vec<f32> = angles.iter().map(|angle| angle.cos()).chain(angles.iter().map(|angle| angle.sin())).collect();
            Tensor::from_vec(values, (2, self.grid[0] * self.grid[1], width / 2), device)
        })?;
        Ok((tables.get(0)?, tables.get(1)?))
    }

    /// Rotates forwards, or backwards for a negative sign.
    fn rotated(&self, x: &Tensor, sign: f64) -> candle_core::Result<Tensor> {
        let (cos, sin) = self.tables(x.dim(3)?, x.device())?;
        rotate_halves(x, &cos, &(sin * sign)?)
    }
}

impl OpSpec for GridRotary {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        let [rows, columns] = self.grid;
        if self.block == 0 || !rows.is_multiple_of(self.block) || !columns.is_multiple_of(self.block) {
            return Err(format!("{rows} x {columns} patches cannot be divided into blocks with a side of {}", self.block));
        }
        let patches = rows.checked_mul(columns).filter(|patches| *patches <= MAX_PATCHES);
        let patches = patches.ok_or_else(|| format!("{rows} x {columns} patches exceed the maximum of {MAX_PATCHES}"))?;
        if inputs[0].shape[2] != Dim::Fixed(patches) {
            return Err(format!("expected {rows} x {columns} patches, the input has {}", inputs[0].shape[2]));
        }
        match inputs[0].shape[3].fixed() {
            Some(width) if width > 0 && width.is_multiple_of(4) => Ok(inputs[0].clone()),
            _ => Err("the width of heads must be a fixed multiple of 4".into()),
        }
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b h s! d! -> b h s! d!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.rotated(&inputs[0], 1.0)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || self.rotated(backward.gradient, -1.0))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference values: `get_vision_position_ids` of transformers, for 4 x 6 patches in blocks of 2 x 2.
    #[test]
    fn positions_match_the_reference() {
        let op = GridRotary { grid: [4, 6], block: 2, ..GridRotary::default() };
        let rows = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3];
        let columns = [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5];
        assert_eq!(op.positions(), rows.into_iter().zip(columns).map(|(row, column)| [row, column]).collect::<Vec<_>>());
    }

    #[test]
    fn invalid_grids_are_refused() {
        let infer = |op: GridRotary, shape: [usize; 4]| op.infer(&[&TensorType::float(shape)]).map(|ty| ty.to_string());
        let op = GridRotary { grid: [2, 4], block: 2, ..GridRotary::default() };
        assert_eq!(infer(op, [1, 2, 8, 4]).unwrap(), "float[1, 2, 8, 4]");
        assert!(infer(op, [1, 2, 6, 4]).unwrap_err().contains("expected 2 x 4 patches, the input has 6"));
        assert!(infer(op, [1, 2, 8, 6]).unwrap_err().contains("multiple of 4"));
        assert!(infer(GridRotary { block: 0, ..op }, [1, 2, 8, 4]).unwrap_err().contains("a side of 0"));
        assert!(infer(GridRotary { grid: [3, 4], ..op }, [1, 2, 12, 4]).unwrap_err().contains("3 x 4 patches cannot be divided"));
        assert!(infer(GridRotary { grid: [usize::MAX, 2], block: 1, ..op }, [1, 2, 8, 4]).unwrap_err().contains("exceed the maximum"));
    }
}

//! Rounding of matrices to the values that blocks of GGUF files represent.

use rayon::prelude::*;

use crate::ggml::BlockType;

impl BlockType {
    /// Rounds rows of `row` elements to the values of their blocks, with errors weighted by the `importance`
    /// of the columns unless it is empty. The result does not depend on the number of threads.
    ///
    /// # Panics
    /// If `row` is zero or not a multiple of the block size.
    pub fn round_rows(self, values: &mut [f32], row: usize, importance: &[f32]) {
        let bytes = row / self.elements() * self.bytes();
        values.par_chunks_mut(row).for_each_init(
            || vec![0u8; bytes],
            |blocks, values| {
                self.encode_row(values, importance, blocks);
                self.decode(blocks, values);
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows are rounded as by encoding and decoding each of them.
    #[test]
    fn rows_are_rounded_as_they_are_stored() {
        let values: Vec<f32> = (0..3 * 256u16).map(|at| f32::from(at * 37 % 101) / 50.0 - 1.0).collect();
        let importance: Vec<f32> = (0..256u16).map(|at| 1.0 + f32::from(at % 7)).collect();
        for kind in BlockType::ALL {
            let mut rounded = values.clone();
            kind.round_rows(&mut rounded, 256, &importance);
            for (row, rounded) in values.chunks(256).zip(rounded.chunks(256)) {
                let mut blocks = vec![0; 256 / kind.elements() * kind.bytes()];
                kind.encode_row(row, &importance, &mut blocks);
                let mut expected = vec![0f32; 256];
                kind.decode(&blocks, &mut expected);
                assert_eq!(rounded, expected, "{}", kind.name());
            }
        }
    }
}

//! Scales of a rounded weight.

use crate::kernel::grid::QuantizationParams;

/// Scales of the rows of a rounded weight. All rows have the same number of each.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RowScales {
    /// Parameters of the groups of a scheme.
    pub steps: Vec<QuantizationParams>,
    /// Blocks of a GGUF file, with the codes of the weight.
    pub blocks: Vec<u8>,
}

/// Sets the numbers of a row of `rows` to those of a row of `others`.
fn set_row<T: Copy>(numbers: &mut Vec<T>, (row, rows): (usize, usize), from: &[T], (other, others): (usize, usize)) {
    let each = from.len() / others.max(1);
    if let Some(first) = from.first() {
        numbers.resize(rows * each, *first);
        numbers[row * each..][..each].copy_from_slice(&from[other * each..][..each]);
    }
}

impl RowScales {
    /// Sets the scales of a row of `rows` to those of a row of `others`.
    pub fn set_row(&mut self, row: (usize, usize), from: &RowScales, other: (usize, usize)) {
        set_row(&mut self.steps, row, &from.steps, other);
        set_row(&mut self.blocks, row, &from.blocks, other);
    }

    /// Appends the scales of further rows.
    pub fn extend(&mut self, other: RowScales) {
        self.steps.extend(other.steps);
        self.blocks.extend(other.blocks);
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let steps = self.steps.iter().flat_map(|step| [step.scale, step.zero]).flat_map(f32::to_le_bytes);
        steps.chain(self.blocks.iter().copied()).collect()
    }

    /// The scales with these bytes, of the same kind as these ones.
    pub fn with_bytes(&self, bytes: &[u8]) -> RowScales {
        if !self.blocks.is_empty() {
            return RowScales { steps: Vec::new(), blocks: bytes.to_vec() };
        }
        let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        let pairs = bytes.as_chunks::<4>().0.as_chunks::<2>().0;
        RowScales { steps: pairs.iter().map(|[scale, zero]| QuantizationParams { scale: number(scale), zero: number(zero) }).collect(), blocks: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scales(numbers: &[f32]) -> RowScales {
        RowScales { steps: numbers.iter().map(|scale| QuantizationParams { scale: *scale, zero: scale + 1.0 }).collect(), blocks: Vec::new() }
    }

    #[test]
    fn rows_and_bytes_are_those_of_the_same_kind() {
        let blocks = |bytes: &[u8]| RowScales { steps: Vec::new(), blocks: bytes.to_vec() };
        for [first, both, swapped] in [
            [scales(&[1.0, 2.0]), scales(&[1.0, 2.0, 3.0, 4.0]), scales(&[3.0, 4.0, 1.0, 2.0])],
            [blocks(&[1, 2]), blocks(&[1, 2, 3, 4]), blocks(&[3, 4, 1, 2])],
        ] {
            let mut found = RowScales::default();
            found.set_row((1, 2), &both, (0, 2));
            found.set_row((0, 2), &both, (1, 2));
            assert_eq!(found, swapped);
            assert_eq!(first.with_bytes(&both.to_bytes()), both);
            let mut all = first.clone();
            all.extend(first.with_bytes(&both.to_bytes()[first.to_bytes().len()..]));
            assert_eq!(all, both);
        }
    }
}

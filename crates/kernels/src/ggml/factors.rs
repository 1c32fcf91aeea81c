//! The 16-bit factors of blocks. The value of an element is the sum of the factors of its block, each
//! multiplied by a number that depends only on the other bytes of the block.

use half::f16;

use super::BlockType;

fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

fn put_half(block: &mut [u8], at: usize, value: f16) {
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

impl BlockType {
    /// Offsets of the factors in a block: the scale, and the minimum or the scale of minima if the type has
    /// them. Empty for types whose scale is not stored as a binary16 number.
    const fn factor_offsets(self) -> &'static [usize] {
        match self {
            BlockType::Q5_1 | BlockType::Q5_K | BlockType::Q4_1 | BlockType::Q4_K => &[0, 2],
            BlockType::Q2_K => &[80, 82],
            BlockType::Q8_0 | BlockType::Q5_0 | BlockType::Q4_0 | BlockType::IQ4_NL | BlockType::IQ4_XS => &[0],
            BlockType::IQ3_S | BlockType::IQ3_XXS | BlockType::IQ2_S | BlockType::IQ2_XS | BlockType::IQ2_XXS | BlockType::IQ1_S => &[0],
            BlockType::TQ1_0 => &[52],
            BlockType::TQ2_0 => &[64],
            BlockType::Q3_K => &[108],
            BlockType::Q6_K => &[208],
            BlockType::MXFP4 | BlockType::IQ1_M => &[],
        }
    }

    /// Number of factors per block; zero for types whose scale is not a binary16 number.
    pub fn factors_per_block(self) -> usize {
        self.factor_offsets().len()
    }

    /// The factors of all blocks, block by block.
    pub fn factors(self, blocks: &[u8]) -> impl Iterator<Item = f32> {
        let offsets = self.factor_offsets();
        blocks.chunks_exact(self.bytes()).flat_map(move |block| offsets.iter().map(move |at| half_at(block, *at).to_f32()))
    }

    /// Replaces the factors of all blocks, rounded to binary16.
    pub fn put_factors(self, factors: impl IntoIterator<Item = f32>, blocks: &mut [u8]) {
        let mut factors = factors.into_iter();
        for block in blocks.chunks_exact_mut(self.bytes()) {
            self.factor_offsets().iter().zip(&mut factors).for_each(|(at, factor)| put_half(block, *at, f16::from_f32(factor)));
        }
    }

    /// The derivatives of a function with respect to the factors of all blocks, from its `gradients` with
    /// respect to the elements. They do not depend on the factors.
    pub fn factor_gradients(self, blocks: &[u8], gradients: &[f32], sums: &mut [f32]) {
        let offsets = self.factor_offsets();
        let (mut probe, mut values) = (blocks.to_vec(), vec![0f32; gradients.len()]);
        for (index, of_factor) in offsets.iter().enumerate() {
            for block in probe.chunks_exact_mut(self.bytes()) {
                offsets.iter().for_each(|at| put_half(block, *at, if at == of_factor { f16::ONE } else { f16::ZERO }));
            }
            self.decode(&probe, &mut values);
            let products = values.chunks_exact(self.elements()).zip(gradients.chunks_exact(self.elements()));
            for (sum, (values, gradients)) in sums.iter_mut().skip(index).step_by(offsets.len()).zip(products) {
                *sum = values.iter().zip(gradients).map(|(value, gradient)| f64::from(*value) * f64::from(*gradient)).sum::<f64>() as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random blocks of a type, with factors of both signs.
    fn random_blocks(kind: BlockType, count: usize) -> Vec<u8> {
        let mut state = u64::from(kind.id()) + 17;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let values: Vec<f32> = (0..count * kind.elements()).map(|_| random() + 0.2).collect();
        let mut blocks = vec![0; count * kind.bytes()];
        kind.encode_row(&values, &vec![1.0; values.len()], &mut blocks);
        let factors: Vec<f32> = (0..count * kind.factors_per_block()).map(|_| random()).collect();
        kind.put_factors(factors, &mut blocks);
        blocks
    }

    fn decoded(kind: BlockType, blocks: &[u8]) -> Vec<f32> {
        let mut values = vec![0f32; blocks.len() / kind.bytes() * kind.elements()];
        kind.decode(blocks, &mut values);
        values
    }

    /// Only bytes of the factors change, and the factors are read back, rounded to binary16.
    #[test]
    fn factors_are_replaced_without_other_bytes() {
        let mut count = 0;
        for kind in BlockType::ALL.into_iter().filter(|kind| kind.factors_per_block() > 0) {
            let blocks = random_blocks(kind, 5);
            let mut same = blocks.clone();
            kind.put_factors(kind.factors(&blocks).collect::<Vec<_>>(), &mut same);
            assert_eq!(same, blocks, "{}", kind.name());
            let factors: Vec<f32> = kind.factors(&blocks).map(|factor| factor * 1.37).collect();
            kind.put_factors(factors.iter().copied(), &mut same);
            assert!(kind.factors(&same).eq(factors.iter().map(|factor| f16::from_f32(*factor).to_f32())), "{}", kind.name());
            for (before, after) in blocks.chunks(kind.bytes()).zip(same.chunks(kind.bytes())) {
                let changed = (0..kind.bytes()).filter(|at| before[*at] != after[*at]);
                let is_factor = |at: usize| kind.factor_offsets().iter().any(|first| (*first..first + 2).contains(&at));
                assert!(changed.clone().all(is_factor) && changed.count() > 0, "{}", kind.name());
            }
            count += 1;
        }
        assert_eq!(count, BlockType::ALL.len() - 2);
    }

    /// Values are linear in the factors, so that differences of a weighted sum of the values equal the
    /// derivatives, up to the rounding of float32.
    #[test]
    fn gradients_are_differences() {
        for kind in BlockType::ALL.into_iter().filter(|kind| kind.factors_per_block() > 0) {
            let blocks = random_blocks(kind, 3);
            let gradients: Vec<f32> = (0..3 * kind.elements()).map(|at| ((at * at * 7 + at) % 23) as f32 / 23.0 - 0.4).collect();
            let mut found = vec![f32::NAN; 3 * kind.factors_per_block()];
            kind.factor_gradients(&blocks, &gradients, &mut found);
            for (index, found) in found.iter().enumerate() {
                let sum_at = |step: f32| -> f64 {
                    let mut factors: Vec<f32> = kind.factors(&blocks).collect();
                    factors[index] = step;
                    let mut moved = blocks.clone();
                    kind.put_factors(factors, &mut moved);
                    decoded(kind, &moved).iter().zip(&gradients).map(|(value, gradient)| f64::from(*value) * f64::from(*gradient)).sum()
                };
                let difference = (sum_at(0.75) - sum_at(-0.25)) as f32;
                let largest = gradients.len() as f32 * decoded(kind, &blocks).iter().fold(0f32, |most, value| most.max(value.abs()));
                assert!((found - difference).abs() <= 1e-6 * (difference.abs() + largest), "{} {index}: {found} and {difference}", kind.name());
            }
            assert!(found.iter().any(|sum| *sum != 0.0), "{}", kind.name());
        }
    }
}

//! Quantized blocks of GGUF files: codes of a few bits, with scales for 32 or 256 elements.
//!
//! Layouts and arithmetic follow `ggml-common.h` and `ggml-quants.c` of llama.cpp. The order of
//! operations yields the same bits as its source code when every operation is rounded once. The fields
//! called `d`, `m` etc. there are binary16 scales.

mod decode;
mod encode;
mod search;

/// Block types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
}

/// Number of elements in blocks of the K types and of IQ4_XS.
pub const LARGE: usize = 256;
/// Number of elements in blocks of the other types.
pub const SMALL: usize = 32;

impl BlockType {
    /// All block types.
    pub const ALL: [BlockType; 12] = {
        use BlockType::{Iq4Nl, Iq4Xs, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Iq4Xs]
    };

    /// Id in files, name, elements per block and bytes per block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            BlockType::Q4_0 => (2, "Q4_0", SMALL, 18),
            BlockType::Q4_1 => (3, "Q4_1", SMALL, 20),
            BlockType::Q5_0 => (6, "Q5_0", SMALL, 22),
            BlockType::Q5_1 => (7, "Q5_1", SMALL, 24),
            BlockType::Q8_0 => (8, "Q8_0", SMALL, 34),
            BlockType::Q2K => (10, "Q2_K", LARGE, 84),
            BlockType::Q3K => (11, "Q3_K", LARGE, 110),
            BlockType::Q4K => (12, "Q4_K", LARGE, 144),
            BlockType::Q5K => (13, "Q5_K", LARGE, 176),
            BlockType::Q6K => (14, "Q6_K", LARGE, 210),
            BlockType::Iq4Nl => (20, "IQ4_NL", SMALL, 18),
            BlockType::Iq4Xs => (23, "IQ4_XS", LARGE, 136),
        }
    }

    /// The type with an id.
    pub fn from_id(id: u32) -> Option<BlockType> {
        Self::ALL.into_iter().find(|kind| kind.id() == id)
    }

    /// Id of the type in files.
    pub fn id(self) -> u32 {
        self.facts().0
    }

    /// Name of the type.
    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// Elements per block.
    pub fn elements(self) -> usize {
        self.facts().2
    }

    /// Bytes per block.
    pub fn bytes(self) -> usize {
        self.facts().3
    }

    /// Dequantizes complete blocks.
    pub fn decode(self, blocks: &[u8], values: &mut [f32]) {
        match self {
            BlockType::Q4_0 => decode::q4_0(blocks, values),
            BlockType::Q4_1 => decode::q4_1(blocks, values),
            BlockType::Q5_0 => decode::q5_0(blocks, values),
            BlockType::Q5_1 => decode::q5_1(blocks, values),
            BlockType::Q8_0 => decode::q8_0(blocks, values),
            BlockType::Q2K => decode::q2_k(blocks, values),
            BlockType::Q3K => decode::q3_k(blocks, values),
            BlockType::Q4K => decode::q4_k(blocks, values),
            BlockType::Q5K => decode::q5_k(blocks, values),
            BlockType::Q6K => decode::q6_k(blocks, values),
            BlockType::Iq4Nl => decode::iq4_nl(blocks, values),
            BlockType::Iq4Xs => decode::iq4_xs(blocks, values),
        }
    }

    /// Quantizes values to blocks like the reference implementation.
    pub fn encode(self, values: &[f32], blocks: &mut [u8]) {
        self.encode_row(values, &[], blocks);
    }

    /// Quantizes a row to blocks, with errors weighted by the `importance` of the columns. If it is
    /// empty, all columns have the same weight. Q8_0 ignores the importance.
    pub fn encode_row(self, values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        match self {
            BlockType::Q4_0 => encode::q4_0(values, importance, blocks),
            BlockType::Q4_1 => encode::q4_1(values, importance, blocks),
            BlockType::Q5_0 => encode::q5_0(values, importance, blocks),
            BlockType::Q5_1 => encode::q5_1(values, importance, blocks),
            BlockType::Q8_0 => encode::q8_0(values, blocks),
            BlockType::Q2K => encode::q2_k(values, importance, blocks),
            BlockType::Q3K => encode::q3_k(values, importance, blocks),
            BlockType::Q4K => encode::q4_k(values, importance, blocks),
            BlockType::Q5K => encode::q5_k(values, importance, blocks),
            BlockType::Q6K => encode::q6_k(values, importance, blocks),
            BlockType::Iq4Nl => encode::iq4_nl(values, importance, blocks),
            BlockType::Iq4Xs => encode::iq4_xs(values, importance, blocks),
        }
    }

    /// Whether the importance of columns affects the blocks.
    pub fn uses_importance(self) -> bool {
        self != BlockType::Q8_0
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
    }

    fn encoded(kind: BlockType, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut blocks = vec![0; values.len() / kind.elements() * kind.bytes()];
        kind.encode(values, &mut blocks);
        let mut back = vec![0f32; values.len()];
        kind.decode(&blocks, &mut back);
        (blocks, back)
    }

    #[test]
    fn blocks_match_the_reference() {
        let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/gguf/quantized.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&file).unwrap();
        let values = floats(golden.tensor("values").unwrap().data());
        let importance = floats(golden.tensor("importance").unwrap().data());
        let same = |kind: BlockType, ours: &[u8], name: &str| {
            let expected = golden.tensor(name).unwrap().data().to_vec();
            for (index, (ours, theirs)) in ours.chunks(kind.bytes()).zip(expected.chunks(kind.bytes())).enumerate() {
                assert_eq!(ours, theirs, "{name} block {index}");
            }
        };
        for kind in BlockType::ALL {
            same(kind, &encoded(kind, &values).0, kind.name());
            same(kind, &encoded_by(kind, &values, &importance).0, &format!("{} by importance", kind.name()));
        }
    }

    /// Rows of the length in the golden file, with an importance for each column.
    fn encoded_by(kind: BlockType, values: &[f32], importance: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut blocks = vec![0; values.len() / kind.elements() * kind.bytes()];
        let rows = values.chunks(importance.len()).zip(blocks.chunks_mut(importance.len() / kind.elements() * kind.bytes()));
        rows.for_each(|(row, blocks)| kind.encode_row(row, importance, blocks));
        let mut back = vec![0f32; values.len()];
        kind.decode(&blocks, &mut back);
        (blocks, back)
    }

    /// Importance reduces the weighted error over many blocks; without importance, blocks are unchanged.
    #[test]
    fn importance_reduces_the_weighted_error() {
        let mut state = 3u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let values: Vec<f32> = (0..16 * 512).map(|_| (0..6).map(|_| random()).sum::<f32>() * 0.02).collect();
        // A few columns with a hundred times the power of the others, as in activations.
        let importance: Vec<f32> = (0..512).map(|_| (1.5 + random()) * if random() > 0.45 { 100.0 } else { 1.0 }).collect();
        let cost = |back: &[f32]| {
            let error = |(at, (a, b)): (usize, (&f32, &f32))| f64::from(importance[at % 512]) * f64::from(a - b).powi(2);
            back.iter().zip(&values).enumerate().map(error).sum::<f64>()
        };
        for kind in BlockType::ALL {
            let (plain, weighted) = (encoded(kind, &values), encoded_by(kind, &values, &importance));
            if kind.uses_importance() {
                assert!(cost(&weighted.1) < 0.97 * cost(&plain.1), "{}: {} and {}", kind.name(), cost(&weighted.1), cost(&plain.1));
            } else {
                assert_eq!(weighted.0, plain.0, "{}", kind.name());
            }
        }
    }

    #[test]
    fn six_bit_scales_are_unpacked() {
        let bytes = [0x81, 0x82, 0x83, 0xC4, 0x80, 0x81, 0xC2, 0xC3, 0x01, 0x12, 0xE3, 0xFF];
        let found: Vec<_> = (0..8).map(|j| decode::scale_and_minimum(&bytes, j)).collect();
        assert_eq!(found, [(1, 0), (2, 1), (3, 2), (4, 3), (33, 32), (34, 33), (35, 62), (63, 63)]);
    }

    #[test]
    fn signed_scales_are_unpacked() {
        let bytes = [0x01, 0x12, 0x23, 0x34, 0x45, 0x56, 0x67, 0xF8, 0xE4, 0x1B, 0x00, 0xFF];
        let found: Vec<_> = (0..16).map(|j| decode::signed_scale(&bytes, j)).collect();
        assert_eq!(found, [-31, 18, -29, 20, -11, 6, -25, 24, 0, -15, -30, 19, 20, -27, -26, 31]);
    }

    /// Blocks that are searched together do not affect each other.
    #[test]
    fn blocks_of_a_row_are_independent() {
        let values: Vec<f32> = (0..19 * 256).map(|i| ((i * i % 1013) as f32 - 400.0) * 1e-3 * (1 + i / 256 % 7) as f32).collect();
        let importance: Vec<f32> = (0..values.len()).map(|i| (1 + i * i % 89) as f32).collect();
        for kind in BlockType::ALL.into_iter().filter(|kind| kind.elements() == LARGE || *kind == BlockType::Iq4Nl) {
            let (elements, bytes) = (kind.elements(), kind.bytes());
            for importance in [&importance[..], &[]] {
                let mut blocks = vec![0xFF; values.len() / elements * bytes];
                kind.encode_row(&values, importance, &mut blocks);
                for (index, expected) in blocks.chunks(bytes).enumerate() {
                    let part = index * elements..(index + 1) * elements;
                    let mut block = vec![0; bytes];
                    kind.encode_row(&values[part.clone()], importance.get(part).unwrap_or_default(), &mut block);
                    assert_eq!(block, expected, "{} block {index}", kind.name());
                }
            }
        }
    }

    /// The minimum of values that are not negative is the first zero, and that of large blocks is +0.
    #[test]
    fn signs_of_zeros_match_the_reference() {
        let mut values: Vec<f32> = (0..256).map(|i| (i % 13) as f32 * 0.25).collect();
        for (zeros, expected) in [([0.0, -0.0], [0, 0]), ([-0.0, 0.0], [0, 0x80])] {
            values.iter_mut().enumerate().filter(|(_, value)| **value == 0.0).for_each(|(i, value)| *value = zeros[i % 2]);
            values[..2].copy_from_slice(&zeros);
            for kind in [BlockType::Q4_1, BlockType::Q5_1] {
                assert_eq!(encoded(kind, &values).0[2..4], expected, "{}", kind.name());
            }
        }
        for (kind, at) in [(BlockType::Q2K, 82), (BlockType::Q4K, 2), (BlockType::Q5K, 2)] {
            assert_eq!(encoded(kind, &[0.125; 256]).0[at..at + 2], [0, 0], "{}", kind.name());
        }
    }

    /// Representable values are exact, and the error of others decreases with more bits.
    #[test]
    fn large_blocks_represent_values_as_expected() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let values: Vec<f32> = (0..1024).map(|_| (0..6).map(|_| random()).sum::<f32>() * 0.02).collect();
        let error = |kind| encoded(kind, &values).1.iter().zip(&values).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let power = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        let decibels = |kinds: &[BlockType]| kinds.iter().map(|kind| 10.0 * (power / error(*kind)).log10()).collect::<Vec<_>>();
        use BlockType::{Iq4Nl, Iq4Xs, Q2K, Q3K, Q4_0, Q4K, Q5K, Q6K, Q8_0};
        let linear = decibels(&[Q2K, Q3K, Q4_0, Q4K, Q5K, Q6K, Q8_0]);
        let above = linear.iter().zip([8.0, 14.0, 19.0, 21.0, 27.0, 33.0, 38.0]).all(|(found, least)| *found > least);
        assert!(linear.is_sorted() && above, "{linear:?}");
        let uneven = decibels(&[Q4_0, Iq4Xs, Iq4Nl, Q5K]);
        assert!(uneven.is_sorted(), "{uneven:?}");
        for kind in [Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Iq4Xs] {
            assert!(encoded(kind, &[0.0; 512]).1.iter().all(|value| *value == 0.0), "{}", kind.name());
        }
        // Steps of one scale from the lowest to the highest code, in every part of sixteen elements.
        let steps: Vec<f32> = (0..256).map(|element| ((element % 16) as f32 * 63.0 / 15.0).floor() / 64.0 - 0.5).collect();
        assert_eq!(encoded(Q6K, &steps).1, steps);
        let nibbles: Vec<f32> = (0..256).map(|element| (element % 16) as f32 * 0.25).collect();
        let (_, back) = encoded(Q4K, &nibbles);
        assert!(back.iter().zip(&nibbles).all(|(a, b)| (a - b).abs() < 2e-3), "{back:?}");
        let eighths: Vec<f32> = (0..256).map(|element| (element % 8) as f32 * 0.25 - 1.0).collect();
        assert_eq!(encoded(Q3K, &eighths).1, eighths);
        let quarters: Vec<f32> = (0..256).map(|element| (element % 4) as f32 * 0.5).collect();
        let (_, back) = encoded(Q2K, &quarters);
        assert!(back.iter().zip(&quarters).all(|(a, b)| (a - b).abs() < 2e-3), "{back:?}");
        let levels: Vec<f32> = (0..256).map(|element| decode::LEVELS[element % 16] / 64.0).collect();
        for kind in [Iq4Nl, Iq4Xs] {
            assert_eq!(encoded(kind, &levels).1, levels, "{}", kind.name());
        }
    }
}

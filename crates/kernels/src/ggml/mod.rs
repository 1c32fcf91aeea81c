//! Quantized blocks of GGUF files: codes of a few bits, with scales for 32 or 256 elements.
//!
//! Layouts and arithmetic follow `ggml-common.h` and `ggml-quants.c` of llama.cpp. The order of
//! operations yields the same bits as its source code when every operation is rounded once. The fields
//! called `d`, `m` etc. there are binary16 scales.

mod codes;
mod decode;
mod encode;
mod factors;
mod grids;
mod search;

mod table;

use codes::PutCodes;

use crate::grid::{IntegerGrid, Levels, QuantizationParams};

/// Number of elements in large blocks.
pub const LARGE: usize = 256;
/// Number of elements in small blocks.
pub const SMALL: usize = 32;

/// Use of the importance of columns by a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportanceUse {
    /// It has no effect, because scales are not searched.
    Unused,
    /// It weights the errors.
    Optional,
    /// Errors are not weighted sensibly without it.
    Required,
}

/// Defines [`BlockType`] from the table.
macro_rules! define {
    ($($name:ident $codec:ident $id:literal $elements:ident $bytes:literal $importance:ident $description:literal;)+) => {
        /// Block types, by their names in llama.cpp.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)]
        pub enum BlockType {
            $(#[doc = $description] $name,)+
        }

        impl BlockType {
            /// All block types, the largest first.
            pub const ALL: [BlockType; [$($id),+].len()] = [$(BlockType::$name),+];

            /// Id in files, name, elements per block, bytes per block, and the use of importance.
            const fn facts(self) -> (u32, &'static str, usize, usize, ImportanceUse) {
                match self {
                    $(BlockType::$name => ($id, stringify!($name), $elements, $bytes, ImportanceUse::$importance),)+
                }
            }

            /// Dequantizes complete blocks.
            pub fn decode(self, blocks: &[u8], values: &mut [f32]) {
                match self {
                    $(BlockType::$name => decode::$codec(blocks, values),)+
                }
            }

            /// Quantizes a row to blocks, with errors weighted by the `importance` of the columns. If it is
            /// empty, all columns have the same weight.
            pub fn encode_row(self, values: &[f32], importance: &[f32], blocks: &mut [u8]) {
                match self {
                    $(BlockType::$name => encode::$codec(values, importance, blocks),)+
                }
            }
        }
    };
}

crate::block_types!(define);

impl BlockType {
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

    /// Use of the importance of columns.
    pub fn importance(self) -> ImportanceUse {
        self.facts().4
    }

    /// Quantizes values to blocks like the reference implementation.
    pub fn encode(self, values: &[f32], blocks: &mut [u8]) {
        self.encode_row(values, &[], blocks);
    }

    /// The levels of the codes, the number of elements that share a scale, and the function that writes the
    /// codes of a block, for types in which each element has a code of its own. Integers that are not
    /// symmetric have a minimum instead of a zero point.
    fn codec(self) -> Option<(Levels, usize, PutCodes)> {
        let integers = |bits, symmetric, group, put: PutCodes| Some((Levels::Integers(IntegerGrid { bits, symmetric }), group, put));
        match self {
            BlockType::Q8_0 => integers(8, true, SMALL, codes::q8_0),
            BlockType::Q6_K => integers(6, true, 16, codes::q6_k),
            BlockType::Q5_1 => integers(5, false, SMALL, codes::q5_1),
            BlockType::Q5_0 => integers(5, true, SMALL, codes::q5_0),
            BlockType::Q5_K => integers(5, false, 32, codes::q5_k),
            BlockType::Q4_1 => integers(4, false, SMALL, codes::q4_1),
            BlockType::Q4_0 => integers(4, true, SMALL, codes::q4_0),
            BlockType::Q4_K => integers(4, false, 32, codes::q4_k),
            BlockType::IQ4_NL => Some((Levels::Uneven, SMALL, codes::q4_0)),
            BlockType::IQ4_XS => Some((Levels::Uneven, 32, codes::iq4_xs)),
            BlockType::Q3_K => integers(3, true, 16, codes::q3_k),
            BlockType::Q2_K => integers(2, false, 16, codes::q2_k),
            _ => None,
        }
    }

    /// The levels of the codes, and the number of consecutive elements that share a scale; `None` for types
    /// whose codes are not those of single elements.
    pub fn levels(self) -> Option<(Levels, usize)> {
        self.codec().map(|(levels, group, _)| (levels, group))
    }

    /// The scales and zero points of all groups of blocks of a type with [levels](Self::levels). Zero points
    /// of types with minima are not integers. A scale of zero is replaced by the smallest one that is used,
    /// so that all levels are approximately equal.
    pub fn params(self, blocks: &[u8]) -> Vec<QuantizationParams> {
        const SMALLEST: f32 = 1e-30;
        let Some((levels, group, put)) = self.codec() else { return Vec::new() };
        let ((lowest, highest), plain) = (levels.bounds(), QuantizationParams { scale: 1.0, zero: 0.0 });
        let mut probe = blocks.to_vec();
        let [low, high] = [lowest, highest].map(|code| {
            let codes = [(code - lowest) as u8; LARGE];
            probe.chunks_exact_mut(self.bytes()).for_each(|block| put(&codes, block));
            let mut values = vec![0f32; blocks.len() / self.bytes() * self.elements()];
            self.decode(&probe, &mut values);
            values
        });
        let steps = levels.level_at(highest, plain) - levels.level_at(lowest, plain);
        let params = |(low, high): (&f32, &f32)| {
            let scale = (high - low) / steps;
            let scale = if scale == 0.0 { SMALLEST } else { scale };
            let has_minimum = matches!(levels, Levels::Integers(integers) if !integers.symmetric);
            QuantizationParams { scale, zero: if has_minimum { lowest - low / scale } else { 0.0 } }
        };
        low.iter().step_by(group).zip(high.iter().step_by(group)).map(params).collect()
    }

    /// Replaces the codes of blocks of a type with [levels](Self::levels), and keeps the scales.
    pub fn put_codes(self, codes: &[i8], blocks: &mut [u8]) {
        let Some((levels, _, put)) = self.codec() else { return };
        let (lowest, _) = levels.bounds();
        let mut above = [0u8; LARGE];
        for (codes, block) in codes.chunks_exact(self.elements()).zip(blocks.chunks_exact_mut(self.bytes())) {
            above.iter_mut().zip(codes).for_each(|(above, code)| *above = (i16::from(*code) - lowest as i16) as u8);
            put(&above, block);
        }
    }

    /// The integers of blocks with one scale; `None` for other types. Those that are not symmetric have a
    /// minimum instead of a zero point.
    pub fn integers(self) -> Option<IntegerGrid> {
        self.integer_codec().map(|(integers, _)| integers)
    }

    fn integer_codec(self) -> Option<(IntegerGrid, PutCodes)> {
        match self.codec() {
            Some((Levels::Integers(integers), _, put)) if self.elements() == SMALL => Some((integers, put)),
            _ => None,
        }
    }

    /// Writes values of a grid of [such integers](Self::integers) to blocks with the same integers. `params`
    /// are those of each block; the scale is rounded to binary16. Blocks whose scale it cannot represent, and
    /// other types, are [quantized](Self::encode).
    pub fn encode_on_grid(self, values: &[f32], params: &[QuantizationParams], blocks: &mut [u8]) {
        let parts = values.chunks(self.elements()).zip(blocks.chunks_mut(self.bytes())).zip(params);
        for ((values, block), params) in parts {
            let grid = self.integer_codec().zip(<&[f32; SMALL]>::try_from(values).ok());
            if !grid.is_some_and(|(codec, values)| encode::on_grid(codec, values, *params, block)) {
                self.encode(values, block);
            }
        }
    }

    /// Whether the importance of columns affects the blocks.
    pub fn uses_importance(self) -> bool {
        self.importance() != ImportanceUse::Unused
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
            if golden.tensor(kind.name()).is_ok() {
                same(kind, &encoded(kind, &values).0, kind.name());
            }
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
        for kind in BlockType::ALL.into_iter().filter(|kind| kind.elements() == LARGE || *kind == BlockType::IQ4_NL) {
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

    /// Values of a grid have the same integers in blocks, whatever their largest magnitude is.
    #[test]
    fn integers_of_a_grid_are_kept() {
        for kind in BlockType::ALL {
            let Some(integers) = kind.integers() else { continue };
            let (lowest, highest) = integers.bounds();
            for (scale, zero) in [(0.25f32, 0.0), (0.375, -2.0), (3e-3, 1.0)] {
                let zero = if integers.symmetric { 0.0 } else { zero };
                let code = |i: usize| (lowest + (i * i % 13) as f32).min(highest);
                let values: Vec<f32> = (0..64).map(|i| (code(i) - zero) * scale).collect();
                let mut blocks = vec![0; 2 * kind.bytes()];
                kind.encode_on_grid(&values, &[QuantizationParams { scale, zero }; 2], &mut blocks);
                let mut back = vec![0f32; 64];
                kind.decode(&blocks, &mut back);
                let stored = half::f16::from_f32(scale).to_f32();
                let far = back.iter().enumerate().map(|(i, value)| (value - (code(i) - zero) * stored).abs()).fold(0.0, f32::max);
                // Minima are rounded to binary16, with 11 bits.
                let rounding = if integers.symmetric { 0.0 } else { (lowest - zero).abs() * scale / 2048.0 };
                assert!(far <= rounding * 1.001, "{} {scale} {zero}: {far} above {rounding}", kind.name());
            }
            // A scale that underflows binary16.
            let values: Vec<f32> = (0..32).map(|i| (i % 3) as f32 * 1e-9).collect();
            let [mut blocks, mut plain] = [(); 2].map(|()| vec![0; kind.bytes()]);
            kind.encode_on_grid(&values, &[QuantizationParams { scale: 1e-9, zero: 0.0 }], &mut blocks);
            kind.encode(&values, &mut plain);
            assert_eq!(blocks, plain, "{}", kind.name());
        }
    }

    /// Codes are replaced without changing scales: nearest levels have the expected values and the least
    /// error, and the codes of dequantized values are those of their blocks.
    #[test]
    fn codes_are_replaced_for_fixed_scales() {
        let mut state = 11u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let mut values: Vec<f32> = (0..8 * 256).map(|_| (0..4).map(|_| random()).sum::<f32>() * 0.05 + 0.01).collect();
        // Groups with a scale of zero, with and without a minimum.
        values[256..288].fill(0.0);
        values[512..768].fill(-0.25);
        let importance: Vec<f32> = (0..values.len()).map(|_| 0.6 + random()).collect();
        let mut count = 0;
        for kind in BlockType::ALL {
            let Some((levels, group)) = kind.levels() else { continue };
            count += 1;
            let mut blocks = vec![0; values.len() / kind.elements() * kind.bytes()];
            kind.encode_row(&values, &importance, &mut blocks);
            let params = kind.params(&blocks);
            assert_eq!(params.len(), values.len() / group, "{}", kind.name());
            let mut back = vec![0f32; values.len()];
            kind.decode(&blocks, &mut back);
            let error = |found: &[f32]| found.iter().zip(&values).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            let encoded_error = error(&back);
            let codes: Vec<i8> = values.iter().enumerate().map(|(at, value)| levels.code(*value, params[at / group])).collect();
            let mut nearest = blocks.clone();
            kind.put_codes(&codes, &mut nearest);
            kind.decode(&nearest, &mut back);
            assert!(error(&back) <= encoded_error * (1.0 + 1e-6), "{}: {} and {encoded_error}", kind.name(), error(&back));
            for (at, found) in back.iter().enumerate() {
                let params = params[at / group];
                let assumed = levels.nearest(values[at], params);
                let rounding = 1e-5 * (params.scale.abs() + values[at].abs()) + 1e-20;
                assert!((assumed - found).abs() <= rounding, "{} {at}: {assumed} and {found}", kind.name());
            }
            assert_eq!(kind.params(&nearest), params, "{}", kind.name());
            // Codes of a scale of zero are arbitrary.
            let is_scaled = |at: usize| params[at / group].scale.abs() > 1e-20;
            let again = back.iter().zip(&codes).enumerate().filter(|(at, _)| is_scaled(*at));
            again.for_each(|(at, (value, code))| assert_eq!(levels.code(*value, params[at / group]), *code, "{} {at}", kind.name()));
        }
        assert_eq!(count, 12);
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
        for (kind, at) in [(BlockType::Q2_K, 82), (BlockType::Q4_K, 2), (BlockType::Q5_K, 2)] {
            assert_eq!(encoded(kind, &[0.125; 256]).0[at..at + 2], [0, 0], "{}", kind.name());
        }
    }

    /// Scales of denormal values are zero in binary16, so the codes have no effect. They are those of
    /// llama-quantize on x86-64: the reciprocals of denormal steps are infinite.
    #[test]
    fn denormal_values_have_the_codes_of_the_reference() {
        use BlockType::{Q2_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
        let values = |scale: f32| (0..256).map(|i| if i % 7 == 0 { 0.0 } else { ((i * i % 31) as f32 - 9.0) * scale }).collect::<Vec<f32>>();
        for kind in [Q2_K, Q4_K, Q5_K, Q6_K, Q8_0] {
            assert_eq!(encoded(kind, &values(1e-42)).0, vec![0; kind.bytes() * LARGE / kind.elements()], "{}", kind.name());
        }
        for (kind, middle) in [(Q4_0, 0x88), (Q5_0, 0)] {
            for (scale, code) in [(1e-42, 0), (0.0, middle)] {
                let (blocks, _) = encoded(kind, &values(scale));
                for block in blocks.chunks(kind.bytes()) {
                    let codes = &block[kind.bytes() - 16..];
                    assert!(block[0] == 0 && block[1] & 0x7F == 0 && codes.iter().all(|byte| *byte == code), "{} {scale}: {block:?}", kind.name());
                }
            }
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
        use BlockType::{IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
        let linear = decibels(&[Q2_K, Q3_K, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0]);
        let above = linear.iter().zip([8.0, 14.0, 19.0, 21.0, 27.0, 33.0, 38.0]).all(|(found, least)| *found > least);
        assert!(linear.is_sorted() && above, "{linear:?}");
        let uneven = decibels(&[Q4_0, IQ4_XS, IQ4_NL, Q5_K]);
        assert!(uneven.is_sorted(), "{uneven:?}");
        for kind in [Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS] {
            assert!(encoded(kind, &[0.0; 512]).1.iter().all(|value| *value == 0.0), "{}", kind.name());
        }
        // Steps of one scale from the lowest to the highest code, in every part of sixteen elements.
        let steps: Vec<f32> = (0..256).map(|element| ((element % 16) as f32 * 63.0 / 15.0).floor() / 64.0 - 0.5).collect();
        assert_eq!(encoded(Q6_K, &steps).1, steps);
        let nibbles: Vec<f32> = (0..256).map(|element| (element % 16) as f32 * 0.25).collect();
        let (_, back) = encoded(Q4_K, &nibbles);
        assert!(back.iter().zip(&nibbles).all(|(a, b)| (a - b).abs() < 2e-3), "{back:?}");
        let eighths: Vec<f32> = (0..256).map(|element| (element % 8) as f32 * 0.25 - 1.0).collect();
        assert_eq!(encoded(Q3_K, &eighths).1, eighths);
        let quarters: Vec<f32> = (0..256).map(|element| (element % 4) as f32 * 0.5).collect();
        let (_, back) = encoded(Q2_K, &quarters);
        assert!(back.iter().zip(&quarters).all(|(a, b)| (a - b).abs() < 2e-3), "{back:?}");
        let levels: Vec<f32> = (0..256).map(|element| crate::grid::UNEVEN_LEVELS[element % 16] / 64.0).collect();
        for kind in [IQ4_NL, IQ4_XS] {
            assert_eq!(encoded(kind, &levels).1, levels, "{}", kind.name());
        }
    }
}

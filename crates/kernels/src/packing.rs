//! Packing of integers of a few bits into 32-bit words, in the format of compressed-tensors: codes with
//! the offset 2^(bits − 1), element `i` at bit `i · bits`, lowest bits first. Unpacked elements are int8
//! (two's complement bytes).

/// Number of words for `count` elements.
pub fn words(count: usize, bits: u8) -> usize {
    let bits = usize::from(bits);
    (count / 32 * bits).saturating_add((count % 32 * bits).div_ceil(32))
}

/// The smallest and largest integer of a bit width.
pub fn range(bits: u8) -> [i8; 2] {
    let half = 1i16 << (bits.clamp(1, 8) - 1);
    [(-half) as i8, (half - 1) as i8]
}

/// Whether every int8 fits the bit width.
pub fn fits(values: &[u8], bits: u8) -> bool {
    let [least, most] = range(bits);
    bits >= 8 || values.iter().all(|&v| (least..=most).contains(&(v as i8)))
}

/// Packs four-bit codes two per byte, the first in the low half.
pub fn to_halves(codes: &[u8], output: &mut Vec<u8>) {
    let (pairs, last) = codes.as_chunks::<2>();
    output.extend(pairs.iter().map(|[low, high]| low & 15 | high << 4));
    output.extend(last.iter().map(|code| code & 15));
}

simd! {
    /// Two elements per byte. With an odd number of elements, the high half of the last byte is zero.
    fn nibbles(values: &[u8], output: &mut [u8]) {
        let (pairs, last) = values.as_chunks::<2>();
        for (&[low, high], out) in pairs.iter().zip(&mut *output) {
            *out = (low ^ 8) & 15 | (high ^ 8) << 4;
        }
        if let ([value], Some(out)) = (last, output.get_mut(pairs.len())) {
            *out = (value ^ 8) & 15;
        }
    }
}

simd! {
    fn from_nibbles(input: &[u8], output: &mut [u8]) {
        let (pairs, last) = output.as_chunks_mut::<2>();
        let count = pairs.len();
        for (out, &byte) in pairs.iter_mut().zip(input) {
            *out = [(byte & 15).wrapping_sub(8), (byte >> 4).wrapping_sub(8)];
        }
        if let ([out], Some(byte)) = (last, input.get(count)) {
            *out = (byte & 15).wrapping_sub(8);
        }
    }
}

/// Appends the packed words of `values`, the last one padded with zero bits. Elements must [fit](fits).
pub fn pack(values: &[u8], bits: u8, output: &mut Vec<u8>) {
    let start = output.len();
    output.resize(start + 4 * words(values.len(), bits), 0);
    let out = &mut output[start..];
    match bits {
        8 => out.iter_mut().zip(values).for_each(|(out, value)| *out = value ^ 0x80),
        4 => nibbles(values, out),
        _ => {
            let (half, mask) = (1u8 << (bits - 1), (1u32 << bits) - 1);
            let (mut pending, mut filled, mut out) = (0u32, 0, out.iter_mut());
            let mut emit = |byte: u32| out.next().into_iter().for_each(|out| *out = byte as u8);
            for value in values {
                pending |= (u32::from(value.wrapping_add(half)) & mask) << filled;
                filled += bits;
                while filled >= 8 {
                    emit(pending);
                    (pending, filled) = (pending >> 8, filled - 8);
                }
            }
            emit(pending);
        }
    }
}

/// Unpacks as many elements as fit into `output`.
pub fn unpack(input: &[u8], bits: u8, output: &mut [u8]) {
    match bits {
        8 => output.iter_mut().zip(input).for_each(|(out, byte)| *out = byte ^ 0x80),
        4 => from_nibbles(input, output),
        _ => {
            let (half, mask) = (1u8 << (bits - 1), (1u32 << bits) - 1);
            let (mut pending, mut filled, mut bytes) = (0u32, 0, input.iter());
            for out in output {
                if filled < bits {
                    pending |= u32::from(bytes.next().copied().unwrap_or(0)) << filled;
                    filled += 8;
                }
                *out = ((pending & mask) as u8).wrapping_sub(half);
                (pending, filled) = (pending >> bits, filled - bits);
            }
        }
    }
}

/// Appends the packed words of palette indices, without an offset.
pub fn pack_indices(indices: &[u8], bits: u8, output: &mut Vec<u8>) {
    let half = 1u8 << (bits - 1);
    let integers: Vec<u8> = indices.iter().map(|index| index.wrapping_sub(half)).collect();
    pack(&integers, bits, output);
}

/// Unpacks as many palette indices as fit into `output`.
pub fn unpack_indices(input: &[u8], bits: u8, output: &mut [u8]) {
    let half = 1u8 << (bits - 1);
    unpack(input, bits, output);
    output.iter_mut().for_each(|index| *index = index.wrapping_add(half));
}

/// Number of bytes for `count` codes without padding between them.
pub fn stream_bytes(count: usize, bits: u8) -> usize {
    let bits = usize::from(bits);
    (count / 8 * bits).saturating_add((count % 8 * bits).div_ceil(8))
}

/// Appends codes in consecutive bits, lowest bits first, the last byte padded with zero bits.
pub fn pack_stream(codes: &[u8], bits: u8, output: &mut Vec<u8>) {
    let end = output.len() + stream_bytes(codes.len(), bits);
    pack_indices(codes, bits, output);
    output.truncate(end);
}

/// Appends the words of a matrix `[rows, columns]` that is packed along its columns: `[words(rows),
/// columns]`.
pub fn pack_columns(values: &[u8], columns: usize, bits: u8, output: &mut Vec<u8>) {
    let columns = columns.max(1);
    let (start, rows) = (output.len(), values.len() / columns);
    let (half, mask) = (1u8 << (bits - 1), (1u64 << bits) - 1);
    output.resize(start + 4 * words(rows, bits) * columns, 0);
    let (out, _) = output[start..].as_chunks_mut::<4>();
    for (row, values) in values.chunks_exact(columns).enumerate() {
        let (word, shift) = (row * usize::from(bits) / 32, row * usize::from(bits) % 32);
        for (column, value) in values.iter().enumerate() {
            let shifted = (u64::from(value.wrapping_add(half)) & mask) << shift;
            for (word, part) in [(word, shifted as u32), (word + 1, (shifted >> 32) as u32)].into_iter().filter(|(_, part)| *part > 0) {
                let out = &mut out[word * columns + column];
                *out = (u32::from_le_bytes(*out) | part).to_le_bytes();
            }
        }
    }
}

/// Unpacks rows of a matrix that is packed along its columns, as many as fit into `output`. `input`
/// starts at the word that contains the lowest bit of row `first`.
pub fn unpack_columns(input: &[u8], columns: usize, bits: u8, first: usize, output: &mut [u8]) {
    let (columns, bits_wide) = (columns.max(1), usize::from(bits));
    let (half, mask) = (1u8 << (bits - 1), (1u64 << bits) - 1);
    let skipped = first * bits_wide / 32;
    let (input, _) = input.as_chunks::<4>();
    let word = |at: usize| input.get(at).map_or(0, |word| u64::from(u32::from_le_bytes(*word)));
    for (row, out) in output.chunks_exact_mut(columns).enumerate() {
        let bit = (first + row) * bits_wide;
        let (at, shift) = ((bit / 32 - skipped) * columns, bit % 32);
        for (column, out) in out.iter_mut().enumerate() {
            let both = word(at + column) | word(at + columns + column) << 32;
            *out = ((both >> shift & mask) as u8).wrapping_sub(half);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(values: &[i8], bits: u8) -> Vec<u32> {
        let mut bytes = Vec::new();
        pack(&values.iter().map(|v| *v as u8).collect::<Vec<_>>(), bits, &mut bytes);
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    #[test]
    fn streams_have_no_padding_between_codes() {
        for (bits, count, packed) in [(4, 3, &[0x21, 0x03][..]), (6, 5, &[0x81, 0x30, 0x10, 0x05])] {
            let codes: Vec<u8> = (1..=count).collect();
            let (mut bytes, mut back) = (vec![9], vec![0; codes.len()]);
            pack_stream(&codes, bits, &mut bytes);
            assert_eq!((&bytes[1..], stream_bytes(codes.len(), bits)), (packed, packed.len()), "{bits} bits");
            unpack_indices(&bytes[1..], bits, &mut back);
            assert_eq!(back, codes);
        }
    }

    #[test]
    fn words_match_compressed_tensors() {
        assert_eq!(packed(&[-8, -7, -1, 0, 1, 2, 6, 7], 4), [0xFEA9_8710]);
        assert_eq!(packed(&[7, 6, 5, 4, 3, 2, 1, 0], 4), [0x89AB_CDEF]);
        assert_eq!(packed(&[1, 2, 3, 4, 5, 6, 7, -8, -1, -2], 4), [0x0FED_CBA9, 0x67]);
        assert_eq!(packed(&[-128, -1, 0, 127, 1], 8), [0xFF80_7F00, 0x81]);
        assert_eq!(packed(&[-4, -3, -2, -1, 0, 1, 2, 3, -4, 3, 3, 1], 3), [0xF8FA_C688, 0xB]);
        let zero_points = [0i8, 1, 2, 3, -8, -7, 7, 6, 5, 4].map(|v| v as u8);
        let mut bytes = Vec::new();
        pack_columns(&zero_points, 1, 4, &mut bytes);
        assert_eq!(bytes, [0xEF10_BA98u32, 0xCD].map(u32::to_le_bytes).as_flattened());
        bytes.clear();
        pack_columns(&[7, -8i8 as u8, -8i8 as u8, -8i8 as u8], 2, 4, &mut bytes);
        assert_eq!(bytes, [0x0Fu32, 0].map(u32::to_le_bytes).as_flattened());
    }

    proptest! {
        #[test]
        fn packing_is_a_bijection(bits in 1u8..=8, rows in 1usize..80, columns in 1usize..7, seed in any::<u64>()) {
            let [least, most] = range(bits).map(i64::from);
            let values: Vec<u8> =
                (0..rows * columns).map(|i| (least + (seed.rotate_left(i as u32).wrapping_mul(i as u64 | 1) >> 9) as i64 % (most - least + 1)) as u8).collect();
            prop_assert!(fits(&values, bits));
            let (mut along, mut down) = (Vec::new(), Vec::new());
            pack(&values, bits, &mut along);
            prop_assert_eq!(along.len(), 4 * words(values.len(), bits));
            let mut back = vec![0; values.len()];
            unpack(&along, bits, &mut back);
            prop_assert_eq!(&back, &values);
            pack_columns(&values, columns, bits, &mut down);
            prop_assert_eq!(down.len(), 4 * words(rows, bits) * columns);
            // A column is packed like a separate row.
            for column in 0..columns {
                let (mut alone, own) = (Vec::new(), values.iter().skip(column).step_by(columns).copied().collect::<Vec<_>>());
                pack(&own, bits, &mut alone);
                let found: Vec<u8> = down.as_chunks::<4>().0.iter().skip(column).step_by(columns).copied().flatten().collect();
                prop_assert_eq!(found, alone);
            }
            let first = seed as usize % rows;
            let mut back = vec![0; (rows - first) * columns];
            unpack_columns(&down[4 * columns * (first * usize::from(bits) / 32)..], columns, bits, first, &mut back);
            prop_assert_eq!(&back[..], &values[first * columns..]);
        }
    }
}

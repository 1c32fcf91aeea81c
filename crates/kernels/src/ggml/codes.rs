//! Codes in blocks, for types in which each element has a code of its own: functions that write the codes of
//! a block, without its scales.

/// Writes the codes of a block, which count from the lowest level.
pub(super) type PutCodes = fn(&[u8], &mut [u8]);

/// Packs 32 codes of four bits into 16 bytes: element `j` in the low half of byte `j`, and element `j + 16`
/// in the high half.
pub(super) fn halves(codes: &[u8; 32], bytes: &mut [u8]) {
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = codes[j] & 15 | codes[j + 16] << 4;
    }
}

/// The fifth bits of 32 codes.
pub(super) fn fifths(codes: &[u8; 32]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |bits, (element, code)| bits | u32::from(code >> 4 & 1) << element).to_le_bytes()
}

/// Packs the low nibbles of each 64 codes into 32 bytes: the first 32 in the low half, the second 32 in
/// the high half.
fn nibbles(codes: &[u8; 256], bytes: &mut [u8]) {
    for (codes, bytes) in codes.as_chunks::<64>().0.iter().zip(bytes.as_chunks_mut::<32>().0) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[l] & 15 | codes[l + 32] << 4;
        }
    }
}

/// Packs the low two bits of each 128 codes into 32 bytes: four rows of 32 codes, the first one in the
/// lowest bits.
pub(super) fn quarters(codes: &[u8; 256], bytes: &mut [u8]) {
    for (codes, bytes) in codes.as_chunks::<128>().0.iter().zip(bytes.as_chunks_mut::<32>().0) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[l] & 3 | (codes[l + 32] & 3) << 2 | (codes[l + 64] & 3) << 4 | codes[l + 96] << 6;
        }
    }
}

/// Defines functions that write `N` codes to a block; others are not written.
macro_rules! writers {
    ($($(#[$meta:meta])* $name:ident $count:literal ($codes:ident, $block:ident) $body:block)+) => {
        $($(#[$meta])* pub(super) fn $name(codes: &[u8], $block: &mut [u8]) {
            let Some($codes) = codes.first_chunk::<$count>() else { return };
            $body
        })+
    };
}

writers! {
    q8_0 32 (codes, block) { codes.iter().zip(&mut block[2..]).for_each(|(code, byte)| *byte = code ^ 0x80) }

    q4_0 32 (codes, block) { halves(codes, &mut block[2..18]) }

    q4_1 32 (codes, block) { halves(codes, &mut block[4..20]) }

    q5_0 32 (codes, block) {
        block[2..6].copy_from_slice(&fifths(codes));
        halves(codes, &mut block[6..22]);
    }

    q5_1 32 (codes, block) {
        block[4..8].copy_from_slice(&fifths(codes));
        halves(codes, &mut block[8..24]);
    }

    q2_k 256 (codes, block) { quarters(codes, &mut block[16..80]) }

    q3_k 256 (codes, block) {
        block[..32].fill(0);
        for (row, codes) in codes.as_chunks::<32>().0.iter().enumerate() {
            for (byte, code) in block.iter_mut().zip(codes) {
                *byte |= code >> 2 << row;
            }
        }
        quarters(codes, &mut block[32..96]);
    }

    q4_k 256 (codes, block) { nibbles(codes, &mut block[16..144]) }

    q5_k 256 (codes, block) {
        block[16..48].fill(0);
        for (element, code) in codes.iter().enumerate() {
            block[16 + element % 32] |= (code >> 4) << (element / 32);
        }
        nibbles(codes, &mut block[48..176]);
    }

    q6_k 256 (codes, block) {
        block[..192].fill(0);
        for (element, code) in codes.iter().enumerate() {
            let (part, row, l) = (element / 128, element % 128 / 32, element % 32);
            block[64 * part + row % 2 * 32 + l] |= (code & 15) << (row / 2 * 4);
            block[128 + 32 * part + l] |= (code >> 4) << (2 * row);
        }
    }

    iq4_xs 256 (codes, block) {
        for (codes, bytes) in codes.as_chunks::<32>().0.iter().zip(block[8..136].as_chunks_mut::<16>().0) {
            halves(codes, bytes);
        }
    }
}

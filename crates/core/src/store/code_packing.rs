//! Packing of codes in files.

use super::DType;
use crate::kernel::packing;

/// Packing of the codes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// One byte per code, not packed.
    Bytes,
    /// Consecutive bits, the lowest bits of a byte first: two codes of four bits per byte, four codes of six
    /// bits in three bytes.
    Stream,
    /// Signed integers in 32-bit words, see [`packing`].
    Words,
    /// Unsigned indices in 32-bit words.
    Indices,
}

impl Packing {
    /// Dtype and number of elements of a packed row.
    pub fn row(self, row: usize, bits: u8) -> (DType, usize) {
        match self {
            Packing::Bytes => (DType::U8, row),
            Packing::Stream => (DType::U8, packing::stream_bytes(row, bits)),
            Packing::Words | Packing::Indices => (DType::I32, packing::words(row, bits)),
        }
    }

    /// Whether the packed tensor does not determine the shape, which is stored separately.
    pub fn has_shape(self) -> bool {
        match self {
            Packing::Bytes | Packing::Stream => false,
            Packing::Words | Packing::Indices => true,
        }
    }

    /// Appends the packed codes of a row.
    pub fn pack(self, codes: &[u8], bits: u8, output: &mut Vec<u8>) {
        match self {
            Packing::Bytes => output.extend_from_slice(codes),
            Packing::Stream => packing::pack_stream(codes, bits, output),
            Packing::Words => packing::pack(codes, bits, output),
            Packing::Indices => packing::pack_indices(codes, bits, output),
        }
    }

    /// Unpacks the codes of a row.
    pub fn unpack(self, input: &[u8], bits: u8, codes: &mut [u8]) {
        match self {
            Packing::Bytes => codes.iter_mut().zip(input).for_each(|(code, byte)| *code = *byte),
            Packing::Words => packing::unpack(input, bits, codes),
            Packing::Stream | Packing::Indices => packing::unpack_indices(input, bits, codes),
        }
    }
}

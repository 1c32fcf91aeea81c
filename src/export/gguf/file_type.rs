//! File types of GGUF files.

use serde::{Deserialize, Serialize};

use super::types::TensorType;
use crate::store::gguf::Kind;

/// Defines [`FileType`] from a table: the name in llama.cpp, the value of the metadata key
/// `general.file_type`, the type of most matrices, and a description.
macro_rules! file_types {
    ($($name:ident $id:literal $most:ident $description:literal;)+) => {
        /// File type of a GGUF file, by its name in llama.cpp.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
        #[allow(non_camel_case_types)]
        #[non_exhaustive]
        pub enum FileType {
            /// That of the blocks of `quantize`, or the format of `cast`, otherwise F16
            #[default]
            #[doc(hidden)]
            #[serde(rename = "auto")]
            Auto,
            $(#[doc = $description] $name,)+
        }

        impl FileType {
            /// Value of the metadata key `general.file_type`.
            pub(crate) fn id(self) -> u64 {
                match self {
                    FileType::Auto => FileType::F16.id(),
                    $(FileType::$name => $id,)+
                }
            }

            /// The file type with this value of the metadata key.
            pub(super) fn from_id(id: u64) -> Option<FileType> {
                match id {
                    $($id => Some(FileType::$name),)+
                    _ => None,
                }
            }

            /// The file type with this type of most matrices: the one with its name, or the last of several.
            pub(super) fn mostly(kind: Kind) -> Option<FileType> {
                let all = [$((stringify!($name), FileType::$name)),+].into_iter().filter(|(_, found)| found.most() == kind);
                let named = all.clone().find(|(name, _)| matches!(kind, Kind::Blocks(kind) if kind.name() == *name));
                named.or(all.last()).map(|(_, found)| found)
            }

            /// The type of most matrices.
            pub(super) fn most(self) -> Kind {
                let most = match self {
                    FileType::Auto => return FileType::F16.most(),
                    $(FileType::$name => TensorType::$most,)+
                };
                most.kind()
            }
        }
    };
}

file_types! {
    F32 0 F32 "32-bit floats";
    F16 1 F16 "16-bit floats";
    BF16 32 BF16 "bfloat16";
    Q8_0 7 Q8_0 "8 bits, one scale per 32 weights";
    Q6_K 18 Q6_K "6 bits in blocks of 256 with quantized scales";
    Q5_K_M 17 Q5_K "5 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices";
    Q5_K_S 16 Q5_K "5 bits in blocks of 256 with quantized scales";
    Q5_1 9 Q5_1 "5 bits, a scale and a minimum per 32 weights";
    Q5_0 8 Q5_0 "5 bits, one scale per 32 weights";
    Q4_K_M 15 Q4_K "4 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices";
    Q4_K_S 14 Q4_K "4 bits in blocks of 256 with quantized scales; 5 bits for the most sensitive matrices";
    Q4_1 3 Q4_1 "4 bits, a scale and a minimum per 32 weights";
    Q4_0 2 Q4_0 "4 bits, one scale per 32 weights";
    IQ4_NL 25 IQ4_NL "4-bit indices into a codebook of 16 values, one scale per 32 weights";
    IQ4_XS 30 IQ4_XS "The codebook of IQ4_NL in blocks of 256 with quantized scales";
    Q3_K_L 13 Q3_K "3 bits in blocks of 256 with quantized scales; 5 bits for the most sensitive matrices";
    Q3_K_M 12 Q3_K "3 bits in blocks of 256 with quantized scales; 4 or 5 bits for the most sensitive matrices";
    Q3_K_S 11 Q3_K "3 bits in blocks of 256 with quantized scales";
    IQ3_M 27 IQ3_S "3 bits as points of a grid; 4 bits for the most sensitive matrices";
    IQ3_S 26 IQ3_S "3 bits as points of a grid";
    IQ3_XS 22 IQ3_S "3 bits as points of grids, of a smaller one for some matrices; needs importance";
    IQ3_XXS 23 IQ3_XXS "3 bits as points of a smaller grid; needs importance";
    Q2_K 10 Q2_K "2 bits in blocks of 256 with quantized scales; 3 or 4 bits for the most sensitive matrices";
    Q2_K_S 21 Q2_K "2 bits in blocks of 256 with quantized scales; needs importance";
    IQ2_M 29 IQ2_S "2 bits as points of a grid; 3 bits for the most sensitive matrices; needs importance";
    IQ2_S 28 IQ2_XS "2 bits as points of a smaller grid; 3 bits for the most sensitive matrices; needs importance";
    IQ2_XS 20 IQ2_XS "2 bits as points of a smaller grid; needs importance";
    IQ2_XXS 19 IQ2_XXS "2 bits as points of the smallest grid; needs importance";
    TQ2_0 37 TQ2_0 "Ternary weights, in 2 bits";
    IQ1_M 31 IQ1_M "Ternary weights as points of a grid, with a scale per 16 weights; needs importance";
    TQ1_0 36 TQ1_0 "Ternary weights, in 1.69 bits";
    IQ1_S 24 IQ1_S "Ternary weights as points of a grid, with a scale per 32 weights; needs importance";
    MXFP4_MOE 38 MXFP4 "4-bit floats with a scale per 32 weights for experts, 8 bits for other matrices";
}

impl FileType {
    /// The file type of the type with the most elements, of pairs of a type and a number of elements.
    pub(super) fn of_most(kinds: impl Iterator<Item = (Kind, usize)>) -> Option<FileType> {
        let mut sums: Vec<(Kind, usize)> = Vec::new();
        for (kind, elements) in kinds {
            match sums.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, sum)) => *sum += elements,
                None => sums.push((kind, elements)),
            }
        }
        sums.into_iter().max_by_key(|(_, sum)| *sum).and_then(|(kind, _)| FileType::mostly(kind))
    }

    /// Whether the importance of columns affects the quantization.
    pub(super) fn uses_importance(self) -> bool {
        self.most().uses_importance()
    }
}

//! Number formats of quantized weights and activations, and formats of their scales.
//!
//! The only place that knows a format: its width and range, its codes on disk, the scales that it is
//! combined with, and its names in compressed-tensors. A new float format is a row of `float_formats!` and
//! a codec of the same name in [`minifloat`](crate::kernel::minifloat).

use serde::{Deserialize, Serialize};

use super::{DType, Packing};
use crate::kernel::minifloat::Minifloat;
use crate::kernel::{Float, minifloat};

/// Number format of the codes of a quantized weight, which occupy one byte each in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Codes {
    /// Signed integers of 2 to 8 bits, each stored as an int8.
    Integer(u8),
    /// Floats of up to 8 bits in the low bits of a byte.
    Float(FloatFormat),
    /// Indices into a palette of 2^bits values, 2 to 8 bits, starting at 0.
    Palette(u8),
}

/// Properties of a float format.
#[derive(Debug)]
pub struct FloatRow {
    /// Name in reports.
    pub name: &'static str,
    /// Name in messages.
    pub label: &'static str,
    /// Number of exponent bits.
    pub exponent_bits: u8,
    /// Number of mantissa bits.
    pub mantissa_bits: u8,
    /// The largest value.
    pub max: f32,
    /// Mantissa bits to which compressed-tensors rounds the largest magnitude of a group before the power of
    /// two of its scale is taken.
    pub scale_mantissa_bits: u8,
    /// Codes of zero, positive and negative.
    pub zeros: &'static [u8],
    /// Codes of NaN.
    pub nans: &'static [u8],
    /// Dtype of the codes with one byte each.
    pub dtype: DType,
    /// Packing of the codes in files.
    pub packing: Packing,
    /// Combinations with formats of scales. The first one applies if a configuration does not state it.
    pub files: &'static [FileFormat],
    /// Rows and inputs of a block, if files with one scale per block state no sizes.
    pub usual_block: Option<[usize; 2]>,
    /// Whether runtimes support embedding tables in this format.
    pub embeddings: bool,
    /// Whether transformers loads unquantized experts in separate tensors from folders in this format.
    pub loads_float_experts: bool,
}

/// Format of compressed-tensors for a combination of codes and scales.
#[derive(Debug)]
pub struct FileFormat {
    /// Format of the scales.
    pub scales: ScaleFormat,
    /// Name of the format.
    pub name: &'static str,
    /// Note on the runtimes that support it.
    pub support: &'static str,
    /// Whether transformers dequantizes it to bfloat16, whatever the dtype of the model.
    pub only_bf16: bool,
}

macro_rules! float_formats {
    ($($(#[$doc:meta])* $format:ident { $($field:ident: $value:expr),* $(,)? })*) => {
        /// Float formats of codes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum FloatFormat {
            $($(#[$doc])* $format),*
        }

        impl FloatFormat {
            /// All formats.
            pub const ALL: &[FloatFormat] = &[$(FloatFormat::$format),*];

            /// The properties of the format.
            pub fn row(self) -> &'static FloatRow {
                match self {
                    $(FloatFormat::$format => { const ROW: FloatRow = FloatRow { $($field: $value),* }; &ROW })*
                }
            }

            /// The codec of the format.
            pub fn codec(self) -> Minifloat {
                match self {
                    $(FloatFormat::$format => Minifloat::$format),*
                }
            }

            /// Quantizes values of type `F` with a scale, one byte per code.
            pub fn quantize<F: Float>(self, input: &[u8], codes: &mut [u8], scale: f32) {
                match self {
                    $(FloatFormat::$format => minifloat::quantize::<F, minifloat::$format>(input, codes, scale)),*
                }
            }

            /// Dequantizes codes.
            pub fn dequantize(self, codes: &[u8], output: &mut [f32], scale: f32) {
                match self {
                    $(FloatFormat::$format => minifloat::dequantize::<minifloat::$format>(codes, output, scale)),*
                }
            }

            /// Quantizes values with a scale and dequantizes them.
            pub fn round(self, values: &mut [f32], scale: f32) {
                match self {
                    $(FloatFormat::$format => minifloat::round::<minifloat::$format>(values, scale)),*
                }
            }
        }
    };
}

float_formats! {
    /// 8-bit floats without infinities (OCP E4M3).
    E4m3 {
        name: "fp8",
        label: "FP8",
        exponent_bits: 4,
        mantissa_bits: 3,
        max: minifloat::E4M3_MAX,
        scale_mantissa_bits: 1,
        zeros: &[0, 0x80],
        nans: &[0x7F, 0xFF],
        dtype: DType::F8_E4M3,
        packing: Packing::Bytes,
        files: &[
            FileFormat {
                scales: ScaleFormat::Float,
                name: "float-quantized",
                support: "FP8: transformers dequantizes it; vLLM multiplies in FP8 on GPUs of compute capability 8.9 and up, and uses it only for weights on older GPUs",
                only_bf16: false,
            },
            FileFormat {
                scales: ScaleFormat::PowerOfTwo,
                name: "mxfp8-quantized",
                support: "MXFP8: transformers dequantizes it with compressed-tensors 0.20",
                only_bf16: true,
            },
        ],
        usual_block: Some([128, 128]),
        embeddings: true,
        loads_float_experts: true,
    }
    /// 6-bit floats with three mantissa bits (OCP E2M3).
    E2m3 {
        name: "fp6",
        label: "FP6",
        exponent_bits: 2,
        mantissa_bits: 3,
        max: minifloat::E2M3_MAX,
        scale_mantissa_bits: 3,
        zeros: &[0, 0x20],
        nans: &[],
        dtype: DType::U8,
        packing: Packing::Stream,
        files: &[FileFormat {
            scales: ScaleFormat::PowerOfTwo,
            name: "mxfp6-pack-quantized",
            support: "MXFP6: transformers dequantizes it with compressed-tensors 0.20",
            only_bf16: true,
        }],
        usual_block: None,
        embeddings: false,
        loads_float_experts: false,
    }
    /// 4-bit floats (OCP E2M1).
    E2m1 {
        name: "fp4",
        label: "FP4",
        exponent_bits: 2,
        mantissa_bits: 1,
        max: minifloat::E2M1_MAX,
        scale_mantissa_bits: 1,
        zeros: &[0, 8],
        nans: &[],
        dtype: DType::U8,
        packing: Packing::Stream,
        files: &[
            FileFormat { scales: ScaleFormat::PowerOfTwo, name: "mxfp4-pack-quantized", support: FP4_SUPPORT, only_bf16: true },
            FileFormat { scales: ScaleFormat::Relative, name: "nvfp4-pack-quantized", support: FP4_SUPPORT, only_bf16: true },
        ],
        usual_block: None,
        embeddings: false,
        loads_float_experts: false,
    }
}

const FP4_SUPPORT: &str =
    "FP4: vLLM loads it with compressed-tensors 0.13 or later, transformers from version 5; FP4 matrix multiplication needs a Blackwell GPU";

impl FloatFormat {
    /// Bit width of a code.
    pub fn bits(self) -> u8 {
        1 + self.row().exponent_bits + self.row().mantissa_bits
    }

    /// The format of compressed-tensors for these scales, if there is one.
    pub fn file(self, scales: ScaleFormat) -> Option<&'static FileFormat> {
        self.row().files.iter().find(|file| file.scales == scales)
    }

    /// The power-of-two scale of a group with this largest magnitude.
    pub fn power_of_two_scale(self, largest: f32) -> f32 {
        let exponent = (self.row().max.to_bits() >> 23) as u8 - 127;
        minifloat::from_e8m0(minifloat::e8m0_scale(largest, exponent, self.row().scale_mantissa_bits))
    }

    /// The E4M3 scale of a group with this largest magnitude, relative to the inverse of a global scale.
    pub fn relative_scale(self, largest: f32, global_scale: f32) -> f32 {
        let scale = minifloat::from_e4m3(minifloat::to_e4m3(global_scale * (largest / self.row().max)));
        if scale > 0.0 { scale } else { 0.125 }
    }

    /// The global scale with which the largest magnitude of a tensor has the scale `largest_scale`, at most
    /// the largest E4M3 value; the largest finite number for magnitudes close to the smallest normal number,
    /// and 1 for zero.
    pub fn global_scale(self, largest: f32, largest_scale: f32) -> f32 {
        if largest > 0.0 { (largest_scale * self.row().max / largest).min(f32::MAX) } else { 1.0 }
    }
}

/// Format of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScaleFormat {
    /// Floats of at least 16 bits.
    Float,
    /// Powers of two (E8M0) of groups of 32.
    PowerOfTwo,
    /// E4M3 of groups of 16, relative to a global scale.
    Relative,
}

impl ScaleFormat {
    /// The format of scales of a dtype, in memory or in a file. `None` if scales cannot have the dtype.
    pub fn from_dtype(dtype: DType) -> Option<ScaleFormat> {
        match dtype {
            DType::F16 | DType::BF16 | DType::F32 => Some(ScaleFormat::Float),
            DType::U8 | DType::F8_E8M0 => Some(ScaleFormat::PowerOfTwo),
            DType::F8_E4M3 => Some(ScaleFormat::Relative),
            _ => None,
        }
    }

    /// The nearest positive scale of a format of one byte; the nearest exponent for powers of two. Floats are
    /// returned unchanged.
    pub fn nearest(self, scale: f32) -> f32 {
        match self {
            ScaleFormat::Float => scale,
            ScaleFormat::PowerOfTwo => minifloat::from_e8m0(minifloat::nearest_e8m0(scale)),
            ScaleFormat::Relative => minifloat::from_e4m3(minifloat::to_e4m3(scale).max(1)),
        }
    }

    /// The dtype in memory; `floats` for floats.
    pub fn dtype(self, floats: DType) -> DType {
        match self {
            ScaleFormat::Float => floats,
            ScaleFormat::PowerOfTwo => DType::F8_E8M0,
            ScaleFormat::Relative => DType::F8_E4M3,
        }
    }

    /// The dtype in files; `floats` for floats. Consumers expect powers of two as U8.
    pub fn stored_dtype(self, floats: DType) -> DType {
        match self {
            ScaleFormat::Float => floats,
            ScaleFormat::PowerOfTwo => DType::U8,
            ScaleFormat::Relative => DType::F8_E4M3,
        }
    }

    /// Number of elements per scale, if it is fixed.
    pub fn group(self) -> Option<usize> {
        match self {
            ScaleFormat::Float => None,
            ScaleFormat::PowerOfTwo => Some(32),
            ScaleFormat::Relative => Some(16),
        }
    }

    /// Names of the dtypes in configurations, without `torch.`.
    pub fn dtype_names(self) -> &'static [&'static str] {
        match self {
            ScaleFormat::Float => &["float32", "bfloat16", "float16"],
            ScaleFormat::PowerOfTwo => &["uint8"],
            ScaleFormat::Relative => &["float8_e4m3fn"],
        }
    }

    /// The strategy of groups in compressed-tensors.
    pub fn group_strategy(self) -> &'static str {
        match self {
            ScaleFormat::Float | ScaleFormat::PowerOfTwo => "group",
            ScaleFormat::Relative => "tensor_group",
        }
    }

    /// Bytes of scales that are not numbers, for formats of one byte.
    pub fn nans(self) -> &'static [u8] {
        match self {
            ScaleFormat::Float => &[],
            ScaleFormat::PowerOfTwo => &[0xFF],
            ScaleFormat::Relative => &[0x7F, 0xFF],
        }
    }
}

impl Codes {
    /// Integers of eight bits.
    pub const INT8: Codes = Codes::Integer(8);

    /// The format of the given `type` and `num_bits` in compressed-tensors; `None` if it is not supported.
    pub fn from_type(integer: bool, bits: u64) -> Option<Codes> {
        let bits = u8::try_from(bits).ok()?;
        match integer {
            true => (2..=8).contains(&bits).then_some(Codes::Integer(bits)),
            false => FloatFormat::ALL.iter().find(|format| format.bits() == bits).copied().map(Codes::Float),
        }
    }

    /// The format of a tensor with scales; `None` if there is none. `bits`: width of integers (8 if unknown)
    /// or packed floats.
    pub fn from_stored(dtype: DType, packed: bool, bits: Option<u8>) -> Option<Codes> {
        let is_stored = |format: &&FloatFormat| {
            let row = format.row();
            row.dtype == dtype && (row.packing != Packing::Bytes) == packed && (!packed || bits == Some(format.bits()))
        };
        match dtype {
            DType::I8 if !packed => Some(Codes::Integer(bits.unwrap_or(8))),
            _ => FloatFormat::ALL.iter().find(is_stored).copied().map(Codes::Float),
        }
    }

    /// Bit width of a packed code.
    pub fn bits(self) -> u8 {
        match self {
            Codes::Integer(bits) | Codes::Palette(bits) => bits,
            Codes::Float(format) => format.bits(),
        }
    }

    /// The float format of the codes, if they are floats.
    pub fn float(self) -> Option<FloatFormat> {
        match self {
            Codes::Float(format) => Some(format),
            Codes::Integer(_) | Codes::Palette(_) => None,
        }
    }

    /// Name in messages.
    pub fn label(self) -> String {
        self.float().map_or_else(|| self.to_string(), |format| format.row().label.to_owned())
    }

    /// Whether the codes are integers, which may have zero points.
    pub fn is_integer(self) -> bool {
        matches!(self, Codes::Integer(_))
    }

    /// Whether the codes are indices into palettes, which take the place of scales.
    pub fn is_palette(self) -> bool {
        matches!(self, Codes::Palette(_))
    }

    /// Numbers per scale group: the values of a palette, otherwise one scale.
    pub fn entries(self) -> usize {
        if let Codes::Palette(bits) = self { 1 << bits.min(8) } else { 1 }
    }

    /// Dtype of the codes with one byte each.
    pub fn dtype(self) -> DType {
        match self {
            Codes::Integer(_) => DType::I8,
            Codes::Float(format) => format.row().dtype,
            Codes::Palette(_) => DType::U8,
        }
    }

    /// Packing of the codes in a packed tensor.
    pub fn packing(self) -> Packing {
        match self {
            Codes::Integer(_) => Packing::Words,
            Codes::Float(format) => format.row().packing,
            Codes::Palette(_) => Packing::Indices,
        }
    }

    /// Whether files contain the codes only packed.
    pub fn is_always_packed(self) -> bool {
        match self {
            Codes::Integer(_) => false,
            Codes::Float(format) => format.row().packing != Packing::Bytes,
            Codes::Palette(_) => true,
        }
    }

    /// Rows and inputs of a block, if a file with one scale per block states no sizes.
    pub fn usual_block(self) -> Option<[usize; 2]> {
        self.float().and_then(|format| format.row().usual_block)
    }

    /// Formats of scales that the codes are combined with.
    pub fn scale_formats(self) -> impl Iterator<Item = ScaleFormat> {
        let (integers, files) = match self {
            Codes::Integer(_) => (Some(ScaleFormat::Float), &[][..]),
            Codes::Float(format) => (None, format.row().files),
            Codes::Palette(_) => (None, &[][..]),
        };
        integers.into_iter().chain(files.iter().map(|file| file.scales))
    }

    /// The format of compressed-tensors, or the name of our own format for palettes.
    pub fn file_format(self, scales: ScaleFormat, packed: bool) -> &'static str {
        match self {
            Codes::Integer(_) if packed => "pack-quantized",
            Codes::Integer(_) => "int-quantized",
            Codes::Float(format) => format.file(scales).map_or("unsupported", |file| file.name),
            Codes::Palette(_) => "palettes",
        }
    }
}

impl std::fmt::Display for Codes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Codes::Integer(bits) => write!(f, "int{bits}"),
            Codes::Float(format) => f.write_str(format.row().name),
            Codes::Palette(bits) => write!(f, "palette{bits}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values and scale groups of small magnitude keep their precision.
    #[test]
    fn global_scales_are_finite() {
        let format = FloatFormat::E2m1;
        for largest in [f32::MIN_POSITIVE, 1e-38, 1e-30, 1.0, 3e38] {
            let global_scale = format.global_scale(largest, minifloat::E4M3_MAX);
            assert!(global_scale.is_normal(), "{largest}");
            let scale = format.relative_scale(largest, global_scale) / global_scale;
            let mut values = [largest, -largest / 2.0];
            format.round(&mut values, scale);
            assert!((values[0] / largest - 1.0).abs() < 0.1 && (values[1] / largest + 0.5).abs() < 0.1, "{largest}: {values:?}");
        }
        assert_eq!(format.global_scale(0.0, minifloat::E4M3_MAX), 1.0);
    }

    /// The properties of each row agree with its codec.
    #[test]
    fn rows_describe_their_codecs() {
        for format in FloatFormat::ALL {
            let (row, codes) = (format.row(), (0..=u8::MAX).take(1 << format.bits()).collect::<Vec<_>>());
            let mut values = vec![0.0; codes.len()];
            format.dequantize(&codes, &mut values, 1.0);
            let found = |is: fn(f32) -> bool| codes.iter().zip(&values).filter(|(_, value)| is(**value)).map(|(code, _)| *code).collect::<Vec<_>>();
            assert_eq!((found(|value| value == 0.0), found(f32::is_nan)), (row.zeros.to_vec(), row.nans.to_vec()), "{format:?}");
            assert_eq!(values.iter().copied().fold(0.0, f32::max), row.max, "{format:?}");
            let mut bytes = Vec::new();
            row.packing.pack(&codes, format.bits(), &mut bytes);
            assert_eq!(bytes.len(), row.packing.row(codes.len(), format.bits()).1, "{format:?}");
            let mut back = vec![0; codes.len()];
            row.packing.unpack(&bytes, format.bits(), &mut back);
            assert_eq!(back, codes, "{format:?}");
            let mut again = vec![0; codes.len()];
            let input: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            format.quantize::<crate::kernel::F32>(&input, &mut again, 1.0);
            let same = |(code, again): (&u8, &u8)| code == again || row.nans.contains(code) || row.zeros.contains(code);
            assert!(codes.iter().zip(&again).all(same), "{format:?}: {again:?}");
            let found = [Codes::from_type(false, format.bits().into()), Codes::from_stored(row.dtype, row.packing != Packing::Bytes, Some(format.bits()))];
            assert_eq!(found, [Some(Codes::Float(*format)); 2], "another format has this width");
        }
    }
}

//! Quantization of weights and of the activations that are multiplied with them.

use serde::{Deserialize, Serialize};

use super::{Codes, DType, FloatFormat, ScaleFormat};

/// Which elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Granularity {
    /// One scale for the tensor.
    Tensor,
    /// One scale for each output row.
    Channel,
    /// One scale for this many consecutive inputs of a row.
    Group(usize),
    /// One scale for a block of rows and consecutive inputs; the last block may have fewer rows. In a
    /// [`View`](super::View), each row has separate scales.
    Block([usize; 2]),
}

impl Granularity {
    /// Number of elements per scale, for rows of `row` elements.
    pub fn run(self, row: usize, elements: usize) -> usize {
        match self {
            Granularity::Tensor => elements,
            Granularity::Channel => row,
            Granularity::Group(size) | Granularity::Block([_, size]) => size,
        }
        .max(1)
    }

    /// Number of scales per row; 1 if all elements of a row share a scale.
    pub fn groups(self, row: usize) -> usize {
        if matches!(self, Granularity::Group(_) | Granularity::Block(_)) { row / self.run(row, row) } else { 1 }
    }
}

/// Quantization of the activations that are multiplied with the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationScheme {
    /// Int8 with a dynamic scale per token.
    DynamicToken,
    /// 8-bit integers with a static scale and zero point.
    Static(Static),
    /// Floats.
    Float(FloatFormat, FloatScale),
    /// Not quantized.
    None,
}

/// Scales of activations that are quantized to floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FloatScale {
    /// A dynamic scale per token.
    Token,
    /// A dynamic scale per group of this many values of a token.
    Group(usize),
    /// A static scale.
    Static(Static),
    /// A dynamic power of two per group (MX formats).
    PowerOfTwo,
    /// A dynamic E4M3 scale per group, relative to a static global scale (NVFP4).
    Relative(Static),
}

impl FloatScale {
    /// Format of the scales.
    pub fn format(self) -> ScaleFormat {
        match self {
            FloatScale::Token | FloatScale::Group(_) | FloatScale::Static(_) => ScaleFormat::Float,
            FloatScale::PowerOfTwo => ScaleFormat::PowerOfTwo,
            FloatScale::Relative(_) => ScaleFormat::Relative,
        }
    }
}

impl ActivationScheme {
    /// The static parameters, if there are any.
    pub fn parameters(self) -> Option<Static> {
        match self {
            ActivationScheme::Static(by) | ActivationScheme::Float(_, FloatScale::Static(by) | FloatScale::Relative(by)) => Some(by),
            ActivationScheme::Float(_, FloatScale::Token | FloatScale::Group(_) | FloatScale::PowerOfTwo)
            | ActivationScheme::DynamicToken
            | ActivationScheme::None => None,
        }
    }

    /// The same scheme with these static parameters, if it has any.
    #[must_use]
    pub fn with_parameters(self, by: Static) -> ActivationScheme {
        match self {
            ActivationScheme::Static(_) => ActivationScheme::Static(by),
            ActivationScheme::Float(format, FloatScale::Static(_)) => ActivationScheme::Float(format, FloatScale::Static(by)),
            ActivationScheme::Float(format, FloatScale::Relative(_)) => ActivationScheme::Float(format, FloatScale::Relative(by)),
            ActivationScheme::Float(_, FloatScale::Token | FloatScale::Group(_) | FloatScale::PowerOfTwo)
            | ActivationScheme::DynamicToken
            | ActivationScheme::None => self,
        }
    }

    /// Name of the tensor with the static scale.
    pub fn scale_name(self) -> &'static str {
        if matches!(self, ActivationScheme::Float(_, FloatScale::Relative(_))) { "input_global_scale" } else { "input_scale" }
    }
}

/// Static quantization parameters of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Static {
    /// Bits of the scale, so that equality is bitwise.
    scale: u32,
    /// Int8 zero point. `None` if it is implicitly 0 and not stored.
    pub zero_point: Option<i8>,
}

impl Static {
    /// A scale with a zero point.
    pub const fn new(scale: f32, zero_point: Option<i8>) -> Static {
        Static { scale: scale.to_bits(), zero_point }
    }

    /// The scale.
    pub fn scale(&self) -> f32 {
        f32::from_bits(self.scale)
    }
}

/// Quantization of a weight: `value = (code - zero_point) * scale` for a matrix `[out, in]`, or `value =
/// palette[code]` for a tensor of any rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizationSpec {
    /// Type of the codes.
    pub codes: Codes,
    /// Which elements share a scale or a palette.
    pub granularity: Granularity,
    /// Whether all zero points are zero and not stored.
    pub symmetric: bool,
    /// Dtype of the scales or palette values.
    pub scale_dtype: DType,
    /// Quantization of the activations.
    pub activations: ActivationScheme,
}

impl QuantizationSpec {
    /// The specification without layer-specific values: parameters of static activation quantization are
    /// reset.
    #[must_use]
    pub fn scheme(&self) -> QuantizationSpec {
        let reset = |by: Static| self.activations.with_parameters(Static::new(1.0, by.zero_point.map(|_| 0)));
        let activations = self.activations.parameters().map_or(self.activations, reset);
        QuantizationSpec { activations, ..self.clone() }
    }

    /// Palettes of `bits` for at most `group` rows each. All groups have the same size, except for the
    /// last.
    pub fn palettes(bits: u8, group: usize, shape: &[usize], dtype: DType) -> QuantizationSpec {
        let rows = shape.first().copied().unwrap_or(1).max(1);
        let groups = rows.div_ceil(group.max(1));
        let granularity = Granularity::Block([rows.div_ceil(groups), row(shape)]);
        QuantizationSpec { codes: Codes::Palette(bits), granularity, symmetric: true, scale_dtype: dtype, activations: ActivationScheme::None }
    }

    /// Shape of the scales of a weight; for palettes `[palettes, values]`.
    pub fn scale_shape(&self, shape: &[usize]) -> Vec<usize> {
        let (rows, row) = (shape.first().copied().unwrap_or(1), row(shape));
        if let (true, Granularity::Block([high, _])) = (self.codes.is_palette(), self.granularity) {
            return vec![rows.div_ceil(high.max(1)), self.codes.entries()];
        }
        match self.granularity {
            Granularity::Tensor => vec![1],
            Granularity::Channel => vec![rows, 1],
            Granularity::Group(size) => vec![rows, row / size.max(1)],
            Granularity::Block([high, wide]) => vec![rows.div_ceil(high.max(1)), row / wide.max(1)],
        }
    }

    /// Whether the scales are relative to a global scale (NVFP4).
    pub fn has_global_scale(&self) -> bool {
        self.scale_format() == ScaleFormat::Relative
    }

    /// Format of the scales.
    pub fn scale_format(&self) -> ScaleFormat {
        ScaleFormat::from_dtype(self.scale_dtype).unwrap_or(ScaleFormat::Float)
    }

    /// Dtype of the dequantized values: that of the scales if they are at least 16 bits wide, otherwise
    /// based on `dtype`.
    pub fn value_dtype(&self, dtype: DType) -> DType {
        match self.scale_format() {
            ScaleFormat::Float => self.scale_dtype,
            ScaleFormat::PowerOfTwo | ScaleFormat::Relative if dtype == DType::F64 => DType::F32,
            ScaleFormat::PowerOfTwo | ScaleFormat::Relative => dtype,
        }
    }
}

/// Number of elements of an output row. Saturates if the tensor is empty and the other dimensions
/// overflow.
pub fn row(shape: &[usize]) -> usize {
    shape.get(1..).unwrap_or(&[]).iter().fold(1, |n, &size| n.saturating_mul(size))
}

impl Codes {
    /// Static activation quantization for weights with these codes.
    pub fn static_activations(self, by: Static) -> ActivationScheme {
        match self {
            Codes::Integer(_) | Codes::Palette(_) => ActivationScheme::Static(by),
            Codes::Float(format) if self.scale_formats().any(|scales| scales == ScaleFormat::Relative) => {
                ActivationScheme::Float(format, FloatScale::Relative(by))
            }
            Codes::Float(format) => ActivationScheme::Float(format, FloatScale::Static(by)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_rows_do_not_overflow() {
        assert_eq!(row(&[0, 1 << 40, 1 << 40]), usize::MAX);
        assert_eq!(row(&[2, 3, 5]), 15);
        assert_eq!(row(&[7]), 1);
    }
}

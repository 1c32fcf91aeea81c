//! Options for lowering a graph: operator set, float precision, quantized weights.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::proto::DataType;
use crate::store::QuantizationSpec;

/// The supported operator sets for writing.
pub const OPSETS: std::ops::RangeInclusive<u32> = 17..=24;

/// Precision of weights and arithmetic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(rename = "OnnxPrecision"))]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32 bits
    #[default]
    Float32,
    /// 16 bits; inputs, outputs, int8 layers, and operations that need more range stay at 32 bits
    Float16,
}

/// Representation of layers with integer weights and float activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WeightOnly {
    /// `DequantizeLinear` and a matrix product; group scales and packed 4-bit weights require opset 21
    #[default]
    Dequantize,
    /// `MatMulNBits` of ONNX Runtime, for per-row scales and group sizes that are multiples of 16
    MatmulNbits,
}

/// Representation of an output head that shares its weight with an int8 embedding table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TiedHead {
    /// A float matrix product; the weights are dequantized when the file is loaded
    #[default]
    Float32,
    /// An integer matrix product, as in layers with dynamic activations; reads a quarter of the bytes
    Int8,
}

/// The KV cache of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cache {
    /// No cache
    #[default]
    None,
    /// Keys and values of a decoder, as inputs and outputs
    Decoder,
    /// The same of an encoder-decoder model after its first step; keys and values of cross-attention are
    /// inputs of the graph
    AfterEncoder,
}

/// Options for lowering a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Style {
    /// Operator set, one of [`OPSETS`].
    pub opset: u32,
    /// Precision of floats.
    pub precision: Precision,
    /// Integer weights, by name in the checkpoint.
    pub integers: BTreeMap<String, QuantizationSpec>,
    /// Palettized weights, by name in the checkpoint.
    pub palettes: BTreeMap<String, QuantizationSpec>,
    /// Float weights that are stored in 16 bits and converted to 32 bits, by name in the checkpoint. With
    /// [`Precision::Float16`], all floats have 16 bits.
    pub halves: BTreeSet<String>,
    /// Whether activations are quantized to int8, which integer units of ARM and GPUs require, instead
    /// of uint8.
    pub signed: bool,
    /// Representation of layers with integer weights and float activations.
    pub weight_only: WeightOnly,
    /// Representation of an output head that shares its weight with an int8 embedding table.
    pub tied_head: TiedHead,
    /// The KV cache of the file.
    pub cache: Cache,
    /// Element types of float inputs that are not 32-bit floats.
    pub input_types: BTreeMap<String, DataType>,
    /// The same for outputs.
    pub output_types: BTreeMap<String, DataType>,
}

impl Default for Style {
    fn default() -> Self {
        let (integers, palettes, halves, input_types, output_types) = Default::default();
        Self {
            opset: *OPSETS.start(),
            precision: Precision::default(),
            integers,
            palettes,
            halves,
            signed: false,
            weight_only: WeightOnly::default(),
            tied_head: TiedHead::default(),
            cache: Cache::None,
            input_types,
            output_types,
        }
    }
}

//! What a model file should be like: operators, width of floats, which weights are integers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::store::Affine;

/// The sets of operators that can be written.
pub const OPSETS: std::ops::RangeInclusive<u32> = 17..=21;

/// Width of weights and arithmetic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32 bits
    #[default]
    Float32,
    /// 16 bits; inputs and outputs, int8 layers, and what needs more range stay 32 bits wide
    Float16,
}

/// How layers are written whose weights are integers and whose activations are floats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WeightOnly {
    /// `DequantizeLinear` and a product, operators of ONNX; groups of inputs, and four bits in half a byte, from opset 21 on
    #[default]
    Dequantize,
    /// `MatMulNBits`, an operator of ONNX Runtime, for groups of any multiple of 16 inputs and for whole rows
    MatmulNbits,
}

/// How an output head is written that shares its weight with an int8 embedding table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TiedHead {
    /// A product of floats, which are made of the integers when the file is loaded
    #[default]
    Float32,
    /// A product of integers, like that of layers with dynamic activations: four times less is read for each token
    Int8,
}

/// How a graph is to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Style {
    /// Set of operators, one of [`OPSETS`].
    pub opset: u32,
    /// Width of floats.
    pub precision: Precision,
    /// Weights that are integers, by their names in the checkpoint.
    pub integers: BTreeMap<String, Affine>,
    /// Weights that are places in palettes, by their names in the checkpoint.
    pub palettes: BTreeMap<String, Affine>,
    /// Whether activations become int8, as integer units of ARM and GPUs want them, and not uint8.
    pub signed: bool,
    /// How layers are written that have integers as weights and floats as activations.
    pub weight_only: WeightOnly,
    /// How an output head is written that shares its weight with an int8 table.
    pub tied_head: TiedHead,
    /// Whether keys and values of earlier tokens are inputs, and those of all tokens outputs.
    pub cache: bool,
}

impl Default for Style {
    fn default() -> Self {
        let (integers, palettes) = Default::default();
        Self {
            opset: *OPSETS.start(),
            precision: Precision::default(),
            integers,
            palettes,
            signed: false,
            weight_only: WeightOnly::default(),
            tied_head: TiedHead::default(),
            cache: false,
        }
    }
}

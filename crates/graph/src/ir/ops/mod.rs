//! The ops, one file each: type inference, axes, evaluation, gradients, cost. `kernels` holds faster
//! implementations for particular devices.

mod activation;
mod anchors;
mod attention;
mod attention_dropout;
mod attention_inputs;
mod attention_sinks;
mod batch_norm;
mod binary;
mod cache_quantize;
mod causal_conv;
mod chunk_bias;
mod concat;
mod constants;
mod conv;
mod conv_transpose;
mod cum_sum;
mod decay;
mod decoding;
mod deformable_attention;
mod detach;
mod elementwise;
mod embedding;
mod experts;
mod flatten;
mod gated_delta;
mod gather;
mod gather_tokens;
mod gradient;
mod grid_positions;
mod grid_rotary;
mod heads;
mod image_rotary;
mod insert_images;
mod kernels;
mod layer_norm;
mod learned_fake_quantize;
mod linear;
mod masked_mean;
mod matmul;
mod normalize;
mod opaque;
mod pad;
mod patchify;
mod pool;
mod position_scale;
mod positions;
mod prepend;
mod recurrent;
mod recurrent_steps;
mod reduce;
mod relative_bias;
mod relative_products;
mod reshape;
mod resize;
mod rms_norm;
mod rotary;
mod rounding;
mod select;
mod slice;
mod softmax;
mod spatial;
mod to_float;
mod token_pool;
mod top_k;
mod transpose;
mod window_bias;
mod windows;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use candle_core::Tensor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value as Json};

use crate::error::ParseError;

pub use activation::{
    Abs, Clip, Cos, Elu, Erf, Exp, FakeQuantize, Gelu, HardSigmoid, HardSwish, LeakyRelu, Log, Mish, Neg, Power, Reciprocal, Relu, Scale, Sigmoid, Silu, Sin,
    Softplus, Sqrt, Tanh,
};
pub use anchors::{AnchorUse, Anchors};
pub use attention::Attention;
pub use batch_norm::BatchNorm;
pub use binary::{Binary, BinaryKind};
pub use cache_quantize::CacheQuantize;
pub use causal_conv::CausalConv;
pub use chunk_bias::ChunkBias;
pub use concat::Concat;
pub use constants::{ScalarOps, constant};
pub use conv::Conv;
pub use conv_transpose::ConvTranspose;
pub use cum_sum::CumSum;
pub use decay::Decay;
pub use decoding::{Branches, DecodingState, Forward, Incremental};
pub use deformable_attention::DeformableAttention;
pub use detach::Detach;
pub use elementwise::{Add, Mul};
pub use embedding::Embedding;
pub use experts::{Combine, Dispatch, ExpertGroups, Route};
pub use flatten::Flatten;
pub use gated_delta::GatedDelta;
pub use gather_tokens::GatherTokens;
pub use gradient::{Backward, Saved};
pub use grid_positions::GridPositions;
pub use grid_rotary::GridRotary;
pub use heads::{MergeHeads, SplitHeads};
pub use image_rotary::ImageRotary;
pub use insert_images::InsertImages;
pub use kernels::contiguous;
pub use kernels::{Fused, Kernel, PreparedOp, disable, kernel, moments, on_host, sum, transposed_product};
pub use layer_norm::LayerNorm;
pub use learned_fake_quantize::LearnedFakeQuantize;
pub use linear::Linear;
pub use masked_mean::MaskedMean;
pub use matmul::MatMul;
pub use normalize::Normalize;
pub use opaque::{Function, Opaque};
pub use pad::{Pad, PadMode};
pub use patchify::Patchify;
pub use pool::{AveragePool, GlobalAveragePool, MaxPool};
pub use position_scale::PositionScale;
pub use positions::Positions;
pub use prepend::Prepend;
pub use recurrent::{Direction, Recurrent, RecurrentKind, RecurrentResult};
pub use reduce::{Reduce, ReduceKind};
pub use relative_bias::RelativeBias;
pub use relative_products::RelativeProducts;
pub use reshape::{Reshape, TargetSize};
pub use resize::{Coordinates, Extent, Interpolation, NearestMode, Resize};
pub use rms_norm::RmsNorm;
pub use rotary::{Rotary, RotaryScaling};
pub use rounding::round_half_even;
pub use select::Select;
pub use slice::Slice;
pub use softmax::Softmax;
pub use spatial::{Padding, PerAxis};
pub use to_float::ToFloat;
pub use token_pool::{TokenChoice, TokenPool};
pub use top_k::TopK;
pub use transpose::Transpose;
pub use window_bias::WindowBias;

use super::{Bindings, Dim, Element, TensorType};

/// The interface of every op.
pub trait OpSpec: fmt::Debug {
    /// Number of inputs that the op accepts.
    fn arity(&self) -> Range<usize>;
    /// Infers the type of the output from the types of as many inputs as [`arity`](OpSpec::arity) allows. The
    /// error is the reason why the op does not accept these inputs.
    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String>;
    /// [`infer`](OpSpec::infer) after a check of the number of inputs.
    fn output(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let arity = self.arity();
        if !arity.contains(&inputs.len()) {
            return Err(format!("takes {} to {} inputs, got {}", arity.start, arity.end.saturating_sub(1), inputs.len()));
        }
        self.infer(inputs)
    }
    /// Correspondence of the axes of inputs of these types; see [`axes`](super::axes) for the notation.
    fn axes(&self, inputs: &[&TensorType]) -> String;
    /// Updates attributes that repeat the size of an axis; `size` returns the new size of a letter.
    fn resize(&mut self, _size: &dyn Fn(&str) -> usize) {}
    /// The reference implementation of the op, in tensor operations that every device and float dtype
    /// supports.
    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor>;
    /// Gradients with respect to the inputs, in such operations too. `None` for inputs that need no
    /// gradient or have none.
    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>>;
    /// Whether [`backward`](OpSpec::backward) reads the elements of this input and not only its shape.
    fn reads_input(&self, _input: usize) -> bool {
        true
    }
    /// Whether [`backward`](OpSpec::backward) reads the elements of the output.
    fn reads_output(&self) -> bool {
        false
    }
    /// Incremental decoding of this op, if its result for a token depends on the position or on other
    /// tokens.
    fn incremental(&self) -> Option<&dyn Incremental> {
        None
    }
    /// Whether `eval` accepts this input in 16 bits next to other inputs in 32 bits, and converts no more
    /// of it than needed.
    fn accepts_half(&self, _input: usize) -> bool {
        false
    }
    /// Whether a kernel multiplies the integers of this input, if it is a quantized weight.
    fn accepts_codes(&self, _input: usize) -> bool {
        false
    }
    /// Whether the result stays in 32 bits in computations with 16 bits.
    fn is_wide(&self) -> bool {
        false
    }
    /// Number of multiply-accumulate operations, for these values of the named sizes.
    fn macs(&self, _inputs: &[&TensorType], _output: &TensorType, _bindings: &Bindings) -> u64 {
        0
    }
}

/// Names of ops in files written by earlier versions, and their current names.
const RENAMED: [(&str, &str); 2] = [("LearnedQuantize", "LearnedFakeQuantize"), ("Tokens", "Patchify")];

/// Generates the enum of ops and its dispatch.
macro_rules! ops {
    ($($name:ident),+ $(,)?) => {
        /// An op with its attributes.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs)]
        pub enum Op {
            $($name($name),)+
        }

        /// Names of all ops.
        pub const OPS: &[&str] = &[$(stringify!($name)),+];

        impl Op {
            /// The interface of the op.
            pub fn spec(&self) -> &dyn OpSpec {
                match self {
                    $(Op::$name(op) => op,)+
                }
            }

            /// The op with axes of other sizes, by letter.
            #[must_use]
            pub fn resized(&self, size: &dyn Fn(&str) -> usize) -> Op {
                let mut op = self.clone();
                match &mut op {
                    $(Op::$name(op) => op.resize(size),)+
                }
                op
            }

            /// Name of the op.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Op::$name(_) => stringify!($name),)+
                }
            }

            fn attributes(&self) -> Json {
                match self {
                    $(Op::$name(op) => serde_json::to_value(op),)+
                }
                .unwrap_or(Json::Null)
            }

            fn from_parts(name: &str, attributes: Json) -> Result<Op, String> {
                let name = RENAMED.iter().find(|(before, _)| *before == name).map_or(name, |(_, now)| now);
                match name {
                    $(stringify!($name) => serde_json::from_value(attributes).map(Op::$name).map_err(|e| format!("{name}: {e}")),)+
                    _ => Err(format!("unknown op `{name}`, expected one of {}", OPS.join(", "))),
                }
            }
        }

        /// Every op with its attributes at their defaults.
        pub fn examples() -> Vec<Op> {
            vec![$(Op::$name($name::default())),+]
        }

        $(impl From<$name> for Op {
            fn from(op: $name) -> Op {
                Op::$name(op)
            }
        })+
    };
}

ops! {
    Linear, Conv, BatchNorm, LayerNorm, RmsNorm,
    Relu, Gelu, Silu, Sigmoid, Tanh, Clip, Softmax, FakeQuantize, LearnedFakeQuantize, CacheQuantize,
    Add, Mul,
    Embedding, Positions, PositionScale, Rotary, GridRotary, ImageRotary, InsertImages, SplitHeads, MergeHeads, Attention,
    MaxPool, GlobalAveragePool, Flatten, Patchify, Prepend, Select, Slice,
    MaskedMean, TokenPool, RelativeBias, RelativeProducts, WindowBias, ChunkBias, Normalize, Route, Dispatch, Combine,
    Reshape, Transpose, Concat, MatMul, Binary, Reduce, CumSum, AveragePool, ConvTranspose, Pad, Resize, Recurrent,
    CausalConv, Decay, GatedDelta, DeformableAttention, GridPositions, Anchors, TopK, GatherTokens, Detach,
    Abs, Cos, Elu, Erf, Exp, HardSigmoid, HardSwish, LeakyRelu, Log, Mish, Neg, Power, Reciprocal, Scale, Sin, Softplus, Sqrt,
    ToFloat, Opaque,
}

impl Op {
    /// Number of inputs that the op accepts.
    pub fn arity(&self) -> Range<usize> {
        self.spec().arity()
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.attributes() {
            Json::Object(map) if !map.is_empty() => write!(f, "{}{}", self.name(), Json::Object(map)),
            _ => f.write_str(self.name()),
        }
    }
}

impl FromStr for Op {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let (name, attributes) = text.split_at(text.find('{').unwrap_or(text.len()));
        let attributes = if attributes.is_empty() {
            Json::Object(Map::new())
        } else {
            serde_json::from_str(attributes).map_err(|e| format!("attributes of {name}: {e}"))?
        };
        Ok(Op::from_parts(name, attributes)?)
    }
}

impl Serialize for Op {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.attributes() {
            Json::Object(map) if !map.is_empty() => Map::from_iter([(self.name().to_owned(), Json::Object(map))]).serialize(serializer),
            _ => serializer.serialize_str(self.name()),
        }
    }
}

impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wrong = || serde::de::Error::custom("expected the name of an op, or an object with one op name and its attributes");
        let (name, attributes) = match Json::deserialize(deserializer)? {
            Json::String(name) => (name, Json::Object(Map::new())),
            Json::Object(map) if map.len() == 1 => map.into_iter().next().ok_or_else(wrong)?,
            _ => return Err(wrong()),
        };
        Op::from_parts(&name, attributes).map_err(serde::de::Error::custom)
    }
}

/// Requires an input to have this many axes.
fn require_rank(ty: &TensorType, rank: usize, what: &str) -> Result<(), String> {
    if ty.shape.len() == rank { Ok(()) } else { Err(format!("{what} must have {rank} axes")) }
}

/// Requires an input to be a float tensor with this many axes.
fn require_floats(ty: &TensorType, rank: usize, what: &str) -> Result<(), String> {
    require(ty, Element::Float, what)?;
    require_rank(ty, rank, what)
}

/// Requires an input to have this element type.
fn require(ty: &TensorType, element: Element, what: &str) -> Result<(), String> {
    if ty.element == element { Ok(()) } else { Err(format!("{what} must be {}", if element == Element::Float { "floats" } else { "integers" })) }
}

/// Requires an input to be a vector of this size.
fn require_vector(ty: &TensorType, width: &Dim, what: &str) -> Result<(), String> {
    if ty.shape.len() == 1 && ty.shape[0] == *width { Ok(()) } else { Err(format!("{what} must be a vector of {width}")) }
}

/// The size of the last axis.
fn last(ty: &TensorType) -> Result<&Dim, String> {
    ty.shape.last().ok_or_else(|| "needs at least one axis".to_owned())
}

/// Resolves an axis number; negative numbers count from the last axis.
fn axis_of(axis: i64, rank: usize) -> Result<usize, String> {
    let found = if axis < 0 { i64::try_from(rank).ok().and_then(|rank| rank.checked_add(axis)) } else { Some(axis) };
    let found = found.and_then(|axis| usize::try_from(axis).ok()).filter(|axis| *axis < rank);
    found.ok_or_else(|| format!("axis {axis} is out of range for {rank} axes"))
}

/// Whether an attribute has its default value and is omitted in files.
fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Whether an axis is the last one, which is the default that files omit.
fn is_last(axis: &i64) -> bool {
    *axis == -1
}

/// A letter for each axis of a tensor, or the text that `special` returns for it.
fn letters(rank: usize, special: impl Fn(usize) -> Option<String>) -> String {
    (0..rank).map(|axis| special(axis).unwrap_or_else(|| format!("x{axis}"))).collect::<Vec<_>>().join(" ")
}

/// An error for attributes that do not match the shapes of the tensors at run time.
fn shape_error(reason: impl Into<String>) -> candle_core::Error {
    candle_core::Error::Msg(reason.into())
}

/// The type of one vector for each sample of `[batch, sequence, width]`, given integers of the tokens.
fn pooled_type(inputs: &[&TensorType], integers: &str) -> Result<TensorType, String> {
    require_floats(inputs[0], 3, "the input")?;
    require(inputs[1], Element::Int, integers)?;
    if inputs[1].shape != inputs[0].shape[..2] {
        return Err(format!("{integers} must be [batch, sequence]"));
    }
    Ok(TensorType { element: Element::Float, shape: vec![inputs[0].shape[0].clone(), inputs[0].shape[2].clone()] })
}

/// Number of elements, for these values of the named sizes; saturates at the largest number.
pub fn elements(ty: &TensorType, bindings: &Bindings) -> u64 {
    ty.shape.iter().map(|d| d.evaluate(bindings).unwrap_or(0) as u64).fold(1, u64::saturating_mul)
}

/// Multiply-accumulates of as many sums as `ty` has elements, over axes of these sizes.
fn sums<'d>(ty: &TensorType, axes: impl IntoIterator<Item = &'d Dim>, bindings: &Bindings) -> u64 {
    axes.into_iter().map(|d| d.evaluate(bindings).unwrap_or(0) as u64).fold(elements(ty, bindings), u64::saturating_mul)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_round_trip_through_text_and_json() {
        for op in examples() {
            assert_eq!(op.to_string().parse::<Op>().unwrap(), op);
            assert_eq!(serde_json::from_value::<Op>(serde_json::to_value(&op).unwrap()).unwrap(), op);
        }
        assert!("Linear{\"inputmajor\":true}".parse::<Op>().unwrap_err().to_string().contains("input_major"));
        assert_eq!("Tokens".parse::<Op>().unwrap(), Op::Patchify(Patchify {}));
        assert!("Lineal".parse::<Op>().unwrap_err().to_string().contains("Linear"));
    }
}

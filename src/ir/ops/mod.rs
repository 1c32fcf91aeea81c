//! The ops, one file each: type rule, axes, evaluation, gradients, cost. `kernels` holds faster ways for single devices.

mod activation;
mod attention;
mod batch_norm;
mod binary;
mod cache_quantize;
mod concat;
mod constants;
mod conv;
mod conv_transpose;
mod elementwise;
mod embedding;
mod experts;
mod flatten;
mod gradient;
mod heads;
mod kernels;
mod layer_norm;
mod learned_fake_quantize;
mod linear;
mod masked_mean;
mod matmul;
mod normalize;
mod opaque;
mod pad;
mod past;
mod patchify;
mod places;
mod pool;
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
mod sides;
mod slice;
mod softmax;
mod to_float;
mod token_pool;
mod transpose;
mod window_bias;
mod windows;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use candle_core::Tensor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value as Json};

pub use activation::{
    Abs, Clip, Cos, Elu, Erf, Exp, FakeQuantize, Gelu, HardSigmoid, HardSwish, LeakyRelu, Log, Mish, Neg, Power, Reciprocal, Relu, Scale, Sigmoid, Silu, Sin,
    Softplus, Sqrt, Tanh,
};
pub use attention::Attention;
pub use batch_norm::BatchNorm;
pub use binary::{Binary, BinaryKind};
pub use cache_quantize::CacheQuantize;
pub use concat::Concat;
pub(crate) use constants::constant;
pub use conv::Conv;
pub use conv_transpose::ConvTranspose;
pub use elementwise::{Add, Mul};
pub use embedding::Embedding;
pub use experts::{Combine, Dispatch, ExpertGroups, Route};
pub use flatten::Flatten;
pub use gradient::{Backward, Saved};
pub use heads::{MergeHeads, SplitHeads};
pub(crate) use kernels::contiguous;
pub use kernels::{Fused, Kernel, PreparedOp, disable, kernel, moments, on_host, sum, transposed_product};
pub use layer_norm::LayerNorm;
pub use learned_fake_quantize::LearnedFakeQuantize;
pub use linear::Linear;
pub use masked_mean::MaskedMean;
pub use matmul::MatMul;
pub use normalize::Normalize;
pub use opaque::{Function, Opaque};
pub use pad::{Pad, PadMode};
pub use past::{Forward, Past, Sequential};
pub use patchify::Patchify;
pub use pool::{AveragePool, GlobalAveragePool, MaxPool};
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
pub use sides::{Padding, PerAxis};
pub use slice::Slice;
pub use softmax::Softmax;
pub use to_float::ToFloat;
pub use token_pool::{TokenChoice, TokenPool};
pub use transpose::Transpose;
pub use window_bias::WindowBias;

use super::{Bindings, Dim, Element, TensorType};

/// What every op answers.
pub trait OpSpec: fmt::Debug {
    /// How many inputs it takes.
    fn arity(&self) -> Range<usize>;
    /// The type of the output, of as many inputs as it takes.
    ///
    /// # Errors
    /// Why the inputs do not fit.
    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String>;
    /// [`infer`](OpSpec::infer), of any number of inputs.
    ///
    /// # Errors
    /// There are too few or too many, or they do not fit.
    fn output(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let arity = self.arity();
        if !arity.contains(&inputs.len()) {
            return Err(format!("takes {} to {} inputs, {} are given", arity.start, arity.end.saturating_sub(1), inputs.len()));
        }
        self.infer(inputs)
    }
    /// How the axes of inputs of these types correspond; see [`axes`](super::axes).
    fn axes(&self, inputs: &[&TensorType]) -> String;
    /// Follows letters to new sizes where an attribute repeats one.
    fn resize(&mut self, _size: &dyn Fn(&str) -> usize) {}
    /// What the op means: the values of the output, in tensor operations that every device and type of floats has.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor>;
    /// Gradients with respect to the inputs, `None` where none is wanted or there is none; in such operations too.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>>;
    /// Whether [`backward`](OpSpec::backward) reads the elements of this input, not its shape alone.
    fn reads_input(&self, _input: usize) -> bool {
        true
    }
    /// Whether [`backward`](OpSpec::backward) reads the elements of the output.
    fn reads_output(&self) -> bool {
        false
    }
    /// How the op goes on where a sequence goes on, if tokens are not all alike to it.
    fn sequential(&self) -> Option<&dyn Sequential> {
        None
    }
    /// Whether `eval` takes this input in 16 bits beside others in 32, and converts no more of it than it needs.
    fn reads_stored(&self, _input: usize) -> bool {
        false
    }
    /// Multiply-accumulates, given the named sizes.
    fn macs(&self, _inputs: &[&TensorType], _output: &TensorType, _bindings: &Bindings) -> u64 {
        0
    }
}

/// Names that ops have had in files of earlier versions, and those of today.
const RENAMED: [(&str, &str); 2] = [("LearnedQuantize", "LearnedFakeQuantize"), ("Tokens", "Patchify")];

/// Writes the table of ops.
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
            /// What the op answers.
            pub fn spec(&self) -> &dyn OpSpec {
                match self {
                    $(Op::$name(op) => op,)+
                }
            }

            /// The op for axes of other sizes, by letter.
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
                    _ => Err(format!("unknown op `{name}`, there are {}", OPS.join(", "))),
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
    Embedding, Positions, Rotary, SplitHeads, MergeHeads, Attention,
    MaxPool, GlobalAveragePool, Flatten, Patchify, Prepend, Select, Slice,
    MaskedMean, TokenPool, RelativeBias, RelativeProducts, WindowBias, Normalize, Route, Dispatch, Combine,
    Reshape, Transpose, Concat, MatMul, Binary, Reduce, AveragePool, ConvTranspose, Pad, Resize, Recurrent,
    Abs, Cos, Elu, Erf, Exp, HardSigmoid, HardSwish, LeakyRelu, Log, Mish, Neg, Power, Reciprocal, Scale, Sin, Softplus, Sqrt,
    ToFloat, Opaque,
}

impl Op {
    /// How many inputs it takes.
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
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, attributes) = text.split_at(text.find('{').unwrap_or(text.len()));
        let attributes = if attributes.is_empty() {
            Json::Object(Map::new())
        } else {
            serde_json::from_str(attributes).map_err(|e| format!("attributes of {name}: {e}"))?
        };
        Op::from_parts(name, attributes)
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
        let wrong = || serde::de::Error::custom("expected the name of an op, or one name with its attributes");
        let (name, attributes) = match Json::deserialize(deserializer)? {
            Json::String(name) => (name, Json::Object(Map::new())),
            Json::Object(map) if map.len() == 1 => map.into_iter().next().ok_or_else(wrong)?,
            _ => return Err(wrong()),
        };
        Op::from_parts(&name, attributes).map_err(serde::de::Error::custom)
    }
}

/// Holds an input to a number of axes.
fn require_rank(ty: &TensorType, rank: usize, what: &str) -> Result<(), String> {
    if ty.shape.len() == rank { Ok(()) } else { Err(format!("{what} must have {rank} axes")) }
}

/// Holds an input to floats with a number of axes.
fn require_floats(ty: &TensorType, rank: usize, what: &str) -> Result<(), String> {
    require(ty, Element::Float, what)?;
    require_rank(ty, rank, what)
}

/// Holds an input to an element.
fn require(ty: &TensorType, element: Element, what: &str) -> Result<(), String> {
    if ty.element == element { Ok(()) } else { Err(format!("{what} must be {}", if element == Element::Float { "floats" } else { "whole numbers" })) }
}

/// Holds a vector to a width.
fn require_vector(ty: &TensorType, width: &Dim, what: &str) -> Result<(), String> {
    if ty.shape.len() == 1 && ty.shape[0] == *width { Ok(()) } else { Err(format!("{what} must be a vector of {width}")) }
}

/// The last size.
fn last(ty: &TensorType) -> Result<&Dim, String> {
    ty.shape.last().ok_or_else(|| "needs at least one axis".to_owned())
}

/// The axis of a number that counts from behind where it is negative.
fn axis_of(axis: i64, rank: usize) -> Result<usize, String> {
    let found = if axis < 0 { i64::try_from(rank).ok().and_then(|rank| rank.checked_add(axis)) } else { Some(axis) };
    let found = found.and_then(|axis| usize::try_from(axis).ok()).filter(|axis| *axis < rank);
    found.ok_or_else(|| format!("there is no axis {axis} among {rank}"))
}

/// Whether an attribute need not be written.
fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Whether an axis is the last one, as attributes write it that are left out.
fn is_last(axis: &i64) -> bool {
    *axis == -1
}

/// A letter for each axis of a tensor, or what is said of it.
fn letters(rank: usize, said: impl Fn(usize) -> Option<String>) -> String {
    (0..rank).map(|axis| said(axis).unwrap_or_else(|| format!("x{axis}"))).collect::<Vec<_>>().join(" ")
}

/// An error of attributes that do not fit the tensors that are there when a model runs.
fn unfit(reason: impl Into<String>) -> candle_core::Error {
    candle_core::Error::Msg(reason.into())
}

/// Number of elements, given the named sizes; as large as a number can be where it is larger.
pub(crate) fn elements(ty: &TensorType, bindings: &Bindings) -> u64 {
    ty.shape.iter().map(|d| d.evaluate(bindings).unwrap_or(0) as u64).fold(1, u64::saturating_mul)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_are_written_and_read() {
        for op in examples() {
            assert_eq!(op.to_string().parse::<Op>().unwrap(), op);
            assert_eq!(serde_json::from_value::<Op>(serde_json::to_value(&op).unwrap()).unwrap(), op);
        }
        assert!("Linear{\"inputmajor\":true}".parse::<Op>().unwrap_err().contains("input_major"));
        assert_eq!("Tokens".parse::<Op>().unwrap(), Op::Patchify(Patchify {}));
        assert!("Lineal".parse::<Op>().unwrap_err().contains("Linear"));
    }
}

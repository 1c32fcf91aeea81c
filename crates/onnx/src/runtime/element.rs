//! Conversion of tensors to and from the element types of a model file. Samples are 64-bit integers or
//! 32-bit floats; model inputs and outputs can have other numeric types.

use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use ort::value::{DynValue, Outlet, PrimitiveTensorElementType, Tensor as OrtTensor, TensorElementType, ValueRef, ValueType};

use crate::ir::{Element, Port};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// An integer type, or `bool` as 0 or 1.
trait Integer: PrimitiveTensorElementType + Copy + std::fmt::Debug + 'static {
    fn from_i64(value: i64) -> Option<Self>;
    fn to_i64(self) -> Option<i64>;
}

macro_rules! integers {
    ($($ty:ty),+) => {
        $(impl Integer for $ty {
            fn from_i64(value: i64) -> Option<Self> {
                value.try_into().ok()
            }

            fn to_i64(self) -> Option<i64> {
                self.try_into().ok()
            }
        })+
    };
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

impl Integer for bool {
    fn from_i64(value: i64) -> Option<Self> {
        matches!(value, 0 | 1).then_some(value == 1)
    }

    fn to_i64(self) -> Option<i64> {
        Some(self.into())
    }
}

/// Evaluates the first expression for float element types, the second one for integer types, and the
/// third one for all others.
macro_rules! with_element {
    ($element:expr, $float:ident => $floats:expr, $integer:ident => $integers:expr, else $other:expr) => {{
        macro_rules! float {
            ($ty:ty) => {{
                type $float = $ty;
                $floats
            }};
        }
        macro_rules! integer {
            ($ty:ty) => {{
                type $integer = $ty;
                $integers
            }};
        }
        match $element {
            TensorElementType::Float32 => float!(f32),
            TensorElementType::Float64 => float!(f64),
            TensorElementType::Float16 => float!(f16),
            TensorElementType::Bfloat16 => float!(bf16),
            TensorElementType::Int8 => integer!(i8),
            TensorElementType::Uint8 => integer!(u8),
            TensorElementType::Int16 => integer!(i16),
            TensorElementType::Uint16 => integer!(u16),
            TensorElementType::Int32 => integer!(i32),
            TensorElementType::Uint32 => integer!(u32),
            TensorElementType::Int64 => integer!(i64),
            TensorElementType::Uint64 => integer!(u64),
            TensorElementType::Bool => integer!(bool),
            _ => $other,
        }
    }};
}

/// The port of an input or output; `None` unless it is a numeric tensor.
pub(super) fn port(outlet: &Outlet) -> Option<Port> {
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else { return None };
    let element = with_element!(ty, F => { let _: F; Element::Float }, I => { let _: I; Element::Int }, else return None);
    Some(Port { name: outlet.name().to_owned(), element, shape: shape.iter().map(|size| usize::try_from(*size).ok()).collect(), number: None })
}

/// The ONNX element type number of an input or output; `None` unless it is a numeric tensor.
pub(super) fn element_type(outlet: &Outlet) -> Option<i32> {
    let ValueType::Tensor { ty, .. } = outlet.dtype() else { return None };
    Some(match ty {
        TensorElementType::Float32 => 1,
        TensorElementType::Uint8 => 2,
        TensorElementType::Int8 => 3,
        TensorElementType::Uint16 => 4,
        TensorElementType::Int16 => 5,
        TensorElementType::Int32 => 6,
        TensorElementType::Int64 => 7,
        TensorElementType::Bool => 9,
        TensorElementType::Float16 => 10,
        TensorElementType::Float64 => 11,
        TensorElementType::Uint32 => 12,
        TensorElementType::Uint64 => 13,
        TensorElementType::Bfloat16 => 16,
        _ => return None,
    })
}

/// Converts a tensor to the element type of an input.
pub(super) fn to_ort_value(tensor: &Tensor, outlet: &Outlet) -> Result<DynValue> {
    let ValueType::Tensor { ty, .. } = outlet.dtype() else { return Err("is not a tensor".into()) };
    with_element!(ty, F => floats::<F>(tensor), I => integers::<I>(tensor, *ty), else Err(format!("has the unsupported element type {ty}").into()))
}

/// Converts an output to 64-bit integers or 32-bit floats; `None` unless it is a numeric tensor. `narrow`:
/// whether 8-bit integers become 16-bit ones.
pub(super) fn from_ort_value(value: &ValueRef, narrow: bool) -> Result<Option<Tensor>> {
    let ValueType::Tensor { ty, .. } = value.dtype() else { return Ok(None) };
    match ty {
        TensorElementType::Int8 if narrow => return widened::<i8>(value).map(Some),
        TensorElementType::Uint8 if narrow => return widened::<u8>(value).map(Some),
        _ => {}
    }
    with_element!(ty, F => {
        let (shape, values) = value.try_extract_tensor::<F>()?;
        Ok(Some(Tensor::from_slice(values, sizes(shape), &Device::Cpu)?.to_dtype(DType::F32)?))
    }, I => {
        let (shape, values) = value.try_extract_tensor::<I>()?;
        // In two loops, because collecting results is several times slower.
        if let Some(value) = values.iter().find(|value| value.to_i64().is_none()) {
            return Err(format!("{value:?} exceeds the range of 64-bit integers").into());
        }
        let numbers: Vec<i64> = values.iter().map(|value| value.to_i64().unwrap_or_default()).collect();
        Ok(Some(Tensor::from_vec(numbers, sizes(shape), &Device::Cpu)?))
    }, else Ok(None))
}

/// Converts an output of 8-bit integers to 16-bit ones.
fn widened<I: PrimitiveTensorElementType + Copy + Into<i16>>(value: &ValueRef) -> Result<Tensor> {
    let (shape, values) = value.try_extract_tensor::<I>()?;
    Ok(Tensor::from_vec(values.iter().map(|value| (*value).into()).collect::<Vec<i16>>(), sizes(shape), &Device::Cpu)?)
}

fn floats<F: WithDType + PrimitiveTensorElementType + std::fmt::Debug + 'static>(tensor: &Tensor) -> Result<DynValue> {
    let values = tensor.flatten_all()?.to_dtype(F::DTYPE)?.to_vec1::<F>()?;
    let narrower = matches!(F::DTYPE, DType::F16 | DType::BF16);
    let originals = if narrower { tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()? } else { Vec::new() };
    if let Some((original, _)) = originals.iter().zip(&values).find(|(original, value)| original.is_finite() && !value.to_f64().is_finite()) {
        return Err(format!("holds {original}, which exceeds the range of {}", F::DTYPE.as_str()).into());
    }
    Ok(OrtTensor::from_array((shape(tensor), values))?.into_dyn())
}

fn integers<I: Integer>(tensor: &Tensor, ty: TensorElementType) -> Result<DynValue> {
    if tensor.dtype().is_float() {
        return Err(format!("holds floats, but the model requires {ty}").into());
    }
    let numbers = tensor.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let convert = |value: i64| I::from_i64(value).ok_or_else(|| format!("holds {value}, but the model requires {ty}").into());
    let values = numbers.into_iter().map(convert).collect::<Result<Vec<I>>>()?;
    Ok(OrtTensor::from_array((shape(tensor), values))?.into_dyn())
}

fn shape(tensor: &Tensor) -> Vec<i64> {
    tensor.dims().iter().map(|size| *size as i64).collect()
}

fn sizes(shape: &[i64]) -> Vec<usize> {
    shape.iter().map(|size| *size as usize).collect()
}

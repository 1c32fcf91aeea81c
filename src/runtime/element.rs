//! Element types where samples meet a model file: samples are 64-bit integers and 32-bit floats, a file may take and give others.

use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use ort::value::{DynValue, Outlet, PrimitiveTensorElementType, Tensor as OrtTensor, TensorElementType, ValueRef, ValueType};

use crate::ir::{Element, Port};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// An integer, or a truth value as 0 or 1.
trait Integer: PrimitiveTensorElementType + Copy + std::fmt::Debug + 'static {
    fn of(number: i64) -> Option<Self>;
    fn number(self) -> Option<i64>;
}

macro_rules! integers {
    ($($ty:ty),+) => {
        $(impl Integer for $ty {
            fn of(number: i64) -> Option<Self> {
                number.try_into().ok()
            }

            fn number(self) -> Option<i64> {
                self.try_into().ok()
            }
        })+
    };
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

impl Integer for bool {
    fn of(number: i64) -> Option<Self> {
        matches!(number, 0 | 1).then_some(number == 1)
    }

    fn number(self) -> Option<i64> {
        Some(self.into())
    }
}

/// Evaluates an expression for the type of an element; the third where it is neither a float nor an integer.
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

/// An input or output as the rest of the program sees it; nothing for what is no tensor of numbers.
pub(super) fn port(outlet: &Outlet) -> Option<Port> {
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else { return None };
    let element = with_element!(ty, F => { let _: F; Element::Float }, I => { let _: I; Element::Int }, else return None);
    Some(Port { name: outlet.name().to_owned(), element, shape: shape.iter().map(|size| usize::try_from(*size).ok()).collect(), number: None })
}

/// The element type of an input or output, as ONNX numbers them; nothing for what is no tensor of numbers.
pub(super) fn number(outlet: &Outlet) -> Option<i32> {
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

/// A tensor as the input that it is given to.
pub(super) fn given(tensor: &Tensor, outlet: &Outlet) -> Result<DynValue> {
    let ValueType::Tensor { ty, .. } = outlet.dtype() else { return Err("is no tensor".into()) };
    with_element!(ty, F => floats::<F>(tensor), I => integers::<I>(tensor, *ty), else Err(format!("takes {ty}").into()))
}

/// An output as 64-bit integers or 32-bit floats; nothing for what is no tensor of numbers.
pub(super) fn taken(value: &ValueRef) -> Result<Option<Tensor>> {
    let ValueType::Tensor { ty, .. } = value.dtype() else { return Ok(None) };
    with_element!(ty, F => {
        let (shape, values) = value.try_extract_tensor::<F>()?;
        Ok(Some(Tensor::from_slice(values, sizes(shape), &Device::Cpu)?.to_dtype(DType::F32)?))
    }, I => {
        let (shape, values) = value.try_extract_tensor::<I>()?;
        let numbers = values.iter().map(|value| value.number().ok_or_else(|| format!("{value:?} is past the end of 64-bit integers").into()));
        Ok(Some(Tensor::from_vec(numbers.collect::<Result<Vec<i64>>>()?, sizes(shape), &Device::Cpu)?))
    }, else Ok(None))
}

fn floats<F: WithDType + PrimitiveTensorElementType + std::fmt::Debug + 'static>(tensor: &Tensor) -> Result<DynValue> {
    let values = tensor.flatten_all()?.to_dtype(F::DTYPE)?.to_vec1::<F>()?;
    let narrower = matches!(F::DTYPE, DType::F16 | DType::BF16);
    let given = if narrower { tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()? } else { Vec::new() };
    if let Some((given, _)) = given.iter().zip(&values).find(|(given, value)| given.is_finite() && !value.to_f64().is_finite()) {
        return Err(format!("holds {given}, past the end of {}", F::DTYPE.as_str()).into());
    }
    Ok(OrtTensor::from_array((shape(tensor), values))?.into_dyn())
}

fn integers<I: Integer>(tensor: &Tensor, ty: TensorElementType) -> Result<DynValue> {
    if tensor.dtype().is_float() {
        return Err(format!("holds floats, the model takes {ty}").into());
    }
    let numbers = tensor.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let fitting = |number: i64| I::of(number).ok_or_else(|| format!("holds {number}, the model takes {ty}").into());
    let values = numbers.into_iter().map(fitting).collect::<Result<Vec<I>>>()?;
    Ok(OrtTensor::from_array((shape(tensor), values))?.into_dyn())
}

fn shape(tensor: &Tensor) -> Vec<i64> {
    tensor.dims().iter().map(|size| *size as i64).collect()
}

fn sizes(shape: &[i64]) -> Vec<usize> {
    shape.iter().map(|size| *size as usize).collect()
}

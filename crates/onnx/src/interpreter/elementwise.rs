//! Arithmetic, comparisons, logic and casts.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use candle_core::Tensor;

use super::super::initializer_roles::{float, int};
use super::super::proto::DataType;
use super::{Call, Value, from_floats, from_ints};

/// An integer in the range of its type, in two's complement.
fn wrapped(value: i64, ty: DataType) -> i64 {
    if ty == DataType::Int32 { i64::from(value as i32) } else { value }
}

/// Operators of two or more numbers, which are applied from the first input to the last.
pub(super) fn arithmetic(call: &Call) -> Result<Tensor, String> {
    let mut result = call.input(0)?.clone();
    for at in 1..call.node.input.len() {
        let other = call.input(at)?;
        let tensor = if result.is_float() { float_arithmetic(call, &result, other) } else { int_arithmetic(call, &result, other) }?;
        result = Value { tensor, ty: result.ty };
    }
    Ok(result.tensor)
}

fn float_arithmetic(call: &Call, a: &Value, b: &Value) -> Result<Tensor, String> {
    let compute: fn(f32, f32) -> f32 = match call.node.op_type() {
        "Add" => |a, b| a + b,
        "Sub" => |a, b| a - b,
        "Mul" => |a, b| a * b,
        "Div" => |a, b| a / b,
        "Pow" => f32::powf,
        "Max" => |a, b| if a.is_nan() || a > b { a } else { b },
        "Min" => |a, b| if a.is_nan() || a < b { a } else { b },
        "Mod" if int(call.node, "fmod", 0) != 0 => |a, b| a % b,
        _ => return Err("it is not supported for floats".into()),
    };
    let shape = call.broadcast(&[a.dims(), b.dims()])?;
    from_floats(a.floats(&shape)?.into_iter().zip(b.floats(&shape)?).map(|(a, b)| compute(a, b)).collect(), &shape)
}

fn int_arithmetic(call: &Call, a: &Value, b: &Value) -> Result<Tensor, String> {
    let c_style = int(call.node, "fmod", 0) != 0;
    // `None` for a division by zero, or a negative exponent.
    let compute = |x: i64, y: i64| match call.node.op_type() {
        "Add" => Some(x.wrapping_add(y)),
        "Sub" => Some(x.wrapping_sub(y)),
        "Mul" => Some(x.wrapping_mul(y)),
        "Div" => (y != 0).then(|| x.checked_div(y).unwrap_or(x)),
        "Mod" if c_style => (y != 0).then(|| x.checked_rem(y).unwrap_or(0)),
        // The result has the sign of the divisor.
        "Mod" => (y != 0).then(|| match x.checked_rem(y).unwrap_or(0) {
            rest if rest != 0 && (rest < 0) != (y < 0) => rest.wrapping_add(y),
            rest => rest,
        }),
        "Pow" => u32::try_from(y).ok().map(|y| x.wrapping_pow(y)),
        "Max" => Some(x.max(y)),
        "Min" => Some(x.min(y)),
        _ => None,
    };
    if a.ty == DataType::Bool || b.is_float() {
        return Err("its inputs have different types".into());
    }
    let shape = call.broadcast(&[a.dims(), b.dims()])?;
    let pairs = a.ints(&shape)?.into_iter().zip(b.ints(&shape)?);
    let values: Option<Vec<i64>> = pairs.map(|(x, y)| compute(x, y).map(|value| wrapped(value, a.ty))).collect();
    from_ints(values.ok_or("it divides by zero, or has a negative exponent")?, &shape)
}

/// Operators of one number.
pub(super) fn unary(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    if x.is_float() {
        let compute: fn(f32) -> f32 = match call.node.op_type() {
            "Neg" => |x| -x,
            "Abs" => f32::abs,
            "Sign" => |x| if x == 0.0 { 0.0 } else { x.signum() },
            "Ceil" => f32::ceil,
            "Floor" => f32::floor,
            "Round" => f32::round_ties_even,
            "Sin" => f32::sin,
            _ => f32::cos,
        };
        return from_floats(x.floats(x.dims())?.into_iter().map(compute).collect(), x.dims());
    }
    let compute: fn(i64) -> i64 = match call.node.op_type() {
        "Neg" => i64::wrapping_neg,
        "Abs" => i64::wrapping_abs,
        "Sign" => i64::signum,
        _ => return Err("it is not supported for integers".into()),
    };
    from_ints(x.ints(x.dims())?.into_iter().map(|value| wrapped(compute(value), x.ty)).collect(), x.dims())
}

pub(super) fn is_nan(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    from_ints(x.floats(x.dims())?.into_iter().map(|value| i64::from(value.is_nan())).collect(), x.dims())
}

/// The result of a comparison of two numbers.
fn compared<T: PartialOrd>(op: &str, a: T, b: T) -> bool {
    match op {
        "Equal" => a == b,
        "Less" => a < b,
        "LessOrEqual" => a <= b,
        "Greater" => a > b,
        _ => a >= b,
    }
}

pub(super) fn compare(call: &Call) -> Result<Tensor, String> {
    let (a, b, op) = (call.input(0)?, call.input(1)?, call.node.op_type());
    let shape = call.broadcast(&[a.dims(), b.dims()])?;
    let results: Vec<i64> = if a.is_float() {
        a.floats(&shape)?.into_iter().zip(b.floats(&shape)?).map(|(a, b)| i64::from(compared(op, a, b))).collect()
    } else {
        a.ints(&shape)?.into_iter().zip(b.ints(&shape)?).map(|(a, b)| i64::from(compared(op, a, b))).collect()
    };
    from_ints(results, &shape)
}

pub(super) fn logic(call: &Call) -> Result<Tensor, String> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    let shape = call.broadcast(&[a.dims(), b.dims()])?;
    let compute: fn(i64, i64) -> i64 = match call.node.op_type() {
        "And" => |a, b| a & b,
        "Or" => |a, b| a | b,
        _ => |a, b| a ^ b,
    };
    from_ints(a.ints(&shape)?.into_iter().zip(b.ints(&shape)?).map(|(a, b)| compute(a, b)).collect(), &shape)
}

pub(super) fn not(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    from_ints(x.ints(x.dims())?.into_iter().map(|value| i64::from(value == 0)).collect(), x.dims())
}

/// `Where`.
pub(super) fn choose(call: &Call) -> Result<Tensor, String> {
    let (condition, a, b) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let shape = call.broadcast(&[condition.dims(), a.dims(), b.dims()])?;
    let conditions = condition.ints(&shape)?;
    if a.is_float() {
        let pairs = a.floats(&shape)?.into_iter().zip(b.floats(&shape)?);
        return from_floats(conditions.into_iter().zip(pairs).map(|(condition, (a, b))| if condition != 0 { a } else { b }).collect(), &shape);
    }
    let pairs = a.ints(&shape)?.into_iter().zip(b.ints(&shape)?);
    from_ints(conditions.into_iter().zip(pairs).map(|(condition, (a, b))| if condition != 0 { a } else { b }).collect(), &shape)
}

/// Limits values from below, then from above.
pub(super) fn clip(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let [low, high] = [1, 2].map(|at| call.optional(at));
    if x.is_float() {
        let bound = |value: Option<&Value>, name: &str, missing: f32| match value {
            Some(value) => value.floats(value.dims()).map(|values| values.first().copied().unwrap_or(missing)),
            None => Ok(float(call.node, name, missing)),
        };
        let (low, high) = (bound(low, "min", f32::NEG_INFINITY)?, bound(high, "max", f32::INFINITY)?);
        let limited = |value: f32| if value < low { low } else { value };
        let limited = |value: f32| if limited(value) > high { high } else { limited(value) };
        return from_floats(x.floats(x.dims())?.into_iter().map(limited).collect(), x.dims());
    }
    let bound = |value: Option<&Value>, missing: i64| match value {
        Some(value) => value.ints(value.dims()).map(|values| values.first().copied().unwrap_or(missing)),
        None => Ok(missing),
    };
    let (low, high) = (bound(low, i64::MIN)?, bound(high, i64::MAX)?);
    from_ints(x.ints(x.dims())?.into_iter().map(|value| value.max(low).min(high)).collect(), x.dims())
}

pub(super) fn cast(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let to = DataType::try_from(i32::try_from(int(call.node, "to", 0)).unwrap_or(0)).unwrap_or(DataType::Undefined);
    match (to, x.is_float()) {
        (DataType::Float, _) => from_floats(x.floats(x.dims())?, x.dims()),
        (DataType::Bool, true) => from_ints(x.floats(x.dims())?.into_iter().map(|value| i64::from(value != 0.0)).collect(), x.dims()),
        (DataType::Bool, false) => from_ints(x.ints(x.dims())?.into_iter().map(|value| i64::from(value != 0)).collect(), x.dims()),
        (_, true) => from_ints(x.floats(x.dims())?.into_iter().map(|value| wrapped(value as i64, to)).collect(), x.dims()),
        (_, false) => from_ints(x.ints(x.dims())?.into_iter().map(|value| wrapped(value, to)).collect(), x.dims()),
    }
}

//! Rotary position embeddings. All layers share the tables for the current length.

use super::super::proto::{AttributeProto, DataType};
use super::{Lowering, kv_cache};
use crate::error::Result;
use crate::ir::ops::{GridRotary, PositionScale, Rotary, RotaryScaling};

pub(super) fn rotary(op: &Rotary, n: &mut Lowering) -> Result<()> {
    let width = n.fixed(0, 3)?;
    let rotated = op.turned(usize::try_from(width).unwrap_or(0)) as i64;
    let tables = [table(op, rotated, "Cos", n)?, table(op, rotated, "Sin", n)?];
    rotate(tables, (rotated, width), n);
    Ok(())
}

/// Rotates the first elements of heads, of which the widths are given, by angles with these cosines and
/// sines.
pub(super) fn rotate([cos, sin]: [String; 2], (rotated, width): (i64, i64), n: &mut Lowering) {
    let (x, half, axis) = (n.input(0), rotated / 2, vec![AttributeProto::int("axis", 3)]);
    let (a, b, rest) = if rotated < width {
        let parts = n.ints(&[half, half, width - rotated]);
        let [a, b, rest] = n.emit_many("Split", ["first", "second", "rest"], &[&x, &parts], axis.clone());
        (a, b, Some(rest))
    } else {
        let halves = n.ints(&[half, half]);
        let [a, b] = n.emit_many("Split", ["first", "second"], &[&x, &halves], axis.clone());
        (a, b, None)
    };
    let a_cos = n.emit("Mul", "first_cos", &[&a, &cos], vec![]);
    let b_sin = n.emit("Mul", "second_sin", &[&b, &sin], vec![]);
    let a_sin = n.emit("Mul", "first_sin", &[&a, &sin], vec![]);
    let b_cos = n.emit("Mul", "second_cos", &[&b, &cos], vec![]);
    let first = n.emit("Sub", "turned_first", &[&a_cos, &b_sin], vec![]);
    let second = n.emit("Add", "turned_second", &[&a_sin, &b_cos], vec![]);
    let parts: Vec<&str> = [Some(&first), Some(&second), rest.as_ref()].into_iter().flatten().map(String::as_str).collect();
    n.finish("Concat", &parts, axis);
}

/// Rotary embeddings of image patches. All layers share the angles, which are constants.
pub(super) fn grid_rotary(op: &GridRotary, n: &mut Lowering) -> Result<()> {
    let (patches, width) = (n.fixed(0, 2)?, n.fixed(0, 3)?);
    let angles = n.share(&format!("grid_rotary|{width}|{op:?}"), |n| {
        let angles = op.angles(usize::try_from(width).unwrap_or(0));
        let (flat, shape) = (n.own_floats("flat_angles", &angles), n.ints(&[patches, width / 2]));
        Ok(n.emit("Reshape", "angles", &[&flat, &shape], vec![]))
    })?;
    let mut tables = [String::new(), String::new()];
    for (table, function) in tables.iter_mut().zip(["Cos", "Sin"]) {
        *table = n.share(&format!("grid_rotary/{function}|{width}|{op:?}"), |n| {
            let table = n.emit(function, "table", &[&angles], vec![]);
            Ok(n.narrow("narrow", table))
        })?;
    }
    rotate(tables, (width, width), n);
    Ok(())
}

/// Cosine or sine table of the rotated dimensions, `[sequence, width / 2]`; `[batch, 1, sequence, width
/// / 2]` if positions are an input.
fn table(op: &Rotary, width: i64, function: &str, n: &mut Lowering) -> Result<String> {
    let width = width as usize;
    let what = format!("|{}|{width}|{op:?}", n.ty(0)?.shape[2]);
    let angles = n.share(&format!("rotary{what}"), |n| {
        let frequencies = frequencies(op, width, n)?;
        let (positions_input, column) = positions(n)?;
        let positions = n.cast("positions", &positions_input, DataType::Float);
        let positions = n.emit("Unsqueeze", "column", &[&positions, &column], vec![]);
        Ok(n.emit("Mul", "angles", &[&positions, &frequencies], vec![]))
    })?;
    n.share(&format!("rotary/{function}{what}"), |n| {
        let table = n.emit(function, "table", &[&angles], vec![]);
        let (_, factor) = op.frequencies(width, 0);
        if factor == 1.0 {
            return Ok(n.narrow("narrow", table));
        }
        let factor = n.float_wide(factor);
        let table = n.emit("Mul", "scaled", &[&table, &factor], vec![]);
        Ok(n.narrow("narrow", table))
    })
}

/// Token positions along the sequence axis of heads, and the axes to add to them.
fn positions(n: &mut Lowering) -> Result<(String, String)> {
    Ok(match n.cache {
        Some(_) => (kv_cache::positions(n), n.ints(&[1, 3])),
        None => (n.range(0, 2)?, n.ints(&[1])),
    })
}

/// The scales of the current length are shared by all layers.
pub(super) fn position_scale(op: &PositionScale, n: &mut Lowering) -> Result<()> {
    let x = n.input(0);
    let scales = n.share(&format!("position_scale|{}|{op:?}", n.ty(0)?.shape[2]), |n| {
        let (positions, column) = positions(n)?;
        let (offset, interval) = (n.int(op.offset as i64), n.int(op.interval as i64));
        let count = n.emit("Add", "count", &[&positions, &offset], vec![]);
        let intervals = n.emit("Div", "intervals", &[&count, &interval], vec![]);
        let intervals = n.cast("intervals_float", &intervals, DataType::Float);
        let (one, factor) = (n.float_wide(1.0), n.float_wide(op.factor));
        let more = n.emit("Add", "more", &[&intervals, &one], vec![]);
        let logarithm = n.emit("Log", "logarithm", &[&more], vec![]);
        let grown = n.emit("Mul", "grown", &[&logarithm, &factor], vec![]);
        let scales = n.emit("Add", "scales", &[&grown, &one], vec![]);
        let scales = n.emit("Unsqueeze", "column", &[&scales, &column], vec![]);
        Ok(n.narrow("narrow", scales))
    })?;
    n.finish("Mul", &[&x, &scales], vec![]);
    Ok(())
}

/// Angles per position. If they depend on the length, they are computed at run time.
fn frequencies(op: &Rotary, width: usize, n: &mut Lowering) -> Result<String> {
    match &op.scaling {
        RotaryScaling::LongRope { original, .. } => {
            let short = n.floats("rotary/short_frequencies", &op.frequencies(width, 0).0);
            let long = n.floats("rotary/long_frequencies", &op.frequencies(width, original + 1).0);
            let size = if n.cache.is_some() { kv_cache::length(n)? } else { n.size(0, 2)? };
            let limit = n.int(*original as i64);
            let longer = n.emit("Greater", "is_long", &[&size, &limit], vec![]);
            Ok(n.emit("Where", "frequencies", &[&longer, &long, &short], vec![]))
        }
        RotaryScaling::Dynamic { factor, max_position } => {
            // In double precision, because errors grow with the position.
            let (longest, elements) = (*max_position as f64, width as f64);
            let exponents: Vec<f64> = (0..width / 2).map(|i| -2.0 * i as f64 / elements).collect();
            let size = n.size(0, 2)?;
            let size = n.cast("length", &size, DataType::Double);
            let mut scalar = |name: &str, value: f64| n.doubles(&format!("rotary/{name}"), &[], &[value]);
            let (limit, slope, offset) = (scalar("max_position", longest), scalar("slope", factor / longest), scalar("offset", factor - 1.0));
            let (power, theta) = (scalar("power", elements / (elements - 2.0)), scalar("theta", op.theta));
            let exponents = n.doubles("rotary/exponents", &[exponents.len() as i64], &exponents);
            let length = n.emit("Max", "at_least", &[&size, &limit], vec![]);
            let growth = n.emit("Mul", "stretched", &[&length, &slope], vec![]);
            let growth = n.emit("Sub", "growth", &[&growth, &offset], vec![]);
            let growth = n.emit("Pow", "base_growth", &[&growth, &power], vec![]);
            let base = n.emit("Mul", "base", &[&growth, &theta], vec![]);
            let frequencies = n.emit("Pow", "frequencies_double", &[&base, &exponents], vec![]);
            Ok(n.cast("frequencies", &frequencies, DataType::Float))
        }
        _ => Ok(n.floats("rotary/frequencies", &op.frequencies(width, 0).0)),
    }
}

//! Reshaping, transposition, concatenation, padding and slicing.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error;
use crate::ir::Dim;
use crate::ir::ops::{Concat, Pad, PadMode, Reshape, Slice, TargetSize, Transpose};

pub(super) fn reshape(op: &Reshape, n: &mut Lowering) -> error::Result<()> {
    let from = &n.ty(0)?.shape;
    let known = |axis: &usize| from.get(*axis).and_then(Dim::fixed);
    let mut rest = op.shape.contains(&TargetSize::Rest);
    let empty = op.shape.contains(&TargetSize::Number(0));
    // In ONNX, 0 copies the size of the same axis, and -1 is inferred.
    let mut sizes = Vec::with_capacity(op.shape.len());
    for (at, size) in op.shape.iter().enumerate() {
        sizes.push(match size {
            TargetSize::Number(size) => Ok(*size as i64),
            TargetSize::Copy(axis) if known(axis).is_some() => Ok(known(axis).unwrap_or(0) as i64),
            TargetSize::Copy(axis) if *axis == at && !empty => Ok(0),
            TargetSize::Copy(_) if !rest => {
                rest = true;
                Ok(-1)
            }
            TargetSize::Copy(axis) => Err(*axis),
            TargetSize::Rest => Ok(-1),
        });
    }
    let attributes = if empty { vec![AttributeProto::int("allowzero", 1)] } else { vec![] };
    let numbers: Option<Vec<i64>> = sizes.iter().map(|size| size.ok()).collect();
    let shape = match numbers {
        Some(numbers) => n.ints(&numbers),
        None => {
            let x = n.input(0);
            sizes_of(&x, &sizes, n)
        }
    };
    n.finish("Reshape", &[&n.input(0), &shape], attributes);
    Ok(())
}

/// A vector of constants (`Ok`) and sizes of axes of `x` (`Err`).
pub(super) fn sizes_of(x: &str, sizes: &[Result<i64, usize>], n: &mut Lowering) -> String {
    let mut parts = Vec::with_capacity(sizes.len());
    for size in sizes {
        parts.push(match size {
            Ok(number) => n.ints(&[*number]),
            Err(axis) => {
                let axis = *axis as i64;
                n.emit("Shape", "size", &[x], vec![AttributeProto::int("start", axis), AttributeProto::int("end", axis + 1)])
            }
        });
    }
    n.emit("Concat", "shape", &parts.iter().map(String::as_str).collect::<Vec<_>>(), vec![AttributeProto::int("axis", 0)])
}

pub(super) fn pad(op: &Pad, n: &mut Lowering) -> error::Result<()> {
    let mode = match op.mode {
        PadMode::Constant => "constant",
        PadMode::Reflect => "reflect",
        PadMode::Edge => "edge",
        PadMode::Wrap if n.opset < 19 => {
            return Err(n.node_error(format!(
                "has the padding mode `wrap`, which ONNX supports from opset 19 on, but the file has opset {}: set `opset: 19`",
                n.opset
            )));
        }
        PadMode::Wrap => "wrap",
    };
    let rank = n.ty(0)?.shape.len();
    let pads = if op.pads.is_empty() { vec![0; 2 * rank] } else { op.pads.clone() };
    let (pads, value) = (n.ints(&pads), n.float(op.value));
    let x = n.input(0);
    let inputs = [x.as_str(), &pads, &value];
    n.finish("Pad", if op.mode == PadMode::Constant { &inputs } else { &inputs[..2] }, vec![AttributeProto::text("mode", mode)]);
    Ok(())
}

pub(super) fn transpose(op: &Transpose, n: &mut Lowering) -> error::Result<()> {
    let attributes = if op.perm.is_empty() { vec![] } else { vec![AttributeProto::ints("perm", op.perm.iter().map(|axis| *axis as i64))] };
    n.finish("Transpose", &[&n.input(0)], attributes);
    Ok(())
}

pub(super) fn concat(op: &Concat, n: &mut Lowering) -> error::Result<()> {
    let inputs: Vec<String> = (0..n.inputs()).map(|i| n.input(i)).collect();
    n.finish("Concat", &inputs.iter().map(String::as_str).collect::<Vec<_>>(), vec![AttributeProto::int("axis", op.axis)]);
    Ok(())
}

pub(super) fn slice(op: &Slice, n: &mut Lowering) -> error::Result<()> {
    let end = match op.length {
        Some(length) => op.start.saturating_add((length as i64).saturating_mul(op.step)),
        None => (op.rest as i64).saturating_neg(),
    };
    // A negative end would be counted from the other end of the axis.
    let end = match end {
        0.. if op.start < 0 && op.step > 0 => i64::MAX,
        0 if op.length.is_none() => i64::MAX,
        ..0 if op.start >= 0 && op.step < 0 => i64::MIN,
        end => end,
    };
    let [start, end, axis] = [op.start, end, op.axis].map(|v| n.ints(&[v]));
    let step = (op.step != 1).then(|| n.ints(&[op.step]));
    let x = n.input(0);
    let inputs = [x.as_str(), &start, &end, &axis].into_iter().chain(step.as_deref());
    n.finish("Slice", &inputs.collect::<Vec<_>>(), vec![]);
    Ok(())
}

//! Linear layers, convolutions and binary operators.

use super::super::proto::AttributeProto;
use super::image::{pads, per_axis};
use super::{Lowering, integer};
use crate::error::Result;
use crate::ir::ops::{Conv, ConvTranspose, Linear};

pub(super) fn binary(op: &str, n: &mut Lowering) -> Result<()> {
    n.finish(op, &[&n.input(0), &n.input(1)], vec![]);
    Ok(())
}

/// `Gemm` for matrices, `MatMul` and `Add` for other ranks. Runtimes fuse them only with operands in
/// this order.
pub(super) fn linear(op: &Linear, n: &mut Lowering) -> Result<()> {
    if n.layout(1).is_some_and(|layout| layout.integers.is_some()) {
        return integer::linear(op, n);
    }
    let (x, mut weight) = (n.input(0), n.input(1));
    let bias = (n.inputs() > 2).then(|| n.input(2));
    if n.ty(0)?.shape.len() == 2 {
        let mut inputs = vec![x.as_str(), weight.as_str()];
        inputs.extend(bias.as_deref());
        n.finish("Gemm", &inputs, vec![AttributeProto::int("transB", i64::from(!op.input_major))]);
        return Ok(());
    }
    if !op.input_major && !n.layout(1).is_some_and(|layout| layout.transposed()) {
        weight = n.share(&format!("{weight}/transposed|"), |n| Ok(n.emit("Transpose", "value", &[&weight], vec![AttributeProto::ints("perm", [1, 0])])))?;
    }
    match bias {
        None => n.finish("MatMul", &[&x, &weight], vec![]),
        Some(bias) => {
            let product = n.emit("MatMul", "product", &[&x, &weight], vec![]);
            n.finish("Add", &[&product, &bias], vec![]);
        }
    }
    Ok(())
}

pub(super) fn conv(op: &Conv, n: &mut Lowering) -> Result<()> {
    let rank = n.ty(0)?.shape.len();
    let attributes = vec![
        AttributeProto::ints("kernel_shape", (2..rank).map(|axis| n.fixed(1, axis)).collect::<Result<Vec<_>>>()?),
        per_axis("strides", op.stride, rank),
        pads(op.padding, rank),
        per_axis("dilations", op.dilation, rank),
        AttributeProto::int("group", op.groups as i64),
    ];
    if n.layout(1).is_some_and(|layout| layout.integers.is_some()) {
        return integer::conv(attributes, n);
    }
    let inputs: Vec<String> = (0..n.inputs()).map(|i| n.input(i)).collect();
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    n.finish("Conv", &inputs, attributes);
    Ok(())
}

/// The padding of a mask `[batch, sequence]`, with an axis for the channels of each token.
pub(super) fn padding_rows(n: &mut Lowering, mask: usize) -> String {
    let (last, zero) = (n.ints(&[2]), n.int(0));
    let padded = n.emit("Equal", "padded", &[&n.input(mask), &zero], vec![]);
    n.emit("Unsqueeze", "padded_rows", &[&padded, &last], vec![])
}

/// A convolution of the transposed rows, padded at the start.
pub(super) fn causal_conv(n: &mut Lowering) -> Result<()> {
    let (mut x, kernel) = (n.input(0), n.fixed(1, 2)?);
    let mut inputs = Vec::new();
    for index in 2..n.inputs() {
        if n.ty(index)?.shape.len() == 1 {
            inputs.push(n.input(index));
            continue;
        }
        let padded = padding_rows(n, index);
        let nothing = n.float(0.0);
        x = n.emit("Where", "read", &[&padded, &nothing, &x], vec![]);
    }
    let swapped = || vec![AttributeProto::ints("perm", [0, 2, 1])];
    let columns = n.emit("Transpose", "columns", &[&x], swapped());
    let attributes = vec![
        AttributeProto::ints("kernel_shape", [kernel]),
        AttributeProto::ints("pads", [kernel.saturating_sub(1), 0]),
        AttributeProto::int("group", n.fixed(1, 0)?),
    ];
    let weight = n.input(1);
    let inputs: Vec<&str> = [columns.as_str(), weight.as_str()].into_iter().chain(inputs.iter().map(String::as_str)).collect();
    let product = n.emit("Conv", "convolved", &inputs, attributes);
    n.finish("Transpose", &[&product], swapped());
    Ok(())
}

pub(super) fn conv_transpose(op: &ConvTranspose, n: &mut Lowering) -> Result<()> {
    let rank = n.ty(0)?.shape.len();
    let mut attributes = vec![
        AttributeProto::ints("kernel_shape", (2..rank).map(|axis| n.fixed(1, axis)).collect::<Result<Vec<_>>>()?),
        per_axis("strides", op.stride, rank),
        pads(op.padding, rank),
        per_axis("dilations", op.dilation, rank),
        AttributeProto::int("group", op.groups as i64),
    ];
    attributes.extend((op.output_padding != 0).then(|| per_axis("output_padding", op.output_padding, rank)));
    let inputs: Vec<String> = (0..n.inputs()).map(|i| n.input(i)).collect();
    n.finish("ConvTranspose", &inputs.iter().map(String::as_str).collect::<Vec<_>>(), attributes);
    Ok(())
}

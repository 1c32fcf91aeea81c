//! Layers whose weights are int8, in the forms that ONNX Runtime turns into integer kernels.
//!
//! All of it works on 32-bit floats, whatever the width of the model's: the quantizer of ONNX takes nothing else.

use super::super::proto::{AttributeProto, DataType};
use super::Speller;
use crate::error::Result;
use crate::ir::ops::Linear;
use crate::store::{Activations, Affine, Granularity};

/// The tensors of a weight, by name.
struct Integers {
    affine: Affine,
    values: String,
    scales: String,
    zero_points: Option<String>,
    /// Whether the elements are stored as the product takes them, `[in, out]`.
    ready: bool,
}

impl Integers {
    fn of(n: &Speller) -> Result<Self> {
        let missing = || n.wrong("reads a weight that is not quantized as if it were".into());
        let slot = n.place(1).ok_or_else(missing)?;
        let affine = slot.integers.clone().ok_or_else(missing)?;
        let mut names = slot.tensors.iter().map(|tensor| tensor.name.clone());
        let (values, scales) = (names.next().unwrap_or_default(), names.next().unwrap_or_default());
        Ok(Self { affine, values, scales, zero_points: names.next(), ready: slot.transposed })
    }

    /// The tensors with axes swapped, as the product takes them; runtimes do that once, when they load the file.
    fn turn(&mut self, n: &mut Speller) -> Result<()> {
        let mut names = vec![&mut self.values];
        if matches!(self.affine.granularity, Granularity::Group(_)) {
            names.push(&mut self.scales);
            names.extend(self.zero_points.as_mut());
        }
        for name in names {
            let turned =
                n.share(&format!("{name}/transposed|"), |n| Ok(n.emit("Transpose", "value", &[name.as_str()], vec![AttributeProto::ints("perm", [1, 0])])))?;
            *name = turned;
        }
        Ok(())
    }

    /// The floats that they stand for.
    fn dequantize(&self, axis: i64, n: &mut Speller) -> Result<String> {
        let attributes = match self.affine.granularity {
            Granularity::Tensor => vec![],
            Granularity::Channel => vec![AttributeProto::int("axis", axis)],
            Granularity::Group(size) => vec![AttributeProto::int("axis", axis), AttributeProto::int("block_size", size as i64)],
        };
        let mut inputs = vec![self.values.as_str(), &self.scales];
        inputs.extend(self.zero_points.as_deref());
        n.share(&format!("{}/floats|", self.values), |n| Ok(n.emit("DequantizeLinear", "value", &inputs, attributes)))
    }
}

pub(super) fn linear(op: &Linear, n: &mut Speller) -> Result<()> {
    let mut weight = Integers::of(n)?;
    if !op.input_major && !weight.ready {
        weight.turn(n)?;
    }
    let x = n.wide(&n.input(0))?;
    let bias = (n.inputs() > 2).then(|| n.input(2));
    // The bias of a layer is 32 bits wide unless something else reads it too.
    let bias = match bias {
        Some(bias) if n.place(2).is_none_or(|place| place.tensors[0].data_type != DataType::Float) => Some(n.wide(&bias)?),
        other => other,
    };
    let grouped = matches!(weight.affine.granularity, Granularity::Group(_));
    let (op, inputs) = if weight.affine.activations == Activations::None || grouped {
        // Scales run along the outputs, those of groups along the inputs of each; stored input-major, it is the other way round.
        let axis = i64::from(op.input_major == grouped);
        let floats = weight.dequantize(axis, n)?;
        ("MatMul", [x, floats])
    } else if op.input_major && weight.affine.granularity == Granularity::Channel {
        scaled_inputs(&weight, &x, n)?
    } else {
        let scales = weight.scales.clone();
        product(&weight, &x, &scales, weight.zero_points.clone(), n)?
    };
    let inputs = [inputs[0].as_str(), &inputs[1]];
    match bias {
        None => n.finish_wide(op, &inputs, vec![]),
        Some(bias) => {
            let product = n.emit(op, "product", &inputs, vec![]);
            n.finish_wide("Add", &[&product, &bias], vec![]);
        }
    }
    Ok(())
}

/// An operator that is still to be written, and what it reads.
type Pending = (&'static str, [String; 2]);

/// The integer product of a value that is quantized as it comes; layers that read the same value share its quantizer.
fn product(weight: &Integers, x: &str, scales: &str, zero_points: Option<String>, n: &mut Speller) -> Result<Pending> {
    let [integers, scale, zero_point] =
        n.share_many(&format!("{x}/quantized|"), |n| Ok(n.emit_many("DynamicQuantizeLinear", ["integers", "scale", "zero_point"], &[x], vec![])))?;
    // In this order of operands: only so is the form recognised.
    let scale = n.emit("Mul", "scale", &[&scale, scales], vec![]);
    let mut inputs = vec![integers.as_str(), &weight.values, &zero_point];
    inputs.extend(zero_points.as_deref());
    let sums = n.emit("MatMulInteger", "sums", &inputs, vec![]);
    let sums = n.cast("sums_float", &sums, DataType::Float);
    Ok(("Mul", [sums, scale]))
}

/// A weight with a scale for each *input* cannot be multiplied as integers, but the input can take the scales over.
fn scaled_inputs(weight: &Integers, x: &str, n: &mut Speller) -> Result<Pending> {
    let width = n.fixed(1, 1)?;
    let x = n.emit("Mul", "scaled_input", &[x, &weight.scales], vec![]);
    let ones = n.floats(&format!("ones/{width}"), &vec![1.0; width as usize]);
    let (op, inputs) = product(weight, &x, &ones, None, n)?;
    let Some(zero_points) = &weight.zero_points else { return Ok((op, inputs)) };
    let axis = n.ints(&[1]);
    let zero_points = n.cast("zero_points", zero_points, DataType::Float);
    let column = n.emit("Unsqueeze", "zero_point_column", &[&zero_points, &axis], vec![]);
    let offset = n.emit("MatMul", "offset", &[&x, &column], vec![]);
    let product = n.emit(op, "uncentred", &[&inputs[0], &inputs[1]], vec![]);
    Ok(("Sub", [product, offset]))
}

/// Rows are looked up as integers, so that only they are turned into floats, never the whole table.
pub(super) fn embedding(n: &mut Speller) -> Result<()> {
    let table = Integers::of(n)?;
    let tokens = n.input(0);
    let gather = |n: &mut Speller, part: &str, from: &str| n.emit("Gather", part, &[from, &tokens], vec![AttributeProto::int("axis", 0)]);
    let rows = gather(n, "rows", &table.values);
    if table.affine.granularity == Granularity::Tensor {
        let mut inputs = vec![rows.as_str(), &table.scales];
        inputs.extend(table.zero_points.as_deref());
        n.finish_wide("DequantizeLinear", &inputs, vec![]);
        return Ok(());
    }
    let last = n.ints(&[-1]);
    let mut values = n.cast("values", &rows, DataType::Float);
    let rank = n.ty(0)?.shape.len();
    let width = n.width(1)?;
    let mut shape = vec![0; rank];
    if let Granularity::Group(size) = table.affine.granularity {
        shape.extend([width / size as i64, size as i64]);
        let groups = n.ints(&shape);
        values = n.emit("Reshape", "groups", &[&values, &groups], vec![]);
        shape.truncate(rank);
    }
    if let Some(zero_points) = &table.zero_points {
        let zero_points = gather(n, "row_zero_points", zero_points);
        let zero_points = n.cast("zero_points", &zero_points, DataType::Float);
        let zero_points = n.emit("Unsqueeze", "zero_point_column", &[&zero_points, &last], vec![]);
        values = n.emit("Sub", "centred", &[&values, &zero_points], vec![]);
    }
    let scales = gather(n, "row_scales", &table.scales);
    let scales = n.emit("Unsqueeze", "scale_column", &[&scales, &last], vec![]);
    if let Granularity::Group(_) = table.affine.granularity {
        shape.push(width);
        let flat = n.ints(&shape);
        let values = n.emit("Mul", "scaled", &[&values, &scales], vec![]);
        n.finish_wide("Reshape", &[&values, &flat], vec![]);
    } else {
        n.finish_wide("Mul", &[&values, &scales], vec![]);
    }
    Ok(())
}

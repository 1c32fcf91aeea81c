//! Layers whose weights are int8, in the forms that ONNX Runtime turns into integer kernels.
//!
//! All of it works on 32-bit floats, whatever the width of the model's: the quantizer of ONNX takes nothing else.

use super::super::proto::{AttributeProto, DataType};
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{CacheQuantize, FakeQuantize, LearnedFakeQuantize, Linear};
use crate::kernel::cache::CacheFormat;
use crate::store::{ActivationScheme, Affine, Blocks, Granularity, StorageFormat};

/// The tensors of a weight, by name.
struct Integers {
    affine: Affine,
    values: String,
    scales: String,
    zero_points: Option<String>,
    /// Whether the elements were transposed from `[out, in]` to `[in, out]`, as the product takes them.
    ready: bool,
    /// Whether they are `[in, out]` to begin with.
    input_major: bool,
    storage_format: StorageFormat,
}

impl Integers {
    fn of(n: &Lowering) -> Result<Self> {
        let missing = || n.wrong("reads a weight that is not quantized as if it were".into());
        let slot = n.place(1).ok_or_else(missing)?;
        let affine = slot.integers.clone().ok_or_else(missing)?;
        let mut names = slot.tensors.iter().map(|tensor| tensor.name.clone());
        let (values, scales) = (names.next().unwrap_or_default(), names.next().unwrap_or_default());
        Ok(Self { affine, values, scales, zero_points: names.next(), ready: slot.transposed(), input_major: false, storage_format: slot.storage_format })
    }

    /// The tensors with axes swapped, as the product takes them; runtimes do that once, when they load the file.
    fn turn(&mut self, n: &mut Lowering) -> Result<()> {
        let grouped = self.grouped();
        let mut names = vec![&mut self.values];
        if grouped {
            names.push(&mut self.scales);
            names.extend(self.zero_points.as_mut());
        }
        for name in names {
            let transposed =
                n.share(&format!("{name}/transposed|"), |n| Ok(n.emit("Transpose", "value", &[name.as_str()], vec![AttributeProto::ints("perm", [1, 0])])))?;
            *name = transposed;
        }
        Ok(())
    }

    fn grouped(&self) -> bool {
        matches!(self.affine.granularity, Granularity::Group(_))
    }

    /// The zero points, also where all are zero: where ONNX Runtime looks for exact sums on x86 without VNNI, it takes none for one
    /// that all channels share, and then refuses it.
    fn written_zero_points(&self, n: &mut Lowering) -> Result<Option<String>> {
        let (rows, columns) = (n.fixed(1, 0)?, n.fixed(1, 1)?);
        Ok(match (&self.zero_points, self.affine.granularity) {
            (Some(zero_points), _) => Some(zero_points.clone()),
            _ if matches!(self.storage_format, StorageFormat::Halves { .. }) => None,
            (None, Granularity::Tensor) => None,
            (None, Granularity::Channel) => Some(n.own_int8_zeros(Some(if self.input_major { columns } else { rows } as usize))),
            (None, Granularity::Group(size) | Granularity::Block([_, size])) => {
                let size = size as i64;
                let shape = n.ints(&if self.input_major { [rows, columns / size] } else { [columns / size, rows] });
                let zero = n.own_int8_zeros(None);
                Some(n.emit("Expand", "zero_points", &[&zero, &shape], vec![]))
            }
        })
    }

    /// The floats that they stand for, as a matrix. Scales run along the outputs, those of groups along what was a row in the checkpoint.
    fn dequantize(&self, n: &mut Lowering) -> Result<String> {
        let axis = |axis| AttributeProto::int("axis", axis);
        let attributes = match self.affine.granularity {
            Granularity::Tensor => vec![],
            Granularity::Channel => vec![axis(1)],
            Granularity::Group(size) | Granularity::Block([_, size]) => vec![axis(i64::from(self.input_major)), AttributeProto::int("block_size", size as i64)],
        };
        self.dequantized(n, attributes)
    }

    /// The node that does so, of this layer alone: kernels take over only weights that nobody else reads.
    fn dequantized(&self, n: &mut Lowering, attributes: Vec<AttributeProto>) -> Result<String> {
        let zero_points = self.written_zero_points(n)?;
        let mut inputs = vec![self.values.as_str(), &self.scales];
        inputs.extend(zero_points.as_deref());
        Ok(n.emit("DequantizeLinear", "weight", &inputs, attributes))
    }

    /// The same, for a matrix `[in, out]` that is read by others too: in operators that runtimes evaluate when they load the
    /// file. A `DequantizeLinear` would wait for each run, because kernels take over only weights that nobody else reads.
    fn floats(&self, n: &mut Lowering) -> Result<String> {
        let (outputs, inputs) = (n.fixed(1, 0)?, n.fixed(1, 1)?);
        n.share(&format!("{}/floats|", self.values), |n| {
            let mut values = n.cast("integers", &self.values, DataType::Float);
            let (mut scales, mut zero_points) = (self.scales.clone(), self.zero_points.clone());
            if let Granularity::Group(size) = self.affine.granularity {
                let (blocks, axis) = (n.ints(&[inputs / size as i64, size as i64, outputs]), n.ints(&[1]));
                values = n.emit("Reshape", "blocks", &[&values, &blocks], vec![]);
                scales = n.emit("Unsqueeze", "block_scales", &[&scales, &axis], vec![]);
                zero_points = zero_points.map(|points| n.emit("Unsqueeze", "block_zero_points", &[&points, &axis], vec![]));
            }
            if let Some(zero_points) = zero_points {
                let zero_points = n.cast("zero_points", &zero_points, DataType::Float);
                values = n.emit("Sub", "centred", &[&values, &zero_points], vec![]);
            }
            values = n.emit("Mul", "value", &[&values, &scales], vec![]);
            if self.grouped() {
                let shape = n.ints(&[inputs, outputs]);
                values = n.emit("Reshape", "flat", &[&values, &shape], vec![]);
            }
            Ok(values)
        })
    }

    /// The dequantized kernel of a convolution, outputs first, in operators that runtimes evaluate when they load the file.
    fn kernel_floats(&self, n: &mut Lowering) -> Result<String> {
        let mut shape = vec![1; n.ty(1)?.shape.len()];
        shape[0] = -1;
        n.share(&format!("{}/floats|", self.values), |n| {
            let mut values = n.cast("integers", &self.values, DataType::Float);
            let shape = n.ints(&shape);
            if let Some(zero_points) = &self.zero_points {
                let zero_points = n.cast("zero_points", zero_points, DataType::Float);
                let zero_points = n.emit("Reshape", "channel_zero_points", &[&zero_points, &shape], vec![]);
                values = n.emit("Sub", "centred", &[&values, &zero_points], vec![]);
            }
            let scales = n.emit("Reshape", "channel_scales", &[&self.scales, &shape], vec![]);
            Ok(n.emit("Mul", "value", &[&values, &scales], vec![]))
        })
    }
}

pub(super) fn linear(op: &Linear, n: &mut Lowering) -> Result<()> {
    let mut weight = Integers::of(n)?;
    weight.input_major = op.input_major;
    let x = n.wide(&n.input(0))?;
    if let Some(bias) = bias_of_sums(n) {
        // Such layers see matrices, of which ONNX Runtime makes integer kernels only with zero points that are written out.
        let count = if weight.affine.granularity == Granularity::Tensor { None } else { Some(n.fixed(1, 0)? as usize) };
        weight.zero_points = Some(n.own_int8_zeros(count));
        let product = product(weight, &x, n)?.emit("product", n);
        n.finish_wide("Add", &[&product, &bias], vec![]);
        return Ok(());
    }
    // The bias of a layer is 32 bits wide unless something else reads it too.
    let bias = match (n.inputs() > 2).then(|| n.input(2)) {
        Some(bias) if n.place(2).is_none_or(|place| place.tensors[0].data_type != DataType::Float) => Some(n.wide(&bias)?),
        other => other,
    };
    let pending = if op.input_major && weight.affine.granularity == Granularity::Channel { scaled_inputs(weight, &x, n)? } else { product(weight, &x, n)? };
    match bias {
        None => n.finish_wide(pending.op, &pending.operands(), pending.attributes.clone()),
        Some(bias) => {
            // Of a product and an `Add`, ONNX Runtime makes a `Gemm` of floats before it looks at the integers: of all ranks, where it knows
            // the sizes.
            let add = if pending.op == "MatMul" { "Sum" } else { "Add" };
            let product = pending.emit("product", n);
            n.finish_wide(add, &[&product, &bias], vec![]);
        }
    }
    Ok(())
}

/// A bias that is stored as integers, as the floats that they stand for.
fn bias_of_sums(n: &mut Lowering) -> Option<String> {
    let [integers, scales] = n.slots(2) else { return None };
    let [integers, scales] = [integers, scales].map(|slot| slot.tensors[0].name.clone());
    Some(n.emit("DequantizeLinear", "bias", &[&integers, &scales], vec![AttributeProto::int("axis", 0)]))
}

/// A convolution with int8 weights; between quantized values, ONNX Runtime runs it in integers.
pub(super) fn conv(attributes: Vec<AttributeProto>, n: &mut Lowering) -> Result<()> {
    let weight = Integers::of(n)?;
    let x = n.wide(&n.input(0))?;
    let axis = match weight.affine.granularity {
        Granularity::Tensor => vec![],
        _ => vec![AttributeProto::int("axis", 0)],
    };
    let kernel = if n.is_first_layer_of_weight() { weight.dequantized(n, axis)? } else { weight.kernel_floats(n)? };
    let mut inputs = vec![x, kernel];
    match bias_of_sums(n) {
        Some(bias) => inputs.push(bias),
        None if n.inputs() > 2 => inputs.push(n.wide(&n.input(2))?),
        None => {}
    }
    n.finish_wide("Conv", &inputs.iter().map(String::as_str).collect::<Vec<_>>(), attributes);
    Ok(())
}

/// A value that goes through eight bits: in this form, ONNX Runtime makes integer kernels of what stands between two of them.
pub(super) fn fake_quantize(op: &FakeQuantize, n: &mut Lowering) -> Result<()> {
    let scale = n.float_wide(op.scale.into());
    rounded(&scale, op.zero_point, n)
}

/// The same with a scale that is computed.
pub(super) fn learned_fake_quantize(op: &LearnedFakeQuantize, n: &mut Lowering) -> Result<()> {
    let logarithm = n.wide(&n.input(1))?;
    let factor = n.emit("Exp", "factor", &[&logarithm], vec![]);
    let base = n.float_wide(op.scale.into());
    let scale = n.emit("Mul", "scale", &[&factor, &base], vec![]);
    let scale = n.emit("Squeeze", "scalar", &[&scale], vec![]);
    rounded(&scale, op.zero_point, n)
}

/// Keys or values as a cache of eight bits gives them back. ONNX has floats of eight bits from opset 19 on; they are made by casts, because
/// ONNX Runtime moves a `DequantizeLinear` behind operators that do not take them.
pub(super) fn cache_quantize(op: CacheQuantize, n: &mut Lowering) -> Result<()> {
    let (x, scale) = (n.wide(&n.input(0))?, n.wide(&n.input(1))?);
    if op.format == CacheFormat::Int8 {
        let zero_point = n.zero_of(DataType::Int8);
        let codes = n.emit("QuantizeLinear", "codes", &[&x, &scale, &zero_point], vec![]);
        n.finish_wide("DequantizeLinear", &[&codes, &scale, &zero_point], vec![]);
        return Ok(());
    }
    if n.opset < 19 {
        return Err(n.wrong(format!("rounds to FP8 (`kv_cache: fp8`), which ONNX has from opset 19 on; this is opset {}: set `opset: 19`", n.opset)));
    }
    let steps = n.emit("Div", "steps", &[&x, &scale], vec![]);
    let codes = n.cast("codes", &steps, DataType::Float8E4m3);
    let rounded = n.cast("rounded", &codes, DataType::Float);
    n.finish_wide("Mul", &[&rounded, &scale], vec![]);
    Ok(())
}

fn rounded(scale: &str, zero_point: i32, n: &mut Lowering) -> Result<()> {
    let x = n.wide(&n.input(0))?;
    let zero_point = n.zero_point(zero_point);
    let integers = n.emit("QuantizeLinear", "integers", &[&x, scale, &zero_point], vec![]);
    if n.varies(0) {
        n.finish_wide("DequantizeLinear", &[&integers, scale, &zero_point], vec![]);
        return Ok(());
    }
    // Runtimes compute constants when they load the file, and leave this operator alone.
    let [integers, zero_point] = [("steps", integers), ("zero_steps", zero_point)].map(|(part, value)| n.cast(part, &value, DataType::Float));
    let centred = n.emit("Sub", "centred", &[&integers, &zero_point], vec![]);
    n.finish_wide("Mul", &[&centred, scale], vec![]);
    Ok(())
}

/// An operator that is still to be written, and what it reads.
struct Pending {
    op: &'static str,
    inputs: Vec<String>,
    attributes: Vec<AttributeProto>,
}

impl Pending {
    fn of(op: &'static str, inputs: [String; 2]) -> Self {
        Self { op, inputs: inputs.into(), attributes: Vec::new() }
    }

    fn operands(&self) -> Vec<&str> {
        self.inputs.iter().map(String::as_str).collect()
    }

    /// Writes it, for this node alone.
    fn emit(self, part: &str, n: &mut Lowering) -> String {
        n.emit(self.op, part, &self.operands(), self.attributes.clone())
    }
}

fn product(mut weight: Integers, x: &str, n: &mut Lowering) -> Result<Pending> {
    if let StorageFormat::Blocks(blocks) = weight.storage_format {
        return product_of_blocks(weight, blocks, x, n);
    }
    let shared = !weight.input_major && !weight.ready;
    if shared {
        weight.turn(n)?;
    }
    let is_head = shared && n.integer_heads.is_some() && !weight.grouped() && weight.affine.activations == ActivationScheme::None;
    let is_integer = is_head || weight.affine.activations == ActivationScheme::DynamicToken && !weight.grouped();
    // Products of constants are computed when the file is loaded, before ONNX Runtime looks for integer kernels.
    if is_integer && (!n.varies(0) || n.is_first_layer_of_weight()) {
        n.integer_heads = n.integer_heads.map(|heads| heads + usize::from(is_head));
        return integer_product(&weight, x, n);
    }
    // Of two products that read one weight, ONNX Runtime makes kernels under one name, and refuses the second. One of constants is
    // computed when the file is loaded, unless a `DequantizeLinear` stands before it.
    let whole = is_integer || !weight.input_major && (n.varying_readers(1) > 1 || !n.varies(0));
    let floats = if shared || whole { weight.floats(n)? } else { weight.dequantize(n)? };
    Ok(Pending::of("MatMul", [x.to_owned(), floats]))
}

/// A product that ONNX Runtime has an operator for, which computes it as the weights are defined: activations stay 32-bit floats.
fn product_of_blocks(weight: Integers, blocks: Blocks, x: &str, n: &Lowering) -> Result<Pending> {
    let (outputs, inputs) = (n.fixed(1, 0)?, n.fixed(1, 1)?);
    let attributes = [("K", inputs), ("N", outputs), ("bits", blocks.bits.into()), ("block_size", blocks.size as i64), ("accuracy_level", 1)];
    Ok(Pending {
        op: "com.microsoft::MatMulNBits",
        inputs: [x.to_owned(), weight.values, weight.scales].into_iter().chain(weight.zero_points).collect(),
        attributes: attributes.map(|(name, value)| AttributeProto::int(name, value)).into(),
    })
}

/// The product of a value that is quantized as it comes; layers that read the same value share its quantizer.
fn integer_product(weight: &Integers, x: &str, n: &mut Lowering) -> Result<Pending> {
    let [integers, scale, zero_point] =
        n.share_many(&format!("{x}/quantized|"), |n| Ok(n.emit_many("DynamicQuantizeLinear", ["integers", "scale", "zero_point"], &[x], vec![])))?;
    // In this order of operands: only so is the form recognised.
    let scale = n.emit("Mul", "scale", &[&scale, &weight.scales], vec![]);
    let mut inputs = vec![integers.as_str(), &weight.values, &zero_point];
    inputs.extend(weight.zero_points.as_deref());
    let sums = n.emit("MatMulInteger", "sums", &inputs, vec![]);
    let sums = n.cast("sums_float", &sums, DataType::Float);
    Ok(Pending::of("Mul", [sums, scale]))
}

/// A weight with a scale for each *input* has no integer kernel, but the input can take the scales over.
fn scaled_inputs(mut weight: Integers, x: &str, n: &mut Lowering) -> Result<Pending> {
    let width = n.fixed(1, 1)?;
    let x = n.emit("Mul", "scaled_input", &[x, &weight.scales], vec![]);
    // Of this layer alone: kernels take over only scales that nobody else reads.
    weight.scales = n.own_floats("ones", &vec![1.0; width as usize]);
    let Some(zero_points) = weight.zero_points.take() else { return product(weight, &x, n) };
    let axis = n.ints(&[1]);
    let zero_points = n.cast("zero_points", &zero_points, DataType::Float);
    let column = n.emit("Unsqueeze", "zero_point_column", &[&zero_points, &axis], vec![]);
    let offset = n.emit("MatMul", "offset", &[&x, &column], vec![]);
    let product = product(weight, &x, n)?.emit("uncentred", n);
    Ok(Pending::of("Sub", [product, offset]))
}

/// Rows are looked up as integers, so that only they become floats, never the whole table.
pub(super) fn embedding(n: &mut Lowering) -> Result<()> {
    let table = Integers::of(n)?;
    let (tokens, rank) = (n.input(0), n.ty(0)?.shape.len());
    let gather = |n: &mut Lowering, part: &str, from: &str| n.emit("Gather", part, &[from, &tokens], vec![AttributeProto::int("axis", 0)]);
    let rows = gather(n, "rows", &table.values);
    if table.affine.granularity == Granularity::Tensor {
        let mut inputs = vec![rows.as_str(), &table.scales];
        inputs.extend(table.zero_points.as_deref());
        n.finish_wide("DequantizeLinear", &inputs, vec![]);
        return Ok(());
    }
    let last = n.ints(&[-1]);
    let mut values = n.cast("values", &rows, DataType::Float);
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

//! Layers with int8 weights, in the patterns that ONNX Runtime fuses into integer kernels.
//!
//! All of them compute with 32-bit floats, even in models of 16-bit floats, because the quantizers of
//! ONNX require them.

use super::super::proto::{AttributeProto, DataType};
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{CacheQuantize, FakeQuantize, LearnedFakeQuantize, Linear};
use crate::kernel::cache::CacheFormat;
use crate::store::{ActivationScheme, Blocks, Granularity, QuantizationSpec, StorageFormat};

/// Names of the tensors of a quantized weight.
struct QuantizedWeight {
    affine: QuantizationSpec,
    values: String,
    scales: String,
    zero_points: Option<String>,
    /// Whether the elements are stored transposed, `[in, out]` instead of `[out, in]`.
    ready: bool,
    /// Whether the checkpoint has them as `[in, out]`.
    input_major: bool,
    storage_format: StorageFormat,
}

impl QuantizedWeight {
    fn from_input(n: &Lowering) -> Result<Self> {
        let missing = || n.node_error("requires a quantized weight, but its weight is not quantized".into());
        let layout = n.layout(1).ok_or_else(missing)?;
        let affine = layout.integers.clone().ok_or_else(missing)?;
        let mut names = layout.tensors.iter().map(|tensor| tensor.name.clone());
        let (values, scales) = (names.next().unwrap_or_default(), names.next().unwrap_or_default());
        Ok(Self { affine, values, scales, zero_points: names.next(), ready: layout.transposed(), input_major: false, storage_format: layout.storage_format })
    }

    /// Transposes the tensors to `[in, out]`. Runtimes fold this when they load the file.
    fn transpose(&mut self, n: &mut Lowering) -> Result<()> {
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

    /// The zero points, also for symmetric weights: with exact accumulation on x86 without VNNI, ONNX
    /// Runtime replaces missing ones by a scalar, and then refuses the file.
    fn explicit_zero_points(&self, n: &mut Lowering) -> Result<Option<String>> {
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

    /// Dequantizes the weight to a matrix. Per-channel scales are along the outputs, group scales along
    /// the rows of the checkpoint.
    fn dequantize(&self, n: &mut Lowering) -> Result<String> {
        let axis = |axis| AttributeProto::int("axis", axis);
        let attributes = match self.affine.granularity {
            Granularity::Tensor => vec![],
            Granularity::Channel => vec![axis(1)],
            Granularity::Group(size) | Granularity::Block([_, size]) => vec![axis(i64::from(self.input_major)), AttributeProto::int("block_size", size as i64)],
        };
        self.dequantized(n, attributes)
    }

    /// Adds a `DequantizeLinear` for this layer only: runtimes fuse only weights without other
    /// consumers.
    fn dequantized(&self, n: &mut Lowering, attributes: Vec<AttributeProto>) -> Result<String> {
        let zero_points = self.explicit_zero_points(n)?;
        let mut inputs = vec![self.values.as_str(), &self.scales];
        inputs.extend(zero_points.as_deref());
        Ok(n.emit("DequantizeLinear", "weight", &inputs, attributes))
    }

    /// Dequantizes a matrix `[in, out]` with several consumers, in operators that runtimes fold when
    /// they load the file. A `DequantizeLinear` would run for every inference, because runtimes fuse
    /// only weights without other consumers.
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

    /// Dequantizes the kernel of a convolution, `[out, in, …]`, in operators that runtimes fold when
    /// they load the file.
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
    let mut weight = QuantizedWeight::from_input(n)?;
    weight.input_major = op.input_major;
    let x = n.wide(&n.input(0))?;
    if let Some(bias) = integer_bias(n) {
        // ONNX Runtime uses integer kernels for matrices only with explicit zero points.
        let count = if weight.affine.granularity == Granularity::Tensor { None } else { Some(n.fixed(1, 0)? as usize) };
        weight.zero_points = Some(n.own_int8_zeros(count));
        let product = product(weight, &x, n)?.emit("product", n);
        n.finish_wide("Add", &[&product, &bias], vec![]);
        return Ok(());
    }
    // A bias has 32 bits unless other nodes use it.
    let bias = match (n.inputs() > 2).then(|| n.input(2)) {
        Some(bias) if n.layout(2).is_none_or(|layout| layout.tensors[0].data_type != DataType::Float) => Some(n.wide(&bias)?),
        other => other,
    };
    let pending = if op.input_major && weight.affine.granularity == Granularity::Channel { scaled_inputs(weight, &x, n)? } else { product(weight, &x, n)? };
    match bias {
        None => n.finish_wide(pending.op, &pending.operands(), pending.attributes.clone()),
        Some(bias) => {
            // ONNX Runtime fuses a product of known shape and an `Add` to a float `Gemm` before it
            // matches integer patterns.
            let add = if pending.op == "MatMul" { "Sum" } else { "Add" };
            let product = pending.emit("product", n);
            n.finish_wide(add, &[&product, &bias], vec![]);
        }
    }
    Ok(())
}

/// Dequantizes a bias that is stored as integers.
fn integer_bias(n: &mut Lowering) -> Option<String> {
    let [integers, scales] = n.layouts_of(2) else { return None };
    let [integers, scales] = [integers, scales].map(|layout| layout.tensors[0].name.clone());
    Some(n.emit("DequantizeLinear", "bias", &[&integers, &scales], vec![AttributeProto::int("axis", 0)]))
}

/// A convolution with int8 weights. Between quantized values, ONNX Runtime runs it with integers.
pub(super) fn conv(attributes: Vec<AttributeProto>, n: &mut Lowering) -> Result<()> {
    let weight = QuantizedWeight::from_input(n)?;
    let x = n.wide(&n.input(0))?;
    let axis = match weight.affine.granularity {
        Granularity::Tensor => vec![],
        _ => vec![AttributeProto::int("axis", 0)],
    };
    let kernel = if n.is_first_layer_of_weight() { weight.dequantized(n, axis)? } else { weight.kernel_floats(n)? };
    let mut inputs = vec![x, kernel];
    match integer_bias(n) {
        Some(bias) => inputs.push(bias),
        None if n.inputs() > 2 => inputs.push(n.wide(&n.input(2))?),
        None => {}
    }
    n.finish_wide("Conv", &inputs.iter().map(String::as_str).collect::<Vec<_>>(), attributes);
    Ok(())
}

/// Fake quantization to 8 bits. ONNX Runtime fuses the ops between two of these into integer kernels.
pub(super) fn fake_quantize(op: &FakeQuantize, n: &mut Lowering) -> Result<()> {
    let scale = n.float_wide(op.scale.into());
    quantize_dequantize(&scale, op.zero_point, n)
}

/// Fake quantization with a computed scale.
pub(super) fn learned_fake_quantize(op: &LearnedFakeQuantize, n: &mut Lowering) -> Result<()> {
    let logarithm = n.wide(&n.input(1))?;
    let factor = n.emit("Exp", "factor", &[&logarithm], vec![]);
    let base = n.float_wide(op.scale.into());
    let scale = n.emit("Mul", "scale", &[&factor, &base], vec![]);
    let scale = n.emit("Squeeze", "scalar", &[&scale], vec![]);
    quantize_dequantize(&scale, op.zero_point, n)
}

/// Quantizes and dequantizes keys or values for an 8-bit KV cache. ONNX supports FP8 from opset 19 on.
/// FP8 values are converted by casts, because ONNX Runtime moves a `DequantizeLinear` after operators
/// that do not support it.
pub(super) fn cache_quantize(op: CacheQuantize, n: &mut Lowering) -> Result<()> {
    let (x, scale) = (n.wide(&n.input(0))?, n.wide(&n.input(1))?);
    if op.format == CacheFormat::Int8 {
        let zero_point = n.zero_vector(DataType::Int8);
        if n.ty(1)?.shape.len() == 1 {
            let codes = n.emit("QuantizeLinear", "codes", &[&x, &scale, &zero_point], vec![]);
            n.finish_wide("DequantizeLinear", &[&codes, &scale, &zero_point], vec![]);
            return Ok(());
        }
        // These operators have no scales `[heads, 1, 1]`.
        let (steps, one) = (n.emit("Div", "steps", &[&x, &scale], vec![]), n.own_floats("one", &[1.0]));
        let codes = n.emit("QuantizeLinear", "codes", &[&steps, &one, &zero_point], vec![]);
        let rounded = n.emit("DequantizeLinear", "rounded", &[&codes, &one, &zero_point], vec![]);
        n.finish_wide("Mul", &[&rounded, &scale], vec![]);
        return Ok(());
    }
    if n.opset < 19 {
        return Err(n.node_error(format!(
            "quantizes to FP8 (`kv_cache: fp8`), which ONNX supports from opset 19 on, but the file has opset {}: set `opset: 19`",
            n.opset
        )));
    }
    let steps = n.emit("Div", "steps", &[&x, &scale], vec![]);
    let codes = n.cast("codes", &steps, DataType::Float8E4m3);
    let values = n.cast("rounded", &codes, DataType::Float);
    n.finish_wide("Mul", &[&values, &scale], vec![]);
    Ok(())
}

fn quantize_dequantize(scale: &str, zero_point: i32, n: &mut Lowering) -> Result<()> {
    let x = n.wide(&n.input(0))?;
    let zero_point = n.zero_point(zero_point, None);
    let integers = n.emit("QuantizeLinear", "integers", &[&x, scale, &zero_point], vec![]);
    if n.varies(0) {
        n.finish_wide("DequantizeLinear", &[&integers, scale, &zero_point], vec![]);
        return Ok(());
    }
    // Runtimes fold constants at load time, except this operator.
    let centred = centred(&integers, &zero_point, n);
    n.finish_wide("Mul", &[&centred, scale], vec![]);
    Ok(())
}

/// The distances of integers from their zero point, as floats.
fn centred(integers: &str, zero_point: &str, n: &mut Lowering) -> String {
    let [steps, zero] = [("steps", integers), ("zero_steps", zero_point)].map(|(part, value)| n.cast(part, value, DataType::Float));
    n.emit("Sub", "centred", &[&steps, &zero], vec![])
}

/// A final operator that is not written yet.
struct Pending {
    op: &'static str,
    inputs: Vec<String>,
    attributes: Vec<AttributeProto>,
}

impl Pending {
    fn binary(op: &'static str, inputs: [String; 2]) -> Self {
        Self { op, inputs: inputs.into(), attributes: Vec::new() }
    }

    fn operands(&self) -> Vec<&str> {
        self.inputs.iter().map(String::as_str).collect()
    }

    /// Writes the operator for an intermediate value.
    fn emit(self, part: &str, n: &mut Lowering) -> String {
        n.emit(self.op, part, &self.operands(), self.attributes.clone())
    }
}

fn product(mut weight: QuantizedWeight, x: &str, n: &mut Lowering) -> Result<Pending> {
    if let StorageFormat::Blocks(blocks) = weight.storage_format {
        return product_of_blocks(weight, blocks, x, n);
    }
    let shared = !weight.input_major && !weight.ready;
    if shared {
        weight.transpose(n)?;
    }
    let is_head = shared && n.integer_heads.is_some() && !weight.grouped() && weight.affine.activations == ActivationScheme::None;
    let is_integer = is_head || weight.affine.activations == ActivationScheme::DynamicToken && !weight.grouped();
    if is_integer && n.varies(0) && n.is_first_layer_of_weight() {
        n.integer_heads = n.integer_heads.map(|heads| heads + usize::from(is_head));
        return integer_product(&weight, x, n);
    }
    // If two products share a weight, ONNX Runtime uses the same kernel name for both, and refuses the
    // second one. Products of constants are folded at load time, unless they read a `DequantizeLinear`.
    let needs_floats = is_integer || !weight.input_major && (n.varying_readers(1) > 1 || !n.varies(0));
    let floats = if shared || needs_floats { weight.floats(n)? } else { weight.dequantize(n)? };
    // Products of constants are computed at load time, before `session.x64quantprecision` makes integer
    // products exact on x86 without VNNI. Therefore the same values are multiplied as floats.
    let x = if is_integer && !n.varies(0) { rounded(x, n)? } else { x.to_owned() };
    Ok(Pending::binary("MatMul", [x, floats]))
}

/// A `MatMulNBits` of ONNX Runtime with 32-bit float activations.
fn product_of_blocks(weight: QuantizedWeight, blocks: Blocks, x: &str, n: &Lowering) -> Result<Pending> {
    let (outputs, inputs) = (n.fixed(1, 0)?, n.fixed(1, 1)?);
    let attributes = [("K", inputs), ("N", outputs), ("bits", blocks.bits.into()), ("block_size", blocks.size as i64), ("accuracy_level", 1)];
    Ok(Pending {
        op: "com.microsoft::MatMulNBits",
        inputs: [x.to_owned(), weight.values, weight.scales].into_iter().chain(weight.zero_points).collect(),
        attributes: attributes.map(|(name, value)| AttributeProto::int(name, value)).into(),
    })
}

/// Quantizes an activation dynamically: integers, scale and zero point. Layers that share an activation share
/// its quantizer.
fn quantize_dynamically(x: &str, n: &mut Lowering) -> Result<[String; 3]> {
    // A static quantizer of the same value, for other layers, has the first of these names.
    let [named, other] = ["quantized", "dynamic"].map(|part| format!("{x}/{part}"));
    let scope = if n.has_value(&named) { other } else { named };
    n.share_many(&format!("{scope}|"), |n| Ok(n.emit_many("DynamicQuantizeLinear", ["integers", "scale", "zero_point"], &[x], vec![])))
}

/// An activation after dynamic quantization, as floats.
fn rounded(x: &str, n: &mut Lowering) -> Result<String> {
    let [integers, scale, zero_point] = quantize_dynamically(x, n)?;
    n.share(&format!("{integers}/dequantized|"), |n| {
        let centred = centred(&integers, &zero_point, n);
        Ok(n.emit("Mul", "rounded", &[&centred, &scale], vec![]))
    })
}

/// An integer product with dynamically quantized activations.
fn integer_product(weight: &QuantizedWeight, x: &str, n: &mut Lowering) -> Result<Pending> {
    let [integers, scale, zero_point] = quantize_dynamically(x, n)?;
    // Runtimes match the pattern only with operands in this order.
    let scale = n.emit("Mul", "scale", &[&scale, &weight.scales], vec![]);
    let mut inputs = vec![integers.as_str(), &weight.values, &zero_point];
    inputs.extend(weight.zero_points.as_deref());
    let sums = n.emit("MatMulInteger", "sums", &inputs, vec![]);
    let sums = n.cast("sums_float", &sums, DataType::Float);
    Ok(Pending::binary("Mul", [sums, scale]))
}

/// Applies scales per *input* channel to the activation: no integer kernel supports them.
fn scaled_inputs(mut weight: QuantizedWeight, x: &str, n: &mut Lowering) -> Result<Pending> {
    let width = n.fixed(1, 1)?;
    let x = n.emit("Mul", "scaled_input", &[x, &weight.scales], vec![]);
    // For this layer only: runtimes fuse only scales without other consumers.
    weight.scales = n.own_floats("ones", &vec![1.0; width as usize]);
    let Some(zero_points) = weight.zero_points.take() else { return product(weight, &x, n) };
    let axis = n.ints(&[1]);
    let zero_points = n.cast("zero_points", &zero_points, DataType::Float);
    let column = n.emit("Unsqueeze", "zero_point_column", &[&zero_points, &axis], vec![]);
    let offset = n.emit("MatMul", "offset", &[&x, &column], vec![]);
    let product = product(weight, &x, n)?.emit("uncentred", n);
    Ok(Pending::binary("Sub", [product, offset]))
}

/// Looks up rows as integers, and dequantizes only these.
pub(super) fn embedding(n: &mut Lowering) -> Result<()> {
    let table = QuantizedWeight::from_input(n)?;
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

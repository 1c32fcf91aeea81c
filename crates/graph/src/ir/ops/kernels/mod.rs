//! Kernels: faster implementations of ops, each for one kind of device and one float dtype.
//!
//! [`OpSpec::eval`](super::OpSpec::eval) and [`OpSpec::backward`](super::OpSpec::backward) define an op;
//! a kernel may differ from them only by rounding, and falls back to them for tensors that it does not
//! support. `COMPRESS_KERNELS=off` in the environment disables all kernels.

mod attention;
mod causal_conv;
mod conv;
mod elementwise;
mod experts;
mod fused;
mod fused_attention;
mod gated_delta;
mod host;
mod images;
mod index_sum;
mod linear;
mod rows;
mod segments;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Tensor};

use super::{Backward, DecodingState, Op};
use crate::kernel::coded::CodedMatrix;
pub use crate::kernel::epilogue::Fused;
pub use host::contiguous;
pub use index_sum::sum_rows_by_index;

/// Gradients by input.
type Gradients = Vec<Option<Tensor>>;

/// A faster implementation of an op.
pub trait Kernel: Send + Sync + std::fmt::Debug {
    /// Computes the output; `None` if the kernel does not support these tensors.
    fn forward(&self, _inputs: &[Tensor]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Computes the output for tokens whose positions follow those in `past`, for an op without state; `None`
    /// if the kernel does not support these tensors.
    fn forward_at(&self, _past: &DecodingState, _inputs: &[Tensor]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Computes the output with an epilogue; `None` if the kernel does not support these tensors or this
    /// epilogue.
    fn fused(&self, _inputs: &[Tensor], _epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Computes the output with an epilogue and a weight whose integers are multiplied. `inputs` are the
    /// others; `None` if the kernel does not support them or this epilogue.
    fn coded(&self, _inputs: &[Tensor], _weight: &CodedMatrix, _epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// As [`OpSpec::backward`](super::OpSpec::backward); `None` if the kernel does not support these
    /// tensors.
    fn backward(&self, _backward: &Backward) -> Result<Option<Gradients>> {
        Ok(None)
    }
}

/// Whether kernels are enabled.
static ENABLED: LazyLock<AtomicBool> = LazyLock::new(|| AtomicBool::new(std::env::var_os("COMPRESS_KERNELS").is_none_or(|value| value != "off")));

fn enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Disables all kernels for the rest of the process.
pub fn disable() {
    ENABLED.store(false, Ordering::Relaxed);
}

/// Whether host kernels may be used for values on this device.
pub fn on_host(device: &Device) -> bool {
    enabled() && device.is_cpu()
}

/// The kernel of an op for a device and a float dtype.
pub fn kernel(op: &Op, device: &Device, dtype: DType) -> Option<Box<dyn Kernel>> {
    if !enabled() {
        return None;
    }
    match (device, dtype) {
        (Device::Cpu, DType::F32) => host_kernel(op),
        (Device::Cpu, _) => None,
        _ => fused::kernel(op),
    }
}

/// Kernels for f32 in host memory.
fn host_kernel(op: &Op) -> Option<Box<dyn Kernel>> {
    if let Some(function) = op.activation() {
        return Some(Box::new(function));
    }
    Some(match op {
        Op::Linear(op) => Box::new(*op),
        Op::Conv(op) => Box::new(*op),
        Op::CausalConv(op) => Box::new(*op),
        Op::BatchNorm(op) => Box::new(*op),
        Op::LayerNorm(op) => Box::new(*op),
        Op::RmsNorm(op) => Box::new(*op),
        Op::Softmax(op) => Box::new(*op),
        Op::LearnedFakeQuantize(op) => Box::new(*op),
        Op::Add(op) => Box::new(*op),
        Op::Mul(op) => Box::new(*op),
        Op::Embedding(op) => Box::new(*op),
        Op::Rotary(op) => Box::new(op.clone()),
        Op::GridRotary(op) => Box::new(*op),
        Op::SplitHeads(op) => Box::new(*op),
        Op::MergeHeads(op) => Box::new(*op),
        Op::Attention(op) => Box::new(*op),
        Op::GatedDelta(op) => Box::new(*op),
        Op::MaxPool(op) => Box::new(*op),
        Op::GlobalAveragePool(op) => Box::new(*op),
        Op::Resize(op) => Box::new(op.clone()),
        Op::Dispatch(op) => Box::new(*op),
        Op::Combine(op) => Box::new(*op),
        _ => return None,
    })
}

/// An op prepared for a device, which uses its kernel where that is supported.
#[derive(Debug)]
pub struct PreparedOp {
    op: Op,
    kernel: Option<Box<dyn Kernel>>,
}

impl PreparedOp {
    /// Looks up the kernel.
    pub fn new(op: &Op, device: &Device, dtype: DType) -> PreparedOp {
        PreparedOp { op: op.clone(), kernel: kernel(op, device, dtype) }
    }

    /// Computes the output.
    pub fn forward(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let found = self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.forward(inputs))?;
        found.map_or_else(|| self.op.spec().eval(inputs), Ok)
    }

    /// Computes the output for new tokens after those in `past`.
    pub fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState) -> Result<Tensor> {
        let Some(op) = self.op.spec().incremental() else { return self.forward(inputs) };
        let found = self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.forward_at(past, inputs))?;
        found.map_or_else(|| op.forward_next(inputs, past, &|inputs| self.forward(inputs)), Ok)
    }

    /// Computes the output with an epilogue, if a kernel supports it.
    pub fn fused(&self, inputs: &[Tensor], epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.fused(inputs, epilogue))
    }

    /// Computes the output with an epilogue and a weight whose integers are multiplied, if a kernel supports
    /// it. `inputs` are the others.
    pub fn coded(&self, inputs: &[Tensor], weight: &CodedMatrix, epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.coded(inputs, weight, epilogue))
    }

    /// Gradients of the inputs.
    pub fn backward(&self, backward: &Backward) -> Result<Gradients> {
        let found = self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.backward(backward))?;
        found.map_or_else(|| self.op.spec().backward(backward), Ok)
    }
}

/// The sum of two tensors of the same shape.
pub fn sum(a: Tensor, b: Tensor) -> Result<Tensor> {
    PreparedOp::new(&Op::Add(super::Add {}), a.device(), a.dtype()).forward(&[a, b])
}

/// Mean and (biased) variance of each channel of images or rows, for [`BatchNorm`](super::BatchNorm).
pub fn moments(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let readable = on_host(x.device()) && images::is_readable(x, []);
    if readable { super::batch_norm::ChannelOps::moments(&images::OnHost, x) } else { super::BatchNorm::moments(x) }
}

/// `aᵀ b` for two matrices with the same number of rows.
pub fn transposed_product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let found = if on_host(a.device()) { linear::transposed_product(a, b)? } else { None };
    found.map_or_else(|| a.t()?.matmul(b), Ok)
}

//! Kernels: faster ways to compute what ops mean, each for one device and one type of floats.
//!
//! [`OpSpec::eval`](super::OpSpec::eval) and [`OpSpec::backward`](super::OpSpec::backward) say what an op means; a kernel may differ from that by rounding alone, and gives way
//! where it cannot read the tensors that it is given. With `COMPRESS_KERNELS=off` in the environment there are none.

mod attention;
mod conv;
mod elementwise;
mod experts;
mod fused;
mod host;
mod images;
mod index_sum;
mod linear;
mod rows;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Tensor};

use super::{Backward, Op, Past};
pub use crate::kernel::epilogue::Fused;
pub use host::contiguous;
pub use index_sum::sum_rows_by_index;

/// Gradients by input.
type Gradients = Vec<Option<Tensor>>;

/// A faster way to compute an op.
pub trait Kernel: Send + Sync + std::fmt::Debug {
    /// The output; `None` where the kernel does not take these tensors.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn forward(&self, _inputs: &[Tensor]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The output for tokens that stand behind so many others, of an op that keeps nothing of those; `None` where the kernel does not take
    /// these tensors.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn forward_behind(&self, _tokens: usize, _inputs: &[Tensor]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The output after these steps; `None` where the kernel does not take these tensors or steps.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn fused(&self, _inputs: &[Tensor], _epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// As [`OpSpec::backward`](super::OpSpec::backward); `None` where the kernel does not take these tensors.
    ///
    /// # Errors
    /// The device runs out of memory.
    fn backward(&self, _backward: &Backward) -> Result<Option<Gradients>> {
        Ok(None)
    }
}

/// Whether kernels are used at all.
static ENABLED: LazyLock<AtomicBool> = LazyLock::new(|| AtomicBool::new(std::env::var_os("COMPRESS_KERNELS").is_none_or(|value| value != "off")));

fn enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Computes everything as it is meant, from now on.
pub fn disable() {
    ENABLED.store(false, Ordering::Relaxed);
}

/// Whether kernels of the host may be used where values are on this device.
pub fn on_host(device: &Device) -> bool {
    enabled() && device.is_cpu()
}

/// The kernel of an op for a device and the type of floats that it computes with.
pub fn kernel(op: &Op, device: &Device, dtype: DType) -> Option<Box<dyn Kernel>> {
    if !enabled() {
        return None;
    }
    match (device, dtype) {
        (Device::Cpu, DType::F32) => of_host(op),
        (Device::Cpu, _) => None,
        _ => fused::kernel(op),
    }
}

/// Kernels for f32 in host memory.
fn of_host(op: &Op) -> Option<Box<dyn Kernel>> {
    if let Some(function) = op.activation() {
        return Some(Box::new(function));
    }
    Some(match op {
        Op::Linear(op) => Box::new(*op),
        Op::Conv(op) => Box::new(*op),
        Op::BatchNorm(op) => Box::new(*op),
        Op::LayerNorm(op) => Box::new(*op),
        Op::RmsNorm(op) => Box::new(*op),
        Op::Softmax(op) => Box::new(*op),
        Op::LearnedFakeQuantize(op) => Box::new(*op),
        Op::Add(op) => Box::new(*op),
        Op::Mul(op) => Box::new(*op),
        Op::Embedding(op) => Box::new(*op),
        Op::Rotary(op) => Box::new(op.clone()),
        Op::SplitHeads(op) => Box::new(*op),
        Op::MergeHeads(op) => Box::new(*op),
        Op::Attention(op) => Box::new(*op),
        Op::MaxPool(op) => Box::new(*op),
        Op::GlobalAveragePool(op) => Box::new(*op),
        Op::Resize(op) => Box::new(op.clone()),
        Op::Dispatch(op) => Box::new(*op),
        Op::Combine(op) => Box::new(*op),
        _ => return None,
    })
}

/// An op that is ready to compute on a device: by its kernel where that can, else as it is meant.
#[derive(Debug)]
pub struct PreparedOp {
    op: Op,
    kernel: Option<Box<dyn Kernel>>,
}

impl PreparedOp {
    /// Looks for the kernel.
    pub fn new(op: &Op, device: &Device, dtype: DType) -> PreparedOp {
        PreparedOp { op: op.clone(), kernel: kernel(op, device, dtype) }
    }

    /// The output.
    ///
    /// # Errors
    /// The device runs out of memory.
    pub fn forward(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let found = self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.forward(inputs))?;
        found.map_or_else(|| self.op.spec().eval(inputs), Ok)
    }

    /// The output for tokens that follow those which `past` knows.
    ///
    /// # Errors
    /// The device runs out of memory.
    pub fn follow(&self, inputs: &[Tensor], past: &mut Past) -> Result<Tensor> {
        let Some(op) = self.op.spec().sequential() else { return self.forward(inputs) };
        let found = self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.forward_behind(past.tokens(), inputs))?;
        found.map_or_else(|| op.follow(inputs, past, &|inputs| self.forward(inputs)), Ok)
    }

    /// The output after these steps, where a kernel does them.
    ///
    /// # Errors
    /// The device runs out of memory.
    pub fn fused(&self, inputs: &[Tensor], epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.fused(inputs, epilogue))
    }

    /// Gradients by input.
    ///
    /// # Errors
    /// The device runs out of memory.
    pub fn backward(&self, backward: &Backward) -> Result<Gradients> {
        let found = self.kernel.as_ref().map_or(Ok(None), |kernel| kernel.backward(backward))?;
        found.map_or_else(|| self.op.spec().backward(backward), Ok)
    }
}

/// The sum of two tensors of the same shape.
///
/// # Errors
/// The device runs out of memory.
pub fn sum(a: Tensor, b: Tensor) -> Result<Tensor> {
    PreparedOp::new(&Op::Add(super::Add {}), a.device(), a.dtype()).forward(&[a, b])
}

/// Mean and (biased) variance of each channel of images or rows, as [`BatchNorm`](super::BatchNorm) takes them.
///
/// # Errors
/// The device runs out of memory.
pub fn moments(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let readable = on_host(x.device()) && images::is_readable(x, []);
    if readable { super::batch_norm::Channels::moments(&images::OnHost, x) } else { super::BatchNorm::moments(x) }
}

/// `aᵀ b` of two matrices with the same rows.
///
/// # Errors
/// The device runs out of memory.
pub fn transposed_product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let found = if on_host(a.device()) { linear::transposed_product(a, b)? } else { None };
    found.map_or_else(|| a.t()?.matmul(b), Ok)
}

//! Launches of kernels: the only module that passes pointers to a GPU.
//!
//! All tensors of a device are on one stream, on which allocations, kernels and copies run in the order of
//! their launches.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::cublas::result::gemm_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t as Compute, cublasGemmAlgo_t as Algorithm, cublasOperation_t as Operation, cudaDataType_t as Type,
};
use candle_core::cuda_backend::cudarc::driver::result::{device as devices, mem_pool};
use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute_enum as PoolAttribute, CUmemoryPool};
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaStorageSlice, DeviceId};
use candle_core::{CudaDevice, DType, Device, Result, Shape, Storage, Tensor, bail};

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument<'t> {
    /// Pointer to the first element of a tensor, or null.
    Pointer(Option<&'t Tensor>),
    Size(u64),
    Number(u32),
    Real(f32),
}

impl<'t> From<&'t Tensor> for Argument<'t> {
    fn from(tensor: &'t Tensor) -> Self {
        Argument::Pointer(Some(tensor))
    }
}

/// Number of blocks along two axes, and of threads along two axes of a block.
pub(super) type Grid = ((u32, u32), (u32, u32));

/// Opens a GPU with one stream for all threads.
pub(super) fn open(number: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(number)?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: tensors of this device are used on its only stream, whose order makes events unnecessary.
        // They take half of the time of a launch.
        unsafe { cuda.disable_event_tracking() };
        // Otherwise, the driver returns free memory to the system whenever the stream is synchronized.
        set(cuda, PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
    }
    Ok(device)
}

/// The memory pool of a device. Tensors are allocated from it.
fn pool(cuda: &CudaDevice) -> Option<CUmemoryPool> {
    // SAFETY: the context of the device is open, and its pool exists until the process ends.
    unsafe { devices::get_default_mem_pool(cuda.cuda_stream().context().cu_device()).ok() }
}

fn set(cuda: &CudaDevice, attribute: PoolAttribute, mut value: u64) {
    if let Some(pool) = pool(cuda) {
        // SAFETY: the value of these attributes is a 64-bit integer. A device that does not support pools has
        // none.
        let _ = unsafe { mem_pool::set_attribute(pool, attribute, (&raw mut value).cast()) };
    }
}

fn get(cuda: &CudaDevice, attribute: PoolAttribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: as in `set`.
    unsafe { mem_pool::get_attribute(pool(cuda)?, attribute, (&raw mut value).cast()).ok()? };
    Some(value)
}

/// The peak memory of tensors since the last call, in bytes.
pub(super) fn take_peak_memory(device: &Device) -> Option<u64> {
    let Device::Cuda(cuda) = device else { return None };
    let peak = get(cuda, PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH);
    // 0 resets the peak to the memory in use.
    set(cuda, PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0);
    peak
}

/// Functions that were looked up, by device, kernel and dtype.
static FUNCTIONS: LazyLock<Mutex<HashMap<(DeviceId, &'static str, DType), CudaFunction>>> = LazyLock::new(Mutex::default);

fn function(device: &CudaDevice, kernel: &'static str, dtype: DType) -> Result<CudaFunction> {
    let mut functions = FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(function) = functions.get(&(device.id(), kernel, dtype)) {
        return Ok(function.clone());
    }
    let suffix = match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "f64",
        other => bail!("the kernel `{kernel}` does not support {other:?}"),
    };
    let function = device.get_or_load_custom_func(&format!("{kernel}_{suffix}"), "compress", ptx::KERNELS)?.into_cuda_function();
    functions.insert((device.id(), kernel, dtype), function.clone());
    Ok(function)
}

/// A contiguous tensor with undefined elements, for a kernel that writes all of them.
pub(super) fn undefined(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    // SAFETY: floats have no invalid values, and the callers overwrite all elements.
    unsafe { Tensor::empty(shape, dtype, device) }
}

/// The device and the address of the first element of a tensor.
fn address(storage: &Storage, start: usize) -> Result<(CudaDevice, u64)> {
    let Storage::Cuda(storage) = storage else { bail!("an operand of a kernel is not on the GPU") };
    let stream = storage.device.cuda_stream();
    let (pointer, size) = match &storage.slice {
        CudaStorageSlice::F32(slice) => (slice.device_ptr(&stream).0, 4),
        CudaStorageSlice::F16(slice) => (slice.device_ptr(&stream).0, 2),
        CudaStorageSlice::BF16(slice) => (slice.device_ptr(&stream).0, 2),
        CudaStorageSlice::F64(slice) => (slice.device_ptr(&stream).0, 8),
        CudaStorageSlice::U8(slice) => (slice.device_ptr(&stream).0, 1),
        CudaStorageSlice::U32(slice) => (slice.device_ptr(&stream).0, 4),
        CudaStorageSlice::I64(slice) => (slice.device_ptr(&stream).0, 8),
        _ => bail!("kernels do not support the type of an operand"),
    };
    Ok((storage.device.clone(), pointer + (start * size) as u64))
}

/// Launches a kernel for a float dtype. The arguments must match the declaration in `kernels.cu`; tensors
/// that kernels index without strides must be contiguous.
pub(super) fn launch(kernel: &'static str, dtype: DType, (blocks, threads): Grid, arguments: &[Argument]) -> Result<()> {
    // The storages stay locked until the launch.
    let tensors: Vec<&Tensor> = arguments.iter().filter_map(|argument| if let Argument::Pointer(tensor) = argument { *tensor } else { None }).collect();
    let storages: Vec<_> = tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
    let mut addresses = Vec::with_capacity(storages.len());
    let mut device = None;
    for (storage, layout) in &storages {
        let (on, address) = address(storage, layout.start_offset())?;
        device = Some(on);
        addresses.push(address);
    }
    let Some(device) = device else { bail!("the kernel `{kernel}` has no operands") };
    let (function, stream) = (function(&device, kernel, dtype)?, device.cuda_stream());
    let mut builder = stream.launch_builder(&function);
    let (mut next, null) = (addresses.iter(), 0u64);
    for argument in arguments {
        match argument {
            Argument::Pointer(Some(_)) => builder.arg(next.next().unwrap_or(&null)),
            Argument::Pointer(None) => builder.arg(&null),
            Argument::Size(size) => builder.arg(size),
            Argument::Number(number) => builder.arg(number),
            Argument::Real(real) => builder.arg(real),
        };
    }
    let config = LaunchConfig { grid_dim: (blocks.0, blocks.1, 1), block_dim: (threads.0, threads.1, 1), shared_mem_bytes: 0 };
    // SAFETY: the functions of `cuda.rs`, the only callers, pass the arguments that the kernel declares, and
    // check that the kernel stays within the tensors.
    match unsafe { builder.launch(config) } {
        Ok(_) => Ok(()),
        Err(e) => bail!("the kernel `{kernel}` could not be launched: {e}"),
    }
}

/// How cuBLAS, which stores columns, reads a matrix: whether transposed, and the distance of its rows or
/// columns. `None` if no axis is contiguous.
fn operand(matrix: &Tensor) -> Option<(Operation, i32)> {
    let ([rows, columns], [row, column]) = (matrix.dims(), matrix.stride()) else { return None };
    let distance = |count: usize, stride: usize, least: usize| if count == 1 { Some(least) } else { (stride >= least).then_some(stride) };
    let (operation, distance) = match (*column == 1 || *columns == 1).then(|| distance(*rows, *row, *columns)).flatten() {
        Some(distance) => (Operation::CUBLAS_OP_N, distance),
        None if *row == 1 || *rows == 1 => (Operation::CUBLAS_OP_T, distance(*columns, *column, *rows)?),
        None => return None,
    };
    Some((operation, i32::try_from(distance).ok()?))
}

/// Sets a matrix with contiguous rows to the first factor times the product of two other matrices plus the
/// second factor times itself. All have the same dtype, f32 or f64, and matching sizes. Returns `false` for
/// layouts that cuBLAS does not support.
pub(super) fn product(matrices: [&Tensor; 3], (factor, kept): (f64, f64)) -> Result<bool> {
    let [Some((Operation::CUBLAS_OP_N, of_sum)), Some((a_operation, of_a)), Some((b_operation, of_b))] = matrices.map(operand) else { return Ok(false) };
    let ((rows, columns), inner) = (matrices[0].dims2()?, matrices[1].dim(1)?);
    let [Ok(rows), Ok(columns), Ok(inner)] = [rows, columns, inner].map(i32::try_from) else { return Ok(false) };
    let storages = matrices.map(Tensor::storage_and_layout);
    let addresses = storages.iter().map(|(storage, layout)| address(storage, layout.start_offset())).collect::<Result<Vec<_>>>()?;
    let [(device, sum), (_, a), (_, b)] = &addresses[..] else { return Ok(false) };
    let single = [factor as f32, kept as f32];
    let double = [factor, kept];
    let (kind, compute, factors): (_, _, [*const c_void; 2]) = match matrices[0].dtype() {
        DType::F64 => (Type::CUDA_R_64F, Compute::CUBLAS_COMPUTE_64F, double.each_ref().map(|factor| std::ptr::from_ref(factor).cast())),
        _ => (Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F, single.each_ref().map(|factor| std::ptr::from_ref(factor).cast())),
    };
    let (handle, algorithm) = (device.cublas_handle(), Algorithm::CUBLAS_GEMM_DEFAULT);
    // cuBLAS uses the current context of the thread, which may not have used this GPU before.
    if let Err(e) = device.cuda_stream().context().bind_to_thread() {
        bail!("the GPU cannot be used on this thread: {e}");
    }
    let pointer = |address: &u64| *address as *mut c_void;
    // As cuBLAS stores columns, it computes the transposed product of the transposed factors.
    // SAFETY: the storages stay locked until the launch, the distances and sizes are those of the tensors,
    // which have the type `kind`, and both factors are numbers of the type of `compute`. The callers do not
    // read the memory that is written.
    let launched = unsafe {
        gemm_ex(
            *handle.handle(),
            b_operation,
            a_operation,
            columns,
            rows,
            inner,
            factors[0],
            pointer(b),
            kind,
            of_b,
            pointer(a),
            kind,
            of_a,
            factors[1],
            pointer(sum),
            kind,
            of_sum,
            compute,
            algorithm,
        )
    };
    match launched {
        Ok(()) => Ok(true),
        Err(e) => bail!("a product of matrices could not be launched: {e}"),
    }
}

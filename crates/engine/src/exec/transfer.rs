//! Copies between the host and devices, counted by cause.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::backend::BackendStorage;
use candle_core::{Device, Result, Shape, Storage, Tensor, WithDType, bail};
use serde::Serialize;

use crate::gpu;

/// Purpose of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// Samples with their masks and labels.
    Batch,
    /// Metrics of a training step.
    Step,
    /// Parameters.
    Weights,
    /// Model outputs, and metrics computed from them.
    Answers,
    /// Activation statistics.
    Statistics,
    /// Tensors offloaded to the host.
    Offload,
    /// Checkpoints and the best weights so far.
    State,
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the host to the device.
    In,
    /// From the device to the host.
    Out,
}

/// Number of copies by direction and cause.
pub type Copies = BTreeMap<(Direction, Cause), u64>;

thread_local! {
    static COPIES: RefCell<Copies> = const { RefCell::new(Copies::new()) };
}

static STRICT: AtomicBool = AtomicBool::new(false);

/// Counts copies as if the CPU were a separate device, for the rest of the process.
pub(super) fn enable_strict() {
    STRICT.store(true, Ordering::Relaxed);
}

/// Whether copies are counted as if the CPU were a separate device.
pub fn is_strict() -> bool {
    STRICT.load(Ordering::Relaxed)
}

/// The copies made by this thread.
pub fn copies() -> Copies {
    COPIES.with_borrow(Clone::clone)
}

/// Computes, and returns the copies that were made, which this thread does not count.
pub(super) fn counting<R>(work: impl FnOnce() -> R) -> (R, Copies) {
    let before = COPIES.take();
    let result = work();
    (result, COPIES.replace(before))
}

/// Adds copies that another thread has made for this one.
pub(super) fn add_copies(made: Copies) {
    COPIES.with_borrow_mut(|copies| made.into_iter().for_each(|(kind, count)| *copies.entry(kind).or_default() += count));
}

fn count(direction: Direction, cause: Cause, crosses: bool) {
    if crosses || is_strict() {
        COPIES.with_borrow_mut(|copies| *copies.entry((direction, cause)).or_default() += 1);
    }
}

/// Copies a tensor from the host to a device.
pub fn to_device(tensor: &Tensor, device: &Device, cause: Cause) -> Result<Tensor> {
    count(Direction::In, cause, !device.is_cpu());
    tensor.to_device(device)
}

/// A tensor on a device with the given elements in row-major order, which are not copied on the host.
pub fn from_slice<T: WithDType>(values: &[T], shape: impl Into<Shape>, device: &Device, cause: Cause) -> Result<Tensor> {
    count(Direction::In, cause, !device.is_cpu());
    Tensor::from_slice(values, shape.into(), device)
}

/// Copies a tensor from a device to the host.
pub fn to_host(tensor: &Tensor, cause: Cause) -> Result<Tensor> {
    count(Direction::Out, cause, !tensor.device().is_cpu());
    tensor.to_device(&Device::Cpu)
}

/// Copies a tensor to a device; not copied if it is already there.
pub fn move_to(tensor: &Tensor, device: &Device, cause: Cause) -> Result<Tensor> {
    match (tensor.device().same_device(device), device.is_cpu()) {
        (true, _) => Ok(tensor.clone()),
        (false, true) => to_host(tensor, cause),
        (false, false) => to_device(tensor, device, cause),
    }
}

/// All elements of a tensor on a device, converted to `T`, in row-major order.
pub fn values<T: WithDType>(tensor: &Tensor, cause: Cause) -> Result<Vec<T>> {
    let tensor = tensor.to_dtype(T::DTYPE)?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(on_gpu), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        drop(storage);
        return to_host(&tensor, cause)?.flatten_all()?.to_vec1();
    };
    count(Direction::Out, cause, true);
    let mut values = T::cpu_storage_data(on_gpu.to_cpu_storage()?)?;
    values.truncate(end);
    values.drain(..start.min(values.len()));
    Ok(values)
}

/// Copies all elements of a tensor to the host, converted to `f32`, in row-major order.
///
/// # Errors
/// If the tensor has another number of elements.
pub fn copy_to(tensor: &Tensor, values: &mut [f32], cause: Cause) -> Result<()> {
    if tensor.elem_count() != values.len() {
        bail!("a tensor of shape {:?} does not have {} elements", tensor.dims(), values.len());
    }
    if gpu::copy_to_host(tensor, values)?.is_some() {
        count(Direction::Out, cause, true);
    } else {
        values.copy_from_slice(&self::values::<f32>(tensor, cause)?);
    }
    Ok(())
}

/// The only element of a tensor on a device.
pub fn number(tensor: &Tensor, cause: Cause) -> Result<f64> {
    match values(tensor, cause)?.as_slice() {
        [number] => Ok(*number),
        _ => bail!("a tensor of shape {:?} is not a scalar", tensor.dims()),
    }
}

/// All elements of a tensor on the host, converted to `T`, in row-major order. Fails if the tensor is on
/// another device.
pub fn read<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    match tensor.device() {
        Device::Cpu => tensor.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1(),
        device => bail!("the tensor is on {:?}, but must be in host memory", device.location()),
    }
}

/// Returns `count` rows: the given ones at distinct indices, and zeros elsewhere.
pub fn place_rows(rows: &Tensor, indices: &[u32], count: usize) -> Result<Tensor> {
    // candle's `index_add` on a GPU walks over all indices in each thread.
    let mut sources = vec![rows.dim(0)? as u32; count];
    for (row, index) in (0..).zip(indices) {
        if let Some(source) = sources.get_mut(*index as usize) {
            *source = row;
        }
    }
    rows.pad_with_zeros(0, 0, 1)?.index_select(&to_device(&Tensor::new(sources, &Device::Cpu)?, rows.device(), Cause::Batch)?, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_without_counting_host_copies() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        assert_eq!(values::<f64>(&tensor.t().unwrap(), Cause::Answers).unwrap(), [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(read::<i64>(&tensor).unwrap(), [1, 2, 3, 4]);
        assert_eq!(number(&tensor.sum_all().unwrap(), Cause::Step).unwrap(), 10.0);
        assert!(number(&tensor, Cause::Step).is_err());
        assert_eq!(copies(), Copies::new());
    }

    #[test]
    fn slices_are_uploaded_as_rows() {
        let values = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let tensor = from_slice(&values[2..], (2, 2), &Device::Cpu, Cause::Statistics).unwrap();
        assert_eq!(tensor.to_vec2::<f32>().unwrap(), [[3.0, 4.0], [5.0, 6.0]]);
        assert!(from_slice(&values, (2, 2), &Device::Cpu, Cause::Statistics).is_err());
        assert_eq!(super::values::<f32>(&tensor.narrow(0, 1, 1).unwrap(), Cause::Statistics).unwrap(), [5.0, 6.0]);
    }

    #[test]
    fn rows_are_placed_at_their_indices() {
        let rows = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        assert_eq!(place_rows(&rows, &[3, 0], 4).unwrap().to_vec2::<f32>().unwrap(), [[3.0, 4.0], [0.0; 2], [0.0; 2], [1.0, 2.0]]);
        assert_eq!(place_rows(&rows, &[0, 1], 2).unwrap().to_vec2::<f32>().unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
    }
}

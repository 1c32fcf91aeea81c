//! Copies between the host and a device: all of them are made here, and counted by cause.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Device, Result, Tensor, WithDType, bail};
use serde::Serialize;

/// What values are copied for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// Samples, their masks and their labels.
    Batch,
    /// The figures of a training step.
    Step,
    /// Parameters.
    Weights,
    /// What a model answers, and figures made of that.
    Answers,
    /// Statistics of values inside a model.
    Statistics,
    /// What was put on the host to leave a device's memory to other things.
    Offload,
    /// Checkpoints, and the best weights so far.
    State,
}

/// Where values go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the host to the device.
    In,
    /// From the device to the host.
    Out,
}

/// How many copies were made.
pub type Copies = BTreeMap<(Direction, Cause), u64>;

thread_local! {
    static COPIES: RefCell<Copies> = const { RefCell::new(Copies::new()) };
}

static STRICT: AtomicBool = AtomicBool::new(false);

/// Counts as if the CPU were a device of its own, from now on.
pub(super) fn be_strict() {
    STRICT.store(true, Ordering::Relaxed);
}

/// Whether copies are counted as if the CPU were a device of its own.
pub fn is_strict() -> bool {
    STRICT.load(Ordering::Relaxed)
}

/// The copies that this thread has made.
pub fn copies() -> Copies {
    COPIES.with_borrow(Clone::clone)
}

fn count(direction: Direction, cause: Cause, crosses: bool) {
    if crosses || is_strict() {
        COPIES.with_borrow_mut(|copies| *copies.entry((direction, cause)).or_default() += 1);
    }
}

/// A tensor of the host on a device.
///
/// # Errors
/// The device runs out of memory.
pub fn to_device(tensor: &Tensor, device: &Device, cause: Cause) -> Result<Tensor> {
    count(Direction::In, cause, !device.is_cpu());
    tensor.to_device(device)
}

/// A tensor of a device on the host.
///
/// # Errors
/// Memory runs out.
pub fn to_host(tensor: &Tensor, cause: Cause) -> Result<Tensor> {
    count(Direction::Out, cause, !tensor.device().is_cpu());
    tensor.to_device(&Device::Cpu)
}

/// A tensor that may be elsewhere, on a device; itself where it is there.
///
/// # Errors
/// The device runs out of memory.
pub fn beside(tensor: &Tensor, device: &Device, cause: Cause) -> Result<Tensor> {
    match (tensor.device().same_device(device), device.is_cpu()) {
        (true, _) => Ok(tensor.clone()),
        (false, true) => to_host(tensor, cause),
        (false, false) => to_device(tensor, device, cause),
    }
}

/// All elements of a tensor of a device, converted, row by row.
///
/// # Errors
/// Memory runs out.
pub fn values<T: WithDType>(tensor: &Tensor, cause: Cause) -> Result<Vec<T>> {
    to_host(&tensor.to_dtype(T::DTYPE)?, cause)?.flatten_all()?.to_vec1()
}

/// The only element of a tensor of a device.
///
/// # Errors
/// There are several, or memory runs out.
pub fn number(tensor: &Tensor, cause: Cause) -> Result<f64> {
    match values(tensor, cause)?.as_slice() {
        [number] => Ok(*number),
        _ => bail!("{:?} is no single number", tensor.dims()),
    }
}

/// All elements of a tensor of the host, converted, row by row.
///
/// # Errors
/// It is on a device.
pub fn read<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    match tensor.device() {
        Device::Cpu => tensor.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1(),
        device => bail!("a tensor is on {:?}, where one of the host is read", device.location()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_and_nothing_is_counted_on_the_host() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        assert_eq!(values::<f64>(&tensor.t().unwrap(), Cause::Answers).unwrap(), [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(read::<i64>(&tensor).unwrap(), [1, 2, 3, 4]);
        assert_eq!(number(&tensor.sum_all().unwrap(), Cause::Step).unwrap(), 10.0);
        assert!(number(&tensor, Cause::Step).is_err());
        assert_eq!(copies(), Copies::new());
    }
}

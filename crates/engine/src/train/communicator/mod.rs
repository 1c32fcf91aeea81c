//! Collective communication between the processes of a training or of a layerwise pass.
//!
//! All ranks must call the same functions in the same order. Connections are neither authenticated nor
//! encrypted: the network between the processes must be trusted.

mod collectives;
#[cfg(feature = "nccl")]
mod nccl;
mod queue;
mod rank_config;
mod rendezvous;
mod single_process;
mod sockets;

use std::time::Duration;

use candle_core::{Device, Tensor};

pub use collectives::{assign_owners, average_gradients, buckets, flat};
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use queue::Queue;
pub use rank_config::RankConfig;
pub use single_process::SingleProcess;
pub use sockets::Sockets;

use crate::error::{Error, Result};
use crate::exec::{Segment, segments_of};

/// Default timeout of a collective; long, because other ranks may evaluate or save in the meantime.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// Collectives of one rank, synchronous across all ranks.
pub trait Communicator: Send {
    /// Rank of this process, from 0.
    fn rank(&self) -> usize;

    /// Number of processes (world size).
    fn size(&self) -> usize;

    /// All-reduce: the sum of the f32 tensors of all ranks, which have one shape, on the device of
    /// `tensor`. The result is bitwise equal on every rank. Fails if a rank disconnected, timed out, or
    /// called a different collective; the error names its rank and address.
    fn sum(&mut self, tensor: &Tensor) -> Result<Tensor>;

    /// Broadcasts the f32 tensor of rank `from` to all ranks; the other ranks pass a tensor of the same
    /// shape.
    fn broadcast(&mut self, tensor: &Tensor, from: usize) -> Result<Tensor>;

    /// Reduce-scatter: the [`sum`](Communicator::sum) of flat tensors, of which this rank receives its own
    /// segments, concatenated.
    fn reduce_scatter(&mut self, tensor: &Tensor, segments: &[Segment]) -> Result<Tensor> {
        let sum = self.sum(tensor)?;
        segments_of(self.rank(), &sum, segments).map_err(|e| Error::candle("a sum over processes", e))
    }

    /// All-gather: a flat f32 tensor with the segments of every rank, which cover it in order. Of `tensor`,
    /// only the own segments are read.
    fn all_gather(&mut self, tensor: &Tensor, segments: &[Segment]) -> Result<Tensor> {
        let failed = |e| Error::candle("the parts of a tensor of several processes", e);
        let mut parts = Vec::with_capacity(segments.len());
        for (owner, range) in segments {
            parts.push(self.broadcast(&tensor.narrow(0, range.start, range.len()).map_err(failed)?, *owner)?);
        }
        if parts.is_empty() { Ok(tensor.clone()) } else { Tensor::cat(&parts, 0).map_err(failed) }
    }

    /// All-gather: the bytes of every rank, in rank order.
    fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Sets the timeout of the following collectives.
    fn set_timeout(&mut self, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    /// Reports to the other ranks why this one stops, and disconnects.
    fn stop(&mut self, _reason: &str) {}

    /// Waits until all ranks have called it.
    fn barrier(&mut self) -> Result<()> {
        self.gather_bytes(&[]).map(drop)
    }
}

/// Connects to the other ranks: with NCCL between GPUs if the feature `nccl` is enabled, otherwise over TCP.
pub fn open(config: &RankConfig, device: &Device, timeout: Duration) -> Result<Box<dyn Communicator>> {
    if config.size == 1 {
        return Ok(Box::new(SingleProcess));
    }
    let sockets = Sockets::open(config, timeout)?;
    #[cfg(feature = "nccl")]
    if device.is_cuda() {
        return Ok(Box::new(Nccl::open(sockets, device, timeout)?));
    }
    let _ = device;
    Ok(Box::new(sockets))
}

/// Checks that all ranks pass the same bytes; `what` names them in the error message.
pub fn agree(communicator: &mut dyn Communicator, what: &str, bytes: &[u8]) -> Result<()> {
    let all = communicator.gather_bytes(bytes)?;
    match all.iter().position(|other| Some(other) != all.first()) {
        None => Ok(()),
        Some(rank) => Err(Error::run(
            format!("rank {rank}"),
            format!("its {what} differ from those of rank 0"),
            "start all processes with the same model, data and options, and a folder that all of them can access",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    pub(super) const SECOND: Duration = Duration::from_secs(1);

    pub(super) fn config(rank: usize, size: usize, ports: &[u16]) -> RankConfig {
        RankConfig { rank, size, local_rank: 0, address: "127.0.0.1".into(), ports: ports.to_vec(), run: 7 }
    }

    /// Runs `work` on `size` ranks in threads of this process, and returns their results in rank order.
    pub(super) fn run_ranks<T: Send>(size: usize, work: impl Fn(Sockets) -> Result<T> + Sync) -> Vec<Result<T>> {
        run_ranks_within(60 * SECOND, size, work)
    }

    pub(super) fn run_ranks_within<T: Send>(timeout: Duration, size: usize, work: impl Fn(Sockets) -> Result<T> + Sync) -> Vec<Result<T>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, work) = (listener.local_addr().unwrap().port(), &work);
        thread::scope(|scope| {
            let host = scope.spawn(move || work(Sockets::host(&listener, &config(0, size, &[port]), timeout)?));
            let others: Vec<_> = (1..size).map(|rank| scope.spawn(move || work(Sockets::join(&config(rank, size, &[port]), timeout)?))).collect();
            std::iter::once(host).chain(others).map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn disagreement_is_named() {
        let all = run_ranks(3, |mut sockets| {
            agree(&mut sockets, "options", b"same")?;
            let own = [u8::from(sockets.rank() == 2)];
            Ok(agree(&mut sockets, "seeds", &own).unwrap_err().to_string())
        });
        for text in all {
            assert_eq!(text.unwrap(), "rank 2: its seeds differ from those of rank 0");
        }
    }

    #[test]
    fn one_and_two_ranks_connect() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = |rank, size| config(rank, size, &[port]);
        let mut alone = open(&config(0, 1), &Device::Cpu, SECOND).unwrap();
        assert_eq!((alone.size(), alone.gather_bytes(b"x").unwrap()), (1, vec![b"x".to_vec()]));
        let other = thread::spawn({
            let config = config(1, 2);
            move || open(&config, &Device::Cpu, 60 * SECOND)?.gather_bytes(b"b")
        });
        let both = open(&config(0, 2), &Device::Cpu, 60 * SECOND).unwrap().gather_bytes(b"a").unwrap();
        assert_eq!((both, other.join().unwrap().unwrap()), (vec![b"a".to_vec(), b"b".to_vec()], vec![b"a".to_vec(), b"b".to_vec()]));
    }
}

//! Collectives between GPUs with NVIDIA's NCCL. The rendezvous and byte messages use TCP.
//!
//! NCCL calls run in their own thread, so that a rank that never enters a collective causes a timeout:
//! NCCL itself waits forever.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::cuda_backend::cudarc::nccl::{Comm, Id, ReduceOp};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Device, Layout, Shape, Tensor};

use super::{Communicator, Sockets};
use crate::error::{Error, Result};

/// Size of NCCL's unique id, in bytes.
const ID: usize = 128;

/// A collective to run, and the channel for its result.
struct Job {
    tensor: Tensor,
    /// Source rank of a broadcast; `None` for an all-reduce.
    from: Option<usize>,
    result: Sender<Result<Tensor, String>>,
}

/// A rank with a GPU, connected with NCCL.
pub struct Nccl {
    sockets: Sockets,
    jobs: Sender<Job>,
    timeout: Duration,
}

struct Exchange<'a> {
    connection: &'a Comm,
    from: Option<usize>,
}

impl CustomOp1 for Exchange<'_> {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!("NCCL requires CUDA tensors")
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else { candle_core::bail!("NCCL requires contiguous tensors") };
        let device = storage.device();
        let own = storage.as_cuda_slice::<f32>()?.slice(start..end);
        let mut result = device.alloc_zeros::<f32>(end - start)?;
        let done = match self.from {
            None => self.connection.all_reduce(&own, &mut result, &ReduceOp::Sum),
            Some(from) => self.connection.broadcast(Some(&own), &mut result, i32::try_from(from).unwrap_or(0)),
        };
        done.map_err(|e| candle_core::Error::Msg(format!("NCCL: {:?}", e.0)))?;
        Ok((CudaStorage::wrap_cuda_slice(result, device.clone()), layout.shape().clone()))
    }
}

/// Connects to the other ranks, reports the outcome on `ready`, and runs jobs until the channel closes.
fn work(stream: Arc<CudaStream>, rank: usize, size: usize, id: Id, ready: &Sender<Result<(), String>>, jobs: &Receiver<Job>) {
    // NCCL initializes on the device whose context is current in this thread, which is device 0 in a new
    // thread.
    if let Err(e) = stream.context().bind_to_thread() {
        return drop(ready.send(Err(format!("CUDA: {e}"))));
    }
    let connection = match Comm::from_rank(stream, rank, size, id) {
        Ok(connection) => connection,
        Err(e) => return drop(ready.send(Err(format!("NCCL: {:?}", e.0)))),
    };
    let mut open = ready.send(Ok(())).is_ok();
    while open && let Ok(job) = jobs.recv() {
        let exchange = Exchange { connection: &connection, from: job.from };
        // The collective is asynchronous: only after synchronizing is it known that the other ranks took
        // part.
        let done = job.tensor.contiguous().and_then(|tensor| {
            let result = tensor.apply_op1_no_bwd(&exchange)?;
            tensor.device().synchronize()?;
            Ok(result)
        });
        open = job.result.send(done.map_err(|e| e.to_string())).is_ok();
    }
}

impl Nccl {
    /// Connects ranks that are already connected by TCP, each with its GPU.
    pub fn open(mut sockets: Sockets, device: &Device, timeout: Duration) -> Result<Nccl> {
        let (rank, size) = (sockets.rank(), sockets.size());
        let failed = |reason: String| Error::run(format!("rank {rank} of {size}"), reason, "set NCCL_DEBUG=INFO to see the log of NCCL");
        let stream = device.as_cuda_device().map_err(|e| failed(e.to_string()))?.cuda_stream();
        let own = match rank {
            0 => Id::new().map_err(|e| failed(format!("NCCL: {:?}", e.0)))?.internal().map(|c| c as u8).to_vec(),
            _ => Vec::new(),
        };
        let ids = sockets.gather_bytes(&own)?;
        let Some(id) = ids.first().and_then(|id| <[u8; ID]>::try_from(id.as_slice()).ok()) else {
            return Err(failed("rank 0 did not send a valid NCCL id".into()));
        };
        let id = Id::uninit(id.map(|byte| byte as c_char));
        let ((jobs, queue), (ready, started)) = (channel(), channel());
        thread::Builder::new().name("nccl".into()).spawn(move || work(stream, rank, size, id, &ready, &queue)).map_err(|e| failed(e.to_string()))?;
        match started.recv_timeout(timeout) {
            Ok(done) => done.map_err(failed)?,
            Err(_) => return Err(failed(format!("NCCL did not connect all ranks within {} s", timeout.as_secs_f64()))),
        }
        Ok(Nccl { sockets, jobs, timeout })
    }

    fn exchange(&self, tensor: &Tensor, from: Option<usize>) -> Result<Tensor> {
        let what = || format!("rank {} of {}", self.sockets.rank(), self.sockets.size());
        let closed = || Error::run(what(), "the NCCL thread has stopped", "");
        let (sender, receiver) = channel();
        self.jobs.send(Job { tensor: tensor.clone(), from, result: sender }).map_err(|_| closed())?;
        match receiver.recv_timeout(self.timeout) {
            Ok(result) => result.map_err(|reason| Error::run(what(), reason, "set NCCL_DEBUG=INFO to see the log of NCCL")),
            Err(RecvTimeoutError::Disconnected) => Err(closed()),
            Err(RecvTimeoutError::Timeout) => {
                let others: Vec<&str> = self.sockets.addresses().collect();
                let reason = format!("at least one of {} did not respond for {} s", others.join(", "), self.timeout.as_secs_f64());
                Err(Error::run(what(), reason, "check the last output of the other processes"))
            }
        }
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.sockets.rank()
    }

    fn size(&self) -> usize {
        self.sockets.size()
    }

    fn sum(&mut self, tensor: &Tensor) -> Result<Tensor> {
        self.exchange(tensor, None)
    }

    fn broadcast(&mut self, tensor: &Tensor, from: usize) -> Result<Tensor> {
        self.exchange(tensor, Some(from))
    }

    fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.sockets.gather_bytes(bytes)
    }

    fn stop(&mut self, reason: &str) {
        self.sockets.stop(reason);
    }

    fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        self.sockets.set_timeout(timeout)
    }
}

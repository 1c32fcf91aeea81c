//! GPUs by NVIDIA's NCCL. Bytes, and the meeting of the ranks, go over TCP.
//!
//! The connection lives in a thread of its own, so that a rank which never comes to a sum is noticed: NCCL would wait for ever.

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

const ID: usize = 128;

/// A tensor for the others, and where the answer goes.
struct Job {
    tensor: Tensor,
    /// Whose tensor it will be; the sum of all where none is named.
    from: Option<usize>,
    answer: Sender<Result<Tensor, String>>,
}

/// A rank of several that each have a GPU.
pub struct Nccl {
    sockets: Sockets,
    jobs: Sender<Job>,
    patience: Duration,
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
        candle_core::bail!("NCCL takes tensors of a GPU")
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else { candle_core::bail!("NCCL takes tensors without gaps") };
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

/// Joins the others, says so, and works until nobody asks any more.
fn work(stream: Arc<CudaStream>, rank: usize, size: usize, id: Id, ready: &Sender<Result<(), String>>, jobs: &Receiver<Job>) {
    // NCCL initializes on the device whose context is current in this thread, which is device 0 in a new thread.
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
        // Only when the device is done is it known that the others were there.
        let done = job.tensor.contiguous().and_then(|tensor| {
            let result = tensor.apply_op1_no_bwd(&exchange)?;
            tensor.device().synchronize()?;
            Ok(result)
        });
        open = job.answer.send(done.map_err(|e| e.to_string())).is_ok();
    }
}

impl Nccl {
    /// The same ranks, with a GPU each.
    ///
    /// # Errors
    /// The device is no GPU; NCCL refuses, or does not connect in time.
    pub fn open(mut sockets: Sockets, device: &Device, patience: Duration) -> Result<Nccl> {
        let (rank, size) = (sockets.rank(), sockets.size());
        let failed = |reason: String| Error::run(format!("rank {rank} of {size}"), reason, "set NCCL_DEBUG=INFO for more output of NCCL");
        let stream = device.as_cuda_device().map_err(|e| failed(e.to_string()))?.cuda_stream();
        let own = match rank {
            0 => Id::new().map_err(|e| failed(format!("NCCL: {:?}", e.0)))?.internal().map(|c| c as u8).to_vec(),
            _ => Vec::new(),
        };
        let ids = sockets.gather_bytes(&own)?;
        let Some(id) = ids.first().and_then(|id| <[u8; ID]>::try_from(id.as_slice()).ok()) else {
            return Err(failed("rank 0 has sent no id of NCCL".into()));
        };
        let id = Id::uninit(id.map(|byte| byte as c_char));
        let ((jobs, waiting), (ready, begun)) = (channel(), channel());
        thread::Builder::new().name("nccl".into()).spawn(move || work(stream, rank, size, id, &ready, &waiting)).map_err(|e| failed(e.to_string()))?;
        match begun.recv_timeout(patience) {
            Ok(done) => done.map_err(failed)?,
            Err(_) => return Err(failed(format!("NCCL has not connected all ranks within {} s", patience.as_secs_f64()))),
        }
        Ok(Nccl { sockets, jobs, patience })
    }

    fn exchange(&self, tensor: &Tensor, from: Option<usize>) -> Result<Tensor> {
        let what = || format!("rank {} of {}", self.sockets.rank(), self.sockets.size());
        let gone = || Error::run(what(), "the connection of NCCL has ended", "");
        let (answer, answered) = channel();
        self.jobs.send(Job { tensor: tensor.clone(), from, answer }).map_err(|_| gone())?;
        match answered.recv_timeout(self.patience) {
            Ok(result) => result.map_err(|reason| Error::run(what(), reason, "set NCCL_DEBUG=INFO for more output of NCCL")),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                let others: Vec<&str> = self.sockets.addresses().collect();
                let reason = format!("of {}, one did not answer for {} s", others.join(", "), self.patience.as_secs_f64());
                Err(Error::run(what(), reason, "look at the last output of the other processes"))
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

    fn set_patience(&mut self, patience: Duration) -> Result<()> {
        self.sockets.set_patience(patience)
    }
}

//! Several processes that train one model: what they tell each other.
//!
//! All processes call the same functions in the same order. Nothing here authenticates or encrypts: the network between the
//! processes must be trusted.

mod alone;
#[cfg(feature = "nccl")]
mod nccl;
mod place;
mod rendezvous;
mod shared;
mod sockets;

use std::time::Duration;

use candle_core::{Device, Tensor};

pub use alone::Alone;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use place::Place;
pub use shared::{average_gradients, owners, share_parameters};
pub use sockets::Sockets;

use crate::error::{Error, Result};

/// How long a process waits for the others, where nothing else is asked for: others may evaluate or save meanwhile.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// One of several processes, by rank, that work in step.
pub trait Communicator: Send {
    /// The number of this process, from 0.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn size(&self) -> usize;

    /// The sum over all ranks of f32 tensors of one shape, on the device of this rank's. The same bits on every rank.
    ///
    /// # Errors
    /// A rank that has gone, is silent for too long, or does something else, by number and address.
    fn sum(&mut self, tensor: &Tensor) -> Result<Tensor>;

    /// The f32 tensor of one rank, on all of them; elsewhere only its shape matters.
    ///
    /// # Errors
    /// As [`sum`](Communicator::sum).
    fn broadcast(&mut self, tensor: &Tensor, from: usize) -> Result<Tensor>;

    /// The bytes of every rank, in order, on all of them.
    ///
    /// # Errors
    /// As [`sum`](Communicator::sum).
    fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// How long others may say nothing from now on, when something of them is due.
    ///
    /// # Errors
    /// A rank that has gone.
    fn set_patience(&mut self, _patience: Duration) -> Result<()> {
        Ok(())
    }

    /// Tells the others why this rank stops, and hangs up.
    fn stop(&mut self, _reason: &str) {}

    /// Returns when all ranks have come here.
    ///
    /// # Errors
    /// As [`sum`](Communicator::sum).
    fn barrier(&mut self) -> Result<()> {
        self.gather_bytes(&[]).map(drop)
    }
}

/// Joins the other processes of a place: by NCCL between GPUs where that is built in, else by TCP.
///
/// # Errors
/// Others do not come in time, by rank; the address cannot be used; NCCL refuses.
pub fn open(place: &Place, device: &Device, patience: Duration) -> Result<Box<dyn Communicator>> {
    if place.size == 1 {
        return Ok(Box::new(Alone));
    }
    let sockets = Sockets::open(place, patience)?;
    #[cfg(feature = "nccl")]
    if device.is_cuda() {
        return Ok(Box::new(Nccl::open(sockets, device, patience)?));
    }
    let _ = device;
    Ok(Box::new(sockets))
}

/// Holds all ranks to the same bytes: names and shapes of parameters, options, a hash of data.
///
/// # Errors
/// The first rank that has other bytes than rank 0.
pub fn agree(communicator: &mut dyn Communicator, what: &str, bytes: &[u8]) -> Result<()> {
    let all = communicator.gather_bytes(bytes)?;
    match all.iter().position(|other| Some(other) != all.first()) {
        None => Ok(()),
        Some(rank) => Err(Error::run(
            format!("rank {rank}"),
            format!("its {what} are not those of rank 0"),
            "start all processes with the same model, data and options, and a folder that all of them see",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    pub(super) const SECOND: Duration = Duration::from_secs(1);

    pub(super) fn place(rank: usize, size: usize, ports: &[u16]) -> Place {
        Place { rank, size, local_rank: 0, address: "127.0.0.1".into(), ports: ports.to_vec(), run: 7 }
    }

    /// What each of several ranks, in threads of this process, makes.
    pub(super) fn together<T: Send>(size: usize, work: impl Fn(Sockets) -> Result<T> + Sync) -> Vec<Result<T>> {
        together_within(60 * SECOND, size, work)
    }

    pub(super) fn together_within<T: Send>(patience: Duration, size: usize, work: impl Fn(Sockets) -> Result<T> + Sync) -> Vec<Result<T>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, work) = (listener.local_addr().unwrap().port(), &work);
        thread::scope(|scope| {
            let host = scope.spawn(move || work(Sockets::host(&listener, &place(0, size, &[port]), patience)?));
            let others: Vec<_> = (1..size).map(|rank| scope.spawn(move || work(Sockets::join(&place(rank, size, &[port]), patience)?))).collect();
            std::iter::once(host).chain(others).map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn disagreement_is_named() {
        let all = together(3, |mut sockets| {
            agree(&mut sockets, "options", b"same")?;
            let own = [u8::from(sockets.rank() == 2)];
            Ok(agree(&mut sockets, "seeds", &own).unwrap_err().to_string())
        });
        for text in all {
            assert_eq!(text.unwrap(), "rank 2: its seeds are not those of rank 0");
        }
    }

    #[test]
    fn places_are_opened() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let place = |rank, size| place(rank, size, &[port]);
        let mut alone = open(&place(0, 1), &Device::Cpu, SECOND).unwrap();
        assert_eq!((alone.size(), alone.gather_bytes(b"x").unwrap()), (1, vec![b"x".to_vec()]));
        let other = thread::spawn({
            let place = place(1, 2);
            move || open(&place, &Device::Cpu, 60 * SECOND)?.gather_bytes(b"b")
        });
        let both = open(&place(0, 2), &Device::Cpu, 60 * SECOND).unwrap().gather_bytes(b"a").unwrap();
        assert_eq!((both, other.join().unwrap().unwrap()), (vec![b"a".to_vec(), b"b".to_vec()], vec![b"a".to_vec(), b"b".to_vec()]));
    }
}

//! Collectives over TCP. All ranks are connected to rank 0, which adds in rank order, so that sums do
//! not depend on timing and every rank gets the same bits.
//!
//! A message consists of a kind (u8), a length (u64) and that many bytes. A rank that fails sends the
//! reason to the others before it disconnects.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::time::Duration;

use candle_core::{Device, Tensor};

use super::super::floats;
use super::Communicator;
use crate::error::{Error, Result};
use crate::exec::Segment;
use crate::exec::transfer::{self, Cause};

/// Bytes that are read or written at once.
const CHUNK_BYTES: usize = 1 << 18;
/// Largest accepted message of variable length.
const MAX_MESSAGE_BYTES: u64 = 1 << 30;
const SUM: u8 = 1;
const BROADCAST: u8 = 2;
const GATHER: u8 = 3;
const FAILURE: u8 = 4;
pub(super) const WELCOME: u8 = 5;
const REDUCE_SCATTER: u8 = 6;
const ALL_GATHER: u8 = 7;
/// Timeout of the introduction of a connection. Connections are accepted one at a time, so it is short.
pub(super) const INTRODUCTION: Duration = Duration::from_secs(5);

/// One connection.
pub(super) struct Peer {
    pub rank: usize,
    pub address: String,
    pub stream: TcpStream,
    pub timeout: Duration,
}

impl Peer {
    fn failed(&self, reason: impl ToString) -> Error {
        Error::run(format!("rank {} at {}", self.rank, self.address), reason.to_string(), "check the last output of that process")
    }

    pub fn connection_error(&self, error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.failed(format!("sent nothing for {} s", self.timeout.as_secs_f64())),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe => {
                self.failed("disconnected")
            }
            _ => self.failed(error),
        }
    }

    pub fn send_header(&mut self, kind: u8, length: u64) -> Result<()> {
        let mut header = [kind; 9];
        header[1..].copy_from_slice(&length.to_le_bytes());
        self.send(&header)
    }

    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let Err(error) = self.stream.write_all(bytes) else { return Ok(()) };
        let silent = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        // A failure message that the peer sent before it disconnected explains more.
        Err(if silent { self.connection_error(&error) } else { self.header().err().unwrap_or_else(|| self.connection_error(&error)) })
    }

    /// Sends a failure message; errors are ignored, since the connection is closed afterwards.
    pub fn refuse(&mut self, reason: &str) {
        let message = [&[FAILURE], &(reason.len() as u64).to_le_bytes()[..], reason.as_bytes()].concat();
        let _ = self.stream.set_write_timeout(Some(INTRODUCTION));
        let _ = self.stream.write_all(&message);
    }

    fn send_floats(&mut self, floats: &[f32]) -> Result<()> {
        let mut bytes = Vec::with_capacity(CHUNK_BYTES);
        for chunk in floats.chunks(CHUNK_BYTES / 4) {
            bytes.clear();
            bytes.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
            self.send(&bytes)?;
        }
        Ok(())
    }

    pub fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read = self.stream.read_exact(bytes);
        read.map_err(|e| self.connection_error(&e))
    }

    fn header(&mut self) -> Result<(u8, u64)> {
        let mut header = [0; 9];
        self.read(&mut header)?;
        let length = u64::from_le_bytes(std::array::from_fn(|i| header[i + 1]));
        if header[0] == FAILURE {
            let reason = self.bytes(length.min(4096))?;
            return Err(self.failed(format!("stopped: {}", String::from_utf8_lossy(&reason))));
        }
        Ok((header[0], length))
    }

    fn bytes(&mut self, length: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = (&mut self.stream).take(length).read_to_end(&mut bytes);
        match read {
            Err(e) => Err(self.connection_error(&e)),
            Ok(read) if (read as u64) < length => Err(self.failed("disconnected")),
            Ok(_) => Ok(bytes),
        }
    }

    /// Reads the header of a message that must have this kind, and this length if it is known. Returns
    /// its length.
    pub fn expect_header(&mut self, kind: u8, length: Option<u64>) -> Result<u64> {
        let (other, bytes) = self.header()?;
        if other != kind || length.is_some_and(|length| length != bytes) || bytes > length.unwrap_or(MAX_MESSAGE_BYTES) {
            let expected = length.map_or(String::new(), |length| format!(" of {length} bytes"));
            return Err(self.failed(format!("sent {} of {bytes} bytes instead of {}{expected}", name(other), name(kind))));
        }
        Ok(bytes)
    }

    /// Reads `floats.len()` floats, and calls `each` with each element and the received value.
    fn for_each_float(&mut self, floats: &mut [f32], each: impl Fn(&mut f32, f32)) -> Result<()> {
        let mut bytes = vec![0; CHUNK_BYTES.min(4 * floats.len())];
        for chunk in floats.chunks_mut(CHUNK_BYTES / 4) {
            let bytes = &mut bytes[..4 * chunk.len()];
            self.read(bytes)?;
            let (words, _) = bytes.as_chunks::<4>();
            chunk.iter_mut().zip(words).for_each(|(own, word)| each(own, f32::from_le_bytes(*word)));
        }
        Ok(())
    }
}

fn ranges_of(segments: &[Segment], rank: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    segments.iter().filter(move |(owner, _)| *owner == rank).map(|(_, range)| range.clone())
}

/// Number of bytes in the segments of a rank.
fn bytes_of(segments: &[Segment], rank: usize) -> u64 {
    4 * ranges_of(segments, rank).map(|range| range.len() as u64).sum::<u64>()
}

fn name(kind: u8) -> &'static str {
    match kind {
        SUM => "a sum",
        BROADCAST => "a broadcast",
        GATHER => "a gather",
        WELCOME => "a welcome",
        REDUCE_SCATTER => "a reduce-scatter",
        ALL_GATHER => "an all-gather",
        _ => "an unknown message",
    }
}

/// A rank connected by TCP.
pub struct Sockets {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// On rank 0, all other ranks in order; on the others, rank 0.
    pub(super) peers: Vec<Peer>,
    /// Why the connections were closed.
    pub(super) failure: Option<String>,
}

/// Sets the read and write timeout of a connection, and disables Nagle's algorithm.
pub(super) fn configure(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))
}

impl Sockets {
    /// Addresses of the peers: of rank 0, or on rank 0 of all others.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.peers.iter().map(|peer| peer.address.as_str())
    }

    /// Disconnects after an error and sends the reason, so that no other rank waits.
    fn or_stop<T>(&mut self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            let reason = error.to_string();
            self.stop(&reason);
            // Collectives that were started already fail for the same reason.
            self.failure.get_or_insert(reason);
        }
        done
    }

    fn check(&self) -> Result<()> {
        match self.peers.is_empty() && self.size > 1 {
            true => {
                let reason = self.failure.as_deref().map_or_else(String::new, |reason| format!(": {reason}"));
                Err(Error::run(format!("rank {}", self.rank), format!("lost its connection to the other ranks earlier{reason}"), ""))
            }
            false => Ok(()),
        }
    }

    /// Sums on rank 0, in rank order, and sends each rank its segments of the sum.
    fn reduce(&mut self, kind: u8, floats: &mut Vec<f32>, segments: &[Segment]) -> Result<()> {
        self.check()?;
        let length = 4 * floats.len() as u64;
        if self.rank == 0 {
            for peer in &mut self.peers {
                peer.expect_header(kind, Some(length))?;
                peer.for_each_float(floats, |own, other| *own += other)?;
            }
            for peer in &mut self.peers {
                peer.send_header(kind, bytes_of(segments, peer.rank))?;
                for range in ranges_of(segments, peer.rank) {
                    peer.send_floats(floats.get(range).unwrap_or_default())?;
                }
            }
            if bytes_of(segments, 0) != length {
                *floats = ranges_of(segments, 0).flat_map(|range| floats.get(range).unwrap_or_default()).copied().collect();
            }
        } else {
            let (rank, host) = (self.rank, &mut self.peers[0]);
            host.send_header(kind, length)?;
            host.send_floats(floats)?;
            floats.truncate(bytes_of(segments, rank) as usize / 4);
            host.expect_header(kind, Some(4 * floats.len() as u64))?;
            host.for_each_float(floats, |own, other| *own = other)?;
        }
        Ok(())
    }

    /// Exchanges segments, so that each one has the values of its rank.
    fn gather_segments(&mut self, floats: &mut [f32], segments: &[Segment]) -> Result<()> {
        self.check()?;
        let length = 4 * floats.len() as u64;
        if self.rank == 0 {
            for peer in &mut self.peers {
                peer.expect_header(ALL_GATHER, Some(bytes_of(segments, peer.rank)))?;
                for range in ranges_of(segments, peer.rank) {
                    peer.for_each_float(floats.get_mut(range).unwrap_or_default(), |own, other| *own = other)?;
                }
            }
            for peer in &mut self.peers {
                peer.send_header(ALL_GATHER, length)?;
                peer.send_floats(floats)?;
            }
        } else {
            let (rank, host) = (self.rank, &mut self.peers[0]);
            host.send_header(ALL_GATHER, bytes_of(segments, rank))?;
            for range in ranges_of(segments, rank) {
                host.send_floats(floats.get(range).unwrap_or_default())?;
            }
            host.expect_header(ALL_GATHER, Some(length))?;
            host.for_each_float(floats, |own, other| *own = other)?;
        }
        Ok(())
    }

    fn broadcast_floats(&mut self, floats: &mut [f32], from: usize) -> Result<()> {
        self.check()?;
        if from >= self.size {
            return Err(Error::run(format!("rank {from}"), format!("does not exist, there are {}", self.size), ""));
        }
        let length = 4 * floats.len() as u64;
        let own = self.rank;
        for peer in self.peers.iter_mut().filter(|peer| own != from && (own > 0 || peer.rank == from)) {
            peer.expect_header(BROADCAST, Some(length))?;
            peer.for_each_float(floats, |own, other| *own = other)?;
        }
        for peer in self.peers.iter_mut().filter(|peer| own == from || (own == 0 && peer.rank != from)) {
            peer.send_header(BROADCAST, length)?;
            peer.send_floats(floats)?;
        }
        Ok(())
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        let mut all = Vec::with_capacity(self.size);
        if self.rank == 0 {
            all.push(bytes.to_vec());
            for peer in &mut self.peers {
                let length = peer.expect_header(GATHER, None)?;
                all.push(peer.bytes(length)?);
            }
            for peer in &mut self.peers {
                for bytes in &all {
                    peer.send_header(GATHER, bytes.len() as u64)?;
                    peer.send(bytes)?;
                }
            }
        } else {
            let host = &mut self.peers[0];
            host.send_header(GATHER, bytes.len() as u64)?;
            host.send(bytes)?;
            for _ in 0..self.size {
                let length = host.expect_header(GATHER, None)?;
                all.push(host.bytes(length)?);
            }
        }
        Ok(all)
    }

    /// Runs a collective in place on a host copy of a tensor, and returns the result on the tensor's device:
    /// with its shape, or flat if the number of elements changes.
    fn on_host_copy(&mut self, tensor: &Tensor, function: impl FnOnce(&mut Sockets, &mut Vec<f32>) -> Result<()>) -> Result<Tensor> {
        let failed = |e: candle_core::Error| Error::run("a tensor between ranks", e, "");
        let mut floats = floats::on_host(tensor).and_then(|host| floats::read(&host, |floats| Ok(floats.to_vec()))).map_err(failed)?;
        let done = function(self, &mut floats);
        self.or_stop(done)?;
        let flat = [floats.len()];
        let dims = if floats.len() == tensor.elem_count() { tensor.dims() } else { &flat };
        let result = Tensor::from_vec(floats, dims, &Device::Cpu).and_then(|result| result.to_dtype(tensor.dtype()));
        result.and_then(|result| transfer::move_to(&result, tensor.device(), Cause::Step)).map_err(failed)
    }
}

impl Communicator for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn sum(&mut self, tensor: &Tensor) -> Result<Tensor> {
        self.on_host_copy(tensor, |sockets, floats| {
            let everything: Vec<Segment> = (0..sockets.size).map(|rank| (rank, 0..floats.len())).collect();
            sockets.reduce(SUM, floats, &everything)
        })
    }

    fn reduce_scatter(&mut self, tensor: &Tensor, segments: &[Segment]) -> Result<Tensor> {
        self.on_host_copy(tensor, |sockets, floats| sockets.reduce(REDUCE_SCATTER, floats, segments))
    }

    fn all_gather(&mut self, tensor: &Tensor, segments: &[Segment]) -> Result<Tensor> {
        self.on_host_copy(tensor, |sockets, floats| sockets.gather_segments(floats, segments))
    }

    fn broadcast(&mut self, tensor: &Tensor, from: usize) -> Result<Tensor> {
        self.on_host_copy(tensor, |sockets, floats| sockets.broadcast_floats(floats, from))
    }

    fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let done = self.all_gather(bytes);
        self.or_stop(done)
    }

    fn stop(&mut self, reason: &str) {
        for mut peer in self.peers.drain(..) {
            peer.refuse(reason);
        }
    }

    fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        for peer in &mut self.peers {
            configure(&peer.stream, timeout).map_err(|e| peer.connection_error(&e))?;
            peer.timeout = timeout;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::super::tests::{SECOND, run_ranks, run_ranks_within};
    use super::*;

    fn numbers(rank: usize) -> Tensor {
        let values: Vec<f32> = (0..200_000).map(|i| ((i * 7919 + rank * 104_729) % 1000) as f32 / 7.0 - 70.0).collect();
        Tensor::from_vec(values, (2, 100_000), &Device::Cpu).unwrap()
    }

    #[test]
    fn every_rank_gets_the_same_bits() {
        for size in [2, 3] {
            let all = run_ranks(size, |mut sockets| {
                sleep(Duration::from_millis(7 * (size - sockets.rank()) as u64));
                sockets.sum(&numbers(sockets.rank()))
            });
            let mut expected = numbers(0);
            (1..size).for_each(|rank| expected = (&expected + numbers(rank)).unwrap());
            for sum in all {
                assert_eq!(sum.unwrap().to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap());
            }
        }
    }

    /// Parts of a sum have the bits of the whole sum, and gathered parts those of their ranks, also by the
    /// collectives of communicators without own ones.
    #[test]
    fn segments_are_reduced_and_gathered() {
        struct Plain(Sockets);
        impl Communicator for Plain {
            fn rank(&self) -> usize {
                self.0.rank
            }
            fn size(&self) -> usize {
                self.0.size
            }
            fn sum(&mut self, tensor: &Tensor) -> Result<Tensor> {
                self.0.sum(tensor)
            }
            fn broadcast(&mut self, tensor: &Tensor, from: usize) -> Result<Tensor> {
                self.0.broadcast(tensor, from)
            }
            fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
                self.0.gather_bytes(bytes)
            }
        }
        let segments = [(2, 0..70_000), (0, 70_000..70_001), (1, 70_001..70_001), (2, 70_001..150_000), (0, 150_000..200_000)];
        for plain in [false, true] {
            let all = run_ranks(3, |mut sockets| {
                let own = numbers(sockets.rank()).flatten_all().unwrap();
                let sum = sockets.sum(&own)?.to_vec1::<f32>().unwrap();
                let mut communicator: Box<dyn Communicator> = if plain { Box::new(Plain(sockets)) } else { Box::new(sockets) };
                let reduced = communicator.reduce_scatter(&own, &segments)?.to_vec1::<f32>().unwrap();
                Ok((sum, reduced, communicator.all_gather(&own, &segments)?.to_vec1::<f32>().unwrap()))
            });
            for (rank, result) in all.into_iter().enumerate() {
                let (sum, reduced, gathered) = result.unwrap();
                let expected: Vec<f32> = ranges_of(&segments, rank).flat_map(|range| sum[range].to_vec()).collect();
                assert!(reduced == expected, "rank {rank}, {plain}");
                for (owner, range) in &segments {
                    let own = numbers(*owner).flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert!(gathered[range.clone()] == own[range.clone()], "rank {rank}, {plain}");
                }
            }
        }
    }

    #[test]
    fn tensors_and_bytes_reach_all() {
        let all = run_ranks(3, |mut sockets| {
            let own = numbers(sockets.rank());
            let received = (0..3).map(|from| sockets.broadcast(&own, from)).collect::<Result<Vec<_>>>()?;
            sockets.barrier()?;
            Ok((received, sockets.gather_bytes(&vec![b'x'; sockets.rank()])?))
        });
        for one in all {
            let (received, bytes) = one.unwrap();
            for (from, tensor) in received.iter().enumerate() {
                assert_eq!(tensor.to_vec2::<f32>().unwrap(), numbers(from).to_vec2::<f32>().unwrap());
            }
            assert_eq!(bytes, [&b""[..], b"x", b"xx"]);
        }
    }

    #[test]
    fn a_disconnected_rank_is_reported_to_all() {
        let all = run_ranks(3, |mut sockets| {
            if sockets.rank() == 2 {
                return Ok(());
            }
            let error = sockets.sum(&numbers(0)).unwrap_err();
            assert!(sockets.barrier().is_err());
            Err(error)
        });
        for error in all.into_iter().take(2) {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("rank 2 at 127.0.0.1:") && text.contains("disconnected"), "{text}");
        }
    }

    #[test]
    fn a_silent_rank_is_named() {
        let (ended, waiting) = std::sync::mpsc::channel();
        let waiting = std::sync::Mutex::new(waiting);
        let all = run_ranks_within(2 * SECOND, 2, |mut sockets| {
            if sockets.rank() == 1 {
                // Remains connected until rank 0 has given up.
                waiting.lock().unwrap().recv_timeout(60 * SECOND).unwrap();
                return Ok(());
            }
            let result = sockets.barrier();
            ended.send(()).unwrap();
            result
        });
        let text = all.into_iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains("rank 1 at") && text.contains("nothing for 2 s"), "{text}");
    }

    #[test]
    fn mismatched_collectives_are_reported() {
        let all = run_ranks(2, |mut sockets| if sockets.rank() == 1 { sockets.barrier() } else { sockets.sum(&numbers(0)).map(drop) });
        let texts: Vec<String> = all.into_iter().map(|error| error.unwrap_err().to_string()).collect();
        assert!(texts[0].contains("rank 1 at") && texts[0].contains("a gather of 0 bytes instead of a sum of 800000 bytes"), "{texts:?}");
        assert!(texts[1].contains("rank 0 at") && texts[1].contains("a sum"), "{texts:?}");
    }
}

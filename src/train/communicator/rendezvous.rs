//! How processes find each other: rank 0 listens, the others look for it and say who they are.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::sockets::{Peer, WELCOME, prepared};
use super::{Communicator, Place, Sockets};
use crate::error::{Error, Result};

const GREETING: &[u8; 8] = b"compress";
/// Time for a connection to say what it is; others wait meanwhile.
pub(super) const INTRODUCTION: Duration = Duration::from_secs(5);

impl Sockets {
    /// Waits for the other ranks, as rank 0, or looks for rank 0, for as long as `patience`; which is also how long a rank may say
    /// nothing when something of it is due.
    ///
    /// # Errors
    /// Ranks that have not come, by number; an address that cannot be used.
    pub fn open(place: &Place, patience: Duration) -> Result<Sockets> {
        if place.rank > 0 {
            return Sockets::join(place, patience);
        }
        // The name may be that of a service in front of this machine, which cannot be listened on.
        let listen = |port: u16| TcpListener::bind((place.address.as_str(), port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
        let mut listeners = place.ports.iter().map(|port| listen(*port));
        let first = listeners.next().unwrap_or_else(|| Err(io::ErrorKind::AddrNotAvailable.into()));
        let listener = first.or_else(|e| listeners.find_map(io::Result::ok).ok_or(e));
        let refused = |e| Error::run(format!("{} of rank 0", ports(place)), format!("cannot be listened on: {e}"), "choose another MASTER_PORT");
        Sockets::host(&listener.map_err(refused)?, place, patience)
    }

    /// Rank 0 behind a listener.
    ///
    /// # Errors
    /// Ranks that have not come in time, by number.
    pub fn host(listener: &TcpListener, place: &Place, patience: Duration) -> Result<Sockets> {
        let size = place.size;
        let failed = |e: io::Error| Error::run("rank 0", format!("cannot listen: {e}"), "");
        listener.set_nonblocking(true).map_err(failed)?;
        let start = Instant::now();
        let mut found: Vec<Option<Peer>> = (1..size).map(|_| None).collect();
        while found.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, address)) => {
                    // Whoever else has found the port is not waited for.
                    if let Some(mut peer) = introduced(stream, address, place, patience) {
                        let place = &mut found[peer.rank - 1];
                        if place.is_some() {
                            peer.refuse(&format!("rank {} is there already", peer.rank));
                        } else if peer.send_header(WELCOME, 0).is_ok() {
                            *place = Some(peer);
                        }
                    }
                }
                Err(_) if start.elapsed() < patience => sleep(Duration::from_millis(10)),
                Err(_) => {
                    let missing: Vec<String> = (1..size).filter(|rank| found[rank - 1].is_none()).map(|rank| rank.to_string()).collect();
                    let address = listener.local_addr().map_or(String::new(), |address| format!(" to {address}"));
                    let reason = format!("of {size} have not come{address} within {} s", patience.as_secs_f64());
                    return Err(Error::run(format!("ranks {}", missing.join(", ")), reason, "start all processes with the same MASTER_ADDR and MASTER_PORT"));
                }
            }
        }
        let mut host = Sockets { rank: 0, size, peers: found.into_iter().flatten().collect() };
        host.barrier()?;
        Ok(host)
    }

    /// Another rank, which looks for rank 0.
    ///
    /// # Errors
    /// Rank 0 is not there in time, or does not take this rank.
    pub fn join(place: &Place, patience: Duration) -> Result<Sockets> {
        let start = Instant::now();
        let mut reason = String::new();
        loop {
            for port in &place.ports {
                let address = (place.address.as_str(), *port);
                let found = address.to_socket_addrs().and_then(|mut addresses| {
                    addresses.find_map(|a| TcpStream::connect_timeout(&a, INTRODUCTION).ok()).ok_or(io::ErrorKind::ConnectionRefused.into())
                });
                match found.map(|stream| greeted(stream, place, patience)) {
                    Ok(Ok(host)) => {
                        let mut joined = Sockets { rank: place.rank, size: place.size, peers: vec![host] };
                        joined.barrier()?;
                        return Ok(joined);
                    }
                    // Of several ports, others may be somebody else's.
                    Ok(Err(e)) if place.ports.len() == 1 => return Err(e),
                    Ok(Err(e)) => reason = e.to_string(),
                    Err(e) if reason.is_empty() => reason = e.to_string(),
                    Err(_) => {}
                }
            }
            if start.elapsed() >= patience {
                let what = format!("rank 0 at {}, {}", place.address, ports(place));
                let reason = format!("is not there after {} s: {reason}", patience.as_secs_f64());
                return Err(Error::run(what, reason, "start all processes with the same MASTER_ADDR and MASTER_PORT"));
            }
            sleep(Duration::from_millis(50));
        }
    }
}

/// Ports in words.
fn ports(place: &Place) -> String {
    match place.ports.as_slice() {
        [only] => format!("port {only}"),
        all => format!("ports {all:?}"),
    }
}

/// The connection to rank 0, if it takes this rank.
fn greeted(stream: TcpStream, place: &Place, patience: Duration) -> Result<Peer> {
    let address = stream.peer_addr().map_or(String::new(), |address| address.to_string());
    let mut host = Peer { rank: 0, address, stream, patience };
    prepared(&host.stream, (2 * INTRODUCTION).min(patience)).map_err(|e| host.broken(&e))?;
    let numbers = [place.rank as u64, place.size as u64, place.run];
    host.send(&[GREETING, numbers.map(u64::to_le_bytes).as_flattened()].concat())?;
    host.due(WELCOME, Some(0))?;
    prepared(&host.stream, patience).map_err(|e| host.broken(&e))?;
    Ok(host)
}

/// The connection of a rank that has introduced itself.
fn introduced(stream: TcpStream, address: SocketAddr, place: &Place, patience: Duration) -> Option<Peer> {
    prepared(&stream, INTRODUCTION.min(patience)).ok()?;
    let mut peer = Peer { rank: 0, address: address.to_string(), stream, patience };
    let mut introduction = [0; 32];
    peer.read(&mut introduction).ok()?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| introduction[at + i]));
    let (size, run) = (place.size, number(24));
    peer.rank = number(8) as usize;
    if introduction[..8] != GREETING[..] || number(16) != size as u64 || !(1..size).contains(&peer.rank) {
        peer.refuse(&format!("it waits for ranks 1 to {} of {size}", size - 1));
        return None;
    }
    if run != place.run {
        peer.refuse("it is of another run");
        return None;
    }
    prepared(&peer.stream, patience).ok()?;
    Some(peer)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::super::tests::{SECOND, place};
    use super::*;

    #[test]
    fn who_does_not_come_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let port = address.port();
        // A stranger is not taken for a rank, nor is one of another run.
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&[0; 32]).unwrap();
        let other = |place: Place| thread::spawn(move || Sockets::join(&place, SECOND).err().unwrap().to_string());
        let others = [other(place(1, 5, &[port])), other(Place { run: 8, ..place(1, 3, &[port]) })];
        let text = Sockets::host(&listener, &place(0, 3, &[port]), SECOND).err().unwrap().to_string();
        assert!(text.contains("ranks 1, 2") && text.contains(&address.to_string()), "{text}");
        let texts = others.map(|other| other.join().unwrap());
        assert!(texts[0].contains("ranks 1 to 2 of 3") && texts[1].contains("another run"), "{texts:?}");
        drop(listener);
        let text = Sockets::join(&place(1, 2, &[port]), SECOND / 10).err().unwrap().to_string();
        assert!(text.contains("rank 0 at 127.0.0.1") && text.contains(&port.to_string()), "{text}");
    }

    /// Ports that others have, silent ones and those of another run, are passed over by rank 0 and by those that look for it.
    #[test]
    fn a_port_that_somebody_has_is_passed_over() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let ports = [taken.local_addr().unwrap().port(), free];
        let silent = thread::spawn(move || drop(taken.accept()));
        let other = thread::spawn(move || Sockets::open(&place(1, 2, &ports), 60 * SECOND)?.gather_bytes(b"b"));
        let both = Sockets::open(&place(0, 2, &ports), 60 * SECOND).unwrap().gather_bytes(b"a").unwrap();
        assert_eq!((both, other.join().unwrap().unwrap()), (vec![b"a".to_vec(), b"b".to_vec()], vec![b"a".to_vec(), b"b".to_vec()]));
        silent.join().unwrap();
    }
}

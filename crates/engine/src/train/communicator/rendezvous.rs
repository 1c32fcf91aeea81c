//! Rendezvous of the ranks: rank 0 listens, the other ranks connect and introduce themselves.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::sockets::{INTRODUCTION, Peer, WELCOME, configure};
use super::{Communicator, RankConfig, Sockets};
use crate::error::{Error, Result};

const GREETING: &[u8; 8] = b"compress";

impl Sockets {
    /// Connects this rank: rank 0 waits for the others, the others connect to rank 0. `timeout` limits
    /// this, and later each collective.
    pub fn open(config: &RankConfig, timeout: Duration) -> Result<Sockets> {
        if config.rank > 0 {
            return Sockets::join(config, timeout);
        }
        // The address may belong to a service in front of this machine, which this process cannot bind to.
        let listen = |port: u16| TcpListener::bind((config.address.as_str(), port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
        let mut listeners = config.ports.iter().map(|port| listen(*port));
        let first = listeners.next().unwrap_or_else(|| Err(io::ErrorKind::AddrNotAvailable.into()));
        let listener = first.or_else(|e| listeners.find_map(io::Result::ok).ok_or(e));
        let refused = |e| Error::run(format!("{} of rank 0", ports(config)), format!("cannot listen: {e}"), "set MASTER_PORT to a free port");
        Sockets::host(&listener.map_err(refused)?, config, timeout)
    }

    /// Accepts the connections of all other ranks, as rank 0. The error lists the ranks that do not connect
    /// in time.
    pub fn host(listener: &TcpListener, config: &RankConfig, timeout: Duration) -> Result<Sockets> {
        let size = config.size;
        let failed = |e: io::Error| Error::run("rank 0", format!("cannot listen: {e}"), "");
        listener.set_nonblocking(true).map_err(failed)?;
        let start = Instant::now();
        let mut found: Vec<Option<Peer>> = (1..size).map(|_| None).collect();
        while found.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, address)) => {
                    // Connections that are not ranks of this run are dropped.
                    if let Some(mut peer) = accept_introduction(stream, address, config, timeout) {
                        let slot = &mut found[peer.rank - 1];
                        if slot.is_some() {
                            peer.refuse(&format!("rank {} is already connected", peer.rank));
                        } else if peer.send_header(WELCOME, 0).is_ok() {
                            *slot = Some(peer);
                        }
                    }
                }
                Err(_) if start.elapsed() < timeout => sleep(Duration::from_millis(10)),
                Err(_) => {
                    let missing: Vec<String> = (1..size).filter(|rank| found[rank - 1].is_none()).map(|rank| rank.to_string()).collect();
                    let address = listener.local_addr().map_or(String::new(), |address| format!(" to {address}"));
                    let reason = format!("of {size} did not connect{address} within {} s", timeout.as_secs_f64());
                    return Err(Error::run(format!("ranks {}", missing.join(", ")), reason, "start all processes with the same MASTER_ADDR and MASTER_PORT"));
                }
            }
        }
        let mut host = Sockets { rank: 0, size, peers: found.into_iter().flatten().collect(), failure: None };
        host.barrier()?;
        Ok(host)
    }

    /// Connects to rank 0, as another rank.
    pub fn join(config: &RankConfig, timeout: Duration) -> Result<Sockets> {
        let start = Instant::now();
        let mut reason = String::new();
        loop {
            for port in &config.ports {
                let address = (config.address.as_str(), *port);
                let found = address.to_socket_addrs().and_then(|mut addresses| {
                    addresses.find_map(|a| TcpStream::connect_timeout(&a, INTRODUCTION).ok()).ok_or(io::ErrorKind::ConnectionRefused.into())
                });
                match found.map(|stream| introduce(stream, config, timeout)) {
                    Ok(Ok(host)) => {
                        let mut joined = Sockets { rank: config.rank, size: config.size, peers: vec![host], failure: None };
                        joined.barrier()?;
                        return Ok(joined);
                    }
                    // Another program may listen on one of several ports.
                    Ok(Err(e)) if config.ports.len() == 1 => return Err(e),
                    Ok(Err(e)) => reason = e.to_string(),
                    Err(e) if reason.is_empty() => reason = e.to_string(),
                    Err(_) => {}
                }
            }
            if start.elapsed() >= timeout {
                let what = format!("rank 0 at {}, {}", config.address, ports(config));
                let reason = format!("cannot be reached after {} s: {reason}", timeout.as_secs_f64());
                return Err(Error::run(what, reason, "start all processes with the same MASTER_ADDR and MASTER_PORT"));
            }
            sleep(Duration::from_millis(50));
        }
    }
}

/// The ports, for messages.
fn ports(config: &RankConfig) -> String {
    match config.ports.as_slice() {
        [only] => format!("port {only}"),
        all => format!("ports {all:?}"),
    }
}

/// Introduces this rank to rank 0, and waits until it is accepted.
fn introduce(stream: TcpStream, config: &RankConfig, timeout: Duration) -> Result<Peer> {
    let address = stream.peer_addr().map_or(String::new(), |address| address.to_string());
    let mut host = Peer { rank: 0, address, stream, timeout };
    configure(&host.stream, (2 * INTRODUCTION).min(timeout)).map_err(|e| host.connection_error(&e))?;
    let numbers = [config.rank as u64, config.size as u64, config.run];
    host.send(&[GREETING, numbers.map(u64::to_le_bytes).as_flattened()].concat())?;
    host.expect_header(WELCOME, Some(0))?;
    configure(&host.stream, timeout).map_err(|e| host.connection_error(&e))?;
    Ok(host)
}

/// Reads the introduction of a connection; `None` if it is not a rank of this run.
fn accept_introduction(stream: TcpStream, address: SocketAddr, config: &RankConfig, timeout: Duration) -> Option<Peer> {
    configure(&stream, INTRODUCTION.min(timeout)).ok()?;
    let mut peer = Peer { rank: 0, address: address.to_string(), stream, timeout };
    let mut introduction = [0; 32];
    peer.read(&mut introduction).ok()?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| introduction[at + i]));
    let (size, run) = (config.size, number(24));
    peer.rank = number(8) as usize;
    if introduction[..8] != GREETING[..] || number(16) != size as u64 || !(1..size).contains(&peer.rank) {
        peer.refuse(&format!("rank 0 accepts ranks 1 to {} of {size}", size - 1));
        return None;
    }
    if run != config.run {
        peer.refuse("rank 0 belongs to another run");
        return None;
    }
    configure(&peer.stream, timeout).ok()?;
    Some(peer)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::super::tests::{SECOND, config};
    use super::*;

    #[test]
    fn missing_ranks_are_listed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let port = address.port();
        // Neither an unrelated client nor a rank of another run is accepted.
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&[0; 32]).unwrap();
        let other = |config: RankConfig| thread::spawn(move || Sockets::join(&config, 60 * SECOND).err().unwrap().to_string());
        let others = [other(config(1, 5, &[port])), other(RankConfig { run: 8, ..config(1, 3, &[port]) })];
        let text = Sockets::host(&listener, &config(0, 3, &[port]), 3 * SECOND).err().unwrap().to_string();
        assert!(text.contains("ranks 1, 2") && text.contains(&address.to_string()), "{text}");
        let texts = others.map(|other| other.join().unwrap());
        assert!(texts[0].contains("ranks 1 to 2 of 3") && texts[1].contains("another run"), "{texts:?}");
        drop(listener);
        let text = Sockets::join(&config(1, 2, &[port]), SECOND / 10).err().unwrap().to_string();
        assert!(text.contains("rank 0 at 127.0.0.1") && text.contains(&port.to_string()), "{text}");
    }

    /// Rank 0 does not listen on occupied ports, and the other ranks skip ports that do not answer.
    #[test]
    fn occupied_ports_are_skipped() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let ports = [taken.local_addr().unwrap().port(), free];
        let silent = thread::spawn(move || drop(taken.accept()));
        let other = thread::spawn(move || Sockets::open(&config(1, 2, &ports), 60 * SECOND)?.gather_bytes(b"b"));
        let both = Sockets::open(&config(0, 2, &ports), 60 * SECOND).unwrap().gather_bytes(b"a").unwrap();
        assert_eq!((both, other.join().unwrap().unwrap()), (vec![b"a".to_vec(), b"b".to_vec()], vec![b"a".to_vec(), b"b".to_vec()]));
        silent.join().unwrap();
    }
}

// Connections in memory: whatever is asked for, the answer is what this thread said last.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};
use ureq::{Agent, Error};

/// Who answers.
pub const SERVER: &str = "http://127.0.0.1:9";

thread_local! {
    static ANSWER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub fn say(answer: Vec<u8>) {
    ANSWER.set(answer);
}

pub fn said() -> String {
    ANSWER.with_borrow(|answer| String::from_utf8_lossy(answer).into_owned())
}

/// What requests go over that go nowhere.
pub fn agent() -> Agent {
    let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).max_redirects_will_error(false);
    let config = config.input_buffer_size(8192).output_buffer_size(8192).max_idle_connections(0).build();
    Agent::with_parts(config, Wire, Wire)
}

#[derive(Debug)]
struct Wire;

impl Resolver for Wire {
    fn resolve(&self, _uri: &Uri, _config: &Config, _timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut found = self.empty();
        found.push(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        Ok(found)
    }
}

impl Connector<()> for Wire {
    type Out = Connection;

    fn connect(&self, details: &ConnectionDetails, _chained: Option<()>) -> Result<Option<Connection>, Error> {
        let buffers = LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Connection { buffers, answer: ANSWER.with_borrow(Clone::clone), at: 0 }))
    }
}

/// A connection that ends behind its answer.
#[derive(Debug)]
pub struct Connection {
    buffers: LazyBuffers,
    answer: Vec<u8>,
    at: usize,
}

impl Transport for Connection {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, _amount: usize, _timeout: NextTimeout) -> Result<(), Error> {
        Ok(())
    }

    fn await_input(&mut self, _timeout: NextTimeout) -> Result<bool, Error> {
        let room = self.buffers.input_append_buf();
        let count = room.len().min(self.answer.len() - self.at);
        room[..count].copy_from_slice(&self.answer[self.at..self.at + count]);
        self.at += count;
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        false
    }
}

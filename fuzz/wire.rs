// In-memory HTTP connections: every request receives the response that this thread has set.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};
use ureq::{Agent, Error};

/// URL of the server.
pub const SERVER: &str = "http://127.0.0.1:9";

thread_local! {
    static RESPONSE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Sets the response of this thread.
pub fn set_response(response: Vec<u8>) {
    RESPONSE.set(response);
}

/// The response of this thread as text.
pub fn response() -> String {
    RESPONSE.with_borrow(|response| String::from_utf8_lossy(response).into_owned())
}

/// An agent that uses in-memory connections.
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
        Ok(Some(Connection { buffers, response: RESPONSE.with_borrow(Clone::clone), position: 0 }))
    }
}

/// A connection that is closed after the response.
#[derive(Debug)]
pub struct Connection {
    buffers: LazyBuffers,
    response: Vec<u8>,
    position: usize,
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
        let count = room.len().min(self.response.len() - self.position);
        room[..count].copy_from_slice(&self.response[self.position..self.position + count]);
        self.position += count;
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        false
    }
}

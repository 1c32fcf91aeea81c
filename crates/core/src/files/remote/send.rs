//! Requests with a body: calls of an API, and uploads of parts of files.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use serde_json::Value;
use ureq::SendBody;
use ureq::http::{HeaderMap, Method, Request};

use super::failure::{self, Backoff, Failure};
use super::http;
use super::upload::ProgressFn;

/// Maximum time that a server takes to answer after it has received a request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum size of a response in bytes.
const MAX_RESPONSE: u64 = 16 << 20;

/// Body of a request.
pub(super) enum Content<'c> {
    Bytes(&'c [u8]),
    /// A range of a file, with the callback that receives the number of additional bytes sent.
    Part(&'c File, Range<u64>, ProgressFn<'c>),
}

/// A request with a body.
pub(super) struct Call<'c> {
    pub method: Method,
    pub url: &'c str,
    pub token: Option<&'c str>,
    pub headers: &'c [(&'c str, &'c str)],
    pub content: Content<'c>,
    /// Error statuses that the caller handles.
    pub accepted: &'c [u16],
}

/// A response with a status of success, or one that the caller accepts.
pub(super) struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
}

/// Sequential reader of a range of a file. It reports bytes that no earlier attempt has reported.
struct PartReader<'p> {
    file: &'p File,
    at: u64,
    end: u64,
    reported: &'p Cell<u64>,
    progress: ProgressFn<'p>,
    /// The error of `progress` or of reading, which must not be mistaken for a failure of the network.
    failed: &'p RefCell<Option<io::Error>>,
}

impl PartReader<'_> {
    fn read_part(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.file.read_at(buffer.get_mut(..left).unwrap_or_default(), self.at)?;
        if count == 0 && left > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at = self.at.saturating_add(count as u64);
        if let Some(new) = self.at.checked_sub(self.reported.get()).filter(|new| *new > 0) {
            self.reported.set(self.at);
            (self.progress)(new)?;
        }
        Ok(count)
    }
}

impl Read for PartReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_part(buffer).map_err(|error| {
            *self.failed.borrow_mut() = Some(error);
            io::Error::other("the body of the request is incomplete")
        })
    }
}

impl Call<'_> {
    /// Sends the request, and repeats it after transient failures.
    pub fn send(&self) -> io::Result<Reply> {
        let (mut backoff, reported) = (Backoff::new(), self.reported());
        loop {
            match self.attempt_from(&reported) {
                Ok(reply) => return Ok(reply),
                Err(failure) => backoff.pause(failure)?,
            }
        }
    }

    /// Sends the request once.
    pub fn attempt(&self) -> Result<Reply, Failure> {
        self.attempt_from(&self.reported())
    }

    /// The end of the bytes that were reported as sent.
    fn reported(&self) -> Cell<u64> {
        Cell::new(if let Content::Part(_, range, _) = &self.content { range.start } else { 0 })
    }

    fn attempt_from(&self, reported: &Cell<u64>) -> Result<Reply, Failure> {
        let failed = RefCell::default();
        let (mut bytes, mut part);
        let (length, reader): (u64, &mut dyn Read) = match &self.content {
            Content::Bytes(content) => {
                bytes = *content;
                (content.len() as u64, &mut bytes)
            }
            Content::Part(file, range, progress) => {
                part = PartReader { file, at: range.start, end: range.end, reported, progress: *progress, failed: &failed };
                (range.end.saturating_sub(range.start), &mut part)
            }
        };
        let mut request = Request::builder().method(self.method.clone()).uri(self.url).header("Content-Length", length);
        for (name, value) in self.headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let invalid = |_| failure::fatal(io::ErrorKind::InvalidData, "the server requests an upload to an invalid URL, or with invalid headers");
        let request = request.body(SendBody::from_reader(reader)).map_err(invalid)?;
        let agent = http::agent();
        let request = agent.configure_request(request).timeout_per_read(Some(ANSWER_TIMEOUT)).build();
        let answer = agent.run(request);
        if let Some(error) = failed.take() {
            return Err(Failure::Fatal(error));
        }
        let (parts, body) = answer.map_err(failure::request_failure)?.into_parts();
        let mut bytes = Vec::new();
        let read = body.into_with_config().limit(u64::MAX).reader().take(MAX_RESPONSE).read_to_end(&mut bytes);
        let status = parts.status.as_u16();
        if parts.status.is_success() || self.accepted.contains(&status) {
            read.map_err(failure::transient)?;
            return Ok(Reply { status, headers: parts.headers, bytes });
        }
        let message = failure::error_message(&parts.headers).map(str::to_owned).or_else(|| message(&bytes));
        Err(failure::refusal(parts.status, &parts.headers, message.as_deref()))
    }
}

/// The message of an error response in JSON.
pub(super) fn message(bytes: &[u8]) -> Option<String> {
    let answer: Value = serde_json::from_slice(bytes).ok()?;
    ["error", "message"].iter().find_map(|key| answer.get(key)?.as_str()).map(str::to_owned)
}

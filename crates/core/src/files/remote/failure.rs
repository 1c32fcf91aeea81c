//! Failures of requests, and delays before the next attempt.

use std::io;
use std::time::{Duration, SystemTime};

use ureq::http::{HeaderMap, StatusCode};

use super::secrets;

/// Consecutive attempts without progress before a request fails.
const ATTEMPTS: u32 = 6;
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Maximum honored `Retry-After` delay.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Failure of one attempt.
#[derive(Debug)]
pub(super) enum Failure {
    /// Transient failure, with a minimum delay before the next attempt.
    Retry(String, Duration),
    Fatal(io::Error),
}

pub(super) fn transient(reason: impl std::fmt::Display) -> Failure {
    Failure::Retry(reason.to_string(), Duration::ZERO)
}

pub(super) fn fatal(kind: io::ErrorKind, reason: impl Into<String>) -> Failure {
    Failure::Fatal(io::Error::new(kind, reason.into()))
}

/// Value of a header as text.
pub(super) fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// The error message in the headers of a response.
pub(super) fn error_message(headers: &HeaderMap) -> Option<&str> {
    header(headers, "x-error-message")
}

/// Status of a response, with the error message of the server if there is one.
pub(super) fn describe_status(status: StatusCode, message: Option<&str>) -> String {
    let message = message.map(|text| format!(" ({})", text.chars().take(200).collect::<String>()));
    format!("{status}{}", message.unwrap_or_default())
}

/// Failure of a request with an error response.
pub(super) fn refusal(status: StatusCode, headers: &HeaderMap, message: Option<&str>) -> Failure {
    let answer = describe_status(status, message);
    match status.as_u16() {
        401 => fatal(io::ErrorKind::PermissionDenied, format!("the server does not accept the credentials: {answer}")),
        403 => fatal(io::ErrorKind::PermissionDenied, format!("the server denies access: {answer}")),
        404 => fatal(io::ErrorKind::NotFound, format!("the server has no such file: {answer}")),
        408 | 425 | 429 | 500 | 502 | 503 | 504 => {
            let delay = header(headers, "retry-after").and_then(|text| text.parse().ok()).map(Duration::from_secs);
            Failure::Retry(format!("the server answers {answer}"), delay.unwrap_or_default().min(MAX_RETRY_AFTER))
        }
        _ => fatal(io::ErrorKind::Other, format!("the server answers {answer}")),
    }
}

/// Delays between consecutive failed attempts of a request.
pub(super) struct Backoff {
    attempts: u32,
    wait: Duration,
}

impl Backoff {
    pub fn new() -> Backoff {
        Backoff { attempts: 0, wait: FIRST_WAIT }
    }

    /// Waits before the next attempt. Fails if the failure is permanent, or after too many attempts.
    pub fn pause(&mut self, failure: Failure) -> io::Result<()> {
        let (reason, delay) = match failure {
            Failure::Fatal(error) => return Err(secrets::redact_error(error)),
            Failure::Retry(reason, delay) => (reason, delay),
        };
        self.attempts = self.attempts.saturating_add(1);
        if self.attempts >= ATTEMPTS {
            return Err(secrets::redact_error(io::Error::other(format!("{reason} (after {ATTEMPTS} attempts)"))));
        }
        std::thread::sleep(with_jitter(self.wait).max(delay));
        self.wait = self.wait.saturating_mul(2).min(LONGEST_WAIT);
        Ok(())
    }
}

/// Failure of a request without a response.
pub(super) fn request_failure(error: ureq::Error) -> Failure {
    match error {
        ureq::Error::BadUri(_) => fatal(io::ErrorKind::InvalidInput, "is not a valid URL"),
        ureq::Error::HostNotFound => Failure::Retry("the host name cannot be resolved: check the name and the network connection".into(), Duration::ZERO),
        error => transient(error),
    }
}

/// Random jitter of ±25 %, so that several threads do not retry at the same time.
fn with_jitter(wait: Duration) -> Duration {
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
    wait.mul_f64(0.75 + f64::from(nanos % 1000) / 2000.0)
}

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
            Failure::Retry(format!("the server answers {answer}"), retry_after(headers).unwrap_or_default().min(MAX_RETRY_AFTER))
        }
        _ => fatal(io::ErrorKind::Other, format!("the server answers {answer}")),
    }
}

/// The delay that a server requests, which is a number of seconds or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = header(headers, "retry-after")?;
    let until = |date: u64| {
        // The clocks of the two machines may differ.
        let now = header(headers, "date").and_then(seconds_of_date);
        date.saturating_sub(now.unwrap_or_else(|| SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs())))
    };
    text.parse().ok().or_else(|| seconds_of_date(text).map(until)).map(Duration::from_secs)
}

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Seconds from 1970 to a date in a header, such as `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110, section
/// 5.6.7, without the obsolete forms).
fn seconds_of_date(text: &str) -> Option<u64> {
    let parts: Vec<&str> = text.split([' ', ':']).collect();
    let [_, day, month, year, hour, minute, second, "GMT"] = parts.as_slice() else { return None };
    let [day, year, hour, minute, second] =
        [(day, 31), (year, 9999), (hour, 23), (minute, 59), (second, 60)].map(|(text, largest)| text.parse::<u64>().ok().filter(|number| *number <= largest));
    let month = u64::try_from(MONTHS.iter().position(|name| name == month)?).ok()?;
    // Years begin in March, so that a leap day is the last day of a year.
    let (year, month) = if month < 2 { (year?.checked_sub(1)?, month.saturating_add(10)) } else { (year?, month.saturating_sub(2)) };
    let days_before_month = month.saturating_mul(153).saturating_add(2) / 5;
    let days = [year.saturating_mul(365), year / 4, year / 400, days_before_month, day?].into_iter().sum::<u64>();
    // From the day before March of the year 0.
    let days = days.checked_sub(year / 100)?.checked_sub(719_469)?;
    Some([(days, 86_400), (hour?, 3600), (minute?, 60), (second?, 1)].into_iter().map(|(count, unit)| count.saturating_mul(unit)).sum())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_seconds_since_1970() {
        for (text, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Mon, 28 Feb 2000 23:59:59 GMT", Some(951_782_399)),
            ("Tue, 29 Feb 2000 00:00:00 GMT", Some(951_782_400)),
            ("Mon, 01 Mar 2100 00:00:00 GMT", Some(4_107_542_400)),
            ("Wed, 31 Dec 1969 23:59:59 GMT", None),
            ("Sun, 06 Now 1994 08:49:37 GMT", None),
            ("Sun, 06 Nov 1994 08:49:37 CET", None),
            ("soon", None),
        ] {
            assert_eq!(seconds_of_date(text), expected, "{text}");
        }
    }

    #[test]
    fn servers_request_delays_in_seconds_or_until_a_date() {
        let delay = |after: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("date", "Sun, 06 Nov 1994 08:49:37 GMT".parse().unwrap());
            headers.insert("retry-after", after.parse().unwrap());
            match refusal(StatusCode::SERVICE_UNAVAILABLE, &headers, None) {
                Failure::Retry(_, delay) => delay.as_secs(),
                Failure::Fatal(error) => panic!("{error}"),
            }
        };
        let delays = ["7", "Sun, 06 Nov 1994 08:49:47 GMT", "Sun, 06 Nov 1994 08:49:27 GMT", "Mon, 07 Nov 1994 08:49:37 GMT", "later"].map(delay);
        assert_eq!(delays, [7, 10, 0, 60, 0]);
    }
}

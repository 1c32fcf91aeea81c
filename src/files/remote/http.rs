//! HTTP that blocks: ranges of files, tried again where that can help, and held to what was asked for.

use std::cell::RefCell;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, SystemTime};

use ureq::http::{HeaderMap, Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::{lock, secrets};

/// What a version begins with that is a time.
const MODIFIED: &str = "modified ";
/// Attempts in a row without a byte.
const ATTEMPTS: u32 = 6;
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Longest wait that a server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(60);
/// Addresses that lead to each other.
const MOST_MOVES: usize = 5;
/// Seconds without a byte after which an attempt ends; `HF_HUB_DOWNLOAD_TIMEOUT` says another number.
const SILENCE: u64 = 30;

/// Where systems keep the certificates that they trust.
const CERTIFICATES: [&str; 4] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"];

thread_local! {
    /// What requests of this thread go over in the place of the connections of all.
    static OTHER: RefCell<Option<Agent>> = const { RefCell::new(None) };
}

/// What requests go over.
pub(super) fn agent() -> Agent {
    OTHER.with_borrow(Clone::clone).unwrap_or_else(|| AGENT.clone())
}

/// Connections, which are kept open and used again.
static AGENT: LazyLock<Agent> = LazyLock::new(|| {
    let said = std::env::var("HF_HUB_DOWNLOAD_TIMEOUT").ok().and_then(|text| text.parse().ok());
    let silence = Duration::from_secs(said.unwrap_or(SILENCE).max(1));
    let own = ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|name| std::env::var_os(name).is_some());
    let system = own || CERTIFICATES.iter().any(|path| std::path::Path::new(path).exists());
    // A container without certificates of its own trusts those that Mozilla trusts.
    let roots = if system { RootCerts::PlatformVerifier } else { RootCerts::WebPki };
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .timeout_connect(Some(silence))
        .timeout_per_read(Some(silence))
        .timeout_per_write(Some(silence))
        .max_idle_connections(64)
        .max_idle_connections_per_host(32)
        .user_agent(concat!("compress/", env!("CARGO_PKG_VERSION")))
        .tls_config(TlsConfig::builder().root_certs(roots).build())
        .build()
        .new_agent()
});

/// Refuses what goes over the network unencrypted, but for this machine.
pub(super) fn require_private(url: &str) -> io::Result<()> {
    let uri: Uri = url.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "is no address"))?;
    let local = uri.host().is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host));
    if uri.scheme_str() == Some("https") || (uri.scheme_str() == Some("http") && local) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "leads over an unencrypted connection to another machine: use https://"))
}

/// The part of an address that says who is asked.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at.saturating_add(3));
    let end = url.get(host..).and_then(|rest| rest.find(['/', '?', '#'])).map_or(url.len(), |end| end.saturating_add(host));
    url.get(..end).unwrap_or(url)
}

/// Where a file is: an address, which may lead to another one for some time.
#[derive(Debug)]
pub(super) struct Address {
    url: String,
    /// Sent to this server alone.
    token: Option<String>,
    moved: Mutex<Option<String>>,
}

/// What came.
#[derive(Default)]
pub(super) struct Came {
    pub bytes: Vec<u8>,
    /// Bytes of the whole file.
    pub total: u64,
    pub headers: HeaderMap,
}

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Another one may succeed, after so long at least.
    Again(String, Duration),
    Final(io::Error),
}

fn again(reason: impl std::fmt::Display) -> Failure {
    Failure::Again(reason.to_string(), Duration::ZERO)
}

fn last(kind: io::ErrorKind, reason: impl Into<String>) -> Failure {
    Failure::Final(io::Error::new(kind, reason.into()))
}

/// A header as text.
pub(super) fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// The mark of the contents, without what only says how closely it is meant.
fn etag(headers: &HeaderMap) -> Option<String> {
    header(headers, "etag").map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_owned())
}

/// When the contents were written, for servers that have no mark of them.
fn modified(headers: &HeaderMap) -> Option<String> {
    header(headers, "last-modified").map(|time| format!("{MODIFIED}{time}"))
}

/// What changes with the contents.
pub(super) fn version(headers: &HeaderMap) -> Option<String> {
    etag(headers).or_else(|| modified(headers))
}

impl Address {
    pub fn new(url: String, token: Option<String>) -> Address {
        Address { url, token, moved: Mutex::default() }
    }

    /// All bytes, of which there may be so many at most.
    pub fn whole(&self, most: u64) -> io::Result<Came> {
        self.fetch(None, None, most)
    }

    /// Some bytes of a file that has `total`, and whose mark is `version`.
    pub fn range(&self, range: Range<u64>, total: Option<u64>, version: Option<&str>) -> io::Result<Came> {
        self.fetch(Some(range), total, u64::MAX).and_then(|came| {
            let found = version.and_then(|meant| if meant.starts_with(MODIFIED) { modified(&came.headers) } else { etag(&came.headers) });
            match (version, found) {
                (Some(meant), Some(found)) if meant != found => Err(io::Error::other("was changed while it was read: start again")),
                _ => Ok(came),
            }
        })
    }

    fn fetch(&self, wanted: Option<Range<u64>>, total: Option<u64>, most: u64) -> io::Result<Came> {
        let length = wanted.as_ref().map(|range| range.end.saturating_sub(range.start));
        let mut came =
            Came { bytes: Vec::with_capacity(usize::try_from(length.unwrap_or(0)).unwrap_or(0)), total: total.unwrap_or(0), headers: HeaderMap::new() };
        let (mut attempts, mut wait) = (0u32, FIRST_WAIT);
        loop {
            let before = came.bytes.len();
            // What has come already is not asked for again.
            let rest = wanted.as_ref().map(|range| range.start.saturating_add(before as u64)..range.end);
            if rest.is_none() {
                came.bytes.clear();
            }
            match self.attempt(rest, total, most, &mut came) {
                Ok(()) => return Ok(came),
                Err(Failure::Final(error)) => return Err(secrets::without(error)),
                Err(Failure::Again(reason, asked)) => {
                    if wanted.is_some() && came.bytes.len() > before {
                        (attempts, wait) = (0, FIRST_WAIT);
                    }
                    attempts = attempts.saturating_add(1);
                    if attempts >= ATTEMPTS {
                        let error = io::Error::other(format!("{reason} (after {ATTEMPTS} attempts)"));
                        return Err(secrets::without(error));
                    }
                    std::thread::sleep(scattered(wait).max(asked));
                    wait = wait.saturating_mul(2).min(LONGEST_WAIT);
                }
            }
        }
    }

    pub(super) fn attempt(&self, wanted: Option<Range<u64>>, total: Option<u64>, most: u64, came: &mut Came) -> Result<(), Failure> {
        for _ in 0..MOST_MOVES {
            let moved = lock(&self.moved).clone();
            let url = moved.as_deref().unwrap_or(&self.url);
            let mut request = agent().get(url);
            if let Some(token) = self.token.as_ref().filter(|_| origin(url) == origin(&self.url)) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if let Some(range) = &wanted {
                request = request.header("Range", format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
            }
            let answer = request.call().map_err(told)?;
            let status = answer.status().as_u16();
            match status {
                301 | 302 | 303 | 307 | 308 => {
                    let to = header(answer.headers(), "location").ok_or_else(|| last(io::ErrorKind::InvalidData, "leads elsewhere and does not say where"))?;
                    let to = joined(url, to);
                    require_private(&to).map_err(Failure::Final)?;
                    came.headers.extend(answer.headers().clone());
                    *lock(&self.moved) = Some(to);
                }
                // Such an address holds for some minutes.
                400 | 401 | 403 | 404 | 410 if moved.is_some() => {
                    *lock(&self.moved) = None;
                    return Err(again(format!("the server that holds it answers {}", named(&answer))));
                }
                200 | 206 => return received(answer, wanted.as_ref(), total, most, came),
                401 => return Err(last(io::ErrorKind::PermissionDenied, format!("the server wants other credentials: {}", named(&answer)))),
                403 => return Err(last(io::ErrorKind::PermissionDenied, format!("the server refuses it: {}", named(&answer)))),
                404 => return Err(last(io::ErrorKind::NotFound, format!("the server has no such file: {}", named(&answer)))),
                416 => return Err(last(io::ErrorKind::InvalidData, "has become shorter than it was: start again")),
                408 | 425 | 429 | 500 | 502 | 503 | 504 => {
                    let asked = header(answer.headers(), "retry-after").and_then(|text| text.parse().ok()).map(Duration::from_secs);
                    return Err(Failure::Again(format!("the server answers {}", named(&answer)), asked.unwrap_or_default().min(LONGEST_ASKED)));
                }
                _ => return Err(last(io::ErrorKind::Other, format!("the server answers {}", named(&answer)))),
            }
        }
        *lock(&self.moved) = None;
        Err(again("leads from one address to another without an end"))
    }
}

/// Takes the bytes of an answer, if they are those that were asked for.
fn received(answer: Response<Body>, wanted: Option<&Range<u64>>, total: Option<u64>, most: u64, came: &mut Came) -> Result<(), Failure> {
    let (parts, body) = answer.into_parts();
    let announced = header(&parts.headers, "content-length").and_then(|text| text.parse::<u64>().ok());
    let (count, all) = match wanted {
        Some(range) if parts.status.as_u16() == 206 => {
            let said = header(&parts.headers, "content-range").unwrap_or("");
            let parsed = content_range(said).ok_or_else(|| again(format!("the server sends `{said}` where a range was asked for")))?;
            let (start, end, all) = parsed;
            if start != range.start || end > range.end || end <= start {
                let wrong = format!("the server sends bytes {start} to {end} where {} to {} were asked for", range.start, range.end);
                return Err(again(wrong));
            }
            (end.saturating_sub(start), all)
        }
        // A server that knows no ranges sends everything.
        Some(range) => match announced {
            Some(all) if range.start == 0 && range.end <= all => (range.end, all),
            _ => return Err(last(io::ErrorKind::Unsupported, "its server sends no ranges of files: download it first")),
        },
        None => (announced.unwrap_or(u64::MAX), announced.unwrap_or(0)),
    };
    if let Some(meant) = total.filter(|meant| *meant != all) {
        return Err(last(io::ErrorKind::InvalidData, format!("has {all} bytes now, and had {meant}: it was changed, start again")));
    }
    if wanted.is_none() && announced.is_some_and(|announced| announced > most) {
        return Err(last(io::ErrorKind::InvalidData, format!("is an answer of more than {most} bytes")));
    }
    came.total = all;
    came.headers.extend(parts.headers);
    let before = came.bytes.len();
    let mut reader = body.into_with_config().limit(u64::MAX).reader();
    let taken = reader.by_ref().take(count.min(most.saturating_add(1))).read_to_end(&mut came.bytes);
    let got = came.bytes.len().saturating_sub(before) as u64;
    match taken {
        Err(e) => Err(again(format!("the connection was cut after {got} bytes: {e}"))),
        Ok(_) if wanted.is_none() && got > most => Err(last(io::ErrorKind::InvalidData, format!("is an answer of more than {most} bytes"))),
        Ok(_) if (wanted.is_some() || announced.is_some()) && got < count => Err(again(format!("the connection was cut after {got} of {count} bytes"))),
        // Fewer than asked for, as the server said: the rest is asked for next.
        Ok(_) if wanted.is_some_and(|range| got < range.end.saturating_sub(range.start)) => Err(again("the server sends less than was asked for")),
        Ok(_) => Ok(()),
    }
}

/// First byte, one past the last, and bytes of the whole, of `bytes 0-9/100`.
pub(super) fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, end) = range.split_once('-')?;
    Some((first.trim().parse().ok()?, end.trim().parse::<u64>().ok()?.checked_add(1)?, total.trim().parse().ok()?))
}

/// An address beside another one.
fn joined(from: &str, to: &str) -> String {
    match () {
        () if to.contains("://") => to.to_owned(),
        () if to.starts_with("//") => format!("{}{to}", from.split("//").next().unwrap_or("https:")),
        () if to.starts_with('/') => format!("{}{to}", origin(from)),
        () => format!("{}/{to}", from.split(['?', '#']).next().and_then(|plain| plain.rsplit_once('/')).map_or(from, |(folder, _)| folder)),
    }
}

/// A status in words, with what the server says about it.
fn named(answer: &Response<Body>) -> String {
    let said = header(answer.headers(), "x-error-message").map(|text| format!(" ({})", text.chars().take(200).collect::<String>()));
    format!("{}{}", answer.status(), said.unwrap_or_default())
}

/// What kept a request from being answered.
fn told(error: ureq::Error) -> Failure {
    match error {
        ureq::Error::BadUri(_) => last(io::ErrorKind::InvalidInput, "is no address"),
        ureq::Error::HostNotFound => Failure::Again("there is no server of this name, or no network".into(), Duration::ZERO),
        error => again(error),
    }
}

/// Waits of several threads that end at different times.
fn scattered(wait: Duration) -> Duration {
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
    wait.mul_f64(0.75 + f64::from(nanos % 1000) / 2000.0)
}

#[cfg(test)]
mod tests {
    mod changes {
        include!(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/changes.rs"));
    }
    mod wire {
        include!(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/wire.rs"));
    }

    use std::path::{Component, Path};
    use std::time::Instant;

    use object_store::RetryConfig;
    use object_store::aws::AmazonS3Builder;

    use self::changes::Random;
    use super::super::bucket::{Bucket, of_s3};
    use super::super::{Found, Place, hub};
    use super::*;

    /// What says something else in an answer.
    const WORDS: [&str; 14] =
        ["\r\n", "0", "-1", "18446744073709551615", "*", "/", "\"", "<", ">", "../", "chunked", "\u{0}", "Content-Length: 3\r\n", "\u{e9}"];

    #[test]
    fn addresses_and_ranges_are_taken_apart() {
        assert_eq!(content_range("bytes 5-9/100"), Some((5, 10, 100)));
        assert_eq!(content_range("bytes 5-9/*"), None);
        assert_eq!(content_range("bytes 0-18446744073709551615/1"), None);
        assert_eq!(origin("https://a.b:8/c?d"), "https://a.b:8");
        assert_eq!(joined("https://a/b/c?d=e/f", "/x"), "https://a/x");
        assert_eq!(joined("https://a/b/c?d=e/f", "x"), "https://a/b/x");
        assert_eq!(joined("https://a/b", "//c/d"), "https://c/d");
        assert_eq!(joined("https://a/b", "http://c/d"), "http://c/d");
        assert!(require_private("http://127.0.0.1:5/x").is_ok() && require_private("https://a/x").is_ok());
        assert!(require_private("http://a/x").is_err() && require_private("ftp://127.0.0.1/x").is_err());
    }

    const FILE: &str =
        "HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\nContent-Range: bytes 4-11/64\r\nETag: \"one\"\r\nConnection: close\r\n\r\n01234567";
    const ANSWERS: [&str; 6] = [
        FILE,
        "HTTP/1.1 200 OK\r\nContent-Length: 64\r\nConnection: close\r\n\r\n0123456789012345678901234567890123456789012345678901234567890123",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n8\r\n01234567\r\n0\r\n\r\n",
        "HTTP/1.1 302 Found\r\nLocation: /elsewhere?sig=secret\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        "HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        "HTTP/1.1 401 No\r\nX-Error-Message: no\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno",
    ];

    /// Ranges and small files over a connection; gives how many came.
    fn answers(rounds: usize, seed: u64) -> usize {
        OTHER.set(Some(wire::agent()));
        let (mut random, mut came) = (Random(seed), 0);
        for round in 0..rounds {
            wire::say(random.changed(ANSWERS[round % ANSWERS.len()].as_bytes(), &WORDS));
            let url = Address::new(format!("{}/file", wire::SERVER), None);
            let (mut ranged, mut whole) = (Came::default(), Came::default());
            match url.attempt(Some(4..12), Some(64), u64::MAX, &mut ranged) {
                Ok(()) => {
                    assert_eq!((ranged.bytes.len(), ranged.total), (8, 64), "{}", wire::said());
                    came += 1;
                }
                Err(Failure::Again(reason, wait)) => assert!(!reason.contains("secret") && wait.as_secs() <= 60),
                Err(Failure::Final(_)) => {}
            }
            assert!(ranged.bytes.len() <= 8);
            came += usize::from(url.attempt(None, None, 16, &mut whole).is_ok());
            assert!(whole.bytes.len() <= 17, "{}", whole.bytes.len());
        }
        came
    }

    const LIST: &str = "<?xml version=\"1.0\"?><ListBucketResult><Contents><Key>a/model.safetensors</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>\
    <ETag>\"one\"</ETag><Size>64</Size></Contents><Contents><Key>a/config.json</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>2</Size></Contents>\
    <IsTruncated>false</IsTruncated></ListBucketResult>";

    const FILE_OF_BUCKET: &str = "HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\nContent-Range: bytes 4-11/64\r\n\
        Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nETag: \"one\"\r\nConnection: close\r\n\r\n01234567";

    /// A bucket, and a file in it.
    fn bucket() -> (Bucket, Found) {
        let builder = AmazonS3Builder::new().with_bucket_name("bucket").with_endpoint(wire::SERVER).with_allow_http(true).with_skip_signature(true);
        let place = Bucket { store: of_s3(builder, RetryConfig { max_retries: 0, ..RetryConfig::default() }).unwrap() };
        (place, Found { name: "a/b".into(), bytes: 64, version: Some("\"one\"".into()), sha256: None, here: None })
    }

    /// The crate that reads buckets adds one to the last byte.
    #[test]
    fn a_range_of_a_bucket_that_ends_beyond_all_numbers_is_refused() {
        OTHER.set(Some(wire::agent()));
        let (place, file) = bucket();
        let read = |range: &str| {
            wire::say(FILE_OF_BUCKET.replace("4-11/64", range).into_bytes());
            place.read(&file, 4..12)
        };
        assert_eq!(read("4-11/64").unwrap().len(), 8);
        let message = read("4-18446744073709551615/64").unwrap_err().to_string();
        assert!(message.contains("bytes 4-18446744073709551615/64"), "{message}");
    }

    /// What a bucket lists and holds; gives how often there was something.
    fn buckets(rounds: usize, seed: u64) -> usize {
        OTHER.set(Some(wire::agent()));
        let (mut random, mut came) = (Random(seed), 0);
        let (place, file) = bucket();
        for round in 0..rounds {
            match round % 3 {
                0 => {
                    let body = random.changed(LIST.as_bytes(), &WORDS);
                    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                    wire::say([head.as_bytes(), &body].concat());
                    came += place.list("a").map_or(0, |found| usize::from(!found.is_empty()));
                }
                1 => {
                    wire::say(random.changed(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\nETag: \"one\"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nConnection: close\r\n\r\n",
                        &WORDS,
                    ));
                    came += usize::from(matches!(place.find("a/b"), Ok(Some(_))));
                }
                _ => {
                    wire::say(random.changed(FILE_OF_BUCKET.as_bytes(), &WORDS));
                    came += place.read(&file, 4..12).map_or(0, |bytes| usize::from(bytes.len() == 8));
                }
            }
        }
        came
    }

    /// Lists of the Hub, without a connection; gives how many are lists.
    fn pages(rounds: usize, seed: u64) -> usize {
        let page = br#"[{"type":"file","path":"model.safetensors","size":64,"oid":"9e26","lfs":{"oid":"sha256:44136f","size":64}},{"type":"directory","path":"a"},{"type":"file","path":"a/config.json","size":2,"oid":"9e26"}]"#;
        let link = "<https://a/x?cursor=1>; rel=\"next\", <https://a/y>; rel=\"last\"";
        let (mut random, mut lists) = (Random(seed), 0);
        for _ in 0..rounds {
            let link = String::from_utf8_lossy(&random.changed(link.as_bytes(), &WORDS)).into_owned();
            let Ok(files) = hub::page(&random.changed(page, &WORDS), None) else { continue };
            let next = hub::next(&link);
            assert!(files.iter().all(|file| Path::new(&file.name).components().all(|part| matches!(part, Component::Normal(_)))), "{files:?}");
            assert!(next.is_none_or(|next| link.contains(next)));
            lists += 1;
        }
        lists
    }

    #[test]
    fn changed_answers_are_refused_or_are_what_was_asked_for() {
        let counts = [answers(120, 7), buckets(120, 7), pages(1000, 7)];
        assert!(counts.iter().zip([230, 115, 990]).all(|(count, most)| (5..most).contains(count)), "{counts:?}");
    }

    #[test]
    #[ignore = "minutes: `scripts/fuzz --plain http`"]
    fn changed_answers_many_times() {
        let rounds: usize = std::env::var("MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(300_000);
        type Check = fn(usize, u64) -> usize;
        let all: [(&str, Check); 3] = [("answers", answers), ("buckets", buckets), ("pages", pages)];
        for (what, check) in all {
            let (start, came) = (Instant::now(), check(rounds, 11));
            let seconds = start.elapsed().as_secs_f64();
            println!("{what}: {came} of {rounds} come, {seconds:.0} s, {:.0} a second", rounds as f64 / seconds.max(1e-9));
        }
    }
}

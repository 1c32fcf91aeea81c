//! Blocking HTTP client: range requests with retries and validation of the responses.

use std::cell::RefCell;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use ureq::http::{HeaderMap, Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

pub(super) use super::failure::header;
use super::failure::{Backoff, Failure, describe_status, error_message, fatal, refusal, request_failure, transient};
use super::lock;

/// Prefix of versions that are modification times.
const MODIFIED: &str = "modified ";
/// Maximum length of a chain of redirects.
const MAX_REDIRECTS: usize = 5;
/// Read timeout in seconds, unless `HF_HUB_DOWNLOAD_TIMEOUT` is set.
const READ_TIMEOUT: u64 = 30;
/// Maximum read timeout in seconds: times that are much later cannot be represented.
const MAX_READ_TIMEOUT: u64 = 1 << 32;

/// Common locations of the system's certificate bundle.
const CERTIFICATES: [&str; 4] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"];

thread_local! {
    /// Replaces [`AGENT`] for requests of this thread.
    static THREAD_AGENT: RefCell<Option<Agent>> = const { RefCell::new(None) };
}

/// The agent for requests of this thread.
pub(super) fn agent() -> Agent {
    THREAD_AGENT.with_borrow(Clone::clone).unwrap_or_else(|| AGENT.clone())
}

/// Shared agent with a pool of keep-alive connections.
static AGENT: LazyLock<Agent> = LazyLock::new(|| {
    let timeout = read_timeout(std::env::var("HF_HUB_DOWNLOAD_TIMEOUT").ok().as_deref());
    let own = ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|name| std::env::var_os(name).is_some());
    let system = own || CERTIFICATES.iter().any(|path| std::path::Path::new(path).exists());
    // Falls back to Mozilla's root certificates in containers without a certificate bundle.
    let roots = if system { RootCerts::PlatformVerifier } else { RootCerts::WebPki };
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .timeout_connect(Some(timeout))
        .timeout_per_read(Some(timeout))
        .timeout_per_write(Some(timeout))
        .max_idle_connections(64)
        .max_idle_connections_per_host(32)
        .user_agent(concat!("compress/", env!("CARGO_PKG_VERSION")))
        .tls_config(TlsConfig::builder().root_certs(roots).build())
        .build()
        .new_agent()
});

/// The configured read timeout.
fn read_timeout(configured: Option<&str>) -> Duration {
    let seconds = configured.and_then(|text| text.parse().ok()).unwrap_or(READ_TIMEOUT);
    Duration::from_secs(seconds.clamp(1, MAX_READ_TIMEOUT))
}

/// Rejects unencrypted connections, except to this machine.
pub(super) fn require_private(url: &str) -> io::Result<()> {
    let uri: Uri = url.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "is not a valid URL"))?;
    let local = uri.host().is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host));
    if uri.scheme_str() == Some("https") || (uri.scheme_str() == Some("http") && local) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "leads over an unencrypted connection to another machine; use https://"))
}

/// Scheme and authority of a URL.
pub(super) fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at.saturating_add(3));
    let end = url.get(host..).and_then(|rest| rest.find(['/', '?', '#'])).map_or(url.len(), |end| end.saturating_add(host));
    url.get(..end).unwrap_or(url)
}

/// URL of a file, with the target of its last redirect.
#[derive(Debug)]
pub(super) struct Address {
    url: String,
    /// Sent only to the origin of `url`.
    token: Option<String>,
    redirect: Mutex<Option<String>>,
}

/// A received response.
#[derive(Default)]
pub(super) struct Received {
    pub bytes: Vec<u8>,
    /// Size of the complete file in bytes.
    pub total: u64,
    pub headers: HeaderMap,
}

/// The ETag without quotes and without the prefix of weak tags.
fn etag(headers: &HeaderMap) -> Option<String> {
    header(headers, "etag").map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_owned())
}

/// Modification time, for servers without ETags.
fn modified(headers: &HeaderMap) -> Option<String> {
    header(headers, "last-modified").map(|time| format!("{MODIFIED}{time}"))
}

/// Identifier that changes with the contents: the ETag or the modification time.
pub(super) fn version(headers: &HeaderMap) -> Option<String> {
    etag(headers).or_else(|| modified(headers))
}

impl Address {
    pub fn new(url: String, token: Option<String>) -> Address {
        Address { url, token, redirect: Mutex::default() }
    }

    /// Downloads the complete file, of at most `limit` bytes.
    pub fn read_all(&self, limit: u64) -> io::Result<Received> {
        self.fetch(None, None, limit)
    }

    /// Downloads a range. The response must match the file size `total` and the `version`, if given.
    pub fn range(&self, range: Range<u64>, total: Option<u64>, version: Option<&str>) -> io::Result<Received> {
        self.fetch(Some(range), total, u64::MAX).and_then(|received| {
            let found = version.and_then(|expected| if expected.starts_with(MODIFIED) { modified(&received.headers) } else { etag(&received.headers) });
            match (version, found) {
                (Some(expected), Some(found)) if expected != found => Err(io::Error::other("was modified while it was read; start again")),
                _ => Ok(received),
            }
        })
    }

    fn fetch(&self, range: Option<Range<u64>>, total: Option<u64>, limit: u64) -> io::Result<Received> {
        let length = range.as_ref().map(|range| range.end.saturating_sub(range.start));
        let mut received =
            Received { bytes: Vec::with_capacity(usize::try_from(length.unwrap_or(0)).unwrap_or(0)), total: total.unwrap_or(0), headers: HeaderMap::new() };
        let mut backoff = Backoff::new();
        loop {
            let before = received.bytes.len();
            // Continues after the bytes received so far.
            let rest = range.as_ref().map(|range| range.start.saturating_add(before as u64)..range.end);
            if rest.is_none() {
                received.bytes.clear();
            }
            let Err(failure) = self.attempt(rest, total, limit, &mut received) else { return Ok(received) };
            if range.is_some() && received.bytes.len() > before {
                backoff = Backoff::new();
            }
            backoff.pause(failure)?;
        }
    }

    pub(super) fn attempt(&self, range: Option<Range<u64>>, total: Option<u64>, limit: u64, received: &mut Received) -> Result<(), Failure> {
        for _ in 0..MAX_REDIRECTS {
            let redirect = lock(&self.redirect).clone();
            let url = redirect.as_deref().unwrap_or(&self.url);
            let mut request = agent().get(url);
            if let Some(token) = self.token.as_ref().filter(|_| origin(url) == origin(&self.url)) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if let Some(range) = &range {
                request = request.header("Range", format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
            }
            let answer = request.call().map_err(request_failure)?;
            let status = answer.status().as_u16();
            match status {
                301 | 302 | 303 | 307 | 308 => {
                    let to =
                        header(answer.headers(), "location").ok_or_else(|| fatal(io::ErrorKind::InvalidData, "the server redirects without a location"))?;
                    let to = resolve_location(url, to);
                    require_private(&to).map_err(Failure::Fatal)?;
                    received.headers.extend(answer.headers().clone());
                    *lock(&self.redirect) = Some(to);
                }
                // Redirect targets such as signed URLs expire after some minutes.
                400 | 401 | 403 | 404 | 410 if redirect.is_some() => {
                    *lock(&self.redirect) = None;
                    return Err(transient(format!("the storage server answers {}", describe_status(answer.status(), error_message(answer.headers())))));
                }
                200 | 206 => return receive(answer, range.as_ref(), total, limit, received),
                // The first byte of an empty file.
                416 if total.is_none() => {
                    received.headers.extend(answer.headers().clone());
                    return Ok(());
                }
                416 => return Err(fatal(io::ErrorKind::InvalidData, "was truncated while it was read; start again")),
                _ => return Err(refusal(answer.status(), answer.headers(), error_message(answer.headers()))),
            }
        }
        *lock(&self.redirect) = None;
        Err(transient(format!("more than {MAX_REDIRECTS} redirects")))
    }
}

/// Reads the body of a response after validating it against the request.
fn receive(answer: Response<Body>, range: Option<&Range<u64>>, total: Option<u64>, limit: u64, received: &mut Received) -> Result<(), Failure> {
    let (parts, body) = answer.into_parts();
    let announced = header(&parts.headers, "content-length").and_then(|text| text.parse::<u64>().ok());
    let (count, all) = match range {
        Some(range) if parts.status.as_u16() == 206 => {
            let text = header(&parts.headers, "content-range").unwrap_or("");
            let parsed = content_range(text).ok_or_else(|| transient(format!("the server sends the invalid range `{text}`")))?;
            let (start, end, all) = parsed;
            if start != range.start || end > range.end || end <= start {
                let mismatch = format!("the server sends bytes {start} to {end} instead of {} to {}", range.start, range.end);
                return Err(transient(mismatch));
            }
            (end.saturating_sub(start), all)
        }
        // Servers without range support send the complete file.
        Some(range) => match announced {
            Some(all) if range.start == 0 && range.end <= all => (range.end, all),
            _ => return Err(fatal(io::ErrorKind::Unsupported, "its server does not support range requests; download the file first")),
        },
        None => (announced.unwrap_or(u64::MAX), announced.unwrap_or(0)),
    };
    if let Some(expected) = total.filter(|expected| *expected != all) {
        return Err(fatal(io::ErrorKind::InvalidData, format!("was modified while it was read: it has {all} bytes now, and had {expected}; start again")));
    }
    if range.is_none() && announced.is_some_and(|announced| announced > limit) {
        return Err(fatal(io::ErrorKind::InvalidData, format!("the response has more than {limit} bytes")));
    }
    received.total = all;
    received.headers.extend(parts.headers);
    let before = received.bytes.len();
    let mut reader = body.into_with_config().limit(u64::MAX).reader();
    let result = reader.by_ref().take(count.min(limit.saturating_add(1))).read_to_end(&mut received.bytes);
    let got = received.bytes.len().saturating_sub(before) as u64;
    match result {
        Err(e) => Err(transient(format!("the connection was cut after {got} bytes: {e}"))),
        Ok(_) if range.is_none() && got > limit => Err(fatal(io::ErrorKind::InvalidData, format!("the response has more than {limit} bytes"))),
        Ok(_) if (range.is_some() || announced.is_some()) && got < count => Err(transient(format!("the connection was cut after {got} of {count} bytes"))),
        // A server may announce a shorter range. The next attempt requests the rest.
        Ok(_) if range.is_some_and(|range| got < range.end.saturating_sub(range.start)) => Err(transient("the server sends less than the requested range")),
        Ok(_) => Ok(()),
    }
}

/// Parses `bytes 0-9/100` into the first byte, one past the last byte, and the total size.
pub(super) fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, end) = range.split_once('-')?;
    Some((first.trim().parse().ok()?, end.trim().parse::<u64>().ok()?.checked_add(1)?, total.trim().parse().ok()?))
}

/// Resolves a `Location` header relative to the URL of the request.
fn resolve_location(from: &str, to: &str) -> String {
    match () {
        () if to.contains("://") => to.to_owned(),
        () if to.starts_with("//") => format!("{}{to}", from.split("//").next().unwrap_or("https:")),
        () if to.starts_with('/') => format!("{}{to}", origin(from)),
        () => format!("{}/{to}", from.split(['?', '#']).next().and_then(|plain| plain.rsplit_once('/')).map_or(from, |(folder, _)| folder)),
    }
}

#[cfg(test)]
mod tests {
    mod changes {
        include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/changes.rs"));
    }
    mod wire {
        include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/wire.rs"));
    }

    use std::path::{Component, Path};
    use std::time::Instant;

    use object_store::RetryConfig;
    use object_store::aws::AmazonS3Builder;

    use self::changes::Random;
    use super::super::bucket::{Bucket, build_s3};
    use super::super::{Backend, Found, hub};
    use super::*;

    /// Headers and values that a mutated response may contain.
    const WORDS: [&str; 14] =
        ["\r\n", "0", "-1", "18446744073709551615", "*", "/", "\"", "<", ">", "../", "chunked", "\u{0}", "Content-Length: 3\r\n", "\u{e9}"];

    #[test]
    fn any_timeout_can_be_added_to_the_time() {
        let seconds = |text| read_timeout(text).as_secs();
        assert_eq!([seconds(None), seconds(Some("0")), seconds(Some("7")), seconds(Some("x"))], [READ_TIMEOUT, 1, 7, READ_TIMEOUT]);
        assert!(Instant::now().checked_add(read_timeout(Some("18446744073709551615"))).is_some());
    }

    #[test]
    fn urls_and_ranges_are_parsed() {
        assert_eq!(content_range("bytes 5-9/100"), Some((5, 10, 100)));
        assert_eq!(content_range("bytes 5-9/*"), None);
        assert_eq!(content_range("bytes 0-18446744073709551615/1"), None);
        assert_eq!(origin("https://a.b:8/c?d"), "https://a.b:8");
        assert_eq!(resolve_location("https://a/b/c?d=e/f", "/x"), "https://a/x");
        assert_eq!(resolve_location("https://a/b/c?d=e/f", "x"), "https://a/b/x");
        assert_eq!(resolve_location("https://a/b", "//c/d"), "https://c/d");
        assert_eq!(resolve_location("https://a/b", "http://c/d"), "http://c/d");
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

    /// Fetches ranges and small files with mutated responses. Returns the number of successful requests.
    fn answers(rounds: usize, seed: u64) -> usize {
        THREAD_AGENT.set(Some(wire::agent()));
        let (mut random, mut succeeded) = (Random(seed), 0);
        for round in 0..rounds {
            wire::set_response(random.changed(ANSWERS[round % ANSWERS.len()].as_bytes(), &WORDS));
            let url = Address::new(format!("{}/file", wire::SERVER), None);
            let (mut ranged, mut complete) = (Received::default(), Received::default());
            match url.attempt(Some(4..12), Some(64), u64::MAX, &mut ranged) {
                Ok(()) => {
                    assert_eq!((ranged.bytes.len(), ranged.total), (8, 64), "{}", wire::response());
                    succeeded += 1;
                }
                Err(Failure::Retry(reason, wait)) => assert!(!reason.contains("secret") && wait.as_secs() <= 60),
                Err(Failure::Fatal(_)) => {}
            }
            assert!(ranged.bytes.len() <= 8);
            succeeded += usize::from(url.attempt(None, None, 16, &mut complete).is_ok());
            assert!(complete.bytes.len() <= 17, "{}", complete.bytes.len());
        }
        succeeded
    }

    const LIST: &str = "<?xml version=\"1.0\"?><ListBucketResult><Contents><Key>a/model.safetensors</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>\
    <ETag>\"one\"</ETag><Size>64</Size></Contents><Contents><Key>a/config.json</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>2</Size></Contents>\
    <IsTruncated>false</IsTruncated></ListBucketResult>";

    const FILE_OF_BUCKET: &str = "HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\nContent-Range: bytes 4-11/64\r\n\
        Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nETag: \"one\"\r\nConnection: close\r\n\r\n01234567";

    /// A bucket, and a file in it.
    fn bucket() -> (Bucket, Found) {
        let builder = AmazonS3Builder::new().with_bucket_name("bucket").with_endpoint(wire::SERVER).with_allow_http(true).with_skip_signature(true);
        let bucket = Bucket { store: build_s3(builder, RetryConfig { max_retries: 0, ..RetryConfig::default() }).unwrap() };
        (bucket, Found { name: "a/b".into(), bytes: 64, version: Some("\"one\"".into()), sha256: None, local: None })
    }

    /// object_store adds one to the last byte.
    #[test]
    fn a_range_of_a_bucket_with_an_overflowing_end_is_rejected() {
        THREAD_AGENT.set(Some(wire::agent()));
        let (bucket, file) = bucket();
        let read = |range: &str| {
            wire::set_response(FILE_OF_BUCKET.replace("4-11/64", range).into_bytes());
            bucket.read(&file, 4..12)
        };
        assert_eq!(read("4-11/64").unwrap().len(), 8);
        let message = read("4-18446744073709551615/64").unwrap_err().to_string();
        assert!(message.contains("bytes 4-18446744073709551615/64"), "{message}");
    }

    #[test]
    fn a_listing_without_an_end_is_an_error() {
        THREAD_AGENT.set(Some(wire::agent()));
        let body = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken></ListBucketResult>";
        wire::set_response(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()).into_bytes());
        let message = bucket().0.list("a").unwrap_err().to_string();
        assert!(message.contains("more than 2000 pages"), "{message}");
        let body = body.replace("<NextContinuationToken>x<", "<NextContinuationToken><");
        wire::set_response(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()).into_bytes());
        assert!(bucket().0.list("a").unwrap().is_empty());
    }

    /// Lists and reads a bucket with mutated responses. Returns the number of successful requests.
    fn buckets(rounds: usize, seed: u64) -> usize {
        THREAD_AGENT.set(Some(wire::agent()));
        let (mut random, mut succeeded) = (Random(seed), 0);
        let (bucket, file) = bucket();
        for round in 0..rounds {
            match round % 3 {
                0 => {
                    let body = random.changed(LIST.as_bytes(), &WORDS);
                    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                    wire::set_response([head.as_bytes(), &body].concat());
                    succeeded += bucket.list("a").map_or(0, |found| usize::from(!found.is_empty()));
                }
                1 => {
                    wire::set_response(random.changed(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\nETag: \"one\"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nConnection: close\r\n\r\n",
                        &WORDS,
                    ));
                    succeeded += usize::from(matches!(bucket.find("a/b"), Ok(Some(_))));
                }
                _ => {
                    wire::set_response(random.changed(FILE_OF_BUCKET.as_bytes(), &WORDS));
                    succeeded += bucket.read(&file, 4..12).map_or(0, |bytes| usize::from(bytes.len() == 8));
                }
            }
        }
        succeeded
    }

    /// Parses mutated file lists of the Hub, without a connection. Returns the number of valid lists.
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
    fn mutated_responses_are_rejected_or_match_the_request() {
        let counts = [answers(120, 7), buckets(120, 7), pages(1000, 7)];
        assert!(counts.iter().zip([230, 115, 990]).all(|(count, most)| (5..most).contains(count)), "{counts:?}");
    }

    #[test]
    #[ignore = "minutes: `scripts/fuzz --plain http`"]
    fn mutated_responses_many_times() {
        let rounds: usize = std::env::var("MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(300_000);
        type Check = fn(usize, u64) -> usize;
        let all: [(&str, Check); 3] = [("answers", answers), ("buckets", buckets), ("pages", pages)];
        for (what, check) in all {
            let (start, succeeded) = (Instant::now(), check(rounds, 11));
            let seconds = start.elapsed().as_secs_f64();
            println!("{what}: {succeeded} of {rounds} succeed, {seconds:.0} s, {:.0} per second", rounds as f64 / seconds.max(1e-9));
        }
    }
}

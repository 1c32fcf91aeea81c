//! Answers with changes at random places: they are refused, or give what was asked for. Connections are in memory.

#[path = "../../../fuzz/changes.rs"]
mod changes;

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Component, Path};
use std::time::Instant;

use object_store::RetryConfig;
use object_store::aws::AmazonS3Builder;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};
use ureq::{Agent, Error};

use self::changes::Random;
use super::bucket::{Bucket, of_s3};
use super::http::{Address, Came, Failure};
use super::{Found, Place, hub};

/// What says something else in an answer.
const WORDS: [&str; 14] = ["\r\n", "0", "-1", "18446744073709551615", "*", "/", "\"", "<", ">", "../", "chunked", "\u{0}", "Content-Length: 3\r\n", "\u{e9}"];

const SERVER: &str = "http://127.0.0.1:9";

thread_local! {
    /// What requests of this thread go over, and what is answered.
    static TOLD: RefCell<(Option<Agent>, Vec<u8>)> = const { RefCell::new((None, Vec::new())) };
}

/// What requests of this thread go over, where they go nowhere.
pub(super) fn agent() -> Option<Agent> {
    TOLD.with_borrow(|(agent, _)| agent.clone())
}

fn say(answer: Vec<u8>) {
    TOLD.with_borrow_mut(|told| told.1 = answer);
}

fn said() -> String {
    TOLD.with_borrow(|told| String::from_utf8_lossy(&told.1).into_owned())
}

/// While it is there, this thread's requests are answered with what it [says](say).
#[derive(Debug)]
struct Told;

impl Told {
    fn begin() -> Told {
        let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).max_redirects_will_error(false);
        let config = config.input_buffer_size(8192).output_buffer_size(8192).max_idle_connections(0).build();
        TOLD.with_borrow_mut(|told| told.0 = Some(Agent::with_parts(config, Told, Told)));
        Told
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        TOLD.with_borrow_mut(|told| told.0 = None);
    }
}

impl Resolver for Told {
    fn resolve(&self, _uri: &Uri, _config: &Config, _timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut found = self.empty();
        found.push(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        Ok(found)
    }
}

impl Connector<()> for Told {
    type Out = Connection;

    fn connect(&self, details: &ConnectionDetails, _chained: Option<()>) -> Result<Option<Connection>, Error> {
        let buffers = LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Connection { buffers, answer: TOLD.with_borrow(|told| told.1.clone()), at: 0 }))
    }
}

/// A connection that ends behind its answer.
#[derive(Debug)]
struct Connection {
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

const FILE: &str = "HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\nContent-Range: bytes 4-11/64\r\nETag: \"one\"\r\nConnection: close\r\n\r\n01234567";
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
    let (_told, mut random, mut came) = (Told::begin(), Random(seed), 0);
    for round in 0..rounds {
        say(random.changed(ANSWERS[round % ANSWERS.len()].as_bytes(), &WORDS));
        let url = Address::new(format!("{SERVER}/file"), None);
        let (mut ranged, mut whole) = (Came::default(), Came::default());
        match url.attempt(Some(4..12), Some(64), u64::MAX, &mut ranged) {
            Ok(()) => {
                assert_eq!((ranged.bytes.len(), ranged.total), (8, 64), "{}", said());
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

/// What a bucket lists and holds; gives how often there was something.
fn buckets(rounds: usize, seed: u64) -> usize {
    let (_told, mut random, mut came) = (Told::begin(), Random(seed), 0);
    let builder = AmazonS3Builder::new().with_bucket_name("bucket").with_endpoint(SERVER).with_allow_http(true).with_skip_signature(true);
    let place = Bucket { store: of_s3(builder, RetryConfig { max_retries: 0, ..RetryConfig::default() }).unwrap() };
    let file = Found { name: "a/b".into(), bytes: 64, version: Some("\"one\"".into()), here: None };
    for round in 0..rounds {
        match round % 3 {
            0 => {
                let body = random.changed(LIST.as_bytes(), &WORDS);
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                say([head.as_bytes(), &body].concat());
                came += place.list("a").map_or(0, |found| usize::from(!found.is_empty()));
            }
            1 => {
                say(random.changed(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\nETag: \"one\"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nConnection: close\r\n\r\n",
                    &WORDS,
                ));
                came += usize::from(matches!(place.find("a/b"), Ok(Some(_))));
            }
            _ => {
                let with_date = FILE.replace("ETag", "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nETag");
                say(random.changed(with_date.as_bytes(), &WORDS));
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

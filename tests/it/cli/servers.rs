//! Local servers that emulate the Hub and S3, with configurable faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Request {
    fn read(stream: &mut BufReader<TcpStream>) -> Option<Request> {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        stream.read_exact(&mut body).ok()?;
        Some(Request { method, target, headers, body })
    }

    /// The path without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap()
    }

    /// A value of the query.
    pub fn query(&self, name: &str) -> Option<String> {
        let query = self.target.split_once('?')?.1;
        let value =
            query.split('&').find_map(|pair| pair.split_once('=').unwrap_or((pair, "")).0.eq(name).then(|| pair.split_once('=').unwrap_or((pair, "")).1))?;
        Some(unescaped(value))
    }

    /// Start and end of the requested range.
    pub fn range(&self, length: usize) -> Option<(usize, usize)> {
        let (first, last) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, length.min(last.parse::<usize>().ok()? + 1)))
    }
}

/// Decodes `%2F` and similar escapes.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).unwrap()
}

/// A response.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Number of bytes of the body after which the connection is closed.
    pub cut: Option<usize>,
    /// Delay after these bytes, or at the beginning.
    pub silence: Duration,
}

impl Answer {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Answer {
        Answer { status, headers: Vec::new(), body: body.into(), cut: None, silence: Duration::ZERO }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Answer {
        self.headers.push((name.into(), value.to_string()));
        self
    }

    /// A file, or its requested range.
    pub fn file(request: &Request, bytes: &[u8]) -> Answer {
        match request.range(bytes.len()) {
            Some((first, end)) if first < end => {
                Answer::new(206, &bytes[first..end]).with("Content-Range", format!("bytes {first}-{}/{}", end - 1, bytes.len()))
            }
            Some(_) => Answer::new(416, ""),
            None => Answer::new(200, bytes),
        }
    }

    fn write(&self, request: &Request, stream: &mut TcpStream) -> Option<()> {
        let mut text = format!("HTTP/1.1 {} Answer\r\n", self.status);
        if !self.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length")) && self.status != 204 {
            text += &format!("Content-Length: {}\r\n", self.body.len());
        }
        self.headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
        stream.write_all(format!("{text}\r\n").as_bytes()).ok()?;
        if request.method == "HEAD" {
            return Some(());
        }
        let cut = self.cut.unwrap_or(self.body.len()).min(self.body.len());
        stream.write_all(&self.body[..cut]).ok()?;
        if !self.silence.is_zero() {
            stream.flush().ok()?;
            std::thread::sleep(self.silence);
        }
        self.cut.is_none().then_some(())
    }
}

/// A server, which answers as long as the test runs.
#[derive(Clone)]
pub struct Server {
    /// `http://127.0.0.1:port`.
    pub address: String,
    pub asked: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server { address: format!("http://{}", listener.local_addr().unwrap()), asked: Arc::default() };
        let (answer, asked) = (Arc::new(answer), server.asked.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, asked) = (answer.clone(), asked.clone());
                std::thread::spawn(move || {
                    let mut writer = stream.try_clone().unwrap();
                    let mut reader = BufReader::new(stream);
                    while let Some(request) = Request::read(&mut reader) {
                        asked.lock().unwrap().push(request.clone());
                        if answer(&request).write(&request, &mut writer).is_none() {
                            break;
                        }
                    }
                });
            }
        });
        server
    }

    pub fn requests(&self) -> Vec<Request> {
        self.asked.lock().unwrap().clone()
    }
}

/// Files by name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// All files of a folder.
pub fn files(folder: &std::path::Path) -> Files {
    let mut found = Files::new();
    for path in crate::cli::support::snapshot(folder).keys().map(|name| folder.join(name)).filter(|path| path.is_file()) {
        found.insert(path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap());
    }
    found
}

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// SHA-256 in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    ring::digest::digest(&ring::digest::SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A repository `org/name` of the Hub; large files are at another host, with a signed URL.
pub fn hub(files: Files, token: &'static str, large: impl Fn(&Request, &[u8]) -> Answer + Send + Sync + 'static) -> (Server, Server) {
    let contents = Arc::new(files);
    let own = contents.clone();
    let elsewhere = Server::start(move |request| match own.get(request.path().trim_start_matches('/')) {
        Some(bytes) => large(request, bytes),
        None => Answer::new(404, ""),
    });
    let address = elsewhere.address.clone();
    let hub = Server::start(move |request| {
        let said = request.headers.get("authorization").map_or("", String::as_str);
        if !token.is_empty() && said != format!("Bearer {token}") {
            return Answer::new(401, "{}").with("X-Error-Message", "Invalid credentials in Authorization header");
        }
        let path = request.path();
        if path == "/api/models/org/name/revision/main" {
            return Answer::new(200, serde_json::json!({ "sha": COMMIT }).to_string());
        }
        if path == format!("/api/models/org/name/tree/{COMMIT}") {
            let file = |(name, bytes): (&String, &Vec<u8>)| {
                let mut entry = serde_json::json!({ "type": "file", "path": name, "size": bytes.len() });
                if name.ends_with(".safetensors") {
                    entry["lfs"] = serde_json::json!({ "oid": sha256(bytes), "size": bytes.len() });
                }
                entry
            };
            // Two pages.
            let all: Vec<_> = contents.iter().map(file).collect();
            let (first, second) = all.split_at(all.len() / 2);
            return match request.query("cursor") {
                None => {
                    let next = format!("<http://{}{path}?cursor=x>; rel=\"next\"", request.headers["host"]);
                    Answer::new(200, serde_json::json!(first).to_string()).with("Link", next)
                }
                Some(_) => Answer::new(200, serde_json::json!(second).to_string()),
            };
        }
        let name = path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/")).unwrap_or_default();
        match contents.get(name) {
            Some(_) if name.ends_with(".safetensors") => Answer::new(302, "").with("Location", format!("{address}/{name}?X-Amz-Signature=verysecretsignature")),
            Some(bytes) => Answer::file(request, bytes),
            None => Answer::new(404, ""),
        }
    });
    (hub, elsewhere)
}

/// A bucket in memory.
#[derive(Default)]
pub struct Bucket {
    pub objects: Files,
    /// Parts by upload.
    pub uploads: BTreeMap<String, BTreeMap<usize, Vec<u8>>>,
    /// Total number of received parts.
    pub parts: usize,
    /// Total number of started uploads.
    pub begun: usize,
}

/// A minimal S3 server with one bucket named `bucket`. `first` can answer requests instead.
pub fn s3(first: impl Fn(&Request) -> Option<Answer> + Send + Sync + 'static) -> (Server, Arc<Mutex<Bucket>>) {
    let bucket: Arc<Mutex<Bucket>> = Arc::default();
    let held = bucket.clone();
    let server = Server::start(move |request| {
        if let Some(answer) = first(request) {
            return stamped(answer);
        }
        let mut held = held.lock().unwrap();
        let Some(key) = request.path().strip_prefix("/bucket").map(|key| unescaped(key.trim_start_matches('/'))) else {
            return Answer::new(404, "");
        };
        let upload = request.query("uploadId");
        stamped(match (request.method.as_str(), upload) {
            ("GET", _) if key.is_empty() => Answer::new(200, listed(&held.objects, &request.query("prefix").unwrap_or_default())),
            ("GET" | "HEAD", _) => held.objects.get(&key).map_or(Answer::new(404, ""), |bytes| Answer::file(request, bytes)),
            ("POST", None) if request.query("uploads").is_some() => {
                held.begun += 1;
                let name = format!("upload{}", held.begun);
                held.uploads.insert(name.clone(), BTreeMap::new());
                Answer::new(200, format!("<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"))
            }
            ("PUT", Some(upload)) => {
                held.parts += 1;
                let number = request.query("partNumber").unwrap().parse().unwrap();
                match held.uploads.get_mut(&upload) {
                    Some(parts) => drop(parts.insert(number, request.body.clone())),
                    None => return stamped(Answer::new(404, "<Error><Code>NoSuchUpload</Code></Error>")),
                }
                Answer::new(200, "")
            }
            ("POST", Some(upload)) => {
                let parts = held.uploads.remove(&upload).unwrap();
                held.objects.insert(key, parts.into_values().flatten().collect());
                Answer::new(200, "<CompleteMultipartUploadResult><ETag>\"one\"</ETag></CompleteMultipartUploadResult>")
            }
            ("DELETE", Some(upload)) => {
                held.uploads.remove(&upload);
                Answer::new(204, "")
            }
            // The condition of S3, and that of Google, whose interface is otherwise the same.
            ("PUT", None)
                if ["if-none-match", "x-goog-if-generation-match"].iter().any(|name| request.headers.contains_key(*name))
                    && held.objects.contains_key(&key) =>
            {
                Answer::new(412, "<Error><Code>PreconditionFailed</Code></Error>")
            }
            ("PUT", None) => {
                held.objects.insert(key, request.body.clone());
                Answer::new(200, "")
            }
            ("DELETE", None) => {
                held.objects.remove(&key);
                Answer::new(204, "")
            }
            ("POST", None) => {
                let text = String::from_utf8(request.body.clone()).unwrap();
                let keys: Vec<&str> = text.split("<Key>").skip(1).map(|rest| rest.split("</Key>").next().unwrap()).collect();
                keys.iter().for_each(|key| drop(held.objects.remove(*key)));
                let gone: String = keys.iter().map(|key| format!("<Deleted><Key>{key}</Key></Deleted>")).collect();
                Answer::new(200, format!("<DeleteResult>{gone}</DeleteResult>"))
            }
            _ => Answer::new(405, ""),
        })
    });
    (server, bucket)
}

fn stamped(answer: Answer) -> Answer {
    answer.with("ETag", "\"one\"").with("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
}

/// Names directly below a prefix.
fn listed(objects: &Files, prefix: &str) -> String {
    let mut folders = std::collections::BTreeSet::new();
    let mut text = String::new();
    for (key, bytes) in objects {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        match rest.split_once('/') {
            Some((folder, _)) => drop(folders.insert(folder)),
            None => {
                text += &format!(
                    "<Contents><Key>{key}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><ETag>\"one\"</ETag><Size>{}</Size></Contents>",
                    bytes.len()
                );
            }
        }
    }
    let folders: String = folders.iter().map(|folder| format!("<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>")).collect();
    format!("<ListBucketResult>{text}{folders}</ListBucketResult>")
}

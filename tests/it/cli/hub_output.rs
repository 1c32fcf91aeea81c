//! Outputs in repositories of the Hub, against a server that emulates its API.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};

use crate::cli::remote::{TOKEN, Workspace};
use crate::cli::servers::{Answer, Files, Request, Server, files, sha256};
use crate::cli::support::{Run, ok};

/// Size of the parts of large files, and the size from which files are uploaded in parts.
const PART: usize = 50_000;

/// The repository `org/name`.
#[derive(Default)]
struct Repo {
    /// The files of each commit of `main`, with the contents of LFS objects.
    commits: Vec<Files>,
    /// LFS objects by SHA-256.
    objects: Files,
    /// Objects and parts at the storage server, by path.
    stored: Files,
    verified: BTreeSet<String>,
    /// Body of the request that created it.
    created: Option<Value>,
}

fn commit_id(number: usize) -> String {
    format!("{number:040x}")
}

fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name == "tokenizer.json"
}

impl Repo {
    fn head(&self) -> String {
        commit_id(self.commits.len())
    }

    fn files(&self) -> Files {
        self.commits.last().cloned().unwrap_or_default()
    }

    /// The repository after a commit with these files.
    fn with(files: &[(&str, &[u8])]) -> Repo {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        Repo { commits: vec![files], ..Repo::default() }
    }

    fn batch(&self, body: &Value, hub: &str, storage: &str) -> Value {
        let entry = |object: &Value| {
            let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
            let verify = json!({ "href": format!("{hub}/verify") });
            let url = |path: String| format!("{storage}/{path}?X-Amz-Signature=verysecretsignature");
            if self.objects.contains_key(oid) {
                return json!({ "oid": oid, "size": size });
            }
            if size < PART {
                let upload = json!({ "href": url(oid.to_owned()), "header": { "X-Kind": "basic" } });
                return json!({ "oid": oid, "size": size, "actions": { "upload": upload, "verify": verify } });
            }
            let mut header = json!({ "chunk_size": PART.to_string() });
            (1..=size.div_ceil(PART)).for_each(|part| header[part.to_string()] = url(format!("{oid}/{part}")).into());
            let upload = json!({ "href": format!("{hub}/complete"), "header": header });
            json!({ "oid": oid, "size": size, "actions": { "upload": upload, "verify": verify } })
        };
        assert_eq!((&body["operation"], &body["hash_algo"]), (&json!("upload"), &json!("sha256")));
        json!({ "transfer": "multipart", "objects": body["objects"].as_array().unwrap().iter().map(entry).collect::<Vec<_>>() })
    }

    /// Moves an object from the storage server to the repository.
    fn accept(&mut self, oid: &str, bytes: Vec<u8>) {
        assert_eq!(sha256(&bytes), oid);
        self.objects.insert(oid.to_owned(), bytes);
    }

    fn commit(&mut self, body: &str) -> Answer {
        let mut files = self.files();
        for line in body.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
            let (value, path) = (&line["value"], line["value"]["path"].as_str().unwrap_or_default().to_owned());
            match line["key"].as_str().unwrap() {
                "header" if value["parentCommit"] != self.head() => return Answer::new(412, r#"{"error":"A commit has happened since"}"#),
                "header" => assert!(!value["summary"].as_str().unwrap().is_empty()),
                "file" => drop(files.insert(path, BASE64_STANDARD.decode(value["content"].as_str().unwrap()).unwrap())),
                "lfsFile" => {
                    let oid = value["oid"].as_str().unwrap();
                    assert!(self.verified.contains(oid) && self.objects[oid].len() as u64 == value["size"]);
                    files.insert(path, self.objects[oid].clone());
                }
                "deletedFile" => assert!(files.remove(&path).is_some(), "{path}"),
                key => panic!("{key}"),
            }
        }
        self.commits.push(files);
        Answer::new(200, json!({ "commitOid": self.head(), "commitUrl": "" }).to_string())
    }
}

/// The Hub, the storage server and the repository.
struct Hub {
    hub: Server,
    storage: Server,
    repo: Arc<Mutex<Repo>>,
}

impl Hub {
    /// `first` can answer requests to both servers instead.
    fn start(repo: Repo, first: impl Fn(&Request, &mut Repo) -> Option<Answer> + Send + Sync + 'static) -> Hub {
        let (repo, first) = (Arc::new(Mutex::new(repo)), Arc::new(first));
        let (stored, fault) = (repo.clone(), first.clone());
        let storage = Server::start(move |request| {
            let mut repo = stored.lock().unwrap();
            if let Some(answer) = fault(request, &mut repo) {
                return answer;
            }
            assert_eq!(request.method, "PUT");
            repo.stored.insert(request.path().to_owned(), request.body.clone());
            Answer::new(200, "").with("ETag", format!("\"{}\"", sha256(&request.body)))
        });
        let (held, address) = (repo.clone(), storage.address.clone());
        let hub = Server::start(move |request| {
            let mut repo = held.lock().unwrap();
            first(request, &mut repo).unwrap_or_else(|| answer(request, &mut repo, &address))
        });
        Hub { hub, storage, repo }
    }

    fn repo(&self) -> MutexGuard<'_, Repo> {
        self.repo.lock().unwrap()
    }

    fn run(&self, place: &Workspace, args: &str) -> Run {
        place.run(args, &[("HF_ENDPOINT", self.hub.address.as_str()), ("HF_TOKEN", TOKEN)])
    }

    /// Paths of the requests with a method.
    fn requested(&self, method: &str) -> Vec<String> {
        let all = [self.hub.requests(), self.storage.requests()].concat();
        all.iter().filter(|request| request.method == method).map(|request| request.path().to_owned()).collect()
    }
}

fn answer(request: &Request, repo: &mut Repo, storage: &str) -> Answer {
    if request.headers.get("authorization").is_none_or(|text| *text != format!("Bearer {TOKEN}")) {
        return Answer::new(401, "{}").with("X-Error-Message", "Invalid credentials in Authorization header");
    }
    let json = |value: Value| Answer::new(200, value.to_string());
    let body = || serde_json::from_slice::<Value>(&request.body).unwrap();
    let exists = !repo.commits.is_empty();
    match (request.method.as_str(), request.path()) {
        ("GET", "/api/whoami-v2") => json(json!({ "name": "me", "orgs": [{ "name": "org" }], "auth": { "accessToken": { "role": "write" } } })),
        ("POST", "/api/repos/create") if exists => Answer::new(409, r#"{"error":"You already created this model repo"}"#),
        ("POST", "/api/repos/create") => {
            repo.created = Some(body());
            repo.commits.push(Files::from([(".gitattributes".into(), b"*.safetensors filter=lfs".to_vec())]));
            json(json!({ "url": "" }))
        }
        _ if !exists => Answer::new(404, r#"{"error":"Repository not found"}"#),
        ("GET", "/api/models/org/name") => json(json!({ "private": true })),
        ("GET", "/api/models/org/name/refs") => json(json!({ "branches": [{ "name": "main", "targetCommit": repo.head() }], "tags": [] })),
        ("GET", "/api/models/org/name/revision/main") => json(json!({ "sha": repo.head() })),
        ("POST", "/api/models/org/name/preupload/main") => {
            let mode = |file: &Value| {
                let (path, sample) = (file["path"].as_str().unwrap(), BASE64_STANDARD.decode(file["sample"].as_str().unwrap()).unwrap());
                assert_eq!(sample.len() as u64, file["size"].as_u64().unwrap().min(512));
                json!({ "path": path, "uploadMode": if is_large(path) { "lfs" } else { "regular" }, "shouldIgnore": false })
            };
            json(json!({ "files": body()["files"].as_array().unwrap().iter().map(mode).collect::<Vec<_>>() }))
        }
        ("POST", "/org/name.git/info/lfs/objects/batch") => json(repo.batch(&body(), &format!("http://{}", request.headers["host"]), storage)),
        ("POST", "/complete") => {
            let (body, oid) = (body(), body()["oid"].as_str().unwrap().to_owned());
            let part = |part: &Value| {
                let bytes = repo.stored[&format!("/{oid}/{}", part["partNumber"])].clone();
                assert_eq!(part["etag"], format!("\"{}\"", sha256(&bytes)));
                bytes
            };
            let bytes = body["parts"].as_array().unwrap().iter().flat_map(part).collect();
            repo.accept(&oid, bytes);
            json(json!({}))
        }
        ("POST", "/verify") => {
            let oid = body()["oid"].as_str().unwrap().to_owned();
            if let Some(bytes) = repo.stored.get(&format!("/{oid}")).cloned() {
                repo.accept(&oid, bytes);
            }
            assert_eq!(body()["size"], repo.objects[&oid].len());
            repo.verified.insert(oid);
            json(json!({}))
        }
        ("POST", "/api/models/org/name/commit/main") => {
            assert_eq!(request.headers["content-type"], "application/x-ndjson");
            repo.commit(std::str::from_utf8(&request.body).unwrap())
        }
        ("GET", path) => {
            let (tree, resolve) = (format!("/api/models/org/name/tree/{}", repo.head()), format!("/org/name/resolve/{}/", repo.head()));
            if path == tree {
                let entry = |(name, bytes): (&String, &Vec<u8>)| {
                    let lfs = is_large(name).then(|| json!({ "oid": sha256(bytes), "size": bytes.len() }));
                    json!({ "type": "file", "path": name, "size": bytes.len(), "lfs": lfs })
                };
                return json(repo.files().iter().map(entry).collect());
            }
            let file = path.strip_prefix(&resolve).and_then(|name| repo.files().get(name).cloned());
            file.map_or(Answer::new(404, ""), |bytes| Answer::file(request, &bytes))
        }
        _ => Answer::new(405, ""),
    }
}

const QUANTIZE: &str = "quantize-dynamic in -o hf:org/name --no-measure";

fn is_commit(request: &Request) -> bool {
    request.path().ends_with("/commit/main")
}

#[test]
fn a_repository_contains_the_same_as_a_folder() {
    let place = Workspace::new();
    ok(place.path(), "quantize-dynamic in -o same --no-measure");
    let hub = Hub::start(Repo::default(), |_, _| None);
    let run = hub.run(&place, QUANTIZE);
    assert_eq!(run.code, 0, "{}", run.stderr);
    {
        let repo = hub.repo();
        let (written, expected) = (repo.files(), files(&place.path().join("same")));
        assert!(repo.commits.len() == 2 && written.contains_key(".gitattributes"));
        for (name, bytes) in expected.iter().filter(|(name, _)| !name.starts_with("report.") && *name != "recipe.yaml") {
            assert!(written.get(name) == Some(bytes), "{name}");
        }
        assert_eq!(written.len(), expected.len() + 1);
        // One file in parts, one in a single request, neither with the token.
        let puts = hub.requested("PUT");
        assert!(puts.iter().any(|path| path.ends_with("/2")) && puts.iter().any(|path| path.len() == 65), "{puts:?}");
        for request in hub.storage.requests() {
            assert!(!request.headers.contains_key("authorization") && request.body.len() <= PART);
            assert_eq!(request.headers.contains_key("x-kind"), request.path().len() == 65);
        }
    }
    let verified = hub.run(&place, "verify hf:org/name");
    assert!(verified.code == 0 && verified.stdout.contains("opens with 3 weights"), "{}{}", verified.stdout, verified.stderr);
    let refused = hub.run(&place, QUANTIZE);
    assert!(refused.code == 1 && refused.stderr.contains("exists"), "{}", refused.stderr);
    // The same weights are not uploaded again, and files of the earlier output are removed.
    let before = hub.requested("PUT").len();
    let run = hub.run(&place, &format!("{QUANTIZE} --force --no-card"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let repo = hub.repo();
    assert!(hub.requested("PUT").len() == before && repo.commits.len() == 3);
    assert!(!repo.files().contains_key("README.md") && repo.files().contains_key(".gitattributes"));
    let created = repo.created.as_ref().unwrap();
    assert_eq!(*created, json!({ "type": "model", "organization": "org", "name": "name", "visibility": "private" }));
}

#[test]
fn files_of_others_are_not_replaced() {
    let place = Workspace::new();
    let refused = |hub: &Hub, args: &str, message: &str| {
        let before = hub.repo().commits.len();
        let run = hub.run(&place, args);
        assert!(run.code == 1 && run.stderr.contains(message), "{args}, {message}: {}", run.stderr);
        assert!(hub.repo().commits.len() == before && hub.requested("PUT").is_empty());
    };
    let hub = Hub::start(Repo::with(&[(".gitattributes", b""), ("README.md", b"# Mine")]), |_, _| None);
    refused(&hub, QUANTIZE, "exists");
    refused(&hub, &format!("{QUANTIZE} --force"), "README.md would be lost, and no report of compress lists them");
    // The output of a run, to which another program adds a file, or changes one.
    let written: Vec<(String, Vec<u8>)> = files(&place.path().join("here")).into_iter().collect();
    let written: Vec<(&str, &[u8])> = written.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    let added = [written.as_slice(), &[("images/a.png", b"png".as_slice())]].concat();
    let hub = Hub::start(Repo::with(&added), |_, _| None);
    refused(&hub, &format!("{QUANTIZE} --force"), "images/a.png would be lost, and compress did not write them");
    let hub = Hub::start(Repo::with(&written), |_, _| None);
    hub.repo().commits[0].get_mut("config.json").unwrap().push(b'\n');
    refused(&hub, &format!("{QUANTIZE} --force"), "config.json would be lost, and they were changed after compress wrote them");
    // The model itself.
    refused(&hub, "densify hf:org/name -o hf:org/name --force", ", which this run reads");
    // A new repository has only the file of the Hub.
    let hub = Hub::start(Repo::with(&[(".gitattributes", b"")]), |_, _| None);
    let run = hub.run(&place, QUANTIZE);
    assert!(run.code == 0 && hub.repo().created.is_none(), "{}", run.stderr);
}

fn denied() -> Answer {
    Answer::new(403, r#"{"error":"You don't have the required permissions"}"#)
}

#[test]
fn a_failed_output_leaves_the_branch_unchanged() {
    let place = Workspace::new();
    type Fault = fn(&Request, &mut Repo) -> Option<Answer>;
    let faults: [(&str, Fault); 8] = [
        ("write access to the repository", |request, _| is_commit(request).then(denied)),
        ("You don't have the required permissions", |request, _| request.path().ends_with("/batch").then(denied)),
        ("the token in HF_TOKEN or from `hf auth login` can only read", |request, _| {
            let user = json!({ "name": "org", "auth": { "accessToken": { "role": "read" } } });
            (request.path() == "/api/whoami-v2").then(|| Answer::new(200, user.to_string()))
        }),
        ("not a member of `org`", |request, _| {
            let user = || Answer::new(200, json!({ "name": "me", "orgs": [], "auth": { "accessToken": { "role": "write" } } }).to_string());
            if request.path().ends_with("/refs") { Some(Answer::new(404, "")) } else { (request.path() == "/api/whoami-v2").then(user) }
        }),
        ("the repository has no branch `main`", |request, _| request.path().ends_with("/refs").then(|| Answer::new(200, r#"{"branches":[]}"#))),
        ("config.json: the .gitignore of the repository excludes it", |request, _| {
            let ignored = json!({ "files": [{ "path": "config.json", "uploadMode": "regular", "shouldIgnore": true },
                { "path": ".gitattributes", "uploadMode": "regular", "shouldIgnore": false },
                { "path": "1_Pooling/config.json", "uploadMode": "regular", "shouldIgnore": false },
                { "path": "README.md", "uploadMode": "regular", "shouldIgnore": false }] });
            request.path().ends_with("/preupload/main").then(|| Answer::new(200, ignored.to_string()))
        }),
        ("model.safetensors: the storage server does not confirm a part", |request, _| {
            (request.method == "PUT" && request.path().ends_with("/2")).then(|| Answer::new(200, ""))
        }),
        ("another commit was made while this run worked", |request, repo| {
            if request.path().ends_with("/batch") {
                repo.commits.push(Files::from([("theirs".into(), Vec::new())]));
            }
            None
        }),
    ];
    for (message, fault) in faults {
        let hub = Hub::start(Repo::with(&[(".gitattributes", b"")]), fault);
        let run = hub.run(&place, QUANTIZE);
        assert!(run.code == 1 && run.stderr.contains(message) && run.stderr.contains("hf:org/name"), "{message}: {}", run.stderr);
        let repo = hub.repo();
        assert!(repo.commits.iter().all(|files| files.len() == 1), "{message}: {:?}", repo.files().keys());
    }
    // The Hub creates a repository that is not private.
    let hub = Hub::start(Repo::default(), |request, repo| {
        (request.path() == "/api/models/org/name" && !repo.commits.is_empty()).then(|| Answer::new(200, r#"{"private":false}"#))
    });
    let run = hub.run(&place, QUANTIZE);
    assert!(run.code == 1 && run.stderr.contains("not private, so nothing was uploaded"), "{}", run.stderr);
    assert!(hub.repo().commits.len() == 1 && hub.requested("PUT").is_empty());
    // Names that cannot be outputs, and a missing token.
    let hub = Hub::start(Repo::default(), |_, _| None);
    for (name, message) in [("hf:org/name/folder", "an output is a whole repository"), ("hf:org/name@v2", "has no branch `v2`"), ("hf:name", "hf:org/name")] {
        let run = hub.run(&place, &format!("quantize-dynamic in -o {name} --no-measure"));
        assert!(run.code == 1 && run.stderr.contains(message), "{name}: {}", run.stderr);
    }
    let run = place.run(QUANTIZE, &[("HF_ENDPOINT", hub.hub.address.as_str())]);
    assert!(run.code == 1 && run.stderr.contains("a token with write access is required"), "{}", run.stderr);
    let run = place.run(QUANTIZE, &[("HF_ENDPOINT", hub.hub.address.as_str()), ("HF_TOKEN", "hf_otherverysecrettoken")]);
    assert!(run.code == 1 && run.stderr.contains("401") && !run.stderr.contains("othervery"), "{}", run.stderr);
    assert!(hub.requested("POST").is_empty() && hub.repo().created.is_none());
}

#[test]
fn temporary_failures_of_an_upload_are_retried() {
    let place = Workspace::new();
    let count = AtomicUsize::new(0);
    let seen = Mutex::new(BTreeSet::new());
    let hub = Hub::start(Repo::default(), move |request, repo| {
        // Each request that writes fails once; the first commit is made, but its response is lost.
        if request.method == "GET" || !seen.lock().unwrap().insert(request.path().to_owned()) {
            return None;
        }
        if is_commit(request) {
            assert_eq!(repo.commit(std::str::from_utf8(&request.body).unwrap()).status, 200);
            return Some(Answer::new(500, ""));
        }
        let cut = Answer { cut: Some(0), ..Answer::new(200, "none") };
        let faults = [Answer::new(503, "").with("Retry-After", 0), Answer::new(429, ""), cut];
        Some(faults[count.fetch_add(1, Ordering::Relaxed) % 3].clone())
    });
    let run = hub.run(&place, QUANTIZE);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let repo = hub.repo();
    assert!(repo.commits.len() == 2 && repo.files().contains_key("model.safetensors"));
    assert_eq!(hub.requested("POST").iter().filter(|path| path.ends_with("/commit/main")).count(), 1);
}

//! Remote models and outputs, and network failures.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use compress::prelude::*;

use crate::cli::servers::{Answer, COMMIT, Files, Request, Server, files, hub, s3, sha256};
use crate::cli::support::{Run, command, floats, golden_model, model_of, names, ok, read_json, snapshot};

pub(super) const TOKEN: &str = "hf_averysecrettoken";
/// Secrets that must never be printed.
const SECRETS: [&str; 4] = [TOKEN, "verysecretsignature", "verysecretkey", "secretkeyid"];

/// A model larger than one range, and the output of a local run.
pub(super) struct Workspace {
    folder: tempfile::TempDir,
    files: Files,
}

impl Workspace {
    pub fn new() -> Workspace {
        let folder = tempfile::tempdir().unwrap();
        let tensors = [floats("a.weight", &[400, 400]), floats("b.bias", &[64]), floats("c.weight", &[64, 64])];
        model_of(&folder.path().join("in"), &json!({ "model_type": "bert" }), &tensors);
        ok(folder.path(), "quantize-dynamic in -o here");
        let files = files(&folder.path().join("in"));
        Workspace { folder, files }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Runs the binary with an endpoint and a token. Its output must not contain secrets.
    pub fn run(&self, args: &str, variables: &[(&str, &str)]) -> Run {
        let (mut command, temporary) = (command(self.path()), tempfile::tempdir().unwrap());
        command.args(args.split_whitespace()).env("HF_HOME", self.path().join("home")).env("TMPDIR", temporary.path());
        for name in ["HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
            command.env_remove(name);
        }
        // The telemetry of ONNX Runtime sometimes leaves a file `.ses`.
        command.env("ORT_DISABLE_TELEMETRY", "1");
        let run: Run = command.envs(variables.iter().copied()).output().unwrap().into();
        for secret in SECRETS {
            assert!(!run.stdout.contains(secret) && !run.stderr.contains(secret), "{secret} is printed:\n{}{}", run.stdout, run.stderr);
        }
        assert_eq!(names(temporary.path()), Vec::<String>::new(), "files remain on the disk");
        run
    }

    /// Compares an output with that of the local run.
    fn same(&self, output: &str) {
        for name in ["model.safetensors", "config.json", "tokenizer.json", "1_Pooling/config.json"] {
            let read = |folder: &str| fs::read(self.path().join(folder).join(name)).unwrap();
            assert!(read(output) == read("here"), "{name} of {output}");
        }
        let report = fs::read_to_string(self.path().join(output).join("report.json")).unwrap();
        assert!(SECRETS.iter().all(|secret| !report.contains(secret)));
    }
}

#[test]
fn a_model_of_the_hub_is_read_remotely() {
    let place = Workspace::new();
    let (hub, elsewhere) = hub(place.files.clone(), TOKEN, Answer::file);
    let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HF_TOKEN", TOKEN)];
    let run = place.run("quantize-dynamic hf:org/name -o out", &variables);
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    place.same("out");
    let report = read_json(&place.path().join("out/report.json"));
    assert_eq!(report["model"]["source"], "hf:org/name");
    let card = fs::read_to_string(place.path().join("out/README.md")).unwrap();
    assert!(card.contains("base_model:\n- org/name\n") && card.contains("[org/name](https://huggingface.co/org/name)"), "{card}");
    // Weights are read in ranges from a server that never receives the token, and files that are not
    // copied are not requested.
    let (asked, weights) = (hub.requests(), elsewhere.requests());
    assert!(weights.len() >= 2 && weights.iter().all(|request| request.headers.contains_key("range") && !request.headers.contains_key("authorization")));
    assert!(!asked.iter().any(|request| request.path().ends_with("pytorch_model.bin")));
    let bytes = place.files["model.safetensors"].len();
    let read: usize = weights.iter().filter_map(|request| request.range(bytes)).map(|(first, end)| end - first).sum();
    assert!(read < 2 * bytes, "{read} bytes of {bytes} were read");
    assert!(!place.path().join("home").exists(), "the cache of others is not written to");
    // A revision, a single file, and missing repositories.
    let one = place.run("inspect hf:org/name@main/model.safetensors --json", &variables);
    assert!(one.code == 0 && one.stdout.contains("a.weight"), "{}", one.stderr);
    let verified = place.run("verify out", &variables);
    assert_eq!(verified.code, 0, "{}", verified.stdout);
    let missing = place.run("inspect hf:org/other", &variables);
    assert!(missing.code == 1 && missing.stderr.contains("hf:org/other") && missing.stderr.contains("404"), "{}", missing.stderr);
    let form = place.run("inspect hf:name", &variables);
    assert!(form.code == 1 && form.stderr.contains("hf:org/name"), "{}", form.stderr);
}

#[test]
fn remote_models_can_be_processed_in_parts() {
    let place = Workspace::new();
    let (hub, _) = hub(place.files.clone(), TOKEN, Answer::file);
    let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HF_TOKEN", TOKEN)];
    let shards = "--shard-size 100KB --no-measure";
    ok(place.path(), &format!("quantize-dynamic in -o one {shards}"));
    for args in [
        format!("quantize-dynamic hf:org/name -o two {shards} --part 1/2"),
        format!("quantize-dynamic hf:org/name -o two {shards} --part 2/2"),
        "merge two".into(),
    ] {
        let run = place.run(&args, &variables);
        assert_eq!(run.code, 0, "{args}: {}", run.stderr);
    }
    let (one, two) = (files(&place.path().join("one")), files(&place.path().join("two")));
    let weights =
        |files: &Files| files.iter().filter(|(name, _)| name.ends_with(".safetensors")).map(|(name, bytes)| (name.clone(), bytes.clone())).collect::<Files>();
    assert!(weights(&one).len() == 2 && weights(&one) == weights(&two));
}

/// A fault of the server after `after` requests, for `times` requests. Applied to every range of
/// weights.
fn faulty(times: usize, fault: impl Fn(&Request, &[u8]) -> Answer + Send + Sync + 'static) -> impl Fn(&Request, &[u8]) -> Answer + Send + Sync + 'static {
    let count = Arc::new(AtomicUsize::new(0));
    move |request, bytes| {
        if count.fetch_add(1, Ordering::Relaxed) < times { fault(request, bytes) } else { Answer::file(request, bytes) }
    }
}

fn wrong_range(request: &Request, bytes: &[u8]) -> Answer {
    let (first, end) = request.range(bytes.len()).unwrap();
    Answer::new(206, &bytes[first..end]).with("Content-Range", format!("bytes {}-{}/{}", first + 1, end, bytes.len()))
}

#[test]
fn temporary_failures_are_retried() {
    let place = Workspace::new();
    let cut = |after: usize| move |request: &Request, bytes: &[u8]| Answer { cut: Some(after), ..Answer::file(request, bytes) };
    type Fault = Box<dyn Fn(&Request, &[u8]) -> Answer + Send + Sync>;
    let faults: Vec<(&str, usize, Fault)> = vec![
        ("cut at once", 2, Box::new(cut(0))),
        ("cut after 1000 bytes", 3, Box::new(cut(1000))),
        ("busy", 3, Box::new(|_, _| Answer::new(503, "").with("Retry-After", 0))),
        ("too many requests", 1, Box::new(|_, _| Answer::new(429, ""))),
        ("another range", 2, Box::new(wrong_range)),
        ("a signature that has ended", 2, Box::new(|_, _| Answer::new(403, "<Error><Code>ExpiredToken</Code></Error>"))),
        ("silence", 1, Box::new(|request, bytes| Answer { cut: Some(10), silence: Duration::from_millis(2500), ..Answer::file(request, bytes) })),
    ];
    for (index, (name, times, fault)) in faults.into_iter().enumerate() {
        let (hub, _) = hub(place.files.clone(), TOKEN, faulty(times, fault));
        let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HF_TOKEN", TOKEN), ("HF_HUB_DOWNLOAD_TIMEOUT", "1")];
        let run = place.run(&format!("quantize-dynamic hf:org/name -o out{index} --no-measure"), &variables);
        assert_eq!(run.code, 0, "{name}: {}", run.stderr);
        place.same(&format!("out{index}"));
    }
}

#[test]
fn permanent_failures_are_named_and_leave_no_files() {
    let place = Workspace::new();
    type Fault = fn(&Request, &[u8]) -> Answer;
    let faults: [(&str, Fault); 5] = [
        ("the connection was cut after 0", |request, bytes| Answer { cut: Some(0), ..Answer::file(request, bytes) }),
        ("503", |_, _| Answer::new(503, "")),
        ("sends bytes 1 to", wrong_range),
        ("was modified while it was read: it has ", |request, bytes| Answer::file(request, &[bytes, b"more"].concat())),
        ("leads over an unencrypted connection", |_, _| Answer::new(302, "").with("Location", "http://192.0.2.1/x?sig=verysecretsignature")),
    ];
    let before = snapshot(place.path());
    // Clients wait between attempts.
    std::thread::scope(|scope| {
        for (index, (message, fault)) in faults.into_iter().enumerate() {
            let place = &place;
            scope.spawn(move || {
                let (hub, _) = hub(place.files.clone(), TOKEN, faulty(usize::MAX, fault));
                let run = place.run(&format!("quantize-dynamic hf:org/name -o out{index}"), &[("HF_ENDPOINT", &hub.address), ("HF_TOKEN", TOKEN)]);
                assert!(run.code == 1 && run.stderr.contains(message) && run.stderr.contains("hf:org/name/model.safetensors"), "{message}: {}", run.stderr);
            });
        }
    });
    assert_eq!(snapshot(place.path()), before);
    // Faults of the repository itself.
    let (hub, _) = hub(place.files.clone(), "another token", Answer::file);
    let refused = place.run("quantize-dynamic hf:org/name -o out", &[("HF_ENDPOINT", &hub.address), ("HF_TOKEN", TOKEN)]);
    assert!(refused.code == 1 && refused.stderr.contains("401") && refused.stderr.contains("HF_TOKEN"), "{}", refused.stderr);
    let bare = place.run("inspect hf:org/name", &[("HF_ENDPOINT", "http://192.0.2.1")]);
    assert!(bare.code == 1 && bare.stderr.contains("unencrypted"), "{}", bare.stderr);
    assert_eq!(snapshot(place.path()), before);
}

#[test]
fn a_file_damaged_in_transit_is_rejected() {
    let place = Workspace::new();
    // Hashes of `{}`: SHA-256 of large files, and git hashes.
    let large =
        json!({ "type": "file", "path": "config.json", "size": 2, "lfs": { "oid": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a" } });
    let small = json!({ "type": "file", "path": "config.json", "size": 2, "oid": "9e26dfeeb6e641a33dae4961196235bdb965b21b" });
    let weights = [&2u64.to_le_bytes()[..], b"{}"].concat();
    for (entry, config, damaged) in [(&large, "{}", false), (&small, "{}", false), (&large, "[]", true), (&small, "[]", true)] {
        let (list, weights) = (json!([entry, { "type": "file", "path": "model.safetensors", "size": weights.len() }]).to_string(), weights.clone());
        let server = Server::start(move |request| match request.path() {
            "/api/models/org/name/revision/main" => Answer::new(200, json!({ "sha": COMMIT }).to_string()),
            path if path.contains("/tree/") => Answer::new(200, list.as_str()),
            path if path.ends_with("config.json") => Answer::file(request, config.as_bytes()),
            _ => Answer::file(request, &weights),
        });
        let run = place.run("inspect hf:org/name", &[("HF_ENDPOINT", &server.address)]);
        let told = run.stderr.contains("config.json") && run.stderr.contains("corrupted in transit");
        assert_eq!((run.code, told), (i32::from(damaged), damaged), "{entry}: {}", run.stderr);
    }
}

/// Data, and weights that are not LFS objects.
#[test]
fn data_and_small_weights_are_compared_with_their_hashes() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json"), ("book.txt", "../book.txt")]);
    let text = fs::read(folder.path().join("book.txt")).unwrap();
    let git_hash = |bytes: &[u8]| {
        let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
        ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let mut files = files(&folder.path().join("in"));
    files.insert("book.txt".into(), text.clone());
    files.insert("large.txt".into(), text);
    let entry = |(name, bytes): (&String, &Vec<u8>)| {
        let lfs = if name == "large.txt" { json!({ "oid": sha256(bytes) }) } else { json!(null) };
        json!({ "type": "file", "path": name, "size": bytes.len(), "oid": git_hash(bytes), "lfs": lfs })
    };
    let list = serde_json::Value::from(files.iter().map(entry).collect::<Vec<_>>()).to_string();
    let damaged = Arc::new(std::sync::Mutex::new(String::new()));
    let (place, changed) = (Workspace { files: files.clone(), folder }, damaged.clone());
    let server = Server::start(move |request| match request.path() {
        "/api/models/org/name/revision/main" => Answer::new(200, json!({ "sha": COMMIT }).to_string()),
        path if path.contains("/tree/") => Answer::new(200, list.as_str()),
        path => {
            let name = path.rsplit('/').next().unwrap();
            let mut bytes = files[name].clone();
            *bytes.last_mut().unwrap() ^= u8::from(*changed.lock().unwrap() == name);
            Answer::file(request, &bytes)
        }
    });
    let variables = [("HF_ENDPOINT", server.address.as_str())];
    for (args, name, what) in [
        ("cast hf:org/name --to bf16 -o out --force --no-measure", "model.safetensors", "git hash"),
        ("eval in --data hf:org/name/book.txt", "book.txt", "git hash"),
        ("eval in --data hf:org/name/large.txt", "large.txt", "SHA-256"),
    ] {
        damaged.lock().unwrap().clear();
        let run = place.run(args, &variables);
        assert_eq!(run.code, 0, "{args}: {}", run.stderr);
        name.clone_into(&mut damaged.lock().unwrap());
        let run = place.run(args, &variables);
        let told = run.stderr.contains(&format!("hf:org/name/{name}")) && run.stderr.contains(&format!("its {what} is "));
        assert!(run.code == 1 && told, "{args}: {}{}", run.stdout, run.stderr);
    }
}

/// A byte of the last tensor is changed in transit or on the server: nothing is written, printed or
/// cached.
#[test]
fn weights_that_differ_from_the_stated_hash_are_refused() {
    let place = Workspace::new();
    let (hub, _) = hub(place.files.clone(), TOKEN, |request, bytes| {
        let mut bytes = bytes.to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        Answer::file(request, &bytes)
    });
    let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HF_TOKEN", TOKEN)];
    let before = snapshot(place.path());
    for args in ["quantize-dynamic hf:org/name -o out", "densify hf:org/name -o out", "diff in hf:org/name"] {
        let run = place.run(args, &variables);
        let told = run.stderr.contains("hf:org/name/model.safetensors") && run.stderr.contains("the server reports");
        assert!(run.code == 1 && told && run.stdout.is_empty(), "{args}: {}{}", run.stdout, run.stderr);
    }
    assert_eq!(snapshot(place.path()), before);
}

/// Results of such weights are neither printed nor stored for another run.
#[test]
fn measurements_of_corrupted_weights_are_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json"), ("book.txt", "../book.txt")]);
    let place = Workspace { files: files(&folder.path().join("in")), folder };
    fs::write(place.path().join("sweep.yaml"), "model: hf:org/name\ndata: { calibration: book.txt }\noutput: out\n").unwrap();
    let (hub, _) = hub(place.files.clone(), TOKEN, |request, bytes| {
        let mut bytes = bytes.to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        Answer::file(request, &bytes)
    });
    let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HF_TOKEN", TOKEN)];
    let before = snapshot(place.path());
    for args in [
        "auto hf:org/name --for transformers --front front.json --points 1 --calibration book.txt --checkpoint state.json",
        "auto hf:org/name --for transformers --front front.json",
        "analyze sweep.yaml",
        "draft hf:org/name -o out --data book.txt --layers 1 --samples 2 --tokens 4",
    ] {
        let run = place.run(args, &variables);
        assert!(run.code == 1 && run.stderr.contains("the server reports") && run.stdout.is_empty(), "{args}: {}{}", run.stdout, run.stderr);
    }
    let sampled = fs::read_to_string(place.path().join("out.unfinished/sampled.jsonl")).unwrap();
    assert_eq!(sampled.lines().count(), 1, "only the key: {sampled}");
    fs::remove_dir_all(place.path().join("out.unfinished")).unwrap();
    assert_eq!(snapshot(place.path()), before);
}

/// ETag, modification time and size do not identify contents: files that agree in all of them are
/// distinguished.
#[test]
fn files_with_equal_metadata_are_distinguished() {
    let place = Workspace::new();
    let first = place.files["model.safetensors"].clone();
    let mut second = first.clone();
    let last = second.len() - 2;
    second[last] ^= 0x40;
    let stamped = |answer: Answer| answer.with("ETag", "\"one\"").with("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT");
    let server = Server::start(move |request| match request.path() {
        "/a.safetensors" | "/same.safetensors" => stamped(Answer::file(request, &first)),
        "/b.safetensors" => stamped(Answer::file(request, &second)),
        _ => Answer::new(404, ""),
    });
    let out = place.path().join("cached");
    let cached = |name: &str| {
        let pipeline = Pipeline::builder().pass(Cast { to: FloatFormat::F16, ..Cast::default() }).measure(false).build().unwrap();
        pipeline.run_cached(Model::open(format!("{}/{name}.safetensors", server.address)).unwrap(), &out).unwrap().reused
    };
    assert!(!cached("a") && cached("a") && cached("same"), "equal contents are the same");
    let before = fs::read(out.join("model.safetensors")).unwrap();
    assert!(!cached("b") && fs::read(out.join("model.safetensors")).unwrap() != before);
}

#[test]
fn the_cache_is_used_offline() {
    let place = Workspace::new();
    let cache = place.path().join("home/hub/models--org--name");
    fs::create_dir_all(cache.join("refs")).unwrap();
    fs::write(cache.join("refs/main"), COMMIT).unwrap();
    for (name, bytes) in &place.files {
        let path = cache.join("snapshots").join(COMMIT).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let offline = [("HF_HUB_OFFLINE", "1")];
    let run = place.run("quantize-dynamic hf:org/name -o out", &offline);
    assert_eq!(run.code, 0, "{}", run.stderr);
    place.same("out");
    let missing = place.run("inspect hf:org/other", &offline);
    assert!(missing.code == 1 && missing.stderr.contains("HF_HUB_OFFLINE is set") && missing.stderr.contains("hf download org/other"), "{}", missing.stderr);
    let link = cache.join("snapshots").join(COMMIT).join("extra.safetensors");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    let broken = place.run("inspect hf:org/name", &offline);
    assert!(broken.code == 1 && broken.stderr.contains("extra.safetensors in the cache is a broken link"), "{}", broken.stderr);
    fs::remove_file(link).unwrap();
    // Cached files of the same commit are not fetched again.
    let (hub, elsewhere) = hub(place.files.clone(), "", Answer::file);
    let run = place.run("quantize-dynamic hf:org/name -o again", &[("HF_ENDPOINT", &hub.address)]);
    assert!(run.code == 0 && elsewhere.requests().is_empty(), "{}", run.stderr);
    place.same("again");
}

#[test]
fn texts_with_images_are_read_from_web_servers() {
    let place = Workspace::new();
    crate::multimodal_texts::model(place.path());
    let image = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/images/LABEL_0/0.png")).unwrap();
    let text = format!("{}\n", json!({ "text": "a<|image_pad|>bc", "image": "images/0.png" }));
    fs::create_dir(place.path().join("images")).unwrap();
    fs::write(place.path().join("images/0.png"), &image).unwrap();
    fs::write(place.path().join("texts.jsonl"), &text).unwrap();
    let server = Server::start(move |request| match request.path() {
        "/a/texts.jsonl" => Answer::file(request, text.as_bytes()),
        "/a/images/0.png" => Answer::file(request, &image),
        _ => Answer::new(404, ""),
    });
    let [local, remote] = ["texts.jsonl".to_owned(), format!("{}/a/texts.jsonl", server.address)].map(|file| {
        let run = place.run(&format!("eval qwen3-vl --data {file} --size height=8 --size width=16 --json"), &[]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        serde_json::from_str::<serde_json::Value>(&run.stdout).unwrap()["score"].clone()
    });
    assert!(!local.is_null() && local == remote, "{local} {remote}");
}

#[test]
fn files_of_web_servers_are_read_one_at_a_time() {
    let place = Workspace::new();
    let bytes = place.files["model.safetensors"].clone();
    let server = Server::start(move |request| match request.path() {
        "/models/a.safetensors" => Answer::file(request, &bytes).with("ETag", "\"one\""),
        "/moved/a.safetensors" => Answer::new(301, "").with("Location", "/models/a.safetensors"),
        "/plain/a.safetensors" => Answer::new(200, bytes.as_slice()),
        "/empty.txt" => Answer::new(416, "").with("Content-Range", "bytes */0"),
        _ => Answer::new(404, ""),
    });
    assert_eq!(compress_core::files::length(Path::new(&format!("{}/empty.txt", server.address))).unwrap(), 0);
    let inspect = |path: &str| place.run(&format!("inspect {}/{path} --json", server.address), &[]);
    for path in ["models/a.safetensors", "moved/a.safetensors"] {
        let run = inspect(path);
        assert!(run.code == 0 && run.stdout.contains("a.weight"), "{}", run.stderr);
    }
    let run = place.run(&format!("quantize-dynamic {}/plain/a.safetensors -o out", server.address), &[]);
    assert!(run.code == 1 && run.stderr.contains("does not support range requests"), "{}", run.stderr);
    for (path, message) in [("none.safetensors", "no such file"), ("models/a.safetensors?sig=verysecretsignature", "a.safetensors: contains a `?`")] {
        let run = place.run(&format!("inspect {}/{path}", server.address), &[]);
        assert!(run.code == 1 && run.stderr.contains(message), "{path}: {}", run.stderr);
    }
    let user = place.run("inspect https://user:verysecretkey@127.0.0.1/a.safetensors", &[]);
    assert!(user.code == 1 && user.stderr.contains("contains a user name"), "{}", user.stderr);
}

#[test]
fn names_with_credentials_are_refused_and_not_echoed() {
    let place = Workspace::new();
    for args in [
        "quantize-dynamic in -o s3://bucket/out?sig=verysecretsignature",
        "quantize-dynamic in -o s3://key:verysecretkey@bucket/out",
        "quantize-dynamic hf:a/b?token=verysecretkey -o out",
        "inspect hf:a/b@main?token=verysecretkey",
        "inspect gs://bucket/a.safetensors#verysecretkey",
        "merge s3://bucket/out?sig=verysecretsignature",
        "plan in --passes https://user:verysecretkey@host/a",
        "verify az://user:verysecretkey@container/out",
    ] {
        let run = place.run(args, &[]);
        assert!(run.code > 0 && !run.stderr.contains("verysecret") && !run.stdout.contains("verysecret"), "{args}: {}", run.stderr);
    }
    let run = place.run("quantize-dynamic in -o s3://bucket/out?sig=verysecretsignature", &[]);
    assert!(run.stderr.contains("s3://bucket/out: contains a `?`"), "{}", run.stderr);
    assert!(!place.path().join("out").exists());
}

/// Environment variables for a local bucket.
fn bucket(server: &Server) -> [(&str, &str); 5] {
    let keys = [("AWS_ACCESS_KEY_ID", "secretkeyid"), ("AWS_SECRET_ACCESS_KEY", "verysecretkey"), ("AWS_REGION", "us-east-1")];
    [("AWS_ENDPOINT_URL", server.address.as_str()), ("AWS_ALLOW_HTTP", "true"), keys[0], keys[1], keys[2]]
}

/// Whether a file does not depend on times and on the location of the output.
fn is_independent(name: &str) -> bool {
    !name.starts_with("report.") && !["recipe.yaml", "README.md"].contains(&name)
}

#[test]
fn a_bucket_contains_the_same_as_a_folder() {
    let place = Workspace::new();
    let (server, held) = s3(|_| None);
    let variables = bucket(&server);
    let run = place.run("quantize-dynamic in -o s3://bucket/models/out", &variables);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let objects = held.lock().unwrap().objects.clone();
    for (name, bytes) in files(&place.path().join("here")).iter().filter(|(name, _)| is_independent(name)) {
        assert!(objects.get(&format!("models/out/{name}")) == Some(bytes), "{name}");
    }
    let card = String::from_utf8(objects["models/out/README.md"].clone()).unwrap();
    assert!(card.contains("compress check path/to/model --loads") && !card.contains("AutoModel"), "{card}");
    assert!(objects.keys().all(|name| name.starts_with("models/out/")) && held.lock().unwrap().uploads.is_empty());
    let mut written: Vec<_> = server.requests().iter().filter(|request| request.method == "PUT").map(|request| request.path().to_owned()).collect();
    // The lock file is written twice, to find out whether the store checks conditions.
    written.dedup();
    assert!(written[0].ends_with("/compress.unfinished") && written[1].ends_with("/model.safetensors"), "{written:?}");
    assert!(written[written.len() - 1].ends_with("/report.json"), "{written:?}");
    // It opens as a model, it can be verified, and it is not replaced.
    let verified = place.run("verify s3://bucket/models/out", &variables);
    assert!(verified.code == 0 && verified.stdout.contains("opens with 3 weights"), "{}{}", verified.stdout, verified.stderr);
    let run = place.run("densify s3://bucket/models/out -o dense", &variables);
    assert_eq!(run.code, 0, "{}", run.stderr);
    ok(place.path(), "densify here -o expected");
    assert_eq!(files(&place.path().join("dense"))["model.safetensors"], files(&place.path().join("expected"))["model.safetensors"]);
    for (args, message) in [("", "exists"), (" --force", "atomically")] {
        let run = place.run(&format!("quantize-dynamic in -o s3://bucket/models/out{args}"), &variables);
        assert!(run.code == 1 && run.stderr.contains(message), "{}", run.stderr);
    }
    for (args, message) in
        [("quantize-dynamic in -o s3://bucket/parts --part 1/2", "another machine"), ("quantize-dynamic in -o https://host/name", "cannot be written to")]
    {
        let run = place.run(args, &variables);
        assert!(run.code == 1 && run.stderr.contains(message), "{args}: {}", run.stderr);
    }
}

#[test]
fn results_in_a_bucket_are_measured() {
    let place = Workspace::new();
    golden_model(place.path(), "llama", &[("characters.json", "tokenizer.json"), ("book.txt", "../book.txt")]);
    let (server, held) = s3(|_| None);
    for (name, measured, args) in [("quick", "fidelity", ""), ("scored", "accuracy", " --eval book.txt")] {
        ok(place.path(), &format!("quantize-dynamic in -o {name}{args}"));
        let run = place.run(&format!("quantize-dynamic in -o s3://bucket/{name}{args}"), &bucket(&server));
        assert_eq!(run.code, 0, "{}", run.stderr);
        let held = held.lock().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&held.objects[&format!("{name}/report.json")]).unwrap();
        let local = read_json(&place.path().join(name).join("report.json"));
        assert!(!local[measured].is_null() && report[measured] == local[measured], "{}\n{}", report[measured], local[measured]);
        assert!(!report.to_string().contains(std::env::temp_dir().to_str().unwrap()), "{report}");
        assert!(!held.objects.contains_key(&format!("{name}/compress.unfinished")));
    }
}

#[test]
fn a_signature_covers_the_files_of_a_bucket() {
    let place = Workspace::new();
    let (server, held) = s3(|_| None);
    let variables = bucket(&server);
    crate::provenance::write_keys(place.path(), "key");
    let run = place.run("quantize-dynamic in -o s3://bucket/out --sign key.pem --sbom cyclonedx", &variables);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let verify = || place.run("verify s3://bucket/out --key key.pub.pem", &variables);
    let run = verify();
    assert!(run.code == 0 && run.stdout.contains("as signed") && run.stdout.contains("are correct"), "{}{}", run.stdout, run.stderr);
    held.lock().unwrap().objects.insert("out/tokenizer.json".into(), b"{}".to_vec());
    let run = verify();
    assert!(run.code == 1 && run.stdout.contains("changed: tokenizer.json"), "{}{}", run.stdout, run.stderr);
}

/// A model in two shards that are uploaded in several parts.
fn large(place: &Workspace) {
    let tensors = [floats("a.weight", &[1300, 1100]), floats("b.weight", &[1300, 1100]), floats("c.bias", &[64])];
    model_of(&place.path().join("large"), &json!({ "model_type": "bert" }), &tensors);
}

const PRUNE: &str = "prune-unstructured large --amount 0.5 --shard-size 10MB --threads 3 --no-measure";
const DENIED: &str = "<Error><Code>AccessDenied</Code><Message>no</Message><AWSAccessKeyId>secretkeyid</AWSAccessKeyId></Error>";

#[test]
fn weights_are_streamed_to_a_bucket() {
    let place = Workspace::new();
    large(&place);
    ok(place.path(), &format!("{PRUNE} -o whole"));
    // The server checks during requests that no weights are on the local disk.
    let temporary = tempfile::tempdir().unwrap();
    let (folder, most) = (temporary.path().to_owned(), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let (server, held) = s3(move |_| {
        let bytes = files(&folder).values().map(Vec::len).sum();
        seen.fetch_max(bytes, Ordering::Relaxed);
        None
    });
    let mut command = command(place.path());
    command.args(format!("{PRUNE} -o s3://bucket/out").split_whitespace()).env("TMPDIR", temporary.path()).envs(bucket(&server));
    let run: Run = command.output().unwrap().into();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let (held, whole) = (held.lock().unwrap(), files(&place.path().join("whole")));
    assert!(held.begun == 2 && held.parts == 4 && held.uploads.is_empty(), "{} uploads, {} parts", held.begun, held.parts);
    for (name, bytes) in whole.iter().filter(|(name, _)| is_independent(name)) {
        assert!(held.objects.get(&format!("out/{name}")) == Some(bytes), "{name}");
    }
    assert_eq!(held.objects.len(), whole.len());
    let most = most.load(Ordering::Relaxed);
    assert!((1..1_000_000).contains(&most), "{most} bytes were on the disk");
}

#[test]
fn google_buckets_are_supported() {
    let place = Workspace::new();
    large(&place);
    let (server, held) = s3(|_| None);
    let account = json!({ "private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": true, "gcs_base_url": server.address });
    fs::write(place.path().join("account.json"), account.to_string()).unwrap();
    let variables = [("GOOGLE_SERVICE_ACCOUNT", "account.json")];
    ok(place.path(), &format!("{PRUNE} -o whole"));
    let run = place.run(&format!("{PRUNE} -o gs://bucket/out"), &variables);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let verified = place.run("verify gs://bucket/out", &variables);
    assert_eq!(verified.code, 0, "{}{}", verified.stdout, verified.stderr);
    let taken = place.run("quantize-dynamic in -o gs://bucket/out", &variables);
    assert!(taken.code == 1 && taken.stderr.contains("exists"), "{}", taken.stderr);
    let held = held.lock().unwrap();
    assert!(held.parts == 4 && held.uploads.is_empty() && !held.objects.contains_key("out/compress.unfinished"));
    for (name, bytes) in files(&place.path().join("whole")).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        assert!(held.objects.get(&format!("out/{name}")) == Some(bytes), "{name}");
    }
    let conditions = server.requests().iter().filter(|request| request.headers.get("x-goog-if-generation-match").is_some_and(|value| value == "0")).count();
    assert!(conditions > 4, "{conditions} files are written to a store without conditions");
}

#[test]
fn a_failed_upload_leaves_no_files() {
    let place = Workspace::new();
    large(&place);
    type Fault = fn(&Request) -> bool;
    let faults: [(&str, Fault); 4] = [
        ("", |_| false),
        (".safetensors: the store answers AccessDenied: no", |request| request.query("partNumber").is_some_and(|number| number == "2")),
        (".safetensors: the store answers AccessDenied: no", |request| request.method == "POST" && request.query("uploadId").is_some()),
        ("report.json: the store answers AccessDenied: no", |request| request.method == "PUT" && request.path().ends_with("report.json")),
    ];
    for (message, fault) in faults {
        let (server, held) = s3(move |request| fault(request).then(|| Answer::new(403, DENIED)));
        let run = place.run(&format!("{PRUNE} -o s3://bucket/out"), &bucket(&server));
        let held = held.lock().unwrap();
        assert!(held.uploads.is_empty() && held.parts > 0, "{} parts", held.parts);
        if message.is_empty() {
            assert!(run.code == 0 && held.objects.len() > 4, "{}", run.stderr);
        } else {
            assert!(run.code == 1 && run.stderr.contains(message) && held.objects.is_empty(), "{message}: {}", run.stderr);
        }
    }
    // The store returns other bytes than were written, for a small file and for a multipart upload.
    let other = |end: &'static str, bytes: &'static [u8]| {
        s3(move |request| {
            let part = request.headers.contains_key("range").then(|| Answer::file(request, bytes));
            part.filter(|_| request.method == "GET" && request.path().ends_with(end))
        })
    };
    let (server, held) = other("tokenizer.json", b"{\"tokens\": ()}");
    let run = place.run("quantize-dynamic in -o s3://bucket/out", &bucket(&server));
    assert!(run.code == 1 && run.stderr.contains("tokenizer.json: bytes 0 to 14 read back differently"), "{}", run.stderr);
    assert!(held.lock().unwrap().objects.is_empty());
    let (server, held) = other("-00002-of-00002.safetensors", Box::leak(vec![7; 10_000_000].into_boxed_slice()));
    let run = place.run(&format!("{PRUNE} -o s3://bucket/out"), &bucket(&server));
    let told = run.stderr.contains("model-00002-of-00002.safetensors") && run.stderr.contains("bytes 0 to 524288 read back differently");
    assert!(run.code == 1 && told, "{}", run.stderr);
    assert!(held.lock().unwrap().objects.is_empty());
}

#[test]
fn existing_files_are_not_replaced() {
    let place = Workspace::new();
    let there = |held: &Arc<std::sync::Mutex<crate::cli::servers::Bucket>>| held.lock().unwrap().objects.clone();
    let run = |server: &Server, message: &str| {
        let run = place.run("quantize-dynamic in -o s3://bucket/out --no-measure", &bucket(server));
        assert!(run.code == 1 && run.stderr.contains(message), "{message}: {}", run.stderr);
    };
    // Another run is writing there, or was killed.
    let (server, held) = s3(|_| None);
    held.lock().unwrap().objects.insert("out/compress.unfinished".into(), b"theirs".to_vec());
    run(&server, "is being written by another run");
    assert_eq!(there(&held).len(), 1);
    // A file that appears after the check and before it is written.
    for (name, message) in [("compress.unfinished", "another run writes to it"), ("config.json", "config.json was created by another process")] {
        let bucket: Arc<std::sync::OnceLock<Arc<std::sync::Mutex<crate::cli::servers::Bucket>>>> = Arc::default();
        let seen = bucket.clone();
        let (server, held) = s3(move |request| {
            if request.method == "PUT" && request.path().ends_with(name) {
                assert_eq!(request.headers["if-none-match"], "*");
                seen.get().unwrap().lock().unwrap().objects.insert(format!("out/{name}"), b"theirs".to_vec());
            }
            None
        });
        bucket.set(held.clone()).ok().unwrap();
        run(&server, message);
        assert_eq!(there(&held).into_iter().collect::<Vec<_>>(), [(format!("out/{name}"), b"theirs".to_vec())]);
    }
    // A store without conditional writes is reported and written to, and so is one for which the user
    // disables them.
    for variable in [None, Some(("AWS_CONDITIONAL_PUT", "disabled"))] {
        let (server, held) = s3(|request| {
            let unknown = "<Error><Code>NotImplemented</Code><Message>A header is not implemented</Message></Error>";
            request.headers.contains_key("if-none-match").then(|| Answer::new(501, unknown))
        });
        let variables: Vec<_> = bucket(&server).into_iter().chain(variable).collect();
        let done = place.run("quantize-dynamic in -o s3://bucket/out --no-measure", &variables);
        assert!(done.code == 0 && done.stdout.contains("two concurrent runs that write it would both continue"), "{}{}", done.stdout, done.stderr);
        assert!(there(&held).contains_key("out/report.json") && !there(&held).contains_key("out/compress.unfinished"));
        let asked = server.requests().iter().any(|request| request.headers.contains_key("if-none-match"));
        assert_eq!(asked, variable.is_none());
    }
}

#[test]
fn small_files_are_written_again_after_a_lost_connection() {
    let place = Workspace::new();
    let cut: Arc<std::sync::Mutex<std::collections::BTreeSet<String>>> = Arc::default();
    let seen = cut.clone();
    let (server, held) = s3(move |request| {
        let once = request.method == "PUT" && request.path().ends_with(".json") && seen.lock().unwrap().insert(request.path().to_owned());
        once.then(|| Answer { cut: Some(0), ..Answer::new(200, "whole") })
    });
    let run = place.run("quantize-dynamic in -o s3://bucket/out --no-measure", &bucket(&server));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let (cut, held) = (cut.lock().unwrap(), held.lock().unwrap());
    assert!(cut.len() > 2 && cut.iter().all(|path| held.objects.contains_key(path.trim_start_matches("/bucket/"))), "{cut:?}");
    assert!(!held.objects.contains_key("out/compress.unfinished"));
}

#[test]
fn a_missing_bucket_is_named() {
    let place = Workspace::new();
    let none = "<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>";
    let (server, _) = s3(move |_| Some(Answer::new(404, none)));
    for args in ["quantize-dynamic in -o s3://none/out", "inspect s3://none/out"] {
        let run = place.run(args, &bucket(&server));
        assert!(run.code == 1 && run.stderr.contains("bucket does not exist") && run.stderr.contains("s3://none/out"), "{args}: {}", run.stderr);
    }
    assert!(server.requests().iter().all(|request| request.method != "PUT"));
}

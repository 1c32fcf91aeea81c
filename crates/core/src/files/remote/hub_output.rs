//! Outputs in repositories of the Hub. All files of a local folder appear with one commit: large files are
//! uploaded before it, and small files are part of it. If something fails, the branch is unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};

use super::failure::{Backoff, Failure};
use super::hub_api::{Api, with_advice};
use super::lfs::{self, Object};
use super::upload::{ProgressFn, collect, read_part};
use super::{BACKENDS, chunks, hub, invalid, locate, lock, secrets};
use crate::files::{GIT_ATTRIBUTES, SMALL_FILE};

/// Number of bytes from which the Hub determines the type of a file.
const SAMPLE: u64 = 512;
/// Maximum number of files in a request for their types.
const BATCH: usize = 256;
/// The report, which is different for each run.
const REPORT: &str = "report.json";

/// See [`require_repository`](crate::files::require_repository).
pub(in crate::files) fn require_repository(name: &str) -> io::Result<bool> {
    let api = Api::new(name)?;
    forget(&api);
    api.check().map_err(secrets::redact_error)
}

/// Drops everything cached about the branch.
fn forget(api: &Api) {
    lock(&BACKENDS).remove(&hub::root(&api.repository));
}

/// Commit and files of a branch.
#[derive(Debug)]
struct Branch {
    commit: String,
    files: BTreeSet<String>,
}

impl Branch {
    /// The state of a branch, or `None` if the repository does not exist. The state is cached by a preceding
    /// check of the branch.
    fn open(name: &str) -> io::Result<Option<Branch>> {
        let cached = match locate(name) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            located => located?.0,
        };
        let commit = cached.backend.commit().ok_or_else(|| invalid("the Hub does not report the commit of the branch".into()))?.to_owned();
        Ok(Some(Branch { commit, files: cached.list("")?.keys().cloned().collect() }))
    }
}

/// An output in a repository.
#[derive(Debug)]
pub(in crate::files) struct HubUpload {
    name: String,
    api: Api,
    /// The branch when the run started, if the repository existed.
    branch: Option<Branch>,
}

/// A local file.
struct LocalFile {
    name: String,
    path: PathBuf,
    bytes: u64,
}

impl HubUpload {
    /// Starts an output. Nothing is written before [`publish`](HubUpload::publish).
    pub fn begin(name: &str) -> io::Result<HubUpload> {
        Ok(HubUpload { name: name.to_owned(), api: Api::new(name)?, branch: Branch::open(name)? })
    }

    /// Commits the files of a local folder. Files of the branch that are not in the folder are deleted. Fails
    /// if the branch has changed since the run started.
    pub fn publish(&self, folder: &Path, progress: ProgressFn) -> io::Result<()> {
        chunks::evict_all();
        let done = self.commit(folder, progress).map_err(secrets::redact_error);
        forget(&self.api);
        done
    }

    fn commit(&self, folder: &Path, progress: ProgressFn) -> io::Result<()> {
        let created;
        let branch = match &self.branch {
            Some(branch) => branch,
            None => {
                created = self.create()?;
                &created
            }
        };
        let mut found = Vec::new();
        collect(folder, "", &mut found)?;
        found.sort();
        let local = |(name, path): (String, PathBuf)| Ok(LocalFile { bytes: std::fs::metadata(&path)?.len(), name, path });
        let files = found.into_iter().map(local).collect::<io::Result<Vec<LocalFile>>>()?;
        let large = self.large(&files)?;
        let (mut lines, mut objects) = (vec![self.header(branch)], Vec::new());
        for file in files {
            let LocalFile { name, path, bytes } = file;
            let with_name = |e: io::Error| io::Error::new(e.kind(), format!("{name}: {e}"));
            if large.contains(&name) {
                let oid = lfs::hash(&path, bytes, progress).map_err(with_name)?;
                lines.push(json!({ "key": "lfsFile", "value": { "path": name, "algo": "sha256", "oid": oid, "size": bytes } }));
                objects.push(Object { name, path, bytes, oid });
            } else {
                let content = BASE64_STANDARD.encode(std::fs::read(&path).map_err(with_name)?);
                lines.push(json!({ "key": "file", "value": { "path": name, "content": content, "encoding": "base64" } }));
                progress(bytes.saturating_mul(2))?;
            }
        }
        lfs::upload(&self.api, &objects, progress)?;
        let written: BTreeSet<&str> = lines.iter().filter_map(|line| line.pointer("/value/path")?.as_str()).collect();
        let removed: Vec<&String> = branch.files.iter().filter(|name| !written.contains(name.as_str()) && *name != GIT_ATTRIBUTES).collect();
        let deleted: Vec<Value> = removed.into_iter().map(|name| json!({ "key": "deletedFile", "value": { "path": name } })).collect();
        let body: String = lines.into_iter().chain(deleted).map(|line| format!("{line}\n")).collect();
        // The last moment to stop.
        progress(0)?;
        self.send(branch, body.as_bytes(), &std::fs::read(folder.join(REPORT)).unwrap_or_default())
    }

    /// Creates the repository.
    fn create(&self) -> io::Result<Branch> {
        self.api.create()?;
        forget(&self.api);
        let branch = Branch::open(&self.name)?.ok_or_else(|| io::Error::other("the repository was created, but does not exist"))?;
        match branch.files.iter().find(|name| *name != GIT_ATTRIBUTES) {
            Some(name) => Err(io::Error::new(ErrorKind::AlreadyExists, format!("{name} was created by another process; start again"))),
            None => Ok(branch),
        }
    }

    /// Names of the files that are LFS objects. The Hub decides by its patterns, sizes and contents.
    fn large(&self, files: &[LocalFile]) -> io::Result<BTreeSet<String>> {
        let mut large = BTreeSet::new();
        for chunk in files.chunks(BATCH) {
            let about = |file: &LocalFile| {
                let sample = read_part(&std::fs::File::open(&file.path)?, 0..file.bytes.min(SAMPLE))?;
                Ok(json!({ "path": file.name, "size": file.bytes, "sample": BASE64_STANDARD.encode(sample) }))
            };
            let listed = chunk.iter().map(about).collect::<io::Result<Vec<Value>>>()?;
            let answer = self.api.post_model(&format!("/preupload/{}", self.api.branch()), &json!({ "files": listed }))?;
            let entries = answer.get("files").and_then(Value::as_array).into_iter().flatten();
            let by_name: BTreeMap<&str, &Value> = entries.filter_map(|entry| Some((entry.get("path")?.as_str()?, entry))).collect();
            for file in chunk {
                let entry = by_name.get(file.name.as_str());
                if entry.and_then(|entry| entry.get("shouldIgnore")?.as_bool()) == Some(true) {
                    let reason = format!("{}: the .gitignore of the repository excludes it, so the output would be incomplete", file.name);
                    return Err(io::Error::new(ErrorKind::InvalidInput, reason));
                }
                match entry.and_then(|entry| entry.get("uploadMode")?.as_str()) {
                    // Storage servers reject empty objects.
                    _ if file.bytes == 0 => {}
                    Some("lfs") => drop(large.insert(file.name.clone())),
                    Some("regular") if file.bytes > SMALL_FILE => drop(large.insert(file.name.clone())),
                    Some("regular") => {}
                    _ => return Err(invalid(format!("{}: the Hub does not state how to upload it", file.name))),
                }
            }
        }
        Ok(large)
    }

    /// First line of the commit. The Hub rejects it if the branch has moved on.
    fn header(&self, branch: &Branch) -> Value {
        let (summary, description) = (format!("Output of {} {}", crate::NAME, env!("CARGO_PKG_VERSION")), format!("Described in {REPORT}."));
        json!({ "key": "header", "value": { "summary": summary, "description": description, "parentCommit": branch.commit } })
    }

    /// Sends the commit. A response can be lost, so the branch shows whether it was made.
    fn send(&self, branch: &Branch, body: &[u8], report: &[u8]) -> io::Result<()> {
        let url = self.api.model_url(&format!("/commit/{}", self.api.branch()));
        let call = self.api.call(&url, &[("Content-Type", "application/x-ndjson")], body, &[409, 412]);
        let mut backoff = Backoff::new();
        loop {
            let failure = match call.attempt() {
                Ok(reply) if ![409, 412].contains(&reply.status) => return Ok(()),
                Ok(_) => None,
                Err(Failure::Fatal(error)) => return Err(with_advice(error)),
                Err(failure) => Some(failure),
            };
            let head = self.api.head()?;
            match failure {
                _ if head != branch.commit && self.is_committed(&head, report) => return Ok(()),
                _ if head != branch.commit => {
                    let reason = "another commit was made while this run worked, so nothing was committed; start again";
                    return Err(io::Error::new(ErrorKind::AlreadyExists, reason));
                }
                Some(failure) => backoff.pause(failure)?,
                None => return Err(io::Error::other("the Hub rejects the commit, although the branch has not changed; start again")),
            }
        }
    }

    /// Whether a commit contains the report of this run.
    fn is_committed(&self, commit: &str, report: &[u8]) -> bool {
        let url = format!("{}/{}/resolve/{commit}/{REPORT}", self.api.endpoint, self.api.repository.id);
        !report.is_empty() && self.api.download(url).is_ok_and(|found| found == report)
    }
}

//! Model repositories on the Hugging Face Hub, `hf:org/name[@revision][/file]`, through its HTTP API.
//!
//! The environment variables are those of the package `huggingface_hub` (see its page "Environment
//! variables"): `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`,
//! `HF_HUB_DISABLE_IMPLICIT_TOKEN`. Files of the same commit in its cache are read from there. The cache
//! is never written.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::http::{self, Address};
use super::{Backend, Found, Stated, lock, secrets};
use crate::files::hub_name::{Repository, parse};

/// Maximum size of an API response in bytes.
pub(super) const MAX_RESPONSE: u64 = 64 << 20;
/// Files per page of a listing.
const PAGE: usize = 1000;
/// Address of the Hub, unless `HF_ENDPOINT` is set.
pub(super) const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Maximum number of pages of a listing.
const MAX_PAGES: usize = 100;

/// Whether an environment variable is set to a true value.
pub(super) fn is_enabled(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str()))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The configuration folder of `huggingface_hub`.
fn home() -> Option<PathBuf> {
    let cache = || variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
    variable("HF_HOME").map(PathBuf::from).or_else(|| Some(cache()?.join("huggingface")))
}

/// The cache folder of a repository.
fn cached(id: &str) -> Option<PathBuf> {
    let hub = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")).map(PathBuf::from).or_else(|| Some(home()?.join("hub")))?;
    Some(hub.join(format!("models--{}", id.replace('/', "--"))))
}

pub(super) fn token() -> Option<String> {
    if is_enabled("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    let file = || std::fs::read_to_string(variable("HF_TOKEN_PATH").map_or_else(|| home().map(|home| home.join("token")), |path| Some(path.into()))?).ok();
    let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(file)?.trim().to_owned();
    secrets::register(&token);
    (!token.is_empty()).then_some(token)
}

/// Parses a name into repository and path.
pub(super) fn address(name: &str) -> io::Result<super::Address> {
    let (repository, inside) = parse(name).map_err(|reason| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
    Ok(super::Address { root: root(&repository), inside, open: Box::new(move || open(repository)) })
}

/// Percent-encodes a text for a URL, except the characters of `keep`.
pub(super) fn percent_encode(text: &str, keep: &str) -> String {
    let one = |byte: u8| {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "-_.~".contains(c) || keep.contains(c) { c.to_string() } else { format!("%{byte:02X}") }
    };
    text.bytes().map(one).collect()
}

/// Address of the Hub.
pub(super) fn endpoint() -> io::Result<String> {
    let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.into()).trim_end_matches('/').to_owned();
    http::require_private(&endpoint)?;
    Ok(endpoint)
}

/// Name of the backend of a repository.
pub(super) fn root(repository: &Repository) -> String {
    format!("hf:{}@{}", repository.id, repository.revision)
}

fn open(repository: Repository) -> io::Result<Box<dyn Backend>> {
    let cache = cached(&repository.id);
    if is_enabled("HF_HUB_OFFLINE") {
        return Ok(Box::new(Snapshot::open(&repository, cache)?));
    }
    let (endpoint, token) = (endpoint()?, token());
    let url = format!("{endpoint}/api/models/{}/revision/{}", repository.id, percent_encode(&repository.revision, ""));
    let about = json(&Address::new(url, token.clone()).read_all(MAX_RESPONSE).map_err(|e| with_advice(e, token.is_some()))?.bytes)?;
    let commit = about.get("sha").and_then(Value::as_str).filter(|sha| sha.len() == 40 && sha.bytes().all(|b| b.is_ascii_hexdigit()));
    let commit = commit.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the Hub does not report the commit of the revision"))?.to_owned();
    let snapshot = cache.map(|cache| cache.join("snapshots").join(&commit));
    Ok(Box::new(Hub { endpoint, id: repository.id, commit, token, snapshot, files: Mutex::default() }))
}

/// Adds advice to an error of the Hub.
fn with_advice(error: io::Error, token: bool) -> io::Error {
    let advice = match (error.kind(), token) {
        (io::ErrorKind::PermissionDenied, true) => "the token in HF_TOKEN or from `hf auth login` has no access to the repository; request access on its page",
        (io::ErrorKind::PermissionDenied, false) => "set HF_TOKEN, or run `hf auth login`; the Hub reports the same error for repositories that do not exist",
        (io::ErrorKind::NotFound, _) => "check organization, name and revision",
        (io::ErrorKind::Other, _) => "without a network connection, set HF_HUB_OFFLINE=1 to read the cache of huggingface_hub",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}; {advice}"))
}

pub(super) fn json(bytes: &[u8]) -> io::Result<Value> {
    serde_json::from_slice(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the Hub's response is not valid JSON"))
}

/// A repository at a commit.
struct Hub {
    endpoint: String,
    id: String,
    commit: String,
    token: Option<String>,
    /// Cache folder of this commit.
    snapshot: Option<PathBuf>,
    files: Mutex<BTreeMap<String, Arc<Address>>>,
}

impl Hub {
    fn address(&self, name: &str) -> Arc<Address> {
        let new = || {
            let url = format!("{}/{}/resolve/{}/{}", self.endpoint, self.id, self.commit, percent_encode(name, "/"));
            Arc::new(Address::new(url, self.token.clone()))
        };
        lock(&self.files).entry(name.to_owned()).or_insert_with(new).clone()
    }
}

/// Parses one page of a file listing. `snapshot` is the cache folder of the commit.
pub(super) fn page(page: &[u8], snapshot: Option<&Path>) -> io::Result<Vec<Found>> {
    let entries = json(page)?;
    let entries = entries.as_array().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the Hub's file listing is not a list"))?;
    let safe = |name: &str| Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let files = entries.iter().filter(|entry| entry.get("type").and_then(Value::as_str) == Some("file")).map(|entry| {
        let found = found(entry, snapshot).filter(|found| safe(&found.name));
        found.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the Hub's file listing contains an invalid entry"))
    });
    files.collect()
}

/// The 64 digits of a SHA-256, with or without the prefix of LFS pointers.
fn sha256_digits(oid: &str) -> Option<String> {
    let digits = oid.strip_prefix("sha256:").unwrap_or(oid).to_ascii_lowercase();
    (digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(digits)
}

fn found(entry: &Value, snapshot: Option<&Path>) -> Option<Found> {
    let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let (name, bytes) = (text(entry, "path")?, entry.get("size").and_then(Value::as_u64)?);
    let lfs = entry.get("lfs").filter(|lfs| !lfs.is_null());
    let sha256 = lfs.map(|lfs| text(lfs, "oid").or_else(|| text(lfs, "sha256")).and_then(|oid| sha256_digits(&oid)));
    // An LFS object without a valid identifier makes the entry malformed: its contents could not be checked.
    let sha256 = if let Some(stated) = sha256 { Some(stated?) } else { None };
    let version = text(entry, "oid");
    let local = snapshot.map(|folder| folder.join(&name)).filter(|path| std::fs::metadata(path).is_ok_and(|about| about.len() == bytes));
    Some(Found { name, bytes, version, sha256, local })
}

impl Backend for Hub {
    /// Lists the complete repository, whatever the folder, with a single listing.
    fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
        let mut url = Some(format!("{}/api/models/{}/tree/{}?recursive=true&limit={PAGE}", self.endpoint, self.id, self.commit));
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let Some(page_url) = url.take() else { return Ok(files) };
            let response = Address::new(page_url, self.token.clone()).read_all(MAX_RESPONSE).map_err(|e| with_advice(e, self.token.is_some()))?;
            files.extend(page(&response.bytes, self.snapshot.as_deref())?);
            url = http::header(&response.headers, "link").and_then(next).map(str::to_owned);
            // The token must not be sent to another server.
            if url.as_ref().is_some_and(|url| !url.starts_with(&format!("{}/", self.endpoint))) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the Hub's file listing continues on another server"));
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the Hub's file listing has too many pages"))
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        Ok(self.list("")?.into_iter().find(|found| found.name == name))
    }

    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
        let response = self.address(&file.name).range(range, Some(file.bytes), None);
        response.map(|response| response.bytes).map_err(|e| if e.kind() == io::ErrorKind::PermissionDenied { with_advice(e, self.token.is_some()) } else { e })
    }

    fn commit(&self) -> Option<&str> {
        Some(&self.commit)
    }

    /// Files that are not LFS objects are identified by the SHA-1 of their git blob.
    fn stated(&self, file: &Found) -> Option<Stated> {
        let git_blob = || file.version.clone().map(|stated| Stated::GitBlob(stated, file.bytes));
        file.sha256.clone().map(Stated::Sha256).or_else(git_blob)
    }
}

/// The URL of the next page in a `Link` header.
pub(super) fn next(link: &str) -> Option<&str> {
    let part = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    part.split_once('<')?.1.split_once('>').map(|(url, _)| url)
}

/// A repository that is read from the local cache only.
struct Snapshot {
    files: Vec<Found>,
}

impl Snapshot {
    fn open(repository: &Repository, cache: Option<PathBuf>) -> io::Result<Snapshot> {
        let cache = cache.unwrap_or_default();
        let missing = || {
            let what = format!(
                "HF_HUB_OFFLINE is set, and the cache in {} does not contain the repository; run `hf download {}` first",
                cache.display(),
                repository.id
            );
            io::Error::new(io::ErrorKind::NotFound, what)
        };
        let commit = std::fs::read_to_string(cache.join("refs").join(&repository.revision)).map(|commit| commit.trim().to_owned());
        let commit = commit.unwrap_or_else(|_| repository.revision.clone());
        let folder = cache.join("snapshots").join(&commit);
        let mut files = Vec::new();
        collect(&folder, "", &mut files, 0).map_err(|e| if e.kind() == io::ErrorKind::InvalidData { e } else { missing() })?;
        if files.is_empty() { Err(missing()) } else { Ok(Snapshot { files }) }
    }
}

/// Maximum depth of nested folders in a snapshot.
const DEEPEST: usize = 16;

fn collect(folder: &Path, inside: &str, files: &mut Vec<Found>, depth: usize) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()).map(|name| format!("{inside}{name}")) else { continue };
        let incomplete = || format!("{} in the cache is a broken link: its download is incomplete; run `hf download` again", path.display());
        let about = std::fs::metadata(&path).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, incomplete()))?;
        if about.is_dir() && depth < DEEPEST {
            collect(&path, &format!("{name}/"), files, depth.saturating_add(1))?;
        } else if about.is_file() {
            files.push(Found { name, bytes: about.len(), version: None, sha256: None, local: Some(path) });
        }
    }
    Ok(())
}

impl Backend for Snapshot {
    fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
        Ok(self.files.clone())
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        Ok(self.files.iter().find(|found| found.name == name).cloned())
    }

    fn read(&self, _file: &Found, _range: Range<u64>) -> io::Result<Vec<u8>> {
        Err(io::Error::other("is only read from the cache"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_pages_are_found() {
        assert_eq!(next("<https://a/x?cursor=1>; rel=\"next\""), Some("https://a/x?cursor=1"));
        assert_eq!(next("<https://a/x>; rel=\"last\", <https://a/y>; rel=\"next\""), Some("https://a/y"));
        assert_eq!(next("<https://a/x>; rel=\"last\""), None);
        assert_eq!(percent_encode("a b/c#d", "/"), "a%20b/c%23d");
    }
}

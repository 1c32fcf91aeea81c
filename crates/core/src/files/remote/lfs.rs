//! Uploads of large files to a repository, with the batch API of Git LFS. The Hub adds a transfer in parts,
//! whose addresses are in the header of the upload action.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;
use serde_json::{Value, json};
use ureq::http::Method;

use super::hub::DEFAULT_ENDPOINT;
use super::hub_api::Api;
use super::send::{Call, Content, Reply};
use super::session::ranges;
use super::upload::{ProgressFn, read_part};
use super::{content_hash, http, invalid, lock};

/// Media type of the requests.
const LFS: &str = "application/vnd.git-lfs+json";
/// Maximum number of files in a request to the batch API.
const BATCH: usize = 256;
/// Number of parts that are uploaded at the same time.
const CONCURRENT: usize = 8;
/// Bytes hashed at once.
const READ: u64 = 4 << 20;

/// A large file.
pub(super) struct Object {
    /// Path in the repository.
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    /// SHA-256 in hexadecimal digits.
    pub oid: String,
}

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Entry>,
}

/// The server's instructions for an object.
#[derive(Deserialize)]
struct Entry {
    oid: String,
    actions: Option<Actions>,
    error: Option<EntryError>,
}

#[derive(Deserialize)]
struct EntryError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    header: Option<BTreeMap<String, Value>>,
}

/// SHA-256 of a file.
pub(super) fn hash(path: &std::path::Path, bytes: u64, progress: ProgressFn) -> io::Result<String> {
    let (file, mut hasher) = (File::open(path)?, content_hash::sha256());
    for range in ranges(bytes, READ) {
        hasher.update(&read_part(&file, range.clone())?);
        progress(range.end.saturating_sub(range.start))?;
    }
    Ok(content_hash::digits(hasher))
}

/// Uploads the objects that the Hub does not have yet.
pub(super) fn upload(api: &Api, objects: &[Object], progress: ProgressFn) -> io::Result<()> {
    // Files with the same contents are one object.
    let distinct: BTreeMap<&str, &Object> = objects.iter().map(|object| (object.oid.as_str(), object)).collect();
    let repeated = objects.iter().map(|object| object.bytes).sum::<u64>().saturating_sub(distinct.values().map(|object| object.bytes).sum());
    progress(repeated)?;
    let distinct: Vec<&Object> = distinct.into_values().collect();
    for chunk in distinct.chunks(BATCH) {
        let entries = batch(api, chunk)?;
        for object in chunk {
            let with_name = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", object.name));
            let entry = entries.iter().find(|entry| entry.oid == object.oid);
            let entry = entry.ok_or_else(|| with_name(invalid("the Hub does not state how to upload it".into())))?;
            upload_object(api, object, entry, progress).map_err(with_name)?;
        }
    }
    Ok(())
}

fn batch(api: &Api, objects: &[&Object]) -> io::Result<Vec<Entry>> {
    let listed: Vec<Value> = objects.iter().map(|object| json!({ "oid": object.oid, "size": object.bytes })).collect();
    let body = json!({
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": listed,
        "hash_algo": "sha256",
        "ref": { "name": api.repository.revision },
    });
    let url = format!("{}/{}.git/info/lfs/objects/batch", api.endpoint, api.repository.id);
    let reply = api.post(&url, LFS, &body, &[])?;
    let batch: Batch = serde_json::from_slice(&reply.bytes).map_err(|e| invalid(format!("the Hub's response to the LFS request is malformed: {e}")))?;
    Ok(batch.objects)
}

fn upload_object(api: &Api, object: &Object, entry: &Entry, progress: ProgressFn) -> io::Result<()> {
    if let Some(error) = &entry.error {
        return Err(io::Error::other(format!("the Hub does not accept the file: {}", error.message)));
    }
    let actions = entry.actions.as_ref();
    match actions.and_then(|actions| actions.upload.as_ref()) {
        // The Hub has an object with these contents.
        None => progress(object.bytes)?,
        Some(action) => transfer(api, object, action, progress)?,
    }
    let Some(verify) = actions.and_then(|actions| actions.verify.as_ref()) else { return Ok(()) };
    let url = reachable(api, &verify.href)?;
    api.post(&url, "application/json", &json!({ "oid": object.oid, "size": object.bytes }), &[]).map(drop)
}

/// The address of an action, at the configured mirror instead of the Hub itself.
fn reachable(api: &Api, href: &str) -> io::Result<String> {
    let inside = href.strip_prefix(DEFAULT_ENDPOINT).filter(|rest| rest.starts_with('/'));
    let url = inside.map_or_else(|| href.to_owned(), |rest| format!("{}{rest}", api.endpoint));
    http::require_private(&url)?;
    Ok(url)
}

/// Uploads the bytes of an object, in parts if the server states their size.
fn transfer(api: &Api, object: &Object, action: &Action, progress: ProgressFn) -> io::Result<()> {
    let file = File::open(&object.path)?;
    let (url, empty) = (reachable(api, &action.href)?, BTreeMap::new());
    let header = action.header.as_ref().unwrap_or(&empty);
    let Some(size) = header.get("chunk_size") else {
        let headers: Vec<(&str, &str)> = header.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?))).collect();
        return put(&file, &url, &headers, 0..object.bytes, progress).map(drop);
    };
    let size = size.as_u64().or_else(|| size.as_str()?.parse().ok()).filter(|size| *size > 0);
    let ranges: Vec<Range<u64>> = size.map(|size| ranges(object.bytes, size).collect()).unwrap_or_default();
    let address = |index: usize| header.get(&index.saturating_add(1).to_string())?.as_str();
    let parts: Vec<(&str, Range<u64>)> = ranges.iter().enumerate().filter_map(|(index, range)| Some((address(index)?, range.clone()))).collect();
    if parts.len() != ranges.len() || parts.is_empty() || address(parts.len()).is_some() {
        return Err(invalid(format!("the Hub's addresses of parts do not match its {} bytes", object.bytes)));
    }
    let tags = each(&parts, |(url, range)| {
        http::require_private(url)?;
        let reply = put(&file, url, &[], range.clone(), progress)?;
        let tag = http::header(&reply.headers, "etag").filter(|tag| !tag.is_empty()).map(str::to_owned);
        tag.ok_or_else(|| invalid("the storage server does not confirm a part with an ETag".into()))
    })?;
    let listed: Vec<Value> = (1u64..).zip(tags).map(|(number, tag)| json!({ "partNumber": number, "etag": tag })).collect();
    api.post(&url, LFS, &json!({ "oid": object.oid, "parts": listed }), &[]).map(drop)
}

/// Uploads a range of a file to a signed address, without the token.
fn put(file: &File, url: &str, headers: &[(&str, &str)], range: Range<u64>, progress: ProgressFn) -> io::Result<Reply> {
    Call { method: Method::PUT, url, token: None, headers, content: Content::Part(file, range, progress), accepted: &[] }.send()
}

/// Processes items on several threads, and returns the results in their order, or the first error.
fn each<T: Sync, R: Send>(items: &[T], process: impl Fn(&T) -> io::Result<R> + Sync) -> io::Result<Vec<R>> {
    let (next, done, failed) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()), Mutex::new(None));
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index).filter(|_| lock(&failed).is_none()) else { return };
            match process(item) {
                Ok(result) => drop(lock(&done).insert(index, result)),
                Err(error) => drop(lock(&failed).get_or_insert(error)),
            }
        }
    };
    std::thread::scope(|scope| (0..CONCURRENT.min(items.len())).for_each(|_| drop(scope.spawn(work))));
    match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).into_values().collect()),
    }
}

//! Files on other machines. Each URL scheme is a row of a table and a module with its backend. All
//! functions block.
//!
//! A backend (a repository at a commit, a bucket, a server) is listed once, so that a run sees a
//! consistent state. Small files are read completely. Large files are read in ranges on demand,
//! prefetched into a memory cache of fixed size, and never stored on disk.

mod bucket;
mod chunks;
mod content_hash;
mod failure;
mod http;
mod hub;
mod hub_api;
mod hub_output;
mod lfs;
mod outgoing;
mod secrets;
mod send;
mod session;
mod settings;
mod upload;
mod web;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use self::content_hash::Stated;
pub(super) use self::hub_output::{HubUpload, require_repository};
pub(super) use self::outgoing::Outgoing;
pub(super) use self::upload::Upload;
use super::{Entry, File, Kind, SMALL_FILE, remote_name};

/// Parses a name into the name of the backend, a function that opens the backend, and the path inside.
type Opener = fn(&str) -> io::Result<Address>;

/// How outputs are written to a backend.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outputs {
    /// Not at all.
    Refused,
    /// Staged in a local folder, then committed.
    Committed,
    /// Uploaded while they are written.
    Streamed,
}

/// Scheme and opener of each backend, and how outputs are written to it.
const TABLE: [(&str, Opener, Outputs); 6] = [
    ("hf:", hub::address, Outputs::Committed),
    ("https://", web::address, Outputs::Refused),
    ("http://", web::address, Outputs::Refused),
    ("s3://", bucket::s3, Outputs::Streamed),
    ("gs://", bucket::gs, Outputs::Streamed),
    ("az://", bucket::az, Outputs::Streamed),
];

/// Prefixes of remote names.
pub const SCHEMES: [&str; TABLE.len()] = {
    let [(a, ..), (b, ..), (c, ..), (d, ..), (e, ..), (f, ..)] = TABLE;
    [a, b, c, d, e, f]
};

/// Whether the backend of a name supports writing.
pub fn is_writable(name: &str) -> bool {
    outputs(name) != Outputs::Refused
}

/// Whether outputs are uploaded to the backend of a name while they are written.
pub(super) fn is_streamed(name: &str) -> bool {
    outputs(name) == Outputs::Streamed
}

fn outputs(name: &str) -> Outputs {
    TABLE.iter().find(|(scheme, ..)| name.starts_with(scheme)).map_or(Outputs::Refused, |(.., outputs)| *outputs)
}

/// A parsed remote name.
struct Address {
    /// Name of the backend. The full name is `root/inside`.
    root: String,
    /// Path inside the backend; empty for its root.
    inside: String,
    open: Box<dyn FnOnce() -> io::Result<Box<dyn Backend>>>,
}

/// A collection of remote files.
trait Backend: Send + Sync {
    /// Lists all files below a folder, recursively. The root folder has an empty name.
    fn list(&self, folder: &str) -> io::Result<Vec<Found>>;

    /// Looks up a file by name.
    fn find(&self, name: &str) -> io::Result<Option<Found>>;

    /// Reads exactly the requested bytes of a file.
    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// The write interface, if the backend supports writing.
    fn writable(&self) -> io::Result<&dyn Writable> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "cannot be written to"))
    }

    /// The commit that is read, if the backend has commits.
    fn commit(&self) -> Option<&str> {
        None
    }

    /// The hash of the contents of a file that the server states.
    fn stated(&self, file: &Found) -> Option<Stated> {
        file.sha256.clone().map(Stated::Sha256)
    }
}

/// A backend that supports writing.
trait Writable {
    /// Writes a small file, and returns its version. With `new`, an existing file is not replaced: the error
    /// is `AlreadyExists`, or `Unsupported` if the backend has no conditional writes.
    fn put(&self, name: &str, bytes: Vec<u8>, new: bool) -> io::Result<Option<String>>;

    /// Starts a multipart upload and returns its id.
    fn begin(&self, name: &str) -> io::Result<String>;

    /// Uploads a part and returns its id. Parts are numbered from 0; all except the last have the same
    /// size.
    fn put_part(&self, name: &str, upload: &str, number: usize, bytes: Vec<u8>) -> io::Result<String>;

    /// Completes a multipart upload, and returns the version of the file.
    fn complete(&self, name: &str, upload: &str, parts: Vec<String>) -> io::Result<Option<String>>;

    /// Aborts a multipart upload and deletes its parts.
    fn abort(&self, name: &str, upload: &str) -> io::Result<()>;

    /// Removes a file, if it exists.
    fn remove(&self, name: &str) -> io::Result<()>;
}

/// Metadata of a file in a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    /// Path inside the backend.
    name: String,
    bytes: u64,
    /// Version of the file as reported by the server (an ETag, a modification time). Detects changes while
    /// the file is read, but does not identify the contents.
    version: Option<String>,
    /// SHA-256 of the contents in hexadecimal digits, if the server reports it.
    sha256: Option<String>,
    /// Path of a copy in a local cache.
    local: Option<PathBuf>,
}

/// A backend with cached listings and small files.
struct CachedBackend {
    backend: Box<dyn Backend>,
    /// Listings by folder, then by file name.
    folders: Mutex<BTreeMap<String, Arc<BTreeMap<String, Found>>>>,
    /// Results of lookups by name.
    files: Mutex<BTreeMap<String, Option<Found>>>,
    /// Contents of small files.
    texts: Mutex<BTreeMap<String, Arc<Vec<u8>>>>,
    open: Mutex<BTreeMap<String, chunks::Ranges>>,
}

/// An open file.
#[derive(Debug, Clone)]
pub(super) enum Open {
    /// A file that was already read completely.
    Buffered(Arc<Vec<u8>>),
    /// A file that is read in ranges.
    Ranges(chunks::Ranges),
}

impl Open {
    /// Fills a buffer with the bytes at an offset. The range must lie inside the file.
    pub fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Open::Ranges(file) => file.read_exact_at(buffer, at),
            Open::Buffered(bytes) => {
                let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..at.checked_add(buffer.len())?));
                buffer.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }

    /// As [`read_exact_at`](Open::read_exact_at), without prefetching the bytes that follow.
    pub fn sample_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Open::Ranges(file) => file.sample_exact_at(buffer, at),
            Open::Buffered(_) => self.read_exact_at(buffer, at),
        }
    }
}

/// Maximum total size of cached small files in bytes.
const TEXT_CACHE: usize = 32 << 20;
/// Maximum number of files in a folder. A larger folder is not a model.
const MAX_FILES: usize = 20_000;

/// Backends by name, for the lifetime of the process.
static BACKENDS: LazyLock<Mutex<BTreeMap<String, Arc<CachedBackend>>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn parse(name: &str) -> io::Result<Address> {
    let opener = TABLE.iter().find(|(scheme, ..)| name.starts_with(scheme)).map(|(_, opener, _)| opener);
    opener.ok_or_else(|| io::Error::other("its scheme is not supported"))?(name)
}

/// The backend of a file or folder that is part of a cached listing. Its name holds no credentials, even if
/// it contains `?` or `#`.
fn find_listed(name: &str) -> Option<(Arc<CachedBackend>, String)> {
    let address = parse(name).ok()?;
    let cached = lock(&BACKENDS).get(&address.root)?.clone();
    let is_listed = cached.listed(&address.inside)?.keys().any(|file| within(file, &address.inside));
    is_listed.then_some((cached, address.inside))
}

/// Parses a name and opens its backend.
fn locate(name: &str) -> io::Result<(Arc<CachedBackend>, String)> {
    if let Err(error) = super::require_no_secret(name) {
        return find_listed(name).ok_or(error);
    }
    let address = parse(name)?;
    if address.inside.split('/').any(|part| part == ".." || part == ".") {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "remote names must not contain `.` or `..`"));
    }
    if let Some(cached) = lock(&BACKENDS).get(&address.root) {
        return Ok((cached.clone(), address.inside));
    }
    let backend = (address.open)().map_err(secrets::redact_error)?;
    let cached = Arc::new(CachedBackend::new(backend));
    Ok((lock(&BACKENDS).entry(address.root).or_insert(cached).clone(), address.inside))
}

impl CachedBackend {
    fn new(backend: Box<dyn Backend>) -> CachedBackend {
        CachedBackend { backend, folders: Mutex::default(), files: Mutex::default(), texts: Mutex::default(), open: Mutex::default() }
    }

    /// Opens a file. All calls for one file share its chunks.
    fn open(self: &Arc<CachedBackend>, found: Found) -> chunks::Ranges {
        lock(&self.open).entry(found.name.clone()).or_insert_with(|| chunks::Ranges::new(self.clone(), found)).clone()
    }

    /// The cached listing that includes a folder, if there is one.
    fn listed(&self, folder: &str) -> Option<Arc<BTreeMap<String, Found>>> {
        let folders = lock(&self.folders);
        folders.iter().find(|(listed, _)| within(folder, listed)).map(|(_, files)| files.clone())
    }

    fn list(&self, folder: &str) -> io::Result<Arc<BTreeMap<String, Found>>> {
        if let Some(files) = self.listed(folder) {
            return Ok(files);
        }
        let files = self.backend.list(folder).map_err(secrets::redact_error)?;
        if files.len() > MAX_FILES {
            return Err(io::Error::other(format!("more than {MAX_FILES} files; specify the folder of the model")));
        }
        let files = Arc::new(files.into_iter().map(|file| (file.name.clone(), file)).collect::<BTreeMap<_, _>>());
        if !files.is_empty() {
            lock(&self.folders).insert(folder.to_owned(), files.clone());
        }
        Ok(files)
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        if let Some(files) = self.listed(name) {
            return Ok(files.get(name).cloned());
        }
        {
            let files = lock(&self.files);
            if let Some(found) = files.get(name) {
                return Ok(found.clone());
            }
            // A file cannot contain other files.
            if files.values().flatten().any(|file| within(name, &file.name)) {
                return Ok(None);
            }
        }
        let found = if name.is_empty() { None } else { self.backend.find(name).map_err(secrets::redact_error)? };
        lock(&self.files).insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// Drops everything cached about a folder.
    fn forget(&self, folder: &str) {
        // Listings of parent folders include this folder too.
        lock(&self.folders).retain(|listed, _| !within(listed, folder) && !within(folder, listed));
        lock(&self.files).retain(|name, _| !within(name, folder));
        lock(&self.texts).retain(|name, _| !within(name, folder));
        lock(&self.open).retain(|name, _| !within(name, folder));
    }

    fn require(&self, name: &str) -> io::Result<Found> {
        self.find(name)?.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such file"))
    }

    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
        let length = range.end.saturating_sub(range.start);
        let bytes = self.backend.read(file, range).map_err(|e| vanished(secrets::redact_error(e)))?;
        if bytes.len() as u64 != length {
            return Err(io::Error::other(format!("received {} bytes instead of {length}", bytes.len())));
        }
        Ok(bytes)
    }

    /// Reads a small file completely and verifies its contents.
    fn read_all(&self, file: &Found) -> io::Result<Arc<Vec<u8>>> {
        if let Some(text) = lock(&self.texts).get(&file.name) {
            return Ok(text.clone());
        }
        let bytes = Arc::new(if file.bytes == 0 { Vec::new() } else { self.read(file, 0..file.bytes)? });
        self.backend.stated(file).map_or(Ok(()), |stated| stated.check(&bytes)).map_err(invalid)?;
        let mut texts = lock(&self.texts);
        if texts.values().map(|text| text.len()).sum::<usize>().saturating_add(bytes.len()) <= TEXT_CACHE {
            texts.insert(file.name.clone(), bytes.clone());
        }
        Ok(bytes)
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Turns `NotFound` into another error: missing files are optional, but a listed file must exist.
fn vanished(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::NotFound => io::Error::other(format!("was listed but does not exist any more; start again ({error})")),
        _ => error,
    }
}

/// Whether a name is a folder or inside it.
fn within(name: &str, folder: &str) -> bool {
    folder.is_empty() || name.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

pub(super) fn kind(name: &str) -> io::Result<Kind> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "no such file or folder");
    let (cached, inside) = locate(name)?;
    if let Some(files) = cached.listed(&inside) {
        let file = files.contains_key(&inside).then_some(Kind::File);
        return file.or_else(|| files.keys().any(|file| within(file, &inside)).then_some(Kind::Folder)).ok_or_else(none);
    }
    if cached.find(&inside)?.is_some() {
        return Ok(Kind::File);
    }
    (!cached.list(&inside)?.is_empty()).then_some(Kind::Folder).ok_or_else(none)
}

pub(super) fn open(name: &str) -> io::Result<File> {
    let (cached, inside) = locate(name)?;
    let found = cached.require(&inside)?;
    if let Some(path) = &found.local {
        return File::open(path).map_err(vanished);
    }
    let (length, buffered) = (found.bytes, lock(&cached.texts).get(&found.name).cloned());
    let open = buffered.map_or_else(|| Open::Ranges(cached.open(found)), Open::Buffered);
    Ok(File { length, bytes: super::Bytes::Remote(open) })
}

pub(super) fn read(name: &str) -> io::Result<Vec<u8>> {
    let (cached, inside) = locate(name)?;
    let found = cached.require(&inside)?;
    match &found.local {
        Some(path) => std::fs::read(path).map_err(vanished),
        None if found.bytes > SMALL_FILE => Err(io::Error::other(format!("has {} bytes, but at most {SMALL_FILE} bytes can be read at once", found.bytes))),
        None => cached.read_all(&found).map(|bytes| bytes.to_vec()),
    }
}

/// The SHA-256 that the server reports. `None` for files in a local cache, which the caller hashes:
/// their bytes were not received from the server now.
pub(super) fn content_hash(name: &str) -> io::Result<Option<String>> {
    let (cached, inside) = locate(name)?;
    let found = cached.require(&inside)?;
    Ok(found.sha256.filter(|_| found.local.is_none()))
}

pub(super) fn check_content(name: &str, step: &dyn Fn(u64) -> bool) -> io::Result<()> {
    let (cached, inside) = locate(name)?;
    let found = cached.require(&inside)?;
    if found.local.is_some() { Ok(()) } else { cached.open(found).check_content(step) }
}

pub(super) fn list(name: &str) -> io::Result<Vec<Entry>> {
    let (cached, inside) = locate(name)?;
    let files = cached.list(&inside)?;
    let mut entries = BTreeMap::new();
    for file in files.keys().filter(|file| within(file, &inside)) {
        let rest = file.get(inside.len()..).unwrap_or_default().trim_start_matches('/');
        let (first, kind) = rest.split_once('/').map_or((rest, Kind::File), |(folder, _)| (folder, Kind::Folder));
        if !first.is_empty() {
            entries.insert(first.to_owned(), kind);
        }
    }
    if entries.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "no such file or folder"));
    }
    Ok(entries.into_iter().map(|(first, kind)| Entry { path: Path::new(name).join(first), kind }).collect())
}

/// Short description of the supported remote locations.
pub fn describe() -> String {
    let token = if hub::token().is_some() { "with a token" } else { "without a token" };
    format!("the Hub {token}; s3, gs, az, https")
}

/// Prefetches the first chunk of a file that will be opened soon.
pub fn prefetch(path: &Path) {
    let found = remote_name(path).and_then(|name| locate(name).ok()).and_then(|(cached, inside)| Some((cached.find(&inside).ok()??, cached)));
    if let Some((found, cached)) = found.filter(|(found, _)| found.local.is_none()) {
        cached.open(found).prefetch();
    }
}

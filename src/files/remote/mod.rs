//! Files of other machines. A scheme is a row of a table and a module that opens its places; everything here blocks.
//!
//! A place (a repository at a commit, a bucket, a server) is asked what it holds once, so that a run sees one state of it. Small files are
//! read whole; of others, ranges are read as they are needed, ahead of who reads, into memory of a fixed size, and never onto a disk.

mod bucket;
mod chunks;
mod content_hash;
mod http;
mod hub;
mod outgoing;
mod secrets;
mod session;
mod upload;
mod web;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

pub(super) use self::outgoing::Outgoing;
pub(super) use self::upload::Upload;
use super::{Entry, File, Kind, WHOLE, remote_name};

/// What opens the place that a name is in: it gives the place, the name of it, and what the file or folder is called inside.
type Opener = fn(&str) -> io::Result<Address>;

/// How names begin, what opens their places, and whether these can be written to.
const TABLE: [(&str, Opener, bool); 6] = [
    ("hf:", hub::address, false),
    ("https://", web::address, false),
    ("http://", web::address, false),
    ("s3://", bucket::s3, true),
    ("gs://", bucket::gs, true),
    ("az://", bucket::az, true),
];

/// How names begin that are not of this machine.
pub const SCHEMES: [&str; TABLE.len()] = {
    let [(a, ..), (b, ..), (c, ..), (d, ..), (e, ..), (f, ..)] = TABLE;
    [a, b, c, d, e, f]
};

/// Whether files can be put where a name says.
pub fn writes(name: &str) -> bool {
    TABLE.iter().any(|(scheme, _, writes)| *writes && name.starts_with(scheme))
}

/// A name, taken apart.
struct Address {
    /// The name of the place; with `inside` behind a `/`, that of the file.
    place: String,
    /// What it is called in the place; nothing for the place itself.
    inside: String,
    open: Box<dyn FnOnce() -> io::Result<Box<dyn Place>>>,
}

/// Somewhere that files are.
trait Place: Send + Sync {
    /// Every file below a folder, the place itself being one without a name.
    fn list(&self, folder: &str) -> io::Result<Vec<Found>>;

    /// The file of this name.
    fn find(&self, name: &str) -> io::Result<Option<Found>>;

    /// Bytes of a file, exactly those that are asked for.
    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// The same place, where files can be put into it.
    fn writable(&self) -> io::Result<&dyn Writable> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "cannot be written to"))
    }

    /// Holds a file that was read whole to what is known of it.
    fn check(&self, _file: &Found, _bytes: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// A place that files can be put into.
trait Writable {
    /// Writes a small file. A `new` one takes the place of none: `AlreadyExists`, or `Unsupported` where the place cannot tell.
    fn put(&self, name: &str, bytes: Vec<u8>, new: bool) -> io::Result<()>;

    /// Begins a file of several parts, and says what its upload is called.
    fn begin(&self, name: &str) -> io::Result<String>;

    /// Sends a part, and says what it is called; parts are counted from 0, and all but the last are of one size.
    fn put_part(&self, name: &str, upload: &str, number: usize, bytes: Vec<u8>) -> io::Result<String>;

    /// Makes a file of all parts.
    fn complete(&self, name: &str, upload: &str, parts: Vec<String>) -> io::Result<()>;

    /// Forgets the parts of a file that is not whole.
    fn abort(&self, name: &str, upload: &str) -> io::Result<()>;

    /// Removes a file, if it is there.
    fn remove(&self, name: &str) -> io::Result<()>;
}

/// A file of a place.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    /// What it is called in the place.
    name: String,
    bytes: u64,
    /// A mark that a server attaches to one version of the file (an ETag, a modification time): detects changes while the file is read, and
    /// does not identify the contents.
    version: Option<String>,
    /// SHA-256 of the contents in hexadecimal digits, where the server states it.
    sha256: Option<String>,
    /// Where this machine has it already.
    here: Option<PathBuf>,
}

/// A place, and what it was found to hold.
struct Known {
    place: Box<dyn Place>,
    /// By folder, and in it by name.
    folders: Mutex<BTreeMap<String, Arc<BTreeMap<String, Found>>>>,
    /// Files that were asked for by name.
    files: Mutex<BTreeMap<String, Option<Found>>>,
    /// Small files that were read.
    texts: Mutex<BTreeMap<String, Arc<Vec<u8>>>>,
    open: Mutex<BTreeMap<String, chunks::Ranges>>,
}

/// An open file.
#[derive(Debug, Clone)]
pub(super) enum Open {
    /// One that was read whole before.
    Held(Arc<Vec<u8>>),
    /// One that is read in ranges.
    Ranges(chunks::Ranges),
}

impl Open {
    /// Fills a buffer from a place on, up to which there is as much.
    pub fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Open::Ranges(file) => file.read_exact_at(buffer, at),
            Open::Held(bytes) => {
                let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..at.checked_add(buffer.len())?));
                buffer.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }

    /// The same, of bytes whose neighbours nobody asks for.
    pub fn sample_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Open::Ranges(file) => file.sample_exact_at(buffer, at),
            Open::Held(_) => self.read_exact_at(buffer, at),
        }
    }
}

/// Most bytes of small files that are kept.
const KEPT: usize = 32 << 20;
/// Most files of a folder: more are no model.
const MOST: usize = 20_000;

/// Places by their names, as long as the process runs.
static PLACES: LazyLock<Mutex<BTreeMap<String, Arc<Known>>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a name apart and opens its place.
fn reach(name: &str) -> io::Result<(Arc<Known>, String)> {
    super::require_no_secret(name)?;
    let opener = TABLE.iter().find(|(scheme, ..)| name.starts_with(scheme)).map(|(_, opener, _)| opener);
    let address = opener.ok_or_else(|| io::Error::other("its scheme is not known"))?(name)?;
    if address.inside.split('/').any(|part| part == ".." || part == ".") {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "`.` and `..` lead nowhere here"));
    }
    if let Some(known) = lock(&PLACES).get(&address.place) {
        return Ok((known.clone(), address.inside));
    }
    let place = (address.open)().map_err(secrets::without)?;
    let known = Arc::new(Known::new(place));
    Ok((lock(&PLACES).entry(address.place).or_insert(known).clone(), address.inside))
}

impl Known {
    fn new(place: Box<dyn Place>) -> Known {
        Known { place, folders: Mutex::default(), files: Mutex::default(), texts: Mutex::default(), open: Mutex::default() }
    }

    /// The file, opened; the same one every time.
    fn open(self: &Arc<Known>, found: Found) -> chunks::Ranges {
        lock(&self.open).entry(found.name.clone()).or_insert_with(|| chunks::Ranges::new(self.clone(), found)).clone()
    }

    /// What a folder holds, itself or as part of one that was asked about.
    fn listed(&self, folder: &str) -> Option<Arc<BTreeMap<String, Found>>> {
        let folders = lock(&self.folders);
        folders.iter().find(|(known, _)| within(folder, known)).map(|(_, files)| files.clone())
    }

    fn list(&self, folder: &str) -> io::Result<Arc<BTreeMap<String, Found>>> {
        if let Some(files) = self.listed(folder) {
            return Ok(files);
        }
        let files = self.place.list(folder).map_err(secrets::without)?;
        if files.len() > MOST {
            return Err(io::Error::other(format!("more than {MOST} files: name the folder of the model")));
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
            // Nothing is in a file.
            if files.values().flatten().any(|file| within(name, &file.name)) {
                return Ok(None);
            }
        }
        let found = if name.is_empty() { None } else { self.place.find(name).map_err(secrets::without)? };
        lock(&self.files).insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// Asks anew from now on what is in a folder.
    fn forget(&self, folder: &str) {
        // A list of what is around it tells of it too.
        lock(&self.folders).retain(|known, _| !within(known, folder) && !within(folder, known));
        lock(&self.files).retain(|name, _| !within(name, folder));
        lock(&self.texts).retain(|name, _| !within(name, folder));
        lock(&self.open).retain(|name, _| !within(name, folder));
    }

    fn demand(&self, name: &str) -> io::Result<Found> {
        self.find(name)?.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there is no such file"))
    }

    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
        let wanted = range.end.saturating_sub(range.start);
        let bytes = self.place.read(file, range).map_err(|e| gone(secrets::without(e)))?;
        if bytes.len() as u64 != wanted {
            return Err(io::Error::other(format!("{} bytes came where {wanted} were asked for", bytes.len())));
        }
        Ok(bytes)
    }

    /// A small file whole.
    fn whole(&self, file: &Found) -> io::Result<Arc<Vec<u8>>> {
        if let Some(text) = lock(&self.texts).get(&file.name) {
            return Ok(text.clone());
        }
        let bytes = Arc::new(if file.bytes == 0 { Vec::new() } else { self.read(file, 0..file.bytes)? });
        if let Some(stated) = &file.sha256 {
            let mut hasher = content_hash::sha256();
            hasher.update(&bytes);
            content_hash::compare(hasher, stated).map_err(invalid)?;
        }
        self.place.check(file, &bytes).map_err(invalid)?;
        let mut texts = lock(&self.texts);
        if texts.values().map(|text| text.len()).sum::<usize>().saturating_add(bytes.len()) <= KEPT {
            texts.insert(file.name.clone(), bytes.clone());
        }
        Ok(bytes)
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// What is not there may be left out; what was found to be there may not.
fn gone(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::NotFound => io::Error::other(format!("was listed and is gone: start again ({error})")),
        _ => error,
    }
}

/// Whether something is a folder or in it.
fn within(name: &str, folder: &str) -> bool {
    folder.is_empty() || name.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

pub(super) fn kind(name: &str) -> io::Result<Kind> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "there is no such file or folder");
    let (known, inside) = reach(name)?;
    if let Some(files) = known.listed(&inside) {
        let file = files.contains_key(&inside).then_some(Kind::File);
        return file.or_else(|| files.keys().any(|file| within(file, &inside)).then_some(Kind::Folder)).ok_or_else(none);
    }
    if known.find(&inside)?.is_some() {
        return Ok(Kind::File);
    }
    (!known.list(&inside)?.is_empty()).then_some(Kind::Folder).ok_or_else(none)
}

pub(super) fn open(name: &str) -> io::Result<File> {
    let (known, inside) = reach(name)?;
    let found = known.demand(&inside)?;
    if let Some(path) = &found.here {
        return File::open(path).map_err(gone);
    }
    let (length, held) = (found.bytes, lock(&known.texts).get(&found.name).cloned());
    let open = held.map_or_else(|| Open::Ranges(known.open(found)), Open::Held);
    Ok(File { length, bytes: super::Bytes::Away(open) })
}

pub(super) fn read(name: &str) -> io::Result<Vec<u8>> {
    let (known, inside) = reach(name)?;
    let found = known.demand(&inside)?;
    match &found.here {
        Some(path) => std::fs::read(path).map_err(gone),
        None if found.bytes > WHOLE => Err(io::Error::other(format!("has {} bytes, and at most {WHOLE} are read at once", found.bytes))),
        None => known.whole(&found).map(|bytes| bytes.to_vec()),
    }
}

/// The SHA-256 that the server states. A file of a local cache is hashed by the caller: its bytes did not come from that server now.
pub(super) fn content_hash(name: &str) -> io::Result<Option<String>> {
    let (known, inside) = reach(name)?;
    let found = known.demand(&inside)?;
    Ok(found.sha256.filter(|_| found.here.is_none()))
}

pub(super) fn check_content(name: &str, step: &dyn Fn(u64) -> bool) -> io::Result<()> {
    let (known, inside) = reach(name)?;
    let found = known.demand(&inside)?;
    if found.here.is_some() { Ok(()) } else { known.open(found).check_content(step) }
}

pub(super) fn list(name: &str) -> io::Result<Vec<Entry>> {
    let (known, inside) = reach(name)?;
    let files = known.list(&inside)?;
    let mut entries = BTreeMap::new();
    for file in files.keys().filter(|file| within(file, &inside)) {
        let rest = file.get(inside.len()..).unwrap_or_default().trim_start_matches('/');
        let (first, kind) = rest.split_once('/').map_or((rest, Kind::File), |(folder, _)| (folder, Kind::Folder));
        if !first.is_empty() {
            entries.insert(first.to_owned(), kind);
        }
    }
    if entries.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "there is nothing here"));
    }
    Ok(entries.into_iter().map(|(first, kind)| Entry { path: Path::new(name).join(first), kind }).collect())
}

/// What of other machines can be reached, in a few words.
pub fn describe() -> String {
    let token = if hub::token().is_some() { "with a token" } else { "without a token" };
    format!("the Hub {token}; s3, gs, az, https")
}

/// Fetches the beginning of a file that will be opened soon.
pub fn prepare(path: &Path) {
    let found = remote_name(path).and_then(|name| reach(name).ok()).and_then(|(known, inside)| Some((known.find(&inside).ok()??, known)));
    if let Some((found, known)) = found.filter(|(found, _)| found.here.is_none()) {
        known.open(found).begin();
    }
}

//! Access to local files, and to remote files with names like `hf:…` or `s3://…`.
//!
//! All input files are read through this module. The functions mirror those of `std::fs` and return the
//! same errors, so that messages name a file as the user did.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod destination;
mod file_cache;
mod hub_name;
mod local_names;
#[cfg(feature = "remote")]
mod remote;
#[cfg(not(feature = "remote"))]
#[path = "no_remote.rs"]
mod remote;
mod stores;

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use destination::{Destination, NewFile};
pub use file_cache::FileCache;
pub use hub_name::{GIT_ATTRIBUTES, Repository, data_set_id, is_repository_id, require_no_page};
pub use local_names::LocalNames;
pub use remote::{SCHEMES, describe};
pub use stores::{Store, is_streamed, is_writable, prefetch, register_store};

/// Type of a file system entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A file, or a link to one.
    File,
    /// A folder that is not a symbolic link.
    Folder,
    /// A symbolic link to a folder, or a dangling one.
    Link,
    /// A device, a socket, a pipe.
    Special,
}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path of the entry.
    pub path: PathBuf,
    /// Type of the entry.
    pub kind: Kind,
}

/// The name of a remote file or folder, which starts with a scheme. `None` for local paths.
pub fn remote_name(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| stores::is_known(name))
}

/// Rejects credentials in the name of a remote file, because names are written into recipes, reports and
/// logs. Fails if the name contains a user name, a query or a fragment.
pub fn require_no_secret(name: &str) -> io::Result<()> {
    let wrong = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    let authority = name.split_once("://").map_or("", |(_, rest)| rest.split(['/', '?', '#']).next().unwrap_or_default());
    if authority.contains('@') {
        return wrong("contains a user name: names are written into recipes and reports, so they must not hold credentials (docs/remote.md)");
    }
    if name.contains(['?', '#']) {
        return wrong(
            "contains a `?` or `#`: names are written into recipes and reports, so they must not hold a token or a signature; \
             set the credentials in the environment (docs/remote.md), or download the file",
        );
    }
    Ok(())
}

/// Whether a path is a remote name.
pub fn is_remote(path: &Path) -> bool {
    remote_name(path).is_some()
}

/// Checks that a name like `hf:org/name` is a branch of a repository that this user can probably write.
/// Returns whether the repository exists. Later reads see the current commit.
pub fn require_repository(path: &Path) -> io::Result<bool> {
    remote::require_repository(remote_name(path).ok_or(io::ErrorKind::InvalidInput)?)
}

/// Resolves a path relative to a folder. Remote names are absolute.
pub fn resolve(folder: &Path, path: &Path) -> PathBuf {
    if is_remote(path) { path.to_owned() } else { folder.join(path) }
}

/// An open file with thread-safe positional reads.
#[derive(Debug, Clone)]
pub struct File {
    length: u64,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
enum Bytes {
    Local(Arc<fs::File>),
    Remote(remote::Open),
    Store(stores::StoredFile),
}

impl File {
    /// Opens a regular file.
    pub fn open(path: &Path) -> io::Result<File> {
        if let Some(name) = remote_name(path) {
            return stores::open(name);
        }
        // Checked before opening, because opening a pipe without a writer blocks.
        let about = fs::metadata(path)?;
        if about.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if !about.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        File::from_std(fs::File::open(path)?)
    }

    /// Wraps an open file.
    pub fn from_std(file: fs::File) -> io::Result<File> {
        Ok(File { length: file.metadata()?.len(), bytes: Bytes::Local(Arc::new(file)) })
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Fills a buffer with the bytes at an offset. Fails if the range exceeds the file.
    pub fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::Local(file) => file.read_exact_at(buffer, at),
            _ if at.checked_add(buffer.len() as u64).is_none_or(|end| end > self.length) => Err(io::ErrorKind::UnexpectedEof.into()),
            Bytes::Remote(file) => file.read_exact_at(buffer, at),
            Bytes::Store(file) => file.read_exact_at(buffer, at),
        }
    }

    /// As [`read_exact_at`](File::read_exact_at), without prefetching the bytes that follow.
    pub fn sample_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::Remote(file) if at.checked_add(buffer.len() as u64).is_some_and(|end| end <= self.length) => file.sample_exact_at(buffer, at),
            _ => self.read_exact_at(buffer, at),
        }
    }

    /// A sequential reader, starting at the beginning.
    pub fn reader(&self) -> Reader {
        Reader { file: self.clone(), at: 0 }
    }
}

/// Sequential reader of a file.
#[derive(Debug)]
pub struct Reader {
    file: File,
    at: u64,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = match &self.file.bytes {
            Bytes::Local(file) => file.read_at(buffer, self.at)?,
            Bytes::Remote(_) | Bytes::Store(_) => {
                let left = self.file.length.saturating_sub(self.at);
                let count = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                self.file.read_exact_at(buffer.get_mut(..count).unwrap_or_default(), self.at)?;
                count
            }
        };
        self.at = self.at.saturating_add(count as u64);
        Ok(count)
    }
}

impl Seek for Reader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.file.length.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = to.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// A path that does not depend on the working directory.
pub fn absolute(path: &Path) -> PathBuf {
    if is_remote(path) { path.to_owned() } else { std::path::absolute(path).unwrap_or_else(|_| path.to_owned()) }
}

/// The path itself, or the nearest folder above it that exists, each also without symbolic links.
pub(crate) fn nearest_existing(path: &Path) -> Option<(&Path, PathBuf)> {
    path.ancestors().find_map(|above| fs::canonicalize(above).ok().map(|real| (above, real)))
}

/// A local path without symbolic links, which need not exist.
pub(crate) fn real_path(path: &Path) -> PathBuf {
    nearest_existing(path).map_or_else(|| path.to_owned(), |(above, real)| real.join(path.strip_prefix(above).unwrap_or(Path::new(""))))
}

/// Type of a file system entry. Symbolic links are followed.
pub fn kind(path: &Path) -> io::Result<Kind> {
    if let Some(name) = remote_name(path) {
        return stores::kind(name);
    }
    let about = fs::metadata(path)?;
    Ok(match () {
        () if about.is_dir() => Kind::Folder,
        () if about.is_file() => Kind::File,
        () => Kind::Special,
    })
}

/// Whether a path is an existing file.
pub fn is_file(path: &Path) -> bool {
    if is_remote(path) { matches!(kind(path), Ok(Kind::File)) } else { path.is_file() }
}

/// Whether a path is an existing folder.
pub fn is_dir(path: &Path) -> bool {
    if is_remote(path) { matches!(kind(path), Ok(Kind::Folder)) } else { path.is_dir() }
}

/// Whether a path is a symbolic link. Remote files are not.
pub fn is_link(path: &Path) -> bool {
    !is_remote(path) && path.is_symlink()
}

/// Length of a file in bytes.
pub fn length(path: &Path) -> io::Result<u64> {
    if is_remote(path) { File::open(path).map(|file| file.length) } else { fs::metadata(path).map(|about| about.len()) }
}

/// The SHA-256 of a file's contents in hexadecimal digits, as reported by the server that stores it (the
/// Git LFS object id on the Hub). `None` for local files and if the server reports no such hash: an
/// ETag, a modification time or a size does not identify the contents.
pub fn content_hash(path: &Path) -> io::Result<Option<String>> {
    remote_name(path).map_or(Ok(None), stores::content_hash)
}

/// Compares the contents of a file with the hash that its server states, if there is one. Ranges that were
/// read in file order are hashed as they arrive; the others are read again. `step` receives the number of
/// bytes of each range and returns whether to continue. Fails with `InvalidData` if the hash differs, and
/// with `Interrupted` if `step` returns `false`.
pub fn check_content(path: &Path, step: &dyn Fn(u64) -> bool) -> io::Result<()> {
    remote_name(path).map_or(Ok(()), |name| stores::check_content(name, step))
}

/// Lists a folder, sorted by name.
pub fn list(folder: &Path) -> io::Result<Vec<Entry>> {
    if let Some(name) = remote_name(folder) {
        return stores::list(name);
    }
    let entry = |entry: fs::DirEntry| {
        let (path, kind) = (entry.path(), entry.file_type()?);
        let kind = match () {
            () if kind.is_dir() => Kind::Folder,
            () if path.is_file() => Kind::File,
            () if kind.is_symlink() => Kind::Link,
            () => Kind::Special,
        };
        Ok(Entry { path, kind })
    };
    let mut entries = fs::read_dir(folder)?.map(|found| found.and_then(entry)).collect::<io::Result<Vec<_>>>()?;
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(entries)
}

/// The files of a folder, sorted by name.
pub fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(list(folder)?.into_iter().filter(|entry| entry.kind == Kind::File).map(|entry| entry.path).collect())
}

/// Reads a complete file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    match remote_name(path) {
        Some(name) => stores::read(name),
        None => fs::read(path),
    }
}

/// Reads a complete text file. Fails if the file is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    match remote_name(path) {
        Some(name) => String::from_utf8(stores::read(name)?).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "stream did not contain valid UTF-8")),
        None => fs::read_to_string(path),
    }
}

/// Opens a file for sequential reading. The end of a remote file is an error if its contents differ from the
/// hash that the server states.
pub fn stream(path: &Path) -> io::Result<Box<dyn Read + Send>> {
    if !is_remote(path) {
        return Ok(Box::new(fs::File::open(path)?));
    }
    Ok(Box::new(Stream { reader: File::open(path)?.reader(), path: path.to_owned() }))
}

/// Sequential reader of a remote file from its beginning.
struct Stream {
    reader: Reader,
    path: PathBuf,
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        if count == 0 && !buffer.is_empty() {
            check_content(&self.path, &|_| true)?;
        }
        Ok(count)
    }
}

/// Copies a file to a local path.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if !is_remote(from) {
        return fs::copy(from, to).map(drop);
    }
    let file = File::open(from)?;
    // Small files are read completely, which verifies their hash if it is known.
    if file.length <= SMALL_FILE {
        return fs::write(to, read(from)?);
    }
    let mut out = fs::File::create(to)?;
    io::copy(&mut io::BufReader::with_capacity(1 << 20, file.reader()), &mut out)?;
    out.flush()
}

/// Name of the lock file in a remote folder during an upload.
pub const UNFINISHED: &str = "compress.unfinished";

/// Why a folder with such a file must not be used; `None` without one.
pub fn unfinished_reason(folder: &Path) -> Option<String> {
    let reason = || format!("is being written by another run, or contains the leftovers of a killed run ({UNFINISHED} exists)");
    is_file(&folder.join(UNFINISHED)).then(reason)
}

/// Remote files of at most this size are read with a single request, in bytes.
pub const SMALL_FILE: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_names_do_not_depend_on_the_folder() {
        for name in SCHEMES.iter().map(|scheme| format!("{scheme}a/b")) {
            assert_eq!(resolve(Path::new("/folder"), Path::new(&name)), Path::new(&name));
            assert!(is_remote(&Path::new(&name).join("config.json")));
        }
        assert_eq!(resolve(Path::new("/folder"), Path::new("./hf:a/b")), Path::new("/folder/./hf:a/b"));
        assert!(!is_remote(Path::new("./hf:a/b")) && !is_remote(Path::new("s3:/a")));
    }

    #[test]
    fn names_hold_no_credentials() {
        for name in ["s3://bucket/out", "hf:a/b@main/model.onnx", "https://host/a@b/c", "az://container/a"] {
            assert!(require_no_secret(name).is_ok(), "{name}");
        }
        let bad =
            ["s3://bucket/out?sig=S", "s3://key:S@bucket/out", "hf:a/b?token=S", "hf:a/b@main?token=S", "https://u:S@host/a", "https://host#S", "gs://b?S"];
        for name in bad {
            let reason = require_no_secret(name).unwrap_err().to_string();
            assert!(!reason.contains('S'), "{name}: {reason}");
            assert!(kind(Path::new(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn positional_and_sequential_reads_agree() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, b"0123456789").unwrap();
        fs::create_dir(folder.path().join("a")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("link")).unwrap();
        let file = File::open(&path).unwrap();
        let mut four = [0; 4];
        file.read_exact_at(&mut four, 3).unwrap();
        assert_eq!((&four, file.length()), (b"3456", 10));
        assert_eq!(file.read_exact_at(&mut four, 7).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let (mut reader, mut rest) = (file.reader(), String::new());
        reader.seek(SeekFrom::End(-3)).unwrap();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "789");
        let kinds: Vec<_> = list(folder.path()).unwrap().into_iter().map(|entry| entry.kind).collect();
        assert_eq!(kinds, [Kind::Folder, Kind::File, Kind::Link]);
        assert!(kind(&path.join("none")).is_err());
        assert!(File::open(folder.path()).is_err());
    }
}

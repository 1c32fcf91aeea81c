//! Remote files: those of stores that the program has registered, and those of `remote`.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Bytes, Entry, File, Kind, SMALL_FILE, remote};
use crate::registry::Registry;

/// A read-only collection of files with a scheme of its own, such as an archive, a database or memory.
pub trait Store: Send + Sync {
    /// Returns the names and lengths of all files whose names start with `folder/`, or of all files for
    /// an empty `folder`.
    ///
    /// # Errors
    /// The files cannot be listed.
    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>>;

    /// Fills the buffer with the bytes of a file at an offset.
    ///
    /// # Errors
    /// The file does not exist, is too short, or cannot be read.
    fn read(&self, file: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// Registered stores by scheme, which includes the colon.
static STORES: Registry<Arc<dyn Store>> = Registry::new();

/// Registers a store for the lifetime of the process: files have names like `scheme:folder/file`.
///
/// # Errors
/// The scheme does not consist of two or more lowercase letters and digits, or it is taken.
pub fn register_store(scheme: &str, store: impl Store + 'static) -> io::Result<()> {
    let wrong = |kind, reason: &str| Err(io::Error::new(kind, format!("scheme `{scheme}`: {reason}")));
    if scheme.len() < 2 || !scheme.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit()) {
        return wrong(io::ErrorKind::InvalidInput, "must consist of two or more lowercase letters and digits");
    }
    let prefix = format!("{scheme}:");
    let is_reserved = remote::SCHEMES.iter().any(|other| other.starts_with(&prefix));
    if STORES.add(&prefix, is_reserved, Arc::new(store)) { Ok(()) } else { wrong(io::ErrorKind::AlreadyExists, "is taken") }
}

/// Whether a name starts with a known scheme.
pub(super) fn is_known(name: &str) -> bool {
    remote::SCHEMES.iter().any(|scheme| name.starts_with(scheme)) || find(name).is_some()
}

/// The registered store of a name, and the name in it.
fn find(name: &str) -> Option<(Arc<dyn Store>, &str)> {
    let (scheme, inside) = name.split_at(name.find(':')?.saturating_add(1));
    Some((STORES.get(scheme)?, inside.trim_end_matches('/')))
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no such file or folder")
}

/// The part of a file's name after a folder.
fn rest<'n>(file: &'n str, folder: &str) -> Option<&'n str> {
    if folder.is_empty() { Some(file) } else { file.strip_prefix(folder)?.strip_prefix('/') }
}

/// The length of a file; `None` if it does not exist.
fn length(store: &dyn Store, file: &str) -> io::Result<Option<u64>> {
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    Ok(store.list(folder)?.into_iter().find(|(name, _)| name == file).map(|(_, length)| length))
}

pub(super) fn kind(name: &str) -> io::Result<Kind> {
    let Some((store, inside)) = find(name) else { return remote::kind(name) };
    if !inside.is_empty() && length(&*store, inside)?.is_some() {
        return Ok(Kind::File);
    }
    store.list(inside)?.iter().any(|(file, _)| rest(file, inside).is_some()).then_some(Kind::Folder).ok_or_else(missing)
}

pub(super) fn open(name: &str) -> io::Result<File> {
    let Some((store, inside)) = find(name) else { return remote::open(name) };
    let length = length(&*store, inside)?.ok_or_else(missing)?;
    Ok(File { length, bytes: Bytes::Store(StoredFile { store, name: inside.to_owned() }) })
}

pub(super) fn read(name: &str) -> io::Result<Vec<u8>> {
    if find(name).is_none() {
        return remote::read(name);
    }
    let file = open(name)?;
    if file.length > SMALL_FILE {
        return Err(io::Error::other(format!("has {} bytes, but at most {SMALL_FILE} bytes can be read at once", file.length)));
    }
    let mut bytes = vec![0; usize::try_from(file.length).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

pub(super) fn list(name: &str) -> io::Result<Vec<Entry>> {
    let Some((store, inside)) = find(name) else { return remote::list(name) };
    let mut entries = BTreeMap::new();
    for (file, _) in store.list(inside)? {
        let Some(rest) = rest(&file, inside) else { continue };
        let (first, kind) = rest.split_once('/').map_or((rest, Kind::File), |(folder, _)| (folder, Kind::Folder));
        entries.insert(first.to_owned(), kind);
    }
    if entries.is_empty() {
        return Err(missing());
    }
    Ok(entries.into_iter().map(|(first, kind)| Entry { path: Path::new(name).join(first), kind }).collect())
}

pub(super) fn content_hash(name: &str) -> io::Result<Option<String>> {
    if find(name).is_some() { Ok(None) } else { remote::content_hash(name) }
}

pub(super) fn check_content(name: &str, step: &dyn Fn(u64) -> bool) -> io::Result<()> {
    if find(name).is_some() { Ok(()) } else { remote::check_content(name, step) }
}

/// Whether a name belongs to a store that can be written.
pub fn is_writable(name: &str) -> bool {
    find(name).is_none() && remote::is_writable(name)
}

/// Whether files of an output are uploaded while they are written. Otherwise, remote outputs are staged
/// in a local folder first.
pub fn is_streamed(path: &Path) -> bool {
    path.to_str().is_some_and(|name| find(name).is_none() && remote::is_streamed(name))
}

/// Prefetches the first chunk of a file that will be opened soon.
pub fn prefetch(path: &Path) {
    if path.to_str().and_then(find).is_none() {
        remote::prefetch(path);
    }
}

/// An open file of a registered store.
#[derive(Clone)]
pub(super) struct StoredFile {
    store: Arc<dyn Store>,
    name: String,
}

impl StoredFile {
    pub fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.store.read(&self.name, at, buffer)
    }
}

impl fmt::Debug for StoredFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredFile({:?})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Two;

    impl Store for Two {
        fn list(&self, _folder: &str) -> io::Result<Vec<(String, u64)>> {
            Ok(vec![("folder/a.txt".into(), 3), ("folder/inner/b.txt".into(), 2)])
        }

        fn read(&self, file: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
            let text = if file == "folder/a.txt" { "one" } else { "ab" };
            buffer.copy_from_slice(&text.as_bytes()[offset as usize..][..buffer.len()]);
            Ok(())
        }
    }

    #[test]
    fn registered_schemes_are_paths() {
        let before = super::super::is_remote(Path::new("two:folder"));
        register_store("two", Two).unwrap();
        assert!(!before && super::super::is_remote(Path::new("two:folder")));
        let path = |inside: &str| Path::new("two:folder").join(inside);
        let names: Vec<_> = super::super::list(Path::new("two:folder")).unwrap().into_iter().map(|entry| (entry.path, entry.kind)).collect();
        assert_eq!(names, [(path("a.txt"), Kind::File), (path("inner"), Kind::Folder)]);
        assert_eq!(super::super::read_to_string(&path("a.txt")).unwrap(), "one");
        assert_eq!(super::super::kind(&path("inner")).unwrap(), Kind::Folder);
        assert_eq!(super::super::kind(&path("b.txt")).unwrap_err().kind(), io::ErrorKind::NotFound);
        let mut last = [0];
        let file = File::open(&path("inner/b.txt")).unwrap();
        file.read_exact_at(&mut last, 1).unwrap();
        assert_eq!((&last, file.length()), (b"b", 2));
        assert_eq!(file.read_exact_at(&mut last, 2).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(!is_writable("two:folder"));
        for (scheme, reason) in [("two", "taken"), ("s3", "taken"), ("https", "taken"), ("c", "letters"), ("A1", "letters")] {
            assert!(register_store(scheme, Two).unwrap_err().to_string().contains(reason), "{scheme}");
        }
    }
}

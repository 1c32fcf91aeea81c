//! Keys of cached results: a hash of all inputs that determine the result.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use super::hash::hash_file;
use crate::error::{Error, Result};
use crate::files::{self, FileCache};
use crate::work::Work;

/// Maximum depth of nested folders. Symbolic links may form cycles.
const DEEPEST: usize = 32;

/// A hash over lines of text and the contents of files. It does not depend on the location or
/// modification time of files.
#[derive(Clone)]
pub struct ContentKey<'w> {
    hasher: blake3::Hasher,
    work: Work<'w>,
}

impl<'w> ContentKey<'w> {
    /// An empty key.
    pub fn new(work: &Work<'w>) -> ContentKey<'w> {
        ContentKey { hasher: blake3::Hasher::new(), work: work.quiet() }
    }

    /// Adds a line.
    pub fn line(&mut self, text: &str) {
        self.hasher.update(text.as_bytes());
        self.hasher.update(b"\n");
    }

    /// Adds the contents of files, and of all files in folders, recursively, with their names relative
    /// to `root`.
    pub fn files(&mut self, paths: impl IntoIterator<Item = impl AsRef<Path>>, root: &Path) -> Result<()> {
        paths.into_iter().try_for_each(|path| self.add(path.as_ref(), root, DEEPEST))
    }

    /// The key as hexadecimal digits.
    pub fn name(&self) -> String {
        self.hasher.finalize().to_string()
    }

    fn add(&mut self, path: &Path, root: &Path, depth: usize) -> Result<()> {
        if !files::is_dir(path) {
            // A SHA-256 reported by the server saves the download. Nothing else identifies the contents
            // without reading them.
            let stated = files::content_hash(path).map_err(Error::io("open", path))?.map(|digits| format!("sha256:{digits}"));
            let hash = stated.map_or_else(|| hash_once(path, &self.work).map(|hash| hash.to_string()), Ok)?;
            self.line(&format!("{} {hash}", path.strip_prefix(root).unwrap_or(path).display()));
            return Ok(());
        }
        if depth == 0 {
            return Err(Error::malformed(path, "folders are nested too deeply"));
        }
        let entries = files::list(path).map_err(Error::io("read", path))?;
        entries.iter().try_for_each(|entry| self.add(&entry.path, root, depth - 1))
    }
}

/// The hash of a file, computed once per process while the file does not change. Several keys of a run
/// cover the same files.
fn hash_once(path: &Path, work: &Work) -> Result<blake3::Hash> {
    static HASHES: LazyLock<FileCache<blake3::Hash>> = LazyLock::new(FileCache::default);
    HASHES.get_or_compute(path, || hash_file(path, work))
}

/// The entries of a folder, sorted by name. Empty if the folder does not exist.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths = entries.map(|entry| entry.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>().map_err(Error::io("read", folder))?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    #[test]
    fn keys_depend_only_on_contents() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let key = |name: &str| {
            let (cancel, path) = (Cancel::default(), folder.path().join(name));
            let mut key = ContentKey::new(&Work { threads: 1, progress: &Silent, cancel: &cancel });
            key.line("a line");
            key.files([&path], &path).unwrap();
            key.name()
        };
        for place in ["one", "two"] {
            write(&format!("{place}/inner/a.txt"), "text");
            write(&format!("{place}/b.txt"), "more");
        }
        assert_eq!(key("one"), key("two"));
        write("two/b.txt", "mare");
        assert_ne!(key("one"), key("two"), "other contents");
        write("two/b.txt", "more");
        assert_eq!(key("one"), key("two"));
        std::fs::rename(folder.path().join("two/b.txt"), folder.path().join("two/c.txt")).unwrap();
        assert_ne!(key("one"), key("two"), "another name");
    }
}

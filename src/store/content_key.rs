//! Names for cached results, by everything that decides what they hold: two results under one name are the same.

use std::path::{Path, PathBuf};

use super::hash::hash_of;
use crate::error::{Error, Result};
use crate::files;
use crate::work::Work;

/// Folders in folders; links may lead in circles.
const DEEPEST: usize = 32;

/// A hash that grows with lines of text and with the contents of files, never with where they lie or when they were written.
pub struct ContentKey<'w> {
    hasher: blake3::Hasher,
    work: Work<'w>,
}

impl<'w> ContentKey<'w> {
    /// The key of nothing yet.
    pub fn new(work: &Work<'w>) -> ContentKey<'w> {
        ContentKey { hasher: blake3::Hasher::new(), work: work.quiet() }
    }

    /// Adds a line.
    pub fn line(&mut self, text: &str) {
        self.hasher.update(text.as_bytes());
        self.hasher.update(b"\n");
    }

    /// Adds files, and all files of folders and of those in them, by their contents and their names below `root`.
    ///
    /// # Errors
    /// A file cannot be read, folders lie too deep in one another, or the work is cancelled.
    pub fn files(&mut self, paths: impl IntoIterator<Item = impl AsRef<Path>>, root: &Path) -> Result<()> {
        paths.into_iter().try_for_each(|path| self.add(path.as_ref(), root, DEEPEST))
    }

    /// The key so far, as hexadecimal digits.
    pub fn name(&self) -> String {
        self.hasher.finalize().to_string()
    }

    fn add(&mut self, path: &Path, root: &Path, depth: usize) -> Result<()> {
        if !files::is_dir(path) {
            // Of a file of another machine, its version stands for the contents, which would have to come here.
            let version = files::version(path).map_err(Error::io("open", path))?;
            let hash = version.map_or_else(|| hash_of(path, &self.work).map(|hash| hash.to_string()), Ok)?;
            self.line(&format!("{} {hash}", path.strip_prefix(root).unwrap_or(path).display()));
            return Ok(());
        }
        if depth == 0 {
            return Err(Error::malformed(path, "folders lie too deep in one another"));
        }
        let entries = files::list(path).map_err(Error::io("read", path))?;
        entries.iter().try_for_each(|entry| self.add(&entry.path, root, depth - 1))
    }
}

/// What lies in a folder, in the order of names; nothing where there is no folder.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
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
    fn contents_count_and_nothing_else() {
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

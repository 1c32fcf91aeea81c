//! Artifacts: results that are stored to be reused, such as the result of a pass or a finished block.
//!
//! An artifact is a folder, whose name is the [key](super::ContentKey) of everything that determines its
//! contents. It appears completely or not at all, and its files are compared with their hashes when it is
//! used.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::content_key::entries;
use super::hash::hash_file;
use super::writer::Written;
use crate::error::{Error, Result};
use crate::output::{Inputs, Replace, Staging};
use crate::work::Work;

/// The file of an artifact that lists all others.
const MANIFEST: &str = "state.json";

#[derive(Serialize, Deserialize)]
struct Manifest<T> {
    /// BLAKE3 hashes of the other files, by their names.
    files: BTreeMap<String, String>,
    metadata: T,
}

/// A folder of artifacts.
#[derive(Debug, Clone)]
pub struct ArtifactStore {
    folder: PathBuf,
}

/// A stored artifact.
#[derive(Debug)]
pub struct Artifact<T> {
    /// Its key.
    pub key: String,
    /// Its folder.
    pub path: PathBuf,
    /// Metadata that was stored with it.
    pub metadata: T,
    /// Bytes on disk.
    pub bytes: u64,
    /// Seconds since it was written or last used.
    pub age: u64,
}

/// An artifact that is being written.
pub struct Draft {
    staging: Staging,
}

impl ArtifactStore {
    /// The store in a folder, which is created by the first artifact.
    pub fn new(folder: impl Into<PathBuf>) -> ArtifactStore {
        ArtifactStore { folder: folder.into() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder and the metadata of the artifact with this key. With `work`, its files are compared with
    /// their hashes. A damaged artifact is removed. Fails only if the work is cancelled.
    pub fn get<T: DeserializeOwned>(&self, key: &str, work: Option<&Work>) -> Result<Option<(PathBuf, T)>> {
        let path = self.folder.join(key);
        if !path.is_dir() {
            return Ok(None);
        }
        match validated(&path, work) {
            Some(metadata) => {
                // Marks the artifact as used.
                let manifest = File::options().append(true).open(path.join(MANIFEST));
                let _ = manifest.and_then(|file| file.set_modified(SystemTime::now()));
                Ok(Some((path, metadata)))
            }
            None => {
                work.map_or(Ok(()), |work| work.cancel.check())?;
                self.discard(key);
                Ok(None)
            }
        }
    }

    /// Begins an artifact, which replaces an earlier one with the same key. `inputs` must not be replaced.
    pub fn begin(&self, key: &str, inputs: impl Into<Inputs>) -> Result<Draft> {
        Staging::new(&self.folder.join(key), Replace::Work(MANIFEST), inputs).map(|staging| Draft { staging })
    }

    /// Removes an artifact, if this is possible.
    pub fn discard(&self, key: &str) {
        let _ = fs::remove_dir_all(self.folder.join(key));
    }

    /// All artifacts with readable metadata, the most recently used first.
    pub fn list<T: DeserializeOwned>(&self) -> Result<Vec<Artifact<T>>> {
        let mut artifacts = Vec::new();
        for path in self.paths()? {
            let Some(Manifest { metadata, .. }) = manifest(&path) else { continue };
            let used = fs::metadata(path.join(MANIFEST)).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            let age = SystemTime::now().duration_since(used).unwrap_or_default().as_secs();
            artifacts.push(Artifact { key: file_name(&path), bytes: size(&path)?, path, metadata, age });
        }
        artifacts.sort_by_key(|artifact| artifact.age);
        Ok(artifacts)
    }

    /// Removes the artifacts whose keys start with `prefix`, or all if it is empty. Returns the number of
    /// bytes freed.
    pub fn clear(&self, prefix: &str) -> Result<u64> {
        let mut freed = 0;
        for path in self.paths()?.into_iter().filter(|path| file_name(path).starts_with(prefix)) {
            freed += size(&path)?;
            fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        }
        Ok(freed)
    }

    /// Removes the least recently used artifacts until the others have at most `limit` bytes.
    pub fn evict(&self, limit: u64) -> Result<()> {
        let mut artifacts = self.list::<serde::de::IgnoredAny>()?;
        let mut total: u64 = artifacts.iter().map(|artifact| artifact.bytes).sum();
        while let Some(oldest) = artifacts.pop().filter(|_| total > limit) {
            total -= self.clear(&oldest.key)?;
        }
        Ok(())
    }

    /// Folders of complete artifacts.
    fn paths(&self) -> Result<Vec<PathBuf>> {
        Ok(entries(&self.folder)?.into_iter().filter(|path| path.join(MANIFEST).is_file()).collect())
    }
}

impl Draft {
    /// The folder to write to. The staging folder is removed if the draft is dropped.
    pub fn staging(&self) -> &Staging {
        &self.staging
    }

    /// Publishes the artifact. The hashes of files that are not in `written` are computed.
    pub fn publish<T: Serialize>(self, metadata: T, written: &[Written], work: &Work) -> Result<()> {
        let root = self.staging.path();
        let mut files: BTreeMap<String, String> = written.iter().map(|file| (file.name.clone(), file.blake3.to_string())).collect();
        for path in files_under(root)? {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            if let Entry::Vacant(entry) = files.entry(name) {
                entry.insert(hash_file(&path, &work.quiet())?.to_string());
            }
        }
        let path = root.join(MANIFEST);
        let text = serde_json::to_vec(&Manifest { files, metadata }).map_err(|e| Error::malformed(&path, e.to_string()))?;
        fs::write(&path, text).map_err(Error::io("write", &path))?;
        self.staging.commit()
    }
}

fn manifest<T: DeserializeOwned>(path: &Path) -> Option<Manifest<T>> {
    serde_json::from_slice(&fs::read(path.join(MANIFEST)).ok()?).ok()
}

/// The metadata of an artifact if all of its files are undamaged.
fn validated<T: DeserializeOwned>(path: &Path, work: Option<&Work>) -> Option<T> {
    let Manifest { files, metadata } = manifest(path)?;
    let is_undamaged = |work: &Work| files.iter().all(|(name, hash)| hash_file(&path.join(name), &work.quiet()).is_ok_and(|found| found.to_string() == *hash));
    work.is_none_or(is_undamaged).then_some(metadata)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn files_under(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in entries(folder)? {
        if path.is_dir() { files.extend(files_under(&path)?) } else { files.push(path) }
    }
    Ok(files)
}

/// Total size of the files in a folder, in bytes.
fn size(folder: &Path) -> Result<u64> {
    files_under(folder)?.iter().map(|path| fs::symlink_metadata(path).map(|file| file.len()).map_err(Error::io("read", path))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    #[test]
    fn artifacts_are_complete_or_absent() {
        let (folder, cancel) = (tempfile::tempdir().unwrap(), Cancel::default());
        let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
        let store = ArtifactStore::new(folder.path().join("store"));
        fs::create_dir(folder.path().join("input")).unwrap();
        let get = |key: &str| store.get::<BTreeMap<String, u32>>(key, Some(&work)).unwrap();
        let put = |key: &str, number: u32| {
            let draft = store.begin(key, folder.path().join("input").as_path()).unwrap();
            fs::create_dir(draft.staging().path().join("inner")).unwrap();
            fs::write(draft.staging().path().join("inner/a"), number.to_string()).unwrap();
            draft.publish(BTreeMap::from([("number", number)]), &[], &work).unwrap();
        };
        assert!(get("a").is_none() && store.list::<BTreeMap<String, u32>>().unwrap().is_empty());
        // A draft that is not published leaves nothing.
        drop(store.begin("a", folder.path().join("input").as_path()).unwrap());
        assert!(get("a").is_none());
        put("a1", 1);
        put("a1", 2);
        put("b2", 3);
        let (path, metadata) = get("a1").unwrap();
        assert_eq!((fs::read(path.join("inner/a")).unwrap(), metadata["number"]), (b"2".to_vec(), 2));
        let keys = || store.list::<BTreeMap<String, u32>>().unwrap().into_iter().map(|artifact| artifact.key).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(keys(), ["a1".to_owned(), "b2".to_owned()].into());
        // Damage is detected, and the artifact removed.
        fs::write(path.join("inner/a"), "9").unwrap();
        assert!(get("a1").is_none() && !path.exists());
        put("a1", 1);
        assert!(store.clear("no such key").unwrap() == 0 && store.clear("a").unwrap() > 0);
        assert_eq!(keys(), ["b2".to_owned()].into());
        store.evict(1 << 20).unwrap();
        assert_eq!(keys().len(), 1);
        store.evict(0).unwrap();
        assert!(keys().is_empty());
    }
}

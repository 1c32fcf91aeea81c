//! The files of an output, as listed in its report.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use super::names::{REPORT_FILES, file_format, file_name};
use crate::files::{self, FileCache, SMALL_FILE};

/// Names of the files of a folder and its subfolders that are not listed, sorted.
pub fn unlisted_files(folder: &Path, is_listed: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut unlisted = Vec::new();
    collect(folder, Path::new(""), is_listed, &mut unlisted);
    unlisted.sort();
    unlisted
}

fn collect(root: &Path, inside: &Path, is_listed: &dyn Fn(&str) -> bool, unlisted: &mut Vec<String>) {
    for entry in fs::read_dir(root.join(inside)).into_iter().flatten().flatten() {
        let name = inside.join(entry.file_name());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(root, &name, is_listed, unlisted);
        } else if !name.to_str().is_some_and(is_listed) {
            unlisted.push(name.to_string_lossy().into_owned());
        }
    }
}

/// The files that a report lists.
#[derive(Default)]
pub(super) struct Listing {
    outputs: Vec<Listed>,
    carried: Vec<Listed>,
    signature: Option<Signature>,
    names: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Reported {
    tool: Named,
    outputs: Vec<Listed>,
    #[serde(default)]
    carried: Vec<Listed>,
    signature: Option<Signature>,
}

/// The signature. It covers the report, which therefore contains the key instead of a hash of the file.
#[derive(Deserialize)]
struct Signature {
    path: String,
    public_key_sha256: String,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Listed {
    path: String,
    bytes: u64,
    blake3: String,
}

impl Listing {
    /// Reads the listing of a folder that contains a report of this tool.
    pub fn open(folder: &Path) -> Option<Listing> {
        let report: Reported = serde_json::from_slice(&files::read(&folder.join(REPORT_FILES[0])).ok()?).ok()?;
        let listed = report.outputs.iter().chain(&report.carried).map(|file| file.path.clone());
        let signature = report.signature.iter().map(|signature| signature.path.clone());
        let names = listed.chain(REPORT_FILES.map(str::to_owned)).chain(signature).collect();
        (report.tool.name == crate::NAME).then_some(Listing { outputs: report.outputs, carried: report.carried, signature: report.signature, names })
    }

    /// Whether a file is listed, or is part of the report.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Files of a folder that are not listed.
    pub fn unlisted(&self, folder: &Path) -> Vec<String> {
        unlisted_files(folder, &|name| self.contains(name))
    }

    /// Files that replacing an output would remove and whose contents are not the listed ones. If the
    /// output is a single file, it is next to `folder`, which contains the report.
    pub fn changed(&self, target: &Path, folder: &Path) -> Vec<String> {
        let file = file_name(target);
        let data = self.data_files(target);
        let is_removed = |path: &Path| file.is_none() || path == target || data.iter().any(|data| data == path);
        let outputs = self.outputs.iter().map(|listed| (if file.is_some() { target.with_file_name(&listed.path) } else { folder.join(&listed.path) }, listed));
        let carried = self.carried.iter().map(|listed| (folder.join(&listed.path), listed));
        let changed = outputs.filter(|(path, _)| is_removed(path)).chain(carried).filter(|(path, listed)| listed.is_changed(path));
        changed.map(|(_, listed)| listed.path.clone()).chain(self.changed_signature(folder)).collect()
    }

    /// The signature, if the file exists but was not made with the key of the report.
    fn changed_signature(&self, folder: &Path) -> Option<String> {
        let signature = self.signature.as_ref()?;
        let is_same = |bytes: Vec<u8>| {
            let bundle: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            bundle.pointer("/verificationMaterial/publicKey/hint").and_then(Value::as_str) == Some(signature.public_key_sha256.as_str())
        };
        let is_same = files::read(&folder.join(&signature.path)).map_or_else(|error| error.kind() == ErrorKind::NotFound, is_same);
        (!is_same).then(|| signature.path.clone())
    }

    /// Listed files of a remote folder that exist with other contents. Large files are compared by size. A
    /// file that cannot be read counts as changed.
    pub fn changed_remotely(&self, folder: &Path) -> Vec<String> {
        let is_same = |listed: &Listed| {
            let path = folder.join(&listed.path);
            let same_size = files::length(&path)? == listed.bytes;
            Ok::<_, io::Error>(same_size && (listed.bytes > SMALL_FILE || blake3::hash(&files::read(&path)?).to_string() == listed.blake3))
        };
        let is_changed = |listed: &&Listed| !is_same(listed).unwrap_or_else(|error| error.kind() == ErrorKind::NotFound);
        let changed = self.outputs.iter().chain(&self.carried).filter(is_changed).map(|listed| listed.path.clone());
        changed.chain(self.changed_signature(folder)).collect()
    }

    /// The external data files of an ONNX file that the report lists. They need not exist.
    pub fn data_files(&self, target: &Path) -> Vec<PathBuf> {
        let prefix = format!("{}.", file_name(target).unwrap_or_default());
        let names = self.outputs.iter().map(|listed| &listed.path).filter(|_| file_format(target) == Some("onnx"));
        names.filter(|name| name.starts_with(&prefix) && name.ends_with(".data")).map(|name| target.with_file_name(name)).collect()
    }
}

impl Listed {
    /// Whether the file exists with other contents. A file that cannot be read counts as changed.
    fn is_changed(&self, path: &Path) -> bool {
        // A run checks its output several times.
        static HASHES: LazyLock<FileCache<blake3::Hash>> = LazyLock::new(FileCache::default);
        let hash = || HASHES.get_or_compute(path, || blake3::Hasher::new().update_reader(fs::File::open(path)?).map(|hasher| hasher.finalize()));
        let is_same = || Ok::<_, io::Error>(fs::metadata(path)?.len() == self.bytes && hash()?.to_string() == self.blake3);
        !is_same().unwrap_or_else(|error| error.kind() == ErrorKind::NotFound)
    }
}

//! External data: tensors whose bytes are in separate files.
//!
//! The locations in a model are untrusted: paths must stay inside of the model's folder and contain no
//! links, except those of a Hub cache, and ranges must lie within the files.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::proto::{DataLocation, TensorProto};
use crate::files;
use crate::store::DataFile;

/// The external data of a tensor: file, offset and length.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExternalData<'t> {
    pub location: &'t str,
    pub offset: u64,
    /// If missing, the rest of the file.
    pub length: Option<u64>,
}

impl<'t> ExternalData<'t> {
    /// The external data of a tensor; `None` if it has none. Fails if the file name is missing or a
    /// number is invalid.
    pub fn parse(tensor: &'t TensorProto) -> Result<Option<ExternalData<'t>>, String> {
        if tensor.data_location != Some(DataLocation::External as i32) {
            return Ok(None);
        }
        let value = |wanted: &str| tensor.external_data.iter().find(|entry| entry.key() == wanted).map(|entry| entry.value());
        let number = |wanted: &str| {
            let parse = |text: &str| text.parse::<u64>().map_err(|_| format!("its external `{wanted}` is `{text}`, which is not a number of bytes"));
            value(wanted).map(parse).transpose()
        };
        let location = value("location").ok_or("its external data has no `location`")?;
        Ok(Some(ExternalData { location, offset: number("offset")?.unwrap_or(0), length: number("length")? }))
    }
}

/// The external data files of a model. Each is opened once.
pub(super) struct DataFiles {
    folder: PathBuf,
    files: BTreeMap<PathBuf, (Arc<DataFile>, u64)>,
}

impl DataFiles {
    /// For a model at this path.
    pub fn new(model: &Path) -> DataFiles {
        let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DataFiles { folder: folder.to_owned(), files: BTreeMap::new() }
    }

    /// Opens a file at a location inside of the model's folder, and returns it with its length. Fails
    /// for links and for anything but a regular file.
    pub fn open(&mut self, location: &str) -> Result<(Arc<DataFile>, u64), String> {
        let parts = parts(location)?;
        let relative = parts.iter().collect::<PathBuf>();
        if let Some((file, length)) = self.files.get(&relative) {
            return Ok((file.clone(), *length));
        }
        let path = self.folder.join(&relative);
        let cannot = |e: std::io::Error| format!("{}: {e}", path.display());
        let file = if files::is_remote(&self.folder) {
            files::File::open(&path).map_err(cannot)?
        } else {
            let file = self.descend(location, &parts)?;
            if !file.metadata().map_err(cannot)?.is_file() {
                return Err(format!("`{location}` is not a regular file"));
            }
            files::File::from_std(file).map_err(cannot)?
        };
        let length = file.length();
        let opened = (DataFile::from_file(&path, file), length);
        self.files.insert(relative, opened.clone());
        Ok(opened)
    }

    /// Opens a file one path component at a time, without following links.
    fn descend(&self, location: &str, parts: &[&OsStr]) -> Result<File, String> {
        let refused = |e: rustix::io::Errno| match e {
            rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR | rustix::io::Errno::MLINK => {
                format!("`{location}` is a link or leads through one: replace the link by a copy of the file")
            }
            e => format!("external data `{location}` cannot be opened: {}", std::io::Error::from(e)),
        };
        let base = OFlags::RDONLY | OFlags::CLOEXEC;
        let mut at = openat(CWD, &self.folder, base | OFlags::DIRECTORY, Mode::empty()).map_err(refused)?;
        for (number, part) in parts.iter().enumerate() {
            let last = number.saturating_add(1) == parts.len();
            // Opening a pipe without a writer would block.
            let how = if last { OFlags::NONBLOCK } else { OFlags::DIRECTORY };
            at = match openat(&at, *part, base | OFlags::NOFOLLOW | how, Mode::empty()) {
                Err(rustix::io::Errno::LOOP) if last => {
                    let blob = self.hub_blob(&parts.iter().collect::<PathBuf>()).ok_or_else(|| refused(rustix::io::Errno::LOOP))?;
                    openat(CWD, &blob, base | OFlags::NOFOLLOW | how, Mode::empty()).map_err(refused)?
                }
                opened => opened.map_err(refused)?,
            };
        }
        Ok(File::from(at))
    }

    /// The file that a link in a Hub cache leads to. Downloads are in `snapshots/REVISION`, and are links to
    /// files in `blobs` next to `snapshots`.
    fn hub_blob(&self, relative: &Path) -> Option<PathBuf> {
        let folder = self.folder.canonicalize().ok()?;
        let snapshots = folder.ancestors().find(|folder| folder.file_name() == Some(OsStr::new("snapshots")))?;
        let target = folder.join(relative).canonicalize().ok()?;
        (target.parent()? == snapshots.parent()?.join("blobs")).then_some(target)
    }

    /// Paths of the files that were opened.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.keys().map(|location| self.folder.join(location)).collect()
    }
}

/// The normal components of a relative path that stays inside the folder; `.` components are dropped.
fn parts(location: &str) -> Result<Vec<&OsStr>, String> {
    let inside = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    let path = Path::new(location);
    let parts: Vec<_> = path.components().filter(|part| *part != Component::CurDir).map(Component::as_os_str).collect();
    if parts.is_empty() || location.contains('\0') || !path.components().all(inside) {
        return Err(format!("`{location}` is not a path inside the model's folder"));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::super::proto::StringStringEntryProto;
    use super::*;

    #[test]
    fn only_files_in_the_folder_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, outside) = (folder.path().join("model"), folder.path().join("secret"));
        std::fs::create_dir_all(inside.join("data")).unwrap();
        for path in [&outside, &inside.join("data/weights")] {
            std::fs::write(path, [1; 16]).unwrap();
        }
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
        std::os::unix::fs::symlink(inside.join("data"), inside.join("folder")).unwrap();
        let mut data_files = DataFiles::new(&inside.join("model.onnx"));
        let (file, length) = data_files.open("data/weights").unwrap();
        let mut read = [0; 4];
        file.read(12, &mut read).unwrap();
        assert_eq!((read, length), ([1; 4], 16));
        for same in ["./data/weights", "data/./weights", "./data//weights"] {
            assert!(Arc::ptr_eq(&file, &data_files.open(same).unwrap().0), "{same}");
        }
        let absolute = outside.to_str().unwrap();
        for (location, reason) in [
            ("../secret", "inside the model's folder"),
            (absolute, "inside the model's folder"),
            ("data/../../secret", "inside the model's folder"),
            ("", "inside the model's folder"),
            ("./", "inside the model's folder"),
            ("./../secret", "inside the model's folder"),
            ("link", "link"),
            ("folder/weights", "link"),
            ("data", "not a regular file"),
            ("missing", "cannot be opened"),
        ] {
            let error = data_files.open(location).err().unwrap();
            assert!(error.contains(reason), "{location}: {error}");
        }
        assert_eq!(data_files.paths(), [inside.join("data/weights")]);
        // In a Hub cache, files of a revision are links to blobs.
        let revision = folder.path().join("models--a--b/snapshots/0123/onnx");
        let blobs = folder.path().join("models--a--b/blobs");
        [&revision, &blobs].into_iter().for_each(|folder| std::fs::create_dir_all(folder).unwrap());
        std::fs::write(blobs.join("0f"), [2; 16]).unwrap();
        std::os::unix::fs::symlink("../../../blobs/0f", revision.join("weights")).unwrap();
        std::os::unix::fs::symlink(&outside, revision.join("link")).unwrap();
        let mut data_files = DataFiles::new(&revision.join("model.onnx"));
        assert_eq!(data_files.open("weights").unwrap().1, 16);
        assert!(data_files.open("link").err().unwrap().contains("link"));
    }

    #[test]
    fn external_data_is_parsed() {
        let tensor = |entries: &[(&str, &str)]| TensorProto {
            data_location: Some(DataLocation::External as i32),
            external_data: entries.iter().map(|(key, value)| StringStringEntryProto::new(key, *value)).collect(),
            ..TensorProto::default()
        };
        let external = tensor(&[("location", "a"), ("offset", "4096"), ("length", "8"), ("checksum", "x")]);
        assert_eq!(ExternalData::parse(&external), Ok(Some(ExternalData { location: "a", offset: 4096, length: Some(8) })));
        assert_eq!(ExternalData::parse(&TensorProto::default()), Ok(None));
        assert!(ExternalData::parse(&tensor(&[("offset", "0")])).is_err_and(|e| e.contains("`location`")));
        assert!(ExternalData::parse(&tensor(&[("location", "a"), ("offset", "-1")])).is_err_and(|e| e.contains("`-1`")));
    }
}

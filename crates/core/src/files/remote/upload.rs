//! Uploads of folders to a bucket. Files that complete the model are published last; on failure,
//! everything is removed.
//!
//! Threads write files at any offset. Each part is buffered in memory until it is complete, and then
//! uploaded. During the upload, the folder contains a small lock file, so that of two runs that write
//! the same folder, one is rejected.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::outgoing::Outgoing;
use super::session::{Session, already_exists, ranges};
use super::{chunks, kind, locate, secrets};
use crate::files::UNFINISHED;

/// Progress callback: receives the number of additional bytes processed. An error cancels the upload.
pub(super) type ProgressFn<'t> = &'t (dyn Fn(u64) -> io::Result<()> + Sync);

/// Minimum part size that all stores support, in bytes. Very large files use larger parts.
const PART: u64 = 5 << 20;
/// Maximum number of parts that all stores support.
const MAX_PARTS: u64 = 9000;

/// Upload order: weights, then other files, then the files that reference them, and finally the report,
/// which marks a complete folder.
fn rank(name: &str) -> u8 {
    match name {
        "report.json" => 3,
        "config.json" => 2,
        _ if name.ends_with(".index.json") => 2,
        _ if [".safetensors", ".gguf", ".onnx", ".data"].iter().any(|end| name.ends_with(end)) => 0,
        _ => 1,
    }
}

/// A folder that is being uploaded. If it is dropped before `publish`, everything uploaded is removed.
#[derive(Debug)]
pub(in crate::files) struct Upload(Arc<Session>);

impl Upload {
    /// Creates a folder that does not exist yet.
    pub fn begin(name: &str) -> io::Result<Upload> {
        let (cached, inside) = locate(name)?;
        cached.backend.writable()?;
        cached.forget(&inside);
        match kind(name) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
            Ok(_) => return Err(already_exists("something")),
        }
        let prefix = if inside.is_empty() { String::new() } else { format!("{inside}/") };
        let [a, b] = [(); 2].map(|()| RandomState::new().build_hasher().finish());
        let text = format!("Locked by a run of compress ({a:016x}{b:016x}). If that run has ended, remove this file and the other files in this folder.\n");
        let upload = Upload(Arc::new(Session::new(cached.clone(), prefix, text)));
        upload.0.lock().map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => {
                io::Error::new(e.kind(), format!("another run writes to it, or a killed run left {UNFINISHED} behind: choose another name"))
            }
            _ => e,
        })?;
        // Another run may have completed the folder since it was checked.
        let others = cached.backend.list(&inside).map_err(secrets::redact_error).and_then(|found| {
            let other = found.into_iter().find(|file| file.name != upload.0.name(UNFINISHED));
            other.map_or(Ok(()), |file| Err(already_exists(&file.name)))
        });
        match others {
            Ok(()) => Ok(upload),
            Err(error) => Err(upload.0.roll_back_after(error)),
        }
    }

    /// Creates a file of `length` bytes.
    pub fn create(&self, file: &str, length: u64) -> Outgoing {
        // The part size is a multiple of 1 MiB, and at least 5 MiB.
        let part = PART.max(length.div_ceil(MAX_PARTS).next_multiple_of(1 << 20));
        Outgoing::new(self.0.clone(), file, length, part)
    }

    /// Whether two concurrent runs could both write the same folder, because the store does not support
    /// conditional writes.
    pub fn can_race(&self) -> bool {
        !self.0.is_conditional()
    }

    /// Makes the files of a local folder readable under the name of the remote folder, until the next file is
    /// uploaded.
    pub fn overlay(&self, folder: &Path) -> io::Result<()> {
        let mut staged = Vec::new();
        collect(folder, "", &mut staged)?;
        self.0.overlay(staged)
    }

    /// Uploads the files of a local folder in addition to those created with [`create`](Upload::create),
    /// and verifies them by reading them back. On failure, everything uploaded is removed.
    pub fn publish(&self, folder: &Path, progress: ProgressFn) -> io::Result<()> {
        chunks::evict_all();
        let mut files = Vec::new();
        collect(folder, "", &mut files)?;
        files.sort_by(|(a, _), (b, _)| (rank(a), a).cmp(&(rank(b), b)));
        let put = || {
            for (file, path) in &files {
                let with_name = |e: io::Error| io::Error::new(e.kind(), format!("{file}: {e}"));
                self.put(file, &std::fs::File::open(path)?, progress).map_err(with_name)?;
            }
            self.0.unlock()
        };
        let done = put().map_err(secrets::redact_error);
        self.0.forget();
        match done {
            Ok(()) => self.0.end(),
            Err(error) => return Err(self.0.roll_back_after(error)),
        }
        Ok(())
    }

    fn put(&self, file: &str, source: &std::fs::File, progress: ProgressFn) -> io::Result<()> {
        let bytes = source.metadata()?.len();
        let target = self.create(file, bytes);
        for range in ranges(bytes, PART) {
            target.write_all_at(&read_part(source, range.clone())?, range.start)?;
            target.mark_final(range.clone())?;
            progress(range.end.saturating_sub(range.start))?;
        }
        target.finish()?;
        self.0.compare(file, bytes, &|range| {
            progress(range.end.saturating_sub(range.start))?;
            read_part(source, range)
        })
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.roll_back();
    }
}

/// Reads a range of a file.
pub(super) fn read_part(file: &std::fs::File, range: Range<u64>) -> io::Result<Vec<u8>> {
    let mut part = vec![0; usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut part, range.start)?;
    Ok(part)
}

/// Names and paths of all files of a folder.
pub(super) fn collect(folder: &Path, inside: &str, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).map(|name| format!("{inside}{name}"));
        let name = name.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{}: the file name is not valid UTF-8", path.display())))?;
        if path.is_dir() { collect(&path, &format!("{name}/"), files)? } else { files.push((name, path)) }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::super::{BACKENDS, Backend, CachedBackend, Found, Writable, lock};
    use super::*;
    use crate::files;

    /// An in-memory store that corrupts one file and rejects another.
    #[derive(Default)]
    struct MemoryStore {
        files: Mutex<BTreeMap<String, Vec<u8>>>,
        parts: Mutex<BTreeMap<usize, Vec<u8>>>,
        order: Mutex<Vec<String>>,
        damages: &'static str,
        refuses: &'static str,
        /// A file that another run writes after this run wrote a file with the given suffix.
        intruder: (&'static str, &'static str),
        /// Number of conditional writes and completions whose response is lost, and whether reads fail
        /// afterwards.
        lost: AtomicUsize,
        unreadable: AtomicBool,
        /// Writing this file panics.
        panics: &'static str,
        /// Error for conditional writes, and whether their condition is ignored.
        new: Option<ErrorKind>,
        ignores_condition: bool,
    }

    fn version(bytes: &[u8]) -> Option<String> {
        Some(blake3::hash(bytes).to_string())
    }

    impl Backend for Arc<MemoryStore> {
        fn list(&self, folder: &str) -> io::Result<Vec<Found>> {
            let found = lock(&self.files).keys().filter(|name| name.starts_with(folder)).cloned().collect::<Vec<_>>();
            Ok(found.iter().filter_map(|name| self.find(name).ok()?).collect())
        }

        fn find(&self, name: &str) -> io::Result<Option<Found>> {
            if self.unreadable.load(Ordering::Relaxed) {
                return Err(io::Error::other("no answer"));
            }
            let found = |bytes: &Vec<u8>| Found { name: name.into(), bytes: bytes.len() as u64, version: version(bytes), sha256: None, local: None };
            Ok(lock(&self.files).get(name).map(found))
        }

        fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
            Ok(lock(&self.files)[&file.name][range.start as usize..range.end as usize].to_vec())
        }

        fn writable(&self) -> io::Result<&dyn Writable> {
            Ok(self)
        }
    }

    impl MemoryStore {
        fn loses_response(&self) -> bool {
            self.lost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
        }
    }

    impl Writable for Arc<MemoryStore> {
        fn put(&self, name: &str, mut bytes: Vec<u8>, new: bool) -> io::Result<Option<String>> {
            if !self.refuses.is_empty() && name.ends_with(self.refuses) {
                return Err(io::Error::other("no"));
            }
            if let Some(kind) = self.new.filter(|_| new) {
                return Err(kind.into());
            }
            let mut files = lock(&self.files);
            if new && !self.ignores_condition && files.contains_key(name) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            if name.ends_with(self.damages) && !self.damages.is_empty() {
                bytes[0] ^= 1;
            }
            assert!(self.panics.is_empty() || !name.ends_with(self.panics), "a bug");
            lock(&self.order).push(name.to_owned());
            let version = version(&bytes);
            files.insert(name.to_owned(), bytes);
            if !self.intruder.1.is_empty() && name.ends_with(self.intruder.0) {
                files.entry(self.intruder.1.into()).or_insert_with(|| b"foreign".to_vec());
            }
            if new && self.loses_response() { Err(io::Error::other("no answer")) } else { Ok(version) }
        }

        fn begin(&self, name: &str) -> io::Result<String> {
            Ok(format!("upload of {name}"))
        }

        fn put_part(&self, name: &str, upload: &str, number: usize, bytes: Vec<u8>) -> io::Result<String> {
            assert_eq!(upload, format!("upload of {name}"));
            lock(&self.parts).insert(number, bytes);
            Ok(number.to_string())
        }

        fn complete(&self, name: &str, _upload: &str, parts: Vec<String>) -> io::Result<Option<String>> {
            let stored = std::mem::take(&mut *lock(&self.parts));
            assert!(stored.keys().map(usize::to_string).eq(parts));
            lock(&self.order).push(name.to_owned());
            let mut bytes: Vec<u8> = stored.into_values().flatten().collect();
            if name.ends_with(self.damages) && !self.damages.is_empty() {
                bytes.pop();
            }
            let version = version(&bytes);
            lock(&self.files).insert(name.to_owned(), bytes);
            // The client repeats the request, but the upload does not exist any more.
            if self.loses_response() { Err(io::Error::new(ErrorKind::NotFound, "NoSuchUpload")) } else { Ok(version) }
        }

        fn abort(&self, _name: &str, _upload: &str) -> io::Result<()> {
            lock(&self.parts).clear();
            Ok(())
        }

        fn remove(&self, name: &str) -> io::Result<()> {
            lock(&self.files).remove(name);
            Ok(())
        }
    }

    fn store(bucket: &str, store: MemoryStore) -> (String, Arc<MemoryStore>) {
        let (name, store) = (format!("s3://{bucket}"), Arc::new(store));
        lock(&BACKENDS).insert(name.clone(), Arc::new(CachedBackend::new(Box::new(store.clone()))));
        (format!("{name}/a/b"), store)
    }

    fn published(bucket: &str, contents: MemoryStore, progress: ProgressFn) -> (io::Result<()>, Arc<MemoryStore>) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "report.json", "model.safetensors.index.json", "a.safetensors", "tokenizer.json", "1_Pooling/config.json"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name.repeat(3)).unwrap();
        }
        let (name, store) = store(bucket, contents);
        (Upload::begin(&name).and_then(|upload| upload.publish(folder.path(), progress)), store)
    }

    #[test]
    fn files_that_complete_the_model_are_uploaded_last() {
        let (done, store) = published("whole", MemoryStore::default(), &|_| Ok(()));
        done.unwrap();
        let order = [UNFINISHED, "a.safetensors", "1_Pooling/config.json", "tokenizer.json", "config.json", "model.safetensors.index.json", "report.json"];
        assert_eq!(*lock(&store.order), order.map(|name| format!("a/b/{name}")));
        assert_eq!(lock(&store.files)["a/b/1_Pooling/config.json"], b"1_Pooling/config.json".repeat(3));
    }

    #[test]
    fn failed_uploads_are_removed() {
        let (done, store) = published("damaged", MemoryStore { damages: "tokenizer.json", ..MemoryStore::default() }, &|_| Ok(()));
        assert!(done.unwrap_err().to_string().contains("tokenizer.json: bytes 0 to 42 read back differently"));
        assert!(lock(&store.files).is_empty() && !lock(&store.order).is_empty());
        let (done, store) = published("refused", MemoryStore { refuses: "report.json", ..MemoryStore::default() }, &|_| Ok(()));
        assert!(done.unwrap_err().to_string().contains("report.json: no") && lock(&store.files).is_empty());
        let (done, store) = published("stopped", MemoryStore::default(), &|_| Err(io::ErrorKind::Interrupted.into()));
        assert!(done.unwrap_err().kind() == io::ErrorKind::Interrupted && lock(&store.files).is_empty());
    }

    #[test]
    fn files_of_other_runs_are_not_touched() {
        let foreign = |files: &BTreeMap<String, Vec<u8>>| files.len() == 1 && files.values().all(|bytes| bytes == b"foreign");
        for new in [None, Some(ErrorKind::Unsupported)] {
            // A file that appears during the upload.
            let (done, store) = published("raced", MemoryStore { intruder: ("a.safetensors", "a/b/config.json"), new, ..MemoryStore::default() }, &|_| Ok(()));
            let error = done.unwrap_err();
            assert!(error.kind() == ErrorKind::AlreadyExists && error.to_string().contains("config.json was created by another process"), "{error}");
            assert!(foreign(&lock(&store.files)), "{:?}", lock(&store.files));
            // Another run that completed after the existence check.
            let (done, store) = published("ended", MemoryStore { intruder: (UNFINISHED, "a/b/config.json"), new, ..MemoryStore::default() }, &|_| Ok(()));
            let error = done.unwrap_err();
            assert!(error.kind() == ErrorKind::AlreadyExists && error.to_string().contains("a/b/config.json was created by another process"), "{error}");
            assert!(foreign(&lock(&store.files)), "{:?}", lock(&store.files));
            // Another run that has just started.
            let (name, store) = self::store("begun", MemoryStore { new, ..MemoryStore::default() });
            let first = Upload::begin(&name).unwrap();
            assert_eq!(first.can_race(), new.is_some());
            assert!(Upload::begin(&name).unwrap_err().to_string().contains("created by another process"));
            lock(&BACKENDS)["s3://begun"].forget("");
            assert!(first.0.put_new(UNFINISHED, b"other".to_vec()).unwrap_err().to_string().contains("created by another process"));
            drop(first);
            assert!(lock(&store.files).is_empty());
        }
    }

    #[test]
    fn files_that_another_run_has_replaced_are_not_removed() {
        let (name, store) = store("ignoring", MemoryStore { ignores_condition: true, ..MemoryStore::default() });
        let replace = |file: &str| drop(lock(&store.files).insert(format!("a/b/{file}"), b"foreign".to_vec()));
        let upload = Upload::begin(&name).unwrap();
        assert!(upload.can_race());
        ["x", "y"].into_iter().for_each(|file| upload.0.put_new(file, b"mine".to_vec()).unwrap());
        replace("z");
        assert!(upload.0.put_new("z", b"mine".to_vec()).unwrap_err().to_string().contains("z was created by another process"));
        ["y", UNFINISHED].into_iter().for_each(replace);
        let error = upload.publish(tempfile::tempdir().unwrap().path(), &|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("another run may write to the same folder") && error.contains("2 files were not removed"), "{error}");
        assert!(lock(&store.files).keys().eq(["a/b/compress.unfinished", "a/b/y", "a/b/z"]));
    }

    #[test]
    fn a_write_with_a_lost_response_counts() {
        let (name, store) = store("lost", MemoryStore::default());
        let upload = Upload::begin(&name).unwrap();
        lock(&store.files).insert("a/b/x".into(), b"same".to_vec());
        upload.0.put_new("x", b"same".to_vec()).unwrap();
        assert!(upload.0.put_new("x", b"else".to_vec()).is_err());
        store.lost.store(2, Ordering::Relaxed);
        upload.0.put_new("y", b"mine".to_vec()).unwrap();
        assert_eq!((store.lost.load(Ordering::Relaxed), lock(&store.order).len()), (1, 2));
        drop(upload);
        assert!(lock(&store.files).is_empty());
    }

    #[test]
    fn a_completion_with_a_lost_response_counts() {
        let write = |bucket: &str, damages: &'static str| {
            let (name, store) = store(bucket, MemoryStore { damages, ..MemoryStore::default() });
            let (upload, length) = (Upload::begin(&name).unwrap(), PART + 7);
            store.lost.store(1, Ordering::Relaxed);
            let file = upload.create("x", length);
            file.write_all_at(&vec![5; length as usize], 0).unwrap();
            file.mark_final(0..length).unwrap();
            let done = file.finish();
            (done, lock(&store.files).contains_key("a/b/x"))
        };
        assert!(matches!(write("completed", ""), (Ok(()), true)));
        let (done, exists) = write("incomplete", "x");
        assert!(!exists && done.unwrap_err().kind() == ErrorKind::Other);
    }

    #[test]
    fn files_of_unknown_origin_are_not_removed() {
        // The lock file of another run that cannot be read, and a failure before anything was written.
        for new in [None, Some(ErrorKind::Unsupported)] {
            let (name, store) = store("unreadable", MemoryStore { new, ..MemoryStore::default() });
            let upload = Upload::begin(&name).unwrap();
            lock(&store.files).insert("a/b/x".into(), b"foreign".to_vec());
            store.unreadable.store(true, Ordering::Relaxed);
            let kind = upload.0.put_new("x", b"mine".to_vec()).unwrap_err().kind();
            assert_eq!(kind, if new.is_none() { ErrorKind::AlreadyExists } else { ErrorKind::Other });
            drop(upload);
            // Without conditions, only files that are known to be those of this run are removed.
            assert!(lock(&store.files).keys().eq(["a/b/compress.unfinished", "a/b/x"].iter().skip(usize::from(new.is_none()))));
        }
    }

    #[test]
    fn a_panic_fails_the_upload_and_everything_is_removed() {
        let (name, store) = store("panics", MemoryStore { panics: "x", ..MemoryStore::default() });
        let upload = Upload::begin(&name).unwrap();
        let put = std::panic::AssertUnwindSafe(|| upload.0.put_new("x", b"mine".to_vec()));
        assert!(std::panic::catch_unwind(put).is_err());
        let error = upload.0.put_new("y", b"mine".to_vec()).unwrap_err().to_string();
        assert!(error.contains("x: the thread of a request panicked"), "{error}");
        assert!(lock(&store.files).is_empty());
    }

    #[test]
    fn staged_files_are_readable_in_the_remote_folder() {
        let (name, store) = store("overlay", MemoryStore::default());
        let (folder, target) = (tempfile::tempdir().unwrap(), Path::new(&name));
        let upload = Upload::begin(&name).unwrap();
        upload.0.put_new("a.safetensors", b"weights".to_vec()).unwrap();
        std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        for file in ["config.json", "1_Pooling/config.json"] {
            std::fs::write(folder.path().join(file), file).unwrap();
        }
        upload.overlay(folder.path()).unwrap();
        let entries: Vec<_> = files::list(target).unwrap().into_iter().map(|entry| entry.path).collect();
        assert_eq!(entries, ["1_Pooling", "a.safetensors", "config.json"].map(|file| target.join(file)));
        for (file, text) in [("config.json", "config.json"), ("1_Pooling/config.json", "1_Pooling/config.json"), ("a.safetensors", "weights")] {
            assert_eq!(files::read_to_string(&target.join(file)).unwrap(), text);
            assert_eq!(files::length(&target.join(file)).unwrap(), text.len() as u64);
        }
        assert_eq!(lock(&store.files).len(), 2, "nothing was uploaded");
        drop(upload);
        assert!(files::list(target).is_err());
    }

    #[test]
    fn listed_files_have_any_names() {
        let (name, store) = store("marks", MemoryStore::default());
        let folder = Path::new(&name);
        for (file, text) in [("a/b/c#1.txt", "one"), ("a/b/d?/e.txt", "two")] {
            lock(&store.files).insert(file.into(), text.into());
        }
        assert!(files::read(&folder.join("c#1.txt")).unwrap_err().to_string().contains("contains a `?` or `#`"));
        let entries = files::list(folder).unwrap();
        assert_eq!(files::read(&entries[0].path).unwrap(), b"one");
        assert_eq!(files::read(&files::list(&entries[1].path).unwrap()[0].path).unwrap(), b"two");
        for file in ["c?sig=S", "d?/e.txt?sig=S", "d"] {
            assert!(files::kind(&folder.join(file)).is_err(), "{file}");
        }
    }

    #[test]
    fn only_written_folders_are_listed_again() {
        let (name, store) = store("kept", MemoryStore::default());
        lock(&store.files).insert("a/in/config.json".into(), b"{}".to_vec());
        let cached = locate(&name).unwrap().0;
        assert_eq!(cached.list("a/in").unwrap().len(), 1);
        assert!(cached.list("a/b").unwrap().is_empty() && cached.list("a").unwrap().len() == 1);
        drop(Upload::begin(&name).unwrap());
        assert!(lock(&cached.folders).keys().eq(["a/in"]));
    }

    #[test]
    fn bytes_are_uploaded_in_any_write_order() {
        let (name, store) = store("streamed", MemoryStore::default());
        let upload = Upload::begin(&name).unwrap();
        let bytes: Vec<u8> = (0..2 * PART + 77).map(|i| (i * 31 % 251) as u8).collect();
        let cuts: Vec<usize> = (0..bytes.len()).step_by(300_001).chain([bytes.len()]).collect();
        for length in [0, 1, PART as usize, bytes.len()] {
            let file = upload.create(&format!("{length}.safetensors"), length as u64);
            for cut in cuts.windows(2).rev() {
                let (from, to) = (cut[0].min(length), cut[1].min(length));
                file.write_all_at(&bytes[from..to], from as u64).unwrap();
                let mut back = vec![0; to - from];
                file.read_exact_at(&mut back, from as u64).unwrap();
                assert!(back == bytes[from..to]);
                file.mark_final(from as u64..to as u64).unwrap();
            }
            file.finish().unwrap();
            assert!(lock(&store.files)[&format!("a/b/{length}.safetensors")] == bytes[..length]);
        }
        let file = upload.create("gap", 8);
        file.write_all_at(b"1234", 0).unwrap();
        file.mark_final(0..4).unwrap();
        assert!(file.write_all_at(b"12345", 4).is_err() && file.finish().unwrap_err().to_string().contains("not written completely"));
        assert!(lock(&store.files).is_empty(), "failed files are removed");
    }
}

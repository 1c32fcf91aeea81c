//! Folders that appear in a bucket file by file, those last that make a model of the others, or not at all.
//!
//! Files are written at any place by any thread. A part of a file is in memory until it is full, and goes from there. While a folder is written,
//! a small file in it says so: of two runs that write the same folder, one is refused.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::outgoing::Outgoing;
use super::session::{Session, ranges, taken};
use super::{chunks, kind, reach, secrets};
use crate::files::UNFINISHED;

/// Is told how many more bytes are done; its error ends the work.
pub(super) type Told<'t> = &'t (dyn Fn(u64) -> io::Result<()> + Sync);

/// Bytes of a part: the least that every store takes. Parts of very large files are larger.
const PART: u64 = 5 << 20;
/// Most parts of a file that every store takes.
const MOST_PARTS: u64 = 9000;

/// When a file goes: weights, what lies around them, what names them, and last what says that all is there.
fn rank(name: &str) -> u8 {
    match name {
        "report.json" => 3,
        "config.json" => 2,
        _ if name.ends_with(".index.json") => 2,
        _ if [".safetensors", ".gguf", ".onnx", ".data"].iter().any(|end| name.ends_with(end)) => 0,
        _ => 1,
    }
}

/// A folder that is being written. Dropped before it is published, nothing of it is left.
#[derive(Debug)]
pub(in crate::files) struct Upload(Arc<Session>);

impl Upload {
    /// Begins a folder where there is none.
    pub fn begin(name: &str) -> io::Result<Upload> {
        let (known, inside) = reach(name)?;
        known.place.writable()?;
        known.forget(&inside);
        match kind(name) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
            Ok(_) => return Err(taken("something")),
        }
        let prefix = if inside.is_empty() { String::new() } else { format!("{inside}/") };
        let upload = Upload(Arc::new(Session::new(known.clone(), prefix)));
        // No other run writes the same.
        let [a, b] = [(); 2].map(|()| RandomState::new().build_hasher().finish());
        let text = format!("compress writes here, run {a:016x}{b:016x}. If that has ended, remove this file, and what lies beside it.\n");
        let begun =
            upload.0.put_new(UNFINISHED, text.clone().into()).and_then(|()| upload.0.compare(UNFINISHED, text.len() as u64, &|_| Ok(text.clone().into())));
        begun.map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => {
                io::Error::new(e.kind(), format!("another run writes there, or one that was killed has left {UNFINISHED}: choose another name"))
            }
            _ => e,
        })?;
        // Another run may have written all of it since it was looked at.
        let others = known.place.list(&inside).map_err(secrets::without).and_then(|found| {
            let other = found.into_iter().find(|file| file.name != upload.0.name(UNFINISHED));
            other.map_or(Ok(()), |file| Err(taken(&file.name)))
        });
        match others {
            Ok(()) => Ok(upload),
            Err(error) => Err(upload.0.given_up(error)),
        }
    }

    /// A file of so many bytes.
    pub fn create(&self, file: &str, length: u64) -> Outgoing {
        // Whole megabytes, of which a part is five at least.
        let part = PART.max(length.div_ceil(MOST_PARTS).next_multiple_of(1 << 20));
        Outgoing::new(self.0.clone(), file, length, part)
    }

    /// Whether two runs that write the same folder could both go on: the place cannot refuse to write over a file.
    pub fn is_shared(&self) -> bool {
        !self.0.is_conditional()
    }

    /// Puts the files of a folder of this machine beside those that were made here, and reads them back; of what goes wrong, nothing is left.
    pub fn publish(&self, folder: &Path, told: Told) -> io::Result<()> {
        chunks::forget();
        let mut files = Vec::new();
        collect(folder, "", &mut files)?;
        files.sort_by(|(a, _), (b, _)| (rank(a), a).cmp(&(rank(b), b)));
        let put = || {
            for (file, path) in &files {
                let named = |e: io::Error| io::Error::new(e.kind(), format!("{file}: {e}"));
                self.put(file, &std::fs::File::open(path)?, told).map_err(named)?;
            }
            self.0.writable()?.remove(&self.0.name(UNFINISHED))
        };
        let done = put().map_err(secrets::without);
        self.0.forget();
        match done {
            Ok(()) => self.0.end(),
            Err(error) => return Err(self.0.given_up(error)),
        }
        Ok(())
    }

    fn put(&self, file: &str, source: &std::fs::File, told: Told) -> io::Result<()> {
        let bytes = source.metadata()?.len();
        let target = self.create(file, bytes);
        for range in ranges(bytes, PART) {
            target.write_all_at(&read_part(source, range.clone())?, range.start)?;
            target.settled(range.clone())?;
            told(range.end.saturating_sub(range.start))?;
        }
        target.finish()?;
        self.0.compare(file, bytes, &|range| {
            told(range.end.saturating_sub(range.start))?;
            read_part(source, range)
        })
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

fn read_part(file: &std::fs::File, range: Range<u64>) -> io::Result<Vec<u8>> {
    let mut part = vec![0; usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut part, range.start)?;
    Ok(part)
}

fn collect(folder: &Path, inside: &str, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).map(|name| format!("{inside}{name}"));
        let name = name.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{}: a name beyond UTF-8", path.display())))?;
        if path.is_dir() { collect(&path, &format!("{name}/"), files)? } else { files.push((name, path)) }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::super::{Found, Known, PLACES, Place, Writable, lock};
    use super::*;

    /// A place in memory, which damages one file and refuses another.
    #[derive(Default)]
    struct Shelf {
        files: Mutex<BTreeMap<String, Vec<u8>>>,
        parts: Mutex<BTreeMap<usize, Vec<u8>>>,
        order: Mutex<Vec<String>>,
        damages: &'static str,
        refuses: &'static str,
        /// A file that others write as soon as one is written whose name ends so.
        others: (&'static str, &'static str),
        /// How many answers are lost of what is written under a condition, and whether reading fails after that.
        lost: AtomicUsize,
        deaf: AtomicBool,
        /// Panics when this is written.
        panics: &'static str,
        /// What new files are refused with.
        new: Option<ErrorKind>,
    }

    impl Place for Arc<Shelf> {
        fn list(&self, folder: &str) -> io::Result<Vec<Found>> {
            let found = lock(&self.files).keys().filter(|name| name.starts_with(folder)).cloned().collect::<Vec<_>>();
            Ok(found.iter().filter_map(|name| self.find(name).ok()?).collect())
        }

        fn find(&self, name: &str) -> io::Result<Option<Found>> {
            if self.deaf.load(Ordering::Relaxed) {
                return Err(io::Error::other("no answer"));
            }
            let found = |bytes: &Vec<u8>| Found { name: name.into(), bytes: bytes.len() as u64, version: None, sha256: None, here: None };
            Ok(lock(&self.files).get(name).map(found))
        }

        fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
            Ok(lock(&self.files)[&file.name][range.start as usize..range.end as usize].to_vec())
        }

        fn writable(&self) -> io::Result<&dyn Writable> {
            Ok(self)
        }
    }

    impl Writable for Arc<Shelf> {
        fn put(&self, name: &str, mut bytes: Vec<u8>, new: bool) -> io::Result<()> {
            if !self.refuses.is_empty() && name.ends_with(self.refuses) {
                return Err(io::Error::other("no"));
            }
            if let Some(kind) = self.new.filter(|_| new) {
                return Err(kind.into());
            }
            let mut files = lock(&self.files);
            if new && files.contains_key(name) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            if name.ends_with(self.damages) && !self.damages.is_empty() {
                bytes[0] ^= 1;
            }
            assert!(self.panics.is_empty() || !name.ends_with(self.panics), "a bug");
            lock(&self.order).push(name.to_owned());
            files.insert(name.to_owned(), bytes);
            if !self.others.1.is_empty() && name.ends_with(self.others.0) {
                files.entry(self.others.1.into()).or_insert_with(|| b"theirs".to_vec());
            }
            let lost = new && self.lost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
            if lost { Err(io::Error::other("no answer")) } else { Ok(()) }
        }

        fn begin(&self, name: &str) -> io::Result<String> {
            Ok(format!("upload of {name}"))
        }

        fn put_part(&self, name: &str, upload: &str, number: usize, bytes: Vec<u8>) -> io::Result<String> {
            assert_eq!(upload, format!("upload of {name}"));
            lock(&self.parts).insert(number, bytes);
            Ok(number.to_string())
        }

        fn complete(&self, name: &str, _upload: &str, parts: Vec<String>) -> io::Result<()> {
            let held = std::mem::take(&mut *lock(&self.parts));
            assert!(held.keys().map(usize::to_string).eq(parts));
            lock(&self.order).push(name.to_owned());
            lock(&self.files).insert(name.to_owned(), held.into_values().flatten().collect());
            Ok(())
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

    fn shelf(bucket: &str, shelf: Shelf) -> (String, Arc<Shelf>) {
        let (name, shelf) = (format!("s3://{bucket}"), Arc::new(shelf));
        lock(&PLACES).insert(name.clone(), Arc::new(Known::new(Box::new(shelf.clone()))));
        (format!("{name}/a/b"), shelf)
    }

    fn published(bucket: &str, shelf_of: Shelf, told: Told) -> (io::Result<()>, Arc<Shelf>) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "report.json", "model.safetensors.index.json", "a.safetensors", "tokenizer.json", "1_Pooling/config.json"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name.repeat(3)).unwrap();
        }
        let (name, shelf) = shelf(bucket, shelf_of);
        (Upload::begin(&name).and_then(|upload| upload.publish(folder.path(), told)), shelf)
    }

    #[test]
    fn what_makes_a_model_of_files_comes_last() {
        let (done, shelf) = published("whole", Shelf::default(), &|_| Ok(()));
        done.unwrap();
        let order = [UNFINISHED, "a.safetensors", "1_Pooling/config.json", "tokenizer.json", "config.json", "model.safetensors.index.json", "report.json"];
        assert_eq!(*lock(&shelf.order), order.map(|name| format!("a/b/{name}")));
        assert_eq!(lock(&shelf.files)["a/b/1_Pooling/config.json"], b"1_Pooling/config.json".repeat(3));
    }

    #[test]
    fn of_what_goes_wrong_nothing_is_left() {
        let (done, shelf) = published("damaged", Shelf { damages: "tokenizer.json", ..Shelf::default() }, &|_| Ok(()));
        assert!(done.unwrap_err().to_string().contains("tokenizer.json: bytes 0 to 42 read back differently"));
        assert!(lock(&shelf.files).is_empty() && !lock(&shelf.order).is_empty());
        let (done, shelf) = published("refused", Shelf { refuses: "report.json", ..Shelf::default() }, &|_| Ok(()));
        assert!(done.unwrap_err().to_string().contains("report.json: no") && lock(&shelf.files).is_empty());
        let (done, shelf) = published("stopped", Shelf::default(), &|_| Err(io::ErrorKind::Interrupted.into()));
        assert!(done.unwrap_err().kind() == io::ErrorKind::Interrupted && lock(&shelf.files).is_empty());
    }

    #[test]
    fn a_name_that_others_take_is_left_to_them() {
        let theirs = |files: &BTreeMap<String, Vec<u8>>| files.len() == 1 && files.values().all(|bytes| bytes == b"theirs");
        for new in [None, Some(ErrorKind::Unsupported)] {
            // A file that appears meanwhile.
            let (done, shelf) = published("raced", Shelf { others: ("a.safetensors", "a/b/config.json"), new, ..Shelf::default() }, &|_| Ok(()));
            let error = done.unwrap_err();
            assert!(error.kind() == ErrorKind::AlreadyExists && error.to_string().contains("config.json appeared there meanwhile"), "{error}");
            assert!(theirs(&lock(&shelf.files)), "{:?}", lock(&shelf.files));
            // Another run that has ended since the place was looked at.
            let (done, shelf) = published("ended", Shelf { others: (UNFINISHED, "a/b/config.json"), new, ..Shelf::default() }, &|_| Ok(()));
            let error = done.unwrap_err();
            assert!(error.kind() == ErrorKind::AlreadyExists && error.to_string().contains("a/b/config.json appeared there meanwhile"), "{error}");
            assert!(theirs(&lock(&shelf.files)), "{:?}", lock(&shelf.files));
            // Another run that has just begun.
            let (name, shelf) = self::shelf("begun", Shelf { new, ..Shelf::default() });
            let first = Upload::begin(&name).unwrap();
            assert_eq!(first.is_shared(), new.is_some());
            assert!(Upload::begin(&name).unwrap_err().to_string().contains("appeared there"));
            lock(&PLACES)["s3://begun"].forget("");
            assert!(first.0.put_new(UNFINISHED, b"other".to_vec()).unwrap_err().to_string().contains("meanwhile"));
            drop(first);
            assert!(lock(&shelf.files).is_empty());
        }
    }

    #[test]
    fn an_attempt_whose_answer_was_lost_counts() {
        let (name, shelf) = shelf("lost", Shelf::default());
        let upload = Upload::begin(&name).unwrap();
        lock(&shelf.files).insert("a/b/x".into(), b"same".to_vec());
        upload.0.put_new("x", b"same".to_vec()).unwrap();
        assert!(upload.0.put_new("x", b"else".to_vec()).is_err());
        shelf.lost.store(2, Ordering::Relaxed);
        upload.0.put_new("y", b"mine".to_vec()).unwrap();
        assert_eq!((shelf.lost.load(Ordering::Relaxed), lock(&shelf.order).len()), (1, 2));
        drop(upload);
        assert!(lock(&shelf.files).is_empty());
    }

    #[test]
    fn what_others_may_have_written_is_not_removed() {
        // The lock of another run, which cannot be looked at; and what is refused before anything is put.
        for new in [None, Some(ErrorKind::Unsupported)] {
            let (name, shelf) = shelf("deaf", Shelf { new, ..Shelf::default() });
            let upload = Upload::begin(&name).unwrap();
            lock(&shelf.files).insert("a/b/x".into(), b"theirs".to_vec());
            shelf.deaf.store(true, Ordering::Relaxed);
            let kind = upload.0.put_new("x", b"mine".to_vec()).unwrap_err().kind();
            assert_eq!(kind, if new.is_none() { ErrorKind::AlreadyExists } else { ErrorKind::Other });
            drop(upload);
            assert!(lock(&shelf.files).keys().eq(["a/b/x"]));
        }
    }

    #[test]
    fn a_panic_ends_the_run_and_leaves_nothing() {
        let (name, shelf) = shelf("panics", Shelf { panics: "x", ..Shelf::default() });
        let upload = Upload::begin(&name).unwrap();
        let put = std::panic::AssertUnwindSafe(|| upload.0.put_new("x", b"mine".to_vec()));
        assert!(std::panic::catch_unwind(put).is_err());
        let error = upload.0.put_new("y", b"mine".to_vec()).unwrap_err().to_string();
        assert!(error.contains("x: the thread of a request ended without an answer"), "{error}");
        assert!(lock(&shelf.files).is_empty());
    }

    #[test]
    fn only_what_is_written_is_asked_for_anew() {
        let (name, shelf) = shelf("kept", Shelf::default());
        lock(&shelf.files).insert("a/in/config.json".into(), b"{}".to_vec());
        let known = reach(&name).unwrap().0;
        assert_eq!(known.list("a/in").unwrap().len(), 1);
        assert!(known.list("a/b").unwrap().is_empty() && known.list("a").unwrap().len() == 1);
        drop(Upload::begin(&name).unwrap());
        assert!(lock(&known.folders).keys().eq(["a/in"]));
    }

    #[test]
    fn bytes_go_in_whatever_order_they_are_written() {
        let (name, shelf) = shelf("streamed", Shelf::default());
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
                file.settled(from as u64..to as u64).unwrap();
            }
            file.finish().unwrap();
            assert!(lock(&shelf.files)[&format!("a/b/{length}.safetensors")] == bytes[..length]);
        }
        let file = upload.create("gap", 8);
        file.write_all_at(b"1234", 0).unwrap();
        file.settled(0..4).unwrap();
        assert!(file.write_all_at(b"12345", 4).is_err() && file.finish().unwrap_err().to_string().contains("not written whole"));
        assert!(lock(&shelf.files).is_empty(), "what fails leaves nothing");
    }
}

//! Folders that appear in a bucket file by file, those last that make a model of the others, or not at all.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Place, chunks, kind, lock, reach, secrets};

/// Is told how many more bytes are done; its error ends the work.
pub(super) type Told<'t> = &'t (dyn Fn(u64) -> io::Result<()> + Sync);

/// Parts that are on their way at once.
const THREADS: usize = 8;
/// Bytes that are read back at once.
const READ: u64 = 4 << 20;

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

fn taken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, format!("{what} appeared there meanwhile: choose another name"))
}

/// Puts the files of a folder into a bucket and reads them back; of what goes wrong, nothing is left.
pub(in crate::files) fn publish(folder: &Path, name: &str, told: Told) -> io::Result<()> {
    let (known, inside) = reach(name)?;
    chunks::forget();
    known.forget();
    match kind(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
        Ok(_) => return Err(taken("something")),
    }
    let mut files = Vec::new();
    collect(folder, "", &mut files)?;
    files.sort_by(|(a, _), (b, _)| (rank(a), a).cmp(&(rank(b), b)));
    let mut begun = Vec::new();
    let put = |begun: &mut Vec<String>| {
        files.iter().try_for_each(|(file, path)| {
            let to = if inside.is_empty() { file.clone() } else { format!("{inside}/{file}") };
            // Only what this run writes is removed again.
            if known.place.find(&to)?.is_some() {
                return Err(taken(file));
            }
            begun.push(to.clone());
            let (source, kind) = (File::open(path)?, |e: io::Error| io::Error::new(e.kind(), format!("{file}: {e}")));
            put_and_read(known.place.as_ref(), &to, &source, told).map_err(kind)
        })
    };
    let done = put(&mut begun).map_err(secrets::without);
    known.forget();
    done.map_err(|error| {
        let left: Vec<&String> = begun.iter().filter(|name| known.place.remove(name).is_err()).collect();
        match left.as_slice() {
            [] => error,
            [first, ..] => io::Error::other(format!("{error}; {} files could not be removed again, the first: {first}", left.len())),
        }
    })
}

fn put_and_read(place: &dyn Place, name: &str, file: &File, told: Told) -> io::Result<()> {
    let bytes = file.metadata()?.len();
    place.put(name, file, bytes, told)?;
    let found = place.find(name)?.ok_or_else(|| io::Error::other("was written and is not there"))?;
    if found.bytes != bytes {
        return Err(io::Error::other(format!("has {} bytes there, and {bytes} were written", found.bytes)));
    }
    each_part(bytes, READ, &|_, range| {
        let (there, here) = (place.read(&found, range.clone())?, read_part(file, range.clone())?);
        if there != here {
            return Err(io::Error::other(format!("bytes {} to {} read back differently", range.start, range.end)));
        }
        told(range.end.saturating_sub(range.start))
    })
    .map(drop)
}

/// Does something with every part of a file, by several threads; the results come in any order.
pub(super) fn each_part<T: Send>(bytes: u64, size: u64, work: &(dyn Fn(usize, Range<u64>) -> io::Result<T> + Sync)) -> io::Result<Vec<T>> {
    let (count, next) = (bytes.div_ceil(size.max(1)), AtomicU64::new(0));
    let (results, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let worker = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count || lock(&failed).is_some() {
                break;
            }
            let begin = number.saturating_mul(size);
            match work(usize::try_from(number).unwrap_or(usize::MAX), begin..begin.saturating_add(size).min(bytes)) {
                Ok(result) => lock(&results).push(result),
                Err(e) => {
                    lock(&failed).get_or_insert(e);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS.min(usize::try_from(count).unwrap_or(THREADS)) {
            if std::thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                break;
            }
        }
        worker();
    });
    match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)),
    }
}

pub(super) fn read_part(file: &File, range: Range<u64>) -> io::Result<Vec<u8>> {
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
    use std::sync::Arc;

    use super::super::{Found, Known, PLACES};
    use super::*;

    /// A place in memory, which damages one file and refuses another.
    #[derive(Default)]
    struct Shelf {
        files: Mutex<BTreeMap<String, Vec<u8>>>,
        order: Mutex<Vec<String>>,
        damages: &'static str,
        refuses: &'static str,
    }

    impl Place for Arc<Shelf> {
        fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
            Ok(Vec::new())
        }

        fn find(&self, name: &str) -> io::Result<Option<Found>> {
            let found = |bytes: &Vec<u8>| Found { name: name.into(), bytes: bytes.len() as u64, version: None, here: None };
            Ok(lock(&self.files).get(name).map(found))
        }

        fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
            Ok(lock(&self.files)[&file.name][range.start as usize..range.end as usize].to_vec())
        }

        fn put(&self, name: &str, file: &File, bytes: u64, told: Told) -> io::Result<()> {
            if !self.refuses.is_empty() && name.ends_with(self.refuses) {
                return Err(io::Error::other("no"));
            }
            let mut whole = read_part(file, 0..bytes)?;
            if name.ends_with(self.damages) && !self.damages.is_empty() {
                whole[0] ^= 1;
            }
            lock(&self.order).push(name.to_owned());
            lock(&self.files).insert(name.to_owned(), whole);
            told(bytes)
        }

        fn remove(&self, name: &str) -> io::Result<()> {
            lock(&self.files).remove(name);
            Ok(())
        }
    }

    fn published(bucket: &str, shelf: Shelf, told: Told) -> (io::Result<()>, Arc<Shelf>) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "report.json", "model.safetensors.index.json", "a.safetensors", "tokenizer.json", "1_Pooling/config.json"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name.repeat(3)).unwrap();
        }
        let shelf = Arc::new(shelf);
        let name = format!("s3://{bucket}");
        lock(&PLACES).insert(name.clone(), Arc::new(Known::new(Box::new(shelf.clone()))));
        (publish(folder.path(), &format!("{name}/a/b"), told), shelf)
    }

    #[test]
    fn what_makes_a_model_of_files_comes_last() {
        let (done, shelf) = published("whole", Shelf::default(), &|_| Ok(()));
        done.unwrap();
        let order = ["a.safetensors", "1_Pooling/config.json", "tokenizer.json", "config.json", "model.safetensors.index.json", "report.json"];
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
}

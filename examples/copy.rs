//! Copies the files of a folder to a bucket in the ranges and parts that `compress` uses, without
//! processing them: the baseline of `scripts/check remote`.
//!
//! ```text
//! cargo run --example copy -- s3://bucket/from s3://bucket/to
//! ```
#![allow(clippy::print_stderr)]

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use compress_core::files::{self, Destination, File, NewFile};

/// Bytes per read.
const RANGE: u64 = 1 << 20;
/// Number of reading threads.
const THREADS: usize = 4;

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let done = match arguments.as_slice() {
        [from, to] => copy(from, to),
        _ => Err(io::Error::other("usage: copy FROM TO")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let nothing = std::env::temp_dir().join(format!("compress-copy-{}", std::process::id()));
    std::fs::create_dir(&nothing)?;
    let destination = Destination::remote(to, &nothing)?;
    let done = files::files(from)?.iter().try_for_each(|path| {
        let file = File::open(path)?;
        let name = path.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidInput)?;
        let (_, target) = destination.create(name, file.length())?;
        ranges(&file, &target)?;
        target.finish().map(drop)
    });
    let done = done.and_then(|()| destination.publish(&|_| true));
    std::fs::remove_dir(&nothing)?;
    done
}

fn ranges(file: &File, target: &NewFile) -> io::Result<()> {
    let next = AtomicU64::new(0);
    let work = || -> io::Result<()> {
        let mut bytes = Vec::new();
        loop {
            let begin = next.fetch_add(RANGE, Ordering::Relaxed);
            if begin >= file.length() {
                return Ok(());
            }
            let end = (begin + RANGE).min(file.length());
            bytes.resize((end - begin) as usize, 0);
            file.read_exact_at(&mut bytes, begin)?;
            target.write_all_at(&bytes, begin)?;
            target.mark_final(begin..end)?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread ended without an answer"))))
    })
}

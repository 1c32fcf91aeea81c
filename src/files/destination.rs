//! Where files are written: into a folder of this machine, or, what is large, to another machine as it is made.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{remote, remote_name};

/// A folder that files are written into. One for another machine is a folder of this one for what is small, and files that are made
/// with [`create`](Destination::create) go where they belong as they are written. Dropped before it is published, nothing of them is left.
#[derive(Debug)]
pub struct Destination {
    folder: PathBuf,
    away: Option<Away>,
}

#[derive(Debug)]
struct Away {
    target: PathBuf,
    upload: remote::Upload,
    /// Names of files that are made there.
    made: Mutex<BTreeSet<String>>,
}

impl Destination {
    /// A folder of this machine.
    pub fn here(folder: impl Into<PathBuf>) -> Destination {
        Destination { folder: folder.into(), away: None }
    }

    /// A folder of another machine, where there is none of its name yet. What is small is made in a `folder` of this one first.
    ///
    /// # Errors
    /// It is there, another run writes it, or it cannot be written to.
    pub fn away(target: &Path, folder: impl Into<PathBuf>) -> io::Result<Destination> {
        let name = remote_name(target).ok_or(io::ErrorKind::InvalidInput)?;
        let away = Away { target: target.to_owned(), upload: remote::Upload::begin(name)?, made: Mutex::default() };
        Ok(Destination { folder: folder.into(), away: Some(away) })
    }

    /// The folder of this machine.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Whether files that are made with [`create`](Destination::create) go to another machine.
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Whether two runs that write the same name at once may both go on, since where they write nothing can refuse the second.
    pub fn is_shared(&self) -> bool {
        self.away.as_ref().is_some_and(|away| away.upload.is_shared())
    }

    /// Makes a file of so many bytes, and says where it will be.
    ///
    /// # Errors
    /// It is there already, or cannot be made.
    pub fn create(&self, name: &str, length: u64) -> io::Result<(PathBuf, NewFile)> {
        match &self.away {
            Some(away) => {
                made(away).insert(name.to_owned());
                Ok((away.target.join(name), NewFile(Bytes::Away(away.upload.create(name, length)))))
            }
            None => {
                let path = self.folder.join(name);
                let file = fs::File::options().read(true).write(true).create_new(true).open(&path)?;
                Ok((path, NewFile(Bytes::Here { file, length })))
            }
        }
    }

    /// Where a file of this name is.
    pub fn place(&self, name: &str) -> PathBuf {
        let folder = self.away.as_ref().filter(|away| made(away).contains(name)).map_or(&self.folder, |away| &away.target);
        folder.join(name)
    }

    /// Puts the files of the folder of this machine beside those that are on the other one, those last that make a model of the others; each is
    /// read back. `told` is given the bytes that are done, twice those of the files in all, and says whether to go on. Nothing to do where all
    /// stays here.
    ///
    /// # Errors
    /// A file cannot be written or does not read back as it is, or `told` says no. Then nothing is left there.
    pub fn publish(&self, told: &(dyn Fn(u64) -> bool + Sync)) -> io::Result<()> {
        let Some(away) = &self.away else { return Ok(()) };
        away.upload.publish(&self.folder, &|bytes| if told(bytes) { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) })
    }
}

fn made(away: &Away) -> MutexGuard<'_, BTreeSet<String>> {
    away.made.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is written at any place by any thread.
#[derive(Debug)]
pub struct NewFile(Bytes);

#[derive(Debug)]
enum Bytes {
    Here { file: fs::File, length: u64 },
    Away(remote::Outgoing),
}

impl NewFile {
    /// Writes bytes from a place on.
    ///
    /// # Errors
    /// They cannot be written, or an earlier part of them could not be sent.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        match &self.0 {
            Bytes::Here { file, .. } => file.write_all_at(bytes, at),
            Bytes::Away(file) => file.write_all_at(bytes, at),
        }
    }

    /// Reads what was written and is not [`settled`](NewFile::settled).
    ///
    /// # Errors
    /// It cannot be read, or is gone from here.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match &self.0 {
            Bytes::Here { file, .. } => file.read_exact_at(bytes, at),
            Bytes::Away(file) => file.read_exact_at(bytes, at),
        }
    }

    /// Says, once for each byte, that these are as they are meant, and may go where they belong.
    ///
    /// # Errors
    /// They cannot be sent.
    pub fn settled(&self, range: Range<u64>) -> io::Result<()> {
        match &self.0 {
            Bytes::Here { .. } => Ok(()),
            Bytes::Away(file) => file.settled(range),
        }
    }

    /// Ends it, when all of it is settled; whether its bytes have left this machine, so that only reading them tells what they have become.
    ///
    /// # Errors
    /// It has not the length that was said, or cannot be ended.
    pub fn finish(&self) -> io::Result<bool> {
        match &self.0 {
            Bytes::Away(file) => file.finish().map(|()| true),
            Bytes::Here { file, length } if file.metadata()?.len() == *length => Ok(false),
            Bytes::Here { .. } => Err(io::Error::other("has not the length that it was to have")),
        }
    }
}

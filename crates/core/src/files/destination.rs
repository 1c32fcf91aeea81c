//! Destinations of output files: a local folder, a folder in a bucket, to which large files are uploaded
//! while they are written, or a repository of the Hub, to which a local folder is committed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{remote, remote_name};
use crate::error::{Error, Result};

/// A folder for output files. For a bucket, small files are staged in a local folder, and files created
/// with [`create`](Destination::create) are uploaded while they are written. If it is dropped before it is
/// published, everything uploaded is removed. For a repository of the Hub, all files are staged.
#[derive(Debug)]
pub struct Destination {
    folder: PathBuf,
    remote: Option<Remote>,
}

#[derive(Debug)]
enum Remote {
    Bucket(BucketFolder),
    Hub(remote::HubUpload),
}

#[derive(Debug)]
struct BucketFolder {
    target: PathBuf,
    upload: remote::Upload,
    /// Names of the files created with [`create`](Destination::create).
    created: Mutex<BTreeSet<String>>,
}

impl Destination {
    /// A local folder.
    pub fn local(folder: impl Into<PathBuf>) -> Destination {
        Destination { folder: folder.into(), remote: None }
    }

    /// A remote folder. Small files, or all files for the Hub, are staged in the local `folder`. Fails if a
    /// folder in a bucket exists or another run is writing it.
    pub fn remote(target: &Path, folder: impl Into<PathBuf>) -> io::Result<Destination> {
        let name = remote_name(target).ok_or(io::ErrorKind::InvalidInput)?;
        let remote = if remote::is_streamed(name) {
            Remote::Bucket(BucketFolder { target: target.to_owned(), upload: remote::Upload::begin(name)?, created: Mutex::default() })
        } else {
            Remote::Hub(remote::HubUpload::begin(name)?)
        };
        Ok(Destination { folder: folder.into(), remote: Some(remote) })
    }

    /// The local folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Whether the files are uploaded to another machine.
    pub fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// Whether files created with [`create`](Destination::create) are uploaded while they are written.
    pub fn is_streamed(&self) -> bool {
        self.bucket().is_some()
    }

    fn bucket(&self) -> Option<&BucketFolder> {
        match &self.remote {
            Some(Remote::Bucket(bucket)) => Some(bucket),
            Some(Remote::Hub(_)) | None => None,
        }
    }

    /// Whether two concurrent runs could both write the same folder, because the backend has no
    /// conditional writes.
    pub fn can_race(&self) -> bool {
        self.bucket().is_some_and(|bucket| bucket.upload.can_race())
    }

    /// Creates a file of `length` bytes. Returns its final location too.
    pub fn create(&self, name: &str, length: u64) -> io::Result<(PathBuf, NewFile)> {
        match self.bucket() {
            Some(bucket) => {
                created(bucket).insert(name.to_owned());
                Ok((bucket.target.join(name), NewFile(Bytes::Remote(bucket.upload.create(name, length)))))
            }
            None => {
                let path = self.folder.join(name);
                let file = fs::File::options().read(true).write(true).create_new(true).open(&path)?;
                Ok((path, NewFile(Bytes::Local { file, length })))
            }
        }
    }

    /// Location of a file of this destination.
    pub fn location(&self, name: &str) -> PathBuf {
        let folder = self.bucket().filter(|bucket| created(bucket).contains(name)).map_or(&self.folder, |bucket| &bucket.target);
        folder.join(name)
    }

    /// The folder in which all files can be read before they are published: the local folder, or that in the
    /// bucket, whose staged files are read from the disk. Files that are created later are not in it.
    pub fn readable(&self) -> Result<&Path> {
        let Some(bucket) = self.bucket() else { return Ok(&self.folder) };
        bucket.upload.overlay(&self.folder).map_err(Error::io("list", &bucket.target))?;
        Ok(&bucket.target)
    }

    /// Uploads the files of the local folder. In a bucket, files that complete the model are last, and each
    /// is verified by reading it back. In a repository, all files appear with one commit. `progress`
    /// receives the number of additional bytes processed, in total twice the size of the files, and returns
    /// whether to continue. Does nothing for local destinations. Fails if `progress` returns `false` or a
    /// file reads back differently. Then everything uploaded is removed from a bucket, and the branch of a
    /// repository is unchanged.
    pub fn publish(&self, progress: &(dyn Fn(u64) -> bool + Sync)) -> io::Result<()> {
        let progress = |bytes| if progress(bytes) { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) };
        match &self.remote {
            Some(Remote::Bucket(bucket)) => bucket.upload.publish(&self.folder, &progress),
            Some(Remote::Hub(upload)) => upload.publish(&self.folder, &progress),
            None => Ok(()),
        }
    }
}

fn created(bucket: &BucketFolder) -> MutexGuard<'_, BTreeSet<String>> {
    bucket.created.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An output file, which any thread can write at any offset.
#[derive(Debug)]
pub struct NewFile(Bytes);

#[derive(Debug)]
enum Bytes {
    Local { file: fs::File, length: u64 },
    Remote(remote::Outgoing),
}

impl NewFile {
    /// Writes bytes at an offset.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        match &self.0 {
            Bytes::Local { file, .. } => file.write_all_at(bytes, at),
            Bytes::Remote(file) => file.write_all_at(bytes, at),
        }
    }

    /// Reads bytes that were written and are not yet marked with [`mark_final`](NewFile::mark_final). Fails
    /// if the bytes were already uploaded.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match &self.0 {
            Bytes::Local { file, .. } => file.read_exact_at(bytes, at),
            Bytes::Remote(file) => file.read_exact_at(bytes, at),
        }
    }

    /// Marks bytes as final, so that they can be uploaded. Must be called once for each byte.
    pub fn mark_final(&self, range: Range<u64>) -> io::Result<()> {
        match &self.0 {
            Bytes::Local { .. } => Ok(()),
            Bytes::Remote(file) => file.mark_final(range),
        }
    }

    /// Completes the file, once all bytes are final. Returns whether it was uploaded, so that it can
    /// only be verified by downloading it. Fails if the file has a different length than specified.
    pub fn finish(&self) -> io::Result<bool> {
        match &self.0 {
            Bytes::Remote(file) => file.finish().map(|()| true),
            Bytes::Local { file, length } if file.metadata()?.len() == *length => Ok(false),
            Bytes::Local { .. } => Err(io::Error::other("does not have the specified length")),
        }
    }
}

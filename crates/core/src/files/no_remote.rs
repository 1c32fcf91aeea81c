//! Replacement of `remote` in builds without that feature: all remote names are rejected.

use std::io;

use super::{Entry, File, Kind};

/// Prefixes of remote names.
pub const SCHEMES: [&str; 6] = ["hf:", "https://", "http://", "s3://", "gs://", "az://"];

/// An open remote file. Uninhabited in this build.
#[derive(Debug, Clone)]
pub(super) enum Open {}

impl Open {
    pub fn read_exact_at(&self, _buffer: &mut [u8], _at: u64) -> io::Result<()> {
        match *self {}
    }

    pub fn sample_exact_at(&self, _buffer: &mut [u8], _at: u64) -> io::Result<()> {
        match *self {}
    }
}

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this build does not support remote files; build compress with the feature `remote`, or download the file")
}

pub(super) fn open(_name: &str) -> io::Result<File> {
    let open: io::Result<Open> = Err(refused());
    open.map(|open| File { length: 0, bytes: super::Bytes::Remote(open) })
}

pub(super) fn kind(_name: &str) -> io::Result<Kind> {
    Err(refused())
}

pub(super) fn list(_name: &str) -> io::Result<Vec<Entry>> {
    Err(refused())
}

pub(super) fn read(_name: &str) -> io::Result<Vec<u8>> {
    Err(refused())
}

pub(super) fn content_hash(_name: &str) -> io::Result<Option<String>> {
    Err(refused())
}

pub(super) fn check_content(_name: &str, _step: &dyn Fn(u64) -> bool) -> io::Result<()> {
    Err(refused())
}

/// An upload to a remote folder. Uninhabited in this build.
#[derive(Debug)]
pub(super) enum Upload {}

impl Upload {
    pub fn begin(_name: &str) -> io::Result<Upload> {
        Err(refused())
    }

    pub fn create(&self, _file: &str, _length: u64) -> Outgoing {
        match *self {}
    }

    pub fn can_race(&self) -> bool {
        match *self {}
    }

    pub fn overlay(&self, _folder: &std::path::Path) -> io::Result<()> {
        match *self {}
    }

    pub fn publish(&self, _folder: &std::path::Path, _progress: &(dyn Fn(u64) -> io::Result<()> + Sync)) -> io::Result<()> {
        match *self {}
    }
}

/// A file that is being uploaded. Uninhabited in this build.
#[derive(Debug)]
pub(super) struct Outgoing(Never);

#[derive(Debug)]
enum Never {}

impl Outgoing {
    pub fn write_all_at(&self, _bytes: &[u8], _at: u64) -> io::Result<()> {
        match self.0 {}
    }

    pub fn read_exact_at(&self, _bytes: &mut [u8], _at: u64) -> io::Result<()> {
        match self.0 {}
    }

    pub fn mark_final(&self, _range: std::ops::Range<u64>) -> io::Result<()> {
        match self.0 {}
    }

    pub fn finish(&self) -> io::Result<()> {
        match self.0 {}
    }
}

/// An output in a repository of the Hub. Uninhabited in this build.
#[derive(Debug)]
pub(super) enum HubUpload {}

impl HubUpload {
    pub fn begin(_name: &str) -> io::Result<HubUpload> {
        Err(refused())
    }

    pub fn publish(&self, _folder: &std::path::Path, _progress: &(dyn Fn(u64) -> io::Result<()> + Sync)) -> io::Result<()> {
        match *self {}
    }
}

pub(super) fn require_repository(_name: &str) -> io::Result<bool> {
    Err(refused())
}

/// Returns `true`, so that the error of creating the folder is reported.
pub(super) fn is_streamed(_name: &str) -> bool {
    true
}

/// Returns `true`, so that the error of opening the file is reported instead.
pub fn is_writable(_name: &str) -> bool {
    true
}

/// Short description of the supported remote locations.
pub fn describe() -> String {
    "none: built without the feature `remote`".into()
}

/// Does nothing.
pub fn prefetch(_path: &std::path::Path) {}

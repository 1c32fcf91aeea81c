//! In a build that reaches no other machines, names with a scheme are refused.

use std::io;

use super::{Entry, File, Kind};

/// How names begin that other builds understand.
pub const SCHEMES: [&str; 6] = ["hf:", "https://", "http://", "s3://", "gs://", "az://"];

/// A file of another machine, of which there is none here.
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
    io::Error::new(io::ErrorKind::Unsupported, "this build reaches no other machines: build compress with the feature `remote`, or download it")
}

pub(super) fn open(_name: &str) -> io::Result<File> {
    let open: io::Result<Open> = Err(refused());
    open.map(|open| File { length: 0, bytes: super::Bytes::Away(open) })
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

/// A folder of another machine that is written to, of which there is none here.
#[derive(Debug)]
pub(super) enum Upload {}

impl Upload {
    pub fn begin(_name: &str) -> io::Result<Upload> {
        Err(refused())
    }

    pub fn create(&self, _file: &str, _length: u64) -> Outgoing {
        match *self {}
    }

    pub fn is_shared(&self) -> bool {
        match *self {}
    }

    pub fn publish(&self, _folder: &std::path::Path, _told: &(dyn Fn(u64) -> io::Result<()> + Sync)) -> io::Result<()> {
        match *self {}
    }
}

/// A file on its way there.
#[derive(Debug)]
pub(super) struct Outgoing(Nothing);

#[derive(Debug)]
enum Nothing {}

impl Outgoing {
    pub fn write_all_at(&self, _bytes: &[u8], _at: u64) -> io::Result<()> {
        match self.0 {}
    }

    pub fn read_exact_at(&self, _bytes: &mut [u8], _at: u64) -> io::Result<()> {
        match self.0 {}
    }

    pub fn settled(&self, _range: std::ops::Range<u64>) -> io::Result<()> {
        match self.0 {}
    }

    pub fn finish(&self) -> io::Result<()> {
        match self.0 {}
    }
}

/// Whether files can be put where a name says: what opens it answers.
pub fn writes(_name: &str) -> bool {
    true
}

/// What of other machines can be reached, in a few words.
pub fn describe() -> String {
    "none: built without the feature `remote`".into()
}

/// Nothing.
pub fn prepare(_path: &std::path::Path) {}

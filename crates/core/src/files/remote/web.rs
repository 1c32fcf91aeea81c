//! Files on web servers, `https://host/path/model.safetensors`: single files only, because servers
//! provide no listings.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::http::{self, Address};
use super::{Backend, Found, lock};

struct Web {
    /// `https://host`.
    origin: String,
    files: Mutex<BTreeMap<String, Arc<Address>>>,
}

/// Parses a name into origin and path.
pub(super) fn address(name: &str) -> io::Result<super::Address> {
    http::require_private(name)?;
    let host = name.find("://").map_or(0, |at| at.saturating_add(3));
    let (origin, inside) = match name.get(host..).and_then(|rest| rest.find('/')).map(|at| at.saturating_add(host)) {
        Some(at) => (name.get(..at).unwrap_or(name), name.get(at.saturating_add(1)..).unwrap_or_default()),
        None => (name, ""),
    };
    let root = origin.to_owned();
    let opened = Web { origin: root.clone(), files: Mutex::default() };
    Ok(super::Address { root, inside: inside.to_owned(), open: Box::new(move || Ok(Box::new(opened) as Box<dyn Backend>)) })
}

impl Web {
    fn address(&self, name: &str) -> Arc<Address> {
        let new = || Arc::new(Address::new(format!("{}/{}", self.origin, name.replace(' ', "%20")), None));
        lock(&self.files).entry(name.to_owned()).or_insert_with(new).clone()
    }
}

impl Backend for Web {
    fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
        Ok(Vec::new())
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        match self.address(name).range(0..1, None, None) {
            Ok(received) => {
                Ok(Some(Found { name: name.to_owned(), bytes: received.total, version: http::version(&received.headers), sha256: None, local: None }))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.address(&file.name).range(range, Some(file.bytes), file.version.as_deref()).map(|received| received.bytes)
    }
}

//! Files of web servers, `https://host/path/model.safetensors`: one at a time, since servers do not say what else they have.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::http::{self, Address};
use super::{Found, Place, lock};

struct Web {
    /// `https://host`.
    origin: String,
    files: Mutex<BTreeMap<String, Arc<Address>>>,
}

/// Takes such a name apart.
pub(super) fn address(name: &str) -> io::Result<super::Address> {
    http::require_private(name)?;
    let host = name.find("://").map_or(0, |at| at.saturating_add(3));
    let (origin, inside) = match name.get(host..).and_then(|rest| rest.find('/')).map(|at| at.saturating_add(host)) {
        Some(at) => (name.get(..at).unwrap_or(name), name.get(at.saturating_add(1)..).unwrap_or_default()),
        None => (name, ""),
    };
    let place = origin.to_owned();
    let opened = Web { origin: place.clone(), files: Mutex::default() };
    Ok(super::Address { place, inside: inside.to_owned(), open: Box::new(move || Ok(Box::new(opened) as Box<dyn Place>)) })
}

impl Web {
    fn address(&self, name: &str) -> Arc<Address> {
        let new = || Arc::new(Address::new(format!("{}/{}", self.origin, name.replace(' ', "%20")), None));
        lock(&self.files).entry(name.to_owned()).or_insert_with(new).clone()
    }
}

impl Place for Web {
    fn list(&self, _folder: &str) -> io::Result<Vec<Found>> {
        Ok(Vec::new())
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        match self.address(name).range(0..1, None, None) {
            Ok(came) => Ok(Some(Found { name: name.to_owned(), bytes: came.total, version: http::version(&came.headers), sha256: None, here: None })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.address(&file.name).range(range, Some(file.bytes), file.version.as_deref()).map(|came| came.bytes)
    }
}

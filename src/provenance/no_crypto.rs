//! Stand-in for `crypto` in builds without the feature `provenance`: outputs are neither signed nor hashed
//! with SHA-256.

use std::convert::Infallible;
use std::path::Path;

use crate::error::{Error, Result};
use crate::work::Work;

/// Whether this build can sign and hash.
pub(super) const AVAILABLE: bool = false;
/// The error of builds that cannot.
pub(super) const MISSING: &str = "this build writes no provenance: build it with the feature `provenance`";

/// A private key that signs models, which this build cannot use.
#[derive(Debug)]
pub struct SigningKey(Infallible);

impl SigningKey {
    /// Fails, because this build has no cryptography.
    ///
    /// # Errors
    /// Always.
    pub fn open(_path: impl AsRef<Path>) -> Result<SigningKey> {
        Err(Error::option("sign", MISSING))
    }

    /// The public key.
    pub fn public(&self) -> PublicKey {
        match self.0 {}
    }

    pub(super) fn path(&self) -> &Path {
        match self.0 {}
    }

    pub(super) fn sign(&self, _message: &[u8]) -> Result<Vec<u8>> {
        match self.0 {}
    }
}

/// A public key that verifies signatures of models, which this build cannot use.
#[derive(Debug, Clone)]
pub struct PublicKey(Infallible);

impl PublicKey {
    /// Fails, because this build has no cryptography.
    ///
    /// # Errors
    /// Always.
    pub fn open(_path: impl AsRef<Path>) -> Result<PublicKey> {
        Err(Error::option("key", MISSING))
    }

    /// The SHA-256 of the PEM file of the key.
    pub fn fingerprint(&self) -> String {
        match self.0 {}
    }

    pub(super) fn verifies(&self, _message: &[u8], _signature: &[u8]) -> bool {
        match self.0 {}
    }
}

pub(super) fn encode(_bytes: &[u8]) -> String {
    String::new()
}

pub(super) fn decode(_text: &str) -> Option<Vec<u8>> {
    None
}

pub(super) fn sha256(_bytes: &[u8]) -> String {
    String::new()
}

pub(super) fn sha256_file(_path: &Path, _work: &Work) -> Result<String> {
    Err(Error::option("sbom", MISSING))
}

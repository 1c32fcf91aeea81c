//! Provenance of an output: its signature and its software bill of materials.
//!
//! The signature is that of the OpenSSF's model signing specification, which the Python package
//! `model_signing` reads and writes. The bill of materials is an ML-BOM of CycloneDX.

#[cfg(feature = "provenance")]
mod crypto;
#[cfg(not(feature = "provenance"))]
#[path = "no_crypto.rs"]
mod crypto;
mod sbom;
mod signature;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use crypto::{PublicKey, SigningKey};
pub use signature::verify_signature;

pub(crate) use sbom::{Bill, check as check_sbom};

use crate::error::{Error, Result};
use crate::files;
use crate::model::Model;
use crate::output::SIGNATURE;
use crate::recipe::Sbom;
use crate::report::SignatureFile;
use crate::work::Work;

/// Hexadecimal SHA-256 of files, by name in the output.
pub(crate) type Hashes = BTreeMap<String, String>;

/// Records of provenance that a run writes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Provenance {
    /// Format of the bill of materials.
    pub sbom: Option<Sbom>,
    /// Key that signs the output.
    pub key: Option<Arc<SigningKey>>,
}

impl Provenance {
    /// Whether a run must hash its files.
    pub fn needs_hashes(&self) -> bool {
        self.sbom.is_some() || self.key.is_some()
    }

    /// Checks that this build can write the records.
    pub fn check(&self) -> Result<()> {
        if self.needs_hashes() && !crypto::AVAILABLE {
            return Err(Error::option("sbom", crypto::MISSING));
        }
        Ok(())
    }

    /// Checks that the names of copied files can be listed, and that none of these files is the private key.
    pub fn check_input(&self, model: &Model) -> Result<()> {
        if let Some(file) = model.auxiliary.files.iter().find(|file| self.needs_hashes() && file.to_str().is_none()) {
            let what = if self.key.is_some() { "sign" } else { "sbom" };
            return Err(Error::option(what, format!("the name of the file {} is not UTF-8 and cannot be listed: rename or remove it", file.display())));
        }
        let Some(key) = self.key_path() else { return Ok(()) };
        let key = std::fs::canonicalize(key).unwrap_or_else(|_| key.to_owned());
        let is_key = |file: &PathBuf| std::fs::canonicalize(model.path_of(file)).is_ok_and(|path| path == key);
        if !files::is_remote(&model.path) && model.auxiliary.files.iter().any(is_key) {
            let reason = format!("{} is in the model's folder and would be copied to the output: move the private key to another folder", key.display());
            return Err(Error::option("sign", reason));
        }
        Ok(())
    }

    /// Checks that no file of the output, by name and hash, has the content of the key: it would be
    /// published.
    pub fn check_files(&self, hashes: &Hashes, work: &Work) -> Result<()> {
        let Some(key) = self.key_path() else { return Ok(()) };
        let secret = crypto::sha256_file(key, work)?;
        match hashes.iter().find(|(_, hash)| **hash == secret) {
            Some((name, _)) => Err(Error::option("sign", format!("{name} would be published, but it is a copy of the private key: remove it from the input"))),
            None => Ok(()),
        }
    }

    /// Checks that the output is a folder, if it is signed.
    pub fn check_output(&self, output: &Path) -> Result<()> {
        match crate::output::file_name(output).filter(|_| self.key.is_some()) {
            Some(name) => Err(Error::option("sign", format!("the output {name} is a file, but a signature covers a folder: choose a folder as the output"))),
            None => Ok(()),
        }
    }

    /// The file of the private key.
    pub fn key_path(&self) -> Option<&Path> {
        self.key.as_deref().map(SigningKey::path)
    }

    /// The description of the signature for the report.
    pub fn signature(&self) -> Option<SignatureFile> {
        self.key.as_ref().map(|key| SignatureFile { path: SIGNATURE.to_owned(), public_key_sha256: key.public().fingerprint() })
    }

    /// The signature of files, if there is a key. `name` is the name of the model.
    pub fn sign(&self, name: &str, hashes: &Hashes) -> Result<Option<String>> {
        self.key.as_ref().map(|key| signature::sign(key, name, hashes)).transpose()
    }
}

/// Hashes files, given by name and path.
pub(crate) fn hash_files(files: &[(String, PathBuf)], work: &Work) -> Result<Hashes> {
    let length = |(_, path): &(String, PathBuf)| files::length(path).unwrap_or(0);
    let hashes = work.run("Hashing", files, length, |(_, path)| crypto::sha256_file(path, work))?;
    Ok(files.iter().map(|(name, _)| name.clone()).zip(hashes).collect())
}

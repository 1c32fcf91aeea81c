//! Signatures of model folders: bundles of Sigstore with a statement of in-toto about the SHA-256 of every
//! file, as specified by the OpenSSF's model signing project
//! (<https://github.com/sigstore/model-transparency/blob/main/docs/model_signing_format.md>).
//!
//! The signed message is the DSSE encoding of the statement. Files of version control systems are not part
//! of the model, and neither is the signature.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::crypto::{self, PublicKey, SigningKey};
use super::{Hashes, hash_files};
use crate::error::{Error, Result, counted};
use crate::files::{self, Kind};
use crate::output::SIGNATURE;
use crate::work::Work;

const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const PAYLOAD: &str = "application/vnd.in-toto+json";
const STATEMENT: &str = "https://in-toto.io/Statement/v1";
const PREDICATE: &str = "https://model_signing/signature/v1.0";
const FILES: &str = "files";
const ALGORITHM: &str = "sha256";
/// Files and folders at the top of a model that are not signed, in addition to the signature. They are the
/// ones that `model_signing` ignores by default.
const IGNORED: [&str; 4] = [".git", ".gitattributes", ".github", ".gitignore"];
/// Number of file names that a finding lists.
const LISTED: usize = 8;

/// A bundle of Sigstore. Fields that only signatures with certificates have are not read.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Envelope,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    public_key: Option<KeyId>,
    /// Entries of a transparency log, which signatures with keys do not have.
    #[serde(default, skip_deserializing)]
    tlog_entries: [(); 0],
}

#[derive(Serialize, Deserialize)]
struct KeyId {
    /// The SHA-256 of the PEM file of the public key. Old signatures have none.
    hint: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<Signature>,
}

#[derive(Serialize, Deserialize)]
struct Signature {
    sig: String,
    #[serde(default)]
    keyid: String,
}

#[derive(Serialize, Deserialize)]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    predicate: Predicate,
}

#[derive(Serialize, Deserialize)]
struct Subject {
    name: String,
    digest: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct Predicate {
    serialization: Serialization,
    resources: Vec<Resource>,
}

#[derive(Serialize, Deserialize)]
struct Serialization {
    method: String,
    hash_type: String,
    allow_symlinks: bool,
    #[serde(default)]
    ignore_paths: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Resource {
    name: String,
    algorithm: String,
    digest: String,
}

/// The DSSE encoding of a payload, which is signed.
fn message(payload: &[u8]) -> Vec<u8> {
    [format!("DSSEv1 {} {PAYLOAD} {} ", PAYLOAD.len(), payload.len()).as_bytes(), payload].concat()
}

/// The SHA-256 of all digests in order, which identifies a model. `None` if a digest is malformed.
fn root_digest<'d>(digests: impl Iterator<Item = &'d str>) -> Option<String> {
    let mut bytes = Vec::new();
    for digest in digests {
        // Both hashes have 32 bytes, so that this type parses the hexadecimal digits of SHA-256 too.
        let hash: blake3::Hash = digest.parse().ok()?;
        bytes.extend(hash.as_bytes());
    }
    Some(crypto::sha256(&bytes))
}

/// Whether a file is inside of an ignored file or folder.
fn is_ignored(name: &str, ignored: &[String]) -> bool {
    let inside = |outer: &str| !outer.is_empty() && outer != "." && Path::new(name).starts_with(outer);
    name == SIGNATURE || IGNORED.iter().copied().chain(ignored.iter().map(String::as_str)).any(inside)
}

/// The contents of the signature of a model with these files.
pub(super) fn sign(key: &SigningKey, name: &str, hashes: &Hashes) -> Result<String> {
    let mut files: Vec<(&String, &String)> = hashes.iter().filter(|(name, _)| !is_ignored(name, &[])).collect();
    // The order of paths, component by component.
    files.sort_by(|a, b| a.0.split('/').cmp(b.0.split('/')));
    let malformed = |e: &dyn std::fmt::Display| Error::malformed(Path::new(SIGNATURE), e);
    let root = root_digest(files.iter().map(|(_, hash)| hash.as_str())).ok_or_else(|| malformed(&"a hash is malformed"))?;
    let resource = |(name, hash): (&String, &String)| Resource { name: name.clone(), algorithm: ALGORITHM.into(), digest: hash.clone() };
    let statement = Statement {
        kind: STATEMENT.into(),
        subject: vec![Subject { name: name.to_owned(), digest: BTreeMap::from([(ALGORITHM.into(), root)]) }],
        predicate_type: PREDICATE.into(),
        predicate: Predicate {
            serialization: Serialization {
                method: FILES.into(),
                hash_type: ALGORITHM.into(),
                allow_symlinks: false,
                ignore_paths: [SIGNATURE].iter().chain(&IGNORED).map(|name| (*name).to_owned()).collect(),
            },
            resources: files.into_iter().map(resource).collect(),
        },
    };
    let payload = serde_json::to_vec(&statement).map_err(|e| malformed(&e))?;
    let bundle = Bundle {
        media_type: BUNDLE.into(),
        verification_material: Material { public_key: Some(KeyId { hint: Some(key.public().fingerprint()) }), tlog_entries: [] },
        dsse_envelope: Envelope {
            signatures: vec![Signature { sig: crypto::encode(&key.sign(&message(&payload))?), keyid: String::new() }],
            payload: crypto::encode(&payload),
            payload_type: PAYLOAD.into(),
        },
    };
    serde_json::to_string(&bundle).map_err(|e| malformed(&e))
}

/// Verifies the signature `model.sig` of a folder, which may also be one that `model_signing` has written:
/// it must have been made with this key, and the folder must contain exactly the signed files. Returns
/// whether it is valid, and a description of the result.
///
/// # Errors
/// The work was cancelled.
pub fn verify_signature(folder: &Path, key: &PublicKey, work: &Work) -> Result<(bool, String)> {
    match verify(folder, key, work) {
        Ok(files) => Ok((true, format!("the signature of the key {} is valid, and {} as signed", key.fingerprint(), are(files)))),
        Err(Error::Cancelled) => Err(Error::Cancelled),
        Err(Error::Malformed { reason, .. }) => Ok((false, reason)),
        Err(error) => Ok((false, error.to_string())),
    }
}

fn are(files: usize) -> String {
    format!("{} {}", counted(files, "file"), if files == 1 { "is" } else { "are" })
}

/// Verifies a signature. Returns the number of signed files.
fn verify(folder: &Path, key: &PublicKey, work: &Work) -> Result<usize> {
    let path = folder.join(SIGNATURE);
    let invalid = |reason: String| Error::malformed(&path, reason);
    let text = files::read_to_string(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => invalid("is missing: the output is not signed; `--sign KEY` signs an output when it is written".into()),
        _ => Error::io("read", &path)(e),
    })?;
    let bundle: Bundle = serde_json::from_str(&text).map_err(|e| invalid(format!("is not a bundle of Sigstore: {e}")))?;
    let predicate = open(&bundle, key).map_err(invalid)?;
    let signed = resources(&predicate).map_err(invalid)?;
    let mut present = Vec::new();
    list(folder, "", &mut present)?;
    let allows_links = predicate.serialization.allow_symlinks;
    let (mut files, mut unsigned, mut links) = (Vec::new(), Vec::new(), Vec::new());
    for (name, kind) in present {
        let path = folder.join(&name);
        match () {
            () if signed.contains_key(&name) && files::is_link(&path) && !allows_links => links.push(name),
            () if signed.contains_key(&name) && kind == Kind::File => files.push((name, path)),
            () if is_ignored(&name, &predicate.serialization.ignore_paths) => {}
            () => unsigned.push(name),
        }
    }
    let found = hash_files(&files, work)?;
    let missing = signed.keys().filter(|name| !found.contains_key(*name) && !links.contains(name));
    let changed = found.iter().filter(|(name, hash)| signed.get(*name) != Some(*hash)).map(|(name, _)| name);
    let findings = [
        ("changed", changed.collect::<Vec<_>>()),
        ("missing", missing.collect()),
        ("not signed", unsigned.iter().collect()),
        ("symbolic links, which the signature does not allow", links.iter().collect()),
    ];
    let findings: Vec<String> = findings.iter().filter(|(_, names)| !names.is_empty()).map(|(what, names)| format!("{what}: {}", listed(names))).collect();
    if findings.is_empty() { Ok(signed.len()) } else { Err(invalid(format!("the folder differs from the signed files: {}", findings.join("; ")))) }
}

/// The first names of a list.
fn listed(names: &[&String]) -> String {
    let more = if names.len() > LISTED { ", …" } else { "" };
    format!("{}{more}", names.iter().take(LISTED).map(|name| name.as_str()).collect::<Vec<_>>().join(", "))
}

/// Verifies the signature of a bundle, and returns the signed predicate.
fn open(bundle: &Bundle, key: &PublicKey) -> Result<Predicate, String> {
    let Bundle { media_type, verification_material, dsse_envelope: Envelope { payload, payload_type, signatures } } = bundle;
    if media_type != BUNDLE {
        return Err(format!("is of the type `{media_type}` instead of `{BUNDLE}`"));
    }
    let Some(id) = &verification_material.public_key else {
        return Err("was not signed with a key, but with a certificate or an identity: verify it with `model_signing`".into());
    };
    let fingerprint = key.fingerprint();
    if let Some(hint) = id.hint.as_ref().filter(|hint| !hint.is_empty() && **hint != fingerprint) {
        return Err(format!("was signed with another key: its public key has the SHA-256 {hint}, the specified one {fingerprint}"));
    }
    if payload_type != PAYLOAD {
        return Err(format!("signs a `{payload_type}` instead of `{PAYLOAD}`"));
    }
    let [signature] = signatures.as_slice() else { return Err(format!("has {} instead of one", counted(signatures.len(), "signature"))) };
    let (Some(payload), Some(signature)) = (crypto::decode(payload), crypto::decode(&signature.sig)) else { return Err("is not valid base64".into()) };
    if !key.verifies(&message(&payload), &signature) {
        return Err("the signature is not valid: the file was changed, or it was signed with another key".into());
    }
    let statement: Statement = serde_json::from_slice(&payload).map_err(|e| format!("signs no model: {e}"))?;
    if statement.kind != STATEMENT || statement.predicate_type != PREDICATE {
        return Err(format!("signs a statement of the type `{}` about `{}`, not a model", statement.kind, statement.predicate_type));
    }
    let [subject] = statement.subject.as_slice() else { return Err(format!("signs {} instead of one", counted(statement.subject.len(), "model"))) };
    let root = root_digest(statement.predicate.resources.iter().map(|resource| resource.digest.as_str()));
    if root.is_none() || root.as_ref() != subject.digest.get(ALGORITHM) {
        return Err("the digest of the model differs from that of its files".into());
    }
    Ok(statement.predicate)
}

/// The signed files with their hashes.
fn resources(predicate: &Predicate) -> Result<Hashes, String> {
    let Serialization { method, hash_type, .. } = &predicate.serialization;
    if method != FILES || hash_type != ALGORITHM {
        return Err(format!("signs `{method}` with `{hash_type}`, but only `{FILES}` with `{ALGORITHM}` is supported: verify it with `model_signing`"));
    }
    let mut signed = Hashes::new();
    for Resource { name, algorithm, digest } in &predicate.resources {
        let is_inside = !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        if !is_inside || algorithm != ALGORITHM || signed.insert(name.clone(), digest.clone()).is_some() {
            return Err(format!("signs `{name}` with `{algorithm}`, instead of one file of the folder with its SHA-256"));
        }
    }
    Ok(signed)
}

/// Lists the entries of a folder and of the folders in it, except the folders themselves.
fn list(root: &Path, inside: &str, found: &mut Vec<(String, Kind)>) -> Result<()> {
    let folder: PathBuf = if inside.is_empty() { root.to_owned() } else { root.join(inside) };
    for files::Entry { path, kind } in files::list(&folder).map_err(Error::io("list", &folder))? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = if inside.is_empty() { name.into_owned() } else { format!("{inside}/{name}") };
        match kind {
            // Hooks and objects of a repository are not part of the model.
            Kind::Folder if is_ignored(&name, &[]) => {}
            Kind::Folder => list(root, &name, found)?,
            _ => found.push((name, kind)),
        }
    }
    Ok(())
}

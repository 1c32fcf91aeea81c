//! Keys, signatures and hashes.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine};
use ring::digest::{Context, SHA256};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm,
    EcdsaVerificationAlgorithm, KeyPair, UnparsedPublicKey,
};

use crate::error::{Error, Result};
use crate::files::File;
use crate::work::Work;

/// Whether this build can sign and hash.
pub(super) const AVAILABLE: bool = true;
/// The error of builds that cannot.
pub(super) const MISSING: &str = "";

/// Bytes read at once.
const BUFFER: usize = 1 << 20;

/// Tags of DER, the binary encoding of keys.
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const SEQUENCE: u8 = 0x30;

/// An elliptic curve with its hash function.
struct Curve {
    name: &'static str,
    /// Contents of the DER sequence `AlgorithmIdentifier`: the identifiers of EC keys and of the curve.
    algorithm: &'static [u8],
    /// Length of an uncompressed point in bytes.
    point: usize,
    signing: &'static EcdsaSigningAlgorithm,
    verification: &'static EcdsaVerificationAlgorithm,
}

static CURVES: [Curve; 2] = [
    Curve {
        name: "P-256",
        algorithm: &[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07],
        point: 65,
        signing: &ECDSA_P256_SHA256_ASN1_SIGNING,
        verification: &ECDSA_P256_SHA256_ASN1,
    },
    Curve {
        name: "P-384",
        algorithm: &[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x22],
        point: 97,
        signing: &ECDSA_P384_SHA384_ASN1_SIGNING,
        verification: &ECDSA_P384_SHA384_ASN1,
    },
];

impl Curve {
    /// The DER encoding `SubjectPublicKeyInfo` of a public key.
    fn public_key(&self, point: &[u8]) -> Vec<u8> {
        der(SEQUENCE, &[&der(SEQUENCE, &[self.algorithm]), &der(BIT_STRING, &[&[0], point])])
    }

    /// The point of a public key in the encoding of [`public_key`](Curve::public_key).
    fn point<'d>(&self, der: &'d [u8]) -> Option<&'d [u8]> {
        let start = self.public_key(&vec![0; self.point]).len().checked_sub(self.point)?;
        let (prefix, point) = der.split_at_checked(start)?;
        (self.public_key(point) == [prefix, point].concat() && point.len() == self.point).then_some(point)
    }

    /// A private key, in PKCS #8 or as `ECPrivateKey`.
    fn key_pair(&self, key: &[u8], is_pkcs8: bool) -> Option<EcdsaKeyPair> {
        let wrapped = || der(SEQUENCE, &[&der(INTEGER, &[&[0]]), &der(SEQUENCE, &[self.algorithm]), &der(OCTET_STRING, &[key])]);
        let key = if is_pkcs8 { key.to_owned() } else { wrapped() };
        EcdsaKeyPair::from_pkcs8(self.signing, &key, &SystemRandom::new()).ok()
    }
}

/// The DER encoding of a value of less than 64 KiB.
fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let [.., high, low] = content.len().to_be_bytes();
    let length: &[u8] = match (high, low) {
        (0, 0..0x80) => &[low],
        (0, _) => &[0x81, low],
        _ => &[0x82, high, low],
    };
    [&[tag][..], length, &content].concat()
}

/// A private key that signs models: ECDSA with the curve P-256 or P-384.
pub struct SigningKey {
    path: PathBuf,
    curve: &'static Curve,
    pair: EcdsaKeyPair,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("path", &self.path).field("curve", &self.curve.name).finish_non_exhaustive()
    }
}

impl SigningKey {
    /// Reads a private key from a PEM file, in PKCS #8 (`PRIVATE KEY`) or SEC 1 (`EC PRIVATE KEY`).
    ///
    /// # Errors
    /// The file cannot be read, or it contains no private key of these kinds, or an encrypted one.
    pub fn open(path: impl AsRef<Path>) -> Result<SigningKey> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        let wrong = |reason: &str| Error::option("sign", format!("{}: {reason}", path.display()));
        let Some(Block { label, body }) = blocks(&text).find(|block| block.label.ends_with("KEY")) else {
            return Err(wrong("contains no private key in PEM: `openssl ecparam -name prime256v1 -genkey -noout -out KEY` creates one"));
        };
        let is_pkcs8 = match label {
            "ENCRYPTED PRIVATE KEY" => return Err(wrong(ENCRYPTED)),
            // Headers such as `DEK-Info: ...` precede an encrypted key.
            _ if body.contains(':') => return Err(wrong(ENCRYPTED)),
            "PRIVATE KEY" => true,
            "EC PRIVATE KEY" => false,
            "PUBLIC KEY" => return Err(wrong("is a public key: a model is signed with the private key")),
            other => return Err(wrong(&format!("is of the kind {other}: only elliptic curve keys in PEM (PKCS #8 or SEC 1) are supported"))),
        };
        let key = decode(body).ok_or_else(|| wrong("is not valid PEM"))?;
        let found = CURVES.iter().find_map(|curve| Some((curve, curve.key_pair(&key, is_pkcs8)?)));
        let (curve, pair) = found.ok_or_else(|| {
            wrong(match is_rsa(&key) {
                true => "is an RSA key, and only keys of the curves P-256 and P-384 sign models: `openssl ecparam -name prime256v1 -genkey -noout -out KEY` creates one",
                false => "is not a key of the curve P-256 or P-384, or lacks the public key, which `openssl ec -in KEY -out NEW` adds",
            })
        })?;
        Ok(SigningKey { path: path.to_owned(), curve, pair })
    }

    /// The public key.
    pub fn public(&self) -> PublicKey {
        PublicKey { curve: self.curve, point: self.pair.public_key().as_ref().to_owned() }
    }

    /// The file from which the key was read.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The signature of a message.
    pub(super) fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let signed = self.pair.sign(&SystemRandom::new(), message);
        signed.map(|signature| signature.as_ref().to_owned()).map_err(|_| Error::run("sign", "the random number generator of the system failed", ""))
    }
}

/// The object identifier `rsaEncryption`, in DER.
const RSA: [u8; 11] = [0x06, 0x09, 0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D, 0x01, 0x01, 0x01];

/// Whether a key in DER is one of RSA.
fn is_rsa(key: &[u8]) -> bool {
    key.windows(RSA.len()).any(|bytes| bytes == RSA)
}

/// Advice for an encrypted key.
const ENCRYPTED: &str = "is encrypted, which is not supported: decrypt it with `openssl pkey -in KEY -out DECRYPTED`";

/// A public key that verifies signatures of models.
#[derive(Clone)]
pub struct PublicKey {
    curve: &'static Curve,
    point: Vec<u8>,
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublicKey").field("curve", &self.curve.name).field("sha256", &self.fingerprint()).finish()
    }
}

impl PublicKey {
    /// Reads a public key from a PEM file (`PUBLIC KEY`).
    ///
    /// # Errors
    /// The file cannot be read, or it does not contain a public key of the curves P-256 or P-384.
    pub fn open(path: impl AsRef<Path>) -> Result<PublicKey> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        let wrong = |reason: &str| Error::option("key", format!("{}: {reason}", path.display()));
        let Some(Block { body, .. }) = blocks(&text).find(|block| block.label == "PUBLIC KEY") else {
            return Err(wrong(match blocks(&text).any(|block| block.label.ends_with("PRIVATE KEY")) {
                true => "is a private key: `openssl pkey -in KEY -pubout -out PUBLIC` writes its public key",
                false => "contains no public key in PEM (`PUBLIC KEY`)",
            }));
        };
        let key = decode(body).ok_or_else(|| wrong("is not valid PEM"))?;
        let found = CURVES.iter().find_map(|curve| Some(PublicKey { curve, point: curve.point(&key)?.to_owned() }));
        found.ok_or_else(|| {
            wrong(match is_rsa(&key) {
                true => "is a public RSA key: signatures are verified with keys of the curve P-256 or P-384",
                false => "is not an uncompressed public key of the curve P-256 or P-384",
            })
        })
    }

    /// The SHA-256 of the PEM file of the key, by which signatures identify it.
    pub fn fingerprint(&self) -> String {
        let text = encode(&self.curve.public_key(&self.point));
        let mut pem = "-----BEGIN PUBLIC KEY-----\n".to_owned();
        for (column, c) in text.chars().enumerate() {
            if column > 0 && column.is_multiple_of(64) {
                pem.push('\n');
            }
            pem.push(c);
        }
        pem += "\n-----END PUBLIC KEY-----\n";
        sha256(pem.as_bytes())
    }

    /// Whether this is the signature of a message.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(self.curve.verification, &self.point).verify(message, signature).is_ok()
    }
}

/// A block of a PEM file.
struct Block<'t> {
    /// Its kind, such as `PUBLIC KEY`.
    label: &'t str,
    body: &'t str,
}

/// The blocks of a PEM file.
fn blocks(text: &str) -> impl Iterator<Item = Block<'_>> {
    text.split("-----BEGIN ").skip(1).filter_map(|block| {
        let (label, rest) = block.split_once("-----")?;
        let (body, _) = rest.split_once("-----END ")?;
        Some(Block { label, body })
    })
}

/// Base64 of bytes.
pub(super) fn encode(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// Bytes from base64, which may contain white space.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let text: String = text.split_ascii_whitespace().collect();
    BASE64_STANDARD.decode(text).ok()
}

/// The SHA-256 of bytes in hexadecimal digits.
pub(super) fn sha256(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA256);
    context.update(bytes);
    hexadecimal(context)
}

/// The SHA-256 of a file in hexadecimal digits.
pub(super) fn sha256_file(path: &Path, work: &Work) -> Result<String> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0; BUFFER];
    let mut at = 0;
    while at < file.length() {
        let length = usize::try_from(file.length().saturating_sub(at)).unwrap_or(BUFFER).min(BUFFER);
        buffer.resize(length, 0);
        file.read_exact_at(&mut buffer, at).map_err(Error::io("read", path))?;
        context.update(&buffer);
        at = at.saturating_add(length as u64);
        work.advance(length as u64)?;
    }
    Ok(hexadecimal(context))
}

fn hexadecimal(context: Context) -> String {
    context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

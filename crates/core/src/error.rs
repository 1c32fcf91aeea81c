//! The error type of the crate. Messages name the file, tensor, option or recipe line, and hints name
//! the next step.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Hint about values that are not finite.
const NOT_FINITE_HINT: &str =
    "the checkpoint is damaged, or a pass computed these values, as a training with a large learning rate does; set `allow_nonfinite` to keep them";

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A text that is not a value of the type it is parsed as.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(String);

#[doc(hidden)]
impl From<String> for ParseError {
    fn from(reason: String) -> ParseError {
        ParseError(reason)
    }
}

#[doc(hidden)]
impl From<&str> for ParseError {
    fn from(reason: &str) -> ParseError {
        ParseError(reason.to_owned())
    }
}

/// An error that names the file, tensor, option or recipe line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An I/O error of the operating system.
    #[error("cannot {action} {}: {source}", redact_path(path).display())]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// A file with invalid content.
    #[error("{}: {reason}", redact_path(path).display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Description of the defect.
        reason: String,
    },
    /// A tensor that a pass or a format does not support.
    #[error("tensor `{name}`: {reason}")]
    Tensor {
        /// Name in the checkpoint.
        name: String,
        /// Why the tensor is rejected.
        reason: String,
        /// Suggested fix.
        hint: String,
    },
    /// A NaN or infinite weight of the input, or of the result of a pass.
    #[error("tensor `{name}` holds {}", counted(*count as usize, "NaN or infinite value"))]
    NotFinite {
        /// Name in the checkpoint.
        name: String,
        /// Number of such values.
        count: u64,
    },
    /// A `targets` or `ignore` pattern that matches no tensor.
    #[error("`{field}` pattern `{pattern}` matches no tensor")]
    NoMatch {
        /// The recipe key of the pattern.
        field: &'static str,
        /// The pattern.
        pattern: String,
        /// The most similar tensor name, if any.
        nearest: Option<String>,
    },
    /// An option with an invalid value.
    #[error("{what}: {reason}")]
    Option {
        /// The option, with its pass or format.
        what: String,
        /// Why the value is invalid.
        reason: String,
    },
    /// An inconsistent graph, or a configuration from which no graph can be built.
    #[error("{what}: {reason}")]
    Graph {
        /// The node, the value, or the file that describes it.
        what: String,
        /// Description of the problem.
        reason: String,
    },
    /// A model that cannot run on these inputs or on this machine.
    #[error("{what}: {reason}")]
    Run {
        /// The input, the node or the device.
        what: String,
        /// Description of the failure.
        reason: String,
        /// Suggested fix.
        hint: String,
    },
    /// A failed memory allocation.
    #[error("{what}: out of memory: {reason}")]
    OutOfMemory {
        /// The value or operation that needed the memory.
        what: String,
        /// Details, such as the requested and available sizes.
        reason: String,
    },
    /// A training run whose loss or gradients became NaN or infinite.
    #[error("training stopped at step {step}: {reason}")]
    Diverged {
        /// The step, counted from 1.
        step: u64,
        /// First place where it was detected, and which state is preserved.
        reason: String,
    },
    /// A training run that was interrupted and can be resumed.
    #[error("interrupted after step {step}; everything is saved in {}", redact_path(path).display())]
    Paused {
        /// Completed steps.
        step: u64,
        /// The training checkpoint to resume from.
        path: PathBuf,
    },
    /// A recipe that does not parse. The message contains line, column and a snippet.
    #[error("{}: {message}", redact_path(path).display())]
    Recipe {
        /// The recipe file.
        path: PathBuf,
        /// The located message.
        message: String,
    },
    /// An output folder that cannot be used.
    #[error("output {}: {reason}", redact_path(path).display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
        /// Suggested fix.
        hint: String,
    },
    /// A requested feature that this version does not support.
    #[error("{what} is not supported")]
    Unsupported {
        /// The requested feature.
        what: String,
        /// A supported alternative.
        hint: String,
    },
    /// A written file that differs from the intended content when it is read back.
    #[error("verification of {} failed: {reason}", redact_path(path).display())]
    Verification {
        /// The file.
        path: PathBuf,
        /// How it differs.
        reason: String,
    },
    /// A report that violates a configured limit.
    #[error("{path}: {reason}")]
    Budget {
        /// The report.
        path: PathBuf,
        /// Each violated limit with the measured value.
        reason: String,
        /// Suggested fix.
        hint: String,
    },
    /// Interrupted by the user or through a `Cancel` handle.
    #[error("interrupted; nothing was written")]
    Cancelled,
    /// Interrupted after some work that is preserved.
    #[error("interrupted; finished work is saved in {}", redact_path(path).display())]
    Interrupted {
        /// The folder of the work.
        path: PathBuf,
    },
}

impl Error {
    /// An I/O error with its action and path, for `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = redact_path(path);
        move |source| Error::Io { action, path, source }
    }

    /// A malformed file.
    #[doc(hidden)]
    pub fn malformed(path: &Path, reason: impl fmt::Display) -> Error {
        Error::Malformed { path: redact_path(path), reason: reason.to_string() }
    }

    /// A tensor that is not supported.
    #[doc(hidden)]
    pub fn tensor(name: &str, reason: impl fmt::Display, hint: impl fmt::Display) -> Error {
        Error::Tensor { name: name.to_owned(), reason: reason.to_string(), hint: hint.to_string() }
    }

    /// An option with an invalid value.
    pub fn option(what: impl fmt::Display, reason: impl fmt::Display) -> Error {
        Error::Option { what: what.to_string(), reason: reason.to_string() }
    }

    /// An inconsistent graph.
    #[doc(hidden)]
    pub fn graph(what: impl fmt::Display, reason: impl fmt::Display) -> Error {
        Error::Graph { what: what.to_string(), reason: reason.to_string() }
    }

    /// A model that cannot run.
    pub fn run(what: impl fmt::Display, reason: impl fmt::Display, hint: impl fmt::Display) -> Error {
        Error::Run { what: what.to_string(), reason: reason.to_string(), hint: hint.to_string() }
    }

    /// A failed computation of candle. Out-of-memory errors of devices become [`Error::OutOfMemory`].
    #[doc(hidden)]
    pub fn candle(what: impl fmt::Display, e: impl fmt::Display) -> Error {
        // With `RUST_BACKTRACE`, candle appends the frames of the program to its message.
        let text = e.to_string();
        let reason = text.split_once("\n   0: ").map_or(text.as_str(), |(reason, _)| reason).to_owned();
        if reason.to_ascii_lowercase().replace('_', " ").contains("out of memory") {
            return Error::OutOfMemory { what: what.to_string(), reason };
        }
        Error::run(what, reason, "")
    }

    /// Whether memory was exhausted, so that a smaller batch may succeed.
    #[doc(hidden)]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory { .. })
    }

    /// Whether the request itself was invalid, so that a retry cannot help.
    #[doc(hidden)]
    pub fn is_misuse(&self) -> bool {
        matches!(self, Error::Option { .. } | Error::Recipe { .. } | Error::NoMatch { .. })
    }

    /// Suggested fix, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Tensor { hint, .. }
            | Error::Output { hint, .. }
            | Error::Unsupported { hint, .. }
            | Error::Run { hint, .. }
            | Error::Budget { hint, .. } => {
                (!hint.is_empty()).then(|| hint.clone())
            }
            Error::OutOfMemory { .. } => Some("use smaller batches, shorter sequences, `gradient_checkpointing: blocks`, or an optimizer with less state; use `offload: parameters` if the weights do not fit".into()),
            Error::Diverged { .. } => Some("lower the learning rate, warm up longer, or compute in f32".into()),
            Error::Paused { .. } | Error::Interrupted { .. } => Some("run it again with `resume` to continue".into()),
            Error::NotFinite { .. } => Some(NOT_FINITE_HINT.into()),
            Error::NoMatch { nearest: Some(name), .. } => Some(format!("did you mean `{name}`? `compress inspect` lists all names")),
            Error::NoMatch { nearest: None, .. } => Some("`compress inspect` lists all names".into()),
            Error::Recipe { .. } => Some("`compress init MODEL` writes a commented recipe; `compress schema` prints all keys".into()),
            Error::Graph { what, .. } if what == "config.json" => damaged_hint(Path::new(what)).map(Into::into),
            Error::Malformed { path, .. } => damaged_hint(path).map(Into::into),
            Error::Io { path, source, .. } if path.starts_with("~") && source.kind() == io::ErrorKind::NotFound => Some(UNEXPANDED.into()),
            Error::Io { action, path, source } => {
                let remote = path.to_str().filter(|name| name.starts_with("hf:") || name.contains("://"));
                let advice = remote.map_or_else(|| local_hint(action, source.kind()), |name| remote_hint(name, source.kind()));
                advice.map(Into::into)
            }
            _ => None,
        }
    }
}

/// Hint about a path that begins with `~`.
pub(crate) const UNEXPANDED: &str = "the shell has not expanded `~`, as within quotation marks or after `=`: write the whole path, or `$HOME` instead";

/// A count with its noun: `1 sample`, `2 samples`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A path without the credentials of a remote name.
pub fn redact_path(path: &Path) -> PathBuf {
    match path.to_str() {
        Some(name) if name.contains("://") => without_credentials(name).into(),
        Some(name) if name.starts_with("hf:") => name.split(['?', '#']).next().unwrap_or_default().into(),
        _ => path.to_owned(),
    }
}

/// An address without user, query and fragment.
fn without_credentials(address: &str) -> String {
    let plain = address.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = plain.split_once("://") else { return plain.to_owned() };
    let (host, inside) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    format!("{scheme}://{}{inside}", host.rsplit('@').next().unwrap_or_default())
}

/// Removes credentials from all remote names in a text.
pub fn redact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let ends = |c: char| c.is_whitespace() || "\"'<>`)".contains(c);
    while let Some(at) = ["://", "hf:"].iter().filter_map(|scheme| Some((rest.find(scheme)?, scheme.len()))).min() {
        let (before, address) = rest.split_at(at.0);
        let end = address.find(ends).unwrap_or(address.len());
        let (address, after) = address.split_at(end);
        out.push_str(before);
        out.push_str(&without_credentials(address));
        rest = after;
    }
    out + rest
}

/// Advice for a damaged file of a model.
fn damaged_hint(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    if name.ends_with(".safetensors") || name.ends_with(".onnx") {
        Some("the file is damaged, incomplete or of another type; download or write it again")
    } else if name.ends_with(".json") && name != "recipe.json" {
        Some("use the file that was saved together with these weights")
    } else {
        None
    }
}

/// Sources of credentials, by the scheme of a name.
const CREDENTIALS: [(&str, &str); 4] = [
    ("hf:", "use the token of an account with access to the repository: set HF_TOKEN, or run `hf auth login`"),
    (
        "s3:",
        "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; `aws configure export-credentials --format env` prints those of a profile; AWS_SKIP_SIGNATURE=true reads public buckets",
    ),
    ("gs:", "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account"),
    ("az:", "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"),
];

/// Advice for an I/O error of a remote file.
fn remote_hint(name: &str, kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::NotFound => Some("check the name: hf:org/name@revision/file, s3://bucket/key, https://host/file"),
        io::ErrorKind::PermissionDenied => CREDENTIALS.iter().find(|(scheme, _)| name.starts_with(scheme)).map(|(_, hint)| *hint),
        _ => None,
    }
}

/// Advice for an I/O error of a local file.
fn local_hint(action: &str, kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::NotFound if action == "create" => Some("the system does not create files in this folder: choose another location"),
        io::ErrorKind::StorageFull => Some("the disk is full; the incomplete output was removed: free some space, or choose a folder on another disk"),
        io::ErrorKind::QuotaExceeded => Some("your quota on this disk is used up: remove files, or choose a folder on another disk"),
        io::ErrorKind::NotFound => Some("check the name; paths are relative to the working directory, paths in a recipe to the recipe's directory"),
        io::ErrorKind::PermissionDenied if ["create", "write"].contains(&action) => {
            Some("you may not write there: choose another location, or change the permissions of its folder")
        }
        io::ErrorKind::PermissionDenied => Some("change its permissions, or copy it to a location that you can access"),
        io::ErrorKind::IsADirectory => Some("specify a file in this folder"),
        io::ErrorKind::ReadOnlyFilesystem => Some("choose a writable location"),
        io::ErrorKind::InvalidFilename => Some("choose a shorter name"),
        io::ErrorKind::AlreadyExists if action == "create" => Some("a file or a broken link has this name: choose another location"),
        io::ErrorKind::NotADirectory => Some("a part of this path is a file, not a folder: check the name"),
        io::ErrorKind::InvalidData => Some("the file must be UTF-8 text; check that it is the right file"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_about_files_name_the_next_step() {
        let hint = |action: &'static str, path: &str, kind: io::ErrorKind| Error::io(action, Path::new(path))(kind.into()).hint().unwrap_or_default();
        let denied = io::ErrorKind::PermissionDenied;
        assert!(hint("write", "hf:org/name", denied).contains("HF_TOKEN"));
        assert!(hint("open", "s3://bucket/key", denied).contains("AWS_ACCESS_KEY_ID"));
        assert!(hint("open", "gs://bucket/key", denied).contains("GOOGLE_APPLICATION_CREDENTIALS"));
        assert!(hint("open", "az://container/key", denied).contains("AZURE_STORAGE_ACCOUNT_KEY"));
        assert!(hint("create", "/proc", io::ErrorKind::NotFound).contains("choose another location"));
        assert!(hint("open", "model", io::ErrorKind::NotFound).contains("check the name"));
        assert!(hint("open", "~/model", io::ErrorKind::NotFound).contains("has not expanded `~`"));
        assert!(hint("create", "/root/out", denied).contains("choose another location"));
        assert!(hint("open", "/root/model", denied).contains("copy it"));
    }

    #[test]
    fn messages_of_candle_contain_no_backtrace() {
        let text = |message: &str| Error::candle("x", message).to_string();
        assert_eq!(text("shape mismatch\n   0: candle_core::error\n   1: main\n"), "x: shape mismatch");
        assert_eq!(text("two\nlines"), "x: two\nlines");
    }
}

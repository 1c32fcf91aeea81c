//! One error for the whole crate, written for the person who can act on it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the file, tensor, option or recipe line by name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", tellable(path).display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A file that is not what it should be.
    #[error("{}: {reason}", tellable(path).display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that a pass or a format cannot take.
    #[error("tensor `{name}`: {reason}")]
    Tensor {
        /// Name in the checkpoint.
        name: String,
        /// What is wrong with it.
        reason: String,
        /// What to do about it.
        hint: String,
    },
    /// A NaN or infinite weight.
    #[error("tensor `{name}` holds {count} values that are NaN or infinite")]
    NotFinite {
        /// Name in the checkpoint.
        name: String,
        /// How many.
        count: u64,
    },
    /// A `targets` or `ignore` pattern without a match.
    #[error("`{field}` pattern `{pattern}` matches no tensor")]
    NoMatch {
        /// Where the pattern stands.
        field: &'static str,
        /// The pattern.
        pattern: String,
        /// The closest name there is.
        nearest: Option<String>,
    },
    /// An option with an impossible value.
    #[error("{what}: {reason}")]
    Option {
        /// Which option, of which pass or format.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A graph that does not hold together, or cannot be made from this configuration.
    #[error("{what}: {reason}")]
    Graph {
        /// The node, the value, or the file that describes it.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A model that cannot be run on these inputs, or on this machine.
    #[error("{what}: {reason}")]
    Run {
        /// The input, the node or the device.
        what: String,
        /// What went wrong.
        reason: String,
        /// What to do about it.
        hint: String,
    },
    /// Memory that was not there.
    #[error("{what}: out of memory: {reason}")]
    OutOfMemory {
        /// What was to be put into it.
        what: String,
        /// What is known about it.
        reason: String,
    },
    /// A training whose numbers have left what floats can hold.
    #[error("training stopped at step {step}: {reason}")]
    Diverged {
        /// Counted from 1.
        step: u64,
        /// Where it was seen first, and what is left.
        reason: String,
    },
    /// A training that was interrupted and can go on.
    #[error("interrupted after step {step}; everything is saved in {}", tellable(path).display())]
    Paused {
        /// Steps that are done.
        step: u64,
        /// The file to go on from.
        path: PathBuf,
    },
    /// A recipe that does not parse; the text carries line, column and a snippet.
    #[error("{}: {message}", tellable(path).display())]
    Recipe {
        /// The recipe file.
        path: PathBuf,
        /// The located message.
        message: String,
    },
    /// An output folder that cannot be used.
    #[error("output {}: {reason}", tellable(path).display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// Why not.
        reason: String,
        /// What to do about it.
        hint: String,
    },
    /// Something asked for that this version does not do.
    #[error("{what} is not supported")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What there is instead.
        hint: String,
    },
    /// A written file that does not read back as it was meant.
    #[error("verification of {} failed: {reason}", tellable(path).display())]
    Verification {
        /// The file.
        path: PathBuf,
        /// How it differs.
        reason: String,
    },
    /// A report does not keep a limit that it is held to.
    #[error("{path}: {reason}")]
    Budget {
        /// The report.
        path: PathBuf,
        /// Each limit that is not kept, and what was measured.
        reason: String,
    },
    /// Interrupted by the user or through a `Cancel` handle.
    #[error("interrupted; nothing was written")]
    Cancelled,
}

impl Error {
    /// An I/O error with its path; meant for `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = tellable(path);
        move |source| Error::Io { action, path, source }
    }

    /// A malformed file.
    pub fn malformed(path: &Path, reason: impl fmt::Display) -> Error {
        Error::Malformed { path: tellable(path), reason: reason.to_string() }
    }

    /// A tensor that cannot be taken.
    pub fn tensor(name: &str, reason: impl fmt::Display, hint: impl fmt::Display) -> Error {
        Error::Tensor { name: name.to_owned(), reason: reason.to_string(), hint: hint.to_string() }
    }

    /// An option with an impossible value.
    pub fn option(what: impl fmt::Display, reason: impl fmt::Display) -> Error {
        Error::Option { what: what.to_string(), reason: reason.to_string() }
    }

    /// A graph that does not hold together.
    pub fn graph(what: impl fmt::Display, reason: impl fmt::Display) -> Error {
        Error::Graph { what: what.to_string(), reason: reason.to_string() }
    }

    /// A model that cannot be run.
    pub fn run(what: impl fmt::Display, reason: impl fmt::Display, hint: impl fmt::Display) -> Error {
        Error::Run { what: what.to_string(), reason: reason.to_string(), hint: hint.to_string() }
    }

    /// What a device could not compute; recognizes that its memory was too small.
    #[cfg(feature = "run")]
    pub fn computed(what: impl fmt::Display, e: candle_core::Error) -> Error {
        let reason = e.to_string();
        if reason.to_ascii_lowercase().replace('_', " ").contains("out of memory") {
            return Error::OutOfMemory { what: what.to_string(), reason };
        }
        Error::run(what, reason, "")
    }

    /// Whether memory was too small, so that less at a time may do.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory { .. })
    }

    /// Whether the request itself was wrong, so that trying again cannot help.
    pub fn is_misuse(&self) -> bool {
        matches!(self, Error::Option { .. } | Error::Recipe { .. } | Error::NoMatch { .. })
    }

    /// Advice, where there is any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Tensor { hint, .. } | Error::Output { hint, .. } | Error::Unsupported { hint, .. } | Error::Run { hint, .. } => {
                (!hint.is_empty()).then(|| hint.clone())
            }
            Error::OutOfMemory { .. } => Some("use smaller batches, shorter sequences, gradient_checkpointing: blocks, or an optimizer with less state; `offload: parameters` where weights alone do not fit".into()),
            Error::Diverged { .. } => Some("lower the learning rate, warm up longer, or compute in f32".into()),
            Error::Paused { .. } => Some("run the same command with --resume to continue".into()),
            Error::NotFinite { .. } => Some("the checkpoint is damaged, or set `allow_nonfinite: true` (--allow-nonfinite) to carry them along".into()),
            Error::NoMatch { nearest: Some(name), .. } => Some(format!("did you mean `{name}`? `compress inspect` lists all names")),
            Error::NoMatch { nearest: None, .. } => Some("`compress inspect` lists all names".into()),
            Error::Recipe { .. } => Some("`compress init MODEL` writes a recipe with comments, `compress schema` all keys there are".into()),
            Error::Graph { what, .. } if what == "config.json" => damaged(Path::new(what)).map(Into::into),
            Error::Malformed { path, .. } => damaged(path).map(Into::into),
            Error::Io { path, source, .. } => {
                let remote = path.to_str().is_some_and(|name| name.starts_with("hf:") || name.contains("://"));
                let advice = if remote { refused_elsewhere(source.kind()) } else { refused(source.kind()) };
                advice.map(Into::into)
            }
            _ => None,
        }
    }
}

/// A path without the credentials that a remote name may hold.
pub(crate) fn tellable(path: &Path) -> PathBuf {
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

/// A text in which no remote name holds credentials.
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

/// What to do about a file that a model came with.
fn damaged(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    if name.ends_with(".safetensors") || name.ends_with(".onnx") {
        Some("the file is damaged, unfinished or of another kind: download or write it again")
    } else if name.ends_with(".json") && name != "recipe.json" {
        Some("take the file that these weights were saved with")
    } else {
        None
    }
}

/// What to do when another machine does not let one.
fn refused_elsewhere(kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::NotFound => Some("check the name: hf:org/name@revision/file, s3://bucket/key, https://host/file"),
        io::ErrorKind::PermissionDenied => Some("docs/remote.md says where credentials are looked for"),
        _ => None,
    }
}

/// What to do when the system does not let one.
fn refused(kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::StorageFull => Some("the disk is full; the unfinished output was removed"),
        io::ErrorKind::NotFound => Some("check the name; paths begin where you are, those in a recipe where the recipe is"),
        io::ErrorKind::PermissionDenied => Some("ask for the right to it, or copy it to where you have that"),
        io::ErrorKind::IsADirectory => Some("name a file in this folder"),
        io::ErrorKind::ReadOnlyFilesystem => Some("choose a place that can be written to"),
        io::ErrorKind::InvalidFilename => Some("choose a shorter name"),
        io::ErrorKind::InvalidData => Some("text in UTF-8 is needed here: is it the right file?"),
        _ => None,
    }
}

//! Flags shared by several commands, and the text files that they write.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::contract::Target;
use crate::error::{Error, Result};
use crate::export::{ByteSize, Export, Layout, Safetensors};
use crate::model::Model;
use crate::pipeline::Builder;
use crate::provenance::SigningKey;
use crate::recipe::Sbom;
use crate::work::{Cancel, Progress, Silent, Work};

use super::progress::{Bars, JsonLines};
use super::running::Models;

/// Format of progress and errors on stderr.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Human-readable text
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

// As for `Writing`.
#[derive(Debug, Default, Args)]
#[group(skip)]
#[command(next_help_heading = "Global options")]
pub(super) struct Global {
    /// Print data as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Format of progress and errors on stderr
    #[arg(long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// Print only errors on stderr
    #[arg(long, short, global = true)]
    pub quiet: bool,
    #[command(flatten)]
    pub models: Models,
    /// Number of threads [default: all cores]; results do not depend on it
    #[arg(long, global = true, value_name = "N", value_parser = positive)]
    pub threads: Option<std::num::NonZeroUsize>,
}

impl Global {
    /// A pipeline builder with the requested threads and progress, which Ctrl-C cancels.
    pub fn builder(&self) -> Result<Builder> {
        let builder = crate::pipeline::Pipeline::builder().threads(self.threads()).cancel(cancel_on_interrupt());
        let builder = self.models.configure(builder)?;
        Ok(match (self.quiet, self.log_format) {
            (true, _) => builder,
            (false, LogFormat::Text) => builder.progress(Bars::default()),
            (false, LogFormat::Json) => builder.progress(JsonLines::default()),
        })
    }

    pub fn threads(&self) -> usize {
        self.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from)
    }

    /// Runs a job outside of a pipeline with the requested threads and progress, which Ctrl-C cancels.
    pub fn work<T>(&self, job: impl FnOnce(&Work) -> Result<T>) -> Result<T> {
        let (cancel, bars, lines) = (cancel_on_interrupt(), Bars::default(), JsonLines::default());
        let progress: &dyn Progress = match (self.quiet, self.log_format) {
            (false, LogFormat::Json) => &lines,
            (false, LogFormat::Text) if !self.json => &bars,
            _ => &Silent,
        };
        job(&Work { threads: self.threads(), progress, cancel: &cancel })
    }
}

/// Signals within this time of the first one are those of the same request: `timeout` signals the process,
/// and then its process group.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// Request of a signal.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Cancel,
    /// A repetition of the first request.
    Same,
    Terminate,
}

impl Request {
    /// The request of a signal, `since` after the first one.
    fn of_signal(since: Option<Duration>) -> Request {
        match since {
            None => Request::Cancel,
            Some(since) if since < SAME_REQUEST => Request::Same,
            Some(_) => Request::Terminate,
        }
    }
}

/// The cancellation handle of the process. The first SIGINT or SIGTERM cancels it, a later one terminates the
/// process.
fn cancel_on_interrupt() -> Cancel {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let handle = Cancel::process();
        let mut first: Option<Instant> = None;
        let signalled = move || match Request::of_signal(first.map(|first| first.elapsed())) {
            Request::Cancel => {
                first = Some(Instant::now());
                handle.cancel();
            }
            Request::Same => {}
            // Exit handlers of libraries could wait for threads that never finish.
            Request::Terminate => {
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
        };
        // If no handler can be installed, Ctrl-C terminates the process.
        let _ = ctrlc::set_handler(signalled);
    });
    Cancel::process()
}

// No doc comment: clap would use it as the description of the command that flattens this group.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Writing {
    /// Formats to write, like `safetensors` or `safetensors: {layout: sparse}` [default: safetensors; onnx
    /// for an .onnx model]
    #[arg(long, value_name = "FORMAT", value_parser = parse_export)]
    pub export: Vec<Export>,
    /// Layout of weights in safetensors
    #[arg(long, value_enum, conflicts_with = "export")]
    pub layout: Option<Layout>,
    /// Maximum size of a safetensors file, like 5GB
    #[arg(long, value_name = "SIZE", conflicts_with = "export")]
    pub shard_size: Option<ByteSize>,
    #[command(flatten)]
    pub runtimes: Runtimes,
    /// Replace the output of an earlier run; files that its report does not list are never deleted
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub records: Records,
    /// Keep NaN and infinite weights instead of stopping with an error; as integers and FP4, NaN becomes zero
    /// and infinity the largest value
    #[arg(long)]
    pub allow_nonfinite: bool,
    /// Do not measure the fidelity to the original model if no evaluation data is given
    #[arg(long)]
    pub no_measure: bool,
}

impl Writing {
    /// The requested formats; empty for the default format of the model.
    pub fn exports(&self) -> Vec<Export> {
        if !self.export.is_empty() {
            return self.export.clone();
        }
        if self.layout.is_none() && self.shard_size.is_none() {
            return Vec::new();
        }
        let mut format = Safetensors::default();
        format.layout = self.layout.unwrap_or(format.layout);
        format.shard_size = self.shard_size.unwrap_or(format.shard_size);
        vec![format.into()]
    }
}

// As for `Writing`.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Signing {
    /// Sign the output folder with a private key: PEM, elliptic curve P-256 or P-384. `compress verify --key`
    /// and OpenSSF's model_signing check the signature, model.sig
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
}

impl Signing {
    /// Adds the key, if there is one.
    pub fn configure(&self, builder: Builder) -> Result<Builder> {
        self.sign.iter().try_fold(builder, |builder, path| Ok(builder.sign(SigningKey::open(path)?)))
    }
}

// As for `Writing`.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Records {
    #[command(flatten)]
    signing: Signing,
    /// Write a software bill of materials, bom.cdx.json: hashes of all files, the base model, data sets,
    /// metrics
    #[arg(long, value_enum, value_name = "FORMAT")]
    sbom: Option<Sbom>,
    /// Do not write a model card (README.md); the README.md of the model is copied instead
    #[arg(long)]
    no_card: bool,
}

impl Records {
    /// An option that was specified, for commands that may write no output.
    pub fn specified(&self) -> Option<&'static str> {
        let options = [(self.signing.sign.is_some(), "--sign"), (self.sbom.is_some(), "--sbom"), (self.no_card, "--no-card")];
        options.into_iter().find_map(|(is_set, name)| is_set.then_some(name))
    }

    /// Adds the requested records of provenance, and omits the model card if requested.
    pub fn configure(&self, builder: Builder) -> Result<Builder> {
        let builder = if self.no_card { builder.card(false) } else { builder };
        self.signing.configure(self.sbom.into_iter().fold(builder, Builder::sbom))
    }
}

// As for `Writing`.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Runtimes {
    /// Runtimes that must load the output: vllm, sglang, transformers, llama.cpp or onnxruntime; vllm@0.33 is
    /// a version
    #[arg(long, value_name = "RUNTIME[@VERSION]", value_delimiter = ',')]
    pub loads: Vec<Target>,
}

/// Optional text file that a command writes.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct TextFile {
    /// Write to a file
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
}

impl TextFile {
    /// Checks that the file does not exist or may be replaced, and that it can be written, so that its text
    /// is not lost after a long run. `extensions`: the extensions of its format.
    pub fn check(&self, extensions: &[&str]) -> Result<()> {
        let Some(path) = &self.output else { return Ok(()) };
        check_replaceable(path, extensions, self.force)?;
        crate::output::check_file_writable(path)
    }

    /// Writes the text, if a file was requested.
    pub fn write(&self, extensions: &[&str], text: impl FnOnce() -> Result<String>) -> Result<()> {
        let Some(path) = &self.output else { return Ok(()) };
        self.check(extensions)?;
        write_file(path, &text()?)
    }
}

/// Opens the model of a command. If it does not exist, but the output is a model, they were probably swapped.
pub(super) fn open_input(model: &Path, output: Option<&Path>) -> Result<Model> {
    let is_swapped = |output: &&Path| output.join("config.json").is_file() && !crate::files::is_remote(model) && !model.exists();
    match output.filter(is_swapped) {
        Some(output) => Err(Error::run(
            format!("cannot open {}", model.display()),
            format!("it does not exist, but the output {} is a model", output.display()),
            format!("the model comes first, and `-o` names the output: {} -o {}", output.display(), model.display()),
        )),
        None => Model::open(model),
    }
}

/// Checks that a file does not exist or may be replaced: only with `force`, and only if it has one of
/// these extensions, since other files may be models.
fn check_replaceable(path: &Path, extensions: &[&str], force: bool) -> Result<()> {
    let error = |reason: String, hint: String| Err(Error::Output { path: path.to_owned(), reason, hint });
    if !path.exists() {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
        let missing = |folder: &Path| error(format!("the folder {} does not exist", folder.display()), "create it, or name another file".into());
        return folder.map_or(Ok(()), missing);
    }
    if path.is_dir() {
        let example = path.join("file").with_extension(extensions.first().unwrap_or(&""));
        return error("is a folder".into(), format!("name a file, such as {}", example.display()));
    }
    if !force {
        return error("exists".into(), "name another file, or replace it with --force".into());
    }
    // Writing follows symbolic links, so the target is checked too.
    let has_extension = |path: &Path| path.is_file() && extensions.iter().any(|extension| path.extension().is_some_and(|found| found == *extension));
    if has_extension(path) && std::fs::canonicalize(path).is_ok_and(|path| has_extension(&path)) {
        return Ok(());
    }
    let format = extensions.first().unwrap_or(&"");
    error(format!("exists, and --force replaces only .{format} files here"), format!("name a file that ends with .{format}"))
}

/// Writes a small text file, and replaces an existing one. A new file that cannot be written completely is
/// removed.
pub(super) fn write_file(path: &Path, text: &str) -> Result<()> {
    let is_new = !path.exists();
    std::fs::write(path, text).map_err(Error::io("write", path)).inspect_err(|_| {
        if is_new {
            let _ = std::fs::remove_file(path);
        }
    })
}

fn parse_export(text: &str) -> Result<Export, String> {
    if Layout::from_str(text, true).is_ok() {
        return Err(format!("`{text}` is a layout, not a format: use --layout {text}, or --export 'safetensors: {{ layout: {text} }}'"));
    }
    let of_gguf = text.strip_prefix("gguf").map(|rest| rest.trim_start_matches([':', '=', ' ']));
    if let Some(name) = of_gguf.or(Some(text)).filter(|name| crate::aliases::is_gguf_type(name)) {
        return Err(format!("`{text}`: the type is an option of the format: --export 'gguf: {{ type: {} }}'", name.to_ascii_uppercase()));
    }
    let listed: Option<Vec<&str>> = text.split(',').map(|name| Export::from_name(name.trim()).map(|_| name.trim())).collect();
    if let Some(names) = listed.filter(|names| names.len() > 1) {
        return Err(format!("`{text}` is a list: repeat the option, as in --export {}", names.join(" --export ")));
    }
    serde_saphyr::from_str(text).map_err(|e| crate::recipe::message::explain(&e, text, text))
}

fn positive(text: &str) -> Result<std::num::NonZeroUsize, String> {
    text.parse().map_err(|_| "expected a positive whole number".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_signal_terminates() {
        let of = |since: Option<u64>| Request::of_signal(since.map(Duration::from_millis));
        assert_eq!([None, Some(0), Some(499), Some(500)].map(of), [Request::Cancel, Request::Same, Request::Same, Request::Terminate]);
    }
}

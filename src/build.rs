//! Compression in the build script of another program.
//!
//! ```no_run
//! // build.rs
//! use std::process::ExitCode;
//!
//! use compress::prelude::*;
//!
//! fn main() -> ExitCode {
//!     compress::build::embed("MODEL", "model", Pipeline::builder().pass(QuantizeDynamic::default()))
//! }
//! ```
//!
//! The program then contains the compressed model:
//!
//! ```ignore
//! const MODEL: &[u8] = include_bytes!(env!("MODEL"));
//! ```

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::error::{Error, Result};
use crate::files;
use crate::model::Model;
use crate::pipeline::Builder;
use crate::report::Report;

/// Compresses a model into a folder of `OUT_DIR`, and reports to cargo which files were read and the path of
/// the result. `main` of a build script returns the exit code.
///
/// The environment variable `env` contains the path of the written file when the program is compiled. If the
/// weights are in several files, their paths are in `env` followed by `_1`, `_2` and so on, and `env` is not
/// set. `env` followed by `_DIR` contains the folder.
///
/// Cargo runs the script again if a file changes that the run has read, or if a file is added to a folder
/// that it has read. The model is compressed again only if contents or options have changed. The number of
/// threads is that of cargo's jobs.
pub fn embed(env: &str, model: impl AsRef<Path>, builder: Builder) -> ExitCode {
    match try_embed(env, model.as_ref(), builder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = error.to_string();
            text.lines().for_each(|line| println!("cargo::error={line}"));
            error.hint().iter().for_each(|hint| println!("cargo::error={hint}"));
            ExitCode::FAILURE
        }
    }
}

fn try_embed(env: &str, model: &Path, builder: Builder) -> Result<()> {
    watch(model);
    let output = PathBuf::from(variable("OUT_DIR")?).join(env.to_lowercase());
    let jobs = variable("NUM_JOBS")?.to_str().and_then(|jobs| jobs.parse().ok());
    let jobs = jobs.ok_or_else(|| Error::option("NUM_JOBS", "is not a number of jobs"))?;
    let model = Model::open(model)?;
    let pipeline = builder.threads(jobs).build()?;
    pipeline.inputs(&model).iter().for_each(|path| watch(path));
    let report = pipeline.run_cached(model, &output)?.report;
    for (name, path) in variables(env, &output, &report) {
        println!("cargo::rustc-env={name}={}", path.display());
    }
    Ok(())
}

fn variable(name: &str) -> Result<OsString> {
    std::env::var_os(name).ok_or_else(|| Error::option(name, "is not set: only cargo can run a build script"))
}

/// Makes cargo run the script again if a file or folder changes.
fn watch(path: &Path) {
    // Cargo runs the script at every build if a file does not exist.
    if !files::is_remote(path) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

/// Environment variables with the paths of an output.
fn variables(env: &str, output: &Path, report: &Report) -> Vec<(String, PathBuf)> {
    let weights: Vec<PathBuf> = report.outputs.iter().filter(|file| !file.path.ends_with(".json")).map(|file| output.join(&file.path)).collect();
    let folder = (format!("{env}_DIR"), output.to_owned());
    match weights.as_slice() {
        [only] => vec![(env.to_owned(), only.clone()), folder],
        several => several.iter().enumerate().map(|(number, path)| (format!("{env}_{}", number + 1), path.clone())).chain([folder]).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::Safetensors;
    use crate::pipeline::Pipeline;
    use crate::store::ByteSize;

    #[test]
    fn every_file_of_a_sharded_output_has_a_variable() {
        let folder = tempfile::tempdir().unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/build_script/model");
        let names = |shard_size| {
            let export = Safetensors { shard_size: ByteSize(shard_size), ..Safetensors::default() };
            let output = folder.path().join(shard_size.to_string());
            let report = Pipeline::builder().export(export).build().unwrap().run(Model::open(&model).unwrap(), &output).unwrap();
            let found = variables("NET", &output, &report);
            assert!(found.iter().all(|(_, path)| path.exists()), "{found:?}");
            let written = std::fs::read_dir(&output).unwrap().filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|end| end == "safetensors"));
            (found.into_iter().map(|(name, _)| name).collect::<Vec<_>>(), written.count())
        };
        assert_eq!(names(1 << 30), (vec!["NET".to_owned(), "NET_DIR".to_owned()], 1));
        let (several, files) = names(100_000);
        assert!(files > 1);
        let numbered = (1..=files).map(|number| format!("NET_{number}"));
        assert_eq!(several, numbered.chain(["NET_DIR".to_owned()]).collect::<Vec<_>>());
    }
}

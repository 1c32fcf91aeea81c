//! `compress verify`

use std::path::{Path, PathBuf};

use super::args::Global;
use super::output;
use crate::error::{Error, Result};
use crate::files;
use crate::output::{SIGNATURE, file_name, report_folder, reported_output};
use crate::pipeline::{Check, verify};
use crate::provenance::{PublicKey, verify_signature};
use crate::report::terminal::table;
use crate::work::Work;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress verify out/int8
  compress verify out/int8 --key signer.pub.pem
  compress verify llama --key signer.pub.pem         a folder without a report, signed by model_signing")]
pub(super) struct Args {
    /// An output folder or file, or its report.json; with `--key`, also another signed folder
    #[arg(value_name = "OUTPUT")]
    folder: PathBuf,
    /// Check that the folder is signed by this key, a public key in PEM: model.sig must be valid, and the
    /// folder must contain exactly the signed files
    #[arg(long, value_name = "KEY")]
    key: Option<PathBuf>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let key = self.key.as_ref().map(PublicKey::open).transpose()?;
        let checks = global.work(|work| self.checks(key.as_ref(), work))?;
        if global.json {
            output::json(&checks)?;
        } else {
            let rows = checks.iter().map(|c| vec![c.path.clone(), outcome(c).into(), c.finding.clone()]);
            output::print(&format!("{}\n", table(&["file", "", "finding"], rows)))?;
        }
        match checks.iter().find(|c| !c.ok) {
            None => Ok(()),
            Some(check) => {
                let path = located(&reported_output(&self.folder), &check.path);
                Err(Error::Verification { path, reason: check.finding.clone() })
            }
        }
    }

    fn checks(&self, key: Option<&PublicKey>, work: &Work) -> Result<Vec<Check>> {
        let Some(key) = key else { return verify(&self.folder, work) };
        let folder = signed_folder(&self.folder)?;
        let (ok, finding) = verify_signature(&folder, key, work)?;
        let signature = Check::new((SIGNATURE.to_owned(), Some(ok), finding));
        // Other programs sign folders that have no report.
        if !files::is_file(&folder.join(crate::report::FILE)) {
            let finding = "not checked: it does not exist".to_owned();
            return Ok(vec![Check::new((crate::report::FILE.to_owned(), None, finding)), signature]);
        }
        let checks = verify(&self.folder, work)?.into_iter().filter(|check| check.path != SIGNATURE);
        Ok(checks.chain([signature]).collect())
    }
}

fn outcome(check: &Check) -> &'static str {
    match check {
        Check { skipped: true, .. } => "skipped",
        Check { ok: true, .. } => "ok",
        _ => "FAILED",
    }
}

/// The path of a file of an output. Files of a single-file output whose names do not start with its name are
/// in the folder of its report.
fn located(output: &Path, name: &str) -> PathBuf {
    match file_name(output).filter(|_| !files::is_dir(output)) {
        None => output.join(name),
        Some(_) if name == "." => output.to_owned(),
        Some(file) if name.starts_with(&file) => output.with_file_name(name),
        Some(_) => report_folder(output).join(name),
    }
}

/// The folder that the signature of an output is in.
fn signed_folder(path: &Path) -> Result<PathBuf> {
    let output = reported_output(path);
    if files::is_dir(&output) {
        return Ok(output);
    }
    let reason = format!("{} is not a folder: only folders are signed", output.display());
    Err(Error::option("--key", reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_an_output_are_located() {
        let path = |output: &str, name: &str| located(Path::new(output), name).display().to_string();
        assert_eq!(path("o/folder", "bom.cdx.json"), "o/folder/bom.cdx.json");
        assert_eq!(path("o/m.gguf", "bom.cdx.json"), "o/m.gguf.report/bom.cdx.json");
        assert_eq!([path("o/m.onnx", "m.onnx"), path("o/m.onnx", "m.onnx.data"), path("o/m.onnx", ".")], ["o/m.onnx", "o/m.onnx.data", "o/m.onnx"]);
    }
}

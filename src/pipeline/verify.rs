//! Verifies an output folder against its report.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result, counted};
use crate::files;
use crate::model::Model;
use crate::output::{REPORT_FILES, unlisted_files};
use crate::provenance::check_sbom;
use crate::report::Report;
use crate::store::hash::hash_file;
use crate::work::Work;

/// Result of verifying one file.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// Name in the folder.
    pub path: String,
    /// Whether the check passed, or could not be made.
    pub ok: bool,
    /// Whether the check could not be made, such as that of a signature without its key.
    pub skipped: bool,
    /// Description of the result.
    pub finding: String,
}

impl Check {
    /// A result; `passed` is `None` if the check could not be made.
    pub(crate) fn new((path, passed, finding): (String, Option<bool>, String)) -> Check {
        Check { path, ok: passed.unwrap_or(true), skipped: passed.is_none(), finding }
    }
}

/// Compares the hash of every output file with `report.json` and the bill of materials, names files that the
/// report does not list, opens the folder or file strictly, and runs its ONNX file, if it has one.
/// [`verify_signature`](crate::provenance::verify_signature) checks the signature.
///
/// # Errors
/// The report is missing, or the work is cancelled. A damaged file is a failed [`Check`], not an error.
pub fn verify(output: &Path, work: &Work) -> Result<Vec<Check>> {
    let output = &*crate::output::reported_output(output);
    let report = Report::open(output)?;
    let mut checks = Vec::new();
    // If the output is a file, its data files are next to it, and carried files are in the folder of the
    // report.
    let file = crate::output::file_name(output);
    let report_folder = if file.is_some() { crate::output::report_folder(output) } else { output.to_owned() };
    let folder = if file.is_some() { output.parent().unwrap_or(Path::new("")) } else { output };
    let outputs = report.outputs.iter().map(|file| (folder, &file.path, file.bytes, &file.blake3));
    for (folder, path, bytes, blake3) in outputs.chain(report.carried.iter().map(|file| (&*report_folder, &file.path, file.bytes, &file.blake3))) {
        let inside = Path::new(path).components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let found =
            if inside { check(&folder.join(path), bytes, blake3, work) } else { Err(Error::malformed(folder, "the report names a file outside the folder")) };
        let (ok, finding) = match found {
            Ok(finding) => finding,
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(error) => (false, error.to_string()),
        };
        checks.push(Check::new((path.clone(), Some(ok), finding)));
    }
    let reported = report.outputs.iter().map(|file| &file.path).chain(report.carried.iter().map(|file| &file.path));
    let reported = reported.chain(report.signature.iter().map(|signature| &signature.path)).map(String::as_str);
    let listed: BTreeSet<&str> = reported.chain(REPORT_FILES).collect();
    let unlisted = unlisted_files(&report_folder, &|name| listed.contains(name)).into_iter();
    checks.extend(unlisted.map(|path| Check::new((path, None, "not checked: the report does not list it, but programs may read it".to_owned()))));
    for file in report.outputs.iter().filter(|output| output.path.ends_with(".gguf")) {
        let opened = Model::open(folder.join(&file.path)).and_then(|model| model.require_matching_weights().map(|()| model));
        let (ok, finding) = match opened {
            Ok(model) => (true, format!("opens with {}", counted(model.weights.by_name.len(), "weight"))),
            Err(error) => (false, error.to_string()),
        };
        checks.push(Check::new((file.path.clone(), Some(ok), finding)));
    }
    let is = |extension: &str| report.outputs.iter().any(|output| output.path.ends_with(extension));
    let safetensors = is(".safetensors");
    if safetensors || (is(".onnx") && super::running::OPENS_ONNX) {
        let models: Vec<&str> = report.outputs.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".onnx")).collect();
        // An encoder-decoder model in several ONNX files.
        let opened =
            if safetensors || models.len() < 2 { vec![(".", output.to_owned())] } else { models.iter().map(|name| (*name, folder.join(name))).collect() };
        for (name, path) in opened {
            let (ok, finding) = match Model::open(path) {
                // ONNX stores quantization scales as separate tensors.
                Ok(model) if !safetensors || model.weights.parameters() == report.size.after.parameters => {
                    (true, format!("opens with {}", counted(model.weights.by_name.len(), "weight")))
                }
                Ok(model) => (false, format!("opens with {} parameters, the report states {}", model.weights.parameters(), report.size.after.parameters)),
                Err(error) => (false, error.to_string()),
            };
            checks.push(Check::new((name.to_owned(), Some(ok), finding)));
        }
    }
    checks.extend(super::running::check_onnx(output, folder, &report, work)?.map(Check::new));
    let is_output = |name: &str| report.outputs.iter().any(|file| file.path == name);
    let locate = |name: &str| if is_output(name) { folder.join(name) } else { report_folder.join(name) };
    checks.extend(check_sbom(&report, locate, work)?.map(Check::new));
    if let Some(signature) = &report.signature {
        let (passed, finding) = if files::is_file(&report_folder.join(&signature.path)) {
            (None, "not checked without the public key: compress verify --key")
        } else {
            (Some(false), "is missing, although the run signed the output")
        };
        checks.push(Check::new((signature.path.clone(), passed, finding.to_owned())));
    }
    Ok(checks)
}

fn check(path: &Path, bytes: u64, blake3: &str, work: &Work) -> Result<(bool, String)> {
    let length = files::length(path).map_err(Error::io("open", path))?;
    if length != bytes {
        return Ok((false, format!("has {length} bytes, the report states {bytes}")));
    }
    let hash = hash_file(path, work)?;
    Ok(if hash.to_string() == blake3 {
        (true, "as written".into())
    } else {
        (false, "its BLAKE3 differs from the report: the file was changed or damaged".into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The finding is free text: a check that was made can begin like one that was not.
    #[test]
    fn only_checks_without_a_result_are_skipped() {
        let check = |passed: Option<bool>, finding: &str| {
            let check = Check::new(("file".to_owned(), passed, finding.to_owned()));
            (check.ok, check.skipped)
        };
        assert_eq!(check(Some(true), "not larger than the report states"), (true, false));
        assert_eq!(check(Some(false), "not as written"), (false, false));
        assert_eq!(check(None, "its hashes were not compared"), (true, true));
    }
}

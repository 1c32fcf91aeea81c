//! Names of the files of an output.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result, redact_path};
use crate::files;

/// Formats that consist of one file, with their file name extensions.
const SINGLE_FILE_FORMATS: [&str; 2] = ["onnx", "gguf"];

/// The format of an output that is a single file, from its extension. `None` for folders.
pub fn file_format(target: &Path) -> Option<&'static str> {
    named_format(target).filter(|_| !target.is_dir())
}

/// The format of single files that the extension of an output names, also if a folder has that name.
pub(super) fn named_format(target: &Path) -> Option<&'static str> {
    let end = target.extension()?;
    SINGLE_FILE_FORMATS.into_iter().find(|format| end == *format)
}

/// Extensions of model files of other formats.
const OTHER_FORMATS: [&str; 14] =
    ["safetensors", "bin", "pt", "pth", "ckpt", "h5", "keras", "pb", "tflite", "mlmodel", "mlpackage", "engine", "npz", "msgpack"];
/// Similarity from which an extension is taken for a misspelled one.
const SIMILAR: f64 = 0.8;

/// Fails if the name of an output folder ends like a model file, or is that of the report of a file.
pub fn require_folder_name(target: &Path) -> Result<()> {
    if let Some(file) = reported_file(target) {
        return Err(Error::Output {
            path: redact_path(target),
            reason: format!("has the name of the report of {}", redact_path(&file).display()),
            hint: "choose a name that does not end with .report".to_owned(),
        });
    }
    let Some(extension) = target.extension().and_then(|extension| extension.to_str()) else { return Ok(()) };
    let lower = extension.to_lowercase();
    // The dot of a version, as in `qwen2.5-onnx`, does not begin an extension.
    if !lower.starts_with(|c: char| c.is_ascii_alphabetic()) || !lower.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Ok(());
    }
    let similar = SINGLE_FILE_FORMATS.into_iter().find(|format| strsim::jaro_winkler(&lower, format) >= SIMILAR).filter(|_| !target.is_dir());
    if similar.is_none() && !OTHER_FORMATS.contains(&lower.as_str()) {
        return Ok(());
    }
    Err(Error::Output {
        path: redact_path(target),
        reason: format!("has the extension .{extension}, but outputs are folders, .gguf files or .onnx files"),
        hint: match similar {
            Some(format) => format!("did you mean {}?", target.with_extension(format).display()),
            None => "choose a name without this extension for a folder".to_owned(),
        },
    })
}

/// The file name of an output that is a single file. The names of its auxiliary files start with it.
pub fn file_name(target: &Path) -> Option<String> {
    file_format(target).and_then(|_| target.file_name()?.to_str()).map(str::to_owned)
}

/// An unused name for the external data file of a large ONNX file: `out.onnx.data`, then
/// `out.onnx.2.data`. A model file references its data file by name, so the old pair stays intact until
/// the new model file replaces the old one.
pub(super) fn free_data_name(file: &Path) -> Option<String> {
    let name = file_name(file).filter(|_| file_format(file) == Some("onnx"))?;
    let numbered = (2u32..).map(|number| format!("{name}.{number}.data"));
    std::iter::once(format!("{name}.data")).chain(numbered).find(|data| file.with_file_name(data).symlink_metadata().is_err())
}

/// The report folder of a single-file output, next to the file.
pub fn report_folder(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".report");
    file.with_file_name(name)
}

/// Names of the report in all its formats.
pub const REPORT_FILES: [&str; 3] = ["report.json", "report.md", "report.html"];
/// The file in the folder of a draft with the texts that it was trained on, as tokens. Loaders do not mistake
/// it for weights.
pub const CONTINUATIONS: &str = "continuations.npz";
/// File with the ids of the tokens that a draft head proposes.
pub const DRAFT_VOCABULARY: &str = "draft_vocabulary.txt";

/// Name of the signature of an output, which covers all other files.
pub const SIGNATURE: &str = "model.sig";
/// Name of the software bill of materials of an output.
pub const SBOM: &str = "bom.cdx.json";

/// The output that a report folder or a `report.json` belongs to; other paths are outputs.
pub fn reported_output(path: &Path) -> PathBuf {
    let folder = if path.file_name().is_some_and(|name| name == REPORT_FILES[0]) { path.parent().unwrap_or(path) } else { path };
    match reported_file(folder) {
        Some(file) => file,
        None if folder.as_os_str().is_empty() => PathBuf::from("."),
        None => folder.to_owned(),
    }
}

/// The single-file output that a folder has the report of, from their names.
fn reported_file(folder: &Path) -> Option<PathBuf> {
    let file = folder.file_name().and_then(|name| name.to_str()?.strip_suffix(".report")).map(|name| folder.with_file_name(name));
    file.filter(|file| file_name(file).is_some())
}

/// File in a staging folder that records the steps of a publication.
pub(super) const JOURNAL: &str = "placing.json";

/// Folder of the staging folders of an output, and the prefix of their names. For remote outputs, small
/// files and files that are reopened while they are written are staged locally.
pub(super) fn work_location(target: &Path) -> Option<(PathBuf, String)> {
    let (parent, name) = (target.parent()?.to_owned(), target.file_name()?.to_string_lossy());
    Some(if files::is_remote(target) { (std::env::temp_dir(), format!(".{name}.upload-")) } else { (parent, format!(".{name}.compress-")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_belong_to_outputs() {
        for (path, output) in [
            ("out", "out"),
            ("out/report.json", "out"),
            ("report.json", "."),
            ("a/model.onnx", "a/model.onnx"),
            ("a/model.onnx.report/report.json", "a/model.onnx"),
            ("a/model.gguf.report", "a/model.gguf"),
            ("weekly.report", "weekly.report"),
        ] {
            assert_eq!(reported_output(Path::new(path)), Path::new(output), "{path}");
        }
    }

    #[test]
    fn folders_do_not_have_the_names_of_files_or_of_their_reports() {
        for (path, expected) in [
            ("out", None),
            ("weekly.report", None),
            ("qwen2.5-onnx", None),
            ("a/small.onnx.report", Some("has the name of the report of a/small.onnx")),
            ("small.gguf.report", Some("has the name of the report of small.gguf")),
            ("out.safetensors", Some("has the extension .safetensors")),
        ] {
            let found = require_folder_name(Path::new(path)).err().map(|error| error.to_string());
            assert!(found.as_deref().map_or(expected.is_none(), |found| expected.is_some_and(|part| found.contains(part))), "{path}: {found:?}");
        }
    }
}

//! The kind of data: recognized from a path, and compared with the kind of input of the model.

use std::path::Path;

use super::options::Data;
use super::sequence_role::INPUT_IDS;
use super::{Target, arrays, idx, image_files};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::Element;

/// Why a remote folder or data set of the Hub is refused.
pub(super) const NOT_LOCAL: &str = "is not a file: data sets are not downloaded, so data must be local files";
/// Extensions of texts.
const TEXTS: [&str; 5] = ["txt", "raw", "csv", "tsv", "jsonl"];
/// Files with the weights of a model.
const WEIGHTS: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"];
/// Extensions of arrays.
const ARRAYS: [&str; 3] = ["safetensors", "npz", "npy"];

impl Data {
    /// The data at a path; its kind follows from the file extension or the folder's contents.
    pub fn at(path: &Path) -> Data {
        let with_path = Some(path.to_owned());
        match Data::in_file(path) {
            Some(data) => data,
            None if arrays::folder_has_arrays(path) => Data { arrays: with_path, ..Data::default() },
            None => Data { images: with_path, ..Data::default() },
        }
    }

    /// The data in a file of texts or arrays, from its extension.
    pub(super) fn in_file(path: &Path) -> Option<Data> {
        let extension = image_files::extension(path);
        let with_path = Some(path.to_owned());
        match extension.as_str() {
            text if TEXTS.contains(&text) => Some(Data { text: with_path, ..Data::default() }),
            array if ARRAYS.contains(&array) => Some(Data { arrays: with_path, ..Data::default() }),
            _ => None,
        }
    }

    /// The data at a path that the user specified. Fails if the path does not exist, or if it does not show
    /// the kind of its contents.
    #[doc(hidden)]
    pub fn recognized(name: &str) -> Result<Data, String> {
        let path = Path::new(name);
        let exists = path.exists();
        if let Some(key) = leading_key(name).filter(|_| !exists) {
            // As arguments of options with several values.
            let options = if name.contains(": ") { name.to_owned() } else { name.replace('=', ": ").replace(',', ", ") };
            return Err(format!("options need braces: write '{{ {options} }}' (`{key}` is an option, not the name of a file)"));
        }
        if let Some(files) = several(name).filter(|_| !exists) {
            return Err(format!("`{name}` is not a file; several files are mixed: '{{ mix: [{}] }}'", files.join(", ")));
        }
        if let Some(data) = Data::in_file(path).filter(|_| !path.is_dir()) {
            return Ok(data);
        }
        if files::is_remote(path) {
            return Err(format!("`{name}` {NOT_LOCAL}"));
        }
        if path.is_dir() {
            return in_folder(path);
        }
        match exists {
            false => Err(format!(
                "`{name}` does not exist: data sets are not downloaded; specify a local file of texts ({}) or arrays ({}), or a folder of images",
                listed(&TEXTS),
                listed(&ARRAYS)
            )),
            true if idx::is_idx(path) => Ok(Data { images: Some(path.to_owned()), ..Data::default() }),
            true => Err(unknown_extension(name)),
        }
    }
}

/// Extensions of formats of data sets that are not read.
const OTHER_FORMATS: [&str; 9] = ["parquet", "arrow", "feather", "json", "gz", "bz2", "xz", "zst", "zip"];

/// Why a file without a known extension is refused.
pub(super) fn unknown_extension(name: &str) -> String {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase();
    if OTHER_FORMATS.contains(&extension.as_str()) {
        return format!(
            "`{name}`: files with the extension .{extension} are not read: convert it to texts ({}) or arrays ({})",
            listed(&TEXTS),
            listed(&ARRAYS)
        );
    }
    format!("the extension of `{name}` does not show what it contains: write {{ text: {name} }}, or `images` or `arrays`")
}

/// The data in a folder.
fn in_folder(folder: &Path) -> Result<Data, String> {
    let name = folder.display();
    if folder.join("config.json").is_file() && WEIGHTS.iter().any(|name| folder.join(name).is_file()) {
        return Err(format!("`{name}` is the folder of a model, not data: specify a file of texts ({}) or arrays ({})", listed(&TEXTS), listed(&ARRAYS)));
    }
    if arrays::folder_has_arrays(folder) {
        return Ok(Data { arrays: Some(folder.to_owned()), ..Data::default() });
    }
    let (folders, files) = image_files::Skipped::default().entries(folder).map_err(|e| e.to_string())?;
    if folders.is_empty() && files.is_empty() {
        return Err(format!("the folder `{name}` is empty"));
    }
    // Folders inside are classes of images.
    if !folders.is_empty() || files.iter().any(|file| image_files::is_image(file)) {
        return Ok(Data { images: Some(folder.to_owned()), ..Data::default() });
    }
    let text = files.iter().find(|file| TEXTS.contains(&image_files::extension(file).as_str()));
    Err(match text {
        Some(file) => format!(
            "`{name}` is a folder of texts, which are not read together: specify one file, like {0}, or several as '{{ mix: [{{ text: {0} }}, ...] }}'",
            file.display()
        ),
        None => format!("the folder `{name}` contains neither images nor arrays ({})", listed(&ARRAYS)),
    })
}

/// The entries of a mixture, for a list of existing texts.
fn several(name: &str) -> Option<Vec<String>> {
    let files: Vec<&str> = name.split(',').map(str::trim).collect();
    let exist = files.len() > 1 && files.iter().all(|file| Path::new(file).is_file());
    exist.then(|| files.iter().map(|file| format!("{{ text: {file} }}")).collect())
}

/// The option at the beginning of options without braces, like `text: book.txt` or `text=book.txt`.
fn leading_key(text: &str) -> Option<&str> {
    let (key, _) = text.split_once(": ").or_else(|| text.split_once('='))?;
    let is_key = !key.is_empty() && key.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    is_key.then_some(key)
}

fn listed(extensions: &[&str]) -> String {
    extensions.iter().map(|extension| format!(".{extension}")).collect::<Vec<_>>().join(", ")
}

/// Rejects texts for a model that reads images, and images for a model that reads texts.
pub(super) fn require_kind(options: &Data, target: &Target) -> Result<()> {
    let reads_tokens = target.inputs.iter().any(|port| port.name == INPUT_IDS);
    let pictures = target.inputs.iter().find(|port| port.element == Element::Float && port.shape.len() == 4);
    let path = options.paths().next().map(|path| path.display().to_string()).unwrap_or_default();
    match (pictures, &options.images) {
        (_, Some(images)) if !images.exists() => std::fs::metadata(images).map(|_| ()).map_err(Error::io("open", images)),
        (None, Some(_)) if reads_tokens => {
            let inputs = target.inputs.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
            Err(Error::option(
                "data",
                format!(
                    "{path}: is specified as images, but this is a text model (inputs {inputs}): specify a file of texts ({}), or `arrays`",
                    listed(&TEXTS)
                ),
            ))
        }
        (Some(port), None) if options.has_texts() && target.inputs.iter().all(|port| port.element == Element::Float) => Err(Error::option(
            "data",
            format!("{path}: contains texts, but this is an image model (input `{}`, {}): specify a folder of images, or `arrays`", port.name, port.sizes()),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_follows_from_the_extension() {
        assert_eq!(Data::at(Path::new("a/b.CSV")).text.as_deref(), Some(Path::new("a/b.CSV")));
        assert!(Data::at(Path::new("a/b")).images.is_some() && Data::at(Path::new("b.npz")).arrays.is_some());
    }

    #[test]
    fn options_without_braces_are_recognized() {
        assert_eq!(
            ["text: a.txt", "text_column: b, text: a.txt", "text=a.txt", "a.txt", "C: x", ": a"].map(leading_key),
            [Some("text"), Some("text_column"), Some("text"), None, None, None]
        );
    }
}

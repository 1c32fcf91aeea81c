//! The files around the weights.

use std::fs;
use std::path::{Path, PathBuf};

use super::Model;
use crate::error::{Error, Result};

/// Weights in other formats: they belong to the uncompressed model and would contradict the result.
const OTHER_WEIGHTS: [&str; 8] = ["safetensors", "bin", "h5", "msgpack", "onnx", "gguf", "pt", "pth"];
/// Folders that hold nothing but other weights.
const OTHER_FOLDERS: [&str; 4] = ["original", "onnx", "openvino", "coreml"];
/// Files that every run writes anew.
const OWN: [&str; 6] = ["config.json", "recipe.yaml", "report.json", "report.md", "report.html", super::Model::KEY];

/// Files of a model folder that go over to the output unchanged, relative to the folder, in order.
/// Links to files are followed; links to folders and hidden folders are not.
///
/// # Errors
/// A folder cannot be listed.
pub fn carried_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    collect(folder, Path::new(""), &mut files)?;
    files.sort();
    Ok(files)
}

impl Model {
    /// Refuses links that lead out of the folder: what they lead to would be copied into the output, and published with it. Those of
    /// the caches that keep files by their hash, in a folder `blobs` above the model, are followed.
    ///
    /// # Errors
    /// There is such a link, or a file cannot be found.
    pub(crate) fn require_own_files(&self) -> Result<()> {
        let real = |path: &Path| fs::canonicalize(path).map_err(Error::io("open", path));
        let root = real(&self.path)?;
        let places: Vec<PathBuf> = root.ancestors().skip(1).take(2).map(|above| above.join("blobs")).chain([root.clone()]).collect();
        for path in self.files.iter().map(|file| self.path.join(file)) {
            let target = real(&path)?;
            if !places.iter().any(|place| target.starts_with(place)) {
                return Err(Error::Unsupported {
                    what: format!("{}, a link out of the model's folder to {},", path.display(), target.display()),
                    hint: "its content would be copied into the output: put a copy in the place of the link, or remove it".into(),
                });
            }
        }
        Ok(())
    }
}

fn collect(root: &Path, inside: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let folder = root.join(inside);
    for entry in fs::read_dir(&folder).map_err(Error::io("list", &folder))? {
        let entry = entry.map_err(Error::io("list", &folder))?;
        let kind = entry.file_type().map_err(Error::io("list", &folder))?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        let relative = inside.join(&name);
        if kind.is_dir() {
            if !text.starts_with('.') && !OTHER_FOLDERS.contains(&text.as_ref()) {
                collect(root, &relative, files)?;
            }
        } else if entry.path().is_file() && !(inside.as_os_str().is_empty() && OWN.contains(&text.as_ref())) && !is_weights(&text) {
            files.push(relative);
        }
    }
    Ok(())
}

fn is_weights(name: &str) -> bool {
    let name = name.strip_suffix(".index.json").unwrap_or(name);
    name.rsplit_once('.').is_some_and(|(_, extension)| OTHER_WEIGHTS.contains(&extension)) || name.ends_with(".onnx.data") || name.ends_with(".onnx_data")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_go_over_and_other_weights_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let keep = ["1_Pooling/config.json", "README.md", "tokenizer.json", "vocab.txt"];
        let leave = [
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "onnx/model.json",
            "report.json",
            "inputs.blake3",
            "config.json",
            ".git/config",
            "a.onnx.data",
        ];
        for name in keep.iter().chain(&leave) {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        std::os::unix::fs::symlink(folder.path().join("vocab.txt"), folder.path().join("link.txt")).unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
        let mut expected: Vec<PathBuf> = keep.iter().map(PathBuf::from).chain([PathBuf::from("link.txt")]).collect();
        expected.sort();
        assert_eq!(carried_files(folder.path()).unwrap(), expected);
    }
}

//! Copies the files next to the weights to the output, and lists them in the report.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::contract::facts::invalid_json;
use crate::error::{Error, Result, redact_path};
use crate::files;
use crate::model::{Config, Model, adapter};
use crate::report::{self, CarriedFile, OutputFile, WARNING};
use crate::run_state::RunState;
use crate::store::hash::hash_file;
use crate::work::Work;

/// Copies the auxiliary files of a model, and writes the configuration and the texts of `changed` files.
/// If the output is a single file, no synthesized or changed files are written. A copied configuration is not
/// overwritten.
pub(super) fn carry_over(model: &Model, config: &Config, changed: &BTreeMap<PathBuf, String>, folder: &Path, single_file: bool, work: &Work) -> Result<()> {
    for empty in &model.auxiliary.empty {
        let to = folder.join(empty);
        fs::create_dir_all(&to).map_err(Error::io("create", &to))?;
    }
    for file in &model.auxiliary.files {
        let (from, to) = (model.path_of(file), folder.join(file));
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        files::copy(&from, &to).map_err(Error::io("copy", &from))?;
        work.cancel.check()?;
    }
    for (name, text) in model.auxiliary.synthesized.iter().filter(|_| !single_file) {
        write_text(&folder.join(name), text)?;
    }
    for (name, text) in changed.iter().filter(|_| !single_file) {
        write_text(&folder.join(name), text)?;
    }
    match config.render().filter(|_| !copies_config(model)) {
        Some(text) => write_text(&folder.join(CONFIG), &text),
        None => Ok(()),
    }
}

const CONFIG: &str = "config.json";
/// The passes that change the sizes that a configuration describes.
const RESIZING: [&str; 2] = ["prune-structured", "search-structure"];

/// Whether the configuration is a copied file, as for a model that is an ONNX file next to it. Passes do not
/// change it. The configuration of a model folder is written.
fn copies_config(model: &Model) -> bool {
    model.auxiliary.files.iter().any(|file| file == Path::new(CONFIG))
}

/// A warning about a copied configuration that does not describe the result.
pub(super) fn stale_config(model: &Model, state: &RunState) -> Option<String> {
    let is_changed = state.history.iter().any(|applied| RESIZING.contains(&applied.name)) || !model.config.values().is_empty();
    (is_changed && copies_config(model) && state.file.is_none()).then(|| {
        format!("{WARNING}{CONFIG} is copied from the input and describes its sizes: correct heads, widths and layers in the output before a library reads it")
    })
}

/// Files of a model folder that runtimes read as JSON.
const JSON: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
];

/// Warnings about copied files that are not valid JSON, although runtimes read them.
pub(super) fn damaged(model: &Model) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    for file in model.auxiliary.files.iter().filter(|file| JSON.iter().any(|name| file.as_path() == Path::new(name))) {
        if let Some(reason) = invalid_json(&model.path_of(file))? {
            warnings.push(format!(
                "{WARNING}{} was copied, but it is not valid JSON ({reason}): runtimes will not load the output; {}",
                file.display(),
                remedy(model, file)
            ));
        }
    }
    Ok(warnings)
}

/// How to replace a damaged file of a model folder.
fn remedy(model: &Model, file: &Path) -> String {
    let (path, name) = (model.path_of(file), file.display());
    if files::is_remote(&model.path) {
        return format!("the file at {} is damaged: correct it there, or use another revision", redact_path(&path).display());
    }
    format!("download {name} of the model again, for example with `hf download ORG/NAME {name}`, replace {}, and repeat the run", path.display())
}

/// Bytes that [`carry_over`] writes.
pub(super) fn size(model: &Model, single_file: bool) -> Result<u64> {
    let size = |file: &PathBuf| {
        let path = model.path_of(file);
        files::length(&path).map_err(Error::io("open", &path))
    };
    let synthesized: u64 = model.auxiliary.synthesized.values().filter(|_| !single_file).map(|text| text.len() as u64).sum();
    model.auxiliary.files.iter().map(size).sum::<Result<u64>>().map(|copied| copied.saturating_add(synthesized))
}

/// Lists all files of a staging directory that are neither outputs of a format nor the report, with
/// hashes of their contents. Copied and synthesized files are compared with their source, unless
/// `is_replaced` names them.
///
/// # Errors
/// A file differs from its source.
pub(super) fn list(folder: &Path, model: &Model, outputs: &[OutputFile], is_replaced: impl Fn(&str) -> bool, work: &Work) -> Result<Vec<CarriedFile>> {
    let mut names = Vec::new();
    collect(folder, Path::new(""), &mut names)?;
    names.sort();
    // JSON cannot represent names that are not UTF-8.
    let names = names.iter().filter_map(|name| name.to_str());
    let others = names.filter(|name| !report::FILES.contains(name) && !outputs.iter().any(|output| output.path == *name));
    let listed = |name: &str| {
        let (path, from) = (folder.join(name), model.path_of(Path::new(name)));
        let bytes = fs::metadata(&path).map_err(Error::io("open", &path))?.len();
        let hash = hash_file(&path, &work.quiet())?;
        let is_copied = !is_replaced(name) && model.auxiliary.files.iter().any(|file| file == Path::new(name));
        let differs = || model.auxiliary.synthesized.get(Path::new(name)).is_some_and(|text| !is_replaced(name) && blake3::hash(text.as_bytes()) != hash);
        if (is_copied && hash_file(&from, &work.quiet())? != hash) || differs() {
            let reason = format!("differs from {}: that file was changed during the run, or a disk is faulty", from.display());
            return Err(Error::Verification { path, reason });
        }
        Ok(CarriedFile { path: name.to_owned(), bytes, blake3: hash.to_string() })
    };
    others.map(listed).collect()
}

fn collect(root: &Path, inside: &Path, names: &mut Vec<PathBuf>) -> Result<()> {
    let folder = root.join(inside);
    for entry in fs::read_dir(&folder).map_err(Error::io("list", &folder))? {
        let name = inside.join(entry.map_err(Error::io("list", &folder))?.file_name());
        if root.join(&name).is_dir() {
            collect(root, &name, names)?;
        } else {
            names.push(name);
        }
    }
    Ok(())
}

/// Writes a text file to a folder, and returns its entry in the report.
pub(super) fn write_listed(folder: &Path, name: &str, text: &str) -> Result<CarriedFile> {
    write_text(&folder.join(name), text)?;
    Ok(CarriedFile { path: name.to_owned(), bytes: text.len() as u64, blake3: blake3::hash(text.as_bytes()).to_string() })
}

/// Writes the configuration of the adapter with low-rank corrections, if the model has one.
pub(super) fn write_adapter_config(model: &Model, folder: &Path) -> Result<()> {
    let Some(text) = model.adapter_config() else { return Ok(()) };
    let folder = folder.join(adapter::FOLDER);
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    write_text(&folder.join(adapter::CONFIG), &text)
}

pub(super) fn write_text(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    #[test]
    fn a_copied_configuration_is_not_overwritten() {
        let (input, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let header = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
        fs::write(input.path().join("model.safetensors"), weights).unwrap();
        fs::write(input.path().join(CONFIG), r#"{ "hidden_size": 4 }"#).unwrap();
        let mut model = Model::open(input.path()).unwrap();
        model.config.set("hidden_size", 2.into());
        let written = |model: &Model| {
            let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
            carry_over(model, &model.config, &BTreeMap::new(), output.path(), false, &work).unwrap();
            fs::read_to_string(output.path().join(CONFIG)).unwrap()
        };
        assert_eq!(written(&model), "{\n  \"hidden_size\": 2\n}\n");
        assert_eq!(stale_config(&model, &RunState::default()), None);
        model.auxiliary.files.push(CONFIG.into());
        assert_eq!(written(&model), r#"{ "hidden_size": 4 }"#);
        assert!(stale_config(&model, &RunState::default()).is_some());
        assert_eq!(stale_config(&model, &RunState { file: Some("out.onnx".into()), ..RunState::default() }), None);
    }
}

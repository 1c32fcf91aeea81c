//! What goes over to the output beside the weights, and the list of it in the report.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
use crate::model::{Config, Model};
use crate::report::{self, CarriedFile, OutputFile};
use crate::store::hash::hash_of;
use crate::work::Work;

/// Copies everything that lies around the weights, and writes the configuration, and what is another text than before. What the file of
/// weights holds is written beside no file that is `alone`.
pub(super) fn carry_over(model: &Model, config: &Config, other: &BTreeMap<PathBuf, String>, folder: &Path, alone: bool, work: &Work) -> Result<()> {
    for empty in &model.beside.empty {
        let to = folder.join(empty);
        fs::create_dir_all(&to).map_err(Error::io("create", &to))?;
    }
    for file in &model.beside.files {
        let (from, to) = (model.path.join(file), folder.join(file));
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        files::copy(&from, &to).map_err(Error::io("copy", &from))?;
        work.cancel.check()?;
    }
    for (name, text) in model.beside.made.iter().filter(|_| !alone) {
        write_text(&folder.join(name), text)?;
    }
    for (name, text) in other.iter().filter(|_| !alone) {
        write_text(&folder.join(name), text)?;
    }
    match config.render() {
        Some(text) => write_text(&folder.join("config.json"), &text),
        None => Ok(()),
    }
}

/// Bytes that [`carry_over`] copies.
pub(super) fn size(model: &Model, alone: bool) -> Result<u64> {
    let size = |file: &PathBuf| {
        let path = model.path.join(file);
        files::length(&path).map_err(Error::io("open", &path))
    };
    let made: u64 = model.beside.made.values().filter(|_| !alone).map(|text| text.len() as u64).sum();
    model.beside.files.iter().map(size).sum::<Result<u64>>().map(|copied| copied.saturating_add(made))
}

/// All files of an unfinished folder that are neither outputs of a format nor the report, read back: those that were copied are what
/// the input holds, but for those that were `written` in the place of the input's.
pub(super) fn list(folder: &Path, model: &Model, outputs: &[OutputFile], written: impl Fn(&str) -> bool, work: &Work) -> Result<Vec<CarriedFile>> {
    let mut names = Vec::new();
    collect(folder, Path::new(""), &mut names)?;
    names.sort();
    // What a name holds beyond UTF-8 cannot stand in JSON.
    let names = names.iter().filter_map(|name| name.to_str());
    let others = names.filter(|name| !report::FILES.contains(name) && !outputs.iter().any(|output| output.path == *name));
    let listed = |name: &str| {
        let (path, from) = (folder.join(name), model.path.join(name));
        let bytes = fs::metadata(&path).map_err(Error::io("open", &path))?.len();
        let hash = hash_of(&path, &work.quiet())?;
        let copied = !written(name) && model.beside.files.iter().any(|file| file == Path::new(name));
        let other_than_made = || model.beside.made.get(Path::new(name)).is_some_and(|text| !written(name) && blake3::hash(text.as_bytes()) != hash);
        if (copied && hash_of(&from, &work.quiet())? != hash) || other_than_made() {
            let reason = format!("does not hold what {} holds: that was changed meanwhile, or a disk is faulty", from.display());
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

pub(super) fn write_text(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io("write", path))
}

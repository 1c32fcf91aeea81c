//! A name for everything that decides what a run makes: two runs under one key write the same.

use std::path::{Path, PathBuf};

use super::Pipeline;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::report::Tool;
use crate::store::hash::hash_of;
use crate::work::Work;

/// Folders in folders; links may lead in circles.
const DEEPEST: usize = 32;

/// A hash that grows with what is said and with the contents of files.
pub(super) struct Key<'s> {
    hasher: blake3::Hasher,
    work: Work<'s>,
}

impl<'s> Key<'s> {
    /// Nothing yet.
    pub fn empty(work: &Work<'s>) -> Key<'s> {
        Key { hasher: blake3::Hasher::new(), work: work.quiet() }
    }

    /// What every run begins from: this version of the tool, the seed, the device, and the bytes of the model, wherever it lies.
    pub fn new(pipeline: &Pipeline, model: &Model, work: &Work<'s>) -> Result<Key<'s>> {
        let mut key = Key::empty(work);
        let tool = Tool::default();
        key.say(&format!("{} {:?} {}", tool.version, tool.commit, pipeline.seed));
        pipeline.running.describe().iter().for_each(|how| key.say(how));
        for path in model.inputs() {
            key.add(&path, &model.path, DEEPEST)?;
        }
        Ok(key)
    }

    /// Adds a line.
    pub fn say(&mut self, text: &str) {
        self.hasher.update(text.as_bytes());
        self.hasher.update(b"\n");
    }

    /// Adds a file, or all files of a folder and of those in it, by their contents and their names below it.
    #[cfg_attr(not(feature = "run"), allow(dead_code))]
    pub fn contents(&mut self, path: &Path) -> Result<()> {
        self.add(path, path.parent().unwrap_or(path), DEEPEST)
    }

    /// The key so far.
    pub fn name(&self) -> String {
        self.hasher.finalize().to_string()
    }

    fn add(&mut self, path: &Path, root: &Path, depth: usize) -> Result<()> {
        if !path.is_dir() {
            let hash = hash_of(path, &self.work)?;
            self.say(&format!("{} {hash}", path.strip_prefix(root).unwrap_or(path).display()));
            return Ok(());
        }
        if depth == 0 {
            return Err(Error::malformed(path, "folders lie too deep in one another"));
        }
        files(path)?.iter().try_for_each(|path| self.add(path, root, depth - 1))
    }
}

/// What lies in a folder, in the order of names; nothing where there is no folder.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths = entries.map(|entry| entry.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>().map_err(Error::io("read", folder))?;
    paths.sort();
    Ok(paths)
}

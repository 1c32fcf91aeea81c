//! Files next to an opened ONNX file. Only files with the names of configurations, tokenizers and processors
//! belong to the model, because its folder may be any folder.

use std::path::{Path, PathBuf};

use super::files::PREPROCESSING;
use super::{AuxiliaryFiles, Model, auxiliary_path, preprocessing_folder};
use crate::files;

/// Files of tokenizers and processors, in addition to [`PREPROCESSING`].
const TOKENIZERS: [&str; 9] = [
    "added_tokens.json",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "sentence_bert_config.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
];

/// Names of the existing files of tokenizers and processors.
fn preprocessing_names(folder: &Path) -> impl Iterator<Item = &'static str> {
    PREPROCESSING.into_iter().chain(TOKENIZERS).filter(|name| files::is_file(&auxiliary_path(folder, name)))
}

impl AuxiliaryFiles {
    /// The files next to an ONNX file or, in the layout of the Hub, in the folder above.
    pub fn adjacent(file: &Path) -> AuxiliaryFiles {
        let folder = preprocessing_folder(file);
        // Servers without lists of files would get a request for each name.
        let is_listed = || files::list(&folder).is_ok_and(|entries| entries.iter().any(|entry| entry.path == file));
        if files::is_remote(file) && !is_listed() {
            return AuxiliaryFiles::default();
        }
        let mut found: Vec<PathBuf> = preprocessing_names(&folder).map(PathBuf::from).collect();
        found.sort();
        AuxiliaryFiles { files: found, ..AuxiliaryFiles::default() }
    }
}

#[doc(hidden)]
impl Model {
    /// Whether the model is a file, whose auxiliary files are next to it.
    pub fn has_adjacent_files(&self) -> bool {
        self.onnx.is_some() && self.weight_files.first() == Some(&self.path)
    }

    /// The files of tokenizers and processors in the folder of the model.
    pub fn preprocessing_files(&self) -> impl Iterator<Item = PathBuf> {
        preprocessing_names(&self.path).map(|name| auxiliary_path(&self.path, name))
    }

    /// The path of an auxiliary file.
    pub fn path_of(&self, auxiliary: &Path) -> PathBuf {
        match auxiliary.to_str().filter(|_| self.has_adjacent_files()) {
            Some(name) => auxiliary_path(&preprocessing_folder(&self.path), name),
            None => self.path.join(auxiliary),
        }
    }
}

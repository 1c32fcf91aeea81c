//! Hashes of data, which are keys of stored results.

use std::path::Path;

use super::options::Data;
use super::records::image_files;
use crate::error::{Error, Result};
use crate::files::{self, SMALL_FILE};
use crate::store::ContentKey;
use crate::work::Work;

#[doc(hidden)]
impl Data {
    /// Hash of the options and of the contents of all files.
    pub fn content(&self, work: &Work) -> Result<String> {
        let mut key = ContentKey::new(work);
        key.line(&serde_json::to_string(self).unwrap_or_default());
        self.add_contents(&mut key, |path| path.parent().unwrap_or(path))
    }

    /// Hash of the contents of all files, independent of their location and of the options.
    pub fn contents(&self, work: &Work) -> Result<String> {
        self.add_contents(&mut ContentKey::new(work), |path| path)
    }

    /// Compares files of other machines with the hashes that their servers state. Large texts are compared
    /// while they are read.
    pub(super) fn check_remote(&self) -> Result<()> {
        for path in self.paths().filter(|path| files::is_remote(path) && files::is_file(path)) {
            let length = files::length(path).map_err(Error::io("open", path))?;
            if length <= SMALL_FILE || !self.has_texts() {
                files::check_content(path, &|_| true).map_err(Error::io("read", path))?;
            }
        }
        Ok(())
    }

    /// Adds the contents of all files to a key, with their names relative to `root`.
    fn add_contents(&self, key: &mut ContentKey, root: impl Fn(&Path) -> &Path) -> Result<String> {
        self.paths().try_for_each(|path| key.files([path], root(path)))?;
        if let Some(text) = &self.text {
            key.files(image_files(self, text), text.parent().unwrap_or(text))?;
        }
        if let Some(name) = &self.source {
            key.line(&super::source_registry::content(name)?);
        }
        Ok(key.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Cancel, Silent};

    #[test]
    fn images_of_texts_belong_to_the_contents() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.jsonl", "{\"text\": \"a\", \"image\": \"1.png\"}\n{\"text\": \"b\", \"images\": [\"2.png\"]}\n");
        write("a.csv", "text,image\na,1.png\nb,2.png\n");
        let part = r#"{"type": "image", "path": "2.png"}"#;
        write("chat.jsonl", &format!("{{\"messages\": [{{\"role\": \"user\", \"content\": [{part}]}}]}}\n"));
        write("plain.jsonl", "{\"text\": \"a\"}\n");
        write("1.png", "one");
        let hashes = |name: &str| {
            let (cancel, data) = (Cancel::default(), Data { text: Some(folder.path().join(name)), ..Data::default() });
            let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
            [data.content(&work).unwrap(), data.contents(&work).unwrap()]
        };
        for (name, differs) in [("a.jsonl", true), ("a.csv", true), ("chat.jsonl", true), ("plain.jsonl", false)] {
            write("2.png", "two");
            let before = hashes(name);
            assert_eq!(before, hashes(name));
            write("2.png", "another");
            let after = hashes(name);
            assert_eq!([before[0] != after[0], before[1] != after[1]], [differs; 2], "{name}");
        }
    }
}

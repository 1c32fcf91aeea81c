//! Texts of a corpus, as tokens.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::chat::ChatTemplate;
use super::records::{self, TextFormat};
use super::tokens::{TokenStream, Tokenizer};
use super::{Data, Target};
use crate::error::{Error, Result};
use crate::files;

/// The text of a record, and whether it already contains its special tokens.
type Render = for<'r> fn(&'r records::Record, Option<&ChatTemplate>, &Path) -> Result<(Cow<'r, str>, bool)>;

/// A file of texts.
pub struct Corpus {
    options: Data,
    path: PathBuf,
    template: Option<ChatTemplate>,
}

/// A text of a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusText {
    /// The text; a chat is rendered with the template of the model.
    pub text: String,
    /// Whether the text already contains its special tokens, as rendered chats do.
    pub has_special_tokens: bool,
    /// Line number, from 1.
    pub line: u64,
}

impl Corpus {
    /// Opens a file of plain lines, records or chats. `options` selects the column of the text. Fails if the
    /// file cannot be read, has no such column, or contains chats and the model has no chat template.
    pub fn open(options: &Data, path: &Path, target: &Target) -> Result<Corpus> {
        let template = records::template(records::open(options, path, false)?, target)?;
        Ok(Corpus { options: options.clone(), path: path.to_owned(), template })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is plain text, without columns. Fails if its format is not known.
    pub fn is_plain(&self) -> Result<bool> {
        Ok(records::layout(&self.options, &self.path)? == TextFormat::Lines)
    }

    /// Whether the file contains chats.
    pub fn has_chats(&self) -> bool {
        self.template.is_some()
    }

    /// The texts in order: lines that are not empty, or records. Fails if the file cannot be opened.
    pub fn texts(&self) -> Result<impl Iterator<Item = Result<CorpusText>> + '_> {
        self.rendered(records::Record::rendered)
    }

    /// Like [`texts`](Corpus::texts), but chats end before the first text of the assistant.
    pub fn prompts(&self) -> Result<impl Iterator<Item = Result<CorpusText>> + '_> {
        self.rendered(records::Record::prompt)
    }

    fn rendered(&self, render: Render) -> Result<impl Iterator<Item = Result<CorpusText>> + '_> {
        let text = move |record: records::Record| {
            let (text, has_special_tokens) = render(&record, self.template.as_ref(), &self.path)?;
            Ok(CorpusText { text: text.into_owned(), has_special_tokens, line: record.line })
        };
        Ok(records::open(&self.options, &self.path, false)?.map(move |record| text(record?)))
    }

    /// Tokenizes an entire plain text, so that line breaks are tokens too; `None` for other files. Fails if
    /// the file cannot be opened.
    pub fn entire_text<'t>(&self, tokenizer: &'t Tokenizer) -> Result<Option<impl Iterator<Item = Result<Vec<i64>>> + use<'t>>> {
        if !self.is_plain()? {
            return Ok(None);
        }
        let file = files::stream(&self.path).and_then(records::without_byte_order_mark).map_err(Error::io("open", &self.path))?;
        Ok(Some(TokenStream::new(tokenizer, file, self.path.clone())))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::model::SynthesizedFiles;

    #[test]
    fn lines_and_columns_are_read() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/evaluation");
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(golden.join("characters.json"), folder.path().join("tokenizer.json")).unwrap();
        let (plain, table) = (folder.path().join("a.txt"), folder.path().join("a.csv"));
        std::fs::write(&plain, "ab\n\ncd e\n").unwrap();
        std::fs::write(&table, "n,other\n1,ab\n2,cd\n").unwrap();
        let (config, synthesized) = (Map::new(), SynthesizedFiles::new());
        let target = Target::new(folder.path(), &synthesized, &config);
        let tokenizer = Tokenizer::open(&target, None).unwrap();
        let texts = |options: &Data, path: &Path| {
            let corpus = Corpus::open(options, path, &target).unwrap();
            let texts = corpus.texts().unwrap().map(|text| text.map(|text| (text.text, text.line)).unwrap()).collect::<Vec<_>>();
            let entire = corpus.entire_text(&tokenizer).unwrap().map(|parts| parts.collect::<Result<Vec<_>>>().unwrap().concat());
            (texts, entire)
        };
        let (lines, entire) = texts(&Data::default(), &plain);
        assert_eq!(lines, [("ab".to_owned(), 1), ("cd e".to_owned(), 3)]);
        // Line breaks are tokens only in the entire text.
        assert_eq!(entire.unwrap(), [3, 4, 5, 32, 32, 6, 7, 3, 8, 32]);
        let column = Data { text_column: Some(super::super::Column::Name("other".into())), ..Data::default() };
        assert_eq!(texts(&column, &table), (vec![("ab".to_owned(), 2), ("cd".to_owned(), 3)], None));
    }
}

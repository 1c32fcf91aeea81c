//! A record of a text file: a text or a chat, with its pair and label.

use std::borrow::Cow;
use std::path::Path;

use serde_json::Value;

use super::chat::{Chat, ChatTemplate, RenderedChat};
use super::labels::Label;
use super::tokens::Tokens;
use crate::error::{Error, Result};

pub(super) type Records = Box<dyn Iterator<Item = Result<Record>> + Send>;

/// Default names of the column of texts.
pub(super) const TEXT: [&str; 2] = ["text", "sentence"];
/// Names of the column, and keys in JSON objects, of the image of a text.
pub(super) const IMAGE: [&str; 2] = ["image", "images"];
/// Default names of the column of labels.
pub(super) const LABEL: [&str; 2] = ["label", "labels"];

/// Input text of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Text {
    Plain(String),
    Chat(Chat),
}

/// A text with its pair and label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub text: Text,
    pub pair: Option<String>,
    /// A text that does not match the first one.
    pub negative: Option<String>,
    pub label: Option<Label>,
    /// The values of the columns or keys for images.
    pub images: Vec<Value>,
    /// Line number, from 1.
    pub line: u64,
}

/// Keys of the file of an image in the content of a message.
const FILE: [&str; 3] = ["image", "path", "url"];

impl Record {
    /// Images in the content of the messages of a chat.
    fn parts(&self) -> impl Iterator<Item = &Value> {
        let messages = if let Text::Chat(chat) = &self.text { chat.messages.as_array() } else { None };
        let contents = messages.into_iter().flatten().filter_map(|message| message.get("content")?.as_array());
        contents.flatten().filter(|part| part.get("type").and_then(Value::as_str) == Some("image"))
    }

    /// Whether the text has images.
    pub fn has_images(&self) -> bool {
        !self.images.is_empty() || self.parts().next().is_some()
    }

    /// The files of the images of the text: of columns or keys, and of the messages of a chat.
    pub fn image_files(&self) -> Vec<&Value> {
        let in_parts = self.parts().filter_map(|part| FILE.iter().find_map(|name| part.get(*name)));
        self.images.iter().chain(in_parts).collect()
    }

    /// The text, and whether it already contains its special tokens, as rendered chats do.
    pub fn rendered(&self, template: Option<&ChatTemplate>, path: &Path) -> Result<(Cow<'_, str>, bool)> {
        match (&self.text, template) {
            (Text::Plain(text), None) => Ok((text.into(), false)),
            (Text::Chat(chat), Some(template)) => template.render_complete(chat).map(|text| (text.into(), true)).map_err(self.located(path)),
            _ => Err(self.mixed(path)),
        }
    }

    /// The text, of a chat only up to the first text of the assistant, and whether it already contains its
    /// special tokens.
    pub fn prompt(&self, template: Option<&ChatTemplate>, path: &Path) -> Result<(Cow<'_, str>, bool)> {
        match (&self.text, template) {
            (Text::Chat(chat), Some(template)) => template.render_prompt(chat).map(|text| (text.into(), true)).map_err(self.located(path)),
            _ => self.rendered(template, path),
        }
    }

    /// The text of a chat, with the text of the assistant in it.
    pub fn rendered_with_answers(&self, template: &ChatTemplate, path: &Path) -> Result<RenderedChat> {
        match &self.text {
            Text::Chat(chat) => template.render_with_answers(chat).map_err(self.located(path)),
            Text::Plain(_) => Err(self.mixed(path)),
        }
    }

    /// Adds the line to an error of the template.
    fn located(&self, path: &Path) -> impl Fn(Error) -> Error {
        let location = format!("{}: line {}", path.display(), self.line);
        move |e| {
            let hint = e.hint().unwrap_or_default();
            Error::run(location.clone(), e, hint)
        }
    }

    fn mixed(&self, path: &Path) -> Error {
        let (this, first) = if matches!(self.text, Text::Chat(_)) { ("a chat", "a text") } else { ("a text", "a chat") };
        Error::malformed(path, format!("line {} is {this}, but the first line is {first}: a file must contain either texts or chats", self.line))
    }
}

/// Rejects texts without tokens. `rows` has the first text of each record, then the second one of each, and
/// so on.
pub(super) fn reject_empty_texts(path: &Path, records: &[Record], rows: &[Tokens]) -> Result<()> {
    match records.iter().cycle().zip(rows).find(|(_, row)| row.ids.is_empty()) {
        Some((record, _)) => Err(Error::malformed(path, format!("line {} has a text without tokens: remove it if it is empty", record.line))),
        None => Ok(()),
    }
}

/// Names of columns, for messages.
pub(super) fn listed(names: &[String]) -> String {
    if names.is_empty() { "selected by number, since `header` is false".into() } else { names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ") }
}

/// Rejects a column that is selected for two purposes: the text, its pair, the negative text, and the label.
pub(super) fn require_distinct<C: PartialEq>(path: &Path, columns: [Option<C>; 4]) -> Result<()> {
    const OPTIONS: [&str; 4] = ["text_column", "pair_column", "negative_column", "label_column"];
    for (at, column) in columns.iter().enumerate().filter(|(_, column)| column.is_some()) {
        if let Some((one, other)) = columns.iter().take(at).position(|earlier| earlier == column).and_then(|one| Some((OPTIONS.get(one)?, OPTIONS.get(at)?))) {
            return Err(Error::option("data", format!("{}: `{one}` and `{other}` are the same column: select another one", path.display())));
        }
    }
    Ok(())
}

//! Records of text files: plain lines, columns, or JSON objects.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::Target;
use super::chat::{Chat, ChatTemplate};
use super::columns::columns;
use super::labels::Label;
use super::options::{Column, Data};
use super::record::{IMAGE, LABEL, TEXT, listed, require_distinct};
pub(super) use super::record::{Record, Records, Text};
use super::text_format::{NOT_UTF8, not_text};
pub(super) use super::text_format::{TextFormat, header_note, layout};
use crate::error::{Error, Result};
use crate::files;

/// The chat template for a file of chats; `None` for texts.
pub(super) fn template(mut records: impl Iterator<Item = Result<Record>>, target: &Target) -> Result<Option<ChatTemplate>> {
    match records.next().transpose()? {
        Some(Record { text: Text::Chat(_), .. }) => ChatTemplate::open(target.folder, target.synthesized).map(Some),
        _ => Ok(None),
    }
}

/// The byte order mark that some editors write at the beginning of a file.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// Key of the messages of a chat, in JSON objects.
const MESSAGES: &str = "messages";

/// The text of a file without the byte order mark at its beginning.
pub(super) fn without_byte_order_mark(mut file: impl Read + Send + 'static) -> std::io::Result<Box<dyn Read + Send>> {
    let mark = BYTE_ORDER_MARK.to_string();
    let mut start = Vec::new();
    file.by_ref().take(mark.len() as u64).read_to_end(&mut start)?;
    if start == mark.as_bytes() {
        start.clear();
    }
    Ok(Box::new(Cursor::new(start).chain(file)))
}

/// Opens a file; `labelled` requires labels.
pub(super) fn open(options: &Data, path: &Path, labelled: bool) -> Result<Records> {
    let file = files::stream(path).map_err(Error::io("open", path))?;
    match layout(options, path)? {
        TextFormat::Lines => {
            if labelled || options.pair_column.is_some() {
                return Err(Error::option("data", format!("{}: plain text has no columns; use .csv, .tsv or .jsonl", path.display())));
            }
            Ok(Box::new(lines(file, path).filter_map(|line| match line {
                Ok((_, text)) if text.trim().is_empty() => None,
                Ok((line, text)) => Some(Ok(Record { text: Text::Plain(text), pair: None, negative: None, label: None, images: Vec::new(), line })),
                Err(e) => Some(Err(e)),
            })))
        }
        TextFormat::Columns { delimiter, quoting } => columns(options, file, path, labelled, (delimiter, quoting)),
        TextFormat::Json => objects(options, file, path, labelled),
    }
}

/// Lines with their numbers.
fn lines(file: impl Read + Send + 'static, path: &Path) -> impl Iterator<Item = Result<(u64, String)>> + Send + 'static {
    let path = path.to_owned();
    (1..).zip(BufReader::new(file).lines()).map(move |(number, line)| {
        let without_mark = |text: String| if number == 1 { text.trim_start_matches(BYTE_ORDER_MARK).to_owned() } else { text };
        let wrong = |what: &str| Error::malformed(&path, format!("line {number} is {what}"));
        match line {
            Ok(text) => not_text(&text).map_or_else(|| Ok((number, without_mark(text))), |what| Err(wrong(what))),
            // Errors of servers have a text.
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData && e.get_ref().is_none() => Err(wrong(NOT_UTF8)),
            Err(e) => Err(Error::io("read", &path)(e)),
        }
    })
}

/// The files of the images of a file of texts, each once. None if its first text has none: either all texts
/// have images or none. Errors are left to the reader of the samples.
pub(super) fn image_files(options: &Data, path: &Path) -> BTreeSet<PathBuf> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let records = open(options, path, false).into_iter().flatten().map_while(Result::ok).take_while(Record::has_images);
    let named = |record: Record| record.image_files().into_iter().filter_map(Value::as_str).map(|file| folder.join(file)).collect::<Vec<_>>();
    records.flat_map(named).filter(|file| files::is_file(file)).collect()
}

/// An image, or several in a list.
fn listed_images(value: &Value) -> Vec<Value> {
    match value {
        Value::Null => Vec::new(),
        Value::Array(images) => images.clone(),
        image => vec![image.clone()],
    }
}

fn objects(options: &Data, file: impl Read + Send + 'static, path: &Path, labelled: bool) -> Result<Records> {
    let name = |column: &Option<Column>| match column {
        Some(Column::Index(index)) => Err(Error::option("data", format!("column {index}: values of JSON objects are selected by name"))),
        Some(Column::Name(name)) => Ok(Some(name.clone())),
        None => Ok(None),
    };
    let names = Names {
        text: name(&options.text_column)?,
        pair: name(&options.pair_column)?,
        negative: name(&options.negative_column)?,
        label: name(&options.label_column)?,
        labelled,
        path: path.to_owned(),
    };
    Ok(Box::new(lines(file, path).filter_map(move |line| match line {
        Ok((_, text)) if text.trim().is_empty() => None,
        Ok((line, text)) => Some(names.record(line, &text)),
        Err(e) => Some(Err(e)),
    })))
}

/// Keys of the values in JSON objects.
struct Names {
    text: Option<String>,
    pair: Option<String>,
    negative: Option<String>,
    label: Option<String>,
    labelled: bool,
    path: PathBuf,
}

impl Names {
    fn record(&self, line: u64, text: &str) -> Result<Record> {
        let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| {
            Error::malformed(&self.path, format!("line {line} is not a JSON object: {e}; each line is an object such as {{\"text\": \"...\"}}"))
        })?;
        let find = |name: &Option<String>, defaults: &[&str], option: &str| match name {
            Some(name) => object.get(name).ok_or_else(|| format!("`{name}`")),
            None => defaults
                .iter()
                .find_map(|name| object.get(*name))
                .ok_or_else(|| format!("`{}`: specify `{option}`", defaults.first().copied().unwrap_or_default())),
        };
        let value = |found: Result<&Value, String>| match found {
            Ok(Value::String(text)) => Ok(Label::Text(text.clone())),
            Ok(Value::Bool(value)) => Ok(Label::Text(value.to_string())),
            Ok(Value::Number(number)) => Ok(Label::Number(number.to_string())),
            Ok(_) => Err(Error::malformed(&self.path, format!("line {line}: a text or label must be a string, a number or a boolean"))),
            Err(missing) => {
                let names: Vec<String> = object.keys().cloned().collect();
                Err(Error::malformed(&self.path, format!("line {line} has no {missing}; its keys are {}", listed(&names))))
            }
        };
        let text = TEXT.into_iter().find(|name| object.contains_key(*name));
        let named = self.text.as_deref().or(text).or_else(|| object.contains_key(MESSAGES).then_some(MESSAGES));
        if let (None, Some(text), true) = (&self.text, text, object.contains_key(MESSAGES)) {
            return Err(self.wrong(line, &format!("has both `{text}` and `{MESSAGES}`: specify one of them as `text_column`")));
        }
        let label = self.label.as_deref().or_else(|| LABEL.into_iter().find(|name| self.labelled && object.contains_key(*name)));
        require_distinct(&self.path, [named, self.pair.as_deref(), self.negative.as_deref(), label])?;
        let text = match (named, named.and_then(|name| object.get(name))) {
            (Some(name), Some(Value::Array(messages))) if name == MESSAGES || messages.first().is_some_and(Value::is_object) => {
                Text::Chat(self.chat(line, messages, &object)?)
            }
            (Some(MESSAGES), Some(_)) => return Err(self.wrong(line, "`messages` is not a list: store it as JSON, not as a string")),
            _ => Text::Plain(value(find(&self.text, &TEXT, "text_column"))?.into_text()),
        };
        Ok(Record {
            text,
            pair: self.pair.as_ref().map(|_| value(find(&self.pair, &[], "pair_column"))).transpose()?.map(Label::into_text),
            negative: self.negative.as_ref().map(|_| value(find(&self.negative, &[], "negative_column"))).transpose()?.map(Label::into_text),
            label: if self.label.is_some() || self.labelled { Some(value(find(&self.label, &LABEL, "label_column"))?) } else { None },
            images: IMAGE.into_iter().filter_map(|name| object.get(name)).flat_map(listed_images).collect(),
            line,
        })
    }

    fn chat(&self, line: u64, messages: &[Value], object: &Map<String, Value>) -> Result<Chat> {
        let tools = object.get("tools").cloned().unwrap_or_default();
        let is_valid = tools.is_null() || tools.as_array().is_some_and(|tools| tools.iter().all(Value::is_object));
        match messages {
            [] => Err(self.wrong(line, "the chat has no messages")),
            _ if !messages.iter().all(|message| message.get("role").is_some_and(Value::is_string)) => {
                Err(self.wrong(line, "a message of a chat has no `role`"))
            }
            _ if self.pair.is_some() => Err(self.wrong(line, "chats do not support `pair_column`: remove it")),
            _ if !is_valid => Err(self.wrong(line, "`tools` is not a list of objects: store it as JSON, not as a string")),
            _ => Ok(Chat { messages: messages.into(), tools }),
        }
    }

    fn wrong(&self, line: u64, what: &str) -> Error {
        Error::malformed(&self.path, format!("line {line}: {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str, options: &str, labelled: bool) -> Result<Vec<Record>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let options: Data = serde_saphyr::from_str(options).unwrap();
        let all = || open(&options, &path, labelled)?.collect::<Result<Vec<_>>>();
        all().map_err(|e| e.to_string())
    }

    fn record(text: &str, pair: Option<&str>, label: Option<&str>, line: u64) -> Record {
        Record {
            text: Text::Plain(text.into()),
            pair: pair.map(Into::into),
            negative: None,
            label: label.map(|text| Label::Text(text.into())),
            images: Vec::new(),
            line,
        }
    }

    #[test]
    fn every_format_is_read() {
        for name in ["a.txt", "a.raw"] {
            assert_eq!(read(name, "one\n\ntwo", "{}", false).unwrap(), [record("one", None, None, 1), record("two", None, None, 3)]);
        }
        let columns = "id,text,label\n1,\"a, b\",x\n2,c,y\n";
        assert_eq!(read("a.csv", columns, "{}", true).unwrap(), [record("a, b", None, Some("x"), 2), record("c", None, Some("y"), 3)]);
        let windows = columns.replace('\n', "\r\n");
        assert_eq!(read("a.csv", &windows, "{}", true).unwrap(), [record("a, b", None, Some("x"), 2), record("c", None, Some("y"), 3)]);
        // Blank lines, and a text of two lines.
        let blank = "text,label\na,x\n\n\n\"b\nc\",y\n\nd,z";
        let found = [("a", "x", 2), ("b\nc", "y", 5), ("d", "z", 8)].map(|(text, label, line)| record(text, None, Some(label), line));
        assert_eq!(read("a.csv", blank, "{}", true).unwrap(), found);
        let crlf: Vec<u64> = read("a.csv", &blank.replace('\n', "\r\n"), "{}", true).unwrap().iter().map(|record| record.line).collect();
        assert_eq!(crlf, [2, 5, 8]);
        let bare = "3\t\"q\tr\textra\n4\ts\tt\n";
        let options = "{ header: false, text_column: 1, pair_column: 2, label_column: 0 }";
        assert_eq!(read("a.tsv", bare, options, true).unwrap(), [record("\"q", Some("r"), Some("3"), 1), record("s", Some("t"), Some("4"), 2)]);
        let three = Record { negative: Some("n".into()), ..record("a", Some("p"), None, 2) };
        assert_eq!(read("a.csv", "q,p,m\na,p,n\n", "{ text_column: q, pair_column: p, negative_column: m }", false).unwrap(), std::slice::from_ref(&three));
        let object = "\n{\"q\": \"a\", \"p\": \"p\", \"m\": \"n\"}\n";
        assert_eq!(read("a.jsonl", object, "{ text_column: q, pair_column: p, negative_column: m }", false).unwrap(), [three]);
        let json = "{\"text\": \"a\", \"label\": 1}\n\n{\"label\": true, \"text\": \"b\"}\n";
        let number = Record { label: Some(Label::Number("1".into())), ..record("a", None, None, 1) };
        assert_eq!(read("a.jsonl", json, "{}", true).unwrap(), [number, record("b", None, Some("true"), 3)]);
    }

    #[test]
    fn mistakes_name_file_line_and_columns() {
        let wrong = |name: &str, text: &str, options: &str| read(name, text, options, true).unwrap_err();
        let column = wrong("a.csv", "id,body\n1,a\n", "{ text_column: txt }");
        assert!(column.contains("no column `txt`") && column.contains("`id`, `body`"), "{column}");
        assert!(wrong("a.csv", "text,b\n1,a\n", "{}").contains("label_column"));
        assert!(wrong("a.csv", "a,b\n1,2\n", "{ header: false, text_column: b }").contains("column `b`: with `header: false`, columns are selected by number"));
        assert!(wrong("a.csv", "a,b\n1\n", "{ text_column: 0, label_column: 1 }").contains("line 2 has 1 column, but column 1"));
        let [tabs, semicolons] = [("3\ta\n", "header: false, text_column: 1"), ("text;label\na;x\n", "")]
            .map(|(text, options)| read("a.csv", text, &format!("{{ {options} }}"), false).unwrap_err());
        assert!(
            tabs.contains(
                r#"line 1 has 1 column, but column 1 (counted from 0) is required; if its columns are separated by `\t`, set `delimiter: "\t"`, as in"#
            ),
            "{tabs}"
        );
        assert!(tabs.contains("as in `'{ text: ") && !tabs.contains("--") && tabs.contains(r#"a.csv, delimiter: "\t" }'"#), "{tabs}");
        assert!(semicolons.contains("line 1 is one column, `text;label`: if its columns are separated by `;`, set `delimiter: \";\"`"), "{semicolons}");
        assert_eq!(read("a.csv", "text;label\na;x\n", "{ text_column: text;label }", false).unwrap(), [record("a;x", None, None, 2)]);
        assert!(wrong("a.jsonl", "{\"a\": 1}\n", "{}").contains("line 1 has no `text`: specify `text_column`; its keys are `a`"));
        assert!(wrong("a.jsonl", "{\"a\": 1}\n", "{ text_column: b }").contains("line 1 has no `b`; its keys are `a`"));
        assert!(wrong("a.jsonl", "[1]\n", "{}").contains("line 1 is not a JSON object"));
        assert!(wrong("a.txt", "a\n", "{}").contains("no columns"));
        assert!(wrong("a.md", "a\n", "{}").contains(".jsonl"));
    }

    /// A number is rarely the name of a column.
    #[test]
    fn a_first_line_with_a_numeric_label_needs_the_option_header() {
        let (text, options) = ("a\t3.2\nb\t1\n", "text_column: 0, label_column: 1");
        let error = read("a.tsv", text, &format!("{{ {options} }}"), true).unwrap_err();
        assert!(error.contains("its label column contains the number `3.2`: set `header: false` if the line is a sample"), "{error}");
        assert_eq!(read("a.tsv", text, &format!("{{ {options}, header: false }}"), true).unwrap().len(), 2);
        assert_eq!(read("a.tsv", text, &format!("{{ {options}, header: true }}"), true).unwrap().len(), 1);
        assert_eq!(read("a.tsv", &text.replace("3.2", "score"), &format!("{{ {options} }}"), true).unwrap().len(), 1);
        let note = |name: &str, options: &str| header_note(&serde_saphyr::from_str(options).unwrap(), Path::new(name));
        assert!(note("a.tsv", "{ text_column: 0 }").unwrap().starts_with("line 1 of a.tsv was taken as the header: set `header: false`"));
        for (name, options) in [("a.tsv", "{ text_column: 0, header: true }"), ("a.tsv", "{ text_column: text }"), ("a.txt", "{ text_column: 0 }")] {
            assert_eq!(note(name, options), None);
        }
    }

    /// The first sample of a file without a header must not be lost.
    #[test]
    fn the_header_of_a_single_column_must_be_certain() {
        for options in ["{}", "{ text_column: 0 }"] {
            let error = read("a.csv", "one\ntwo\n", options, false).unwrap_err();
            assert!(
                error.contains("line 1 is one column, `one`: set it as `text_column` if it names the column; if it is a sample, set `header: false`"),
                "{error}"
            );
        }
        for (header, options, count) in [
            ("text", "{}", 1),
            ("sentence", "{ text_column: 0 }", 1),
            ("one", "{ text_column: one }", 1),
            ("one", "{ header: true }", 1),
            ("one", "{ header: false, text_column: 0 }", 2),
        ] {
            assert_eq!(read("a.csv", &format!("{header}\ntwo\n"), options, false).unwrap().len(), count, "{header} {options}");
        }
    }

    #[test]
    fn columns_must_be_unique_and_distinct() {
        let wrong = |name: &str, text: &str, options: &str| read(name, text, options, true).unwrap_err();
        let twice = "text,label,text\na,x,b\n";
        assert!(wrong("a.csv", twice, "{}").contains("has several columns `text`: rename one of them, or select one by its number"));
        assert!(wrong("a.csv", twice, "{ text_column: text }").contains("has several columns `text`"));
        assert_eq!(read("a.csv", twice, "{ text_column: 2, header: true }", true).unwrap(), [record("b", None, Some("x"), 2)]);
        // A column that is not read.
        assert_eq!(read("a.csv", "text,label,id,id\na,x,1,2\n", "{}", true).unwrap(), [record("a", None, Some("x"), 2)]);
        let (columns, object) = ("text,label\na,x\n", "{\"text\": \"a\", \"label\": \"x\"}\n");
        for (options, names) in [
            ("{ label_column: text }", "`text_column` and `label_column`"),
            ("{ pair_column: text }", "`text_column` and `pair_column`"),
            ("{ text_column: label, label_column: label }", "`text_column` and `label_column`"),
            ("{ pair_column: label, label_column: label }", "`pair_column` and `label_column`"),
        ] {
            for (name, text) in [("a.csv", columns), ("a.jsonl", object)] {
                let error = wrong(name, text, options);
                assert!(error.contains(&format!("{names} are the same column: select another one")), "{name}: {error}");
            }
        }
        assert!(wrong("a.csv", columns, "{ text_column: 0, label_column: text }").contains("are the same column"));
        assert!(wrong("a.jsonl", object, "{ text_column: label }").contains("`text_column` and `label_column` are the same column"));
    }

    /// Either value could be the sample.
    #[test]
    fn objects_with_a_text_and_messages_need_the_option() {
        for key in TEXT {
            let object = format!("{{\"{key}\": \"a\", \"messages\": [{{\"role\": \"user\", \"content\": \"b\"}}]}}\n");
            let error = read("a.jsonl", &object, "{}", false).unwrap_err();
            assert!(error.contains(&format!("line 1: has both `{key}` and `messages`: specify one of them as `text_column`")), "{error}");
            assert_eq!(read("a.jsonl", &object, &format!("{{ text_column: {key} }}"), false).unwrap(), [record("a", None, None, 1)]);
            let chat = &read("a.jsonl", &object, "{ text_column: messages }", false).unwrap()[0];
            assert!(matches!(chat.text, Text::Chat(_)));
        }
    }

    #[test]
    fn texts_with_delimiters_and_unclosed_quotes_are_refused() {
        let header = "text,label\n";
        let wrong = |name: &str, text: &str, options: &str| read(name, text, options, true).unwrap_err();
        assert!(wrong("a.csv", &format!("{header}a,x\nb, c,y\n"), "{}").contains("line 3 has 3 fields for 2 columns"));
        assert!(wrong("a.csv", "a,x\nb, c,y\n", "{ header: false, text_column: 0, label_column: 1 }").contains("line 2 has 3 fields for 2 columns"));
        assert!(wrong("a.tsv", "text\tlabel\na\tx\tb\n", "{}").contains("line 2 has 3 fields for 2 columns"));
        // Empty fields at the end of a line, and a last line without a line feed.
        let all = [record("a", None, Some("x"), 2), record("b", None, Some("y"), 3)];
        assert_eq!(read("a.csv", &format!("{header}a,x,,\nb,y"), "{}", true).unwrap(), all);
        for end in ["", "\n", "\nb,y\n"] {
            let error = wrong("a.csv", &format!("{header}c,z\n\"a,x{end}"), "{}");
            assert!(error.contains("line 3 has a quoted field that is not closed") && error.contains("`quoting: false`"), "{error}");
        }
        assert!(wrong("a.csv", "text,\"label\na,x\n", "{}").contains("line 1 has a quoted field that is not closed"));
        assert_eq!(read("a.csv", &format!("{header}\"a,x\n"), "{ quoting: false }", true).unwrap(), [record("\"a", None, Some("x"), 2)]);
        assert_eq!(read("a.csv", &format!("{header}5\" disk,x\n"), "{}", true).unwrap(), [record("5\" disk", None, Some("x"), 2)]);
        assert_eq!(read("a.csv", header, "{}", true).unwrap(), []);
        for empty in ["", "\n\n"] {
            assert!(wrong("a.csv", empty, "{}").contains("a.csv: is empty: it has neither a header nor samples"));
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        for (name, text) in [("a.txt", "\u{feff}one\n"), ("a.csv", "\u{feff}text\none\n"), ("a.jsonl", "\u{feff}{\"text\": \"one\"}\n")] {
            let found = read(name, text, "{}", false).unwrap();
            assert_eq!(found.iter().map(|record| &record.text).collect::<Vec<_>>(), [&Text::Plain("one".into())], "{name}");
        }
    }

    #[test]
    fn streams_lose_only_a_byte_order_mark_at_the_beginning() {
        let read = |text: &'static str| {
            let mut read = String::new();
            without_byte_order_mark(text.as_bytes()).unwrap().read_to_string(&mut read).unwrap();
            read
        };
        for (text, expected) in [("\u{feff}one\u{feff}", "one\u{feff}"), ("\u{feff}", ""), ("one", "one"), ("a", "a"), ("", ""), ("漢\u{feff}", "漢\u{feff}")]
        {
            assert_eq!(read(text), expected);
        }
    }

    #[test]
    fn invalid_utf8_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in [("a.txt", b"fine\n\xff\n".as_slice()), ("a.csv", b"text\n\xff\n")] {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let error = open(&Data::default(), &path, false).unwrap().collect::<Result<Vec<_>>>().unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains("UTF-8"), "{error}");
        }
        for (name, text, options) in
            [("a.txt", "one", "{}"), ("a.csv", "id,text", "{}"), ("a.csv", "one,1", "{ header: false, text_column: 0 }"), ("a.jsonl", "{}", "{}")]
        {
            let utf16: String = text.chars().flat_map(|each| [each, '\0']).collect();
            assert!(read(name, &utf16, options, false).unwrap_err().contains("line 1 is text with NUL characters: convert it if it is UTF-16"));
        }
    }
}

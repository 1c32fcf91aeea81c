//! Records of text files with columns.

use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;

use serde_json::Value;

use super::labels::Label;
use super::options::{Column, Data};
use super::record::{IMAGE, LABEL, Record, Records, TEXT, Text, listed, require_distinct};
use super::text_format::{NOT_UTF8, not_text, numeric_label, other_delimiter};
use crate::error::{Error, Result, counted};
use crate::files;

/// A record that is appended to files with columns. If a quoted field is not closed, it is the end of that
/// field instead.
const LAST_RECORD: &str = "\u{1}end of file\u{1}";
/// Completes the message about a single column whose first line may be a header or a sample.
const ONE_COLUMN: &str =
    "set it as `text_column` if it names the column; if it is a sample, set `header: false` and `text_column: 0`, or rename the file to .txt";

/// Records of an open file; `labelled` requires labels.
pub(super) fn columns(options: &Data, file: impl Read + Send + 'static, path: &Path, labelled: bool, (delimiter, quoting): (u8, bool)) -> Result<Records> {
    let header = options.header.unwrap_or(true);
    let has_crlf = has_crlf(path);
    let end = if has_crlf { "\r\n" } else { "\n" };
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(header)
        .delimiter(delimiter)
        .quoting(quoting)
        .flexible(true)
        .from_reader(file.chain(Cursor::new(format!("{end}{LAST_RECORD}{end}"))));
    let wrong = |path: &Path, e: csv::Error| {
        let line = e.position().map_or(String::new(), |at| format!("line {}: ", at.line()));
        Error::malformed(path, format!("{line}{}", plain(&e)))
    };
    let names: Vec<String> = if header { reader.headers().map_err(|e| wrong(path, e))?.iter().map(str::to_owned).collect() } else { Vec::new() };
    if let Some(what) = names.iter().find_map(|name| not_text(name)) {
        return Err(Error::malformed(path, format!("line 1 is {what}")));
    }
    match names.last() {
        Some(name) if name == LAST_RECORD => {
            return Err(Error::malformed(
                path,
                "is empty: it has neither a header nor samples; the first line names the columns, and each other line is a sample",
            ));
        }
        last => require_closed(path, 1, last.map(String::as_str))?,
    }
    if let Some(score) = numeric_label(options, &names) {
        let reason = format!(
            "line 1 is taken as the header, but its label column contains the number `{score}`: set `header: false` if the line is a sample, or `header: true` if it is the header"
        );
        return Err(Error::malformed(path, reason));
    }
    let position = |name: &str| {
        let mut found = names.iter().enumerate().filter(|(_, other)| *other == name).map(|(index, _)| index);
        match (found.next(), found.next()) {
            (first, None) => Ok(first),
            _ => Err(Error::malformed(path, format!("has several columns `{name}`: rename one of them, or select one by its number, from 0"))),
        }
    };
    let find = |column: &Column| match column {
        Column::Index(index) => Ok(*index),
        Column::Name(name) if header => position(name)?.ok_or_else(|| no_column(path, name, &names)),
        Column::Name(name) => Err(Error::option("data", format!("column `{name}`: with `header: false`, columns are selected by number, from 0"))),
    };
    let default = |candidates: &[&str]| candidates.iter().find_map(|name| position(name).transpose()).transpose();
    if let ([name], None | Some(Column::Index(_))) = (names.as_slice(), &options.text_column) {
        let hint = other_delimiter(delimiter, path, Some(name)).filter(|_| options.delimiter.is_none() && options.text_column.is_none());
        let hint = hint.map(|hint| format!("{hint}, or name it as `text_column`"));
        let is_ambiguous = options.header.is_none() && !TEXT.contains(&name.as_str());
        if let Some(hint) = hint.or_else(|| is_ambiguous.then(|| ONE_COLUMN.to_owned())) {
            return Err(Error::malformed(path, format!("line 1 is one column, `{name}`: {hint}")));
        }
    }
    let text = match &options.text_column {
        Some(column) => find(column)?,
        None if names.len() == 1 => 0,
        None if header => default(&TEXT)?.ok_or_else(|| {
            Error::option(
                "data",
                format!("{}: specify `text_column`; the columns are {}; or set `header: false` if the first line is a sample", path.display(), listed(&names)),
            )
        })?,
        None => {
            return Err(Error::option(
                "data",
                format!(
                    "{}: specify the number of the column of texts, which is counted from 0, as in `text_column: 0`, since `header` is false",
                    path.display()
                ),
            ));
        }
    };
    let pair = options.pair_column.as_ref().map(find).transpose()?;
    let negative = options.negative_column.as_ref().map(find).transpose()?;
    let label = match &options.label_column {
        Some(column) => Some(find(column)?),
        None if labelled => Some(
            default(&LABEL)?.ok_or_else(|| Error::option("data", format!("{}: specify `label_column`; the columns are {}", path.display(), listed(&names))))?,
        ),
        None => None,
    };
    require_distinct(path, [Some(text), pair, negative, label])?;
    let images: Vec<usize> = names.iter().enumerate().filter(|(_, name)| IMAGE.contains(&name.as_str())).map(|(index, _)| index).collect();
    let path = path.to_owned();
    // Texts do not contain tabs, and some tables without a header append columns to single rows.
    let (may_vary, mut width) = (!header && delimiter == b'\t', header.then_some(names.len()));
    let mut records = reader.into_records();
    let records = std::iter::from_fn(move || {
        let record = match records.next()? {
            Ok(record) if record.len() == 1 && record.get(0) == Some(LAST_RECORD) => return None,
            Ok(record) => record,
            Err(e) => return Some(Err(wrong(&path, e))),
        };
        // The position of a record is that of the blank lines before it. The reader counts the line feed of
        // CRLF as part of the next line. A field that is not closed contains the last line feed.
        let is_ended = !has_crlf && !is_open(record.iter().next_back());
        let within = record.as_slice().bytes().filter(|byte| *byte == b'\n').count() as u64;
        let line = records.reader().position().line().saturating_sub(within).saturating_sub(u64::from(is_ended));
        let width = *width.get_or_insert(record.len());
        let get = |index: usize| {
            let missing = || {
                let reason = format!("line {line} has {}, but column {index} (counted from 0) is required", counted(record.len(), "column"));
                let hint = other_delimiter(delimiter, &path, record.get(0)).map_or_else(String::new, |hint| format!("; {hint}"));
                Error::malformed(&path, format!("{reason}{hint}"))
            };
            record.get(index).map(str::to_owned).ok_or_else(missing)
        };
        let read = || {
            if let Some(what) = not_text(record.as_slice()) {
                return Err(Error::malformed(&path, format!("line {line} is {what}")));
            }
            require_closed(&path, line, record.iter().next_back())?;
            if !may_vary && record.iter().skip(width).any(|field| !field.trim().is_empty()) {
                let reason = format!("line {line} has {} fields for {}: quote texts that contain the delimiter", record.len(), counted(width, "column"));
                return Err(Error::malformed(&path, reason));
            }
            let label = label.map(get).transpose()?.map(Label::Text);
            let images = images.iter().map(|index| get(*index)).collect::<Result<Vec<_>>>()?;
            Ok(Record {
                text: Text::Plain(get(text)?),
                pair: pair.map(get).transpose()?,
                negative: negative.map(get).transpose()?,
                label,
                images: images.into_iter().filter(|file| !file.is_empty()).map(Value::String).collect(),
                line,
            })
        };
        Some(read())
    });
    Ok(Box::new(records))
}

/// Checks the last field of a record.
fn require_closed(path: &Path, line: u64, last: Option<&str>) -> Result<()> {
    if !is_open(last) {
        return Ok(());
    }
    let reason = format!("line {line} has a quoted field that is not closed; if quotation marks belong to the texts, set `quoting: false`");
    Err(Error::malformed(path, reason))
}

/// Whether the last field of a record is not closed.
fn is_open(last: Option<&str>) -> bool {
    last.is_some_and(|field| field.trim_end().ends_with(LAST_RECORD))
}

/// Whether the first line ends with a carriage return and a line feed.
fn has_crlf(path: &Path) -> bool {
    let mut first = Vec::new();
    let read = files::stream(path).and_then(|file| BufReader::new(file).read_until(b'\n', &mut first));
    read.is_ok() && first.ends_with(b"\r\n")
}

/// The message without the position, which the caller adds.
fn plain(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Utf8 { .. } => format!("is {NOT_UTF8}"),
        csv::ErrorKind::Io(e) => e.to_string(),
        _ => error.to_string(),
    }
}

fn no_column(path: &Path, name: &str, names: &[String]) -> Error {
    Error::option("data", format!("{} has no column `{name}`; the columns are {}", path.display(), listed(names)))
}

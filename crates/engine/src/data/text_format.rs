//! Format of a text file, from the options and its extension, and the header of its columns.

use std::path::Path;

use super::options::{Column, Data};
use crate::error::{Error, Result, redact_path};

/// Completes messages about a line or a file of texts in another encoding.
pub(super) const NOT_UTF8: &str =
    "not UTF-8 text: check that it is the right file, or convert it, as with `iconv -f ISO-8859-1 -t UTF-8`, or `iconv -f UTF-16 -t UTF-8` if it is UTF-16";

/// Completes messages about a line or a file with NUL characters, such as those of UTF-16.
const HAS_NUL: &str = "text with NUL characters: convert it if it is UTF-16, as with `iconv -f UTF-16LE -t UTF-8`, or remove them";

/// Completes the message about a text that is not one because of its NUL characters.
pub(super) fn not_text(text: &str) -> Option<&'static str> {
    text.contains('\0').then_some(HAS_NUL)
}

/// Format of a text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextFormat {
    Lines,
    Columns { delimiter: u8, quoting: bool },
    Json,
}

/// The format, from the options and the file extension.
pub(super) fn layout(options: &Data, path: &Path) -> Result<TextFormat> {
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase();
    let tabs = ending == "tsv";
    if let Some(delimiter) = options.delimiter {
        let delimiter = u8::try_from(delimiter).map_err(|_| Error::option("data", format!("`delimiter` must be an ASCII character, not `{delimiter}`")))?;
        return Ok(TextFormat::Columns { delimiter, quoting: options.quoting.unwrap_or(delimiter != b'\t') });
    }
    match ending.as_str() {
        "csv" | "tsv" => Ok(TextFormat::Columns { delimiter: if tabs { b'\t' } else { b',' }, quoting: options.quoting.unwrap_or(!tabs) }),
        "jsonl" => Ok(TextFormat::Json),
        "txt" | "raw" => Ok(TextFormat::Lines),
        _ => Err(Error::option(
            "data",
            format!("{}: text files must be .txt, .raw, .csv, .tsv or .jsonl, or `delimiter` must be set", redact_path(path).display()),
        )),
    }
}

/// The number in the label column of a header, if `header` is not set and the column is selected by number:
/// the line is probably a sample.
pub(super) fn numeric_label<'n>(options: &Data, names: &'n [String]) -> Option<&'n str> {
    let Some(Column::Index(index)) = options.label_column.as_ref().filter(|_| options.header.is_none()) else { return None };
    names.get(*index).map(|name| name.trim()).filter(|name| name.parse().is_ok_and(f64::is_finite))
}

/// A note about the first line of a file whose columns are selected by number, which is not a sample unless
/// `header` is set.
pub(super) fn header_note(options: &Data, path: &Path) -> Option<String> {
    let columns = [&options.text_column, &options.pair_column, &options.negative_column, &options.label_column];
    let is_numbered = columns.into_iter().flatten().any(|column| matches!(column, Column::Index(_)));
    let Ok(TextFormat::Columns { .. }) = layout(options, path) else { return None };
    (is_numbered && options.header.is_none()).then(|| {
        let file = redact_path(path);
        format!("line 1 of {} was taken as the header: set `header: false` if it is a sample, or `header: true` if it is the header", file.display())
    })
}

/// A hint to set `delimiter` if the first field of a line contains one that is probably that of the file.
pub(super) fn other_delimiter(delimiter: u8, path: &Path, first: Option<&str>) -> Option<String> {
    let first = first?;
    let (_, name) = [(b'\t', r"\t"), (b';', ";"), (b'|', "|")].into_iter().find(|(other, _)| delimiter != *other && first.contains(char::from(*other)))?;
    let example = format!("{{ text: {}, delimiter: \"{name}\" }}", redact_path(path).display());
    Some(format!("if its columns are separated by `{name}`, set `delimiter: \"{name}\"`, as in `'{example}'`"))
}

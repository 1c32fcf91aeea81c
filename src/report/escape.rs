//! Escapes names and texts from untrusted files, with one function for each output medium.

use std::borrow::Cow;
use std::fmt::Write;

use serde::Serialize;

/// Whether a character can change the display of other text: a control character, a bidirectional
/// formatting character, or a line separator.
fn is_control(c: char) -> bool {
    let is_formatting = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    is_formatting || (c.is_control() && !matches!(c, '\n' | '\t'))
}

/// Replaces each character for which `predicate` holds.
fn replaced<'a>(text: &'a str, predicate: impl Fn(char) -> bool, replace: impl Fn(&mut String, char)) -> Cow<'a, str> {
    if !text.contains(&predicate) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len().saturating_add(16));
    for c in text.chars() {
        if predicate(c) { replace(&mut out, c) } else { out.push(c) }
    }
    out.into()
}

/// Escapes multi-line text for a terminal or an HTML page.
pub fn display(text: &str) -> Cow<'_, str> {
    replaced(text, is_control, |out, c| out.extend(c.escape_default()))
}

/// Escapes text for a single line: line breaks are escaped too.
pub fn display_line(text: &str) -> Cow<'_, str> {
    one_line(text, |_| false)
}

/// Serializes a value as JSON on one line, with control characters as escape sequences.
///
/// # Errors
/// The value cannot be serialized.
pub fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|text| json_text(&text).into_owned())
}

/// Serializes a value as indented JSON, with control characters as escape sequences.
///
/// # Errors
/// The value cannot be serialized.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(value).map(|text| json_text(&text).into_owned())
}

/// Escapes control characters, which occur in JSON only within strings.
fn json_text(text: &str) -> Cow<'_, str> {
    replaced(text, is_control, |out, c| {
        let _ = write!(out, "\\u{:04x}", u32::from(c));
    })
}

/// Escapes text within a line of Markdown, without line breaks and HTML. Code spans in backticks are
/// preserved.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let parts: Vec<&str> = text.split('`').collect();
    for (index, part) in parts.iter().enumerate() {
        // An unpaired last backtick is escaped.
        let (closed, code) = (index + 1 < parts.len(), index % 2 == 1);
        match (index > 0, code && !closed) {
            (true, true) => out.push_str("\\`"),
            (true, false) => out.push('`'),
            (false, _) => {}
        }
        out.push_str(&one_line(part, |c| !(code && closed) && c == '<'));
    }
    out
}

/// Returns text as a Markdown code span.
pub fn markdown_code(text: &str) -> String {
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.saturating_add(1));
    let space = if text.starts_with('`') || text.ends_with('`') || text.is_empty() { " " } else { "" };
    format!("{fence}{space}{}{space}{fence}", display_line(text))
}

/// Escapes text for one line; characters for which `html` holds are written as entities.
fn one_line(text: &str, html: impl Fn(char) -> bool) -> Cow<'_, str> {
    replaced(text, |c| is_control(c) || c == '\n' || html(c), |out, c| if c == '<' { out.push_str("&lt;") } else { out.extend(c.escape_default()) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Names with many control, quoting and bracketing characters.
    fn names() -> impl Strategy<Value = String> {
        let special = proptest::sample::select("\u{7f}\u{80}\u{9b}\u{9f}\u{202e}\u{2066}\u{200f}\u{2028}\u{1b}\r\n\t\0`|<\\\"&".chars().collect::<Vec<_>>());
        proptest::collection::vec(prop_oneof![special, any::<char>()], 0..12).prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn every_name_is_escaped_in_every_medium(name in names()) {
            for text in [json(&[&name]).unwrap(), json_line(&[&name]).unwrap()] {
                prop_assert!(!text.contains(is_control), "{text}");
                prop_assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name.clone()]);
            }
            prop_assert!(!display(&name).contains(is_control) && !display_line(&name).contains(|c: char| is_control(c) || c == '\n'));
            for text in [markdown(&name), markdown_code(&name)] {
                prop_assert!(!text.contains(|c: char| is_control(c) || c == '\n'), "{text}");
            }
            prop_assert!(!markdown(&name.replace('`', "")).contains('<'));
            let code = markdown_code(&name);
            let fence = code.len() - code.trim_start_matches('`').len();
            let inside = &code[fence..code.len() - fence];
            prop_assert!(!inside.split(|c| c != '`').any(|run| run.len() == fence), "{code}");
        }
    }

    #[test]
    fn plain_text_is_unchanged() {
        for text in ["model.layers.0.weight", "größe 模型 👩‍💻", "a `b` c", "a\tb"] {
            assert_eq!((display(text), markdown(text)), (text.into(), text.to_owned()));
        }
        assert_eq!(display("a\u{1b}[31m\rb\u{202e}"), "a\\u{1b}[31m\\rb\\u{202e}");
        assert_eq!(markdown("<b> `<s>` `x"), "&lt;b> `<s>` \\`x");
        assert_eq!(markdown_code("a`b\nc"), "``a`b\\nc``");
        assert_eq!(json(&"a\u{9b}").unwrap(), "\"a\\u009b\"");
    }
}

//! Escapes names and texts of untrusted files: one function for each medium.

use std::borrow::Cow;
use std::fmt::Write;

use serde::Serialize;

/// Whether a character steers what displays it: a control character, an override of the text direction, or a line separator.
fn steers(c: char) -> bool {
    let directs = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    directs || (c.is_control() && !matches!(c, '\n' | '\t'))
}

/// Replaces each character for which `chosen` holds.
fn replaced<'a>(text: &'a str, chosen: impl Fn(char) -> bool, replace: impl Fn(&mut String, char)) -> Cow<'a, str> {
    if !text.contains(&chosen) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len().saturating_add(16));
    for c in text.chars() {
        if chosen(c) { replace(&mut out, c) } else { out.push(c) }
    }
    out.into()
}

/// Text of several lines for a terminal or a page: escapes characters that would steer the display.
pub fn display(text: &str) -> Cow<'_, str> {
    replaced(text, steers, |out, c| out.extend(c.escape_default()))
}

/// The same on one line: escapes line breaks too.
pub fn display_line(text: &str) -> Cow<'_, str> {
    one_line(text, |_| false)
}

/// JSON on one line, in ASCII where a character would steer the display.
///
/// # Errors
/// The value cannot be serialized.
pub fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|text| json_text(&text).into_owned())
}

/// JSON on several lines, in ASCII where a character would steer the display.
///
/// # Errors
/// The value cannot be serialized.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(value).map(|text| json_text(&text).into_owned())
}

/// Such characters occur in JSON only within strings.
fn json_text(text: &str) -> Cow<'_, str> {
    replaced(text, steers, |out, c| {
        let _ = write!(out, "\\u{:04x}", u32::from(c));
    })
}

/// Text within a line of Markdown, in which `` ` `` encloses code: no line break, no HTML.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let parts: Vec<&str> = text.split('`').collect();
    for (index, part) in parts.iter().enumerate() {
        // A last backtick without a partner is a character like others.
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

/// A code span of Markdown.
pub fn markdown_code(text: &str) -> String {
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.saturating_add(1));
    let space = if text.starts_with('`') || text.ends_with('`') || text.is_empty() { " " } else { "" };
    format!("{fence}{space}{}{space}{fence}", display_line(text))
}

/// Without line breaks; with `<` as an entity where `html` holds for it.
fn one_line(text: &str, html: impl Fn(char) -> bool) -> Cow<'_, str> {
    replaced(text, |c| steers(c) || c == '\n' || html(c), |out, c| if c == '<' { out.push_str("&lt;") } else { out.extend(c.escape_default()) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Names with many characters that steer, quote or enclose.
    fn names() -> impl Strategy<Value = String> {
        let special = proptest::sample::select("\u{7f}\u{80}\u{9b}\u{9f}\u{202e}\u{2066}\u{200f}\u{2028}\u{1b}\r\n\t\0`|<\\\"&".chars().collect::<Vec<_>>());
        proptest::collection::vec(prop_oneof![special, any::<char>()], 0..12).prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn every_medium_holds_every_name(name in names()) {
            for text in [json(&[&name]).unwrap(), json_line(&[&name]).unwrap()] {
                prop_assert!(!text.contains(steers), "{text}");
                prop_assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name.clone()]);
            }
            prop_assert!(!display(&name).contains(steers) && !display_line(&name).contains(|c: char| steers(c) || c == '\n'));
            for text in [markdown(&name), markdown_code(&name)] {
                prop_assert!(!text.contains(|c: char| steers(c) || c == '\n'), "{text}");
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

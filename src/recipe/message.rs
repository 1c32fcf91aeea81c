//! Error messages for invalid YAML.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use serde::de::IgnoredAny;
use serde_saphyr::{Error, render_options};

use super::brackets::unclosed;
use crate::one_or_several::EMPTY;
use crate::pass::PASSES;
use crate::yaml_text::{BOOLEAN, INTEGER, KEYS, LIST, LISTED, NUMBER, PLAIN, Plain, example_of, mismatch, unknown};

/// The message with line, column and a snippet of `text`, which is that of the source `name`. A long list of
/// accepted names follows the snippet.
pub(crate) fn explain(error: &Error, name: &str, text: &str) -> String {
    if let Some(open) = unclosed(text) {
        return open.message(name, text);
    }
    let message = located(error, name);
    let first = message.lines().next().unwrap_or_default();
    // An unclosed list begins with a list where a value is expected.
    let is_nested = NESTED.iter().any(|part| first.contains(part));
    let syntax = is_nested.then(|| serde_saphyr::from_str::<IgnoredAny>(text).err()).flatten();
    match syntax {
        Some(error) => located(&error, name),
        None => message + &example(error, text).unwrap_or_default(),
    }
}

/// A line with an example of the training option that contains the error.
fn example(error: &Error, text: &str) -> Option<String> {
    let location = error.location()?;
    let (line, column) = (usize::try_from(location.line()).ok()?, usize::try_from(location.column()).ok()?);
    let keys = enclosing_keys(text, line.checked_sub(1)?, column.saturating_sub(1));
    let is_training = keys.iter().any(|key| TRAININGS.contains(key));
    let found = keys.iter().take_while(|key| !TRAININGS.contains(key)).find_map(|key| example_of(key)).filter(|_| is_training)?;
    Some(format!("\nExample: `{found}`"))
}

/// Passes with training options.
const TRAININGS: [&str; 2] = ["distill", "finetune"];

/// The keys that contain a position of a YAML text, from the innermost one. Lines and columns count from 0.
fn enclosing_keys(text: &str, line: usize, column: usize) -> Vec<&str> {
    let Some(marked) = text.lines().nth(line) else { return Vec::new() };
    let end = marked.char_indices().nth(column).map_or(marked.len(), |(at, _)| at);
    let mut keys = keys_before(marked.get(..end).unwrap_or_default());
    // A position at a key is inside of it.
    let rest = marked.get(end..).unwrap_or_default();
    keys.extend(rest.split_once(':').map(|(key, _)| key.trim()).filter(|key| is_key(key)));
    keys.reverse();
    let mut indent = indentation(marked);
    for above in text.lines().take(line).collect::<Vec<_>>().into_iter().rev().filter(|line| !line.trim().is_empty()) {
        if indentation(above) < indent {
            indent = indentation(above);
            keys.extend(keys_before(above.trim_end()).into_iter().rev());
        }
    }
    keys
}

/// Number of characters before the text of a line; a dash of a list belongs to them.
fn indentation(line: &str) -> usize {
    line.chars().take_while(|c| [' ', '-'].contains(c)).count()
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-')
}

/// The keys of a line whose values contain its end, from the outermost one.
fn keys_before(line: &str) -> Vec<&str> {
    let mut open: Vec<Option<&str>> = Vec::new();
    let mut last = None;
    let mut start = 0;
    for (at, c) in line.char_indices() {
        match c {
            '{' | '[' => open.push(last.take()),
            '}' | ']' => {
                open.pop();
                last = None;
            }
            ',' => last = None,
            ':' => last = line.get(start..at).map(|key| key.trim_start_matches([' ', '-'])).filter(|key| is_key(key)),
            _ => continue,
        }
        start = at.saturating_add(1);
    }
    open.into_iter().chain([last]).flatten().collect()
}

fn located(error: &Error, name: &str) -> String {
    let text = error.render_with_options(render_options! { formatter: &Plain, source_name: Some(name) });
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let first = text.lines().next().unwrap_or_default();
    let (start, list) = match first.split_once(LIST) {
        Some((start, names)) if names.matches('`').count() > MAX_QUOTES => {
            (start.trim_end_matches(['E', 'e']).trim_end_matches([' ', ',']), format!("\nE{LIST}{names}"))
        }
        _ => (first, String::new()),
    };
    let pass = marked_pass(text).filter(|_| start.ends_with(LISTED));
    let listed = pass.map(|pass| start.replace(LISTED, &format!("expected a list: write `- {pass}: …`, with a dash before each pass")));
    let start = listed.as_deref().unwrap_or(start);
    let start = match (NAMED.iter().find(|expected| start.ends_with(**expected)), marked(text)) {
        (Some(&INTEGER), Some((key, value))) if value.starts_with('-') => start.replace(INTEGER, &format!("{INTEGER} from 0 for `{key}`")),
        (Some(expected), Some((key, _))) => start.replace(expected, &format!("{expected} for `{key}`")),
        _ => start.to_owned(),
    };
    let start = match SYNTAX.iter().find(|(part, _)| start.contains(part)) {
        Some((_, advice)) => format!("{start}: {advice}"),
        None => start,
    };
    let snippet: String = text.lines().skip(1).map(|line| format!("\n{}", without_label(line))).collect();
    start + &snippet + &list
}

/// Advice about mistakes of the syntax, by parts of the messages of the parser.
const SYNTAX: [(&str, &str); 6] = [
    ("tabs disallowed", "indent with spaces"),
    ("mapping values are not allowed", "indent the keys of a map equally, and quote texts that contain a colon"),
    ("did not find expected key", "indent the keys of a map equally"),
    ("did not find expected '-' indicator", "indent the entries of a list equally, each with a dash"),
    ("block sequence entries are not allowed", "begin a list on a new line, with a dash before each entry"),
    ("simple key expected ':'", "write a colon and a space between a key and its value"),
];
/// Largest number of quotation marks in a list of accepted names on the first line of a message: eight names.
const MAX_QUOTES: usize = 16;
/// Parts of messages about a list or keys where a value is expected.
const NESTED: [&str; 3] = [", not a list", ", not keys with values", PLAIN];

/// A line of a snippet without the message at its marker, which is that of the first line.
fn without_label(line: &str) -> &str {
    let marker = line.trim_start_matches([' ', '|']);
    match marker.trim_start_matches('^') {
        label if label.len() < marker.len() => line.strip_suffix(label).unwrap_or(line),
        _ => line,
    }
}

/// The pass that is marked in the snippet of a message because it is a key, not an entry of a list.
fn marked_pass(text: &str) -> Option<&str> {
    let (_, value) = at_marker(text)?;
    let (name, _) = value.trim_start_matches(['{', ' ']).split_once(':')?;
    PASSES.contains(&name).then_some(name)
}

/// The key whose value is marked in the snippet of a message, and the text from the value on.
fn marked(text: &str) -> Option<(&str, &str)> {
    let (before, value) = at_marker(text)?;
    let before = before.trim_end_matches([' ', '"', '\'']).strip_suffix(':')?;
    let key = before.trim_end_matches(['"', '\'']).rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').next().filter(|key| !key.is_empty())?;
    Some((key, value))
}

/// The marked line in the snippet of a message, before and from the marker on.
fn at_marker(text: &str) -> Option<(&str, &str)> {
    let is_marker = |line: &str| line.trim_start_matches([' ', '|']).starts_with('^');
    let (source, marker) = text.lines().zip(text.lines().skip(1)).find(|(_, line)| is_marker(line))?;
    let column = marker.chars().position(|c| c == '^')?;
    let (end, _) = source.char_indices().nth(column)?;
    source.split_at_checked(end)
}

/// Messages that name the key of the value.
const NAMED: [&str; 7] = [INTEGER, NUMBER, BOOLEAN, PLAIN, LISTED, KEYS, EMPTY];

/// The message of an error in JSON values, with a suggestion for an unknown key.
pub(crate) fn explain_json(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let names: Vec<&str> = text.split('`').skip(1).step_by(2).collect();
    match names.as_slice() {
        [field, expected @ ..] if text.starts_with("unknown field") => unknown("key", field, expected),
        _ => match text.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected ")) {
            Some((unexpected, expected)) => mismatch(unexpected, expected),
            None => text,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::enclosing_keys;

    #[test]
    fn keys_around_a_position_are_found() {
        let text = "model: x\npasses:\n  - finetune:\n      epochs: 1\n      schedule:\n        warmup: 3\n  - distill: { losses: { soft: hot }, groups: [{ target: a }] }\n";
        assert_eq!(enclosing_keys(text, 5, 8), ["warmup", "schedule", "finetune", "passes"]);
        assert_eq!(enclosing_keys(text, 5, 16), ["warmup", "schedule", "finetune", "passes"]);
        let at = |part: &str| text.lines().nth(6).and_then(|line| line.find(part)).unwrap();
        assert_eq!(enclosing_keys(text, 6, at("hot")), ["soft", "losses", "distill", "passes"]);
        assert_eq!(enclosing_keys(text, 6, at("target")), ["target", "groups", "distill", "passes"]);
        assert!(enclosing_keys(text, 99, 0).is_empty());
    }
}

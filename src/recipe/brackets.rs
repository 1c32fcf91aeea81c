//! Brackets of YAML that are not closed. A parser reports them where the text becomes invalid, or not at all
//! if the next lines continue a value.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

/// Longest line in a message, in bytes.
const LONGEST: usize = 200;

/// A bracket that is not closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unclosed {
    bracket: char,
    /// Line and column, from 1.
    line: usize,
    column: usize,
    /// The bracket of another kind that closes it.
    closed_by: Option<char>,
}

impl Unclosed {
    /// The message with the line that contains the bracket.
    pub fn message(self, name: &str, text: &str) -> String {
        let Unclosed { bracket, line, column, closed_by } = self;
        let by = closed_by.map_or(String::new(), |closed| format!(", but followed by `{closed}`"));
        let source = text.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        let source = if source.len() > LONGEST { "..." } else { source };
        let (number, margin) = (line.to_string(), " ".repeat(line.to_string().len()));
        let marker = " ".repeat(column.saturating_sub(1).min(source.len()));
        let end = if bracket == '{' { '}' } else { ']' };
        format!(
            "line {line} column {column}: the bracket `{bracket}` is not closed{by}: add `{end}`\n{margin}--> {name}:{line}:{column}\n{margin} |\n{number} | {source}\n{margin} | {marker}^"
        )
    }
}

/// The last bracket of the innermost value that is not closed; `None` if all are closed.
pub(super) fn unclosed(text: &str) -> Option<Unclosed> {
    let mut open: Vec<Unclosed> = Vec::new();
    let mut quote: Option<char> = None;
    // Lines of a block scalar are indented further than the line that begins it.
    let mut scalar: Option<usize> = None;
    for (number, line) in text.lines().enumerate() {
        let indentation = line.chars().take_while(|c| *c == ' ').count();
        if scalar.is_some_and(|outer| line.trim().is_empty() || indentation > outer) {
            continue;
        }
        scalar = None;
        // Whether a value can begin here, where brackets and quotes have a meaning.
        let mut begins = true;
        let mut previous = ' ';
        let mut chars = line.chars().enumerate().peekable();
        while let Some((at, c)) = chars.next() {
            if let Some(end) = quote {
                match c {
                    '\\' if end == '"' => drop(chars.next()),
                    '\'' if end == '\'' && chars.peek().is_some_and(|(_, next)| *next == '\'') => drop(chars.next()),
                    _ if c == end => quote = None,
                    _ => {}
                }
                (previous, begins) = (c, false);
                continue;
            }
            let is_flow = !open.is_empty();
            match c {
                '#' if previous == ' ' || previous == '\t' => break,
                '"' | '\'' if begins => quote = Some(c),
                '{' | '[' if begins || is_flow => {
                    open.push(Unclosed { bracket: c, line: number.saturating_add(1), column: at.saturating_add(1), closed_by: None });
                }
                '}' | ']' if is_flow => {
                    let expected = if c == '}' { '{' } else { '[' };
                    if let Some(last) = open.pop().filter(|last| last.bracket != expected) {
                        return Some(Unclosed { closed_by: Some(c), ..last });
                    }
                }
                _ => {}
            }
            let is_indicator = match c {
                '{' | '[' | ',' => is_flow || !open.is_empty(),
                ':' if is_flow && ['"', '\''].contains(&previous) => true,
                ':' | '-' | '?' => chars.peek().is_none_or(|(_, next)| next.is_whitespace()) && (c == ':' || begins),
                _ => false,
            };
            begins = is_indicator || (begins && c.is_whitespace());
            previous = c;
        }
        let content = line.split(" #").next().unwrap_or_default().trim_end();
        if open.is_empty()
            && quote.is_none()
            && [": |", ": >", "- |", "- >"].iter().any(|end| content.trim_end_matches(['+', '-', '0', '1', '2', '4']).ends_with(end))
        {
            scalar = Some(indentation);
        }
    }
    open.pop().filter(|_| quote.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<(char, usize, usize)> {
        unclosed(text).map(|open| (open.bracket, open.line, open.column))
    }

    #[test]
    fn the_bracket_is_found_where_it_begins() {
        for (text, expected) in [
            ("a:\n  - b: { c: D\noutput: out\n", ('{', 2, 8)),
            ("a: { b: { c: d }\ne: f\n", ('{', 1, 4)),
            ("a: [b\nc: d\n", ('[', 1, 4)),
            ("a: { b: [c }\n", ('[', 1, 9)),
            ("a: { b: 'it''s', c: \"\\\"}\" \n", ('{', 1, 4)),
            ("onnx: {precision: float16", ('{', 1, 7)),
            ("{text: a.txt", ('{', 1, 1)),
            ("- { a: b } # }\n- [c\n", ('[', 2, 3)),
        ] {
            assert_eq!(found(text), Some(expected), "{text}");
        }
        assert_eq!(unclosed("a: [b }\n").unwrap().closed_by, Some('}'));
    }

    #[test]
    fn brackets_in_texts_are_no_brackets() {
        for text in [
            "a: b{c\nd: e[0\n",
            "a: '{'\nb: \"[\"\n",
            "a: { b: '[', c: [d, \"{\"] }\n",
            "# { [\na: b # {\n",
            "a: |\n  { [\n\n  {\nb: c\n",
            "a: {}\nb: []\n",
            "re:([a-z]{2}\n",
            "a: {b: c,\n  d: [e,\n f]}\n",
            "{\"text\":\"a{b.txt\"}",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
    }

    #[test]
    fn the_message_shows_the_line() {
        let text = "model: in\npasses: [cast\noutput: out\n";
        let expected = "line 2 column 9: the bracket `[` is not closed: add `]`\n --> r.yaml:2:9\n  |\n2 | passes: [cast\n  |         ^";
        assert_eq!(unclosed(text).unwrap().message("r.yaml", text), expected);
    }
}

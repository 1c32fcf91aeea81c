//! The tags of `{% generation %}` blocks, which mark assistant messages for training in transformers.

/// Beginnings and ends of tags. The first ones are those of statements.
const TAGS: [(&str, &str); 3] = [("{%", "%}"), ("{{", "}}"), ("{#", "#}")];

/// Replaces the tags of `{% generation %}` blocks, except in `{% raw %}` blocks, comments and strings.
pub(super) fn replace_generation_blocks(text: &str, [start, end]: [&str; 2]) -> String {
    let (mut out, mut rest, mut is_raw) = (String::with_capacity(text.len()), text, false);
    let next = |rest: &str, is_raw: bool| {
        let found = TAGS.iter().take(if is_raw { 1 } else { TAGS.len() }).filter_map(|(open, close)| Some((rest.find(open)?, *open, *close)));
        found.min_by_key(|(at, ..)| *at)
    };
    while let Some((at, open, close)) = next(rest, is_raw) {
        let (Some(before), Some(tag)) = (rest.get(..at), rest.get(at.saturating_add(open.len())..)) else { break };
        out.extend([before, open]);
        let is_opaque = is_raw || open == "{#";
        let Some((inside, after)) = tag_end(tag, close, is_opaque).and_then(|end| tag.split_at_checked(end)) else {
            rest = tag;
            break;
        };
        let name = Some(inside.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'))).filter(|_| open == "{%");
        if is_raw && name != Some("endraw") {
            rest = tag;
            continue;
        }
        is_raw = name == Some("raw");
        out.push_str(&match name {
            Some(name @ "generation") => inside.replace(name, start),
            Some(name @ "endgeneration") => inside.replace(name, end),
            _ => inside.to_owned(),
        });
        rest = after;
    }
    out + rest
}

/// Position of the end of a tag, outside of strings and brackets unless the tag is opaque.
fn tag_end(tag: &str, close: &str, is_opaque: bool) -> Option<usize> {
    if is_opaque {
        return tag.find(close);
    }
    let (mut quote, mut is_escaped, mut depth) = (None, false, 0usize);
    for (at, letter) in tag.char_indices() {
        match (quote, letter) {
            (Some(_), _) if is_escaped => is_escaped = false,
            (Some(_), '\\') => is_escaped = true,
            (Some(open), _) => quote = quote.filter(|_| letter != open),
            (None, _) if depth == 0 && tag.get(at..).is_some_and(|rest| rest.starts_with(close)) => return Some(at),
            (None, '"' | '\'') => quote = Some(letter),
            (None, '{' | '[' | '(') => depth = depth.saturating_add(1),
            (None, '}' | ']' | ')') => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_of_blocks_are_replaced() {
        let replaced = |text: &str| replace_generation_blocks(text, ["if true", "endif"]);
        for (text, expected) in [
            ("a{%- generation -%}b{% endgeneration %}", "a{%- if true -%}b{% endif %}"),
            ("{% set x = {'a': {'%}': 1}} %}{% generation %}", "{% set x = {'a': {'%}': 1}} %}{% if true %}"),
            ("{% set x = 'it\\'s %}' %}{%generation%}", "{% set x = 'it\\'s %}' %}{%if true%}"),
            ("{# it's #}{% generation %}", "{# it's #}{% if true %}"),
            ("{% raw %}{% 'x %}{% endraw %}{% generation %}", "{% raw %}{% 'x %}{% endraw %}{% if true %}"),
        ] {
            assert_eq!(replaced(text), expected);
        }
        for same in [
            "{% raw %}{% generation %}{{ x }}{% endgeneration %}{%- endraw -%}",
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{{ {'a': {'b': '}} {% generation %}'}} }}",
            "{{ x {% generation %}",
            "{% generation",
        ] {
            assert_eq!(replaced(same), same);
        }
    }
}

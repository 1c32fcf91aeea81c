//! Naming tensors: `*` stands for anything, `re:` starts a regular expression.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use regex::Regex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};

/// A pattern over tensor names. It matches the whole name of a tensor, or of its module
/// (the name without `.weight`); a regular expression is anchored at the start only, and may look around, as those of compressed-tensors.
#[derive(Clone)]
pub struct Pattern {
    text: String,
    matcher: Matcher,
}

#[derive(Clone)]
enum Matcher {
    /// In linear time.
    Plain(Regex),
    /// With look-around, by backtracking up to a limit.
    LookAround(fancy_regex::Regex),
}

impl Matcher {
    fn new(source: &str) -> Result<Matcher, String> {
        Regex::new(source).map(Matcher::Plain).or_else(|plain| fancy_regex::Regex::new(source).map(Matcher::LookAround).map_err(|_| reason(&plain)))
    }

    /// Whether the text matches. A text that exceeds the limit of backtracking does not match, and callers reject patterns without one.
    fn is_match(&self, text: &str) -> bool {
        match self {
            Matcher::Plain(regex) => regex.is_match(text),
            Matcher::LookAround(regex) => regex.is_match(text).unwrap_or(false),
        }
    }
}

impl Pattern {
    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it matches a tensor.
    pub fn matches(&self, name: &str) -> bool {
        self.matcher.is_match(name) || name.strip_suffix(".weight").is_some_and(|module| self.matcher.is_match(module))
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("a pattern cannot be empty".into());
        }
        let source = match text.strip_prefix("re:") {
            Some(expression) => format!("^(?:{expression})"),
            None => format!("^{}$", text.split('*').map(regex::escape).collect::<Vec<_>>().join(".*")),
        };
        let matcher = Matcher::new(&source).map_err(|reason| format!("pattern `{text}`: {reason}"))?;
        Ok(Pattern { text: text.to_owned(), matcher })
    }
}

/// The last line of a message that draws the pattern above it.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "cli")]
impl schemars::JsonSchema for Pattern {
    fn schema_name() -> Cow<'static, str> {
        "Pattern".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "minLength": 1, "description": "A tensor or module name, where * stands for anything, or re: and a regular expression" })
    }
}

/// Which tensors a pass works on.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    /// Tensors to take; none means the pass's own choice.
    pub targets: &'a [Pattern],
    /// Tensors to leave out.
    pub ignore: &'a [Pattern],
}

impl Selection<'_> {
    /// The selected ones of tensors by their names, each with other names that patterns match too. `eligible` says what the pass takes on
    /// its own.
    ///
    /// # Errors
    /// A pattern matches no tensor at all.
    pub fn resolve<'n>(&self, names: impl Iterator<Item = (&'n String, &'n [String])> + Clone, eligible: impl Fn(&str) -> bool) -> Result<BTreeSet<&'n str>> {
        let all = || names.clone().flat_map(|(name, others)| std::iter::once(name).chain(others));
        check("targets", self.targets, all())?;
        check("ignore", self.ignore, all())?;
        let any = |patterns: &[Pattern], (name, others): &(&String, &[String])| {
            patterns.iter().any(|p| p.matches(name) || others.iter().any(|other| p.matches(other)))
        };
        Ok(names
            .clone()
            .filter(|tensor| if self.targets.is_empty() { eligible(tensor.0) } else { any(self.targets, tensor) })
            .filter(|tensor| !any(self.ignore, tensor))
            .map(|(name, _)| name.as_str())
            .collect())
    }
}

/// Holds every pattern to at least one match.
///
/// # Errors
/// The first pattern without one.
pub fn check<'n>(field: &'static str, patterns: &[Pattern], names: impl Iterator<Item = &'n String> + Clone) -> Result<()> {
    match patterns.iter().find(|p| !names.clone().any(|name| p.matches(name))) {
        None => Ok(()),
        Some(pattern) => Err(Error::NoMatch { field, pattern: pattern.text.clone(), nearest: nearest(&pattern.text, names.map(String::as_str)) }),
    }
}

/// The most similar name, if any is similar.
pub fn nearest<'n>(wanted: &str, names: impl IntoIterator<Item = &'n str>) -> Option<String> {
    let plain: String = wanted.trim_start_matches("re:").chars().filter(|c| !"*^$\\".contains(*c)).collect();
    names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&plain, name), name))
        .filter(|(score, _)| *score > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        let matches = |pattern: &str, name: &str| pattern.parse::<Pattern>().unwrap().matches(name);
        assert!(matches("*embeddings*", "bert.embeddings.word.weight"));
        assert!(matches("lm_head", "lm_head.weight"));
        assert!(!matches("lm_head", "lm_head.bias"));
        assert!(!matches("head", "lm_head.weight"));
        assert!(matches(r"re:.*layers\.\d+\.mlp", "model.layers.3.mlp.up_proj.weight"));
        assert!(!matches("re:layers", "model.layers.3"));
        assert!(matches(r"re:^(?!.*lm_head).*layers\.(?:0|1)\..*_proj$", "model.layers.1.q_proj.weight"));
        assert!(!matches(r"re:^(?!.*q_proj).*", "model.layers.1.q_proj"));
        assert_eq!("re:(".parse::<Pattern>().unwrap_err(), "pattern `re:(`: unclosed group");
        assert!("".parse::<Pattern>().is_err());
    }

    #[test]
    fn a_pattern_without_a_match_names_the_nearest() {
        let names = ["model.embed_tokens.weight".to_owned(), "lm_head.weight".to_owned()];
        let patterns = ["lm_haed.weight".parse().unwrap()];
        let error = Selection { targets: &patterns, ignore: &[] }.resolve(names.iter().map(|name| (name, &[][..])), |_| true).unwrap_err();
        assert_eq!(error.to_string(), "`targets` pattern `lm_haed.weight` matches no tensor");
        assert!(error.hint().unwrap().contains("`lm_head.weight`"));
    }
}

//! Patterns that select tensors by name: `*` matches any text, `re:` starts a regular expression.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use regex::Regex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, ParseError, Result};

/// A pattern for tensor names. It matches the full name of a tensor or of its module (the name without
/// `.weight`). A regular expression is anchored only at the start and may use look-around, as in
/// compressed-tensors.
#[derive(Clone)]
pub struct Pattern {
    text: String,
    matcher: Matcher,
}

#[derive(Clone)]
enum Matcher {
    /// Linear-time matching.
    Plain(Regex),
    /// Look-around, matched by backtracking with a limit.
    LookAround(fancy_regex::Regex),
}

impl Matcher {
    fn new(source: &str) -> Result<Matcher, String> {
        Regex::new(source).map(Matcher::Plain).or_else(|plain| fancy_regex::Regex::new(source).map(Matcher::LookAround).map_err(|_| reason(&plain)))
    }

    /// Whether the text matches, unless that takes more backtracking than allowed.
    fn is_match(&self, text: &str) -> Result<bool, fancy_regex::Error> {
        match self {
            Matcher::Plain(regex) => Ok(regex.is_match(text)),
            Matcher::LookAround(regex) => regex.is_match(text),
        }
    }
}

impl Pattern {
    /// The original text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the pattern is the name of a tensor or of a module, without wildcards.
    pub fn is_literal(&self) -> bool {
        !self.text.starts_with("re:") && !self.text.contains('*')
    }

    /// Whether the pattern matches a tensor name. `false` if [`try_matches`](Pattern::try_matches) fails;
    /// [`check`] rejects such patterns.
    pub fn matches(&self, name: &str) -> bool {
        self.try_matches(name).unwrap_or(false)
    }

    /// Whether the pattern matches a tensor name. Fails if backtracking exceeds its limit, as it does for
    /// nested repetitions in front of a look-around.
    pub fn try_matches(&self, name: &str) -> Result<bool, String> {
        let is_match = |text: &str| self.matcher.is_match(text).map_err(|e| format!("pattern `{}` cannot be matched with `{name}`: {e}", self.text));
        Ok(is_match(name)? || name.strip_suffix(".weight").map_or(Ok(false), is_match)?)
    }
}

impl FromStr for Pattern {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
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

/// The last line of a multi-line error message, without the drawing of the pattern.
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
        schemars::json_schema!({ "type": "string", "minLength": 1, "description": "A tensor or module name, in which * matches any text, or re: followed by a regular expression" })
    }
}

/// Selection of the tensors that a pass processes.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    /// Tensors to include. If empty, the pass's default selection.
    pub targets: &'a [Pattern],
    /// Tensors to exclude.
    pub ignore: &'a [Pattern],
}

impl Selection<'_> {
    /// The selected tensors, given their names and alternative names that patterns match too. `eligible`
    /// is the default selection of the pass. Fails if a pattern matches no tensor at all.
    pub fn resolve<'n>(&self, names: impl Iterator<Item = (&'n String, &'n [String])> + Clone, eligible: impl Fn(&str) -> bool) -> Result<BTreeSet<&'n str>> {
        let all = || names.clone().flat_map(|(name, aliases)| std::iter::once(name).chain(aliases));
        check("targets", self.targets, all())?;
        check("ignore", self.ignore, all())?;
        Ok(names
            .clone()
            .filter(|(name, aliases)| if self.targets.is_empty() { eligible(name) } else { matches_any(self.targets, name, aliases) })
            .filter(|(name, aliases)| !matches_any(self.ignore, name, aliases))
            .map(|(name, _)| name.as_str())
            .collect())
    }
}

/// Whether a pattern matches a tensor by its name or an alternative name.
pub fn matches_any(patterns: &[Pattern], name: &str, aliases: &[String]) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name) || aliases.iter().any(|alias| pattern.matches(alias)))
}

/// Checks that every pattern has at least one match.
pub fn check<'n>(field: &'static str, patterns: &[Pattern], names: impl Iterator<Item = &'n String> + Clone) -> Result<()> {
    for pattern in patterns {
        let mut has_match = false;
        for name in names.clone() {
            has_match |= pattern.try_matches(name).map_err(|reason| Error::option(field, reason))?;
        }
        if !has_match {
            return Err(Error::NoMatch { field, pattern: pattern.text.clone(), nearest: nearest(&pattern.text, names.map(String::as_str)) });
        }
    }
    Ok(())
}

/// The most similar name, if the similarity is sufficient.
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
        assert_eq!("re:(".parse::<Pattern>().unwrap_err().to_string(), "pattern `re:(`: unclosed group");
        assert!("".parse::<Pattern>().is_err());
    }

    /// A pattern that exceeds the limit of backtracking is rejected, not taken for one that matches nothing.
    #[test]
    fn excessive_backtracking_is_an_error() {
        let names = ["lm_head.weight".to_owned(), "ab".repeat(28)];
        let pattern: Pattern = "re:(a|b|ab)*(?>c)|lm_head".parse().unwrap();
        assert_eq!(pattern.try_matches(&names[0]), Ok(true));
        let error = check("ignore", &[pattern], names.iter()).unwrap_err().to_string();
        assert!(error.contains("ignore") && error.contains("re:(a|b|ab)*(?>c)|lm_head") && error.contains(&names[1]), "{error}");
    }

    #[test]
    fn a_pattern_without_a_match_suggests_the_nearest_name() {
        let names = ["model.embed_tokens.weight".to_owned(), "lm_head.weight".to_owned()];
        let patterns = ["lm_haed.weight".parse().unwrap()];
        let error = Selection { targets: &patterns, ignore: &[] }.resolve(names.iter().map(|name| (name, &[][..])), |_| true).unwrap_err();
        assert_eq!(error.to_string(), "`targets` pattern `lm_haed.weight` matches no tensor");
        assert!(error.hint().unwrap().contains("`lm_head.weight`"));
    }
}

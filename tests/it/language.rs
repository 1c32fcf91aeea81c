//! Comments, messages, docs and names are ordinary engineering English.
//!
//! The patterns below are constructions that readers had to read twice. A match is a hint to rewrite the
//! sentence with the terms of the field, not to swap one word, so that the rate of matches is limited instead
//! of their number; in documentation it is zero.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fancy_regex::Regex;

/// Most matches per thousand lines of prose in sources, tests and benches. Only ever lowered.
const MOST_PER_THOUSAND: usize = 10;

/// A pattern and what to write instead.
const PHRASES: [(&str, &str); 22] = [
    (r"^(What|Who|Where|How far|How much|Whatever) (?!happens|changed\b)[a-z]", "start with a noun or a verb"),
    (r"\b(is|are|was|were) (none|no) (?!longer|more)", "say what is missing or invalid"),
    (r"\b(is|are|was|were|be|been|being) (told|said|asked|handed|shown)\b", "specified, reported, passed, requested"),
    (r"\b(tells?|telling|told)\b(?! apart)", "reports, specifies, returns, distinguishes"),
    (r"\b(says?|said)\b(?! that (it|the))", "specifies, states, reports"),
    (r"\bbeside\b", "next to, in addition to"),
    (r"\b(anybody|nobody|somebody|whoever|everybody)\b", "name the actor: the user, the caller, another process"),
    (r"\b(goes|go|went|gone|going) (on|with|along|away|together|by)\b", "continues, is removed, is copied"),
    (r"\b(hands?|handed|give|gives|given|giving) (on|back|away|out)\b", "returns, passes, releases"),
    (r"\bmakes? (a |an |the )?[a-z-]+ (of|out of)\b", "converts, builds, dequantizes"),
    (r"\b(stand|stands|stood) (for|there|in|behind|by|before)\b", "represents, is stored at, follows"),
    (r"\bas (it|they) (is|are|stands?)\b", "unchanged, verbatim"),
    (r"\b(alone)\b(?=[.,;:)]| (is|are|takes?|has|have|in|of|for|where))", "only"),
    (r"\b(but for|save for)\b", "except"),
    (r"\b(hardly|scarcely|therein|wherein|hitherto|thus far|lest)\b", "modern English"),
    (r"\b(mend|mends|mended|mending)\b", "fix, repair"),
    (r"\b(apart)\b(?! from)", "separately, split"),
    (r"\bby (itself|themselves|himself)\b", "automatically, separately"),
    (r"\b(makes? up for)\b", "compensates"),
    (r"\b(meets? what|takes? what|gives? what|reads? what|has what|of what|from what|by what|with what|for what|as what|than what)\b", "name the thing"),
    (r"\b(one another|each other one|the one that|the other ones?|those that|that which)\b", "name the thing"),
    (r"\b(behind (it|them|each|a|an|the|another|others|layers?|attention))\b", "after"),
];

/// Files of these endings below the folder of the project, without generated and golden ones.
/// Finds the files of a folder whose names have this ending, without outputs and reference files.
pub fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && !name.starts_with("target") && !["golden", "corpus", "out"].contains(&name.as_str()) {
                files(&path, ending, found);
            }
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
}

/// The prose of a line of Rust: a doc comment, or string literals of several words.
fn prose(line: &str, string: &Regex, code: &Regex) -> Vec<String> {
    let text = line.trim_start();
    if let Some(comment) = text.strip_prefix("///").or_else(|| text.strip_prefix("//!")) {
        return vec![code.replace_all(comment.trim(), "`x`").into_owned()];
    }
    let strings = string.captures_iter(line).map(|found| found.unwrap()[1].to_owned());
    strings.filter(|text| text.matches(' ').count() >= 3).map(|text| code.replace_all(&text, "`x`").into_owned()).collect()
}

struct Matches {
    lines: usize,
    found: BTreeMap<String, Vec<String>>,
}

impl Matches {
    fn count(&self) -> usize {
        self.found.values().map(Vec::len).sum()
    }

    fn list(&self) -> String {
        self.found.iter().flat_map(|(file, hits)| hits.iter().map(move |hit| format!("{file}:{hit}\n"))).collect()
    }
}

fn matches(ending: &str) -> Matches {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let patterns: Vec<_> = PHRASES.iter().map(|(pattern, instead)| (Regex::new(pattern).unwrap(), *instead)).collect();
    let (string, code) = (Regex::new(r#""((?:[^"\\]|\\.){18,})""#).unwrap(), Regex::new(r"\{[^}]*\}|`[^`]*`").unwrap());
    let mut paths = Vec::new();
    files(root, ending, &mut paths);
    paths.retain(|path| !path.ends_with("tests/it/language.rs"));
    let mut matches = Matches { lines: 0, found: BTreeMap::new() };
    for path in paths {
        let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        let mut fenced = false;
        for (number, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            let texts = if ending == ".rs" {
                prose(line, &string, &code)
            } else {
                fenced ^= line.trim_start().starts_with("```");
                let quoted = fenced || line.starts_with("|---") || line.starts_with("    ") || line.trim_start().starts_with("```");
                if quoted { Vec::new() } else { vec![code.replace_all(line, "`x`").into_owned()] }
            };
            for text in texts {
                matches.lines += 1;
                let hit = patterns.iter().find_map(|(pattern, instead)| Some((pattern.find(text.trim()).unwrap()?.as_str().to_owned(), instead)));
                if let Some((phrase, instead)) = hit {
                    matches.found.entry(name.clone()).or_default().push(format!("{}: `{phrase}`: {instead}", number + 1));
                }
            }
        }
    }
    matches
}

#[test]
fn sources_are_ordinary_english() {
    let found = matches(".rs");
    assert!(found.lines > 10_000, "only {} lines of prose", found.lines);
    assert!(found.count() * 1000 <= MOST_PER_THOUSAND * found.lines, "{}{} matches in {} lines", found.list(), found.count(), found.lines);
}

#[test]
fn documentation_is_ordinary_english() {
    let found = matches(".md");
    assert!(found.lines > 1000, "only {} lines of prose", found.lines);
    assert!(found.found.is_empty(), "{}", found.list());
}

//! Names of tensors that a training pass renames.

use std::collections::BTreeMap;

use crate::store::Pattern;

/// Patterns that also select renamed tensors by their previous names. `names` are those of all tensors, and
/// `renamed` has the previous names by the new ones.
pub(in crate::pass) fn with_previous_names(patterns: Vec<Pattern>, names: &[&str], renamed: &BTreeMap<String, String>) -> Vec<Pattern> {
    let mut found = Vec::new();
    for pattern in patterns {
        let matches_previous = |name: &str| !pattern.matches(name) && renamed.get(name).is_some_and(|previous| pattern.matches(previous));
        let exact: Vec<Pattern> = names.iter().filter(|name| matches_previous(name)).filter_map(|name| name.parse::<Pattern>().ok()).collect();
        // Patterns that match no tensor are rejected.
        if exact.is_empty() || names.iter().any(|name| pattern.matches(name)) {
            found.push(pattern);
        }
        found.extend(exact);
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn patterns_select_renamed_tensors_by_both_names() {
        let query = "encoder.layer.0.attention.self.query";
        let previous = [format!("{query}.weight"), format!("{query}.bias"), "pooler.dense.bias".to_owned()];
        let renamed: BTreeMap<String, String> = previous.map(|name| (format!("bert.{name}"), name)).into();
        let names: Vec<&str> = renamed.keys().map(String::as_str).chain(["classifier.weight", "classifier.bias"]).collect();
        let found = |text: &str| {
            let patterns = with_previous_names(vec![text.parse().unwrap()], &names, &renamed);
            patterns.iter().map(|pattern| pattern.as_str().to_owned()).collect::<BTreeSet<_>>()
        };
        let set = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(found(&format!("{query}.*")), set(&[&format!("bert.{query}.weight"), &format!("bert.{query}.bias")]));
        assert_eq!(found("re:(classifier|pooler.dense)[.]bias"), set(&["re:(classifier|pooler.dense)[.]bias", "bert.pooler.dense.bias"]));
        for text in ["classifier.*", "bert.encoder.*", "nosuch.*"] {
            assert_eq!(found(text), set(&[text]));
        }
    }
}

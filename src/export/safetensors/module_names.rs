//! Names of modules in loaders, which drop or change the first component of checkpoint names and rename some
//! modules.

use std::collections::{HashMap, HashSet};

use crate::arch;

/// The group that a module belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The group with this index.
    Group(usize),
    /// A module that is not quantized.
    Other,
}

/// The names by which loaders select modules.
pub(super) struct ModuleNames<'m> {
    model_type: &'m str,
    /// The owner of the modules whose names have this suffix; `None` if several owners have such modules.
    by_suffix: HashMap<String, Option<Owner>>,
    /// Likewise for suffixes in which numbers are replaced by a pattern.
    by_pattern: HashMap<String, Option<Owner>>,
}

impl ModuleNames<'_> {
    /// `modules` are all modules of the checkpoint.
    pub(super) fn new<'m>(model_type: &'m str, modules: impl IntoIterator<Item = (&'m str, Owner)>) -> ModuleNames<'m> {
        let mut names = ModuleNames { model_type, by_suffix: HashMap::new(), by_pattern: HashMap::new() };
        for (name, owner) in modules {
            for spelling in names.spellings(name) {
                let starts = std::iter::once(0).chain(spelling.match_indices('.').map(|(at, _)| at + 1));
                for suffix in starts.filter_map(|start| spelling.get(start..)) {
                    for (owners, key) in [(&mut names.by_suffix, suffix.to_owned()), (&mut names.by_pattern, number_pattern(suffix))] {
                        owners.entry(key).and_modify(|other| *other = other.filter(|other| *other == owner)).or_insert(Some(owner));
                    }
                }
            }
        }
        names
    }

    fn spellings(&self, name: &str) -> Vec<String> {
        arch::module_spellings(self.model_type, name)
    }

    /// Targets that match only the modules of a group: patterns of their suffixes, in which numbers are
    /// replaced by `\d+` if all modules that match belong to the group.
    pub(super) fn targets(&self, modules: &[&str]) -> Vec<String> {
        let is_own = |owners: &HashMap<String, Option<Owner>>, suffix: &str| matches!(owners.get(suffix), Some(Some(Owner::Group(_))));
        let entries = |name: String| match strip_first(&name) {
            Some(suffix) if is_own(&self.by_pattern, &number_pattern(suffix)) => vec![ends_with(&number_pattern(suffix))],
            Some(suffix) if is_own(&self.by_suffix, suffix) => vec![name.clone(), ends_with(&regex::escape(suffix))],
            _ => vec![name],
        };
        unique(modules.iter().flat_map(|name| self.spellings(name)).flat_map(entries))
    }

    /// Targets for a head that has no tensor, with any first component.
    pub(super) fn tied_targets(&self, head: &str) -> Vec<String> {
        self.spellings(head).iter().map(|name| ends_with(&regex::escape(strip_first(name).unwrap_or(name)))).collect()
    }

    /// Entries of `ignore` for a module that is not quantized.
    pub(super) fn ignored(&self, module: &str) -> Vec<String> {
        let entries = |name: String| {
            let suffix = strip_first(&name).filter(|suffix| self.by_suffix.get(*suffix) == Some(&Some(Owner::Other)));
            let pattern = suffix.map(|suffix| ends_with(&regex::escape(suffix)));
            [Some(name), pattern]
        };
        self.spellings(module).into_iter().flat_map(entries).flatten().collect()
    }

    /// Entries of `ignore` for experts in one tensor. vLLM looks up how experts are quantized by the names of
    /// linear layers within their module, like `experts.0.gate_proj`.
    pub(super) fn ignored_experts(&self, module: &str) -> Vec<String> {
        self.spellings(module).iter().map(|name| ends_with(&format!("{}(\\..*)?", regex::escape(strip_first(name).unwrap_or(name))))).collect()
    }

    /// Whether the name of a quantized module has this suffix.
    pub(super) fn is_quantized(&self, suffix: &str) -> bool {
        self.by_suffix.get(suffix).is_some_and(|owner| *owner != Some(Owner::Other))
    }
}

/// The entries without repetitions, in order.
pub(super) fn unique(entries: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut found = HashSet::new();
    entries.into_iter().filter(|entry| found.insert(entry.clone())).collect()
}

/// An entry that matches modules whose last components are one of these names.
pub(super) fn names_ending_with(names: &[String]) -> String {
    ends_with(&format!("({})", names.iter().map(|name| regex::escape(name)).collect::<Vec<_>>().join("|")))
}

/// An entry that matches modules whose last components match a regular expression.
fn ends_with(expression: &str) -> String {
    format!("re:(.*\\.)?{expression}$")
}

/// A name without its first component.
fn strip_first(name: &str) -> Option<&str> {
    name.split_once('.').map(|(_, suffix)| suffix)
}

/// A regular expression that matches a name with any numbers in place of its numeric components.
fn number_pattern(name: &str) -> String {
    let part = |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "\\d+".to_owned() } else { regex::escape(part) };
    name.split('.').map(part).collect::<Vec<_>>().join("\\.")
}

//! No files of a crate import each other in a circle.
//!
//! A file imports another if a path in its code leads to an item of that file: `crate::a::b`, `super::b`,
//! `self::b`, or a path that begins with a child module. Names that a file imports or re-exports are
//! followed to the file that defines them. These are not imports:
//!
//! - `pub use` of a descendant: the file of a module may re-export the files of its folder,
//! - items of an ancestor: the file of a module defines what the files of its folder share, such as a trait,
//!   and may have a table of them,
//! - declarations of modules, comments, and tests.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::{Source, is_identifier, sources};

struct Module<'s> {
    path: &'s str,
    code: &'s str,
    /// Path that each imported or re-exported name stands for.
    names: BTreeMap<String, Vec<String>>,
    /// Modules of which all names are imported.
    globs: Vec<Vec<String>>,
}

type Modules<'s> = BTreeMap<Vec<String>, Module<'s>>;

/// The paths of a use tree such as `a::{b, c as d}`, with the local name of each.
fn leaves(tree: &str, prefix: &[String], found: &mut Vec<(Vec<String>, String)>) {
    let tree = tree.trim();
    if let Some((head, group)) = tree.split_once('{') {
        let mut prefix = prefix.to_vec();
        prefix.extend(head.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned));
        let (mut depth, mut from) = (0, 0);
        for (at, c) in group.char_indices() {
            let ends = match c {
                '{' => {
                    depth += 1;
                    false
                }
                '}' if depth == 0 => true,
                '}' => {
                    depth -= 1;
                    false
                }
                ',' => depth == 0,
                _ => false,
            };
            if ends {
                if !group[from..at].trim().is_empty() {
                    leaves(&group[from..at], &prefix, found);
                }
                from = at + 1;
                if c == '}' {
                    return;
                }
            }
        }
        return;
    }
    let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
    let mut full = prefix.to_vec();
    full.extend(path.split("::").map(|part| part.trim().to_owned()));
    if full.last().is_some_and(|last| last == "self") {
        full.pop();
    }
    let name = if name.is_empty() { full.last().cloned().unwrap_or_default() } else { name.trim().to_owned() };
    found.push((full, name));
}

/// `use` trees of the code, each with whether it is a re-export, and the code without them and without
/// declarations of modules.
fn split(code: &str) -> (Vec<(bool, String)>, String) {
    let (mut uses, mut rest, mut open) = (Vec::new(), String::new(), None::<(bool, String)>);
    for line in code.lines() {
        if let Some((_, tree)) = &mut open {
            tree.push_str(line);
        } else {
            let trimmed = line.trim_start();
            let bare = trimmed.strip_prefix("pub(").and_then(|rest| Some(rest.split_once(") ")?.1)).or(trimmed.strip_prefix("pub ")).unwrap_or(trimmed);
            if let Some(tree) = bare.strip_prefix("use ") {
                open = Some((bare.len() < trimmed.len(), tree.to_owned()));
            } else if !(bare.starts_with("mod ") && bare.ends_with(';')) {
                rest.push_str(line);
                rest.push('\n');
            }
        }
        if let Some(done) = open.take_if(|(_, tree)| tree.contains(';')) {
            uses.push((done.0, done.1.split(';').next().unwrap_or("").to_owned()));
        }
    }
    (uses, rest)
}

/// The absolute path of a path in a module, or `None` if it leads out of the crate.
fn absolute(module: &[String], path: &[String], modules: &Modules) -> Option<Vec<String>> {
    let first = path.first()?.as_str();
    let mut base = match first {
        "crate" | "$crate" => Vec::new(),
        "self" | "super" => module.to_vec(),
        _ => {
            let child = [module, &path[..1]].concat();
            return modules.contains_key(&child).then(|| [module, path].concat());
        }
    };
    let mut rest = &path[1..];
    if first == "super" {
        base.pop()?;
        while rest.first().is_some_and(|part| part == "super") {
            base.pop()?;
            rest = &rest[1..];
        }
    }
    base.extend(rest.iter().cloned());
    Some(base)
}

/// Whether the code of a module defines a name.
fn defines(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let ends = !code[at + name.len()..].starts_with(is_identifier);
        let before = code[..at].trim_end();
        ends && ["fn", "struct", "enum", "trait", "const", "static", "type", "union", "mod", "macro_rules!"].iter().any(|word| before.ends_with(word))
    })
}

/// The module whose file defines the item of an absolute path.
fn target(path: &[String], modules: &Modules, depth: usize) -> Option<Vec<String>> {
    let known = (0..=path.len()).rev().find(|length| modules.contains_key(&path[..*length]))?;
    let module = &modules[&path[..known]];
    let Some(name) = path.get(known).filter(|_| depth < 16) else { return Some(path[..known].to_vec()) };
    if !defines(module.code, name) {
        if let Some(other) = module.names.get(name) {
            return target(&[other, &path[known + 1..]].concat(), modules, depth + 1);
        }
        for glob in &module.globs {
            let found = target(&[glob, &path[known..]].concat(), modules, depth + 1);
            if found.as_ref().is_some_and(|found| defines(modules[found].code, name)) {
                return found;
            }
        }
    }
    // Imports of names of other crates.
    (!name.is_empty()).then(|| path[..known].to_vec())
}

/// The files that each file of a crate imports, by path.
fn imports<'s>(files: &[&'s Source]) -> BTreeMap<&'s str, BTreeSet<&'s str>> {
    let parsed: Vec<_> = files.iter().map(|file| split(&file.code)).collect();
    let mut modules: Modules =
        files.iter().map(|file| (file.module.clone(), Module { path: &file.file, code: &file.code, names: BTreeMap::new(), globs: Vec::new() })).collect();
    let mut uses = Vec::new();
    for (file, (trees, _)) in files.iter().zip(&parsed) {
        for (exported, tree) in trees {
            let mut found = Vec::new();
            leaves(tree, &[], &mut found);
            for (path, name) in found {
                let Some(path) = absolute(&file.module, &path, &modules) else {
                    // A name of another crate, which is not defined in this file.
                    if let Some(module) = modules.get_mut(&file.module) {
                        module.names.entry(name).or_insert_with(|| vec!["?".into()]);
                    }
                    continue;
                };
                let module = modules.get_mut(&file.module);
                match (path.split_last(), module) {
                    (Some((last, parent)), Some(module)) if last == "*" => {
                        module.globs.push(parent.to_vec());
                        uses.push((&file.module, *exported, parent.to_vec()));
                    }
                    (_, Some(module)) => {
                        module.names.insert(name, path.clone());
                        uses.push((&file.module, *exported, path));
                    }
                    _ => {}
                }
            }
        }
    }
    for (file, (_, rest)) in files.iter().zip(&parsed) {
        for (at, _) in rest.match_indices("::") {
            let head = rest[..at].rsplit(|c| !is_identifier(c)).next().unwrap_or("");
            let before = &rest[..at - head.len()];
            if head.is_empty() || before.ends_with("::") {
                continue;
            }
            let mut path = vec![head.to_owned()];
            let mut tail = &rest[at..];
            while let Some(next) = tail.strip_prefix("::") {
                let word: &str = next.split(|c| !is_identifier(c)).next().unwrap_or("");
                if word.is_empty() {
                    break;
                }
                path.push(word.to_owned());
                tail = &next[word.len()..];
            }
            if let Some(path) = absolute(&file.module, &path, &modules) {
                uses.push((&file.module, false, path));
            }
        }
    }
    let mut graph: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, exported, path) in uses {
        let from = modules[module].path;
        if path.first().is_some_and(|first| first == "?") {
            continue;
        }
        if let Some(to) = target(&path, &modules, 0).map(|to| (modules[&to].path, to)).filter(|(to, _)| *to != from) {
            let descendant = to.1.starts_with(module);
            // A file may use what the files of its ancestors define for their folders.
            let shared = module.starts_with(&to.1);
            if !(exported && descendant || shared) {
                graph.entry(from).or_default().insert(to.0);
            }
        }
    }
    graph
}

/// The strongly connected components with more than one file.
fn circles<'s>(graph: &BTreeMap<&'s str, BTreeSet<&'s str>>) -> Vec<Vec<&'s str>> {
    let reach = |from: &'s str| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(at) = open.pop() {
            open.extend(graph.get(at).into_iter().flatten().copied().filter(|next| seen.insert(*next)));
        }
        seen
    };
    let reachable: BTreeMap<&str, BTreeSet<&str>> = graph.keys().map(|file| (*file, reach(file))).collect();
    let mut circles = BTreeSet::new();
    for (file, to) in &reachable {
        let circle: Vec<&str> = to.iter().copied().filter(|other| reachable.get(other).is_some_and(|back| back.contains(file))).collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

#[test]
fn files_do_not_import_each_other_in_a_circle() {
    let sources = sources();
    let mut packages: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    sources.iter().for_each(|source| packages.entry(source.package).or_default().push(source));
    let found: BTreeSet<(&str, Vec<&str>)> =
        packages.iter().flat_map(|(package, files)| circles(&imports(files)).into_iter().map(|circle| (*package, circle))).collect();
    assert!(found.is_empty(), "circles, by package:\n{found:#?}");
}

#[test]
fn imports_are_followed_through_re_exports() {
    let file = |file: &str, code: &str| {
        let module = file.trim_end_matches(".rs").split('/').filter(|part| !["lib", "mod"].contains(part)).map(str::to_owned).collect();
        Source { package: "", file: file.into(), module, path: file.into(), text: String::new(), code: code.into() }
    };
    let files = [
        file("lib.rs", "pub mod a;\nmod d;\nuse other::error;\n"),
        file("a/mod.rs", "mod b;\nmod c;\npub use b::{B, self as renamed};\npub struct Shared;\nfn f() { c::g(); }\n"),
        file("a/b.rs", "use super::{\n    Shared,\n    c::{C, g as h},\n};\nuse crate::error::Error;\npub struct B;\n"),
        file("a/c.rs", "pub struct C;\npub fn g() -> super::Shared {}\n"),
        file("d.rs", "use crate::a::*;\nfn f(_: B) {}\nfn g(_: crate::a::renamed::B) {}\n"),
    ];
    let files: Vec<&Source> = files.iter().collect();
    let expected: BTreeMap<&str, BTreeSet<&str>> =
        [("a/b.rs", ["a/c.rs"].into()), ("a/mod.rs", ["a/c.rs"].into()), ("d.rs", ["a/b.rs", "a/mod.rs"].into())].into();
    assert_eq!(imports(&files), expected);
    assert_eq!(circles(&[("a", ["b"].into()), ("b", ["c"].into()), ("c", ["b"].into())].into()), [["b", "c"]]);
}

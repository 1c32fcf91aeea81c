//! Names of local files in recipes, reports and metadata, which may be published: absolute paths are
//! replaced by relative ones.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::{is_remote, real_path};

/// Parents of the users' home folders.
const HOMES: [&str; 2] = ["/home", "/Users"];

/// Replaces absolute paths by relative paths.
#[derive(Debug)]
pub struct LocalNames {
    /// Absolute paths with their replacements, the longest first.
    pairs: Vec<(String, String)>,
}

impl LocalNames {
    /// Collects the absolute paths of existing files from options. Replacements are relative to
    /// `folder`, or the last path component without one.
    pub fn new(options: &Value, folder: Option<&Path>) -> LocalNames {
        let mut found = Vec::new();
        collect(options, &mut found);
        let name = |path: &Path| folder.map_or_else(|| last_part(path), |folder| relative(path, folder));
        let mut pairs: Vec<(String, String)> = found.into_iter().map(|path| (path.to_owned(), name(Path::new(path)).to_string_lossy().into_owned())).collect();
        pairs.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        LocalNames { pairs }
    }

    /// Also replaces this path, or replaces it by another name.
    #[must_use]
    pub fn with(mut self, path: &Path, name: &Path) -> LocalNames {
        let path = path.to_string_lossy();
        self.pairs.retain(|(other, _)| *other != path);
        self.pairs.push((path.into_owned(), name.to_string_lossy().into_owned()));
        self.pairs.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        self
    }

    /// Replaces all such paths in a text.
    pub fn text(&self, text: &str) -> String {
        self.pairs.iter().fold(text.to_owned(), |text, (path, name)| replace_path(&text, path, name))
    }

    /// Replaces all such paths in the strings of a JSON value.
    pub fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(text).into(),
            Value::Array(values) => values.iter().map(|value| self.value(value)).collect(),
            Value::Object(values) => values.iter().map(|(key, value)| (key.clone(), self.value(value))).collect(),
            other => other.clone(),
        }
    }
}

fn collect<'v>(value: &'v Value, found: &mut Vec<&'v str>) {
    match value {
        // Prompts may begin with a slash, and `/` is not replaced.
        Value::String(text) if text.len() > 1 && Path::new(text).is_absolute() && Path::new(text).exists() => found.push(text),
        Value::Array(values) => values.iter().for_each(|value| collect(value, found)),
        Value::Object(values) => values.values().for_each(|value| collect(value, found)),
        _ => {}
    }
}

fn last_part(path: &Path) -> PathBuf {
    path.file_name().map_or_else(|| path.to_owned(), PathBuf::from)
}

/// A path relative to a folder, or its last component if the relative path would contain a user name or
/// start from the root. Programs resolve `..` in the folder to which a link leads, so both are compared
/// without links.
fn relative(path: &Path, folder: &Path) -> PathBuf {
    let as_named = common_folder(path, folder);
    // The last component is the name by which the user knows the file, also if it is a link.
    let path = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => clean(&real_path(parent).join(name)),
        _ => clean(&real_path(path)),
    };
    let folder = if is_remote(folder) { return last_part(&path) } else { clean(&real_path(folder)) };
    let common = common_folder(&path, &folder);
    if is_private(&common) || is_private(&as_named) {
        return last_part(&path);
    }
    let up = folder.strip_prefix(&common).map_or(0, |rest| rest.components().count());
    let down = path.strip_prefix(&common).unwrap_or(&path);
    let relative: PathBuf = std::iter::repeat_n(Component::ParentDir, up).chain(down.components()).collect();
    match relative.components().next() {
        None => ".".into(),
        Some(_) if is_remote(&relative) => Path::new(".").join(relative),
        Some(_) => relative,
    }
}

/// Resolves `.` and `..` lexically.
fn clean(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut clean, part| {
        match part {
            Component::ParentDir => drop(clean.pop()),
            Component::CurDir => {}
            part => clean.push(part),
        }
        clean
    })
}

fn common_folder(path: &Path, folder: &Path) -> PathBuf {
    path.components().zip(folder.components()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

/// Whether the components after a common folder begin at the root, or with the name of a user.
fn is_private(common: &Path) -> bool {
    common.parent().is_none() || HOMES.iter().any(|homes| common == Path::new(homes) || common == real_path(Path::new(homes)))
}

/// Replaces a path, except where it is part of a longer path.
fn replace_path(text: &str, path: &str, name: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(path) {
        let mut next = after.chars();
        let continues = |c: char| c.is_alphanumeric() || "-_~+".contains(c);
        let longer = match next.next() {
            Some('.') => next.next().is_some_and(continues),
            first => first.is_some_and(continues),
        };
        out.push_str(before);
        out.push_str(if longer || before.ends_with(|c: char| continues(c) || c == '/' || c == '.') { path } else { name });
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_relative_and_name_no_user() {
        for (path, folder, expected) in [
            ("/data/in", "/data/out", "../in"),
            ("/data/a/in", "/data/b/c/out", "../../../a/in"),
            ("/data/out/../in", "/data/again", "../in"),
            ("/data/out/data.npz", "/data/out", "data.npz"),
            ("/home/alice/in", "/home/alice/x/out", "../../in"),
            ("/home/alice/in", "/home/bob/out", "in"),
            ("/Users/alice/in", "/Users/bob/out", "in"),
            ("/home/alice/in", "/data/out", "in"),
            ("/data/in", "s3://bucket/out", "in"),
            ("/data/out/hf:a/b", "/data/out", "./hf:a/b"),
        ] {
            assert_eq!(relative(Path::new(path), Path::new(folder)), Path::new(expected), "{path} from {folder}");
        }
    }

    /// Relative paths do not depend on the name by which a linked folder is specified.
    #[test]
    fn relative_paths_begin_at_the_target_of_a_link() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir_all(at("deep/a/b/out")).unwrap();
        std::fs::write(at("in"), "").unwrap();
        for (target, link) in [("deep/a/b", "link"), ("in", "deep/named")] {
            std::os::unix::fs::symlink(at(target), at(link)).unwrap();
        }
        for (path, folder, expected) in [
            ("in", "link/out", "../../../../in"),
            ("link/out/../../../../in", "deep/again", "../../in"),
            ("link/data", "deep/a/b/out", "../data"),
            ("deep/named", "deep/a", "../named"),
            ("in", "link/new/out", "../../../../../in"),
        ] {
            assert_eq!(relative(&at(path), &at(folder)), Path::new(expected), "{path} from {folder}");
        }
    }

    #[test]
    fn texts_name_files_by_relative_paths() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        for name in ["in", "in.npz"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let recipe = serde_json::json!({ "model": path("in"), "data": { "arrays": path("in.npz"), "prompt": "/think", "root": "/" } });
        let names = LocalNames::new(&recipe, Some(&folder.path().join("out")));
        let expected = serde_json::json!({ "model": "../in", "data": { "arrays": "../in.npz", "prompt": "/think", "root": "/" } });
        assert_eq!(names.value(&recipe), expected);
        assert_eq!(LocalNames::new(&recipe, None).value(&recipe)["data"]["arrays"], "in.npz");
        let text = format!("`{}/config.json`, {}, {} and {}.", path("in"), path("in.npz"), path("in-2"), path("in"));
        assert_eq!(names.text(&text), format!("`../in/config.json`, ../in.npz, {} and ../in.", path("in-2")));
        let renamed = names.with(Path::new(&path("in.npz")), Path::new("copy.npz")).with(Path::new(&path("in-2")), Path::new("other"));
        assert_eq!(renamed.text(&text), "`../in/config.json`, copy.npz, other and ../in.");
    }
}

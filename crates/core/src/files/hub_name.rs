//! Names of repositories on the Hugging Face Hub.

use std::path::Path;

use crate::error::{Error, Result};

/// A model repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// `org/name`.
    pub id: String,
    /// Branch, tag, commit or `refs/pr/N`.
    pub revision: String,
}

/// Prefixes of revisions whose names contain a `/`.
const NESTED: [&str; 2] = ["refs/pr/", "refs/convert/"];
/// Prefixes of the folders in the cache of `huggingface_hub`, which contain repositories.
const CACHED: [&str; 2] = ["models--", "datasets--"];
/// File with the LFS patterns of a repository, which the Hub creates and changes.
pub const GIT_ATTRIBUTES: &str = ".gitattributes";
/// Start of the addresses of data sets.
const DATASETS: &str = "https://huggingface.co/datasets/";

impl Repository {
    /// The model repository that a path leads to: a name like `hf:org/name`, or a file in the cache of
    /// `huggingface_hub`.
    pub fn from_path(path: &Path) -> Option<Repository> {
        if let Some((repository, _)) = path.to_str().and_then(|name| parse(name).ok()) {
            return Some(repository);
        }
        let [models, _] = CACHED;
        let id = cached(path, models)?;
        let mut rest = path.components().map(|part| part.as_os_str()).skip_while(|part| *part != "snapshots").skip(1);
        let revision = rest.next().and_then(|part| part.to_str()).unwrap_or("main").to_owned();
        Some(Repository { id, revision })
    }
}

/// The data set on the Hub that a path or an address leads to, as `org/name`.
pub fn data_set_id(path: &str) -> Option<String> {
    let [_, data_sets] = CACHED;
    let Some(rest) = path.strip_prefix(DATASETS) else { return cached(Path::new(path), data_sets) };
    let mut parts = rest.split('/');
    let id = format!("{}/{}", parts.next()?, parts.next()?);
    is_repository_id(&id).then_some(id)
}

/// The repository of a file in the cache of `huggingface_hub`.
fn cached(path: &Path, prefix: &str) -> Option<String> {
    let id = path.components().find_map(|part| part.as_os_str().to_str()?.strip_prefix(prefix))?.replacen("--", "/", 1);
    is_repository_id(&id).then_some(id)
}

/// Whether a text has the form of the name of a repository, `org/name`.
pub fn is_repository_id(text: &str) -> bool {
    text.split_once('/').is_some_and(|(org, name)| is_plain(org) && is_plain(name))
}

/// Rejects the page of a repository on the website of the Hub, which is not a file.
pub fn require_no_page(path: &Path) -> Result<()> {
    match path.to_str().and_then(page) {
        Some(name) => {
            let hint = format!("write `hf:{name}`, with `@REVISION` for a branch, tag or commit");
            Err(Error::run(path.display(), "is a page of the Hugging Face Hub, not a file", hint))
        }
        None => Ok(()),
    }
}

/// The repository of a page.
fn page(address: &str) -> Option<&str> {
    let address = address.strip_prefix("https://")?;
    let name = ["huggingface.co/", "hf.co/"].iter().find_map(|host| address.strip_prefix(host))?.trim_end_matches('/');
    let end = name.match_indices('/').nth(1).map_or(name.len(), |(at, _)| at);
    let (name, rest) = name.split_at(end);
    (is_repository_id(name) && (rest.is_empty() || rest.starts_with("/tree/"))).then_some(name)
}

fn is_plain(part: &str) -> bool {
    !part.is_empty() && !part.starts_with('.') && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// Parses a name like `hf:org/name@revision/file` into the repository and the path in it.
pub(super) fn parse(name: &str) -> Result<(Repository, String), String> {
    let form = || "is not of the form hf:org/name, hf:org/name@revision or hf:org/name@revision/file".to_owned();
    let rest = name.strip_prefix("hf:").ok_or_else(form)?;
    let (org, rest) = rest.split_once('/').ok_or_else(form)?;
    let slash = rest.find('/').unwrap_or(rest.len());
    let (name, revision, inside) = match rest.find('@').filter(|at| *at < slash) {
        None => (rest.get(..slash), "main", rest.get(slash..)),
        Some(at) => {
            let after = rest.get(at.saturating_add(1)..).unwrap_or_default();
            let nested = NESTED.iter().find(|prefix| after.starts_with(**prefix)).map_or(0, |prefix| prefix.len());
            let end = after.get(nested..).and_then(|rest| rest.find('/')).map_or(after.len(), |end| end.saturating_add(nested));
            (rest.get(..at), after.get(..end).unwrap_or_default(), after.get(end..))
        }
    };
    let name = name.unwrap_or_default();
    let valid =
        revision.split('/').all(|part| !part.is_empty() && part != ".." && !part.contains(['?', '#', '%', '\\']) && !part.contains(char::is_whitespace));
    if !is_plain(org) || !is_plain(name) || !valid {
        return Err(form());
    }
    let inside = inside.unwrap_or_default().trim_matches('/').to_owned();
    Ok((Repository { id: format!("{org}/{name}"), revision: revision.to_owned() }, inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        let check = |name: &str, id: &str, revision: &str, inside: &str| {
            let expected = (Repository { id: id.into(), revision: revision.into() }, inside.to_owned());
            assert_eq!(parse(name), Ok(expected), "{name}");
        };
        check("hf:a/b", "a/b", "main", "");
        check("hf:a/b/model.safetensors", "a/b", "main", "model.safetensors");
        check("hf:a/b-2.5@v1.0/onnx/model@2.onnx", "a/b-2.5", "v1.0", "onnx/model@2.onnx");
        check("hf:a/b@refs/pr/7/config.json", "a/b", "refs/pr/7", "config.json");
        check("hf:a/b@refs/pr/7", "a/b", "refs/pr/7", "");
        for wrong in ["hf:", "hf:a", "hf:a/", "hf:/b", "hf:a/b@", "hf:../b", "hf:a/b@../c", "hf:a b/c", "hf:a/b@x?y"] {
            assert!(parse(wrong).unwrap_err().contains("hf:org/name"), "{wrong}");
        }
    }

    #[test]
    fn pages_are_not_files() {
        let names = ["https://huggingface.co/a/b", "https://hf.co/a/b/", "https://huggingface.co/a/b/tree/main"];
        assert!(names.map(page).into_iter().all(|name| name == Some("a/b")));
        for name in ["https://huggingface.co/a/b/resolve/main/model.gguf", "https://huggingface.co/a", "https://example.org/a/b", "hf:a/b", "a/b"] {
            assert_eq!(page(name), None, "{name}");
        }
        assert!(require_no_page(Path::new(names[0])).unwrap_err().hint().unwrap().contains("write `hf:a/b`"));
    }

    #[test]
    fn repositories_are_found_in_paths() {
        let model = |path: &str| Repository::from_path(Path::new(path)).map(|found| (found.id, found.revision));
        let expected = |id: &str, revision: &str| Some((id.to_owned(), revision.to_owned()));
        assert_eq!(model("hf:a/b@v1/model.onnx"), expected("a/b", "v1"));
        assert_eq!(model("/home/me/.cache/huggingface/hub/models--a--b-2/snapshots/0a1b"), expected("a/b-2", "0a1b"));
        assert_eq!(model("models--a--b"), expected("a/b", "main"));
        assert_eq!((model("models/a/b"), model("datasets--a--b/snapshots/0"), model("models--a")), (None, None, None));
        let data = |path: &str| data_set_id(path);
        assert_eq!(data("/hub/datasets--a--b/snapshots/0/train.csv").as_deref(), Some("a/b"));
        assert_eq!(data("https://huggingface.co/datasets/a/b/resolve/main/train.csv").as_deref(), Some("a/b"));
        assert_eq!((data("train.csv"), data("https://huggingface.co/datasets/a")), (None, None));
        assert!(is_repository_id("org/name-2.5") && !["name", "a/b/c", "../b", "a b/c", "/b"].into_iter().any(is_repository_id));
    }
}

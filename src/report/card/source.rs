//! Facts about the source, from its card and its configuration.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{FILE, MARKER, STEPS};
use crate::error::{Error, Result};
use crate::files::{self, Repository};
use crate::model::{Model, auxiliary_path};

/// Maximum size of the metadata of a card in bytes.
const MAX_METADATA: usize = 1 << 16;
/// Maximum number of values that YAML aliases may add.
const MAX_ALIASED: usize = 1000;
/// Maximum number of steps that are taken from the card of an earlier run.
const MAX_STEPS: usize = 100;
/// First components of typical local paths, which look like names of repositories.
const LOCAL: [&str; 13] = ["checkpoint", "checkpoints", "ckpt", "data", "home", "local", "model", "models", "out", "output", "outputs", "results", "tmp"];

/// The model from which an output was made.
#[derive(Debug, Clone, Default)]
pub(crate) struct Source {
    /// Name for titles.
    pub name: String,
    /// Name of the folder or file, without the folders that contain it.
    pub folder: String,
    /// The repository on the Hub that contains it.
    pub repository: Option<Repository>,
    /// The models on the Hub that it is, or that it is based on.
    pub base_models: Vec<String>,
    /// Metadata of its card.
    pub metadata: Map<String, Value>,
    /// Whether it has a card.
    pub has_card: bool,
    /// Whether this program wrote its card.
    pub is_own: bool,
    /// Steps of the runs that wrote it.
    pub earlier_steps: Vec<String>,
    /// The model class of `config.json`.
    pub architecture: Option<String>,
    /// Notes for the report.
    pub notes: Vec<String>,
}

impl Source {
    /// Reads the card and the configuration of a model.
    ///
    /// # Errors
    /// The card exists, but cannot be read.
    pub fn open(model: &Model) -> Result<Source> {
        let repository = Repository::from_path(&files::absolute(&model.path));
        let mut source = Source { architecture: architecture(model.config.values()), ..Source::default() };
        if let Some(path) = card_path(&model.path, repository.as_ref()) {
            let text = String::from_utf8_lossy(&files::read(&path).map_err(Error::io("read", &path))?).into_owned();
            (source.has_card, source.is_own) = (true, is_own(&text));
            match metadata(&text) {
                Ok(found) => source.metadata = found,
                Err(reason) => source.notes.push(format!("the model card has no metadata of the source, because that of its {FILE} cannot be read: {reason}")),
            }
            // The card of a repository is linked, so that its steps are not repeated.
            if source.is_own && repository.is_none() {
                source.earlier_steps = steps(&text);
            }
        }
        source.base_models = base_models(repository.as_ref(), &source.metadata, model);
        source.folder = folder(&model.path);
        source.name = name(repository.as_ref(), &source);
        source.repository = repository;
        Ok(source)
    }

    /// The folder of an earlier run on this machine, which is not the original model.
    pub(super) fn earlier_result(&self) -> Option<&str> {
        (self.is_own && self.repository.is_none()).then_some(self.folder.as_str())
    }
}

/// Whether this program wrote a card.
pub(crate) fn is_own(text: &str) -> bool {
    text.lines().any(|line| line == MARKER)
}

/// The class in `architectures` of `config.json`.
pub(super) fn architecture(config: &Map<String, Value>) -> Option<String> {
    config.get("architectures")?.get(0)?.as_str().map(str::to_owned)
}

/// The card of a folder, or that of the repository that contains a file.
fn card_path(model: &Path, repository: Option<&Repository>) -> Option<PathBuf> {
    let in_folder = files::is_dir(model).then(|| auxiliary_path(model, FILE));
    let in_repository = || repository.filter(|_| files::is_remote(model)).map(|found| PathBuf::from(format!("hf:{}@{}/{FILE}", found.id, found.revision)));
    in_folder.filter(|path| files::is_file(path)).or_else(in_repository).filter(|path| files::is_file(path))
}

/// The metadata at the beginning of a card: YAML between two lines `---`. Empty without such lines.
fn metadata(text: &str) -> Result<Map<String, Value>, String> {
    let mut lines = text.trim_start_matches('\u{feff}').lines();
    if lines.next().map(str::trim_end) != Some("---") {
        return Ok(Map::new());
    }
    let mut yaml = String::new();
    for line in lines {
        if line.trim_end() == "---" {
            let aliases = serde_saphyr::alias_limits! { max_total_replayed_events: MAX_ALIASED };
            let options = serde_saphyr::options! { alias_limits: aliases };
            let parsed: Result<Option<Map<String, Value>>, _> = serde_saphyr::from_str_with_options(&yaml, options);
            return parsed.map(Option::unwrap_or_default).map_err(|e| e.to_string().lines().next().unwrap_or_default().to_owned());
        }
        yaml.push_str(line);
        yaml.push('\n');
        if yaml.len() > MAX_METADATA {
            return Err(format!("it has more than {MAX_METADATA} bytes"));
        }
    }
    // A horizontal rule.
    Ok(Map::new())
}

/// The numbered list in the section of a card about the passes.
fn steps(text: &str) -> Vec<String> {
    let section = text.lines().skip_while(|line| *line != STEPS).skip(1).take_while(|line| !line.starts_with("## "));
    let step = |line: &str| {
        let (number, step) = line.split_once(". ")?;
        number.parse::<u32>().ok().map(|_| step.to_owned())
    };
    section.filter_map(step).take(MAX_STEPS).collect()
}

/// The repository of the source, otherwise the base models that its card or `_name_or_path` of its
/// configuration names.
fn base_models(repository: Option<&Repository>, metadata: &Map<String, Value>, model: &Model) -> Vec<String> {
    if let Some(repository) = repository {
        return vec![repository.id.clone()];
    }
    let named = match metadata.get("base_model") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        other => other.and_then(Value::as_str).into_iter().collect::<Vec<_>>(),
    };
    let named: Vec<String> = named.into_iter().filter(|name| files::is_repository_id(name)).map(str::to_owned).collect();
    if !named.is_empty() {
        return named;
    }
    let loaded_from = model.config.get("_name_or_path").and_then(Value::as_str);
    loaded_from.filter(|name| is_hub_name(name)).map(str::to_owned).into_iter().collect()
}

/// Whether a name that transformers loaded a model from is a repository, and not a local folder.
fn is_hub_name(name: &str) -> bool {
    let is_local = |(folder, inner): (&str, &str)| LOCAL.contains(&folder) || inner.starts_with("checkpoint-");
    files::is_repository_id(name) && !name.split_once('/').is_some_and(is_local)
}

/// The name of the source for titles: that of its repository, or of its folder or file.
fn name(repository: Option<&Repository>, source: &Source) -> String {
    let base = repository.map(|repository| &repository.id).or_else(|| source.base_models.first().filter(|_| source.is_own));
    base.and_then(|id| id.split_once('/')).map_or_else(|| source.folder.clone(), |(_, name)| name.to_owned())
}

/// The name of a folder, or of a file without its extension.
fn folder(path: &Path) -> String {
    let path = files::absolute(path);
    let name = if files::is_dir(&path) { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_read() {
        let read = |text: &str| metadata(text).map(|found| Value::Object(found).to_string());
        assert_eq!(read("---\nlicense: mit\ntags:\n- a\n---\n# Title\n"), Ok("{\"license\":\"mit\",\"tags\":[\"a\"]}".to_owned()));
        assert_eq!(read("\u{feff}---\r\nlicense: mit\r\n---\r\n"), Ok("{\"license\":\"mit\"}".to_owned()));
        for empty in ["", "# Title\n", "---\n---\n", "---\nlicense: mit\n", "text\n---\nlicense: mit\n---\n"] {
            assert_eq!(read(empty), Ok("{}".to_owned()), "{empty:?}");
        }
        for wrong in ["---\n[1, 2]\n---\n".to_owned(), "---\na: [\n---\n".to_owned(), format!("---\n{}---\n", "# comment\n".repeat(10_000))] {
            assert!(read(&wrong).is_err(), "{wrong:.20}");
        }
    }

    #[test]
    fn local_folders_are_not_base_models() {
        assert!(is_hub_name("org/name") && is_hub_name("sentence-transformers/all-MiniLM-L6-v2"));
        for local in ["name", "models/name", "./name", "/data/name", "output/checkpoint-500", "org/checkpoint-500", "a/b/c", "C:\\name", ""] {
            assert!(!is_hub_name(local), "{local}");
        }
    }

    #[test]
    fn steps_of_an_earlier_card_are_read() {
        let text = format!("# A\n\n1. not a step\n\n{STEPS}\n\n1. First. Then more\n2. Second\nother\n\n## Size\n\n3. not a step\n");
        assert_eq!(steps(&text), ["First. Then more", "Second"]);
        assert!(steps("1. a\n").is_empty() && is_own(&format!("---\n---\n{MARKER}\n")) && !is_own("# A\n"));
    }
}

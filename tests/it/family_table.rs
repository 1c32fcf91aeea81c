//! The page of model families in docs/reference, from the table of families and the reference files of the
//! tests.
//!
//! `COMPRESS_ACCEPT=1 cargo test --test it family_table::` writes the page.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use compress_graph::arch::{self, Family};
use serde_json::Value;

const HEAD: &str = "\
# Families and their tests

Look up the tests that cover a model family. This page is generated from the table of families and the reference files
of the tests (`COMPRESS_ACCEPT=1 cargo test --test it family_table::`); [model families](../families.md) describes the
models.

| column | compared with transformers, on tiny models with random weights |
| --- | --- |
| reference models | outputs within 1e-4 (`tests/it/parity.rs`), gradients (`tests/it/tape.rs`), pruning groups (`tests/it/groups.rs`), ONNX (`tests/it/onnx.rs`), incremental decoding of decoders (`tests/it/generation.rs`) |
| keys | effect of each key of `config.json` in transformers 5 and 4 (`tests/it/parity.rs`) |
| texts | generated texts (`tests/it/generation.rs`) |
| GGUF | architecture in GGUF files, and models with files of the package `gguf` (`tests/it/gguf`) |

A family without reference models has no graph. Roles and ties of its weights are compared with the modules of
transformers (`tests/it/families.rs`), unless transformers does not have the family. Heads (`eagle3`) are compared with
the package speculators (`tests/it/draft_heads.rs`).

| `model_type` | reference models | keys | texts | GGUF |
| --- | --- | --- | --- | --- |
";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Names of models by `model_type`, for these configurations.
fn by_type(configurations: impl Iterator<Item = (String, PathBuf)>) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, path) in configurations {
        found.entry(json(&path)["model_type"].as_str().unwrap().to_owned()).or_default().insert(name);
    }
    found
}

/// Names of the files of a folder of reference files, and their paths.
fn entries(folder: &str) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(golden().join(folder)).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), path))
}

fn page() -> String {
    let models = by_type(entries("models").map(|(name, path)| (name, path.join("config.json"))));
    let has_architecture = |path: &Path| path.extension().is_some_and(|end| end == "json") && path.with_extension("gguf").is_file();
    let files = by_type(entries("gguf").filter(|(_, path)| has_architecture(path)));
    let keys: BTreeSet<String> =
        json(&golden().join("config-keys.json")).as_array().unwrap().iter().map(|model| model["model"].as_str().unwrap().to_owned()).collect();
    let texts: BTreeSet<String> = json(&golden().join("generation.json")).as_object().unwrap().keys().cloned().collect();
    let mut text = HEAD.to_owned();
    for family in arch::families() {
        let Family { model_type, gguf, .. } = family;
        let own = models.get(*model_type).cloned().unwrap_or_default();
        let listed = |names: &BTreeSet<String>| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let in_both = |names: &BTreeSet<String>| if own.is_disjoint(names) { "" } else { "yes" };
        let files_of_family = gguf.map_or_else(String::new, |gguf| {
            let names = files.get(*model_type).map(|names| format!(": {}", listed(names)));
            format!("`{}`{}", gguf.architecture, names.unwrap_or_default())
        });
        let row = format!("| `{model_type}` | {} | {} | {} | {files_of_family} |", listed(&own), in_both(&keys), in_both(&texts));
        writeln!(text, "{}", row.replace("  ", " ")).unwrap();
    }
    text
}

#[test]
fn the_page_names_the_reference_models_of_every_family() {
    let text = page();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/families.md");
    if std::env::var_os("COMPRESS_ACCEPT").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let current = fs::read_to_string(&path).unwrap_or_default();
    assert!(current == text, "docs/reference/families.md differs from the table: run COMPRESS_ACCEPT=1 cargo test --test it family_table::");
}

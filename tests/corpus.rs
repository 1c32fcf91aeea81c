//! The seeds of `fuzz/`, read without a fuzzer: what has crashed a parser once is kept there.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use compress::Model;
use compress::ir::{Catalog, GraphFile};
use compress::recipe::Recipe;

fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("seed-"))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).unwrap()))
        .collect();
    found.sort();
    found
}

/// Shapes are in the names: `w3x4` is `[3, 4]`.
struct Named;

impl Catalog for Named {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        name.strip_prefix('w')?.split('x').map(|size| size.parse().ok()).collect()
    }

    fn nearest(&self, _name: &str) -> Option<String> {
        None
    }
}

#[test]
fn seeds_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (mut read, mut refused) = (0, 0);
    let mut count = |ok: bool| if ok { read += 1 } else { refused += 1 };
    for (name, bytes) in seeds("reader") {
        let path = folder.path().join(format!("{name}.safetensors"));
        std::fs::write(&path, bytes).unwrap();
        count(Model::open(path).is_ok());
    }
    for (_, bytes) in seeds("recipe") {
        count(Recipe::parse(&String::from_utf8_lossy(&bytes), Path::new("recipe.yaml")).is_ok());
    }
    assert!(read > 10 && refused > 20, "{read} read, {refused} refused");
    let graphs = seeds("graph");
    assert!(graphs.len() > 5);
    for (name, bytes) in graphs {
        let file: GraphFile = serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        match file.build(&Named) {
            Ok(graph) => {
                let again: GraphFile = serde_json::from_value(serde_json::to_value(GraphFile::from(&graph)).unwrap()).unwrap();
                assert_eq!(again.build(&Named).unwrap().to_string(), graph.to_string(), "{name}");
                compress::analysis::groups(&graph).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            Err(e) => assert!(e.to_string().contains("graph"), "{name}: {e}"),
        }
    }
}

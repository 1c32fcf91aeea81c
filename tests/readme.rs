//! What the README shows is run, with a small BERT in the place of `minilm`.
#![cfg(all(feature = "cli", feature = "run"))]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

/// The contents of fenced blocks of one language.
fn blocks(language: &str) -> Vec<String> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let fence = format!("```{language}\n");
    text.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

fn with_model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("minilm")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/bert").join(name);
        std::fs::copy(from, folder.path().join("minilm").join(name)).unwrap();
    }
    for (name, called) in [("word-pieces.json", "minilm/tokenizer.json"), ("pairs.tsv", "pairs.tsv")] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation").join(name);
        std::fs::copy(from, folder.path().join(called)).unwrap();
    }
    folder
}

fn check(folder: &Path, line: &str) {
    let line = line.strip_prefix("compress ").unwrap();
    let shell = format!("\"$COMPRESS\" {line}");
    let output = Command::new("sh").args(["-c", &shell]).env("COMPRESS", env!("CARGO_BIN_EXE_compress")).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn commands_run() {
    let folder = with_model();
    let blocks = blocks("sh");
    assert!(blocks.len() >= 3, "the README has lost its commands");
    for line in blocks.iter().flat_map(|block| block.lines()) {
        check(folder.path(), line);
    }
}

#[test]
fn recipes_run() {
    let folder = with_model();
    let blocks = blocks("yaml");
    assert_eq!(blocks.len(), 2);
    for block in &blocks {
        std::fs::write(folder.path().join("recipe.yaml"), block).unwrap();
        check(folder.path(), "compress plan recipe.yaml");
        check(folder.path(), "compress run recipe.yaml");
    }
    assert!(folder.path().join("out/recipe/report.md").is_file());
    assert!(std::fs::read_to_string(folder.path().join("out/measured/report.md")).unwrap().contains("spearman"));
}

#[test]
fn the_graph_is_one() {
    let blocks = blocks("json");
    assert_eq!(blocks.len(), 1);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("graph.json"), &blocks[0]).unwrap();
    let zeros = |shape: &[usize]| candle_core::Tensor::zeros(shape, candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
    let tensors = [("fc1.weight", zeros(&[8, 784])), ("fc1.bias", zeros(&[8])), ("fc2.weight", zeros(&[10, 8])), ("fc2.bias", zeros(&[10]))];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    check(folder.path(), "compress inspect . --graph");
}

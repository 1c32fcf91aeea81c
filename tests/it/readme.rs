//! Runs the commands and recipes of the README and of the guides in `docs/`, with a small BERT as
//! `minilm`, a small Llama as `llama`, and a network that its guide describes.
#![cfg(all(feature = "cli", feature = "run"))]
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Contents of the fenced code blocks of a language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap();
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
    let output = Command::new("sh")
        .args(["-c", &shell])
        .envs([("COMPRESS", env!("CARGO_BIN_EXE_compress")), ("COMPRESS_RATES", "off")])
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn commands_run() {
    let folder = with_model();
    let blocks = blocks("README.md", "sh");
    assert!(blocks.len() >= 2, "the README contains no commands");
    for line in blocks.iter().flat_map(|block| block.lines()) {
        check(folder.path(), line);
    }
}

#[test]
fn recipes_run() {
    let folder = with_model();
    let blocks = blocks("README.md", "yaml");
    assert_eq!(blocks.len(), 1);
    for block in &blocks {
        std::fs::write(folder.path().join("recipe.yaml"), block).unwrap();
        check(folder.path(), "compress plan recipe.yaml");
        check(folder.path(), "compress run recipe.yaml");
    }
    assert!(folder.path().join("out/recipe/report.md").is_file());
}

/// Deterministic weights of these shapes.
fn save_weights(path: &Path, shapes: &[(&str, &[usize])]) {
    let values = |shape: &[usize]| (0..shape.iter().product::<usize>()).map(|i| 0.3 * (i as f32).sin()).collect::<Vec<f32>>();
    let tensor = |shape: &[usize]| candle_core::Tensor::from_vec(values(shape), shape, &candle_core::Device::Cpu).unwrap();
    let tensors: HashMap<_, _> = shapes.iter().map(|(name, shape)| ((*name).to_owned(), tensor(shape))).collect();
    candle_core::safetensors::save(&tensors, path).unwrap();
}

/// Pages begin with the task of their reader, not with an explanation.
#[test]
fn the_first_sentence_of_a_page_is_a_task() {
    const VERBS: [&str; 25] = [
        "Add", "Change", "Check", "Choose", "Compare", "Compress", "Describe", "Estimate", "Export", "Find", "Halve", "Look", "Make", "Measure", "Prune",
        "Quantize", "Read", "Recover", "Reduce", "Shrink", "Sign", "Split", "Test", "Train", "Write",
    ];
    let pages = pages();
    assert!(pages.len() > 40, "{pages:?}");
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let mut lines = text.lines();
        let [title, empty, sentence] = [(); 3].map(|()| lines.next().unwrap_or_default());
        let verb = sentence.split(' ').next().unwrap();
        assert!(title.starts_with("# ") && empty.is_empty() && VERBS.contains(&verb), "{}: {sentence}", page.display());
    }
}

#[test]
fn the_graph_is_valid() {
    let blocks = blocks("docs/own-networks.md", "json");
    assert_eq!(blocks.len(), 1);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("graph.json"), &blocks[0]).unwrap();
    save_weights(&folder.path().join("model.safetensors"), &[("fc1.weight", &[8, 784]), ("fc1.bias", &[8]), ("fc2.weight", &[10, 8]), ("fc2.bias", &[10])]);
    check(folder.path(), "compress inspect . --graph");
}

#[test]
fn the_family_of_the_example_is_valid() {
    let file = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/graph/src/arch/olmo2.rs")).unwrap();
    assert_eq!(blocks("ARCHITECTURE.md", "rust"), [file]);
}

/// Arrays for `classifier`, twelve rows, and `runs` of the encoder, a file for each.
fn save_samples(folder: &Path) {
    save_weights(&folder.join("samples.safetensors"), &[("pixel_values", &[12, 3, 32, 32])]);
    std::fs::create_dir(folder.join("runs")).unwrap();
    for run in 0..4u32 {
        let tokens = |value: &dyn Fn(u32) -> i64| candle_core::Tensor::from_iter((0..5 + run).map(value), &candle_core::Device::Cpu).unwrap();
        let row = |tensor: candle_core::Tensor| tensor.unsqueeze(0).unwrap();
        let inputs = [("input_ids", tokens(&|at| i64::from(at * 5 + run))), ("attention_mask", tokens(&|_| 1)), ("token_type_ids", tokens(&|_| 0))];
        let inputs: HashMap<_, _> = inputs.map(|(name, tensor)| (name.to_owned(), row(tensor))).into();
        candle_core::safetensors::save(&inputs, folder.join(format!("runs/{run}.safetensors"))).unwrap();
    }
}

/// Models and data for the guides in addition to `minilm`: `llama` with `book.txt` and `validation.txt`,
/// `assistant` with a chat template and `chats.jsonl`, `t5`, `whisper` with `speech.wav`, `smollm` with a
/// tokenizer for GGUF files, `llama-4` without one, `gemma-3` with a vision tower, `qwen3-vl` with
/// `pictures.jsonl`, `network` with a graph from a guide and `images`, `classifier` for these images with
/// `samples.safetensors` and `runs`, and the keys of a signer.
fn with_all_models() -> tempfile::TempDir {
    let folder = with_model();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let copy = |from: &str, to: &str| {
        let to = folder.path().join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(golden.join(from), to).unwrap();
    };
    copy("models/llama/config.json", "llama/config.json");
    copy("models/llama/model.safetensors", "llama/model.safetensors");
    copy("evaluation/characters.json", "llama/tokenizer.json");
    copy("models/llama/config.json", "assistant/config.json");
    copy("models/llama/model.safetensors", "assistant/model.safetensors");
    copy("evaluation/merged.json", "assistant/tokenizer.json");
    copy("evaluation/special.json", "assistant/tokenizer_config.json");
    copy("evaluation/answers.jinja", "assistant/chat_template.jinja");
    copy("evaluation/answers.jsonl", "chats.jsonl");
    copy("models/llama/config.json", "smollm/config.json");
    copy("models/llama/model.safetensors", "smollm/model.safetensors");
    std::fs::write(folder.path().join("smollm/tokenizer.json"), crate::low_bits::BYTE_LEVEL).unwrap();
    for file in ["config.json", "model.safetensors"] {
        copy(&format!("models/llama4/{file}"), &format!("llama-4/{file}"));
        copy(&format!("models/gemma3-vl/{file}"), &format!("gemma-3/{file}"));
    }
    copy("evaluation/characters.json", "gemma-3/tokenizer.json");
    copy("evaluation/book.txt", "book.txt");
    let book = std::fs::read_to_string(golden.join("evaluation/book.txt")).unwrap();
    std::fs::write(folder.path().join("validation.txt"), book.split_whitespace().rev().collect::<Vec<_>>().join(" ")).unwrap();
    for model in ["whisper", "t5"] {
        copy(&format!("models/{model}/config.json"), &format!("{model}/config.json"));
        copy(&format!("models/{model}/model.safetensors"), &format!("{model}/model.safetensors"));
        copy("evaluation/characters.json", &format!("{model}/tokenizer.json"));
    }
    copy("speech/usual/speech.wav", "speech.wav");
    let heard = r#"{ "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 6, "hop_length": 800, "chunk_length": 1 }"#;
    std::fs::write(folder.path().join("whisper/preprocessor_config.json"), heard).unwrap();
    copy("evaluation/resnet-basic.json", "network/preprocessor_config.json");
    for n in 0..10 {
        let image = format!("images/LABEL_{}/{n}.png", n % 5);
        copy(&format!("evaluation/{image}"), &image);
    }
    let shapes: [(&str, &[usize]); 6] = [
        ("conv1.weight", &[16, 3, 3, 3]),
        ("conv1.bias", &[16]),
        ("conv2.weight", &[32, 16, 3, 3]),
        ("conv2.bias", &[32]),
        ("fc.weight", &[5, 32]),
        ("fc.bias", &[5]),
    ];
    save_weights(&folder.path().join("network/model.safetensors"), &shapes);
    copy("models/resnet-basic/config.json", "classifier/config.json");
    copy("models/resnet-basic/model.safetensors", "classifier/model.safetensors");
    save_samples(folder.path());
    let mail = (0..4).map(|_| "the cat sat on a mat\tham\nmy big wet hat\tspam\n").collect::<String>();
    std::fs::write(folder.path().join("mail.tsv"), format!("text\tlabel\n{mail}")).unwrap();
    crate::provenance::write_keys(folder.path(), "signer");
    crate::multimodal_texts::model(folder.path());
    let picture = |n: usize| format!("{{\"text\": \"a cat<|image_pad|>on a mat\", \"image\": \"images/LABEL_{n}/{n}.png\"}}\n");
    std::fs::write(folder.path().join("pictures.jsonl"), (0..4).map(picture).collect::<String>()).unwrap();
    folder
}

/// The pages of `docs/` and its folders.
fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    crate::language::files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("docs"), ".md", &mut found);
    found
}

#[test]
fn guides_run() {
    for path in pages() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let index = std::fs::read_to_string(path.with_file_name("README.md")).unwrap();
        assert!(name == "README.md" || index.contains(&format!("]({name})")), "the index next to {} does not list it", path.display());
        let text = std::fs::read_to_string(&path).unwrap();
        let folder = with_all_models();
        // Every second part is a fenced block that starts with its language.
        for block in text.split("\n```").skip(1).step_by(2) {
            let (language, contents) = block.split_once('\n').unwrap();
            match language {
                "sh" => contents.lines().for_each(|line| check(folder.path(), line)),
                "yaml" => {
                    std::fs::write(folder.path().join("recipe.yaml"), contents).unwrap();
                    check(folder.path(), "compress plan recipe.yaml");
                    check(folder.path(), "compress run recipe.yaml -o out/once --force");
                }
                "json" => std::fs::write(folder.path().join("network/graph.json"), contents).unwrap(),
                // The tests of the Python package run these.
                "python" => {}
                // Lines of a manifest, which the build of examples/build_script contains.
                "toml" => {}
                // The documentation tests of the library compile these.
                "rust,no_run" => {}
                language => assert_eq!(language, "text", "{name}"),
            }
        }
    }
}

/// A page without its fenced blocks.
fn unfenced(text: &str) -> String {
    text.split("\n```").step_by(2).collect()
}

/// The anchors of the headings of a page, as on GitHub and in mdBook.
fn anchors(page: &Path) -> Vec<String> {
    let text = unfenced(&std::fs::read_to_string(page).unwrap());
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim().to_lowercase());
    headings.map(|heading| heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c)).collect::<String>().replace(' ', "-")).collect()
}

#[test]
fn links_are_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut followed, mut broken) = (0, Vec::new());
    for page in pages().into_iter().chain(["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(|name| root.join(name))) {
        let text = unfenced(&std::fs::read_to_string(&page).unwrap());
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for link in links.filter(|link| link.starts_with('#') || link.contains(".md") || link.contains('/')).filter(|link| !link.starts_with("https://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            if !target.is_file() || !anchor.is_empty() && !anchors(&target).iter().any(|heading| heading == anchor) {
                broken.push(format!("{}: {link}", page.display()));
            }
            followed += 1;
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(followed > 150, "{followed}");
}

//! Reading and writing of vocabularies.

use std::fs;
use std::path::Path;

use compress::Model;
use compress::export::FileType;
use compress_core::store::{Computed, gguf};
use serde_json::Value;

use super::{export, golden, rewritten, tokens, written};

#[test]
fn tokenizers_yield_the_golden_tokens() {
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    for (name, ids) in expected["tokens"].as_object().unwrap() {
        let model = Model::open(golden(&format!("gguf/tokenizer-{name}.gguf"))).unwrap();
        assert_eq!(tokens(&model, &expected["texts"]), *ids, "{name}");
        let made = |file: &str| serde_json::from_str::<Value>(&model.auxiliary.synthesized[Path::new(file)]).unwrap();
        assert_eq!(made("tokenizer_config.json")["chat_template"], "{{ messages }}");
        assert_eq!(made("generation_config.json")["eos_token_id"], *model.config.get("eos_token_id").unwrap(), "{name}");
    }
}

#[test]
fn vocabularies_are_written_as_they_were_read() {
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    for (name, ids) in expected["tokens"].as_object().unwrap() {
        let input = golden(&format!("gguf/tokenizer-{name}.gguf"));
        let (folder, found, _) = written(Model::open(&input).unwrap(), FileType::F16);
        assert_eq!(tokens(&found, &expected["texts"]), *ids, "{name}");
        let [theirs, ours] = [input, folder.path().join("out/model.gguf")].map(|path| gguf::GgufFile::open(&path).unwrap().values);
        let pieces = ["scores", "add_space_prefix", "add_bos_token", "add_eos_token"];
        for (key, value) in theirs.iter().filter(|(key, _)| !pieces.iter().any(|end| key.ends_with(end))) {
            let other = ["general.file_type", "general.name"].contains(&key.as_str());
            assert!(other || ours.get(key) == Some(value), "{name}: {key}");
        }
    }
}

#[test]
fn vocabularies_of_pieces_have_defaults_and_need_scores() {
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    let named = ["bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"];
    let (_folder, model) = rewritten("tokenizer-pieces", |values, _| values.retain(|key, _| !named.iter().any(|end| key.ends_with(end))));
    let model = model.unwrap();
    assert_eq!(tokens(&model, &expected["texts"]), expected["tokens"]["pieces"]);
    assert_eq!((&model.config.get("bos_token_id").unwrap(), &model.config.get("eos_token_id").unwrap()), (&&1.into(), &&2.into()));
    let (_folder, model) = rewritten("tokenizer-pieces", |values, _| match values.get_mut("tokenizer.ggml.scores") {
        Some(gguf::Value::Floats(scores)) => scores.fill(-1000.0),
        _ => panic!("no scores"),
    });
    let model = model.unwrap();
    assert!(!model.auxiliary.synthesized.contains_key(Path::new("tokenizer.json")));
    assert!(model.auxiliary.in_weight_files.iter().any(|note| note.contains("its scores are all equal (-1000)")), "{:?}", model.auxiliary.in_weight_files);
    let long = "x".repeat(600);
    let (_folder, model) = rewritten("tokenizer-pieces", |values, _| match values.get_mut("tokenizer.ggml.tokens") {
        Some(gguf::Value::Texts(tokens)) => tokens[300].clone_from(&long),
        _ => panic!("no tokens"),
    });
    assert!(model.unwrap().auxiliary.in_weight_files.iter().any(|note| note.contains("a token of 600 bytes")));
}

/// Rows without columns need no bytes, so a small file can declare any number of them.
#[test]
fn an_embedding_without_columns_is_rejected() {
    let (folder, model) = rewritten("llama", |values, tensors| {
        values.retain(|key, _| !key.starts_with("tokenizer."));
        tensors.insert("token_embd.weight".into(), Computed { values: || Ok(Vec::new()) }.weight(vec![1 << 45, 0]));
    });
    let error = export(model.unwrap(), folder.path(), FileType::F32).unwrap_err();
    assert!(error.to_string().contains("the token embedding is missing"), "{error}");
}

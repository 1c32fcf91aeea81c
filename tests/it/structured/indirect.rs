//! Sizes and types of layers that `config.json` specifies by other keys than the usual ones.

use compress::pass::PrunedPart;
use compress::{Model, Pipeline};
use serde_json::{Map, Value, json};

use super::{golden, half, outputs};

/// Pruning writes the usual keys, so that the configuration describes the result.
#[test]
fn indirect_settings_are_read_and_rewritten() {
    // 28 neurons, derived from `block_ff_dim`, of which half are removed.
    let lfm2 = json!({ "full_attn_idxs": [1], "block_ff_dim": 32, "tie_embedding": true });
    let qwen = json!({ "full_attention_interval": 2 });
    for (name, missing, added, sizes) in [
        ("lfm2", vec!["layer_types", "intermediate_size", "tie_word_embeddings"], lfm2, vec![("block_ff_dim", 14), ("intermediate_size", 14)]),
        ("qwen3_5", vec!["layer_types"], qwen, vec![("intermediate_size", 12)]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in");
        std::fs::create_dir(&input).unwrap();
        std::fs::copy(golden(name).join("model.safetensors"), input.join("model.safetensors")).unwrap();
        let mut config: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(golden(name).join("config.json")).unwrap()).unwrap();
        config.retain(|key, _| !missing.contains(&key.as_str()));
        config.extend(added.as_object().unwrap().clone());
        std::fs::write(input.join("config.json"), Value::Object(config).to_string()).unwrap();
        let original = Model::open(golden(name)).unwrap();
        let same = Model::open(&input).unwrap().graph().unwrap().to_string() == original.graph().unwrap().to_string();
        assert!(same, "{name}: the graphs differ");
        for part in [PrunedPart::Mlp, PrunedPart::Layers] {
            let out = folder.path().join(format!("{part:?}"));
            let report = Pipeline::builder().pass(half(&[part])).build().unwrap().run(Model::open(&input).unwrap(), &out).unwrap();
            assert!(!out.join("graph.json").exists(), "{name} {part:?}: {:?}", report.notes);
            let written = Model::open(&out).unwrap();
            if part == PrunedPart::Mlp {
                for (key, size) in &sizes {
                    assert_eq!(written.config.get(key), Some(&json!(size)), "{name}: {key}");
                }
            } else {
                let types = written.config.get("layer_types").and_then(Value::as_array).unwrap().len();
                assert_eq!(written.config.get("num_hidden_layers"), Some(&json!(types)), "{name}");
                assert!(types < 3, "{name}: {types}");
            }
            outputs(&written, &original);
        }
    }
}

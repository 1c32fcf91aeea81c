//! The recipes in `configs/` and the library example, on a small model.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compress::Error;
use compress::pipeline::{Pipeline, verify};
use compress::recipe::Recipe;
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::model::Model;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

#[allow(dead_code)]
#[path = "../../examples/prune_and_quantize.rs"]
mod prune_and_quantize;

const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 256;
const VOCABULARY: usize = 64;

/// A Llama of one layer, in float32.
fn pico(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    std::fs::create_dir(&model).unwrap();
    let shapes = [
        ("model.embed_tokens.weight", vec![VOCABULARY, HIDDEN]),
        ("model.layers.0.input_layernorm.weight", vec![HIDDEN]),
        ("model.layers.0.self_attn.q_proj.weight", vec![HIDDEN, HIDDEN]),
        ("model.layers.0.self_attn.k_proj.weight", vec![HIDDEN, HIDDEN]),
        ("model.layers.0.self_attn.v_proj.weight", vec![HIDDEN, HIDDEN]),
        ("model.layers.0.self_attn.o_proj.weight", vec![HIDDEN, HIDDEN]),
        ("model.layers.0.post_attention_layernorm.weight", vec![HIDDEN]),
        ("model.layers.0.mlp.gate_proj.weight", vec![INTERMEDIATE, HIDDEN]),
        ("model.layers.0.mlp.up_proj.weight", vec![INTERMEDIATE, HIDDEN]),
        ("model.layers.0.mlp.down_proj.weight", vec![HIDDEN, INTERMEDIATE]),
        ("model.norm.weight", vec![HIDDEN]),
        ("lm_head.weight", vec![VOCABULARY, HIDDEN]),
    ];
    let mut state = 1u32;
    let mut value = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    let data: Vec<Vec<u8>> = shapes.iter().map(|(_, shape)| (0..shape.iter().product()).flat_map(|_| value().to_le_bytes()).collect()).collect();
    let tensors = shapes.iter().zip(&data).map(|((name, shape), data)| (*name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), &model.join("model.safetensors")).unwrap();
    let config = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "tie_word_embeddings": false,
            "hidden_size": {HIDDEN}, "intermediate_size": {INTERMEDIATE}, "vocab_size": {VOCABULARY}, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5}}"#
    );
    std::fs::write(model.join("config.json"), config).unwrap();
    model
}

/// Token ids as arrays.
#[cfg(feature = "run")]
fn samples(folder: &Path) -> PathBuf {
    let path = folder.join("samples.safetensors");
    let ids: Vec<i64> = (0..48).map(|i| i * 7 % VOCABULARY as i64).collect();
    let data = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let (ids, mask) = (data(&ids), data(&[1; 48]));
    let tensors = [("input_ids", &ids), ("attention_mask", &mask)].map(|(name, data)| (name, TensorView::new(Dtype::I64, vec![4, 12], data).unwrap()));
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    path
}

/// Adds a tokenizer to a model, and returns a text for it.
#[cfg(feature = "run")]
fn add_tokenizer(model: &Path) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation");
    std::fs::copy(golden.join("characters.json"), model.join("tokenizer.json")).unwrap();
    golden.join("book.txt")
}

fn configs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

fn holds(folder: &Path) -> bool {
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    verify(folder, &work).unwrap().iter().all(|check| check.ok)
}

#[test]
fn every_config_runs_and_sparse_int8_is_the_smallest() {
    let folder = tempfile::tempdir().unwrap();
    let model = pico(folder.path());
    let set = [("model".to_owned(), model.display().to_string())];
    let mut ratios = Vec::new();
    for path in configs() {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("# "), "{name} has no comment on its purpose");
        assert!(Recipe::open(&path, &[]).unwrap().model.ends_with("../model"), "{name}");
        #[allow(unused_mut)]
        let mut recipe = Recipe::open(&path, &set).unwrap();
        #[cfg(feature = "run")]
        for data in [&mut recipe.data.calibration, &mut recipe.data.train].into_iter().flatten() {
            *data = compress_engine::data::Data { arrays: Some(samples(folder.path())), ..Default::default() };
        }
        #[cfg(feature = "run")]
        for step in &mut recipe.passes {
            if let compress::pass::Step::Distill(pass) = step {
                pass.training.max_steps = Some(2);
                // Only sentence encoders compute one vector per sample.
                pass.training.losses.embedding = None;
            }
            if let compress::pass::Step::Finetune(pass) = step {
                pass.training.max_steps = Some(2);
                pass.training.losses.contrastive = None;
                // The arrays have no labels.
                recipe.data.train.iter_mut().for_each(|data| data.task = Some(compress_engine::data::Task::LanguageModelling));
            }
        }
        assert_eq!((&recipe.model, &recipe.output), (&model, &None), "{name}");
        let output = folder.path().join(&name);
        #[cfg(feature = "run")]
        for step in &mut recipe.passes {
            if let compress::pass::Step::PruneVocabulary(pass) = step {
                pass.keep = vec![add_tokenizer(&model)];
            }
        }
        let pipeline = Pipeline::builder().recipe(&recipe).build().unwrap();
        let report = pipeline.run(Model::open(&recipe.model).unwrap(), &output).unwrap();
        let least = |pass: &str| match (name.as_str(), pass) {
            // Only two weights have a row for each token.
            (_, "prune-vocabulary") => 2,
            // Three weights have a row or a column for each neuron.
            ("recover-llm", "prune-structured") => 3,
            _ => 7,
        };
        assert!(report.passes.iter().all(|pass| pass.tensors_changed >= least(&pass.name)), "{name}");
        let _ = std::fs::remove_file(model.join("tokenizer.json"));
        assert!(holds(&output), "{name}");
        ratios.push((report.size.ratio, name));
    }
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert_eq!(ratios.len(), 25);
    ratios.retain(|(_, name)| {
        !["w4a16", "qat-nvfp4", "palettes", "gguf", "onnx-decoder-int8", "prune-vocabulary", "search-structure", "recover-llm", "sentence-contrastive"]
            .contains(&name.as_str())
    });
    // Only configurations that also reduce the model before int8 quantization result in a smaller size.
    assert_eq!([ratios[15].1.as_str(), ratios[14].1.as_str()], ["prune-distill-int8", "sparse-int8"], "{ratios:?}");
}

#[test]
fn the_library_example_shrinks_a_model_and_can_be_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let model = pico(folder.path());
    let output = folder.path().join("out");
    let cancel = Cancel::default();
    cancel.cancel();
    assert!(matches!(prune_and_quantize::shrink(&model, &output, cancel), Err(Error::Cancelled)));
    assert!(!output.exists());
    let report = prune_and_quantize::shrink(&model, &output, Cancel::default()).unwrap();
    assert!(report.size.ratio > 2.5 && holds(&output));
}

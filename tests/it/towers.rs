//! Vision towers of multimodal models: sizes of images, windows, and passes that run them on pictures.
#![cfg(feature = "run")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::Model;
use compress::pass::{Method, Quantize, Scheme};
use compress_engine::data::Data;
use compress_engine::model::Config;
use serde_json::{Value, json};

use crate::common::{pipeline, read};
use crate::evaluation::{batches, model};

const QWEN2: &str = "qwen2-vl-vision";
const QWEN2_5: &str = "qwen2_5-vl-vision";
const QWEN3: &str = "qwen3-vl-vision";

/// A golden model with other values in `config.json`.
fn changed(name: &str, values: &Value) -> Model {
    let mut model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap();
    let mut config = model.config.values().clone();
    config.extend(values.as_object().unwrap().clone());
    model.config = Config::from_values(config);
    model
}

#[test]
fn images_have_the_size_in_the_configuration() {
    let graph = |size: Value| changed(QWEN2, &json!({ "image_size": size })).graph().unwrap().to_string();
    assert_eq!(graph(json!(12)), graph(json!([12, 12])));
    assert_ne!(graph(json!([8, 12])), graph(json!([12, 8])));
    let default = graph(Value::Null);
    assert!(default.contains("float[batch, 3, 224, 224]") && default.contains("image_embeds"), "{}", default.lines().next().unwrap());
    for (name, values, reason) in [
        (QWEN2, json!({ "image_size": [8, 10] }), "`image_size` 10 is not a multiple of 4, which is `patch_size` times `spatial_merge_size`"),
        (QWEN2, json!({ "image_size": [8, 12, 12] }), "`image_size` has 3 numbers, expected a height and a width"),
        (QWEN2, json!({ "image_size": 0 }), "`image_size` is 0"),
        (QWEN2, json!({ "temporal_patch_size": 65 }), "`temporal_patch_size` is 65, expected at most 64"),
        (QWEN2, json!({ "rope_parameters": { "rope_type": "yarn" } }), "rope type `yarn`"),
        (QWEN2, json!({ "head_dim": 4 }), "`head_dim`"),
        (QWEN2_5, json!({ "image_size": [16, 20] }), "`image_size` is not a multiple of 8 pixels, the side of a window"),
        (QWEN3, json!({ "num_position_embeddings": 24 }), "`num_position_embeddings` is 24, expected the square of an integer"),
        (QWEN3, json!({ "image_size": [8, 10] }), "`image_size` 10 is not a multiple of 4"),
        (QWEN2_5, json!({ "window_size": 3 }), "`window_size` 3 is smaller than 4 pixels of merged patches"),
    ] {
        let error = changed(name, &values).graph().err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(reason), "{values}: {error}");
    }
}

/// As in transformers, the outer pixels of an image whose size is not a multiple of the patches are not read.
#[test]
fn incomplete_patches_are_not_read() {
    let outputs = |name: &str, side: usize| {
        let model = changed(name, &json!({ "image_size": side }));
        let pixel = |i: usize| (i % side * 3 + i / side % side * 5 + i / side / side * 7) % 11;
        let pixels = Tensor::from_iter((0..3 * side * side).map(|i| pixel(i) as f32 / 11.0), &Device::Cpu).unwrap();
        crate::common::outputs(&model, &BTreeMap::from([("pixel_values".to_owned(), pixels.reshape((1, 3, side, side)).unwrap())]))
    };
    for name in ["vit-image-classification", "dinov2", "siglip-vision", "clip-vision"] {
        let expected = outputs(name, 12);
        for side in [13, 15] {
            for (output, found) in outputs(name, side) {
                let [found, expected] = [&found, &expected[&output]].map(|values| values.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                assert_eq!(found, expected, "{name}, {output} of {side} pixels");
            }
        }
    }
    for (name, side, reason) in [("vit", 3, "`image_size` 3 is less than `patch_size` 4"), ("swin", 35, "would be padded to a multiple of `patch_size`")] {
        let error = changed(name, &json!({ "image_size": side })).graph().err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(reason), "{name}: {error}");
    }
}

/// The features of merged patches by a tower of Qwen2.5-VL with windows of 8 x 8 pixels, for a square image.
fn features(side: usize, full: &[usize], pixels: &dyn Fn(usize, usize) -> f32) -> Vec<Vec<f32>> {
    let model = changed(QWEN2_5, &json!({ "image_size": side, "window_size": 8, "fullatt_block_indexes": full }));
    let pixels = (0..3 * side * side).map(|i| pixels(i / side % side, i % side) * (i % 7) as f32).collect();
    let pixels = Tensor::from_vec(pixels, (1, 3, side, side), &Device::Cpu).unwrap();
    let outputs = crate::common::outputs(&model, &BTreeMap::from([("pixel_values".to_owned(), pixels)]));
    outputs["image_embeds"].get(0).unwrap().to_vec2().unwrap()
}

#[test]
fn patches_attend_only_to_their_window() {
    let plain = |row: usize, column: usize| ((row * 5 + column * 3) % 11) as f32 / 11.0;
    // Four windows of four merged patches each.
    let of_window = |token: usize| token / 4 >= 2 && token % 4 < 2;
    let other = |row: usize, column: usize| if row >= 8 && column < 8 { -0.3 } else { plain(row, column) };
    for (full, depends) in [(&[][..], &of_window as &dyn Fn(usize) -> bool), (&[1], &|_| true)] {
        let (before, after) = (features(16, full, &plain), features(16, full, &other));
        assert_eq!(before.len(), 16);
        for (token, (before, after)) in before.iter().zip(&after).enumerate() {
            assert_eq!(before != after, depends(token), "token {token} with full attention in {full:?}");
        }
    }
    // A window that covers the image.
    assert_eq!(features(8, &[], &plain), features(8, &[0, 1], &plain));
}

/// Pictures of other sizes are resized to that of the input, and calibrate a pass.
#[test]
fn a_tower_is_calibrated_with_pictures() {
    for name in [QWEN2, QWEN2_5, QWEN3] {
        let folder = model(name, &[]);
        let processor = json!({ "image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5], "image_std": [0.5], "min_pixels": 16, "max_pixels": 900, "patch_size": 2 });
        fs::write(folder.path().join("preprocessor_config.json"), processor.to_string()).unwrap();
        let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/images");
        let data = Data { images: Some(images), batch_size: Some(4), ..Data::default() };
        let size: Vec<usize> = serde_json::from_value(Model::open(folder.path()).unwrap().config.get("image_size").unwrap().clone()).unwrap();
        let found = batches(folder.path(), &data).unwrap();
        assert_eq!(found[0].inputs["pixel_values"].dims(), [4, 3, size[0], size[1]]);
        let pass = Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, ..Quantize::default() };
        let written = tempfile::tempdir().unwrap();
        let output = written.path().join("out");
        let run = pipeline().calibration(data).pass(pass).build().unwrap();
        run.run(Model::open(folder.path()).unwrap(), &output).unwrap();
        let names: Vec<String> = read(&output.join("model.safetensors")).into_keys().filter(|tensor| tensor.ends_with("weight_packed")).collect();
        let automatic = "import AutoModel, AutoImageProcessor\n";
        // Qwen3-VL merges the patches of two layers in addition to those of the last one.
        let (layers, merged, import) = match name {
            QWEN2 => (4, "mlp.2", "import Qwen2VisionTransformerPretrainedModel\n"),
            QWEN2_5 => (5, "mlp.2", automatic),
            _ => (4 + 2, "linear_fc2", automatic),
        };
        let card = fs::read_to_string(output.join("README.md")).unwrap();
        assert!(card.contains(import), "{card}");
        assert!(card.contains("\nprocessor = AutoImageProcessor.from_pretrained(\"path/to/model\")\n"), "{card}");
        assert_eq!(names.len(), 2 * layers + 2, "{names:?}");
        assert!(names.contains(&"blocks.0.attn.qkv.weight_packed".to_owned()) && names.contains(&format!("merger.{merged}.weight_packed")));
    }
}

//! `compress auto` without calibration samples.

use serde_json::{Value, json};

use super::{BYTE_LEVEL, prepared, recipe};
use crate::cli::support::{compress, data, ok, read_json};

/// The losses of the options of a unit.
fn losses(unit: &Value) -> Vec<f64> {
    unit["options"].as_array().unwrap().iter().filter_map(|option| option["loss"].as_f64()).collect()
}

/// The errors of the weights order the formats, nothing is measured, and the report states this.
#[test]
fn errors_of_the_weights_replace_samples() {
    let folder = prepared();
    let folder = folder.path();
    std::fs::write(folder.join("llama/tokenizer.json"), BYTE_LEVEL).unwrap();
    let found = data(folder, "auto llama --for transformers --front front.json --json")["search"].clone();
    assert_eq!((&found["loss"], &found["measured_on"]), (&json!("weight-error"), &Value::Null));
    for unit in found["units"].as_array().unwrap() {
        // More bits have less error, and floats have none.
        let losses = losses(unit);
        assert!(losses[0] > 0.01 && losses.last() == Some(&0.0), "{unit}");
        assert!(losses[0] > 4.0 * losses[2] && losses[2] > 10.0 * losses[losses.len() - 2], "{unit}");
    }
    let points = found["points"].as_array().unwrap();
    assert!(points.len() > 4 && points.iter().all(|point| point["measured"].is_null() && point["predicted"].as_f64() > Some(0.0)), "{points:?}");
    for (name, arguments) in [("out", "-o out --max-size 5bits"), ("small.gguf", "-o small.gguf --max-size 6bits")] {
        let found = data(folder, &format!("auto llama {arguments} --json"))["search"].clone();
        assert!(found["chosen"]["predicted"].as_f64() > Some(0.0) && found["units"].as_array().unwrap().iter().all(|unit| losses(unit)[0] > 0.0), "{found}");
        ok(folder, &format!("verify {name}"));
    }
    assert_eq!(recipe(folder, "out")[0]["quantize"]["method"], "rtn");
    // The export rounds to nearest too.
    assert!(recipe(folder, "small.gguf.report").as_array().is_none_or(Vec::is_empty));
    ok(folder, "run out/recipe.yaml -o again");
    let weights = |name: &str| std::fs::read(folder.join(name).join("model.safetensors")).unwrap();
    assert!(weights("out") == weights("again"));
    assert_eq!(read_json(&folder.join("out/report.json"))["search"]["loss"], "weight-error");
    let page = std::fs::read_to_string(folder.join("out/report.html")).unwrap();
    assert!(page.contains("Size and weight error") && page.contains("Without calibration samples"), "{page}");
    // The runtime is that of the format of the file.
    assert_eq!(read_json(&folder.join("small.gguf.report/report.json"))["search"]["runtime"], "llama.cpp");
    let run = compress(folder, "auto llama --front table.json");
    assert!(run.code == 0 && run.stdout.contains("Without calibration samples, losses are the squared errors of the weights"), "{}{}", run.stdout, run.stderr);
}

/// ONNX files have the formats that need no scales of activations.
#[test]
fn onnx_files_without_samples_have_no_static_layers() {
    let folder = prepared();
    let folder = folder.path();
    let found = data(folder, "auto llama -o small.onnx --max-size 75% --json")["search"].clone();
    assert_eq!((&found["loss"], &found["formats"][1]), (&json!("weight-error"), &json!("int8-static")));
    let units = found["units"].as_array().unwrap();
    assert!(units.iter().all(|unit| unit["options"][1].is_null()), "{units:?}");
    assert!(units.iter().any(|unit| unit["options"][2]["loss"].as_f64() > unit["options"][4]["loss"].as_f64()), "{units:?}");
    assert_eq!(found["chosen"]["bytes"].as_u64(), Some(std::fs::metadata(folder.join("small.onnx")).unwrap().len()));
    ok(folder, "verify small.onnx");
}

#[test]
fn limits_that_samples_measure_need_them() {
    let folder = prepared();
    let folder = folder.path();
    for (arguments, part) in [
        ("-o out --max-kl 0.1", "--max-kl: needs `--calibration`"),
        ("-o out --max-loss 1%", "--max-loss: needs `--calibration`"),
        ("-o out --for onnxruntime --latency 5ms", "--latency: needs `--calibration`"),
        ("-o out --max-size 5bits --time 10m", "--time: needs `--calibration`"),
        ("-o out --max-size 5bits --method gptq", "--method: needs `--calibration`"),
        ("-o out --max-size 5bits --eval held-out.safetensors", "--eval: needs `--calibration`"),
        ("-o out --max-size 1bits", "the nearest possible limit is"),
        ("--for transformers --front same.json --checkpoint ./same.json", "--checkpoint: is also the file of `--front`"),
    ] {
        let run = compress(folder, &format!("auto llama {arguments}"));
        assert!(run.code > 0 && run.stderr.contains(part) && !folder.join("out").exists(), "{arguments}: {}", run.stderr);
    }
}

/// Formats are chosen for floats: the error names the input and the next step, which works.
#[test]
fn quantized_models_are_dequantized_first() {
    let folder = prepared();
    let folder = folder.path();
    ok(folder, "quantize llama -o quantized --scheme W8A8");
    for target in ["vllm", "transformers", "onnxruntime", "llama.cpp"] {
        let output = match target {
            "onnxruntime" => "out.onnx",
            "llama.cpp" => "out.gguf",
            _ => "out",
        };
        let run = compress(folder, &format!("auto quantized -o {output} --for {target} --max-size 90%"));
        assert!(run.code > 0 && !folder.join(output).exists(), "{target}: {}", run.stderr);
        for part in ["the input quantized is already quantized", "down_proj.weight` is int8 channel", "run `compress dequantize`"] {
            assert!(run.stderr.contains(part), "{target}: {}", run.stderr);
        }
    }
    ok(folder, "dequantize quantized -o floats");
    ok(folder, "auto floats --for transformers --front front.json");
}

/// Weights beyond the range of 16-bit floats do not have this option.
#[test]
fn large_weights_are_not_stored_in_16_bits() {
    let folder = prepared();
    let folder = folder.path();
    let path = folder.join("llama/model.safetensors");
    let mut weights = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    let large = (weights[name].to_dtype(candle_core::DType::F32).unwrap() * 1e8).unwrap();
    weights.insert(name.to_owned(), large);
    candle_core::safetensors::save(&weights, &path).unwrap();
    let found = data(folder, "auto llama --for onnxruntime --front front.json --json")["search"].clone();
    for unit in found["units"].as_array().unwrap() {
        assert_eq!(unit["options"][4].is_null(), unit["name"] == name, "{unit}");
    }
}

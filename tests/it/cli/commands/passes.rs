//! Each pass as a command, with each of its options, and the options of writing.

use std::path::Path;

use serde_json::{Value, json};

use crate::cli::support::{METADATA, Run, command, compress, data, f32s, file, floats, golden_model, model, model_of, names, ok, read_json};

const QUERY: &str = "encoder.layer.0.attention.self.query.weight";
const DENSE: &str = "encoder.layer.1.output.dense.weight";
const TABLE: &str = "embeddings.word_embeddings.weight";

/// Runs a command on the small model. The report must contain the options, and weights must have the
/// specified encodings and numbers of zeros.
fn check(args: &str, options: &Value, weights: &[(&str, &str, Option<u64>)]) {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    let report = data(folder.path(), &format!("{args} --json"));
    for (key, value) in options.as_object().unwrap() {
        assert_eq!(&report["passes"][0]["options"][key], value, "{args}: option {key}");
    }
    for (name, encoding, zeros) in weights {
        let layer = report["layers"].as_array().unwrap().iter().find(|layer| layer["name"] == *name).unwrap();
        assert_eq!(layer["encoding"], *encoding, "{args}: {name}");
        assert!(zeros.is_none_or(|zeros| layer["zeros"] == zeros), "{args}: {name} has {} zeros", layer["zeros"]);
    }
    ok(folder.path(), "verify out");
}

#[test]
fn prune_unstructured() {
    check(
        "prune-unstructured in -o out",
        &json!({ "amount": 0.5, "scope": "tensor" }),
        &[(QUERY, "f32", Some(128)), (DENSE, "f32", Some(512)), (TABLE, "f32", Some(0))],
    );
    check("prune-unstructured in -o out --amount 0.25", &json!({ "amount": 0.25 }), &[(QUERY, "f32", Some(64)), (DENSE, "f32", Some(256))]);
    check("prune-unstructured in -o out --amount 25%", &json!({ "amount": 0.25 }), &[(QUERY, "f32", Some(64)), (DENSE, "f32", Some(256))]);
    check("prune-unstructured in -o out --amount 110", &json!({ "amount": 110 }), &[(QUERY, "f32", Some(110)), (DENSE, "f32", Some(110))]);
    check("prune-unstructured in -o out --amount 1.0 --targets *.weight", &json!({ "amount": 1.0 }), &[(QUERY, "f32", Some(256)), (DENSE, "f32", Some(1024))]);
    check("prune-unstructured in -o out --pattern 2:4", &json!({ "pattern": "2:4", "amount": null }), &[(QUERY, "f32", Some(128)), (DENSE, "f32", Some(512))]);
    check(
        "prune-unstructured in -o out --targets *embeddings* --targets *.1.output*",
        &json!({ "targets": ["*embeddings*", "*.1.output*"] }),
        &[(QUERY, "f32", Some(0)), (DENSE, "f32", Some(512)), (TABLE, "f32", Some(256))],
    );
    check("prune-unstructured in -o out --ignore re:.*query", &json!({ "ignore": ["re:.*query"] }), &[(QUERY, "f32", Some(0)), (DENSE, "f32", Some(512))]);
    check(
        "prune-unstructured in -o out --rule *query.weight=0.75 --rule *.1.output*=101",
        &json!({ "rules": [{ "targets": ["*query.weight"], "amount": 0.75 }, { "targets": ["*.1.output*"], "amount": 101 }] }),
        &[(QUERY, "f32", Some(192)), (DENSE, "f32", Some(101)), ("encoder.layer.0.output.dense.weight", "f32", Some(512))],
    );
}

#[test]
fn prune_unstructured_globally() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    let report = data(folder.path(), "prune-unstructured in -o out --scope global --amount 1000 --json");
    assert_eq!(report["passes"][0]["options"]["scope"], "global");
    assert_eq!(report["passes"][0]["details"], json!({ "zeroed": 1000, "of": 2560 }));
    let zeros: Vec<u64> = report["layers"].as_array().unwrap().iter().map(|layer| layer["zeros"].as_u64().unwrap()).collect();
    assert_eq!(zeros.iter().sum::<u64>(), 1000);
}

#[test]
fn quantize_dynamic() {
    let int8 = |encoding| [(QUERY, encoding, None), (DENSE, encoding, None)];
    check(
        "quantize-dynamic in -o out",
        &json!({ "granularity": "channel", "symmetric": true, "activations": "token", "observer": "minmax" }),
        &int8("int8 channel"),
    );
    check("quantize-dynamic in -o out --granularity tensor", &json!({ "granularity": "tensor" }), &int8("int8 tensor"));
    check("quantize-dynamic in -o out --granularity group --group-size 8", &json!({ "group_size": 8 }), &int8("int8 group 8"));
    check("quantize-dynamic in -o out --symmetric false", &json!({ "symmetric": false }), &int8("int8 channel asymmetric"));
    check("quantize-dynamic in -o out --activations none", &json!({ "activations": "none" }), &int8("int8 channel packed"));
    check("quantize-dynamic in -o out --observer mse", &json!({ "observer": "mse" }), &int8("int8 channel"));
    check("quantize-dynamic in -o out", &json!({ "embeddings": false }), &[(TABLE, "f32", Some(0))]);
    check("quantize-dynamic in -o out --embeddings", &json!({ "embeddings": true }), &[(QUERY, "int8 channel", None), (TABLE, "int8 channel", None)]);
    check(
        "quantize-dynamic in -o out --targets *query.weight",
        &json!({ "targets": ["*query.weight"] }),
        &[(QUERY, "int8 channel", None), (DENSE, "f32", Some(0))],
    );
    check(
        "quantize-dynamic in -o out --ignore *query.weight",
        &json!({ "ignore": ["*query.weight"] }),
        &[(QUERY, "f32", Some(0)), (DENSE, "int8 channel", None)],
    );
}

#[test]
fn quantize() {
    let all = |encoding| [(QUERY, encoding, None), (DENSE, encoding, None)];
    check(
        "quantize in -o out",
        &json!({ "scheme": "W4A16", "method": "rtn", "group_size": 128, "observer": "l4" }),
        &[(QUERY, "int4 channel packed", None), (DENSE, "int4 group 64 packed", None)],
    );
    check("quantize in -o out --group-size 8", &json!({ "group_size": 8 }), &all("int4 group 8 packed"));
    check("quantize in -o out --scheme w4a16_asym --group-size 8", &json!({ "scheme": "W4A16-ASYM" }), &all("int4 group 8 asymmetric packed"));
    check("quantize in -o out --scheme W8A16 --group-size 16", &json!({ "observer": "minmax" }), &all("int8 group 16 packed"));
    check("quantize in -o out --scheme W8A8", &json!({ "scheme": "W8A8" }), &all("int8 channel"));
    let fp8 = [(QUERY, "fp8 channel", None), (DENSE, "fp8 channel", None)];
    check("quantize in -o out --scheme fp8-dynamic", &json!({ "scheme": "FP8-DYNAMIC", "observer": "minmax" }), &fp8);
    check("quantize in -o out --scheme FP8_BLOCK", &json!({ "scheme": "FP8-BLOCK" }), &fp8);
    check("quantize in -o out --scheme NVFP4A16", &json!({ "scheme": "NVFP4A16" }), &all("fp4 group 16 packed"));
    check("quantize in -o out --scheme MXFP4", &json!({ "scheme": "MXFP4" }), &[(QUERY, "f32", Some(0)), (DENSE, "fp4 group 32 packed", None)]);
    check("quantize in -o out --observer minmax", &json!({ "observer": "minmax" }), &[(TABLE, "f32", Some(0))]);
    check("quantize in -o out --targets *query.weight", &json!({ "targets": ["*query.weight"] }), &[(DENSE, "f32", Some(0))]);
    check("quantize in -o out --ignore *query.weight", &json!({ "ignore": ["*query.weight"] }), &[(QUERY, "f32", Some(0))]);
}

#[test]
fn cast() {
    check("cast in -o out", &json!({ "to": "bf16", "overflow": "error" }), &[(QUERY, "bf16", Some(0)), (TABLE, "bf16", Some(0))]);
    check("cast in -o out --to f16", &json!({ "to": "f16" }), &[(QUERY, "f16", Some(0))]);
    check("cast in -o out --to f32", &json!({ "to": "f32" }), &[(QUERY, "f32", Some(0))]);
    check("cast in -o out --targets *dense*", &json!({ "targets": ["*dense*"] }), &[(QUERY, "f32", Some(0)), (DENSE, "bf16", Some(0))]);
    check("cast in -o out --ignore *dense*", &json!({ "ignore": ["*dense*"] }), &[(QUERY, "bf16", Some(0)), (DENSE, "f32", Some(0))]);
    let folder = tempfile::tempdir().unwrap();
    file(&folder.path().join("in"), METADATA, &[f32s("x", &[3], &[70000.0, -70000.0, 1.0])]);
    let options = data(folder.path(), "cast in -o out --to f16 --overflow saturate --json")["passes"][0]["options"].clone();
    assert_eq!(options["overflow"], "saturate");
    assert_eq!(data(folder.path(), "diff in out --json")["weights"][0]["max_abs_error"], 70000.0 - 65504.0);
}

#[test]
fn layouts() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    let encoding = |args: &str| {
        let report = data(folder.path(), args);
        ok(folder.path(), "verify out");
        report["layers"].as_array().unwrap().iter().find(|layer| layer["name"] == QUERY).unwrap()["encoding"].as_str().unwrap().to_owned()
    };
    assert_eq!(encoding("quantize-dynamic in -o out --force --json --layout auto"), "int8 channel");
    assert_eq!(encoding("quantize-dynamic in -o out --force --json --layout compressed-tensors"), "int8 channel");
    assert_eq!(encoding("quantize-dynamic in -o out --force --json --layout dense"), "f32");
    assert_eq!(encoding("prune-unstructured in -o out --force --json --amount 0.9 --layout sparse"), "f32 sparse");
    assert_eq!(encoding("chain in -o out --force --json --layout sparse -- prune-unstructured --amount 0.9 -- quantize-dynamic"), "int8 channel sparse");
}

#[test]
fn shards() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    ok(folder.path(), "cast in -o out --to f32 --shard-size 6KB");
    let shards: Vec<String> = names(&folder.path().join("out")).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert_eq!(shards, ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]);
    let index = read_json(&folder.path().join("out/model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], 4 * 3104);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 7);
    ok(folder.path(), "verify out");
    let equal = |a: &str, b: &str| data(folder.path(), &format!("diff {a} {b} --json"))["weights"].as_array().unwrap().iter().all(|w| w["equal"] == true);
    assert!(equal("in", "out"));
    ok(folder.path(), "densify out -o whole");
    assert!(equal("in", "whole") && folder.path().join("whole/model.safetensors").exists());
    let hash = |out: &str| read_json(&folder.path().join(out).join("report.json"))["model"]["blake3"].clone();
    assert_eq!(hash("out"), hash("whole"));
}

#[test]
fn non_finite_values_are_preserved_if_allowed() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder.path().join("in"), METADATA, &[f32s("x.weight", &[2, 2], &[1.0, f32::NAN, 0.5, f32::INFINITY]), floats("y.weight", &[4, 4])]);
    for args in ["cast in --to f16", "prune-unstructured in", "quantize-dynamic in --observer mse", "densify in"] {
        ok(folder.path(), &format!("{args} -o out --force --allow-nonfinite"));
        ok(folder.path(), "verify out");
    }
    std::fs::write(folder.path().join("recipe.yaml"), "model: in\nallow_nonfinite: true\npasses: [cast]\n").unwrap();
    ok(folder.path(), "run recipe.yaml -o out --force");
}

#[test]
fn unusual_tensors_are_preserved() {
    let folder = tempfile::tempdir().unwrap();
    let odd = |name: &str, dtype, shape: &[usize], bytes: usize| crate::cli::support::tensor(name, dtype, shape, &vec![1; bytes]);
    let tensors = [
        odd("bool", "BOOL", &[3], 3),
        odd("half a byte", "F4", &[3, 2], 3),
        odd("eight bits", "F8_E4M3", &[5], 5),
        odd("complex", "C64", &[1], 8),
        odd("scalar", "I64", &[], 8),
        odd("", "U16", &[1], 2),
        odd("empty", "F32", &[0, 3], 0),
        odd("empty and large", "F32", &[0, 1 << 40, 1 << 40], 0),
        floats("x.weight", &[4, 8]),
    ];
    model_of(&folder.path().join("in"), &json!({ "quantization_config": null }), &tensors);
    for args in ["cast in", "prune-unstructured in", "quantize-dynamic in", "densify in", "prune-unstructured in --layout sparse", "cast in --shard-size 1B"] {
        ok(folder.path(), &format!("{args} -o out --force"));
        ok(folder.path(), "verify out");
        let weights = data(folder.path(), "diff in out --json")["weights"].clone();
        let changed: Vec<&str> = weights.as_array().unwrap().iter().filter(|w| w["equal"] == false).map(|w| w["name"].as_str().unwrap()).collect();
        let expected: &[&str] = if args == "densify in" { &[] } else { &["x.weight"] };
        assert_eq!(changed, expected, "{args}");
    }
    file(&folder.path().join("none"), METADATA, &[]);
    ok(folder.path(), "densify none -o nothing");
    ok(folder.path(), "verify nothing");
}

#[test]
fn zeros_stay_zeros() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder.path().join("in"), METADATA, &[f32s("x.weight", &[4, 8], &[0.0; 32])]);
    for args in ["--granularity tensor", "--granularity channel --observer mse", "--granularity group --group-size 4 --symmetric false", "--activations none"] {
        ok(folder.path(), &format!("quantize-dynamic in -o out --force {args}"));
        let weights = data(folder.path(), "diff in out --json")["weights"].clone();
        assert!(weights[0]["equal"] == true && weights[0]["zeros_after"] == 32, "{args}: {weights}");
    }
}

#[test]
fn links_are_followed_and_files_are_written() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("blobs"));
    std::fs::create_dir(folder.path().join("in")).unwrap();
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        std::os::unix::fs::symlink(format!("../blobs/{name}"), folder.path().join("in").join(name)).unwrap();
    }
    ok(folder.path(), "densify in -o out/");
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(std::fs::symlink_metadata(folder.path().join("out").join(name)).unwrap().is_file(), "{name}");
    }
    assert!(data(folder.path(), "diff blobs out --json")["weights"].as_array().unwrap().iter().all(|w| w["equal"] == true));
}

#[test]
fn threads_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    let written = |threads: &str| {
        ok(folder.path(), &format!("chain in -o out --force --threads {threads} -- prune-unstructured --scope global -- quantize-dynamic"));
        std::fs::read(Path::new(folder.path()).join("out/model.safetensors")).unwrap()
    };
    assert_eq!(written("1"), written("7"));
}

/// In the first batch, the input of one of two layers is zero; in the second batch, that of the other one.
#[test]
fn sensitivity_is_measured_on_all_batches() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    // A large weight, whose input is zero, determines the scale of its row.
    let coarse = |at: usize| if at.is_multiple_of(8) { 100.0 } else { [0.3, 0.7][(at + at / 8) % 2] };
    let exact = |at: usize| if at % 3 == at / 8 % 3 { -1.0 } else { 1.0 };
    let weight = |name: &str, value: &dyn Fn(usize) -> f32| f32s(name, &[8, 8], &(0..64).map(value).collect::<Vec<_>>());
    file(&path.join("in/model.safetensors"), METADATA, &[weight("coarse.weight", &coarse), weight("exact.weight", &exact)]);
    std::fs::write(path.join("in/config.json"), "{}").unwrap();
    let text = "input a: float[batch, 8]\ninput b: float[batch, 8]\nparam exact.weight: float[8, 8]\nparam coarse.weight: float[8, 8]\n\
        x = Linear(a, exact.weight) -> float[batch, 8]\ny = Linear(b, coarse.weight) -> float[batch, 8]\nz = Add(x, y) -> float[batch, 8]\noutput z = z\n";
    let graph: compress_graph::ir::Graph = text.parse().unwrap();
    std::fs::write(path.join("in/graph.json"), serde_json::to_string(&compress_graph::ir::GraphFile::from(&graph)).unwrap()).unwrap();
    let rows = |name: &str, seen: std::ops::Range<usize>| {
        let value = |at: usize| if seen.contains(&(at / 8)) && !at.is_multiple_of(8) { (at * 37 % 101) as f32 / 50.0 - 1.0 } else { 0.0 };
        f32s(name, &[16, 8], &(0..128).map(value).collect::<Vec<_>>())
    };
    file(&path.join("samples.safetensors"), &[], &[rows("a", 0..8), rows("b", 8..16)]);
    std::fs::write(
        path.join("recipe.yaml"),
        "model: in\ndata: { calibration: { arrays: samples.safetensors, batch_size: 8 } }\npasses: [quantize-static]\noutput: out\n",
    )
    .unwrap();
    let layers = data(path, "analyze recipe.yaml --json")["layers"].clone();
    assert_eq!(layers[0]["name"], "coarse.weight", "{layers}");
    // Weights of another scheme would be rounded again.
    std::fs::write(path.join("recipe.yaml"), "model: in\npasses: [{ quantize: { scheme: W8A16 } }]\noutput: out\n").unwrap();
    let refused = compress(path, "analyze recipe.yaml -o mixed.yaml");
    assert!(refused.code != 0 && refused.stderr.contains("already quantizes by `quantize`"), "{}", refused.stderr);
    assert!(!path.join("mixed.yaml").exists());
    // Passes before the analyzed one change what it quantizes.
    std::fs::write(path.join("recipe.yaml"), "model: in\npasses: [cast: { to: bf16 }, quantize-static]\noutput: out\n").unwrap();
    let refused = compress(path, "analyze recipe.yaml");
    assert!(refused.code == 2 && refused.stderr.contains("`cast` changes the model before quantize-static"), "{}", refused.stderr);
}

/// The baseline has no fused multiply-add; docs/internals/graph.md describes the effect.
#[test]
fn instruction_sets_with_fused_multiply_add_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    golden_model(path, "torchvision-resnet18", &[]);
    let pixels: Vec<f32> = (0..16 * 3 * 32 * 32u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32).collect();
    file(&path.join("samples.safetensors"), &[], &[f32s("pixel_values", &[16, 3, 32, 32], &pixels)]);
    for pass in [
        "quantize-static",
        "prune-structured: { amount: 0.5, round_to: 1, importance: activation, repair: least-squares }",
        "distill: { max_steps: 2, batch_size: 8, losses: { soft: 1.0 } }",
    ] {
        let recipe = format!(
            "model: in\ndata: {{ train: {{ arrays: samples.safetensors }}, calibration: {{ arrays: samples.safetensors }} }}\npasses: [{pass}]\noutput: out\n"
        );
        std::fs::write(path.join("recipe.yaml"), recipe).unwrap();
        let written = |set: &str| {
            let run: Run = command(path).args(["run", "recipe.yaml", "--force", "--no-cache"]).env("COMPRESS_SIMD", set).output().unwrap().into();
            assert_eq!(run.code, 0, "{pass}: {}", run.stderr);
            std::fs::read(path.join("out/model.safetensors")).unwrap()
        };
        assert!(written("avx2") == written("avx512"), "{pass}");
    }
}

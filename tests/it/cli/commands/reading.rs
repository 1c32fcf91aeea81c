//! `inspect`, `diff`, `verify`, `densify`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::support::{Run, compress, data, golden_model, model, names, ok, read_json};

const QUERY: &str = "encoder.layer.0.attention.self.query.weight";

/// A folder with a model `in`.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    folder
}

fn named<'v>(list: &'v Value, name: &str) -> &'v Value {
    list.as_array().unwrap().iter().find(|item| item["name"] == name).unwrap()
}

#[test]
fn inspect() {
    let folder = prepared();
    ok(folder.path(), "chain in -o out -- prune-unstructured -- quantize-dynamic");
    let text = ok(folder.path(), "inspect out").stdout;
    assert!(text.contains(QUERY) && text.contains("16 x 16") && text.contains("int8 channel"), "{text}");
    let (_, summary) = text.split_once("\n\n").unwrap();
    for line in [
        ["architecture", "bert"],
        ["parameters", "3.10 k, 2.56 k of them in linear layers; "],
        ["tensors", "3 f32 (2.18 kB), 4 int8 channel ("],
        ["size", "4.99 kB in 1 file"],
    ] {
        assert!(summary.lines().any(|found| line.iter().all(|part| found.contains(part))), "{line:?} in\n{text}");
    }
    assert!(summary.contains("cannot be run") && summary.contains("passes over weights can process it"), "{text}");
    assert!(text.find("layer.0.").unwrap() < text.find("layer.1.").unwrap());
    let json = data(folder.path(), "inspect out --json");
    assert!(json["cannot_run"].is_string() && json["inputs"] == json!([]), "{json}");
    assert_eq!((&json["path"], &json["architecture"], &json["parameters"]), (&json!("out"), &json!("bert"), &json!(3104)));
    let query = named(&json["tensors"], QUERY);
    assert_eq!(
        (&query["dtype"], &query["shape"], &query["encoding"], &query["bytes"]),
        (&json!("F32"), &json!([16, 16]), &json!("int8 channel"), &json!(256 + 16 * 4))
    );
    assert_eq!(query["stored_as"], json!([format!("{QUERY}_scale"), QUERY]));
    assert!(query["zeros"].as_u64().unwrap() >= 128);
    let headers = data(folder.path(), "inspect out --json --header-only");
    assert_eq!(named(&headers["tensors"], QUERY)["zeros"], Value::Null);
    assert!(!ok(folder.path(), "inspect in --header-only").stdout.contains('%'));
    assert_eq!(data(folder.path(), "inspect in/model.safetensors --json")["parameters"], 3104);
}

#[test]
fn inspect_lists_unused_keys_and_weights() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "bert-first-published", &[]);
    let path = folder.path().join("in/config.json");
    let mut config = read_json(&path);
    (config["rotary_scaling"], config["hidden_dropout_prob"]) = (json!(4), json!(0.5));
    fs::write(&path, config.to_string()).unwrap();
    fs::write(folder.path().join("in/sentence_bert_config.json"), r#"{"max_seq_length": 8, "query_style": "x"}"#).unwrap();
    fs::write(folder.path().join("in/preprocessor_config.json"), r#"{"do_resize": false, "do_sharpen": true}"#).unwrap();
    let unused = &data(folder.path(), "inspect in --json")["unused"];
    assert_eq!(unused["keys"], json!(["config.json: rotary_scaling", "sentence_bert_config.json: query_style", "preprocessor_config.json: do_sharpen"]));
    assert_eq!(unused["weights"], json!(["cls.seq_relationship.bias", "cls.seq_relationship.weight"]));
    let text = ok(folder.path(), "inspect in --header-only").stdout;
    assert!(text.contains("\n unknown keys: config.json: rotary_scaling, sentence_bert"), "{text}");
    assert!(text.contains("\n unused weights: cls.seq_relationship.bias, "), "{text}");

    let tower = tempfile::tempdir().unwrap();
    golden_model(tower.path(), "qwen2_5-vl", &[]);
    let unused = &data(tower.path(), "inspect in --json --header-only")["unused"];
    let names = unused["tower"].as_array().unwrap();
    assert!(names.len() > 4 && names.iter().all(|name| name.as_str().unwrap().contains("visual")), "{unused}");
    assert_eq!(unused["weights"], json!([]));
    let text = ok(tower.path(), "inspect in --header-only").stdout;
    assert!(text.contains(&format!("\n vision tower: {} tensors, which passes copy", names.len())) && !text.contains("unused weights"), "{text}");

    config["position_embedding_type"] = json!("relative_key");
    fs::write(&path, config.to_string()).unwrap();
    let found = data(folder.path(), "inspect in --json");
    let refused = &found["cannot_run"];
    assert!(found["unused"].is_null(), "one key is the reason: {found}");
    assert!(refused.as_str().unwrap().contains("config.json: `position_embedding_type` of \"relative_key\" is not supported"), "{refused}");
    let text = ok(folder.path(), "inspect in").stdout;
    assert!(text.contains("cannot be run") && text.contains("config.json: `position_embedding_type`"), "{text}");
    assert_eq!(ok(folder.path(), "prune-unstructured in -o out").code, 0);
}

#[test]
fn other_quantization_settings_are_copied_or_omitted_with_a_note() {
    let folder = prepared();
    ok(folder.path(), "quantize-dynamic in -o int8");
    let path = folder.path().join("int8/config.json");
    let mut config = read_json(&path);
    let cache = json!({ "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true });
    let zeros = json!({ "format": "dense", "global_sparsity": 0.5, "targets": [] });
    let said = [("kv_cache_scheme", &cache), ("sparsity_config", &zeros), ("made_on", &json!("a Monday"))];
    said.iter().for_each(|(key, value)| config["quantization_config"][*key] = (*value).clone());
    fs::write(&path, config.to_string()).unwrap();
    let told = |name: &str| said.map(|(key, value)| read_json(&folder.path().join(name).join("config.json"))["quantization_config"].get(key) == Some(value));

    ok(folder.path(), "densify int8 -o again --keep-quantized");
    assert_eq!(told("again"), [true; 3]);
    ok(folder.path(), "densify int8 -o floats");
    assert_eq!(told("floats"), [true; 3]);
    assert_eq!(read_json(&folder.path().join("floats/config.json"))["quantization_config"]["config_groups"], json!({}));
    ok(folder.path(), "prune-unstructured floats -o pruned");
    assert_eq!(told("pruned"), [true, false, true]);
    let notes = read_json(&folder.path().join("pruned/report.json"))["notes"].to_string();
    assert!(notes.contains("`sparsity_config` of the input's quantization_config is not written"), "{notes}");
    assert_eq!(data(folder.path(), "inspect pruned --json")["kv_cache_scheme"], cache);
    assert!(ok(folder.path(), "inspect pruned").stdout.contains("keys and values as fp8"));
}

#[test]
fn inspect_with_headers_only_reads_no_weights() {
    let folder = tempfile::tempdir().unwrap();
    let header = r#"{"x":{"dtype":"F32","shape":[1048576,1048576],"data_offsets":[0,4398046511104]}}"#;
    let path = folder.path().join("in.safetensors");
    crate::cli::support::raw_file(&path, header.as_bytes(), &[]);
    let length = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(length + (1 << 42)).unwrap();
    assert_eq!(data(folder.path(), "inspect in.safetensors --header-only --json")["bytes"], 1u64 << 42);
}

#[test]
fn diff() {
    let folder = prepared();
    ok(folder.path(), "quantize-dynamic in -o out --targets *query.weight");
    let text = ok(folder.path(), "diff in out").stdout;
    assert!(text.contains(&format!(" {QUERY}  f32 -> int8 channel")) && text.contains(" 5 of 7 weights are equal; 12.4 kB -> "), "{text}");
    assert!(!text.contains("output.dense") && ok(folder.path(), "diff in out --all").stdout.contains("output.dense"));
    let json = data(folder.path(), "diff in out --json");
    assert_eq!(json["bytes_before"], 3104 * 4);
    let query = named(&json["weights"], QUERY);
    assert_eq!((&query["equal"], &query["elements"], &query["note"]), (&json!(false), &json!(256), &Value::Null));
    assert!(query["sqnr_db"].as_f64().unwrap() > 40.0 && query["cosine"].as_f64().unwrap() > 0.999 && query["max_abs_error"].as_f64().unwrap() < 0.001);
    let dense = named(&json["weights"], "encoder.layer.0.output.dense.weight");
    assert_eq!((&dense["equal"], &dense["sqnr_db"], &dense["max_abs_error"]), (&json!(true), &Value::Null, &json!(0.0)));
    // Values are those in the dtype of the model, in both models.
    ok(folder.path(), "chain in -o half -- cast --to bf16 -- quantize-dynamic");
    ok(folder.path(), "densify half -o densified");
    for pair in ["half half", "half densified", "densified half"] {
        assert!(ok(folder.path(), &format!("diff {pair}")).stdout.contains("7 of 7 weights are equal"), "{pair}");
    }
    // As f32, both are infinite.
    for (name, value) in [("wide", 1e300f64), ("wider", 1e301)] {
        let tensors = [crate::cli::support::tensor("x", "F64", &[1], &value.to_le_bytes())];
        crate::cli::support::file(&folder.path().join(name), crate::cli::support::METADATA, &tensors);
    }
    assert!(ok(folder.path(), "diff wide wider").stdout.contains("0 of 1 weights are equal"));
}

#[test]
fn diff_of_models_that_do_not_match() {
    let folder = tempfile::tempdir().unwrap();
    let write =
        |name: &str, tensors: &[crate::cli::support::Tensor]| crate::cli::support::file(&folder.path().join(name), crate::cli::support::METADATA, tensors);
    write("a", &[crate::cli::support::floats("x", &[2, 3]), crate::cli::support::floats("a", &[1]), crate::cli::support::tensor("t", "I8", &[4], &[0; 4])]);
    write("b", &[crate::cli::support::floats("x", &[3, 2]), crate::cli::support::floats("b", &[1]), crate::cli::support::tensor("t", "U8", &[4], &[0; 4])]);
    let weights = data(folder.path(), "diff a b --json")["weights"].clone();
    let note = |name| named(&weights, name)["note"].as_str().unwrap().to_owned();
    assert_eq!(
        [note("a"), note("b"), note("t"), note("x")],
        ["only in the first", "only in the second", "types differ: I8 and U8", "shapes differ: [2, 3] and [3, 2]"]
    );
    assert!(ok(folder.path(), "diff a b").stdout.contains("0 of 4 weights are equal"));
}

#[test]
fn verify_names_damaged_files() {
    let folder = prepared();
    let file = folder.path().join("out/model.safetensors");
    let verify = |damage: &dyn Fn(&Path)| -> (Run, Value) {
        let _ = fs::remove_dir_all(folder.path().join("out"));
        ok(folder.path(), "cast in -o out");
        damage(&file);
        let (text, json) = (compress(folder.path(), "verify out"), compress(folder.path(), "verify out --json"));
        assert_eq!(text.code, json.code);
        (text, serde_json::from_str(&json.stdout).unwrap())
    };
    let (run, checks) = verify(&|_| ());
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert!(run.stdout.contains("as written") && run.stdout.contains("opens with 7 weights"), "{}", run.stdout);
    assert!(checks.as_array().unwrap().iter().all(|check| check["ok"] == true));
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let shorten = |path: &Path| fs::write(path, &fs::read(path).unwrap()[..3000]).unwrap();
    let replace = |path: &Path| {
        fs::remove_file(path).unwrap();
        fs::copy(folder.path().join("in/model.safetensors"), path).map(drop).unwrap();
    };
    let config = |path: &Path| fs::write(path.with_file_name("config.json"), "{").unwrap();
    type Damage<'a> = &'a dyn Fn(&Path);
    let module = |path: &Path| path.with_file_name("1_Pooling").join("config.json");
    let cases: [(Damage, &str, &str); 7] = [
        (&flip, "model.safetensors", "its BLAKE3 differs from the report"),
        (&shorten, "model.safetensors", "has 3000 bytes, the report states"),
        (&replace, "model.safetensors", "the report states"),
        (&|path| fs::remove_file(path).unwrap(), "model.safetensors", "cannot open out/model.safetensors"),
        (&config, "config.json", "has 1 bytes, the report states"),
        (&|path| fs::write(module(path), "[]").unwrap(), "1_Pooling/config.json", "its BLAKE3 differs from the report"),
        (&|path| fs::remove_file(module(path)).unwrap(), "1_Pooling/config.json", "cannot open out/1_Pooling/config.json"),
    ];
    for (damage, path, finding) in cases {
        let (run, checks) = verify(damage);
        assert_eq!(run.code, 1);
        let failed = checks.as_array().unwrap().iter().find(|check| check["ok"] == false).unwrap();
        assert!(failed["path"] == path && failed["finding"].as_str().unwrap().contains(finding), "{failed}");
        assert!(
            run.stdout.contains("FAILED") && run.stderr.starts_with(&format!("error: verification of out/{path} failed: ")) && run.stderr.contains(finding),
            "{}{}",
            run.stdout,
            run.stderr
        );
    }
    let (_, checks) = verify(&config);
    let opened = checks.as_array().unwrap().iter().find(|check| check["path"] == ".").unwrap();
    assert!(opened["finding"].as_str().unwrap().contains("out/config.json: not a JSON object"), "{opened}");
}

#[test]
fn verify_trusts_no_report() {
    let folder = prepared();
    ok(folder.path(), "cast in -o out");
    let path = folder.path().join("out/report.json");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut report = read_json(&path);
        change(&mut report);
        fs::write(&path, report.to_string()).unwrap();
        compress(folder.path(), "verify out")
    };
    let outside = with(&|report| report["outputs"][0]["path"] = json!("../in/model.safetensors"));
    assert!(outside.code == 1 && outside.stderr.contains("the report names a file outside the folder"), "{}", outside.stderr);
    let other = with(&|report| report["outputs"] = json!("none"));
    assert!(other.code == 1 && other.stderr.contains("out/report.json: not a report of schema 1"), "{}", other.stderr);
}

#[test]
fn densify_restores_values() {
    let folder = prepared();
    ok(folder.path(), "prune-unstructured in -o pruned --amount 0.8");
    ok(folder.path(), "prune-unstructured in -o sparse --amount 0.8 --layout sparse");
    ok(folder.path(), "densify sparse -o dense");
    let weights = |folder: &Path, name: &str| fs::read(folder.join(name).join("model.safetensors")).unwrap();
    assert!(weights(folder.path(), "sparse").len() < weights(folder.path(), "pruned").len());
    assert_eq!(weights(folder.path(), "dense"), weights(folder.path(), "pruned"));
    assert_eq!(read_json(&folder.path().join("dense/config.json")), json!({ "model_type": "bert", "hidden_size": 16 }));

    ok(folder.path(), "chain in -o both --layout sparse -- prune-unstructured --amount 0.8 -- quantize-dynamic");
    ok(folder.path(), "chain in -o int8 -- prune-unstructured --amount 0.8 -- quantize-dynamic");
    ok(folder.path(), "densify both -o int8-again --keep-quantized");
    assert_eq!(weights(folder.path(), "int8-again"), weights(folder.path(), "int8"));
    ok(folder.path(), "densify int8 -o floats --shard-size 6KB");
    let encodings: Vec<Value> =
        data(folder.path(), "inspect floats --json --header-only")["tensors"].as_array().unwrap().iter().map(|t| t["encoding"].clone()).collect();
    assert_eq!(encodings, vec!["f32"; 7]);
    assert!(names(&folder.path().join("floats")).contains(&"model-00001-of-00003.safetensors".to_owned()));
    assert!(data(folder.path(), "diff int8 floats --json")["weights"].as_array().unwrap().iter().all(|w| w["equal"] == true));
}

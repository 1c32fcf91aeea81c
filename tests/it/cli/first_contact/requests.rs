//! Requests that cannot be met, or whose result would be another one: errors and warnings with the next step.

use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::{Value, json};

use super::{prepared, refused};
use crate::cli::support::{command, compress, data, floats, golden_model, model_of, names, ok, read_json};

fn notes(folder: &Path, args: &str) -> String {
    data(folder, &args.replacen(" -o ", " --json --force -o ", 1))["notes"].to_string()
}

fn with_config(folder: &Path, key: &str, value: Value) {
    let path = folder.join("in/config.json");
    let mut config = read_json(&path);
    config[key] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// A decoder with rows of 32 values, the block size of several types of GGUF files, as the folder `wide`.
fn wide(folder: &Path) {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 64,
    });
    let layer = |name: &str, shape: &[usize]| floats(&format!("model.layers.0.{name}.weight"), shape);
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| layer(&format!("self_attn.{name}"), &[32, 32]));
    let mut tensors = vec![floats("model.embed_tokens.weight", &[64, 32]), floats("model.norm.weight", &[32]), floats("lm_head.weight", &[64, 32])];
    tensors.extend([layer("input_layernorm", &[32]), layer("post_attention_layernorm", &[32])]);
    tensors.extend([layer("mlp.gate_proj", &[64, 32]), layer("mlp.up_proj", &[64, 32]), layer("mlp.down_proj", &[32, 64])]);
    tensors.extend(attention);
    model_of(&folder.join("wide"), &config, &tensors);
    fs::remove_file(folder.join("wide/tokenizer.json")).unwrap();
}

/// An ONNX file stores floats in one type, which `precision` selects.
#[test]
fn sixteen_bits_that_onnx_does_not_store_are_refused() {
    let folder = prepared();
    let path = folder.path();
    refused(path, "cast in -o out --to f16 --export onnx", "onnx: stores weights as float32");
    refused(path, "cast in -o out.onnx --to f16", "set `precision: float16`, as in `--export 'onnx: { precision: float16 }'`");
    refused(path, "cast in -o out --export onnx", "has rounded to bf16");
    assert_eq!(names(path), ["in"]);
    let half = command(path).args(["cast", "in", "-o", "half", "--to", "f16", "--export", "onnx: { precision: float16 }"]).output().unwrap();
    assert!(half.status.success(), "{}", String::from_utf8_lossy(&half.stderr));
    ok(path, "cast in -o whole --to f32 --export onnx");
    let size = |name: &str| fs::metadata(path.join(name).join("model.onnx")).unwrap().len();
    assert!(size("half") < size("whole"));
    // The folder in another format has the floats, and so do layers that a later pass does not quantize.
    let warning = "warning: onnx: stores weights as float32";
    assert!(notes(path, "cast in -o out --to f16 --export onnx --export safetensors").contains(warning));
    assert!(notes(path, "chain in -o out --export onnx -- cast --to bf16 -- quantize-dynamic").contains(warning));
    // A file keeps its types.
    assert!(!notes(path, "cast whole/model.onnx -o small.onnx --to f16").contains(warning));
}

#[test]
fn layers_that_the_configuration_does_not_contain_are_named() {
    let folder = prepared();
    assert!(!notes(folder.path(), "quantize-dynamic in -o out").contains("but the checkpoint also contains"));
    with_config(folder.path(), "num_hidden_layers", json!(1));
    let found = notes(folder.path(), "quantize-dynamic in -o out");
    let expected = "warning: `num_hidden_layers` in config.json is 1, but the checkpoint also contains `model.layers.1` (9 tensors): runtimes ignore";
    assert!(found.contains(expected), "{found}");
    fs::write(folder.path().join("recipe.yaml"), "model: in\npasses: [quantize-dynamic]\n").unwrap();
    assert!(ok(folder.path(), "plan recipe.yaml").stdout.contains("also contains `model.layers.1`"));
    // Layers that predict further tokens follow the others.
    with_config(folder.path(), "num_nextn_predict_layers", json!(1));
    assert!(!notes(folder.path(), "quantize-dynamic in -o out").contains("but the checkpoint also contains"));
}

/// A single file has no config.json that could be corrected later.
#[test]
fn files_are_not_written_with_another_configuration() {
    let folder = prepared();
    let path = folder.path();
    let cases = [
        ("num_hidden_layers", json!(9), "gguf: in: `num_hidden_layers` in config.json is 9, but the checkpoint has 2\n"),
        (
            "num_hidden_layers",
            json!(1),
            "gguf: `num_hidden_layers` in config.json is 1, but the checkpoint also contains `model.layers.1` (9 tensors), which the file would not contain\n",
        ),
        ("vocab_size", json!(50), "`model.embed_tokens.weight`: has shape [48, 16], but the configuration requires [50, 16]"),
        ("intermediate_size", json!(48), "has shape [24, 16], but the configuration requires [48, 16]"),
    ];
    for (key, value, reason) in cases {
        let original = read_json(&path.join("in/config.json"))[key].clone();
        with_config(path, key, value);
        refused(path, "cast in -o out.gguf --to f32", reason);
        fs::write(path.join("recipe.yaml"), "model: in\npasses: [cast: { to: f32 }]\noutput: out.gguf\n").unwrap();
        refused(path, "plan recipe.yaml", reason);
        with_config(path, key, original);
    }
    with_config(path, "num_hidden_layers", json!(1));
    refused(path, "cast in -o out.onnx --to f32", "onnx: `num_hidden_layers` in config.json is 1, but the checkpoint also contains `model.layers.1`");
    assert_eq!(names(path), ["in", "recipe.yaml"]);
}

#[test]
fn sizes_that_contradict_each_other_are_a_warning() {
    let folder = prepared();
    with_config(folder.path(), "num_key_value_heads", json!(3));
    let found = notes(folder.path(), "quantize-dynamic in -o out");
    let reason = "config.json: `num_attention_heads` 2 is not a multiple of `num_key_value_heads` 3: correct the sizes";
    assert!(found.contains("warning: fidelity was not measured, and runtimes are likely to refuse the output") && found.contains(reason), "{found}");
    let card = fs::read_to_string(folder.path().join("out/README.md")).unwrap();
    assert!(!card.contains("vllm serve"), "{card}");
}

#[test]
fn outputs_that_no_runtime_loads_are_violations() {
    let folder = prepared();
    let path = folder.path();
    with_config(path, "vocab_size", json!(50));
    fs::write(path.join("recipe.yaml"), "model: in\npasses: [quantize-dynamic]\nloads: [transformers]\noutput: out\n").unwrap();
    let reason = "shapes: `model.embed_tokens.weight` has shape [48, 16], but the configuration requires [50, 16]";
    let checked = compress(path, "check in --loads transformers");
    assert!(checked.code == 1 && checked.stdout.contains(reason), "{}{}", checked.stdout, checked.stderr);
    for args in ["cast in -o out --to f16 --loads transformers", "plan recipe.yaml", "run recipe.yaml"] {
        refused(path, args, reason);
    }
    assert_eq!(names(path), ["in", "recipe.yaml"]);
}

#[test]
fn a_model_without_weights_is_not_written() {
    let folder = prepared();
    let path = folder.path();
    for amount in ["--amount 1.0", "--amount 100%", "--amount 1.0 --scope global"] {
        refused(path, &format!("prune-unstructured in -o out {amount}"), "prune-unstructured: amount): sets all weights");
    }
    refused(path, "prune-unstructured in -o out --pattern 0:4", "prune-unstructured: pattern): sets all weights");
    // 14 linear layers: 8 of 256 and 6 of 384 weights.
    refused(path, "prune-unstructured in -o out --scope global --amount 4352", "prune-unstructured: amount: 4352: sets all weights");
    fs::write(path.join("recipe.yaml"), "model: in\npasses: [prune-unstructured: { amount: 1.0 }]\noutput: out\n").unwrap();
    for command in ["plan", "run"] {
        refused(path, &format!("{command} recipe.yaml"), "amount): sets all weights of the selected layers to zero");
    }
    assert_eq!(names(path), ["in", "recipe.yaml"]);
    ok(path, "prune-unstructured in -o out --amount 1.0 --targets *.0.mlp.up_proj.weight");
}

#[test]
fn a_recipe_without_passes_is_a_warning() {
    let folder = prepared();
    let write = |text: &str| fs::write(folder.path().join("recipe.yaml"), format!("model: in\noutput: out\n{text}")).unwrap();
    let warning = "warning: `passes` is empty: the weights are only copied";
    write("passes:\n");
    assert!(ok(folder.path(), "plan recipe.yaml").stdout.contains(warning));
    let notes = || data(folder.path(), "run recipe.yaml --json --force")["notes"].to_string();
    assert!(notes().contains(warning));
    for text in ["passes: [cast: { to: bf16 }]\n", "passes: []\nexport: [onnx]\n", "passes: []\nexport: [safetensors: { layout: sparse }]\n"] {
        write(text);
        assert!(!notes().contains("`passes` is empty"), "{text}");
    }
}

#[test]
fn open_brackets_are_found_where_they_begin() {
    let folder = prepared();
    let write = |text: &str| fs::write(folder.path().join("recipe.yaml"), text).unwrap();
    write("model: in\npasses:\n  - quantize: { scheme: W4A16\noutput: out\n");
    refused(folder.path(), "plan recipe.yaml", "recipe.yaml: line 3 column 15: the bracket `{` is not closed: add `}`");
    write("model: in\npasses: [cast\noutput: out\n");
    refused(folder.path(), "run recipe.yaml", "recipe.yaml: line 2 column 9: the bracket `[` is not closed: add `]`");
    let run = command(folder.path()).args(["cast", "in", "-o", "out", "--export", "onnx: {precision: float16"]).output().unwrap();
    let message = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!run.status.success() && message.contains("line 1 column 7: the bracket `{` is not closed"), "{message}");
}

#[test]
fn names_of_other_tools_lead_to_ours() {
    let folder = prepared();
    let recipe = |text: &str, message: &str| {
        fs::write(folder.path().join("recipe.yaml"), text).unwrap();
        refused(folder.path(), "plan recipe.yaml", message);
    };
    recipe("model: in\nsteps: [cast]\n", "unknown key `steps`, did you mean `passes`?");
    for passes in ["\n  quantize: { scheme: W4A16 }", "\n  quantize:\n    scheme: W4A16", " { quantize: {} }"] {
        recipe(&format!("model: in\npasses:{passes}\n"), "expected a list: write `- quantize: …`, with a dash before each pass");
    }
    recipe("model: in\ndata: { calibration: { csv: a.csv } }\npasses: [cast]\n", "unknown key `csv`, did you mean `text`?");
    for (args, tip) in [
        ("generate in --prompt a --max-new-tokens 5", "tip: the option is `--tokens`"),
        ("generate in --prompt a --max-length 5", "tip: the option is `--tokens`"),
        ("draft in -o out --max-new-tokens 5", "tip: the option is `--tokens`"),
        ("eval in --max-new-tokens 5", "tip: texts are generated by `compress generate MODEL --prompt TEXT --tokens N`"),
        ("cast in -o x.gguf --to f32 Q4_K_M", "tip: Q4_K_M is a type of GGUF files: `compress cast MODEL"),
        ("cast in -o x.gguf --to f32 --outtype q8_0", "--export 'gguf: { type: Q8_0 }'"),
        ("cast in -o x.gguf --to f32 --type Q4_K_M", "--export 'gguf: { type: Q8_0 }'"),
        ("cast in -o out --to f32 --export Q8_0", "--export 'gguf: { type: Q8_0 }'"),
        ("cast in -o out --to f32 --export gguf:q8_0", "--export 'gguf: { type: Q8_0 }'"),
        ("cast in -o out --to f32 --export gguf=Q8_0", "--export 'gguf: { type: Q8_0 }'"),
        ("cast in -o out --to f32 --export onnx,safetensors", "repeat the option, as in --export onnx --export safetensors"),
        ("cast in -o out --to int8", "tip: `compress quantize-dynamic MODEL -o DIR` writes int8 weights"),
        ("quantize in -o out --recipe r.yaml", "tip: recipes have a command: `compress run RECIPE`"),
        ("quantize in -o out --load_in_4bit", "tip: a scheme specifies the bits"),
        ("quantize in --save-dir out", "tip: the option is `--output`"),
        ("quantize in -o out --sym", "tip: a scheme is symmetric, like W4A16"),
        ("quantize in -o out --num_calibration_samples 64", "tip: the number of samples is an option of the data"),
        ("quantize --model in -o out", "tip: the model has no option"),
        ("quantize -m in -o out", "tip: the model has no option"),
        ("quantize -i in -o out", "tip: the model has no option"),
        ("decompose in -o out --ratio 0.5", "tip: the option is `--rank`"),
        ("check in --max-perplexity 9", "tip: scores are compared with those of the original model"),
        ("train in", "'finetune'"),
        ("compare in in", "'diff'"),
        ("validate in", "'verify'"),
        ("perplexity in", "'eval'"),
        ("version", "tip: `compress --version` prints the version"),
        ("convert_hf_to_gguf in", "tip: `compress cast MODEL -o model.gguf --to f32` writes a GGUF file"),
    ] {
        refused(folder.path(), args, tip);
    }
}

#[test]
fn patterns_of_other_tools_are_explained() {
    let folder = prepared();
    let path = folder.path();
    refused(path, "quantize in -o out --targets Linear", "is the name of a class, and patterns are names of tensors");
    let tied = tempfile::tempdir().unwrap();
    golden_model(tied.path(), "llama-grouped-tied", &[]);
    refused(tied.path(), "quantize in -o out --ignore lm_head", "is a head that is tied to the embedding table");
}

#[test]
fn adapters_without_a_base_model_are_a_warning() {
    let folder = prepared();
    let path = folder.path();
    assert!(!notes(path, "cast in -o out --to f16").contains("LoRA"));
    fs::rename(path.join("in/model.safetensors"), path.join("in/adapter_model.safetensors")).unwrap();
    fs::rename(path.join("in/config.json"), path.join("in/adapter_config.json")).unwrap();
    assert!(notes(path, "cast in -o out --to f16").contains("warning: the input is a LoRA adapter without its base model"));
}

/// Libraries that store tensors with the same memory once choose the first name.
#[test]
fn a_tied_table_that_is_stored_as_a_head_is_renamed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    golden_model(path, "llama-grouped-tied", &[]);
    let load = |name: &str| candle_core::safetensors::load(path.join(name), &Device::Cpu).unwrap();
    let mut tensors = load("in/model.safetensors");
    let table = tensors.remove("model.embed_tokens.weight").unwrap();
    tensors.insert("lm_head.weight".to_owned(), table.clone());
    candle_core::safetensors::save(&tensors, path.join("in/model.safetensors")).unwrap();
    ok(path, "check in --loads transformers");
    let reason = "shapes: `model.embed_tokens.weight` is missing, and `lm_head.weight` is stored instead";
    assert!(compress(path, "check in --loads vllm").stdout.contains(reason));
    let found = notes(path, "cast in -o out --to f32");
    assert!(found.contains("`lm_head.weight` is stored in the input instead of `model.embed_tokens.weight`"), "{found}");
    let written = load("out/model.safetensors");
    assert!(!written.contains_key("lm_head.weight") && !compress(path, "check out --loads vllm").stdout.contains("shapes"));
    assert_eq!(written["model.embed_tokens.weight"].to_vec2::<f32>().unwrap(), table.to_vec2::<f32>().unwrap());
    // An untied head does not replace a missing table.
    with_config(path, "tie_word_embeddings", json!(false));
    assert_eq!(compress(path, "check in --loads transformers").code, 1);
}

#[test]
fn a_contradiction_is_the_reason_why_a_model_does_not_run() {
    let folder = prepared();
    with_config(folder.path(), "num_hidden_layers", json!(9));
    let text = ok(folder.path(), "init in").stdout;
    assert!(text.contains("# config.json does not match the weights: tensor `model.layers.2.") && !text.contains("graph.json"), "{text}");
}

/// `-o` accepts an attached value, here `ut=out` and `utput`.
#[test]
fn an_output_is_not_the_rest_of_a_long_name() {
    let folder = prepared();
    refused(folder.path(), "cast in -out=out --to f16", "did you mean `--output out`? Otherwise write `-o ut=out`");
    refused(folder.path(), "cast in -output out --to f16", "did you mean `--output`?");
    refused(folder.path(), "chain in -out=out -- cast --to f16", "did you mean `--output out`?");
    assert!(!compress(folder.path(), "generate in --prompt -output").stderr.contains("--output"));
    assert_eq!(names(folder.path()), ["in"]);
    ok(folder.path(), "cast in -ofirst --to f16");
    ok(folder.path(), "cast in -o=second --to f16");
    ok(folder.path(), "cast in -o ut --to f16");
    assert_eq!(names(folder.path()), ["first", "in", "second", "ut"]);
}

#[test]
fn the_hint_about_a_delimiter_can_be_pasted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    golden_model(path, "llama", &[("characters.json", "tokenizer.json")]);
    fs::write(path.join("table.csv"), "text;label\nabc;x\n".repeat(8)).unwrap();
    let run = compress(path, "quantize in -o out --method gptq --calibration table.csv");
    let options = run.stderr.split("as in `'").nth(1).and_then(|rest| rest.split("'`").next()).unwrap_or_else(|| panic!("{}", run.stderr));
    assert_eq!(options, "{ text: table.csv, delimiter: \";\" }");
    let run = command(path).args(["quantize", "in", "-o", "out", "--method", "gptq", "--calibration", options]).output().unwrap();
    let message = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!message.contains("delimiter") && !message.contains("column"), "{message}");
    fs::write(path.join("recipe.yaml"), "model: in\ndata: { evaluation: { text: table.csv, delimiter: tab } }\npasses: [cast]\n").unwrap();
    refused(path, "plan recipe.yaml", "expected one character; a tab is \"\\t\", with double quotes");
}

#[test]
fn images_of_different_sizes_lead_to_a_crop() {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "resnet-basic", &[]);
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/images");
    let message = |options: &str| {
        let data = format!("{{ images: {}{options} }}", images.display());
        let run = command(folder.path()).args(["eval", "in", "--data", &data]).output().unwrap();
        String::from_utf8_lossy(&run.stderr).into_owned()
    };
    assert!(message("").contains("differs in size from earlier images: set `resize`, or `batch_size: 1`"));
    let cropped = message(", resize: 40");
    assert!(cropped.contains("differs in size from earlier images: only the shorter side is resized to 40: also set `crop: 40`"), "{cropped}");
    assert!(!message(", resize: 40, crop: 40").contains("size"));
}

#[cfg(feature = "provenance")]
#[test]
fn a_key_is_checked_before_the_signature() {
    let folder = prepared();
    ok(folder.path(), "cast in -o out --to f16");
    fs::write(folder.path().join("bad.pem"), "garbage").unwrap();
    refused(folder.path(), "verify out --key missing.pem", "missing.pem");
    let run = compress(folder.path(), "verify out --key bad.pem");
    assert!(run.code != 0 && !run.stderr.contains("not signed") && run.stderr.contains("key"), "{}", run.stderr);
    // The algorithm of an RSA key, without the key.
    let rsa = |kind: &str| format!("-----BEGIN {kind} KEY-----\nMA0GCSqGSIb3DQEBAQUA\n-----END {kind} KEY-----\n");
    fs::write(folder.path().join("rsa.pem"), rsa("PRIVATE")).unwrap();
    fs::write(folder.path().join("rsapub.pem"), rsa("PUBLIC")).unwrap();
    refused(
        folder.path(),
        "cast in -o new --to f16 --sign rsa.pem",
        "is an RSA key, and only keys of the curves P-256 and P-384 sign models: `openssl ecparam",
    );
    refused(folder.path(), "verify out --key rsapub.pem", "is a public RSA key");
}

/// int8 would be larger than most types of GGUF files.
#[test]
fn the_first_recipe_of_a_quantized_file_makes_it_smaller() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    wide(path);
    let args = ["cast", "wide", "-o", "small.gguf", "--to", "f32", "--export", "gguf: { type: Q8_0 }"];
    let written = command(path).args(args).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let text = ok(path, "init small.gguf").stdout;
    for part in ["parameters in Q8_0,", "The weights are blocks of Q8_0", "\npasses: []\n", "\n  - gguf: { type: Q4_K_M }\n"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("- quantize-dynamic"), "{text}");
    fs::write(path.join("recipe.yaml"), &text).unwrap();
    ok(path, "run recipe.yaml");
    assert!(path.join("out/small/report.html").is_file());
}

#[test]
fn a_search_for_a_vision_model_names_its_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    golden_model(path, "resnet-basic", &[]);
    fs::write(path.join("pixels.safetensors"), "").unwrap();
    refused(path, "auto in -o out --max-size 50% --calibration pixels.safetensors", "in: vLLM does not load convolutional networks: use `--for onnxruntime`");
    refused(path, "auto in -o out --for llama.cpp --max-size 50% --calibration pixels.safetensors", "use `--for onnxruntime`");
}

/// The size of the smallest choice is known without running the model.
#[test]
fn an_impossible_size_is_refused_before_the_search() {
    let folder = prepared();
    let path = folder.path();
    let ids = Tensor::from_vec((0..64i64).map(|i| i * 7 % 40).collect::<Vec<_>>(), (8, 8), &Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&arrays.into(), path.join("ids.safetensors")).unwrap();
    let args = r#"auto in --front front.json --for transformers --calibration {"arrays":"ids.safetensors","samples":4} --log-format json"#;
    let run = compress(path, &format!("{args} --max-size 0.5bits"));
    assert!(run.code == 1 && run.stderr.contains("the nearest possible limit is "), "{}", run.stderr);
    assert!(!run.stderr.contains("\"begin\""), "{}", run.stderr);
    let run = compress(path, &format!("{args} --max-size 8bits"));
    assert!(run.stderr.contains("\"begin\""), "{}", run.stderr);
}

#[test]
fn an_empty_folder_is_a_place_for_an_output() {
    let folder = prepared();
    let path = folder.path();
    fs::create_dir(path.join("out")).unwrap();
    ok(path, "cast in -o out --to f16");
    assert!(path.join("out/report.json").is_file());
    assert_eq!(names(path), ["in", "out"]);
    fs::create_dir(path.join("here")).unwrap();
    for args in ["cast ../in -o . --to f16", "cast ../in -o . --to f16 --force"] {
        let run = compress(&path.join("here"), args);
        assert!(run.code == 1 && run.stderr.contains("is the working directory") && names(&path.join("here")).is_empty(), "{args}: {}", run.stderr);
    }
    // A folder with the name of a file is probably a mistake.
    fs::create_dir(path.join("small.onnx")).unwrap();
    refused(path, "cast in -o small.onnx --to f32", "exists");
}

#[test]
fn a_missing_data_file_names_the_line_of_the_recipe() {
    let folder = prepared();
    let text = "model: in\n# missing.safetensors\ndata:\n  calibration: { arrays: missing.safetensors }\npasses: [quantize: { method: gptq }]\noutput: out\n";
    fs::write(folder.path().join("recipe.yaml"), text).unwrap();
    for command in ["plan", "run"] {
        refused(folder.path(), &format!("{command} recipe.yaml"), "recipe.yaml: line 4: cannot open missing.safetensors: No such file");
    }
    // A key with the name of the file is not a reference to it.
    for key in ["calibration:", "calibration :", "\"calibration\":"] {
        let text = format!("model: in\ndata:\n  {key}\n    arrays: calibration\npasses: [quantize: {{ method: gptq }}]\noutput: out\n");
        fs::write(folder.path().join("recipe.yaml"), text).unwrap();
        refused(folder.path(), "plan recipe.yaml", "recipe.yaml: line 4: cannot open calibration: No such file");
    }
}

#[test]
fn weights_that_are_quantized_twice_are_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    wide(path);
    let notes_with = |format: &str, pass: &[&str]| {
        let args = [pass, ["wide", "-o", "small.gguf", "--force", "--json", "--export", format].as_slice()].concat();
        let run = command(path).args(args).output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        serde_json::from_slice::<Value>(&run.stdout).unwrap()["notes"].to_string()
    };
    let notes_as = |file_type: &str, pass: &[&str]| notes_with(&format!("gguf: {{ type: {file_type} }}"), pass);
    let notes = |pass: &[&str]| notes_as("Q4_0", pass);
    // Files of floats name the type that stores the codes.
    let option = |file_type: &str| format!("gguf: {{ type: {file_type}, types: {{ 'lm_head.weight': F16, 'model.embed_tokens.weight': F16 }} }}");
    for (scheme, file_type) in [("W4A16", "Q4_0"), ("W4A16-ASYM", "Q4_1"), ("W8A16", "Q8_0")] {
        let floats = notes_as("F16", &["quantize", "--scheme", scheme, "--group-size", "32"]);
        let advice = format!(
            "warning: small.gguf: 7 quantized weights dequantized and converted to the types of the file; the file has their rounding errors, but is not smaller: use `--export \\\"{}\\\"`, which stores the same codes",
            option(file_type)
        );
        assert!(floats.contains(&advice), "{floats}");
        // The other matrices stay as in the file of floats.
        let format = option(file_type);
        let small = notes_with(&format, &["quantize", "--scheme", scheme, "--group-size", "32"]);
        assert!(small.contains("7 quantized weights written with the same codes"), "{small}");
        let weights = compress::Model::open(path.join("small.gguf")).unwrap().weights.by_name;
        let stored = ["lm_head.weight", "model.embed_tokens.weight"].map(|name| weights[name].describe_stored());
        assert_eq!(stored, ["f16", "f16"]);
    }
    let kept = notes(&["quantize", "--scheme", "W4A16", "--group-size", "32"]);
    assert!(kept.contains("7 quantized weights written with the same codes") && !kept.contains("quantized twice"), "{kept}");
    let twice = notes(&["quantize", "--scheme", "W8A16", "--group-size", "32"]);
    assert!(twice.contains("warning: small.gguf: 7 quantized weights dequantized"), "{twice}");
    assert!(twice.contains("the weights are quantized twice") && twice.contains("compress cast MODEL -o small.gguf --to f32"), "{twice}");
    assert!(!notes(&["cast", "--to", "f32"]).contains("quantized twice"));
    // The other direction: the last file has blocks of Q4_0.
    for pass in ["quantize small.gguf --group-size 32", "quantize-dynamic small.gguf"] {
        let again = data(path, &format!("{pass} -o again --force --json"))["notes"].to_string();
        let name = pass.split(' ').next().unwrap();
        assert!(again.contains(&format!("warning: {name}: the weights are quantized twice")) && again.contains("original checkpoint"), "{again}");
    }
    assert!(!data(path, "quantize wide -o again --force --json")["notes"].to_string().contains("quantized twice"));
    // The examples for a folder do not quantize it again either.
    fs::create_dir(path.join("single")).unwrap();
    fs::copy(path.join("small.gguf"), path.join("single/small.gguf")).unwrap();
    let examples = compress(&path.join("single"), "").stderr;
    assert!(examples.contains("compress cast small.gguf -o out/cast"), "{examples}");
}

#[test]
fn low_bit_floats_in_onnx_files_are_a_warning() {
    let folder = prepared();
    let found = notes(folder.path(), "quantize in -o out.onnx --scheme FP8-DYNAMIC");
    assert!(found.contains("warning: model.onnx: 14 low-bit float weights dequantized, so that they are not smaller"), "{found}");
    assert!(found.contains("use `quantize --scheme W4A16` or `quantize-dynamic`"), "{found}");
    assert!(!notes(folder.path(), "quantize in -o out.onnx --scheme W8A8").contains("low-bit float"));
}

/// Messages between two stages are printed too.
#[test]
fn messages_outside_of_a_stage_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    golden_model(path, "llama", &[("characters.json", "tokenizer.json")]);
    fs::write(path.join("prompts.txt"), "the cat\na red hat\nrain, rain\nour old barn\nmy big wet hat\nsmall drops\nno mat\nwe sat\n").unwrap();
    let run = compress(path, "draft in -o out --prompts prompts.txt --samples 12 --tokens 8 --time 1s --batch-size 4 --learning-rate 1e-3 --no-measure");
    assert!(run.code == 0 && run.stderr.contains("a training step takes"), "{}", run.stderr);
}

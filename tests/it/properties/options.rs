//! Property of options: every option of a pass or format changes the output, or is rejected. Options and
//! their values are read from the JSON schema of recipes, so that a new option is checked without a
//! change here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use compress::recipe::Recipe;
use compress::{Model, Pipeline};
use compress_engine::data::Data;
use serde_json::{Map, Value, json};

use crate::common::{DType, Desk, Tensor, contents, read, write};
use crate::properties::draws::{Draw, golden};

/// The JSON schema of recipes.
pub fn schema() -> Value {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_compress")).arg("schema").output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Names of passes (`Step`) or formats (`Export`).
pub fn names(schema: &Value, kind: &str) -> Vec<String> {
    let variants = schema["$defs"][kind]["oneOf"].as_array().unwrap();
    let properties = variants.iter().filter_map(|variant| variant["properties"].as_object());
    properties.flat_map(|properties| properties.keys().cloned()).collect()
}

/// Options with their schemas.
fn options(schema: &Value, kind: &str, name: &str) -> Map<String, Value> {
    let variants = schema["$defs"][kind]["oneOf"].as_array().unwrap();
    let variant = variants.iter().find_map(|variant| variant["properties"].get(name)).unwrap();
    resolved(schema, variant)["properties"].as_object().cloned().unwrap_or_default()
}

fn resolved<'s>(schema: &'s Value, value: &'s Value) -> &'s Value {
    value["$ref"].as_str().map_or(value, |reference| &schema["$defs"][reference.rsplit('/').next().unwrap()])
}

/// Values to try for an option, from its schema.
fn candidates(schema: &Value, option: &Value) -> Vec<Value> {
    let option = resolved(schema, option);
    let alternatives = ["oneOf", "anyOf"].iter().filter_map(|key| option[*key].as_array()).flatten();
    let mut values: Vec<Value> = alternatives.flat_map(|alternative| candidates(schema, alternative)).collect();
    values.extend(option.get("const").cloned());
    values.extend(option["enum"].as_array().into_iter().flatten().cloned());
    let types: Vec<&str> =
        option["type"].as_array().map_or_else(|| option["type"].as_str().into_iter().collect(), |all| all.iter().filter_map(Value::as_str).collect());
    for ty in types {
        match ty {
            "boolean" => values.extend([json!(true), json!(false)]),
            "integer" => values.extend(["minimum", "maximum"].iter().filter_map(|end| option.get(*end)).chain(&[1, 2, 3, 7, 16, 32].map(Value::from)).cloned()),
            "number" => values.extend([0.25, 0.5, 0.75, 1.0, 90.0].map(Value::from)),
            "array" => {
                values.extend([json!(["*mlp*", "*intermediate*"])]);
                values.extend(candidates(schema, &option["items"]).into_iter().map(|item| json!([item])));
            }
            "string" if option["const"].is_null() && option["enum"].is_null() => values.extend(["50%", "2:4", "4KB"].map(Value::from)),
            _ => {}
        }
    }
    values
}

/// Options that have an effect only with other options or after other passes, with these options and
/// passes. All other options must have an effect on their own.
fn context(name: &str, option: &str) -> (Value, Value) {
    let set = |options: Value| (options, json!([]));
    let after = |passes: Value| (json!({}), passes);
    match (name, option) {
        ("quantize-static", "percentile") => set(json!({ "observer": "percentile" })),
        ("quantize-dynamic", "group_size") => set(json!({ "granularity": "group" })),
        ("quantize", "damping" | "ordered" | "propagation" | "sweeps") => set(json!({ "method": "gptq" })),
        ("quantize", "guide") => set(json!({ "method": "gptq", "scheme": "W4A16" })),
        ("quantize", "correct") => set(json!({ "scheme": "W4A16", "group_size": 8 })),
        ("quantize", "iterations" | "batch") => set(json!({ "method": "autoround", "scheme": "W4A16" })),
        ("cast", "overflow") => set(json!({ "to": "f16" })),
        ("prune-structured", "minimum") => set(json!({ "amount": 0.9 })),
        ("distill", "on_policy" | "more_teachers") => set(json!({ "losses": { "soft": 1.0 } })),
        ("finetune" | "distill", "momentum") => set(json!({ "optimizer": "sgd" })),
        ("finetune" | "distill", "scales") => after(json!([{ "quantize-dynamic": {} }])),
        ("finetune" | "distill", "keep_zeros") => after(json!([{ "prune-unstructured": {} }])),
        ("dequantize", _) => after(json!([{ "quantize-dynamic": {} }])),
        ("safetensors", "layout") => after(json!([{ "quantize": { "scheme": "W8A16" } }])),
        ("onnx", "activations") => after(json!([{ "quantize-static": {} }])),
        ("onnx", "weight_only") => after(json!([{ "quantize": { "scheme": "W8A16" } }])),
        ("gguf", "importance" | "imatrix" | "write_imatrix") => set(json!({ "type": "Q4_0" })),
        ("search-structure", "learning_rate") => set(json!({ "steps": 16 })),
        ("prune-vocabulary", "text_column") => set(json!({ "keep": evaluation("labelled.csv") })),
        ("prune-vocabulary", "min_count") => set(json!({ "keep": evaluation("book.txt") })),
        ("onnx", "float16_weights") => after(json!([{ "cast": { "to": "f16" } }])),
        ("onnx", "tied_head") => after(json!([{ "quantize-dynamic": { "embeddings": true } }])),
        _ => set(json!({})),
    }
}

/// Values that cannot be generated from the schema.
fn special(name: &str, option: &str) -> Option<Vec<Value>> {
    Some(match (name, option) {
        ("quantize-static", "accuracy_goal") => vec![json!({ "min_cosine": 0.9999 })],
        ("prune-unstructured", "rules") => vec![json!([{ "targets": ["*mlp*"], "amount": 0.25 }])],
        ("quantize", "rules") => vec![json!([{ "targets": ["*mlp*"], "scheme": "W8A16" }]), json!([{ "targets": ["*mlp*"], "scheme": "W4A16-ASYM" }])],
        ("quantize", "correct") => vec![json!({ "rank": 2 })],
        ("decompose", "rules") => vec![json!([{ "targets": ["*mlp*"], "rank": 0.25 }])],
        ("gguf", "types") => vec![json!({ "blk.*.attn_q": "Q8_0" })],
        ("prune-structured", "target") => vec![json!({ "params": 0.7 })],
        ("search-structure", "limit") => vec![json!({ "layers": 0.6 }), json!({ "params": 4000 })],
        ("search-structure", "learning_rate") => vec![json!(1e-3), json!(1e-2)],
        ("search-structure", "widths") => vec![json!([0.5]), json!([0.25])],
        ("prune-vocabulary", "keep") => vec![json!(evaluation("book.txt"))],
        ("prune-vocabulary", "text_column") => vec![json!("label")],
        ("prune-vocabulary", "vocab_size") => vec![json!(35)],
        // The merged tokens are Latin.
        ("prune-vocabulary", "languages") => vec![json!(["el"])],
        ("finetune" | "distill", "adapter") => vec![json!({ "rank": 2 })],
        ("finetune" | "distill", "betas") => vec![json!([0.5, 0.9])],
        ("finetune" | "distill", "groups") => vec![json!([{ "targets": ["*mlp*"], "learning_rate": 0.001 }])],
        ("finetune" | "distill", "augment") => vec![json!({ "shift": 2 })],
        ("finetune" | "distill", "masking") => vec![json!({ "fraction": 0.5 })],
        ("distill", "more_teachers") => vec![json!([{ "model": golden("llama-grouped-tied") }])],
        ("distill", "on_policy") => vec![json!({ "fraction": 1.0, "prompt_tokens": 1 })],
        ("finetune" | "distill", "schedule") => vec![json!({ "kind": "constant" })],
        ("finetune", "losses") => vec![json!({ "hard": { "label_smoothing": 0.1 } })],
        ("distill", "losses") => vec![json!({ "hidden": 1.0 })],
        ("distill", "student") => vec![json!({ "layers": [0] }), json!({ "every": 2 })],
        ("distill", "teacher") => vec![json!(golden("llama-grouped-tied"))],
        // Patterns that match nothing are rejected, so there is one for each model.
        (_, "targets" | "ignore") => vec![json!(["*mlp*"]), json!(["layer1*"])],
        ("data", "text_column") => vec![json!("other"), json!(0)],
        ("data", "pair_column") => vec![json!(2)],
        ("data", "label_column") => vec![json!("other")],
        ("data", "delimiter") => vec![json!(";")],
        ("data", "inputs") => vec![json!({ "input_ids": "ids", "attention_mask": "mask", "token_type_ids": "kinds" })],
        ("data", "resize") => vec![json!([20, 16])],
        ("data", "crop") => vec![json!([8, 8])],
        ("data", "rescale" | "std") => vec![json!(0.5)],
        ("data", "mean") => vec![json!(0.25)],
        _ => return None,
    })
}

/// Options for which these models and data accept no value, and the reason.
const REFUSED: [(&str, &str, &str); 13] = [
    ("finetune", "masking", "needs a masked language model, which tests/it/training_data.rs trains"),
    ("distill", "masking", "needs a masked language model, which tests/it/training_data.rs trains"),
    ("distill", "augment", "the teacher reads texts: tests/it/train.rs"),
    ("finetune", "classes", "needs a model without a head, which tests/it/train.rs trains"),
    ("finetune", "labels", "needs a model without a head, which tests/it/train.rs trains"),
    ("distill", "teacher_top", "needs a folder of cached outputs, whose contents tests/it/train.rs compares"),
    ("distill", "teacher_logits", "needs the responses of a teacher: tests/it/teacher_files.rs"),
    ("data", "negative_column", "is for `task: contrastive` in training: tests/it/contrastive.rs"),
    ("data", "mix", "excludes `text`, `images` and `arrays`: tests/it/training_data.rs"),
    ("data", "weight", "is for texts of `mix`: tests/it/training_data.rs"),
    ("data", "labels", "is for IDX files, which unit tests of crates/engine/src/data/idx.rs read"),
    ("gguf", "imatrix", "needs a file for the model, which tests/it/gguf/quantizer.rs reads"),
    ("evaluate", "runtime", "needs ONNX Runtime for another value than the default: tests/it/cli/commands/evaluation.rs"),
];

/// Options of data and evaluation that do not affect scores, and the reason.
const WITHOUT_EFFECT: [(&str, &str); 6] = [
    ("batch_size", "samples are independent of each other"),
    ("packing", "is for training data: tests/it/training_data.rs"),
    ("layout", "a model supports images in one layout, and the other layout is rejected"),
    ("source", "names a source that a program has registered"),
    ("metric", "names a metric that a program has registered"),
    ("benchmark", "names the data on the Hub: tests/it/cards.rs"),
];

/// Options that every run of a pass on the small models needs, except those that exclude an option.
fn base(name: &str, option: &str) -> Value {
    let mut base = required(name);
    let excluded = [("target", "amount"), ("epochs", "max_steps")].into_iter().filter(|(given, _)| *given == option);
    excluded.for_each(|(_, excluded)| drop(base.as_object_mut().unwrap().remove(excluded)));
    base
}

fn required(name: &str) -> Value {
    match name {
        "prune-structured" => json!({ "amount": 0.5, "round_to": 2 }),
        // Some neurons must be removed.
        "search-structure" => json!({ "limit": { "layers": 0.4 }, "round_to": 2 }),
        "prune-vocabulary" => json!({ "vocab_size": 36 }),
        "quantize" => json!({ "scheme": "W8A16" }),
        "finetune" => json!({ "max_steps": 3, "batch_size": 2, "learning_rate": 0.01 }),
        "distill" => json!({ "max_steps": 3, "batch_size": 2, "learning_rate": 0.01, "teacher": golden("llama") }),
        _ => json!({}),
    }
}

/// Options of the execution and logging of training, and of additional measurements, which must not change
/// the weights.
const HOW: [&str; 13] = [
    "baselines",
    "checkpoint_every",
    "evaluate_every",
    "final_checkpoint",
    "patience",
    "gradient_checkpointing",
    "keep_checkpoints",
    "logs",
    "memory_limit",
    "offload",
    "shard",
    "shard_optimizer",
    "teacher_cache",
];

/// A file of the evaluation data.
fn evaluation(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation").join(name)
}

/// The tokenizer of single characters, with merges.
fn merging_tokenizer() -> Value {
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(evaluation("characters.json")).unwrap()).unwrap();
    let merges = ["a t", "h at", "o n", "r e", "re d", "i n", "o u", "ou r", "a n", "s at"];
    for merge in merges {
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocabulary.insert(merge.replace(' ', ""), json!(vocabulary.len()));
    }
    tokenizer["model"]["merges"] = json!(merges);
    tokenizer
}

/// Models for the options: a decoder with a tied head and a tokenizer, a convolutional network with a value
/// outside the range of float16, and a decoder with rows of complete GGUF blocks; with calibration and
/// training data.
fn models() -> Vec<(Draw, [Data; 2])> {
    let [decoder, images] = ["llama-grouped-tied", "torchvision-resnet18"].map(|name| Draw::family(1, name));
    for file in contents(&images.path).keys().filter(|file| file.ends_with(".safetensors")) {
        let path = images.path.join(file);
        let mut weights = read(&path);
        if let Some(variance) = weights.get_mut("bn1.running_var") {
            let values: Vec<f64> = variance.values().into_iter().enumerate().map(|(channel, value)| if channel == 0 { 1e5 } else { value }).collect();
            *variance = Tensor::floats(DType::F32, &variance.shape.clone(), &values);
        }
        write(&path, &weights);
    }
    std::fs::write(decoder.path.join("tokenizer.json"), merging_tokenizer().to_string()).unwrap();
    let blocks = Draw::family(2, "llama-grouped-tied");
    let path = blocks.desk.pico(DType::F32, 1);
    std::fs::remove_file(path.join("tokenizer.json")).unwrap();
    std::fs::remove_dir_all(path.join("1_Pooling")).unwrap();
    let config = path.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replacen('{', "{ \"max_position_embeddings\": 64, ", 1);
    std::fs::write(config, text).unwrap();
    let models = [decoder, images, Draw { path, ..blocks }].into_iter().map(|draw| {
        let mut samples = draw.samples(6, 3);
        let calibration = draw.data(&samples);
        let train = if samples.contains_key("pixel_values") {
            samples.insert("labels".into(), candle_core::Tensor::new(&[0i64, 1, 2, 3, 4, 0], &candle_core::Device::Cpu).unwrap());
            draw.data(&samples)
        } else {
            Data { task: Some(compress_engine::data::Task::LanguageModelling), ..calibration.clone() }
        };
        (draw, [calibration, Data { batch_size: None, ..train }])
    });
    models.collect()
}

type Files = BTreeMap<String, Vec<u8>>;

/// The output of a pass or a format, or its error message.
fn run((draw, [calibration, train]): &(Draw, [Data; 2]), kind: &str, first: &Value, entry: Value) -> Result<Files, String> {
    let mut passes = first.as_array().unwrap().clone();
    let exports = if kind == "Export" { json!([entry]) } else { json!([]) };
    if kind == "Step" {
        passes.push(entry);
    }
    let with = |builder: compress::pipeline::Builder| builder.calibration(calibration.clone()).train(train.clone());
    draw.run(passes.into(), exports, with).map(|written| written.files()).map_err(|error| error.to_string())
}

fn merged(values: &[&Value]) -> Value {
    let mut all = Map::new();
    values.iter().for_each(|value| all.extend(value.as_object().unwrap().clone()));
    all.into()
}

#[test]
fn every_option_changes_the_output_or_is_rejected() {
    let (schema, every) = (schema(), models());
    let mut without_effect = Vec::new();
    for kind in ["Step", "Export"] {
        for name in names(&schema, kind) {
            // Only GGUF needs rows of complete blocks.
            let models = if name == "gguf" { &every[2..] } else { &every[..2] };
            for (option, described) in options(&schema, kind, &name).iter().filter(|(option, _)| !HOW.contains(&option.as_str())) {
                let (context, first) = context(&name, option);
                let reference = merged(&[&base(&name, option), &context]);
                let before: Vec<_> = models.iter().map(|model| run(model, kind, &first, json!({ &name: reference }))).collect();
                let values = special(&name, option).unwrap_or_else(|| candidates(&schema, described));
                let (mut accepted, mut acts) = (0, false);
                for (value, (model, before)) in values.iter().flat_map(|value| models.iter().zip(&before).map(move |pair| (value, pair))) {
                    let given = merged(&[&reference, &json!({ option: value })]);
                    // A rejected value only shows that the option is parsed.
                    if let Ok(files) = run(model, kind, &first, json!({ &name: given })) {
                        accepted += 1;
                        acts |= before.as_ref() != Ok(&files);
                    }
                    if acts {
                        break;
                    }
                }
                without_effect.extend(complaint(&name, option, &values, accepted, acts));
            }
        }
    }
    assert!(without_effect.is_empty(), "{without_effect:#?}");
}

/// The violation of an option, given the number of accepted values and whether any had an effect.
fn complaint(name: &str, option: &str, values: &[Value], accepted: usize, acts: bool) -> Option<String> {
    let is_listed = REFUSED.iter().any(|(pass, refused, _)| (*pass, *refused) == (name, option));
    match (accepted, acts) {
        (0, _) if is_listed => None,
        (0, _) => Some(format!("{name}.{option}: every value was refused: {values:?}")),
        (_, true) if is_listed => Some(format!("{name}.{option} is listed as refused and acts")),
        (_, true) => None,
        (_, false) => Some(format!("{name}.{option} changes nothing with {values:?}")),
    }
}

/// Models with evaluation data: labelled texts, pairs with scores, texts and chats for a decoder, images,
/// and arrays under other names.
fn scored(desk: &Desk) -> Vec<(PathBuf, Value)> {
    let evaluation = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation");
    let model = |name: &str, extra: &str, called: &str| {
        let path = desk.place();
        for (file, bytes) in contents(&golden(name)).into_iter().filter(|(file, _)| !file.starts_with("golden")) {
            std::fs::create_dir_all(path.join(&file).parent().unwrap()).unwrap();
            std::fs::write(path.join(file), bytes).unwrap();
        }
        std::fs::copy(evaluation.join(extra), path.join(called)).unwrap();
        path
    };
    let classifier = model("bert-sequence-classification", "word-pieces.json", "tokenizer.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(classifier.join("config.json")).unwrap()).unwrap();
    // Class names that are indices of other classes, so that the kind of labels has an effect.
    config["id2label"] = json!({ "0": "1", "1": "2", "2": "0" });
    config["label2id"] = json!({ "1": 0, "2": 1, "0": 2 });
    std::fs::write(classifier.join("config.json"), config.to_string()).unwrap();
    let texts = desk.place().with_extension("csv");
    let line = |row: u8| format!("\"bad cab {}\",{},{}\n", char::from(b'a' + row), u8::from(row >= 6), 1 + u8::from(row >= 6));
    std::fs::write(&texts, format!("text,label,other\n{}", (0..9).map(line).collect::<String>())).unwrap();
    let arrays = desk.place().with_extension("safetensors");
    let whole = |shape: &[usize], value: &dyn Fn(usize) -> i64| {
        let values = (0..shape.iter().product()).flat_map(|at| value(at).to_le_bytes());
        Tensor::new(DType::I64, shape, values.collect())
    };
    let rows = [("ids", whole(&[6, 7], &|at| 3 + (at * 5 % 30) as i64)), ("mask", whole(&[6, 7], &|_| 1)), ("kinds", whole(&[6, 7], &|_| 0))];
    let labels = ("labels", whole(&[6], &|at| (at % 3) as i64));
    write(&arrays, &rows.into_iter().chain([labels]).map(|(name, tensor)| (name.to_owned(), tensor)).collect());
    let decoder = model("llama", "characters.json", "tokenizer.json");
    std::fs::copy(evaluation.join("special.json"), decoder.join("tokenizer_config.json")).unwrap();
    std::fs::copy(evaluation.join("chat_template.jinja"), decoder.join("chat_template.jinja")).unwrap();
    // Rows of the same width, so that the first one can be a header.
    let pairs = desk.place().with_extension("tsv");
    let lines = std::fs::read_to_string(evaluation.join("pairs.tsv")).unwrap();
    let row = |line: &str| line.split('\t').take(3).collect::<Vec<_>>().join("\t") + "\n";
    std::fs::write(&pairs, lines.lines().map(row).collect::<String>()).unwrap();
    // Columns with both delimiters.
    let columns = desk.place().with_extension("csv");
    std::fs::write(&columns, format!("one;two,three;four\n{}", "bad cab;dab,fee;gab\n".repeat(4))).unwrap();
    vec![
        (decoder.clone(), json!({ "text": columns, "text_column": 0, "max_length": 16 })),
        (classifier.clone(), json!({ "text": texts, "label_column": "label", "label_kind": "index" })),
        (
            model("sentence-mean", "word-pieces.json", "tokenizer.json"),
            json!({ "text": pairs, "header": false, "text_column": 1, "pair_column": 2, "label_column": 0 }),
        ),
        (decoder.clone(), json!({ "text": evaluation.join("book.txt"), "max_length": 16, "samples": 4 })),
        (decoder.clone(), json!({ "text": evaluation.join("answers.jsonl"), "max_length": 16 })),
        (decoder, json!({ "text": texts, "text_column": "text" })),
        (model("resnet-basic", "resnet-basic.json", "preprocessor_config.json"), json!({ "images": evaluation.join("images") })),
        (classifier, json!({ "arrays": arrays })),
    ]
}

/// The scores of a run with evaluation data, and whether latency was measured.
fn scores(desk: &Desk, model: &Path, data: &Value, evaluate: &Value) -> Result<(Value, bool), String> {
    let recipe = json!({ "model": model, "passes": [{ "cast": { "to": "bf16" } }], "data": { "evaluation": data }, "evaluate": evaluate }).to_string();
    let recipe = Recipe::parse(&recipe, Path::new("recipe.yaml")).map_err(|error| error.to_string())?;
    let pipeline = Pipeline::builder().recipe(&recipe).threads(2).measure(false).build().map_err(|error| error.to_string())?;
    let report = pipeline.run(Model::open(model).unwrap(), desk.place()).map_err(|error| error.to_string())?;
    Ok((serde_json::to_value(&report.accuracy).unwrap(), report.latency.is_some()))
}

#[test]
fn every_option_of_data_and_evaluation_changes_the_scores_or_is_rejected() {
    let (schema, desk) = (schema(), Desk::new());
    let (sets, plain) = (scored(&desk), json!({ "runtime": ["candle"], "latency": false }));
    let before: Vec<_> = sets.iter().map(|(model, data)| scores(&desk, model, data, &plain)).collect();
    assert_eq!(before.iter().filter(|before| before.is_ok()).count(), 7, "{before:?}");
    let mut wrong = Vec::new();
    for (name, kind) in [("data", "Data"), ("evaluate", "Evaluate")] {
        for (option, described) in schema["$defs"][kind]["properties"].as_object().unwrap() {
            let is_data = name == "data" && ["text", "images", "arrays"].contains(&option.as_str());
            if is_data || WITHOUT_EFFECT.iter().any(|(listed, _)| listed == option) {
                continue;
            }
            let values = special(name, option).unwrap_or_else(|| candidates(&schema, described));
            let (mut accepted, mut acts) = (0, false);
            for (value, ((model, data), before)) in values.iter().flat_map(|value| sets.iter().zip(&before).map(move |set| (value, set))) {
                let given = json!({ option: value });
                let (data, evaluate) = if name == "data" { (merged(&[data, &given]), plain.clone()) } else { (data.clone(), merged(&[&plain, &given])) };
                let found = scores(&desk, model, &data, &evaluate);
                let is_default = name == "evaluate" && plain.get(option) == Some(value);
                accepted += usize::from(found.is_ok() && !is_default);
                acts |= found.is_ok() && found != *before;
                if acts {
                    break;
                }
            }
            wrong.extend(complaint(name, option, &values, accepted, acts));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A changed default changes the result of every recipe that does not specify the option.
#[test]
fn defaults_are_those_of_the_golden_file() {
    let schema = schema();
    let mut found: BTreeMap<String, BTreeMap<String, Value>> = BTreeMap::new();
    for (kind, name) in ["Step", "Export"].into_iter().flat_map(|kind| names(&schema, kind).into_iter().map(move |name| (kind, name))) {
        let defaults = options(&schema, kind, &name).into_iter().filter_map(|(option, described)| Some((option, described.get("default")?.clone())));
        found.insert(name, defaults.collect());
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/option-defaults.json");
    if std::env::var_os("COMPRESS_ACCEPT").is_some() {
        std::fs::write(&path, serde_json::to_string_pretty(&found).unwrap() + "\n").unwrap();
    }
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(json!(found), golden);
}

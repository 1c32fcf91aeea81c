//! The law of options: every option of a pass or format changes the output, or is refused. Options and their values are read from the JSON
//! schema of recipes, so that a new option is checked without a change here.

use std::collections::BTreeMap;

use compress::data::Data;
use serde_json::{Map, Value, json};

use crate::common::{DType, Tensor, contents, read, write};
use crate::draws::{Draw, golden};

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

/// Options that act together with others, or on results of other passes: what has to be set, and the passes that run first. Options that
/// are not listed must act without a context.
fn context(name: &str, option: &str) -> (Value, Value) {
    let set = |options: Value| (options, json!([]));
    let after = |passes: Value| (json!({}), passes);
    match (name, option) {
        ("quantize-static", "percentile") => set(json!({ "observer": "percentile" })),
        ("quantize-dynamic", "group_size") => set(json!({ "granularity": "group" })),
        ("quantize", "damping" | "ordered") => set(json!({ "method": "gptq" })),
        ("cast", "overflow") => set(json!({ "to": "f16" })),
        ("prune-structured", "minimum") => set(json!({ "amount": 0.9 })),
        ("finetune" | "distill", "momentum") => set(json!({ "optimizer": "sgd" })),
        ("finetune" | "distill", "scales") => after(json!([{ "quantize-dynamic": {} }])),
        ("finetune" | "distill", "keep_zeros") => after(json!([{ "prune-unstructured": {} }])),
        ("dequantize", _) => after(json!([{ "quantize-dynamic": {} }])),
        ("safetensors", "layout") => after(json!([{ "quantize": { "scheme": "W8A16" } }])),
        ("onnx", "activations") => after(json!([{ "quantize-static": {} }])),
        ("onnx", "weight_only") => after(json!([{ "quantize": { "scheme": "W8A16" } }])),
        ("gguf", "importance") => set(json!({ "type": "Q4_0" })),
        ("onnx", "tied_head") => after(json!([{ "quantize-dynamic": { "embeddings": true } }])),
        _ => set(json!({})),
    }
}

/// Values that a schema describes too loosely to be drawn.
fn special(name: &str, option: &str) -> Option<Value> {
    Some(match (name, option) {
        ("quantize-static", "accuracy_goal") => json!({ "min_cosine": 0.9999 }),
        ("prune-unstructured", "rules") => json!([{ "targets": ["*mlp*"], "amount": 0.25 }]),
        ("decompose", "rules") => json!([{ "targets": ["*mlp*"], "rank": 0.25 }]),
        ("prune-structured", "target") => json!({ "params": 0.7 }),
        ("finetune" | "distill", "schedule") => json!({ "kind": "constant" }),
        (_, "targets" | "ignore") => json!(["*mlp*", "layer1*"]),
        _ => return None,
    })
}

/// Options that every run of a pass on the small models needs.
fn base(name: &str) -> Value {
    match name {
        "prune-structured" => json!({ "amount": 0.5, "round_to": 2 }),
        "quantize" => json!({ "scheme": "W8A16" }),
        "finetune" => json!({ "max_steps": 3, "batch_size": 2, "learning_rate": 0.01 }),
        "distill" => json!({ "max_steps": 3, "batch_size": 2, "learning_rate": 0.01, "teacher": golden("llama") }),
        _ => json!({}),
    }
}

/// Options that choose how training is run and what it logs, and must not change the weights.
const HOW: [&str; 10] = [
    "checkpoint_every",
    "evaluate_every",
    "patience",
    "gradient_checkpointing",
    "logs",
    "memory_limit",
    "offload",
    "shard",
    "shard_optimizer",
    "teacher_cache",
];

/// Models that options act on: a decoder with a tied head, a network of convolutions with a value that float16 cannot hold, and a decoder
/// whose rows are whole blocks of GGUF.
fn models() -> Vec<(Draw, Data)> {
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
    let blocks = Draw::family(2, "llama-grouped-tied");
    let path = blocks.desk.pico(DType::F32, 1);
    std::fs::remove_file(path.join("tokenizer.json")).unwrap();
    std::fs::remove_dir_all(path.join("1_Pooling")).unwrap();
    let models = [decoder, images, Draw { path, ..blocks }].into_iter().map(|draw| {
        let data = draw.data(&draw.samples(6, 3));
        (draw, data)
    });
    models.collect()
}

type Files = BTreeMap<String, Vec<u8>>;

/// The output of a pass or a format, or the message that refuses it.
fn run((draw, data): &(Draw, Data), kind: &str, first: &Value, entry: Value) -> Result<Files, String> {
    let mut passes = first.as_array().unwrap().clone();
    let exports = if kind == "Export" { json!([entry]) } else { json!([]) };
    if kind == "Step" {
        passes.push(entry);
    }
    let with = |builder: compress::pipeline::Builder| builder.calibration(data.clone()).train(data.clone());
    draw.run(passes.into(), exports, with).map(|written| written.files()).map_err(|error| error.to_string())
}

fn merged(values: &[&Value]) -> Value {
    let mut all = Map::new();
    values.iter().for_each(|value| all.extend(value.as_object().unwrap().clone()));
    all.into()
}

#[test]
fn every_option_changes_the_output_or_is_refused() {
    let (schema, every) = (schema(), models());
    let mut without_effect = Vec::new();
    for kind in ["Step", "Export"] {
        for name in names(&schema, kind) {
            // Only GGUF needs rows of whole blocks.
            let models = if name == "gguf" { &every[2..] } else { &every[..2] };
            for (option, described) in options(&schema, kind, &name).iter().filter(|(option, _)| !HOW.contains(&option.as_str())) {
                let (context, first) = context(&name, option);
                let reference = merged(&[&base(&name), &context]);
                let before: Vec<_> = models.iter().map(|model| run(model, kind, &first, json!({ &name: reference }))).collect();
                let values = special(&name, option).map_or_else(|| candidates(&schema, described), |value| vec![value]);
                let (mut accepted, mut acts) = (0, false);
                for (value, (model, before)) in values.iter().flat_map(|value| models.iter().zip(&before).map(move |pair| (value, pair))) {
                    let given = merged(&[&reference, &json!({ option: value })]);
                    // A value that is refused shows only that it is parsed.
                    if let Ok(files) = run(model, kind, &first, json!({ &name: given })) {
                        accepted += 1;
                        acts |= before.as_ref() != Ok(&files);
                    }
                    if acts {
                        break;
                    }
                }
                if accepted > 0 && !acts {
                    without_effect.push(format!("{name}.{option} with {values:?}"));
                }
            }
        }
    }
    assert!(without_effect.is_empty(), "options that change nothing: {without_effect:#?}");
}

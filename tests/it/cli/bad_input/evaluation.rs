//! Data that does not match the model, and invalid data.

use std::fs;
use std::path::Path;

use super::{Case, case, check};
use crate::cli::commands::evaluation::classifier;
use crate::cli::support::{METADATA, file, floats, golden_model, model};

fn with(name: &'static str, change: impl Fn(&Path) + 'static, args: &'static str, code: i32, message: &'static str, hint: &'static str) -> Case {
    let make = move |folder: &Path| {
        classifier(folder);
        change(folder);
    };
    case(name, make, args, code, message, hint)
}

/// Replaces text in the classifier's configuration.
fn config(from: &'static str, to: &'static str) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("in/config.json");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(path, text.replace(from, to)).unwrap();
    }
}

const EVAL: &str = "eval in --data labelled.csv --label-column label";

#[test]
fn data_that_is_wrong() {
    let nothing = |_: &Path| ();
    check([
        with("no data", nothing, "eval in", 2, "eval: no data: specify samples with --data", ""),
        with("a missing file", nothing, "eval in --data nowhere.csv --label-column label", 1, "cannot open nowhere.csv", ""),
        with("a missing file that no pass reads", nothing, "cast in -o out --calibration nowhere.csv", 1, "cannot open nowhere.csv", ""),
        with(
            "a wrong column",
            nothing,
            "eval in --data labelled.csv --label-column class",
            2,
            "labelled.csv has no column `class`; the columns are `id`, `text`, `label`",
            "",
        ),
        with("no labels", nothing, "eval in --data labelled.csv", 2, "no labels: specify a model to compare with by `--against`", ""),
        with(
            "an unknown device",
            nothing,
            "eval in --data labelled.csv --label-column label --device gpu",
            2,
            "`gpu` is not one of auto, cpu, cuda, cuda:N",
            "",
        ),
        with(
            "a precision for another runtime",
            nothing,
            "eval in --data labelled.csv --label-column label --against other.onnx --precision bf16",
            2,
            "`--precision` applies only to the built-in executor, but ONNX Runtime runs one of these models",
            "",
        ),
        case(
            "a mean of bytes for arrays that are scaled to 0 to 1",
            |folder| {
                golden_model(folder, "resnet-basic", &[]);
                file(&folder.join("pixels.safetensors"), METADATA, &[floats("pixel_values", &[2, 3, 32, 32])]);
            },
            "eval in --against in --arrays pixels.safetensors --rescale 0.00392156862745098 --mean 123.675",
            2,
            "`mean` is 123.675, but `rescale` 0.003922 scales pixels to 0 to 1",
            "",
        ),
        with("two kinds", nothing, "eval in --text labelled.csv --images x", 2, "exactly one of `text`, `images`, `arrays`, `source` and `mix`", ""),
        with("an empty file", |folder| fs::write(folder.join("labelled.csv"), "text,label\n").unwrap(), EVAL, 1, "labelled.csv: contains no samples", ""),
        with(
            "no tokenizer",
            |folder| fs::remove_file(folder.join("in/tokenizer.json")).unwrap(),
            EVAL,
            1,
            "in: text data for a model without tokenizer.json is not supported",
            "save_pretrained",
        ),
        with("a broken tokenizer", |folder| fs::write(folder.join("in/tokenizer.json"), "{").unwrap(), EVAL, 1, "in/tokenizer.json: ", ""),
        with(
            "a recipe without data",
            |folder| fs::write(folder.join("recipe.yaml"), "model: in\nevaluate: {}\n").unwrap(),
            "run recipe.yaml -o out",
            2,
            "evaluate: needs samples: add `data: { evaluation: ... }`",
            "",
        ),
        with(
            "a recipe whose data does not fit",
            |folder| fs::write(folder.join("recipe.yaml"), "model: in\ndata: { evaluation: { text: labelled.csv, label_column: x } }\n").unwrap(),
            "run recipe.yaml -o out",
            2,
            "no column `x`",
            "",
        ),
        with(
            "a runtime without its file",
            |folder| {
                fs::write(
                    folder.join("recipe.yaml"),
                    "model: in\ndata: { evaluation: { text: labelled.csv, label_column: label } }\nevaluate: { runtime: [onnxruntime] }\n",
                )
                .unwrap()
            },
            "run recipe.yaml -o out",
            2,
            "needs `onnx` among the exports",
            "",
        ),
        with(
            "a precision for another runtime, in a recipe",
            |folder| {
                let recipe =
                    "model: in\ndata: { evaluation: { text: labelled.csv, label_column: label } }\nevaluate: { runtime: [onnxruntime], precision: bf16 }\n";
                fs::write(folder.join("recipe.yaml"), recipe).unwrap();
            },
            "run recipe.yaml -o out",
            2,
            "evaluate: `precision` applies only to the built-in executor",
            "",
        ),
    ]);
}

#[test]
fn models_that_are_wrong() {
    check([
        with("an unknown family", config("\"model_type\": \"bert\"", "\"model_type\": \"bort\""), EVAL, 1, "`bort`… is not supported", "bert"),
        with("a missing field", config("\"hidden_size\": 16,", ""), EVAL, 1, "hidden_size", ""),
        with("a contradiction", config("\"num_attention_heads\": 2", "\"num_attention_heads\": 3"), EVAL, 1, "16… 3", ""),
        with(
            "weights of other shapes",
            config("\"intermediate_size\": 28", "\"intermediate_size\": 30"),
            EVAL,
            1,
            "`bert.encoder.layer.0.intermediate.dense.weight`: has shape [28, 16], but the configuration requires [30, 16]",
            "config.json does not belong to these weights",
        ),
        case(
            "tokens out of range",
            |folder| {
                classifier(folder);
                let path = folder.join("in/tokenizer.json");
                let text = fs::read_to_string(&path).unwrap();
                fs::write(path, text.replace("\"a\":5", "\"a\":500").replace("\"a\": 5", "\"a\": 500")).unwrap();
            },
            EVAL,
            1,
            "input `input_ids`: contains 500 at row 3, column 1; `bert.embeddings.word_embeddings.weight` has 48 rows",
            "the tokenizer does not belong to this model",
        ),
        case(
            "a bare file",
            |folder| model(&folder.join("in")),
            "eval in/model.safetensors --data in/model.safetensors",
            1,
            "running a model without graph.json and without a model_type in config.json is not supported",
            "describe the model in a graph.json",
        ),
        case("a picture for a text model", |folder| golden_model(folder, "bert", &[]), "eval in --images in", 2, "image data supports only one", ""),
    ]);
}

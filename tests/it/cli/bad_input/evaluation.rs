//! Data that does not match the model, and invalid data.

use std::fs;
use std::path::Path;

use super::{Case, case, check};
use crate::cli::commands::evaluation::classifier;
use crate::cli::support::{METADATA, command, file, floats, golden_model, model};

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
        with("no labels", nothing, "eval in --data labelled.csv", 2, "no labels are selected: specify `--task`", ""),
        with(
            "another format",
            |folder: &Path| fs::write(folder.join("x.parquet"), "PAR1").unwrap(),
            "eval in --data x.parquet",
            2,
            "x.parquet`: files with the extension .parquet are not read: convert it",
            "",
        ),
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
        with(
            "token ids of models that number tokens differently",
            |folder| {
                for name in ["config.json", "model.safetensors", "tokenizer.json"] {
                    fs::create_dir_all(folder.join("other")).unwrap();
                    fs::copy(folder.join("in").join(name), folder.join("other").join(name)).unwrap();
                }
                let path = folder.join("other/tokenizer.json");
                let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                let ids = tokenizer["model"]["vocab"].as_object_mut().unwrap();
                let most = ids.len() - 1;
                ids.values_mut().filter(|id| id.as_u64().unwrap() > 40).for_each(|id| *id = (most - id.as_u64().unwrap() as usize + 41).into());
                fs::write(path, tokenizer.to_string()).unwrap();
                let ids = candle_core::Tensor::new(&[[1i64, 2], [1, 1]], &candle_core::Device::Cpu).unwrap();
                let arrays = ["input_ids", "attention_mask", "token_type_ids"].map(|name| (name, ids.clone())).into();
                candle_core::safetensors::save(&arrays, folder.join("ids.safetensors")).unwrap();
            },
            "eval in --against other --arrays ids.safetensors",
            2,
            "--arrays: contains token ids, which are other tokens in other: use texts",
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
    ]);
}

#[test]
fn data_of_another_kind() {
    let text_model = |folder: &Path| {
        golden_model(folder, "bert", HEADLESS);
        fs::create_dir(folder.join("empty")).unwrap();
        for (file, text) in [("texts/a.raw", "a cat\n"), ("texts/b.txt", "a dog\n"), ("images/a.png", ""), ("other/a.json", "{}"), ("table.txt", "a\tb\n")] {
            fs::create_dir_all(folder.join(file).parent().unwrap()).unwrap();
            fs::write(folder.join(file), text).unwrap();
        }
    };
    let text = |name, args, message| case(name, text_model, args, 2, message, "");
    let image =
        |name, args, code, message, hint| case(name, |folder| golden_model(folder, "resnet-basic", &[("book.txt", "../book.txt")]), args, code, message, hint);
    check([
        text("images for a text model", "eval in --images images", "images: is specified as images, but this is a text model (inputs `input_ids`"),
        text("a folder of images", "quantize-static in -o out --calibration images", "but this is a text model…specify a file of texts (.txt, .raw, .csv"),
        text(
            "a name of a data set",
            "quantize-static in -o out --calibration wikitext",
            "'wikitext' for '--calibration…`wikitext` does not exist: data sets are not downloaded",
        ),
        text("an empty folder", "quantize-static in -o out --calibration empty", "the folder `empty` is empty"),
        text(
            "a file of another kind",
            "quantize-static in -o out --calibration in/config.json",
            "`in/config.json`: files with the extension .json are not read: convert it",
        ),
        text(
            "a folder of texts",
            "quantize-static in -o out --calibration texts",
            "`texts` is a folder of texts…like texts/a.raw…{ mix: [{ text: texts/a.raw }",
        ),
        text("a folder of other files", "quantize-static in -o out --calibration other", "the folder `other` contains neither images nor arrays (.safetensors"),
        case("images that do not exist", text_model, "eval in --images nowhere", 1, "cannot open nowhere: No such file", ""),
        case(
            "a head that the model lacks",
            text_model,
            "eval in --data book.txt --task language-modelling --max-length 8",
            2,
            "needs a language-model head, but this model has none…use the task `embedding` or `fidelity`",
            "",
        ),
        case("text of a model without a decoder", text_model, "generate in --prompt a", 1, "`bert` are not decoders", "choose a language model with a decoder"),
        image("text for an image model", "eval in --data book.txt", 2, "book.txt: contains texts, but this is an image model (input `pixel_values`", ""),
        image("text of an image model", "generate in --prompt a", 1, "are not decoders", "choose a language model with a decoder"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    text_model(folder.path());
    let run = |data: &str| {
        let output = command(folder.path()).args(["quantize-static", "in", "-o", "out", "--calibration", data]).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let braces = run("text: texts/b.txt, samples: 4");
    assert!(braces.contains("options need braces: write '{ text: texts/b.txt, samples: 4 }'"), "{braces}");
    let output =
        command(folder.path()).args(["eval", "in", "--against", "in", "--data", "table.txt", "--delimiter", "\t", "--header", "false"]).output().unwrap();
    let columns = String::from_utf8(output.stderr).unwrap();
    assert!(columns.contains("table.txt: specify the number of the column of texts, which is counted from 0, as in `text_column: 0`"), "{columns}");
}

const HEADLESS: &[(&str, &str)] = &[("word-pieces.json", "tokenizer.json"), ("book.txt", "../book.txt")];

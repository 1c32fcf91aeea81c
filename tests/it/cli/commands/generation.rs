//! `generate`, on a tiny Llama whose tokens are letters.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::support::{compress, data, golden_model, ok, read_json};

fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json")]);
    folder
}

/// Changes keys of a JSON file.
fn set(path: &Path, keys: Value) {
    let mut values = if path.is_file() { read_json(path) } else { json!({}) };
    values.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    fs::write(path, values.to_string()).unwrap();
}

#[test]
fn prompts_are_continued() {
    let folder = prepared();
    set(&folder.path().join("in/config.json"), json!({ "eos_token_id": null }));
    let run = ok(folder.path(), "generate in --prompt ab --prompt c --tokens 5");
    assert!(run.stdout.starts_with("in: greedy decoding, at most 5 tokens\n\n> ab\n"), "{}", run.stdout);
    for part in ["\n> c\n", "in, 5 tokens", "tokens per second", "note: in: neither generation_config.json nor config.json has an `eos_token_id`"] {
        assert!(run.stdout.contains(part), "{part}:\n{}", run.stdout);
    }
    let found = data(folder.path(), "generate in --prompt ab --prompt c --tokens 5 --json");
    let [one, other] = [0, 1].map(|index| found["prompts"][index].clone());
    // The tokenizer adds `<s>` and a space before texts.
    assert_eq!((&one["prompt"], &one["prompt_tokens"], &other["prompt_tokens"]), (&json!("ab"), &json!([1, 3, 4, 5]), &json!([1, 3, 6])));
    assert_eq!((one["continuation"]["tokens"].as_array().unwrap().len(), &one["continuation"]["end"], &one["against"]), (5, &json!("tokens"), &Value::Null));
    assert!(found["speed"]["prefill"].as_f64().unwrap() > 0.0 && found["speed"]["decode"].as_f64().unwrap() > 0.0);
    // Sampling is determined by the seed.
    let drawn =
        |seed: &str| data(folder.path(), &format!("generate in --prompt ab --tokens 8 --temperature 2 --top-k 30 --seed {seed} --json"))["prompts"].clone();
    assert_eq!(drawn("3"), drawn("3"));
    assert_ne!(drawn("3"), drawn("4"));
    // A text ends with the end-of-text token.
    let first = one["continuation"]["tokens"][0].clone();
    set(&folder.path().join("in/generation_config.json"), json!({ "eos_token_id": [first], "repetition_penalty": 1.3 }));
    let ended = data(folder.path(), "generate in --prompt ab --json");
    assert_eq!((&ended["prompts"][0]["continuation"]["end"], &ended["prompts"][0]["continuation"]["tokens"]), (&json!("eos"), &json!([first])));
    assert_eq!(ended["notes"], json!(["generation_config.json: `repetition_penalty` of 1.3 is unsupported and ignored"]));
}

#[test]
fn chats_are_rendered_by_the_model_s_own_template() {
    let folder = prepared();
    let refused = compress(folder.path(), "generate in --chat --prompt ab");
    assert!(refused.code == 1 && refused.stderr.contains("a chat without chat_template.jinja"), "{}", refused.stderr);
    let template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}c{% endif %}";
    set(&folder.path().join("in/tokenizer_config.json"), json!({ "bos_token": "<s>", "chat_template": template }));
    let found = data(folder.path(), "generate in --chat --prompt ab --tokens 2 --json");
    // The text contains its first token, which is encoded as a single token.
    let plain = data(folder.path(), "generate in --prompt abc --tokens 2 --json");
    assert!(found["chat"] == json!(true) && found["prompts"][0]["prompt_tokens"] == json!([1, 3, 4, 5, 6]), "{found}");
    assert_eq!(plain["prompts"][0]["prompt_tokens"], json!([1, 3, 4, 5, 6]));
    // A separate template file takes precedence.
    fs::write(folder.path().join("in/chat_template.jinja"), "{{ messages[0].content.upper().lower() }}").unwrap();
    assert_eq!(data(folder.path(), "generate in --chat --prompt ab --tokens 2 --json")["prompts"][0]["prompt_tokens"], json!([3, 4, 5]));
}

#[test]
fn models_are_compared() {
    let folder = prepared();
    for (name, pass) in [("int8", "quantize-dynamic in"), ("int4", "quantize in --scheme W4A16 --group-size 16"), ("half", "cast in --to bf16")] {
        ok(folder.path(), &format!("{pass} -o {name} --no-measure"));
        let found = data(folder.path(), &format!("generate {name} --against in --prompt abc --tokens 6 --json"));
        let (alone, before) = (
            data(folder.path(), &format!("generate {name} --prompt abc --tokens 6 --json")),
            data(folder.path(), "generate in --prompt abc --tokens 6 --json"),
        );
        let prompt = &found["prompts"][0];
        assert_eq!((&prompt["continuation"], &prompt["against"]), (&alone["prompts"][0]["continuation"], &before["prompts"][0]["continuation"]), "{name}");
        let tokens = |side: &str| prompt[side]["tokens"].as_array().unwrap().clone();
        let (own, other) = (tokens("continuation"), tokens("against"));
        let same = own.iter().zip(&other).take_while(|(a, b)| a == b).count();
        assert_eq!(prompt["first_difference"], if own == other { Value::Null } else { json!(same) }, "{name}");
    }
    let run = ok(folder.path(), "generate int4 --against in --prompt abc --tokens 6");
    assert!(run.stdout.contains("in, ") && run.stdout.contains("int4, "), "{}", run.stdout);
    assert!(run.stdout.contains("are the same") || run.stdout.contains("first difference at token"), "{}", run.stdout);
    assert!(!run.stdout.contains("other tokens"), "{}", run.stdout);
    let mut tokenizer = read_json(&folder.path().join("int4/tokenizer.json"));
    tokenizer["post_processor"] = Value::Null;
    fs::write(folder.path().join("int4/tokenizer.json"), tokenizer.to_string()).unwrap();
    let run = ok(folder.path(), "generate int4 --against in --prompt abc --tokens 6");
    assert!(run.stdout.contains("1 prompt has other tokens than in in, so that the continuations are not comparable"), "{}", run.stdout);
}

#[test]
fn drafts_propose_tokens() {
    let folder = prepared();
    set(&folder.path().join("in/config.json"), json!({ "eos_token_id": null }));
    ok(folder.path(), "quantize in --scheme W4A16 --group-size 16 -o draft --no-measure");
    let alone = data(folder.path(), "generate in --prompt ab --prompt c --tokens 12 --json");
    assert_eq!(alone["draft"], Value::Null);
    let found = data(folder.path(), "generate in --draft draft --draft-tokens 3 --prompt ab --prompt c --tokens 12 --json");
    assert_eq!(found["prompts"], alone["prompts"]);
    let draft = &found["draft"];
    let number = |key: &str| draft[key].as_f64().unwrap();
    assert_eq!((&draft["sources"], &draft["tokens"]), (&json!(["draft"]), &json!(3)));
    // Every text has 11 tokens after the first.
    assert_eq!(number("accepted") + number("steps"), 22.0);
    assert_eq!(number("tokens_per_step"), 22.0 / number("steps"));
    assert_eq!(number("acceptance_rate"), number("accepted") / number("proposed"));
    assert_eq!(draft["acceptance_by_position"].as_array().unwrap().len(), 3);
    // The same model without a draft.
    let run = ok(folder.path(), "generate in --draft in --against in --prompt ab --tokens 11");
    for part in [
        "in: greedy decoding, at most 11 tokens, proposals of in\n",
        "are the same",
        " in: 5.00 tokens per step; 100 % of the proposals accepted, by position 100 %, 100 %",
    ] {
        assert!(run.stdout.contains(part), "{part}:\n{}", run.stdout);
    }
    assert!(ok(folder.path(), "generate in --draft in --prompt ab --tokens 1").stdout.contains(" in: proposed no tokens\n"));
    let sampled =
        |seed: u32| data(folder.path(), &format!("generate in --draft draft --prompt ab --tokens 8 --temperature 2 --seed {seed} --json"))["prompts"].clone();
    assert_eq!(sampled(3), sampled(3));
    assert_ne!(sampled(3), sampled(4));
    let refused = |args: &str, code: i32, part: &str| {
        let run = compress(folder.path(), args);
        assert!(run.code == code && run.stderr.contains(part), "{args}: {} {}", run.code, run.stderr);
    };
    refused("generate in --draft-tokens 3 --prompt a", 2, "--draft <DRAFT>|--lookup");
    refused("generate in --draft draft --draft-tokens 0 --prompt a", 2, "draft-tokens: is 0");
    // A smaller vocabulary has other ids.
    fs::write(folder.path().join("keep.txt"), "ab ab").unwrap();
    ok(folder.path(), "prune-vocabulary in -o small --keep keep.txt --no-measure");
    refused("generate in --draft small --prompt a", 2, "both models must have the same tokens");
    golden_model(&folder.path().join("encoder"), "bert", &[("characters.json", "tokenizer.json")]);
    refused("generate in --draft encoder/in --prompt a", 1, "`bert` are not decoders");
}

/// Tokens of the text itself and of a file are proposed without another model.
#[test]
fn texts_propose_tokens() {
    let folder = prepared();
    fs::write(folder.path().join("book.txt"), "once upon a time, there was a cat").unwrap();
    let alone = data(folder.path(), "generate in --prompt abab --tokens 16 --json");
    for (args, name) in [("--lookup", "the text itself"), ("--draft book.txt --draft-tokens 2", "book.txt")] {
        let found = data(folder.path(), &format!("generate in {args} --prompt abab --tokens 16 --json"));
        assert_eq!(found["prompts"][0]["continuation"], alone["prompts"][0]["continuation"], "{args}");
        assert_eq!(found["draft"]["sources"], json!([name]), "{args}");
        assert!(found["draft"]["accepted"].as_u64().unwrap() > 0 && found["draft"]["tokens_per_step"].as_f64().unwrap() > 1.0, "{found}");
    }
    let refused = |args: &str, part: &str| {
        let run = compress(folder.path(), args);
        assert!(run.code != 0 && run.stderr.contains(part), "{args}: {} {}", run.code, run.stderr);
    };
    refused("generate in --lookup --draft book.txt --prompt a", "--lookup: has no effect");
    refused("generate in --draft book.txt --draft other.txt --prompt a", "both collections of texts: specify one");
    refused("generate in --draft in --draft book.txt --prompt a", "in is a model, but only an EAGLE-3 head can be combined with book.txt");
    refused("generate in --draft in --draft in --prompt a", "both models: specify one");
    refused("generate in --draft missing.txt --prompt a", "missing.txt");
    refused("generate in --draft missing.npz --prompt a", "missing.npz");
    fs::write(folder.path().join("empty.txt"), "").unwrap();
    refused("generate in --draft empty.txt --prompt a", "empty.txt contains no texts of two or more tokens");
}

#[test]
fn errors_are_reported_before_anything_is_loaded() {
    let folder = prepared();
    let refused = |args: &str, code: i32, part: &str| {
        let run = compress(folder.path(), args);
        assert!(run.code == code && run.stderr.contains(part), "{args}: {} {}", run.code, run.stderr);
    };
    refused("generate in", 2, "--prompt <TEXT>");
    refused("generate in --prompt a --seed 3", 2, "add --temperature, --top-k or --top-p");
    refused("generate in --prompt a --size height=8 --size width=8", 2, "has no effect on this command");
    refused("generate in --prompt a --tokens 0", 2, "tokens: is 0");
    refused("generate in --prompt a --top-p 1.5", 2, "top-p: is 1.5");
    refused("generate in --prompt aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 2, "prompt 1: has 34 tokens, but the model supports at most 32");
    refused("generate in --prompt a --memory 1KB", 1, "of memory");
    // This tokenizer encodes an empty text as one token, which precedes every text.
    assert_eq!(compress(folder.path(), "generate in --prompt= --tokens 1").code, 0);
    let mut tokenizer = read_json(&folder.path().join("in/tokenizer.json"));
    tokenizer["post_processor"] = Value::Null;
    fs::write(folder.path().join("in/tokenizer.json"), tokenizer.to_string()).unwrap();
    refused("generate in --prompt= --tokens 1", 2, "prompt 1: has no token");
    golden_model(&folder.path().join("other"), "llama", &[("word-pieces.json", "tokenizer.json")]);
    refused("generate in --against other/in --prompt a", 2, "continuations cannot be compared");
    fs::remove_file(folder.path().join("in/tokenizer.json")).unwrap();
    refused("generate in --prompt a", 1, "without tokenizer.json");
    refused("generate in/model.safetensors --prompt a", 1, "error");
    for encoder in ["bert", "vit"] {
        let at = folder.path().join(encoder);
        golden_model(&at, encoder, &[("word-pieces.json", "tokenizer.json")]);
        refused(&format!("generate {encoder}/in --prompt a"), 1, &format!("`{encoder}` are not decoders"));
    }
}

const RECIPE: &str = "
model: in
data: { calibration: { text: book.txt, max_length: 24, samples: 4 } }
passes: [{ quantize: { scheme: W4A16, group_size: 16, method: gptq } }]
output: out
";

#[test]
fn reports_show_texts_before_and_after() {
    let folder = prepared();
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/book.txt"), folder.path().join("book.txt")).unwrap();
    fs::write(folder.path().join("recipe.yaml"), RECIPE).unwrap();
    ok(folder.path(), "run recipe.yaml");
    let report = read_json(&folder.path().join("out/report.json"));
    let texts = report["continuations"].as_array().unwrap();
    assert_eq!((texts.len(), &report["fidelity"]["samples_from"]), (3, &json!("held-out")));
    for text in texts {
        assert!(!text["prompt"].as_str().unwrap().is_empty() && text["before"].is_string() && text["after"].is_string(), "{text}");
        assert!(text["first_difference"].is_null() || text["first_difference"].as_u64().unwrap() < 16, "{text}");
    }
    for file in ["report.html", "report.md"] {
        assert!(fs::read_to_string(folder.path().join("out").join(file)).unwrap().contains("Continuations"), "{file}");
    }
    ok(folder.path(), "run recipe.yaml --force --set measure=false");
    assert!(read_json(&folder.path().join("out/report.json")).get("continuations").is_none());
    // Without text there are no continuations.
    ok(folder.path(), "quantize-dynamic in -o plain");
    assert!(read_json(&folder.path().join("plain/report.json")).get("continuations").is_none());
    // The output is a decoder that config.json cannot describe.
    let passes = "[{ search-structure: { limit: { layers: 0.5 }, uniform: false } }]";
    let recipe = RECIPE.replace("[{ quantize: { scheme: W4A16, group_size: 16, method: gptq } }]", passes);
    fs::write(folder.path().join("searched.yaml"), recipe).unwrap();
    ok(folder.path(), "run searched.yaml --force");
    assert!(folder.path().join("out/graph.json").exists());
    assert_eq!(read_json(&folder.path().join("out/report.json"))["continuations"].as_array().map(Vec::len), Some(3));
}

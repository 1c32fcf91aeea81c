//! Help, version, completions, manual pages, schema, doctor.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::COMMANDS;
use crate::cli::support::{compress, data, ok};

#[test]
fn help_explains_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let help = ok(folder.path(), "--help").stdout;
    assert!(help.starts_with("Prune, quantize and pack neural network checkpoints"), "{help}");
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "`{command}` is missing in\n{help}");
        let asked = [format!("{command} --help"), format!("{command} -h"), format!("help {command}")].map(|args| ok(folder.path(), &args).stdout);
        for text in asked {
            let first = text.lines().next().unwrap();
            assert!(first.len() > 15 && first.starts_with(char::is_uppercase), "{command}: {first}");
            assert!(text.contains(&format!("Usage: compress {command}")) && text.contains("--json"), "{text}");
            assert!(!text.contains('\u{1b}'), "{text:?}");
        }
    }
    let pass = ok(folder.path(), "chain in -o out -- cast --help").stdout;
    assert!(pass.contains("--overflow <OVERFLOW>") && !pass.contains("--output"), "{pass}");
    assert_eq!(compress(folder.path(), "").code, 2);
    assert_eq!(ok(folder.path(), "--version").stdout, format!("compress {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_name_every_command() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ok(folder.path(), &format!("completions {shell}")).stdout;
        for command in COMMANDS {
            assert!(script.contains(command), "{shell} does not know `{command}`");
        }
    }
    let script = folder.path().join("compress.bash");
    fs::write(&script, ok(folder.path(), "completions bash").stdout).unwrap();
    let checked = Command::new("bash").arg("-n").arg(&script).status().expect("this test needs bash");
    assert!(checked.success());
}

#[test]
fn every_command_has_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let printed = ok(folder.path(), "man").stdout;
    ok(folder.path(), "man -o share/man1");
    let read = |page: String| fs::read_to_string(folder.path().join("share/man1").join(page)).unwrap();
    assert_eq!(read("compress.1".into()), printed);
    for command in COMMANDS {
        let page = read(format!("compress-{command}.1"));
        assert!(page.contains(concat!("\"compress ", env!("CARGO_PKG_VERSION"), "\"")) && page.contains("log\\-format"), "{page}");
        assert!(printed.contains(&format!("compress\\-{}(1)", command.replace('-', "\\-"))), "`{command}` is missing in\n{printed}");
    }
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert_eq!(compress(folder.path(), "man -o file").code, 1);
}

#[test]
fn doctor_describes_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let doctor = data(folder.path(), "doctor --json --threads 3");
    assert_eq!(doctor["threads"], 3);
    assert_eq!(doctor["tool"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(doctor["environment"]["cores"].as_u64().unwrap() > 0);
    let text = ok(folder.path(), "doctor").stdout;
    assert!(text.contains("kernels") && text.contains(doctor["environment"]["simd"].as_str().unwrap()), "{text}");
    assert!(text.contains("GPU") && text.contains("models run on") && text.contains("cache"), "{text}");
}

#[test]
fn the_schema_accepts_recipes_and_refuses_mistakes() {
    let folder = tempfile::tempdir().unwrap();
    let schema = data(folder.path(), "schema");
    let recipe = |text: &str| serde_saphyr::from_str::<Value>(text).unwrap();
    for text in [super::recipes::FULL, super::recipes::SHORT, "model: in"] {
        assert_eq!(mismatch(&schema, &schema, &recipe(text)), None, "{text}");
    }
    for (text, at) in [
        ("passes: []", "model"),
        ("model: in\npases: []", "pases"),
        ("model: 1", "1"),
        ("model: in\nseed: -1", "-1"),
        ("model: in\npasses: [prune]", "prune"),
        ("model: in\npasses: [{ cast: { too: f16 } }]", "too"),
        ("model: in\npasses: [{ cast: { to: f8 } }]", "f8"),
        ("model: in\npasses: [{ prune-unstructured: { amount: 1.5 } }]", "1.5"),
        ("model: in\nexport: [onxx]", "onxx"),
        ("model: in\nexport: [{ safetensors: { layout: thin } }]", "thin"),
    ] {
        let found = mismatch(&schema, &schema, &recipe(text)).unwrap_or_else(|| panic!("accepted: {text}"));
        assert!(found.contains(at), "{text}: {found}");
    }
}

/// The reason why a value violates a schema, for the parts of JSON Schema that recipes use.
fn mismatch(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let no = |reason: &str| Some(format!("{value}: {reason}"));
    for (key, rule) in schema.as_object().expect("a schema is an object") {
        let found = match key.as_str() {
            "$ref" => mismatch(root, root.pointer(rule.as_str().unwrap().trim_start_matches('#')).expect("the reference exists"), value),
            "oneOf" | "anyOf" => {
                let failed: Vec<String> = rule.as_array().unwrap().iter().filter_map(|s| mismatch(root, s, value)).collect();
                let fits = rule.as_array().unwrap().len() - failed.len();
                if fits == 0 || (key == "oneOf" && fits > 1) { no(&format!("fits {fits} of: {}", failed.join(" | "))) } else { None }
            }
            "type" => {
                let kinds = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                if kinds.iter().any(|kind| is(value, kind.as_str().unwrap())) { None } else { no(&format!("not of type {rule}")) }
            }
            "enum" if !rule.as_array().unwrap().contains(value) => no("not listed"),
            "const" if rule != value => no("another constant"),
            "minimum" if value.as_f64().is_some_and(|v| v < rule.as_f64().unwrap()) => no("too small"),
            "maximum" if value.as_f64().is_some_and(|v| v > rule.as_f64().unwrap()) => no("too large"),
            "items" => value.as_array().into_iter().flatten().find_map(|item| mismatch(root, rule, item)),
            "properties" => value.as_object().into_iter().flatten().filter_map(|(name, inner)| mismatch(root, rule.get(name)?, inner)).next(),
            "additionalProperties" if *rule == json!(false) => {
                let known = |name: &str| schema["properties"].get(name).is_some();
                value.as_object().into_iter().flatten().find(|(name, _)| !known(name)).and_then(|(name, _)| no(&format!("unknown key {name}")))
            }
            "required" => rule
                .as_array()
                .unwrap()
                .iter()
                .find(|name| value.is_object() && value.get(name.as_str().unwrap()).is_none())
                .and_then(|name| no(&format!("{name} is missing"))),
            _ => None,
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

fn is(value: &Value, kind: &str) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("the schema uses type {other}"),
    }
}

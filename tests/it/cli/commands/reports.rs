//! `report`, `check` and `init`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::support::{compress, data, model, ok, read_json};

/// A folder with a model `in` and two runs, `a` and `b`.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    ok(folder.path(), "prune-unstructured in -o a --amount 0.5");
    ok(folder.path(), "chain in -o b -- prune-unstructured --amount 0.25 -- quantize-dynamic");
    folder
}

#[test]
fn report_renders_the_page_of_a_run_again() {
    let folder = prepared();
    let page = fs::read_to_string(folder.path().join("b/report.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("encoder.<wbr>layer.<wbr>0.<wbr>attention"), "{page}");
    let text = ok(folder.path(), "report b -o page.html").stdout;
    assert!(text.contains(" written: page.html") && text.contains("weights that changed most"), "{text}");
    assert_eq!(fs::read_to_string(folder.path().join("page.html")).unwrap(), page);
    assert_eq!(ok(folder.path(), "report b/report.json").stdout, ok(folder.path(), "report b").stdout);
    let run = compress(folder.path(), "report b -o page.html");
    assert!(run.code == 1 && run.stderr.contains("output page.html: exists") && run.stderr.contains("--force"), "{}", run.stderr);
    ok(folder.path(), "report a -o page.html --force");
    assert_ne!(fs::read_to_string(folder.path().join("page.html")).unwrap(), page);
    assert_eq!(data(folder.path(), "report b --json"), read_json(&folder.path().join("b/report.json")));
}

#[test]
fn force_replaces_only_unchanged_files() {
    let folder = prepared();
    let edit = |name: &str| fs::write(folder.path().join(name), fs::read_to_string(folder.path().join(name)).unwrap() + "\n").unwrap();
    for name in ["report.md", "report.html", "recipe.yaml", "README.md"] {
        edit(&format!("a/{name}"));
        let run = compress(folder.path(), "prune-unstructured in -o a --amount 0.5 --force");
        assert!(run.code == 1 && run.stderr.contains(&format!("{name} would be lost")), "{}", run.stderr);
        assert!(!compress(folder.path(), "verify a").stdout.is_empty() && compress(folder.path(), "verify a").code != 0);
        fs::remove_file(folder.path().join("a").join(name)).unwrap();
    }
    ok(folder.path(), "prune-unstructured in -o a --amount 0.5 --force");
    ok(folder.path(), "verify a");
}

#[test]
fn reports_contain_histograms_of_the_most_changed_weights() {
    let folder = prepared();
    let report = read_json(&folder.path().join("a/report.json"));
    let pictures = report["histograms"].as_array().unwrap();
    assert_eq!(pictures.len(), 4);
    let noise = |name: &Value| report["layers"].as_array().unwrap().iter().find(|layer| layer["name"] == *name).unwrap()["sqnr_db"].as_f64().unwrap();
    assert!(pictures.windows(2).all(|pair| noise(&pair[0]["name"]) <= noise(&pair[1]["name"])));
    for picture in pictures {
        let counts = |key: &str| picture[key].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).collect::<Vec<_>>();
        let (before, after) = (counts("before"), counts("after"));
        assert_eq!((before.len(), before.iter().sum::<u64>()), (64, after.iter().sum()));
        assert!(after.iter().max().unwrap() * 2 >= after.iter().sum(), "half of the values are zero: {after:?}");
        assert!(picture["low"].as_f64().unwrap() < -0.04 && picture["high"].as_f64().unwrap() > 0.04);
    }
}

#[test]
fn runs_are_compared() {
    let folder = prepared();
    let text = ok(folder.path(), "report a b -o both.html").stdout;
    for part in ["run", " a ", " b ", "prune-unstructured.amount", "0.25", "quantize-dynamic", "written: both.html"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(fs::read_to_string(folder.path().join("both.html")).unwrap().contains("Comparison of 2 runs"));
    let compared = data(folder.path(), "report a/report.json b --json");
    assert_eq!((&compared["runs"][0]["name"], &compared["runs"][1]["name"]), (&json!("a"), &json!("b")));
    let amount = compared["differing"].as_array().unwrap().iter().find(|d| d["option"] == "prune-unstructured.amount").unwrap();
    assert_eq!(amount["values"], json!([0.5, 0.25]));
    assert_eq!(compared["metric"], Value::Null);
    assert_eq!(compress(folder.path(), "report").code, 2);
    let run = compress(folder.path(), "report a none");
    assert!(run.code == 1 && run.stderr.contains("none: the report does not exist"), "{}", run.stderr);
}

#[test]
fn exceeded_budgets_are_named() {
    let folder = prepared();
    let report = read_json(&folder.path().join("b/report.json"));
    let bytes = report["size"]["after"]["bytes"].as_u64().unwrap();
    let run = ok(folder.path(), &format!("check b --max-bytes {bytes} --max-size-ratio 0.9 --max-seconds 600"));
    assert!(run.stdout.contains("max-size-ratio") && !run.stdout.contains("failed") && run.stderr.is_empty(), "{}", run.stdout);
    ok(folder.path(), "check b/report.json --max-bytes 20KiB");
    let run = compress(folder.path(), &format!("check b --max-bytes {} --max-size-ratio 0.1 --max-seconds 600", bytes - 1));
    assert_eq!(run.code, 1);
    assert_eq!(run.stdout.matches("failed").count(), 2, "{}", run.stdout);
    let told = format!("error: b: --max-bytes {}: measured {bytes}; --max-size-ratio 0.1000: measured 0.", bytes - 1);
    assert!(run.stderr.starts_with(&told), "{}", run.stderr);
    // Both limits are met in the same way, which is named once.
    assert_eq!(run.stderr.matches("`compress auto MODEL -o DIR --max-size SIZE`").count(), 1, "{}", run.stderr);
    let run = compress(folder.path(), "check b --max-bytes 1kB --max-size-ratio 0.9 --json");
    let found: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((run.code, &found["ok"]), (1, &json!(false)));
    assert_eq!(found["budgets"][0], json!({ "budget": "max-bytes", "measured": bytes as f64, "allowed": 1000.0, "ok": false }));
    assert_eq!(found["budgets"][1]["ok"], true);
}

#[test]
fn missing_measurements_are_reported() {
    let folder = prepared();
    for (budget, needs) in [
        ("--max-drop 0.01", "--max-drop: the report does not contain this measurement: add `data: { evaluation: ... }` with labels"),
        // The unit is that of the score, such as a perplexity.
        ("--max-drop 5", "--max-drop: the report does not contain this measurement: add `data: { evaluation: ... }` with labels"),
        ("--min-cosine 0.9", "add `data: { evaluation: ... }` to the recipe"),
        ("--min-sqnr 20", "add `data: { evaluation: ... }` to the recipe"),
        ("--min-agreement 0.9", "of a model with logits as outputs"),
        ("--min-speedup 1", "`evaluate: { latency: true }`"),
        ("--max-latency 5", "`evaluate: { latency: true }`"),
        ("--max-macs-ratio 0.5", "counted for supported families"),
        ("", "use at least one of --max-bytes, "),
        ("--max-drop nan", "`nan` is not a number"),
        ("--max-bytes 5XB", "`5XB` is not a size like 5GB, 500MB or 2GiB"),
    ] {
        let run = compress(folder.path(), &format!("check b {budget}"));
        assert!(run.code == 2 && run.stdout.is_empty() && run.stderr.contains(needs), "{budget}: {} {}", run.code, run.stderr);
    }
}

#[test]
fn a_sweep_is_a_folder_of_runs() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("in"));
    fs::write(folder.path().join("r.yaml"), "model: in\npasses:\n  - prune-unstructured: { amount: 0.5 }\n  - quantize-dynamic\noutput: out\n").unwrap();
    let planned = ok(folder.path(), "run r.yaml --sweep amount=0.25,0.75 --dry-run").stdout;
    assert!(planned.contains("== amount=0.25\n") && planned.contains("== amount=0.75\n"), "{planned}");
    assert!(!folder.path().join("out").exists());
    let run = ok(folder.path(), "run r.yaml --sweep amount=0.25,0.75 --sweep observer=minmax,mse");
    for (amount, observer) in [("0.25", "minmax"), ("0.25", "mse"), ("0.75", "minmax"), ("0.75", "mse")] {
        let name = format!("amount={amount},observer={observer}");
        assert!(run.stdout.contains(&name) && run.stderr.contains(&name), "{}", run.stdout);
        let report = read_json(&folder.path().join("out").join(&name).join("report.json"));
        assert_eq!(report["recipe"]["passes"][0]["prune-unstructured"]["amount"].to_string(), amount);
        assert_eq!(report["recipe"]["passes"][1]["quantize-dynamic"]["observer"], observer);
        assert_eq!(report["recipe"].get("sweep"), None);
    }
    assert!(run.stdout.contains("prune-unstructured.amount") && run.stdout.contains("written: out/comparison.html"), "{}", run.stdout);
    assert!(fs::read_to_string(folder.path().join("out/comparison.html")).unwrap().contains("Comparison of 4 runs"));
    // Another sweep replaces the page.
    ok(folder.path(), "run r.yaml --sweep amount=0.4,0.6 --quiet");
    assert!(fs::read_to_string(folder.path().join("out/comparison.html")).unwrap().contains("Comparison of 2 runs"));
    // All output folders are checked before the first run.
    let run = compress(folder.path(), "run r.yaml --sweep observer=minmax,mse --sweep amount=0.5,0.75");
    assert!(run.code == 1 && run.stderr.contains("amount=0.75,observer=minmax") && run.stderr.contains("exists"), "{}", run.stderr);
    assert!(!folder.path().join("out/amount=0.5,observer=minmax").exists());
    let recipe = fs::read_to_string(folder.path().join("r.yaml")).unwrap() + "sweep: { quantize-dynamic.observer: [mse] }\n";
    fs::write(folder.path().join("sweep.yaml"), recipe).unwrap();
    let compared = data(folder.path(), "run sweep.yaml -o elsewhere --json --quiet");
    assert_eq!(compared["runs"][0]["name"], "quantize-dynamic.observer=mse");
    for (args, message) in [
        ("--sweep amount=", "sweep amount: has no value"),
        ("--sweep amount=0.5,2.5", "sweep amount=2.5"),
        ("--sweep amount", "is not KEY=VALUE"),
        ("--sweep none.such=1", "no `none`"),
    ] {
        let run = compress(folder.path(), &format!("run r.yaml -o refused {args}"));
        assert!(run.code == 2 && run.stderr.contains(message), "{args}: {}", run.stderr);
    }
    assert!(!folder.path().join("refused").exists());
}

#[cfg(feature = "run")]
mod init {
    use std::fs;
    use std::path::Path;

    use compress::recipe::Recipe;

    use crate::cli::support::{compress, golden_model, model, ok};

    /// The recipe with all suggestions enabled.
    fn uncommented(recipe: &str) -> String {
        let on = |line: &str| match line.strip_prefix('#') {
            Some(rest) if line.starts_with("#  -") || line.starts_with("#  e") || line.starts_with("#  c") || !rest.starts_with(' ') => rest.to_owned() + "\n",
            _ => line.to_owned() + "\n",
        };
        recipe.lines().map(on).collect()
    }

    #[test]
    fn every_family_gets_a_recipe_that_runs() {
        let folder = tempfile::tempdir().unwrap();
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
        let mut count = 0;
        for entry in fs::read_dir(models).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let text = ok(folder.path(), &format!("init {}", path.display())).stdout;
            let recipe = Recipe::parse(&text, Path::new("recipe.yaml")).unwrap_or_else(|e| panic!("{name}: {e}\n{text}"));
            assert_eq!(recipe.passes.len(), 1, "{name}");
            let all = uncommented(&text);
            let more = Recipe::parse(&all, Path::new("recipe.yaml")).unwrap_or_else(|e| panic!("{name}: {e}\n{all}"));
            assert!(more.passes.len() > 1 && more.data.calibration.is_some() && more.data.evaluation.is_some() && more.evaluate.is_some(), "{name}\n{all}");
            let file = format!("{name}.yaml");
            fs::write(folder.path().join(&file), &text).unwrap();
            if recipe.data.calibration.is_some() {
                // The samples still have to be specified.
                let run = compress(folder.path(), &format!("plan {file}"));
                assert!(run.stderr.contains("cannot open path/to/images"), "{name}: {}", run.stderr);
            } else {
                ok(folder.path(), &format!("plan {file}"));
                ok(folder.path(), &format!("run {file} --quiet"));
                assert!(folder.path().join("out").join(&name).join("report.html").is_file(), "{name}");
            }
            if let Some(length) = all.split("max_length: ").nth(1).and_then(|rest| rest.split([',', ' ']).next()?.parse::<u64>().ok()) {
                let config: serde_json::Value = serde_json::from_str(&fs::read_to_string(path.join("config.json")).unwrap()).unwrap();
                let positions = ["max_position_embeddings", "n_positions"].iter().find_map(|key| config[key].as_u64());
                assert!(positions.is_none_or(|positions| length <= positions), "{name}: {length}");
            }
            let commented = text.lines().all(|line| line.len() <= 135);
            assert!(commented, "{name}: long lines\n{text}");
            count += 1;
        }
        assert!(count > 30, "{count} models");
    }

    #[test]
    fn suggestions_depend_on_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let golden = |name: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
            ok(folder.path(), &format!("init {}", path.display())).stdout
        };
        assert!(golden("torchvision-resnet18").contains("\n  - quantize-static: "));
        assert!(golden("llama-grouped-tied").contains("The output head is tied to the embedding table"));
        assert!(golden("llama").contains("task: language-modelling") && golden("vit").contains("{ images: test }"));
        // An ONNX file does not keep the dtype of a cast.
        for (name, suggested) in [("llama", true), ("gpt2", false), ("torchvision-resnet18", false)] {
            let text = golden(name);
            assert_eq!(text.contains("#  - cast: { to: bf16 }"), suggested, "{name}\n{text}");
        }
        assert!(golden("bert-sequence-classification").contains("label_column: label"));
        // A search for the formats needs samples.
        let auto = |name: &str| golden(name).split("compress auto ").nth(1).map(|rest| rest.lines().take(2).collect::<String>());
        assert!(auto("vit").unwrap().contains("--for onnxruntime --max-loss 0.5% --calibration '{ images: path/to/images, samples: 256 }'"));
        assert_eq!(auto("llama"), None);
        golden_model(folder.path(), "llama", &[("characters.json", "tokenizer.json")]);
        let text = ok(folder.path(), "init in").stdout;
        assert!(text.contains("#     compress auto in -o out/auto \\\n#         --for vllm --max-size 5bits --calibration '{ text: book.txt, "), "{text}");
        fs::remove_dir_all(folder.path().join("in")).unwrap();
        model(&folder.path().join("in"));
        ok(folder.path(), "quantize-dynamic in -o int8");
        let quantized = ok(folder.path(), "init int8").stdout;
        assert!(quantized.contains("already quantized") && quantized.contains("\npasses: []\n"), "{quantized}");
        let unknown = ok(folder.path(), "init in/model.safetensors").stdout;
        assert!(unknown.contains("cannot run this model") && unknown.contains("\noutput: out/model\n"), "{unknown}");
    }

    #[test]
    fn a_recipe_in_a_file_runs_from_there() {
        let folder = tempfile::tempdir().unwrap();
        model(&folder.path().join("on"));
        fs::create_dir(folder.path().join("recipes")).unwrap();
        let said = ok(folder.path(), "init on -o recipes/first.yaml").stdout;
        assert!(said.contains("next, compress plan recipes/first.yaml"), "{said}");
        ok(folder.path(), "run recipes/first.yaml --quiet");
        assert!(folder.path().join("recipes/out/on/model.safetensors").is_file());
        let run = compress(folder.path(), "init on -o recipes/first.yaml");
        assert!(run.code == 1 && run.stderr.contains("exists"), "{}", run.stderr);
        ok(folder.path(), "init on -o recipes/first.yaml --force");
    }

    #[test]
    fn odd_names_stay_names() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["odd: name #1", "true", "./- a", "12", "é \"quoted\"", "a\nb: c"] {
            model(&folder.path().join(name));
            let output = crate::cli::support::command(folder.path()).args(["init", name]).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let recipe = Recipe::parse(&text, Path::new("r.yaml")).unwrap_or_else(|e| panic!("{name}: {e}\n{text}"));
            assert_eq!(recipe.model, Path::new(name));
        }
    }
}

#[test]
fn published_files_contain_no_absolute_paths_and_no_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in"), folder.path().join("out"));
    model(&input);
    for name in [".env", "id_rsa", "server.pem"] {
        fs::write(input.join(name), "secret").unwrap();
    }
    let report = data(folder.path(), &format!("cast {} -o {} --json", input.display(), out.display()));
    assert_eq!(report["model"]["source"], "../in");
    assert_eq!(report["recipe"]["model"], "../in");
    let notes = report["notes"].to_string();
    assert!(notes.contains(".env (hidden") && notes.contains("id_rsa, server.pem (they may contain keys"), "{notes}");
    let root = folder.path().to_string_lossy().into_owned();
    for name in ["recipe.yaml", "report.json", "report.md", "report.html", "README.md"] {
        assert!(!fs::read_to_string(out.join(name)).unwrap().contains(&root), "{name}");
    }
    assert!([".env", "id_rsa", "server.pem"].iter().all(|name| !out.join(name).exists()));
    // The recipe reproduces the output from any working directory.
    ok(folder.path(), "run out/recipe.yaml -o again");
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(weights(&out), weights(&folder.path().join("again")));
    ok(folder.path(), "verify out");
}

#[test]
fn verify_accepts_the_report_of_a_folder() {
    let folder = prepared();
    assert_eq!(ok(folder.path(), "verify a/report.json").stdout, ok(folder.path(), "verify a").stdout);
    fs::write(folder.path().join("a/config.json"), "{}").unwrap();
    let run = compress(folder.path(), "verify a/report.json");
    assert!(run.code == 1 && run.stderr.contains("a/config.json"), "{}", run.stderr);
}

#[test]
fn commands_print_json_or_refuse_to() {
    let folder = prepared();
    let recipe = data(folder.path(), "init in --json")["recipe"].as_str().unwrap().to_owned();
    assert_eq!(recipe, ok(folder.path(), "init in").stdout);
    assert_eq!(data(folder.path(), "init in -o in.yaml --json"), json!({ "written": "in.yaml" }));
    for command in ["man --json", "completions bash --json"] {
        let run = compress(folder.path(), command);
        assert!(run.code == 2 && run.stderr.contains("--json"), "{command}: {}", run.stderr);
    }
}

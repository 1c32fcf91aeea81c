//! The HTML report: a self-contained page for any contents of a report.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use compress::report::{Budgets, Comparison, Report};
use serde_json::{Value, json};

/// A hostile name of a checkpoint.
const HOSTILE: &str = r#"<script>alert(1)</script>"'&--><img src=x onerror=alert(2)>.weight"#;

/// A report of a Llama-shaped model with this number of weights and all optional sections.
fn report(weights: usize) -> Report {
    let parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    let mut layers: Vec<Value> = (0..weights - 1)
        .map(|i| {
            let name = format!("model.layers.{}.{}.weight", i / parts.len(), parts[i % parts.len()]);
            let bytes = 33_554_432 + i;
            json!({ "name": name, "shape": [4096, 4096], "encoding": "int8 channel", "bytes_before": bytes, "bytes_after": bytes / 2, "zeros": i, "sqnr_db": 30.0 + (i * 7 % 13) as f64 })
        })
        .collect();
    layers.push(json!({ "name": HOSTILE, "shape": [8], "encoding": HOSTILE, "bytes_before": 32, "bytes_after": 32, "zeros": 0, "sqnr_db": null }));
    let counts: Vec<u32> = (0..64u32).map(|i| 100 - i.abs_diff(32)).collect();
    let histogram = |name: &str| json!({ "name": name, "low": -0.1, "high": 0.1, "before": counts, "after": counts });
    let curve: Vec<Value> =
        (0..5000).map(|step| json!({ "step": step, "loss": 4.0 / (1.0 + f64::from(step)), "learning_rate": 3e-4, "samples_per_second": 400.0 })).collect();
    let timeline: Vec<Value> = (0..600).map(|t| json!({ "seconds": t, "rss_bytes": 1_000_000 * t, "device_bytes": 2_000_000 * t, "phase": HOSTILE })).collect();
    let details = json!({
        "quantized": 7, "table": [{ HOSTILE: HOSTILE }], "accuracy_goal": { "met": true, "in_floats": [HOSTILE] },
        "sensitivity": [{ "name": HOSTILE, "quantized": 0.99 }, { "name": "other", "quantized": 0.999 }],
        "training": { "curve": curve, "evaluations": [{ "step": 0, "metric": HOSTILE, "value": 0.5 }, { "step": 9, "metric": HOSTILE, "value": 0.6 }] },
        "memory": { "timeline": timeline, "phases": [{ "name": HOSTILE, "predicted_bytes": 100, "measured_bytes": 90 }] },
    });
    let size = |bytes: u64| json!({ "parameters": 7_000_000_000u64, "nonzero": 6_900_000_000u64, "tensors": weights, "bytes": bytes, "bytes_zstd": bytes, "bytes_zstd_sampled": true });
    serde_json::from_value(json!({
        "schema": 1,
        "tool": { "name": "compress", "version": HOSTILE, "commit": HOSTILE },
        "environment": { "cpu": HOSTILE, "cores": 2, "memory_bytes": 1, "gpu": HOSTILE, "onnxruntime": null, "simd": HOSTILE, "int8": HOSTILE },
        "model": { "source": format!("/models/{HOSTILE}"), "architecture": HOSTILE, "blake3": HOSTILE },
        "seed": 0,
        "recipe": { "model": HOSTILE, "passes": [{ "quantize-dynamic": { HOSTILE: HOSTILE } }] },
        "passes": [{ "name": HOSTILE, "options": { HOSTILE: [HOSTILE, { "a": HOSTILE }] }, "seconds": 1.5, "peak_rss_bytes": 1, "peak_vram_bytes": 2, "tensors_changed": 3, "rule": HOSTILE, "unselected": [HOSTILE], "details": details }],
        "size": { "before": size(14_000_000_000), "after": size(7_000_000_000), "ratio": 2.0 },
        "accuracy": {
            "task": HOSTILE, "metric": HOSTILE, "data": HOSTILE, "samples": 9, "before": { "candle": 0.8, "onnxruntime": 0.8 }, "after": { "candle": 0.79, "onnxruntime": 0.79 },
            "ci95": [[0.7, 0.9], [0.69, 0.89]], "drop": 0.01, "more": { HOSTILE: [0.5, 0.6] },
            "fidelity": { "output": HOSTILE, "cosine": 0.99, "cosine_min": 0.9, "sqnr_db": 20.0, "kl": 0.1, "top1_agreement": 0.9, "max_abs_error": 1.0, "largest": 2.0 },
        },
        "latency": { "runtime": HOSTILE, "threads": 2, "batch": [1, 2], "runs": 3, "before_ms": { "p50": 10.0, "p95": 12.0 }, "after_ms": { "p50": 5.0, "p95": 7.0 }, "speedup": 2.0, "speedup_quartiles": [1.87, 2.16] },
        "layers": layers,
        "histograms": [histogram(HOSTILE), histogram("model.layers.0.self_attn.q_proj.weight")],
        "outputs": [{ "format": HOSTILE, "path": HOSTILE, "bytes": 1, "blake3": HOSTILE, "verified": { "how": HOSTILE, "max_abs_error": 0.0, "ok": false } }],
        "notes": [HOSTILE, format!("`{HOSTILE}`")],
        "totals": { "seconds": 3.0, "peak_rss_bytes": 5 },
    }))
    .unwrap()
}

fn pages() -> Vec<String> {
    let (small, other) = (report(291), report(30));
    let comparison = Comparison::new(&[(HOSTILE.to_owned(), small.clone()), ("b".to_owned(), other)]);
    vec![small.to_html(), comparison.to_html()]
}

/// Writes a page to the folder from which scripts/check pages opens it in a browser.
fn leave(name: &str, page: &str) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pages");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), page).unwrap();
}

#[test]
fn pages_are_self_contained() {
    for (page, name) in pages().into_iter().zip(["hostile.html", "hostile-comparison.html"]) {
        leave(name, &page);
        for reference in ["http://", "https://", " src=", " href=", "url(", "@import", "<link", "<iframe", "<object", "fetch(", "XMLHttpRequest", "import("] {
            let found: Vec<&str> = page.match_indices(reference).map(|(at, _)| &page[at.saturating_sub(40)..page.len().min(at + 40)]).collect();
            // References within escaped text have no effect.
            assert!(found.iter().all(|found| found.contains("&lt;img src=x")), "{reference}: {found:?}");
        }
        assert!(page.contains("Content-Security-Policy") && page.contains("default-src 'none'"));
        assert!(page.contains("prefers-color-scheme: dark") && page.contains("@media print") && page.contains("width=device-width"));
    }
}

#[test]
fn contents_of_a_report_are_escaped() {
    for page in pages() {
        assert!(page.contains("&lt;script&gt;alert(1)"));
        assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (1, 1), "only the page's own script");
        assert!(!page.contains("<img"));
        // Quotes in names must not end an attribute.
        assert!(!page.contains("onerror=alert(2)>"));
    }
}

#[test]
fn the_spread_of_the_speedup_is_displayed() {
    let report = report(30);
    let page = report.to_html();
    assert!(page.contains("speed-up 2.00 (1.87 to 2.16)") && page.contains("speed-up (1.87 to 2.16)"), "summary and section");
    assert!(report.to_markdown().contains("2.00 (1.87 to 2.16)"));
}

#[test]
fn charts_are_well_formed() {
    let mut drawings = 0;
    for page in pages() {
        for (at, _) in page.match_indices("<svg") {
            let end = at + page[at..].find("</svg>").unwrap() + 6;
            let drawing = roxmltree::Document::parse(&page[at..end]).unwrap_or_else(|e| panic!("{e}\n{}", &page[at..end.min(at + 2000)]));
            for path in drawing.descendants().filter(|node| node.has_tag_name("path")) {
                let d = path.attribute("d").unwrap();
                assert!(d.chars().all(|c| c.is_ascii_digit() || "MLHVhZ.- ".contains(c)), "{d}");
            }
            drawings += 1;
        }
    }
    // Intervals, latency, two charts of weights, two histograms, sensitivity, four curves, memory; the
    // comparison's plot.
    assert!(drawings >= 15, "{drawings}");
}

#[test]
fn tags_are_balanced() {
    const VOID: [&str; 4] = ["meta", "input", "wbr", "br"];
    for page in pages() {
        let (before, rest) = page.split_once("<style>").unwrap();
        let body = rest.split_once("</style>").unwrap().1;
        let body = &body[..body.find("<script>").unwrap()];
        let mut open: Vec<&str> = Vec::new();
        let html = format!("{before}{body}");
        for tag in html.split('<').skip(1) {
            let name = tag.split(|c: char| c.is_whitespace() || c == '>').next().unwrap();
            match name.strip_prefix('/') {
                Some(closed) => assert_eq!(open.pop(), Some(closed)),
                None if name.starts_with('!') || VOID.contains(&name) => {}
                None => open.push(name),
            }
        }
        assert_eq!(open, ["html", "body"]);
    }
}

#[test]
fn the_page_of_a_large_model_is_small() {
    let page = report(2000).to_html();
    assert!(page.len() < 3_000_000, "{}", page.len());
    assert_eq!(page.matches("<tr ").count(), 2000);
    leave("large.html", &page);
    // Beyond the maximum number of rows, weights are omitted with a note.
    let page = report(40_000).to_html();
    assert!(page.len() < 5_000_000, "{}", page.len());
    assert!(page.contains("37000 smaller weights with smaller changes are only in report.json"));
}

#[test]
fn missing_measurements_are_omitted() {
    let mut bare = report(5);
    (bare.accuracy, bare.latency, bare.compute) = (None, None, None);
    bare.histograms.clear();
    bare.passes[0].details = Value::Null;
    let page = bare.to_html();
    for section in ["accuracy", "latency", "values", "sensitivity", "training", "memory"] {
        assert!(!page.contains(&format!("<section id=\"{section}\"")), "{section}");
    }
    assert!(page.contains("not measured") && page.contains("<section id=\"weights\""));
    bare.layers.clear();
    bare.passes.clear();
    assert!(!bare.to_html().contains("<section id=\"weights\""));
}

/// Warnings have a section at the top; other notes are collapsed.
#[test]
fn warnings_are_separate_from_other_notes() {
    let mut report = report(30);
    report.notes = vec!["warning: too few samples".to_owned(), "14 Add remain in floats".to_owned()];
    let in_order = |text: &str, parts: &[&str]| {
        let positions: Vec<usize> = parts.iter().map(|part| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"))).collect();
        assert!(positions.is_sorted(), "{parts:?}: {positions:?}");
    };
    in_order(&report.to_html(), &["<h2>Warnings</h2>", "<li>too few samples</li>", "<details><summary>1 note</summary>", "<li>14 Add remain in floats</li>"]);
    in_order(&report.to_markdown(), &["## Warnings\n\n- too few samples\n", "## Measured", "## Passes", "## Notes\n\n- 14 Add remain in floats\n"]);
    assert!(!report.to_html().contains("warning: ") && !report.to_markdown().contains("warning: "));
}

#[test]
fn extreme_values_do_not_break_a_page() {
    let mut odd = report(5);
    for (layer, value) in odd.layers.iter_mut().zip([1e308, -1e308, 0.0, 1e-300, 4.0]) {
        (layer.sqnr_db, layer.shape) = (Some(value), vec![usize::MAX, usize::MAX]);
        (layer.bytes_before, layer.bytes_after) = (u64::MAX / 8, 0);
    }
    let mut histograms = serde_json::to_value(&odd.histograms).unwrap();
    (histograms[0]["before"], histograms[0]["after"]) = (json!([]), json!([0, 0, 0]));
    odd.histograms = serde_json::from_value(histograms).unwrap();
    odd.passes[0].details =
        json!({ "training": { "curve": [{ "step": "x" }, 3, { "step": 1e308, "loss": -1e308 }] }, "memory": { "timeline": 5, "phases": [null] } });
    let page = odd.to_html();
    assert!(!page.contains("NaN") && !page.contains("inf "), "{:?}", page.find("NaN").map(|at| &page[at.saturating_sub(200)..at + 10]));
}

#[test]
fn the_pareto_front_and_differing_options_are_marked() {
    let run = |bytes: u64, score: f64, amount: f64| {
        let mut run = report(3);
        run.size.after.bytes = bytes;
        let accuracy = run.accuracy.as_mut().unwrap();
        accuracy.metric = Some("accuracy".into());
        accuracy.after.values_mut().for_each(|value| *value = score);
        run.recipe = json!({ "model": "m", "seed": 0, "passes": [{ "prune-unstructured": { "amount": amount, "scope": "tensor" } }] });
        run
    };
    let runs =
        [("a", run(100, 0.9, 0.1)), ("b", run(50, 0.8, 0.5)), ("c", run(60, 0.7, 0.6)), ("d", run(100, 0.9, 0.2))].map(|(name, run)| (name.to_owned(), run));
    let compared = |runs: &[(String, Report)]| serde_json::to_value(Comparison::new(runs)).unwrap();
    let front = |comparison: &Value| comparison["runs"].as_array().unwrap().iter().map(|run| run["front"].as_bool().unwrap()).collect::<Vec<_>>();
    let comparison = compared(&runs);
    assert_eq!(front(&comparison), [true, true, false, true]);
    assert_eq!(comparison["metric"], "accuracy");
    assert_eq!(comparison["differing"].as_array().unwrap().len(), 1);
    assert_eq!(comparison["differing"][0]["option"], "prune-unstructured.amount");
    let mut lower = runs.clone();
    lower.iter_mut().for_each(|(_, run)| run.accuracy.as_mut().unwrap().metric = Some("perplexity".into()));
    assert_eq!(front(&compared(&lower)), [false, true, true, false]);
    // Runs on other samples are not ranked. The path does not identify samples if their hash is known.
    let changed = |change: &dyn Fn(&mut Report)| {
        let mut changed = runs.clone();
        changed.iter_mut().for_each(|(_, run)| run.accuracy.as_mut().unwrap().data_blake3 = Some("0123456789".into()));
        change(&mut changed[1].1);
        let comparison = compared(&changed);
        assert_eq!(comparison["metric"].is_null(), front(&comparison) == [false; 4], "{comparison}");
        let text = Comparison::new(&changed).to_terminal();
        comparison["note"].as_str().map(|note| {
            assert!(text.contains(&format!(" note: {note}")) && Comparison::new(&changed).to_html().contains("not ranked by"), "{text}");
            note.to_owned()
        })
    };
    assert_eq!(changed(&|run| run.accuracy.as_mut().unwrap().data = "moved.txt".into()), None);
    assert_eq!(changed(&|run| run.recipe["data"] = json!({ "evaluation": { "text": "moved.txt", "batch_size": 2 } })), None);
    let other = changed(&|run| run.accuracy.as_mut().unwrap().data_blake3 = Some("abcdefghij".into())).unwrap();
    assert!(other.starts_with("not ranked by accuracy: the runs were measured on different samples, `a` on "), "{other}");
    assert!(other.contains("(BLAKE3 01234567), `b` on ") && other.contains("(BLAKE3 abcdefgh), `c`"), "{other}");
    assert!(changed(&|run| run.accuracy.as_mut().unwrap().samples += 1).unwrap().contains("different samples"));
    assert!(changed(&|run| (run.accuracy.as_mut().unwrap().data, run.accuracy.as_mut().unwrap().data_blake3) = ("b.txt".into(), None)).is_some());
    let options = changed(&|run| run.recipe["data"] = json!({ "evaluation": { "max_length": 8 } }));
    assert_eq!(options.as_deref(), Some("not ranked by accuracy: the options of `data.evaluation` differ"));
    let mut mixed = runs.clone();
    mixed[1].1.accuracy.as_mut().unwrap().metric = None;
    assert_eq!(compared(&mixed)["metric"], "cosine");
    // Synthetic samples depend on the seed.
    let mut synthetic = runs.clone();
    for (_, run) in &mut synthetic {
        run.accuracy = None;
        let figures =
            json!({ "samples_from": "synthetic", "samples": 8, "output": "logits", "cosine": 0.5, "cosine_min": 0.5, "max_abs_error": 1.0, "largest": 2.0 });
        run.fidelity = Some(serde_json::from_value(figures).unwrap());
    }
    assert_eq!(compared(&synthetic)["metric"], "cosine");
    assert_eq!(Comparison::new(&synthetic).to_terminal().lines().next().unwrap().matches("cosine").count(), 1);
    synthetic[1].1.seed += 1;
    let note = compared(&synthetic)["note"].to_string();
    assert!(note.contains("`b` on 8 synthetic samples (random inputs) of seed "), "{note}");
    // The path of a recipe next to an output.
    let mut held_out = synthetic.clone();
    for ((_, run), data) in held_out.iter_mut().zip(["book.txt", "out/../book.txt", "a/b/../../book.txt", "./book.txt"]) {
        let figures = run.fidelity.as_ref().unwrap().fidelity.clone();
        let mut measured = serde_json::to_value(figures).unwrap();
        measured.as_object_mut().unwrap().extend([("samples_from".into(), json!("held-out")), ("samples".into(), json!(1)), ("data".into(), json!(data))]);
        run.fidelity = Some(serde_json::from_value(measured).unwrap());
    }
    assert_eq!(compared(&held_out)["metric"], "cosine");
    let changed = |change: &dyn Fn(&mut Report)| {
        let mut changed = held_out.clone();
        change(&mut changed[1].1);
        compared(&changed)
    };
    assert!(changed(&|run| run.fidelity.as_mut().unwrap().data = Some("../book.txt".into()))["metric"].is_null());
    // Reports of earlier versions do not identify the samples.
    assert_eq!(changed(&|run| run.fidelity.as_mut().unwrap().first_sample = Some("0123456789".into()))["metric"], "cosine");
    // The similarity to another input does not measure the same loss.
    let other_input = changed(&|run| run.model.blake3 = "0".repeat(64));
    assert_eq!((&other_input["metric"], &other_input["note"]), (&Value::Null, &json!("not ranked by cosine: the runs have different input models")));
    held_out.iter_mut().for_each(|(_, run)| run.fidelity.as_mut().unwrap().first_sample = Some("0123456789".into()));
    assert_eq!(compared(&held_out)["metric"], "cosine");
    held_out[1].1.fidelity.as_mut().unwrap().first_sample = Some("abcdefghij".into());
    let note = compared(&held_out)["note"].to_string();
    assert!(note.contains("1 held-out sample of book.txt (hash of the first: 01234567)") && note.contains("(hash of the first: abcdefgh)"), "{note}");
    mixed[1].1.accuracy = None;
    let none = compared(&mixed);
    assert!(none["metric"].is_null() && front(&none).iter().all(|is_best| !is_best));
    assert!(!Comparison::new(&mixed).to_html().contains("<section id=\"pareto\""));
}

/// Perplexity can rise by any number; an accuracy cannot drop by more than 1.
#[test]
fn drops_have_the_unit_of_the_score() {
    let check = |metric: &str, drop: f64| {
        let mut measured = report(3);
        measured.accuracy.as_mut().unwrap().metric = Some(metric.into());
        Budgets { max_drop: Some(drop), ..Budgets::default() }.check(&measured).map(|findings| findings[0].ok)
    };
    assert!(check("perplexity", 5.0).unwrap() && check("accuracy", 0.05).unwrap());
    let error = check("accuracy", 5.0).unwrap_err().to_string();
    assert!(error.contains("--max-drop") && error.contains("write `0.05` or `5%`"), "{error}");
}

/// Property: a worse model fails every budget, a better one passes it, and a value equal to the limit
/// passes.
#[test]
fn every_budget_fails_on_the_worse_side_only() {
    let mut measured = report(3);
    measured.compute = Some(
        serde_json::from_value(json!({ "sizes": {}, "before": { "macs": 1000, "activation_bytes": 1 }, "after": { "macs": 500, "activation_bytes": 1 } }))
            .unwrap(),
    );
    let size = |bytes: u64| Some(format!("{bytes}B").parse().unwrap());
    let none = Budgets::default;
    // A limit that is met exactly, and the change that makes it fail: negative for `max`, positive for
    // `min`.
    type Set<'a> = &'a dyn Fn(f64) -> Budgets;
    let budgets: [(&str, f64, f64, Set); 13] = [
        ("max-bytes", 7e9, -1.0, &|limit: f64| Budgets { max_bytes: size(limit as u64), ..none() }),
        ("max-size-ratio", 0.5, -0.01, &|limit: f64| Budgets { max_size_ratio: Some(limit), ..none() }),
        ("max-drop", 0.01, -0.001, &|limit: f64| Budgets { max_drop: Some(limit), ..none() }),
        ("min-cosine", 0.99, 0.001, &|limit: f64| Budgets { min_cosine: Some(limit), ..none() }),
        ("min-least-cosine", 0.9, 0.001, &|limit: f64| Budgets { min_least_cosine: Some(limit), ..none() }),
        ("min-sqnr", 20.0, 0.1, &|limit: f64| Budgets { min_sqnr: Some(limit), ..none() }),
        ("min-agreement", 0.9, 0.01, &|limit: f64| Budgets { min_agreement: Some(limit), ..none() }),
        ("min-speedup", 2.0, 0.1, &|limit: f64| Budgets { min_speedup: Some(limit), ..none() }),
        ("max-latency", 5.0, -0.1, &|limit: f64| Budgets { max_latency: Some(limit), ..none() }),
        ("max-latency-p95", 7.0, -0.1, &|limit: f64| Budgets { max_latency_p95: Some(limit), ..none() }),
        ("max-macs-ratio", 0.5, -0.01, &|limit: f64| Budgets { max_macs_ratio: Some(limit), ..none() }),
        ("max-memory", 5.0, -1.0, &|limit: f64| Budgets { max_memory: size(limit as u64), ..none() }),
        ("max-seconds", 3.0, -0.1, &|limit: f64| Budgets { max_seconds: Some(limit), ..none() }),
    ];
    for (name, limit, stricter, budget) in budgets {
        let finding = |limit: f64| budget(limit).check(&measured).unwrap().remove(0);
        assert_eq!((finding(limit).budget, finding(limit).measured), (name, limit));
        assert!(finding(limit).ok, "{name} at its limit");
        assert!(finding(limit - stricter).ok, "{name} with room");
        assert!(!finding(limit + stricter).ok, "{name} beyond its limit");
    }
}

//! Long commands check the locations of their results before the work, and an interruption names the results
//! that it keeps.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use candle_core::{Device, Tensor};

use super::prepared;
use crate::cli::support::{Run, command, compress, names, ok};

/// A small decoder, and samples for it.
fn with_samples() -> tempfile::TempDir {
    let folder = prepared();
    let ids = Tensor::from_vec((0..64i64).map(|i| i * 7 % 40).collect::<Vec<_>>(), (8, 8), &Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&arrays.into(), folder.path().join("ids.safetensors")).unwrap();
    fs::write(folder.path().join("in/tokenizer.model"), "").unwrap();
    folder
}

/// `/proc` is not writable for any user.
#[test]
fn locations_are_checked_before_the_work() {
    let folder = with_samples();
    let path = folder.path();
    let search = r#"auto in --calibration {"arrays":"ids.safetensors","samples":4} --for transformers --max-size 8bits --log-format json"#;
    fs::write(path.join("sweep.yaml"), "model: in\npasses: [prune-unstructured: { amount: 0.5 }]\noutput: /proc/out\n").unwrap();
    for args in [
        format!("{search} -o /proc/out"),
        format!("{search} -o out --front /proc/front.json"),
        format!("{search} -o out --checkpoint /proc/state.json"),
        "search-structure in -o /proc/out --limit layers=0.5 --calibration ids.safetensors --log-format json".to_owned(),
        "quantize in -o /proc/out --method gptq --calibration ids.safetensors --log-format json".to_owned(),
        "run sweep.yaml --sweep amount=0.3,0.5 --log-format json".to_owned(),
        "analyze sweep.yaml -o /proc/mixed.yaml --log-format json".to_owned(),
    ] {
        let run = compress(path, &args);
        assert!(run.code == 1 && run.stderr.contains("cannot create /proc") && run.stderr.contains("choose another location"), "{args}: {}", run.stderr);
        assert!(!run.stderr.contains("\"begin\""), "{args}: {}", run.stderr);
    }
    assert_eq!(names(path), ["ids.safetensors", "in", "sweep.yaml"]);
}

/// A search for an output that exists, or whose finished blocks are left, does not begin.
#[test]
fn leftovers_are_found_before_a_search() {
    let folder = with_samples();
    let path = folder.path();
    fs::create_dir_all(path.join("out.unfinished/0 quantize")).unwrap();
    fs::write(path.join("out.unfinished/compress.lock"), "").unwrap();
    fs::write(path.join("out.unfinished/0 quantize/block"), "kept").unwrap();
    let search = r#"auto in -o out --calibration {"arrays":"ids.safetensors","samples":4} --for transformers --max-size 8bits --log-format json"#;
    let run = compress(path, search);
    assert!(run.code == 1 && run.stderr.contains("was left by an interrupted run") && run.stderr.contains("set `--resume` to continue it"), "{}", run.stderr);
    assert!(!run.stderr.contains("\"begin\"") && path.join("out.unfinished/0 quantize/block").is_file(), "{}", run.stderr);
}

/// Sends SIGINT as soon as a file appears.
fn interrupted(folder: &Path, args: &str, file: &str) -> Run {
    let mut child = command(folder).args(args.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !folder.join(file).exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT);
    child.wait_with_output().unwrap().into()
}

#[test]
fn an_interrupted_search_names_what_it_has_kept() {
    let folder = with_samples();
    let path = folder.path();
    // Enough points for a search that is still running after its first measurement.
    let search = r#"auto in --front front.json --for transformers --calibration {"arrays":"ids.safetensors","samples":4} --points 500 --checkpoint state.json --threads 1"#;
    // A search that ends before the signal arrives is repeated.
    let mut runs = (0..5).map(|_| {
        ["state.json", "front.json"].iter().for_each(|file| drop(fs::remove_file(path.join(file))));
        interrupted(path, search, "state.json")
    });
    let run = runs.find(|run| run.code != 0).unwrap();
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("interrupted: no output was written; the measurements of the search are saved in state.json"), "{}", run.stderr);
    assert!(run.stderr.contains("hint: run the same command again: it continues with them"), "{}", run.stderr);
    let kept = fs::metadata(path.join("state.json")).unwrap().len();
    ok(path, &search.replace("--points 500", "--points 2"));
    assert!(fs::metadata(path.join("state.json")).unwrap().len() >= kept && path.join("front.json").is_file());
}

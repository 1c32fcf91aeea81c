//! Runs in parts: the output equals that of a run by one process, and parts of different runs are not
//! merged.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use compress::Model;
use compress::pipeline::PartIndex;
use compress::pipeline::{Builder, PartOutcome, Pipeline, parts_folder, recipe_from_parts};
use compress::recipe::Recipe;
use compress::report::Report;

use crate::common::golden_model as golden;

fn builder(steps: &str) -> Builder {
    let recipe = Recipe::parse(&format!("model: x\nmeasure: false\n{steps}"), Path::new("recipe.yaml")).unwrap();
    Pipeline::builder().threads(2).recipe(&recipe)
}

/// Runs all parts until each is written. Returns the number of rounds.
fn in_parts(steps: &str, model: &Path, output: &Path, count: usize) -> usize {
    let pipeline = builder(steps).build().unwrap();
    for round in 1..=6 {
        // In reverse order, because parts do not depend on previous parts.
        let shares = PartIndex::new(1, count).unwrap().all().collect::<Vec<_>>().into_iter().rev();
        let outcomes: Vec<PartOutcome> = shares.map(|share| pipeline.run_part(Model::open(model).unwrap(), output, share).unwrap()).collect();
        if !outcomes.contains(&PartOutcome::Counted) {
            return round;
        }
    }
    panic!("parts never finish")
}

fn merged(model: &Path, output: &Path) -> compress::Result<Report> {
    let recipe = recipe_from_parts(output)?;
    Pipeline::builder().recipe(&recipe).build()?.merge(Model::open(model)?, output, false)
}

/// Contents of a folder, except the reports.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            found.extend(files(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else if !name.starts_with("report.") {
            found.insert(name, std::fs::read(&path).unwrap());
        }
    }
    found
}

#[test]
fn merged_parts_equal_a_run_by_one_process() {
    let sharded = "export: [{ safetensors: { shard_size: 10KB } }]";
    let cases = [
        ("llama", "passes: [{ prune-unstructured: { amount: 0.5 } }]", 1),
        ("llama", "passes: [{ prune-unstructured: { amount: 0.5, scope: global } }]", 3),
        ("llama", "passes: [{ cast: { to: bf16 } }, { prune-unstructured: { amount: 0.3, scope: global } }, quantize-dynamic]", 2),
        ("llama", "passes: [{ prune-unstructured: { amount: 0.2, scope: global } }, { prune-unstructured: { amount: 0.4, scope: global } }]", 5),
        ("bert", "passes: [{ prune-unstructured: { pattern: '2:4' } }, quantize-dynamic]", 1),
        ("llama-grouped-tied", "passes: [{ quantize: { scheme: W4A16, group_size: 8 } }]", 1),
        ("llama", "passes: [{ palettize: { bits: 4 } }]", 1),
        ("gpt2", "passes: [{ prune-unstructured: { amount: 0.7 } }]\nexport: [{ safetensors: { layout: sparse } }]", 1),
        // Each part ranks the weights of the other parts itself.
        ("llama", "passes: [{ prune-unstructured: { amount: 0.5, scope: global } }, { quantize: { scheme: NVFP4A16 } }]", 3),
        (
            "llama-grouped-tied",
            "passes: [{ prune-unstructured: { amount: 0.5, scope: global, targets: ['*'] } }, { quantize-dynamic: { embeddings: true } }]",
            3,
        ),
        ("bert", "passes: []", 1),
        ("sentence-dense", "passes: [{ prune-unstructured: { amount: 0.5, scope: global } }]", 3),
    ];
    for (model, steps, most) in cases {
        let steps = &if steps.contains("export") { steps.to_owned() } else { format!("{steps}\n{sharded}") };
        let folder = tempfile::tempdir().unwrap();
        let model = golden(model);
        let whole = folder.path().join("whole");
        let before = builder(steps).build().unwrap().run(Model::open(&model).unwrap(), &whole).unwrap();
        let counts = match () {
            () if steps.contains("bf16") => vec![1, 3, 16],
            () if steps.contains("NVFP4") || steps.contains("embeddings") => vec![16],
            () => vec![3],
        };
        for count in counts {
            let output = folder.path().join(format!("out-{count}"));
            let rounds = in_parts(steps, &model, &output, count);
            assert!(rounds <= most, "{steps}: {rounds} rounds");
            let inodes = |folder: &Path| -> Vec<u64> {
                let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
                files.filter(|file| file.path().extension().is_some_and(|e| e == "safetensors")).map(|file| file.metadata().unwrap().ino()).collect()
            };
            let made: Vec<u64> = std::fs::read_dir(parts_folder(&output)).unwrap().flat_map(|part| inodes(&part.unwrap().path())).collect();
            let after = merged(&model, &output).unwrap();
            // If there are as many files as parts, whole files are linked.
            let whole_files = files(&whole).keys().filter(|name| name.ends_with(".safetensors")).count() >= count && !steps.contains("sparse");
            assert_eq!(inodes(&output).iter().all(|inode| made.contains(inode)), whole_files, "{steps} in {count} parts");
            assert_eq!(files(&whole).keys().collect::<Vec<_>>(), files(&output).keys().collect::<Vec<_>>());
            for (name, bytes) in files(&whole) {
                assert!(files(&output)[&name] == bytes, "{steps} in {count} parts: {name}");
            }
            assert_eq!((&after.layers, &after.histograms, &after.size), (&before.layers, &before.histograms, &before.size), "{steps} in {count} parts");
            assert_eq!((&after.model.blake3, &after.outputs), (&before.model.blake3, &before.outputs), "{steps} in {count} parts");
        }
    }
}

#[test]
fn a_missing_part_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let (model, output, steps) = (golden("llama"), folder.path().join("out"), "passes: [quantize-dynamic]");
    in_parts(steps, &model, &output, 3);
    let pipeline = builder(steps).build().unwrap();
    let part = |number| pipeline.run_part(Model::open(&model).unwrap(), &output, PartIndex::new(number, 3).unwrap());
    assert_eq!(part(2).unwrap(), PartOutcome::Found);
    let second = parts_folder(&output).join("00002-of-00003");
    std::fs::remove_dir_all(&second).unwrap();
    let error = merged(&model, &output).unwrap_err();
    assert!(error.to_string().contains("1 of 3 parts are missing: 2") && error.hint().unwrap().contains("`part` 2/3"), "{error}");
    assert_eq!(part(2).unwrap(), PartOutcome::Written);
    // One bit.
    let file = second.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let error = merged(&model, &output).unwrap_err().to_string();
    assert!(error.contains("model.safetensors") && error.contains("damaged") && error.contains("00002-of-00003"), "{error}");
    assert!(!output.exists());
    std::fs::remove_dir_all(&second).unwrap();
    part(2).unwrap();
    merged(&model, &output).unwrap();
}

#[test]
fn parts_of_different_runs_are_not_merged() {
    let folder = tempfile::tempdir().unwrap();
    let (model, output) = (golden("llama"), folder.path().join("out"));
    assert!(recipe_from_parts(&output).unwrap_err().to_string().contains("no finished part"));
    let part = |steps: &str, name: &str, number, count| {
        builder(steps)
            .build()
            .unwrap()
            .run_part(Model::open(golden(name)).unwrap(), &output, PartIndex::new(number, count).unwrap())
            .map_err(|error| error.to_string())
    };
    let (int8, half) = ("passes: [quantize-dynamic]", "passes: [prune-unstructured]");
    part(int8, "llama", 1, 2).unwrap();
    let error = part(half, "llama", 1, 2).unwrap_err();
    assert!(error.contains("is a part of another run: its recipe differs in `passes`") && !error.contains("model"), "{error}");
    let error = part(&format!("{int8}\nseed: 5"), "llama", 1, 2).unwrap_err();
    assert!(error.contains("differs in `seed`") && !error.contains("passes"), "{error}");
    let error = part(int8, "llama-biases", 1, 2).unwrap_err();
    assert!(error.contains("is a part of another run: its recipe is the same, but the model"), "{error}");
    // Another version of the program, and a file that was truncated.
    let written = parts_folder(&output).join("00001-of-00002");
    let manifest = std::fs::read_to_string(written.join("part.json")).unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    (other["version"], other["key"]) = ("0.0.9".into(), "other".into());
    std::fs::write(written.join("part.json"), other.to_string()).unwrap();
    let error = part(int8, "llama", 1, 2).unwrap_err();
    assert!(error.contains(&format!("it was written by compress 0.0.9 instead of {}", env!("CARGO_PKG_VERSION"))) && !error.contains("recipe"), "{error}");
    std::fs::write(written.join("part.json"), manifest).unwrap();
    let weights = std::fs::read(written.join("model.safetensors")).unwrap();
    std::fs::write(written.join("model.safetensors"), &weights[1..]).unwrap();
    let error = part(int8, "llama", 1, 2).unwrap_err();
    assert!(error.contains("is not complete: model.safetensors") && !error.contains("another run"), "{error}");
    std::fs::write(written.join("model.safetensors"), weights).unwrap();
    part(half, "llama", 2, 2).unwrap();
    let error = merged(&model, &output).unwrap_err().to_string();
    assert!(error.contains("00002-of-00002") && error.contains("another run"), "{error}");
    part(int8, "llama", 1, 3).unwrap();
    assert!(merged(&model, &output).unwrap_err().to_string().contains("parts of runs in 2 and 3 parts"));
    assert!(!output.exists());
    std::fs::write(parts_folder(&output).join("00001-of-00002/part.json"), "{").unwrap();
    assert!(part(int8, "llama", 1, 2).unwrap_err().contains("part.json"));
    // Contents that have changed under the same names: one byte of a weight, of the tokenizer, or of the
    // texts of a pass.
    let changed = folder.path().join("changed");
    std::fs::create_dir(&changed).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model.join(name), changed.join(name)).unwrap();
    }
    std::fs::copy(golden("../evaluation/word-pieces.json"), changed.join("tokenizer.json")).unwrap();
    let corpus = folder.path().join("corpus.txt");
    std::fs::write(&corpus, "the old house by the river\n").unwrap();
    let words = format!("passes: [{{ prune-vocabulary: {{ keep: {} }} }}]", corpus.display());
    for (number, file) in [changed.join("model.safetensors"), changed.join("tokenizer.json"), corpus].iter().enumerate() {
        let output = folder.path().join(format!("other-{number}"));
        in_parts(&words, &changed, &output, 2);
        let before = std::fs::read(file).unwrap();
        let mut bytes = before.clone();
        match number {
            0 => *bytes.last_mut().unwrap() ^= 1,
            _ => bytes.push(b'\n'),
        }
        std::fs::write(file, bytes).unwrap();
        let error = merged(&changed, &output).unwrap_err().to_string();
        assert!(error.contains("another run"), "{}: {error}", file.display());
        std::fs::write(file, before).unwrap();
        merged(&changed, &output).unwrap();
    }
}

#[test]
fn force_removes_parts_of_other_runs_and_keeps_foreign_files() {
    let folder = tempfile::tempdir().unwrap();
    let (model, output) = (golden("llama"), folder.path().join("out"));
    in_parts("passes: [quantize-dynamic]", &model, &output, 2);
    std::fs::write(parts_folder(&output).join("notes.txt"), "mine").unwrap();
    let global = builder("passes: [{ prune-unstructured: { scope: global } }]").force(true).build().unwrap();
    let outcome = |number| global.run_part(Model::open(&model).unwrap(), &output, PartIndex::new(number, 2).unwrap()).unwrap();
    assert_eq!([outcome(1), outcome(2)], [PartOutcome::Counted; 2]);
    assert!(merged(&model, &output).unwrap_err().to_string().contains("no finished part"));
    while [outcome(1), outcome(2)].contains(&PartOutcome::Counted) {}
    merged(&model, &output).unwrap();
    let left: Vec<PathBuf> = std::fs::read_dir(parts_folder(&output)).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [parts_folder(&output).join("notes.txt")]);
}

#[test]
#[cfg(feature = "run")]
fn unsupported_passes_and_formats_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |steps: &str| {
        let pipeline = builder(steps).build().unwrap();
        pipeline.run_part(Model::open(golden("llama")).unwrap(), folder.path().join("out"), PartIndex::new(1, 2).unwrap()).unwrap_err().to_string()
    };
    assert!(refused("passes: [{ decompose: { rank: 4 } }]").contains("decompose runs the model"));
    assert!(refused("passes: [cast: { to: f32 }]\nexport: [onnx]").contains("`onnx` writes a single file"));
    assert!(refused("passes: []\nexport: [safetensors, onnx]").contains("several formats"));
    // Its importance depends on the calibration data.
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/book.txt");
    let weighted = format!("passes: [palettize: {{ bits: 4 }}]\ndata: {{ calibration: {{ text: {} }} }}", book.display());
    assert!(refused(&weighted).contains("palettize runs the model"));
    let file = builder("passes: []").build().unwrap().run_part(Model::open(golden("llama")).unwrap(), "out.onnx", PartIndex::new(1, 2).unwrap());
    assert!(file.unwrap_err().to_string().contains("out.onnx is a file"));
    assert!(!folder.path().join("out.parts").exists());
}

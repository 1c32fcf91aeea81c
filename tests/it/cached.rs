//! Cached runs, and the example of a build script that uses one.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use compress::prelude::*;

const CRATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/build_script");

/// A copy of the example's model.
fn model(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(Path::new(CRATE).join("model")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    model
}

/// Changes the last byte of the weights.
fn change(model: &Path) {
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

fn touch(path: &Path) {
    fs::File::options().append(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
}

#[test]
fn only_changed_inputs_cause_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let (model, output) = (model(folder.path()), folder.path().join("out"));
    let run = |amount: f64| {
        let prune = PruneUnstructured { amount: Some(Amount::fraction(amount)), ..Default::default() };
        Pipeline::builder().pass(prune).build().unwrap().run_cached(Model::open(&model).unwrap(), &output).unwrap()
    };
    let first = run(0.5);
    assert!(!first.reused);
    let again = run(0.5);
    assert!(again.reused && again.report == first.report);
    touch(&model.join("model.safetensors"));
    assert!(run(0.5).reused);

    assert!(!run(0.25).reused, "other options");
    change(&model);
    assert!(!run(0.25).reused, "other weights");
    fs::write(model.join("graph.json"), fs::read_to_string(model.join("graph.json")).unwrap() + "\n").unwrap();
    assert!(!run(0.25).reused, "another file");
    fs::write(model.join("vocab.txt"), "").unwrap();
    assert!(!run(0.25).reused, "one more file");
    change(&output);
    assert!(!run(0.25).reused, "a damaged output");
    assert!(run(0.25).reused);

    let moved = folder.path().join("moved");
    fs::rename(&model, &moved).unwrap();
    let prune = PruneUnstructured { amount: Some(Amount::fraction(0.25)), ..Default::default() };
    assert!(Pipeline::builder().pass(prune).build().unwrap().run_cached(Model::open(&moved).unwrap(), &output).unwrap().reused);
    assert!(!Model::open(&output).unwrap().inputs().contains(&output.join(Model::KEY)), "the key belongs to one folder");
}

#[test]
fn every_input_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let mut inputs = Model::open(&model).unwrap().inputs();
    inputs.sort();
    assert_eq!(inputs, ["config.json", "graph.json", "model.safetensors"].map(|name| model.join(name)));
    let file = model.join("model.safetensors");
    assert_eq!(Model::open(&file).unwrap().inputs(), [file]);
}

/// Results of passes and measurements that read data depend on its contents.
#[cfg(feature = "run")]
#[test]
fn changed_data_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let (model, output, samples) = (model(folder.path()), folder.path().join("out"), folder.path().join("samples.safetensors"));
    let write = |value: f32| {
        let bytes: Vec<u8> = (0..4 * 784).flat_map(|i| (value * (i % 7) as f32).to_le_bytes()).collect();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![4, 784], &bytes).unwrap();
        safetensors::serialize_to_file([("pixels", view)], None, &samples).unwrap();
    };
    let data = Data { arrays: Some(samples.clone()), ..Data::default() };
    let builders: [fn(Data) -> compress::pipeline::Builder; 2] =
        [|data| Pipeline::builder().pass(QuantizeStatic::default()).calibration(data), |data| Pipeline::builder().evaluation(data)];
    for builder in builders {
        write(0.1);
        let pipeline = builder(data.clone()).build().unwrap();
        let run = || pipeline.run_cached(Model::open(&model).unwrap(), &output).unwrap().reused;
        assert!(pipeline.inputs(&Model::open(&model).unwrap()).contains(&samples));
        assert!(!run() && run());
        write(0.2);
        assert!(!run(), "other samples");
        assert!(run());
    }
}

#[test]
fn a_recipe_file_is_an_input() {
    let folder = tempfile::tempdir().unwrap();
    let (model, recipe) = (model(folder.path()), folder.path().join("recipe.yaml"));
    fs::write(&recipe, "{ model: model, passes: [cast: { to: f16 }] }").unwrap();
    let pipeline = Pipeline::builder().recipe_file(&recipe).unwrap().build().unwrap();
    let opened = Model::open(&model).unwrap();
    let inputs = pipeline.inputs(&opened);
    assert!([&recipe, &model, &model.join("config.json")].iter().all(|path| inputs.contains(path)), "{inputs:?}");
    assert_eq!(pipeline.plan(&opened).unwrap().passes[0].name, "cast");
}

/// Builds and runs the example. Returns its output and the modification time of its model.
fn run_example(model: &Path) -> (String, SystemTime) {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("build_script");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--locked", "--offline", "--manifest-path"]).arg(Path::new(CRATE).join("Cargo.toml"));
    cargo.env("CARGO_TARGET_DIR", &target).env("MODEL", model);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = fs::read_dir(target.join("debug/build")).unwrap().filter_map(|entry| {
        let weights = entry.unwrap().path().join("out/embedded_model/model.safetensors");
        fs::metadata(weights).ok()?.modified().ok()
    });
    (String::from_utf8(output.stdout).unwrap(), written.max().unwrap())
}

#[test]
fn the_build_script_compresses_changed_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    // Removes the output of an earlier run of this test.
    change(&model);
    let random = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
    fs::write(model.join("once.txt"), random.to_string()).unwrap();
    let (printed, first) = run_example(&model);
    assert!(printed.contains("fc1.weight") && printed.contains("I8") && printed.contains("39040 bytes in the program"), "{printed}");
    assert_eq!(run_example(&model), (printed.clone(), first), "nothing has changed");
    touch(&model.join("model.safetensors"));
    assert_eq!(run_example(&model), (printed, first), "the same bytes were compressed again");
    change(&model);
    let second = run_example(&model).1;
    assert_ne!(second, first, "a changed model was not compressed");
    fs::write(model.join("vocab.txt"), "").unwrap();
    assert_ne!(run_example(&model).1, second, "a file was added to the folder");
}

/// The versions in a Cargo.lock, as `name version`.
fn locked(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let packages = text.split("[[package]]").skip(1);
    packages.map(|package| package.lines().skip(1).take(2).map(|line| line.split('"').nth(1).unwrap()).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn the_example_is_built_with_the_same_versions() {
    let ours = locked(&Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock"));
    let theirs = locked(&Path::new(CRATE).join("Cargo.lock"));
    let other: Vec<&String> = theirs.iter().filter(|package| !ours.contains(package) && !package.starts_with("build_script ")).collect();
    assert!(theirs.len() > 20 && other.is_empty(), "{other:?}");
}

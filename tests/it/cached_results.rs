//! The persistent cache of pass results.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{Device, Tensor};
use compress::export::Safetensors;
use compress::pass::{
    Amount, Amounts, Cast, Distill, Finetune, PruneStructured, PruneUnstructured, PrunedPart, QuantizeDynamic, QuantizeStatic, Step, Student, Training,
};
use compress::pipeline::{Builder, ResultCache};
use compress::report::Report;
use compress::{Model, Pipeline};
use compress_engine::data::Data;
use compress_engine::exec::DeviceChoice;
use compress_engine::train::BatchSize;

use crate::common::golden_model as golden;
use crate::train::with_training;

struct Workspace {
    folder: tempfile::TempDir,
}

impl Workspace {
    /// A folder with a copy of a small model, and labelled images for it.
    fn new(model: &str) -> Workspace {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("in")).unwrap();
        for entry in fs::read_dir(golden(model)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join("in").join(path.file_name().unwrap())).unwrap();
        }
        let place = Workspace { folder };
        place.data(0.5);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes samples generated from a seed.
    fn data(&self, number: f64) {
        self.images(number, 32);
    }

    /// Writes samples of another size.
    fn images(&self, number: f64, size: usize) {
        let values: Vec<f32> = (0..8 * 3 * size * size).map(|i| (i as f64 * 0.37 * number).sin() as f32).collect();
        let arrays = HashMap::from([
            ("pixel_values".to_owned(), Tensor::from_vec(values, &[8, 3, size, size], &Device::Cpu).unwrap()),
            ("labels".to_owned(), Tensor::new(&[0i64, 1, 0, 1, 0, 1, 0, 1], &Device::Cpu).unwrap()),
        ]);
        candle_core::safetensors::save(&arrays, self.path("data.safetensors")).unwrap();
    }

    fn cache(&self) -> ResultCache {
        ResultCache::new(self.path("cache"), Duration::ZERO)
    }

    fn builder(&self, steps: &[Step]) -> Builder {
        let data = Data { arrays: Some(self.path("data.safetensors")), ..Data::default() };
        Pipeline::builder().passes(steps.iter().cloned()).train(data.clone()).calibration(data)
    }

    fn run(&self, builder: Builder, out: &str) -> Report {
        let out = self.path(out);
        builder.force(true).build().unwrap().run(Model::open(self.path("in")).unwrap(), out).unwrap()
    }

    /// Runs with the cache. Returns whether a result was reused.
    fn again(&self, steps: &[Step], out: &str) -> (Report, bool) {
        let report = self.run(self.builder(steps).cache(self.cache(), false).resume(true), out);
        let taken = report.notes.iter().any(|note| note.contains("was reused from an earlier run"));
        (report, taken)
    }

    /// Bytes of the output, except reports and tables, which contain times.
    fn files(&self, out: &str) -> BTreeMap<String, Vec<u8>> {
        let told = |name: &str| name.starts_with("report") || name.ends_with(".csv");
        let files = fs::read_dir(self.path(out)).unwrap().map(|entry| entry.unwrap().path());
        files.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).filter(|(name, _)| !told(name)).collect()
    }
}

fn finetune() -> Step {
    Finetune { training: Training { max_steps: Some(3), batch_size: BatchSize::Samples(4), learning_rate: 1e-3, ..Training::default() }, ..Finetune::default() }
        .into()
}

const MODEL: &str = "torchvision-resnet18";

#[test]
fn a_reused_result_equals_a_fresh_one() {
    let prune = PruneStructured { dims: vec![PrunedPart::Channels], ..PruneStructured::default() };
    let pipelines: [Vec<Step>; 4] = [
        vec![finetune(), QuantizeStatic::default().into()],
        vec![PruneUnstructured::default().into(), finetune(), QuantizeDynamic::default().into()],
        vec![prune.into(), finetune(), Cast::default().into()],
        vec![QuantizeStatic::default().into(), finetune()],
    ];
    for steps in pipelines {
        let names: Vec<_> = steps.iter().map(|step| step.pass().name()).collect();
        let place = Workspace::new(MODEL);
        let export = |builder: Builder| builder.export(Safetensors::default()).export(compress::export::Onnx::default());
        let whole = place.run(export(place.builder(&steps)), "whole");
        place.run(export(place.builder(&steps)).cache(place.cache(), false), "first");
        assert!(!place.cache().entries().unwrap().is_empty(), "{names:?}");
        let reused = place.run(export(place.builder(&steps)).cache(place.cache(), false).resume(true), "second");
        assert!(reused.notes.iter().any(|note| note.contains("was reused from an earlier run")), "{names:?}: {:?}", reused.notes);
        for (name, bytes) in place.files("whole") {
            assert!(bytes == place.files("second")[&name], "{names:?}: {name} differs");
        }
        assert_eq!(whole.model, reused.model, "{names:?}");
        assert_eq!(whole.size.before, reused.size.before, "{names:?}");
        assert_eq!(whole.size.after, reused.size.after, "{names:?}");
        assert_eq!(whole.layers.len(), reused.layers.len(), "{names:?}");
        assert_eq!(whole.passes.iter().map(|pass| &pass.name).collect::<Vec<_>>(), names);
        assert_eq!(reused.passes.iter().map(|pass| &pass.name).collect::<Vec<_>>(), names);
        let curve = |report: &Report| report.passes.iter().find(|pass| pass.name == "finetune").unwrap().details["training"]["steps"].clone();
        assert_eq!(curve(&whole), curve(&reused));
        assert!(place.path("second/finetune.csv").is_file());
    }
}

/// Layers are ranked by the samples, so that other samples need another run.
#[test]
fn layers_ranked_by_other_samples_are_not_reused() {
    let place = Workspace::new("llama");
    let pass = PruneStructured { dims: vec![PrunedPart::Layers], amount: Some(Amounts::All(Amount::Count(1))), ..PruneStructured::default() };
    let is_reused = |step: i64| {
        let ids = Tensor::from_vec((0..64i64).map(|i| i * step % 40).collect::<Vec<_>>(), (8, 8), &Device::Cpu).unwrap();
        let arrays = HashMap::from([("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())]);
        candle_core::safetensors::save(&arrays, place.path("ids.safetensors")).unwrap();
        let builder = Pipeline::builder().pass(pass.clone()).calibration(Data::at(&place.path("ids.safetensors")));
        let report = place.run(builder.cache(place.cache(), false).resume(true), "out");
        report.notes.iter().any(|note| note.contains("was reused from an earlier run"))
    };
    assert_eq!([7, 7, 3].map(is_reused), [false, true, false]);
}

/// A pass can rename weights, or take them from another folder. A reused result is compared with the same
/// weights. New weights are not compared.
#[test]
fn reused_weights_are_compared_with_those_they_were_derived_from() {
    let model = "vit-image-classification";
    let students = [Student::Layers(vec![1]), Student::Model(golden(model)), Student::Config(golden(model).join("config.json"))];
    for student in students {
        let place = Workspace::new(model);
        place.images(0.5, 12);
        // The input differs from the folder of the student.
        let halved = Pipeline::builder().pass(PruneUnstructured::default()).build().unwrap();
        halved.run(Model::open(golden(model)).unwrap(), place.path("halved")).unwrap();
        fs::remove_dir_all(place.path("in")).unwrap();
        fs::rename(place.path("halved"), place.path("in")).unwrap();
        let distill = Distill {
            student: Some(student.clone()),
            training: Training { losses: "soft=1".parse().unwrap(), max_steps: Some(2), ..Training::default() },
            ..Distill::default()
        };
        let steps = [Step::from(with_training!(distill, batch_size: BatchSize::Samples(4)))];
        let (first, _) = place.again(&steps, "first");
        let (second, is_reused) = place.again(&steps, "second");
        assert!(is_reused, "{student:?}: {:?}", first.notes);
        let measured = |report: &Report| report.layers.iter().map(|layer| (layer.name.clone(), layer.sqnr_db)).collect::<Vec<_>>();
        assert_eq!(measured(&first), measured(&second), "{student:?}");
        assert_eq!(first.size.before, second.size.before, "{student:?}");
        if let Student::Config(_) = student {
            assert!(first.histograms.is_empty() && second.histograms.is_empty());
            assert!(first.layers.iter().all(|layer| layer.sqnr_db.is_none()), "{:?}", first.layers);
        }
    }
}

/// Devices and kernels of different instruction sets round differently. A process selects its instruction set
/// once, so this test runs itself in a new process.
#[test]
fn another_instruction_set_or_device_reuses_nothing() {
    const FOLDER: &str = "COMPRESS_TEST_FOLDER";
    const DEVICE: &str = "COMPRESS_TEST_CACHE_DEVICE";
    let is_reused = |folder: &Path| {
        let data = Data { arrays: Some(folder.join("data.safetensors")), ..Data::default() };
        let cache = ResultCache::new(folder.join("cache"), Duration::ZERO);
        let device = std::env::var(DEVICE).map_or_else(|_| DeviceChoice::Cpu, |device| device.parse().unwrap());
        let builder = Pipeline::builder().passes([finetune()]).train(data).cache(cache, false).resume(true).force(true).device(device);
        let report = builder.build().unwrap().run(Model::open(folder.join("in")).unwrap(), folder.join("out")).unwrap();
        report.notes.iter().any(|note| note.contains("was reused from an earlier run"))
    };
    if let Some(folder) = std::env::var_os(FOLDER) {
        println!("reused: {}", is_reused(Path::new(&folder)));
        return;
    }
    let place = Workspace::new(MODEL);
    assert!(!is_reused(place.folder.path()) && is_reused(place.folder.path()));
    let own = compress_kernels::instruction_set();
    let elsewhere = |set: &str, device: &str| {
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        test.args(["another_instruction_set_or_device_reuses_nothing", "--nocapture"]).env(FOLDER, place.folder.path()).env(DEVICE, device);
        // The only instruction set of ARM processors cannot be selected.
        let output = if set == "neon" { &mut test } else { test.env("COMPRESS_SIMD", set) }.output().unwrap();
        String::from_utf8_lossy(&output.stdout).lines().find_map(|line| line.split_once("reused: ")).unwrap().1 == "true"
    };
    assert!(elsewhere(own, "cpu"));
    assert!(!elsewhere(own, "cpu:strict"));
    // Processors without AVX2 have one instruction set.
    if !["neon", "baseline"].contains(&own) {
        assert!(!elsewhere("baseline", "cpu"));
    }
}

/// Runs A, then B, which starts with the passes of A, with the cache of A. The output equals that of B
/// without a cache. Training continues from the master weights of a quantization, which are the input's
/// or those of an earlier pass.
#[test]
fn a_run_that_continues_a_cached_one_equals_a_fresh_one() {
    let quantize = || Step::from(QuantizeStatic::default());
    for begin in [vec![quantize()], vec![finetune(), quantize()]] {
        let place = Workspace::new(MODEL);
        let steps = [begin.clone(), vec![finetune()]].concat();
        let names: Vec<_> = steps.iter().map(|step| step.pass().name()).collect();
        place.run(place.builder(&steps), "whole");
        place.run(place.builder(&begin).cache(place.cache(), false), "first");
        let (report, taken) = place.again(&steps, "second");
        assert!(taken, "{names:?}: {:?}", report.notes);
        for (name, bytes) in place.files("whole") {
            assert!(bytes == place.files("second")[&name], "{names:?}: {name} differs");
        }
    }
}

#[test]
fn only_results_of_equal_inputs_are_reused() {
    let steps = vec![finetune(), QuantizeDynamic::default().into()];
    let place = Workspace::new(MODEL);
    place.run(place.builder(&steps).cache(place.cache(), false), "first");
    assert!(place.again(&steps, "out").1);
    // Passes after the cached one may change.
    assert!(place.again(&[finetune(), Cast::default().into()], "out").1);
    // Without resuming, a run executes all passes.
    let fresh = place.run(place.builder(&steps).cache(place.cache(), false), "out");
    assert!(!fresh.notes.iter().any(|note| note.contains("earlier run")));
    let reused = place.run(place.builder(&steps).cache(place.cache(), true), "out");
    assert!(reused.notes.iter().any(|note| note.contains("earlier run")));
    let other = Finetune {
        training: Training { max_steps: Some(4), batch_size: BatchSize::Samples(4), learning_rate: 1e-3, ..Training::default() },
        ..Finetune::default()
    };
    assert!(!place.again(&[other.into()], "out").1);
    assert!(!place.again(&[Cast::default().into(), finetune()], "out").1);
    let seeded = place.run(place.builder(&steps).cache(place.cache(), true).seed(7), "out");
    assert!(!seeded.notes.iter().any(|note| note.contains("earlier run")));
    // The same length and modification time, but other bytes.
    let path = place.path("in/model.safetensors");
    let (mut bytes, time) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
    assert!(!place.again(&steps, "out").1);
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(place.again(&steps, "out").1);
    place.data(0.7);
    assert!(!place.again(&steps, "out").1);
    place.data(0.5);
    assert!(place.again(&steps, "out").1);
}

#[test]
fn damaged_results_are_detected_and_removed() {
    let steps = vec![finetune()];
    let place = Workspace::new(MODEL);
    place.run(place.builder(&steps).cache(place.cache(), false), "first");
    let [entry] = &place.cache().entries().unwrap()[..] else { panic!("one result") };
    assert_eq!((entry.pass.as_str(), &entry.model), ("finetune", &place.path("in")));
    let weights = place.path("cache").join(&entry.key).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let (_, taken) = place.again(&steps, "out");
    assert!(!taken);
    assert!(place.again(&steps, "out").1, "it was made again");
    assert_eq!(place.files("first"), place.files("out"));
    assert_eq!(place.cache().clear("no such key").unwrap(), 0);
    assert!(place.cache().clear(&entry.key[..6]).unwrap() > 1000);
    assert!(place.cache().entries().unwrap().is_empty());
    assert!(!place.again(&steps, "out").1);
}

//! Training of tiny models: losses decrease, micro-batches equal whole batches, zeros are preserved,
//! interrupted runs resume.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Tensor};
use compress::pass::{
    Cast, Distill, Finetune, FloatFormat, Method, PruneUnstructured, Quantize, QuantizeDynamic, QuantizeStatic, Scheme, Scope, Step, Student, Training,
};
use compress::pipeline::Builder;
use compress::report::Report;
use compress::{Error, Model, Pipeline};
use compress_core::store::ByteSize;
use compress_core::work::{Cancel, Event};
use compress_engine::data::{Data, Task};
use compress_engine::train::losses::Losses;
use compress_engine::train::optimizer::Kind;
use compress_engine::train::schedule::Schedule;
use compress_engine::train::{BatchNorm, BatchSize, Checkpointing, Every, LogFormat, Offload, Precision, QuantizerScales};

pub use crate::common::golden_model as golden;

/// Pseudo-random numbers from 0 to 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(next).collect()
}

/// Samples for a model: token ids with padding, or images, and class labels.
pub fn samples(name: &str, folder: &Path, count: usize, classes: usize) -> Data {
    let inputs = candle_core::safetensors::load(golden(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    let mut arrays: HashMap<String, Tensor> = HashMap::new();
    for (name, like) in inputs.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t))) {
        let mut dims = like.dims().to_vec();
        dims[0] = count;
        let elements = dims.iter().product();
        let values = numbers(elements, 7);
        let tensor = if like.dtype().is_float() {
            Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
        } else {
            let whole: Vec<i64> = match name.as_str() {
                "input_ids" => values.iter().map(|v| 3 + (v * 20.0) as i64).collect(),
                "attention_mask" => (0..elements).map(|i| i64::from(i % dims[1] < 3 + i / dims[1] % (dims[1] - 2))).collect(),
                _ => vec![0; elements],
            };
            Tensor::from_vec(whole, dims, &Device::Cpu).unwrap()
        };
        arrays.insert(name, tensor);
    }
    if classes > 0 {
        let labels: Vec<i64> = (0..count as i64).map(|i| i * 7 % 5 % classes as i64).collect();
        arrays.insert("labels".into(), Tensor::from_vec(labels, count, &Device::Cpu).unwrap());
    }
    let path = folder.join(format!("{name}-{count}-{classes}.safetensors"));
    candle_core::safetensors::save(&arrays, &path).unwrap();
    Data { arrays: Some(path), ..Data::default() }
}

/// A signal, and an observer of the progress that sends it after this number of steps and one more.
pub fn cancelled_after(steps: Option<u64>) -> (Cancel, impl Fn(Event) + Send + Sync + 'static) {
    let (cancel, done) = (Cancel::default(), AtomicU64::new(0));
    let handle = cancel.clone();
    let watch = move |event: Event| {
        if let Event::Message(text) = event
            && text.contains("loss")
            && Some(done.fetch_add(1, Ordering::Relaxed)) == steps
        {
            handle.cancel();
        }
    };
    (cancel, watch)
}

/// A folder for the output of a run.
pub struct Run {
    pub folder: tempfile::TempDir,
}

impl Run {
    pub fn new() -> Run {
        Run { folder: tempfile::tempdir().unwrap() }
    }

    pub fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    pub fn steps(&self, input: &Path, data: Data, steps: Vec<Step>) -> compress::Result<Report> {
        Pipeline::builder().passes(steps).train(data).seed(3).force(true).build()?.run(Model::open(input)?, self.out())
    }

    pub fn train(&self, name: &str, data: Data, pass: impl Into<Step>) -> compress::Result<Report> {
        self.steps(&golden(name), data, vec![pass.into()])
    }

    pub fn weights(&self) -> BTreeMap<String, Vec<f32>> {
        weights(&self.out())
    }
}

pub fn weights(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let model = Model::open(folder).unwrap();
    let floats = model.weights.by_name.iter().filter(|(name, _)| !name.ends_with("num_batches_tracked") && !name.ends_with("position_ids"));
    floats.map(|(name, weight)| (name.clone(), weight.floats(name).unwrap())).collect()
}

pub fn furthest(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> f32 {
    assert!(a.keys().eq(b.keys()));
    a.values().zip(b.values()).flat_map(|(a, b)| a.iter().zip(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Loss of the first and of the last step.
pub fn ends(report: &Report) -> (f64, f64) {
    let curve = report.passes.last().unwrap().details["training"]["curve"].as_array().unwrap().clone();
    (curve[0]["loss"].as_f64().unwrap(), curve[curve.len() - 1]["loss"].as_f64().unwrap())
}

pub fn losses(text: &str) -> Losses {
    text.parse().unwrap()
}

pub fn constant() -> Schedule {
    serde_json::from_str(r#"{ "kind": "constant" }"#).unwrap()
}

/// The pass with other training options, as fields in a literal: `with_training!(pass, learning_rate: 1e-3)`.
macro_rules! with_training {
    ($pass:expr, $($field:ident $(: $value:expr)?),+) => {{
        let mut pass = $pass;
        pass.training = compress::pass::Training { $($field $(: $value)?,)+ ..pass.training };
        pass
    }};
}
pub(crate) use with_training;

pub fn finetune(steps: u64) -> Finetune {
    Finetune {
        training: Training { max_steps: Some(steps), batch_size: BatchSize::Samples(8), learning_rate: 3e-3, schedule: constant(), ..Training::default() },
        ..Finetune::default()
    }
}

pub fn distill(steps: u64, terms: &str) -> Distill {
    Distill {
        training: Training {
            losses: losses(terms),
            max_steps: Some(steps),
            batch_size: BatchSize::Samples(8),
            learning_rate: 3e-3,
            schedule: constant(),
            ..Training::default()
        },
        ..Distill::default()
    }
}

const CLASSIFIERS: [&str; 3] = ["bert-sequence-classification", "resnet-basic", "vit-image-classification"];

pub fn classes(name: &str) -> usize {
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(golden(name).join("config.json")).unwrap()).unwrap();
    config.get("id2label").and_then(|labels| labels.as_object()).map_or(2, serde_json::Map::len)
}

/// Eight samples of two separable classes, in the input format of a model.
fn two_classes(name: &str, folder: &Path) -> Data {
    let inputs = candle_core::safetensors::load(golden(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    let mut arrays: HashMap<String, Tensor> = HashMap::new();
    for (input, like) in inputs.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t))) {
        let dims = [&[8], &like.dims()[1..]].concat();
        let elements: usize = dims.iter().product();
        let class = |index: usize| index * 8 / elements % 2;
        let tensor = if like.dtype().is_float() {
            let noise = numbers(elements, 7).into_iter().enumerate();
            Tensor::from_vec(noise.map(|(index, noise)| 2.0 * class(index) as f32 - 1.0 + 0.1 * noise).collect(), dims, &Device::Cpu)
        } else {
            let value = |index: usize| match input.as_str() {
                "input_ids" => 3 + 20 * class(index) as i64 + index as i64 % 8,
                "attention_mask" => 1,
                _ => 0,
            };
            Tensor::from_vec((0..elements).map(value).collect(), dims, &Device::Cpu)
        };
        arrays.insert(input, tensor.unwrap());
    }
    arrays.insert("labels".into(), Tensor::from_vec((0..8i64).map(|sample| sample % 2).collect(), 8, &Device::Cpu).unwrap());
    let path = folder.join(format!("{name}-two-classes.safetensors"));
    candle_core::safetensors::save(&arrays, &path).unwrap();
    Data { arrays: Some(path), ..Data::default() }
}

/// A model without a head learns two classes perfectly, and the written folder and ONNX file contain the
/// head and its labels.
#[test]
fn new_heads_learn_their_classes() {
    let run = Run::new();
    let headless = run.folder.path().join("resnet-headless");
    std::fs::create_dir(&headless).unwrap();
    let config = std::fs::read_to_string(golden("resnet-basic").join("config.json")).unwrap();
    std::fs::write(headless.join("config.json"), config.replace("ResNetForImageClassification", "ResNetModel")).unwrap();
    let mut tensors = candle_core::safetensors::load(golden("resnet-basic").join("model.safetensors"), &Device::Cpu).unwrap();
    tensors.retain(|name, _| !name.starts_with("classifier."));
    candle_core::safetensors::save(&tensors, headless.join("model.safetensors")).unwrap();
    for (name, input) in [("bert", golden("bert")), ("vit", golden("vit")), ("resnet-basic", headless)] {
        for named in [true, false] {
            let data = two_classes(name, run.folder.path());
            let (classes, labels) = if named { (vec!["ham".into(), "spam".into()], None) } else { (Vec::new(), Some(2)) };
            let pass = Finetune { classes, labels, ..with_training!(finetune(60), learning_rate: 1e-2) };
            let exports: [compress::export::Export; 2] = [compress::export::Safetensors::default().into(), compress::export::Onnx::default().into()];
            let builder = exports.into_iter().fold(Pipeline::builder().pass(pass), Builder::export);
            let pipeline = builder.train(data.clone()).evaluation(data).seed(3).force(true).build().unwrap();
            let model = Model::open(&input).unwrap();
            let plan = pipeline.plan(&model).unwrap();
            assert!(plan.notes.iter().any(|note| note.starts_with("a new head for the classes ")), "{name}: {:?}", plan.notes);
            let report = pipeline.run(model, run.out()).unwrap_or_else(|e| panic!("{name}: {e}"));
            let accuracy = report.accuracy.unwrap();
            assert!(accuracy.before.is_empty() && !accuracy.after.is_empty(), "{name}");
            assert!(accuracy.after.values().all(|score| *score == 1.0), "{name}: {:?}", accuracy.after);
            let written = Model::open(run.out()).unwrap();
            let expected = if named { ["ham", "spam"] } else { ["LABEL_0", "LABEL_1"] };
            for (id, label) in expected.into_iter().enumerate() {
                assert_eq!(written.config.get("id2label").unwrap()[id.to_string()], label, "{name}");
                assert_eq!(written.config.get("label2id").unwrap()[label], id, "{name}");
            }
            let graph = written.graph().unwrap();
            let (_, logits) = graph.outputs().iter().find(|(output, _)| output == "logits").unwrap();
            assert_eq!(graph.value(*logits).ty.shape.last().unwrap().fixed(), Some(2), "{name}");
            let onnx = Model::open(run.out().join("model.onnx")).unwrap().graph().unwrap();
            assert!(onnx.outputs().iter().any(|(output, _)| output == "logits"), "{name}");
        }
    }
    let error = run.train("bert", two_classes("bert", run.folder.path()), finetune(1)).unwrap_err().to_string();
    assert!(error.contains("with `classes`"), "{error}");
    for (classes, labels) in
        [(vec!["ham".into()], None), (vec!["ham".into(), "ham".into()], None), (vec!["ham".into(), "spam".into()], Some(2)), (Vec::new(), Some(1))]
    {
        let pass = Finetune { classes, labels, ..finetune(1) };
        assert!(Pipeline::builder().pass(pass).train(two_classes("bert", run.folder.path())).build().is_err());
    }
}

/// Training on labels changes the outputs on purpose.
#[test]
fn training_on_labels_is_not_judged_by_fidelity() {
    let (run, name) = (Run::new(), "bert-sequence-classification");
    let report = run.train(name, two_classes(name, run.folder.path()), with_training!(finetune(60), learning_rate: 1e-2)).unwrap();
    assert!(report.notes.iter().any(|note| note.starts_with("the loss on the labels of the training data was")), "{:?}", report.notes);
    assert!(!report.notes.iter().any(|note| note.contains("differ strongly")), "{:?}", report.notes);
}

/// Loss of the first step of a model on arrays.
fn first_loss(name: &str, arrays: &HashMap<String, Tensor>) -> compress::Result<f64> {
    let run = Run::new();
    let path = run.folder.path().join("arrays.safetensors");
    candle_core::safetensors::save(arrays, &path).unwrap();
    let data = Data { arrays: Some(path), ..Data::default() };
    Ok(ends(&run.train(name, data, finetune(1))?).0)
}

/// Eight samples without padding, with class labels, or with the tokens as labels.
fn labelled(name: &str) -> HashMap<String, Tensor> {
    let folder = tempfile::tempdir().unwrap();
    let path = samples(name, folder.path(), 8, if name.contains("classification") { 3 } else { 0 }).arrays.unwrap();
    let mut arrays = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    arrays.insert("attention_mask".into(), arrays["attention_mask"].ones_like().unwrap());
    let mut ids = arrays["input_ids"].clone();
    if let Some(decoded) = arrays.get_mut("decoder_input_ids") {
        ids = ids.narrow(1, 0, decoded.dim(1).unwrap()).unwrap().contiguous().unwrap();
        *decoded = ids.clone();
    }
    arrays.entry("labels".into()).or_insert(ids);
    arrays
}

/// The same with some labels, selected by index, set to -100.
fn without(arrays: &HashMap<String, Tensor>, gone: impl Fn(usize) -> bool) -> HashMap<String, Tensor> {
    let mut arrays = arrays.clone();
    let labels = arrays["labels"].flatten_all().unwrap().to_vec1::<i64>().unwrap();
    let labels: Vec<i64> = labels.into_iter().enumerate().map(|(at, label)| if gone(at) { -100 } else { label }).collect();
    arrays.insert("labels".into(), Tensor::from_vec(labels, arrays["labels"].dims(), &Device::Cpu).unwrap());
    arrays
}

#[test]
fn a_label_of_minus_100_is_ignored_by_losses() {
    for name in ["bert-sequence-classification", "llama", "bert-masked-lm", "t5"] {
        let arrays = labelled(name);
        let loss = |arrays: &HashMap<String, Tensor>| first_loss(name, arrays).unwrap_or_else(|e| panic!("{name}: {e}"));
        let count = arrays["labels"].elem_count();
        let width = count / 8;
        // Samples whose labels are all -100 have no effect.
        let rows: HashMap<String, Tensor> = arrays.iter().map(|(name, tensor)| (name.clone(), tensor.narrow(0, 0, 5).unwrap())).collect();
        let (masked, fewer) = (loss(&without(&arrays, |at| at >= 5 * width)), loss(&rows));
        assert!((masked - fewer).abs() < 1e-5, "{name}: {masked} with masked samples, {fewer} without them");
        // The losses of two halves average to that of the whole batch. The first token of a row is not
        // predicted, except by masked language models.
        let predicted = |at: usize| name != "llama" || !at.is_multiple_of(width);
        let prompt = |at: usize| at * 7 % 5 < 2;
        let share = (0..count).filter(|at| predicted(*at) && !prompt(*at)).count() as f64 / (0..count).filter(|at| predicted(*at)).count() as f64;
        let (all, answers, prompts) = (loss(&arrays), loss(&without(&arrays, prompt)), loss(&without(&arrays, |at| !prompt(at))));
        assert!((all - share * answers - (1.0 - share) * prompts).abs() < 1e-5, "{name}: {all} is not {answers} and {prompts} with {share}");
        assert!((all - answers).abs() > 1e-4, "{name}: {all}");
    }
}

#[test]
fn invalid_labels_and_unused_arrays_are_rejected() {
    let arrays = labelled("llama");
    let with = |name: &str, array: Tensor| arrays.clone().into_iter().chain([(name.to_owned(), array)]).collect::<HashMap<_, _>>();
    let labels = &arrays["labels"];
    let shifted = Tensor::cat(&[&labels.narrow(1, 1, 10).unwrap(), &labels.narrow(1, 0, 1).unwrap()], 1).unwrap();
    let cases = [
        (with("position_ids", labels.clone()), "`position_ids` is not used; the model's inputs are `input_ids`, `attention_mask`"),
        (with("y", labels.clone()), "`y` is not used"),
        (with("labels", shifted), "is shifted by one token"),
        (with("labels", labels.narrow(1, 0, 4).unwrap()), "array `labels` has rows of shape [4], but `input_ids` of [11]"),
        (with("labels", (labels + 1000.0).unwrap()), "has label 10"),
    ];
    for (arrays, wanted) in cases {
        let error = first_loss("llama", &arrays).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let error = first_loss("bert-sequence-classification", &without(&labelled("bert-sequence-classification"), |_| true)).unwrap_err().to_string();
    assert!(error.contains("-100"), "{error}");
}

#[test]
fn classifiers_memorize_a_batch() {
    for name in ["bert-sequence-classification", "vit-image-classification", "torchvision-resnet18"] {
        let run = Run::new();
        let report = run.train(name, samples(name, run.folder.path(), 8, classes(name)), finetune(30)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (first, last) = ends(&report);
        assert!(last < 0.5 * first, "{name}: the loss went from {first} to {last}");
        assert!(run.out().join("finetune.csv").exists() && !run.folder.path().join("out.unfinished").exists());
    }
}

#[test]
fn students_approach_their_teachers() {
    let cases = [
        ("llama-grouped-tied", "soft=1", Some(Student::Layers(vec![0]))),
        ("gpt2", "{ soft: { temperature: 1 }, hidden: 0.1 }", Some(Student::Every(2))),
        ("sentence-mean", "{ embedding: 1, hidden: { distance: cosine } }", Some(Student::Layers(vec![1]))),
        ("bert", "{ attention: 1, hidden: 1 }", Some(Student::Layers(vec![1]))),
        ("distilbert", "{ attention: { target: relations }, hidden: 1 }", Some(Student::Layers(vec![0]))),
    ];
    for (name, terms, student) in cases {
        let run = Run::new();
        let pass = Distill { student, ..distill(30, terms) };
        let report = run.train(name, samples(name, run.folder.path(), 8, 0), pass).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (first, last) = ends(&report);
        assert!(last < 0.8 * first, "{name}: the loss went from {first} to {last}");
        assert!(report.size.after.parameters < report.size.before.parameters, "{name}");
        // The report compares the weights after training with the original ones.
        assert!(report.layers.iter().filter(|layer| layer.sqnr_db.is_some_and(|db| db > 0.0)).count() > 5, "{name}: {:?}", report.layers);
    }
}

/// A student with the teacher's weights has zero loss up to rounding.
#[test]
fn a_student_equal_to_the_teacher_has_zero_loss() {
    for (name, terms) in
        [("llama", "soft=1"), ("bert", "{ hidden: 1, attention: 1 }"), ("sentence-cls", "embedding=1"), ("bert", "{ attention: { target: relations } }")]
    {
        let run = Run::new();
        let report = run.train(name, samples(name, run.folder.path(), 8, 0), distill(1, terms)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(ends(&report).0.abs() < 1e-6, "{name}: {:?}", ends(&report));
    }
    let run = Run::new();
    let odd = distill(1, "{ attention: { target: relations, relation_heads: 3 } }");
    let error = run.train("bert", samples("bert", run.folder.path(), 8, 0), odd).err().unwrap().to_string();
    assert!(error.contains("`relation_heads: 3` does not divide the columns"), "{error}");
}

#[test]
fn micro_batches_do_not_change_a_step() {
    let cases: [(&str, Distill); 3] = [
        ("bert-sequence-classification", distill(2, "{ soft: 1, hard: 1, hidden: 1 }")),
        ("llama-grouped-tied", distill(2, "{ soft: 1, hidden: 1, attention: 1 }")),
        ("vit-image-classification", distill(2, "{ soft: 1, hard: { label_smoothing: 0.1 }, hidden: 1, attention: 1 }")),
    ];
    for (name, pass) in cases {
        // Another teacher, so that the loss is not zero.
        let teacher = Run::new();
        let data = |run: &Run, count| samples(name, run.folder.path(), count, if name.starts_with("llama") { 0 } else { classes(name) });
        let perturbed = PruneUnstructured { amount: Some("0.3".parse().unwrap()), ..PruneUnstructured::default() };
        Pipeline::builder().pass(perturbed).build().unwrap().run(Model::open(golden(name)).unwrap(), teacher.out()).unwrap();
        let pass = Distill { teacher: Some(teacher.out()), ..with_training!(pass, optimizer: Kind::Sgd, learning_rate: 0.1) };
        let whole = Run::new();
        let report = whole.train(name, data(&whole, 16), pass.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let details = &report.passes[0].details["memory"];
        let peak = details["peak_bytes"].as_u64().unwrap();
        let phase = |at: &str| details["phases"].as_array().unwrap().iter().find(|p| p["name"] == at).unwrap()["measured_bytes"].as_u64().unwrap();
        let variants = [
            ("accumulation", with_training!(pass.clone(), batch_size: BatchSize::Samples(4), gradient_accumulation: 2)),
            ("blocks", with_training!(pass.clone(), gradient_checkpointing: Checkpointing::Blocks)),
            ("every 2", with_training!(pass.clone(), gradient_checkpointing: Checkpointing::Every(2))),
            ("little memory", with_training!(pass.clone(), memory_limit: Some(ByteSize(peak - phase("activations") / 2)))),
        ];
        for (variant, pass) in variants {
            let run = Run::new();
            let report = run.train(name, data(&run, 16), pass).unwrap_or_else(|e| panic!("{name}, {variant}: {e}"));
            let apart = furthest(&whole.weights(), &run.weights());
            assert!(apart < 1e-5, "{name}, {variant}: {apart}");
            if variant == "little memory" {
                assert!(report.notes.iter().any(|note| note.contains("micro-batches")), "{name}: {:?}", report.notes);
            }
        }
    }
}

/// With `offload: parameters`, steps do not change, in combination with any other option.
#[test]
fn offloaded_parameters_do_not_change_steps() {
    let all = "{ soft: 1, hidden: 1, attention: 1 }";
    let short = |terms| Distill { student: Some(Student::Layers(vec![0])), ..distill(3, terms) };
    let distilled: Vec<(&str, &str, Distill)> = vec![
        ("llama-grouped-tied", "losses", short(all)),
        ("llama", "an output layer of its own", short(all)),
        ("llama-grouped-tied", "parts", with_training!(short(all), batch_size: BatchSize::Samples(4), gradient_accumulation: 2)),
        ("llama-grouped-tied", "16 bits", with_training!(short(all), precision: Precision::F16, max_steps: Some(16))),
        ("bert", "all layers", with_training!(distill(3, "{ hidden: { distance: cosine }, attention: { target: relations } }"), optimizer: Kind::Adafactor)),
    ];
    let on_labels: Vec<(&str, &str, Finetune)> = vec![
        ("bert-sequence-classification", "clipped, with an average", with_training!(finetune(3), clip_norm: 0.1, average: Some(0.5))),
        ("bert-sequence-classification", "8 bits", with_training!(finetune(3), optimizer: Kind::AdamW8bit, evaluate_every: Some(1))),
        ("bert-sequence-classification", "matrices", with_training!(finetune(3), optimizer: Kind::Muon)),
        ("bert-sequence-classification", "some", with_training!(finetune(3), targets: vec!["*layer.1*".parse().unwrap()])),
        ("torchvision-resnet18", "statistics of batches", finetune(3)),
        ("bert-sequence-classification", "integers", with_training!(finetune(3), scales: QuantizerScales::Learnable)),
        ("bert-sequence-classification", "zeros", finetune(3)),
    ];
    let prune = PruneUnstructured { amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
    let before: BTreeMap<&str, compress::pass::Step> = [("integers", QuantizeDynamic::default().into()), ("zeros", prune.into())].into();
    let same = |name: &str, what: &str, classes: usize, pass: &dyn Fn(Vec<Offload>) -> compress::pass::Step| {
        let runs = [vec![], vec![Offload::Parameters]].map(|offload| {
            let (run, paged) = (Run::new(), !offload.is_empty());
            let data = samples(name, run.folder.path(), 8, classes);
            let builder = before.get(what).into_iter().fold(Pipeline::builder(), |builder, step| builder.pass(step.clone()));
            let builder = builder.pass(pass(offload)).train(data.clone()).seed(3);
            let builder = if what == "8 bits" { builder.evaluation(data) } else { builder };
            let report = builder.build().unwrap().run(Model::open(golden(name)).unwrap(), run.out()).unwrap_or_else(|e| panic!("{name}, {what}: {e}"));
            let memory = report.passes.last().unwrap().details["memory"].clone();
            let (predicted, measured) = (memory["predicted_bytes"].as_f64().unwrap(), memory["peak_bytes"].as_f64().unwrap());
            assert!(!paged || (predicted / measured - 1.0).abs() <= 0.1, "{name}, {what}: {predicted} and {measured}: {memory}");
            (run.weights(), measured, ends(&report))
        });
        let apart = furthest(&runs[0].0, &runs[1].0);
        assert!(apart <= 1e-5, "{name}, {what}: {apart}");
        assert!(runs[1].1 < 0.9 * runs[0].1 && runs[0].2 == runs[1].2, "{name}, {what}: {:?} and {:?}", runs[0].1, runs[1].1);
    };
    for (name, what, pass) in distilled {
        same(name, what, 0, &|offload| with_training!(pass.clone(), offload).into());
    }
    for (name, what, pass) in on_labels {
        same(name, what, classes(name), &|offload| with_training!(pass.clone(), offload).into());
    }
}

/// Images differ from step to step, depending on the seed only.
#[test]
fn images_are_augmented_in_the_same_way_in_each_run() {
    let name = "resnet-basic";
    let trained = |augment: Option<&str>| {
        let run = Run::new();
        let data = samples(name, run.folder.path(), 16, classes(name));
        let augment = augment.map(|text| text.parse().unwrap());
        run.train(name, data, with_training!(finetune(3), augment)).unwrap();
        run.weights()
    };
    // The teacher sees the same images.
    let run = Run::new();
    let data = samples("vit-image-classification", run.folder.path(), 8, 0);
    let augment = Some("{ flip: true, shift: 2 }".parse().unwrap());
    let report = run.train("vit-image-classification", data, with_training!(distill(1, "hidden=1"), augment)).unwrap();
    assert!(ends(&report).0 < 1e-9, "{}", ends(&report).0);
    let (plain, flipped) = (trained(None), trained(Some("{ flip: true, shift: 1 }")));
    assert!(furthest(&flipped, &trained(Some("{ flip: true, shift: 1 }"))) == 0.0 && furthest(&plain, &flipped) > 1e-5);
    let run = Run::new();
    let refused = |name: &str, pass: Step| run.train(name, samples(name, run.folder.path(), 8, 0), pass).unwrap_err().to_string();
    let augment = Some("{ flip: true }".parse().unwrap());
    assert!(refused("llama", with_training!(distill(1, "soft=1"), augment).into()).contains("augment"));
    let cached = Distill { teacher_cache: Some(run.folder.path().join("cache")), ..with_training!(distill(1, "soft=1"), augment) };
    assert!(refused("llama", cached.into()).contains("`teacher_cache`"));
    assert!(refused("llama", with_training!(finetune(1), augment: Some("{}".parse().unwrap())).into()).contains("changes nothing"));
}

#[test]
fn weights_that_training_makes_infinite_are_not_written() {
    let run = Run::new();
    let pass = with_training!(finetune(1), optimizer: Kind::Sgd, learning_rate: 1e39, clip_norm: 0.0);
    let data = Data { task: Some(Task::LanguageModelling), ..samples("llama", run.folder.path(), 8, 0) };
    let error = run.train("llama", data, pass).unwrap_err();
    assert!(error.to_string().contains("NaN or infinite value") && error.hint().unwrap().contains("large learning rate"), "{error}");
    assert!(!run.out().exists());
}

#[test]
fn a_decay_that_is_longer_than_the_epochs_is_refused() {
    let run = Run::new();
    let schedule: Schedule = serde_json::from_str(r#"{ "kind": "linear", "decay_steps": 50 }"#).unwrap();
    let data = Data { task: Some(Task::LanguageModelling), ..samples("llama", run.folder.path(), 8, 0) };
    let error = run.train("llama", data, with_training!(finetune(1), max_steps: None, schedule)).unwrap_err();
    assert!(error.to_string().contains("`decay_steps` 50 are more than the 1 steps of the training"), "{error}");
}

#[test]
fn cached_logits_do_not_change_training() {
    for (name, top) in [("llama-grouped-tied", 200), ("vit-image-classification", 64), ("llama-grouped-tied", 3)] {
        let classes = if name.starts_with("llama") { 0 } else { classes(name) };
        let (asked, kept) = (Run::new(), Run::new());
        let student = Some(Student::Layers(vec![0]));
        let pass = Distill { student, ..with_training!(distill(6, "soft=1"), optimizer: Kind::Sgd, learning_rate: 0.1) };
        asked.train(name, samples(name, asked.folder.path(), 16, classes), pass.clone()).unwrap();
        let cache = kept.folder.path().join("answers");
        let with = Distill { teacher_cache: Some(cache.clone()), teacher_top: Some(top), ..pass };
        kept.train(name, samples(name, kept.folder.path(), 16, classes), with.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Cached logits have 16 bits, and only the top-k are stored.
        let apart = furthest(&asked.weights(), &kept.weights());
        assert!(if top > 3 { apart < 2e-3 } else { apart > 1e-6 }, "{name}: {apart}");
        let size = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
        let before = size(&cache);
        let again = Run::new();
        // No more logits are cached than there are.
        let top = if top > 3 { 1_000_000 } else { top };
        again.train(name, samples(name, kept.folder.path(), 16, classes), Distill { teacher_top: Some(top), ..with.clone() }).unwrap();
        assert!(before > 1000 && size(&cache) == before, "{name}: {before} bytes became {}", size(&cache));
        assert_eq!(again.weights(), kept.weights(), "{name}: cached logits differ from computed ones");
        // If the teacher does not fit into memory, its logits for all samples are computed first, block
        // by block.
        let paged = Run::new();
        let cache = paged.folder.path().join("answers");
        let pass = Distill { teacher_cache: Some(cache.clone()), ..with_training!(with.clone(), offload: vec![Offload::Parameters]) };
        let told = |report: Report| report.notes.iter().any(|note| note.contains("of 16 samples were computed block by block"));
        assert!(told(paged.train(name, samples(name, paged.folder.path(), 16, classes), pass.clone()).unwrap()));
        let apart = furthest(&paged.weights(), &kept.weights());
        assert!(apart < 1e-5, "{name}: {apart}");
        assert_eq!(size(&cache), before, "{name}: logits were computed more than once");
        assert!(!told(Run::new().train(name, samples(name, paged.folder.path(), 16, classes), pass).unwrap()));
        let other = with_training!(with, losses: losses("soft=1,hidden=1"));
        if classes == 0 {
            let error = again.train(name, samples(name, kept.folder.path(), 16, classes), other).unwrap_err();
            assert!(error.to_string().contains("teacher_cache"), "{error}");
        }
    }
}

#[test]
fn zeros_of_pruned_weights_stay() {
    for optimizer in Kind::ALL {
        let name = "bert-sequence-classification";
        let run = Run::new();
        let data = samples(name, run.folder.path(), 16, classes(name));
        let prune = PruneUnstructured { amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
        let only = Run::new();
        Pipeline::builder().pass(prune.clone()).build().unwrap().run(Model::open(golden(name)).unwrap(), only.out()).unwrap();
        let pass = with_training!(finetune(5), optimizer);
        let pipeline = Pipeline::builder().pass(prune).pass(pass).train(data).build().unwrap();
        let report = pipeline.run(Model::open(golden(name)).unwrap(), run.out()).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("kept at zero")), "{:?}", report.notes);
        let (before, after) = (only.weights(), run.weights());
        let mut zeros = 0;
        for (name, values) in before.iter().filter(|(name, _)| name.ends_with("dense.weight")) {
            for (before, after) in values.iter().zip(&after[name]).filter(|(before, _)| **before == 0.0) {
                assert!(*after == 0.0, "{optimizer:?}, {name}: {before} became {after}");
                zeros += 1;
            }
        }
        assert!(zeros > 100 && furthest(&before, &after) > 1e-4);
    }
}

/// Runs passes over a folder.
fn passes(input: &Path, output: &Path, steps: Vec<compress::pass::Step>, data: Option<&Data>) -> Report {
    let builder = steps.into_iter().fold(Pipeline::builder(), |builder, step| builder.pass(step));
    let builder = data.into_iter().fold(builder, |builder, data| builder.train(data.clone()));
    builder.build().unwrap().run(Model::open(input).unwrap(), output).unwrap()
}

#[test]
fn zeros_without_pruning_are_trained() {
    let name = "bert-sequence-classification";
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let data = samples(name, folder.path(), 16, classes(name));
    let noted = |report: &Report, what: &str| report.notes.iter().any(|note| note.contains(what));
    let zeros =
        |folder: &Path| weights(folder).iter().filter(|(name, _)| name.ends_with("dense.weight")).flat_map(|(_, w)| w.clone()).filter(|w| *w == 0.0).count();
    // Quantized weights of value zero are small weights, not pruned ones, also after dequantization.
    passes(&golden(name), &at("int8"), vec![QuantizeDynamic::default().into()], None);
    passes(&at("int8"), &at("floats"), vec![compress::pass::Dequantize::default().into()], None);
    let codes = zeros(&at("floats"));
    assert!(codes > 10, "{codes}");
    for (input, steps) in [
        ("int8", vec![finetune(3).into()]),
        ("floats", vec![finetune(3).into()]),
        ("int8", vec![compress::pass::Dequantize::default().into(), finetune(3).into()]),
    ] {
        let report = passes(&at(input), &at(&format!("{input}-{}", steps.len())), steps, Some(&data));
        assert!(!noted(&report, "kept at zero"), "{input}: {:?}", report.notes);
        assert_eq!(noted(&report, "zeros of unknown origin in"), input == "floats", "{:?}", report.notes);
    }
    assert!(zeros(&at("floats-1")) < codes / 4);
    // Codes of 4 bits, rounded to nearest or with error compensation, have more zeros.
    for method in [Method::Rtn, Method::Gptq] {
        let [input, floats, output] = ["", "-floats", "-trained"].map(|part| at(&format!("{method:?}{part}")));
        let quantize = Quantize { scheme: Scheme::W4A16, group_size: Some(8), method, ..Quantize::default() };
        let pipeline = Pipeline::builder().pass(quantize).calibration(data.clone()).build().unwrap();
        pipeline.run(Model::open(golden(name)).unwrap(), &input).unwrap();
        passes(&input, &floats, vec![compress::pass::Dequantize::default().into()], None);
        let report = passes(&input, &output, vec![compress::pass::Dequantize::default().into(), finetune(3).into()], Some(&data));
        let (before, after) = (zeros(&floats), zeros(&output));
        assert!(before > codes && after < before / 4 && !noted(&report, "kept at zero"), "{method:?}: {before} {after} {:?}", report.notes);
    }
    // Pruning is known from a report, or for weights of other tools, from the option.
    let prune = PruneUnstructured { amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
    passes(&golden(name), &at("pruned"), vec![prune.into()], None);
    for (input, keep_zeros, stay) in [("pruned", false, true), ("foreign", false, false), ("foreign", true, true)] {
        if !at(input).exists() {
            std::fs::rename(at("pruned"), at(input)).unwrap();
            std::fs::remove_file(at(input).join("report.json")).unwrap();
        }
        let output = at(&format!("{input}-{keep_zeros}"));
        let report = passes(&at(input), &output, vec![with_training!(finetune(3), keep_zeros).into()], Some(&data));
        assert_eq!((noted(&report, "kept at zero"), zeros(&output) == zeros(&at(input))), (stay, stay), "{input}: {:?}", report.notes);
    }
    let one = PruneUnstructured {
        amount: Some("0.5".parse().unwrap()),
        targets: vec!["*layer.1.output.dense.weight".parse().unwrap()],
        ..PruneUnstructured::default()
    };
    let report = passes(&golden(name), &at("one"), vec![one.into(), finetune(1).into()], Some(&data));
    assert!(noted(&report, "zero weights of 1 tensor were kept at zero"), "{:?}", report.notes);
}

/// A matrix of small weights, which a global threshold zeroes completely, and a fraction of zeros that
/// could be chance.
#[test]
fn pruned_weights_stay_zero() {
    let (name, small) = ("bert-sequence-classification", "bert.encoder.layer.1.intermediate.dense.weight");
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("input")).unwrap();
    std::fs::copy(golden(name).join("config.json"), at("input/config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(golden(name).join("model.safetensors"), &Device::Cpu).unwrap();
    tensors.insert(small.into(), (&tensors[small] * 1e-3).unwrap());
    candle_core::safetensors::save(&tensors, at("input/model.safetensors")).unwrap();
    let data = samples(name, folder.path(), 16, classes(name));
    for amount in ["0.4", "0.004"] {
        let prune = PruneUnstructured { amount: Some(amount.parse().unwrap()), scope: Scope::Global, ..PruneUnstructured::default() };
        let (pruned, trained, later) = (at(&format!("pruned {amount}")), at(&format!("trained {amount}")), at(&format!("later {amount}")));
        passes(&at("input"), &pruned, vec![prune.clone().into()], None);
        passes(&at("input"), &trained, vec![prune.into(), finetune(3).into()], Some(&data));
        passes(&pruned, &later, vec![finetune(3).into()], Some(&data));
        let [before, in_one_recipe, in_two] = [&pruned, &trained, &later].map(|folder| weights(folder));
        let mut whole = 0;
        for name in before.keys().filter(|name| name.ends_with("dense.weight")) {
            let is_whole = before[name].iter().all(|weight| *weight == 0.0);
            whole += usize::from(is_whole);
            for (at, _) in before[name].iter().enumerate().filter(|(_, weight)| **weight == 0.0) {
                assert_eq!(in_one_recipe[name][at], 0.0, "{amount} {name}");
                // In a folder, a matrix of zeros is assumed to have been initialized that way.
                assert_eq!(in_two[name][at] == 0.0, !is_whole, "{amount} {name}");
            }
        }
        assert_eq!(whole, usize::from(amount == "0.4"));
    }
}

/// Layer 1 of the input is layer 0 of the student.
#[test]
fn pruned_weights_of_a_renumbered_layer_stay_zero() {
    let name = "bert-sequence-classification";
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let data = samples(name, folder.path(), 16, classes(name));
    let prune = || PruneUnstructured { amount: Some("0.5".parse().unwrap()), targets: vec!["*layer.1.*".parse().unwrap()], ..PruneUnstructured::default() };
    let student = Distill { student: Some(Student::Layers(vec![1])), ..distill(3, "soft=1") };
    passes(&golden(name), &at("pruned"), vec![prune().into()], None);
    let report = passes(&golden(name), &at("student"), vec![prune().into(), student.into()], Some(&data));
    assert!(report.notes.iter().any(|note| note.contains("of 6 tensors were kept at zero")), "{:?}", report.notes);
    let (before, after) = (weights(&at("pruned")), weights(&at("student")));
    for (name, values) in before.iter().filter(|(name, _)| name.contains("layer.1.") && name.ends_with("dense.weight")) {
        let learned = &after[&name.replace("layer.1.", "layer.0.")];
        assert!(values.iter().zip(learned).all(|(before, after)| (*before == 0.0) == (*after == 0.0)), "{name}");
    }
}

#[test]
fn files_of_a_student_are_copied_with_its_weights() {
    /// Files that both models have.
    const OWN: [&str; 4] = ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json"];
    let name = "vit-image-classification";
    let folder = tempfile::tempdir().unwrap();
    let made = |folder_name: &str, file: &str| {
        let to = folder.path().join(folder_name);
        std::fs::create_dir_all(&to).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden(name).join(file), to.join(file)).unwrap();
        }
        std::fs::write(to.join(file), folder_name).unwrap();
        std::fs::write(to.join("chat_template.jinja"), folder_name).unwrap();
        for name in OWN {
            std::fs::write(to.join(name), serde_json::json!({ "_from": folder_name, "model": { "vocab": { "a": 0 } } }).to_string()).unwrap();
        }
        to
    };
    let (input, student) = (made("input", "of-input.txt"), made("student", "of-student.txt"));
    let data = samples(name, folder.path(), 8, classes(name));
    let cache = compress::pipeline::ResultCache::new(folder.path().join("cache"), std::time::Duration::ZERO);
    for attempt in 0..2 {
        let pass = Distill { student: Some(Student::Model(student.clone())), ..distill(1, "soft=1") };
        let out = folder.path().join(format!("out-{attempt}"));
        let pipeline = Pipeline::builder().pass(pass).train(data.clone()).cache(cache.clone(), true).build().unwrap();
        let report = pipeline.run(Model::open(&input).unwrap(), &out).unwrap();
        assert_eq!(report.notes.iter().any(|note| note.contains("was reused")), attempt == 1, "{:?}", report.notes);
        assert!(out.join("of-student.txt").exists() && !out.join("of-input.txt").exists());
        for name in OWN.into_iter().chain(["chat_template.jinja"]) {
            let text = std::fs::read_to_string(out.join(name)).unwrap();
            assert!(text.contains("student") && !text.contains("input"), "{name}: {text}");
        }
        assert!(report.carried.iter().any(|file| file.path == "of-student.txt"), "{:?}", report.carried);
        let left: Vec<_> = report.notes.iter().filter(|note| note.contains("not copied from the input: of-input.txt (")).collect();
        assert!(left.len() == 1 && OWN.iter().all(|name| !left[0].contains(name)), "{:?}", report.notes);
    }
}

/// Texts that were tokenized for the input are not valid for a student with another tokenizer. Arrays, and
/// images with the preprocessing of the data's options, are the same for both.
#[test]
fn fidelity_is_not_measured_if_a_student_preprocesses_differently() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("../evaluation/word-pieces.json")).unwrap()).unwrap();
    let copy = |name: &str, copy: &str, mean: f64| {
        let to = folder.path().join(copy);
        std::fs::create_dir_all(&to).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden(name).join(file), to.join(file)).unwrap();
        }
        let preprocessor = serde_json::json!({ "image_mean": [mean, mean, mean], "image_std": [0.5, 0.5, 0.5], "size": { "height": 32, "width": 32 } });
        std::fs::write(to.join("preprocessor_config.json"), preprocessor.to_string()).unwrap();
        // The same words, without special tokens.
        let mut tokenizer = tokenizer.clone();
        if mean > 0.5 {
            tokenizer["post_processor"] = serde_json::Value::Null;
        }
        std::fs::write(to.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        to
    };
    let (resnet, vit, bert) = ("torchvision-resnet18", "vit-image-classification", "bert-sequence-classification");
    let images = Data { images: Some(golden("../evaluation/images")), task: Some(Task::Classification), mean: vec![0.5], std: vec![0.5], ..Data::default() };
    let arrays = samples(vit, folder.path(), 8, classes(vit));
    let texts = Data { text: Some(golden("../evaluation/labelled.csv")), label_column: Some("label".parse().unwrap()), ..Data::default() };
    for (name, data, mean, measured) in [(bert, &texts, 0.1, true), (bert, &texts, 0.9, false), (resnet, &images, 0.9, true), (vit, &arrays, 0.9, true)] {
        let input = copy(name, "input", 0.1);
        let pass = Distill { student: Some(Student::Model(copy(name, "student", mean))), ..distill(1, "hard=1") };
        let pipeline = Pipeline::builder().pass(pass).train(data.clone()).force(true).build().unwrap();
        let report = pipeline.run(Model::open(&input).unwrap(), folder.path().join("out")).unwrap();
        assert_eq!(report.fidelity.is_some(), measured, "{name}, {mean}: {:?}", report.notes);
        let noted = report.notes.iter().any(|note| note.contains("fidelity was not measured: the student differs from the input in preprocessing or classes"));
        assert_eq!(noted, !measured, "{name}, {mean}: {:?}", report.notes);
    }
}

#[test]
fn the_default_teacher_is_the_input_of_the_recipe() {
    let name = "vit-image-classification";
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let data = samples(name, folder.path(), 8, classes(name));
    passes(&golden(name), &at("student"), vec![finetune(2).into()], Some(&data));
    let first = || Distill { student: Some(Student::Model(at("student"))), ..distill(1, "soft=1") }.into();
    passes(&golden(name), &at("default"), vec![first(), distill(2, "soft=1").into()], Some(&data));
    let of_input = Distill { teacher: Some(golden(name)), ..distill(2, "soft=1") };
    passes(&golden(name), &at("named"), vec![first(), of_input.into()], Some(&data));
    let of_student = Distill { teacher: Some(at("student")), ..distill(2, "soft=1") };
    passes(&golden(name), &at("other"), vec![first(), of_student.into()], Some(&data));
    assert_eq!(weights(&at("default")), weights(&at("named")));
    assert_ne!(weights(&at("default")), weights(&at("other")));
}

/// Their changes would be lost silently.
#[test]
fn passes_before_a_student_of_another_folder_are_refused() {
    let name = "vit-image-classification";
    let folder = tempfile::tempdir().unwrap();
    let data = samples(name, folder.path(), 8, classes(name));
    for student in [Student::Model(golden(name)), Student::Config(golden(name).join("config.json"))] {
        let builder =
            Pipeline::builder().pass(Cast { to: FloatFormat::Bf16, ..Cast::default() }).pass(Distill { student: Some(student), ..distill(1, "soft=1") });
        let pipeline = builder.train(data.clone()).build().unwrap();
        let error = pipeline.run(Model::open(golden(name)).unwrap(), folder.path().join("out")).unwrap_err().to_string();
        assert!(error.contains("distill: student") && error.contains("`cast`"), "{error}");
    }
}

#[test]
fn unused_files_next_to_the_configuration_of_a_student_are_named() {
    let name = "vit-image-classification";
    let run = Run::new();
    let folder = run.folder.path().join("student");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(golden(name).join("config.json"), folder.join("config.json")).unwrap();
    std::fs::write(folder.join("preprocessor_config.json"), "{}").unwrap();
    let pass = Distill { student: Some(Student::Config(folder)), ..distill(1, "soft=1") };
    let report = run.train(name, samples(name, run.folder.path(), 8, classes(name)), pass).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("not used: preprocessor_config.json")), "{:?}", report.notes);
}

#[test]
fn steps_with_overflowing_gradients_are_counted_and_skipped() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 8, classes(name));
    let schedule: Schedule = serde_json::from_str(r#"{ "kind": "linear" }"#).unwrap();
    let with = |weight: &str| with_training!(finetune(24), precision: Precision::F16, losses: losses(weight), schedule: schedule.clone());
    let error = run.train(name, data.clone(), with("hard=1e30")).unwrap_err().to_string();
    assert!(error.contains("in all 24 steps") && error.contains("bf16"), "{error}");
    let report = run.train(name, data, with("hard=1")).unwrap();
    let training = &report.passes[0].details["training"];
    let curve = training["curve"].as_array().unwrap();
    let skipped = curve.iter().filter(|row| row["gradient_norm"].is_null()).count();
    assert!(skipped > 0 && skipped < 24 && training["skipped_steps"] == skipped, "{training}");
    assert!(report.notes.iter().any(|note| note.contains(&format!("{skipped} of 24 steps were skipped"))), "{:?}", report.notes);
    // Skipped steps do not advance the schedule.
    let rates: Vec<f64> = curve.iter().map(|row| row["learning_rate"].as_f64().unwrap()).collect();
    for (at, pair) in rates.windows(2).enumerate() {
        assert_eq!(pair[0] == pair[1], curve[at]["gradient_norm"].is_null(), "step {at}: {rates:?}");
    }
    let last = 3e-3 * (1.0 - (23 - skipped) as f64 / 24.0);
    assert!((rates[23] - last).abs() < 1e-9, "{rates:?}");
}

#[test]
fn steps_without_labels_are_skipped() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 4, classes(name));
    let path = data.arrays.clone().unwrap();
    let arrays = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let schedule: Schedule = serde_json::from_str(r#"{ "kind": "linear" }"#).unwrap();
    let with = |steps| with_training!(finetune(steps), batch_size: BatchSize::Samples(1), weight_decay: 0.1);
    let mut compared = 0;
    // Samples are shuffled. At most one of the two is in the first step, which has no previous step to
    // compare with.
    for masked in [0, 1] {
        let labels: Vec<i64> = (0..4).map(|at| if at == masked { -100 } else { at % 2 }).collect();
        let mut arrays = arrays.clone();
        arrays.insert("labels".into(), Tensor::from_vec(labels, 4, &Device::Cpu).unwrap());
        candle_core::safetensors::save(&arrays, &path).unwrap();
        let report = run.train(name, data.clone(), with_training!(with(4), schedule: schedule.clone())).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("1 of 4 steps were skipped because they had no usable labels")), "{:?}", report.notes);
        let curve = report.passes[0].details["training"]["curve"].as_array().unwrap();
        let empty = curve.iter().position(|row| row["gradient_norm"] == 0.0).unwrap();
        for (at, pair) in curve.windows(2).enumerate() {
            assert_eq!(pair[0]["learning_rate"] == pair[1]["learning_rate"], at == empty, "{curve:?}");
        }
        if empty > 0 {
            let [before, after] = [empty, empty + 1].map(|steps| {
                run.train(name, data.clone(), with(steps as u64)).unwrap();
                run.weights()
            });
            assert!(furthest(&before, &weights(&golden(name))) > 0.0);
            assert_eq!(before, after);
            compared += 1;
        }
    }
    assert!(compared > 0);
}

/// Plan and report state that the rate does not reach its peak; with `epochs`, only the report.
#[test]
fn a_warm_up_longer_than_the_training_is_noted() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 16, classes(name));
    let epochs = with_training!(finetune(2), max_steps: None, epochs: Some(1));
    for (pass, warmup_steps, is_planned, is_noted) in [(finetune(2), 2, true, true), (finetune(2), 1, false, false), (epochs, 50, false, true)] {
        let schedule = Schedule { warmup_steps, ..pass.training.schedule.clone() };
        let pass = with_training!(pass, schedule);
        let pipeline = Pipeline::builder().pass(pass).train(data.clone()).seed(3).force(true).build().unwrap();
        let model = Model::open(golden(name)).unwrap();
        let text = format!("the training of 2 steps ends during the warm-up of {warmup_steps}, so that");
        let is_in = |notes: &[String]| notes.iter().any(|note| note.contains(&text));
        assert_eq!(is_in(&pipeline.plan(&model).unwrap().notes), is_planned, "{warmup_steps}");
        assert_eq!(is_in(&pipeline.run(model, run.out()).unwrap().notes), is_noted, "{warmup_steps}");
    }
}

#[test]
fn evaluations_without_a_score_are_refused() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 8, classes(name));
    let refused = |patience: Option<u64>, evaluation: Option<Data>| {
        let builder = Pipeline::builder().pass(with_training!(finetune(2), evaluate_every: Some(1), patience)).train(data.clone());
        let builder = evaluation.into_iter().fold(builder, |builder, data| builder.evaluation(data));
        builder.build().unwrap().run(Model::open(golden(name)).unwrap(), run.out()).unwrap_err().to_string()
    };
    for (patience, evaluation) in [(None, None), (Some(1), None), (None, Some(samples(name, run.folder.path(), 4, 0)))] {
        let error = refused(patience, evaluation);
        assert!(error.contains("evaluate_every") && error.contains("evaluation"), "{error}");
    }
    let builder = Pipeline::builder().pass(with_training!(finetune(2), patience: Some(1))).train(data.clone()).evaluation(data.clone());
    let error = builder.build().err().unwrap();
    assert!(error.is_misuse() && error.to_string().contains("patience): requires `evaluate_every`"), "{error}");
}

#[test]
fn distillation_writes_the_evaluated_state_closest_to_the_teacher() {
    let name = "llama";
    let run = Run::new();
    let fidelity = |samples: Data| Data { task: Some(compress_engine::data::Task::Fidelity), ..samples };
    let folder = run.folder.path();
    let (train, evaluation) = (fidelity(samples(name, folder, 8, 0)), fidelity(samples(name, folder, 5, 0)));
    let quantize = || Step::from(Quantize { scheme: Scheme::W4A16, group_size: Some(8), ..Quantize::default() });
    let written = |out: &str, distill: Option<Distill>| {
        let steps = std::iter::once(quantize()).chain(distill.map(Step::from));
        let builder = steps.fold(Pipeline::builder(), |builder, step| builder.pass(step));
        let pipeline = builder.train(train.clone()).evaluation(evaluation.clone()).seed(3).build().unwrap();
        let report = pipeline.run(Model::open(golden(name)).unwrap(), folder.join(out)).unwrap();
        (report.fidelity.clone().unwrap().fidelity.kl.unwrap(), report)
    };
    let (rounded, _) = written("rounded", None);
    for (out, learning_rate, improves) in [("tuned", 1e-2, true), ("diverged", 5.0, false)] {
        let targets = vec!["*proj.weight".parse().unwrap()];
        let pass = with_training!(distill(4, "soft=1"), scales: QuantizerScales::Only, learning_rate, targets, evaluate_every: Some(2));
        let (kl, report) = written(out, Some(pass));
        let scores = report.passes[1].details["training"]["evaluations"].as_array().unwrap();
        assert!(scores.len() == 3 && scores.iter().all(|score| score["metric"] == "kl_divergence"), "{scores:?}");
        let values: Vec<f64> = scores.iter().map(|score| score["value"].as_f64().unwrap()).collect();
        let best = values.iter().copied().fold(f64::INFINITY, f64::min);
        assert!((best - kl).abs() < 1e-6 * kl && (values[0] - rounded).abs() < 1e-6 * rounded, "{values:?}, {kl} written, {rounded} before");
        assert_eq!(kl < rounded, improves, "{values:?}");
        assert_eq!(weights(&folder.join(out)) == weights(&folder.join("rounded")), !improves);
        assert_eq!(report.passes[1].tensors_changed > 0, improves);
    }
}

/// The score that selects the best weights includes the quantization of activations at run time.
#[test]
fn scores_in_training_are_those_of_the_written_model() {
    let name = "llama";
    let run = Run::new();
    let path = run.folder.path().join("arrays.safetensors");
    candle_core::safetensors::save(&without(&labelled(name), |at| at % 11 < 4), &path).unwrap();
    let data = Data { arrays: Some(path), ..Data::default() };
    let train = with_training!(finetune(4), evaluate_every: Some(2));
    let rounded: [(&str, Vec<compress::pass::Step>); 3] = [
        ("int8", vec![QuantizeDynamic::default().into(), train.clone().into()]),
        ("cast", vec![Cast { to: FloatFormat::Bf16, ..Cast::default() }.into(), train.clone().into()]),
        ("bf16", vec![with_training!(train, precision: Precision::Bf16).into()]),
    ];
    for (out, steps) in rounded {
        let builder = steps.into_iter().fold(Pipeline::builder(), |builder, step| builder.pass(step));
        let pipeline = builder.train(data.clone()).evaluation(data.clone()).seed(3).build().unwrap();
        let report = pipeline.run(Model::open(golden(name)).unwrap(), run.folder.path().join(out)).unwrap();
        let scores = report.passes.last().unwrap().details["training"]["evaluations"].as_array().unwrap();
        let best = scores.iter().map(|score| score["value"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
        let written = *report.accuracy.as_ref().unwrap().after.values().next().unwrap();
        assert!((best - written).abs() < 1e-6 * written, "{out}: {best} in training, {written} written");
        assert_eq!(report.notes.iter().any(|note| note.contains("quantized in training as at run time")), out == "int8", "{:?}", report.notes);
    }
}

#[test]
fn the_memory_of_a_run_bounds_its_training() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 8, classes(name));
    let within = |memory| {
        let pipeline = Pipeline::builder().pass(finetune(1)).train(data.clone()).memory(memory).force(true).build().unwrap();
        pipeline.run(Model::open(golden(name)).unwrap(), run.out())
    };
    within(Some(1 << 30)).unwrap();
    let error = within(Some(10_000)).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}

#[test]
fn batches_with_batch_norm_statistics_are_not_split() {
    let name = "torchvision-resnet18";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 8, classes(name));
    let report = run.train(name, data.clone(), finetune(1)).unwrap();
    let peak = report.passes[0].details["memory"]["peak_bytes"].as_u64().unwrap();
    let with = |batch_norm| with_training!(finetune(1), batch_norm, memory_limit: Some(ByteSize(peak - peak / 20)));
    let error = run.train(name, data.clone(), with(BatchNorm::Batch)).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("`batch_norm: fixed`"), "{error}");
    let report = run.train(name, data, with(BatchNorm::Fixed)).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("micro-batches")), "{:?}", report.notes);
}

/// With another data set, pruning would have removed other units, so the checkpoint would not match.
#[test]
fn a_run_resumes_only_with_the_data_of_earlier_passes() {
    let (name, run) = ("bert-sequence-classification", Run::new());
    let data = samples(name, run.folder.path(), 16, classes(name));
    let calibration = run.folder.path().join("calibration.safetensors");
    std::fs::copy(data.arrays.as_ref().unwrap(), &calibration).unwrap();
    let prune: compress::pass::PruneStructured =
        serde_json::from_str(r#"{ "amount": 0.5, "dims": ["mlp"], "importance": "activation", "repair": "least-squares" }"#).unwrap();
    let train = with_training!(finetune(8), checkpoint_every: Some(Every::Steps(1)));
    let start = |stop: Option<u64>| {
        let (cancel, watch) = cancelled_after(stop);
        let calibration = Data { arrays: Some(calibration.clone()), ..Data::default() };
        let builder = Pipeline::builder().pass(prune.clone()).pass(train.clone()).train(data.clone()).calibration(calibration);
        builder.resume(true).progress(watch).cancel(cancel).build().unwrap().run(Model::open(golden(name)).unwrap(), run.out())
    };
    let error = start(Some(2)).unwrap_err();
    assert!(matches!(error, Error::Paused { .. } | Error::Interrupted { .. } | Error::Cancelled), "{error}");
    let bytes = std::fs::read(&calibration).unwrap();
    let other = samples(name, run.folder.path(), 17, classes(name)).arrays.unwrap();
    std::fs::copy(other, &calibration).unwrap();
    let error = start(None).unwrap_err().to_string();
    assert!(error.contains("different options, data or weights"), "{error}");
    std::fs::write(&calibration, bytes).unwrap();
    start(None).unwrap();
}

#[test]
fn an_interrupted_run_yields_the_result_of_an_uninterrupted_one() {
    let offloaded = vec![Offload::Parameters];
    for (optimizer, average, evaluate_every, offload) in [
        (Kind::AdamW, Some(0.9), None, vec![]),
        (Kind::AdamW8bit, None, None, vec![]),
        (Kind::Muon, None, None, vec![]),
        (Kind::Sgd, None, Some(2), vec![]),
        (Kind::AdamW, Some(0.9), Some(2), offloaded),
    ] {
        let name = "bert-sequence-classification";
        let pass = with_training!(finetune(11), optimizer, average, evaluate_every, offload, checkpoint_every: Some(Every::Steps(2)), logs: vec![LogFormat::Tensorboard]);
        let (whole, parts) = (Run::new(), Run::new());
        let data = samples(name, whole.folder.path(), 41, classes(name));
        let builder = |pass: &Finetune| {
            let builder = Pipeline::builder().pass(pass.clone()).train(data.clone()).seed(3);
            if evaluate_every.is_some() { builder.evaluation(data.clone()) } else { builder }
        };
        let report = builder(&pass).build().unwrap().run(Model::open(golden(name)).unwrap(), whole.out()).unwrap();
        for stop in [3, 2] {
            let (cancel, watch) = cancelled_after(Some(stop));
            let error =
                builder(&pass).resume(true).progress(watch).cancel(cancel).build().unwrap().run(Model::open(golden(name)).unwrap(), parts.out()).unwrap_err();
            assert!(matches!(error, Error::Paused { .. } | Error::Interrupted { .. } | Error::Cancelled), "{error}");
            assert!(!parts.out().exists());
        }
        let again = builder(&pass).build().unwrap();
        let error = again.run(Model::open(golden(name)).unwrap(), parts.out()).unwrap_err();
        assert!(error.hint().unwrap().contains("`resume`"), "{error}");
        let other = with_training!(pass.clone(), learning_rate: 1e-3);
        let other = builder(&other).resume(true).build().unwrap();
        assert!(other.run(Model::open(golden(name)).unwrap(), parts.out()).unwrap_err().to_string().contains("different options"));
        let rest = builder(&pass).resume(true).build().unwrap().run(Model::open(golden(name)).unwrap(), parts.out()).unwrap();
        // The interrupted runs ended after the steps 4 and 7.
        assert!(rest.notes.iter().any(|note| note.starts_with("4 steps in ")), "{:?}", rest.notes);
        let evaluations = |report: &Report| report.passes[0].details["training"]["evaluations"].clone();
        assert_eq!(evaluations(&report), evaluations(&rest));
        assert_eq!(evaluations(&rest).as_array().unwrap().len(), if evaluate_every.is_some() { 7 } else { 0 });
        let (a, b) = (whole.weights(), parts.weights());
        for (name, values) in &a {
            let same = values.iter().zip(&b[name]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{optimizer:?}: {name} differs");
        }
        let table = std::fs::read_to_string(parts.out().join("finetune.csv")).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "step,epoch,loss,hard,learning_rate,gradient_norm,samples_per_second,waited");
        let steps: Vec<&str> = lines[1..].iter().map(|line| line.split(',').next().unwrap()).collect();
        assert_eq!(steps, (1..=11).map(|step| step.to_string()).collect::<Vec<_>>());
        // One record for the version and one for each step; only the records of steps contain a loss.
        let events = std::fs::read(parts.out().join("finetune.tfevents")).unwrap();
        let tag = b"finetune/loss/hard";
        assert_eq!(events.windows(tag.len()).filter(|bytes| bytes == tag).count(), 11);
    }
}

#[test]
fn numbers_out_of_range_stop_the_run_by_name() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let pass = with_training!(finetune(20), learning_rate: 1e30, clip_norm: 0.0, optimizer: Kind::Sgd, checkpoint_every: Some(Every::Steps(1)));
    let error = run.train(name, samples(name, run.folder.path(), 16, classes(name)), pass).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Diverged { .. }) && text.contains("step") && text.contains("checkpoint"), "{text}");
    assert!(!run.out().exists());
}

#[test]
fn unsuitable_data_is_rejected() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    // A data set smaller than a batch results in one smaller batch per epoch.
    let report = run.train(name, samples(name, run.folder.path(), 3, classes(name)), finetune(4)).unwrap();
    assert!(ends(&report).1.is_finite());
    let error = run.train(name, samples(name, run.folder.path(), 0, classes(name)), finetune(4)).unwrap_err();
    assert!(error.to_string().contains("no samples"), "{error}");
    let error = run.train(name, samples(name, run.folder.path(), 5, classes(name) + 2), finetune(4)).unwrap_err();
    assert!(error.to_string().contains("class") && error.to_string().contains("label"), "{error}");
    let error = run.train(name, samples(name, run.folder.path(), 8, 0), finetune(4)).unwrap_err();
    assert!(error.to_string().contains("hard"), "{error}");
    let error = run.train(name, samples(name, run.folder.path(), 8, 0), with_training!(finetune(4), losses: losses("soft=1"))).unwrap_err();
    assert!(error.to_string().contains("teacher"), "{error}");
    let error = run.train("bert", samples("bert", run.folder.path(), 8, 0), distill(1, "soft=1")).unwrap_err();
    assert!(error.to_string().contains("`logits`"), "{error}");
    let error = run.train("bert", samples("bert", run.folder.path(), 8, 0), distill(1, "{ hidden: { layers: [[9, 9]] } }")).unwrap_err();
    assert!(error.to_string().contains("[9, 9]"), "{error}");
    let pass = Distill { student: Some(Student::Layers(vec![5])), ..distill(1, "hidden=1") };
    assert!(run.train("bert", samples("bert", run.folder.path(), 8, 0), pass).unwrap_err().to_string().contains("layer 5"));
    // A file with several rows counts as one sample.
    let arrays = labelled(name).into_iter().filter(|(input, _)| input != "labels").collect::<HashMap<_, _>>();
    let folder = run.folder.path().join("runs");
    std::fs::create_dir(&folder).unwrap();
    candle_core::safetensors::save(&arrays, folder.join("one.safetensors")).unwrap();
    for terms in ["soft=1", "embedding=1"] {
        let error = run
            .train(name, Data { arrays: Some(folder.clone()), ..Data::default() }, with_training!(distill(1, terms), batch_size: BatchSize::Samples(1)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("8 rows for 1 samples") && error.contains("files with one row"), "{error}");
    }
    let pass = with_training!(finetune(1), memory_limit: Some(ByteSize(1000)));
    let error = run.train(name, samples(name, run.folder.path(), 8, classes(name)), pass).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}

#[test]
fn a_student_with_other_modules_is_refused() {
    let name = "sentence-dense";
    let refused = |student: PathBuf| {
        let run = Run::new();
        let pass = Distill { student: Some(Student::Model(student)), ..distill(1, "hidden=1") };
        run.train(name, samples(name, run.folder.path(), 8, 0), pass).unwrap_err().to_string()
    };
    let error = refused(golden("bert"));
    assert!(error.contains("student") && error.contains("is missing, but in the input model it is Pooling"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let model = Model::open(golden(name)).unwrap();
    for file in model.auxiliary.files.iter().map(|file| golden(name).join(file)).chain(model.weight_files).chain([golden(name).join("config.json")]) {
        let to = folder.path().join(file.strip_prefix(golden(name)).unwrap());
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(file, to).unwrap();
    }
    let config = folder.path().join("2_Dense/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("activation.Tanh", "activation.ReLU")).unwrap();
    let error = refused(folder.path().to_owned());
    assert!(error.contains("is Dense in `2_Dense` with different settings"), "{error}");
}

#[test]
fn weights_that_cannot_be_written_are_rejected_before_training() {
    let (run, name) = (Run::new(), "model.layers.1.mlp.up_proj.weight");
    crate::common::write_with_float64(run.folder.path(), name);
    let plan = |ignore: &[&str]| {
        let pass = with_training!(finetune(1), ignore: ignore.iter().map(|name| name.parse().unwrap()).collect());
        let pipeline = Pipeline::builder().pass(pass).train(samples("llama", run.folder.path(), 2, 0)).build().unwrap();
        pipeline.plan(&Model::open(run.folder.path()).unwrap())
    };
    let error = plan(&[]).unwrap_err();
    assert!(error.to_string().contains(&format!("`{name}`: is F64")) && error.hint().unwrap().contains("F32"), "{error}");
    plan(&[name]).unwrap();
}

#[test]
fn unsupported_offloading_is_rejected_before_training() {
    let run = Run::new();
    let offload = vec![Offload::Parameters];
    let pass = with_training!(finetune(1), offload: offload.clone(), shard_optimizer: true);
    let name = "bert-sequence-classification";
    let error = run.train(name, samples(name, run.folder.path(), 8, classes(name)), pass).unwrap_err();
    assert!(error.is_misuse() && error.to_string().contains("`offload: parameters`"), "{error}");
    let folder = run.folder.path().join("branches");
    std::fs::create_dir(&folder).unwrap();
    let nodes = "a = Linear(x, w) -> float[batch, 2]\nb = Linear(x, v) -> float[batch, 2]\nc = Mul(a, b) -> float[batch, 2]\noutput logits = c\n";
    let graph: compress_graph::ir::Graph = format!("input x: float[batch, 3]\nparam w: float[2, 3]\nparam v: float[2, 3]\n{nodes}").parse().unwrap();
    std::fs::write(folder.join("graph.json"), serde_json::to_string(&compress_graph::ir::GraphFile::from(&graph)).unwrap()).unwrap();
    let ones = |dims: &[usize]| Tensor::ones(dims, candle_core::DType::F32, &Device::Cpu).unwrap();
    let arrays = HashMap::from([("w".to_owned(), ones(&[2, 3])), ("v".to_owned(), ones(&[2, 3]))]);
    candle_core::safetensors::save(&arrays, folder.join("model.safetensors")).unwrap();
    let data = samples(name, run.folder.path(), 8, classes(name));
    let pipeline = Pipeline::builder().pass(with_training!(finetune(1), offload)).train(data).build().unwrap();
    let error = pipeline.plan(&Model::open(&folder).unwrap()).unwrap_err();
    assert!(
        error.is_misuse() && error.to_string().starts_with("offload: parameters: ") && error.to_string().contains("2 values cross the narrowest cut: `a`, `b`"),
        "{error}"
    );
}

#[test]
fn quantized_models_train_with_fake_quantization() {
    let noted = |report: &Report| report.notes.iter().any(|note| note.contains("fake quantization to the codes"));
    for name in CLASSIFIERS {
        let run = Run::new();
        let name = if name == "resnet-basic" { "torchvision-resnet18" } else { name };
        let data = samples(name, run.folder.path(), 8, classes(name));
        let pass = with_training!(finetune(20), learning_rate: 1e-3);
        let pipeline = Pipeline::builder().pass(QuantizeStatic::default()).pass(pass).calibration(data.clone()).train(data);
        let report = pipeline.build().unwrap().run(Model::open(golden(name)).unwrap(), run.out()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (first, last) = ends(&report);
        assert!(last < 0.9 * first, "{name}: the loss went from {first} to {last}");
        assert!(noted(&report), "{name}: {:?}", report.notes);
        let model = Model::open(run.out()).unwrap();
        assert!(model.weights.by_name.values().any(|weight| weight.describe().contains("int8")), "{name}");
        assert!(model.graph().unwrap().to_string().contains("FakeQuantize"), "{name}");
    }
    let (folder, name) = (tempfile::tempdir().unwrap(), "bert-sequence-classification");
    let data = samples(name, folder.path(), 8, classes(name));
    assert!(!noted(&passes(&golden(name), &folder.path().join("floats"), vec![finetune(1).into()], Some(&data))));
}

/// Scales of the quantizers of weights and of activations.
fn scales(folder: &Path) -> (Vec<f32>, Vec<String>) {
    let model = Model::open(folder).unwrap();
    let weights = model.weights.by_name.values().filter_map(|weight| weight.scales().unwrap()).flat_map(|scales| scales.scales).collect();
    let graph = model.graph().unwrap();
    let quantizers = graph.nodes().iter().filter(|node| node.op.name() == "FakeQuantize").map(|node| node.op.to_string()).collect();
    (weights, quantizers)
}

#[test]
fn scales_are_learned_and_written_as_they_were_trained() {
    for name in ["bert-sequence-classification", "torchvision-resnet18"] {
        let run = Run::new();
        let data = samples(name, run.folder.path(), 8, classes(name));
        let mut found = Vec::new();
        for (scales_of, steps) in [(QuantizerScales::Fixed, 20), (QuantizerScales::Learnable, 20), (QuantizerScales::Learnable, 21)] {
            let pass = with_training!(finetune(steps), learning_rate: 2e-3, scales: scales_of, batch_norm: BatchNorm::Fixed);
            let pipeline = Pipeline::builder().pass(QuantizeStatic::default()).pass(pass).calibration(data.clone()).train(data.clone());
            let out = run.folder.path().join(format!("{scales_of:?}-{steps}"));
            let report = pipeline.build().unwrap().run(Model::open(golden(name)).unwrap(), &out).unwrap_or_else(|e| panic!("{name}: {e}"));
            found.push((ends(&report), scales(&out), out));
        }
        let [fixed, learned, further] = &found[..] else { unreachable!() };
        assert_eq!(fixed.1.0.len(), learned.1.0.len());
        let moved = fixed.1.0.iter().zip(&learned.1.0).filter(|(a, b)| a != b).count();
        assert!(moved > fixed.1.0.len() / 2, "{name}: {moved} of {} scales of weights moved", fixed.1.0.len());
        assert!(fixed.1.1.len() == learned.1.1.len() && fixed.1.1.iter().zip(&learned.1.1).all(|(a, b)| a != b), "{name}: {:?}", learned.1.1);
        // The loss of the written model on the same batch equals that of the next training step.
        let pass = with_training!(finetune(1), learning_rate: 1e-12, scales: QuantizerScales::Learnable, batch_norm: BatchNorm::Fixed);
        let again = Pipeline::builder().pass(pass).train(data).build().unwrap().run(Model::open(&learned.2).unwrap(), run.out()).unwrap();
        let (written, next) = (ends(&again).0, further.0.1);
        assert!((written - next).abs() < 1e-3 * next.max(0.1), "{name}: {written} is written, {next} was trained");
        assert_eq!(scales(&run.out()), learned.1, "{name}: a step of nothing moves nothing");
    }
}

/// Quantized weights as integers minus zero points, and all other weights.
fn integers(folder: &Path) -> (Vec<f32>, Vec<f32>) {
    let model = Model::open(folder).unwrap();
    let (mut integers, mut floats) = (Vec::new(), Vec::new());
    for (name, weight) in &model.weights.by_name {
        let values = weight.floats(name).unwrap();
        match weight.scales().unwrap() {
            Some(scales) => {
                integers.extend(values.chunks(scales.run).zip(&scales.scales).flat_map(|(run, scale)| run.iter().map(move |x| (x / scale).round())))
            }
            None => floats.extend(values),
        }
    }
    (integers, floats)
}

#[test]
fn only_scales_are_trained_while_integers_stay() {
    for (name, targets, quantize) in [
        ("llama", "*proj.weight", Step::from(Quantize { scheme: Scheme::W4A16Asym, group_size: Some(8), ..Quantize::default() })),
        ("bert-sequence-classification", "*.weight", QuantizeStatic::default().into()),
    ] {
        let run = Run::new();
        let data = Data { task: Some(compress_engine::data::Task::Fidelity), ..samples(name, run.folder.path(), 8, 0) };
        let train = |steps: u64, batch_size: usize| {
            let targets = vec![targets.parse().unwrap()];
            let batch_size = BatchSize::Samples(batch_size);
            let common = Distill {
                training: Training { losses: losses("soft=1"), schedule: constant(), max_steps: Some(steps), weight_decay: 0.0, ..Training::default() },
                ..Distill::default()
            };
            with_training!(common, scales: QuantizerScales::Only, learning_rate: 3e-3, batch_size, targets)
        };
        let mut found = Vec::new();
        for steps in [0, 30, 31] {
            let out = run.folder.path().join(steps.to_string());
            let builder = Pipeline::builder().pass(quantize.clone()).calibration(data.clone()).train(data.clone());
            let builder = if steps > 0 { builder.pass(train(steps, 8)) } else { builder };
            let report = builder.build().unwrap().run(Model::open(golden(name)).unwrap(), &out).unwrap_or_else(|e| panic!("{name}: {e}"));
            found.push((integers(&out), scales(&out).0, out, report));
        }
        let [before, after, further] = &found[..] else { unreachable!() };
        assert_eq!(before.0.0, after.0.0, "{name}: integers");
        assert!(!before.0.1.is_empty() && (name != "llama" || before.0.1 == after.0.1), "{name}: floats");
        let moved = before.1.iter().zip(&after.1).filter(|(a, b)| a != b).count();
        assert!(moved > before.1.len() / 2, "{name}: {moved} of {} scales moved", before.1.len());
        let (first, last) = ends(&after.3);
        assert!(last < 0.9 * first, "{name}: the loss went from {first} to {last}");
        // The loss of the written model is that of the next training step.
        let teacher = Some(golden(name));
        let pass = Distill { teacher, ..with_training!(train(1, 8), learning_rate: 1e-12) };
        let again = Pipeline::builder().pass(pass).train(data.clone()).build().unwrap().run(Model::open(&after.2).unwrap(), run.out()).unwrap();
        let (written, next) = (ends(&again).0, ends(&further.3).1);
        assert!((written - next).abs() < 1e-3 * next, "{name}: {written} is written, {next} was trained");
        assert_eq!((integers(&run.out()), scales(&run.out()).0), (after.0.clone(), after.1.clone()), "{name}: a step of nothing changes nothing");
    }
    // Floats have no scales.
    let (name, run) = ("llama", Run::new());
    let data = Data { task: Some(compress_engine::data::Task::Fidelity), ..samples(name, run.folder.path(), 8, 0) };
    for scales in [QuantizerScales::Only, QuantizerScales::Learnable] {
        let failed = run.train(name, data.clone(), with_training!(distill(1, "soft=1"), scales)).unwrap_err();
        assert!(failed.to_string().contains("quantize first"), "{failed}");
    }
}

#[test]
fn every_precision_and_optimizer_learns() {
    let name = "bert-sequence-classification";
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        for optimizer in Kind::ALL {
            let run = Run::new();
            let learning_rate = if optimizer == Kind::Sgd { 0.1 } else { 3e-3 };
            let pass = with_training!(finetune(25), precision, optimizer, learning_rate);
            let report =
                run.train(name, samples(name, run.folder.path(), 8, classes(name)), pass).unwrap_or_else(|e| panic!("{precision:?}, {optimizer:?}: {e}"));
            let (first, last) = ends(&report);
            assert!(last < 0.8 * first, "{precision:?}, {optimizer:?}: the loss went from {first} to {last}");
        }
    }
}

#[test]
fn a_memory_trace_agrees_with_the_accounts_and_names_the_peak() {
    let (name, run) = ("bert-sequence-classification", Run::new());
    let data = samples(name, run.folder.path(), 8, classes(name));
    let calibration = Data { task: Some(Task::Fidelity), ..data.clone() };
    let builder = Pipeline::builder().pass(finetune(6)).pass(QuantizeStatic::default()).train(data).calibration(calibration).memory_trace(true);
    let (pipeline, model) = (builder.build().unwrap(), Model::open(golden(name)).unwrap());
    let planned = serde_json::to_value(pipeline.plan(&model).unwrap().work).unwrap();
    let report = pipeline.run(model, run.out()).unwrap();
    // The planned work is the executed one.
    for (pass, stage) in report.passes.iter().zip(planned.as_array().unwrap()) {
        assert_eq!((Some(pass.name.as_str()), pass.macs), (stage["name"].as_str(), stage["macs"].as_u64()));
    }
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(run.out().join("memory-trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let highest = |process: u64| {
        let counters = events.iter().filter(|event| event["ph"] == "C" && event["pid"] == process);
        counters.map(|event| event["args"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>()).max().unwrap()
    };
    let memory = &report.passes[0].details["memory"];
    assert_eq!(highest(1), memory["peak_bytes"].as_u64().unwrap());
    let peaks = trace["otherData"]["peaks"].as_array().unwrap();
    assert_eq!(peaks.iter().map(|peak| peak["pass"].as_str().unwrap()).collect::<Vec<_>>(), ["finetune", "quantize-static"]);
    assert_eq!(peaks.iter().map(|peak| peak["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), [highest(1), highest(2)]);
    // The optimizer state exists from the second step.
    assert_eq!((peaks[0]["step"].as_u64(), peaks[0]["phase"].as_str()), (Some(2), Some("backward")));
    let steps = |process: u64| events.iter().filter(|event| event["pid"] == process && event["tid"] == 1 && event["ph"] == "X").count();
    assert_eq!(steps(1), 4, "loading and three steps");
    let node = |phase: &str| events.iter().any(|event| event["name"].as_str().is_some_and(|name| name.starts_with(phase)));
    assert!(node("forward: ") && node("backward: ") && events.iter().any(|event| event["name"] == "optimizer" && event["ph"] == "b"));
    let said = report.notes.iter().find(|note| note.starts_with("peak memory of")).unwrap();
    assert!(said.contains("in the backward of") && said.contains("in step 2") && said.contains("activations") && said.contains("of which"), "{said}");
    assert!(memory["peak_step"].as_array().unwrap().len() > 10);
    assert!(report.to_html().contains("path class=\"stack"), "no stacked picture");
}

#[test]
fn all_batches_of_a_step_count_as_memory() {
    let name = "bert-sequence-classification";
    let run = Run::new();
    let data = samples(name, run.folder.path(), 16, classes(name));
    let [one, four] = [1, 4].map(|gradient_accumulation| {
        let pass = with_training!(finetune(1), batch_size: BatchSize::Samples(4), gradient_accumulation);
        let report = run.train(name, data.clone(), pass).unwrap();
        let phases = report.passes[0].details["memory"]["phases"].as_array().unwrap().clone();
        let phase = phases.into_iter().find(|phase| phase["name"] == "data").unwrap();
        ["predicted_bytes", "measured_bytes"].map(|kind| phase[kind].as_u64().unwrap())
    });
    assert_eq!(four, one.map(|bytes| 4 * bytes));
}

#[test]
fn planned_memory_matches_the_measured_memory() {
    for name in ["bert-sequence-classification", "torchvision-resnet18"] {
        for gradient_checkpointing in [Checkpointing::None, Checkpointing::Blocks] {
            let run = Run::new();
            let pass = with_training!(finetune(2), gradient_checkpointing);
            let report = run.train(name, samples(name, run.folder.path(), 8, classes(name)), pass).unwrap();
            for phase in report.passes[0].details["memory"]["phases"].as_array().unwrap() {
                let (predicted, measured) = (phase["predicted_bytes"].as_f64().unwrap(), phase["measured_bytes"].as_f64().unwrap());
                let near = (predicted - measured).abs() <= 0.1 * measured.max(predicted);
                assert!(near, "{name}, {gradient_checkpointing:?}, {}: {predicted} and {measured}", phase["name"]);
            }
        }
    }
}

#[test]
fn planned_memory_is_an_upper_bound() {
    let some = |pattern: &str| vec![pattern.parse().unwrap()];
    let integers = || Step::from(Quantize { scheme: Scheme::W4A16, group_size: Some(8), ..Quantize::default() });
    let scales = |scales, pass: Distill| vec![integers(), with_training!(pass, scales, targets: some("*proj.weight")).into()];
    let cases: Vec<(&str, Vec<Step>)> = vec![
        ("bert-sequence-classification", vec![finetune(3).into()]),
        ("bert-sequence-classification", vec![with_training!(finetune(3), optimizer: Kind::Sgd, average: Some(0.9), gradient_accumulation: 2).into()]),
        ("bert-sequence-classification", vec![with_training!(finetune(3), targets: some("*layer.1*"), precision: Precision::Bf16).into()]),
        ("torchvision-mobilenet-v2", vec![finetune(3).into()]),
        ("torchvision-mobilenet-v2", vec![with_training!(finetune(3), gradient_checkpointing: Checkpointing::Blocks).into()]),
        ("llama-grouped-tied", vec![Distill { student: Some(Student::Layers(vec![0])), ..distill(3, "{ soft: 1, hidden: 1 }") }.into()]),
        ("llama-grouped-tied", vec![with_training!(distill(3, "soft=1"), optimizer: Kind::Adafactor).into()]),
        ("llama-grouped-tied", vec![with_training!(distill(3, "soft=1"), optimizer: Kind::Muon).into()]),
        ("llama-grouped-tied", scales(QuantizerScales::Fixed, distill(3, "soft=1"))),
        ("llama-grouped-tied", scales(QuantizerScales::Learnable, distill(3, "soft=1"))),
        ("llama-grouped-tied", scales(QuantizerScales::Only, distill(3, "soft=1"))),
        ("llama-grouped-tied", scales(QuantizerScales::Only, with_training!(distill(3, "soft=1"), precision: Precision::Bf16, gradient_accumulation: 2))),
    ];
    for (name, steps) in cases {
        let run = Run::new();
        let count = if name.starts_with("llama") { 0 } else { classes(name) };
        let data = samples(name, run.folder.path(), 16, count);
        let builder = steps.iter().cloned().fold(Pipeline::builder(), |builder, step| builder.pass(step)).train(data).seed(3);
        let report = builder.build().unwrap().run(Model::open(golden(name)).unwrap(), run.out()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let memory = &report.passes.last().unwrap().details["memory"];
        let (predicted, measured) = (memory["predicted_bytes"].as_f64().unwrap(), memory["peak_bytes"].as_f64().unwrap());
        assert!((predicted / measured - 1.0).abs() <= 0.1, "{name}, {steps:?}: {predicted} and {measured}: {memory}");
    }
}

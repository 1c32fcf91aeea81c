//! The work that a plan counts is the work that the run executes.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::pass::WeightImportance as Importance;
use compress::pass::{
    Amount, Decompose, Distill, Guide, InputImportance, Method, MoreTeacher, Palettize, PruneStructured, PruneUnstructured, Quantize, QuantizeStatic, Repair,
    Scheme, SearchStructure, Step, Training, UnitImportance,
};
use compress::pipeline::{RateFile, Rates};
use compress::{Model, Pipeline};
use compress_engine::data::Data;

use crate::common::golden_model as golden;

/// Samples of random tokens, of which the last batch is not complete.
fn tokens(folder: &Path) -> Data {
    let ids = Tensor::from_vec((0..328i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (41, 8), &Device::Cpu).unwrap();
    let path = folder.join("ids.safetensors");
    candle_core::safetensors::save(&[("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())].into(), &path).unwrap();
    Data { batch_size: Some(4), ..Data::at(&path) }
}

/// A part of a plan or report as its JSON.
fn json(part: &impl serde::Serialize) -> serde_json::Value {
    serde_json::to_value(part).unwrap()
}

/// A pipeline with one pass and samples in a folder.
fn pipeline(folder: &Path, pass: impl Into<Step>) -> Pipeline {
    Pipeline::builder().calibration(tokens(folder)).pass(pass).threads(2).memory_trace(true).build().unwrap()
}

/// Planned multiply-accumulates of the pass of a pipeline, and whether they are an upper bound.
fn planned_macs(pipeline: &Pipeline, model: &Model) -> (u64, bool) {
    let work = json(&pipeline.plan(model).unwrap().work);
    (work[0]["macs"].as_u64().unwrap(), work[0]["at_most"].as_bool().unwrap())
}

/// Planned and counted multiply-accumulates of a pass, and whether the planned ones are an upper bound.
fn macs(model: &str, pass: impl Into<Step>) -> (u64, u64, bool) {
    let folder = tempfile::tempdir().unwrap();
    let (pipeline, model) = (pipeline(folder.path(), pass), Model::open(golden(model)).unwrap());
    let (planned, at_most) = planned_macs(&pipeline, &model);
    let report = pipeline.run(model, folder.path().join("out")).unwrap();
    (planned, report.passes[0].macs.unwrap(), at_most)
}

#[test]
fn planned_work_is_the_executed_work() {
    let gptq = |propagation| Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, propagation, ..Quantize::default() };
    let sparsegpt = PruneUnstructured { importance: Importance::Sparsegpt, amount: Some(Amount::fraction(0.4)), ..PruneUnstructured::default() };
    let palettize = Palettize { importance: InputImportance::Activation, ..Palettize::default() };
    let decompose = Decompose { importance: InputImportance::Activation, ..Decompose::default() };
    let pruned = |importance| PruneStructured { amount: Some("0.5".parse().unwrap()), importance, ..PruneStructured::default() };
    let passes: [Step; 8] = [
        gptq(Some(0.0)).into(),
        gptq(None).into(),
        sparsegpt.into(),
        palettize.into(),
        QuantizeStatic::default().into(),
        decompose.into(),
        pruned(UnitImportance::Activation).into(),
        pruned(UnitImportance::Taylor).into(),
    ];
    for pass in passes {
        let name = format!("{pass:?}");
        let (planned, counted, at_most) = macs("llama", pass);
        assert!(counted > 1000 && !at_most, "{name}");
        assert_eq!(planned, counted, "{name}");
    }
}

/// The work of passes that may stop early, or that reuse results, is an upper bound.
#[test]
fn upper_bounds_of_work_are_marked() {
    let wanda = PruneUnstructured { importance: Importance::Wanda, amount: Some(Amount::fraction(0.4)), ..PruneUnstructured::default() };
    let goal = QuantizeStatic { accuracy_goal: Some("{ min_cosine: 0.5 }".parse().unwrap()), ..QuantizeStatic::default() };
    let repaired = PruneStructured {
        importance: UnitImportance::Activation,
        repair: Repair::LeastSquares,
        amount: Some("0.5".parse().unwrap()),
        ..PruneStructured::default()
    };
    let fast = PruneStructured { target: Some("latency=0.8".parse().unwrap()), amount: None, ..repaired.clone() };
    let [searched, compared] = [false, true].map(|baselines| SearchStructure { baselines, ..SearchStructure::default() });
    let folder = tempfile::tempdir().unwrap();
    let planned = |pass: Step| planned_macs(&pipeline(folder.path(), pass), &Model::open(golden("llama")).unwrap());
    let ((measured, is_bound), (without, _)) = (planned(fast.into()), planned(repaired.clone().into()));
    assert!(is_bound && measured > without, "{measured} and {without}");
    for pass in [Step::from(wanda), goal.into(), repaired.into(), searched.into(), compared.into()] {
        let name = format!("{pass:?}");
        let (planned, counted, at_most) = macs("llama", pass);
        assert!(at_most && counted > 1000 && counted <= planned, "{name}: {counted} of {planned}");
    }
    let guided = Quantize { scheme: Scheme::W4A16, group_size: Some(8), method: Method::Gptq, guide: Guide::Loss, ..Quantize::default() };
    let plain = Quantize { guide: Guide::None, ..guided.clone() };
    assert!(macs("llama", guided).0 > macs("llama", plain).0);
}

/// Each teacher adds its work in every epoch, once if its logits are cached, and none if they are in files.
#[test]
fn the_work_of_all_teachers_is_planned() {
    let folder = tempfile::tempdir().unwrap();
    let planned = |pass: Distill| {
        let pipeline = Pipeline::builder().train(Data { batch_size: None, ..tokens(folder.path()) }).pass(pass).threads(2).build().unwrap();
        let work = json(&pipeline.plan(&Model::open(golden("llama")).unwrap()).unwrap().work);
        (work[0]["macs"].as_u64().unwrap(), work[0]["at_most"].as_bool().unwrap())
    };
    let soft = || "{ soft: { temperature: 1 } }".parse().unwrap();
    let base = |max_steps: Option<u64>| Distill {
        training: Training { losses: soft(), max_steps, epochs: max_steps.is_none().then_some(3), ..Training::default() },
        ..Distill::default()
    };
    let more = |cache: Option<PathBuf>| vec![MoreTeacher { model: golden("llama"), weight: 1.0, cache }];
    let file = folder.path().join("logits.jsonl");
    std::fs::write(&file, "").unwrap();
    for max_steps in [None, Some(100)] {
        let (one, is_bound) = planned(base(max_steps));
        let (student, _) = planned(Distill { teacher_logits: vec![file.clone()], ..base(max_steps) });
        let teacher = one - student;
        assert!(teacher > 1000 && !is_bound);
        let two = Distill { more_teachers: more(None), ..base(max_steps) };
        assert_eq!(planned(two), (student + 2 * teacher, false));
        let cached = |pass: Distill| Distill { teacher_cache: Some(folder.path().join("cache")), ..pass };
        let (once, is_bound) = planned(cached(base(max_steps)));
        assert!(is_bound);
        if max_steps.is_none() {
            assert_eq!(once - student, teacher / 3);
        }
        let (both, _) = planned(cached(Distill { more_teachers: more(Some(folder.path().join("other"))), ..base(max_steps) }));
        assert_eq!(both - student, 2 * (once - student));
        assert!(once - student < teacher);
        // A training that ends before the first epoch runs a cached teacher as often as another one.
        assert_eq!(planned(cached(base(Some(1)))).0, planned(base(Some(1))).0);
    }
}

/// Reports compare estimates with the actual times, and later estimates follow them.
#[test]
fn reports_compare_estimates_with_actual_times() {
    let folder = tempfile::tempdir().unwrap();
    let file = RateFile::new(folder.path().join("rates.json"), "cpu", 2);
    let rates = file.load_or_measure(&Device::Cpu).unwrap();
    assert!(rates.macs_per_second > 1e6 && rates.read_bytes_per_second > 1e5 && rates.write_bytes_per_second > 1e4, "{rates:?}");
    assert_eq!(file.load_or_measure(&Device::Cpu).unwrap(), rates, "rates are measured once");
    let run = |rates: Rates, out: &str| {
        let builder = Pipeline::builder().calibration(tokens(folder.path())).pass(QuantizeStatic::default()).threads(2).rates(rates);
        let pipeline = builder.build().unwrap();
        let model = Model::open(golden("llama")).unwrap();
        let plan = pipeline.plan(&model).unwrap();
        (plan, pipeline.run(model, folder.path().join(out)).unwrap())
    };
    // Shorter stages than 0.2 s do not correct estimates.
    let slow = |mut rates: Rates| {
        rates.macs_per_second /= 1e5;
        rates
    };
    let (plan, report) = run(slow(rates), "first");
    let (timing, work) = (json(&report.timing), json(&plan.work));
    let stages = timing["stages"].as_array().unwrap();
    assert_eq!(stages.iter().map(|stage| &stage["name"]).collect::<Vec<_>>(), ["quantize-static", "read and write", "measure"]);
    assert_eq!(timing["estimated_seconds"], json(&plan.estimated_seconds));
    assert_eq!(stages.len(), work.as_array().unwrap().len());
    for (stage, planned) in stages.iter().zip(work.as_array().unwrap()) {
        assert_eq!((&stage["name"], &stage["estimated_seconds"]), (&planned["name"], &planned["estimated_seconds"]));
        assert!(stage["seconds"].as_f64() > Some(0.0) && stage["estimated_seconds"].as_f64() > Some(0.0), "{stage}");
    }
    file.record(&report);
    let (plan, _) = run(slow(file.load().unwrap()), "second");
    // The correction by the first run makes the estimate its actual time.
    let (estimated, actual) = (json(&plan.work)[0]["estimated_seconds"].as_f64().unwrap(), stages[0]["seconds"].as_f64().unwrap());
    assert!((estimated / actual - 1.0).abs() < 1e-6, "{estimated} and {actual}");
    let without = Pipeline::builder().pass(Quantize::default()).build().unwrap().plan(&Model::open(golden("llama")).unwrap()).unwrap();
    assert!(without.estimated_seconds.is_none() && json(&without.work)[0]["read_bytes"].as_u64() > Some(0));
}

//! Properties: threads, shards and the order of runs do not affect the output; a cancelled run leaves no
//! files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{DType, Desk, Tensors, contents, pico, pipeline};
use compress::Error;
use compress::export::{ByteSize, Layout, Safetensors};
use compress::pass::{Amount, Cast, FloatFormat, GranularityKind, NOfM, PruneUnstructured, QuantizeDynamic, Scope, Step, WeightObserver};
use compress::pipeline::Builder;
use compress_core::work::{Cancel, Event};

/// Combinations of passes that change the same weights.
fn chains() -> Vec<Vec<Step>> {
    let global = PruneUnstructured { amount: Some(Amount::fraction(0.4)), scope: Scope::Global, ..Default::default() };
    let pattern = PruneUnstructured { pattern: Some(NOfM { n: 2, m: 4 }), ..Default::default() };
    let mse = QuantizeDynamic { granularity: GranularityKind::Tensor, observer: WeightObserver::Mse, symmetric: false, ..Default::default() };
    let cast = Cast { to: FloatFormat::Bf16, ..Default::default() };
    vec![
        vec![PruneUnstructured::default().into(), global.clone().into()],
        vec![pattern.into(), mse.into()],
        vec![cast.into(), global.into(), QuantizeDynamic { embeddings: true, ..Default::default() }.into()],
    ]
}

/// A small Llama with one tensor that is larger than a block.
fn weights() -> Tensors {
    let mut tensors = pico(DType::F32);
    tensors.insert("model.layers.2.mlp.down_proj.weight".into(), crate::common::Tensor::random(DType::F32, &[700, 212], 99));
    tensors
}

fn check(builders: impl IntoIterator<Item = (String, Builder)>, desk: &Desk, input: &Path, expected: &BTreeMap<String, Vec<u8>>) {
    for (what, builder) in builders {
        assert!(contents(&desk.run(input, builder).unwrap().path) == *expected, "{what}");
    }
}

#[test]
fn any_number_of_threads_writes_the_same_bytes() {
    let desk = Desk::new();
    let input = desk.weights(&weights());
    for steps in chains() {
        let with = |threads: usize| pipeline().threads(threads).passes(steps.clone());
        let expected = contents(&desk.run(&input, with(1)).unwrap().path);
        check([2, 5].map(|n| (format!("{n} threads: {steps:?}"), with(n))), &desk, &input, &expected);
    }
}

#[test]
fn any_sharding_of_the_input_gives_the_same_output() {
    let desk = Desk::new();
    let (whole, parts) = (desk.weights(&weights()), [2, 3, 7].map(|count| desk.shards(&weights(), count)));
    for steps in chains() {
        for format in [Safetensors::default(), Safetensors { layout: Layout::Sparse, shard_size: ByteSize(20_000) }] {
            let with = || pipeline().passes(steps.clone()).export(format);
            let expected = desk.run(&whole, with()).unwrap();
            for part in &parts {
                let output = desk.run(part, with()).unwrap();
                assert!(contents(&output.path) == contents(&expected.path), "{steps:?}");
                assert_eq!(output.report.model.blake3, expected.report.model.blake3);
            }
        }
    }
}

#[test]
fn a_chain_equals_separate_runs_of_its_passes() {
    let desk = Desk::new();
    let input = desk.weights(&weights());
    for steps in chains() {
        for format in [Layout::Auto, Layout::Sparse].map(Safetensors::with_layout) {
            let mut at = input.clone();
            for step in &steps {
                at = desk.run(&at, pipeline().passes([step.clone()]).export(format)).unwrap().path;
            }
            check([(format!("{format:?}: {steps:?}"), pipeline().passes(steps.clone()).export(format))], &desk, &input, &contents(&at));
        }
    }
}

#[test]
fn a_cancelled_run_leaves_no_files() {
    let desk = Desk::new();
    let input = desk.weights(&weights());
    let old = desk.run(&input, pipeline()).unwrap();
    let before = contents(&old.path);
    let steps = chains().pop().unwrap();
    let (mut stopped, mut finished) = (0, false);
    while !finished {
        let (cancel, events) = (Cancel::default(), Arc::new(AtomicUsize::new(0)));
        let (handle, seen, last) = (cancel.clone(), events, stopped);
        let progress = move |_: Event| {
            if seen.fetch_add(1, Ordering::Relaxed) == last {
                handle.cancel();
            }
        };
        let pipeline = pipeline().passes(steps.clone()).force(true).cancel(cancel).progress(progress).build().unwrap();
        match pipeline.run(compress_engine::model::Model::open(&input).unwrap(), &old.path) {
            Err(Error::Cancelled) => assert!(contents(&old.path) == before, "stopped after {stopped} events"),
            Err(error) => panic!("{error}"),
            Ok(_) => finished = true,
        }
        let hidden = std::fs::read_dir(desk.path()).unwrap().any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with('.'));
        assert!(!hidden, "stopped after {stopped} events");
        stopped += 1;
    }
    assert!(stopped > 20, "only {stopped} events");
    assert!(contents(&old.path) != before);
}

#[test]
fn a_folder_that_appears_while_a_run_works_is_not_touched() {
    let desk = Desk::new();
    let (input, place) = (desk.weights(&weights()), desk.place());
    let theirs = place.clone();
    let progress = move |_: Event| {
        std::fs::create_dir_all(&theirs).unwrap();
        std::fs::write(theirs.join("theirs"), "").unwrap();
    };
    let error = pipeline().progress(progress).build().unwrap().run(compress_engine::model::Model::open(&input).unwrap(), &place).unwrap_err();
    assert!(error.to_string().contains("exists"), "{error}");
    assert_eq!(contents(&place).into_keys().collect::<Vec<_>>(), ["theirs"]);
}

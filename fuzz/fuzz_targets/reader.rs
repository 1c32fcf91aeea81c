//! Arbitrary bytes as a safetensors file, held against the reference reader, then opened and read whole.
//!
//! What is accepted here must be accepted there, and mean the same; the reverse holds but for a few rules that are
//! stricter on purpose. What opens is planned for, and now and then written and read back.

#![no_main]

mod mutate;

use std::path::PathBuf;
use std::sync::LazyLock;

use compress::export::{Layout, Safetensors};
use compress::model::Model;
use compress::pass::{Cast, PruneUnstructured, QuantizeDynamic};
use compress::pipeline::Pipeline;
use compress::store::header::Header;
use compress::store::{Checkpoint, Weight};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

/// A name that is given twice, and a tensor that is described by a list instead of an object.
const STRICTER: [&str; 2] = ["duplicate name", "invalid type: sequence, expected an object"];

fuzz_target!(|file: &[u8]| {
    let ours = parse(file);
    match (&ours, SafeTensors::read_metadata(file)) {
        (Ok(ours), Ok((_, theirs))) => same(ours, &theirs),
        (Ok(_), Err(error)) => panic!("accepted here, but not by the reference: {error:?}"),
        (Err(reason), Ok(_)) => assert!(STRICTER.iter().any(|rule| reason.contains(rule)), "accepted by the reference, but not here: {reason}"),
        (Err(_), Err(_)) => {}
    }
    open(file, ours.is_ok());
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate::mutate(data, size, max_size, seed) });

fn parse(file: &[u8]) -> Result<Header, String> {
    let (length, rest) = file.split_first_chunk().ok_or("too short")?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|e| e.to_string())?;
    let (json, data) = rest.split_at_checked(length).ok_or("truncated")?;
    Header::parse(json, data.len() as u64)
}

fn same(ours: &Header, theirs: &Metadata) {
    let tensors = theirs.tensors();
    assert_eq!(ours.tensors.len(), tensors.len());
    for t in &ours.tensors {
        let other = tensors[&t.name];
        assert_eq!((t.dtype, &t.shape), (other.dtype, &other.shape), "{}", t.name);
        assert_eq!((t.begin as usize, t.end as usize), other.data_offsets, "{}", t.name);
    }
    let metadata = theirs.metadata().clone().unwrap_or_default();
    assert_eq!(ours.metadata, metadata.into_iter().collect());
}

static PLACE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("compress-fuzz-{}.safetensors", std::process::id()))
});

fn open(file: &[u8], valid: bool) {
    std::fs::write(&*PLACE, file).expect("the scratch file can be written");
    assert_eq!(Checkpoint::open(&PLACE).is_ok(), valid, "a file and its header must be judged alike");
    let Ok(model) = Model::open(&*PLACE) else { return };
    let mut whole = true;
    for (name, weight) in &model.weights.by_name {
        let read = bytes(weight);
        whole &= read.is_some();
        if weight.is_float() {
            assert_eq!(bytes(&weight.dense(name)).is_some(), read.is_some(), "{name}: {weight:?}");
        }
    }
    // The slower checks take turns.
    let turn = file.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if turn.is_multiple_of(4) {
        plan(&model);
    }
    if whole && turn.is_multiple_of(16) {
        rewrite(&model, if turn.is_multiple_of(32) { Layout::Sparse } else { Layout::Auto });
    }
}

/// Every byte is asked for, since integers, scales and masks are only put together then.
fn bytes(weight: &Weight) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    weight
        .visit(1, &mut |block| {
            bytes.extend(block.now.values);
            Ok(())
        })
        .ok()?;
    assert_eq!(bytes.len() as u64, weight.value_bytes(), "{weight:?}");
    Some(bytes)
}

fn plan(model: &Model) {
    for layout in [Layout::Auto, Layout::Dense, Layout::Sparse] {
        let builder = Pipeline::builder().pass(PruneUnstructured::default()).pass(Cast::default()).pass(QuantizeDynamic::default());
        let _ = builder.export(Safetensors::layout(layout)).build().and_then(|pipeline| pipeline.plan(model));
        let _ = Pipeline::builder().export(Safetensors::layout(layout)).build().and_then(|pipeline| pipeline.plan(model));
    }
}

/// Disk to disk and back.
fn rewrite(model: &Model, layout: Layout) {
    let output = PLACE.with_extension("out");
    let pipeline = Pipeline::builder().export(Safetensors::layout(layout)).allow_nonfinite(true).force(true).threads(1);
    let Ok(_) = pipeline.build().and_then(|pipeline| pipeline.run(model.clone(), &output)) else { return };
    let back = Model::open(&output).expect("what was written opens");
    assert_eq!(back.weights.by_name.len(), model.weights.by_name.len());
    for (name, weight) in &model.weights.by_name {
        let after = &back.weights.by_name[name];
        assert_eq!((after.dtype, &after.shape, &after.encoding), (weight.dtype, &weight.shape, &weight.encoding), "{name}");
        assert_eq!(bytes(after), bytes(weight), "{name}");
    }
}

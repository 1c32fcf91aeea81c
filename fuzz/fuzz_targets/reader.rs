//! Arbitrary bytes as a safetensors file: the header is compared with that of the reference reader, then the
//! file is opened and read.
//!
//! A header that is accepted must be accepted by the reference, with the same contents. The reverse holds
//! except for a few rules that are stricter on purpose. Pipelines are planned for files that open, and
//! sometimes run.

#![no_main]

mod mutate;

use std::path::PathBuf;
use std::sync::LazyLock;

use compress::export::{Layout, Safetensors};
use compress_engine::model::Model;
use compress::pass::{Cast, PruneUnstructured, QuantizeDynamic};
use compress::pipeline::Pipeline;
use compress_core::store::header::Header;
use compress_core::store::{Checkpoint, Weight};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

/// Messages of the stricter rules: duplicate names, and tensors that are described by a list instead of an
/// object.
const STRICTER: [&str; 2] = ["duplicate name", "invalid type: sequence, expected an object"];

fuzz_target!(|file: &[u8]| {
    let header = parse(file);
    match (&header, SafeTensors::read_metadata(file)) {
        (Ok(header), Ok((_, reference))) => assert_same(header, &reference),
        (Ok(_), Err(error)) => panic!("accepted, but rejected by the reference: {error:?}"),
        (Err(reason), Ok(_)) => assert!(STRICTER.iter().any(|rule| reason.contains(rule)), "rejected, but accepted by the reference: {reason}"),
        (Err(_), Err(_)) => {}
    }
    open(file, header.is_ok());
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| { mutate::mutate(data, size, max_size, seed) });

fn parse(file: &[u8]) -> Result<Header, String> {
    let (length, rest) = file.split_first_chunk().ok_or("too short")?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|e| e.to_string())?;
    let (json, data) = rest.split_at_checked(length).ok_or("truncated")?;
    Header::parse(json, data.len() as u64)
}

fn assert_same(header: &Header, reference: &Metadata) {
    let tensors = reference.tensors();
    assert_eq!(header.tensors.len(), tensors.len());
    for t in &header.tensors {
        let other = tensors[&t.name];
        assert_eq!((t.dtype, &t.shape), (other.dtype, &other.shape), "{}", t.name);
        assert_eq!((t.begin as usize, t.end as usize), other.data_offsets, "{}", t.name);
    }
    let metadata = reference.metadata().clone().unwrap_or_default();
    assert_eq!(header.metadata, metadata.into_iter().collect());
}

static SCRATCH: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("compress-fuzz-{}.safetensors", std::process::id()))
});

fn open(file: &[u8], valid: bool) {
    std::fs::write(&*SCRATCH, file).expect("the scratch file can be written");
    assert_eq!(Checkpoint::open(&SCRATCH).is_ok(), valid, "a file must open if and only if its header is valid");
    let Ok(model) = Model::open(&*SCRATCH) else { return };
    let mut whole = true;
    for (name, weight) in &model.weights.by_name {
        let read = bytes(weight);
        whole &= read.is_some();
        if weight.is_float() {
            assert_eq!(bytes(&weight.dense(name)).is_some(), read.is_some(), "{name}: {weight:?}");
        }
    }
    // The slower checks are run alternately.
    let turn = file.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if turn.is_multiple_of(4) {
        plan(&model);
    }
    if whole && turn.is_multiple_of(16) {
        rewrite(&model, if turn.is_multiple_of(32) { Layout::Sparse } else { Layout::Auto });
    }
}

/// Reads every byte of a weight, because integers, scales and masks are only combined when they are read.
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
        let _ = builder.export(Safetensors::with_layout(layout)).build().and_then(|pipeline| pipeline.plan(model));
        let _ = Pipeline::builder().export(Safetensors::with_layout(layout)).build().and_then(|pipeline| pipeline.plan(model));
    }
}

/// Runs a pipeline and opens its output.
fn rewrite(model: &Model, layout: Layout) {
    let output = SCRATCH.with_extension("out");
    let pipeline = Pipeline::builder().export(Safetensors::with_layout(layout)).allow_nonfinite(true).force(true).threads(1);
    let Ok(_) = pipeline.build().and_then(|pipeline| pipeline.run(model.clone(), &output)) else { return };
    let back = Model::open(&output).expect("the output opens");
    assert_eq!(back.weights.by_name.len(), model.weights.by_name.len());
    for (name, weight) in &model.weights.by_name {
        let after = &back.weights.by_name[name];
        assert_eq!((after.dtype, &after.shape, &after.encoding), (weight.dtype, &weight.shape, &weight.encoding), "{name}");
        assert_eq!(bytes(after), bytes(weight), "{name}");
    }
}

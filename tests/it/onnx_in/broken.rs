//! Invalid and inconsistent files.

use std::collections::BTreeMap;
use std::path::Path;

use compress::internal::RunState;
use compress::pass::{Dequantize, Step};
use compress::{Error, Model};
use compress_core::work::{Cancel, Silent, Work};
use compress_onnx::proto::{DataType, GraphProto, ModelProto};
use prost::Message;

use crate::onnx_in::layers::layers;
use crate::onnx_in::quantized::{rounded, weights_alone};
use crate::onnx_in::{Place, model, raw};

/// The bytes of a file after opening and writing it without changes, if it opens.
fn again(bytes: &[u8]) -> Option<Vec<u8>> {
    again_in(bytes, tempfile::tempdir().unwrap().path())
}

/// The same in an otherwise empty folder.
pub fn again_in(bytes: &[u8], folder: &Path) -> Option<Vec<u8>> {
    let path = folder.join("in.onnx");
    std::fs::write(&path, bytes).unwrap();
    let opened = Model::open(&path).ok()?;
    let _ = opened.graph();
    let rewritten = opened.onnx.as_ref()?.rewrite(&opened.weights, ["out.onnx", "out.onnx.data"], &BTreeMap::new(), u64::MAX).unwrap();
    let folder = folder.join("out");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    compress_core::store::writer::write_pieces(&compress_core::files::Destination::local(&folder), &rewritten.layout, &rewritten.items, &work).ok()?;
    // Dequantized values are read, or an error is returned.
    let (step, state) = (Step::from(Dequantize::default()), RunState::default());
    let dequantized = step.pass().plan(&opened, &state);
    dequantized.into_iter().flat_map(|plan| plan.model.weights.by_name).for_each(|(name, weight)| drop(weight.floats(&name)));
    Some(std::fs::read(folder.join("out.onnx")).unwrap())
}

/// Mutates files at random offsets. Returns the number of files that still open.
fn changed(whole: &[ModelProto], rounds: usize, seed: u64) -> usize {
    let whole: Vec<Vec<u8>> = whole.iter().map(ModelProto::encode_to_vec).collect();
    let mut state = seed;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut opened = 0;
    for round in 0..rounds {
        let mut bytes = whole[round % whole.len()].clone();
        for _ in 0..1 + random(3) {
            // Most bytes are elements: the messages are at the beginning of one file, and scattered in
            // the other.
            let within = if random(2) == 0 { 700.min(bytes.len()) } else { bytes.len() };
            let at = random(within);
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes[at] ^= 1 << random(8),
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random(256) as u8),
            }
        }
        if let Some(first) = again(&bytes) {
            opened += 1;
            assert_eq!(again(&first).as_deref(), Some(first.as_slice()), "round {round}");
        }
    }
    opened
}

#[test]
fn mutated_files_are_rejected_or_written_so_that_they_open_again() {
    let opened = changed(&[model(), layers(13), rounded()], 1200, 7);
    assert!(opened > 100 && opened < 1100, "{opened} of 1200 open");
}

#[test]
#[ignore = "minutes: `scripts/fuzz --plain rewriting`"]
fn changed_files_of_onnx_many_times() {
    let files = [model(), layers(13), layers(10), rounded(), weights_alone()];
    crate::mutated::run_many("onnx", |rounds, seed| format!("{} open", changed(&files, rounds, seed)));
}

#[test]
fn inconsistent_files_are_rejected_by_name() {
    let whole = model().encode_to_vec();
    let said = |bytes: &[u8]| match Model::open(Place::of(bytes).input()) {
        Err(Error::Malformed { path, reason }) if path.ends_with("in.onnx") => reason,
        other => panic!("{other:?}", other = other.map(|model| model.weights.by_name.len())),
    };
    for end in (0..whole.len()).step_by(7) {
        said(&whole[..end]);
    }
    let change = |change: &dyn Fn(&mut GraphProto)| {
        let mut model = model();
        change(model.graph.as_mut().unwrap());
        said(&model.encode_to_vec())
    };
    assert!(change(&|graph| graph.initializer[0].dims = vec![20, 41]).contains("`onnx::MatMul_7`: has 3200 bytes of elements"));
    assert!(change(&|graph| graph.initializer[0].dims = vec![-20, -40]).contains("negative"));
    assert!(change(&|graph| graph.initializer[0].dims = vec![1 << 40, 1 << 40]).contains("counted"));
    assert!(change(&|graph| graph.initializer[0].raw_data = None).contains("no elements"));
    assert!(change(&|graph| graph.initializer[2].data_type = Some(DataType::Float as i32)).contains("field of another type"));
    assert!(change(&|graph| graph.initializer[2].dims = vec![60_000]).contains("fewer elements"));
    assert!(change(&|graph| drop(graph.initializer.remove(0))).contains("reads `onnx::MatMul_7`"));
    assert!(change(&|graph| graph.initializer.push(raw("bias", &[40]))).contains("two initializers are named `bias`"));
    assert!(change(&|graph| graph.node[0].input[0] = "y".into()).contains("cycle"));
    assert!(said(b"").contains("ir_version"));
    assert!(said(&[0xff; 40]).contains("not an ONNX model"));
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("model.onnx")).unwrap();
    for name in ["a.onnx", "b.onnx"] {
        std::fs::write(folder.path().join(name), &whole).unwrap();
    }
    assert!(Model::open(folder.path()).err().unwrap().to_string().contains("2 .onnx files"));
}

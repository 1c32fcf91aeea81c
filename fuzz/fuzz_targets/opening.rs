//! Arbitrary bytes as an `.onnx` file that is opened: what opens is read whole, is lifted to typed ops or refused, is written byte for byte where its
//! bytes are as everybody writes them, and takes passes over its weights.

#![no_main]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use compress::Model;
use compress::onnx::ModelFile;
use compress::pass::{Dequantize, PruneUnstructured, QuantizeDynamic, Step};
use compress::run_state::RunState;
use compress::store::writer::{Piece, write_pieces};
use compress::work::{Cancel, Silent, Work};
use libfuzzer_sys::fuzz_target;

/// Elements of a weight at most that is gone through.
const MOST: usize = 1 << 16;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("compress-fuzz-opening-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
});

/// The pieces of a file with everything in its place.
fn written(model: &Model) -> Option<Vec<u8>> {
    let file = model.onnx.as_ref()?;
    let rewritten = file.rewrite(&model.weights, ["out.onnx", "out.onnx.data"], &BTreeMap::new(), u64::MAX).ok()?;
    let out = FOLDER.join("out");
    let _ = std::fs::remove_dir_all(&out);
    std::fs::create_dir(&out).expect("a folder");
    let length: u64 = rewritten.layout[0].1.iter().map(Piece::len).sum();
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    write_pieces(&compress::files::Destination::here(&out), &rewritten.layout, &rewritten.items, &work).ok()?;
    let bytes = std::fs::read(out.join("out.onnx")).expect("what was written");
    assert_eq!(bytes.len() as u64, length);
    Some(bytes)
}

fuzz_target!(|bytes: &[u8]| {
    let path = FOLDER.join("in.onnx");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(model) = Model::open(&path) else { return };
    if model.weights.by_name.values().any(|weight| weight.elements() > MOST) {
        return;
    }
    let _ = model.graph();
    let whole = model.weights.by_name.values().all(|weight| weight.visit(3, &mut |_| Ok(())).is_ok());
    let Some(again) = written(&model) else { return };
    // What is written opens again, and is written the same.
    let second = FOLDER.join("again.onnx");
    std::fs::write(&second, &again).expect("a file");
    let reopened = ModelFile::open(&second).expect("what was written opens");
    assert_eq!(reopened.weights.len(), model.weights.by_name.len());
    if whole && model.weight_files.len() == 1 {
        assert_eq!(written(&Model::open(&second).expect("what was written opens")).as_deref(), Some(again.as_slice()));
    }
    let dynamic = QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() };
    for step in [Step::from(PruneUnstructured::default()), dynamic.into(), Dequantize::default().into()] {
        if let Ok(changed) = step.pass().apply(model.clone(), &mut RunState::default(), None)
            && let Some(bytes) = written(&changed)
        {
            std::fs::write(&second, &bytes).expect("a file");
            ModelFile::open(&second).expect("what a pass has changed opens");
        }
    }
});

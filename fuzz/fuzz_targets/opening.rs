//! Arbitrary bytes as an `.onnx` file. A file that opens can be read, lifted to a typed graph or rejected,
//! written again without changes, and processed by passes over its weights.

#![no_main]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use compress::Model;
use compress_onnx::ModelFile;
use compress::pass::{Dequantize, PruneUnstructured, QuantizeDynamic, Step};
use compress::internal::RunState;
use compress_core::store::writer::{Piece, write_pieces};
use compress_core::work::{Cancel, Silent, Work};
use libfuzzer_sys::fuzz_target;

/// Maximum number of elements of a weight that is read.
const MAX_ELEMENTS: usize = 1 << 16;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("compress-fuzz-opening-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
});

/// The bytes of the file that is written for a model.
fn written(model: &Model) -> Option<Vec<u8>> {
    let file = model.onnx.as_ref()?;
    let rewritten = file.rewrite(&model.weights, ["out.onnx", "out.onnx.data"], &BTreeMap::new(), u64::MAX).ok()?;
    let out = FOLDER.join("out");
    let _ = std::fs::remove_dir_all(&out);
    std::fs::create_dir(&out).expect("a folder");
    let length: u64 = rewritten.layout[0].1.iter().map(Piece::len).sum();
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    write_pieces(&compress_core::files::Destination::local(&out), &rewritten.layout, &rewritten.items, &work).ok()?;
    let bytes = std::fs::read(out.join("out.onnx")).expect("the written file");
    assert_eq!(bytes.len() as u64, length);
    Some(bytes)
}

fuzz_target!(|bytes: &[u8]| {
    let path = FOLDER.join("in.onnx");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(model) = Model::open(&path) else { return };
    if model.weights.by_name.values().any(|weight| weight.elements() > MAX_ELEMENTS) {
        return;
    }
    let _ = model.graph();
    let is_readable = model.weights.by_name.values().all(|weight| weight.visit(3, &mut |_| Ok(())).is_ok());
    let Some(again) = written(&model) else { return };
    // The written file opens again, and writing it again yields the same bytes.
    let second = FOLDER.join("again.onnx");
    std::fs::write(&second, &again).expect("a file");
    let reopened = ModelFile::open(&second).expect("the written file opens");
    assert_eq!(reopened.weights.len(), model.weights.by_name.len());
    if is_readable && model.weight_files.len() == 1 {
        assert_eq!(written(&Model::open(&second).expect("the written file opens")).as_deref(), Some(again.as_slice()));
    }
    let dynamic = QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() };
    for step in [Step::from(PruneUnstructured::default()), dynamic.into(), Dequantize::default().into()] {
        if let Ok(changed) = step.pass().apply(model.clone(), &mut RunState::default(), None)
            && let Some(bytes) = written(&changed)
        {
            std::fs::write(&second, &bytes).expect("a file");
            ModelFile::open(&second).expect("the file opens after a pass");
        }
    }
});

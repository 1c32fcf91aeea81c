//! Arbitrary bytes as a `.gguf` file that is opened: what opens is read whole, and a model is written as GGUF again and opens.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use compress::export::{FileType, Gguf};
use compress::store::gguf::GgufFile;
use compress::{Model, Pipeline};
use libfuzzer_sys::fuzz_target;

/// Elements of a weight at most that is gone through.
const MOST: usize = 1 << 16;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("compress-fuzz-gguf-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
});

fuzz_target!(|bytes: &[u8]| {
    let path = FOLDER.join("in.gguf");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(file) = GgufFile::open(&path) else { return };
    if file.tensors.values().any(|weight| weight.elements() > MOST) {
        return;
    }
    file.tensors.values().for_each(|weight| weight.visit(3, &mut |_| Ok(())).expect("what opens is read"));
    let Ok(model) = Model::open(&path) else { return };
    let out = FOLDER.join("out");
    let pipeline = Pipeline::builder().export(Gguf { file_type: FileType::F32 }).measure(false).force(true).threads(1).build().expect("a pipeline");
    if pipeline.run(model, &out).is_ok() {
        GgufFile::open(&out.join("model.gguf")).expect("what was written opens");
    }
});

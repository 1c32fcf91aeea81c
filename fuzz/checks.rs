//! Properties of arbitrary bytes as a model file: the file is rejected, or it opens, all its weights can
//! be read, and a file written from it opens.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use compress::Model;
use compress::export::{FileType, Format, Gguf};
use compress::internal::RunState;
use compress_core::files::Destination;
use compress_core::store::gguf::GgufFile;
use compress_core::work::{Cancel, Silent, Work};

/// Maximum number of elements of a weight that is read.
const MAX_ELEMENTS: usize = 1 << 16;

/// A scratch folder, in memory if possible.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("compress-{name}-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        Scratch(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns whether a PyTorch file opens. Checks that each weight has as many bytes as its shape requires.
pub fn pytorch(scratch: &Scratch, bytes: &[u8]) -> bool {
    let path = scratch.0.join("in.pt");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(model) = Model::open(&path) else { return false };
    for (name, weight) in model.weights.by_name.iter().filter(|(_, weight)| weight.elements() <= MAX_ELEMENTS) {
        let mut size = 0;
        let read = weight.visit(1, &mut |block| {
            size += block.now.values.len() as u64;
            Ok(())
        });
        assert!(read.is_err() || size == weight.value_bytes(), "{name}: {weight:?} has {size} bytes");
    }
    true
}

/// Result of checking a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufResult {
    Rejected,
    Opened,
    /// The file contains a model, which was written again.
    Written,
}

/// Opens a GGUF file, reads all its weights, and, with `write`, writes its model again.
pub fn gguf(scratch: &Scratch, bytes: &[u8], write: bool) -> GgufResult {
    let path = scratch.0.join("in.gguf");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(file) = GgufFile::open(&path) else { return GgufResult::Rejected };
    if file.tensors.values().any(|weight| weight.elements() > MAX_ELEMENTS) {
        return GgufResult::Opened;
    }
    file.tensors.values().for_each(|weight| weight.visit(3, &mut |_| Ok(())).expect("an opened file can be read"));
    let Ok(model) = Model::open(&path) else { return GgufResult::Opened };
    if !write {
        return GgufResult::Opened;
    }
    let out = scratch.0.join("model.gguf");
    let _ = std::fs::remove_file(&out);
    let (format, cancel) = (Gguf { file_type: FileType::F32, ..Gguf::default() }, Cancel::default());
    let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
    if format.write(&model, &RunState::default(), &Destination::local(&scratch.0), None, &work).is_err() {
        return GgufResult::Opened;
    }
    GgufFile::open(&out).expect("a written file opens");
    GgufResult::Written
}

//! What must hold of any bytes as a file of a model: they are refused, or what opens is read whole and is written so that it opens again.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use compress::Model;
use compress::export::{FileType, Format, Gguf};
use compress::files::Destination;
use compress::run_state::RunState;
use compress::store::gguf::GgufFile;
use compress::work::{Cancel, Silent, Work};

/// Elements of a weight at most that is gone through.
const MOST: usize = 1 << 16;

/// A folder of its own, in memory where that can be.
pub struct Place(PathBuf);

impl Place {
    pub fn new(name: &str) -> Place {
        let memory = Path::new("/dev/shm");
        let above = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = above.join(format!("compress-{name}-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        Place(folder)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a file of PyTorch opens; then each weight has the bytes of its shape.
pub fn pytorch(place: &Place, bytes: &[u8]) -> bool {
    let path = place.0.join("in.pt");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(model) = Model::open(&path) else { return false };
    for (name, weight) in model.weights.by_name.iter().filter(|(_, weight)| weight.elements() <= MOST) {
        let mut size = 0;
        let read = weight.visit(1, &mut |block| {
            size += block.now.values.len() as u64;
            Ok(())
        });
        assert!(read.is_err() || size == weight.value_bytes(), "{name}: {weight:?} has {size} bytes");
    }
    true
}

/// What became of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Became {
    Refused,
    Opened,
    /// It is a model, and was written again.
    Written,
}

/// Opens a GGUF file, reads it whole, and writes the model in it again where that is wanted.
pub fn gguf(place: &Place, bytes: &[u8], write: bool) -> Became {
    let path = place.0.join("in.gguf");
    std::fs::write(&path, bytes).expect("a file");
    let Ok(file) = GgufFile::open(&path) else { return Became::Refused };
    if file.tensors.values().any(|weight| weight.elements() > MOST) {
        return Became::Opened;
    }
    file.tensors.values().for_each(|weight| weight.visit(3, &mut |_| Ok(())).expect("what opens is read"));
    let Ok(model) = Model::open(&path) else { return Became::Opened };
    if !write {
        return Became::Opened;
    }
    let out = place.0.join("model.gguf");
    let _ = std::fs::remove_file(&out);
    let (format, cancel) = (Gguf { file_type: FileType::F32, ..Gguf::default() }, Cancel::default());
    let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
    if format.write(&model, &RunState::default(), &Destination::here(&place.0), None, &work).is_err() {
        return Became::Opened;
    }
    GgufFile::open(&out).expect("what was written opens");
    Became::Written
}

//! Arbitrary bytes as a file of PyTorch, an archive or of the format before: what opens is read whole, and each weight has the bytes of its
//! shape.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use compress::Model;
use libfuzzer_sys::fuzz_target;

/// Elements of a weight at most that is gone through.
const MOST: usize = 1 << 16;

static PLACE: LazyLock<PathBuf> = LazyLock::new(|| std::env::temp_dir().join(format!("compress-fuzz-{}.pt", std::process::id())));

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(&*PLACE, bytes).expect("the scratch file can be written");
    let Ok(model) = Model::open(&*PLACE) else { return };
    for (name, weight) in model.weights.by_name.iter().filter(|(_, weight)| weight.elements() <= MOST) {
        let mut size = 0;
        let read = weight.visit(1, &mut |block| {
            size += block.now.values.len() as u64;
            Ok(())
        });
        assert!(read.is_err() || size == weight.value_bytes(), "{name}: {weight:?} has {size} bytes");
    }
});

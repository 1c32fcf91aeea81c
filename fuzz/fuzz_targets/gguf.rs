//! Arbitrary bytes as a `.gguf` file.

#![no_main]

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use std::sync::LazyLock;

use checks::Scratch;
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| Scratch::new("fuzz-gguf"));

fuzz_target!(|bytes: &[u8]| drop(checks::gguf(&SCRATCH, bytes, true)));

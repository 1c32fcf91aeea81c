//! Arbitrary bytes as a `.gguf` file.

#![no_main]

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use std::sync::LazyLock;

use checks::Place;
use libfuzzer_sys::fuzz_target;

static PLACE: LazyLock<Place> = LazyLock::new(|| Place::new("fuzz-gguf"));

fuzz_target!(|bytes: &[u8]| drop(checks::gguf(&PLACE, bytes, true)));

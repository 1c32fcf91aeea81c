//! Arbitrary bytes as a file of PyTorch, an archive or of the format before.

#![no_main]

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use std::sync::LazyLock;

use checks::Place;
use libfuzzer_sys::fuzz_target;

static PLACE: LazyLock<Place> = LazyLock::new(|| Place::new("fuzz-pytorch"));

fuzz_target!(|bytes: &[u8]| drop(checks::pytorch(&PLACE, bytes)));

//! Arbitrary bytes as a PyTorch file, in the zip or the legacy format.

#![no_main]

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use std::sync::LazyLock;

use checks::Scratch;
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| Scratch::new("fuzz-pytorch"));

fuzz_target!(|bytes: &[u8]| drop(checks::pytorch(&SCRATCH, bytes)));

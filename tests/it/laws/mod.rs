//! Properties that hold for every checkpoint.
//!
//! Checked on random values with a fixed seed; `PROPTEST_RNG_SEED` and `PROPTEST_CASES` select other and
//! more cases.

#![allow(clippy::unwrap_used, clippy::panic)]

mod blocks;
mod cast;
mod files;
mod given;
mod integers;
mod order;
mod palettes;
mod prune;
mod quantize;
mod report;
mod store;

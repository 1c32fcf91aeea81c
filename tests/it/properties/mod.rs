//! Properties that hold for every model, data set and option, checked on random draws.
//!
//! Draws depend on fixed seeds. `COMPRESS_LAW_DRAWS=N` checks N draws per property instead of a few.
//! docs/internals/testing.md lists the properties and the tests of those that are not checked here.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod calibration;
pub mod draws;
mod families;
mod fidelity;
mod folders;
mod options;
mod outliers;
mod pruning;

//! Tests of the binary with valid and invalid arguments.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[cfg(all(feature = "run", target_os = "linux"))]
mod abuse;
mod bad_input;
#[cfg(feature = "run")]
mod cluster;
mod commands;
#[cfg(target_os = "linux")]
mod crash;
#[cfg(feature = "run")]
mod first_contact;
#[cfg(feature = "remote")]
mod hub_output;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod races;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "remote")]
mod servers;
pub(crate) mod support;

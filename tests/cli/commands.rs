//! Every command, as a new user would run it.

#[cfg(feature = "run")]
pub mod evaluation;
mod help;
mod passes;
mod reading;
mod recipes;
mod streams;

/// Everything that can stand after `compress`.
const COMMANDS: [&str; 14] = [
    "run",
    "chain",
    "plan",
    "eval",
    "inspect",
    "diff",
    "verify",
    "densify",
    "schema",
    "completions",
    "doctor",
    "prune-unstructured",
    "quantize-dynamic",
    "cast",
];

//! Every command, as a new user would run it.

#[cfg(feature = "run")]
pub mod evaluation;
#[cfg(feature = "run")]
mod generation;
mod help;
mod passes;
mod reading;
mod recipes;
mod reports;
mod streams;

/// All subcommands of `compress`.
const COMMANDS: [&str; 20] = [
    "init",
    "run",
    "chain",
    "plan",
    "eval",
    "generate",
    "inspect",
    "diff",
    "report",
    "check",
    "verify",
    "densify",
    "schema",
    "completions",
    "man",
    "doctor",
    "prune-unstructured",
    "quantize",
    "quantize-dynamic",
    "cast",
];

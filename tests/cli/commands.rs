//! Every command, as a new user would run it.

mod help;
mod passes;
mod reading;
mod recipes;
mod streams;

/// Everything that can stand after `compress`.
const COMMANDS: [&str; 13] =
    ["run", "chain", "plan", "inspect", "diff", "verify", "densify", "schema", "completions", "doctor", "prune-unstructured", "quantize-dynamic", "cast"];

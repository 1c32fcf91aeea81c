//! `compress chain`: several passes, each after a `--`.

use std::ffi::OsString;

use clap::{FromArgMatches, Subcommand};

use super::args::Global;
use super::pass;
use crate::error::{Error, Result};
use crate::pass::Step;

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "compress chain <MODEL> -o <DIR> [OPTIONS] -- PASS [ARGS] [-- PASS [ARGS]]...",
    after_help = "Example:\n  compress chain ./minilm -o out -- prune-unstructured --amount 0.5 -- quantize-dynamic --observer mse"
)]
pub(super) struct Args {
    #[command(flatten)]
    inner: pass::Args,
}

/// Splits the arguments of `chain` at each `--` into its own arguments and those of its passes. Arguments of
/// other commands are not split.
pub(super) fn split(args: Vec<OsString>) -> (Vec<OsString>, Vec<Vec<OsString>>) {
    if command(&args).is_none_or(|command| command != "chain") {
        return (args, Vec::new());
    }
    let mut parts = args.split(|arg| arg == "--").map(<[OsString]>::to_vec);
    (parts.next().unwrap_or_default(), parts.collect())
}

/// The name of the command, after any global flags.
fn command(args: &[OsString]) -> Option<&OsString> {
    let mut args = args.iter().skip(1);
    while let Some(arg) = args.next() {
        match arg.to_str() {
            Some("--threads" | "--log-format" | "--device" | "--memory" | "--size") => drop(args.next()),
            Some(flag) if flag.starts_with('-') => {}
            _ => return Some(arg),
        }
    }
    None
}

impl Args {
    pub(super) fn run(self, segments: Vec<Vec<OsString>>, global: &Global) -> Result<()> {
        if segments.is_empty() || segments.iter().any(Vec::is_empty) {
            return Err(Error::option("chain", "no pass: write a `--` before each pass, as in: compress chain MODEL -o DIR -- cast --to bf16"));
        }
        let passes = clap::Command::new("compress chain ... --").no_binary_name(true).subcommand_required(true);
        let command = super::accept_negative_numbers(Step::augment_subcommands(passes));
        let step = |segment: Vec<OsString>| {
            let matches = command.clone().try_get_matches_from(segment).unwrap_or_else(|e| super::usage::exit(e));
            Step::from_arg_matches(&matches).unwrap_or_else(|e| super::usage::exit(e))
        };
        self.inner.run(segments.into_iter().map(step).collect(), global)
    }
}

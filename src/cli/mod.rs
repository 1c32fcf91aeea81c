//! The command line: the only module that prints and exits.
//!
//! Data goes to stdout, progress and errors to stderr. Exit codes: 0 success, 1 failure, 2 invalid usage.

mod args;
mod chain;
mod check;
mod completions;
mod densify;
mod diff;
mod doctor;
mod inspect;
mod man;
mod merge;
mod output;
mod overview;
mod pass;
mod plan;
mod progress;
mod report;
mod run;
#[cfg(feature = "run")]
mod running;
#[cfg(not(feature = "run"))]
#[path = "weights_only.rs"]
mod running;
mod schema;
mod tips;
mod usage;
mod verify;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::error::Error;
use crate::pass::{PASSES, Step};
use args::Global;

const EXAMPLES: &str = "\
Examples:
  compress inspect ./minilm
  compress init ./minilm -o recipe.yaml
  compress quantize-dynamic ./minilm -o out/minilm-int8
  compress chain ./minilm -o out/small -- prune-unstructured --amount 0.5 -- quantize-dynamic
  compress plan recipe.yaml
  compress run recipe.yaml -o out/small
  compress diff ./minilm out/small
  compress check out/small --max-bytes 25MB
  compress report out/small out/minilm-int8
  compress eval out/small --data sentences.txt --against ./minilm

Every pass is also a command; `compress PASS --help` explains it.";

/// Prune, quantize and pack neural network checkpoints: streaming, verified, with a report
#[derive(Debug, Parser)]
#[command(name = "compress", version, after_help = EXAMPLES, subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the passes of a recipe and write the output folder
    Run(run::Args),
    /// Run several passes in order: MODEL -o DIR -- PASS [ARGS] [-- PASS [ARGS]]...
    Chain(Box<chain::Args>),
    /// Show what a recipe would do: matched weights, memory, predicted size
    Plan(plan::Args),
    /// Merge the parts of a run: verify them, and write the output folder and the report
    Merge(merge::Args),
    #[cfg(feature = "run")]
    #[command(flatten)]
    Running(running::Command),
    /// Show the tensors of a model
    Inspect(inspect::Args),
    /// Compare two models weight by weight
    Diff(diff::Args),
    /// Show a report, render it as an HTML page, or compare several runs
    Report(report::Args),
    /// Check a report against budgets, such as bytes, accuracy drop and speed-up; fails if one is exceeded
    Check(check::Args),
    /// Verify an output folder against its report: reopen every file, recompute its hash, run an ONNX file,
    /// check the signature
    Verify(verify::Args),
    /// Convert a model back to plain dense safetensors
    Densify(densify::Args),
    /// Print the JSON Schema of recipes or reports
    Schema(schema::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
    /// Print the manual page, or write the pages of all commands
    Man(man::Args),
    /// Show the hardware and the runtimes of this machine, and install ONNX Runtime
    Doctor(doctor::Args),
}

type Failure = Error;

/// Parses the arguments, runs the command, and prints errors. Returns the exit code.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    if args.len() <= 1 {
        overview::print();
        return ExitCode::from(2);
    }
    let (head, segments) = chain::split(args);
    usage::check_output_option(&head);
    let matches = command().try_get_matches_from(head).unwrap_or_else(|e| usage::exit(e));
    let global = Global::from_arg_matches(&matches).unwrap_or_default();
    global.threads.into_iter().for_each(running::set_threads);
    let requested = crate::kernel::simd::requested().map_err(|reason| Error::option(crate::kernel::simd::VARIABLE, reason));
    match requested.and_then(|_| dispatch(&matches, segments, &global)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error, &global);
            ExitCode::from(if error.is_misuse() { 2 } else { 1 })
        }
    }
}

/// The command line: the commands above, and one for every pass.
fn command() -> clap::Command {
    let own = Cli::command();
    let about = own.get_about().cloned().unwrap_or_default();
    // `augment_subcommands` would replace the description of the program.
    let mut command = Step::augment_subcommands(own).about(about);
    for name in PASSES {
        command = command.mut_subcommand(name, |sub| {
            <pass::Args as clap::Args>::augment_args(sub)
                .after_help("The output folder contains the weights, all other files of the model, recipe.yaml, and a report.")
        });
    }
    let template = overview::template(&command);
    accept_negative_numbers(command.help_template(template))
}

/// Accepts negative numbers as values of options, so that the checks of their ranges refuse them.
fn accept_negative_numbers(command: clap::Command) -> clap::Command {
    let is_option = |arg: &clap::Arg| arg.get_long().is_some() && arg.get_action().takes_values();
    let accept = move |arg: clap::Arg| if is_option(&arg) { arg.allow_negative_numbers(true) } else { arg };
    command.mut_args(accept).mut_subcommands(move |sub| sub.mut_args(accept))
}

fn dispatch(matches: &ArgMatches, segments: Vec<Vec<OsString>>, global: &Global) -> Result<(), Failure> {
    if let Some((name, sub)) = matches.subcommand()
        && PASSES.contains(&name)
    {
        let step = Step::from_arg_matches(matches).unwrap_or_else(|e| usage::exit(e));
        let args = pass::Args::from_arg_matches(sub).unwrap_or_else(|e| usage::exit(e));
        return args.run(vec![step], global);
    }
    match Cli::from_arg_matches(matches).unwrap_or_else(|e| usage::exit(e)).command {
        Command::Run(args) => args.run(global),
        Command::Chain(args) => args.run(segments, global),
        Command::Plan(args) => args.run(global),
        Command::Merge(args) => args.run(global),
        #[cfg(feature = "run")]
        Command::Running(command) => command.run(global),
        Command::Inspect(args) => args.run(global),
        Command::Diff(args) => args.run(global),
        Command::Report(args) => args.run(global),
        Command::Check(args) => args.run(global),
        Command::Verify(args) => args.run(global),
        Command::Densify(args) => args.run(global),
        Command::Schema(args) => args.run(),
        Command::Completions(_) | Command::Man(_) if global.json => Err(Error::option("--json", "this command prints text, not data")),
        Command::Completions(args) => args.run(),
        Command::Man(args) => args.run(),
        Command::Doctor(args) => args.run(global),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        super::command().debug_assert();
    }
}

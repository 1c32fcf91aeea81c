//! `compress check`

use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::{Global, Runtimes};
use super::output;
use crate::contract::{self, Checked, Target};
use crate::error::{Error, Result, counted, redact};
use crate::files;
use crate::report::terminal::table;
use crate::report::{Budgets, Finding, Report};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress check out/int8 --max-bytes 25MB --max-drop 0.01
  compress check out/static/report.json --min-cosine 0.99 --min-speedup 1.5 --json
  compress check out/w4a16 --loads vllm,transformers
  compress check out/model.gguf --loads llama.cpp

Exit code 0: all budgets are met, and the output complies with the rules of the runtimes (a static check). 1: a budget
is exceeded (the error lists the measured and the allowed values), a rule of a runtime is violated (each line lists the
rule, the tensor or key, and the next step), or the output cannot be read for a runtime. 2: the report lacks a
measurement; the error names the settings to add to the recipe.")]
pub(super) struct Args {
    /// Output folder, or its report.json
    report: PathBuf,
    #[command(flatten)]
    budgets: Budgets,
    #[command(flatten, next_help_heading = "Runtimes")]
    runtimes: Runtimes,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let folder = crate::output::reported_output(&self.report);
        if !self.runtimes.loads.is_empty() {
            files::kind(&folder).map_err(Error::io("open", &folder))?;
        }
        // Only budgets need a report.
        let has_budgets = self.runtimes.loads.is_empty() || self.budgets != Budgets::default();
        let budgets = if has_budgets { self.budgets.check(&Report::open(&self.report)?)? } else { Vec::new() };
        let loads: Vec<Load> = self.runtimes.loads.iter().map(|target| (*target, contract::check(&folder, *target))).collect();
        let broken: Vec<&Finding> = budgets.iter().filter(|finding| !finding.ok).collect();
        let problems: Vec<String> = loads.iter().filter_map(problem).collect();
        if global.json {
            let mut result = json!({ "ok": broken.is_empty() && problems.is_empty() });
            if has_budgets {
                result["budgets"] = json!(budgets);
            }
            if !loads.is_empty() {
                result["loads"] = loads.iter().map(value).collect();
            }
            output::json(&result)?;
        } else {
            if has_budgets {
                let rows = budgets.iter().map(|finding| {
                    let [measured, allowed] = finding.formatted();
                    vec![finding.budget.to_owned(), measured, allowed, if finding.ok { "ok" } else { "failed" }.into()]
                });
                output::print(&format!("{}\n", table(&["budget", "measured", "allowed", ""], rows)))?;
            }
            output::print(&loads.iter().flat_map(lines).collect::<String>())?;
        }
        if broken.is_empty() {
            // The error of the only target has its own hint and exit code.
            let only = if problems.len() == 1 { loads.into_iter().find_map(|(_, outcome)| outcome.err()) } else { None };
            return match only {
                Some(error) => Err(error),
                None if problems.is_empty() => Ok(()),
                None => Err(Error::run(folder.display(), problems.join("; "), "each line of the output lists the next step")),
            };
        }
        let reasons = broken.iter().map(|finding| {
            let [measured, allowed] = finding.formatted();
            format!("--{} {allowed}: measured {measured}", finding.budget)
        });
        let reason = reasons.chain(problems).collect::<Vec<_>>().join("; ");
        Err(Error::Budget { path: self.report, reason })
    }
}

/// A runtime with its result, or why the output cannot be checked.
type Load = (Target, Result<Checked>);

/// Why the output does not comply with the rules of a runtime, for the error message.
fn problem((target, outcome): &Load) -> Option<String> {
    match outcome {
        Ok(checked) if checked.is_met() => None,
        Ok(checked) => Some(format!("{} of the rules of {target}", counted(checked.violations.len(), "violation"))),
        Err(error) => Some(format!("not checked for {target}: {error}")),
    }
}

/// The result of a runtime for `--json`.
fn value((target, outcome): &Load) -> Value {
    match outcome {
        Ok(checked) => json!(checked),
        Err(error) => {
            json!({ "runtime": target.runtime().name(), "version": target.version(), "error": redact(&error.to_string()), "hint": error.hint() })
        }
    }
}

/// The result of a runtime: one line, or a line for each violation.
fn lines((target, outcome): &Load) -> Vec<String> {
    match outcome {
        Ok(checked) if checked.is_met() => {
            let count = counted(checked.rules.len(), "rule");
            vec![format!("{target}: the output complies with {count} (a static check: the runtime was not run)\n")]
        }
        Ok(checked) => checked.violations.iter().map(|violation| format!("{target}: {violation}\n")).collect(),
        Err(error) => {
            let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
            vec![format!("{target}: not checked: {}{hint}\n", redact(&error.to_string()))]
        }
    }
}

//! `compress check`

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::args::{Global, Runtimes};
use super::output;
use super::running::{Attempt, Trials};
use crate::contract::{Checked, Target, WrittenOutput};
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
  compress check out/w4a16 --loads transformers --try --python venv/bin/python

Exit code 0: all budgets are met, and the output complies with the rules of the runtimes (a static check; `--try` also
runs the installed ones). 1: a budget is exceeded (the error lists the measured and the allowed values), a rule of
a runtime is violated (each line lists the rule, the tensor or key, and the next step), the output cannot be read for a
runtime, or a runtime does not run it or computes something else than the built-in executor. 2: the report lacks a
measurement; the error names the settings to add to the recipe.")]
pub(super) struct Args {
    /// Output folder, or its report.json
    report: PathBuf,
    #[command(flatten)]
    budgets: Budgets,
    #[command(flatten, next_help_heading = "Runtimes")]
    runtimes: Runtimes,
    #[command(flatten, next_help_heading = "Runtimes")]
    trials: Trials,
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
        let mut written = WrittenOutput::new(&folder);
        let outcomes = self.runtimes.loads.iter().map(|target| (*target, written.check(*target)));
        let loads = outcomes.map(|(target, outcome)| self.load(&folder, target, outcome, global)).collect::<Result<Vec<Load>>>()?;
        let broken: Vec<&Finding> = budgets.iter().filter(|finding| !finding.ok).collect();
        let problems: Vec<String> = loads.iter().filter_map(Load::problem).collect();
        if global.json {
            let mut result = json!({ "ok": broken.is_empty() && problems.is_empty() });
            if has_budgets {
                result["budgets"] = json!(budgets);
            }
            if !loads.is_empty() {
                result["loads"] = loads.iter().map(Load::value).collect();
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
            output::print(&loads.iter().flat_map(Load::lines).collect::<String>())?;
        }
        if broken.is_empty() {
            // The error of the only target has its own hint and exit code.
            let only = if problems.len() == 1 { loads.into_iter().find_map(|load| load.outcome.err()) } else { None };
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
        let mut advice: Vec<&str> = broken.iter().map(|finding| finding.advice()).collect();
        advice.dedup();
        Err(Error::Budget { path: self.report, reason, hint: advice.join("; ") })
    }
}

/// The result of a runtime.
struct Load {
    target: Target,
    /// Result of the static check, or why the output cannot be checked.
    outcome: Result<Checked>,
    /// Result of running the output, if that was requested and the static check has found no violation.
    attempt: Option<Attempt>,
}

impl Args {
    fn load(&self, output: &Path, target: Target, outcome: Result<Checked>, global: &Global) -> Result<Load> {
        let is_met = outcome.as_ref().is_ok_and(Checked::is_met);
        let attempt = if is_met { self.trials.attempt(output, target, global)? } else { None };
        Ok(Load { target, outcome, attempt })
    }
}

impl Load {
    /// Why the runtime does not load the output, for the error message.
    fn problem(&self) -> Option<String> {
        match (&self.outcome, &self.attempt) {
            (Ok(checked), attempt) if checked.is_met() => {
                attempt.as_ref().filter(|attempt| !attempt.is_ok).map(|attempt| format!("{}: {}", self.target, attempt.text))
            }
            (Ok(checked), _) => Some(format!("{} of the rules of {}", counted(checked.violations.len(), "violation"), self.target)),
            (Err(error), _) => Some(format!("not checked for {}: {error}", self.target)),
        }
    }

    /// The result for `--json`.
    fn value(&self) -> Value {
        let mut value = match &self.outcome {
            Ok(checked) => json!(checked),
            Err(error) => {
                let (runtime, version) = (self.target.runtime().name(), self.target.version());
                json!({ "runtime": runtime, "version": version, "error": redact(&error.to_string()), "hint": error.hint() })
            }
        };
        if let Some(attempt) = &self.attempt {
            value["trial"] = attempt.value.clone();
        }
        value
    }

    /// The result: one line, or a line for each violation.
    fn lines(&self) -> Vec<String> {
        let target = self.target;
        match &self.outcome {
            Ok(checked) if checked.is_met() => {
                let count = counted(checked.rules.len(), "rule");
                let run = self.attempt.as_ref().map_or("a static check: the runtime was not run", |attempt| attempt.text.as_str());
                vec![format!("{target}: the output complies with {count} ({run})\n")]
            }
            Ok(checked) => checked.violations.iter().map(|violation| format!("{target}: {violation}\n")).collect(),
            Err(error) => {
                let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
                vec![format!("{target}: not checked: {}{hint}\n", redact(&error.to_string()))]
            }
        }
    }
}

//! `compress check`

use std::path::PathBuf;

use serde_json::json;

use super::args::Global;
use super::output;
use crate::contract::{self, Checked, Target};
use crate::error::{Error, Result, counted};
use crate::report::terminal::table;
use crate::report::{Budgets, Finding, Report};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress check out/int8 --max-bytes 25MB --max-drop 0.01
  compress check out/static/report.json --min-cosine 0.99 --min-speedup 1.5 --json
  compress check out/w4a16 --loads vllm,transformers
  compress check out/model.gguf --loads llama.cpp

Exit code 0: all budgets are met, and the runtimes load the output. 1: a budget is exceeded; the error lists the
measured and the allowed values. Or a rule of a runtime is violated; each line lists the rule, the tensor or key, and
the next step. 2: the report lacks a measurement; the error names the settings to add to the recipe.")]
pub(super) struct Args {
    /// Output folder, or its report.json
    report: PathBuf,
    #[command(flatten)]
    budgets: Budgets,
    /// Runtimes that must load the output: vllm, sglang, transformers, llama.cpp or onnxruntime; vllm@0.33 is
    /// a version
    #[arg(long, value_name = "RUNTIME[@VERSION]", value_delimiter = ',', help_heading = "Runtimes")]
    loads: Vec<Target>,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        // Only budgets need a report.
        let has_budgets = self.loads.is_empty() || self.budgets != Budgets::default();
        let budgets = if has_budgets { self.budgets.check(&Report::open(&self.report)?)? } else { Vec::new() };
        let folder = crate::output::reported_output(&self.report);
        let loads = self.loads.iter().map(|target| contract::check(&folder, *target)).collect::<Result<Vec<Checked>>>()?;
        let broken: Vec<&Finding> = budgets.iter().filter(|finding| !finding.ok).collect();
        let refused: Vec<&Checked> = loads.iter().filter(|checked| !checked.holds()).collect();
        if global.json {
            let mut result = json!({ "ok": broken.is_empty() && refused.is_empty() });
            if has_budgets {
                result["budgets"] = json!(budgets);
            }
            if !loads.is_empty() {
                result["loads"] = json!(loads);
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
        let violations = refused.iter().map(|checked| {
            let count = counted(checked.violations.len(), "violation");
            format!("{count} of the rules of {} {}", checked.runtime, checked.version)
        });
        if broken.is_empty() {
            let reason = violations.collect::<Vec<_>>().join("; ");
            return if reason.is_empty() { Ok(()) } else { Err(Error::run(folder.display(), reason, "each line of the output lists the next step")) };
        }
        let reasons = broken.iter().map(|finding| {
            let [measured, allowed] = finding.formatted();
            format!("--{} {allowed}: measured {measured}", finding.budget)
        });
        let reason = reasons.chain(violations).collect::<Vec<_>>().join("; ");
        Err(Error::Budget { path: self.report, reason })
    }
}

/// The result of a runtime: one line, or a line for each violation.
fn lines(checked: &Checked) -> Vec<String> {
    let (runtime, version) = (checked.runtime, checked.version);
    if checked.holds() {
        let count = counted(checked.rules.len(), "rule");
        return vec![format!("{runtime} {version}: the output complies with {count} (a static check: the runtime was not run)\n")];
    }
    checked.violations.iter().map(|violation| format!("{runtime} {version}: {violation}\n")).collect()
}

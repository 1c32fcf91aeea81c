//! `compress check`

use std::path::PathBuf;

use serde_json::json;

use super::args::Global;
use super::output;
use crate::error::{Error, Result};
use crate::report::terminal::table;
use crate::report::{Budgets, Report};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  compress check out/int8 --max-bytes 25MB --max-drop 0.01
  compress check out/static/report.json --min-cosine 0.99 --min-speedup 1.5 --json

Exit code 0: all budgets are met. 1: a budget is exceeded; the error lists the measured and the allowed values.
2: the report lacks a measurement; the error names the settings to add to the recipe.")]
pub(super) struct Args {
    /// Output folder, or its report.json
    report: PathBuf,
    #[command(flatten)]
    budgets: Budgets,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let found = self.budgets.check(&Report::open(&self.report)?)?;
        let broken: Vec<_> = found.iter().filter(|finding| !finding.ok).collect();
        if global.json {
            output::json(&json!({ "ok": broken.is_empty(), "budgets": found }))?;
        } else {
            let rows = found.iter().map(|finding| {
                let [measured, allowed] = finding.formatted();
                vec![finding.budget.to_owned(), measured, allowed, if finding.ok { "ok" } else { "failed" }.into()]
            });
            output::print(&format!("{}\n", table(&["budget", "measured", "allowed", ""], rows)))?;
        }
        if broken.is_empty() {
            return Ok(());
        }
        let reasons: Vec<String> = broken
            .iter()
            .map(|finding| {
                let [measured, allowed] = finding.formatted();
                format!("--{} {allowed}: measured {measured}", finding.budget)
            })
            .collect();
        Err(Error::Budget { path: self.report, reason: reasons.join("; ") })
    }
}

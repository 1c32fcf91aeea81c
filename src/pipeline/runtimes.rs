//! Rules of the runtimes that must load the output: checked on the plan, and again on the written files.

use std::collections::BTreeSet;
use std::path::Path;

use super::Pipeline;
use crate::contract::{Checked, Planned, Target, Violation, WrittenOutput};
use crate::error::{Error, Result};
use crate::export::Export;
use crate::model::Model;
use crate::output::require_local;
use crate::report::RuntimeCheck;
use crate::run_state::RunState;

/// Reason for which the output must be local.
const NEEDS_LOCAL: &str = "the rules of `loads` are checked on the written files before the output appears";
/// Maximum number of violations of a runtime in an error message.
const LISTED: usize = 3;

/// Formats of outputs without configured formats; the model decides which.
const DEFAULT_FORMATS: [&str; 2] = ["safetensors", "onnx"];

impl Pipeline {
    /// Checks what the configured formats decide without the model: whether they include those of the
    /// runtimes in `loads`, and whether an output file has the only format.
    ///
    /// # Errors
    /// A run would refuse them.
    #[doc(hidden)]
    pub fn check_formats(&self, output: Option<&Path>) -> Result<()> {
        let of_output = output.map(|output| self.for_output(output)).transpose()?;
        let exports = of_output.as_ref().map_or(&self.export, |(pipeline, _)| &pipeline.export);
        let formats: Vec<&str> = exports.iter().map(|export| export.format().name()).collect();
        let formats = if formats.is_empty() { DEFAULT_FORMATS.to_vec() } else { formats };
        let unloadable = self.loads.iter().filter(|target| !formats.contains(&target.runtime().format()));
        require_met(unloadable.map(|target| Checked::without_format(*target)).collect()).map(drop)
    }

    /// Checks the rules that the plan decides, and returns them. `after` and `run` are the model and the
    /// state after the passes.
    ///
    /// # Errors
    /// The output would violate a rule, or it is on another machine.
    pub(super) fn check_planned(&self, after: &Model, run: &RunState, output: Option<&Path>) -> Result<Vec<Checked>> {
        if self.loads.is_empty() {
            return Ok(Vec::new());
        }
        output.map_or(Ok(()), |output| require_local(output, NEEDS_LOCAL))?;
        let formats = self.export.iter().map(Export::format);
        let planned = formats.map(|format| Ok((format.name(), format.planned(after, run)?))).collect::<Result<Vec<(&str, Option<Planned>)>>>()?;
        let check = |target: &Target| match planned.iter().find(|(format, _)| *format == target.runtime().format()) {
            None => Ok(Checked::without_format(*target)),
            Some((_, None)) => Ok(Checked::new(*target)),
            Some((_, Some(files))) => files.check(*target, run.is_estimated()),
        };
        require_met(self.loads.iter().map(check).collect::<Result<_>>()?)
    }

    /// Checks all rules on the files in the staging folder.
    ///
    /// # Errors
    /// The output violates a rule.
    pub(super) fn check_written(&self, run: &RunState, folder: &Path) -> Result<Vec<RuntimeCheck>> {
        let path = run.file.as_ref().map_or_else(|| folder.to_owned(), |name| folder.join(name));
        let mut output = WrittenOutput::new(&path);
        let checked = require_met(self.loads.iter().map(|target| output.check(*target)).collect::<Result<_>>()?)?;
        let record = |checked: &Checked| RuntimeCheck { runtime: checked.runtime.to_owned(), version: checked.version.to_owned(), rules: checked.rules.len() };
        Ok(checked.iter().map(record).collect())
    }
}

/// Returns the results if no rule is violated. Otherwise the error lists the violations of all runtimes.
fn require_met(checked: Vec<Checked>) -> Result<Vec<Checked>> {
    let broken: Vec<&Checked> = checked.iter().filter(|checked| !checked.is_met()).collect();
    if broken.is_empty() {
        return Ok(checked);
    }
    let listed = || broken.iter().flat_map(|checked| checked.violations.iter().take(LISTED));
    let mut hints = BTreeSet::new();
    let hints: Vec<&str> = listed().map(Violation::hint_for_run).filter(|hint| hints.insert(*hint)).collect();
    let reasons: Vec<String> = broken.iter().map(|checked| describe(checked)).collect();
    Err(Error::run("loads", reasons.join("; "), hints.join("; ")))
}

/// The violations of a runtime in an error message.
fn describe(checked: &Checked) -> String {
    let text = |violation: &Violation| format!("{}: `{}` {}", violation.rule, violation.subject, violation.reason);
    let listed: Vec<String> = checked.violations.iter().take(LISTED).map(text).collect();
    let unlisted = checked.violations.len().saturating_sub(LISTED);
    let more = if unlisted > 0 { format!(" (and {unlisted} more)") } else { String::new() };
    format!("the output violates rules of {} {}: {}{more}", checked.runtime, checked.version, listed.join("; "))
}

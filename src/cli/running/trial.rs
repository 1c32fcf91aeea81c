//! Command-line arguments for trials of outputs in runtimes, for `compress check`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::args::Global;
use crate::contract::Target;
use crate::error::{Error, Result, redact};
use crate::pipeline::trial::{self, Options, Scope, Status, Trial};

// As for `Samples`.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Trials {
    /// Also load and run the output in the runtimes that are installed, and compare the results with the
    /// built-in executor: all of an output up to 500 MB, otherwise a twin of its first layers. `--try=full`
    /// and `--try=twin` choose one of them
    #[arg(
        long = "try",
        value_name = "PART",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "auto",
        value_parser = parse_scope,
        requires = "loads"
    )]
    scope: Option<Scope>,
    /// Python interpreter with transformers or vLLM for `--try` [default: python3]
    #[arg(long, value_name = "PATH", requires = "scope")]
    python: Option<PathBuf>,
}

fn parse_scope(text: &str) -> std::result::Result<Scope, String> {
    match text {
        "auto" => Ok(Scope::Auto),
        "full" => Ok(Scope::Full),
        "twin" => Ok(Scope::Twin),
        _ => Err("use one of auto, full, twin".to_owned()),
    }
}

/// A trial of an output in a runtime.
pub(in crate::cli) struct Attempt {
    pub is_ok: bool,
    /// The result, as a part of a sentence.
    pub text: String,
    /// The result for `--json`.
    pub value: Value,
}

impl Trials {
    /// Runs an output in a runtime; `None` if this was not requested. The result of a trial that cannot be
    /// started is the error.
    pub fn attempt(&self, output: &Path, target: Target, global: &Global) -> Result<Option<Attempt>> {
        let Some(scope) = self.scope else { return Ok(None) };
        let options = Options { scope, python: self.python.clone() };
        match global.work(|work| trial::run(output, target, &options, work)) {
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Ok(trial) => Ok(Some(Attempt { is_ok: trial.is_ok(), text: text(target, &trial), value: json!(trial) })),
            Err(error) => {
                let reason = redact(&error.to_string());
                let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
                let value = json!({ "status": "error", "finding": reason, "hint": error.hint() });
                Ok(Some(Attempt { is_ok: false, text: format!("not run: {reason}{hint}"), value }))
            }
        }
    }
}

/// The result as a part of a sentence.
fn text(target: Target, trial: &Trial) -> String {
    let version = trial.version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    let runtime = format!("{}{version}", target.runtime().name());
    let (scope, finding) = (trial.scope.as_deref().unwrap_or("the output"), &trial.finding);
    match trial.status {
        Status::Agrees => format!("{runtime} loads {scope} and computes the same as the built-in executor: {finding}"),
        Status::Differs => {
            format!(
                "{runtime} loads {scope}, but computes something else than the built-in executor: {finding}; check `quantization_config` and the stored scales"
            )
        }
        Status::Runs => format!("{runtime} loads and runs {scope}; {finding}"),
        Status::Failed => format!("{runtime} does not run {scope}: {finding}"),
        Status::NotInstalled => format!("a static check only, because {runtime} is not installed: {finding}"),
        Status::NotRun => format!("a static check only: {finding}"),
    }
}

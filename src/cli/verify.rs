//! `compress verify`

use std::path::PathBuf;

use super::args::Global;
use super::output;
use crate::error::{Error, Result};
use crate::pipeline::verify;
use crate::report::terminal::table;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// An output folder or file, or its report.json
    #[arg(value_name = "OUTPUT")]
    folder: PathBuf,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let checks = global.work(|work| verify(&self.folder, work))?;
        if global.json {
            output::json(&checks)?;
        } else {
            let rows = checks.iter().map(|c| vec![c.path.clone(), if c.ok { "ok" } else { "FAILED" }.into(), c.finding.clone()]);
            output::print(&format!("{}\n", table(&["file", "", "finding"], rows)))?;
        }
        match checks.iter().find(|c| !c.ok) {
            None => Ok(()),
            Some(check) => {
                let output = crate::output::reported_output(&self.folder);
                let path = if crate::files::is_dir(&output) { output.join(&check.path) } else { output.with_file_name(&check.path) };
                Err(Error::Verification { path, reason: check.finding.clone() })
            }
        }
    }
}

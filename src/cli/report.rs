//! `compress report`

use std::path::PathBuf;

use super::args::{Global, TextFile};
use super::output;
use crate::error::Result;
use crate::report::{Comparison, Report};

#[derive(Debug, clap::Args)]
#[command(mut_arg("output", |arg| arg.help("Write a page")), after_help = "Examples:
  compress report out/int8                                 what came of a run, on the terminal
  compress report out/int8 -o report.html                  the page again, of a report of any age
  compress report out/int8 out/static out/pruned           runs side by side: size, answers, time, what tells the recipes apart
  compress report out/*/report.json -o comparison.html     the same as a page, with a plot of size against answers

A page is one file: it opens from disk, loads nothing, and can be mailed.")]
pub(super) struct Args {
    /// Output folders, or their report.json; several are compared
    #[arg(required = true, value_name = "REPORT")]
    reports: Vec<PathBuf>,
    #[command(flatten)]
    file: TextFile,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let mut reports = Vec::with_capacity(self.reports.len());
        for path in &self.reports {
            let folder = path.file_name().filter(|name| *name == crate::report::FILE).and(path.parent()).filter(|folder| *folder != "");
            reports.push((folder.unwrap_or(path).to_string_lossy().into_owned(), Report::open(path)?));
        }
        if let [(_, report)] = reports.as_slice() {
            self.file.write(|| Ok(report.to_html()))?;
            return if global.json { output::json(report) } else { self.say(&report.to_terminal()) };
        }
        let comparison = Comparison::of(&reports);
        self.file.write(|| Ok(comparison.to_html()))?;
        if global.json { output::json(&comparison) } else { self.say(&comparison.to_terminal()) }
    }

    fn say(&self, text: &str) -> Result<()> {
        match &self.file.output {
            Some(path) => output::print(&format!("{text}\n written: {}\n", path.display())),
            None => output::print(text),
        }
    }
}

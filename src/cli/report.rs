//! `compress report`

use std::path::PathBuf;

use super::args::{Global, TextFile};
use super::output;
use crate::error::Result;
use crate::report::{Comparison, Report};

#[derive(Debug, clap::Args)]
#[command(mut_arg("output", |arg| arg.help("Write an HTML page")), after_help = "Examples:
  compress report out/int8                                 the report of a run, on the terminal
  compress report out/int8 -o report.html                  the HTML page, from a report of any version
  compress report out/int8 out/static out/pruned           a comparison of runs: size, quality, time, differences of the recipes
  compress report out/*/report.json -o comparison.html     the comparison as an HTML page, with a plot of size against quality

A page is a single file without external resources.")]
pub(super) struct Args {
    /// Output folders, or their report.json; several reports are compared
    #[arg(required = true, value_name = "REPORT")]
    reports: Vec<PathBuf>,
    #[command(flatten)]
    file: TextFile,
}

/// Extensions of pages.
const PAGE: [&str; 2] = ["html", "htm"];

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let mut reports = Vec::with_capacity(self.reports.len());
        for path in &self.reports {
            let folder = path.file_name().filter(|name| *name == crate::report::FILE).and(path.parent()).filter(|folder| *folder != "");
            reports.push((folder.unwrap_or(path).to_string_lossy().into_owned(), Report::open(path)?));
        }
        if let [(_, report)] = reports.as_slice() {
            self.file.write(&PAGE, || Ok(report.to_html()))?;
            return if global.json { output::json(report) } else { self.show(&report.to_terminal()) };
        }
        let comparison = Comparison::new(&reports);
        self.file.write(&PAGE, || Ok(comparison.to_html()))?;
        if global.json { output::json(&comparison) } else { self.show(&comparison.to_terminal()) }
    }

    fn show(&self, text: &str) -> Result<()> {
        match &self.file.output {
            Some(path) => output::print(&format!("{text}\n written: {}\n", path.display())),
            None => output::print(text),
        }
    }
}

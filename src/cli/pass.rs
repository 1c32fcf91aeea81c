//! `compress PASS`: one pass over a model.

use std::path::PathBuf;

use super::args::{Global, Writing};
use super::output;
use crate::error::Result;
use crate::model::Model;
use crate::pass::Step;

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// Model folder or .safetensors file
    model: PathBuf,
    /// Output folder
    #[arg(long, short, value_name = "DIR", help_heading = "Output")]
    output: PathBuf,
    #[command(flatten, next_help_heading = "Output")]
    writing: Writing,
    /// Measure before and after on this data, a file or `{text: pairs.tsv, pair_column: b, ...}` as in a recipe
    #[cfg(feature = "run")]
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    eval: Option<crate::data::Data>,
    /// Samples for passes that need to see activations, as for `--eval`; labels are not looked at
    #[cfg(feature = "run")]
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    calibration: Option<crate::data::Data>,
    /// Samples for passes that train, as for `--eval`
    #[cfg(feature = "run")]
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    train: Option<crate::data::Data>,
    /// Go on with a training that was interrupted
    #[cfg(feature = "run")]
    #[arg(long, help_heading = "Output")]
    resume: bool,
}

#[cfg(feature = "run")]
fn parse_data(text: &str) -> Result<crate::data::Data, String> {
    if !text.trim_start().starts_with('{') {
        return Ok(crate::data::Data::at(std::path::Path::new(text)));
    }
    serde_saphyr::from_str(text).map_err(|e| crate::recipe::message::explain(&e, text))
}

impl Args {
    pub(super) fn run(self, steps: Vec<Step>, global: &Global) -> Result<()> {
        let mut builder =
            global.builder().passes(steps).force(self.writing.force).allow_nonfinite(self.writing.allow_nonfinite).measure(!self.writing.no_measure);
        for export in self.writing.exports() {
            builder = builder.export(export);
        }
        #[cfg(feature = "run")]
        if let Some(data) = self.eval {
            builder = builder.evaluation(data);
        }
        #[cfg(feature = "run")]
        if let Some(data) = self.calibration {
            builder = builder.calibration(data);
        }
        #[cfg(feature = "run")]
        if let Some(data) = self.train {
            builder = builder.train(data);
        }
        #[cfg(feature = "run")]
        {
            builder = builder.resume(self.resume);
        }
        let pipeline = builder.build()?;
        let report = pipeline.run(Model::open(&self.model)?, &self.output)?;
        output::report(&report, &self.output, global)
    }
}

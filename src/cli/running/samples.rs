//! Command-line arguments for data sets.

use crate::data::Data;
use crate::pipeline::Builder;

// No doc comment: clap would use it as the description of the command that flattens this group.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Samples {
    /// Evaluation data on which the model is measured before and after: a file, or
    /// `{text: pairs.tsv, pair_column: b, ...}` as in a recipe
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    eval: Option<Data>,
    /// Calibration data, in the format of `--eval`; labels are ignored
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    calibration: Option<Data>,
    /// Training data, in the format of `--eval`
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    train: Option<Data>,
    /// Continue an interrupted training
    #[arg(long, help_heading = "Output")]
    resume: bool,
}

/// Parses the value of a data option: a path, or a mapping as in a recipe.
pub(super) fn parse_data(text: &str) -> Result<Data, String> {
    if !text.trim_start().starts_with('{') {
        return Data::recognized(text);
    }
    serde_saphyr::from_str(text).map_err(|e| crate::recipe::message::explain(&e, text, text))
}

impl Samples {
    /// Applies the arguments to a pipeline.
    pub fn configure(self, mut builder: Builder) -> Builder {
        for (data, set) in
            [(self.eval, Builder::evaluation as fn(Builder, Data) -> Builder), (self.calibration, Builder::calibration), (self.train, Builder::train)]
        {
            if let Some(data) = data {
                builder = set(builder, data);
            }
        }
        builder.resume(self.resume)
    }
}

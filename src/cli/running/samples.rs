//! Data sets for a pass on the command line.

use crate::data::Data;
use crate::pipeline::Builder;

// No doc comment: clap would take it for the description of the command that flattens it.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(in crate::cli) struct Samples {
    /// Measure before and after on this data, a file or `{text: pairs.tsv, pair_column: b, ...}` as in a recipe
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    eval: Option<Data>,
    /// Samples for passes that observe activations, as for `--eval`; labels are ignored
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    calibration: Option<Data>,
    /// Samples for passes that train, as for `--eval`
    #[arg(long, value_name = "DATA", value_parser = parse_data, help_heading = "Output")]
    train: Option<Data>,
    /// Continue an interrupted training
    #[arg(long, help_heading = "Output")]
    resume: bool,
}

/// The value of any data option: a path, or a mapping as in a recipe.
pub(super) fn parse_data(text: &str) -> Result<Data, String> {
    if !text.trim_start().starts_with('{') {
        return Ok(Data::at(std::path::Path::new(text)));
    }
    serde_saphyr::from_str(text).map_err(|e| crate::recipe::message::explain(&e, text))
}

impl Samples {
    /// Tells a pipeline.
    pub fn tell(self, mut builder: Builder) -> Builder {
        for (data, tell) in
            [(self.eval, Builder::evaluation as fn(Builder, Data) -> Builder), (self.calibration, Builder::calibration), (self.train, Builder::train)]
        {
            if let Some(data) = data {
                builder = tell(builder, data);
            }
        }
        builder.resume(self.resume)
    }
}

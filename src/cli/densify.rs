//! `compress densify`

use std::path::PathBuf;

use super::args::{Global, Records, open_input};
use super::output;
use crate::error::{Error, Result};
use crate::export::{ByteSize, Layout, Safetensors};
use crate::output::file_format;
use crate::pass::Step;
use crate::store::Encoding;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Model folder, or a file: .safetensors, .onnx, .gguf, or .bin, .pt or .pth of PyTorch; also
    /// hf:org/name, s3://bucket/name
    model: PathBuf,
    /// Output folder; also hf:org/name, s3://bucket/name, gs:// and az://. Outputs for hf: are first written
    /// to TMPDIR
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Convert only the sparse layout; quantized weights stay quantized
    #[arg(long)]
    keep_quantized: bool,
    /// Maximum size of a file, like 5GB
    #[arg(long, value_name = "SIZE")]
    shard_size: Option<ByteSize>,
    /// Replace the output of an earlier run; files that its report does not list are never deleted
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    records: Records,
    /// Keep NaN and infinite weights instead of stopping with an error; as integers and FP4, NaN becomes zero
    /// and infinity the largest value
    #[arg(long)]
    allow_nonfinite: bool,
}

impl Args {
    pub(super) fn run(self, global: &Global) -> Result<()> {
        let model = open_input(&self.model, Some(&self.output))?;
        if model.onnx.is_some() {
            return Err(Error::Unsupported {
                what: format!("{}: writing an .onnx model with `densify`, which writes safetensors,", self.model.display()),
                hint: format!("convert quantized weights to floats with `compress dequantize {} -o FILE.onnx`", self.model.display()),
            });
        }
        if let Some(format) = file_format(&self.output) {
            return Err(Error::Output {
                path: self.output.clone(),
                reason: format!("is of the format {format}, but `densify` writes safetensors"),
                hint: format!("choose a folder as the output, or write this file with `compress cast MODEL -o {} --to f32`", self.output.display()),
            });
        }
        let mut format = Safetensors::with_layout(if self.keep_quantized { Layout::Auto } else { Layout::Dense });
        format.shard_size = self.shard_size.unwrap_or(format.shard_size);
        let mut builder = global.builder()?.export(format).force(self.force).allow_nonfinite(self.allow_nonfinite);
        if model.is_corrected() && !self.keep_quantized {
            let missing = |e| Error::option("densify", format!("adding the low-rank corrections to the weights needs the pass `dequantize`: {e}"));
            builder = builder.pass(serde_json::from_value::<Step>("dequantize".into()).map_err(missing)?);
        } else if model.weights.by_name.values().all(|weight| weight.encoding == Encoding::Dense && weight.stored_as.len() == 1 && weight.stored_type.is_none())
        {
            builder = builder.note("all weights were already dense: the files contain the same values in the same types");
        }
        output::run(&self.records.configure(builder)?.build()?, &model, &self.output, None, global)
    }
}

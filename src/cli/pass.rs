//! `compress PASS`: one pass over a model.

use std::path::PathBuf;

use super::args::{Global, Writing};
use super::output;
use crate::error::Result;
use crate::model::Model;
use crate::pass::Step;
use crate::run_state::Share;

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// Model folder, or a file: .safetensors, .onnx, .gguf, or .bin, .pt or .pth of PyTorch; also hf:org/name, s3://bucket/name
    model: PathBuf,
    /// Output folder, or an .onnx or .gguf file; s3://bucket/name, gs:// and az:// too, where files of ONNX are made in TMPDIR first
    #[arg(long, short, value_name = "DIR", help_heading = "Output")]
    output: PathBuf,
    #[command(flatten, next_help_heading = "Output")]
    writing: Writing,
    /// Make only a part of the weights, into OUT.parts: `2/16`, or `auto` in a job array of Slurm, `auto/16` in one of Kubernetes; `compress
    /// merge` joins the parts
    #[arg(long, value_name = "I/N", help_heading = "Output")]
    part: Option<Share>,
    #[command(flatten)]
    samples: super::running::Samples,
}

impl Args {
    pub(super) fn run(self, steps: Vec<Step>, global: &Global) -> Result<()> {
        let mut builder =
            global.builder()?.passes(steps).force(self.writing.force).allow_nonfinite(self.writing.allow_nonfinite).measure(!self.writing.no_measure);
        for export in self.writing.exports() {
            builder = builder.export(export);
        }
        let builder = self.samples.tell(builder);
        let pipeline = builder.build()?;
        output::run(&pipeline, &Model::open(&self.model)?, &self.output, self.part, global)
    }
}

//! `compress PASS`: one pass over a model.

use std::path::PathBuf;

use super::args::{Global, Writing, open_input};
use super::output;
use super::running::with_rates;
use crate::error::Result;
use crate::pass::Step;
use crate::run_state::PartIndex;

#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// Model folder, or a file: .safetensors, .onnx, .gguf, or .bin, .pt or .pth of PyTorch; also
    /// hf:org/name, s3://bucket/name
    model: PathBuf,
    /// Output folder, or an .onnx or .gguf file; also hf:org/name, s3://bucket/name, gs:// and az://. Outputs
    /// for hf:, and ONNX files for buckets, are first written to TMPDIR
    #[arg(long, short, value_name = "DIR", help_heading = "Output")]
    output: PathBuf,
    #[command(flatten, next_help_heading = "Output")]
    writing: Writing,
    /// Write only a part of the weights, to OUT.parts: `2/16`, or `auto` in a Slurm job array, `auto/16` in a
    /// Kubernetes indexed job; `compress merge` merges the parts
    #[arg(long, value_name = "I/N", help_heading = "Output")]
    part: Option<PartIndex>,
    #[command(flatten)]
    samples: super::running::Samples,
}

impl Args {
    pub(super) fn run(self, steps: Vec<Step>, global: &Global) -> Result<()> {
        let Writing { force, allow_nonfinite, no_measure, runtimes, .. } = &self.writing;
        let builder = with_rates(global.builder()?, global, false).passes(steps).force(*force).allow_nonfinite(*allow_nonfinite);
        let mut builder = builder.measure(!no_measure).loads(runtimes.loads.iter().copied());
        for export in self.writing.exports() {
            builder = builder.export(export);
        }
        let builder = self.writing.records.configure(self.samples.configure(builder))?;
        let pipeline = builder.build()?;
        output::run(&pipeline, &open_input(&self.model, Some(&self.output))?, &self.output, self.part, global)
    }
}

//! Measures the latency of attention, forward or with gradients.
//!
//! ```text
//! cargo run --release --example attention -- --shape 1x12x1024x64 --causal --backward
//! ```
//!
//! Each line of standard input starts a run, which prints its milliseconds and the increase of the peak
//! memory in bytes. scripts/bench uses this to alternate with PyTorch.

use std::io::BufRead;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use clap::Parser;
use compress_graph::ir::ops::{Attention, Backward, Op, PreparedOp, Saved};

/// Measure the latency of attention
#[derive(Parser)]
struct Args {
    /// Batch size, heads, tokens, head size
    #[arg(long, value_name = "BxHxTxW", default_value = "1x12x1024x64")]
    shape: String,
    /// Use a causal mask
    #[arg(long)]
    causal: bool,
    /// Also compute the gradients
    #[arg(long)]
    backward: bool,
}

/// Peak resident memory of the process in bytes; 0 if the system does not report it.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).map_or(0, |kilobytes| kilobytes * 1024)
}

fn attention(args: &Args) -> Result<()> {
    let sizes = args.shape.split('x').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>().map_err(candle_core::Error::wrap)?;
    let width = sizes.last().copied().unwrap_or(1);
    let random = || Tensor::randn(0f32, 1f32, sizes.as_slice(), &Device::Cpu);
    let inputs = [random()?, random()?, random()?];
    let gradient = random()?;
    let op = Op::Attention(Attention { scale: 1.0 / (width as f64).sqrt(), causal: args.causal, ..Attention::default() });
    let op = PreparedOp::new(&op, &Device::Cpu, DType::F32);
    let before = peak();
    for _ in std::io::stdin().lock().lines() {
        let start = Instant::now();
        let output = op.forward(&inputs)?;
        if args.backward {
            let saved = inputs.clone().map(Saved::full);
            op.backward(&Backward { inputs: &saved, output: &Saved::full(output), gradient: &gradient, needs_gradient: &[true; 3] })?;
        }
        println!("{:.3} {}", start.elapsed().as_secs_f64() * 1e3, peak() - before);
    }
    Ok(())
}

fn main() -> ExitCode {
    match attention(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

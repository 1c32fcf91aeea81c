//! Times attention by itself, forward or with its gradients.
//!
//! ```text
//! cargo run --release --example attention -- --shape 1x12x1024x64 --causal --backward
//! ```
//!
//! There is a run for each line of standard input; its milliseconds are printed, and behind them the bytes by which the
//! process has grown at its peak. This is how scripts/bench takes turns with PyTorch.

use std::io::BufRead;
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use clap::Parser;
use compress::ir::ops::{Attention, Backward, Op, PreparedOp, Saved};

/// Time attention by itself
#[derive(Parser)]
struct Args {
    /// Batch, heads, tokens, width of a head
    #[arg(long, value_name = "BxHxTxW", default_value = "1x12x1024x64")]
    shape: String,
    /// Tokens see only those before them
    #[arg(long)]
    causal: bool,
    /// Compute the gradients too
    #[arg(long)]
    backward: bool,
}

/// Most bytes of memory that the process has taken so far; 0 where the system does not tell.
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
            let saved = inputs.clone().map(Saved::whole);
            op.backward(&Backward { inputs: &saved, output: &Saved::whole(output), gradient: &gradient, wanted: &[true; 3] })?;
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

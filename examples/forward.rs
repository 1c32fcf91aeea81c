//! Measures the latency of the forward pass of a model.
//!
//! ```text
//! cargo run --release --example forward -- FOLDER --shape 16x64 --runs 10 --nodes
//! ```
//!
//! Inputs are random: token ids for text (`batch x sequence`), pixels for images (`batch x channels x
//! height x width`); or they are read from a file of tensors with the names of the model's inputs. With
//! `--on-request`, each line of standard input starts a run, which prints its milliseconds;
//! scripts/bench uses this to alternate with another program.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::num::ParseIntError;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use clap::Parser;
use compress::{Error, Model, Result};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::exec::{DeviceChoice, Executor, Inputs, Parameters, Residence};
use compress_graph::ir::{Element, Graph};

/// Measure the latency of the forward pass of a model
#[derive(Parser)]
struct Args {
    /// Model folder
    model: PathBuf,
    /// Sizes of the main input
    #[arg(long, value_name = "AxBx…", default_value = "1x64")]
    shape: Shape,
    /// Tensors to use as inputs
    #[arg(long, value_name = "FILE")]
    inputs: Option<PathBuf>,
    /// File for the outputs of the first run
    #[arg(long, value_name = "FILE")]
    outputs: Option<PathBuf>,
    /// Number of measured runs
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Device: auto, cpu, cuda, cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Do not convert 16-bit weights to 32 bits
    #[arg(long)]
    stored: bool,
    /// Run once for each line of standard input
    #[arg(long)]
    on_request: bool,
    /// Print the time of each op
    #[arg(long)]
    nodes: bool,
}

#[derive(Clone)]
struct Shape(Vec<usize>);

impl FromStr for Shape {
    type Err = ParseIntError;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        text.split('x').map(str::parse).collect::<std::result::Result<_, _>>().map(Shape)
    }
}

fn candle(error: candle_core::Error) -> Error {
    Error::run("forward", error, "")
}

/// Random inputs of this shape; masks are ones, and other integers are small.
fn random_inputs(graph: &Graph, shape: &[usize]) -> candle_core::Result<Inputs> {
    let mut inputs = Inputs::new();
    for (_, value) in graph.inputs() {
        let tensor = match value.ty.element {
            Element::Float => Tensor::randn(0f32, 1f32, shape, &Device::Cpu)?,
            Element::Int if value.name == "input_ids" => Tensor::rand(0f32, 1000f32, shape, &Device::Cpu)?.to_dtype(DType::I64)?,
            Element::Int if value.name.contains("mask") => Tensor::ones(shape, DType::I64, &Device::Cpu)?,
            Element::Int => Tensor::zeros(shape, DType::I64, &Device::Cpu)?,
        };
        inputs.insert(value.name.clone(), tensor);
    }
    Ok(inputs)
}

/// Duration of one run in milliseconds.
fn timed(executor: &Executor, inputs: &Inputs) -> Result<f64> {
    let start = Instant::now();
    executor.run(inputs)?;
    executor.device().synchronize().map_err(candle)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Milliseconds by op, with every node computed separately.
fn by_op(executor: &Executor, inputs: &Inputs) -> Result<BTreeMap<&'static str, (usize, f64)>> {
    let ops: BTreeMap<&str, &'static str> = executor.graph().nodes().iter().map(|n| (executor.graph().value(n.output).name.as_str(), n.op.name())).collect();
    let mut spent: BTreeMap<&'static str, (usize, f64)> = BTreeMap::new();
    let mut last = Instant::now();
    executor.run_observed(&executor.observation(|_| true), inputs, &mut |name, _| {
        let entry = spent.entry(ops[name]).or_default();
        entry.0 += 1;
        entry.1 += last.elapsed().as_secs_f64() * 1e3;
        last = Instant::now();
        Ok(())
    })?;
    Ok(spent)
}

fn forward(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let model = Model::open(&args.model)?;
    let graph = model.graph()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let residence = if args.stored { Residence::Stored } else { Residence::Computed };
    let work = Work { threads, progress: &Silent, cancel: &Cancel::default() };
    let parameters = Parameters::load(&graph, &model.weights, &device, DType::F32, residence, &work)?;
    let executor = Executor::new(&graph, parameters, device);
    let inputs = match &args.inputs {
        Some(file) => candle_core::safetensors::load(file, &Device::Cpu).map_err(candle)?.into_iter().collect(),
        None => random_inputs(&graph, &args.shape.0).map_err(candle)?,
    };
    let outputs = executor.run(&inputs)?;
    if let Some(file) = &args.outputs {
        candle_core::safetensors::save(&outputs.into_iter().collect(), file).map_err(candle)?;
    }
    if args.on_request {
        for _ in std::io::stdin().lock().lines() {
            println!("{:.3}", timed(&executor, &inputs)?);
        }
        return Ok(());
    }
    let mut times = (0..args.runs.max(1)).map(|_| timed(&executor, &inputs)).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    println!("{:.1} ms, the median of {} runs ({:.1} to {:.1})", times[times.len() / 2], times.len(), times[0], times[times.len() - 1]);
    if args.nodes {
        for (op, (count, milliseconds)) in by_op(&executor, &inputs)? {
            println!("{op:18} {count:4} × {milliseconds:8.1} ms");
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match forward(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

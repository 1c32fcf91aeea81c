//! Writes a Llama-shaped checkpoint of any size with seeded random weights, for benchmarks.
//!
//! ```text
//! cargo run --release --example make_checkpoint -- OUT --size 1b --dtype bf16
//! ```
//!
//! Every tensor is a [`WeightSource`] that computes its values when the writer requests them, so that 7
//! billion parameters need no more memory than a thousand. The same seed yields the same files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, ValueEnum};
use compress::export::ByteSize;
use compress::{Error, Result};
use compress_core::store::writer::{self, FileLayout, Item};
use compress_core::store::{Block, BlockSink, DType, Encoding, StorageFormat, View, Weight, WeightSource, block_elements};
use compress_core::work::{Cancel, Silent, Work};
use compress_kernels::convert;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use serde_json::json;

/// Write a Llama-shaped checkpoint with seeded random weights
#[derive(Parser)]
struct Args {
    /// Output folder
    output: PathBuf,
    /// Shape of the model
    #[arg(long, value_enum)]
    size: Size,
    /// Number of layers, if it differs from that of the shape
    #[arg(long)]
    layers: Option<usize>,
    /// Format of the weights
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Format,
    /// Maximum size of a file
    #[arg(long, default_value = "1200MB")]
    shard_size: ByteSize,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Size {
    Pico,
    #[value(name = "160m")]
    M160,
    #[value(name = "1b")]
    B1,
    /// With a large vocabulary
    #[value(name = "1.5b")]
    B1_5,
    #[value(name = "7b")]
    B7,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Bf16,
    F16,
    F32,
}

impl Format {
    /// The dtype and its name in `config.json`.
    fn names(self) -> (DType, &'static str) {
        match self {
            Format::Bf16 => (DType::BF16, "bfloat16"),
            Format::F16 => (DType::F16, "float16"),
            Format::F32 => (DType::F32, "float32"),
        }
    }
}

struct Shape {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    vocabulary: usize,
}

impl Size {
    fn shape(self) -> Shape {
        let [hidden, intermediate, layers, heads, kv_heads, vocabulary] = match self {
            Size::Pico => [64, 176, 2, 4, 2, 128],
            Size::M160 => [768, 2048, 12, 12, 12, 32000],
            Size::B1 => [2048, 5632, 22, 32, 4, 32000],
            Size::B1_5 => [1536, 8960, 28, 12, 2, 151_936],
            Size::B7 => [4096, 11008, 32, 32, 32, 32000],
        };
        Shape { hidden, intermediate, layers, heads, kv_heads, vocabulary }
    }
}

impl Shape {
    /// Names and shapes in the order of the model.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let &Shape { hidden, intermediate, vocabulary, .. } = self;
        let kv = hidden / self.heads * self.kv_heads;
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden])];
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: Vec<usize>| tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
            add("input_layernorm", vec![hidden]);
            add("self_attn.q_proj", vec![hidden, hidden]);
            add("self_attn.k_proj", vec![kv, hidden]);
            add("self_attn.v_proj", vec![kv, hidden]);
            add("self_attn.o_proj", vec![hidden, hidden]);
            add("post_attention_layernorm", vec![hidden]);
            add("mlp.gate_proj", vec![intermediate, hidden]);
            add("mlp.up_proj", vec![intermediate, hidden]);
            add("mlp.down_proj", vec![hidden, intermediate]);
        }
        tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
        tensors.push(("lm_head.weight".to_owned(), vec![vocabulary, hidden]));
        tensors
    }

    fn config(&self, dtype: &str) -> serde_json::Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": false,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": dtype,
        })
    }
}

/// A tensor of random numbers.
struct Random {
    seed: u64,
    dtype: DType,
    shape: Vec<usize>,
}

/// One outlier row per this many rows, as in trained models, which makes quantization harder.
const ROWS_PER_OUTLIER: u64 = 128;
const OUTLIER: f32 = 6.0;

impl Random {
    fn row(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Mean and standard deviation of a row.
    fn scale(&self, row: usize) -> (f32, f32) {
        if self.shape.len() == 1 {
            return (1.0, 0.1);
        }
        let outlier = Xoshiro256PlusPlus::seed_from_u64(self.seed ^ !(row as u64)).next_u64().is_multiple_of(ROWS_PER_OUTLIER);
        let deviation = 0.7 / (self.row() as f32).sqrt();
        (0.0, if outlier { OUTLIER * deviation } else { deviation })
    }
}

impl WeightSource for Random {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.seed);
        let (elements, row) = (self.shape.iter().product::<usize>(), self.row());
        let step = block_elements(unit);
        let mut values = vec![0f32; step.min(elements)];
        let mut bytes = vec![0; values.len() * self.dtype.bitsize() / 8];
        let (mut mean, mut deviation) = (0.0, 0.0);
        for start in (0..elements).step_by(step) {
            let values = &mut values[..step.min(elements - start)];
            for (index, value) in (start..).zip(values.iter_mut()) {
                if index % row == 0 {
                    (mean, deviation) = self.scale(index / row);
                }
                let normal: f32 = StandardNormal.sample(&mut random);
                *value = mean + deviation * normal;
            }
            let bytes = &mut bytes[..values.len() * self.dtype.bitsize() / 8];
            if !convert::from_f32(self.dtype, values, bytes) {
                return Err(Error::option("--dtype", "not a float format"));
            }
            sink(Block::untouched(View::dense(self.dtype, bytes)))?;
        }
        Ok(())
    }
}

fn make(args: &Args) -> Result<u64> {
    let (whole, (dtype, dtype_name)) = (args.size.shape(), args.dtype.names());
    let shape = Shape { layers: args.layers.unwrap_or(whole.layers), ..whole };
    let mut seeds = Xoshiro256PlusPlus::seed_from_u64(args.seed);
    let items: Vec<Item> = shape
        .tensors()
        .into_iter()
        .map(|(name, shape)| {
            let source = Random { seed: seeds.next_u64(), dtype, shape: shape.clone() };
            let mut weight = Weight::new(dtype, shape, Encoding::Dense, Arc::new(source));
            weight.stored_bytes = weight.value_bytes();
            Item { name, weight, storage_format: StorageFormat::Plain }
        })
        .collect();
    let layout = FileLayout::new(&items, &BTreeMap::from([("format".into(), "pt".into())]), &[], args.shard_size.0)?;
    let folder = &args.output;
    std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    write_json(&folder.join("config.json"), &shape.config(dtype_name))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    writer::write(&compress_core::files::Destination::local(folder), &items, &layout, None, &Work { threads, progress: &Silent, cancel: &Cancel::default() })?;
    Ok(layout.bytes())
}

fn write_json(path: &Path, value: &serde_json::Value) -> Result<()> {
    std::fs::write(path, format!("{value:#}\n")).map_err(Error::io("write", path))
}

fn main() -> ExitCode {
    let args = Args::parse();
    match make(&args) {
        Ok(bytes) => {
            println!("{}: {:.2} GB", args.output.display(), bytes as f64 / 1e9);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

//! Helpers for the integration tests: tensors, small models, the reference reader, and runs.

// Every test binary uses a part of this module.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

pub mod nodes;
#[cfg(feature = "run")]
pub mod numbers;
pub mod onnxruntime;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use compress::Result;
use compress::pass::Step;
use compress::pipeline::{Builder, Pipeline};
use compress::report::Report;
use compress_core::store::Pattern;
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::model::Model;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

pub use compress_core::store::DType;

/// The tensors of a checkpoint, by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// A tensor as stored in a file.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Tensor {
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    /// A tensor of floats rounded to a dtype.
    pub fn floats(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
        Tensor::from_bits(dtype, shape, &values.iter().map(|v| float_bits(dtype, *v)).collect::<Vec<_>>())
    }

    /// Deterministic floats between -1 and 1.
    pub fn random(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
        let mut rng = StdRng::seed_from_u64(seed);
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::floats(dtype, shape, &values)
    }

    /// Elements from their bits, for dtypes of whole bytes.
    pub fn from_bits(dtype: DType, shape: &[usize], bits: &[u64]) -> Tensor {
        let size = dtype.bitsize() / 8;
        Tensor::new(dtype, shape, bits.iter().flat_map(|b| b.to_le_bytes()[..size].to_vec()).collect())
    }

    /// Bits of the elements, for dtypes of whole bytes.
    pub fn bits(&self) -> Vec<u64> {
        let widen = |element: &[u8]| element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
        self.bytes.chunks(self.dtype.bitsize() / 8).map(widen).collect()
    }

    /// Floats or bytes (signed for I8) as numbers.
    pub fn values(&self) -> Vec<f64> {
        self.bits().into_iter().map(|bits| float_value(self.dtype, bits)).collect()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} ", self.dtype, self.shape)?;
        match self.dtype {
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 | DType::I8 if self.bytes.len() <= 256 => write!(f, "{:?}", self.values()),
            _ if self.bytes.len() <= 256 => write!(f, "{:02x?}", self.bytes),
            _ => write!(f, "({} bytes)", self.bytes.len()),
        }
    }
}

/// The bits of a number rounded to a float dtype.
pub fn float_bits(dtype: DType, value: f64) -> u64 {
    match dtype {
        DType::F16 => f16::from_f64(value).to_bits().into(),
        DType::BF16 => bf16::from_f64(value).to_bits().into(),
        DType::F32 => (value as f32).to_bits().into(),
        DType::F64 => value.to_bits(),
        _ => panic!("{dtype} is not a float dtype"),
    }
}

/// The number with these bits.
pub fn float_value(dtype: DType, bits: u64) -> f64 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F32 => f32::from_bits(bits as u32).into(),
        DType::F64 => f64::from_bits(bits),
        DType::I8 => (bits as i8).into(),
        _ => panic!("{dtype} is not a float dtype"),
    }
}

/// Writes a file with the reference implementation.
pub fn write(path: &Path, tensors: &Tensors) {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    fs::write(path, safetensors::serialize(views(tensors), Some(metadata)).unwrap()).unwrap();
}

fn views(tensors: &Tensors) -> Vec<(&String, TensorView<'_>)> {
    tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap())).collect()
}

/// Reads a file, or all files of a folder, with the reference implementation.
pub fn read(path: &Path) -> Tensors {
    if path.is_file() {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        return file.tensors().into_iter().map(|(name, t)| (name, Tensor::new(t.dtype(), t.shape(), t.data().to_vec()))).collect();
    }
    let mut tensors = Tensors::new();
    for (name, _) in contents(path).into_iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        for (name, tensor) in read(&path.join(name)) {
            assert!(tensors.insert(name.clone(), tensor).is_none(), "`{name}` is in two files");
        }
    }
    tensors
}

/// The files of a folder and its subfolders, without files that contain times and paths (reports, the
/// recipe) or measurements (the model card).
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            files.extend(contents(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else if !name.starts_with("report.") && name != "recipe.yaml" && name != "README.md" {
            files.insert(name, fs::read(path).unwrap());
        }
    }
    files
}

/// A temporary folder for inputs and outputs.
pub struct Desk {
    folder: TempDir,
    made: Cell<usize>,
}

/// The output of a run.
pub struct Output {
    pub path: PathBuf,
    pub report: Report,
}

impl Desk {
    pub fn new() -> Desk {
        // Output folders are synced, which is fast on a memory-backed disk.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        Desk { folder: folder.unwrap(), made: Cell::new(0) }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A path that does not exist yet.
    pub fn place(&self) -> PathBuf {
        self.made.set(self.made.get() + 1);
        self.folder.path().join(self.made.get().to_string())
    }

    /// A folder with a single weight file.
    pub fn weights(&self, tensors: &Tensors) -> PathBuf {
        let path = self.place();
        fs::create_dir(&path).unwrap();
        write(&path.join("model.safetensors"), tensors);
        path
    }

    /// A folder with sharded weights and an index; tensors are assigned round-robin.
    pub fn shards(&self, tensors: &Tensors, count: usize) -> PathBuf {
        let path = self.place();
        fs::create_dir(&path).unwrap();
        let name = |i: usize| format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        let map: BTreeMap<&String, String> = tensors.keys().enumerate().map(|(i, tensor)| (tensor, name(i % count))).collect();
        for i in 0..count {
            let held = tensors.iter().filter(|(tensor, _)| map[tensor] == name(i)).map(|(n, t)| (n.clone(), t.clone())).collect();
            write(&path.join(name(i)), &held);
        }
        let bytes: usize = tensors.values().map(|t| t.bytes.len()).sum();
        let index = json!({ "metadata": { "total_size": bytes }, "weight_map": map });
        fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
        path
    }

    /// A folder of a small Llama; with an index if there is more than one shard.
    pub fn pico(&self, dtype: DType, shards: usize) -> PathBuf {
        let tensors = pico(dtype);
        let path = if shards == 1 { self.weights(&tensors) } else { self.shards(&tensors, shards) };
        fs::write(path.join("config.json"), pico_config(dtype).to_string()).unwrap();
        fs::write(path.join("tokenizer.json"), r#"{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}"#).unwrap();
        fs::create_dir(path.join("1_Pooling")).unwrap();
        fs::write(path.join("1_Pooling/config.json"), r#"{"pooling_mode_mean_tokens": true}"#).unwrap();
        path
    }

    pub fn run(&self, input: &Path, builder: Builder) -> Result<Output> {
        let path = self.place();
        let report = builder.build()?.run(Model::open(input)?, &path)?;
        Ok(Output { path, report })
    }

    /// Runs one pass over tensors and returns the written tensors.
    pub fn apply(&self, tensors: &Tensors, pass: impl Into<Step>) -> Result<Tensors> {
        Ok(read(&self.run(&self.weights(tensors), pipeline().pass(pass))?.path))
    }
}

/// A pipeline that allows non-finite values.
pub fn pipeline() -> Builder {
    Pipeline::builder().threads(2).allow_nonfinite(true)
}

/// The device that models run on: that of `COMPRESS_TEST_DEVICE`, which must exist, or else the first GPU, as
/// for the option `auto`.
#[cfg(feature = "run")]
pub fn device() -> candle_core::Device {
    use compress_engine::exec::DeviceChoice;
    use std::sync::OnceLock;

    // Tensors of two handles of the same GPU cannot be combined.
    static DEVICE: OnceLock<candle_core::Device> = OnceLock::new();
    let open = || std::env::var("COMPRESS_TEST_DEVICE").map_or(DeviceChoice::Auto, |name| name.parse().unwrap()).open().unwrap();
    DEVICE.get_or_init(open).clone()
}

/// Outputs of a model in the built-in executor, with weights of 32 bits.
#[cfg(feature = "run")]
pub fn outputs(model: &Model, inputs: &BTreeMap<String, candle_core::Tensor>) -> BTreeMap<String, candle_core::Tensor> {
    use candle_core::{DType, Device};
    use compress_engine::exec::{Executor, Parameters, Residence};

    let graph = model.graph().unwrap();
    let parameters = work(|work| Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, work)).unwrap();
    Executor::new(&graph, parameters, Device::Cpu).run(inputs).unwrap()
}

/// A file or folder of `tests/golden`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Runs a pipeline on a folder, and returns the folder with the output `out`.
pub fn written(input: &Path, pipeline: Builder) -> (TempDir, Report) {
    let folder = tempfile::tempdir().unwrap();
    let report = pipeline.build().unwrap().run(Model::open(input).unwrap(), folder.path().join("out")).unwrap();
    (folder, report)
}

/// The configuration of a folder.
pub fn config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// The folder of a model of `tests/golden/models`, or another absolute path unchanged.
pub fn golden_model(name: &str) -> PathBuf {
    golden("models").join(name)
}

/// Writes the tiny Llama with a weight in 64 bits to a folder.
pub fn write_with_float64(folder: &Path, name: &str) {
    let mut tensors = read(&golden_model("llama/model.safetensors"));
    let wide = Tensor::floats(DType::F64, &tensors[name].shape, &tensors[name].values());
    tensors.insert(name.to_owned(), wide);
    write(&folder.join("model.safetensors"), &tensors);
    fs::copy(golden_model("llama/config.json"), folder.join("config.json")).unwrap();
}

/// A `Work` outside of a pipeline.
pub fn work<T>(job: impl FnOnce(&Work) -> T) -> T {
    job(&Work { threads: 2, progress: &Silent, cancel: &Cancel::default() })
}

/// The pattern that matches everything.
pub fn all() -> Vec<Pattern> {
    vec!["*".parse().unwrap()]
}

/// The weights of a small Llama with two layers.
pub fn pico(dtype: DType) -> Tensors {
    let (hidden, inner, heads, vocabulary) = (32, 48, 16, 64);
    let mut shapes =
        vec![("model.embed_tokens".to_owned(), vec![vocabulary, hidden]), ("model.norm".into(), vec![hidden]), ("lm_head".into(), vec![vocabulary, hidden])];
    for layer in 0..2 {
        let parts = [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![heads, hidden]),
            ("self_attn.v_proj", vec![heads, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ];
        shapes.extend(parts.map(|(part, shape)| (format!("model.layers.{layer}.{part}"), shape)));
    }
    shapes.iter().enumerate().map(|(seed, (name, shape))| (format!("{name}.weight"), Tensor::random(dtype, shape, seed as u64))).collect()
}

fn pico_config(dtype: DType) -> Value {
    let dtype = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "torch_dtype": dtype,
    })
}

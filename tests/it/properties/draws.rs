//! The generator: random models, samples and batch sizes, each determined by a seed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor as Array};
use compress::pipeline::{Builder, verify};
use compress::recipe::Recipe;
use compress::report::Report;
use compress::{Model, Pipeline, Result};
use compress_engine::data::{Data, synthetic_with_sizes};
use compress_engine::evaluation::{Fidelity, Outputs, output_fidelity};
use compress_engine::exec::Inputs;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

pub use crate::common::golden_model as golden;
use crate::common::{DType, Desk, Tensor, Tensors, contents, read, work};

/// Seeds of the draws of a property: as many as `COMPRESS_LAW_DRAWS` specifies, otherwise the default
/// number.
pub fn seeds(gate: u64) -> std::ops::Range<u64> {
    let draws = std::env::var("COMPRESS_LAW_DRAWS").ok().map(|count| count.parse().expect("COMPRESS_LAW_DRAWS is a number"));
    0..draws.unwrap_or(gate)
}

/// Names of the golden models, sorted.
pub fn families() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The layers of a random network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Network {
    /// Linear layers, activations and layer norms over vectors.
    Dense,
    /// Convolutions with batch norms, then a linear layer.
    Convolutional,
}

/// Number of samples per batch of a draw.
fn batch_size(seed: u64) -> usize {
    StdRng::seed_from_u64(seed ^ 0xba7c).random_range(1..=9)
}

/// A drawn model in a temporary folder.
pub struct Draw {
    pub desk: Desk,
    /// The model folder.
    pub path: PathBuf,
    /// Description of the draw, for messages.
    pub name: String,
    pub rng: StdRng,
    /// Number of samples per batch of its data sets.
    pub batch_size: usize,
}

/// Output of a run.
pub struct Written {
    pub path: PathBuf,
    pub report: Report,
}

impl Draw {
    /// A golden model or a random network.
    pub fn any(seed: u64) -> Draw {
        match StdRng::seed_from_u64(seed).random_range(0..4) {
            0 => Draw::network(seed, Network::Dense),
            1 => Draw::network(seed, Network::Convolutional),
            _ => {
                let names = families();
                Draw::family(seed, &names[StdRng::seed_from_u64(seed ^ 0x5eed).random_range(0..names.len())])
            }
        }
    }

    /// A golden model, its weights in one to three files.
    pub fn family(seed: u64, name: &str) -> Draw {
        let (desk, mut rng) = (Desk::new(), StdRng::seed_from_u64(seed));
        let source = golden(name);
        let mut weights = Tensors::new();
        // Subfolders have separate weights, possibly with the same names.
        let is_own = |file: &str| file.contains(".safetensors") && !file.contains('/');
        for (file, _) in contents(&source).into_iter().filter(|(file, _)| is_own(file) && file.ends_with(".safetensors") && !file.starts_with("golden")) {
            weights.extend(read(&source.join(&file)));
        }
        let files = rng.random_range(1..=3);
        let path = place(&desk, &weights, files);
        for (file, bytes) in contents(&source).into_iter().filter(|(file, _)| !is_own(file)) {
            let target = path.join(&file);
            fs::create_dir_all(target.parent().unwrap()).unwrap();
            fs::write(target, bytes).unwrap();
        }
        let batch_size = batch_size(seed);
        Draw { desk, path, name: format!("seed {seed}: {name} in {files} files, batches of {batch_size}"), rng, batch_size }
    }

    /// A random network with widths of 7 to 300 and one to three outputs.
    pub fn network(seed: u64, kind: Network) -> Draw {
        let (desk, mut rng) = (Desk::new(), StdRng::seed_from_u64(seed));
        let mut graph = GraphText::default();
        let outputs = match kind {
            Network::Dense => dense(&mut graph, &mut rng),
            Network::Convolutional => convolutional(&mut graph, &mut rng),
        };
        let files = rng.random_range(1..=3);
        let path = place(&desk, &graph.weights, files);
        fs::write(path.join("config.json"), "{}").unwrap();
        let file = json!({ "inputs": { "x": graph.input }, "nodes": graph.nodes, "outputs": outputs });
        fs::write(path.join("graph.json"), file.to_string()).unwrap();
        let widths: Vec<usize> = graph.weights.values().filter(|weight| weight.shape.len() > 1).map(|weight| weight.shape[0]).collect();
        let batch_size = batch_size(seed);
        let name = format!("seed {seed}: {kind:?} network of widths {widths:?} in {files} files, batches of {batch_size}");
        Draw { desk, path, name, rng, batch_size }
    }

    pub fn model(&self) -> Model {
        Model::open(&self.path).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// Random samples of the model's inputs.
    pub fn samples(&self, count: usize, seed: u64) -> Inputs {
        let graph = self.model().graph().unwrap();
        let sizes = graph.bind(|name| match name {
            "batch" => count,
            "height" | "width" => 32,
            _ => 6,
        });
        synthetic_with_sizes(&graph, seed, &sizes).unwrap().inputs
    }

    /// Writes samples as a data set with the batch size of the draw.
    pub fn data(&self, samples: &Inputs) -> Data {
        let path = self.desk.place().with_extension("safetensors");
        candle_core::safetensors::save(&samples.clone().into_iter().collect(), &path).unwrap();
        Data { arrays: Some(path), batch_size: Some(self.batch_size), ..Data::default() }
    }

    /// Runs passes and exports, given as in a recipe, on the drawn model.
    pub fn run(&self, passes: Value, exports: Value, with: impl FnOnce(Builder) -> Builder) -> Result<Written> {
        self.run_on(&self.path, passes, exports, with)
    }

    /// The same on another folder.
    pub fn run_on(&self, input: &Path, passes: Value, exports: Value, with: impl FnOnce(Builder) -> Builder) -> Result<Written> {
        let recipe = json!({ "model": input, "passes": passes, "export": exports }).to_string();
        let recipe = Recipe::parse(&recipe, Path::new("recipe.yaml"))?;
        let path = self.desk.place();
        let report = with(Pipeline::builder().recipe(&recipe).threads(2).measure(false)).build()?.run(Model::open(input)?, &path)?;
        Ok(Written { path, report })
    }

    /// Outputs of the drawn model.
    pub fn outputs(&self, inputs: &Inputs) -> Outputs {
        outputs(&self.path, inputs)
    }
}

impl Written {
    /// Checks that the output verifies and opens.
    pub fn check(&self, what: &str) -> Model {
        for check in work(|work| verify(&self.path, work)).unwrap_or_else(|e| panic!("{what}: {e}")) {
            assert!(check.ok, "{what}: {}: {}", check.path, check.finding);
        }
        Model::open(&self.path).unwrap_or_else(|e| panic!("{what}: {e}"))
    }

    /// Its files, without reports.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        contents(&self.path)
    }
}

/// Outputs of a model folder, computed by the built-in executor.
pub fn outputs(folder: &Path, inputs: &Inputs) -> Outputs {
    crate::common::outputs(&Model::open(folder).unwrap(), inputs)
}

/// Fidelity of a folder's outputs to those of the drawn model.
pub fn fidelity(draw: &Draw, folder: &Path, inputs: &Inputs) -> Fidelity {
    let graph = draw.model().graph().unwrap();
    let mut batch = compress_engine::data::synthetic(&graph, 0).unwrap();
    batch.inputs = inputs.clone();
    batch.samples = inputs.values().next().unwrap().dims()[0];
    output_fidelity(&batch, &draw.outputs(inputs), &outputs(folder, inputs)).unwrap()
}

/// Rows of all samples in another order.
pub fn permuted(samples: &Inputs, order: &[u32]) -> Inputs {
    let index = Array::from_slice(order, order.len(), &Device::Cpu).unwrap();
    samples.iter().map(|(name, array)| (name.clone(), array.index_select(&index, 0).unwrap())).collect()
}

/// A folder with weights in a number of files.
pub fn place(desk: &Desk, weights: &Tensors, files: usize) -> PathBuf {
    if files == 1 { desk.weights(weights) } else { desk.shards(weights, files) }
}

/// Nodes and weights of a `graph.json`.
#[derive(Default)]
struct GraphText {
    input: Value,
    nodes: Vec<Value>,
    weights: Tensors,
}

impl GraphText {
    fn node(&mut self, op: impl Into<Value>, inputs: &[&str]) -> String {
        let name = format!("n{}", self.nodes.len());
        self.nodes.push(json!({ "name": name, "op": op.into(), "inputs": inputs }));
        name
    }

    /// Adds a weight of normally distributed values.
    fn weight(&mut self, name: &str, shape: &[usize], mean: f64, deviation: f64, rng: &mut StdRng) {
        let count: usize = shape.iter().product();
        // The sum of twelve uniform numbers has variance 1.
        let normal = |rng: &mut StdRng| (0..12).map(|_| rng.random_range(-0.5..0.5f64)).sum::<f64>();
        let values: Vec<f64> = (0..count).map(|_| mean + deviation * normal(rng)).collect();
        self.weights.insert(name.to_owned(), Tensor::floats(DType::F32, shape, &values));
    }

    fn linear(&mut self, input: &str, name: &str, inner: usize, outer: usize, rng: &mut StdRng) -> String {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        self.weight(&weight, &[outer, inner], 0.0, (2.0 / inner as f64).sqrt(), rng);
        self.weight(&bias, &[outer], 0.0, 0.1, rng);
        self.node("Linear", &[input, &weight, &bias])
    }

    /// One to three heads that read a value.
    fn heads(&mut self, value: &str, width: usize, rng: &mut StdRng) -> Value {
        let count = rng.random_range(1..=3);
        let heads = (0..count).map(|head| {
            let outer = rng.random_range(7..=40);
            (["logits", "boxes", "aux"][head].to_owned(), self.linear(value, &format!("head{head}"), width, outer, rng).into())
        });
        heads.collect::<serde_json::Map<_, _>>().into()
    }
}

fn dense(graph: &mut GraphText, rng: &mut StdRng) -> Value {
    let mut width = rng.random_range(7..=300);
    graph.input = json!({ "element": "float", "shape": ["batch", width] });
    let mut value = "x".to_owned();
    for layer in 0..rng.random_range(1..=4) {
        let (inner, name) = (width, format!("layers.{layer}"));
        width = rng.random_range(7..=300);
        value = graph.linear(&value, &name, inner, width, rng);
        value = graph.node(["Relu", "Silu", "Tanh", "Gelu"][rng.random_range(0..4)], &[&value]);
        if rng.random_range(0..3) == 0 {
            let (weight, bias) = (format!("{name}.norm.weight"), format!("{name}.norm.bias"));
            graph.weight(&weight, &[width], 1.0, 0.1, rng);
            graph.weight(&bias, &[width], 0.0, 0.1, rng);
            value = graph.node("LayerNorm", &[&value, &weight, &bias]);
        }
    }
    graph.heads(&value, width, rng)
}

fn convolutional(graph: &mut GraphText, rng: &mut StdRng) -> Value {
    let mut width = 3;
    graph.input = json!({ "element": "float", "shape": ["batch", width, 12, 12] });
    let mut value = "x".to_owned();
    for layer in 0..rng.random_range(1..=3) {
        let (inner, name) = (width, format!("layers.{layer}"));
        width = rng.random_range(7..=40);
        let weight = format!("{name}.weight");
        graph.weight(&weight, &[width, inner, 3, 3], 0.0, (2.0 / (9 * inner) as f64).sqrt(), rng);
        value = graph.node(json!({ "Conv": { "padding": 1, "stride": rng.random_range(1..=2) } }), &[&value, &weight]);
        let parts = [("weight", 1.0, 0.1), ("bias", 0.0, 0.1), ("running_mean", 0.0, 0.1), ("running_var", 1.0, 0.05)];
        let names = parts.map(|(part, mean, deviation)| {
            let name = format!("{name}.bn.{part}");
            graph.weight(&name, &[width], mean, deviation, rng);
            name
        });
        value = graph.node("BatchNorm", &[&value, &names[0], &names[1], &names[2], &names[3]]);
        value = graph.node("Relu", &[&value]);
    }
    value = graph.node("GlobalAveragePool", &[&value]);
    graph.heads(&value, width, rng)
}

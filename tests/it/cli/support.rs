//! Helpers for the tests of the binary: running it, writing checkpoints, comparing folders.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Map, Value, json};

/// Result of a run.
pub struct Run {
    /// Exit code; -1 after a signal.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Run {
    fn from(output: Output) -> Run {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
        Run { code: output.status.code().unwrap_or(-1), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// A command for the binary in a folder.
pub fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_compress"));
    command.current_dir(folder).env_remove("NO_COLOR").env("RUST_BACKTRACE", "0").env("COMPRESS_RATES", "off");
    command
}

/// Runs the binary in a folder; arguments are separated by spaces.
pub fn compress(folder: &Path, args: &str) -> Run {
    command(folder).args(args.split_whitespace()).output().unwrap().into()
}

/// Runs a command that must succeed.
pub fn ok(folder: &Path, args: &str) -> Run {
    let run = compress(folder, args);
    assert_eq!(run.code, 0, "compress {args}\n{}{}", run.stdout, run.stderr);
    run
}

/// Runs a command that must succeed and print one JSON value.
pub fn data(folder: &Path, args: &str) -> Value {
    let run = ok(folder, args);
    serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("compress {args}: {e}\n{}", run.stdout))
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A tensor to write to a file.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub fn tensor(name: &str, dtype: &'static str, shape: &[usize], bytes: &[u8]) -> Tensor {
    Tensor { name: name.into(), dtype, shape: shape.into(), bytes: bytes.into() }
}

/// An F32 tensor with these values.
pub fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    tensor(name, "F32", shape, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// An F32 tensor with non-zero values between -0.05 and 0.05 that depend only on its name.
pub fn floats(name: &str, shape: &[usize]) -> Tensor {
    let mut state = u64::from_le_bytes(blake3::hash(name.as_bytes()).as_bytes()[..8].try_into().unwrap());
    let value = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 41) as f32 + 0.5) / (1u32 << 23) as f32 * 0.1 - 0.05
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    f32s(name, shape, &values)
}

/// A safetensors file with any text as header.
pub fn raw_file(path: &Path, header: &[u8], data: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header, data].concat()).unwrap();
}

/// A safetensors file with these tensors, in this order.
pub fn file(path: &Path, metadata: &[(&str, &str)], tensors: &[Tensor]) {
    let mut header = Map::new();
    let mut data = Vec::new();
    header.insert("__metadata__".into(), json!(metadata.iter().copied().collect::<BTreeMap<_, _>>()));
    for t in tensors {
        let begin = data.len();
        data.extend(&t.bytes);
        header.insert(t.name.clone(), json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()] }));
    }
    raw_file(path, Value::Object(header).to_string().as_bytes(), &data);
}

pub const METADATA: &[(&str, &str)] = &[("format", "pt")];

/// Tensors of a small BERT-like model: seven weights, four of them linear.
pub fn small_tensors() -> Vec<Tensor> {
    let mut tensors = vec![floats("embeddings.word_embeddings.weight", &[32, 16])];
    for layer in 0..2 {
        tensors.push(floats(&format!("encoder.layer.{layer}.attention.self.query.weight"), &[16, 16]));
        tensors.push(floats(&format!("encoder.layer.{layer}.attention.self.query.bias"), &[16]));
        tensors.push(floats(&format!("encoder.layer.{layer}.output.dense.weight"), &[16, 64]));
    }
    tensors
}

/// A model folder with these tensors and auxiliary files.
pub fn model_of(folder: &Path, config: &Value, tensors: &[Tensor]) {
    file(&folder.join("model.safetensors"), METADATA, tensors);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), "{\"tokens\": []}").unwrap();
    fs::create_dir_all(folder.join("1_Pooling")).unwrap();
    fs::write(folder.join("1_Pooling/config.json"), "{}").unwrap();
    fs::write(folder.join("pytorch_model.bin"), "other weights").unwrap();
}

/// A small model folder.
pub fn model(folder: &Path) {
    model_of(folder, &json!({ "model_type": "bert", "hidden_size": 16 }), &small_tensors());
}

/// Contents of a folder: the hash of each file, and the names of subfolders.
pub fn snapshot(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut seen = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inside) = folders.pop() {
        for entry in fs::read_dir(&inside).unwrap() {
            let path = entry.unwrap().path();
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            let content = if kind.is_dir() {
                folders.push(path.clone());
                "a folder".into()
            } else if kind.is_file() {
                blake3::hash(&fs::read(&path).unwrap()).to_string()
            } else {
                format!("{kind:?}")
            };
            seen.insert(path.strip_prefix(folder).unwrap().to_owned(), content);
        }
    }
    seen
}

/// Names directly in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Staging and resume folders of runs.
pub fn work_folders(folder: &Path) -> Vec<PathBuf> {
    names(folder).iter().filter(|name| name.starts_with('.') && name.contains(".compress-")).map(|name| folder.join(name)).collect()
}

/// A model of `tests/golden/models` as the folder `in`, with files of `tests/golden/evaluation` under
/// other names.
pub fn golden_model(folder: &Path, name: &str, extra: &[(&str, &str)]) {
    let (golden, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), folder.join("in"));
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(golden.join("models").join(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && !path.ends_with("golden.safetensors") {
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
    for (file, called) in extra {
        fs::copy(golden.join("evaluation").join(file), to.join(called)).unwrap();
    }
}

//! Invalid model folders: a bad index, no weights or too many, a bad configuration.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Case, case, check};
use crate::cli::support::{METADATA, Run, Tensor, command, file, floats, model, model_of, tensor};

const RUN: &str = "densify in -o out";
const INDEX: &str = "in/model.safetensors.index.json";

fn shard(folder: &Path, name: &str, tensors: &[&str]) {
    file(&folder.join("in").join(name), METADATA, &tensors.iter().map(|t| floats(t, &[2])).collect::<Vec<_>>());
}

/// Shard `a.safetensors` with tensor `x`, and an index with this text.
fn index(name: &'static str, text: impl Into<String>, message: &'static str) -> Case {
    let text = text.into();
    let make = move |folder: &Path| {
        shard(folder, "a.safetensors", &["x"]);
        fs::write(folder.join(INDEX), &text).unwrap();
    };
    case(name, make, RUN, 1, message, "")
}

fn map(name: &'static str, map: Value, message: &'static str) -> Case {
    index(name, json!({ "metadata": {}, "weight_map": map }).to_string(), message)
}

#[test]
fn invalid_indices() {
    let unmapped = |folder: &Path| {
        shard(folder, "a.safetensors", &["x", "y"]);
        fs::write(folder.join(INDEX), r#"{"weight_map":{"x":"a.safetensors"}}"#).unwrap();
    };
    let unlisted = |folder: &Path| {
        shard(folder, "model-00001-of-00002.safetensors", &["x"]);
        shard(folder, "model-00002-of-00002.safetensors", &["y"]);
        shard(folder, "model-00001-of-00003.safetensors", &["z"]);
        fs::write(folder.join(INDEX), r#"{"weight_map":{"x":"model-00001-of-00002.safetensors"}}"#).unwrap();
    };
    let twice = |folder: &Path| {
        shard(folder, "a.safetensors", &["x"]);
        shard(folder, "b.safetensors", &["x", "y"]);
        fs::write(folder.join(INDEX), r#"{"weight_map":{"x":"a.safetensors","y":"b.safetensors"}}"#).unwrap();
    };
    check([
        map("a missing shard", json!({ "x": "a.safetensors", "y": "b.safetensors" }), "index.json: lists the shard `b.safetensors`, which does not exist"),
        map("no tensors", json!({}), "in/model.safetensors.index.json: its `weight_map` lists no tensor; download the model again"),
        map("a path outside", json!({ "x": "../a.safetensors" }), "tensor `x` points outside the folder: `../a.safetensors`"),
        map("a path inside another folder", json!({ "x": "b/a.safetensors" }), "tensor `x` points outside the folder"),
        map("a path of another system", json!({ "x": "b\\a.safetensors" }), "tensor `x` points outside the folder"),
        map("an absolute path", json!({ "x": "/a.safetensors" }), "tensor `x` points outside the folder: `/a.safetensors`"),
        map("the parent folder", json!({ "x": ".." }), "tensor `x` points outside the folder"),
        map("no file name", json!({ "x": "" }), "tensor `x` points outside the folder"),
        map("a tensor that its shard lacks", json!({ "x": "a.safetensors", "y": "a.safetensors" }), "tensor `y` is not in its shard in/a.safetensors"),
        map("a shard that is a number", json!({ "x": 1 }), "not an index of shards: invalid type: integer `1`"),
        case(
            "a tensor that the index lacks",
            unmapped,
            RUN,
            1,
            "in/a.safetensors: tensor `y` is not listed for this shard in in/model.safetensors.index.json",
            "",
        ),
        case(
            "a shard that the index lacks",
            unlisted,
            "inspect in",
            1,
            "in/model.safetensors.index.json: does not list the shard `model-00002-of-00002.safetensors`, which is in its folder",
            "",
        ),
        case("a tensor in two shards", twice, RUN, 1, "in/b.safetensors: tensor `x` is not listed for this shard", ""),
        index("not JSON", "{", "in/model.safetensors.index.json: not an index of shards: EOF"),
        index("a list", "[]", "not an index of shards"),
        index("no map", r#"{"metadata":{}}"#, "not an index of shards: missing field `weight_map`"),
        index("nested too deeply", format!("{{\"weight_map\":{}", "[".repeat(100_000)), "not an index of shards"),
    ]);
}

#[test]
fn folders_without_a_model() {
    let empty = |folder: &Path| fs::create_dir(folder.join("in")).unwrap();
    let pytorch = |folder: &Path| {
        fs::create_dir(folder.join("in")).unwrap();
        fs::write(folder.join("in/pytorch_model.bin"), "weights").unwrap();
    };
    let several = |folder: &Path| {
        shard(folder, "a.safetensors", &["x"]);
        shard(folder, "b.safetensors", &["y"]);
    };
    let uploading = |folder: &Path| {
        model_in(folder);
        fs::write(folder.join("in/compress.unfinished"), "locked").unwrap();
    };
    let unfinished = "in: is being written by another run, or contains the leftovers of a killed run (compress.unfinished exists)";
    let none = "in: no model.safetensors, no model.safetensors.index.json and no other .safetensors or PyTorch weight file";
    check([
        case("nothing there", |_| (), RUN, 1, "cannot open in: No such file or directory", ""),
        case("an empty folder", empty, RUN, 1, none, ""),
        case("weights of PyTorch that are none", pytorch, RUN, 1, "in/pytorch_model.bin: not a PyTorch file", ""),
        case(
            "several files without an index",
            several,
            RUN,
            1,
            "in: several .safetensors files and no model.safetensors.index.json; specify the file to open",
            "",
        ),
        case(
            "one file of a sharded model",
            |folder| shard(folder, "model-00001-of-00002.safetensors", &["x"]),
            RUN,
            1,
            "in: has file 1 of the 2 of a model, but neither the others nor model.safetensors.index.json; complete the download",
            "",
        ),
        case("an upload", uploading, RUN, 1, unfinished, "wait until that run has ended"),
        case("an upload to compare", uploading, "diff in in", 1, unfinished, "wait until that run has ended"),
        case("nothing to inspect", |_| (), "inspect in", 1, "cannot open in", ""),
        case("nothing to compare", model_in, "diff in other", 1, "cannot open other", ""),
        case("nothing to verify", model_in, "verify in", 1, "in/report.json: the report does not exist", "specify the output folder of a run"),
        case("nothing to densify", empty, "densify in -o out", 1, none, ""),
    ]);
}

#[test]
fn a_pipe_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("in");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut child = command(folder.path()).args(RUN.split(' ')).stderr(Stdio::piped()).spawn().unwrap();
    let mut waited = false;
    while child.try_wait().unwrap().is_none() {
        // Opens the pipe only if a process is blocked at the other end, and unblocks it.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        waited |= fs::File::options().write(true).custom_flags(nonblocking).open(&pipe).is_ok();
        std::thread::sleep(Duration::from_millis(1));
    }
    let run = Run::from(child.wait_with_output().unwrap());
    assert!(!waited && run.code == 1 && run.stderr.contains("in: not a regular file"), "{}", run.stderr);
}

fn model_in(folder: &Path) {
    model(&folder.join("in"));
}

fn config(name: &'static str, text: &'static [u8], message: &'static str) -> Case {
    let make = move |folder: &Path| {
        model_in(folder);
        fs::write(folder.join("in/config.json"), text).unwrap();
    };
    case(name, make, RUN, 1, message, "")
}

fn quantization(name: &'static str, quantization: Value, message: &'static str) -> Case {
    let make = move |folder: &Path| {
        model_of(&folder.join("in"), &json!({ "model_type": "bert", "quantization_config": quantization }), &[floats("x.weight", &[4, 4])]);
    };
    case(name, make, RUN, 1, message, "start from the original checkpoint")
}

fn group(group: Value) -> Value {
    json!({ "quant_method": "compressed-tensors", "config_groups": { "group_0": group } })
}

fn described(key: &str, value: Value) -> Value {
    json!({ "quant_method": "compressed-tensors", "config_groups": {}, key: value })
}

/// Weights that contradict the description of their quantization, as other tools would read it.
#[test]
fn quantized_weights_and_their_description() {
    let row = |name: &str| tensor(name, "I8", &[2, 8], &[1; 16]);
    let scales = || floats("x.weight_scale", &[2, 1]);
    let described = |weights: Value, ignore: Value| {
        let group = json!({ "targets": ["Linear"], "weights": weights });
        json!({ "quant_method": "compressed-tensors", "config_groups": { "group_0": group }, "ignore": ignore })
    };
    let of = |name, quantization: Value, tensors: Vec<Tensor>, message: &'static str| {
        let make = move |folder: &Path| {
            model_of(&folder.join("in"), &json!({ "model_type": "bert", "quantization_config": quantization }), &tensors);
        };
        let hint = match message {
            message if message.ends_with("is missing") => "the checkpoint is incomplete",
            message if message.ends_with("unquantized") => "remove `quantization_config` if the weights are meant to be floats",
            _ => "correct `quantization_config` in config.json",
        };
        case(name, make, RUN, 1, message, hint)
    };
    let (int8, zeros) = (json!({ "num_bits": 8 }), json!({ "num_bits": 8, "symmetric": false }));
    check([
        of("codes without scales", described(int8.clone(), json!([])), vec![row("x.weight")], "tensor `x.weight_scale`: is missing"),
        of("no zero points", described(zeros, json!([])), vec![row("x.weight"), scales()], "tensor `x.weight_zero_point`: is missing"),
        of(
            "zero points of symmetric weights",
            described(int8.clone(), json!([])),
            vec![row("x.weight"), scales(), tensor("x.weight_zero_point", "I8", &[2, 1], &[1; 2])],
            "tensor `x.weight_zero_point`: is stored, but config.json specifies symmetric quantization",
        ),
        of(
            "an ignored module",
            described(int8.clone(), json!(["re:.*x$"])),
            vec![row("x.weight"), scales()],
            "tensor `x.weight`: is quantized, but `re:.*x$` in `ignore` of config.json excludes it from quantization",
        ),
        of("no group", described(Value::Null, json!([])), vec![row("x.weight"), scales()], "config.json specifies no quantization of its group's weights"),
        of("floats", described(int8, json!([])), vec![floats("x.weight", &[2, 8])], "in a model whose weights are all stored unquantized"),
    ]);
}

#[test]
fn configurations() {
    check([
        config("a list", b"[]", "in/config.json: not a JSON object: invalid type: sequence"),
        config("a string", b"\"bert\"", "in/config.json: not a JSON object: invalid type: string"),
        config("cut off", b"{\"model_type\":", "in/config.json: not a JSON object: EOF while parsing a value at line 1 column 14"),
        config("empty", b"", "in/config.json: not a JSON object: EOF"),
        config("not UTF-8", b"{\"model_type\":\"\xff\"}", "cannot read in/config.json: stream did not contain valid UTF-8"),
        quantization("another method", json!({ "quant_method": "hqq" }), "in/config.json: quantization method `hqq` is not supported"),
        quantization(
            "ModelOpt",
            json!({ "quant_method": "modelopt", "quant_algo": "W4A8_AWQ" }),
            "in/config.json: `quant_algo` of \"W4A8_AWQ\" in a description by ModelOpt is not supported",
        ),
        case(
            "ModelOpt in a separate file",
            |folder| {
                model_of(&folder.join("in"), &json!({ "model_type": "bert" }), &[floats("x.weight", &[4, 4])]);
                fs::write(folder.join("in/hf_quant_config.json"), json!({ "quantization": { "quant_algo": "MXFP8" } }).to_string()).unwrap();
            },
            RUN,
            1,
            "in/hf_quant_config.json: `quant_algo` of \"MXFP8\" in a description by ModelOpt is not supported",
            "start from the original checkpoint",
        ),
        quantization(
            "GPTQ in the order of a GPU's tiles",
            json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin" }),
            "in/config.json: `checkpoint_format` of \"marlin\" is not supported",
        ),
        quantization("a method without a name", json!({}), "in/config.json: quantization method `unknown` is not supported"),
        quantization(
            "nine bits",
            group(json!({ "weights": { "num_bits": 9, "type": "int" } })),
            "in/config.json: weights of 9 bits, type \"int\" is not supported",
        ),
        quantization("five-bit floats", group(json!({ "weights": { "num_bits": 5, "type": "float" } })), "weights of 5 bits, type \"float\" is not supported"),
        quantization(
            "FP4 activations in groups of 64",
            group(json!({ "input_activations": { "num_bits": 4, "type": "float", "dynamic": true, "strategy": "group", "group_size": 64 } })),
            "in/config.json: `strategy` of \"group\" for input_activations is not supported",
        ),
        // Scales of groups are floats or powers of two.
        quantization(
            "activations with E5M2 scales",
            group(
                json!({ "input_activations": { "num_bits": 8, "type": "float", "dynamic": true, "strategy": "group", "group_size": 32, "scale_dtype": "torch.float8_e5m2" } }),
            ),
            "in/config.json: `scale_dtype` of \"torch.float8_e5m2\" for input_activations is not supported",
        ),
        quantization(
            "static activations",
            group(json!({ "weights": { "num_bits": 8, "type": "int" }, "input_activations": { "num_bits": 8, "dynamic": false, "strategy": "channel" } })),
            "in/config.json: static scales for activations by \"channel\" is not supported",
        ),
        quantization(
            "a scale for all tokens",
            group(json!({ "weights": { "num_bits": 8 }, "input_activations": { "num_bits": 8, "dynamic": true, "strategy": "tensor" } })),
            "in/config.json: `strategy` of \"tensor\" for input_activations is not supported",
        ),
        quantization(
            "activations of four bits",
            group(json!({ "weights": { "num_bits": 8 }, "input_activations": { "num_bits": 4, "dynamic": true, "strategy": "token" } })),
            "in/config.json: `num_bits` of 4 for input_activations is not supported",
        ),
        quantization(
            "inputs of weights that are not quantized",
            group(json!({ "targets": ["Linear"], "input_activations": { "num_bits": 8, "type": "float", "dynamic": true, "strategy": "token" } })),
            "in/config.json: quantization of `input_activations` without `weights` in `group_0` of `config_groups` is not supported",
        ),
        quantization("outputs", group(json!({ "output_activations": { "num_bits": 8 } })), "in/config.json: quantized `output_activations` is not supported"),
        quantization("another key of a group", group(json!({ "rotation": true })), "in/config.json: `rotation` of a config group is not supported"),
        quantization("a preset", group(json!(["Linear"])), "in/config.json: the preset of a config group for [\"Linear\"] is not supported"),
        quantization("frozen", described("quantization_status", json!("frozen")), "in/config.json: `quantization_status` of \"frozen\" is not supported"),
        quantization(
            "rotations",
            described("transform_config", json!({ "config_groups": { "R1": {} } })),
            "in/config.json: `transform_config` is not supported",
        ),
        quantization(
            "a cache with a scale for each channel",
            described("kv_cache_scheme", json!({ "num_bits": 8, "type": "float", "strategy": "channel" })),
            "in/config.json: `kv_cache_scheme` by \"channel\" is not supported",
        ),
        quantization(
            "a bitmask",
            described("sparsity_config", json!({ "format": "sparse-bitmask", "targets": ["Linear"] })),
            "in/config.json: sparse weights in the format \"sparse-bitmask\" is not supported",
        ),
        quantization(
            "a bitmask of 2:4",
            described("format", json!("sparse-24-bitmask")),
            "in/config.json: sparse weights in the format \"sparse-24-bitmask\" is not supported",
        ),
    ]);
}

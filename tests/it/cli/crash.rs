//! Kills, signals and full disks: the output is complete or missing, and no temporary files remain.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::support::{METADATA, Run, command, f32s, file, floats, model, names, ok, raw_file, snapshot, work_folders};

/// Bytes of each of the four tensors of [`large`].
const EACH: u64 = 1 << 28;

/// A sparse checkpoint of 1 GiB of zeros, large enough for a run to be interrupted.
fn large(path: &Path) {
    let entry = |i: u64| format!("\"layers.{i}.weight\":{{\"dtype\":\"F32\",\"shape\":[8192,8192],\"data_offsets\":[{},{}]}}", i * EACH, (i + 1) * EACH);
    raw_file(path, format!("{{{}}}", (0..4).map(entry).collect::<Vec<_>>().join(",")).as_bytes(), &[]);
    let header = fs::metadata(path).unwrap().len();
    fs::File::options().write(true).open(path).unwrap().set_len(header + 4 * EACH).unwrap();
}

/// Starts a run over the large checkpoint and waits until weights are being written.
fn started(folder: &Path, args: &str) -> (Child, PathBuf) {
    large(&folder.join("large"));
    let mut child = command(folder).args(args.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    loop {
        if let Some(work) = work_folders(folder).into_iter().find(|work| fs::metadata(work.join("new/model.safetensors")).is_ok_and(|m| m.len() > 1 << 20)) {
            return (child, work);
        }
        if child.try_wait().unwrap().is_some() {
            panic!("`{args}` was over before it could be stopped: {}", Run::from(child.wait_with_output().unwrap()).stderr);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn stop(child: Child, signal: Signal) -> Run {
    kill_process(Pid::from_child(&child), signal).unwrap();
    child.wait_with_output().unwrap().into()
}

/// A folder, on a disk with enough space, with a small model `in`.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    model(&folder.path().join("in"));
    folder
}

#[test]
fn a_kill_leaves_no_output_and_the_next_run_cleans_up() {
    let folder = prepared();
    let (child, work) = started(folder.path(), "cast large -o out");
    assert_eq!(stop(child, Signal::KILL).code, -1);
    assert!(work.exists() && !folder.path().join("out").exists());
    ok(folder.path(), "cast in -o out");
    assert_eq!(names(folder.path()), ["in", "large", "out"]);
    ok(folder.path(), "verify out");
}

#[test]
fn a_kill_preserves_the_existing_output() {
    let folder = prepared();
    ok(folder.path(), "cast in -o out");
    let before = snapshot(&folder.path().join("out"));
    let (child, work) = started(folder.path(), "quantize-dynamic large -o out --force");
    stop(child, Signal::KILL);
    assert!(work.exists());
    assert_eq!(snapshot(&folder.path().join("out")), before);
    ok(folder.path(), "cast in -o out --to f16 --force");
    assert_eq!(names(folder.path()), ["in", "large", "out"]);
    ok(folder.path(), "verify out");
}

#[test]
fn a_signal_ends_a_run_with_a_message_and_without_leftovers() {
    for (signal, args) in
        [(Signal::INT, "cast large -o out"), (Signal::TERM, "chain large -o out -- cast --to f16 -- quantize-dynamic"), (Signal::HUP, "densify large -o out")]
    {
        let folder = prepared();
        let (child, _) = started(folder.path(), args);
        let run = stop(child, signal);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{args}");
        assert!(run.stderr.ends_with("error: interrupted; nothing was written\n"), "{args}\n{}", run.stderr);
        assert_eq!(names(folder.path()), ["in", "large"]);
    }
}

/// Kills passes that run block by block in each block, also one whose weights become blocks of a GGUF file.
/// The weights of later blocks are corrected for inputs that earlier ones have changed, so that they depend
/// on everything before them.
#[test]
#[cfg(feature = "run")]
fn a_killed_pass_yields_the_result_of_an_uninterrupted_one() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama");
    let details = killed_and_resumed(&golden, &["decompose", "--rank", "0.85"], "model.safetensors");
    let corrected = details["layers"].as_array().unwrap().iter().filter(|layer| layer["propagation"] == 0.25).count();
    assert!(corrected > 5, "{details}");
    // Rows of complete blocks.
    let model = crate::low_bits::llama(folder.path());
    let details = killed_and_resumed(&model, &["quantize", "--scheme", "Q4_K_M", "--method", "gptq", "--export", "gguf"], "model.gguf");
    assert_eq!(details["quantized"], 14, "{details}");
}

/// Runs a pass on calibration samples, and again with a kill in each block and `--resume`. The weights must
/// be the same. Returns the details of the pass in the report.
#[cfg(feature = "run")]
fn killed_and_resumed(model: &Path, args: &[&str], weights: &str) -> serde_json::Value {
    use std::io::{BufRead, BufReader};

    use candle_core::{Device, Tensor};

    use crate::cli::support::read_json;
    let ([pass, options @ ..], folder) = (args, tempfile::tempdir().unwrap()) else { panic!("no pass") };
    let path = folder.path();
    let ids = Tensor::from_vec((0..384i64).map(|i| i * i * 7 % 41 % 40).collect::<Vec<_>>(), (48, 8), &Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids.ones_like().unwrap())];
    candle_core::safetensors::save(&arrays.into(), path.join("ids.safetensors")).unwrap();
    let start = |out: &str| {
        let args = ["--calibration", "ids.safetensors", "--resume", "--threads", "2", "--log-format", "json", "-o", out];
        let mut command = command(path);
        command.arg(pass).arg(model).args(options).args(args);
        // Cached results of one run would make another one too short to be killed.
        command.env("COMPRESS_CACHE", path.join(format!("cache-{out}"))).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let finish = |out: &str| {
        let done = start(out).wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    finish("whole");
    let mut killed = 0;
    for block in 2..=5 {
        let mut child = start("parts");
        let stage = format!("\"Block {block} of ");
        // All lines, if the run ends before it is killed.
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let is_reached = lines.any(|line| line.contains(&stage));
        // A signal that the program handles ends it with a message.
        kill_process(Pid::from_child(&child), if block == 3 { Signal::INT } else { Signal::KILL }).unwrap();
        let rest = lines.collect::<String>();
        child.wait().unwrap();
        if block == 3 && is_reached && !path.join("parts").exists() {
            assert!(rest.contains("interrupted; finished work is saved in") && rest.contains("run it again with `--resume`"), "{rest}");
        }
        if path.join("parts").exists() {
            break;
        }
        killed += usize::from(is_reached);
    }
    assert!(killed > 0, "no run of {pass} lived long enough to be killed");
    if !path.join("parts").exists() {
        finish("parts");
    }
    let details = |out: &str| read_json(&path.join(out).join("report.json"))["passes"][0]["details"].clone();
    assert_eq!(details("whole"), details("parts"));
    let [whole, parts] = ["whole", "parts"].map(|out| fs::read(path.join(out).join(weights)).unwrap());
    assert!(whole == parts, "{pass}");
    assert!(!path.join("parts.unfinished").exists());
    details("whole")
}

/// Writes a model with an infinite loop. With `doubling`, its value doubles in each iteration.
#[cfg(feature = "run")]
fn endless(path: &Path, doubling: bool) {
    use compress_onnx::proto::{
        AttributeProto, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorTypeProto, TypeProto, ValueInfoProto,
    };
    use prost::Message;
    let port = |name: &str, ty: DataType| {
        let shape = (ty != DataType::Float).then(Default::default);
        let tensor_type = Some(TensorTypeProto { elem_type: Some(ty as i32), shape });
        ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
    };
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: Some(op.into()),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        ..NodeProto::default()
    };
    let step =
        if doubling { NodeProto { attribute: vec![AttributeProto::int("axis", 0)], ..node("Concat", &["a", "a"], "b") } } else { node("Neg", &["a"], "b") };
    let body = GraphProto {
        name: Some("body".into()),
        node: vec![node("Identity", &["go"], "goes"), step],
        input: vec![port("i", DataType::Int64), port("go", DataType::Bool), port("a", DataType::Float)],
        output: vec![port("goes", DataType::Bool), port("b", DataType::Float)],
        ..GraphProto::default()
    };
    let trips = TensorProto { name: Some("trips".into()), data_type: Some(DataType::Int64 as i32), int64_data: vec![1 << 62], ..TensorProto::default() };
    let weight =
        TensorProto { name: Some("w".into()), data_type: Some(DataType::Float as i32), dims: vec![4, 4], float_data: vec![0.5; 16], ..TensorProto::default() };
    let body = AttributeProto { g: Some(body), i: None, r#type: Some(5), ..AttributeProto::int("body", 0) };
    let graph = GraphProto {
        name: Some("endless".into()),
        node: vec![node("MatMul", &["x", "w"], "m"), NodeProto { attribute: vec![body], ..node("Loop", &["trips", "", "m"], "y") }],
        initializer: vec![trips, weight],
        input: vec![ValueInfoProto { r#type: port("x", DataType::Float).r#type, ..port("x", DataType::Float) }],
        output: vec![port("y", DataType::Float)],
        ..GraphProto::default()
    };
    let mut model = ModelProto {
        ir_version: Some(8),
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
        ..ModelProto::default()
    };
    let size = |size| compress_onnx::proto::DimensionProto { value: Some(compress_onnx::proto::Dimension::DimValue(size)), denotation: None };
    let input = model.graph.as_mut().unwrap().input[0].r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
    input.shape = Some(compress_onnx::proto::TensorShapeProto { dim: vec![size(2), size(4)] });
    fs::write(path, model.encode_to_vec()).unwrap();
}

#[test]
#[cfg(feature = "run")]
fn signals_end_a_run_of_onnx_runtime() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = prepared();
    endless(&folder.path().join("loop.onnx"), false);
    let handles_signals = |child: &Child| {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(|mask| u64::from_str_radix(mask.trim(), 16).unwrap());
        // Not all systems have this file. The mask begins with signal 1, and SIGTERM is 15.
        caught.is_none_or(|caught| caught >> 14 & 1 == 1)
    };
    let run = || {
        let mut command = command(folder.path());
        let child = command.args(["quantize-dynamic", "loop.onnx", "-o", "out.onnx"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert!((0..60).any(|_| {
            std::thread::sleep(Duration::from_secs(1));
            handles_signals(&child)
        }));
        child
    };
    let (child, begun) = (run(), std::time::Instant::now());
    // Signals that arrive together are one request, as those of `timeout`. Both are delivered when the
    // process continues.
    for signal in [Signal::STOP, Signal::INT, Signal::TERM] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    let stopped = stop(child, Signal::CONT);
    assert!(stopped.code == 1 && stopped.stderr.ends_with("error: interrupted; nothing was written\n"), "{}", stopped.stderr);
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(names(folder.path()), ["in", "loop.onnx"]);
}

/// A value that doubles indefinitely is stopped at the memory limit for a file of this size, before
/// memory is exhausted.
#[test]
#[cfg(feature = "run")]
fn values_that_double_are_stopped_at_a_memory_limit() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = prepared();
    let path = folder.path();
    endless(&path.join("loop.onnx"), true);
    let row: Vec<f32> = vec![0.5; 8];
    file(&path.join("rows.safetensors"), METADATA, &[f32s("x", &[2, 4], &row)]);
    // Address space for three times the limit, which the last operator before the stop may use, and for
    // the threads.
    let limited = |args: &str| -> Run {
        let script = "ulimit -v 12000000 && exec \"$0\" \"$@\"";
        let mut limited = Command::new("sh");
        limited.args(["-c", script, env!("CARGO_BIN_EXE_compress")]).args(args.split(' ')).current_dir(path);
        limited.output().unwrap().into()
    };
    let stopped = "takes more than 1024 MB of memory";
    let run = limited("quantize-dynamic loop.onnx -o out");
    let report = fs::read_to_string(path.join("out/report.json")).unwrap_or_default();
    assert!(run.code == 0 && report.contains(stopped), "{}\n{report}", run.stderr);
    let run = limited("verify out");
    assert!(run.code == 0 && run.stdout.contains(stopped), "{}{}", run.stdout, run.stderr);
    let run = limited("eval loop.onnx --against loop.onnx --arrays rows.safetensors --task fidelity --memory 1MB");
    assert!(run.code != 0 && run.stderr.contains(stopped), "{}{}", run.stdout, run.stderr);
}

#[test]
fn a_signal_preserves_the_existing_output() {
    let folder = prepared();
    ok(folder.path(), "cast in -o out");
    let before = snapshot(&folder.path().join("out"));
    let (child, _) = started(folder.path(), "cast large -o out --force --log-format json");
    let run = stop(child, Signal::INT);
    assert!(run.code == 1 && run.stderr.contains(r#"{"event":"error","message":"interrupted; nothing was written""#), "{}", run.stderr);
    assert_eq!(snapshot(&folder.path().join("out")), before);
    assert_eq!(names(folder.path()), ["in", "large", "out"]);
}

#[test]
fn a_run_does_not_touch_the_files_of_another() {
    let folder = prepared();
    let (child, work) = started(folder.path(), "cast large -o out");
    ok(folder.path(), "cast in -o out");
    assert!(work.join("new/model.safetensors").exists());
    stop(child, Signal::INT);
    assert_eq!(names(folder.path()), ["in", "large", "out"]);
    ok(folder.path(), "verify out");
}

/// Runs the binary with an output on a temporary disk of one megabyte. stdout lists
/// the files on the disk afterwards.
fn on_a_small_disk(folder: &Path, args: &str) -> Run {
    const SCRIPT: &str = r#"mount -t tmpfs -o size=1m none disk && if [ -d old ]; then cp -r old disk/out; fi && "$0" "$@" > /dev/null; code=$?; find disk -mindepth 1 | sort; exit $code"#;
    let namespace = ["-m", "-rm"]
        .into_iter()
        .find(|flags| Command::new("unshare").args([flags, "sh", "-c", "mount -t tmpfs none /mnt"]).status().is_ok_and(|s| s.success()));
    let namespace =
        namespace.expect("this test mounts a small disk in a new namespace: run it as root, or on a system that allows unprivileged user namespaces");
    fs::create_dir(folder.join("disk")).unwrap();
    let mut run = Command::new("unshare");
    run.args([namespace, "sh", "-c", SCRIPT, env!("CARGO_BIN_EXE_compress")]).args(args.split(' ')).current_dir(folder);
    run.output().unwrap().into()
}

/// Runs a command that must fail because the disk is full, and must not change the disk.
fn check(prepare: impl Fn(&Path), args: &str, message: &str, hint: &str) -> Run {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let run = on_a_small_disk(folder.path(), args);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{}", run.stderr);
    assert!(run.stderr.contains(message) && run.stderr.contains(hint), "{}", run.stderr);
    run
}

/// A model whose weights do not fit the small disk.
fn wide(folder: &Path) {
    file(&folder.join("in/model.safetensors"), METADATA, &[floats("x.weight", &[1024, 1024])]);
}

#[test]
fn outputs_that_do_not_fit_are_rejected_before_writing() {
    let run = check(wide, "cast in -o disk/out --log-format json", "needs 2.10 MB, but only 1.04 MB are free on this disk", "choose a folder on another disk");
    assert!(!run.stderr.contains("Writing"), "{}", run.stderr);
    let large_tokenizer = |folder: &Path| {
        model(&folder.join("in"));
        fs::write(folder.join("in/tokenizer.json"), vec![b' '; 2 << 20]).unwrap();
    };
    let run = check(
        large_tokenizer,
        "cast in -o disk/out --log-format json",
        "needs 2.10 MB, but only 1.04 MB are free on this disk",
        "choose a folder on another disk",
    );
    assert!(!run.stderr.contains("Writing"), "{}", run.stderr);
}

#[test]
fn a_full_disk_is_cleaned_up() {
    let full = "the disk is full; the incomplete output was removed";
    check(wide, "cast in -o disk/out --layout sparse", "No space left on device", full);
    check(wide, "cast in -o disk/new/deep/out --layout sparse", "No space left on device", full);
}

#[test]
fn a_full_disk_preserves_the_existing_output() {
    let folder = tempfile::tempdir().unwrap();
    wide(folder.path());
    file(&folder.path().join("small"), METADATA, &[f32s("x", &[1], &[1.0])]);
    ok(folder.path(), "cast small -o old");
    let run = on_a_small_disk(folder.path(), "cast in -o disk/out --force --layout sparse");
    assert!(run.code == 1 && run.stderr.contains("No space left on device"), "{}", run.stderr);
    let kept: Vec<String> = names(&folder.path().join("old")).iter().map(|name| format!("disk/out/{name}\n")).collect();
    assert_eq!(run.stdout, format!("disk/out\n{}", kept.concat()));
}

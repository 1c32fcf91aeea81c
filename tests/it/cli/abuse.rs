//! Malicious inputs, and the checks that stop each of them.
//!
//! | attempt | stopped by |
//! | --- | --- |
//! | an IDX file that decompresses to gigabytes | samples are read one at a time, and the header is compared with the data |
//! | an image of 60,000 by 60,000 pixels in a few kilobytes | a memory limit of the decoder |
//! | a small image that would be resized to gigabytes, a processor configuration that requests it | a limit on pixels; ranges of sizes are checked |
//! | an array in an .npz that decompresses to gigabytes | its shape is compared with the model's before elements are read |
//! | an array whose header declares rows or a header of gigabytes | rows are limited to 2 GiB and buffers grow while reading; headers are limited |
//! | arrays without rows, images without pixels, with other sizes that overflow | empty samples are rejected |
//! | an .onnx file with constants that expand to terabytes when folded | sizes are inferred before anything is computed (`onnx/lift/folding.rs`) |
//! | an .onnx file of millions of empty messages, which need hundreds of bytes each when decoded | messages are counted before they are decoded (`onnx/skeleton.rs`) |
//! | a PyTorch pickle that calls a program, decompresses to gigabytes, or nests without limit | calls are recorded but not executed; sizes are limited, and values are stored in a list (`store/pytorch`) |
//! | a GGUF file that declares 2^63 strings, array elements, keys or tensors, or tensors that overlap or exceed the file | every number is compared with the rest of the file (`store/gguf`) |
//! | a GGUF model with a billion layers, too many heads, or invalid token ids | layers are counted by their tensors; token ids are compared with the vocabulary |
//! | a GGUF tensor of millions of experts of one value | its shape is compared with the number of experts before it is split |
//! | texts truncated to fewer tokens than the special ones, windows of 2^62 tokens | limits are compared with the special tokens; sums saturate |
//! | a YAML file whose aliases expand to millions of values | a limit on expanded aliases (`bad_input/recipes.rs`) |
//! | a shard or a data file outside of the folder | paths in an index must be file names (`bad_input/folders.rs`) |
//! | a tokenizer that is a link to a secret, which would be copied to the output | links that leave the folder are rejected, except those of content-addressed caches |
//! | a billion layers, sizes of 2^63, a width of 0 in config.json | layers are built only if their tensors exist; ranges of sizes are checked |
//! | the same for a student with new weights, for which no tensors exist | limits on the values of a graph and the elements of a weight |
//! | a graph.json with sizes whose product overflows | checked multiplication |
//! | a tokenizer whose regular expression backtracks exponentially | a limit on backtracking |
//! | headers that exceed the file, offsets that overlap | `bad_input/files.rs`, `bad_input/spellings.rs` |
//! | two concurrent runs with the same output folder | the folder is renamed atomically; the second rename fails |
//! | the input is deleted, truncated or changed while it is read | reads fail with the name of the file; the output is discarded |
//! | a full disk, a kill, Ctrl-C | `crash.rs` |

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use compress_core::store::DType;
use compress_core::store::gguf::{self, GgufFile, Kind};
use compress_onnx::proto::{
    DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use prost::Message;
use serde_json::{Value, json};

use crate::cli::support::{METADATA, Run, command, compress, file, floats, ok, snapshot, tensor};
use crate::common::golden;

/// A folder with a copy of a small model in `in`.
fn with_model(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("in")).unwrap();
    for entry in fs::read_dir(golden("models").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join("in").join(path.file_name().unwrap())).unwrap();
    }
    folder
}

/// Runs with a memory limit. The error message must contain `words`, and no file may have changed.
fn refused(folder: &Path, args: &str, words: &str) {
    let before = snapshot(folder);
    let script = "ulimit -v 3000000 && exec \"$0\" \"$@\"";
    let output =
        std::process::Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_compress")]).args(args.split(' ')).current_dir(folder).output().unwrap();
    let run = Run::from(output);
    assert!(run.code != 0 && run.stderr.contains("error: ") && run.stderr.contains(words), "{args}\nexit code {}\n{}", run.code, run.stderr);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    assert_eq!(snapshot(folder), before, "{args}");
}

fn gzip(path: &Path, start: &[u8], zeros: usize) {
    let mut out = flate2::write::GzEncoder::new(File::create(path).unwrap(), flate2::Compression::best());
    out.write_all(start).unwrap();
    let block = vec![0; 1 << 20];
    for _ in 0..zeros >> 20 {
        out.write_all(&block).unwrap();
    }
    out.finish().unwrap();
}

fn idx(kind: u32, sizes: &[u32]) -> Vec<u8> {
    [kind].iter().chain(sizes).flat_map(|number| number.to_be_bytes()).collect()
}

#[test]
fn data_that_expands() {
    let folder = with_model("vit-image-classification");
    let path = folder.path();
    gzip(&path.join("many.gz"), &idx(0x803, &[4_000_000_000, 3000, 3000]), 64 << 20);
    gzip(&path.join("labels.gz"), &idx(0x801, &[4_000_000_000]), 0);
    refused(path, "eval in --data many.gz --labels labels.gz", "labels.gz");
    let labels: Vec<u8> = idx(0x801, &[2]).into_iter().chain([0, 1]).collect();
    fs::write(path.join("two"), labels).unwrap();
    gzip(&path.join("wide.gz"), &idx(0x803, &[2, 60_000, 60_000]), 256 << 20);
    refused(path, "eval in --data wide.gz --labels two", "wide.gz");
    gzip(&path.join("overflow.gz"), &idx(0x803, &[u32::MAX, u32::MAX, u32::MAX]), 0);
    refused(path, "eval in --data overflow.gz --labels labels.gz", "gz");
}

#[test]
fn images_that_expand() {
    let folder = with_model("vit-image-classification");
    pictures(folder.path(), (60_000, 60_000), 8 << 20);
    refused(folder.path(), "eval in --data images", "a.png: is too large to decode");
}

/// The same small image for each of five classes.
fn pictures(folder: &Path, (width, height): (u32, u32), zeros: usize) {
    let chunk = |name: &[u8; 4], data: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(name);
        crc.update(data);
        [&(data.len() as u32).to_be_bytes()[..], name, data, &crc.sum().to_be_bytes()].concat()
    };
    let mut pixels = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    pixels.write_all(&vec![0; zeros]).unwrap();
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let image = [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &header), chunk(b"IDAT", &pixels.finish().unwrap()), chunk(b"IEND", b"")].concat();
    for class in 0..5 {
        fs::create_dir_all(folder.join(format!("images/{class}"))).unwrap();
        fs::write(folder.join(format!("images/{class}/a.png")), &image).unwrap();
    }
}

#[test]
fn images_that_expand_when_resized() {
    let folder = with_model("vit-image-classification");
    pictures(folder.path(), (12, 12), 12 * 37);
    refused(folder.path(), "eval in --data images --resize 4000000000 4000000000", "4000000000 x 4000000000");
    refused(folder.path(), "eval in --data images --resize 9223372036854775808 12", "9223372036854775808 x 12");
    let edge = |size: Value| json!({ "size": size, "do_center_crop": true, "crop_size": 12 });
    for (processor, words) in [
        (edge(json!({ "shortest_edge": 1u64 << 62 })), "`size`"),
        (edge(json!({ "height": 0, "width": 12 })), "`size`"),
        (json!({ "image_processor_type": "ConvNextImageProcessor", "size": { "shortest_edge": 12 }, "crop_pct": 0.0 }), "`crop_pct`"),
        (json!({ "size": 12, "image_std": [0, 0, 0] }), "`image_std`"),
        (edge(json!({ "shortest_edge": 30_000 })), "30000 x 30000"),
    ] {
        fs::write(folder.path().join("in/preprocessor_config.json"), processor.to_string()).unwrap();
        refused(folder.path(), "eval in --data images", words);
    }
    let folder = with_model("resnet-basic");
    pictures(folder.path(), (60_000, 1), 180_001);
    fs::write(folder.path().join("in/preprocessor_config.json"), edge(json!({ "shortest_edge": 384 })).to_string()).unwrap();
    refused(folder.path(), "eval in --data images", "384 x 23040000");
    fs::write(folder.path().join("in/preprocessor_config.json"), json!({ "size": { "height": 0, "width": 0 } }).to_string()).unwrap();
    refused(folder.path(), "eval in --data images", "`size`");
}

#[test]
fn constants_that_expand() {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: Some(op.into()),
        input: names(inputs),
        output: names(&[output]),
        ..NodeProto::default()
    };
    let value = |name: &str| {
        let dim = vec![DimensionProto { value: Some(Dimension::DimValue(4)), denotation: None }];
        let tensor = TensorTypeProto { elem_type: Some(DataType::Float as i32), shape: Some(TensorShapeProto { dim }) };
        ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type: Some(tensor), ..TypeProto::default() }), ..ValueInfoProto::default() }
    };
    let shape = TensorProto {
        name: Some("shape".into()),
        data_type: Some(DataType::Int64 as i32),
        dims: vec![3],
        int64_data: vec![1 << 20, 1 << 20, 4],
        ..TensorProto::default()
    };
    let graph = GraphProto {
        name: Some("swelling".into()),
        node: vec![
            node("ConstantOfShape", &["shape"], "zeros"),
            node("Cos", &["zeros"], "ones"),
            node("ReduceMax", &["ones"], "one"),
            node("Mul", &["x", "one"], "y"),
        ],
        initializer: vec![shape],
        input: vec![value("x")],
        output: vec![value("y")],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(13) }];
    let model = ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.onnx"), model.encode_to_vec()).unwrap();
    refused(folder.path(), "inspect in.onnx --graph", "(ConstantOfShape) creates at least 4398046511104 elements");
}

/// Nodes and value descriptions that are empty in the file.
#[test]
fn messages_that_expand() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (field, name) in [(0x0a, "nodes.onnx"), (0x6a, "values.onnx")] {
        let graph: Vec<u8> = [field, 0].repeat(4_000_000);
        let mut length = Vec::new();
        prost::encode_length_delimiter(graph.len(), &mut length).unwrap();
        fs::write(path.join(name), [vec![0x08, 8, 0x3a], length, graph].concat()).unwrap();
        refused(path, &format!("inspect {name}"), "most of them are empty");
    }
}

#[test]
fn arrays_that_expand() {
    let folder = with_model("vit-image-classification");
    zipped(&folder.path().join("bomb.npz"), "pixel_values.npy", &npy("100000000, 3, 12, 12"), 128 << 20);
    refused(folder.path(), "eval in --data bomb.npz --task fidelity --against in", "bomb.npz");
}

/// The header of an array of floats.
fn npy(shape: &str) -> Vec<u8> {
    let header = format!("{:<117}\n", format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}"));
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes()].concat()
}

fn zipped(path: &Path, name: &str, start: &[u8], zeros: usize) {
    archived(path, name, start, zeros, zip::write::SimpleFileOptions::default().large_file(true));
}

/// An archive in the format of torch.save.
fn stored(path: &Path, name: &str, start: &[u8], zeros: usize) {
    archived(path, name, start, zeros, zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored));
}

fn archived(path: &Path, name: &str, start: &[u8], zeros: usize, options: zip::write::SimpleFileOptions) {
    let mut archive = zip::ZipWriter::new(File::create(path).unwrap());
    archive.start_file(name, options).unwrap();
    archive.write_all(start).unwrap();
    let block = vec![0; zeros.min(1 << 20)];
    (0..zeros.div_ceil(1 << 20)).for_each(|_| archive.write_all(&block).unwrap());
    archive.finish().unwrap();
}

#[test]
fn malicious_pickles() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("evil.pt");
    let call = b"cposix\nsystem\n(X\x0c\x00\x00\x00touch calledtR";
    let pickle = |before: &[u8], behind: &[u8]| [b"\x80\x02", before, call, behind].concat();
    stored(&path, "evil/data.pkl", &pickle(b"", b"."), 0);
    refused(folder.path(), "inspect evil.pt", "an object of class `posix.system`");
    stored(&path, "evil/data.pkl", &pickle(b"}X\x01\x00\x00\x00w", b"s."), 0);
    refused(folder.path(), "quantize-dynamic evil.pt -o out", "no named tensors");
    fs::write(&path, pickle(b"", b".")).unwrap();
    refused(folder.path(), "inspect evil.pt", "evil.pt");
    stored(&path, "evil/data.pkl", b"\x80\x02", 24 << 20);
    refused(folder.path(), "inspect evil.pt", "`data.pkl` of the archive has more than");
    let nested = |depth| [vec![b']'; depth], vec![b'a'; depth - 1], vec![b'.']].concat();
    stored(&path, "evil/data.pkl", &nested(2 << 20), 0);
    refused(
        folder.path(),
        "inspect evil.pt",
        "it contains another value, not a dictionary of tensors, and reading it would execute code; save the weights by name: torch.save(model.state_dict()",
    );
    stored(&path, "evil/data.pkl", &nested(6 << 20), 0);
    refused(folder.path(), "inspect evil.pt", "more than 4194304 values");
    // 16 MB of values in 16 kB.
    let options = zip::write::SimpleFileOptions::default();
    archived(&path, "evil/data.pkl", &nested(6 << 20), 0, options);
    refused(folder.path(), "inspect evil.pt", "`evil/data.pkl` of the archive is compressed");
}

/// An encoded metadata entry of a GGUF file: key, type and value.
fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&(name.len() as u64).to_le_bytes(), name.as_bytes(), &kind.to_le_bytes(), value].concat()
}

#[test]
fn gguf_with_too_many_experts() {
    let folder = tempfile::tempdir().unwrap();
    let file = GgufFile::open(&golden("gguf/mixtral.gguf")).unwrap();
    let mut tensors: Vec<_> = file.tensors.iter().map(|(name, weight)| (name.clone(), Kind::Plain(DType::F16), weight.shape.clone())).collect();
    tensors.iter_mut().find(|(name, ..)| name == "blk.0.ffn_up_exps.weight").unwrap().2 = vec![12_000_000, 1, 1];
    let (header, _) = gguf::header(&file.values.into_iter().collect::<Vec<_>>(), &tensors).unwrap();
    let evil = File::create(folder.path().join("evil.gguf")).unwrap();
    (&evil).write_all(&header).unwrap();
    evil.set_len(header.len() as u64 + (32 << 20)).unwrap();
    refused(folder.path(), "inspect evil.gguf", "tensor `blk.0.ffn_up_exps.weight`: has the shape [12000000, 1, 1], but there are 4 experts");
}

#[test]
fn malicious_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("evil.gguf");
    let whole = fs::read(golden("gguf/llama.gguf")).unwrap();
    let vocabulary = fs::read(golden("gguf/tokenizer-smollm.gguf")).unwrap();
    let huge = (1u64 << 63).to_le_bytes();
    let behind = |at: usize, bytes: &[u8]| [&whole[..at], bytes, &whole[at + bytes.len()..]].concat();
    let find = |whole: &[u8], name: &str| whole.windows(name.len()).position(|window| window == name.as_bytes()).unwrap() + name.len();
    // The value of a key, after its type.
    let with = |whole: &[u8], name: &str, bytes: &[u8]| {
        let at = find(whole, name) + 4;
        [&whole[..at], bytes, &whole[at + bytes.len()..]].concat()
    };
    for (bytes, words) in [
        (whole[..whole.len() - 1].to_vec(), "exceeds the file"),
        (whole[..200].to_vec(), "is it truncated?"),
        (behind(8, &huge), "tensors: 9223372036854775808 elements"),
        (behind(16, &huge), "keys: 9223372036854775808 elements"),
        (behind(24, &huge), "key 0: a string of 9223372036854775808 bytes"),
        (with(&whole, "llama.block_count", &u32::MAX.to_le_bytes()), "specifies 4294967295 layers"),
        (with(&whole, "llama.attention.head_count", &7u32.to_le_bytes()), "`llama.rope.dimension_count` of 8 with heads of 2"),
        (with(&whole, "llama.attention.head_count_kv", &3u32.to_le_bytes()), "not divisible into heads"),
        (with(&whole, "llama.embedding_length", &0u32.to_le_bytes()), "`llama.embedding_length` is missing or zero"),
        (with(&whole, "general.architecture", &[5, 0, 0, 0, 0, 0, 0, 0, b'h', b'a', b'r', b'm', b'!']), "the architecture `harm!`"),
        (with(&vocabulary, "bos_token_id", &u32::MAX.to_le_bytes()), "`tokenizer.ggml.bos_token_id`"),
        (with(&vocabulary, "tokenizer.ggml.tokens", &[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64]), "key `tokenizer.ggml.tokens`: 4611686018427387904 elements"),
    ] {
        fs::write(&path, bytes).unwrap();
        refused(folder.path(), "inspect evil.gguf", words);
    }
    // Keys that change the graph, and one with another type.
    let start = 24;
    for (extra, words) in [
        (key("llama.expert_count", 4, &8u32.to_le_bytes()), "`llama.expert_used_count` is missing or zero"),
        (key("llama.surprise", 7, &[1]), "`llama.surprise`, which is true"),
        (key("llama.rope.scaling.type", 8, &[&3u64.to_le_bytes()[..], b"odd"].concat()), "rope scaling `odd`"),
        (key("split.count", 2, &3u16.to_le_bytes()), "is one of 3 files of a model"),
        (key("tokenizer.ggml.tokens", 4, &3u32.to_le_bytes()), "`tokenizer.ggml.tokens` is 3, expected a list of texts"),
        (key("a", 9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat()), "is a list of lists"),
    ] {
        let keys = u64::from_le_bytes(whole[16..24].try_into().unwrap()) + 1;
        // The data must keep its offset modulo 32.
        let filler = (32 - (extra.len() + 21) % 32) % 32;
        let text = key("b", 8, &[&(filler as u64).to_le_bytes()[..], &vec![b' '; filler]].concat());
        let bytes = [&whole[..16], &(keys + 1).to_le_bytes(), &extra, &text, &whole[start..]].concat();
        fs::write(&path, bytes).unwrap();
        refused(folder.path(), "inspect evil.gguf", words);
    }
}

/// Dynamic sizes, and sizes next to a 0, are limited only by memory.
#[test]
fn arrays_that_claim_to_be_large() {
    let args = |file: &str| format!("eval in --data {file} --task fidelity --against in");
    let folder = with_model("resnet-basic");
    let path = folder.path();
    let large = 1usize << 40;
    zipped(&path.join("row.npz"), "pixel_values.npy", &npy("1, 3, 60000, 60000"), 1000);
    refused(path, &args("row.npz"), "array `pixel_values` has rows of shape [3, 60000, 60000]");
    zipped(&path.join("short.npz"), "pixel_values.npy", &npy("4, 3, 10000, 10000"), 1000);
    refused(path, &args("short.npz"), "array `pixel_values` is truncated: it should have 4 rows");
    zipped(&path.join("header.npz"), "pixel_values.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", 1000);
    refused(path, &args("header.npz"), "array `pixel_values`: the header has 4294967295 bytes");
    zipped(&path.join("nothing.npz"), "pixel_values.npy", &npy("2, 3, 0, 0"), 0);
    refused(path, &args("nothing.npz"), "array `pixel_values` has rows of shape [3, 0, 0]");
    file(&path.join("open.safetensors"), METADATA, &[tensor("pixel_values", "F32", &[0, 3, large, large], &[])]);
    refused(path, &args("open.safetensors"), "array `pixel_values` has rows of shape [3, 1099511627776, 1099511627776]");
    let folder = with_model("vit");
    file(&folder.path().join("fixed.safetensors"), METADATA, &[tensor("pixel_values", "F32", &[0, large, large, 3], &[])]);
    refused(folder.path(), &args("fixed.safetensors"), "array `pixel_values` has rows of shape [1099511627776, 1099511627776, 3]");
}

#[test]
fn empty_idx_files() {
    let folder = with_model("resnet-basic");
    let path = folder.path();
    fs::write(path.join("labels"), idx(0x801, &[2]).into_iter().chain([0, 1]).collect::<Vec<u8>>()).unwrap();
    for sizes in [&[2, 4_000_000_000, 4_000_000_000, 0][..], &[2, 0, 12, 12]] {
        fs::write(path.join("images"), idx(0x804, sizes)).unwrap();
        refused(path, "eval in --data images --labels labels", &format!("has samples of shape {:?}", &sizes[1..]));
    }
}

#[test]
fn token_limits_below_the_special_tokens() {
    let tokenizer = golden("evaluation/word-pieces.json");
    let folder = with_model("bert-sequence-classification");
    let path = folder.path();
    fs::copy(&tokenizer, path.join("in/tokenizer.json")).unwrap();
    fs::write(path.join("a.txt"), "a b c a b\n").unwrap();
    fs::write(path.join("a.csv"), "text,pair\na b c a b,c a b\n").unwrap();
    let fidelity = "--task fidelity --against in";
    refused(path, &format!("eval in --data a.txt --max-length 1 {fidelity}"), "texts are truncated to 1 tokens, fewer than the 2 special tokens");
    let pairs = format!("eval in --data a.csv --text-column text --pair-column pair --max-length 2 {fidelity}");
    refused(path, &pairs, "texts are truncated to 2 tokens, fewer than the 3 special tokens");
    fs::write(path.join("in/tokenizer_config.json"), json!({ "model_max_length": 1 }).to_string()).unwrap();
    refused(path, &format!("eval in --data a.txt {fidelity}"), "texts are truncated to 1 tokens, fewer than the 2 special tokens");
}

/// A limit so large that the whole text is one window.
#[test]
fn windows_of_any_length() {
    let folder = with_model("llama");
    let path = folder.path();
    fs::copy(golden("evaluation/word-pieces.json"), path.join("in/tokenizer.json")).unwrap();
    fs::write(path.join("a.txt"), "a b c a b\n").unwrap();
    set(&path.join("in/config.json"), &path.join("in/config.json"), "max_position_embeddings", Value::Null);
    for length in [1u64 << 62, u64::MAX] {
        ok(path, &format!("eval in --data a.txt --max-length {length}"));
    }
}

#[test]
fn configurations_that_expand() {
    let cases: [(&str, &str, Value, &str); 11] = [
        ("bert", "num_hidden_layers", json!(1_000_000_000), "encoder.layer.2"),
        ("bert", "hidden_size", json!(1u64 << 63), "hidden_size"),
        ("bert", "vocab_size", json!(-5), "vocab_size"),
        ("bert", "num_attention_heads", json!(0), "num_attention_heads"),
        ("bert", "intermediate_size", json!(u64::MAX), "intermediate_size"),
        ("llama", "num_hidden_layers", json!(u32::MAX), "model.layers.2"),
        ("llama", "num_key_value_heads", json!(1u64 << 62), "num_key_value_heads"),
        ("gpt2", "n_layer", json!(1_000_000_000_000u64), "n_layer"),
        ("vit-image-classification", "patch_size", json!(0), "patch_size"),
        ("resnet-basic", "depths", json!([1_000_000_000, 1, 2]), "layers.2"),
        ("roberta", "pad_token_id", json!(i64::MAX), "pad_token_id"),
    ];
    for (model, key, value, words) in cases {
        let folder = with_model(model);
        let path = folder.path().join("in/config.json");
        set(&path, &path, key, value);
        refused(folder.path(), "inspect in --graph", words);
    }
}

/// A configuration with one value replaced.
fn set(from: &Path, to: &Path, key: &str, value: Value) {
    let mut config: Value = serde_json::from_slice(&fs::read(from).unwrap()).unwrap();
    config[key] = value;
    fs::write(to, config.to_string()).unwrap();
}

#[test]
fn students_that_expand() {
    let cases: [(&str, &str, &str, Value, &str); 4] = [
        ("torchvision-resnet18", "2, 3, 16, 16", "layers", json!(vec![1; 70]), "elements"),
        ("torchvision-resnet18", "2, 3, 16, 16", "layers", json!([4_000_000_000u64]), "values"),
        ("vit-image-classification", "2, 3, 12, 12", "num_hidden_layers", json!(4_000_000_000u64), "values"),
        ("vit-image-classification", "2, 3, 12, 12", "hidden_size", json!(4_294_967_294u64), "elements"),
    ];
    for (model, shape, key, value, words) in cases {
        let folder = with_model(model);
        let path = folder.path();
        set(&path.join("in/config.json"), &path.join("student.json"), key, value);
        zipped(&path.join("a.npz"), "pixel_values.npy", &npy(shape), 1 << 20);
        refused(path, "distill in -o out --student config=student.json --train a.npz --max-steps 1", words);
    }
}

#[test]
fn graphs_that_expand() {
    let size = 1u64 << 62;
    let shape = json!({ "element": "float", "shape": [size, size, size, size] });
    let nodes = json!([{ "name": "f", "op": "Flatten", "inputs": ["x"] }, { "name": "y", "op": "Linear", "inputs": ["f", "w"] }]);
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("in")).unwrap();
    file(&folder.path().join("in/model.safetensors"), METADATA, &[floats("w", &[2, 4])]);
    fs::write(folder.path().join("in/graph.json"), json!({ "inputs": { "x": shape }, "nodes": nodes, "outputs": { "logits": "y" } }).to_string()).unwrap();
    refused(folder.path(), "inspect in --graph", "f");
    let deep: String = "[".repeat(200_000);
    fs::write(folder.path().join("in/graph.json"), deep).unwrap();
    refused(folder.path(), "inspect in --graph", "graph.json");
}

/// Without a limit, this expression would take practically forever on a line of forty letters.
#[test]
fn expressions_that_never_end() {
    let folder = with_model("bert-sequence-classification");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(golden("evaluation/word-pieces.json")).unwrap()).unwrap();
    tokenizer["pre_tokenizer"] = json!({ "type": "Split", "pattern": { "Regex": "(a+)+(?=b)(a|a)*$" }, "behavior": "Isolated", "invert": false });
    fs::write(folder.path().join("in/tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("a.txt"), format!("{}c\n", "a".repeat(60))).unwrap();
    let run = compress(folder.path(), "eval in --data a.txt --task fidelity --against in");
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
}

#[test]
fn two_runs_into_one_folder() {
    let folder = with_model("bert");
    let start = || command(folder.path()).args("quantize-dynamic in -o out".split(' ')).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let runs: Vec<_> = (0..6).map(|_| start()).collect();
    let outputs: Vec<_> = runs.into_iter().map(|run| run.wait_with_output().unwrap()).collect();
    assert_eq!(outputs.iter().filter(|output| output.status.success()).count(), 1);
    for output in outputs.iter().filter(|output| !output.status.success()) {
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.starts_with("error: ") && told.contains("out"), "{told}");
    }
    assert_eq!(compress(folder.path(), "verify out").code, 0);
    let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["in", "out"]);
}

/// A file that disappears or is truncated while it is read is reported by name, unless it was already
/// read. No partial output remains.
#[test]
fn the_input_disappears_while_it_is_read() {
    for (attempt, harm) in [("removed", 0), ("cut off", 1), ("overwritten", 2)] {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("in")).unwrap();
        let path = folder.path().join("in/model.safetensors");
        file(&path, METADATA, &[floats("a.weight", &[4000, 2000]), floats("b.weight", &[4000, 2000])]);
        let run = command(folder.path()).args("quantize-dynamic in -o out".split(' ')).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        match harm {
            0 => fs::remove_file(&path).unwrap(),
            1 => File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap(),
            _ => fs::write(&path, vec![0xff; 100_000]).unwrap(),
        }
        let output = run.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!told.contains("panicked"), "{attempt}: {told}");
        assert_eq!(folder.path().join("out").exists(), output.status.success(), "{attempt}: {told}");
        if !output.status.success() {
            assert!(told.contains("model.safetensors"), "{attempt}: {told}");
        }
        let unfinished =
            fs::read_dir(folder.path()).unwrap().filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains("compress-")).count();
        assert_eq!(unfinished, 0, "{attempt}");
    }
}

#[test]
fn links_out_of_the_folder() {
    let folder = with_model("bert");
    let path = folder.path();
    fs::write(path.join("secret"), "secret").unwrap();
    fs::create_dir(path.join("in/1_Pooling")).unwrap();
    for (name, target) in [("in/tokenizer.json", "../secret"), ("in/1_Pooling/config.json", "../../secret"), ("in/vocab.txt", "/etc/passwd")] {
        std::os::unix::fs::symlink(target, path.join(name)).unwrap();
        refused(path, "quantize-dynamic in -o out", name);
        refused(path, "densify in -o out", "a link out of the model's folder");
        fs::write(path.join("recipe.yaml"), "model: in\npasses: [cast]\noutput: out\n").unwrap();
        refused(path, "plan recipe.yaml", name);
        fs::remove_file(path.join(name)).unwrap();
    }
    // Links within the folder, and links as in caches.
    fs::create_dir_all(path.join("blobs")).unwrap();
    fs::write(path.join("blobs/1f"), "{}").unwrap();
    std::os::unix::fs::symlink("../blobs/1f", path.join("in/vocab.json")).unwrap();
    std::os::unix::fs::symlink("vocab.json", path.join("in/words.json")).unwrap();
    ok(path, "densify in -o out");
    assert_eq!(fs::read(path.join("out/words.json")).unwrap(), b"{}");
}

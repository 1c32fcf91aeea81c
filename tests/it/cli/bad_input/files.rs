//! Malformed safetensors files.

use std::collections::BTreeMap;
use std::fs;

use compress_core::store::gguf::{ImportanceFile, InputSums};

use super::{Case, case, check};
use crate::cli::support::raw_file;

const RUN: &str = "densify in.safetensors -o out";

fn bytes(name: &'static str, content: &'static [u8], message: &'static str) -> Case {
    case(name, move |folder| fs::write(folder.join("in.safetensors"), content).unwrap(), RUN, 1, message, "")
}

fn other(name: &'static str, file: &'static str, args: &'static str, content: &'static [u8], message: &'static str) -> Case {
    case(name, move |folder| fs::write(folder.join(file), content).unwrap(), args, 1, message, "")
}

fn no_model(name: &'static str, file: &'static str, args: &'static str, content: &'static [u8], message: &'static str) -> Case {
    Case { hint: "specify the folder of a model", ..other(name, file, args, content, message) }
}

fn header(name: &'static str, header: impl AsRef<[u8]> + 'static, data: usize, message: &'static str) -> Case {
    case(name, move |folder| raw_file(&folder.join("in.safetensors"), header.as_ref(), &vec![0; data]), RUN, 1, message, "")
}

/// A header with one tensor `a` with these fields.
fn entry(name: &'static str, fields: &'static str, data: usize, message: &'static str) -> Case {
    header(name, format!("{{\"a\":{{{fields}}}}}"), data, message)
}

/// A header with tensors `a` and `b` at these offsets.
fn pair(name: &'static str, a: [usize; 2], b: [usize; 2], data: usize, message: &'static str) -> Case {
    let entry = |[begin, end]: [usize; 2]| format!("{{\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}", end - begin);
    header(name, format!("{{\"a\":{},\"b\":{}}}", entry(a), entry(b)), data, message)
}

const ONE: &str = r#""dtype":"F32","shape":[1],"data_offsets":[0,4]"#;

#[test]
fn the_header_length() {
    check([
        bytes("empty file", b"", "in.safetensors: 0 bytes are too few"),
        bytes("seven bytes", b"1234567", "in.safetensors: 7 bytes are too few"),
        bytes("no header", b"\0\0\0\0\0\0\0\0data", "in.safetensors: the header claims 0 bytes in a file of 12"),
        no_model("a configuration as a model", "config.json", "densify config.json -o out", b"{\"model_type\": \"bert\"}", "config.json: is not a model"),
        no_model("a script as a model", "train.py", "densify train.py -o out", b"import torch\n", "train.py: is not a model"),
        other(
            "a Git LFS pointer",
            "model.bin",
            "densify model.bin -o out",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer",
        ),
        bytes("huge header", b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "the header claims 18446744073709551615 bytes in a file of 10"),
        bytes("beyond the limit of the format", b"\x01\xe1\xf5\x05\0\0\0\0{}", "the header claims 100000001 bytes…at most 100000000 are allowed"),
        bytes("beyond the file", b"\x03\0\0\0\0\0\0\0{}", "the header claims 3 bytes in a file of 10…truncated"),
        bytes("another kind of file", b"GGML\x03\0\0\0\0\0\0\0\0\0\0\0", "not a safetensors file"),
        bytes("GGUF under another name", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", "in.safetensors: the number of keys…is it truncated?"),
    ]);
}

#[test]
fn the_header_text() {
    check([
        header("not UTF-8", b"{\"\xff\":1}", 0, "in.safetensors: the header is not UTF-8"),
        header("not JSON", "{\"a\":", 0, "in.safetensors: the header is not valid…line 1 column 5"),
        header("nested too deeply", format!("{{\"a\":{{\"b\":{}", "[".repeat(100_000)), 0, "the header is not valid…recursion limit exceeded"),
        header("not an object", "[]", 0, "the header is not valid…expected an object of tensors"),
        header("text after the object", "{} x", 0, "trailing characters"),
        header("NUL after the object", b"{}\0", 0, "trailing characters"),
        header("a name twice", format!("{{\"a\":{{{ONE}}},\"a\":{{{ONE}}}}}"), 4, "duplicate name `a`"),
        header("metadata twice", r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "duplicate name `__metadata__`"),
        header("metadata that is not text", r#"{"__metadata__":{"format":1}}"#, 0, "expected a string"),
        header("metadata as a list", r#"{"__metadata__":[]}"#, 0, "expected a map"),
        header("control characters in a name", r#"{"\u001b[31m":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}"#, 1, r"tensor `\u{1b}[31m`: shape [2]"),
    ]);
}

#[test]
fn the_entries() {
    check([
        entry("no dtype", r#""shape":[1],"data_offsets":[0,4]"#, 4, "tensor `a`: missing field `dtype`"),
        entry("no offsets", r#""dtype":"F32","shape":[1]"#, 4, "tensor `a`: missing field `data_offsets`"),
        entry("an unknown dtype", r#""dtype":"F12","shape":[1],"data_offsets":[0,4]"#, 4, "tensor `a`: unknown variant `F12`, expected one of `BOOL`"),
        entry("a dtype in lower case", r#""dtype":"f32","shape":[1],"data_offsets":[0,4]"#, 4, "unknown variant `f32`"),
        entry("a negative size", r#""dtype":"F32","shape":[-1],"data_offsets":[0,4]"#, 4, "tensor `a`: invalid value: integer `-1`"),
        entry("a broken size", r#""dtype":"F32","shape":[1.5],"data_offsets":[0,4]"#, 4, "tensor `a`: invalid type: floating point `1.5`"),
        entry("a size beyond 64 bits", r#""dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]"#, 4, "tensor `a`: invalid type"),
        entry("one offset", r#""dtype":"F32","shape":[1],"data_offsets":[0]"#, 4, "tensor `a`: invalid length 1"),
        entry(
            "sizes whose product overflows",
            r#""dtype":"F32","shape":[9223372036854775807,8],"data_offsets":[0,4]"#,
            4,
            "tensor `a`: shape [9223372036854775807, 8] of F32 overflows",
        ),
        entry(
            "bytes that overflow",
            r#""dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,4]"#,
            4,
            "tensor `a`: shape [4611686018427387904] of F64 overflows",
        ),
        entry("half a byte", r#""dtype":"F4","shape":[3],"data_offsets":[0,1]"#, 1, "tensor `a`: shape [3] of F4 overflows or does not fill whole bytes"),
        entry(
            "too few bytes",
            r#""dtype":"F32","shape":[2],"data_offsets":[0,4]"#,
            4,
            "tensor `a`: shape [2] of F32 takes 8 bytes, but data_offsets [0, 4] span 4",
        ),
        entry("offsets that run backwards", r#""dtype":"F32","shape":[1],"data_offsets":[4,0]"#, 4, "tensor `a`: data_offsets [4, 0] are reversed"),
    ]);
}

#[test]
fn the_data() {
    check([
        entry("truncated", ONE, 3, "tensor `a`: data_offsets [0, 4] exceed the 3 bytes of data (is the file truncated?)"),
        entry("no data", ONE, 0, "tensor `a`: data_offsets [0, 4] exceed the 0 bytes of data"),
        entry("trailing bytes", ONE, 6, "in.safetensors: 2 bytes follow the last tensor"),
        header("data without a tensor", "{}", 8, "8 bytes follow the last tensor"),
        entry("a hole at the start", r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#, 8, "tensor `a`: data_offsets [4, 8] leave a gap before it"),
        pair("a hole between", [0, 4], [6, 8], 8, "tensor `b`: data_offsets [6, 8] leave a gap before it"),
        pair("an overlap", [0, 4], [2, 6], 6, "tensor `b`: data_offsets [2, 6] overlap the previous tensor"),
        pair("one range for two", [0, 4], [0, 4], 4, "tensor `b`: data_offsets [0, 4] overlap the previous tensor"),
        pair(
            "far out of range",
            [0, 4],
            [1 << 60, (1 << 60) + 4],
            4,
            "tensor `b`: data_offsets [1152921504606846976, 1152921504606846980] exceed the 4 bytes of data",
        ),
    ]);
}

#[test]
fn importance_matrices_are_not_models() {
    let write = |folder: &std::path::Path| {
        let sums = BTreeMap::from([("blk.0.attn_q.weight".to_owned(), InputSums { squares: vec![1.0, 2.0], counts: vec![1.0] })]);
        fs::write(folder.join("imatrix.gguf"), ImportanceFile { sums, ..ImportanceFile::default() }.to_bytes().unwrap()).unwrap();
    };
    for args in ["inspect imatrix.gguf", "inspect ."] {
        let message = "imatrix.gguf: opening an importance matrix of llama.cpp as a model is not supported";
        check([case("an importance matrix", write, args, 1, message, "`export: [{ gguf: { type: Q4_K_M, imatrix: FILE } }]`")]);
    }
}

/// The hint does not lead to another error.
#[cfg(feature = "run")]
#[test]
fn onnx_files_are_not_written_as_dense_safetensors() {
    let make = |folder: &std::path::Path| {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exported/bert.onnx");
        fs::copy(golden, folder.join("in.onnx")).unwrap();
    };
    let refused = |args| case(args, make, args, 1, "in.onnx: writing an .onnx model with `densify`", "`compress dequantize in.onnx -o FILE.onnx`");
    check(["densify in.onnx -o out.onnx", "densify in.onnx -o out"].map(refused));
}

//! Property: every file of an input folder is in the output, or a note names it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::given::{Values, config, model, shape};
use crate::common::{DType, Desk, Output, contents, pipeline, work};
use compress::pass::{Cast, FloatFormat};
use compress::pipeline::verify;

/// Names of files that the run does not read.
fn files() -> impl Strategy<Value = BTreeMap<String, Vec<u8>>> {
    let folders = ["", "", "", "2_Dense/", "2_Dense/onnx/", "onnx/", "original/", "checkpoint-7/", "checkpoint-last/", ".git/", "a/.cache/", "runs/b.c/"];
    let known = [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.onnx",
        "model.onnx_data",
        "adapter_model.safetensors",
        "consolidated.00.pth",
        "training_args.bin",
        "head.pt",
        "scheduler.pt",
        "optimizer.pt",
        "tokenizer.json",
        "README.md",
        "report.json",
        "report.md",
        "report.csv",
        "recipe.yaml",
        "inputs.blake3",
        ".gitattributes",
        "model.ckpt.meta",
        "vocab.bin",
    ];
    let name = prop_oneof![3 => select(known.to_vec()).prop_map(str::to_owned), 1 => "[a-zA-Z0-9._-]{1,6}[a-z]"];
    let path = (select(folders.to_vec()), name).prop_map(|(folder, name)| format!("{folder}{name}"));
    prop::collection::btree_map(path, prop::collection::vec(any::<u8>(), 0..9), 0..12)
}

/// The files that notes report as not copied.
fn named(output: &Output) -> Vec<String> {
    let lists = output.report.notes.iter().filter_map(|note| note.strip_prefix("not carried over from the input: ")?.split(" (").next());
    lists.flat_map(|list| list.split(", ").map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn put(folder: &Path, files: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    let fits = |(name, bytes): &(String, Vec<u8>)| {
        let path = folder.join(name);
        !path.exists() && fs::create_dir_all(path.parent().unwrap()).is_ok() && fs::write(&path, bytes).is_ok()
    };
    files.into_iter().filter(fits).collect()
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn every_file_is_in_the_output_or_named(tensors in model(&[DType::F16, DType::BF16, DType::F32], shape(1..=2, 5), Values::Finite, 1..=2), files in files(), index in any::<Index>()) {
        let desk = Desk::new();
        let input = desk.weights(&tensors);
        let files = put(&input, files);
        fs::create_dir_all(input.join("3_Normalize")).unwrap();
        let output = desk.run(&input, pipeline().pass(Cast { to: FloatFormat::F32, ..Cast::default() })).unwrap();
        let named = named(&output);
        let mut carried = Vec::new();
        for (name, bytes) in &files {
            let left = named.iter().any(|named| named == name || named.strip_suffix('/').is_some_and(|_| name.starts_with(named.as_str())));
            let same = fs::read(output.path.join(name)).is_ok_and(|written| written == *bytes);
            prop_assert!(left != (same && output.report.carried.iter().any(|file| file.path == *name)), "{name}: {named:?}, {:?}", output.report.carried);
            if !left {
                carried.push(name);
            }
        }
        prop_assert!(output.path.join("3_Normalize").is_dir());
        for name in contents(&output.path).keys() {
            let listed = output.report.carried.iter().map(|file| &file.path).chain(output.report.outputs.iter().map(|file| &file.path));
            prop_assert_eq!(listed.filter(|listed| *listed == name).count(), 1, "{}", name);
        }
        let failed = || work(|work| verify(&output.path, work)).unwrap().into_iter().filter(|check| !check.ok).map(|check| check.path).collect::<Vec<_>>();
        prop_assert_eq!(failed(), Vec::<String>::new());
        if !carried.is_empty() {
            let name = carried[index.index(carried.len())];
            let path = output.path.join(name);
            fs::write(&path, [&files[name][..], b"+"].concat()).unwrap();
            prop_assert_eq!(&failed(), std::slice::from_ref(name));
            fs::remove_file(&path).unwrap();
            prop_assert_eq!(&failed(), std::slice::from_ref(name));
        }
    }
}

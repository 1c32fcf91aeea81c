//! Folders in the layout of the Hub: ONNX files in a folder `onnx`, and the files that describe them above.

use std::fs;
use std::path::Path;

use compress::Model;
use compress::pass::QuantizeDynamic;
use prost::Message;

use super::{builder, model};

fn hub(files: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("onnx")).unwrap();
    for name in files {
        fs::write(folder.path().join("onnx").join(name), model().encode_to_vec()).unwrap();
    }
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::write(folder.path().join(name), "{}").unwrap();
    }
    folder
}

#[test]
fn the_model_is_opened_and_its_configuration_is_copied() {
    for files in [&["model.onnx", "model_quantized.onnx"][..], &["model_fp32.onnx"][..]] {
        let folder = hub(files);
        let opened = Model::open(folder.path()).unwrap();
        assert!(opened.onnx.is_some() && opened.weight_files == [folder.path().join("onnx").join(files[0])], "{:?}", opened.weight_files);
        let other = tempfile::tempdir().unwrap();
        let out = other.path().join("out");
        let report = builder().pass(QuantizeDynamic::default()).build().unwrap().run(opened, &out).unwrap();
        assert!(report.notes.iter().any(|note| note.contains("onnx/ (they contain the original weights")), "{:?}", report.notes);
        for name in ["model.onnx", "tokenizer.json", "tokenizer_config.json"] {
            assert!(out.join(name).is_file(), "{files:?}: {name}");
        }
        // The file itself, with the same configuration.
        let file = Model::open(folder.path().join("onnx").join(files[0])).unwrap();
        assert_eq!(file.preprocessing().unwrap().1.values(), Model::open(folder.path()).unwrap().preprocessing().unwrap().1.values());
        // Each file is listed once.
        let mut expected = ["config.json", "tokenizer.json", "tokenizer_config.json"].map(|name| folder.path().join(name)).to_vec();
        expected.extend(file.weight_files.clone());
        expected.sort();
        for model in [file, Model::open(folder.path()).unwrap()] {
            let mut inputs = model.inputs();
            inputs.sort();
            assert_eq!(inputs, expected);
        }
    }
}

#[test]
fn damaged_files_next_to_a_file_are_named_with_their_path() {
    let (folder, other) = (hub(&["model.onnx"]), tempfile::tempdir().unwrap());
    fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let opened = Model::open(folder.path().join("onnx/model.onnx")).unwrap();
    let notes = builder().pass(QuantizeDynamic::default()).build().unwrap().run(opened, other.path().join("out")).unwrap().notes;
    let expected = format!("replace {}, and repeat the run", folder.path().join("tokenizer.json").display());
    assert!(notes.iter().any(|note| note.contains("tokenizer.json was copied, but it is not valid JSON") && note.contains(&expected)), "{notes:?}");
}

#[test]
fn several_files_are_listed_and_other_weights_are_preferred() {
    let folder = hub(&["decoder_model.onnx", "encoder_model.onnx"]);
    let error = Model::open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("has 2 .onnx files") && error.contains("decoder_model.onnx"), "{error}");
    let weights = [("w".to_owned(), candle_core::Tensor::ones((2, 2), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap())];
    candle_core::safetensors::save(&weights.into(), folder.path().join("model.safetensors")).unwrap();
    let opened = Model::open(folder.path()).unwrap();
    assert_eq!(opened.weight_files, [folder.path().join("model.safetensors")]);
    assert!(Model::open(folder.path().join(Path::new("onnx/encoder_model.onnx"))).unwrap().onnx.is_some());
}

/// Files that belong to the model by their names, wherever its folder is, and none of the others.
#[test]
fn the_tokenizer_next_to_a_file_is_copied_to_an_output_folder() {
    for file in ["onnx/model.onnx", "model.onnx"] {
        let folder = hub(&["model.onnx"]);
        let path = |name: &str| folder.path().join(name);
        if file == "model.onnx" {
            fs::rename(path("onnx/model.onnx"), path(file)).unwrap();
        }
        for name in ["letter.txt", "model.safetensors", "vocab.txt"] {
            fs::write(path(name), name).unwrap();
        }
        let other = tempfile::tempdir().unwrap();
        let run = |name: &str| {
            let opened = Model::open(path(file)).unwrap();
            builder().pass(QuantizeDynamic::default()).build().unwrap().run(opened, other.path().join(name)).unwrap()
        };
        let report = run("out");
        let carried: Vec<&str> = report.carried.iter().map(|file| file.path.as_str()).collect();
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"] {
            assert!(carried.contains(&name), "{file}: {carried:?}");
            assert_eq!(fs::read(other.path().join("out").join(name)).unwrap(), fs::read(path(name)).unwrap(), "{file}: {name}");
        }
        for name in ["letter.txt", "model.safetensors"] {
            assert!(!other.path().join("out").join(name).exists(), "{file}: {name}");
        }
        // An output file has no tokenizer.
        let report = run("out.onnx");
        assert!(report.carried.iter().all(|file| file.path != "tokenizer.json"), "{:?}", report.carried);
        assert!(!report.notes.iter().any(|note| note.contains("not copied")), "{:?}", report.notes);
        let mut names: Vec<_> = fs::read_dir(other.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["out", "out.onnx", "out.onnx.report"]);
        // Links to other folders are refused.
        fs::write(other.path().join("secret.json"), "{}").unwrap();
        fs::remove_file(path("tokenizer_config.json")).unwrap();
        std::os::unix::fs::symlink(other.path().join("secret.json"), path("tokenizer_config.json")).unwrap();
        let linked = builder().pass(QuantizeDynamic::default()).build().unwrap().run(Model::open(path(file)).unwrap(), other.path().join("linked"));
        assert!(linked.unwrap_err().to_string().contains("a link out of the model's folder"), "{file}");
    }
}

//! Properties of files: every file of a folder is in the output or named, and names of folders do not
//! affect the output.

use std::fs;
use std::io::Write;
use std::process::Command;

use rand::RngExt;
use serde_json::json;

use crate::common::{DType, Desk, Tensor, Tensors, contents, write};
use crate::properties::draws::{Draw, families, seeds};

#[test]
fn every_file_of_a_folder_is_in_the_output_or_named() {
    for seed in seeds(8) {
        let mut draw = Draw::any(seed);
        let foreign = ["notes.txt", "tokenizer_config.json", "1_Other/config.json", "größe.md", "extra data.bin", "LICENSE", "modeling_custom.py"];
        for name in foreign.iter().filter(|_| draw.rng.random_range(0..2) == 0).collect::<Vec<_>>() {
            let path = draw.path.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "{}").unwrap();
        }
        let written = draw.run(json!([{ "cast": { "to": "bf16" } }]), json!([]), |builder| builder).unwrap_or_else(|e| panic!("{}: {e}", draw.name));
        let (report, output) = (written.report.to_json(), written.files());
        // Files of weights, which are written as safetensors.
        let is_weights = |name: &str| name.contains(".safetensors") || name.ends_with("/pytorch_model.bin");
        for name in contents(&draw.path).keys().filter(|name| !is_weights(name)) {
            assert!(output.contains_key(name) || report.contains(name.as_str()), "{}: `{name}` is neither in the output nor named", draw.name);
        }
    }
}

#[test]
fn a_renamed_folder_yields_the_same_bytes() {
    for seed in seeds(6) {
        let draw = Draw::any(seed);
        let data = draw.data(&draw.samples(7, seed));
        let passes = json!([{ "quantize-static": {} }]);
        let run = |folder: &std::path::Path| {
            let written = draw.run_on(folder, passes.clone(), json!(["onnx"]), |builder| builder.calibration(data.clone()));
            written.unwrap_or_else(|e| panic!("{}: {e}", draw.name)).files()
        };
        let before = run(&draw.path);
        let renamed = draw.desk.path().join("another name é");
        fs::rename(&draw.path, &renamed).unwrap();
        let after = run(&renamed);
        let differ: Vec<&String> = before.keys().filter(|name| before.get(*name) != after.get(*name)).collect();
        assert!(before.len() == after.len() && differ.is_empty(), "{}: {differ:?} depend on the name of the folder", draw.name);
    }
}

/// Bytes read by a program and its threads, as counted for the shell that waits for it.
fn bytes_read(arguments: &[&str]) -> u64 {
    let script = "\"$@\" >/dev/null || exit 1; cat /proc/$$/io";
    let output = Command::new("sh").args(["-c", script, "sh", env!("CARGO_BIN_EXE_compress")]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// The first window of a text, and windows spread over it, are found without reading the rest.
#[test]
fn few_windows_of_a_large_text_are_few_bytes() {
    let draw = Draw::family(0, "llama");
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/evaluation/characters.json");
    fs::copy(tokenizer, draw.path.join("tokenizer.json")).unwrap();
    let desk = Desk::new();
    for (samples, sampling) in [("1", "first"), ("4", "spread")] {
        let [small, large] = [300_000, 20_000_000].map(|bytes| {
            let path = desk.place().with_extension("txt");
            fs::write(&path, "the quick brown fox jumps over the dog.\n".repeat(bytes / 40)).unwrap();
            bytes_read(&["eval", draw.path.to_str().unwrap(), "--text", path.to_str().unwrap(), "--samples", samples, "--sampling", sampling])
        });
        assert!(large < small + (1 << 20), "{sampling}: {samples} windows of 0.3 MB read {small} bytes, of 20 MB {large}");
    }
}

/// An uncompressed NumPy archive with one array of zeros.
fn archive(name: &str, shape: &[usize]) -> Vec<u8> {
    let sizes = shape.iter().map(|size| format!("{size},")).collect::<String>();
    let description = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sizes}), }}\n");
    let start = [b"\x93NUMPY\x01\x00", &(description.len() as u16).to_le_bytes()[..], description.as_bytes()].concat();
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    archive.start_file(format!("{name}.npy"), zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored)).unwrap();
    archive.write_all(&start).unwrap();
    archive.write_all(&vec![0; 4 * shape.iter().product::<usize>()]).unwrap();
    archive.finish().unwrap().into_inner()
}

/// Writes a data set with a number of samples.
type Make<'m> = &'m dyn Fn(&std::path::Path, usize);

#[test]
fn few_samples_of_a_large_data_set_are_few_bytes() {
    let evaluation = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation");
    let [images, texts, pixels] = ["torchvision-resnet18", "bert-sequence-classification", "vit-image-classification"].map(|name| {
        assert!(families().contains(&name.to_owned()));
        Draw::family(0, name)
    });
    fs::copy(evaluation.join("word-pieces.json"), texts.path.join("tokenizer.json")).unwrap();
    fs::copy(evaluation.join("vit-image-classification.json"), pixels.path.join("preprocessor_config.json")).unwrap();
    let shape = |count: usize| [count, 3, 32, 32];
    let arrays = |path: &std::path::Path, count: usize| {
        let zeros = vec![0; 4 * shape(count).iter().product::<usize>()];
        write(path, &Tensors::from([("pixel_values".to_owned(), Tensor::new(DType::F32, &shape(count), zeros))]));
    };
    let archives = |path: &std::path::Path, count: usize| fs::write(path, archive("pixel_values", &shape(count))).unwrap();
    // Lines with as many bytes as the arrays.
    let lines = |first: &str, line: &dyn Fn(&str) -> String, count: usize| format!("{first}{}", line(&"a bad cab had ".repeat(60)).repeat(count * 15));
    let csv = |path: &std::path::Path, count: usize| fs::write(path, lines("text\n", &|text| format!("{text}\n"), count)).unwrap();
    let jsonl = |path: &std::path::Path, count: usize| fs::write(path, lines("", &|text| format!("{{\"text\": \"{text}\"}}\n"), count)).unwrap();
    // Bytes after the end of an image are not decoded.
    let picture = [fs::read(evaluation.join("images/LABEL_0/0.png")).unwrap(), vec![0; 12 << 10]].concat();
    let pictures = |path: &std::path::Path, count: usize| {
        fs::create_dir(path).unwrap();
        (0..count).for_each(|number| fs::write(path.join(format!("{number}.png")), &picture).unwrap());
    };
    let cases: [(&str, &Draw, Make); 5] =
        [("safetensors", &images, &arrays), ("npz", &images, &archives), ("csv", &texts, &csv), ("jsonl", &texts, &jsonl), ("", &pixels, &pictures)];
    for (ending, draw, make) in cases {
        let desk = Desk::new();
        let [small, large] = [8, 1600].map(|count| {
            let path = desk.place().with_extension(ending);
            make(&path, count);
            let model = draw.path.to_str().unwrap();
            bytes_read(&["eval", model, "--against", model, "--data", path.to_str().unwrap(), "--task", "fidelity", "--samples", "4"])
        });
        // The large data set has about 19 MB more.
        assert!(large < small + (1 << 20), "`{ending}`: 4 samples of 8 read {small} bytes, 4 of 1600 read {large}");
    }
}

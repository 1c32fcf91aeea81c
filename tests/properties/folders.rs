//! Laws of files: what a folder holds is in the output or named, and names of folders do not matter.

use std::fs;
use std::process::Command;

use rand::RngExt;
use serde_json::json;

use crate::common::{DType, Desk, Tensor, Tensors, contents, write};
use crate::draws::{Draw, families, seeds};

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
        for name in contents(&draw.path).keys().filter(|name| !name.contains(".safetensors")) {
            assert!(output.contains_key(name) || report.contains(name.as_str()), "{}: `{name}` is neither in the output nor named", draw.name);
        }
    }
}

#[test]
fn a_renamed_folder_gives_the_same_bytes() {
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

/// Bytes that a program and its threads read, of which the shell that waited for it keeps account.
fn bytes_read(arguments: &[&str]) -> u64 {
    let script = "\"$@\" >/dev/null || exit 1; cat /proc/$$/io";
    let output = Command::new("sh").args(["-c", script, "sh", env!("CARGO_BIN_EXE_compress")]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn few_samples_of_a_large_file_are_few_bytes() {
    assert!(families().contains(&"torchvision-resnet18".to_owned()));
    let draw = Draw::family(0, "torchvision-resnet18");
    let desk = Desk::new();
    let sample = 3 * 32 * 32;
    let [small, large] = [8, 1600].map(|count| {
        let path = desk.place().with_extension("safetensors");
        write(&path, &Tensors::from([("pixel_values".to_owned(), Tensor::new(DType::F32, &[count, 3, 32, 32], vec![0; count * sample * 4]))]));
        let arguments = ["eval", draw.path.to_str().unwrap(), "--against", draw.path.to_str().unwrap(), "--arrays", path.to_str().unwrap(), "--samples", "4"];
        bytes_read(&arguments)
    });
    // The large file has 19 MB more.
    assert!(large < small + (1 << 20), "4 samples of 8 read {small} bytes, 4 of 1600 read {large}");
}

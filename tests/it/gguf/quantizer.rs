//! Written files compared with those of llama.cpp's quantizer: types and bytes of every tensor, without
//! importance and with an importance matrix in both forms (`scripts/goldens gguf-quantizer`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::export::Gguf;
use compress::{Model, Pipeline, Report};
use compress_core::store::DType;
use compress_core::store::gguf::{ImportanceFile, Kind, Outline};
use compress_kernels::ggml::BlockType;
use serde_json::{Value, json};

use super::golden;
use super::importance::{Networks, run_export, tiny};

/// Numbers in [0, 1) by a hash of the seed and the index, as in the script.
fn uniform(seed: usize, count: usize) -> impl Iterator<Item = f32> {
    (0..count as u64).map(move |index| {
        let mut state = ((seed as u64) << 32).wrapping_add(index).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state = (state ^ state >> 33).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        ((state ^ state >> 33) >> 40) as f32 / (1u64 << 24) as f32
    })
}

/// A model of the golden files, and the expected types and hashes of its tensors by file type.
fn source(name: &str) -> (tempfile::TempDir, Model, Value) {
    let described: Value = serde_json::from_str(&fs::read_to_string(golden(&format!("gguf-quantizer/{name}.json"))).unwrap()).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_value(described["shapes"].clone()).unwrap();
    let tensors = shapes.into_iter().enumerate().map(|(seed, (name, shape))| {
        let values = uniform(seed, shape.iter().product()).enumerate();
        let values: Vec<f32> = values.map(|(index, value)| (value - 0.5) * 0.1 * if index % 997 == 0 { 8.0 } else { 1.0 }).collect();
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in");
    fs::create_dir(&path).unwrap();
    candle_core::safetensors::save(&tensors.collect(), path.join("model.safetensors")).unwrap();
    fs::write(path.join("config.json"), described["config"].to_string()).unwrap();
    (folder, Model::open(path).unwrap(), described["files"].clone())
}

/// Type and bytes of each tensor of a file, in the order of their names.
fn tensors(path: &Path) -> BTreeMap<String, (&'static str, Vec<u8>)> {
    let (outline, bytes) = (Outline::open(path).unwrap(), fs::read(path).unwrap());
    let kinds = outline.tensors.iter().map(|tensor| match (tensor.type_id, BlockType::from_id(tensor.type_id)) {
        (_, Some(kind)) => (Kind::Blocks(kind), kind.name()),
        (0, None) => (Kind::Plain(DType::F32), "F32"),
        (1, None) => (Kind::Plain(DType::F16), "F16"),
        (id, None) => panic!("type {id}"),
    });
    let sized: Vec<_> =
        outline.tensors.iter().zip(kinds).map(|(tensor, (kind, name))| (tensor, name, kind.byte_count(&tensor.shape).unwrap() as usize)).collect();
    let mut begin = bytes.len() - sized.iter().map(|(.., size)| size.next_multiple_of(32)).sum::<usize>();
    let mut found = BTreeMap::new();
    for (tensor, kind, size) in sized {
        found.insert(tensor.name.clone(), (kind, bytes[begin..begin + size].to_vec()));
        begin += size.next_multiple_of(32);
    }
    found
}

/// Writes a model in a file type, optionally with an importance matrix.
fn write(model: &Model, folder: &Path, kind: &str, imatrix: Option<&Path>) -> compress::Result<Report> {
    let mut options = json!({ "type": kind });
    if let Some(path) = imatrix {
        options["imatrix"] = path.to_str().unwrap().into();
    }
    let export: Gguf = serde_json::from_value(options).unwrap();
    Pipeline::builder().export(export).measure(false).force(true).build()?.run(model.clone(), folder.join("out"))
}

fn matrices(name: &str) -> [PathBuf; 2] {
    ["gguf", "dat"].map(|form| golden(&format!("gguf-quantizer/{name}-imatrix.{form}")))
}

/// Compares the files of all types with those of llama.cpp's quantizer: types and hashes of the tensors, or
/// the refusal.
fn compare(name: &str) {
    let (folder, model, files) = source(name);
    let [gguf, dat] = matrices(name);
    for (kind, expected) in files.as_object().unwrap() {
        let plain = expected[0].as_str().unwrap_or_default();
        for (imatrix, expected) in [None, Some(&gguf), Some(&dat)].into_iter().zip(expected.as_array().unwrap()) {
            let what = format!("{name} {kind} {imatrix:?}");
            let written = write(&model, folder.path(), kind, imatrix.map(PathBuf::as_path));
            // Refused, because no type of these files has a search for scales.
            if imatrix.is_some() && ["Q8_0", "TQ1_0", "TQ2_0", "MXFP4_MOE"].contains(&kind.as_str()) {
                let error = written.map(|_| ()).unwrap_err().to_string();
                assert!(error.contains("has no effect for this type"), "{what}: {error}");
                // Unlike llama.cpp, which uses the matrix for ternary types whose rows require Q4_0.
                let differs = name == "odd" && kind.starts_with("TQ");
                assert_eq!(plain != expected.as_str().unwrap(), differs, "{what}");
                continue;
            }
            let Some(expected) = expected.as_str() else {
                let error = written.map(|_| ()).unwrap_err().to_string();
                assert!(error.contains("importance"), "{what}: {error}");
                continue;
            };
            // A matrix that no tensor needs is refused.
            if let (Some(_), Err(error)) = (imatrix, &written) {
                assert!(error.to_string().contains("none of the tensors") && plain == expected, "{what}: {error}");
                continue;
            }
            written.unwrap_or_else(|error| panic!("{what}: {error}"));
            let found = tensors(&folder.path().join("out/model.gguf"));
            assert_eq!(found.len(), expected.split(' ').count(), "{what}");
            for ((tensor, (kind, bytes)), expected) in found.iter().zip(expected.split(' ')) {
                let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
                let hash: String = hash.as_ref()[..4].iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(format!("{kind}:{hash}"), expected, "{what} {tensor}");
            }
        }
    }
}

#[test]
fn dense_models_equal_llama_quantize() {
    compare("dense");
}

#[test]
fn rows_of_incomplete_blocks_equal_llama_quantize() {
    compare("odd");
}

#[test]
fn experts_equal_llama_quantize() {
    compare("experts");
}

#[test]
fn importance_matrices_that_do_not_fit_are_rejected() {
    let (folder, model, _) = source("dense");
    let [gguf, _] = matrices("dense");
    let error = |kind: &str, imatrix: &Path| write(&model, folder.path(), kind, Some(imatrix)).map(|_| ()).unwrap_err().to_string();
    let says = |error: String, words: &str| assert!(error.contains(words), "`{error}` does not contain `{words}`");
    says(error("Q8_0", &gguf), "gguf: imatrix: has no effect for this type");
    says(error("Q4_0", &matrices("odd")[0]), "blk.0.ffn_down.weight of odd-imatrix.gguf has 160");
    says(error("Q4_0", &golden("gguf/llama.gguf")), "is not an importance matrix: `imatrix.datasets` is missing");
    says(error("Q4_0", &folder.path().join("none")), "none");
    let other = folder.path().join("other.gguf");
    let mut renamed = ImportanceFile::open(&gguf).unwrap();
    renamed.sums = renamed.sums.into_iter().map(|(name, sums)| (name.replace("blk", "layer"), sums)).collect();
    fs::write(&other, renamed.to_bytes().unwrap()).unwrap();
    says(error("Q4_0", &other), "other.gguf contains none of the tensors");
    let options = json!({ "type": "Q4_0", "imatrix": gguf, "importance": "none" });
    let export: Gguf = serde_json::from_value(options).unwrap();
    let run = |export: Gguf| Pipeline::builder().export(export).build().unwrap().run(model.clone(), folder.path().join("out")).map(|_| ()).unwrap_err();
    says(run(export).to_string(), "has no effect with `importance: none`");
    let export: Gguf = serde_json::from_value(json!({ "type": "Q4_0", "write_imatrix": true })).unwrap();
    says(run(export).to_string(), "gguf: write_imatrix: needs importance");
}

/// The report names the file and what it lacks, and the file describes its importance matrix.
#[test]
fn the_importance_matrix_is_recorded() {
    let (folder, model, _) = source("dense");
    let report = write(&model, folder.path(), "Q4_0", Some(&matrices("dense")[1])).unwrap();
    let note = report.notes.iter().find(|note| note.contains("weighted by")).unwrap();
    assert!(note.contains("in 6 matrices, errors are weighted by the importance matrix dense-imatrix.dat"), "{note}");
    assert!(report.notes.iter().any(|note| note.contains("2 matrices are quantized without importance")), "{:?}", report.notes);
    let outline = Outline::open(&folder.path().join("out/model.gguf")).unwrap();
    let values = ["file", "dataset", "entries_count", "chunks_count"].map(|key| outline.values[&format!("quantize.imatrix.{key}")].to_string());
    assert_eq!(values, ["`dense-imatrix.dat`", "`text`", "6", "4"]);
}

/// An importance matrix written from samples has the same effect as the samples.
#[test]
fn written_importance_matrices_have_the_effect_of_the_samples() {
    for networks in [Networks::Plain, Networks::Apart, Networks::Together] {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny(folder.path(), networks, 64);
        let out = folder.path().join("out");
        let export: Gguf = serde_json::from_value(json!({ "type": "Q4_0", "write_imatrix": true })).unwrap();
        run_export(&model, folder.path(), export).unwrap();
        // The folder is opened as the model.
        assert!(Model::open(&out).is_ok());
        let (expected, path) = (tensors(&out.join("model.gguf")), folder.path().join("imatrix.gguf"));
        fs::rename(out.join("imatrix.gguf"), &path).unwrap();
        let found = ImportanceFile::open(&path).unwrap();
        assert!(found.chunks == 48 && found.chunk_size >= 8, "{} of {}", found.chunks, found.chunk_size);
        write(&model, folder.path(), "Q4_0", Some(&path)).unwrap();
        assert!(tensors(&out.join("model.gguf")) == expected);
        assert!(!out.join("imatrix.gguf").exists());
    }
}

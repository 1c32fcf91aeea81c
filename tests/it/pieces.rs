//! Runs in parts with a tensor larger than a share: it is split if the passes allow it, and the output
//! equals that of a run by one process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use compress::Model;
use compress::pipeline::PartIndex;
use compress::pipeline::{Builder, PartOutcome, Pipeline, parts_folder, recipe_from_parts};
use compress::recipe::Recipe;
use compress::report::Report;
use compress_core::store::DType;
use compress_core::store::header::Header;

/// Rows of the large tensor: not a multiple of common block sizes.
const ROWS: usize = 20_011;
const WIDTH: usize = 128;
const BIG: &str = "model.layers.0.mlp.up_proj.weight";

/// A folder with one tensor that is larger than all others together. It has few distinct values, so that
/// thresholds have many ties.
fn model(folder: &Path, dtype: DType, big: (&str, Vec<usize>)) -> PathBuf {
    let tensors = [
        ("model.embed_tokens.weight", vec![500, WIDTH]),
        big,
        ("model.layers.0.self_attn.q_proj.weight", vec![WIDTH, WIDTH]),
        ("model.layers.1.mlp.up_proj.weight", vec![300, WIDTH]),
        ("model.norm.weight", vec![WIDTH]),
    ];
    let header = Header::layout(tensors.map(|(name, shape)| (name.to_owned(), dtype, shape)), BTreeMap::new()).unwrap();
    let mut bytes = header.to_bytes();
    let count = header.data_bytes() as usize / (dtype.bitsize() / 8);
    let mut state = 7u64;
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = ((state >> 40) % 513) as f32 / 128.0 - 2.0 + ((state >> 60) as f32);
        match dtype {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            _ => bytes.extend(&value.to_le_bytes()[2..]),
        }
    }
    let model = folder.join("model");
    std::fs::create_dir_all(&model).unwrap();
    std::fs::write(model.join("model.safetensors"), bytes).unwrap();
    model
}

fn builder(steps: &str) -> Builder {
    let recipe = Recipe::parse(&format!("model: x\nmeasure: false\n{steps}"), Path::new("recipe.yaml")).unwrap();
    Pipeline::builder().threads(2).recipe(&recipe).min_split_bytes(1 << 16)
}

fn part(steps: &str, model: &Path, output: &Path, number: usize, count: usize) -> PartOutcome {
    builder(steps).build().unwrap().run_part(Model::open(model).unwrap(), output, PartIndex::new(number, count).unwrap()).unwrap()
}

/// Runs all parts in reverse order until each is written.
fn in_parts(steps: &str, model: &Path, output: &Path, count: usize) {
    for _ in 0..6 {
        if !(1..=count).rev().map(|number| part(steps, model, output, number, count)).collect::<Vec<_>>().contains(&PartOutcome::Counted) {
            return;
        }
    }
    panic!("parts never finish")
}

fn merged(model: &Path, output: &Path, keep: bool) -> compress::Result<Report> {
    let recipe = recipe_from_parts(output)?;
    Pipeline::builder().recipe(&recipe).min_split_bytes(1 << 16).build()?.merge(Model::open(model)?, output, keep)
}

/// Contents of a folder, except the reports.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path));
    named.filter(|(name, _)| !name.starts_with("report.")).map(|(name, path)| (name, std::fs::read(path).unwrap())).collect()
}

/// Bytes of weights in each part.
fn sizes(output: &Path, count: usize) -> Vec<u64> {
    let size = |share: PartIndex| std::fs::metadata(parts_folder(output).join(share.name()).join("model.safetensors")).unwrap().len();
    PartIndex::new(1, count).unwrap().all().map(size).collect()
}

fn manifest_path(output: &Path, share: PartIndex) -> PathBuf {
    parts_folder(output).join(share.name()).join("part.json")
}

/// Compares runs in parts with one by a single process. Returns whether the large tensor was split.
fn law(model: &Path, folder: &Path, steps: &str, cut: bool) {
    let whole = folder.join("whole");
    let before = builder(steps).force(true).build().unwrap().run(Model::open(model).unwrap(), &whole).unwrap();
    for count in [1, 3, 16] {
        let output = folder.join(format!("out-{count}"));
        in_parts(steps, model, &output, count);
        let texts = PartIndex::new(1, count).unwrap().all().map(|share| std::fs::read_to_string(manifest_path(&output, share)).unwrap());
        let pieces = texts.filter(|text| text.contains("\"rows\":[")).count();
        assert_eq!(pieces > 1, cut && count > 1, "{steps} in {count} parts: {pieces}");
        let after = merged(model, &output, count == 3).unwrap();
        assert_eq!(files(&whole).keys().collect::<Vec<_>>(), files(&output).keys().collect::<Vec<_>>());
        for (name, bytes) in files(&whole) {
            assert!(files(&output)[&name] == bytes, "{steps} in {count} parts: {name}");
        }
        assert_eq!((&after.layers, &after.histograms, &after.size), (&before.layers, &before.histograms, &before.size), "{steps} in {count} parts");
        assert_eq!((&after.model.blake3, &after.outputs), (&before.model.blake3, &before.outputs), "{steps} in {count} parts");
        std::fs::remove_dir_all(&output).unwrap();
        let _ = std::fs::remove_dir_all(parts_folder(&output));
    }
}

#[test]
fn passes_that_process_rows_independently_split_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), DType::BF16, (BIG, vec![ROWS, WIDTH]));
    for steps in [
        "passes: []",
        "passes: [{ cast: { to: f16 } }]",
        "passes: [{ prune-unstructured: { scope: global, targets: ['*'] } }]",
        "passes: [{ prune-unstructured: { pattern: '2:4' } }, quantize-dynamic]",
        "passes: [{ quantize-dynamic: { granularity: group, group_size: 32, symmetric: false } }]",
        "passes: [{ quantize-dynamic: { activations: none, observer: mse } }]",
        "passes: [{ quantize: { scheme: W4A16, observer: minmax } }]",
        "passes: [{ quantize: { scheme: W4A16-ASYM, group_size: 32, observer: minmax } }]",
        "passes: [{ quantize: { scheme: FP8-DYNAMIC } }]",
        "passes: [{ quantize: { scheme: FP8-BLOCK } }]",
        "passes: [{ quantize: { scheme: MXFP4A16 } }]",
        "passes: [{ quantize-dynamic: {} }]\nexport: [{ safetensors: { layout: dense } }]",
        "passes: [{ palettize: { bits: 3 } }]",
    ] {
        law(&model, folder.path(), steps, true);
    }
}

#[test]
fn passes_that_need_the_whole_tensor_do_not_split_it() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), DType::BF16, (BIG, vec![ROWS, WIDTH]));
    for steps in [
        "passes: [{ prune-unstructured: {} }]",
        "passes: [{ quantize-dynamic: { granularity: tensor } }]",
        "passes: [{ quantize: { scheme: NVFP4A16 } }]",
        "passes: [{ palettize: { bits: 2, group_size: -1 } }]",
        "passes: [{ prune-unstructured: { scope: global } }]\nexport: [{ safetensors: { layout: sparse } }]",
    ] {
        law(&model, folder.path(), steps, false);
    }
}

#[test]
fn stacked_experts_and_embeddings_are_split() {
    let folder = tempfile::tempdir().unwrap();
    let experts = model(folder.path(), DType::F32, ("model.layers.0.mlp.experts.gate_up_proj", vec![160, 96, WIDTH]));
    law(
        &experts,
        folder.path(),
        "passes: [{ prune-unstructured: { scope: global, amount: 0.3, targets: ['*experts*', '*norm*', '*q_proj*'] } }, { cast: { to: bf16 } }]",
        true,
    );
    law(&experts, folder.path(), "passes: [{ prune-unstructured: { scope: global, amount: 0.2 } }]", true);
    let table = model(folder.path(), DType::BF16, ("model.embed_positions.weight", vec![ROWS, WIDTH]));
    let twice = "passes: [{ prune-unstructured: { amount: 0.2, scope: global, targets: ['*'] } }, { prune-unstructured: { amount: 0.4, scope: global, targets: ['*'] } }, { quantize-dynamic: { embeddings: true } }]";
    law(&table, folder.path(), twice, true);
}

#[test]
fn one_huge_tensor_is_balanced_across_parts() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), DType::BF16, (BIG, vec![ROWS, WIDTH]));
    let output = folder.path().join("out");
    in_parts("passes: []", &model, &output, 8);
    let sizes = sizes(&output, 8);
    let fair = sizes.iter().sum::<u64>() as f64 / 8.0;
    assert!(sizes.iter().all(|size| (0.75..1.25).contains(&(*size as f64 / fair))), "{sizes:?} around {fair}");
    // Unsplit, it would be 95 % of the bytes.
    let large = std::fs::metadata(model.join("model.safetensors")).unwrap().len() as f64;
    assert!((ROWS * WIDTH * 2) as f64 > 0.9 * large);
}

#[test]
fn single_parts_are_written_again_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), DType::BF16, (BIG, vec![ROWS, WIDTH]));
    let (steps, output) = ("passes: [{ prune-unstructured: { scope: global } }]", folder.path().join("out"));
    in_parts(steps, &model, &output, 4);
    assert_eq!(part(steps, &model, &output, 3, 4), PartOutcome::Found);
    let third = parts_folder(&output).join("00003-of-00004");
    let bytes = std::fs::read(third.join("model.safetensors")).unwrap();
    std::fs::remove_dir_all(&third).unwrap();
    let error = merged(&model, &output, false).unwrap_err();
    assert!(error.to_string().contains("1 of 4 parts are missing: 3"), "{error}");
    // The counts of all parts still exist.
    assert_eq!(part(steps, &model, &output, 3, 4), PartOutcome::Written);
    assert!(std::fs::read(third.join("model.safetensors")).unwrap() == bytes);
    let mut damaged = bytes.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(third.join("model.safetensors"), &damaged).unwrap();
    assert!(merged(&model, &output, false).unwrap_err().to_string().contains("damaged"));
    std::fs::write(third.join("model.safetensors"), &bytes).unwrap();
    merged(&model, &output, true).unwrap();
    assert_eq!(sizes(&output, 4).len(), 4);
    // The output shares no files with the kept folders.
    std::fs::remove_dir_all(parts_folder(&output)).unwrap();
    assert_eq!(Model::open(&output).unwrap().weights.by_name[BIG].shape, [ROWS, WIDTH]);
}

#[test]
fn inconsistent_parts_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), DType::BF16, (BIG, vec![ROWS, WIDTH]));
    let (steps, output) = ("passes: [quantize-dynamic]", folder.path().join("out"));
    in_parts(steps, &model, &output, 3);
    let place = manifest_path(&output, PartIndex::new(2, 3).unwrap());
    let text = std::fs::read_to_string(&place).unwrap();
    let tell = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let weights = value["weights"].as_array_mut().unwrap();
        let at = weights.iter().position(|weight| weight["name"] == BIG).unwrap();
        change(&mut weights[at]);
        std::fs::write(&place, value.to_string()).unwrap();
        let error = merged(&model, &output, false).unwrap_err();
        assert!(!output.exists() && error.hint().is_some(), "{error}");
        error.to_string()
    };
    let add = |weight: &mut serde_json::Value, at: usize, more: u64| weight["rows"]["rows"][at] = (weight["rows"]["rows"][at].as_u64().unwrap() + more).into();
    for (change, message) in [
        (&(|weight: &mut serde_json::Value| add(weight, 0, 1024)) as &dyn Fn(&mut serde_json::Value), "pieces that are not adjacent"),
        (&|weight: &mut serde_json::Value| add(weight, 1, 1024), "pieces that are not adjacent"),
        (&|weight: &mut serde_json::Value| add(weight, 2, 1), "split as a tensor of 20012 rows, but has 20011"),
        (&|weight: &mut serde_json::Value| weight["name"] = "other".into(), "pieces that are not adjacent"),
        (&|weight: &mut serde_json::Value| drop(weight.as_object_mut().unwrap().remove("rows")), "completely in one of them"),
        (&|weight: &mut serde_json::Value| drop(weight["rows"]["hash"].as_array_mut().unwrap().pop()), "was not measured completely"),
        (&|weight: &mut serde_json::Value| weight["rows"]["hash"][0][1] = "x".into(), "is malformed"),
    ] {
        let found = tell(change);
        assert!(found.contains(message) && (found.contains(BIG) || found.contains("part.json")), "{found}");
    }
    std::fs::write(&place, &text).unwrap();
    merged(&model, &output, true).unwrap();
    // Parts of the same recipe with another minimum size for splitting.
    let refused =
        Pipeline::builder().recipe(&recipe_from_parts(&output).unwrap()).build().unwrap().merge(Model::open(&model).unwrap(), folder.path().join("out"), false);
    assert!(refused.unwrap_err().to_string().contains("exists"));
    std::fs::remove_dir_all(&output).unwrap();
    let refused = Pipeline::builder().recipe(&recipe_from_parts(&output).unwrap()).build().unwrap().merge(Model::open(&model).unwrap(), &output, false);
    assert!(refused.unwrap_err().to_string().contains("another run"));
}

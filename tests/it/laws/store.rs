//! Property: tensors are written as they were read, in every dtype, layout and number of files.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::given::{FLOATS, Values, config, infinity, long, model, sign};
use crate::common::{DType, Desk, Tensor, Tensors, contents, pipeline, read, write};
use compress::Error;
use compress::export::{ByteSize, Layout, Safetensors};
use compress::pass::{NOfM, PruneUnstructured};
use compress_engine::model::Model;

/// All dtypes of the format.
pub const TYPES: [DType; 22] = [
    DType::BOOL,
    DType::F4,
    DType::F6_E2M3,
    DType::F6_E3M2,
    DType::U8,
    DType::I8,
    DType::F8_E5M2,
    DType::F8_E4M3,
    DType::F8_E8M0,
    DType::F8_E4M3FNUZ,
    DType::F8_E5M2FNUZ,
    DType::I16,
    DType::U16,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::U32,
    DType::F32,
    DType::C64,
    DType::F64,
    DType::I64,
    DType::U64,
];

/// Random bytes of any dtype; sub-byte dtypes fill whole bytes.
fn raw() -> impl Strategy<Value = Tensor> {
    (select(&TYPES[..]), vec(0..=5usize, 0..=4)).prop_flat_map(|(dtype, mut shape)| {
        if dtype.bitsize() < 8 {
            match shape.last_mut() {
                Some(last) => *last *= 4,
                None => shape.push(4),
            }
        }
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        vec(any::<u8>(), bytes).prop_map(move |bytes| Tensor::new(dtype, &shape, bytes))
    })
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z]{0,3}(\\.[a-z0-9]{1,3}){0,2}", "[ -~]{0,8}", "\\PC{0,4}"]
}

/// A random checkpoint.
fn anything() -> impl Strategy<Value = Tensors> {
    btree_map(names(), raw(), 0..6).prop_filter("a name of the format itself", |tensors| !tensors.contains_key("__metadata__"))
}

/// Floats with many zeros, and random other tensors.
fn sparse() -> impl Strategy<Value = Tensors> {
    let shapes = vec(1..=6usize, 0..=4).boxed();
    (model(&FLOATS, shapes, Values::Any, 1..=4), anything(), any::<u64>()).prop_map(|(mut floats, rest, keep)| {
        for tensor in floats.values_mut() {
            let bits: Vec<u64> = tensor.bits().into_iter().enumerate().map(|(i, bits)| if keep >> (i % 64) & 7 == 0 { bits } else { 0 }).collect();
            *tensor = Tensor::from_bits(tensor.dtype, &tensor.shape, &bits);
        }
        rest.into_iter().chain(floats).collect()
    })
}

fn shards(layout: Layout, bytes: u64) -> Safetensors {
    Safetensors { layout, shard_size: ByteSize(bytes) }
}

/// Checks the files of a folder against a size limit and their index, and returns their contents.
fn check(folder: &std::path::Path, limit: u64) -> Tensors {
    let tensors = read(folder);
    let files: Vec<String> = contents(folder).into_keys().filter(|name| name.ends_with(".safetensors")).collect();
    let held: BTreeMap<&String, Tensors> = files.iter().map(|name| (name, read(&folder.join(name)))).collect();
    for (name, held) in &held {
        let bytes: usize = held.values().map(|t| t.bytes.len()).sum();
        let owner = |part: &String| [".values", ".bitmask", ".shape"].iter().find_map(|suffix| part.strip_suffix(suffix)).unwrap_or(part).to_owned();
        let weights: BTreeSet<String> = held.keys().map(owner).collect();
        assert!(bytes as u64 <= limit || weights.len() == 1, "{name} has {bytes} bytes, {limit} are allowed: {held:?}");
    }
    let index = folder.join("model.safetensors.index.json");
    if files == ["model.safetensors"] {
        assert!(!index.exists());
        return tensors;
    }
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], tensors.values().map(|t| t.bytes.len()).sum::<usize>());
    let map: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).unwrap();
    assert_eq!(map.keys().collect::<Vec<_>>(), tensors.keys().collect::<Vec<_>>());
    assert!(map.iter().all(|(tensor, file)| held[file].contains_key(tensor)));
    for (i, name) in files.iter().enumerate() {
        assert_eq!(*name, format!("model-{:05}-of-{:05}.safetensors", i + 1, files.len()));
    }
    tensors
}

proptest! {
    #![proptest_config(config(192))]

    #[test]
    fn a_copy_equals_the_file_of_the_reference(before in anything()) {
        let desk = Desk::new();
        let input = desk.weights(&before);
        let output = desk.run(&input, pipeline()).unwrap();
        let file = |folder: &std::path::Path| std::fs::read(folder.join("model.safetensors")).unwrap();
        prop_assert_eq!(read(&output.path), before);
        prop_assert!(file(&output.path) == file(&input));
    }

    #[test]
    fn shards_do_not_exceed_their_limit(before in anything(), limit in 1..200u64, parts in 1..4usize) {
        let desk = Desk::new();
        prop_assume!(!before.is_empty());
        let output = desk.run(&desk.shards(&before, parts.min(before.len())), pipeline().export(shards(Layout::Auto, limit))).unwrap();
        prop_assert_eq!(check(&output.path, limit), before.clone());
        let joined = desk.run(&output.path, pipeline()).unwrap();
        prop_assert!(contents(&joined.path) == contents(&desk.weights(&before)));
    }

    #[test]
    fn sparse_tensors_are_restored_bit_for_bit(before in sparse(), limit in prop_oneof![Just(u64::MAX), 1..400u64]) {
        let desk = Desk::new();
        let input = desk.weights(&before);
        let packed = desk.run(&input, pipeline().export(shards(Layout::Sparse, limit))).unwrap();
        let held = check(&packed.path, limit);
        for (name, tensor) in &before {
            match held.get(&format!("{name}.values")) {
                Some(values) => assert!(held[&format!("{name}.bitmask")].bytes.len() + values.bytes.len() < tensor.bytes.len()),
                None => prop_assert_eq!(&held[name], tensor),
            }
        }
        for layout in [Layout::Auto, Layout::Dense] {
            let back = desk.run(&packed.path, pipeline().export(Safetensors::with_layout(layout))).unwrap();
            prop_assert!(contents(&back.path) == contents(&input));
        }
    }
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn values_that_are_not_finite_are_refused_by_name(
        mut before in model(&FLOATS, vec(1..=6usize, 2..=3).boxed(), Values::Finite, 2..=3), at in any::<(Index, Index)>(), minus in any::<bool>(), extra in 0..2u64, prune in any::<bool>()
    ) {
        let name = at.0.get(&before.keys().cloned().collect::<Vec<_>>()).clone();
        let Tensor { dtype, shape, .. } = before[&name].clone();
        let mut bits = before[&name].bits();
        let place = at.1.index(bits.len());
        bits[place] = infinity(dtype) + extra + if minus { sign(dtype) } else { 0 };
        before.insert(name.clone(), Tensor::from_bits(dtype, &shape, &bits));
        let desk = Desk::new();
        let (input, place) = (desk.weights(&before), desk.place());
        let passes = prune.then(|| PruneUnstructured { targets: crate::common::all(), ..Default::default() }.into());
        let strict = pipeline().passes(passes).allow_nonfinite(false).build().unwrap();
        let error = strict.run(Model::open(&input).unwrap(), &place).unwrap_err();
        assert!(matches!(&error, Error::NotFinite { name: found, count: 1 } if *found == name), "{error}");
        prop_assert!(!place.exists());
    }
}

#[test]
fn long_sparse_tensors_are_restored() {
    for (dtype, shape) in [(DType::F16, vec![1301, 211]), (DType::F32, vec![290_001]), (DType::F64, vec![3, 9, 70_007 / 9])] {
        let desk = Desk::new();
        let before = desk.weights(&long(dtype, &shape, 5));
        let pruned = || pipeline().pass(PruneUnstructured { targets: crate::common::all(), ..Default::default() });
        let plain = desk.run(&before, pruned()).unwrap();
        let packed = desk.run(&before, pruned().export(Safetensors::with_layout(Layout::Sparse))).unwrap();
        assert!(packed.report.size.after.bytes < plain.report.size.after.bytes * 6 / 10);
        let back = desk.run(&packed.path, pipeline()).unwrap();
        assert!(contents(&back.path) == contents(&plain.path));
    }
}

/// Blocks requested by a pass can start within a byte of the mask of a sparse tensor.
#[test]
fn passes_treat_sparse_and_dense_tensors_alike() {
    let desk = Desk::new();
    let before = desk.weights(&long(DType::F32, &[500, 6, 11, 7], 6));
    let amount = || PruneUnstructured { targets: crate::common::all(), ..Default::default() };
    let pattern = || PruneUnstructured { pattern: Some(NOfM { n: 1, m: 3 }), ..amount() };
    let plain = desk.run(&before, pipeline().pass(amount()).pass(pattern())).unwrap();
    let packed = desk.run(&before, pipeline().pass(amount()).export(Safetensors::with_layout(Layout::Sparse))).unwrap();
    let after = desk.run(&packed.path, pipeline().pass(pattern())).unwrap();
    assert!(contents(&after.path) == contents(&plain.path));
}

#[test]
fn auxiliary_files_are_copied_unchanged() {
    let desk = Desk::new();
    for shards in [1, 3] {
        let input = desk.pico(DType::F16, shards);
        let around = |folder| contents(folder).into_iter().filter(|(name, _)| !name.contains(".safetensors")).collect::<BTreeMap<_, _>>();
        let output = desk.run(&input, pipeline()).unwrap();
        assert_eq!(around(&output.path), around(&input));
        assert!(around(&output.path).contains_key("1_Pooling/config.json"));
    }
}

#[test]
fn existing_scales_are_not_overwritten() {
    let desk = Desk::new();
    let mut before = long(DType::F32, &[2, 2], 0);
    before.insert("t0.weight_scale".into(), before["t0.weight"].clone());
    let input = desk.place();
    std::fs::create_dir(&input).unwrap();
    write(&input.join("other.safetensors"), &before);
    let error =
        desk.run(&input, pipeline().pass(compress::pass::QuantizeDynamic { targets: vec!["t0".parse().unwrap()], ..Default::default() })).err().unwrap();
    assert!(error.to_string().contains("`t0.weight_scale`"), "{error}");
}

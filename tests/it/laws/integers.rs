//! Property: integer weights have the same values in every storage format.

use std::collections::BTreeMap;

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;

use super::given::{Values, config, long, model, tensor};
use crate::common::{DType, Desk, Output, Tensor, Tensors, contents, pipeline, read};
use compress::Pipeline;
use compress::export::{ByteSize, Layout, Safetensors};
use compress::pass::{ActivationRounding, Cast, GranularityKind, PruneUnstructured, Quantize, QuantizeDynamic, Step};
use compress::pipeline::Builder;
use serde_json::{Value, json};

/// The integers of a weight, unpacked if necessary.
fn integers(tensors: &Tensors, name: &str) -> Option<Tensor> {
    let Some(words) = tensors.get(&format!("{name}_packed")) else {
        return tensors.get(name).filter(|tensor| tensor.dtype == DType::I8).cloned();
    };
    let shape = tensors[&format!("{name}_shape")].bits().into_iter().map(|size| size as usize).collect::<Vec<_>>();
    let rows = words.bytes.chunks(4 * words.shape[1]).flat_map(|row| row[..shape[1]].iter().map(|byte| byte.wrapping_sub(128)));
    Some(Tensor::new(DType::I8, &shape, rows.collect()))
}

/// The dequantized values by definition, in the dtype of the scales.
fn dequantized(tensors: &Tensors, name: &str, q: &Tensor) -> Tensor {
    let scale = &tensors[&format!("{name}_scale")];
    let scales = scale.values();
    let zeros = tensors.get(&format!("{name}_zero_point")).map_or(vec![0.0; scales.len()], Tensor::values);
    let run = q.bytes.len() / scales.len();
    let largest = [(DType::F16, 65504.0), (DType::BF16, f32::from_bits(0x7F7F_0000)), (DType::F32, f32::MAX)]
        .into_iter()
        .find(|(dtype, _)| *dtype == scale.dtype)
        .unwrap()
        .1;
    // The lowest integer can exceed the range of the dtype by half a step.
    let value = |(i, q): (usize, f64)| ((q - zeros[i / run]) as f32 * scales[i / run] as f32).clamp(-largest, largest);
    let round = |v: f32| match scale.dtype {
        DType::F16 => f16::from_f32(v).to_bits().into(),
        DType::BF16 => bf16::from_f32(v).to_bits().into(),
        _ => v.to_bits().into(),
    };
    let bits: Vec<u64> = q.values().into_iter().enumerate().map(value).map(round).collect();
    Tensor::from_bits(scale.dtype, &q.shape, &bits)
}

/// Runs the same passes with every layout, and converts between the layouts.
fn check(before: &Tensors, passes: Passes) {
    let desk = Desk::new();
    let input = desk.weights(before);
    let into = |layout: Layout| desk.run(&input, passes.pipeline().export(passes.format(layout))).unwrap();
    let again = |from: &Output, layout: Layout| desk.run(&from.path, pipeline().export(passes.format(layout))).unwrap();
    let [auto, named, sparse, dense] = [Layout::Auto, Layout::CompressedTensors, Layout::Sparse, Layout::Dense].map(into);
    let [auto_files, sparse_files, dense_files] = [&auto, &sparse, &dense].map(|output| contents(&output.path));
    assert!(auto_files == contents(&named.path));
    let same = |from: &Output, layout, files: &BTreeMap<String, Vec<u8>>| {
        assert!(contents(&again(from, layout).path) == *files, "{} to {layout:?}: {passes:?}", from.path.display())
    };
    same(&auto, Layout::Auto, &auto_files);
    same(&auto, Layout::Sparse, &sparse_files);
    same(&auto, Layout::Dense, &dense_files);
    same(&sparse, Layout::Auto, &auto_files);
    same(&sparse, Layout::Dense, &dense_files);
    let (auto, dense) = (read(&auto.path), read(&dense.path));
    assert_eq!(dense.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    for (name, tensor) in &dense {
        if let Some(q) = integers(&auto, name) {
            assert_eq!(*tensor, dequantized(&auto, name, &q), "{passes:?}");
        }
        assert!(tensor.values().iter().all(|v| v.is_finite()), "{name}: finite weights became {tensor:?} from {:?} by {passes:?}", before[name]);
    }
}

#[derive(Debug, Clone)]
struct Passes {
    quantize: QuantizeDynamic,
    prune: bool,
    shard_size: u64,
}

impl Passes {
    fn pipeline(&self) -> Builder {
        let prune = self.prune.then(|| PruneUnstructured::default().into());
        pipeline().passes(prune).pass(self.quantize.clone())
    }

    fn format(&self, layout: Layout) -> Safetensors {
        Safetensors { layout, shard_size: ByteSize(self.shard_size) }
    }
}

fn passes(size: usize) -> impl Strategy<Value = Passes> {
    let kinds = select(vec![GranularityKind::Tensor, GranularityKind::Channel, GranularityKind::Group]);
    (kinds, any::<[bool; 4]>(), prop_oneof![Just(u64::MAX), 1..300u64]).prop_map(
        move |(granularity, [symmetric, weights_only, prune, embeddings], shard_size)| Passes {
            quantize: QuantizeDynamic {
                granularity,
                group_size: (granularity == GranularityKind::Group).then_some(size),
                symmetric,
                activations: if weights_only { ActivationRounding::None } else { ActivationRounding::Token },
                embeddings,
                ..Default::default()
            },
            prune,
            shard_size,
        },
    )
}

/// Two linear layers, an embedding and a norm.
fn layers() -> impl Strategy<Value = (usize, Tensors)> {
    (1..=5usize, 1..=3usize).prop_flat_map(|(size, groups)| {
        let shapes = (1..=6usize).prop_map(move |rows| vec![rows, size * groups]).boxed();
        let names = ["a.weight", "b.weight", "model.embed_tokens.weight", "norm.weight"];
        let tensors = model(&[DType::F16, DType::BF16, DType::F32], shapes, Values::Finite, 4..=4);
        (Just(size), tensors.prop_map(move |tensors| names.iter().map(|n| (*n).to_owned()).zip(tensors.into_values()).collect()))
    })
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn every_format_has_the_same_values((before, passes) in layers().prop_flat_map(|(size, before)| (Just(before), passes(size)))) {
        check(&before, passes);
    }
}

/// A quantized matrix with its scales, and the folder that another tool would write.
#[derive(Debug, Clone)]
struct Words {
    bits: u8,
    shape: [usize; 2],
    groups: usize,
    symmetric: bool,
    integers: Vec<i64>,
    zeros: Vec<i64>,
}

impl Words {
    /// Integers as consecutive bits, lowest first, in whole words, by definition.
    fn words(&self, integers: impl Iterator<Item = i64>) -> Vec<u8> {
        let half = 1i64 << (self.bits - 1);
        let mut bits: Vec<bool> = integers.flat_map(|q| (0..self.bits).map(move |bit| (q + half) >> bit & 1 == 1)).collect();
        bits.resize(bits.len().next_multiple_of(32), false);
        bits.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit))).collect()
    }

    fn scales(&self) -> Tensor {
        let count = self.shape[0] * self.groups;
        Tensor::floats(DType::F32, &[self.shape[0], self.groups], &(0..count).map(|i| (i + 1) as f64 / 32.0).collect::<Vec<_>>())
    }

    fn tensors(&self) -> Tensors {
        let [rows, columns] = self.shape;
        let packed: Vec<u8> = self.integers.chunks(columns).flat_map(|row| self.words(row.iter().copied())).collect();
        let mut tensors = Tensors::from([
            ("a.weight_packed".into(), Tensor::new(DType::I32, &[rows, packed.len() / rows / 4], packed)),
            ("a.weight_shape".into(), Tensor::from_bits(DType::I64, &[2], &self.shape.map(|size| size as u64))),
            ("a.weight_scale".into(), self.scales()),
        ]);
        if !self.symmetric {
            let columns: Vec<Vec<u8>> = (0..self.groups).map(|group| self.words(self.zeros.iter().skip(group).step_by(self.groups).copied())).collect();
            let high = columns[0].len() / 4;
            let words = (0..high).flat_map(|word| columns.iter().flat_map(move |column| column[4 * word..4 * word + 4].to_vec())).collect();
            tensors.insert("a.weight_zero_point".into(), Tensor::new(DType::I32, &[high, self.groups], words));
        }
        tensors
    }

    fn folder(&self, desk: &Desk) -> std::path::PathBuf {
        let input = desk.weights(&self.tensors());
        let mut weights = json!({ "num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "strategy": "channel", "dynamic": false });
        if self.groups > 1 {
            (weights["strategy"], weights["group_size"]) = ("group".into(), (self.shape[1] / self.groups).into());
        }
        let group = json!({ "targets": ["Linear"], "weights": weights, "input_activations": null, "output_activations": null, "format": "pack-quantized" });
        let quantization = json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "config_groups": { "group_0": group },
        });
        std::fs::write(input.join("config.json"), json!({ "model_type": "llama", "quantization_config": quantization }).to_string()).unwrap();
        input
    }
}

fn any_words() -> impl Strategy<Value = Words> {
    let kinds = prop_oneof![(2u8..8, any::<bool>()), Just((8u8, true))];
    (kinds, 1..=70usize, 1..=19usize, 1..=3usize, any::<u64>()).prop_map(|((bits, symmetric), rows, size, groups, seed)| {
        let half = 1i64 << (bits - 1);
        let pick = |i: usize| (seed.rotate_left(i as u32 % 61).wrapping_mul(2 * i as u64 + 1) >> 20) as i64 % (2 * half) - half;
        let shape = [rows, size * groups];
        let zeros = (0..rows * groups).map(|i| if symmetric { 0 } else { pick(i + 7) }).collect();
        Words { bits, shape, groups, symmetric, integers: (0..shape[0] * shape[1]).map(pick).collect(), zeros }
    })
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn packed_words_of_every_width_are_converted(words in any_words()) {
        let desk = Desk::new();
        let input = words.folder(&desk);
        let into = |from: &std::path::Path, layout| read(&desk.run(from, pipeline().export(Safetensors::with_layout(layout))).unwrap().path);
        prop_assert_eq!(into(&input, Layout::Auto), words.tensors());
        let sparse = desk.run(&input, pipeline().export(Safetensors::with_layout(Layout::Sparse))).unwrap();
        prop_assert_eq!(into(&sparse.path, Layout::Auto), words.tensors());
        let (scales, run) = (words.scales().values(), words.shape[1] / words.groups);
        let value = |(i, q): (usize, &i64)| (q - words.zeros[i / run]) as f64 * scales[i / run];
        prop_assert_eq!(into(&sparse.path, Layout::Dense)["a.weight"].values(), words.integers.iter().enumerate().map(value).collect::<Vec<_>>());
    }
}

/// Values of a float format by definition: a sign bit, `exponent` bits and `fraction` bits.
fn narrow_value(code: u8, exponent: u32, fraction: u32) -> f64 {
    let bias = (1 << (exponent - 1)) - 1;
    let (part, power) = (f64::from(code & ((1 << fraction) - 1)) / f64::from(1 << fraction), i32::from(code >> fraction & ((1 << exponent) - 1)));
    let magnitude = if power == 0 { part * 2f64.powi(1 - bias) } else { (1.0 + part) * 2f64.powi(power - bias) };
    if code >> (exponent + fraction) & 1 == 1 { -magnitude } else { magnitude }
}

/// The values of an FP8, FP6 or FP4 weight, from the tensors of its file.
fn narrow_values(tensors: &Tensors) -> Vec<f64> {
    let bytes = |name: &str| tensors[name].bytes.clone();
    let e4m3 = |tensor: &Tensor| tensor.bytes.iter().map(|code| narrow_value(*code, 4, 3)).collect::<Vec<_>>();
    let (codes, columns): (Vec<f64>, usize) = match tensors.get("a.weight_packed") {
        Some(packed) => {
            let scales = &tensors["a.weight_scale"];
            let columns = scales.shape[1] * if scales.dtype == DType::U8 { 32 } else { 16 };
            let bits = 8 * packed.shape[1] / columns;
            let bit = |at: usize| packed.bytes[at / 8] >> (at % 8) & 1;
            let code = |at: usize| (0..bits).fold(0, |code, i| code | bit(at * bits + i) << i);
            let fraction = bits as u32 - 3;
            ((0..packed.shape[0] * columns).map(|at| narrow_value(code(at), 2, fraction)).collect(), columns)
        }
        None => (e4m3(&tensors["a.weight"]), tensors["a.weight"].shape[1]),
    };
    let scale = &tensors["a.weight_scale"];
    let global = tensors.get("a.weight_global_scale").map_or(1.0, |global| global.values()[0]);
    let scales: Vec<f32> = match scale.dtype {
        DType::F8_E4M3 => e4m3(scale).into_iter().map(|s| s as f32 / global as f32).collect(),
        DType::U8 => bytes("a.weight_scale").into_iter().map(|byte| 2f32.powi(i32::from(byte) - 127)).collect(),
        _ => scale.values().into_iter().map(|s| s as f32).collect(),
    };
    let rows = codes.len() / columns;
    let (high, wide) = if scale.shape[0] == rows { (1, columns / scale.shape[1]) } else { (128, 128) };
    let at = |i: usize| scales[i / columns / high * (columns / wide) + i % columns / wide];
    codes.iter().enumerate().map(|(i, code)| f64::from(*code as f32 * at(i))).collect()
}

proptest! {
    #![proptest_config(proptest::test_runner::Config { max_shrink_iters: 64, ..config(24) })]

    #[test]
    fn minifloats_are_converted(
        (before, (scheme, observer)) in (1..=3usize, 2..=140usize, select(vec![DType::F16, DType::BF16, DType::F32])).prop_flat_map(|(groups, rows, dtype)| {
            let schemes = select(vec![("FP8-DYNAMIC", "minmax"), ("FP8-DYNAMIC", "mse"), ("FP8-BLOCK", "minmax"), ("NVFP4A16", "minmax"), ("NVFP4A16", "mse"), ("MXFP4A16", "minmax"), ("MXFP4", "mse"), ("MXFP6A16", "minmax"), ("MXFP6A16", "mse")]);
            (tensor(dtype, vec![rows, 32 * groups * groups], Values::Finite), schemes)
        })
    ) {
        let desk = Desk::new();
        // A norm, which determines the default float dtype.
        let norm = Tensor::floats(before.dtype, &[1], &[1.0]);
        let input = desk.weights(&Tensors::from([("a.weight".into(), before.clone()), ("norm.weight".into(), norm)]));
        let quantize: Quantize = serde_json::from_value(json!({ "scheme": scheme, "observer": observer })).unwrap();
        let into = |layout| desk.run(&input, pipeline().pass(quantize.clone()).export(Safetensors::with_layout(layout))).unwrap();
        let again = |from: &Output, layout| contents(&desk.run(&from.path, pipeline().export(Safetensors::with_layout(layout))).unwrap().path);
        let [auto, sparse, dense] = [Layout::Auto, Layout::Sparse, Layout::Dense].map(into);
        prop_assert!(again(&auto, Layout::Auto) == contents(&auto.path), "{scheme}");
        prop_assert!(again(&auto, Layout::Sparse) == contents(&sparse.path), "{scheme}");
        prop_assert!(again(&sparse, Layout::Auto) == contents(&auto.path), "{scheme}");
        prop_assert!(again(&auto, Layout::Dense) == contents(&dense.path), "{scheme}");
        let (dense, by_definition) = (read(&dense.path), narrow_values(&read(&auto.path)));
        prop_assert_eq!(dense["a.weight"].dtype, before.dtype);
        let largest = before.values().iter().fold(0f64, |largest, v| largest.max(v.abs()));
        let end = match before.dtype {
            DType::F16 => 65504.0,
            DType::BF16 => f64::from(f32::from_bits(0x7F7F_0000)),
            _ => f32::MAX.into(),
        };
        for ((after, exact), before) in dense["a.weight"].values().into_iter().zip(&by_definition).zip(before.values()) {
            let rounding = match dense["a.weight"].dtype { DType::BF16 => 2f64.powi(-8), DType::F16 => 2f64.powi(-11), _ => 0.0 };
            let exact = exact.clamp(-end, end);
            prop_assert!((after - exact).abs() <= exact.abs() * rounding + 6e-8, "{scheme}: {after} is not {exact}");
            prop_assert!((after - before).abs() <= 0.34 * largest + 6e-8, "{scheme}: {before} became {after}");
        }
    }
}

#[test]
fn incomplete_last_blocks_keep_their_scales() {
    let desk = Desk::new();
    let codes = (0..300 * 256).map(|i| (i * 37 % 127) as u8).collect();
    let tensors = Tensors::from([
        ("a.weight".into(), Tensor::new(DType::F8_E4M3, &[300, 256], codes)),
        ("a.weight_scale".into(), Tensor::floats(DType::BF16, &[3, 2], &[1.0, 2.0, 4.0, 8.0, 16.0, 0.5])),
    ]);
    let read_again = |layout| read(&desk.run(&desk.weights(&tensors), pipeline().export(Safetensors::with_layout(layout))).unwrap().path);
    assert_eq!(read_again(Layout::Auto), tensors);
    assert_eq!(read_again(Layout::Dense)["a.weight"].values(), narrow_values(&tensors));
}

#[test]
fn words_must_match_their_description() {
    let words = Words { bits: 4, shape: [3, 64], groups: 2, symmetric: true, integers: vec![5; 192], zeros: vec![0; 6] };
    let refused = |change: &dyn Fn(&mut Value), part: &str| {
        let desk = Desk::new();
        let input = words.folder(&desk);
        let path = input.join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut config["quantization_config"]["config_groups"]["group_0"]);
        std::fs::write(&path, config.to_string()).unwrap();
        let error = desk.run(&input, pipeline()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(&|group| group["weights"]["num_bits"] = 3.into(), "packed words of shape [3, 8] do not hold 3-bit integers of the stated shape [3, 64]");
    refused(&|group| group["weights"]["num_bits"] = 16.into(), "weights of 16 bits");
    // One byte each, with values that exceed the declared four bits.
    let desk = Desk::new();
    let input = words.folder(&desk);
    let plain = Tensors::from([
        ("a.weight".into(), Tensor::new(DType::I8, &[1, 2], vec![7, 9])),
        ("a.weight_scale".into(), Tensor::floats(DType::F32, &[1, 1], &[1.0])),
    ]);
    let other = desk.weights(&plain);
    std::fs::copy(input.join("config.json"), other.join("config.json")).unwrap();
    let error = desk.run(&other, pipeline()).err().unwrap().to_string();
    assert!(error.contains("`a.weight`") && error.contains("integers that do not fit the 4 bits of its encoding"), "{error}");
}

#[test]
fn long_integer_tensors_have_the_same_values_in_every_format() {
    // Rows of odd length, so that blocks end within a byte of the mask.
    let before = long(DType::BF16, &[1301, 211], 3);
    for granularity in [GranularityKind::Tensor, GranularityKind::Channel] {
        for symmetric in [true, false] {
            let quantize = QuantizeDynamic { granularity, symmetric, ..Default::default() };
            check(&before, Passes { quantize, prune: true, shard_size: u64::MAX });
        }
    }
}

#[test]
fn a_tied_head_has_a_copy_of_the_scales_of_its_embedding() {
    let desk = Desk::new();
    // Larger than a block.
    let integers = Tensor::new(DType::I8, &[5000, 40], vec![3; 200_000]);
    for shape in [vec![1], vec![5000, 1]] {
        let scales = Tensor::random(DType::F32, &shape, 1);
        let tensors = ["model.embed_tokens.weight", "model.embed_tokens.weight_scale", "lm_head.weight_scale"]
            .map(str::to_owned)
            .into_iter()
            .zip([integers.clone(), scales.clone(), scales])
            .collect();
        let input = desk.weights(&tensors);
        std::fs::write(input.join("config.json"), r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": true}"#).unwrap();
        assert_eq!(read(&desk.run(&input, pipeline()).unwrap().path), tensors);
    }
}

#[test]
fn empty_integer_tensors_are_preserved() {
    let desk = Desk::new();
    let integers = |name: &str, dtype, shape: [usize; 2]| (name.to_owned(), Tensor::new(dtype, &shape, Vec::new()));
    for (shape, scales) in [([0, 4], vec![0, 1]), ([0, 4], vec![1]), ([2, 0], vec![2, 1])] {
        let ones = Tensor::floats(DType::F32, &scales, &vec![1.0; scales.iter().product()]);
        let words = Tensor::from_bits(DType::I64, &[2], &shape.map(|size| size as u64));
        let mut tensors = Tensors::from([integers("a.weight", DType::I8, shape), integers("b.weight_packed", DType::I32, shape.map(|size| size / 4))]);
        tensors.extend([("a.weight_scale".into(), ones.clone()), ("b.weight_scale".into(), ones), ("b.weight_shape".into(), words)]);
        for layout in [Layout::Auto, Layout::Sparse, Layout::Dense] {
            let output = desk.run(&desk.weights(&tensors), pipeline().export(Safetensors::with_layout(layout))).unwrap();
            assert_eq!(read(&output.path), tensors, "{layout:?}");
        }
    }
}

#[test]
fn scales_that_are_not_finite_are_refused_by_name() {
    let desk = Desk::new();
    for scale in [f64::NAN, f64::INFINITY] {
        let integers = Tensor::new(DType::I8, &[1, 2], vec![1, 255]);
        let input = desk.weights(&Tensors::from([("a.weight".into(), integers), ("a.weight_scale".into(), Tensor::floats(DType::F32, &[1, 1], &[scale]))]));
        let error = desk.run(&input, Pipeline::builder()).err().unwrap();
        assert!(matches!(&error, compress::Error::NotFinite { name, .. } if name == "a.weight"), "{error}");
    }
}

#[test]
fn quantized_weights_are_not_quantized_pruned_or_cast() {
    let desk = Desk::new();
    let int8 = desk.run(&desk.pico(DType::BF16, 1), pipeline().pass(QuantizeDynamic::default())).unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    let targets = vec![name.parse().unwrap()];
    let steps: [Step; 3] = [
        QuantizeDynamic { targets: targets.clone(), ..Default::default() }.into(),
        PruneUnstructured { targets: targets.clone(), ..Default::default() }.into(),
        Cast { targets, ..Default::default() }.into(),
    ];
    for step in steps {
        let error = desk.run(&int8.path, pipeline().passes([step])).err().unwrap().to_string();
        assert!(error.contains(name) && error.contains("int8 channel"), "{error}");
    }
}

/// Rows with scales that are subnormal in f16: large values are preserved, and small ones do not become
/// zero.
#[test]
fn small_rows_of_16_bits_are_preserved() {
    for symmetric in [true, false] {
        for largest in [2e-7, 1e-6, 7e-6, 3e-5, 1e-4, 9e-4, 5e-3] {
            let values: Vec<f64> = (0..64).map(|i| largest * f64::from(i - 32) / 32.0).collect();
            let before = Tensor::floats(DType::F16, &[1, 64], &values);
            let desk = Desk::new();
            let passes = Passes { quantize: QuantizeDynamic { symmetric, ..Default::default() }, prune: false, shard_size: u64::MAX };
            let output =
                desk.run(&desk.weights(&[("a.weight".to_owned(), before.clone())].into()), passes.pipeline().export(passes.format(Layout::Dense))).unwrap();
            let after = read(&output.path)["a.weight"].values();
            // Half of a step, which is at least the spacing of f16, and the rounding of the result.
            let step = f64::max((largest / 127.5) * 1.08, 2f64.powi(-24));
            for (before, after) in before.values().iter().zip(after) {
                assert!((before - after).abs() <= 0.51 * step + before.abs() * 1e-3, "{largest}: {before} became {after}");
            }
        }
    }
}

//! Int8 weights in every form that they are stored in stand for the same values.

use std::collections::BTreeMap;

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;

use super::given::{Values, config, long, model};
use crate::common::{DType, Desk, Output, Tensor, Tensors, contents, pipeline, read};
use compress::Pipeline;
use compress::export::{ByteSize, Layout, Safetensors};
use compress::pass::{ActivationRounding, Cast, GranularityKind, PruneUnstructured, QuantizeDynamic, Step};
use compress::pipeline::Builder;

/// The integers of a weight, taken out of their words when they are packed.
fn integers(tensors: &Tensors, name: &str) -> Option<Tensor> {
    let Some(words) = tensors.get(&format!("{name}_packed")) else {
        return tensors.get(name).filter(|tensor| tensor.dtype == DType::I8).cloned();
    };
    let shape = tensors[&format!("{name}_shape")].bits().into_iter().map(|size| size as usize).collect::<Vec<_>>();
    let rows = words.bytes.chunks(4 * words.shape[1]).flat_map(|row| row[..shape[1]].iter().map(|byte| byte.wrapping_sub(128)));
    Some(Tensor::new(DType::I8, &shape, rows.collect()))
}

/// The floats that integers stand for, by the definition, in the type of their scales.
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
    // The lowest integer can stand for half a step more than the type holds.
    let value = |(i, q): (usize, f64)| ((q - zeros[i / run]) as f32 * scales[i / run] as f32).clamp(-largest, largest);
    let round = |v: f32| match scale.dtype {
        DType::F16 => f16::from_f32(v).to_bits().into(),
        DType::BF16 => bf16::from_f32(v).to_bits().into(),
        _ => v.to_bits().into(),
    };
    let bits: Vec<u64> = q.values().into_iter().enumerate().map(value).map(round).collect();
    Tensor::from_bits(scale.dtype, &q.shape, &bits)
}

/// Runs the same passes into every layout and goes back and forth between them.
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
    fn every_form_holds_the_same((before, passes) in layers().prop_flat_map(|(size, before)| (Just(before), passes(size)))) {
        check(&before, passes);
    }
}

#[test]
fn long_integers_hold_the_same_in_every_form() {
    // Rows of odd length, so that a block ends inside a byte of the mask.
    let before = long(DType::BF16, &[1301, 211], 3);
    for granularity in [GranularityKind::Tensor, GranularityKind::Channel] {
        for symmetric in [true, false] {
            let quantize = QuantizeDynamic { granularity, symmetric, ..Default::default() };
            check(&before, Passes { quantize, prune: true, shard_size: u64::MAX });
        }
    }
}

#[test]
fn a_tied_head_has_a_copy_of_its_embeddings_scales() {
    let desk = Desk::new();
    // More than is held of a tensor at a time.
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
fn empty_integers_go_through_as_they_are() {
    let desk = Desk::new();
    let integers = |name: &str, dtype, shape: [usize; 2]| (name.to_owned(), Tensor::new(dtype, &shape, Vec::new()));
    for (shape, scales) in [([0, 4], vec![0, 1]), ([0, 4], vec![1]), ([2, 0], vec![2, 1])] {
        let ones = Tensor::floats(DType::F32, &scales, &vec![1.0; scales.iter().product()]);
        let words = Tensor::from_bits(DType::I64, &[2], &shape.map(|size| size as u64));
        let mut tensors = Tensors::from([integers("a.weight", DType::I8, shape), integers("b.weight_packed", DType::I32, shape.map(|size| size / 4))]);
        tensors.extend([("a.weight_scale".into(), ones.clone()), ("b.weight_scale".into(), ones), ("b.weight_shape".into(), words)]);
        for layout in [Layout::Auto, Layout::Sparse, Layout::Dense] {
            let output = desk.run(&desk.weights(&tensors), pipeline().export(Safetensors::layout(layout))).unwrap();
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
fn integers_are_not_quantized_pruned_or_cast_again() {
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

/// Rows whose scales are subnormal in f16: their largest values keep their size, and small ones do not become zeros.
#[test]
fn small_rows_of_16_bits_are_not_cut_off() {
    for symmetric in [true, false] {
        for largest in [2e-7, 1e-6, 7e-6, 3e-5, 1e-4, 9e-4, 5e-3] {
            let values: Vec<f64> = (0..64).map(|i| largest * f64::from(i - 32) / 32.0).collect();
            let before = Tensor::floats(DType::F16, &[1, 64], &values);
            let desk = Desk::new();
            let passes = Passes { quantize: QuantizeDynamic { symmetric, ..Default::default() }, prune: false, shard_size: u64::MAX };
            let output =
                desk.run(&desk.weights(&[("a.weight".to_owned(), before.clone())].into()), passes.pipeline().export(passes.format(Layout::Dense))).unwrap();
            let after = read(&output.path)["a.weight"].values();
            // Half of a step, which is no less than the distance of neighbours in f16, and the rounding of the result.
            let step = f64::max((largest / 127.5) * 1.08, 2f64.powi(-24));
            for (before, after) in before.values().iter().zip(after) {
                assert!((before - after).abs() <= 0.51 * step + before.abs() * 1e-3, "{largest}: {before} became {after}");
            }
        }
    }
}

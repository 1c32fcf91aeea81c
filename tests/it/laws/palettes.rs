//! Properties: palettes encode the nearest values, and are read back unchanged.

use proptest::prelude::*;
use proptest::sample::select;

use super::given::{Values, config, tensor};
use crate::common::{DType, Desk, Tensor, Tensors, all, contents, pipeline, read};
use compress::export::{Layout, Safetensors};
use compress::pass::{InputImportance, Palettize};
use serde_json::Value;

/// A weight decoded from its file by definition: one index per value, and the codebook of each row.
fn places(tensors: &Tensors, name: &str) -> (Vec<usize>, Vec<usize>, Vec<Vec<f64>>) {
    let shape: Vec<usize> = tensors[&format!("{name}_shape")].bits().into_iter().map(|size| size as usize).collect();
    let (words, palettes) = (&tensors[&format!("{name}_packed")], &tensors[&format!("{name}_palette")]);
    let (rows, row) = (shape[0], shape[1..].iter().product::<usize>());
    let [count, entries] = palettes.shape[..] else { panic!("{:?}", palettes.shape) };
    let bits = entries.ilog2() as usize;
    assert_eq!((words.dtype, &words.shape[..]), (DType::I32, &[rows, (row * bits).div_ceil(32)][..]));
    let bit = |row: usize, at: usize| words.bytes[row * words.shape[1] * 4 + at / 8] >> (at % 8) & 1;
    let place = |row: usize, at: usize| (0..bits).map(|i| usize::from(bit(row, at * bits + i)) << i).sum();
    let found = (0..rows).flat_map(|r| (0..row).map(move |at| (r, at))).map(|(r, at)| place(r, at)).collect();
    let high = rows.div_ceil(count);
    let values = palettes.values();
    (shape, found, (0..rows).map(|row| values[row / high * entries..][..entries].to_vec()).collect())
}

fn pass(bits: u8, group_size: i64) -> Palettize {
    Palettize { bits, group_size, targets: all(), ..Palettize::default() }
}

fn check(before: &Tensor, pass: &Palettize) {
    let desk = Desk::new();
    let input = desk.weights(&[("t.weight".to_owned(), before.clone())].into());
    let into = |layout| desk.run(&input, pipeline().pass(pass.clone()).export(Safetensors::with_layout(layout)));
    let Ok(palettized) = into(Layout::Auto) else {
        // A palette would not be smaller.
        let rows = before.shape[0].div_ceil(pass.group_size as usize);
        let width = if before.dtype == DType::F64 { 4 } else { before.dtype.bitsize() / 8 };
        let words = before.shape[0] * (before.shape[1..].iter().product::<usize>() * usize::from(pass.bits)).div_ceil(32) * 4;
        let all = words + (rows << pass.bits) * width + 8 * before.shape.len();
        assert!(all >= before.bytes.len(), "{before:?} {pass:?}");
        return;
    };
    let tensors = read(&palettized.path);
    let (shape, found, palettes) = places(&tensors, "t.weight");
    assert_eq!(shape, before.shape);
    let (row, values) = (before.shape[1..].iter().product::<usize>(), before.values());
    for (at, (place, value)) in found.iter().zip(&values).enumerate() {
        let palette = &palettes[at / row];
        let least = palette.iter().map(|entry| (entry - value).abs()).fold(f64::INFINITY, f64::min);
        assert!((palette[*place] - value).abs() <= least * (1.0 + 1e-6), "{value}: {place} of {palette:?}");
    }
    // Dequantized values equal those of the codebooks bit for bit.
    let dense = read(&into(Layout::Dense).unwrap().path);
    let meant: Vec<f64> = found.iter().enumerate().map(|(at, place)| palettes[at / row][*place]).collect();
    assert_eq!(dense["t.weight"].values(), meant);
    assert_eq!(dense["t.weight"].shape, before.shape);
    // Reading and writing it again, in every layout, does not change it.
    let files = contents(&palettized.path);
    let again = |layout| desk.run(&palettized.path, pipeline().export(Safetensors::with_layout(layout))).unwrap().path;
    assert!(contents(&again(Layout::Auto)) == files && read(&again(Layout::Sparse)) == tensors);
    assert_eq!(read(&again(Layout::Dense)), dense);
    let error = desk.run(&palettized.path, pipeline().export(Safetensors::with_layout(Layout::CompressedTensors))).map(drop).unwrap_err().to_string();
    assert!(error.contains("compressed-tensors does not support"), "{error}");
}

fn any_tensor(dtypes: &'static [DType]) -> impl Strategy<Value = Tensor> {
    let shapes = prop_oneof![(1..20usize, 1..90usize).prop_map(|(a, b)| vec![a, b]), (1..9usize, 1..6usize).prop_map(|(a, b)| vec![a, b, 3, 3])];
    (select(dtypes), shapes).prop_flat_map(|(dtype, shape)| tensor(dtype, shape, Values::Finite))
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn indices_select_the_nearest_values(before in any_tensor(&[DType::F16, DType::BF16, DType::F32, DType::F64]), bits in 2..=8u8, group in 1..20i64) {
        check(&before, &pass(bits, group));
    }
}

#[test]
fn long_weights_are_palettized_like_short_ones() {
    for dtype in [DType::BF16, DType::F32] {
        check(&Tensor::random(dtype, &[130, 1100], 4), &pass(3, 50));
    }
}

#[test]
fn few_distinct_values_and_zeros_are_preserved() {
    let desk = Desk::new();
    let few = Tensor::floats(DType::F32, &[8, 64], &(0..512).map(|i| f64::from(i * 7 % 4) - 1.5).collect::<Vec<_>>());
    assert_eq!(
        read(
            &desk
                .run(&desk.weights(&[("t.weight".to_owned(), few.clone())].into()), pipeline().pass(pass(2, 8)).export(Safetensors::with_layout(Layout::Dense)))
                .unwrap()
                .path
        )["t.weight"],
        few
    );
    let random = Tensor::random(DType::BF16, &[64, 64], 1).values();
    let pruned: Vec<f64> = random.iter().enumerate().map(|(i, v)| if i % 3 == 0 { 0.0 } else { *v }).collect();
    let pruned = Tensor::floats(DType::BF16, &[64, 64], &pruned);
    let dense = desk
        .run(&desk.weights(&[("t.weight".to_owned(), pruned.clone())].into()), pipeline().pass(pass(4, 64)).export(Safetensors::with_layout(Layout::Dense)))
        .unwrap();
    assert!(read(&dense.path)["t.weight"].values().iter().zip(pruned.values()).all(|(now, before)| before != 0.0 || *now == 0.0));
}

#[test]
fn the_folder_describes_its_format_and_is_rejected_by_other_libraries() {
    let desk = Desk::new();
    let output = desk.run(&desk.pico(DType::BF16, 1), pipeline().pass(Palettize { bits: 4, group_size: 16, ..Palettize::default() })).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(output.path.join("config.json")).unwrap()).unwrap();
    assert!(config["model_type"].as_str().unwrap().starts_with("compress-"));
    let described = &config["quantization_config"];
    assert_eq!((described["quant_method"].as_str(), described["layout"].as_str()), (Some("compress"), Some("palettes")));
    assert_eq!(described["palettes"][0]["bits"], 4);
    assert!(output.report.size.after.bytes < output.report.size.before.bytes * 2 / 3);
    assert!(output.report.notes.iter().any(|note| note.contains("bits per value")));
}

#[test]
fn unsupported_weights_are_rejected_by_name() {
    let desk = Desk::new();
    let run = |tensor: Tensor, pass: Palettize| {
        let input = desk.weights(&[("t.weight".to_owned(), tensor)].into());
        pipeline().pass(pass).build().and_then(|pipeline| pipeline.run(compress::Model::open(input)?, desk.place())).map(drop).unwrap_err().to_string()
    };
    let one = || Tensor::random(DType::F32, &[64, 64], 3);
    let nan = Tensor::floats(DType::F32, &[64, 64], &[vec![f64::NAN], vec![0.5; 4095]].concat());
    assert!(run(nan, pass(4, 8)).contains("`t.weight`: contains infinite or NaN values"));
    let wide = Tensor::floats(DType::F64, &[64, 64], &[1e100; 4096]);
    assert!(run(wide, pass(4, 8)).contains("or values outside of the range of f32, which a palette cannot represent"));
    for (group, rows) in [(1, "for 1 row would"), (4, "for 4 rows would"), (-1, "for all rows would")] {
        let error = run(Tensor::random(DType::F32, &[4, 4], 3), pass(8, group));
        assert!(error.contains(rows) && error.contains("would not be smaller"), "{error}");
    }
    assert!(run(one(), pass(1, 8)).contains("2 to 8"));
    assert!(run(one(), pass(9, 8)).contains("2 to 8"));
    assert!(run(one(), pass(4, 0)).contains("group_size"));
    assert!(run(one(), pass(4, -2)).contains("group_size"));
    assert!(run(Tensor::new(DType::I8, &[4, 4], vec![1; 16]), pass(4, 8)).contains("needs F16"));
    let samples = Palettize { importance: InputImportance::Activation, ..pass(4, 8) };
    assert!(run(one(), samples).contains("calibration"));
    // A second palettization is rejected.
    let twice = desk.run(&desk.weights(&[("t.weight".to_owned(), one())].into()), pipeline().pass(pass(4, 8))).unwrap();
    let error = desk.run(&twice.path, pipeline().pass(pass(4, 8))).map(drop).unwrap_err().to_string();
    assert!(error.contains("is already palette4 of 8 rows"), "{error}");
}

#[test]
fn files_with_inconsistent_palettes_are_rejected() {
    let desk = Desk::new();
    let input = desk.weights(&[("t.weight".to_owned(), Tensor::random(DType::F32, &[64, 64], 3))].into());
    let tensors = read(&desk.run(&input, pipeline().pass(pass(4, 8))).unwrap().path);
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut changed = tensors.clone();
        change(&mut changed);
        compress::Model::open(desk.weights(&changed)).map(drop).unwrap_err().to_string()
    };
    let cut = |name: &'static str, shape: &'static [usize]| {
        move |tensors: &mut Tensors| {
            let tensor = tensors.get_mut(name).unwrap();
            let size = tensor.dtype.bitsize() / 8;
            *tensor = Tensor::new(tensor.dtype, shape, vec![0; shape.iter().product::<usize>() * size]);
        }
    };
    assert!(refused(&cut("t.weight_palette", &[8, 15])).contains("palettes of 15 values, expected 4 to 256 (2 to 8 bits)"));
    assert!(refused(&cut("t.weight_palette", &[65, 16])).contains("[65, 16] do not fit a weight of shape [64, 64]"));
    assert!(refused(&cut("t.weight_packed", &[64, 7])).contains("indices I32 [64, 7] and palettes"));
    assert!(refused(&cut("t.weight_shape", &[2])).contains("expected two dimensions and a valid `weight_shape`"));
    assert!(refused(&|tensors| drop(tensors.remove("t.weight_shape"))).contains("without `weight_shape`"));
}

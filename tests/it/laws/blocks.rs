//! Property: quantized weights of every format have the same elements in blocks of any unit, and every block
//! except the last is a multiple of it. Groups and blocks of other tools may end with a shorter one, which
//! is read by its definition.

use std::path::{Path, PathBuf};

use compress::export::{Layout, Safetensors};
use compress::pass::{Palettize, PruneUnstructured, Quantize, QuantizeDynamic, Step};
use compress_core::store::{Encoding, Granularity, Weight};
use compress_engine::model::Model;
use serde_json::{Value, json};

use crate::common::{DType, Desk, Tensor, Tensors, all, pipeline, read};

/// Elements per row. A block of default size has 170 rows, which is a multiple of few units.
const ROW: usize = 768;

/// Folder of a weight of 400 rows after these passes.
fn written(desk: &Desk, steps: Vec<Step>, layout: Layout) -> PathBuf {
    let input = desk.weights(&Tensors::from([("a.weight".into(), Tensor::random(DType::F32, &[400, ROW], 1))]));
    desk.run(&input, pipeline().passes(steps).export(Safetensors::with_layout(layout))).unwrap().path
}

fn quantize(scheme: &str) -> Step {
    serde_json::from_value::<Quantize>(json!({ "scheme": scheme, "observer": "minmax", "targets": ["*"] })).unwrap().into()
}

/// Random words.
fn words(shape: [usize; 2]) -> Tensor {
    let word = |at: usize| (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    Tensor::from_bits(DType::I32, &shape, &(0..shape[0] * shape[1]).map(word).collect::<Vec<_>>())
}

/// Folder of a weight in the format of another tool, with three groups per row.
fn foreign(desk: &Desk, rows: usize, (values, zeros): (Tensor, Tensor), is_ordered: bool, config: Value) -> PathBuf {
    let scales: Vec<f64> = (0..3 * rows).map(|at| (at % 7 + 1) as f64 / 64.0).collect();
    let scales = Tensor::floats(DType::F16, &[3, rows], &scales);
    let mut tensors = Tensors::from([("a.qweight".into(), values), ("a.qzeros".into(), zeros), ("a.scales".into(), scales)]);
    if !is_ordered {
        let groups: Vec<u64> = (0..ROW as u64).map(|at| at * 7 % 3).collect();
        tensors.insert("a.g_idx".into(), Tensor::from_bits(DType::I32, &[ROW], &groups));
    }
    let folder = desk.weights(&tensors);
    std::fs::write(folder.join("config.json"), json!({ "model_type": "llama", "quantization_config": config }).to_string()).unwrap();
    folder
}

/// The values of a weight visited by `unit`, and the sizes of its blocks.
fn blocks(weight: &Weight, unit: usize) -> (Vec<f32>, Vec<usize>) {
    let (mut values, mut sizes) = (Vec::new(), Vec::new());
    weight
        .visit(unit, &mut |block| {
            let (at, size) = (values.len(), block.now.elements());
            values.resize(at + size, 0f32);
            assert!(block.now.decode(0, &mut values[at..]));
            sizes.push(size);
            Ok(())
        })
        .unwrap();
    (values, sizes)
}

/// Checks the weight of a folder, and returns whether it is quantized.
fn check(case: &str, folder: &Path) -> bool {
    let model = Model::open(folder).unwrap();
    let weight = model.weights.get("a.weight").unwrap();
    let (expected, _) = blocks(weight, 1);
    assert_eq!(expected.len(), weight.elements(), "{case}");
    // Rows of an ONNX block, of a head and of an FP8 block, and more than all rows.
    for unit in [96, ROW, 3 * ROW, 80 * ROW, 128 * ROW, 2 * weight.elements() + 1] {
        let (values, sizes) = blocks(weight, unit);
        assert!(values == expected, "{case}: other values by {unit}");
        assert!(sizes[..sizes.len() - 1].iter().all(|size| size.is_multiple_of(unit)), "{case}: blocks of {sizes:?} by {unit}");
    }
    weight.encoding != Encoding::Dense
}

#[test]
fn blocks_of_quantized_weights_are_multiples_of_the_unit() {
    let desk = Desk::new();
    for scheme in ["W8A8", "W8A16", "W4A16", "W4A16-ASYM", "W3A16-ASYM", "FP8-DYNAMIC", "FP8-BLOCK", "NVFP4A16", "MXFP6A16", "MXFP8A16"] {
        assert!(check(scheme, &written(&desk, vec![quantize(scheme)], Layout::Auto)), "{scheme}");
    }
    let dynamic: QuantizeDynamic = serde_json::from_value(json!({ "granularity": "tensor", "targets": ["*"] })).unwrap();
    assert!(check("one scale", &written(&desk, vec![dynamic.into()], Layout::Auto)));
    let palettes = Palettize { targets: all(), ..Palettize::default() };
    assert!(check("palettes", &written(&desk, vec![palettes.into()], Layout::Auto)));
    let pruned = PruneUnstructured { targets: all(), ..PruneUnstructured::default() };
    let sparse = written(&desk, vec![pruned.into(), quantize("W8A8")], Layout::Sparse);
    assert!(read(&sparse).contains_key("a.weight.values") && check("sparse", &sparse));
    // More rows than are transposed at a time.
    let (rows, config) = (1304, json!({ "quant_method": "gptq", "bits": 4, "sym": false, "checkpoint_format": "gptq_v2" }));
    let gptq = || (words([ROW / 8, rows]), words([3, rows / 8]));
    assert!(check("GPTQ", &foreign(&desk, rows, gptq(), true, config.clone())));
    assert!(!check("GPTQ with groups out of order", &foreign(&desk, rows, gptq(), false, config)));
    let config = json!({ "quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": true });
    assert!(check("AWQ", &foreign(&desk, rows, (words([ROW, rows / 8]), words([3, rows / 8])), true, config)));
}

/// Code of an element of the files below.
fn code(output: usize, input: usize) -> usize {
    (3 * input + 5 * output) % 16
}

/// Scale of a group or a block of the files below.
fn scale(at: usize) -> f64 {
    (at % 7 + 1) as f64 / 16.0
}

/// Eight codes in a word, the first one in the low bits.
fn packed(codes: impl Iterator<Item = usize>) -> u64 {
    codes.enumerate().fold(0, |word, (at, code)| word | ((code as u64) << (4 * at)))
}

/// Folder of a symmetric GPTQ or AWQ weight of 8 outputs.
fn grouped(desk: &Desk, row: usize, groups: usize, order: Option<&[usize]>, config: Value) -> PathBuf {
    let (values, zeros) = if config["quant_method"] == "awq" {
        let words: Vec<u64> = (0..row).map(|input| packed([0, 2, 4, 6, 1, 3, 5, 7].into_iter().map(|output| code(output, input)))).collect();
        (Tensor::from_bits(DType::I32, &[row, 1], &words), 0x8888_8888)
    } else {
        let words: Vec<u64> = (0..row).map(|at| packed((0..8).map(|input| code(at % 8, at / 8 * 8 + input)))).collect();
        (Tensor::from_bits(DType::I32, &[row / 8, 8], &words), 0x7777_7777)
    };
    let scales: Vec<f64> = (0..8 * groups).map(|at| scale(at / 8)).collect();
    let mut tensors = Tensors::from([
        ("a.qweight".into(), values),
        ("a.qzeros".into(), Tensor::from_bits(DType::I32, &[groups, 1], &vec![zeros; groups])),
        ("a.scales".into(), Tensor::floats(DType::F16, &[groups, 8], &scales)),
    ]);
    if let Some(order) = order {
        let order: Vec<u64> = order.iter().map(|group| *group as u64).collect();
        tensors.insert("a.g_idx".into(), Tensor::from_bits(DType::I32, &[row], &order));
    }
    let folder = desk.weights(&tensors);
    std::fs::write(folder.join("config.json"), json!({ "model_type": "llama", "quantization_config": config }).to_string()).unwrap();
    folder
}

/// The values and the encoding of the weight of a folder.
fn opened(folder: &Path) -> (Vec<f32>, Encoding) {
    let model = Model::open(folder).unwrap();
    let weight = model.weights.get("a.weight").unwrap();
    (weight.floats("a.weight").unwrap(), weight.encoding.clone())
}

fn granularity(encoding: &Encoding) -> Option<Granularity> {
    match encoding {
        Encoding::Quantized(spec) => Some(spec.granularity),
        Encoding::Dense => None,
    }
}

/// If rows are not a multiple of `group_size`, the last group has fewer inputs, with `g_idx` or without.
#[test]
fn the_last_group_of_gptq_and_awq_may_be_short() {
    let desk = Desk::new();
    let config = |method: &str, size: i64| match method {
        "awq" => json!({ "quant_method": method, "bits": 4, "group_size": size, "version": "gemm", "zero_point": false }),
        _ => json!({ "quant_method": method, "bits": 4, "group_size": size, "sym": true }),
    };
    let consecutive = |row: usize, size: usize| (0..row).map(|input| input / size).collect::<Vec<_>>();
    let reversed: Vec<usize> = consecutive(320, 128).into_iter().rev().collect();
    for (method, row, size, order, expected) in [
        ("gptq", 192, 128, None, Some(Granularity::Group(64))),
        ("gptq", 320, 128, None, Some(Granularity::Group(64))),
        ("gptq", 320, 128, Some(consecutive(320, 128)), Some(Granularity::Group(64))),
        ("gptq", 320, 128, Some(reversed), None),
        ("gptq", 256, 128, None, Some(Granularity::Group(128))),
        ("gptq", 64, 128, None, Some(Granularity::Channel)),
        // Groups of 8 inputs would need more bytes for scales than floats.
        ("gptq", 40, 24, None, None),
        ("awq", 192, 128, None, Some(Granularity::Group(64))),
    ] {
        let groups = order.clone().unwrap_or_else(|| consecutive(row, size));
        let input = grouped(&desk, row, row.div_ceil(size), order.as_deref(), config(method, size as i64));
        let value = |at: usize| ((code(at / row, at % row) as f64 - 8.0) * scale(groups[at % row])) as f32;
        let values: Vec<f32> = (0..8 * row).map(value).collect();
        let (found, encoding) = opened(&input);
        assert!(found == values, "{method} {row} {size}");
        assert_eq!(granularity(&encoding), expected, "{method} {row} {size}");
        // The written folder has the same values.
        let (again, encoding) = opened(&desk.run(&input, pipeline()).unwrap().path);
        assert!(again == values && granularity(&encoding) == expected, "{method} {row} {size}: written");
    }
    // Rows in one group.
    let (_, encoding) = opened(&grouped(&desk, 64, 1, None, config("gptq", -1)));
    assert_eq!(granularity(&encoding), Some(Granularity::Channel));
    for (groups, size, text) in [(2, 64, "`group_size` of 64"), (2, -1, "`group_size` of -1"), (2, 256, "`group_size` of 256")] {
        let error = Model::open(grouped(&desk, 192, groups, None, config("gptq", size))).unwrap_err().to_string();
        assert!(error.contains("`a.weight`: has 2 groups of scales for 192 inputs") && error.contains(text), "{error}");
    }
    let error = Model::open(grouped(&desk, 192, 2, None, config("gptq", 0))).unwrap_err().to_string();
    assert!(error.contains("`group_size` of 0"), "{error}");
    let ordered = |groups: usize, is_ordered: bool| {
        let mut config = config("gptq", 192 / groups as i64);
        config["desc_act"] = json!(is_ordered);
        Model::open(grouped(&desk, 192, groups, None, config)).map(|_| ())
    };
    let error = ordered(2, true).unwrap_err().to_string();
    assert!(error.contains("tensor `a.g_idx`: has 2 groups of inputs in the order of `desc_act`"), "{error}");
    assert!(ordered(1, true).is_ok() && ordered(2, false).is_ok());
    // GPTQModel's rules for single layers take precedence over the general size.
    let mut dynamic = config("gptq", 128);
    dynamic["dynamic"] = json!({ "+:a": { "group_size": 96 } });
    let (_, encoding) = opened(&grouped(&desk, 192, 2, None, dynamic));
    assert_eq!(granularity(&encoding), Some(Granularity::Group(96)));
}

/// The last block of compressed-tensors may have fewer rows and fewer columns.
#[test]
fn the_last_block_may_have_fewer_columns() {
    let desk = Desk::new();
    let [rows, row]: [usize; 2] = [192, 320];
    for (name, [high, wide], narrow) in [("float", [128, 128], 64), ("int", [64, 48], 16)] {
        let [down, across] = [rows.div_ceil(high), row.div_ceil(wide)];
        let scales = Tensor::floats(DType::F32, &[down, across], &(0..down * across).map(scale).collect::<Vec<_>>());
        // 1 as E4M3 is 0x38.
        let code = |at: usize| if name == "float" { 1.0 } else { f64::from((at % 200) as u8) - 100.0 };
        let bits = |at: usize| if name == "float" { 0x38 } else { u64::from(code(at) as i8 as u8) };
        let dtype = if name == "float" { DType::F8_E4M3 } else { DType::I8 };
        let values = Tensor::from_bits(dtype, &[rows, row], &(0..rows * row).map(bits).collect::<Vec<_>>());
        let input = desk.weights(&Tensors::from([("a.weight".into(), values), ("a.weight_scale".into(), scales)]));
        let weights = json!({ "num_bits": 8, "type": name, "symmetric": true, "strategy": "block", "block_structure": [high, wide] });
        let format = if name == "float" { "float-quantized" } else { "int-quantized" };
        let group = json!({ "targets": ["Linear"], "weights": weights, "input_activations": null, "format": format });
        let config =
            json!({ "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "config_groups": { "group_0": group } });
        std::fs::write(input.join("config.json"), json!({ "model_type": "llama", "quantization_config": config }).to_string()).unwrap();
        let expected: Vec<f32> = (0..rows * row).map(|at| (code(at) * scale(at / row / high * across + at % row / wide)) as f32).collect();
        let (found, encoding) = opened(&input);
        assert!(found == expected, "{name}");
        assert_eq!(granularity(&encoding), Some(Granularity::Block([high, narrow])), "{name}");
        let dense = desk.run(&input, pipeline().export(Safetensors::with_layout(Layout::Dense))).unwrap();
        assert!(opened(&dense.path).0 == expected, "{name}: dense");
        assert!(opened(&desk.run(&input, pipeline()).unwrap().path).0 == expected, "{name}: written");
    }
}

/// A block of several rows has one zero point, as it has one scale.
#[test]
fn blocks_of_rows_have_zero_points() {
    let desk = Desk::new();
    let [rows, row, high, wide]: [usize; 4] = [40, 64, 16, 32];
    let [down, across] = [rows.div_ceil(high), row / wide];
    let code = |at: usize| f64::from((at % 200) as u8) - 100.0;
    let zero = |at: usize| at as f64 - 3.0;
    let integers = |shape: &[usize], value: &dyn Fn(usize) -> f64| {
        let bits: Vec<u64> = (0..shape.iter().product()).map(|at| u64::from(value(at) as i8 as u8)).collect();
        Tensor::from_bits(DType::I8, shape, &bits)
    };
    let input = desk.weights(&Tensors::from([
        ("a.weight".into(), integers(&[rows, row], &code)),
        ("a.weight_scale".into(), Tensor::floats(DType::F32, &[down, across], &(0..down * across).map(scale).collect::<Vec<_>>())),
        ("a.weight_zero_point".into(), integers(&[down, across], &zero)),
    ]));
    let weights = json!({ "num_bits": 8, "type": "int", "symmetric": false, "strategy": "block", "block_structure": [high, wide] });
    let group = json!({ "targets": ["Linear"], "weights": weights, "input_activations": null, "format": "int-quantized" });
    let config = json!({
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "config_groups": { "group_0": group }
    });
    std::fs::write(input.join("config.json"), json!({ "model_type": "llama", "quantization_config": config }).to_string()).unwrap();
    let block = |at: usize| at / row / high * across + at % row / wide;
    let expected: Vec<f32> = (0..rows * row).map(|at| ((code(at) - zero(block(at))) * scale(block(at))) as f32).collect();
    let written = desk.run(&input, pipeline()).unwrap().path;
    for folder in [&input, &written] {
        let (found, encoding) = opened(folder);
        assert!(found == expected, "{}", folder.display());
        assert_eq!(granularity(&encoding), Some(Granularity::Block([high, wide])));
    }
}

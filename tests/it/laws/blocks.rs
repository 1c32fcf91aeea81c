//! Property: quantized weights of every format have the same elements in blocks of any unit, and every block
//! except the last is a multiple of it.

use std::path::{Path, PathBuf};

use compress::export::{Layout, Safetensors};
use compress::pass::{Palettize, PruneUnstructured, Quantize, QuantizeDynamic, Step};
use compress_core::store::{Encoding, Weight};
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

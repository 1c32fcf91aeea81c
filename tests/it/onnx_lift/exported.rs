//! Models from PyTorch's exporter (`scripts/goldens exported`).

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::Model;

use crate::common::nodes::{close, executed, in_runtime, numbers};

const OPS: [&str; 9] = ["Attention", "Rotary", "SplitHeads", "MergeHeads", "Softmax", "Positions", "Prepend", "Select", "Opaque"];

/// Numbers of ops by model. The opaque subgraphs are masks, and the token types of BERT. The three parts of
/// the layer of GPT-2 and GPT-NeoX are outputs of one node, which is not changed.
const MODELS: [(&str, [usize; 9]); 6] = [
    ("bert", [1, 0, 3, 1, 0, 1, 0, 0, 2]),
    ("llama", [1, 2, 3, 1, 0, 0, 0, 0, 1]),
    ("gpt2", [1, 0, 3, 1, 0, 1, 0, 0, 1]),
    ("qwen2", [1, 2, 3, 1, 0, 0, 0, 0, 1]),
    ("gpt_neox", [1, 2, 1, 1, 0, 0, 0, 0, 1]),
    ("vit", [1, 0, 3, 1, 0, 0, 1, 1, 0]),
];

#[test]
fn attention_and_positions_of_exported_models_are_ops() {
    for (name, wanted) in MODELS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exported").join(format!("{name}.onnx"));
        let model = Model::open(&path).unwrap();
        let graph = model.graph().unwrap();
        let found = OPS.map(|op| graph.nodes().iter().filter(|node| node.op.name() == op).count());
        assert_eq!(found, wanted, "{name}: {graph}");
        // Of another length than the traced ones, with padding.
        let (rows, length) = (2, 11);
        let whole = |values: Vec<i64>| Tensor::from_vec(values, (rows, length), &Device::Cpu).unwrap();
        let tokens = whole((0..rows * length).map(|at| (at * 7 % 40) as i64).collect());
        let mask = whole((0..rows * length).map(|at| i64::from(at < rows * length - 3)).collect());
        let images = Tensor::from_vec(numbers(3 * 3 * 16 * 16, 0.2), (3, 3, 16, 16), &Device::Cpu).unwrap();
        let all = [("input_ids", tokens), ("attention_mask", mask), ("pixel_values", images)];
        let is_input = |input: &str| graph.inputs().any(|(_, value)| value.name == input);
        let inputs: BTreeMap<String, Tensor> = all.into_iter().filter(|(input, _)| is_input(input)).map(|(input, values)| (input.to_owned(), values)).collect();
        let ours = executed(model, &inputs).unwrap();
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(name, &ours, &in_runtime(&path, &inputs));
        }
    }
}

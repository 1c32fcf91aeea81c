//! Models from PyTorch's exporter (`scripts/goldens exported`).

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::Model;

use crate::common::nodes::{close, executed, in_runtime};

#[test]
fn attention_and_rotary_embeddings_of_exported_models_are_ops() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    // Llama has rotary embeddings. The three parts of GPT-2 are outputs of one node, which is not
    // changed.
    for (name, attention, rotary, split) in [("bert", 1, 0, 3), ("llama", 1, 2, 3), ("gpt2", 1, 0, 3)] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exported").join(format!("{name}.onnx"));
        let model = Model::open(&path).unwrap();
        let graph = model.graph().unwrap();
        let count = |op: &str| graph.nodes().iter().filter(|node| node.op.name() == op).count();
        let found = ["Attention", "Rotary", "SplitHeads", "MergeHeads", "Softmax"].map(count);
        assert_eq!(found, [attention, rotary, split, 1, 0], "{name}: {graph}");
        // Of another length than the traced ones, with padding.
        let (rows, length) = (2, 11);
        let whole = |values: Vec<i64>| Tensor::from_vec(values, (rows, length), &Device::Cpu).unwrap();
        let tokens = whole((0..rows * length).map(|at| (at * 7 % 40) as i64).collect());
        let mask = whole((0..rows * length).map(|at| i64::from(at < rows * length - 3)).collect());
        let inputs: BTreeMap<String, Tensor> = [("input_ids".to_owned(), tokens), ("attention_mask".to_owned(), mask)].into();
        close(name, &executed(model, &inputs).unwrap(), &in_runtime(&path, &inputs));
    }
}

//! Every op, exported to ONNX and run in ONNX Runtime, computes the same as its evaluation.

use std::collections::BTreeMap;

use candle_core::Tensor;
use compress_core::store::writer::Piece;
use compress_graph::ir::ops::{AveragePool, BatchNorm, Pad, PadMode};
use compress_graph::ir::{Builder, Op};
use compress_onnx::runtime::{Options, Session};
use compress_onnx::{Style, draft, file};

use super::cases::Case;
use super::{cases, distance, tensors, types};

/// Runs of exported ops in ONNX Runtime, if it is available.
pub struct Runs {
    folder: Option<tempfile::TempDir>,
    count: usize,
    failures: Vec<String>,
}

impl Runs {
    pub fn new() -> Runs {
        let found = crate::common::onnxruntime::has_onnx_runtime();
        Runs { folder: found.then(|| tempfile::tempdir().unwrap()), count: 0, failures: Vec::new() }
    }

    /// Runs a sequence of ops at the first opset that supports them and at the last one. `differs`
    /// returns the error of a result.
    pub fn check(&mut self, name: &str, ops: &[Op], given: &[Tensor], differs: &dyn Fn(&Tensor) -> Option<String>) {
        let Some(folder) = &self.folder else { return };
        let mut builder = Builder::unchecked();
        let mut ids: Vec<_> = types(given).into_iter().enumerate().map(|(i, ty)| builder.input(&format!("x{i}"), ty).unwrap()).collect();
        for (index, op) in ops.iter().enumerate() {
            ids = vec![builder.node(&format!("y{index}"), op.clone(), &ids).unwrap()];
        }
        builder.output("out", ids[0]);
        let graph = builder.finish().unwrap();
        let inputs: BTreeMap<_, _> = given.iter().enumerate().map(|(i, t)| (format!("x{i}"), t.clone())).collect();
        for opset in [ops.iter().map(first_opset).max().unwrap_or(17), 21] {
            self.count += 1;
            let path = folder.path().join(format!("{}.onnx", self.count));
            let layout = file::layout(&draft(&graph, &Style { opset, ..Style::default() }, &BTreeMap::new()).unwrap(), file::LARGEST).unwrap();
            let bytes = |piece: &Piece| match piece {
                Piece::Bytes(bytes) => bytes.clone(),
                Piece::Item { .. } => panic!("{name}: nothing of it is a weight"),
            };
            std::fs::write(&path, layout[0].1.iter().flat_map(bytes).collect::<Vec<u8>>()).unwrap();
            match Session::open(&path, Options::default()).and_then(|mut session| session.run(&inputs)) {
                Ok(outputs) => self.failures.extend(differs(&outputs["out"]).map(|how| format!("{name} at opset {opset}: {how}"))),
                Err(e) => self.failures.push(format!("{name} at opset {opset}: {e}")),
            }
        }
    }

    pub fn finish(self) {
        assert!(self.failures.is_empty(), "{}:\n{}", self.failures.len(), self.failures.join("\n"));
        assert!(self.count > 100 || self.folder.is_none(), "only {} runs", self.count);
    }
}

/// The first opset that supports an op.
fn first_opset(op: &Op) -> u32 {
    match op {
        Op::Pad(Pad { mode: PadMode::Wrap, .. }) => 19,
        Op::AveragePool(AveragePool { dilation, .. }) if *dilation != 1 => 19,
        _ => 17,
    }
}

#[test]
fn every_op_is_exported_correctly() {
    let mut runs = Runs::new();
    let of_inference = |case: &&Case| !matches!(case.op, Op::BatchNorm(BatchNorm { batch: true, .. }));
    for case in cases().iter().filter(of_inference) {
        let given = tensors(case);
        let wanted = case.op.spec().eval(&given).unwrap();
        let differs = |found: &Tensor| match found.dims() == wanted.dims() {
            true => Some(distance(found, &wanted)).filter(|off| off.is_nan() || *off > 2e-5).map(|off| off.to_string()),
            false => Some(format!("{:?} for {:?}", found.dims(), wanted.dims())),
        };
        runs.check(&case.op.to_string(), std::slice::from_ref(&case.op), &given, &differs);
    }
    runs.finish();
}

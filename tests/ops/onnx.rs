//! Every op, written as ONNX and run in ONNX Runtime, computes what its evaluation does.

use std::collections::BTreeMap;

use compress::ir::ops::BatchNorm;
use compress::ir::{Builder, Op};
use compress::onnx::{Style, draft, file};
use compress::runtime::{Options, Session, library};
use compress::store::writer::Piece;

use super::cases::Case;
use super::{cases, distance, tensors, types};

#[test]
fn every_op_is_written_as_what_it_computes() {
    if let Err(error) = library() {
        eprintln!("skipped: {error}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    let of_inference = |case: &&Case| !matches!(case.op, Op::BatchNorm(BatchNorm { batch: true, .. }));
    for (index, case) in cases().iter().filter(of_inference).enumerate() {
        let given = tensors(case);
        let mut builder = Builder::unchecked();
        let ids: Vec<_> = types(&given).into_iter().enumerate().map(|(i, ty)| builder.input(&format!("x{i}"), ty).unwrap()).collect();
        let value = builder.node("y", case.op.clone(), &ids).unwrap();
        builder.output("out", value);
        let graph = builder.finish().unwrap();
        let wanted = case.op.spec().eval(&given).unwrap();
        let inputs: BTreeMap<_, _> = given.iter().enumerate().map(|(i, t)| (format!("x{i}"), t.clone())).collect();
        for opset in [17, 21] {
            let path = folder.path().join(format!("{index}-{opset}.onnx"));
            let layout = file::layout(&draft(&graph, &Style { opset, ..Style::default() }, &BTreeMap::new()).unwrap(), file::LARGEST).unwrap();
            let bytes = |piece: &Piece| match piece {
                Piece::Bytes(bytes) => bytes.clone(),
                Piece::Item { .. } => panic!("{}: nothing of it is a weight", case.op),
            };
            std::fs::write(&path, layout[0].1.iter().flat_map(bytes).collect::<Vec<u8>>()).unwrap();
            match Session::open(&path, Options::default()).and_then(|mut session| session.run(&inputs)) {
                Ok(outputs) if distance(&outputs["out"], &wanted) <= 2e-5 => {}
                Ok(outputs) => failures.push(format!("{} at opset {opset}: {}", case.op, distance(&outputs["out"], &wanted))),
                Err(e) => failures.push(format!("{} at opset {opset}: {e}", case.op)),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

//! Targets of size and latency.

use super::*;

#[test]
fn a_target_that_no_width_reaches_is_reported() {
    for (round_to, is_missed) in [(4, true), (1, false)] {
        let pass = PruneStructured { target: Some(PruningTarget::Params(0.7)), round_to, ..half(&[PrunedPart::Hidden]) };
        let done = run("llama", Pipeline::builder().pass(PruneStructured { amount: None, ..pass }));
        let found = done.report.notes.iter().any(|note| note.contains("params 0.7: 0.7") && note.contains("remains"));
        assert_eq!(found, is_missed, "{:?}", done.report.notes);
    }
}

/// The smallest widths have more than this fraction of the multiply-accumulates, but the latency is unknown.
#[test]
fn plans_do_not_refuse_a_target_of_latency() {
    let pass = PruneStructured { target: Some(PruningTarget::Latency(0.2)), amount: None, round_to: 4, ..half(&[]) };
    let pipeline = Pipeline::builder().pass(pass).build().unwrap();
    assert!(pipeline.plan(&Model::open(golden("llama")).unwrap()).unwrap().output_estimated);
}
